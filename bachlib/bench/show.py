"""Measurement of the explorer: from a moved slider to the refilled figure, with 20,000 items.

The drawing in the browser is not in it: that depends on the browser.
"""

from __future__ import annotations

from statistics import median
from typing import Any

import numpy as np

from bachlib.bench.measure import judged
from bachlib.data import planted, prepare
from bachlib.files import output_dir
from bachlib.model.methods import build
from bachlib.serve import Retriever
from bachlib.show.explorer import Explorer

N_ITEMS, K = 20_000, 8


def bench_explorer(times: int = 40) -> dict[str, Any]:
    """Half of the answers come sooner, one in twenty later than these milliseconds; retrieval alone beside it."""
    world = planted.write_world(n_users=300)
    dataset = prepare("planted", world, output_dir("data", world.name), quiet=True)
    retriever = Retriever(build("p-bach", dataset, K), "exact")
    more = np.random.default_rng(0).normal(size=(N_ITEMS - dataset.n_items, retriever.model.d))
    retriever.add(vectors=more / np.linalg.norm(more, axis=1, keepdims=True))
    explorer, took = Explorer({"p-bach": retriever}, dataset), []
    for n, value in enumerate(np.random.default_rng(1).random(times)):
        explorer.rows[n % K].slider.value = value
        took.append(explorer.answered_ms)
    found = {"median_ms": median(took), "p95_ms": float(np.quantile(took, 0.95))}
    about = {"name": f"an answer of the explorer, {N_ITEMS:,} items, k = {K}"}
    return about | found | judged(found, {"median_ms": 100, "p95_ms": 100})
