"""What heads mean: shares, lift and names by hand; maps that are kept; figures of heads and profiles."""

import re

import numpy as np
import plotly.io as pio
import pytest
import torch
from scipy.special import softmax

from bachlib import BachError
from bachlib.evaluate import diagnostics, meaning
from bachlib.evaluate.meaning import Genres
from bachlib.model.methods import build
from bachlib.serve.nearest import nearest
from bachlib.show import maps as layouts
from bachlib.show import plots
from bachlib.show.plots import style

LIKES = np.array([0.5, 0.25, 0.25])
GENRES = Genres(["Drama", "Noir", "Jazz"], np.eye(3, dtype=np.float32), LIKES)


# ---------------------------------------------------------------------------------------------------------- meaning


def test_genres_of_a_world(world):
    genres = meaning.genres_of(world)
    assert genres.names == sorted(map(str, world.truth.genres))
    own = np.array(genres.names)[genres.first]
    assert (own == world.truth.genres[world.truth.item_interest]).all()
    assert genres.likes.sum() == pytest.approx(1)  # one genre each


def test_the_rarest_genre_comes_first():
    member = np.array([[1, 1, 0], [0, 0, 1], [0, 0, 0]], np.float32)
    assert Genres(["a", "b", "c"], member, np.array([0.6, 0.1, 0.3])).first.tolist() == [1, 2, -1]


def test_lift_and_names():
    share = np.array([[0.05, 0.9, 0.05], [0.5, 0.25, 0.25], [0.0, 0.5, 0.5], [0.1, 0.85, 0.05], LIKES])
    assert meaning.lift(share, LIKES)[0].tolist() == pytest.approx([0.1, 3.6, 0.2])
    assert meaning.head_names(share, GENRES) == ["Noir", "mixed", "Noir + Jazz", "Noir #2", "mixed"]
    assert meaning.head_names(share, Genres([], np.zeros((3, 0)), np.zeros(0))) == [""] * 5


def test_a_genre_that_nobody_likes_names_no_head():
    """It has no share of the likes to compare with, so its lift is 1, however little of it a head has."""
    genres = Genres(["Drama", "Noir", "Rare"], np.eye(3, dtype=np.float32), np.array([0.6, 0.4, 0.0]))
    share = np.array([[0.30, 0.65, 0.05], [0.6, 0.38, 0.02]])
    assert meaning.lift(share, genres.likes)[:, 2].tolist() == [1, 1]
    assert meaning.head_names(share, genres) == ["Noir", "mixed"]


def test_a_name_is_neither_the_rarest_nor_the_commonest_genre():
    """By lift alone the first head would be a Western, by share alone a Drama."""
    genres = Genres(["Drama", "Noir", "Western"], np.eye(3, dtype=np.float32), np.array([0.6, 0.1, 0.002]))
    share = np.array([[0.65, 0.5, 0.03], [0.6, 0.1, 0.002]])
    assert meaning.head_names(share, genres) == ["Noir", "mixed"]


def test_likes_count_likes(world):
    genres, count = meaning.genres_of(world), np.asarray(world.matrix("train").sum(0)).ravel()
    assert genres.likes == pytest.approx([count[genres.first == g].sum() / count.sum() for g in range(5)])


def test_over_users_weighs_by_pi():
    of_heads = np.array([[[1.0, 0.0]], [[0.0, 1.0]]])  # two users, one head
    assert meaning.over_users(of_heads, np.array([[0.9], [0.3]])).tolist() == [pytest.approx([0.75, 0.25])]


def test_shares_of_heads_are_a_softmax_over_the_catalogue(world):
    model, genres = build("p-bach", world, 4, d=16, ff=16, item_width=16), meaning.genres_of(world)
    encoded = diagnostics.encode_users(model, world, np.arange(3))
    many = diagnostics.interest_of_heads(model, encoded.heads, genres.member).numpy()
    items = model.items().detach().numpy()
    for u in range(3):
        one = softmax(encoded.heads[u].numpy() @ items.T / model.tau, axis=1) @ genres.member
        given = diagnostics.interest_of_heads(model, encoded.heads[u : u + 1].numpy(), genres.member, items)[0]
        assert np.allclose(one, many[u], atol=1e-5) and np.allclose(one, given, atol=1e-5)


def test_explained_is_the_responsibility_of_held_out(world):
    model, users = build("v-bach", world, 4, d=16, ff=16, item_width=16), np.arange(6)
    encoded = diagnostics.encode_users(model, world, users)
    items = world.targets(users, "test")
    made = diagnostics.explained(model, encoded, np.column_stack([np.full(6, -1), items]))
    assert np.isnan(made.gamma[:, 0]).all()
    assert np.allclose(made.gamma[:, 1:], diagnostics.held_out(model, world, users).gamma.numpy(), atol=1e-5)
    tight = made.tightness(least=1.0)
    by_hand = (made.gamma[2, 1:, 1] * made.cosine[2, 1:, 1]).sum() / made.gamma[2, 1:, 1].sum()
    enough = made.gamma[2, 1:, 1].sum() >= 1
    assert tight[2, 1] == pytest.approx(by_hand, rel=1e-5) if enough else np.isnan(tight[2, 1])
    kinds = np.column_stack([np.zeros(6, int), world.truth.item_interest[items]])
    share = made.by_kind(kinds, 5)
    gone = made.by_kind(np.where(kinds == kinds[0, 1], -1, kinds), 5)
    assert gone[:, kinds[0, 1]].sum() == 0, "items without a kind count for none"
    assert share.sum(0) == pytest.approx(np.where(np.isin(np.arange(5), kinds[:, 1:]), 1, 0))
    with pytest.raises(BachError, match="only the BACH methods"):
        diagnostics.explained(build("all-multihead", world, 2, d=16), encoded, items)


# ------------------------------------------------------------------------------------------------------------- maps


def clouds(n: int = 60, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Three clouds on the sphere, and the middle of each."""
    rng = np.random.default_rng(seed)
    middle = np.eye(8)[:3]
    items = np.repeat(middle, n, 0) + 0.15 * rng.normal(size=(3 * n, 8))
    return items / np.linalg.norm(items, axis=1, keepdims=True), middle


def test_a_map_keeps_clouds_apart_and_heads_in_them(monkeypatch):
    items, heads = clouds()
    torch.set_num_threads(threads := 1)
    xy, stars = layouts.layout(items, heads)
    assert xy.shape == (180, 2) and stars.shape == (3, 2)
    middle = np.stack([xy[60 * c : 60 * c + 60].mean(0) for c in range(3)])
    distance = np.linalg.norm(stars[:, None] - middle[None], axis=-1)
    assert (distance.argmin(1) == [0, 1, 2]).all()
    assert torch.get_num_threads() == threads, "numba's threads are not torch's"
    monkeypatch.setattr(layouts, "_umap", None)  # the second time nothing is computed
    again, _ = layouts.layout(items, heads)
    assert (again == xy).all()
    with pytest.raises(TypeError):
        layouts.layout(items, heads, seed=1)


def test_neighbours_are_items():
    items, heads = clouds(20)
    near, distance = nearest(items.astype(np.float32), heads.astype(np.float32), 5)
    assert (near[:, 0] == np.arange(63)).all() and (near[:, 1:] < 60).all() and (distance[:, 0] == 0).all()
    cosine = np.concatenate([items, heads]) @ items.T
    np.fill_diagonal(cosine, -9)
    for row in (0, 33, 61):
        assert set(near[row, 1:]) == set(np.argsort(-cosine[row])[:4])


def islands(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Six kinds, each with a large and a small island, scattered over the plane; some items far from both."""
    rng = np.random.default_rng(seed)
    places = rng.permutation(np.array([(x, y) for x in range(4) for y in range(3)])) * 10.0
    xy = [place + rng.normal(size=(n, 2)) for place, n in zip(places, [120] * 6 + [60] * 6, strict=True)]
    kind = np.repeat([*range(6), *range(6)], [120] * 6 + [60] * 6)
    return np.concatenate([*xy, rng.uniform(0, 30, (60, 2))]), np.concatenate([kind, rng.integers(0, 6, 60)])


@pytest.mark.parametrize("seed", range(5))
def test_a_word_stands_on_the_densest_island_of_its_kind(seed):
    xy, kind = islands(seed)
    words = layouts.regions(xy, kind, list("abcdef"))
    assert set(words) == set("abcdef")
    for g, name in enumerate("abcdef"):
        large = xy[120 * g : 120 * g + 120]
        assert np.linalg.norm(words[name] - large.mean(0)) < 3, "inside the larger island, not between the two"
        near = np.argsort(np.linalg.norm(xy - words[name], axis=1))[:10]
        assert (kind[near] == g).mean() > 0.8


def test_words_of_one_island_do_not_cover_each_other():
    rng = np.random.default_rng(0)
    words = layouts.regions(rng.normal(size=(400, 2)), np.arange(400) % 2, ["one long word", "another word"])
    apart = np.abs(words["one long word"] - words["another word"])
    assert (apart / np.array([8 * 12, 20]) * 520 / 6 > 0.9).any(), "at least a line or a word apart"
    assert layouts.regions(rng.normal(size=(30, 2)), np.full(30, -1), ["x"]) == {}


def test_too_little_for_a_map():
    with pytest.raises(BachError, match="at least 5 items"):
        layouts.layout(np.eye(4), np.eye(4))


# ---------------------------------------------------------------------------------------------------------- figures

NAMES = ["Noir", "Jazz & <b>Blues</b>", "mixed"]
PI = np.array([[0.7, 0.2, 0.1], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3], [0.6, 0.3, 0.1]])


def map_figure(**more):
    rng = np.random.default_rng(0)
    items = rng.normal(size=(40, 2))
    hover = [f"film {i}" for i in range(40)]
    top = [[1, 2], [3], []]
    return plots.map_of_items(items, np.arange(40) % 3, hover, items[:3], NAMES, PI[0], top, {"here": items[0]}, **more)


FIGURES = {
    "map": map_figure,
    "map with history": lambda: map_figure(history=[4, 5]),
    "lift": lambda: plots.head_lift(np.array([[3.6, 0.1], [1.0, 1.0], [0.2, 8.0]]), NAMES, ["Noir", "Jazz"]),
    "ternary": lambda: plots.pi_ternary(PI, NAMES, [f"user {u}" for u in range(4)]),
    "admixture": lambda: plots.pi_admixture(PI, np.array([0, 1, 0, 0]), NAMES),
    "strip": lambda: plots.history_strip(PI, ["a", "b", "c", "d"], NAMES, held_out=1),
    "kappa": lambda: plots.kappa_and_tightness(PI[:, 0], PI[:, 1], np.array([0, 1, 2, 0]), NAMES, 0.5),
    "recovered": lambda: plots.recovered_interests(PI[:3].T, NAMES, ["a", "b", "c"], np.array([5, 3, 2])),
    "slate": lambda: plots.slate_by_head(PI, np.array([1.0, 0.9, 0.5, 0.2]), ["a", "b", "c", "d"], NAMES),
    "before and after": lambda: plots.pi_before_after(PI[0], PI[1], NAMES),
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_what_one_sees(name):
    figure = FIGURES[name]()
    title = figure.layout.title.text
    assert 20 < len(title) < 95, "a title has to fit above 860 pixels"
    text = figure.to_json()
    assert "<b>Blues" not in text and "\\u003cb\\u003eBlues" not in text, "names of a catalogue are never markup"
    colours = {c for c in plots.COLOURS if c in text}
    assert colours, "heads have the colours of the palette"
    for axis in ("xaxis", "yaxis"):
        if name not in ("map", "map with history", "ternary", "lift", "slate", "before and after", "recovered"):
            assert figure.layout[axis].title.text
    sizes = [int(s) for s in re.findall(r'"size":\s*(\d+)', figure.layout.to_plotly_json().__repr__())]
    assert all(size >= 11 for size in sizes)


def test_the_map():
    figure = map_figure(history=[4, 5], most=10)
    items, lines = figure.data[:3], figure.data[3:6]
    (rings,) = [trace for trace in figure.data if trace.name == "history"]
    stars = figure.data[-3:]
    drawn = {text for trace in items for text in trace.text}
    assert {"film 1", "film 2", "film 3", "film 4", "film 5"} <= drawn and len(drawn) < 20
    assert [len(line.x) for line in lines] == [6, 3, 0] and len(rings.x) == 2
    assert [star.marker.symbol for star in stars] == ["star"] * 3
    assert [star.marker.color for star in stars] == [plots.colour(r) for r in range(3)]
    sizes = [star.marker.size for star in stars]
    assert sizes == sorted(sizes, reverse=True)  # as π
    assert figure.layout.annotations[0].text == "<b>here</b>"
    bare = plots.map_of_items(
        np.eye(6)[:, :2], np.zeros(6, int), list("abcdef"), np.eye(2), ["x", "y"], None, numbers=[4, 7]
    )
    assert "π" not in bare.to_json() and bare.data[-1].marker.color == plots.colour(7)
    assert len({text for trace in map_figure().data[:3] for text in trace.text}) == 40


def test_the_slate_by_head():
    figure = FIGURES["slate"]()
    assert np.allclose(sum(np.asarray(trace.x) for trace in figure.data), [1.0, 0.9, 0.5, 0.2])
    assert figure.layout.yaxis.ticktext == ("a  1", "b  2", "c  3", "d  4")
    assert figure.layout.title.text == "3 heads bring these 4 items; head 0 brings 2"
    some = plots.slate_by_head(PI[:, :2], np.ones(4), list("abcd"), NAMES[:2], [5, 9], ["★", "", "new", ""])
    assert [trace.name for trace in some.data] == ["5 · Noir", "9 · Jazz &amp; &lt;b&gt;Blues&lt;/b&gt;", "other heads"]
    assert some.data[0].marker.color == plots.colour(5) and some.layout.yaxis.ticktext[0] == "a ★  1"
    assert np.allclose(some.data[2].x, PI[:, 2])


def test_the_strip_leaves_out_heads_that_explain_nothing():
    gamma = np.array([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0]])
    four = plots.history_strip(PI, ["a", "b", "c", "d"], NAMES).layout.title.text
    assert four == "3 of 3 heads explain nine tenths of this user's 4 items"
    figure = plots.history_strip(gamma, ["a", "b"], NAMES)
    assert [trace.name.split(" · ")[0] for trace in figure.data] == ["0", "1"]
    assert figure.layout.title.text == "1 of 3 heads explain nine tenths of this user's 2 items"


def test_heads_keep_their_numbers_and_colours():
    lift = plots.head_lift(np.array([[3.6, 0.1], [0.2, 8.0]]), ["Noir", ""], ["Noir", "Jazz"], [5, 98])
    assert lift.layout.title.text.startswith("Head 98 has Jazz 8.0 times")
    assert lift.data[0].y == ("5 · Noir", "head 98")
    some = plots.pi_admixture(PI[:, :2], np.zeros(4, int), NAMES[:2], [5, 98])
    assert [trace.marker.color for trace in some.data] == [plots.colour(5), plots.colour(98), style.GREY]
    strip = plots.history_strip(PI[:, 1:], list("abcd"), NAMES[1:], numbers=[1, 2])
    assert strip.data[-1].name == "other heads" and np.allclose(strip.data[-1].y, PI[:, 0])
    dots = plots.kappa_and_tightness(PI[:, 0], PI[:, 1], np.array([0, 1, 1, 0]), NAMES[:2], 0.5, [3, 20])
    assert [trace.marker.color for trace in dots.data] == [plots.colour(3), plots.colour(20)]
    assert list(dots.data[0].y) == PI[[0, 3], 0].tolist() and list(dots.data[0].x) == PI[[0, 3], 1].tolist()


def test_the_admixture_draws_every_user_once():
    figure = FIGURES["admixture"]()
    assert sorted(figure.data[0].customdata) == [0, 1, 2, 3] and figure.data[0].customdata[-1] == 1  # cluster 1 is last
    assert np.allclose(sum(np.asarray(trace.y) for trace in figure.data), 1)
    assert len(plots.pi_admixture(np.tile(PI, (200, 1)), np.arange(800) % 4, NAMES).data[0].x) == 300


def test_kappa_says_which_way():
    for correlation, said in ((0.5, "grows with"), (-0.5, "falls with"), (0.1, "hardly follows")):
        text = plots.kappa_and_tightness(PI[:, 0], PI[:, 1], np.zeros(4, int), NAMES, correlation).layout.title.text
        assert said in text


# ------------------------------------------------------------------------------------------------------ light and dark


def contrast(a: str, b: str) -> float:
    """WCAG's ratio of two colours."""

    def luminance(colour: str) -> float:
        c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
        return float(np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4) @ [0.2126, 0.7152, 0.0722])

    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_colours_are_seen_on_both_pages():
    for light in plots.COLOURS:
        assert contrast(light, style.PAPER) > 2.2, light
        assert contrast(style.DARK.get(light, light), style.DARK[style.PAPER]) > 4, light
    for ink in (style.INK, style.GREY):
        assert contrast(ink, style.PAPER) > 4.5 and contrast(style.DARK[ink], style.DARK[style.PAPER]) > 4.5


# what people see who lack one of the cones (Machado 2009, severity 1), as matrices on linear RGB
SEEN = {
    "all cones": np.eye(3),
    "no green": np.array([[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]),
    "no red": np.array([[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]]),
}


def lab(colour: str, seen: np.ndarray) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    linear = np.clip(seen @ np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    x, y, z = np.cbrt(np.maximum(xyz / [0.9505, 1, 1.089], 1e-4))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def test_no_colour_is_nearly_black_or_white():
    """ΔE to the ink and to the paper, for everybody: a head is taken neither for text nor for nothing."""
    for theme, least in ((lambda c: c, 25), (lambda c: style.DARK.get(c, c), 15)):
        for colour in plots.COLOURS:
            for seen in SEEN.values():
                for other in (style.INK, style.PAPER):
                    apart = np.linalg.norm(lab(theme(colour), seen) - lab(theme(other), seen))
                    assert apart > least, f"{colour} is nearly {other}"


def test_colours_are_told_apart_by_everybody():
    """ΔE (1976) of the nearest two colours; 2.3 is just noticeable side by side."""
    for theme in (plots.COLOURS, [style.DARK.get(c, c) for c in plots.COLOURS]):
        for seen in SEEN.values():
            places = np.array([lab(colour, seen) for colour in theme])
            apart = np.linalg.norm(places[:, None] - places[None], axis=-1) + 999 * np.eye(16)
            assert apart[:8, :8].min() > 17 and apart.min() > 12


def test_dark_is_the_same_figure_in_other_colours():
    light = FIGURES["lift"]()
    made = plots.dark(light)
    assert made.layout.title.text == light.layout.title.text and len(made.data) == len(light.data)
    assert made.layout.template.layout.paper_bgcolor == style.DARK[style.PAPER]
    assert made.data[0].colorscale[1][1] == style.DARK[style.PAPER]
    assert style.PAPER not in made.to_json().upper().replace("\\U0023", "#")


def test_use_shows_dark_and_back():
    figure = FIGURES["slate"]()
    try:
        plots.use("dark")
        (bundle,) = pio.renderers._build_mime_bundle(figure.to_dict()).values()
        assert bundle["layout"]["template"]["layout"]["paper_bgcolor"] == style.DARK[style.PAPER]
        assert style.themed(figure).layout.template.layout.paper_bgcolor == style.DARK[style.PAPER]
        with pytest.raises(BachError, match="light or dark"):
            plots.use("grey")
    finally:
        plots.use("light")
    assert pio.renderers.default == "plotly_mimetype" and style.themed(figure) is figure
