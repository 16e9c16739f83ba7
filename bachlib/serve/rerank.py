"""Diversity after the fact, which the paper names as the alternative to a mixture: MMR and DPP.

Both take a longer slate and return places in it, for `slate.take`:

    MMR   item after item the largest λ relevance − (1 − λ) max cosine to what is chosen (Carbonell & Goldstein 1998)
    DPP   the set with a large determinant of L = q qᵀ ∘ S, q = exp(α · relevance), S cosines (Kulesza & Taskar 2012),
          found greedily, each step updating a Cholesky factor (Chen et al. 2018)
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from bachlib import BachError


def mmr(
    scores: Float[np.ndarray, "B n"], vectors: Float[np.ndarray, "B n d"], K: int, trade: float = 0.7
) -> Int[np.ndarray, "B K"]:
    """Places of K of n candidates. `trade` λ: 1 is the order of the scores, 0 looks at diversity only."""
    _check(scores, vectors, K)
    if not 0 <= trade <= 1:
        raise BachError(f"trade should be between 0 (only diversity) and 1 (only relevance); got {trade}")
    relevance = _unit_range(scores)
    nearest = np.zeros(scores.shape)  # largest cosine to what is chosen
    chosen, rows = np.empty((len(scores), K), np.int64), np.arange(len(scores))
    free = np.ones(scores.shape, bool)
    for place in range(K):
        value = np.where(free, trade * relevance - (1 - trade) * nearest, -np.inf)
        chosen[:, place] = at = value.argmax(1)
        free[rows, at] = False
        cosine = np.einsum("bnd,bd->bn", vectors, vectors[rows, at])
        nearest = cosine if place == 0 else np.maximum(nearest, cosine)
    return chosen


def dpp(
    scores: Float[np.ndarray, "B n"], vectors: Float[np.ndarray, "B n d"], K: int, strength: float = 1.0
) -> Int[np.ndarray, "B K"]:
    """Places of K of n candidates, greedily. `strength` α: how much relevance counts against being different."""
    _check(scores, vectors, K)
    if not strength >= 0:
        raise BachError(f"strength should be at least 0; got {strength}")
    B, n = scores.shape
    quality = np.exp(strength * _unit_range(scores))
    gain = quality**2  # what the determinant would be multiplied by
    factor = np.zeros((B, K, n))
    chosen, rows = np.empty((B, K), np.int64), np.arange(B)
    free = np.ones(scores.shape, bool)
    nothing = 1e-7 * quality**2  # what is left of an item that the chosen ones span; these come by relevance
    for place in range(K):
        chosen[:, place] = at = np.where(free, np.maximum(gain, nothing), -np.inf).argmax(1)
        free[rows, at] = False
        similar = quality * quality[rows, at, None] * np.einsum("bnd,bd->bn", vectors, vectors[rows, at])
        done = factor[:, :place]
        explained = np.einsum("bpn,bp->bn", done, done[rows, :, at])
        left, least = gain[rows, at, None], nothing[rows, at, None]
        factor[:, place] = np.where(left > least, (similar - explained) / np.sqrt(np.maximum(left, least)), 0)
        gain = gain - factor[:, place] ** 2
    return chosen


def _unit_range(scores: np.ndarray) -> np.ndarray:
    """Scores of each row brought to 0 … 1."""
    low, high = scores.min(1, keepdims=True), scores.max(1, keepdims=True)
    return (scores - low) / np.where(high > low, high - low, 1)


def _check(scores: np.ndarray, vectors: np.ndarray, K: int) -> None:
    if scores.ndim != 2 or vectors.shape[:2] != scores.shape:
        raise BachError(f"scores should be (B, n) and vectors (B, n, d); got {scores.shape} and {vectors.shape}")
    if not 1 <= K <= scores.shape[1]:
        raise BachError(f"K={K}: there are {scores.shape[1]} candidates to choose from")
