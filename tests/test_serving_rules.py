"""`serve_by`: the three rules against plain scores, and sweeps whose points share one training."""

import json

import numpy as np
import pytest
import torch

from bachlib import BachError
from bachlib.evaluate import Evaluation, evaluate, evaluation
from bachlib.evaluate.tables import matched, table
from bachlib.experiment.settings import experiment_of
from bachlib.experiment.stages import run_name
from bachlib.experiment.sweep import read_sweep, results, run_here, state
from bachlib.files import output_dir
from bachlib.model import mixture
from bachlib.model.methods import build
from bachlib.rank.ranks import rank_blocks, score_blocks

TOLERANCE = 2e-3  # of float32 log-densities up to a hundred
RULES = ("density", "max", "softmax")
GRID = """
name: rules
base: [tiny.yaml]
grid:
  method: [p-bach]
  serve_by: [density, max, softmax]
layout: matched
axis: serve_by
baseline: p-bach
"""
TINY = """
source: planted
n_users: 120
n_items: 400
n_interests: 5
mean_events: 120
k: 3
d: 8
ff: 16
item_width: 16
epochs: 1
batch_size: 256
n_negatives: 64
"""


def lively(method: str, world) -> torch.nn.Module:
    """An untrained model whose κ differ between heads; π_u does already."""
    model = build(method, world, 4, d=16, cls_scale=2.0)
    torch.nn.init.normal_(model.kappa_net.net[4].weight, std=0.4, generator=torch.Generator().manual_seed(0))
    return model


def plain_scores(model, history, rule: str) -> np.ndarray:
    """(B, n_items) in float64, as the rule is defined."""
    heads, log_pi, kappa = (x.detach().double() for x in model.encode(history))
    items = model.items().detach().double()
    if rule == "density":
        return mixture.log_density(heads, items, log_pi, kappa, model.kernel).numpy()
    t = heads @ items.T  # (B, k, n)
    if rule == "max":
        return t.amax(1).numpy()
    p = (t / model.tau).softmax(-1)
    return (log_pi.exp()[..., None] * p).sum(1).log().numpy()


@pytest.mark.parametrize("method", ["p-bach", "v-bach", "p-bach-global"])
def test_rules_against_plain_scores(world, method):
    """Ranks are those of the plain scores (ties and rounding aside), by both ways to rank; the softmax up to a
    constant."""
    model, users, seen = lively(method, world), np.arange(40), {}
    for rule in RULES:
        plain = plain_scores(model, world.history(users, "test"), rule)
        fast = model.score(world.history(users, "test"), users, serve_by=rule).double().numpy()
        assert np.ptp(fast - plain) < TOLERANCE
        for u in users:
            plain[u, np.concatenate(world.split(u)[:2])] = -np.inf
        targets = world.targets(users, "test")
        own = np.take_along_axis(plain, targets, 1)[..., None]
        above, near = (plain[:, None] > own + 1e-4).sum(-1), (np.abs(plain[:, None] - own) <= 1e-4).sum(-1)
        found = np.concatenate([ranks for _, ranks in rank_blocks(model, world, users, "test", serve_by=rule)])
        assert ((found > above) & (found <= above + near)).all()
        for block in score_blocks(model, world, users, "test", serve_by=rule):
            there = np.isfinite(plain[block.users])
            assert np.ptp(block.scores.numpy()[there] - plain[block.users][there]) < TOLERANCE
        seen[rule] = found
    assert (seen["density"] == evaluate(model, world, quiet=True).ranks[:40]).all(), "the default"
    for a, b in (("density", "max"), ("density", "softmax"), ("max", "softmax")):
        assert (seen[a] != seen[b]).mean() > 0.2, "the rules could be one and the test would not see it"


def test_the_softmax_rule_is_a_von_mises_fisher_density(world):
    """With heads of one common normaliser and κ = 1/τ, v-bach's density is the trained softmax: the limit case."""
    model = build("v-bach", world, 1, d=16)  # κ = 1/τ at the start; one head: Z is a constant
    by = [evaluate(model, world, serve_by=rule, quiet=True).ranks for rule in RULES]
    assert (by[0] == by[1]).mean() > 0.999 and (by[0] == by[2]).mean() > 0.999


def test_refused(world):
    for method in ("standard", "all-multihead", "mostpop"):
        with pytest.raises(BachError, match="has no π_u and no κ; only the BACH"):
            evaluate(build(method, world), world, serve_by="max", quiet=True)
    with pytest.raises(BachError, match="serve_by='dense': should be one of density, max, softmax"):
        evaluate(build("p-bach", world), world, serve_by="dense", quiet=True)
    with pytest.raises(BachError, match="serve_by='softmax': method 'standard' has no π_u and no κ"):
        experiment_of({"method": "standard", "serve_by": "softmax"}, "here")
    assert not evaluation.cannot_serve("density", None, "x")


def test_a_sweep_trains_once_for_all_rules(tmp_path, monkeypatch):
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path / "o"))
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "rules.yaml").write_text(GRID)
    points = read_sweep(tmp_path / "rules.yaml").points
    assert len({point.folder for point in points}) == 3 and len({run_name(point.p) for point in points}) == 1
    for point in points[::-1]:  # max first: its training is the density's
        run_here(point)
    weights = list(output_dir("runs").glob("*/best.safetensors"))
    assert [path.parent for path in weights] == [points[0].folder], "one training"
    assert [state(point).status for point in points] == ["done"] * 3
    of_points, found = results(points)
    assert of_points["serve_by"].tolist() == list(RULES)
    found = list(found.values())
    assert [e.about.get("serve_by", "density") for e in found] == list(RULES)
    assert len({json.dumps(e.ranks.tolist()) for e in found}) == 3
    rows = [f"p-bach (serve_by = {rule})" for rule in RULES]
    assert sorted(table(found, rows[0]).means.index) == sorted(rows)
    made = matched(found, "serve_by", baseline="p-bach")
    assert made.means.index.get_level_values(0).unique().tolist() == list(RULES)
    again = Evaluation.load(points[1].folder)
    assert again.about["serve_by"] == "max" and (again.ranks == found[1].ranks).all()
