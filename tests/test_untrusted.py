"""Files from elsewhere run nothing, lead nowhere else, and are not believed about sizes; damaged ones are named."""

import hashlib
import json
import os
import shutil
import time
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import SMALL, made

from bachlib import BachError
from bachlib.data import Dataset, dataset, prepare
from bachlib.evaluate import Evaluation, evaluate
from bachlib.experiment import published
from bachlib.experiment.notebooks import stages
from bachlib.experiment.report import report
from bachlib.experiment.settings import given, read_experiment
from bachlib.experiment.sweep import read_sweep
from bachlib.files import canonical_json, read_json, write_json
from bachlib.model.methods import build
from bachlib.params import ModelParams, PrepareParams, TrainParams, WorldParams, validated
from bachlib.serve import Retriever
from bachlib.train import Run, checkpoint, fit
from bachlib.train.run import data_of

# ----------------------------------------------------------------------------------------------------------- YAML

LISTS = "\n".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]" for a, b in zip("abcdefgh", "bcdefghi", strict=True))
MERGED = "\n".join(
    f"{b}: &{b} {{<<: [{', '.join([f'*{a}'] * 9)}]}}" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
YAML = {
    "lists in lists": ("k: " + "[" * 100_000, "more than 40 levels"),
    "keys in keys": ("\n".join("  " * n + "k:" for n in range(60)), "more than 40 levels"),
    "digits": ("seed: " + "9" * 6_000, "a number of more than 100 digits"),
    "base 60": ("seed: 1" + ":1" * 3_000, "a number of more than 100 digits"),
    "aliases": ("a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + LISTS, "more than 20,000 values"),
    "merged": ("a: &a {k: 1}\n" + MERGED, "more than 20,000 values"),
    "itself": ("k: &k [*k]", "an alias inside of what it stands for"),
    "length": ("name: " + "a" * 300_000, "more than 262,144 characters"),
    "object": ("k: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    "no day": ("k: 2001-13-45", "month must be in 1..12"),
    "no number": ("k: !!int ''", "is not YAML"),
    "no time": ("k: !!timestamp soon", "is not YAML"),
    "a list as a key": ("? [a]\n: 1", "unhashable key"),
    "bytes": (b"name: \xff\xfe", "is not YAML"),
}


@pytest.mark.parametrize("case", YAML)
def test_yaml_that_no_person_writes(tmp_path, case):
    text, said = YAML[case]
    (path := tmp_path / "mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    began = time.process_time()
    with pytest.raises(BachError) as error:
        read_experiment(path)
    assert "mine.yaml is not YAML that can be read: " in str(error.value) and said in str(error.value)
    assert len(str(error.value)) < 700 and time.process_time() - began < 3


def test_an_alias_of_a_value_is_read(tmp_path):
    (tmp_path / "mine.yaml").write_text("k: &n 4\nprototypes: *n\n")
    p = read_experiment(tmp_path / "mine.yaml")
    assert (p.k, p.prototypes) == (4, 4)


@pytest.mark.parametrize("value", ["[" * 50_000, "9" * 6_000, "&a [*a]", "!!int ''"])
def test_values_of_set_are_bounded(value):
    with pytest.raises(BachError, match=r"^--set k=.*: the value is not YAML"):
        given([f"k={value}"])


@pytest.mark.parametrize("model", [ModelParams, TrainParams, PrepareParams, WorldParams])
@pytest.mark.parametrize("seed", [2**64, 10**5_000], ids=["64 bits", "thousands of digits"])
def test_a_seed_that_no_generator_takes(model, seed):
    with pytest.raises(BachError, match=r"here: invalid parameters\n  seed: .*, got ") as error:
        validated(model, {"seed": seed}, "here")
    assert f"less than {2**64}" in str(error.value)
    assert validated(model, {"seed": 2**64 - 1}, "here").seed == 2**64 - 1
    with pytest.raises(BachError, match=r"k: should be less than 2\^64"):
        validated(ModelParams, {"k": 2**64}, "here")


@pytest.mark.parametrize("text", ["base: 1.5", "base: [[x]]", f"base: {'a' * 3_000}", "base: [nowhere.yaml]"])
def test_a_base_that_is_no_file_is_named(tmp_path, text):
    (path := tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(BachError, match=r"mine\.yaml: base: "):
        read_experiment(path)


@pytest.mark.parametrize(
    ("ending", "said"), [("", "a+ cannot be the name of a file"), (".yaml", r"a+\.yaml does not ex")]
)
def test_a_base_of_a_sweep_with_an_impossible_name(tmp_path, ending, said):
    (path := tmp_path / "s.yaml").write_text(f"name: s\nbase: [{'a' * 3_000}{ending}]\ngrid: {{k: [2]}}\n")
    with pytest.raises(BachError, match=rf"s\.yaml: base: {said}"):
        read_sweep(path)


@pytest.mark.parametrize("log", ["~nobody-here/log.csv", "a" * 3_000, "a\0b"])
def test_a_log_with_an_impossible_name(tmp_path, log):
    (path := tmp_path / "mine.yaml").write_text(json.dumps({"source": "csv", "path": log}))
    with pytest.raises(BachError, match="does not exist, neither here nor beside the file"):
        read_experiment(path)


@pytest.mark.parametrize("name", ["../up", "a/b", "..", ".hidden", "a" * 101, "/root", "a\nb", "a\0"])
def test_names_stay_inside_their_folder(world, tmp_path, name):
    (path := tmp_path / "mine.yaml").write_text(json.dumps({"name": name}))
    with pytest.raises(BachError, match="name: String should match"):
        read_experiment(path)
    (path := tmp_path / "sweep.yaml").write_text(json.dumps({"name": name, "base": ["quickstart"], "grid": {"k": [2]}}))
    with pytest.raises(BachError, match="name: String should match"):
        read_sweep(path)
    with pytest.raises(BachError, match="should be a short name of your own"):
        build("mostpop", world, name=name if name != ".." else "../..")


# ------------------------------------------------------------------------------------------------------ data sets


class Harm:
    """Unpickled, it makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.fixture
def data(world, tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(world.folder, folder)
    return folder


def test_pickles_do_not_run(data, tmp_path):
    harm = np.array([Harm(tmp_path / "harm")], object)
    np.savez(data / "truth.npz", **dict.fromkeys(dataset.Truth._fields, harm))
    with pytest.raises(BachError, match=r"truth\.npz is damaged \(ValueError: Object arrays cannot be loaded"):
        Dataset.load(data).truth  # noqa: B018
    for name in ("begins", "offsets", "sequences"):
        np.save(data / f"{name}.npy", harm, allow_pickle=True)
        with pytest.raises(BachError, match=rf"{name}\.npy is damaged"):
            Dataset.load(data)
    assert not (tmp_path / "harm").exists()


def header(shape: str, kind: str = "<i4") -> bytes:
    told = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(told).to_bytes(2, "little") + told.encode()


@pytest.mark.parametrize("shape", ["(3,)", "(1000000,)", "(10000000000000,)", "(9223372036854775807, 4)", "(-1,)", "3"])
def test_a_header_that_promises_something_else_than_the_file_has(data, shape):
    (data / "sequences.npy").write_bytes(header(shape) + b"\1\0\0\0" * 4)
    with pytest.raises(BachError, match=r"sequences\.npy is damaged"):
        Dataset.load(data)
    with zipfile.ZipFile(data / "truth.npz", "w") as archive:
        for name in dataset.Truth._fields:
            archive.writestr(f"{name}.npy", header(shape) + b"\1\0\0\0")
    shutil.copy(data / "users.parquet", data / "sequences.npy")
    with pytest.raises(BachError, match=r"truth\.npz is damaged"):
        dataset.Dataset.truth.func(type("Folder", (), {"folder": data}))


def test_an_archive_of_arrays_that_would_fill_the_memory(data):
    with zipfile.ZipFile(data / "truth.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("pi.npy", b"\0" * (1 << 26))
    with pytest.raises(BachError, match=r"truth\.npz is damaged .*said to be larger than the file"):
        Dataset.load(data).truth  # noqa: B018


def test_a_smaller_array_in_an_archive_is_noticed(data):
    """numpy reads as much as a header says, and would not come to the checksum at the end."""
    path, names = data / "truth.npz", Dataset.load(data).truth._fields
    whole = path.read_bytes()
    users = len(Dataset.load(data).truth.pi)
    path.write_bytes(whole.replace(f"({users},".encode(), f"({users - 1},".rjust(len(f"({users},")).encode(), 1))
    assert path.read_bytes() != whole and "pi" in names
    with pytest.raises(BachError, match=r"truth\.npz is damaged .*the checksum of \w+\.npy is another"):
        Dataset.load(data).truth  # noqa: B018


def changed(path, at, by=1):
    whole = bytearray(path.read_bytes())
    whole[at] ^= by
    path.write_bytes(whole)


@pytest.mark.parametrize(
    ("name", "whole"),
    [*((f"{name}.npy", whole) for name in ("sequences", "offsets") for whole in (True, False)),
     ("users.parquet", True), ("items.parquet", True)],
)  # fmt: skip
def test_one_bit_of_a_data_set(data, name, whole, monkeypatch):
    """All of a data set is compared with its hash; of a large one what is read of it has to fit together."""
    monkeypatch.setattr(dataset, "HASHED", 1 << 27 if whole else 0)
    changed(data / name, -3 if whole else -1, 64)
    with pytest.raises(BachError, match=r"data.* is damaged .*prepare the data set again"):
        Dataset.load(data)


@pytest.mark.parametrize("change", [{"items": 599}, {"windows": 7}, {"users": 1}, {"items": "many"}, {"events": 2**70}])
def test_counts_that_are_not_those_of_the_files(data, change):
    meta = json.loads((data / "meta.json").read_text())
    (data / "meta.json").write_text(json.dumps(meta | {"counts": meta["counts"] | change}))
    with pytest.raises(BachError, match=r"meta\.json is damaged; prepare the data set again"):
        Dataset.load(data)
    meta.pop("checksum")
    (data / "meta.json").write_text(json.dumps(meta))
    assert Dataset.load(data).n_items == 600, "a data set of an earlier version has no checksum"
    (data / "meta.json").write_text(json.dumps(meta | {"counts": meta["counts"] | change}))
    with pytest.raises(BachError, match=r"is damaged .*prepare the data set again"):
        Dataset.load(data)


def test_a_data_set_is_compared_with_its_hash_once(data, monkeypatch):
    asked = []
    hashes = dataset.content_hash
    monkeypatch.setattr(dataset, "content_hash", lambda folder: asked.append(1) or hashes(folder))
    for _ in range(3):
        Dataset.load(data)
    assert len(asked) == 1


def test_a_damaged_data_set_is_prepared_again(tmp_path, capsys):
    lines = [f"u{n % 3},i{n},{n}" for n in range(240)]
    (tmp_path / "my.csv").write_text("user,item,time\n" + "\n".join(lines) + "\n")
    good = prepare("csv", tmp_path / "my.csv", tmp_path / "o", quiet=True).sequence(0).tolist()
    changed(tmp_path / "o" / "sequences.npy", -4)
    again = prepare("csv", tmp_path / "my.csv", tmp_path / "o")
    assert again.sequence(0).tolist() == good and "replaced, because it is damaged" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- JSON, runs, records


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, '{"a": ' + "9" * 6_000 + "}", '{"checksum": 1}', "[1]"]
)
def test_json_that_nobody_writes_is_damage(tmp_path, text):
    (tmp_path / "run.json").write_text(text)
    assert read_json(tmp_path / "run.json") == {}
    with pytest.raises(BachError, match=r"run\.json is damaged"):
        data_of(tmp_path)


@pytest.fixture(scope="module")
def trained(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    params = {"epochs": 1, "batch_size": 512, "n_negatives": 8, "valid_every": 1}
    return fit(build("p-bach", world, 2, **SMALL), world, params, folder, quiet=True).folder


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize("name", ["run.json", "best.safetensors"])
def test_one_bit_of_a_run(world, run, name):
    changed(run / name, (run / name).read_bytes().index(b"auprc") + 8 if name == "run.json" else -30)
    with pytest.raises(BachError, match=f"{name} is damaged"):
        Run.load(run, world)


def test_one_bit_of_a_history(world, run):
    """Anywhere: in the values, the names of columns, or what the file says of itself."""
    loaded, whole = Run.load(run, world), (path := run / "history.parquet").read_bytes()
    good, refused = loaded.history, 0
    for at in range(4, len(whole), 61):
        changed(path, at)
        try:
            assert loaded.history.equals(good), f"byte {at}"
        except BachError as error:
            refused += "history.parquet is damaged" in str(error)
        path.write_bytes(whole)
    assert refused > 20


def test_a_run_of_an_earlier_version_has_no_checksums(world, run):
    about = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(canonical_json({key: x for key, x in about.items() if key != "checksum"}))
    for name in ("best", "resume"):
        path = run / f"{name}.safetensors"
        tensors, told = checkpoint.read_tensors(path)
        save_file(tensors, path, {"about": json.dumps(told)})
    history = Run.load(run, world).history
    history.to_parquet(run / "history.parquet")
    again = fit(build("p-bach", world, 2, **SMALL), world, {"epochs": 2, "batch_size": 512, "n_negatives": 8,
                                                            "valid_every": 1}, run, quiet=True)  # fmt: skip
    assert again.history["loss"].iloc[0] == history["loss"].iloc[0] and len(again.history) == 2
    tensors = load_file(run / "best.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name].to(torch.float64)}, run / "best.safetensors", {"about": "{}"})
    with pytest.raises(BachError, match=r"belongs to another model: .* is 'float64"):
        Run.load(run, world)
    about["identity"]["model"]["params"]["tau"] = "warm"
    (run / "run.json").write_text(canonical_json({key: x for key, x in about.items() if key != "checksum"}))
    with pytest.raises(BachError, match=r"run\.json: model p-bach: invalid parameters\n  tau: "):
        Run.load(run, world)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t, a: (t | {"odd": torch.ones(1)}, a), "resume.safetensors is damaged"),
        (lambda t, a: (t | {"optimizer.exp_avg.none": torch.ones(1)}, a), "resume.safetensors is damaged"),
        (lambda t, a: ({n: x[..., :1] if "exp_avg." in n else x for n, x in t.items()}, a), "has the shape"),
        (lambda t, a: ({n: x for n, x in t.items() if n != "sums.loss"}, a), "resume.safetensors is damaged"),
        (lambda t, a: (t, a | {"rows": 3}), "rows is int"),
        (lambda t, a: (t, {"windows": {}}), "resume.safetensors is damaged"),
        (lambda t, a: (t, [a]), "the file is list"),
    ],
)
def test_a_state_that_does_not_fit(world, run, change, said):
    tensors, about = change(*checkpoint.read_tensors(run / "resume.safetensors"))
    save_file({n: x.contiguous() for n, x in tensors.items()}, run / "resume.safetensors", {"about": json.dumps(about)})
    with pytest.raises(BachError, match=said):
        fit(build("p-bach", world, 2, **SMALL), world, {"epochs": 2, "batch_size": 512, "n_negatives": 8,
                                                        "valid_every": 1}, run, quiet=True)  # fmt: skip


@pytest.mark.parametrize("name", ["../../elsewhere", "/etc", "a/b", "..", 3, None])
def test_a_run_does_not_lead_elsewhere(run, name):
    about = read_json(run / "run.json")
    about["identity"]["data"]["name"] = name
    write_json(run / "run.json", about, checked=True)
    with pytest.raises(BachError, match=r"run\.json is damaged .*; start again with fresh=True"):
        data_of(run)


@pytest.fixture(scope="module")
def evaluated(world, tmp_path_factory):
    folder = tmp_path_factory.mktemp("evaluated")
    evaluate(build("mostpop", world), world, quiet=True).save(folder)
    return folder


def test_an_evaluation_that_was_changed(evaluated, tmp_path):
    folder = shutil.copytree(evaluated, tmp_path / "e")
    path, table = folder / "evaluation-test.json", folder / "evaluation-test.parquet"
    told = read_json(path)
    for change in ({"means": told["means"] | {"AUPRC": 0.9}}, {"protocol": told["protocol"] | {"split": "../../x"}}):
        write_json(path, {**told, **change}, checked=True)
        with pytest.raises(BachError, match=r"evaluation-test\..* is damaged .* run bach evaluate"):
            Evaluation.load(folder)
    path.write_text((evaluated / path.name).read_text().replace('"n": ', '"n": 1'))
    with pytest.raises(BachError, match=r"evaluation-test\.json is damaged"):
        Evaluation.load(folder)
    shutil.copy(evaluated / path.name, path)
    changed(table, -20)
    with pytest.raises(BachError, match=r"evaluation-test\.parquet is damaged"):
        Evaluation.load(folder)


@pytest.mark.parametrize("name", ["status.json", "metrics.json", "evaluation-test.json"])
def test_a_damaged_published_record_is_named(tmp_path, monkeypatch, name):
    (tmp_path / "s.yaml").write_text("name: s\nbase: [quickstart]\ngrid: {method: [mostpop]}\n")
    point = read_sweep(tmp_path / "s.yaml").points[0]
    (folder := tmp_path / "outputs" / "published" / "s" / "p").mkdir(parents=True)
    monkeypatch.setattr(published, "project_root", lambda: tmp_path)
    values = stages(point.p)["single"]
    write_json(folder / "status.json", {"notebooks": {"single": {"values": values}}}, checked=True)
    write_json(folder / "metrics.json", {"single": {"AUPRC": 0.25}}, checked=True)
    write_json(folder / "evaluation-test.json", {"means": {"AUPRC": 0.25}}, checked=True)
    assert published.published(point) == folder
    whole = (folder / name).read_bytes()
    for at in (30, whole.index(b"checksum")):  # without its checksum a record is damaged, too
        (folder / name).write_bytes(whole)
        changed(folder / name, at)
        with pytest.raises(BachError, match=rf"{name} is damaged .*; restore it, e\.g\. with git checkout"):
            published.published(point)


def test_a_report_reads_notebooks_of_its_folder_only(tmp_path):
    (tmp_path / "status.json").write_text('{"status": "done", "notebooks": {}}')
    for names, said in (
        ("[../../secret]", "is not the name of a file"),
        ("3", "notebooks is int"),
        ("[a]", r"a\.ipynb"),
    ):
        (tmp_path / "params.yaml").write_text(f"name: x\nnotebooks: {names}\n")
        (tmp_path / "a.ipynb").write_text('{"cells": 3}')
        with pytest.raises(BachError, match=said):
            report(tmp_path)


# ---------------------------------------------------------------------------------------------------------- indices


def forged(folder, part=None, change=None, **meta):
    """The index with another array or entry of meta.json, and all checksums right."""
    generation = next(folder.glob("gen-*"))
    if part:
        array = np.load(path := generation / f"{part}.npy")
        np.save(path, array if (other := change(array)) is None else other)
    about = json.loads((generation / "meta.json").read_text()) | meta
    for name in about["files"] if "files" not in meta else ():
        whole = (generation / name).read_bytes()
        about["files"][name] = {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
    (generation / "meta.json").write_text(canonical_json(about))
    checksum = hashlib.sha256((generation / "meta.json").read_bytes()).hexdigest()
    (folder / "CURRENT").write_text(f"{generation.name} {checksum}\n")


@pytest.fixture(scope="module")
def codebook(world):
    return made(world, "p-bach-global", "codebook")


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("numbers", lambda x: x.__setitem__(-1, 10**6)),
        ("numbers", lambda x: x.__setitem__(0, -5)),
        ("numbers", lambda x: x.__setitem__(0, 7)),
        ("lists", lambda x: x.__setitem__((0, 0), 600)),
        ("lists", lambda x: x.__setitem__((0, 0), -1)),
        ("peak", lambda x: x[:2]),
        ("vectors", lambda x: x[:3]),
        ("prototypes", lambda x: x[:, :3]),
    ],
)
def test_an_index_whose_arrays_do_not_fit_is_refused(codebook, tmp_path, part, change):
    """Compiled loops look up rows without a check: such an index could read anything in memory."""
    codebook.save(tmp_path / "i")
    forged(tmp_path / "i", part, change)
    with pytest.raises(BachError, match="i is damaged"):
        Retriever.load(tmp_path / "i", codebook.model)


def test_an_index_does_not_lead_elsewhere(codebook, tmp_path):
    folder = codebook.save(tmp_path / "i")
    (folder / "CURRENT").write_text("../elsewhere 0\n")
    with pytest.raises(BachError, match="is not the name of a file or folder"):
        Retriever.load(folder, codebook.model)
    forged(folder, files={"../../secret.npy": {"bytes": 1, "sha256": ""}})
    with pytest.raises(BachError, match="is not the name of a file or folder"):
        Retriever.load(folder, codebook.model)
    shutil.rmtree(folder)
    codebook.save(folder)
    forged(folder, settings={"index": "hnsw", "M": None, "max_M": None})
    with pytest.raises(BachError, match=r"i is damaged \(KeyError: 'lists'\); write it again"):
        Retriever.load(folder, codebook.model)
    forged(folder, strategy=["codebook"], files={})
    with pytest.raises(BachError, match="strategy is list"):
        Retriever.load(folder, codebook.model)
