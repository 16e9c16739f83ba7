"""The command `bach`, as a user types it."""

import json
import sys
import zipfile
from pathlib import Path

import pytest
from commands import bach, bach_here
from logs import random_events, write_movielens_csv, write_rows
from reports import batch
from typer.testing import CliRunner

import bachlib
from bachlib import cli
from bachlib.experiment import commands
from bachlib.experiment.settings import Experiment
from bachlib.experiment.stages import data_name
from bachlib.model.methods import METHODS, build
from bachlib.params import WorldParams
from bachlib.train import fit

ROOT = Path(__file__).resolve().parent.parent


def test_doctor(tmp_path):
    done = bach("doctor", BACH_DATA_DIR="")
    assert done.returncode == 0, done.stderr
    for piece in ("torch          2.13.0", "threads", "faiss-cpu", "BACH_DATA_DIR is not set", "duckdb"):
        assert piece in done.stdout
    assert (
        f"BACH_DATA_DIR is {tmp_path / 'no'}, which is not a folder"
        in bach_here("doctor", BACH_DATA_DIR=str(tmp_path / "no")).stdout
    )


def here(*words):
    """The same in this process: no second Python has to start."""
    return CliRunner().invoke(cli.app, list(words))


def hide(monkeypatch, *modules):
    for name in modules:
        monkeypatch.setitem(sys.modules, name, None)  # as if it were not installed


def test_doctor_names_missing_extras(monkeypatch):
    hide(monkeypatch, "plotly", "distributed")
    told = here("doctor").stdout
    assert "– lab          not installed: plotly, distributed (for notebooks, pictures, reports)" in told
    assert "pip install 'bachlib[lab]'" in told and "pip install 'bachlib[sweep]'" in told


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "quickstart"], "bach run needs papermill: pip install 'bachlib[lab]'"),
        (["report", "x"], "bach report needs papermill: pip install 'bachlib[lab]'"),
        (["sweep", "planted", "--dask", "tcp://host:1"], "bach sweep needs distributed: pip install 'bachlib[sweep]'"),
    ],
)
def test_a_command_names_the_extra_it_needs(words, said, monkeypatch):
    hide(monkeypatch, "papermill", "distributed")
    error = here(*words).exception
    assert isinstance(error, bachlib.MissingExtra) and str(error) == said


def test_notebooks_are_in_the_clone(tmp_path, monkeypatch):
    """What the installed package says outside a clone."""
    monkeypatch.setattr(commands, "project_root", lambda: tmp_path)
    error = here("run", "quickstart").exception
    assert isinstance(error, bachlib.BachError) and "run the command inside a clone of the workbook" in str(error)
    monkeypatch.setattr(sys, "argv", ["bach", "run", "--help"])
    assert here("run", "--help").exit_code == 0


def test_version_methods_and_params():
    assert bach("--version").stdout == f"bachlib {bachlib.__version__}\n"
    methods = here("methods").stdout
    assert "encoder" in methods and "score" in methods
    for name, row in METHODS.items():
        assert any(line.split()[0] == name and row.objective in line for line in methods.splitlines())
    files = here("params").stdout
    for path in [*(ROOT / "params").glob("*.yaml"), *(ROOT / "params" / "sweeps").glob("*.yaml")]:
        assert path.stem in files
    assert here("params", "epochs").stdout.split()[:4] == ["epochs", "200", "≥", "1"]
    world = here("params", "world").stdout
    assert "≥ 0, < 1" in world and len(world.splitlines()) == len(WorldParams.model_fields)
    assert "[default: mine]" in here("params", "ml1m").stdout and "grid:" in here("params", "sweeps/tau").stdout
    assert "auto | cpu | cuda" in here("params", "train").stdout
    letter = here("params", "letter").stdout.splitlines()
    assert [line.split()[:2] for line in letter] == [["history", "frozen"], ["svd_on", "all"], ["precision", "float32"]]
    assert "Overlay: the paper's literal text" in files
    assert "does not exist" in str(here("params", "nothing").exception)


def test_prepare(tmp_path):
    log = write_movielens_csv(tmp_path / "ratings.csv", random_events(1))
    words = (
        "prepare",
        "--source",
        "movielens-20m",
        "--path",
        str(log),
        "--out",
        str(tmp_path / "o"),
        "--min-items",
        "40",
    )
    done = bach(*words)
    assert done.returncode == 0, done.stderr
    assert "raw log" in done.stdout and f"→ {tmp_path / 'o'}" in done.stdout
    assert json.loads((tmp_path / "o" / "meta.json").read_text())["params"]["min_items"] == 40
    assert "already prepared" in bach_here(*words).stdout


def test_every_set_of_options_has_a_folder_that_notebooks_find(tmp_path, monkeypatch):
    outputs, logs = tmp_path / "outputs", tmp_path / "logs"
    logs.mkdir()
    write_rows(logs / "ratings.dat", random_events(1), "::")
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        archive.write(logs / "ratings.dat", "ml-1m/ratings.dat")
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(outputs))
    monkeypatch.setenv("BACH_DATA_DIR", str(logs))

    def prepared_in(*words):
        done = here("prepare", *words)
        assert done.exit_code == 0, done.exception
        return Path(done.stdout.rsplit("→ ", 1)[1].strip())

    source = ("--source", "movielens-1m", "--min-items")
    first, second = prepared_in(*source, "40"), prepared_in(*source, "45")
    kept = prepared_in(*source, "45", "--catalogue", "kept")
    by_path = prepared_in(*source, "40", "--path", str(logs / "ratings.dat"))
    by_archive = prepared_in(*source, "40", "--path", str(tmp_path / "ml-1m.zip"))
    assert len({first, second, kept, by_path}) == 4 and by_archive == first
    assert all(folder.parent == outputs / "data" and (folder / "meta.json").exists() for folder in (first, second))
    for folder, options in (
        (first, {"min_items": 40}),
        (second, {"min_items": 45}),
        (kept, {"min_items": 45, "catalogue": "kept"}),
        (by_path, {"min_items": 40, "path": str(logs / "ratings.dat")}),
    ):
        assert data_name(Experiment(source="movielens-1m", **options)) == folder.name
    assert prepared_in(*source, "40", "--out", str(tmp_path / "o")) == tmp_path / "o"
    error = here("prepare", *source, "45", "--out", str(tmp_path / "o")).exception
    assert isinstance(error, bachlib.BachError) and "min_items is 40 there and 45 here" in str(error)


def test_prepare_my_own(tmp_path):
    rows = [f"u{u};i{i};{t}" for u, i, _, t in random_events(1)]
    (tmp_path / "my.csv").write_text("\n".join(["who;what;when", *rows]))
    words = (
        "prepare",
        "--source",
        "csv",
        "--path",
        str(tmp_path / "my.csv"),
        "--out",
        str(tmp_path / "o"),
        "--min-items",
        "40",
    )
    done = bach_here(*words, "--user", "who", "--item", "what", "--time", "when")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--source", "taobao"), "UserBehavior.csv.zip"),
        (("--source", "netflix"), "kaggle"),
        (("--source", "csv"), "give its path with --path"),
        (("--source", "movielens-1m", "--path", "nowhere"), "nowhere does not exist"),
        (("--source", "movielens-1m", "--user", "x", "--path", "nowhere"), "name yours with --source csv or parquet"),
        (
            ("--source", "planted", "--ties", "maybe"),
            "ties: Input should be 'log', 'item', 'shuffle' or 'basket', got 'maybe'",
        ),
    ],
)
def test_mistakes_are_a_message_and_not_a_traceback(words, said, tmp_path):
    done = bach_here("prepare", *words, BACH_DATA_DIR=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("bach: ") and said in done.stderr and "Traceback" not in done.stderr


def test_run_with_a_wrong_file():
    done = bach_here("run", "params/nothing.yaml")
    assert done.returncode == 2 and "does not exist" in done.stderr


def test_report(tmp_path):
    done = bach_here("report", "nothing", BACH_OUTPUT_DIR=str(tmp_path))
    assert done.returncode == 2 and f"there is no run nothing; in {tmp_path / 'runs'} there are none" in done.stderr
    batch(tmp_path / "runs" / "mine")
    for named in ("mine", str(tmp_path / "runs" / "mine")):
        done = bach_here("report", named, BACH_OUTPUT_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"→ {tmp_path / 'runs' / 'mine' / 'report.html'}"
    assert "my batch" in (tmp_path / "runs" / "mine" / "report.html").read_text()


def test_bench_prepare():
    """The whole measurement on a small log; the goals are for the real size and are not judged here."""
    done = bach("bench", "prepare", "--shape", "movielens-20m", "--rows", "200000")
    assert done.returncode == 0, done.stderr
    assert "prepare, movielens-20m: ratio" in done.stdout
    path = done.stdout.strip().rsplit("→ ", 1)[1]
    with open(path) as stream:
        record = json.load(stream)
    (result,) = [row for row in record["results"] if (row["bench"], row["name"]) == ("prepare", "movielens-20m")]
    assert result["rows"] == 200_000 and result["counts"]["users"] > 0 and result["ratio"] > 1


def test_evaluate_without_all_multihead_has_a_table(world, tmp_path):
    for name in ("mostpop", "standard"):
        quick = {"epochs": 1, "n_negatives": 64, "batch_size": 512}
        fit(build(name, world, 3, d=16, ff=16), world, quick, tmp_path / name, quiet=True)
    runs = [str(tmp_path / name) for name in ("standard", "mostpop")]
    done = here("evaluate", *runs, "--data", str(world.folder))
    assert done.exit_code == 0 and "relative gain over mostpop" in done.stdout
    assert "no run of all-multihead is among these, so mostpop, the first row, is the baseline" in done.stderr
    done = here("evaluate", *runs, "--data", str(world.folder), "--baseline", "standard")
    assert "relative gain over standard" in done.stdout and not done.stderr
    wrong = here("evaluate", *runs, "--data", str(world.folder), "--baseline", "mind").exception
    assert "baseline='mind' should be one of the rows: mostpop, standard" in str(wrong)
