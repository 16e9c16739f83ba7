"""PureSVD against numpy's dense SVD."""

import numpy as np
import pytest

from bachlib import BachError
from bachlib.model.svd import pure_svd


@pytest.mark.parametrize("svd_on", ["train", "all"])
def test_against_dense(world, svd_on):
    svd = pure_svd(world, rank=10, svd_on=svd_on)
    dense = world.matrix(svd_on).toarray().astype(np.float64)
    _, sigma, vt = np.linalg.svd(dense, full_matrices=False)
    assert np.allclose(svd.singular_values, sigma[:10], rtol=1e-6)
    overlap = np.abs((svd.items * vt[:10].T).sum(0))
    assert np.allclose(overlap, 1, atol=1e-4)
    best = dense @ vt[:10].T @ vt[:10]
    assert np.allclose(svd.scores(dense), best, atol=1e-3)


def test_same_every_time_and_train_is_not_all(world):
    one, two, everything = pure_svd(world, 8), pure_svd(world, 8), pure_svd(world, 8, svd_on="all")
    assert (one.items == two.items).all()
    assert not np.allclose(one.items, everything.items, atol=1e-3)
    assert (np.take_along_axis(one.items, np.abs(one.items).argmax(0)[None], 0) > 0).all()


def test_errors(world):
    with pytest.raises(BachError, match=r"rank=5000: should be 1"):
        pure_svd(world, 5000)
    with pytest.raises(BachError, match="should be 'train'"):
        pure_svd(world, 8, svd_on="test")
