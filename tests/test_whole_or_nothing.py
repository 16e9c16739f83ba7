"""A prepared folder appears complete or not at all: disk full, memory short, killed, interrupted, four at once."""

import errno
import json
import os
import resource
import stat
import subprocess
import sys
import zipfile

import numpy as np
import pandas as pd
import pytest
from logs import as_raw, my_csv, random_events, write_movielens_csv

from bachlib import BachError
from bachlib.data import Dataset, prepare
from bachlib.files import replacing, write_table, write_text

EVENTS = random_events(21, ties=False)
MY = {"user": "who", "item": "what", "time": "when", "rating": "stars"}


def test_places_that_cannot_be_written(tmp_path):
    path = my_csv(tmp_path, EVENTS)
    (tmp_path / "file").write_text("x")
    with pytest.raises(BachError, match="cannot be written"):
        prepare("csv", path, tmp_path / "file" / "o", columns=MY, min_items=40, quiet=True)
    with pytest.raises(BachError, match="exists and is not a prepared data set"):
        prepare("csv", path, tmp_path / "file", columns=MY, min_items=40, quiet=True)


def test_a_damaged_prepared_folder_is_made_anew(tmp_path):
    path = my_csv(tmp_path, EVENTS)
    prepare("csv", path, tmp_path / "o", columns=MY, min_items=40, quiet=True)
    (tmp_path / "o" / "meta.json").write_text("{")
    with pytest.raises(BachError, match="damaged; prepare the data set again"):
        Dataset.load(tmp_path / "o")
    assert prepare("csv", path, tmp_path / "o", columns=MY, min_items=40, quiet=True).n_users > 0


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "o").symlink_to(tmp_path / "disk")
    prepare("csv", my_csv(tmp_path, EVENTS), tmp_path / "o", columns=MY, min_items=40, quiet=True)
    assert (tmp_path / "o").is_symlink() and (tmp_path / "disk" / "meta.json").exists()


def test_four_at_once(tmp_path):
    """Processes that prepare the same folder wait for each other and all get it."""
    path, out = str(my_csv(tmp_path, EVENTS)), str(tmp_path / "o")
    code = f"from bachlib.data import prepare; prepare('csv', {path!r}, {out!r}, columns={MY!r}, min_items=40)"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(4)]
    said = [process.communicate()[0] for process in running]
    assert all(process.returncode == 0 for process in running)
    assert sum("already prepared" in text for text in said) == 3


def test_control_c(tmp_path, monkeypatch):
    def interrupted(*args):
        raise RuntimeError("Query interrupted")

    monkeypatch.setattr(sys.modules["bachlib.data.prepare"], "write_users", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare("csv", my_csv(tmp_path, EVENTS), tmp_path / "out" / "o", columns=MY, min_items=40, quiet=True)
    assert list((tmp_path / "out").iterdir()) == []


def test_disk_full_while_writing(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("bachlib.data.store.pq.write_table", full)
    with pytest.raises(BachError, match=r"no disk space left.*BACH_OUTPUT_DIR"):
        prepare("csv", my_csv(tmp_path, EVENTS), tmp_path / "outputs" / "made", columns=MY, min_items=40, quiet=True)
    assert list((tmp_path / "outputs").iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits are a Unix thing")
def test_disk_full_for_real(tmp_path):
    """A process that may not write files over 4 kB: the engine, the unpacking or numpy meets the wall."""
    path = write_movielens_csv(tmp_path / "ratings.csv", EVENTS)
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(path, "ml-20m/ratings.csv")
    raw, out = str(tmp_path / "a.zip"), str(tmp_path / "outputs" / "made")
    code = f"""
from bachlib.data import prepare
try:
    prepare("movielens-20m", {raw!r}, {out!r}, min_items=40, quiet=True)
except Exception as error:
    print(type(error).__name__, error)
"""
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))  # noqa: E731
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, preexec_fn=limit)
    assert done.stdout.startswith("BachError no disk space left"), done.stdout + done.stderr
    assert list((tmp_path / "outputs").iterdir()) == []


def test_an_old_folder_survives_a_failed_new_one(tmp_path, monkeypatch):
    path = my_csv(tmp_path, EVENTS)
    before = as_raw(prepare("csv", path, tmp_path / "o", columns=MY, min_items=40, quiet=True))
    monkeypatch.setattr(sys.modules["bachlib.data.prepare"], "write_items", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare("csv", my_csv(tmp_path, EVENTS[1:]), tmp_path / "o", columns=MY, min_items=40, quiet=True)
    assert as_raw(Dataset.load(tmp_path / "o")) == before


def test_what_a_killed_process_left_is_swept(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f".o[1].{dead.pid}.abcdefgh.partial"
    (left / "new").mkdir(parents=True)
    living = tmp_path / ".o[1].1.abcdefgh.partial"
    living.mkdir()
    prepare("csv", my_csv(tmp_path, EVENTS), tmp_path / "o[1]", columns=MY, min_items=40, quiet=True)
    assert not left.exists() and living.exists()


def test_memory_too_small_is_said(tmp_path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({name: rng.integers(10**6, size=400_000) for name in ("user", "item", "time")})
    frame.to_csv(tmp_path / "l.csv", index=False)
    with pytest.raises(BachError, match="raise memory="):
        prepare("csv", tmp_path / "l.csv", tmp_path / "o", memory="3MB", quiet=True)


def test_a_folder_that_is_not_prepared(tmp_path):
    with pytest.raises(BachError, match=r"not a prepared data set \(it has no meta\.json\)"):
        Dataset.load(tmp_path)
    (tmp_path / "meta.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(BachError, match="has format 0, this version reads 2; prepare it again"):
        Dataset.load(tmp_path)


# ------------------------------------------------------------------------------------------------------- one file


def test_a_failed_write_keeps_the_old_file(tmp_path):
    write_text(tmp_path / "a.txt", "old")
    with pytest.raises(ZeroDivisionError), replacing(tmp_path / "a.txt") as partial:
        partial.write_text("half of the n")
        raise ZeroDivisionError
    assert (tmp_path / "a.txt").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_content_is_on_the_disk_before_the_name(tmp_path, monkeypatch):
    """fsync of the file, then the rename, then fsync of the folder: also after a power cut the file is whole."""
    done = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append(stat.S_ISDIR(os.fstat(file).st_mode)), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("rename"), replace(*paths)))
    write_table(tmp_path / "a.parquet", pd.DataFrame({"x": [1]}))
    assert done == [False, "rename", True] and len(pd.read_parquet(tmp_path / "a.parquet")) == 1
