"""Static pictures of the interactive figures in notebooks: a twin in each output, and PNG files for the README.

GitHub, nbviewer and mail programs do not draw plotly figures; they show the twin, a small PNG in the same output. A
cell tagged `picture-NAME` also gives `notebooks/pictures/NAME.png`. Drawing needs Chrome or Chromium; reading does not.
"""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat

from bachlib import BachError

PLOTLY, PNG = "application/vnd.plotly.v1+json", "image/png"
TAG = "picture-"
SHADES = 128  # colours of a twin: enough for all heads and the smooth edges of letters


def draw(figures: Sequence[dict[str, Any]], scale: float = 1.0) -> list[bytes]:
    """Plotly JSON → PNG, of all figures with one browser."""

    async def with_one_browser() -> list[bytes]:
        import kaleido

        async with kaleido.Kaleido(mathjax=False) as browser:  # MathJax would come from the network
            return [await browser.calc_fig(*_drawing(figure, scale)) for figure in figures]

    try:
        with ThreadPoolExecutor(1) as thread:  # a notebook already has an event loop in this one
            return thread.submit(asyncio.run, with_one_browser()).result()
    except (ImportError, RuntimeError, ValueError) as error:  # kaleido says so when it finds no browser
        raise BachError(f"the figures cannot be drawn: {error}. It takes kaleido and Chrome (bach doctor)") from None


def _drawing(figure: dict[str, Any], scale: float) -> tuple[dict[str, Any], dict[str, Any]]:
    layout = figure["layout"].get("template", {}).get("layout", {}) | figure["layout"]
    size = {key: layout[key] for key in ("width", "height") if layout.get(key)}
    return {key: figure[key] for key in ("data", "layout")}, {"format": "png", "scale": scale} | size


def small(png: bytes) -> bytes:
    """The same picture with few colours: about a fifth of the bytes."""
    from PIL import Image

    full, made = Image.open(io.BytesIO(png)).convert("RGB"), io.BytesIO()
    # the default, median cut, gives a thin line the colour of something else
    full.quantize(SHADES, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(made, "PNG", optimize=True)
    return made.getvalue()


def outputs(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    """The data of every output that holds a figure."""
    return [data for cell in notebook.cells for data in _figures(cell)]


def _figures(cell: nbformat.NotebookNode) -> list[dict[str, Any]]:
    return [output["data"] for output in cell.get("outputs", []) if PLOTLY in output.get("data", {})]


def without_twin(notebook: nbformat.NotebookNode) -> list[dict[str, Any]]:
    return [data for data in outputs(notebook) if PNG not in data]


def add_twins(notebook: nbformat.NotebookNode, old: nbformat.NotebookNode | None = None) -> int:
    """Store a static picture beside each figure that has none, and return how many were drawn.

    A figure that is the same in `old` keeps its picture, so that without a browser only new figures stay without one.
    """
    known = [(data[PLOTLY], data[PNG]) for data in outputs(old) if PNG in data] if old is not None else []
    for data in without_twin(notebook):
        if kept := [png for figure, png in known if figure == data[PLOTLY]]:
            data[PNG] = kept[0]
    if missing := without_twin(notebook):
        for data, png in zip(missing, draw([data[PLOTLY] for data in missing]), strict=True):
            data[PNG] = base64.b64encode(small(png)).decode()
    return len(missing)


def pictures(folder: Path) -> dict[str, dict[str, Any]]:
    """The tagged figures of the executed notebooks in a folder: name → plotly JSON."""
    found = {}
    for path in sorted(folder.glob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            for tag in (tag for tag in cell.metadata.get("tags", []) if tag.startswith(TAG)):
                if len(drawn := _figures(cell)) != 1:
                    raise BachError(f"{path.name}: a cell tagged {tag} should show one figure, not {len(drawn)}")
                found[tag.removeprefix(TAG)] = drawn[0][PLOTLY]
    return found


def write(folder: Path) -> list[Path]:
    """Draw the tagged figures of a folder of notebooks into its `pictures/`; returns the files."""
    (folder / "pictures").mkdir(exist_ok=True)
    found = pictures(folder)
    made = [folder / "pictures" / f"{name}.png" for name in found]
    for path, png in zip(made, draw(list(found.values()), scale=1.5), strict=True):
        path.write_bytes(png)
    return made
