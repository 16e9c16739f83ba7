"""What stands in a title, a genre or an id is shown as text: in figures, in tables, and in a browser."""

import html
import json
import re
import unicodedata

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from browser import Visit, chromium
from nbformat.v4 import new_code_cell, new_notebook, new_output
from reports import as_data, renamed

from bachlib.data.dataset import as_text
from bachlib.show import plots
from bachlib.show.page import page
from bachlib.show.plots.style import label

OVERRIDE = "\u202e"  # turns all text behind it round
NASTY = [
    "<script>window.hacked=1</script>",
    "<img src=x onerror=window.hacked=1>",
    "<b>bold</b>",
    "<a href='javascript:window.hacked=1'>go</a>",
    "\"a\" 'b' `c` &lt; &#36;",
    "{{c}} ${d} {% e %}",
    "%{x} %{customdata}",
    "$x^2$",
    "$$\\kappa$$ and $\\href{javascript:x}{y}$",
    "😀 👩‍👩‍👧",
    "שלום עולם",
    "مرحبا 12",
    f"a{OVERRIDE}b\u2067c\x1b[31m\0d",
]
SHOWN = [as_text(text) for text in NASTY]
K = len(NASTY)
PI = np.random.default_rng(0).dirichlet(np.ones(K), K)
FIGURES = {
    "timeline": lambda: plots.timeline(1, np.arange(4 * K) % K, np.array(NASTY, object), np.arange(K), NASTY),
    "bars": lambda: plots.bars(dict(zip(NASTY, PI[0], strict=True)), "title", "axis"),
    "proportions": lambda: plots.proportions(PI[:3], NASTY, "title"),
    "map": lambda: plots.map_of_items(PI[:, :2], np.arange(K), NASTY, PI[:, :2], NASTY, PI[0], (),
                                      dict(zip(NASTY, PI[:, :2], strict=True)), numbers=range(K)),
    "lift": lambda: plots.head_lift(PI, NASTY, NASTY),
    "kappa": lambda: plots.kappa_and_tightness(PI[0], PI[1], np.arange(K), NASTY, 0.1),
    "recovered": lambda: plots.recovered_interests(np.eye(K), NASTY, NASTY, PI[0]),
    "ternary": lambda: [plots.pi_ternary(np.full((1, 3), 1 / 3), NASTY[n:][:3], ["u"]) for n in range(0, K - 2, 3)],
    "admixture": lambda: plots.pi_admixture(PI, np.zeros(K, int), NASTY),
    "strip": lambda: plots.history_strip(PI, NASTY, NASTY),
    "slate": lambda: plots.slate_by_head(PI, PI[0] / PI[0].max(), NASTY, NASTY),
    "before and after": lambda: plots.pi_before_after(PI[0], PI[1], NASTY),
    "steered": lambda: plots.pi_slopes(PI[0], PI[1], NASTY, "what"),
    "slates": lambda: plots.slate_slopes(np.arange(K), np.arange(K)[::-1], ({i: 0 for i in range(K)},) * 2,
                                         dict(enumerate(NASTY)), "what"),
    "interests": lambda: plots.heads_and_interests(PI, PI[0], NASTY, PI[1], "title"),
}  # fmt: skip


def texts(part) -> list[str]:
    """All texts of a figure."""
    if isinstance(part, dict):
        return [text for key, value in part.items() if key not in ("template", "bdata") for text in texts(value)]
    return [text for value in part for text in texts(value)] if isinstance(part, list) else [str(part)]


def plain(text: str) -> bool:
    """Nothing that plotly would read as markup, as a template or as a formula, and nothing that turns text round."""
    without = re.sub(r"</?(b|i|br|sub|sup|extra)>|%\{(x|y|z|a|b|c|text|customdata)(:[^}]*)?\}", "", text)
    return not re.search("[<>{$]|[\u202a-\u202e\u2066\u2067]|\0|\x1b", without)


def drawn(name: str) -> list[go.Figure]:
    figures = FIGURES[name]()
    return figures if isinstance(figures, list) else [figures]


@pytest.mark.parametrize("name", FIGURES)
def test_figures(name):
    found = [text for figure in drawn(name) for text in texts(json.loads(figure.to_json()))]
    assert not [text for text in found if not plain(text)]
    assert not [text for text in found if "%{x} %" in text or "<b>bold" in text]


def test_a_label_reads_as_it_was_written():
    for text in SHOWN:
        assert html.unescape(label(text, 99)).strip("\u2068\u2069") == " ".join(text.split())
    assert as_text(NASTY[-1]) == "abc[31md" and as_text("👩‍👩‍👧") == "👩‍👩‍👧" and as_text(7) == "7"
    apart = [unicodedata.bidirectional(label(text)[0]) == "FSI" for text in SHOWN]
    assert sum(apart) == 2, "only what is written from right to left is set apart"


def test_tables_of_notebooks():
    shown = pd.DataFrame({text: [text] for text in NASTY}, index=[NASTY[0]])._repr_html_()
    assert "tex2jax_ignore" in shown and "<script" not in shown and "<img" not in shown


def test_in_a_browser(tmp_path):
    """Every figure on a page: no script ran, no tag was made, and the words are read as they were written."""
    every = [figure for name in FIGURES for figure in drawn(name)]
    labels = go.Figure(go.Bar(y=list(range(K)), x=[1] * K, orientation="h", text=[label(t, 99) for t in SHOWN]))
    hover = [f"{label(t, 99)}: %{{x}}<extra></extra>" for t in SHOWN]
    labels.update_traces(hovertemplate=hover).update_layout(title="labels", height=600)
    cells = [new_code_cell("", outputs=[new_output("display_data", as_data(one))]) for one in [labels, *every]]
    path = tmp_path / "figures.html"
    path.write_text(page(new_notebook(cells=cells), "Figures"), encoding="utf-8")
    with chromium() as browser, Visit(browser, path) as visit:
        visit.screenshot("shown-as-text")
        bars = visit.page.locator(".plot").first
        visit.page.wait_for_selector(".plot[data-drawn] .bartext")
        read = [text.strip("\u2068\u2069") for text in bars.locator(".bartext").all_text_contents()]
        assert read == [" ".join(text.split()) for text in SHOWN]
        bars.locator(".bars .point").nth(6).hover(force=True, position={"x": 200, "y": 5})
        assert "%{x} %{customdata}: 1" in bars.locator(".hovertext").first.text_content()
        visit.scroll_through()
        assert visit.page.evaluate("typeof window.hacked") == "undefined"
        assert visit.page.locator("main img, main script:not([type]), svg a, [href^=javascript]").count() == 0
        visit.check_quiet()


def test_a_data_set_hides_what_nobody_sees(world):
    made = renamed(world, "shown", titles=lambda i: NASTY[i % K], genres=lambda of: [NASTY[-1]])
    assert made.titles[:K] == SHOWN and made.genres.names == ["abc[31md"]
