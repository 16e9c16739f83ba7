"""The committed notebooks: each .ipynb in line with its .py, and executed."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jupytext
import nbformat

from bachlib.experiment.notebooks import environment, execute
from bachlib.experiment.settings import notebook_folder, notebook_names
from bachlib.files import write_text


def sync(force: bool = False, only: list[str] | None = None) -> list[str]:
    """Bring every .ipynb in line with its .py and execute those that changed, or all; returns which those were.

    They run in an outputs folder that is empty at the start, so that what is committed is what a newcomer sees.
    """
    executed = []
    with tempfile.TemporaryDirectory() as empty:
        for name in only or notebook_names():
            target = notebook_folder() / f"{name}.ipynb"
            fresh = jupytext.read(target.with_suffix(".py"))
            old = nbformat.read(target, as_version=4) if target.exists() else None
            if not force and old is not None and same_cells(fresh, old) and all_executed(old):
                continue
            for number, cell in enumerate(fresh.cells):
                cell["id"] = f"{name}-{number}"  # stable, so that a re-execution changes only what changed
            scratch = Path(empty) / f"{name}.ipynb"
            nbformat.write(fresh, scratch)
            with environment(BACH_OUTPUT_DIR=empty):
                execute(scratch, scratch, {})
            write_text(target, nbformat.writes(_without_traces(nbformat.read(scratch, as_version=4))) + "\n")
            executed.append(name)
    return executed


def _without_traces(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Drop what papermill notes about the machine and the moment, so that only results are committed."""
    for key in ("papermill", "widgets", "language_info"):
        notebook.metadata.pop(key, None)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)  # a widget needs its kernel
        cell.metadata = {key: value for key, value in cell.metadata.items() if key == "tags" and value}
    return notebook


def same_cells(one: nbformat.NotebookNode, other: nbformat.NotebookNode) -> bool:
    """Do two notebooks hold the same cells, sources and tags? (`jupytext --test` says yes to everything.)"""

    def content(notebook: nbformat.NotebookNode) -> list[tuple]:
        return [(c.cell_type, c.source.strip(), tuple(c.metadata.get("tags", []))) for c in notebook.cells]

    return content(one) == content(other)


def all_executed(notebook: nbformat.NotebookNode) -> bool:
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    return [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
