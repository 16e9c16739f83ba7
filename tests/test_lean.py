"""Serving without torch: the same slates for every method and strategy; the exact score of candidates from anywhere."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from serving import made, unit

from bachlib import BachError
from bachlib.model.methods import METHODS
from bachlib.model.sphere import KERNELS
from bachlib.serve import rescore
from bachlib.serve.lean import CodebookServer, Server
from bachlib.serve.normalizer import log_normalizer

HOW = [("exact", {}), ("two-step", {}), ("codebook", {}), ("codebook", {"budget": 60})]


@pytest.mark.parametrize("rule", [*KERNELS])
def test_the_normaliser_is_the_models(rule):
    """From κ = 0 to 10^38, in the shape that is given."""
    kappa = np.concatenate([[0.0], np.geomspace(1e-6, 3e38, 200)]).reshape(3, 67)
    for d in (2, 3, 16, 51, 52, 64, 1024):
        wanted = KERNELS[rule].log_normalizer(torch.from_numpy(kappa), d).numpy()
        found = log_normalizer(kappa, d, rule)
        assert found.shape == kappa.shape
        scale = np.maximum(1, kappa)  # its terms are as large
        assert (np.abs(found - wanted) <= 1e-12 * scale * (1 + np.log(scale) + d)).all(), d


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.encoder])
def test_every_method_by_every_strategy_without_its_model(world, histories, tmp_path, name):
    """To the bit, from what the model's encoder gives; with exclusions and an allow-list."""
    histories, of_codebook = histories[:8], "global" in name or "hybrid" in name
    for strategy, how in HOW if of_codebook else HOW[:2]:
        retriever = made(world, name, strategy, lists="exact", dataset=world, **how)
        folder = retriever.save(tmp_path / f"{strategy}{len(how)}")
        server = Server(folder)
        assert (server.rule, server.strategy) == (retriever.rule, strategy)
        heads, log_pi, kappa = (x.detach().numpy() for x in retriever.model.encode(torch.from_numpy(histories)))
        own = [h[h >= 0] for h in histories]
        for only in (None, np.arange(0, 600, 2), np.arange(0, 600, 5)):
            wanted = retriever.retrieve(histories, 10, only=only)
            side = dict(exclude=own, only=only, K=10)
            slates = [
                server.retrieve(heads, wanted.pi, kappa, **side),
                server.retrieve(heads, None, kappa, log_pi=log_pi, **side),
            ]
            if of_codebook and "hybrid" not in name and strategy == "codebook":
                slates += [
                    server.retrieve(pi=wanted.pi, **side),
                    CodebookServer(folder).retrieve(wanted.pi, 10, own, only),
                ]
            if retriever.rule == "max over heads":
                slates = [server.retrieve(heads, **side), *slates[:1]]
            for slate in slates:
                for field in (
                    "items",
                    "scores",
                    "head_share",
                    "certified",
                    "exact_if_lists_are",
                    "looked_at",
                    "raw_ids",
                ):
                    np.testing.assert_array_equal(
                        getattr(slate, field), getattr(wanted, field), err_msg=f"{strategy} {field}"
                    )
        one = server.retrieve(heads[0], wanted.pi[0], kappa[0], 10, exclude=own[0])
        np.testing.assert_array_equal(one.items[0], retriever.retrieve(histories[0], 10).items[0])
        assert slates[0].table(0).equals(wanted.table(0)) and "title" in wanted.table(0)
    assert server.numbers_of([server.catalogue.labels.raw_ids[7]]).tolist() == [7]


def test_a_server_imports_neither_torch_nor_pandas(world, histories, tmp_path):
    retriever = made(world, "v-bach", "two-step", dataset=world)
    retriever.save(tmp_path / "index")
    query, pi = retriever.users.query(retriever.catalogue, list(histories[:3]))
    np.savez(tmp_path / "users.npz", heads=query.heads, pi=pi, kappa=query.kappa)
    code = f"""
import sys, json, numpy as np
for name in ("torch", "pandas", "duckdb", "pydantic", "safetensors", "sklearn", "typer"):
    sys.modules[name] = None  # any import of it fails
from bachlib.serve.lean import Server
from bachlib.serve import rescore
server, users = Server({str(tmp_path / "index")!r}), np.load({str(tmp_path / "users.npz")!r})
slate = server.retrieve(**users, K=10)
scores = rescore(slate.items, **users, rule=server.rule, items=server.catalogue.vectors)
print(json.dumps([slate.items.tolist(), slate.scores.tolist(), slate.raw_ids.tolist(), scores.tolist()]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    items, scores, raw_ids, again = json.loads(done.stdout)
    slate = retriever.retrieve(histories[:3], 10, keep_history=True)
    np.testing.assert_array_equal(items, slate.items)
    np.testing.assert_array_equal(scores, slate.scores)
    np.testing.assert_array_equal(again, slate.scores)
    assert raw_ids == slate.raw_ids.tolist()


@pytest.mark.parametrize("name", ["p-bach", "v-bach", "all-multihead", "p-bach-global", "v-bach-hybrid"])
def test_rescored_candidates_have_the_models_scores(world, histories, name):
    retriever = made(world, name)
    heads, log_pi, kappa = retriever.model.encode(torch.from_numpy(histories))
    wanted, items = retriever.model.score(torch.from_numpy(histories)).numpy(), retriever.model.items().detach()
    numbers = np.random.default_rng(0).integers(600, size=(30, 40))
    side = dict(kappa=kappa, log_pi=log_pi, rule=retriever.rule)
    scores = rescore(numbers, heads, items=items, **side)
    np.testing.assert_allclose(scores, np.take_along_axis(wanted, numbers, 1), atol=2e-3)
    np.testing.assert_array_equal(rescore(items.numpy()[numbers], heads, **side), scores)
    np.testing.assert_array_equal(rescore(items[:9], heads, **side), rescore(np.arange(9), heads, items=items, **side))
    slate = retriever.retrieve(histories, 10)
    numbers[:, 0] = -1
    found = rescore(np.hstack((numbers, slate.items)), heads, slate.pi, kappa, rule=retriever.rule, items=items)
    assert np.isneginf(found[:, 0]).all() and np.isfinite(found[:, 1:]).all()
    np.testing.assert_array_equal(found[:, 40:], slate.scores)
    if retriever.rule == "max over heads":
        np.testing.assert_array_equal(rescore(numbers, heads, rule=retriever.rule, items=items)[:, 1:], found[:, 1:40])
    one = rescore(numbers[0], heads[0], slate.pi[0], kappa[0], rule=retriever.rule, items=items)
    np.testing.assert_array_equal(one, found[:1, :40])


def test_invalid_users_and_candidates_are_refused(world, tmp_path):
    rng = np.random.default_rng(0)
    u, v, pi, kappa = (
        unit(rng.normal(size=(3, 2, 16))),
        unit(rng.normal(size=(3, 5, 16))),
        np.full((3, 2), 0.5),
        np.ones((3, 2)),
    )
    soft = dict(heads=u, pi=pi, kappa=kappa, rule="power-spherical")
    for wrong, said in (
        (dict(rule="cosine"), "rule='cosine': should be one of power-spherical, von-mises-fisher, max over heads"),
        (dict(heads=2 * u), "heads should be unit vectors; got lengths from 2 to 2"),
        (dict(heads=u * np.nan), "heads should be unit vectors"),
        (dict(heads=u[:2]), r"pi should be \(2,\), one for all, or \(B, k\) = \(2, 2\); got shape \(3, 2\)"),
        (dict(heads=np.ones(4)), r"heads should be \(B, k, d\)"),
        (dict(pi=None), "needs kappa= and either pi= or log_pi="),
        (dict(log_pi=np.log(pi)), "needs kappa= and either pi= or log_pi="),
        (dict(kappa=None), "needs kappa="),
        (dict(pi=pi * 2), "pi should sum to 1"),
        (dict(pi=pi[:2]), "pi should be"),
        (dict(pi=None, log_pi="x"), "log_pi should be numbers"),
        (dict(kappa=-kappa), "kappa should be .* finite numbers ≥ 0"),
        (dict(kappa=kappa[:, :1]), "kappa should be"),
        (dict(candidates=v[:2]), "candidates should have 16 dimensions, for all or for 3 users"),
        (dict(candidates=v[..., :8]), "candidates should have 16 dimensions"),
        (dict(candidates=3 * v), "candidates should be unit: row 0 has length 3"),
        (dict(candidates=[[0, 5]], items=v[0]), "there is no row 5; rows are 0 … 4, and −1 is padding"),
        (dict(candidates=[0.5], items=v[0]), "row numbers of items"),
    ):
        with pytest.raises(BachError, match=said):
            rescore(**{"candidates": v, **soft, **wrong})
    made(world, "p-bach", dataset=world).save(tmp_path)
    server = Server(tmp_path)
    with pytest.raises(BachError, match="heads= is missing"):
        server.retrieve(pi=pi)
    with pytest.raises(BachError, match="heads should have the 16 dimensions of the items; got 8"):
        server.retrieve(unit(u[..., :8]), pi, kappa)
    with pytest.raises(BachError, match=r"raw: the log has no item 'x' \(the nearest is"):
        server.numbers_of(["x"])
    with pytest.raises(BachError, match=r"serves by exact and needs the heads of each user: use Server"):
        CodebookServer(tmp_path)
