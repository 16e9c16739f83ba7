"""A run: the folder in which a training leaves its weights, history and status, and the model with the best weights.

run.json               method, parameters, data set, status, best AUPRC
history.parquet        a row per epoch: see `watch`
best.safetensors       weights with the best validation AUPRC; last.safetensors those of the last epoch
resume.safetensors     everything needed to go on
environment.json       versions
"""

from __future__ import annotations

import difflib
import io
import json
import os
from pathlib import Path
from typing import Any

import pandas as pd
import yaml
from torch import nn

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.model.methods import Method, build
from bachlib.params import ModelParams, TrainParams
from bachlib.records import canonical_json, output_dir, short_hash, versions, write_text
from bachlib.train.checkpoint import load_weights
from bachlib.train.validation import average_precision, recall, sample_users, target_ranks

# how long or where one trains does not make it another run
FREE = {"epochs", "patience", "device", "checkpoint_seconds"}


class Run:
    """`model` has the best weights; `history` is a table; `status` is running, finished, stopped or diverged."""

    def __init__(self, folder: Path, model: nn.Module, about: dict[str, Any]):
        self.folder, self.model, self.about = folder, model, about

    @property
    def status(self) -> str:
        return self.about["status"]

    @property
    def best(self) -> dict[str, Any]:
        """epoch and AUPRC of the best look at the validation items."""
        return self.about["best"]

    @property
    def history(self) -> pd.DataFrame:
        path = self.folder / "history.parquet"
        return pd.read_parquet(path) if path.exists() else pd.DataFrame()

    @classmethod
    def open(cls, folder: Path | None, model: nn.Module, dataset: Dataset, params: TrainParams, fresh: bool) -> Run:
        """The run of these parameters: a new folder, or one whose run is the same."""
        identity = {
            "model": model.config,
            "data": {"name": dataset.folder.name, "content_hash": dataset.meta["content_hash"]},
            "train": {name: value for name, value in params.model_dump().items() if name not in FREE},
        }
        if folder is None:
            name = f"{model.config.get('method', 'own')}-{dataset.folder.name}-{short_hash(identity)}"
            folder = output_dir("runs", name)
        if (folder / "run.json").exists() and not fresh:
            there = read_about(folder)
            if different := _differences(there["identity"], identity):
                raise BachError(
                    f"{folder} holds another run: {'; '.join(different)}. "
                    "Choose another folder, or fresh=True to replace it"
                )
            return cls(folder, model, there)
        folder.mkdir(parents=True, exist_ok=True)
        old = ("resume.safetensors", "best.safetensors", "last.safetensors", "history.parquet", "metrics.json")
        for path in [*(folder / name for name in old), *folder.glob(".*.partial")]:
            path.unlink(missing_ok=True)
        write_text(folder / "environment.json", canonical_json(versions()))
        run = cls(folder, model, {"identity": identity, "status": "running", "best": None})
        run.write()
        return run

    @classmethod
    def load(cls, folder: str | Path, dataset: Dataset, model: nn.Module | None = None, weights: str = "best") -> Run:
        """A run from its folder, with its best (or last) weights; `model` only where it has parts of your own."""
        folder = Path(folder)
        about = read_about(folder)
        config = about["identity"]["model"]
        if model is None:
            if config["own"]:
                raise BachError(f"{folder} was trained with your own {', '.join(config['own'])}: pass the model")
            params = dict(config["params"])
            method = config["method"] if config["method"] != "own" else Method(**config["row"])
            model = build(method, dataset, params.pop("k"), **params)
        if about["identity"]["data"]["content_hash"] != dataset.meta["content_hash"]:
            raise BachError(f"{folder} was trained on another data set than {dataset!r}")
        if any(True for _ in model.parameters()):
            load_weights(model, folder / f"{weights}.safetensors")
        return cls(folder, model.eval(), about)

    def measure(self, dataset: Dataset) -> dict[str, float]:
        """Test numbers of the best weights, over up to 10,000 users; kept in metrics.json and shown."""
        ranks = target_ranks(self.model, dataset, sample_users(dataset, 10_000, 0), "test")
        found = {f"R@{at}": float(recall(ranks, at).mean()) for at in (10, 50, 100)}
        found["AUPRC"] = float(average_precision(ranks).mean())
        write_text(self.folder / "metrics.json", canonical_json(found))
        print("test: " + ", ".join(f"{name} {value:.4f}" for name, value in found.items()))
        return found

    def write(self, rows: list[dict[str, Any]] | None = None, **about: Any) -> None:
        self.about |= about
        if rows:
            table = io.BytesIO()
            pd.DataFrame(rows).to_parquet(table)
            partial = self.folder / f".history.{os.getpid()}.partial"
            partial.write_bytes(table.getvalue())
            os.replace(partial, self.folder / "history.parquet")
        write_text(self.folder / "run.json", canonical_json(self.about))

    def __repr__(self) -> str:
        best = f", best AUPRC {self.best['auprc']:.4f} in epoch {self.best['epoch']}" if self.best else ""
        return f"Run({self.folder.name}: {self.status}{best})"


def split_params(settings: list[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """["d=32", "epochs=5"] → (parameters of the model, parameters of the training)."""
    chosen: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    tables = ({*ModelParams.model_fields} - {"k", "seed"}, {*TrainParams.model_fields} - {"seed"})
    for setting in settings:
        name, equals, value = setting.partition("=")
        which = next((n for n, table in enumerate(tables) if name in table), None)
        if which is None or not equals:
            near = difflib.get_close_matches(name, sorted(tables[0] | tables[1]), 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise BachError(f"--set {setting}: should be name=value with a parameter of the model or training{hint}")
        chosen[which][name] = yaml.safe_load(value)
    return chosen


def read_about(folder: Path) -> dict[str, Any]:
    if not (folder / "run.json").exists():
        raise BachError(f"{folder} is not a run (it has no run.json)")
    return json.loads((folder / "run.json").read_text(encoding="utf-8"))


def _differences(there: Any, here: Any, name: str = "") -> list[str]:
    if isinstance(there, dict) and isinstance(here, dict):
        keys = [*there, *(key for key in here if key not in there)]
        return [d for key in keys for d in _differences(there.get(key), here.get(key), f"{name}.{key}".lstrip("."))]
    return [] if there == here else [f"{name} is {there!r} there and {here!r} here"]
