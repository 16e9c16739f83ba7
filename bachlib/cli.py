"""The command `bach`: from a raw log to a model, its numbers, its slates and its report."""

from __future__ import annotations

import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bachlib import BachError, __version__, needs
from bachlib.data.sources import SOURCES
from bachlib.experiment.commands import SET, check_place, workbook
from bachlib.files import clear_errors, output_dir
from bachlib.params import ModelParams, PrepareParams, TrainParams, validated

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)
app.add_typer(workbook)
DEFAULT = {name: field.default for name, field in PrepareParams.model_fields.items()}
HELP = {name: field.description for name, field in PrepareParams.model_fields.items()}
SourceName = StrEnum("SourceName", list(SOURCES))
Bench = StrEnum("Bench", "prepare sphere loss train evaluate serve show cores growth".split())


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"bachlib {__version__}")
        raise typer.Exit


@app.callback(help=__doc__)
def bach(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="print the version", is_eager=True, callback=_version)] = False,
) -> None:
    check_place(context.invoked_subcommand)


@app.command()
def prepare(
    source: Annotated[SourceName, Option(help="format of the log")],
    path: Annotated[Path | None, Option(help="file, folder or zip (default: in BACH_DATA_DIR, else download)")] = None,
    out: Annotated[
        Path | None, Option(help="folder to write (default: one in outputs/data for this source and these options)")
    ] = None,
    min_rating: Annotated[float, Option(help=HELP["min_rating"])] = DEFAULT["min_rating"],
    min_items: Annotated[int, Option(help=HELP["min_items"])] = DEFAULT["min_items"],
    max_items: Annotated[int, Option(help=HELP["max_items"])] = DEFAULT["max_items"],
    catalogue: Annotated[str, Option(help=HELP["catalogue"] + ": liked or kept")] = DEFAULT["catalogue"],
    max_users: Annotated[int, Option(help=HELP["max_users"])] = DEFAULT["max_users"],
    seed: Annotated[int, Option(help=HELP["seed"])] = DEFAULT["seed"],
    ties: Annotated[str, Option(help=HELP["ties"] + " (log, item, shuffle or basket)")] = DEFAULT["ties"],
    items: Annotated[str, Option(help=HELP["items"] + " (product or type)")] = DEFAULT["items"],
    split: Annotated[str, Option(help=HELP["split"] + ": per-user or global-time")] = DEFAULT["split"],
    test_share: Annotated[float, Option(help=HELP["test_share"])] = DEFAULT["test_share"],
    dates: Annotated[tuple[str, str] | None, Option(help=HELP["dates"])] = None,
    user: Annotated[str | None, Option(help="your column with the user (csv, parquet)")] = None,
    item: Annotated[str | None, Option(help="your column with the item")] = None,
    time: Annotated[str | None, Option(help="your column with the time, a number or a date")] = None,
    rating: Annotated[str | None, Option(help="your column with the rating; without it all events are liked")] = None,
    title: Annotated[str | None, Option(help="your column with the item's title")] = None,
    genre: Annotated[str | None, Option(help="your column with the item's genres, separated by |")] = None,
    time_format: Annotated[str | None, Option(help=HELP["time_format"] + ", e.g. '%d/%m/%Y %H:%M'")] = None,
    encoding: Annotated[str, Option(help=HELP["encoding"])] = DEFAULT["encoding"],
    on_bad_rows: Annotated[str, Option(help=HELP["on_bad_rows"] + ": stop or skip")] = DEFAULT["on_bad_rows"],
    memory: Annotated[str, Option(help="memory the engine may use before it writes to disk")] = "2GB",
    recbole: Annotated[Path | None, Option(help="also write the data set to this folder, for RecBole")] = None,
) -> None:
    """Turn a raw log into a prepared data set (appendix A of the paper)."""
    from bachlib.data import prepare as prepare_log
    from bachlib.data.download import locate
    from bachlib.data.prepare import folder_name
    from bachlib.data.recbole import write_recbole

    named = {"user": user, "item": item, "time": time, "rating": rating, "title": title, "genre": genre}
    columns = {role: column for role, column in named.items() if column} or None
    if columns and source not in ("csv", "parquet"):
        given = f"--{' --'.join(columns)}"
        raise BachError(f"{given}: {source} has its own columns; name yours with --source csv or parquet")
    options = {
        "min_rating": min_rating, "min_items": min_items, "max_items": max_items, "catalogue": catalogue,
        "max_users": max_users, "seed": seed, "ties": ties, "items": items, "columns": columns,
        "time_format": time_format, "encoding": encoding, "on_bad_rows": on_bad_rows, "split": split,
        "test_share": test_share, "dates": list(dates) if dates else None,
    }  # fmt: skip
    log, chosen = path or locate(source), validated(PrepareParams, options, "bach prepare").model_dump()
    out = out or output_dir("data", folder_name(source, path, chosen))  # notebooks know the path that the user gave
    dataset = prepare_log(str(source), log, out, memory=memory, **options)
    typer.echo(f"→ {dataset.folder}")
    if recbole:
        typer.echo(f"→ {write_recbole(dataset, recbole)}")


@app.command()
def train(
    method: Annotated[str, Argument(help="a method, e.g. p-bach; `bach methods` lists them")],
    data: Annotated[Path, Option(help="a prepared data set, e.g. outputs/data/movielens-1m")],
    k: Annotated[int, Option(help="number of heads")] = 8,
    seed: Annotated[int, Option(help="seed of the initial weights and of everything random in training")] = 0,
    set_: Annotated[list[str] | None, SET] = None,
    out: Annotated[Path | None, Option(help="run folder (default: outputs/runs/<method>-<data>-…)")] = None,
    strict: Annotated[float, Option(help="share of users that are never trained on, only evaluated")] = 0.0,
    fresh: Annotated[bool, Option(help="start from the beginning instead of resuming")] = False,
    tensorboard: Annotated[Path | None, Option(help="write the history there, for TensorBoard: a folder")] = None,
) -> None:
    """Train a method. Run the same command again to resume. Start it with torchrun to use several processes."""
    from bachlib.data import Dataset
    from bachlib.evaluate import evaluate
    from bachlib.experiment.settings import experiment_of, given
    from bachlib.model.methods import build
    from bachlib.train import fit
    from bachlib.train.watch import to_tensorboard

    on_epoch = to_tensorboard(tensorboard) if tensorboard else None
    dataset = Dataset.load(data)
    dataset = dataset.strict(strict) if strict else dataset
    known = {*ModelParams.model_fields, *TrainParams.model_fields} - {"k", "seed"}
    p = experiment_of({"method": method, "k": k, "seed": seed, **given(set_ or [], known)}, "bach train")
    run = fit(build(method, dataset, **p.model), dataset, p.train, out, fresh=fresh, on_epoch=on_epoch)
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
    runs: Annotated[list[Path], Argument(help="run folders, e.g. outputs/runs/*")],
    data: Annotated[Path | None, Option(help="data set (default: found in outputs/data)")] = None,
    split: Annotated[str, Option(help="valid or test")] = "test",
    baseline: Annotated[
        str | None, Option(help="row that all others are compared with (default: all-multihead, else the first row)")
    ] = None,
    slate: Annotated[int, Option(help="also measure diversity and novelty of slates of this length; 0: do not")] = 0,
    best_over_k: Annotated[bool, Option(help="keep only the k with the best validation AUPRC")] = False,
    serve_by: Annotated[str, Option(help="density (the paper), max or softmax, which is not saved")] = "density",
    latex: Annotated[bool, Option(help="print the table as LaTeX rows")] = False,
) -> None:
    """Rank the full catalogue for each run, save the metrics in its folder, and print the paper's table."""
    from bachlib.evaluate import evaluate as evaluate_run
    from bachlib.evaluate.tables import BASELINE, table
    from bachlib.train.run import Run, data_of, find_run

    found = []
    for folder in map(find_run, runs):
        dataset = data_of(folder, data)
        found.append(evaluate_run(Run.load(folder, dataset), dataset, split, slate=slate, serve_by=serve_by))
        if serve_by == "density":
            found[-1].save(folder)
        typer.echo(found[-1])
    if len(found) > 1:
        made = table(found, baseline, best_over_k=best_over_k)
        if baseline is None and not made.baseline.startswith(BASELINE):
            why = f"no run of {BASELINE} is among these, so {made.baseline}, the first row, is the baseline"
            typer.secho(f"bach: {why}; --baseline chooses another", err=True)
        over = f"relative gain over {made.baseline}"
        typer.echo(f"\n{made.latex() if latex else made}\n\n{over}\n{made.gains.to_string()}")


@app.command()
def export(
    run: Annotated[Path, Argument(help="a run: its folder, or its name in outputs/runs")],
    out: Annotated[Path, Argument(help="the folder to write")],
    data: Annotated[Path | None, Option(help="data set of the training (default: found in outputs/data)")] = None,
    opset: Annotated[int, Option(help="version of ONNX's operators: 18, which most runtimes read, to 23")] = 18,
    layout: Annotated[bool, Option("--map/--no-map", help="x and y of a map of the items, a minute's work")] = True,
    force: Annotated[bool, Option("--force", help="replace an earlier export")] = False,
) -> None:
    """Write items, users and towers for other tools: Parquet, ONNX and torch.export."""
    from bachlib.experiment.export import export as export_run
    from bachlib.experiment.export import opened

    needs("bach export", "export", "onnx", "onnxscript", "onnxruntime")
    folder = export_run(opened(run, data), out, opset=opset, layout=layout, force=force)
    megabytes = sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    typer.echo(f"{', '.join(sorted(path.name for path in folder.iterdir()))}: {megabytes:.1f} MB\n→ {folder}")


@app.command()
def bench(
    what: Annotated[Bench | None, Argument(help="measure all of this part (default: what does not take long)")] = None,
    quick: Annotated[
        bool, Option("--quick", help="one measurement per goal, smaller where it can be: two minutes")
    ] = False,
    shape: Annotated[str | None, Option(help="prepare: measure only this log, movielens-20m or taobao")] = None,
    rows: Annotated[int | None, Option(help="prepare: number of rows (default: 20 and 100 million)")] = None,
    items: Annotated[
        int | None, Option(help="serve: number of items (default: 20, 50, 200 thousand, a million)")
    ] = None,
) -> None:
    """Measure the speed goals, print a verdict for each, and save them as JSON."""
    from bachlib.bench import goals

    if shape is not None and shape not in goals.SHAPES:
        raise BachError(f"--shape {shape}: should be one of {', '.join(goals.SHAPES)}")
    chosen = goals.selected(what and str(what), quick, items)
    if what == Bench.prepare and (shape or rows):
        chosen = [(what, s, lambda s=s: goals.bench_prepare(s, rows)) for s in ([shape] if shape else goals.SHAPES)]
    goals.run(chosen, "quick" if quick else "goals")


@app.command()
def methods() -> None:
    """List the methods: user encoder, objective, and score at serving."""
    from bachlib.experiment.doctor import methods

    typer.echo(methods())


@app.command()
def params(
    name: Annotated[str | None, Argument(help="a file of params/, a part, e.g. model, or a parameter")] = None,
) -> None:
    """List the parameter files; with a name, the parameters with their value, range and description."""
    from bachlib.experiment.doctor import parameter_files, parameters

    typer.echo("\n".join(parameters(name) if name else parameter_files()))


@app.command()
def doctor() -> None:
    """Print versions, threads, devices, and which optional parts are installed."""
    from bachlib.experiment.doctor import findings

    typer.echo("\n".join(findings()))


def main() -> None:
    """Print errors that a user can correct as a message, without a traceback."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # where there is no κ and no –, a ? takes their place
    for name in {"BACH_OUTPUT_DIR", "BACH_DATA_DIR"} & os.environ.keys():  # kernels run in another folder
        if os.environ[name]:
            os.environ[name] = str(Path(os.environ[name]).expanduser().resolve())
    try:
        with clear_errors(output_dir()):
            app()
    except BachError as error:
        typer.secho(f"bach: {error}", fg="red", err=True)
        sys.exit(2)
    except SystemExit as end:
        if end.code == 130:  # Ctrl-C: typer turns it into this exit code
            typer.secho("bach: stopped; run the same command again to continue", fg="red", err=True)
        raise


if __name__ == "__main__":
    main()
