"""A mutation run: one line of the package is made wrong at a time, and the tests named beside it must fail.

    make mutants                         all mutations, two at a time
    python tests/mutants.py onepass -j 1 those whose name, file or tests contain a word

Each mutation is made in a temporary copy of the project, never in the project itself. The named tests first run on the
unchanged copy: a test that fails there proves nothing. The command fails if a mutation survives that has no `reason` to
live, or if its fragment does not occur exactly once (it is *stale*: the code has changed, so change the fragment).
"""

import argparse
import ast
import hashlib
import multiprocessing
import os
import queue
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

from mutations import MUTATIONS, Mutation

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("bachlib", "tests", "params", "pyproject.toml")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in conftest.py, before torch is imported
SECONDS = 600  # for the tests of a mutation, which may loop for ever
LIBRARIES = (
    "torch torch._dynamo scipy.sparse.linalg scipy.stats pandas pyarrow.parquet duckdb pydantic pytest hypothesis"
)
FORKS = multiprocessing.get_context("forkserver")  # so that they are imported once
FORKS.set_forkserver_preload([*LIBRARIES.split(), "safetensors.torch", "pytest", "hypothesis"])
QUICK = {f"test_{name}.py" for name in "sphere mixture metrics statistics towers".split()}  # a few seconds each


class Verdict(NamedTuple):
    mutation: Mutation
    outcome: str  # killed, survived or broken: the tests did not run or did not end
    seconds: float
    output: str


class Copy:
    """A copy of the project for one mutation after the other."""

    def __init__(self, folder: Path):
        self.folder = folder
        for name in COPIED:
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(ROOT / name, folder / name)

    def judge(self, mutation: Mutation) -> Verdict:
        path = self.folder / "bachlib" / mutation.file
        source, status = path.read_text(), path.stat()
        compiled = mutation.file == "serve/kernels.py"  # numba must neither use nor replace what it has compiled
        with tempfile.TemporaryDirectory(dir=self.folder) as cache:
            path.write_text(source.replace(mutation.before, mutation.after))
            try:
                began = time.monotonic()
                code, output = self.pytest(mutation.tests.split(), cache if compiled else None)
            finally:
                path.write_text(source)
                os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        outcome = {0: "survived", 1: "killed"}.get(code, "broken")
        return Verdict(mutation, outcome, time.monotonic() - began, output)

    def pytest(self, tests: list[str], cache: str | None = None) -> tuple[int | None, str]:
        """(exit code, output) of these tests in the copy; no exit code if they did not end in time."""
        output = self.folder / "output.txt"
        process = FORKS.Process(target=_tests, args=(self.folder, tests, cache or str(self.folder / "numba"), output))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.join()
            return None, f"stopped after {SECONDS} seconds\n{output.read_text()}"
        return process.exitcode, output.read_text()


def _tests(folder: Path, tests: list[str], cache: str, output: Path) -> None:
    """Run pytest in this process, a fork of one that has imported the libraries but nothing of the project."""
    os.setsid()
    with output.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell; tests use it
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "BACH_", "COV_"))]:
        del os.environ[name]
    os.environ |= {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1", "TMPDIR": str(folder)}
    os.environ["NUMBA_CACHE_DIR"] = cache
    tempfile.tempdir, sys.dont_write_bytecode = None, True  # .pyc files go by whole seconds
    sys.path[:0] = [str(folder), str(folder / "tests")]
    os.chdir(folder)
    import hypothesis
    import pytest

    # the first failing example is enough: no search for the simplest one
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", derandomize=True, database=None, phases=phases)
    options = ["-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "--tb=line", "--hypothesis-profile=mutants"]
    code = pytest.main([*options, *(f"tests/{test}" for test in tests)])
    sys.stdout.flush()
    os._exit(int(code))  # no time for cleaning up: the folder is temporary


def problems(mutation: Mutation) -> list[str]:
    """Why a mutation cannot be made or would not be tested."""
    path = ROOT / "bachlib" / mutation.file
    if not path.exists():
        return [f"{mutation.file} does not exist"]
    found = []
    if (times := path.read_text().count(mutation.before)) != 1:
        found.append(f"stale: the fragment occurs {times} times in {mutation.file}: {mutation.before!r}")
    elif mutation.before == mutation.after:
        found.append("the fragment stays as it is")
    for test in mutation.tests.split():
        file, _, name = test.partition("::")
        if not (ROOT / "tests" / file).exists() or (name and name.split("[")[0] not in tests_of(file)):
            found.append(f"there is no test {test}")
    return found


@cache
def tests_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def sample(n: int) -> list[Mutation]:
    """n quick mutations; others whenever a file of the package changes."""
    quick = [m for m in MUTATIONS if not m.reason and {test.split("::")[0] for test in m.tests.split()} <= QUICK]
    files = sorted((ROOT / "bachlib").rglob("*.py"))
    first = int(hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest(), 16) % len(quick)
    return [quick[(first + i * len(quick) // n) % len(quick)] for i in range(n)]


def judged(mutations: list[Mutation], jobs: int, baseline: bool = True, say=print) -> list[Verdict]:
    """The verdicts in the order of the mutations. With `baseline` all tests first run on the unchanged project."""
    with tempfile.TemporaryDirectory(prefix="bach-mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        free: queue.Queue[Copy] = queue.Queue()
        for number in range(jobs):
            free.put(Copy(Path(folder) / str(number)))

        def in_a_copy(work, given):
            copy = free.get()
            try:
                return work(copy, given)
            finally:
                free.put(copy)

        def one(copy: Copy, mutation: Mutation) -> Verdict:
            verdict = copy.judge(mutation)
            say(f"{verdict.outcome:<9}{verdict.seconds:5.0f} s  {mutation.file}: {mutation.what}", flush=True)
            return verdict

        tests = sorted({test for m in mutations for test in m.tests.split()}) if baseline else []
        files = [[test for test in tests if test.split("::")[0] == file] for file in {t.split("::")[0] for t in tests}]
        for code, output in pool.map(partial(in_a_copy, Copy.pytest), files):
            if code != 0:
                raise SystemExit(f"the tests fail without any mutation, so nothing can be judged:\n{output}")
        return list(pool.map(partial(in_a_copy, one), mutations))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only mutations whose name, file or tests contain one of these")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="mutations at a time")
    parser.add_argument("--verbose", action="store_true", help="show what the tests of survivors printed")
    chosen = parser.parse_args()
    if stale := [f"{m.file}: {m.what}: {problem}" for m in MUTATIONS for problem in problems(m)]:
        print("\n".join(stale))
        return 1
    some = [m for m in MUTATIONS if not chosen.words or any(w in " ".join(m) for w in chosen.words)]
    verdicts = judged(some, chosen.jobs)
    alive = [v for v in verdicts if v.outcome != "killed"]
    print(f"\n{len(verdicts)} mutations, {len(verdicts) - len(alive)} killed")
    for verdict in alive:
        m = verdict.mutation
        print(f"{verdict.outcome}: {m.file}: {m.what}\n    {m.before}\n    {m.after}\n    tests: {m.tests}")
        print(f"    {'may live: ' + m.reason if m.reason else 'NO REASON: strengthen these tests'}")
        if chosen.verbose or verdict.outcome == "broken":
            print(verdict.output)
    return int(any(v.outcome == "broken" or not v.mutation.reason for v in alive))


if __name__ == "__main__":
    sys.exit(main())
