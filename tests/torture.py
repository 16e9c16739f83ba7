"""A torture of the disk: commands are killed at random moments, or right before one of their writes, and called again.

    make torture                              200 kills, and every crash point; prints a table
    python tests/torture.py 5 prepare train   five kills of each of these; 0: crash points only

After each kill a reader sees the old or the new state and nothing between. The same call then ends with the result of
an undisturbed one: byte for byte where bytes are promised, else value for value. Nothing half-written is left.

The work is done in forks of this process, which has imported everything: a kill costs as much as the work itself. A
fork is killed with -9, and all its descendants with it, also the kernels of notebooks. Another command is one more row
of `WORKS`.
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pandas as pd
import psutil

from bachlib import BachError
from bachlib.data import Dataset, planted, prepare
from bachlib.experiment import export as exports
from bachlib.experiment import stages
from bachlib.experiment.sweep import read_sweep, record_of, run_here, state
from bachlib.files import file_hash, read_json, write_json
from bachlib.model.methods import build
from bachlib.serve import Retriever, store
from bachlib.train import Run

WORLD = {"n_users": 40, "n_items": 150, "n_interests": 3, "mean_events": 110}
SMALL = {"d": 8, "ff": 8, "item_width": 8}
TRAINING = {"epochs": 1, "valid_every": 1, "batch_size": 64, "n_negatives": 16, "checkpoint_seconds": 0}
EXPERIMENT = {"source": "planted", "method": "p-bach", "k": 3, "min_items": 60, **WORLD, **SMALL, **TRAINING}
SWEEP = {"name": "tortured", "base": ["small.yaml"], "grid": {"seed": [0]}}
NOT_YET = ("is not a", "does not exist", "it has no")  # so an error begins about something that is not written yet


class Work(NamedTuple):
    before: Callable[[Path], Any]  # what is there before the call, in an empty folder
    call: Callable[[Path], Any]
    read: Callable[[Path], Any]  # what a reader sees; None: nothing yet
    result: Callable[[Path], dict[str, Any]]  # name → content that is promised to be the same
    kills: int  # by default
    in_a_row: int = 1  # kills before the call may end; more where a call is long


# ------------------------------------------------------------------------------------------------------- what is done


def bach(*words: Any) -> None:
    """The command `bach` in this process."""
    from bachlib.cli import app

    app(list(map(str, words)), standalone_mode=False)


def read_or_not_yet(read: Callable[[], Any]) -> Any:
    """What a reader sees; None if there is nothing yet. A damaged state is its error, which no state equals."""
    try:
        return read()
    except BachError as error:
        return None if any(words in str(error) for words in NOT_YET) else str(error)


def files(folder: Path, but: tuple[str, ...] = ()) -> dict[str, Any]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name not in but]
    return {str(path.relative_to(folder)): file_hash(path) for path in found}


def world(place: Path, seed: int = 3) -> Path:
    return planted.write_world(place / "log", **WORLD, seed=seed)


def prepared(place: Path) -> Dataset:
    return prepare("planted", world(place), place / "data", quiet=True, min_items=60, threads=1)


def another_log(place: Path) -> None:
    """A prepared data set whose log has changed since: it will be replaced."""
    world(place, seed=4)
    prepare("planted", place / "log", place / "data", quiet=True, min_items=60, threads=1)
    world(place)


def read_data(place: Path) -> Any:
    def digest() -> str:
        dataset = Dataset.load(place / "data")
        parts = (dataset.sequences, dataset.offsets, dataset.items["title"].to_numpy(str), dataset.meta["content_hash"])
        return hashlib.sha256("".join(repr(np.asarray(part).tolist()) for part in parts).encode()).hexdigest()

    return read_or_not_yet(digest)


def train(place: Path) -> None:
    settings = [word for name, value in {**SMALL, **TRAINING}.items() for word in ("--set", f"{name}={value}")]
    bach("train", "p-bach", "--data", place / "data", "--k", 3, "--out", place / "run", *settings)


def read_run(place: Path) -> Any:
    def seen() -> Any:
        run = Run.load(place / "run", Dataset.load(place / "data"))
        return run.best, hashlib.sha256(
            b"".join(x.numpy().tobytes() for x in run.model.state_dict().values())
        ).hexdigest()

    return read_or_not_yet(seen)


def trained(folder: Path) -> dict[str, Any]:
    """What a training promises: everything but its speed and the versions it ran with."""
    timed = ("history.parquet", "resume.safetensors")
    history = pd.read_parquet(folder / "history.parquet").drop(columns="windows_per_s")
    return files(folder, timed) | {"history": history.to_json(double_precision=15)}


def some_index(place: Path) -> None:
    prepared(place)
    indexed(place).save(place / "index")


def indexed(place: Path) -> Retriever:
    return Retriever(build("p-bach", Dataset.load(place / "data"), 3, **SMALL), "exact")


def save(place: Path) -> None:
    retriever = indexed(place)
    retriever.remove([3, 5])
    retriever.save(place / "index")


def current(place: Path) -> Path:
    return place / "index" / (place / "index" / "CURRENT").read_text().split()[0]


def read_index(place: Path) -> Any:
    return read_or_not_yet(lambda: np.asarray(store.read(place / "index")[0].gone).tolist())


def some_sweep(place: Path) -> None:
    (place / "small.yaml").write_text(json.dumps(EXPERIMENT))  # JSON is YAML
    (place / "sweep.yaml").write_text(json.dumps(SWEEP))


def point(place: Path):
    (only,) = read_sweep(place / "sweep.yaml").points
    return only


def some_training(place: Path) -> None:
    """A point whose training has ended: its evaluation and its records are still to be written."""
    some_sweep(place)
    p = point(place).p
    stages.trained(p.method, stages.prepared(p), p)


def read_point(place: Path) -> Any:
    one = point(place)
    return record_of(one) if state(one).status == "done" else None


def recorded(place: Path) -> dict[str, Any]:
    folder = point(place).folder
    return {"record": read_json(folder / "metrics.json")} | files(folder, but=tuple(own_of_a_kernel(folder)))


def own_of_a_kernel(folder: Path) -> Iterator[str]:
    """Files with seconds, with the output of a process, or with the outputs of cells: not promised to the byte."""
    kept = ("evaluation-test.json", "evaluation-test.parquet", "best.safetensors", "last.safetensors")
    yield from (path.name for path in folder.iterdir() if path.name not in kept)


def some_run(place: Path) -> None:
    prepared(place)
    train(place)


def report(place: Path) -> None:
    bach("report", place / "run", "--data", place / "data")


def read_report(place: Path) -> Any:
    page = place / "run" / "report.html"
    return (page.read_text().rstrip().endswith("</html>") or "half a page") if page.exists() else None


def pages(place: Path) -> dict[str, Any]:
    """The numbers and words of the report, without those of a clock."""
    text = re.sub(
        r"<script.*?</script>|<style.*?</style>|<[^>]*>", " ", (place / "run" / "report.html").read_text(), flags=re.S
    )
    return {"report": re.sub(r"[\d,.]+ (?=windows/s)", "", re.sub(r"\s+", " ", text))}


def some_run_and_export(place: Path) -> None:
    some_run(place)
    write_json(place / "export" / "model.json", {"format": exports.FORMAT, "files": {}})


def export(place: Path) -> None:
    bach("export", place / "run", place / "export", "--data", place / "data", "--no-map", "--force")


def read_export(place: Path) -> Any:
    """Are the files there and whole?"""
    about = read_json(place / "export" / "model.json")
    there = {name: place / "export" / name for name in about.get("files", ())}
    return {name: path.exists() and file_hash(path) == about["files"][name]["sha256"] for name, path in there.items()}


WORKS = {
    "prepare": Work(another_log, prepared, read_data, lambda place: files(place / "data"), 60),
    "train": Work(prepared, train, read_run, lambda place: trained(place / "run"), 55),
    "save": Work(some_index, save, read_index, lambda place: files(current(place)), 50),
    "point": Work(some_training, lambda place: run_here(point(place)), read_point, recorded, 15),
    "sweep": Work(
        some_sweep, lambda place: bach("sweep", place / "sweep.yaml", "--workers", 1), read_point, recorded, 10, 5
    ),
    "report": Work(some_run, report, read_report, pages, 10, 5),
    "export": Work(some_run_and_export, export, read_export, lambda place: files(place / "export"), 5),
}
CRASHED = ("prepare", "train", "save", "point")  # at every write; the others write through processes of their own


# ------------------------------------------------------------------------------------------------------ how it is ended


class Torture:
    """One work in one folder, whose content comes back after each end."""

    def __init__(self, name: str, folder: Path):
        self.work, self.folder = WORKS[name], folder
        self.place, self.kept = folder / "place", folder / "before"
        self.place.mkdir(parents=True)
        with outputs(self.place):
            self.finish(self.work.before)
            shutil.copytree(self.place, self.kept)
            old = self.work.read(self.place)
            began = time.monotonic()
            self.finish(self.work.call)
            self.seconds = time.monotonic() - began
            self.wanted, new = self.work.result(self.place), self.work.read(self.place)
        assert new is not None and new != old and self.wanted, f"{name}: there is nothing to compare"
        self.states = (old, new)

    def start(self, call: Callable[[Path], Any], watch: Callable[[], None] = lambda: None) -> int:
        """The call in a fork with a session of its own; returns its process id."""
        if pid := os.fork():
            return pid
        code = 1
        try:
            os.setsid()
            os.environ["BACH_OUTPUT_DIR"] = str(self.place / "outputs")
            out = os.open(self.folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(out, 1), os.dup2(out, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
            signal.signal(signal.SIGINT, signal.default_int_handler)
            watch()
            call(self.place)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def finish(self, call: Callable[[Path], Any]) -> None:
        if os.waitpid(self.start(call), 0)[1]:
            self.failed("a call without any fault failed")

    def failed(self, what: str) -> None:
        raise SystemExit(f"{what}:\n{(self.folder / 'output.txt').read_text()[-4000:]}")

    def back(self) -> None:
        shutil.rmtree(self.place)
        shutil.copytree(self.kept, self.place)

    def kill(self, moment: float) -> bool:
        """Kill the call after so many seconds, with all its descendants; False if it had ended before."""
        pid = self.start(self.work.call)
        end = time.monotonic() + moment
        while time.monotonic() < end:
            if os.waitpid(pid, os.WNOHANG)[0]:
                return False
            time.sleep(min(0.005, max(0, end - time.monotonic())))
        process = psutil.Process(pid)
        for one in [process, *process.children(recursive=True)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        return os.WIFSIGNALED(os.waitpid(pid, 0)[1])

    def crash(self, number: int) -> bool:
        """End the call right before write number `number`; False if it has fewer writes."""
        status = os.waitpid(self.start(self.work.call, lambda: end_before(number, self.place)), 0)[1]
        if status and os.waitstatus_to_exitcode(status) != CRASH:
            raise SystemExit(
                f"a call failed before its write {number}:\n{(self.folder / 'output.txt').read_text()[-4000:]}"
            )
        return bool(status)

    def differences(self, end: bool = True) -> list[str]:
        """What is wrong after an end, and (`end`) after the same call has then come to its own."""
        with outputs(self.place):
            seen = self.work.read(self.place)
            wrong = [] if seen in self.states else [f"a reader sees neither the old nor the new state: {seen!r:.300}"]
            if end:
                self.finish(self.work.call)
                found = self.work.result(self.place)
                names = {**self.wanted, **found}
                wrong += [f"another {name}" for name in names if found.get(name) != self.wanted.get(name)]
                left = [path for path in self.place.rglob(".*.partial") if not psutil.pid_exists(owner(path))]
                wrong += [f"left behind: {path.relative_to(self.place)}" for path in left]
        return wrong


@contextmanager
def outputs(place: Path) -> Iterator[None]:
    before = os.environ.get("BACH_OUTPUT_DIR")
    os.environ["BACH_OUTPUT_DIR"] = str(place / "outputs")
    try:
        yield
    finally:
        os.environ.pop("BACH_OUTPUT_DIR") if before is None else os.environ.update(BACH_OUTPUT_DIR=before)


def owner(partial: Path) -> int:
    return int(re.search(r"\.(\d+)(\.\w+)?\.partial$", partial.name)[1])


CRASH = 86


def end_before(number: int, folder: Path) -> None:
    """End this process right before its write number `number` in the folder (from 0)."""
    count, inside = -1, str(folder)

    def hear(event: str, args: tuple) -> None:
        nonlocal count
        count += changes(event, args, inside)
        if count == number:
            os._exit(CRASH)

    sys.addaudithook(hear)


def changes(event: str, args: tuple, inside: str) -> bool:
    """Does this audit event come before a change of the disk in a folder?"""
    if event == "ctypes.dlsym":
        return args[1] == "renameat2"  # two folders are swapped
    if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"):
        return False
    path = args[0]
    if event in ("os.remove", "os.rmdir") and args[1] != -1:  # by name in an open folder: of rmtree
        return True
    if not isinstance(path, str | os.PathLike) or not str(path).startswith(inside):
        return False
    if event == "open":
        return bool((args[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
    return os.path.lexists(path) != (event == "os.mkdir")  # else nothing changes


# ------------------------------------------------------------------------------------------------------------- the run


class Row(NamedTuple):
    command: str
    kills: int
    landed: int  # while it was running
    differences: list[str]


def killed(name: str, kills: int, rng: random.Random) -> Row:
    with tempfile.TemporaryDirectory(prefix="bach-torture-") as folder:
        one, landed, number, row, wrong = Torture(name, Path(folder)), 0, 0, 0, []
        while landed < kills and number < 3 * kills:
            if row == 0:
                one.back()
            hit = one.kill(rng.uniform(0, one.seconds))
            landed, number, row = landed + hit, number + 1, row + 1
            end = not hit or row == one.work.in_a_row or landed == kills
            wrong += [f"kill {number}: {what}" for what in one.differences(end)]
            row = 0 if end else row
    command = name in ("prepare", "train", "sweep", "report", "export")
    return Row(f"bach {name}" if command else name, number, landed, wrong)


def crashed(name: str, every: int = 1, first: int = 0) -> Row:
    """The call ended before each of its writes, or before every so many."""
    with tempfile.TemporaryDirectory(prefix="bach-torture-") as folder:
        one, number, wrong = Torture(name, Path(folder)), first, []
        one.back()
        while one.crash(number):
            wrong += [f"write {number}: {what}" for what in one.differences()]
            number += every
            one.back()
    points = len(range(first, number, every))
    return Row(
        f"{name}, before {'each write' if every == 1 else f'every write no. {first} + {every} n'}",
        points,
        points,
        wrong,
    )


def warm_up() -> None:
    """Let this process import and compile all that its forks will need."""
    with tempfile.TemporaryDirectory(prefix="bach-torture-") as folder, outputs(place := Path(folder)):
        for work in (WORKS["train"], WORKS["point"]):
            work.before(place)
            with contextlib.redirect_stdout(None):
                work.call(place)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "kills", nargs="?", type=int, help="kills of each command that land while it runs (default: 200 together)"
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(WORKS)} (default: all)")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 10**6, help="of the moments (default: the clock)")
    parser.add_argument("--no-crash-points", action="store_true", help="only kills at random moments")
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - set(WORKS):
        parser.error(f"there is no {', '.join(sorted(unknown))}")
    warm_up()
    rng, rows = random.Random(chosen.seed), []
    print(f"seed {chosen.seed}\n{'command':<32}{'kills':>6}{'landed while running':>22}{'differences':>13}", flush=True)
    for name in chosen.names or WORKS:
        kills = WORKS[name].kills if chosen.kills is None else chosen.kills
        parts = [lambda n=name, k=kills: killed(n, k, rng)] if kills else []
        parts += [lambda n=name: crashed(n)] if name in CRASHED and not chosen.no_crash_points else []
        for part in parts:
            rows.append(row := part())
            print(f"{row.command:<32}{row.kills:>6}{row.landed:>22}{len(row.differences):>13}", flush=True)
            print("".join(f"    {what}\n" for what in row.differences), end="", flush=True)
    print(f"{'together':<32}{sum(r.kills for r in rows):>6}{sum(r.landed for r in rows):>22}", end="")
    print(f"{sum(len(r.differences) for r in rows):>13}")
    return int(any(row.differences for row in rows))


if __name__ == "__main__":
    sys.exit(main())
