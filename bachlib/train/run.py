"""A run: the folder of a training with its weights, history and status.

run.json               method, parameters, data set, status, best AUPRC
history.parquet        a row per epoch: see `watch`
best.safetensors       weights with the best validation AUPRC; last.safetensors has those of the last epoch
resume.safetensors     everything needed to resume
environment.json       versions
"""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.files import (
    CHECKSUM,
    code_hash,
    differences,
    output_dir,
    read_json,
    short_hash,
    versions,
    write_json,
    write_table,
)
from bachlib.model.methods import Method, build
from bachlib.model.towers import ItemTower
from bachlib.params import TrainParams, noted
from bachlib.reading import expect, plain_name, read_table, reading
from bachlib.train.checkpoint import AGAIN, load_weights, read_tensors, write_tensors

FREE = {"epochs", "patience", "device", "checkpoint_seconds"}  # a run may be resumed with other values of these
FORM = {
    "identity": {"model": dict, "data": {"name": str, "content_hash": str}, "train": dict},
    "status": str,
    "best": (dict, NoneType),
}  # of run.json, the least
KEPT = "model.safetensors"
CODE = ("model", "rank", "train", "data/dataset.py", "data/windows.py")  # what decides a training beside its input


class Run:
    """`model` has the best weights; `history` is a table; `status` is running, finished, stopped or diverged."""

    def __init__(
        self,
        folder: Path,
        model: nn.Module,
        about: dict[str, Any],
        weights: str = "best",
        dataset: Dataset | None = None,
    ):
        self.folder, self.model, self.about, self.weights, self.dataset = folder, model, about, weights, dataset

    @property
    def status(self) -> str:
        return self.about["status"]

    @property
    def best(self) -> dict[str, Any] | None:
        """Epoch and AUPRC of the best validation."""
        return self.about["best"]

    @property
    def history(self) -> pd.DataFrame:
        if not (path := self.folder / "history.parquet").exists():
            return pd.DataFrame()
        table = read_table(path)
        with reading(path):
            if table.attrs.pop(CHECKSUM, None) not in (None, _checksum(table)):
                raise ValueError("its checksum is another")
        return table

    @classmethod
    def open(cls, folder: Path, model: nn.Module, dataset: Dataset, params: TrainParams, fresh: bool) -> Run:
        """The run of these parameters: a new folder, or one whose run is the same."""
        train = {name: x for name, x in noted(params).items() if name not in FREE}
        identity = {"model": model.config, "data": dataset.identity, "train": train}
        limits = {"epochs": params.epochs, "patience": params.patience}
        if (folder / "run.json").exists() and not fresh:
            there = read_about(folder)
            if different := "; ".join(differences(there["identity"], identity, "there", "here")):
                raise BachError(f"{folder} holds another run: {different}. Choose another folder, or fresh=True")
            return cls(folder, model, there | {"limits": limits}, dataset=dataset)
        folder.mkdir(parents=True, exist_ok=True)
        old = ("run.json", "resume.safetensors", "best.safetensors", "last.safetensors", "history.parquet")
        for path in [*(folder / name for name in old), *folder.glob("evaluation-*"), *folder.glob(".*.partial")]:
            path.unlink(missing_ok=True)
        write_json(folder / "environment.json", versions())
        about = {"identity": identity, "limits": limits, "status": "running", "best": None}
        run = cls(folder, model, about, dataset=dataset)
        run.write()
        return run

    @classmethod
    def load(
        cls, folder: str | Path, dataset: Dataset | None = None, model: nn.Module | None = None, weights: str = "best"
    ) -> Run:
        """Load a run with its best (or last) weights; pass `model` if it was built with your own modules.

        To encode histories and to serve, no data set is needed; the run then knows neither raw ids nor titles.
        """
        folder = Path(folder)
        about = read_about(folder)
        config, path = about["identity"]["model"], folder / f"{weights}.safetensors"
        if model is None:
            with reading(folder / "run.json", AGAIN):
                if config["own"]:
                    raise BachError(f"{folder} was trained with your own {', '.join(config['own'])}: pass model=")
                if dataset is not None:
                    try:
                        model = _built(config, dataset)
                    except BachError as error:
                        raise BachError(f"{folder / 'run.json'}: {error}") from None
                elif config["row"]["objective"] == "counts":
                    raise BachError(f"{folder} is {config['method']}, which counts its data set: pass that")
        if dataset is not None:
            dataset.check_same(about["identity"]["data"]["content_hash"], f"{folder} was trained")
        if model is None or any(True for _ in model.parameters()):
            tensors, told = read_tensors(path)
            if model is None:
                model = rebuilt(config, tensors, path, about["identity"]["data"]["content_hash"])
            else:
                load_weights(model, path, tensors)
            if weights == "best":  # in a training that goes on, run.json may be one validation behind
                about |= {"best": told.get("best") or about["best"]}
        return cls(folder, model.eval(), about, weights, dataset)

    def write(self, rows: list[dict[str, Any]] | None = None, **about: Any) -> None:
        self.about |= about
        if rows:
            table = pd.DataFrame(rows)
            table.attrs[CHECKSUM] = _checksum(table)
            write_table(self.folder / "history.parquet", table)
        write_json(self.folder / "run.json", self.about, checked=True)

    def __repr__(self) -> str:
        best = f", best AUPRC {self.best['auprc']:.4f} in epoch {self.best['epoch']}" if self.best else ""
        return f"Run({self.folder.name}: {self.status}{best})"


def _built(config: dict[str, Any], dataset: Any, **parts: nn.Module) -> nn.Module:
    params = dict(config["params"])
    method = config["method"] if config["method"] != "own" else Method(**config["row"])
    return build(method, dataset, params.pop("k"), name=config.get("name"), **parts, **params)


def rebuilt(config: dict[str, Any], tensors: dict[str, Tensor], path: Path, content_hash: str | None) -> nn.Module:
    """A model from its configuration and weights alone: the weights have the sizes that else the data set gives."""
    with reading(path, AGAIN):
        table = tensors["item_tower.table"]
        width = next((x.shape[1] for name, x in tensors.items() if name.endswith(".context")), 0)
        sizes = SimpleNamespace(
            n_items=len(table), n_users=len(tensors.get("gate.logits", ())), cold=None,
            context=np.empty((0, width)) if width else None, meta={"content_hash": content_hash},
        )  # fmt: skip
        tower = ItemTower(torch.zeros_like(table), config["params"]["item_width"])
        model = _built(config, sizes, item_tower=tower)
        model.config = config
        load_weights(model, path, tensors)
    return model


def keep_model(model: nn.Module, folder: Path) -> None:
    """Write what `kept_model` needs to build this model again; nothing if it has modules of its owner."""
    if not model.config.get("own", True):
        about = {"config": model.config, "built_on": getattr(model, "built_on", None)}
        write_tensors(folder / KEPT, model.state_dict(), about)


def kept_model(folder: Path) -> nn.Module:
    """The model that `keep_model` wrote into this folder."""
    if not (folder / KEPT).exists():
        why = "an earlier version wrote it, or the model has modules of your own"
        raise BachError(f"{folder.parent} holds no model ({why}): give its run or model")
    tensors, told = read_tensors(folder / KEPT)
    with reading(folder / KEPT, AGAIN):
        expect(told, {"config": {"row": dict, "params": dict, "own": dict, "method": str}})
    return rebuilt(told["config"], tensors, folder / KEPT, told.get("built_on")).eval()


def _checksum(table: pd.DataFrame) -> str:
    return short_hash(table.to_json(orient="split", double_precision=15))


def other_data(folder: Path, dataset: Dataset) -> bool:
    """Is the training in a folder one on other content of this data set?"""
    known = read_json(folder / "run.json").get("identity", {}).get("data", {})
    return known.get("content_hash") not in (None, dataset.meta["content_hash"])


def name_of_run(config: dict[str, Any], data: dict[str, Any], params: TrainParams) -> str:
    """The folder of a training in outputs/runs: method, data, k and seed, and a hash of all that decides the training.

    `config`: of the model; `data`: its name, draw of cold users and context. The content of the data is compared when a
    run is opened, so the name is known before the data is prepared.
    """
    chosen = {"data": data["name"], "strict": data.get("strict", {}), "model": config, "code": code_hash(CODE)}
    chosen |= {"context": data["context"]} if "context" in data else {}
    chosen |= {"train": {key: x for key, x in noted(params).items() if key not in ("device", "checkpoint_seconds")}}
    label, k = re.sub(r"-[0-9a-f]{8}$", "", data["name"]), config.get("params", {}).get("k", "")
    method = config.get("name", config.get("method", "own")).replace(" ", "-")
    return f"{method}-{label}-k{k}-s{params.seed}-{short_hash(chosen)}"


def find_run(name: str | Path) -> Path:
    """The folder of a run: a path, the name of a folder in outputs/runs, or the beginning of one name there."""
    runs = output_dir("runs")
    for folder in (Path(name), runs / name):
        if folder.is_dir():
            return folder
    there = sorted(path.name for path in runs.glob("*") if path.is_dir() and not path.name.startswith("."))
    fitting = [run for run in there if run.startswith(str(name).rstrip("…"))]
    if len(fitting) == 1:
        return runs / fitting[0]
    if fitting:
        raise BachError(f"{len(fitting)} runs begin with {name}: {', '.join(fitting)}; give more of the name")
    raise BachError(f"there is no run {name}; in {runs} there are {', '.join(there) or 'none'}")


def data_of(folder: Path, data: str | Path | Dataset | None = None) -> Dataset:
    """The data set of a run, with its cold users if it had any: from outputs/data, from the folder `data`, or as given.

    A context is not kept with the run: then only the data set itself will do.
    """
    if isinstance(data, Dataset):
        return data
    told = read_about(folder)["identity"]["data"]
    if "context" in told:
        needed = "a context, which is not kept with it: in Python, pass the data set, dataset.with_context(…)"
        raise BachError(f"{folder.name} was trained on data with {needed}")
    dataset = Dataset.load(data or output_dir("data", told["name"]))
    return dataset.strict(**told["strict"]) if "strict" in told else dataset


def read_about(folder: Path) -> dict[str, Any]:
    if not (folder / "run.json").exists():
        raise BachError(f"{folder} is not a run (it has no run.json)")
    if not (about := read_json(path := folder / "run.json")):
        raise BachError(f"{path} is damaged; {AGAIN}")
    with reading(path, AGAIN):
        expect(about, FORM)
        plain_name(about["identity"]["data"]["name"])
        if about["best"]:
            expect(about["best"], {"epoch": int, "auprc": float}, "best")
    return about
