"""New users of a codebook: a π from what is known instead of a history ("Cold start", "Context").

**Context**: anything that has a place among the items (a genre page, a seed item, a query's vector) goes through the
gating tower as if it were a history. **Features** (age, country, a survey): a softmax regression learns π from them,
with what the gating tower says of the users one knows as its target. Either way the heads are there already, and a
newcomer needs only a point on the simplex: `retriever.retrieve([[]], pi=…)`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float

from bachlib import BachError
from bachlib.model.twotower import TwoTower


@torch.no_grad()
def pi_from_context(model: TwoTower, vectors: Float[np.ndarray, "B n d"]) -> Float[np.ndarray, "B k"]:
    """π of a context of n vectors each, by the gating tower."""
    tokens = torch.as_tensor(np.asarray(vectors, np.float32), device=model.device)
    return model.log_pi_of(tokens).double().softmax(-1).cpu().numpy()


def label_vectors(
    vectors: Float[np.ndarray, "n d"], member: Bool[np.ndarray, "n g"], names: Sequence[str]
) -> dict[str, Float[np.ndarray, " d"]]:
    """A vector for each label (genre, brand, shop): the mean of its items, as long as they are on average."""
    made = {}
    for name, column in zip(names, np.asarray(member, bool).T, strict=True):
        if not column.any():
            raise BachError(f"no item is a {name}: it has no place among the items")
        mean = vectors[column].mean(0)
        made[name] = mean / np.linalg.norm(mean) * np.linalg.norm(vectors[column], axis=1).mean()
    return made


class FeatureGate:
    """π = softmax(W x + b), fitted to π_u of known users by cross-entropy with a ridge on W."""

    def __init__(self, weight: Float[np.ndarray, "f k"], bias: Float[np.ndarray, " k"]):
        self.weight, self.bias = weight, bias

    @classmethod
    def fit(cls, features: Float[np.ndarray, "U f"], pi: Float[np.ndarray, "U k"], ridge: float = 1e-3) -> FeatureGate:
        """`features`: a row per known user, of about unit size; `pi`: what the model says of them."""
        x, y = (torch.as_tensor(np.asarray(a, np.float64)) for a in (features, pi))
        if x.ndim != 2 or y.ndim != 2 or len(x) != len(y) or not len(x):
            raise BachError(f"features should be (U, f) and pi (U, k); got {tuple(x.shape)} and {tuple(y.shape)}")
        if not bool(x.isfinite().all() & y.isfinite().all()):
            raise BachError("features and pi should be finite numbers")
        weight = torch.zeros(x.shape[1], y.shape[1], dtype=torch.float64, requires_grad=True)
        bias = y.mean(0).clamp(min=1e-12).log().requires_grad_()
        optimizer = torch.optim.LBFGS([weight, bias], max_iter=200, line_search_fn="strong_wolfe")

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            fit = -(y * (x @ weight + bias).log_softmax(-1)).sum(1).mean() + ridge * weight.square().sum()
            fit.backward()
            return fit

        optimizer.step(loss)
        return cls(weight.detach().numpy(), bias.detach().numpy())

    def __call__(self, features: Float[np.ndarray, "B f"]) -> Float[np.ndarray, "B k"]:
        features = np.atleast_2d(np.asarray(features, np.float64))
        if features.shape[1] != len(self.weight) or not np.isfinite(features).all():
            raise BachError(f"features should be (B, {len(self.weight)}) finite numbers; got {features.shape}")
        logits = features @ self.weight + self.bias
        weight = np.exp(logits - logits.max(1, keepdims=True))
        return weight / weight.sum(1, keepdims=True)
