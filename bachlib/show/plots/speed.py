"""Figures of speed: goals, peers, how cost grows, where a step's time goes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from bachlib.show.plots.style import BELOW, COLOURS, GREY, INK, colour, label, side_by_side

OURS, THEIRS, MISSED = COLOURS[0], GREY, COLOURS[5]


def goal_bars(results: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Each measured goal as a share of its limit, the worst on top; 1 is the limit, and what is shorter meets it."""
    rows, met = [], []
    for row in results:
        for sense, goals in ((1, row.get("goals", {})), (-1, row.get("at_least", {}))):
            for key, goal in goals.items():
                met.append(sense * row[key] <= sense * goal)
                if goal and row[key]:  # 0 has no share
                    about = f"{row[key]:.3g}, goal {'≤' if sense > 0 else '≥'} {goal:.3g}"
                    name = label(f"{row.get('bench', '')} · {row['name']}", 52)
                    rows.append(((row[key] / goal) ** sense, f"{name} ({key})", about))
    rows.sort(reverse=True)
    shares, names, about = zip(*rows, strict=True) if rows else ((), (), ())
    colours = [MISSED if share > 1 else OURS for share in shares]
    how = {"orientation": "h", "marker_color": colours, "text": about, "textposition": "auto"}
    figure = go.Figure(go.Bar(x=shares, y=names, hovertemplate="%{text}<extra></extra>", **how))
    figure.add_vline(x=1, line={"color": INK, "dash": "dash"})
    figure.update_xaxes(title="share of the limit", type="log", dtick=1).update_yaxes(autorange="reversed")
    return figure.update_layout(title=f"{sum(met)} of {len(met)} goals are met", height=150 + 24 * len(rows))


def peer_bars(rows: Sequence[Mapping[str, Any]], what: str) -> go.Figure:
    """Windows, users or requests per core-second, ours and others', the fastest on top."""
    chosen = sorted((row for row in rows if row.get("what") == what), key=lambda row: row["per_core_second"])
    figure, unit = go.Figure(), chosen[0]["unit"]
    x = [row["per_core_second"] for row in chosen]
    how = {"orientation": "h", "marker_color": [OURS if row["ours"] else THEIRS for row in chosen]}
    figure.add_bar(x=x, y=[row["name"] for row in chosen], text=[f"{value:,.0f}" for value in x], **how)
    ours, theirs = ([row for row in chosen if row["ours"] == own][-1:] for own in (True, False))
    told = " · ".join(f"{row['name']}: {row['per_core_second']:,.0f}" for row in ours + theirs)
    figure.update_xaxes(title=f"{unit} per core-second", rangemode="tozero")
    return figure.update_layout(title=told, height=150 + 28 * len(x))


def growth_curves(table: pd.DataFrame, slopes: pd.DataFrame, axis: str) -> go.Figure:
    """Milliseconds (per window, user, request or call; of all users along that axis) and the memory of a call.

    A line per work on log–log axes; the legend says the exponents.

    `table`: what, axis, value, count, cpu_s, mb. `slopes`: what, axis, "seconds at the end".
    """
    rows, how = table[table["axis"] == axis], {"shared_yaxes": False, "horizontal_spacing": 0.14}
    ends = slopes[slopes["axis"] == axis].set_index("what")["seconds at the end"]
    figure = side_by_side(["CPU ms", "MB"], f"{ends.idxmax()} grows fastest with {axis}", axis, **how)
    rows = rows.assign(
        ms=1000 * rows["cpu_s"] / (1 if axis == "users" else rows["count"]), mb=rows["mb"].clip(lower=0.1)
    )
    for n, (what, part) in enumerate(rows.groupby("what", sort=False)):
        line = {"line": {"color": colour(n), "width": 2.5}, "mode": "lines+markers", "legendgroup": what}
        name = f"{what} (b = {ends[what]:.2f})"
        figure.add_scatter(x=part["value"], y=part["ms"], name=name, **line, row=1, col=1)
        figure.add_scatter(x=part["value"], y=part["mb"], showlegend=False, **line, row=1, col=2)
    figure.update_xaxes(type="log", tickvals=sorted(set(rows["value"])), tickangle=-40)
    for col, y in ((1, rows["ms"]), (2, rows["mb"].dropna())):
        ticks = _ticks(y.min(), y.max())
        figure.update_yaxes(type="log", tickvals=ticks, ticktext=[f"{tick:g}" for tick in ticks], col=col)
    return figure.update_layout(legend=BELOW, margin_b=130, height=440)


def _ticks(low: float, high: float) -> list[float]:
    """Powers of ten between two numbers; the nearer these are to each other, the more multiples of them."""
    steps = (1,) if high > 100 * low else (1, 2, 5) if high > 5 * low else (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8)
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    return [step * 10.0**power for power in powers for step in steps]


def amounts(values: Mapping[str, float], title: str, axis: str) -> go.Figure:
    """Named numbers, the largest on top."""
    names, x = zip(*sorted(values.items(), key=lambda one: one[1]), strict=True) if values else ((), ())
    text = [f"{value:,.0f}" if value >= 100 else f"{value:.2g}" for value in x]
    figure = go.Figure(go.Bar(x=x, y=names, orientation="h", text=text, marker_color=OURS))
    figure.update_xaxes(title=axis, rangemode="tozero")
    return figure.update_layout(title=title, height=150 + 28 * len(x))


def parts_of_a_step(parts: Mapping[str, float], of: str = "a step") -> go.Figure:
    """Where the time goes: CPU milliseconds of each part."""
    longest = max(parts, key=parts.__getitem__)
    return amounts(parts, f"{longest}: {parts[longest] / sum(parts.values()):.0%} of {of}", "CPU milliseconds")
