"""Who the pictures of a report are of: users clustered by their π_u, a few that differ, and what heads are called."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from scipy.cluster.vq import kmeans2

from bachlib.data import Dataset
from bachlib.evaluate import meaning
from bachlib.evaluate.diagnostics import encode_users, interest_of_heads
from bachlib.model.towers import Codebook
from bachlib.model.twotower import Encoded, TwoTower
from bachlib.rank.ranks import sample_users

MOST = 16  # heads with a colour of their own
CLUSTERS = 6
WORK = 200_000_000  # cosines a report may cost


class People(NamedTuple):
    users: Int[np.ndarray, " U"]
    encoded: Encoded
    pi: Float[np.ndarray, "U k"]  # equal for a method without weights
    cluster: Int[np.ndarray, " U"]  # 0 is the largest
    some: list[int]  # places of users that differ, one per cluster first
    genres: meaning.Genres
    share: Float[np.ndarray, "U k g"]  # p_r(g): what each head stands for
    shared: bool  # do all users have the same heads?
    shown: Int[np.ndarray, " c"]  # numbers of at most 16 heads, those with the largest mean π

    def seen_by(self, at: int) -> People:
        """The same people with the heads shown that one user has most of, where not all are."""
        return self._replace(shown=_shown(self.pi[at : at + 1]))

    @property
    def left(self) -> int:
        """How many heads are not shown."""
        return self.pi.shape[1] - len(self.shown)

    @property
    def over_users(self) -> Float[np.ndarray, "c g"]:
        """What the shown heads stand for on average."""
        return meaning.over_users(self.share, self.pi)[self.shown]

    @property
    def names(self) -> list[str]:
        return meaning.head_names(self.over_users, self.genres)

    def names_of(self, at: int) -> list[str]:
        """What the heads mean to one user."""
        return self.names if self.shared else meaning.head_names(self.share[at][self.shown], self.genres)


@torch.no_grad()
def people(model: TwoTower, dataset: Dataset) -> People:
    """A sample of the users before their test items; fewer of them where the catalogue is large."""
    n = int(np.clip(WORK // (model.k * dataset.n_items), 100, 1_000))
    users = np.sort(sample_users(dataset, n, 0, cold=dataset.cold is not None))
    encoded, genres = encode_users(model, dataset, users), meaning.genres_of(dataset)
    pi = encoded.log_pi.double().exp().cpu().numpy()
    shared = isinstance(model.encoder, Codebook) and model.encoder.shared is not None
    share = np.zeros((1, model.k, 0))
    if genres.names:
        share = interest_of_heads(model, encoded.heads[:1] if shared else encoded.heads, genres.member).cpu().numpy()
    share = np.broadcast_to(share, (*pi.shape, share.shape[-1]))
    cluster = clustered(np.sqrt(pi), CLUSTERS)
    return People(users, encoded, pi, cluster, _some(np.sqrt(pi), cluster), genres, share, shared, _shown(pi))


def _shown(pi: Float[np.ndarray, "U k"]) -> Int[np.ndarray, " c"]:
    return np.sort(np.argsort(-pi.mean(0), kind="stable")[:MOST])


def clustered(points: Float[np.ndarray, "n d"], most: int) -> Int[np.ndarray, " n"]:
    """Clusters of points, at most so many; the largest is 0."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")  # that a cluster is empty: it is dropped below
        found = kmeans2(points, min(most, len(points)), minit="++", rng=0)[1] if len(points) else np.zeros(0, int)
    _, cluster, sizes = np.unique(found, return_inverse=True, return_counts=True)
    return np.argsort(np.argsort(-sizes, kind="stable"))[cluster]


def _some(points: Float[np.ndarray, "U k"], cluster: Int[np.ndarray, " U"]) -> list[int]:
    """Users who differ: of each cluster the one nearest to its middle, then the next ones."""
    middle = np.stack([points[cluster == c].mean(0) for c in range(cluster.max() + 1)])
    away = pd.Series(((points - middle[cluster]) ** 2).sum(1))
    return np.lexsort((cluster, away.groupby(cluster).rank("first")))[:CLUSTERS].tolist()
