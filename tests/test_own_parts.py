"""Encoders, gates and item towers of one's own, named in experiments and sweeps."""

import os
import sys

import pytest
import torch

from bachlib import BachError
from bachlib.experiment import cluster, own, published
from bachlib.experiment.notebooks import as_yaml, folder_of, keys
from bachlib.experiment.settings import Experiment, experiment_of
from bachlib.experiment.stages import prepared
from bachlib.experiment.sweep import read_sweep, record_of, results, run_here, state
from bachlib.files import code_hash, read_json

TOWERS = """
from torch import nn
from bachlib.model.towers import ItemTower

class Mean(nn.Module):
    def __init__(self, k, d):
        super().__init__()
        self.k, self.net = k, nn.Linear(d, k * d)

    def forward(self, tokens, history):
        there = (history >= 0)[..., None]
        mean = (tokens * there).sum(1) / there.sum(1).clamp(min=1)
        return self.net(mean).view(len(tokens), self.k, -1)

def mean(dataset, params):
    return Mean(params.k, params.d)

class Logits(nn.Module):
    def __init__(self, k):
        super().__init__()
        self.logits = nn.Parameter(nn.Linear(1, k).bias.detach())

    def forward(self, tokens, history):
        return self.logits.expand(len(tokens), -1)

def gate(dataset, params):
    return Logits(params.k)

class Table(nn.Module):
    def __init__(self, n, d):
        super().__init__()
        self.n_items, self.table = n, nn.Embedding(n, d)

    def forward(self, ids):
        return self.table(ids)

def items(dataset, params):
    return Table(dataset.n_items, params.d)

def nothing(dataset, params):
    return 3

def other(dataset):
    return None
"""
TINY = "{n_users: 60, n_items: 500, n_interests: 4, epochs: 1, batch_size: 512, n_negatives: 16, k: 2, encoder: %s}"


@pytest.fixture
def towers(tmp_path, monkeypatch):
    """A module `mytowers.own` that can be imported; its file."""
    (folder := tmp_path / "lib" / "mytowers").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "own.py").write_text(TOWERS)
    monkeypatch.syspath_prepend(tmp_path / "lib")
    yield folder / "own.py"
    for name in ("mytowers", "mytowers.own"):
        sys.modules.pop(name, None)
        own._imported.pop(name, None)


@pytest.fixture
def sweep(towers, tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\nbase: [quickstart]\nset: {TINY % 'mytowers.own:mean'}\ngrid: {{seed: [0, 1]}}\n")
    return path


def status(path):
    return [state(point).status for point in read_sweep(path).points]


def test_a_sweep_with_an_encoder_of_ones_own(sweep, towers, tmp_path, monkeypatch):
    """Two points run, and are done until the source of the module changes; so are their published records."""
    before = read_sweep(sweep).points
    names = {point.name for point in before}
    for point in before:
        run_here(point)
    assert status(sweep) == ["done", "done"] and all(0 < record_of(point)["AUPRC"] < 1 for point in before)
    about = read_json(before[0].folder / "run.json")["identity"]["model"]["own"]
    assert list(about) == ["encoder"] and about["encoder"].startswith("Mean ")
    assert {one.label for one in results(before)[1].values()} == {"p-bach (encoder = Mean)"}

    monkeypatch.setattr(published, "project_root", lambda: tmp_path)
    published.publish(read_sweep(sweep))
    outputs = os.environ["BACH_OUTPUT_DIR"]
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path / "another"))
    assert status(sweep) == ["done", "done"], "published"
    towers.write_text(TOWERS.replace("nn.Linear(d, k * d)", "nn.Linear(d, k * d, bias=False)"))
    assert status(sweep) == ["missing", "missing"], "published of another source"
    monkeypatch.setenv("BACH_OUTPUT_DIR", outputs)
    assert status(sweep) == ["missing", "missing"]
    after = read_sweep(sweep).points
    assert len(names) == 2 and not names & {point.name for point in after}
    data = prepared(after[0].p)
    assert own.parts(after[0].p, data, 2)["encoder"].net.bias is None, "the module as it is now"
    towers.write_text(TOWERS)
    assert status(sweep) == ["done", "done"]


def test_every_part_with_the_seed_of_the_weights(towers, world):
    named = {"encoder": "mytowers.own:mean", "gate": "mytowers.own:gate", "item_tower": "mytowers.own:items"}
    one, two, other = (experiment_of({**named, "seed": seed, "d": 8}, "here") for seed in (1, 1, 2))
    torch.manual_seed(5)
    state = torch.get_rng_state()
    made = [own.parts(p, world, 3) for p in (one, two, other)]
    assert torch.equal(torch.get_rng_state(), state)
    for part in named:
        a, b, c = (next(of[part].parameters()) for of in made)
        assert torch.equal(a, b) and not torch.equal(a, c), part
    assert made[0]["encoder"].k == 3 and made[0]["item_tower"].n_items == world.n_items


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mytowers.none:mean", "encoder: mytowers.none:mean: the module mytowers.none cannot be imported .*PYTHONPATH"),
        ("mytowers.own:gru", "mytowers.own has no function gru; its functions are mean, gate, items, nothing, other"),
        ("mytowers.own:other", r"should be called as other\(dataset, params\)"),
        ("mytowers.own", "encoder: should be package.module:function, got 'mytowers.own'"),
        ("../lib:mean", "encoder: should be package.module:function"),
        ("math:sin", "the module math cannot be imported .*has no Python source"),
        ("mytowers.broken:mean", "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_runs(sweep, towers, name, said):
    towers.with_name("broken.py").write_text("1 / 0\n")
    sweep.write_text(sweep.read_text().replace("mytowers.own:mean", f'"{name}"'))
    with pytest.raises(BachError, match=f"(?s)mine.yaml, at seed = 0: .*{said}"):
        read_sweep(sweep)


def test_what_is_no_module_or_has_no_place_is_refused(sweep, towers, world):
    p = experiment_of({"encoder": "mytowers.own:nothing"}, "here")
    with pytest.raises(BachError, match=r"own:nothing: should return a torch Module and returned int"):
        own.parts(p, world, 2)
    for values, said in (
        ({"method": "mostpop", "encoder": "a:b"}, "encoder: method 'mostpop' has no encoder; got 'a:b'"),
        ({"method": "standard", "gate": "a:b"}, "gate: method 'standard' has no gate"),
        ({"pi": "uniform", "gate": "a:b"}, "gate: pi='uniform' has no gating tower"),
    ):
        with pytest.raises(BachError, match=said):
            experiment_of(values, "here")


def test_names_without_own_parts_are_what_they_were():
    """The keys are in no record, name or hash unless they are set."""
    p = Experiment()
    assert not {"encoder", "gate", "item_tower"} & {*p.model_dump(), *p.model_dump(exclude={"name"})}
    assert p.model_dump(include={"k", "encoder"}) == {"k": 8}
    assert folder_of(experiment_of({"name": "x", "seed": 3}, "here")).name == "x-4f9f8f28"
    assert "own" not in str(keys(experiment_of({"notebooks": ["single"]}, "here")))
    assert as_yaml(Experiment(encoder="a:b")).splitlines()[-1] == "encoder: a:b"


def test_on_a_worker_with_another_source(sweep, towers):
    (point, _) = read_sweep(sweep).points
    task = cluster.Task(point.name, as_yaml(point.p), 1, os.environ["BACH_OUTPUT_DIR"], None, code_hash())
    towers.write_text(TOWERS + "\n")
    outcome = cluster.perform(task)
    assert outcome.status == "failed" and "modules of your own on" in outcome.error
    sys.modules.pop("mytowers.own")
    towers.unlink()
    assert "cannot be imported" in cluster.perform(task).error
