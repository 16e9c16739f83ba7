"""How good a run is: its metrics with intervals, beside the comparable runs that lie next to it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.evaluate import Evaluation, evaluate, tables
from bachlib.evaluate.paper import MAIN
from bachlib.evaluate.statistics import draws, interval
from bachlib.files import canonical_json
from bachlib.show import plots
from bachlib.show.plots.style import label
from bachlib.train import Run

MOST_USERS = 2_000  # to evaluate, where nothing has been evaluated yet
BASELINE = "all-multihead"
CURVES = 8  # methods in one figure


def numbers(own: Evaluation, folder: Path, n_items: int) -> tuple[str, tables.Table | pd.DataFrame, go.Figure]:
    """A sentence, the table and the recall curves."""
    others, users = comparable(own, folder), own.protocol["users"]
    who = f"{users['n']:,} {'cold ' if users['which'] == 'cold' else ''}users"
    lead = f"The test items of {who}, ranked among the whole catalogue without the items the user already had."
    if others:
        several = "runs lie" if len(others) > 1 else "run lies"
        lead += f" {len(others)} other evaluated {several} beside this one and can be compared with it."
        rows = tables.grouped([own, *others])
        baselines = [name for name, group in rows.items() if group[0].label == BASELINE]
        baselines += [name for name, group in rows.items() if any(e is own for e in group)]
        table = tables.table([own, *others], baselines[0])
    else:
        lead += " Single seed: the intervals, bootstrapped over users, do not include variation between trainings."
        table = means(own)
    curves: dict[str, np.ndarray] = {}
    for e in (own, *others):
        curves.setdefault(label(e.label), e.ranks)
    drawn = plots.recall_curves(dict(list(curves.items())[:CURVES]), up_to=min(500, n_items - 1))
    if len(curves) == 1:
        drawn.update_layout(title_text=f"{(own.ranks <= 50).mean():.1%} of the held-out items are among the first 50")
    return lead, table, drawn


def evaluation_of(run: Run, dataset: Dataset) -> Evaluation:
    """What was saved, if it is of these weights; else it is evaluated, on at most 2,000 users."""
    if (run.folder / "evaluation-test.json").exists():
        saved = Evaluation.load(run.folder)
        if saved.about.get("valid_auprc") == (run.best or {}).get("auprc"):
            return saved
    return evaluate(run, dataset, max_users=MOST_USERS, quiet=True)


def comparable(own: Evaluation, folder: Path) -> list[Evaluation]:
    """Evaluated runs beside this one that were measured in the same way, each training once."""
    found = {_training(own): own}
    for path in sorted(folder.resolve().parent.glob("*/evaluation-test.json")):
        with suppress(BachError, KeyError, OSError, ValueError):  # measured otherwise, or damaged: not ours to mend
            other = Evaluation.load(path.parent)
            tables.check_comparable([own, other])
            if path.parent != folder.resolve() and {*MAIN} <= {*other.per_user}:
                found.setdefault(_training(other), other)
    return list(found.values())[1:]


def _training(e: Evaluation) -> str:
    """What makes an evaluation one of another training: method, all parameters with seeds, which weights."""
    return canonical_json([e.about.get(key) for key in ("method", "seed", "model", "train", "status", "weights")])


def means(own: Evaluation) -> pd.DataFrame:
    """The means with 95% intervals over users."""
    rows = {}
    for name, values in own.per_user.items():
        known = values.dropna().to_numpy()
        if len(known):
            value, low, high = interval(known.mean(), draws([known])[:, 0])
            rows[name] = f"{value:.4f}", f"{low:.4f} – {high:.4f}", f"{len(known):,}"
    return pd.DataFrame.from_dict(rows, "index", columns=["mean", "95% interval", "users"])
