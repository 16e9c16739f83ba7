"""Serving from a global codebook ("Global codebook"): densities and lists computed once, π_u decides. Needs no torch.

With heads that all users share, m(i | u) = Σ_r π_u^(r) S_ir is linear in π_u, and S_ir = C_d(κ_r) ω_κ(⟨u_r, v_i⟩) is
known beforehand. Each prototype's items are sorted by S. A threshold algorithm goes down the lists of the prototypes
that matter, always where the bound Σ_r π_r S(r, depth_r) falls most, scores each new item, and stops when the K-th best
is above the bound: no unseen item can be better. If that would take longer than the dense product S π, the product is
used. Both keep all items that rounding could have changed and end in `density`, so the slate is proved to be exact.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bachlib.serve.density import Best, LeftOut, Query, Rule
from bachlib.serve.kernels import STEP, TRUSTED, descend

DENSE_SHARE = 1 / 6  # of the catalogue: scoring more rows one by one takes longer than the dense product
TINY = 1e-30  # relative to its prototype's largest density, smaller ones count as 0


class CodebookArrays(NamedTuple):
    """Everything needed for serving; each array may be a memory-mapped file."""

    prototypes: Float[np.ndarray, "k d"]  # unit, float32
    kappa: Float[np.ndarray, " k"]
    log_c: Float[np.ndarray, " k"]  # log C_d(κ_r)
    items: Float[np.ndarray, "n d"]  # unit, float32
    density: Float[np.ndarray, "n k"]  # S_ir / exp(peak_r), float32
    peak: Float[np.ndarray, " k"]  # the largest log S of each prototype
    lists: Int[np.ndarray, "k L"]  # rows of items, largest density first


def compute(
    prototypes: np.ndarray, kappa: np.ndarray, log_c: np.ndarray, items: np.ndarray, rule: Rule, length: int = 0
) -> CodebookArrays:
    """Densities and sorted lists of every prototype; lists of `length` (default: an eighth of the items)."""
    n, k = len(items), len(prototypes)
    length = min(n, length or max(4096, n // 8))
    density, lists, peak = np.empty((n, k), np.float32), np.empty((k, length), np.int32), np.empty(k)
    wide = items.astype(np.float64)
    for r in range(k):
        query = Query(prototypes[None, r : r + 1], log_c[None, r : r + 1], kappa[None, r : r + 1], rule)
        log_s = query.terms_at((wide @ prototypes[r].astype(np.float64))[:, None])[:, 0]
        peak[r] = log_s.max()
        s = np.exp(log_s - peak[r])
        density[:, r] = np.where(s < TINY, 0, s)
        near = np.argpartition(-s, length - 1)[:length] if length < n else np.arange(n)
        lists[r] = near[np.lexsort((near, -s[near]))]
    return CodebookArrays(prototypes, kappa, log_c, items, density, peak, lists)


def top_k(
    arrays: CodebookArrays, pi: Float[np.ndarray, "B k"], K: int, left_out: LeftOut, rule: Rule
) -> tuple[Best, Int[np.ndarray, " B"]]:
    """(the exact best K of every π_u, number of rows looked at: all of them if the dense product was used)."""
    B, (n, k) = len(pi), arrays.density.shape
    with np.errstate(divide="ignore"):
        log_pi = np.log(pi)
    heads, kappa = (np.broadcast_to(x, (B, *x.shape)) for x in (arrays.prototypes, arrays.kappa))
    best = Best(Query(heads, log_pi + arrays.log_c, kappa, rule), arrays.items, K, left_out)
    scale = log_pi + arrays.peak  # log of π_r exp(peak_r)
    weight = np.exp(scale - scale.max(1, keepdims=True)).astype(np.float32)
    budget, off = int(DENSE_SHARE * n), (k + 8) * 2.0**-23  # the most that a float32 sum of k products ≥ 0 is off
    met, place, looked = np.empty(budget + STEP, np.float32), np.empty(budget + STEP, np.int64), np.full(B, n)
    for u in range(B):
        out = left_out[u : u + 1].items
        count, proved = descend(arrays.lists, arrays.density, weight[u], K, out, met, place, budget, off)
        if proved:
            looked[u], scores, places = count, met[:count], place[:count]
        else:
            scores, places = arrays.density @ weight[u], None
            scores[out] = -1
        kth = np.partition(scores, len(scores) - K)[len(scores) - K]
        close = scores >= (kth * (1 - 2 * off) if kth > TRUSTED else 0)  # too small for float32: all in float64
        keep = np.flatnonzero(close) if places is None else places[close]
        best.offer(np.full(len(keep), u), keep)
    return best, looked
