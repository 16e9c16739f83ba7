"""A look at item ids and histories before a model takes them."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from bachlib import BachError


def checked_ids(ids: Tensor, n: int) -> Int[Tensor, "*shape"]:
    """Item ids 0 … n − 1, as they are."""
    if ids.is_floating_point():
        raise BachError(f"items are ids 0 … {n - 1}; got numbers of type {ids.dtype}")
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < n:
        wrong = ids[(ids < 0) | (ids >= n)]
        raise BachError(f"there is no item {int(wrong[0])}: items are 0 … {n - 1}")
    return ids.long()


def checked_history(history: Tensor, n: int) -> Int[Tensor, "B m"]:
    """(B, m) item ids, where −1 is padding on the left; at least one place, which is padding if nothing is known."""
    if history.ndim != 2:
        raise BachError(f"a history is (B, n) item ids, a row per user; got shape {tuple(history.shape)}")
    if not history.shape[1]:
        history = history.new_full((len(history), 1), -1)
    checked_ids(torch.where(history == -1, 0, history), n)
    gap = (history[:, :-1] >= 0) & (history[:, 1:] < 0)
    if bool(gap.any()):
        raise BachError(
            f"padding (−1) belongs on the left of a history; row {int(gap.any(1).nonzero()[0])} has it after"
        )
    return history.long()
