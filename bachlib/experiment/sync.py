"""The committed notebooks: each .ipynb in line with its .py, executed, and with a static twin of every figure."""

from __future__ import annotations

import tempfile
from pathlib import Path

import jupytext
import nbformat

from bachlib import BachError
from bachlib.experiment.notebooks import execute
from bachlib.experiment.settings import notebook_folder, notebook_names
from bachlib.experiment.workers import environment
from bachlib.files import write_text
from bachlib.show.pictures import add_twins, without_twin


def sync(force: bool = False, only: list[str] | None = None) -> list[str]:
    """Bring every .ipynb in line with its .py and execute those that changed, or all; returns which were executed.

    They run in an outputs folder that is empty at the start, so that what is committed is what a newcomer sees. Every
    figure gets a static twin, also in a notebook that did not change.
    """
    executed = []
    with tempfile.TemporaryDirectory() as empty:
        for name in only or notebook_names():
            target = notebook_folder() / f"{name}.ipynb"
            made = jupytext.read(target.with_suffix(".py"))
            old = nbformat.read(target, as_version=4) if target.exists() else None
            if force or old is None or not same_cells(made, old) or not all_executed(old):
                for number, cell in enumerate(made.cells):
                    cell["id"] = f"{name}-{number}"  # stable, so that a re-execution changes only what changed
                scratch = Path(empty) / f"{name}.ipynb"
                nbformat.write(made, scratch)
                with environment(BACH_OUTPUT_DIR=empty):
                    execute(scratch, scratch, {})
                made = without_traces(nbformat.read(scratch, as_version=4))
                executed.append(name)
            elif not without_twin(old):
                continue
            else:
                made = old
            illustrate(name, made, old)
            write_text(target, nbformat.writes(made) + "\n")
    return executed


def without_traces(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
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
    a, b = ([(c.cell_type, c.source.strip(), c.metadata.get("tags", [])) for c in x.cells] for x in (one, other))
    return a == b


def all_executed(notebook: nbformat.NotebookNode) -> bool:
    code = [cell for cell in notebook.cells if cell.cell_type == "code" and cell.source.strip()]
    return [cell.execution_count for cell in code] == list(range(1, len(code) + 1))


def illustrate(name: str, made: nbformat.NotebookNode, old: nbformat.NotebookNode | None = None) -> None:
    """Give each figure its static twin; without a browser, say how many have none."""
    try:
        add_twins(made, old)
    except BachError as error:
        print(f"{name}: {len(without_twin(made))} figures have no static picture, since {error}")
