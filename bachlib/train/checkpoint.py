"""The resume state: one file with everything a training needs to continue as if it had never stopped.

Weights, optimiser and running sums are tensors; position, history and best value are JSON in the file's header. The
file is safetensors, so loading it runs no code, and it is replaced atomically. It holds no random states: everything a
step draws (windows, targets, negatives, dropout) is a function of (seed, epoch, step). Two cases do not resume to the
last bit: modules that draw from another source than torch, and GPUs, whose sums have no fixed order.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bachlib import BachError
from bachlib.files import CHECKSUM, differences, replacing
from bachlib.reading import expect, reading

AGAIN = "start again with fresh=True"


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any] | None = None) -> None:
    """Write a safetensors file atomically, with `about` as JSON in its header and a checksum of everything."""
    kept = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    told = about or {}
    told = told | {CHECKSUM: _checksum(kept, told)}  # not beside it: safetensors writes two entries in any order
    with replacing(path) as partial:
        save_file(kept, partial, {"about": json.dumps(told)})
        partial.chmod(0o644)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors, about); a file of an earlier version has no checksum."""
    if not path.exists():
        raise BachError(f"{path} does not exist")
    with reading(path, AGAIN), safe_open(path, "pt") as file:
        tensors, told = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
        about = json.loads(told.pop("about"))
        expect(about, dict)
        if told or about.pop(CHECKSUM, None) not in (None, _checksum(tensors, about)):
            raise ValueError("its checksum is another")
        return tensors, about


def _checksum(tensors: dict[str, Tensor], about: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about).encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {tuple(x.shape)}".encode())
        digest.update(x.contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def save(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, sums: dict[str, Tensor], about: dict) -> None:
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    write_tensors(path, tensors | {f"sums.{name}": value for name, value in sums.items()}, about)


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Restore model and optimiser; return (running sums, about)."""
    tensors, about = read_tensors(path)
    parts: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "sums": {}}
    with reading(path, AGAIN):
        for name, value in tensors.items():
            part, rest = name.split(".", 1)
            parts[part][rest] = value
        load_weights(model, path, parts["model"])
        parameters = dict(model.named_parameters())
        for name, value in parts["optimizer"].items():
            key, of = name.split(".", 1)
            if value.shape not in ((), parameters[of].shape):
                raise ValueError(f"{name} has the shape {tuple(value.shape)}")
            optimizer.state[parameters[of]][key] = value.to(parameters[of].device)
        expect(about, {"windows": dict, "rows": list, "best": (dict, NoneType), "looks": int})
    return parts["sums"], about


def load_weights(model: nn.Module, path: Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Load the weights of a file into a model; `tensors`: those of the file, if they have been read."""
    tensors = read_tensors(path)[0] if tensors is None else tensors
    there, here = ({name: _kind(x) for name, x in state.items()} for state in (tensors, model.state_dict()))
    if different := differences(there, here, "there", "here"):
        raise BachError(f"{path} belongs to another model: {'; '.join(different[:4])}")
    model.load_state_dict(tensors)


def _kind(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}".removeprefix("torch.")
