"""The served items: numbers, vectors and what was computed from them. A catalogue is replaced, never changed.

Adding and removing items take milliseconds: new rows are written behind those that readers see, and removed items keep
their places but are left out of every request, until a tenth of the catalogue has changed.

An item keeps its number. An item that is no longer served stays known, because histories may hold it; an item that came
after training has a number beyond the data set's. `Labels` are the items' raw ids (those of the user's log) and genres.
Below: checks of the numbers, raw ids and vectors that users give.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from bachlib import BachError
from bachlib.reading import numbers_of, plain
from bachlib.serve.codebook import CodebookArrays, CodebookLists
from bachlib.serve.density import LeftOut
from bachlib.serve.exact import Coarse
from bachlib.serve.rows import appended, is_among

Genres = Sequence[Sequence[str]]  # those of each item
NO_LABEL = {"raw_ids": None, "genres": [], "titles": None}  # of an item without


@dataclass(frozen=True, eq=False)
class Labels:
    """What the log calls the known items, by number. Each may be missing."""

    raw_ids: list | None = None  # None for an item without
    genres: Genres | None = None
    titles: list | None = None

    @classmethod
    def of(cls, n: int, raw_ids: Any = None, genres: Any = None, titles: Any = None) -> Labels:
        """Labels of n items; lists that are given may be longer."""
        for name, given in (("genres", genres), ("raw_ids", raw_ids), ("titles", titles)):
            if given is not None and len(given) < n:
                raise BachError(f"{name} should hold those of each of {n:,} items; got {len(given):,}")
        raw_ids, titles = (None if of is None else plain(of) for of in (raw_ids, titles))
        made = cls(raw_ids, None if genres is None else list(genres), titles)
        made.number  # noqa: B018  raises an error if two items have the same id
        return made

    def items(self) -> list[tuple[str, list]]:
        """The names and values of those that are known."""
        return [(name, own) for name, own in vars(self).items() if name in NO_LABEL and own is not None]

    def resized(self, n: int) -> Labels:
        """For n known items: those that came later have no labels yet."""
        made = Labels(**{name: [*own[:n], *[NO_LABEL[name]] * (n - len(own))] for name, own in self.items()})
        if self.raw_ids and len(self.raw_ids) <= n:  # the same numbers: the first new item would wait for counting them
            made.__dict__["number"] = self.number
        return made

    def replaced(self, **given: Any) -> dict[str, list | None]:
        """Raw ids, genres and titles, those given in place of the first ones here."""
        own = dict(self.items())
        given = {name: plain(one) if name != "genres" else list(one) for name, one in given.items() if one is not None}
        return own | {name: [*one, *own.get(name, [])[len(one) :]] for name, one in given.items()}

    def extended(self, m: int, **given: Any) -> Labels:
        """Labels with those of m more items."""
        known = dict(self.items())
        for name, one in given.items():
            if one is not None and len(one) != m:
                raise BachError(f"{name} should hold those of each of {m} new items; got {len(one)}")
            if one is not None and name not in known:
                raise BachError(f"{name} of new items need those of all others: Retriever(model, {name}=…)")
        new = {name: [NO_LABEL[name]] * m if given.get(name) is None else given[name] for name in known}
        more = Labels.of(0, **new)
        if twice := more.number.keys() & self.number.keys():
            raise BachError(f"raw_ids: two items have the id {min(twice, key=str)!r}; each item needs its own")
        made = Labels(**{name: [*known[name], *one] for name, one in more.items()})
        if "raw_ids" in known:  # kept up to date: counting all of them again would take long
            n = len(self.raw_ids)
            made.__dict__["number"] = self.number | {raw: n + at for raw, at in more.number.items()}
        return made

    @cached_property
    def number(self) -> dict[Any, int]:
        """Raw id → item number."""
        made = {raw: item for item, raw in enumerate(self.raw_ids or []) if raw is not None}
        if len(made) < len(self.raw_ids or []) - (self.raw_ids or []).count(None):
            twice = next(raw for item, raw in enumerate(self.raw_ids) if raw is not None and made[raw] != item)
            raise BachError(f"raw_ids: two items have the id {twice!r}; each item needs its own")
        return made

    def raw_of(self, items: Int[np.ndarray, "B K"]) -> np.ndarray | None:
        """The raw ids of items; None if there are none."""
        if self.raw_ids is None:
            return None
        made = np.empty(items.shape, object)
        made.ravel()[:] = [self.raw_ids[item] for item in items.ravel().tolist()]
        return made

    def known_ids(self, name: str, given: Any) -> Int[np.ndarray, " m"]:
        """Item numbers of raw ids; an error names the unknown ones and what they may be meant to be."""
        return numbers_of(name, given, self.number)


class Catalogue(NamedTuple):
    vectors: Float[np.ndarray, "N d"]  # of all known items, by number; unit, float32
    tokens: Float[np.ndarray, "N d"]  # the rows histories are read from: the same, or frozen rows
    numbers: Int[np.ndarray, " n"]  # of the items that are searched, ascending
    items: Float[np.ndarray, "n d"]  # their vectors
    index: Any = None  # `Neighbours` for two-step
    codebook: CodebookArrays | CodebookLists | None = None
    coarse: Coarse | None = None  # for the exact scan of many items
    labels: Labels = Labels()
    gone: Int[np.ndarray, " g"] = np.empty(0, np.int64)  # places in `items` that are not served any more, ascending

    @classmethod
    def of(cls, vectors: np.ndarray, tokens: np.ndarray | None = None, numbers: np.ndarray | None = None) -> Catalogue:
        vectors = unit_rows("item vectors", vectors)
        tokens = vectors if tokens is None else np.ascontiguousarray(tokens, np.float32)
        everything = numbers is None or len(numbers) == len(vectors)
        numbers = np.arange(len(vectors)) if everything else np.asarray(numbers)
        return cls(vectors, tokens, numbers, vectors if everything else np.ascontiguousarray(vectors[numbers]))

    def places(self, numbers: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m_or_fewer"]:
        """Places of items in `items`; items that have none are skipped."""
        if self.numbers[-1] == len(self.numbers) - 1:  # every item is at the place of its number
            return numbers[numbers < len(self.numbers)]
        return np.searchsorted(self.numbers, numbers)[is_among(numbers, self.numbers)]

    @property
    def served(self) -> Int[np.ndarray, " s"]:
        """The numbers of the served items, ascending."""
        return np.delete(self.numbers, self.gone)

    def with_more(
        self, vectors: Float[np.ndarray, "m d"], tokens: Float[np.ndarray, "m d"], labels: Labels
    ) -> Catalogue:
        """New items behind the others. The arrays are not copied if they have room."""
        numbers = np.arange(len(self.vectors), len(self.vectors) + len(vectors))
        longer = appended(self.vectors, vectors)
        items = longer if self.items is self.vectors else appended(self.items, vectors)
        tokens = longer if self.tokens is self.vectors else appended(self.tokens, tokens)
        return self._replace(
            vectors=longer, tokens=tokens, numbers=np.concatenate((self.numbers, numbers)), items=items,
            coarse=self.coarse and self.coarse.with_more(vectors), labels=labels,
        )  # fmt: skip

    def without(self, numbers: Int[np.ndarray, " m"]) -> Catalogue:
        """These items are not served any more; they keep their places."""
        gone = np.union1d(self.gone, self.places(numbers))
        if len(gone) == len(self.numbers):
            raise BachError("remove: nothing would be left to serve")
        return self._replace(gone=gone)

    def compact(self) -> Catalogue:
        """Only the served items are searched; what was computed from them is left behind."""
        if not len(self.gone):
            return self._replace(index=None, codebook=None, coarse=None)
        tokens = None if self.tokens is self.vectors else self.tokens
        return Catalogue.of(self.vectors, tokens, self.served)._replace(labels=self.labels)

    def left_out(self, lists: list[np.ndarray], K: int, only: list[np.ndarray] | None = None) -> LeftOut:
        """The places that each request must not get: of `lists`, and all that are not of `only`. Raises an error if
        fewer than K items remain.
        """
        if only is not None:
            may, n_own = self.allowed(lists, K, only)
            return LeftOut.all_but(may, len(self.items), n_own)
        out = LeftOut.of([self.places(rows) for rows in lists], self.gone)
        self._enough(K, len(self.numbers) - np.diff(out.starts))
        return out

    def remaining(self, lists: list[np.ndarray], K: int, only: list[np.ndarray] | None = None) -> Int[np.ndarray, " B"]:
        """How many items each request may get; raises an error if these are fewer than K."""
        if only is None:
            return len(self.numbers) - np.diff(self.left_out(lists, K).starts)
        remaining = np.array([np.count_nonzero(left) for left, _ in self._allowed(lists, only)])
        self._enough(K, remaining, only)
        return remaining

    def allowed(
        self, lists: list[np.ndarray], K: int, only: list[np.ndarray]
    ) -> tuple[list[Int[np.ndarray, " a"]], Int[np.ndarray, " B"]]:
        """(the places of `only` that each request may get, ascending; how many of its list it must not get because of
        `lists`). Raises an error if fewer than K remain.
        """
        found = [(np.flatnonzero(left), most) for left, most in self._allowed(lists, only)]
        remaining = np.array([len(places) for places, _ in found])
        self._enough(K, remaining, only)
        return [places for places, _ in found], np.array([most for _, most in found]) - remaining

    def _allowed(self, lists: list[np.ndarray], only: list[np.ndarray]) -> Iterator[tuple[Bool[np.ndarray, " n"], int]]:
        """For each request which places it may get, and how many it might get but for `lists`."""
        last = None
        for rows, own in zip(lists, only, strict=True):
            if own is not last:  # a list for all requests is looked up once
                last, listed = own, np.zeros(len(self.items), bool)
                listed[self.places(own)] = True
                listed[self.gone] = False
                most = np.count_nonzero(listed)
            left = listed.copy()
            left[self.places(rows)] = False
            yield left, most

    def _enough(self, K: int, remaining: Int[np.ndarray, " B"], only: list[np.ndarray] | None = None) -> None:
        if (remaining < checked_K(K)).any():
            row = int(np.argmin(remaining))
            n, kind = (len(self.served), "items") if only is None else (len(only[row]), "allowed items")
            left = f"of {n:,} {kind} {remaining[row]:,} remain for request {row}"
            raise BachError(f"K={K}, but {left} after history and exclusions; ask for at most that many")


def checked_K(K: Any) -> int:
    if not isinstance(K, int | np.integer) or isinstance(K, bool) or K < 1:
        raise BachError(f"K should be a whole number ≥ 1; got {K!r}")
    return int(K)


def known_ids(name: str, given: Any, n: int, pads: bool = False) -> Int[np.ndarray, " m"]:
    """A checked list of item numbers 0 … n − 1; with `pads`, −1 is padding and is dropped."""
    try:
        ids = np.asarray(list(given) if isinstance(given, set | frozenset) else given)
    except ValueError:  # lists of different lengths
        ids = np.empty((1, 1))
    if ids.shape == (0,):
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BachError(f"{name} should be a list of item numbers; got {given!r:.60}")
    if (wrong := ids[(ids < (-1 if pads else 0)) | (ids >= n)]).size:
        raise BachError(f"{name}: there is no item {wrong[0]}; items are 0 … {n - 1}")
    return ids[ids >= 0].astype(np.int64)


def lists_of(name: str, given: Any, known: int | Labels, B: int | None = None) -> list[Int[np.ndarray, " m"]]:
    """The item numbers of each request. `given`: (B, m) numbers (with `Labels`: raw ids), a list of lists, or one list
    for one request or, with `B`, for all of them. `known`: how many items there are, or what they are called.
    """
    raw = isinstance(known, Labels)
    if raw and known.raw_ids is None:
        raise BachError(f"{name}: the ids of the log are not known here; give Retriever(model, dataset=…) or raw_ids=")
    of, ids = ("ids of the log", known.known_ids) if raw else ("item numbers", partial(known_ids, n=known, pads=True))
    if hasattr(given, "__array__"):  # tensors and pandas columns, too
        given = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        raise BachError(f"{name} should be a list of {of}, or one list per request; got {given!r:.60}")
    rows = given if getattr(given, "ndim", 0) == 1 and given.dtype != object else list(given)
    kinds = set() if rows is given else {*map(type, rows)}  # a list may be long
    if not any(issubclass(kind, Iterable) and not (raw and issubclass(kind, str | bytes)) for kind in kinds):
        if not len(rows) and B is None:
            return []
        if getattr(given, "ndim", 1) <= 1:
            return [ids(name, rows)] * (B or 1)
    if B is not None and len(rows) != B:
        raise BachError(f"{name} has {len(rows)} lists for {B} requests: give one per request, or one list for all")
    if raw and (alone := [row for row in rows if isinstance(row, str | bytes) or not isinstance(row, Iterable)]):
        raise BachError(f"{name} should be a list of {of}, or one list per request; got {alone[0]!r} among lists")
    return [ids(f"{name} of request {row}", one) for row, one in enumerate(rows)]


def as_numbers(name: str, given: Any, of: str = "n d") -> np.ndarray:
    """float32 numbers with these dimensions, from an array, a tensor or lists; there is at least one."""
    shape = f"({', '.join(of.split())})"
    try:
        array = np.ascontiguousarray(given.detach().cpu() if hasattr(given, "detach") else given, np.float32)
    except (TypeError, ValueError):
        raise BachError(f"{name} should be numbers, {shape}; got {given!r:.60}") from None
    if array.ndim != len(of.split()) or not array.size:
        raise BachError(f"{name} should be {shape} with at least one item; got shape {array.shape}")
    return array


def unit_rows(name: str, vectors: Any) -> Float[np.ndarray, "n d"]:
    """Checked unit vectors, as the bounds of the scan need them."""
    vectors = as_numbers(name, vectors)
    length = np.linalg.norm(vectors, axis=1)
    if (wrong := np.flatnonzero(~(np.abs(length - 1) < 1e-3))).size:  # NaN is wrong, too
        told = f"row {wrong[0]} has length {length[wrong[0]]:.3g}"
        raise BachError(f"{name} should be unit: {told}; divide each by its length")
    off = np.abs(length - 1) > 1e-6  # the bounds of the scan hold for unit vectors only
    return np.where(off[:, None], vectors / length[:, None], vectors) if off.any() else vectors
