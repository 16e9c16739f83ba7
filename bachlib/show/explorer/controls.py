"""Parts of the explorer: the controls of one head, and the answer to why an item is there."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import NamedTuple

import ipywidgets as w

from bachlib.show.explorer.session import Heads, Session, Why
from bachlib.show.plots.style import themed_colour

TIGHT = "line-height: 1.3"  # JupyterLab's own leaves much room


class Row(NamedTuple):
    """The controls of one head."""

    about: w.HTML
    slider: w.FloatSlider
    forbid: w.Checkbox
    box: w.HBox

    @classmethod
    def make(cls, changed: Callable[[dict], None]) -> Row:
        about = w.HTML(layout={"width": "185px"})
        slider = w.FloatSlider(min=0, max=1, step=0.001, layout={"width": "200px"})
        forbid = w.Checkbox(False, description="forbid", indent=False, layout={"width": "75px"})
        for control in (slider, forbid):
            control.observe(changed, names="value")
        return cls(about, slider, forbid, w.HBox([about, slider, forbid]))

    def show(self, r: int, heads: Heads) -> None:
        """This row is about head r now."""
        self.slider.value, self.slider.style.handle_color = float(heads.pi[r]), themed_colour(r)
        self.slider.tooltip, self.forbid.value = f"weight of head {r}", False
        self.about.value = (
            f'<div style="{TIGHT}">{_dot(r)} {r} · <b>{escape(heads.names[r])}</b><br>'
            f"<small>π<sub>u</sub> {heads.pi[r]:.0%} · κ {heads.kappa[r]:.1f}</small></div>"
        )


def why_html(session: Session, why: Why) -> str:
    """Why an item is there: the heads with the largest share of its score, and what of the history is like it."""
    rows = "".join(
        f"<tr><td>{_dot(r)} {r} · {escape(row['head'])}</td><td>{row['share']:.0%}</td><td>{row['π']:.1%}</td>"
        f"<td>{row['κ']:.1f}</td><td>{row['cosine']:.2f}</td></tr>"
        for r, row in why.heads.sort_values("share", ascending=False).head(4).iterrows()
    )
    columns = "".join(f"<th>{name}</th>" for name in ("head", "share", "π", "κ", "cosine"))
    genres = ", ".join(escape(g) for g in session.genres_of_item(why.item))
    like = ", ".join(f"{escape(session.title(i))} ({cosine:.2f})" for i, cosine in why.like)
    return (
        f'<div style="{TIGHT}"><b>{escape(session.title(why.item))}</b> {genres} · log m = {why.score:.2f}'
        f'<table style="{TIGHT}"><tr>{columns}</tr>{rows}</table>'
        f"most like it in the history: {like or 'nothing, the history is empty'}</div>"
    )


def _dot(r: int) -> str:
    return f'<span style="color:{themed_colour(r)}">⬤</span>'
