"""Caps per genre: the first items of the ranking that keep to them, however far down that goes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Bool, Int

from bachlib import BachError
from bachlib.serve.slate import Slate


def capped_slate(
    search: Callable[[int], Slate],
    K: int,
    most: int,
    genres: Sequence[Sequence[str]] | None,
    caps: Mapping[str, int],
    row: int,
) -> Slate:
    """K items of the ranking `search(depth)` of request `row`, which has `most`; what is proved of it stays proved."""
    if genres is None:
        raise BachError("caps need to know genres: Retriever(model, genres=dataset.items['genres'])")
    if not isinstance(caps, Mapping):
        raise BachError(f"caps should be {{genre: at most so many}}; got {caps!r:.60}")
    names = sorted({name for own in genres for name in own})
    depth = min(2 * K, most)
    while True:
        slate = search(depth)
        taken = capped(_member(slate.items[0], genres, names), names, caps, K)
        if len(taken) == K:
            return slate.take(taken[None], still_proved=True)
        if depth == most:
            raise BachError(f"the caps leave {len(taken)} items for request {row}; K={K} is too many")
        depth = min(4 * depth, most)


def capped(
    member: Bool[np.ndarray, "n g"], names: list[str], caps: Mapping[str, int], K: int
) -> Int[np.ndarray, " K_or_fewer"]:
    """Places of the first K that keep to the caps, in order; `member`: which genres each item of the list has."""
    if unknown := [name for name in caps if name not in names]:
        raise BachError(f"caps: there is no genre {unknown[0]!r}; there are {', '.join(names)}")
    if wrong := [cap for cap in caps.values() if not (isinstance(cap, int | np.integer) and cap >= 0)]:
        raise BachError(f"caps should be whole numbers ≥ 0; got {wrong[0]!r}")
    room = np.full(len(names), K, np.int64)
    room[[names.index(name) for name in caps]] = [min(cap, K) for cap in caps.values()]
    taken = []
    for place, genres in enumerate(member):
        if (room[genres] > 0).all():
            taken.append(place)
            room[genres] -= 1
            if len(taken) == K:
                break
    return np.array(taken, np.int64)


def _member(items: Int[np.ndarray, " n"], genres: Sequence[Sequence[str]], names: list[str]) -> Bool[np.ndarray, "n g"]:
    """Which genres items have; those that came after training have none."""
    member = np.zeros((len(items), len(names)), bool)
    for row, item in enumerate(items):
        if item < len(genres):
            member[row, [names.index(name) for name in genres[item]]] = True
    return member
