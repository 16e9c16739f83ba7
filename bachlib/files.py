"""Paths, atomic writes, locks, hashes and the records of a run.

Atomic means: even after a crash or a power cut a file has its complete old or its complete new content.
"""

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

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

RUN_DIR = "BACH_RUN_DIR"  # set by `bach run` for the notebooks it executes
CHECKSUM = "checksum"  # an entry of JSON files
JSON_LENGTH = 1 << 26  # characters that are read at most


def project_root() -> Path:
    """The folder that holds `notebooks/`: the editable clone, else the nearest parent of the working folder."""
    here = Path.cwd()
    for folder in [Path(__file__).resolve().parent.parent, here, *here.parents]:
        if (folder / "notebooks").is_dir() and (folder / "pyproject.toml").is_file():
            return folder
    return here


def output_dir(*parts: str) -> Path:
    """A path in `outputs/` of the project, or in `BACH_OUTPUT_DIR`. The folder is not created."""
    base = os.environ.get("BACH_OUTPUT_DIR")
    return (Path(base).expanduser().resolve() if base else project_root() / "outputs").joinpath(*parts)


def canonical_json(value: Any, sort_keys: bool = True) -> str:
    return json.dumps(value, sort_keys=sort_keys, indent=2, ensure_ascii=False) + "\n"


def file_hash(path: Path, algorithm: str = "sha256") -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, algorithm).hexdigest()


def short_hash(value: Any) -> str:
    """Eight hex digits that identify a set of parameters, for folder names."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:8]


@lru_cache
def code_hash(parts: tuple[str, ...] = ("",)) -> str:
    """Eight hex digits that identify the code of these files and folders of the package, without docstrings."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for one in parts:
        for path in sorted((package / one).rglob("*.py")) if (package / one).is_dir() else [package / one]:
            digest.update(f"{path.relative_to(package)} {_code(path.read_text(encoding='utf-8'))}".encode())
    return digest.hexdigest()[:8]


def _code(source: str) -> str:
    tree = ast.parse(source)
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body[0].value.value = ""
    return ast.dump(tree)


def differences(a: Any, b: Any, in_a: str, in_b: str, name: str = "") -> list[str]:
    """The differences between two nested records as sentences: "data.name is 'x' there and 'y' here"."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = [*a, *(key for key in b if key not in a)]
        parts = [differences(a.get(key), b.get(key), in_a, in_b, f"{name}.{key}".lstrip(".")) for key in keys]
        return [line for part in parts for line in part]
    return [] if a == b else [f"{name} is {a!r} {in_a} and {b!r} {in_b}"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`. When the block succeeds, the file written there replaces `path` atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        move_into_place(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def move_into_place(complete: Path, target: Path) -> None:
    """Rename a complete file to `target`; its content is on the disk before its name is."""
    _sync(complete)
    os.replace(complete, target)
    _sync(target.parent)


def _sync(path: Path) -> None:
    """Make the system write a file, or the list of names in a folder, to the disk."""
    if path.is_file():
        with path.open("rb+") as file:
            os.fsync(file.fileno())
    elif os.name == "posix":  # Windows cannot sync a folder
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 file atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any, sort_keys: bool = True, checked: bool = False) -> None:
    """Write a JSON file atomically. `checked`: with a checksum of its other entries, which `read_json` compares."""
    if checked:
        value = value | {CHECKSUM: _checksum(value)}
    write_text(path, canonical_json(value, sort_keys))


def _checksum(value: dict[str, Any]) -> str:
    return short_hash({key: x for key, x in json.loads(json.dumps(value)).items() if key != CHECKSUM})


def write_table(path: Path, table: Any) -> None:
    """Write a pandas table as Parquet, atomically."""
    with replacing(path) as partial:
        table.to_parquet(partial, write_page_checksum=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill. It replaces `target` when the block succeeds and is deleted when the block fails.

    An old folder is renamed before the new one gets its name: a crash between the two renames leaves no `target`.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    _sweep_partials(target)
    aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.{os.getpid()}.", suffix=".partial", dir=target.parent))
    (new := aside / "new").mkdir()
    try:
        yield new
        for path in [*new.rglob("*"), new]:
            _sync(path)
        if target.exists():
            os.rename(target, aside / "old")
        os.rename(new, target)
        _sync(target.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def only_one(target: Path) -> Iterator[None]:
    """A lock: wait until no other process of this machine holds it for `target`. (Windows: no lock.)"""
    with _lock_of(target).open("wb") as lock:
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when the process ends, even if killed
        yield


def in_progress(target: Path) -> bool:
    """Does a process of this machine hold the lock `only_one(target)`?"""
    with _lock_of(target).open("wb") as lock, suppress(BlockingIOError):
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    return True


def _lock_of(target: Path) -> Path:
    return Path(tempfile.gettempdir(), f"bach-{hashlib.sha256(str(target).encode()).hexdigest()[:16]}.lock")


def _sweep_partials(target: Path) -> None:
    """Delete the partial folders of killed processes; keep those of running ones."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.partial"):
        try:
            os.kill(int(left.name.removeprefix(f".{target.name}.").split(".")[0]), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (ValueError, PermissionError):
            pass  # not ours


def versions() -> dict[str, str]:
    """Versions of Python and of every installed package that bachlib depends on."""
    found = {"python": platform.python_version()}
    for name in sorted({re.match(r"[\w.-]+", wanted).group() for wanted in metadata.requires("bachlib") or []}):
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def record(notebook: str, metrics: dict[str, float | int | str]) -> dict[str, float | int | str]:
    """Keep a notebook's numbers in the run's `metrics.json` (under `bach run`), and return them to be shown."""
    if folder := os.environ.get(RUN_DIR):
        path = Path(folder) / "metrics.json"
        with only_one(path):  # two notebooks of a run may end at the same time
            known = {key: value for key, value in read_json(path).items() if key != notebook}
            write_json(path, known | {notebook: metrics}, sort_keys=False, checked=True)
    return metrics


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or damaged, or its checksum (if any) is another."""
    try:
        with path.open(encoding="utf-8") as stream:
            if len(text := stream.read(JSON_LENGTH + 1)) > JSON_LENGTH:
                return {}
        known = json.loads(text)
        whole = isinstance(known, dict) and (CHECKSUM not in known or known[CHECKSUM] == _checksum(known))
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return {key: x for key, x in known.items() if key != CHECKSUM} if whole else {}


def forget(path: Path, keep: Container[str]) -> None:
    """Keep only these entries of a JSON file; delete the file if none is left."""
    if kept := {key: value for key, value in read_json(path).items() if key in keep}:
        write_json(path, kept, sort_keys=False, checked=True)
    else:
        path.unlink(missing_ok=True)
