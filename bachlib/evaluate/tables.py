"""The paper's table from a set of evaluations: best in bold, intervals, and who differs from a chosen baseline.

    table([Evaluation, …] or run folders, baseline="all-multihead")

Evaluations of the same method and parameters with different seeds are one row. Means carry a bootstrap interval over
users and seeds; gains over the baseline are paired by user; p-values are Holm-corrected over all cells of the table.
Only what was measured in the same way is compared: another data set, split, set of users or rule is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bachlib import BachError
from bachlib.evaluate.evaluation import Evaluation
from bachlib.evaluate.paper import MAIN
from bachlib.evaluate.statistics import draws, holm, interval, sign_flips
from bachlib.files import canonical_json, differences
from bachlib.model.methods import METHODS


@dataclass(frozen=True, eq=False)
class Table:
    """`numbers` has a row per method and metric; shown, it is the paper's table."""

    numbers: (
        pd.DataFrame
    )  # method, k, metric, seeds, users, mean, low, high, gain (and its interval), difference, p, p_holm
    baseline: str
    protocol: dict[str, Any]
    level: float = 0.95

    @property
    def means(self) -> pd.DataFrame:
        """Methods × metrics."""
        return self._wide("mean")

    @property
    def gains(self) -> pd.DataFrame:
        """Relative gain over the baseline as "+3.1% [+1.0, +5.2]", with * where it differs (see the caption)."""
        cells = self.numbers.assign(
            text=[
                "" if row.method == self.baseline
                else f"{100 * row.gain:+.1f}% [{100 * row.gain_low:+.1f}, {100 * row.gain_high:+.1f}]{self._mark(row)}"
                for row in self.numbers.itertuples()
            ]
        )  # fmt: skip
        return self._named(self._wide("text", cells).drop(index=self.baseline))

    def cells(self, bold: tuple[str, str] = ("**", "**"), digits: int = 4) -> pd.DataFrame:
        """The table as text: mean, half the width of its interval, ▲ or ▼ where it differs from the baseline."""
        best = {metric: f"{value:.{digits}f}" for metric, value in self.means.max().items()}
        cells = self.numbers.assign(
            text=[self._cell(row, bold if f"{row.mean:.{digits}f}" == best[row.metric] else ("", ""), digits)
                  for row in self.numbers.itertuples()]
        )  # fmt: skip
        return self._named(self._wide("text", cells))

    def markdown(self) -> str:
        return _rows(self.cells(), "| ", " | ", " |", "| " + " | ".join(["---"] * (1 + len(self.means.columns))) + " |")

    def latex(self) -> str:
        """Rows for a booktabs tabular."""
        cells = self.cells(("\\textbf{", "}"))
        for plain, tex in {"±": "$\\pm$", "▲": "$^{\\ast}$", "▼": "$^{\\dagger}$"}.items():
            cells = cells.map(lambda text, a=plain, b=tex: text.replace(a, b))
        return _rows(cells.rename(index=lambda name: name.replace("_", "\\_")), "", " & ", " \\\\", "\\midrule")

    def _repr_html_(self) -> str:
        cells = self.cells(("<b>", "</b>"))
        head = "".join(f"<th>{escape(name)}</th>" for name in ["method", *cells.columns])
        body = "".join(
            f"<tr><td>{escape(str(name))}</td>{''.join(f'<td>{text}</td>' for text in row)}</tr>"
            for name, row in zip(cells.index, cells.to_numpy(), strict=True)
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table><p><small>{self.caption}</small></p>"

    @property
    def caption(self) -> str:
        trained = self.numbers[self.numbers["method"] != "mostpop"]  # counts have no seed
        users, n_seeds = self.protocol["users"], sorted(set(trained["seeds"]))
        who = f"{users['n']:,} {'cold ' if users['which'] == 'cold' else ''}users"
        parts = [
            f"{self.protocol['data']}, {self.protocol['split']} split, {who}, seeds per method: "
            f"{' or '.join(map(str, n_seeds)) or 'none'}.",
            f"Bold: best. ±: half of the {self.level:.0%} interval over users and seeds.",
            f"▲▼: differs from {self.baseline}: paired permutation test over users, Holm-corrected over the table,",
            f"p < {1 - self.level:.2g}, and the interval of the gain over users and seeds leaves 0 out.",
        ]
        if (fewer := self.numbers.groupby("metric", sort=False)["users"].first()).nunique() > 1:
            parts.append("Users with a value: " + ", ".join(f"{metric} {n:,}" for metric, n in fewer.items()) + ".")
        if 1 in n_seeds:
            parts.append("One seed: of another training nothing is said.")
        return " ".join(parts)

    def __repr__(self) -> str:
        return f"{self.cells(('*', '')).to_string()}\n{self.caption}"

    def _cell(self, row: Any, bold: tuple[str, str], digits: int) -> str:
        number = f"{bold[0]}{row.mean:.{digits}f}{bold[1]}"
        return f"{number} ±{(row.high - row.low) / 2:.{digits}f}{self._mark(row, '▲', '▼')}"

    def _mark(self, row: Any, up: str = "*", down: str = "*") -> str:
        """Both must say so: the test, which knows users only, and the interval, which knows seeds too."""
        if not (row.p_holm < 1 - self.level and (row.gain_low > 0 or row.gain_high < 0)):
            return ""
        return up if row.difference > 0 else down

    def _named(self, table: pd.DataFrame) -> pd.DataFrame:
        """With k in the names of the rows, where the multi-head methods do not all have the same."""
        k_of = self.numbers.groupby("method")["k"].first()
        several = {k for k in k_of.dropna() if k > 1}
        shown = {m: f"{m}, k = {k:.0f}" for m, k in k_of.items() if len(several) > 1 and k > 1 and "k = " not in m}
        return table.rename(index=shown)

    def _wide(self, column: str, numbers: pd.DataFrame | None = None) -> pd.DataFrame:
        numbers = self.numbers if numbers is None else numbers
        wide = numbers.pivot(index="method", columns="metric", values=column)
        return wide.loc[numbers["method"].unique(), numbers["metric"].unique()].rename_axis(columns=None)


def table(
    evaluations: Sequence[Evaluation | str | Path],
    baseline: str = "all-multihead",
    metrics: Sequence[str] = tuple(MAIN),
    *,
    best_over_k: bool = False,
    n_draws: int = 2_000,
    seed: int = 0,
    level: float = 0.95,
) -> Table:
    """The paper's table of these evaluations (run folders are looked up), against `baseline`, a row of it.

    `best_over_k` keeps for each method the k with the best *validation* AUPRC, as the paper's main tables do. A user
    without a value in a metric (no genres, say) is left out of it for all methods.
    """
    if isinstance(evaluations, Evaluation | str | Path):
        raise BachError("table wants a list of evaluations or run folders, not a single one")
    if not 0 < level < 1:
        raise BachError(f"level={level}: should be between 0 and 1, e.g. 0.95")
    found = [e if isinstance(e, Evaluation) else Evaluation.load(e) for e in evaluations]
    if not found:
        raise BachError("there is nothing to compare: give evaluations or folders of evaluated runs")
    check_comparable(found)
    for e in found:
        if missing := [name for name in metrics if name not in e.per_user]:
            raise BachError(f"{e.label} has no {', '.join(missing)}; it has {', '.join(e.per_user)}")
    groups = grouped(_best_over_k(found) if best_over_k else found)
    if baseline not in groups:
        raise BachError(f"baseline={baseline!r} should be one of the rows: {', '.join(groups)}")
    rows, p = [], []
    for metric in metrics:
        values = {name: np.stack([e.per_user[metric].to_numpy() for e in group]) for name, group in groups.items()}
        there = ~np.isnan(np.concatenate(list(values.values()))).any(0)
        values = {name: value[:, there] for name, value in values.items()}
        base, drawn = values[baseline], dict(zip(values, draws(list(values.values()), n_draws, seed).T, strict=True))
        p += sign_flips(np.stack([value.mean(0) - base.mean(0) for value in values.values()]), seed=seed).tolist()
        for name, value in values.items():
            with np.errstate(divide="ignore", invalid="ignore"):
                gain = value.mean() / base.mean() - 1, drawn[name] / drawn[baseline] - 1
            k = groups[name][0].about.get("k")
            numbers = [*interval(value.mean(), drawn[name], level), *interval(*gain, level), value.mean() - base.mean()]
            rows.append([name, k, metric, len(value), int(there.sum()), *numbers])
    names = "method k metric seeds users mean low high gain gain_low gain_high difference".split()
    numbers = pd.DataFrame(rows, columns=names).assign(p=np.nan, p_holm=np.nan)
    others = (numbers["method"] != baseline).to_numpy()
    if others.any():
        p = np.array(p)[others]
        numbers.loc[others, "p"], numbers.loc[others, "p_holm"] = p, holm(p)
    return Table(numbers, baseline, found[0].protocol, level)


def check_comparable(evaluations: Sequence[Evaluation]) -> None:
    """Refuse to compare what was not measured in the same way, and say how it differs."""
    first = evaluations[0]
    for other in evaluations[1:]:
        same_data = first.protocol["content_hash"] == other.protocol["content_hash"]
        a, b = (
            {key: value for key, value in e.protocol.items() if not (same_data and key == "data")}
            for e in (first, other)
        )
        if found := differences(a, b, f"for {first.label}", f"for {other.label}"):
            raise BachError("these cannot be compared: " + "; ".join(found) + ". Evaluate them in the same way")


def grouped(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """Seeds of one method together, methods in the order of the paper; what else differs becomes part of the name."""
    groups: dict[str, list[Evaluation]] = {}
    for e in evaluations:
        groups.setdefault(canonical_json([e.label, _settings(e)]), []).append(e)
    named = {}
    for group in groups.values():
        method = group[0].label
        rivals = [other[0] for other in groups.values() if other[0].label == method]
        keys = dict.fromkeys(key for e in rivals for key in _settings(e))
        apart = [key for key in keys if len({repr(_settings(e).get(key)) for e in rivals}) > 1]
        name = method + (f" ({', '.join(f'{k} = {_settings(group[0]).get(k)}' for k in apart)})" if apart else "")
        if len({_seed(e) for e in group}) < len(group):
            raise BachError(f"{name}: seed {_seed(group[0])} is there twice; one evaluation per seed")
        named[name] = group
    order = list(METHODS)
    place = {
        name: order.index(group[0].label) if group[0].label in order else len(order) for name, group in named.items()
    }
    return dict(sorted(named.items(), key=lambda item: place[item[0]]))


def _best_over_k(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    by_method: dict[str, dict[Any, list[Evaluation]]] = {}
    for e in evaluations:
        by_method.setdefault(e.label, {}).setdefault(e.about.get("k"), []).append(e)
    kept = []
    for method, by_k in by_method.items():
        looks = {k: [e.about.get("valid_auprc") for e in group] for k, group in by_k.items()}
        if len(by_k) > 1 and any(look is None for group in looks.values() for look in group):
            raise BachError(f"{method} has several k, and validation decides which is best: evaluate runs, not models")
        kept += by_k[max(by_k, key=lambda k: np.mean(looks[k]))] if len(by_k) > 1 else next(iter(by_k.values()))
    return kept


def _settings(e: Evaluation) -> dict[str, Any]:
    """All parameters but the seeds; also whether the training ended and which weights these are."""
    both = {**e.about.get("model", {}), **e.about.get("train", {})}
    both |= {key: e.about.get(key, usual) for key, usual in (("status", "finished"), ("weights", "best"))}
    return {key: value for key, value in both.items() if key != "seed"}


def _seed(e: Evaluation) -> tuple[Any, Any]:
    return e.about.get("seed"), e.about.get("train", {}).get("seed")


def _rows(cells: pd.DataFrame, start: str, between: str, end: str, rule: str) -> str:
    lines = [
        ["method", *cells.columns],
        *([name, *row] for name, row in zip(cells.index, cells.to_numpy(), strict=True)),
    ]
    lines = [start + between.join(map(str, line)) + end for line in lines]
    return "\n".join([lines[0], rule, *lines[1:]])
