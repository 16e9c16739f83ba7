"""The ablations: each switch against a plain twin, its limit cases, training, resume, several processes, refusals."""

import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_methods import LEARNT, away_from_the_start, batch_of, loss_and_slopes
from test_methods import SMALL as STILL
from test_mixture import case, gradients
from test_targets import case as case_of_all
from test_targets import targets_of
from test_train import QUICK, model_of, same_run

from bachlib import BachError
from bachlib.data import Windows
from bachlib.experiment.settings import Experiment, experiment_of
from bachlib.experiment.sweep import AXES
from bachlib.model import candidates, mixture, neighbours, onepass
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


SAMPLING = [("following",), ("expected",), ("following", "expected")]


@pytest.mark.parametrize("as_set", [False, True])
@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize(
    ("switches", "also"), [*((x, ()) for x in MODEL), *(({}, x) for x in SAMPLING), (MODEL[1], SAMPLING[2])], ids=str
)
def test_the_fast_step_is_the_plain_one(world, switches, every, as_set, also):
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


@pytest.mark.parametrize("name", [*LEARNT])
@pytest.mark.parametrize("as_set", [False, True])
def test_all_targets_are_the_mean_of_single_ones(world, name, as_set, monkeypatch):
    """Every method, with next items left out and weights by expected counts, also a codebook with a small τ."""
    monkeypatch.setattr(neighbours, "draw", lambda gamma: gamma.argmax(-1))
    history, positive, negatives, following = step_of(world)
    also = {"expected": expected_of(world)}
    params = STILL | {"tau": 0.01 if as_set else 0.07, "candidates": "set" if as_set else "list"}
    model = away_from_the_start(build(name, world, 3, **params).double())
    seen = model.objective(history, positive, negatives, targets=following, following=following, **also)
    mean = 0.0
    for n, of_row in enumerate(following):
        others = torch.cat([positive[:n], positive[n + 1 :], negatives])
        there = of_row[of_row >= 0]
        steps = [model.objective(history[[n]], m[None], others, following=following[[n]], **also).loss for m in there]
        mean = mean + sum(steps) / len(there) / 6
    close(loss_and_slopes(model, seen.loss), loss_and_slopes(model, mean))


def test_what_a_row_leaves_out_by_hand(world):
    """Each candidate's weight in each row, from the draws themselves."""
    _, positive, negatives, following = step_of(world)
    q = expected_of(world)
    for as_set in (False, True):
        drawn = candidates.candidates_of(positive, negatives, world.n_items, as_set, following, q)
        weights = drawn.weights(torch.zeros(1, dtype=torch.float64))
        found = mixture.log_weights(None, drawn.own, weights).exp()  # (B, C)
        draws = [*positive.tolist(), *negatives.tolist()]
        assert sorted(set(draws)) == sorted(drawn.ids.tolist())
        for n in range(6):
            for j, item in enumerate(drawn.ids.tolist()):
                times = 1 if as_set or item == positive[n] else draws.count(item)
                left_out = item in following[n] and item != positive[n]
                often = 1 - np.exp(-q[item].item()) if as_set else q[item].item()
                assert found[n, j].item() == pytest.approx(0 if left_out else times / often)


# ------------------------------------------------------------------------------------------------------- limit cases


def in_parts(seed=0):
    c = case(seed=seed)
    log_p = mixture.log_components(c["heads"], c["items"], c["positive"], 0.07, c["ids"]).detach()
    return c, log_p


def test_ems_bound_is_tight():
    """γ^con: the bound is log Σ_r π_r p_r, in value and gradient, whether or not the gradient goes through γ."""
    c, log_p = in_parts()
    seen = mixture.elbo(c["log_pi"], c["log_sigma"], log_p, Bound("contrastive"))
    torch.testing.assert_close(seen.total, mixture.log_likelihood(c["log_pi"], log_p))
    paper = mixture.elbo(c["log_pi"], c["log_sigma"], log_p)
    torch.testing.assert_close(seen.total - paper.total, mixture.kl_gap(c["log_pi"], c["log_sigma"], log_p))

    def likelihood(heads, items, positive, log_pi, log_sigma, tau, ids):
        return -mixture.log_likelihood(log_pi, mixture.log_components(heads, items, positive, tau, ids)).mean()

    c["tau"], names = 0.07, ["heads", "items", "log_pi"]
    wanted = gradients(likelihood, c, names)
    for through in (True, False):
        close(gradients(mixture.loss, c | {"bound": Bound("contrastive", through)}, names), wanted)


@pytest.mark.parametrize("posterior", ["spherical", "prior"])
def test_gamma_held_fixed(posterior):
    """The same value; the gradient is the M-step's, Σ γ (log π + log p) with the numbers γ."""
    c, _ = in_parts()
    c["tau"], names = 0.07, ["heads", "items", "log_pi", "log_sigma"]
    paper, fixed = (of(mixture.loss, c | {"bound": Bound(posterior, through)}, names) for through in (True, False))
    assert fixed[0] == paper[0]

    def m_step(heads, items, positive, log_pi, log_sigma, tau, ids):
        gamma = Bound(posterior).log_gamma(c["log_pi"], c["log_sigma"], None).exp()
        return -(gamma * (log_pi + mixture.log_components(heads, items, positive, tau, ids))).sum(-1).mean()

    for a, b in zip(fixed[1], of(m_step, c, names)[1], strict=True):
        torch.testing.assert_close(a, b)
    assert not fixed[1][3].any() and not torch.allclose(fixed[1][2], paper[1][2])


def test_the_prior_as_posterior_and_the_temper_by_hand():
    c, log_p = in_parts()
    seen = mixture.elbo(c["log_pi"], c["log_sigma"], log_p, Bound("prior"))
    torch.testing.assert_close(seen.total, (c["log_pi"].exp() * log_p).sum(-1))  # prior and entropy cancel
    paper = mixture.elbo(c["log_pi"], c["log_sigma"], log_p)
    for temper in (0.0, 0.5, 1.0, 3.0):
        found = mixture.elbo(c["log_pi"], c["log_sigma"], log_p, Bound(temper=temper))
        torch.testing.assert_close(found.total, paper.total + (temper - 1) * paper.entropy)
        torch.testing.assert_close(found.entropy, temper * paper.entropy)


def test_the_papers_values_are_the_defaults_to_the_bit(world):
    usual = {"posterior": "spherical", "through_gamma": True, "temper": 1.0, "kappa": "net", "pi": "gate"}
    history, positive, negatives, _ = step_of(world)
    models = [away_from_the_start(build("p-bach", world, 3, **STILL, **x)) for x in ({}, usual)]
    assert models[0].config == models[1].config
    found = [loss_and_slopes(model, model.loss(history, positive, negatives)) for model in models]
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("name", ["p-bach", "v-bach-global", "p-bach-residual"])
def test_one_kappa_is_the_net_with_a_constant(world, name):
    """At the start all three are 1/τ to the bit; later a learnt κ is the net's bias, and its gradient is the bias's."""
    history, positive, negatives, _ = step_of(world)
    net, shared, fixed = (build(name, world, 3, kappa=kappa, **STILL) for kappa in ("net", "shared", "fixed"))
    assert not fixed.kappa_net.log_kappa.requires_grad and fixed.encode(history).kappa.shape == (6, 3)
    losses = [model.loss(history, positive, negatives) for model in (net, shared, fixed)]
    assert losses[0] == losses[1] == losses[2]
    with torch.no_grad():
        net.kappa_net.net[4].bias.fill_(1.7)
        shared.kappa_net.log_kappa.fill_(1.7)
    for model in (net, shared):
        model.loss(history, positive, negatives).backward()
    torch.testing.assert_close(shared.kappa_net.log_kappa.grad, net.kappa_net.net[4].bias.grad[0])
    assert shared.kappa_net.log_kappa.grad.abs() > 1e-6
    torch.testing.assert_close(shared.score(history), net.score(history))


def test_uniform_pi_is_a_gate_of_zeros(world):
    history, positive, negatives, _ = step_of(world)
    gate, uniform = (away_from_the_start(build("p-bach", world, 3, pi=pi, **STILL)) for pi in ("gate", "uniform"))
    with torch.no_grad():
        gate.gate.head.weight.zero_(), gate.gate.head.bias.zero_()
    gate.load_state_dict(uniform.state_dict(), strict=False)
    assert uniform.gate is None and torch.equal(uniform.log_pi(history), gate.log_pi(history))
    assert uniform.loss(history, positive, negatives) == gate.loss(history, positive, negatives)
    assert torch.equal(uniform.score(history), gate.score(history))


# --------------------------------------------------------------------------------------------------------------- log q


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("as_set", ["list", "set"])
@pytest.mark.parametrize("name", ["p-bach", "v-bach-global", "standard", "pos-multihead", "all-multihead", "mind"])
def test_uniform_sampling_needs_no_correction(world, name, as_set, every):
    """Equal expected counts are a constant in every logit, which no softmax sees."""
    history, positive, negatives, following = step_of(world)
    model = away_from_the_start(build(name, world, 3, candidates=as_set, **STILL).double())
    targets = following if every else None
    equal = torch.full((world.n_items,), 0.3, dtype=torch.float64)
    losses = [
        model.objective(history, positive, negatives, targets=targets, expected=q).loss
        for q in (None, equal, expected_of(world))
    ]
    plain, same, other = (loss_and_slopes(model, loss) for loss in losses)
    close(same, plain)
    assert abs(other[0] - plain[0]) > 1e-3


def test_shares_of_targets_against_all_windows(world):
    for data in (world, world.strict(0.3, 0)):
        windows = Windows(data, 64)
        _, _, following = windows.window(np.arange(len(windows)))
        counts = np.bincount(following.ravel(), minlength=world.n_items)
        np.testing.assert_allclose(windows.target_shares(), counts / counts.sum(), atol=1e-15)


def test_expected_counts_are_those_of_the_sampler(world, tmp_path):
    """What `fit` passes on, against counts of what it draws: each row's candidates, its own slot apart."""
    model, seen, given = model_of(world, "standard"), np.zeros(world.n_items), []
    objective, rows = model.objective, []

    def counted(history, positive, negatives, user, **also):
        draws = np.bincount(torch.cat([positive, negatives]).numpy(), minlength=world.n_items)
        seen[:] += len(positive) * draws - np.bincount(positive.numpy(), minlength=world.n_items)
        rows.append(len(positive))
        given.append(also["expected"])
        return objective(history, positive, negatives, user, **also)

    model.objective = counted
    fit(model, world, {**QUICK, "epochs": 3, "log_q": True}, tmp_path, quiet=True)
    expected = given[0].numpy()
    assert all(q is given[0] for q in given) and expected.sum() == pytest.approx(255 + 64)
    often = expected > 0.7
    np.testing.assert_allclose(seen / sum(rows), expected, rtol=0.6, atol=0.12)
    assert (seen / sum(rows))[often].mean() == pytest.approx(expected[often].mean(), rel=0.03)


def test_corrected_scores_are_log_probabilities():
    """Scores log P(j | u) have no gradient in expectation with the correction, and have one without it."""
    rng, n, B, M = np.random.default_rng(0), 30, 16, 10
    share, wanted = rng.dirichlet(np.full(n, 3.0)), rng.dirichlet(np.full(n, 2.0))
    q = torch.from_numpy((B - 1) * share + M / n)
    scores, slopes = torch.from_numpy(wanted).log(), {True: [], False: []}
    for _ in range(3_000):
        target = rng.choice(n, p=wanted)
        positive = torch.tensor([target])
        others = torch.from_numpy(np.r_[rng.choice(n, B - 1, p=share), rng.integers(n, size=M)])
        for corrected, found in slopes.items():
            drawn = candidates.candidates_of(positive, others, n, True, None, q if corrected else None)
            logits = mixture.log_weights(None, drawn.own, drawn.weights(q))[0] + scores[drawn.ids]
            slope = torch.zeros(n, dtype=torch.float64)
            slope[drawn.ids] = logits.softmax(0)
            slope[target] -= 1
            found.append(slope)
    z = {corrected: torch.stack(x).mean(0) / torch.stack(x).std(0) * 3_000**0.5 for corrected, x in slopes.items()}
    assert z[True].abs().max() < 4 and z[False].abs().max() > 6
    assert np.corrcoef(z[False].numpy(), share)[0, 1] > 0.5  # without it popular items are pushed down


# ------------------------------------------------------------------------------------------------------------ training


@pytest.mark.parametrize("name", ["p-bach", "v-bach-global", "p-bach-residual"])
@pytest.mark.parametrize("switches", [*MODEL, {"pi": "table"}], ids=str)
def test_every_switch_trains(world, name, switches):
    history, positive, negatives, _ = step_of(world, 32)
    model = build(name, world, 3, **STILL, **switches).train()
    optimizer, losses, user = torch.optim.Adam(model.parameters(), 3e-3), [], torch.arange(32)
    for _ in range(15):
        optimizer.zero_grad()
        losses.append(model.objective(history, positive, negatives, user).loss)
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.3
    trained = {n.split(".")[0] for n, q in model.named_parameters() if q.grad is not None and q.grad.any()}
    bound = model.bound
    assert ("kappa_net" in trained) == (
        bound.posterior == "spherical" and bound.through_gamma and switches.get("kappa") != "fixed"
    )
    assert ("gate" in trained) == (switches.get("pi") != "uniform")


CHOSEN = {"posterior": "contrastive", "temper": 0.5, "pi": "uniform"}, {"kappa": "shared", "temper": 2.0}
DRAWN = {"log_q": True, "false_negatives": "next"}


@pytest.mark.parametrize(("switches", "targets"), [(CHOSEN[0], "one"), (CHOSEN[1], "all")])
def test_a_training_resumes_to_the_bit(world, tmp_path, switches, targets):
    params = {**QUICK, **DRAWN, "epochs": 2, "log_steps": 10, "targets": targets}
    whole = fit(model_of(world, **switches), world, params, tmp_path / "whole", quiet=True)
    model, steps = model_of(world, **switches), []
    objective = model.objective

    def interrupted(*args, **also):
        steps.append(0)
        if len(steps) == 37:
            signal.raise_signal(signal.SIGINT)
        return objective(*args, **also)

    model.objective = interrupted
    assert fit(model, world, params, tmp_path / "parts", quiet=True).status == "stopped"
    same_run(fit(model_of(world, seed=0, **switches), world, params, tmp_path / "parts", quiet=True), whole)
    loaded = Run.load(tmp_path / "parts", world).model
    assert loaded.bound == model.bound and loaded.config == model.config


@pytest.mark.parametrize("every", [False, True])
@pytest.mark.parametrize("name", ["p-bach", "p-bach-global", "all-multihead", "pos-multihead"])
def test_parts_of_a_batch_have_the_candidates_of_the_whole(world, name, every):
    """What several processes do: each has its own rows and next items, and the draws of the others as negatives."""
    history, positive, negatives = batch_of(world)
    following = torch.from_numpy(next(iter(Windows(world, 32, following=True))).following)
    model = away_from_the_start(build(name, world, 3, **STILL).double())

    def loss_of(mine, negatives):
        also = {"following": following[mine], "expected": expected_of(world)}
        also |= {"targets": following[mine]} if every else {}
        return model.objective(history[mine], positive[mine], negatives, **also).loss

    parts = (slice(16), slice(16, 32)), (slice(16, 32), slice(16))
    halves = [loss_of(mine, torch.cat([positive[others], negatives])) for mine, others in parts]
    torch.testing.assert_close(sum(halves) / 2, loss_of(slice(32), negatives))


def test_shared_heads_with_left_out_items_and_a_small_tau():
    """One product for the batch where exponentials fit; the personal sweep where they do not."""
    for tau in (0.5, 0.07):
        c = case(B=6, k=4, C=40, n_ids=12)
        left_out = tuple(((torch.rand(6, 40) < 0.3) & (torch.arange(40) != torch.arange(6)[:, None])).nonzero().T)
        weights = candidates.Weights(torch.rand(40).double() + 0.1, torch.rand(6).double() + 0.1, left_out)
        found = shared_log_components(c["heads"][0], c["items"], c["positive"], tau, c["ids"], weights)
        everybody = c["heads"][:1].expand(6, -1, -1)
        wanted = mixture.log_components(everybody, c["items"], c["positive"], tau, c["ids"], weights)
        torch.testing.assert_close(found, wanted)


# ---------------------------------------------------------------------------------------------------------- parameters


def test_they_are_parameters_that_came_later():
    names = {"posterior", "through_gamma", "temper", "kappa", "log_q", "false_negatives"}
    assert names <= {*LATER} and names | {"pi"} <= AXES
    assert not names & {*noted(ModelParams()), *noted(TrainParams())}
    p = Experiment(posterior="contrastive", log_q=True, pi="uniform")
    assert noted(ModelParams(**p.model))["posterior"] == "contrastive" and noted(TrainParams(**p.train))["log_q"]


REFUSED = [
    ({"method": "standard", "posterior": "contrastive"}, "standard'? has no kernel, so no ELBO"),
    ({"method": "all-multihead", "through_gamma": False}, "all-multihead'? has no kernel, so no ELBO"),
    ({"method": "mostpop", "temper": 0.5}, "mostpop'? has no kernel"),
    ({"method": "mind", "kappa": "fixed"}, "mind'? has no kernel"),
    ({"method": "sasrec", "pi": "uniform"}, "sasrec'? has no kernel"),
    ({"posterior": "prior", "through_gamma": False}, "would never train π_u"),
    ({"posterior": "contrastive", "kappa": "shared"}, "only the spherical posterior trains κ"),
    ({"through_gamma": False, "temper": 0.5}, "a fixed γ has no entropy to train"),
    ({"temper": -1}, "temper: Input should be greater than or equal to 0"),
    ({"posterior": "em"}, "posterior: Input should be 'spherical', 'contrastive' or 'prior'"),
]


@pytest.mark.parametrize(("values", "told"), REFUSED)
def test_what_cannot_go_together_is_refused_by_name(world, values, told):
    given = {"method": "p-bach", **values}
    with pytest.raises(BachError, match=told):
        build(given.pop("method"), world, **given)
    with pytest.raises(BachError, match=told) as error:
        experiment_of(values, "my.yaml")
    assert any(name in str(error.value) for name in values if name != "method")


def test_wrong_input_of_a_step(world):
    history, positive, negatives, following = step_of(world)
    model = build("p-bach", world, 3, **STILL)
    for q in (torch.ones(7), torch.zeros(world.n_items)):
        with pytest.raises(BachError, match=r"expected should be \(600,\): how often each item is drawn, above 0"):
            model.objective(history, positive, negatives, expected=q)
    with pytest.raises(BachError, match=r"following should be \(6, M\) item ids"):
        model.objective(history, positive, negatives, following=following[:3])
    with pytest.raises(BachError, match="pi='uniform' has no gate: leave out gate="):
        build("p-bach", world, 3, pi="uniform", gate=model.gate, **STILL)
