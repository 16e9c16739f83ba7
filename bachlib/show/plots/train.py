"""Figures of the bound (its terms, its gap, the gradient) and of a training: κ, use of heads, what they stand for."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from bachlib.model import mixture
from bachlib.show.plots.heads import by_head
from bachlib.show.plots.style import COLOURS, GREY, INK, PAPER, colour, diagonal, label, side_by_side, tag

PAPER_KAPPA = {"power-spherical": (20, 30), "von-mises-fisher": (17, 21)}  # section 6.5: where the largest κ end
Histories = dict[str, pd.DataFrame]


def gamma_on_great_circle(kernel, kappa: float, d: int, pis: list[float]) -> go.Figure:
    """γ of the first of two heads, 90° apart, for an item that moves from one to the other; against the argmax."""
    angle = torch.linspace(0, torch.pi / 2, 181, dtype=torch.float64)
    t = torch.stack([angle.cos(), angle.sin()], 1)  # cosines to the two heads
    log_sigma = kernel.log_density(t, torch.full_like(t, kappa), d)
    degrees, line = np.degrees(angle.numpy()), {"color": GREY, "shape": "hv", "dash": "dot"}
    figure = go.Figure(go.Scatter(x=degrees, y=(degrees < 45) * 1.0, name="hard argmax", line=line))
    for n, pi in enumerate(pis):
        log_pi = torch.tensor([pi, 1 - pi], dtype=torch.float64).log().expand_as(t)
        gamma = mixture.responsibilities(log_pi, log_sigma).exp()[:, 0]
        figure.add_scatter(x=degrees, y=gamma.numpy(), name=f"γ with π = {pi:g}", line={"color": colour(n), "width": 3})
    figure.update_xaxes(title="angle of the item from head 1 (head 2 is at 90°)")
    figure.update_yaxes(title="responsibility of head 1")
    return figure.update_layout(title="The argmax flips, γ changes smoothly; a head with more π reaches further")


def elbo_waterfall(elbo: mixture.Elbo, likelihood: torch.Tensor) -> go.Figure:
    """From the three terms to the ELBO, and by the gap to ℓ; means over the batch."""
    gap = likelihood - elbo.total
    terms = {
        "reconstruction": elbo.reconstruction, "prior": elbo.prior, "entropy": elbo.entropy, "ELBO": elbo.total,
        "gap KL(γ‖γᶜᵒⁿ)": gap, "log-likelihood ℓ": likelihood,
    }  # fmt: skip
    y = [term.mean().item() for term in terms.values()]
    figure = go.Figure().add_waterfall(
        x=list(terms), y=y, measure=["relative"] * 3 + ["total", "relative", "total"], text=[f"{v:+.2f}" for v in y],
        increasing_marker_color=COLOURS[2], decreasing_marker_color=COLOURS[5], totals_marker_color=COLOURS[0],
    )  # fmt: skip
    title = f"The three terms add up to the ELBO, {gap.mean():.2f} nats below ℓ"
    return figure.update_layout(title=title, yaxis_title="nats per example")


def gap_against_kappa(sweep: torch.Tensor, gaps: torch.Tensor, learnt: float, start: float) -> go.Figure:
    """KL(γ‖γ^con) over κ, with the κ that gradient ascent on the ELBO found and the one BACH starts from."""
    figure = go.Figure(go.Scatter(x=sweep.numpy(), y=gaps.numpy(), mode="lines", line_color=COLOURS[0], line_width=3))
    marks = ((learnt, f" learnt κ = {learnt:.0f}", COLOURS[2], "left"), (start, f"1/τ = {start:.0f} ", GREY, "right"))
    for x, text, fill, side in marks:
        figure.add_vline(x=x, line={"color": fill, "dash": "dash"})
        figure.add_annotation(x=np.log10(x), y=0.97, yref="paper", text=text, xanchor=side, showarrow=False)
    figure.update_xaxes(type="log", title="one concentration κ for all heads")
    figure.update_yaxes(title="mean gap KL(γ‖γᶜᵒⁿ), nats", rangemode="tozero")
    best = sweep[gaps.argmin()].item()
    return figure.update_layout(title=f"The gap has its minimum at κ = {best:.0f}, and the ELBO finds it")


def gradient_shares(shares: dict[str, torch.Tensor]) -> go.Figure:
    """Share of each head in the gradient of a step, heads of a user sorted."""
    figure, names, values = go.Figure(), list(shares), torch.stack(list(shares.values()), 1).tolist()  # a row per head
    for r, x in enumerate(values):
        text = [f"{value:.0%}" if value > 0.04 else "" for value in x]
        figure.add_bar(y=names, x=x, orientation="h", name=f"head {r + 1}", marker_color=colour(r), text=text)
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="share of the gradient, heads sorted by it", tickformat=".0%", range=[0, 1])
    title = f"Of {len(values)} heads pos-multihead trains one per example, BACH as many as explain it"
    return figure.update_layout(barmode="stack", title=title, height=260, font_color=INK)


def steps_of(history: pd.DataFrame) -> np.ndarray:
    """Steps since the start, of each row."""
    return ((history["epoch"] - 1) * history["step"].max() + history["step"]).to_numpy()


def elbo_terms(history: pd.DataFrame) -> go.Figure:
    """The three terms of eq. 21 and their sum over the steps."""
    figure = go.Figure()
    lines = {"ELBO": -history["loss"]} | {name: history[name] for name in ("reconstruction", "prior", "entropy")}
    for n, (name, y) in enumerate(lines.items()):
        line = {"color": COLOURS[n], "width": 4 if name == "ELBO" else 2}
        figure.add_scatter(x=steps_of(history), y=y, name=name, line=line)
    gain, of_reconstruction = (lines[name].iloc[-1] - lines[name].iloc[0] for name in ("ELBO", "reconstruction"))
    text = f"The bound {'rises' if gain > 0 else 'falls'} by {abs(gain):.2g} nats"
    text += f", {of_reconstruction / gain:.0%} of it reconstruction" if 0 < of_reconstruction <= gain else ""
    return figure.update_layout(title=text, xaxis_title="steps", yaxis_title="nats per example")


def kappa_trajectories(
    history: pd.DataFrame, start: float, kernel: str = "power-spherical", names: dict[int, str] | None = None
) -> go.Figure:
    """Mean κ of each head over the steps, inside the band of all κ seen; nothing but the ELBO holds them.

    The dotted lines are the band in which the paper's largest κ end, at d = 64. `names`: head → name, of those to show.
    """
    x, kappa = steps_of(history), np.stack(history["kappa"])
    figure = go.Figure()
    figure.add_scatter(x=x, y=history["kappa_max"], mode="lines", line_width=0, showlegend=False, hoverinfo="skip")
    figure.add_scatter(
        x=x, y=history["kappa_min"], mode="lines", fill="tonexty", fillcolor="rgba(118,118,118,0.18)", line_width=0,
        name="smallest to largest",
    )  # fmt: skip
    for r, name in (names or dict.fromkeys(range(kappa.shape[1]), "")).items():
        figure.add_scatter(x=x, y=kappa[:, r], name=tag(r, name), line={"color": colour(r), "width": 2})
    low, high = PAPER_KAPPA[kernel]
    for y, text in ((low, ""), (high, f"the paper's largest κ: {low}–{high}")):
        figure.add_hline(y=y, line={"color": INK, "dash": "dot", "width": 1.5}, annotation_text=text)
    figure.add_hline(y=start, line={"color": GREY, "dash": "dash"}, annotation_text=f"1/τ = {start:.1f}")
    figure.update_xaxes(title="steps").update_yaxes(title="concentration κ", rangemode="tozero")
    ends = f"{kappa[-1].min():.1f} to {kappa[-1].max():.1f}"
    return figure.update_layout(title=f"From 1/τ the heads move to a mean κ of {ends} without a prior")


def head_usage(histories: Histories, names: dict[int, str] | None = None) -> go.Figure:
    """Share of the positives each head explains (mean γ, or how often it is the argmax), over the steps.

    `names`: head → name, of those to show; the others are one grey part.
    """
    ends = ", ".join(f"{history['effective_heads'].iloc[-1]:.1f}" for history in histories.values())
    k = len(next(iter(histories.values()))["usage"].iloc[0])
    figure = side_by_side(list(histories), f"Effective heads in use at the end: {ends} of {k}", "steps")
    for column, history in enumerate(histories.values(), 1):
        usage = np.stack(history["usage"])
        shown = names or dict.fromkeys(range(usage.shape[1]), "")
        for part, fill, name in by_head(usage[:, list(shown)], list(shown.values()), list(shown)):
            figure.add_scatter(
                x=steps_of(history), y=part, stackgroup="heads", name=name, legendgroup=name,
                line={"width": 0.5, "color": fill}, fillcolor=fill, showlegend=column == 1, row=1, col=column,
            )  # fmt: skip
    return figure.update_yaxes(range=[0, 1], tickformat=".0%").update_yaxes(title="share of positives", col=1)


def collapse_race(histories: Histories) -> go.Figure:
    """Heads of each method sorted by use, step by step: a film of 24 frames with a slider."""
    some = min(histories.values(), key=len)  # one may have stopped early
    rows = np.unique(np.linspace(0, len(some) - 1, min(24, len(some))).astype(int))
    k, steps = len(some["usage"].iloc[0]), {row: str(step) for row, step in enumerate(steps_of(some))}

    def bars(row: int) -> list[go.Bar]:
        x = [f"{place + 1}." for place in range(k)]
        return [
            go.Bar(x=x, y=np.sort(history["usage"].iloc[row])[::-1], name=name, marker_color=COLOURS[n])
            for n, (name, history) in enumerate(histories.items())
        ]

    figure = go.Figure(bars(rows[-1]), frames=[go.Frame(data=bars(row), name=steps[row]) for row in rows])
    play = {"frame": {"duration": 250, "redraw": True}, "fromcurrent": True, "transition": {"duration": 0}}
    jump = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}}
    slider = [{"args": [[steps[row]], jump], "label": steps[row], "method": "animate"} for row in rows]
    button = {"label": "▶ play", "method": "animate", "args": [None, play]}
    figure.add_hline(y=1 / k, line={"color": GREY, "dash": "dot"})
    return figure.update_layout(
        sliders=[{"steps": slider, "active": len(rows) - 1, "currentvalue": {"prefix": "step "}, "pad": {"t": 55}}],
        updatemenus=[{"type": "buttons", "x": 1, "xanchor": "right", "y": 1.0, "yanchor": "top", "buttons": [button]}],
        title="If heads collapse, the first bar is tall and the last ones vanish", height=460,
        legend={"orientation": "h", "y": 0.97, "x": 0.3}, bargap=0.25, xaxis_title="heads, most used first",
        yaxis={"title": "share of positives", "range": [0, 1], "tickformat": ".0%"},
    )  # fmt: skip


def gradient_heads(histories: Histories) -> go.Figure:
    """exp of the entropy of the heads' gradient shares over the steps: how many heads a method trains."""
    figure = go.Figure()
    for n, (name, history) in enumerate(histories.items()):
        share = np.stack(history["gradient"]) + 1e-12
        y = np.exp(-(share * np.log(share)).sum(1))
        figure.add_scatter(x=steps_of(history), y=y, name=name, line={"color": COLOURS[n], "width": 3})
    k = share.shape[1]
    figure.add_hline(y=k, line={"color": GREY, "dash": "dot"})
    figure.update_xaxes(title="steps").update_yaxes(title="heads that get gradient", range=[0, k + 0.5])
    return figure.update_layout(title=f"How many of the {k} heads the gradient reaches, over a batch")


def heads_and_interests(
    of_heads: np.ndarray, weights: np.ndarray, names: list[str], truth: np.ndarray, title: str, known: str = "planted"
) -> go.Figure:
    """Head × interest: what each head's softmax gives to each interest, heads with their π; the truth as a last row.

    `known`: how one knows the truth; of a real log it is counted.
    """
    order, shown = np.argsort(-weights), np.argsort(-truth)
    values = np.vstack([of_heads[order], truth])[:, shown]
    figure = go.Figure().add_heatmap(
        z=values, x=[label(names[j]) for j in shown], colorscale=[[0, PAPER], [1, COLOURS[0]]], zmin=0, zmax=1,
        y=[f"head {r}, π {weights[r]:.0%}" for r in order] + [f"{known} π<sub>u</sub>"],
        text=[[f"{v:.0%}" if v > 0.1 else "" for v in row] for row in values], texttemplate="%{text}",
        colorbar={"title": "share", "tickformat": ".0%"},
    )  # fmt: skip
    figure.update_yaxes(autorange="reversed").update_xaxes(title="interest, the user's first ones first", tickangle=-35)
    figure.add_hline(y=len(order) - 0.5, line={"color": GREY, "width": 2})
    return figure.update_layout(title=title, height=430)


def pi_recovered(expected: dict[str, np.ndarray], pi: np.ndarray, known: str = "planted") -> go.Figure:
    """True π_uj against what the model expects of interest j, a dot per user and interest; on the line is right."""
    overlap = ", ".join(f"{name} {np.minimum(q, pi).sum(1).mean():.2f}" for name, q in expected.items())
    figure = side_by_side(list(expected), f"Overlap with the {known} π: {overlap}", f"{known} π")
    some = np.random.default_rng(0).choice(pi.size, min(1000, pi.size), replace=False)
    for column, q in enumerate(expected.values(), 1):
        x, y = (values.ravel()[some].astype(np.float32) for values in (pi, q))
        marker = {"size": 4, "opacity": 0.35, "color": COLOURS[column - 1]}
        figure.add_scatter(x=x, y=y, mode="markers", row=1, col=column, showlegend=False, marker=marker)
        diagonal(figure, column)
    return figure.update_yaxes(title="expected by the model", col=1)
