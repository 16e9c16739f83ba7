"""The ELBO and its identities; the one-pass losses against their slow twins."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bachlib import BachError
from bachlib.model import candidates, mixture, onepass, routing
from bachlib.model.shared import shared_log_components
from bachlib.model.sphere import KERNELS

TAU = 0.07


def unit(*shape, dtype=torch.float64):
    return torch.nn.functional.normalize(torch.randn(*shape, dtype=dtype), dim=-1)


def case(B=5, k=3, d=6, C=17, dtype=torch.float64, seed=0, n_ids=9):
    """A random batch: the first B candidates are the positives; ids repeat, so that copies have to be masked."""
    torch.manual_seed(seed)
    return {
        "heads": unit(B, k, d, dtype=dtype),
        "items": unit(C, d, dtype=dtype),
        "positive": torch.arange(B) % C,
        "log_pi": torch.randn(B, k, dtype=dtype).log_softmax(-1),
        "log_sigma": 3 * torch.randn(B, k, dtype=dtype),
        "ids": torch.randint(0, n_ids, (C,)),
    }


def log_p_of(c, tau=TAU, ids=None):
    return mixture.log_components(c["heads"], c["items"], c["positive"], tau, ids)


def test_components_are_a_softmax_over_the_candidate_set():
    c = case()
    found = log_p_of(c, ids=c["ids"])
    for n in range(5):
        own = c["ids"][n]
        kept = [j for j in range(17) if j == n or c["ids"][j] != own]
        for r in range(3):
            scores = [math.exp(float(c["heads"][n, r] @ c["items"][j]) / TAU) for j in kept]
            assert found[n, r].item() == pytest.approx(math.log(scores[kept.index(n)] / sum(scores)), abs=1e-10)


def test_copies_of_the_positive_by_hand():
    for seed in range(20):
        c = case(B=9, C=30, seed=seed, n_ids=6)
        rows, columns = candidates.copies_of_positive(c["ids"], c["positive"])
        found = sorted(zip(rows.tolist(), columns.tolist(), strict=True))
        ids, positive = c["ids"].tolist(), c["positive"].tolist()
        assert found == [(n, j) for n in range(9) for j in range(30) if ids[j] == ids[positive[n]] and j != positive[n]]
        assert rows.tolist() == sorted(rows.tolist())


def test_identities():
    for seed in range(20):
        c = case(seed=seed)
        log_pi, log_sigma, log_p = c["log_pi"], c["log_sigma"], log_p_of(c)
        bound, gap = mixture.elbo(log_pi, log_sigma, log_p), mixture.kl_gap(log_pi, log_sigma, log_p)
        likelihood = mixture.log_likelihood(log_pi, log_p)
        assert torch.allclose(bound.total, bound.reconstruction + bound.prior + bound.entropy)
        assert (gap >= 0).all() and torch.allclose(likelihood - gap, bound.total, atol=1e-10)
        tight = mixture.elbo_at(mixture.contrastive_posterior(log_pi, log_p), log_pi, log_p)
        assert torch.allclose(tight.total, likelihood, atol=1e-10)


def test_gamma_by_hand():
    """γ_r = π_r σ_r / Σ_s π_s σ_s."""
    c = case()
    joint = c["log_pi"].exp() * c["log_sigma"].exp()
    found = mixture.responsibilities(c["log_pi"], c["log_sigma"]).exp()
    torch.testing.assert_close(found, joint / joint.sum(1, keepdim=True))


def test_gamma_is_the_gradient_in_log_p_and_blind_to_negatives():
    c = case()
    log_p = log_p_of(c).requires_grad_()
    (slope,) = torch.autograd.grad(mixture.elbo(c["log_pi"], c["log_sigma"], log_p).total.sum(), log_p)
    assert torch.allclose(slope, mixture.responsibilities(c["log_pi"], c["log_sigma"]).exp())


def test_a_head_without_weight_is_no_head():
    """π_r = 0 exactly: finite bound and gradients, equal to the mixture without that head."""
    c = case()
    log_pi = torch.cat([c["log_pi"], torch.full((5, 1), -torch.inf).double()], 1)
    log_sigma, log_p = torch.cat([c["log_sigma"], torch.zeros(5, 1)], 1), torch.cat([log_p_of(c), -torch.ones(5, 1)], 1)
    without = mixture.elbo(c["log_pi"], c["log_sigma"], log_p_of(c)).total
    log_sigma.requires_grad_()
    total = mixture.elbo(log_pi, log_sigma, log_p).total
    assert torch.allclose(total, without)
    for value in (total.sum(), mixture.kl_gap(log_pi, log_sigma, log_p).sum()):
        (slope,) = torch.autograd.grad(value, log_sigma, retain_graph=True)
        assert slope.isfinite().all() and (slope[:, 3] == 0).all()
    heads = torch.cat([c["heads"], c["heads"][:, :1]], 1).requires_grad_()
    loss, *_ = mixture.loss(heads, c["items"], c["positive"], log_pi, log_sigma, TAU)
    assert all(slope.isfinite().all() for slope in torch.autograd.grad(loss, (heads, log_sigma)))


def test_one_head_is_the_plain_softmax():
    c = case(k=1)
    total, seen, _ = mixture.loss(c["heads"], c["items"], c["positive"], c["log_pi"] * 0, c["log_sigma"], TAU, c["ids"])
    standard = routing.standard(c["heads"], c["items"], c["positive"], TAU, c["ids"])
    assert torch.allclose(total, standard) and torch.allclose(seen.entropy, torch.zeros(5).double())


def test_density_is_a_mixture_of_kernels():
    c = case()
    kappa = torch.rand(5, 3, dtype=torch.float64) * 20
    for kernel in KERNELS.values():
        found = mixture.log_density(c["heads"], c["items"], c["log_pi"], kappa, kernel)
        for n in range(5):
            for i in range(17):
                parts = [
                    c["log_pi"][n, r].exp() * kernel.log_density(c["heads"][n, r] @ c["items"][i], kappa[n, r], 6).exp()
                    for r in range(3)
                ]
                assert found[n, i].item() == pytest.approx(math.log(sum(parts)), abs=1e-9)
        t = mixture.log_sigma(c["heads"], c["items"][:5], kappa, kernel)
        assert t[2, 1].item() == pytest.approx(
            kernel.log_density(c["heads"][2, 1] @ c["items"][2], kappa[2, 1], 6).item()
        )


# ------------------------------------------------------------------------------------------------ fast against slow


def gradients(function, c, names):
    inputs = {name: c[name].clone().requires_grad_() for name in names}
    value = function(**{**c, **inputs})
    value = value[0] if isinstance(value, tuple) else value
    return value, torch.autograd.grad(value, list(inputs.values()))


def plain_pos_multihead(heads, items, positive, tau, ids, weights=None):
    """eq. 9 written down."""
    log_p = mixture.log_components(heads, items, positive, tau, ids, weights)
    return -log_p.gather(1, routing.routed_head(heads, items, positive)[:, None]).mean()


def plain_all_multihead(heads, items, positive, tau, ids, weights=None):
    """eq. 10 written down."""
    scores = (heads @ items.T).max(1).values / tau  # (B, C)
    if weights is None:
        weights = candidates.Weights(scores.new_ones(len(items)), scores.new_ones(len(positive)))
    scores = scores + candidates.log_weights(ids, positive, weights)
    return -scores.log_softmax(-1).gather(1, positive[:, None]).mean()


def plain_neighbour(rule, heads, items, positive, tau, ids, beta=1.0, kind="hinge"):
    """remi and maxmf written down row by row; bam where it draws the closest head is pos-multihead."""
    if rule == "bam":
        return plain_pos_multihead(heads, items, positive, tau, ids)
    total = 0 * (heads.sum() + items.sum())
    for n, own in enumerate(positive.tolist()):
        others = torch.arange(len(items)) != own if ids is None else ids != ids[own]
        s = heads[n] @ items.T / tau  # (k, C)
        if not others.any():
            continue
        if rule == "remi":
            x = s[routing.routed_head(heads, items, positive)[n]]
            hard = ((1 + beta) * x[others]).logsumexp(0) - (beta * x[others]).logsumexp(0)
            total = total + torch.stack([x[own], hard + math.log(int(others.sum()))]).logsumexp(0) - x[own]
            continue
        x = s.max(0).values
        x = (x - x[own])[others]
        each = torch.nn.functional.softplus(x) if kind == "bpr" else (1 + x).relu()
        above = int((x > -1).sum())
        weight = sum(1 / (i + 1) for i in range(above)) / max(above, 1) if kind == "warp" else 1 / len(x)
        total = total + weight * each.sum()
    return total / len(positive)


def some_weights(C, B, dtype):
    """Weights between 1/30 and 30, and 1."""
    candidate, own = ((7 * torch.rand(n, dtype=dtype) - 3.5).exp() for n in (C, B))
    own[::2], candidate[::3] = 1, 1
    return candidates.Weights(candidate, own)


def test_weights_by_hand():
    """Z_n = Σ w_j exp(s_j) + w_own exp(s_own), without other copies of the positive; p is a share of Z_n."""
    c, weights = case(), some_weights(17, 5, torch.float64)
    found = mixture.log_components(c["heads"], c["items"], c["positive"], TAU, c["ids"], weights)
    for n in range(5):
        for r in range(3):
            s = [math.exp(float(c["heads"][n, r] @ c["items"][j]) / TAU) for j in range(17)]
            own = weights.own[n].item() * s[n]
            others = [j for j in range(17) if c["ids"][j] != c["ids"][n]]
            z = own + sum(weights.candidate[j].item() * s[j] for j in others)
            assert found[n, r].item() == pytest.approx(math.log(own / z), abs=1e-10)


PAIRS = {
    "mixture": (mixture.loss, mixture.plain_loss, ["heads", "items", "log_pi", "log_sigma"]),
    "pos-multihead": (routing.pos_multihead, plain_pos_multihead, ["heads", "items"]),
    "all-multihead": (routing.all_multihead, plain_all_multihead, ["heads", "items"]),
}


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(list(PAIRS)),
    B=st.integers(1, 9),
    k=st.integers(1, 6),
    d=st.integers(2, 9),
    extra=st.integers(0, 30),
    tau=st.sampled_from([0.5, 0.07, 0.02, 0.003]),
    block=st.sampled_from([1, 50, 1 << 19]),
    masked=st.booleans(),
    weighted=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_one_pass_equals_plain(name, B, k, d, extra, tau, block, masked, weighted, dtype, seed):
    c = case(B, k, d, B + extra, dtype, seed)
    c |= {"tau": tau, "ids": c["ids"] if masked else None}
    c |= {"weights": some_weights(B + extra, B, dtype) if weighted else None}
    fast, slow, names = PAIRS[name]
    if name != "mixture":
        c = {key: c[key] for key in ("heads", "items", "positive", "tau", "ids", "weights")}
    before, onepass.BLOCK = onepass.BLOCK, block
    try:
        value, slopes = gradients(fast, c, names)
    finally:
        onepass.BLOCK = before
    expected, expected_slopes = gradients(slow, c, names)
    tolerance = 1e-11 if dtype == torch.float64 else max(2e-5, 5e-7 / tau)  # a logit is as large as 1/τ, and so its ulp
    assert abs(value - expected) <= tolerance * max(1, abs(expected.item()))
    for found, wanted in zip(slopes, expected_slopes, strict=True):
        assert (found - wanted).abs().max() <= tolerance * max(1.0, wanted.abs().max().item())


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from([*PAIRS, "label-aware", "shared"]),
    tau=st.sampled_from([0.5, 0.07, 0.02, 0.003]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 1000),
)
def test_an_item_once_with_its_count_is_all_its_copies(name, tau, dtype, seed):
    """Value and gradients of the list of draws, and of its distinct items with their counts as weights."""
    c = case(B=7, C=40, dtype=dtype, seed=seed, n_ids=12)
    distinct, row = candidates.each_once(c["ids"], 12)
    counts, table = torch.bincount(row).to(dtype), unit(12, 6, dtype=dtype)
    weights = candidates.Weights(counts, torch.ones(7, dtype=dtype))

    def of(heads, table, positive, ids, weights):
        items = table[ids]
        if name == "shared":
            log_p = shared_log_components(heads[0], items, positive, tau, ids, weights)
            return mixture.elbo(c["log_pi"], c["log_sigma"], log_p).total.mean()
        if name == "mixture":
            return mixture.loss(heads, items, positive, c["log_pi"], c["log_sigma"], tau, ids, weights)
        function = routing.label_aware if name == "label-aware" else PAIRS[name][0]
        return function(heads, items, positive, tau, ids, weights=weights)

    same = {"heads": c["heads"], "table": table}
    given = {**same, "positive": row[:7], "ids": distinct, "weights": weights}
    value, slopes = gradients(of, given, list(same))
    wanted, expected = gradients(of, {**same, "positive": c["positive"], "ids": c["ids"], "weights": None}, list(same))
    tolerance = 1e-11 if dtype == torch.float64 else max(2e-5, 5e-7 / tau)
    assert abs(value - wanted) <= tolerance * max(1, abs(wanted.item()))
    for a, b in zip(slopes, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


@pytest.mark.parametrize("weighted", [False, True])
def test_gradcheck(weighted):
    c = case(B=3, k=2, d=4, C=8)
    also = {"ids": c["ids"], "weights": some_weights(8, 3, torch.float64) if weighted else None}
    inputs = [c[name].requires_grad_() for name in ("heads", "items", "log_pi", "log_sigma")]

    def loss(heads, items, log_pi, log_sigma):
        return mixture.loss(heads, items, c["positive"], log_pi, log_sigma, 0.5, **also)[0]

    assert torch.autograd.gradcheck(loss, inputs)
    for function in (routing.pos_multihead, routing.all_multihead, routing.label_aware):
        assert torch.autograd.gradcheck(lambda h, i, f=function: f(h, i, c["positive"], 0.5, **also), inputs[:2])
    single = c["heads"][:, :1].detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda h, i: routing.standard(h, i, c["positive"], 0.5, **also), (single, inputs[1])
    )


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_the_gradient_flows_through_gamma(kernel):
    """γ depends on heads, positives and κ: the whole bound against finite differences, plain and in one pass."""
    c = case(B=3, k=2, d=4, C=8)
    kappa = (5 + torch.rand(3, 2, dtype=torch.float64)).requires_grad_()
    inputs = [c["heads"].requires_grad_(), c["items"].requires_grad_(), c["log_pi"].requires_grad_(), kappa]

    def whole(loss, heads, items, log_pi, kappa):
        log_sigma = mixture.log_sigma(heads, items[c["positive"]], kappa, KERNELS[kernel])
        value = loss(heads, items, c["positive"], log_pi, log_sigma, 0.5, c["ids"])
        return value[0] if isinstance(value, tuple) else value

    for loss in (mixture.loss, mixture.plain_loss):
        assert torch.autograd.gradcheck(lambda *args, loss=loss: whole(loss, *args), inputs)
    log_sigma = mixture.log_sigma(c["heads"], c["items"][:3], kappa, KERNELS[kernel])
    gamma = mixture.responsibilities(c["log_pi"], log_sigma)[:, 0].sum()
    slopes = torch.autograd.grad(gamma, (inputs[0], inputs[1], kappa))
    assert all(slope.abs().max() > 1e-3 for slope in slopes)


def test_a_second_derivative_is_refused_and_not_wrong():
    c = case()
    heads = c["heads"].requires_grad_()
    for loss in (
        mixture.loss(heads, c["items"], c["positive"], c["log_pi"], heads.sum(-1), TAU)[0],
        routing.all_multihead(heads, c["items"], c["positive"], TAU),
        routing.pos_multihead(heads, c["items"], c["positive"], TAU),
    ):
        with pytest.raises(BachError, match="has no second derivatives; use its plain_ reference"):
            torch.autograd.grad(loss, heads, create_graph=True)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def test_half_precision_is_taken_to_float32(half):
    c = case(dtype=torch.float32)
    expected = mixture.loss(
        **{**c, "heads": c["heads"].to(half).float(), "items": c["items"].to(half).float(), "tau": TAU}
    )[0]
    found = mixture.loss(**{**c, "heads": c["heads"].to(half), "items": c["items"].to(half), "tau": TAU})[0]
    assert torch.allclose(found, expected, rtol=1e-3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, slopes = gradients(mixture.loss, {**c, "tau": TAU}, ["heads", "items"])
        gradients(routing.all_multihead, {**{n: c[n] for n in ("heads", "items", "positive")}, "tau": TAU}, ["heads"])
    assert (
        torch.allclose(inside.float(), mixture.loss(**{**c, "tau": TAU})[0], rtol=1e-3) and slopes[0].isfinite().all()
    )


def test_only_the_gradients_that_are_wanted():
    c = case()
    total, *_ = mixture.loss(c["heads"], c["items"], c["positive"], c["log_pi"].requires_grad_(), c["log_sigma"], TAU)
    total.backward()
    assert c["log_pi"].grad is not None and c["heads"].grad is None


def test_hard_routing_leaves_heads_without_gradient_and_the_mixture_does_not():
    c = case(k=4)
    _, (to_heads, _) = gradients(
        routing.pos_multihead, {**{n: c[n] for n in ("heads", "items", "positive")}, "tau": TAU}, ["heads", "items"]
    )
    assert ((to_heads.norm(dim=-1) > 0).sum(1) == 1).all()
    _, (to_heads, *_) = gradients(mixture.loss, {**c, "tau": TAU}, ["heads", "log_pi"])
    assert (to_heads.norm(dim=-1) > 0).all()


def test_the_routed_head_is_the_closest_by_hand():
    c = case(k=4)
    log_p = log_p_of(c)
    total = 0.0
    for n in range(5):
        cosines = [float(c["heads"][n, r] @ c["items"][n]) for r in range(4)]
        total -= log_p[n, cosines.index(max(cosines))].item() / 5
    assert routing.pos_multihead(c["heads"], c["items"], c["positive"], TAU).item() == pytest.approx(total, abs=1e-12)


def test_label_aware_by_hand():
    c = case(k=2)
    found = routing.label_aware(c["heads"], c["items"], c["positive"], TAU)
    users = []
    for n in range(5):
        scores = torch.stack([c["heads"][n, r] @ c["items"][n] for r in range(2)])
        user = (scores.softmax(0)[:, None] * c["heads"][n]).sum(0)
        users.append(user / user.norm())
    plain = -mixture.log_components(torch.stack(users)[:, None], c["items"], c["positive"], TAU).mean()
    assert torch.allclose(found, plain)


def test_memory_does_not_grow_with_k():
    """What the forward pass keeps for the backward pass: the gradients themselves and (B, k), never (B, k, C)."""
    kept = {}
    for k in (2, 16):
        c = case(B=32, k=k, d=8, C=600, dtype=torch.float32)
        sizes = []
        heads = c["heads"].requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda x, s=sizes: s.append(x.numel()) or x, lambda x: x):
            mixture.loss(heads, c["items"].requires_grad_(), c["positive"], c["log_pi"], c["log_sigma"], TAU, c["ids"])
            routing.all_multihead(heads, c["items"], c["positive"], TAU, c["ids"])
        kept[k] = max(sizes)
    assert kept[16] <= max(32 * 16 * 8, 600 * 8)


# ------------------------------------------------------------------------------------------------------- bad input


def test_errors_name_argument_expected_and_got():
    c = case()
    with pytest.raises(
        BachError, match=r"heads should be \(B, k, d\) and items \(C, d\) with the same d; got heads \(5, 3, 6\)"
    ):
        mixture.log_components(c["heads"], c["items"][:, :5], c["positive"], TAU)
    with pytest.raises(BachError, match=r"positive should be \(5,\), one candidate per row; got \(4,\)"):
        mixture.log_components(c["heads"], c["items"], c["positive"][:4], TAU)
    with pytest.raises(BachError, match=r"positive should be row numbers 0 … 16 of items; got 17"):
        mixture.log_components(c["heads"], c["items"], c["positive"] + 17, TAU)
    with pytest.raises(BachError, match=r"ids should be \(17,\), the item of each candidate; got \(3,\)"):
        mixture.log_components(c["heads"], c["items"], c["positive"], TAU, c["ids"][:3])
    for function in (mixture.loss, mixture.plain_loss):
        wrong = {**c, "tau": TAU}
        with pytest.raises(BachError, match=r"positive should be row numbers 0 … 16 of items; got -1"):
            function(**{**wrong, "positive": c["positive"] - 1})
        with pytest.raises(BachError, match=r"positive should be \(5,\)"):
            function(**{**wrong, "positive": c["positive"][:1]})
        with pytest.raises(
            BachError, match=r"weights should be \(17,\) for the candidates and \(5,\) for the positives"
        ):
            function(**{**wrong, "weights": some_weights(5, 17, torch.float64)})
        with pytest.raises(BachError, match=r"tau should be a positive number; got -0\.07"):
            function(**{**wrong, "tau": -0.07})
        with pytest.raises(BachError, match="at least one row, head and candidate"):
            function(**{**wrong, "heads": c["heads"][:, :0]})
    with pytest.raises(
        BachError, match=r"kappa and heads should have the same shape; got kappa \(5,\), heads \(5, 3\)"
    ):
        mixture.log_sigma(c["heads"], c["items"][:5], torch.ones(5).double(), KERNELS["power-spherical"])
    with pytest.raises(BachError, match=r"heads should be unit vectors: normalise them; got one of length 0\.5"):
        mixture.log_components(0.5 * c["heads"], c["items"], c["positive"], TAU)
    with pytest.raises(BachError, match="heads should be unit vectors: normalise them; got one of length 2"):
        mixture.log_components(2 * c["heads"], c["items"], c["positive"], TAU)
    with pytest.raises(
        BachError,
        match=r"log_pi and log_sigma should have the same shape; got log_pi \(5, 3\), log_sigma \(5, 2\)",
    ):
        mixture.responsibilities(c["log_pi"], c["log_sigma"][:, :2])
    with pytest.raises(BachError, match=r"standard has one head: heads should be \(B, 1, d\); got \(5, 3, 6\)"):
        routing.standard(c["heads"], c["items"], c["positive"], TAU)
