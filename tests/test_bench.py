"""The standing measurement: verdicts, records, growth and what is worked out from it. Timings are not judged here."""

import json
import re
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bachlib import BachError
from bachlib.bench import goals, growth, measure, peers
from bachlib.bench.costs import costs, seconds_at
from bachlib.bench.measure import both_clocks, judged, machine, newest, save, told, verdicts
from bachlib.model.methods import build
from bachlib.show import plots

ROOT = Path(__file__).resolve().parent.parent


def test_a_verdict_says_by_how_much():
    row = judged("a", {"ratio": 1.5, "share": 0.0, "rate": 80.0}, {"ratio": 2.0, "share": 0.0}, {"rate": 100.0})
    assert not row["met"]
    assert [(one["what"], one["met"], round(one["off"], 6)) for one in verdicts(row)] == [
        ("ratio", True, -0.25), ("share", True, 0.0), ("rate", False, 0.2),
    ]  # fmt: skip
    assert told(row) == (
        "ratio 1.5 (goal ≤ 2): met by 25%; share 0 (goal ≤ 0): met exactly; rate 80 (goal ≥ 100): ✗ MISSED by 20%"
    )
    assert judged("a", {"rate": 100.0}, {}, {"rate": 100.0})["met"]


def test_works_take_turns_and_the_median_counts():
    order, pauses = [], {"a": iter([0.5, 0.0, 0.2, 0.02] * 2), "b": iter([0.0] * 8)}

    def work(name):
        order.append(name)
        time.sleep(next(pauses[name]))

    found = both_clocks({"a": lambda: work("a"), "b": lambda: work("b")}, 3)
    assert "".join(order) == "ab" * 8
    assert found["a"]["cpu_s"] < 0.01, "sleeping takes no CPU"
    assert 0.02 <= found["a"]["wall_s"] < 0.1, "the median of the rounds after the first"


def test_records_are_merged_by_name_and_machine(tmp_path, monkeypatch):
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path))
    save("goals", [{"bench": "a", "name": "x", "value": 1}, {"bench": "b", "name": "x", "value": 2}])
    path = save("goals", [{"bench": "a", "name": "x", "value": 3}])
    record = json.loads(path.read_text())
    assert [(row["bench"], row["value"]) for row in record["results"]] == [("a", 3), ("b", 2)]
    assert record["machine"]["cores"] == measure.cores() and "torch" in record["machine"]["versions"]
    assert set(record["threads"]) == {"cpu_s", "wall_s"} and record["date"] and record["results"][0]["date"]
    assert newest("goals")["results"] == record["results"] and not newest("goals")["published"]
    other = {**machine(), "cpu": "another"}
    monkeypatch.setattr(measure, "machine", lambda: other)
    assert len(json.loads(save("goals", [{"bench": "c", "name": "y"}]).read_text())["results"]) == 1
    monkeypatch.undo()
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path))
    assert newest("goals").get("published", True), "another machine's record is not this one's"


def test_what_is_selected():
    whole = [(part, name) for part, name, _ in goals.selected()]
    quick = [(part, name) for part, name, _ in goals.selected(quick=True)]
    assert ("prepare", "movielens-20m") in whole and ("prepare", "taobao") not in whole
    assert ("prepare", "taobao") in [(part, name) for part, name, _ in goals.selected("prepare")]
    assert not [name for part, name in whole if part == "growth"] and len(quick) < len(whole)
    assert {part for part, _ in quick} == set(goals.BENCHES) - {"growth"}, "every part has a quick measurement"
    assert all(re.search("20,000", name) for part, name in quick if part == "serve")
    assert any("1,000,000" in name for _, name in whole)


def test_run_prints_every_goal_and_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path))

    def impossible():
        raise BachError("only Linux")

    works = [("a", "one", lambda: judged("one", {"ratio": 3.0}, {"ratio": 2.0})), ("a", "two", impossible)]
    path = goals.run(iter(works), "quick")
    out = capsys.readouterr().out
    assert "a, one: ratio 3 (goal ≤ 2): ✗ MISSED by 50%" in out and "not measured: only Linux" in out
    assert "0 of 1 goals are met" in out and json.loads(path.read_text())["results"][0]["bench"] == "a"


# --------------------------------------------------------------------------------------------------------- growth


def power_law() -> pd.DataFrame:
    """Every work grows as a power of its axis: with exponent 0.5 along k, 1 along the rest."""
    rows = [
        {"what": what, "axis": axis, "value": value, "count": 4, "mb": 3.0 * value,
         "cpu_s": 4 * 1e-6 * value ** (0.5 if axis == "k" else 1)}
        for axis, works in growth.SWEEPS.items() for what, values in works.items() for value in values
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_slopes_are_the_exponents():
    found = growth.slopes(power_law()).set_index(["what", "axis"])
    assert found.loc[("train", "k"), "seconds"] == pytest.approx(0.5)
    assert found.loc[("exact", "items"), ["seconds", "seconds at the end", "memory"]].tolist() == pytest.approx(
        [1, 1, 1]
    )
    with_start = power_law().assign(cpu_s=lambda rows: rows["cpu_s"] + 1)
    flat = growth.slopes(with_start).set_index(["what", "axis"]).loc[("exact", "items")]
    assert 0 < flat["seconds"] < flat["seconds at the end"] < 1, "what does not grow counts least at the end"


def test_costs_follow_the_measured_growth():
    """A job of 10⁹ windows at k = 8, each 10⁻⁶·√8 s; a catalogue 500 times as large; 80% of linear speed-up."""
    made = costs(power_law()).set_index(["part", "engine"])
    step = 1e-6 * 8**0.5 * (1e7 / 20_000)
    epoch = made.loc["one epoch"].iloc[0]
    assert epoch["core hours"] == pytest.approx(1e9 * step / 0.8 / 3600) and epoch["GB"] == pytest.approx(2.56)
    scan, sharded = made.loc[("requests", "exact scan")], made.loc[("requests", "two-step, 10 shards")]
    assert scan["ms"] == pytest.approx(1000 * 1e-6 * 1e7) and scan["cores"] == pytest.approx(10_000 * 10 / 0.5)
    assert sharded["ms"] == pytest.approx(scan["ms"]), "ten shards of a tenth, with an exponent of 1"
    assert made.loc["the graph"].iloc[0]["core hours"] == pytest.approx(10 * 1e-6 * 1e6 / 3600), "ten of a tenth"
    assert made.loc["heads of the users"].iloc[0]["GB"] == pytest.approx(1e8 * 8 * 66 * 4 / 1e9)
    assert costs(power_law(), k=32).iloc[0]["core hours"] == pytest.approx(2 * epoch["core hours"])
    assert made["assumes"].str.len().min() > 20
    assert seconds_at(power_law(), "exact", "items", 63_245.55) == pytest.approx(0.06324555, rel=1e-6), "between two"
    bent = pd.DataFrame({"what": "a", "axis": "b", "value": [1, 10, 100], "count": 1, "cpu_s": [1.0, 1.0, 10.0]})
    assert seconds_at(bent, "a", "b", 1000) == pytest.approx(100), "beyond the end its slope counts"
    assert seconds_at(bent, "a", "b", 0.1) == pytest.approx(1)
    falling = bent.assign(cpu_s=[10.0, 2.0, 1.0])
    assert seconds_at(falling, "a", "b", 1000) == pytest.approx(1), "no extrapolation below what was measured"
    with pytest.raises(BachError, match="'train' with 'users' was not measured"):
        seconds_at(power_law(), "train", "users", 5)


def test_growth_measures_what_it_says(monkeypatch):
    """The sizes reach the model; seconds are positive, and the made-up sequences have no repeats."""
    monkeypatch.setattr(growth, "USUAL", {"k": 2, "candidates": 64, "history": 10, "items": 500, "users": 20})
    monkeypatch.setattr(growth, "LARGE", 600)
    monkeypatch.setattr(growth, "BATCH", 16)
    monkeypatch.setattr(growth, "SWEEPS", {"k": {"train": (1, 3)}, "items": {"exact": (300, 600)}})
    monkeypatch.setattr(measure, "cores", lambda: 1)
    model, dataset = growth._model(3, 10, 500, 20)
    assert model.encode(np.stack([dataset.sequence(0)[:10]])).heads.shape == (1, 3, 64)
    assert all(len(set(dataset.sequence(u).tolist())) == 40 for u in range(20))
    rows = [
        row for axis in growth.SWEEPS for what in growth.SWEEPS[axis] for row in growth._seconds(what, axis, 1)["rows"]
    ]
    assert [(row["name"], row["count"]) for row in rows] == [
        ("train, k = 1", 16), ("train, k = 3", 16), ("exact, items = 300", 32), ("exact, items = 600", 32),
    ]  # fmt: skip
    assert all(row["cpu_s"] > 0 and row["wall_s"] > 0 for row in rows)


# ---------------------------------------------------------------------------------------------------------- peers


def test_the_peers_environment_has_our_versions():
    """What both environments have is the same version, so that ours is measured as it is used; torch comes first."""
    read = {
        name: dict(line.split("==") for line in (ROOT / name).read_text().splitlines() if not line.startswith("#"))
        for name in ("requirements-peers.txt", "requirements.lock")
    }
    theirs, ours = read.values()
    assert {name: theirs[name] for name in theirs.keys() & ours.keys()} == {
        name: ours[name] for name in theirs.keys() & ours.keys()
    }
    assert {"replay-rec", "recbole", "torch-rechub", "faiss-cpu"} <= theirs.keys() and "torch" not in theirs
    recipe = (ROOT / "Makefile").read_text().split("$(PEERS_READY):")[1].split("bench-peers:")[0]
    first, *rest = re.findall(r"pip install (.*)", recipe)
    assert "^torch==" in first and all("--no-deps" in line for line in rest)


def test_rows_beside_peers_say_what_differs(world, monkeypatch):
    """A peer's contract: loss and score on ids that count from its first; every row but ours says what is unlike."""

    class Ours(peers.Peer):
        first = 0

        def loss(self, *batch):
            return self.model.loss(*batch)

        def score(self, history):
            return self.model.score(history)

    monkeypatch.setattr(measure, "cores", lambda: 1)
    monkeypatch.setattr(peers, "BATCH", 32)
    monkeypatch.setattr(peers, "OURS", {"standard, one vector": ("standard", 1)})
    small = {"d": 16, "ff": 16}
    monkeypatch.setattr(peers, "build", lambda name, dataset, k: build(name, dataset, k, **small))
    same = {"Peer": Ours(build("standard", world, 1, **small), "nothing differs", "the loss")}
    (ours, peer) = peers.training(world, same, 1)
    assert ours["ours"] and not peer["ours"] and peer["unlike"] == "nothing differs; the loss" and not ours["unlike"]
    assert ours["unit"] == "windows" and ours["per_core_second"] > 0
    rates = {"p-bach, k = 8": 300.0, "p-bach, k = 32": 100.0, "A": 80.0, "B": 100.0}
    row = {"what": "train", "vectors": 1}
    fast = [row | {"name": name, "ours": name[0] == "p", "per_core_second": rate} for name, rate in rates.items()]
    eight, many = peers.against_the_fastest(fast)
    assert (
        eight["times"] == 3 and eight["met"] and many["times"] == 1 and not many["met"] and "against B" in many["name"]
    )


def test_evaluation_beside_peers_leaves_out_what_was_seen(world):
    """The loop of all peers, with metrics of our own: the same ranks as `evaluate` gives."""
    from bachlib.evaluate import evaluate

    model = build("standard", world, 1, d=16, ff=16)
    peer = peers.Peer(model, "")
    peer.first, peer.score = 0, model.score
    users = np.arange(20)
    import torch

    told = [torch.from_numpy(part(users, "test")) for part in (world.history, world.targets)]
    seen = [torch.from_numpy(world.sequence(u)[:-10].astype(np.int64)) for u in users]
    found: list[float] = []

    def way():
        def add(scores, targets):
            found.extend((scores.topk(10).indices[..., None] == targets[:, None]).any(1).double().mean(-1).tolist())

        return add, lambda: np.mean(found)

    got = peers._evaluated(peer, *told, seen, way)
    assert got == pytest.approx(evaluate(model, world, quiet=True).per_user.loc[users, "R@10"].mean(), abs=1e-9)


# -------------------------------------------------------------------------------------------------------- published


@pytest.mark.parametrize("name", ["goals", "peers", "growth"])
def test_a_published_record_is_whole_and_names_no_machine(name):
    path = ROOT / "outputs" / "published" / "bench" / f"{name}.json"
    record = json.loads(path.read_text())
    assert {"date", "machine", "threads", "results"} <= record.keys() and record["results"]
    assert set(record["machine"]) == {"cpu", "cores", "system", "versions"}
    assert not re.search(r"/(?:home|Users|root|work|tmp)/\w+", path.read_text())
    for row in record["results"]:
        assert row["date"] and row["name"] and row["bench"]
        assert name != "peers" or row.get("ours", True) or row["unlike"], f"{row['name']} says nothing of what differs"


# --------------------------------------------------------------------------------------------------------- figures


def test_figures_of_speed():
    goal = [judged("one", {"ratio": 3.0}, {"ratio": 2.0}) | {"bench": "a"}, judged("two", {"ms": 1.0}, {}, {"ms": 0.5})]
    figure = plots.goal_bars([*goal, judged("three", {"differ": 0}, {"differ": 0})])
    assert list(figure.data[0].x) == [1.5, 0.5] and "2 of 3 goals are met" in figure.layout.title.text
    rows = [{"name": name, "what": "train", "unit": "windows", "ours": name == "us", "vectors": 1, "unlike": "x",
             "per_core_second": rate} for name, rate in {"us": 300.0, "them": 100.0}.items()]  # fmt: skip
    figure = plots.peer_bars(rows, "train")
    assert figure.layout.title.text == "us: 300 · them: 100" and figure.layout.xaxis.title.text.startswith("windows")
    assert list(figure.data[0].x) == [100.0, 300.0]
    curves = plots.growth_curves(power_law(), growth.slopes(power_law()), "items")
    assert "exact (b = 1.00)" in [trace.name for trace in curves.data] and curves.layout.xaxis.type == "log"
    parts = plots.parts_of_a_step({"towers": 3.0, "loss": 1.0})
    assert parts.layout.title.text == "towers: 75% of a step" and list(parts.data[0].x) == [1.0, 3.0]
