"""Figures of speed: goals, peers, how cost grows, where a step's time goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from bachlib.show.plots.style import BELOW, COLOURS, GREY, INK, colour, label, side_by_side

OURS, THEIRS, MISSED = COLOURS[0], GREY, COLOURS[5]


def goal_bars(results: Sequence[Mapping[str, Any]]) -> go.Figure:
    """Each measured goal as a share of its limit, the worst on top; 1 is the limit, and what is shorter meets it."""
    rows = []
    for row in results:
        for sense, goals in ((1, row.get("goals", {})), (-1, row.get("at_least", {}))):
            for key, goal in goals.items():
                if goal:  # a goal of 0 has no share
                    share = (row[key] / goal) ** sense if row[key] else 0.0
                    about = f"{key} {row[key]:.3g}, goal {'≤' if sense > 0 else '≥'} {goal:.3g}"
                    rows.append((share, label(f"{row.get('bench', '')} · {row['name']}", 52), about))
    rows.sort(reverse=True)
    shares, names, about = zip(*rows, strict=True) if rows else ((), (), ())
    y = [f"{name} ({text.split()[0]})" for name, text in zip(names, about, strict=True)]
    colours = [MISSED if share > 1 else OURS for share in shares]
    how = {"orientation": "h", "marker_color": colours, "text": about, "textposition": "auto"}
    figure = go.Figure(go.Bar(x=shares, y=y, hovertemplate="%{text}<extra></extra>", **how))
    figure.add_vline(x=1, line={"color": INK, "dash": "dash"})
    figure.update_xaxes(title="share of the limit", rangemode="tozero").update_yaxes(autorange="reversed")
    title = f"{sum(share <= 1 for share in shares)} of {len(shares)} goals are met"
    return figure.update_layout(title=title, height=140 + 22 * len(rows), uniformtext={"minsize": 9, "mode": "hide"})


def peer_bars(rows: Sequence[Mapping[str, Any]], what: str) -> go.Figure:
    """Windows, users or requests per core-second, ours and others', the fastest on top."""
    chosen = sorted((row for row in rows if row.get("what") == what), key=lambda row: row["per_core_second"])
    figure, unit = go.Figure(), chosen[0]["unit"]
    x = [row["per_core_second"] for row in chosen]
    how = {"orientation": "h", "marker_color": [OURS if row["ours"] else THEIRS for row in chosen]}
    figure.add_bar(x=x, y=[row["name"] for row in chosen], text=[f"{value:,.0f}" for value in x], **how)
    best = {
        own: max((r for r in chosen if r["ours"] == own), key=lambda r: r["per_core_second"]) for own in (True, False)
    }
    told = [f"{row['name']}: {row['per_core_second']:,.0f} {unit}" for row in best.values()]
    figure.update_xaxes(title=f"{unit} per core-second", rangemode="tozero")
    return figure.update_layout(title=f"{told[0]},<br>{told[1]} per core-second", height=150 + 28 * len(x), margin_t=84)


def growth_curves(table: pd.DataFrame, slopes: pd.DataFrame, axis: str) -> go.Figure:
    """Seconds and memory along an axis on log–log, a line per work; the legend says the exponents.

    `table`: what, axis, value, count, cpu_s, mb. `slopes`: what, axis, "seconds at the end".
    """
    columns, how = ["CPU seconds", "memory (MB)"], {"shared_yaxes": False, "horizontal_spacing": 0.14}
    ends = slopes[slopes["axis"] == axis].set_index("what")["seconds at the end"]
    figure = side_by_side(columns, f"{ends.idxmax()} grows fastest with {axis}", axis, **how)
    for n, (what, part) in enumerate(table[table["axis"] == axis].groupby("what", sort=False)):
        each = 1 if axis == "users" else part["count"]
        line = {"line": {"color": colour(n), "width": 2.5}, "mode": "lines+markers", "legendgroup": what}
        name = f"{what} (b = {ends[what]:.2f})"
        figure.add_scatter(x=part["value"], y=part["cpu_s"] / each, name=name, **line, row=1, col=1)
        figure.add_scatter(x=part["value"], y=part["mb"].clip(lower=0.1), showlegend=False, **line, row=1, col=2)
    figure.update_xaxes(type="log", tickvals=sorted(set(table[table["axis"] == axis]["value"])), tickangle=-40)
    return figure.update_yaxes(type="log").update_layout(legend=BELOW, margin_b=130, height=440)


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
