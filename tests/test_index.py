"""An index lives: items come and go, it is saved, replaced and loaded, and many threads read it."""

import json
import os
import subprocess
import sys
import threading
import traceback
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
import torch
from serving import SMALL, made, perturbed, ranked, unit

from bachlib import BachError
from bachlib.model.methods import build
from bachlib.model.svd import fold_in, pure_svd
from bachlib.serve import Retriever, codebook, exact, twostep
from bachlib.serve.density import brute_force
from bachlib.serve.kernels import VNNI
from bachlib.serve.lean import CodebookServer
from bachlib.serve.rows import appended

# ------------------------------------------------------------------------------------------ items come and go


@pytest.mark.parametrize(
    ("name", "strategy"), [("p-bach", "exact"), ("p-bach", "two-step"), ("p-bach-global", "codebook")]
)
def test_items_come_and_go(world, histories, name, strategy):
    retriever = made(world, name, strategy, lists="exact")
    before = retriever.retrieve(histories, 10)
    best = before.items[0, 0]
    retriever.remove([best])
    after = retriever.retrieve(histories, 10)
    assert best not in after.items and after.certified.all()
    np.testing.assert_array_equal(after.items[0, :9], before.items[0, 1:])
    with_it = np.concatenate([histories[1][histories[1] >= 0][1:], [best]])
    retriever.retrieve(with_it, 5)  # a history may still hold it
    twin = retriever.catalogue.vectors[best]
    (new,) = retriever.add(vectors=twin[None])
    assert new == world.n_items
    again = retriever.retrieve(histories, 10)
    np.testing.assert_array_equal(again.items[0], np.where(before.items[0] == best, new, before.items[0]))
    retriever.retrieve([[new]], 5)
    with pytest.raises(BachError, match=f"there is no item {new + 1}"):
        retriever.retrieve([[new + 1]], 5)
    with pytest.raises(BachError, match="nothing would be left"):
        retriever.remove(np.arange(new + 1))
    with pytest.raises(BachError, match="16 dimensions; got 3"):
        retriever.add(vectors=np.eye(3)[:1])
    with pytest.raises(BachError, match="either rows"):
        retriever.add()
    with pytest.raises(BachError, match=r"rows should be \(n, 16\), as the item table's are; got \(2, 64\)"):
        retriever.add(np.ones((2, 64)))
    with pytest.raises(BachError, match=r"rows should be numbers, \(n, d\)"):
        retriever.add("x")
    with pytest.raises(BachError, match="divide each by its length"):
        retriever.add(vectors=np.ones((1, 16)))


LIVE = [("exact", "hnsw", None), ("two-step", "hnsw", None), ("two-step", "ivf", None), ("codebook", "hnsw", None)]


@pytest.mark.parametrize("name", ["p-bach-global", "v-bach-global"])
@pytest.mark.parametrize(("strategy", "index", "budget"), [*LIVE, ("codebook", "hnsw", 60)])
def test_any_coming_and_going_is_as_if_built_from_these_items(
    world, histories, tmp_path, monkeypatch, name, strategy, index, budget
):
    """Brute force over the items served now, to the bit: after each of many changes, some of them beyond a tenth."""
    monkeypatch.setattr(twostep, "SMALL", 0)  # a graph also here
    monkeypatch.setattr(exact, "MANY", 1)  # and coarse items, for what is behind the first block
    monkeypatch.setattr(exact, "WIDTH", 256)
    settings = {"index": index, "budget": budget, "lists": "exact"}
    retriever = made(world, name, strategy, k=8, **settings)
    assert (retriever.catalogue.coarse is None) == (strategy == "codebook" or not VNNI)
    rng, served, n, proved = np.random.default_rng(3), set(range(600)), 600, 0
    for step in range(30):
        best = retriever.retrieve(histories, 12)
        if rng.random() < 0.5:
            away = {
                int(i) for i in best.items[rng.integers(len(histories)), : rng.integers(1, 6)]
            }  # what is missed most
            away |= set(rng.choice(sorted(served), rng.choice([1, 9])).tolist())
            retriever.remove(sorted(away))
            served -= away
        else:
            near = retriever.catalogue.vectors[best.items[:, 0]][
                : rng.choice([1, 8])
            ]  # twins enter every slate, and tie
            far = unit(rng.normal(size=(3, near.shape[1])))
            added = retriever.add(vectors=np.concatenate([near, unit(near + 0.01), far]))
            np.testing.assert_array_equal(added, np.arange(n, n + len(added)))
            served |= set(added.tolist())
            n += len(added)
        if step % 10 == 4:
            retriever = Retriever.load(retriever.save(tmp_path / str(step)), retriever.model)
            if strategy == "codebook":  # without the model, too
                slate = retriever.retrieve(histories, 12, keep_history=True)
                np.testing.assert_array_equal(
                    CodebookServer(retriever.folder).retrieve(slate.pi, 12).items, slate.items
                )
        now = retriever.catalogue
        np.testing.assert_array_equal(now.served, sorted(served))
        items, query = np.ascontiguousarray(now.vectors[now.served]), retriever.users.query(now, list(histories))[0]
        left_out = now.compact().left_out(list(histories), 12)
        wanted, slate = brute_force(query, items, 12, left_out), retriever.retrieve(histories, 12)
        assert slate.certified.all() or budget
        proved += slate.certified.sum()
        for u in np.flatnonzero(slate.certified):
            np.testing.assert_array_equal(slate.items[u], now.served[wanted.found[u]])
            np.testing.assert_array_equal(slate.scores[u], wanted.scores[u])
        assert set(slate.items.ravel().tolist()) <= served
    assert proved > 30 * len(histories) / 2 and len(served) != 600 and retriever.settings["budget"] == budget


@pytest.mark.parametrize(("strategy", "index", "budget"), LIVE)
def test_a_tenth_may_change_before_anything_is_built_again(world, monkeypatch, strategy, index, budget):
    monkeypatch.setattr(twostep, "SMALL", 0)
    retriever, built = made(world, "p-bach-global", strategy, index=index), []
    build_it = retriever.built
    retriever.built = lambda *given: built.append(1) or build_it(*given)
    for item in range(60):
        retriever.remove([item])
    twins = retriever.catalogue.vectors[60:100]
    assert not built and len(retriever.catalogue.gone) == 60 and len(retriever.catalogue.items) == 600
    retriever.remove([60, 61])
    assert built == [1] and not len(retriever.catalogue.gone) and len(retriever.catalogue.items) == 538
    retriever.remove([1, 2])  # not served any more
    assert built == [1] and not len(retriever.catalogue.gone)
    for twin in twins:
        retriever.add(vectors=twin[None])
    assert built == [1]
    assert len(retriever.catalogue.served) == 578 and retriever.retrieve([[70]], 30).items.max() >= 600


def test_lists_without_entries_are_computed_again(world, histories):
    """A short list of one interest may be emptied by a few removals: at most a tenth of it is missing."""
    retriever = made(world, "p-bach-global", "codebook", k=6, budget=20)
    before = retriever.catalogue.codebook.lists
    retriever.remove(before[2, :2])
    assert retriever.catalogue.codebook.lists is before
    retriever.remove(before[2, 2:3])
    now = retriever.catalogue
    assert not np.isin(now.numbers[now.codebook.lists], before[2, :3]).any() and now.codebook.lists.shape == (6, 20)
    fresh = codebook.compute_lists(*retriever.users.prototypes(), now.items, retriever.rule, 20)
    np.testing.assert_array_equal(now.codebook.lists, fresh.lists)


def test_entered_lists_are_computed_lists(world):
    """Lists that new items entered are those of a new codebook, with all their densities."""
    for budget in (None, 40):
        retriever = made(world, "p-bach-global", "codebook", k=6, budget=budget)
        retriever.add(vectors=retriever.catalogue.vectors[::20])
        now = retriever.catalogue.codebook
        of = (*retriever.users.prototypes(), retriever.catalogue.items, retriever.rule)
        fresh = codebook.compute(*of) if budget is None else codebook.compute_lists(*of, budget)
        np.testing.assert_array_equal(now.lists, fresh.lists)
        part = "density" if budget is None else "entries"
        np.testing.assert_allclose(getattr(now, part), getattr(fresh, part), rtol=1e-6)


def test_rows_that_grow_never_change_under_their_readers():
    rng = np.random.default_rng(0)
    first = rng.normal(size=(20, 3)).astype(np.float32)
    one = appended(first, first[:1])
    two = appended(one, first[1:2])
    assert np.shares_memory(one, two) and two.flags.c_contiguous, "there was room"
    other = appended(one, first[2:3])  # the room behind `one` is taken
    assert not np.shares_memory(one, other)
    for rows, last in ((one, 0), (two, 1), (other, 2)):
        np.testing.assert_array_equal(rows[:20], first)
        np.testing.assert_array_equal(rows[-1], first[last])
    three = appended(two, np.ones((50, 3), np.float32))
    assert not np.shares_memory(two, three) and three.shape == (72, 3) and not np.shares_memory(first, one)
    assert not np.shares_memory(appended(two[1:], first[:1]), two), "not a whole array"


def test_folded_rows_are_those_of_the_table(world):
    """An item folded in from who liked it gets the row it has: V = Xᵀ U Σ⁻¹; so its vector is its own."""
    svd, matrix = pure_svd(world, 16), world.matrix("train")
    items = [5, 77, 301]
    likers = [matrix[:, i].nonzero()[0] for i in items]
    model = perturbed(world, "p-bach")
    rows = fold_in(world, svd, likers)
    np.testing.assert_allclose(rows, model.item_tower.table[items], atol=1e-4)
    retriever = Retriever(model, "exact")
    numbers = retriever.add(rows)
    np.testing.assert_allclose(retriever.catalogue.vectors[numbers], retriever.catalogue.vectors[items], atol=1e-4)
    with pytest.raises(BachError, match="nobody has liked"):
        fold_in(world, svd, [[]])


def test_frozen_rows_come_along(world, histories):
    retriever = Retriever(perturbed(world, "p-bach", history="frozen"), "exact")
    np.testing.assert_array_equal(retriever.retrieve(histories, 5).items[0], _by_score(retriever, histories)[:5])
    numbers = retriever.add(retriever.model.item_tower.table[:2])
    assert len(retriever.retrieve([numbers], 5).items[0]) == 5
    with pytest.raises(BachError, match="give rows, not vectors"):
        retriever.add(vectors=retriever.catalogue.vectors[:1])


def _by_score(retriever, histories):
    return ranked(retriever.model.score(histories[:1])[0].numpy(), 50, histories[0][histories[0] >= 0])


# -------------------------------------------------------------------------------------------------------- keeping


@pytest.mark.parametrize(
    ("name", "strategy"), [("v-bach", "exact"), ("v-bach", "two-step"), ("v-bach-global", "codebook")]
)
def test_save_and_load(world, histories, tmp_path, name, strategy):
    retriever = made(world, name, strategy)
    retriever.remove([3, 5])
    retriever.save(tmp_path / "index")
    loaded = Retriever.load(tmp_path / "index", retriever.model)
    assert loaded.strategy == strategy and loaded.settings == retriever.settings
    a, b = retriever.retrieve(histories, 20), loaded.retrieve(histories, 20)
    for field in ("items", "scores", "head_share", "certified", "exact_if_lists_are"):
        np.testing.assert_array_equal(getattr(a, field), getattr(b, field))


def test_another_model_is_refused(world, tmp_path):
    made(world).save(tmp_path)
    other = perturbed(world, "p-bach")
    with torch.no_grad():
        next(other.gate.parameters()).add_(1e-6)
    with pytest.raises(BachError, match=r"index of another model \(hash \w{12} there, \w{12} here\)"):
        Retriever.load(tmp_path, other)
    with pytest.raises(BachError, match="index of another model"):
        Retriever.load(tmp_path, build("v-bach", world, 4, **SMALL))


@pytest.mark.parametrize("strategy", ["exact", "two-step", "codebook"])
def test_damaged_files_are_refused(world, tmp_path, strategy):
    retriever = made(world, "p-bach-global", strategy)
    for damage in ("cut", "flipped", "missing", "meta"):
        folder = retriever.save(tmp_path / damage)
        (generation,) = folder.glob("gen-*")
        largest = max(generation.glob("*.*"), key=lambda path: path.stat().st_size)
        content = bytearray(largest.read_bytes())
        if damage == "cut":
            largest.write_bytes(content[: len(content) // 2])
        elif damage == "flipped":
            content[-1] ^= 1
            largest.write_bytes(content)
        elif damage == "missing":
            largest.unlink()
        else:
            (generation / "meta.json").write_text("{")
        with pytest.raises(BachError, match="damaged"):
            Retriever.load(folder, retriever.model)
    with pytest.raises(BachError, match="is not an index"):
        Retriever.load(tmp_path / "nowhere", retriever.model)


def test_the_first_change_after_loading_copies_nothing(world, tmp_path):
    """The saved arrays have room behind their rows: the new row stands there, and only this process sees it."""
    retriever = made(world, "p-bach-global", "codebook")
    loaded, other = (Retriever.load(retriever.save(tmp_path), retriever.model) for _ in range(2))
    before = loaded.catalogue
    loaded.add(vectors=before.vectors[:1])
    now = loaded.catalogue
    assert np.shares_memory(now.vectors, before.vectors)
    assert np.shares_memory(now.codebook.density, before.codebook.density)
    assert (now.vectors[-1] == now.vectors[0]).all() and len(other.catalogue.vectors) == len(before.vectors)


def test_an_index_of_changed_weights_is_not_saved(world, tmp_path):
    retriever = made(world)
    with torch.no_grad():
        next(retriever.model.encoder.parameters()).add_(1e-3)
    with pytest.raises(BachError, match="the model has changed since this index was built"):
        retriever.save(tmp_path)
    other = made(world)
    other.save(tmp_path)
    other.model.config = other.model.config | {"method": "v-bach"}
    with pytest.raises(BachError, match="index of another model"):
        Retriever.load(tmp_path, other.model)


def test_what_is_said_of_an_index_cannot_be_changed(world, tmp_path):
    folder = made(world, "p-bach-global", "codebook").save(tmp_path / "index")
    (generation,) = folder.glob("gen-*")
    text = (generation / "meta.json").read_text()
    (generation / "meta.json").write_text(text.replace("power-spherical", "von-mises-fisher"))
    with pytest.raises(BachError, match=r"meta\.json is damaged: its checksum is another"):
        CodebookServer(folder)
    for content in (b"\xff\xfe", b"gen-000001", b"", b"gen-000009 abc"):
        (folder / "CURRENT").write_bytes(content)
        with pytest.raises(BachError, match="is damaged"):
            CodebookServer(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(BachError, match="is a file; an index is a folder"):
        made(world).save(tmp_path / "file")
    (folder / "gen-foo").mkdir()
    made(world).save(folder)


def test_loading_while_another_saves(world, tmp_path):
    """Generations are swept away while somebody reads: every load finds one, whole."""
    writer = made(world, "p-bach-global", "codebook")
    writer.save(tmp_path)
    stop, failed = threading.Event(), []

    def load() -> None:
        while not stop.is_set():
            try:
                CodebookServer(tmp_path)
            except Exception as error:
                told = "".join(traceback.format_exception(error))
                failed.append(f"{told}\nCURRENT is {(tmp_path / 'CURRENT').read_text()}in {os.listdir(tmp_path)}")

    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(load)
        try:
            for _ in range(40):
                writer.save(tmp_path)
        finally:
            stop.set()
    assert not failed, f"{len(failed)} loads failed; the first: {failed[0]}"


def test_a_reader_goes_on_while_the_index_is_replaced(world, histories, tmp_path):
    """Another generation takes the place of the first; who has the old one open keeps it until `reload`."""
    writer = made(world, "p-bach-global", "codebook")
    writer.save(tmp_path)
    reader = Retriever.load(tmp_path, writer.model)
    before = reader.retrieve(histories, 10)
    gone = before.items[0, 0]
    for _ in range(3):  # old generations are swept away
        writer.remove([gone])
        writer.save(tmp_path)
    assert len(list(tmp_path.glob("gen-*"))) == 2
    np.testing.assert_array_equal(reader.retrieve(histories, 10).items, before.items)
    reader.reload()
    assert gone not in reader.retrieve(histories, 10).items
    with pytest.raises(BachError, match="nothing to reload"):
        made(world).reload()


def test_a_saved_codebook_serves_without_torch(world, histories, tmp_path):
    retriever = made(world, "p-bach-global", "codebook", k=6)
    retriever.save(tmp_path / "index")
    slate = retriever.retrieve(histories[:3], 10, keep_history=True)
    np.save(tmp_path / "pi.npy", slate.pi)
    code = f"""
import sys, json, numpy as np
sys.modules["torch"] = None  # any import of it fails
from bachlib.serve.lean import CodebookServer
server = CodebookServer({str(tmp_path / "index")!r})
slate = server.retrieve(np.load({str(tmp_path / "pi.npy")!r}), K=10)
mapped = [array.base is not None for array in server.catalogue.codebook]
print(json.dumps([slate.items.tolist(), slate.scores.tolist(), slate.certified.all().item(), all(mapped)]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    items, scores, certified, mapped = json.loads(done.stdout)
    np.testing.assert_array_equal(items, slate.items)
    np.testing.assert_array_equal(scores, slate.scores)
    assert certified and mapped
    made(world).save(tmp_path / "exact")
    with pytest.raises(BachError, match="needs the heads of each user"):
        CodebookServer(tmp_path / "exact")
    server = CodebookServer(tmp_path / "index", verify=False)
    with pytest.raises(BachError, match="pi should sum to 1"):
        server.retrieve(np.ones(6))
    assert server.retrieve(slate.pi[0], 5, exclude=slate.items[0, :2]).items[0, 0] == slate.items[0, 2]
    for wrong in (0, -5, 2.5, "3", True):
        with pytest.raises(BachError, match="K should be a whole number ≥ 1"):
            server.retrieve(slate.pi[0], wrong)


# -------------------------------------------------------------------------------------------------------- threads


THREADS = """
import threading, threadpoolctl
from bachlib.serve.lean import one_core

def threads():
    pools = threadpoolctl.threadpool_info()
    return next(p["num_threads"] for p in pools if p["user_api"] == "blas")

inside, leave, left, end, seen = threading.Barrier(2), *(threading.Event() for _ in range(3)), []

def first():  # comes first, goes first, and lives on
    with one_core():
        inside.wait()
        seen.append(threads())
        leave.wait()
    left.set()
    end.wait()

def later():
    with one_core():
        seen.append(threads())

before = threads()
worker = threading.Thread(target=first)
worker.start()
try:
    with one_core():
        inside.wait()
        leave.set()
        left.wait()
        seen.append(threads())
        raise ValueError("on the way")
except ValueError:
    pass
seen.append(threads())
another = threading.Thread(target=later)
another.start()
another.join()
seen.append(threads())
end.set()
print(before, *seen)
"""


def test_numpy_has_its_threads_back():
    """Also if the first to come is not the last to go, from any thread, and after an error."""
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout.split() == ["2", "1", "1", "2", "1", "2"]


def test_100_000_requests_from_several_threads(world, histories):
    """The same answers as one thread gives, to the bit, and no more memory in the end than after a warm-up."""
    retriever = made(world, "p-bach-global", "codebook", k=8)
    by_pi = retriever.retrieve(histories, 5).pi
    wanted = {("pi", u): retriever.retrieve([[]], 5, pi=by_pi[u]) for u in range(30)}
    wanted |= {("history", u): retriever.retrieve(histories[u], 5) for u in range(30)}

    def ask(n: int) -> bool:
        kind, u = ("history" if n % 31 == 0 else "pi"), n // 31 % 30  # 31: all four threads have both kinds
        slate = retriever.retrieve(histories[u], 5) if kind == "history" else retriever.retrieve([[]], 5, pi=by_pi[u])
        other = wanted[kind, u]
        return bool(
            (slate.items == other.items).all() and (slate.scores == other.scores).all() and slate.certified.all()
        )

    def some(worker: int, first: int, last: int) -> bool:
        return all(ask(n) for n in range(first + worker, last, 4))

    process, sizes = psutil.Process(), []
    with ThreadPoolExecutor(4) as pool:
        for first, last in ((0, 20_000), (20_000, 100_000)):
            assert all(pool.map(lambda w, f=first, n=last: some(w, f, n), range(4)))
            sizes.append(process.memory_info().rss / 1e6)
    assert sizes[1] - sizes[0] < 20, f"{sizes[1] - sizes[0]:.0f} MB more after another 80,000 requests"


@pytest.mark.parametrize(("name", "strategy"), [("p-bach", "exact"), ("all-multihead", "two-step")])
def test_readers_and_a_writer(world, histories, name, strategy):
    """Requests while items come and go: each sees one catalogue, whole."""
    retriever = made(world, name, strategy)
    best = retriever.retrieve(histories, 5)
    gone = int(best.items[0, 0])
    wanted = [best.items]
    retriever.remove([gone])
    wanted.append(retriever.retrieve(histories, 5).items)
    bare, less = made(world, name, strategy).catalogue, retriever.catalogue
    stop, seen = threading.Event(), set()

    def read() -> None:
        while not stop.is_set():
            items = retriever.retrieve(histories, 5).items
            seen.add(next((n for n, other in enumerate(wanted) if (items == other).all()), -1))

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(3)]
        for n in range(60):
            retriever.catalogue = bare if n % 2 else less
            stop.wait(0.02)
        stop.set()
        for reader in readers:
            reader.result()
    assert seen == {0, 1}


@pytest.mark.parametrize(("strategy", "index", "budget"), LIVE)
def test_readers_while_items_come_and_go(world, histories, monkeypatch, strategy, index, budget):
    """Every slate is that of one of the catalogues there were, though rows are written behind the readers' own."""
    monkeypatch.setattr(twostep, "SMALL", 0)
    retriever, states = made(world, "p-bach-global", strategy, index=index, lists="exact"), {}

    def key(slate) -> bytes:
        return slate.items.tobytes() + slate.scores.tobytes()

    def change(n: int) -> None:
        if n % 2:
            retriever.remove(retriever.retrieve(histories, 5).items[n % 30, :1])
        else:
            retriever.add(vectors=unit(retriever.catalogue.vectors[n : n + 2] + 0.01 * n))

    start = retriever.catalogue
    for n in range(40):
        states[key(retriever.retrieve(histories, 5))] = n
        change(n)
    states[key(retriever.retrieve(histories, 5))] = 40
    stop, seen, unknown = threading.Event(), set(), []

    def read() -> None:
        while not stop.is_set():
            slate = retriever.retrieve(histories, 5)
            (seen.add if key(slate) in states else unknown.append)(states.get(key(slate)))

    for _ in range(2):  # from the same catalogue: what came before keeps its rows
        retriever.catalogue = start
        stop.clear()
        with ThreadPoolExecutor(3) as pool:
            readers = [pool.submit(read) for _ in range(3)]
            for n in range(40):
                change(n)
                stop.wait(0.005)
            stop.set()
            for reader in readers:
                reader.result()
        assert states[key(retriever.retrieve(histories, 5))] == 40
    assert not unknown and len(seen) > 5
