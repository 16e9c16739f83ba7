"""Where a mixture pays: the gain of weighted heads over one vector in many worlds, against traits of the logs.

A world is drawn several times: other directions, items and users. Its gain is the mean over the draws, with an interval
over them. The map is a plane fitted to the gains of all draws over the two `traits` of a log; its zero is the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float

from bachlib import BachError
from bachlib.evaluate.evaluation import Evaluation
from bachlib.evaluate.statistics import Interval, interval
from bachlib.evaluate.traits import SESSIONS, SPREAD
from bachlib.evaluate.verdicts import over_trainings

OURS, THEIRS = "p-bach", ("standard", "all-multihead")
WORLD = ["interests_per_user", "world_width", "stickiness", "d", "n_users"]
DRAWS = 1_000


def gain_table(runs: Sequence[tuple[dict, Evaluation]], metric: str = "AUPRC") -> pd.DataFrame:
    """A row per draw of a world that all methods have: what it is, and the gain of p-bach over each other method.

    `runs`: the parameters of each (those of `WORLD`, data_seed, method, spread and likeness) with its evaluation.
    """
    rows: dict[tuple, dict] = {}
    for told, evaluation in runs:
        world = {name: told[name] for name in (*WORLD, "data_seed", SPREAD, SESSIONS)}
        rows.setdefault((*(world[name] for name in WORLD), world["data_seed"]), world)[told["method"]] = (
            evaluation.means[metric]
        )
    table = pd.DataFrame([*rows.values()], columns=[*WORLD, "data_seed", SPREAD, SESSIONS, OURS, *THEIRS])
    table = table.dropna(subset=[OURS, *THEIRS]).reset_index(drop=True)
    return table.assign(**{f"over {other}": table[OURS] / table[other] - 1 for other in THEIRS})


def by_world(table: pd.DataFrame, over: str = THEIRS[0]) -> pd.DataFrame:
    """A row per world: mean gain with its interval over the draws, and the mean traits."""
    rows = []
    for world, of in table.groupby(WORLD, sort=False):
        found = over_trainings(of[f"over {over}"], [0.0, 0.0])
        rows.append([*world, len(of), of[SPREAD].mean(), of[SESSIONS].mean(), *found])
    return pd.DataFrame(rows, columns=[*WORLD, "draws", SPREAD, SESSIONS, "gain", "low", "high"])


class Plane(NamedTuple):
    """gain = w · (1, spread, likeness), fitted once to all draws and once to each bootstrap sample of the worlds."""

    weights: Float[np.ndarray, " 3"]
    drawn: Float[np.ndarray, "n 3"]
    explained: float  # share of the variance of the gains

    def gain(self, spread: float, likeness: float) -> Interval:
        at = np.array([1.0, spread, likeness])
        return interval(self.weights @ at, self.drawn @ at)

    def boundary(self, likeness: Float[np.ndarray, " m"]) -> Float[np.ndarray, "3 m"]:
        """The spread from which on weighted heads gain, with its interval, at each likeness; NaN where none does."""
        at = np.stack([np.ones_like(likeness), likeness])
        with np.errstate(divide="ignore", invalid="ignore"):
            value = -(self.weights[[0, 2]] @ at) / self.weights[1]
            every = -(self.drawn[:, [0, 2]] @ at) / self.drawn[:, 1:2]
        return np.stack([value, *np.nanquantile(every, [0.025, 0.975], axis=0)])


def fitted(table: pd.DataFrame, over: str = THEIRS[0], seed: int = 0) -> Plane:
    """Least squares; worlds (with all their draws) are resampled, since draws of one world are alike."""
    worlds = [of for _, of in table.groupby(WORLD, sort=False)]
    if len(worlds) < 4:
        raise BachError(f"a plane needs at least four worlds with results, there are {len(worlds)}")
    x = np.stack([np.ones(len(table)), table[SPREAD], table[SESSIONS]], 1)
    y, rng = table[f"over {over}"].to_numpy(), np.random.default_rng(seed)
    weights = np.linalg.lstsq(x, y, rcond=None)[0]
    drawn = []
    for _ in range(DRAWS):
        rows = np.concatenate([worlds[i].index for i in rng.integers(len(worlds), size=len(worlds))])
        drawn.append(np.linalg.lstsq(x[rows], y[rows], rcond=None)[0])
    return Plane(weights, np.stack(drawn), float(1 - ((y - x @ weights) ** 2).sum() / ((y - y.mean()) ** 2).sum()))
