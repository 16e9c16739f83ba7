"""Windows, split and sampler against slicing by hand."""

import json

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bachlib import BachError
from bachlib.data import Dataset, Windows
from bachlib.data.dataset import FORMAT, PAD, content_hash
from bachlib.data.windows import windows_per_user


def made(tmp_path, lengths, n_items=500) -> Dataset:
    """A data set with sequences of these lengths, without a log behind it."""
    rng = np.random.default_rng(len(lengths))
    flat = np.concatenate([rng.choice(n_items, n, replace=False) for n in lengths]).astype(np.int32)
    np.save(tmp_path / "sequences.npy", flat)
    np.save(tmp_path / "offsets.npy", np.concatenate([[0], np.cumsum(lengths)]))
    pd.DataFrame({"n_items": lengths}).to_parquet(tmp_path / "users.parquet")
    pd.DataFrame({"item": np.arange(n_items)}).to_parquet(tmp_path / "items.parquet")
    counts = {"items": n_items, "windows": int(windows_per_user(np.array(lengths)).sum())}
    meta = {"format": FORMAT, "counts": counts, "content_hash": content_hash(tmp_path)}
    (tmp_path / "meta.json").write_text(json.dumps(meta))
    return Dataset.load(tmp_path)


def windows_by_hand(sequence, n_hist=50, n_next=10):
    train = list(sequence[:-20])
    if len(train) >= n_hist + n_next:
        return [
            (train[s : s + n_hist], train[s + n_hist : s + n_hist + n_next])
            for s in range(len(train) - n_hist - n_next + 1)
        ]
    history = train[:-n_next]
    return [([PAD] * (n_hist - len(history)) + history, train[-n_next:])]


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(31, 140), min_size=1, max_size=8))
def test_windows(tmp_path_factory, lengths):
    dataset = made(tmp_path_factory.mktemp("d"), lengths)
    windows = Windows(dataset)
    expected = [(u, h, n) for u in range(len(lengths)) for h, n in windows_by_hand(dataset.sequence(u))]
    assert len(windows) == len(expected) == dataset.n_windows
    user, history, following = windows.window(np.arange(len(expected)))
    assert user.tolist() == [u for u, _, _ in expected]
    assert history.tolist() == [h for _, h, _ in expected]
    assert following.tolist() == [n for _, _, n in expected]


def test_the_papers_count():
    lengths = np.arange(80, 300)
    assert (windows_per_user(lengths) == lengths - 79).all()
    assert windows_per_user(np.array([30, 31, 79, 80, 81])).tolist() == [0, 1, 1, 1, 2]


def test_split_history_and_targets(tmp_path):
    dataset = made(tmp_path, [80, 35, 200])
    for u in range(3):
        sequence = dataset.sequence(u)
        train, valid, test = dataset.split(u)
        assert np.concatenate([train, valid, test]).tolist() == sequence.tolist()
        assert len(valid) == len(test) == 10
        for split, held_out, target in (("valid", 20, valid), ("test", 10, test)):
            history = dataset.history([u], split)[0]
            seen = sequence[:-held_out][-50:]
            assert history[-len(seen) :].tolist() == seen.tolist()
            assert (history[: -len(seen)] == PAD).all() and len(history) == 50
            assert dataset.targets([u], split)[0].tolist() == target.tolist()
    with pytest.raises(BachError, match="should be 'valid' or 'test'"):
        dataset.history([0], "train")
    with pytest.raises(BachError, match="user 3 does not exist: users are 0 … 2"):
        dataset.sequence(3)


def test_matrix(tmp_path):
    dataset = made(tmp_path, [80, 35, 200])
    for on, held_out in (("train", 20), ("all", 0)):
        dense = dataset.matrix(on).toarray()
        for u in range(3):
            sequence = dataset.sequence(u)
            assert np.flatnonzero(dense[u]).tolist() == sorted(sequence[: len(sequence) - held_out])
        assert set(np.unique(dense)) == {0.0, 1.0}


def test_an_epoch_visits_every_window_once(tmp_path):
    windows = Windows(made(tmp_path, [100, 120, 90]), batch_size=73 // 2)
    assert windows.steps_per_epoch == len(windows) // 36 and len(windows) == 21 + 41 + 11
    full = Windows(windows.dataset, batch_size=len(windows))
    (batch,) = list(full)
    user, history, _ = full.window(np.arange(len(full)))
    assert sorted(map(tuple, batch.history)) == sorted(map(tuple, history))
    assert np.bincount(batch.user).tolist() == np.bincount(user).tolist()


def test_the_target_is_one_of_the_next_ten_drawn_anew(tmp_path):
    windows = Windows(made(tmp_path, [1000] * 5, n_items=2000), batch_size=512)
    lookup = {tuple(h): n.tolist() for h, n in zip(*windows.window(np.arange(len(windows)))[1:], strict=True)}
    epochs = [{tuple(h): p for b in windows for h, p in zip(b.history, b.positive, strict=True)} for _ in range(2)]
    places = np.array([lookup[h].index(p) for epoch in epochs for h, p in epoch.items()])
    shares = np.bincount(places, minlength=10) / len(places)
    assert np.abs(shares - 0.1).max() < 0.015, "the ten places are not drawn alike"
    both = epochs[0].keys() & epochs[1].keys()
    changed = np.mean([epochs[0][h] != epochs[1][h] for h in both])
    assert 0.85 < changed < 0.95


@pytest.mark.parametrize("at", [0, 1, 5, 6, 7, 13])
def test_the_position_can_be_saved_and_restored(tmp_path, at):
    dataset = made(tmp_path, [200, 150, 100])

    def stream(sampler):
        while True:
            yield from sampler

    def same(a, b):
        return all((x == y).all() for x, y in zip(a, b, strict=True))

    straight = stream(Windows(dataset, batch_size=32, seed=4))
    expected = [next(straight) for _ in range(at + 10)]
    first = Windows(dataset, batch_size=32, seed=4)
    batches = stream(first)
    for _ in range(at):
        next(batches)
    state = json.loads(json.dumps(first.state_dict()))
    second = Windows(dataset, batch_size=32, seed=4)
    second.load_state_dict(state)
    going_on = stream(second)
    assert all(same(next(going_on), expected[at + n]) for n in range(10))


def test_after_the_last_batch_the_next_epoch_begins(tmp_path):
    dataset = made(tmp_path, [200, 150])
    first, second = Windows(dataset, batch_size=50), Windows(dataset, batch_size=50)
    assert len(list(first)) == first.steps_per_epoch == 3
    second.load_state_dict(first.state_dict())
    assert first.state_dict()["epoch"] == 1
    assert (next(iter(second)).history == next(iter(first)).history).all()


def test_wrong_samplers(tmp_path):
    dataset = made(tmp_path, [200])
    for wrong in ({"batch_size": 0}, {"n_hist": -1}):
        with pytest.raises(BachError, match="should be at least 1; got"):
            Windows(dataset, **wrong)
    sampler = Windows(dataset)
    with pytest.raises(BachError, match="epoch 0, step 99 does not exist: an epoch has 1 steps"):
        sampler.load_state_dict({**sampler.state_dict(), "step": 99})
    with pytest.raises(BachError, match="user -1 does not exist"):
        dataset.targets([-1], "test")


def test_a_position_of_another_sampler_is_refused(tmp_path):
    dataset = made(tmp_path, [200])
    with pytest.raises(BachError, match="batch_size is 16 here and 32 there"):
        Windows(dataset, batch_size=16).load_state_dict(Windows(dataset, batch_size=32).state_dict())


def test_seeds_differ(tmp_path):
    dataset = made(tmp_path, [200, 150])
    a, b, c = (next(iter(Windows(dataset, batch_size=64, seed=seed))).history for seed in (0, 0, 1))
    assert (a == b).all() and (a != c).any()


def test_sequences_are_memory_mapped(world):
    assert isinstance(world.sequences, np.memmap)
    assert not world.sequences.flags.writeable


def test_real_data_has_no_truth(tmp_path):
    with pytest.raises(BachError, match="only the source 'planted' has one"):
        _ = made(tmp_path, [100]).truth
