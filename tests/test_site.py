"""`make site`: every notebook is a page, every link leads somewhere, whole or not at all; and GitHub's workflow."""

import re
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import pytest
import yaml
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from bachlib import BachError
from bachlib.experiment import site as module
from bachlib.experiment.site import site
from bachlib.show.page import PLOTLY, plotly_js

ROOT = Path(__file__).resolve().parent.parent


class Links(HTMLParser):
    """The targets of a page, and the words outside of scripts and code."""

    def __init__(self, text: str):
        super().__init__()
        self.hrefs, self.ids, self.by_relation, self.words, self.inside = [], set(), {}, "", []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.ids |= {given["id"]} if "id" in given else set()
        if "href" in given:
            self.hrefs.append(given["href"])
            self.by_relation[given.get("rel")] = given["href"]
        if tag in ("script", "style", "pre", "code"):
            self.inside.append(tag)

    def handle_endtag(self, tag):
        if self.inside and self.inside[-1] == tag:
            self.inside.pop()

    def handle_data(self, data):
        self.words += "" if self.inside else data


@pytest.fixture(scope="module")
def pages():
    folder = site()
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_every_notebook_is_a_page_that_shares_one_plotly(pages):
    notebooks = sorted((ROOT / "notebooks").glob("*.ipynb"))
    assert {f"{path.stem}.html" for path in notebooks} < pages.keys()
    assert sum(map(len, pages.values())) < 20e6, "too much for some hosts of static pages"
    assert pages.pop("plotly.js") == plotly_js()
    for name, text in pages.items():
        assert "* plotly.js v" not in text and text.count('<script src="plotly.js"></script>') == 1, name
        assert "default-src 'none'; script-src 'self' 'unsafe-inline'" in text and "http-equiv" in text
    for path in notebooks:
        outputs = [o for cell in nbformat.read(path, 4).cells for o in cell.get("outputs", [])]
        drawn = sum(PLOTLY in output.get("data", {}) for output in outputs)
        assert pages[f"{path.stem}.html"].count("<figure>") == drawn, path.stem


def test_every_link_leads_somewhere(pages):
    read = {name: Links(text) for name, text in pages.items() if name.endswith(".html")}
    for name, page in read.items():
        for href in page.hrefs:
            if not href.startswith(("https://", "http://")):
                file, _, anchor = href.partition("#")
                assert file in read or not file, f"{name} leads to {href}"
                assert not anchor or anchor in read[file or name].ids, f"{name} leads to {href}"
        assert "](" not in page.words, f"{name} shows a link as text"
    assert "01_sphere.html" in read["00_tour.html"].hrefs, "a link to a notebook"
    assert "LOG.html" in read["04_train.html"].hrefs and "bachlib.html#limits-in-detail" in read["README.html"].hrefs
    assert "02_elbo.html" in read["03_data.html"].hrefs, "a notebook that is only named"
    names = [f"{path.stem}.html" for path in (ROOT / "notebooks").glob("*.py")]
    ordered = [href for href in read["index.html"].hrefs if href in names]
    walked = [ordered[0]]
    while following := read[walked[-1]].by_relation.get("next"):
        assert read[following].by_relation["prev"] == walked[-1]
        walked.append(following)
    assert walked == ordered and sorted(walked) == sorted(names)
    assert "data:image/png;base64," in pages["README.html"], "its pictures are a part of it"


@pytest.fixture()
def small(tmp_path, monkeypatch):
    """A project of three notebooks, with an output folder of its own."""
    for name in ("00_a", "11_claims", "13_b"):
        cells = [new_markdown_cell(f"# {name[:2]} · Claim {name}"), new_code_cell("1", execution_count=1)]
        nbformat.write(new_notebook(cells=cells), tmp_path / f"{name}.ipynb")
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(module, "notebook_folder", lambda: tmp_path)
    monkeypatch.setattr(module, "notebook_names", lambda: ["00_a", "11_claims", "13_b"])
    monkeypatch.setattr(module, "TEXTS", {})
    monkeypatch.setattr(module, "plotly_js", lambda: "")
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path / "outputs"))
    return tmp_path


def test_the_ledger_of_claims_comes_first(small):
    index = (site() / "index.html").read_text()
    assert re.findall(r'href="(\w+)\.html"><code>', index) == ["11_claims", "00_a", "13_b"]
    assert "<td>Claim 11_claims</td>" in index


def test_a_notebook_that_is_not_executed_leaves_the_old_site(small):
    before = {path.name: path.read_bytes() for path in site().iterdir()}
    nbformat.write(new_notebook(cells=[new_markdown_cell("# 13 · New"), new_code_cell("1")]), small / "13_b.ipynb")
    with pytest.raises(BachError, match=r"13_b\.ipynb is not executed: run `make sync`"):
        site()
    assert {path.name: path.read_bytes() for path in (small / "outputs" / "site").iterdir()} == before
    assert [path.name for path in (small / "outputs").iterdir()] == ["site"], "something half-written is left"


def test_the_workflow_runs_the_two_commands_of_the_readme():
    """And keeps the report and the site. The address of a registry is not in the file."""
    text = (ROOT / ".github" / "workflows" / "test.yml").read_text()
    (job,) = yaml.safe_load(text)["jobs"].values()
    block = re.search(r"## Two commands.*?```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    readme = [line.partition("#")[0].strip() for line in block.splitlines()]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert readme == ["make run", "make test"] == commands[:2]
    assert all(re.search(rf"^{one.split()[1]}:", (ROOT / "Makefile").read_text(), re.M) for one in commands)
    assert job["runs-on"].startswith("ubuntu") and "//" not in text
    with_ = {step["uses"].split("@")[0]: step.get("with", {}) for step in job["steps"] if "uses" in step}
    assert with_["actions/setup-python"]["python-version"] == "3.11", "a number would be 3.1 for 3.10"
    kept = with_["actions/upload-artifact"]["path"].split()
    assert kept == ["outputs/runs/quickstart-*/report.html", "outputs/site"]
