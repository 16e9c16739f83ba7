"""A rough estimate of how long a training takes: from earlier runs, or else from the arithmetic of its steps."""

from __future__ import annotations

import math
import timeit
from contextlib import suppress
from functools import lru_cache
from statistics import median

import numpy as np
from pydantic import ValidationError
from threadpoolctl import threadpool_limits

from bachlib.evaluate.paper import tables
from bachlib.experiment.notebooks import STATUS
from bachlib.experiment.settings import SINGLE, Experiment
from bachlib.experiment.stages import data_name, heads_of
from bachlib.files import output_dir, read_json
from bachlib.model.methods import METHODS

START = 10.0  # seconds for the kernel, imports and the evaluation of a small run
ROW, HEAD = 35e-6, 9e-6  # seconds per window, and per window and head, outside matrix products
COUNTED = {"movielens-1m": 253_468}  # windows with the paper's settings; its table has those of its own data sets
SHARE = 0.6  # the products of a step reach this share of the speed of a large product
ALL = {"mind": 1.4, "pos-multihead": 1.4, "bam": 1.4, "remi": 2.4, "maxmf": 1.2}  # targets="all"; others about 1
ALL |= {"p-bach-global": 2.3, "v-bach-global": 2.3}


def seconds(p: Experiment) -> float:
    """Seconds of one run on one core. Earlier runs of this method on this data set the speed, if there are any."""
    if METHODS[p.method].objective == "counts" or p.serve_by != "density":  # that training is another point's
        return START
    known, data = [], data_name(p)
    for path in output_dir("runs").glob(f"{p.method}-*/{STATUS}"):
        noted = read_json(path).get("notebooks", {}).get(SINGLE, {})
        with suppress(KeyError, ValidationError):  # a record of older code
            other, took = Experiment(**noted["values"]), noted["seconds"] - START
            if other.method == p.method and other.serve_by == "density" and data_name(other) == data and took > 1:
                known.append(took * _work(p) / _work(other))
    return START + (median(known) if known else windows(p) * _work(p))


def _work(p: Experiment) -> float:
    """Seconds of a training per window of the data: rows and heads, the towers, and the three products of the loss."""
    common = {"codebook": heads_of(p), "codebook-hybrid": p.k_shared}.get(METHODS[p.method].encoder, 0)  # shared logits
    own = heads_of(p) - common
    towers = 12 * p.n_hist * p.d * (p.item_width + p.d)
    loss = 6 * (own + common / p.batch_size) * (p.batch_size + p.n_negatives) * p.d
    more = ALL.get(p.method, 1.0) if p.targets == "all" else 1.0
    return more * p.epochs * (ROW + HEAD * max(1, own) + (towers + loss) / (SHARE * _speed()))


def windows(p: Experiment) -> float:
    """Number of training windows: of the prepared data, else as counted before or estimated; NaN if it is unknown."""
    if counted := read_json(output_dir("data", data_name(p)) / "meta.json").get("counts"):
        return counted["windows"]
    if p.source == "planted":
        return p.n_users * p.mean_events * 0.5
    return COUNTED.get(p.source) or tables()["datasets"].get(p.source, {}).get("windows", math.nan)


@lru_cache
def _speed() -> float:
    """Floating-point operations per second of one core in a large product."""
    a, b = np.ones((256, 512), np.float32), np.ones((512, 2048), np.float32)
    with threadpool_limits(1):
        return 2 * 256 * 512 * 2048 / min(timeit.repeat(lambda: a @ b, number=1, repeat=8))
