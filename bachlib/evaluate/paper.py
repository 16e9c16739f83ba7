"""The paper's numbers, and ours beside them. They are data (`paper_tables.yaml`): one seed, no intervals."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from bachlib.evaluate.evaluation import Evaluation

MAIN = ["R@10", "R@50", "R@100", "NDCG@100", "AUPRC"]
BY_K = ["R@100", "AUPRC"]
SAME = 0.01  # data sets whose sizes differ by less are taken for the same


@lru_cache(maxsize=1)
def tables() -> dict[str, Any]:
    """The whole file."""
    return yaml.safe_load(Path(__file__).with_name("paper_tables.yaml").read_text(encoding="utf-8"))


def printed(data: str, by_k: bool) -> pd.DataFrame:
    """The paper's numbers for a data set: method, k, metric, paper. By k (Tables 3, 4), or best over k (2, 5)."""
    known, rows = tables(), []
    if by_k:
        for name in ("head-matched", "routing"):
            for k, row in known[name].get(data, {}).items():
                rows += [(m, k, *cell) for m in row if m != "gain" for cell in zip(BY_K, row[m], strict=True)]
        if data == "netflix":  # the text gives AUPRC only
            told = {k: row for k, row in known["netflix by k"].items() if isinstance(row, dict)}
            rows += [(m, k, "AUPRC", value) for k, row in told.items() for m, value in row.items()]
    else:
        for method, values in known["main"].get(data, {}).items():
            rows += [(method, np.nan, *cell) for cell in zip(MAIN, values, strict=True)]
    if data in known["global codebook"]:
        one, method = known["global codebook"][data], "p-bach-global"
        rows += [(method, one["k"], *cell) for cell in zip(BY_K, one[method], strict=True)]
    table = pd.DataFrame(rows, columns=["method", "k", "metric", "paper"])
    return table.drop_duplicates(["method", "k", "metric"]).reset_index(drop=True)


def kappa_range(method: str) -> tuple[float, float] | None:
    """The range of the largest κ of a run in the paper; None for methods without one."""
    return tuple(tables()["kappa"][method]) if method in tables()["kappa"] else None


def gains(data: str, method: str = "p-bach", over: str = "all-multihead") -> pd.Series:
    """Relative gains of a method in the paper's main table, by metric, from the rounded numbers."""
    table = printed(data, by_k=False).pivot(index="method", columns="metric", values="paper")[MAIN]
    return table.loc[method] / table.loc[over] - 1


def beside(numbers: pd.DataFrame, data: str, by_k: bool = False) -> pd.DataFrame:
    """Paper, ours and the difference for every cell that both have; whether our interval holds the paper's number.

    `numbers` are those of a `Table`. If they come from other data than the paper's, so does part of the difference.
    """
    on = ["method", "k", "metric"] if by_k else ["method", "metric"]
    ours = numbers[[*dict.fromkeys([*on, "k"]), "mean", "low", "high"]]
    both = printed(data, by_k).drop(columns=[] if by_k else "k").merge(ours, on=on)
    within = (both["low"] <= both["paper"] + 5e-4) & (both["paper"] - 5e-4 <= both["high"])  # it is rounded
    both = both.assign(difference=both["mean"] - both["paper"], within=within).rename(columns={"mean": "ours"})
    return both[["method", "k", "metric", "paper", "ours", "low", "high", "difference", "within"]]


def gains_beside(numbers: pd.DataFrame, baseline: str, by_k: bool, metric: str = "AUPRC") -> pd.DataFrame:
    """Relative gains over a baseline: ours with intervals, the paper's on its three data sets (from rounded numbers).

    For data that the paper does not have: absolute values are not comparable then, but gains can be looked at.
    """
    ours = numbers[(numbers["metric"] == metric) & (numbers["method"] != baseline) & numbers["gain"].notna()]
    on = ["method", "k"] if by_k else ["method"]
    made = ours[[*(["at"] if "at" in ours and not by_k else []), "method", "k", "gain", "gain_low", "gain_high"]]
    for data in tables()["datasets"]:
        told = printed(data, by_k).query("metric == @metric")
        base = told[told["method"] == baseline.split(" (")[0]].set_index("k")["paper"]
        of = told["k"].map(base) if by_k else (base.iloc[0] if len(base) else np.nan)
        theirs = told.assign(gain=told["paper"] / of - 1)[[*on, "gain"]].rename(columns={"gain": f"paper, {data}"})
        made = made.merge(theirs, on=on, how="left")
    return made.reset_index(drop=True)


def data_table(sizes: dict[str, dict[str, int]], evaluations: dict[str, Sequence[Evaluation]]) -> pd.DataFrame:
    """Table 1: users, items, windows and MostPop's R@100 of each data set, ours and the paper's; do the sizes agree?

    `sizes`: data → users, items, windows; `evaluations`: data → the evaluations of its runs.
    """
    columns, known, rows = ["users", "items", "windows", "mostpop R@100"], tables()["datasets"], {}
    for data, size in sizes.items():
        floor = [e.means["R@100"] for e in evaluations.get(data, ()) if e.label == "mostpop"]
        ours = {**size, "mostpop R@100": np.mean(floor) if floor else np.nan}
        told, theirs = "not in the paper", known.get(data, {})
        if theirs and all(name in size for name in columns[:3]):
            away = max(abs(size[name] / theirs[name] - 1) for name in columns[:3])
            told = "the same size as the paper's" if away < SAME else "not the paper's data: the sizes differ"
        rows[data] = {(c, who): of.get(c, np.nan) for c in columns for who, of in (("ours", ours), ("paper", theirs))}
        rows[data]["which data", ""] = told
    return pd.DataFrame.from_dict(rows, orient="index")


def kappa_bounds(results: pd.DataFrame) -> pd.DataFrame:
    """Per data set and BACH method: the smallest κ, the range of the largest κ of a run, and the paper's range.

    `results` has a row per run with data, method, "κ min" and "κ max" (`diagnostics.summary`).
    """
    names, rows = ["data", "method", "runs", "smallest", "low", "high", "paper_low", "paper_high"], []
    if "κ max" in results:
        for (data, method), runs in results.dropna(subset="κ max").groupby(["data", "method"], sort=False):
            largest, told = runs["κ max"], kappa_range(method) or (np.nan, np.nan)
            rows.append((data, method, len(runs), runs["κ min"].min(), largest.min(), largest.max(), *told))
    return pd.DataFrame(rows, columns=names).astype(dict.fromkeys(names[3:], float))
