"""Validated parameters: every knob of the workbook, its default and its range, in one place."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from bachlib import BachError

# Appendix A: the last 20 items of a sequence are held out; a window is 50 items of history and the next 10.
N_VALID, N_TEST = 10, 10
N_HIST, N_NEXT = 50, 10
MIN_ITEMS = 1 + N_NEXT + N_VALID + N_TEST  # the shortest sequence that still gives one window: one item of history

Share = Annotated[float, Field(ge=0, lt=1)]


class Params(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PrepareParams(Params):
    """The pipeline of appendix A. The defaults are the paper's, where the paper has one."""

    min_rating: float = Field(
        4.0, allow_inf_nan=False, description="liked means a rating of at least this; logs without ratings keep all"
    )
    min_items: int = Field(80, ge=MIN_ITEMS, description="users with fewer liked items are dropped")
    max_items: int = Field(50_000, ge=1, description="the catalogue keeps this many most frequent items")
    max_users: int = Field(100_000, ge=1, description="at most this many users, drawn with `seed`")
    seed: int = Field(0, ge=0, description="of the draw of users")
    ties: Literal["log", "item"] = Field("log", description="order of one user's events with the same time")
    columns: dict[Literal["user", "item", "time", "rating", "title", "genre"], str] | None = Field(
        None, description="for csv and parquet: which of your columns is which"
    )
    encoding: str = Field("utf-8", description="of the log, any name Python knows")
    time_format: str | None = Field(None, description="for csv and parquet: how dates are written, as in strptime")
    on_bad_rows: Literal["stop", "skip"] = Field("stop", description="what to do with rows that cannot be read")


class WorldParams(Params):
    """The planted world. The defaults are the teaching scale: seconds to prepare, and one vector does not serve."""

    n_users: int = Field(2_000, ge=2)
    n_items: int = Field(4_800, ge=10)
    n_interests: int = Field(16, ge=2, description="planted directions on the sphere, one genre each")
    d: int = Field(16, ge=2, description="dimension of the planted sphere")
    interests_per_user: float = Field(4.0, gt=0, description="Dirichlet(α) with α = this / n_interests in each place")
    stickiness: Share = Field(0.7, description="probability that the next event stays on the interest")
    width: float = Field(0.5, ge=0.01, lt=1.5, description="typical angle (radians) of an item to its interest")
    taste: float = Field(
        0.25,
        ge=0.01,
        le=3,
        description="angle (radians) to the own taste at which a user's weight for an item has halved",
    )
    zipf: float = Field(0.6, ge=0, le=5, description="exponent of popularity inside an interest")
    mean_events: float = Field(150.0, ge=20, description="liked events of a user, on average")
    disliked: Share = Field(0.15, description="share of events at random items, rated below 4")
    repeated: Share = Field(0.05, description="share of events that meet an earlier item again")
    seed: int = Field(0, ge=0)

    @model_validator(mode="after")
    def _every_interest_has_an_item(self) -> Self:
        if self.n_items < self.n_interests:
            raise ValueError(f"n_items should be at least n_interests ({self.n_interests}), got {self.n_items}")
        return self


class ModelParams(Params):
    """Towers and objective (appendix B). The defaults are the paper's; where it is silent, ours, with the reason."""

    k: int = Field(8, ge=1, description="heads; methods with one vector take 1")
    d: int = Field(64, ge=2, description="dimension of every embedding, and rank of PureSVD")
    tau: float = Field(0.07, gt=0, le=10, description="temperature τ of the softmax, fixed")
    kernel: Literal["power-spherical", "von-mises-fisher"] | None = Field(
        None, description="of BACH's posterior; None: what the method's name says"
    )
    seed: int = Field(0, ge=0, description="of the first weights")
    n_hist: int = Field(N_HIST, ge=1, description="items of history the encoder looks at, the last ones")
    history: Literal["tower", "frozen"] = Field(
        "tower", description="history tokens: output of the item tower with gradient, or the frozen PureSVD rows"
    )
    svd_on: Literal["train", "all"] = Field("train", description="PureSVD on training prefixes; all leaks test items")
    item_width: int = Field(128, ge=1, description="hidden width of the item tower's residual MLP")
    width: int | None = Field(None, ge=4, description="width of the Transformer; None: d")
    attention_heads: int = Field(4, ge=1, description="of the CLS Transformers; divides the width")
    ff: int = Field(128, ge=1, description="feed-forward width of the CLS Transformers")
    dropout: Share = 0.1
    cls_scale: float = Field(1.0, gt=0, description="CLS tokens start from N(0, this²); a small one starts parallel")
    pi: Literal["gate", "table"] = Field("gate", description="π_u from the gating tower, or a free row per user")
    residual: float = Field(
        0.5, ge=0, le=1, description="how far a head may leave its prototype (…-residual): sine of angle"
    )
    # known deviations of public code, off by default (see extractors)
    capsule_iterations: int = Field(3, ge=1, description="of capsule routing (mind, comirec-dr)")
    capsule_softmax: Literal["interests", "positions"] = Field("interests", description="positions: four popular ports")
    mind_relu: bool = Field(False, description="ReLU layer after the capsules, as in ComiRec's own MIND")
    mind_power: float = Field(1.0, gt=0, description="power of label-aware attention")
    sa_positions_in_values: bool = Field(False, description="comirec-sa: positions also in the values")
    sasrec_blocks: int = Field(2, ge=1)
    sasrec_heads: int = Field(1, ge=1, description="attention heads; divides d")
    sasrec_norm_keys: bool = Field(False, description="keys and values from LN(x) too, as in common Transformers")


class TrainParams(Params):
    """Algorithm 1 and appendix B."""

    epochs: int = Field(200, ge=1, description="at most; the paper's cap is 200, for Taobao 50")
    batch_size: int = Field(512, ge=1)
    n_negatives: int = Field(2_048, ge=0, description="uniform random items, fresh in each step, shared by the batch")
    learning_rate: float = Field(1e-3, gt=0, description="of Adam; no weight decay, schedule or clipping")
    seed: int = Field(0, ge=0, description="of windows, targets, negatives and dropout")
    valid_every: int = Field(5, ge=1, description="epochs between two looks at validation AUPRC; the last is looked at")
    patience: int = Field(10, ge=1, description="stop after this many looks without a better AUPRC")
    valid_users: int = Field(10_000, ge=1, description="at most this many users, drawn with `seed`")
    log_steps: int = Field(0, ge=0, description="steps per row of the history; 0: a row per epoch")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["auto", "float32", "mixed"] = Field("auto", description="auto: mixed (bfloat16) on CUDA only")
    checkpoint_seconds: float = Field(30.0, ge=0, description="the resume state is written this often, and each epoch")


P = TypeVar("P", bound=Params)


def validated(model: type[P], values: dict[str, Any], where: str) -> P:
    """`model(**values)`, with an error that names each wrong key, what was found and what is allowed."""
    try:
        return model(**values)
    except ValidationError as error:
        lines = []
        for problem in error.errors():
            key = ".".join(str(part) for part in problem["loc"])
            if problem["type"] == "extra_forbidden":
                lines.append(f"  {key}: not a parameter; there are {', '.join(model.model_fields)}")
            elif not key:  # a rule between fields, which says what it found
                lines.append(f"  {problem['msg'].removeprefix('Value error, ')}")
            else:
                lines.append(f"  {key}: {problem['msg']}, got {problem['input']!r}")
        raise BachError(f"{where}: wrong parameters\n" + "\n".join(lines)) from None
