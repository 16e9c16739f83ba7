"""A sweep: experiments × a grid. Each point is one training in its own folder. The files of `params/sweeps`:

    name: head-matched
    about: Table 3: p-BACH against all-multihead at equal k
    base: [ml20m, taobao]                     # files of params/; [ml20m, letter] changes ml20m by the overlay letter
    grid:
      method: [all-multihead, p-bach]
      k: [8, 16, 32]

Points with the same training are merged: a method with one vector is not trained again for each k, and a point that
another sweep has finished, or whose record is published, is not run again. `serve_by` is a key of the grid, too: its
values are points with one training. `grid` can be a list of grids; points with the first seed come first then.
"""

from __future__ import annotations

import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
import yaml
from pydantic import Field

from bachlib import BachError
from bachlib.evaluate import Evaluation
from bachlib.experiment.notebooks import METRICS, STATUS, folder_of, keys, stages
from bachlib.experiment.published import published
from bachlib.experiment.settings import (
    NAME,
    PARTS,
    SINGLE,
    Experiment,
    checked,
    is_overlay,
    log_at,
    nearest,
    params_file,
    read_experiment,
    read_yaml,
)
from bachlib.experiment.stages import data_name, heads_of, label, measured, point_name
from bachlib.experiment.workers import environment
from bachlib.files import (
    RUN_DIR,
    in_progress,
    only_one,
    output_dir,
    project_root,
    read_json,
    record,
    short_hash,
    write_json,
    write_text,
)
from bachlib.model.methods import METHODS
from bachlib.params import ModelParams, Params, PrepareParams, TrainParams, WorldParams

LOG = "log.txt"  # of a point: what its process printed
FILE = "sweep.yaml"
AXES = {*ModelParams.model_fields, *TrainParams.model_fields} - {"seed", "device", "checkpoint_seconds"}
AXES |= {"serve_by", *PARTS}
VARIES = AXES | {*PrepareParams.model_fields, *WorldParams.model_fields}  # another training, or another evaluation
VARIES |= {"method", "source", "path", "data_seed", "world_d", "world_width"}


class SweepFile(Params):
    """A file of `params/sweeps`."""

    name: str = Field(pattern=NAME)
    about: str = Field("", description="which table or claim of the paper it is for")
    base: list[str] = Field(
        min_length=1, description="experiments, as files of params/ or paths; an overlay changes those before it"
    )
    set: dict[str, Any] = Field({}, description="values that replace those of the experiments, for all points")
    grid: dict[str, list[Any]] | list[dict[str, list[Any]]] = Field(
        min_length=1, description="parameter: its values; or a list of such grids"
    )
    layout: Literal["main", "matched", "data"] = Field(
        "main", description="main: a row per method, best over k; matched: a row per value of `axis`, methods beside "
        "each other; data: what the data sets are like"
    )  # fmt: skip
    axis: str = Field("k", description="of the layout matched")
    baseline: str = Field("all-multihead", description="the method all others are compared with")
    paper: Literal["main", "head-matched", "routing", "global codebook"] | None = Field(
        None, description="the paper's table to put beside ours"
    )

    @property
    def grids(self) -> list[dict[str, list[Any]]]:
        return self.grid if isinstance(self.grid, list) else [self.grid]

    @property
    def varied(self) -> list[str]:
        """The keys of all grids."""
        return [*dict.fromkeys(key for grid in self.grids for key in grid)]


class Point(NamedTuple):
    """One run of a sweep."""

    p: Experiment
    where: dict[str, Any]  # its place in the grid

    @property
    def name(self) -> str:
        return point_name(self.p)

    @property
    def folder(self) -> Path:
        return folder_of(self.p)

    def is_done_here(self) -> bool:
        return _state_here(self).status == "done"


class Sweep(NamedTuple):
    file: SweepFile
    points: list[Point]

    @property
    def folder(self) -> Path:
        """Another base or setting gives another folder."""
        told = [point.p.model_dump(exclude={"name"}) for point in self.points]
        return output_dir("sweeps", f"{self.file.name}-{short_hash(told)}")


def read_sweep(path: str | Path, *, base: list[str] | None = None, more: dict[str, Any] | None = None) -> Sweep:
    """A sweep from its file, its name in params/sweeps, or its folder in outputs/sweeps; every point is checked."""
    path = found_at(Path(path))
    values = read_yaml(path)
    if isinstance(values.get("set") or {}, dict):
        values["set"] = {**(values.get("set") or {}), **(more or {})}
    values["base"] = base or values.get("base")
    file = checked(SweepFile, {"name": path.stem, **values}, str(path))
    file = file.model_copy(update={"base": [_beside(one, path) for one in file.base]})
    for problem in _impossible(file):
        raise BachError(f"{path}: {problem}")
    if isinstance(file.set.get("path"), str):
        file.set["path"] = log_at(file.set["path"], path)
    return Sweep(file, expand(file, path))


def _impossible(file: SweepFile) -> Iterator[str]:
    """Reasons to reject a sweep file."""
    for key, listed in (pair for grid in file.grids for pair in grid.items()):
        if key in file.set:
            yield f"{key} is in the grid; it cannot be set to {file.set[key]!r} for all points"
        if not listed:
            yield f"grid: {key} should have at least one value"
        if key in Experiment.model_fields and key not in VARIES:
            yield f"grid: {key} does not change a training{nearest(key, VARIES)}"
    if file.baseline not in METHODS:
        yield f"baseline: there is no {file.baseline!r}{nearest(file.baseline, METHODS)}"
    if file.axis not in AXES:
        yield f"axis: {file.axis!r} is not a parameter of a model or a training{nearest(file.axis, AXES)}"


def found_at(path: Path) -> Path:
    """The file of a sweep, from its path, its name or its folder."""
    places = [path, path / FILE, project_root() / "params" / "sweeps" / f"{path}.yaml"]
    places.append(output_dir("sweeps", str(path), FILE))
    for place in places:
        if place.is_file():
            return place
    known = sorted(p.stem for p in (project_root() / "params" / "sweeps").glob("*.yaml"))
    raise BachError(f"there is no sweep {path}; params/sweeps has {', '.join(known) or 'none'}")


def is_sweep(path: str | Path) -> bool:
    """Is this a sweep's file, its name in params/sweeps (a run of that name comes first), or its folder?"""
    path = Path(path)
    if path.is_file():
        return path.suffix in (".yaml", ".yml") and "grid" in read_yaml(path)
    if path.is_dir() or output_dir("runs", str(path)).is_dir():
        return (path / FILE).is_file()
    try:
        return found_at(path).is_file()
    except BachError:
        return False


def expand(file: SweepFile, path: Path) -> list[Point]:
    """The points of a sweep in the order of its file (several grids: by seed), each training once."""
    points: dict[str, Point] = {}
    bases = chains(file.base, path)
    places = [dict(zip(grid, chosen, strict=True)) for grid in file.grids for chosen in product(*grid.values())]
    for base, *overlays in bases:
        for where in places:
            more = {**file.set, **where, "notebooks": [SINGLE]}
            try:
                p = read_experiment(base, more, overlays)
                p = p.model_copy(update={"k": heads_of(p), "name": point_name(p)})
            except BachError as error:
                told = ", ".join(f"{key} = {value}" for key, value in where.items())
                raise BachError(f"{path}, at {told}: {error}") from None
            several = {"experiment": "-".join(Path(x).stem for x in (base, *overlays))} if len(bases) > 1 else {}
            place = {"data": label(p), **several} | {key: getattr(p, key) for key in file.varied}
            points.setdefault(p.name, Point(p, place))
    found = list(points.values())
    return sorted(found, key=lambda point: point.p.seed) if len(file.grids) > 1 else found


def chains(bases: Sequence[str], path: Path) -> list[list[str]]:
    """[ml20m, taobao, letter] → [[ml20m, letter], [taobao, letter]]: an overlay changes the experiments before it."""
    found: list[list[str]] = []
    for base in bases:
        try:
            values = read_yaml(params_file(base))
        except BachError as error:
            raise BachError(f"{path}: base: {error}") from None
        if not is_overlay(values):
            found.append([base])
        elif found:
            found = [[*chain, base] for chain in found]
        else:
            raise BachError(f"{path}: base: {base} is an overlay; name an experiment before it, e.g. [ml20m, {base}]")
    return found


def _beside(base: str, path: Path) -> str:
    """An experiment's file beside the sweep's file or in the working folder; else it is a name in params/."""
    found = (place.resolve() for place in (path.parent / base, Path(base)) if os.path.isfile(place))  # of any length
    return str(next(found, base))


def keep(sweep: Sweep) -> Path:
    """Write the sweep's file into its folder, so that `bach report` finds it by name; returns the folder."""
    write_text(sweep.folder / FILE, yaml.safe_dump(sweep.file.model_dump(), sort_keys=False, allow_unicode=True))
    return sweep.folder


class State(NamedTuple):
    status: str  # done, failed, stopped, running, or missing
    seconds: float | None = None
    error: str | None = None


def state(point: Point) -> State:
    """The state of a point. This is the one meaning of *done*: the record of these cells, parameters, log and code is
    in its folder, with the evaluation behind it, made from the data as it is now; or its record is published."""
    now = _state_here(point)
    if now.status not in ("done", "running") and (folder := _published(point)):
        return State("done", read_json(folder / STATUS)["notebooks"][SINGLE]["seconds"])
    return now


def _state_here(point: Point) -> State:
    noted = read_json(point.folder / STATUS)
    stage = noted.get("notebooks", {}).get(SINGLE, {})
    if noted.get("status") == "done":
        key = stage.get("key") == keys(point.p)[SINGLE]
        valid = key and record_in(point.folder) and _is_of_this_data(point.p, point.folder)
        return State("done", stage["seconds"]) if valid else State("missing")
    if noted.get("status") == "running" and not in_progress(point.folder / STATUS):  # its process was killed
        return State("stopped")
    return State(noted.get("status", "missing"), None, noted.get("error"))


def _published(point: Point) -> Path | None:
    folder = published(point)
    return folder if folder and _is_of_this_data(point.p, folder) else None


def record_of(point: Point) -> dict[str, Any]:
    """The numbers of a point that is done."""
    return record_in(results_of(point))


def results_of(point: Point) -> Path:
    """The folder with the results of a point that is done: its own, or its published record."""
    return point.folder if point.is_done_here() else _published(point) or point.folder


def _is_of_this_data(p: Experiment, folder: Path) -> bool:
    path = folder / "evaluation-test.json"
    known = read_json(path).get("protocol", {}).get("content_hash")
    data = read_json(output_dir("data", data_name(p), "meta.json")).get("content_hash")
    return path.exists() and (known is None or data is None or known == data)  # None: damaged, which loading reports


def record_in(folder: Path) -> dict[str, Any]:
    return read_json(folder / METRICS).get(SINGLE, {})


def run_here(point: Point) -> None:
    """Train and evaluate a point in this process: what `bach sweep` does by executing the notebook `single`."""
    start, noted = time.perf_counter(), {"status": "stopped"}
    point.folder.mkdir(parents=True, exist_ok=True)
    with only_one(point.folder / STATUS):
        try:
            with environment(**{RUN_DIR: str(point.folder)}):
                record(SINGLE, measured(point.p).record)
            stage = {"seconds": round(time.perf_counter() - start, 1), "key": keys(point.p)[SINGLE]}
            noted = {"status": "done", "notebooks": {SINGLE: stage | {"values": stages(point.p)[SINGLE]}}}
        except Exception as error:
            noted = {"status": "failed", "failed": SINGLE, "error": f"{type(error).__name__}: {error}"[:2000]}
            raise
        finally:
            write_json(point.folder / STATUS, noted)


def results(points: Sequence[Point]) -> tuple[pd.DataFrame, dict[str, Evaluation]]:
    """A row per point: data, method, its place in the grid, status (done, failed, stopped, running, missing), seconds,
    error, log, the numbers of its record; and the evaluations of the points that are done."""
    rows, found = {}, {}
    for point, data in zip(points, data_labels(points), strict=True):
        now = state(point)
        try:
            if now.status == "done":
                found[point.name] = Evaluation.load(results_of(point))
        except BachError as damaged:
            now = State("failed", None, str(damaged))
        log = f"runs/{point.name}/{LOG}" if (point.folder / LOG).exists() else None
        means = found[point.name].means | record_of(point) if point.name in found else {}
        where = {key: "none" if value is None else value for key, value in point.where.items()}
        rows[point.name] = {**where, "data": data, "method": point.p.method, **now._asdict(), "log": log, **means}
    table = pd.DataFrame.from_dict(rows, orient="index")
    return table[[*dict.fromkeys(["data", "method", *table.columns])]], found


def data_labels(points: Sequence[Point]) -> list[str]:
    """The name of each point's data; with a hash if one label stands for several data sets."""
    known = defaultdict(set)
    for point in points:
        known[label(point.p)].add(data_name(point.p))
    return [label(point.p) if len(known[label(point.p)]) == 1 else data_name(point.p) for point in points]


def data_sizes(points: Sequence[Point]) -> dict[str, dict[str, int]]:
    """Users, items and windows of each data set that is prepared."""
    names = dict(zip(data_labels(points), (data_name(point.p) for point in points), strict=True))
    return {data: read_json(output_dir("data", name, "meta.json")).get("counts", {}) for data, name in names.items()}
