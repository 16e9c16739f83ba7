"""Fuzzing: files are spoilt at random, and each one is refused with its name or read rightly.

    make fuzz                                every fuzzer for a minute
    make fuzz FUZZ_ARGS="600 csv index"      these two for ten minutes each
    python tests/fuzz.py --again csv:17      one input once more, with its traceback

A finding is any exception but a BachError, an error that does not name the file, an input that takes too long or ends
the process, and damage that goes unnoticed: of a folder of ours (a data set, a run, an index, a record) every change of
what is read, of a log what a plain reader does not read there, too. Half the changes of our folders are *sealed*:
their checksums are written again, as somebody would who wants to harm. Then only what is said or raised counts.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import spoil
from fuzzed import FUZZERS, Fuzzer

from bachlib import BachError

SECONDS = 20  # for one input
OF_THE_WHOLE = ("no user has", "no event has")  # too little is left of a log: no file is damaged
MEMORY = 4 << 30  # bytes that an input may ask for


class TooLong(BaseException):
    """Not an Exception: no reader may take it for damage."""


class Outcome(NamedTuple):
    kind: str  # refused, read, or finding
    told: str = ""


class Work:
    """Good files of a fuzzer, and a copy of them that is spoilt and mended again."""

    def __init__(self, fuzzer: Fuzzer, folder: Path):
        self.fuzzer, self.good, self.folder = fuzzer, folder / "good", folder / "spoilt"
        self.good.mkdir()
        fuzzer.make(self.good)
        shutil.copytree(self.good, self.folder)
        self.paths = sorted(path.relative_to(self.good) for path in self.good.rglob("*") if path.is_file())
        self.files = [path for path in self.paths if fuzzer.spoils(path)]
        self.expected = fuzzer.read(self.folder)

    def judged(self, number: int, again: bool = False) -> Outcome:
        """What becomes of the input with this number."""
        rng = random.Random(f"{self.fuzzer.name}:{number}")
        path = rng.choice(self.files)
        before = (self.good / path).read_bytes()
        other = (self.good / rng.choice(self.files)).read_bytes()
        spoilt, how = spoil.spoilt(rng, before, other, path.suffix)
        (self.folder / path).write_bytes(spoilt)
        try:
            sealed = bool(self.fuzzer.seal) and rng.random() < 0.5 and self._sealed(path)
            told = f"{path}: {how}{', sealed' * bool(sealed)}"
            return self._outcome(path, sealed, told, again)
        finally:
            for one in self.paths if self.fuzzer.seal else [path]:
                (self.folder / one).write_bytes((self.good / one).read_bytes())

    def _sealed(self, path: Path) -> bool:
        try:
            return self.fuzzer.seal(self.folder, path)
        except Exception:  # too spoilt for it
            return False

    def _outcome(self, path: Path, sealed: bool, told: str, again: bool) -> Outcome:
        try:
            with limited(SECONDS):
                found = self.fuzzer.read(self.folder)
        except BachError as error:
            if again:
                traceback.print_exc()
            names = {self.folder.name, *(part for one in self.paths for part in (one.stem, *one.parts))}
            named = sealed or any(name in str(error) for name in names) or str(error).startswith(OF_THE_WHOLE)
            return Outcome("refused") if named else Outcome("finding", f"{told}: no file is named: {error}")
        except (Exception, TooLong) as error:
            if again:
                traceback.print_exc()
            return Outcome("finding", f"{told}: {type(error).__name__}: {error}"[:300])
        if sealed or spoil.same(found, self.expected):
            return Outcome("read")
        if self.fuzzer.ours:
            return Outcome("finding", f"{told}: the damage was not noticed")
        if self.fuzzer.plain is None:
            return Outcome("read")
        try:
            wanted = self.fuzzer.plain(self.folder)
        except (ValueError, IndexError, KeyError) as error:
            return Outcome("finding", f"{told}: a plain reader refuses it ({type(error).__name__}: {error})"[:300])
        return (
            Outcome("read")
            if wanted == found["raw"]
            else Outcome("finding", f"{told}: a plain reader reads something else")
        )


@contextmanager
def limited(seconds: float):
    def end(*_: Any) -> None:
        raise TooLong(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def fuzz(fuzzer: Fuzzer, inputs: int, first: int = 0, until: float = float("inf"), say: Callable = print) -> dict:
    """Judge these inputs, as many as there is time for; `say` gets the number of each before, and its outcome."""
    counts: dict[str, Any] = {"inputs": 0, "refused": 0, "read": 0, "findings": []}
    with tempfile.TemporaryDirectory(prefix="bach-fuzz-") as folder:
        work = Work(fuzzer, Path(folder))
        for number in range(first, first + inputs):
            if time.monotonic() > until:
                break
            say(number)
            outcome = work.judged(number)
            counts["inputs"] += 1
            if outcome.kind == "finding":
                counts["findings"].append(f"{fuzzer.name}:{number}  {outcome.told}")
            else:
                counts[outcome.kind] += 1
            say(number, counts)
    return counts


def child(name: str, first: int, seconds: float, told: Path) -> None:
    """Fuzz in this process and keep what is found so far in a file, for the parent to read if this process dies."""
    with open("/proc/self/statm") as stat:
        used = int(stat.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))

    def say(number: int, counts: dict | None = None) -> None:
        kept = told.with_suffix(".new")
        known = counts or json.loads(told.read_text())["counts"] if counts or told.exists() else {}
        kept.write_text(json.dumps({"number": number, "counts": known, "judged": counts is not None}))
        os.replace(kept, told)

    fuzz(FUZZERS[name], sys.maxsize, first, time.monotonic() + seconds, say)


def watched(name: str, seconds: float, first: int) -> dict:
    """A fuzzer in a process of its own, started again after an input that ended it."""
    total: dict[str, Any] = {"inputs": 0, "refused": 0, "read": 0, "findings": []}
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="bach-fuzz-") as folder:
        told = Path(folder) / "told.json"
        while (left := until - time.monotonic()) > 1 or not total["inputs"]:
            told.unlink(missing_ok=True)
            asked = [sys.executable, __file__, "--child", str(told), "--first", str(first), str(max(left, 1)), name]
            process = subprocess.Popen(asked, env={**os.environ, "TMPDIR": folder})
            while process.poll() is None:
                time.sleep(0.2)
                if told.exists() and time.time() - told.stat().st_mtime > 3 * SECONDS:
                    process.kill()
            if not told.exists():
                raise SystemExit(f"{name}: the fuzzer did not begin (exit {process.returncode})")
            last = json.loads(told.read_text())
            for key, value in last["counts"].items():
                total[key] += value
            if process.returncode == 0:
                break
            total["inputs"] += 1
            total["findings"].append(f"{name}:{last['number']}  the process ended with {process.returncode}")
            first = last["number"] + 1
    return total


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seconds", nargs="?", type=float, default=60, help="for each fuzzer")
    parser.add_argument("names", nargs="*", help=f"of fuzzers: {', '.join(FUZZERS)} (default: all)")
    parser.add_argument("--first", type=int, default=0, help="number of the first input")
    parser.add_argument("--again", metavar="NAME:NUMBER", help="one input, with its traceback")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if unknown := [name for name in chosen.names if name not in FUZZERS]:
        parser.error(f"there is no fuzzer {', '.join(unknown)}; there are {', '.join(FUZZERS)}")
    if chosen.again:
        name, number = chosen.again.split(":")
        with tempfile.TemporaryDirectory(prefix="bach-fuzz-") as folder:
            print(Work(FUZZERS[name], Path(folder)).judged(int(number), again=True))
        return 0
    if chosen.child:
        child(chosen.names[0], chosen.first, chosen.seconds, chosen.child)
        return 0
    print(f"{'fuzzer':<12} {'inputs':>8} {'refused':>8} {'read':>8} {'findings':>8}", flush=True)
    found = []
    for name in chosen.names or FUZZERS:
        counts = watched(name, chosen.seconds, chosen.first)
        numbers = f"{counts['inputs']:8,} {counts['refused']:8,} {counts['read']:8,} {len(counts['findings']):8,}"
        print(f"{name:<12} {numbers}", flush=True)
        found += counts["findings"]
    for one in found:
        print(f"\n{one}\n    python tests/fuzz.py --again {one.split()[0]}")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
