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
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import mpmath
import torch

from bachlib import BachError
from bachlib.data.log_table import connect
from bachlib.data.sources import SOURCES
from bachlib.files import canonical_json, output_dir, replacing, versions, write_text

# shape → (goal for the ratio to a bare scan or None, goal for memory in GB)
SHAPES = {"movielens-20m": (4.0, 3.0), "taobao": (None, 4.0)}
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
        with replacing(path) as partial:
            con.execute(f"""
                COPY (SELECT {columns} FROM (SELECT {values} FROM lengths, range(n) s(j)) LIMIT {rows})
                TO '{partial}' (FORMAT csv, HEADER {header})
            """)


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
    shutil.rmtree(out)
    results.put(
        {"scan_s": scans, "prepare_s": took, "ratio": took / min(scans), "peak_gb": peak_gb(), "counts": counts}
    )


def bench_prepare(shape: str, rows: int | None = None) -> dict[str, Any]:
    """Prepare a generated log of `rows` rows against a bare scan of the same file, in a process of its own."""
    rows = rows or ROWS[shape]
    path = output_dir("bench", f"{shape}-{rows}.csv")
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        print(f"writing {path.name} ({rows:,} rows) …", flush=True)
        write_log(shape, rows, path)
    result = {"rows": rows, "bytes": path.stat().st_size, **in_fresh_process(_measure_prepare, shape, path)}
    ratio_goal, memory_goal = SHAPES[shape]
    goals = {"ratio": ratio_goal, "peak_gb": memory_goal}
    return {"name": shape, **result, **judged(result, {key: goal for key, goal in goals.items() if goal})}


def judged(result: dict[str, Any], goals: dict[str, float]) -> dict[str, Any]:
    """Every goal is an upper limit on a key of the result."""
    return {"goals": goals, "met": all(result[key] <= goal for key, goal in goals.items())}


def best_of(work: Callable[[], Any], times: int = 7) -> float:
    work()  # once to warm up
    return min(cpu_seconds(work) for _ in range(times))


# --------------------------------------------------------------------------------------------------- the sphere


def bench_sphere(kernel_name: str) -> dict[str, Any]:
    """log C_d(κ) against mpmath (d from 2 to 1024, κ from 0 to 10⁴) and its cost against the loss core at k = 32.

    The goal speaks of a whole training step; the loss core is only a part of one, so this is the stricter measure.
    """
    from bachlib.model.sphere import KERNELS

    kernel = KERNELS[kernel_name]
    kappas = torch.cat([torch.zeros(1), torch.logspace(-4, 4, 33)]).double()
    errors = {torch.float64: 0.0, torch.float32: 0.0}
    for d in (2, 3, 4, 8, 16, 32, 63, 64, 128, 256, 512, 1024):
        for dtype in errors:
            given = kappas.to(dtype)
            for kappa, found in zip(given.tolist(), kernel.log_normalizer(given, d).tolist(), strict=True):
                exact = exact_log_normalizer(kernel_name, kappa, d)
                scale = 1 if dtype == torch.float64 else max(1, abs(float(exact)))
                errors[dtype] = max(errors[dtype], abs(float(mpmath.mpf(found) - exact)) / scale)
    torch.set_num_threads(1)
    kappa = (torch.rand(16_384) * 50).requires_grad_()
    cost = best_of(lambda: torch.autograd.grad(kernel.log_normalizer(kappa, 64).sum(), kappa))
    core = _loss_core(512, 32, 64, 2560)
    share = cost / best_of(core["one_pass"], 3)
    result = {"error_float64": errors[torch.float64], "error_float32": errors[torch.float32], "share": share}
    goals = {"error_float64": 1e-10, "error_float32": 5e-7, "share": 0.02}
    return {"name": kernel_name, "seconds": cost, **result, **judged(result, goals)}


def exact_log_normalizer(kernel_name: str, kappa: float, d: int) -> mpmath.mpf:
    """log C_d(κ) to fifty digits."""
    with mpmath.workdps(50):
        kappa, half = mpmath.mpf(kappa), mpmath.mpf(d) / 2
        if kernel_name == "power-spherical":
            beta = half - mpmath.mpf(1) / 2
            gammas = mpmath.loggamma(2 * beta + kappa) - mpmath.loggamma(beta + kappa)
            return gammas - (2 * beta + kappa) * mpmath.log(2) - beta * mpmath.log(mpmath.pi)
        uniform = mpmath.loggamma(half) - mpmath.log(2) - half * mpmath.log(mpmath.pi)
        return uniform - mpmath.log(mpmath.hyp0f1(half, kappa**2 / 4))


# ----------------------------------------------------------------------------------------------------- the loss


def _loss_core(B: int, k: int, d: int, C: int) -> dict[str, Callable[[], Any]]:
    """Value and gradients of Σ γ log p in one pass, by plain autograd, and the three bare matrix products in blocks."""
    from bachlib.model import onepass

    torch.manual_seed(0)
    heads = torch.nn.functional.normalize(torch.randn(B, k, d), dim=-1).requires_grad_()
    items = torch.nn.functional.normalize(torch.randn(C, d), dim=-1).requires_grad_()
    gamma, positive, ids = torch.randn(B, k).softmax(-1), torch.arange(B), torch.randint(0, 20_000, (C,))
    tau = 0.07

    def one_pass() -> None:
        total, _ = onepass.reconstruction(heads, items, positive, gamma, tau, ids)
        torch.autograd.grad(total, (heads, items))

    def plain() -> None:
        log_p = (heads @ items.T / tau).log_softmax(-1).gather(2, positive[:, None, None].expand(-1, k, 1))[..., 0]
        torch.autograd.grad((gamma * log_p).sum(), (heads, items))

    rows, v = heads.detach().view(-1, d), items.detach()
    size = onepass.BLOCK // C
    room, to_rows, to_items = torch.empty(size, C), torch.empty_like(rows), torch.zeros_like(v)

    def bare() -> None:
        for start in range(0, len(rows), size):
            block = rows[start : start + size]
            logits = torch.mm(block, v.T, out=room[: len(block)])
            torch.mm(logits, v, out=to_rows[start : start + size])
            to_items.addmm_(logits.T, block)

    return {"one_pass": one_pass, "plain": plain, "bare": bare}


def _measure_loss(which: str, k: int, results: multiprocessing.Queue) -> None:
    """Time against the bare products, and what the loss adds to the peak memory of a fresh process."""
    torch.set_num_threads(1)
    _loss_core(8, 2, 64, 64)[which]()  # everything loaded
    core = _loss_core(512, k, 64, 2560)
    before = peak_gb()
    core[which]()
    extra = (peak_gb() - before) * 1000
    results.put({"extra_mb": extra, "ratio": best_of(core[which]) / best_of(core["bare"])})


def bench_loss(k: int) -> dict[str, Any]:
    """The loss core at B = 512, C = 2560, d = 64: CPU time against its bare products, memory; autograd beside it."""
    fast, slow = (in_fresh_process(_measure_loss, which, k) for which in ("one_pass", "plain"))
    result = {**fast, "plain_ratio": slow["ratio"], "plain_extra_mb": slow["extra_mb"]}
    return {"name": f"k = {k}", **result, **judged(result, {"ratio": 1.35, "extra_mb": 20.0})}


# ------------------------------------------------------------------------------------------------------ keeping


def peak_gb() -> float:
    """The largest memory this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)


def in_fresh_process(work: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """What `work` puts into the queue it gets last, run in a process of its own, so that peak memory is its own."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    process = spawn.Process(target=work, args=(*arguments, results))
    process.start()
    process.join()
    if process.exitcode:
        raise BachError(f"the measurement stopped with exit code {process.exitcode}; what it said is above")
    return results.get()


BENCHES: dict[str, list[Callable[[], dict[str, Any]]]] = {
    "prepare": [partial(bench_prepare, shape) for shape in SHAPES],
    "sphere": [partial(bench_sphere, kernel) for kernel in ("power-spherical", "von-mises-fisher")],
    "loss": [partial(bench_loss, k) for k in (8, 32)],
    "train": [
        lambda: import_module("bachlib.bench.train").bench_step(8, faster=3.5),
        lambda: import_module("bachlib.bench.train").bench_step(32, faster=3.0),
        lambda: import_module("bachlib.bench.train").bench_memory(),
        lambda: import_module("bachlib.bench.train").bench_epoch(),
    ],
    "evaluate": [lambda: import_module("bachlib.bench.evaluate").bench_evaluate()],
    "serve": [],  # `bench_serve.benches` for the sizes that are asked for
    "show": [lambda: import_module("bachlib.bench.show").bench_explorer()],
}


def save(name: str, results: list[dict[str, Any]]) -> Path:
    path = output_dir("bench", f"{name}.json")
    known = {r["name"]: r for r in json.loads(path.read_text())["results"]} if path.exists() else {}
    known |= {r["name"]: r for r in results}
    machine = {"machine": platform.machine(), "cores": os.cpu_count(), "versions": versions()}
    write_text(path, canonical_json({"machine": machine, "results": list(known.values())}))
    return path
