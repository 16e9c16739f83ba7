"""`bach sweep`: the points of a sweep on a Dask cluster, either one of this machine's processes or an existing one.

A worker executes the notebook `single` of a point in a kernel, with all output in the point's log.txt. If the sweep
dies, Dask ends its workers, and a kernel ends when its worker is gone: nothing keeps running. A training that was cut
off is resumed by the next call. Dask runs a point again if its worker is lost.
"""

from __future__ import annotations

import math
import os
import platform
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from distributed import Client, as_completed
from tqdm import tqdm

from bachlib import BachError
from bachlib.experiment import estimate
from bachlib.experiment.notebooks import PARAMS, STATUS, as_yaml, run
from bachlib.experiment.settings import read_experiment
from bachlib.experiment.stages import data_name, point_name, prepared
from bachlib.experiment.sweep import LOG, Point, Sweep, keep, state
from bachlib.experiment.workers import AS_WITHOUT_DASK, THREADS, call, cluster, environment, local_workers
from bachlib.files import code_hash, output_dir, write_text


class Outcome(NamedTuple):
    status: str  # done or failed
    seconds: float
    error: str | None = None


def run_sweep(
    sweep: Sweep, *, workers: int | None = None, threads: int | None = None, dask: str | None = None
) -> dict[str, Outcome]:
    """Run the points of a sweep that are not done; returns the outcome of every point."""
    folder, known = keep(sweep), {}
    for point in sweep.points:
        if (now := state(point)).status == "done":
            known[point.name] = Outcome("done", now.seconds or 0.0)
    missing = [point for point in sweep.points if point.name not in known]
    if not missing:
        return known
    workers, threads = (workers, threads or 1) if dask else local_workers(len(missing), workers, threads)
    with cluster(dask, workers) as client:
        limit = len(client.scheduler_info(n_workers=-1)["workers"])  # a worker runs one point at a time
        print(f"{folder.name}: {len(known)} done, {len(missing)} to run, {limit} at a time → {folder}", flush=True)
        for p in {data_name(point.p): point.p for point in missing}.values():
            prepared(p)  # once and here: machines that share a disk do not see each other's locks
        return known | _through(client, sweep.points, missing, threads, limit)


def _through(
    client: Client, points: Sequence[Point], missing: Sequence[Point], threads: int, limit: int
) -> dict[str, Outcome]:
    """Send the missing points to the cluster; one line per point that ends, and a bar in a terminal."""
    futures = {}
    for point in missing:
        asked = f"{__name__}.perform", _task(point, threads)
        futures[client.submit(call, *asked, key=f"{point.name}-{time.time_ns()}")] = point
    outcomes: dict[str, Outcome] = {}
    before = len(points) - len(missing)
    with tqdm(total=len(points), initial=before, unit="run", disable=not sys.stderr.isatty()) as bar:
        for future in as_completed(futures, loop=client.loop):
            point = futures[future]
            outcomes[point.name] = outcome = _outcome(future, point)
            why = f": {outcome.error.splitlines()[0]}" if outcome.error else ""
            count = f"[{before + len(outcomes)}/{len(points)}]"
            rest = time_left(missing, outcomes, limit)
            bar.write(f"{count} {point.name} {outcome.status} in {spoken(outcome.seconds)}{why}; {rest}")
            sys.stdout.flush()
            bar.update()
    return outcomes


def _outcome(future, point: Point) -> Outcome:
    try:
        outcome = Outcome(*future.result())
    except Exception as error:
        return Outcome("failed", 0.0, f"{type(error).__name__}: {error}")
    if outcome.status == "done" and not (point.folder / STATUS).exists():
        why = f"it is done, but {point.folder} is not here: the workers need this outputs folder on a shared disk"
        return Outcome("failed", outcome.seconds, why)
    return outcome


class Task(NamedTuple):
    """A point as plain values, so that it can go to another machine."""

    name: str
    params: str
    threads: int
    outputs: str
    data: str | None  # the folder of the logs, unless that machine has its own BACH_DATA_DIR
    code: str  # hash of the package's code


def _task(point: Point, threads: int) -> Task:
    logs = os.environ.get("BACH_DATA_DIR")
    return Task(point.name, as_yaml(point.p), threads, str(output_dir()), logs, code_hash())


_one_at_a_time = threading.Lock()  # a worker may have several threads; environment and output are the process's


def perform(task: Task) -> Outcome:
    """Run a point to its end, on a worker."""
    if task.code != code_hash():
        return Outcome("failed", 0.0, f"the code of bachlib on {platform.node()} differs from the code here")
    folder, start = Path(task.outputs) / "runs" / task.name, time.monotonic()
    variables: dict[str, str | None] = dict.fromkeys(THREADS, str(task.threads)) | {"BACH_OUTPUT_DIR": task.outputs}
    variables |= {"BACH_DATA_DIR": os.environ.get("BACH_DATA_DIR") or task.data}
    with _one_at_a_time:
        write_text(folder / PARAMS, task.params)
        with environment(**variables, **AS_WITHOUT_DASK), _output_into(folder / LOG, f"{task.threads} threads"):
            try:
                p = read_experiment(folder / PARAMS)
                if point_name(p) != task.name:
                    raise BachError(f"the modules of your own on {platform.node()} differ from those here")
                run(p, report=False)
            except Exception as error:
                print(error, flush=True)
                return Outcome("failed", time.monotonic() - start, str(error))
    return Outcome("done", time.monotonic() - start)


@contextmanager
def _output_into(log: Path, about: str) -> Iterator[None]:
    """Send all output of this process and of the kernels it starts to the end of a file."""
    kept = {1: os.dup(1), 2: os.dup(2)}
    with log.open("a", encoding="utf-8") as file:
        file.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, {about}\n")
        file.flush()
        try:
            for stream in kept:
                os.dup2(file.fileno(), stream)
            yield
        finally:
            for stream, before in kept.items():
                os.dup2(before, stream)
                os.close(before)


def time_left(points: Sequence[Point], outcomes: dict[str, Outcome], limit: int) -> str:
    """A rough time for the points that have not ended: their estimates, corrected by how the others went."""
    hoped = {point.name: estimate.seconds(point.p) for point in points}
    new = [name for name in outcomes if outcomes[name].status == "done"]
    took, expected = sum(outcomes[name].seconds for name in new), sum(hoped[name] for name in new)
    rest = sum(hoped[point.name] for point in points if point.name not in outcomes)
    if not math.isnan(expected) and expected > 0:
        rest *= took / expected
    return f"{spoken(rest / limit)} left"


def spoken(seconds: float) -> str:
    """95 → "1 min 35 s"."""
    if math.isnan(seconds):
        return "an unknown time"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"


def plan(sweep: Sweep, workers: int | None, threads: int | None) -> str:
    """What `bach sweep` would do: each point with its state and a rough time."""
    lines, rest, missing = [], 0.0, 0
    for point in sweep.points:
        now, about = state(point).status, estimate.seconds(point.p)
        rest, missing = (rest, missing) if now == "done" else (rest + about, missing + 1)
        lines.append(f"  {point.name:<52} {'done' if now == 'done' else f'{now}, about {spoken(about)}'}")
    workers, threads = local_workers(max(1, missing), workers, threads)
    total = f"{len(sweep.points)} runs, {missing} to do; about {spoken(rest / workers)} with {workers} at a time"
    each = f"({threads} threads each). The times are rough estimates."
    return "\n".join([f"{sweep.file.name}: {sweep.file.about}", *lines, f"{total} {each}"])


def failures(points: Sequence[Point], outcomes: dict[str, Outcome]) -> list[str]:
    """The error of each failed point, and where its log is."""
    return [
        f"{point.name}: {outcome.error}\n  log: {point.folder / LOG}"
        for point in points
        if (outcome := outcomes.get(point.name)) and outcome.status == "failed"
    ]
