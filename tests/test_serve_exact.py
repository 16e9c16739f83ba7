"""The scan and the codebook are brute force, to the bit; two-step certificates tell the truth."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import RULES, nothing, query_of, random_case, ranked, torch_scores, unit

from bachlib.model.sphere import KERNELS
from bachlib.serve import codebook, exact, kernels
from bachlib.serve.density import LeftOut, Query, brute_force, rounding
from bachlib.serve.twostep import Neighbours, two_step


def same(a, b):
    np.testing.assert_array_equal(a.found, b.found)
    np.testing.assert_array_equal(a.scores, b.scores)


@pytest.mark.parametrize("rule", RULES)
def test_the_score_is_the_papers(rule):
    """Brute force here against the mixture's reference in torch, float64: the same numbers, the same order."""
    rng = np.random.default_rng(0)
    items, pi, kappa, query = random_case(rng, rule=rule)
    found, wanted = brute_force(query, items, 50, nothing(3)), torch_scores(query, items, pi, kappa)
    for u in range(3):
        np.testing.assert_array_equal(found.found[u], ranked(wanted[u], 50))
        np.testing.assert_allclose(found.scores[u], wanted[u][found.found[u]], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_shares_are_the_responsibilities(rule):
    rng = np.random.default_rng(1)
    items, _, _, query = random_case(rng, rule=rule)
    best = exact.top_k(query, items, 20, nothing(3))
    shares = best.shares()
    np.testing.assert_allclose(shares.sum(-1), 1, rtol=1e-12)
    t = np.einsum("bnd,bkd->bnk", items[best.found].astype(float), query.heads.astype(float))
    if rule == "max over heads":
        np.testing.assert_array_equal(shares.argmax(-1), t.argmax(-1))
        return
    log_omega = np.log1p(t) if rule == "power-spherical" else t
    terms = query.log_weight[:, None] + query.kappa[:, None] * log_omega
    np.testing.assert_allclose(shares, np.exp(terms - best.scores[..., None]), rtol=1e-9)


@pytest.mark.parametrize(("B", "k", "d"), [(1, 8, 64), (4, 2, 6), (3, 8, 2)])
@pytest.mark.parametrize("more", [0, 1, 5 * kernels.ITEMS - 1])
def test_the_compiled_product_is_the_product(B, k, d, more):
    """Every cosine, also those of the last items, which need not fill the registers; within the bound of the scan."""
    rng = np.random.default_rng(d)
    items, heads = unit(rng.normal(size=(kernels.ITEMS + more, d))), unit(rng.normal(size=(B, k, d)))
    out = np.full((len(items), B * k), np.nan, np.float32)
    kernels.product(items, exact.columns_of(heads), out)
    assert np.abs(out - items.astype(float) @ heads.reshape(-1, d).astype(float).T).max() < rounding(d)


coarse_only = pytest.mark.skipif(not kernels.VNNI, reason="this processor has no AVX512-VNNI: items stay float32")


@coarse_only
@pytest.mark.parametrize(("B", "k", "d"), [(1, 8, 64), (4, 2, 8), (3, 8, 128)])
def test_coarse_cosines_are_within_their_bound(monkeypatch, B, k, d):
    """Also of vectors along an axis, and of one that comes later and is worse than all before."""
    rng = np.random.default_rng(d)
    items, heads = unit(rng.normal(size=(3 * kernels.ITEMS + 5, d))), unit(rng.normal(size=(B, k, d)))
    items[0], items[1] = np.eye(d)[3], -np.eye(d)[5]
    items[-1] = unit(np.full(d, 0.5 / 127) + np.eye(d)[0])  # its small numbers are halves of a scale
    assert exact.Coarse.of(items) is None, "so few are not worth it"
    monkeypatch.setattr(exact, "MANY", 1)
    first = exact.Coarse.of(items[:-7])
    coarse = first.with_more(items[-7:])
    assert first.codes.shape == (len(items) - 7, d) and coarse.off > first.off
    side, error = coarse.side_of(heads)
    out = np.full((len(items), B * k), np.nan, np.float32)
    kernels.coarse_product(*side, out)
    off = np.abs(out - items.astype(float) @ heads.reshape(-1, d).astype(float).T).max()
    assert off < error + rounding(d) < 0.06
    heads[0, 0] = items[-1]
    axes = exact.Coarse.of(np.tile(np.eye(d, dtype=np.float32), (2, 1)))  # nothing is lost of these items
    side, error = axes.side_of(heads)
    kernels.coarse_product(*side, out := np.empty((2 * d, B * k), np.float32))
    assert axes.off < 1e-8 and 1e-4 < np.abs(out[:d] - heads.reshape(-1, d).T).max() <= error + rounding(d)
    codes = coarse.codes.astype(float) - 128
    assert np.abs(codes).max() == 127, "all of the range is used, and no more"
    assert np.linalg.norm(items - codes * coarse.scale[:, None], axis=1).max() <= coarse.off * (1 + 1e-6)


@coarse_only
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(("k", "B"), [(8, 1), (32, 2), (8, 70), (5, 2)])
def test_the_coarse_scan_is_brute_force(monkeypatch, rule, k, B):
    """Items that nearly tie around θ, so that an item lost by rounding would be seen; five heads take float32."""
    monkeypatch.setattr(exact, "MANY", 1)
    monkeypatch.setattr(exact, "WIDTH", 256)  # the first block is float32
    rng = np.random.default_rng(k + B)
    items, _, _, query = random_case(rng, 6000, B, k, 64, rule)
    items[300:] = unit(items[rng.integers(300, size=5700)] + 0.05 * rng.normal(size=(5700, 64)) / 8)
    left_out = LeftOut.of([rng.integers(6000, size=rng.integers(60)) for _ in range(B)])
    wanted = brute_force(query, items, 60, left_out)
    for more in (0, 1, 900):  # the last ones came later
        coarse = exact.Coarse.of(items[: len(items) - more])
        coarse = coarse.with_more(items[-more:]) if more else coarse
        same(exact.top_k(query, items, 60, left_out, coarse=coarse), wanted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    ("n", "k", "d", "B"), [(3000, 1, 8, 2), (3000, 8, 64, 70), (9000, 32, 64, 2), (20_000, 5, 2, 1)]
)
def test_the_scan_is_brute_force(rule, n, k, d, B):
    """Both kernels and the maximum, more users than go into a block, one head, many, few dimensions."""
    rng = np.random.default_rng(n + k)
    items, _, _, query = random_case(rng, n, B, k, d, rule)
    left_out = LeftOut.of([rng.integers(n, size=rng.integers(60)) for _ in range(B)])
    same(exact.top_k(query, items, 37, left_out), brute_force(query, items, 37, left_out))


@pytest.mark.parametrize("rule", list(KERNELS))
@pytest.mark.parametrize("kappa", [0.0, 1e-30, 1e-8, 1e-2, 1.0, 1e3, 1e5, 1e15, 3e38])
def test_any_concentration(rule, kappa):
    """Flat, where all items tie and go by number, and so sharp that densities are far outside of any float."""
    rng = np.random.default_rng(7)
    items, pi, _, query = random_case(rng, 2500, 2, 4, 16, rule)
    query = query_of(query.heads, pi, np.full(pi.shape, kappa), rule)
    found = exact.top_k(query, items, 25, nothing(2))
    same(found, brute_force(query, items, 25, nothing(2)))
    assert np.isfinite(found.scores).all()
    if kappa == 0:
        np.testing.assert_array_equal(found.found, [np.arange(25)] * 2)


def test_mixed_concentrations_and_heads_without_weight():
    rng = np.random.default_rng(3)
    items, pi, _, query = random_case(rng, 4000, 4, 6, 32)
    pi[:, 2] = 0
    pi /= pi.sum(1, keepdims=True)
    query = query_of(query.heads, pi, np.tile([0.0, 1.0, 10.0, 100.0, 1e3, 1e4], (4, 1)), "power-spherical")
    same(exact.top_k(query, items, 60, nothing(4)), brute_force(query, items, 60, nothing(4)))


def test_equal_items_go_by_their_number():
    rng = np.random.default_rng(4)
    items, _, _, query = random_case(rng, 40, 2, 3, 8)
    items = items[rng.integers(40, size=5000)]  # every vector a hundred times
    found = exact.top_k(query, items, 150, nothing(2))
    same(found, brute_force(query, items, 150, nothing(2)))
    tied = found.scores[:, 1:] == found.scores[:, :-1]
    assert tied.mean() > 0.9 and (np.diff(found.found)[tied] > 0).all()


def test_worst_orders_and_opposite_items():
    """Items sorted so that every one is better than all before, and items exactly opposite to a head."""
    rng = np.random.default_rng(5)
    items, pi, kappa, query = random_case(rng, 6000, 1, 3, 8)
    items[:50] = -query.heads[0, 0]
    order = np.argsort(torch_scores(query, items, pi, kappa)[0])
    same(exact.top_k(query, items[order], 20, nothing(1)), brute_force(query, items[order], 20, nothing(1)))


def test_a_good_start_saves_work_and_changes_nothing():
    rng = np.random.default_rng(6)
    items, _, _, query = random_case(rng, 30_000, 1, 8, 64)
    plain = exact.top_k(query, items, 50, nothing(1))
    begun = exact.top_k(query, items, 50, nothing(1), start=(np.zeros(50, np.int64), plain.found[0]))
    same(begun, plain)
    assert begun.n_scored < plain.n_scored < 1000


def test_thresholds_bound_what_they_leave_out():
    """No item below all thresholds reaches θ; and they are no lower than they have to be: parts add up to e^θ."""
    rng = np.random.default_rng(8)
    items, pi, kappa, query = random_case(rng, 2000, 5, 6, 16)
    scores = torch_scores(query, items, pi, kappa)
    theta = np.sort(scores, 1)[:, -30]
    cut = exact.thresholds_of(query, theta)
    t = np.einsum("nd,bkd->bnk", items.astype(float), query.heads.astype(float))
    out = (t < cut[:, None]).all(2)
    assert out.any() and (scores[out] < np.broadcast_to(theta[:, None], scores.shape)[out]).all()
    np.testing.assert_allclose(query.bound(np.minimum(cut, 1 + 1e-5)), theta, atol=1e-3)  # cut is a millionth low


def test_rounding_covers_float32_products():
    rng = np.random.default_rng(9)
    for d in (2, 64, 1024):
        a, b = unit(rng.normal(size=(300, d))), unit(rng.normal(size=(300, d)))
        off = np.abs((a @ b.T) - a.astype(float) @ b.astype(float).T).max()
        assert off < rounding(d) < 1e-3 and rounding(d) > d * 2.0**-24  # what is proved, not what is usual


@pytest.mark.parametrize("slack", [None, 1e-3])  # what 16 dimensions need, and far more than the table adds of itself
@pytest.mark.parametrize("rule", list(KERNELS))
def test_tables_are_never_below_the_term(rule, slack):
    """An entry is at least what an item in its bin gives, rounding of the cosine included."""
    rng = np.random.default_rng(0)
    query = random_case(rng, 50, 2, 3, 16, rule)[3]
    shift, slack = np.array([0.5, -1.0]), slack or rounding(16)
    table = np.empty((2, 3, kernels.BINS + 2), np.float32)
    kernels.fill_tables(query.log_weight, query.kappa, query.power, shift, slack, table)
    edges = np.linspace(-1, 1, kernels.BINS + 1)
    for seen in np.concatenate([edges, edges - 1e-7, edges + 1e-7, rng.uniform(-1, 1, 500)]).astype(np.float32):
        place = min(max(int((seen + np.float32(1)) * np.float32(kernels.BINS / 2)), 0), kernels.BINS + 1)
        truth = query.terms_at(np.full((2, 3), min(float(seen) + slack, 1 + 2e-6))) - shift[:, None]
        assert (table[..., place] >= np.exp(np.minimum(truth, 80))).all()


def test_opposite_items_are_scored_as_the_reference_scores_them():
    rng = np.random.default_rng(2)
    items, pi, kappa, query = random_case(rng, 60, 1, 2, 4, kappa=(0.5, 1))
    items[:10] = -query.heads[0, 0]
    found, wanted = brute_force(query, items, 60, nothing(1)), torch_scores(query, items, pi, kappa)[0]
    np.testing.assert_allclose(found.scores[0], wanted[found.found[0]], rtol=1e-9, atol=1e-9)


# ------------------------------------------------------------------------------------------------------ two-step


@st.composite
def catalogues(draw):
    """Small worlds of all kinds: duplicates, flat and sharp heads, empty heads, few dimensions, long exclusions."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    n, k, d = draw(st.integers(30, 400)), draw(st.integers(1, 6)), draw(st.sampled_from([2, 3, 16]))
    rule = draw(st.sampled_from(RULES))
    items, pi, _, query = random_case(rng, n, 2, k, d, rule)
    if draw(st.booleans()):
        items = items[rng.integers(n, size=n) // draw(st.integers(1, 5))]
    if draw(st.booleans()) and k > 1:
        pi[:, 0] = 0
        pi /= pi.sum(1, keepdims=True)
    kappa = rng.choice([0.0, 0.5, 5.0, 20.0, 300.0, 1e4], size=pi.shape)
    left_out = LeftOut.of([rng.integers(n, size=draw(st.integers(0, n // 2))) for _ in range(2)])
    remaining = n - int(np.diff(left_out.starts).max())
    return items, query_of(query.heads, pi, kappa, rule), left_out, draw(st.integers(1, min(40, remaining))), rng


class ExactLists:
    """An index that misses nothing."""

    def __init__(self, items):
        self.items = items

    def nearest(self, rows, M):
        t = rows @ self.items.T
        order = np.argsort(-t, axis=1, kind="stable")[:, :M]
        return np.take_along_axis(t, order, 1), order


@settings(max_examples=150, deadline=None)
@given(catalogues(), st.integers(1, 30))
def test_where_the_bound_holds_exact_lists_give_brute_force(case, M):
    items, query, left_out, K, _ = case
    best, lists = two_step(query, items, K, left_out, ExactLists(items), M=M, max_M=400)
    wanted = brute_force(query, items, K, left_out)
    for u in np.flatnonzero(lists.enough):
        np.testing.assert_array_equal(best.found[u], wanted.found[u])
        np.testing.assert_array_equal(best.scores[u], wanted.scores[u])


@settings(max_examples=100, deadline=None)
@given(catalogues())
def test_the_scan_is_brute_force_in_all_small_worlds(case):
    items, query, left_out, K, rng = case
    wanted = brute_force(query, items, K, left_out)
    same(exact.top_k(query, items, K, left_out), wanted)
    start = (rng.integers(2, size=30), rng.integers(len(items), size=30))
    same(exact.top_k(query, items, K, left_out, start), wanted)


@settings(max_examples=100, deadline=None)
@given(catalogues(), st.integers(16, 300))
def test_the_codebook_is_brute_force_in_all_small_worlds(case, length):
    items, query, left_out, K, rng = case
    if not query.soft:
        return
    k = query.kappa.shape[1]
    log_c = query_of(query.heads[:1], np.ones((1, k)), query.kappa[:1], query.rule).log_weight[0]
    arrays = codebook.compute(query.heads[0], query.kappa[0], log_c, items, query.rule, length)
    pi = rng.dirichlet(np.full(k, 0.3), size=2)
    best, looked = codebook.top_k(arrays, pi, K, left_out, query.rule)
    shared = Query(np.repeat(query.heads[:1], 2, 0), np.log(pi) + log_c, np.repeat(query.kappa[:1], 2, 0), query.rule)
    same(best, brute_force(shared, items, K, left_out))
    assert (looked <= len(items)).all()


@pytest.fixture(scope="module")
def clustered():
    """24,000 items, too many for a flat index, around 40 interests, and users with heads at some of them."""
    rng = np.random.default_rng(0)
    interests = unit(rng.normal(size=(40, 32)))
    items = unit(interests[rng.integers(40, size=24_000)] + 0.12 * rng.normal(size=(24_000, 32)))
    heads = unit(interests[rng.integers(40, size=(30, 6))] + 0.05 * rng.normal(size=(30, 6, 32)))
    pi, kappa = rng.dirichlet(np.full(6, 0.6), size=30), rng.uniform(15, 25, size=(30, 6))
    return items, query_of(heads, pi, kappa, "power-spherical")


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_faiss_finds_nearly_everything(clustered, kind, tmp_path):
    items, query = clustered
    index, wanted = Neighbours(items, kind), exact.top_k(query, items, 100, nothing(30)).found
    best, lists = two_step(query, items, 100, nothing(30), index)
    assert np.mean([np.isin(a, b).mean() for a, b in zip(wanted, best.found, strict=True)]) > 0.99
    assert (lists.depth.max(1) <= 400).all()
    index.save(tmp_path / "index")
    again, _ = two_step(query, items, 100, nothing(30), Neighbours.load(tmp_path / "index", kind))
    np.testing.assert_array_equal(again.found, best.found)


@pytest.mark.parametrize("kind", ["hnsw", "ivf"])
def test_lists_of_an_index_whose_items_came_and_went(clustered, kind):
    """The index stays; all items near a head are removed, so the list has to reach beyond them, and others are new."""
    items, query = clustered
    index, head = Neighbours(items, kind), query.heads[:1, 0]
    gone = np.sort(np.argsort(-(items @ head[0]))[:700])
    late = unit(head + 0.3 * np.random.default_rng(5).normal(size=(60, 32)))
    everything = np.concatenate([items, late])
    gone = np.concatenate([gone, [24_007]])
    other = index.changed(everything, gone)
    assert other.index is index.index and not index.gone.any()
    t, places = other.nearest(np.concatenate([head, query.heads[1]]), 100)
    assert t.shape == places.shape == (7, 100) and (np.diff(t, axis=1) <= 0).all()
    assert (places >= 0).all() and not np.isin(places, gone).any()
    np.testing.assert_allclose(t[0], everything[places[0]] @ head[0], atol=1e-6)
    cosine = everything @ head[0]
    cosine[gone] = -2
    assert np.isin(np.argsort(-cosine)[:100], places[0]).mean() > 0.9 and (places[0] >= 24_000).any()
    left_out = LeftOut.of([[5, 9, int(gone[0])]] * 30, gone)
    assert (left_out.n_own == 3 - 1 - np.isin([5, 9], gone).sum()).all()
    best, lists = two_step(query, everything, 100, left_out, other)
    wanted = brute_force(query, everything, 100, LeftOut.of([np.concatenate([[5, 9], gone])] * 30))
    same(exact.top_k(query, everything, 100, left_out), wanted)
    assert np.mean([np.isin(a, b).mean() for a, b in zip(wanted.found, best.found, strict=True)]) > 0.99
    assert not np.isin(best.found, gone).any() and lists.depth.max() <= 4 * 102, "lists that M asks for, not more"
    assert index.changed(np.concatenate([items, items[:2_500]]), gone) is None
    assert index.changed(items, np.arange(2_500)) is None


def test_lists_grow_until_the_bound_holds_or_the_budget_is_spent(clustered):
    items, query = clustered
    index = ExactLists(items)
    for most, share in ((10, 0.0), (24_000, 1.0)):
        best, lists = two_step(query, items, 10, nothing(30), index, M=10, max_M=most)
        assert lists.enough.mean() == share and lists.depth.max() <= most
    same(best, brute_force(query, items, 10, nothing(30)))


def adversarial(k=8, d=32, decoys=300, hidden=50, seed=0):
    """Hidden items lie between all heads, and every head's list is full of decoys right beside it."""
    rng = np.random.default_rng(seed)
    heads = np.linalg.qr(rng.normal(size=(d, k)))[0].T
    middle = heads.sum(0) / np.sqrt(k)
    near = [unit(head + 0.04 * rng.normal(size=(decoys, d))) for head in heads]
    items = np.concatenate([*near, unit(middle + 0.02 * rng.normal(size=(hidden, d)))]).astype(np.float32)
    return items, query_of(unit(heads)[None], np.full((1, k), 1 / k), np.full((1, k), 4.0), "power-spherical")


def test_an_adversary_makes_plain_two_step_useless_and_the_certificate_says_so():
    items, query = adversarial()
    wanted = brute_force(query, items, 50, nothing(1))
    assert (wanted.found[0] >= 8 * 300).all()  # all hidden
    best, lists = two_step(query, items, 50, nothing(1), Neighbours(items, "hnsw"), M=100, max_M=100)
    assert not np.isin(best.found[0], wanted.found[0]).any() and not lists.enough[0]
    same(exact.top_k(query, items, 50, nothing(1), start=(np.zeros(50, np.int64), best.found[0])), wanted)
    grown, lists = two_step(query, items, 50, nothing(1), ExactLists(items), M=100, max_M=len(items))
    assert lists.enough[0]
    same(grown, wanted)


class ForgetfulLists(ExactLists):
    """An index that finds only a few items, as a graph with islands does."""

    def nearest(self, rows, M):
        t, order = super().nearest(rows, min(M, 5))
        more = ((0, 0), (0, M - t.shape[1]))
        return np.pad(t, more, constant_values=-np.inf), np.pad(order, more, constant_values=-1)


def test_an_index_that_finds_too_little(clustered):
    """Slates are full all the same, and the bound ends where the lists end."""
    items, query = clustered
    some = query[:3]
    best, lists = two_step(some, items[:2000], 40, nothing(3), ForgetfulLists(items[:2000]))
    assert np.isfinite(best.scores).all() and np.isfinite(lists.end).all()
    same(best, brute_force(some, items[:2000], 40, nothing(3)))


# ------------------------------------------------------------------------------------------------------ codebook


@pytest.mark.parametrize(("rule", "sharpness"), [("power-spherical", 60.0), ("von-mises-fisher", 40.0)])
def test_a_bound_of_small_numbers_is_not_lost(rule, sharpness):
    """An item right on each prototype, and all others 10¹⁶ times less dense: the order among those counts."""
    d, eye = 64, np.eye(64)
    rows = [eye[0], eye[1]]
    for count, (a, b) in ((30, (0.01, -0.5)), (30, (-0.5, 0.01)), (30, (0.0095, 0.0095)), (1000, (-0.1, -0.1))):
        for j in range(count):
            rest = np.sqrt(1 - a * a - b * b)
            rows.append(a * eye[0] + b * eye[1] + rest * eye[2 + j % (d - 2)])
    items, prototypes, kappa = unit(np.array(rows)), unit(eye[:2]), np.full(2, sharpness)
    log_c = query_of(prototypes[None], np.ones((1, 2)), kappa[None], rule).log_weight[0]
    arrays = codebook.compute(prototypes, kappa, log_c, items, rule)
    best, _ = codebook.top_k(arrays, np.full((1, 2), 0.5), 3, nothing(1), rule)
    same(best, brute_force(best.query, items, 3, nothing(1)))


def test_the_codebook_with_items_on_prototypes():
    """Any sharpness, items right on the prototypes, many requests at once."""
    rng = np.random.default_rng(11)
    for _ in range(40):
        k, n, rule = int(rng.integers(1, 7)), int(rng.integers(200, 900)), str(rng.choice(list(KERNELS)))
        prototypes, kappa = unit(rng.normal(size=(k, 16))), rng.choice([0.0, 1.0, 30.0, 60.0, 300.0, 1e4], size=k)
        items = unit(np.concatenate([prototypes, prototypes + 1e-4, rng.normal(size=(n, 16))]))
        log_c = query_of(prototypes[None], np.ones((1, k)), kappa[None], rule).log_weight[0]
        arrays = codebook.compute(prototypes, kappa, log_c, items, rule)
        pi = rng.dirichlet(np.full(k, 0.3), size=4)
        best, _ = codebook.top_k(arrays, pi, 10, nothing(4), rule)
        same(best, brute_force(best.query, items, 10, nothing(4)))


def test_a_peaked_pi_needs_few_rows_and_a_flat_one_takes_the_product():
    rng = np.random.default_rng(0)
    k, d = 64, 32
    prototypes = unit(rng.normal(size=(k, d)))
    items = unit(prototypes[rng.integers(k, size=30_000)] + 0.15 * rng.normal(size=(30_000, d)))
    kappa = rng.uniform(10, 25, size=k)
    log_c = query_of(prototypes[None], np.ones((1, k)), kappa[None], "von-mises-fisher").log_weight[0]
    arrays = codebook.compute(prototypes, kappa, log_c, items, "von-mises-fisher")
    for concentration, few in ((0.02, True), (20.0, False)):
        pi = rng.dirichlet(np.full(k, concentration), size=3)
        best, looked = codebook.top_k(arrays, pi, 50, nothing(3), "von-mises-fisher")
        same(best, brute_force(best.query, items, 50, nothing(3)))
        assert (looked < 2500).all() if few else (looked == 30_000).all()
