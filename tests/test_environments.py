"""Unusual surroundings, and the same results in them: all at once, in one process of their own."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from bachlib.data import planted, prepare
from bachlib.evaluate import evaluate
from bachlib.model.methods import build
from bachlib.serve import Retriever
from bachlib.train import Run, fit

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("bachlib", "notebooks", "params", "pyproject.toml")
ELSEWHERE = """
import json
import socket
import sys
import warnings


def nowhere(*_, **__):
    raise OSError("there is no network")


warnings.filterwarnings("error", category=EncodingWarning, module="bachlib")  # a file opened in the locale's encoding
sys.modules |= dict.fromkeys(("faiss", "umap", "playwright", "kaleido"))
socket.create_connection = socket.getaddrinfo = socket.socket.connect = nowhere
sys.path[:0] = [sys.argv[1], sys.argv[2]]

from bachlib import cli
from test_environments import chain

for words in (["params"], ["params", "sweeps/tau"], ["methods"], ["doctor"]):
    sys.argv = ["bach", *words]
    try:
        cli.main()
    except SystemExit as end:
        assert not end.code, words  # python -O leaves this out: the status says it
print(json.dumps({"file": cli.__file__, "optimized": sys.flags.optimize, **chain("größe 数")}))
"""


def chain(folder: str | Path) -> dict[str, str]:
    """From a planted world to a slate: a hash of everything that was computed on the way."""
    folder = Path(folder)
    world = planted.write_world(folder / "world", n_users=80, n_items=200, n_interests=4, mean_events=90)
    dataset = prepare("planted", world, folder / "data", quiet=True, min_items=60)
    model = build("p-bach", dataset, 3, d=8, ff=16, item_width=16)
    run = fit(model, dataset, {"epochs": 1, "batch_size": 256, "n_negatives": 64}, folder / "run", quiet=True)
    evaluation = evaluate(run, dataset, quiet=True)
    evaluation.save(run.folder)
    Retriever(Run.load(run.folder, dataset)).save(folder / "index")
    slate = Retriever(run).retrieve([[1, 2, 3], []], 10)
    made = {name: (folder / name).read_bytes() for name in ("data/sequences.npy", "run/best.safetensors")}
    made |= {"ranks": evaluation.ranks.tobytes(), "slate": slate.items.tobytes() + slate.scores.tobytes()}
    return {name: hashlib.sha256(value).hexdigest() for name, value in made.items()}


def files(folder: Path) -> set[tuple[str, int]]:
    """Everything in a checkout but Python's own caches."""
    return {(str(p), p.stat().st_mtime_ns) for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts}


def test_the_same_seed_twice_is_the_same_to_the_bit_wherever_it_runs(tmp_path):
    """Once here, once elsewhere: a checkout that is never written to, under a name with spaces and letters of others,
    from another folder, without home, git, browser, network, faiss and umap, with python -O, LANG=C and a terminal that
    knows ASCII only, with another order of hashes."""
    here = chain(tmp_path / "here")
    checkout, outside = tmp_path / "Prüf ling 复制" / "check out", tmp_path / "Prüf ling 复制" / "else"
    outside.mkdir(parents=True)
    for name in PARTS:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
        (checkout / name).parent.mkdir(exist_ok=True)
        copy(ROOT / name, checkout / name)
    before = files(checkout)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "BACH_", "LC_", "XDG_"))}
    env |= {"HOME": "/proc/nowhere", "PATH": str(outside), "LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    env |= {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONHASHSEED": "5", "BACH_OUTPUT_DIR": str(outside / "out")}
    command = [sys.executable, "-O", "-c", ELSEWHERE, str(checkout), str(ROOT / "tests")]
    done = subprocess.run(command, cwd=outside, env=env, capture_output=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout.splitlines()[-1])
    assert there.pop("file") == str(checkout / "bachlib" / "cli.py") and there.pop("optimized") == 1
    assert there == here and files(checkout) == before
    assert "temperature" in done.stdout and "\ufffd" not in done.stdout


def test_compiled_loops_are_cached_where_something_can_be_written(tmp_path):
    """With a read-only package and no home numba would raise when it is imported."""
    code = "import os; os.access = lambda *_: False; import bachlib; print(os.environ['NUMBA_CACHE_DIR'])"
    env = os.environ | {"BACH_OUTPUT_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    env.pop("NUMBA_CACHE_DIR", None)
    told = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert told.stdout.strip() == str(tmp_path / "numba"), told.stderr


def test_no_assert_in_the_package():
    """python -O leaves asserts out: what a user gives is checked by errors."""
    found = [path for path in (ROOT / "bachlib").rglob("*.py") if "\n    assert " in path.read_text(encoding="utf-8")]
    assert not found
