"""Exact top-K over the whole catalogue: cache-sized blocks, and bounds that skip nearly all items.

An item reaches the K-th best score θ only if Σ_r exp(term_r) ≥ e^θ. Three filters, one after the other:
    1. With parts λ_r that sum to e^θ, at least one head has to give its part: t_r ≥ cut_r. One comparison per cosine.
    2. Each head's term is looked up in a table of its density over the cosine, rounded up. No logarithm or exponential.
    3. The score itself in float64 (`density`), for a few hundred items.
The cosines of a block are one float32 matrix product, compiled with the widest vectors of this machine if the heads
fill them. Of a catalogue that is larger than the caches, 1 and 2 read `Coarse` items, which are a quarter as large: the
scan would otherwise wait for memory. 1 and 2 allow for all rounding. So every skipped item is proved to be worse, and
the slate is that of `density.brute_force`, to the bit.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from bachlib.serve.density import Best, LeftOut, Query, rounding
from bachlib.serve.kernels import BINS, HEADS, ITEMS, VNNI, fill_tables, product, roughly, scan, sift, thresholds
from bachlib.serve.rows import appended

BLOCK, WIDTH = 1 << 18, 8192  # cosines at a time (a megabyte), and items at the most
USERS = 64  # at a time
FIRST = 3072  # items that give a first θ
MANY = 1 << 16  # items that do not fit into a cache
NO_CODES = tuple(np.empty(shape, kind) for shape, kind in (
    ((0, 0), np.uint8), (0, np.float32), ((0, 0), np.uint8), (0, np.int32), (0, np.float32)
))  # fmt: skip


class Coarse(NamedTuple):
    """Items as whole numbers from −127 to 127 times a scale each: a quarter of the bytes that a scan has to read."""

    codes: UInt8[np.ndarray, "n d"]  # 128 more than these numbers
    scale: Float[np.ndarray, " n"]
    off: float  # the largest distance of an item from what its codes stand for

    @classmethod
    def of(cls, items: Float[np.ndarray, "n d"]) -> Coarse | None:
        """None for so few items that reading them takes no time, and where the processor cannot multiply codes."""
        if len(items) < MANY or not VNNI or items.shape[1] % 8:
            return None
        parts = [_whole(items[first : first + WIDTH]) for first in range(0, len(items), WIDTH)]
        codes, scale, off = zip(*parts, strict=True)
        return cls(np.concatenate(codes) ^ np.uint8(128), np.concatenate(scale), max(off))

    def with_more(self, items: Float[np.ndarray, "m d"]) -> Coarse:
        codes, scale, off = _whole(items)
        return Coarse(appended(self.codes, codes ^ np.uint8(128)), appended(self.scale, scale), max(self.off, off))

    def side_of(self, heads: Float[np.ndarray, "B k d"]) -> tuple[tuple, float]:
        """(the arguments of `kernels.scan`, the largest error of their cosines without that of float32)."""
        codes, unit, off = _whole(heads.reshape(-1, heads.shape[-1]))
        groups, start = len(codes) // HEADS, np.zeros((len(codes), 2), np.int32)
        start[:, 0] = -128 * codes.view(np.int8).sum(1, dtype=np.int32)
        quads = codes.reshape(groups, HEADS, -1, 2, 4).transpose(0, 2, 1, 3, 4).reshape(groups, -1)
        error = off * (1 + self.off) + self.off * (1 + 1e-5)
        return (self.codes, self.scale, np.ascontiguousarray(quads), start.ravel(), unit), error


def _whole(rows: Float[np.ndarray, "n d"]) -> tuple[UInt8[np.ndarray, "n d"], Float[np.ndarray, " n"], float]:
    """(whole numbers as the bytes of int8, the scale of each row, the largest distance of a row from their product)."""
    scale = np.maximum(np.abs(rows).max(1), np.float32(1e-6)) / np.float32(127)
    whole = np.rint(rows / scale[:, None])
    off = np.linalg.norm(rows.astype(np.float64) - whole * scale[:, None].astype(np.float64), axis=1).max()
    return whole.astype(np.int8).view(np.uint8), scale, float(off)


def top_k(
    query: Query, items: Float[np.ndarray, "n d"], K: int, left_out: LeftOut, start: tuple = (),
    coarse: Coarse | None = None,
) -> Best:  # fmt: skip
    """The exact best K of every user. `start`: (users, places) to score first; good ones save work."""
    best = Best(query, items, K, left_out)
    if start:
        best.offer(*start)
    elif left_out.may is not None:
        for u, may in enumerate(left_out.may):
            some = may[:: -(-len(may) // max(FIRST, 2 * K))]
            t = items[some] @ query.heads[u].T
            near = some[_promising(query[u : u + 1], t[:, None], K)[0]]
            best.offer(np.full(len(near), u), near)
    for first in range(0, len(query.log_weight), USERS):
        _scan(best, slice(first, min(first + USERS, len(query.log_weight))), coarse)
    return best


def _scan(best: Best, users: slice, coarse: Coarse | None) -> None:
    query, items = best.query[users], best.items
    (B, k, d), n, peak = query.heads.shape, len(items), _peaks(query)
    slack, columns = rounding(d), columns_of(query.heads)
    side = NO_CODES
    if coarse is not None and columns is not None:
        side, error = coarse.side_of(query.heads)
        slack = error + slack * (1 + error)
    order, table = np.argsort(peak, axis=1), np.empty((B, k, BINS + 2), np.float32)
    starts = best.left_out.starts[users.start : users.stop + 1]
    K = best.scores.shape[1]
    out = best.left_out[users]
    own, spread = int(out.n_own.max(initial=0)), int(out.spread().max(initial=0))
    wanted = min(K + own + 2 * K * spread // n, 4 * K + 100)  # usually holds K items that may be served
    width = min(n, max(256, 2 * wanted, min(WIDTH, BLOCK // (B * k))))
    width = n if n - width < ITEMS else width
    if columns is None or n < ITEMS:
        cosines = partial(np.dot, b=query.heads.reshape(-1, d).T)
    else:
        cosines = partial(product, columns=columns)
    room = np.empty((width, B * k), np.float32)
    cosines(items[:width], out=room)
    if np.isneginf(best.worst[users]).any():
        places = _promising(query, room.reshape(width, B, k), wanted)
        best.offer(np.repeat(np.arange(users.start, users.stop), places.shape[1]), places.ravel())
    shift = best.worst[users].copy()
    fill_tables(query.log_weight, query.kappa, query.power, shift, slack, table)
    rest = (
        items, best.columns[users], query.log_weight, query.kappa, query.power, query.soft, peak, order, slack, table,
        shift, best.left_out.items, starts, best.scores[users], best.found[users],
    )  # fmt: skip
    best.n_scored += sift(room.reshape(width, B, k), 0, *rest)
    if columns is not None:
        best.n_scored += scan(columns, side, width, *rest)
        return
    for begin in range(width, n, width):
        t = room[: min(width, n - begin)]
        np.dot(items[begin : begin + width], query.heads.reshape(-1, d).T, out=t)
        best.n_scored += sift(t.reshape(-1, B, k), begin, *rest)


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
