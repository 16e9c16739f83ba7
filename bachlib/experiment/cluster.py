"""The runs of a sweep, each in a process of its own: on this machine, or on an existing Dask cluster.

A run is `bach run <folder>/params.yaml` with its output in <folder>/log.txt. Its standard input is a leash: a pipe that
closes when whoever started it is gone, however that came about, and then the run ends, too; what was trained until then
is kept, and the next call goes on from there.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bachlib import BachError
from bachlib.experiment.notebooks import PARAMS, STATUS, as_yaml
from bachlib.experiment.sweep import Point
from bachlib.files import code_hash, output_dir, read_json, write_text

LEASH = "BACH_LEASH"
LOG = "log.txt"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")


class Outcome(NamedTuple):
    status: str  # done or failed
    seconds: float
    error: str | None = None


class Task(NamedTuple):
    """A run as plain values, so that it can go to another machine."""

    name: str
    params: str
    threads: int
    outputs: str
    data: str | None  # where the logs are, unless that machine says otherwise
    code: str  # what gives these numbers


def task_of(point: Point, threads: int) -> Task:
    logs = os.environ.get("BACH_DATA_DIR")
    return Task(point.name, as_yaml(point.p), threads, str(output_dir()), logs, code_hash())


_running: set[subprocess.Popen] = set()
_starting = threading.Lock()  # nothing is started between "let go" and the end
_let_go = threading.Event()


def perform(task: Task) -> Outcome:
    """Run a point to its end; a process that is lost (killed, out of memory) gets a second try."""
    if task.code != code_hash():
        return Outcome("failed", 0.0, f"{platform.node()} has another version of bachlib's code: {code_hash()}")
    folder = Path(task.outputs) / "runs" / task.name
    write_text(folder / PARAMS, task.params)
    start, code = time.monotonic(), 0
    for attempt in (1, 2):
        code = _process(task, folder, attempt)
        if code >= 0:
            break
    seconds = time.monotonic() - start
    if code == 0:
        return Outcome("done", seconds)
    noted = read_json(folder / STATUS)
    lost = f"the process was lost (signal {-code})" if code < 0 else None
    return Outcome("failed", seconds, lost or noted.get("error") or f"see {folder / LOG}")


def _process(task: Task, folder: Path, attempt: int) -> int:
    """`bach run` of the point as a process on a leash; returns how it ended."""
    variables = {name: str(task.threads) for name in THREADS} | {LEASH: "1", "BACH_OUTPUT_DIR": task.outputs}
    if task.data and not os.environ.get("BACH_DATA_DIR"):
        variables["BACH_DATA_DIR"] = task.data
    around = {**os.environ, **variables}
    around.pop("MALLOC_TRIM_THRESHOLD_", None)  # Dask's workers set it; a training is a third slower with it
    command = [sys.executable, "-m", "bachlib.cli", "run", str(folder / PARAMS), "--no-report"]
    with (folder / LOG).open("a") as log:
        log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')}, try {attempt}, {task.threads} threads\n")
        log.flush()
        with _starting:
            if _let_go.is_set():
                return 143
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=around,
                start_new_session=True,  # Ctrl-C is for the sweep, which then lets go of the leash
            )  # fmt: skip
            _running.add(process)
    try:
        return process.wait()
    finally:
        _running.discard(process)


def on_leash() -> None:
    """End this process when the one that started it is gone; the kernel notices and ends by itself."""
    if os.environ.get(LEASH):
        os.environ.pop(LEASH)  # not for those we start

        def hold() -> None:
            while os.read(0, 1024):
                pass
            os._exit(143)

        threading.Thread(target=hold, daemon=True).start()


def let_go() -> None:
    """Close the leash of every run of this process and wait until they are gone."""
    with _starting:
        _let_go.set()
        for process in list(_running):
            process.stdin.close()
    for process in list(_running):
        process.wait(20)


# ------------------------------------------------------------------------------------------------------ where it runs


def local_workers(points: int, workers: int | None, threads: int | None) -> tuple[int, int]:
    """How many runs at a time, and threads for each: small models gain nothing from more threads, so runs come first.

    With a GPU one run at a time has it.
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers is None:
        workers = 1 if torch.cuda.is_available() else max(1, min(points, cores // (threads or 1)))
    return workers, threads or max(1, cores // workers)


@contextmanager
def here(workers: int) -> Iterator[tuple[Executor, int]]:
    """This machine, and how many runs it takes at a time."""
    pool = ThreadPoolExecutor(workers)
    _let_go.clear()
    try:
        yield pool, workers
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        let_go()


@contextmanager
def on_dask(address: str) -> Iterator[tuple[Executor, int]]:
    """A cluster, and how many runs it takes at a time: as many as its workers have threads."""
    from distributed import Client
    from distributed.comm import parse_address, parse_host_port
    from distributed.comm.registry import get_backend

    try:
        scheme, place = parse_address(address)
        get_backend(scheme), parse_host_port(place)  # a client that never was leaves a traceback behind
        client = Client(address, timeout="5s", set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise BachError(f"no Dask scheduler answers at {address}: {error}") from None
    with client:
        if not (threads := sum(client.ncores().values())):
            raise BachError(f"the Dask cluster at {address} has no workers")
        pool = client.get_executor(pure=False, retries=1)
        try:
            yield pool, threads
        finally:
            pool.shutdown(wait=False)  # after Ctrl-C: what has begun ends by itself, and the next call finds it


def through(
    pool: Executor,
    points: Sequence[Point],
    threads: int,
    tell: Callable[[Point | None, Outcome | None], None],
    limit: int,
) -> dict[str, Outcome]:
    """Send the points through a pool; `tell` hears of each twice: when it is handed over and how it ended.

    At most `limit` are handed over at a time, so that what is told as running does run.
    """
    outcomes: dict[str, Outcome] = {}
    waiting, busy = list(points), {}
    while waiting or busy:
        while waiting and len(busy) < limit:
            point = waiting.pop(0)
            busy[pool.submit(perform, task_of(point, threads))] = point
            tell(point, None)
        ended, _ = wait(busy, timeout=1.0, return_when=FIRST_COMPLETED)
        for future in ended:
            point = busy.pop(future)
            outcomes[point.name] = outcome = _outcome(future, point)
            tell(point, outcome)
        if not ended:
            tell(None, None)
    return outcomes


def _outcome(future: Future, point: Point) -> Outcome:
    try:
        outcome = Outcome(*future.result())
    except (Exception, CancelledError) as error:
        return Outcome("failed", 0.0, f"{type(error).__name__}: {error}")
    if outcome.status == "done" and not (point.folder / STATUS).exists():
        why = f"it is done, but {point.folder} is not here: the workers need this outputs folder on a shared disk"
        return Outcome("failed", outcome.seconds, why)
    return outcome
