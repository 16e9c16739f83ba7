"""Measurements: each goal as a ratio of CPU seconds on one thread, taken in one process, written to a JSON file."""

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
from pathlib import Path
from typing import Any

from bachlib.data.engine import connect
from bachlib.data.sources import SOURCES
from bachlib.records import canonical_json, output_dir, versions, write_text

# shape → (goal for the ratio to a bare scan or None, goal for memory in GB)
GOALS = {"movielens-20m": (4.0, 3.0), "taobao": (None, 4.0)}
ROWS = {"movielens-20m": 20_000_000, "taobao": 100_000_000}


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def write_log(shape: str, rows: int, path: Path) -> None:
    """A log of that many rows in the authors' format, with about the users, items and repeats of the real one.

    Every value is a hash of (user, place), so the same file comes out everywhere.
    """
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
    with connect("4GB", path.parent / "spill") as con:
        con.execute(f"CREATE TABLE users AS SELECT u, exp(0.9 * {normal}) AS w FROM range(1, {users} + 1) r(u)")
        (scale,) = con.execute(f"SELECT {rows} / sum(w) FROM users").fetchall()[0]
        con.execute(f"CREATE TABLE lengths AS SELECT u, 1 + floor(w * {scale})::INTEGER AS n FROM users ORDER BY u")
        partial = path.with_suffix(".partial")
        con.execute(f"""
            COPY (SELECT {columns} FROM (SELECT {values} FROM lengths, range(n) s(j)) LIMIT {rows})
            TO '{partial}' (FORMAT csv, HEADER {header})
        """)
    os.replace(partial, path)


def scan(source_name: str, path: Path) -> None:
    """The bare scan: every field of the file parsed to its type once and looked at, nothing kept."""
    source = SOURCES[source_name]
    types = ", ".join(f"'{name}': '{kind.replace(chr(39), chr(39) * 2)}'" for name, kind in source.columns.items())
    seen = ", ".join(f"max({name})" for name in source.columns)
    with connect("2GB", path.parent / "spill", threads=1) as con:
        con.execute(f"""SELECT {seen} FROM read_csv('{path}', auto_detect = false, delim = '{source.delimiter}',
            header = {source.header is not None}, columns = {{{types}}})""").fetchall()


def _measure_prepare(shape: str, path: Path, results: multiprocessing.Queue) -> None:
    from bachlib.data import prepare

    out = output_dir("bench", f"prepared-{shape}")
    shutil.rmtree(out, ignore_errors=True)
    scan(shape, path)  # once to warm the file cache
    scans = [cpu_seconds(lambda: scan(shape, path)) for _ in range(3)]
    counts: dict[str, Any] = {}
    took = cpu_seconds(lambda: counts.update(prepare(shape, path, out, threads=1, quiet=True).meta["counts"]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
    shutil.rmtree(out)
    results.put({"scan_s": scans, "prepare_s": took, "ratio": took / min(scans), "peak_gb": peak, "counts": counts})


def bench_prepare(shape: str, rows: int | None = None) -> dict[str, Any]:
    """Prepare a generated log of `rows` rows against a bare scan of the same file, in a process of its own."""
    rows = rows or ROWS[shape]
    path = output_dir("bench", f"{shape}-{rows}.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        print(f"writing {path.name} ({rows:,} rows) …", flush=True)
        write_log(shape, rows, path)
    spawn = multiprocessing.get_context("spawn")  # a fresh process, so that the peak memory is prepare's own
    results = spawn.Queue()
    process = spawn.Process(target=_measure_prepare, args=(shape, path, results))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"the measurement stopped with exit code {process.exitcode}")
    result = {"shape": shape, "rows": rows, "bytes": path.stat().st_size, **results.get()}
    ratio_goal, memory_goal = GOALS[shape]
    result["goals"] = {"ratio": ratio_goal, "peak_gb": memory_goal}
    result["met"] = (ratio_goal is None or result["ratio"] <= ratio_goal) and result["peak_gb"] <= memory_goal
    return result


def save(name: str, results: list[dict[str, Any]]) -> Path:
    path = output_dir("bench", f"{name}.json")
    known = {r["shape"]: r for r in json.loads(path.read_text())["results"]} if path.exists() else {}
    known |= {r["shape"]: r for r in results}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "versions": versions()}
    write_text(path, canonical_json({"machine": machine, "results": list(known.values())}))
    return path
