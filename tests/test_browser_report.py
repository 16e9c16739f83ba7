"""The report in a real browser: quiet, drawn, in light and dark; and its sliders rank as Python does."""

import json
import re

import numpy as np
import pytest
from browser import Visit, chromium
from reports import NASTY, batch, renamed, trained

from bachlib.experiment.report import report
from bachlib.files import output_dir
from bachlib.params import N_TEST
from bachlib.serve import Retriever
from bachlib.show.plots.style import DARK, PAPER
from bachlib.show.steering import rerank, shortlist

K = 15


@pytest.fixture(scope="module")
def browser():
    with chromium() as found:
        yield found


@pytest.fixture(scope="module")
def mine(world):
    """The small world with titles that try to become markup."""
    return renamed(
        world, "nasty", titles=lambda i: f"{i} {NASTY}", genres=lambda g: [f"{x} <b>&amp;</b></script>" for x in g]
    )


@pytest.fixture(scope="module")
def run(mine):
    return trained(mine, "p-bach", 4)


@pytest.fixture(scope="module")
def path(run):
    return report(run.folder)


@pytest.fixture
def visit(browser, path):
    with Visit(browser, path) as visit:
        yield visit
        visit.check_quiet()


def slate(page) -> list[int]:
    return page.eval_on_selector_all(".slate li", "all => all.map(li => Number(li.dataset.item))")


def move(page, weights) -> None:
    """Set sliders as a hand would: a value and an input event each."""
    for r, weight in enumerate(weights):
        page.eval_on_selector(
            f"input[data-head='{r}']",
            "(slider, value) => { slider.value = value; slider.dispatchEvent(new Event('input')) }",
            str(weight),
        )


def history(dataset, page) -> np.ndarray:
    """What the user liked whose slate is shown."""
    u = int(re.match(r"user (\d+):", page.locator("#steer-user option:checked").inner_text()).group(1))
    return dataset.sequence(u)[:-N_TEST]


def test_opens_quietly_and_draws_everything(visit):
    visit.screenshot("report-light")
    visit.scroll_through()
    page = visit.page
    drawn = page.eval_on_selector_all(".plot", "all => all.map(p => p.querySelectorAll('svg.main-svg').length)")
    assert len(drawn) == 11 and min(drawn) > 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    spilt = page.eval_on_selector_all(".plot", "all => all.filter(p => p.scrollWidth > p.clientWidth + 1).length")
    assert spilt == 0, "a figure is cut off at its right"
    assert page.locator("nav a").count() == page.locator("section").count() == 7


def test_only_what_is_near_is_drawn(visit):
    page = visit.page
    page.wait_for_selector(".plot[data-drawn]")
    assert 0 < page.locator(".plot[data-drawn]").count() < 8


def test_a_phone(browser, path):
    with Visit(browser, path, width=390, height=844) as visit:
        visit.scroll_through()
        assert visit.page.evaluate("document.documentElement.scrollWidth") == 390
        visit.screenshot("report-phone", "#steering")
        visit.check_quiet()


def test_titles_stay_titles(visit):
    page = visit.page
    visit.scroll_through()
    page.locator(".row").first.click()
    assert page.evaluate("typeof window.hacked") == "undefined"
    assert page.locator("main img, svg a, [href^=javascript]").count() == 0
    assert NASTY in page.locator(".row .title").first.get_attribute("title")
    assert (
        NASTY[:30] in page.locator(".why p").inner_text()
        and "</script>" in page.locator(".head label").first.inner_text()
    )


def test_the_sliders_rank_as_python_does(visit, run, mine):
    """For any weights the reference of `shortlist`; where the page says proved, the retriever's exact slate."""
    page, retriever, rng, proofs = visit.page, Retriever(run, "exact"), np.random.default_rng(0), set()
    for chosen in (0, 3, 5):
        page.select_option("#steer-user", str(chosen))
        earlier = history(mine, page)
        np.testing.assert_array_equal(slate(page), retriever.retrieve([earlier], K).items[0])
        of = shortlist(retriever, earlier, M=mine.n_items)  # the reference has all items, the page a shortlist
        for weights in [*rng.dirichlet(np.full(4, 0.5), 4).round(2), *np.eye(4)[:2], [0.2, 0, 0.7, 0]]:
            move(page, weights)
            wanted = rerank(of, weights, K)
            said = page.locator("#proof").inner_text()
            proofs.add(said.split(":")[0])
            shown = slate(page)
            if said.startswith("proved"):
                np.testing.assert_array_equal(shown, wanted.items)
                pi = np.array(weights) / np.sum(weights)
                np.testing.assert_array_equal(shown, retriever.retrieve([earlier], K, pi=pi).items[0])
            shares = [text.rstrip("%") for text in page.locator(".head output").all_inner_texts()]
            np.testing.assert_allclose(np.array(shares, float), 100 * np.array(weights) / np.sum(weights), atol=0.51)
    assert "proved" in proofs


def test_the_page_and_the_reference_agree_on_a_short_list(browser, run, mine, path, tmp_path):
    """The same data in both: same slate, same proof, also where the list is too short to prove anything."""
    retriever, text = Retriever(run, "exact"), path.read_text()
    found = re.search(r'(id="data-steering">)(.*?)(</script>)', text, flags=re.S)
    told = json.loads(found.group(2))
    u = int(re.match(r"user (\d+):", told["users"][0]["name"]).group(1))
    of = shortlist(retriever, mine.sequence(u)[:-N_TEST], M=16).rounded(6)
    m = len(of.items)
    told["users"] = [
        told["users"][0] | {
            "items": of.items.tolist(), "sigma": of.log_sigma.tolist(), "floor": of.log_floor.tolist(),
            "margin": of.margin, "cosine": of.cosine.tolist(), "near": [[]] * m, "nearCosine": [[]] * m,
        }
    ]  # fmt: skip
    told["titles"] = {str(i): f"item {i}" for i in range(mine.n_items)}
    changed = tmp_path / "short.html"
    changed.write_text(text[: found.start(2)] + json.dumps(told).replace("<", "\\u003c") + text[found.end(2) :])
    rng, verdicts = np.random.default_rng(1), []
    with Visit(browser, changed) as visit:
        for weights in [*rng.dirichlet(np.full(4, 0.4), 8).round(2), *np.eye(4)]:
            move(visit.page, weights)
            wanted, said = rerank(of, weights, K), visit.page.locator("#proof").inner_text()
            assert slate(visit.page) == wanted.items.tolist()
            assert said.startswith("proved: exactly the best 15 of") == wanted.proved
            assert (f"best of a shortlist of {m} items; an item outside" in said) == (not wanted.enough)
            verdicts.append(wanted.proved)
        visit.check_quiet()
    assert 0 < sum(verdicts) < len(verdicts)


def test_moving_one_slider_changes_the_slate(visit):
    page = visit.page
    before = slate(page)
    page.locator("input[data-head='2']").fill("1")
    after = slate(page)
    assert after[:3] != before[:3] and len(after) == K
    marks = page.locator(".row .moved").all_inner_texts()
    for place, (item, mark) in enumerate(zip(after, marks, strict=True)):
        was = before.index(item) if item in before else None
        wanted = (
            "new" if was is None else f"↑{was - place}" if was > place else f"↓{place - was}" if was < place else ""
        )
        assert mark == wanted
    page.locator(".row").nth(1).click()
    visit.screenshot("report-steered", "#steering")
    page.get_by_role("button", name="back to π_u").click()
    assert slate(page) == before and not any(page.locator(".row .moved").all_inner_texts())


def test_by_keyboard(visit):
    page = visit.page
    page.locator("input[data-head='1']").focus()
    before = page.locator(".head output").nth(1).inner_text()
    for _ in range(30):
        page.keyboard.press("ArrowRight")
    assert page.locator(".head output").nth(1).inner_text() != before
    page.keyboard.press("Tab")
    page.keyboard.press("Space")
    assert page.locator(".head output").nth(1).inner_text() == "0%", "the next stop is the head's forbid"
    page.locator(".row").first.focus()
    page.keyboard.press("Enter")
    assert page.locator(".why").count() == 1 and page.evaluate("document.activeElement.className") == "row"
    assert page.locator("#proof").get_attribute("aria-live") == "polite"
    assert page.evaluate("[...document.querySelectorAll('.head input')].every(i => i.labels.length)")


def test_forbidden_heads_bring_nothing(visit, run, mine):
    page, retriever = visit.page, Retriever(run, "exact")
    earlier = history(mine, page)
    pi = retriever.retrieve([earlier], K).pi[0]
    for r in np.argsort(-pi)[:2]:
        page.locator(f"input[data-forbid='{r}']").check()
        pi[r] = 0
    assert page.locator("#proof").inner_text().startswith("proved")
    np.testing.assert_array_equal(slate(page), retriever.retrieve([earlier], K, pi=pi / pi.sum()).items[0])
    for r in range(4):
        page.locator(f"input[data-forbid='{r}']").check()
    assert "No head has any weight" in page.locator("#proof").inner_text()
    assert len(slate(page)) == K, "the last slate stays"


def test_why_this_item(visit, run, mine):
    page, retriever = visit.page, Retriever(run, "exact")
    earlier = history(mine, page)
    exact = retriever.retrieve([earlier], K)
    page.locator(".row").nth(4).click()
    rows = [row.split("\t") for row in page.locator(".why tbody tr").all_inner_texts()]
    query = retriever.users.query(retriever.catalogue, [earlier])[0]
    item = exact.items[0, 4]
    vector = retriever.catalogue.vectors[item]
    for name, pi, kappa, cosine, share in rows:
        r = int(name.split(" · ")[0])
        assert float(pi.rstrip("%")) == pytest.approx(100 * exact.pi[0, r], abs=0.51)
        assert float(kappa) == pytest.approx(query.kappa[0, r], abs=0.06)
        assert float(cosine) == pytest.approx(float(vector @ query.heads[0, r]), abs=0.006)
        assert float(share.rstrip("%")) == pytest.approx(100 * exact.head_share[0, 4, r], abs=0.51)
    cosines = retriever.catalogue.vectors[np.unique(earlier)] @ vector
    nearest = np.unique(earlier)[np.argsort(-cosines)[:3]]
    told = page.locator(".why p").inner_text()
    places = [told.index(f"\u2068{i} </script>") for i in nearest]
    assert places == sorted(places)
    assert f"({cosines.max():.2f})" in told
    assert page.locator(".row").nth(4).get_attribute("aria-expanded") == "true"


def test_light_and_dark(browser, path):
    paper = "() => document.querySelector('.plot .main-svg').style.background"
    body = "() => getComputedStyle(document.body).backgroundColor"
    bar = "() => getComputedStyle(document.querySelector('.chip')).backgroundColor"
    with Visit(browser, path, scheme="dark") as visit:
        page = visit.page
        page.wait_for_selector(".plot[data-drawn='dark']")
        assert page.evaluate(paper) == page.evaluate(body) == rgb(DARK[PAPER])
        assert page.evaluate(bar) == rgb(DARK["#0072B2"])
        visit.screenshot("report-dark")
        page.locator("#theme").click()
        page.wait_for_selector(".plot[data-drawn='light']")
        assert page.evaluate(paper) == page.evaluate(body) == "rgb(255, 255, 255)"
        assert page.evaluate(bar) == rgb("#0072B2")
        visit.scroll_through()
        assert page.locator(".plot[data-drawn='dark']").count() == 0
        visit.check_quiet()


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[n : n + 2], 16)) for n in (1, 3, 5))})"


def test_a_run_of_notebooks(browser, run, tmp_path):
    folder = batch(
        tmp_path / "b", model=str(run.folder.relative_to(output_dir())), title="<script>window.hacked=1</script> & co"
    )
    with Visit(browser, report(folder)) as visit:
        visit.scroll_through()
        page = visit.page
        assert page.locator("figcaption").inner_text() == "<script>window.hacked=1</script> & co"
        before = slate(page)
        page.locator("input[data-head='2']").fill("1")
        assert slate(page) != before
        assert page.evaluate("typeof window.hacked") == "undefined"
        visit.check_quiet()
