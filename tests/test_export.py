"""`bach export`: the programs of every method give the model's numbers, the tables load in other tools."""

import hashlib
import re
import shutil
import zipfile

import duckdb
import numpy as np
import onnxruntime
import pandas as pd
import pytest
import scipy.special
import torch
from commands import bach_here
from qdrant_client import QdrantClient, models
from torch import nn

from bachlib import BachError
from bachlib.experiment import export as exports
from bachlib.experiment.export import export, opened
from bachlib.files import file_hash, read_json
from bachlib.model.methods import METHODS, build
from bachlib.serve import programs, rescore
from bachlib.train import Run, fit

SMALL = {"k": 3, "d": 8, "ff": 8, "item_width": 8, "k_shared": 3, "k_own": 2}
FILES = {f"{part}.{kind}" for part in ("user_side", "item_tower") for kind in ("onnx", "pt2")}
FILES |= {"items.parquet", "users.parquet", "model.json"}


def model_of(name, dataset, **more):
    """With weights of every size: at the start κ is constant and the item tower changes nothing."""
    model = build(name, dataset, **SMALL | more)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.1 * torch.randn_like(weight)
    return model


def written(part, folder):
    with torch.no_grad():
        program = programs.exported(part)
        told = program.graph_module.code.encode() + b"".join(x.numpy().tobytes() for x in program.state_dict.values())
        path = folder / f"{hashlib.sha256(told).hexdigest()}.onnx"
        if not path.exists():  # p-bach and v-bach, for example, have one user side
            programs.to_onnx(program, part, 18).save(path, external_data=False)
    return path, program.module()


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    return tmp_path_factory.mktemp("programs")


@pytest.mark.parametrize("name", [name for name in METHODS if name != "mostpop"])
def test_the_user_side_of_every_method(name, world, together):
    """Any batch, any length, padded, empty: what onnxruntime and torch.export answer is what the model encodes."""
    model = model_of(name, world)
    path, program = written(programs.user_side(model), together)
    session = onnxruntime.InferenceSession(path)
    history = world.history(np.arange(7), "test")
    padded = np.where(np.arange(50) < 45, -1, history)
    for given in (
        history,
        history[:1],
        history[:, -1:],
        padded,
        padded[:2, -9:],
        np.full((2, 1), -1),
        padded[:1] * 0 - 1,
    ):
        found = session.run(None, {"history": given})
        again = program(torch.from_numpy(given))
        for wanted, one, other in zip(model.encode(given), found, again, strict=True):
            torch.testing.assert_close(torch.from_numpy(one), wanted.detach(), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(other, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("n_hist", [1, 2])
def test_the_shortest_histories(n_hist, world, tmp_path):
    part = programs.user_side(model_of("comirec-sa", world, n_hist=n_hist))
    assert programs.write(part, tmp_path) < 1e-5


def test_the_item_tower(world, tmp_path, monkeypatch):
    model = model_of("p-bach", world)
    monkeypatch.setattr(programs, "LARGE", 10)  # as if the weights did not fit into the file
    assert programs.write(programs.item_tower(model), tmp_path, 21) < 1e-5
    assert (tmp_path / "item_tower.onnx.data").exists()
    session = onnxruntime.InferenceSession(tmp_path / "item_tower.onnx")
    (found,) = session.run(None, {"rows": model.item_tower.table.numpy()})
    np.testing.assert_allclose(found, model.items().detach().numpy(), atol=1e-5)
    import onnx

    assert onnx.load(tmp_path / "item_tower.onnx", load_external_data=False).opset_import[0].version == 21


def test_a_program_that_differs_is_refused(world):
    part = programs.item_tower(model_of("p-bach", world))
    with torch.no_grad():
        assert programs.difference(part, lambda rows: [x + 5e-6 for x in part.module(rows)]) == pytest.approx(5e-6, 0.1)
        for wrong in (lambda x: x + 1e-3, lambda x: x * torch.nan, lambda x: x[:1].expand(len(x), -1)[:, :3]):
            with pytest.raises(BachError, match=r"item_tower as a program differs .* vectors by .* \(at most 1e-05\)"):
                programs.difference(part, lambda rows, wrong=wrong: [wrong(x) for x in part.module(rows)])


# ------------------------------------------------------------------------------------------------------- the folder


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "mine"
    short = {"epochs": 1, "batch_size": 256, "n_negatives": 64}
    return fit(build("p-bach", world, **SMALL), world, short, out=folder)


@pytest.fixture(scope="module")
def folder(run, world, tmp_path_factory):
    out = tmp_path_factory.mktemp("exports") / "mine"
    done = bach_here("export", run.folder, out, "--data", world.folder, "--no-map")
    assert done.returncode == 0, done.stderr
    assert f"→ {out}" in done.stdout and all(name in done.stdout for name in FILES)
    return out


def test_the_files_are_what_model_json_says(folder, run, world):
    about = read_json(folder / "model.json")
    assert {path.name for path in folder.iterdir()} == FILES == set(about["files"]) | {"model.json"}
    assert all(told["sha256"] == file_hash(folder / name) for name, told in about["files"].items())
    assert all(off < 1e-5 for off in about["difference"].values()) and not about["map"]
    for path in folder.glob("*.pt2"):  # no names of source files or of this machine, and no numbers of a process
        with zipfile.ZipFile(path) as archive:
            assert not [name for name in archive.namelist() if re.search(rb"\.py\b|graph_id", archive.read(name))]
    assert not [path for path in folder.glob("*.onnx") if b".py" in path.read_bytes()]
    wanted = {"method": "p-bach", "d": 8, "k": 3, "tau": 0.07, "n_hist": 50, "kernel": "power-spherical", "opset": 18}
    assert wanted.items() <= about.items() and about["rule"] == "power-spherical"


def test_items_load_in_duckdb_and_in_a_vector_store(folder, run, world):
    found = duckdb.sql(f"SELECT * FROM '{folder / 'items.parquet'}' ORDER BY item").df()
    vectors = run.model.items().detach().numpy()
    assert found.columns.tolist() == ["raw_id", "item", "title", "genres", "vector", "neighbors"]
    assert found["raw_id"].tolist() == world.items["raw_id"].tolist() and found["title"].tolist() == world.titles
    assert [list(own) for own in found["genres"]] == [list(own) for own in world.items["genres"]]
    np.testing.assert_array_equal(np.stack(found["vector"]), vectors)
    store = QdrantClient(":memory:")
    store.create_collection("items", models.VectorParams(size=8, distance=models.Distance.DOT))
    store.upload_collection("items", np.stack(found["vector"]), found[["raw_id"]].to_dict("records"), found["item"])
    for item in (0, 77):
        near = found["neighbors"][item]
        answer = store.query_points("items", vectors[item], limit=11).points
        assert [point.id for point in answer] == [item, *near["ids"]]
        np.testing.assert_allclose([1 - point.score for point in answer[1:]], near["distances"], atol=1e-5)
        assert answer[1].payload["raw_id"] == world.items["raw_id"][near["ids"][0]]


def test_users_and_the_formula_of_the_score(folder, run, world):
    """A score worked out from the exported files alone, by the formula that stands in model.json."""
    users, items = (pd.read_parquet(folder / f"{name}.parquet") for name in ("users", "items"))
    assert users["raw_id"].tolist() == world.users["raw_id"].tolist()
    about = read_json(folder / "model.json")
    names = {name: getattr(scipy.special, name) for name in ("gammaln", "hyp0f1")} | {"d": 8, "k": 3}
    names |= {name: getattr(np, name) for name in ("log", "log1p", "exp", "pi")} | {"sum": sum, "range": range}
    for u in (0, 3):
        of = {"heads": np.stack(users["heads"][u]), "log_pi": np.log(users["pi"][u]), "kappa": users["kappa"][u]}
        log_c = lambda kappa: eval(about["log_C"], names | {"kappa": kappa})  # noqa: E731
        found = [eval(about["score"], names | of | {"log_C": log_c, "vector": items["vector"][i]}) for i in (0, 9, 99)]
        wanted = run.model.score(world.sequence(u)[None, -50:].astype(np.int64))[0, [0, 9, 99]].numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-4)


@pytest.mark.parametrize("rule", ["von-mises-fisher", "max over heads"])
def test_the_other_formulas(rule):
    rng = np.random.default_rng(0)
    heads, vector = (
        x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (rng.normal(size=(3, 8)), rng.normal(size=8))
    )
    pi, kappa = np.array([0.5, 0.3, 0.2]), np.array([5.0, 14.0, 40.0])
    names = {
        "log": np.log,
        "exp": np.exp,
        "pi": np.pi,
        "gammaln": scipy.special.gammaln,
        "hyp0f1": scipy.special.hyp0f1,
    }
    names |= {"d": 8, "k": 3, "heads": heads, "vector": vector, "log_pi": np.log(pi), "kappa": kappa}
    names["log_C"] = lambda kappa: eval(exports.LOG_C[rule], names | {"kappa": kappa})
    wanted = rescore(vector[None].astype(np.float32), heads, pi, kappa, rule=rule)[0, 0]
    assert eval(exports.SCORE[rule], names) == pytest.approx(wanted, abs=1e-5)


def quick(monkeypatch):
    """An export without programs, which take seconds."""
    monkeypatch.setattr(programs, "write", lambda part, folder, opset: 0.0)


def test_the_map(run, tmp_path, monkeypatch, capsys):
    from bachlib.show import maps

    quick(monkeypatch)
    places = np.random.default_rng(0).normal(size=(run.dataset.n_items, 2)).astype(np.float32)
    monkeypatch.setattr(maps, "layout", lambda items, heads: (places, heads))
    found = pd.read_parquet(export(run, tmp_path / "with") / "items.parquet")
    np.testing.assert_array_equal(found[["x", "y"]], places)
    monkeypatch.setattr("bachlib.find_spec", lambda name: None)
    found = pd.read_parquet(export(run, tmp_path / "without") / "items.parquet")
    assert "x" not in found and "neighbors" in found
    assert (
        "the map of an export needs umap: pip install 'bachlib[lab]'; items.parquet has no x" in capsys.readouterr().out
    )


# ------------------------------------------------------------------------------------------------------- bad input


def test_a_folder_is_replaced_only_if_asked_and_only_if_it_is_an_export(run, tmp_path, monkeypatch):
    quick(monkeypatch)
    out = tmp_path / "out"
    out.mkdir()
    export(run, out, layout=False)  # an empty folder is no loss
    (out / "users.parquet").unlink()
    with pytest.raises(BachError, match="out holds an export already: choose another folder, or replace it with --for"):
        export(run, out, layout=False)
    export(run, out, layout=False, force=True)
    assert (out / "users.parquet").exists()
    for name, make in (
        ("file", lambda path: path.write_text("")),
        ("folder", lambda path: (path / "mine").mkdir(parents=True)),
    ):
        make(tmp_path / name)
        with pytest.raises(BachError, match=f"{name} exists and is not an export; it is not replaced"):
            export(run, tmp_path / name, layout=False, force=True)
    assert (tmp_path / "folder" / "mine").exists()


def test_an_export_that_fails_leaves_the_old_one(run, tmp_path, monkeypatch):
    quick(monkeypatch)
    out = export(run, tmp_path / "out", layout=False)
    before = (out / "model.json").read_bytes()
    monkeypatch.setattr(exports, "_users", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        export(run, out, layout=False, force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (out / "model.json").read_bytes() == before


def test_what_cannot_be_exported_is_said(run, world, tmp_path):
    out = tmp_path / "out"
    for opset, told in ((11, "too old"), (99, "too new")):
        done = bach_here("export", run.folder, out, "--data", world.folder, "--opset", opset)
        assert (
            done.returncode == 2 and f"opset {opset} is {told}: torch {torch.__version__} writes 18 … 23" in done.stderr
        )
    shutil.copytree(run.folder, tmp_path / "bare", ignore=shutil.ignore_patterns("best.safetensors"))
    with pytest.raises(BachError, match=r"bare has no weights \(best.safetensors\), which the first validation writes"):
        opened(tmp_path / "bare", world.folder)
    counts = Run(tmp_path / "pop", build("mostpop", world), {}, dataset=world)
    with pytest.raises(
        BachError, match="pop has no vectors, only counts: any other method than mostpop can be exported"
    ):
        export(counts, out)
    with pytest.raises(BachError, match=r"was loaded without its data set: use Run.load\(folder, dataset\)"):
        export(Run.load(run.folder), out)
    with pytest.raises(BachError, match="pi='table' has a π_u for each user of the data set and none for a history"):
        programs.user_side(build("p-bach", world, pi="table", **SMALL))
    asked = world.with_context(np.ones((world.n_users, 2)))
    with pytest.raises(BachError, match="reads a context with every request"):
        programs.user_side(build("p-bach", asked, context="gate", **SMALL))
    assert not out.exists()


class Odd(nn.Module):
    """An encoder with a branch that depends on the numbers."""

    def __init__(self):
        super().__init__()
        self.map = nn.Linear(8, 24)

    def forward(self, tokens, history):
        return self.map(tokens.sum(1) if tokens.sum() > 0 else tokens[:, -1]).unflatten(-1, (3, 8))


class Table(nn.Embedding):
    """An item tower without `embed`."""

    n_items = property(lambda self: self.num_embeddings)


def test_modules_of_ones_own(world, tmp_path):
    odd = build("all-multihead", world, encoder=Odd(), **SMALL)
    with pytest.raises(BachError, match=r"the user_side of this model cannot be exported \(\w+"):
        programs.write(programs.user_side(odd), tmp_path)
    assert programs.item_tower(build("standard", world, item_tower=Table(world.n_items, 8), **SMALL)) is None
