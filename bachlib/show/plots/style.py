"""How the figures look: one colour per head or interest everywhere, colour-blind safe, in light and in dark.

Figures are made light. `dark` turns one into its dark twin, colour by colour; `use("dark")` does so for everything a
notebook shows from then on. The page of a report does the same with the same table (`DARK`) in the reader's browser.
"""

from __future__ import annotations

import html
import textwrap
import unicodedata
from collections.abc import Sequence
from typing import Any, Literal

import pandas as pd
import plotly.graph_objects as go
import plotly.io as pio
from plotly.io.base_renderers import MimetypeRenderer
from plotly.subplots import make_subplots

from bachlib import BachError
from bachlib.data.dataset import as_text

# Okabe–Ito's first six, then the colours that are farthest from all others, also for people who see no red or green
COLOURS = """
    #0072B2 #E69F00 #009E73 #CC79A7 #56B4E9 #D55E00 #771100 #332288
    #88BB66 #7766FF #770066 #AA3377 #AA5533 #4422CC #33BBCC #0000FF
""".split()
INK, GREY, LIGHT, PAPER = "#222222", "#707070", "#E5E5E5", "#FFFFFF"
BALL, PALE = "#F4F6F8", "#BFD9EA"  # a surface, and the cold end of a scale
ABOVE = {"y": 1, "yref": "paper", "yanchor": "bottom", "showarrow": False}  # a word above the figure
BELOW = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"}  # a legend under the figure

# what a colour of the light figures becomes in the dark: the same hue, light enough to be seen
DARK = {
    INK: "#ECECEC", GREY: "#A0A0A0", LIGHT: "#3A3F46", PAPER: "#16191D", BALL: "#2A2F36", PALE: "#21384A",
    "#0072B2": "#2288DD", "#771100": "#FFDDAA", "#332288": "#CCDDFF", "#770066": "#FF99BB", "#AA3377": "#FF1144",
    "#AA5533": "#FFDD66", "#4422CC": "#9977BB", "#33BBCC": "#448844", "#0000FF": "#66AAFF",
}  # fmt: skip

_title = {"font": {"size": 17}, "x": 0, "xref": "paper", "yanchor": "bottom", "y": 1, "yref": "paper", "pad": {"b": 14}}
_axis = {"gridcolor": LIGHT, "zeroline": False, "automargin": True}
_side = {"gridcolor": LIGHT, "linecolor": GREY}
pio.templates["bach"] = go.layout.Template(
    layout={
        "font": {"family": "system-ui, sans-serif", "size": 14, "color": INK}, "title": _title,
        "paper_bgcolor": PAPER, "plot_bgcolor": PAPER, "xaxis": _axis, "yaxis": _axis,
        "ternary": {"bgcolor": PAPER, "aaxis": _side, "baxis": _side, "caxis": _side},
        "colorway": COLOURS, "hoverlabel": {"font": {"size": 13}},
        "margin": {"l": 60, "r": 20, "t": 60, "b": 50}, "width": 860, "height": 400,
    }
)  # fmt: skip
pio.templates.default = "bach"
pd.set_option("display.html.use_mathjax", False)  # a title such as $x$ in a table is no formula


def colour(r: int) -> str:
    """The colour of head r, in every figure; with more than sixteen heads colours come again."""
    return COLOURS[r % len(COLOURS)]


def tag(r: int, name: str, longest: int = 22) -> str:
    """How a head is called in every figure: its number, and its name if it has one."""
    return f"{r} · {label(name, longest)}" if name else f"head {r}"


def label(text: Any, longest: int = 34) -> str:
    """A title of somebody's catalogue as figures can show it: not too long, and never taken for anything but text.

    plotly reads HTML (<b>), templates (%{x}) and formulas ($x$): their signs become HTML entities, which it shows. Text
    from right to left is set apart, or it would turn round what follows it.
    """
    text = " ".join(as_text(text).split())
    text = text if len(text) <= longest else text[: longest - 1].rstrip() + "…"
    apart = any(unicodedata.bidirectional(letter) in ("R", "AL", "AN") for letter in text)
    text = html.escape(text, quote=False).translate({ord(sign): f"&#{ord(sign)};" for sign in "${"})
    return f"\u2068{text}\u2069" if apart else text


def wrapped(text: str, width: int = 12) -> str:
    """A short text on several lines, for places that are narrow on a phone."""
    return "<br>".join(textwrap.wrap(text, width, break_long_words=False)) or text


def side_by_side(titles: Sequence[str], title: str, across: str, **how: Any) -> go.Figure:
    """An empty figure of one row with a column per title and `across` below each; it fits on a phone."""
    how = {"shared_yaxes": True, "horizontal_spacing": 0.04} | how
    names = [wrapped(name) for name in titles]
    lines = max(name.count("<br>") for name in names) + any(names)
    figure = make_subplots(1, len(names), subplot_titles=names, **how).update_annotations(font_size=12)
    figure.update_xaxes(title={"text": across, "font": {"size": 11}}, nticks=4)
    return figure.update_layout(title={"text": title, "pad": {"b": 16 + 16 * lines}}, margin_t=70 + 16 * lines)


def diagonal(figure: go.Figure, column: int) -> None:
    """Where predicted and true shares are equal, in a column of `side_by_side`; both axes from 0 to 1."""
    line = {"color": GREY, "dash": "dash"}
    figure.add_scatter(x=[0, 1], y=[0, 1], mode="lines", line=line, showlegend=False, row=1, col=column)
    figure.update_xaxes(range=[0, 1]).update_yaxes(range=[0, 1])


def noted(figure: go.Figure, where: str) -> go.Figure:
    """The figure with the origin of its numbers in the title: the seed, the world, the scale."""
    return figure.update_layout(title_text=f"{figure.layout.title.text} ({where})")


def interval(rows: pd.DataFrame, value: str, scale: int = 1) -> dict[str, Any]:
    """Error bars from the columns low and high."""
    above, below = scale * (rows["high"] - rows[value]), scale * (rows[value] - rows["low"])
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below}


def recoloured(part: Any) -> Any:
    """A figure's JSON with every colour of the light figures replaced by its dark twin."""
    if isinstance(part, dict):
        return {key: recoloured(value) for key, value in part.items()}
    if isinstance(part, list | tuple):
        return [recoloured(value) for value in part]
    return DARK.get(part.upper(), part) if isinstance(part, str) else part


def dark(figure: go.Figure) -> go.Figure:
    """The same figure for a dark page."""
    return go.Figure(recoloured(figure.to_dict()))


class _Dark(MimetypeRenderer):
    """Every figure that is shown as its dark twin; what the figure is stays as it was made."""

    def to_mimebundle(self, fig_dict: dict) -> dict:
        return {"application/vnd.plotly.v1+json": recoloured(fig_dict)}


pio.renderers["bach-dark"] = _Dark()


def use(theme: Literal["light", "dark"]) -> None:
    """Show all figures and widgets of this session light or dark."""
    if theme not in ("light", "dark"):
        raise BachError(f"use({theme!r}): figures are light or dark")
    # data only: the other renderers store megabytes of script in the notebook
    pio.renderers.default = {"light": "plotly_mimetype", "dark": "bach-dark"}[theme]


def themed(part: go.Figure | str, on_dark: bool = False) -> go.Figure | str:
    """For widgets: a figure or a colour for a dark page, if the page is dark or `use("dark")` was called."""
    if not on_dark and pio.renderers.default != "bach-dark":
        return part
    return dark(part) if isinstance(part, go.Figure) else recoloured(part)


use("light")
