"""The stages of an experiment, as notebooks call them, so that a cell holds one idea and no file handling:

    p = settings(globals())              # after the parameters cell
    dataset = prepared(p)                # the log, or the planted world, through the pipeline
    run = trained("p-bach", dataset, p)  # a finished training
    point = measured(p)                  # train, rank the test items, look at the heads

Every stage is cached in `outputs/`: what another notebook, `bach train` or a sweep has made is opened, not made again.
"""

from __future__ import annotations

import ast
import re
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bachlib import BachError
from bachlib.data import Dataset, planted, prepare
from bachlib.data.download import locate
from bachlib.data.prepare import data_label, folder_name
from bachlib.evaluate import Evaluation, answers, diagnostics, evaluate
from bachlib.experiment import own
from bachlib.experiment.settings import Experiment, experiment_of, unused
from bachlib.files import output_dir
from bachlib.model.methods import METHODS, build
from bachlib.params import ELBO_ONLY, ModelParams, TrainParams, noted
from bachlib.train import Run, fit
from bachlib.train.run import name_of_run, other_data

KNOWN = "_names_of_parameters"  # a notebook's variable: which of its variables are parameters
LITERAL = (str, int, float, bool, list, dict, type(None))
SLATE = 10  # items of the slates of a point, for their diversity
KNOWN_OF_PI = ("total variation", "same head", "error with another user's π")  # beside `diagnostics.summary`


def settings(namespace: dict[str, Any]) -> Experiment:
    """The experiment of a notebook, from its parameters cell and the values that papermill added below it.

    Call it in the first cell after the parameters: every lower-case variable with a literal value is a parameter then.
    An unknown name is an error (papermill only warns), and so is a notebook in which no parameter was set.
    """
    names = namespace.get(KNOWN) or [
        name for name, value in namespace.items() if re.fullmatch(r"[a-z]\w*", name) and type(value) in LITERAL
    ]
    if not names:
        raise BachError("no parameters are set: run the notebook's parameters cell first, then this one")
    names = list(dict.fromkeys([*names, *_added(namespace)]))
    p = experiment_of({name: namespace[name] for name in names}, "the notebook's parameters")
    namespace[KNOWN] = names
    return p


def _added(namespace: dict[str, Any]) -> list[str]:
    """Parameters that somebody added to the parameters cell by hand: cells of nothing but `name = literal` lines."""
    found = []
    for cell in namespace.get("In", []) if KNOWN in namespace else []:
        with suppress(SyntaxError, ValueError, AttributeError):  # a magic command, or something else than a literal
            literals = {line.targets[0].id: ast.literal_eval(line.value) for line in ast.parse(cell).body}
            found += literals
    return [name for name in found if name in Experiment.model_fields]


def prepared(p: Experiment, quiet: bool = True) -> Dataset:
    """The data set of an experiment. It is prepared once and then opened."""
    return prepare(p.source, raw_log(p), output_dir("data", data_name(p)), quiet=quiet, **p.prepare)


def raw_log(p: Experiment) -> Path:
    """The path of the log: as given, found in BACH_DATA_DIR, or downloaded. The planted world is generated."""
    if path := p.path or locate(p.source):
        return Path(path).expanduser()
    return planted.write_world(**p.world)


def data_name(p: Experiment) -> str:
    """The folder of the data set in `outputs/data`, the one that `bach prepare` makes with these options."""
    return folder_name(p.source, p.path, p.prepare, p.world)


def label(p: Experiment) -> str:
    """A readable name of the data: its source, or the name of a csv or parquet file."""
    return data_label(p.source, p.path)


def trained(
    method: str, dataset: Dataset, p: Experiment, *, k: int | None = None, seed: int | None = None, **more: Any
) -> Run:
    """The finished training of a method in this experiment; `more`: `quiet`, or other parameters. `context` says what
    reads the context that `dataset` was given by `with_context`.

    A stopped training is resumed. Two processes that ask for the same training wait for each other. If the data has
    changed since, the training starts again.
    """
    quiet, context = more.pop("quiet", True), {"context": more.pop("context", p.context)}
    p = p.model_copy(update={"method": method, "k": p.k if k is None else k, "seed": p.seed if seed is None else seed})
    if METHODS[method].kernel is None:
        usual = {name: ModelParams.model_fields[name].default for name in ELBO_ONLY}
        p = p.model_copy(update=usual | {"serve_by": "density"})
    p = p.model_copy(update=dict.fromkeys(unused(method)))
    p = experiment_of(p.model_dump(exclude_unset=True) | more, f"training {method}").model_copy(update=context)
    model, folder, fresh = build(method, dataset, **own.parts(p, dataset, heads_of(p)), **p.model), None, False
    if own.sources(p):
        fresh = other_data(folder := output_dir("runs", run_name(p, dataset)), dataset)
    run = fit(model, dataset, p.train, folder, fresh=fresh, quiet=quiet)
    if run.status != "finished":
        raise BachError(f"the training in {run.folder} is {run.status}: call it again to resume it")
    return run


def run_name(p: Experiment, dataset: Dataset | None = None) -> str:
    """The folder of the experiment's training, known before the data is prepared."""
    row = METHODS[p.method]
    params = noted(ModelParams(**p.model)) | {"k": heads_of(p)}
    config = {"method": p.method, "row": row._asdict(), "params": params, "own": own.sources(p)}
    data = {"name": data_name(p)} if dataset is None else dataset.identity
    return name_of_run(config, data, TrainParams(**p.train))


def point_name(p: Experiment) -> str:
    """The folder of a point of a sweep: that of its training, or beside it for another rule of serving."""
    return run_name(p) if p.serve_by == "density" else f"{run_name(p)}-by-{p.serve_by}"


def heads_of(p: Experiment) -> int:
    """k, or 1 for a method with one vector."""
    return METHODS[p.method].heads_for(p)


class Measured(NamedTuple):
    run: Run
    result: Evaluation
    heads: dict[str, float]  # what is known of the heads; empty for a method without any

    @property
    def record(self) -> dict[str, float]:
        return {name: round(value, 6) for name, value in {**self.result.means, **self.heads}.items()}


def measured(p: Experiment, quiet: bool = True) -> Measured:
    """One point of a sweep: train the method, rank its test items, describe its heads. The run folder keeps it all.

    Points that differ only in `serve_by` share the training; each keeps its ranks in a folder of its own. The CPU
    seconds of an epoch with its validation are known if this call made the whole training.
    """
    dataset = prepared(p)
    begun = (output_dir("runs", run_name(p, dataset)) / "run.json").exists()
    start = time.process_time()
    run = trained(p.method, dataset, p)
    epochs = 0 if begun or p.method == "mostpop" else int(run.history["epoch"].max())
    cost = {"cpu_s_per_epoch": round((time.process_time() - start) / epochs, 2)} if epochs else {}
    slate = SLATE if dataset.n_items > int(dataset.lengths.max()) + SLATE else 0  # a tiny catalogue leaves too few
    result = evaluate(run, dataset, max_users=p.max_eval, slate=slate, serve_by=p.serve_by, quiet=quiet)
    result = replace(result, about=result.about | cost)
    heads: dict[str, float] = {}
    if p.method != "mostpop":
        users = result.per_user.index[:2_000]
        of = diagnostics.held_out(run.model, dataset, users.to_numpy())
        heads = diagnostics.summary(run.model, dataset, users.to_numpy(), of=of)
        if run.model.kernel:
            for table in (answers.posterior_gap({"": of}), answers.calibration_controls({"": of})):
                heads |= {name: value for name, value in table.iloc[0].items() if name in KNOWN_OF_PI}
            result = result.joined(answers.worth_of_pi(of).set_index(users))
    folder = run.folder if p.serve_by == "density" else output_dir("runs", point_name(p))
    folder.mkdir(parents=True, exist_ok=True)
    result.save(folder)
    return Measured(run, result, heads)
