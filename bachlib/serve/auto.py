"""The strategy "auto": which one is the cheapest, timed on this machine with requests of the model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from timeit import timeit
from typing import Any

import numpy as np

from bachlib.serve import codebook, exact, hybrid
from bachlib.serve.catalogue import Catalogue
from bachlib.serve.kernels import VNNI
from bachlib.serve.lean import one_core
from bachlib.serve.slate import found_of
from bachlib.serve.twostep import two_step

# two-step (hnsw) over exact, one request, K = 100, k = 8, by `bach bench serve`: items → ratio
RATIOS = {20_000: 3.0, 50_000: 1.4, 200_000: 0.85 if VNNI else 0.3, 1_000_000: 0.16 if VNNI else 0.07}
WORTH_BUILDING, RECALL = 0.5, 0.99  # of a graph: the largest of these ratios, the smallest share of items found
TRIALS = [slice(u, u + 1) for u in range(24)]  # requests that are timed


@one_core()
def cheapest(retriever: Any) -> tuple[str, Catalogue, str]:
    """(strategy, its catalogue, why) of a `Retriever`, for requests of 100 items."""
    bare = retriever.built(retriever.catalogue, "exact")
    n, rng = len(bare.items), np.random.default_rng(0)
    K = min(100, n)
    histories = [rng.choice(bare.numbers, min(n, retriever.model.n_hist)) for _ in TRIALS]
    out = bare.left_out([np.empty(0, np.int64)] * len(TRIALS), K)
    anyone = np.zeros(len(TRIALS), np.int64)  # only read by models with a free π per user
    nothing = np.zeros(width) if (width := retriever.model.n_context) else None
    query, pi = retriever.users.query(bare, histories, user=anyone, context=nothing)
    scan = _milliseconds(lambda u: exact.top_k(query[u], bare.items, K, out[u], coarse=bare.coarse))
    said = f"{n:,} items, k = {retriever.model.k}: a scan takes {scan:.2f} ms"
    if retriever.users.prototypes() is not None:
        other, made, recall = "codebook", retriever.built(bare, "codebook"), 1.0
        if retriever.users.hybrid:
            took = _milliseconds(lambda u: hybrid.top_k(made.codebook, query[u], pi[u], K, out[u]))
        else:
            took = _milliseconds(lambda u: codebook.top_k(made.codebook, pi[u], K, out[u], retriever.rule))
        said += f", the codebook's lists {took:.2f} ms"
    else:
        # Building a graph takes long, so it has to be promising.
        expected = float(np.exp(np.interp(np.log(n), np.log(list(RATIOS)), np.log(list(RATIOS.values())))))
        if expected > WORTH_BUILDING:
            return "exact", bare, f"exact: {said}; two-step would take about {expected:.1f} times that"
        if find_spec("faiss") is None:
            return (
                "exact",
                bare,
                f"exact: {said}; two-step may be faster and needs faiss: pip install 'bachlib[faiss-cpu]'",
            )
        other, made = "two-step", retriever.built(bare, "two-step")
        lists = (made.index, *(retriever.settings[name] for name in ("M", "max_M", "ask")))
        found = two_step(query, bare.items, K, out, *lists)[0].found
        recall = found_of(exact.top_k(query, bare.items, K, out).found, found)
        took = _milliseconds(lambda u: two_step(query[u], bare.items, K, out[u], *lists))
        said += f", two-step {took:.2f} ms with recall {recall:.3f}"
    better = took < scan and recall >= RECALL
    return (other, made, f"{other}: {said}") if better else ("exact", bare, f"exact: {said}")


def _milliseconds(request: Callable[[slice], Any]) -> float:
    """The median of single requests, after one to warm up."""
    took = [timeit(partial(request, u), number=1) for u in [TRIALS[0], *TRIALS]]
    return 1000 * float(np.median(took[1:]))
