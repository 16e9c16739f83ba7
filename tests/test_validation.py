"""Ranks of held-out items in the whole catalogue, against a sort and against scikit-learn."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from bachlib.model.methods import build
from bachlib.model.sphere import KERNELS
from bachlib.model.twotower import TwoTower
from bachlib.rank.counting import CHUNK, FLOOR, ROWS, between, cosines, counted_ranks, densities, in_chunks
from bachlib.rank.metrics import average_precision_of_ranks
from bachlib.rank.ranks import plain_ranks, rank_blocks, ranks, sample_users, score_blocks, target_ranks
from bachlib.serve.density import LeftOut, Query, brute_force


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


@pytest.mark.parametrize("rule", [*KERNELS, "max over heads"])
@pytest.mark.parametrize("kappa", [0.0, 1e-30, 0.3, 14.0, 300.0, 30_000.0, 1e15, 2e38])
@pytest.mark.parametrize(("d", "k"), [(16, 4), (8, 1), (5, 3)])
def test_counted_ranks_are_those_of_serving(rule, kappa, d, k):
    """Against brute force in float64: with ties, cosines of ±1, items left out (also targets), weights far apart."""
    rng, (B, n) = torch.Generator().manual_seed(d), (6, 1500)  # more items than a chunk has
    heads = normalize(torch.randn(B, k, d, generator=rng), dim=-1)
    items = normalize(torch.randn(n, d, generator=rng), dim=-1)
    items[7], items[8], items[100:200] = -heads[3, 0], heads[2, 0], items[1300:1400]
    kappas = kappa * (0.5 + torch.rand(B, k, generator=rng).double())
    log_pi = torch.randn(B, k, generator=rng).log_softmax(-1).double()
    weights = (np.zeros((B, k)), np.ones((B, k)))
    if rule in KERNELS:
        weights = ((log_pi + KERNELS[rule].log_normalizer(kappas, d)).numpy(), kappas.numpy())
    targets = torch.stack([torch.randperm(n, generator=rng)[:10] for _ in range(B)]).numpy()
    targets[3, 0], targets[2, 1], targets[:, 2], targets[:, 3] = 7, 8, 150, 1350
    drawn = np.random.default_rng(0)
    left = LeftOut.of([np.setdiff1d(drawn.choice(n, 60), targets[u] if u else []) for u in range(B)])
    left = LeftOut.of([[*left.items[: left.starts[1]], targets[0, 4]], *np.split(left.items, left.starts[1:-1])[1:]])
    found = counted_ranks(heads, items, *weights, rule, targets, left.items, left.starts)
    order = brute_force(Query(heads.numpy(), *weights, rule), items.numpy(), n, left).found
    for u in range(B):
        there = order[u][order[u] < n]
        where = np.empty(n, int)
        where[np.concatenate([there, np.setdiff1d(np.arange(n), there)])] = np.arange(1, n + 1)
        assert where[targets[u]].tolist() == found[u].tolist()


def test_cosines_of_a_chunk_are_the_product():
    """Odd dimensions, rows in the middle, a chunk that is not full."""
    rng = torch.Generator().manual_seed(0)
    rows = normalize(torch.randn(3 * ROWS, 7, generator=rng), dim=-1).numpy()
    items = normalize(torch.randn(CHUNK + 44, 7, generator=rng), dim=-1).numpy()
    chunks, out = in_chunks(items), np.full((2 * ROWS, CHUNK), np.nan, np.float32)
    found = np.hstack([(cosines(rows, ROWS - 1, chunk, out), out.copy())[1] for chunk in chunks])
    wanted = rows[ROWS - 1 : 3 * ROWS - 1].astype(float) @ items.astype(float).T
    assert np.abs(found[:, : len(items)] - wanted).max() < 11 * 2.0**-24 and not found[:, len(items) :].any()


@pytest.mark.parametrize(("power", "soft"), [(True, True), (False, True), (False, False)])
def test_rough_densities_are_within_their_bound(power, soft):
    """Every float32 cosine step of 1e-4 at κ from 0.1 to 300, against float64."""
    t = np.linspace(-1, 1, 20_001, dtype=np.float32)[None]
    for kappa in (0.1, 1.0, 14.0, 300.0):
        exponent = np.log2(np.maximum(1 + t[0].astype(float), 2.0**-52)) if power else t[0] / np.log(2)
        own = np.log(2) * kappa * (exponent.astype(float))[None] if soft else t.astype(float)
        weight, rough = np.full((1, 1), -20.0), np.empty(t.shape[1], np.float32)
        slope = np.float32([kappa if power else kappa / np.log(2)])
        densities(t, np.float32([-20.0]), slope, power, soft, rough)
        lowest = np.full((1, 1), (20.0 + FLOOR) * np.log(2))
        low, high = between(own, lowest, weight, np.full((1, 1), kappa), 8, power, soft)
        inside = (rough >= low) & (rough <= high)
        assert inside.all()
        if soft:  # the bound need not be wide
            fair = (rough > 1e-4) & (rough < 1e37)
            share = rough[fair] / 2.0 ** (kappa * exponent - 20)[fair]
            assert np.abs(share - 1).max(initial=0) < 1e-5 * max(kappa, 1)


@pytest.mark.parametrize("name", ["p-bach", "all-multihead", "standard"])
def test_ranks_without_scores_are_those_of_the_scores(world, name):
    model, users = build(name, world, d=16, **({} if name == "standard" else {"k": 3})), np.arange(world.n_users)
    for exclude in ("earlier", "history", "nothing"):
        found = np.concatenate([found for _, found in rank_blocks(model, world, users, "test", exclude)])
        blocks = list(score_blocks(model, world, users, "test", exclude))
        plain = np.concatenate([plain_ranks(block.scores, block.targets) for block in blocks])
        assert (found != plain).mean() < 2e-3 and np.abs(found - plain).max() <= 1  # scores are float32


def test_a_score_of_ones_own_is_ranked_by(world):
    class Reversed(TwoTower):
        def score(self, history):
            return torch.arange(self.n_items, 0.0, -1).expand(len(history), -1)

    model = build("p-bach", world, 3, d=16)
    model.__class__ = Reversed
    found = target_ranks(model, world, np.arange(5), "test")
    for u in range(5):
        *earlier, targets = world.split(u)
        assert found[u].tolist() == [1 + item - np.sum(np.concatenate(earlier) < item) for item in targets]
