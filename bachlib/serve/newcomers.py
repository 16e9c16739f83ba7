"""π for new users of a codebook, without a history ("Cold start").

**Vectors** in the space of the items (a genre page, a seed item, a query) go through the gating tower in place of a
history. **Features** (age, country, a survey): a softmax regression predicts π from them; its targets are the gating
tower's π of known users. (A model that was trained with such features as its context reads them itself:
`retriever.retrieve([[]], context=…)`.) The heads are shared, so a new user only needs π:
`retriever.retrieve([[]], pi=…)`.
If nothing is known about a user, serve the most popular items, or use the mean π if it has to be the mixture.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.special import softmax

from bachlib import BachError
from bachlib.model.twotower import TwoTower
from bachlib.train.run import Run


@torch.no_grad()
def pi_from_vectors(
    model: TwoTower | Run, vectors: Float[np.ndarray, "B n d"], context: Float[np.ndarray, "B c"] | None = None
) -> Float[np.ndarray, "B k"]:
    """π of n vectors each in place of a history, by the gating tower of a model or of a run's model."""
    model = getattr(model, "model", model)
    if not np.isfinite(vectors).all():
        raise BachError("vectors in place of a history should be finite numbers")
    tokens = torch.as_tensor(np.asarray(vectors, np.float32), device=model.device)
    model.eval()
    return model.log_pi_of(tokens, context).double().softmax(-1).cpu().numpy()


def exemplars(
    member: Bool[np.ndarray, "n g"], popularity: Float[np.ndarray, " n"], names: Sequence[str], per_label: int = 3
) -> dict[str, Int[np.ndarray, " m"]]:
    """The most popular items of each label (genre, brand, shop), to represent it in a context."""
    order, columns = np.argsort(-np.asarray(popularity), kind="stable"), np.asarray(member, bool).T
    made = {name: order[column[order]][:per_label] for name, column in zip(names, columns, strict=True)}
    if empty := [name for name, items in made.items() if not len(items)]:
        raise BachError(f"no item has the label {empty[0]}")
    return made


class FeatureGate:
    """π = softmax(W x + b), fitted to π_u of known users by cross-entropy with a ridge on W."""

    def __init__(self, weight: Float[np.ndarray, "f k"], bias: Float[np.ndarray, " k"]):
        self.weight, self.bias = weight, bias

    @classmethod
    def fit(cls, features: Float[np.ndarray, "U f"], pi: Float[np.ndarray, "U k"], ridge: float = 1e-3) -> FeatureGate:
        """`features`: a row per known user, of about unit size; `pi`: the model's π of these users."""
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
        return softmax(features @ self.weight + self.bias, axis=1)
