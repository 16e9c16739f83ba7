"""The log's own ids in requests and slates, and the genres and ids that an index keeps."""

import hashlib
import json

import numpy as np
import pandas as pd
import pytest
import torch
from serving import SMALL, made, perturbed

from bachlib import BachError
from bachlib.model.methods import METHODS, build
from bachlib.params import TrainParams
from bachlib.serve import Retriever
from bachlib.serve.lean import CodebookServer
from bachlib.train import Run
from bachlib.train.checkpoint import write_tensors


def named(world, strategy="exact", name="p-bach", ids=None, **settings):
    """A retriever whose items are called M000 … M599, or 10 times their number + 7."""
    raw = [f"M{i:03d}" for i in range(world.n_items)] if ids is None else ids
    return made(world, name, strategy, raw_ids=raw, genres=world.items["genres"], **settings)


def test_raw_ids_are_the_numbers_they_stand_for(world, histories):
    retriever, numbers = named(world), [histories[0][-5:].tolist(), [], histories[1].tolist()]
    raw = [[f"M{i:03d}" for i in row] for row in numbers]
    wanted = retriever.retrieve(numbers, 7, exclude=[[3], [4, 5], []])
    slate = retriever.retrieve(raw=raw, K=7, exclude=[["M003"], ["M004", "M005"], []])
    np.testing.assert_array_equal(slate.items, wanted.items)
    np.testing.assert_array_equal(slate.raw_ids, [[f"M{i:03d}" for i in row] for row in slate.items])
    one = retriever.retrieve(raw=raw[0], K=7, exclude=["M003"])
    np.testing.assert_array_equal(one.items[0], wanted.items[0])
    for same in (np.array(raw[0]), pd.Series(raw[0]), tuple(raw[0]), np.array([raw[0]]), [np.array(raw[0])]):
        np.testing.assert_array_equal(retriever.retrieve(raw=same, K=7, exclude={"M003"}).items[0], wanted.items[0])
    table = slate.table(0)
    assert table["raw_id"].tolist() == slate.raw_ids[0].tolist() and list(table)[:2] == ["item", "raw_id"]
    assert slate.take(np.array([[1], [0], [2]])).raw_ids[1, 0] == slate.raw_ids[1, 0]
    many = retriever.retrieve(raw=raw[:1] * 300, K=3)
    assert many.raw_ids.shape == (300, 3)
    assert made(world).retrieve(numbers, 3).raw_ids is None


def test_numbers_of_the_log_are_not_item_numbers(world, histories):
    """Ids that are numbers too, in another order: only `raw=` reads them as such, and (B, n) arrays hold no padding."""
    ids = np.random.default_rng(0).permutation(np.arange(-3, world.n_items - 3))
    retriever, numbers = named(world, ids=ids), histories[:3, -6:]
    wanted = retriever.retrieve(numbers, 9)
    for raw in (ids[numbers], ids[numbers].tolist(), torch.from_numpy(ids[numbers]), pd.DataFrame(ids[numbers]).values):
        slate = retriever.retrieve(raw=raw, K=9)
        np.testing.assert_array_equal(slate.items, wanted.items)
        np.testing.assert_array_equal(slate.raw_ids.astype(int), ids[slate.items])
    minus_one = int(np.flatnonzero(ids == -1)[0])
    np.testing.assert_array_equal(retriever.retrieve(raw=[[-1]], K=5).items, retriever.retrieve([[minus_one]], 5).items)
    with pytest.raises(BachError, match=r"raw of request 0: the log has no item 600 \(the nearest is 596\)"):
        retriever.retrieve(raw=[[600]], K=5)
    with pytest.raises(BachError, match="history of request 0: there is no item 600; items are 0 … 599"):
        retriever.retrieve([[600]], 5)


def test_unknown_raw_ids_are_named_with_the_nearest_one(world):
    retriever = named(world)
    for wrong, said in (
        (dict(raw=[["M001"], ["M01"]]), r"raw of request 1: the log has no item 'M01' \(the nearest is 'M.01'"),
        (dict(raw=["m123", "M124"]), r"raw: the log has no item 'm123' \(the nearest is 'M123'\)$"),
        (dict(raw=[[f"x{i}" for i in range(9)]]), r"'x0' .*, 'x4' \(the nearest is '\w+'\) and 4 more$"),
        (dict(raw=[[1, 2.5]]), "the log has no item 1 "),
        (dict(raw=[[np.int64(7)]]), "the log has no item 7 "),
        (dict(raw=[[None]]), "the log has no item None"),
        (dict(raw=["M001"], exclude=[3]), "exclude: the log has no item 3"),
        (dict(raw=["M001"], exclude=[["M1"], []]), "exclude has 2 lists for 1 requests"),
        (dict(raw="M001"), "raw should be a list of ids of the log, or one list per request; got 'M001'"),
        (dict(raw={"M001": 1}), "raw should be a list of ids of the log"),
        (dict(raw=[["M001"], "M002"]), "or one list per request; got 'M002' among lists"),
        (dict(raw=[[["M001"]]]), "raw of request 0 should be a list of ids of the log"),
        (dict(raw=[]), r"raw holds no request: .* for one without history give \[\[\]\]"),
        (dict(history=[]), r"history holds no request: .* for one without history give \[\[\]\]"),
        (dict(history=()), "history holds no request"),
        (dict(), "either a history of item numbers or raw="),
        (dict(history=[1], raw=["M001"]), "either a history of item numbers or raw="),
    ):
        with pytest.raises(BachError, match=said):
            retriever.retrieve(**wrong, K=5)
    ints = named(world, ids=range(7, 6007, 10))
    for raw, said in ((["17"], r"no item '17' \(the nearest is 17\)"), ([True], "no item True")):
        with pytest.raises(BachError, match=said):
            ints.retrieve(raw=raw, K=5)
    assert ints.retrieve(raw=[17.0], K=5).items.shape == (1, 5)
    with pytest.raises(BachError, match=r"raw: the ids of the log are not known here; give Retriever\(model, dataset="):
        made(world).retrieve(raw=[[1]], K=5)
    for wrong, said in (
        ([1, 2], "raw_ids should hold those of each of 600 items; got 2"),
        ([5] * 600, "two items .* 5"),
    ):
        with pytest.raises(BachError, match=said):
            made(world, raw_ids=wrong)


def test_a_run_and_a_data_set_know_ids_and_genres(world, histories):
    model, raw = perturbed(world, "p-bach"), world.items["raw_id"]
    wanted = Retriever(model, "exact", genres=world.items["genres"], raw_ids=raw)
    name = world.items["genres"][0][0]
    run = Run(world.folder, model, {}, dataset=world)
    for retriever in (Retriever(model, "exact", dataset=world), Retriever(run, "exact"), wanted):
        slate = retriever.retrieve(raw=[raw[histories[0]].tolist()], K=9, caps={name: 1})
        np.testing.assert_array_equal(slate.items, wanted.retrieve(histories[:1], 9, caps={name: 1}).items)
        assert slate.raw_ids[0].tolist() == raw[slate.items[0]].tolist()
    assert made(world).retrieve(histories[0], 5).table(0, world.items)["raw_id"].tolist() == [
        raw[item] for item in made(world).retrieve(histories[0], 5).items[0]
    ]

    class Other:
        n_items = 599

    with pytest.raises(BachError, match="the model has 600 items, the data set 599: give that of the training"):
        Retriever(model, "exact", dataset=Other())


@pytest.mark.parametrize(
    ("name", "strategy"), [("p-bach", "exact"), ("p-bach", "two-step"), ("p-bach-global", "codebook")]
)
def test_an_index_keeps_genres_and_ids(world, histories, tmp_path, name, strategy):
    """Five twins of the best item, all comedies: caps let one through before saving and after loading."""
    retriever = named(world, strategy, name)
    first = retriever.retrieve(histories[:1], 1).items[0]
    new = retriever.add(
        vectors=retriever.catalogue.vectors[first.repeat(5)],
        genres=[["Comedy"]] * 5,
        raw_ids=[f"new{i}" for i in "abcde"],
    )
    (bare,) = retriever.add(vectors=retriever.catalogue.vectors[first])  # without genres or an id
    caps, free = {"Comedy": 1}, retriever.retrieve(histories[:1], 8)
    assert np.isin(new, free.items).all() and bare in free.items and None in free.raw_ids[0]
    before = retriever.retrieve(histories[:1], 8, caps=caps)
    retriever.save(tmp_path / "index")
    with_others = Retriever.load(tmp_path / "index", retriever.model, genres=[["Drama"]] * world.n_items)
    for other in (Retriever.load(tmp_path / "index", retriever.model), with_others):
        slate = other.retrieve(histories[:1], 8, caps=caps)
        assert np.isin(slate.items, new).sum() == 1
        np.testing.assert_array_equal(slate.items, before.items)
        np.testing.assert_array_equal(slate.raw_ids, before.raw_ids)
        np.testing.assert_array_equal(
            other.retrieve(raw=[["newc"]], K=3).items, retriever.retrieve([[new[2]]], 3).items
        )
        (more,) = other.add(vectors=retriever.catalogue.vectors[first], genres=[["Comedy"]], raw_ids=["newf"])
        assert np.isin(other.retrieve(histories[:1], 9, caps=caps).items, [*new, more]).sum() == 1
        other.save(tmp_path / "again")
        other.reload()
        assert other.genres[more] == ["Comedy"] and other.retrieve(raw=["newf"], K=1).items.size
    assert with_others.genres[0] == ["Drama"]
    with pytest.raises(BachError, match="caps: unknown genre 'Western'"):
        retriever.retrieve(histories[:1], 5, caps={"Western": 1})
    if strategy == "codebook":
        slate = CodebookServer(tmp_path / "index").retrieve(free.pi, 8, exclude=histories[0])
        np.testing.assert_array_equal(slate.raw_ids, free.raw_ids)


def test_labels_of_new_items_are_checked(world):
    vectors, retriever = made(world).catalogue.vectors[:2], named(world)
    before = retriever.catalogue
    for wrong, said in (
        (dict(raw_ids=["a"]), "raw_ids should hold those of each of 2 new items; got 1"),
        (dict(genres=[["a"]]), "genres should hold those of each of 2 new items; got 1"),
        (dict(raw_ids=["a", "a"]), "two items have the id 'a'"),
        (dict(raw_ids=["a", "M000"]), "two items have the id 'M000'"),
    ):
        with pytest.raises(BachError, match=said):
            retriever.add(vectors=vectors, **wrong)
    assert retriever.catalogue is before
    for name in ("raw_ids", "genres"):
        with pytest.raises(BachError, match=f"{name} of new items need those of all others"):
            made(world).add(vectors=vectors, **{name: [["a"], ["b"]]})
    retriever.add(vectors=vectors, raw_ids=[1, "b"])
    with pytest.raises(BachError, match="raw_id of the items cannot be saved: they should all be of one kind"):
        retriever.save(world.folder.parent / "mixed")


@pytest.mark.parametrize(("name", "strategy"), [("p-bach", "two-step"), ("p-bach-global", "codebook")])
def test_an_index_of_an_earlier_version_loads(world, histories, tmp_path, name, strategy):
    """Format 1 had no labels and fewer settings; ids and genres are then given, or those of the run's data set."""
    retriever = named(world, strategy, name)
    wanted = retriever.retrieve(histories, 9)
    retriever.save(tmp_path)
    (generation,) = tmp_path.glob("gen-*")
    about = json.loads((generation / "meta.json").read_text())
    (generation / "labels.parquet").unlink()
    del about["files"]["labels.parquet"], about["settings"]["ask"], about["settings"]["budget"]
    text = json.dumps(about | {"format": 1})
    (generation / "meta.json").write_text(text)
    (tmp_path / "CURRENT").write_text(f"{generation.name} {hashlib.sha256(text.encode()).hexdigest()}\n")
    old = Retriever.load(tmp_path, retriever.model)
    slate = old.retrieve(histories, 9)
    np.testing.assert_array_equal(slate.items, wanted.items)
    assert slate.raw_ids is None and old.genres is None
    given = Retriever.load(tmp_path, Run(world.folder, retriever.model, {}, dataset=world))
    assert given.retrieve(
        raw=[world.items["raw_id"][:3].tolist()], K=3, caps={world.items["genres"][0][0]: 1}
    ).items.size
    given.reload()
    assert given.genres is not None
    text = text.replace('"format": 1', '"format": 5')
    (generation / "meta.json").write_text(text)
    (tmp_path / "CURRENT").write_text(f"{generation.name} {hashlib.sha256(text.encode()).hexdigest()}\n")
    with pytest.raises(BachError, match="has format 5, this version reads 1, 2, 3, 4; save it again"):
        Retriever.load(tmp_path, retriever.model)


# ------------------------------------------------------------------------------------ nothing but a folder to serve


def as_a_run(folder, model, dataset) -> Run:
    """What `fit` leaves of these weights."""
    run = Run.open(folder, model, dataset, TrainParams(), fresh=True)
    if any(True for _ in model.parameters()):
        write_tensors(folder / "best.safetensors", model.state_dict(), {})
    return run


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.encoder])
def test_a_run_and_an_index_serve_without_the_data(world, histories, tmp_path, name):
    """Weights have the sizes that the data set gave: the same scores and slates, ids and titles from the index."""
    model, histories = perturbed(world, name), histories[:4]
    as_a_run(tmp_path / "run", model, world)
    run = Run.load(tmp_path / "run")
    assert run.dataset is None and run.model.config == model.config and run.model.built_on == model.built_on
    assert torch.equal(run.model.score(torch.from_numpy(histories)), model.score(torch.from_numpy(histories)))
    retriever = Retriever(model, "exact", dataset=world)
    retriever.add(vectors=retriever.catalogue.vectors[:1], raw_ids=["late"], titles=["A late one"], genres=[["New"]])
    wanted = retriever.retrieve(histories, 9)
    for other in (Retriever.load(retriever.save(tmp_path / "index")), Retriever.load(tmp_path / "index", run)):
        raw = [world.raw(h[h >= 0]).tolist() for h in histories]
        slate = other.retrieve(raw=raw, K=9)
        np.testing.assert_array_equal(slate.items, wanted.items)
        np.testing.assert_array_equal(slate.scores, wanted.scores)
        for row in range(4):
            assert slate.table(row).equals(wanted.table(row))
            if 600 not in wanted.items[row]:
                assert slate.table(row).equals(wanted.table(row, world.items))
        other.reload()
        other.save(tmp_path / "again")
        assert other.retrieve([[600]], 1, keep_history=True, only=[600]).table()["title"].tolist() == ["A late one"]


@pytest.mark.parametrize(
    ("name", "params"),
    [("p-bach", {"pi": "table"}), ("v-bach", {"context": "both"}), ("p-bach", {"history": "frozen", "kappa": "shared"}),
     ("p-bach-hybrid", {"k_own": 2, "context": "encoder"}), ("p-bach", {"pi": "uniform"})],
)  # fmt: skip
def test_switches_of_a_model_are_rebuilt(world, histories, tmp_path, name, params):
    data = (
        world.with_context(np.random.default_rng(0).normal(size=(world.n_users, 3))) if "context" in params else world
    )
    model = perturbed(data, name, **params)
    extra = {"user": np.arange(30)} if params.get("pi") == "table" else {}
    extra |= {"context": data.context[:30]} if "context" in params else {}
    retriever = Retriever(model, "exact")
    again = Retriever.load(retriever.save(tmp_path))
    a, b = (one.retrieve(histories, 5, **extra) for one in (retriever, again))
    np.testing.assert_array_equal(a.scores, b.scores)


def test_what_cannot_be_served_from_a_folder_alone(world, tmp_path):
    as_a_run(tmp_path / "pop", build("mostpop", world), world)
    with pytest.raises(BachError, match="pop is mostpop, which counts its data set: pass that"):
        Run.load(tmp_path / "pop")
    assert Run.load(tmp_path / "pop", world).model.counts.sum() > 0
    own = build("p-bach", world, 4, **SMALL, gate=PiGate(16, 4))
    as_a_run(tmp_path / "own", own, world)
    with pytest.raises(BachError, match="was trained with your own gate: pass model="):
        Run.load(tmp_path / "own")
    folder = Retriever(own, "exact").save(tmp_path / "index")
    with pytest.raises(BachError, match=r"index holds no model .*: give its run or model"):
        Retriever.load(folder)
    assert Retriever.load(folder, own).strategy == "exact"
    folder = made(world).save(tmp_path / "other")
    (generation,) = folder.glob("gen-*")
    content = bytearray((generation / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (generation / "model.safetensors").write_bytes(content)
    for verify in (True, False):
        with pytest.raises(BachError, match=r"model\.safetensors is damaged"):
            Retriever.load(folder, verify=verify)


class PiGate(torch.nn.Module):
    def __init__(self, d: int, k: int):
        super().__init__()
        self.map = torch.nn.Linear(d, k)

    def forward(self, tokens, history):
        return self.map(tokens.mean(1))


def test_a_data_set_translates_ids(world):
    raw = world.items["raw_id"]
    assert world.number_of(raw[7]) == 7 and world.raw(7) == raw[7]
    assert world.number_of(raw[[3, 1]]).tolist() == [3, 1] and world.number_of([]).tolist() == []
    np.testing.assert_array_equal(world.raw([[1, 2], [3, 4]]), [[raw[1], raw[2]], [raw[3], raw[4]]])
    for wrong, said in (
        (lambda: world.number_of("i000000x"), r"the log has no item 'i000000x' \(the nearest is 'i\d+'\)"),
        (lambda: world.number_of([raw[0], 5]), r"the log has no item 5 \(the nearest is 'i\d+'\)$"),
        (lambda: world.raw([3, 600]), "item 600 does not exist: items are 0 … 599"),
        (lambda: world.raw(-1), "item -1 does not exist"),
        (lambda: world.raw("x"), "items are whole numbers from 0 to 599"),
    ):
        with pytest.raises(BachError, match=said):
            wrong()
