"""`bach report SWEEP`: notebook 09 executed for a sweep, as one HTML file in the sweep's folder."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat

from bachlib.experiment.notebooks import environment, execute
from bachlib.experiment.settings import notebook_folder
from bachlib.experiment.sweep import FILE, SweepFile, found_at, keep, read_sweep
from bachlib.files import RUN_DIR, write_text

REPORT = "09_sweep_report"
LESSON = "lesson"  # a cell with this tag is for those who read the notebook, not for a report

# the page of a notebook without its code, which is there for those who want it
LOOK = """<style>body:not(:has(#code:checked)) .jp-CodeCell .jp-Cell-inputWrapper {display: none}
.jp-InputPrompt, .jp-OutputPrompt {display: none !important} main {max-width: 60rem; margin: auto}
.switch {float: right}</style>"""
SWITCH = '<label class="switch"><input type="checkbox" id="code"> code</label>'


def report_sweep(path: str | Path) -> Path:
    """What is known of a sweep; nothing is trained, what is missing is listed."""
    from bachlib.show.document import inline
    from bachlib.show.page import SCRIPT, write_pages

    place, sweep = found_at(Path(path)).resolve(), read_sweep(path)
    folder = place.parent if place.name == FILE else keep(sweep)
    executed = folder / f"{REPORT}.ipynb"
    with environment(**{RUN_DIR: str(folder)}):
        values = {"sweep": str(place), "complete": False}
        execute(notebook_folder() / executed.name, executed, values, cwd=Path.cwd())  # so that paths mean the same
    with tempfile.TemporaryDirectory() as aside:
        nbformat.write(as_report(nbformat.read(executed, as_version=4), sweep.file), Path(aside) / executed.name)
        write_pages(Path(aside))
        page, script = ((Path(aside) / name).read_text(encoding="utf-8") for name in (f"{REPORT}.html", SCRIPT))
    drawing = f'<script src="{SCRIPT}"></script>'
    page = page.replace(drawing, f"<script>{inline(script)}</script>{LOOK}", 1).replace("<main>", f"<main>{SWITCH}", 1)
    write_text(folder / "report.html", page.replace(f"<title>{REPORT}", f"<title>{sweep.file.name}", 1))
    return folder / "report.html"


def as_report(notebook: nbformat.NotebookNode, file: SweepFile) -> nbformat.NotebookNode:
    """The notebook under the sweep's own title and without what is for a lesson."""
    notebook.cells = [cell for cell in notebook.cells if LESSON not in cell.metadata.get("tags", [])]
    title = f"# {file.name}: {file.about}" if file.about else f"# {file.name}"
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(title))
    return notebook
