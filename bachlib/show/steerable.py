"""The data of a report's steering: shortlists of some users, with titles, for a page that has no kernel."""

from __future__ import annotations

from html import unescape
from itertools import chain
from typing import Any

import numpy as np

from bachlib.data import Dataset
from bachlib.model.twotower import TwoTower
from bachlib.params import N_TEST
from bachlib.serve import Retriever
from bachlib.show.people import People
from bachlib.show.plots.style import GREY, colour, tag
from bachlib.show.shortlist import Shortlist, rerank, shortlist

K, M = 15, 100
LONGEST = 1_500  # items of a shortlist, about: beyond that it is not made longer
DECIMALS = 6  # of log densities; what that costs in certainty, the margin of the proof knows
NEAR = 3  # items of the history that are told for each item
LAST = 8  # items of the history that are listed


def steering(model: TwoTower, dataset: Dataset, of: People) -> dict[str, Any]:
    """What the sliders of the page work on; `report.js` reads it."""
    retriever = Retriever(model, "exact")
    lists = [_user(retriever, dataset, of.seen_by(at), at) for at in of.some]
    wanted = sorted({i for one in lists for i in (*one["items"], *one["history"], *chain(*one["near"]))})
    titles = dataset.titles
    return {
        "K": min(K, *(len(one["items"]) for one in lists)),
        "titles": {int(i): titles[i] for i in wanted},
        "users": lists,
    }


def _user(retriever: Retriever, dataset: Dataset, of: People, at: int) -> dict[str, Any]:
    u = int(of.users[at])
    earlier, later = np.split(np.asarray(dataset.sequence(u), np.int64), [-N_TEST])
    found = _long_enough(retriever, earlier, of.shown, u)
    near, cosine = _nearest(retriever, found, earlier)
    first = np.argsort(-found.pi[: len(of.shown)])[:2]
    names = [tag(int(r), name, 60) for r, name in zip(of.shown, of.names_of(at), strict=True)]
    return {
        "name": f"user {u}: " + ", ".join(f"{found.pi[n]:.0%} {unescape(names[n])}" for n in first),
        "names": [unescape(name) for name in names] + [f"the other {of.left} heads"] * bool(of.left),
        "colours": [colour(int(r)) for r in of.shown] + [GREY] * bool(of.left),
        "pi": [float(x) for x in found.pi],
        "kappa": _numbers(found.kappa, 2),
        "floor": _numbers(found.log_floor, DECIMALS),
        "margin": found.margin,
        "servable": found.servable,
        "items": found.items.tolist(),
        "sigma": [_numbers(row, DECIMALS) for row in found.log_sigma],
        "cosine": [_numbers(row, 3) for row in found.cosine],
        "near": near,
        "nearCosine": cosine,
        "history": earlier[-LAST:][::-1].tolist(),
        "later": later.tolist(),
    }


def _long_enough(retriever: Retriever, history: np.ndarray, shown: np.ndarray, u: int) -> Shortlist:
    """A shortlist that proves the slates of π_u and of equal weights, unless it would have to be very long.

    Equal weights are what is hardest to prove: most other slates are proved then as well.
    """
    depth = M
    while True:
        found = shortlist(retriever, history, depth, apart=shown, user=u).rounded(DECIMALS)
        asked = (found.pi, np.ones(len(found.pi)))
        enough = all(rerank(found, pi, min(K, len(found.items))).enough for pi in asked)
        if enough or len(found.items) >= LONGEST:
            return found
        depth *= 2


def _nearest(retriever: Retriever, of: Shortlist, history: np.ndarray) -> tuple[list[list[int]], list[list[float]]]:
    """For each item of the shortlist the items of the history that are closest to it."""
    vectors, history = retriever.catalogue.vectors, np.unique(history)
    cosine = vectors[of.items] @ vectors[history].T
    order = np.argsort(-cosine, axis=1, kind="stable")[:, :NEAR]
    close = np.take_along_axis(cosine, order, 1)
    return history[order].tolist(), [_numbers(row, 2) for row in close]


def _numbers(values: np.ndarray, decimals: int) -> list[float | None]:
    """For JSON: rounded, None where there is no number."""
    return [round(float(x), decimals) if np.isfinite(x) else None for x in values]
