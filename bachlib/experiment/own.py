"""Encoders, gates and item towers of one's own in experiments and sweeps, by name: `encoder: mypackage.towers:gru`.

The name is that of a module and of a function in it, `gru(dataset, params) -> torch Module`; `params` are the
`ModelParams` of the training, with k the number of its heads. The module is imported where the training runs, so it has
to be installed there or be on PYTHONPATH. A hash of its source belongs to the identity of the training and of the
finished point: a changed module is another training. What that module imports itself is not hashed.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.experiment.settings import PARTS, Experiment
from bachlib.files import short_hash
from bachlib.params import ModelParams

_imported: dict[str, str] = {}  # module → hash of the source that this process has executed


def sources(p: Experiment) -> dict[str, str]:
    """Part → name of its function and hash of its module's source; of the parts that are one's own."""
    return {part: f"{getattr(p, part)} {_of(p, part)[1]}" for part in PARTS if getattr(p, part)}


def parts(p: Experiment, dataset: Dataset, k: int) -> dict[str, nn.Module]:
    """The modules, made with the seed of the weights: what `build` takes."""
    made = {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(p.seed)
        for part in sources(p):
            module = _of(p, part)[0](dataset, ModelParams(**p.model | {"k": k}))
            if not isinstance(module, nn.Module):
                raise BachError(f"{_told(p, part)}: should return a torch Module and returned {type(module).__name__}")
            made[part] = module
    return made


def _told(p: Experiment, part: str) -> str:
    return f"{part}: {getattr(p, part)}"


def _of(p: Experiment, part: str) -> tuple[Callable[[Dataset, ModelParams], nn.Module], str]:
    """The function of a part, and the hash of the source it comes from."""
    name, _, function = getattr(p, part).partition(":")
    try:
        module, source = _module(name)
    except Exception as error:  # the module's own code may raise anything
        why = f"{type(error).__name__}: {error}"
        advice = "it should be installed or on PYTHONPATH where the training runs"
        raise BachError(f"{_told(p, part)}: the module {name} cannot be imported ({why}); {advice}") from None
    if not callable(made := getattr(module, function, None)):
        there = ", ".join(key for key, x in vars(module).items() if inspect.isfunction(x)) or "none"
        raise BachError(f"{_told(p, part)}: {name} has no function {function}; its functions are {there}")
    try:
        inspect.signature(made).bind(None, None)
    except (TypeError, ValueError) as error:
        raise BachError(f"{_told(p, part)}: should be called as {function}(dataset, params); {error}") from None
    return made, source


def _module(name: str) -> tuple[ModuleType, str]:
    """The module as its file is now, also if this process imported it before the file was changed."""
    importlib.invalidate_caches()
    module = sys.modules.get(name) or importlib.import_module(name)
    if not (path := Path(module.__file__ or "")).suffix == ".py":
        raise ImportError(f"{name} has no Python source to hash")
    source = short_hash(path.read_text(encoding="utf-8"))
    if _imported.setdefault(name, source) != source:
        module = importlib.reload(module)
        _imported[name] = source
    return module, source
