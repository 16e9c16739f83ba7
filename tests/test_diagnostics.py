"""Recovery of what was planted: on heads and weights made by hand, whose answers are known."""

import math

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from bachlib.evaluate import diagnostics
from bachlib.model.methods import build


def test_head_cosine():
    heads = normalize(torch.randn(5, 4, 8), dim=-1)
    by_hand = [np.mean([(u[r] @ u[s]).item() for r in range(4) for s in range(4) if r != s]) for u in heads]
    np.testing.assert_allclose(diagnostics.head_cosine(heads), by_hand, atol=1e-6)
    assert diagnostics.head_cosine(heads[:, :1]).abs().max() < 1e-6


def test_recovery_of_a_perfect_and_of_a_collapsed_user():
    perfect, collapsed = torch.eye(3), torch.tensor([[1.0, 0, 0]] * 3)
    pi = np.array([[0.5, 0.3, 0.2]] * 2)
    log_pi = torch.tensor(np.array([[0.5, 0.3, 0.2], [1 / 3] * 3])).float().log()
    found = diagnostics.recovery(torch.stack([perfect, collapsed]), log_pi, pi)
    np.testing.assert_allclose(found.overlap, [1, 0.5], atol=1e-6)
    np.testing.assert_allclose(found.covered, [1, 0.5], atol=1e-6)
    np.testing.assert_allclose(found.purity, [1, 1], atol=1e-6)
    assert found.distinct.tolist() == [3, 1]
    np.testing.assert_allclose(found.weights[1], [1, 0, 0], atol=1e-6)


def test_interest_of_heads_is_the_softmax_over_the_catalogue(world):
    model = build("p-bach", world, 3, d=16).eval()
    users = np.arange(40)
    encoded = diagnostics.encode_users(model, world, users)
    assert encoded.heads.shape == (40, 3, 16)
    torch.testing.assert_close(encoded.heads[:7], model.encode(world.history(users[:7], "test")).heads.detach())
    shares = diagnostics.interest_of_heads(model, encoded.heads, world.truth.item_interest)
    assert shares.shape == (40, 3, 5)
    weight = np.exp(model.items().detach().numpy() @ encoded.heads[4, 1].numpy() / 0.07)
    by_hand = np.bincount(world.truth.item_interest, weight) / weight.sum()
    np.testing.assert_allclose(shares[4, 1], by_hand, rtol=1e-4)
    assert shares.sum(-1).numpy() == pytest.approx(1, abs=1e-5)
    assert math.isclose(encoded.log_pi[0].exp().sum().item(), 1, abs_tol=1e-5)
