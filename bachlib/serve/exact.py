"""Exact top-K over the whole catalogue: cache-sized blocks, and bounds that leave nearly all items out.

An item reaches the K-th best score θ only if Σ_r exp(term_r) ≥ e^θ. Three looks at an item, each at what the one before
has let through:

    1. With parts λ_r that sum to e^θ, at least one head has to give its part: t_r ≥ τ_r. One comparison per cosine.
    2. Each head's term is looked up in a table of its density over the cosine, rounded up. No logarithm or exponential.
    3. The score itself in float64 (`density`), for a few hundred items.

The cosines of a block are one float32 matrix product; 1 and 2 allow for its rounding. So what is left out is proved to
be worse, and the slate is that of `density.brute_force`, to the bit.
"""

from __future__ import annotations

import math

import numpy as np
from jaxtyping import Float, Int
from numba import njit

from bachlib.serve.density import Best, LeftOut, Query, combined, holds, insert, is_left_out, item_terms, rounding

BLOCK, WIDTH = 1 << 18, 8192  # cosines at a time (a megabyte), and items at the most
USERS = 64  # at a time
FIRST = 3072  # items that are looked at for a θ to begin with
BINS = 256  # of a head's table
CHUNK = 512  # items between two looks at whether θ has risen


def top_k(
    query: Query,
    items: Float[np.ndarray, "n d"],
    K: int,
    left_out: LeftOut,
    start: tuple[Int[np.ndarray, " m"], Int[np.ndarray, " m"]] | None = None,
) -> Best:
    """The exact best K of every user. `start`: (users, places) to look at first; good ones leave less to do."""
    best = Best(query, items, K, left_out)
    if start is not None:
        best.offer(*start)
    for first in range(0, len(query.log_weight), USERS):
        _scan(best, slice(first, min(first + USERS, len(query.log_weight))))
    return best


def _scan(best: Best, users: slice) -> None:
    query, items = best.query[users], best.items
    (B, k, d), n = query.heads.shape, len(items)
    rows, slack = query.heads.reshape(-1, d).T, rounding(d)
    peak = _peaks(query)
    order, shift, table = np.argsort(peak, axis=1), None, np.empty((B, k, BINS + 2), np.float32)
    starts = best.left_out.starts[users.start : users.stop + 1]
    wanted = best.scores.shape[1] + int(np.diff(starts).max(initial=0))  # so many hold K that may be served
    width = min(n, max(256, 2 * wanted, min(WIDTH, BLOCK // (B * k))))
    room = np.empty((width, B * k), np.float32)
    for begin in range(0, n, width):
        block = items[begin : begin + width]
        t = np.dot(block, rows, out=room[: len(block)]).reshape(len(block), B, k)
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


def _promising(query: Query, t: Float[np.ndarray, "b B k"], wanted: int) -> Int[np.ndarray, "B wanted"]:
    """Items of a block that are likely good, for a θ to begin with: by a rough score that need not bound anything."""
    t = t[: max(FIRST, 2 * wanted)]
    b, B, _ = t.shape
    if b <= wanted:
        return np.broadcast_to(np.arange(b), (B, b))
    at_0, slope = (math.log(1.5) - 1 / 3, 2 / 3) if query.power else (0.0, 1.0)  # log ω along its tangent at 1/2
    base, slope = query.log_weight + at_0 * query.kappa, slope * query.kappa
    rough = np.empty((B, b), np.float32)
    roughly(t, base.astype(np.float32), slope.astype(np.float32), rough)
    return np.argpartition(rough, b - wanted, axis=1)[:, -wanted:]


@njit(nogil=True, cache=True, fastmath=True)
def roughly(t, base, slope, out):
    """out (B, b): the largest of base_r + slope_r t_r."""
    b, B, k = t.shape
    for i in range(b):
        for u in range(B):
            top = base[u, 0] + slope[u, 0] * t[i, u, 0]
            for r in range(1, k):
                top = max(top, base[u, r] + slope[u, r] * t[i, u, r])
            out[u, i] = top


@njit(nogil=True, cache=True)
def fill_tables(log_weight, kappa, power, shift, slack, table):
    """exp(term_r − shift) at the upper edge of each bin of the cosine, so at least what an item in the bin gives."""
    B, k, n = table.shape
    for j in range(n):
        edge = min(2.0 * (j + 1) / BINS - 1.0, 1.0) + slack + 1e-5
        log_omega = math.log1p(edge) if power else edge
        for u in range(B):
            for r in range(k):
                term = log_weight[u, r] - shift[u] + kappa[u, r] * log_omega
                table[u, r, j] = math.exp(min(term, 80.0)) * (1.0 + 1e-6) + 1e-30


def _peaks(query: Query) -> Float[np.ndarray, "B k"]:
    """The term of a head with an item right on it; nothing is above."""
    return query.log_weight + query.kappa * (math.log1p(1 + 1e-6) if query.power else 1 + 1e-6)


@njit(nogil=True, cache=True)
def thresholds(theta, log_weight, kappa, power, soft, peak, order, slack, tau):
    """tau_r, a little low: an item whose float32 cosines are all below cannot reach θ.

    The parts are equal but for heads that cannot reach theirs even with an item right on them (`peak`): those give
    what they can and are never asked, the others share the rest.
    """
    k = len(log_weight)
    if not soft or theta == -np.inf:
        tau[:] = theta - slack - 1e-6
        return
    theta -= 1e-9 * (1.0 + abs(theta))  # what equals θ may come in by its number
    below, log_part = 0.0, np.inf
    for place in range(k):
        most = math.exp(min(peak[order[place]] - theta, 700.0))
        part = (1.0 - below) / (k - place)
        if most > part:
            log_part = math.log(part)
            break
        below += most
    for r in range(k):
        needed = theta + log_part - log_weight[r]
        if kappa[r] > 0.0:
            t = needed / kappa[r]
            if power:
                t = math.expm1(min(t, 2.0))
        else:
            t = np.inf if needed > 0.0 else -np.inf
        tau[r] = t - slack - 1e-6


@njit(nogil=True, cache=True)
def sift(
    t, begin, items, columns, log_weight, kappa, power, soft, peak, order, slack, table, shift, left_out, starts,
    scores, found,
):  # fmt: skip
    """All three looks at a block of cosines t (b, B, k) whose first item is `begin`. Returns how many were scored."""
    b, B, k = t.shape
    K = scores.shape[1]
    n_scored = 0
    terms, tau, hits = np.empty(k), np.empty((B, k), np.float32), np.empty((CHUNK * B, 2), np.int64)
    theta, enough = np.full(B, np.nan), np.empty(B)
    for first in range(0, b, CHUNK):
        for u in range(B):
            if theta[u] != scores[u, K - 1]:
                theta[u] = scores[u, K - 1]
                thresholds(theta[u], log_weight[u], kappa[u], power, soft, peak[u], order[u], slack, tau[u])
                enough[u] = math.exp(min(theta[u] - shift[u], 60.0)) * (1.0 - 1e-5)  # the table stops at 80
        for hit in range(collect(t[first : first + CHUNK], tau, hits)):
            i, u = first + hits[hit, 0], hits[hit, 1]
            if soft:
                total = 0.0
                for r in range(k):
                    place = int((t[i, u, r] + np.float32(1.0)) * np.float32(0.5 * BINS))
                    total += table[u, r, min(max(place, 0), BINS + 1)]
                if total < enough[u]:
                    continue
            if is_left_out(begin + i, left_out, starts[u], starts[u + 1]) or holds(found[u], begin + i):
                continue
            item_terms(items[begin + i], columns[u], log_weight[u], kappa[u], power, terms)
            insert(combined(terms, soft), begin + i, scores[u], found[u])
            n_scored += 1
    return n_scored


@njit(nogil=True, cache=True)
def collect(t, tau, hits):
    """Fill hits with the (item, user) whose cosines t (b, B, k) reach τ_r for some head; returns how many."""
    b, B, k = t.shape
    count = 0
    for i in range(b):
        for u in range(B):
            passes = 0
            for r in range(k):
                passes += t[i, u, r] >= tau[u, r]
            hits[count, 0], hits[count, 1] = i, u
            count += passes > 0
    return count


def thresholds_of(query: Query, theta: Float[np.ndarray, " B"]) -> Float[np.ndarray, "B k"]:
    """τ_r of every user without room for rounding; above 1 for a head that need not be asked."""
    tau = np.empty(query.kappa.shape)
    peak = _peaks(query)
    order = np.argsort(peak, axis=1)
    for u in range(len(tau)):
        at = (query.log_weight[u], query.kappa[u], query.power, query.soft, peak[u], order[u])
        thresholds(theta[u], *at, 0.0, tau[u])
    return tau
