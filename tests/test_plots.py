"""Figures are pure functions: they can be drawn, their titles tell the numbers, their data is the data."""

import numpy as np
import pytest

from bachlib.show import plots


def test_funnel(world):
    figure = plots.funnel(world.meta["steps"])
    assert list(figure.data[0].x) == [step["rows"] for step in world.meta["steps"]]
    assert f"{world.meta['steps'][-1]['rows']:,}" in figure.layout.title.text


def test_long_tail():
    figure = plots.long_tail(np.r_[np.full(10, 100), np.ones(90)])
    assert "gets 92% of the likes" in figure.layout.title.text


def test_timeline_shows_every_item_once(world):
    figure = plots.timeline(world, 3, world.truth.item_interest, list(world.truth.genres))
    places = np.sort(np.concatenate([trace.x for trace in figure.data]))
    assert places.tolist() == list(range(len(world.sequence(3))))


def test_windows(world):
    length = len(world.sequence(0))
    assert f"{length - 79} training windows" in plots.windows(world, 0, 50, 10).layout.title.text


def test_windows_of_a_short_sequence():
    class Short:
        def sequence(self, u):
            return np.arange(40)

    figure = plots.windows(Short(), 0, 50, 10)
    assert "40 liked items give 1 training windows" in figure.layout.title.text


@pytest.mark.parametrize("draw", ["lengths", "spectrum", "bars", "proportions", "sphere"])
def test_the_others_can_be_drawn(world, draw):
    truth = world.truth
    figure = {
        "lengths": lambda: plots.sequence_lengths(world.lengths, 80),
        "spectrum": lambda: plots.spectrum(np.array([9.0, 3.0, 1.0]), 0.03),
        "bars": lambda: plots.bars({"a": 0.1, "b": 0.2}, "title", "axis"),
        "proportions": lambda: plots.proportions(truth.pi[:4], list(truth.genres), "title"),
        "sphere": lambda: plots.sphere(
            truth.items[:, :3],
            truth.item_interest,
            list(truth.genres),
            truth.tastes[0][:, :3],
            truth.pi[0],
            np.array([0, 0, 1.0]),
        ),
    }[draw]()
    assert figure.layout.title.text and len(figure.to_json()) > 100


def test_one_colour_per_head():
    assert len(set(plots.COLOURS)) == len(plots.COLOURS) == 16
