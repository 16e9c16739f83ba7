"""`bach report`: one HTML file of a training, or of a run of the notebooks, that works without network and kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.files import MODELS, output_dir, write_text
from bachlib.model.twotower import TwoTower
from bachlib.show import chapters, portrait, scores
from bachlib.show.document import Section, escape, page, said, settings
from bachlib.show.people import People, people
from bachlib.show.steerable import steering
from bachlib.train import Run
from bachlib.train.run import data_of, read_about

NAME = "report.html"


def report(folder: str | Path, *, data: Path | None = None, model: nn.Module | None = None) -> Path:
    """Write `report.html` into a run folder, of `bach train` or of `bach run`; returns where it is.

    `data`: the prepared data set, if it is not in outputs/data; `model`: only where it has parts of your own.
    """
    folder = Path(folder)
    if (folder / "run.json").exists():
        text = _training(folder, data, model)
    elif (folder / "params.yaml").exists() and (folder / "status.json").exists():
        if data is not None or model is not None:
            raise BachError(f"{folder} is a run of notebooks: a data set or model can be given for a training run only")
        text = _notebooks(folder)
    else:
        raise BachError(
            f"{folder} is not a run: it has neither run.json (bach train) nor params.yaml and status.json (bach run)"
        )
    write_text(folder / NAME, text)
    return folder / NAME


# --------------------------------------------------------------------------------------------------- a training run


def opened(folder: Path, data: Path | None = None, model: nn.Module | None = None) -> tuple[Run, Dataset] | str:
    """The run and its data, or in words what is missing for that."""
    about = read_about(folder)
    told, config = about["identity"]["data"], about["identity"]["model"]
    if data is not None and not (data / "meta.json").exists():
        raise BachError(f"{data} is not a prepared data set (it has no meta.json)")
    if not ((data or output_dir("data", told["name"])) / "meta.json").exists():
        return f"its data set, {told['name']}, is not in {output_dir('data')}"
    dataset = data_of(folder, data)
    if dataset.meta["content_hash"] != told["content_hash"]:
        return f"the data set {told['name']} is no longer the one it was trained on"
    if config.get("own") and model is None:
        return f"it has parts of your own ({', '.join(config['own'])}): report(folder, model=…) takes the model"
    if config["row"]["objective"] != "counts" and not (folder / "best.safetensors").exists():
        return "it has no weights yet"
    return Run.load(folder, dataset, model), dataset


def _training(folder: Path, data: Path | None, model: nn.Module | None) -> str:
    about, there = read_about(folder), opened(folder, data, model)
    sections, sliders = [], None
    if isinstance(there, str):
        sections.append(Section("numbers", "How good it is", f"Nothing can be shown of the model: {escape(there)}."))
    else:
        run, dataset = there
        sections.append(scores.numbers(run, dataset))
        if isinstance(run.model, TwoTower):
            of = people(run.model, dataset)
            told, sliders = steering_section(run.model, dataset, of)
            sections += [told, portrait.heads(run.model, dataset, of), portrait.one_user(run.model, dataset, of)]
            sections.append(portrait.training(run.history, run.model, of))
        else:
            told = "This method counts: it has no vectors, heads or π, and nothing was trained."
            sections.append(Section("heads", "What the heads mean", told))
    identity = about["identity"]
    values = {"method": identity["model"].get("method"), **_unwrapped(identity), "limits": about.get("limits", {})}
    sections.append(Section("parameters", "Parameters", "All that was set, defaults included.", [settings(values)]))
    sections.append(_environment(folder))
    return page(folder.name, _facts(about), sections, sliders)


def steering_section(model: TwoTower, dataset: Dataset, of: People) -> tuple[Section, dict[str, Any] | None]:
    """Sliders for π_u, and the data they work on."""
    key, title = "steering", "Steer π_u"
    if model.kernel is None:
        told = "This method takes the closest head and weighs none: there is no π to steer."
        return Section(key, title, told), None
    lead = (
        "Move the weight of a head, or forbid it, and the slate is ranked anew, here in the browser. "
        "Click on an item to see why it is there. Arrows compare with the model's own slate."
    )
    if of.left:
        lead += f" Of {model.k} heads each user has sliders for the {len(of.shown)} largest, and one for all others."
    return Section(key, title, lead, ['<div id="steer"></div>']), steering(model, dataset, of)


def _unwrapped(identity: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the model without their wrapping."""
    model = {**identity["model"].get("params", {}), **identity["model"].get("row", {})}
    own = identity["model"].get("own")
    return {"model": model | ({"own": own} if own else {}), "train": identity["train"], "data": identity["data"]}


def _facts(about: dict[str, Any]) -> str:
    identity, best = about["identity"], about.get("best")
    facts = {"method": identity["model"].get("method"), "data": identity["data"]["name"], "status": about["status"]}
    if best:
        facts |= {"best epoch": best["epoch"], "validation AUPRC": f"{best['auprc']:.4f}"}
    return f"A training run: {', '.join(f'{name} {escape(said(value))}' for name, value in facts.items())}."


def _environment(folder: Path) -> Section:
    path = folder / "environment.json"
    versions = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    lead = "The versions it was made with." if versions else "Nobody noted the versions it was made with."
    return Section("environment", "Environment", lead, [settings(versions)] if versions else [])


# --------------------------------------------------------------------------------------------- a run of the notebooks


def _notebooks(folder: Path) -> str:
    run = chapters.read(folder)
    told, sliders = _handed_over(folder)
    sections = [chapters.summary(run), told, *chapters.chapters(run), _environment(folder)]
    return page(run.name, chapters.facts(run), sections, sliders)


def _handed_over(folder: Path) -> tuple[Section, dict[str, Any] | None]:
    """Steering of the model that a notebook has handed over with its record, the last one."""
    path = folder / MODELS
    models = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    key, title = "steering", "Steer π_u"
    if not models:
        return Section(key, title, "No notebook of this run has handed over a model to steer."), None
    notebook, place = list(models.items())[-1]
    model = output_dir() / place
    if not (model / "run.json").exists():
        return Section(key, title, f"The model that {escape(notebook)} has handed over is gone."), None
    there = opened(model)
    if isinstance(there, str):
        why = escape(f"The model that {notebook} has handed over cannot be shown: {there}.")
        return Section(key, title, why), None
    run, dataset = there
    if not isinstance(run.model, TwoTower):
        return Section(key, title, f"The model that {escape(notebook)} has handed over has no heads to steer."), None
    section, sliders = steering_section(run.model, dataset, people(run.model, dataset))
    which = f"The model is {run.folder.name}, trained by {notebook}. "
    return section._replace(lead=escape(which) + section.lead), sliders
