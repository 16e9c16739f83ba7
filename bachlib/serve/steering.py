"""Steering: changing π_u by hand ("operators can override π_u to steer or constrain exposure").

    Steering(boost={2: 3.0}, forbid=[5], cap={0: 0.4})      relative to the model's π of each user
    Steering(set={1: 0.5})                                  head 1 gets half, the others share the rest as before
    Steering(blend=(house_pi, 0.2))                         a fifth of it from elsewhere

Applied in this order: blend, boost, forbid, set, cap. π stays a distribution; impossible combinations raise an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import Float

from bachlib import BachError

Pi = Float[np.ndarray, "B k"]


@dataclass(frozen=True)
class Steering:
    boost: Mapping[int, float] = field(default_factory=dict)  # head: factor
    forbid: Sequence[int] = ()
    set: Mapping[int, float] = field(default_factory=dict)  # head: share
    cap: Mapping[int, float] = field(default_factory=dict)  # head: largest share
    blend: tuple[np.ndarray, float] | None = None  # (another π, its weight)

    def __call__(self, pi: Pi) -> Pi:
        """π after steering, a row per user."""
        k = pi.shape[1]
        self._check(k)
        if self.blend is not None:
            if not (isinstance(self.blend, tuple) and len(self.blend) == 2):
                raise BachError(f"blend should be (another π, its weight); got {self.blend!r:.60}")
            other, weight = self.blend
            if not 0 <= weight <= 1:
                raise BachError(f"blend: the weight of the other π should be between 0 and 1; got {weight}")
            pi = (1 - weight) * pi + weight * checked_pi(other, len(pi), k)
        factor = {**self.boost, **dict.fromkeys(self.forbid, 0)}
        pi = normalised(pi * [factor.get(r, 1.0) for r in range(k)], "boost and forbid")
        if self.set:
            heads, shares = list(self.set), np.array(list(self.set.values()))
            pi[:, heads] = 0
            left = 1 - shares.sum()
            pi = left * normalised(pi, "set: the other heads") if left > 1e-12 else np.zeros(pi.shape)
            pi[:, heads] = shares
        return _capped(pi, {**self.cap, **self.set}) if self.cap else pi  # shares that were set stay

    def _check(self, k: int) -> None:
        for name, most in (("boost", np.inf), ("forbid", None), ("set", 1), ("cap", 1)):
            given = getattr(self, name)
            if not isinstance(given, Sequence if name == "forbid" else Mapping):
                wanted = "a list of heads" if name == "forbid" else "{head: number}"
                raise BachError(f"{name} should be {wanted}; got {given!r:.60}")
            if wrong := [r for r in given if not (isinstance(r, int | np.integer) and 0 <= r < k)]:
                raise BachError(f"{name}: unknown head {wrong[0]!r}; heads are 0 … {k - 1}")
            for r, value in given.items() if name != "forbid" else ():
                if not (isinstance(value, int | float | np.number) and np.isfinite(value) and 0 <= value <= most):
                    limit = " and at most 1" * (most == 1)
                    raise BachError(f"{name} of head {r} should be a number ≥ 0{limit}; got {value!r}")
        if sum(self.set.values()) > 1 + 1e-9:
            raise BachError(f"set: the shares sum to {sum(self.set.values()):.3g}, which is more than 1")
        if both := sorted({*self.forbid} & {r for r, share in self.set.items() if share > 0}):
            raise BachError(f"head {both[0]} is both forbidden and set; choose one")
        if over := [r for r, share in self.set.items() if share > self.cap.get(r, 1) + 1e-12]:
            raise BachError(f"head {over[0]} is set above its own cap")


def _capped(pi: Pi, cap: Mapping[int, float]) -> Pi:
    """The excess above a cap goes to the heads below theirs, in proportion, until no head is above its cap."""
    most = np.array([cap.get(r, 1.0) for r in range(pi.shape[1])])
    while (over := pi > most + 1e-15).any():  # each time another head is full, or there is an error
        full = pi >= most - 1e-15  # at or above the cap: keep just that
        free = np.where(full, 0, pi)
        left = 1 - np.where(full, most, 0).sum(1, keepdims=True)
        touched = over.any(1)
        if (free.sum(1)[touched] <= 0).any():
            raise BachError(f"cap: the caps {dict(cap)} leave no head for the rest of π")
        with np.errstate(invalid="ignore"):
            spread = np.where(full, most, free / free.sum(1, keepdims=True) * left)
        pi = np.where(touched[:, None], spread, pi)
    return pi


def normalised(pi: Pi, what: str) -> Pi:
    total = pi.sum(1, keepdims=True)
    if not (total > 0).all():
        raise BachError(f"{what} leave user {int(np.argmin(total > 0))} without any head: all weights are 0")
    return pi / total


def checked_pi(pi: np.ndarray, B: int, k: int) -> Pi:
    """A given π, (k,) for all or (B, k), checked: finite, not negative, summing to one."""
    try:
        pi = np.asarray(pi, np.float64)
    except (TypeError, ValueError):
        raise BachError(f"pi should be numbers, (k,) or (B, k) = {(B, k)}; got {type(pi).__name__}") from None
    if pi.shape not in ((k,), (B, k)):
        raise BachError(f"pi should be ({k},), one for all, or (B, k) = {(B, k)}; got shape {pi.shape}")
    pi = np.broadcast_to(pi, (B, k))
    if (wrong := np.flatnonzero(~(np.isfinite(pi) & (pi >= 0)).all(1))).size:
        raise BachError(f"pi should be numbers ≥ 0; row {wrong[0]} has {pi[wrong[0]].tolist()[:8]}")
    total = pi.sum(1)
    off = np.abs(total - 1)
    if (off > 1e-3).any():
        row = int(np.argmax(off))
        raise BachError(f"pi should sum to 1; row {row} sums to {total[row]:.6g}: divide by that if it is unnormalised")
    return np.where(off < 1e-12, 1.0, 1 / total)[:, None] * pi  # a sum of one stays as it is


def pi_of(log_pi: np.ndarray, B: int, k: int) -> Pi:
    """π from log π, (k,) for all or (B, k), checked: the model's own sums to one as far as float32 does."""
    try:
        return checked_pi(np.exp(np.asarray(log_pi, np.float64)), B, k)
    except (TypeError, ValueError):
        raise BachError(f"log_pi should be numbers, (k,) or (B, k) = {(B, k)}; got {type(log_pi).__name__}") from None
