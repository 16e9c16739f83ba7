"""The score of one item, in float64 and always by the same operations, and bounds on it. Needs no torch.

    mixture         m(i | u) = Σ_r π_r C_d(κ_r) ω_κ(⟨u_r, v_i⟩)  (eq. 23), as log m = log Σ_r exp(a_r + log ω_κ(t_r))
    max over heads  max_r ⟨u_r, v_i⟩  (eq. 8)

Every strategy ends here: a scan, a graph or a cached list only decides *which* items are scored. The score of an item
does not depend on its place in a block, so strategies that find the same items return the same slate, to the bit, and
items with equal vectors tie and are ordered by number.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bachlib.serve.kernels import EPS, rescore, shares
from bachlib.serve.normalizer import log_normalizer
from bachlib.serve.rows import is_among

Rule = Literal["power-spherical", "von-mises-fisher", "max over heads"]


class Query(NamedTuple):
    """B requests: heads, their weights and their concentrations."""

    heads: Float[np.ndarray, "B k d"]  # float32, unit
    log_weight: Float[np.ndarray, "B k"]  # a_r = log π_r + log C_d(κ_r); 0 for max over heads
    kappa: Float[np.ndarray, "B k"]  # 1 for max over heads
    rule: Rule

    @classmethod
    def of(cls, heads: np.ndarray, pi: Float[np.ndarray, "B k"], kappa: np.ndarray | None, rule: Rule) -> Query:
        """From π and κ, which max over heads ignores."""
        if rule == "max over heads":
            return cls(heads, np.zeros(pi.shape), np.ones(pi.shape), rule)
        with np.errstate(divide="ignore"):
            return cls(heads, np.log(pi) + log_normalizer(kappa, heads.shape[-1], rule), kappa, rule)

    @property
    def power(self) -> bool:
        return self.rule == "power-spherical"

    @property
    def soft(self) -> bool:
        """True if the score is a sum over heads, False if it is the best head's."""
        return self.rule != "max over heads"

    def __getitem__(self, rows) -> Query:
        return Query(self.heads[rows], self.log_weight[rows], self.kappa[rows], self.rule)

    def terms_at(self, t: Float[np.ndarray, "B k"]) -> Float[np.ndarray, "B k"]:
        """a_r + log ω_κ(t_r) for one cosine per head."""
        with np.errstate(invalid="ignore"):
            log_omega = np.log1p(np.maximum(t, EPS - 1)) if self.power else t
            return self.log_weight + np.where(self.kappa > 0, self.kappa * log_omega, 0.0)

    def bound(self, t: Float[np.ndarray, "B k"]) -> Float[np.ndarray, " B"]:
        """No item whose cosines are at most t_r scores above this."""
        terms = self.terms_at(t)
        return log_sum_exp(terms) if self.soft else terms.max(-1)


def log_sum_exp(x: Float[np.ndarray, "B k"]) -> Float[np.ndarray, " B"]:
    top = np.maximum(x.max(-1), -np.finfo(float).max)  # all −∞ stays −∞
    with np.errstate(divide="ignore"):
        return top + np.log(np.exp(x - top[..., None]).sum(-1))


def rounding(d: int) -> float:
    """The largest error of a float32 inner product of unit vectors, in any order of summation."""
    return (d + 4) * 2.0**-24 * 1.01


class Best:
    """The best K items of each of B users so far, filled by `rescore`."""

    def __init__(self, query: Query, items: Float[np.ndarray, "n d"], K: int, left_out: LeftOut):
        B = len(query.log_weight)
        self.query, self.items, self.left_out = query, items, left_out
        self.columns = np.ascontiguousarray(query.heads.transpose(0, 2, 1), np.float64)  # (B, d, k)
        self._scored_by = (items, self.columns, query.log_weight, query.kappa, query.power, query.soft)
        self.scores = np.full((B, K), -np.inf)
        self.found = np.full((B, K), len(items), np.int64)  # no item yet: any is better
        self.n_scored = 0

    @property
    def worst(self) -> Float[np.ndarray, " B"]:
        """θ: the score an item must reach to enter; −∞ while there are fewer than K."""
        return self.scores[:, -1]

    def offer(self, users: Int[np.ndarray, " m"], places: Int[np.ndarray, " m"]) -> Float[np.ndarray, " m"]:
        """Score these items for these users; returns the scores, ∞ for an item that is among the best already."""
        self.n_scored += len(places)
        out = self.left_out
        return rescore(users, places, *self._scored_by, out.items, out.starts, self.scores, self.found)

    def shares(self) -> Float[np.ndarray, "B K k"]:
        out = np.empty((*self.found.shape, self.columns.shape[2]))
        shares(self.found, *self._scored_by, out)
        return out


class LeftOut(NamedTuple):
    """Per user the rows that must not be served: items[starts[u]:starts[u + 1]], ascending, unique."""

    items: Int[np.ndarray, " m"]
    starts: Int[np.ndarray, " B_plus_1"]
    n_own: Int[np.ndarray, " B"]  # the number of each user's rows that others may be served
    may: list[Int[np.ndarray, " a"]] | None = None  # with allow-lists: the rows each user may be served, ascending

    @classmethod
    def of(cls, lists: list[np.ndarray], gone: Int[np.ndarray, " g"] | tuple = ()) -> LeftOut:
        """`gone`: rows that nobody is served, ascending, unique."""
        lists, gone = [np.unique(np.asarray(rows, np.int64)) for rows in lists], np.asarray(gone, np.int64)
        if len(gone):  # merged: sorting all of them for every request would take long
            lists = [rows[~is_among(rows, gone)] for rows in lists]
        n_own = np.array([len(rows) for rows in lists])
        if len(gone):
            lists = [np.insert(gone, np.searchsorted(gone, rows), rows) for rows in lists]
        return cls(np.concatenate([*lists, np.empty(0, np.int64)]), np.cumsum([0, *map(len, lists)]), n_own)

    @classmethod
    def all_but(cls, may: list[np.ndarray], n: int, n_own: Int[np.ndarray, " B"]) -> LeftOut:
        """All of n rows but those that each user may be served."""
        lists = []
        for rows in may:
            out = np.ones(n, bool)
            out[rows] = False
            lists.append(np.flatnonzero(out))
        return cls(np.concatenate(lists), np.cumsum([0, *map(len, lists)]), n_own, may)

    def spread(self) -> Int[np.ndarray, " B"]:
        """The number of the other rows: those that are gone, or on no allow-list of the user."""
        return np.diff(self.starts) - self.n_own

    def __getitem__(self, rows: slice) -> LeftOut:
        starts = self.starts[rows.start : rows.stop + 1]
        may = None if self.may is None else self.may[rows]
        return LeftOut(self.items[starts[0] : starts[-1]], starts - starts[0], self.n_own[rows], may)


def brute_force(query: Query, items: Float[np.ndarray, "n d"], K: int, left_out: LeftOut) -> Best:
    """Score every item: the plain version that all strategies are tested against."""
    best, (B, n) = Best(query, items, K, left_out), (len(query.log_weight), len(items))
    best.offer(np.repeat(np.arange(B), n), np.tile(np.arange(n), B))
    return best
