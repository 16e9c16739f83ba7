"""A few heads of the user's own beside a codebook that all users share ("Global codebook", the hybrid rows).

The k = k_shared + k_own heads are one mixture: one π_u, one γ, one density at serving. They differ in cost only. A
prototype needs one product with the candidates for the whole batch, an own head one for each row. So the heads of a
training step stay apart (`Both`): log p of the prototypes comes from `shared_log_components`, that of the own
heads from the sweep of `onepass`. The plain twin is `mixture.plain_loss` with all heads of every row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import normalize

from bachlib.model.candidates import Heads, Ids, Items, PerHead, Rows, Targets, Weights, in_full
from bachlib.model.onepass import fits, reconstruction, reconstruction_of_all
from bachlib.model.shared import shared_log_components, shared_log_components_of_all
from bachlib.model.towers import ClsTower, Codebook, Context, History, KappaNet, OneKappa, Tokens


class Both(NamedTuple):
    """Heads of both kinds in the place of a tensor (B, k, d): the shared ones first. Either kind may be missing."""

    shared: Float[Tensor, "s d"]
    own: Float[Tensor, "B o d"]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.own), len(self.shared) + self.own.shape[1], self.shared.shape[1]))

    @property
    def ndim(self) -> int:
        return 3

    def expand(self, *_: int) -> Heads:
        """All heads of every row."""
        return torch.cat([self.shared.expand(len(self.own), -1, -1), self.own], 1)

    def cosines(self, vectors: Float[Tensor, "B M d"]) -> Float[Tensor, "B M k"]:
        return torch.cat([vectors @ self.shared.T, vectors @ self.own.mT], -1)

    def kappa(self, net: KappaNet | OneKappa | None, without: float) -> PerHead:
        """κ of all heads of every row: the net sees a prototype once."""
        if net is None:
            return self.own.new_full(self.shape[:2], without)
        return torch.cat([net(self.shared).expand(len(self.own), -1), net(self.own)], 1)

    def reconstruction(
        self, items: Items, positive: Rows, gamma: PerHead, tau: float, ids: Ids | None, weights: Weights | None
    ) -> tuple[Float[Tensor, ""], PerHead]:
        """As `onepass.reconstruction`: Σ_n Σ_r γ_r log p_r, and log p_r without gradient."""
        if weights is not None and weights.left_out is not None and not fits(tau, self.own.dtype):
            return reconstruction(self.expand(), items, positive, gamma, tau, ids, weights)
        of_shared, of_own = self._split(gamma)
        total, found = gamma.new_zeros(()), []
        if len(self.shared):
            log_p = shared_log_components(self.shared, items, positive, tau, ids, weights)
            total, found = torch.where(of_shared > 0, of_shared * log_p, 0.0).sum(), [log_p.detach()]
        if self.own.shape[1]:
            rebuilt, log_p = reconstruction(self.own, items, positive, of_own, tau, ids, weights)
            total, found = total + rebuilt, [*found, log_p]
        return total, torch.cat(found, -1)

    def reconstruction_of_all(
        self, items: Items, targets: Targets, gamma: Float[Tensor, "B M k"], tau: float
    ) -> tuple[Float[Tensor, ""], Float[Tensor, "B M k"]]:
        """As `onepass.reconstruction_of_all`."""
        if not len(self.shared) or not fits(tau, self.own.dtype):
            return reconstruction_of_all(self.expand(), items, targets, gamma, tau)
        of_shared, of_own = self._split(gamma)
        log_p = shared_log_components_of_all(self.shared, items, targets, tau)
        total, found = (of_shared * log_p).sum(), [log_p.detach()]
        if self.own.shape[1]:
            rebuilt, log_p = reconstruction_of_all(self.own, items, targets, of_own, tau)
            total, found = total + rebuilt, [*found, log_p]
        return total, torch.cat(found, -1)

    def _split(self, gamma: Tensor) -> tuple[Tensor, ...]:
        return gamma.split([len(self.shared), self.own.shape[1]], -1)


class Hybrid(nn.Module):
    """k_shared prototypes for all users, then k_own heads of each user by a CLS tower."""

    def __init__(self, codebook: Codebook, tower: ClsTower):
        super().__init__()
        self.codebook, self.tower = codebook, tower

    def read_context(self, width: int) -> None:
        self.tower.read_context(width)

    def forward(self, tokens: Tokens, history: History, context: Context = None) -> Both:
        return Both(self.codebook.shared, normalize(in_full(self.tower(tokens, history, context)), dim=-1))

    def plain(self, tokens: Tokens, history: History, context: Context = None) -> Heads:
        """All heads of every row; the step is tested against them."""
        return Both(self.codebook.shared, self.tower.plain(tokens, history, context)).expand()
