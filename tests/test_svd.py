"""PureSVD against numpy's dense SVD."""

import numpy as np
import pytest

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.model.methods import build
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


def test_the_item_table_never_sees_held_out_likes(world):
    """The same training prefixes with other validation and test items give the same table, bit by bit."""
    sequences, rng = np.array(world.sequences), np.random.default_rng(0)
    for u in range(world.n_users):
        start, end = world.offsets[u], world.offsets[u + 1]
        unseen = np.setdiff1d(np.arange(world.n_items), world.sequence(u))
        sequences[end - 20 : end] = rng.choice(unseen, 20, replace=False)
        assert (sequences[start : end - 20] == world.split(u)[0]).all()
    other = Dataset(world.folder, {**world.meta, "content_hash": "other held-out items"}, sequences, world.offsets)
    assert (other.matrix("train") != world.matrix("train")).nnz == 0
    assert (pure_svd(other, 16).items == pure_svd(world, 16).items).all()
    for method in ("p-bach", "sasrec"):
        tables = [build(method, data, k=2, d=16, ff=32).item_tower.table for data in (world, other)]
        assert (tables[0] == tables[1]).all()
    assert (build("mostpop", other).counts == build("mostpop", world).counts).all()
    everything = [pure_svd(data, 16, svd_on="all").items for data in (world, other)]
    assert np.abs(everything[0] - everything[1]).max() > 0.01, "the held-out items do differ"
    tables = [build("p-bach", data, k=2, d=16, ff=32, svd_on="all").item_tower.table for data in (world, other)]
    assert (tables[0] - tables[1]).abs().max() > 0.01


def test_errors(world):
    with pytest.raises(BachError, match=r"rank=5000: should be 1"):
        pure_svd(world, 5000)
    with pytest.raises(BachError, match="should be 'train'"):
        pure_svd(world, 8, svd_on="test")
