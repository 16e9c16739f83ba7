"""The served items: numbers, vectors and what was computed from them. A catalogue is replaced, never changed.

Adding and removing items take milliseconds: new rows are written behind those that readers see, and removed items keep
their places but are left out of every request, until a tenth of the catalogue has changed.

An item keeps its number. An item that is no longer served stays known, because histories may hold it; an item that came
after training has a number beyond the data set's. `Labels` are the items' raw ids (those of the user's log) and genres.
Below: checks of the numbers, raw ids and vectors that users give.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bachlib import BachError
from bachlib.serve.codebook import CodebookArrays, CodebookLists
from bachlib.serve.density import LeftOut
from bachlib.serve.exact import Coarse
from bachlib.serve.rows import appended, is_among

Genres = Sequence[Sequence[str]]  # those of each item


@dataclass(frozen=True, eq=False)
class Labels:
    """What the log calls the known items, by number. Either may be missing."""

    raw_ids: list | None = None  # None for an item without
    genres: Genres | None = None

    @classmethod
    def of(cls, n: int, raw_ids: Any = None, genres: Any = None) -> Labels:
        """Labels of n items; lists that are given may be longer."""
        for name, given in (("genres", genres), ("raw_ids", raw_ids)):
            if given is not None and len(given) < n:
                raise BachError(f"{name} should hold those of each of {n:,} items; got {len(given):,}")
        made = cls(None if raw_ids is None else plain(raw_ids), None if genres is None else list(genres))
        made.number  # noqa: B018  raises an error if two items have the same id
        return made

    def resized(self, n: int) -> Labels:
        """For n known items: those that came later have no labels yet."""
        raw_ids = self.raw_ids and [*self.raw_ids[:n], *[None] * (n - len(self.raw_ids))]
        made = Labels(raw_ids, self.genres and [*self.genres[:n], *[[]] * (n - len(self.genres))])
        if raw_ids and len(self.raw_ids) <= n:  # the same numbers: the first new item would wait for counting them
            made.__dict__["number"] = self.number
        return made

    def replaced(self, raw_ids: Any, genres: Any) -> tuple[list | None, list | None]:
        """(raw ids, genres), those given in place of the first ones here."""
        given = (raw_ids if raw_ids is None else plain(raw_ids), genres if genres is None else list(genres))
        own = (self.raw_ids, self.genres)
        return tuple(a if b is None else [*b, *(a or [])[len(b) :]] for a, b in zip(own, given, strict=True))

    def extended(self, m: int, raw_ids: Any = None, genres: Any = None) -> Labels:
        """Labels with those of m more items."""
        for name, given in (("genres", genres), ("raw_ids", raw_ids)):
            if given is not None and len(given) != m:
                raise BachError(f"{name} should hold those of each of {m} new items; got {len(given)}")
            if given is not None and getattr(self, name) is None:
                raise BachError(f"{name} of new items need those of all others: Retriever(model, {name}=…)")
        more = self.raw_ids and Labels.of(0, [None] * m if raw_ids is None else raw_ids)
        if more and (twice := more.number.keys() & self.number.keys()):
            raise BachError(f"raw_ids: two items have the id {min(twice, key=str)!r}; each item needs its own")
        genres = self.genres and [*self.genres, *([[]] * m if genres is None else genres)]
        made = Labels(more and [*self.raw_ids, *more.raw_ids], genres)
        if more:  # kept up to date: counting all of them again would take long
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
        given = plain(given)
        try:
            unknown = [raw for raw in given if isinstance(raw, bool) or raw not in self.number]
        except TypeError:  # a list in a list
            raise BachError(f"{name} should be a list of ids of the log; got {given!r:.60}") from None
        if unknown:
            told = ", ".join(f"{raw!r} (the nearest is {self._nearest(raw)!r})" for raw in unknown[:5])
            more = f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else ""
            raise BachError(f"{name}: the log has no item {told}{more}")
        return np.array([self.number[raw] for raw in given], np.int64)

    def _nearest(self, raw: Any) -> Any:
        spelt, numbers = {str(known): known for known in self.number}, (int, float)
        if str(raw) in spelt:  # a number for a text, or a text for a number
            return spelt[str(raw)]
        if isinstance(raw, numbers) and raw == raw and all(isinstance(known, numbers) for known in self.number):
            return min(self.number, key=lambda known: abs(known - raw))
        return spelt[get_close_matches(str(raw), [*spelt][:50_000], 1, 0)[0]]


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
        vectors = _unit(vectors)
        tokens = vectors if tokens is None else np.ascontiguousarray(tokens, np.float32)
        everything = numbers is None or len(numbers) == len(vectors)
        numbers = np.arange(len(vectors)) if everything else np.asarray(numbers)
        return cls(vectors, tokens, numbers, vectors if everything else np.ascontiguousarray(vectors[numbers]))

    def places(self, numbers: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m_or_fewer"]:
        """Places of items in `items`; items that have none are skipped."""
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

    def left_out(self, lists: list[np.ndarray], K: int) -> LeftOut:
        """The places that each request must not get; raises an error if fewer than K items remain."""
        if not isinstance(K, int | np.integer) or isinstance(K, bool) or K < 1:
            raise BachError(f"K should be a whole number ≥ 1; got {K!r}")
        out = LeftOut.of([self.places(rows) for rows in lists], self.gone)
        remaining = len(self.numbers) - np.diff(out.starts)
        if (remaining < K).any():
            row = int(np.argmin(remaining))
            left = f"of {len(self.numbers) - len(self.gone):,} items {remaining[row]:,} remain for request {row}"
            raise BachError(f"K={K}, but {left} after history and exclusions; ask for at most that many")
        return out


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
    rows = list(given)
    if not any(isinstance(row, Iterable) and not (raw and isinstance(row, str | bytes)) for row in rows):
        if not rows and B is None:
            return []
        if getattr(given, "ndim", 1) <= 1:
            return [ids(name, rows)] * (B or 1)
    if B is not None and len(rows) != B:
        raise BachError(f"{name} has {len(rows)} lists for {B} requests: give one per request, or one list for all")
    if raw and (alone := [row for row in rows if isinstance(row, str | bytes) or not isinstance(row, Iterable)]):
        raise BachError(f"{name} should be a list of {of}, or one list per request; got {alone[0]!r} among lists")
    return [ids(f"{name} of request {row}", one) for row, one in enumerate(rows)]


def plain(given: Any) -> list:
    """A list of Python's own numbers and texts, from an array, a tensor, a pandas column or a list."""
    return [raw.item() if isinstance(raw, np.generic) else raw for raw in getattr(given, "tolist", given.__iter__)()]


def as_numbers(name: str, given: Any) -> Float[np.ndarray, "n d"]:
    """(n, d) float32 numbers from an array, tensor or list."""
    try:
        array = np.ascontiguousarray(given.detach().cpu() if hasattr(given, "detach") else given, np.float32)
    except (TypeError, ValueError):
        raise BachError(f"{name} should be numbers, (n, d); got {given!r:.60}") from None
    if array.ndim != 2 or not len(array):
        raise BachError(f"{name} should be (n, d) with at least one item; got shape {array.shape}")
    return array


def _unit(vectors: Any) -> Float[np.ndarray, "n d"]:
    vectors = as_numbers("item vectors", vectors)
    length = np.linalg.norm(vectors, axis=1)
    if (wrong := np.flatnonzero(~(np.abs(length - 1) < 1e-3))).size:  # NaN is wrong, too
        told = f"row {wrong[0]} has length {length[wrong[0]]:.3g}"
        raise BachError(f"item vectors should be unit: {told}; divide each by its length")
    off = np.abs(length - 1) > 1e-6  # the bounds of the scan hold for unit vectors only
    return np.where(off[:, None], vectors / length[:, None], vectors) if off.any() else vectors
