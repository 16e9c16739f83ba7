"""The resume state: one file with everything a training needs to continue as if it had never stopped.

Weights, optimiser and running sums are tensors; position, history and best value are JSON in the file's header. The
file is safetensors, so loading it runs no code, and it is replaced atomically. It holds no random states: everything a
step draws (windows, targets, negatives, dropout) is a function of (seed, epoch, step). Two cases do not resume to the
last bit: modules that draw from another source than torch, and GPUs, whose sums have no fixed order.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from bachlib import BachError
from bachlib.files import differences, replacing


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: dict[str, Any] | None = None) -> None:
    """Write a safetensors file atomically, with `about` as JSON in its header."""
    kept = {name: x.detach().cpu().clone(memory_format=torch.contiguous_format) for name, x in tensors.items()}
    with replacing(path) as partial:
        save_file(kept, partial, {"about": json.dumps(about or {})})
        partial.chmod(0o644)


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.exists():
        raise BachError(f"{path} does not exist")
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, json.loads(file.metadata()["about"])  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise BachError(f"{path} is damaged ({error}); start again with fresh=True") from None


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
    for name, value in tensors.items():
        part, rest = name.split(".", 1)
        parts[part][rest] = value
    load_weights(model, path, parts["model"])
    parameters = dict(model.named_parameters())
    for name, value in parts["optimizer"].items():
        key, of = name.split(".", 1)
        optimizer.state[parameters[of]][key] = value.to(parameters[of].device)
    return parts["sums"], about


def load_weights(model: nn.Module, path: Path, tensors: dict[str, Tensor] | None = None) -> None:
    """Load the weights of a file into a model; `tensors`: those of the file, if they have been read."""
    tensors = read_tensors(path)[0] if tensors is None else tensors
    there, here = ({name: tuple(x.shape) for name, x in state.items()} for state in (tensors, model.state_dict()))
    if different := differences(there, here, "there", "here"):
        raise BachError(f"{path} belongs to another model: {'; '.join(different[:4])}")
    model.load_state_dict(tensors)
