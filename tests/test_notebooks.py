"""The committed notebooks: paired, executed, small, free of machine traces; and in batch they give these numbers."""

import ast
import json
import os
import re
import subprocess
from itertools import groupby
from pathlib import Path

import jupytext
import nbformat
import pytest
from logs import random_events, write_movielens_csv
from records import not_on_record, on_record

from bachlib import BachError
from bachlib.data.planted import GENRES
from bachlib.experiment import notebooks
from bachlib.experiment.notebooks import as_yaml, is_as_written, run, stages, without_lessons
from bachlib.experiment.report import report
from bachlib.experiment.settings import CHAIN, experiment_of, notebook_names, read_experiment
from bachlib.experiment.sync import all_executed, same_cells
from bachlib.files import read_json
from bachlib.show.pictures import pictures, without_twin

FIGURES = {"09_sweep_report": 3, "12_export": 3, "single": 0, "explorer": 2}  # at least; the others have four and more
ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return request.param, nbformat.read(request.param, as_version=4)


def test_make_lab_opens_the_first_notebook_at_the_projects_root():
    """At the root, so that links from a notebook to LOG.md and to reports work."""
    told = subprocess.run(["make", "-n", "lab"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "--ServerApp.root_dir=. " in told
    (first,) = re.findall(r"default_url=/lab/tree/(\S+)", told)
    assert (ROOT / first).exists()


def test_every_notebook_is_a_pair():
    assert [path.stem for path in NOTEBOOKS] == notebook_names()


def test_the_pair_holds_the_same_cells(notebook):
    path, committed = notebook
    assert same_cells(jupytext.read(path.with_suffix(".py")), committed), f"{path.name} is stale: make sync"


def test_executed_from_top_to_bottom(notebook):
    path, committed = notebook
    assert all_executed(committed), f"{path.name}: execution counts are not 1 … n: make sync"
    kinds = [output.output_type for cell in committed.cells if cell.cell_type == "code" for output in cell.outputs]
    assert "error" not in kinds
    assert not [o for c in committed.cells if c.cell_type == "code" for o in c.outputs if o.get("name") == "stderr"]


def test_small_and_without_traces(notebook):
    path, committed = notebook
    text = path.read_text()
    assert len(text) < 1_000_000
    assert "widgets" not in committed.metadata and "papermill" not in committed.metadata
    assert committed.metadata.kernelspec.name == "python3"
    assert not re.search(r"/(?:home|Users|root|work|tmp)/\w+", text), f"{path.name} holds a path of a machine"


def test_every_figure_has_a_static_twin(notebook):
    """GitHub and mail programs do not draw plotly figures; they show the picture beside it."""
    path, committed = notebook
    assert not without_twin(committed), f"{path.name} has figures without a static twin: make sync where Chrome is"


def test_form(notebook):
    """Claim, question, parameters, setup, …, exercises with answers, a record, what comes next."""
    path, committed = notebook
    cells = committed.cells
    chapter = path.stem[:2].isdigit()  # the explorer is an application with a few words around it
    count = sum(1 for kind, run in groupby(cells, lambda c: c.cell_type) for _ in (run if kind == "code" else [0]))
    assert 20 <= count <= 48 if chapter else count <= 20, "neighbouring texts count once: some are left out together"
    assert cells[0].source.startswith(f"# {path.stem[:2] if chapter else path.stem.title()} · ")
    assert "**Question.**" in cells[0].source and "CPU minutes" in cells[0].source
    assert cells[1].metadata.tags == ["parameters"]
    assert re.fullmatch(r"(\w+ = [^\n]+\n?)+", cells[1].source), "parameters are flat literals"
    assert any("## Exercises" in cell.source and "<details>" in cell.source for cell in cells)
    assert any(cell.source.startswith("record(") for cell in cells)
    assert cells[-1].source.startswith("**Next:**")
    assert all(len(cell.source.splitlines()) <= 18 for cell in cells if cell.cell_type == "code")
    assert any("assert " in cell.source for cell in cells if cell.cell_type == "code")


def test_the_committed_outputs_show_the_numbers(notebook):
    """The record a notebook shows is the one the quickstart gives: outputs of older code do not stay behind."""
    path, committed = notebook
    (cell,) = [cell for cell in committed.cells if cell.source.startswith("record(")]
    shown = ast.literal_eval(cell.outputs[0]["data"]["text/plain"])
    assert shown == on_record(path.stem), "make sync with --force"


@pytest.mark.parametrize("name", ["01_sphere", "02_elbo", "04_train"])
def test_the_shown_source_is_the_current_source(name):
    """Each `source_of(…)` of the committed notebook is evaluated again, with the imports of the notebook."""
    committed = nbformat.read(ROOT / "notebooks" / f"{name}.ipynb", as_version=4)
    names: dict = {}
    shown = 0
    for cell in committed.cells:
        if cell.cell_type != "code":
            continue
        lines = ast.parse(cell.source).body
        for line in lines:
            if isinstance(line, ast.ImportFrom):
                exec(ast.unparse(line), names)
        if cell.source.startswith("source_of("):
            assert cell.outputs[0]["data"]["text/markdown"] == eval(ast.unparse(lines[-1]), names).data, "make sync"
            shown += 1
    assert shown >= 2


def summary(figure: dict) -> dict:
    """What a figure is made of: title, axes, kinds and names of its traces.

    Numbers and the words after a head's number are results of a training, and are left out.
    """
    layout = figure["layout"]
    axes = {name: _title(axis) for name, axis in layout.items() if re.fullmatch(r"[xyz]axis\d*", name)}
    return {
        "title": _title(layout), "axes": {name: title for name, title in axes.items() if title},
        "traces": [[trace["type"], trace.get("mode", ""), _words(trace.get("name", ""))] for trace in figure["data"]],
    }  # fmt: skip


def _title(part: dict) -> str:
    title = part.get("title") or {}
    return _words(title if isinstance(title, str) else title.get("text") or "")


def _words(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "#", text.split(" · ")[0])


def test_the_readme_shows_these_figures():
    """Made of the same traces, titles and axes as when the summary was stored; drawn, and named in the README."""
    found = pictures(ROOT / "notebooks")
    assert {name: summary(figure) for name, figure in found.items()} == json.loads(
        (ROOT / "tests" / "figures.json").read_text()
    )
    readme = (ROOT / "README.md").read_text()
    for name in found:
        assert (ROOT / "notebooks" / "pictures" / f"{name}.png").stat().st_size > 10_000, "make figures"
        assert f"(notebooks/pictures/{name}.png)" in readme


def test_numbers_that_differ_are_told():
    """nbval asks this after the last cell of every notebook (see conftest)."""
    known = on_record("01_sphere")
    key, value = next((key, value) for key, value in known.items() if isinstance(value, float))
    assert not not_on_record("01_sphere", known)
    assert not_on_record("01_sphere", known | {key: value * 1.1 + 0.01}) == [
        f"01_sphere: {key} is {value * 1.1 + 0.01}, on record {value}"
    ]
    assert len(not_on_record("01_sphere", {})) == 1 + len(known)


def test_the_quickstart_in_batch(monkeypatch):
    """`make run` with two of its notebooks: one with most of the README's pictures, one training.

    All of them in batch are `make run`; nbval executes all of them and compares their numbers.
    """
    monkeypatch.setenv("BACH_OUTPUT_DIR", os.environ["BACH_TEST_NOTEBOOKS"])
    some = ["06_heads_and_pi", "single"]
    folder = run(read_experiment("quickstart", {"notebooks": some}))
    assert re.fullmatch(r"quickstart-[0-9a-f]{8}", folder.name)
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "done" and list(status["notebooks"]) == some
    metrics = read_json(folder / "metrics.json")
    assert sorted(metrics) == some and not [told for name in some for told in not_on_record(name, metrics[name])]
    redrawn = {name: summary(figure) for name, figure in pictures(folder).items()}
    stored = json.loads((ROOT / "tests" / "figures.json").read_text())
    assert redrawn == {name: stored[name] for name in ("map", "admixture")}, "the README's pictures have changed"
    check_report(folder, some)


def test_the_report_of_all_notebooks(tmp_path):
    """Made of the committed notebooks, as `make run` leaves them in its folder."""
    p = read_experiment("quickstart")
    assert set(p.notebooks) == set(notebook_names())
    folder = tmp_path / "quickstart"
    folder.mkdir()
    for path in NOTEBOOKS:
        (folder / path.name).write_bytes(path.read_bytes())
    (folder / "params.yaml").write_text(as_yaml(p))
    (folder / "metrics.json").write_text((ROOT / "tests" / "quickstart.json").read_text())
    told = {name: {"seconds": 1.0, "values": values, "key": ""} for name, values in stages(p).items()}
    (folder / "status.json").write_text(json.dumps({"status": "done", "notebooks": told}))
    check_report(report(folder).parent, notebook_names())


def check_report(folder: Path, names: list[str]) -> None:
    page = (folder / "report.html").read_text()
    assert len(page) < 15e6 and page.count("* plotly.js v") == 1
    assert 'id="data-steering"' in page, "06_heads_and_pi shows sliders"
    assert 'src="http' not in page
    for name in names:
        chapter = page.split(f'<section id="{name}">')[1].split("</section>")[0]
        assert f'href="#{name}"' in page and chapter.count("<figure>") >= FIGURES.get(name, 4)
        chapter = re.sub(r'<div class="code">.*?</div>|<script.*?</script>', "", chapter, flags=re.S)
        assert "\\mathbf" not in chapter and "$\\" not in chapter, "formulas need a network"


def test_a_run_that_fails_says_where_and_keeps_what_there_is():
    with pytest.raises(BachError, match=r"03_data, cell .*BachError: .*no user has 5000 liked items"):
        run(experiment_of({"name": "broken", "notebooks": ["03_data"], "min_items": 5000}, "broken.yaml"))
    from bachlib.files import output_dir

    (folder,) = output_dir("runs").glob("broken-*")
    status = json.loads((folder / "status.json").read_text())
    assert status["status"] == "failed" and status["failed"] == "03_data"
    report = (folder / "report.html").read_text()
    assert "no user has 5000" in report and re.search(r"<th>03_data</th>\s*<td>failed</td>", report)
    assert (folder / "03_data.ipynb").exists()


# ------------------------------------------------------------------------ texts that are true of one data set only

ABOUT_DATA = [name for name in notebook_names() if name not in ("01_sphere", "02_elbo")]
NO_PROSE = re.compile(  # code, formulas, links, headings, numbers of lists, and references
    r"`[^`]*`|\$\$.*?\$\$|\$[^$]*\$|\]\([^)]*\)|<[^>]*>|^#+ [^\n]*$|^ *\d+\. |\*\*CPU minutes:\*\*[^.]*\d?[^.]*\."
    r"|\b(?:eqs?\.|sections?|Tables?|Figures?|Algorithm) [\d, –andto]*\d",
    re.S | re.M | re.I,
)
SENTENCE = re.compile(r"(?<=[.:?!)])\s+|\n\s*\n|\n(?=[|>])")
NUMBER = re.compile(r"(?<![\w-])[+−-]?\d[\d.,]*%?|\b(?:half|thirds?|quarters?|fifths?|tenths?|hundredths?|sixteen)\b")
SOURCE = re.compile(r"MovieLens|\bpaper")  # the sentence says whose number it is
PROTOCOL = set("0 1 2 5 10 20 50 100 500 1,000 6,000 10,000 50,000 100,000 4 80 16 95% 0.07 half".split())
GIVEN = {  # what a notebook's own code sets, on any data
    "00_tour": {"45", "third"}, "03_data": {"512"}, "05_evaluate": {"0.069", "0.067", "1.5", "4.5%", "64", "third"},
    "06_heads_and_pi": {"third"}, "07_serving": {"64", "200", "300", "100%", "08"},
    "09_sweep_report": {"0.069", "0.067", "1.5", "4.5%", "14.3"},
}  # fmt: skip


def findings(notebook: nbformat.NotebookNode, name: str) -> list[str]:
    """Sentences with a measured number, or an interest of the planted world, that stay for every data set."""
    found = []
    for cell in without_lessons(notebook).cells:
        if cell.cell_type == "markdown":
            for sentence in SENTENCE.split(NO_PROSE.sub(" ", cell.source)):
                measured = {number.rstrip(".,").lstrip("−-+") for number in NUMBER.findall(sentence)}
                measured -= PROTOCOL | GIVEN.get(name, set())
                if (measured and not SOURCE.search(sentence)) or re.search(rf"\b({'|'.join(GENRES)})\b", sentence):
                    found.append(" ".join(sentence.split()))
    return found


@pytest.mark.parametrize("name", ABOUT_DATA)
def test_texts_that_are_not_tagged_hold_for_any_data(name):
    assert not findings(jupytext.read(ROOT / "notebooks" / f"{name}.py"), name), "tag such a text with `lesson`"


def test_findings_are_recognised():
    texts = ["Of user 7's 50 items 32 are liked.", "The overlap is 0.60.", "BACH loses a fifth.", "Most are Romance."]
    texts += ["On the planted world 70–80% of the events stay."]
    made = [nbformat.v4.new_markdown_cell(text) for text in texts]
    assert len(findings(nbformat.v4.new_notebook(cells=made), "05_evaluate")) == len(texts)
    for cell in made:
        cell.metadata["tags"] = ["lesson"]
    assert not findings(nbformat.v4.new_notebook(cells=made), "05_evaluate")
    tagged = {name: jupytext.read(ROOT / "notebooks" / f"{name}.py") for name in CHAIN}
    assert all(len(of.cells) - len(without_lessons(of).cells) >= 4 for of in tagged.values())


def test_a_run_on_other_data_leaves_out_what_is_not_true_of_it(tmp_path, monkeypatch):
    """In the executed notebook and in the report; on the notebook's own data it stays."""
    folder = tmp_path / "notebooks"
    folder.mkdir()
    jupytext.write(jupytext.read(ROOT / "notebooks" / "03_data.py"), folder / "03_data.ipynb")
    monkeypatch.setattr(notebooks, "notebook_folder", lambda: folder)
    for cached in (notebooks._parameters_of, notebooks._cells, notebooks._has_lessons):
        cached.cache_clear()
    lessons = [c.source for c in jupytext.read(ROOT / "notebooks" / "03_data.py").cells
               if "lesson" in c.metadata.get("tags", [])]  # fmt: skip
    log = write_movielens_csv(tmp_path / "mine.csv", random_events(1, n=6_000))
    mine = {"source": "csv", "path": str(log), "columns": {"user": "userId", "item": "movieId", "time": "timestamp"}}
    mine |= {"min_items": 31, "d": 4, "svd_rank": 8}
    for values, stays in ((mine, False), ({"n_users": 500}, True)):
        ran = run(experiment_of({"name": "told", "notebooks": ["03_data"], **values}, "told.yaml"))
        text = "\n".join(cell.source for cell in nbformat.read(ran / "03_data.ipynb", as_version=4).cells)
        assert {lesson in text for lesson in lessons} == {stays} and "## 7 · What the item table may see" in text
        assert ("0.50 in log order" in (ran / "report.html").read_text()) == stays


def test_only_its_own_parameters_are_those_of_the_texts():
    """Another seed, another world or another method has other findings; a parameter that changes nothing has not."""
    for name, more, own in (
        ("quickstart", {}, True), ("quickstart", {"seed": 1}, False), ("quickstart", {"history": "frozen"}, False),
        ("teaching", {}, False), ("ml1m", {}, False), ("quickstart", {"seeds": 3, "n_large": 50_000}, None),
    ):  # fmt: skip
        found = {n: is_as_written(n, values) for n, values in stages(read_experiment(name, more)).items()}
        assert own is None or {found[n] for n in ("04_train", "06_heads_and_pi")} == {own}, (name, more)
        if own is None:  # 05 has seeds, 07 has n_large; 06 has neither
            assert (found["05_evaluate"], found["07_serving"], found["06_heads_and_pi"]) == (False, False, True)
