"""PureSVD: the frozen item table under every item tower (appendix B; Cremonesi et al. 2010).

The rank-64 truncated SVD  X ≈ U Σ Vᵀ  of the binary user–item matrix. By default X holds the training prefixes only.
The paper's text says all liked interactions (`svd_on="all"`), but then the frozen table contains the test items.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.sparse.linalg import svds

from bachlib import BachError
from bachlib.data import Dataset


class PureSVD(NamedTuple):
    items: Float[np.ndarray, "n_items rank"]  # V, orthonormal columns, strongest first
    singular_values: Float[np.ndarray, " rank"]

    def scores(self, histories: Float[np.ndarray, "B n_items"]) -> Float[np.ndarray, "B n_items"]:
        """x V Vᵀ: PureSVD as a recommender, for rows x of the user–item matrix (dense or sparse)."""
        return (histories @ self.items) @ self.items.T


def fold_in(dataset: Dataset, svd: PureSVD, likers: list[Int[np.ndarray, " m"]]) -> Float[np.ndarray, "new rank"]:
    """PureSVD rows of new items, from the users of the data set who liked each of them.

    V = Xᵀ U Σ⁻¹ and U = X V Σ⁻¹, so a new column x has the row xᵀ X V Σ⁻². X holds the training prefixes, so `svd` must
    be theirs. The rows have the scale of the item tower (mean square length 1), as `Retriever.add(rows)` expects.
    """
    rows, matrix = [], dataset.matrix("train")
    for users in likers:
        users = np.unique(users)
        if not len(users):
            raise BachError("an item that nobody has liked has no PureSVD row; pass a vector for it to Retriever.add")
        if users.dtype.kind not in "iu":
            raise BachError(f"likers should hold user ids, one list per new item; got {users.tolist()[:3]} …")
        together = np.asarray(matrix[dataset.check_users(users)].sum(0), np.float64)
        rows.append(together @ svd.items / svd.singular_values.astype(np.float64) ** 2)
    n, rank = svd.items.shape
    return (np.concatenate(rows) * np.sqrt(n / rank)).astype(np.float32)


def pure_svd(dataset: Dataset, rank: int = 64, svd_on: Literal["train", "all"] = "train") -> PureSVD:
    """The strongest `rank` right singular vectors of the binary user–item matrix, each with a fixed sign."""
    matrix = dataset.matrix(svd_on).astype(np.float64)
    limit = min(matrix.shape) - 1
    if not 1 <= rank <= limit:
        size = f"{dataset.n_users:,} users and {dataset.n_items:,} items"
        raise BachError(f"rank={rank}: should be 1 … {limit} for {size}")
    start = np.random.default_rng(0).normal(size=min(matrix.shape))  # ARPACK's default start is random
    _, sigma, vt = svds(matrix, k=rank, v0=start, return_singular_vectors="vh")
    order = np.argsort(-sigma)
    v = vt[order].T
    v *= np.sign(v[np.abs(v).argmax(axis=0), np.arange(rank)])  # a singular vector is unique up to its sign
    return PureSVD(v.astype(np.float32), sigma[order].astype(np.float32))
