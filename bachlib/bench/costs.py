"""What a large system would cost, worked out from the measured growth: 100 million users, 10 million items, say.

Nothing of this size was run. Each row names what it assumes.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from bachlib import BachError

D, LINKS = 64, 64  # dimensions of a vector; links of an item in the graph's lowest level, 2 × 32


def seconds_at(table: pd.DataFrame, what: str, axis: str, value: float) -> float:
    """CPU seconds per window, user, request or call at a size: between two measured ones on their line on log–log,
    beyond the largest on the line through the last two, if it rises."""
    part = table[(table["what"] == what) & (table["axis"] == axis)].sort_values("value")
    if len(part) < 2:
        raise BachError(f"the growth of {what!r} with {axis!r} was not measured: bach bench growth")
    x, y = np.log(part["value"].to_numpy(float)), np.log((part["cpu_s"] / part["count"]).to_numpy(float))
    at = math.log(value)
    if x[0] <= at <= x[-1]:
        return float(np.exp(np.interp(at, x, y)))
    one, two = (0, 1) if at < x[0] else (-2, -1)
    slope = max((y[two] - y[one]) / (x[two] - x[one]), 0.0)  # costs that fall with size are noise
    return float(np.exp(y[two] + slope * (at - x[two])))


def costs(
    table: pd.DataFrame, *, users: float = 1e8, items: float = 1e7, k: int = 8, windows: float = 10,
    requests: float = 10_000, shards: int = 10, prototypes: int = 128, parallel: float = 0.8, busy: float = 0.5,
) -> pd.DataFrame:  # fmt: skip
    """A row per part of the system: the engine, CPU hours of a job or cores of a service, memory, and assumptions.

    `windows` per user and epoch; `requests` per second at the peak; `shards` of the graph; `parallel`: the share of
    linear speed-up that data-parallel training keeps; `busy`: how busy a serving core may be.
    """
    vectors, rows = items * D * 4 / 1e9, []

    def job(part: str, engine: str, seconds: float, gb: float, assumes: str) -> None:
        rows.append({"part": part, "engine": engine, "core hours": seconds / 3600, "GB": gb, "assumes": assumes})

    def service(engine: str, seconds: float, gb: float, assumes: str) -> None:
        found = {"part": "requests", "engine": engine, "ms": 1000 * seconds, "cores": requests * seconds / busy}
        rows.append(found | {"GB": gb, "assumes": assumes})

    grown = seconds_at(table, "train", "items", items) / seconds_at(table, "train", "items", 20_000)
    step = seconds_at(table, "train", "k", k) * max(grown, 1.0)
    encode = seconds_at(table, "encode", "k", k)
    tower = seconds_at(table, "item tower", "items", items)
    graph = shards * seconds_at(table, "index", "items", items / shards)
    job("one epoch", "torchrun, data-parallel towers", users * windows * step / parallel, vectors,
        f"{windows:g} windows per user, {parallel:.0%} of linear speed-up, candidates as on one machine; "
        "the PureSVD table is given and shared by the processes of a machine")  # fmt: skip
    job("vectors of the items", "one process per core", tower, vectors, "the cost of an item stays the same")
    job("heads of the users", "one process per core", users * encode, users * k * (D + 2) * 4 / 1e9,
        "all users, stored; none if users are encoded when they ask")  # fmt: skip
    job("the graph", f"faiss HNSW, {shards} shards", graph, vectors + items * LINKS * 4 / 1e9,
        "a shard is built as a catalogue of its size")  # fmt: skip
    service("encoding the user", encode, 0.0, "in batches of 512; none for stored heads")
    service("exact scan", seconds_at(table, "exact", "items", items) * _against(table, k), vectors,
            "on one machine, bound by its memory's speed only as much as the largest measured size")  # fmt: skip
    service(f"two-step, {shards} shards", shards * seconds_at(table, "two-step", "items", items / shards)
            * _against(table, k), vectors + items * LINKS * 4 / 1e9,
            "each request asks all shards; the growth measured on small graphs goes on")  # fmt: skip
    service("codebook, precomputed", seconds_at(table, "codebook", "items", items), items * prototypes * 8 / 1e9,
            f"{prototypes} shared prototypes and peaked profiles; densities and sorted lists of all items")  # fmt: skip
    return pd.DataFrame(rows)


def _against(table: pd.DataFrame, k: int) -> float:
    """How much longer a request with k heads takes than with the 8 of the other axes."""
    return 1.0 if k == 8 else seconds_at(table, "exact", "k", k) / seconds_at(table, "exact", "k", 8)
