"""Ranks of held-out items in the whole catalogue, against a sort and against scikit-learn."""

import numpy as np
import pytest

from bachlib.model.methods import build
from bachlib.train.validation import average_precision, recall, sample_users, target_ranks


def test_ranks_are_those_of_a_sort(world):
    model = build("p-bach", world, 3, d=16)
    users = np.arange(0, world.n_users, 3)
    ranks = target_ranks(model, world, users, "test")
    model.eval()
    scores = model.score(world.history(users, "test")).numpy()
    for row, u in enumerate(users):
        *earlier, targets = world.split(u)
        allowed = np.setdiff1d(np.arange(world.n_items), np.concatenate(earlier))
        order = allowed[np.argsort(-scores[row, allowed], kind="stable")]
        where = {item: place + 1 for place, item in enumerate(order)}
        assert [where[item] for item in targets] == list(ranks[row])


def test_ties_rank_by_number(world):
    ranks = target_ranks(build("mostpop", world), world, np.arange(world.n_users), "valid")
    counts = np.asarray(world.matrix("train").sum(0))[0]
    prefix, targets, _ = world.split(5)
    allowed = np.setdiff1d(np.arange(world.n_items), prefix)
    order = list(allowed[np.lexsort((allowed, -counts[allowed]))])
    assert [order.index(item) + 1 for item in targets] == list(ranks[5])


def test_average_precision_is_scikit_learns(world):
    from sklearn.metrics import average_precision_score

    rng = np.random.default_rng(0)
    ranks = np.stack([rng.choice(200, 10, replace=False) + 1 for _ in range(50)])
    for row in ranks:
        relevant = np.isin(np.arange(1, 201), row)
        assert average_precision(row[None])[0] == pytest.approx(average_precision_score(relevant, -np.arange(200)))
    assert recall(np.array([[1, 5, 60, 70]]), 50)[0] == 0.5


def test_users_are_drawn_with_the_seed(world):
    assert (sample_users(world, 10, 1) == sample_users(world, 10, 1)).all()
    assert len(sample_users(world, 10**6, 1)) == world.n_users
