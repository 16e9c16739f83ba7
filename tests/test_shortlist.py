"""Steering without a kernel: wherever a shortlist says "proved", it is the retriever's slate, items and order."""

import numpy as np
import pytest
from serving import made, perturbed

from bachlib import BachError
from bachlib.params import N_TEST
from bachlib.serve import Retriever
from bachlib.show.steering import MIME, Shortlist, rerank, shortlist, sliders, unpacked

K = 10


def weights(rng, k):
    """π of all kinds: spread, peaked, one head alone, some forbidden."""
    yield from rng.dirichlet(np.ones(k), 4)
    yield from rng.dirichlet(np.full(k, 0.2), 4)
    yield from np.eye(k)[:3]
    for _ in range(3):
        some = rng.dirichlet(np.ones(k))
        some[rng.choice(k, k // 2, replace=False)] = 0
        yield some / some.sum()


@pytest.mark.parametrize("name", ["p-bach", "v-bach", "p-bach-global", "v-bach-residual"])
@pytest.mark.parametrize("decimals", [None, 6])
def test_what_is_proved_is_the_retrievers_slate(world, histories, name, decimals):
    retriever, rng, proved, asked = made(world, name), np.random.default_rng(0), 0, 0
    for history in histories[:4]:
        of = shortlist(retriever, history, M=40)
        of = of if decimals is None else of.rounded(decimals)
        assert not np.isin(of.items, history).any() and len(of.items) < of.servable
        for pi in [of.pi, *weights(rng, 4)]:
            found = rerank(of, pi, K)
            exact = retriever.retrieve([history], K, pi=of.full(pi))
            asked, proved = asked + 1, proved + found.proved
            if found.proved:
                np.testing.assert_array_equal(found.items, exact.items[0])
                np.testing.assert_allclose(found.scores, exact.scores[0], atol=of.margin)
                np.testing.assert_allclose(found.share, exact.head_share[0], atol=1e-5)
            assert set(found.items) <= set(of.items) and (np.diff(found.scores) <= 0).all()
    assert proved > asked / 2, "a bound that proves nothing is no bound"


def test_a_short_list_is_not_taken_for_proved(world, histories):
    """With lists as short as the slate some slates are wrong; none of these is called proved."""
    retriever, rng, wrong = made(world, "p-bach"), np.random.default_rng(1), 0
    for history in histories[:10]:
        of = shortlist(retriever, history, M=4)
        for pi in weights(rng, 4):
            found, exact = rerank(of, pi, 4), retriever.retrieve([history], 4, pi=pi)
            same = (found.items == exact.items[0]).all()
            wrong += not same
            assert same or not found.proved
    assert wrong > 0, "this test would not notice a bound that always holds"


def test_lists_that_hold_the_whole_catalogue_prove_everything(world, histories):
    retriever = made(world, "v-bach")
    of = shortlist(retriever, histories[0], M=10**6)
    assert len(of.items) == of.servable == world.n_items - len(np.unique(histories[0]))
    assert np.isneginf(of.log_floor).all()
    for pi in weights(np.random.default_rng(2), 4):
        found = rerank(of, pi, 50)
        assert found.proved
        np.testing.assert_array_equal(found.items, retriever.retrieve([histories[0]], 50, pi=pi).items[0])


def test_many_heads_some_of_them_as_one_voice(world, histories):
    retriever = Retriever(perturbed(world, "p-bach-global", 12), "exact")
    rng = np.random.default_rng(3)
    for history in histories[:3]:
        of = shortlist(retriever, history, M=60, apart=[7, 2, 5])
        own = retriever.retrieve([history], K)
        np.testing.assert_allclose(of.full(of.pi), own.pi[0], atol=1e-12)
        assert np.isnan(of.kappa[-1]) and np.isnan(of.cosine[:, -1]).all() and np.isfinite(of.kappa[:-1]).all()
        for pi in [of.pi, *weights(rng, 4)]:
            found = rerank(of, pi, K)
            if found.proved:
                np.testing.assert_array_equal(found.items, retriever.retrieve([history], K, pi=of.full(pi)).items[0])
        assert rerank(of, of.pi, K).proved


def test_scores_closer_than_the_rounding_are_not_proved(world, histories):
    of = shortlist(made(world), histories[0])
    assert rerank(of, of.pi, K).proved
    coarse = of.rounded(0)
    assert coarse.margin > 0.5 and not rerank(coarse, of.pi, K).proved


def test_items_with_equal_vectors_are_not_called_apart(world, histories):
    retriever = made(world)
    first = retriever.retrieve([histories[0]], 1).items[0]
    retriever.add(vectors=retriever.catalogue.vectors[first])
    of = shortlist(retriever, histories[0])
    found = rerank(of, of.pi, K)
    assert found.enough and not found.apart
    exact = retriever.retrieve([histories[0]], K)
    assert set(found.items) == set(exact.items[0]), "a matrix product may round equal rows differently: order is open"
    np.testing.assert_allclose(found.scores, exact.scores[0], atol=of.margin)


def test_removed_items_are_not_in_a_shortlist(world, histories):
    retriever = made(world)
    gone = retriever.retrieve([histories[0]], 3).items[0]
    retriever.remove(gone)
    of = shortlist(retriever, histories[0])
    found = rerank(of, of.pi, K)
    assert found.enough and not np.isin(gone, of.items).any()
    np.testing.assert_array_equal(found.items, retriever.retrieve([histories[0]], K).items[0])


def test_a_user_with_a_free_pi(world, histories):
    retriever = Retriever(perturbed(world, "p-bach", pi="table"), "exact")
    of = shortlist(retriever, histories[3], user=3)
    exact = retriever.retrieve([histories[3]], K, user=3)
    np.testing.assert_array_equal(rerank(of, of.pi, K).items, exact.items[0])
    np.testing.assert_allclose(of.pi, exact.pi[0])


def test_wrong_input(world, histories):
    retriever = made(world)
    of = shortlist(retriever, histories[0])
    with pytest.raises(BachError, match="all-multihead weighs no heads"):
        shortlist(made(world, "all-multihead"), histories[0])
    with pytest.raises(BachError, match="history should be a list of item numbers"):
        shortlist(retriever, histories[:2])
    for pi in ([0, 0, 0, 0], [0.5, 0.5], [1, -1, 1, 0], [np.nan, 1, 0, 0]):
        with pytest.raises(BachError, match="pi should be 4 numbers"):
            rerank(of, pi)


def test_a_tie_across_the_edge_is_not_proved():
    """The last item of the slate and the next one are equal: which of them belongs here is not for this list to say."""
    sigma = np.array([[2.0], [1.0], [1.0]])
    of = Shortlist(np.arange(3), sigma, sigma / 9, np.array([-5.0]), np.ones(1), np.ones(1), np.eye(1), 9)
    assert rerank(of, [1.0], 1).proved
    assert rerank(of, [1.0], 2).enough and not rerank(of, [1.0], 2).proved


def test_sliders_hold_few_items_and_prove_most_slates(world):
    """Kept are the first items of many π, and a bound for each group of the others."""
    retriever, rng, asked, proved = made(world), np.random.default_rng(4), 0, 0
    shown = sliders(retriever.model, world, users=3)
    for one in shown.data["users"]:
        u = int(one["name"].split(":")[0].removeprefix("user "))
        earlier, keys = world.sequence(u)[:-N_TEST], ("items", "sigma", "cosine", "floor", "pi", "kappa")
        of = Shortlist(*(np.array(one[key]) for key in keys), np.eye(4), one["servable"], one["margin"])
        assert len(of.items) < of.servable and of.log_floor.ndim == 2
        for pi in [of.pi, *weights(rng, 4)]:
            found, exact = rerank(of, pi, K), retriever.retrieve([earlier], K, pi=pi / pi.sum())
            asked, proved = asked + 1, proved + found.proved
            assert not found.proved or (found.items == exact.items[0]).all()
    assert proved > 0.9 * asked
    data = shown._repr_mimebundle_()
    assert (
        unpacked(data[MIME]) == shown.data and "<table>" in data["text/html"] and "Sliders(user" in data["text/plain"]
    )
    assert len(data[MIME]["zlib"]) < 40_000 * len(shown.data["users"])
