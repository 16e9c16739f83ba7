"""Figures of sweeps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from bachlib.show.plots.style import BELOW, COLOURS, LIGHT, PALE, colour, interval, label


def by_axis(
    numbers: pd.DataFrame, axis: str, metric: str, baseline: str | None = None, printed: pd.DataFrame | None = None
) -> go.Figure:
    """A metric against the values of a sweep's axis, a line per method with intervals; the paper's as open diamonds.

    `numbers` are those of `tables.matched`; `printed` has the columns method, k, metric, paper, for the axis k.
    """
    rows = numbers[numbers["metric"] == metric]
    values, methods = list(rows["at"].unique()), list(rows["method"].unique())
    place = {value: n for n, value in enumerate(values)}
    figure = go.Figure()
    for n, method in enumerate(methods):
        of = rows[rows["method"] == method]
        aside = 0.05 * (n - (len(methods) - 1) / 2)  # so that intervals stand beside each other
        figure.add_scatter(
            x=of["at"].map(place) + aside, y=of["mean"], name=label(method), mode="lines+markers", marker_size=9,
            line={"color": colour(n), "width": 2.5, "dash": "dot" if of["shared"].all() else "solid"},
            error_y=interval(of, "mean") | {"color": colour(n), "thickness": 1.2},
        )  # fmt: skip
        if printed is not None:
            told = printed[(printed["method"] == method) & (printed["metric"] == metric) & printed["k"].isin(values)]
            if len(told):
                figure.add_scatter(
                    x=told["k"].map(place) + aside, y=told["paper"], name=f"{label(method)}, paper", mode="markers",
                    marker={"size": 13, "symbol": "diamond-open", "color": colour(n), "line": {"width": 2}},
                )  # fmt: skip
    ticks = {"tickvals": list(place.values()), "ticktext": [label(v) for v in values]}
    figure.update_xaxes(title=axis, range=[-0.4, len(values) - 0.6], **ticks)
    figure.update_yaxes(title=f"{metric}, with its interval")
    title = {"text": _highest(rows, axis, metric, baseline), "pad": {"b": 36}}  # its second line goes down
    return figure.update_layout(title=title, margin_t=84, height=440)


def _highest(rows: pd.DataFrame, axis: str, metric: str, baseline: str | None) -> str:
    """Which method is highest where, and how many gains are significant."""
    first = rows.pivot(index="at", columns="method", values="mean").idxmax(axis=1)
    if first.nunique() == 1:
        where = f" at every {axis}" if len(first) > 1 else f" at {axis} = {first.index[0]}"
        who = f"{first.iloc[0]}{'' if rows['shared'].all() else where}"
    elif len(first) <= 3:
        who = ", ".join(f"{m} at {axis} = {at}" for at, m in first.items())
    else:
        counts = ", ".join(f"{m} at {n}" for m, n in first.value_counts(sort=False).items())
        who = f"{counts} of {len(first)} values of {axis}"
    text, gains = label(f"{metric} is highest for {who}", 100), rows[rows["method"] != baseline].dropna(subset="gain")
    if len(gains):
        text += f"<br>{int(gains['sure'].sum())} of {len(gains)} gains over {label(baseline)} are significant"
    return text


def kappa_bounds(bounds: pd.DataFrame) -> go.Figure:
    """Each method's κ from the smallest to the largest, the largest of its runs dark; behind it the paper's range.

    `bounds` are those of `paper.kappa_bounds`.
    """
    several = bounds["data"].nunique() > 1
    names = [label(f"{row.method}, {row.data}" if several else row.method) for row in bounds.itertuples()]
    figure = go.Figure()
    for name, low, high, fill, width in (
        ("the paper's largest κ, at d = 64", bounds["paper_low"], bounds["paper_high"], LIGHT, 0.8),
        ("smallest to largest κ", bounds["smallest"], bounds["high"], PALE, 0.4),
        ("largest κ of the runs", bounds["low"], bounds["high"], COLOURS[0], 0.4),
    ):
        length = (high - low).clip(lower=0.15)  # one run is a line
        figure.add_bar(
            y=names, base=low, x=length, orientation="h", name=name, width=width,
            marker={"color": fill, "line": {"width": 0}}, customdata=np.stack([low, high], 1),
            hovertemplate="%{customdata[0]:.1f} to %{customdata[1]:.1f}<extra>" + name + "</extra>",
        )  # fmt: skip
    told = [
        f"{name} {_range(row.low, row.high)}"
        + ("" if np.isnan(row.paper_low) else f" (paper {_range(row.paper_low, row.paper_high)})")
        for name, row in zip(names, bounds.itertuples(), strict=True)
    ]
    figure.update_xaxes(title="concentration κ", rangemode="tozero").update_yaxes(autorange="reversed", showgrid=False)
    rest = f" and {len(told) - 3} more" if len(told) > 3 else ""  # a title has one line
    return figure.update_layout(
        title=f"Largest κ of a run: {', '.join(told[:3])}{rest}", barmode="overlay", height=210 + 60 * len(bounds),
        margin_b=100, legend=BELOW,
    )  # fmt: skip


def _range(low: float, high: float) -> str:
    return "–".join(dict.fromkeys([f"{low:.0f}", f"{high:.0f}"]))


def parallel_coordinates(table: pd.DataFrame, colour_by: str, keys: Sequence[str]) -> go.Figure:
    """A line per run through its place in the grid (`keys`) and its numbers (the other columns), coloured by one.

    A key with one value and a column with gaps are left out. Inside a category lines are spread by `colour_by`.
    """
    words = {key: table[key].astype(str) for key in keys if not pd.api.types.is_numeric_dtype(table[key])}
    table = table.assign(**words)
    table = table.drop(columns=[key for key in keys if table[key].nunique(dropna=False) == 1])
    keys = [key for key in keys if key in table]
    order = table[colour_by].rank(method="first")
    axes = [_categories(table[key], order) for key in keys]
    axes += [
        {"label": label(name, 16), "values": table[name], "tickformat": ".3~g"}
        for name in table if name not in keys and table[name].notna().all()
    ]  # fmt: skip
    figure = go.Figure().add_parcoords(
        dimensions=axes, labelfont={"size": 14}, tickfont={"size": 12},
        line={"color": table[colour_by], "colorscale": [[0, COLOURS[1]], [0.5, COLOURS[3]], [1, COLOURS[0]]],
              "showscale": True, "colorbar": {"title": colour_by, "thickness": 14, "tickformat": ".3~g"}},
    )  # fmt: skip
    title = {"text": _strongest(table, colour_by, keys), "pad": {"b": 80}}
    return figure.update_layout(title=title, margin={"t": 144, "l": 130}, height=470)


def _categories(values: pd.Series, order: pd.Series) -> dict[str, Any]:
    """An axis with a place per value, in the order of numbers or of first appearance."""
    known = sorted(values.unique()) if pd.api.types.is_numeric_dtype(values) else list(values.unique())
    place = values.map({value: n for n, value in enumerate(known)}).astype(float)
    within = order.groupby(place).rank() / (order.groupby(place).transform("size") + 1) - 0.5  # −½ … ½
    return {
        "label": label(values.name, 16), "values": place + 0.5 * within, "range": [-0.4, len(known) - 0.6],
        "tickvals": list(range(len(known))), "ticktext": [label(v, 18) for v in known],
    }  # fmt: skip


def _strongest(table: pd.DataFrame, metric: str, keys: Sequence[str]) -> str:
    """Which key the metric depends on most: by how far the means of its values lie apart."""
    means = {key: table.groupby(key, sort=False)[metric].mean() for key in keys}
    if not means:
        return f"{metric} of {len(table)} run{'s' if len(table) > 1 else ''}"
    apart = {key: of.max() - of.min() for key, of in means.items()}
    most = max(apart, key=apart.get)
    of = means[most]
    least = f", least on {label(min(apart, key=apart.get))}" if len(apart) > 1 else ""
    between = f"from {of.min():.3g} ({label(of.idxmin())}) to {of.max():.3g} ({label(of.idxmax())}) on average"
    return f"{metric} depends most on {label(most)}{least}<br>{between}"
