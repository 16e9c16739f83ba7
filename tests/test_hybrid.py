"""Prototypes and own heads in one mixture: against plain code, and at both ends against the methods they become."""

import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_methods import SMALL as STILL
from test_methods import away_from_the_start, batch_of, loss_and_slopes
from test_mixture import unit
from test_targets import case, targets_of
from test_targets import plain as plain_of_all
from test_train import QUICK, model_of, same_run

from bachlib import BachError
from bachlib.data import Windows
from bachlib.experiment.settings import experiment_of
from bachlib.experiment.stages import run_name
from bachlib.model import mixture
from bachlib.model.candidates import Weights
from bachlib.model.hybrid import Both
from bachlib.model.methods import Method, build
from bachlib.model.plain import plain_step_loss
from bachlib.model.shared import shared_log_components
from bachlib.model.sphere import KERNELS
from bachlib.params import ModelParams
from bachlib.train import fit
from bachlib.train.watch import Watch

KERNEL = KERNELS["power-spherical"]
HYBRIDS = ["p-bach-hybrid", "v-bach-hybrid"]


def inputs_of(shared, own, B=5, d=6, C=14, dtype=torch.float64, seed=0):
    """(prototypes, own heads, items, logits of π, κ) and the candidates: copies of positives, and weights."""
    torch.manual_seed(seed)
    tensors = [unit(shared, d, dtype=dtype), unit(B, own, d, dtype=dtype), unit(9, d, dtype=dtype)]
    tensors += [torch.randn(B, shared + own, dtype=dtype), 5 + 9 * torch.rand(B, shared + own, dtype=dtype)]
    ids = torch.randint(0, 9, (C,))
    weights = Weights(torch.rand(C).to(dtype) + 0.1, torch.rand(B).to(dtype) + 0.1)
    return [x.requires_grad_() for x in tensors], (ids, torch.arange(B), weights)


def loss_of(function, heads, items, logits, kappa, candidates, tau):
    ids, positive, weights = candidates
    log_sigma = mixture.log_sigma(heads, items[ids][positive], kappa, KERNEL)
    found = function(heads, items[ids], positive, logits.log_softmax(-1), log_sigma, tau, ids, weights)
    return found if isinstance(found, torch.Tensor) else found[0]


def close(found, wanted, tolerance=1e-10):
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item()) if b.numel() else a.shape == b.shape


@settings(max_examples=60, deadline=None)
@given(
    shared=st.integers(0, 5), own=st.integers(0, 4), B=st.integers(1, 6), extra=st.integers(0, 12),
    tau=st.sampled_from([0.5, 0.07, 0.02]), dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_the_loss_of_both_kinds_is_the_plain_one(shared, own, B, extra, tau, dtype, seed):
    """Value and every gradient: of the prototypes, the own heads, the items, π and κ. Without prototypes it is the
    personal model's loss, without own heads the codebook's."""
    if not shared + own:
        return
    (u, v, items, logits, kappa), at = inputs_of(shared, own, B, C=B + extra, dtype=dtype, seed=seed)
    variables = [u, v, items, logits, kappa]

    def slopes(loss):
        return [loss, *torch.autograd.grad(loss, variables, allow_unused=True, materialize_grads=True)]

    found = slopes(loss_of(mixture.loss, Both(u, v), items, logits, kappa, at, tau))
    everything = Both(u, v).expand()
    wanted = slopes(loss_of(mixture.plain_loss, everything, items, logits, kappa, at, tau))
    tolerance = 1e-10 if dtype == torch.float64 else max(2e-5, 1e-6 / tau)
    close(found, wanted, tolerance)
    if not shared:
        close(found, slopes(loss_of(mixture.loss, v, items, logits, kappa, at, tau)), tolerance)
    if not own:
        log_sigma = mixture.log_sigma(everything, items[at[0]][at[1]], kappa, KERNEL)
        log_p = shared_log_components(u, items[at[0]], at[1], tau, at[0], at[2])
        close(found, slopes(-mixture.elbo(logits.log_softmax(-1), log_sigma, log_p).total.mean()), tolerance)


def test_gradcheck():
    (u, v, items, logits, kappa), at = inputs_of(3, 2, B=3, C=7)
    assert torch.autograd.gradcheck(
        lambda u, v, *more: loss_of(mixture.loss, Both(u, v), *more, at, 0.3), (u, v, items, logits, kappa)
    )


@pytest.mark.parametrize("tau", [0.5, 0.07, 0.003])
@pytest.mark.parametrize(("shared", "own"), [(3, 2), (4, 0), (0, 3)])
def test_all_targets_of_both_kinds_are_the_plain_steps(shared, own, tau):
    c = case(k=shared + own)
    u, v = unit(shared, 6, dtype=torch.float64), unit(5, own, 6, dtype=torch.float64)
    variables = [x.requires_grad_() for x in (u, v, c["table"].clone(), c["log_pi"].clone(), c["kappa"].clone())]
    u, v, table, log_pi, kappa = variables
    targets = targets_of(c, table)
    log_sigma = KERNEL.log_density(targets.logits(Both(u, v), 1.0), kappa[:, None], 6)
    loss, seen, gamma = mixture.loss_of_all(Both(u, v), table[c["ids"]], targets, log_pi, log_sigma, tau)
    wanted = plain_of_all("elbo", c, Both(u, v).expand(), table, log_pi, kappa, tau)
    found, slopes = ((x, *torch.autograd.grad(x, variables, allow_unused=True)) for x in (loss, wanted))
    for a, b in zip(found, slopes, strict=True):
        assert (a - b).abs().max() <= 1e-9 * max(1.0, b.abs().max().item()) if b is not None and b.numel() else True
    torch.testing.assert_close(seen.total.mean(), -loss)
    torch.testing.assert_close(gamma.sum(-1), torch.ones(5, dtype=torch.float64))


# ------------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("name", HYBRIDS)
def test_the_step_of_the_model_is_the_plain_loss_of_what_it_encodes(world, name):
    model = away_from_the_start(build(name, world, k_shared=5, k_own=2, **STILL).double())
    history, positive, negatives = batch_of(world)
    positive[1] = positive[0]
    seen, ids = model.objective(history, positive, negatives), torch.cat([positive, negatives])
    heads, log_pi, kappa = model.encode(history)
    assert heads.shape == (32, 7, 16) and (heads[0, :5] == heads[1, :5]).all() and (heads[0, 5:] != heads[1, 5:]).all()
    assert kappa.shape == (32, 7) and (kappa[0, :5] == kappa[1, :5]).all() and (kappa[0, 5:] != kappa[1, 5:]).all()
    items, own = model.items(ids), torch.arange(32)
    log_sigma = mixture.log_sigma(heads, items[own], kappa, model.kernel)
    (found, slopes), (wanted, plain) = (
        loss_and_slopes(model, loss)
        for loss in (seen.loss, mixture.plain_loss(heads, items, own, log_pi, log_sigma, model.tau, ids))
    )
    close([found, *slopes], [wanted, *plain], 1e-8)
    torch.testing.assert_close(seen.gamma, mixture.responsibilities(log_pi, log_sigma).exp())
    torch.testing.assert_close(-sum(seen.terms.values()), seen.loss.detach())
    torch.testing.assert_close(
        model.score(history), mixture.log_density(heads, model.items(), log_pi, kappa, model.kernel)
    )


SWITCHES = [{}, {"posterior": "contrastive"}, {"posterior": "prior"}, {"kappa": "shared", "temper": 0.6},
            {"through_gamma": False, "pi": "uniform"}, {"false_negatives": "next"},
            {"false_negatives": "next", "tau": 0.01}]  # fmt: skip


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("switches", SWITCHES)
def test_the_step_with_every_switch_is_the_plain_one(world, switches, every):
    of_model = {**STILL, **{name: x for name, x in switches.items() if name != "false_negatives"}}
    model = away_from_the_start(build("p-bach-hybrid", world, k_shared=5, k_own=2, **of_model).double())
    history, positive, negatives = (x[:10] for x in batch_of(world))
    following = torch.from_numpy(next(iter(Windows(world, 10, following=True))).following)
    also = {"targets": following} if every else {}
    also |= {"following": following} if "false_negatives" in switches else {}
    found, slopes = loss_and_slopes(model, model.objective(history, positive, negatives, **also).loss)
    wanted, plain = loss_and_slopes(model, plain_step_loss(model, history, positive, negatives, **also))
    close([found, *slopes], [wanted, *plain], 1e-7)


@pytest.mark.parametrize("name", HYBRIDS)
def test_without_own_heads_it_is_the_codebook(world, name):
    """The same first weights, the same loss and gradients, the same scores; only the name of the method differs."""
    history, positive, negatives = batch_of(world)
    hybrid = build(name, world, k_shared=5, k_own=0, **STILL)
    shared = build(name.replace("hybrid", "global"), world, 5, **STILL)
    assert hybrid.k == 5 and hybrid.config["params"]["k"] == 5
    found, wanted = (loss_and_slopes(m, m.loss(history, positive, negatives)) for m in (hybrid, shared))
    assert found[0] == wanted[0] and all(map(torch.equal, found[1], wanted[1]))
    assert torch.equal(hybrid.score(history), shared.score(history))


@pytest.mark.parametrize("name", HYBRIDS)
def test_prototypes_without_weight_leave_the_personal_model(world, name):
    """π on the own heads only: loss, gradients and scores of the personal model with these heads."""
    history, positive, negatives = batch_of(world)
    hybrid = away_from_the_start(build(name, world, k_shared=5, k_own=3, **STILL).double())
    personal = build(name.replace("-hybrid", ""), world, 3, **STILL).double()
    with torch.no_grad():
        hybrid.gate.head.bias[:5] = -1e4
        state = {n.replace("encoder.tower.", "encoder."): x for n, x in hybrid.state_dict().items() if "proto" not in n}
        state |= {f"gate.head.{n}": state[f"gate.head.{n}"][5:] for n in ("weight", "bias")}
    personal.load_state_dict(state)
    loss, slopes = loss_and_slopes(hybrid, hybrid.loss(history, positive, negatives))
    wanted, others = loss_and_slopes(personal, personal.loss(history, positive, negatives))
    torch.testing.assert_close(loss, wanted)
    named = dict(zip([n for n, _ in personal.named_parameters()], others, strict=True))
    for (n, _), slope in zip(hybrid.named_parameters(), slopes, strict=True):
        if "proto" in n:
            assert not slope.any()
        elif (n := n.replace("encoder.tower.", "encoder.")).startswith("gate.head"):
            torch.testing.assert_close(slope[5:], named[n])
        else:
            torch.testing.assert_close(slope, named[n])
    torch.testing.assert_close(hybrid.score(history), personal.score(history))


def test_the_kappa_net_sees_a_prototype_once(world):
    model, seen = build("p-bach-hybrid", world, k_shared=5, k_own=2, **STILL), []
    model.kappa_net.register_forward_hook(lambda _, given, out: seen.append(tuple(given[0].shape)))
    model.loss(*batch_of(world))
    assert seen == [(5, 16), (32, 2, 16)]


def test_the_watch_counts_the_gradient_of_both_kinds(world):
    model, watch = build("p-bach-hybrid", world, k_shared=5, k_own=2, **STILL), Watch(7, torch.device("cpu"))
    seen = model.objective(*batch_of(world))
    slopes = torch.autograd.grad(seen.loss, tuple(seen.heads), retain_graph=True)
    watch.look(seen)
    seen.loss.backward()
    wanted = torch.cat([slopes[0].norm(dim=-1), slopes[1].norm(dim=-1).sum(0)]).double()
    np.testing.assert_allclose(watch.row()["gradient"], wanted / wanted.sum(), rtol=1e-6)


@pytest.mark.parametrize("targets", ["one", "all"])
def test_stopped_and_resumed_to_the_bit(world, tmp_path, targets):
    params, both = {**QUICK, "epochs": 2, "log_steps": 10, "targets": targets}, {"k_shared": 4, "k_own": 2}
    whole = fit(model_of(world, "p-bach-hybrid", **both), world, params, tmp_path / "whole", quiet=True)
    model, steps = model_of(world, "p-bach-hybrid", **both), []
    objective = model.objective

    def interrupted(*args, **also):
        steps.append(0)
        if len(steps) == 37:
            signal.raise_signal(signal.SIGINT)
        return objective(*args, **also)

    model.objective = interrupted
    assert fit(model, world, params, tmp_path / "parts", quiet=True).status == "stopped"
    again = model_of(world, "p-bach-hybrid", seed=0, **both)
    same_run(fit(again, world, params, tmp_path / "parts", quiet=True), whole)


@pytest.mark.parametrize("candidates", ["list", "set"])
def test_parts_of_a_batch_have_the_candidates_of_the_whole(world, candidates):
    """What several processes do: the positives of the other rows are among the negatives."""
    history, positive, negatives = batch_of(world)
    positive[20:24] = positive[0]
    both = {"k_shared": 4, "k_own": 2, "candidates": candidates}
    model = away_from_the_start(build("p-bach-hybrid", world, **both, **STILL).double())
    halves = [
        model.loss(history[mine], positive[mine], torch.cat([positive[others], negatives]))
        for mine, others in ((slice(16), slice(16, 32)), (slice(16, 32), slice(16)))
    ]
    torch.testing.assert_close(sum(halves) / 2, model.loss(history, positive, negatives))


def test_a_hybrid_with_a_hard_rule(world):
    model = build(Method("codebook-hybrid", "all-multihead", "max over heads"), world, k_shared=3, k_own=2, **STILL)
    history, positive, negatives = batch_of(world)
    assert model.loss(history, positive, negatives).isfinite() and model.encode(history).kappa.shape == (32, 5)
    following = torch.from_numpy(next(iter(Windows(world, 32, following=True))).following)
    assert model.objective(history, positive, negatives, targets=following).loss.isfinite()


def test_what_is_refused_and_what_stays_the_same(world):
    for wrong, said in (({"k_shared": 0}, "k_shared: Input should be greater than or equal to 1, got 0"),
                        ({"k_own": -1}, "k_own: Input should be greater than or equal to 0, got -1")):  # fmt: skip
        with pytest.raises(BachError, match=said):
            build("p-bach-hybrid", world, **wrong)
        with pytest.raises(BachError, match=said):
            experiment_of({"method": "p-bach-hybrid", **wrong}, "mine")
    assert not {"k_shared", "k_own"} & build("p-bach", world).config["params"].keys()
    name = run_name(experiment_of({"method": "p-bach-hybrid", "k": 3, "k_own": 2}, "mine"))
    assert name.startswith("p-bach-hybrid-planted") and "-k66-s0-" in name
    assert ModelParams().k_shared + ModelParams().k_own == build("p-bach-hybrid", world, d=8).k
