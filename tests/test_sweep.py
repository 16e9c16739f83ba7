"""`bach sweep` in real processes: killed half-way and gone on with, stopped by hand, failing, and through Dask."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from commands import bach, command, surroundings

from bachlib import BachError
from bachlib.experiment.notebooks import execute

TINY = """
source: planted
n_users: 120
n_items: 400
n_interests: 5
mean_events: 120
k: 4
d: 8
ff: 16
item_width: 16
epochs: 1
batch_size: 256
n_negatives: 64
learning_rate: 0.01
valid_every: 1
"""
GRID = """
name: tiny-sweep
base: [tiny.yaml]
grid:
  method: [all-multihead, p-bach]
  seed: [0, 1]
layout: matched
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "tiny.yaml").write_text(TINY)
    (folder / "sweep.yaml").write_text(GRID)
    return folder


def records(outputs: Path) -> dict[str, dict]:
    """Run → its numbers, of those that are done."""
    found = {}
    for path in outputs.glob("runs/*/status.json"):
        if json.loads(path.read_text())["status"] == "done":
            found[path.parent.name] = json.loads((path.parent / "metrics.json").read_text())["single"]
    return found


def processes_about(folder: Path) -> list[str]:
    """Command lines of living processes that name the folder, and of kernels that write into it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            line, around = (path / "cmdline").read_bytes().decode(), (path / "environ").read_bytes().decode()
        except OSError:
            continue
        if path.name != str(os.getpid()) and (str(folder) in line or f"BACH_RUN_DIR={folder}" in around):
            found.append(line)
    return found


def wait_for(condition, seconds: float = 120) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.2)
    return False


@pytest.fixture(scope="module")
def killed_and_resumed(place) -> Path:
    """Killed with −9 when the first run is done, then called again; what is checked on the way is in the tests."""
    outputs = place / "outputs"
    started = subprocess.Popen(
        command("sweep", place / "sweep.yaml"), env=surroundings(BACH_OUTPUT_DIR=outputs), stdout=subprocess.DEVNULL
    )
    assert wait_for(lambda: records(outputs) or started.poll() is not None), "no run came to its end"
    started.send_signal(signal.SIGKILL)
    started.wait()
    assert wait_for(lambda: not processes_about(outputs), 20), "runs go on without their sweep"
    done = records(outputs)
    assert 1 <= len(done) < 4
    written = {name: (outputs / "runs" / name / "single.ipynb").stat().st_mtime_ns for name in done}
    again = bach("sweep", place / "sweep.yaml", BACH_OUTPUT_DIR=outputs)
    assert again.returncode == 0, again.stdout + again.stderr
    assert f"{len(done)} done, {4 - len(done)} to run" in again.stdout and "4 of 4 runs are done" in again.stdout
    for name, when in written.items():
        assert (outputs / "runs" / name / "single.ipynb").stat().st_mtime_ns == when, "a finished run was run again"
    return outputs


def test_killed_half_way_it_goes_on(killed_and_resumed, place):
    found = records(killed_and_resumed)
    assert len(found) == 4 and all(0 < numbers["AUPRC"] < 1 for numbers in found.values())
    assert all((killed_and_resumed / "runs" / name / "log.txt").stat().st_size for name in found)
    nothing = bach("sweep", place / "sweep.yaml", "--dry-run", BACH_OUTPUT_DIR=killed_and_resumed)
    assert "4 runs, 0 to do" in nothing.stdout


def test_dask_gives_the_same_records(killed_and_resumed, place):
    from distributed import LocalCluster

    outputs = place / "through-dask"
    with LocalCluster(n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None) as cluster:
        address = cluster.scheduler_address
        done = bach("sweep", place / "sweep.yaml", "--dask", address, "--threads", 1, BACH_OUTPUT_DIR=outputs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert records(outputs) == records(killed_and_resumed)


def test_no_scheduler_is_a_message(place):
    done = bach("sweep", place / "sweep.yaml", "--dask", "tcp://127.0.0.1:9", BACH_OUTPUT_DIR=place / "none")
    assert done.returncode == 2 and "no Dask scheduler answers at tcp://127.0.0.1:9" in done.stderr


def test_the_report_has_the_table_and_intervals(killed_and_resumed):
    """By the name that `bach sweep` tells at its end: the experiment beside the sweep's file is still found."""
    (folder,) = (killed_and_resumed / "sweeps").glob("tiny-sweep-*")
    done = bach("report", folder.name, BACH_OUTPUT_DIR=killed_and_resumed)
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip().removeprefix("→ ")).read_text()
    assert "all-multihead" in page and "4 of 4 have results" in page
    assert "seeds per cell: 2." in page and re.search(r"0\.\d{4}(</b>)? ±0\.\d{4}", page)


def test_a_run_that_fails_is_told_and_the_others_are_done(place):
    outputs = place / "failing"
    (place / "failing.yaml").write_text(
        GRID.replace("[all-multihead, p-bach]", "[mostpop, p-bach]").replace("seed: [0, 1]", "learning_rate: [1.0e+30]")
    )
    done = bach("sweep", place / "failing.yaml", BACH_OUTPUT_DIR=outputs)
    assert done.returncode == 1
    assert "1 of 2 runs are done" in done.stdout and "1 failed:" in done.stderr
    (failed,) = [path.parent for path in outputs.glob("runs/p-bach-*/status.json")]
    assert f"{failed.name}: " in done.stderr and str(failed / "log.txt") in done.stderr
    assert "not finite" in done.stderr or "finite" in (failed / "log.txt").read_text()
    assert json.loads((failed / "status.json").read_text())["status"] == "failed"
    assert (failed / "single.ipynb").exists(), "the notebook up to the failure"


def test_ctrl_c_leaves_nothing_running(place):
    outputs = place / "stopped"
    started = subprocess.Popen(
        command("sweep", place / "sweep.yaml", "--workers", 1),
        env=surroundings(BACH_OUTPUT_DIR=outputs), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert wait_for(lambda: processes_about(outputs))
    started.send_signal(signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert started.returncode == 130 and "stopped" in said
    assert wait_for(lambda: not processes_about(outputs), 20) and not records(outputs)


@pytest.mark.parametrize("times", [1, 2])
def test_a_lost_kernel_gets_a_second_one(tmp_path, times, capsys):
    """A notebook whose kernel dies once runs to its end; one that dies twice is an error."""
    import nbformat
    from nbformat.v4 import new_code_cell, new_notebook

    deaths = tmp_path / "deaths"
    code = (
        f"import os, pathlib\nplace = pathlib.Path({str(deaths)!r})\nn = len(list(place.parent.glob('deaths*')))\n"
        f"if n < {times}:\n    place.with_name(f'deaths{{n}}').touch()\n    os.kill(os.getpid(), 9)\nn"
    )
    notebook = new_notebook(cells=[new_code_cell(code)])
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "n.ipynb")
    if times == 1:
        execute(tmp_path / "n.ipynb", tmp_path / "out.ipynb", {})
        assert nbformat.read(tmp_path / "out.ipynb", 4).cells[-1].outputs[0].data["text/plain"] == "1"
    else:
        with pytest.raises(BachError, match="the kernel was lost twice"):
            execute(tmp_path / "n.ipynb", tmp_path / "out.ipynb", {})
    assert "once more" in capsys.readouterr().out
