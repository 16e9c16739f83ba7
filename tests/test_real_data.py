"""The real logs, where `BACH_DATA_DIR` has them."""

import pytest
from logs import as_raw, plain_catalogue, plain_pipeline

from bachlib.data import prepare
from bachlib.data.raw import find_raw


def numbers_of(raw, delimiter, places):
    with raw.open() as stream:
        for line in stream:
            fields = line.decode().rstrip("\n").split(delimiter)
            yield tuple(int(fields[place]) for place in places)


def test_movielens_1m(real_data, tmp_path):
    archive = real_data / "ml-1m.zip"
    if not archive.exists():
        pytest.skip("ml-1m.zip is not in BACH_DATA_DIR")
    dataset = prepare("movielens-1m", archive, tmp_path / "o", quiet=True)
    assert (dataset.n_users, dataset.n_items, dataset.n_windows) == (2_380, 3_533, 253_468)
    assert dataset.items.set_index("raw_id").loc[1, "title"] == "Toy Story (1995)"
    (raw,) = find_raw(archive, "ratings.dat")
    events = list(numbers_of(raw, "::", (0, 1, 2, 3)))
    assert as_raw(dataset) == plain_pipeline(events)
    assert list(dataset.items["raw_id"]) == plain_catalogue(events)
    assert (dataset.items["n_users"] == 0).sum() == 39 and (dataset.items["title"] != "").all()
    kept = prepare("movielens-1m", archive, tmp_path / "kept", catalogue="kept", quiet=True)
    assert (kept.n_users, kept.n_items, kept.n_windows) == (2_380, 3_494, 253_468)
    assert as_raw(kept) == as_raw(dataset) and kept.items["n_users"].min() == 1


def test_taobao(real_data, tmp_path):
    logs = sorted(real_data.glob("UserBehavior*.csv"))
    if not logs:
        pytest.skip("no UserBehavior*.csv in BACH_DATA_DIR")
    if logs[0].stat().st_size > 100_000_000:
        pytest.skip("the whole log is checked by its first rows only; bach bench prepare measures the size")
    dataset = prepare("taobao", logs[0], tmp_path / "o", quiet=True)
    (raw,) = find_raw(logs[0], "*")
    events = [(u, i, 5.0, t) for u, i, t in numbers_of(raw, ",", (0, 1, 4))]
    assert as_raw(dataset) == plain_pipeline(events)
