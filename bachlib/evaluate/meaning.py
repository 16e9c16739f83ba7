"""Names for heads: the genres that a head prefers compared with all users.

A head's softmax over the catalogue (eq. 12) gives p_r(g), the share of its items that have genre g
(`diagnostics.interest_of_heads`); p(g) is that share among all training likes. The ratio p_r(g) / p(g) is the lift. The
name is the genre with the largest p_r(g) log(p_r(g) / p(g)), plus the next genre if it is nearly as large.

Heads of one user are that user's interests. Only the heads of a codebook are the same for all users; head r of a
personal model may mean something else for every user, and is then named "mixed".
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.vq import kmeans2

from bachlib.data import Dataset
from bachlib.model.svd import pure_svd

MIXED = "mixed"
FEW = 64  # the most genres that a picture can show
TELLS = 0.12  # nats that a genre must contribute to become the name


class Genres(NamedTuple):
    names: list[str]
    member: Float[np.ndarray, "n g"]  # 1 where an item has the genre
    likes: Float[np.ndarray, " g"]  # share of the training likes that have it

    @property
    def first(self) -> Int[np.ndarray, " n"]:
        """One genre of each item, the rarest it has; −1 for an item without any."""
        rarest = np.where(self.member > 0, -self.likes, -np.inf).argmax(1) if len(self.names) else 0
        return np.where(self.member.any(1), rarest, -1)


def genres_of(dataset: Dataset, labels: tuple[list[str], Float[np.ndarray, "n g"]] | None = None) -> Genres:
    """The genres of a data set, none where its log has none; or other labels (names, member) of its items."""
    names, member = labels or dataset.genres
    count = np.asarray(dataset.matrix("train").sum(0)).ravel()
    return Genres(names, member, count @ member / max(1.0, count.sum()))


def topics_of(dataset: Dataset, n: int = 16) -> Genres:
    """The genres of a data set; if its log has none, or thousands, n clusters of items that the same people like.

    Clusters are spherical k-means on PureSVD rows of the training likes, so they do not use held-out items. An item
    without training likes has no row and belongs to no cluster.
    """
    if 0 < len(dataset.genres.names) <= FEW:
        return genres_of(dataset)
    rows = pure_svd(dataset, min(n, dataset.n_items - 1, dataset.n_users - 1)).items
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    met = length[:, 0] > 1e-6
    rows = (rows / np.maximum(length, 1e-12))[met]
    _, which = kmeans2(rows, min(n, len(rows)), seed=0, minit="++")
    kept, which = np.unique(which, return_inverse=True)
    member = np.zeros((dataset.n_items, len(kept)), np.float32)
    member[met] = np.eye(len(kept), dtype=np.float32)[which]
    return genres_of(dataset, ([f"cluster {c + 1}" for c in range(len(kept))], member))


def topics_of_users(dataset: Dataset, topics: Genres) -> Float[np.ndarray, "U g"]:
    """The share of each topic in a user's taste: the planted π, or the shares among all items of the user."""
    if dataset.meta["source"] == "planted":
        return dataset.truth.pi[:, np.argsort(dataset.truth.genres)]  # topics are in the order of their names
    member = topics.member / np.maximum(topics.member.sum(1, keepdims=True), 1)
    counts = np.asarray(dataset.matrix("all") @ member)
    return counts / np.maximum(counts.sum(1, keepdims=True), 1e-12)


def over_users(of_heads: Float[np.ndarray, "U k g"], pi: Float[np.ndarray, "U k"]) -> Float[np.ndarray, "k g"]:
    """p_r(g) over many users, each with the weight π_u^(r)."""
    weight = pi / np.maximum(pi.sum(0), 1e-12)
    return np.einsum("uk,ukg->kg", weight, of_heads)


def lift(share: Float[np.ndarray, "k g"], likes: Float[np.ndarray, " g"]) -> Float[np.ndarray, "k g"]:
    """How many times as often a genre is among a head's items as among all likes; 1 for a genre that nobody likes."""
    return np.where(likes > 0, share / np.where(likes > 0, likes, 1), 1.0)


def head_names(share: Float[np.ndarray, "k g"], genres: Genres) -> list[str]:
    """A name for each head; equal names are numbered, except "mixed". Without genres the names are empty."""
    if not genres.names:
        return [""] * len(share)
    tells = share * np.log(np.maximum(lift(share, genres.likes), 1e-12))
    given, times = [], Counter()  # of each name, without its number
    for row in tells:
        first, *rest = np.argsort(-row)
        name = genres.names[first] if row[first] > TELLS else MIXED
        if name != MIXED and rest and row[rest[0]] > max(TELLS, 0.6 * row[first]):
            name += f" + {genres.names[rest[0]]}"
        times[name] += 1
        given.append(f"{name} #{times[name]}" if times[name] > 1 and name != MIXED else name)
    return given
