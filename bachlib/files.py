"""Where things are kept: the outputs folder, folders and files that appear whole or not at all, run records."""

from __future__ import annotations

import ast
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from bachlib import BachError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

RUN_DIR = "BACH_RUN_DIR"  # set by `bach run` for the notebooks it executes
MODELS = "models.json"  # of a run: which models its notebooks have handed over, relative to the outputs folder


def project_root() -> Path:
    """The folder that holds `notebooks/`: of an editable install, else the nearest one above the working folder."""
    here = Path.cwd()
    for folder in [Path(__file__).resolve().parent.parent, here, *here.parents]:
        if (folder / "notebooks").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    return here


def output_dir(*parts: str) -> Path:
    """`outputs/` of the project, or `BACH_OUTPUT_DIR`; the folder is made by whoever writes into it."""
    base = os.environ.get("BACH_OUTPUT_DIR")
    return (Path(base).expanduser().resolve() if base else project_root() / "outputs").joinpath(*parts)


def canonical_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, indent=2, ensure_ascii=False) + "\n"


def short_hash(value: Any) -> str:
    """Eight hex digits of a parameter set, for readable folder names."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:8]


@lru_cache
def code_hash(parts: tuple[str, ...] = ("",)) -> str:
    """Eight hex digits of the code in these files and folders of the package; comments and docstrings do not count."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for one in parts:
        for path in sorted((package / one).rglob("*.py")) if (package / one).is_dir() else [package / one]:
            digest.update(f"{path.relative_to(package)} {_code(path.read_text(encoding='utf-8'))}".encode())
    return digest.hexdigest()[:8]


def _code(source: str) -> str:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                value.value = ""
    return ast.dump(tree)


def differences(a: Any, b: Any, in_a: str, in_b: str, name: str = "") -> list[str]:
    """In which places two nested records differ, in words: "data.name is 'x' there and 'y' here"."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(key for key in b if key not in a)]
        parts = [differences(a.get(key), b.get(key), in_a, in_b, f"{name}.{key}".lstrip(".")) for key in keys]
        return [line for part in parts for line in part]
    return [] if a == b else [f"{name} is {a!r} {in_a} and {b!r} {in_b}"]


def write_text(path: Path, text: str) -> None:
    """Write a file atomically: readers see the old one or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_table(path: Path, table: Any) -> None:
    """Write a pandas table as Parquet, atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        table.to_parquet(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill: it takes the place of `target` when the block ends well and vanishes when it does not."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep_partials(target)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.{os.getpid()}.", suffix=".partial", dir=target.parent))
    (new := aside / "new").mkdir()
    try:
        yield new
        if target.exists():
            os.rename(target, aside / "old")
        os.rename(new, target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def only_one(target: Path) -> Iterator[None]:
    """Wait until no other process is making `target`. (Where files cannot be locked, nobody waits.)"""
    with _lock_of(target).open("w") as lock:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX)  # goes with the process, also when it is killed
        yield


def in_progress(target: Path) -> bool:
    """Is a process of this machine making `target`, inside `only_one`?"""
    with _lock_of(target).open("w") as lock:
        try:
            if fcntl:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _lock_of(target: Path) -> Path:
    name = hashlib.sha256(str(target).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"bach-{name}.lock"


def _sweep_partials(target: Path) -> None:
    """Remove what processes that were killed have left behind; the living keep theirs."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        with suppress(ValueError, ProcessLookupError, PermissionError):
            pid = int(left.name.removeprefix(f".{target.name}.").split(".")[0])
            try:
                os.kill(pid, 0)
            except ProcessLookupError:
                shutil.rmtree(left, ignore_errors=True)


def versions() -> dict[str, str]:
    """Python and every installed package this workbook names as its own dependency."""
    names = sorted({re.match(r"[\w.-]+", wanted).group() for wanted in metadata.requires("bachlib") or []})
    found = {"python": platform.python_version()}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def record(
    notebook: str, metrics: dict[str, float | int | str], model: str | Path | None = None
) -> dict[str, float | int | str]:
    """Keep a notebook's numbers: into the run's `metrics.json` under `bach run`, and back to the cell to be shown.

    `model`: the folder of a training run that the report of the run is to let people steer, the last one given.
    """
    if model is not None and not (Path(model) / "run.json").exists():
        raise BachError(f"model={str(model)!r}: should be the folder of a training run (it has no run.json)")
    if folder := os.environ.get(RUN_DIR):
        _add(Path(folder) / "metrics.json", notebook, metrics)
        if model is not None:
            _add(Path(folder) / MODELS, notebook, os.path.relpath(Path(model).resolve(), output_dir()))
    return metrics


def read_json(path: Path) -> dict[str, Any]:
    """The table in a JSON file; empty where there is none, or one that cannot be read."""
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}


def forget(path: Path, keep: Container[str]) -> None:
    """Of a JSON file's entries only these stay; no file if none does."""
    if kept := {key: value for key, value in read_json(path).items() if key in keep}:
        _write(path, kept)
    else:
        path.unlink(missing_ok=True)


def _add(path: Path, key: str, value: Any) -> None:
    """One more entry of a JSON file, as the last one."""
    known = read_json(path)
    known.pop(key, None)
    _write(path, known | {key: value})


def _write(path: Path, entries: dict[str, Any]) -> None:
    write_text(path, json.dumps(entries, indent=2, ensure_ascii=False) + "\n")
