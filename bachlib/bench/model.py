"""Measurements of the model: normalisers, loss, training and evaluation, each against plain or bare code."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import mpmath
import torch

from bachlib import BachError
from bachlib.bench.measure import best_of, cpu_seconds, in_fresh_process, in_turns, judged, peak_gb, world
from bachlib.data import Dataset, Windows, prepare
from bachlib.data.download import locate
from bachlib.evaluate import diagnostics, evaluate
from bachlib.files import output_dir
from bachlib.model import onepass
from bachlib.model.methods import build
from bachlib.model.plain import plain_step_loss
from bachlib.model.sphere import KERNELS
from bachlib.rank.ranks import sample_users

N_USERS, K = 10_000, 8  # of evaluation
CLEAR = Path("/proc/self/clear_refs")
WORLD = {"n_users": 12_000, "n_items": 20_050}  # after preparation more than 10,000 and 20,000


def bench_sphere(kernel_name: str) -> dict[str, Any]:
    """log C_d(κ) against mpmath (d from 2 to 1024, κ from 0 to 10⁴) and its cost against the loss core at k = 32."""
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
    share = cost / best_of(_loss_core(512, 32, 64, 2560)["one_pass"], 3)
    found = {"error_float64": errors[torch.float64], "error_float32": errors[torch.float32], "share": share}
    return judged(kernel_name, {"seconds": cost, **found}, dict(zip(found, (1e-10, 5e-7, 0.02), strict=True)))


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


def bench_loss(k: int) -> dict[str, Any]:
    """The loss core at B = 512, C = 2560, d = 64: CPU time against its bare products, memory; autograd beside it."""
    fast, slow = (in_fresh_process(_loss, which, k) for which in ("one_pass", "plain"))
    result = fast | {f"plain_{key}": value for key, value in slow.items()}
    return judged(f"k = {k}", result, {"ratio": 1.3, "extra_mb": 20.0})


def _loss(which: str, k: int) -> dict[str, Any]:
    """Time against the bare products, and the peak memory that the loss adds in a fresh process."""
    torch.set_num_threads(1)
    _loss_core(8, 2, 64, 64)[which]()  # everything loaded
    core = _loss_core(512, k, 64, 2560)
    before = peak_gb()
    core[which]()
    extra = (peak_gb() - before) * 1000
    seconds, bare = in_turns(core[which], core["bare"], rounds=7)
    return {"extra_mb": extra, "ratio": seconds / bare}


def _loss_core(B: int, k: int, d: int, C: int) -> dict[str, Callable[[], Any]]:
    """Value and gradients of Σ γ log p in one pass, by plain autograd, and the three bare matrix products in blocks."""
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
        for block, gradient in zip(rows.split(size), to_rows.split(size), strict=True):
            logits = torch.mm(block, v.T, out=room[: len(block)])
            torch.mm(logits, v, out=gradient)
            to_items.addmm_(logits.T, block)

    return {"one_pass": one_pass, "plain": plain, "bare": bare}


def training_data() -> Dataset:
    """MovieLens-1M if BACH_DATA_DIR has it, else a planted world of about its size."""
    if os.environ.get("BACH_DATA_DIR"):
        return prepare("movielens-1m", locate("movielens-1m"), output_dir("data", "movielens-1m"), quiet=True)
    return world(n_users=2_900, n_items=3_533)


def _steps(dataset: Dataset, k: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """(the step of `fit`, the plain one) on the next batch, optimiser included, each with its own model."""

    def step_of(loss_of: Callable, fused: bool) -> Callable[[], None]:
        model = build("p-bach", dataset, k).train()
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=fused or None)
        batches = chain.from_iterable(repeat(Windows(dataset, 512)))  # epoch after epoch

        def step() -> None:
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
    fast, plain = _steps(training_data(), k)
    seconds, plain_seconds = in_turns(fast, plain)
    result = {"seconds": seconds, "plain_seconds": plain_seconds, "ratio": seconds / plain_seconds}
    return judged(f"step, k = {k}", result | {"times_faster": plain_seconds / seconds}, {"ratio": 1 / faster})


def bench_epoch() -> dict[str, Any]:
    """One epoch of p-BACH, k = 8 (495 steps of 512 windows on MovieLens-1M), fast and plain."""
    torch.set_num_threads(1)
    dataset = training_data()
    n = Windows(dataset, 512).steps_per_epoch
    seconds, plain = (cpu_seconds(lambda step=step: [step() for _ in range(n)]) for step in _steps(dataset, 8))
    result = {"steps": n, "seconds": seconds, "plain_seconds": plain, "ratio": seconds / plain}
    return judged(f"epoch, {dataset.folder.name}", result, {"ratio": 1 / 3.5})


def bench_memory() -> dict[str, Any]:
    """The memory that a step needs more at k = 32 than at k = 1, without parameters and the towers' share."""
    if not CLEAR.exists():
        raise BachError("the memory of a step is measured with /proc, which only Linux has")
    freed_at_once = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # so that the memory in use is the memory seen
    one, many = (in_fresh_process(_memory, k, **freed_at_once) for k in (1, 32))
    growth = {key: many[key] - one[key] for key in one}
    result = {"growth_mb": growth["step_mb"] - growth["towers_mb"], "k=1": one, "k=32": many}
    return judged("memory, k = 32 over k = 1", result, {"growth_mb": 100.0})


def _memory(k: int) -> dict[str, Any]:
    """The peak memory that a step adds in a fresh process, and the part that the towers keep for the backward pass."""
    torch.set_num_threads(1)
    dataset = training_data()
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
    CLEAR.write_text("5", encoding="ascii")  # the peak counts from here
    before = _memory_mb("VmRSS")
    step()
    return {"step_mb": _memory_mb("VmHWM") - before, "towers_mb": towers}


def _memory_mb(name: str) -> float:
    (line,) = [line for line in Path("/proc/self/status").read_text("utf-8").splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024 / 1e6


def bench_evaluate(name: str = "p-bach", times: int = 5) -> dict[str, Any]:
    """`evaluate` for 10,000 users and 20,000 items, from item tower to metrics, against its bare matrix product."""
    in_fresh_process(_size)  # prepares the data; a process begins with the peak memory of the one that starts it
    result = in_fresh_process(_evaluate, name, times)
    return judged(f"{name}, k = {K}", result, {"ratio": 1.8, "peak_gb": 1.0}, {"users_per_second": 2_000})


def _size() -> dict[str, int]:
    dataset = world(**WORLD)
    return {"users": min(N_USERS, dataset.n_users), "items": dataset.n_items}


def _evaluate(name: str, times: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    dataset = world(**WORLD)
    model = build(name, dataset, K)

    def whole() -> None:
        evaluate(model, dataset, max_users=N_USERS, quiet=True)

    whole()
    memory = peak_gb()
    heads = diagnostics.encode_users(model, dataset, sample_users(dataset, N_USERS, 0)).heads
    rows, blocks = heads.flatten(0, 1).split(1024), model.items().detach().split(onepass.BLOCK // 1024)
    room = torch.empty(onepass.BLOCK)

    def products() -> None:
        for some in rows:
            for block in blocks:  # they stay in the cache; the result is not used
                torch.mm(some, block.T, out=room[: len(some) * len(block)].view(len(some), -1))

    rounds = [(cpu_seconds(whole), cpu_seconds(products)) for _ in range(times)]  # in turns: the machine's pace changes
    seconds, bare = map(min, zip(*rounds, strict=True))
    size = _size()
    found = {"seconds": seconds, "bare_seconds": bare, "ratio": seconds / bare, "peak_gb": memory}
    return size | found | {"users_per_second": size["users"] / seconds}
