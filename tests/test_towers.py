"""The towers: fast forms against plain ones, what each promises at the start, padding, the baselines' encoders."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from bachlib import BachError
from bachlib.data import Windows
from bachlib.model import mixture, products
from bachlib.model.candidates import Weights
from bachlib.model.extractors import Capsules, ComiRecDR, ComiRecSA, Mind, SASRec, fixed_truncated_normal, squash
from bachlib.model.methods import build
from bachlib.model.plain import plain_step_loss
from bachlib.model.shared import shared_log_components
from bachlib.model.sphere import KERNELS
from bachlib.model.towers import ClsTower, Codebook, ItemTower, KappaNet, ResidualCodebook


def tower(k=4, d=16, width=16, dropout=0.0, cls_scale=1.0, n_hist=12):
    torch.manual_seed(0)
    return ClsTower(k, d, width, 4, 24, n_hist, dropout, cls_scale)


def histories(B=6, n=12, n_items=40):
    rng = np.random.default_rng(0)
    history = rng.integers(n_items, size=(B, n))
    for row, pads in enumerate(rng.integers(0, n, size=B)):
        history[row, :pads] = -1
    history[0] = -1  # somebody without any history
    return torch.from_numpy(history)


@pytest.mark.parametrize("width", [16, 24])
def test_the_cls_only_tower_is_pytorchs_layer(width):
    model, history = tower(width=width).double(), histories()
    tokens = torch.randn(6, 12, 16, dtype=torch.float64, requires_grad=True)
    fast, plain = model(tokens, history), model.plain(tokens, history)
    torch.testing.assert_close(fast, plain, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(fast)
    wanted = [tokens, *model.parameters()]
    found, expected = (torch.autograd.grad((out * weights).sum(), wanted) for out in (fast, plain))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_dropout_has_the_mean_of_pytorchs_layer():
    """In training both are random; their means over many draws agree within the standard error."""
    model, n = tower(dropout=0.3).train(), 20_000
    tokens, history = torch.randn(1, 12, 16).expand(n, -1, -1), torch.zeros(n, 12, dtype=torch.long)
    with torch.no_grad():
        draws = {"fast": model(tokens, history), "plain": model.plain(tokens, history)}  # every row has its own masks
    error = ((draws["fast"].var(0) + draws["plain"].var(0)) / n).sqrt()
    z = (draws["fast"].mean(0) - draws["plain"].mean(0)) / error
    assert z.abs().max() < 5
    ratio = draws["fast"].std(0) / draws["plain"].std(0)
    assert 0.9 < ratio.mean() < 1.1


@pytest.mark.parametrize("kept", ["attention", "dropout1", "dropout", "dropout2"])
def test_every_dropout_of_pytorchs_layer_is_there(kept):
    """One of its four places at a time: the spread of the output is that of PyTorch's layer, and 0 without it."""
    model, n = tower(dropout=0.5).train(), 20_000
    for name in ("dropout1", "dropout", "dropout2"):
        getattr(model.layer, name).p = 0.5 if name == kept else 0.0
    if kept != "attention":
        model.p_dropout = model.layer.self_attn.dropout = 0.0
    tokens, history = torch.randn(1, 12, 16).expand(n, -1, -1), torch.zeros(n, 12, dtype=torch.long)
    with torch.no_grad():
        fast, plain = (of(tokens, history).std(0) for of in (model, model.plain))
        assert plain.mean() > 0.02
        torch.testing.assert_close(fast, plain, rtol=0.06, atol=1e-3)
        assert model.eval()(tokens[:9], history[:9]).std(0).max() < 1e-6


def test_padding_changes_nothing():
    model = tower()
    tokens = torch.randn(1, 5, 16)
    history = torch.arange(5)[None]
    padded = torch.cat([torch.randn(1, 7, 16), tokens], 1)
    padded_history = torch.cat([torch.full((1, 7), -1), history], 1)
    torch.testing.assert_close(model(tokens, history), model(padded, padded_history))
    with pytest.raises(BachError, match="more than n_hist = 12"):
        model(torch.randn(1, 13, 16), torch.zeros(1, 13, dtype=torch.long))


def test_cls_scale_decides_how_parallel_heads_start():
    tokens, history = torch.randn(8, 12, 16) * 0.25, torch.zeros(8, 12, dtype=torch.long)

    def cosine(scale):
        heads = normalize(tower(k=4, cls_scale=scale)(tokens, history), dim=-1)
        return ((heads.sum(1).square().sum(-1) - 4) / 12).mean().item()

    assert cosine(1.0) < 0.3 < cosine(0.01)


def test_item_tower_starts_at_puresvd_and_knows_unmet_items():
    torch.manual_seed(0)
    table = torch.randn(30, 8) * 0.01
    table[3] = 0
    model = ItemTower(table, 16)
    start = model(torch.arange(30)).detach()
    known = [i for i in range(30) if i != 3]
    torch.testing.assert_close(normalize(start[known], dim=-1), normalize(table[known], dim=-1))
    assert start[3].norm() > 0.1 and start.square().sum(-1).mean().sqrt() == pytest.approx(1, abs=0.2)
    assert "table" not in dict(model.named_parameters())
    with pytest.raises(BachError, match="divide"):
        ClsTower(2, 16, 18, 4, 8, 10, 0.0, 1.0)


def test_kappa_net_starts_at_one_over_tau_and_sees_no_gradient():
    torch.manual_seed(0)
    net, heads = KappaNet(16, 0.07), normalize(torch.randn(5, 3, 16), dim=-1).requires_grad_()
    kappa = net(heads)
    torch.testing.assert_close(kappa, torch.full((5, 3), 1 / 0.07))
    assert [layer.out_features for layer in net.net if hasattr(layer, "out_features")] == [64, 64, 1]
    kappa.sum().backward()
    assert heads.grad is None and net.net[4].bias.grad is not None


def test_pi_is_the_softmax_of_the_gates_logits(world):
    """Written out, from the output of the gate's CLS token: no temperature, no other scale."""
    model = build("p-bach", world, 5, d=16)
    history = torch.from_numpy(world.history(np.arange(6), "valid"))
    with torch.no_grad():
        model.gate.head.weight.mul_(4)
        pooled = model.gate.tower.plain(model.items()[history], history)[:, 0].double().numpy()
        head = model.gate.head
        logits = pooled @ head.weight.double().numpy().T + head.bias.double().numpy()
        found = model.encode(history).log_pi.exp().double().numpy()
    np.testing.assert_allclose(found, np.exp(logits) / np.exp(logits).sum(1, keepdims=True), rtol=1e-4)
    assert found.max() > 0.5


def test_codebooks():
    torch.manual_seed(0)
    tokens, history = torch.randn(3, 12, 16), histories(3)
    shared = Codebook(4, 16)(tokens, history)
    assert shared.shape == (3, 4, 16) and (shared[0] == shared[1]).all()
    moved = ResidualCodebook(4, 16, tower(), 0.5)
    heads = normalize(moved(tokens, history), dim=-1)
    cosine = (heads * normalize(moved.prototypes, dim=-1)).sum(-1)
    assert cosine.min() >= math.cos(math.asin(0.5)) - 1e-6 and (heads[0] != heads[1]).any()
    torch.testing.assert_close(
        normalize(ResidualCodebook(4, 16, tower(), 0.0)(tokens, history), dim=-1)[0],
        normalize(ResidualCodebook(4, 16, tower(), 0.0)(tokens, history), dim=-1)[1],
    )


# ----------------------------------------------------------------------------------------------------- baselines


def test_squash_is_finite_at_zero_and_shorter_than_one():
    x = torch.randn(100, 8, dtype=torch.float64) * 10
    torch.testing.assert_close(squash(x).norm(dim=-1), x.norm(dim=-1) ** 2 / (1 + x.norm(dim=-1) ** 2))
    zero = torch.zeros(2, 8, requires_grad=True)
    squash(zero).sum().backward()
    assert squash(zero).abs().max() == 0 and zero.grad.isfinite().all()


def test_capsule_routing_by_hand():
    """Three iterations written as loops over users, interests and positions; softmax over interests per position."""
    torch.manual_seed(0)
    B, k, n, d = 3, 2, 5, 4
    mapped, logits = torch.randn(B, k, n, d), torch.randn(B, k, n)
    history = torch.tensor([[0, 1, 2, 3, 4], [-1, -1, 1, 2, 3], [-1, 0, 0, 0, 0]])
    found = Capsules(k, 3, "interests").route(mapped, logits, history)
    for b in range(B):
        routing = logits[b].clone()
        for iteration in range(3):
            capsules = []
            for r in range(k):
                total = torch.zeros(d)
                for j in range(n):
                    if history[b, j] >= 0:
                        total += routing[:, j].softmax(0)[r] * mapped[b, r, j]
                capsules.append(squash(total))
            if iteration < 2:
                for r in range(k):
                    for j in range(n):
                        routing[r, j] += mapped[b, r, j] @ capsules[r]
        torch.testing.assert_close(found[b], torch.stack(capsules))
    other = Capsules(k, 3, "positions").route(mapped, logits, history)
    assert (other - found).abs().max() > 0.05


def test_capsules_learn_through_the_last_iteration_only():
    mapped = torch.randn(1, 2, 5, 4, requires_grad=True)
    history, logits = torch.arange(5)[None], torch.randn(1, 2, 5)
    Capsules(2, 3, "interests").route(mapped, logits, history).sum().backward()
    with torch.no_grad():
        for _ in range(2):
            capsules = squash((logits.softmax(1)[..., None, :] @ mapped)[..., 0, :])
            logits = logits + (mapped @ capsules[..., None])[..., 0]
    again = mapped.detach().requires_grad_()
    squash((logits.softmax(1)[..., None, :] @ again)[..., 0, :]).sum().backward()
    torch.testing.assert_close(mapped.grad, again.grad)


def test_minds_draw():
    """Fresh in training, fixed by the history at evaluation whatever the batch, another with another `draw`."""
    torch.manual_seed(0)
    model, tokens, history = Mind(3, 8), torch.randn(4, 6, 8), histories(4, 6)
    model.train()
    assert (model(tokens, history)[1] - model(tokens, history)[1]).abs().max() > 1e-3
    model.eval()
    whole = model(tokens, history)
    torch.testing.assert_close(whole[2:], model(tokens[2:], history[2:]))
    model.draw = 12345
    assert (whole[1] - model(tokens, history)[1]).abs().max() > 1e-4
    many = fixed_truncated_normal(torch.arange(4000).view(-1, 4), 5, 0)
    assert many.abs().max() <= 2 and abs(many.mean()) < 0.03
    assert many.std().item() == pytest.approx(0.8796, abs=0.02)  # of N(0, 1) cut at ±2
    flat = many.view(len(many), -1)
    assert (torch.corrcoef(flat.T) - torch.eye(20)).abs().max() < 0.15


def test_comirec_dr_has_a_matrix_per_position_and_interest():
    torch.manual_seed(0)
    model, tokens, history = ComiRecDR(3, 4, 6), torch.randn(2, 6, 4), torch.arange(12).view(2, 6)
    assert model.maps.shape == (6, 3, 4, 4)
    mapped = torch.stack(
        [
            torch.stack([torch.stack([tokens[b, j] @ model.maps[j, r] for j in range(6)]) for r in range(3)])
            for b in (0, 1)
        ]
    )
    torch.testing.assert_close(model(tokens, history), model.route(mapped, torch.zeros(2, 3, 6), history))
    torch.testing.assert_close(  # a short history has the last positions
        model(tokens[:, 2:], history[:, 2:]),
        model(tokens, torch.cat([torch.full((2, 2), -1), history[:, 2:]], 1)),
    )


def test_comirec_sa_pools_items_without_positions():
    torch.manual_seed(0)
    model = ComiRecSA(3, 4, 6)
    with torch.no_grad():
        model.positions.normal_()
    item = torch.randn(4)
    tokens, history = item.expand(1, 6, 4), torch.zeros(1, 6, dtype=torch.long)
    torch.testing.assert_close(model(tokens, history), item.expand(1, 3, 4))  # the same item everywhere: nothing else
    model.positions_in_values = True
    assert (model(tokens, history) - item).abs().max() > 0.1
    assert model.attention[0].out_features == 16


def test_sasrecs_last_row_is_that_of_the_whole_sequence():
    torch.manual_seed(0)
    model = SASRec(8, 6, 2, 1, 0.5).eval()
    tokens, history = torch.randn(4, 6, 8), histories(4, 6)
    torch.testing.assert_close(model(tokens, history), model(tokens, history, all_rows=True))
    longer = torch.cat([tokens, torch.randn(4, 1, 8)], 1)  # causal: rows before do not see what comes
    x = model.blocks[0](tokens, torch.ones(6, 6).tril().bool()[None], slice(None))
    y = model.blocks[0](longer, torch.ones(7, 7).tril().bool()[None], slice(None))
    torch.testing.assert_close(x, y[:, :6])
    with pytest.raises(BachError, match="divide"):
        SASRec(8, 6, 2, 3, 0.1)


def test_sasrec_is_causal():
    """Two blocks under a triangular mask, written out: with one block the last position sees everything anyway."""
    torch.manual_seed(0)
    model, tokens = SASRec(8, 6, 2, 1, 0.0), torch.randn(4, 6, 8)
    x, seen = tokens * math.sqrt(8) + model.positions, torch.ones(6, 6).tril().bool()[None]
    for block in model.blocks:
        x = block(x, seen, slice(None))
    torch.testing.assert_close(model(tokens, torch.zeros(4, 6, dtype=torch.long)), model.norm(x[:, -1:]))


def test_sasrec_block_by_hand():
    """Queries and residual from LN(x), keys and values from x, pointwise feed-forward with its own residual."""
    torch.manual_seed(0)
    block = SASRec(8, 6, 1, 1, 0.0).blocks[0]
    x, seen = torch.randn(1, 5, 8), torch.ones(5, 5).tril().bool()
    q, key, value = block.query(block.norm1(x)), block.key(x), block.value(x)
    scores = (q @ key.transpose(1, 2) / math.sqrt(8)).masked_fill(~seen, -torch.inf)
    y = block.norm2(block.norm1(x) + scores.softmax(-1) @ value)
    torch.testing.assert_close(block(x, seen[None], slice(None)), y + block.feed(y))


@pytest.mark.parametrize("place", ["input", "attention", "inner", "output"])
def test_sasrecs_dropouts(place):
    """Each of its four places alone, where it can be seen: half of the values are 0, the others twice what they are."""
    torch.manual_seed(0)
    model, n = SASRec(8, 1, 1, 1, 0.5).train(), 4000
    (block,) = model.blocks
    block.norm1 = block.norm2 = model.norm = torch.nn.Identity()
    x, seen = torch.randn(1, 1, 8).expand(n, -1, -1), torch.ones(n, 1, 1, dtype=torch.bool)
    with torch.no_grad():
        if place == "input":
            model.blocks, whole = torch.nn.ModuleList(), x * math.sqrt(8) + model.positions
            found = model(x, torch.zeros(n, 1, dtype=torch.long))
        else:
            last, value = block.feed[3], block.value
            for parameter in (value if place != "attention" else last).parameters():
                parameter.zero_()  # no attention, or no feed-forward
            if place == "inner":
                block.p_dropout = 0.0
                last.weight.copy_(torch.eye(8))
                last.bias.zero_()
            if place == "output":
                block.feed[2].p = 0.0
            found = block(x, seen, slice(None)) - x
            whole = block.eval()(x, seen, slice(None)) - x
    there = whole[0, 0].abs() > 1e-6  # ReLU has zeros of its own
    ratio = (found / whole)[..., there]
    assert there.sum() >= 2
    torch.testing.assert_close(ratio, torch.where(ratio > 1, 2.0, 0.0), rtol=1e-4, atol=1e-5)
    assert (ratio > 1).float().mean((0, 1)).sub(0.5).abs().max() < 0.04


@pytest.mark.parametrize("name", ["sasrec", "standard", "p-bach", "p-bach-residual"])
def test_the_parameter_dropout_reaches_the_towers(world, name):
    history = torch.from_numpy(world.history(np.arange(4), "valid"))
    for p in (0.0, 0.3):
        model = build(name, world, 3, d=16, dropout=p).train()
        a, b = model.encode(history), model.encode(history)
        assert ((a.heads - b.heads).abs().max() > 1e-3) == (p > 0)
        assert ((a.log_pi - b.log_pi).abs().max() > 1e-3) == (p > 0 and "bach" in name)


@pytest.mark.parametrize("make", [lambda: Mind(3, 8), lambda: ComiRecDR(3, 8, 6), lambda: ComiRecSA(3, 8, 6),
                                  lambda: SASRec(8, 6, 2, 1, 0.1)])  # fmt: skip
def test_extractors_survive_an_empty_history(make):
    tokens = torch.randn(2, 6, 8, requires_grad=True)
    out = make()(tokens, torch.full((2, 6), -1))
    out.sum().backward()
    assert out.isfinite().all() and tokens.grad.isfinite().all()


# ------------------------------------------------------------------------------------------ the step and shared heads


@pytest.mark.parametrize("candidates", ["list", "set"])
@pytest.mark.parametrize("name", ["p-bach", "v-bach"])
def test_the_fast_step_is_the_plain_one(world, name, candidates):
    """Loss and the gradient of every parameter, on a real batch with repeated positives."""
    model = build(name, world, 4, d=16, dropout=0.0, candidates=candidates).double()
    batch = next(iter(Windows(world, 64)))
    history, positive = torch.from_numpy(batch.history), torch.from_numpy(batch.positive)
    history[:5, :30] = -1
    positive[1] = positive[0]
    negatives = torch.cat([positive[:3], torch.randint(0, world.n_items, (97,))])
    with torch.no_grad():  # away from the start, where the κ-net and the residual MLP are zero
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    fast, plain = model.loss(history, positive, negatives), plain_step_loss(model, history, positive, negatives)
    assert fast.item() == pytest.approx(plain.item(), abs=1e-6)
    names = [n for n, _ in model.named_parameters()]
    a, b = (torch.autograd.grad(loss, list(model.parameters()), allow_unused=True) for loss in (fast, plain))
    for where, x, y in zip(names, a, b, strict=True):
        assert (x - y).norm() <= 2e-5 * y.norm() + 1e-8, where


@pytest.mark.parametrize("with_ids", [False, True])
def test_shared_heads_need_one_product(with_ids):
    torch.manual_seed(0)
    codebook = normalize(torch.randn(5, 8, dtype=torch.float64), dim=-1).requires_grad_()
    table = normalize(torch.randn(10, 8, dtype=torch.float64), dim=-1).requires_grad_()
    ids = torch.tensor([3, 3, 1, 2, 3, 5, 1, 7, 8, 9, 3, 2])
    items = table[ids]  # copies of an item share their gradient
    positive = torch.tensor([0, 1, 2, 3])
    ids = ids if with_ids else None
    weights = torch.randn(4, 5, dtype=torch.float64)
    shared = shared_log_components(codebook, items, positive, 0.07, ids)
    plain = mixture.log_components(codebook.expand(4, -1, -1), items, positive, 0.07, ids)
    torch.testing.assert_close(shared, plain)
    grads = [torch.autograd.grad((x * weights).sum(), (codebook, table), retain_graph=True) for x in (shared, plain)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("with_ids", [False, True])
def test_shared_heads_with_weights(with_ids):
    torch.manual_seed(0)
    codebook, table = (normalize(torch.randn(n, 8, dtype=torch.float64), dim=-1) for n in (5, 10))
    ids, positive = torch.tensor([3, 3, 1, 2, 3, 5, 1, 7, 8, 9, 3, 2]), torch.arange(4)
    weights = Weights(3 * torch.rand(12).double() + 0.1, 2 * torch.rand(4).double() + 0.1)
    also = table[ids], positive, 0.07, ids if with_ids else None, weights
    plain = mixture.log_components(codebook.expand(4, -1, -1), *also)
    torch.testing.assert_close(shared_log_components(codebook, *also), plain)


@pytest.mark.parametrize("copies", [0, 1, 200])
@pytest.mark.parametrize("tau", [0.5, 0.07, 0.02, 0.005])
def test_shared_heads_in_float32_with_many_copies(tau, copies):
    """Items on the prototypes, so that one item and its copies have nearly all of a head's sum: log p and gradients are
    as close to float64 as those of the plain reference in float32, and no probability is above 1."""
    torch.manual_seed(0)
    prototypes = normalize(torch.randn(4, 8), dim=-1)
    table = torch.cat([prototypes, normalize(prototypes + 0.1 * torch.randn(4, 8), dim=-1)])
    table = torch.cat([table, normalize(torch.randn(30, 8), dim=-1)])
    positive = torch.tensor([0, 1, 4, 8, 0, 2, 30])  # two rows share their positive
    ids = torch.cat([positive, torch.arange(38), torch.tensor([0, 1, 8]).repeat(copies)])
    weights = torch.rand(7, 4)

    def found(dtype, shared):
        u, v = (x.to(dtype, copy=True).requires_grad_() for x in (prototypes, table))
        components = shared_log_components if shared else mixture.log_components
        log_p = components(u if shared else u.expand(7, -1, -1), v[ids], torch.arange(7), tau, ids)
        return log_p, *torch.autograd.grad((weights.to(dtype) * log_p).sum(), (u, v))

    exact, plain, fast = found(torch.float64, False), found(torch.float32, False), found(torch.float32, True)
    assert (fast[0] <= 0).all()
    for a, b, c in zip(fast, plain, exact, strict=True):
        assert (a - c).abs().max() <= 4 * (b - c).abs().max()


@pytest.mark.parametrize("kernel", list(KERNELS))
def test_serving_scores_are_the_log_density(kernel):
    torch.manual_seed(0)
    heads, items = (normalize(torch.randn(*s, dtype=torch.float64), dim=-1) for s in ((3, 4, 16), (50, 16)))
    log_pi, kappa = torch.randn(3, 4, dtype=torch.float64).log_softmax(-1), torch.rand(3, 4, dtype=torch.float64) * 50
    exact = mixture.log_density(heads, items, log_pi, kappa, KERNELS[kernel])
    torch.testing.assert_close(mixture.scores(heads, items, log_pi, kappa, KERNELS[kernel]), exact)
    single = mixture.scores(heads.float(), items.float(), log_pi.float(), kappa.float(), KERNELS[kernel])
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-4)


def test_wide_products_are_products(monkeypatch):
    """Values and gradients of `linear` against PyTorch's in float32, and by differences in float64."""
    torch.manual_seed(0)
    a, b = torch.randn(5, 70), torch.randn(4, 70)
    for x, y in ((a, b), (a.double(), b.double()), (a.T.contiguous().T, b.T.contiguous().T)):
        torch.testing.assert_close(products.times(x, y), x @ y.T)
    x, layer = torch.randn(2, 3, 7, requires_grad=True), products.Linear(7, 4)
    weights, wanted = torch.randn(2, 3, 4), [x, *layer.parameters()]
    found, expected = layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias)
    torch.testing.assert_close(found, expected)
    both = (torch.autograd.grad((out * weights).sum(), wanted) for out in (found, expected))
    for one, other in zip(*both, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(products.linear(x, layer.weight), x @ layer.weight.T)
    assert products.linear(x[:0], layer.weight).shape == (0, 3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16
    monkeypatch.setattr(products, "fast", lambda *_: True)
    monkeypatch.setattr(products, "ONEDNN", lambda x, w, bias, *_: torch.nn.functional.linear(x, w, bias))
    inputs = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 7), (4, 7), (4,))]
    torch.autograd.gradcheck(products.linear, inputs)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (slope,) = torch.autograd.grad(products.linear(*inputs).square().sum(), inputs[0], create_graph=True)
        slope.sum().backward()


def test_hidden_layers_in_parts(monkeypatch):
    """The κ-net and the item tower some rows at a time, and gradients, as in one piece."""
    torch.manual_seed(0)
    monkeypatch.setattr("bachlib.model.towers.PART", 3)
    net, tower = KappaNet(16, 0.07).double(), ItemTower(torch.randn(30, 8), 16).double()
    torch.nn.init.normal_(net.net[4].weight)
    torch.nn.init.normal_(tower.residual[2].weight)
    heads, ids = normalize(torch.randn(5, 2, 16, dtype=torch.float64), dim=-1), torch.arange(11)
    rows = tower.table[ids]
    pairs = (net, net(heads), net.net(heads)[..., 0].exp()), (tower, tower(ids), rows + tower.residual(rows))
    for module, found, expected in pairs:
        torch.testing.assert_close(found, expected)
        both = (torch.autograd.grad(out.square().sum(), list(module.parameters())) for out in (found, expected))
        for one, other in zip(*both, strict=True):
            torch.testing.assert_close(one, other)
    assert net(heads[:0]).shape == (0, 2) and net(heads[0, 0]).shape == ()
