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
from numba import njit

from bachlib.serve.density import Best, LeftOut, Query, Rule

STEP = 16  # entries of a list at a time
DENSE_SHARE = 1 / 6  # of the catalogue: scoring more rows one by one takes longer than the dense product
TINY = 1e-30  # relative to its prototype's largest density, smaller ones count as 0
TRUSTED = 1e-20  # sums above this are not affected by that


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
    prototypes: Float[np.ndarray, "k d"],
    kappa: Float[np.ndarray, " k"],
    log_c: Float[np.ndarray, " k"],
    items: Float[np.ndarray, "n d"],
    rule: Rule,
    list_length: int | None = None,
) -> CodebookArrays:
    """Densities and sorted lists of every prototype; lists of `list_length` (default: an eighth of the items)."""
    n, k = len(items), len(prototypes)
    length = min(n, list_length or max(4096, n // 8))
    density, lists = np.empty((n, k), np.float32), np.empty((k, length), np.int32)
    peak = np.empty(k)
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
    budget, off = int(DENSE_SHARE * n), rounding(k)
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


def rounding(k: int) -> float:
    """The largest relative error of a float32 sum of k products of rounded numbers ≥ 0, with a margin."""
    return (k + 8) * 2.0**-23


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def dot(row, weight):
    total = np.float32(0.0)
    for r in range(len(row)):
        total += row[r] * weight[r]
    return total


@njit(nogil=True, cache=True)
def descend(lists, density, weight, K, left_out, scores, places, budget, off):
    """The threshold algorithm of one user: fills scores and places with the items it saw; returns (count, proved)."""
    k, length = lists.shape
    seen = np.zeros(len(density), np.uint8)
    for j in range(len(left_out)):
        seen[left_out[j]] = 1
    depth = np.zeros(k, np.int64)
    level, below = np.empty(k), np.empty(k)  # the most an unseen item can get from a list; after the next step
    for r in range(k):
        level[r] = weight[r] * density[lists[r, 0], r]
        below[r] = weight[r] * density[lists[r, min(STEP, length - 1)], r]
    bound = level.sum()
    top = np.full(K, -np.inf)
    count = 0
    while count < budget:
        most, r = -1.0, -1
        for s in range(k):
            fall = level[s] - below[s] + 1e-3 * level[s]
            if depth[s] + STEP < length and fall > most:
                most, r = fall, s
        if r < 0 or (count > budget // 2 and bound > 2.0 * top[K - 1]):  # the lists end, or the bound falls too slowly
            return count, False
        for at in range(depth[r], depth[r] + STEP):
            i = lists[r, at]
            if seen[i] == 0:
                seen[i] = 1
                score = dot(density[i], weight)
                scores[count], places[count] = score, i
                count += 1
                if score > top[K - 1]:
                    insert_value(score, top)
        depth[r] += STEP
        level[r] = below[r]
        bound = level.sum()  # a new sum: small levels would be lost in differences of large ones
        below[r] = weight[r] * density[lists[r, min(depth[r] + STEP, length - 1)], r]
        if top[K - 1] > TRUSTED and top[K - 1] * (1.0 - 2 * off) > bound * (1.0 + 2 * off):
            return count, True
    return count, False


@njit(nogil=True, cache=True)
def insert_value(value, top):
    at = len(top) - 1
    while at > 0 and value > top[at - 1]:
        top[at] = top[at - 1]
        at -= 1
    top[at] = value
