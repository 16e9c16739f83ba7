"""The paper's numbers beside ours. They are data (`paper_tables.yaml`), as printed: one seed, no intervals."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from bachlib import BachError

MAIN = ["R@10", "R@50", "R@100", "NDCG@100", "AUPRC"]
BY_K = ["R@100", "AUPRC"]


@lru_cache(maxsize=1)
def tables() -> dict[str, Any]:
    """All of it, as in the file."""
    return yaml.safe_load(Path(__file__).with_name("paper_tables.yaml").read_text(encoding="utf-8"))


def main(dataset: str) -> pd.DataFrame:
    """Tables 2 and 5: a row per method, the five metrics."""
    return pd.DataFrame.from_dict(_of("main", dataset), orient="index", columns=MAIN).rename_axis("method")


def by_k(dataset: str, table: str = "head-matched") -> pd.DataFrame:
    """Table 3 ("head-matched") or 4 ("routing"): rows (k, method), R@100 and AUPRC."""
    rows = {
        (k, method): values
        for k, methods in _of(table, dataset).items()
        for method, values in methods.items()
        if method != "gain"
    }
    return pd.DataFrame.from_dict(rows, orient="index", columns=BY_K).set_axis(
        pd.MultiIndex.from_tuples(rows, names=["k", "method"])
    )


def global_codebook(dataset: str) -> pd.Series:
    """k, R@100 and AUPRC of the global codebook."""
    told = _of("global codebook", dataset)
    return pd.Series({"k": told["k"], **dict(zip(BY_K, told["p-bach-global"], strict=True))}, name="p-bach-global")


def kappa_range(method: str) -> tuple[float, float] | None:
    """Between which values the largest κ of a run lies in the paper; None for methods it does not tell of."""
    return tuple(tables()["kappa"][method]) if method in tables()["kappa"] else None


def gains(dataset: str, over: str = "all-multihead") -> pd.DataFrame:
    """Relative gains over a method of the same table, from the rounded numbers the paper prints."""
    table = main(dataset)
    return table / table.loc[over] - 1


def beside(ours: pd.DataFrame, dataset: str) -> pd.DataFrame:
    """Paper, ours and the difference for every method and metric that both have; `ours` has a row per method.

    Ours may come from another data set than the paper's: then the difference is one of data sets, too.
    """
    printed = main(dataset)
    methods = [name for name in printed.index if name in ours.index]
    if not methods:
        raise BachError(f"none of {', '.join(map(str, ours.index))} is in the paper's table for {dataset}")
    metrics = [name for name in MAIN if name in ours.columns]
    parts = {"paper": printed.loc[methods, metrics], "ours": ours.loc[methods, metrics]}
    parts["difference"] = parts["ours"] - parts["paper"]
    return pd.concat(parts, axis=1).swaplevel(axis=1)[metrics]


def _of(table: str, dataset: str) -> Any:
    known = tables()[table]
    if dataset not in known:
        raise BachError(f"the paper's table {table!r} has {', '.join(known)}; not {dataset!r}")
    return known[dataset]
