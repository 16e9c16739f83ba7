"""How cost grows: seconds and memory against heads, candidates, items, users and the length of a history.

Made-up sequences and an untrained model at d = 64: cost depends on sizes, not on what was learnt. The exception is
serving, whose items lie around interests as in `bench.serve`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from bachlib.bench import serve
from bachlib.bench.measure import both_clocks, in_fresh_process
from bachlib.data import Dataset
from bachlib.evaluate import evaluate
from bachlib.model.methods import build
from bachlib.model.towers import ItemTower
from bachlib.model.twotower import TwoTower
from bachlib.params import ModelParams
from bachlib.serve import codebook, exact
from bachlib.serve.twostep import Neighbours, two_step

Work = Callable[[], Any]
USUAL = {"k": 8, "candidates": 2560, "history": 50, "items": 20_000, "users": 500}
BATCH, D, LARGE = 512, 64, 200_000
KS, ITEMS, LENGTHS = (1, 8, 32, 128), (20_000, 200_000, 1_000_000), (13, 25, 50, 100, 200)
GRAPHS = (25_000, 50_000, 100_000)  # building one takes 10 seconds per 100,000 items
SWEEPS: dict[str, dict[str, tuple[int, ...]]] = {  # axis → what is measured at which sizes
    "k": {"train": KS, "encode": KS, "evaluate": KS, "exact": KS},
    "candidates": {"train": (768, 1280, 2560, 5120, 10_240)},
    "history": {"train": LENGTHS, "encode": LENGTHS},
    "items": {
        "train": ITEMS, "item tower": ITEMS, "evaluate": ITEMS, "exact": ITEMS, "codebook": ITEMS,
        "two-step": GRAPHS, "index": GRAPHS,
    },
    "users": {"evaluate": (250, 500, 1000, 2000)},
}  # fmt: skip
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # so that the memory in use is the memory seen
CLEAR = Path("/proc/self/clear_refs")


def _model(k: int, history: int, items: int, users: int) -> tuple[TwoTower, Dataset]:
    """An untrained p-BACH and made-up sequences without repeats, all in memory."""
    length = history + 30
    rng, offsets = np.random.default_rng(0), np.arange(users + 1) * length
    sequences = (rng.integers(items, size=users)[:, None] + 7919 * np.arange(length)) % items
    meta = {"counts": {"items": items, "windows": users * 11}, "content_hash": "made up"}
    dataset = Dataset(Path("made-up"), meta, sequences.reshape(-1).astype(np.int32), offsets)
    tower = ItemTower(torch.randn(items, D), ModelParams().item_width)
    return build("p-bach", dataset, k, d=D, n_hist=history, item_tower=tower), dataset


def work_of(what: str, **sizes: int) -> tuple[Work, int]:
    """(a call, how many windows, users or requests it serves) of something at these sizes."""
    at = USUAL | ({"items": LARGE} if what in ("exact", "two-step", "codebook", "index") else {}) | sizes
    k, n = at["k"], at["items"]
    if what in ("train", "encode", "evaluate", "item tower"):
        users = at["users"] if what == "evaluate" else BATCH
        model, dataset = _model(k, at["history"], n, min(users, 200) if n > LARGE and what == "evaluate" else users)
        if what == "evaluate":
            return lambda: evaluate(model, dataset, quiet=True), dataset.n_users
        if what == "item tower":
            return torch.no_grad()(lambda: model.items()), 1
        history = torch.from_numpy(dataset.history(np.arange(BATCH), "test", at["history"]))
        if what == "encode":
            rows = model.items().detach()
            return torch.no_grad()(lambda: model.encode(history, rows=rows)), BATCH
        return _step(model.train(), history, at["candidates"] - BATCH), BATCH
    rng = np.random.default_rng(0)
    directions, items = serve.catalogue(n, rng)
    if what == "index":
        return lambda: Neighbours(items, "hnsw"), 1
    if what == "codebook":
        arrays = serve.codebook_of(directions, items, 128, "power-spherical", rng)
        pi = rng.dirichlet(np.full(128, 2.5 / 128), size=serve.REQUESTS)  # peaked: half a dozen prototypes count
        one: Callable = lambda u: codebook.top_k(arrays, pi[u], serve.K, serve.NOTHING, "power-spherical")  # noqa: E731
    else:
        query = serve.requests(directions, k, "power-spherical", rng)
        scan = partial(exact.top_k, coarse=exact.Coarse.of(items))
        way, more = (two_step, (Neighbours(items, "hnsw"),)) if what == "two-step" else (scan, ())
        one = lambda u: way(query[u], items, serve.K, serve.NOTHING, *more)  # noqa: E731
    return lambda: [one(u) for u in serve.ROWS], serve.REQUESTS


def _step(model: TwoTower, history: torch.Tensor, negatives: int) -> Work:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    positive = torch.randint(0, model.n_items, (len(history),))

    def step() -> None:
        optimizer.zero_grad()
        model.loss(history, positive, torch.randint(0, model.n_items, (negatives,))).backward()
        optimizer.step()

    return step


def bench_growth(axis: str, rounds: int = 3) -> dict[str, Any]:
    """A row per work and size along an axis: seconds by both clocks, and the memory that a call adds."""
    rows = []
    for what in SWEEPS[axis]:
        made = in_fresh_process(_seconds, what, axis, rounds)["rows"]
        if CLEAR.exists() and what != "index":  # Linux
            memory = in_fresh_process(_memory, what, axis, **FREED_AT_ONCE)
            made = [row | {"mb": memory[str(row["value"])]} for row in made]
        rows += made
    return {"several": rows}


def _seconds(what: str, axis: str, rounds: int) -> dict[str, Any]:
    works = {value: work_of(what, **{axis: value}) for value in SWEEPS[axis][what]}
    took = both_clocks({str(value): work for value, (work, _) in works.items()}, 1 if what == "index" else rounds)
    about = {"what": what, "axis": axis}
    return {
        "rows": [
            {"name": f"{what}, {axis} = {value:,}", "value": value, "count": count, **about, **took[str(value)]}
            for value, (_, count) in works.items()
        ]
    }


def _memory(what: str, axis: str) -> dict[str, float]:
    torch.set_num_threads(1)
    found = {}
    for value in SWEEPS[axis][what]:
        work, _ = work_of(what, **{axis: value})
        work()  # everything loaded
        CLEAR.write_text("5", encoding="ascii")  # the peak counts from here
        before = _status("VmRSS")
        work()
        found[str(value)] = _status("VmHWM") - before
    return found


def _status(name: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text("utf-8").splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024 / 1e6


def bench_cores() -> dict[str, Any]:
    """CPU seconds on one thread beside wall seconds on all cores."""
    chosen = {"train": {}, "evaluate": {"users": 2000}, "exact": {}}
    took = both_clocks({what: work_of(what, **sizes)[0] for what, sizes in chosen.items()}, 3)
    rows = [
        {"name": what, **seconds, "speedup": seconds["cpu_s"] / seconds["wall_s"]} for what, seconds in took.items()
    ]
    return {"several": rows}


def table_of(record: dict[str, Any]) -> pd.DataFrame:
    """The rows of a record of growth: what, axis, value, count, cpu_s, wall_s, mb."""
    columns = ["what", "axis", "value", "count", "cpu_s", "wall_s", "mb"]
    return pd.DataFrame(record.get("results", [])).reindex(columns=columns)


def slopes(table: pd.DataFrame) -> pd.DataFrame:
    """The exponents b of y ≈ a xᵇ, fitted on log–log: of seconds (per window, user or request) and of memory.

    "at the end" is the exponent between the two largest sizes, where the part that does not grow counts least.
    """
    rows = []
    for (what, axis), part in table.sort_values("value").groupby(["what", "axis"], sort=False):
        x, each = np.log(part["value"].to_numpy(float)), 1 if axis == "users" else part["count"]
        row = {"what": what, "axis": axis, "from": part["value"].min(), "to": part["value"].max()}
        for name, of in (("seconds", part["cpu_s"] / each), ("memory", part["mb"].clip(lower=1))):
            y = np.log(of.to_numpy(float))
            row[name] = np.polyfit(x, y, 1)[0] if np.isfinite(y).all() else np.nan  # not measured
            row[f"{name} at the end"] = (y[-1] - y[-2]) / (x[-1] - x[-2])
        rows.append(row)
    return pd.DataFrame(rows)
