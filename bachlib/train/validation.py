"""Where a user's held-out items rank among the whole catalogue, and the validation AUPRC made of it (section 5).

Every earlier item of the user is left out, and items with equal scores rank by their number.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib import NotFinite
from bachlib.data.dataset import Dataset, Split

BLOCK = 1 << 22  # scores at a time


def sample_users(dataset: Dataset, at_most: int, seed: int) -> Int[np.ndarray, " U"]:
    """All users, or that many drawn with `seed`, ascending."""
    if dataset.n_users <= at_most:
        return np.arange(dataset.n_users)
    return np.sort(np.random.default_rng(seed).choice(dataset.n_users, at_most, replace=False))


@torch.no_grad()
def target_ranks(
    model: torch.nn.Module,
    dataset: Dataset,
    users: Int[np.ndarray, " U"],
    split: Split,
    each_block: Callable[[int], None] = lambda n: None,
) -> Int[np.ndarray, "U 10"]:
    """Rank (from 1) of each held-out item of each user under `model.score`; `each_block` is told users done."""
    was_training = model.training
    model.eval()
    items = model.items() if hasattr(model, "encode") and hasattr(model, "item_tower") else None
    size = max(1, BLOCK // dataset.n_items)
    found = []
    for start in range(0, len(users), size):
        block = users[start : start + size]
        scores = model.score(dataset.history(block, split, model.n_hist), user=block, items=items).float()
        if bool(scores.isnan().any()):  # a comparison with them is always false: every target would rank first
            raise NotFinite("the scores of the model are not numbers: its weights have diverged")
        targets = torch.as_tensor(dataset.targets(block, split), device=scores.device)
        scores = scores.clone() if items is None else scores
        scores[earlier_items(dataset, block, split)] = -torch.inf
        found.append(_ranks(scores, targets).cpu().numpy())
        each_block(len(block))
    model.train(was_training)
    return np.concatenate(found)


def earlier_items(dataset: Dataset, users: Int[np.ndarray, " B"], split: Split) -> tuple[np.ndarray, np.ndarray]:
    """(row, item) of everything a user liked before the held-out items."""
    n = dataset.lengths[users] - dataset._held_out(split)
    rows = np.repeat(np.arange(len(users)), n)
    place = np.arange(len(rows)) - np.repeat(np.cumsum(n) - n, n)
    return rows, np.asarray(dataset.sequences[dataset.offsets[users][rows] + place], np.int64)


def _ranks(scores: Float[Tensor, "B n"], targets: Int[Tensor, "B m"]) -> Int[Tensor, "B m"]:
    own = scores.gather(1, targets)
    number = torch.arange(scores.shape[1], device=scores.device)
    better = [(scores > own[:, j, None]).sum(1) for j in range(targets.shape[1])]
    tied = [((scores == own[:, j, None]) & (number < targets[:, j, None])).sum(1) for j in range(targets.shape[1])]
    return 1 + torch.stack(better, 1) + torch.stack(tied, 1)


def average_precision(ranks: Int[np.ndarray, "U m"]) -> Float[np.ndarray, " U"]:
    """AP over the full ranking from the ranks of all relevant items: mean of (how many so far) / rank."""
    return (np.arange(1, ranks.shape[1] + 1) / np.sort(ranks, axis=1)).mean(axis=1)


def recall(ranks: Int[np.ndarray, "U m"], at: int) -> Float[np.ndarray, " U"]:
    return (ranks <= at).mean(axis=1)
