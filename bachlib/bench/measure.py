"""Measurements: clocks, verdicts on goals, their records, and the bench of preparing.

Ratios are of CPU seconds on one thread, in one process, and what is compared takes turns. A record has the date, the
machine and the threads; `newest` finds the last one of this machine, else the published one.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from threadpoolctl import threadpool_limits

from bachlib.data import Dataset, planted, prepare
from bachlib.data.log_table import connect
from bachlib.data.sources import SOURCES
from bachlib.files import output_dir, project_root, read_json, replacing, versions, write_json


def cpu_seconds(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def in_turns(*works: Callable[[], Any], rounds: int = 5) -> list[float]:
    """The least CPU seconds of each work over some rounds in which they take turns; one more round to warm up."""
    took = [[cpu_seconds(work) for work in works] for _ in range(rounds + 1)]
    return [min(seconds) for seconds in zip(*took[1:], strict=True)]


def best_of(work: Callable[[], Any], times: int = 7) -> float:
    work()  # once to warm up
    return min(cpu_seconds(work) for _ in range(times))


@contextmanager
def threads(n: int) -> Iterator[None]:
    """torch, BLAS and faiss use n threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        with threadpool_limits(n):
            yield
    finally:
        torch.set_num_threads(before)


def both_clocks(works: Mapping[str, Callable[[], Any]], rounds: int = 5) -> dict[str, dict[str, float]]:
    """CPU seconds on one thread (`cpu_s`) and wall seconds on all cores (`wall_s`) of each work.

    Medians of some rounds in which the works take turns, since the pace of a machine changes; one more to warm up.
    """
    found: dict[str, dict[str, float]] = {name: {} for name in works}
    for key, clock, n in (("cpu_s", time.process_time, 1), ("wall_s", time.perf_counter, cores())):
        took: dict[str, list[float]] = {name: [] for name in works}
        with threads(n):
            for _ in range(rounds + 1):
                for name, work in works.items():
                    start = clock()
                    work()
                    took[name].append(clock() - start)
        for name, seconds in took.items():
            found[name][key] = median(seconds[1:])
    return found


def peak_gb() -> float:
    """The peak memory of this process. (On Linux `getrusage` also counts that of the process which started it.)"""
    status = Path("/proc/self/status")
    for line in status.read_text("utf-8").splitlines() if status.exists() else []:
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024 / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)


def in_fresh_process(work: Callable[..., dict[str, Any]], *arguments: Any, **environment: str) -> dict[str, Any]:
    """The result of `work` in a new process with these environment variables, so that peak memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    with patch.dict(os.environ, environment), ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(work, *arguments).result()


def judged(
    name: str, result: dict[str, Any], goals: dict[str, float], at_least: dict[str, float] | None = None
) -> dict[str, Any]:
    """The result with its name, its goals and whether it meets them: upper limits on its keys, and lower ones."""
    lower = at_least or {}
    met = all(result[key] <= goal for key, goal in goals.items()) and all(result[key] >= lower[key] for key in lower)
    return {"name": name, **result, "goals": goals, **({"at_least": lower} if lower else {}), "met": met}


def verdicts(result: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per goal of a result: what, measured, goal, sense (≤, ≥), met, and by what share of the goal it is off."""
    rows = []
    for sense, goals in (("≤", result.get("goals", {})), ("≥", result.get("at_least", {}))):
        for key, goal in goals.items():
            value, sign = result[key], 1 if sense == "≤" else -1
            off = sign * (value - goal) / goal if goal else sign * value  # above 0: missed
            rows.append({"what": key, "measured": value, "goal": goal, "sense": sense, "met": off <= 0, "off": off})
    return rows


def told(result: dict[str, Any]) -> str:
    """The verdicts as a line: "ratio 1.23 (goal ≤ 1.35): met by 9%"."""
    lines = []
    for row in verdicts(result):
        by = f"{abs(row['off']):.0%}" if row["goal"] else f"{abs(row['off']):g}"
        verdict = f"{'met' if row['met'] else '✗ MISSED'}{f' by {by}' if row['off'] else ' exactly'}"
        lines.append(f"{row['what']} {row['measured']:.3g} (goal {row['sense']} {row['goal']:.3g}): {verdict}")
    seen = [f"{key} {result[key]:.3g}" for key in ("cpu_s", "wall_s", "mb", "speedup") if key in result]
    return "; ".join(lines) or ", ".join(seen)


def world(**sizes: int) -> Dataset:
    """A prepared planted world."""
    folder = planted.write_world(**sizes)
    return prepare("planted", folder, output_dir("data", folder.name), quiet=True)


def cores() -> int:
    return os.cpu_count() or 1


def machine() -> dict[str, Any]:
    """The processor, its cores and the versions: what decides the numbers, and nothing that names the machine."""
    told = Path("/proc/cpuinfo")
    lines = told.read_text("utf-8").splitlines() if told.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    return {"cpu": cpu, "cores": cores(), "system": platform.system(), "versions": versions()}


def save(name: str, results: list[dict[str, Any]]) -> Path:
    """Add results to the record outputs/bench/<name>.json. A result replaces an older one of its bench and name; all
    are dropped if they were made on another machine or with other versions."""
    path, here, now = output_dir("bench", f"{name}.json"), machine(), datetime.now(UTC).isoformat(timespec="seconds")
    before = read_json(path)
    known = {_key(row): row for row in before.get("results", [])} if before.get("machine") == here else {}
    known |= {_key(row): row | {"date": now} for row in results}
    record = {"date": now, "machine": here, "threads": {"cpu_s": 1, "wall_s": cores()}, "results": list(known.values())}
    write_json(path, record)
    return path


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row.get("bench"), row["name"]


def newest(*names: str) -> dict[str, Any]:
    """The first of these records that was made on this machine, else the first that is published; empty if none."""
    here = machine()
    for name in names:
        found = read_json(output_dir("bench", f"{name}.json"))
        if found and all(found["machine"][key] == here[key] for key in ("cpu", "cores")):
            return found | {"published": False}
    for name in names:
        if found := read_json(project_root().joinpath("outputs", "published", "bench", f"{name}.json")):
            return found | {"published": True}
    return {}


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
