"""The ablations: each switch against a plain twin, its limit cases, training, resume, several processes, refusals."""

import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_methods import LEARNT, away_from_the_start, batch_of, loss_and_slopes
from test_methods import SMALL as STILL
from test_mixture import case, gradients, unit
from test_parallel import TORCHRUN
from test_targets import targets_of
from test_targets import case as case_of_all
from test_train import QUICK, SMALL, TIMED, model_of, same_run

from bachlib import BachError
from bachlib.data import Windows
from bachlib.experiment.settings import Experiment, experiment_of
from bachlib.experiment.sweep import AXES
from bachlib.model import candidates, mixture, onepass, routing
from bachlib.model.methods import build
from bachlib.model.mixture import Bound
from bachlib.model.plain import plain_step_loss
from bachlib.model.shared import shared_log_components
from bachlib.params import LATER, ModelParams, TrainParams, noted
from bachlib.train import Run, fit

BOUNDS = [
    Bound(),
    Bound("contrastive"),
    Bound("contrastive", temper=0.3),
    Bound("contrastive", through_gamma=False),
    Bound("prior"),
    Bound("prior", temper=2.5),
    Bound(through_gamma=False),
    Bound(temper=0.0),
    Bound(temper=2.5),
]
MODEL = [
    {"posterior": "contrastive"}, {"posterior": "contrastive", "temper": 0.5}, {"posterior": "prior"},
    {"through_gamma": False}, {"temper": 0.5}, {"kappa": "shared"}, {"kappa": "fixed"}, {"pi": "uniform"},
    {"posterior": "contrastive", "through_gamma": False, "pi": "uniform", "kappa": "fixed"},
]  # fmt: skip


def step_of(world, size=6):
    """A batch with copies: a target that two rows drew, next items among the candidates, a short row."""
    batch = next(iter(Windows(world, size, following=True)))
    history, positive, following = (torch.from_numpy(x) for x in (batch.history, batch.positive, batch.following))
    following[4, 3:] = torch.where(following[4, 3:] == positive[4], positive[4], -1)
    positive[5] = following[5, 0] = positive[0]
    negatives = torch.cat([torch.arange(30), following[:3, :4].flatten(), following[0, :2], positive[3:4]])
    return history, positive, negatives, following


def expected_of(world):
    return 0.05 + torch.rand(world.n_items, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def close(found, wanted, tolerance=1e-10):
    assert abs(found[0] - wanted[0]) <= tolerance * max(1, abs(wanted[0].item()))
    for a, b in zip(found[1], wanted[1], strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


# ------------------------------------------------------------------------------------------------ fast against plain


@settings(max_examples=60, deadline=None)
@given(
    bound=st.sampled_from(BOUNDS),
    k=st.integers(1, 5),
    extra=st.integers(0, 30),
    tau=st.sampled_from([0.5, 0.07, 0.02, 0.003]),
    block=st.sampled_from([1, 50, 1 << 19]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_one_pass_equals_plain(bound, k, extra, tau, block, dtype, seed):
    """Value and gradients of every bound, with weights and candidates that a row leaves out."""
    c = case(6, k, 5, 6 + extra, dtype, seed) | {"tau": tau, "bound": bound}
    left_out = (torch.rand(6, 6 + extra) < 0.3) & (torch.arange(6 + extra) != torch.arange(6)[:, None])
    own, candidate = torch.rand(6, dtype=dtype) + 0.1, torch.rand(6 + extra, dtype=dtype) + 0.1
    c["weights"] = candidates.Weights(candidate, own, tuple(left_out.nonzero().T))
    names = ["heads", "items", "log_pi", "log_sigma"]
    before, onepass.BLOCK = onepass.BLOCK, block
    try:
        found = of(mixture.loss, c, names)
    finally:
        onepass.BLOCK = before
    close(found, of(mixture.plain_loss, c, names), 1e-10 if dtype == torch.float64 else max(3e-5, 1e-6 / tau))


def of(function, c, names):
    """Value and gradients; none reaches σ if the posterior does not read it."""
    inputs = [c[name].clone().requires_grad_() for name in names]
    value = function(**c | dict(zip(names, inputs, strict=True)))
    value = value[0] if isinstance(value, tuple) else value
    return value, torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("bound", BOUNDS, ids=lambda b: "-".join(map(str, b)))
def test_gradcheck(bound):
    """Against finite differences, with one target and with all, personal and shared heads. With γ held fixed the
    gradient is not that of the value: there `test_gamma_held_fixed` says what it is."""
    if not bound.through_gamma and bound.posterior != "contrastive":
        bound = bound._replace(through_gamma=True)
    c, every = case(B=3, k=2, d=4, C=8), case_of_all(B=3, M=3, k=2, d=4, C=8)
    heads, items, log_pi, log_sigma = (c[name].requires_grad_() for name in ("heads", "items", "log_pi", "log_sigma"))

    def one(heads, items, log_pi, log_sigma):
        return mixture.loss(heads, items, c["positive"], log_pi, log_sigma, 0.5, c["ids"], None, bound)[0]

    def all_of(heads, table, log_pi, log_sigma):
        targets = targets_of(every, table)._replace(
            times=torch.full((3, 3), 0.4).double(), left_out=every["items"][:, :2]
        )
        return mixture.loss_of_all(heads, table[every["ids"]], targets, log_pi, log_sigma, 0.5, bound)[0]

    assert torch.autograd.gradcheck(one, (heads, items, log_pi, log_sigma))
    table, sigma = every["table"].requires_grad_(), torch.randn(3, 3, 2, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(all_of, (heads, table, log_pi, sigma))
    assert torch.autograd.gradcheck(all_of, (heads[0].detach().requires_grad_(), table, log_pi, sigma))


@pytest.mark.parametrize("also", [{}, {"following": 0}, {"expected": 0}, {"following": 0, "expected": 0}], ids=str)
@pytest.mark.parametrize("as_set", [False, True])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("switches", [{}, *MODEL], ids=str)
def test_the_fast_step_is_the_plain_one(world, switches, every, as_set, also):
    if also and switches and switches != MODEL[1]:
        pytest.skip("switches of the model do not meet those of the candidates")
    history, positive, negatives, following = step_of(world)
    given = {name: {"following": following, "expected": expected_of(world)}[name] for name in also}
    given["targets"] = following if every else None
    model = build("p-bach", world, 3, candidates="set" if as_set else "list", **STILL, **switches).double()
    model = away_from_the_start(model)
    seen = model.objective(history, positive, negatives, **given)
    wanted = plain_step_loss(model, history, positive, negatives, **given)
    assert seen.loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    trained = [q for q in model.parameters() if q.requires_grad]
    slopes = [torch.autograd.grad(x, trained, allow_unused=True, materialize_grads=True) for x in (seen.loss, wanted)]
    for a, b in zip(*slopes, strict=True):
        assert (a - b).norm() <= 2e-5 * b.norm() + 1e-8
    assert -sum(seen.terms.values()).item() == pytest.approx(seen.loss.item(), abs=1e-6)
    assert (seen.gamma.sum(1) - 1).abs().max() < 1e-6
