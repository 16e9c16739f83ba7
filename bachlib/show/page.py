"""Each executed notebook of a run as a web page that works without a network."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import plotly.io as pio
from latex2mathml.converter import convert as to_mathml
from nbconvert import HTMLExporter
from nbconvert.preprocessors import Preprocessor
from plotly.offline import get_plotlyjs

from bachlib.files import write_text

PLOTLY = "application/vnd.plotly.v1+json"
SCRIPT = "plotly.min.js"
WIDGET = "application/vnd.jupyter.widget-view+json"
NEEDS_A_KERNEL = "Sliders need a running kernel: open the notebook with make lab. (The report steers without.)"


FORMULA = re.compile(r"(`[^`]*`)|\$\$(.+?)\$\$|\$(?! )([^$\n]+?)(?<! )\$", re.DOTALL)


class ForThePage(Preprocessor):
    """What a page needs to stand alone: the HTML that draws a figure, and formulas as MathML instead of MathJax."""

    def preprocess_cell(self, cell, resources, index):
        if cell.cell_type == "markdown":
            cell.source = FORMULA.sub(formula, cell.source)
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if WIDGET in data or data.get("text/plain", "").startswith(("VBox(", "HBox(", "Explorer(")):
                data.clear()
                data["text/html"] = f"<em>{NEEDS_A_KERNEL}</em>"
            if PLOTLY in data:
                figure = {key: value for key, value in data[PLOTLY].items() if key in ("data", "layout", "frames")}
                data.clear()
                data["text/html"] = pio.to_html(figure, include_plotlyjs=False, full_html=False, validate=False)
        return cell, resources


def formula(match: re.Match) -> str:
    """A formula as MathML; code that holds a dollar sign stays as it is."""
    code, block, inline = match.groups()
    return code or to_mathml(block or inline, display="block" if block else "inline")


def write_pages(folder: Path) -> None:
    """A page per executed notebook in a run folder, with the drawing library once beside them."""
    write_text(folder / SCRIPT, get_plotlyjs())
    nothing_from_outside = dict.fromkeys(("mathjax_url", "require_js_url", "jquery_url", "mermaid_js_url"), "")
    exporter = HTMLExporter(preprocessors=[ForThePage], **nothing_from_outside)
    for path in sorted(folder.glob("*.ipynb")):
        body, _ = exporter.from_notebook_node(nbformat.read(path, as_version=4), {"metadata": {"name": path.stem}})
        write_text(path.with_suffix(".html"), body.replace("<head>", f'<head><script src="{SCRIPT}"></script>', 1))
