"""`bach site`: the committed notebooks and the project's pages of text as a folder of linked pages for any static host.

Every page is made by `bachlib.show.page` and works from a disk. They share one file, plotly.js.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path

import nbformat
from nbformat.v4 import new_markdown_cell, new_notebook

from bachlib import BachError
from bachlib.experiment.report import read_notebook
from bachlib.experiment.settings import notebook_folder, notebook_names
from bachlib.experiment.sync import all_executed
from bachlib.files import output_dir, project_root, whole_folder
from bachlib.show.page import page, plotly_js

LEDGER, LIBRARY, INDEX = "11_claims", "plotly.js", "index.html"
TEXTS = {
    "README.md": "README.html",
    "LOG.md": "LOG.html",
    "notebooks/README.md": "class.html",
    "bachlib/README.md": "bachlib.html",
    "CONTRIBUTING.md": "CONTRIBUTING.html",
}


def site() -> Path:
    """Write `outputs/site`, whole or not at all; returns the folder. Nothing is executed."""
    names = sorted(notebook_names(), key=lambda name: name != LEDGER)  # the ledger first, the others in their order
    files = [notebook_folder() / f"{name}.ipynb" for name in names]
    texts = [project_root() / name for name in TEXTS]
    pages = dict(zip(files, (f"{name}.html" for name in names), strict=True))
    pages |= dict(zip(texts, TEXTS.values(), strict=True))
    with whole_folder(output_dir("site")) as folder:
        (folder / LIBRARY).write_text(plotly_js(), encoding="utf-8")
        claims = {}
        for n, (name, file) in enumerate(zip(names, files, strict=True)):
            notebook = read_notebook(file)
            if not all_executed(notebook):
                raise BachError(f"{file} is not executed: run `make sync` first")
            claims[name] = re.sub(r"^# (\w+ · )?", "", notebook.cells[0].source.partition("\n")[0])
            beside = [("prev", f"{names[n - 1]}.html", f"← {names[n - 1]}")] if n else []
            beside += [("index", INDEX, "all pages")]
            beside += [("next", f"{names[n + 1]}.html", f"{names[n + 1]} →")] if n + 1 < len(names) else []
            _write(folder / pages[file], _linked(notebook, file, pages), beside)
        for file in texts:
            text = new_notebook(cells=[new_markdown_cell(file.read_text(encoding="utf-8"))])
            _write(folder / pages[file], _linked(text, file, pages), [("index", INDEX, "all pages")])
        _write(folder / INDEX, _index(claims), [])
    return output_dir("site")


def _write(path: Path, notebook: nbformat.NotebookNode, beside: list[tuple[str, str, str]]) -> None:
    path.write_text(page(notebook, plotly=LIBRARY, beside=beside), encoding="utf-8")


def _linked(notebook: nbformat.NotebookNode, file: Path, pages: dict[Path, str]) -> nbformat.NotebookNode:
    """Links to other files of the project lead to their pages, also from the bare name of a notebook. Links to files
    without a page are words on the page. Pictures become a part of it."""
    known = "|".join(path.stem for path in pages if path.suffix == ".ipynb")

    def link(match: re.Match) -> str:
        target = pages.get((file.parent / match[1]).resolve())
        return f"]({target}{match[2] or ''})" if target else match[0]

    for cell in notebook.cells:
        if cell.cell_type != "markdown":
            continue
        for shown in re.findall(r"!\[[^\]]*\]\(([\w./-]+\.png)\)", cell.source):
            picture = base64.b64encode((file.parent / shown).read_bytes()).decode()
            cell.setdefault("attachments", {})[Path(shown).name] = {"image/png": picture}
            cell.source = cell.source.replace(f"]({shown})", f"](attachment:{Path(shown).name})")
        text = re.sub(r"\]\(([\w./-]+)(#[\w-]+)?\)", link, cell.source)
        lines = (  # a heading cannot hold a link
            line if line.startswith("#") else re.sub(rf"(?<!\[)`({known})`(?!\])", r"[`\1`](\1.html)", line)
            for line in text.split("\n")
        )
        cell.source = "\n".join(lines)
    return notebook


def _index(claims: dict[str, str]) -> nbformat.NotebookNode:
    named = {
        "README": "What was found, and how to install and use the workbook",
        "class": "The path for a class, a researcher, an engineer",
        "bachlib": "A guide to the package",
        "CONTRIBUTING": "How to test and extend it",
        "LOG": "All findings and decisions, the failed ones too",
    }
    lines = [
        "# The BACH workbook\n",
        "Notebooks about the paper *BACH: A Bayesian Admixture of Contrastive Heads for Multi-Interest Two-Tower",
        "Retrieval*. Each takes one claim and checks it in cells that can fail. The pages show what was executed.",
        "\n## Notebooks\n\n| notebook | claim |\n| --- | --- |",
        *(f"| [`{name}`]({name}.html) | {claim} |" for name, claim in claims.items()),
        "\n## Texts\n",
        *(f"- [{words}]({name}.html)" for name, words in named.items()),
    ]
    return new_notebook(cells=[new_markdown_cell("\n".join(lines))])
