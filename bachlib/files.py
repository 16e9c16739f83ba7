"""Paths, atomic writes, locks, hashes and the records of a run.

Atomic means: even after a crash or a power cut a file has its complete old or its complete new content.
"""

import ast
import ctypes
import errno
import glob
import hashlib
import json
import os
import platform
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

from bachlib import BachError

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
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with clear_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _clear_partials(path)
        try:
            yield partial
            move_into_place(partial, path)
        finally:
            partial.unlink(missing_ok=True)


@contextmanager
def clear_errors(target: Path) -> Iterator[None]:
    """Turn the errors of a full disk, of short memory, and of a place that cannot be written into advice."""
    try:
        yield
    except BachError:
        raise
    except Exception as error:
        number, told = getattr(error, "errno", None), str(error)  # other languages' libraries only tell it in words
        if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG) or re.search("no space left|file too large", told, re.I):
            advice = "Free some space, or move the outputs with BACH_OUTPUT_DIR"
            raise BachError(f"no disk space left to write {target}; nothing half-written was kept. {advice}") from error
        if isinstance(error, MemoryError) or number == errno.ENOMEM or re.search("allocate memory|bad_alloc", told):
            what = f"memory was short while working on {target} ({told.splitlines()[0] if told else 'no memory left'})"
            raise BachError(
                f"{what}; what was written before is whole. Close other programs, or choose smaller parameters"
            ) from error
        if number in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
            place = Path(getattr(error, "filename", None) or target)
            if not place.is_relative_to(target.parent) and not target.is_relative_to(place):
                raise BachError(f"{place} cannot be opened ({os.strerror(number)})") from error
            advice = "Choose another folder, or move the outputs with BACH_OUTPUT_DIR"
            raise BachError(f"{target} cannot be written ({os.strerror(number)}). {advice}") from error
        raise


def reserve(path: Path) -> None:
    """Claim the disk space of a memory-mapped file. Without it, a full disk would end the process by SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        with path.open("rb+") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


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


def write_table(path: Path, table: Any, compact: bool = False) -> None:
    """Write a pandas table as Parquet, atomically.

    `compact`: less than half the bytes, for files under version control; what pandas notes of the index is left out.
    """
    smaller = {}
    if compact:
        table = table.reset_index() if table.index.name else table
        flat = {name: "BYTE_STREAM_SPLIT" for name in table if table[name].dtype != object}
        smaller = {"compression": "zstd", "compression_level": 19, "use_dictionary": False, "column_encoding": flat}
        smaller |= {"store_schema": False, "write_statistics": False}
    with replacing(path) as partial:
        table.to_parquet(partial, write_page_checksum=True, **smaller)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """A new folder to fill. It replaces `target` when the block succeeds and is deleted when the block fails.

    One process at a time. On Linux the two folders are swapped in one step. Elsewhere the old one is renamed first: a
    crash between the two renames leaves no `target`.
    """
    with only_one(target), clear_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}.{os.getpid()}.", suffix=".partial", dir=target.parent))
        (new := aside / "new").mkdir()
        try:
            yield new
            for path in [*new.rglob("*"), new]:
                _sync(path)
            if not _swapped(new, target):
                if target.exists():
                    os.rename(target, aside / "old")
                os.rename(new, target)
            _sync(target.parent)
        finally:
            shutil.rmtree(aside, ignore_errors=True)


def _swapped(a: Path, b: Path) -> bool:
    """Swap two folders in one step; False if the system cannot, or if one of them does not exist."""
    try:
        swap = ctypes.CDLL(None).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return swap(here, os.fsencode(a.absolute()), here, os.fsencode(b.absolute()), exchange) == 0


_held = threading.local()  # the locks of this thread, which may ask for one again


@contextmanager
def only_one(target: Path, busy: Callable[[], None] = lambda: None) -> Iterator[None]:
    """A lock: wait until no other thread or process of this machine holds it for `target`. (Windows: no lock.)

    `busy` is called before waiting, and may raise. What killed processes left of `target`, or in it, is deleted.
    """
    path, held = _lock_of(target), _held.__dict__
    if path in held:
        yield
        return
    with _opened(path) as lock:
        if fcntl:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                busy()
                fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when the process ends, even if killed
        held[path] = True
        try:
            _clear_partials(target)
            yield
        finally:
            del held[path]


def in_progress(target: Path) -> bool:
    """Does a process of this machine hold the lock `only_one(target)`?"""
    with _opened(_lock_of(target)) as lock, suppress(BlockingIOError):
        if fcntl:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    return True


def _lock_of(target: Path) -> str:
    name = hashlib.sha256(str(target.absolute()).encode()).hexdigest()[:16]
    return os.path.join(tempfile.gettempdir(), f"bach-{name}.lock")


def _opened(lock: str) -> BinaryIO:
    with clear_errors(Path(lock)):
        try:
            return open(os.open(lock, os.O_RDONLY | os.O_CREAT, 0o644), "rb")
        except PermissionError:
            if not os.path.exists(lock):
                raise
            return open(lock, "rb")  # another user has created it


def _clear_partials(target: Path) -> None:
    """Delete what killed processes left half-written, of `target` or in it; keep what running ones write."""
    for left in [*target.parent.glob(f".{glob.escape(target.name)}.*.partial"), *target.glob(".*.partial")]:
        owner = re.search(r"\.(\d+)(\.\w{8})?\.partial$", left.name)
        if owner and not _lives(int(owner[1])):
            shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno != errno.ESRCH  # PermissionError: it lives and is not ours
    return True


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


def read_json(path: Path, checked: bool = False) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or damaged, or its checksum is another.

    Files of earlier versions have no checksum. `checked`: then they are damaged, too.
    """
    try:
        with path.open(encoding="utf-8") as stream:
            if len(text := stream.read(JSON_LENGTH + 1)) > JSON_LENGTH:
                return {}
        known = json.loads(text)
        whole = isinstance(known, dict)
        if whole and (checked or CHECKSUM in known):
            whole = known.get(CHECKSUM) == _checksum(known)
    except (FileNotFoundError, ValueError, RecursionError):
        return {}
    return {key: x for key, x in known.items() if key != CHECKSUM} if whole else {}


def forget(path: Path, keep: Container[str]) -> None:
    """Keep only these entries of a JSON file; delete the file if none is left."""
    if kept := {key: value for key, value in read_json(path).items() if key in keep}:
        write_json(path, kept, sort_keys=False, checked=True)
    else:
        path.unlink(missing_ok=True)
