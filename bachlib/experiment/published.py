"""Published records: what a finished point of a sweep leaves under version control, without weights and without logs.

`bach publish SWEEP` writes `outputs/published/<sweep>/<run>/`: the evaluation with the ranks of every user, from which
intervals and paired tests can be computed again, the history, parameters, seconds, versions and the hash of the code.
A point with a published record counts as done on every machine. Its values and data have to be the same; another
version of the code may have made it, and the record says which. Modules of one's own have to have the same source.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bachlib import BachError
from bachlib.evaluate import Evaluation
from bachlib.experiment.notebooks import METRICS, STATUS, stages
from bachlib.experiment.own import sources
from bachlib.experiment.settings import SINGLE, Experiment
from bachlib.files import code_hash, project_root, read_json, whole_folder, write_json
from bachlib.reading import expect, reading

if TYPE_CHECKING:
    from bachlib.experiment.sweep import Point, Sweep

KEPT = (METRICS, "environment.json", "history.parquet")  # as they are


def published_dir(*parts: str) -> Path:
    """In the clone, also if `BACH_OUTPUT_DIR` names another folder for what is not published."""
    return project_root().joinpath("outputs", "published", *parts)


def publish(sweep: Sweep) -> list[Path]:
    """Copy the records of the points that are done here; returns the new folders."""
    if not (done := [point for point in sweep.points if point.is_done_here()]):
        raise BachError(f"no point of {sweep.file.name} is done here: bach sweep {sweep.file.name} runs them")
    return [_publish(point, published_dir(sweep.file.name, point.name)) for point in done]


def _publish(point: Point, target: Path) -> Path:
    stage = read_json(point.folder / STATUS)["notebooks"][SINGLE]
    values = {key: value for key, value in stage["values"].items() if key != "path"}  # of this machine
    with whole_folder(target) as folder:
        Evaluation.load(point.folder).save(folder, only_ranks=True)
        for path in filter(Path.exists, map(point.folder.joinpath, KEPT)):
            shutil.copyfile(path, folder / path.name)
        told = {"seconds": stage["seconds"], "values": values, "code": code_hash(), "own": sources(point.p)}
        write_json(folder / STATUS, {"status": "done", "notebooks": {SINGLE: told}}, checked=True)
    return target


def published(point: Point) -> Path | None:
    """The folder of the point's published record, made by this or by another sweep."""
    wanted = _comparable(stages(point.p)[SINGLE]), sources(point.p)
    for path in sorted(published_dir().glob(f"*/*/{STATUS}")):  # the name of a run holds the hash of the code
        with reading(path, "restore it, e.g. with git checkout, or remove its folder"):
            stage = read_json(path)["notebooks"][SINGLE]
            if (_comparable(stage["values"]), stage.get("own", {})) == wanted:
                expect(read_json(path.parent / METRICS), {SINGLE: dict}, METRICS)
                return path.parent
    return None


def _comparable(values: dict[str, Any]) -> dict[str, Any]:
    """All parameters; those that a later version added have their defaults."""
    return Experiment(**values).model_dump(exclude={"path", "name", "notebooks"})
