"""Figures of a training: the terms of the bound, κ, who is used, who gets the gradient, what the heads stand for."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from bachlib.show.plots.profiles import by_head
from bachlib.show.plots.style import COLOURS, GREY, INK, LIGHT, PAPER, colour, tag

Histories = dict[str, pd.DataFrame]


def steps_of(history: pd.DataFrame) -> np.ndarray:
    """Steps since the start, of each row."""
    per_epoch = history["step"].max()
    return ((history["epoch"] - 1) * per_epoch + history["step"]).to_numpy()


def elbo_terms(history: pd.DataFrame) -> go.Figure:
    """The three terms of eq. 21 and their sum over the steps."""
    figure = go.Figure()
    x = steps_of(history)
    lines = {
        "ELBO": -history["loss"], "reconstruction": history["reconstruction"],
        "prior": history["prior"], "entropy": history["entropy"],
    }  # fmt: skip
    for n, (name, y) in enumerate(lines.items()):
        width = 4 if name == "ELBO" else 2
        figure.add_scatter(x=x, y=y, name=name, line={"color": COLOURS[n], "width": width})
    gain, of_reconstruction = (lines[name].iloc[-1] - lines[name].iloc[0] for name in ("ELBO", "reconstruction"))
    text = f"The bound {'rises' if gain > 0 else 'falls'} by {abs(gain):.2g} nats"
    text += f", {of_reconstruction / gain:.0%} of it reconstruction" if 0 < of_reconstruction <= gain else ""
    figure.update_xaxes(title="steps")
    figure.update_yaxes(title="nats per example")
    return figure.update_layout(title=text)


PAPER_KAPPA = {"power-spherical": (20, 30), "von-mises-fisher": (17, 21)}  # section 5.4: where the largest κ end


def kappa_trajectories(
    history: pd.DataFrame, start: float, kernel: str = "power-spherical", names: dict[int, str] | None = None
) -> go.Figure:
    """Mean κ of each head over the steps, inside the band of all κ seen; nothing but the ELBO holds them.

    The dotted lines are the band in which the paper's largest κ end, at d = 64. `names`: head → name, of those to show.
    """
    x, kappa = steps_of(history), np.stack(history["kappa"])
    figure = go.Figure()
    figure.add_scatter(x=x, y=history["kappa_max"], mode="lines", line={"width": 0}, showlegend=False, hoverinfo="skip")
    figure.add_scatter(
        x=x, y=history["kappa_min"], mode="lines", fill="tonexty", fillcolor="rgba(118,118,118,0.18)",
        line={"width": 0}, name="smallest to largest",
    )  # fmt: skip
    for r, name in (names or dict.fromkeys(range(kappa.shape[1]), "")).items():
        figure.add_scatter(x=x, y=kappa[:, r], name=tag(r, name), line={"color": colour(r), "width": 2})
    low, high = PAPER_KAPPA[kernel]
    for y in (low, high):
        figure.add_hline(y=y, line={"color": INK, "dash": "dot", "width": 1.5})
    figure.add_annotation(
        x=1, xref="paper", y=high, text=f"the paper's largest κ: {low}–{high}", showarrow=False, yanchor="bottom",
        xanchor="right",
    )  # fmt: skip
    figure.add_hline(y=start, line={"color": GREY, "dash": "dash"})
    figure.add_annotation(
        x=1, xref="paper", y=start, text=f"1/τ = {start:.1f}", showarrow=False, yanchor="bottom", xanchor="right"
    )
    figure.update_xaxes(title="steps")
    figure.update_yaxes(title="concentration κ", rangemode="tozero")
    low, high = kappa[-1].min(), kappa[-1].max()
    title = f"From 1/τ the heads move to a mean κ of {low:.1f} to {high:.1f}; no prior holds them"
    return figure.update_layout(title=title)


def head_usage(histories: Histories, names: dict[int, str] | None = None) -> go.Figure:
    """Share of the positives each head explains (mean γ, or how often it is the argmax), over the steps.

    `names`: head → name, of those to show; the others are one grey part.
    """
    figure = make_subplots(
        1, len(histories), subplot_titles=list(histories), shared_yaxes=True, horizontal_spacing=0.03
    )
    for column, history in enumerate(histories.values(), 1):
        usage = np.stack(history["usage"])
        shown = names or dict.fromkeys(range(usage.shape[1]), "")
        for part, fill, name in by_head(usage[:, list(shown)], list(shown.values()), list(shown)):
            figure.add_scatter(
                x=steps_of(history), y=part, stackgroup="heads", name=name, legendgroup=name,
                line={"width": 0.5, "color": fill}, fillcolor=fill, showlegend=column == 1, row=1, col=column,
            )  # fmt: skip
    figure.update_xaxes(title="steps")
    figure.update_yaxes(range=[0, 1], tickformat=".0%")
    figure.update_yaxes(title="share of positives", col=1)
    ends = ", ".join(f"{history['effective_heads'].iloc[-1]:.1f}" for history in histories.values())
    text = f"Effective heads in use at the end: {ends} of {usage.shape[1]}"
    figure.update_layout(title={"text": text, "pad": {"b": 34}})
    return figure.update_layout(margin_t=90)


def collapse_race(histories: Histories, frames: int = 24) -> go.Figure:
    """Heads of each method sorted by use, step by step: a film with a slider."""
    some = min(histories.values(), key=len)  # one may have stopped early
    rows = np.unique(np.linspace(0, len(some) - 1, min(frames, len(some))).astype(int))
    k = len(some["usage"].iloc[0])
    steps = steps_of(some)

    def bars(row: int) -> list[go.Bar]:
        return [
            go.Bar(
                x=[f"{place + 1}." for place in range(k)], y=np.sort(history["usage"].iloc[row])[::-1],
                name=name, marker_color=COLOURS[n],
            )
            for n, (name, history) in enumerate(histories.items())
        ]  # fmt: skip

    figure = go.Figure(bars(rows[-1]))
    figure.frames = [go.Frame(data=bars(row), name=str(steps[row])) for row in rows]
    play = {"frame": {"duration": 250, "redraw": True}, "fromcurrent": True, "transition": {"duration": 0}}
    slider = [
        {"args": [[str(steps[row])], {"mode": "immediate", "frame": {"duration": 0, "redraw": True}}],
         "label": str(steps[row]), "method": "animate"}
        for row in rows
    ]  # fmt: skip
    figure.update_layout(
        sliders=[{"steps": slider, "active": len(rows) - 1, "currentvalue": {"prefix": "step "}, "pad": {"t": 55}}],
        updatemenus=[
            {"type": "buttons", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "top",
             "buttons": [{"label": "▶ play", "method": "animate", "args": [None, play]}]}
        ],
        title="The race: a method that leaves heads behind has a tall first bar and no last ones", height=460,
        legend={"orientation": "h", "y": 0.97, "x": 0.3}, bargap=0.25,
    )  # fmt: skip
    figure.add_hline(y=1 / k, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(title="heads, most used first")
    return figure.update_yaxes(title="share of positives", range=[0, 1], tickformat=".0%")


def gradient_heads(histories: Histories) -> go.Figure:
    """exp of the entropy of the heads' gradient shares over the steps: how many heads a method trains."""
    figure = go.Figure()
    for n, (name, history) in enumerate(histories.items()):
        share = np.stack(history["gradient"]) + 1e-12
        figure.add_scatter(
            x=steps_of(history), y=np.exp(-(share * np.log(share)).sum(1)), name=name,
            line={"color": COLOURS[n], "width": 3},
        )  # fmt: skip
    k = share.shape[1]
    figure.add_hline(y=k, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(title="steps")
    figure.update_yaxes(title="heads that get gradient", range=[0, k + 0.5])
    return figure.update_layout(title=f"How many of the {k} heads the gradient reaches, over a batch")


def heads_and_interests(
    of_heads: np.ndarray, weights: np.ndarray, names: list[str], truth: np.ndarray, title: str, known: str = "planted"
) -> go.Figure:
    """Head × interest: what each head's softmax gives to each interest, heads with their π; the truth as a last row.

    `known`: how one knows the truth; of a real log it is counted.
    """
    order = np.argsort(-weights)
    rows = [f"head {r}, π {weights[r]:.0%}" for r in order] + [f"{known} π<sub>u</sub>"]
    values = np.vstack([of_heads[order], truth])
    shown = np.argsort(-truth)
    figure = go.Figure(
        go.Heatmap(
            z=values[:, shown], x=[names[j] for j in shown], y=rows, colorscale=[[0, PAPER], [1, COLOURS[0]]],
            zmin=0, zmax=1, colorbar={"title": "share", "tickformat": ".0%"},
            text=[[f"{v:.0%}" if v > 0.1 else "" for v in row] for row in values[:, shown]], texttemplate="%{text}",
        )
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="interest, the user's first ones first", tickangle=-35)
    figure.add_hline(y=len(order) - 0.5, line={"color": GREY, "width": 2})
    return figure.update_layout(title=title, height=430)


def pi_recovered(expected: dict[str, np.ndarray], pi: np.ndarray, known: str = "planted") -> go.Figure:
    """True π_uj against what the model expects of interest j, a dot per user and interest; on the line is right."""
    figure = make_subplots(1, len(expected), subplot_titles=list(expected), shared_yaxes=True, horizontal_spacing=0.03)
    some = np.random.default_rng(0).choice(pi.size, min(1500, pi.size), replace=False)
    for column, q in enumerate(expected.values(), 1):
        figure.add_scatter(
            x=pi.ravel()[some], y=q.ravel()[some], mode="markers", row=1, col=column, showlegend=False,
            marker={"size": 4, "opacity": 0.35, "color": COLOURS[column - 1]},
        )  # fmt: skip
        figure.add_scatter(
            x=[0, 1], y=[0, 1], mode="lines", line={"color": GREY, "dash": "dash"}, showlegend=False, row=1, col=column
        )
    overlap = ", ".join(f"{name} {np.minimum(q, pi).sum(1).mean():.2f}" for name, q in expected.items())
    figure.update_xaxes(title=f"{known} π", range=[0, 1], gridcolor=LIGHT)
    figure.update_yaxes(range=[0, 1])
    figure.update_yaxes(title="expected by the model", col=1)
    figure.update_layout(title={"text": f"Overlap with the {known} π: {overlap}", "pad": {"b": 34}})
    return figure.update_layout(margin_t=90)
