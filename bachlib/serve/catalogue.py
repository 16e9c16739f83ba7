"""The served items: numbers, vectors and what was computed from them. A catalogue is replaced, never changed.

An item keeps its number. An item that is no longer served stays known, because histories may hold it; an item that came
after training has a number beyond the data set's. Below: checks of the item numbers and vectors that users give.
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
    tokens: Float[np.ndarray, "N d"]  # the rows histories are read from: the same, or frozen rows
    numbers: Int[np.ndarray, " n"]  # of the served items, ascending
    items: Float[np.ndarray, "n d"]  # their vectors
    index: Any = None  # `Neighbours` for two-step
    codebook: CodebookArrays | None = None

    @classmethod
    def of(cls, vectors: np.ndarray, tokens: np.ndarray | None = None, numbers: np.ndarray | None = None) -> Catalogue:
        vectors = _unit(vectors)
        tokens = vectors if tokens is None else np.ascontiguousarray(tokens, np.float32)
        everything = numbers is None or len(numbers) == len(vectors)
        numbers = np.arange(len(vectors)) if everything else np.asarray(numbers)
        return cls(vectors, tokens, numbers, vectors if everything else np.ascontiguousarray(vectors[numbers]))

    def places(self, numbers: Int[np.ndarray, " m"]) -> Int[np.ndarray, " m_or_fewer"]:
        """Places of items in `items`; items that are not served are skipped."""
        at = np.minimum(np.searchsorted(self.numbers, numbers), len(self.numbers) - 1)
        return at[self.numbers[at] == numbers]

    def left_out(self, lists: list[np.ndarray], K: int) -> LeftOut:
        """The places that each request must not get; raises an error if fewer than K items remain."""
        if not isinstance(K, int | np.integer) or isinstance(K, bool) or K < 1:
            raise BachError(f"K should be a whole number ≥ 1; got {K!r}")
        out = LeftOut.of([self.places(rows) for rows in lists])
        remaining = len(self.numbers) - np.diff(out.starts)
        if (remaining < K).any():
            row = int(np.argmin(remaining))
            left = f"of {len(self.numbers):,} items {remaining[row]:,} remain for request {row}"
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


def lists_of(name: str, given: Any, n: int, B: int | None = None) -> list[Int[np.ndarray, " m"]]:
    """(B, m) numbers, a list of lists, or one list: for one request, or with `B` for all of them."""
    if hasattr(given, "__array__"):  # tensors and pandas columns, too
        given = np.asarray(given.detach().cpu() if hasattr(given, "detach") else given)
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable) or getattr(given, "ndim", 1) == 0:
        raise BachError(f"{name} should be a list of item numbers, or one list per request; got {given!r:.60}")
    rows = list(given)
    if not any(isinstance(row, Iterable) for row in rows) and getattr(given, "ndim", 1) <= 1:
        return [known_ids(name, rows, n, pads=True)] * (B or 1)
    if B is not None and len(rows) != B:
        raise BachError(f"{name} has {len(rows)} lists for {B} requests: give one per request, or one list for all")
    return [known_ids(f"{name} of request {row}", one, n, pads=True) for row, one in enumerate(rows)]


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
