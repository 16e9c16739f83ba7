"""The ranks of a user's held-out items in the whole catalogue (section 6.1).

Earlier items of the user are left out, and items with equal scores rank by their number. Training ranks its validation
items and `evaluate` its test items with the same functions.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from importlib import import_module
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import Module

from bachlib import BachError, NotFinite
from bachlib.data.dataset import Dataset, Split
from bachlib.model.mixture import served_by
from bachlib.model.twotower import TwoTower
from bachlib.params import N_HIST, ServeBy

BLOCK, USERS = 1 << 21, 512  # scores at a time, and users whose scores are not kept
Users = Int[np.ndarray, " U"]
# items left out of the ranking: every earlier item of the user, only the history the encoder sees, or none
Exclude = Literal["earlier", "history", "nothing"]


def sample_users(dataset: Dataset, at_most: int, seed: int, cold: bool = False, split: Split = "test") -> Users:
    """The users that are trained on (or the cold ones) and have held-out items, ascending; if there are more than
    `at_most`, a random draw."""
    users = np.intersect1d(dataset.cold if cold else dataset.warm, dataset.evaluated(split))
    if not len(users):
        raise BachError(f"no {'cold ' if cold else ''}user of {dataset!r} has {split} items and a history before them")
    if len(users) <= at_most:
        return users
    return np.sort(np.random.default_rng(seed).choice(users, at_most, replace=False))


class Scored(NamedTuple):
    """The scores of a block of users; excluded items have score −∞."""

    users: Int[np.ndarray, " B"]
    scores: Float[Tensor, "B n_items"]
    targets: Int[Tensor, "B 10"]  # a user with fewer is padded with −1


@torch.no_grad()
def score_blocks(
    model: Module,
    dataset: Dataset,
    users: Users,
    split: Split,
    exclude: Exclude = "earlier",
    serve_by: ServeBy = "density",
) -> Iterator[Scored]:
    """Scores of the whole catalogue, a block of users at a time."""
    was_training, n_hist = model.training, getattr(model, "n_hist", N_HIST)
    model.eval()
    takes = inspect.signature(model.score).parameters  # a user's own model may take a history only
    items = model.items() if hasattr(model, "item_tower") else None
    size = max(1, BLOCK // dataset.n_items)
    try:
        for start in range(0, len(users), size):
            block = users[start : start + size]
            history, targets = dataset.history(block, split, n_hist), dataset.targets(block, split)
            also = {"user": block, "items": items, "context": dataset.context_for(model, block, split)}
            also["serve_by"] = serve_by
            scores = torch.as_tensor(model.score(history, **{name: also[name] for name in also if name in takes}))
            if scores.shape != (len(block), dataset.n_items):
                wanted = f"(B, n_items) = {(len(block), dataset.n_items)}"
                raise BachError(f"score should return {wanted} numbers for this data set; got {tuple(scores.shape)}")
            if bool(scores.sum().isnan()):  # comparisons with NaN are false: every target would rank first
                raise NotFinite("the model's scores are NaN: its weights have diverged")
            scores = scores.clone()  # they may be expanded or belong to the model
            scores[_excluded(dataset, block, split, exclude, n_hist)] = -torch.inf
            yield Scored(block, scores, torch.as_tensor(targets, device=scores.device))
    finally:
        model.train(was_training)


def _excluded(
    dataset: Dataset, users: Users, split: Split, exclude: Exclude, n_hist: int
) -> tuple[np.ndarray, np.ndarray]:
    """(row in `users`, item) of what is left out of the ranking."""
    if exclude not in Exclude.__args__:
        raise BachError(f"exclude={exclude!r}: should be one of {', '.join(Exclude.__args__)}")
    return dataset.earlier(users, split, {"earlier": None, "history": n_hist, "nothing": 0}[exclude])


def target_ranks(model: Module, dataset: Dataset, users: Users, split: Split) -> Int[np.ndarray, "U 10"]:
    """The rank (from 1) of each held-out item of each user under `model.score`."""
    return np.concatenate([found for _, found in rank_blocks(model, dataset, users, split)])


def rank_blocks(
    model: Module,
    dataset: Dataset,
    users: Users,
    split: Split,
    exclude: Exclude = "earlier",
    serve_by: ServeBy = "density",
) -> Iterator[tuple[Users, Int[np.ndarray, "B 10"]]]:
    """(users, ranks of their held-out items), a block of users at a time.

    A two-tower model on the CPU needs no scores: `counting` ranks by those that serving computes in float64. The scores
    of a model of one's own are compared as they are.
    """
    if not (getattr(model.score, "__func__", None) is TwoTower.score and str(model.device) == "cpu"):
        for block in score_blocks(model, dataset, users, split, exclude, serve_by):
            yield block.users, ranks(block.scores, block.targets)
        return
    counting, was_training = import_module("bachlib.rank.counting"), model.training  # numba is imported late
    model.eval()
    try:
        with torch.no_grad():
            items = model.items()
            rows = model.item_tower.table if model.history == "frozen" else items
            for block in np.array_split(users, range(USERS, len(users), USERS)):
                at = (
                    dataset.history(block, split, model.n_hist),
                    block,
                    rows,
                    dataset.context_for(model, block, split),
                )
                heads, log_pi, kappa = model.encode(*at)
                if not bool(heads.isfinite().all() & log_pi.isfinite().all() & items.isfinite().all()):
                    raise NotFinite("the model's vectors are not finite: its weights have diverged")
                log_pi, kappa, kernel = served_by(serve_by, heads, items, log_pi, kappa, model.kernel, model.tau)
                rule, log_weight, kappa = "max over heads", torch.zeros_like(log_pi), kappa.double()
                if kernel:
                    rule, log_weight = kernel.name, log_pi + kernel.log_normalizer(kappa, heads.shape[-1])
                else:
                    kappa = torch.ones_like(kappa)
                row, item = _excluded(dataset, block, split, exclude, model.n_hist)
                key = np.sort(row * dataset.n_items + item)
                starts = np.searchsorted(key, np.arange(len(block) + 1) * dataset.n_items)
                weights = (x.double().numpy() for x in (log_weight, kappa))
                targets = dataset.targets(block, split)
                some = np.maximum(np.where(targets >= 0, targets, targets[:, :1]), 0)  # a target in place of padding
                found = counting.counted_ranks(
                    heads.contiguous(), items, *weights, rule, some, key % dataset.n_items, starts
                )
                yield block, np.where(targets >= 0, found, 0)
    finally:
        model.train(was_training)


def ranks(scores: Float[Tensor, "B n"], targets: Int[Tensor, "B m"]) -> Int[np.ndarray, "B m"]:
    """1 + the number of items with a higher score, or an equal score and a lower number; faster than sorting. The rank
    of padding (−1) is 0."""
    if scores.device.type != "cpu":
        return plain_ranks(scores, targets).cpu().numpy()
    values, wanted = scores.numpy(), targets.numpy()
    found, better = np.empty(wanted.shape, np.int64), np.empty(values.shape[1], bool)
    for row, (value, items) in enumerate(zip(values, wanted.tolist(), strict=True)):
        for j, item in enumerate(items):
            own = value[item]
            np.greater_equal(value[: item + 1], own, out=better[: item + 1])  # the item itself is the 1
            np.greater(value[item + 1 :], own, out=better[item + 1 :])
            found[row, j] = np.count_nonzero(better)
    return np.where(wanted >= 0, found, 0)


def plain_ranks(scores: Float[Tensor, "B n"], targets: Int[Tensor, "B m"]) -> Int[Tensor, "B m"]:
    """`ranks` with comparisons of whole blocks, for any device."""
    there, targets = targets >= 0, targets.clamp(min=0)
    own = scores.gather(1, targets)
    number = torch.arange(scores.shape[1], device=scores.device)
    better = [(scores > own[:, j, None]).sum(1) for j in range(targets.shape[1])]
    tied = [((scores == own[:, j, None]) & (number < targets[:, j, None])).sum(1) for j in range(targets.shape[1])]
    return (1 + torch.stack(better, 1) + torch.stack(tied, 1)) * there
