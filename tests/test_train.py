"""Training: resume to the bit, kill −9, Ctrl-C, divergence, early stopping."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from bachlib import BachError, NotFinite
from bachlib.data import Windows
from bachlib.model.methods import METHODS, build
from bachlib.model.twotower import Encoded, Objective
from bachlib.rank.metrics import average_precision_of_ranks
from bachlib.rank.ranks import target_ranks
from bachlib.train import Run, fit
from bachlib.train.checkpoint import read_tensors
from bachlib.train.watch import Watch, effective_heads

SMALL = {"d": 16, "ff": 32, "item_width": 32}
QUICK = {"batch_size": 256, "n_negatives": 64, "valid_every": 1, "learning_rate": 3e-3, "checkpoint_seconds": 0}
TIMED = ["windows_per_s"]


def model_of(world, name="p-bach", k=3, **params):
    return build(name, world, k, **(SMALL | params))


def same_run(a, b):
    """Weights to the bit, and history except for the clock."""
    for name in ("best", "last"):
        x, y = (load_file(run.folder / f"{name}.safetensors") for run in (a, b))
        assert x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x)
    pd.testing.assert_frame_equal(a.history.drop(columns=TIMED), b.history.drop(columns=TIMED), check_exact=True)
    assert a.best == b.best


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """Three epochs without a stop."""
    out = tmp_path_factory.mktemp("whole")
    return fit(model_of(world), world, {**QUICK, "epochs": 3, "log_steps": 10}, out, quiet=True)


# ------------------------------------------------------------------------------------------------------- what it does


def test_every_method_trains(world, tmp_path):
    found, params = {}, {**QUICK, "epochs": 2, "learning_rate": 0.01}
    for name in METHODS:
        run = fit(model_of(world, name, k_shared=4, k_own=2), world, params, tmp_path / name, quiet=True)
        assert run.status == "finished"
        found[name] = run.best["auprc"]
    slow = {"mind", "comirec-dr"}  # capsules need longer than two short epochs
    assert all(found[name] > found["mostpop"] for name in METHODS if name not in slow | {"mostpop"}), found


def test_history_and_files(whole, world):
    history = whole.history
    assert list(history["epoch"]) == [1, 1, 1, 2, 2, 2, 3, 3, 3] and list(history["step"][:3]) == [10, 20, 25]
    assert history["loss"].iloc[-1] < history["loss"].iloc[0] - 0.2
    total = history["reconstruction"] + history["prior"] + history["entropy"]
    np.testing.assert_allclose(-total, history["loss"], atol=1e-5)
    for name in ("usage", "gradient"):
        shares = np.stack(history[name])
        assert shares.shape == (9, 3)
        np.testing.assert_allclose(shares.sum(1), 1, atol=1e-5)
    assert (history["kappa_min"] <= np.stack(history["kappa"]).min(1)).all()
    assert history["effective_heads"].between(1, 3).all() and history["valid_auprc"].notna().sum() == 3
    assert {p.name for p in whole.folder.iterdir()} == {
        "run.json", "history.parquet", "best.safetensors", "last.safetensors", "resume.safetensors", "environment.json",
    }  # fmt: skip
    assert whole.best["auprc"] == history["valid_auprc"].max()
    ranks = target_ranks(whole.model, world, np.arange(world.n_users), "valid")
    assert average_precision_of_ranks(ranks).mean() == pytest.approx(
        whole.best["auprc"], abs=1e-12
    )  # the model has the best


def test_a_run_is_loaded_with_its_numbers(whole, world):
    again = Run.load(whole.folder, world)
    history = world.history(np.arange(20), "test")
    assert torch.equal(again.model.score(history), whole.model.score(history))
    assert again.best == whole.best and again.status == "finished" and "best AUPRC" in repr(again)
    with pytest.raises(BachError, match="is not a run"):
        Run.load(whole.folder.parent, world)


def test_training_leaves_the_random_state_alone(world, tmp_path):
    state = torch.get_rng_state()
    fit(model_of(world), world, {**QUICK, "epochs": 1}, tmp_path, quiet=True)
    assert torch.equal(torch.get_rng_state(), state)


def test_early_stopping(world, tmp_path):
    """With a step size of nothing the AUPRC never gets better than the first look: patience counts the looks."""
    params = {**QUICK, "epochs": 50, "patience": 2, "learning_rate": 1e-12, "batch_size": 2048}
    run = fit(model_of(world), world, params, tmp_path, quiet=True)
    assert len(run.history) == run.best["epoch"] + 2 < 10


def test_patience_counts_looks_and_not_epochs(world, tmp_path):
    """A look every third epoch, patience 2: the training ends two looks, that is six epochs, after the best one."""
    params = {**QUICK, "epochs": 50, "valid_every": 3, "patience": 2, "learning_rate": 1e-12, "batch_size": 4096}
    run = fit(model_of(world, "standard", n_hist=5), world, params, tmp_path, quiet=True)
    assert len(run.history) == run.best["epoch"] + 6 <= 15


def test_the_optimizer_is_plain_adam(world, tmp_path):
    """The weights after five steps, by Adam written down: no weight decay, no schedule, and no clipping, which large
    gradients after small ones would show."""
    model, grown = model_of(world, dropout=0.0), iter([1.0, 1.0, 1e4, 1.0, 1e4])
    objective, steps = model.objective, []

    def seen(*args):
        factor = next(grown)
        slopes = torch.autograd.grad(factor * objective(*args).loss, list(model.parameters()), allow_unused=True)
        steps.append(slopes)
        found = objective(*args)
        return found._replace(loss=factor * found.loss)

    model.objective = seen
    weights = [q.detach().double().clone() for q in model.parameters()]
    params = {**QUICK, "epochs": 1, "batch_size": Windows(world, 1).steps_per_epoch // 5}
    run = fit(model, world, params, tmp_path, quiet=True)
    first, second = ([torch.zeros_like(w) for w in weights] for _ in range(2))
    for t, slopes in enumerate(steps, 1):
        for w, m, v, g in zip(weights, first, second, slopes, strict=True):
            g = torch.zeros_like(w) if g is None else g.double()
            m += 0.1 * (g - m)
            v += 0.001 * (g**2 - v)
            w -= 3e-3 * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
    assert len(steps) == 5
    last = load_file(run.folder / "last.safetensors")
    for (name, _), wanted in zip(model.named_parameters(), weights, strict=True):
        assert (last[name] - wanted).abs().max() < 3e-6, name  # a thousandth of a step


def test_the_model_ends_with_the_best_weights_and_not_the_last(world, tmp_path):
    """A training that unlearns after its first epoch."""
    model = model_of(world, "standard", n_hist=5)
    objective, steps = model.objective, []

    def turned(*args):
        steps.append(1)
        found = objective(*args)
        return found._replace(loss=found.loss * (1 if len(steps) <= per_epoch else -1))

    model.objective, per_epoch = turned, Windows(world, 256, n_hist=5).steps_per_epoch
    run = fit(model, world, {**QUICK, "epochs": 3}, tmp_path, quiet=True)
    best, last = (load_file(tmp_path / f"{name}.safetensors") for name in ("best", "last"))
    assert run.best["epoch"] == 1
    for name, value in run.model.named_parameters():
        assert torch.equal(value, best[name]) and not torch.equal(value, last[name])


def test_dropout_is_on_in_training_and_off_after_it(world, tmp_path):
    model = model_of(world, "standard", n_hist=5)
    objective, training = model.objective, []
    model.objective = lambda *args: training.append(model.training) or objective(*args)
    run = fit(model, world, {**QUICK, "epochs": 2, "batch_size": 2048}, tmp_path, quiet=True)
    assert len(training) >= 4 and all(training) and not run.model.training


def test_every_step_draws_its_own_negatives(world, tmp_path):
    model = model_of(world, "standard", n_hist=5)
    objective, drawn = model.objective, []
    model.objective = lambda *args: drawn.append(args[2].numpy()) or objective(*args)
    fit(model, world, {**QUICK, "epochs": 2, "n_negatives": 500}, tmp_path, quiet=True)
    assert len(drawn) >= 50 and {len(negatives) for negatives in drawn} == {500}
    assert len({negatives.tobytes() for negatives in drawn}) == len(drawn)
    times = np.bincount(np.concatenate(drawn), minlength=world.n_items)  # uniform over the whole catalogue
    assert len(times) == world.n_items and times.min() > 0
    assert times.var() == pytest.approx(times.mean(), rel=0.3)


def test_mixed_precision_keeps_the_normalisers(world, tmp_path):
    """bfloat16 in the towers; heads, π, κ and every density stay in float32, and the loss is close."""
    model = model_of(world, dropout=0.0)
    seen = {}
    density = model.kernel.log_density

    def looked(t, kappa, d):
        seen.update(t=t.dtype, kappa=kappa.dtype)
        return density(t, kappa, d)

    history, positive = torch.from_numpy(world.history(np.arange(32), "valid")), torch.arange(32)
    with torch.autocast("cpu", torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.kernel), "log_density", staticmethod(looked))
        mixed = model.objective(history, positive, torch.arange(100))
    assert seen == {"t": torch.float32, "kappa": torch.float32} and mixed.loss.dtype == torch.float32
    assert all(x.dtype == torch.float32 for x in mixed.encoded)
    assert mixed.loss.item() == pytest.approx(model.loss(history, positive, torch.arange(100)).item(), abs=0.05)
    torch.testing.assert_close(mixed.encoded.kappa, torch.full((32, 3), 1 / 0.07))


@pytest.mark.parametrize("name", [name for name in METHODS if name != "mostpop"])
def test_every_method_trains_in_mixed_precision(world, tmp_path, name):
    params = {**QUICK, "epochs": 1, "precision": "mixed", "batch_size": 2048}
    assert (
        fit(model_of(world, name, k_shared=4, k_own=2), world, params, tmp_path, quiet=True)
        .history["loss"]
        .notna()
        .all()
    )


def test_no_gpu_is_said(world, tmp_path):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(BachError, match="torch finds no GPU"):
        fit(model_of(world), world, {"device": "cuda"}, tmp_path)


# ---------------------------------------------------------------------------------------------------------- going on


def test_stopped_by_ctrl_c_and_resumed(whole, world, tmp_path, capsys):
    """The first Ctrl-C stops after the step; the same call goes on to the same weights and history."""
    model, steps = model_of(world), 0
    objective = model.objective

    def interrupted(*args):
        nonlocal steps
        steps += 1
        if steps == 37:
            os.kill(os.getpid(), signal.SIGINT)
        return objective(*args)

    model.objective = interrupted
    params = {**QUICK, "epochs": 3, "log_steps": 10}
    run = fit(model, world, params, tmp_path)
    said = capsys.readouterr().out
    assert run.status == "stopped" and "stopped in epoch 2 after 12 steps" in said and "to resume" in said
    best = load_file(tmp_path / "best.safetensors")
    assert all(torch.equal(value, best[name]) for name, value in run.model.state_dict().items())
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = fit(model_of(world, seed=0), world, params, tmp_path, quiet=True)
    assert resumed.status == "finished"
    same_run(resumed, whole)


def test_interrupted_in_a_notebook(world, tmp_path):
    """The stop button of a notebook: the cell ends by itself, says how to go on, and the kernel goes on."""
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")
    said: list[str] = []

    def hear(message):
        if message["msg_type"] in ("display_data", "update_display_data", "stream"):
            said.append(str(message["content"].get("data", message["content"].get("text"))))
            if "epoch 1/" in said[-1]:
                manager.interrupt_kernel()

    try:
        code = fitting(world, {**QUICK, "epochs": 500, "valid_every": 1000}, tmp_path).replace("\nfit(", "\nrun = fit(")
        reply = client.execute_interactive(code, output_hook=hear, timeout=100)
        assert reply["content"]["status"] == "ok" and "stopped in epoch" in said[-1] and "to resume" in said[-1]
        reply = client.execute_interactive("print(run.status)", output_hook=hear, timeout=20)
        assert "stopped" in said[-1]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_killed_and_resumed(whole, world, tmp_path):
    """kill −9 in the middle of a step or of a write, several times; in the end nothing tells."""
    script = fitting(world, {**QUICK, "epochs": 3, "log_steps": 10}, tmp_path)
    places = []
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
        started = place_of(tmp_path)
        while process.poll() is None and place_of(tmp_path) < started + 7:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        places.append(place_of(tmp_path))
    assert 0 < places[0] < places[1] < places[2] < 75, places
    resumed = fit(model_of(world), world, {**QUICK, "epochs": 3, "log_steps": 10}, tmp_path, quiet=True)
    same_run(resumed, whole)


def fitting(world, params, out) -> str:
    """A program that trains like `model_of`."""
    return f"""
from bachlib.data import Dataset
from bachlib.model.methods import build
from bachlib.train import fit
world = Dataset.load({str(world.folder)!r})
fit(build("p-bach", world, 3, **{SMALL!r}), world, {params!r}, {str(out)!r})
"""


def place_of(folder) -> int:
    try:
        _, about = read_tensors(folder / "resume.safetensors")
    except BachError:
        return 0
    return about["windows"]["epoch"] * 25 + about["windows"]["step"]


def test_more_epochs_later(whole, world, tmp_path):
    params = {**QUICK, "log_steps": 10}
    fit(model_of(world), world, {**params, "epochs": 1}, tmp_path, quiet=True)
    run = fit(model_of(world), world, {**params, "epochs": 3}, tmp_path, quiet=True)
    same_run(run, whole)
    again = fit(model_of(world), world, {**params, "epochs": 3}, tmp_path, quiet=True)  # finished: nothing to do
    assert len(again.history) == len(whole.history) and again.status == "finished"


def test_another_run_in_the_folder_is_refused(whole, world):
    with pytest.raises(BachError, match=r"holds another run: model\.params\.tau is 0.07 there and 0.1 here"):
        fit(model_of(world, tau=0.1), world, {**QUICK, "epochs": 3, "log_steps": 10}, whole.folder, quiet=True)
    with pytest.raises(BachError, match="learning_rate"):
        fit(model_of(world), world, {**QUICK, "log_steps": 10, "learning_rate": 1e-3}, whole.folder, quiet=True)
    assert json.loads((whole.folder / "run.json").read_text())["status"] == "finished"


def test_a_damaged_state_is_said(world, tmp_path):
    fit(model_of(world), world, {**QUICK, "epochs": 1}, tmp_path, quiet=True)
    state = tmp_path / "resume.safetensors"
    state.write_bytes(state.read_bytes()[:1000])
    with pytest.raises(BachError, match=r"is damaged .* fresh=True"):
        fit(model_of(world), world, {**QUICK, "epochs": 2}, tmp_path, quiet=True)
    assert fit(model_of(world), world, {**QUICK, "epochs": 1}, tmp_path, quiet=True, fresh=True).status == "finished"


def test_divergence_is_named_and_the_last_good_state_is_kept(world, tmp_path):
    model, steps = model_of(world), 0
    objective = model.objective

    def poisoned(*args):
        nonlocal steps
        steps += 1
        if steps == 9:
            with torch.no_grad():
                model.gate.head.weight[0, 0] = torch.nan
        return objective(*args)

    model.objective = poisoned
    with pytest.raises(BachError) as said:
        fit(model, world, {**QUICK, "epochs": 1}, tmp_path, quiet=True)
    text = str(said.value)
    assert "diverged in epoch 1, step 9: loss = nan" in text and "prior = nan" in text
    assert "gate.head.weight" in text and "κ from" in text and "learning rate 0.003" in text
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "diverged"
    tensors, about = read_tensors(tmp_path / "resume.safetensors")
    assert about["windows"]["step"] == 8 and all(
        tensor.isfinite().all() for n, tensor in tensors.items() if n[0] != "s"
    )


@pytest.mark.parametrize(("name", "rate"), [("p-bach", 1e3), ("p-bach-global", 10.0), ("all-multihead", 1e30)])
def test_divergence_of_itself(world, tmp_path, name, rate):
    """A step size that explodes: κ, the loss or only the weights may be the first to go; never is it a good score."""
    with pytest.raises(NotFinite, match=r"diverged in epoch \d+, step \d+|not finite|no longer finite|are NaN"):
        fit(model_of(world, name), world, {**QUICK, "epochs": 3, "learning_rate": rate}, tmp_path, quiet=True)
    assert json.loads((tmp_path / "run.json").read_text())["status"] == "diverged"
    tensors, _ = read_tensors(tmp_path / "resume.safetensors")
    assert all(tensor.isfinite().all() for n, tensor in tensors.items() if n.startswith("model."))


def test_scores_that_are_not_numbers_are_no_success(world):
    model = model_of(world)
    with torch.no_grad():
        model.encoder.cls.fill_(torch.nan)
    with pytest.raises(NotFinite):
        target_ranks(model, world, np.arange(5), "valid")


def test_a_look_that_only_the_cap_asked_for_costs_no_patience(world, tmp_path):
    params = {**QUICK, "valid_every": 1000, "patience": 1, "learning_rate": 1e-12, "batch_size": 2048}
    for epochs in (1, 2, 3):
        run = fit(model_of(world), world, {**params, "epochs": epochs}, tmp_path, quiet=True)
    assert len(run.history) == 3


def test_weights_that_are_not_there_are_said(whole, world):
    with pytest.raises(BachError, match=r"lsat\.safetensors does not exist"):
        Run.load(whole.folder, world, weights="lsat")


# ------------------------------------------------------------------------------------------------------- small things


def test_effective_heads():
    assert effective_heads([0.25] * 4) == pytest.approx(4) and effective_heads([1.0, 0.0]) == 1


def test_the_watch_by_hand():
    """Two steps: cosines between heads, the number of heads that π covers, usage, κ, and shares of the gradient."""
    rng, watch = np.random.default_rng(0), Watch(3, torch.device("cpu"))
    cosines, covered, gamma, kappa, shares = [], [], [], [], []
    for _ in range(2):
        u = rng.normal(size=(5, 3, 4))
        u /= np.linalg.norm(u, axis=-1, keepdims=True)
        pi, g, sharp, slope = (
            rng.dirichlet(np.ones(3), 5),
            rng.random((5, 3)),
            rng.random((5, 3)),
            rng.random((5, 3, 4)),
        )
        heads = torch.from_numpy(u).requires_grad_()
        loss = (heads * torch.from_numpy(slope)).sum()
        encoded = Encoded(heads, torch.from_numpy(np.log(pi)), torch.from_numpy(sharp))
        terms = dict.fromkeys(("reconstruction", "prior", "entropy"), loss.detach())
        watch.look(Objective(loss, terms, torch.from_numpy(g), encoded, heads))
        loss.backward()
        cosines += [one[a] @ one[b] for one in u for a, b in ((0, 1), (0, 2), (1, 2))]
        covered += [-(p * np.log(p)).sum() for p in pi]
        gamma, kappa = [*gamma, g.mean(0)], [*kappa, sharp]
        length = np.linalg.norm(slope, axis=-1).sum(0)
        shares.append(length / length.sum())
    row, kappa = watch.row(), np.concatenate(kappa)
    assert row["head_cosine"] == pytest.approx(np.mean(cosines)) and row["pi_heads"] == pytest.approx(
        np.exp(np.mean(covered))
    )
    assert (row["kappa_min"], row["kappa_max"]) == (kappa.min(), kappa.max())
    for name, wanted in (("usage", np.mean(gamma, 0)), ("kappa", kappa.mean(0)), ("gradient", np.mean(shares, 0))):
        np.testing.assert_allclose(row[name], wanted)


def test_lines_without_a_terminal(world, tmp_path, capsys):
    fit(model_of(world), world, {**QUICK, "epochs": 2}, tmp_path)
    first, second = capsys.readouterr().out.splitlines()
    for word in ("epoch   1/2", "loss", "κ", "heads", "AUPRC", "windows/s", "left"):
        assert word in first
    assert "epoch   2/2" in second and "left" not in second


def test_a_bar_on_a_terminal(world, tmp_path):
    import fcntl
    import pty
    import struct
    import termios

    script = fitting(world, {**QUICK, "epochs": 2}, tmp_path)
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 160, 0, 0))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=theirs, stdout=theirs)
    os.close(theirs)
    said = b""
    while True:
        try:
            said += (part := os.read(ours, 4096))
        except OSError:
            break
        if not part:
            break
    assert process.wait() == 0
    text = said.decode()
    assert "epoch 1/2" in text and "windows/s" in text and "%|" in text and "κ" in text
