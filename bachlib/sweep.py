"""The notebooks in batch: papermill runs them with the parameters of a file, and a run folder keeps what came out.

A parameter file names the run and, for each notebook, the parameters that differ from the notebook's own:

    name: quickstart
    notebooks:
      03_data: {source: planted}
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jupytext
import nbformat
import papermill
import yaml
from papermill.exceptions import PapermillExecutionError

from bachlib import BachError
from bachlib.records import MODELS, RUN_DIR, canonical_json, output_dir, project_root, short_hash, versions, write_text
from bachlib.show.page import write_pages
from bachlib.show.report import report


def notebook_folder() -> Path:
    return project_root() / "notebooks"


def read_params(path: Path) -> dict[str, Any]:
    """A parameter file, checked: every notebook exists and has each parameter that is set."""
    if not path.exists():
        there = ", ".join(sorted(p.name for p in path.parent.glob("*.yaml")))
        raise BachError(f"{path} does not exist; there are {there or 'none'}")
    try:
        params = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise BachError(f"{path} is not YAML: {error}") from None
    if (
        not isinstance(params, dict)
        or set(params) != {"name", "notebooks"}
        or not isinstance(params["notebooks"], dict)
    ):
        raise BachError(f"{path} should have a name and notebooks: {{notebook: {{parameter: value}}}}")
    for name, values in params["notebooks"].items():
        if not isinstance(values or {}, dict):
            raise BachError(f"{path}: {name} should have {{parameter: value}} and has {values!r}")
        source = notebook_folder() / f"{name}.ipynb"
        if not source.exists():
            raise BachError(f"{path}: there is no notebook {name}; there are {', '.join(notebook_names())}")
        known = list(papermill.inspect_notebook(str(source)))
        if unknown := sorted(set(values or {}) - set(known)):
            raise BachError(f"{path}: {name} has no parameter {', '.join(unknown)}; it has {', '.join(known)}")
    return params


def notebook_names() -> list[str]:
    return sorted(path.stem for path in notebook_folder().glob("*.py"))


def run(path: str | Path) -> Path:
    """Execute every notebook of a parameter file; returns the run folder with its report.

    A cell that fails stops the run: what was executed until then is kept, and the status says which one it was.
    """
    params = read_params(Path(path))
    folder = output_dir("runs", f"{params['name']}-{short_hash(params)}")
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*(folder / name for name in ("metrics.json", MODELS)), *folder.glob("*.ipynb"), *folder.glob("*.html")):
        old.unlink(missing_ok=True)  # of an earlier run of the same parameters
    write_text(folder / "params.yaml", yaml.safe_dump(params, sort_keys=False))
    write_text(folder / "environment.json", canonical_json(versions()))
    status: dict[str, Any] = {"status": "running", "notebooks": {}}
    try:
        for name, values in params["notebooks"].items():
            write_text(folder / "status.json", canonical_json(status))
            start = time.perf_counter()
            with _environment(**{RUN_DIR: str(folder)}):
                _execute(notebook_folder() / f"{name}.ipynb", folder / f"{name}.ipynb", values or {})
            status["notebooks"][name] = {"seconds": round(time.perf_counter() - start, 1)}
        status["status"] = "done"
    except BaseException as error:
        status |= {"status": "failed", "failed": name, "error": f"{type(error).__name__}: {error}"[:2000]}
        raise
    finally:
        write_text(folder / "status.json", canonical_json(status))
        with suppress(*((Exception,) if status["status"] == "failed" else ())):  # the first error is the one to tell
            write_pages(folder)
            report(folder)
    return folder


def _execute(source: Path, target: Path, values: dict[str, Any]) -> None:
    """Run one notebook with papermill; a cell that fails is a clear error, and the notebook as far as it came stays."""
    bar = {"desc": source.stem, "bar_format": "{desc:<16} {n_fmt:>3}/{total_fmt} cells  {elapsed}"}
    try:
        papermill.execute_notebook(
            str(source),
            str(target),
            parameters=values,
            kernel_name="python3",
            cwd=str(notebook_folder()),
            progress_bar=bar,
            store_widget_state=False,
            extra_arguments=["--log-level=ERROR"],  # ipykernel warns at every start that it talks over TCP
        )
    except PapermillExecutionError as error:
        raise BachError(
            f"{source.stem}, cell {error.cell_index}: {error.ename}: {error.evalue}\n"
            f"The notebook as far as it came is {target}"
        ) from None


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for the kernels started inside the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def sync(force: bool = False) -> list[str]:
    """Bring every .ipynb in line with its .py and execute those that changed, or all; returns which those were.

    They run in an empty outputs folder, so that what is committed is what a newcomer sees.
    """
    executed = []
    for name in notebook_names():
        target = notebook_folder() / f"{name}.ipynb"
        fresh = jupytext.read(target.with_suffix(".py"))
        old = nbformat.read(target, as_version=4) if target.exists() else None
        if not force and old is not None and same_cells(fresh, old) and all_executed(old):
            continue
        for number, cell in enumerate(fresh.cells):
            cell["id"] = f"{name}-{number}"  # stable, so that a re-execution changes only what changed
        with tempfile.TemporaryDirectory() as empty:
            scratch = Path(empty) / f"{name}.ipynb"
            nbformat.write(fresh, scratch)
            with _environment(BACH_OUTPUT_DIR=empty):
                _execute(scratch, scratch, {})
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
