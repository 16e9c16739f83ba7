"""The project's own promises: one lock for pip and conda, extras, rooms that import only to their left, size."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import bachlib

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def direct() -> dict[str, Requirement]:
    extras = PROJECT["optional-dependencies"]
    wanted = [
        *PROJECT["dependencies"],
        *(line for name in ("lab", "sweep", "faiss-cpu", "export", "test") for line in extras[name]),
    ]
    return {canonicalize_name(r.name): r for r in map(Requirement, wanted)}


def lock() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "the lock holds only exact versions"
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def environment() -> dict[str, str]:
    (pip,) = [
        entry["pip"]
        for entry in yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
        if isinstance(entry, dict)
    ]
    assert pip[0] == "-c requirements.lock" and pip[-1] == "-e ."
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in pip[1:-1])}


def test_lock_follows_pyproject():
    locked = lock()
    for name, wanted in direct().items():
        assert name in locked, f"{name} of pyproject.toml is not in the lock: make lock"
        assert wanted.specifier.contains(locked[name]), (
            f"{name}: the lock has {locked[name]}, pyproject.toml wants {wanted}"
        )
    assert locked["torch"] == "2.13.0"
    assert {"<3", ">=2.6"} == {str(bound) for bound in direct()["torch"].specifier}, "pyproject.toml has a range"
    assert not {"faiss-gpu", "faiss-gpu-cu12"} & locked.keys(), "faiss-cpu and faiss-gpu must not be installed together"


def test_environment_follows_the_lock():
    assert environment() == {name: lock()[name] for name in direct()}
    assert "faiss-gpu" in (ROOT / "environment.yml").read_text(), "the comment on GPU hosts is gone"


def test_the_lock_is_what_is_installed_and_complete():
    locked = lock()
    for name, version in locked.items():
        assert metadata.version(name).split("+")[0] == version, f"{name}: installed is another version; run make again"
        for needed in map(Requirement, metadata.requires(name) or []):
            applies = needed.marker is None or needed.marker.evaluate({"extra": ""})
            if applies and not needed.name.startswith(("nvidia-", "cuda-", "triton", "setuptools")):
                assert canonicalize_name(needed.name) in locked, f"{name} needs {needed.name}, which is not locked"


def test_the_extras_are_those_the_errors_name():
    modules = {"umap-learn": "umap", "faiss-cpu": "faiss", "pillow": "PIL", "mlflow-skinny": "mlflow"}
    modules["qdrant-client"] = "qdrant_client"
    extras = PROJECT["optional-dependencies"]
    for extra, named in bachlib.EXTRAS.items():
        packages = [Requirement(line).name for line in extras[extra]]
        assert named == [modules.get(package, package) for package in packages], f"bachlib.EXTRAS[{extra!r}]"


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["dynamic"] and "version" not in PROJECT
    assert metadata.version("bachlib") == bachlib.__version__


# ------------------------------------------------------------------------------------------------------ rooms

ROOMS = ["data", "model", "rank", "train", "evaluate", "serve", "show", "experiment", "bench"]
EVERYWHERE = {"params", "files", "reading"}  # at the top of the package, for every room; `cli` is for none


def imports_of(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("bachlib"):
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


@pytest.mark.parametrize(
    "path", sorted((ROOT / "bachlib").glob("*/**/*.py")), ids=lambda p: f"{p.parent.name}/{p.name}"
)
def test_a_module_imports_only_from_its_left(path):
    name_of_room = path.relative_to(ROOT / "bachlib").parts[0]
    here = ROOMS.index(name_of_room)
    for name in imports_of(path):
        if name.startswith("bachlib."):
            room = name.split(".")[1]
            if room in ROOMS:
                assert ROOMS.index(room) <= here, f"{path.name} imports {name}, which is to its right"
            else:
                assert room in EVERYWHERE or hasattr(bachlib, room), f"{path.name} imports {name}"
        if name.split(".")[0] in ("plotly", "ipywidgets", "anywidget"):
            assert name_of_room == "show", f"{path.name} imports {name}; only show/ draws"


@pytest.mark.parametrize("path", sorted((ROOT / "bachlib").rglob("*.py")), ids=lambda p: f"{p.parent.name}/{p.name}")
def test_a_private_name_is_used_in_its_module_only(path):
    """Allowed: self._x, cls._x, a private name of the same module, and the public parts of namedtuples and `os`."""
    tree = ast.parse(path.read_text())
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.fullmatch(r"_[a-z]\w*(?<!_)", node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")
            public = node.attr in ("_replace", "_asdict", "_fields", "_exit")
            assert of_self or public or node.attr in own, f"{path.name}:{node.lineno} uses {ast.unparse(node)}"
        if isinstance(node, ast.ImportFrom):
            private = [alias.name for alias in node.names if re.fullmatch(r"_[a-z]\w*", alias.name)]
            assert not private, f"{path.name}:{node.lineno} imports {private}"


MODULES = sorted((ROOT / "bachlib").rglob("*.py"))
MOST_LINES, FEW_LINES, AT_THE_TOP, ALL_LINES = 350, 60, 5, 20_900


def lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_a_module_is_one_concept():
    """Neither a heap of concepts nor a splinter: a short module needs more than one importer."""
    importers = {path: imports_of(path) for path in [*MODULES, *(ROOT / "notebooks").glob("*.py")]}
    problems = []
    for path in (path for path in MODULES if path.name != "__init__.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        using = [other for other, found in importers.items() if any(f"{one}.".startswith(f"{name}.") for one in found)]
        if lines(path) > MOST_LINES:
            problems.append(f"{name} has {lines(path)} lines: more than one concept")
        if lines(path) < FEW_LINES and len(using) < 2:
            problems.append(f"{name} has {lines(path)} lines and {len(using)} importer: a splinter")
    assert not problems, "\n".join(problems)


def test_the_package_stays_small():
    top = [path.name for path in (ROOT / "bachlib").glob("*.py")]
    assert len(top) <= AT_THE_TOP, f"at the top of bachlib: {', '.join(sorted(top))}"
    assert sum(map(lines, MODULES)) <= ALL_LINES


# ------------------------------------------------------------------------------------------------------ files


def committed() -> list[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout: which files belong to the project is not known")
    return listed.stdout.splitlines()


def test_no_path_of_a_machine():
    home = re.compile(r"/(?:home|Users|root)/\w+|/tmp/tmp\w+")
    for path in committed():
        if not path.endswith((".png", ".parquet")):
            found = home.search((ROOT / path).read_text())
            assert not found, f"{path} holds a path of somebody's machine: {found.group()}"


def test_make_works_from_a_path_with_spaces(tmp_path):
    """`make lint` in a copy with spaces in its path, with an environment that is ready (a link to this one)."""
    folder = tmp_path / "my work book"
    folder.mkdir()
    for name in ("Makefile", "requirements.lock", "pyproject.toml", "bachlib"):
        (folder / name).symlink_to(ROOT / name)
    (folder / ".venv" / "bin").mkdir(parents=True)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / ".venv" / "ready").touch()
    done = subprocess.run(
        ["make", "lint"], cwd=folder, capture_output=True, text=True, env={**os.environ, "MAKEFLAGS": ""}
    )
    assert done.returncode == 0, done.stdout + done.stderr
