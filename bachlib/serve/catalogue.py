"""What is served: items with their numbers and vectors, and what was computed from them. Never changed, only replaced.

An item keeps its number for ever. One that is no longer served stays known, because histories may hold it; one that
came after training has a number beyond the data set's. Readers hold one `Catalogue` for the whole of a request, so a
new one can take its place at any time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bachlib import BachError
from bachlib.serve.codebook import CodebookArrays
from bachlib.serve.density import LeftOut


class Catalogue(NamedTuple):
    vectors: Float[np.ndarray, "N d"]  # of all known items, by number; unit, float32
    tokens: Float[np.ndarray, "N d"]  # what histories are read from: the same, or frozen rows
    numbers: Int[np.ndarray, " n"]  # of those that are served, ascending
    items: Float[np.ndarray, "n d"]  # their vectors
    index: Any = None  # `Neighbours` for two-step
    codebook: CodebookArrays | None = None

    @classmethod
    def of(cls, vectors: np.ndarray, tokens: np.ndarray | None = None, numbers: np.ndarray | None = None) -> Catalogue:
        vectors = _unit("item vectors", vectors)
        tokens = vectors if tokens is None else np.ascontiguousarray(tokens, np.float32)
        everything = numbers is None or len(numbers) == len(vectors)
        numbers = np.arange(len(vectors)) if everything else np.asarray(numbers)
        return cls(vectors, tokens, numbers, vectors if everything else np.ascontiguousarray(vectors[numbers]))

    def places(self, numbers: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m_or_fewer"]:
        """Where served items stand; those that are not served are passed over."""
        at = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        return at[self.numbers[at] == numbers]

    def left_out(self, lists: list[np.ndarray], K: int) -> LeftOut:
        """What each request may not get, after a look at K and at whether so many items remain."""
        if not isinstance(K, int | np.integer) or isinstance(K, bool) or K < 1:
            raise BachError(f"K should be a whole number ≥ 1; got {K!r}")
        out = LeftOut.of([self.places(rows) for rows in lists])
        remaining = len(self.numbers) - np.diff(out.starts)
        if (remaining < K).any():
            row = int(np.argmin(remaining))
            raise BachError(
                f"K={K}, but of {len(self.numbers):,} items {remaining[row]:,} remain for request {row} after what is "
                "left out (history, exclusions); ask for at most that many"
            )
        return out


def known_ids(name: str, given: Any, n: int, pads: bool = False) -> Int[np.ndarray, " m"]:
    """A list of item numbers 0 … n − 1 after a look; with `pads`, −1 is nothing and is dropped."""
    try:
        ids = np.asarray(list(given) if isinstance(given, set | frozenset) else given)
    except ValueError:  # lists of different lengths
        ids = np.empty((1, 1))
    if ids.shape == (0,):
        return np.empty(0, np.int64)
    if ids.ndim != 1 or ids.dtype.kind not in "iu":
        raise BachError(f"{name} should be a list of item numbers; got {given!r:.60}")
    if ids.dtype.kind == "u" and ids.max() >= n:  # too large to be turned into a negative number
        raise BachError(f"{name}: there is no item {ids.max()}; items are 0 … {n - 1}")
    ids = ids.astype(np.int64)
    ids = ids[ids != -1] if pads else ids
    if ids.size and not 0 <= ids.min() <= ids.max() < n:
        wrong = ids[(ids < 0) | (ids >= n)][0]
        raise BachError(f"{name}: there is no item {wrong}; items are 0 … {n - 1}")
    return ids


def lists_of(name: str, given: Any, n: int, B: int | None = None) -> list[Int[np.ndarray, " m"]]:
    """(B, m) numbers, a list of lists, or one list: for one request, or with `B` for each of so many."""
    if hasattr(given, "detach"):  # a tensor
        given = given.detach().cpu()
    if hasattr(given, "__array__"):  # also pandas' columns
        given = np.asarray(given)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        raise BachError(f"{name} should be a list of item numbers, or one list per request; got {given!r:.60}")
    rows = list(given)
    nested = any(isinstance(row, Iterable) for row in rows) or getattr(given, "ndim", 1) > 1
    if not nested:
        return [known_ids(name, rows, n, pads=True)] * (B or 1)
    if B is not None and len(rows) != B:
        raise BachError(f"{name} has {len(rows)} lists for {B} requests: give one per request, or one list for all")
    return [known_ids(f"{name} of request {row}", one, n, pads=True) for row, one in enumerate(rows)]


def as_numbers(name: str, given: Any) -> Float[np.ndarray, "n d"]:
    """(n, d) float32 numbers, whatever they came as."""
    try:
        array = np.ascontiguousarray(given.detach().cpu() if hasattr(given, "detach") else given, np.float32)
    except (TypeError, ValueError):
        raise BachError(f"{name} should be numbers, (n, d); got {given!r:.60}") from None
    if array.ndim != 2 or not len(array):
        raise BachError(f"{name} should be (n, d) with at least one item; got shape {array.shape}")
    return array


def _unit(name: str, vectors: Any) -> Float[np.ndarray, "n d"]:
    vectors = as_numbers(name, vectors)
    length = np.linalg.norm(vectors, axis=1)
    if not (np.abs(length - 1) < 1e-3).all():
        row = int(np.argmax(~(np.abs(length - 1) < 1e-3)))
        raise BachError(f"{name} should be unit: row {row} has length {length[row]:.3g}; divide each by its length")
    off = np.abs(length - 1) > 1e-6  # the bounds of a scan hold for cosines: a little longer would not do
    return np.where(off[:, None], vectors / length[:, None], vectors) if off.any() else vectors
