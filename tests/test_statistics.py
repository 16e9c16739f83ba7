"""Bootstrap, permutation test and Holm's correction, against scipy and against what they promise."""

import numpy as np
import pytest
from scipy import stats

from bachlib import BachError
from bachlib.evaluate import statistics


def test_the_bootstrap_over_users_has_scipys_interval():
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.3, 1, 400), rng.normal(0.2, 1, 400)
    ours = statistics.paired_bootstrap(a, b, 4000)
    theirs = stats.bootstrap((a - b,), np.mean, n_resamples=4000, method="percentile", rng=1).confidence_interval
    assert ours.difference.value == pytest.approx((a - b).mean())
    assert (ours.difference.low, ours.difference.high) == pytest.approx(tuple(theirs), abs=0.008)
    again = statistics.paired_bootstrap(a, b, 4000)
    assert again == ours


def test_pairing_makes_the_interval_narrow():
    rng = np.random.default_rng(1)
    easy = rng.exponential(1, 500)  # users differ much more than methods
    a, b = easy * 1.05 + rng.normal(0, 0.01, 500), easy
    found = statistics.paired_bootstrap(a, b)
    assert 0.045 < found.gain.low < found.gain.value < found.gain.high < 0.055
    alone = statistics.interval(a.mean(), statistics.draws([a])[:, 0])
    assert alone.high - alone.low > 20 * (found.gain.high - found.gain.low)


def test_seeds_widen_the_interval():
    """Training noise that is the same for all users of a seed cannot be seen with one seed."""
    rng = np.random.default_rng(2)
    users = rng.normal(0.5, 0.05, 2000)
    a, b = (users + rng.normal(0, 0.05, (6, 1)) for _ in range(2))
    several, one = statistics.paired_bootstrap(a, b).difference, statistics.paired_bootstrap(a[0], b[0]).difference
    assert several.high - several.low > 0.03 and one.high - one.low < 1e-6


def test_intervals_hold_what_they_promise():
    """Over many worlds with users and seeds, 95% intervals should hold the truth about 95% of the time."""
    rng, held, worlds = np.random.default_rng(3), 0, 200
    for world in range(worlds):
        truth = 0.02
        users = rng.normal(0, 1, 150)
        a, b = (
            users + rng.normal(0, 0.3, 150) + rng.normal(0, 0.05, (8, 1)) + rng.normal(0, 0.3, (8, 150)) for _ in "ab"
        )
        found = statistics.paired_bootstrap(a + truth, b, 300, seed=world).difference
        held += found.low <= truth <= found.high
    assert 0.88 <= held / worlds <= 0.99


def test_users_are_drawn_together_and_seeds_apart():
    seeds, users = np.array([[0.0], [1.0]]).repeat(50, 1), np.random.default_rng(0).random(50)
    a, b = statistics.draws([seeds, seeds]).T
    assert np.corrcoef(a, b)[0, 1] == pytest.approx(0, abs=0.1)
    a, b = statistics.draws([users, users]).T
    assert (a == b).all() and a.std() > 0


def test_values_that_cannot_be_paired_are_refused():
    for call in (lambda a, b: statistics.draws([a, b]), statistics.paired_bootstrap):
        with pytest.raises(BachError, match="same users"):
            call(np.ones(3), np.ones(4))
        with pytest.raises(BachError, match="some users have no value"):
            call([1.0, np.nan], [1.0, 2.0])


def test_the_permutation_test_is_scipys():
    rng = np.random.default_rng(4)
    for shift in (0.0, 0.1, 0.3):
        a, b = rng.normal(shift, 1, 120), rng.normal(0, 1, 120)
        theirs = stats.permutation_test(
            (a, b), lambda x, y, axis: np.mean(x - y, axis=axis), permutation_type="samples", n_resamples=20_000,
            vectorized=True, rng=5,
        ).pvalue  # fmt: skip
        assert statistics.sign_flips((a - b)[None], 20_000)[0] == pytest.approx(theirs, abs=0.015)


def test_p_is_never_zero():
    """Signs that no draw repeats: the observed signs are one of the n + 1 draws."""
    assert statistics.sign_flips(np.ones((1, 100)), n=999).tolist() == [1 / 1000]


def test_exact_p_of_few_users():
    """Three differences of one sign: of the eight sign patterns two are as extreme."""
    assert statistics.sign_flips(np.array([[1.0, 2, 3]]), 20_000)[0] == pytest.approx(0.25, abs=0.01)
    assert statistics.sign_flips(np.zeros((1, 2)))[0] == 1


def test_p_is_uniform_where_nothing_differs():
    rng = np.random.default_rng(6)
    p = statistics.sign_flips(rng.normal(size=(400, 60)), 2000)
    assert stats.kstest(p, "uniform").pvalue > 0.01


def test_holm_by_hand():
    np.testing.assert_allclose(statistics.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(statistics.holm([0.6, 0.9]), [1, 1])
    p = np.random.default_rng(7).random(20) ** 3
    rejected, order = np.zeros(20, bool), np.argsort(p)
    for step, place in enumerate(order):  # the procedure as it is told
        if p[place] > 0.05 / (20 - step):
            break
        rejected[place] = True
    assert ((statistics.holm(p) <= 0.05) == rejected).all() and rejected.any()
