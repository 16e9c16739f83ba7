"""A run as web pages that work without a network: each executed notebook as HTML, and an index over them."""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import nbformat
import plotly.io as pio
from latex2mathml.converter import convert as to_mathml
from nbconvert import HTMLExporter
from nbconvert.preprocessors import Preprocessor
from plotly.offline import get_plotlyjs

from bachlib.records import write_text

PLOTLY = "application/vnd.plotly.v1+json"
SCRIPT = "plotly.min.js"
WIDGET = "application/vnd.jupyter.widget-view+json"


FORMULA = re.compile(r"(`[^`]*`)|\$\$(.+?)\$\$|\$(?! )([^$\n]+?)(?<! )\$", re.DOTALL)


class ForThePage(Preprocessor):
    """What a page needs to stand alone: the HTML that draws a figure, and formulas as MathML instead of MathJax."""

    def preprocess_cell(self, cell, resources, index):
        if cell.cell_type == "markdown":
            cell.source = FORMULA.sub(_formula, cell.source)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if WIDGET in data or data.get("text/plain", "").startswith(("VBox(", "HBox(")):
                data.clear()
                data["text/html"] = "<em>Sliders need a running kernel: open the notebook with make lab.</em>"
            if PLOTLY in data:
                figure = {key: value for key, value in data[PLOTLY].items() if key in ("data", "layout", "frames")}
                data.clear()
                data["text/html"] = pio.to_html(figure, include_plotlyjs=False, full_html=False, validate=False)
        return cell, resources


def _formula(match: re.Match) -> str:
    code, block, inline = match.groups()
    return code or to_mathml(block or inline, display="block" if block else "inline")


def write_page(folder: Path, title: str) -> Path:
    """`index.html` and a page per executed notebook in a run folder, with the drawing library once beside them."""
    write_text(folder / SCRIPT, get_plotlyjs())
    nothing_from_outside = dict.fromkeys(("mathjax_url", "require_js_url", "jquery_url", "mermaid_js_url"), "")
    exporter = HTMLExporter(preprocessors=[ForThePage], **nothing_from_outside)
    names = []
    for path in sorted(folder.glob("*.ipynb")):
        body, _ = exporter.from_notebook_node(nbformat.read(path, as_version=4), {"metadata": {"name": path.stem}})
        write_text(path.with_suffix(".html"), body.replace("<head>", f'<head><script src="{SCRIPT}"></script>', 1))
        names.append(path.stem)
    metrics = json.loads((folder / "metrics.json").read_text()) if (folder / "metrics.json").exists() else {}
    status = json.loads((folder / "status.json").read_text())
    write_text(folder / "index.html", _index(title, names, metrics, status))
    return folder / "index.html"


STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse }
td { padding: .15rem 1.5rem .15rem 0; border-bottom: 1px solid #e5e5e5 }
td + td { text-align: right; font-variant-numeric: tabular-nums }
small { color: #767676; font-weight: normal }
pre { background: #f6f6f6; padding: 1rem; white-space: pre-wrap }
"""


def _index(title: str, names: list[str], metrics: dict[str, dict], status: dict) -> str:
    sections = []
    for name in names:
        took = status["notebooks"].get(name, {}).get("seconds")
        said = "stopped" if took is None else f"{took:.0f} s"
        rows = "".join(
            f"<tr><td>{html.escape(key)}</td><td>{html.escape(_number(value))}</td></tr>"
            for key, value in metrics.get(name, {}).items()
        )
        sections.append(f'<h2><a href="{name}.html">{name}</a> <small>{said}</small></h2><table>{rows}</table>')
    error = f"<pre>{html.escape(status['error'])}</pre>" if "error" in status else ""
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{html.escape(title)}</title>
<style>{STYLE}</style>
<h1>{html.escape(title)} <small>{status["status"]}</small></h1>{error}{"".join(sections)}</html>
"""


def _number(value: float | int | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
