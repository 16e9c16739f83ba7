"""Slates from lists: the heads two-step asks, what its bound and the scan allow for rounding, a codebook's lists."""

import numpy as np
import pytest
from serving import made, nothing, query_of, ranked, torch_scores, unit
from test_serve_exact import ExactLists, same

from bachlib import BachError
from bachlib.model.methods import build
from bachlib.serve import Retriever, codebook, exact
from bachlib.serve.density import LeftOut, brute_force
from bachlib.serve.lean import CodebookServer
from bachlib.serve.slate import found_of
from bachlib.serve.twostep import Neighbours, two_step
from bachlib.train import fit


def union_of_lists(query, items, M):
    """The paper's rule without code of the package: places of the M nearest items of each head."""
    nearest = [np.argsort(-(items.astype(float) @ head), kind="stable")[:M] for head in query.heads[0].astype(float)]
    return np.unique(np.concatenate(nearest))


# ----------------------------------------------------------------------------------------------- which heads are asked


def light_head(seed, n=2000, d=32):
    """Two heads at right angles, nearly all of π on the first; 2,000 items around it, the best five on the second."""
    rng = np.random.default_rng(seed)

    def around(head, cosine):
        away = rng.normal(size=(len(cosine), d))
        away[:, :2] = 0
        return cosine[:, None] * np.eye(d)[head] + np.sqrt(1 - cosine[:, None] ** 2) * unit(away)

    items = unit(np.concatenate([around(0, rng.uniform(0.3, 0.55, n)), around(1, rng.uniform(0.97, 1, 5))]))
    pi, kappa = np.array([[0.999, 0.001]]), np.full((1, 2), 30.0)
    return items, pi, kappa, query_of(unit(np.eye(d)[:2])[None], pi, kappa, "power-spherical")


@pytest.mark.parametrize("ask", ["enough", "every"])
@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_a_light_head_with_the_best_items_is_asked(kind, ask):
    for seed in range(5):
        items, pi, kappa, query = light_head(seed)
        wanted = ranked(torch_scores(query, items, pi, kappa)[0], 5)
        assert set(wanted) == set(range(2000, 2005))
        for K in (5, 20, 100):
            best, _ = two_step(query, items, K, nothing(1), Neighbours(items, kind), ask=ask)
            np.testing.assert_array_equal(best.found[0, :5], wanted)


def crowd(seed, k=6, d=8, n=4000):
    """A catalogue in few dimensions, with heads close enough that items between them count."""
    rng = np.random.default_rng(seed)
    items, middle = unit(rng.normal(size=(n, d))), rng.normal(size=(1, 1, d))
    heads = unit(middle + rng.normal(size=(1, k, d)))
    pi, kappa = rng.dirichlet(np.full(k, 0.3), size=1), rng.uniform(5, 30, size=(1, k))
    return items, pi, kappa, query_of(heads, pi, kappa, "power-spherical")


def test_every_head_is_asked_for_m_items():
    """ask="every" without growing lists is the paper's rule: the best of the union of the heads' top M."""
    less = 0
    for seed in range(20):
        items, pi, kappa, query = crowd(seed)
        scores = torch_scores(query, items, pi, kappa)[0]
        for M in (10, 30):
            union = union_of_lists(query, items, M)
            wanted = union[ranked(scores[union], 10)]
            best, lists = two_step(query, items, 10, nothing(1), ExactLists(items), M=M, max_M=M, ask="every")
            np.testing.assert_array_equal(best.found[0], wanted)
            assert (lists.depth == M).all()
            some, fewer = two_step(query, items, 10, nothing(1), ExactLists(items), M=M, max_M=M)
            less += (fewer.depth < M).any()
            assert np.isin(wanted, some.found[0]).mean() >= 0.9
    assert less > 10, 'ask="enough" should save something here'


@pytest.fixture(scope="module")
def trained(world):
    short = {"epochs": 2, "batch_size": 256, "n_negatives": 128, "valid_every": 2, "learning_rate": 0.01}
    model = build("p-bach", world, 8, d=16, ff=32, item_width=32)
    return fit(model, world, short, out=world.folder.parent.parent / "run-for-lists", quiet=True)


@pytest.mark.parametrize("M", [10, 20, 50])
def test_by_default_a_trained_model_loses_nothing_of_the_rule(world, trained, M):
    histories = list(world.history(np.arange(world.n_users), "test"))
    scan, *two = (
        Retriever(
            trained, "exact" if ask is None else "two-step", **({} if ask is None else {"ask": ask}), M=M, max_M=M
        )
        for ask in (None, "every", "enough")
    )
    wanted = scan.retrieve(histories, 10, keep_history=True).items
    rule, by_default = (found_of(wanted, one.retrieve(histories, 10, keep_history=True).items) for one in two)
    assert by_default >= rule - 0.001
    assert rule < 1 or M > 10, "lists this short should miss something, or this test shows nothing"


# ------------------------------------------------------------------------------------------------------------- proofs


def test_exact_lists_are_those_of_the_scan(world, histories):
    """Lists of two entries miss most of a slate. With lists="exact" the slate is certified, so it has to be exact."""
    wanted = made(world).retrieve(histories, 20)
    for index in ("hnsw", "ivf"):
        short = dict(strategy="two-step", index=index, M=2, max_M=2)
        approximate = made(world, **short).retrieve(histories, 20)
        assert found_of(wanted.items, approximate.items) < 0.95 and not approximate.certified.any()
        proved = made(world, **short, lists="exact").retrieve(histories, 20)
        assert proved.certified.all()
        np.testing.assert_array_equal(proved.items, wanted.items)
        np.testing.assert_array_equal(proved.scores, wanted.scores)


class SilentHead(ExactLists):
    """An index that finds nothing for one head."""

    def __init__(self, items, head):
        super().__init__(items)
        self.head = head

    def nearest(self, rows, M):
        t, places = super().nearest(rows, M)
        silent = (rows == self.head).all(1)
        t[silent], places[silent] = -np.inf, -1
        return t, places


@pytest.mark.parametrize("ask", ["enough", "every"])
def test_a_head_without_a_list_counts_as_cosine_one(ask):
    """The best items are beside the silent head, in no list: a bound that takes it for cosine 0 proves the wrong."""
    items, pi, kappa, _ = light_head(0)
    pi = np.array([[0.9, 0.1]])
    query = query_of(unit(np.eye(32)[:2])[None], pi, kappa, "power-spherical")
    wanted = ranked(torch_scores(query, items, pi, kappa)[0], 5)
    best, lists = two_step(query, items, 5, nothing(1), SilentHead(items, query.heads[0, 1]), M=500, max_M=500, ask=ask)
    assert not np.isin(wanted, best.found[0]).any()
    assert not lists.enough[0]
    best, lists = two_step(query, items, 5, nothing(1), ExactLists(items), M=500, max_M=500, ask=ask)
    np.testing.assert_array_equal(best.found[0], wanted)
    assert lists.enough[0], "with both lists the bound should hold, or this test shows nothing"


def rounded_down(d=256, n=4000, seed=0):
    """(head, items whose float32 cosine is the most too small, how much). The sums of products of a constant vector and
    one of two levels are rounded to the same side again and again: millionths in all, far more than for random vectors.
    """
    rng = np.random.default_rng(seed)
    m = rng.integers(1, d, n)
    a = rng.uniform(0, 1, n) / np.sqrt(m)
    b = np.sqrt((1 - m * a * a) / (d - m))
    items = np.where(np.arange(d) < m[:, None], a[:, None], b[:, None])
    items = items[items.sum(1) / np.sqrt(d) > 0.8].astype(np.float32)
    items /= np.linalg.norm(items.astype(float), axis=1)[:, None].astype(np.float32)
    head = np.full(d, d**-0.5, np.float32)
    heads = np.repeat(head[None], 4, 0)  # as the scan multiplies, with four heads
    off = (items @ heads.T)[:, 0] - items.astype(float) @ head.astype(float)
    order = np.argsort(off)[:20]
    return head, items[order], off[order]


def at_cosine(head, cosine, seed):
    """A unit vector at this cosine, with a small rounding error: its other part has random signs."""
    away = np.random.default_rng(seed).normal(size=len(head))
    away -= (away @ head) / (head @ head) * head.astype(float)
    away /= np.linalg.norm(away)
    return (cosine * head / np.linalg.norm(head.astype(float)) + np.sqrt(1 - cosine**2) * away).astype(np.float32)


@pytest.mark.parametrize("rule", ["power-spherical", "max over heads"])
def test_the_scan_allows_for_rounding(rule):
    """The best item's float32 cosine is below the cut by some millionths: without the allowance it would be skipped."""
    head, best_items, off = rounded_down()
    assert off[0] < -2e-6, "a BLAS that rounds this well needs another world"
    rng = np.random.default_rng(1)
    query = query_of(np.repeat(head[None, None], 4, 1), np.full((1, 4), 0.25), np.full((1, 4), 50.0), rule)
    for seed, (item, error) in enumerate(zip(best_items, off, strict=True)):
        truth = item.astype(float) @ head.astype(float)
        second = at_cosine(head, truth + 0.25 * error, seed)  # between the float32 cosine of the best and the true one
        items = np.concatenate([second[None], unit(rng.normal(size=(3500, 256))), item[None]])
        found = exact.top_k(query, items, 1, nothing(1))
        same(found, brute_force(query, items, 1, nothing(1)))
        assert found.found[0, 0] == 3501


def test_the_bound_of_two_step_allows_for_rounding():
    """The list ends with the second best item, because the float32 cosine of the best is too small: no proof."""
    head, best_items, off = rounded_down()
    query = query_of(head[None, None], np.ones((1, 1)), np.full((1, 1), 50.0), "power-spherical")
    as_scanned, close = query.heads[0].repeat(4, 0), 0

    class FourAtOnce(ExactLists):
        def nearest(self, rows, M):
            t = (self.items @ as_scanned.T).T[:1]  # the product that rounds so badly
            order = np.argsort(-t, axis=1, kind="stable")[:, :M]
            return np.take_along_axis(t, order, 1), order

    for item, error in zip(best_items, off, strict=True):
        truth = item.astype(float) @ head.astype(float)
        for seed in range(5):
            second = at_cosine(head, truth + 0.5 * error, seed)
            items = np.stack([second, item])
            best, lists = two_step(query, items, 1, nothing(1), FourAtOnce(items), M=1, max_M=1)
            wanted = brute_force(query, items, 1, nothing(1)).found[0, 0]
            assert wanted == 1 and (best.found[0, 0] == 1 or not lists.enough[0])
            close += best.found[0, 0] == 0 and best.worst[0] > query.bound(lists.end)[0] + 1e-9
    assert close > 0, "in some of these worlds the bare bound should hold, or this test shows nothing"


# ----------------------------------------------------------------------------------------------------------- codebook


def flat_codebook(k, kappa, n=20_000, d=3):
    """So flat that densities differ by less than a float32 can tell, in so few dimensions that many items are close."""
    rng = np.random.default_rng(0)
    prototypes, items = unit(rng.normal(size=(k, d))), unit(rng.normal(size=(n, d)))
    kappa, rule = np.full(k, kappa), "von-mises-fisher"
    log_c = query_of(prototypes[None], np.ones((1, k)), kappa[None], rule).log_weight[0]
    return (prototypes, kappa, log_c, items, rule), rng.dirichlet(np.full(k, 0.5), size=60)


@pytest.mark.parametrize("k", [4, 32])
def test_the_codebook_allows_for_rounding(k):
    """k = 4: the threshold algorithm proves many slates; k = 32: all by the dense product."""
    of, pi = flat_codebook(k, 0.005)
    best, looked = codebook.top_k(codebook.compute(*of), pi, 100, nothing(60), of[-1])
    assert (looked < 20_000).any() if k == 4 else (looked == 20_000).all()
    same(best, brute_force(best.query, of[3], 100, nothing(60)))


@pytest.mark.parametrize("length", [9_000, 19_000])
def test_lists_alone_allow_for_rounding(length):
    of, pi = flat_codebook(4, 1e-5)
    arrays = codebook.compute_lists(*of, length)
    best, _, proved = codebook.from_lists(arrays, pi, 100, nothing(60), of[-1])
    wanted, listed = brute_force(best.query, of[3], 100, nothing(60)), np.unique(arrays.lists)
    np.testing.assert_array_equal(best.found[proved], wanted.found[proved])
    among = brute_force(best.query, of[3][listed], 100, nothing(60))
    np.testing.assert_array_equal(best.found, listed[among.found])


def test_the_closer_bound_of_lists_allows_for_rounding():
    """The best item's float32 cosine is too small, and the other prototypes' ends hide the difference in the lists."""
    head, best_items, off = rounded_down()
    rng = np.random.default_rng(4)
    prototypes = np.concatenate([head[None], unit(rng.normal(size=(3, 256)))])
    fillers = unit(prototypes[1:].repeat(30, 0) + 0.02 * rng.normal(size=(90, 256)))
    kappa, pi, rule = np.full(4, 50.0), np.array([[0.97, 0.01, 0.01, 0.01]]), "power-spherical"
    log_c, hidden = query_of(prototypes[None], np.ones((1, 4)), kappa[None], rule).log_weight[0], 0
    for seed, (item, error) in enumerate(zip(best_items, off, strict=True)):
        second = at_cosine(head, item.astype(float) @ head.astype(float) + 0.25 * error, seed)
        items = np.concatenate([second[None], fillers, item[None]])
        best, *_ = codebook.from_lists(
            codebook.compute_lists(prototypes, kappa, log_c, items, rule, 2), pi, 1, nothing(1), rule
        )
        same(best, brute_force(best.query, items, 1, nothing(1)))
        hidden += best.found[0, 0] == 91
    assert hidden > 10  # in some worlds the second happens to be near another prototype


@pytest.fixture(scope="module")
def topics():
    """4,000 items in six dimensions around 12 prototypes, and profiles from peaked to flat."""
    rng = np.random.default_rng(2)
    prototypes = unit(rng.normal(size=(12, 6)))
    items = unit(prototypes[rng.integers(12, size=4000)] + 0.4 * rng.normal(size=(4000, 6)))
    kappa, rule = rng.uniform(4, 20, 12), "power-spherical"
    log_c = query_of(prototypes[None], np.ones((1, 12)), kappa[None], rule).log_weight[0]
    pi = np.stack([rng.dirichlet(np.full(12, a)) for a in np.geomspace(0.02, 3, 60)])
    return (prototypes, kappa, log_c, items, rule), pi


@pytest.mark.parametrize("length", [15, 40, 150, 600, 4000])
def test_lists_alone_are_the_rule_and_the_proof_tells_the_truth(topics, length):
    """The best of the union, scored in full; certified slates are brute force; longer lists find and prove more."""
    of, pi = topics
    left_out = LeftOut.of([np.random.default_rng(u).integers(4000, size=40) for u in range(60)])
    arrays = codebook.compute_lists(*of, length)
    best, _, proved = codebook.from_lists(arrays, pi, 20, left_out, of[-1])
    wanted, union = brute_force(best.query, of[3], 20, left_out), np.unique(arrays.lists)
    inside = np.isin(np.arange(4000), union)
    for u in range(60):
        out = np.union1d(left_out[u : u + 1].items, np.flatnonzero(~inside))
        among = brute_force(best.query[u : u + 1], of[3], 20, LeftOut.of([out]))
        np.testing.assert_array_equal(best.found[u], among.found[0])
        np.testing.assert_array_equal(best.scores[u], among.scores[0])
        if proved[u]:
            np.testing.assert_array_equal(best.found[u], wanted.found[u])
    missed = (best.found != wanted.found).any(1)
    assert missed.any() == (length < 150), "short lists should miss items, long ones not"
    assert proved.any() == (length > 15) and proved.all() == (length >= 600)
    assert arrays.nbytes < 12 * 100 + 8 * 12 * length


def test_lists_that_hold_too_few_are_made_up_for_by_the_scan(topics):
    of, pi = topics
    best, scored, proved = codebook.from_lists(codebook.compute_lists(*of, 3), pi, 50, nothing(60), of[-1])
    same(best, brute_force(best.query, of[3], 50, nothing(60)))
    assert proved.all() and (scored == 4000).all()


def test_a_retriever_with_a_budget(world, histories, tmp_path):
    """A memory of 8 k L bytes, no table of all items; the same from the disk, with or without torch; items may come."""
    full, scan = made(world, "p-bach-global", "codebook", k=8), made(world, "p-bach-global", k=8)
    wanted, recall = scan.retrieve(histories, 20), []
    for budget in (10, 60, 600):
        retriever = made(world, "p-bach-global", "codebook", k=8, budget=budget)
        slate, arrays = retriever.retrieve(histories, 20), retriever.catalogue.codebook
        shapes = {array.shape for name, array in arrays._asdict().items() if name != "items"}
        assert (600, 8) not in shapes and arrays.nbytes - 3 * 64 <= 8 * 8 * budget + 8 * 64
        assert f"{arrays.nbytes / 1e6:.3g} MB" in retriever.why
        assert slate.strategy == "codebook" and (slate.exact_if_lists_are == slate.certified).all()
        for u in np.flatnonzero(slate.certified):
            np.testing.assert_array_equal(slate.items[u], wanted.items[u])
        recall.append(retriever.recall(histories, 20))
        loaded = Retriever.load(retriever.save(tmp_path / str(budget)), retriever.model)
        lean = CodebookServer(tmp_path / str(budget))
        out = [h[h >= 0] for h in histories]
        for other in (loaded.retrieve(histories, 20), lean.retrieve(slate.pi, 20, exclude=out)):
            np.testing.assert_array_equal(other.items, slate.items)
            np.testing.assert_array_equal(other.certified, slate.certified)
        loaded.add(vectors=loaded.catalogue.vectors[slate.items[0, :1]])
        assert loaded.retrieve(histories, 20).items[0, 1] == 600 and loaded.settings["budget"] == budget
    assert recall[0] < recall[1] <= recall[2] == 1 and slate.certified.all()
    assert made(world, "p-bach-global", "codebook", k=8, budget=60).catalogue.codebook.nbytes < 600 * 8 * 4
    assert full.retrieve(histories, 20).certified.all() and full.settings["budget"] is None
    with pytest.raises(BachError, match="budget= is for strategy='codebook'"):
        made(world, "p-bach-global", "auto", budget=10)
    for name, wrong in (("budget", 0), ("budget", 2.5), ("ask", "all")):
        with pytest.raises(BachError, match=f"{name}.* should be"):
            made(world, "p-bach-global", "codebook", **{name: wrong})


def sharp_lists(rows, sharpness, length, pi):
    """The lists of two prototypes at right angles, and items given by their cosines with both."""
    rows, d = np.array(rows, float), 40
    items = np.zeros((len(rows), d))
    items[:, :2], away = rows, np.sqrt(np.maximum(1 - (rows**2).sum(1), 0))
    items[np.arange(len(rows)), 2 + np.arange(len(rows)) % (d - 2)] = away
    prototypes, kappa, rule = unit(np.eye(d)[:2]), np.full(2, float(sharpness)), "power-spherical"
    log_c = query_of(prototypes[None], np.ones((1, 2)), kappa[None], rule).log_weight[0]
    return codebook.compute_lists(prototypes, kappa, log_c, unit(items), rule, length), np.array([pi]), rule


@pytest.mark.parametrize("sharpness", [60, 300])
def test_densities_that_count_as_nothing_prove_nothing(sharpness):
    """Each list holds one item at its prototype and then tiny densities; better items are in no list, between the two.
    With sharpness 300 the ends of the lists count as 0.
    """
    rows = [(1, 0), (0, 1), *[(0.01, -0.5)] * 30, *[(-0.5, 0.01)] * 30, *[(0.0095, 0.0095)] * 30]
    arrays, pi, rule = sharp_lists(rows, sharpness, 20, [0.5, 0.5])
    assert (arrays.entries[:, -1] == 0).all() == (sharpness == 300)
    best, _, proved = codebook.from_lists(arrays, pi, 3, nothing(1), rule)
    assert brute_force(best.query, arrays.items, 3, nothing(1)).found[0, 2] >= 62 > best.found[0, 2] and not proved[0]


def test_densities_that_count_as_nothing_are_scored():
    """An item whose only density counts as 0 in the list is better than one whose prototype has hardly any weight."""
    arrays, pi, rule = sharp_lists([(1, 0), (0, 1), (-0.0046, -0.9), (-0.9, 0.416)], 100, 3, [1 - 1e-20, 1e-20])
    left_out = LeftOut.of([[0, 1]])
    best, *_ = codebook.from_lists(arrays, pi, 1, left_out, rule)
    assert best.found[0, 0] == brute_force(best.query, arrays.items, 1, left_out).found[0, 0] == 2
