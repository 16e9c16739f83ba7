"""Five kills, and the process ended before one write in several. `make torture` does 200 kills and every write."""

import random

import pytest
import torture


@pytest.fixture(scope="module", autouse=True)
def warm():
    torture.warm_up()


@pytest.mark.parametrize(("name", "kills"), [("prepare", 2), ("save", 2), ("train", 1)])
def test_killed_at_a_random_moment(name, kills):
    row = torture.killed(name, kills, random.Random())
    assert row.landed == kills and row.differences == []


@pytest.mark.parametrize(("name", "every"), [("prepare", 13), ("train", 32), ("save", 11), ("point", 8)])
def test_ended_before_a_write(name, every):
    """Other writes in each run of the tests."""
    row = torture.crashed(name, every, first=random.randrange(every))
    assert row.landed >= 1 and row.differences == []


def test_a_half_written_file_would_be_noticed(monkeypatch, tmp_path):
    """The crash points see an index whose pointer is written before its files."""
    one = torture.Torture("save", tmp_path)
    one.back()
    (tmp_path / "place" / "index" / "CURRENT").write_text("gen-000002 0")
    assert len(one.differences(end=False)) == 1
