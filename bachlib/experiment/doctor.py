"""What `bach doctor`, `bach methods` and `bach params` print: what is installed, and what there is to choose from."""

from __future__ import annotations

import os
import platform
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args, get_origin

import pandas as pd
import torch
from pydantic.fields import FieldInfo

from bachlib import EXTRAS, __version__
from bachlib.experiment.settings import Experiment, experiment_of, is_overlay, params_file, read_experiment, read_yaml
from bachlib.files import output_dir, project_root, versions
from bachlib.model.methods import METHODS
from bachlib.params import ModelParams, PrepareParams, TrainParams, WorldParams

PARTS = {"prepare": PrepareParams, "world": WorldParams, "model": ModelParams, "train": TrainParams}


def findings() -> Iterator[str]:
    """The report, line by line: ✓ installed, – missing and optional, ✗ wrong."""
    yield f"bachlib {__version__}, {platform.platform()}, {platform.python_implementation()}\n\nversions"
    yield from (f"  {name:<14} {version}" for name, version in versions().items())
    yield f"\nthreads        torch {torch.get_num_threads()}, cores {os.cpu_count()}"
    free = shutil.disk_usage(next(p for p in [output_dir(), *output_dir().parents] if p.exists())).free
    yield f"outputs        {output_dir()} ({free / 1e9:.0f} GB free)\n\nparts"
    yield from (f"  {mark} {name:<12} {text}" for mark, name, text in _parts())


def _parts() -> Iterator[tuple[str, str, str]]:
    uses = {"lab": "notebooks, pictures, reports", "sweep": "bach sweep", "export": "bach export"}
    for extra, use in uses.items():
        missing = [module for module in EXTRAS[extra] if find_spec(module) is None]
        without = f"not installed: {', '.join(missing)} (for {use}): pip install 'bachlib[{extra}]'"
        yield ("–", extra, without) if missing else ("✓", extra, use)
    found = [f"{name} {version}" for name, version in versions().items() if name.startswith("faiss")]
    if len(found) > 1:
        yield "✗", "faiss", f"{' and '.join(found)} overwrite each other: uninstall both, then install one"
    elif not found:
        yield "–", "faiss", "two-step serving needs it: pip install 'bachlib[faiss-cpu]', on a GPU host faiss-gpu"
    else:
        yield "✓", "faiss", found[0]
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    no_gpu = "torch sees no GPU and uses the CPU. To use a GPU, install a driver and torch's CUDA build"
    yield ("✓", "CUDA", ", ".join(devices)) if devices else ("–", "CUDA", no_gpu)
    if not (data := os.environ.get("BACH_DATA_DIR")):
        yield "–", "real data", "BACH_DATA_DIR is not set: set it to the folder of your raw logs (tests skip them now)"
    elif not Path(data).is_dir():
        yield "✗", "real data", f"BACH_DATA_DIR is {data}, which is not a folder"
    else:
        yield "✓", "real data", f"{data}: {', '.join(sorted(path.name for path in Path(data).iterdir())[:6])}"
    chrome = next((path for name in ("chromium", "google-chrome", "chrome") if (path := shutil.which(name))), None)
    yield ("✓", "Chrome", chrome) if chrome else ("–", "Chrome", "not found: figures cannot be saved as PNG")


def methods() -> str:
    """The table of methods: encoder, objective, score, kernel, heads."""
    table = pd.DataFrame([row._asdict() for row in METHODS.values()], index=list(METHODS), dtype=object)
    return table.rename(columns={"serving": "score"}).fillna({"heads": "k"}).fillna("–").to_string()


def parameter_files() -> Iterator[str]:
    """The files of `params/` with the first line of their comment."""
    folder = project_root() / "params"
    for path in [*sorted(folder.glob("*.yaml")), *sorted(folder.glob("sweeps/*.yaml"))]:
        about = path.read_text(encoding="utf-8").splitlines()[0].lstrip("# ")
        yield f"{path.relative_to(folder).with_suffix('')!s:<31}{about}"
    if not folder.is_dir():
        yield "The parameter files are in a clone of the workbook, not in the installed package."
    yield f"\nMore: bach params NAME, where NAME is a file, a part ({', '.join(PARTS)}) or a parameter, e.g. epochs"


def parameters(name: str) -> Iterator[str]:
    """Value, range and description of every parameter of an experiment file or a part, or of one; a sweep as it is."""
    if (sweep := project_root() / "params" / f"{name}.yaml").is_file() and sweep.parent.name == "sweeps":
        yield sweep.read_text(encoding="utf-8").rstrip()
        return
    if name in PARTS:
        fields, values = PARTS[name].model_fields, PARTS[name]()
    elif name in Experiment.model_fields:
        fields, values = {name: Experiment.model_fields[name]}, Experiment()
    elif is_overlay(over := read_yaml(params_file(name))):
        fields = {key: field for key, field in Experiment.model_fields.items() if key in over and key != "name"}
        values = experiment_of({key: over[key] for key in fields}, name)
    else:
        fields, values = Experiment.model_fields, read_experiment(name)
    for key, field in fields.items():
        value = getattr(values, key)
        default = "" if value == field.default else f" [default: {field.default}]"
        yield f"{key:<24}{value!s:<18} {_range(field):<18} {field.description or ''}{default}".rstrip()


def _range(field: FieldInfo) -> str:
    """The allowed values: bounds, or the words of a Literal."""
    kinds = [field.annotation, *get_args(field.annotation)]
    words = [str(word) for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    bounds = ((sign, getattr(rule, attribute, None)) for rule in field.metadata for attribute, sign in signs.items())
    return " | ".join(words) or ", ".join(f"{sign} {bound}" for sign, bound in bounds if bound is not None)
