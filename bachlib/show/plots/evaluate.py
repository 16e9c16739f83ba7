"""Figures of an evaluation: where a method is better, for whom, how surely, and whether π_u can be believed."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from bachlib.rank import metrics
from bachlib.show.plots.style import COLOURS, GREY, INK, colour, diagonal, interval, side_by_side

BETTER, WORSE = COLOURS[0], COLOURS[5]


def recall_curves(ranks: dict[str, np.ndarray], up_to: int = 500) -> go.Figure:
    """Recall@K against K, from the ranks of the held-out items; K on a logarithmic axis."""
    cuts = np.unique(np.geomspace(1, up_to, 60).astype(int))
    figure = go.Figure()
    for n, (name, r) in enumerate(ranks.items()):
        y = [metrics.recall_of_ranks(r, k).mean() for k in cuts]
        figure.add_scatter(x=cuts, y=y, name=name, line={"color": colour(n), "width": 2.5})
    at = {name: metrics.recall_of_ranks(r, 50).mean() for name, r in ranks.items()}
    best = max(at, key=at.get)
    figure.update_xaxes(title="length of the list, K", type="log", dtick="D2")
    figure.update_yaxes(title="Recall@K", rangemode="tozero", tickformat=".0%")
    return figure.update_layout(title=f"At K = 50 {best} finds the most: {at[best]:.1%} of the held-out items")


def wins_and_losses(difference: pd.Series, ours: str, theirs: str, metric: str) -> go.Figure:
    """Difference per user, sorted: for how many the one is better, and by how much."""
    ordered = np.sort(difference.to_numpy())[::-1]
    share, figure = np.linspace(0, 1, len(ordered)), go.Figure()
    for part, fill, name in ((ordered > 0, BETTER, f"{ours} better"), (ordered < 0, WORSE, f"{theirs} better")):
        line = {"color": fill, "width": 1}
        figure.add_scatter(x=share[part], y=ordered[part], fill="tozeroy", mode="lines", line=line, name=name)
    mean = float(difference.mean())
    figure.add_hline(y=mean, line={"color": INK, "dash": "dash"}, annotation_text=f"mean {mean:+.4f}")
    low, high = np.quantile(ordered, [0.01, 0.99])
    figure.update_yaxes(title=f"difference in {metric}", range=[1.15 * min(low, -1e-9), 1.15 * max(high, 1e-9)])
    figure.update_xaxes(title="users, most improved first", tickformat=".0%")
    wins, losses, equal = ((np.sign(ordered) == sign).mean() for sign in (1, -1, 0))
    text = f"{ours} is better for {wins:.0%} of the users, {theirs} for {losses:.0%}, {equal:.0%} are equal"
    return figure.update_layout(title=text)


def gain_by_depth(gains: pd.DataFrame, ours: str, theirs: str) -> go.Figure:
    """Held-out items per 100 users that one method ranks in a band of the list and the other does not, with intervals.

    `gains` has the columns band, value, low, high.
    """
    significant = (gains["low"] > 0) | (gains["high"] < 0)
    figure = go.Figure().add_bar(
        x=gains["band"], y=100 * gains["value"], marker_color=np.where(gains["value"] > 0, BETTER, WORSE),
        marker_opacity=np.where(significant, 1.0, 0.45), error_y=interval(gains, "value", 100) | {"color": GREY},
    )  # fmt: skip
    figure.add_hline(y=0, line={"color": INK, "width": 1})
    figure.update_xaxes(title="rank of the held-out item", type="category")
    figure.update_yaxes(title=f"more than {theirs}, per 100 users")
    first = 100 * gains["value"].iloc[0]
    text = f"In the first places {ours} has {first:+.0f} held-out items per 100 users (pale: the interval holds 0)"
    return figure.update_layout(title=text)


def calibration_curves(curves: dict[str, pd.DataFrame], ece: dict[str, float], what: str) -> go.Figure:
    """Predicted share against the observed one, in bins; on the diagonal is calibrated. Dots grow with the count."""
    text = f"Predicted and observed shares: calibration error at most {max(ece.values()):.3f}"
    figure = side_by_side([f"{name}: {ece[name]:.3f}" for name in curves], text, f"predicted {what}")
    for column, (name, bins) in enumerate(curves.items(), 1):
        diagonal(figure, column)
        figure.add_scatter(
            x=bins["predicted"], y=bins["realised"], mode="lines+markers", name=name, showlegend=False,
            error_y={"type": "data", "array": 1.96 * bins["se"].fillna(0), "color": GREY},
            marker={"size": 5 + 15 * np.sqrt(bins["n"] / bins["n"].max()), "color": colour(column - 1)},
            line_color=colour(column - 1), customdata=bins["n"], row=1, col=column,
            hovertemplate="predicted %{x:.2f}<br>came true %{y:.2f}<br>n = %{customdata}<extra></extra>",
        )  # fmt: skip
    return figure.update_yaxes(title="came true on held-out items", col=1)


def trap_changes(changes: pd.DataFrame) -> go.Figure:
    """How far each trap moves a metric from the right value, in per cent, a bar per method; axis by doublings."""
    changes = changes.assign(ratio=changes["wrong"] / changes["right"])
    figure, traps = go.Figure(), list(changes["trap"].unique())[::-1]
    for n, (method, rows) in enumerate(changes.groupby("method", sort=False)):
        ratio = rows.set_index("trap")["ratio"].reindex(traps)
        figure.add_bar(
            y=traps, x=np.log2(ratio), name=method, orientation="h", marker_color=COLOURS[n],
            text=[f"{r - 1:+.0%}" if r < 3 else f"× {r:.0f}" for r in ratio], textposition="outside", cliponaxis=False,
        )  # fmt: skip
    ticks, doublings = [-2, -1, 0, 1, 2, 3, 4, 5], np.log2(changes["ratio"])
    figure.add_vline(x=0, line={"color": INK, "width": 1})
    figure.update_xaxes(
        title="wrong number / right number", tickvals=ticks, ticktext=[f"{2.0**t:g}×" for t in ticks],
        range=[min(-1.2, doublings.min() - 1.0), doublings.abs().max() + 0.9],
    )  # fmt: skip
    return figure.update_layout(
        title=f"The largest error: {changes.loc[changes['ratio'].idxmax(), 'trap']}", barmode="group", bargap=0.3,
        height=140 + 75 * len(traps), legend_traceorder="normal",
    )  # fmt: skip


def paper_and_ours(gains: pd.DataFrame, over: str) -> go.Figure:
    """Relative gains over a method as dots with bars: ours with intervals; the paper's (open, the source begins with
    "paper") with their bounds by rounding. Columns: metric, source, gain, low, high."""
    figure = go.Figure()
    for n, (source, rows) in enumerate(gains.groupby("source", sort=False)):
        error, paper = interval(rows, "gain", 100), source.startswith("paper")
        figure.add_scatter(
            x=rows["metric"], y=100 * rows["gain"], mode="markers", name=source, error_y=error,
            marker={"size": 12, "color": COLOURS[n], "symbol": "diamond-open" if paper else "circle"},
        )  # fmt: skip
    figure.add_hline(y=0, line={"color": INK, "width": 1})
    low = gains.loc[~gains["source"].str.startswith("paper"), "low"]
    return figure.update_layout(
        title=f"Our gain over {over} is above zero with its whole interval in {(low > 0).sum()} of {len(low)} metrics",
        yaxis_title=f"gain over {over}, %", xaxis_type="category", scattermode="group", scattergap=0.6,
    )  # fmt: skip
