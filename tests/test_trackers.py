"""`on_epoch` of `fit`: who is called with what, what an error of it does, and the trackers of the README with files."""

import re
from pathlib import Path

import pandas as pd
import pytest
from commands import bach_here

from bachlib import BachError
from bachlib.model.methods import build
from bachlib.train import Run, fit, scalars

SMALL = {"d": 8, "ff": 8, "item_width": 8}
QUICK = {"batch_size": 1024, "n_negatives": 8, "valid_every": 2, "valid_users": 20}


def train(world, folder, epochs, on_epoch=None, **params):
    return fit(build("p-bach", world, 2, **SMALL), world, {**QUICK, "epochs": epochs} | params, folder, quiet=True,
               on_epoch=on_epoch)  # fmt: skip


def timeless(history):
    return history.drop(columns="windows_per_s")


@pytest.fixture(scope="module")
def plain(world, tmp_path_factory):
    return train(world, tmp_path_factory.mktemp("plain"), 3)


def test_the_rows_of_the_history_and_the_same_run(world, tmp_path, plain):
    """A callback gets copies: what it does to them changes nothing."""
    rows, on_disk = [], []

    def on_epoch(row):
        rows.append(scalars(row))
        on_disk.append(Run.load(tmp_path, world, weights="last").history["epoch"].tolist())
        row["kappa"].clear()
        row["loss"] = None

    run = train(world, tmp_path, 3, on_epoch)
    pd.testing.assert_frame_equal(timeless(run.history), timeless(plain.history), check_exact=True)
    assert run.best == plain.best and on_disk == [[1], [1, 2], [1, 2, 3]], "the epoch is on the disk before"
    assert [row["epoch"] for row in rows] == [1, 2, 3]
    assert ["valid_auprc" in row for row in rows] == [False, True, True]
    for row, (_, kept) in zip(rows, run.history.iterrows(), strict=True):
        assert row["loss"] == kept["loss"] and row["kappa/1"] == kept["kappa"][1]
        assert all(isinstance(x, float | int) for x in row.values())


def test_a_resumed_training_tells_new_epochs_only(world, tmp_path, plain):
    seen = []
    train(world, tmp_path, 2, lambda row: seen.append(row["epoch"]))
    run = train(world, tmp_path, 3, lambda row: seen.append(row["epoch"]))
    train(world, tmp_path, 3, lambda row: seen.append(row["epoch"]))
    assert seen == [1, 2, 3]
    # epoch 2 was the last one of the first call; it was validated anyway
    pd.testing.assert_frame_equal(timeless(run.history), timeless(plain.history), check_exact=True)


def test_an_error_of_the_callback_does_not_damage_the_run(world, tmp_path, plain):
    def on_epoch(row):
        if row["epoch"] == 2:
            raise RuntimeError("the tracker has gone")

    with pytest.raises(RuntimeError, match="the tracker has gone") as caught:
        train(world, tmp_path, 3, on_epoch)
    assert caught.value.__notes__ == ["raised by on_epoch after epoch 2, which is saved: the same call continues"]
    left = Run.load(tmp_path, world)
    assert left.status == "stopped" and left.history["epoch"].tolist() == [1, 2]
    seen = []
    run = train(world, tmp_path, 3, lambda row: seen.append(row["epoch"]))
    assert seen == [3] and run.status == "finished"
    pd.testing.assert_frame_equal(timeless(run.history), timeless(plain.history), check_exact=True)


def test_tensorboard_has_the_history(world, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out, board = tmp_path / "run", tmp_path / "board"
    words = ["train", "p-bach", "--data", world.folder, "--k", 2, "--out", out, "--tensorboard", board]
    words += [word for name, value in {**QUICK, **SMALL}.items() for word in ("--set", f"{name}={value}")]
    for epochs in (1, 2):  # the second call resumes, and writes a second file
        done = bach_here(*words, "--set", f"epochs={epochs}")
        assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(board))
    events.Reload()
    history = Run.load(out, world).history
    for name, values in (("loss", history["loss"]), ("kappa/1", history["kappa"].str[1])):
        found = events.Scalars(name)
        assert [one.step for one in found] == [1, 2]
        assert [one.value for one in found] == pytest.approx(values.tolist(), rel=1e-6)


def test_mlflow_has_the_history(world, tmp_path, monkeypatch):
    """The example of the guide as it is printed, with local files."""
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "false")
    page = (Path(__file__).parent.parent / "bachlib" / "README.md").read_text()
    (example,) = (code for code in re.findall(r"^```py\n(.*?)^```", page, re.M | re.S) if "import mlflow" in code)
    other = train(world, tmp_path / "run", 2)
    exec(example, {"fit": fit, "scalars": scalars, "other": other, "dataset": world, "short": QUICK})
    found = mlflow.MlflowClient().get_metric_history(mlflow.last_active_run().info.run_id, "loss")
    history = Run.load(tmp_path / "run", world).history
    assert [(one.step, one.value) for one in found] == [(3, history["loss"][2])], "epochs 1 and 2 were not told"
    assert list((tmp_path / "outputs" / "mlruns").rglob("kappa/1"))


def test_without_tensorboard_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr("bachlib.find_spec", lambda name: None)
    from bachlib.train.watch import to_tensorboard

    with pytest.raises(BachError, match=r"needs tensorboard: pip install 'bachlib\[trackers\]'"):
        to_tensorboard(tmp_path)
