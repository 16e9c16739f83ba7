"""Where a user's held-out items rank among the whole catalogue, and the validation AUPRC made of it (section 5).

Every earlier item of the user is left out, and items with equal scores rank by their number. `evaluate` ranks with the
same function: what picks the weights in training and what is reported cannot drift apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib import BachError, NotFinite
from bachlib.data.dataset import Dataset, Split
from bachlib.params import N_HIST

BLOCK = 1 << 21  # scores at a time

# what does not take part in the ranking: every earlier item of the user, the history the encoder sees, or nothing
Exclude = Literal["earlier", "history", "nothing"]


def sample_users(dataset: Dataset, at_most: int, seed: int, cold: bool = False) -> Int[np.ndarray, " U"]:
    """All users that are trained on (or all cold ones), or that many of them drawn with `seed`, ascending."""
    users = dataset.cold if cold else dataset.warm
    if len(users) <= at_most:
        return users
    return np.sort(np.random.default_rng(seed).choice(users, at_most, replace=False))


class Scored(NamedTuple):
    """A block of users: what is excluded has score −∞."""

    users: Int[np.ndarray, " B"]
    scores: Float[Tensor, "B n_items"]
    targets: Int[Tensor, "B 10"]


@torch.no_grad()
def score_blocks(
    model: torch.nn.Module,
    dataset: Dataset,
    users: Int[np.ndarray, " U"],
    split: Split,
    exclude: Exclude = "earlier",
    only_targets: bool = True,
) -> Iterator[Scored]:
    """The catalogue scored for all users, a block at a time; `only_targets`: good for ranking these, cheaper."""
    if exclude not in Exclude.__args__:
        raise BachError(f"exclude={exclude!r}: should be one of {', '.join(Exclude.__args__)}")
    was_training, n_hist = model.training, getattr(model, "n_hist", N_HIST)
    model.eval()
    takes = inspect.signature(model.score).parameters  # a model of your own may only take a history
    items = model.items() if hasattr(model, "item_tower") else None
    size = max(1, BLOCK // dataset.n_items)
    try:
        for start in range(0, len(users), size):
            block = users[start : start + size]
            history, targets = dataset.history(block, split, n_hist), dataset.targets(block, split)
            also = {"user": block, "items": items, "around": targets if only_targets else None}
            scores = torch.as_tensor(model.score(history, **{name: also[name] for name in also if name in takes}))
            if scores.shape != (len(block), dataset.n_items):
                wanted = f"(B, n_items) = {(len(block), dataset.n_items)}"
                raise BachError(f"score should return {wanted} numbers for this data set; got {tuple(scores.shape)}")
            if bool(scores.sum().isnan()):  # a comparison with them is always false: every target would rank first
                raise NotFinite("the scores of the model are not numbers: its weights have diverged")
            scores = scores.clone() if items is None else scores
            if exclude != "nothing":
                scores[earlier_items(dataset, block, split, n_hist if exclude == "history" else None)] = -torch.inf
            yield Scored(block, scores, torch.as_tensor(targets, device=scores.device))
    finally:
        model.train(was_training)


def target_ranks(
    model: torch.nn.Module,
    dataset: Dataset,
    users: Int[np.ndarray, " U"],
    split: Split,
    each_block: Callable[[int], None] = lambda n: None,
) -> Int[np.ndarray, "U 10"]:
    """Rank (from 1) of each held-out item of each user under `model.score`; `each_block` is told users done."""
    found = []
    for block in score_blocks(model, dataset, users, split):
        found.append(ranks(block.scores, block.targets))
        each_block(len(block.users))
    return np.concatenate(found)


def earlier_items(
    dataset: Dataset, users: Int[np.ndarray, " B"], split: Split, last: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """(row, item) of everything a user liked before the held-out items, or of the `last` so many."""
    end = dataset.lengths[users] - dataset._held_out(split)
    n = end if last is None else np.minimum(end, last)
    rows = np.repeat(np.arange(len(users)), n)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(n) - n, n) + np.repeat(end - n, n)
    return rows, np.asarray(dataset.sequences[dataset.offsets[users][rows] + place], np.int64)


def ranks(scores: Float[Tensor, "B n"], targets: Int[Tensor, "B m"]) -> Int[np.ndarray, "B m"]:
    """1 + how many items are better, or as good with a lower number. No sort: ten comparisons an item are cheaper."""
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
    return found


def plain_ranks(scores: Float[Tensor, "B n"], targets: Int[Tensor, "B m"]) -> Int[Tensor, "B m"]:
    """`ranks` as comparisons of whole blocks, on any device."""
    own = scores.gather(1, targets)
    number = torch.arange(scores.shape[1], device=scores.device)
    better = [(scores > own[:, j, None]).sum(1) for j in range(targets.shape[1])]
    tied = [((scores == own[:, j, None]) & (number < targets[:, j, None])).sum(1) for j in range(targets.shape[1])]
    return 1 + torch.stack(better, 1) + torch.stack(tied, 1)


def average_precision(ranks: Int[np.ndarray, "U m"]) -> Float[np.ndarray, " U"]:
    """AP over the full ranking from the ranks of all relevant items: mean of (how many so far) / rank."""
    return (np.arange(1, ranks.shape[1] + 1) / np.sort(ranks, axis=1)).mean(axis=1)
