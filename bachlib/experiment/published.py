"""Published records: what a finished point of a sweep leaves under version control, without weights and without logs.

`bach publish SWEEP` writes `outputs/published/<sweep>/<run>/`: the evaluation with the ranks of every user, from which
intervals and paired tests can be computed again, the history, parameters, seconds, versions and the hash of the code.
It can be called at any time: it adds what is finished and not yet published. A point with a published record counts as
done on every machine. Its values and data have to be the same, its JSON files need their checksums, and modules of
one's own need the same source. Another version of the code may have made it; the record says which.
"""

from __future__ import annotations

import shutil
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.evaluate import Evaluation
from bachlib.evaluate.traits import traits
from bachlib.experiment.notebooks import METRICS, STATUS, stages
from bachlib.experiment.own import sources
from bachlib.experiment.settings import SINGLE, Experiment
from bachlib.experiment.stages import data_name
from bachlib.files import (
    canonical_json,
    code_hash,
    output_dir,
    project_root,
    read_json,
    whole_folder,
    write_json,
    write_table,
)
from bachlib.reading import expect, read_table, reading

if TYPE_CHECKING:
    from bachlib.experiment.sweep import Point, Sweep

KEPT = (METRICS, "environment.json")  # as they are
HISTORY, TRAITS, EVALUATION = "history.parquet", "traits.json", "evaluation-test.json"
RESTORE = "restore it, e.g. with git checkout, or remove its folder"


def published_dir(*parts: str) -> Path:
    """In the clone, also if `BACH_OUTPUT_DIR` names another folder for what is not published."""
    return project_root().joinpath("outputs", "published", *parts)


def publish(sweep: Sweep) -> list[Path]:
    """Copy the records of the points that are done here and not published, in this sweep or another; the new folders.

    A record of other data than the point's does not count; it is replaced. The traits of data that is prepared here are
    published, too.
    """
    _publish_traits(sweep)
    if not (done := [point for point in sweep.points if point.is_done_here()]):
        raise BachError(f"no point of {sweep.file.name} is done here: bach sweep {sweep.file.name} runs them")
    new = [point for point in done if _data_of(published(point)) != _data_of(point.folder)]
    return [_publish(point, published_dir(sweep.file.name, point.name)) for point in new]


def _data_of(folder: Path | None) -> Any:
    return folder and read_json(folder / EVALUATION).get("protocol", {}).get("content_hash")


def _publish_traits(sweep: Sweep) -> None:
    path = published_dir(sweep.file.name, TRAITS)
    known = read_json(path)
    names = dict.fromkeys(data_name(point.p) for point in sweep.points)
    here = {name: output_dir("data", name) for name in names if (output_dir("data", name) / "meta.json").exists()}
    if new := {name: traits(Dataset.load(folder)) for name, folder in here.items() if name not in known}:
        write_json(path, known | new)


def traits_of(point: Point) -> dict[str, float]:
    """The published traits of the point's log; empty if there are none."""
    files, name = sorted(published_dir().glob(f"*/{TRAITS}")), data_name(point.p)
    return next((known[name] for path in files if name in (known := read_json(path))), {})


def _publish(point: Point, target: Path) -> Path:
    stage = read_json(point.folder / STATUS)["notebooks"][SINGLE]
    values = {key: value for key, value in stage["values"].items() if key != "path"}  # of this machine
    with whole_folder(target) as folder:
        Evaluation.load(point.folder).save(folder, compact=True)
        if (point.folder / HISTORY).exists():
            history = read_table(point.folder / HISTORY)
            for name in history.columns.drop(["epoch", "step"]):  # numbers, and a list of numbers per head
                history[name] = history[name].map(np.float32)
            write_table(folder / HISTORY, history, compact=True)
        for path in filter(Path.exists, map(point.folder.joinpath, KEPT)):
            shutil.copyfile(path, folder / path.name)
        told = {"seconds": stage["seconds"], "values": values, "code": code_hash(), "own": sources(point.p)}
        write_json(folder / STATUS, {"status": "done", "notebooks": {SINGLE: told}}, checked=True)
    return target


def published(point: Point) -> Path | None:
    """The folder of the point's published record, made by this or by another sweep."""
    wanted = _comparable(stages(point.p)[SINGLE]), sources(point.p)
    for path in sorted(published_dir().glob(f"*/*/{STATUS}")):  # the name of a run holds the hash of the code
        if _values_of(path, path.stat().st_mtime_ns) == wanted:
            for name, form in ((METRICS, {SINGLE: dict}), (EVALUATION, {"means": dict})):
                with reading(path.parent / name, RESTORE):
                    expect(read_json(path.parent / name, checked=True), form, name)
            return path.parent
    return None


@lru_cache(maxsize=10_000)
def _values_of(path: Path, changed: int) -> tuple[str, dict[str, str]]:
    """Values and own modules of a record, read once as long as the file does not change."""
    with reading(path, RESTORE):
        stage = read_json(path, checked=True)["notebooks"][SINGLE]
        return _comparable(stage["values"]), stage.get("own", {})


def _comparable(values: dict[str, Any]) -> str:
    """All parameters; those that a later version added have their defaults."""
    return canonical_json(Experiment(**values).model_dump(exclude={"path", "name", "notebooks"}))
