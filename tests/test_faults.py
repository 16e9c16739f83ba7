"""Full disks, read-only places, no permission, short memory; and several processes or threads that want the same."""

import errno
import functools
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from serving import made
from torture import SMALL, TRAINING, Torture, outputs, point, read_point, some_training

from bachlib import BachError
from bachlib.data import planted, prepare
from bachlib.evaluate import Evaluation, evaluate
from bachlib.experiment.notebooks import execute
from bachlib.experiment.stages import measured
from bachlib.experiment.sweep import run_here
from bachlib.files import in_progress, only_one, read_json, replacing, whole_folder, write_json, write_text
from bachlib.model.methods import build
from bachlib.serve import store
from bachlib.show import maps
from bachlib.train import Run, fit
from bachlib.train.parallel import Group

WEIGHTS = "last.safetensors"


def in_forks(*calls) -> list[str]:
    """What calls return or which `BachError` they raise, as text; each in a process of its own, all at once."""
    pipes = []
    for call in calls:
        read, write = os.pipe()
        if not os.fork():
            try:
                said = str(call())
            except BachError as error:
                said = f"BachError: {error}"
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            finally:
                os.write(write, said.encode()[:4000])
                os._exit(0)
        os.close(write)
        pipes.append(os.fdopen(read))
    found = [pipe.read() for pipe in pipes]
    for _ in calls:
        os.wait()
    return found


@pytest.fixture(scope="module", autouse=True)
def warm():
    """What a first training imports: not again in each fork."""
    import torch._dynamo  # noqa: F401


def model_of(world, **params):
    return build("p-bach", world, 3, **SMALL, **params)


# ------------------------------------------------------------------------------------------ a disk that has its limits


@pytest.fixture
def small_disk(tmp_path):
    """A disk of four megabytes in memory."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(place)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here: it needs Linux and root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextmanager
def filled(disk: Path, free: int):
    size = os.statvfs(disk)
    with (disk / "fill").open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size.f_bavail * size.f_bsize - free)
    yield
    (disk / "fill").unlink()


@contextmanager
def read_only(disk: Path):
    """The same disk, mounted once more over itself: that it is written elsewhere does not matter."""
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)
    yield
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


@pytest.mark.parametrize("name", ["prepare", "train", "save"])
def test_a_full_disk_and_a_read_only_one_are_told_and_do_no_harm(small_disk, name):
    """The error names the folder; a reader sees the old state; the same call then ends as if nothing had been."""
    one = Torture(name, small_disk)
    with outputs(one.place):
        for limit, told in (
            (filled(small_disk, 0), "no disk space left to write"),
            (filled(small_disk, 12_288), "no disk space left to write"),
            (read_only(small_disk), "cannot be written (Read-only file system)"),
        ):
            one.back()
            with limit:
                (said,) = in_forks(lambda: one.work.call(one.place))
            assert said.startswith("BachError: ") and told in said and str(one.place) in said
            assert one.work.read(one.place) == one.states[0]
    assert one.differences() == []


def test_a_memory_mapped_file_on_a_full_disk_ends_no_process(small_disk, world):
    """Its last page may still fit: without a reservation the first write to another one is a SIGBUS."""
    index = made(world)
    with filled(small_disk, 12_288):
        (said,) = in_forks(lambda: index.save(small_disk / "index"))
    assert said.startswith(f"BachError: no disk space left to write {small_disk / 'index'}"), said or "the process died"


def test_a_file_beside_a_notebook_that_cannot_be_written(small_disk):
    with read_only(small_disk), pytest.raises(BachError, match=r"a\.ipynb cannot be written \(Read-only file system\)"):
        write_text(small_disk / "a.ipynb", "{}")


@pytest.fixture
def open_folder():
    """A folder that everybody may enter; pytest's own are closed to others."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="bach-tests-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_no_permission_is_told(world, open_folder, monkeypatch):
    """In a folder that belongs to somebody else."""
    closed, locks = open_folder / "closed", open_folder / "locks"
    closed.mkdir(0o555)
    locks.mkdir()
    locks.chmod(0o777)
    monkeypatch.setattr(tempfile, "tempdir", str(locks))
    model = model_of(world)

    def as_somebody(call):
        if os.geteuid() == 0:
            os.setuid(65534)  # permissions do not bind root
        return call()

    said = in_forks(
        *(
            functools.partial(as_somebody, call)
            for call in (
                lambda: fit(model, world, TRAINING, closed / "run", quiet=True),
                lambda: planted.write_world(closed / "world", n_users=30, n_items=60),
                lambda: write_text(closed / "a.txt", ""),
            )
        )
    )
    for line, name in zip(said, ("run", "world", "a.txt"), strict=True):
        assert line.startswith(f"BachError: {closed / name} cannot be written (Permission denied)"), line
    assert list(closed.iterdir()) == []


def test_a_lock_of_another_user_is_still_a_lock(tmp_path, monkeypatch):
    """Only its owner may open the file of a lock for writing; anybody may wait for it."""
    really = os.open

    def refused(path, flags, *more, **options):
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return really(path, flags, *more, **options)

    with only_one(tmp_path / "a"):
        monkeypatch.setattr(os, "open", refused)
        assert in_progress(tmp_path / "a")


def test_short_memory_is_told(world, tmp_path):
    model = model_of(world)

    def within(more: int, call):
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
        return call()

    training, log = in_forks(
        lambda: within(
            1 << 27, lambda: fit(model, world, {**TRAINING, "n_negatives": 10**8}, tmp_path / "run", quiet=True)
        ),
        lambda: within(1 << 27, lambda: planted.write_world(tmp_path / "world", n_users=10**8, n_items=60)),
    )
    for said, name in ((training, "run"), (log, "world")):
        assert said.startswith(f"BachError: memory was short while working on {tmp_path / name} ("), said
    assert not (tmp_path / "world").exists()
    with pytest.raises(BachError, match="does not exist"):
        Run.load(tmp_path / "run", world)


def test_a_kernel_that_cannot_start_is_told(tmp_path, monkeypatch, capfd):
    """How much memory a notebook needs, and what to do; once, and no more lines of others."""
    import json

    import nbformat
    from nbformat.v4 import new_notebook

    (tmp_path / "kernels" / "python3").mkdir(parents=True)
    spec = {"argv": [sys.executable, "-S", "-c", "raise SystemExit(1)"], "display_name": "none", "language": "python"}
    (tmp_path / "kernels" / "python3" / "kernel.json").write_text(json.dumps(spec))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    nbformat.write(new_notebook(), tmp_path / "n.ipynb")
    told = (
        r"n: the kernel could not be started \(.*\)\. Most often memory is short: a notebook needs about 1\.1 GB.*free"
    )
    with pytest.raises(BachError, match=told + r" now\. Close other programs, or run one at a time \(--workers 1\)"):
        execute(tmp_path / "n.ipynb", tmp_path / "out.ipynb", {}, tmp_path)
    said = capfd.readouterr()
    assert said.out == "n: the kernel was lost; once more\n" and "Kernel died" not in said.err


# ------------------------------------------------------------------------------------------------- several at once


def test_a_lock(tmp_path):
    """A thread may ask twice; other threads and processes wait; `in_progress` tells."""
    seen = []
    with only_one(tmp_path / "a"), only_one(tmp_path / "a"):
        assert in_progress(tmp_path / "a") and not in_progress(tmp_path / "b")
        other = threading.Thread(target=lambda: held(tmp_path / "a", seen))
        other.start()
        for _ in range(1000):
            if seen:
                break
            time.sleep(0.005)
        assert seen == ["busy"]
    other.join()
    assert seen == ["busy", "mine"] and not in_progress(tmp_path / "a")


def held(target, seen):
    with only_one(target, lambda: seen.append("busy")):
        seen.append("mine")


def test_two_trainings_want_one_folder(world, tmp_path):
    """Other parameters: the second waits and is refused by name. The same ones: both have the result."""
    params = [{**TRAINING, "seed": seed, "batch_size": 1024} for seed in (0, 1)]
    alone = []
    for p in params:
        alone.append(
            load_file(fit(model_of(world), world, p, tmp_path / "alone", fresh=True, quiet=True).folder / WEIGHTS)
        )
    for n, seeds in enumerate([(0, 1), (1, 1)]):
        out = tmp_path / f"both{n}"
        said = in_forks(*(functools.partial(fit, model_of(world), world, params[s], out, quiet=True) for s in seeds))
        finished = [seed for seed, line in zip(seeds, said, strict=True) if "finished" in line]
        refused = [line for line in said if line.startswith(f"BachError: {out} holds another run: train.seed is")]
        assert (len(finished), len(refused)) == ((1, 1) if seeds == (0, 1) else (2, 0)), said
        last = load_file(out / WEIGHTS)
        assert all(torch.equal(last[name], value) for name, value in alone[finished[0]].items())
        assert Run.load(out, world).status == "finished"


def test_who_waits_for_a_training_is_told(world, tmp_path, monkeypatch, capsys):
    """And processes of torchrun, which would time out, are refused."""
    refused = r"another training is writing into .*: start again when it has ended"
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with only_one(tmp_path / "run"):
            inside.set()
            leave.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    inside.wait()
    with (
        monkeypatch.context() as patch,
        pytest.raises(BachError, match=refused),
    ):
        patch.setattr("bachlib.train.loop.group", lambda device: nullcontext(Group(0, 2)))
        fit(model_of(world), world, TRAINING, tmp_path / "run", quiet=True)
    threading.Timer(0.3, leave.set).start()
    fit(model_of(world), world, {**TRAINING, "batch_size": 2048}, tmp_path / "run")
    assert f"another training is writing into {tmp_path / 'run'}; waiting for its end" in capsys.readouterr().out
    holder.join()


def test_two_sweeps_and_a_notebook_want_one_point(tmp_path):
    with outputs(tmp_path):
        some_training(tmp_path)
        one = point(tmp_path)
        said = in_forks(lambda: run_here(one), lambda: run_here(one), lambda: measured(one.p).record)
        assert said == ["None", "None", str(read_point(tmp_path))]
        assert not list(tmp_path.rglob(".*.partial"))


def test_two_preparations_want_one_folder(tmp_path):
    log = planted.write_world(tmp_path / "log", n_users=40, n_items=150, n_interests=3, mean_events=110)
    said = in_forks(
        *(
            functools.partial(prepare, "planted", log, tmp_path / "data", quiet=True, threads=1, min_items=n)
            for n in (50, 60)
        )
    )
    refused = [line for line in said if "that was prepared with other options: params.min_items" in line or
               "holds a data set that was prepared with other options: min_items is" in line]  # fmt: skip
    assert len(refused) == 1 and sum(line.startswith("Dataset(data:") for line in said) == 1, said


def test_what_replaces_a_folder_is_alone(tmp_path, monkeypatch):
    """Four processes that want the same planted world, or the same map: one writes it, and nobody replaces it."""
    small = {"n_users": 30, "n_items": 60, "n_interests": 2, "mean_events": 30}
    slow = lambda *_: time.sleep(0.2) or (np.zeros((6, 2)), np.ones((1, 2)))  # noqa: E731
    monkeypatch.setattr(maps, "_umap", slow)
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path))
    places = maps.layout(np.eye(6), np.eye(6)[:1])
    (tmp_path / "layouts").rename(tmp_path / "alone")

    def world() -> int:
        return planted.write_world(tmp_path / "world", **small).stat().st_ino

    def layout() -> int:
        assert (maps.layout(np.eye(6), np.eye(6)[:1])[1] == places[1]).all()
        return next((tmp_path / "layouts").glob("[0-9a-f]*")).stat().st_ino

    assert len(set(in_forks(*[world] * 4))) == 1 and len(set(in_forks(*[layout] * 4))) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can swap two folders")
def test_a_folder_is_replaced_in_one_step(tmp_path, monkeypatch):
    """No rename leaves a moment without the folder; nothing is left beside it."""
    really = os.rename

    def watched(*paths) -> None:
        really(*paths)
        assert (tmp_path / "a" / "n").exists()

    monkeypatch.setattr(os, "rename", watched)
    for n in range(3):
        with whole_folder(tmp_path / "a") as new:
            (new / "n").write_text(str(n))
    assert (tmp_path / "a" / "n").read_text() == "2" and [path.name for path in tmp_path.iterdir()] == ["a"]


def test_what_killed_writers_left_is_cleared(tmp_path):
    """By the next writer of the same file, and by whoever has the folder for itself; running writers keep theirs."""
    dead = subprocess.Popen([sys.executable, "-S", "-c", ""])
    dead.wait()
    (tmp_path / "run").mkdir()
    left = [tmp_path / "run" / f".{name}.{dead.pid}.partial" for name in ("resume.safetensors", "run.json")]
    left += [tmp_path / "run" / f".gen-000007.{dead.pid}.12345678.partial"]
    living = [tmp_path / "run" / ".run.json.1.partial", tmp_path / "run" / f".run.json.{os.getpid()}.12345678.partial"]
    for path in [*left, *living]:
        path.write_text("half")
    with replacing(tmp_path / "run" / "run.json") as partial:
        partial.write_text("{}")
    assert [path.exists() for path in left] == [True, False, True] and all(path.exists() for path in living)
    with only_one(tmp_path / "run"):
        assert not any(path.exists() for path in left) and all(path.exists() for path in living)


def test_a_training_that_goes_on_is_read_as_of_one_moment(world, tmp_path):
    """Ended after the weights of a better epoch and before run.json: the numbers are those of the weights."""
    best = fit(model_of(world), world, {**TRAINING, "batch_size": 1024}, tmp_path, quiet=True).best
    about = read_json(tmp_path / "run.json")
    write_json(tmp_path / "run.json", about | {"best": {"epoch": 0, "auprc": 0.0}})
    assert Run.load(tmp_path, world).best == best


def test_an_evaluation_is_of_its_ranks(world, tmp_path, monkeypatch):
    """Ended between its two files, another evaluation leaves none: never the old means beside the new ranks."""
    one = evaluate(build("mostpop", world), world, quiet=True)
    one.save(tmp_path)
    again = evaluate(build("mostpop", world), world, max_users=20, quiet=True)
    monkeypatch.setattr("bachlib.evaluate.evaluation.write_json", lambda *_, **__: 1 / 0)
    with suppress(ZeroDivisionError):
        one.save(tmp_path)
    assert Evaluation.load(tmp_path).means == one.means, "the same numbers stay"
    with pytest.raises(ZeroDivisionError):
        again.save(tmp_path)
    with pytest.raises(BachError, match="has not been evaluated"):
        Evaluation.load(tmp_path)


def test_many_processes_save_and_load_one_index(world, tmp_path):
    """Each load sees one of the indices, whole."""
    writers = [made(world), made(world)]
    writers[1].remove([3, 5])
    writers[0].save(tmp_path)
    kept = [writer.catalogue.gone.tolist() for writer in writers]

    def write(writer) -> str:
        for _ in range(8):
            writer.save(tmp_path)
        return "saved"

    def read() -> str:
        for _ in range(40):
            assert store.read(tmp_path)[0].gone.tolist() in kept
        return "read"

    said = in_forks(*(functools.partial(write, writer) for writer in [*writers, writers[0]]), read, read, read)
    assert said == ["saved"] * 3 + ["read"] * 3
    assert store.read(tmp_path)[0].gone.tolist() in kept and len(list(tmp_path.glob("gen-*"))) == 2


def test_eight_threads_while_items_come_and_go(world, histories):
    """Four thousand requests: each answer is that of one catalogue, and all come to an end."""
    retriever = made(world, "p-bach-global", "codebook", k=6)
    whole, before = retriever.catalogue, retriever.retrieve(histories[:8], 5)
    gone = np.unique(before.items[:, 0])

    def ask(u: int):
        return retriever.retrieve([[]], 5, pi=before.pi[u])

    wanted = [[key(ask(u)) for u in range(8)]]
    retriever.remove(gone)
    wanted.append([key(ask(u)) for u in range(8)])
    stop = threading.Event()

    def many(u: int) -> list[int]:
        of = {wanted[n][u]: n for n in (0, 1)}
        return [of[key(ask(u))] for _ in range(500)]

    def change() -> None:
        while not stop.is_set():
            retriever.catalogue = whole
            stop.wait(0.005)
            retriever.remove(gone)
            stop.wait(0.005)

    with ThreadPoolExecutor(9) as pool:
        changing = pool.submit(change)
        try:
            found = [one.result(timeout=60) for one in [pool.submit(many, u) for u in range(8)]]
        finally:
            stop.set()
        changing.result(timeout=10)
    assert set(np.concatenate(found)) == {0, 1}


def key(slate) -> bytes:
    return slate.items.tobytes() + slate.scores.tobytes()
