"""The sphere with sliders: κ and π of each head, and the kernel."""

from __future__ import annotations

import ipywidgets
import plotly.graph_objects as go
import torch

from bachlib.model.sphere import KERNELS
from bachlib.show.plots.sphere import draws, mixture_on_sphere, surface_density
from bachlib.show.plots.style import themed


def sphere_explorer(heads: torch.Tensor, seed: int = 0) -> ipywidgets.Widget:
    """`plots.mixture_on_sphere` with a choice of kernel and sliders for κ and π of each head (k, 3)."""
    k = len(heads)
    kernel = ipywidgets.Dropdown(options=list(KERNELS), description="kernel")
    kappas = [
        ipywidgets.FloatLogSlider(20, min=-1, max=3, description=f"κ of u{r + 1}", readout_format=".1f")
        for r in range(k)
    ]
    weights = [ipywidgets.FloatSlider(1, min=0.01, max=5, step=0.01, description=f"weight u{r + 1}") for r in range(k)]

    def setting() -> tuple[list[float], list[float]]:
        total = sum(weight.value for weight in weights)
        return [weight.value / total for weight in weights], [kappa.value for kappa in kappas]

    figure = go.FigureWidget(themed(mixture_on_sphere(heads, *setting(), KERNELS[kernel.value], seed)))

    def redraw(_change=None) -> None:
        pi, kappa = setting()
        chosen = KERNELS[kernel.value]
        x, y, z = (1.01 * draws(heads, pi, kappa, chosen, seed)).T.numpy()
        with figure.batch_update():
            figure.data[0].surfacecolor = surface_density(heads, pi, kappa, chosen)
            figure.data[1].update(x=x, y=y, z=z)
            for r in range(k):
                figure.data[2 + r].text = ["", f"u{r + 1}: π = {pi[r]:.2f}, κ = {kappa[r]:.1f}"]

    for control in (kernel, *kappas, *weights):
        control.observe(redraw, names="value")
    return ipywidgets.VBox([kernel, ipywidgets.HBox([ipywidgets.VBox(kappas), ipywidgets.VBox(weights)]), figure])
