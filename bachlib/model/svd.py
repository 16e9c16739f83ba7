"""PureSVD: the frozen item table under every item tower (appendix B; Cremonesi et al. 2010).

The rank-64 truncated SVD  X ≈ U Σ Vᵀ  of the binary user–item matrix. By default X holds the training prefixes only:
the paper's literal text takes all liked interactions (`svd_on="all"`), which lets the test items into a table that is
frozen before training.
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
    """Rows of items that came after the decomposition, from the users of the data set who liked each.

    V = Xᵀ U Σ⁻¹ and U = X V Σ⁻¹, so a new column x has the row xᵀ X V Σ⁻². X are the training prefixes: `svd` has to be
    theirs, too. In the scale of the item tower (mean square length 1 over the table), so that `Retriever.add(rows)`
    takes them as they are.
    """
    rows = []
    matrix = dataset.matrix("train")
    for users in likers:
        users = np.unique(users)
        if not len(users):
            raise BachError("an item nobody has liked has no PureSVD row; give Retriever.add a vector of its own")
        if users.dtype.kind not in "iu":
            raise BachError(f"likers should be a list of users per new item; got {users.tolist()[:3]} …")
        together = np.asarray(matrix[dataset.check_users(users)].sum(0), np.float64)
        rows.append(together @ svd.items / svd.singular_values.astype(np.float64) ** 2)
    n, rank = svd.items.shape
    return (np.concatenate(rows) * np.sqrt(n / rank)).astype(np.float32)


def pure_svd(dataset: Dataset, rank: int = 64, svd_on: Literal["train", "all"] = "train") -> PureSVD:
    """The strongest `rank` right singular vectors of the binary user–item matrix, each with a fixed sign."""
    matrix = dataset.matrix(svd_on).astype(np.float64)
    limit = min(matrix.shape) - 1
    if not 1 <= rank <= limit:
        raise BachError(
            f"rank={rank}: a {matrix.shape[0]:,} × {matrix.shape[1]:,} matrix has at most {limit} factors to give"
        )
    start = np.random.default_rng(0).normal(size=min(matrix.shape))  # ARPACK's own start differs from call to call
    _, sigma, vt = svds(matrix, k=rank, v0=start, return_singular_vectors="vh")
    order = np.argsort(-sigma)
    v = vt[order].T
    v *= np.sign(v[np.abs(v).argmax(axis=0), np.arange(rank)])  # a singular vector is only known up to its sign
    return PureSVD(v.astype(np.float32), sigma[order].astype(np.float32))
