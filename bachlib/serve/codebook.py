"""Serving from a global codebook ("Global codebook"): densities and lists computed once, π_u decides. Needs no torch.

With heads that all users share, m(i | u) = Σ_r π_u^(r) S_ir is linear in π_u, and S_ir = C_d(κ_r) ω_κ(⟨u_r, v_i⟩) is
known beforehand. Each prototype's items are sorted by S. A threshold algorithm goes down the lists of the prototypes
that matter, always where the bound Σ_r π_r S(r, depth_r) falls most, scores each new item, and stops when the K-th best
is above the bound: no unseen item can be better. If that would take longer than the dense product S π, the product is
used. Both keep all items that rounding could have changed and end in `density`, so the slate is proved to be exact.

**From the lists alone** (`CodebookLists`): L entries per prototype, no (n, k) table. An entry is an item and its S. Let
e_r be the S at the end of list r. The lists reweighted by π_u bound the score of each of their items: from below by
Σ π_r S_ir over the lists that hold it, from above by that and Σ π_r e_r over the others. Items that may be among the
best K get a closer bound from one float32 product, and are scored by `density` from the largest bound down. So the
slate is the best of the union of the lists, the paper's rule. It is the best of the catalogue if the K-th is above
Σ_r π_r e_r, which is what an item of no list can reach: only then is it proved.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from bachlib.serve import exact
from bachlib.serve.density import Best, LeftOut, Query, Rule, rounding
from bachlib.serve.descent import STEP, TRUSTED, descend
from bachlib.serve.rows import STALE, appended, roomy

DENSE_SHARE = 1 / 6  # of the catalogue: scoring more rows one by one takes longer than the dense product
TINY = 1e-30  # relative to its prototype's largest density, smaller ones count as 0
ROUNDED = 1e-6  # relative: more than a density is off as float32 (6e-8)


class CodebookArrays(NamedTuple):
    """Everything needed for serving; each array may be a memory-mapped file."""

    prototypes: Float[np.ndarray, "k d"]  # unit, float32
    kappa: Float[np.ndarray, " k"]
    log_c: Float[np.ndarray, " k"]  # log C_d(κ_r)
    items: Float[np.ndarray, "n d"]  # unit, float32
    density: Float[np.ndarray, "n k"]  # S_ir / exp(peak_r), float32
    peak: Float[np.ndarray, " k"]  # the largest log S of each prototype
    lists: Int[np.ndarray, "k L"]  # rows of items, largest density first

    @property
    def nbytes(self) -> int:
        """Memory beside that of the items."""
        return sum(array.nbytes for name, array in self._asdict().items() if name != "items")


class CodebookLists(NamedTuple):
    """Everything needed for serving from lists of L entries; each array may be a memory-mapped file."""

    prototypes: Float[np.ndarray, "k d"]  # unit, float32
    kappa: Float[np.ndarray, " k"]
    log_c: Float[np.ndarray, " k"]  # log C_d(κ_r)
    items: Float[np.ndarray, "n d"]  # unit, float32
    peak: Float[np.ndarray, " k"]  # the largest log S of each prototype
    lists: Int[np.ndarray, "k L"]  # rows of items, largest density first
    entries: Float[np.ndarray, "k L"]  # their S_ir / exp(peak_r), float32

    nbytes = CodebookArrays.nbytes


def compute(
    prototypes: np.ndarray, kappa: np.ndarray, log_c: np.ndarray, items: np.ndarray, rule: Rule, length: int = 0
) -> CodebookArrays:
    """Densities and sorted lists of every prototype; lists of `length` (default: an eighth of the items)."""
    n, k = len(items), len(prototypes)
    length = min(n, length or _usual(n))
    density, lists, peak = roomy((n, k), np.float32), np.empty((k, length), np.int32), np.empty(k)
    for r, (s, near, peak[r]) in enumerate(_sorted(prototypes, kappa, log_c, items, rule, length)):
        density[:, r], lists[r] = s, near
    return CodebookArrays(prototypes, kappa, log_c, items, density, peak, lists)


def compute_lists(
    prototypes: np.ndarray, kappa: np.ndarray, log_c: np.ndarray, items: np.ndarray, rule: Rule, length: int
) -> CodebookLists:
    """Lists of `length` with their densities, one prototype after the other: there is never an (n, k) table."""
    length, k = min(len(items), length), len(prototypes)
    lists, entries, peak = np.empty((k, length), np.int32), np.empty((k, length), np.float32), np.empty(k)
    for r, (s, near, peak[r]) in enumerate(_sorted(prototypes, kappa, log_c, items, rule, length)):
        entries[r], lists[r] = s[near], near
    return CodebookLists(prototypes, kappa, log_c, items, peak, lists, entries)


def _usual(n: int) -> int:
    return max(4096, n // 8)


def changed(
    arrays: CodebookArrays | CodebookLists, items: Float[np.ndarray, "n d"], gone: Int[np.ndarray, " g"], rule: Rule,
    budget: int | None,
) -> CodebookArrays | CodebookLists | None:  # fmt: skip
    """The codebook of other items, of which the first are those it was computed from: the others enter its lists.

    Removed items stay there and are left out when serving. None if it has to be computed again: a new item has a
    density far above all others, many items have come, or a list of `CodebookLists` has lost a tenth of its entries.
    """
    first, n, (k, length) = len(arrays.items), len(items), arrays.lists.shape
    cached = isinstance(arrays, CodebookLists)
    if cached and len(gone):
        out = np.zeros(n, bool)
        out[gone] = True
        if out[arrays.lists].sum(1).max() > length * STALE:
            return None
    if n == first:
        return arrays._replace(items=items)
    if not cached and length < (1 - STALE) * min(n, _usual(n)):  # the threshold algorithm needs longer lists
        return None
    cosine = items[first:].astype(np.float64) @ arrays.prototypes.astype(np.float64).T
    query = Query(arrays.prototypes, arrays.log_c[None], arrays.kappa[None], rule)
    log_s = query.terms_at(cosine) - arrays.peak
    if log_s.max() > 20:  # float32 would lose the others
        return None
    s = np.exp(log_s)
    new = np.where(s < TINY, 0, s).astype(np.float32)
    density = None if cached else appended(arrays.density, new)
    longest = length if length < first else min(n, budget if cached else _usual(n))
    lists, entries = np.empty((k, longest), np.int32), np.empty((k, longest), np.float32)
    for r in range(k):
        order = np.argsort(-new[:, r], kind="stable")
        of = arrays.entries[r].__getitem__ if cached else (lambda at, r=r: density[arrays.lists[r, at], r])
        at = [bisect_right(range(length), -s, key=lambda place: -of(place)) for s in new[order, r]]
        lists[r] = np.insert(arrays.lists[r], at, first + order)[:longest]
        if cached:
            entries[r] = np.insert(arrays.entries[r], at, new[order, r])[:longest]
    return arrays._replace(items=items, lists=lists, **({"entries": entries} if cached else {"density": density}))


def _sorted(
    prototypes: np.ndarray, kappa: np.ndarray, log_c: np.ndarray, items: np.ndarray, rule: Rule, length: int
) -> Iterator[tuple[Float[np.ndarray, " n"], Int[np.ndarray, " L"], float]]:
    """Of each prototype: densities relative to the largest, rows of the first `length`, log of the largest."""
    n, wide = len(items), items.astype(np.float64)
    for r in range(len(prototypes)):
        query = Query(prototypes[None, r : r + 1], log_c[None, r : r + 1], kappa[None, r : r + 1], rule)
        log_s = query.terms_at((wide @ prototypes[r].astype(np.float64))[:, None])[:, 0]
        s = np.exp(log_s - log_s.max())
        near = np.argpartition(-s, length - 1)[:length] if length < n else np.arange(n)
        yield np.where(s < TINY, 0, s), near[np.lexsort((near, -s[near]))], log_s.max()


def top_k(
    arrays: CodebookArrays, pi: Float[np.ndarray, "B k"], K: int, left_out: LeftOut, rule: Rule
) -> tuple[Best, Int[np.ndarray, " B"]]:
    """(the exact best K of every π_u, number of rows looked at: all of them if the dense product was used)."""
    B, (n, k) = len(pi), arrays.density.shape
    best, weight, _ = _begun(arrays, pi, K, left_out, rule)
    weight = weight.astype(np.float32)
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


def from_lists(
    arrays: CodebookLists, pi: Float[np.ndarray, "B k"], K: int, left_out: LeftOut, rule: Rule
) -> tuple[Best, Int[np.ndarray, " B"], Bool[np.ndarray, " B"]]:
    """(the best K of the union of the lists, number of items scored, is it proved to be the best K of all?).

    If the lists hold fewer than K items that may be served, the whole catalogue is scanned for that π_u.
    """
    n, (k, length) = len(arrays.items), arrays.lists.shape
    best, weight, log_unit = _begun(arrays, pi, K, left_out, rule)
    everything = length == n
    end = np.zeros(k) if everything else arrays.entries[:, -1].astype(np.float64)
    flat, above = arrays.lists.ravel(), arrays.entries - end[:, None]
    union = np.flatnonzero(np.bincount(flat, minlength=n))
    scored, proved = np.zeros(len(pi), np.int64), np.full(len(pi), everything)
    for u in range(len(pi)):
        places = np.setdiff1d(union, left_out[u : u + 1].items, assume_unique=True)
        if len(places) < K:
            full = exact.top_k(best.query[u : u + 1], arrays.items, K, left_out[u : u + 1])
            best.scores[u], best.found[u], scored[u], proved[u] = full.scores[0], full.found[0], n, True
            continue
        at_least, more = (
            np.bincount(flat, (weight[u][:, None] * of).ravel(), minlength=n)[places] for of in (arrays.entries, above)
        )
        unseen = weight[u] @ end
        kth = np.partition(at_least, -K)[-K] * (1 - ROUNDED)
        places = places[(more + unseen) * (1 + ROUNDED) + k * TINY >= kth]
        light = weight[u] < 1e-3 * unseen / k  # all together: at most a thousandth of what an unseen item can reach
        query = best.query[u : u + 1]
        heavy = Query(query.heads[:, ~light], query.log_weight[:, ~light], query.kappa[:, ~light], rule)
        bound = heavy.bound(arrays.items[places] @ arrays.prototypes[~light].T + rounding(arrays.items.shape[1]))
        with np.errstate(divide="ignore"):
            bound = np.logaddexp(bound, np.log(weight[u][light].sum()) + log_unit[u]) + 1e-9
        order = np.argsort(-bound)
        while scored[u] < len(order) and bound[order[scored[u]]] >= best.worst[u]:
            some = places[order[scored[u] : scored[u] + K]]
            best.offer(np.full(len(some), u), some)
            scored[u] += len(some)
        proved[u] |= best.worst[u] > np.log(unseen * (1 + ROUNDED) + k * TINY) + log_unit[u]
    return best, scored, proved


def query_of(arrays: CodebookArrays | CodebookLists, pi: Float[np.ndarray, "B k"], rule: Rule) -> Query:
    """The query of users of the codebook."""
    heads, kappa = (np.broadcast_to(x, (len(pi), *x.shape)) for x in (arrays.prototypes, arrays.kappa))
    with np.errstate(divide="ignore"):
        return Query(heads, np.log(pi) + arrays.log_c, kappa, rule)


def _begun(
    arrays: CodebookArrays | CodebookLists, pi: Float[np.ndarray, "B k"], K: int, left_out: LeftOut, rule: Rule
) -> tuple[Best, Float[np.ndarray, "B k"], Float[np.ndarray, " B"]]:
    """(nothing found yet, the weights π_r exp(peak_r) relative to the largest, log of the largest)."""
    best = Best(query_of(arrays, pi, rule), arrays.items, K, left_out)
    with np.errstate(divide="ignore"):
        scale = np.log(pi) + arrays.peak
    return best, np.exp(scale - scale.max(1, keepdims=True)), scale.max(1)
