"""Choosing from a longer ranking: caps per genre, and diversity by MMR or DPP (the paper's alternative to a mixture).

    caps  the first items of the ranking that respect the caps, however far down that goes
    MMR   item after item the largest λ relevance − (1 − λ) max cosine to the chosen ones (Carbonell & Goldstein 1998)
    DPP   the set with a large determinant of L = q qᵀ ∘ S, q = exp(α · relevance), S cosines (Kulesza & Taskar 2012),
          found greedily, each step updating a Cholesky factor (Chen et al. 2018)

MMR and DPP return places in the ranking, for `slate.take`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import Float, Int

from bachlib import BachError
from bachlib.serve.catalogue import Genres
from bachlib.serve.slate import Slate, joined

Scores, Vectors = Float[np.ndarray, "B n"], Float[np.ndarray, "B n d"]  # of n candidates


def capped_slates(
    search: Callable[[slice, int], Slate], K: int, remaining: np.ndarray, genres: Genres | None, caps: Mapping[str, int]
) -> Slate:
    """K items of each ranking `search(rows, depth)`, as far down as its caps need; the proofs still hold."""
    if genres is None:
        raise BachError("caps need the items' genres: Retriever(model, dataset=dataset), or genres=")
    if not isinstance(caps, Mapping):
        raise BachError(f"caps should be {{genre: largest number of items}}; got {caps!r:.60}")
    names = sorted({name for own in genres for name in own})
    if unknown := [name for name in caps if name not in names]:
        raise BachError(f"caps: unknown genre {unknown[0]!r}; known are {', '.join(names)}")
    if wrong := [cap for cap in caps.values() if not (isinstance(cap, int | np.integer) and cap >= 0)]:
        raise BachError(f"caps should be whole numbers ≥ 0; got {wrong[0]!r}")
    slates = []
    for row, most in enumerate(remaining.tolist()):
        depth = 2 * K
        while True:
            slate = search(slice(row, row + 1), min(depth, most))
            own = [genres[item] for item in slate.items[0]]
            if len(taken := capped(own, caps, K)) == K:
                break
            if depth >= most:
                raise BachError(f"the caps leave {len(taken)} items for request {row}, fewer than K={K}")
            depth *= 4
        slates.append(slate.take(np.array([taken]), still_proved=True))
    return joined(slates)


def capped(genres: Genres, caps: Mapping[str, int], K: int) -> list[int]:
    """Places of the first K items of a list that respect the caps, in order; `genres`: those of each item."""
    room, taken = dict(caps), []
    for place, own in enumerate(genres):
        if len(taken) < K and all(room.get(name, 1) > 0 for name in own):
            taken.append(place)
            room |= {name: room[name] - 1 for name in own if name in room}
    return taken


def mmr(scores: Scores, vectors: Vectors, K: int, trade: float = 0.7) -> Int[np.ndarray, "B K"]:
    """Places of K of n candidates. `trade` λ: 1 is the order of the scores, 0 looks at diversity only."""
    if not 0 <= trade <= 1:
        raise BachError(f"trade should be between 0 (only diversity) and 1 (only relevance); got {trade}")
    relevance, rows = _relevance(scores, vectors, K), np.arange(len(scores))
    nearest = np.zeros(scores.shape)  # largest cosine to what is chosen
    chosen, free = np.empty((len(scores), K), np.int64), np.ones(scores.shape, bool)
    for place in range(K):
        value = np.where(free, trade * relevance - (1 - trade) * nearest, -np.inf)
        chosen[:, place] = at = value.argmax(1)
        free[rows, at] = False
        cosine = np.einsum("bnd,bd->bn", vectors, vectors[rows, at])
        nearest = cosine if place == 0 else np.maximum(nearest, cosine)
    return chosen


def dpp(scores: Scores, vectors: Vectors, K: int, strength: float = 1.0) -> Int[np.ndarray, "B K"]:
    """Places of K of n candidates, greedily. `strength` α: how much relevance counts against being different."""
    if not strength >= 0:
        raise BachError(f"strength should be at least 0; got {strength}")
    quality, (B, n) = np.exp(strength * _relevance(scores, vectors, K)), scores.shape
    gain = quality**2  # what the determinant would be multiplied by
    factor, rows = np.zeros((B, K, n)), np.arange(B)
    chosen, free = np.empty((B, K), np.int64), np.ones(scores.shape, bool)
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


def _relevance(scores: Scores, vectors: Vectors, K: int) -> Scores:
    """Scores of each row brought to 0 … 1."""
    if scores.ndim != 2 or vectors.shape[:2] != scores.shape:
        raise BachError(f"scores should be (B, n) and vectors (B, n, d); got {scores.shape} and {vectors.shape}")
    if not 1 <= K <= scores.shape[1]:
        raise BachError(f"K={K}: there are {scores.shape[1]} candidates to choose from")
    low, high = scores.min(1, keepdims=True), scores.max(1, keepdims=True)
    return (scores - low) / np.where(high > low, high - low, 1)
