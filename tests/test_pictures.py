"""Static twins of figures in notebooks: drawn with one browser, small, kept where a figure did not change."""

import base64

import jupytext
import nbformat
import plotly.graph_objects as go
import pytest
from browser import find_chromium

from bachlib import BachError
from bachlib.experiment import sync as syncing
from bachlib.show import pictures

needs_chrome = pytest.mark.skipif(find_chromium() is None, reason="no Chrome or Chromium: figures cannot be drawn")


@pytest.fixture
def no_chrome(monkeypatch):
    found = "choreographer.browsers.chromium.Chromium.find_browser"
    monkeypatch.setattr(found, classmethod(lambda cls, **_: None))


def notebook(*titles: str) -> nbformat.NotebookNode:
    """A notebook whose cells show a figure each."""
    made = jupytext.reads("\n\n".join(f"# %%\n{title!r}" for title in titles), "py:percent")
    for count, (cell, title) in enumerate(zip(made.cells, titles, strict=True), 1):
        figure = go.Figure(go.Scatter(y=[1, 3, 2])).update_layout(title=title, width=300, height=200)
        data = {pictures.PLOTLY: figure.to_plotly_json() | {"config": {}}}
        cell.execution_count, cell.outputs = count, [nbformat.v4.new_output("display_data", data)]
    return nbformat.reads(nbformat.writes(made), as_version=4)  # as it is read from a file


@needs_chrome
def test_every_figure_gets_a_small_picture():
    made = notebook("one", "two")
    assert pictures.add_twins(made) == 2 and not pictures.without_twin(made)
    one, two = (base64.b64decode(data["image/png"]) for data in pictures.outputs(made))
    assert one.startswith(b"\x89PNG") and one != two and len(one) < 10_000
    assert int.from_bytes(one[16:20]) == 300 and int.from_bytes(one[20:24]) == 200, "as large as the figure"
    assert pictures.add_twins(made) == 0, "nothing is drawn twice"


def test_without_chrome_an_unchanged_figure_keeps_its_picture(no_chrome):
    old, new = notebook("one", "two"), notebook("two", "three")
    for data, png in zip(pictures.outputs(old), ("first", "second"), strict=True):
        data["image/png"] = png
    with pytest.raises(BachError, match="Chrome"):
        pictures.add_twins(new, old)
    assert [data.get("image/png") for data in pictures.outputs(new)] == ["second", None]


@needs_chrome
def test_sync_adds_missing_twins_without_executing(tmp_path, monkeypatch):
    monkeypatch.setattr(syncing, "notebook_folder", lambda: tmp_path)
    monkeypatch.setattr(syncing, "execute", None)  # nothing is executed
    made = notebook("one")
    (tmp_path / "some.ipynb").write_text(nbformat.writes(made))
    jupytext.write(made, tmp_path / "some.py", fmt="py:percent")
    assert syncing.sync(only=["some"]) == []
    assert not pictures.without_twin(nbformat.read(tmp_path / "some.ipynb", as_version=4))
    written = (tmp_path / "some.ipynb").stat().st_mtime_ns
    syncing.sync(only=["some"])
    assert (tmp_path / "some.ipynb").stat().st_mtime_ns == written, "nothing is missing: nothing is written"


def test_sync_without_chrome_says_so(tmp_path, monkeypatch, no_chrome, capsys):
    monkeypatch.setattr(syncing, "notebook_folder", lambda: tmp_path)
    made = notebook("one", "two")
    (tmp_path / "some.ipynb").write_text(nbformat.writes(made))
    jupytext.write(made, tmp_path / "some.py", fmt="py:percent")
    assert syncing.sync(only=["some"]) == []
    assert "some: 2 figures have no static picture" in capsys.readouterr().out
