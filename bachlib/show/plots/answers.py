"""Figures of the tables of `evaluate.answers`."""

from __future__ import annotations

import pandas as pd
import plotly.graph_objects as go

from bachlib.show.plots.style import BELOW, GREY, colour


def gradient_noise(table: pd.DataFrame) -> go.Figure:
    """The noise of a step's gradient by model, least first."""
    table = table.sort_values("noise", ascending=False)
    text = f"{table.index[-1]} has the least noisy steps: {table['noise'].iloc[-1]:.1f} times the squared mean gradient"
    figure = go.Figure(go.Bar(x=table["noise"], y=table.index, orientation="h", marker_color=colour(0)))
    figure.update_traces(text=table["noise"].map("{:.1f}".format), textposition="auto")
    return figure.update_layout(title=text, xaxis_title="variance of the gradient / squared mean gradient")


def posterior_gap(table: pd.DataFrame) -> go.Figure:
    """How far γ is from γ^con at each number of heads; a line per name that several tables share before ` k=`."""
    ends = table.sort_values("k")
    text = f"γ is {ends['KL gap'].iloc[0]:.2g} nats from γ^con with {ends['k'].iloc[0]} heads, "
    figure = go.Figure(layout_title=f"{text}{ends['KL gap'].iloc[-1]:.2g} with {ends['k'].iloc[-1]}")
    for n, (name, rows) in enumerate(ends.groupby([label.split(" k=")[0] for label in ends.index], sort=False)):
        figure.add_scatter(x=rows["k"], y=rows["KL gap"], mode="lines+markers", name=name, line_color=colour(n),
                           customdata=rows[["total variation", "same head"]],
                           hovertemplate="k = %{x}<br>%{y:.3f} nats<br>total variation %{customdata[0]:.2f}<br>"
                           "same head %{customdata[1]:.0%}<extra></extra>")  # fmt: skip
    figure.update_xaxes(title="heads k", type="log", tickvals=sorted(set(table["k"])))
    return figure.update_yaxes(title="KL(γ ‖ γ<sup>con</sup>), nats", rangemode="tozero").update_layout(legend=BELOW)


def calibration_controls(table: pd.DataFrame) -> go.Figure:
    """Calibration errors with the user's π and with another user's; the name of a row is its model."""
    own, other = "error", "error with another user's π"
    name = table["nats that π_u is worth"].idxmax()
    mine, theirs = table.loc[name, [own, other]]
    figure = go.Figure(layout_title=f"{name}: the calibration error is {mine:.3f}, with another user's π {theirs:.3f}")
    for name, shade in ((own, colour(0)), (other, GREY)):
        figure.add_bar(x=table.index.astype(str), y=table[name], name=name, marker_color=shade)
    return figure.update_layout(barmode="group", yaxis_title="calibration error", legend=BELOW)


def genre_coverage(table: pd.DataFrame) -> go.Figure:
    """Coverage of a user's later genres by the own heads and by another user's."""
    own, other = "covered", "covered by another user's heads"
    best = (table[own] - table[other]).idxmax()
    mine, theirs = table.loc[best, [own, other]]
    text = f"{best}: the own heads cover {mine:.0%} of the later genres, another user's {theirs:.0%}"
    figure = go.Figure(layout_title=text)
    for name, shade in ((own, colour(0)), (other, GREY)):
        figure.add_bar(x=table.index, y=table[name], name=name, marker_color=shade)
    figure.update_yaxes(title="Σ share of genre × best head", tickformat=".0%")
    return figure.update_layout(barmode="group", legend=BELOW)


def diversity_and_recall(table: pd.DataFrame) -> go.Figure:
    """Diversity against recall, a curve per kind of slate; a dot per strength of re-ranking, the large one without."""
    names = table["slates"].unique()
    equal = table.groupby("slates", sort=False)["at equal recall"].first().dropna()
    text = "Diversity and recall of slates"
    if len(equal) > 1:
        text = f"At equal recall {equal.idxmax()} has the most diverse slates: {equal.max():.3f}"
    figure = go.Figure(layout_title=text)
    for n, name in enumerate(names):
        rows = table[table["slates"] == name]
        sizes = [13, *[7] * (len(rows) - 1)]
        figure.add_scatter(
            x=rows["recall"], y=rows["diversity"], mode="lines+markers", name=name, text=rows["strength"],
            marker={"size": sizes, "color": colour(n)}, line_color=colour(n),
            hovertemplate="strength %{text}<br>recall %{x:.3f}<br>diversity %{y:.3f}",
        )  # fmt: skip
    return figure.update_layout(xaxis_title="recall", yaxis_title="diversity", legend=BELOW)


def shuffle_test(table: pd.DataFrame) -> go.Figure:
    """The change in accuracy if histories are shuffled, by model."""
    own, metric = table[table["shuffled"] == "order"].set_index("model"), table.columns[3]
    most = own["gain"].idxmin()
    text = f"{most} notices the order most: {own.loc[most, 'gain']:+.1%} in {metric} if histories are shuffled"
    figure = go.Figure(layout_title=text if own.loc[most, "high"] < 0 else "Shuffled histories cost no model accuracy")
    for kind, name, shade in (("order", "the same items, shuffled", colour(0)), ("past", "any of the past", GREY)):
        rows = table[table["shuffled"] == kind]
        bars = {"type": "data", "symmetric": False, "array": rows["high"] - rows["gain"],
                "arrayminus": rows["gain"] - rows["low"]}  # fmt: skip
        figure.add_bar(x=rows["model"], y=rows["gain"], name=name, marker_color=shade, error_y=bars)
    figure.update_yaxes(title=f"change in {metric}", tickformat=".0%")
    return figure.update_layout(barmode="group", legend=BELOW)
