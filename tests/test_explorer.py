"""The widgets do what a session does: controls move π, the figure follows, and every answer is quick."""

import re
from copy import copy
from statistics import median
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from bachlib import BachError
from bachlib.bench.serve import bench_explorer
from bachlib.model.methods import build
from bachlib.serve import Retriever
from bachlib.show import plots
from bachlib.show.explorer import Explorer, sphere_explorer
from bachlib.show.explorer.widgets import percentages
from bachlib.show.plots import style
from bachlib.train import fit

SMALL = dict(d=16, ff=16, item_width=16)
HEADS = torch.nn.functional.normalize(torch.eye(3) + 0.1, dim=-1)


@pytest.fixture(scope="module")
def models(world):
    return {"p-BACH": build("p-bach", world, 4, **SMALL), "global": build("p-bach-global", world, 12, **SMALL)}


@pytest.fixture
def explorer(models, world):
    return Explorer(models, world, user=5, K=8, most_heads=6)


def shown(explorer) -> list[str]:
    """Titles of the figure, without marks and places."""
    return [str(trace) for trace in explorer.figure.data[0].text]


def test_it_shows_heads_and_slate(explorer, world):
    heads = explorer.session.heads
    assert [row.layout.display for row in explorer.rows] == [None] * 4 + ["none"] * 2
    for r, row in enumerate(explorer.rows[:4]):
        assert heads.names[r].replace("&", "&amp;") in row.about.value and f"κ {heads.kappa[r]:.1f}" in row.about.value
        assert row.slider.value == pytest.approx(heads.pi[r]) and row.slider.style.handle_color == plots.colour(r)
    wanted = Retriever(explorer.session.retriever.model, "exact").retrieve([world.sequence(5)[:-10]], 8)
    assert shown(explorer) == [world.items["title"][i] for i in wanted.items[0]]
    assert "proved" in explorer.status.value and "user 5" in explorer.status.value
    assert [trace.marker.color for trace in explorer.figure.data] == [plots.colour(r) for r in range(4)]
    assert repr(explorer) == "Explorer(p-BACH, global; 96 users, 600 items)"


def test_it_fits_a_laptop(models, world):
    """JupyterLab leaves 1100 × 640 pixels of a screen of 1280 × 768; a track is 12 pixels shorter than its slider."""
    made = Explorer(models, world)
    columns = made.children[0].children
    assert sum(int(column.layout.width[:-2]) for column in columns) + 2 * 6 <= 1100
    figure, *_ = columns[2].children
    assert figure.layout["width"] <= int(columns[2].layout.width[:-2]) and figure.layout["height"] + 180 <= 640
    assert made.users.rows == 8 and int(made.rows[0].slider.layout.width[:-2]) - 12 >= 120


def test_moving_a_head_re_ranks(explorer, world):
    before = shown(explorer)
    for row, value in zip(explorer.rows, (0.0, 0.0, 1.0, 0.0), strict=False):
        row.slider.value = value
    assert np.allclose(explorer.pi, [0, 0, 1, 0])
    wanted = explorer.session.slate(np.array([0, 0, 1.0, 0]))
    assert shown(explorer) == [world.items["title"][i] for i in wanted.items[0]] != before
    places = explorer.figure.layout.yaxis.ticktext
    was = dict(zip(before, range(8), strict=True))
    for n, (title, tick) in enumerate(zip(shown(explorer), places, strict=True)):
        up = was.get(title, n) - n
        sign = "new" if title not in was else f"↑{up}" if up > 0 else f"↓{-up}" if up < 0 else ""
        assert tick.split("  ")[0].endswith(sign) and tick.endswith(f"  {n + 1}")
    explorer.back.click()
    assert shown(explorer) == before and "0% of π" in explorer.status.value


def test_a_browser_that_rounds_moves_nothing(explorer):
    before = shown(explorer)
    for row in explorer.rows[:4]:
        row.slider.value = round(row.slider.value, 3)
    assert np.array_equal(explorer.pi, explorer.session.heads.pi) and shown(explorer) == before


def test_forbidding_a_head(explorer):
    explorer.rows[1].forbid.value = True
    assert ">0%<" in explorer.rows[1].share.value
    assert explorer.pi[1] == 0 and not np.any(explorer.figure.data[1].x)
    explorer.rows[1].forbid.value = False
    assert np.allclose(explorer.pi, explorer.session.heads.pi)


def test_the_shares_beside_the_sliders_sum_to_100(explorer):
    def shares() -> list[int]:
        return [int(re.search(r">(\d+)%<", row.share.value)[1]) for row in explorer.rows[:4]]

    assert sum(shares()) == 100
    explorer.rows[0].slider.value = 1.0
    assert sum(shares()) == 100 and shares() == pytest.approx((100 * explorer.pi).tolist(), abs=1)
    assert percentages(np.array([1, 1, 1]) / 3) == [34, 33, 33] and percentages([1 + 1e-7, -1e-7]) == [100, 0]


def test_a_search_that_finds_nothing_says_so(explorer):
    explorer.search.value = "zz<b>"
    assert explorer.users.options == () and "no user fits “zz&lt;b&gt;”" in explorer.no_user.value
    explorer.typed.value = "zz<b>"
    assert explorer.found.options == () and "no item fits “zz&lt;b&gt;”" in explorer.no_item.value
    explorer.search.value = explorer.typed.value = ""
    assert explorer.users.options and explorer.found.options
    assert not explorer.no_user.value and not explorer.no_item.value


def test_enter_adds_what_was_typed_and_a_button_clears_the_history(explorer, world):
    explorer.typed.entered += 1
    assert explorer.session.user == 5, "nothing was typed"
    explorer.typed.value = str(world.items["title"][30]).upper()
    explorer.typed.entered += 1
    assert explorer.session.history[-1] == 30 and explorer.typed.value == ""
    explorer.clear.click()
    assert explorer.history.value == [] and len(explorer.session.history) == 0 and len(explorer.slate.items[0]) == 8


def test_the_theme_is_jupyterlabs(explorer):
    steered = explorer.rows[0].slider.value = 0.7
    explorer.theme.dark = True
    assert explorer.rows[0].slider.style.handle_color == explorer.figure.data[0].marker.color == style.DARK["#0072B2"]
    assert explorer.figure.layout.template.layout.paper_bgcolor == style.DARK[style.PAPER]
    assert explorer.rows[0].slider.value == steered, "nothing else changes"
    explorer.theme.dark = False
    assert explorer.figure.layout.template.layout.paper_bgcolor == style.PAPER


def test_no_weight_at_all_says_so_and_keeps_the_slate(explorer, world):
    for row in explorer.rows[:3]:
        row.forbid.value = True
    kept = shown(explorer)
    explorer.rows[3].forbid.value = True
    assert "no slate can be served" in explorer.status.value and shown(explorer) == kept
    assert all(">0%<" in row.share.value for row in explorer.rows)
    explorer._clicked(None, SimpleNamespace(point_inds=[2]), None)  # why is still answered for the last slate
    assert str(world.items["title"][int(explorer.slate.items[0, 2])]) in explorer.because.value


def test_the_same_user_again_after_an_edit(explorer):
    explorer.users.value = 3
    before = shown(explorer)
    explorer.history.value = explorer.history.value[1:]
    assert explorer.session.user is None
    explorer.users.value = 3
    assert explorer.session.user == 3 and shown(explorer) == before


def test_heads_that_are_not_shown(explorer):
    explorer.method.value = "global"
    for row in explorer.rows:
        row.forbid.value = True
    assert explorer.figure.layout.title.text == "Other heads have the largest part in all of these 8 items"
    assert "have 100% of π together" in explorer.others.value


def test_the_item_that_was_asked_for_stays(explorer):
    explorer.asked.value = int(explorer.slate.items[0, 1])
    asked = explorer.asked.value
    explorer.rows[0].slider.value += 0.02
    assert explorer.asked.value == asked


def test_dark_widgets_are_dark_all_over(models, world):
    try:
        plots.use("dark")
        made = Explorer(models, world)
        assert made.rows[0].slider.style.handle_color == made.figure.data[0].marker.color == style.DARK[plots.colour(0)]
    finally:
        plots.use("light")


def test_switching_the_model(explorer, world):
    explorer.method.value = "global"
    assert len(explorer.session.heads.pi) == 12 and "6 other heads have" in explorer.others.value
    assert explorer.shown.tolist() == sorted(np.argsort(-explorer.session.heads.pi)[:6].tolist())
    assert [trace.name.split(" · ")[0] for trace in explorer.figure.data] == [*map(str, explorer.shown), "other heads"]
    assert explorer.figure.data[6].marker.color not in plots.COLOURS
    total = sum(np.asarray(trace.customdata) for trace in explorer.figure.data)
    assert np.allclose(total, 1)
    explorer.method.value = "p-BACH"
    assert len(explorer.figure.data) == 4


def test_finding_a_user_and_typing_a_history(explorer, world):
    genre = str(world.truth.genres[1])
    explorer.search.value = genre
    assert genre in explorer.users.options[0][0] and explorer.session.user == explorer.users.options[0][1]
    explorer.users.value = explorer.users.options[2][1]
    assert explorer.session.user == explorer.users.options[2][1]
    n = len(explorer.history.value)
    title = str(world.items["title"][30])
    explorer.typed.value = title
    explorer.found.value = 30
    assert len(explorer.history.value) == n == 50 and explorer.history.value[-1] == f"{title} · 30"
    assert "a typed history" in explorer.status.value
    length = len(explorer.session.history)
    explorer.found.value = 30  # again: it is the last one already
    assert len(explorer.session.history) == length
    explorer.history.value = explorer.history.value[:-1]
    explorer.found.value = 30  # the same choice can be made again
    assert explorer.session.history[-1] == 30
    explorer.history.value = [title.upper(), "<b>none</b>"]  # typed into the tags
    assert explorer.session.history.tolist() == [30] and explorer.history.value == [f"{title} · 30"]
    assert "&lt;b&gt;none" in explorer.status.value
    explorer.history.value = []
    assert "the history is empty" in explorer.because.value
    explorer.search.value = "zzzz"
    assert explorer.users.options == ()


def test_a_click_asks_why(explorer, world):
    explorer._clicked(None, SimpleNamespace(point_inds=[3]), None)
    item = int(explorer.slate.items[0, 3])
    assert explorer.asked.value == item and str(world.items["title"][item]) in explorer.because.value
    explorer._clicked(None, SimpleNamespace(point_inds=[]), None)
    assert explorer.asked.value == item


def test_titles_are_never_markup(models, world):
    nasty = copy(world)
    for name in ("titles", "genres"):
        nasty.__dict__.pop(name, None)
    bad = world.items["genres"].map(lambda of: [f"<img src=x onerror=y>{genre}\u202e" for genre in of])
    nasty.items = world.items.assign(title=[f"<script>x</script> %{{x}} {i}" for i in range(world.n_items)], genres=bad)
    explorer = Explorer(models, nasty, user=5)
    said = "".join((explorer.because.value, explorer.status.value, *(row.about.value for row in explorer.rows)))
    drawn = "".join((*explorer.figure.layout.yaxis.ticktext, *(str(trace) for trace in explorer.figure.data)))
    assert "&lt;script&gt;" in said and "&lt;img src=x" in said and "&lt;script&gt;" in drawn
    assert not any(mark in said + drawn for mark in ("<script>", "<img", "\u202e", "%{x} 1"))


def test_of_runs(world, tmp_path):
    for seed in (0, 1):
        fit(
            build("p-bach", world, 2, seed=seed, **SMALL),
            world,
            {"epochs": 1, "seed": seed},
            tmp_path / f"run-{seed}",
            quiet=True,
        )
    explorer = Explorer.of_runs(tmp_path / "run-0", tmp_path / "run-1", data=world.folder, K=5)
    assert list(explorer.method.options) == ["run-0", "run-1"]  # one method twice: named by their folders
    assert list(Explorer.of_runs(tmp_path / "run-0", data=world.folder).method.options) == ["p-bach"]
    with pytest.raises(BachError, match="at least one run folder"):
        Explorer.of_runs()


def test_runs_are_found_by_the_beginning_of_their_names(world, tmp_path, monkeypatch):
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path))
    folder = fit(build("p-bach", world, 2, **SMALL), world, {"epochs": 1}, quiet=True).folder
    monkeypatch.chdir(tmp_path.parent)
    for name in (folder.name, f"{folder.name[:-3]}…", "p-b"):
        assert Explorer.of_runs(name, data=world.folder).session.dataset.n_items == world.n_items
    folder.with_name("p-bar").mkdir()
    with pytest.raises(BachError, match=rf"2 runs begin with p-b: {folder.name}, p-bar; give more of the name"):
        Explorer.of_runs("p-b")


def test_an_answer_takes_less_than_a_tenth_of_a_second_with_20_000_items(world):
    """From a moved slider to the refilled figure, as the status line says it."""
    retriever = Retriever(build("p-bach", world, 8, d=64), "exact")
    rng = np.random.default_rng(0)
    more = rng.normal(size=(19_400, 64)).astype(np.float32)
    retriever.add(vectors=more / np.linalg.norm(more, axis=1, keepdims=True))
    explorer = Explorer({"p-BACH": retriever}, world)
    took = []
    for value in np.linspace(0, 1, 15):
        explorer.rows[2].slider.value = value
        took.append(explorer.answered_ms)
    assert median(took) < 100, took


def test_bench_show():
    found = bench_explorer(times=4)
    assert found["goals"] == {"median_ms": 100, "p95_ms": 100} and found["median_ms"] > 0 and "20,000" in found["name"]


# ------------------------------------------------------------------------------------------------------- the sphere


def test_the_sphere_follows_its_sliders():
    box = sphere_explorer(HEADS)
    kernel, controls, figure, theme = box.children
    kappa, weight = controls.children[0].children[0], controls.children[1].children[1]
    before = np.array(figure.data[0].surfacecolor)
    kappa.value = 200.0
    weight.value = 3.0
    after = np.array(figure.data[0].surfacecolor)
    assert not np.allclose(before, after)
    assert figure.data[2].text[1] == "u1: π = 0.20, κ = 200.0" and figure.data[3].text[1].startswith("u2: π = 0.60")
    kernel.value = "von-mises-fisher"
    assert not np.allclose(after, np.array(figure.data[0].surfacecolor))
    theme.dark = True
    assert figure.data[0].colorscale[0][1] == style.DARK[style.BALL]
