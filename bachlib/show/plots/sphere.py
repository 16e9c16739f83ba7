"""Figures of the sphere: densities, samples, heads and a user's tastes."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from plotly.subplots import make_subplots

from bachlib.model import mixture
from bachlib.show.plots.style import BALL, COLOURS, GREY, INK, colour

DASHES = {"power-spherical": "solid", "von-mises-fisher": "dash"}
SCENE = {axis: {"visible": False} for axis in ("xaxis", "yaxis", "zaxis")} | {"aspectmode": "data"}
MARGIN = {"l": 10, "r": 10, "t": 60, "b": 0}


def kernels_against_cosine(kernels: dict, d: int, kappas: list[float]) -> go.Figure:
    """log density over the cosine, a colour per κ, a dash per kernel."""
    t = torch.linspace(-0.98, 1, 300, dtype=torch.float64)
    figure = go.Figure()
    for n, kappa in enumerate(kappas):
        for name, kernel in kernels.items():
            log_p = kernel.log_density(t, torch.full_like(t, kappa), d)
            line = {"color": colour(n), "dash": DASHES[name]}
            figure.add_scatter(x=t.numpy(), y=log_p.numpy(), name=f"κ = {kappa}, {name}", line=line)
    figure.update_xaxes(title="cosine t to the head").update_yaxes(title="log density", range=[-12, 3])
    return figure.update_layout(title=f"Both fall with the angle; vMF falls faster at the same κ (d = {d})")


def log_normalizers(kernels: dict, dimensions: list[int]) -> go.Figure:
    """Left log C_d(κ) over κ; right the height of the density at its head above the uniform one; a colour per d."""
    figure = make_subplots(1, 2, horizontal_spacing=0.12)
    kappa = torch.logspace(-2, 4, 200, dtype=torch.float64)
    near = kappa <= 100
    for n, d in enumerate(dimensions):
        for name, kernel in kernels.items():
            value = kernel.log_normalizer(kappa, d)
            uniform = kernel.log_normalizer(torch.zeros_like(kappa[:1]), d)
            at_head = value - uniform + kappa * (math.log(2) if name == "power-spherical" else 1.0)
            line = {"color": colour(n), "dash": DASHES[name]}
            label = {"name": f"d = {d}, {name}", "legendgroup": f"{d} {name}", "line": line}
            figure.add_scatter(x=kappa[near].numpy(), y=value[near].numpy(), showlegend=False, row=1, col=1, **label)
            figure.add_scatter(x=kappa.numpy(), y=at_head.clamp(min=1e-3).numpy(), row=1, col=2, **label)
    figure.update_xaxes(title="concentration κ").update_yaxes(title="log C_d(κ)", col=1).update_xaxes(type="log", col=2)
    figure.update_yaxes(type="log", title="log of peak over uniform", col=2)
    return figure.update_layout(title="The more dimensions, the larger the κ that stands out from uniform", width=1000)


def cosine_of_samples(kernels: dict, d: int, kappas: list[float]) -> go.Figure:
    """Density of the cosine between a sample and its head: the kernel times the area at that cosine."""
    figure = go.Figure()
    for n, kappa in enumerate(kappas):
        for name, kernel in kernels.items():
            line = {"color": colour(n) if kappa else GREY, "dash": DASHES[name]}
            _add_cosines(figure, kernel, kappa, d, name=f"κ = {kappa:g}, {name}", line=line)
    return figure.update_layout(title=f"In {d} dimensions a density with κ = {kappas[1]:g} is close to uniform")


def kernels_matched(ps, kappa_ps: float, vmf, kappa_vmf: float, d: int) -> go.Figure:
    """The density of the cosine under both kernels, with κ chosen for the same mean."""
    figure = go.Figure()
    for kernel, kappa, fill in ((ps, kappa_ps, COLOURS[0]), (vmf, kappa_vmf, COLOURS[5])):
        line = {"color": fill, "dash": DASHES[kernel.name], "width": 3}
        _add_cosines(figure, kernel, kappa, d, -0.2, name=f"{kernel.name}, κ = {kappa:.0f}", line=line)
    return figure.update_layout(title="With the same mean cosine the two kernels are nearly the same")


def _add_cosines(figure: go.Figure, kernel, kappa: float, d: int, start: float = -0.999, **how: Any) -> None:
    t = torch.linspace(start, 0.999, 800, dtype=torch.float64)
    log_area = math.log(2) + (d - 1) / 2 * math.log(math.pi) - math.lgamma((d - 1) / 2)
    log_p = kernel.log_density(t, torch.full_like(t, kappa), d) + log_area + (d - 3) / 2 * torch.log1p(-t * t)
    figure.add_scatter(x=t.numpy(), y=log_p.exp().numpy(), **how)
    figure.update_xaxes(title="cosine between a sample and its head").update_yaxes(title="density")


def ball_grid(n: int) -> np.ndarray:
    """Points of the unit sphere as a surface: x, y and z, each (n/2, n)."""
    longitude, latitude = np.meshgrid(np.linspace(0, 2 * np.pi, n), np.linspace(0, np.pi, n // 2))
    return np.stack([np.cos(longitude) * np.sin(latitude), np.sin(longitude) * np.sin(latitude), np.cos(latitude)])


def mixture_on_sphere(
    heads: torch.Tensor, pi: list[float], kappas: list[float], kernel, seed: int = 0,
    positive: torch.Tensor | None = None, negatives: torch.Tensor | None = None,
) -> go.Figure:  # fmt: skip
    """Three-dimensional heads with their mixture density Σ_r π_r σ_r as colour and samples as dots.

    With a positive (3,) and negatives (R, 3): what a training step sees instead of samples, and in the title γ, which
    looks at the positive only.
    """
    figure, grid = go.Figure(), ball_grid(60)
    points = torch.nn.functional.normalize(torch.tensor(np.stack(grid, -1).reshape(-1, 3)), dim=-1)
    log_pi, kappa = torch.tensor([pi], dtype=torch.float64).log(), torch.tensor([kappas], dtype=torch.float64)
    density = mixture.log_density(heads[None].double(), points, log_pi, kappa, kernel).exp()
    figure.add_surface(
        **dict(zip("xyz", grid, strict=True)), surfacecolor=density.reshape(grid[0].shape).numpy(),
        colorscale=[[0, BALL], [1, COLOURS[0]]], showscale=False, hoverinfo="skip",
    )  # fmt: skip
    dots, said = negatives, "negatives"
    if negatives is None:
        with torch.random.fork_rng():  # the same seed gives the same heads to the same dots
            torch.manual_seed(seed)
            r = torch.multinomial(torch.tensor(pi), 400, replacement=True)
            dots, said = kernel.sample(heads[r].double(), kappa[0, r]), "samples"
    px, py, pz = (1.01 * dots).T.numpy()
    figure.add_scatter3d(x=px, y=py, z=pz, mode="markers", marker={"size": 2, "color": INK}, name=said)
    for r, head in enumerate(heads):
        hx, hy, hz = (1.25 * head).tolist()
        figure.add_scatter3d(
            x=[0, hx], y=[0, hy], z=[0, hz], mode="lines+text", line={"color": colour(r + 1), "width": 8},
            text=["", f"u{r + 1}: π = {pi[r]:.2f}, κ = {kappas[r]:.1f}"], name=f"head {r + 1}",
        )  # fmt: skip
    title = f"A mixture on the sphere: π is how much, κ is how tight ({kernel.name})"
    if positive is not None:
        x, y, z = (1.03 * positive).tolist()
        marker = {"size": 9, "symbol": "diamond", "color": COLOURS[5], "line": {"color": INK, "width": 1}}
        figure.add_scatter3d(x=[x], y=[y], z=[z], mode="markers", marker=marker, name="positive")
        log_sigma = kernel.log_density((heads @ positive).double()[None], kappa, 3)
        gamma = ", ".join(f"{g:.2f}" for g in mixture.responsibilities(log_pi, log_sigma)[0].exp())
        title = f"γ = ({gamma}) shares out the positive; it does not look at the negatives"
    eye = {"x": 1.0, "y": 0.9, "z": 0.75}
    return figure.update_layout(scene=SCENE, scene_camera_eye=eye, height=560, margin=MARGIN, title=title)


def sphere(
    items: np.ndarray, interest: np.ndarray, names: list[str], tastes: np.ndarray, pi: np.ndarray, one: np.ndarray
) -> go.Figure:
    """Items of a three-dimensional world on the sphere, one user's tastes sized by π_u, and the user as one vector.

    items (n, 3), interest (n,), tastes (m, 3), pi (m,), one (3,); the vectors are unit.
    """
    figure = go.Figure().add_surface(
        **dict(zip("xyz", 0.97 * ball_grid(40), strict=True)), colorscale=[[0, BALL], [1, BALL]], showscale=False,
        hoverinfo="skip", lighting={"ambient": 0.95, "diffuse": 0.2},
    )  # fmt: skip
    for r, name in enumerate(names):
        x, y, z = items[np.asarray(interest) == r].T
        marker = {"size": 2.5, "color": colour(r), "opacity": 0.7}
        figure.add_scatter3d(x=x, y=y, z=z, mode="markers", name=name, marker=marker)
    for r in np.flatnonzero(pi > 0.03):
        x, y, z = 1.06 * tastes[r]
        marker = {"size": 8 + 28 * np.sqrt(pi[r]), "color": colour(r), "line": {"color": INK, "width": 2}}
        figure.add_scatter3d(x=[x], y=[y], z=[z], mode="markers", marker=marker, showlegend=False)
        x, y, z = 1.18 * tastes[r]  # in front of the ball
        figure.add_scatter3d(x=[x], y=[y], z=[z], mode="text", text=[f"{names[r]} {pi[r]:.0%}"], showlegend=False)
    x, y, z = 1.12 * one
    figure.add_scatter3d(
        x=[0, x], y=[0, y], z=[0, z], mode="lines+markers+text", text=["", "one vector"], textposition="top center",
        showlegend=False, line={"color": INK, "width": 6}, marker={"size": [0, 12], "color": INK, "symbol": "diamond"},
    )  # fmt: skip
    eye = 1.45 * (one + np.array([0.0, 0.0, 0.25]))
    return figure.update_layout(
        scene=SCENE, scene_camera_eye=dict(zip("xyz", eye.tolist(), strict=True)), height=620, margin=MARGIN,
        title="One vector points between the interests; a few weighted heads point at them",
        legend={"itemsizing": "constant"},
    )  # fmt: skip
