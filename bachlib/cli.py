"""The command `bach`."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from bachlib import BachError
from bachlib.data.sources import SOURCES
from bachlib.params import ModelParams, PrepareParams, TrainParams

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False, help=__doc__)
DEFAULT = {name: field.default for name, field in PrepareParams.model_fields.items()}
HELP = {name: field.description for name, field in PrepareParams.model_fields.items()}

SourceName = StrEnum("SourceName", list(SOURCES))


@app.command()
def prepare(
    source: Annotated[SourceName, typer.Option(help="what kind of log it is")],
    path: Annotated[
        Path | None, typer.Option(help="file, folder or zip; without it the log is looked for or fetched")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="folder to make [default: outputs/data/<source>]")] = None,
    min_rating: Annotated[float, typer.Option(help=HELP["min_rating"])] = DEFAULT["min_rating"],
    min_items: Annotated[int, typer.Option(help=HELP["min_items"])] = DEFAULT["min_items"],
    max_items: Annotated[int, typer.Option(help=HELP["max_items"])] = DEFAULT["max_items"],
    max_users: Annotated[int, typer.Option(help=HELP["max_users"])] = DEFAULT["max_users"],
    seed: Annotated[int, typer.Option(help=HELP["seed"])] = DEFAULT["seed"],
    ties: Annotated[str, typer.Option(help=HELP["ties"] + ": log or item")] = DEFAULT["ties"],
    user: Annotated[str | None, typer.Option(help="your column with the user (csv, parquet)")] = None,
    item: Annotated[str | None, typer.Option(help="your column with the item")] = None,
    time: Annotated[str | None, typer.Option(help="your column with the time: a number or a date")] = None,
    rating: Annotated[
        str | None, typer.Option(help="your column with the rating; without one every event is liked")
    ] = None,
    title: Annotated[str | None, typer.Option(help="your column with the item's title")] = None,
    genre: Annotated[str | None, typer.Option(help="your column with the item's genres, separated by |")] = None,
    time_format: Annotated[str | None, typer.Option(help=HELP["time_format"] + ", e.g. '%d/%m/%Y %H:%M'")] = None,
    encoding: Annotated[str, typer.Option(help=HELP["encoding"])] = DEFAULT["encoding"],
    on_bad_rows: Annotated[str, typer.Option(help=HELP["on_bad_rows"] + ": stop or skip")] = DEFAULT["on_bad_rows"],
    memory: Annotated[str, typer.Option(help="what the engine may use before it moves to disk")] = "2GB",
) -> None:
    """Turn a raw log into a prepared data set (appendix A of the paper)."""
    from bachlib.data import prepare as prepare_log
    from bachlib.data.download import locate

    named = {"user": user, "item": item, "time": time, "rating": rating, "title": title, "genre": genre}
    columns = {role: column for role, column in named.items() if column} or None
    if columns and source not in ("csv", "parquet"):
        raise BachError(
            f"--{' --'.join(columns)}: {source} has its own columns; name yours with --source csv or parquet"
        )
    dataset = prepare_log(
        str(source), path or locate(source), out, memory=memory,
        min_rating=min_rating, min_items=min_items, max_items=max_items, max_users=max_users, seed=seed, ties=ties,
        columns=columns, time_format=time_format, encoding=encoding, on_bad_rows=on_bad_rows,
    )  # fmt: skip
    typer.echo(f"→ {dataset.folder}")


SET = typer.Option("--set", help="replace a parameter, e.g. --set epochs=2 --set k=4")


@app.command()
def run(
    params: Annotated[Path, typer.Argument(help="a parameter file, e.g. params/quickstart.yaml, or its name")],
    set_: Annotated[list[str] | None, SET] = None,
    fresh: Annotated[bool, typer.Option(help="execute every notebook, also those that are finished")] = False,
    report: Annotated[bool, typer.Option(help="write pages and the report")] = True,
) -> None:
    """Execute the notebooks of an experiment in batch; what is finished and unchanged is used again."""
    from bachlib.experiment.notebooks import run as run_notebooks
    from bachlib.experiment.settings import given, read_experiment

    folder = run_notebooks(read_experiment(params, given(set_ or [])), fresh=fresh, report=report)
    typer.echo(f"done. The report is {folder / 'report.html'}" if report else f"done → {folder}")


@app.command()
def sweep(
    sweep: Annotated[Path, typer.Argument(help="a file of params/sweeps, its name, or a folder of outputs/sweeps")],
    base: Annotated[list[str] | None, typer.Option(help="other experiments than the file's, e.g. --base ml1m")] = None,
    set_: Annotated[list[str] | None, SET] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="runs at a time [default: one per core]")] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="of each run [default: cores / workers]")] = None,
    dask: Annotated[str | None, typer.Option(help="address of a Dask scheduler, e.g. tcp://host:8786")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="say what would run and about how long")] = False,
) -> None:
    """Run a grid of trainings, each in its own process; the same call again goes on where it stopped."""
    from bachlib.experiment import cluster
    from bachlib.experiment.settings import given
    from bachlib.experiment.sweep import read_sweep

    chosen = read_sweep(sweep, base=base, more=given(set_ or []))
    if dry_run:
        typer.echo(cluster.plan(chosen, workers, threads))
        return
    outcomes = cluster.run_sweep(chosen, workers=workers, threads=threads, dask=dask)
    failed = cluster.failures(chosen.points, outcomes)
    typer.echo(f"{len(outcomes) - len(failed)} of {len(outcomes)} runs are done → {chosen.folder}")
    if failed:
        typer.secho("\n".join([f"{len(failed)} failed:", *failed]), fg="red", err=True)
        raise typer.Exit(1)
    typer.echo(f"bach report {chosen.folder.name} makes the tables of them")


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="a run folder or its name in outputs/runs; or a sweep")],
    data: Annotated[
        Path | None, typer.Option(help="of a training: its prepared data set [default: the run's, in outputs/data]")
    ] = None,
) -> None:
    """Write one HTML file about a run, of bach train or bach run, or about a sweep; no network needed to read it."""
    from bachlib.experiment.report import report as write_report

    typer.echo(f"→ {write_report(run, data)}")


@app.command()
def sync(
    names: Annotated[list[str] | None, typer.Argument(help="only these, e.g. 04_train [default: all]")] = None,
    force: Annotated[bool, typer.Option(help="execute notebooks, changed or not")] = False,
) -> None:
    """Bring each notebook in line with its .py and execute those that changed."""
    from bachlib.experiment.sync import sync as sync_notebooks

    executed = sync_notebooks(force, names)
    typer.echo(f"executed {', '.join(executed)}" if executed else "all notebooks are in line and executed")


@app.command()
def figures() -> None:
    """Draw the README's pictures anew, from the executed notebooks; needs Chrome or Chromium."""
    from bachlib.experiment.settings import notebook_folder
    from bachlib.show.pictures import write

    for path in write(notebook_folder()):
        typer.echo(f"→ {path}")


@app.command()
def train(
    method: Annotated[str, typer.Argument(help="a row of the table of methods, e.g. p-bach")],
    data: Annotated[Path, typer.Option(help="a prepared data set, e.g. outputs/data/movielens-1m")],
    k: Annotated[int, typer.Option(help="heads")] = 8,
    seed: Annotated[int, typer.Option(help="of the first weights and of all that is drawn in training")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="any other parameter, e.g. --set epochs=20 --set cls_scale=0.1")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="run folder [default: outputs/runs/<method>-<data>-k<k>-s<seed>-<hash>]")
    ] = None,
    strict: Annotated[float, typer.Option(help="share of users to leave cold: never trained on, only evaluated")] = 0.0,
    fresh: Annotated[bool, typer.Option(help="start anew instead of going on where a run has stopped")] = False,
) -> None:
    """Train a method; the same command again goes on where it stopped. With torchrun: on several processes."""
    from bachlib.data import Dataset
    from bachlib.evaluate import evaluate
    from bachlib.experiment.settings import experiment_of, given
    from bachlib.model.methods import build
    from bachlib.train import fit

    dataset = Dataset.load(data)
    dataset = dataset.strict(strict) if strict else dataset
    known = {*ModelParams.model_fields, *TrainParams.model_fields} - {"k", "seed"}
    p = experiment_of({"method": method, "k": k, "seed": seed, **given(set_ or [], known)}, "bach train")
    run = fit(build(method, dataset, **p.model), dataset, p.train, out, fresh=fresh)
    if int(os.environ.get("RANK", 0)) == 0:
        if run.status == "finished":
            result = evaluate(run, dataset)
            result.save(run.folder)
            typer.echo(result)
        typer.echo(f"{run}\n→ {run.folder}")
    if run.status == "stopped":
        raise typer.Exit(130)


@app.command()
def evaluate(
    runs: Annotated[list[Path], typer.Argument(help="run folders, e.g. outputs/runs/*")],
    data: Annotated[
        Path | None, typer.Option(help="the prepared data set [default: the run's, in outputs/data]")
    ] = None,
    split: Annotated[str, typer.Option(help="valid or test")] = "test",
    baseline: Annotated[str, typer.Option(help="the row all others are compared with")] = "all-multihead",
    slate: Annotated[int, typer.Option(help="also what the first so many items are like; 0: no")] = 0,
    best_over_k: Annotated[bool, typer.Option(help="of several k, only the best by validation AUPRC")] = False,
    latex: Annotated[bool, typer.Option(help="print the table as rows for LaTeX")] = False,
) -> None:
    """Rank the full catalogue for each run, keep the numbers in its folder, and print the paper's table of them."""
    from bachlib.evaluate import evaluate as evaluate_run
    from bachlib.evaluate.tables import table
    from bachlib.train.run import Run, data_of

    found = []
    for folder in runs:
        dataset = data_of(folder, data)
        found.append(evaluate_run(Run.load(folder, dataset), dataset, split, slate=slate))
        found[-1].save(folder)
        typer.echo(found[-1])
    if len(found) > 1:
        made = table(found, baseline, best_over_k=best_over_k)
        typer.echo(f"\n{made.latex() if latex else made}\n\nrelative gain over {baseline}\n{made.gains.to_string()}")


Bench = StrEnum("Bench", ["prepare", "sphere", "loss", "train", "evaluate", "serve", "show"])


@app.command()
def bench(
    what: Annotated[Bench | None, typer.Argument(help="what to measure [default: everything]")] = None,
    shape: Annotated[str | None, typer.Option(help="prepare: only this log, movielens-20m or taobao")] = None,
    rows: Annotated[int | None, typer.Option(help="prepare: rows of the log [default: 20 and 100 million]")] = None,
    items: Annotated[
        int | None, typer.Option(help="serve: only this size, e.g. 1000000 [default: 20, 50 and 200 thousand]")
    ] = None,
) -> None:
    """Measure the goals as ratios in one process; the results are kept as JSON."""
    from bachlib.bench.measure import BENCHES, SHAPES, bench_prepare, save
    from bachlib.bench.serve import SIZES, benches

    if shape is not None and shape not in SHAPES:
        raise BachError(f"--shape {shape}: there are {', '.join(SHAPES)}")
    for name in [str(what)] if what else BENCHES:
        chosen = BENCHES[name]
        if name == "serve":
            chosen = benches((items,) if items else SIZES)
        if name == "prepare" and (shape or rows):
            chosen = [lambda s=s: bench_prepare(s, rows) for s in ([shape] if shape else SHAPES)]
        results = []
        for measure in chosen:
            results.append(result := measure())
            said = [f"{key} {result[key]:.3g} (goal ≤ {goal:g})" for key, goal in result["goals"].items()]
            typer.echo(f"{name}, {result['name']}: {', '.join(said)} {'✓' if result['met'] else '✗ GOAL MISSED'}")
        typer.echo(f"→ {save(name, results)}")


@app.command()
def doctor() -> None:
    """Versions, threads, devices, and which optional parts are there."""
    from bachlib.experiment.doctor import findings

    for line in findings():
        typer.echo(line)


def main() -> None:
    """Errors a user can mend are a message, not a traceback."""
    for name in {"BACH_OUTPUT_DIR", "BACH_DATA_DIR"} & os.environ.keys():  # kernels run in another folder
        if os.environ[name]:
            os.environ[name] = str(Path(os.environ[name]).expanduser().resolve())
    try:
        app()
    except BachError as error:
        typer.secho(f"bach: {error}", fg="red", err=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C, as typer tells of it
            typer.secho("bach: stopped; the same command goes on with what is there", fg="red", err=True)
        raise


if __name__ == "__main__":
    main()
