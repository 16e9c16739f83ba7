"""`only=`: an allow-list. The slate is brute force over the allowed items, to the bit, by every strategy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import RULES, made, nothing, query_of, random_case, unit

from bachlib import BachError
from bachlib.serve import Retriever, codebook, exact, hybrid, lean, twostep
from bachlib.serve.catalogue import Catalogue
from bachlib.serve.density import brute_force

CASES = [
    ("v-bach", "exact", {}),
    ("all-multihead", "exact", {}),
    ("p-bach", "two-step", {}),
    ("p-bach", "two-step", {"lists": "exact", "index": "ivf"}),
    ("p-bach-global", "codebook", {}),
    ("p-bach-global", "codebook", {"budget": 60}),
    ("p-bach-hybrid", "codebook", {}),
    ("p-bach-hybrid", "two-step", {"lists": "exact"}),
]


def plain(items, query, K, allowed) -> list[tuple[np.ndarray, np.ndarray]]:
    """(places, scores) of each request: every allowed item is scored by the plain version, alone."""
    found = []
    for u, rows in enumerate(allowed):
        rows = np.unique(np.asarray(list(rows), np.int64))
        best = brute_force(query[u : u + 1], np.ascontiguousarray(items[rows]), K, nothing(1))
        found.append((rows[best.found[0]], best.scores[0]))
    return found


def catalogues(rng, rule, n, k=3, d=8):
    """(strategy, catalogue, query or None, π, the query of brute force) of a random world, by every strategy."""
    items, pi, kappa, query = random_case(rng, n, 4, k, d, rule)
    base, fast = Catalogue.of(items), {"M": None, "max_M": None, "ask": "enough", "lists": "approximate"}
    yield "exact", base._replace(coarse=exact.Coarse.of(items)), query, pi, query, fast
    index = twostep.Neighbours(items, "hnsw")
    yield "two-step", base._replace(index=index), query, pi, query, fast
    yield "proved", base._replace(index=index), query, pi, query, fast | {"lists": "exact"}
    if rule == "max over heads":
        return
    shared, own = unit(rng.normal(size=(k, d))), rng.uniform(5, 40, k)
    log_c = query_of(shared[None], np.ones((1, k)), own[None], rule).log_weight[0]
    of, both = (shared, own, log_c, items, rule), rng.dirichlet(np.ones(2 * k), 4)
    mixed = query_of(
        np.concatenate([np.broadcast_to(shared, (4, k, d)), query.heads], 1), both,
        np.concatenate([np.broadcast_to(own, (4, k)), kappa], 1), rule,
    )  # fmt: skip
    for name, book in (("table", codebook.compute(*of)), ("lists", codebook.compute_lists(*of, n // 8))):
        yield name, base._replace(codebook=book), None, pi, codebook.query_of(book, pi, rule), fast
        yield f"hybrid {name}", base._replace(codebook=book), mixed, both, hybrid.query_of(book, mixed, both), fast


@pytest.mark.parametrize("rule", RULES)
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_allow_list_in_any_world(rule, seed):
    """Long and short lists, of items that are near, far or anywhere; with removed and excluded items."""
    rng = np.random.default_rng(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "MANY", 1)
        patch.setattr(exact, "WIDTH", 256)
        patch.setattr(exact, "FIRST", 40)
        patch.setattr(twostep, "SMALL", 0)
        n = int(rng.integers(200, 1500))
        K = int(rng.integers(1, 12))
        for name, catalogue, query, pi, whole, how in catalogues(rng, rule, n):
            near = np.argsort(-(catalogue.items @ whole.heads[0].T).max(1))
            order = (near, near[::-1], rng.permutation(n))[rng.integers(3)]
            only = [order[: rng.integers(60, n + 1)] for _ in range(4)] if rng.random() < 0.5 else None
            only = [order[: rng.integers(60, n + 1)]] * 4 if only is None else only
            gone = np.unique(rng.integers(n, size=5)) if catalogue.index is None else np.empty(0, int)
            left_out = [rng.choice(order[:80], rng.integers(20)) for _ in range(4)]
            now = catalogue._replace(gone=gone)
            slate = lean.search(now, query, pi, K, left_out, rule, how, only)
            allowed = [
                set(map(int, a)) - set(map(int, b)) - set(gone.tolist()) for a, b in zip(only, left_out, strict=True)
            ]
            for u, (places, scores) in enumerate(plain(now.items, whole, K, allowed)):
                assert set(slate.items[u].tolist()) <= allowed[u]
                if slate.certified[u]:
                    np.testing.assert_array_equal(slate.items[u], places, err_msg=name)
                    np.testing.assert_array_equal(slate.scores[u], scores, err_msg=name)
            assert name in ("two-step", "lists") or slate.certified.all(), name


@pytest.mark.parametrize(("name", "strategy", "how"), CASES)
def test_a_retriever_serves_only_what_is_allowed(world, histories, tmp_path, monkeypatch, name, strategy, how):
    """After items have come and gone, and from the disk; beside `exclude`, caps and raw ids."""
    monkeypatch.setattr(twostep, "SMALL", 0)
    raw, rng, K = world.items["raw_id"].tolist(), np.random.default_rng(1), 6
    retriever = made(world, name, strategy, dataset=world, **how)
    new = retriever.add(vectors=retriever.catalogue.vectors[:3], raw_ids=["a", "b", "c"], genres=[["New"]] * 3)
    retriever.remove([5, 6])
    loaded = Retriever.load(retriever.save(tmp_path), retriever.model)
    now, (query, pi) = retriever.catalogue, retriever.users.query(retriever.catalogue, list(histories))
    if retriever.users.hybrid:
        query = hybrid.query_of(now.codebook, query, pi)
    own = [set(h[h >= 0].tolist()) | {5, 6} for h in histories]
    scores = retriever.model.score(histories).numpy()
    for length in (90, 140, 400, 580):
        only = np.concatenate([rng.permutation(600)[:length], new])
        slate = retriever.retrieve(histories, K, only=only)
        allowed = [set(only.tolist()) - seen for seen in own]
        for u, (places, of) in enumerate(plain(now.vectors, query, K, allowed)):
            assert set(slate.items[u].tolist()) <= allowed[u]
            if slate.certified[u]:
                np.testing.assert_array_equal(slate.items[u], places)
                np.testing.assert_array_equal(slate.scores[u], of)
                old = sorted(i for i in allowed[u] if i < 600)
                assert slate.scores[u, 0] > scores[u, old].max() - 2e-3, "another way to score"
        assert slate.certified.all() or strategy == "two-step" or "budget" in how
        assert slate.certified.all() or length > 100, "short lists are always proved"
        again = loaded.retrieve(
            raw=[[raw[i] for i in h[h >= 0]] for h in histories], K=K, only=[[*raw, "a", "b", "c"][i] for i in only]
        )
        for field in ("items", "scores", "certified"):
            np.testing.assert_array_equal(getattr(again, field), getattr(slate, field))
    some = histories[:4]
    each = [rng.permutation(600)[:m] for m in (50, 500, 130, 590)]  # both kinds in one call
    together = retriever.retrieve(some, K, only=each, exclude=[[], each[1][:9], [], []])
    for u in range(4):
        alone = retriever.retrieve(some[u], K, only=each[u], exclude=each[1][:9] if u == 1 else None)
        np.testing.assert_array_equal(together.items[u], alone.items[0])
        np.testing.assert_allclose(together.scores[u], alone.scores[0], atol=1e-4)  # other batches of the towers
    assert not np.isin(together.items[1], each[1][:9]).any()
    capped = retriever.retrieve(some, K, only=[*range(300), *new], caps={"New": 0})
    assert not np.isin(capped.items, new).any() and capped.items.max() < 300
    everything = retriever.retrieve(some, K, only=np.arange(603))
    np.testing.assert_array_equal(
        everything.items[everything.certified], retriever.retrieve(some, K).items[everything.certified]
    )


def test_more_than_is_allowed_and_invalid_lists(world, histories):
    retriever, h = made(world, dataset=world), histories[0]
    left = np.setdiff1d(np.arange(600), h)[:5]
    assert sorted(retriever.retrieve(h, 5, only=left).items[0]) == left.tolist()
    assert h[-1] in retriever.retrieve(h, 3, only=[*left[:2], h[-1]], keep_history=True).items
    for wrong, said in (
        (dict(K=6, only=left), "K=6, but of 5 allowed items 5 remain for request 0 after history and exclusions"),
        (dict(K=5, only=[*left[:4], int(h[-1])]), "K=5, but of 5 allowed items 4 remain for request 0"),
        (dict(K=5, only=left, exclude=left[:1]), "K=5, but of 5 allowed items 4 remain"),
        (dict(K=1, only=[]), "K=1, but of 0 allowed items 0 remain for request 0"),
        (dict(K=1, only=[600]), "only: there is no item 600; items are 0 … 599"),
        (dict(K=1, only=[[1], [2]]), "only has 2 lists for 1 requests"),
        (dict(K=1, only="ab"), "only should be a list of item numbers"),
        (dict(K=0, only=left), "K should be a whole number ≥ 1"),
    ):
        with pytest.raises(BachError, match=said):
            retriever.retrieve(h, **wrong)
    with pytest.raises(BachError, match="remain for request 290"):
        retriever.retrieve([[]] * 300, 5, only=[*[left] * 290, left[:2], *[left] * 9])
    raw = world.items["raw_id"]
    with pytest.raises(BachError, match=r"only: the log has no item 'i00x' \(the nearest is "):
        retriever.retrieve(raw=[raw[3]], K=1, only=["i00x"])
    assert retriever.retrieve(raw=[raw[3]], K=1, only=set(raw[left])).items[0, 0] in left
