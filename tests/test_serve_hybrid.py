"""Serving a hybrid: cached lists for the prototypes and a scan or an index for the own heads are brute force."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import made, nothing, perturbed, query_of, unit
from test_serve_exact import ExactLists, same

from bachlib import BachError
from bachlib.model.sphere import KERNELS
from bachlib.serve import Retriever, codebook, hybrid, twostep
from bachlib.serve.density import LeftOut, brute_force
from bachlib.serve.lean import CodebookServer
from bachlib.serve.twostep import two_step

HYBRIDS = ["p-bach-hybrid", "v-bach-hybrid"]


def mixed(seed, n=400, s=4, o=2, B=3, d=16, rule="power-spherical", kappas=(0.0, 0.5, 5.0, 20.0, 300.0, 1e4)):
    """(what a codebook is computed from, π, the query): prototypes and own heads near items, some without weight."""
    rng = np.random.default_rng(seed)
    items = unit(rng.normal(size=(n, d)))
    items = items[rng.integers(n, size=n) // rng.integers(1, 4)]  # equal items
    near = items[rng.integers(n, size=(B, s + o))] + 0.3 * rng.normal(size=(B, s + o, d))
    heads, kappa = unit(near), rng.choice(kappas, size=(B, s + o))
    heads[:, :s], kappa[:, :s] = heads[0, :s], kappa[0, :s]
    pi = rng.dirichlet(np.full(s + o, 0.4), size=B)
    if rng.random() < 0.5:  # a user of own heads only, and one of prototypes only
        pi[0, :s], pi[-1, s:] = 0, 0
    pi /= pi.sum(1, keepdims=True)
    query = query_of(heads, pi, kappa, rule)
    log_c = query_of(heads[:1], np.ones((1, s + o)), kappa[:1], rule).log_weight[0, :s]
    return (heads[0, :s], kappa[0, :s], log_c, items, rule), pi, query


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1), n=st.integers(40, 400), s=st.integers(1, 6), o=st.integers(1, 4),
    d=st.sampled_from([2, 3, 16]), rule=st.sampled_from(list(KERNELS)), K=st.integers(1, 15),
    length=st.sampled_from([None, 5, 40, 400]),
)  # fmt: skip
def test_the_scan_is_brute_force_in_all_small_worlds(seed, n, s, o, d, rule, K, length):
    """From the table and from lists of any length, to the bit; concentrations from flat to needle-sharp."""
    of, pi, query = mixed(seed, n, s, o, d=d, rule=rule)
    arrays = codebook.compute(*of) if length is None else codebook.compute_lists(*of, length)
    rng = np.random.default_rng(seed)
    left_out = LeftOut.of([rng.integers(n, size=rng.integers(n // 2)) for _ in range(3)])
    best = hybrid.top_k(arrays, query, pi, K, left_out)
    same(best, brute_force(best.query, of[3], K, left_out))
    for a, b in zip(best.query, query, strict=True):
        assert a == b if isinstance(a, str) else np.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("length", [None, 50, 2000])
def test_few_items_are_scored(length):
    """Longer lists give a closer bound; the table the closest."""
    rng = np.random.default_rng(0)
    interests = unit(rng.normal(size=(30, 32)))
    items = unit(interests[rng.integers(30, size=20_000)] + 0.15 * rng.normal(size=(20_000, 32)))
    kappa, pi = np.full((20, 27), 20.0), rng.dirichlet(np.full(27, 0.2), size=20)
    heads = np.concatenate([np.repeat(interests[None, :24], 20, 0), unit(rng.normal(size=(20, 3, 32)))], 1)
    query = query_of(heads, pi, kappa, "von-mises-fisher")
    of = heads[0, :24], kappa[0, :24], query_of(heads, np.ones((20, 27)), kappa, query.rule).log_weight[0, :24], items
    arrays = codebook.compute(*of, query.rule) if length is None else codebook.compute_lists(*of, query.rule, length)
    best = hybrid.top_k(arrays, query, pi, 50, nothing(20))
    same(best, brute_force(best.query, items, 50, nothing(20)))
    assert best.n_scored / 20 < {None: 110, 2000: 1_500, 50: 20_001}[length]


def test_float32_sums_and_products_are_allowed_for():
    """So flat that densities differ by less than float32 can tell: the best item may have a smaller float32 bound."""
    rng = np.random.default_rng(0)
    for rule in KERNELS:
        for kappa in (1e-5, 0.005):
            heads, items = unit(rng.normal(size=(40, 36, 3))), unit(rng.normal(size=(5_000, 3)))
            heads[:, :32] = heads[0, :32]
            pi, sharp = rng.dirichlet(np.full(36, 0.5), size=40), np.full((40, 36), kappa)
            query = query_of(heads, pi, sharp, rule)
            log_c = query_of(heads[:1], np.ones((1, 36)), sharp[:1], rule).log_weight[0, :32]
            of = heads[0, :32], sharp[0, :32], log_c, items, rule
            for arrays in (codebook.compute(*of), codebook.compute_lists(*of, 4_000)):
                best = hybrid.top_k(arrays, query, pi, 20, nothing(40))
                same(best, brute_force(best.query, items, 20, nothing(40)))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), M=st.integers(1, 30), length=st.sampled_from([3, 40, 400]))
def test_where_the_bound_holds_cached_lists_and_exact_ones_give_brute_force(seed, M, length):
    of, pi, query = mixed(seed, kappas=(5.0, 20.0, 100.0))
    query = hybrid.query_of(codebook.compute_lists(*of, length), query, pi)
    index = hybrid.Cached(ExactLists(of[3]), codebook.compute_lists(*of, length))
    best, lists = two_step(query, of[3], 8, nothing(3), index, M=M, max_M=400)
    wanted = brute_force(query, of[3], 8, nothing(3))
    for u in np.flatnonzero(lists.enough):
        np.testing.assert_array_equal(best.found[u], wanted.found[u])
        np.testing.assert_array_equal(best.scores[u], wanted.scores[u])


def test_the_index_is_asked_for_own_heads_only():
    of, pi, query = mixed(3, kappas=(20.0,))
    asked, arrays = [], codebook.compute_lists(*of, 400)

    class Asked(ExactLists):
        def nearest(self, rows, M):
            asked.extend(rows)
            return super().nearest(rows, M)

    query = hybrid.query_of(arrays, query, pi)
    best, lists = two_step(query, of[3], 8, nothing(3), hybrid.Cached(Asked(of[3]), arrays), max_M=400, ask="every")
    assert lists.enough.all() and len(asked) >= 6
    own = {row.tobytes() for row in query.heads[:, 4:].reshape(-1, 16)}
    assert {row.tobytes() for row in asked} == own
    same(best, brute_force(query, of[3], 8, nothing(3)))


# --------------------------------------------------------------------------------------------------- the retriever

BOTH = {"k_shared": 6, "k_own": 2}


@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("how", [{}, {"budget": 40}, {"strategy": "two-step", "lists": "exact"}])
def test_a_retriever_of_a_hybrid(world, histories, tmp_path, monkeypatch, name, how):
    """Every strategy gives the slates of the scan over all heads; from the disk, too, and after items came and went."""
    monkeypatch.setattr(twostep, "SMALL", 0)  # a graph also here
    model = perturbed(world, name, **BOTH)
    scan, server = Retriever(model, "exact"), Retriever(model, **{"strategy": "codebook", **how})
    pi = scan.retrieve(histories, 20).pi
    new = unit(np.random.default_rng(0).normal(size=(9, 16)))
    for step in range(4):
        wanted, slate = scan.retrieve(histories, 20, pi=pi), server.retrieve(histories, 20, pi=pi)
        assert slate.certified.all() and slate.strategy == server.strategy and slate.head_share.shape == (30, 20, 8)
        np.testing.assert_array_equal(slate.items, wanted.items)
        np.testing.assert_allclose(slate.scores, wanted.scores, atol=1e-9)
        if step == 0:
            for each in (scan, server):
                each.remove(wanted.items[:, 0])
        elif step == 1:
            for each in (scan, server):
                each.add(vectors=np.concatenate([new, each.catalogue.vectors[wanted.items[:4, 1]]]))
        else:
            server = Retriever.load(server.save(tmp_path / str(step)), model)
            with pytest.raises(BachError, match="needs the heads of each user"):
                CodebookServer(tmp_path / str(step))


def test_two_step_without_the_scan_finds_nearly_all_and_certifies_nothing(world, histories, monkeypatch):
    monkeypatch.setattr(twostep, "SMALL", 0)
    server = made(world, "p-bach-hybrid", "two-step")
    assert server.catalogue.codebook is not None and server.recall(histories, 20) > 0.97
    assert not server.retrieve(histories, 20).certified.any()


def test_auto_compares_the_cached_lists(world, histories):
    server = made(world, "p-bach-hybrid", "auto")
    assert server.strategy in ("codebook", "exact") and "the codebook's lists" in server.why
    assert server.retrieve(histories, 5).certified.all()


def test_a_hybrid_is_steered(world, histories):
    model = perturbed(world, "p-bach-hybrid", **BOTH)
    slate = Retriever(model, "codebook").retrieve(histories[:3], 10, pi=np.eye(8)[7])
    assert (slate.head_share.argmax(-1) == 7).all() and slate.certified.all()
