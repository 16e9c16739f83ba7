"""From a request to what to look for: the history through the towers, and an operator's hand on π."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib import BachError
from bachlib.model.extractors import Capsules, ComiRecSA, SASRec
from bachlib.model.towers import PiTable
from bachlib.model.twotower import TwoTower
from bachlib.serve.catalogue import Catalogue, known_ids
from bachlib.serve.density import Query, Rule
from bachlib.serve.steering import Steering, checked_pi

Histories = list[Int[np.ndarray, " m"]]
Pi = Float[np.ndarray, "B k"]


class Users:
    """The user side of a model, always in evaluation mode: dropout would make slates random."""

    def __init__(self, model: TwoTower):
        self.model = model
        self.rule: Rule = model.kernel.name if model.kernel else "max over heads"
        self._rows: tuple[np.ndarray | None, Tensor | None] = (None, None)

    @torch.no_grad()
    def query(
        self, catalogue: Catalogue, histories: Histories, pi: Pi | Steering | None = None, user=None
    ) -> tuple[Query, Pi]:
        """(what to look for, π)."""
        empty = [row for row, ids in enumerate(histories) if not len(ids)]
        if empty and isinstance(self.model.encoder, Capsules | ComiRecSA | SASRec):
            raise BachError(
                f"request {empty[0]} has an empty history, and {type(self.model.encoder).__name__} makes its heads of "
                "nothing else; methods with CLS tokens or a codebook can serve it"
            )
        heads, log_pi, kappa = self.model.encode(*self._read(catalogue, histories, user))
        fine = ((heads.norm(dim=-1) - 1).abs() < 1e-3).all(1)  # false where it is not a number
        if not bool(fine.all()):
            row = int((~fine).nonzero()[0])
            raise BachError(f"request {row}: the encoder has no heads for this history of {len(histories[row])} items")
        weights, heads = self._steered(log_pi, pi), float32(heads)
        if self.model.kernel is None:
            return Query(heads, np.zeros(weights.shape), np.ones(weights.shape), self.rule), weights
        log_c = self.model.kernel.log_normalizer(kappa.double(), self.model.d).cpu().numpy()
        with np.errstate(divide="ignore"):
            return Query(heads, np.log(weights) + log_c, kappa.double().cpu().numpy(), self.rule), weights

    @torch.no_grad()
    def weights(
        self, catalogue: Catalogue, histories: Histories, pi: Pi | Steering | None = None, user=None
    ) -> Float[np.ndarray, "B k"]:
        """Only π, for a codebook. Where it was given, nothing of the user is needed."""
        if pi is not None and not isinstance(pi, Steering):
            return checked_pi(pi, len(histories), self.model.k)
        return self._steered(self.model.log_pi(*self._read(catalogue, histories, user)), pi)

    def _read(self, catalogue: Catalogue, histories: Histories, user) -> tuple[Tensor, Tensor | None, Tensor]:
        """What the towers take: the last n_hist items padded on the left, the user, the rows they are read from."""
        if self.model.training:
            self.model.eval()
        width = max(1, min(self.model.n_hist, max(map(len, histories))))
        padded = np.full((len(histories), width), -1)
        for row, ids in zip(padded, histories, strict=True):
            last = ids[-width:]
            row[width - len(last) :] = last
        if (known := self._rows)[0] is not catalogue.tokens:
            self._rows = known = (catalogue.tokens, torch.from_numpy(catalogue.tokens).to(self.model.device))
        if user is not None and isinstance(self.model.gate, PiTable):
            user = torch.from_numpy(known_ids("user", np.atleast_1d(user), len(self.model.gate.logits)))
        else:
            user = None
        return torch.from_numpy(padded), user, known[1]

    def _steered(self, log_pi: Tensor, pi: Pi | Steering | None) -> Pi:
        weights = log_pi.double().exp().cpu().numpy()
        weights /= weights.sum(1, keepdims=True)
        if pi is None:
            return weights
        if self.model.kernel is None:
            raise BachError(f"{self.model.config.get('method', 'this model')} weighs no heads: there is no π to set")
        return pi(weights) if isinstance(pi, Steering) else checked_pi(pi, *weights.shape)


def float32(x: Tensor) -> np.ndarray:
    return np.ascontiguousarray(x.detach().float().cpu().numpy())
