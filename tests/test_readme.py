"""What the READMEs promise: their examples run, their commands and links exist, the list of modules is complete.

`python tests/test_readme.py` writes the list of modules of bachlib/README.md.
"""

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from commands import bach_here, surroundings
from typer.main import get_command

from bachlib.cli import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", "bachlib/README.md"]
ROOMS = ["", "data", "model", "rank", "train", "evaluate", "serve", "show", "experiment", "bench"]
LONG = re.compile(r"# (long|\d+ minutes?)\b")  # a comment that says how long a command takes: it is not executed here


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / page).read_text(), flags=re.M | re.S)


def commands(page: str) -> list[str]:
    return [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("bach ")]


# --------------------------------------------------------------------------------------------------- examples


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_run_as_printed(page, tmp_path):
    code = "\n".join(blocks(page, "python"))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True,
        env=surroundings(BACH_OUTPUT_DIR=tmp_path / "outputs", PYTHONPATH=ROOT),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_short_commands_run_as_printed(tmp_path, monkeypatch):
    """In an empty folder with a small `my.csv`, in the order of the page."""
    from bachlib.data import planted

    monkeypatch.chdir(tmp_path)
    log = planted.write_world(tmp_path / "world", n_users=150, n_items=300, n_interests=5, mean_events=120) / "log.csv"
    names = {"user": "CustomerID", "item": "StockCode", "time": "InvoiceDate"}
    head, _, rows = log.read_text().partition("\n")
    (tmp_path / "my.csv").write_text(",".join(names.get(name, name) for name in head.split(",")) + "\n" + rows)
    executed = 0
    for line in (line for page in PAGES for line in commands(page) if not LONG.search(line)):
        words = shlex.split(line, comments=True)[1:]
        done = bach_here(*words, BACH_OUTPUT_DIR=tmp_path / "outputs")
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        executed += 1
    assert executed >= 7


def test_printed_commands_exist_with_their_options():
    """Also those that are too long to be executed here, and those inside sentences."""
    known = get_command(app)
    for page in PAGES:
        for line in [*commands(page), *re.findall(r"`(bach [^`]+)`", (ROOT / page).read_text())]:
            name, *words = shlex.split(line, comments=True)[1:]
            assert name in known.commands, f"{page}: {line}: there is no command {name}"
            options = {option for one in known.commands[name].params for option in one.opts} | {"--help"}
            unknown = [word for word in words if word.startswith("--") and word not in options]
            assert not unknown, f"{page}: {line}: bach {name} has no option {', '.join(unknown)}"
            if name in ("run", "sweep") and words and words[0].islower():
                file = ROOT / "params" / ("sweeps" if name == "sweep" else "") / f"{words[0]}.yaml"
                assert file.exists(), f"{page}: {line}: {file.name} does not exist"


# ------------------------------------------------------------------------------------------------------ pages


@pytest.mark.parametrize(
    "page", ["README.md", "bachlib/README.md", "notebooks/README.md", "tests/README.md", "CONTRIBUTING.md", "LOG.md"]
)
def test_links_and_targets_exist(page):
    text = (ROOT / page).read_text()
    for link, anchor in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", text):
        file = (ROOT / page).parent / link if link else ROOT / page
        assert link.startswith("http") or file.exists(), f"{page} links to {link}, which does not exist"
        if anchor:
            titles = re.findall(r"^#+ (.*)", file.read_text(), flags=re.M)
            slugs = {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{page} links to {link}{anchor}, which does not exist"
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), flags=re.M)
    for pair in re.findall(r"^make (\w+)|`make (\w+)`", text, flags=re.M):
        assert "".join(pair) in targets, f"{page} mentions make {''.join(pair)}, which does not exist"
    assert {"run", "test", "lab", "sync", "lint", "bench", "clean"} <= set(targets)


def test_every_test_of_the_promises_exists():
    """The table of tests/README.md: each row ends with the tests that keep its promise."""
    rows = [line for line in (ROOT / "tests" / "README.md").read_text().splitlines() if "::" in line]
    for row in rows:
        fault, promise, tests = (cell.strip() for cell in row.strip("| ").split(" | "))
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", tests)
        assert fault and promise and named and len(named) == tests.count("::"), row
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), f"{file} has no test {name}"
    assert len(rows) >= 40


def test_the_readme_is_short_and_names_every_notebook():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 180
    for path in (ROOT / "notebooks").glob("*.py"):
        assert f"`{path.stem}`" in text, f"README.md does not name the notebook {path.stem}"


def test_the_guide_lists_every_module():
    assert module_table() in (ROOT / "bachlib/README.md").read_text(), "run: python tests/test_readme.py"


def module_table() -> str:
    """A row per module, with the first line of its docstring."""
    rows = ["| file | what it holds |", "| --- | --- |"]
    for room in ROOMS:
        folder = ROOT / "bachlib" / room
        paths = sorted(folder.glob("*.py") if not room else folder.rglob("*.py"), key=lambda path: path.parts)
        for path in paths:
            name = path.relative_to(ROOT / "bachlib").as_posix()
            first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
            first = re.split(r"(?<!\beq)(?<!\beqs)(?<!\bal)\.(?= |$)", first)[0].rstrip(":").replace("|", "\\|")
            assert first, f"{name} has no docstring"
            if path.name == "__init__.py":
                rows.append(f"| **`{name.removesuffix('__init__.py') or 'bachlib/'}`** | **{first}** |")
            else:
                rows.append(f"| [`{name}`]({name}) | {first} |")
    return "\n".join(rows) + "\n"


# -------------------------------------------------------------------------------------------- licence, citation


def test_the_citation_is_complete():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert cited["cff-version"] == "1.2.0"
    assert cited["message"] and cited["title"] and cited["authors"]  # required by the format
    paper = cited["preferred-citation"]
    assert paper["type"] and paper["authors"] and paper["title"].startswith("BACH: A Bayesian Admixture")
    assert all(author.get("family-names") for author in paper["authors"])
    from bachlib import __version__

    assert cited["version"] == __version__ and cited["license"] == "MIT"
    assert (ROOT / "LICENSE").read_text().startswith("MIT License")


if __name__ == "__main__":
    page = ROOT / "bachlib" / "README.md"
    kept = page.read_text().split("| file | what it holds |")[0]
    page.write_text(kept + module_table())
