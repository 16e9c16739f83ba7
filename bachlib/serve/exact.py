"""Exact top-K over the whole catalogue: cache-sized blocks, and bounds that skip nearly all items.

An item reaches the K-th best score θ only if Σ_r exp(term_r) ≥ e^θ. Three filters, one after the other:
    1. With parts λ_r that sum to e^θ, at least one head has to give its part: t_r ≥ cut_r. One comparison per cosine.
    2. Each head's term is looked up in a table of its density over the cosine, rounded up. No logarithm or exponential.
    3. The score itself in float64 (`density`), for a few hundred items.
The cosines of a block are one float32 matrix product, compiled with the widest vectors of this machine if the heads
fill them; 1 and 2 allow for its rounding. So every skipped item is proved
to be worse, and the slate is that of `density.brute_force`, to the bit.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int

from bachlib.serve.density import Best, LeftOut, Query, rounding
from bachlib.serve.kernels import BINS, HEADS, ITEMS, fill_tables, product, roughly, sift, thresholds

BLOCK, WIDTH = 1 << 18, 8192  # cosines at a time (a megabyte), and items at the most
USERS = 64  # at a time
FIRST = 3072  # items that give a first θ


def top_k(query: Query, items: Float[np.ndarray, "n d"], K: int, left_out: LeftOut, start: tuple = ()) -> Best:
    """The exact best K of every user. `start`: (users, places) to score first; good ones save work."""
    best = Best(query, items, K, left_out)
    if start:
        best.offer(*start)
    for first in range(0, len(query.log_weight), USERS):
        _scan(best, slice(first, min(first + USERS, len(query.log_weight))))
    return best


def _scan(best: Best, users: slice) -> None:
    query, items = best.query[users], best.items
    (B, k, d), n, peak = query.heads.shape, len(items), _peaks(query)
    slack, columns = rounding(d), columns_of(query.heads)
    order, shift, table = np.argsort(peak, axis=1), None, np.empty((B, k, BINS + 2), np.float32)
    starts = best.left_out.starts[users.start : users.stop + 1]
    K = best.scores.shape[1]
    own, n_gone = int(best.left_out[users].n_own.max(initial=0)), best.left_out.n_gone
    wanted = min(K + own + 2 * K * n_gone // n, 4 * K + 100)  # usually holds K items that may be served
    width = min(n, max(256, 2 * wanted, min(WIDTH, BLOCK // (B * k))))
    room = np.empty((width, B * k), np.float32)
    for begin in range(0, n, width):
        block = items[begin : begin + width]
        t = room[: len(block)]
        if columns is None or len(block) < ITEMS:
            np.dot(block, query.heads.reshape(-1, d).T, out=t)
        else:
            product(block, columns, t)
        t = t.reshape(len(block), B, k)
        if begin == 0:
            if np.isneginf(best.worst[users]).any():
                places = _promising(query, t, wanted)
                best.offer(np.repeat(np.arange(users.start, users.stop), places.shape[1]), places.ravel())
            shift = best.worst[users].copy()
            fill_tables(query.log_weight, query.kappa, query.power, shift, slack, table)
        best.n_scored += sift(
            t, begin, items, best.columns[users], query.log_weight, query.kappa, query.power, query.soft,
            peak, order, slack, table, shift, best.left_out.items, starts, best.scores[users], best.found[users],
        )  # fmt: skip


def columns_of(heads: Float[np.ndarray, "B k d"]) -> Float[np.ndarray, "g dh"] | None:
    """The heads as `product` reads them: two dimensions of HEADS heads at a time; None where they do not fit."""
    (B, k, d), n = heads.shape, heads.shape[0] * heads.shape[1] // HEADS
    if B * k % HEADS or d % 2:
        return None
    return np.ascontiguousarray(heads.reshape(n, HEADS, d // 2, 2).transpose(0, 2, 1, 3)).reshape(n, -1)


def _promising(query: Query, t: Float[np.ndarray, "b B k"], wanted: int) -> Int[np.ndarray, "B wanted"]:
    """Items of a block that are probably good, for a first θ: by a rough score, which need not be a bound."""
    t = t[: max(FIRST, 2 * wanted)]
    b, B, _ = t.shape
    if b <= wanted:
        return np.broadcast_to(np.arange(b), (B, b))
    at_0, slope = (math.log(1.5) - 1 / 3, 2 / 3) if query.power else (0.0, 1.0)  # log ω along its tangent at 1/2
    base, slope = query.log_weight + at_0 * query.kappa, slope * query.kappa
    rough = np.empty((B, b), np.float32)
    roughly(t, base.astype(np.float32), slope.astype(np.float32), rough)
    return np.argpartition(rough, b - wanted, axis=1)[:, -wanted:]


def _peaks(query: Query) -> Float[np.ndarray, "B k"]:
    """The term of a head for an item at cosine 1, and a little more: vectors are unit up to 1e-6."""
    return query.log_weight + query.kappa * (math.log1p(1 + 1e-5) if query.power else 1 + 1e-5)


def thresholds_of(query: Query, theta: Float[np.ndarray, " B"]) -> Float[np.ndarray, "B k"]:
    """cut_r of every user without allowance for rounding; above 1 for a head that can be skipped."""
    cut, peak = np.empty(query.kappa.shape), _peaks(query)
    for u in range(len(cut)):
        at = (query.log_weight[u], query.kappa[u], query.power, query.soft, peak[u], np.argsort(peak[u]))
        thresholds(theta[u], *at, 0.0, cut[u])
    return cut
