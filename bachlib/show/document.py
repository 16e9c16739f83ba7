"""One HTML file that needs nothing else: sections of tables and figures, the drawing library once, and their script.

Whatever comes from somebody's data is escaped here; figures and the data of controls are JSON, which the script reads.
The page may not load anything: its content security policy says so to the browser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape, unescape
from html.parser import HTMLParser
from importlib import resources
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
from plotly.offline import get_plotlyjs

from bachlib.show.plots.style import DARK

NOTHING_FROM_OUTSIDE = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; worker-src blob:"
)
MARKS = re.compile(r"(</?(?:sub|sup|b|i|br)\s*/?>)")  # what figures use in their texts
TABLE_TAGS = {"table", "thead", "tbody", "tr", "th", "td", "b", "p", "small"}


class Section(NamedTuple):
    """`lead`, one sentence on what one sees, and `parts` are HTML; `title` is text, `short` is for the contents."""

    key: str
    title: str
    lead: str
    parts: Sequence[str] = ()
    short: str = ""


def page(title: str, subtitle: str, sections: Sequence[Section], steering: dict[str, Any] | None = None) -> str:
    """The whole file. `subtitle` is HTML; `steering` is the data of the sliders (see `steerable`)."""
    contents = "".join(f'<li><a href="#{escape(s.key)}">{escape(s.short or s.title)}</a></li>' for s in sections)
    body = "".join(_section(s) for s in sections)
    data = as_json("dark", DARK) + (as_json("steering", steering) if steering else "")
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{NOTHING_FROM_OUTSIDE}">
<title>{escape(title)}</title><style>{_own("report.css")}</style>
<script>{inline(get_plotlyjs())}</script></head>
<body><nav aria-label="contents"><button id="theme" type="button">dark</button><ol>{contents}</ol></nav>
<main><header><h1>{escape(title)}</h1><p>{subtitle}</p></header>{body}</main>
{data}<script>{inline(_own("report.js"))}</script></body></html>
"""


def _section(s: Section) -> str:
    head = f'<section id="{escape(s.key)}"><h2>{escape(s.title)}</h2><p class="lead">{s.lead}</p>'
    return f"{head}{''.join(s.parts)}</section>"


def _own(name: str) -> str:
    return resources.files("bachlib.show").joinpath(name).read_text(encoding="utf-8")


def inline(script: str) -> str:
    """A script as it may stand between <script> tags."""
    return re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE).replace("<!--", r"<\!--")


def as_json(key: str, value: Any) -> str:
    """Data for the script; no text in it can end the element."""
    return f'<script type="application/json" id="data-{key}">{_dumped(value)}</script>'


def _dumped(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


# ---------------------------------------------------------------------------------------------------------- figures


def figure(drawn: go.Figure | Mapping[str, Any]) -> str:
    """A figure with its title as a caption that wraps; the page decides how wide it is and in which colours."""
    made = json.loads(pio.to_json(drawn, validate=False)) if isinstance(drawn, go.Figure) else drawn
    made = json.loads(json.dumps({key: made[key] for key in ("data", "layout", "frames") if made.get(key)}))
    layout = made.setdefault("layout", {})
    look = layout.get("template", {}).get("layout", {})
    for place in (layout, look):
        place.pop("width", None)
    title = layout.pop("title", None)
    text = (title.get("text") if isinstance(title, dict) else title) or ""
    top = layout.get("margin", {}).get("t", look.get("margin", {}).get("t", 60))
    layout["margin"] = layout.get("margin", {}) | {"t": max(24, top - 36) if text else top}
    height = layout.get("height") or look.get("height") or 400
    layout["height"] = height = int(height - 36 if text else height)
    words = escape(unescape(MARKS.sub("", text)))
    return (
        f'<figure><figcaption>{marked(text)}</figcaption><div class="plot" role="img" aria-label="{words}" '
        f'style="height:{height}px"></div><script type="application/json">{_dumped(made)}</script></figure>'
    )


def marked(text: str) -> str:
    """The text of a figure as HTML: its few marks stay, all else is text."""
    parts = MARKS.split(text)
    return "".join(part if n % 2 else escape(unescape(part), quote=False) for n, part in enumerate(parts))


# ----------------------------------------------------------------------------------------------------------- tables


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> str:
    """A table of text and numbers; the first column is left, the others right."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(said(v))}</td>" for v in row) + "</tr>" for row in rows)
    under = f"<p><small>{escape(caption)}</small></p>" if caption else ""
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>{under}'


def settings(values: Mapping[str, Any]) -> str:
    """Parameters as a table of names and values; what is nested has a table of its own."""
    plain = {name: value for name, value in values.items() if not (isinstance(value, Mapping) and value)}
    lines = "".join(f"<tr><td>{escape(name)}</td><td>{escape(said(value))}</td></tr>" for name, value in plain.items())
    own = f'<div class="settings"><table><tbody>{lines}</tbody></table></div>' if plain else ""
    nested = (f"<h3>{escape(name)}</h3>{settings(values[name])}" for name in values if name not in plain)
    return own + "".join(nested)


def said(value: Any) -> str:
    """A value as one reads it."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if value is None:
        return "–"
    if isinstance(value, float | np.floating):
        return f"{value:.4g}"
    if isinstance(value, int | np.integer):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(said, value)) or "–"
    return "–" if value == {} else str(value)


def only_a_table(html: str) -> str:
    """The table that a `Table` of `evaluate.tables` shows itself as, with nothing but its own tags."""
    reader = _TableOnly()
    reader.feed(html)
    reader.close()
    inside = "".join(reader.parts)
    return '<div class="wide results">' + inside.replace("</table>", "</table></div>", 1)


class _TableOnly(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.parts += [f"<{tag}>"] if tag in TABLE_TAGS else []

    def handle_endtag(self, tag: str) -> None:
        self.parts += [f"</{tag}>"] if tag in TABLE_TAGS else []

    def handle_data(self, data: str) -> None:
        self.parts.append(escape(data, quote=False))
