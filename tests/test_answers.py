"""The tables that answer the paper's questions, against the same numbers computed plainly; and their figures."""

import numpy as np
import pandas as pd
import pytest
import torch

from bachlib import BachError
from bachlib.data import Windows
from bachlib.evaluate import answers, diagnostics, evaluate
from bachlib.model import mixture
from bachlib.model.methods import build
from bachlib.params import TrainParams
from bachlib.show import plots

USERS = np.arange(60)


@pytest.fixture(scope="module")
def models(world):
    return {f"p-bach k={k}": build("p-bach", world, k, d=16) for k in (2, 5)} | {"standard": build("standard", world)}


@pytest.fixture(scope="module")
def held(world, models):
    return {name: diagnostics.held_out(models[name], world, USERS) for name in ("p-bach k=2", "p-bach k=5")}


@pytest.mark.parametrize("targets", ["one", "all"])
def test_gradient_noise(world, models, targets):
    p = TrainParams(batch_size=64, n_negatives=32, seed=3, targets=targets)
    table = answers.gradient_noise(models, world, p, steps=5)
    model, rng, gradients = models["p-bach k=2"], np.random.default_rng(3), []
    for batch, _ in zip(Windows(world, 64, 3, model.n_hist, following=True), range(5), strict=False):
        negatives = torch.from_numpy(rng.integers(world.n_items, size=32))
        following = torch.from_numpy(batch.following) if targets == "all" else None
        model.zero_grad()
        model.objective(
            *map(torch.from_numpy, (batch.history, batch.positive)), negatives, targets=following
        ).loss.backward()
        gradients.append(np.concatenate([q.grad.numpy().ravel() for q in model.parameters() if q.grad is not None]))
    gradients = np.array(gradients, float)
    variance = sum(((g - gradients.mean(0)) ** 2).sum() for g in gradients) / 4
    row = table.loc["p-bach k=2"]
    assert row["variance"] == pytest.approx(variance, rel=1e-4)
    assert row["signal"] == pytest.approx((gradients.mean(0) ** 2).sum() - variance / 5, rel=1e-3)
    assert row["noise"] == pytest.approx(row["variance"] / row["signal"])
    assert "least noisy" in plots.gradient_noise(table).layout.title.text
    with pytest.raises(BachError, match="steps=100000: an epoch of this data has only"):
        answers.gradient_noise({"x": models["standard"]}, world, p, steps=100_000)


def test_the_mean_of_noisy_gradients_is_not_taken_for_a_signal(world):
    """Twice the steps halve the noise of the mean; the estimate of the signal stays."""
    model, p = build("p-bach", world, 3, d=16), TrainParams(batch_size=16, n_negatives=16)
    few, many = (answers.gradient_noise({"m": model}, world, p, steps)["signal"].item() for steps in (20, 200))
    assert few == pytest.approx(many, rel=0.35)


def test_posterior_gap(held):
    table = answers.posterior_gap(held)
    of = held["p-bach k=5"]
    log_pi = of.log_pi[:, None].expand_as(of.log_p)
    gamma, contrastive = of.gamma.numpy(), (log_pi + of.log_p).softmax(-1).numpy()
    row = table.loc["p-bach k=5"]
    assert row["k"] == 5
    assert row["KL gap"] == pytest.approx((gamma * np.log(gamma / contrastive)).sum(-1).mean(), rel=1e-3)
    assert row["total variation"] == pytest.approx(np.maximum(gamma - contrastive, 0).sum(-1).mean(), rel=1e-4)
    assert row["same head"] == pytest.approx((gamma.argmax(-1) == contrastive.argmax(-1)).mean())
    tight = of._replace(log_sigma=of.log_p)  # then γ is γ^con
    perfect = answers.posterior_gap({"tight": tight}).loc["tight"]
    assert perfect["KL gap"] == pytest.approx(0, abs=1e-6) and perfect["same head"] == 1
    figure = plots.posterior_gap(table)
    assert len(figure.data) == 1 and list(figure.data[0].x) == [2, 5] and "with 5" in figure.layout.title.text


def test_calibration_controls(held):
    of = held["p-bach k=5"]
    peaked = of._replace(log_pi=(3 * torch.randn(60, 5, generator=torch.Generator().manual_seed(0))).log_softmax(-1))
    peaked = peaked._replace(log_sigma=torch.zeros_like(of.log_p))  # γ = π: calibrated by construction
    row = answers.calibration_controls({"peaked": peaked}).loc["peaked"]
    assert row["error"] == pytest.approx(0, abs=1e-6)
    assert row["error with another user's π"] == pytest.approx(0, abs=1e-6), (
        "γ follows any π; so this control is weak here"
    )
    known = torch.nn.functional.one_hot(torch.arange(60) % 5, 5).float()
    certain = of._replace(log_pi=(0.96 * known + 0.01).log(), log_sigma=20 * known[:, None].expand_as(of.log_p))
    row = answers.calibration_controls({"certain": certain}).loc["certain"]
    assert row["error"] < 0.05 < 0.2 < row["error with another user's π"]
    same = certain.log_pi.exp().mean(0).log().expand_as(certain.log_pi)
    nats = certain.log_likelihood - mixture.log_likelihood(same[:, None].expand_as(of.log_p), of.log_p)
    assert row["nats that π_u is worth"] == pytest.approx(nats.mean().item(), rel=1e-4)
    assert len(plots.calibration_controls(answers.calibration_controls(held)).data) == 2


def test_genre_coverage(world, models):
    table = answers.genre_coverage({name: models[name] for name in ("p-bach k=5", "standard")}, world, USERS)
    model, u = models["p-bach k=5"], 7
    member = world.genres.member / np.maximum(world.genres.member.sum(1, keepdims=True), 1)
    p = (model.encode(world.history([u], "test")).heads[0] @ model.items().T / model.tau).softmax(
        -1
    ).detach().numpy() @ member
    share = member[world.targets([u], "test")[0]].sum(0) / member[world.targets([u], "test")[0]].sum()
    alone = answers.genre_coverage({"p-bach": model}, world, np.array([u]))
    assert alone["covered"].item() == pytest.approx((share * p.max(0)).sum(), rel=1e-4)
    assert alone["covered"].item() == alone["covered by another user's heads"].item(), "there is no other user"
    assert (table["overlap"] <= 1).all() and "later genres" in plots.genre_coverage(table).layout.title.text


def test_diversity_at_equal_recall():
    """Four items, two of each kind; the targets are 0 and 1."""
    features, targets = np.array([[1.0, 0], [1, 0], [0, 1], [0, 1]]), np.array([[0, 1]])
    alike, mixed, wrong = np.array([[0, 1]]), np.array([[0, 2]]), np.array([[2, 3]])
    kinds = {
        "plain": lambda s: mixed,
        "re-ranked": lambda s: {0.0: alike, 1.0: mixed, 2.0: wrong}[s],
        "low": lambda s: wrong,
    }
    table = answers.diversity_and_recall(kinds, [0.0, 1.0, 2.0], targets, features)
    assert table["recall"].tolist() == [0.5, 0.5, 0.5, 1, 0.5, 0, 0, 0, 0]
    assert table["diversity"].tolist() == [1, 1, 1, 0, 1, 0, 0, 0, 0]
    equal = table.groupby("slates")["at equal recall"].first()
    assert equal["plain"] == 1 and equal["re-ranked"] == 1 and pd.isna(equal["low"])
    kinds = {"first": lambda s: np.array([[0, 1], [0, 2]]), "second": lambda s: [alike, mixed][int(s)].repeat(2, 0)}
    table = answers.diversity_and_recall(kinds, [0.0, 1.0], targets.repeat(2, 0), features)
    assert table["at equal recall"].tolist() == [0.5] * 4, "0.75 lies halfway between 1 (diversity 0) and 0.5 (1)"
    assert "second" in [trace.name for trace in plots.diversity_and_recall(table).data]


def test_shuffled_histories_keep_their_items(world):
    users = np.arange(world.n_users)
    usual, order = world.history(users, "test"), answers.shuffled(world).history(users, "test")
    any_of = answers.shuffled(world, past=True).history(users, "test")
    assert (np.sort(order, 1) == np.sort(usual, 1)).all() and (order != usual).mean() > 0.9
    assert ((order < 0) == (usual < 0)).all(), "padding stays on the left"
    assert (answers.shuffled(world).history(users, "test") == order).all(), "drawn with the seed"
    others = 0
    for u, row in enumerate(any_of):
        past, kept = np.concatenate(world.split(u)[:2]), row[row >= 0]
        assert len(kept) == min(50, len(past)) == len(set(kept)) and set(kept) <= set(past)
        others += len(set(kept) - set(past[-50:]))
    assert others > 5 * len(users)
    view = answers.shuffled(world)
    assert (view.targets(users, "test") == world.targets(users, "test")).all() and view == world


def test_shuffle_test(world):
    """MostPop reads no history, comirec-sa without positions reads a set, and a model of one's own only the order."""

    class Last(torch.nn.Module):
        """Ranks items by how near their numbers are to the last item's."""

        n_hist = 50

        def score(self, history):
            return -(torch.arange(world.n_items) - torch.as_tensor(history)[:, -1:]).abs().float()

    class AsASet(torch.nn.Module):
        n_hist = 50

        def score(self, history):
            return -(torch.arange(world.n_items) - torch.as_tensor(history).float().mean(1, keepdim=True)).abs()

    table = answers.shuffle_test({"mostpop": build("mostpop", world), "last": Last(), "set": AsASet()}, world)
    by = table.set_index(["model", "shuffled"])
    assert (by.loc["mostpop", ["gain", "low", "high"]] == 0).all(axis=None)
    assert by.loc[("set", "order"), "gain"] == 0 != by.loc[("set", "past"), "gain"]
    assert by.loc[("last", "order"), "gain"] != 0
    plain = evaluate(Last(), world, quiet=True).means["AUPRC"]
    assert by.loc[("last", "order"), "AUPRC as it is"] == pytest.approx(plain)
    figure = plots.shuffle_test(table)
    assert len(figure.data) == 2 and list(figure.data[0].x) == ["mostpop", "last", "set"]
    assert "AUPRC" in figure.layout.yaxis.title.text
