"""Tables of evaluations in the paper's layouts, with intervals and tests.

`table` and, for a sweep, `main_table`: a row per method (Tables 2, 5). `matched`: a row per value of an axis (3, 4).
Evaluations of the same method and parameters with different seeds form one cell. Means have a bootstrap interval over
users and seeds, gains over the baseline are paired by user. All evaluations must come from the same protocol: data set,
split, users, exclusions. Models with other parts (another encoder of one's own, for example) are separate rows.
`paper` has the paper's numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from bachlib import BachError
from bachlib.evaluate.evaluation import Evaluation
from bachlib.evaluate.paper import BY_K, MAIN
from bachlib.evaluate.statistics import LEVEL, draws, holm, interval, sign_flips
from bachlib.files import differences
from bachlib.model.methods import METHODS
from bachlib.params import ModelParams, TrainParams

BASELINE = "all-multihead"
USUAL = {name: field.default for of in (ModelParams, TrainParams) for name, field in of.model_fields.items()}
Evaluations, Folders, Names = Sequence[Evaluation], Sequence[str | Path], Sequence[str]


@dataclass(eq=False)
class Table:
    """`numbers` has one row per cell and metric; the other members show it in one of the two layouts.

    Its columns: [at,] method, k, metric, seeds, users, mean and gain with low and high, difference, p, p_holm, sure.
    """

    numbers: pd.DataFrame
    baseline: str | None  # None: it has no results, so there are no gains
    protocol: dict[str, Any]
    axis: str | None = None  # None: a row per method; else a row per value (`at`) of this parameter
    best_over_k: bool = False  # was k chosen for each method?

    def __post_init__(self) -> None:
        """Correct p over the whole table. A gain is `sure` if test (over users) and interval (and seeds) exclude 0."""
        p, away = self.numbers["p"].dropna(), (self.numbers["gain_low"] > 0) | (self.numbers["gain_high"] < 0)
        self.numbers = self.numbers.assign(p_holm=pd.Series(holm(p), p.index))
        self.numbers["sure"] = away & (self.numbers["p_holm"] < 1 - LEVEL)

    @property
    def means(self) -> pd.DataFrame:
        """Methods × metrics; with an axis, (value, method) × metrics."""
        if self.axis is None:
            return self._wide("method", "metric", self.numbers, "mean")
        return self.numbers.set_index(["at", "method", "metric"])["mean"].unstack("metric", sort=False)

    @property
    def gains(self) -> pd.DataFrame:
        """Gains over the baseline as "+3.1% [+1.0, +5.2]", * if sure; with an axis in the same row and last metric."""
        rows = self.numbers[self.numbers["method"] != self.baseline]
        if self.axis is not None:
            rows = rows[(rows["metric"] == self._metrics[-1]) & rows["gain"].notna()]
        percent = 100 * rows[["gain", "gain_low", "gain_high"]]
        text = [f"{gain:+.1f}% [{low:+.1f}, {high:+.1f}]" for gain, low, high in percent.itertuples(index=False)]
        rows = rows.assign(text=text + np.where(rows["sure"], "*", "").astype(object))
        if self.axis is None:
            return self._with_k(self._wide("method", "metric", rows))
        return self._wide("at", "method", rows).reindex(self.numbers["at"].unique()).fillna("–").rename_axis(self.axis)

    def cells(self, bold: tuple[str, str] = ("**", "**")) -> pd.DataFrame:
        """The means as text, each with half the width of its interval, the best in bold.

        A row per method: ▲ or ▼ marks a sure difference. With an axis: the metrics of a method share a cell, "R@100 ± /
        AUPRC ±", and the gains follow in columns of their own.
        """
        rows, wide = self.numbers, self.axis is None
        best = rows.groupby(["metric"] if wide else ["at", "metric"])["mean"].transform("max")
        text = []
        for row, top in zip(rows.itertuples(), best, strict=True):
            start, end = bold if f"{row.mean:.4f}" == f"{top:.4f}" else ("", "")
            mark = ("▲" if row.difference > 0 else "▼") if wide and row.sure else ""
            text.append(f"{start}{row.mean:.4f}{end} ±{(row.high - row.low) / 2:.4f}{mark}")
        rows = rows.assign(text=text)
        if wide:
            return self._with_k(self._wide("method", "metric", rows))
        rows = rows.groupby(["at", "method"], sort=False, as_index=False)["text"].agg(" / ".join)
        made = self._wide("at", "method", rows).fillna("–").rename_axis(self.axis)
        return made.join(self.gains.add_suffix(f", gain in {self._metrics[-1]}"))

    def markdown(self) -> str:
        cells = self.cells()
        return _lines(cells, "| ", " | ", " |", "| " + " | ".join(["---"] * (1 + len(cells.columns))) + " |")

    def latex(self) -> str:
        """Rows for a booktabs tabular."""
        text = _lines(self.cells(("\\textbf{", "}")), "", " & ", " \\\\", "\\midrule")
        signs = {"_": "\\_", "%": "\\%", "±": "$\\pm$", "▲": "$^{\\ast}$", "▼": "$^{\\dagger}$", "–": "--"}
        return text.translate(str.maketrans(signs))

    def _repr_html_(self) -> str:
        cells = self.cells(("<b>", "</b>"))
        if self.axis is not None:  # a gain stands below the numbers it belongs to
            gains, cells = self.gains, cells[self.numbers["method"].unique()]
            cells = cells.apply(lambda column: column.str.replace(" / ", " / <br>"))
            for method in gains:
                cells[method] += " <br><small>" + gains[method] + "</small>"
        head = "".join(f"<th>{escape(name)}</th>" for name in [cells.index.name, *cells])
        rows = [[escape(str(name)), *row] for name, *row in cells.reset_index().to_numpy()]
        body = "".join(f"<tr>{''.join(f'<td>{text}</td>' for text in row)}</tr>" for row in rows)
        caption = f"<p><small>{escape(self.caption)}</small></p>"
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{caption}"

    @property
    def caption(self) -> str:
        wide, users = self.axis is None, self.protocol["users"]
        n_seeds = sorted(set(self.numbers.loc[self.numbers["method"] != "mostpop", "seeds"]))  # counts have no seed
        who = f"{users['n']:,} {'cold ' if users['which'] == 'cold' else ''}users"
        if without := self.protocol["users"].get("without items"):
            who += f" ({without:,} have no items in this period or none before it)"
        told = f"{self.protocol['data']}, {self.protocol['split']} split, {who}; "
        told += f"seeds per {'method' if wide else 'cell'}: {_either(n_seeds)}. "
        if self.best_over_k:
            told += (
                "k of each method: the best validation AUPRC (the paper's tables say best over k, not on which items). "
            )
        told += "Bold: best. " if wide else f"Each cell shows {' / '.join(self._metrics)}. Bold: best of the row. "
        told += f"±: half of the {LEVEL:.0%} interval over users and seeds."
        sure = f"interval excludes 0, and p < {1 - LEVEL:.2g} in a paired permutation test over users, "
        sure += "Holm-corrected over the table."
        if self.baseline is None:
            told += " The baseline has no results, so no gains are shown."
        elif wide:
            told += f" ▲▼: above or below {self.baseline}: the gain's {sure}"
        else:
            told += f" Below: gain in {self._metrics[-1]} over {self.baseline} in the same row. *: its {sure}"
        if self.numbers["users"].nunique() > 1:
            counts = self.numbers.groupby("metric", sort=False)["users"].unique()
            told += f" Users with a value: {', '.join(f'{m} {_either(n)}' for m, n in counts.items())}."
        if not wide and self.numbers["at"].nunique() > 1 and self.numbers["shared"].any():
            shared = self.numbers.loc[self.numbers["shared"], "method"].unique()
            told += f" Without {self.axis}, the same in each row: {', '.join(shared)}."
        return told + (" Single seed: the intervals do not include variation between trainings." * (1 in n_seeds))

    def __repr__(self) -> str:
        return f"{self.cells(('*', '')).to_string()}\n{self.caption}"

    @property
    def _metrics(self) -> list[str]:
        return list(self.numbers["metric"].unique())

    def _with_k(self, table: pd.DataFrame) -> pd.DataFrame:
        """With k in the names of the rows, where the multi-head methods do not all have the same k."""
        k_of = self.numbers.groupby("method")["k"].first()
        several = {k for k in k_of.dropna() if k > 1}
        shown = {m: f"{m}, k = {k:.0f}" for m, k in k_of.items() if len(several) > 1 and k > 1 and "k = " not in m}
        return table.rename(index=shown)

    @staticmethod
    def _wide(row: str, column: str, numbers: pd.DataFrame, values: str = "text") -> pd.DataFrame:
        """Rows and columns in the order of `numbers`."""
        wide = numbers.pivot(index=row, columns=column, values=values).rename_axis(columns=None)
        return wide.reindex(index=pd.Index(numbers[row].unique(), name=row), columns=numbers[column].unique())


def _either(counts: Sequence[int]) -> str:
    return " or ".join(f"{n:,}" for n in sorted(counts)) or "none"


def _lines(cells: pd.DataFrame, start: str, between: str, end: str, rule: str) -> str:
    lines = [start + between.join(map(str, line)) + end for line in cells.reset_index().to_numpy()]
    return "\n".join([start + between.join([cells.index.name, *cells]) + end, rule, *lines])


def table(
    evaluations: Evaluations | Folders,
    baseline: str | None = BASELINE,
    metrics: Names = MAIN,
    *,
    best_over_k: bool = False,
) -> Table:
    """The paper's main table of these evaluations (or run folders); `baseline` is the name of one of its rows.

    baseline=None: all-multihead (the first of its settings) if it is there, else the first row.

    `best_over_k` keeps for each method the k with the best *validation* AUPRC, as the paper's main tables do. A user
    without a value in a metric (no genres, for example) is left out of it for all methods.
    """
    if isinstance(evaluations, Evaluation | str | Path):
        raise BachError("table needs a list of evaluations or run folders, not a single one")
    found = [e if isinstance(e, Evaluation) else Evaluation.load(e) for e in evaluations]
    if not found:
        raise BachError("nothing to compare: give evaluations or folders of evaluated runs")
    check_comparable(found)
    for e in found:
        if missing := [name for name in metrics if name not in e.per_user]:
            raise BachError(f"{e.label} has no {', '.join(missing)}; it has {', '.join(e.per_user)}")
    groups = grouped(_best_over_k(_renamed(found, "k")) if best_over_k else found)
    if baseline is None:
        baseline = _meant(groups, BASELINE) or next(iter(groups))
    if baseline not in groups:
        raise BachError(f"baseline={baseline!r} should be one of the rows: {', '.join(groups)}")
    rows, p = [], []
    for metric in metrics:
        values = {name: np.stack([e.per_user[metric].to_numpy() for e in group]) for name, group in groups.items()}
        there = ~np.isnan(np.concatenate(list(values.values()))).any(0)
        values = {name: value[:, there] for name, value in values.items()}
        base, drawn = values[baseline], dict(zip(values, draws(list(values.values())).T, strict=True))
        p += sign_flips(np.stack([value.mean(0) - base.mean(0) for value in values.values()])).tolist()
        for name, value in values.items():
            with np.errstate(divide="ignore", invalid="ignore"):
                gain = value.mean() / base.mean() - 1, drawn[name] / drawn[baseline] - 1
            k = groups[name][0].about.get("k")
            numbers = [*interval(value.mean(), drawn[name]), *interval(*gain), value.mean() - base.mean()]
            rows.append([name, k, metric, len(value), int(there.sum()), *numbers])
    names = "method k metric seeds users mean low high gain gain_low gain_high difference".split()
    numbers = pd.DataFrame(rows, columns=names)
    numbers = numbers.assign(p=np.where(numbers["method"] != baseline, p, np.nan))
    return Table(numbers, baseline, found[0].protocol, best_over_k=best_over_k)


def main_table(evaluations: Evaluations, baseline: str = BASELINE) -> Table:
    """The main table of a sweep: for each method and setting the k that is best on the validation items.

    If the baseline has no evaluation, the first method takes its place; the caption names it.
    """
    found = _renamed(evaluations, "k")
    return table(found, _baseline(found, baseline) or next((e.label for e in found), baseline), best_over_k=True)


def matched(evaluations: Evaluations, axis: str = "k", metrics: Names = BY_K, *, baseline: str = BASELINE) -> Table:
    """A row per value of `axis`, methods beside each other, each compared with the baseline in the same row.

    A method without the axis is in every row.
    """
    found = [(_value(e, axis), e) for e in _renamed(evaluations, axis)]
    values = sorted({at for at, _ in found if at is not None}, key=lambda x: (isinstance(x, str), x)) or ["–"]
    base, shared = _baseline([e for _, e in found], baseline), {e.label for at, e in found if at is None}
    rows = []
    for value in values:
        here = [e for at, e in found if at is None or at == value]
        names = {e.label for e in here}
        made = table(here, base if base in names else (here[0].label if here else baseline), metrics)
        if base not in names:
            made.numbers[["gain", "gain_low", "gain_high", "difference", "p"]] = np.nan
        rows.append(made.numbers.assign(at=value, shared=made.numbers["method"].isin(shared)))
    numbers = pd.concat(rows, ignore_index=True)
    return Table(numbers[["at", *numbers.columns.drop("at")]], base, made.protocol, axis)


def check_comparable(evaluations: Evaluations) -> None:
    """Raise an error that names the differences if the evaluations do not share one protocol."""
    first, *others = evaluations
    for other in others:
        same = ["data"] if first.protocol["content_hash"] == other.protocol["content_hash"] else []  # in another folder
        a, b = ({key: value for key, value in e.protocol.items() if key not in same} for e in (first, other))
        if found := differences(a, b, f"for {first.label}", f"for {other.label}"):
            raise BachError("these evaluations are not comparable: " + "; ".join(found) + ". Use one protocol for all")


def grouped(evaluations: Evaluations) -> dict[str, list[Evaluation]]:
    """Name of a row → its evaluations, one per seed; methods in the order of the paper."""
    groups: dict[str, list[Evaluation]] = {}
    for name, e in _named(evaluations):
        groups.setdefault(name, []).append(e)
    for name, group in groups.items():
        seeds = [(e.about.get("seed"), e.about.get("train", {}).get("seed")) for e in group]
        if len(set(seeds)) < len(seeds):
            raise BachError(f"{name}: seed {seeds[0]} occurs twice; give one evaluation per seed")
    return groups


def _named(evaluations: Evaluations, axis: str | None = None) -> list[tuple[str, Evaluation]]:
    """In the order of the paper's methods; settings that differ within a method (but the axis) are in the name."""
    named = []
    place = {name: n for n, name in enumerate(METHODS)}
    for e in sorted(evaluations, key=lambda e: (place.get(e.method, len(place)), e.label != e.method)):
        rivals = [_settings(other) for other in evaluations if other.label == e.label]
        keys = dict.fromkeys(key for rival in rivals for key in rival if key != axis)
        apart = [key for key in keys if len({repr(rival.get(key)) for rival in rivals}) > 1]
        told = ", ".join(f"{key} = {_settings(e).get(key, USUAL.get(key))}" for key in apart)
        both = f"{e.label[:-1]}, {told})" if e.label.endswith(")") else f"{e.label} ({told})"
        named.append((both if told else e.label, e))
    return named


def _renamed(evaluations: Evaluations, axis: str) -> list[Evaluation]:
    """Evaluations whose label is their name, so that it stays the same in every row of a table."""
    return [replace(e, about={**e.about, "name": name}) for name, e in _named(evaluations, axis)]


def _settings(e: Evaluation) -> dict[str, Any]:
    """All parameters but the seeds, and the parts; also whether the training ended and which weights these are."""
    both = {**e.about.get("model", {}), **e.about.get("train", {})}
    both |= {"method": e.method, **{f"the {part}": value for part, value in e.different.items()}}
    both |= {f"code of the {part}": known.split()[-1] for part, known in e.about.get("own", {}).items()}
    both |= {key: e.about.get(key, usual) for key, usual in (("status", "finished"), ("weights", "best"))}
    both |= {"serve_by": e.about.get("serve_by", "density")} if _has_kernel(e) else {}
    return {key: value for key, value in both.items() if key != "seed"}


def _has_kernel(e: Evaluation) -> bool:
    return bool((e.about.get("row") or (METHODS[e.method]._asdict() if e.method in METHODS else {})).get("kernel"))


def _value(e: Evaluation, axis: str) -> Any:
    """The value of the axis; None for a method that does not have it (a single vector has no k)."""
    if axis != "k":
        value = _settings(e).get(axis)
        return "none" if value is None and axis in _settings(e) else value
    row = e.about.get("row") or (METHODS[e.method]._asdict() if e.method in METHODS else {})
    return None if row.get("heads") or row.get("objective") == "counts" else e.about.get("k")


def _baseline(found: Evaluations, wanted: str) -> str | None:
    """The row that is meant by a baseline: the method itself, or the first of its settings."""
    return _meant([e.label for e in found], wanted)


def _meant(rows: Iterable[str], wanted: str) -> str | None:
    return next((name for name in rows if name == wanted or name.startswith(f"{wanted} (")), None)


def _best_over_k(evaluations: Evaluations) -> list[Evaluation]:
    by_method: dict[str, dict[Any, list[Evaluation]]] = {}
    for e in evaluations:
        by_method.setdefault(e.label, {}).setdefault(e.about.get("k"), []).append(e)
    kept = []
    for method, by_k in by_method.items():
        looks = {k: [e.about.get("valid_auprc") for e in group] for k, group in by_k.items()}
        if len(by_k) > 1 and any(look is None for group in looks.values() for look in group):
            raise BachError(f"{method} has several k, and validation AUPRC chooses one: evaluate runs, not models")
        kept += by_k[max(by_k, key=lambda k: np.mean(looks[k]))] if len(by_k) > 1 else next(iter(by_k.values()))
    return kept
