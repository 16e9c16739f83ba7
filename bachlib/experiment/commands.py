"""The commands of `bach` that work on the workbook itself: notebooks in batch, sweeps, records, reports and pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bachlib import BachError, needs
from bachlib.files import project_root

workbook = typer.Typer()
# command → its extra, and the modules of it that it needs
IN_THE_CLONE = {
    "run": ("lab", "papermill", "plotly", "distributed"),
    "sweep": ("sweep", "distributed", "papermill"),
    "publish": ("lab", "papermill", "plotly"),
    "report": ("lab", "papermill", "plotly"),
    "sync": ("lab", "jupytext", "papermill"),
    "figures": ("lab", "plotly", "kaleido"),
    "site": ("lab", "plotly", "jupytext"),
    "class": ("lab", "papermill", "plotly", "distributed"),
}
SET = Option("--set", help="change a parameter (`bach params` lists them), e.g. --set epochs=2 --set d=32")


def check_place(command: str | None) -> None:
    """Raise an error if a command of the workbook has no clone of it, or lacks modules of an extra."""
    if command in IN_THE_CLONE and "--help" not in sys.argv:
        needs(f"bach {command}", *IN_THE_CLONE[command])
        if not (project_root() / "notebooks").is_dir():
            why = f"bach {command} executes notebooks, and the installed package does not contain them"
            raise BachError(f"{why}: run the command inside a clone of the workbook")


@workbook.command()
def run(
    params: Annotated[Path, Argument(help="a parameter file, e.g. params/quickstart.yaml, or its name")],
    base: Annotated[list[str] | None, Option(help="overlays that change the experiment, e.g. --base letter")] = None,
    set_: Annotated[list[str] | None, SET] = None,
    fresh: Annotated[bool, Option(help="execute every notebook, even if its result is up to date")] = False,
    report: Annotated[bool, Option(help="write the pages and the report")] = True,
    workers: Annotated[
        int | None, Option(min=1, help="notebooks at the same time (default: two, or one with a GPU)")
    ] = None,
) -> None:
    """Execute the notebooks of an experiment. Notebooks whose result is up to date are skipped."""
    from bachlib.experiment.notebooks import run as run_notebooks
    from bachlib.experiment.settings import given, read_experiment

    p = read_experiment(params, given(set_ or []), base or [])
    folder = run_notebooks(p, fresh=fresh, report=report, workers=workers)
    typer.echo(f"done. The report is {folder / 'report.html'}" if report else f"done → {folder}")


@workbook.command()
def sweep(
    sweep: Annotated[Path, Argument(help="a file of params/sweeps, its name, or a folder in outputs/sweeps")],
    base: Annotated[list[str] | None, Option(help="instead of the file's, e.g. --base ml1m --base letter")] = None,
    set_: Annotated[list[str] | None, SET] = None,
    workers: Annotated[int | None, Option(min=1, help="runs at the same time (default: one per core)")] = None,
    threads: Annotated[int | None, Option(min=1, help="threads of each run (default: cores / workers)")] = None,
    dask: Annotated[str | None, Option(help="address of a Dask scheduler, e.g. tcp://host:8786")] = None,
    dry_run: Annotated[bool, Option("--dry-run", help="print which runs would start, and how long they take")] = False,
) -> None:
    """Train every point of a grid, each in its own process. Run the same command again to continue a stopped sweep."""
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


@workbook.command()
def publish(
    sweep: Annotated[Path | None, Argument(help="a file of params/sweeps, its name, or a folder of it")] = None,
    base: Annotated[list[str] | None, Option(help="instead of the file's, e.g. --base ml1m --base letter")] = None,
    set_: Annotated[list[str] | None, SET] = None,
    report: Annotated[bool, Option("--report", help="only execute 09_sweep_report on what is published")] = False,
) -> None:
    """Add the records of a sweep's finished points to outputs/published. Without a sweep: write the README's tables."""
    from bachlib.experiment import evidence, published
    from bachlib.experiment.report import publish_report
    from bachlib.experiment.settings import given
    from bachlib.experiment.sweep import read_sweep

    if sweep is None:
        return typer.echo(evidence.write_tables())
    chosen = read_sweep(sweep, base=base, more=given(set_ or []))
    new = [publish_report(chosen)] if report else published.publish(chosen)
    typer.echo(f"{len(new)} new → {published.published_dir(chosen.file.name)}")


@workbook.command()
def report(
    run: Annotated[Path, Argument(help="a run or a sweep: its folder, or its name in outputs/")],
    data: Annotated[Path | None, Option(help="data set of the training (default: found in outputs/data)")] = None,
) -> None:
    """Write one HTML file about a training, a run or a sweep. The file works without a network."""
    from bachlib.experiment.report import report as write_report

    typer.echo(f"→ {write_report(run, data)}")


@workbook.command()
def sync(
    names: Annotated[list[str] | None, Argument(help="names of notebooks, e.g. 04_train (default: all)")] = None,
    force: Annotated[bool, Option(help="execute all named notebooks, even if they did not change")] = False,
) -> None:
    """Copy the cells of each notebook's .py into its .ipynb and execute the notebooks that changed."""
    from bachlib.experiment.sync import sync as sync_notebooks

    executed = sync_notebooks(force, names)
    typer.echo(f"executed {', '.join(executed)}" if executed else "all notebooks are up to date")


@workbook.command()
def figures() -> None:
    """Redraw the README's pictures from the executed notebooks. Needs Chrome or Chromium."""
    from bachlib.experiment.settings import notebook_folder
    from bachlib.show.pictures import write

    for path in write(notebook_folder()):
        typer.echo(f"→ {path}")


@workbook.command()
def site() -> None:
    """Write the committed notebooks as linked pages for a static host. Nothing is executed."""
    from bachlib.experiment.site import site as write_site

    folder = write_site()
    pages, megabytes = len([*folder.glob("*.html")]), sum(path.stat().st_size for path in folder.iterdir()) / 1e6
    typer.echo(f"{pages} pages, {megabytes:.1f} MB → {folder / 'index.html'}")


@workbook.command("class")
def class_() -> None:
    """Prepare a class: run the notebooks at both scales, and write the exercises without answers."""
    from bachlib.experiment.classroom import day_before

    typer.echo(day_before())
