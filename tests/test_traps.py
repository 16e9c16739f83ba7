"""The mistakes are made right: each wrong evaluation does what it says, and differs from the right one as it should."""

import math

import numpy as np
import pytest
import torch

from bachlib import BachError
from bachlib.evaluate import evaluation, metrics
from bachlib.model.methods import build
from bachlib.rank.ranks import target_ranks


def test_an_ideal_of_hits_calls_one_hit_perfect():
    ranks = np.array([[1] + [500] * 9, [3] + [500] * 9, [500] * 10])
    np.testing.assert_allclose(evaluation.ndcg_ideal_of_hits(ranks, 100), [1, 1 / math.log2(4), 0])
    assert (metrics.ndcg_of_ranks(ranks, 100) < 0.23).all()
    rng = np.random.default_rng(0)
    ranks = np.stack([rng.choice(300, 10, replace=False) + 1 for _ in range(200)])
    assert (evaluation.ndcg_ideal_of_hits(ranks, 100) >= metrics.ndcg_of_ranks(ranks, 100)).all()


def test_set_order_is_that_of_a_set():
    slates, targets = np.array([[900, 3, 40, 1]]), np.array([[900, 1]])
    place = {item: n for n, item in enumerate({900, 3, 40, 1}, 1)}
    expected = sum(1 / math.log2(1 + place[item]) for item in (900, 1)) / (1 + 1 / math.log2(3))
    assert evaluation.ndcg_in_set_order(slates, targets, 4)[0] == pytest.approx(expected)


def test_sampled_ranks_are_a_sample_of_the_full_ones(world):
    model = build("mostpop", world)
    users = np.arange(world.n_users)
    full, sampled = target_ranks(model, world, users, "test"), evaluation.sampled_ranks(model, world, users, n=100)
    assert sampled.min() >= 1 and sampled.max() <= 101 and (sampled <= full).all()
    catalogue = world.n_items - world.lengths[:, None] + 10
    np.testing.assert_allclose(sampled.mean(), (1 + 100 * full / catalogue).mean(), rtol=0.1)
    assert (sampled == evaluation.sampled_ranks(model, world, users, n=100)).all()
    assert (sampled <= 10).mean() > 3 * (full <= 10).mean()
    with pytest.raises(BachError, match="items left to sample from"):
        evaluation.sampled_ranks(model, world, users, n=world.n_items)


def test_other_held_out_items_are_no_negatives(world):
    """A model that knows the test items puts all ten before every negative."""

    class Knows(torch.nn.Module):
        n_hist = 50

        def score(self, history, user):
            scores, better = (
                torch.zeros(len(history), world.n_items),
                torch.arange(10.0, 0, -1).expand(len(history), -1),
            )
            return scores.scatter(1, torch.from_numpy(world.targets(user, "test")), better)

    assert (evaluation.sampled_ranks(Knows(), world, np.arange(30), n=200) == 1).all()
