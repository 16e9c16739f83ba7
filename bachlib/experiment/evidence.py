"""The evidence: all published records of the planned trainings, as the claims ledger and the README's tables use them.

`TIERS` are the sweeps of `params/sweeps` for the paper's claims, `ABLATIONS` those with one switch changed. They are
read from the published records alone: no log, no weights, no training. What is not published yet is named.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path

import numpy as np
import pandas as pd

from bachlib import BachError
from bachlib.evaluate import Evaluation
from bachlib.evaluate.claims import CLAIMS, Evidence, Result, compared, ledger
from bachlib.evaluate.statistics import Interval
from bachlib.evaluate.tables import Table, main_table
from bachlib.evaluate.traits import SESSIONS, SPREAD
from bachlib.evaluate.verdicts import CONFIRMED, DENIED, NOTHING, OPEN, of_all
from bachlib.evaluate.worlds import OURS, THEIRS, gain_table
from bachlib.experiment.published import HISTORY, published, traits_of
from bachlib.experiment.settings import Experiment
from bachlib.experiment.sweep import Point, read_sweep, record_in
from bachlib.files import project_root, write_text
from bachlib.reading import read_table

TIERS = [
    "evidence-1-methods", "evidence-2-all-targets", "evidence-3-heads", "evidence-4a-journey-types",
    "evidence-4b-journey-products",
]  # fmt: skip
ABLATIONS = [
    "ablation-posterior", "ablation-through-gamma", "ablation-temper", "ablation-kappa", "ablation-pi", "serving",
    "ablation-log-q", "ablation-false-negatives", "ablation-svd-on", "ablation-history", "ablation-ties",
    "ablation-cls-scale", "neighbours", "ablation-hybrid",
]  # fmt: skip


WORLDS = "where-a-mixture-pays"
LEVEL = 0.95  # of the best validation AUPRC of the reference
REFERENCE = "standard"


def setting_of(p: Experiment) -> str:
    """The log and the targets of an experiment, in words."""
    items = f" by {p.items}" if p.source == "complete-journey" else ""
    return f"{p.source}{items}{', all targets' if p.targets == 'all' else ''}"


@lru_cache(maxsize=1_000)
def _result(folder: Path, setting: str, method: str, k: int) -> Result:
    history = read_table(folder / HISTORY) if (folder / HISTORY).exists() else None
    return Result(setting, method, k, Evaluation.load(folder), record_in(folder), history)


def results_of(points: list[Point]) -> dict[str, Result]:
    """The published results of the points that have one, by the name of the point."""
    found = {point.name: (point.p, published(point)) for point in points}
    return {name: _result(at, setting_of(p), p.method, p.k) for name, (p, at) in found.items() if at}


def evidence() -> Evidence:
    """All tiers; a training that is in two of them counts once."""
    points = {point.name: point for name in TIERS for point in read_sweep(name).points}
    planned = Counter((setting_of(point.p), point.p.method, point.p.k) for point in points.values())
    return Evidence([*results_of([*points.values()]).values()], planned)


def table_of(found: Evidence, setting: str) -> Table | None:
    """The main table of a setting, from what is published of it; k of each method by its validation AUPRC."""
    there = [r.evaluation for r in found.results if r.setting == setting and r.k in _K_OF_TABLES]
    return main_table(there) if there else None


def seeds_missing(found: Evidence, setting: str) -> dict[str, tuple[int, int]]:
    """Method (and k of a codebook) → published and planned trainings, where some are missing."""
    cells = [(m, k) for at, m, k in found.planned if at == setting and k in _K_OF_TABLES]
    counts = {cell: (len(found.of(setting, cell)), found.planned[setting, *cell]) for cell in cells}
    several = {m for m, _ in cells if sum(m == other for other, _ in cells) > 1}
    return {f"{m}, k = {k}" if m in several else m: of for (m, k), of in counts.items() if of[0] < of[1]}


def progress() -> pd.DataFrame:
    """How many trainings of each sweep are published."""
    points = {name: read_sweep(name).points for name in (*TIERS, *ABLATIONS)}
    rows = {name: (len(of), sum(published(point) is not None for point in of)) for name, of in points.items()}
    return pd.DataFrame.from_dict(rows, "index", columns=["planned", "published"]).rename_axis("sweep")


def ablation(name: str) -> list[Table]:
    """The tables of an ablation: one per method, against its first setting; of methods against each other if nothing
    else varies. Another preparation of the log has a table of its own: its users cannot be paired."""
    sweep, groups = read_sweep(name), {}
    grid = sweep.file.grids[0]
    switched = [key for key in grid if key not in ("method", "seed")]
    first = sorted(sweep.points, key=lambda point: [grid[key].index(point.where[key]) for key in switched])
    for r in results_of(first).values():
        method = r.method if switched else sweep.file.baseline
        groups.setdefault((r.evaluation.protocol["content_hash"], method), []).append(r.evaluation)
    return [main_table(of, method) for (_, method), of in groups.items()]


def ablation_gains() -> pd.DataFrame:
    """What each switch changes: the gain in AUPRC over the first setting of its sweep, with interval and trainings."""
    rows = []
    for name in ABLATIONS:
        for made in ablation(name):
            of = made.numbers[(made.numbers["metric"] == "AUPRC") & (made.numbers["method"] != made.baseline)]
            kept = of[["method", "gain", "gain_low", "gain_high", "seeds"]].itertuples(index=False)
            rows += [[name, f"{row[0]} over {made.baseline}", *row[1:]] for row in kept]
    return pd.DataFrame(rows, columns=["sweep", "name", "gain", "low", "high", "trainings"])


def learning_curves(found: Evidence, k: int = 8) -> pd.DataFrame:
    """How fast methods learn: a row per training and look at the validation items; cpu_s is NaN where it is unknown."""
    rows = [_curve(r) for r in found.results if r.k in (1, k) and r.history is not None and len(r.history)]
    names = ["setting", "method", "seed", "epoch", "valid_auprc", "cpu_s"]
    return pd.concat(rows, ignore_index=True) if rows else pd.DataFrame(columns=names)


def _curve(r: Result) -> pd.DataFrame:
    about = r.evaluation.about
    looks = r.history.dropna(subset="valid_auprc")
    cpu = looks["epoch"] * about.get("cpu_s_per_epoch", np.nan)
    same = {"setting": r.setting, "method": r.method, "seed": about["seed"]}
    return looks[["epoch", "valid_auprc"]].assign(**same, cpu_s=cpu)[[*same, "epoch", "valid_auprc", "cpu_s"]]


def learning_speed(of: pd.DataFrame, reference: str) -> pd.DataFrame:
    """Per setting and method, means over trainings: best epoch, epochs and CPU seconds to `LEVEL` of the best that one
    vector reaches in the setting `reference` (NaN if a training never does), CPU seconds of an epoch."""
    best = of[(of["setting"] == reference) & (of["method"] == REFERENCE)].groupby("seed")["valid_auprc"].max()
    level, rows = LEVEL * best.mean(), []
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


def worlds() -> pd.DataFrame:
    """The draws of planted worlds whose records and traits are published (`worlds.gain_table`)."""
    points = read_sweep(WORLDS).points
    found = results_of(points)
    runs = [
        (point.p.model_dump() | told, found[point.name].evaluation)
        for point in points if point.name in found and (told := traits_of(point))
    ]  # fmt: skip
    return gain_table(runs)


def logs(found: Evidence) -> dict[str, tuple[float, float, Interval | None]]:
    """Where the real logs stand on the map: their published traits, and the gain of p-BACH over one vector there."""
    placed = {}
    for name in TIERS:
        for point in read_sweep(name).points:
            setting = setting_of(point.p)
            if setting not in placed and (told := traits_of(point)):
                effect = compared(found, setting, (OURS, 8), (THEIRS[0], 1), "AUPRC")
                placed[setting] = told[SPREAD], told[SESSIONS], effect.found if effect.enough else None
    return placed


# ------------------------------------------------------------------------------------------- the README's tables

MAIN_SETTING = "movielens-1m"
EARLY = ("mostpop", "standard", "all-multihead", "p-bach")  # the rows of the table of five epochs
_K_OF_TABLES = {1, 8, 64, 128}
_BLOCK = re.compile(r"(<!-- evidence -->\n).*?(<!-- /evidence -->)", re.S)
_EARLY = re.compile(r"<!-- until the evidence is complete -->\n.*?<!-- /until -->\n+", re.S)


def markdown(found: Evidence) -> str:
    """The README's tables: methods with the number of trainings beside their numbers, then the verdicts."""
    made, missing = table_of(found, MAIN_SETTING), seeds_missing(found, MAIN_SETTING)
    planned = sum(n for (at, _, k), n in found.planned.items() if at == MAIN_SETTING and k in _K_OF_TABLES)
    there = planned - sum(n - has for has, n in missing.values())
    lines = [
        f"MovieLens-1M, k = 8, trained until validation stopped rising; {there} of {planned} trainings are on record:"
    ]
    if made is not None:
        cells = made.cells()
        seeds = made.numbers.groupby("method", sort=False)["seeds"].first()
        cells.insert(0, "trainings", seeds.reindex(made.numbers["method"].unique()).to_numpy())
        rule = "| " + " | ".join(["---"] * (1 + len(cells.columns))) + " |"
        rows = [f"| {' | '.join(map(str, row))} |" for row in cells.reset_index().to_numpy()]
        lines += ["", f"| {' | '.join(['method', *cells])} |", rule, *rows, "", made.caption]
    if missing:
        told = ", ".join(f"{name} {has} of {n}" for name, (has, n) in missing.items())
        lines += ["", f"Still missing: {told}."]
    said = {n: of_all(e.verdict for e in of.get(MAIN_SETTING, [])) for n, of in ledger(found).items()}
    lines += ["", "Verdicts on the paper's ten claims, with their numbers in `11_claims`:", ""]
    for name in (CONFIRMED, DENIED, OPEN, NOTHING):
        if which := [number for number in said if said[number] == name]:
            told = [f"{n}. {CLAIMS[n - 1].title}" if name != NOTHING else str(n) for n in which]
            lines.append(f"- *{name}*: {('; ' if name != NOTHING else ', ').join(told)}")
    return "\n".join(lines) + "\n"


def is_complete(found: Evidence) -> bool:
    """Are there enough trainings of the methods in the table of five epochs?"""
    at = MAIN_SETTING
    cells = [(method, k) for method in EARLY for k in found.ks(at, method) if k in _K_OF_TABLES]
    return all(found.enough(at, cell, found.of(at, cell)) for cell in cells)


def with_tables(text: str, found: Evidence) -> str:
    """A README with its tables as the records are; what is marked as early goes when they are complete."""
    if not _BLOCK.search(text):
        raise BachError("README.md has no <!-- evidence --> … <!-- /evidence --> to write the tables into")
    text = _BLOCK.sub(lambda block: block[1] + markdown(found) + block[2], text)
    return _EARLY.sub("", text) if is_complete(found) else text


def write_tables() -> str:
    """Bring the README's tables in line with the published records; says how many there are, and what changed."""
    path = project_root() / "README.md"
    text = path.read_text(encoding="utf-8")
    if (new := with_tables(text, evidence())) != text:
        write_text(path, new)
    return f"{progress().to_string()}\nREADME.md {'agrees with the records' if new == text else 'has new tables'}"
