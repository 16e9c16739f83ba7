"""What the heads do on held-out items, calibration, collapse; recovery of what was planted: against answers by hand."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import normalize

from bachlib import BachError
from bachlib.evaluate import diagnostics
from bachlib.model import mixture
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


# --------------------------------------------------------------------------------------------- on held-out items


@pytest.mark.parametrize("method", ["p-bach", "v-bach", "p-bach-global", "all-multihead"])
def test_held_out_is_the_mixture_on_the_whole_catalogue(world, method):
    """The same numbers from the reference functions of `mixture`, one user at a time."""
    model = build(method, world, 3, d=16)
    users = np.array([4, 30, 80])
    of = diagnostics.held_out(model, world, users)
    items = model.items().detach()
    for row, u in enumerate(users):
        heads, log_pi, kappa = (x.detach().repeat_interleave(10, 0) for x in model.encode(world.history([u], "test")))
        targets = torch.from_numpy(world.targets([u], "test")[0])
        log_p = mixture.log_components(heads, items, targets, model.tau)
        torch.testing.assert_close(of.log_p[row], log_p, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(of.log_likelihood[row], mixture.log_likelihood(log_pi, log_p), atol=1e-4, rtol=1e-4)
        if model.kernel is None:
            assert (of.gamma[row].argmax(-1) == (heads @ items[targets][:, :, None])[..., 0].argmax(-1)).all()
            continue
        log_sigma = mixture.log_sigma(heads, items[targets], kappa, model.kernel)
        torch.testing.assert_close(
            of.gamma[row], mixture.responsibilities(log_pi, log_sigma).exp(), atol=1e-4, rtol=1e-4
        )
        torch.testing.assert_close(of.gap[row], mixture.kl_gap(log_pi, log_sigma, log_p), atol=1e-4, rtol=1e-3)
    if model.kernel is None:
        with pytest.raises(BachError, match="only the BACH methods"):
            _ = of.gap


def test_calibration_of_what_is_calibrated_and_what_is_not():
    rng = np.random.default_rng(0)
    pi = rng.dirichlet([0.5] * 4, 4000)
    came = np.stack([rng.multinomial(10, p) for p in pi]) / 10
    right, wrong = diagnostics.calibration(pi, came), diagnostics.calibration(np.full_like(pi, 0.25), came)
    assert right.ece < 0.01 and right.bins["n"].sum() == pi.size and len(right.bins) == 10
    assert (np.abs(right.bins["predicted"] - right.bins["realised"]) < 5 * right.bins["se"]).all()
    assert wrong.ece < 0.01 and len(wrong.bins) == 1  # equal shares are calibrated, and say nothing
    sharpened = pi**3 / (pi**3).sum(1, keepdims=True)
    assert diagnostics.calibration(sharpened, came).ece > 0.08
    by_hand = diagnostics.calibration(np.array([[0.05, 0.05, 0.05, 0.95]]), np.array([[0.15, 0.15, 0.15, 0.45]]))
    assert by_hand.ece == pytest.approx(0.75 * 0.1 + 0.25 * 0.5)  # by how many there are
    with pytest.raises(BachError, match="shares between 0 and 1"):
        diagnostics.calibration(-pi, came)


def test_collapse_over_time():
    history = pd.DataFrame(
        {"epoch": [1, 2], "step": [5, 5], "effective_heads": [4.0, 1.0], "head_cosine": [0.1, 0.2],
         "usage": [[0.25] * 4, [1.0, 0, 0, 0]]}
    )  # fmt: skip
    found = diagnostics.collapse(history)
    assert found["collapse"].tolist() == [0, 1] and found["largest_share"].tolist() == [0.25, 1]


def test_summary_and_kappa_bounds(world):
    users = np.arange(world.n_users)
    row = diagnostics.summary(build("p-bach", world, 3, d=16), world, users)
    assert row["κ min"] == pytest.approx(1 / 0.07, rel=1e-4) and row["κ max"] == pytest.approx(1 / 0.07, rel=1e-4)
    assert 1 <= row["effective heads"] <= 3 and 1 / 3 <= row["largest share"] <= 1 and row["KL gap"] >= 0
    assert "KL gap" not in diagnostics.summary(build("mind", world, 3, d=16), world, users)
    bounds = diagnostics.kappa_bounds(torch.arange(101.0)[None])
    assert list(bounds.values()) == pytest.approx([0, 1, 50, 99, 100])
