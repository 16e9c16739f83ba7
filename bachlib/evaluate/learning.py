"""How fast methods learn: validation AUPRC per epoch and per CPU second, and what each needs to reach one level."""

from __future__ import annotations

import numpy as np
import pandas as pd

from bachlib.evaluate.claims import Evidence, Result

PART = 0.95  # of the reference's best validation AUPRC
REFERENCE = "standard"


def curves(evidence: Evidence, k: int = 8) -> pd.DataFrame:
    """A row per training and look: setting, method, seed, epoch, valid_auprc, and CPU seconds where they are known."""
    rows = [_curve(r) for r in evidence.results if r.k in (1, k) and r.history is not None and len(r.history)]
    names = ["setting", "method", "seed", "epoch", "valid_auprc", "cpu_s"]
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=names)


def _curve(r: Result) -> pd.DataFrame:
    about = r.evaluation.about
    looks = r.history.dropna(subset="valid_auprc")
    cpu = looks["epoch"] * about.get("cpu_s_per_epoch", np.nan)
    same = {"setting": r.setting, "method": r.method, "seed": about["seed"]}
    return looks[["epoch", "valid_auprc"]].assign(**same, cpu_s=cpu)[[*same, "epoch", "valid_auprc", "cpu_s"]]


def speed(of: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Per setting and method, means over trainings: best epoch, epochs and CPU seconds to `PART` of the best that one
    vector reaches in the setting `reference` (NaN if a training never does), CPU seconds of an epoch."""
    best = of[(of["setting"] == reference) & (of["method"] == REFERENCE)].groupby("seed")["valid_auprc"].max()
    level, rows = PART * best.mean(), []
    for (setting, method, seed), one in of.groupby(["setting", "method", "seed"], sort=False):
        top = one.loc[one["valid_auprc"].idxmax()]
        there = one[one["valid_auprc"] >= level]
        first = there.iloc[0] if len(there) else pd.Series({"epoch": np.nan, "cpu_s": np.nan})
        rows.append([setting, method, seed, top["epoch"], top["valid_auprc"], first["epoch"], first["cpu_s"],
                     (one["cpu_s"] / one["epoch"]).iloc[0]])  # fmt: skip
    names = ["best epoch", "best validation AUPRC", "epochs to the level", "CPU s to the level", "CPU s per epoch"]
    table = pd.DataFrame(rows, columns=["setting", "method", "trainings", *names])
    grouped = table.groupby(["setting", "method"], sort=False)
    means = grouped[names].agg(lambda x: x.mean(skipna=False))
    return means.assign(trainings=grouped["trainings"].count())
