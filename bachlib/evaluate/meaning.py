"""What heads stand for, in words: which genres a head likes more than people do on average, and a name made of these.

A head's softmax over the catalogue (eq. 12) gives p_r(g), the share of its items that have genre g; p(g) is that share
among all training likes. The ratio p_r(g) / p(g) is the lift. A name is the genre that sets the head apart most,
p_r(g) log(p_r(g) / p(g)), with the next one where that tells about as much.

Heads of one user mean that user's interests. Over users only a codebook's heads are the same; the heads of a personal
model share a slot, and a slot may mean something else for everybody: then its name says that it is mixed.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.cluster.vq import kmeans2

from bachlib.data import Dataset
from bachlib.evaluate.evaluation import genre_matrix, genre_names
from bachlib.model.svd import pure_svd

MIXED = "mixed"
FEW = 64  # genres one can tell apart in a picture
TELLS = 0.12  # nats that a genre has to set a head apart by to lend it its name


class Genres(NamedTuple):
    names: list[str]
    member: Float[np.ndarray, "n g"]  # 1 where an item has the genre
    likes: Float[np.ndarray, " g"]  # share of the training likes that have it

    @property
    def first(self) -> Int[np.ndarray, " n"]:
        """One genre of each item, the rarest it has; −1 for an item without any."""
        rarest = np.where(self.member > 0, -self.likes, -np.inf).argmax(1) if len(self.names) else 0
        return np.where(self.member.any(1), rarest, -1)


def genres_of(dataset: Dataset) -> Genres:
    """The genres of a data set; none where its log has none."""
    member, names = genre_matrix(dataset), genre_names(dataset)
    count = np.asarray(dataset.matrix("train").sum(0)).ravel()
    return Genres(names, member, count @ member / max(1.0, count.sum()))


def topics_of(dataset: Dataset, n: int = 16) -> Genres:
    """The genres of a data set; where its log has none, or thousands, n clusters of items that the same people like.

    Clusters are spherical k-means on PureSVD rows of the training likes, so they know nothing of held-out items.
    """
    if 0 < len(genre_names(dataset)) <= FEW:
        return genres_of(dataset)
    rows = pure_svd(dataset, min(n, dataset.n_items - 1, dataset.n_users - 1)).items
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    _, which = kmeans2(rows, min(n, len(rows)), seed=0, minit="++")
    kept, which = np.unique(which, return_inverse=True)
    member = np.eye(len(kept), dtype=np.float32)[which]
    count = np.asarray(dataset.matrix("train").sum(0)).ravel()
    return Genres([f"cluster {c + 1}" for c in range(len(kept))], member, count @ member / max(1.0, count.sum()))


def topics_of_users(dataset: Dataset, topics: Genres) -> Float[np.ndarray, "U g"]:
    """How much a user has of each topic: the planted π, or the shares among all items of the user."""
    if dataset.meta["source"] == "planted":
        return dataset.truth.pi[:, np.argsort(dataset.truth.genres)]  # topics are in the order of their names
    member = topics.member / np.maximum(topics.member.sum(1, keepdims=True), 1)
    counts = np.asarray(dataset.matrix("all") @ member)
    return counts / np.maximum(counts.sum(1, keepdims=True), 1e-12)


def over_users(of_heads: Float[np.ndarray, "U k g"], pi: Float[np.ndarray, "U k"]) -> Float[np.ndarray, "k g"]:
    """What head r stands for over many users, each with the weight π_u^(r)."""
    weight = pi / np.maximum(pi.sum(0), 1e-12)
    return np.einsum("uk,ukg->kg", weight, of_heads)


def lift(share: Float[np.ndarray, "k g"], likes: Float[np.ndarray, " g"]) -> Float[np.ndarray, "k g"]:
    """How many times as often a genre is among a head's items as among all likes."""
    return share / np.maximum(likes, 1e-12)


def head_names(share: Float[np.ndarray, "k g"], genres: Genres) -> list[str]:
    """A name for each head; the second of two heads with one name gets a number, a mixed one has none to keep apart.

    Without genres there are no names.
    """
    if not genres.names:
        return [""] * len(share)
    tells = share * np.log(np.maximum(lift(share, genres.likes), 1e-12))
    given: list[str] = []
    plain: list[str] = []  # without numbers
    for row in tells:
        first, *rest = np.argsort(-row)
        name = genres.names[first] if row[first] > TELLS else MIXED
        if name != MIXED and rest and row[rest[0]] > max(TELLS, 0.6 * row[first]):
            name += f" + {genres.names[rest[0]]}"
        same = plain.count(name)
        plain.append(name)
        given.append(f"{name} #{same + 1}" if same and name != MIXED else name)
    return given
