"""Figures of serving: what a list of M is worth, what an adversary hides, cost and accuracy, steering, cold start."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from jaxtyping import Float, Int

from bachlib.show.plots.style import ABOVE, BELOW, COLOURS, GREY, INK, colour, label, side_by_side


def recall_and_cost(table: pd.DataFrame, exact_ms: float) -> go.Figure:
    """Two-step against the length of its lists. Columns: M, recall, proved (exact if the lists are), ms."""
    text = "No list is long enough to find 99% of the slate"
    for row in table[table["recall"] >= 0.99].head(1).itertuples():
        text = f"M = {row.M:.0f} finds {row.recall:.1%} of the slate; proving it takes longer lists"
    columns, how = ["share of …", "time of a request"], {"shared_yaxes": False, "horizontal_spacing": 0.16}
    figure = side_by_side(columns, text, "entries per list, M", **how)
    lines = {"recall": "the exact slate found", "proved": "slates the bound covers", "ms": "two-step"}
    for n, (column, name) in enumerate(lines.items()):
        line, at = {"color": COLOURS[n], "width": 2.5}, {"row": 1, "col": 2 if column == "ms" else 1}
        figure.add_scatter(x=table["M"], y=table[column], name=name, mode="lines+markers", line=line, **at)
    figure.add_hline(
        y=exact_ms, line={"color": INK, "dash": "dash"}, annotation_text=f"exact scan, {exact_ms:.2f} ms",
        annotation_position="bottom right", row=1, col=2,
    )  # fmt: skip
    figure.update_xaxes(type="log", tickvals=table["M"], tickangle=-40)
    figure.update_yaxes(tickformat=".0%", range=[-0.03, 1.05], col=1)
    figure.update_yaxes(title="milliseconds", rangemode="tozero", col=2)
    return figure.update_layout(legend=BELOW, margin_b=120)


def adversary(
    cosine: Float[np.ndarray, " n"], score: Float[np.ndarray, " n"], hidden: np.ndarray, ends: float
) -> go.Figure:
    """Each item by its cosine to the nearest head and by its score; right of `ends` is what the lists hold."""
    figure = go.Figure()
    for name, which, n in (("decoys beside a head", ~hidden, 5), ("items between the heads", hidden, 0)):
        marker = {"color": COLOURS[n], "size": 6}
        figure.add_scatter(x=cosine[which], y=score[which], mode="markers", name=name, marker=marker)
    figure.add_vline(x=ends, line={"color": INK, "dash": "dash"})
    text, left = "the lists hold what is right of this", {"xanchor": "right", "xshift": -4}
    figure.add_annotation(x=ends, text=text, **left, **ABOVE)
    figure.update_xaxes(title="cosine to the nearest head").update_yaxes(title="log m(i | u), up to a constant")
    lost = int((cosine[hidden] < ends).sum())
    text = f"{lost} of the {int(hidden.sum())} best items are in no list: between all heads, nearest to none"
    return figure.update_layout(title={"text": text, "pad": {"b": 30}}, margin_t=84)


def rows_looked_at(heads: Float[np.ndarray, " U"], share: Float[np.ndarray, " U"]) -> go.Figure:
    """How much of the catalogue the threshold algorithm met against how many heads a π_u spreads over."""
    marker = {"color": COLOURS[0], "size": 6, "opacity": 0.6}
    figure = go.Figure(go.Scatter(x=heads, y=share, mode="markers", marker=marker))
    figure.update_xaxes(title="effective heads of π_u, exp H(π_u)")
    figure.update_yaxes(title="share of the items it looked at", tickformat=".0%", rangemode="tozero")
    title = f"Half of the slates are proved after {np.median(share):.0%} of the items; flat π_u take them all"
    return figure.update_layout(title=title)


def recall_by_budget(table: pd.DataFrame, metric: str) -> go.Figure:
    """Recall against the length of a codebook's lists, a line per number of prototypes that a request looks at.

    Columns: L, heads kept, `metric`.
    """
    figure = go.Figure()
    for n, (heads, rows) in enumerate(table.groupby("heads kept")):
        line = {"color": colour(n), "width": 2.5}
        figure.add_scatter(x=rows["L"], y=rows[metric], name=f"{heads} prototypes", mode="lines+markers", line=line)
    most = table["heads kept"].max()
    rows = table[table["heads kept"] == most]
    enough = rows[rows[metric] >= 0.99 * rows[metric].max()]["L"].min()
    text = f"With all {most} prototypes lists of {enough} give 99% of their best {metric}"
    figure.update_xaxes(title="items per list L", type="log", tickvals=sorted(set(table["L"])))
    return figure.update_yaxes(title=metric, rangemode="tozero").update_layout(title=text)


def pareto(table: pd.DataFrame, metric: str) -> go.Figure:
    """Accuracy against the time of a request; the line joins what nothing else beats. Columns: name, ms, value."""
    rows = table.sort_values("ms")
    front = rows[rows["value"] >= rows["value"].cummax()]
    line, silent = {"color": GREY, "shape": "hv", "dash": "dot"}, {"showlegend": False, "hoverinfo": "skip"}
    figure = go.Figure().add_scatter(x=front["ms"], y=front["value"], mode="lines", line=line, **silent)
    for n, row in enumerate(table.itertuples()):
        marker = {"size": 13, "color": colour(n)}
        figure.add_scatter(x=[row.ms], y=[row.value], mode="markers", marker=marker, name=row.name)
    wide = table["ms"].max() > 20 * table["ms"].min()
    figure.update_xaxes(title="milliseconds per request", **({"type": "log"} if wide else {"rangemode": "tozero"}))
    best, fastest = table.loc[table["value"].idxmax()], table.loc[table["ms"].idxmin()]
    text = f"{best['name']} is the most accurate, {fastest['name']} the fastest ({fastest['ms']:.2f} ms)"
    return figure.update_layout(title=text, yaxis_title=metric)


def slate_slopes(
    before: Int[np.ndarray, " K"], after: Int[np.ndarray, " K"], heads: tuple[dict[int, int], dict[int, int]],
    titles: Mapping[int, str] | pd.Series, what: str,
) -> go.Figure:  # fmt: skip
    """Two slates side by side, joined where an item is in both; a dot has the colour of the head that brought the item.

    `heads`: item → head, before and after. Heads count from 0, as in `Steering`.
    """
    figure, ranks = go.Figure(), [{int(item): n + 1 for n, item in enumerate(slate)} for slate in (before, after)]
    for r in sorted({*heads[0].values(), *heads[1].values()}):  # the legend: a line per head, whatever the slates hold
        marker = {"size": 8, "color": colour(r)}
        figure.add_scatter(x=[None], y=[None], mode="markers", name=f"head {r}", marker=marker)
    for item in dict.fromkeys([*ranks[0], *ranks[1]]):
        x, title = [side for side in (0, 1) if item in ranks[side]], label(titles[item], 17)
        y, colours = [ranks[side][item] for side in x], [colour(heads[side][item]) for side in x]
        figure.add_scatter(
            x=x, y=y, mode="lines+markers+text", showlegend=False, textfont={"size": 11},
            text=[f"{title}  {y[0]}" if side == 0 else f"{y[-1]}  {title}" for side in x],
            textposition=["middle left" if side == 0 else "middle right" for side in x],
            line={"color": colours[-1], "width": 2}, marker={"size": 9, "color": colours},
            hovertemplate=f"{label(titles[item])}: place %{{y}}<extra></extra>",
        )  # fmt: skip
    stayed = len(ranks[0].keys() & ranks[1].keys())
    figure.update_xaxes(tickvals=[0, 1], ticktext=["before", "after"], range=[-1.1, 2.1], showgrid=False, side="top")
    figure.update_yaxes(autorange="reversed", visible=False)
    return figure.update_layout(
        title={"text": f"{what}: {stayed} of {len(before)} items stay", "pad": {"b": 34}}, width=640,
        height=160 + 26 * len(before), margin={"t": 90, "l": 10, "r": 10}, legend={"orientation": "h", "y": 0},
    )  # fmt: skip


def pi_slopes(
    before: Float[np.ndarray, " k"], after: Float[np.ndarray, " k"], names: list[str], what: str
) -> go.Figure:
    """π_u before and after steering, a line per head."""
    figure = go.Figure()
    for r, name in enumerate(names):
        how = {"line": {"color": colour(r), "width": 2.5}, "marker": {"size": 9}, "hovertemplate": "%{y:.1%}"}
        figure.add_scatter(x=[0, 1], y=[before[r], after[r]], mode="lines+markers", name=label(name), **how)
    figure.update_xaxes(tickvals=[0, 1], ticktext=["before", "after"], range=[-0.2, 1.2])
    figure.update_yaxes(title="share of the head", tickformat=".0%", rangemode="tozero")
    return figure.update_layout(title=f"{what} moves {np.abs(after - before).sum() / 2:.0%} of π<sub>u</sub>")


def cold_start_curve(
    curves: dict[str, Float[np.ndarray, " m"]], seen: Int[np.ndarray, " m"], metric: str, floor: float
) -> go.Figure:
    """Accuracy against how many items of a user are known; `floor` is what the most popular items give."""
    figure = go.Figure()
    for n, (name, values) in enumerate(curves.items()):
        line = {"color": colour(n), "width": 2.5}
        figure.add_scatter(x=seen, y=values, name=name, mode="lines+markers", line=line)
    figure.add_hline(y=floor, line={"color": GREY, "dash": "dash"}, annotation_text="most popular")
    figure.update_xaxes(title="items the model has seen of a user", type="log", tickvals=seen)
    figure.update_yaxes(title=metric, tickformat=".0%", rangemode="tozero")
    name, values = next(iter(curves.items()))
    title = f"From one item {name} reaches {values[0] / values[-1]:.0%} of what it does from {seen[-1]}"
    return figure.update_layout(title=title)


def dials(table: pd.DataFrame, metric: str) -> go.Figure:
    """Accuracy against the time of a request, a line per family of models. Columns: family, setting, ms, value.

    The first row is one end of the spectrum, the last row the other; the title compares the best between them.
    """
    figure = go.Figure()
    for n, (family, rows) in enumerate(table.groupby("family", sort=False)):
        line = {"color": colour(n), "width": 2, "dash": "dot"}
        figure.add_scatter(
            x=rows["ms"], y=rows["value"], text=rows["setting"], name=family, mode="lines+markers+text", line=line,
            marker={"size": 11}, textposition="top center", textfont={"size": 11},
        )  # fmt: skip
    low, high = table.iloc[0], table.iloc[-1]
    best = table.loc[table["value"].iloc[1:-1].idxmax()]
    text = f"{high['family']} gains nothing over {low['family']}"
    if high["value"] > low["value"]:
        share = (best["value"] - low["value"]) / (high["value"] - low["value"])
        text = f"{best['family']}, {best['setting']}: {share:.0%} of the gain from {low['family']} to {high['family']}"
    figure.update_xaxes(title="milliseconds per request", range=[0, 1.15 * table["ms"].max()])
    return figure.update_yaxes(title=metric).update_layout(title=text)
