"""Widgets around the figures: sliders that move what the static figure shows."""

from __future__ import annotations

import ipywidgets
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch

from bachlib.model.sphere import KERNELS
from bachlib.serve import Retriever, Slate
from bachlib.show.plots.serve import slate_slopes
from bachlib.show.plots.sphere import draws, mixture_on_sphere, surface_density


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

    figure = go.FigureWidget(mixture_on_sphere(heads, *setting(), KERNELS[kernel.value], seed))

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


def steering_explorer(retriever: Retriever, history: list[int], items: pd.DataFrame, K: int = 15) -> ipywidgets.Widget:
    """A slider for each head's weight, and the slate before and after joined by slopes (`plots.slate_slopes`)."""
    before = retriever.retrieve([history], K)
    start = before.pi[0]
    sliders = [
        ipywidgets.FloatSlider(float(share), min=0, max=1, step=0.01, description=f"head {r}", readout_format=".2f")
        for r, share in enumerate(start)
    ]
    reset = ipywidgets.Button(description="back to π_u")
    figure = go.FigureWidget(slopes_between(before, before, items, "π_u as the model has it"))
    asked = []  # a slider that is moved while others are being put back has nothing to draw yet

    def redraw(_change=None) -> None:
        if asked:
            return
        weight = np.array([slider.value for slider in sliders])
        if weight.sum() == 0:
            figure.layout.title.text = "No head has any weight: there is nothing to serve by"
            return
        pi = weight / weight.sum()
        untouched = np.allclose(weight, start, atol=0.006)
        what = "π_u as the model has it" if untouched else f"π = ({', '.join(f'{share:.2f}' for share in pi)})"
        drawn = slopes_between(before, before if untouched else retriever.retrieve([history], K, pi=pi), items, what)
        with figure.batch_update():
            figure.data = []
            figure.add_traces(drawn.data)
            figure.layout.title.text = drawn.layout.title.text

    def back(_button=None) -> None:
        asked.append(True)
        for slider, share in zip(sliders, start, strict=True):
            slider.value = float(share)
        asked.clear()
        redraw()

    for slider in sliders:
        slider.observe(redraw, names="value")
    reset.on_click(back)
    return ipywidgets.HBox([ipywidgets.VBox([*sliders, reset]), figure])


def slopes_between(before: Slate, after: Slate, items: pd.DataFrame, what: str) -> go.Figure:
    """`plots.slate_slopes` of the first request of two slates; `items` has the titles."""
    heads = tuple(
        dict(zip(s.items[0].tolist(), s.head_share[0].argmax(1).tolist(), strict=True)) for s in (before, after)
    )
    titles = {item: str(items["title"].get(item, f"item {item}")) for item in {*heads[0], *heads[1]}}
    return slate_slopes(before.items[0], after.items[0], heads, titles, what)
