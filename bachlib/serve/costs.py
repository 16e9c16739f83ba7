"""The cheapest strategy, timed on this machine with requests of this model; two-step must also find the scan's items.

Building a graph takes long, so it is only built if `bach bench serve` found two-step well below the scan for that many
items (`RATIOS`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from bachlib.serve import codebook, exact
from bachlib.serve.lean import one_core
from bachlib.serve.slate import found_of
from bachlib.serve.twostep import two_step

if TYPE_CHECKING:
    from bachlib.serve.catalogue import Catalogue
    from bachlib.serve.retriever import Retriever

# two-step (hnsw) over exact, one request, K = 100, k = 8, by `bach bench serve`: items → ratio
RATIOS = {20_000: 3.0, 50_000: 1.4, 200_000: 0.24, 1_000_000: 0.07}
WORTH_BUILDING, RECALL, K = 0.5, 0.99, 100
ROWS = [slice(u, u + 1) for u in range(24)]  # requests


@one_core()
def choose(retriever: Retriever) -> tuple[str, Catalogue, str]:
    """(strategy, its catalogue, why)."""
    bare = retriever.built(retriever.catalogue, "exact")
    n, rng = len(bare.items), np.random.default_rng(0)
    depth = min(K, n)
    histories = [rng.choice(bare.numbers, min(n, retriever.model.n_hist)) for _ in ROWS]
    out = bare.left_out([np.empty(0, np.int64)] * len(ROWS), depth)
    anyone = np.zeros(len(ROWS), np.int64)  # only read by models with a free π per user
    query, pi = retriever.users.query(bare, histories, user=anyone)
    scan = _milliseconds(lambda u: exact.top_k(query[u], bare.items, depth, out[u]))
    size = f"{n:,} items, k = {retriever.model.k}: a scan takes {scan:.2f} ms"
    if retriever.users.shared_heads is not None:
        made = retriever.built(bare, "codebook")
        cached = _milliseconds(lambda u: codebook.top_k(made.codebook, pi[u], depth, out[u], retriever.rule))
        said = f"{size}, the codebook's lists {cached:.2f} ms"
        return ("codebook", made, f"codebook: {said}") if cached < scan else ("exact", bare, f"exact: {said}")
    expected = float(np.exp(np.interp(np.log(n), np.log(list(RATIOS)), np.log(list(RATIOS.values())))))
    if expected > WORTH_BUILDING:
        return "exact", bare, f"exact: {size}; two-step would take about {expected:.1f} times that"
    if find_spec("faiss") is None:
        return "exact", bare, f"exact: {size}; two-step may be faster and needs faiss: pip install 'bachlib[faiss-cpu]'"
    made = retriever.built(bare, "two-step")
    lists = (made.index, retriever.settings["M"], retriever.settings["max_M"])
    found = two_step(query, bare.items, depth, out, *lists)[0].found
    recall = found_of(exact.top_k(query, bare.items, depth, out).found, found)
    graph = _milliseconds(lambda u: two_step(query[u], bare.items, depth, out[u], *lists))
    said, better = f"{size}, two-step {graph:.2f} ms with recall {recall:.3f}", graph < scan and recall >= RECALL
    return ("two-step", made, f"two-step: {said}") if better else ("exact", bare, f"exact: {said}")


def _milliseconds(request: Callable[[slice], Any]) -> float:
    """The median of single requests, after one to warm up."""
    took = []
    for u in [ROWS[0], *ROWS]:
        start = time.perf_counter()
        request(u)
        took.append(1000 * (time.perf_counter() - start))
    return float(np.median(took[1:]))
