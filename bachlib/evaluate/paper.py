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
ROUNDED = 5e-4  # half of the last digit of its tables
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
                rows += [(m, k, *cell) for m in row for cell in zip(BY_K, row[m], strict=True)]
        if data == "netflix":  # the text gives AUPRC only
            rows += [(m, k, "AUPRC", value) for k, row in known["netflix by k"].items() for m, value in row.items()]
    else:
        for method, values in known["main"].get(data, {}).items():
            rows += [(method, np.nan, *cell) for cell in zip(MAIN, values, strict=True)]
    if data in known["global codebook"]:
        one, both = known["global codebook"][data], ("p-bach-global", "v-bach-global")  # it does not name the kernel
        rows += [(method, one["k"], *cell) for method in both for cell in zip(BY_K, one["codebook"], strict=True)]
    table = pd.DataFrame(rows, columns=["method", "k", "metric", "paper"])
    return table.drop_duplicates(["method", "k", "metric"]).reset_index(drop=True)


def kappa_range(method: str) -> tuple[float, float] | None:
    """The range of the largest κ of a run in the paper; None for methods without one."""
    return tuple(tables()["kappa"][method]) if method in tables()["kappa"] else None


def printed_gain(data: str, method: str, over: str, k: float | None = None) -> str | None:
    """A relative gain in AUPRC as the paper prints it, "+4.5%"; without k, of the rows of Tables 2 and 5, where these
    have the same k. None: the paper does not print it."""
    if k is None:
        best = tables()["best k"].get(data, {})
        k = best.get(method) if best.get(method) == best.get(over) else None
    return tables()["gains"].get(data, {}).get(f"{method} over {over}", {}).get(k)


def gain(data: str, method: str, over: str, metric: str, k: float | None = None) -> tuple[float, float, float]:
    """The paper's relative gain with its bounds: as printed, else from the rounded numbers of its tables. A number
    printed as 0.067 is between 0.0665 and 0.0675; NaN where a number is missing."""
    if metric == "AUPRC" and (told := printed_gain(data, method, over, k)):
        value, digits = float(told.rstrip("%")) / 100, len(told.partition(".")[2].rstrip("%"))
        return value, value - 0.005 / 10**digits, value + 0.005 / 10**digits
    known = printed(data, k is not None).query("metric == @metric")
    known = (known if k is None else known[known["k"] == k]).set_index("method")["paper"]
    a, b, half = known.get(method, np.nan), known.get(over, np.nan), ROUNDED
    return a / b - 1, (a - half) / (b + half) - 1, (a + half) / (b - half) - 1


def gains(data: str, method: str = "p-bach", over: str = "all-multihead") -> pd.DataFrame:
    """Gains of a method in the paper's main table, by metric: gain, and low and high, its bounds by rounding."""
    rows = [gain(data, method, over, metric) for metric in MAIN]
    return pd.DataFrame(rows, pd.Index(MAIN, name="metric"), columns=["gain", "low", "high"])


def beside(numbers: pd.DataFrame, data: str, by_k: bool = False) -> pd.DataFrame:
    """Paper, ours and the difference for every cell that both have; whether our interval holds the paper's number.

    `numbers` are those of a `Table`. If they come from other data than the paper's, so does part of the difference.
    """
    on = ["method", "k", "metric"] if by_k else ["method", "metric"]
    ours = numbers[[*dict.fromkeys([*on, "k"]), "mean", "low", "high"]]
    both = printed(data, by_k).drop(columns=[] if by_k else "k").merge(ours, on=on)
    within = (both["low"] <= both["paper"] + ROUNDED) & (both["paper"] - ROUNDED <= both["high"])
    both = both.assign(difference=both["mean"] - both["paper"], within=within).rename(columns={"mean": "ours"})
    return both[["method", "k", "metric", "paper", "ours", "low", "high", "difference", "within"]]


def gains_beside(numbers: pd.DataFrame, baseline: str, by_k: bool, metric: str = "AUPRC") -> pd.DataFrame:
    """Relative gains over a baseline: ours with intervals, the paper's on its three data sets, as text.

    "+4.5%" is as printed; "+2.0 to +5.3%" are the bounds by the rounded numbers, where the paper prints no gain. For
    data that the paper does not have: absolute values are not comparable then, but gains can be looked at.
    """
    ours = numbers[(numbers["metric"] == metric) & (numbers["method"] != baseline) & numbers["gain"].notna()]
    made, over = (
        ours[[*(["at"] if "at" in ours and not by_k else []), "method", "k", "gain", "gain_low", "gain_high"]],
        baseline.split(" (")[0],
    )

    def told(data: str, method: str, k: float) -> str | None:
        _, low, high = gain(data, method, over, metric, k)
        as_printed = printed_gain(data, method, over, k) if metric == "AUPRC" else None
        return as_printed or (f"{100 * low:+.1f} to {high:+.1%}" if np.isfinite(low) else None)

    cells = [(row.method, row.k if by_k else None) for row in made.itertuples()]
    theirs = {f"paper, {data}": [told(data, *cell) for cell in cells] for data in tables()["datasets"]}
    return made.reset_index(drop=True).assign(**theirs)


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
