"""The notebooks of a batch run as chapters of its report: what was asked, the numbers, tables and figures."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import nbformat
import yaml

from bachlib.show.document import Section, escape, figure, only_a_table, said, settings, table
from bachlib.show.page import FORMULA, PLOTLY, formula

OURS = "<table><thead><tr><th>method</th>"  # how a `Table` of `evaluate.tables` begins; others carry no intervals


class Batch(NamedTuple):
    folder: Path
    name: str
    params: dict[str, dict[str, Any]]  # of each notebook, where it has run
    status: dict[str, Any]
    metrics: dict[str, dict[str, Any]]


def read(folder: Path) -> Batch:
    params = yaml.safe_load((folder / "params.yaml").read_text(encoding="utf-8"))
    status = json.loads((folder / "status.json").read_text(encoding="utf-8"))
    path = folder / "metrics.json"
    metrics = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    done = status.get("notebooks", {})
    notebooks = {name: done.get(name, {}).get("values", {}) for name in params["notebooks"]}
    return Batch(folder, params["name"], notebooks, status, metrics)


def facts(run: Batch) -> str:
    done = run.status.get("notebooks", {})
    took = sum(one["seconds"] for one in done.values())
    how_many = f"{len(done)} of {len(run.params)} notebooks in {took:.0f} s"
    return f"A run of the notebooks: {escape(run.status['status'])}; {how_many}."


def summary(run: Batch) -> Section:
    """What was run, how long it took, and what stopped it."""
    done, rows = run.status.get("notebooks", {}), []
    for name in run.params:
        state = "done" if name in done else "failed" if name == run.status.get("failed") else "not run"
        took = f"{done[name]['seconds']:.0f} s" if name in done else "–"
        rows.append([name, state, took, len(run.metrics.get(name, {}))])
    parts = [f"<pre>{escape(run.status['error'])}</pre>"] if "error" in run.status else []
    parts.append(table(["notebook", "status", "time", "numbers recorded"], rows))
    lead = "The notebooks of this run; each is a chapter below, and a page with all its text."
    if run.status["status"] == "failed":
        lead = f"This run has failed in {escape(str(run.status.get('failed', 'its first notebook')))}: " + lead
    return Section("summary", "What was run", lead, parts)


def chapters(run: Batch) -> list[Section]:
    """A section for each notebook that was executed, as far as it came."""
    return [_chapter(run, name) for name in run.params if (run.folder / f"{name}.ipynb").exists()]


def _chapter(run: Batch, name: str) -> Section:
    notebook = nbformat.read(run.folder / f"{name}.ipynb", as_version=4)
    title, question = _opening(notebook)
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    tables = [html for data in shown if (html := data.get("text/html", "")).startswith(OURS)]
    figures = [data[PLOTLY] for data in shown if PLOTLY in data]
    lead = f'{question} <a href="{escape(name)}.html">The whole notebook</a>'
    parts = []
    if run.metrics.get(name):
        parts += ["<h3>Numbers</h3>", settings(run.metrics[name])]
    if tables:
        parts += ["<h3>Tables</h3>", *map(only_a_table, tables)]
    parts += [figure(one) for one in figures]
    if run.params[name]:
        told = ", ".join(f"{key} = {said(value)}" for key, value in run.params[name].items())
        parts.append(f"<p><small>Parameters: {escape(told)}</small></p>")
    return Section(name, title or name, lead, parts, short=name)


def _opening(notebook: nbformat.NotebookNode) -> tuple[str, str]:
    """Title and question of a notebook: the claim of its first cell, and what it asks, as HTML."""
    first = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown" and "# " in cell.source), "")
    title = re.search(r"^# (.+)$", first, re.M)
    question = re.search(r"\*\*Question\.\*\* (.+?)(?:\n\n|\Z)", first, re.S)
    return (title.group(1) if title else ""), (_words(" ".join(question.group(1).split())) if question else "")


def _words(markdown: str) -> str:
    """A paragraph with formulas, `code` and *stress* as HTML."""
    parts, at = [], 0
    for match in FORMULA.finditer(markdown):
        parts.append(_stressed(markdown[at : match.start()]))
        code = match.group(1)
        parts.append(f"<code>{escape(code.strip('`'))}</code>" if code else formula(match))
        at = match.end()
    return "".join(parts) + _stressed(markdown[at:])


def _stressed(text: str) -> str:
    text = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", text)  # links of a notebook lead nowhere here
    return re.sub(r"\*\*?(\S[^*]*?)\*\*?", r"<em>\1</em>", escape(text, quote=False))
