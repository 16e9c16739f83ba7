"""Figures of the claims ledger: verdicts, effects with their intervals, learning curves, where a mixture pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from bachlib.evaluate.statistics import Interval
from bachlib.evaluate.traits import SESSIONS, SPREAD
from bachlib.evaluate.verdicts import CONFIRMED, DENIED, NOTHING, OPEN, Effect
from bachlib.evaluate.worlds import Plane
from bachlib.show.plots.style import BELOW, COLOURS, GREY, INK, LIGHT, colour, label, wrapped

OF_VERDICT = {CONFIRMED: COLOURS[2], DENIED: COLOURS[5], OPEN: COLOURS[1], NOTHING: GREY}


def verdicts(table: pd.DataFrame) -> go.Figure:
    """Claims × settings, a square per verdict; `table` is that of `claims.verdict_table`."""
    figure = go.Figure()
    for name, fill in OF_VERDICT.items():
        rows, columns = np.nonzero((table == name).to_numpy())
        figure.add_scatter(
            x=columns, y=rows, mode="markers", name=name, hoverinfo="name",
            marker={"size": 22, "color": fill, "symbol": "circle-open" if name == NOTHING else "square"},
        )  # fmt: skip
    figure.update_xaxes(
        tickvals=[*range(len(table.columns))], ticktext=[wrapped(label(c, 60), 14) for c in table.columns],
        side="top", tickangle=0, range=[-0.5, len(table.columns) - 0.5], showgrid=False,
    )  # fmt: skip
    names = [label(c, 64) for c in table.index]
    figure.update_yaxes(tickvals=[*range(len(table))], ticktext=names, showgrid=False, range=[len(table) - 0.5, -0.5])
    first = table.iloc[:, 0] if len(table.columns) else pd.Series(dtype=object)
    told = ", ".join(f"{(first == name).sum()} {name}" for name in OF_VERDICT if (first == name).any())
    title = {"text": f"{first.name}: {told or 'no claims'}", "pad": {"b": 70}}
    return figure.update_layout(title=title, height=620, margin_t=150, margin_b=80, legend=BELOW)


def effects(of: Sequence[Effect], title: str) -> go.Figure:
    """Each effect with its interval, its verdict as colour; open diamonds are the paper's, dashes the claim's range.

    Relative gains and plain numbers have their own axis. Effects without a record are left out and counted.
    """
    there = [e for e in of if np.isfinite(e.found.value)]
    kinds = [kind for kind in (True, False) if any(e.percent == kind for e in there)] or [True]
    sizes = [max(1, sum(e.percent == kind for e in there)) for kind in kinds]
    figure = make_subplots(len(kinds), 1, row_heights=sizes, vertical_spacing=0.3 / (1 + sum(sizes)))
    shown: set[str] = set()
    for row, kind in enumerate(kinds, 1):
        scale, rows = (100 if kind else 1), [e for e in there if e.percent == kind]
        for e in rows:
            told = [e.found.value, *(x if np.isfinite(x) else e.found.value for x in e.found[1:])]
            value, low, high = (scale * x for x in told)
            figure.add_scatter(
                x=[value], y=[_named(e)], mode="markers", marker={"size": 11, "color": OF_VERDICT[e.verdict]},
                error_x={"type": "data", "symmetric": False, "array": [high - value], "arrayminus": [value - low]},
                name=e.verdict, legendgroup=e.verdict, showlegend=e.verdict not in shown, row=row, col=1,
            )  # fmt: skip
            shown.add(e.verdict)
            if np.isfinite(e.paper[0]):
                figure.add_scatter(
                    x=[scale * sum(e.paper) / 2], y=[_named(e)], mode="markers", name="the paper", legendgroup="paper",
                    marker={"size": 11, "symbol": "diamond-open", "color": INK}, showlegend="paper" not in shown,
                    error_x={"type": "data", "array": [scale * (e.paper[1] - e.paper[0]) / 2], "color": GREY},
                    row=row, col=1,
                )  # fmt: skip
                shown.add("paper")
        for border in {x for e in rows for x in e.claimed if np.isfinite(x)}:
            figure.add_vline(x=scale * border, line={"color": INK, "width": 1, "dash": "dash"}, row=row, col=1)
        figure.update_yaxes(autorange="reversed", showgrid=False, row=row, col=1)
        figure.update_xaxes(title="%" if kind else "", row=row, col=1)
    missing = len(of) - len(there)
    text = label(title, 90) + (f"<br>{missing} of {len(of)} effects have no records yet" if missing else "")
    return figure.update_layout(title={"text": text, "pad": {"b": 20}}, height=220 + 26 * len(there), margin_t=90,
                                margin_b=90, legend=BELOW)  # fmt: skip


def _named(e: Effect) -> str:
    return label(e.what, 70)


def gains(table: pd.DataFrame, title: str) -> go.Figure:
    """Gains with their intervals, one per row; columns: name, gain, low, high."""
    sure = (table["low"] > 0) | (table["high"] < 0)
    fill = np.where(~sure, GREY, np.where(table["gain"] > 0, COLOURS[2], COLOURS[5]))
    figure = go.Figure().add_scatter(
        x=100 * table["gain"], y=[label(name, 70) for name in table["name"]], mode="markers",
        marker={"size": 11, "color": fill},
        error_x={"type": "data", "symmetric": False, "array": 100 * (table["high"] - table["gain"]),
                 "arrayminus": 100 * (table["gain"] - table["low"]), "color": GREY},
    )  # fmt: skip
    figure.add_vline(x=0, line={"color": INK, "width": 1})
    figure.update_yaxes(autorange="reversed", showgrid=False).update_xaxes(title="gain in AUPRC, %")
    text = f"{label(title, 70)}: {int(sure.sum())} of {len(table)} intervals exclude 0"
    return figure.update_layout(title=text, height=160 + 26 * len(table))


def learning(curves: pd.DataFrame, title: str) -> go.Figure:
    """Validation AUPRC against epochs and against CPU seconds, a line per method, the mean of its trainings."""
    figure = make_subplots(1, 2, shared_yaxes=True, horizontal_spacing=0.04)
    methods = [*dict.fromkeys(curves["method"])]
    for (setting, method), of in curves.groupby(["setting", "method"], sort=False):
        n_seeds = of["seed"].nunique()  # the mean at each look that all of its trainings reached
        looks = of.groupby("epoch").filter(lambda at, n=n_seeds: len(at) == n).groupby("epoch")
        mean = looks[["valid_auprc", "cpu_s"]].agg(lambda x: x.mean(skipna=False)).reset_index()
        line = {"color": colour(methods.index(method)), "width": 2.5, "dash": "solid" if "all t" in setting else "dot"}
        name = f"{method}, {'all targets' if 'all t' in setting else 'one target'}"
        for column, x in ((1, "epoch"), (2, "cpu_s")):
            figure.add_scatter(x=mean[x], y=mean["valid_auprc"], mode="lines", line=line, name=name, legendgroup=name,
                               showlegend=column == 1, row=1, col=column)  # fmt: skip
    figure.update_xaxes(title="epoch", col=1).update_xaxes(title="CPU seconds", col=2)
    figure.update_yaxes(title="validation AUPRC", col=1)
    return figure.update_layout(title=label(title, 90), height=460)


def mixture_map(
    worlds: pd.DataFrame, plane: Plane, logs: Mapping[str, tuple[float, float, Interval | None]]
) -> go.Figure:
    """Worlds by their traits, coloured by the gain of weighted heads over one vector, with the fitted boundary and its
    interval; squares are logs: name → spread, likeness and their measured gain, if there is one.

    `worlds` is that of `worlds.by_world`. A pale rim: the interval of the gain holds 0.
    """
    sure = (worlds["low"] > 0) | (worlds["high"] < 0)
    y = np.linspace(min(0.0, worlds[SESSIONS].min()), 1.05 * worlds[SESSIONS].max(), 60)
    value, low, high = plane.boundary(y)
    x0, x1 = worlds[SPREAD].min() - 0.08, max([worlds[SPREAD].max(), *(s for s, *_ in logs.values())]) + 0.08
    figure = go.Figure()
    for of, dash in ((low, "dot"), (high, "dot"), (value, "solid")):
        inside = (of > x0) & (of < x1)
        name = "boundary" if dash == "solid" else "its interval"
        figure.add_scatter(x=of[inside], y=y[inside], mode="lines", line={"color": INK, "dash": dash, "width": 1.5},
                           name=name, legendgroup=name, showlegend=of is not low)  # fmt: skip
    reach = float(100 * worlds["gain"].abs().max())
    hover = [
        f"{row.interests_per_user:g} interests, width {row.world_width:g}, stickiness {row.stickiness:g}, d = {row.d}, "
        f"{row.n_users} users<br>gain {100 * row.gain:+.1f}% [{100 * row.low:+.1f}, {100 * row.high:+.1f}]"
        for row in worlds.itertuples()
    ]
    figure.add_scatter(
        x=worlds[SPREAD], y=worlds[SESSIONS], mode="markers", name="planted worlds", text=hover,
        hovertemplate="%{text}<extra></extra>", showlegend=False,
        marker={"size": 16, "color": 100 * worlds["gain"], "cmin": -reach, "cmax": reach,
                "colorscale": [[0, COLOURS[5]], [0.5, LIGHT], [1, COLOURS[0]]],
                "colorbar": {"title": "gain, %", "thickness": 14},
                "line": {"color": np.where(sure, INK, LIGHT), "width": 1.5}},
    )  # fmt: skip
    for name, (spread, likeness, gain) in logs.items():
        told = "" if gain is None else f" {gain.value:+.1%} [{100 * gain.low:+.1f}, {100 * gain.high:+.1f}]"
        figure.add_scatter(
            x=[spread], y=[likeness], mode="markers+text", text=[label(f"{name}{told}", 60)], textposition="top center",
            marker={"size": 15, "symbol": "square", "color": COLOURS[1], "line": {"color": INK, "width": 2}},
            showlegend=False, hoverinfo="text",
        )  # fmt: skip
    figure.update_xaxes(title=SPREAD, range=[x0, x1]).update_yaxes(title=SESSIONS)
    better = int((worlds["low"] > 0).sum())
    text = f"Weighted heads beat one vector surely in {better} of {len(worlds)} worlds"
    return figure.update_layout(title=text, height=520, margin_b=90, legend=BELOW)


def plane_of_worlds(worlds: pd.DataFrame, across: str = "interests_per_user", down: str = "stickiness") -> go.Figure:
    """The gain over one vector where two parameters of the world vary and the rest is as usual."""
    wide = worlds.pivot_table(index=down, columns=across, values="gain", sort=True) * 100
    low, high = (worlds.pivot_table(index=down, columns=across, values=name) for name in ("low", "high"))
    text = wide.map(lambda x: f"{x:+.1f}%") + np.where((low > 0) | (high < 0), "", " ·")
    reach = float(np.nanmax(np.abs(wide)))
    figure = go.Figure().add_heatmap(
        x=[f"{x:g}" for x in wide.columns], y=[f"{y:g}" for y in wide.index], z=wide, text=text, texttemplate="%{text}",
        zmin=-reach, zmax=reach, colorscale=[[0, COLOURS[5]], [0.5, LIGHT], [1, COLOURS[0]]], showscale=False,
    )  # fmt: skip
    figure.update_xaxes(title=across.replace("_", " "), type="category").update_yaxes(title=down, type="category")
    best = wide.stack()
    at = dict(zip((down, across), best.idxmax(), strict=True))
    where = ", ".join(f"{name.replace('_', ' ')} {value:g}" for name, value in at.items())
    title = f"The largest gain, {best.max():+.1f}%: {where} (·: the interval holds 0)"
    return figure.update_layout(title=title, height=380)
