"""Runs to report on: trained on a copy of the small world with titles nobody would choose, and a batch of notebooks."""

import ast
import json
import shutil
from pathlib import Path
from unittest.mock import patch

import jupytext
import nbformat
import pandas as pd
import plotly.graph_objects as go
import yaml
from IPython.core.formatters import DisplayFormatter
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from bachlib.data import Dataset
from bachlib.data.dataset import content_hash
from bachlib.evaluate import evaluate
from bachlib.evaluate.tables import table
from bachlib.files import output_dir, read_json, write_json
from bachlib.model.methods import build
from bachlib.show.page import page
from bachlib.show.steering import sliders
from bachlib.train import Run, fit
from bachlib.train.run import data_of

NASTY = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=1> \"a\" 'b' & {{c}} &lt;"
NASTY += " <b>d</b> <a href='javascript:window.hacked=1'>e</a> %{x} ${f} $g^2$ 😀 שלום"
SMALL = {"d": 8, "ff": 16, "item_width": 16}


def renamed(world: Dataset, name: str, titles=None, genres=None) -> Dataset:
    """A copy of a prepared data set whose items have other titles and genres."""
    folder = output_dir("data", name)
    shutil.copytree(world.folder, folder, dirs_exist_ok=True)
    items = pd.read_parquet(folder / "items.parquet")
    items["title"] = items["title"] if titles is None else [titles(i) for i in range(len(items))]
    items["genres"] = items["genres"] if genres is None else [genres(row) for row in items["genres"]]
    items.to_parquet(folder / "items.parquet")
    write_json(folder / "meta.json", read_json(folder / "meta.json") | {"content_hash": content_hash(folder)})
    return Dataset.load(folder)


def trained(dataset: Dataset, method: str, k: int = 4, name: str | None = None, evaluated: bool = True, **params):
    """A run of two short epochs in outputs/runs."""
    settings = {"epochs": 2, "batch_size": 512, "n_negatives": 128, "valid_every": 1, "log_steps": 5}
    folder = output_dir("runs", name or f"{method}-{dataset.folder.name}")
    run = fit(build(method, dataset, k, **SMALL, **params), dataset, settings, folder, fresh=True, quiet=True)
    if evaluated:
        evaluate(run, dataset, quiet=True).save(run.folder)
    return run


def in_process(run, data="") -> str:
    """The page of `bach report`, with the cells of its notebook executed here: a kernel takes seconds to start."""
    notebook = jupytext.read(Path(__file__).resolve().parent.parent / "notebooks" / "report.py")
    namespace, shown = {}, []
    with patch("IPython.display.display", lambda *values: shown.extend(values)):
        for cell in notebook.cells:
            if cell.cell_type != "code":
                continue
            tree = ast.parse(cell.source)
            last = ast.Expression(tree.body.pop().value) if isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "cell", "exec"), namespace)
            value = eval(compile(last, "cell", "eval"), namespace) if last else None
            cell.outputs = [new_output("display_data", as_data(x)) for x in [*shown, value] if x is not None]
            shown.clear()
            if "parameters" in cell.metadata.get("tags", []):
                namespace |= {"run": str(run), "data": str(data)}
    return page(notebook, Path(run).name, lessons=False)


def as_data(value) -> dict:
    """What a kernel sends of a value."""
    if isinstance(value, go.Figure):
        return {"application/vnd.plotly.v1+json": json.loads(value.to_json())}
    return DisplayFormatter().format(value)[0]


def batch(folder, runs=(), failed: bool = False, model=None, title: str = "Two bars"):
    """A folder as `bach run` leaves it: two notebooks, of which the second may have failed."""
    folder.mkdir(parents=True)
    (folder / "params.yaml").write_text(
        yaml.safe_dump({"name": "my batch", "notebooks": ["00_a", "01_b"], "path": "<b>"})
    )
    ran = {"00_a": {"seconds": 1.5, "values": {"seed": 7}}, "01_b": {"seconds": 2.5, "values": {}}}
    status = {"status": "done", "notebooks": ran}
    if failed:
        del status["notebooks"]["01_b"]
        status |= {"status": "failed", "failed": "01_b", "error": "BachError: 1 < 2 </pre><script>x</script>"}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "metrics.json").write_text(json.dumps({"00_a": {"R@50": 0.123456, "users": 241}}))
    figure = go.Figure(go.Bar(x=[1, 2], y=[3, 4], marker_color="#222222")).update_layout(title=title)
    shown = [new_output("display_data", {"application/vnd.plotly.v1+json": json.loads(figure.to_json())})]
    if runs:
        html = table(list(runs), baseline="all-multihead")._repr_html_()
        shown.append(new_output("display_data", {"text/html": html.replace("<small>", "<small onclick='x()'>")}))
    shown.append(new_output("display_data", {"text/html": "<table><tr><td>a pandas table</td></tr></table>"}))
    opening = "# 00 · The claim <i>\n\n**Question.** What is $\\pi_u$ *worth*, and `a < b`?\n\nPrerequisites: none."
    cells = [new_markdown_cell(opening), new_code_cell("show()", outputs=shown)]
    nbformat.write(new_notebook(cells=cells), folder / "00_a.ipynb")
    cells = [new_markdown_cell("# 01 · Another")]
    if model is not None:
        run = output_dir() / model
        steered = sliders(Run.load(run, data_of(run)), data_of(run))
        cells.append(new_code_cell("steer()", outputs=[new_output("display_data", steered._repr_mimebundle_())]))
    nbformat.write(new_notebook(cells=cells), folder / "01_b.ipynb")
    return folder
