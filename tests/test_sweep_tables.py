"""The tables and the report of a sweep: who meets whom in a row, what the paper says beside it, what is missing."""

import shutil

import numpy as np
import pandas as pd
import pytest

from bachlib import BachError
from bachlib.evaluate import Evaluation, paper
from bachlib.evaluate.evaluation import accuracy
from bachlib.evaluate.statistics import paired_bootstrap, sign_flips
from bachlib.evaluate.tables import main_table, matched
from bachlib.evaluate.traits import SPREAD
from bachlib.experiment import estimate, published
from bachlib.experiment.notebooks import STATUS
from bachlib.experiment.report import report_sweep
from bachlib.experiment.stages import data_name
from bachlib.experiment.sweep import is_sweep, read_sweep, record_of, results, run_here, state
from bachlib.files import only_one, output_dir, read_json, write_json, write_text
from bachlib.show import plots

PROTOCOL = {
    "data": "toy", "content_hash": "a1", "split": "test", "users": {"n": 200, "which": "all", "hash": "h"},
    "exclude": "earlier", "ties": "by item number", "candidates": "full catalogue",
}  # fmt: skip


def made(method: str, k: int = 8, seed: int = 0, lift: float = 0.0, auprc: float | None = None, **more) -> Evaluation:
    """An evaluation by hand: users differ, methods and seeds a little."""
    users = np.random.default_rng(0).random(200)
    noise = np.random.default_rng([seed, k, len(method)]).normal(0, 0.02, (2, 200))
    values = {name: users / (1 + n) * (1 + lift) + noise[n] for n, name in enumerate(("R@100", "AUPRC"))}
    values |= {name: values["R@100"] / 2 for name in ("R@10", "R@50", "NDCG@100")}
    told = {"method": method, "k": k, "seed": seed, "model": {"k": k, "seed": seed, **more}, "valid_auprc": auprc}
    return Evaluation(pd.DataFrame(values), dict(pd.DataFrame(values).mean()), np.ones((200, 10), int), PROTOCOL, told)


def grid(*methods: str, ks=(8, 16), seeds=(0, 1), **lifts: float) -> list[Evaluation]:
    return [made(m, k, s, lifts.get(m.replace("-", "_"), 0.0)) for m in methods for k in ks for s in seeds]


def test_the_numbers_of_a_row_are_those_by_hand():
    found = matched(grid("p-bach", "all-multihead", p_bach=0.1), "k")
    rows = found.numbers.set_index(["at", "method", "metric"])
    for k in (8, 16):
        a, b = (
            np.stack([made(m, k, s, lift).per_user["AUPRC"] for s in (0, 1)])
            for m, lift in (("p-bach", 0.1), ("all-multihead", 0.0))
        )
        row, by_hand = rows.loc[(k, "p-bach", "AUPRC")], paired_bootstrap(a, b)
        assert row["mean"] == pytest.approx(a.mean()) and row["gain"] == pytest.approx(a.mean() / b.mean() - 1)
        assert (row["gain_low"], row["gain_high"]) == pytest.approx(by_hand.gain[1:], abs=2e-3)
        assert row["p"] == pytest.approx(sign_flips((a.mean(0) - b.mean(0))[None])[0], abs=1e-3) and row["seeds"] == 2
        half = (row["high"] - row["low"]) / 2
        assert f"{a.mean():.4f}** ±{half:.4f}" in found.cells().loc[k, "p-bach"]
    # Holm over all four tests of the table, not over the two of a row: p · (m, m − 1, …), and never falling
    p = rows["p"].dropna().sort_values()
    np.testing.assert_allclose(rows["p_holm"][p.index], np.maximum.accumulate(p * [4, 3, 2, 1]).clip(upper=1))


def test_rows_bold_and_marks():
    found = matched(grid("all-multihead", "p-bach", "pos-multihead", p_bach=0.1, pos_multihead=-0.2), "k")
    cells = found.cells()
    assert list(cells.index) == [8, 16] and cells.index.name == "k"
    assert list(cells)[:3] == ["pos-multihead", "all-multihead", "p-bach"], "in the order of the paper"
    assert cells["p-bach"].str.count(r"\*\*").tolist() == [4, 4], "two bold numbers in a cell"
    assert not cells["all-multihead"].str.contains("*", regex=False).any()
    assert found.gains["p-bach"].str.match(r"\+\d+\.\d% \[.*\]\*$").all()
    assert found.gains["pos-multihead"].str.startswith("-").all() and "all-multihead" not in found.gains
    lines = found.markdown().splitlines()
    assert len(lines) == 4 and {line.count(" | ") for line in lines} == {5}
    html = found._repr_html_()
    assert html.count("<tr>") == 3 and html.count("<b>") == 4 and "p &lt; 0.05" in html
    assert "seeds per cell: 2." in found.caption and "Single seed" not in found.caption


def test_a_single_seed_is_named_in_the_caption():
    one = matched(grid("all-multihead", "p-bach", seeds=(0,)), "k")
    assert "seeds per cell: 1." in one.caption and "Single seed: the intervals do not include" in one.caption
    uneven = matched([*grid("all-multihead"), *grid("p-bach", seeds=(0,))], "k")
    assert "seeds per cell: 1 or 2." in uneven.caption and "Single seed" in uneven.caption


def test_a_method_without_the_axis_is_in_every_row():
    found = matched([*grid("all-multihead"), made("standard", 1), made("standard", 1, 1)], "k")
    rows = found.numbers.query("method == 'standard' and metric == 'AUPRC'")
    assert list(rows["at"]) == [8, 16] and rows["shared"].all() and rows["mean"].nunique() == 1
    assert rows["gain"].nunique() == 2, "against the baseline of the same row"
    assert "Without k, the same in each row: standard." in found.caption


def test_a_gap_is_a_dash_and_no_gain_is_made_up():
    found = matched([*grid("all-multihead", ks=(8,)), *grid("p-bach")], "k")
    assert found.cells().loc[16, "all-multihead"] == "–" and found.gains.loc[16, "p-bach"] == "–"
    assert "%" in found.gains.loc[8, "p-bach"] and not found.numbers.query("at == 16")["sure"].any()
    alone = matched(grid("p-bach"), "k")
    assert alone.baseline is None and alone.gains.empty and "no gains" in alone.caption
    with pytest.raises(BachError, match="nothing to compare"):
        matched([], "k")


def test_another_axis_and_what_else_differs():
    some = [made(m, 8, s, tau=t, d=d) for m in ("all-multihead", "p-bach") for s in (0, 1) for t in (0.1, 0.05)
            for d in ((8, 16) if m == "p-bach" else (8,))]  # fmt: skip
    found = matched(some, "tau")
    assert list(found.cells().index) == [0.05, 0.1]
    assert list(found.numbers["method"].unique()) == ["all-multihead", "p-bach (d = 8)", "p-bach (d = 16)"]
    none = matched([made("p-bach", kernel=None), made("p-bach", kernel="von-mises-fisher")], "kernel")
    assert list(none.cells().index) == ["none", "von-mises-fisher"], "None is a value, not a method without the axis"


def test_the_main_layout_takes_k_by_validation_and_any_baseline():
    runs = [made("p-bach", 8, auprc=0.1, lift=0.3), made("p-bach", 16, auprc=0.2), made("standard", 1)]
    found = main_table(runs)
    assert found.baseline == "standard" and found.means.loc["p-bach", "AUPRC"] == runs[1].means["AUPRC"]
    assert main_table([*runs, made("all-multihead")]).baseline == "all-multihead"


# --------------------------------------------------------------------------------------------------- the paper


def test_what_the_paper_prints():
    ml = paper.printed("movielens-20m", by_k=True).set_index(["method", "k", "metric"])["paper"]
    assert ml["p-bach", 8, "R@100"] == 0.347 and ml["pos-multihead", 32, "AUPRC"] == 0.047
    assert ml["p-bach-global", 128, "AUPRC"] == 0.053 == ml["v-bach-global", 128, "AUPRC"], "it names no kernel"
    assert ml.index.is_unique
    netflix = paper.printed("netflix", by_k=True).set_index(["method", "k", "metric"])["paper"]
    assert netflix["v-bach", 32, "AUPRC"] == 0.091 and ("v-bach", 32, "R@100") not in netflix.index
    assert len(paper.printed("netflix", by_k=False)) == 10 * 5 + 4 and paper.printed("planted", by_k=True).empty


def test_paper_and_ours_side_by_side():
    rows = {"method": ["all-multihead", "p-bach", "p-bach"], "k": [8, 8, 4], "metric": "AUPRC"}
    rows |= {"mean": [0.065, 0.07, 0.9], "low": [0.06, 0.0686, 0.8], "high": [0.07, 0.08, 1.0]}
    rows |= {"gain": [0.0, 0.077, 0.5], "gain_low": [0.0, 0.01, 0.4], "gain_high": [0.0, 0.1, 0.6]}
    both = paper.beside(pd.DataFrame(rows), "movielens-20m", by_k=True).set_index("method")
    assert set(both.index) == {"all-multihead", "p-bach"}, "the paper has no k = 4"
    assert both["difference"]["p-bach"] == pytest.approx(0.002) and not both["within"]["p-bach"]
    assert both["within"]["all-multihead"]
    gains = paper.gains_beside(pd.DataFrame(rows), "all-multihead", by_k=True).set_index("k")
    assert gains.loc[8, "paper, movielens-20m"] == "+4.5%", "as printed, not 0.068 / 0.065"
    assert gains.loc[8, "gain"] == 0.077 and pd.isna(gains.loc[4, "paper, taobao"])
    assert gains.loc[8, "paper, netflix"] == "+2.5 to +5.0%", "0.083 / 0.080, each ±0.0005; it prints no gain"
    best = paper.gains_beside(pd.DataFrame(rows), "all-multihead", by_k=False).set_index("k")
    assert best.loc[4, "paper, netflix"] == "+8.7 to +11.3%"


def test_the_data_beside_table_1():
    sizes = {"movielens-20m": {"users": 36_700, "items": 20_720, "windows": 3_957_331}}
    sizes |= {"taobao": {"users": 900, "items": 4_000, "windows": 30_000}, "mine": {}}
    table = paper.data_table(sizes, {"taobao": [made("mostpop"), made("p-bach")]})
    assert list(table["which data"]) == [
        "the same size as the paper's", "not the paper's data: the sizes differ", "not in the paper",
    ]  # fmt: skip
    assert table.loc["taobao", ("mostpop R@100", "ours")] == pytest.approx(made("mostpop").means["R@100"])
    assert table.loc["taobao", ("mostpop R@100", "paper")] == 0.025 and np.isnan(table.loc["mine", ("users", "ours")])


RUNS = pd.DataFrame(
    {"data": "toy", "method": ["p-bach", "p-bach", "v-bach-global", "standard"], "k": [4, 8, 8, 1],
     "seed": [0, 0, 1, 1], "AUPRC": [0.1, 0.2, 0.3, 0.6], "κ min": [3.0, 2.0, 5.0, np.nan],
     "κ max": [25.0, 31.0, 15.0, np.nan]}
)  # fmt: skip


def test_kappa_of_the_runs():
    bounds = paper.kappa_bounds(RUNS).set_index("method")
    assert bounds.loc["p-bach"].tolist() == ["toy", 2, 2.0, 25.0, 31.0, 20.0, 30.0]
    assert bounds.loc["v-bach-global", ["low", "high"]].tolist() == [15, 15] and "standard" not in bounds.index
    assert np.isnan(bounds.loc["v-bach-global", "paper_low"])
    assert paper.kappa_bounds(RUNS[["data", "method"]]).empty
    figure = plots.kappa_bounds(bounds.reset_index())
    assert figure.layout.title.text == "Largest κ of a run: p-bach 25–31 (paper 20–30), v-bach-global 15"


def test_figures_of_a_sweep_say_what_is_in_them():
    found = matched(grid("all-multihead", "p-bach", p_bach=0.1), "k")
    figure = plots.by_axis(found.numbers, "k", "AUPRC", found.baseline, paper.printed("taobao", by_k=True))
    assert figure.layout.title.text.startswith("AUPRC is highest for p-bach at every k<br>2 of 2 gains")
    ours, theirs = figure.data[2:]
    assert list(ours.y) == found.numbers.query("method == 'p-bach' and metric == 'AUPRC'")["mean"].tolist()
    assert list(theirs.y) == [0.023, 0.023] and theirs.marker.symbol == "diamond-open"
    lines = plots.parallel_coordinates(RUNS[["data", "method", "k", "seed", "AUPRC", "κ max"]], "AUPRC",
                                       ["data", "method", "k", "seed"])  # fmt: skip
    axes = lines.data[0].dimensions
    assert [axis.label for axis in axes] == ["method", "k", "seed", "AUPRC"], "no key with one value, no gaps"
    assert list(axes[1].ticktext) == ["1", "4", "8"] and list(np.round(axes[1].values)) == [1, 2, 2, 0]
    assert lines.layout.title.text.startswith("AUPRC depends most on k, least on seed<br>from 0.1 (4) to 0.6 (1) on")


# --------------------------------------------------------------------------------------------- a sweep in its folders


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """Of six points two are trained, one cannot be, and three are missing."""
    path = tmp_path_factory.mktemp("sweeps") / "partly.yaml"
    path.write_text(
        "name: partly\nbase: [quickstart]\nlayout: matched\naxis: learning_rate\n"
        "set: {n_users: 60, n_items: 500, n_interests: 4, epochs: 1, batch_size: 512, n_negatives: 16, k: 2}\n"
        "grid: {learning_rate: [0.01, 1.0e+30], method: [all-multihead, p-bach, mostpop]}\n"
    )
    points = read_sweep(path).points
    for point in points:
        if (point.p.method, point.p.learning_rate) == ("p-bach", 1e30):
            with pytest.raises(BachError, match="diverged"):
                run_here(point)
            (point.folder / "log.txt").write_text("as bach sweep leaves it")
        elif point.p.learning_rate == 0.01 and point.p.method != "mostpop":
            run_here(point)
    return path


def test_results_say_what_is_done_failed_and_missing(sweep):
    points = read_sweep(sweep).points
    table, found = results(points)
    told = {(row.method, row.learning_rate): row.status for row in table.itertuples()}
    assert told == {
        ("all-multihead", 0.01): "done", ("p-bach", 0.01): "done", ("mostpop", 0.01): "missing",
        ("all-multihead", 1e30): "missing", ("p-bach", 1e30): "failed", ("mostpop", 1e30): "missing",
    }  # fmt: skip
    failed = table[table["status"] == "failed"].iloc[0]
    assert "training diverged" in failed["error"] and failed["log"] == f"runs/{failed.name}/log.txt"
    assert set(found) == set(table.index[table["status"] == "done"]) and table["error"].notna().sum() == 1
    done = next(point for point in points if point.name in found and point.p.method == "p-bach")
    assert record_of(done)["AUPRC"] == pytest.approx(found[done.name].means["AUPRC"], abs=1e-6)
    assert table.loc[done.name, "κ max"] == record_of(done)["κ max"] and table.loc[done.name, "seconds"] > 0


def test_a_training_that_was_not_evaluated_has_no_results(sweep):
    point = read_sweep(sweep).points[0]
    kept = point.folder / "evaluation-test.json"
    text = kept.read_text()
    kept.unlink()
    assert state(point).status == results([point])[0]["status"].item() == "missing"
    kept.write_text("{")
    assert results([point])[0]["status"].item() == "failed" and "damaged" in results([point])[0]["error"].item()
    kept.write_text(text)
    assert results([point])[0]["status"].item() == "done"


def test_results_of_other_data_or_other_users_do_not_count(sweep):
    point = read_sweep(sweep).points[0]
    other_users = point._replace(p=point.p.model_copy(update={"max_eval": 5}))
    assert state(point).status == "done" and state(other_users).status == "missing"
    meta = output_dir("data", data_name(point.p), "meta.json")
    text = meta.read_text()
    write_json(meta, read_json(meta) | {"content_hash": "0" * 64})
    assert state(point).status == "missing", "the log has changed since"
    meta.write_text(text)


def test_a_published_record_counts_as_done_on_another_machine(sweep, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "project_root", lambda: tmp_path)
    points = read_sweep(sweep).points
    table, found = results(points)
    folders = published.publish(read_sweep(sweep))
    assert folders[0].parent == tmp_path / "outputs" / "published" / "partly"
    assert {folder.name for folder in folders} == set(found) and len(found) == 2
    assert sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) < 2 * 20_000
    assert published.publish(read_sweep(sweep)) == [], "they are there already"
    assert 0 < published.traits_of(points[0])[SPREAD] < 1.2
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path / "another"))
    there, read = results(points)
    assert (there["status"] == "done").sum() == 2 and set(read) == set(found)
    for name, evaluation in read.items():
        of_ranks = [*accuracy(evaluation.ranks, evaluation.per_user.index)]
        pd.testing.assert_frame_equal(evaluation.per_user[of_ranks], found[name].per_user[of_ranks])
        kept, whole = evaluation.per_user, found[name].per_user
        pd.testing.assert_frame_equal(kept, whole[[*kept]], rtol=2e-3, atol=1e-6)
        assert {"diversity@10", "interests@10"} <= {*kept} and evaluation.about["cpu_s_per_epoch"] > 0
        assert ("nats over one π" in kept) == (evaluation.method == "p-bach"), "only a mixture has a π"
        assert (evaluation.ranks == found[name].ranks).all() and evaluation.protocol == found[name].protocol
        assert there.loc[name, "AUPRC"] == table.loc[name, "AUPRC"]
        assert there.loc[name, "seconds"] == table.loc[name, "seconds"]
    point = next(point for point in points if point.name in found)
    for more, status in (({"max_eval": 5}, "missing"), ({"patience": 3}, "missing"), ({}, "done")):
        assert state(point._replace(p=point.p.model_copy(update=more))).status == status, more
    write_text(output_dir("data", data_name(point.p), "meta.json"), '{"content_hash": "of other data"}')
    assert state(point).status == "missing"
    with pytest.raises(BachError, match="no point of partly is done here: bach sweep partly runs them"):
        published.publish(read_sweep(sweep))


def test_a_training_of_a_notebook_is_no_obstacle_to_an_estimate(sweep):
    points = read_sweep(sweep).points
    assert all(10 <= estimate.seconds(point.p) < 60 for point in points)
    one, every = (points[0].p.model_copy(update={"method": "mind", "targets": targets}) for targets in ("one", "all"))
    assert estimate.seconds(every) - 10 == pytest.approx(1.4 * (estimate.seconds(one) - 10), rel=0.3), (
        "the clock's noise"
    )


def test_a_run_that_was_killed_is_not_running(sweep):
    point = read_sweep(sweep).points[-1]
    write_text(point.folder / "status.json", '{"status": "running"}')
    assert state(point).status == "stopped"
    with only_one(point.folder / "status.json"):
        assert state(point).status == "running"
    shutil.rmtree(point.folder)


def test_what_is_a_sweep(sweep):
    assert is_sweep(sweep) and is_sweep("demo") and not is_sweep("params/quickstart.yaml") and not is_sweep("nothing")
    point = read_sweep(sweep).points[0]
    assert not is_sweep(point.name) and not is_sweep(point.folder)
    output_dir("runs", "demo").mkdir(parents=True)
    assert not is_sweep("demo"), "a run of that name comes first"
    output_dir("runs", "demo").rmdir()


def test_the_report_lists_what_failed_and_trains_nothing(sweep):
    before = {path.name for path in output_dir("runs").iterdir()}
    path = report_sweep(sweep)
    page = path.read_text()
    assert path.parent.parent == output_dir("sweeps") and path.name == "report.html" and is_sweep(path.parent)
    assert "training diverged" in page and "/log.txt" in page and "1 failed, 3 missing" in page
    assert "Single seed: the intervals do not include" in page and "2 of 6 have results" in page
    assert "<h1" in page and "partly" in page.split("<h1")[1][:200] and "Exercises" not in page, "a report is no lesson"
    assert page.count("* plotly.js v") == 1 and 'src="' not in page.split("<main>")[1] and "<title>partly" in page
    assert {path.name for path in output_dir("runs").iterdir()} == before
    noted = read_json(path.parent / "metrics.json")["09_sweep_report"]
    assert (noted["points"], noted["done"], noted["failed"], noted["missing"]) == (6, 2, 1, 3)
    assert read_json(read_sweep(sweep).points[0].folder / STATUS)["status"] == "done"
