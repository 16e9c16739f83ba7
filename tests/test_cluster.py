"""What `bach sweep` says before, during and after its runs."""

import math

import pytest

from bachlib.experiment import estimate
from bachlib.experiment.cluster import Outcome, failures, local_workers, plan, spoken, time_left
from bachlib.experiment.sweep import read_sweep


@pytest.fixture
def points():
    return read_sweep("planted").points  # 18 of them


def test_the_time_left_is_corrected_by_how_the_others_went(points, monkeypatch):
    monkeypatch.setattr(estimate, "seconds", lambda p: 20.0)
    assert time_left(points, {}, limit=2) == "3 min 0 s left"
    ended = {point.name: Outcome("done", 40.0) for point in points[:5]} | {points[5].name: Outcome("failed", 1.0, "x")}
    assert time_left(points, ended, limit=2) == "4 min 0 s left", "twice as long as estimated, 12 to go"
    assert time_left(points, {point.name: Outcome("done", 1.0) for point in points}, limit=2) == "0 s left"


def test_the_time_left_is_unknown_before_the_data_is_prepared(points, monkeypatch):
    monkeypatch.setattr(estimate, "seconds", lambda p: math.nan)
    assert time_left(points, {}, limit=2) == "an unknown time left"


def test_failures_have_their_error_and_log(points):
    told = failures(points, {points[0].name: Outcome("failed", 3.0, "lost"), points[1].name: Outcome("done", 3.0)})
    assert len(told) == 1 and told[0].startswith(f"{points[0].name}: lost") and told[0].endswith("log.txt")


def test_the_plan_names_every_run(points, monkeypatch):
    monkeypatch.setattr(estimate, "seconds", lambda p: 20.0)
    said = plan(read_sweep("planted"), workers=3, threads=1)
    assert all(f"{point.name} " in said and "missing, about 20 s" in said for point in points)
    assert "18 runs, 18 to do; about 2 min 0 s with 3 at a time (1 threads each)" in said
    assert local_workers(1, None, None)[0] == 1 and local_workers(18, 5, 2) == (5, 2)


@pytest.mark.parametrize(
    ("seconds", "said"), [(5, "5 s"), (95, "1 min 35 s"), (2 * 3600, "2.0 h"), (72 * 3600, "3.0 days")]
)
def test_times_are_spoken(seconds, said):
    assert spoken(seconds) == said
