"""`bach bench`: all measurements by name, which of them run, and a verdict for each goal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from bachlib import BachError
from bachlib.bench.measure import SHAPES, bench_prepare, save, told, verdicts

Work = Callable[[], dict[str, Any]]


def _late(module: str, bench: str, *arguments: Any) -> Work:
    """A bench of another module, which is imported when it runs."""
    return lambda: getattr(import_module(f"bachlib.bench.{module}"), bench)(*arguments)


BENCHES: dict[str, dict[str, Work]] = {
    "prepare": {shape: partial(bench_prepare, shape) for shape in SHAPES},
    "sphere": {kernel: _late("model", "bench_sphere", kernel) for kernel in ("power-spherical", "von-mises-fisher")},
    "loss": {f"k = {k}": _late("model", "bench_loss", k) for k in (8, 32)},
    "train": {
        "step, k = 8": _late("model", "bench_step", 8, 3.5),
        "step, k = 32": _late("model", "bench_step", 32, 3.0),
        "products of a step, k = 8": _late("step", "bench_products", 8),
        "products of a step, k = 32": _late("step", "bench_products", 32),
        "memory": _late("model", "bench_memory"),
        "epoch": _late("model", "bench_epoch"),
    },
    "evaluate": {f"{name}, k = 8": _late("model", "bench_evaluate", name) for name in ("p-bach", "all-multihead")},
    "serve": {},  # `serve.benches` for the chosen sizes
    "show": {"explorer": _late("serve", "bench_explorer")},
    "cores": {"both clocks": _late("growth", "bench_cores")},
    "growth": {
        axis: _late("growth", "bench_growth", axis) for axis in ("k", "candidates", "history", "items", "users")
    },
}
# What `bach bench` leaves out, since it takes long (naming the part measures it), and all that `--quick` keeps.
LONG = {
    "prepare": "taobao",
    "train": "epoch",
    "serve": r"50,000|ivf|k = 32|von-mises|20,000 items comes|(two-step|codebook).* (20,000|1,000,000) items"
    r"|1,000,000 items comes|codebook, .*k = 8|goes, codebook",
    "growth": "",
}
QUICK = {
    "sphere": "power", "loss": "k = 8", "train": "k = 8$", "growth": "^$", "evaluate": "^p-bach",
    "serve": r"^exact, .*k = 8, power|^two-step hnsw, .*k = 8|^codebook, .*k = 128|goes, exact",
}  # fmt: skip
SMALLER = {  # in place of what takes long
    ("prepare", "movielens-20m"): partial(bench_prepare, "movielens-20m", 1_000_000),
    ("evaluate", "p-bach, k = 8"): _late("model", "bench_evaluate", "p-bach", 1),
}


def selected(what: str | None = None, quick: bool = False, items: int | None = None) -> Iterator[tuple[str, str, Work]]:
    """(part, name, bench) of what runs: of one part all, of all parts what does not take long."""
    for part in [what] if what else BENCHES:
        benches = BENCHES[part]
        if part == "serve":
            serve = import_module("bachlib.bench.serve")
            benches = serve.benches((items,) if items else (20_000,) if quick else serve.SIZES)
        for name, work in benches.items():
            long = part in LONG and re.search(LONG[part], name)
            if (re.search(QUICK.get(part, ""), name) and (part, name) != ("prepare", "taobao")) if quick else (
                what or not long
            ):  # fmt: skip
                yield part, name, SMALLER.get((part, name), work) if quick else work


def run(chosen: Iterator[tuple[str, str, Work]], record: str) -> Path:
    """Measure, print a verdict for each goal, and save after each. Growth has a record of its own."""
    rows: list[dict[str, Any]] = []
    path = Path()
    for part, name, work in chosen:
        try:
            found = work()
        except BachError as error:  # e.g. a measurement that only Linux can make
            print(f"{part}, {name}: not measured: {error}", flush=True)
            continue
        for result in found.get("several", [found]):
            print(f"{part}, {result['name']}: {told(result)}", flush=True)
            rows.append(result | {"bench": part})
        path = save("growth" if part == "growth" else record, [row for row in rows if row["bench"] == part])
    judgements = [verdict for row in rows for verdict in verdicts(row)]
    print(f"{sum(verdict['met'] for verdict in judgements)} of {len(judgements)} goals are met")
    print(f"→ {path}")
    return path
