"""The paper's table from evaluations: rows, bold, marks, and what it refuses; the paper's own numbers beside it."""

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch

from bachlib import BachError
from bachlib.evaluate import Evaluation, evaluate, paper
from bachlib.evaluate.statistics import holm, paired_bootstrap, sign_flips
from bachlib.evaluate.tables import Table, main_table, matched, table
from bachlib.files import read_json
from bachlib.model.methods import METHODS, build
from bachlib.train import fit
from bachlib.train.run import Run

PROTOCOL = {
    "data": "toy", "content_hash": "a1", "split": "test", "users": {"n": 300, "which": "all", "hash": "h"},
    "exclude": "earlier", "ties": "by item number", "candidates": "full catalogue",
}  # fmt: skip


def made(method: str, lift: float = 0.0, seed: int = 0, k: int = 8, **about) -> Evaluation:
    """An evaluation by hand: users differ, methods by `lift`."""
    users = np.random.default_rng(0).random(300)
    noise = np.random.default_rng([seed, len(method)]).normal(0, 0.02, 300)
    per_user = pd.DataFrame({"R@10": users * (1 + lift) + noise, "AUPRC": users / 3 * (1 + lift)})
    told = {"method": method, "k": k, "seed": seed, "model": {"k": k, "seed": seed, "d": 64}, **about}
    return Evaluation(per_user, dict(per_user.mean()), np.ones((300, 10), int), PROTOCOL, told)


METRICS = ["R@10", "AUPRC"]


def test_rows_seeds_and_order_of_the_paper():
    found = table([made(m, seed=s) for m in ("v-bach", "mostpop", "all-multihead") for s in (0, 1, 2)], metrics=METRICS)
    assert list(found.means.index) == ["mostpop", "all-multihead", "v-bach"] and list(found.means) == METRICS
    assert (
        set(found.numbers["seeds"]) == {3}
        and "seeds per method: 3." in found.caption
        and "Single seed" not in found.caption
    )
    assert "Single seed" in table([made("all-multihead")], metrics=METRICS).caption


def test_numbers_are_those_of_the_statistics():
    ours, base = ([made(m, lift, s) for s in (0, 1)] for m, lift in (("p-bach", 0.05), ("all-multihead", 0.0)))
    found = table([*base, *ours], metrics=METRICS).numbers.set_index(["method", "metric"])
    a, b = (np.stack([e.per_user["R@10"] for e in group]) for group in (ours, base))
    line, alone = found.loc[("p-bach", "R@10")], paired_bootstrap(a, b)
    assert line["mean"] == pytest.approx(a.mean()) and line["gain"] == pytest.approx(alone.gain.value)
    assert (line["gain_low"], line["gain_high"]) == pytest.approx((alone.gain.low, alone.gain.high), abs=2e-3)
    assert line["p"] == pytest.approx(sign_flips((a.mean(0) - b.mean(0))[None])[0], abs=1e-3)
    others = found.loc["p-bach"]
    np.testing.assert_allclose(others["p_holm"], holm(others["p"]))
    assert found.loc["all-multihead"]["p"].isna().all()


def test_best_is_bold_and_difference_is_marked():
    found = table(
        [made("all-multihead"), made("p-bach", 0.1), made("mind", -0.2), made("sasrec", 1e-6)], metrics=METRICS
    )
    cells = found.cells()
    assert cells.loc["p-bach", "AUPRC"].startswith("**") and cells.loc["p-bach", "AUPRC"].endswith("▲")
    assert cells.loc["mind", "AUPRC"].endswith("▼") and cells.loc["all-multihead", "AUPRC"][-1].isdigit()
    assert sum(text.startswith("**") for text in cells["AUPRC"]) == 1
    assert "+10.0%" in found.gains.loc["p-bach", "AUPRC"] and "all-multihead" not in found.gains.index
    assert "<b>" in found._repr_html_() and "±" in found._repr_html_()
    assert found.markdown().splitlines()[1].count("---") == 3 and "\\textbf{" in found.latex()
    assert "▲" not in found.latex() and "±" not in found.latex()


def rowed(**values) -> Table:
    """A table of one method against the baseline, with numbers as given."""
    usual = {"metric": "R@10", "k": 8, "seeds": 3, "users": 9, "mean": 0.2, "low": 0.1, "high": 0.3, "gain": 0.1}
    usual |= {"gain_low": 0.05, "gain_high": 0.2, "difference": 0.1, "p": 0.001}
    rows = [{**usual, "method": name, "p": p} for name, p in (("base", np.nan), ("mind", 0.9))]
    rows.append({**usual, "method": "p-bach", **values})
    return Table(pd.DataFrame(rows), "base", PROTOCOL)


def test_a_mark_needs_the_corrected_p_and_the_interval():
    assert rowed().cells().loc["p-bach", "R@10"].endswith("▲")
    assert rowed(difference=-0.1, gain_low=-0.2, gain_high=-0.05).cells().loc["p-bach", "R@10"].endswith("▼")
    for values in ({"p": 0.03}, {"gain_low": -0.01}, {"gain_high": np.nan, "gain_low": np.nan}):
        assert rowed(**values).cells().loc["p-bach", "R@10"][-1].isdigit(), values


def test_a_best_that_ends_in_a_half_is_bold():
    cells = rowed(mean=0.26285).cells()  # the others have 0.2
    assert cells.iloc[:, 0].str.startswith("**").tolist() == [name == "p-bach" for name in cells.index]


def test_users_without_a_value_are_left_out_for_all():
    ours, base = made("p-bach", 0.1), made("all-multihead")
    ours.per_user.loc[:9, "R@10"] = np.nan
    found = table([base, ours], metrics=METRICS)
    assert "R@10 290, AUPRC 300" in found.caption and found.means.notna().all().all()
    assert found.means.loc["all-multihead", "R@10"] == pytest.approx(base.per_user["R@10"][10:].mean())


def test_a_k_that_differs_is_shown_and_tells_rows_apart():
    found = table([made("all-multihead", k=16), made("p-bach", k=32), made("standard", k=1)], metrics=METRICS)
    assert list(found.cells().index) == ["standard", "all-multihead, k = 16", "p-bach, k = 32"]
    assert (
        list(found.means.index) == ["standard", "all-multihead", "p-bach"] and found.gains.index[1] == "p-bach, k = 32"
    )
    both = [made("all-multihead", k=8), made("all-multihead", k=16)]
    with pytest.raises(BachError, match=r"one of the rows: all-multihead \(k = 8\), all-multihead \(k = 16\)"):
        table(both, metrics=METRICS)
    assert len(table(both, "all-multihead (k = 8)", METRICS).means) == 2


def test_trainings_of_another_length_are_another_row():
    short, long = (made("p-bach", seed=s, train={"seed": s, "epochs": e}) for s, e in ((0, 1), (1, 4)))
    stopped = made("p-bach", seed=2, train={"seed": 2, "epochs": 4}, status="stopped")
    found = table([made("all-multihead"), short, long, stopped], metrics=METRICS)
    assert [name for name in found.means.index if "p-bach" in name] == [
        "p-bach (epochs = 1, status = finished)",
        "p-bach (epochs = 4, status = finished)",
        "p-bach (epochs = 4, status = stopped)",
    ]
    assert (
        "learning\\_rate"
        in table(
            [made("all-multihead"), *(made("p-bach", train={"learning_rate": r}) for r in (1, 2))], metrics=METRICS
        ).latex()
    )


def test_what_else_differs_becomes_part_of_the_name():
    wider = made("p-bach")
    wider.about["model"]["d"] = 128
    found = table([made("all-multihead"), made("p-bach"), wider, made("p-bach", k=16)], metrics=METRICS)
    assert list(found.means.index)[1:] == [
        "p-bach (k = 8, d = 64)",
        "p-bach (k = 8, d = 128)",
        "p-bach (k = 16, d = 64)",
    ]
    trained = made("p-bach", train={"seed": 0, "learning_rate": 0.1}), made("p-bach", train={"learning_rate": 0.2})
    found = table([made("all-multihead"), *trained], metrics=METRICS)
    assert "p-bach (learning_rate = 0.2)" in found.means.index


def test_the_best_k_is_chosen_on_validation():
    """Also where another k is better on the test items: that would be peeking."""
    runs = [made("p-bach", 0.3, k=8, valid_auprc=0.1), made("p-bach", 0.1, k=16, valid_auprc=0.2)]
    found = table([made("all-multihead"), *runs], metrics=METRICS, best_over_k=True)
    assert found.means.loc["p-bach", "AUPRC"] == runs[1].means["AUPRC"]
    assert "k of each method: the best validation AUPRC" in found.caption
    assert "validation AUPRC" not in table([made("all-multihead")], metrics=METRICS).caption
    with pytest.raises(BachError, match="validation AUPRC chooses"):
        table([made("all-multihead"), made("p-bach", k=8), made("p-bach", k=16)], metrics=METRICS, best_over_k=True)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"data": "other", "content_hash": "b2"}, "content_hash is 'a1' for all-multihead and 'b2' for p-bach"),
        ({"split": "valid"}, "split is 'test' for all-multihead and 'valid' for p-bach"),
        ({"exclude": "nothing"}, "exclude is 'earlier' for all-multihead and 'nothing' for p-bach"),
        (
            {"users": {"n": 10, "which": "cold", "hash": "x"}},
            "users.n is 300 .* users.which is 'all' for all-multihead",
        ),
        ({"candidates": "100 sampled"}, "candidates is 'full catalogue' for all-multihead and '100 sampled'"),
    ],
)
def test_what_was_measured_otherwise_is_refused(change, said):
    other = dataclasses.replace(made("p-bach"), protocol=PROTOCOL | change)
    with pytest.raises(BachError, match=said):
        table([made("all-multihead"), other], metrics=METRICS)


def test_a_data_set_in_another_folder_is_the_same():
    other = dataclasses.replace(made("p-bach"), protocol=PROTOCOL | {"data": "copy of toy"})
    assert len(table([made("all-multihead"), other], metrics=METRICS).means) == 2


@pytest.mark.parametrize(
    "given, keywords, said",
    [
        ([], {}, "nothing to compare"),
        (made("p-bach"), {}, "needs a list"),
        ([made("p-bach")], {}, "baseline='all-multihead' should be one of the rows: p-bach"),
        ([made("p-bach"), made("p-bach")], {"baseline": "p-bach"}, "occurs twice"),
        ([made("p-bach")], {"baseline": "p-bach", "metrics": ["R@7"]}, "has no R@7; it has R@10, AUPRC"),
    ],
)
def test_other_refusals(given, keywords, said):
    with pytest.raises(BachError, match=said):
        table(given, **{"metrics": METRICS, **keywords})


def test_from_run_folders(world, tmp_path):
    for name in ("all-multihead", "mostpop"):
        evaluate(build(name, world, 3, d=16), world, quiet=True).save(tmp_path / name)
    found = table([tmp_path / "all-multihead", str(tmp_path / "mostpop")])
    assert list(found.means) == paper.MAIN and found.protocol["data"] == "small"
    with pytest.raises(BachError, match="has not been evaluated"):
        table([tmp_path])


# ------------------------------------------------------------------------------------------------ the paper's numbers


def wide(name: str) -> pd.DataFrame:
    return paper.printed(name, by_k=False).pivot(index="method", columns="metric", values="paper")


def test_the_papers_tables_are_whole():
    for name in ("movielens-20m", "taobao", "netflix"):
        both = wide(name)
        main = both.drop(index=["p-bach-global", "v-bach-global"])
        assert len(main) == 10 and set(main.index) <= set(METHODS)
        assert main.loc["mostpop", "R@100"] == paper.tables()["datasets"][name]["mostpop R@100"]
        assert (main["R@10"] < main["R@50"]).all() and (main["R@50"] < main["R@100"]).all()
        assert (main.loc[["p-bach", "v-bach"]].max() == main.max()).all()  # as the paper says
        assert both.loc["p-bach-global", "R@100"] < main.loc["p-bach", "R@100"]
    for name in ("movielens-20m", "taobao"):
        by_k = paper.printed(name, by_k=True).query("metric == 'AUPRC'").pivot(index="k", columns="method")["paper"]
        assert by_k["all-multihead"].max() == wide(name).loc["all-multihead", "AUPRC"]
        matched = paper.tables()["head-matched"][name]
        assert len(matched) == 3
        for k, row in matched.items():  # printed gains, up to the rounding of three digits
            low, high = (row["p-bach"][1] + s * 5e-4 for s in (-1, 1))
            base = row["all-multihead"][1]
            told = paper.gain(name, "p-bach", "all-multihead", "AUPRC", k)[0]
            assert low / (base + 5e-4) - 1 <= told <= high / (base - 5e-4) - 1, (name, k)
    assert paper.kappa_range("p-bach") == (20, 30) and paper.kappa_range("mind") is None
    routing = paper.printed("netflix", by_k=True).query("method == 'all-multihead' and metric == 'R@100'")
    assert len(routing) == 3 and (routing["paper"] > 0.33).all()
    assert paper.printed("mars", by_k=False).empty


def test_paper_beside_ours():
    ours = [dataclasses.replace(made(name), protocol=PROTOCOL) for name in ("p-bach", "mine")]
    numbers = table(ours, "p-bach", METRICS).numbers
    numbers.loc[numbers["method"] == "p-bach", ["mean", "low", "high"]] = [0.08, 0.07, 0.09]
    found = paper.beside(numbers, "movielens-20m").set_index("metric")
    assert set(found["method"]) == {"p-bach"} and found.loc["R@10", "paper"] == 0.075
    assert found.loc["R@10", "difference"] == pytest.approx(0.005) and found.loc["R@10", "within"]
    told = paper.gains("movielens-20m").loc["R@10"]
    assert told["gain"] == pytest.approx(0.075 / 0.071 - 1) and told["low"] < told["gain"] < told["high"]
    assert paper.beside(numbers[numbers["method"] == "mine"], "taobao").empty


def test_the_papers_gains_are_those_it_prints():
    """Not those of its rounded AUPRC: 0.091 / 0.080 is +13.8%, and 0.023 / 0.023 nothing."""
    printed = {("movielens-20m", 8): 0.045, ("movielens-20m", 16): 0.030, ("movielens-20m", 32): 0.036}
    printed |= {("taobao", 8): 0.032, ("taobao", 16): 0.009, ("taobao", 32): 0.050}
    for (name, k), value in printed.items():
        found = paper.gain(name, "p-bach", "all-multihead", "AUPRC", k)
        assert found == pytest.approx((value, value - 5e-4, value + 5e-4)), (name, k)
    assert paper.gain("netflix", "v-bach", "all-multihead", "AUPRC", 32)[0] == 0.127
    assert paper.gain("netflix", "v-bach", "p-bach", "AUPRC", 32) == pytest.approx((0.03, 0.025, 0.035))
    assert paper.gains("netflix", "v-bach").loc["AUPRC", "gain"] == 0.127, "the best of both have k = 32"
    assert paper.gains("movielens-20m").loc["AUPRC", "gain"] == pytest.approx(0.036, abs=1e-9)
    for name, of in paper.tables()["best k"].items():  # their rows in Tables 2 and 5 are those of this k
        by_k = paper.printed(name, by_k=True).query("metric == 'AUPRC'").set_index(["method", "k"])["paper"]
        for method, k in of.items():
            assert by_k[method, k] == wide(name).loc[method, "AUPRC"], (name, method)
    low, high = paper.gains("taobao").loc["AUPRC", ["low", "high"]]  # best k unknown, both 0.023
    assert (low, high) == pytest.approx((0.0225 / 0.0235 - 1, 0.0235 / 0.0225 - 1)) and low < 0.009 < 0.032 < high
    assert np.isnan(paper.gain("mars", "p-bach", "mind", "R@10")).all()


def test_both_layouts_are_one_class():
    runs = [made(m, lift, s, k) for m, lift in (("all-multihead", 0), ("p-bach", 0.1)) for s in (0, 1) for k in (4, 8)]
    found = matched(runs, "k", metrics=METRICS)
    assert isinstance(found, Table) and found.axis == "k" and list(found.cells().index) == [4, 8]
    assert found.means.loc[(8, "p-bach"), "AUPRC"] == pytest.approx(made("p-bach", 0.1).means["AUPRC"])
    rows = found.latex().splitlines()
    assert rows[0].startswith("k & all-multihead & p-bach") and rows[1] == "\\midrule" and "\\%" in rows[2]
    assert "sure" in found.numbers and "sure" in table(runs, "p-bach (k = 4)", METRICS).numbers


# ------------------------------------------------------------------------------------ a row is its method and its parts


class Mean(torch.nn.Module):
    """An encoder of one's own."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(16, width), torch.nn.Linear(width, 3 * 16))

    def forward(self, tokens, history):
        return self.layers(tokens.mean(1)).view(-1, 3, 16)


class Flat(torch.nn.Module):
    """A gate of one's own."""

    def forward(self, tokens, history):
        return tokens.new_zeros(len(tokens), 3)


def looked(world, method, seed=0, **parts) -> Evaluation:
    return evaluate(build(method, world, 3, d=16, ff=16, item_width=16, seed=seed, **parts), world, quiet=True)


def rows(*found: Evaluation, **more) -> dict[str, int]:
    """Name of a row → its seeds."""
    numbers = table(found, None, ["AUPRC"], **more).numbers
    return dict(zip(numbers["method"], numbers["seeds"], strict=True))


def test_models_with_other_parts_are_not_seeds_of_one(world):
    sa, mind = (METHODS["p-bach"]._replace(encoder=name) for name in ("comirec-sa", "mind"))
    stock = looked(world, "p-bach", 1)
    assert rows(looked(world, sa, 0), looked(world, mind, 1), stock) == {
        "p-bach": 1, "p-bach (encoder = comirec-sa)": 1, "p-bach (encoder = mind)": 1,
    }  # fmt: skip
    assert rows(looked(world, "p-bach", 0, encoder=Mean()), stock) == {"p-bach": 1, "p-bach (encoder = Mean)": 1}
    same = looked(world, "p-bach", 1, encoder=Mean())
    assert rows(same, stock) == {"p-bach": 1, "p-bach (encoder = Mean)": 1}, "the same seed is no error"
    assert rows(looked(world, "p-bach", 0, encoder=Mean()), same) == {"p-bach (encoder = Mean)": 2}, "two seeds of one"
    assert rows(looked(world, METHODS["p-bach"], 0), stock) == {"p-bach": 2}, "the same row, given as a row"
    assert looked(world, sa, gate=Flat()).label == "p-bach (encoder = comirec-sa, gate = Flat)"
    for layout in (matched, main_table):
        made = layout([looked(world, sa, 0), looked(world, mind, 1), stock], baseline="p-bach")
        assert made.numbers["method"].nunique() == 3 and made.numbers["seeds"].max() == 1 and made.baseline == "p-bach"


def test_a_class_with_another_inside_is_another_row(world):
    """The same name, other layers or other code."""
    found = [looked(world, "p-bach", seed, encoder=Mean(width)) for seed, width in ((0, 16), (1, 8))]
    names = rows(*found)
    assert set(names.values()) == {1} and len(names) == 2
    assert all(name.startswith("p-bach (encoder = Mean, code of the encoder = ") for name in names)


def test_a_model_can_be_named(world, tmp_path):
    gru = looked(world, "p-bach", 0, encoder=Mean(), name="gru")
    assert rows(looked(world, "p-bach"), gru) == {"p-bach": 1, "gru": 1} and gru.label == "gru"
    other = looked(world, "p-bach", 1, encoder=Mean(8), name="gru")
    assert set(rows(gru, other).values()) == {1}, "one name for two models: two rows"
    gru.save(tmp_path)
    assert Evaluation.load(tmp_path).label == "gru"
    run = fit(build("p-bach", world, 3, d=16, name="mean of all"), world, {"epochs": 1, "n_negatives": 64}, quiet=True)
    assert (
        run.folder.name.startswith("mean-of-all-small-k3") and run.about["identity"]["model"]["name"] == "mean of all"
    )
    assert Run.load(run.folder, world).model.config["name"] == "mean of all"
    assert "name" not in build("p-bach", world, 3, d=16).config, "the names of older runs stay"
    for wrong in ("", " ", "p-bach", "P-BACH", "own", "a\nb", "gru (2)", "a & b", 3):
        with pytest.raises(BachError, match="name of your own"):
            build("p-bach", world, 3, d=16, name=wrong)


def test_an_evaluation_of_an_earlier_version_takes_its_parts_from_the_run(world, tmp_path):
    model = build("p-bach", world, 3, d=16, encoder=Mean())
    evaluate(model, world, quiet=True).save(tmp_path)
    path = tmp_path / "evaluation-test.json"
    told = read_json(path)
    for key in ("row", "own"):
        told["about"].pop(key)
    path.write_text(json.dumps(told))
    assert Evaluation.load(tmp_path).label == "p-bach", "nothing is known of the parts"
    (tmp_path / "run.json").write_text(json.dumps({"identity": {"model": model.config}}))
    assert Evaluation.load(tmp_path).label == "p-bach (encoder = Mean)"


def test_without_all_multihead_the_first_row_is_the_baseline():
    found = table([made("p-bach", 0.1), made("mind")], None, METRICS)
    assert found.baseline == "mind" and "+" in found.gains.loc["p-bach", "AUPRC"] and "below mind" in found.caption
    assert table([made("p-bach"), made("all-multihead")], None, METRICS).baseline == "all-multihead"
    two = [made("all-multihead", k=8), made("all-multihead", k=16), made("mind")]
    assert table(two, None, METRICS).baseline == "all-multihead (k = 8)"
