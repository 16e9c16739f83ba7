"""Ranks of held-out items in the whole catalogue, against a sort and against scikit-learn."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from bachlib import NotFinite
from bachlib.model import mixture, scoring
from bachlib.model.methods import build
from bachlib.model.sphere import KERNELS
from bachlib.rank.metrics import average_precision_of_ranks
from bachlib.rank.ranks import plain_ranks, ranks, sample_users, target_ranks


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
        assert average_precision_of_ranks(row[None])[0] == pytest.approx(
            average_precision_score(relevant, -np.arange(200))
        )


def test_validation_has_the_bits_of_a_plain_mean():
    """Early stopping compares AUPRC values, so their arithmetic must not change: the mean of (hits so far) / rank."""
    rng = np.random.default_rng(1)
    for n_items in (40, 5_000, 50_000):
        ranks = np.stack([rng.choice(n_items, 10, replace=False) + 1 for _ in range(2_000)])
        plain = (np.arange(1, 11) / np.sort(ranks, axis=1)).mean(axis=1)
        np.testing.assert_array_equal(average_precision_of_ranks(ranks), plain)
        assert average_precision_of_ranks(ranks).sum() == plain.sum()


def test_users_are_drawn_with_the_seed(world):
    assert (sample_users(world, 10, 1) == sample_users(world, 10, 1)).all()
    assert len(sample_users(world, 10**6, 1)) == world.n_users


def test_fast_ranks_are_the_plain_ones_with_ties():
    rng = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 8, (60, 200), generator=rng).float()
    scores[torch.rand(60, 200, generator=rng) < 0.1] = -torch.inf  # excluded
    targets = torch.stack([torch.randperm(200, generator=rng)[:10] for _ in range(60)])
    np.testing.assert_array_equal(ranks(scores, targets), plain_ranks(scores, targets))


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("kappa", [0.0, 14.0, 35.0, 300.0, 30_000.0])
def test_ranking_scores_rank_as_the_density_in_float64(kernel, kappa):
    """Also where densities are too far apart for one scale, or all the same."""
    rng = torch.Generator().manual_seed(1)
    heads = normalize(torch.randn(30, 4, 16, generator=rng), dim=-1)
    items = normalize(torch.randn(500, 16, generator=rng), dim=-1)
    items[7] = -heads[3, 1]  # a cosine of −1
    log_pi = torch.randn(30, 4, generator=rng).log_softmax(-1)
    kappas = kappa * (0.5 + torch.rand(30, 4, generator=rng))
    around = torch.stack([torch.randperm(500, generator=rng)[:10] for _ in range(30)])
    found = scoring.ranking_scores(heads, items, log_pi, kappas, kernel, around)
    exact = mixture.log_density(heads.double(), items.double(), log_pi.double(), kappas.double(), kernel)
    if kappa == 0:
        assert (found == found[:, :1]).all()
        return
    ours, theirs = plain_ranks(found, around), plain_ranks(exact, around)
    assert (ours - theirs).abs().max() <= 1 and (ours != theirs).float().mean() < 0.02
    own = found.gather(1, around)
    assert (own > 0).all() == bool((found >= 0).all())  # densities, none of them lost; or logarithms


def test_ranking_scores_of_targets_far_apart():
    """A target opposite to the only head and one beside it: their densities are 2¹⁷⁰ apart, more than float32 holds."""
    t = torch.tensor([1.0, 0.999, 0.997, 0.995, 0.99, 0.5, -1.0])
    items = torch.stack([t, (1 - t**2).sqrt(), *[torch.zeros(7)] * 6], 1)[torch.tensor([4, 6, 3, 5, 2, 1, 0])]
    heads, one = torch.eye(8)[None, :1], torch.ones(1, 1)
    around = torch.tensor([[0, 1, 4]])  # of cosine 0.99, −1 and 0.997
    found = scoring.ranking_scores(heads, items, 0 * one, 59 * one, KERNELS["von-mises-fisher"], around)
    assert plain_ranks(found, around).tolist() == [[5, 7, 3]]


def test_ranking_scores_of_what_is_no_number_are_refused():
    heads, items = torch.full((2, 3, 8), torch.nan), normalize(torch.randn(20, 8), dim=-1)
    with pytest.raises(NotFinite):
        scoring.ranking_scores(
            heads, items, torch.zeros(2, 3), torch.ones(2, 3), KERNELS["power-spherical"], torch.zeros(2, 1).long()
        )
