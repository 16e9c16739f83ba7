"""Measurements of serving: one request at a time, K = 100, on one thread, in a world of items around interests.

    exact      the pruned scan against its bare matrix product, and whether it is brute force, to the bit
    two-step   faiss and rescoring against the scan, and how much of the slate it finds
    codebook   the threshold algorithm with a peaked π against the dense product S π, and whether it is brute force

Requests of one kind run after each other, as a server's do, and the kinds in turns, since the machine's pace changes.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from bachlib.bench.measure import cpu_seconds, in_fresh_process, judged
from bachlib.data.planted import power_spherical, unit
from bachlib.model.sphere import KERNELS
from bachlib.serve import codebook, exact
from bachlib.serve.density import LeftOut, Query, brute_force
from bachlib.serve.twostep import Neighbours, two_step

D, K, REQUESTS, ROUNDS, INTERESTS = 64, 100, 32, 7, 200
SIZES = (20_000, 50_000, 200_000)  # and a million by hand: bach bench serve --items 1000000
NOTHING = LeftOut.of([[]])


def catalogue(n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(interests, items): n items at a typical angle of 50° around 200 directions."""
    directions = unit(rng.normal(size=(INTERESTS, D)))
    return directions, _unit32(power_spherical(directions[rng.integers(INTERESTS, size=n)], 0.9, rng))


def requests(directions: np.ndarray, k: int, rule: str, rng: np.random.Generator) -> Query:
    """Users with k heads near interests, uneven weights and concentrations as they are learnt."""
    chosen = np.stack([directions[rng.choice(INTERESTS, k, replace=False)] for _ in range(REQUESTS)])
    kappa = rng.uniform(12, 25, size=(REQUESTS, k))
    pi = rng.dirichlet(np.full(k, 0.5), size=REQUESTS)
    return Query(_unit32(power_spherical(chosen, 0.5, rng)), np.log(pi) + _log_c(rule, kappa), kappa, rule)


def codebook_of(
    directions: np.ndarray, items: np.ndarray, k: int, rule: str, rng: np.random.Generator
) -> codebook.CodebookArrays:
    """k prototypes near interests, with their densities and lists."""
    kappa = rng.uniform(12, 25, size=k)
    near = directions[rng.choice(INTERESTS, k, replace=k > INTERESTS)]
    return codebook.compute(_unit32(power_spherical(near, 0.3, rng)), kappa, _log_c(rule, kappa), items, rule)


def _log_c(rule: str, kappa: np.ndarray) -> np.ndarray:
    return KERNELS[rule].log_normalizer(torch.from_numpy(kappa), D).numpy()


def _unit32(x: np.ndarray) -> np.ndarray:
    return unit(x.astype(np.float32)).astype(np.float32)


def _in_turns(*kinds: Callable[[slice], Any]) -> list[float]:
    """CPU milliseconds per request of each kind: the best of some rounds."""
    rows = [slice(u, u + 1) for u in range(REQUESTS)]
    rounds = [[cpu_seconds(lambda kind=kind: [kind(u) for u in rows]) for kind in kinds] for _ in range(ROUNDS + 1)]
    return [1000 * min(times) / REQUESTS for times in zip(*rounds[1:], strict=True)]


def _same(found, wanted) -> bool:
    return bool((found.found == wanted.found).all() and (found.scores == wanted.scores).all())


def bare_product(items: np.ndarray, query: Query) -> Callable[[slice], None]:
    """The cosines of a request's heads with all items, in blocks that stay in the cache; nothing is done with them."""
    k, width = query.heads.shape[1], exact.WIDTH
    room = np.empty((width, k), np.float32)

    def product(u: slice) -> None:
        rows = query.heads[u][0].T
        for first in range(0, len(items), width):
            block = items[first : first + width]
            np.dot(block, rows, out=room[: len(block)])

    return product


def _measure_exact(n: int, k: int, rule: str, results: multiprocessing.Queue) -> None:
    rng = np.random.default_rng(0)
    directions, items = catalogue(n, rng)
    query = requests(directions, k, rule, rng)
    differ = sum(
        not _same(exact.top_k(query[u], items, K, NOTHING), brute_force(query[u], items, K, NOTHING))
        for u in (slice(u, u + 1) for u in range(8))
    )
    scan, bare = _in_turns(lambda u: exact.top_k(query[u], items, K, NOTHING), bare_product(items, query))
    results.put({"ms": scan, "bare_ms": bare, "ratio": scan / bare, "differ": differ})


def _measure_two_step(n: int, k: int, kind: str, results: multiprocessing.Queue) -> None:
    import faiss

    rng = np.random.default_rng(0)
    directions, items = catalogue(n, rng)
    query = requests(directions, k, "power-spherical", rng)
    faiss.omp_set_num_threads(os.cpu_count())
    index = Neighbours(items, kind)
    faiss.omp_set_num_threads(1)
    rows = [slice(u, u + 1) for u in range(REQUESTS)]
    wanted = [exact.top_k(query[u], items, K, NOTHING).found[0] for u in rows]
    made = [two_step(query[u], items, K, NOTHING, index) for u in rows]
    missed = 1 - np.mean([np.isin(a, best.found[0]).mean() for a, (best, _) in zip(wanted, made, strict=True)])
    ours, scan = _in_turns(
        lambda u: two_step(query[u], items, K, NOTHING, index), lambda u: exact.top_k(query[u], items, K, NOTHING)
    )
    asked = float(np.mean([(lists.depth > 0).sum() for _, lists in made]))
    enough = float(np.mean([lists.enough[0] for _, lists in made]))
    told = {"ms": ours, "exact_ms": scan, "ratio": ours / scan, "missed": float(missed)}
    results.put(told | {"heads_asked": asked, "exact_if_lists_are": enough})


def _measure_codebook(n: int, k: int, results: multiprocessing.Queue) -> None:
    rng, rule = np.random.default_rng(0), "power-spherical"
    directions, items = catalogue(n, rng)
    arrays = codebook_of(directions, items, k, rule, rng)
    pi = rng.dirichlet(np.full(k, 2.5 / k), size=REQUESTS)  # peaked: half a dozen prototypes count
    differ = 0
    for u in range(4):
        made, _ = codebook.top_k(arrays, pi[u : u + 1], K, NOTHING, rule)
        differ += not _same(made, brute_force(made.query, items, K, NOTHING))
    looked = np.array([codebook.top_k(arrays, pi[u : u + 1], K, NOTHING, rule)[1][0] for u in range(REQUESTS)])
    weight, out = pi.astype(np.float32), np.empty(n, np.float32)
    ours, dense = _in_turns(
        lambda u: codebook.top_k(arrays, pi[u], K, NOTHING, rule),
        lambda u: np.dot(arrays.density, weight[u.start], out=out),
    )
    told = {"ms": ours, "dense_ms": dense, "ratio": ours / dense, "differ": differ}
    effective = float(np.exp(-(pi * np.log(np.maximum(pi, 1e-300))).sum(1)).mean())
    results.put(told | {"looked_at": float(looked.mean()), "dense": float((looked == n).mean()), "heads": effective})


def _fresh(work: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """In a process of its own whose libraries were told to use one thread before they were loaded."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    try:
        return in_fresh_process(work, *arguments)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def bench_exact(n: int, k: int, rule: str = "power-spherical") -> dict[str, Any]:
    result = _fresh(_measure_exact, n, k, rule)
    name = f"exact, {n:,} items, k = {k}, {rule}"
    return {"name": name, **result, **judged(result, {"ratio": 1.8, "differ": 0})}


def bench_two_step(n: int, k: int, kind: str = "hnsw") -> dict[str, Any]:
    """The goal for the ratio is set for 200,000 items and more; below, the scan is the better way and `auto` knows."""
    result = _fresh(_measure_two_step, n, k, kind)
    goals = {"missed": 0.005} | ({"ratio": 0.3} if n >= 200_000 else {})
    return {"name": f"two-step {kind}, {n:,} items, k = {k}", **result, **judged(result, goals)}


def bench_codebook(n: int, k: int) -> dict[str, Any]:
    """The goal for the ratio is set for 128 prototypes and 200,000 items and more."""
    result = _fresh(_measure_codebook, n, k)
    goals = {"differ": 0} | ({"ratio": 0.15} if n >= 200_000 and k >= 128 else {})
    return {"name": f"codebook, {n:,} items, k = {k}", **result, **judged(result, goals)}


def benches(sizes: tuple[int, ...] = SIZES) -> list[Callable[[], dict[str, Any]]]:
    made = []
    for n in sizes:
        for k in (8, 32):
            made += [lambda n=n, k=k, rule=rule: bench_exact(n, k, rule) for rule in KERNELS]
            made += [lambda n=n, k=k, kind=kind: bench_two_step(n, k, kind) for kind in ("hnsw", "ivf")]
        made += [lambda n=n, k=k: bench_codebook(n, k) for k in (8, 32, 128)]
    return made
