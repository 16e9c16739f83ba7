"""The model's half of serving: histories become heads and π, new items become vectors."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib import BachError
from bachlib.model.extractors import Capsules, ComiRecSA, SASRec
from bachlib.model.hybrid import Hybrid
from bachlib.model.towers import Codebook, PiTable
from bachlib.model.twotower import TwoTower
from bachlib.serve.catalogue import Catalogue, as_numbers, known_ids
from bachlib.serve.density import Query, Rule
from bachlib.serve.normalizer import log_normalizer
from bachlib.serve.steering import Pi, Steering, checked_pi, pi_of

Histories = list[Int[np.ndarray, " m"]]
Given = Pi | Steering | None  # what replaces or steers the model's π


class Users:
    """The user side of a model, always in evaluation mode: dropout would make slates random."""

    def __init__(self, model: TwoTower):
        self.model = model
        self.rule: Rule = model.kernel.name if model.kernel else "max over heads"
        self.hybrid = isinstance(model.encoder, Hybrid) and model.kernel is not None  # own heads beside a codebook
        self._rows: tuple[np.ndarray | None, Tensor | None] = (None, None)

    @torch.no_grad()
    def query(
        self, catalogue: Catalogue, histories: Histories, pi: Given = None, user=None, context=None
    ) -> tuple[Query, Pi]:
        """(the query: heads, weights and κ; π)."""
        empty = [row for row, ids in enumerate(histories) if not len(ids)]
        if empty and isinstance(self.model.encoder, Capsules | ComiRecSA | SASRec):
            alone = f"{type(self.model.encoder).__name__} makes its heads from the history alone"
            raise BachError(f"request {empty[0]} has an empty history; {alone}: use a codebook or CLS tokens")
        heads, log_pi, kappa = self.model.encode(*self._read(catalogue, histories, user), context)
        fine = ((heads.norm(dim=-1) - 1).abs() < 1e-3).all(1)  # false for NaN
        if not bool(fine.all()):
            row = int((~fine).nonzero()[0])
            raise BachError(f"request {row}: the encoder has no heads for this history of {len(histories[row])} items")
        weights = self._steered(log_pi, pi)
        return Query.of(float32(heads), weights, float64(kappa), self.rule), weights

    @torch.no_grad()
    def weights(self, catalogue: Catalogue, histories: Histories, pi: Given = None, user=None, context=None) -> Pi:
        """Only π, for a codebook. If it is given, the towers are not needed, nor the context they read."""
        if pi is not None and not isinstance(pi, Steering):
            if context is not None:
                self.model.checked_context(context, len(histories))
            return checked_pi(pi, len(histories), self.model.k)
        return self._steered(self.model.log_pi(*self._read(catalogue, histories, user), context), pi)

    @torch.no_grad()
    def prototypes(self) -> tuple[Float[np.ndarray, "k d"], Float[np.ndarray, " k"], Float[np.ndarray, " k"]] | None:
        """(heads, κ, log C_d(κ)) of the heads that all users share; None if there are none."""
        encoder = self.model.encoder.codebook if self.hybrid else self.model.encoder
        heads = encoder.shared if isinstance(encoder, Codebook) else None
        if heads is None or self.model.kernel is None:
            return None
        kappa = float64(self.model.kappa_net(heads))
        return float32(heads), kappa, log_normalizer(kappa, self.model.d, self.rule)

    def _read(self, catalogue: Catalogue, histories: Histories, user) -> tuple[Tensor, Tensor | None, Tensor]:
        """The towers' input: the last n_hist items padded on the left, the user, the token rows."""
        if self.model.training:
            self.model.eval()
        width = max(1, min(self.model.n_hist, max(map(len, histories))))
        padded = np.full((len(histories), width), -1)
        for row, ids in zip(padded, histories, strict=True):
            row[width - min(width, len(ids)) :] = ids[-width:]
        if (known := self._rows)[0] is not catalogue.tokens:
            self._rows = known = (catalogue.tokens, torch.from_numpy(catalogue.tokens).to(self.model.device))
        if user is not None and isinstance(self.model.gate, PiTable):
            user = torch.from_numpy(known_ids("user", np.atleast_1d(user), len(self.model.gate.logits)))
        return torch.from_numpy(padded), user, known[1]

    def _steered(self, log_pi: Tensor, pi: Given) -> Pi:
        weights = pi_of(float64(log_pi), *log_pi.shape)
        if pi is None:
            return weights
        if self.model.kernel is None:
            raise BachError(f"{self.model.config.get('method', 'this model')} has no π, so pi cannot be set")
        return pi(weights) if isinstance(pi, Steering) else checked_pi(pi, *weights.shape)


def new_items(model: TwoTower, rows: Any, vectors: Any) -> tuple[Float[np.ndarray, "m d"], Float[np.ndarray, "m d"]]:
    """(vectors, token rows) of items that came after training, from rows for the item tower or finished vectors."""
    if (rows is None) == (vectors is None):
        raise BachError("give either rows, for the item tower, or vectors")
    if rows is None and model.history == "frozen":
        raise BachError("this model reads histories from frozen rows: give rows, not vectors")
    if rows is not None:
        if not hasattr(model.item_tower, "embed"):
            raise BachError("this item tower has no `embed`: give vectors")
        rows = as_numbers("rows", rows)
        if rows.shape[1] != model.d:
            raise BachError(f"rows should be (n, {model.d}), as the item table's are; got {rows.shape}")
        with torch.no_grad():
            made = model.item_tower.embed(torch.from_numpy(rows).to(model.device))
            vectors = float32(torch.nn.functional.normalize(made, dim=-1))
    vectors = Catalogue.of(vectors).vectors
    if vectors.shape[1] != model.d:
        raise BachError(f"new items should have {model.d} dimensions; got {vectors.shape[1]}")
    return vectors, rows if model.history == "frozen" else vectors


def float32(x: Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.detach().float().cpu().numpy())


def float64(x: Tensor) -> np.ndarray:
    return x.detach().double().cpu().numpy()
