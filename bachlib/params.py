"""All parameters with their defaults, ranges and descriptions, and their validation."""

from datetime import datetime
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from bachlib import BachError

# Appendix A: the last 20 items of a sequence are held out; a window is 50 items of history and the next 10.
N_VALID, N_TEST = 10, 10
N_HIST, N_NEXT = 50, 10
MIN_ITEMS = 1 + N_NEXT + N_VALID + N_TEST  # the shortest sequence that gives a window, with one item of history

Share = Annotated[float, Field(ge=0, lt=1)]
Seed = Annotated[int, Field(ge=0, lt=2**64)]  # what torch takes
Kernel = Literal["power-spherical", "von-mises-fisher"]
ServeBy = Literal["density", "max", "softmax"]
Role = Literal["user", "item", "time", "rating", "title", "genre"]


class Params(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _fits_into_64_bits(cls, value: Any) -> Any:
        if isinstance(value, int) and value >= 2**64:
            raise ValueError("should be less than 2^64")
        return value


P = TypeVar("P", bound=Params)


class PrepareParams(Params):
    """The pipeline of appendix A; the defaults are the paper's. Where the paper says nothing, they are ours."""

    min_rating: float = Field(4.0, description="lowest liked rating; without ratings: all events")
    min_items: int = Field(80, ge=MIN_ITEMS, description="users with fewer liked items are dropped")
    max_items: int = Field(50_000, ge=1, description="size of the catalogue: the most frequent items")
    catalogue: Literal["liked", "kept"] = Field("liked", description="items that anybody likes, or only kept users")
    max_users: int = Field(100_000, ge=1, description="number of users at most, drawn with `seed`")
    seed: Seed = Field(0, description="seed of the draw of users and of shuffled ties")
    ties: Literal["log", "item", "shuffle", "basket"] = Field(
        "log", description="order of a user's events with one time: log, item id, shuffled, or shuffled and never cut"
    )
    items: Literal["product", "type"] = Field("product", description="for complete-journey: products, or their types")
    split: Literal["per-user", "global-time"] = Field(
        "per-user", description="held out: a user's last items, or what all users liked from two dates on"
    )
    test_share: float = Field(
        0.1, gt=0, lt=0.5, description="global-time: share of the likes in the test period, and in validation before it"
    )
    dates: list[str] | None = Field(
        None, description="global-time: first days of validation and of test, as in 2000-12-31; None: by test_share"
    )
    columns: dict[Role, str] | None = Field(None, description="for csv and parquet: the names of your columns")
    encoding: str = Field("utf-8", description="encoding of the log, any name that Python knows")
    time_format: str | None = Field(None, description="for csv and parquet: format of dates, as in strptime")
    on_bad_rows: Literal["stop", "skip"] = Field("stop", description="unreadable rows: stop, or skip and count them")

    @model_validator(mode="after")
    def _dates_belong_to_a_global_split(self) -> Self:
        if self.split == "per-user" and (self.test_share != 0.1 or self.dates):
            raise ValueError('test_share and dates belong to split="global-time"; split is "per-user"')
        try:
            days = [datetime.fromisoformat(date) for date in self.dates or []]
        except ValueError:
            days = []
        if self.dates is not None and (len(days) != 2 or days[0] >= days[1] or self.test_share != 0.1):
            wanted = "two days of the form 2000-12-31, of validation and of test, and no test_share"
            raise ValueError(f"dates should be {wanted}; got {self.dates}")
        return self


class WorldParams(Params):
    """The planted world. The defaults are the teaching scale: prepared in seconds, too diverse for one vector."""

    n_users: int = Field(2_000, ge=2, description="number of users")
    n_items: int = Field(4_800, ge=10, description="number of items")
    n_interests: int = Field(16, ge=2, description="number of planted directions on the sphere, one genre each")
    d: int = Field(16, ge=2, description="dimension of the planted sphere")
    interests_per_user: float = Field(4.0, gt=0, description="π_u ~ Dirichlet(this / n_interests, …)")
    stickiness: Share = Field(0.7, description="probability that the next event stays on the interest")
    width: float = Field(0.5, ge=0.01, lt=1.5, description="typical angle between an item and its interest, in radians")
    taste: float = Field(0.25, ge=0.01, le=3, description="angle to a user's taste at which weights halve, in radians")
    zipf: float = Field(0.6, ge=0, le=5, description="Zipf exponent of popularity inside an interest")
    mean_events: float = Field(150.0, ge=20, description="mean number of liked events per user")
    disliked: Share = Field(0.15, description="share of events with random items, rated below 4")
    repeated: Share = Field(0.05, description="share of events that repeat an earlier item")
    seed: Seed = Field(0, description="seed of the world")

    @model_validator(mode="after")
    def _every_interest_has_an_item(self) -> Self:
        if self.n_items < self.n_interests:
            raise ValueError(f"n_items should be at least n_interests ({self.n_interests}), got {self.n_items}")
        return self


class ModelParams(Params):
    """Towers and objective (appendix B). The defaults are the paper's; where the paper is silent, they are ours."""

    k: int = Field(8, ge=1, description="number of heads; methods with one vector have 1, …-hybrid the sum")
    d: int = Field(64, ge=2, description="dimension of every embedding and rank of PureSVD")
    tau: float = Field(0.07, gt=0, le=10, description="temperature τ of the softmax, fixed")
    candidates: Literal["list", "set"] = Field(
        "list", description="an item among the candidates several times counts as often (list) or once (set)"
    )
    kernel: Kernel | None = Field(None, description="kernel of BACH's posterior; None: the kernel of the method")
    seed: Seed = Field(0, description="seed of the initial weights")
    n_hist: int = Field(N_HIST, ge=1, description="number of history items the encoder reads, the last ones")
    history: Literal["tower", "frozen"] = Field("tower", description="history tokens: item tower or frozen PureSVD")
    svd_on: Literal["train", "all"] = Field("train", description="PureSVD on training prefixes, or all (leaks tests)")
    item_width: int = Field(128, ge=1, description="hidden width of the item tower's residual MLP")
    width: int | None = Field(None, ge=4, description="width of the CLS Transformers; None: d")
    attention_heads: int = Field(4, ge=1, description="attention heads of the CLS Transformers; divides the width")
    ff: int = Field(128, ge=1, description="feed-forward width of the CLS Transformers")
    dropout: Share = Field(0.1, description="dropout of the Transformers")
    cls_scale: float = Field(1.0, gt=0, description="CLS tokens start as N(0, this²); if small, heads start parallel")
    pi: Literal["gate", "table", "uniform"] = Field(
        "gate", description="π_u from the gating tower, a free row per user, or 1/k for every head"
    )
    posterior: Literal["spherical", "contrastive", "prior"] = Field(
        "spherical", description="γ of the ELBO: eq. 19 (the paper), the model's own posterior (EM), or π_u"
    )
    through_gamma: bool = Field(True, description="differentiate the ELBO through γ (the paper), or hold γ fixed")
    temper: float = Field(1.0, ge=0, le=100, description="weight of the entropy term of the ELBO")
    kappa: Literal["net", "shared", "fixed"] = Field(
        "net", description="κ of each head from the κ-net (the paper), one learnt κ, or 1/τ"
    )
    context: Literal["none", "gate", "encoder", "both"] = Field(
        "none", description="what reads the context of the data set (see Dataset.with_context): gate, encoder or both"
    )
    k_shared: int = Field(64, ge=1, description="…-hybrid: prototypes that all users share, in place of k")
    k_own: int = Field(4, ge=0, description="…-hybrid: heads of the user's own beside them; with 0 it is …-global")
    residual: float = Field(0.5, ge=0, le=1, description="…-residual: sine of the largest angle to the prototype")
    # differences of public code, off by default (see extractors)
    capsule_iterations: int = Field(3, ge=1, description="mind, comirec-dr: iterations of capsule routing")
    capsule_softmax: Literal["interests", "positions"] = Field(
        "interests", description="mind, comirec-dr: axis of the routing softmax; four popular ports use positions"
    )
    mind_relu: bool = Field(False, description="mind: ReLU layer after the capsules, as in ComiRec's code")
    mind_power: float = Field(1.0, gt=0, description="mind: power of label-aware attention")
    sa_positions_in_values: bool = Field(False, description="comirec-sa: add positions to the values too")
    remi_beta: float = Field(1.0, ge=0, le=100, description="remi: β of the hard negatives; published: 10, 1 or 0.1")
    remi_lambda: float = Field(100.0, ge=0, description="remi: weight λ of the routing regulariser")
    remi_batch: int = Field(
        128, ge=1, description="remi: λ counts so many times, as in the published sum over batches of 128; 1: a mean"
    )
    maxmf_loss: Literal["hinge", "warp", "bpr"] = Field(
        "hinge", description="maxmf: margin ranking loss, the same weighted by rank, or logistic"
    )
    sasrec_blocks: int = Field(2, ge=1, description="sasrec: number of blocks")
    sasrec_heads: int = Field(1, ge=1, description="sasrec: attention heads; divides d")
    sasrec_norm_keys: bool = Field(False, description="sasrec: keys and values from LN(x), as in common Transformers")

    @model_validator(mode="after")
    def _every_switch_has_an_effect(self) -> Self:
        if self.posterior == "prior" and not self.through_gamma and self.pi != "uniform":
            raise ValueError("posterior='prior' with through_gamma=False would never train π_u; use through_gamma=True")
        if self.kappa == "shared" and self.posterior != "spherical":
            raise ValueError(f"kappa='shared' with posterior={self.posterior!r}: only the spherical posterior trains κ")
        if self.temper != 1 and not self.through_gamma:
            raise ValueError(f"temper={self.temper} with through_gamma=False: a fixed γ has no entropy to train")
        return self


class TrainParams(Params):
    """Algorithm 1 and appendix B."""

    epochs: int = Field(200, ge=1, description="largest number of epochs; the paper's is 200, for Taobao 50")
    batch_size: int = Field(512, ge=1, description="windows per step")
    n_negatives: int = Field(2_048, ge=0, description="uniform random negatives per step, shared by the batch")
    targets: Literal["one", "all"] = Field(
        "one", description="targets of a window: one of its next ten items, drawn (the paper), or the mean over all ten"
    )
    false_negatives: Literal["mask", "next"] = Field(
        "mask", description="a row leaves copies of its target out of its candidates, or all of its next ten items"
    )
    log_q: bool = Field(False, description="correct for how often each candidate is drawn (see `log_q` in `onepass`)")
    learning_rate: float = Field(1e-3, gt=0, description="learning rate of Adam; no weight decay, schedule or clipping")
    seed: Seed = Field(0, description="seed of windows, targets, negatives and dropout")
    valid_every: int = Field(5, ge=1, description="epochs between two validations; the last epoch is always validated")
    patience: int = Field(10, ge=1, description="stop after this many validations without a better AUPRC")
    valid_users: int = Field(10_000, ge=1, description="number of validation users at most, drawn with `seed`")
    log_steps: int = Field(0, ge=0, description="steps per row of the history; 0: one row per epoch")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU if there is one")
    precision: Literal["auto", "float32", "mixed"] = Field("auto", description="auto: mixed (bfloat16) on CUDA only")
    checkpoint_seconds: float = Field(30.0, ge=0, description="seconds between resume states; every epoch writes one")

    @model_validator(mode="after")
    def _a_row_has_other_candidates(self) -> Self:
        if self.batch_size == 1 and not self.n_negatives:
            raise ValueError(
                "batch_size=1 with n_negatives=0: a row has no candidate but its own positive, so it learns nothing"
            )
        return self


LATER = (  # the first version did not have these
    "candidates", "catalogue", "context", "items", "targets", "posterior", "through_gamma", "temper", "kappa", "log_q",
    "false_negatives", "split", "test_share", "dates", "remi_beta", "remi_lambda", "remi_batch", "maxmf_loss",
    "k_shared", "k_own",
)  # fmt: skip
ELBO_ONLY = ("kernel", "pi", "posterior", "through_gamma", "temper", "kappa")  # parameters of methods with a kernel


def noted(params: Params) -> dict[str, Any]:
    """The parameters as a run, an index or the name of a folder notes them.

    Those that came later are left out at their default, so that what an earlier version made stays the same thing.
    """
    usual = type(params).model_fields
    return {name: x for name, x in params.model_dump().items() if name not in LATER or x != usual[name].default}


def validated(model: type[P], values: dict[str, Any], where: str) -> P:
    """`model(**values)`, with an error that names each invalid key, its value and the allowed values."""
    try:
        return model(**values)
    except ValidationError as error:
        told = f"{where}: invalid parameters"
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                told += f"\n  {key}: not a parameter; there are {', '.join(model.model_fields)}"
            elif not key:  # a condition on several fields, whose message names them
                told += f"\n  {problem['msg'].removeprefix('Value error, ')}"
            else:
                told += f"\n  {key}: {problem['msg'].removeprefix('Value error, ')}, got {_shown(problem['input'])}"
        raise BachError(told) from None


def _shown(value: Any) -> str:
    try:
        return f"{value!r:.200}"
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
