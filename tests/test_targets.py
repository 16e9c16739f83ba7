"""`targets="all"`: every next item of a window is a target. It is the mean of the paper's steps, in one sweep."""

import signal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_methods import LEARNT, away_from_the_start, batch_of, loss_and_slopes
from test_methods import SMALL as STILL
from test_mixture import plain_all_multihead, plain_pos_multihead, unit
from test_train import QUICK, model_of, same_run
from torch.nn.functional import normalize

from bachlib import BachError
from bachlib.data import Windows
from bachlib.experiment.settings import Experiment
from bachlib.experiment.sweep import AXES
from bachlib.model import candidates, mixture, neighbours, onepass, routing
from bachlib.model.candidates import Targets
from bachlib.model.methods import build
from bachlib.model.plain import plain_step_loss
from bachlib.model.sphere import KERNELS
from bachlib.params import TrainParams, noted
from bachlib.train import fit

KERNEL = KERNELS["power-spherical"]
TAKES = {"standard": 1, "pos-multihead": 3, "all-multihead": 3, "label-aware": 3}  # heads


def case(B=5, M=4, k=3, d=6, C=17, n_items=9, dtype=torch.float64, seed=0):
    """Candidates with many copies, and targets of which many are candidates. Row 1 is short, row 2 has one twice."""
    torch.manual_seed(seed)
    items = torch.stack([torch.randperm(n_items)[:M] for _ in range(B)])
    if B > 2 and M > 1:
        items[1, -1], items[2, 1] = -1, items[2, 0]
    ids = torch.randint(0, n_items, (C,))
    ids[:B] = items[:, 0]  # the first B candidates are what the rows drew
    return {
        "heads": unit(B, k, d, dtype=dtype), "table": unit(n_items, d, dtype=dtype), "ids": ids, "items": items,
        "log_pi": torch.randn(B, k, dtype=dtype).log_softmax(-1), "kappa": 5 + 9 * torch.rand(B, k, dtype=dtype),
    }  # fmt: skip


def targets_of(c, table=None):
    vectors = (c["table"] if table is None else table)[c["items"].clamp(min=0)]
    ones, none = vectors.new_ones(len(c["ids"])), vectors.new_zeros(len(vectors))
    weight, own, rest = c.get("counted", (ones, torch.arange(len(vectors)), none))
    return Targets(c["ids"], weight, own, rest, c["items"], vectors)


def fast(rule, c, heads, table, log_pi, kappa, tau):
    targets, items = targets_of(c, table), table[c["ids"]]
    if rule != "elbo":
        return routing.of_all(rule, heads, items, targets, tau)[0]
    log_sigma = KERNEL.log_density(targets.logits(heads, 1.0), kappa[:, None], heads.shape[-1])
    return mixture.loss_of_all(heads, items, targets, log_pi, log_sigma, tau)[0]


def plain(rule, c, heads, table, log_pi, kappa, tau):
    """The mean over rows and targets of the paper's plain loss, with the target in the place of the row's draw."""
    heads, total = heads.expand(len(c["items"]), -1, -1), 0.0
    for n, of_row in enumerate(c["items"].tolist()):
        there = [item for item in of_row if item >= 0]
        for item in there:
            ids = c["ids"].clone()
            ids[n] = item
            u, items, own = heads[[n]], table[ids], torch.tensor([n])
            if rule == "elbo":
                log_sigma = mixture.log_sigma(u, items[own], kappa[[n]], KERNEL)
                loss = mixture.plain_loss(u, items, own, log_pi[[n]], log_sigma, tau, ids)
            elif rule == "all-multihead":
                loss = plain_all_multihead(u, items, own, tau, ids)
            else:
                if rule == "label-aware":
                    u = normalize(((u @ items[own][:, :, None]).softmax(1) * u).sum(1, keepdim=True), dim=-1)
                loss = plain_pos_multihead(u, items, own, tau, ids)
            total = total + loss / len(there) / len(c["items"])
    return total


def value_and_slopes(function, rule, c, heads, tau):
    inputs = [x.clone().requires_grad_() for x in (heads, c["table"], c["log_pi"], c["kappa"])]
    value = function(rule, c, *inputs, tau)
    return value, torch.autograd.grad(value, inputs, allow_unused=True, materialize_grads=True)


@settings(max_examples=80, deadline=None)
@given(
    rule=st.sampled_from([*TAKES, "elbo", "shared"]),
    B=st.integers(1, 6),
    M=st.integers(1, 5),
    extra=st.integers(0, 25),
    tau=st.sampled_from([0.5, 0.07, 0.02, 0.003]),
    block=st.sampled_from([1, 50, 1 << 19]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_one_sweep_equals_the_plain_twin(rule, B, M, extra, tau, block, dtype, seed):
    """Value and every gradient; γ depends on the heads, the targets and κ."""
    c = case(B, M, TAKES.get(rule, 3), C=B + extra, dtype=dtype, seed=seed)
    heads = c["heads"][0] if rule == "shared" else c["heads"]
    rule = "elbo" if rule == "shared" else rule
    before, onepass.BLOCK = onepass.BLOCK, block
    try:
        value, slopes = value_and_slopes(fast, rule, c, heads, tau)
    finally:
        onepass.BLOCK = before
    expected, expected_slopes = value_and_slopes(plain, rule, c, heads, tau)
    tolerance = 1e-10 if dtype == torch.float64 else max(2e-5, 5e-7 / tau)  # a logit is as large as 1/τ, and so its ulp
    assert abs(value - expected) <= tolerance * max(1, abs(expected.item()))
    for found, wanted in zip(slopes, expected_slopes, strict=True):
        assert (found - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("candidates", ["list", "set"])
@pytest.mark.parametrize("name", LEARNT)
def test_it_is_the_mean_of_the_papers_steps(world, name, candidates, monkeypatch):
    """Each row's loss with each target in turn, by the step of `targets="one"`: loss, terms, γ and every gradient."""
    monkeypatch.setattr(neighbours, "draw", lambda gamma: gamma.argmax(-1))
    batch = next(iter(Windows(world, 6, following=True)))
    history, positive, following = (torch.from_numpy(x) for x in (batch.history, batch.positive, batch.following))
    following[4, 3:] = torch.where(following[4, 3:] == positive[4], positive[4], -1)  # a short row
    positive[5] = following[5, 0] = positive[0]  # drawn by two rows
    negatives = torch.cat([torch.arange(30), following[:3, :4].flatten(), following[0, :2], positive[3:4]])
    model = away_from_the_start(build(name, world, 3, candidates=candidates, **STILL).double())
    seen = model.objective(history, positive, negatives, targets=following)
    steps, weights = [], []
    for n, of_row in enumerate(following):
        others = torch.cat([positive[:n], positive[n + 1 :], negatives])
        steps += [model.objective(history[[n]], of_row[[m]], others) for m in (of_row >= 0).nonzero()[:, 0].tolist()]
        weights += [1 / 6 / int((of_row >= 0).sum())] * int((of_row >= 0).sum())
    mean = sum(w * step.loss for w, step in zip(weights, steps, strict=True))
    (found, slopes), (wanted, one_slopes) = loss_and_slopes(model, seen.loss), loss_and_slopes(model, mean)
    assert found.item() == pytest.approx(wanted.item(), abs=1e-10)
    for a, b in zip(slopes, one_slopes, strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(1, b.abs().max())
    for term, value in seen.terms.items():
        expected = sum(w * step.terms[term] for w, step in zip(weights, steps, strict=True))
        assert value.item() == pytest.approx(expected.item(), abs=1e-10)
    gamma = sum(w * step.gamma[0] for w, step in zip(weights, steps, strict=True))
    torch.testing.assert_close(seen.gamma.mean(0), gamma)
    assert not torch.isclose(seen.loss, model.loss(history, positive, negatives), rtol=1e-4)


@pytest.mark.parametrize("candidates", ["list", "set"])
@pytest.mark.parametrize("name", ["p-bach", "v-bach"])
def test_the_fast_step_is_the_plain_one(world, name, candidates):
    history, positive, negatives = batch_of(world, 4)
    targets = next(iter(Windows(world, 4, following=True))).following
    targets[1, 4] = -1 if targets[1, 4] != positive[1] else targets[1, 4]
    model = away_from_the_start(build(name, world, 3, candidates=candidates, **STILL).double())
    negatives = torch.cat([negatives, torch.from_numpy(targets[:2].clip(min=0)).flatten()])
    seen = model.objective(history, positive, negatives, targets=torch.from_numpy(targets))
    wanted = plain_step_loss(model, history, positive, negatives, torch.from_numpy(targets))
    assert seen.loss.item() == pytest.approx(wanted.item(), abs=1e-6)
    for a, b in zip(loss_and_slopes(model, seen.loss)[1], loss_and_slopes(model, wanted)[1], strict=True):
        assert (a - b).norm() <= 2e-5 * b.norm() + 1e-8


def test_gradcheck():
    c = case(B=3, M=3, k=2, d=4, C=8)
    inputs = [c[name].requires_grad_() for name in ("heads", "table", "log_pi", "kappa")]
    for rule in (*TAKES, "elbo"):

        def loss(heads, table, log_pi, kappa, rule=rule):
            return fast(rule, c, heads[:, : TAKES.get(rule, 2)], table, log_pi, kappa, 0.5)

        assert torch.autograd.gradcheck(loss, inputs)
    for best in (False, True):
        weights = torch.rand(3, 3, 1 if best else 2, dtype=torch.float64).requires_grad_()

        def summed(heads, table, weights, best=best):
            return onepass.reconstruction_of_all(heads, table[c["ids"]], targets_of(c, table), weights, 0.5, best)[0]

        assert torch.autograd.gradcheck(summed, (*inputs[:2], weights))


def test_what_a_row_leaves_out_by_hand():
    """With whole weights, of which a part of the own one stays, and rows of which some drew none of their targets."""
    for seed in range(20):
        c = case(B=7, C=30, seed=seed)
        c["ids"][:4] = torch.randint(0, 9, (4,))
        targets = targets_of(c)._replace(weight=torch.randint(1, 4, (30,)).double())
        targets = targets._replace(rest=(torch.arange(7) % 3).minimum(targets.weight[:7]))
        (rows, columns, by), beside = targets.exceptions()
        ids, items, weight, rest = (x.tolist() for x in (c["ids"], c["items"], targets.weight, targets.rest))
        found = {(n, j): added for n, j, added in zip(rows.tolist(), columns.tolist(), by.exp().tolist(), strict=True)}
        assert len(found) == len(rows) - len(by) + len(torch.stack([rows, columns, by]).unique(dim=1).T)
        assert rows.tolist() == sorted(rows)
        for n in range(7):
            met = [w if j != n else rest[n] for j, w in enumerate(weight)]
            for j in range(30):
                share = found.get((n, j), 1.0)
                assert share * weight[j] == pytest.approx(0 if ids[j] in items[n] else met[j])
            for m, item in enumerate(items[n]):
                sums = {}  # what each other item adds to the sum of target m
                for p, other in enumerate(items[n]):
                    if p != m:
                        sums[other] = sums.get(other, 0) + beside[n, m, p].item()
                assert beside[n, m, m] == 1
                for other, total in sums.items():
                    of_it = [w for w, candidate in zip(met, ids, strict=True) if candidate == other]
                    assert total == (sum(of_it) if other not in (item, -1) else 0)


@pytest.mark.parametrize("rule", [*TAKES, "elbo", "shared"])
@pytest.mark.parametrize("tau", [0.07, 0.005])
def test_an_item_once_with_its_count_is_all_its_copies(rule, tau):
    """Distinct candidates with their counts as weights: values and gradients of the list of all draws."""
    c = case(B=6, k=TAKES.get(rule, 3), C=40)
    ids, row = candidates.each_once(c["ids"], 9)
    counts = torch.bincount(row).double()
    own, heads = row[:6], c["heads"][0] if rule == "shared" else c["heads"]
    rule = "elbo" if rule == "shared" else rule
    wanted, expected = value_and_slopes(fast, rule, c, heads, tau)
    value, slopes = value_and_slopes(
        fast, rule, c | {"ids": ids, "counted": (counts, own, counts[own] - 1)}, heads, tau
    )
    torch.testing.assert_close(value, wanted)
    for a, b in zip(slopes, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("rule", [*TAKES, "elbo", "shared"])
@pytest.mark.parametrize("tau", [0.07, 0.005])
def test_nothing_is_subtracted(rule, tau):
    """float32, with one target that has nearly the whole sum and is also drawn 200 times: as exact as float64."""
    c = case(B=4, M=3, k=TAKES.get(rule, 3), d=8, C=12)
    c["ids"] = torch.cat([c["ids"], c["items"][:, 1].repeat(200)])
    c["table"][c["items"][0, 1]] = normalize(c["heads"][0, 0] + 0.01, dim=-1)  # on a head
    u = c["heads"][0] if rule == "shared" else c["heads"]
    rule = "elbo" if rule == "shared" else rule
    single = {name: x.float() if x.is_floating_point() else x for name, x in c.items()}
    double = {name: x.double() if x.is_floating_point() else x for name, x in single.items()}
    value, slopes = value_and_slopes(fast, rule, single, u.float(), tau)
    exact, exact_slopes = value_and_slopes(plain, rule, double, u.float().double(), tau)
    assert value.item() == pytest.approx(exact.item(), rel=2e-6, abs=1e-6 / tau)
    for found, wanted in zip(slopes, exact_slopes, strict=True):
        assert (found - wanted).norm() <= 2e-6 / tau * wanted.norm() + 1e-6


@pytest.mark.parametrize("shared", [False, True])
def test_a_head_without_weight_is_no_head(shared):
    """π_r = 0 exactly: the loss without that head, and finite gradients."""
    c = case()
    heads = c["heads"][0] if shared else c["heads"]
    fewer = c | {"log_pi": c["log_pi"][:, :2].log_softmax(-1), "kappa": c["kappa"][:, :2]}
    wanted, _ = value_and_slopes(fast, "elbo", fewer, heads[..., :2, :], 0.07)
    none = torch.full((5, 1), -torch.inf, dtype=torch.float64)
    found, slopes = value_and_slopes(fast, "elbo", c | {"log_pi": torch.cat([fewer["log_pi"], none], 1)}, heads, 0.07)
    torch.testing.assert_close(found, wanted)
    assert all(slope.isfinite().all() for slope in (slopes[0], slopes[1], slopes[2][:, :2], slopes[3]))


@pytest.mark.parametrize("tau", [0.07, 0.005])
@pytest.mark.parametrize("name", LEARNT)
def test_a_row_alone_predicts_its_targets_with_certainty(world, name, tau):
    """Without any other candidate every p is 1, as in the paper's step."""
    batch = next(iter(Windows(world, 1, following=True)))
    history, positive, following = (torch.from_numpy(x) for x in (batch.history, batch.positive, batch.following))
    model = build(name, world, 3, tau=tau, **STILL)
    seen = model.objective(history, positive, torch.arange(0), targets=following)
    assert seen.terms["reconstruction"].abs() < 1e-4 and (seen.gamma.sum(1) - 1).abs().max() < 1e-5
    _, slopes = loss_and_slopes(model, seen.loss)
    assert all(slope.isfinite().all() for slope in slopes)


def test_memory_and_second_derivatives():
    c = case(B=32, M=10, k=8, d=8, C=600, n_items=400, dtype=torch.float32)
    heads, sizes = c["heads"].requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        losses = [fast(rule, c, heads, c["table"], c["log_pi"], c["kappa"], 0.07) for rule in ("elbo", "all-multihead")]
    assert max(sizes) <= 600 * 8  # never (B, k, C)
    for loss in losses:
        with pytest.raises(BachError, match="has no second derivatives"):
            torch.autograd.grad(loss, heads, create_graph=True)


# ------------------------------------------------------------------------------------------------------------ training


def test_the_sampler_adds_the_next_ten_and_draws_the_same(world):
    plain, more = Windows(world, 64), Windows(world, 64, following=True)
    for a, b in zip(plain, more, strict=True):
        assert all(map(np.array_equal, a, b[:3])) and b.following.shape == (64, 10) and b.context is None
        assert (b.following == b.positive[:, None]).any(1).all()
        for user, history, following in zip(b.user, b.history, b.following, strict=True):
            sequence = world.sequence(user).tolist()
            at = sequence.index(history[-1]) + 1
            assert following.tolist() == sequence[at : at + 10]
    assert plain.state_dict() == more.state_dict()


def test_it_is_one_of_the_parameters():
    assert "targets" not in noted(TrainParams()) and noted(TrainParams(targets="all"))["targets"] == "all"
    assert Experiment(targets="all").train["targets"] == "all" and "targets" in AXES


def test_a_step_gets_the_next_ten_of_its_windows(world, tmp_path):
    model, given = model_of(world), []
    objective = model.objective
    model.objective = lambda *args, **also: given.append(also["targets"].numpy()) or objective(*args, **also)
    run = fit(model, world, {**QUICK, "epochs": 1, "targets": "all"}, tmp_path / "all", quiet=True)
    for found, batch in zip(given, Windows(world, 256, following=True), strict=True):
        assert np.array_equal(found, batch.following)
    one = fit(model_of(world), world, {**QUICK, "epochs": 1}, tmp_path / "one", quiet=True)
    assert run.folder != one.folder and "targets" not in one.about["identity"]["train"]
    with pytest.raises(BachError, match=r"holds another run: .*targets"):
        fit(model_of(world), world, {**QUICK, "epochs": 1, "targets": "all"}, tmp_path / "one", quiet=True)


def test_a_context_comes_beside_the_targets(world, tmp_path):
    """Each row reads the context of its own window, as with one target."""
    requests = world.with_context(world.genres.member[world.sequences].astype(np.float32))
    for a, b in zip(Windows(requests, 256), Windows(requests, 256, following=True), strict=True):
        assert np.array_equal(a.context, b.context) and np.array_equal(a.positive, b.positive)
    model, given = build("p-bach", requests, 3, context="both", **STILL), []
    objective = model.objective
    model.objective = lambda *args, **also: given.append(also) or objective(*args, **also)
    fit(model, requests, {**QUICK, "epochs": 1, "targets": "all"}, tmp_path, quiet=True)
    for also, batch in zip(given, Windows(requests, 256, following=True), strict=True):
        assert np.array_equal(also["context"], batch.context) and np.array_equal(also["targets"], batch.following)


def test_a_training_on_all_targets_resumes_to_the_bit(world, tmp_path):
    params = {**QUICK, "epochs": 2, "log_steps": 10, "targets": "all"}
    whole = fit(model_of(world), world, params, tmp_path / "whole", quiet=True)
    model, steps = model_of(world), []
    objective = model.objective

    def interrupted(*args, **also):
        steps.append(0)
        if len(steps) == 37:
            signal.raise_signal(signal.SIGINT)
        return objective(*args, **also)

    model.objective = interrupted
    assert fit(model, world, params, tmp_path / "parts", quiet=True).status == "stopped"
    same_run(fit(model_of(world, seed=0), world, params, tmp_path / "parts", quiet=True), whole)


@pytest.mark.parametrize("candidates", ["list", "set"])
@pytest.mark.parametrize("name", ["p-bach", "p-bach-global", "all-multihead"])
def test_parts_of_a_batch_have_the_candidates_of_the_whole(world, name, candidates):
    """What several processes do: each has its own rows and targets, and the draws of the others as negatives."""
    history, positive, negatives = batch_of(world)
    following = torch.from_numpy(next(iter(Windows(world, 32, following=True))).following)
    positive[20:24] = positive[0]
    model = away_from_the_start(build(name, world, 3, candidates=candidates, **STILL).double())
    halves = [
        model.objective(
            history[mine], positive[mine], torch.cat([positive[others], negatives]), targets=following[mine]
        ).loss
        for mine, others in ((slice(16), slice(16, 32)), (slice(16, 32), slice(16)))
    ]
    whole = model.objective(history, positive, negatives, targets=following).loss
    torch.testing.assert_close(sum(halves) / 2, whole)


@pytest.mark.parametrize(
    ("targets", "told"),
    [
        (torch.zeros(4, dtype=torch.long), r"targets should be \(4, M\) item ids, one or more per row"),
        (torch.zeros(3, 10, dtype=torch.long), r"got \(3, 10\)"),
        (torch.tensor([[1, 2], [3, -1], [-1, -1], [4, 5]]), "−1 where it has fewer; got .*-1, -1"),
        (torch.tensor([[1], [2], [3], [600]]), r"there is no item 600: items are 0 … 599"),
        (torch.tensor([[1, 2], [3, -2], [5, 6], [4, 5]]), "there is no item -2"),
        (torch.rand(4, 3), "items should be whole numbers"),
    ],
)
def test_wrong_targets(world, targets, told):
    history, positive, negatives = batch_of(world, 4)
    with pytest.raises(BachError, match=told):
        build("p-bach", world, 3, **STILL).objective(history, positive, negatives, targets=targets)
