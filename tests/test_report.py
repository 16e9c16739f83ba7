"""The report of a run as a file: complete, self-contained, escaped, and made for every kind of run."""

import json
import re

import numpy as np
import pytest
from plotly.offline import get_plotlyjs
from reports import NASTY, batch, renamed, trained

from bachlib import BachError
from bachlib.evaluate import Evaluation, evaluate
from bachlib.files import output_dir, record
from bachlib.model.methods import build
from bachlib.show import layout, plots
from bachlib.show.document import figure, inline, marked, only_a_table, settings
from bachlib.show.people import people
from bachlib.show.plots import style
from bachlib.show.report import report
from bachlib.train.run import find_run


@pytest.fixture(scope="module", autouse=True)
def quick_maps():
    """UMAP takes seconds for each of these runs; the tests in a browser draw its maps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "_umap", lambda items, heads, seed: (items[:, :2], heads[:, :2]))
        yield


@pytest.fixture(scope="module")
def mine(world):
    """The small world under another name, so that the runs of other tests do not lie beside ours."""
    return renamed(world, "report-world")


@pytest.fixture(scope="module")
def runs(mine):
    return {name: trained(mine, name) for name in ("p-bach", "all-multihead")}


def parts(path) -> tuple[str, dict[str, str], dict | None]:
    """The page without scripts, its sections, and the data of its sliders."""
    text = path.read_text()
    body = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    sections = dict(re.findall(r'<section id="([^"]+)">(.*?)</section>', body, flags=re.S))
    data = re.search(r'id="data-steering">(.*?)</script>', text, flags=re.S)
    return text, sections, json.loads(data.group(1)) if data else None


def figures(path) -> list[dict]:
    found = re.findall(r'</div><script type="application/json">(.*?)</script></figure>', path.read_text(), flags=re.S)
    return [json.loads(one) for one in found]


def check_stands_alone(text: str) -> None:
    assert text.count("* plotly.js v") == 1
    own = text.replace(inline(get_plotlyjs()), "")
    assert not re.search(r"""(?:src|href)\s*=\s*["']?\s*(?:https?:)?//""", own), "the page loads something"
    assert "@import" not in own and "url(" not in own
    assert "default-src 'none'" in own


def test_a_training_run(runs):
    path = report(runs["p-bach"].folder)
    text, sections, steering = parts(path)
    assert path == runs["p-bach"].folder / "report.html"
    check_stands_alone(text)
    assert list(sections) == ["numbers", "steering", "heads", "user", "training", "parameters", "environment"]
    for section in sections.values():
        assert re.search(r'<p class="lead">\w.+\.?</p>', section), "a section says what one sees"
    for piece in ("status finished", "best epoch", "validation AUPRC"):
        assert piece in text
    for name, value in {"n_negatives": 128, "d": 8, "tau": 0.07, "epochs": 2, "encoder": "cls"}.items():
        assert f"<td>{name}</td><td>{value}</td>" in sections["parameters"]
    assert "<td>torch</td>" in sections["environment"]
    assert len(figures(path)) == 11 and all("width" not in one["layout"] for one in figures(path))
    assert len(steering["users"]) == 6 and steering["K"] == 15
    assert len({one["name"] for one in steering["users"]}) == 6


def test_numbers_come_with_intervals(mine, runs):
    """Beside a comparable run: the paper's table; alone: means with intervals over users."""
    _, sections, _ = parts(report(runs["p-bach"].folder))
    saved = Evaluation.load(runs["p-bach"].folder)
    row = re.search(r"<tr><td>p-bach</td>(.*?)</tr>", sections["numbers"]).group(1)
    cells = re.findall(r"<td>(?:<b>)?([\d.]+)(?:</b>)? ±([\d.]+)", row)
    assert len(cells) == 5 and float(cells[4][0]) == pytest.approx(saved.means["AUPRC"], abs=6e-5)
    assert all(float(half) > 0 for _, half in cells)
    assert "<td>all-multihead</td>" in sections["numbers"]

    alone = trained(mine, "p-bach", name="apart/p-bach")
    _, sections, _ = parts(report(alone.folder))
    low, high = re.search(r"<td>AUPRC</td><td>[\d.]+</td><td>([\d.]+) – ([\d.]+)</td>", sections["numbers"]).groups()
    assert float(low) < saved.means["AUPRC"] < float(high), "the same training has the same number"


def test_an_evaluation_of_other_weights_is_not_taken(mine):
    run = trained(mine, "standard", 1, name="older/standard")
    stem = run.folder / "evaluation-test.json"
    told = json.loads(stem.read_text())
    told["about"]["valid_auprc"] = 0.5
    stem.write_text(json.dumps(told))
    per_user = Evaluation.load(run.folder).per_user * 0 + 0.7777
    Evaluation(**{**vars(Evaluation.load(run.folder)), "per_user": per_user}).save(run.folder)
    assert "0.7777" not in parts(report(run.folder))[1]["numbers"]


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
    path = report(run.folder)
    text, sections, steering = parts(path)
    assert said in "".join(sections.values())
    assert len(figures(path)) == drawn
    assert (steering is not None) == ("bach" in method)
    check_stands_alone(text)


def test_many_heads_are_summed_up(mine):
    run = trained(mine, "p-bach-global", 40, name="many/global", evaluated=False)
    _, sections, steering = parts(path := report(run.folder))
    assert "Of 40 heads the 16 with the largest mean π are shown" in sections["heads"]
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
    assert max(len(one["data"]) for one in figures(path)) < 70


def test_without_genres_and_titles(world):
    plain = renamed(world, "plain", titles=lambda i: f"raw {i}", genres=lambda _: [])
    run = trained(plain, "p-bach", 3, evaluated=False)
    _, sections, steering = parts(path := report(run.folder))
    assert "These items have no genres" in sections["heads"]
    assert steering["users"][0]["names"] == ["head 0", "head 1", "head 2"]
    assert len(figures(path)) == 10


def test_titles_cannot_become_markup(world):
    nasty = renamed(
        world, "nasty-file", titles=lambda i: f"{NASTY} {i}", genres=lambda g: [f"<b>{x}</b></script>" for x in g]
    )
    text, sections, steering = parts(report(trained(nasty, "p-bach", 3, evaluated=False).folder))
    assert "<img" not in text.replace(inline(get_plotlyjs()), "")
    assert "window.hacked" not in "".join(sections.values()).replace("&lt;", ""), "not even as text outside of JSON"
    assert any(NASTY in title for title in steering["titles"].values()), "but whole where the script sets it as text"
    assert text.count("</script>") == text.count("<script"), "a title has ended a script"


def test_cold_users_and_a_free_pi(mine):
    strict = mine.strict(0.3)
    run = trained(strict, "p-bach", 3, name="cold/p-bach", evaluated=False)
    _, sections, steering = parts(report(run.folder))
    cold = {f"user {u}" for u in strict.cold}
    assert f"{len(strict.cold)} cold users" in sections["numbers"]
    assert {one["name"].split(":")[0] for one in steering["users"]} <= cold
    run = trained(mine, "p-bach", 3, name="free/p-bach", evaluated=False, pi="table")
    assert parts(report(run.folder))[2] is not None


def test_what_is_missing_is_said(mine, runs, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in ("run.json", "history.parquet", "best.safetensors"):
        (folder / name).write_bytes((runs["p-bach"].folder / name).read_bytes())
    about = json.loads((folder / "run.json").read_text())

    def page_of(change) -> str:
        told = json.loads(json.dumps(about))
        change(told)
        (folder / "run.json").write_text(json.dumps(told))
        _, sections, steering = parts(report(folder))
        assert steering is None and "<td>tau</td>" in sections["parameters"]
        return sections["numbers"]

    assert "its data set, gone" in page_of(lambda a: a["identity"]["data"].update(name="gone"))
    assert "no longer the one" in page_of(lambda a: a["identity"]["data"].update(content_hash="x"))
    assert "parts of your own (gate)" in page_of(lambda a: a["identity"]["model"].update(own={"gate": "Mine"}))
    (folder / "best.safetensors").unlink()
    assert "it has no weights yet" in page_of(lambda a: a.update(status="running", best=None))


# --------------------------------------------------------------------------------------------- a run of the notebooks


def test_a_run_of_notebooks(runs, tmp_path):
    model = str(runs["p-bach"].folder.relative_to(output_dir()))
    path = report(batch(tmp_path / "b", [r.folder for r in runs.values()], model=model))
    text, sections, steering = parts(path)
    check_stands_alone(text)
    assert list(sections) == ["summary", "steering", "00_a", "01_b", "environment"]
    chapter = sections["00_a"]
    assert "<h2>00 · The claim &lt;i&gt;</h2>" in chapter and 'href="00_a.html"' in chapter
    assert "<math" in chapter and "<em>worth</em>" in chapter and "<code>a &lt; b</code>" in chapter
    assert "<td>R@50</td><td>0.1235</td>" in chapter and "seed = 7, what = &lt;b&gt;" in chapter
    assert re.search(r"<td>p-bach</td><td>(<b>)?0\.\d{4}(</b>)? ±0\.\d{4}", chapter), "the table with its intervals"
    assert "onclick" not in text.replace(inline(get_plotlyjs()), "") and "a pandas table" not in chapter
    assert len(figures(path)) == 1 and "<figcaption>Two bars</figcaption>" in chapter
    assert len(steering["users"]) == 6 and "trained by 01_b" in sections["steering"]
    assert "2 of 2 notebooks in 4 s" in text


def test_a_run_that_failed(tmp_path):
    text, sections, _ = parts(report(batch(tmp_path / "b", failed=True)))
    assert "failed in 01_b" in sections["summary"] and "<td>01_b</td><td>failed</td>" in sections["summary"]
    assert "BachError: 1 &lt; 2 &lt;/pre&gt;&lt;script&gt;" in sections["summary"]
    assert "1 of 2 notebooks" in text
    assert "No notebook of this run has handed over a model" in sections["steering"]


def test_a_model_that_is_gone_or_cannot_be_steered(mine, runs, tmp_path):
    _, sections, steering = parts(report(batch(tmp_path / "a", model="runs/nothing")))
    assert "that 01_b has handed over is gone" in sections["steering"] and steering is None
    hard = str(runs["all-multihead"].folder.relative_to(output_dir()))
    _, sections, steering = parts(report(batch(tmp_path / "b", model=hard)))
    assert "there is no π to steer" in sections["steering"] and steering is None


def test_record_hands_a_model_over(runs, tmp_path, monkeypatch):
    folder = runs["p-bach"].folder
    assert record("06", {"a": 1}, model=folder) == {"a": 1}  # outside of `bach run` nothing is written
    monkeypatch.setenv("BACH_RUN_DIR", str(tmp_path))
    record("06", {"a": 1}, model=folder)
    record("07", {"b": 2})
    assert json.loads((tmp_path / "models.json").read_text()) == {"06": f"runs/{folder.name}"}
    assert json.loads((tmp_path / "metrics.json").read_text()) == {"06": {"a": 1}, "07": {"b": 2}}
    with pytest.raises(BachError, match="should be the folder of a training run"):
        record("06", {}, model=tmp_path)


def test_which_run(runs, tmp_path):
    assert find_run("p-bach-report-world") == runs["p-bach"].folder == find_run(runs["p-bach"].folder)
    with pytest.raises(
        BachError, match=r"there is no run p-bahc; in .* there are .*all-multihead-report-world, .*p-bach"
    ):
        find_run("p-bahc")
    with pytest.raises(BachError, match="is not a run: it has neither"):
        report(tmp_path)


# --------------------------------------------------------------------------------------------------------------- parts


def test_texts_of_figures():
    assert marked("π<sub>u</sub> of &lt;script&gt; <script>x</script>") == (
        "π<sub>u</sub> of &lt;script&gt; &lt;script&gt;x&lt;/script&gt;"
    )
    made = figure({"data": [], "layout": {"title": {"text": 'a "b" </script>'}, "width": 5, "height": 300}})
    assert 'aria-label="a &quot;b&quot; &lt;/script&gt;"' in made and made.count("</script>") == 1
    assert '"title"' not in made and 'style="height:264px"' in made


def test_scripts_and_tables_are_made_safe():
    assert inline("a('</script>','</SCRIPT>','<!--')") == r"a('<\/script>','<\/SCRIPT>','<\!--')"
    cleaned = only_a_table('<table class="x"><tr><td onclick="y">1 &lt; 2</td><script>z</script></tr></table><p>ok</p>')
    assert cleaned == '<div class="wide results"><table><tr><td>1 &lt; 2</td>z</tr></table></div><p>ok</p>'
    assert "<h3>train</h3>" in settings({"a": 1, "train": {"x": None, "y": [1, 2], "z": {}}})
    assert "<td>y</td><td>1, 2</td>" in settings({"train": {"y": [1, 2]}})


def test_what_was_liked_later_is_the_held_out_items(mine):
    run = trained(mine, "p-bach", 3, name="later/run", evaluated=False)
    _, _, steering = parts(report(run.folder))
    for one in steering["users"]:
        u = int(re.match(r"user (\d+):", one["name"]).group(1))
        assert one["later"] == mine.sequence(u)[-10:].tolist() and not set(one["later"]) & set(one["history"])


def test_a_neighbour_that_is_damaged_does_not_matter(mine):
    ours = trained(mine, "p-bach", 3, name="pair/ours")
    other = trained(mine, "standard", 1, name="pair/other")
    assert "1 other evaluated run lies" in report(ours.folder).read_text()
    (other.folder / "evaluation-test.parquet").write_bytes(b"half")
    assert "other evaluated" not in report(ours.folder).read_text()


def test_only_what_was_measured_alike_is_compared(mine):
    ours = trained(mine, "p-bach", 3, name="alike/ours")
    other = trained(mine, "standard", 1, name="alike/other", evaluated=False)
    evaluate(other, mine, max_users=50, quiet=True).save(other.folder)
    assert "other evaluated" not in report(ours.folder).read_text()


def test_a_wrong_data_set_is_named(mine, tmp_path):
    ours = trained(mine, "p-bach", 3, name="data/ours")
    with pytest.raises(BachError, match="is not a prepared data set"):
        report(ours.folder, data=tmp_path)


def test_one_cold_user_does_not_share_their_heads(mine):
    cold = mine.strict(0.011)
    assert len(cold.cold) == 1 and not people(build("p-bach", cold, 3, d=8), cold).shared
    assert people(build("p-bach-global", cold, 3, d=8), cold).shared
