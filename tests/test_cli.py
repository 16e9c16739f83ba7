"""The command `bach`, as a user types it."""

import json

import pytest
from commands import bach
from logs import random_events, write_movielens_csv
from reports import batch


def test_doctor(tmp_path):
    done = bach("doctor", BACH_DATA_DIR="")
    assert done.returncode == 0, done.stderr
    for piece in ("torch          2.13.0", "threads", "faiss-cpu", "BACH_DATA_DIR is not set", "duckdb"):
        assert piece in done.stdout
    assert (
        f"BACH_DATA_DIR is {tmp_path / 'no'}, which is not a folder"
        in bach("doctor", BACH_DATA_DIR=str(tmp_path / "no")).stdout
    )


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
        (("--source", "csv"), "give its path with --path"),
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
