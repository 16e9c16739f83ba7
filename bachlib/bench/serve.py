"""Measurements of serving: one request at a time, K = 100, on one thread, in a world of items around interests.

exact      the pruned scan against its bare matrix product, and whether it equals brute force, to the bit
two-step   faiss and rescoring against the scan, and the share of the slate it finds
changes    adding and removing one item, by every strategy
codebook   the threshold algorithm with a peaked π against the dense product S π, and whether it equals brute force
explorer   from a moved slider to the new figure, without the drawing, which depends on the browser
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from bachlib.bench.measure import cpu_seconds, in_fresh_process, in_turns, judged, world
from bachlib.data.planted import power_spherical, unit
from bachlib.model.methods import build
from bachlib.model.sphere import KERNELS
from bachlib.serve import Retriever, codebook, exact
from bachlib.serve.density import Best, LeftOut, Query, brute_force
from bachlib.serve.slate import found_of
from bachlib.serve.twostep import Neighbours, two_step

Rng = np.random.Generator
D, K, REQUESTS, ROUNDS, INTERESTS = 64, 100, 32, 7, 200
SIZES = (20_000, 50_000, 200_000, 1_000_000)
NOTHING, ROWS = LeftOut.of([[]]), [slice(u, u + 1) for u in range(REQUESTS)]
ONE_THREAD = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")  # read when loaded


def catalogue(n: int, rng: Rng) -> tuple[np.ndarray, np.ndarray]:
    """(interests, items): n items at a typical angle of 50° around 200 directions."""
    directions = unit(rng.normal(size=(INTERESTS, D)))
    return directions, _unit32(power_spherical(directions[rng.integers(INTERESTS, size=n)], 0.9, rng))


def requests(directions: np.ndarray, k: int, rule: str, rng: Rng) -> Query:
    """Users with k heads near interests, uneven weights and typical learnt concentrations."""
    chosen = np.stack([directions[rng.choice(INTERESTS, k, replace=k > INTERESTS)] for _ in range(REQUESTS)])
    kappa = rng.uniform(12, 25, size=(REQUESTS, k))
    pi = rng.dirichlet(np.full(k, 0.5), size=REQUESTS)
    return Query(_unit32(power_spherical(chosen, 0.5, rng)), np.log(pi) + _log_c(rule, kappa), kappa, rule)


def codebook_of(directions: np.ndarray, items: np.ndarray, k: int, rule: str, rng: Rng) -> codebook.CodebookArrays:
    """k prototypes near interests, with their densities and lists."""
    kappa = rng.uniform(12, 25, size=k)
    near = directions[rng.choice(INTERESTS, k, replace=k > INTERESTS)]
    return codebook.compute(_unit32(power_spherical(near, 0.3, rng)), kappa, _log_c(rule, kappa), items, rule)


def _log_c(rule: str, kappa: np.ndarray) -> np.ndarray:
    return KERNELS[rule].log_normalizer(torch.from_numpy(kappa), D).numpy()


def _unit32(x: np.ndarray) -> np.ndarray:
    return unit(x.astype(np.float32)).astype(np.float32)


def _in_turns(*kinds: Callable[[slice], Any]) -> list[float]:
    """CPU milliseconds per request of each kind: the best of some rounds, in turns, as the machine's pace changes."""
    seconds = in_turns(*(lambda kind=kind: [kind(u) for u in ROWS] for kind in kinds), rounds=ROUNDS)
    return [1000 * best / REQUESTS for best in seconds]


def _differ(found: Best, wanted: Best) -> bool:
    return not ((found.found == wanted.found).all() and (found.scores == wanted.scores).all())


def _exact(n: int, k: int, rule: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    directions, items = catalogue(n, rng)
    query = requests(directions, k, rule, rng)
    scan = partial(_scan, query, items, exact.Coarse.of(items))
    differ = sum(_differ(scan(u), brute_force(query[u], items, K, NOTHING)) for u in ROWS[:8])
    blocks = np.split(items, range(exact.WIDTH, n, exact.WIDTH))
    room = np.empty((exact.WIDTH, k), np.float32)

    def product(u: slice) -> None:
        for block in blocks:  # they stay in the cache; the result is not used
            np.dot(block, query.heads[u][0].T, out=room[: len(block)])

    ms, bare = _in_turns(scan, product)
    return {"ms": ms, "bare_ms": bare, "ratio": ms / bare, "differ": differ}


def _scan(query: Query, items: np.ndarray, coarse: exact.Coarse | None, u: slice) -> Best:
    return exact.top_k(query[u], items, K, NOTHING, coarse=coarse)


def _two_step(n: int, k: int, kind: str) -> dict[str, Any]:
    import faiss

    rng = np.random.default_rng(0)
    directions, items = catalogue(n, rng)
    query = requests(directions, k, "power-spherical", rng)
    faiss.omp_set_num_threads(os.cpu_count())
    index = Neighbours(items, kind)
    faiss.omp_set_num_threads(1)
    everyone = LeftOut.of([[]] * REQUESTS)
    best, lists = two_step(query, items, K, everyone, index)
    missed = 1 - found_of(exact.top_k(query, items, K, everyone).found, best.found)
    scans = (partial(_scan, query, items, coarse) for coarse in (None, exact.Coarse.of(items)))
    ms, scan, coarse = _in_turns(lambda u: two_step(query[u], items, K, NOTHING, index), *scans)
    asked, enough = (lists.depth >= K).sum(1).mean(), lists.enough.mean()
    of_lists = {"heads_asked": asked.item(), "exact_if_lists_are": enough.item()}
    times = {"ms": ms, "exact_ms": scan, "coarse_ms": coarse}  # the goal was set against the scan of float32
    return {**times, "ratio": ms / scan, "ratio_to_coarse": ms / coarse, "missed": missed, **of_lists}


def _codebook(n: int, k: int) -> dict[str, Any]:
    rng, rule = np.random.default_rng(0), "power-spherical"
    directions, items = catalogue(n, rng)
    arrays = codebook_of(directions, items, k, rule, rng)
    pi = rng.dirichlet(np.full(k, 2.5 / k), size=REQUESTS)  # peaked: half a dozen prototypes count

    def lists(u: slice) -> tuple[Best, np.ndarray]:
        return codebook.top_k(arrays, pi[u], K, NOTHING, rule)

    made, looked = zip(*map(lists, ROWS), strict=True)
    differ = sum(_differ(best, brute_force(best.query, items, K, NOTHING)) for best in made[:4])
    looked = np.concatenate(looked)
    weight, out = pi.astype(np.float32), np.empty(n, np.float32)
    ms, dense = _in_turns(lists, lambda u: np.dot(arrays.density, weight[u.start], out=out))
    effective = float(np.exp(-(pi * np.log(np.maximum(pi, 1e-300))).sum(1)).mean())
    rows = {"looked_at": float(looked.mean()), "dense": float((looked == n).mean()), "heads": effective}
    return {"ms": ms, "dense_ms": dense, "ratio": ms / dense, "differ": differ, **rows}


def _changes(n: int, k: int, name: str, strategy: str, index: str) -> dict[str, Any]:
    """The slowest of some single items that are added and removed, the first after loading a saved index included; all
    have ids and genres."""
    dataset, rng = world(n_users=300), np.random.default_rng(0)
    retriever = Retriever(build(name, dataset, k), "exact", index=index, dataset=dataset)
    items = catalogue(n + 16, rng)[1]
    new = {"raw_ids": [f"item {at}" for at in range(n)], "genres": [["any"]] * n}
    first = retriever.add(vectors=items[:n], **new)[0]
    retriever.remove(np.arange(first))
    retriever.choose(strategy)
    with TemporaryDirectory() as folder:  # its files stay open
        retriever = Retriever.load(retriever.save(folder), retriever.model, dataset=dataset, verify=False)
    took = {"add_ms": 0.0, "remove_ms": 0.0}
    for at in range(16):
        more = {"vectors": items[n + at : n + at + 1], "raw_ids": [f"late {at}"], "genres": [["any"]]}
        work = {"add_ms": partial(retriever.add, **more), "remove_ms": partial(retriever.remove, [first + 5 * at])}
        for key, one in work.items():
            took[key] = max(took[key], 1000 * cpu_seconds(one))
    return took


def benches(sizes: tuple[int, ...] = SIZES) -> dict[str, Callable[[], dict[str, Any]]]:
    """All strategies with these numbers of items. Below 200,000 the scan is faster than two-step and codebook."""
    made: dict[str, Callable[[], dict[str, Any]]] = {}

    def add(name: str, goals: dict[str, float], work: Callable, *arguments: Any) -> None:
        made[name] = lambda: judged(name, in_fresh_process(work, *arguments, **ONE_THREAD), goals)

    for n in sizes:
        for k in (8, 32):
            for rule in KERNELS:
                most = 1.6 if n < 200_000 else 1.0 if n < 1_000_000 else 0.6
                add(f"exact, {n:,} items, k = {k}, {rule}", {"ratio": most, "differ": 0}, _exact, n, k, rule)
            goals = {"missed": 0.005} | ({"ratio": 0.3} if n >= 200_000 else {})
            for kind in ("hnsw", "ivf"):
                add(f"two-step {kind}, {n:,} items, k = {k}", goals, _two_step, n, k, kind)
        for strategy, index in (("exact", "hnsw"), ("two-step", "hnsw"), ("two-step", "ivf"), ("codebook", "hnsw")):
            name, k = ("p-bach-global", 128) if strategy == "codebook" else ("p-bach", 8)
            kind, goals = f" {index}" if strategy == "two-step" else "", {"add_ms": 50, "remove_ms": 50}
            what = f"one of {n:,} items comes or goes, {strategy}{kind}"
            add(what, goals, _changes, n, k, name, strategy, index)
        for k in (8, 32, 128):
            goals = {"differ": 0} | ({"ratio": 0.15} if n >= 200_000 and k >= 128 else {})
            add(f"codebook, {n:,} items, k = {k}", goals, _codebook, n, k)
    return made


def bench_explorer(times: int = 40, n: int = 20_000, k: int = 8) -> dict[str, Any]:
    """Median and 95% quantile of the explorer's answer times in milliseconds."""
    from bachlib.show.explorer import Explorer

    dataset = world(n_users=300)
    retriever = Retriever(build("p-bach", dataset, k), "exact")
    more = np.random.default_rng(0).normal(size=(n - dataset.n_items, retriever.model.d))
    retriever.add(vectors=unit(more))
    explorer, took = Explorer({"p-bach": retriever}, dataset), []
    for at, value in enumerate(np.random.default_rng(1).random(times)):
        explorer.rows[at % k].slider.value = value
        took.append(explorer.answered_ms)
    found = {"median_ms": median(took), "p95_ms": float(np.quantile(took, 0.95))}
    return judged(f"an answer of the explorer, {n:,} items, k = {k}", found, {"median_ms": 100, "p95_ms": 100})
