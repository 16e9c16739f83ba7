"""A two-tower model: user encoder + objective, with the item tower, τ and candidate set that all methods share.

    history ──► tokens ──► encoder ──► heads u (B, k, d)            items v (n, d)
                      └──► gate ─────► log π_u (B, k)   κ-net ──► κ (B, k)          BACH only

`objective` is the training step's loss with what there is to see; `loss` is its number; `score` is the serving rule.
"""

from __future__ import annotations

from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import embedding, normalize

from bachlib import BachError
from bachlib.model import mixture, routing, scoring
from bachlib.model.inputs import checked_history, checked_ids
from bachlib.model.onepass import in_full
from bachlib.model.sphere import KERNELS
from bachlib.model.towers import Codebook, KappaNet, PiTable


class Encoded(NamedTuple):
    """What a user is. Methods without weights weigh their heads equally, and without a κ-net have κ = 1/τ."""

    heads: Float[Tensor, "B k d"]
    log_pi: Float[Tensor, "B k"]
    kappa: Float[Tensor, "B k"]


class Objective(NamedTuple):
    """A step's loss and what there is to see: each term's mean, γ (who explained the positive), the heads."""

    loss: Float[Tensor, ""]
    terms: dict[str, Float[Tensor, ""]]
    gamma: Float[Tensor, "B k"]
    encoded: Encoded
    heads: Float[Tensor, "*B k d"]  # with gradient; (k, d) where all users share them


class TwoTower(nn.Module):
    """A row of the table of methods with its towers; made by `methods.build`."""

    def __init__(
        self,
        encoder: nn.Module,
        item_tower: nn.Module,
        objective: str,
        *,
        k: int,
        tau: float,
        gate: nn.Module | None = None,
        kernel: str | None = None,
        n_hist: int,
        history: str = "tower",
        power: float = 1.0,
        config: dict[str, Any] | None = None,
    ):
        super().__init__()
        self.encoder, self.item_tower, self.gate = encoder, item_tower, gate
        self.rule, self.k, self.tau, self.n_hist, self.history, self.power = objective, k, tau, n_hist, history, power
        self.kernel = KERNELS[kernel] if kernel else None
        self.d = item_tower(torch.zeros(1, dtype=torch.long)).shape[-1]
        self.kappa_net = KappaNet(self.d, tau) if kernel else None
        self.config = config or {}
        if history == "frozen" and not hasattr(item_tower, "table"):
            raise BachError("history='frozen' takes the item tower's `table`, and this item tower has none")

    # ------------------------------------------------------------------------------------------------ towers

    @property
    def n_items(self) -> int:
        return self.item_tower.n_items

    @property
    def device(self) -> torch.device:
        return next(chain(self.parameters(), self.buffers())).device

    def items(self, ids: Int[Tensor, " n"] | None = None) -> Float[Tensor, "n d"]:
        """Unit embeddings v of all items, or of these."""
        if ids is None:
            ids = torch.arange(self.n_items, device=self.device)
        return normalize(in_full(self.item_tower(ids)), dim=-1)

    def encode(
        self,
        history: Int[Tensor, "B n"],
        user: Int[Tensor, " B"] | None = None,
        rows: Float[Tensor, "n_rows d"] | None = None,
    ) -> Encoded:
        """Heads, log π_u and κ of a history: (B, n) item ids, −1 pads on the left; the last n_hist are looked at.

        `user` is only for `pi="table"`, a free π_u per user of the data set. `rows` if you have `model.token_rows()` at
        hand; they may go on beyond the data set, with items that came later.
        """
        tokens, history = self._read(history, rows)
        return self._encode(tokens, history, user)

    def log_pi(
        self,
        history: Int[Tensor, "B n"],
        user: Int[Tensor, " B"] | None = None,
        rows: Float[Tensor, "n_rows d"] | None = None,
    ) -> Float[Tensor, "B k"]:
        """Only log π_u of a history: all that a codebook needs to know of a user."""
        tokens, history = self._read(history, rows)
        return self._log_pi(tokens, history, user)

    def _read(self, history: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """(tokens, history checked)."""
        rows = self.token_rows() if rows is None else rows
        history = self._checked(history, len(rows))
        return self._tokens(history, rows), history

    def token_rows(self) -> Float[Tensor, "n_items d"]:
        """What a history is read from: the item embeddings, or with history="frozen" the PureSVD rows."""
        return self.item_tower.table if self.history == "frozen" else self.items()

    def log_pi_of(self, tokens: Float[Tensor, "B n d"]) -> Float[Tensor, "B k"]:
        """log π of a context given as vectors instead of items: whatever can be put among the rows of a history."""
        if self.gate is None or isinstance(self.gate, PiTable):
            raise BachError("a context goes through the gating tower; this model has none")
        if tokens.ndim != 3 or tokens.shape[-1] != self.d or not 1 <= tokens.shape[1] <= self.n_hist:
            wanted = f"(B, n, d) with 1 ≤ n ≤ {self.n_hist} and d = {self.d}"
            raise BachError(f"a context is vectors {wanted}; got shape {tuple(tokens.shape)}")
        return self._log_pi(tokens, tokens.new_zeros(tokens.shape[:2], dtype=torch.long), None)

    def _tokens(self, history: Tensor, rows: Tensor, place: Tensor | None = None) -> Tensor:
        """A row for each item of a history; `place` says where an id is among the rows."""
        at = history.clamp(min=0)
        return embedding(at if place is None else place[at], rows)

    def _encode(self, tokens: Tensor, history: Tensor, user: Tensor | None) -> Encoded:
        heads, kappa = self._heads(tokens, history)
        if heads.ndim == 2:  # shared
            heads, kappa = heads.expand(len(history), -1, -1), kappa.expand(len(history), -1)
        return Encoded(heads, self._log_pi(tokens, history, user), kappa)

    def _heads(self, tokens: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
        """(heads, κ), (B, k, d) and (B, k), or (k, d) and (k,) where all users share them."""
        if isinstance(self.encoder, Codebook) and self.encoder.shared is not None:
            heads = self.encoder.shared
        else:
            heads = normalize(in_full(self.encoder(tokens, history)), dim=-1)
            if heads.shape != (len(history), self.k, self.d):
                wanted = (len(history), self.k, self.d)
                raise BachError(f"the encoder should return (B, k, d) = {wanted}; got {tuple(heads.shape)}")
        kappa = self.kappa_net(heads) if self.kappa_net else torch.full_like(heads[..., 0], 1 / self.tau)
        return heads, kappa

    def _log_pi(self, tokens: Tensor, history: Tensor, user: Tensor | None) -> Tensor:
        if isinstance(self.gate, PiTable):
            logits = self.gate(self._users(user, len(history)))
        elif self.gate is not None:
            logits = in_full(self.gate(tokens, history))
        else:
            logits = tokens.new_zeros(len(history), self.k)
        if logits.shape != (len(history), self.k):
            raise BachError(f"the gate should return (B, k) = {(len(history), self.k)}; got {tuple(logits.shape)}")
        return logits.log_softmax(-1)

    # ------------------------------------------------------------------------------------------------ serving

    @torch.no_grad()
    def score(
        self,
        history: Int[Tensor, "B n"],
        user: Int[Tensor, " B"] | None = None,
        items: Float[Tensor, "n_items d"] | None = None,
        around: Int[Tensor, "B m"] | None = None,
    ) -> Float[Tensor, "B n_items"]:
        """Serving scores over the catalogue; `items` if you have `model.items()` at hand.

        With `around` any numbers will do that rank these items among all as the scores would: cheaper for a mixture.
        """
        history = self._checked(history)
        items = self.items() if items is None else items
        tokens = self._tokens(history, self.item_tower.table if self.history == "frozen" else items)
        heads, log_pi, kappa = self._encode(tokens, history, user)
        if self.kernel and around is not None:
            return scoring.ranking_scores(heads, items, log_pi, kappa, self.kernel, self._ids(around))
        if self.kernel:  # mixture density (eq. 23)
            return scoring.scores(heads, items, log_pi, kappa, self.kernel)
        return torch.stack([heads[:, r] @ items.T for r in range(heads.shape[1])]).amax(0)  # max over heads (eq. 8)

    # ------------------------------------------------------------------------------------------------ training

    def loss(self, history, positive, negatives, user=None) -> Float[Tensor, ""]:
        """(B, n), (B,), (R,) item ids → the mean loss; candidates are the batch's positives and the negatives."""
        return self.objective(history, positive, negatives, user).loss

    def objective(
        self,
        history: Int[Tensor, "B n"],
        positive: Int[Tensor, " B"],
        negatives: Int[Tensor, " R"],
        user: Int[Tensor, " B"] | None = None,
    ) -> Objective:
        """The loss of the method with its terms; the item tower runs once per distinct item of the step."""
        history, positive = self._checked(history), self._ids(positive)
        ids = torch.cat([positive, self._ids(negatives)])  # candidates (C,)
        needed = ids if self.history == "frozen" else torch.cat([history.clamp(min=0).flatten(), ids])
        place = None
        if self.n_items <= len(needed):  # all of them are fewer than what the step asks for
            rows = self.items()
        else:
            distinct = needed.unique()
            place = torch.zeros(self.n_items, dtype=torch.long, device=ids.device)
            place[distinct] = torch.arange(len(distinct), device=ids.device)
            rows = self.items(distinct)
        candidates = embedding(ids if place is None else place[ids], rows)  # (C, d)
        if self.history == "frozen":
            tokens = self._tokens(history, self.item_tower.table)
        else:
            tokens = self._tokens(history, rows, place)
        heads, kappa = self._heads(tokens, history)
        log_pi = self._log_pi(tokens, history, user)
        own = torch.arange(len(positive), device=ids.device)  # the positives are the first candidates
        with torch.autocast(ids.device.type, enabled=False):  # mixed precision is for the towers only
            if self.rule == "elbo":
                return self._elbo(heads, log_pi, kappa, candidates, own, ids)
            return self._routed(heads, log_pi, kappa, candidates, own, ids)

    def _routed(self, heads, log_pi, kappa, candidates, own, ids) -> Objective:
        """The hard-routing losses; in place of γ there is the head closest to the positive."""
        if heads.ndim == 2:  # a codebook with a hard rule
            heads, kappa = heads.expand(len(own), -1, -1), kappa.expand(len(own), -1)
        hard = {
            "standard": routing.standard,
            "pos-multihead": routing.pos_multihead,
            "all-multihead": routing.all_multihead,
            "label-aware": lambda *args: routing.label_aware(*args, power=self.power),
        }[self.rule]
        loss = hard(heads, candidates, own, self.tau, ids)
        with torch.no_grad():
            gamma = nn.functional.one_hot(routing.routed_head(heads, candidates, own), self.k)
        terms = {"reconstruction": -loss.detach()}
        return Objective(loss, terms, gamma.to(loss), Encoded(heads, log_pi, kappa), heads)

    def _elbo(self, heads, log_pi, kappa, candidates, own, ids) -> Objective:
        """−ELBO (eq. 21); with heads that all users share the candidates need one product for the whole batch."""
        if heads.ndim == 2:
            encoded = Encoded(heads.expand(len(own), -1, -1), log_pi, kappa.expand(len(own), -1))
            log_sigma = self.kernel.log_density(candidates[: len(own)] @ heads.T, encoded.kappa, heads.shape[-1])
            log_p = mixture.shared_log_components(heads, candidates, own, self.tau, ids)
            seen = mixture.elbo(log_pi, log_sigma, log_p)
            loss = -seen.total.mean()
        else:
            encoded = Encoded(heads, log_pi, kappa)
            log_sigma = mixture.log_sigma(heads, candidates[: len(own)], kappa, self.kernel)
            loss, seen = mixture.loss(heads, candidates, own, log_pi, log_sigma, self.tau, ids)
        with torch.no_grad():
            gamma = mixture.responsibilities(log_pi, log_sigma).exp()
            terms = {name: getattr(seen, name).mean() for name in ("reconstruction", "prior", "entropy")}
        return Objective(loss, terms, gamma, encoded, heads)

    # -------------------------------------------------------------------------------------------------- input

    def _users(self, user: Tensor | np.ndarray | None, n: int) -> Tensor:
        if user is None:
            raise BachError("pi='table' has a free π_u per user of the data set: say who with user=")
        user, known = torch.as_tensor(user, device=self.device), len(self.gate.logits)
        if user.shape != (n,) or not bool(((user >= 0) & (user < known)).all()):
            raise BachError(f"user should be {n} numbers 0 … {known - 1}, one per history; got {user.tolist()[:5]} …")
        return user

    def _ids(self, ids: Tensor | np.ndarray) -> Int[Tensor, "*n"]:
        return checked_ids(torch.as_tensor(ids, device=self.device), self.n_items)

    def _checked(self, history: Tensor | np.ndarray, n: int | None = None) -> Int[Tensor, "B n"]:
        """(B, n) with the last n_hist items."""
        return checked_history(torch.as_tensor(history, device=self.device), n or self.n_items)[:, -self.n_hist :]
