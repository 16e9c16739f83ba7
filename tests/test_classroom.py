"""`make class`: the exercises of every chapter without answers, and what is ready at the end."""

import ast
import re
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_markdown_cell, new_notebook

from bachlib import BachError
from bachlib.experiment import classroom
from bachlib.experiment.classroom import exercises, without_answers

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def plain(text: str) -> str:
    """Words only, so that neither line breaks nor marks hide a text."""
    return " ".join(re.findall(r"\w+", text))


def printed(path: Path) -> tuple[list[str], list[str]]:
    """The exercises as they stand in a chapter: questions and answers."""
    section = re.search(r"^# ## Exercises$(.*?)^# %%", path.read_text(), re.DOTALL | re.MULTILINE)
    text = re.sub(r"^# ?", "", section[1], flags=re.MULTILINE) if section else ""
    parts = re.split(r"<details><summary>Answer</summary>|</details>", text)
    asked = [re.split(r"^\d+\. ", part, flags=re.MULTILINE)[1] for part in parts[0:-1:2]]
    return asked, parts[1::2]


@pytest.fixture(scope="module")
def made():
    return {path.stem: nbformat.read(path, 4) for path in exercises().iterdir()}


def test_questions_are_there_and_answers_are_not(made):
    everything = {name: plain(nbformat.writes(notebook).replace(r"\n", " ")) for name, notebook in made.items()}
    with_exercises = set()
    for path in NOTEBOOKS.glob("*.py"):
        questions, answers = printed(path)
        assert len(questions) == len(answers) == path.read_text().count("<summary>Answer")
        with_exercises |= {path.stem} if questions else set()
        told = (
            [plain(cell.source) for cell in made[path.stem].cells if cell.cell_type == "markdown"] if questions else []
        )
        for question in questions:
            question = re.sub(r"\]\([\w./-]+\)", "", question)
            assert sum(words.endswith(plain(question)) for words in told) == 1, f"{path.stem}: {question}"
        for answer in answers:
            pieces = [plain(piece) for piece in re.split(r"\n|[.:;]\s", answer)]
            for piece in [piece for piece in pieces if len(piece) > 15]:
                there = [name for name, text in everything.items() if piece in text]
                assert not there, f"an answer of {path.stem} is in {there}: {piece}"
    assert with_exercises == made.keys() and len(made) >= 15
    assert not [name for name, text in everything.items() if re.search("details|summary Answer", text)]


def test_a_notebook_to_work_in(made):
    for name, notebook in made.items():
        nbformat.validate(notebook)
        chapter = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
        code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
        for source in code:
            ast.parse(source)
        questions, _ = printed(NOTEBOOKS / f"{name}.py")
        first = code[: len(code) - len(questions)]
        assert first and first == [cell.source for cell in chapter.cells if cell.cell_type == "code"][: len(first)]
        assert "".join(code[len(first) :]) == "", f"{name}: a cell below an exercise is not empty"
        assert [cell.cell_type for cell in notebook.cells][-2 * len(questions) :] == ["markdown", "code"] * len(
            questions
        )
        assert not any(cell.get("outputs") for cell in notebook.cells)
        tagged = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
        assert [cell.source for cell in tagged] == first[:1], f"{name}: the parameters come first"
        assert notebook.metadata.kernelspec.name == "python3"


@pytest.mark.parametrize("exercise", [
    "1. Why?\n<details><summary>Hint</summary>42</details>",
    "1. Why?\n<details><summary>Answer</summary>42",
    "1. Why?\n2. How?\n<details><summary>Answer</summary>42</details>",
    "Why?\n<details><summary>Answer</summary>42</details>",
])  # fmt: skip
def test_an_exercise_of_another_form_is_named(exercise):
    cells = [new_markdown_cell("# A"), new_markdown_cell(f"## Exercises\n\n{exercise}")]
    with pytest.raises(BachError, match=r"notebooks/a\.ipynb: the exercises should be 1\. "):
        without_answers(new_notebook(cells=cells), Path("notebooks/a.ipynb"))


def test_what_is_ready_is_told(monkeypatch, tmp_path, capsys):
    """Both runs are those of `bach run`, which executes nothing twice."""
    asked = []
    monkeypatch.setattr(classroom, "run", lambda p, **options: asked.append((p.name, options)) or tmp_path / p.name)
    monkeypatch.setattr(classroom, "exercises", lambda: tmp_path)
    (tmp_path / "one.ipynb").touch()
    told = classroom.day_before()
    assert asked == [("quickstart", {"workers": None}), ("teaching", {"workers": None})]
    for piece in (
        "quickstart/report.html",
        "teaching/report.html",
        f"1 notebooks without answers, to copy to the students: {tmp_path}",
        "make lab",
    ):
        assert piece in told, piece
    assert "teaching: 2,000 users" in capsys.readouterr().out
