"""The README's pictures: figures of the executed notebooks as PNG, and what they are made of, to notice changes.

A cell tagged `picture-NAME` gives `notebooks/pictures/NAME.png`. PNGs need a Chrome or Chromium, the rest does not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import nbformat
import plotly.graph_objects as go

from bachlib import BachError

PLOTLY = "application/vnd.plotly.v1+json"
TAG = "picture-"


def pictures(folder: Path) -> dict[str, dict[str, Any]]:
    """The tagged figures of the executed notebooks in a folder: name → plotly JSON."""
    found = {}
    for path in sorted(folder.glob("*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            for tag in cell.metadata.get("tags", []):
                if tag.startswith(TAG):
                    drawn = [o["data"][PLOTLY] for o in cell.get("outputs", []) if PLOTLY in o.get("data", {})]
                    if len(drawn) != 1:
                        raise BachError(f"{path.name}: a cell tagged {tag} should show one figure, not {len(drawn)}")
                    found[tag.removeprefix(TAG)] = drawn[0]
    return found


def summary(figure: dict[str, Any]) -> dict[str, Any]:
    """What a figure is made of: title, axes, kinds and names of its traces. Numbers, and the words after a head's
    number, are what a training finds out, and are left out."""
    layout = figure["layout"]
    axes = {name: _told(axis) for name, axis in layout.items() if re.fullmatch(r"[xyz]axis\d*", name)}
    return {
        "title": _told(layout),
        "axes": {name: title for name, title in axes.items() if title},
        "traces": [[trace["type"], trace.get("mode", ""), _words(trace.get("name", ""))] for trace in figure["data"]],
    }


def _told(part: dict[str, Any]) -> str:
    title = part.get("title") or {}
    return _words(title if isinstance(title, str) else title.get("text") or "")


def _words(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", text.split(" · ")[0])


def write(folder: Path) -> list[Path]:
    """Render the tagged figures of a folder of notebooks into its `pictures/`; returns the files."""
    (folder / "pictures").mkdir(exist_ok=True)
    made = []
    for name, figure in pictures(folder).items():
        path = folder / "pictures" / f"{name}.png"
        drawn = go.Figure({key: figure[key] for key in ("data", "layout")}, skip_invalid=True)
        try:
            drawn.write_image(path, scale=1.5)
        except (RuntimeError, ValueError) as error:  # kaleido says so when there is no browser
            raise BachError(
                f"{path.name} cannot be drawn: {error}. PNGs need Chrome or Chromium (bach doctor)"
            ) from None
        made.append(path)
    return made
