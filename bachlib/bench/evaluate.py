"""Measurement of evaluation: 10,000 users on 20,000 items by the exact mixture, against its bare matrix product."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any

import torch

from bachlib.bench.measure import cpu_seconds, in_fresh_process, judged, peak_gb
from bachlib.data import Dataset, planted, prepare
from bachlib.evaluate import diagnostics, evaluate
from bachlib.files import output_dir
from bachlib.model.methods import build
from bachlib.model.onepass import BLOCK
from bachlib.rank.ranks import sample_users

N_USERS, N_ITEMS, K = 10_000, 20_000, 8


def data() -> Dataset:
    """A planted world with a little more than 10,000 users and 20,000 items after preparation."""
    world = planted.write_world(n_users=12_000, n_items=20_050)
    return prepare("planted", world, output_dir("data", world.name), quiet=True)


def bare_products(model: torch.nn.Module, dataset: Dataset) -> Callable[[], None]:
    """Every head of every user times every item, in blocks that stay in the cache; nothing is done with the result."""
    heads = diagnostics.encode_users(model, dataset, sample_users(dataset, N_USERS, 0)).heads
    rows, items = heads.flatten(0, 1), model.items().detach()
    height = 1024
    width = BLOCK // height
    room = torch.empty(BLOCK)

    def products() -> None:
        for start in range(0, len(rows), height):
            some = rows[start : start + height]
            for first in range(0, len(items), width):
                block = items[first : first + width]
                torch.mm(some, block.T, out=room[: len(some) * len(block)].view(len(some), -1))

    return products


def _make(results: multiprocessing.Queue) -> None:
    results.put({"users": data().n_users})


def _measure(times: int, results: multiprocessing.Queue) -> None:
    torch.set_num_threads(1)
    dataset = data()
    model = build("p-bach", dataset, K)
    evaluate(model, dataset, max_users=N_USERS, quiet=True)
    memory, products = peak_gb(), bare_products(model, dataset)
    rounds = [
        (cpu_seconds(lambda: evaluate(model, dataset, max_users=N_USERS, quiet=True)), cpu_seconds(products))
        for _ in range(times)
    ]  # in turns: the machine's pace changes
    whole, bare = map(min, zip(*rounds, strict=True))
    size = {"users": min(N_USERS, dataset.n_users), "items": dataset.n_items}
    results.put(size | {"seconds": whole, "bare_seconds": bare, "ratio": whole / bare, "peak_gb": memory})


def bench_evaluate(times: int = 5) -> dict[str, Any]:
    """All of `evaluate` (item tower, encoding, mixture, exclusion, ranks, metrics) against the bare product alone."""
    in_fresh_process(_make)  # a process begins with the peak of the one that starts it: nothing large is done here
    result = in_fresh_process(_measure, times)
    return {"name": f"p-bach, k = {K}", **result, **judged(result, {"ratio": 2.7, "peak_gb": 1.0})}
