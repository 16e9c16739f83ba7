"""What notebooks make of an experiment, so that each cell holds one idea and no file handling:

    p = settings(globals())              # after the parameters cell
    dataset = prepared(p)                # the log, or the planted world, through the pipeline
    run = trained("p-bach", dataset, p)  # a finished training

What is prepared or trained already, by another notebook or by a sweep, is opened and not made again. A training is
known by its parameters *and* by the code of data, model and training (comments do not count), so after a change there
nobody meets the results of older code.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

from bachlib import BachError
from bachlib.data import Dataset, planted, prepare
from bachlib.data.download import locate
from bachlib.experiment.settings import Experiment, experiment_of
from bachlib.files import code_hash, only_one, output_dir, read_json, short_hash
from bachlib.model.methods import METHODS, build
from bachlib.params import PrepareParams
from bachlib.train import Run, fit

ROOMS_OF_A_TRAINING = ("params.py", "data", "model", "train")


def settings(namespace: dict[str, Any]) -> Experiment:
    """The experiment of a notebook: its parameters cell and what papermill has put below it.

    papermill only warns of a parameter the notebook does not have. Here it is refused, with the nearest right name.
    """
    return experiment_of({name: namespace[name] for name in _parameters(namespace)}, "the notebook's parameters")


def _parameters(namespace: dict[str, Any]) -> list[str]:
    """Names set by cells that hold nothing but `name = literal`: before the cell that asks for the settings all of them
    count, after it (somebody changes a parameter and runs that cell again) those that set a parameter.

    Where the kernel keeps no history of cells (nbval's does not), every variable with the name of a parameter is one.
    """
    names: dict[str, None] = {}
    asked = False
    for cell in namespace.get("In", [])[1:]:
        asked = asked or "settings(" in cell
        found = dict.fromkeys(target.id for statement in _literals(cell) for target in statement.targets)
        if not asked or found.keys() & {*names, *Experiment.model_fields}:
            names |= found
    return list(names) or [name for name in Experiment.model_fields if name in namespace]


def _literals(cell: str) -> list[ast.Assign]:
    """The statements of a cell, if each is `name = literal`."""
    try:
        statements = ast.parse(cell).body
    except SyntaxError:  # a magic
        return []
    return statements if all(_plain(statement) for statement in statements) else []


def _plain(statement: ast.stmt) -> bool:
    if not isinstance(statement, ast.Assign) or not all(isinstance(t, ast.Name) for t in statement.targets):
        return False
    try:
        ast.literal_eval(statement.value)
    except ValueError:
        return False
    return True


def prepared(p: Experiment, quiet: bool = True) -> Dataset:
    """The data set of an experiment, prepared once for all who ask for it."""
    chosen = p.prepare
    return prepare(p.source, raw_log(p), output_dir("data", data_name(p)), quiet=quiet, **chosen)


def raw_log(p: Experiment) -> Path:
    """Where the log is: as told, or found, or fetched; the planted world is written."""
    if path := p.path or locate(p.source):
        return Path(path).expanduser()
    return planted.write_world(**p.world)


def data_name(p: Experiment) -> str:
    """Readable; with a hash where anything differs from what `bach prepare --source …` does."""
    chosen = p.prepare
    if p.source == "planted":
        chosen |= {"world": p.world}
    elif p.path is not None:
        chosen |= {"path": str(Path(p.path).expanduser().resolve())}
    return p.source if chosen == PrepareParams().model_dump() else f"{label(p)}-{short_hash(chosen)}"


def label(p: Experiment) -> str:
    """What the data is called: its source, or the file of a log of your own, without what is odd in a folder's name."""
    return re.sub(r"[^\w.-]+", "-", Path(p.path).stem) if p.source in ("csv", "parquet") else p.source


def trained(
    method: str, dataset: Dataset, p: Experiment, *, k: int | None = None, seed: int | None = None, **more: Any
) -> Run:
    """The training of a method in this experiment, finished; `more`: `quiet`, or other parameters.

    It goes on where it was stopped. Two who ask for the same training wait for each other. Where the log has changed
    since, it is trained anew.
    """
    quiet = more.pop("quiet", True)
    p = p.model_copy(update={"method": method, "k": p.k if k is None else k, "seed": p.seed if seed is None else seed})
    if METHODS[method].kernel is None:
        p = p.model_copy(update={"kernel": None})
    p = experiment_of(p.model_dump(exclude_unset=True) | more, f"training {method}")
    folder = output_dir("runs", run_name(p, dataset))
    with only_one(folder):
        model = build(method, dataset, **p.model | {"k": heads_of(p)})
        trained_on = read_json(folder / "run.json").get("identity", {}).get("data", {}).get("content_hash")
        other_log = trained_on not in (None, dataset.meta["content_hash"])
        run = fit(model, dataset, p.train, folder, fresh=other_log, quiet=quiet)
    if run.status != "finished":
        raise BachError(f"the training in {folder} is {run.status}: the same call goes on with it")
    return run


def heads_of(p: Experiment) -> int:
    """k, or 1 for a method with one vector: a sweep over k does not train it again for each."""
    row = METHODS[p.method]
    return 1 if row.objective == "counts" else row.heads or p.k


def run_name(p: Experiment, dataset: Dataset | None = None) -> str:
    """The folder of a training: readable, and ending in a hash of all that decides it."""
    data = data_name(p) if dataset is None else dataset.folder.name
    strict = {} if dataset is None else dataset.meta.get("strict", {})
    k, settled = heads_of(p), {"device": None, "checkpoint_seconds": None}
    chosen = {"data": data, "strict": strict, "method": p.method, "code": code_hash(ROOMS_OF_A_TRAINING)}
    chosen |= {"model": p.model | {"k": k}, "train": p.train | settled}
    return f"{p.method}-{label(p)}-k{k}-s{p.seed}-{short_hash(chosen)}"
