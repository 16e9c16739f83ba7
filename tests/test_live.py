"""The table of a sweep while it runs."""

import math

import pytest
from rich.console import Console

from bachlib.experiment import estimate
from bachlib.experiment.cluster import Outcome
from bachlib.experiment.live import SHOWN, Progress, failures, spoken
from bachlib.experiment.sweep import read_sweep


@pytest.fixture
def sweep():
    return read_sweep("planted")  # 18 points


def shown(progress: Progress) -> list[str]:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(progress.table())
    return capture.get().splitlines()


def test_what_runs_and_what_failed_is_always_in_sight(sweep, monkeypatch):
    monkeypatch.setattr(estimate, "seconds", lambda p: 20.0)
    progress, names = Progress(sweep, {}, limit=2), [point.name for point in sweep.points]
    for point in sweep.points[:14]:
        progress.tell(point, None)
        failed = point.name in names[:9]
        progress.tell(point, Outcome("failed", 3.0, "lost\nand more") if failed else Outcome("done", 40.0))
    progress.tell(sweep.points[14], None)
    head, _, *rows = shown(progress)
    assert head.startswith("5 done · 1 running · 9 failed · 3 waiting · about 80 s left"), "twice as long as hoped for"
    assert len(rows) == SHOWN and rows[0].split()[:2] == [names[14], "running"]
    assert [row.split()[0] for row in rows[1:7]] == names[3:9], "the last that failed"
    assert rows[1].split()[1:] == ["failed", "lost"]
    assert [row.split()[0] for row in rows[7:]] == names[13:8:-1], "the last that were done"
    told = failures(sweep.points, progress.ended)
    assert len(told) == 9 and told[0].startswith(f"{names[0]}: lost") and told[0].endswith("log.txt")


def test_nobody_knows_before_the_data_is_prepared(sweep, monkeypatch):
    monkeypatch.setattr(estimate, "seconds", lambda p: math.nan)
    assert Progress(sweep, {}, limit=2).left() == "nobody knows how much is left"
    done = {point.name: Outcome("done", 1.0) for point in sweep.points}
    assert Progress(sweep, done, limit=2).left() == "nothing left"


@pytest.mark.parametrize(
    ("seconds", "said"), [(5, "5 s"), (95, "1 min 35 s"), (2 * 3600, "2.0 h"), (72 * 3600, "3.0 days")]
)
def test_times_are_spoken(seconds, said):
    assert spoken(seconds) == said
