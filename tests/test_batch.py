"""`bach run`: finished stages are used again, the others are run, and the exit code says how it ended."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import bach, bach_here, surroundings
from logs import random_events, write_movielens_csv

from bachlib.experiment.settings import Experiment, read_experiment
from bachlib.experiment.stages import prepared, run_name, trained
from bachlib.files import read_json

ROOT = Path(__file__).resolve().parent.parent

SMALL = """
name: small
notebooks: [01_sphere, single]
source: planted
n_users: 120
n_items: 400
n_interests: 5
mean_events: 120
k: 2
d: 8
ff: 16
item_width: 16
epochs: 1
batch_size: 256
n_negatives: 64
valid_every: 1
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    place = tmp_path_factory.mktemp("batch")
    (place / "small.yaml").write_text(SMALL)
    # a relative folder: kernels stand elsewhere and find the same one
    done = bach("run", "small.yaml", cwd=place, BACH_OUTPUT_DIR="o")
    assert done.returncode == 0, done.stderr
    return place, Path(done.stdout.strip().rsplit(" ", 1)[1]).parent


def test_a_log_that_has_changed_is_trained_on_anew(tmp_path):
    columns = {"user": "userId", "item": "movieId", "time": "timestamp"}
    log = write_movielens_csv(tmp_path / "my log.csv", random_events(1, n=4_000))
    p = Experiment(source="csv", path=str(log), columns=columns, min_items=31, k=2, d=4, epochs=1, n_negatives=8)
    first = trained("all-multihead", prepared(p), p.model_copy(update={"kernel": "von-mises-fisher"}))
    assert trained("all-multihead", prepared(p), p).about == first.about, "opened; it has no kernel"
    write_movielens_csv(log, random_events(2, n=4_000))
    second = trained("all-multihead", prepared(p), p)
    assert second.folder == first.folder and second.status == "finished"
    assert second.about["identity"]["data"] != first.about["identity"]["data"]


def test_a_training_has_one_name_for_bach_train_notebooks_and_sweeps(tmp_path, monkeypatch):
    """Whoever trains first, the others open that run."""
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path))
    (tmp_path / "small.yaml").write_text(SMALL)
    p = read_experiment(tmp_path / "small.yaml")
    dataset, words = prepared(p), ["d=8", "ff=16", "item_width=16", "batch_size=256", "n_negatives=64", "valid_every=1"]
    words = [word for pair in [*words, "epochs=1"] for word in ("--set", pair)]
    for method, k in (("p-bach", 2), ("standard", 8)):  # `standard` has one vector, whatever k says
        done = bach_here("train", method, "--data", dataset.folder, "--k", k, *words, BACH_OUTPUT_DIR=tmp_path)
        assert done.returncode == 0, done.stderr
        (folder,) = tmp_path.glob(f"runs/{method}-planted-k{k if method == 'p-bach' else 1}-s0-*")
        when = (folder / "best.safetensors").stat().st_mtime_ns
        run = trained(method, dataset, p)
        assert run.folder == folder and (folder / "best.safetensors").stat().st_mtime_ns == when, "it was trained again"
        assert run_name(p.model_copy(update={"method": method})) == folder.name, "as a sweep calls it"
    ours = trained("v-bach", dataset, p)
    done = bach_here("train", "v-bach", "--data", dataset.folder, "--k", 2, *words, BACH_OUTPUT_DIR=tmp_path)
    assert done.returncode == 0 and ours.folder.name in done.stdout
    assert len([*tmp_path.glob("runs/*")]) == 3


def status(folder):
    return json.loads((folder / "status.json").read_text())


def test_a_run_has_everything_in_one_folder(ran):
    place, folder = ran
    assert len([*(place / "o" / "runs").glob("p-bach-planted-*/best.safetensors")]) == 1
    wanted = "01_sphere.ipynb single.ipynb params.yaml metrics.json status.json environment.json report.html"
    assert {*wanted.split()} <= {path.name for path in folder.iterdir()}
    told = status(folder)
    assert told["status"] == "done" and told["notebooks"]["single"]["values"]["k"] == 2
    assert "k" not in told["notebooks"]["01_sphere"]["values"], "formulas keep their own values"
    assert 0 < json.loads((folder / "metrics.json").read_text())["single"]["AUPRC"] < 1


def test_finished_stages_are_used_again_and_lost_ones_run_again(ran):
    place, folder = ran
    when = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.ipynb")}
    (folder / "single.ipynb").unlink()
    done = bach_here("run", place / "small.yaml", BACH_OUTPUT_DIR=place / "o")
    assert done.returncode == 0, done.stderr
    assert "01_sphere        unchanged" in done.stdout and "single           unchanged" not in done.stdout
    now = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.ipynb")}
    assert now["01_sphere.ipynb"] == when["01_sphere.ipynb"] and now["single.ipynb"] > when["single.ipynb"]
    assert set(read_json(folder / "metrics.json")) == {"01_sphere", "single"}


def papermill(*words, place):
    """By hand, from any folder."""
    command = [sys.executable, "-m", "papermill", ROOT / "notebooks" / "single.ipynb", "out.ipynb", *words]
    command += ["-f", ROOT / "params" / "quickstart.yaml", "--no-progress-bar"]
    around = surroundings(BACH_OUTPUT_DIR=place / "o")
    return subprocess.run([str(word) for word in command], cwd=place, env=around, capture_output=True, text=True)


def test_papermill_by_hand(tmp_path):
    done = papermill("-p", "k", 4, "-p", "n_users", 120, "-p", "epochs", 1, "-p", "d", 4, place=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "o" / "runs").iterdir()
    assert folder.name.startswith("p-bach-planted-k4-s0-") and (tmp_path / "out.ipynb").exists()
    assert 0 < json.loads((folder / "evaluation-test.json").read_text())["means"]["AUPRC"] < 1


def test_papermill_with_a_parameter_that_is_none(tmp_path):
    done = papermill("-p", "n_user", 120, place=tmp_path)
    assert done.returncode != 0 and "n_user: not a parameter; did you mean 'n_users'?" in done.stderr


def test_a_failed_stage_keeps_its_notebook_and_the_exit_code_says_so(ran):
    place, _ = ran
    done = bach_here(
        "run", place / "small.yaml", "--set", "learning_rate=1e30", "--set", "name=diverging",
        "--set", "notebooks=[single,01_sphere]", "--no-report", "--workers", 1, BACH_OUTPUT_DIR=place / "o",
    )  # fmt: skip
    assert done.returncode == 2 and "single, cell" in done.stderr and "Traceback" not in done.stderr
    (folder,) = (place / "o" / "runs").glob("diverging-*")
    told = status(folder)
    assert told["status"] == "failed" and told["failed"] == "single" and told["notebooks"] == {}
    assert (folder / "single.ipynb").exists()
