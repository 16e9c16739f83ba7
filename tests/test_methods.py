"""The table of methods: all its names, own parts, inputs; `standard` against BACH with one head."""

import numpy as np
import pytest
import torch
from test_mixture import plain_all_multihead, plain_neighbour, plain_pos_multihead
from torch import nn

from bachlib import BachError
from bachlib.data import Windows
from bachlib.model import mixture, neighbours
from bachlib.model.methods import METHODS, Method, build
from bachlib.model.towers import PiTable

SMALL = {"d": 16, "ff": 32, "item_width": 32, "dropout": 0.0}


def batch_of(world, size=32):
    batch = next(iter(Windows(world, size)))
    rng = np.random.default_rng(0)
    negatives = torch.from_numpy(rng.integers(world.n_items, size=40))
    return torch.from_numpy(batch.history), torch.from_numpy(batch.positive), negatives


def test_what_came_later_does_not_make_an_old_model_another(world):
    """At their defaults, later parameters are in no config, so runs and indices of the first version stay the same."""
    assert not {"candidates", "context"} & build("p-bach", world).config["params"].keys()
    assert build("p-bach", world, candidates="set").config["params"]["candidates"] == "set"
    assert build("p-bach", world).config == build("p-bach", world, candidates="list", context="none").config


def test_the_table_is_the_papers():
    assert list(METHODS) == [
        "mostpop", "standard", "sasrec", "mind", "comirec-sa", "comirec-dr", "pos-multihead", "all-multihead",
        "p-bach", "v-bach", "p-bach-global", "v-bach-global", "p-bach-residual", "v-bach-residual",
        "p-bach-hybrid", "v-bach-hybrid", "remi", "bam", "maxmf",
    ]  # fmt: skip
    for name, row in METHODS.items():
        assert (row.kernel is not None) == ("bach" in name) == (row.serving == "mixture density")
        assert (row.kernel == "von-mises-fisher") == name.startswith("v-")


@pytest.mark.parametrize("name", [name for name in METHODS if name != "mostpop"])
def test_every_method_encodes_scores_and_learns(world, name):
    model = build(name, world, 3, k_shared=2, k_own=1, **SMALL)
    history, positive, negatives = batch_of(world)
    k = 1 if name in ("standard", "sasrec") else 3
    model.eval()
    heads, log_pi, kappa = model.encode(history)
    assert heads.shape == (32, k, 16) and log_pi.shape == kappa.shape == (32, k)
    torch.testing.assert_close(heads.norm(dim=-1), torch.ones(32, k))
    torch.testing.assert_close(log_pi.exp().sum(-1), torch.ones(32))
    torch.testing.assert_close(kappa, torch.full((32, k), 1 / 0.07))
    torch.testing.assert_close(model.items().norm(dim=-1), torch.ones(world.n_items))
    scores = model.score(history)
    assert scores.shape == (32, world.n_items) and scores.isfinite().all()
    torch.testing.assert_close(model.score(history[:5, -7:]), model.score(padded(history[:5, -7:])))
    first = model.loss(history, positive, negatives)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(15):
        optimizer.zero_grad()
        loss = model.loss(history, positive, negatives)
        loss.backward()
        optimizer.step()
    assert loss < first - 0.3
    idle = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    # what has no gradient by construction: the key's bias cannot be seen (it is never read), π and γ of a single head
    assert all("bias" in n or n.startswith(("gate", "kappa")) for n in idle), idle


def padded(history):
    return torch.cat([torch.full((len(history), 50 - history.shape[1]), -1), history], 1)


def test_serving_rules(world):
    history, *_ = batch_of(world, 8)
    model = build("all-multihead", world, 3, **SMALL).eval()
    expected = (model.encode(history).heads @ model.items().T).max(1).values
    torch.testing.assert_close(model.score(history), expected)
    model = build("v-bach", world, 3, **SMALL).eval()
    heads, log_pi, kappa = model.encode(history)
    torch.testing.assert_close(
        model.score(history),
        mixture.log_density(heads, model.items(), log_pi, kappa, model.kernel),
        rtol=1e-4,
        atol=1e-4,
    )
    popular = build("mostpop", world)
    counts = torch.from_numpy(np.asarray(world.matrix("train").sum(0))[0])
    assert (popular.score(history) == counts).all()
    for use in (popular.items, lambda: popular.encode(history), lambda: popular.loss(history, 0, 0)):
        with pytest.raises(BachError, match="no embeddings"):
            use()


@pytest.mark.parametrize("name", ["p-bach", "v-bach"])
def test_standard_is_bach_with_one_head(world, name):
    """The same first weights, the same loss (all other terms are constants: log 1 and no entropy), the same ranking."""
    one, bach = build("standard", world, **SMALL).double(), build(name, world, 1, **SMALL).double()
    history, positive, negatives = batch_of(world)
    shared = [n for n, _ in one.named_parameters()]
    ours, theirs = dict(one.named_parameters()), dict(bach.named_parameters())
    with torch.no_grad():
        for n in shared:
            theirs[n].copy_(ours[n] + 0.02)
            ours[n].copy_(theirs[n])
    seen = bach.objective(history, positive, negatives)
    loss = one.loss(history, positive, negatives)
    assert loss.item() == pytest.approx(seen.loss.item(), abs=1e-12)
    assert seen.terms["prior"] == 0 and seen.terms["entropy"] == 0
    a = torch.autograd.grad(loss, [ours[n] for n in shared], allow_unused=True)
    b = torch.autograd.grad(seen.loss, [theirs[n] for n in shared], allow_unused=True)
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y)
    with torch.no_grad():
        assert (one.eval().score(history).argsort(1) == bach.eval().score(history).argsort(1)).float().mean() > 0.999


def test_first_weights_come_from_the_seed(world):
    def weights(seed):
        return torch.cat([p.flatten() for p in build("p-bach", world, 3, seed=seed, **SMALL).parameters()])

    state = torch.get_rng_state()
    assert (weights(0) == weights(0)).all() and (weights(0) != weights(1)).any()
    assert (torch.get_rng_state() == state).all()


def test_history_tokens_frozen_or_from_the_tower(world):
    history, positive, negatives = batch_of(world)
    for mode in ("tower", "frozen"):
        model = build("standard", world, history=mode, **SMALL)
        with torch.no_grad():
            model.item_tower.residual[2].weight.normal_()
        tokens = model.token_rows()[history.clamp(min=0)]
        expected = model.item_tower.table if mode == "frozen" else model.items()
        torch.testing.assert_close(tokens, expected[history])
        model.loss(history, positive, negatives).backward()


def test_a_step_embeds_distinct_items_only(world):
    """Few histories in a large catalogue: the item tower is asked for each distinct item once, the loss is the same."""
    model = build("p-bach", world, 2, **SMALL).double()
    history, positive, negatives = (x[:4] for x in batch_of(world))
    asked = []
    whole = model.item_tower.forward
    model.item_tower.forward = lambda ids: asked.append(len(ids)) or whole(ids)
    few = model.loss(history, positive, negatives)
    distinct = torch.cat([history.flatten(), positive, negatives]).unique()
    assert asked == [len(distinct)] and len(distinct) < world.n_items
    heads, log_pi, kappa = model.encode(history)
    ids = torch.cat([positive, negatives])
    items, own = model.items()[ids], torch.arange(4)
    log_sigma = mixture.log_sigma(heads, items[:4], kappa, model.kernel)
    torch.testing.assert_close(few, mixture.plain_loss(heads, items, own, log_pi, log_sigma, 0.07, ids))


LEARNT = [name for name in METHODS if name != "mostpop"]


def away_from_the_start(model):
    """Weights at which the κ-net, the residual MLP and π are no longer constant."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return model


def loss_and_slopes(model, loss):
    return loss, torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", LEARNT)
def test_distinct_candidates_are_the_same_list_or_set(world, name):
    """To the bit: a set keeps the order of the list."""
    history, *_ = batch_of(world)
    found = []
    for candidates in ("list", "set"):
        model = away_from_the_start(build(name, world, 3, candidates=candidates, **SMALL))
        found.append(loss_and_slopes(model, model.loss(history, torch.arange(40, 8, -1), torch.arange(300, 100, -1))))
    assert found[0][0] == found[1][0] and all(map(torch.equal, found[0][1], found[1][1]))


@pytest.mark.parametrize("name", LEARNT)
def test_a_set_of_candidates_has_every_item_once(world, name, monkeypatch):
    """Against the plain loss in float64 on the distinct items, which need no ids then."""
    monkeypatch.setattr(neighbours, "draw", lambda gamma: gamma.argmax(-1))
    history, positive, negatives = batch_of(world)
    positive[3:6] = positive[0]  # positives of several rows, negatives drawn twice, negatives that are positives
    negatives = torch.cat([negatives, negatives[:20], positive[:9]])
    model = away_from_the_start(build(name, world, 3, candidates="set", **SMALL).double())
    model.penalty = 0.0  # of remi: it has no candidates
    seen = model.objective(history, positive, negatives)
    distinct = sorted({*positive.tolist(), *negatives.tolist()})
    items, own = model.items(torch.tensor(distinct)), torch.tensor([distinct.index(i) for i in positive.tolist()])
    heads, log_pi, kappa = model.encode(history)
    if model.objective_name == "elbo":
        log_sigma = mixture.log_sigma(heads, items[own], kappa, model.kernel)
        plain = mixture.plain_loss(heads, items, own, log_pi, log_sigma, model.tau)
        torch.testing.assert_close(-sum(seen.terms.values()), plain)
        torch.testing.assert_close(seen.gamma, mixture.responsibilities(log_pi, log_sigma).exp())
    elif model.objective_name == "all-multihead":
        plain = plain_all_multihead(heads, items, own, model.tau, None)
    elif model.objective_name in neighbours.RULES:
        plain = plain_neighbour(model.objective_name, heads, items, own, model.tau, None)
    else:
        if model.objective_name == "label-aware":
            weight = (heads @ items[own][:, :, None]).softmax(1)
            heads = nn.functional.normalize((weight * heads).sum(1, keepdim=True), dim=-1)
        plain = plain_pos_multihead(heads, items, own, model.tau, None)
    (found, slopes), (wanted, plain_slopes) = loss_and_slopes(model, seen.loss), loss_and_slopes(model, plain)
    assert found.item() == pytest.approx(wanted.item(), abs=1e-9)
    for a, b in zip(slopes, plain_slopes, strict=True):
        assert (a - b).norm() <= 1e-7 * b.norm() + 1e-9
    as_list = build(name, world, 3, **SMALL).double()
    as_list.load_state_dict(model.state_dict())
    more = as_list.loss(history, positive, negatives)  # with more terms in the sum
    assert more > found + 0.01 or (name == "maxmf" and abs(more - found) > 1e-4)  # its loss is a mean over negatives


@pytest.mark.parametrize("candidates", ["list", "set"])
@pytest.mark.parametrize("name", ["p-bach", "p-bach-global", "all-multihead", "remi", "maxmf"])
def test_parts_of_a_batch_have_the_candidates_of_the_whole(world, name, candidates):
    """What several processes do: the positives of the other rows are among the negatives."""
    history, positive, negatives = batch_of(world)
    positive[20:24] = positive[0]
    model = away_from_the_start(build(name, world, 3, candidates=candidates, **SMALL).double())
    halves = [
        model.loss(history[mine], positive[mine], torch.cat([positive[others], negatives]))
        for mine, others in ((slice(16), slice(16, 32)), (slice(16, 32), slice(16)))
    ]
    torch.testing.assert_close(sum(halves) / 2, model.loss(history, positive, negatives))


def test_free_pi_per_user(world):
    model = build("p-bach", world, 3, pi="table", **SMALL)
    history, positive, negatives = batch_of(world)
    user = torch.arange(32)
    assert isinstance(model.gate, PiTable) and model.gate.logits.shape == (world.n_users, 3)
    torch.testing.assert_close(model.encode(history, user).log_pi.exp(), torch.full((32, 3), 1 / 3))
    model.loss(history, positive, negatives, user).backward()
    assert model.gate.logits.grad[:32].any() and not model.gate.logits.grad[32:].any()
    with pytest.raises(BachError, match="pass the users with user="):
        model.encode(history)
    for wrong in (user[:1], user + world.n_users):
        with pytest.raises(BachError, match="user should be 32 numbers 0"):
            model.score(history, wrong)


# ------------------------------------------------------------------------------------------------------- own parts


class Mlp(nn.Module):
    """k heads from the mean of the history: an encoder that is not a Transformer."""

    def __init__(self, k, d):
        super().__init__()
        self.k, self.net = k, nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Linear(64, k * d))

    def forward(self, tokens, history):
        there = (history >= 0)[..., None]
        mean = (tokens * there).sum(1) / there.sum(1).clamp(min=1)
        return self.net(mean).view(len(tokens), self.k, -1)


class Features(nn.Module):
    """An item tower on side features only."""

    def __init__(self, features, d):
        super().__init__()
        self.n_items = len(features)
        self.register_buffer("features", features)
        self.net = nn.Linear(features.shape[1], d)

    def forward(self, ids):
        return self.net(self.features[ids])


class Uniform(nn.Module):
    def forward(self, tokens, history):
        return tokens.new_full((len(tokens), 3), 1 / 3).log()


@pytest.mark.parametrize("name", ["p-bach", "all-multihead"])
def test_own_encoder_gate_and_item_tower(world, name):
    features = torch.randn(world.n_items, 12)
    parts = {"encoder": Mlp(3, 16), "item_tower": Features(features, 16)}
    if name == "p-bach":
        parts["gate"] = Uniform()
    model = build(name, world, 3, **parts, **SMALL)
    history, positive, negatives = batch_of(world)
    assert model.encode(history).heads.shape == (32, 3, 16)
    model.loss(history, positive, negatives).backward()
    assert all(p.grad is not None for part in ("encoder", "item_tower") for p in parts[part].parameters())
    assert model.score(history).shape == (32, world.n_items)
    assert model.config["own"]["encoder"].startswith("Mlp ")


def test_a_row_of_your_own(world):
    model = build(Method("comirec-sa", "elbo", "mixture density", "power-spherical"), world, 3, **SMALL)
    history, positive, negatives = batch_of(world)
    assert set(model.objective(history, positive, negatives).terms) == {"reconstruction", "prior", "entropy"}


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "p-bahc"}, "method 'p-bahc' is unknown; the methods are mostpop, standard"),
        ({"tau": -1}, "tau: Input should be greater than 0"),
        ({"hedas": 3}, "hedas: not a parameter"),
        ({"method": "standard", "kernel": "von-mises-fisher"}, "standard has no kernel"),
        ({"d": 5000}, "rank=5000: should be 1"),
        ({"attention_heads": 3}, "should divide the width"),
    ],
)
def test_wrong_parameters(world, change, message):
    arguments = {"method": "p-bach", **change}
    with pytest.raises(BachError, match=message):
        build(arguments.pop("method"), world, **arguments)


def test_wrong_parts(world):
    with pytest.raises(BachError, match="the item tower has 7 items, the data set has 6"):
        build("p-bach", world, item_tower=Features(torch.randn(7, 3), 64))
    tower = Features(torch.randn(world.n_items, 3), 16)
    with pytest.raises(BachError, match="vectors of 16 dimensions, but d = 64"):
        build("standard", world, item_tower=tower)
    with pytest.raises(BachError, match="this item tower has none"):
        build("standard", world, item_tower=tower, history="frozen", **SMALL)


class Wrong(nn.Module):
    """Returns what it is told to, of the right length."""

    def __init__(self, *shape):
        super().__init__()
        self.shape, self.shared = shape, nn.Linear(2, 2)  # a name that means nothing here

    def forward(self, tokens, history):
        return torch.randn(len(tokens), *self.shape)


@pytest.mark.parametrize("shape", [(16,), (2, 16), (3, 8)])
def test_an_encoder_with_a_wrong_shape_is_said(world, shape):
    history, positive, negatives = batch_of(world)
    model = build("all-multihead", world, 3, encoder=Wrong(*shape), **SMALL)
    for use in (lambda: model.score(history), lambda: model.loss(history, positive, negatives)):
        with pytest.raises(BachError, match=r"encoder should return \(B, k, d\) = \(32, 3, 16\)"):
            use()
    assert build("p-bach", world, 3, encoder=Wrong(3, 16), **SMALL).score(history).shape == (32, world.n_items)
    with pytest.raises(BachError, match=r"gate should return \(B, k\) = \(32, 3\)"):
        build("p-bach", world, 3, gate=Wrong(5), **SMALL).encode(history)


def test_a_gate_may_return_any_logits(world):
    history, *_ = batch_of(world)
    model = build("p-bach", world, 3, gate=Wrong(3), **SMALL)
    torch.testing.assert_close(model.encode(history).log_pi.exp().sum(-1), torch.ones(32))


@pytest.mark.parametrize(
    "row",
    [Method("clss", "elbo", "", "power-spherical"), Method("cls", "elbo", ""), Method("cls", "max", "")],
)
def test_a_row_that_is_no_method(world, row):
    with pytest.raises(BachError, match="is invalid: the encoder should be one of"):
        build(row, world)


def test_a_codebook_with_a_hard_rule(world):
    model = build(Method("codebook", "all-multihead", "max over heads"), world, 3, **SMALL)
    assert model.loss(*batch_of(world)).isfinite()


def test_wrong_input(world):
    model = build("p-bach", world, 3, **SMALL)
    history, positive, negatives = batch_of(world)
    with pytest.raises(BachError, match=f"there is no item {world.n_items}: items are 0 … {world.n_items - 1}"):
        model.encode(torch.tensor([[1, world.n_items]]))
    with pytest.raises(BachError, match="there is no item -2"):
        model.encode(torch.tensor([[-2, 1]]))
    with pytest.raises(BachError, match=r"a row per user; got shape \(3,\)"):
        model.score(torch.tensor([1, 2, 3]))
    with pytest.raises(BachError, match="should be whole numbers 0"):
        model.score(torch.tensor([[1.0, 2.0]]))
    with pytest.raises(BachError, match="there is no item -1"):
        model.loss(history, positive.clone().fill_(-1), negatives)
    with pytest.raises(BachError, match="on the left of a history; row 1 has it after"):
        model.score(torch.tensor([[-1, 2], [2, -1]]))
    for name in METHODS:  # nothing is known about the user
        assert build(name, world, 3, **SMALL).score(torch.zeros(2, 0, dtype=torch.long)).shape == (2, world.n_items)
    longer = torch.cat([(history + 1) % world.n_items, history], 1)  # the last 50 are looked at
    model.eval()
    torch.testing.assert_close(model.encode(longer).heads, model.encode(history).heads)
    assert model.score(history.numpy()).shape == (32, world.n_items)  # arrays do as well
