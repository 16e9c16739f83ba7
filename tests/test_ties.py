"""Events with one time: their order, baskets that no cut separates, and how many rows tie, against plain Python."""

from collections import Counter
from itertools import chain, groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import as_raw, plain_pipeline, random_events, write_movielens_csv

from bachlib.data import prepare
from bachlib.data.windows import Windows
from bachlib.experiment.settings import Experiment


def shopping(seed: int, n_users: int = 8, n: int = 110) -> list:
    """Baskets of one to forty items; some are larger than what is held out. Users shop at the same times."""
    rng = np.random.default_rng(seed)
    events = []
    for user in range(1, n_users + 1):
        sizes = rng.choice([1, 2, 3, 9, 10, 11, 19, 20, 21, 40], n)
        times = 10 * (np.repeat(np.arange(n), sizes)[:n] - 3)  # negative ones, too
        events += [(user, int(item) + 1, 5, int(t)) for item, t in zip(rng.permutation(n), times, strict=True)]
    return [events[at] for at in rng.permutation(len(events))]


def made(tmp_path, events, ties, seed=0, **setting):
    path = write_movielens_csv(tmp_path / "ratings.csv", events)
    return prepare("movielens-20m", path, tmp_path / f"{ties}-{seed}", ties=ties, seed=seed, quiet=True, **setting)


def plain_whole_baskets(events: list, min_items: int) -> dict[int, list[tuple[int, int, int]]]:
    """user → (time, size of the basket, how many of it stay) in the order of time."""
    expected = {}
    for user in sorted({e[0] for e in events}):
        first: dict[int, int] = {}
        for _, item, _, time in sorted((e for e in events if e[0] == user), key=lambda e: e[3]):
            first.setdefault(item, time)
        left, stay = [10, 10], []
        for time, size in sorted(Counter(first.values()).items(), reverse=True):
            while left and left[0] == 0:  # this part is full
                left.pop(0)
            kept = min(size, left[0]) if left else size
            if left:
                left[0] -= kept
            stay.insert(0, (time, size, kept))
        if sum(kept for *_, kept in stay) >= min_items:
            expected[user] = stay
    return expected


@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), min_items=st.integers(31, 80), repeats=st.booleans())
def test_no_basket_is_cut(tmp_path_factory, seed, min_items, repeats):
    folder = tmp_path_factory.mktemp("log")
    events = random_events(seed, n=1_500) if repeats else shopping(seed)
    events = [(u, i, 5, t) for u, i, _, t in events]
    when: dict[tuple[int, int], int] = {}
    for u, i, _, t in events:
        when[u, i] = min(t, when.get((u, i), t))
    expected = plain_whole_baskets(events, min_items)
    data = made(folder, events, "basket", seed, min_items=min_items)
    raw_item, raw_user = data.items["raw_id"].to_numpy(), data.users["raw_id"].tolist()
    assert raw_user == list(expected)
    for u, user in enumerate(raw_user):
        times = [[when[user, item] for item in raw_item[part]] for part in data.split(u)]
        together = list(chain(*times))
        assert together == sorted(together), "in the order of time"
        assert not set(times[0]) & set(times[1]) and not set(times[1]) & set(times[2]), "a basket is cut"
        assert [len(part) for part in times[1:]] == [10, 10] and not set(times[0]) & set(times[2])
        assert [(t, len(list(same))) for t, same in groupby(together)] == [(t, n) for t, _, n in expected[user]]
    dropped = {step["step"]: step["before"]["rows"] - step["rows"] for step in data.meta["steps"] if step["before"]}
    everybody = plain_whole_baskets(events, 0).values()
    assert dropped["baskets never cut"] == sum(size - kept for stay in everybody for _, size, kept in stay)
    tied = sum(n for stay in expected.values() for *_, n in stay if n > 1)
    assert data.meta["tied"] == {"events": tied, "share": round(tied / len(data.sequences), 4)}
    assert len(Windows(data)) == data.n_windows


def test_the_dates_of_a_global_split_cut_no_basket(tmp_path):
    """So nothing is dropped; a period's part that is not evaluated is not in the history before it either."""
    events = [(u, i, 5, 10**9 + 86_400 * (t // 10)) for u, i, _, t in shopping(3, n_users=30)]
    when = {(u, i): t for u, i, _, t in events}
    data = made(tmp_path, events, "basket", min_items=80, split="global-time", test_share=0.2)
    assert len(data.sequences) == len(events) and "baskets never cut" not in [s["step"] for s in data.meta["steps"]]
    raw_item, evaluated = data.items["raw_id"].to_numpy(), data.evaluated("test")
    assert len(evaluated)
    for u in evaluated:
        parts = [{when[u + 1, item] for item in raw_item[part]} for part in data.split(u)]
        assert not parts[0] & parts[1] and not parts[1] & parts[2] and not parts[0] & parts[2]


def test_shuffled_ties_are_the_log_in_another_order(tmp_path):
    """The same items at the same times; inside a time any order, drawn with the seed."""
    events = [(u, i + 1, 5, i // 12) for u in range(1, 31) for i in range(96)]
    log, one, other = (made(tmp_path, events, *how) for how in (("log",), ("shuffle", 1), ("shuffle", 2)))
    again = prepare("movielens-20m", tmp_path / "ratings.csv", tmp_path / "o", ties="shuffle", seed=1, threads=1)
    assert as_raw(log) == plain_pipeline(events)
    drawn = [np.array(list(as_raw(data).values())) for data in (one, again, other)]
    assert ((drawn[0] - 1) // 12 == np.arange(96) // 12).all()
    assert (drawn[0] == drawn[1]).all() and (drawn[0] != drawn[2]).mean() > 0.8
    assert abs((np.diff(drawn[0]) > 0).mean() - (7 + 88 / 2) / 95) < 0.03, "no order of ids is left"
    assert len({tuple(row) for row in drawn[0]}) == 30, "users share their baskets but not the order"
    assert log.meta["tied"] == one.meta["tied"] == {"events": 96 * 30, "share": 1.0}


def test_the_share_of_ties_is_said(tmp_path, capsys):
    """Three events at one time and two at another, of forty; user 2 begins when user 1 ends, which is no tie."""
    times = [0, 0, 0, 1, 1, *range(2, 37)]
    events = [(1, n + 1, 5, t) for n, t in enumerate(times)] + [(2, n + 1, 5, 36 + n) for n in range(40)]
    path = write_movielens_csv(tmp_path / "ratings.csv", events)
    data = prepare("movielens-20m", path, tmp_path / "o", min_items=40)
    assert data.meta["tied"] == {"events": 5, "share": 0.0625}
    assert "6.2% of the events tie: their user has another one at the same time (ties: log)" in capsys.readouterr().out


@pytest.mark.parametrize("ties", ["shuffle", "basket"])
def test_a_setting_of_an_experiment(ties):
    assert Experiment(ties=ties).prepare["ties"] == ties
