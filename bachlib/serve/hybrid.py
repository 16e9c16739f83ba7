"""Serving heads of two kinds ("Global codebook"): cached lists for the prototypes, a scan or an index for own heads.

The score of an item is a sum over heads, Σ_shared π_r S_ir + Σ_own π_r C_r ω(t_ir), and each part has its own bound.

**Scan** (`top_k`). The shared part comes from the codebook: from the table of all densities by one product, or from
lists of L entries, where an item that is missing in list r has at most the density e_r at its end. The own heads need
one matrix product of k_own columns, and a table of their density over the cosine, rounded up (as in `exact`). Together
this bounds the score of every item. The K items with the largest bounds give a first θ, the K-th best score. After them
only items whose bound reaches θ are scored, by `density`. So the slate is proved to be exact, to the bit.

**Two-step** (`Cached`). The lists of the prototypes are stored, the index is asked for the own heads only. The bound of
`twostep` holds for both: an item in no list is below the end of every list.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from bachlib.serve.codebook import ROUNDED, TINY, CodebookArrays, CodebookLists
from bachlib.serve.density import Best, LeftOut, Query, rounding
from bachlib.serve.descent import bounds
from bachlib.serve.kernels import BINS, fill_tables
from bachlib.serve.twostep import Neighbours

Codebook = CodebookArrays | CodebookLists


def query_of(arrays: Codebook, query: Query, pi: Float[np.ndarray, "B k"]) -> Query:
    """The query with the prototypes exactly as the lists were computed from them."""
    s, B = len(arrays.prototypes), len(pi)
    with np.errstate(divide="ignore"):
        log_weight = np.log(pi[:, :s]) + arrays.log_c
    shared = np.broadcast_to(arrays.prototypes, (B, *arrays.prototypes.shape)), log_weight, [arrays.kappa] * B
    return Query(*(np.concatenate([a, b[:, s:]], 1) for a, b in zip(shared, query, strict=False)), query.rule)


def top_k(arrays: Codebook, query: Query, pi: Float[np.ndarray, "B k"], K: int, left_out: LeftOut) -> Best:
    """The exact best K of every request."""
    (n, d), s, query = arrays.items.shape, len(arrays.prototypes), query_of(arrays, query, pi)
    best = Best(query, arrays.items, K, left_out)
    own = Query(query.heads[:, s:], query.log_weight[:, s:], query.kappa[:, s:], query.rule)
    with np.errstate(divide="ignore"):
        peak = np.log(pi[:, :s]) + arrays.peak
    most = own.terms_at(np.ones(own.kappa.shape))
    shift = np.maximum(peak.max(1), most.max(1))  # logarithm of the unit in which densities are added
    weight = np.exp(peak - shift[:, None])
    table = np.empty((*own.kappa.shape, BINS + 2), np.float32)
    fill_tables(own.log_weight, own.kappa, own.power, shift, rounding(d), table)
    reach = np.empty(n, np.float32)
    for u in range(len(pi)):
        bounds(arrays.items @ own.heads[u].T, table[u], _shared(arrays, weight[u]), reach)
        reach[left_out[u : u + 1].items] = -1
        first = np.argpartition(reach, n - K)[n - K :]
        best.offer(np.full(K, u), first)
        reach[first] = -1
        close = np.flatnonzero(reach >= np.exp(best.worst[u] - shift[u]) * (1 - 1e-5))
        best.offer(np.full(len(close), u), close)
    return best


def _shared(arrays: Codebook, weight: Float[np.ndarray, " s"]) -> Float[np.ndarray, " n"]:
    """At least the density that the prototypes give to each item."""
    s = len(weight)
    if isinstance(arrays, CodebookArrays):
        found = arrays.density @ weight.astype(np.float32)
        return found * np.float32(1 + (s + 8) * 2.0**-22) + np.float32(s * TINY)
    end = arrays.entries[:, -1].astype(np.float64) if arrays.lists.shape[1] < len(arrays.items) else np.zeros(s)
    above = weight[:, None] * (arrays.entries - end[:, None])
    listed = np.bincount(arrays.lists.ravel(), above.ravel(), minlength=len(arrays.items))
    return ((listed + weight @ end) * (1 + ROUNDED) + s * TINY).astype(np.float32)


class Cached:
    """`Neighbours` for `two_step` in which the prototypes' lists need no search."""

    def __init__(self, index: Neighbours, arrays: Codebook):
        self.index, self.arrays = index, arrays

    def nearest(self, rows: Float[np.ndarray, "q d"], M: int) -> tuple[np.ndarray, np.ndarray]:
        items, lists = self.arrays.items, self.arrays.lists[:, :M]
        which = (rows[:, None] == self.arrays.prototypes).all(-1)  # (q, s)
        own = ~which.any(1)
        t, places = np.full((len(rows), M), -np.inf, np.float32), np.full((len(rows), M), -1)
        if own.any():
            t[own], places[own] = self.index.nearest(rows[own], M)
        for row in np.flatnonzero(~own):
            places[row, : lists.shape[1]] = near = lists[which[row].argmax()]
            t[row, : lists.shape[1]] = items[near] @ rows[row]
        return t, places
