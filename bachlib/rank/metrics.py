"""Metrics of rankings and slates, per user (section 6.1, "Metrics"); vectorised over users.

`ranked` holds item ids, best first: (n,) for one user or (U, n) for many, padded with −1. `relevant` holds ids: a list,
set or array for one user, (U, m) or a list of lists for many, padded with −1. One user gives a number, many an array.
The `_of_ranks` functions take the ranks of the relevant items (from 1; 0 is padding) instead of lists; training and
`evaluate` use these.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float, Int

from bachlib import BachError

Ids = Iterable
Ranks = Int[np.ndarray, "U m"]
Slates = Int[np.ndarray, "U K"]
PerUser = Float[np.ndarray, " U"]
NEVER = np.iinfo(np.int64).max  # rank of a relevant item that is not in the list
BLOCK = 1 << 25  # numbers at a time


def recall(ranked: Ids, relevant: Ids, k: int) -> float | PerUser:
    """Recall@K: the share of the relevant items among the first K."""
    return _per_user(recall_of_ranks, ranked, relevant, k)


def ndcg(ranked: Ids, relevant: Ids, k: int) -> float | PerUser:
    """NDCG@K with gain 1 and discount 1/log₂(1 + rank). The ideal ranking has *all* relevant items first."""
    return _per_user(ndcg_of_ranks, ranked, relevant, k)


def average_precision(ranked: Ids, relevant: Ids, k: int | None = None) -> float | PerUser:
    """AP: the sum of the precisions at the relevant items, divided by their number (for AP@K by at most K).

    Over a ranking of the full catalogue this is our AUPRC. (The paper calls AUPRC "mean average precision" and says "at
    K = 100"; its MostPop rows fit the full ranking better. AP@100 is always reported beside it.)
    """
    return _per_user(average_precision_of_ranks, ranked, relevant, k)


def hit_rate(ranked: Ids, relevant: Ids, k: int) -> float | PerUser:
    """1 if at least one of the first K is relevant."""
    return _per_user(hit_rate_of_ranks, ranked, relevant, k)


def recall_of_ranks(ranks: Ranks, k: int) -> PerUser:
    return ((ranks > 0) & (ranks <= k)).sum(1) / (ranks > 0).sum(1)


def ndcg_of_ranks(ranks: Ranks, k: int) -> PerUser:
    return dcg_of_ranks(ranks, k) / ideal_dcg(np.minimum((ranks > 0).sum(1), k))


def dcg_of_ranks(ranks: Ranks, k: int) -> PerUser:
    """Σ 1/log₂(1 + rank) over the relevant items among the first K."""
    return np.where((ranks > 0) & (ranks <= k), 1 / np.log2(1.0 + np.maximum(ranks, 1)), 0.0).sum(1)


def ideal_dcg(n: Int[np.ndarray, " U"]) -> PerUser:
    """DCG of n relevant items at ranks 1 … n."""
    return np.cumsum(1 / np.log2(1.0 + np.arange(1, n.max() + 1)))[n - 1]


def average_precision_of_ranks(ranks: Ranks, k: int | None = None) -> PerUser:
    ordered = np.sort(np.where(ranks > 0, ranks, NEVER), axis=1)  # pads last
    precision = np.where(ordered < NEVER, np.arange(1, ranks.shape[1] + 1) / ordered, 0.0)
    k = NEVER if k is None else k
    return np.where(ordered <= k, precision, 0.0).sum(1) / np.minimum((ranks > 0).sum(1), k)


def hit_rate_of_ranks(ranks: Ranks, k: int) -> PerUser:
    return ((ranks > 0) & (ranks <= k)).any(1).astype(float)


def ranks_of(ranked: Int[np.ndarray, "U n"], relevant: Int[np.ndarray, "U m"]) -> Int[np.ndarray, "U m"]:
    """Rank (from 1) of each relevant item in its user's list; `NEVER` if it is not in the list, 0 for padding."""
    order = np.argsort(ranked, axis=1, kind="stable")
    by_id = np.take_along_axis(ranked, order, 1)
    found = np.empty(relevant.shape, np.int64)
    for row, (ids, wanted) in enumerate(zip(by_id, relevant, strict=True)):
        at = np.minimum(np.searchsorted(ids, wanted), len(ids) - 1)
        found[row] = np.where(ids[at] == wanted, order[row, at] + 1, NEVER)
    return np.where(relevant < 0, 0, found)


def coverage(slates: Slates, n_items: int) -> float:
    """The share of the catalogue that occurs in at least one slate."""
    return len(np.unique(_full(slates))) / n_items


def diversity(slates: Slates, features: Float[np.ndarray, "n_items f"]) -> PerUser:
    """Intra-list diversity: 1 − the mean cosine between the features of two items of the slate."""
    K = _full(slates).shape[1]
    if K < 2:
        raise BachError(f"diversity needs slates of at least 2 items; got {K}")
    features = np.asarray(features)
    length = np.linalg.norm(features, axis=1, keepdims=True)
    unit = features / np.where(length > 0, length, 1)
    own = (length[slates][..., 0] > 0).sum(1)  # cosines of the items with themselves
    size = max(1, BLOCK // (K * features.shape[1] + 1))  # users at a time: there may be thousands of categories
    parts = np.array_split(slates, max(1, -(-len(slates) // size)))
    together = np.concatenate([np.square(unit[part].sum(1)).sum(1) for part in parts])
    return 1 - (together - own) / (K * (K - 1))


def novelty(slates: Slates, popularity: Float[np.ndarray, " n_items"]) -> PerUser:
    """Mean −log₂ of the popularity of an item, in bits; `popularity` is the share of users who know it."""
    popularity = np.asarray(popularity, float)
    floor = popularity[popularity > 0].min() / 2  # of an item without users
    return -np.log2(np.maximum(popularity, floor))[_full(slates)].mean(1)


def popularity_bias(slates: Slates, popularity: Float[np.ndarray, " n"], known: Int[np.ndarray, "U h"]) -> PerUser:
    """Mean popularity of the slate / mean popularity of the user's known items − 1. 0: equal, 1: twice as popular."""
    popularity, known = np.asarray(popularity, float), np.asarray(known)
    own = np.where(known >= 0, popularity[np.maximum(known, 0)], 0).sum(1) / (known >= 0).sum(1)
    return popularity[_full(slates)].mean(1) / own - 1


def interest_coverage(slates: Slates, labels: Float[np.ndarray, "n m"], wanted: Float[np.ndarray, "U m"]) -> PerUser:
    """The share of a user's interests that occur in the slate; NaN for a user without interests.

    `labels` are the interests of the items, `wanted` those of the users: 0 and 1, or weights such as a planted π_u.
    """
    labels, wanted = np.asarray(labels), np.asarray(wanted)
    met = np.zeros(wanted.shape, bool)
    for column in _full(slates).T:  # (U,) items at one place
        met |= labels[column] > 0
    with np.errstate(invalid="ignore"):
        return (wanted * met).sum(1) / wanted.sum(1)


def _per_user(of_ranks, ranked: Ids, relevant: Ids, k: int | None) -> float | PerUser:
    whole = of_ranks is average_precision_of_ranks and k is None
    if not whole and not (isinstance(k, int | np.integer) and k >= 1):
        raise BachError(f"k should be a whole number ≥ 1; got {k!r}")
    if isinstance(ranked, set | frozenset):
        raise BachError("ranked is a set, which has no order; pass a list, best first")
    if not all(isinstance(x, Iterable) for x in (ranked, relevant)):
        raise BachError(f"ranked and relevant should be lists of item ids; got {ranked!r:.40} and {relevant!r:.40}")
    ranked, relevant = (np.asarray(x) if hasattr(x, "__array__") else list(x) for x in (ranked, relevant))
    one = not (len(ranked) and np.ndim(ranked[0]))
    if not one and len(relevant) and not isinstance(relevant[0], Iterable):
        raise BachError("ranked holds a list per user; relevant should also hold a list per user")
    lists, wanted = _lists([ranked] if one else ranked, "ranked"), _lists([relevant] if one else relevant, "relevant")
    if len(lists) != len(wanted):
        raise BachError(f"ranked has {len(lists)} lists and relevant {len(wanted)}; both should have one per user")
    if (nothing := ~(wanted >= 0).any(1)).any():
        raise BachError(f"user {np.flatnonzero(nothing)[0]} has no relevant item; every user needs at least one")
    found = of_ranks(ranks_of(lists, wanted), k)
    return float(found[0]) if one else found


def _lists(given: Ids, name: str) -> Int[np.ndarray, "U n"]:
    """(U, n) ids, each once in a row; shorter lists are padded with −1."""
    rows = [np.asarray(row if hasattr(row, "__array__") else list(row)) for row in given]
    if wrong := [row for row in rows if row.ndim != 1 or (len(row) and not np.issubdtype(row.dtype, np.integer))]:
        raise BachError(f"{name} should hold item ids, whole numbers; got {wrong[0].ravel()[:3]} …")
    filled = np.full((len(rows), max([1, *map(len, rows)])), -1, np.int64)
    for row, ids in enumerate(rows):
        filled[row, : len(ids)] = ids
    by_id = np.sort(filled, axis=1)
    if len(twice := np.argwhere((by_id[:, 1:] == by_id[:, :-1]) & (by_id[:, 1:] >= 0))):
        row, place = twice[0]
        raise BachError(f"{name} holds item {by_id[row, place]} twice (list {row}); every item may occur once")
    return filled


def _full(slates: Slates) -> Int[np.ndarray, "U K"]:
    slates = np.asarray(slates)
    if slates.ndim != 2 or not slates.size or slates.min() < 0:
        raise BachError(f"slates should be (U, K) item ids without padding; got shape {slates.shape}")
    return slates
