"""An operator's hand on π, re-ranking for diversity, and a π for people without a history."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import unit

from bachlib import BachError
from bachlib.model.methods import build
from bachlib.serve import Retriever, Steering, rerank
from bachlib.serve.newcomers import FeatureGate, exemplars, pi_from_vectors

PI = np.array([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4]])


def test_each_hand():
    np.testing.assert_array_equal(Steering()(PI), PI)
    np.testing.assert_allclose(Steering(boost={1: 3.0})(PI)[0], np.array([0.5, 0.9, 0.2, 0]) / 1.6)
    np.testing.assert_allclose(Steering(forbid=[0])(PI)[0], [0, 0.6, 0.4, 0])
    np.testing.assert_allclose(Steering(set={3: 0.5})(PI), [[0.25, 0.15, 0.1, 0.5], [1 / 12, 2 / 12, 3 / 12, 0.5]])
    np.testing.assert_allclose(Steering(set={0: 0.5, 3: 0.5})(PI), [[0.5, 0, 0, 0.5]] * 2)
    np.testing.assert_allclose(Steering(cap={0: 0.2})(PI), [[0.2, 0.48, 0.32, 0], [0.1, 0.2, 0.3, 0.4]])
    np.testing.assert_allclose(Steering(cap={0: 0.2, 1: 0.4})(PI)[0], [0.2, 0.4, 0.4, 0])  # what 0 loses takes 1 over
    both = Steering(set={1: 0.5}, cap={0: 0.2})(PI)  # what was set stays, also when a cap has something to give away
    np.testing.assert_allclose(both[0], [0.2, 0.5, 0.3, 0])
    even = np.full(4, 0.25)
    np.testing.assert_allclose(Steering(blend=(even, 0.5))(PI), (PI + 0.25) / 2)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6))
def test_pi_stays_a_distribution(seed, k):
    rng = np.random.default_rng(seed)
    pi = rng.dirichlet(np.full(k, 0.5), size=3)
    steering = Steering(
        boost={int(r): float(rng.uniform(0.1, 5)) for r in rng.integers(k, size=2)},
        cap={int(rng.integers(k)): float(rng.uniform(1 / k, 1))},
        blend=(rng.dirichlet(np.ones(k)), float(rng.uniform())),
    )
    if k == 1 and next(iter(steering.cap.values())) < 1:
        return
    made = steering(pi)
    np.testing.assert_allclose(made.sum(1), 1, rtol=1e-12)
    assert (made >= 0).all() and all((made[:, r] <= most + 1e-9).all() for r, most in steering.cap.items())


@pytest.mark.parametrize(
    ("steering", "said"),
    [
        (Steering(forbid=[4]), "forbid: unknown head 4; heads are 0 … 3"),
        (Steering(boost={"a": 1}), "boost: unknown head 'a'"),
        (Steering(boost={0: "a"}), "boost of head 0 should be a number ≥ 0; got 'a'"),
        (Steering(forbid=5), "forbid should be a list of heads; got 5"),
        (Steering(cap=[0.5]), "cap should be {head: number}"),
        (Steering(blend=np.full(4, 0.25)), "blend should be \\(another π, its weight\\)"),
        (Steering(boost={0: -1}), "boost of head 0 should be a number ≥ 0; got -1"),
        (Steering(set={0: 1.2}), "set of head 0 should be a number ≥ 0 and at most 1"),
        (Steering(set={0: 0.7, 1: 0.7}), "the shares sum to 1.4"),
        (Steering(set={0: 0.7}, forbid=[0]), "head 0 is both forbidden and set"),
        (Steering(set={0: 0.7}, cap={0: 0.5}), "head 0 is set above its own cap"),
        (Steering(forbid=[0, 1, 2]), "leave user 0 without any head"),
        (Steering(cap={0: 0.1, 1: 0.1, 2: 0.1}), "leave no head for the rest"),
        (Steering(blend=(np.ones(4), 0.5)), "pi should sum to 1"),
        (Steering(blend=(np.full(4, 0.25), 2)), "should be between 0 and 1; got 2"),
        (Steering(set={0: 0.2}, forbid=[1, 2]), "set: the other heads leave user 0"),
    ],
)
def test_what_cannot_be(steering, said):
    with pytest.raises(BachError, match=said):
        steering(PI)


# ---------------------------------------------------------------------------------------------------- re-ranking


@pytest.fixture(scope="module")
def candidates():
    rng = np.random.default_rng(0)
    return np.sort(rng.normal(size=(2, 9)))[:, ::-1].copy(), unit(rng.normal(size=(2, 9, 4)))


def test_mmr_step_by_step(candidates):
    """Against the definition, item after item, for each request."""
    scores, vectors = candidates
    for trade in (0.0, 0.4, 1.0):
        made = rerank.mmr(scores, vectors, 6, trade)
        for row in range(2):
            relevance = (scores[row] - scores[row].min()) / np.ptp(scores[row])
            chosen = []
            for _ in range(6):

                def value(i, row=row, relevance=relevance, chosen=chosen, trade=trade):
                    near = max((float(vectors[row, i] @ vectors[row, j]) for j in chosen), default=0.0)
                    return trade * relevance[i] - (1 - trade) * near

                chosen.append(max((i for i in range(9) if i not in chosen), key=value))
            assert made[row].tolist() == chosen
    np.testing.assert_array_equal(rerank.mmr(scores, vectors, 9, 1.0), [range(9)] * 2)


def test_dpp_is_greedy_in_the_determinant(candidates):
    """Each step takes the item that makes the determinant of L largest, computed from scratch."""
    scores, vectors = candidates
    for strength in (0.2, 1.0, 3.0):
        made = rerank.dpp(scores, vectors, 4, strength)
        for row in range(2):
            quality = np.exp(strength * (scores[row] - scores[row].min()) / np.ptp(scores[row]))
            L = np.outer(quality, quality) * (vectors[row].astype(float) @ vectors[row].T.astype(float))
            chosen = []
            for _ in range(4):
                free = [i for i in range(9) if i not in chosen]
                chosen.append(max(free, key=lambda i: np.linalg.det(L[np.ix_([*chosen, i], [*chosen, i])])))
            assert made[row].tolist() == chosen


def test_rerankings_name_an_item_once_and_spread(world):
    model = build("p-bach", world, 4, d=16, ff=16, item_width=16)
    retriever = Retriever(model, "exact")
    slate = retriever.retrieve(world.history(np.arange(5), "test"), 60)
    vectors = retriever.catalogue.vectors[slate.items]

    def closeness(made):
        chosen = retriever.catalogue.vectors[made.items].astype(float)
        return np.einsum("bid,bjd->b", chosen, chosen).mean()

    plain = slate.take(np.tile(np.arange(20), (5, 1)), still_proved=True)
    assert plain.certified.all()
    for places in (rerank.mmr(slate.scores, vectors, 20, 0.3), rerank.dpp(slate.scores, vectors, 20)):
        made = slate.take(places)
        assert all(len(set(row)) == 20 for row in made.items.tolist()) and not made.certified.any()
        assert closeness(made) < closeness(plain)
    with pytest.raises(BachError, match="K=99: there are 60 candidates"):
        rerank.mmr(slate.scores, vectors, 99)
    with pytest.raises(BachError, match="trade should be between 0"):
        rerank.mmr(slate.scores, vectors, 5, 1.5)


def test_dpp_beyond_the_rank_of_the_vectors():
    """More items than dimensions: the determinant is 0, and still every item comes once."""
    rng = np.random.default_rng(1)
    made = rerank.dpp(rng.normal(size=(1, 30)), unit(rng.normal(size=(1, 30, 3))), 30)
    assert sorted(made[0].tolist()) == list(range(30))


# ----------------------------------------------------------------------------------------------------- newcomers


def test_vectors_go_through_the_gating_tower(world):
    """The vectors of a history in its place give the π of that history, and so its slate."""
    model = build("p-bach-global", world, 6, d=16, ff=16, item_width=16)
    retriever = Retriever(model, "codebook")
    history = world.history(np.arange(4), "test")
    assert (history >= 0).all()
    pi = pi_from_vectors(model, retriever.catalogue.vectors[history])
    own = retriever.retrieve(history, 10)
    np.testing.assert_allclose(pi, own.pi, atol=1e-6)
    np.testing.assert_array_equal(retriever.retrieve([[]] * 4, 10, pi=pi, exclude=history).items, own.items)
    with pytest.raises(BachError, match="a history of vectors should be"):
        pi_from_vectors(model, np.zeros((1, 2, 3)))
    with pytest.raises(BachError, match="finite numbers"):
        pi_from_vectors(model, np.full((1, 2, 16), np.nan))
    with pytest.raises(BachError, match="this model has none"):
        pi_from_vectors(build("all-multihead", world, 2, d=16, ff=16, item_width=16), np.zeros((1, 1, 16)))


def test_exemplars_stand_for_a_label(world):
    member, names = world.genres.member > 0, sorted({g for row in world.items["genres"] for g in row})
    counts = np.asarray(world.matrix("train").sum(0))[0]
    made = exemplars(member, counts, names)
    assert list(made) == names
    for column, (name, items) in zip(member.T, made.items(), strict=True):
        assert len(items) == 3 and column[items].all() and all(name in world.items["genres"][i] for i in items)
        assert counts[items].min() >= np.sort(counts[column])[-3]
    with pytest.raises(BachError, match="no item has the label Polka"):
        exemplars(np.zeros((5, 1), bool), np.ones(5), ["Polka"])


def test_features_predict_pi():
    """A world in which π is a softmax of the features: it is found, and beats the mean."""
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(3000, 5)), rng.normal(size=(5, 4))
    logits = x @ weight
    pi = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    gate = FeatureGate.fit(x[:2000], pi[:2000], ridge=1e-6)
    found = gate(x[2000:])
    np.testing.assert_allclose(found, pi[2000:], atol=5e-3)
    np.testing.assert_allclose(found.sum(1), 1, rtol=1e-12)
    for wrong in (dict(features=x[:3], pi=pi[:2]), dict(features=x[:2] * np.nan, pi=pi[:2])):
        with pytest.raises(BachError, match="features"):
            FeatureGate.fit(**wrong)
    with pytest.raises(BachError, match=r"features should be \(B, 5\)"):
        gate(np.ones(4))


def test_caps_by_hand():
    member = np.array([[1, 0], [1, 0], [1, 1], [0, 1], [0, 0], [0, 1]], bool)
    genres = [np.array(["a", "b"])[row] for row in member]
    for limits, wanted in (
        ({"a": 1}, [0, 3, 4, 5]),
        ({"b": 0}, [0, 1, 4]),
        ({}, [0, 1, 2, 3]),
        ({"a": 2, "b": 1}, [0, 1, 3, 4]),
    ):
        assert rerank.capped(genres, limits, 4) == wanted
    for size in range(1, 7):  # never above a cap, and greedy: what was passed over would have broken one
        taken = rerank.capped(genres, {"a": 2, "b": 2}, size)
        assert all(member[taken].sum(0) <= 2) and len(taken) <= size
        for i in range(6 if len(taken) < size else taken[-1]):
            assert i in taken or (member[[*[t for t in taken if t < i], i]].sum(0) > 2).any()
