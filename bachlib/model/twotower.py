"""A two-tower model: user encoder + objective, with the item tower, τ and candidate set that all methods share.

    history ──► tokens ──► encoder ──► heads u (B, k, d)            items v (n, d)
                      └──► gate ─────► log π_u (B, k)   κ-net ──► κ (B, k)          BACH only

A context, numbers of a user or of a request, goes to the gate or the encoder beside the history if `context` says so.
`objective` is the loss of a training step with its terms, `loss` only the number; `score` ranks items at serving.
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
from bachlib.model import mixture, neighbours, routing
from bachlib.model.candidates import candidates_of, in_full
from bachlib.model.hybrid import Both, Hybrid
from bachlib.model.onepass import fits
from bachlib.model.shared import shared_log_components
from bachlib.model.sphere import KERNELS
from bachlib.model.towers import Codebook, KappaNet, OneKappa, PiTable
from bachlib.params import ModelParams

History = Int[Tensor, "B n"]  # item ids, −1 pads on the left
Ids = Int[Tensor, " n"]
Users = Int[Tensor, " B"] | None
Rows = Float[Tensor, "n_items d"] | None
NextItems = Int[Tensor, "B M"] | None
Context = Float[Tensor, "B c"] | Float[Tensor, " c"] | None  # a row per request, or one for all


class Encoded(NamedTuple):
    """A user in the model. Methods without a gate have equal weights π_u; methods without a κ-net have κ = 1/τ."""

    heads: Float[Tensor, "B k d"]
    log_pi: Float[Tensor, "B k"]
    kappa: Float[Tensor, "B k"]


class Objective(NamedTuple):
    """The loss of a training step and what explains it."""

    loss: Float[Tensor, ""]
    terms: dict[str, Float[Tensor, ""]]  # means over the batch
    gamma: Float[Tensor, "B k"]  # γ, or 1 for the head to which the positive was routed; a mean over several targets
    encoded: Encoded
    heads: Float[Tensor, "*B k d"] | Both  # with gradient; (k, d) if all users share them


class TwoTower(nn.Module):
    """A row of the table of methods with its towers; `methods.build` makes it."""

    def __init__(
        self,
        encoder: nn.Module,
        item_tower: nn.Module,
        gate: nn.Module | None,
        config: dict[str, Any],
        n_context: int = 0,
    ):
        super().__init__()
        row, p = config["row"], ModelParams(**config["params"]).model_dump()
        self.encoder, self.item_tower, self.gate, self.config = encoder, item_tower, gate, config
        self.k, self.d, self.tau, self.n_hist, self.history = (p[x] for x in ("k", "d", "tau", "n_hist", "history"))
        self.objective_name, self.power, self.candidates = row["objective"], p["mind_power"], p["candidates"]
        self.beta, self.pairwise = p["remi_beta"], p["maxmf_loss"]
        self.penalty = p["remi_lambda"] * p["remi_batch"] if row["objective"] == "remi" else 0.0
        self.n_context, self.context = n_context, p["context"]  # its numbers, and what reads them
        self.kernel = KERNELS[p["kernel"] or row["kernel"]] if row["kernel"] else None
        self.bound = mixture.Bound(p["posterior"], p["through_gamma"], p["temper"])
        self.kappa_net = None
        if self.kernel:
            one = None if p["kappa"] == "net" else OneKappa(self.tau, learnt=p["kappa"] == "shared")
            self.kappa_net = one or KappaNet(self.d, self.tau)
        if self.history == "frozen" and not hasattr(item_tower, "table"):
            raise BachError("history='frozen' needs an item tower with a `table`; this item tower has none")

    @property
    def n_items(self) -> int:
        return self.item_tower.n_items

    @property
    def device(self) -> torch.device:
        return next(chain(self.parameters(), self.buffers())).device

    def items(self, ids: Ids | None = None) -> Float[Tensor, "n d"]:
        """Unit embeddings v of all items, or of the items `ids`."""
        ids = torch.arange(self.n_items, device=self.device) if ids is None else ids
        return normalize(in_full(self.item_tower(ids)), dim=-1)

    def encode(self, history: History, user: Users = None, rows: Rows = None, context: Context = None) -> Encoded:
        """Heads, log π_u and κ of a history: (B, n) item ids, −1 pads on the left; only the last n_hist items count.

        `user` is for `pi="table"` only, a free π_u per user of the data set. `rows` saves computing `token_rows()`
        again; it may have more rows than the data set, for items that were added later. `context`: (B, c) or (c,).
        """
        tokens, history = self._read(history, rows)
        context = self.checked_context(context, len(history))
        heads, kappa, _ = self._heads(tokens, history, context)
        log_pi, n = self._log_pi(tokens, history, user, context), len(history)
        return Encoded(heads.expand(n, -1, -1), log_pi, kappa.expand(n, -1))

    def log_pi(
        self, history: History, user: Users = None, rows: Rows = None, context: Context = None
    ) -> Float[Tensor, "B k"]:
        """log π_u of a history; with a codebook nothing else depends on the user."""
        tokens, history = self._read(history, rows)
        return self._log_pi(tokens, history, user, self.checked_context(context, len(history)))

    def checked_context(self, context: Any, n: int) -> Float[Tensor, "n c"] | None:
        """A row for each of n requests; None if the model reads no context."""
        if not self.n_context:
            if context is not None:
                raise BachError("this model reads no context; build it with context='gate', 'encoder' or 'both'")
            return None
        wanted = f"(B, c) = {(n, self.n_context)} or (c,) = ({self.n_context},)"
        if context is None:
            raise BachError(f"this model reads a context with every request: pass context=, {wanted} numbers")
        try:
            context = torch.as_tensor(context, dtype=torch.float32, device=self.device)
        except (TypeError, ValueError):
            raise BachError(f"context should be {wanted} numbers; got {context!r:.60}") from None
        if context.shape not in ((n, self.n_context), (self.n_context,)):
            raise BachError(f"context should be {wanted} numbers; got shape {tuple(context.shape)}")
        context = context.expand(n, -1)
        if not bool((fine := context.isfinite().all(1)).all()):
            raise BachError(f"context should be finite numbers; that of request {int((~fine).nonzero()[0])} is not")
        return context

    def _input(self, part: str, tokens: Tensor, history: Tensor, context: Tensor | None) -> tuple[Tensor, ...]:
        """What the encoder or the gate reads."""
        return (tokens, history, context) if self.context in (part, "both") else (tokens, history)

    def _read(self, history: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """(tokens, checked history)."""
        rows = self.token_rows() if rows is None else rows
        history = self._history(history, len(rows))
        return embedding(history.clamp(min=0), rows), history

    def token_rows(self) -> Float[Tensor, "n_items d"]:
        """The rows that become tokens: the item embeddings, or with history="frozen" the PureSVD rows."""
        return self.item_tower.table if self.history == "frozen" else self.items()

    def log_pi_of(self, tokens: Float[Tensor, "B n d"], context: Context = None) -> Float[Tensor, "B k"]:
        """log π of a history that is given as vectors instead of items; they take the place of tokens."""
        if self.gate is None or isinstance(self.gate, PiTable):
            raise BachError("vectors in place of a history need a gating tower; this model has none")
        if tokens.ndim != 3 or tokens.shape[-1] != self.d or not 1 <= tokens.shape[1] <= self.n_hist:
            wanted = f"(B, n, d) with 1 ≤ n ≤ {self.n_hist} and d = {self.d}"
            raise BachError(f"a history of vectors should be {wanted}; got shape {tuple(tokens.shape)}")
        there = tokens.new_zeros(tokens.shape[:2], dtype=torch.long)  # no padding
        return self._log_pi(tokens, there, None, self.checked_context(context, len(tokens)))

    def _heads(self, tokens: Tensor, history: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor, Any]:
        """Heads (B, k, d) and κ (B, k), or (k, d) and (k,) if all users share them; the attention if penalised.

        A hybrid's heads stay apart: `Both`.
        """
        attention = None
        if isinstance(self.encoder, Codebook) and self.encoder.shared is not None:
            heads = self.encoder.shared
        elif isinstance(self.encoder, Hybrid):
            heads = self.encoder(*self._input("encoder", tokens, history, context))
            return heads, heads.kappa(self.kappa_net, 1 / self.tau), None
        else:
            read = self._input("encoder", tokens, history, context)
            heads, attention = self.encoder.attend(*read) if self.penalty else (self.encoder(*read), None)
            heads = normalize(in_full(heads), dim=-1)
            if heads.shape != (wanted := (len(history), self.k, self.d)):
                raise BachError(f"the encoder should return (B, k, d) = {wanted}; got {tuple(heads.shape)}")
        kappa = self.kappa_net(heads) if self.kappa_net else torch.full_like(heads[..., 0], 1 / self.tau)
        return heads, kappa, attention

    def _log_pi(self, tokens: Tensor, history: Tensor, user: Tensor | None, context: Tensor | None) -> Tensor:
        if isinstance(self.gate, PiTable):
            logits = self.gate(self._users(user, len(history)))
        elif self.gate is not None:
            logits = in_full(self.gate(*self._input("gate", tokens, history, context)))
        else:
            logits = tokens.new_zeros(len(history), self.k)
        if logits.shape != (len(history), self.k):
            raise BachError(f"the gate should return (B, k) = {(len(history), self.k)}; got {tuple(logits.shape)}")
        return logits.log_softmax(-1)

    @torch.no_grad()
    def score(
        self,
        history: History,
        user: Users = None,
        items: Rows = None,
        context: Context = None,
        serve_by: str = "density",
    ) -> Tensor:
        """Serving scores (B, n_items) over the catalogue; `items` saves computing `model.items()` again."""
        items = self.items() if items is None else items
        rows = self.item_tower.table if self.history == "frozen" else items
        heads, log_pi, kappa = self.encode(history, user, rows, context)
        log_pi, kappa, kernel = mixture.served_by(serve_by, heads, items, log_pi, kappa, self.kernel, self.tau)
        if kernel:  # mixture density (eq. 23)
            return mixture.scores(heads, items, log_pi, kappa, kernel)
        return torch.stack([heads[:, r] @ items.T for r in range(heads.shape[1])]).amax(0)  # max over heads (eq. 8)

    def loss(
        self, history: History, positive: Ids, negatives: Ids, user: Users = None, context: Context = None
    ) -> Float[Tensor, ""]:
        """The mean loss. (B, n), (B,), (R,) item ids; candidates are the positives of the batch and the negatives."""
        return self.objective(history, positive, negatives, user, context).loss

    def objective(
        self,
        history: History,
        positive: Ids,
        negatives: Ids,
        user: Users = None,
        context: Context = None,
        targets: NextItems = None,
        following: NextItems = None,
        expected: Float[Tensor, " n_items"] | None = None,
    ) -> Objective:
        """The loss of the method with its terms. Every distinct item of the step is computed once.

        The candidates are the positives of the batch and the negatives; `candidates` says how often each counts. A row
        leaves out the items `following`. `expected` corrects for how often each item is drawn (`log_q`).

        With `targets`, all next items of each row, its loss is the mean over them as its positive: the expectation of
        the paper's loss over the row's own draw. The draws of the other rows stay candidates (see `onepass.Targets`).
        """
        history, positive = self._history(history), self._ids(positive)
        following = None if following is None else self._next(following, len(positive), "following")
        drawn = candidates_of(
            positive, self._ids(negatives), self.n_items, self.candidates == "set", following, expected
        )
        ids, own = drawn.ids, drawn.own
        frozen, at = self.history == "frozen", history.clamp(min=0)
        needed = ids if frozen else torch.cat([at.flatten(), ids])
        if targets is None and self.objective_name in neighbours.RULES:  # their one target is a case of several
            targets = positive[:, None]
        if targets is not None:
            targets = self._next(targets, len(positive))
            needed = torch.cat([needed, targets.clamp(min=0).flatten()])
        wanted = torch.zeros(self.n_items, dtype=torch.bool, device=ids.device)
        wanted[needed] = True
        place, rows = wanted.cumsum(0) - 1, self.items(wanted.nonzero()[:, 0])  # the row of each item
        candidates = embedding(place[ids], rows)  # (C, d)
        tokens = embedding(at, self.item_tower.table) if frozen else embedding(place[at], rows)
        context = self.checked_context(context, len(history))
        heads, kappa, attention = self._heads(tokens, history, context)
        log_pi = self._log_pi(tokens, history, user, context)
        with torch.autocast(ids.device.type, enabled=False):  # mixed precision is for the towers only
            step = self._elbo if self.objective_name == "elbo" else self._routed
            if targets is not None:
                targets = drawn.targets(targets, embedding(place[targets.clamp(min=0)], rows))
            seen = step(heads, log_pi, kappa, candidates, own, drawn.weights(rows), targets)
            if attention is not None:
                seen = seen._replace(loss=seen.loss + self.penalty * neighbours.routing_penalty(attention, self.d))
            return seen

    def _routed(self, heads, log_pi, kappa, candidates, own, weights, targets) -> Objective:
        """The hard-routing losses (eqs. 6, 9, 10); γ is 1 for the head closest to the positive."""
        heads, kappa = heads.expand(len(own), -1, -1), kappa.expand(len(own), -1)  # a codebook with hard routing
        rule = self.objective_name
        if rule in neighbours.RULES:
            loss, gamma = neighbours.of_all(rule, heads, candidates, targets, self.tau, self.beta, self.pairwise)
        elif targets is not None:
            loss, gamma = routing.of_all(rule, heads, candidates, targets, self.tau, self.power)
        else:
            loss, gamma = routing.of_one(rule, heads, candidates, own, self.tau, self.power, weights)
        return Objective(loss, {"reconstruction": -loss.detach()}, gamma, Encoded(heads, log_pi, kappa), heads)

    def _elbo(self, heads, log_pi, kappa, candidates, own, weights, targets) -> Objective:
        """−ELBO (eq. 21); heads that all users share need one product with the candidates for the whole batch."""
        encoded = Encoded(heads.expand(len(own), -1, -1), log_pi, kappa.expand(len(own), -1))
        if targets is not None:
            log_sigma = self.kernel.log_density(targets.logits(heads, 1.0), encoded.kappa[:, None], self.d)
            step = heads, candidates, targets, log_pi, log_sigma, self.tau, self.bound
            loss, seen, gamma = mixture.loss_of_all(*step)
        elif heads.ndim == 2 and (weights.left_out is None or fits(self.tau, heads.dtype)):
            log_sigma = self.kernel.log_density(candidates[own] @ heads.T, encoded.kappa, heads.shape[-1])
            log_p = shared_log_components(heads, candidates, own, self.tau, weights=weights)
            seen = mixture.elbo(log_pi, log_sigma, log_p, self.bound)
            loss, gamma = -seen.total.mean(), self.bound.log_gamma(log_pi, log_sigma, log_p).detach().exp()
        else:
            u, weighted = encoded.heads if heads.ndim == 2 else heads, {"weights": weights, "bound": self.bound}
            log_sigma = mixture.log_sigma(u, candidates[own], encoded.kappa, self.kernel)
            loss, seen, gamma = mixture.loss(u, candidates, own, log_pi, log_sigma, self.tau, **weighted)
        terms = {name: getattr(seen, name).detach().mean() for name in ("reconstruction", "prior", "entropy")}
        return Objective(loss, terms, gamma, encoded, heads)

    def _users(self, user: Tensor | np.ndarray | None, n: int) -> Tensor:
        if user is None:
            raise BachError("pi='table' has one π_u per user of the data set: pass the users with user=")
        user, known = torch.as_tensor(user, device=self.device), len(self.gate.logits)
        if user.shape != (n,) or not bool(((user >= 0) & (user < known)).all()):
            raise BachError(f"user should be {n} numbers 0 … {known - 1}, one per history; got {user.tolist()[:5]} …")
        return user

    def _next(self, targets: Tensor | np.ndarray, n: int, name: str = "targets") -> Int[Tensor, "B M"]:
        targets = torch.as_tensor(targets, device=self.device)
        if targets.ndim != 2 or len(targets) != n or not bool((targets >= 0).any(1).all()):
            got = f"got {tuple(targets.shape)}: {targets.tolist()!r:.60}"
            raise BachError(f"{name} should be ({n}, M) item ids, one or more per row, −1 where it has fewer; {got}")
        return self._ids(targets.where(targets != -1, 0)).where(targets != -1, -1)

    def _ids(self, ids: Tensor | np.ndarray, n: int | None = None) -> Int[Tensor, "*n"]:
        """Item ids 0 … n − 1 on the device of the model."""
        ids, n = torch.as_tensor(ids, device=self.device), n or self.n_items
        if ids.is_floating_point():
            raise BachError(f"items should be whole numbers 0 … {n - 1}; got type {ids.dtype}")
        if len(wrong := ids[(ids < 0) | (ids >= n)]):
            raise BachError(f"there is no item {int(wrong[0])}: items are 0 … {n - 1}")
        return ids.long()

    def _history(self, history: Tensor | np.ndarray, n: int | None = None) -> Int[Tensor, "B n"]:
        """The last n_hist items; −1 is padding on the left. An empty history becomes one place of padding."""
        history = torch.as_tensor(history, device=self.device)
        if history.ndim != 2:
            raise BachError(f"a history should be (B, n) item ids, a row per user; got shape {tuple(history.shape)}")
        if not history.shape[1]:
            history = history.new_full((len(history), 1), -1)
        self._ids(torch.where(history == -1, 0, history), n)
        if len(gap := ((history[:, :-1] >= 0) & (history[:, 1:] < 0)).nonzero()):
            raise BachError(f"padding (−1) belongs on the left of a history; row {int(gap[0, 0])} has it after an item")
        return history.long()[:, -self.n_hist :]
