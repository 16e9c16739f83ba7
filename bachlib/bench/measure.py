"""Measurements as ratios of CPU seconds on one thread: tools, the list of all benches, and the one of preparing."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from bachlib.data import Dataset, planted, prepare
from bachlib.data.log_table import connect
from bachlib.data.sources import SOURCES
from bachlib.files import output_dir, replacing, versions, write_json


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def best_of(work: Callable[[], Any], times: int = 7) -> float:
    work()  # once to warm up
    return min(cpu_seconds(work) for _ in range(times))


def peak_gb() -> float:
    """The peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)


def in_fresh_process(work: Callable[..., dict[str, Any]], *arguments: Any, **environment: str) -> dict[str, Any]:
    """The result of `work` in a new process with these environment variables, so that peak memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, environment), ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(work, *arguments).result()


def judged(name: str, result: dict[str, Any], goals: dict[str, float]) -> dict[str, Any]:
    """The result with its name and goals; every goal is an upper limit on a key of the result."""
    return {"name": name, **result, "goals": goals, "met": all(result[key] <= goal for key, goal in goals.items())}


def world(**sizes: int) -> Dataset:
    """A prepared planted world."""
    folder = planted.write_world(**sizes)
    return prepare("planted", folder, output_dir("data", folder.name), quiet=True)


def save(name: str, results: list[dict[str, Any]]) -> Path:
    path = output_dir("bench", f"{name}.json")
    known = {r["name"]: r for r in json.loads(path.read_text())["results"]} if path.exists() else {}
    known |= {r["name"]: r for r in results}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "versions": versions()}
    write_json(path, {"machine": machine, "results": list(known.values())})
    return path


# shape → (rows, goals: the ratio to a bare scan, memory)
SHAPES = {"movielens-20m": (20_000_000, {"ratio": 4.0, "peak_gb": 3.0}), "taobao": (100_000_000, {"peak_gb": 4.0})}


def bench_prepare(shape: str, rows: int | None = None) -> dict[str, Any]:
    """Prepare a generated log of `rows` rows, compared with a bare scan of the same file, in a new process."""
    usual, goals = SHAPES[shape]
    rows = rows or usual
    path = output_dir("bench", f"{shape}-{rows}.csv")
    if not path.exists():
        print(f"writing {path.name} ({rows:,} rows) …", flush=True)
        write_log(shape, rows, path)
    result = {"rows": rows, "bytes": path.stat().st_size, **in_fresh_process(_prepare, shape, path)}
    return judged(shape, result, goals)


def _prepare(shape: str, path: Path) -> dict[str, Any]:
    out = output_dir("bench", f"prepared-{shape}")
    shutil.rmtree(out, ignore_errors=True)
    scan(shape, path)  # once to warm the file cache
    scans = [cpu_seconds(lambda: scan(shape, path)) for _ in range(3)]
    counts: dict[str, Any] = {}
    took = cpu_seconds(lambda: counts.update(prepare(shape, path, out, threads=1, quiet=True).meta["counts"]))
    shutil.rmtree(out)
    return {"scan_s": scans, "prepare_s": took, "ratio": took / min(scans), "peak_gb": peak_gb(), "counts": counts}


def write_log(shape: str, rows: int, path: Path) -> None:
    """A log of the real one's format and rough shape. Values are hashes of (user, place): the same file everywhere."""
    uniform = "(hash({}) % 1000003) / 1000003.0"
    if shape == "movielens-20m":  # sorted by user, half of the ratings ≥ 4
        users, items, columns = min(138_493, rows // 144), 26_744, "userId, movieId, rating, timestamp"
        values = f"""u AS userId,
            1 + floor({items} * pow({uniform.format("u * 1000003 + j")}, 2.5))::INTEGER AS movieId,
            0.5 + 0.5 * floor(10 * sqrt({uniform.format("u * 7919 + j * 31")}))::INTEGER AS rating,
            789652009 + (hash(u) % 600000000)::BIGINT + j * 37 // 2 AS timestamp"""
    else:  # every item twice or more, no header
        users, items, columns = min(987_994, rows // 101), 4_162_024, "u, i, c, b, t"
        values = f"""u, 1 + floor({items} * pow({uniform.format("u * 1000003 + j // 2 * 7")}, 4))::INTEGER AS i,
            i % 9439 AS c, ['pv','pv','pv','pv','pv','pv','pv','cart','fav','buy'][1 + (hash(u + j) % 10)::BIGINT] AS b,
            1511539200 + (hash(u * 31 + j) % 777600)::BIGINT AS t"""
    header = SOURCES[shape].header is not None
    normal = f"sqrt(-2 * ln(({uniform.format('u * 3')} + 1e-6))) * cos(6.2831853 * {uniform.format('u * 5')})"
    with replacing(path) as partial, connect("4GB", path.parent / "spill") as con:
        con.execute(f"CREATE TABLE users AS SELECT u, exp(0.9 * {normal}) AS w FROM range(1, {users} + 1) r(u)")
        (scale,) = con.execute(f"SELECT {rows} / sum(w) FROM users").fetchall()[0]
        con.execute(f"CREATE TABLE lengths AS SELECT u, 1 + floor(w * {scale})::INTEGER AS n FROM users ORDER BY u")
        con.execute(f"""COPY (SELECT {columns} FROM (SELECT {values} FROM lengths, range(n) s(j)) LIMIT {rows})
            TO '{partial}' (FORMAT csv, HEADER {header})""")


def scan(source_name: str, path: Path) -> None:
    """The bare scan: every field of the file is parsed to its type once and read, nothing is kept."""
    source = SOURCES[source_name]
    types = ", ".join(f"'{name}': '{kind.replace(chr(39), chr(39) * 2)}'" for name, kind in source.columns.items())
    seen = ", ".join(f"max({name})" for name in source.columns)
    with connect("2GB", path.parent / "spill", threads=1) as con:
        con.execute(f"""SELECT {seen} FROM read_csv('{path}', auto_detect = false, delim = '{source.delimiter}',
            header = {source.header is not None}, columns = {{{types}}})""").fetchall()


def _late(module: str, bench: str, *arguments: Any) -> Callable[[], dict[str, Any]]:
    """A bench of another module, which is imported when it runs."""
    return lambda: getattr(import_module(f"bachlib.bench.{module}"), bench)(*arguments)


TRAIN = (("bench_step", 8, 3.5), ("bench_step", 32, 3.0), ("bench_memory",), ("bench_epoch",))
BENCHES: dict[str, list[Callable[[], dict[str, Any]]]] = {
    "prepare": [partial(bench_prepare, shape) for shape in SHAPES],
    "sphere": [_late("model", "bench_sphere", kernel) for kernel in ("power-spherical", "von-mises-fisher")],
    "loss": [_late("model", "bench_loss", k) for k in (8, 32)],
    "train": [_late("model", *bench) for bench in TRAIN] + [_late("step", "bench_products", k) for k in (8, 32)],
    "evaluate": [_late("model", "bench_evaluate")],
    "serve": [],  # `serve.benches` for the chosen sizes
    "show": [_late("serve", "bench_explorer")],
}
