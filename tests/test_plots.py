"""Figures are pure functions: they can be drawn, their titles tell the numbers, their data is the data."""

import numpy as np
import pandas as pd
import pytest
import torch

from bachlib.model import mixture
from bachlib.model.sphere import KERNELS
from bachlib.show import plots


def test_funnel(world):
    figure = plots.funnel(world.meta["steps"])
    assert list(figure.data[0].x) == [step["rows"] for step in world.meta["steps"]]
    assert f"{world.meta['steps'][-1]['rows']:,}" in figure.layout.title.text


def test_long_tail():
    figure = plots.long_tail(np.r_[np.full(10, 100), np.ones(90)])
    assert "gets 92% of the likes" in figure.layout.title.text


def test_long_tail_ends_where_the_likes_end():
    """The axis is logarithmic: items that nobody kept likes are in the share, not in the line."""
    line = plots.long_tail(np.r_[np.full(10, 100), np.ones(70), np.zeros(20)]).data[0]
    assert line.x[-1] == 80 and min(line.y) == 1


def test_timeline_shows_every_item_once(world):
    figure = plots.timeline(
        3, world.sequence(3), world.items["title"], world.truth.item_interest, list(world.truth.genres)
    )
    places = np.sort(np.concatenate([trace.x for trace in figure.data]))
    assert places.tolist() == list(range(len(world.sequence(3))))


def test_windows(world):
    length = len(world.sequence(0))
    assert f"{length - 79} training windows" in plots.windows(length, 50, 10).layout.title.text


def test_windows_of_a_short_sequence():
    figure = plots.windows(40, 50, 10)
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


HEADS = torch.nn.functional.normalize(torch.eye(3) + 0.1, dim=-1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: plots.kernels_against_cosine(KERNELS, 3, [1, 5]),
        lambda: plots.log_normalizers(KERNELS, [2, 64]),
        lambda: plots.cosine_of_samples(KERNELS, 64, [0.0, 14.3]),
        lambda: plots.kernels_matched(*[x for kernel in KERNELS.values() for x in (kernel, 20.0)], 16),
        lambda: plots.mixture_on_sphere(HEADS, [0.5, 0.3, 0.2], [5.0, 9.0, 20.0], KERNELS["power-spherical"]),
        lambda: plots.gamma_on_great_circle(KERNELS["von-mises-fisher"], 14.3, 16, [0.5, 0.9]),
    ],
)
def test_figures_of_the_sphere_are_finite(draw):
    figure = draw()
    assert figure.layout.title.text
    for trace in figure.data:
        if trace.type == "scatter":
            assert np.isfinite(np.asarray(trace.y, dtype=float)).all()


def test_the_density_of_the_cosine_integrates_to_one():
    for trace in plots.cosine_of_samples(KERNELS, 64, [0.0, 14.3, 64.0]).data:
        assert np.trapezoid(trace.y, trace.x) == pytest.approx(1, abs=1e-4)


def test_gamma_on_the_great_circle_balances_where_the_heads_do():
    soft = plots.gamma_on_great_circle(KERNELS["power-spherical"], 14.3, 16, [0.5]).data[1]
    assert soft.y[90] == pytest.approx(0.5) and soft.y[0] > 0.99 > 0.01 > soft.y[-1]


def test_elbo_figures():
    log_pi, log_sigma, log_p = (torch.randn(8, 3).log_softmax(-1) for _ in range(3))
    elbo, likelihood = mixture.elbo(log_pi, log_sigma, log_p), mixture.log_likelihood(log_pi, log_p)
    bars = plots.elbo_waterfall(elbo, likelihood).data[0]
    assert sum(bars.y[:3]) == pytest.approx(bars.y[3], abs=1e-5) and bars.y[3] + bars.y[4] == pytest.approx(
        bars.y[5], abs=1e-5
    )
    assert (
        "minimum at κ = 10"
        in plots.gap_against_kappa(torch.tensor([1.0, 10, 100]), torch.tensor([2.0, 1, 2]), 9.0, 14.0).layout.title.text
    )
    assert len(plots.gradient_shares({"a": torch.tensor([0.7, 0.3])}).data) == 2


def test_one_colour_per_head():
    assert len(set(plots.COLOURS)) == len(plots.COLOURS) == 16


# ------------------------------------------------------------------------------------------------------- a training


@pytest.fixture
def histories():
    """Two epochs of three steps: one method uses its heads evenly, the other one head."""

    def rows(usage):
        return pd.DataFrame(
            [
                {
                    "epoch": epoch, "step": step, "loss": 5.0 - step, "reconstruction": step - 4.5, "prior": -1.0,
                    "entropy": 0.5, "usage": usage, "gradient": usage, "kappa": [14.0 + step, 15.0 + step],
                    "kappa_min": 10.0, "kappa_max": 30.0, "effective_heads": float(np.count_nonzero(usage)),
                }
                for epoch in (1, 2) for step in (1, 2, 3)
            ]
        )  # fmt: skip

    return {"even": rows([0.5, 0.5]), "one": rows([1.0, 0.0])}


def test_terms_and_kappa_over_the_steps(histories):
    figure = plots.elbo_terms(histories["even"])
    assert [trace.name for trace in figure.data] == ["ELBO", "reconstruction", "prior", "entropy"]
    assert list(figure.data[0].x) == [1, 2, 3, 4, 5, 6] and list(figure.data[0].y[:3]) == [-4, -3, -2]
    assert figure.layout.title.text == "The bound rises by 2 nats, 100% of it reconstruction"
    worse = plots.elbo_terms(histories["even"].iloc[::-1].assign(step=[1, 2, 3] * 2, epoch=[1] * 3 + [2] * 3))
    assert worse.layout.title.text == "The bound falls by 2 nats"
    figure = plots.kappa_trajectories(histories["even"], 14.3)
    assert "mean κ of 17.0 to 18.0" in figure.layout.title.text and figure.data[-1].name == "head 1"
    assert "20–30" in str(figure.layout.annotations) and [s.y0 for s in figure.layout.shapes] == [20, 30, 14.3]
    one = plots.kappa_trajectories(histories["even"], 14.3, "von-mises-fisher", {1: "Noir"})
    assert one.data[-1].name == "1 · Noir" and one.data[-1].line.color == plots.colour(1) and len(one.data) == 3


def test_usage_and_gradient(histories):
    figure = plots.head_usage(histories)
    assert "at the end: 2.0, 1.0 of 2" in figure.layout.title.text
    assert len(figure.data) == 4 and figure.data[3].line.color == plots.colour(1)
    some = plots.head_usage({"x": histories["even"]}, {1: "Noir"})
    assert [trace.name for trace in some.data] == ["1 · Noir", "other heads"]
    figure = plots.gradient_heads(histories)
    np.testing.assert_allclose(figure.data[0].y, 2)
    np.testing.assert_allclose(figure.data[1].y, 1)


def test_the_race_is_a_film(histories):
    figure = plots.collapse_race(histories)
    assert [frame.name for frame in figure.frames] == ["1", "2", "3", "4", "5", "6"]
    assert list(figure.frames[0].data[1].y) == [1.0, 0.0] and len(figure.layout.sliders[0].steps) == 6


def test_heads_and_interests():
    p, weights, pi = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([0.3, 0.7]), np.array([0.25, 0.75])
    figure = plots.heads_and_interests(p, weights, ["a", "b"], pi, "title")
    assert list(figure.data[0].x) == ["b", "a"] and figure.data[0].y[0] == "head 1, π 70%"
    np.testing.assert_allclose(figure.data[0].z[0], [0.8, 0.2])
    np.testing.assert_allclose(figure.data[0].z[-1], [0.75, 0.25])
    figure = plots.pi_recovered({"right": pi[None], "wrong": pi[None, ::-1]}, pi[None])
    assert "right 1.00, wrong 0.50" in figure.layout.title.text


# --------------------------------------------------------------------------------------------------- of an evaluation


def test_figures_of_an_evaluation():
    ranks = {"a": np.array([[1, 60], [3, 700]]), "b": np.array([[5, 40], [50, 700]])}
    figure = plots.recall_curves(ranks)
    assert "At K = 50 b finds the most: 75.0%" in figure.layout.title.text and [t.name for t in figure.data] == [
        "a",
        "b",
    ]
    assert figure.data[0].y[0] == 0.25 and figure.layout.xaxis.type == "log"
    figure = plots.wins_and_losses(pd.Series([0.3, -0.1, 0.0, 0.2]), "a", "b", "AUPRC")
    assert figure.layout.title.text == "a is better for 50% of the users, b for 25%, 25% are equal"
    assert list(figure.data[0].y) == [0.3, 0.2] and list(figure.data[1].y) == [-0.1]
    bands = pd.DataFrame({"band": ["1–10", "11+"], "value": [0.05, -0.05], "low": [0.01, -0.2], "high": [0.1, 0.1]})
    figure = plots.gain_by_depth(bands, "a", "b")
    assert "a has +5 held-out items" in figure.layout.title.text and list(figure.data[0].marker.opacity) == [1, 0.45]
    assert figure.data[0].marker.color[0] != figure.data[0].marker.color[1]


def test_calibration_and_traps():
    bins = pd.DataFrame({"predicted": [0.1, 0.6], "realised": [0.2, 0.5], "se": [0.01, np.nan], "n": [90, 1]})
    figure = plots.calibration_curves({"heads": bins, "genres": bins}, {"heads": 0.1, "genres": 0.02}, "share")
    assert "at most 0.100" in figure.layout.title.text and len(figure.data) == 4
    assert [a.text for a in figure.layout.annotations] == ["heads: 0.100", "genres:<br>0.020"]
    rows = [["a", "x", 0.1, 0.2], ["a", "y", 0.1, 0.05], ["b", "x", 0.1, 0.9], ["b", "y", 0.1, 0.1]]
    figure = plots.trap_changes(pd.DataFrame(rows, columns=["method", "trap", "right", "wrong"]))
    assert figure.layout.title.text == "The largest error: x" and list(figure.data[0].text) == ["-50%", "+100%"]
    assert figure.data[1].text[1] == "× 9" and figure.data[0].x[1] == 1


def test_paper_and_ours():
    rows = [["R@10", 0.04, 0.01, 0.07, "ours"], ["AUPRC", 0.02, -0.01, 0.05, "ours"]]
    rows += [["R@10", 0.05, 0.04, 0.06, "paper, x"], ["AUPRC", 0.03, 0.025, 0.035, "paper, x"]]
    figure = plots.paper_and_ours(pd.DataFrame(rows, columns=["metric", "gain", "low", "high", "source"]), "b")
    assert "in 1 of 2 metrics" in figure.layout.title.text
    np.testing.assert_allclose(figure.data[0].error_y.array, [3, 3])
    np.testing.assert_allclose(figure.data[1].error_y.array, [1, 0.5])
    assert [trace.marker.symbol for trace in figure.data] == ["circle", "diamond-open"]


# ------------------------------------------------------------------------------------------------------- serving


def test_recall_and_cost():
    table = pd.DataFrame(
        {"M": [50, 100, 200], "recall": [0.8, 0.995, 1.0], "proved": [0, 0, 0.5], "ms": [1.0, 2.0, 4.0]}
    )
    figure = plots.recall_and_cost(table, 1.5)
    assert "M = 100 finds 99.5% of the slate" in figure.layout.title.text
    assert [trace.name for trace in figure.data] == ["the exact slate found", "slates the bound covers", "two-step"]
    assert "No list is long enough" in plots.recall_and_cost(table.assign(recall=0.5), 1.5).layout.title.text


def test_adversary_counts_what_the_lists_miss():
    cosine, hidden = np.array([0.9, 0.95, 0.4, 0.5]), np.array([False, False, True, True])
    figure = plots.adversary(cosine, np.array([1.0, 1.1, 2.0, 2.1]), hidden, 0.45)
    assert "1 of the 2 best items are in no list" in figure.layout.title.text
    assert [len(trace.x) for trace in figure.data] == [2, 2]


def test_rows_looked_at():
    figure = plots.rows_looked_at(np.array([2.0, 3.0, 9.0]), np.array([0.02, 0.04, 1.0]))
    assert "proved after 4% of the items" in figure.layout.title.text and len(figure.data[0].x) == 3


def test_pareto_joins_what_nothing_beats():
    table = pd.DataFrame({"name": ["a", "b", "c"], "ms": [1.0, 2.0, 0.5], "value": [0.3, 0.2, 0.1]})
    figure = plots.pareto(table, "R@50")
    assert list(figure.data[0].x) == [0.5, 1.0]  # b is slower and worse than a
    assert "a is the most accurate, c the fastest (0.50 ms)" in figure.layout.title.text


def test_pi_slopes_say_how_much_moves():
    figure = plots.pi_slopes(np.array([0.7, 0.3]), np.array([0.5, 0.5]), ["x", "y"], "A cap")
    assert figure.layout.title.text == "A cap moves 20% of π<sub>u</sub>"
    assert [trace.line.color for trace in figure.data] == [plots.colour(0), plots.colour(1)]


def test_slate_slopes_join_what_stays():
    heads = ({1: 0, 2: 1, 3: 1}, {3: 2, 1: 0, 4: 0})
    titles = {i: f"film {i}" for i in range(5)}
    figure = plots.slate_slopes(np.array([1, 2, 3]), np.array([3, 1, 4]), heads, titles, "Boost")
    assert figure.layout.title.text == "Boost: 2 of 3 items stay"
    legend, lines = figure.data[:3], figure.data[3:]
    assert [trace.name for trace in legend] == ["head 0", "head 1", "head 2"]
    assert [list(trace.y) for trace in lines] == [[1, 2], [2], [3, 1], [3]]  # items 1, 2, 3, 4
    assert lines[0].text == ("film 1  1", "2  film 1") and lines[3].text == ("3  film 4",)
    assert lines[2].marker.color == (plots.colour(1), plots.colour(2))  # each end by its own head


def test_cold_start_curve():
    figure = plots.cold_start_curve({"p-bach": np.array([0.1, 0.2])}, np.array([1, 50]), "R@50", 0.05)
    assert figure.layout.title.text == "From one item p-bach reaches 50% of what it does from 50"


def test_recall_by_budget():
    table = pd.DataFrame({"L": [10, 100] * 2, "heads kept": [1, 1, 4, 4], "recall": [0.2, 0.3, 0.6, 1.0]})
    figure = plots.recall_by_budget(table, "recall")
    assert [trace.name for trace in figure.data] == ["1 prototypes", "4 prototypes"]
    assert figure.layout.title.text == "With all 4 prototypes lists of 100 give 99% of their best recall"


def test_dials_compare_what_is_between_the_ends():
    table = pd.DataFrame({"family": ["codebook", "hybrid", "hybrid", "personal"], "setting": ["", "1 own", "4 own", ""],
                          "ms": [0.1, 0.5, 0.6, 1.0], "value": [0.1, 0.1, 0.175, 0.2]})  # fmt: skip
    figure = plots.dials(table, "AUPRC")
    assert figure.layout.title.text == "hybrid, 4 own: 75% of the gain from codebook to personal"
    assert [len(trace.x) for trace in figure.data] == [1, 2, 1]
    worse = table.assign(value=[0.2, 0.1, 0.1, 0.2])
    assert plots.dials(worse, "AUPRC").layout.title.text == "personal gains nothing over codebook"
