"""The package's own source in a notebook: the lines that implement an equation, read when the cell runs."""

from __future__ import annotations

import inspect
from textwrap import dedent
from typing import Any

from IPython.display import Markdown

from bachlib import BachError


def source_of(*objects: Any, start: str = "", stop: str = "") -> Markdown:
    """The source of functions, methods, classes or modules as one block of Python.

    `start` and `stop` show a part of a longer text: from the first line that contains `start` to the next line that
    contains `stop`. The result is Markdown, which JupyterLab, GitHub and the offline page all highlight.
    """
    blocks, place = [], ""
    for one in objects:
        lines = inspect.getsource(one).splitlines()
        if start or stop:
            lines = _part(lines, start, stop, getattr(one, "__name__", str(one)))
        owner = getattr(one, "__qualname__", "").rpartition(".")[0]  # the class of a method
        file = inspect.getmodule(one).__name__.replace(".", "/") + ".py"
        if place != (place := f"{file}, class {owner}" if owner else file):
            blocks.append(f"# {place}")
        blocks.append(dedent("\n".join(lines)) + "\n")
    return Markdown("```python\n" + "\n".join(blocks).rstrip() + "\n```")


def _part(lines: list[str], start: str, stop: str, name: str) -> list[str]:
    first = next((n for n, line in enumerate(lines) if start in line), len(lines))
    last = next((n for n, line in enumerate(lines[first:], first) if stop in line), None)
    if last is None:
        raise BachError(f"the source of {name} has no part from {start!r} to {stop!r}")
    return lines[first : last + 1 if stop else len(lines)]
