"""Rows of a catalogue that grows while others read it. Needs no torch."""

from __future__ import annotations

import threading

import numpy as np
from jaxtyping import Bool, Int, Shaped

STALE = 0.1  # of the items: when more have come or gone, what was built of them is built again


class Roomy(np.ndarray):
    """An array with room for more rows: the first `used` are never written again."""

    used = 0


_lock = threading.Lock()


def roomy(shape: tuple[int, ...], dtype: np.dtype | type) -> Shaped[np.ndarray, "n ..."]:
    """An empty array with room for an eighth more rows behind it."""
    n, *rest = shape
    return first_of(np.ndarray.__new__(Roomy, (n + n // 8 + 8, *rest), dtype), n)


def first_of(room: Shaped[np.ndarray, "m ..."], n: int) -> Shaped[np.ndarray, "n ..."]:
    """The first n rows of an array that nobody else writes to; the others are room for more."""
    room = np.ndarray.__new__(Roomy, room.shape, room.dtype, buffer=room)
    room.used = n
    return np.ndarray((n, *room.shape[1:]), room.dtype, buffer=room)  # its base is the room itself, not a view of it


def appended(
    rows: Shaped[np.ndarray, "n ..."], more: Shaped[np.ndarray, "m ..."]
) -> Shaped[np.ndarray, "n_plus_m ..."]:
    """Both, one after the other. `rows` stays as it is, and is copied only if there is no room behind it."""
    n, shape = len(rows), (len(rows) + len(more), *rows.shape[1:])
    with _lock:  # only the first who appends to these rows may use the room
        if isinstance(room := rows.base, Roomy) and room.used == n and shape[0] <= len(room):
            room.used = shape[0]
            made = np.ndarray(shape, rows.dtype, buffer=room)
        else:
            made = roomy(shape, rows.dtype)
            made[:n] = rows
    made[n:] = more
    return made


def is_among(rows: Int[np.ndarray, " m"], ascending: Int[np.ndarray, " g"]) -> Bool[np.ndarray, " m"]:
    """Which of these rows are among the others, of which there is at least one?"""
    return ascending[np.minimum(np.searchsorted(ascending, rows), len(ascending) - 1)] == rows
