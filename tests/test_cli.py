"""The command `bach`, as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import bach, surroundings
from logs import random_events, write_movielens_csv
from reports import batch

import bachlib
from bachlib.model.methods import METHODS
from bachlib.params import WorldParams

ROOT = Path(__file__).resolve().parent.parent


def python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=surroundings(), cwd=ROOT)


def test_doctor(tmp_path):
    done = bach("doctor", BACH_DATA_DIR="")
    assert done.returncode == 0, done.stderr
    for piece in ("torch          2.13.0", "threads", "faiss-cpu", "BACH_DATA_DIR is not set", "duckdb"):
        assert piece in done.stdout
    assert (
        f"BACH_DATA_DIR is {tmp_path / 'no'}, which is not a folder"
        in bach("doctor", BACH_DATA_DIR=str(tmp_path / "no")).stdout
    )


def test_doctor_names_missing_extras():
    hide = "import sys; sys.modules |= dict.fromkeys(['plotly', 'distributed', 'faiss']); "
    done = python(hide + "from bachlib.experiment.doctor import findings; print('\\n'.join(findings()))")
    assert "– lab          not installed: plotly (for notebooks, pictures, reports)" in done.stdout, done.stderr
    assert "pip install 'bachlib[lab]'" in done.stdout and "pip install 'bachlib[sweep]'" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run", "quickstart"], "bach run needs papermill: pip install 'bachlib[lab]'"),
        (["report", "x"], "bach report needs papermill: pip install 'bachlib[lab]'"),
        (["sweep", "planted", "--dask", "tcp://host:1"], "bach sweep needs distributed: pip install 'bachlib[sweep]'"),
        (["bench", "show"], "bachlib.show needs plotly: pip install 'bachlib[lab]'"),
    ],
)
def test_a_command_names_the_extra_it_needs(words, said):
    hide = "import sys; sys.modules |= dict.fromkeys(['plotly', 'distributed', 'papermill']); "
    done = python(hide + f"sys.argv = ['bach', *{words}]; from bachlib.cli import main; main()")
    assert done.returncode == 2 and done.stderr.strip() == f"bach: {said}"


def test_notebooks_are_in_the_clone(tmp_path):
    """What the installed package says outside a clone."""
    outside = f"import bachlib.cli as cli, sys; cli.project_root = lambda: cli.Path({str(tmp_path)!r}); "
    done = python(outside + "sys.argv = ['bach', 'run', 'quickstart']; cli.main()")
    assert done.returncode == 2 and "run the command inside a clone of the workbook" in done.stderr
    assert python(outside + "sys.argv = ['bach', 'run', '--help']; cli.main()").returncode == 0


def test_version_methods_and_params():
    assert bach("--version").stdout == f"bachlib {bachlib.__version__}\n"
    methods = bach("methods").stdout
    assert "encoder" in methods and "score" in methods
    for name, row in METHODS.items():
        assert any(line.split()[0] == name and row.objective in line for line in methods.splitlines())
    files = bach("params").stdout
    for path in [*(ROOT / "params").glob("*.yaml"), *(ROOT / "params" / "sweeps").glob("*.yaml")]:
        assert path.stem in files
    assert bach("params", "epochs").stdout.split()[:4] == ["epochs", "200", "≥", "1"]
    world = bach("params", "world").stdout
    assert "≥ 0, < 1" in world and len(world.splitlines()) == len(WorldParams.model_fields)
    assert "[default: mine]" in bach("params", "ml1m").stdout and "grid:" in bach("params", "sweeps/tau").stdout
    assert "auto | cpu | cuda" in bach("params", "train").stdout
    wrong = bach("params", "nothing")
    assert wrong.returncode == 2 and "does not exist" in wrong.stderr


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
    assert "already prepared" in bach(*words).stdout


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
    done = bach(*words, "--user", "who", "--item", "what", "--time", "when")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--source", "taobao"), "UserBehavior.csv.zip"),
        (("--source", "netflix"), "kaggle"),
        (("--source", "csv"), "say where it is with --path"),
        (("--source", "movielens-1m", "--path", "nowhere"), "nowhere does not exist"),
        (("--source", "movielens-1m", "--user", "x", "--path", "nowhere"), "name yours with --source csv or parquet"),
        (("--source", "planted", "--ties", "maybe"), "ties: Input should be 'log' or 'item', got 'maybe'"),
    ],
)
def test_mistakes_are_a_message_and_not_a_traceback(words, said, tmp_path):
    done = bach("prepare", *words, BACH_DATA_DIR=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("bach: ") and said in done.stderr and "Traceback" not in done.stderr


def test_run_with_a_wrong_file():
    done = bach("run", "params/nothing.yaml")
    assert done.returncode == 2 and "does not exist" in done.stderr


def test_report(tmp_path):
    done = bach("report", "nothing", BACH_OUTPUT_DIR=str(tmp_path))
    assert done.returncode == 2 and f"there is no run nothing; in {tmp_path / 'runs'} there are none" in done.stderr
    batch(tmp_path / "runs" / "mine")
    for named in ("mine", str(tmp_path / "runs" / "mine")):
        done = bach("report", named, BACH_OUTPUT_DIR=str(tmp_path))
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
        (result,) = json.load(stream)["results"]
    assert result["rows"] == 200_000 and result["counts"]["users"] > 0 and result["ratio"] > 1
