"""Figures of the bound: its terms, its gap, and who gets the gradient."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import torch

from bachlib.model import mixture
from bachlib.show.plots.style import COLOURS, GREY, INK, colour


def gamma_on_great_circle(kernel, kappa: float, d: int, pis: list[float]) -> go.Figure:
    """γ of the first of two heads, 90° apart, for an item that moves from one to the other; against the argmax."""
    angle = torch.linspace(0, torch.pi / 2, 181, dtype=torch.float64)
    t = torch.stack([angle.cos(), angle.sin()], 1)  # cosines to the two heads
    log_sigma = kernel.log_density(t, torch.full_like(t, kappa), d)
    degrees = np.degrees(angle.numpy())
    figure = go.Figure()
    figure.add_scatter(
        x=degrees, y=(degrees < 45) * 1.0, name="hard argmax", line={"color": GREY, "shape": "hv", "dash": "dot"}
    )
    for n, pi in enumerate(pis):
        log_pi = torch.tensor([pi, 1 - pi], dtype=torch.float64).log().expand_as(t)
        gamma = mixture.responsibilities(log_pi, log_sigma).exp()[:, 0]
        figure.add_scatter(x=degrees, y=gamma.numpy(), name=f"γ with π = {pi:g}", line={"color": colour(n), "width": 3})
    figure.update_xaxes(title="angle of the item from head 1 (head 2 is at 90°)")
    figure.update_yaxes(title="responsibility of head 1")
    return figure.update_layout(title="The argmax flips, γ passes; a head with more π reaches further")


def elbo_waterfall(elbo: mixture.Elbo, likelihood: torch.Tensor) -> go.Figure:
    """From the three terms to the ELBO, and by the gap to ℓ; means over the batch."""
    terms = {
        "reconstruction": elbo.reconstruction.mean().item(),
        "prior": elbo.prior.mean().item(),
        "entropy": elbo.entropy.mean().item(),
        "ELBO": elbo.total.mean().item(),
        "gap KL(γ‖γᶜᵒⁿ)": (likelihood - elbo.total).mean().item(),
        "log-likelihood ℓ": likelihood.mean().item(),
    }
    measure = ["relative", "relative", "relative", "total", "relative", "total"]
    figure = go.Figure(
        go.Waterfall(
            x=list(terms), y=list(terms.values()), measure=measure, text=[f"{v:+.2f}" for v in terms.values()],
            increasing_marker_color=COLOURS[2], decreasing_marker_color=COLOURS[5], totals_marker_color=COLOURS[0],
        )
    )  # fmt: skip
    figure.update_yaxes(title="nats per example")
    gap = terms["gap KL(γ‖γᶜᵒⁿ)"]
    return figure.update_layout(title=f"The three terms add up to the ELBO, {gap:.2f} nats below ℓ")


def gap_against_kappa(sweep: torch.Tensor, gaps: torch.Tensor, learnt: float, start: float) -> go.Figure:
    """KL(γ‖γ^con) over κ, with the κ that gradient ascent on the ELBO found and the one BACH starts from."""
    figure = go.Figure(
        go.Scatter(x=sweep.numpy(), y=gaps.numpy(), mode="lines", line={"color": COLOURS[0], "width": 3})
    )
    best = sweep[gaps.argmin()].item()
    marks = ((learnt, f" learnt κ = {learnt:.0f}", COLOURS[2], "left"), (start, f"1/τ = {start:.0f} ", GREY, "right"))
    for x, text, fill, side in marks:
        figure.add_vline(x=x, line={"color": fill, "dash": "dash"})
        figure.add_annotation(x=np.log10(x), y=0.97, yref="paper", text=text, xanchor=side, showarrow=False)
    figure.update_xaxes(type="log", title="one concentration κ for all heads")
    figure.update_yaxes(title="mean gap KL(γ‖γᶜᵒⁿ), nats", rangemode="tozero")
    return figure.update_layout(title=f"The gap has its minimum at κ = {best:.0f}, and the ELBO finds it")


def gradient_shares(shares: dict[str, torch.Tensor]) -> go.Figure:
    """Share of each head in the gradient of a step, heads of a user sorted."""
    figure = go.Figure()
    k = len(next(iter(shares.values())))
    for r in range(k):
        values = [share[r].item() for share in shares.values()]
        text = [f"{value:.0%}" if value > 0.04 else "" for value in values]
        figure.add_bar(
            y=list(shares), x=values, orientation="h", name=f"head {r + 1}", marker_color=colour(r), text=text
        )
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="share of the gradient, heads sorted by it", tickformat=".0%", range=[0, 1])
    title = f"Of {k} heads pos-multihead trains one per example, BACH as many as explain it"
    return figure.update_layout(barmode="stack", title=title, height=260, font_color=INK)
