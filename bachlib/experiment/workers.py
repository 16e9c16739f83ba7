"""Processes that execute notebooks: how many, with which variables, on which Dask cluster."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING

from bachlib import BachError

if TYPE_CHECKING:
    from distributed import Client

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMBA_NUM_THREADS")
AS_WITHOUT_DASK = {"MALLOC_TRIM_THRESHOLD_": None}  # Dask sets it; it makes a training a third slower


def local_workers(points: int, workers: int | None, threads: int | None) -> tuple[int, int]:
    """How many points of a sweep, or notebooks, at a time on this machine, and threads for each.

    Small models gain nothing from more threads, so points come first. With a GPU one point at a time has it.
    """
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if workers is None:
        workers = 1 if torch.cuda.is_available() else max(1, min(points, cores // (threads or 1)))
    return workers, threads or max(1, cores // workers)


@contextmanager
def cluster(address: str | None, workers: int | None = None) -> Iterator[Client]:
    """A client of the cluster at an address, or of a cluster of processes on this machine that ends with the block."""
    from distributed import Client, LocalCluster  # late: it takes a second, also in kernels that start no cluster
    from distributed.comm import parse_address, parse_host_port
    from distributed.comm.registry import get_backend

    if address is None:
        with (
            tempfile.TemporaryDirectory(prefix="bach-dask-") as scratch,
            LocalCluster(
                n_workers=workers, threads_per_worker=1, host="127.0.0.1",
                dashboard_address="127.0.0.1:0",  # None takes port 8787, and complains if another sweep has it
                memory_limit=0,  # the memory is used by the kernel, a child of the worker that Dask does not see
                silence_logs="CRITICAL", local_directory=scratch,
            ) as local,
            Client(local, set_as_default=False) as client,
        ):  # fmt: skip
            yield client
        return
    try:
        scheme, place = parse_address(address)
        get_backend(scheme), parse_host_port(place)  # a client with a wrong address leaves a traceback behind
        client = Client(address, timeout="5s", set_as_default=False)
    except (OSError, TimeoutError, ValueError) as error:
        raise BachError(f"no Dask scheduler answers at {address}: {error}") from None
    with client:
        if not client.scheduler_info(n_workers=-1)["workers"]:
            raise BachError(f"the Dask cluster at {address} has no workers")
        yield client


def call(function: str, *args, **options):
    """Call a function by its full name, on a worker.

    Dask keeps a function that it has sent until the interpreter ends, and so all modules that the function knows; one
    of them, duckdb, then prints a page about leaks.
    """
    module, _, name = function.rpartition(".")
    return getattr(import_module(module), name)(*args, **options)


@contextmanager
def environment(**values: str | None) -> Iterator[None]:
    """Environment variables for the kernels started inside the block; None removes one."""
    before = {name: os.environ.get(name) for name in values}

    def put(variables: dict[str, str | None]) -> None:
        for name, value in variables.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    put(values)
    try:
        yield
    finally:
        put(before)
