"""`bach report`: one HTML file about a training, a run of the notebooks or a sweep, in its folder.

A training is shown by the notebook `report`, a sweep by `09_sweep_report`; a run of the notebooks has executed its own.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from bachlib import BachError
from bachlib.experiment.notebooks import METRICS, PARAMS, STATUS, execute
from bachlib.experiment.published import published_dir
from bachlib.experiment.settings import notebook_folder, read_yaml
from bachlib.experiment.sweep import FILE, Sweep, found_at, is_sweep, keep, read_sweep
from bachlib.experiment.sync import illustrate, without_traces
from bachlib.experiment.workers import environment
from bachlib.files import RUN_DIR, read_json, write_text
from bachlib.reading import expect, plain_name, reading
from bachlib.show.page import page
from bachlib.show.portrait import settings
from bachlib.train.run import find_run

PAGE, ENVIRONMENT = "report.html", "environment.json"


def report(path: str | Path, data: str | Path | None = None) -> Path:
    """Write `report.html`; returns where it is. `path`: a run folder, its name in outputs/runs, or a sweep.

    `data`: the prepared data set of a training, if it is not in outputs/data.
    """
    if data and not (Path(data) / "meta.json").exists():
        raise BachError(f"{data} is not a prepared data set (it has no meta.json)")
    if is_sweep(path):
        return report_sweep(path)
    folder = find_run(path).resolve()
    of_notebooks = (folder / PARAMS).exists() and (folder / STATUS).exists()
    if (folder / "run.json").exists() and not (of_notebooks and read_json(folder / STATUS).get("status") == "failed"):
        values = {"run": str(folder), "data": str(Path(data).resolve()) if data else ""}
        return _written(folder, _executed("report", folder, values, record_in=""), folder.name)
    if not of_notebooks:
        needed = f"run.json (bach train) nor {PARAMS} and {STATUS} (bach run)"
        raise BachError(f"{folder} is not a run: it has neither {needed}")
    if data:
        raise BachError(f"{folder} is a run of notebooks: a data set can be given for a training run only")
    params, status, versions = read_yaml(folder / PARAMS), read_json(folder / STATUS), read_json(folder / ENVIRONMENT)
    with reading(folder / PARAMS):
        expect(params, {"name": str, "notebooks": list})
        paths = {name: folder / f"{plain_name(name)}.ipynb" for name in params["notebooks"]}
    with reading(folder / STATUS):
        first = _summary(params, status, read_json(folder / METRICS))
    chapters = [(name, read_notebook(path)) for name, path in paths.items() if path.exists()]
    lead = "The versions it was made with." if versions else "The versions were not recorded."
    last = _chapter(f"# Environment\n\n{lead}", settings(versions))
    return _written(folder, [("summary", first), *chapters, ("environment", last)], params["name"], lessons=True)


def report_sweep(path: str | Path) -> Path:
    """The results of a sweep; nothing is trained, what is missing is listed."""
    place, sweep = found_at(Path(path)).resolve(), read_sweep(path)
    folder = place.parent if place.name == FILE else keep(sweep)
    values = {"sweep": str(place), "complete": False}
    title = f"{sweep.file.name}: {sweep.file.about}" if sweep.file.about else sweep.file.name
    return _written(folder, _executed("09_sweep_report", folder, values, record_in=str(folder)), title)


def publish_report(sweep: Sweep) -> Path:
    """Execute 09_sweep_report into the folder of a sweep's published records; returns where it is.

    It runs in an empty outputs folder, so that it shows what everybody sees who has the records.
    """
    target = published_dir(sweep.file.name, "09_sweep_report.ipynb")
    with tempfile.TemporaryDirectory() as empty, environment(BACH_OUTPUT_DIR=empty):
        values = {"sweep": sweep.file.name, "complete": False}
        notebook = without_traces(_executed("09_sweep_report", Path(empty), values, record_in="", lessons=False))
    illustrate(target.stem, notebook)
    write_text(target, nbformat.writes(notebook) + "\n")
    return target


def _executed(name: str, folder: Path, values: dict[str, Any], record_in: str, **how: Any) -> nbformat.NotebookNode:
    source, target = (where / f"{name}.ipynb" for where in (notebook_folder(), folder))
    if not source.exists():
        raise BachError(f"{source} does not exist: `bach report` needs the notebooks of the project; run it in a clone")
    with environment(**{RUN_DIR: record_in}):
        execute(source, target, values, cwd=Path.cwd(), **how)  # so that paths mean the same
    return read_notebook(target)


def read_notebook(path: Path) -> nbformat.NotebookNode:
    with reading(path):
        return nbformat.read(path, as_version=4)


def _written(folder: Path, notebooks: Any, title: str, lessons: bool = False) -> Path:
    write_text(folder / PAGE, page(notebooks, title, lessons=lessons))
    return folder / PAGE


def _summary(params: dict[str, Any], status: dict[str, Any], metrics: dict[str, Any]) -> nbformat.NotebookNode:
    """The first chapter of a run of notebooks: what was run, how long it took, and the error that stopped it."""
    done, rows = status.get("notebooks", {}), {}
    for name in params["notebooks"]:
        state = "done" if name in done else "failed" if name == status.get("failed") else "not run"
        took = f"{done[name]['seconds']:.0f} s" if name in done else "–"
        rows[name] = state, took, len(metrics.get(name, {}))
    took = f"{len(done)} of {len(rows)} notebooks in {sum(one['seconds'] for one in done.values()):.0f} s"
    lead = f"A run of the notebooks: {status.get('status')}; {took}. Each notebook is a chapter below."
    if status.get("status") == "failed":
        lead += f" The run failed in `{status.get('failed', 'its first notebook')}`."
    error = [status["error"]] if "error" in status else []
    table = pd.DataFrame.from_dict(rows, "index", columns=["status", "time", "numbers recorded"])
    values = {key: value for key, value in params.items() if key != "notebooks"}
    return _chapter(f"# What was run\n\n{lead}", *error, table, settings(values, "Parameters"))


def _chapter(text: str, *shown: Any) -> nbformat.NotebookNode:
    """A notebook by hand: text, then errors (as strings) and tables."""
    errors = [new_output("error", ename="", evalue=one, traceback=[one]) for one in shown if isinstance(one, str)]
    tables = [new_output("display_data", {"text/html": x._repr_html_()}) for x in shown if not isinstance(x, str)]
    return new_notebook(cells=[new_markdown_cell(text), new_code_cell("", outputs=errors + tables)])
