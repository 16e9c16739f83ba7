"""Notebooks in batch: papermill executes the notebooks of an experiment into one run folder, one or several at a time.

A notebook that ran to its end is a finished stage. It is used again as long as all that it depends on is the same: its
code cells, its parameters, the log, and the code of the rooms it uses. `status.json` keeps a hash of these.
"""

from __future__ import annotations

import ast
import errno
import logging
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import nbformat
import papermill
import psutil
import yaml
from nbclient.exceptions import DeadKernelError
from papermill.exceptions import PapermillExecutionError

from bachlib import BachError
from bachlib.data.download import on_disk
from bachlib.data.sources import SOURCES
from bachlib.experiment.own import sources
from bachlib.experiment.settings import PARTS, SINGLE, Experiment, notebook_folder
from bachlib.experiment.stages import point_name
from bachlib.experiment.workers import AS_WITHOUT_DASK, THREADS, call, cluster, environment, local_workers
from bachlib.files import (
    RUN_DIR,
    code_hash,
    forget,
    only_one,
    output_dir,
    read_json,
    short_hash,
    versions,
    write_json,
    write_text,
)
from bachlib.params import ModelParams, PrepareParams, TrainParams, WorldParams

ABOUT_DATA = {*PrepareParams.model_fields, *WorldParams.model_fields, "path", "data_seed", "world_d", "world_width"}
ABOUT_DATA -= {"d", "width", "seed"}  # these names mean the model and the training
METRICS, STATUS, PARAMS = "metrics.json", "status.json", "params.yaml"
GB = 1.1  # of memory: the peak of a notebook on the planted world. The tables of a large log come on top
LAYERS = ["model", "rank", "train", "evaluate", "serve"]  # rooms; each stands on those before it


def folder_of(p: Experiment) -> Path:
    """The run folder of an experiment. A single training shares the folder of its weights (see `point_name`)."""
    if p.notebooks == [SINGLE]:
        return output_dir("runs", point_name(p))
    return output_dir("runs", f"{p.name}-{short_hash(p.model_dump())}")


def run(p: Experiment, *, fresh: bool = False, report: bool = True, workers: int | None = 1) -> Path:
    """Execute the notebooks of an experiment; returns the run folder with its report.

    `workers`: notebooks at the same time, each with its share of the cores; None: two, or one with a GPU. Notebooks
    that want the same training wait for each other. If a cell fails, the run stops. The partial notebook is kept, and
    the status names it.
    """
    folder = folder_of(p)
    folder.mkdir(parents=True, exist_ok=True)
    with only_one(folder / STATUS):
        write_text(folder / PARAMS, as_yaml(p))
        write_json(folder / "environment.json", versions())
        done = {} if fresh else finished(p, folder)
        _clear(folder, keep=done)
        status: dict[str, Any] = {"status": "running", "notebooks": done}
        name = p.notebooks[0]
        try:
            for name in done:
                print(f"{name:<16} unchanged", flush=True)
            todo = {name: values for name, values in stages(p).items() if name not in done}
            write_json(folder / STATUS, status)
            for name, seconds in _executed(todo, folder, workers):
                took = seconds()
                print(f"{name:<16} {took:.0f} s", flush=True)
                status["notebooks"][name] = {"seconds": took, "values": todo[name], "key": keys(p)[name]}
                write_json(folder / STATUS, status)
            status["status"] = "done"
        except BaseException as error:
            status |= {"status": "failed", "failed": name, "error": f"{type(error).__name__}: {error}"[:2000]}
            if isinstance(error, KeyboardInterrupt):
                status |= {"status": "stopped"}
            raise
        finally:
            write_json(folder / STATUS, status)
            if report:
                # after a failure that error is the one to show, not one of the report
                with suppress(*(() if status["status"] == "done" else (Exception,))):
                    _write_report(folder)
    return folder


def _executed(
    todo: dict[str, dict[str, Any]], folder: Path, workers: int | None
) -> Iterator[tuple[str, Callable[[], float]]]:
    """The notebooks in the order in which they end; the call gives the seconds of one, or raises what went wrong."""
    workers, threads = local_workers(min(2, len(todo)), workers, None)
    if workers == 1 or len(todo) < 2:
        yield from ((name, partial(execute_stage, name, values, folder)) for name, values in todo.items())
        return
    from distributed import as_completed

    shares = {name: os.environ.get(name, str(threads)) for name in THREADS}
    with environment(**shares), cluster(None, workers) as client:
        futures = {}
        for name, values in todo.items():
            asked = f"{__name__}.execute_stage", name, values, folder
            futures[client.submit(call, *asked, bar=False, key=f"{name}-{time.time_ns()}")] = name
        yield from ((futures[future], future.result) for future in as_completed(futures, loop=client.loop))


def execute_stage(name: str, values: dict[str, Any], folder: Path, bar: bool = True) -> float:
    """Execute one notebook of a run; returns the seconds it took."""
    start = time.perf_counter()
    with environment(**{RUN_DIR: str(folder), **AS_WITHOUT_DASK}):
        source, target = notebook_folder() / f"{name}.ipynb", folder / f"{name}.ipynb"
        execute(source, target, values, lessons=is_as_written(name, values), bar=bar)
    return round(time.perf_counter() - start, 1)


def _write_report(folder: Path) -> None:
    from bachlib.experiment.report import report  # late: it imports this module

    report(folder)


def as_yaml(p: Experiment) -> str:
    """The parameters that were set, as a file that `read_experiment` reads."""
    chosen = {"name", "notebooks"} | p.model_fields_set
    return yaml.safe_dump({key: value for key, value in p.model_dump().items() if key in chosen}, sort_keys=False)


def stages(p: Experiment) -> dict[str, dict[str, Any]]:
    """Notebook → the parameters it is run with.

    A notebook about data (it has a parameter `source`) also takes what was set for the data, and one that trains (it
    has `epochs`) everything that was set. Notebooks about formulas keep their own values.
    """
    found = {}
    for name in p.notebooks:
        known = _parameters_of(name)
        more = p.model_fields_set if "epochs" in known else p.model_fields_set & ABOUT_DATA
        wanted = {*known, *more} - {"name", "notebooks"} if "source" in known else set()
        found[name] = {key: value for key, value in p.model_dump().items() if key in wanted}
    return found


@lru_cache
def _parameters_of(name: str) -> dict[str, Any]:
    """The parameters of a notebook with their own values."""
    found = papermill.inspect_notebook(str(notebook_folder() / f"{name}.ipynb"))
    return {key: ast.literal_eval(one["default"]) for key, one in found.items()}


def is_as_written(name: str, values: dict[str, Any]) -> bool:
    """Does a notebook run on its own data with its own parameters? Only then do its texts about results apply."""
    own = _parameters_of(name)
    if "source" not in own:
        return not values
    decide = {*own, *ABOUT_DATA, *ModelParams.model_fields, *TrainParams.model_fields, *PARTS}  # what results depend on
    asked, usual = (Experiment(**chosen).model_dump(include=decide) for chosen in ({**own, **values}, own))
    return asked == usual


def keys(p: Experiment) -> dict[str, str]:
    """Notebook → a hash of all that its outcome depends on."""
    found: dict[str, str] = {}
    for name, values in stages(p).items():
        inputs = {"code": code_hash(code_of(name)), "cells": _cells(name), "values": values}
        if "source" in values:
            inputs |= {"log": _log(p)}
        if told := sources(p):
            inputs |= {"own": told}
        if _has_lessons(name) and not is_as_written(name, values):
            inputs |= {"lessons": False}
        found[name] = short_hash(inputs)
    return found


def code_of(name: str) -> tuple[str, ...]:
    """The parts of the package that a notebook depends on, by its imports.

    It depends on the rooms it imports and on those that they stand on. Pictures (`show`), measurements (`bench`) and
    the readers of logs (`data`) count only if the notebook itself imports them. `experiment` stands for the trainings
    and evaluations behind it.
    """
    rooms = {room for cell in _cells(name) for room in re.findall(r"^\s*(?:from|import) bachlib\.(\w+)", cell, re.M)}
    rooms |= {"evaluate"} if "experiment" in rooms else set()
    last = max((LAYERS.index(room) for room in rooms if room in LAYERS), default=-1)
    data = ("data",) if "data" in rooms else ("data/dataset.py", "data/windows.py") if last > 0 else ()
    return (*LAYERS[: last + 1], *data, *sorted(rooms & {"show", "bench"}))


@lru_cache
def _has_lessons(name: str) -> bool:
    notebook = nbformat.read(notebook_folder() / f"{name}.ipynb", as_version=4)
    return len(without_lessons(notebook).cells) < len(notebook.cells)


@lru_cache
def _cells(name: str) -> list[str]:
    notebook = nbformat.read(notebook_folder() / f"{name}.ipynb", as_version=4)
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def _log(p: Experiment) -> list[Any]:
    """The files of the raw log with size and time of change; nothing for the planted world or a log not yet fetched."""
    path = Path(p.path).expanduser() if p.path else (on_disk(SOURCES[p.source]) if p.source != "planted" else None)
    if path is None or not path.exists():
        return [p.path]
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    return [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files if file.is_file()]


def finished(p: Experiment, folder: Path | None = None) -> dict[str, Any]:
    """The finished stages of an experiment that are still valid."""
    folder = folder or folder_of(p)
    noted, records = read_json(folder / STATUS).get("notebooks", {}), read_json(folder / METRICS)
    return {
        name: noted[name]
        for name, key in keys(p).items()
        if noted.get(name, {}).get("key") == key and name in records and (folder / f"{name}.ipynb").exists()
    }


def _clear(folder: Path, keep: dict[str, Any]) -> None:
    """Remove the files of stages that will be executed again."""
    for old in [*folder.glob("*.ipynb"), *folder.glob("*.html")]:
        if old.stem not in keep:
            old.unlink(missing_ok=True)
    forget(folder / METRICS, keep)


def execute(
    source: Path,
    target: Path,
    values: dict[str, Any],
    cwd: Path | None = None,
    *,
    lessons: bool = True,
    bar: bool = True,
) -> None:
    """Execute one notebook with papermill. A kernel that dies is started once more; a failing cell is a clear error.

    `cwd`: the kernel's working folder [default: the folder of the notebooks]. lessons=False leaves out the texts tagged
    `lesson`: findings and exercises that are about the data and the parameters the notebook was written with. bar: show
    the progress in a terminal.
    """
    name = source.stem
    if not lessons:
        write_text(target, nbformat.writes(without_lessons(nbformat.read(source, as_version=4))))
        source = target
    form = {"desc": name, "bar_format": "{desc:<16} {n_fmt:>3}/{total_fmt} cells  {elapsed}", "leave": False}
    logging.getLogger("papermill").setLevel(logging.CRITICAL)  # parameters are checked, and errors told, by us
    for last in (False, True):
        try:
            papermill.execute_notebook(
                str(source),
                str(target),
                parameters=values,
                kernel_name="python3",
                cwd=str(cwd or notebook_folder()),
                progress_bar=form if bar and sys.stderr.isatty() else False,
                store_widget_state=False,
                extra_arguments=["--log-level=CRITICAL"],  # ipykernel also tells of TCP at its start and of its own end
            )
            return
        except (DeadKernelError, RuntimeError, OSError) as error:
            at_start = str(error).startswith("Kernel died before") or getattr(error, "errno", None) == errno.ENOMEM
            if not (at_start or isinstance(error, DeadKernelError)):
                raise
            if last:
                what = "could not be started" if at_start else "was lost twice"
                kept = "" if at_start else f"\nThe partial notebook is {target}"
                raise BachError(f"{name}: the kernel {what} ({error}). {_memory()}{kept}") from None
            print(f"{name}: the kernel was lost; once more", flush=True)
        except PapermillExecutionError as error:
            raise BachError(
                f"{name}, cell {error.cell_index}: {error.ename}: {error.evalue}\nThe partial notebook is {target}"
            ) from None


def _memory() -> str:
    free = psutil.virtual_memory().available / 1e9
    needed = f"a notebook needs about {GB} GB, more with a large log, and {free:.1f} GB are free now"
    return f"Most often memory is short: {needed}. Close other programs, or run one at a time (--workers 1)"


def without_lessons(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """The notebook without its texts tagged `lesson`; its code stays."""
    left = [c for c in notebook.cells if c.cell_type == "code" or "lesson" not in c.metadata.get("tags", [])]
    return nbformat.from_dict({**notebook, "cells": left})
