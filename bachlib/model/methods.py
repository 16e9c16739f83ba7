"""The table of methods (appendix B): a method is a user encoder and an objective; everything else is shared.

`build(name, dataset)` makes a model of a row of the table. It also takes a new row, such as
`METHODS["p-bach"]._replace(encoder="comirec-sa")`, and a new encoder, gate or item tower as a module (see `towers`).
"""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.files import short_hash
from bachlib.model.extractors import ComiRecDR, ComiRecSA, Mind, SASRec
from bachlib.model.hybrid import Hybrid
from bachlib.model.neighbours import RULES
from bachlib.model.svd import pure_svd
from bachlib.model.towers import ClsTower, Codebook, Gate, ItemTower, PiTable, ResidualCodebook
from bachlib.model.twotower import TwoTower
from bachlib.params import ELBO_ONLY, ModelParams, noted, validated


class Method(NamedTuple):
    encoder: str | None  # user history → heads
    objective: str
    serving: str
    kernel: str | None = None  # of the mixture; None: no π_u and no κ
    heads: int | None = None  # None: the parameter k

    def heads_for(self, p: ModelParams) -> int:
        """How many heads a model of this method has with these parameters."""
        if self.encoder == "codebook-hybrid":
            return p.k_shared + p.k_own
        return 1 if self.objective == "counts" else self.heads or p.k


NO_ELBO = "has no kernel, so no ELBO, π or κ; only the BACH methods have them"
P, V = "power-spherical", "von-mises-fisher"

METHODS = {
    #                          encoder → heads       objective        score at serving   kernel
    "mostpop": Method(         None,                "counts",        "count"),
    "standard": Method(        "cls",               "standard",      "inner product",    heads=1),
    "sasrec": Method(          "sasrec",            "standard",      "inner product",    heads=1),
    "mind": Method(            "mind",              "label-aware",   "max over heads"),
    "comirec-sa": Method(      "comirec-sa",        "pos-multihead", "max over heads"),
    "comirec-dr": Method(      "comirec-dr",        "pos-multihead", "max over heads"),
    "pos-multihead": Method(   "cls",               "pos-multihead", "max over heads"),
    "all-multihead": Method(   "cls",               "all-multihead", "max over heads"),
    "p-bach": Method(          "cls",               "elbo",          "mixture density",  P),
    "v-bach": Method(          "cls",               "elbo",          "mixture density",  V),
    "p-bach-global": Method(   "codebook",          "elbo",          "mixture density",  P),
    "v-bach-global": Method(   "codebook",          "elbo",          "mixture density",  V),
    "p-bach-residual": Method( "codebook-residual", "elbo",          "mixture density",  P),
    "v-bach-residual": Method( "codebook-residual", "elbo",          "mixture density",  V),
    "p-bach-hybrid": Method(   "codebook-hybrid",   "elbo",          "mixture density",  P),
    "v-bach-hybrid": Method(   "codebook-hybrid",   "elbo",          "mixture density",  V),
    # neighbours beyond the paper's fourteen: see model/neighbours
    "remi": Method(            "comirec-sa",        "remi",          "max over heads"),
    "bam": Method(             "cls",               "bam",           "max over heads"),
    "maxmf": Method(           "cls",               "maxmf",         "max over heads"),
}  # fmt: skip


def cls_tower(p: ModelParams, k: int) -> ClsTower:
    return ClsTower(k, p.d, p.width or p.d, p.attention_heads, p.ff, p.n_hist, p.dropout, p.cls_scale)


OBJECTIVES = ("counts", "standard", "pos-multihead", "all-multihead", "label-aware", "elbo", *RULES)

ENCODERS = {
    "cls": cls_tower,
    "sasrec": lambda p, k: SASRec(p.d, p.n_hist, p.sasrec_blocks, p.sasrec_heads, p.dropout, p.sasrec_norm_keys),
    "mind": lambda p, k: Mind(k, p.d, p.capsule_iterations, p.capsule_softmax, p.mind_relu),
    "comirec-sa": lambda p, k: ComiRecSA(k, p.d, p.n_hist, p.sa_positions_in_values),
    "comirec-dr": lambda p, k: ComiRecDR(k, p.d, p.n_hist, p.capsule_iterations, p.capsule_softmax),
    "codebook": lambda p, k: Codebook(k, p.d),
    "codebook-residual": lambda p, k: ResidualCodebook(k, p.d, cls_tower(p, k), p.residual),
    "codebook-hybrid": lambda p, k: (
        Hybrid(Codebook(p.k_shared, p.d), cls_tower(p, p.k_own)) if p.k_own else Codebook(p.k_shared, p.d)
    ),
}


def build(
    method: str | Method,
    dataset: Dataset,
    k: int = 8,
    *,
    encoder: nn.Module | None = None,
    item_tower: nn.Module | None = None,
    gate: nn.Module | None = None,
    name: str | None = None,
    **model_params: Any,
) -> TwoTower | MostPop:
    """The untrained model of a method on a data set; `model_params` are the fields of `ModelParams`.

    It is in evaluation mode, so that scores do not change from call to call; `fit` trains it. `name`: of its row in
    tables, for a row or parts of your own [default: the method and your parts, "p-bach (encoder = GRU)"].
    """
    of, row = (method, METHODS.get(method)) if isinstance(method, str) else ("own", method)
    if row is None:
        raise BachError(f"method {method!r} is unknown; the methods are {', '.join(METHODS)}")
    known = row.encoder in {*ENCODERS, None} and row.objective in OBJECTIVES
    if not known or (row.objective == "elbo") != bool(row.kernel):
        raise BachError(
            f"{row} is invalid: the encoder should be one of {', '.join(ENCODERS)}, the objective one of "
            f"{', '.join(OBJECTIVES)}; elbo needs a kernel, the other objectives have none"
        )
    p = validated(ModelParams, {"k": k, **model_params}, f"model {of}")
    k, parts = row.heads_for(p), {"encoder": encoder, "item_tower": item_tower, "gate": gate}
    own = {part: _known_as(module) for part, module in parts.items() if module is not None}
    config = {"method": of, "row": row._asdict(), "params": noted(p) | {"k": k}, "own": own}
    config |= {} if name is None else {"name": _checked(name)}
    for switch in unfit(row, p):
        raise BachError(f"{switch}={getattr(p, switch)!r}: {of} {NO_ELBO}")
    if row.objective == "counts":
        _read_context(p.context, name or of, dataset, {})
        return _on_data(MostPop(dataset, config), dataset)
    if gate is not None and p.pi != "gate":
        raise BachError(f"pi={p.pi!r} has no gate: leave out gate= or use pi='gate'")
    if p.pi == "table" and dataset.cold is not None:
        raise BachError("pi='table' cannot train a row for a cold user; use pi='gate'")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(p.seed)
        if item_tower is None:
            item_tower = ItemTower(torch.from_numpy(_svd_rows(dataset, p.d, p.svd_on)), p.item_width)
        elif item_tower.n_items != dataset.n_items:
            raise BachError(f"the item tower has {item_tower.n_items:,} items, the data set has {dataset.n_items:,}")
        if (width := item_tower(torch.zeros(1, dtype=torch.long)).shape[-1]) != p.d:
            raise BachError(f"the item tower returns vectors of {width} dimensions, but d = {p.d}")
        encoder = encoder or ENCODERS[row.encoder](p, k)
        if row.objective == "remi" and p.remi_lambda and not hasattr(encoder, "attend"):
            able = "comirec-sa has one, and your own encoder with `attend(tokens, history)` -> (heads, A (B, k, n))"
            raise BachError(f"remi regularises attention over positions; {type(encoder).__name__} has none: {able}")
        if row.kernel is not None and p.pi != "uniform":
            gate = gate or (PiTable(dataset.n_users, k) if p.pi == "table" else Gate(cls_tower(p, 1), p.d, k))
        n_context = _read_context(p.context, name or of, dataset, {"encoder": encoder, "gate": gate})
        return _on_data(TwoTower(encoder, item_tower, gate, config, n_context), dataset)


def unfit(row: Method, p: ModelParams) -> list[str]:
    """The parameters of the ELBO that were set for a method without it."""
    usual = ModelParams.model_fields
    return [name for name in ELBO_ONLY if row.kernel is None and getattr(p, name) != usual[name].default]


def _read_context(by: str, name: str, dataset: Dataset, parts: dict[str, nn.Module | None]) -> int:
    """Let the parts that `by` names read the context of the data set; the number of its columns, or 0."""
    if by == "none":
        return 0
    if dataset.context is None:
        raise BachError(f"context={by!r}: {dataset!r} has no context; build on dataset.with_context(array)")
    for part in ("encoder", "gate") if by == "both" else (by,):
        if not hasattr(module := parts.get(part), "read_context"):
            found = f"is {type(module).__name__}, which reads no context" if module else "does not exist"
            able = "CLS Transformers and gating towers do, and your own modules with `read_context(width)`"
            raise BachError(f"context={by!r}: the {part} of {name} {found}; {able}")
        module.read_context(dataset.context.shape[1])
    return dataset.context.shape[1]


def _on_data(model: TwoTower | MostPop, dataset: Dataset) -> TwoTower | MostPop:
    model.built_on = dataset.meta["content_hash"]  # its item table and counts come from this data
    return model.eval()


def _checked(name: str) -> str:
    """A name for a row of tables, which has to be told apart from the methods and from what tables add in brackets."""
    taken = name.casefold() in {*METHODS, "own"} if isinstance(name, str) else False
    if taken or not isinstance(name, str) or not re.fullmatch(r"\w([\w .+-]{0,98}[\w.+-])?", name):
        why = "this is the name of a method" if taken else "letters, digits, spaces and . + - _ are allowed"
        raise BachError(f"name={name!r}: should be a short name of your own for this model; {why}")
    return name


def _known_as(module: nn.Module) -> str:
    """The name of a module's class and a hash of its layers, shapes and source: a changed module is another one."""
    shapes = [(name, list(of.shape)) for name, of in (*module.named_parameters(), *module.named_buffers())]
    told = [re.sub(r" at 0x\w+", "", repr(module)), shapes]
    with suppress(OSError, TypeError):  # a class made in a shell has no source
        told.append(inspect.getsource(type(module)))
    return f"{type(module).__name__} {short_hash(told)}"


@lru_cache(maxsize=4)
def _svd_rows(dataset: Dataset, rank: int, svd_on: str) -> np.ndarray:
    """One decomposition for all methods in a process."""
    return pure_svd(dataset, rank, svd_on).items


class MostPop(nn.Module):
    """The weakest baseline: items by their count in the training prefixes, the same for all users. Not trained."""

    def __init__(self, dataset: Dataset, config: dict[str, Any]):
        super().__init__()
        self.config, self.n_items, self.n_hist = config, dataset.n_items, config["params"]["n_hist"]
        counts = np.asarray(dataset.matrix("train").sum(0))[0]
        self.register_buffer("counts", torch.from_numpy(counts).float())

    def items(self, *_: Any, **__: Any) -> Tensor:
        raise BachError("mostpop has no embeddings, only counts")

    encode = loss = objective = items

    def score(self, history: Tensor, user: Any = None, items: Any = None) -> Tensor:
        """The counts (B, n_items), the same in every row."""
        return self.counts.expand(len(history), -1)
