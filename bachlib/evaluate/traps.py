"""Evaluations that are wrong on purpose: what has been seen in public code, so that its effect can be computed.

Two more need no code here: `evaluate(…, exclude="nothing")` recommends what the user already has, and
`prepare(…, ties="item")` lets the order of item numbers into the sequences.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import nn

from bachlib import BachError
from bachlib.data.dataset import Dataset, Split
from bachlib.rank.metrics import dcg_of_ranks, ideal_dcg, ndcg_of_ranks
from bachlib.rank.ranks import score_blocks


def ndcg_ideal_of_hits(ranks: Int[np.ndarray, "U m"], k: int) -> Float[np.ndarray, " U"]:
    """NDCG@K whose ideal has only the items that *were* found: one hit at rank 1 of ten wanted is called perfect."""
    hits = (ranks <= k).sum(1)
    return np.where(hits > 0, dcg_of_ranks(ranks, k) / ideal_dcg(np.maximum(hits, 1)), 0.0)


def ndcg_in_set_order(
    slates: Int[np.ndarray, "U K"], targets: Int[np.ndarray, "U m"], k: int
) -> Float[np.ndarray, " U"]:
    """NDCG@K of the slate after it went through a Python set: the order is that of a hash table."""
    ranks = np.full(targets.shape, k + 1)
    for row, (slate, wanted) in enumerate(zip(slates[:, :k].tolist(), targets.tolist(), strict=True)):
        place = {item: n for n, item in enumerate(set(slate), 1)}
        ranks[row] = [place.get(item, k + 1) for item in wanted]
    return ndcg_of_ranks(ranks, k)


def sampled_ranks(
    model: nn.Module, dataset: Dataset, users: Int[np.ndarray, " U"], split: Split = "test", n: int = 100, seed: int = 0
) -> Int[np.ndarray, "U m"]:
    """Rank of each held-out item among itself and `n` random items the user has not met, instead of the catalogue."""
    found, rng = [], np.random.default_rng(seed)
    for block in score_blocks(model, dataset, users, split):
        scores, targets = block.scores.cpu(), block.targets.cpu()
        own = scores.gather(1, targets)
        allowed = (scores > -torch.inf).scatter(1, targets, False).float()
        if int(allowed.sum(1).min()) < n:
            raise BachError(f"n={n}: somebody has only {int(allowed.sum(1).min())} items left to sample from")
        picked = torch.from_numpy(rng.random(allowed.shape, dtype=np.float32)).mul_(allowed).topk(n, dim=1).indices
        better = scores.gather(1, picked)[:, None, :] > own[:, :, None]  # (B, m, n)
        found.append(1 + better.sum(2).numpy())
    return np.concatenate(found)
