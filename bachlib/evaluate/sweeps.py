"""The tables of a sweep from its evaluations, in the paper's layouts, and the paper's numbers beside them.

    main(evaluations)            Tables 2 and 5: a row per method, best over k
    matched(evaluations, "k")    Tables 3 and 4: a row per k (or any other parameter), methods beside each other
    data_table(sizes, …)         Table 1
    beside, gains_beside         what the paper prints for the same cells
    kappa_bounds(results)        section "Concentration is self-regularized"

Statistics are those of `tables`: this module only says which evaluations meet in a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from bachlib import BachError
from bachlib.evaluate import paper
from bachlib.evaluate.evaluation import Evaluation
from bachlib.evaluate.statistics import holm
from bachlib.evaluate.tables import Table, table
from bachlib.model.methods import METHODS

GAINS = ["gain", "gain_low", "gain_high", "difference", "p", "p_holm"]
SAME = 0.01  # counts that differ by less are those of the same data


# ----------------------------------------------------------------------------------------------- who meets whom


def settings_of(e: Evaluation) -> dict[str, Any]:
    """All parameters of an evaluation's model and training but the seed."""
    both = {**e.about.get("model", {}), **e.about.get("train", {})}
    return {key: value for key, value in both.items() if key != "seed"}


def value_of(e: Evaluation, axis: str) -> Any:
    """Where an evaluation is on an axis; None for a method that does not have it (one vector has no k)."""
    if axis != "k":
        value = settings_of(e).get(axis)
        return "none" if value is None and axis in settings_of(e) else value
    row = METHODS.get(e.label.split(" (")[0])
    return None if row and (row.heads or row.objective == "counts") else e.about.get("k")


def named(evaluations: Sequence[Evaluation], axis: str) -> list[Evaluation]:
    """In the order of the paper's methods; what else than the axis and the seed differs is part of the name."""
    order, found = list(METHODS), []
    for e in sorted(evaluations, key=lambda e: order.index(e.label) if e.label in order else len(order)):
        rivals = [settings_of(other) for other in evaluations if other.label == e.label]
        keys = dict.fromkeys(key for rival in rivals for key in rival if key != axis)
        apart = [key for key in keys if len({repr(rival.get(key)) for rival in rivals}) > 1]
        told = ", ".join(f"{key} = {settings_of(e).get(key)}" for key in apart)
        found.append(replace(e, about={**e.about, "method": f"{e.label} ({told})" if told else e.label}))
    return found


def baseline_of(names: Sequence[str], wanted: str) -> str | None:
    """The row that is meant by a baseline: itself, or the first of its settings."""
    return next((name for name in dict.fromkeys(names) if name == wanted or name.startswith(f"{wanted} (")), None)


def main(evaluations: Sequence[Evaluation], baseline: str = "all-multihead") -> Table:
    """The paper's main table: for each method the k that is best on the validation items.

    Where the baseline has no evaluation, the first method takes its place; the caption says which one it is.
    """
    found = named(evaluations, "k")
    names = [e.label for e in found]
    return table(found, baseline_of(names, baseline) or next(iter(names), baseline), best_over_k=True)


# ------------------------------------------------------------------------------------------------ matched


@dataclass(frozen=True, eq=False)
class Matched:
    """`numbers` has a row per value of the axis (`at`), method and metric; shown, it is the paper's Table 3."""

    numbers: pd.DataFrame  # at, and the columns of `Table.numbers`; shared: a method without the axis; sure
    axis: str
    baseline: str | None  # None: it is not there, and nothing is a gain
    protocol: dict[str, Any]
    level: float = 0.95

    def cells(self, bold: tuple[str, str] = ("**", "**"), digits: int = 4) -> pd.DataFrame:
        """As text: "R@100 ± / AUPRC ±" per method, then the gains in the last metric over the baseline."""
        best = self.numbers.groupby(["at", "metric"])["mean"].max()
        cells: dict[str, dict[Any, str]] = {}
        for (at, method), rows in self.numbers.groupby(["at", "method"], sort=False):
            texts = []
            for row in rows.itertuples():
                mean, top = (f"{x:.{digits}f}" for x in (row.mean, best[at, row.metric]))
                mean = f"{bold[0]}{mean}{bold[1]}" if mean == top else mean
                texts.append(f"{mean} ±{(row.high - row.low) / 2:.{digits}f}")
            cells.setdefault(method, {})[at] = " / ".join(texts)
        table = pd.DataFrame(cells, index=self.numbers["at"].unique()).fillna("–").rename_axis(self.axis)
        return table.join(self.gains.add_suffix(f", gain in {self.numbers['metric'].iloc[-1]}"))

    @property
    def gains(self) -> pd.DataFrame:
        """Relative gain in the last metric over the baseline at the same value of the axis; * where it is sure."""
        rows = self.numbers[(self.numbers["metric"] == self.numbers["metric"].iloc[-1]) & self.numbers["gain"].notna()]
        rows = rows[rows["method"] != self.baseline]
        text = [
            f"{100 * row.gain:+.1f}% [{100 * row.gain_low:+.1f}, {100 * row.gain_high:+.1f}]{'*' if row.sure else ''}"
            for row in rows.itertuples()
        ]
        wide = rows.assign(text=text).pivot(index="at", columns="method", values="text")
        wide = wide.reindex(index=self.numbers["at"].unique(), columns=rows["method"].unique()).fillna("–")
        return wide.rename_axis(index=self.axis, columns=None)

    def markdown(self) -> str:
        cells = self.cells()
        lines = [[self.axis, *cells], ["---"] * (1 + len(cells.columns))]
        lines += [[at, *row] for at, row in zip(cells.index, cells.to_numpy(), strict=True)]
        return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)

    def _repr_html_(self) -> str:
        cells, gains = self.cells(("<b>", "</b>")), self.gains
        methods = list(self.numbers["method"].unique())
        head = "".join(f"<th>{escape(name)}</th>" for name in [self.axis, *methods])
        body = ""
        for at in cells.index:
            below = {m: f" <br><small>{gains.loc[at, m]}</small>" for m in gains}
            parts = [cells.loc[at, m].replace(" / ", " / <br>") + below.get(m, "") for m in methods]
            body += f"<tr><td>{escape(str(at))}</td>{''.join(f'<td>{part}</td>' for part in parts)}</tr>"
        below = f"<p><small>{escape(self.caption)}</small></p>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{below}"

    @property
    def caption(self) -> str:
        metrics, users = list(self.numbers["metric"].unique()), self.protocol["users"]
        trained = self.numbers[self.numbers["method"] != "mostpop"]  # counts have no seed
        n_seeds = sorted(set(trained["seeds"]))
        parts = [
            f"{self.protocol['data']}, {self.protocol['split']} split, {users['n']:,} users; in a cell "
            f"{' / '.join(metrics)}; seeds per cell: {' or '.join(map(str, n_seeds)) or 'none'}.",
            f"Bold: best of the row. ±: half of the {self.level:.0%} interval over users and seeds.",
        ]
        if self.baseline is not None:
            parts.append(
                f"Below: gain in {metrics[-1]} over {self.baseline} in the same row, with its interval; *: it "
                f"leaves 0 out, and p < {1 - self.level:.2g} (permutation test over users, Holm-corrected)."
            )
        else:
            parts.append("The baseline is not there: no gains.")
        shared = self.numbers.loc[self.numbers["shared"], "method"].unique()
        if len(shared) and self.numbers["at"].nunique() > 1:
            parts.append(f"Without {self.axis}, the same in each row: {', '.join(shared)}.")
        if 1 in n_seeds:
            parts.append("One seed: of another training nothing is said.")
        return " ".join(parts)

    def __repr__(self) -> str:
        return f"{self.cells(('*', '')).to_string()}\n{self.caption}"


def matched(
    evaluations: Sequence[Evaluation],
    axis: str = "k",
    methods: Sequence[str] | None = None,
    metrics: Sequence[str] = tuple(paper.BY_K),
    *,
    baseline: str = "all-multihead",
    **how: Any,
) -> Matched:
    """A row per value of `axis`, the methods beside each other, each against the baseline in the same row.

    A method without the axis is in every row. `how`: n_draws, seed and level of `tables.table`.
    """
    known = [e for e in evaluations if methods is None or e.label in methods]
    if not known:
        raise BachError("there is nothing to compare: give evaluations of at least one of the methods")
    found = [(value_of(e, axis), e) for e in named(known, axis)]
    values = sorted({at for at, _ in found if at is not None}, key=lambda x: (isinstance(x, str), x)) or ["–"]
    base, shared = baseline_of([e.label for _, e in found], baseline), {e.label for at, e in found if at is None}
    rows = []
    for value in values:
        here = [e for at, e in found if at is None or at == value]
        names = {e.label for e in here}
        made = table(here, base if base in names else here[0].label, metrics, **how)
        gone = {} if base in names else dict.fromkeys(GAINS, np.nan)
        rows.append(made.numbers.assign(at=value, shared=made.numbers["method"].isin(shared), **gone))
    numbers = pd.concat(rows, ignore_index=True)
    if (tested := numbers["p"].notna()).any():
        numbers.loc[tested, "p_holm"] = holm(numbers.loc[tested, "p"])
    away = (numbers["gain_low"] > 0) | (numbers["gain_high"] < 0)
    numbers["sure"] = away & (numbers["p_holm"] < 1 - made.level)
    return Matched(numbers[["at", *numbers.columns.drop("at")]], axis, base, made.protocol, made.level)


# ------------------------------------------------------------------------------------------ the paper next to ours


def data_table(sizes: dict[str, dict[str, int]], evaluations: dict[str, Sequence[Evaluation]]) -> pd.DataFrame:
    """Table 1: users, items, windows and MostPop's R@100 of each data set, the paper's beside; and whether they agree.

    `sizes`: data → users, items, windows; `evaluations`: data → those of its runs.
    """
    columns, printed = ["users", "items", "windows", "mostpop R@100"], paper.tables()["datasets"]
    rows = {}
    for data, size in sizes.items():
        floor = [e.means["R@100"] for e in evaluations.get(data, ()) if e.label == "mostpop"]
        ours = {**size, "mostpop R@100": np.mean(floor) if floor else np.nan}
        told, theirs = "not in the paper", printed.get(data, {})
        if theirs and all(name in size for name in columns[:3]):
            away = max(abs(size[name] / theirs[name] - 1) for name in columns[:3])
            told = "the paper's, by its size" if away < SAME else "another than the paper's: the sizes differ"
        rows[data] = {(c, who): of.get(c, np.nan) for c in columns for who, of in (("ours", ours), ("paper", theirs))}
        rows[data]["which data", ""] = told
    return pd.DataFrame.from_dict(rows, orient="index")


def printed(data: str, by_k: bool) -> pd.DataFrame:
    """What the paper prints for a data set: method, k, metric, paper. By k (Tables 3, 4), or best over k (2, 5)."""
    known, rows = paper.tables(), []
    if by_k:
        tables = [known[name].get(data, {}) for name in ("head-matched", "routing")]
        for k, row in (pair for table in tables for pair in table.items()):
            rows += [(m, k, *cell) for m in row if m != "gain" for cell in zip(paper.BY_K, row[m], strict=True)]
        if data == "netflix":  # the text gives AUPRC only
            told = {k: row for k, row in known["netflix by k"].items() if isinstance(row, dict)}
            rows += [(m, k, "AUPRC", value) for k, row in told.items() for m, value in row.items()]
    else:
        for method, values in known["main"].get(data, {}).items():
            rows += [(method, np.nan, *cell) for cell in zip(paper.MAIN, values, strict=True)]
    if data in known["global codebook"]:
        one = paper.global_codebook(data)
        rows += [(one.name, one["k"], metric, one[metric]) for metric in paper.BY_K]
    table = pd.DataFrame(rows, columns=["method", "k", "metric", "paper"])
    return table.drop_duplicates(["method", "k", "metric"]).reset_index(drop=True)


def beside(numbers: pd.DataFrame, data: str, by_k: bool) -> pd.DataFrame:
    """Paper, ours and the difference for every cell that both have; whether our interval holds the paper's number."""
    on = ["method", "k", "metric"] if by_k else ["method", "metric"]
    ours = numbers[[*dict.fromkeys([*on, "k"]), "mean", "low", "high"]]
    both = printed(data, by_k).drop(columns=[] if by_k else "k").merge(ours, on=on)
    within = (both["low"] <= both["paper"] + 5e-4) & (both["paper"] - 5e-4 <= both["high"])  # it is rounded
    both = both.assign(difference=both["mean"] - both["paper"], within=within).rename(columns={"mean": "ours"})
    return both[["method", "k", "metric", "paper", "ours", "low", "high", "difference", "within"]]


def gains_beside(numbers: pd.DataFrame, baseline: str, by_k: bool, metric: str = "AUPRC") -> pd.DataFrame:
    """Relative gains over a baseline: ours with intervals, the paper's on its three data sets (from rounded numbers).

    For data the paper does not have: values cannot be compared then, and how much a method gains can be looked at.
    """
    ours = numbers[(numbers["metric"] == metric) & (numbers["method"] != baseline) & numbers["gain"].notna()]
    on = ["method", "k"] if by_k else ["method"]
    made = ours[[*(["at"] if "at" in ours and not by_k else []), "method", "k", "gain", "gain_low", "gain_high"]]
    for data in paper.tables()["datasets"]:
        told = printed(data, by_k).query("metric == @metric")
        base = told[told["method"] == baseline.split(" (")[0]].set_index("k")["paper"]
        of = told["k"].map(base) if by_k else (base.iloc[0] if len(base) else np.nan)
        theirs = told.assign(gain=told["paper"] / of - 1)[[*on, "gain"]].rename(columns={"gain": f"paper, {data}"})
        made = made.merge(theirs, on=on, how="left")
    return made.reset_index(drop=True)


def kappa_bounds(results: pd.DataFrame) -> pd.DataFrame:
    """Per data set and BACH method: the smallest κ, between which values the largest κ of a run lies, and the paper's.

    `results` has a row per run with data, method, "κ min" and "κ max" (`diagnostics.summary`).
    """
    names, rows = ["data", "method", "runs", "smallest", "low", "high", "paper_low", "paper_high"], []
    if "κ max" in results:
        for (data, method), runs in results.dropna(subset="κ max").groupby(["data", "method"], sort=False):
            largest, told = runs["κ max"], paper.kappa_range(method) or (np.nan, np.nan)
            rows.append((data, method, len(runs), runs["κ min"].min(), largest.min(), largest.max(), *told))
    return pd.DataFrame(rows, columns=names).astype(dict.fromkeys(names[3:], float))
