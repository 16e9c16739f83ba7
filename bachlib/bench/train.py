"""Measurements of training: the whole step and an epoch against the same written plainly, and the memory of a step."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bachlib import BachError
from bachlib.bench.measure import best_of, cpu_seconds, in_fresh_process, judged
from bachlib.data import Dataset, Windows, planted, prepare
from bachlib.data.download import locate
from bachlib.files import output_dir
from bachlib.model.methods import build
from bachlib.model.twotower import plain_step_loss


def data() -> Dataset:
    """MovieLens-1M where BACH_DATA_DIR says it is, else a planted world of about its size."""
    if os.environ.get("BACH_DATA_DIR"):
        return prepare("movielens-1m", locate("movielens-1m"), output_dir("data", "movielens-1m"), quiet=True)
    world = planted.write_world(n_users=2_900, n_items=3_494)
    return prepare("planted", world, output_dir("data", world.name), quiet=True)


def _steps(dataset: Dataset, k: int, batch_size: int = 512) -> tuple[Callable[[], None], Callable[[], None]]:
    """(the step of `fit`, the plain one) on the next batch, optimiser included, each with a model of its own."""

    def step_of(loss_of: Callable, fused: bool) -> Callable[[], None]:
        model = build("p-bach", dataset, k).train()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=fused or None)
        windows = Windows(dataset, batch_size)
        batches = iter(windows)

        def step() -> None:
            nonlocal batches
            batch = next(batches, None)
            if batch is None:
                batches = iter(windows)
                batch = next(batches)
            negatives = torch.randint(0, dataset.n_items, (2048,))
            optimizer.zero_grad()
            loss_of(model, torch.from_numpy(batch.history), torch.from_numpy(batch.positive), negatives).backward()
            optimizer.step()

        return step

    return step_of(lambda model, *args: model.loss(*args), True), step_of(plain_step_loss, False)


def bench_step(k: int, faster: float) -> dict[str, Any]:
    """The whole training step at B = 512, C = 2560, d = 64 against the same step written plainly, on one thread."""
    torch.set_num_threads(1)
    fast, plain = _steps(data(), k)
    seconds, plain_seconds = best_of(fast), best_of(plain, 5)
    result = {"seconds": seconds, "plain_seconds": plain_seconds, "ratio": seconds / plain_seconds}
    result["times_faster"] = plain_seconds / seconds
    return {"name": f"step, k = {k}", **result, **judged(result, {"ratio": 1 / faster})}


def bench_epoch() -> dict[str, Any]:
    """One epoch of p-BACH, k = 8 (495 steps of 512 windows on MovieLens-1M), fast and plain."""
    torch.set_num_threads(1)
    dataset = data()
    fast, plain = _steps(dataset, 8)
    n = Windows(dataset, 512).steps_per_epoch
    seconds, plain_seconds = (cpu_seconds(lambda step=step: [step() for _ in range(n)]) for step in (fast, plain))
    result = {"steps": n, "seconds": seconds, "plain_seconds": plain_seconds, "ratio": seconds / plain_seconds}
    return {"name": f"epoch, {dataset.folder.name}", **result, **judged(result, {"ratio": 1 / 3.5})}


def _measure_memory(k: int, results: multiprocessing.Queue) -> None:
    """Peak memory a step adds in a fresh process, and what of it the towers keep for their backward pass."""
    torch.set_num_threads(1)
    dataset = data()
    step, _ = _steps(dataset, k)
    step()  # everything loaded, optimiser state and gradients in place
    model = build("p-bach", dataset, k).train()
    history = torch.from_numpy(next(iter(Windows(dataset))).history)
    kept = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    tokens = model.items().detach()[history].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        held = [model.encoder(tokens, history), model.gate(tokens, history)]
    towers = sum(kept.values()) / 1e6
    del held, tokens, model
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _memory_mb("VmRSS")
    step()
    results.put({"step_mb": _memory_mb("VmHWM") - before, "towers_mb": towers})


def _memory_mb(name: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024 / 1e6


def bench_memory() -> dict[str, Any]:
    """How much more a step needs at k = 32 than at k = 1, beyond parameters and what the towers keep (Linux only).

    Parameters, gradients and optimiser state are there before the step and so are not counted. Every tensor is given
    back to the system as soon as it is freed, so that memory in use is memory seen.
    """
    if not Path("/proc/self/clear_refs").exists():
        raise BachError("the memory of a step is measured with Linux's /proc, which is not here")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    try:
        one, many = (in_fresh_process(_measure_memory, k) for k in (1, 32))
    finally:
        del os.environ["MALLOC_MMAP_THRESHOLD_"]
    growth = {key: many[key] - one[key] for key in one}
    result = {"growth_mb": growth["step_mb"] - growth["towers_mb"], "k=1": one, "k=32": many}
    return {"name": "memory, k = 32 over k = 1", **result, **judged(result, {"growth_mb": 100.0})}
