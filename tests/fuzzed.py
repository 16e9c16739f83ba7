"""What is fuzzed: good files, how they are read, and how somebody would forge their checksums."""

import copy
import csv
import hashlib
import io
import itertools
import json
import os
import shutil
import tempfile
import time
import zipfile
from collections.abc import Callable
from datetime import date
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from logs import (
    as_raw,
    plain_pipeline,
    random_events,
    tar_gz,
    write_amazon,
    write_atomic,
    write_kuairand,
    write_lastfm,
    write_movielens_csv,
    write_netflix,
    write_rows,
    write_taobao,
)
from safetensors.torch import load_file, save_file
from test_journey import shop, wheel

from bachlib.data import Dataset, planted, prepare
from bachlib.data.dataset import content_hash
from bachlib.data.sources import SOURCES
from bachlib.evaluate import Evaluation, evaluate
from bachlib.experiment import published
from bachlib.experiment.settings import given, read_experiment
from bachlib.experiment.sweep import read_sweep
from bachlib.files import canonical_json, read_json, write_json
from bachlib.model.methods import build
from bachlib.serve import Retriever
from bachlib.train import Run, checkpoint, fit, loop

SMALL = {"d": 8, "ff": 8, "item_width": 8}
EVENTS = random_events(5, n_users=5, n_items=90, n=420, ties=False)
LASTFM = SOURCES["lastfm-1k"].log
MY = {"user": "who", "item": "what", "time": "when", "rating": "stars"}


class Fuzzer(NamedTuple):
    name: str
    make: Callable[[Path], Any]  # write the good files
    read: Callable[[Path], Any]
    spoils: Callable[[Path], bool] = lambda path: True
    ours: bool = False  # every damage has to be noticed
    seal: Callable[[Path, Path], bool] | None = None  # write the checksums again; was there one?
    plain: Callable[[Path], Any] | None = None  # read the log in plain Python


# ------------------------------------------------------------------------------------------------------- raw logs


def prepared(source: str, name: str, folder: Path, **params: Any) -> dict:
    out = folder.parent / "out"
    try:
        data = prepare(source, folder / name, out, min_items=31, quiet=True, **params)
        return {"raw": as_raw(data), "titles": data.titles, "genres": data.items["genres"].map(list).tolist()}
    finally:
        shutil.rmtree(out, ignore_errors=True)


def log(name: str, source: str, file: str, make: Callable, plain: Callable | None = None, **params: Any) -> Fuzzer:
    return Fuzzer(name, make, partial(prepared, source, file, **params), plain=plain)


def make_csv(folder: Path) -> None:
    lines = ["who,what,when,stars", *(f'"u{u}",i{i},{t},{r}' for u, i, r, t in EVENTS)]
    (folder / "my.csv").write_text("\n".join(lines) + "\n")


def make_movielens(folder: Path) -> None:
    write_rows(folder / "ratings.dat", EVENTS, "::")
    titles = [f"{n}::Title {n} (1990)::Drama|Comedy" for n in range(1, 91)]
    (folder / "movies.dat").write_text("\n".join(titles) + "\n", encoding="latin-1")


EARLY = time.struct_time((2000, 1, 1, 0, 0, 0, 5, 1, 0))  # zips note the time, and should be the same each time


def make_zip(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made, zipfile.ZipFile(folder / "ml-1m.zip", "w", zipfile.ZIP_DEFLATED) as to:
        make_movielens(Path(made))
        for path in sorted(Path(made).iterdir()):
            with patch("time.localtime", lambda *_: EARLY):
                to.writestr(f"ml-1m/{path.name}", path.read_bytes())


def make_journey(folder: Path) -> None:
    with patch("time.localtime", lambda *_: EARLY):
        wheel(folder, *shop(4, 80, 700))


def make_parquet(folder: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(EVENTS, columns=["who", "what", "stars", "when"])
    frame.assign(who="u" + frame["who"].astype(str)).to_parquet(folder / "my.parquet")


def make_tar(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as made:
        log = write_lastfm(Path(made, "log"), EVENTS)
        tar_gz(folder / "lastfm.tar.gz", {f"lastfm-dataset-1K/{LASTFM}": log})


def make_yambda(folder: Path) -> None:
    import pandas as pd

    frame = pd.DataFrame(EVENTS, columns=["uid", "item_id", "is_organic", "timestamp"])
    frame.to_parquet(folder / "likes.parquet")


def make_atomic(folder: Path) -> None:
    write_atomic(folder / "my.inter", EVENTS)
    rows = [f"{n}\tTitle {n}\tDrama Comedy\n" for n in range(1, 91)]
    (folder / "my.item").write_text("item_id:token\ttitle:token_seq\tgenres:token_seq\n" + "".join(rows))


def text_of(folder: Path, name: str) -> str:
    return (folder / name).read_bytes().decode("utf-8-sig").replace("\r\n", "\n")


def number(text: str) -> float:
    """A number as DuckDB reads it: 1_000 and 0x10, too, but no digits beyond ASCII."""
    if not text.isascii():
        raise ValueError(f"not a number: {text!r}")
    try:
        return float(text)
    except ValueError:
        return int(text, 0)


def plain_log(folder: Path, name: str, delimiter: str, order: str, header: int = 0) -> dict:
    """user → items of a log of plain lines; `order`: of the columns user, item, rating, time, one letter each."""
    events = []
    for n, row in enumerate(text_of(folder, name).removesuffix("\n").split("\n")):
        if n >= header and row:
            fields = dict(zip(order, row.split(delimiter), strict=True))
            user, item, time = (number(fields[name]) for name in "uit")
            if user % 1 or item % 1:
                raise ValueError("an id that is not whole")
            user, item, time = int(user), int(item), int(time)
            events.append((user, item, number(fields.get("r", "5")), time))
            if not np.isfinite(events[-1][2]):
                raise ValueError("a rating that is not finite")
    return plain_pipeline(events, min_items=31, rated="r" in order)


def plain_netflix(folder: Path) -> dict:
    events, movie = [], 0
    for row in filter(None, text_of(folder, "combined_data_1.txt").split("\n")):
        if row.endswith(":"):
            movie = int(row[:-1])
        else:
            user, rating, day = row.split(",")
            events.append((int(number(user)), movie, int(number(rating)), date.fromisoformat(day.strip()).toordinal()))
    return plain_pipeline(events, min_items=31)


def plain_csv(folder: Path) -> dict:
    rows = list(csv.reader(io.StringIO(text_of(folder, "my.csv"), newline=""), strict=True))
    at = {name: rows[0].index(column) for name, column in MY.items()}
    events = []
    for row in filter(None, rows[1:]):
        user, item = row[at["user"]], row[at["item"]]
        if len(row) != len(rows[0]) or not user or not item:
            raise ValueError("a field is missing")
        events.append((user, item, number(row[at["rating"]]), number(row[at["time"]])))
    return plain_pipeline(events, min_items=31)


# ------------------------------------------------------------------------------------------------- our own folders


@cache
def home() -> Path:
    """A prepared world and its model, made once in a process."""
    folder = Path(tempfile.mkdtemp(prefix="bach-fuzz-"))
    world = planted.write_world(folder / "world", n_users=40, n_items=400, n_interests=3, mean_events=70, seed=1)
    prepare("planted", world, folder / "data", min_items=31, quiet=True)
    return folder


@cache
def data() -> Dataset:
    return Dataset.load(home() / "data")


@cache
def model(name: str) -> torch.nn.Module:
    return build(name, data(), 3, **SMALL)


def make_data(folder: Path) -> None:
    shutil.copytree(home() / "data", folder, dirs_exist_ok=True)


def read_data(folder: Path) -> dict:
    found = Dataset.load(folder)
    meta = {key: found.meta.get(key) for key in ("source", "params", "steps", "counts", "inputs", "content_hash")}
    tables = {"users": found.users, "items": found.items.assign(genres=found.items["genres"].map(tuple))}
    arrays = {"flat": np.array(found.sequences), "offsets": found.offsets[:], **found.truth._asdict()}
    return {**tables, **arrays, "meta": meta, "windows": found.n_windows}


def seal_data(folder: Path, path: Path) -> bool:
    meta = json.loads((folder / "meta.json").read_text())
    if path.name != "meta.json":
        meta["content_hash"] = content_hash(folder)
    write_json(folder / "meta.json", {key: x for key, x in meta.items() if key != "checksum"}, checked=True)
    return True


def make_run(folder: Path) -> None:
    train = {"epochs": 2, "batch_size": 64, "n_negatives": 8, "valid_every": 1}
    clock = SimpleNamespace(monotonic=itertools.count(1).__next__)  # the same files each time
    with patch.object(loop, "time", clock):
        fit(build("p-bach", data(), 3, **SMALL), data(), train, folder, quiet=True)


def read_run(folder: Path) -> dict:
    """The run with its best and its last weights, its history, and a training that goes on from its state."""
    best, last = (Run.load(folder, data(), weights=name) for name in ("best", "last"))
    fresh = build("p-bach", data(), 3, **SMALL)
    optimizer = torch.optim.Adam(fresh.parameters())
    sums, about = checkpoint.load(folder / "resume.safetensors", fresh, optimizer)
    # a copy: it is mapped from the file, into which the fuzzer writes
    state = {name: copy.deepcopy(optimizer.state[x]) for name, x in fresh.named_parameters()}
    weights = {name: of.state_dict() for name, of in (("best", best.model), ("last", last.model), ("now", fresh))}
    told = {key: best.about.get(key) for key in ("identity", "limits", "status", "best")}
    return {"about": told, "history": best.history, "sums": sums, "state": state, "at": about, **weights}


def seal_json(folder: Path, path: Path) -> bool:
    """As a file of an earlier version, or with the right checksum."""
    known = json.loads((folder / path).read_text())
    write_json(folder / path, {key: x for key, x in known.items() if key != "checksum"}, checked=len(str(known)) % 2)
    return True


def seal_run(folder: Path, path: Path) -> bool:
    if path.suffix == ".json":
        return seal_json(folder, path)
    if path.suffix != ".safetensors":
        return False
    with open(folder / path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        told = json.loads(file.read(size))["__metadata__"]
    save_file(load_file(folder / path), folder / path, {"about": told["about"]})  # as an earlier version did
    return True


def make_index(name: str, strategy: str, folder: Path) -> None:
    Retriever(model(name), strategy, dataset=data()).save(folder)


def read_index(name: str, folder: Path) -> dict:
    found = Retriever.load(folder, model(name))
    slate = found.retrieve(data().history(np.arange(3), "test"), 5)
    parts = {part: x for part, x in found.catalogue._asdict().items() if isinstance(x, np.ndarray)}
    parts |= found.catalogue.codebook._asdict() if found.catalogue.codebook is not None else {}
    labels = {"raw": list(found.catalogue.labels.raw_ids or []), "genres": list(map(list, found.genres or []))}
    return parts | labels | {"items": slate.items, "scores": slate.scores, "why": found.why, "set": found.settings}


def seal_index(folder: Path, path: Path) -> bool:
    """All checksums again. Not those of faiss's own file: its reader trusts what it reads."""
    if path.name in ("neighbours.faiss", "CURRENT"):
        return False
    generation = next(folder.glob("gen-*"))
    meta = json.loads((generation / "meta.json").read_text())
    if path.name in meta["files"]:
        whole = (folder / path).read_bytes()
        meta["files"][path.name] = {"bytes": len(whole), "sha256": hashlib.sha256(whole).hexdigest()}
        (generation / "meta.json").write_text(canonical_json(meta))
    checksum = hashlib.sha256((generation / "meta.json").read_bytes()).hexdigest()
    (folder / "CURRENT").write_text(f"{generation.name} {checksum}\n")
    return True


def make_record(folder: Path) -> None:
    """As `bach publish` writes it, in outputs/published/<sweep>/<point>."""
    point = record_of().point
    target = folder / "outputs" / "published" / "mine" / "point"
    target.mkdir(parents=True)
    evaluate(model("p-bach"), data(), quiet=True).save(target, compact=True)
    write_json(target / "metrics.json", {"single": {"AUPRC": 0.25}}, checked=True)
    values = published.stages(point.p)["single"]
    told = {"status": "done", "notebooks": {"single": {"seconds": 1.0, "values": values, "code": "0"}}}
    write_json(target / "status.json", told, checked=True)


class Record(NamedTuple):
    point: Any


@cache
def record_of() -> Record:
    with tempfile.TemporaryDirectory() as folder:
        (path := Path(folder, "s.yaml")).write_text("name: s\nbase: [quickstart]\ngrid: {method: [p-bach]}\n")
        return Record(read_sweep(path).points[0])


def seal_record(folder: Path, path: Path) -> bool:
    return path.suffix == ".json" and seal_json(folder, path)


def read_record(folder: Path) -> dict:
    with patch.object(published, "project_root", lambda: folder):
        found = published.published(record_of().point)
    if found is None:
        return {}
    known = Evaluation.load(found)
    told = {
        "metrics": read_json(found / "metrics.json")["single"],
        "status": read_json(found / "status.json")["notebooks"],
    }
    return {"means": known.means, "ranks": known.ranks, "about": known.about, "of": known.protocol, **told}


# ----------------------------------------------------------------------------------------------------- parameters

PARAMS = """# a comment
name: mine
source: csv
path: my.csv
columns: {user: who, item: what, time: when}
notebooks: [03_data, 04_train]
method: p-bach
k: 4
d: 32
tau: 0.07
kernel: power-spherical
seed: 3
epochs: 20
learning_rate: 1.0e-3
log_q: false
dates: null
min_rating: 4.0
"""
OVERLAY = "base: [mine.yaml]\nname: more\nk: 8\n"
SWEEP = "name: some\nabout: a sweep\nbase: [mine.yaml]\nset: {epochs: 3}\ngrid:\n  k: [2, 4]\n  tau: [0.05, 0.07]\n"


def make_params(folder: Path) -> None:
    (folder / "my.csv").write_text("who,what,when\n")
    for name, text in (("mine.yaml", PARAMS), ("more.yaml", OVERLAY), ("sweep.yaml", SWEEP)):
        (folder / name).write_text(text)
    (folder / "set.yaml").write_text("k=4\nseed=12\ntau=0.1\nmethod=p-bach\ndates=[2000-01-01, 2001-01-01]\n")


def read_params(folder: Path) -> dict:
    """The experiment, the same with values of --set, one with a base, and a sweep."""
    words = (folder / "set.yaml").read_text(errors="surrogateescape").splitlines()
    there = os.getcwd()
    os.chdir(folder)
    try:
        first = read_experiment("mine.yaml")
        second = read_experiment("mine.yaml", {**given([word for word in words if word]), "dates": None})
        points = read_sweep("sweep.yaml").points
        return {"all": [p.model_dump() for p in (first, second, read_experiment("more.yaml"))], "n": len(points)}
    finally:
        os.chdir(there)


LOGS = [
    log("csv", "csv", "my.csv", make_csv, plain_csv, columns=MY),
    log("movielens", "movielens-1m", "", make_movielens, lambda to: plain_log(to, "ratings.dat", "::", "uirt")),
    log("ratings", "movielens-20m", "ratings.csv", lambda to: write_movielens_csv(to / "ratings.csv", EVENTS),
        lambda to: plain_log(to, "ratings.csv", ",", "uirt", 1)),
    log("zip", "movielens-1m", "ml-1m.zip", make_zip),
    log("taobao", "taobao", "log.csv", lambda to: write_taobao(to / "log.csv", EVENTS),
        lambda to: plain_log(to, "log.csv", ",", "ui_bt")),
    log("netflix", "netflix", "combined_data_1.txt", lambda to: write_netflix(to / "combined_data_1.txt", EVENTS),
        plain_netflix),
    log("parquet", "parquet", "my.parquet", make_parquet, columns=MY),
    log("journey", "complete-journey", "", make_journey),
    log("amazon", "amazon-2023", "my.csv", lambda to: write_amazon(to / "my.csv", EVENTS)),
    log("kuairand", "kuairand", "", lambda to: write_kuairand(to / "log_a.csv", EVENTS)),
    log("lastfm", "lastfm-1k", "", lambda to: write_lastfm(to / LASTFM, EVENTS)),
    log("tar", "lastfm-1k", "lastfm.tar.gz", make_tar),
    log("yambda", "yambda", "", make_yambda),
    log("recbole", "recbole", "", make_atomic),
]  # fmt: skip
OURS = [
    Fuzzer("data", make_data, read_data, lambda path: path.parent == Path("."), True, seal_data),
    Fuzzer("run", make_run, read_run, lambda path: path.name != "environment.json", True, seal_run),
    Fuzzer("record", make_record, read_record, ours=True, seal=seal_record),
    Fuzzer("index", partial(make_index, "p-bach-global", "codebook"), partial(read_index, "p-bach-global"), ours=True,
           seal=seal_index),
    Fuzzer("neighbours", partial(make_index, "p-bach", "two-step"), partial(read_index, "p-bach"), ours=True,
           seal=seal_index),
]  # fmt: skip
FUZZERS = {
    one.name: one for one in [*LOGS, Fuzzer("params", make_params, read_params, lambda p: p.suffix == ".yaml"), *OURS]
}
