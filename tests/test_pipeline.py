"""The pipeline against appendix A written once more in plain Python, on logs full of ties and repeats."""

import filecmp
import itertools
import json
from collections import Counter
from pathlib import Path

import duckdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import as_raw, plain_catalogue, plain_pipeline, random_events, write_movielens_csv, write_taobao

from bachlib import BachError
from bachlib.data import Dataset, prepare
from bachlib.experiment.settings import Experiment
from bachlib.experiment.stages import data_name, prepared


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    min_rating=st.sampled_from([1.0, 3.0, 4.0, 4.5]),
    min_items=st.integers(31, 70),
    max_items=st.sampled_from([60, 100, 50_000]),
    catalogue=st.sampled_from(["liked", "kept"]),
)
def test_same_as_plain_python(tmp_path_factory, seed, min_rating, min_items, max_items, catalogue):
    folder = tmp_path_factory.mktemp("log")
    events = random_events(seed)
    log = write_movielens_csv(folder / "ratings.csv", events)
    setting = {"min_rating": min_rating, "min_items": min_items, "max_items": max_items}
    expected = plain_pipeline(events, **setting)
    if not expected:
        with pytest.raises(BachError, match="no user has"):
            prepare("movielens-20m", log, folder / "out", quiet=True, catalogue=catalogue, **setting)
        return
    dataset = prepare("movielens-20m", log, folder / "out", quiet=True, catalogue=catalogue, **setting)
    assert as_raw(dataset) == expected
    assert list(dataset.users["raw_id"]) == sorted(expected)
    likers = Counter(i for sequence in expected.values() for i in sequence)
    items = plain_catalogue(events, min_rating, max_items) if catalogue == "liked" else sorted(likers)
    assert list(dataset.items["raw_id"]) == items
    assert list(dataset.items["n_users"]) == [likers[i] for i in items]
    assert dataset.items["n_users"].sum() == len(dataset.sequences) == dataset.meta["counts"]["events"]


def test_the_catalogue_is_everybodys(tmp_path):
    """Item 200 is liked only by a user who is dropped, item 300 only by one who is not drawn, item 400 by nobody."""
    events = [(u, i, 5, i) for u in (1, 2) for i in range(1, 41)] + [(3, 200, 5, 1), (2, 300, 5, 99), (1, 400, 1, 99)]
    log = write_movielens_csv(tmp_path / "ratings.csv", events)
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n200,Dropped,Noir\n1,First,Jazz\n")
    setting = {"min_items": 40, "max_users": 1, "seed": 1, "quiet": True}
    liked = prepare("movielens-20m", log, tmp_path / "liked", **setting)
    assert liked.users["raw_id"].tolist() == [1], "user 2 is not drawn with this seed"
    assert liked.items["raw_id"].tolist() == [*range(1, 41), 200, 300] and liked.n_items == 42
    assert liked.items["n_users"].tolist() == [1] * 40 + [0, 0]
    assert liked.titles[0] == "First" and liked.titles[40:] == ["Dropped", "300"]
    assert liked.genres.names == ["Jazz", "Noir"] and liked.genres.member[40].tolist() == [0, 1]
    assert liked.matrix("all").shape == (1, 42) and [s["items"] for s in liked.meta["steps"]] == [43] + [42] * 5
    kept = prepare("movielens-20m", log, tmp_path / "kept", catalogue="kept", **setting)
    assert kept.items["raw_id"].tolist() == list(range(1, 41)) and as_raw(kept) == as_raw(liked)
    assert [s["items"] for s in kept.meta["steps"]] == [43, 42, 42, 42, 41, 40]


def test_ties_by_item_sort_ids_within_a_second(tmp_path):
    events = [(1, i, 5, 1_000_000_000 + n // 10) for n, i in enumerate(np.random.default_rng(0).permutation(100) + 1)]
    log = write_movielens_csv(tmp_path / "ratings.csv", events)
    in_log_order = as_raw(prepare("movielens-20m", log, tmp_path / "a", quiet=True))[1]
    by_item = as_raw(prepare("movielens-20m", log, tmp_path / "b", ties="item", quiet=True))[1]
    assert in_log_order == [i for _, i, _, _ in events]
    assert by_item == [i for n in range(10) for i in sorted(e[1] for e in events[10 * n : 10 * n + 10])]


def test_negative_and_huge_times_sort(tmp_path):
    times = [2**41, -5, 0, -(2**41), 7]
    events = [(1, 1 + n, 5, t) for n, t in enumerate(times)] + [(1, 10 + n, 5, 2**42 + n) for n in range(40)]
    dataset = prepare(
        "movielens-20m", write_movielens_csv(tmp_path / "ratings.csv", events), tmp_path / "o", min_items=31
    )
    assert as_raw(dataset)[1][:5] == [4, 2, 3, 5, 1]


def test_same_input_same_bytes_whatever_the_threads_and_the_memory(tmp_path):
    log = write_taobao(tmp_path / "UserBehavior.csv", random_events(1, n_users=400, n_items=3_000, n=120_000))
    one = prepare("taobao", log, tmp_path / "one", threads=1, quiet=True)
    prepare("taobao", log, tmp_path / "two", threads=2, memory="200MB", quiet=True)
    names = sorted(p.name for p in one.folder.iterdir())
    assert names == ["items.parquet", "meta.json", "offsets.npy", "sequences.npy", "users.parquet"]
    assert filecmp.cmpfiles(tmp_path / "one", tmp_path / "two", names, shallow=False)[0] == names


def test_works_out_of_core(tmp_path):
    """A log several times larger than the memory limit; without a place to spill to it would not fit."""
    log = tmp_path / "UserBehavior.csv"
    duckdb.execute(f"""COPY (SELECT hash(j) % 20000 + 1 AS u, hash(j * 7) % 300000 AS i, i % 100 AS c, 'pv' AS b,
        1500000000 + hash(j * 13) % 1000000 AS t FROM range(3000000) r(j)) TO '{log}' (HEADER false)""")
    dataset = prepare("taobao", log, tmp_path / "o", memory="100MB", threads=1, max_items=200_000, quiet=True)
    assert dataset.n_users > 10_000 and dataset.meta["steps"][0]["rows"] == 3_000_000
    assert not (dataset.folder / "spill").exists()


def test_users_are_drawn_with_the_seed(tmp_path):
    events = [(u, i, 5, i) for u in range(1, 61) for i in range(1, 90)]
    log = write_movielens_csv(tmp_path / "ratings.csv", events)
    drawn = {
        name: list(prepare("movielens-20m", log, tmp_path / name, max_users=20, seed=seed, quiet=True).users["raw_id"])
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    }
    assert drawn["a"] == drawn["b"] == sorted(drawn["a"]) and len(drawn["a"]) == 20
    assert drawn["a"] != drawn["c"]


def test_a_second_call_reuses_and_a_changed_log_does_not(tmp_path, capsys):
    events = random_events(2)
    log = write_movielens_csv(tmp_path / "ratings.csv", events)
    first = prepare("movielens-20m", log, tmp_path / "o", min_items=40)
    made = (first.folder / "sequences.npy").stat().st_ino
    prepare("movielens-20m", log, tmp_path / "o", min_items=40)
    assert "already prepared" in capsys.readouterr().out
    assert (first.folder / "sequences.npy").stat().st_ino == made
    write_movielens_csv(log, events[:-1])
    prepare("movielens-20m", log, tmp_path / "o", min_items=40)
    assert "o: replaced, because the log has changed" in capsys.readouterr().out
    (tmp_path / "o" / "items.parquet").unlink()
    prepare("movielens-20m", log, tmp_path / "o", min_items=40)
    assert "o: replaced, because it is damaged or incomplete" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir() if "partial" in p.name] == []


def test_a_folder_with_other_options_is_not_replaced(tmp_path):
    log = write_movielens_csv(tmp_path / "ratings.csv", random_events(2))
    before = prepare("movielens-20m", log, tmp_path / "o", min_items=40, quiet=True)
    refused = "other options: {}. Runs may need it: choose another out"
    for other, said in (
        ({"min_items": 45}, "min_items is 40 there and 45 here"),
        ({"min_items": 40, "catalogue": "kept"}, "catalogue is 'liked' there and 'kept' here"),
        ({}, "min_items is 40 there and 80 here"),
    ):
        with pytest.raises(BachError, match=refused.format(said)):
            prepare("movielens-20m", log, tmp_path / "o", quiet=True, **other)
    with pytest.raises(BachError, match="source is 'movielens-20m' there and 'movielens-25m' here"):
        prepare("movielens-25m", log, tmp_path / "o", quiet=True, min_items=40)
    assert Dataset.load(tmp_path / "o").meta == before.meta


def test_a_folder_of_an_older_version_is_prepared_again(tmp_path, capsys):
    """Format 1 had no choice of the catalogue: it was that of the kept users."""
    log = write_movielens_csv(tmp_path / "ratings.csv", random_events(2))
    now = prepare("movielens-20m", log, tmp_path / "o", min_items=40, quiet=True)
    meta = json.loads((now.folder / "meta.json").read_text())
    meta["format"], _, _ = 1, meta["params"].pop("catalogue"), meta.pop("checksum")
    for catalogue in ("liked", "kept"):
        (now.folder / "meta.json").write_text(json.dumps(meta))
        with pytest.raises(BachError, match="has format 1, this version reads 2; prepare it again, with the source"):
            Dataset.load(now.folder)
        with pytest.raises(BachError, match="min_items is 40 there and 50 here"):
            prepare("movielens-20m", log, now.folder, min_items=50)
        again = prepare("movielens-20m", log, now.folder, min_items=40, catalogue=catalogue)
        assert "o: prepared again, because another version wrote it (format 1, now 2)" in capsys.readouterr().out
        assert again.meta["params"]["catalogue"] == catalogue and Dataset.load(now.folder).n_items == again.n_items


def test_without_out_every_set_of_options_has_its_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path / "outputs"))
    log = write_movielens_csv(tmp_path / "ratings.csv", random_events(2))
    calls = [{"min_items": 40}, {"min_items": 45}, {"min_items": 40, "catalogue": "kept"}, {"min_items": 40}]
    made = [prepare("movielens-20m", log, quiet=True, **options) for options in calls]
    assert made[0].folder == made[3].folder and len({dataset.folder for dataset in made}) == 3
    assert {dataset.folder.parent for dataset in made} == {tmp_path / "outputs" / "data"}
    for dataset, options in zip(made, calls, strict=True):
        p = Experiment(source="movielens-20m", path=str(log), **options)
        assert data_name(p) == dataset.folder.name and prepared(p) == dataset, "a notebook finds it"


def test_every_step_is_accounted_for(tmp_path):
    events = random_events(5)
    log = write_movielens_csv(tmp_path / "ratings.csv", events)
    dataset = prepare("movielens-20m", log, tmp_path / "o", min_items=40, max_items=100, quiet=True)
    steps = json.loads((dataset.folder / "meta.json").read_text())["steps"]
    liked = [e for e in events if e[2] >= 4]
    pairs = {(u, i) for u, i, _, _ in liked}
    assert [s["rows"] for s in steps[:3]] == [len(events), len(liked), len(pairs)]
    assert [s["users"] for s in steps[:2]] == [len({e[0] for e in events}), len({e[0] for e in liked})]
    liked_items = len({e[1] for e in liked})
    assert [s["items"] for s in steps] == [len({e[1] for e in events}), liked_items, liked_items, 100, 100, 100]
    for before, after in itertools.pairwise(steps):
        assert after["before"] == {key: before[key] for key in ("rows", "users", "items")}
    assert steps[-1]["rows"] == len(dataset.sequences) and steps[-1]["users"] == dataset.n_users


def test_the_folder_is_enough(tmp_path):
    """A prepared folder can be moved and opened again."""
    log = write_movielens_csv(tmp_path / "ratings.csv", random_events(3))
    before = as_raw(prepare("movielens-20m", log, tmp_path / "o", min_items=40, quiet=True))
    moved = Path(tmp_path / "o").rename(tmp_path / "elsewhere")
    assert as_raw(Dataset.load(moved)) == before
    text = (moved / "meta.json").read_text()
    assert str(tmp_path) not in text, "meta.json holds a path of this machine"
