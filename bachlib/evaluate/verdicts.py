"""Effects and verdicts: what was measured for a claim, and what may be said of it by rules that stand here.

A claim says in which range an effect lies: above zero ("a is better than b"), or between two borders.

confirmed        the whole interval is in the range
not confirmed    the whole interval is outside of it
cannot tell      the interval crosses a border
no records yet   a method has fewer than `SEEDS` trainings on record (counts have no seed: one is enough)

A claim of several effects is confirmed if all of them are; else it has the first verdict of `STRONGEST` that one of its
effects has. The smallest effect that the data could have shown is `POWER` times half of the interval: an effect so far
from the border is told from it in four of five repetitions. Intervals are for other users and other trainings
(`statistics`), or over trainings alone where a number belongs to a training and not to its users.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from bachlib.evaluate.statistics import LEVEL, Interval

SEEDS = 3
CONFIRMED, DENIED, OPEN, NOTHING = "confirmed", "not confirmed", "cannot tell", "no records yet"
STRONGEST = (DENIED, NOTHING, OPEN)
POWER = float(1 + stats.norm.ppf(0.8) / stats.norm.ppf((1 + LEVEL) / 2))
ABOVE = (0.0, np.inf)  # the range of "is better than"


class Effect(NamedTuple):
    """One measured effect of a claim; NaN where nothing is on record."""

    setting: str  # which log, how many targets
    what: str  # "p-bach over all-multihead, k = 8, AUPRC"
    found: Interval
    claimed: tuple[float, float]  # the range that the claim says
    seeds: tuple[int, ...]  # trainings of each method
    enough: bool
    paper: tuple[float, float] = (np.nan, np.nan)  # the paper's number, between its bounds by rounding
    percent: bool = True  # a relative gain
    sampled: bool = True  # an interval; else the smallest and the largest of the trainings

    @property
    def verdict(self) -> str:
        return verdict(self.found, self.claimed) if self.enough else NOTHING

    @property
    def smallest(self) -> float:
        """The smallest effect that this data could have shown, as a distance from a border of the claim."""
        return np.nan if not self.sampled else POWER * (self.found.high - self.found.low) / 2

    def told(self, value: float, signed: bool = True) -> str:
        if not np.isfinite(value):
            return "–"
        return f"{100 * value:{'+' if signed else ''}.1f}%" if self.percent else f"{value:.3g}"


NO_INTERVAL = Interval(np.nan, np.nan, np.nan)


def verdict(found: Interval, claimed: tuple[float, float]) -> str:
    """What an interval says of a range."""
    if not np.isfinite([found.low, found.high]).all():
        return NOTHING
    if claimed[0] < found.low and found.high < claimed[1]:
        return CONFIRMED
    return DENIED if found.high <= claimed[0] or found.low >= claimed[1] else OPEN


def of_all(verdicts: Iterable[str]) -> str:
    """The verdict of a claim from those of its effects."""
    said = set(verdicts)
    return next((name for name in STRONGEST if name in said), CONFIRMED if said else NOTHING)


def over_trainings(a: Sequence[float], b: Sequence[float]) -> Interval:
    """Difference of the means of two groups of trainings with Welch's interval, which allows for few trainings."""
    a, b = np.asarray(a, float), np.asarray(b, float)
    if not len(a) or not len(b):
        return NO_INTERVAL
    value = float(a.mean() - b.mean())
    if len(a) < 2 or len(b) < 2:
        return Interval(value, np.nan, np.nan)
    parts = np.array([a.var(ddof=1) / len(a), b.var(ddof=1) / len(b)])
    error = np.sqrt(parts.sum())
    if error == 0:
        return Interval(value, value, value)
    free = parts.sum() ** 2 / (parts[0] ** 2 / (len(a) - 1) + parts[1] ** 2 / (len(b) - 1))
    half = float(stats.t.ppf((1 + LEVEL) / 2, free) * error)
    return Interval(value, value - half, value + half)


def effect_table(effects: Sequence[Effect]) -> pd.DataFrame:
    """The effects as text: setting, effect, paper, ours with its interval, smallest, trainings, verdict."""
    rows = []
    for e in effects:
        low, high = (e.told(value) for value in e.paper)
        seen = np.isfinite(e.found.low)
        between = f"{e.told(e.found.value)} [{e.told(e.found.low)}, {e.told(e.found.high)}]"
        rows.append({
            "setting": e.setting,
            "effect": e.what,
            "paper": low if low == high else f"{low} to {high}",
            "ours": between if seen else e.told(e.found.value),
            "smallest to be seen": e.told(e.smallest, signed=False),
            "trainings": " and ".join(map(str, e.seeds)),
            "verdict": e.verdict,
        })  # fmt: skip
    columns = ["setting", "effect", "paper", "ours", "smallest to be seen", "trainings", "verdict"]
    return pd.DataFrame(rows, columns=columns)
