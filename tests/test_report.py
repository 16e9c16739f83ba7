"""The report of a run as a file: complete, self-contained, escaped, and made for every kind of run."""

import json
import re

import nbformat
import numpy as np
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output, new_raw_cell
from plotly.offline import get_plotlyjs
from reports import NASTY, SMALL, batch, in_process, renamed, trained

from bachlib import BachError
from bachlib.evaluate import Evaluation, evaluate
from bachlib.experiment.report import report
from bachlib.files import output_dir, read_json
from bachlib.model.methods import build
from bachlib.show import maps, plots
from bachlib.show.page import NEEDS_A_KERNEL, PLOTLY, STEERING, WIDGET, clean, figure, inline, markdown, marked, page
from bachlib.show.people import people
from bachlib.show.plots import style
from bachlib.show.portrait import Portrait, settings
from bachlib.show.steering import packed
from bachlib.train import fit
from bachlib.train.run import find_run

SECTIONS = (
    "how-good-it-is steer-π_u what-the-heads-mean one-user-item-by-item how-it-was-trained parameters environment"
)


@pytest.fixture(scope="module", autouse=True)
def quick_maps():
    """UMAP takes seconds for each of these runs; the tests in a browser draw its maps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(maps, "_umap", lambda items, heads, seed: (items[:, :2], heads[:, :2]))
        yield


@pytest.fixture(scope="module")
def mine(world):
    """The small world under another name, so that the runs of other tests do not lie beside ours."""
    return renamed(world, "report-world")


@pytest.fixture(scope="module")
def runs(mine):
    return {name: trained(mine, name) for name in ("p-bach", "all-multihead")}


def parts(text: str) -> tuple[dict[str, str], dict | None]:
    """The sections of a page without their scripts and code, and the data of its sliders."""
    body = re.sub(r'<script.*?</script>|<div class="code">.*?</div>', "", text, flags=re.S)
    sections = dict(re.findall(r'<section id="([^"]+)">(.*?)</section>', body, flags=re.S))
    data = re.search(r'id="data-steering">(.*?)</script>', text, flags=re.S)
    return sections, json.loads(data.group(1)) if data else None


def figures(text: str) -> list[dict]:
    found = re.findall(r'</div><script type="application/json">(.*?)</script></figure>', text, flags=re.S)
    return [json.loads(one) for one in found]


def check_stands_alone(text: str) -> None:
    assert text.count("* plotly.js v") == 1
    own = text.replace(inline(get_plotlyjs()), "")
    assert not re.search(r"""(?:src|<link[^>]*href)\s*=\s*["']?\s*(?:https?:)?//""", own), "the page loads something"
    assert "@import" not in own and "url(" not in own
    assert "default-src 'none'" in own


def test_a_training_run(runs):
    """As `bach report` makes it, with a kernel."""
    path = report(runs["p-bach"].folder)
    text = path.read_text()
    sections, steering = parts(text)
    assert path == runs["p-bach"].folder / "report.html"
    check_stands_alone(text)
    assert list(sections) == SECTIONS.split()
    for section in sections.values():
        assert re.search(r"<p>\w.+\.</p>|<table>", section), "a section says what one sees"
    for piece in ("status finished", "best epoch", "validation AUPRC", f"<title>{runs['p-bach'].folder.name}"):
        assert piece in text
    for name, value in {"n_negatives": 128, "d": 8, "tau": 0.07, "epochs": 2, "encoder": "cls"}.items():
        assert f"<td>{name}</td><td>{value}</td>" in sections["parameters"]
    assert "<td>torch</td>" in sections["environment"] and "Exercises" not in text
    assert len(figures(text)) == 11 and all("width" not in one["layout"] for one in figures(text))
    assert len(steering["users"]) == 6 and steering["K"] == 15
    assert len({one["name"] for one in steering["users"]}) == 6
    assert len(figures(in_process(runs["p-bach"].folder))) == 11, "the other tests execute the same cells"


def test_numbers_come_with_intervals(mine, runs):
    """Beside a comparable run: the paper's table; alone: means with intervals over users."""
    sections, _ = parts(in_process(runs["p-bach"].folder))
    saved, numbers = Evaluation.load(runs["p-bach"].folder), sections["how-good-it-is"]
    row = re.search(r"<tr><td>p-bach</td>(.*?)</tr>", numbers).group(1)
    cells = re.findall(r"<td>(?:<b>)?([\d.]+)(?:</b>)? ±([\d.]+)", row)
    assert len(cells) == 5 and float(cells[4][0]) == pytest.approx(saved.means["AUPRC"], abs=6e-5)
    assert all(float(half) > 0 for _, half in cells)
    assert "<td>all-multihead</td>" in numbers

    alone = trained(mine, "p-bach", name="apart/p-bach")
    sections, _ = parts(in_process(alone.folder))
    row = r"<th>AUPRC</th>\s*<td>[\d.]+</td>\s*<td>([\d.]+) – ([\d.]+)</td>"
    low, high = re.search(row, sections["how-good-it-is"]).groups()
    assert float(low) < saved.means["AUPRC"] < float(high), "the same training has the same number"


def test_table_and_curves_show_the_same_trainings(mine):
    """The seeds of a method are one row and one curve, and the page says that the rest is one training."""
    found = [trained(mine, "standard", 1, name=f"seeds/{seed}", seed=seed) for seed in (0, 1)]
    lead, table, drawn = Portrait(found[0].folder).numbers()
    saved = [Evaluation.load(run.folder) for run in found]
    assert table.numbers["seeds"].tolist() == [2] * 5 and "All other sections show this run alone" in lead.data
    both = np.mean([(e.ranks <= 50).mean() for e in saved])
    assert len(drawn.data) == 1 and f"{both:.1%} of the held-out" in drawn.layout.title.text
    assert both != (saved[0].ranks <= 50).mean(), "else this test could not fail"
    again = trained(mine, "standard", 1, name="seeds/2")
    called = fit(build("standard", mine, 1, **SMALL, name="mine"), mine, again.about["identity"]["train"]
                 | again.about["limits"], again.folder.parent / "3", quiet=True)  # fmt: skip
    evaluate(called, mine, quiet=True).save(called.folder)
    rows = Portrait(found[0].folder).numbers()[1].numbers["method"].unique()
    assert list(rows) == ["standard", "mine"], "the training of seed 0 once, and the model with a name"


def test_an_evaluation_of_other_weights_is_not_taken(mine):
    run = trained(mine, "standard", 1, name="older/standard")
    stem = run.folder / "evaluation-test.json"
    told = read_json(stem)
    told["about"]["valid_auprc"] = 0.5
    stem.write_text(json.dumps(told))
    per_user = Evaluation.load(run.folder).per_user * 0 + 0.7777
    other = {"per_user": per_user, "means": per_user.mean().to_dict()}
    Evaluation(**{**vars(Evaluation.load(run.folder)), **other}).save(run.folder)
    assert "0.7777" not in parts(in_process(run.folder))[0]["how-good-it-is"]


@pytest.mark.parametrize(
    ("method", "k", "drawn", "said"),
    [
        ("mostpop", 1, 1, "it has no vectors, heads or π"),
        ("standard", 1, 3, "there is no π to steer"),
        ("all-multihead", 3, 4, "no π and no κ"),
        ("comirec-dr", 3, 4, "no π and no κ"),
        ("v-bach-residual", 3, 11, "Every user has heads of their own"),
        ("p-bach-global", 3, 11, "All users share these heads"),
    ],
)
def test_every_kind_of_method(mine, method, k, drawn, said):
    """What a method does not have is left out, and the page says so."""
    run = trained(mine, method, k, name=f"kinds-{method}/{method}", evaluated=False)
    sections, steering = parts(text := in_process(run.folder))
    assert said in "".join(sections.values()) and list(sections) == SECTIONS.split()
    assert len(figures(text)) == drawn
    assert (steering is not None) == ("bach" in method)
    check_stands_alone(text)


def test_many_heads_are_summed_up(mine):
    run = trained(mine, "p-bach-global", 40, name="many/global", evaluated=False)
    sections, steering = parts(text := in_process(run.folder))
    assert "Of 40 heads the 16 with the largest mean π are shown" in sections["what-the-heads-mean"]
    of = people(run.model, mine)
    assert of.left == 24 and of.pi.mean(0)[of.shown].min() >= np.delete(of.pi.mean(0), of.shown).max()
    for place, one in zip(of.some, steering["users"], strict=True):
        heads = [int(name.split(" · ")[0]) for name in one["names"][:-1]]
        assert one["colours"] == [*map(plots.colour, heads), style.GREY], "one colour per head everywhere"
        assert heads == of.seen_by(place).shown.tolist(), "each user steers the heads they have most of"
        assert min(one["pi"][:-1]) >= np.delete(of.pi[place], heads).max() - 1e-6
        assert len(one["pi"]) == len(one["names"]) == 17
        assert sum(one["pi"]) == pytest.approx(1) and one["kappa"][-1] is None
        assert one["names"][-1] == "the other 24 heads"
    assert max(len(one["data"]) for one in figures(text)) < 70


def test_without_genres_and_titles(world):
    plain = renamed(world, "plain", titles=lambda i: f"raw {i}", genres=lambda _: [])
    run = trained(plain, "p-bach", 3, evaluated=False)
    sections, steering = parts(text := in_process(run.folder))
    assert "These items have no genres" in sections["what-the-heads-mean"]
    assert steering["users"][0]["names"] == ["head 0", "head 1", "head 2"]
    assert len(figures(text)) == 10


def test_titles_cannot_become_markup(world):
    nasty = renamed(
        world, "nasty-file", titles=lambda i: f"{NASTY} {i}", genres=lambda g: [f"<b>{x}</b></script>" for x in g]
    )
    sections, steering = parts(text := in_process(trained(nasty, "p-bach", 3, evaluated=False).folder))
    assert "<img" not in text.replace(inline(get_plotlyjs()), "")
    assert "window.hacked" not in "".join(sections.values()).replace("&lt;", ""), "not even as text outside of JSON"
    assert any(NASTY in title for title in steering["titles"].values()), "but whole where the script sets it as text"
    assert text.count("</script>") == text.count("<script"), "a title has ended a script"


def test_cold_users_and_a_free_pi(mine):
    strict = mine.strict(0.3)
    run = trained(strict, "p-bach", 3, name="cold/p-bach", evaluated=False)
    sections, steering = parts(in_process(run.folder))
    cold = {f"user {u}" for u in strict.cold}
    assert f"{len(strict.cold)} cold users" in sections["how-good-it-is"]
    assert {one["name"].split(":")[0] for one in steering["users"]} <= cold
    run = trained(mine, "p-bach", 3, name="free/p-bach", evaluated=False, pi="table")
    assert parts(in_process(run.folder))[1] is not None


def test_what_is_missing_is_said(mine, runs, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "history.parquet", "best.safetensors"):
        (folder / name).write_bytes((runs["p-bach"].folder / name).read_bytes())
    about = read_json(folder / "run.json")

    def page_of(change) -> str:
        told = json.loads(json.dumps(about))
        change(told)
        (folder / "run.json").write_text(json.dumps(told))
        sections, steering = parts(in_process(folder))
        assert steering is None and "<td>tau</td>" in sections["parameters"]
        return sections["how-good-it-is"]

    assert "its data set, gone" in page_of(lambda a: a["identity"]["data"].update(name="gone"))
    assert "no longer the one" in page_of(lambda a: a["identity"]["data"].update(content_hash="x"))
    own = page_of(lambda a: a["identity"]["model"].update(own={"gate": "Mine"}))
    assert "parts of your own (gate)" in own and "Portrait(run, data, model)" in own
    (folder / "best.safetensors").unlink()
    assert "it has no weights yet" in page_of(lambda a: a.update(status="running", best=None))


# --------------------------------------------------------------------------------------------- a run of the notebooks


def test_a_run_of_notebooks(runs, tmp_path):
    model = str(runs["p-bach"].folder.relative_to(output_dir()))
    path = report(batch(tmp_path / "b", [r.folder for r in runs.values()], model=model))
    sections, steering = parts(text := path.read_text())
    check_stands_alone(text)
    assert list(sections) == ["summary", "00_a", "01_b", "environment"] and "<title>my batch</title>" in text
    assert [*path.parent.glob("*.html")] == [path] and not [*path.parent.glob("*.js")], "one file"
    chapter = sections["00_a"]
    assert "<h2>00 · The claim &lt;i&gt;</h2>" in chapter
    assert "<math" in chapter and "<em>worth</em>" in chapter and "<code>a &lt; b</code>" in chapter
    assert re.search(r"<td>p-bach</td><td>(<b>)?0\.\d{4}(</b>)? ±0\.\d{4}", chapter), "the table with its intervals"
    assert "onclick" not in text.replace(inline(get_plotlyjs()), "") and "a pandas table" in chapter
    assert len(figures(text)) == 1 and "<figcaption>Two bars</figcaption>" in chapter
    assert len(steering["users"]) == 6 and 'id="steering"' in sections["01_b"]
    assert "<td>path</td><td>&lt;b&gt;</td>" in sections["summary"] and "2 of 2 notebooks in 4 s" in text


def test_a_run_that_failed(tmp_path):
    folder = batch(tmp_path / "b", failed=True)
    left = nbformat.read(folder / "01_b.ipynb", as_version=4)
    broken = new_output("error", ename="BachError", evalue="1 < 2", traceback=["\x1b[31mBachError\x1b[0m: 1 < 2"])
    left.cells.append(new_code_cell("fail()", outputs=[broken]))
    nbformat.write(left, folder / "01_b.ipynb")
    (folder / "run.json").write_text("{}")  # of a training that did not end: the page is about the failure
    sections, _ = parts(text := report(folder).read_text())
    assert "failed in <code>01_b</code>" in sections["summary"] and "1 of 2 notebooks" in text
    assert re.search(r"<th>01_b</th>\s*<td>failed</td>", sections["summary"])
    assert "BachError: 1 &lt; 2 &lt;/pre&gt;&lt;script&gt;" in sections["summary"]
    assert '<span class="ansi-red-fg">BachError</span>: 1 &lt; 2' in sections["01_b"]


def test_which_run(runs, tmp_path):
    assert find_run("p-bach-report-world") == runs["p-bach"].folder == find_run(runs["p-bach"].folder)
    with pytest.raises(
        BachError, match=r"there is no run p-bahc; in .* there are .*all-multihead-report-world, .*p-bach"
    ):
        find_run("p-bahc")
    with pytest.raises(BachError, match="is not a run: it has neither"):
        report(tmp_path)


# ---------------------------------------------------------------------------------------------------------- the writer

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
DRAWN = {"data": [], "layout": {"title": {"text": "Drawn 17"}}}


def every_kind() -> nbformat.NotebookNode:
    """A cell of every kind, each with a word that is nowhere else."""
    shown = [
        {PLOTLY: DRAWN, "image/png": PIXEL, "text/plain": "twin of a figure"},
        {"text/html": "<table><tr><th>ours 18</th></tr><tr><td onclick='x()'>a</td></tr></table><script>bad</script>"},
        {"text/html": "<style>x</style><script>y</script>", "text/plain": "plain 19"},
        {"text/plain": "<b>plain 20</b>"},
        {"image/png": PIXEL, "text/plain": "picture 21"},
        {"image/svg+xml": "<svg><script>bad</script></svg>", "text/plain": "picture 22"},
        {WIDGET: {"model_id": "1"}, "text/plain": "VBox()"},
        {"text/markdown": "**bold 23** $\\pi$"},
        {"text/latex": "$\\kappa_{24}$"},
        {"text/markdown": "```python\ndef source_29(): ...\n```"},
        {"application/json": {"json": 25}},
        {STEERING: packed({"K": 1, "titles": {}, "users": [], "word": 26}), "text/html": "fallback of sliders"},
        {STEERING: packed({"K": 1, "titles": {}, "users": [], "word": 27}), "text/html": "fallback of sliders"},
    ]
    image = {"a.png": {"image/png": PIXEL}}
    return new_notebook(
        cells=[
            new_markdown_cell("# Title <i>1</i>\n\nlead 2"),
            new_code_cell("before = 3", outputs=[new_output("stream", text="stream \x1b[32m4\x1b[0m <b>")]),
            new_markdown_cell(
                "text 5\n\n## First <6>\n\ntext 7 $x_7$ and `$8`\n\n```\n## no heading 9\n```\n\n## Second 10"
            ),
            new_markdown_cell("![alt 11](attachment:a.png) [link](03_data.ipynb)", attachments=image),
            new_raw_cell("raw <12>"),
            new_code_cell("code_13 = '<b>'", outputs=[new_output("display_data", data) for data in shown]),
            new_code_cell("", outputs=[new_output("error", ename="E", evalue="error <14>", traceback=[])]),
            new_markdown_cell(
                "<details><summary>folded 15</summary>\n\ninside <img src=http://x onerror=y>\n</details>"
            ),
            new_markdown_cell("lesson 16", metadata={"tags": ["lesson"]}),
            new_markdown_cell("bad $\\left( 28$ formula"),
        ]
    )


def test_no_cell_is_lost():
    made = every_kind()
    text = page(made)
    check_stands_alone(text)
    own = text.replace(inline(get_plotlyjs()), "")
    for piece in (
        "<h1>Title &lt;i&gt;1&lt;/i&gt;</h1>", "lead 2", "before",
        'stream <span class="ansi-green-fg">4</span> &lt;b&gt;', "text 5",
        '<section id="first-6"><h2>First &lt;6&gt;</h2>', "text 7 <math", "<code>$8</code>",
        "## no heading 9", "<h2>Second 10</h2>", 'alt="alt 11"',
        'href="#03_data"', "raw &lt;12&gt;", "code_13", "error &lt;14&gt;", "folded 15", "lesson 16", "Drawn 17",
        "<th>ours 18</th>", "plain 19", "&lt;b&gt;plain 20&lt;/b&gt;", 'alt="picture 21"', 'alt="picture 22"',
        NEEDS_A_KERNEL, "<strong>bold 23</strong>", "&quot;json&quot;: 25", '"word":26', '"word":27',
        'id="data-steering">', 'id="data-steering-2">', 'id="steer-2"', "<code>\\left( 28</code>",
    ):  # fmt: skip
        assert piece in own, piece
    hidden = re.search(r"body:not\(:has\(#code:checked\)\) (\S+)", own).group(1)
    assert '<div class="code shown">' in own and '<span class="nf">source_29</span>' in own, "highlighted as code"
    assert hidden == ".code:not(.shown)", "the switch hides the cells, not what they show"
    for piece in (*"fallback onclick onerror <script>bad <script>y <svg kappa_{24}".split(), 'src="http', "twin of"):
        assert piece not in own, piece
    assert own.count(f'src="data:image/png;base64,{PIXEL}"') == 2
    assert len(figures(text)) == 1 and text.count("<section") == own.count('<li><a href="#') == 2
    without = page(made, "My title", lessons=False)
    assert "lesson 16" not in without and "raw &lt;12&gt;" in without
    assert "<h1>My title</h1>" in without and "Title &lt;i&gt;1" in without, "its own title is not lost"


def test_several_notebooks_are_chapters():
    text = page([("a", every_kind()), ("b", every_kind()), ("a", new_notebook(cells=[]))], "<Both>")
    assert re.findall('<section id="(.*?)"', text)[:2] == ["a", "b"] and "<h1>&lt;Both&gt;</h1>" in text
    assert text.count("<h3>Second 10</h3>") == 2 == text.count("lesson 16") and text.count("* plotly.js v") == 1
    assert len(set(re.findall(' id="(.*?)"', text))) == len(re.findall(' id="(.*?)"', text)), "an id is there twice"


def test_texts_of_figures():
    assert marked("π<sub>u</sub> of &lt;script&gt; <script>x</script>") == (
        "π<sub>u</sub> of &lt;script&gt; &lt;script&gt;x&lt;/script&gt;"
    )
    made = figure({"data": [], "layout": {"title": {"text": 'a "b" </script>'}, "width": 5, "height": 300}})
    assert 'aria-label="a &quot;b&quot; &lt;/script&gt;"' in made and made.count("</script>") == 1
    assert '"title"' not in made and 'style="height:264px"' in made


def test_scripts_and_tables_are_made_safe():
    assert inline("a('</script>','</SCRIPT>','<!--')") == r"a('<\/script>','<\/SCRIPT>','<\!--')"
    wild = '<p class="plot" id="steer" onclick="y">1 &lt; 2</p><iframe src="x">z</iframe>'
    assert clean(wild) == "<p>1 &lt; 2</p>z"
    assert clean('<a href="javascript:x">a</a><a href="https://b.c">b</a>') == '<a>a</a><a href="https://b.c">b</a>'
    assert markdown(r"$\big\|x\big\|$").count(">‖<") == 2, "the signs of a norm"
    assert "<math" in markdown("$a < b$") and "<script>" not in markdown("$\\text{<script>x</script>}$")
    assert "href" not in markdown("$\\href{javascript:x}{y}$").replace("<code>\\href", "")
    shown = settings({"a": 1, "train": {"x": None, "y": [1, 2], "z": {}, "<b>": "<i>"}}).data
    for row in ("<td>train.y</td><td>[1, 2]</td>", "<td>train.z</td>", "<td>train.&lt;b&gt;</td><td>&lt;i&gt;</td>"):
        assert row in shown


def test_what_was_liked_later_is_the_held_out_items(mine):
    run = trained(mine, "p-bach", 3, name="later/run", evaluated=False)
    _, steering = parts(in_process(run.folder))
    for one in steering["users"]:
        u = int(re.match(r"user (\d+):", one["name"]).group(1))
        assert one["later"] == mine.sequence(u)[-10:].tolist() and not set(one["later"]) & set(one["history"])


def test_a_neighbour_that_is_damaged_does_not_matter(mine):
    ours = trained(mine, "p-bach", 3, name="pair/ours")
    other = trained(mine, "standard", 1, name="pair/other")
    assert "1 other evaluated run lies" in in_process(ours.folder)
    (other.folder / "evaluation-test.parquet").write_bytes(b"half")
    assert "other evaluated" not in in_process(ours.folder)


def test_only_what_was_measured_alike_is_compared(mine):
    ours = trained(mine, "p-bach", 3, name="alike/ours")
    other = trained(mine, "standard", 1, name="alike/other", evaluated=False)
    evaluate(other, mine, max_users=50, quiet=True).save(other.folder)
    assert "other evaluated" not in in_process(ours.folder)


def test_a_wrong_data_set_is_named(mine, tmp_path):
    ours = trained(mine, "p-bach", 3, name="data/ours")
    with pytest.raises(BachError, match="is not a prepared data set"):
        report(ours.folder, data=tmp_path)


def test_one_cold_user_does_not_share_their_heads(mine):
    cold = mine.strict(0.011)
    assert len(cold.cold) == 1 and not people(build("p-bach", cold, 3, d=8), cold).shared
    assert people(build("p-bach-global", cold, 3, d=8), cold).shared
