"""Parts of the explorer: the theme, the controls of one head, the answer to why; and the sphere with sliders."""

from __future__ import annotations

from collections.abc import Callable
from html import escape

import anywidget
import ipywidgets as w
import numpy as np
import plotly.graph_objects as go
import torch
import traitlets

from bachlib.model.sphere import KERNELS
from bachlib.show.explorer.session import Heads, Session, Why
from bachlib.show.plots.sphere import mixture_on_sphere
from bachlib.show.plots.style import colour, themed

TIGHT = "line-height: 1.25"  # JupyterLab's own leaves much room
FIXED = {"overflow": "hidden", "flex": "0 0 auto"}  # a box that neither scrolls nor shrinks


class Theme(anywidget.AnyWidget):
    """Shows nothing; `dark` follows the theme of JupyterLab. Elsewhere it stays False."""

    _esm = """
    export default { render({ model, el }) {
      el.style.display = "none";
      const look = () => {
        model.set("dark", document.body.dataset.jpThemeLight === "false");
        model.save_changes();
      };
      look();
      const changes = new MutationObserver(look);
      changes.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
      return () => changes.disconnect();
    } };
    """
    dark = traitlets.Bool(False).tag(sync=True)


class Search(anywidget.AnyWidget):
    """A text field: `value` is what is typed, `entered` counts how often Enter was pressed.

    ipywidgets' own Text reports Enter in a message that can overtake the last letters.
    """

    _esm = """
    export default { render({ model, el }) {
      el.classList.add("jupyter-widgets", "widget-inline-hbox", "widget-text");
      el.innerHTML = '<label class="widget-label" style="width: 58px"></label><input type="text">';
      const [label, input] = el.children;
      label.textContent = model.get("description");
      input.placeholder = model.get("placeholder");
      const show = () => { if (input.value !== model.get("value")) input.value = model.get("value"); };
      show();
      model.on("change:value", show);
      input.addEventListener("input", () => { model.set("value", input.value); model.save_changes(); });
      input.addEventListener("keydown", (event) => {
        event.stopPropagation();  // JupyterLab has shortcuts on single letters
        if (event.key !== "Enter") return;
        model.set("value", input.value);
        model.set("entered", model.get("entered") + 1);
        model.save_changes();
      });
    } };
    """
    value, description, placeholder = (traitlets.Unicode("").tag(sync=True) for _ in range(3))
    entered = traitlets.Int(0).tag(sync=True)


class Row(w.HBox):
    """The controls of one head: its name, a slider, the share of π that it has now, and a box to forbid it."""

    def __init__(self, changed: Callable[[dict], None]):
        self.about, self.share = (w.HTML(layout={"width": width, "margin": "0"}) for width in ("150px", "36px"))
        small, beside = {"width": "138px", "margin": "0"}, {"width": "64px", "margin": "0 0 0 4px"}
        self.slider = w.FloatSlider(min=0, max=1, step=0.001, readout=False, layout=small)
        self.forbid = w.Checkbox(False, description="forbid", indent=False, layout=beside)
        for control in (self.slider, self.forbid):
            control.observe(changed, names="value")
        middle = FIXED | {"align_items": "center", "height": "36px"}
        super().__init__([self.about, self.slider, self.share, self.forbid], layout=middle)

    def show(self, r: int, heads: Heads) -> None:
        """This row is about head r now."""
        self.slider.value, self.forbid.value = float(heads.pi[r]), False
        self.slider.tooltip = f"weight of head {r}"

    def say(self, percent: int) -> None:
        self.share.value = f'<div style="text-align: right">{percent}%</div>'

    def paint(self, r: int, heads: Heads, percent: int, on_dark: bool) -> None:
        self.slider.style.handle_color = themed(colour(r), on_dark)
        self.say(percent)
        name = escape(heads.names[r])
        cut = "font-size: 12px; width: 146px; white-space: nowrap; overflow: hidden; text-overflow: ellipsis"
        self.about.value = (
            f'<div style="{TIGHT}"><div style="{cut}" title="{name}">{_dot(r, on_dark)} {r} · '
            f"<b><bdi>{name}</bdi></b></div>"
            f"<small>π<sub>u</sub> {heads.pi[r]:.0%} · κ {heads.kappa[r]:.1f}</small></div>"
        )


def percentages(share: np.ndarray) -> list[int]:
    """Shares that sum to one as whole per cent that sum to 100: the largest remainders are rounded up."""
    exact = 100 * np.clip(share, 0, 1)  # a sum of floats may be a little more than one
    whole = np.floor(exact + 1e-9).astype(int)
    whole[np.argsort(whole - exact, kind="stable")[: 100 - whole.sum()]] += 1
    return whole.tolist()


def why_html(session: Session, why: Why, on_dark: bool) -> str:
    """Why an item is there: the heads with the largest share of its score, and what of the history is like it."""
    rows = "".join(
        f"<tr><td>{_dot(r, on_dark)} {r} · <bdi>{escape(row['head'])}</bdi></td><td>{row['share']:.0%}</td>"
        f"<td>{row['π']:.1%}</td><td>{row['κ']:.1f}</td><td>{row['cosine']:.2f}</td></tr>"
        for r, row in why.heads.sort_values("share", ascending=False).head(3).iterrows()
    )
    columns = "".join(f'<th style="padding: 0 7px">{name}</th>' for name in ("head", "share", "π", "κ", "cosine"))
    genres = ", ".join(f"<bdi>{escape(g)}</bdi>" for g in session.genres_of_item(why.item))
    like = ", ".join(f"<bdi>{escape(session.title(i))}</bdi> ({cosine:.2f})" for i, cosine in why.like)
    return (
        f'<div style="{TIGHT}"><b><bdi>{escape(session.title(why.item))}</bdi></b> {genres} · log m = {why.score:.2f}'
        f'<table style="{TIGHT}; margin: 3px 0"><tr>{columns}</tr>{rows}</table>'
        f"most like it in the history: {like or 'nothing, the history is empty'}</div>"
    )


def _dot(r: int, on_dark: bool) -> str:
    return f'<span style="color:{themed(colour(r), on_dark)}">⬤</span>'


def sphere_explorer(heads: torch.Tensor, seed: int = 0) -> w.Widget:
    """`plots.mixture_on_sphere` with a choice of kernel and sliders for κ and π of each head (k, 3)."""
    k, theme = len(heads), Theme()
    kernel = w.Dropdown(options=list(KERNELS), description="kernel")
    kappas = [w.FloatLogSlider(20, min=-1, max=3, description=f"κ of u{r + 1}", readout_format=".1f") for r in range(k)]
    weights = [w.FloatSlider(1, min=0.01, max=5, step=0.01, description=f"weight u{r + 1}") for r in range(k)]

    def drawn() -> go.Figure:
        total = sum(weight.value for weight in weights)
        pi, kappa = [weight.value / total for weight in weights], [kappa.value for kappa in kappas]
        return themed(mixture_on_sphere(heads, pi, kappa, KERNELS[kernel.value], seed), theme.dark)

    figure = go.FigureWidget(drawn())

    def redraw(_change=None) -> None:
        new = drawn()
        with figure.batch_update():
            figure.layout.template, figure.layout.title.text = new.layout.template, new.layout.title.text
            figure.data[0].update(surfacecolor=new.data[0].surfacecolor, colorscale=new.data[0].colorscale)
            figure.data[1].update(x=new.data[1].x, y=new.data[1].y, z=new.data[1].z, marker=new.data[1].marker)
            for old, line in zip(figure.data[2:], new.data[2:], strict=True):
                old.update(text=line.text, line=line.line)

    for control in (kernel, *kappas, *weights):
        control.observe(redraw, names="value")
    theme.observe(redraw, names="dark")
    return w.VBox([kernel, w.HBox([w.VBox(kappas), w.VBox(weights)]), figure, theme])
