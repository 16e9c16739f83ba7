"""Training on several processes: the step of one process with the joint batch."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from test_switches import DRAWN
from test_train import QUICK, SMALL, TIMED

from bachlib import BachError
from bachlib.model.methods import build
from bachlib.params import ModelParams, TrainParams
from bachlib.train import Run, fit
from bachlib.train.checkpoint import read_tensors
from bachlib.train.parallel import Group

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_two_processes_take_the_step_of_one(world, tmp_path):
    settings = [f"{name}={value}" for name, value in {**SMALL, **QUICK, "epochs": 1, "dropout": 0.0}.items()]
    command = ["-m", "bachlib.cli", "train", "p-bach", "--data", str(world.folder), "--k", "3"]
    command += [x for setting in settings for x in ("--set", setting)]
    for out, start in (("one", [sys.executable]), ("two", TORCHRUN)):
        done = subprocess.run([*start, *command, "--out", str(tmp_path / out)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    one, two = (Run.load(tmp_path / name, world, weights="last") for name in ("one", "two"))
    exact = one.history.drop(columns=TIMED).iloc[0]
    for name, value in two.history.drop(columns=TIMED).iloc[0].items():
        np.testing.assert_allclose(value, exact[name], rtol=2e-3 if "kappa" in name else 5e-4, err_msg=name)
    assert two.history["loss"][0] == pytest.approx(one.history["loss"][0], abs=1e-4)
    for (name, x), y in zip(one.model.state_dict().items(), two.model.state_dict().values(), strict=True):
        assert (x - y).abs().max() < 2e-2, (
            name
        )  # 25 steps of Adam, which turns rounding into steps where gradients vanish
    states = [read_tensors(tmp_path / name / "resume.safetensors")[0] for name in ("one", "two")]
    gradients = [[x for n, x in state.items() if n.startswith("optimizer.exp_avg.")] for state in states]
    sizes = [torch.cat([x.flatten() for x in of]).norm().item() for of in gradients]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.02)  # averaged, not summed: Adam itself would not care
    assert "(test, 96 users): R@10" in done.stdout and done.stdout.count("epoch   1/1") == 1


STILL = {**SMALL, "dropout": 0.0}
TRAININGS = {  # each is compared with one process; with every target, and with draws and left-out candidates
    "all": {"targets": "all"},
    "drawn": {**DRAWN, "posterior": "contrastive"},
}


def test_a_program_may_train_several_times_on_two_processes(world, tmp_path):
    """With parts whose first weights differ from process to process, the first process's are taken."""
    params = {**QUICK, "epochs": 1, "batch_size": 1024}
    chosen = {name: ({k: x for k, x in more.items() if k in ModelParams.model_fields},
                     params | {k: x for k, x in more.items() if k in TrainParams.model_fields})
              for name, more in TRAININGS.items()}  # fmt: skip
    (tmp_path / "train.py").write_text(f"""
import os
import torch
from pathlib import Path
from bachlib.data import Dataset
from bachlib.model.methods import build
from bachlib.model.extractors import ComiRecSA
from bachlib.train import fit
world, place = Dataset.load({str(world.folder)!r}), Path({str(tmp_path)!r})
for n in (1, 2):
    torch.seed()
    model = build("p-bach", world, 3, encoder=ComiRecSA(3, 16, 50), **{SMALL!r})
    told = place / f"told{{n}}.{{os.environ['RANK']}}"
    fit(model, world, {params!r}, place / f"run{{n}}", quiet=True, on_epoch=lambda row: told.write_text(str(row)))
    said = place / f"said{{n}}.{{os.environ['RANK']}}"  # a file each: one pipe would mix their lines
    said.write_text(str(model.encoder.positions.double().sum().item()))
for name, (of_model, of_training) in {chosen!r}.items():
    model = build("p-bach", world, 3, **{STILL!r}, **of_model)
    fit(model, world, of_training, place / name, quiet=True)
""")
    done = subprocess.run([*TORCHRUN, str(tmp_path / "train.py")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = ([(tmp_path / f"said{n}.{rank}").read_text() for rank in (0, 1)] for n in (1, 2))
    assert first[0] == first[1] and second[0] == second[1] and first != second
    assert {path.name for path in tmp_path.glob("told*")} == {"told1.0", "told2.0"}, "only the first calls on_epoch"
    for name, (of_model, of_training) in chosen.items():
        model = build("p-bach", world, 3, **STILL, **of_model)
        exact = fit(model, world, of_training, tmp_path / "one" / name, quiet=True).history.drop(columns=TIMED).iloc[0]
        two = Run.load(tmp_path / name, world, weights="last")
        for key, value in two.history.drop(columns=TIMED).iloc[0].items():
            np.testing.assert_allclose(
                value, exact[key], rtol=2e-3 if "kappa" in key else 5e-4, err_msg=f"{name}: {key}"
            )


def test_a_batch_must_be_shared_evenly():
    assert Group(1, 2).rows(8) == slice(4, 8)
    with pytest.raises(BachError, match="should be a multiple of the 3 processes"):
        Group(0, 3).rows(8)
