"""What a log itself says of its users, without labels and without a model of ours: how spread out their likes are, and
how much a like resembles the one before.

Items are directions in the space of PureSVD on the training prefixes (rank `RANK` for every log), so the numbers of a
planted world and of a real log mean the same. Both are relative, so that they do not depend on the catalogue.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from bachlib.data import Dataset
from bachlib.model.svd import pure_svd
from bachlib.params import N_HIST
from bachlib.rank.ranks import sample_users

RANK = 16
USERS = 1_000
SPREAD, SESSIONS = "spread of a user's items", "likeness of neighbours"


def traits(dataset: Dataset, seed: int = 0) -> dict[str, float]:
    """Means over users, from the last training items.

    spread of a user's items: the effective number of directions (exp of the entropy of the eigenvalues of their Gram
    matrix) of a user's items over that of as many items drawn from all likes; 1: users are as broad as the log.
    likeness of neighbours: how much closer (cosine) two successive items are than two random ones of the same user.
    """
    rank = min(RANK, dataset.n_users - 1, dataset.n_items - 1)
    rng, vectors = np.random.default_rng(seed), _unit(pure_svd(dataset, rank).items)
    everything = dataset.matrix("train").indices
    spread, near = [], []
    for u in sample_users(dataset, USERS, seed):
        items = np.asarray(dataset.sequence(int(u)))[: dataset.begins["valid"][u]][-N_HIST:]
        of = vectors[items]
        spread.append(directions(of) / directions(vectors[rng.choice(everything, len(items))]))
        mixed = of[rng.permutation(len(of))]
        near.append((of[1:] * of[:-1]).sum(1).mean() - (mixed[1:] * mixed[:-1]).sum(1).mean())
    return {SPREAD: float(np.mean(spread)), SESSIONS: float(np.mean(near))}


def directions(vectors: Float[np.ndarray, "m d"]) -> float:
    """1 if all vectors are parallel, d if they are spread evenly over all directions."""
    share = np.linalg.svd(vectors, compute_uv=False) ** 2
    share = share[share > 0] / share.sum()
    return float(np.exp(-(share * np.log(share)).sum()))


def _unit(x: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n d"]:
    return x / np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-12)
