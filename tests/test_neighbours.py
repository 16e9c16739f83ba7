"""remi, bam and maxmf: against plain twins, in their limits, and against what they were published as."""

import signal
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_methods import SMALL as STILL
from test_methods import Mlp, away_from_the_start, batch_of, loss_and_slopes
from test_mixture import plain_neighbour
from test_targets import case, targets_of
from test_train import QUICK, same_run
from torch.nn.functional import one_hot, softplus

from bachlib import BachError
from bachlib.data import Windows
from bachlib.experiment.settings import Experiment
from bachlib.model import candidates, mixture, neighbours, onepass
from bachlib.model.candidates import Targets
from bachlib.model.methods import METHODS, Method, build
from bachlib.model.sphere import KERNELS
from bachlib.params import ModelParams, noted
from bachlib.train import fit

RULES = ["remi, 0", "remi, 1", "remi, 10", "maxmf, hinge", "maxmf, warp", "maxmf, bpr"]


def options(rule):
    name, option = rule.split(", ")
    return name, float(option) if name == "remi" else 1.0, option


def fast(rule, c, heads, table, tau):
    name, beta, kind = options(rule)
    return neighbours.of_all(name, heads, table[c["ids"]], targets_of(c, table), tau, beta, kind)[0]


def plain(rule, c, heads, table, tau):
    """The mean over rows and targets of the plain loss, with the target in the place of the row's draw."""
    (name, beta, kind), total = options(rule), 0.0
    for n, of_row in enumerate(c["items"].tolist()):
        there = [item for item in of_row if item >= 0]
        for item in there:
            ids = c["ids"].clone()
            ids[n] = item
            loss = plain_neighbour(name, heads[[n]], table[ids], torch.tensor([n]), tau, ids, beta, kind)
            total = total + loss / len(there) / len(c["items"])
    return total


def value_and_slopes(function, rule, c, tau):
    inputs = [c[name].clone().requires_grad_() for name in ("heads", "table")]
    value = function(rule, c, *inputs, tau)
    return value, torch.autograd.grad(value, inputs)


@settings(max_examples=60, deadline=None)
@given(
    rule=st.sampled_from(RULES),
    B=st.integers(1, 6),
    M=st.integers(1, 5),
    k=st.integers(1, 4),
    extra=st.integers(1, 25),
    tau=st.sampled_from([0.5, 0.07, 0.02, 0.003]),
    block=st.sampled_from([1, 50, 1 << 19]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_one_pass_equals_the_plain_twin(rule, B, M, k, extra, tau, block, dtype, seed):
    c = case(B, M, k, C=B + extra, dtype=torch.float64, seed=seed)
    given = {name: x.to(dtype) if x.is_floating_point() else x for name, x in c.items()}
    before, onepass.BLOCK = onepass.BLOCK, block
    try:
        value, slopes = value_and_slopes(fast, rule, given, tau)
    finally:
        onepass.BLOCK = before
    exact = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
    expected, expected_slopes = value_and_slopes(plain, rule, exact, tau)
    tolerance = 1e-10 if dtype == torch.float64 else max(1e-4, 2e-5 / tau)  # β = 10 makes a logit's rounding eleven
    assert abs(value - expected) <= tolerance * max(1, abs(expected.item()))
    for found, wanted in zip(slopes, expected_slopes, strict=True):
        assert (found - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item())


def test_weights_are_copies():
    """Distinct candidates with their counts as weights: values and gradients of the list of all draws."""
    for rule in RULES:
        c = case(B=6, k=3, C=40)
        ids, row = candidates.each_once(c["ids"], 9)
        counts = torch.bincount(row).double()
        once = c | {"ids": ids, "counted": (counts, row[:6], counts[row[:6]] - 1)}
        wanted, expected = value_and_slopes(fast, rule, c, 0.07)
        value, slopes = value_and_slopes(fast, rule, once, 0.07)
        torch.testing.assert_close(value, wanted)
        for a, b in zip(slopes, expected, strict=True):
            torch.testing.assert_close(a, b)


def test_gradcheck_and_second_derivatives():
    c = case(B=3, M=3, k=2, d=4, C=8)
    for rule in RULES:
        inputs = [c[name].clone().requires_grad_() for name in ("heads", "table")]
        assert torch.autograd.gradcheck(lambda heads, table, rule=rule: fast(rule, c, heads, table, 0.5), inputs)
        with pytest.raises(BachError, match="no second derivatives"):
            torch.autograd.grad(fast(rule, c, *inputs, 0.5), inputs[0], create_graph=True)


# ---------------------------------------------------------------------------------------------------------------- bam


@pytest.mark.parametrize(("B", "M"), [(4, 1), (2, 2)])
def test_bams_mean_over_draws_is_the_elbos_reconstruction(B, M, monkeypatch):
    """The gradient for each of the 81 outcomes of the draws, weighted by its probability: eq. 22 with a constant γ.

    It is BACH's own γ (eq. 19) where the kernel is von Mises–Fisher, κ = 1/τ and π is uniform.
    """
    c, tau, mean = case(B, M, k=3), 0.3, []
    heads, table = (c[name].requires_grad_() for name in ("heads", "table"))
    targets, items = targets_of(c, table), table[c["ids"]]
    with torch.no_grad():
        log_sigma = KERNELS["von-mises-fisher"].log_density(targets.logits(heads, 1.0), torch.tensor(1 / tau), 6)
        gamma = mixture.responsibilities(torch.full_like(log_sigma, -np.log(3)), log_sigma).exp()
    for outcome in torch.cartesian_prod(*[torch.arange(3)] * (B * M)).view(-1, B, M):

        def draw(asked, outcome=outcome):
            torch.testing.assert_close(asked, gamma)
            return outcome

        monkeypatch.setattr(neighbours, "draw", draw)
        loss, shares = neighbours.of_all("bam", heads, items, targets, tau, 1.0, "hinge")
        torch.testing.assert_close(shares, one_hot(outcome, 3).double().mean(1))
        mean.append(gamma.gather(2, outcome[..., None]).prod() * loss)
    wanted = -onepass.reconstruction_of_all(heads, items, targets, gamma / M, tau)[0] / B
    torch.testing.assert_close(sum(mean), wanted)
    for a, b in zip(
        *(torch.autograd.grad(x, (heads, table), retain_graph=True) for x in (sum(mean), wanted)), strict=True
    ):
        torch.testing.assert_close(a, b)


def test_bam_draws_with_these_probabilities():
    torch.manual_seed(0)
    gamma = torch.tensor([[0.7, 0.3, 0.0], [0.05, 0.9, 0.05]])
    counts = one_hot(neighbours.draw(gamma.expand(20_000, 2, 3)), 3).float().mean(0)
    assert (counts - gamma).abs().max() < 0.015 and (counts[gamma == 0] == 0).all()


def test_bam_with_one_head_is_the_plain_softmax(world):
    models = [build(name, world, 1, **STILL).double() for name in ("bam", "standard", "pos-multihead")]
    batch = batch_of(world)
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
        torch.testing.assert_close(model.loss(*batch), models[0].loss(*batch))


# -------------------------------------------------------------------------------------------------------------- maxmf


def test_maxmf_by_hand():
    """Two heads, the best of which is another one for each item; differences of logits 0.6 and −2.4, then −0.4."""
    heads = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    items = torch.tensor([[0.8, 0.6], [0.28, 0.96], [-0.6, -0.8], [0.6, 0.8]], dtype=torch.float64)
    s, tau = [0.8, 0.96, -0.6, 0.8], 0.2
    x = [(score - s[0]) / tau for score in s[1:]]
    first, ones = torch.tensor([0]), items.new_ones(4)
    targets = Targets(torch.arange(4), ones, first, ones[:1], first[:, None], items[first][:, None])
    above = [1 + value for value in x if value > -1]
    assert len(above) == 2
    wanted = {
        "hinge": sum(above) / 3,
        "warp": (1 + 1 / 2) * sum(above) / 2,
        "bpr": sum(softplus(torch.tensor(value, dtype=torch.float64)).item() for value in x) / 3,
    }
    for kind, value in wanted.items():
        assert neighbours.of_all("maxmf", heads, items, targets, tau, 1.0, kind)[0].item() == pytest.approx(value)


def test_warp_is_the_expectation_of_its_draw():
    """WSABIE draws a violating negative and weights its hinge by 1 + 1/2 + … + 1/rank."""
    x, s = torch.randn(1, 50, dtype=torch.float64), torch.tensor([0.3], dtype=torch.float64)
    value, *_ = neighbours.against_each(x, torch.ones_like(x), s, s, "warp")
    hinge = [1 + float(score - s) for score in x[0] if score > s - 1]
    weight = sum(1 / rank for rank in range(1, len(hinge) + 1))
    assert value.item() == pytest.approx(np.mean([weight * h for h in hinge]), rel=1e-10) and 5 < len(hinge) < 50
    far = torch.tensor([9.0], dtype=torch.float64)
    for kind in ("hinge", "warp"):  # the margin is kept: no loss, no gradient
        for dtype in (torch.float32, torch.float64):
            value, to_x, to_s = neighbours.against_each(
                x.to(dtype), torch.ones(1, 50, dtype=dtype), *[far.to(dtype)] * 2, kind
            )
            assert value == 0 and not to_x.any() and not to_s.any()


# --------------------------------------------------------------------------------------------------------------- remi


def test_remi_without_its_two_parts_is_comirec_sa(world):
    remi = build("remi", world, 3, remi_beta=0, remi_lambda=0, **STILL).double()
    sa = build("comirec-sa", world, 3, **STILL).double()
    away_from_the_start(remi)
    sa.load_state_dict(remi.state_dict())
    batch = batch_of(world)
    (a, slopes), (b, others) = loss_and_slopes(remi, remi.loss(*batch)), loss_and_slopes(sa, sa.loss(*batch))
    torch.testing.assert_close(a, b)
    for x, y in zip(slopes, others, strict=True):
        torch.testing.assert_close(x, y)


def test_hard_negatives_in_the_limit():
    """As β grows, all N negatives become copies of the hardest one."""
    x, s = torch.randn(4, 30, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    hardest = torch.nn.functional.softplus(x.amax(1) + np.log(30))
    values = [
        neighbours.against_hard(x, torch.ones_like(x), s, torch.ones_like(s), beta)[0] for beta in (0.0, 1.0, 10.0, 1e4)
    ]
    assert all((less < more).all() for less, more in pairwise(values))
    torch.testing.assert_close(values[-1], hardest)
    torch.testing.assert_close(values[0], torch.nn.functional.softplus(x.logsumexp(1)))


def test_the_regulariser_is_the_published_one(world):
    """Written as in the published code; the mean times the size of the batch is its sum."""
    torch.manual_seed(0)
    A = torch.randn(6, 3, 9, dtype=torch.float64).softmax(-1)
    centred = A - A.mean(2, keepdim=True)
    diagonal = torch.diagonal(torch.bmm(centred, centred.transpose(1, 2)) / 16, dim1=-2, dim2=-1)
    published = (torch.norm(diagonal, dim=1) ** 2).sum()
    torch.testing.assert_close(6 * neighbours.routing_penalty(A, 16), published)
    assert neighbours.routing_penalty(torch.full((2, 3, 9), 1 / 9), 16) < 1e-12
    history, positive, negatives = batch_of(world)
    plain, *models = (
        away_from_the_start(build("remi", world, 3, remi_lambda=100 * bool(n), remi_batch=n or 1, **STILL).double())
        for n in (0, 1, 128)
    )
    with torch.no_grad():
        for model in (plain, *models):
            model.encoder.attention[2].weight *= 100
        attention = plain.encoder.attend(plain.token_rows()[history], history)[1]
    assert attention.shape == (32, 3, 50) and attention.amax(-1).mean() > 0.3
    for model, n in zip(models, (1, 128), strict=True):
        more = model.loss(history, positive, negatives) - plain.loss(history, positive, negatives)
        assert more.item() == pytest.approx(100 * n * neighbours.routing_penalty(attention, 16).item(), rel=1e-9)
        seen = model.objective(history, positive, negatives)
        assert (seen.loss + seen.terms["reconstruction"]).item() == pytest.approx(more.item())


def test_the_regulariser_spreads_attention(world):
    spread = []
    for weight in (0.0, 1e5):
        model = build("remi", world, 3, remi_lambda=weight, **STILL)
        batch, optimizer = batch_of(world), torch.optim.Adam(model.parameters(), 1e-2)
        for _ in range(20):
            optimizer.zero_grad()
            model.loss(*batch).backward()
            optimizer.step()
        with torch.no_grad():
            attention = model.encoder.attend(model.token_rows()[batch[0]], batch[0])[1]
        spread.append(attention.square().sum(-1).mean().item())
    assert spread[1] < 0.03 < spread[0]  # 1/50 where all positions count the same


def test_corrected_and_without_the_next_ten(world):
    """`log_q` weights a draw of item j by 1/q_j, and `false_negatives="next"` leaves out `following`; by hand."""
    history, positive, negatives = batch_of(world, 6)
    following = torch.from_numpy(next(iter(Windows(world, 6, following=True))).following)
    negatives = torch.cat([negatives, negatives[:20], following[:3].flatten()])
    expected = 0.1 + torch.rand(world.n_items, dtype=torch.float64)
    drawn = torch.cat([positive, negatives])
    for name, k in (("remi", 1), ("maxmf", 3)):
        model = away_from_the_start(build(name, world, k, remi_lambda=0, maxmf_loss="bpr", **STILL).double())
        found = model.objective(history, positive, negatives, expected=expected, following=following).loss
        s, wanted = (model.encode(history).heads @ model.items().T).amax(1) / model.tau, 0.0
        for n in range(6):
            left = ~torch.isin(drawn, following[n])
            x, w, own = s[n, drawn[left]], 1 / expected[drawn[left]], s[n, positive[n]]
            if name == "maxmf":
                wanted += (w * softplus(x - own)).sum() / w.sum() / 6
                continue
            others = w.sum() * (w * (2 * x).exp()).sum() / (w * x.exp()).sum()
            own = own.exp() / expected[positive[n]]
            wanted += (1 + others / own).log() / 6
        assert found.item() == pytest.approx(wanted.item(), rel=1e-10)
        even = model.objective(history, positive, negatives, expected=torch.full_like(expected, 3.0)).loss
        assert even.item() == pytest.approx(model.loss(history, positive, negatives).item(), rel=1e-10)


# ------------------------------------------------------------------------------------------------- training, bad input


@pytest.mark.parametrize(("name", "targets"), [("remi", "one"), ("bam", "one"), ("bam", "all"), ("maxmf", "all")])
def test_it_resumes_to_the_bit(world, tmp_path, name, targets):
    """bam's draws come from the step, as dropout does."""
    params = {**QUICK, "batch_size": 1024, "epochs": 1, "log_steps": 2, "targets": targets}

    def made():
        return build(name, world, 3, **{**STILL, "dropout": 0.1})

    whole = fit(made(), world, params, tmp_path / "whole", quiet=True)
    model, steps = made(), []
    objective = model.objective

    def interrupted(*args, **also):
        steps.append(0)
        if len(steps) == 3:
            signal.raise_signal(signal.SIGINT)
        return objective(*args, **also)

    model.objective = interrupted
    assert fit(model, world, params, tmp_path / "parts", quiet=True).status == "stopped"
    same_run(fit(made(), world, params, tmp_path / "parts", quiet=True), whole)


def test_its_parameters_are_new_and_checked(world):
    ours = {"remi_beta", "remi_lambda", "remi_batch", "maxmf_loss"}
    assert not ours & noted(ModelParams()).keys() and ours < ModelParams.model_fields.keys()
    assert Experiment(method="maxmf", maxmf_loss="warp").model["maxmf_loss"] == "warp"
    for wrong, told in (
        ({"remi_beta": -1}, "remi_beta: Input should be greater than or equal to 0"),
        ({"maxmf_loss": "auc"}, "maxmf_loss: Input should be 'hinge', 'warp' or 'bpr'"),
        ({"kernel": "power-spherical"}, "remi has no kernel"),
        ({"encoder": Mlp(3, 16)}, "remi regularises attention over positions; Mlp has none: comirec-sa has one"),
        ({"context": "encoder"}, "has no context"),
    ):
        with pytest.raises(BachError, match=told):
            build("remi", world, 3, **STILL, **wrong)
    with pytest.raises(BachError, match="remi regularises attention over positions; Codebook has none"):
        build(Method("codebook", "remi", "max over heads"), world, 3, **STILL)
    batch = batch_of(world)
    assert build("remi", world, 3, encoder=Mlp(3, 16), remi_lambda=0, **STILL).loss(*batch).isfinite()
    for rule in ("bam", "maxmf"):
        shared = build(METHODS[rule]._replace(encoder="codebook"), world, 3, **STILL)
        following = torch.from_numpy(next(iter(Windows(world, 32, following=True))).following)
        for targets in (None, following):
            assert shared.objective(*batch, targets=targets).loss.isfinite()
