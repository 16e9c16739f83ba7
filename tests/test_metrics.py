"""Metrics against scikit-learn and ranx on thousands of random rankings with ties, and against definitions by hand."""

import itertools
import math

import numba
import numpy as np
import pytest
from sklearn.metrics import average_precision_score, ndcg_score

from bachlib import BachError
from bachlib.evaluate import metrics

CUTS = (1, 5, 10, 100)


@pytest.fixture(scope="module")
def cases():
    """(scores with many ties, ranking with ties by number, relevant items): 3,000 users, few or many of each."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(3000):
        n = int(rng.integers(2, 150))
        scores = rng.integers(0, max(2, n // 3), n).astype(float)  # two in three are tied
        relevant = rng.choice(n, int(rng.integers(1, min(n, 20) + 1)), replace=False)
        found.append((scores, np.lexsort((np.arange(n), -scores)), relevant))
    return found


def all_of(cases, metric, *k):
    ranked, relevant = [ranked for _, ranked, _ in cases], [relevant for *_, relevant in cases]
    return metric(ranked, relevant, *k)


def test_ap_and_ndcg_are_scikit_learns(cases):
    full, at = all_of(cases, metrics.average_precision), {k: all_of(cases, metrics.ndcg, k) for k in CUTS}
    for n, (scores, ranked, relevant) in enumerate(cases[:1000]):
        truth, place = np.isin(np.arange(len(scores)), relevant), np.empty(len(scores))
        place[ranked] = -np.arange(len(scores))  # the ranking with its ties broken
        assert full[n] == pytest.approx(average_precision_score(truth, place), abs=1e-12)
        for k in CUTS:
            assert at[k][n] == pytest.approx(ndcg_score([truth], [place], k=k, ignore_ties=True), abs=1e-12)


def test_all_are_ranxs(cases, monkeypatch):
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)  # as plain Python: ranx takes a minute to compile
    import ranx

    qrels, run = {}, {}  # ranx sorts users by name
    for n, (_, ranked, relevant) in enumerate(cases):
        qrels[f"{n:04}"] = {str(item): 1 for item in relevant}
        run[f"{n:04}"] = {str(item): float(len(ranked) - place) for place, item in enumerate(ranked)}
    names = [f"{name}@{k}" for name in ("recall", "ndcg", "map", "hit_rate") for k in CUTS]
    theirs = ranx.evaluate(ranx.Qrels(qrels), ranx.Run(run), ["map", *names], return_mean=False)
    np.testing.assert_allclose(all_of(cases, metrics.average_precision), theirs["map"], atol=1e-12, rtol=0)
    n_relevant = np.array([len(relevant) for *_, relevant in cases])
    ours = {
        "recall": metrics.recall,
        "ndcg": metrics.ndcg,
        "map": metrics.average_precision,
        "hit_rate": metrics.hit_rate,
    }
    for name, metric in ours.items():
        for k in CUTS:
            expected = theirs[f"{name}@{k}"]
            if name == "map":  # theirs is divided by all relevant items, also where only K could be found
                expected = expected * n_relevant / np.minimum(n_relevant, k)
            np.testing.assert_allclose(all_of(cases, metric, k), expected, atol=1e-12, rtol=0, err_msg=f"{name}@{k}")


def test_ndcg_over_all_orders_of_the_tied_is_scikit_learns_average():
    """scikit-learn shares out the gain among tied items: that is the mean over all ways to break the ties."""
    rng = np.random.default_rng(1)
    for _ in range(40):
        scores, relevant = rng.integers(0, 3, 6).astype(float), rng.choice(6, 2, replace=False)
        groups = [list(np.flatnonzero(scores == s)) for s in sorted(set(scores), reverse=True)]
        orders = [
            list(itertools.chain(*order))
            for order in itertools.product(*(map(list, itertools.permutations(g)) for g in groups))
        ]
        ours = np.mean([metrics.ndcg(order, relevant, 3) for order in orders])
        truth = np.isin(np.arange(6), relevant)
        assert ours == pytest.approx(ndcg_score([truth], [scores], k=3), abs=1e-12)


def test_by_hand():
    ranked, relevant = [7, 3, 9, 1, 4], {3, 4, 8}
    assert metrics.recall(ranked, relevant, 3) == pytest.approx(1 / 3)
    assert metrics.ndcg(ranked, relevant, 3) == pytest.approx(
        (1 / math.log2(3)) / (1 + 1 / math.log2(3) + 1 / math.log2(4))
    )
    assert metrics.average_precision(ranked, relevant) == pytest.approx((1 / 2 + 2 / 5) / 3)
    assert metrics.average_precision(ranked, relevant, 2) == pytest.approx((1 / 2) / 2)
    assert metrics.hit_rate(ranked, relevant, 1) == 0 and metrics.hit_rate(ranked, relevant, 2) == 1
    both = metrics.recall(np.array([[1, 2, 3], [3, 2, 1]]), np.array([[1, 2], [2, -1]]), 1)
    np.testing.assert_array_equal(both, [0.5, 0])


def test_from_ranks_and_from_lists_agree():
    rng = np.random.default_rng(2)
    ranked = np.stack([rng.permutation(60) for _ in range(200)])
    relevant = np.stack([rng.choice(60, 10, replace=False) for _ in range(200)])
    ranks = metrics.ranks_of(ranked, relevant)
    assert (np.take_along_axis(ranked, ranks - 1, 1) == relevant).all()
    np.testing.assert_array_equal(
        metrics.average_precision_of_ranks(ranks), metrics.average_precision(ranked, relevant)
    )


@pytest.mark.parametrize(
    "ranked, relevant, k, said",
    [
        ([1, 2, 1], [1], 2, "item 1 twice"),
        ([1, 2], [], 2, "no relevant item"),
        ([1, 2], [1, 1], 2, "twice"),
        ([1, 2], [1], 0, "k should be a whole number"),
        ([1, 2], [1], 2.5, "k should be a whole number"),
        ([[1, 2], [2, 1]], [[1]], 2, "both should have one per user"),
        (["a", "b"], ["a"], 2, "whole numbers"),
        ({1, 2}, [1], 2, "a set, which has no order"),
        ([[1, 2], [2, 1]], [1, 2], 2, "should also hold a list per user"),
        ([1, 2], 1, 2, "should be lists"),
        ([1, 2], [1], None, "k should be a whole number"),
    ],
)
def test_wrong_lists_are_said(ranked, relevant, k, said):
    with pytest.raises(BachError, match=said):
        metrics.recall(ranked, relevant, k)


# ------------------------------------------------------------------------------------------------ of the slate


def test_slates_by_hand():
    slates, n_items = np.array([[0, 1], [1, 2]]), 5
    assert metrics.coverage(slates, n_items) == 3 / 5
    popularity = np.array([0.5, 0.25, 0.125, 1.0, 0.0])
    np.testing.assert_allclose(metrics.novelty(slates, popularity), [1.5, 2.5])
    assert metrics.novelty(np.array([[4]]), popularity)[0] == 4  # known to nobody: half of the rarest
    known = np.array([[3, 0], [2, -1]])
    np.testing.assert_allclose(
        metrics.popularity_bias(slates, popularity, known), [0.375 / 0.75 - 1, 0.1875 / 0.125 - 1]
    )
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 0, 0], [0, 0, 0]])
    wanted = np.array([[1, 0, 1], [0, 1, 1]])
    np.testing.assert_allclose(metrics.interest_coverage(slates, labels, wanted), [0.5, 1.0])
    weighted = np.array([[0.9, 0.0, 0.1], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(metrics.interest_coverage(slates, labels, weighted), [0.9, np.nan])


def test_diversity_is_one_minus_the_mean_cosine():
    rng = np.random.default_rng(3)
    features, slates = rng.normal(size=(30, 4)), np.stack([rng.choice(30, 5, replace=False) for _ in range(6)])
    features[slates[0, 0]] = 0  # an item nobody described is like nothing, not even like itself
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-30)
    by_hand = [1 - np.mean([unit[a] @ unit[b] for a, b in itertools.permutations(slate, 2)]) for slate in slates]
    np.testing.assert_allclose(metrics.diversity(slates, features), by_hand, atol=1e-12)
    with pytest.raises(BachError, match="at least 2 items"):
        metrics.diversity(slates[:, :1], features)
    with pytest.raises(BachError, match="without padding"):
        metrics.coverage(np.array([[1, -1]]), 5)
