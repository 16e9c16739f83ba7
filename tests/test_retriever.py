"""The retriever: every method by every strategy against brute force, input of all kinds, steering, caps, auto."""

import numpy as np
import pandas as pd
import pytest
import torch
from serving import SMALL, made, perturbed, ranked

from bachlib import BachError
from bachlib.evaluate import evaluate
from bachlib.model.methods import METHODS, build
from bachlib.serve import Retriever, Steering
from bachlib.serve.density import brute_force
from bachlib.train import fit


@pytest.mark.parametrize("name", [name for name in METHODS if name != "mostpop"])
def test_every_method_by_every_strategy(world, histories, name):
    """Slates against the model's own scores over the catalogue, sorted; the history left out."""
    model = perturbed(world, name)
    items = model.items().double()
    with torch.no_grad():
        heads, log_pi, kappa = model.encode(histories)
        t = heads.double() @ items.T
        if model.kernel:
            wanted = (
                log_pi.double()[..., None] + model.kernel.log_density(t, kappa.double()[..., None], 16)
            ).logsumexp(1)
        else:
            wanted = t.amax(1)
    np.testing.assert_allclose(wanted, model.score(histories), atol=2e-5)
    wanted = wanted.numpy()
    for strategy in ("exact", "two-step", "codebook"):
        if strategy == "codebook" and not name.endswith(("-global", "-hybrid")):
            with pytest.raises(BachError, match="needs heads that all users share"):
                Retriever(model, strategy)
            continue
        settings = {"lists": "exact"} if strategy == "two-step" else {}
        slate = Retriever(model, strategy, **settings).retrieve(histories, K=25)
        assert slate.strategy == strategy and slate.certified.all()
        for u, row in enumerate(wanted):
            np.testing.assert_array_equal(slate.items[u], ranked(row, 25, histories[u][histories[u] >= 0]))
            np.testing.assert_allclose(slate.scores[u], row[slate.items[u]], atol=1e-6)
        np.testing.assert_allclose(slate.head_share.sum(-1), 1, rtol=1e-9)
        assert (np.diff(slate.scores) <= 0).all()


def test_strategies_agree_to_the_bit(world, histories):
    model = perturbed(world, "v-bach-global", 12)
    slates = [Retriever(model, s, lists="exact").retrieve(histories, 40) for s in ("exact", "two-step", "codebook")]
    for slate in slates[1:]:
        np.testing.assert_array_equal(slate.items, slates[0].items)
        assert np.abs(slate.scores - slates[0].scores).max() < 1e-6  # π comes from the same tower in another batch
        np.testing.assert_allclose(slate.head_share, slates[0].head_share, atol=1e-6)


def test_vectors_that_are_not_quite_unit(world, histories):
    """Items a little too long are made unit: the proof is about cosines."""
    retriever = made(world)
    heads = retriever.users.query(retriever.catalogue, list(histories[:4]))[0].heads.reshape(-1, 16)
    retriever.add(vectors=heads * np.linspace(1 - 9e-4, 1 + 9e-4, len(heads))[:, None])
    assert np.abs(np.linalg.norm(retriever.catalogue.vectors, axis=1) - 1).max() < 2e-6
    query, _ = retriever.users.query(retriever.catalogue, list(histories))
    out = retriever.catalogue.left_out(list(histories), 20)
    np.testing.assert_array_equal(
        retriever.retrieve(histories, 20).items, brute_force(query, retriever.catalogue.items, 20, out).found
    )


def test_only_proved_slates_are_certified(world, histories):
    approximate = made(world, strategy="two-step", M=100, max_M=600).retrieve(histories, 10)
    assert not approximate.certified.any() and approximate.exact_if_lists_are.any()
    proved = made(world, strategy="two-step", lists="exact").retrieve(histories, 10)
    assert proved.certified.all()
    np.testing.assert_array_equal(proved.items, made(world).retrieve(histories, 10).items)


# --------------------------------------------------------------------------------------------------------- input


def test_one_many_ragged_and_tensors(world, histories):
    retriever = made(world)
    batch = retriever.retrieve(histories[:3], 7)
    one = retriever.retrieve(histories[0], 7)
    assert one.items.shape == (1, 7) and one.head_share.shape == (1, 7, 4)
    np.testing.assert_array_equal(one.items[0], batch.items[0])
    np.testing.assert_array_equal(retriever.retrieve(torch.from_numpy(histories[:3]), 7).items, batch.items)
    ragged = [histories[0][-1:].tolist(), histories[1].tolist(), []]
    slate = retriever.retrieve(ragged, 7)
    np.testing.assert_array_equal(slate.items[1], batch.items[1])
    np.testing.assert_array_equal(slate.items[2], retriever.retrieve([[]], 7).items[0])  # an empty history is one too
    own = histories[0].tolist()
    series = pd.Series(own, index=range(100, 100 + len(own)))
    for other in (tuple(own), series, [series], np.array([own, own[:3]], object)):
        np.testing.assert_array_equal(retriever.retrieve(other, 7).items[0], batch.items[0])
    without = retriever.retrieve(own, 7, exclude=set(batch.items[0, :2].tolist()))
    np.testing.assert_array_equal(without.items[0, :5], batch.items[0, 2:])


def test_many_requests_go_in_parts(world, histories):
    """More than are searched for at a time: the same slates, with a π of one's own for each."""
    many = np.tile(histories, (20, 1))  # 600
    for name, strategy in (("p-bach", "exact"), ("p-bach-global", "codebook"), ("all-multihead", "two-step")):
        retriever = made(world, name, strategy)
        few, all_of_them = retriever.retrieve(histories, 5), retriever.retrieve(many, 5)
        assert all_of_them.head_share.shape == (600, 5, 4) and len(all_of_them.certified) == 600
        np.testing.assert_array_equal(all_of_them.items[:30], few.items)
        np.testing.assert_array_equal(all_of_them.items[570:], few.items)
    pi = np.random.default_rng(0).dirichlet(np.ones(4), 600)
    np.testing.assert_array_equal(made(world).retrieve(many, 5, pi=pi).pi, pi)


def test_a_two_step_slate_does_not_depend_on_its_company(world, histories):
    retriever = made(world, strategy="two-step")
    mixed = [histories[u][-m:] for u, m in zip(range(20), [1, 50, 7, 23] * 5, strict=True)]
    together = retriever.retrieve(mixed, 20)
    for u, history in enumerate(mixed):
        np.testing.assert_array_equal(retriever.retrieve(history, 20).items[0], together.items[u])


def test_recall_is_measured(world, histories):
    assert made(world).recall(histories, 20) == 1
    few = made(world, strategy="two-step", M=3, max_M=3)
    assert 0.2 < few.recall(histories, 20) < made(world, strategy="two-step", M=200).recall(histories, 20) <= 1


def test_a_long_history_is_read_from_its_end_and_left_out_whole(world):
    retriever = made(world)
    sequence = np.array(world.sequence(0))
    assert len(sequence) > 50
    slate = retriever.retrieve([sequence], 50)
    last = retriever.retrieve([sequence[-50:]], 50, exclude=sequence)
    np.testing.assert_array_equal(slate.items, last.items)
    assert not np.isin(slate.items, sequence).any()


def test_left_out_kept_and_excluded(world, histories):
    retriever = made(world)
    own = histories[0][histories[0] >= 0]
    kept = retriever.retrieve(histories[:2], 100, keep_history=True)
    assert np.isin(own, kept.items[0]).any()
    for_all = retriever.retrieve(histories[:2], 10, exclude=kept.items[0][:20])
    assert not np.isin(kept.items[0][:20], for_all.items).any()
    each = retriever.retrieve(histories[:2], 10, exclude=[kept.items[0][:20], []])
    assert not np.isin(kept.items[0][:20], each.items[0]).any()
    np.testing.assert_array_equal(each.items[1], retriever.retrieve(histories[1], 10).items[0])


@pytest.mark.parametrize("strategy", ["exact", "two-step", "codebook"])
def test_bad_input_is_said_and_the_retriever_goes_on(world, histories, strategy):
    retriever = made(world, "p-bach-global", strategy)
    before = retriever.retrieve(histories[:2], 5)
    n, left = world.n_items, world.n_items - len(set(histories[0]))
    bad = [
        (dict(history=[[3, n]]), f"history of request 0: there is no item {n}; items are 0 … {n - 1}"),
        (dict(history=[[1], [-2]]), "history of request 1: there is no item -2"),
        (dict(history=[[0.5]]), "should be a list of item numbers"),
        (dict(history=["ab"]), "should be a list of item numbers"),
        (dict(history=7), "should be a list of item numbers"),
        (dict(history="12"), "should be a list of item numbers"),
        (dict(history={1: 2}), "should be a list of item numbers"),
        (dict(history=[[1], 2]), "history of request 1 should be a list of item numbers; got 2"),
        (dict(history=[[[1]]]), "should be a list of item numbers"),
        (dict(history=[[True]]), "should be a list of item numbers"),
        (dict(history=np.empty((0, 5), int)), "holds no request"),
        (dict(K=0), "K should be a whole number ≥ 1; got 0"),
        (dict(K=2.5), "K should be a whole number"),
        (dict(K=True), "K should be a whole number"),
        (dict(K=n), f"K={n}, but of {n} items {left} remain for request 0"),
        (dict(exclude=np.arange(n)), "K=5, but of 600 items 0 remain"),
        (dict(exclude=[[1]]), "exclude has 1 lists for 2 requests"),
        (dict(exclude=[n]), f"exclude: there is no item {n}"),
        (dict(pi=[0.5, 0.5, 0.5, 0.5]), r"pi should sum to 1; row 0 sums to 2"),
        (dict(pi=[1.5, -0.5, 0, 0]), "pi should be numbers ≥ 0; row 0"),
        (dict(pi=[np.nan, 0.5, 0.5, 0]), "pi should be numbers ≥ 0; row 0"),
        (dict(pi=[0.5, 0.5]), r"pi should be \(4,\), one for all, or \(B, k\) = \(2, 4\); got shape \(2,\)"),
        (dict(pi="abc"), "pi should be numbers"),
        (dict(caps={"Heist": 1}), "caps need the items' genres"),
    ]
    for wrong, said in bad:
        with pytest.raises(BachError, match=said):
            retriever.retrieve(**{"history": histories[:2], "K": 5, **wrong})
    np.testing.assert_array_equal(retriever.retrieve(histories[:2], 5).items, before.items)


def test_the_largest_K_there_is(world, histories):
    left = world.n_items - len(set(histories[0].tolist()) - {-1})
    for strategy in ("exact", "two-step"):
        slate = made(world, strategy=strategy).retrieve(histories[0], left)
        assert len(set(slate.items[0].tolist())) == left and np.isfinite(slate.scores).all()


def test_wrong_settings(world):
    with pytest.raises(BachError, match=r"got mostpop\. It serves every method of the table except mostpop"):
        Retriever(build("mostpop", world))
    with pytest.raises(BachError, match="should be one of auto, exact, two-step, codebook"):
        made(world, strategy="fast")
    with pytest.raises(BachError, match="should be 'hnsw' or 'ivf'"):
        made(world, strategy="two-step", index="flat")
    with pytest.raises(BachError, match="should be 'approximate' or 'exact'"):
        made(world, lists="sure")
    for wrong in (0, "a"):
        with pytest.raises(BachError, match="M should be a whole number ≥ 1"):
            made(world, M=wrong)
    with pytest.raises(BachError, match="genres should hold those of each of 600 items; got 2"):
        made(world, genres=[["a"], ["b"]])
    with pytest.raises(BachError, match=r"or a Run \(Run.load\(folder, dataset\)\); got str"):
        Retriever("outputs/runs/x")
    with pytest.raises(BachError, match="all-multihead has no π"):
        made(world, "all-multihead").retrieve([[1]], 5, pi=np.full(4, 0.25))


def test_empty_histories_only_where_there_is_something_to_say(world):
    for name in ("mind", "comirec-sa", "comirec-dr", "sasrec"):
        with pytest.raises(BachError, match="request 1 has an empty history"):
            made(world, name).retrieve([[1], []], 5)
    for name in ("standard", "all-multihead", "p-bach", "p-bach-global", "p-bach-residual"):
        assert np.isfinite(made(world, name).retrieve([[]], 5).scores).all()


def test_vectors_that_are_not_numbers_are_refused(world):
    model = perturbed(world, "p-bach")
    with torch.no_grad():
        model.item_tower.residual[2].bias[0] = torch.nan
    with pytest.raises(BachError, match="item vectors should be unit: row 0 has length nan"):
        Retriever(model, "exact")


def test_a_free_pi_per_user_asks_who(world, histories):
    retriever = Retriever(perturbed(world, "p-bach", pi="table"), "exact")
    with pytest.raises(BachError, match="pass the users with user="):
        retriever.retrieve(histories[:2], 5)
    slate = retriever.retrieve(histories[:2], 5, user=[0, 1])
    assert not np.allclose(slate.pi[0], slate.pi[1])
    assert Retriever(retriever.model).strategy == "exact"  # auto needs nobody in particular


# ------------------------------------------------------------------------------------------------- steering, caps


def test_pi_is_replaced_or_steered(world, histories):
    retriever = made(world)
    own = retriever.retrieve(histories[:5], 30)
    given = retriever.retrieve(histories[:5], 30, pi=own.pi)
    np.testing.assert_array_equal(given.items, own.items)
    only = retriever.retrieve(histories[:5], 30, pi=[0, 0, 1, 0])
    assert (only.head_share.argmax(-1) == 2).all()
    without = retriever.retrieve(histories[:5], 30, pi=Steering(forbid=[2]))
    assert (without.head_share[..., 2] == 0).all() and without.certified.all()
    np.testing.assert_allclose(without.pi.sum(1), 1)


def test_caps_per_genre(world, histories):
    genres = world.items["genres"]
    retriever = made(world, genres=genres)
    free = retriever.retrieve(histories[:4], 20)
    first = [genres[item][0] for item in free.items[0]]
    most = max(set(first), key=first.count)
    capped = retriever.retrieve(histories[:4], 20, caps={most: 2})
    assert capped.certified.all()
    everything = retriever.retrieve(histories[:4], 400)
    for u in range(4):
        wanted, count = [], 0
        for item in everything.items[u]:
            count += most in genres[item]
            if most not in genres[item] or count <= 2:
                wanted.append(item)
        np.testing.assert_array_equal(capped.items[u], wanted[:20])
    with pytest.raises(BachError, match="caps: unknown genre 'Polka'"):
        retriever.retrieve(histories[:1], 5, caps={"Polka": 1})
    with pytest.raises(BachError, match=r"the caps leave \d+ items for request 0, fewer than K=20"):
        retriever.retrieve(histories[:1], 20, caps={name: 3 for name in {g for row in genres for g in row}})
    with pytest.raises(BachError, match=r"caps should be {genre: largest number of items}; got \['Heist'\]"):
        retriever.retrieve(histories[:1], 5, caps=["Heist"])
    twin = retriever.catalogue.vectors[[free.items[0, 0]]]
    for genres_of_new, comes in (([[most]], False), (None, True)):  # an item without genres passes every cap
        other = made(world, genres=genres)
        (new,) = other.add(vectors=twin, genres=genres_of_new)
        assert (new in other.retrieve(histories[:1], 20, caps={most: 0}).items) == comes
    with pytest.raises(BachError, match="caps should be whole numbers"):
        retriever.retrieve(histories[:1], 5, caps={most: -1})


def test_caps_are_each_requests_own_affair(world, histories):
    """A companion with little left to serve does not shorten the ranking of the others."""
    genres = world.items["genres"]
    retriever = made(world, genres=genres)
    caps = {genres[0][0]: 1}
    others = [i for i in range(world.n_items) if genres[0][0] not in genres[i] and i not in histories[0]]
    almost = np.setdiff1d(np.arange(world.n_items), others[:25])
    both = retriever.retrieve(histories[:2], 20, exclude=[almost, []], caps=caps)
    np.testing.assert_array_equal(both.items[1], retriever.retrieve(histories[1], 20, caps=caps).items[0])
    assert np.isin(both.items[0], others[:25]).all()


def test_small_things_of_requests(world, histories):
    for strategy in ("exact", "two-step"):  # numpy's whole numbers are whole numbers
        assert made(world, strategy=strategy).retrieve(histories[0], np.int64(7)).items.shape == (1, 7)
    retriever = made(world)
    pi = retriever.retrieve(histories[:2], 5, pi=np.full(4, 0.2501)).pi
    np.testing.assert_allclose(pi.sum(1), 1, rtol=1e-12)
    for wrong in (np.int64(5), np.array(5), torch.tensor(5), b"12", [[2**64 - 1]]):
        with pytest.raises(BachError):
            retriever.retrieve(wrong, 5)
    first = retriever.retrieve(histories[0], 5).items
    retriever.model.train()
    np.testing.assert_array_equal(retriever.retrieve(histories[0], 5).items, first)  # no dropout in a slate
    gone = int(histories[0][-1])
    retriever.remove([gone])
    for neighbour in (gone - 1, gone + 1):  # what is left out is the item itself, served or not
        if 0 <= neighbour < world.n_items:
            assert neighbour in retriever.retrieve([[gone]], world.n_items - 1).items


def test_a_slate_can_be_read(world, histories):
    slate = made(world).retrieve(histories[0], 5)
    table = slate.table(0, world.items)
    assert list(table) == ["item", "raw_id", "score", "head", "share", "title", "genres"]
    assert table.index.tolist() == [1, 2, 3, 4, 5]
    assert table["raw_id"].tolist() == world.items["raw_id"][slate.items[0]].tolist()
    assert table["title"].iloc[0] == world.items["title"][slate.items[0, 0]]
    assert (table["share"].to_numpy() == slate.head_share[0].max(1)).all()
    for wrong in ([0, 1, 2], [[5]], [[0.5]], [[0], [1]]):
        with pytest.raises(BachError, match=r"places should be \(1, m\) numbers 0 … 4"):
            slate.take(wrong)


# -------------------------------------------------------------------------------------------- with the rest of it


def test_slates_of_a_run_are_those_of_evaluate(world, tmp_path):
    quick = {"epochs": 1, "batch_size": 256, "n_negatives": 64, "valid_every": 1}
    run = fit(build("p-bach", world, 3, **SMALL), world, quick, tmp_path, quiet=True)
    users = np.arange(world.n_users)
    rows, items = world.earlier(users, "test")
    earlier = [items[rows == u] for u in users]
    slate = Retriever(run).retrieve(world.history(users, "test"), 20, exclude=earlier)
    evaluated = evaluate(run, world, slate=20, quiet=True).slates
    assert (slate.items == evaluated).mean() > 0.999  # float32 there


def test_auto_says_why(world, histories, monkeypatch):
    small = made(world, strategy="auto")
    assert small.strategy == "exact" and "600 items, k = 4: a scan takes" in small.why and small.why in repr(small)
    shared = made(world, "p-bach-global", "auto")
    assert shared.strategy in ("codebook", "exact") and "the codebook's lists" in shared.why
    monkeypatch.setattr("bachlib.serve.auto.RATIOS", {100: 0.1, 1000: 0.1})  # as if graphs paid at this size
    tried = made(world, strategy="auto")
    assert "two-step" in tried.why and "with recall" in tried.why
    np.testing.assert_array_equal(tried.retrieve(histories, 5).items[:, 0], small.retrieve(histories, 5).items[:, 0])
