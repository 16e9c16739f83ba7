"""Executed notebooks as one HTML file that needs no network, no kernel and no other file.

    text = page(notebook)                                    # a section for each `## ` heading
    text = page([("00_tour", first), ("01_sphere", second)])  # a section for each notebook
    text = page(notebook, plotly="plotly.js", beside=[("next", "01_sphere.html", "01_sphere")])  # a page of a site

Every cell and every output is on the page; only cells tagged `lesson` can be left out (`bach run` leaves out these
texts before it executes a notebook with other parameters than its own). Text of notebooks is sanitised
and all else is escaped, so that nothing of somebody's data becomes markup. Figures and the data of sliders are JSON,
which `page.js` reads. The content security policy of the page forbids it to load anything.
A page of a site shares plotly.js with the others and loads nothing else.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape, unescape
from importlib import resources
from typing import Any

import bleach
import mistune
from latex2mathml.converter import convert as to_mathml
from nbconvert.filters import ansi2html
from nbformat import NotebookNode
from plotly.offline import get_plotlyjs
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from bachlib.show.plots.style import DARK
from bachlib.show.steering import MIME as STEERING
from bachlib.show.steering import unpacked

PLOTLY = "application/vnd.plotly.v1+json"
WIDGET = "application/vnd.jupyter.widget-view+json"
WIDGETS = ("VBox(", "HBox(", "Explorer(", "FigureWidget(")  # how they print where no state of theirs was stored
NEEDS_A_KERNEL = "<p><em>This control needs a running kernel: open the notebook with <code>make lab</code>.</em></p>"
NOTHING_FROM_OUTSIDE = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; worker-src blob:"
)


def page(
    notebooks: NotebookNode | Sequence[tuple[str, NotebookNode]],
    title: str = "",
    *,
    lessons: bool = True,
    plotly: str = "",
    beside: Sequence[tuple[str, str, str]] = (),
) -> str:
    """The text of the file. `title` replaces the notebook's own; `lessons=False` leaves out cells tagged `lesson`.

    For a page of a site: `plotly` names the file with `plotly_js()` beside it, and `beside` other pages (relation, file
    and words of each link).
    """
    writer, before, sections = _Writer(lessons), "", []
    if isinstance(notebooks, NotebookNode):
        own, ((_, before), *parts) = writer.parts(notebooks)
        sections = [(words, words, html) for words, html in parts]
        before = f"<p><b>{written(own)}</b></p>{before}" if title and own else before
        title = title or own
    else:
        for name, notebook in notebooks:  # the headings of a notebook go down by one
            own, parts = writer.parts(notebook)
            html = "".join(f"<h3>{written(words)}</h3>{html}" if words else html for words, html in parts)
            sections.append((name, own or name, html))
    contents, body = "", ""
    for short, heading, html in sections:
        key = writer.key(short)
        contents += f'<li><a href="#{key}">{escape(re.sub(r"[$*`{}]", "", short))}</a></li>'
        body += f'<section id="{key}"><h2>{written(heading)}</h2>{html}</section>'
    links = "".join(f'<a rel="{rel}" href="{escape(file)}">{escape(words)}</a>' for rel, file, words in beside)
    links = f'<p class="pages">{links}</p>' if links else ""
    draws = f'<script src="{escape(plotly)}"></script>' if plotly else f"<script>{inline(plotly_js())}</script>"
    allowed = NOTHING_FROM_OUTSIDE.replace("script-src", "script-src 'self'") if plotly else NOTHING_FROM_OUTSIDE
    css, js = (resources.files("bachlib.show").joinpath(f"page.{kind}").read_text("utf-8") for kind in ("css", "js"))
    css += HtmlFormatter(style="default").get_style_defs(".code")
    css += HtmlFormatter(style="github-dark").get_style_defs(':root[data-theme="dark"] .code')
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{allowed}">
<title>{escape(title)}</title><style>{css}</style>
{draws}</head>
<body><nav aria-label="contents"><button id="theme" type="button">dark</button>
<label class="switch"><input type="checkbox" id="code"> code</label><ol>{contents}</ol></nav>
<main>{links}<header><h1>{written(title)}</h1>{before}</header>{body}{links}</main>
<script type="application/json" id="data-dark">{dumped(DARK)}</script>
<script>{inline(js)}</script></body></html>
"""


def plotly_js() -> str:
    """The library that draws the figures of a page."""
    return get_plotlyjs()


class _Writer:
    """Cells as HTML; it counts what may be on a page several times."""

    def __init__(self, lessons: bool):
        self.lessons, self.steered = lessons, 0
        self.keys = {*"code theme steer steer-user steering proof data-dark data-steering".split()}  # of the page

    def parts(self, notebook: NotebookNode) -> tuple[str, list[list[str]]]:
        """The notebook's title, and its parts: what is before the first `## ` heading, then [heading, HTML] of each."""
        title, found = "", [["", ""]]
        for cell in notebook.cells:
            if not self.lessons and "lesson" in cell.metadata.get("tags", []):
                continue
            for heading, html in _pieces(cell) if cell.cell_type == "markdown" else [("", "".join(self.code(cell)))]:
                if heading.startswith("# ") and not title and len(found) == 1:
                    title = heading[2:].strip()
                elif heading:
                    found.append([heading.lstrip("# "), ""])
                found[-1][1] += html
        return title, found

    def key(self, words: str) -> str:
        """An id that is on the page once."""
        stem = key = "-".join(re.findall(r"\w+", words.lower())) or "section"
        while key in self.keys:
            key = f"{stem}-{len(self.keys)}"
        self.keys.add(key)
        return key

    def code(self, cell: NotebookNode) -> Iterator[str]:
        """A code cell: its source, which the page can hide, and its outputs. A raw cell: its text."""
        if cell.source.strip():
            yield _highlighted(cell.source) if cell.cell_type == "code" else f"<pre>{escape(cell.source)}</pre>"
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                yield f'<pre class="stream">{ansi2html(output.text)}</pre>'
            elif output.output_type == "error":
                told = "\n".join(output.get("traceback", [])) or f"{output.ename}: {output.evalue}"
                yield f'<pre class="error">{ansi2html(told)}</pre>'
            else:
                yield self.shown(output.get("data", {}))

    def shown(self, data: Mapping[str, Any]) -> str:
        """The richest of an output's forms that works here."""
        plain = data.get("text/plain", "")
        if STEERING in data:
            self.steered += 1
            n = "" if self.steered == 1 else f"-{self.steered}"  # the first sliders of a page have the plain ids
            told = f'<script type="application/json" id="data-steering{n}">{dumped(unpacked(data[STEERING]))}</script>'
            return f'<div id="steering{n}"><div class="steer" id="steer{n}"></div>{told}</div>'
        if PLOTLY in data:
            return figure(data[PLOTLY])
        if WIDGET in data or plain.startswith(WIDGETS):
            return NEEDS_A_KERNEL
        if "text/html" in data and (html := clean(data["text/html"])).strip():
            return f'<div class="wide">{html}</div>'
        if mime := next((mime for mime in sorted(data) if mime.startswith("image/")), None):
            return f'<img alt="{escape(plain)}" src="{_as_url(mime, data[mime])}">'
        words = data.get("text/markdown") or data.get("text/latex") or ""
        if source := re.fullmatch(r"```python\n(.*)\n```\s*", words, re.DOTALL):  # of `source_of`: it is never hidden
            return _highlighted(source[1], "code shown")
        return markdown(words) or f"<pre>{escape(plain or json.dumps(data, indent=1, ensure_ascii=False))}</pre>"


def _pieces(cell: NotebookNode) -> list[tuple[str, str]]:
    """A markdown cell cut at its headings of the first two levels (not in code): [(heading or "", HTML below), …]."""
    text, found, fenced = cell.source, [["", ""]], False
    for name, forms in cell.get("attachments", {}).items():
        text = text.replace(f"attachment:{name}", _as_url(*next(iter(forms.items()))))
    for line in text.splitlines(keepends=True):
        fenced ^= line.lstrip().startswith(("```", "~~~"))
        if not fenced and re.match(r"##? ", line):
            found.append([line.strip(), ""])
        else:
            found[-1][1] += line
    return [(heading, markdown(text)) for heading, text in found]


def _highlighted(code: str, name: str = "code") -> str:
    return highlight(code, PythonLexer(), HtmlFormatter(cssclass=name))


def _as_url(mime: str, data: str) -> str:
    """An image as a data URL: bitmaps are base64 in a notebook, SVG is text."""
    coded = base64.b64encode(data.encode()).decode() if mime == "image/svg+xml" else "".join(data.split())
    return escape(f"data:{mime};base64,{coded}")


def inline(script: str) -> str:
    """A script as it may stand between <script> tags."""
    return re.sub(r"</(?=script)", r"<\\/", script, flags=re.IGNORECASE).replace("<!--", r"<\!--")


def dumped(value: Any) -> str:
    """JSON for a script element; no text in it can end the element."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")


FORMULA = re.compile(r"(`+[^`]*`+)|\$\$(.+?)\$\$|\$(?! )([^$\n]+?)(?<! )\$", re.DOTALL)
TAGS = set(
    "a abbr b blockquote br caption code col colgroup dd del details div dl dt em h1 h2 h3 h4 h5 h6 hr i img kbd li ol "
    "p pre s small span strong sub summary sup table tbody td tfoot th thead tr u ul".split()
)
BESIDE = re.compile(r"\w[\w-]*\.html(#[\w-]+)?")  # another page of a site
MARKS = re.compile(r"(</?(?:sub|sup|b|i|br)\s*/?>)")  # what figures use in their texts
_render = mistune.create_markdown(escape=False, plugins=["table", "strikethrough"])


def markdown(text: str) -> str:
    """Markdown as HTML, formulas as MathML; links to other notebooks lead to their chapters of the page."""
    text = re.sub(r"\]\(([\w.-]+)\.ipynb\)", r"](#\1)", text)
    return _around_formulas(text, lambda words: clean(_render(words)))


def written(text: str) -> str:
    """A title as HTML: formulas become MathML, code is marked, all else is text."""
    return _around_formulas(text, lambda words: re.sub(r"`+(.+?)`+", r"<code>\1</code>", escape(words, quote=False)))


def _around_formulas(text: str, render: Callable[[str], str]) -> str:
    """Render a text while signs of Unicode's private area stand for its formulas (but no dollars in code)."""
    made: list[str] = []

    def set_aside(match: re.Match) -> str:
        code, block, inside = match.groups()
        if code:
            return code
        made.append(_formula(block or inside, bool(block)))
        return f"\ue000{len(made) - 1}\ue001"

    text = FORMULA.sub(set_aside, re.sub("[\ue000\ue001]", "", text))
    return re.sub("\ue000(\\d+)\ue001", lambda match: made[int(match.group(1))], render(text))


def _formula(latex: str, block: bool) -> str:
    """MathML; a formula that cannot be read is shown as it was written."""
    safe = latex.replace("<", r"\lt ").replace(">", r"\gt ")  # the converter escapes no text, and shows \big\| as it is
    safe = re.sub(r"(?<!\\)\\\|", "‖", safe)
    try:
        made = to_mathml(safe, display="block" if block else "inline")
    except Exception:  # it has a class for each mistake
        made = ""
    return made if made and "href" not in made else f"<code>{escape(latex)}</code>"


def clean(html: str) -> str:
    """HTML without scripts, styles, event handlers, frames and addresses to load from."""
    html, allowed = re.sub(r"(?is)<(script|style)\b.*?</\1\s*>", "", html), {"http", "https", "mailto", "data"}
    return bleach.clean(html, tags=TAGS, attributes=_harmless, protocols=allowed, strip=True)


def _harmless(tag: str, name: str, value: str) -> bool:
    if name == "href":
        return value.startswith(("https://", "http://", "mailto:", "#")) or bool(BESIDE.fullmatch(value))
    if name == "src":
        return tag == "img" and value.startswith("data:image/")
    if name == "class":
        return value == "settings"  # the page sets such tables in two columns
    return name in ("colspan", "rowspan", "alt", "title", "open", "scope", "start")


def figure(drawn: Mapping[str, Any]) -> str:
    """A figure with its title as a caption that wraps; the page decides how wide it is and in which colours."""
    made = json.loads(json.dumps({key: drawn[key] for key in ("data", "layout", "frames") if drawn.get(key)}))
    layout = made.setdefault("layout", {})
    look = layout.get("template", {}).get("layout", {})
    for place in (layout, look):
        place.pop("width", None)
    text = layout.pop("title", {}).get("text") or ""
    margin, height = layout.get("margin", {}), layout.get("height") or look.get("height") or 400
    top = margin.get("t", look.get("margin", {}).get("t", 60))
    layout["margin"] = margin | {"t": max(24, top - 36) if text else top}
    layout["height"] = height = int(height - 36 if text else height)
    words = escape(unescape(MARKS.sub("", text)))
    return (
        f'<figure><figcaption>{marked(text)}</figcaption><div class="plot" role="img" aria-label="{words}" '
        f'style="height:{height}px"></div><script type="application/json">{dumped(made)}</script></figure>'
    )


def marked(text: str) -> str:
    """The text of a figure as HTML: its few marks stay, all else is text."""
    parts = MARKS.split(text)
    return "".join(part if n % 2 else escape(unescape(part), quote=False) for n, part in enumerate(parts))
