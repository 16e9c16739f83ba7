"""A session answers as the retriever does: for users, typed histories and any π; it finds people and items."""

import numpy as np
import pytest

from bachlib import BachError
from bachlib.data import prepare
from bachlib.model.methods import build
from bachlib.serve import Retriever, Steering
from bachlib.show.explorer.session import Session

SMALL = dict(d=16, ff=16, item_width=16)


@pytest.fixture(scope="module")
def models(world):
    return {name: build(name, world, 4, **SMALL) for name in ("p-bach", "v-bach", "p-bach-global")}


@pytest.fixture
def session(models, world):
    return Session(models, world, K=8)


@pytest.mark.parametrize("method", ["p-bach", "v-bach", "p-bach-global"])
def test_a_user_gets_what_the_retriever_gives(session, models, world, method):
    session.choose(method)
    session.be(5)
    past = world.sequence(5)[:-10]
    wanted = Retriever(models[method], "exact").retrieve([past], 8)
    assert (session.slate().items == wanted.items).all() and session.slate().certified.all()
    assert np.allclose(session.heads.pi, wanted.pi[0])
    assert session.later == set(world.sequence(5)[-10:].tolist())


def test_steering_is_the_retrievers(session, models, world):
    session.be(3)
    own = session.heads.pi
    pi = session.steered({1: 0.0, 2: 3 * own[2]})
    wanted = Steering(boost={2: 3.0}, forbid=[1])(own[None])[0]
    assert np.allclose(pi, wanted)
    made = session.slate(pi)
    assert not made.head_share[..., 1].any() and made.certified.all()
    with pytest.raises(BachError, match="without any head"):
        session.steered(dict.fromkeys(range(4), 0.0))


def test_a_typed_history_is_nobodys(session, models):
    session.be(3)
    session.read([10, 20, 30])
    past = session.had
    assert session.user is None and len(past) > 3, "what the user had stays left out"
    wanted = Retriever(models["p-bach"], "exact").retrieve([[10, 20, 30]], 8, exclude=past)
    assert (session.slate().items == wanted.items).all()
    session.read([])
    assert session.slate().items.shape == (1, 8) and session.later == set()
    session.read([10, 20, 30])
    wanted = Retriever(models["p-bach"], "exact").retrieve([[10, 20, 30]], 8)
    assert (session.slate().items == wanted.items).all(), "typed from nothing: only itself is left out"
    with pytest.raises(BachError, match="there is no item 600"):
        session.read([600])


def test_the_history_as_it_is_stays_the_users(session):
    session.be(3)
    session.read(session.history.tolist())
    assert session.user == 3 and len(session.later) == 10


@pytest.mark.parametrize("method", ["p-bach", "v-bach"])
def test_why_adds_up(session, method):
    session.choose(method)
    session.be(7)
    pi = session.steered({0: 0.6})
    slate = session.slate(pi)
    why = session.why(int(slate.items[0, 2]), pi)
    assert why.score == pytest.approx(slate.scores[0, 2], abs=1e-4)
    assert np.allclose(why.heads["share"], slate.head_share[0, 2], atol=1e-5)
    vectors = session.retriever.catalogue.vectors
    likeness = vectors[session.history] @ vectors[why.item]
    assert [c for _, c in why.like] == pytest.approx(np.sort(likeness)[::-1][:3].tolist())
    assert all(vectors[i] @ vectors[why.item] == pytest.approx(c) for i, c in why.like)


def test_finding_items(session, world):
    title = str(world.items["title"][4])
    assert session.find_items(title)[0] == 4  # the whole title first, however popular longer ones are
    assert 4 in session.find_items("4")
    assert session.find_items("no such title (") == []
    popular = np.asarray(world.matrix("train").sum(0)).ravel()
    assert popular[session.find_items("  ", 3)].tolist() == sorted(popular)[:-4:-1]
    word = title.split()[0].lower()
    found = session.find_items(word, 100)
    counts = np.asarray(world.matrix("train").sum(0)).ravel()[found]
    assert all(word in str(world.items["title"][i]).lower() for i in found) and (np.diff(counts) <= 0).all()


def test_finding_users(session, world):
    assert session.find_users("17")[0] == 17
    assert session.find_users(str(world.users["raw_id"][9]))[0] == 9
    genre = str(world.truth.genres[2])
    found = session.find_users(genre, 150)
    liked = world.matrix("train") @ session.genres.member[:, session.genres.names.index(genre)]
    assert (np.diff(liked[found]) <= 0).all() and liked[found[0]] == liked.max()
    assert genre in session.about_user(int(found[0]))
    assert session.find_users("zzz") == [] and len(session.find_users("")) == 20


def test_items_that_came_later_are_served(models, world):
    retriever = Retriever(models["p-bach"], "exact")
    heads = Session({"x": retriever}, world).heads.vectors
    (twin,) = retriever.add(vectors=heads[:1] / np.linalg.norm(heads[:1]))
    session = Session({"x": retriever}, world)
    slate = session.slate(session.steered({r: float(r == 0) for r in range(4)}))
    assert slate.items[0, 0] == twin == 600
    assert session.title(twin) == "item 600" and session.genres_of_item(twin) == [] and session.why(twin).score


def test_without_genres_or_titles(tmp_path):
    rng = np.random.default_rng(1)
    rows = [f"{u},{i},{t}" for u in range(40) for t, i in enumerate(rng.permutation(90)[:50])]
    (tmp_path / "log.csv").write_text("who,what,when\n" + "\n".join(rows) + "\n")
    columns = {"user": "who", "item": "what", "time": "when"}
    bare = prepare("csv", tmp_path / "log.csv", tmp_path / "made", columns=columns, min_items=40, quiet=True)
    session = Session({"p": build("p-bach", bare, 3, **SMALL)}, bare, K=30)
    assert len(session.heads.names) == 3 and all(name.startswith("like ") for name in session.heads.names)
    assert session.about_user(2) == "user 2 · 50 items"
    session.read([])
    session.read(list(range(75)))
    assert session.slate().items.shape == (1, 15)  # of 90 items 15 are left
    session.read(list(range(90)))
    with pytest.raises(BachError, match="none is left to show"):
        session.slate()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "at least one model"),
        ({"all-multihead": 4}, "has no π to show"),
        ({"x": "other"}, "items, the data set has"),
    ],
)
def test_wrong_models(world, tmp_path, given, said):
    if given == {"x": "other"}:

        class Fewer:
            n_items, items = 500, world.items

        given = {"x": build("p-bach", world, 4, **SMALL)}
        world = Fewer
    elif given:
        given = {name: build(name, world, k, **SMALL) for name, k in given.items()}
    with pytest.raises(BachError, match=said):
        Session(given, world)


def test_each_model_reads_as_much_as_it_can(world):
    models = {n: build("p-bach", world, 3, n_hist=int(n), **SMALL) for n in ("10", "50")}
    session = Session(models, world, K=8)
    session.be(5)
    session.choose("50")
    wanted = Retriever(models["50"], "exact").retrieve([world.sequence(5)[:-10]], 8)
    assert (session.slate().items == wanted.items).all() and np.allclose(session.heads.pi, wanted.pi[0])


def test_a_free_pi_per_user(world):
    """Known users have one; a typed history has none, and that is said."""
    session = Session({"t": build("p-bach", world, 3, pi="table", **SMALL)}, world)
    session.be(5)
    assert session.heads.pi.sum() == pytest.approx(1) and session.slate().certified.all()
    with pytest.raises(BachError, match="none for a typed history"):
        session.read([1, 2])


def test_odd_searches(session):
    assert session.find_items("²") == [] == session.find_users("²")
    assert session.find_items("12")[0] == 12  # a number is that item, whatever titles hold it


def test_an_unknown_method(session):
    with pytest.raises(BachError, match="there is no method 'x'; there are p-bach, v-bach, p-bach-global"):
        session.choose("x")
