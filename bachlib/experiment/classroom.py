"""`bach class`: what a teacher needs the day before: both runs of the notebooks, and the exercises without answers.

The exercises are those of the notebooks. Each chapter becomes a notebook of its parameters, its code, and its exercises
with an empty cell each. The answers are not in the file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from bachlib import BachError
from bachlib.experiment.notebooks import run
from bachlib.experiment.report import PAGE, read_notebook
from bachlib.experiment.settings import notebook_folder, notebook_names, read_experiment
from bachlib.files import output_dir, whole_folder

RUNS = {
    "quickstart": "the notebooks as students see them",
    "teaching": "2,000 users and three seeds, a quarter of an hour; keep its report open in class",
}
HEADING = re.compile(r"^## Exercises", re.MULTILINE)
FOLDED = re.compile(r"\s*<details>\s*<summary>Answer</summary>(.*?)</details>", re.DOTALL)
LEFT = re.compile(r"</?(details|summary)\b", re.IGNORECASE)


def day_before() -> str:
    """Run the notebooks at both scales, except what is finished, and write the exercises. Returns what is ready."""
    folder, reports = exercises(), {}
    for name, what in RUNS.items():
        print(f"{name}: {what}", flush=True)
        reports[name] = run(read_experiment(name), workers=None) / PAGE
    count = len([*folder.glob("*.ipynb")])
    ready = {
        **{f"report, {name}": page for name, page in reports.items()},
        "exercises": f"{count} notebooks without answers, to copy to the students: {folder}",
        "explorer": "run make lab, open explorer, choose Run All Cells",
    }
    left = "still to do: make run on every machine of the class"
    return "\n".join(["ready:", *(f"  {what:<19} {where}" for what, where in ready.items()), left])


def exercises() -> Path:
    """Write `outputs/class`, a notebook for each chapter with exercises, whole or not at all; returns the folder."""
    with whole_folder(output_dir("class")) as folder:
        for name in notebook_names():
            source = notebook_folder() / f"{name}.ipynb"
            if made := without_answers(read_notebook(source), source):
                nbformat.write(made, folder / f"{name}.ipynb")
    return output_dir("class")


def without_answers(chapter: nbformat.NotebookNode, source: Path) -> nbformat.NotebookNode | None:
    """The exercises of a chapter as a notebook of its own; None for a chapter without exercises."""
    found = (n for n, cell in enumerate(chapter.cells) if cell.cell_type == "markdown" and HEADING.search(cell.source))
    if (place := next(found, None)) is None:
        return None
    section = chapter.cells[place].source
    section = section[HEADING.search(section).start() :]
    text = re.sub(r"\[([^\]]*)\]\([\w./-]+\)", r"\1", FOLDED.sub("", section))  # links lead to chapters with answers
    opening, *questions = re.split(r"^(?=\d+\. )", text, flags=re.MULTILINE)
    if LEFT.search(text) or len(questions) != len(FOLDED.findall(section)):
        form = "1. …, 2. … and each have one answer, <details><summary>Answer</summary>…</details>"
        raise BachError(f"{source}: the exercises should be {form}")
    title = chapter.cells[0].source.partition("\n")[0].removeprefix("# ")
    lead = "The code of the chapter, then its exercises. To change a parameter, change it here and run all cells again."
    cells = [new_markdown_cell(f"# Exercises · {title}\n\n{lead}"), *_code(chapter.cells[:place])]
    cells.append(new_markdown_cell(opening.strip()))
    for question in questions:
        cells += [new_markdown_cell(question.strip()), new_code_cell()]
    for number, cell in enumerate(cells):
        cell["id"] = f"exercise-{number}"  # the same chapter gives the same file
    return new_notebook(cells=cells, metadata={"kernelspec": chapter.metadata.kernelspec})


def _code(cells: list[nbformat.NotebookNode]) -> Iterator[nbformat.NotebookNode]:
    """The code cells without outputs, below the headings of their sections."""
    for cell in cells:
        if cell.cell_type == "code":
            yield new_code_cell(cell.source, metadata={"tags": cell.metadata.get("tags", [])})
        else:
            yield from (new_markdown_cell(line) for line in re.findall(r"^## .*", cell.source, flags=re.MULTILINE))
