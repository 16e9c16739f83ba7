"""The wheel outside the clone: it trains, evaluates and serves, and needs no more than its base dependencies."""

import json
import os
import shutil
import site
import subprocess
import sys
import tomllib
import venv
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bachlib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def not_brought() -> list[str]:
    """Modules of this environment whose packages `pip install bachlib` would not bring."""
    brought, waiting = {"bachlib", "setuptools", "pip"}, list(PROJECT["dependencies"])
    while waiting:
        needed = Requirement(waiting.pop())
        name = canonicalize_name(needed.name)
        if name not in brought and (needed.marker is None or needed.marker.evaluate({"extra": ""})):
            brought.add(name)
            with suppress(metadata.PackageNotFoundError):  # parts of torch's CUDA build
                waiting += metadata.requires(name) or []
    homes = metadata.packages_distributions()
    return sorted(name for name, of in homes.items() if not {canonicalize_name(one) for one in of} & brought)


TRAIN = """
import json
import sys

sys.modules |= dict.fromkeys(NOT_BROUGHT)  # as if only the base dependencies were installed

import bachlib
from bachlib.data import planted, prepare
from bachlib.evaluate import evaluate, paper
from bachlib.model.methods import build
from bachlib.serve import Retriever
from bachlib.train import Run, fit

log = planted.write_world("world", n_users=100, n_items=300, n_interests=5, mean_events=120)
dataset = prepare("planted", log, "outputs/data/small", quiet=True)
model = build("p-bach", dataset, k=4, d=8)
run = fit(model, dataset, {"epochs": 1, "batch_size": 256, "n_negatives": 128}, out="outputs/runs/mine")
recall = evaluate(Run.load(run.folder, dataset), dataset).means["R@50"]
slate = Retriever(run).retrieve([[1, 2, 3]], K=5)
missing = []
for part in ("bachlib.show", "bachlib.show.plots"):
    try:
        __import__(part)
    except ImportError as error:
        missing.append(str(error))
told = {"file": bachlib.__file__, "R@50": recall, "slate": slate.items.tolist(), "paper": sorted(paper.tables()),
        "missing": missing, "IPython": "IPython" in sys.modules}
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """An environment with bachlib from its wheel; other packages are those of this environment, to save gigabytes."""
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("outside")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "bachlib", source / "bachlib", ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, source]
    done = subprocess.run(build, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob(f"bachlib-{bachlib.__version__}-*.whl")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv" / "bin" / "python"
    (inside,) = (folder / "venv" / "lib").glob("python*/site-packages")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", inside, wheel]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # After the wheel on the path, and as plain lines: .pth files of these folders (our editable install) are not read.
    (inside / "others.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def outside(python: Path, *words: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("BACH_", "PYTHON"))}
    folder = python.parents[2]
    return subprocess.run([python, "-I", *words], capture_output=True, text=True, cwd=folder, env=clean)


def test_it_trains_evaluates_and_serves_with_the_base_dependencies(python):
    hidden = [name for name in not_brought() if name != "IPython"]  # whether it is loaded is asked by the progress bar
    assert {"plotly", "papermill", "distributed", "faiss", "umap", "nbformat"} <= set(hidden)
    done = outside(python, "-c", f"NOT_BROUGHT = {hidden}\n{TRAIN}")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert Path(told["file"]).is_relative_to(python.parents[1]), "bachlib should come from the wheel"
    assert 0 < told["R@50"] < 1 and len(told["slate"][0]) == 5 and "main" in told["paper"]
    assert not told["IPython"]
    assert told["missing"] == ["bachlib.show needs plotly: pip install 'bachlib[lab]'"] * 2


def test_commands(python):
    assert outside(python, "-m", "bachlib.cli", "--version").stdout == f"bachlib {bachlib.__version__}\n"
    assert "p-bach-global" in outside(python, "-m", "bachlib.cli", "methods").stdout
    assert "in a clone of the workbook" in outside(python, "-m", "bachlib.cli", "params").stdout
    assert "temperature" in outside(python, "-m", "bachlib.cli", "params", "model").stdout
    assert "torch" in outside(python, "-m", "bachlib.cli", "doctor").stdout
    done = outside(python, "-m", "bachlib.cli", "run", "quickstart")
    assert done.returncode == 2 and "inside a clone" in done.stderr


def test_data_files_are_in_the_wheel(python):
    (inside,) = python.parents[1].glob("lib/python*/site-packages/bachlib")
    kept = {path.relative_to(ROOT / "bachlib") for path in (ROOT / "bachlib").rglob("*") if path.is_file()}
    wanted = {path for path in kept if path.suffix in (".py", ".js", ".css", ".yaml")}
    assert wanted and all((inside / path).is_file() for path in wanted)
