"""Sums over the candidates in one pass: the value and both gradients without keeping the (B, k, C) logits.

The loss is Σ_n Σ_r γ_r log p_r with weights γ known beforehand (eq. 22). So the gradient with respect to a logit,
γ_r (1[positive] − p), is known as soon as the logits of its row are: one pass over blocks of rows (matrix product → exp
in place → two matrix products) gives log p and both gradients, and the block can be overwritten.

An item that was drawn several times need not be a candidate several times: its weight in the sums is its count. Weights
are multiplied into the vectors, (e·w) V = e (w ⊙ V), so they cost nothing per logit.

A cosine is at most 1, so a logit is at most 1/τ and its exponential cannot overflow: no row maximum is needed. Only for
τ below 1/40 (float64: 1/300) the maximum is subtracted. Vectors must be unit vectors, which is not checked here.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib import BachError

Heads = Float[Tensor, "B k d"]
Items = Float[Tensor, "C d"]  # candidates
Rows = Int[Tensor, " B"]  # the row of each positive in the candidates
Ids = Int[Tensor, " C"]  # the item of each candidate
PerHead = Float[Tensor, "B k"]
Pairs = tuple[Int[Tensor, " p"], Int[Tensor, " p"], Float[Tensor, " p"]]  # rows, ascending; candidates; what is added
BLOCK = 1 << 20  # logits at a time: four megabytes of float32, which fit the processor's cache


class Weights(NamedTuple):
    """How often each candidate counts: Z_n = Σ_{j ≠ i_n} w_j exp(s_nj) + w_own exp(s_n,own). All are above 0."""

    candidate: Float[Tensor, " C"]
    own: Float[Tensor, " B"]  # of the row's positive, in its own row only


def or_ones(weights: Weights | None, items: Items, positive: Rows) -> Weights:
    """Every candidate counts once, unless there are weights."""
    if weights is None:
        return Weights(items.new_ones(len(items)), items.new_ones(len(positive)))
    return Weights(*(w.to(items.dtype) for w in weights))


def log_weights(ids: Ids | None, positive: Rows, weights: Weights) -> Float[Tensor, "B C"]:
    """What the weights add to a row's logits, −∞ at other copies of its positive: for the plain references."""
    added = weights.candidate.log().expand(len(positive), -1).clone()
    added[copies_of_positive(ids, positive)] = -torch.inf
    return added.scatter(1, positive[:, None], weights.own.log()[:, None])


def exceptions(ids: Ids | None, positive: Rows, weights: Weights) -> Pairs:
    """Where a row departs from the weights of the candidates: at its positive, and −∞ at other copies of it."""
    copies, columns = copies_of_positive(ids, positive)
    by = (weights.own / weights.candidate[positive]).log()
    rows = by.nonzero()[:, 0]
    none = by.new_full(copies.shape, -torch.inf)
    return by_rows(torch.cat([rows, copies]), torch.cat([positive[rows], columns]), torch.cat([by[rows], none]))


def by_rows(rows: Tensor, candidates: Tensor, by: Tensor) -> Pairs:
    order = rows.argsort()
    return rows[order], candidates[order], by[order]


def copies_of_positive(ids: Ids | None, positive: Rows) -> tuple[Tensor, Tensor]:
    """(row, candidate) pairs in which the candidate is another copy of the row's positive, rows ascending."""
    if ids is None:
        return positive[:0], positive[:0]
    rows, columns, _ = places(ids, ids[positive])
    other = columns != positive[rows]
    return rows[other], columns[other]


def places(ids: Ids, wanted: Int[Tensor, " n"]) -> tuple[Tensor, Tensor, Int[Tensor, " n"]]:
    """(number, candidate) pairs in which the candidate is the item `wanted[number]`, in order of numbers; counts."""
    sorted_ids, order = ids.sort()
    first = torch.searchsorted(sorted_ids, wanted)
    count = torch.searchsorted(sorted_ids, wanted, right=True) - first
    number = torch.arange(len(wanted), device=ids.device).repeat_interleave(count)
    place = torch.arange(len(number), device=ids.device) - (count.cumsum(0) - count)[number]
    return number, order[first[number] + place], count


def each_once(ids: Ids, n_items: int) -> tuple[Int[Tensor, " distinct"], Ids]:
    """(the distinct ids, in the order in which they first occur; the place of every id in them)."""
    number = torch.arange(len(ids), device=ids.device)
    first = number.new_full((n_items,), len(ids)).scatter_reduce(0, ids, number, "amin")[ids]
    kept = first == number
    return ids[kept], (kept.cumsum(0) - 1)[first]


def reconstruction(
    heads: Heads,
    items: Items,
    positive: Rows,
    gamma: PerHead,
    tau: float,
    ids: Ids | None = None,
    weights: Weights | None = None,
) -> tuple[Float[Tensor, ""], PerHead]:
    """Σ_n Σ_r γ_r log p_r (eq. 22), differentiable once in heads, items and γ, and log p_r without gradient."""
    heads, items = in_full(heads), in_full(items)
    weights = or_ones(weights, items, positive)
    with torch.autocast(heads.device.type, enabled=False):
        pairs = exceptions(ids, positive, weights)
        return _Reconstruction.apply(heads, items, gamma.to(heads.dtype), positive, weights, pairs, tau)


def in_full(x: Tensor) -> Tensor:
    """Half precision as float32, which exponentials and their sums need."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def only_once() -> None:
    """Raise if the backward pass of a one-pass sum is itself differentiated: its gradients are constants."""
    if torch.is_grad_enabled():
        raise BachError("a one-pass loss has no second derivatives; use its plain_ reference")


def rows_per_block(width: int) -> int:
    return max(1, BLOCK // width)


def logits_in_blocks(heads: Heads, scaled: Items, pairs: Pairs):
    """Blocks of BLOCK logits, `pairs` added, each in the same memory: (rows, heads (b·k, d), logits (b, k, C))."""
    (B, k, d), C = heads.shape, len(scaled)
    size = min(B, rows_per_block(k * C))
    edges = [*range(0, B, size), B]
    cuts = torch.searchsorted(pairs[0], torch.tensor(edges, device=heads.device)).tolist()
    room = heads.new_empty(size * k, C)
    for number, start in enumerate(edges[:-1]):
        rows, part = slice(start, edges[number + 1]), slice(cuts[number], cuts[number + 1])
        block = heads[rows].reshape(-1, d)
        logits = torch.mm(block, scaled.T, out=room[: len(block)]).view(-1, k, C)
        row, candidate, by = (x[part] for x in pairs)
        logits[row - start, :, candidate] += by[:, None]
        yield rows, block, logits


def fits(tau: float, dtype: torch.dtype) -> bool:
    """Can the exponential of every logit, and a sum of them, be a number of this type?"""
    return 1 / tau <= (40 if dtype == torch.float32 else 300)


def exp_in_place(logits: Float[Tensor, "... C"], tau: float) -> Tensor | float:
    """exp(logit − shift) in place; returns the shift."""
    if fits(tau, logits.dtype):
        logits.exp_()
        return 0.0
    shift = logits.amax(-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)  # a row may have no candidate left
    logits.sub_(shift).exp_()
    return shift[..., 0]


class _Reconstruction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads, items, gamma, positive, weights, pairs, tau):
        _, k, d = heads.shape
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        at_positive = items[positive]  # (B, d)
        logit = (heads @ at_positive[:, :, None])[..., 0] / tau + weights.own.log()[:, None]  # (B, k), of the positive
        log_p, scaled, w = torch.empty_like(logit), items / tau, weights.candidate
        weighted = scaled * w[:, None]
        to_heads = torch.empty_like(heads) if wanted else None
        to_items = torch.zeros_like(items) if wanted else None
        for rows, block, logits in logits_in_blocks(heads, scaled, pairs):
            e = logits.flatten(0, 1)  # (b·k, C)
            shift = exp_in_place(e, tau)
            z = e @ w  # (b·k,), one per head
            log_p[rows] = logit[rows] - (z.log() + shift).view(-1, k)
            if wanted:
                weight = (gamma[rows].reshape(-1) / z)[:, None]
                to_heads[rows] = ((e @ weighted) * -weight).view(-1, k, d)  # (b, k, d)
                to_items.addmm_(e.T, block * weight, alpha=-1 / tau)
        if wanted:
            to_items *= w[:, None]  # of the negatives
            to_heads += (gamma / tau)[..., None] * at_positive[:, None, :]
            to_items.index_add_(0, positive, (gamma[:, None, :] @ heads)[:, 0] / tau)
        ctx.save_for_backward(log_p, to_heads, to_items)
        ctx.mark_non_differentiable(log_p)
        return torch.where(gamma > 0, gamma * log_p, 0.0).sum(), log_p

    @staticmethod
    def backward(ctx, grad, _):
        only_once()
        log_p, to_heads, to_items = ctx.saved_tensors
        want_heads, want_items, want_gamma, *_rest = ctx.needs_input_grad
        wanted = ((want_heads, to_heads), (want_items, to_items), (want_gamma, log_p))
        return *(value * grad if want else None for want, value in wanted), None, None, None, None


# ------------------------------------------------------------------------------------- targets="all": a row's next ten


class Targets(NamedTuple):
    """All next items of each row as its targets. The targets m of row n share one sweep over the other candidates:

        log p_r(m | u_n) = s_rm − log(Z_nr + Σ_{m' ≠ m} c_nm' exp(s_rm') + exp(s_rm)),        s_rm = ⟨u_r, v_m⟩ / τ.

    Z_nr is the weighted sum over the candidates that are no target of the row, without what the row drew itself. c_nm'
    is the weight of target m' among the candidates, again without the row's own draw. This is p_r, the softmax of
    eq. 12, in the step that draws m in this row and nothing else in the others. No exponential is subtracted, so no
    accuracy is lost.
    """

    ids: Ids  # the item of each candidate
    weight: Float[Tensor, " C"]  # how often it counts
    own: Rows  # the candidate that the row drew itself
    rest: Float[Tensor, " B"]  # its weight without this draw: what the row's other targets meet
    items: Int[Tensor, "B M"]  # the item of each target; −1: this row has fewer
    vectors: Float[Tensor, "B M d"]

    def of(self, rows: Int[Tensor, " n"]) -> Targets:
        return Targets(self.ids, self.weight, *(x[rows] for x in self[2:]))

    def one_per_row(self) -> Targets:
        """B·M rows with one target each."""
        every = self.of(torch.arange(len(self.own), device=self.own.device).repeat_interleave(self.items.shape[1]))
        return every._replace(items=self.items.view(-1, 1), vectors=self.vectors.flatten(0, 1)[:, None])

    def share(self) -> Float[Tensor, "B M 1"]:
        """1/M in a row with M targets."""
        there = (self.items >= 0).to(self.vectors.dtype)[..., None]
        return there / there.sum(1, keepdim=True)

    def mean(self, x: Float[Tensor, "B M k"]) -> Float[Tensor, "B k"]:
        return (self.share() * x).sum(1)

    def logits(self, heads: Heads, tau: float) -> Float[Tensor, "B M k"]:
        if not isinstance(heads, Tensor):  # heads of two kinds, see `hybrid`
            return heads.cosines(self.vectors) / tau
        return in_full(self.vectors) @ in_full(heads).mT / tau

    def left_out(self) -> tuple[Pairs, Float[Tensor, "B M M"]]:
        """(what is added to the logits, −∞ at the row's targets; c_nm' for m' ≠ m, and 1 for m' = m)."""
        number, columns, _ = places(self.ids, self.items.flatten())
        counts = self.weight.new_zeros(self.items.numel()).index_add(0, number, self.weight[columns])
        drawn = self.items == self.ids[self.own][:, None]  # (B, M): the row drew this target
        own = self.weight[self.own]
        counts = torch.where(
            drawn, counts.view_as(self.items) - own[:, None] + self.rest[:, None], counts.view_as(drawn)
        )
        same = self.items[:, :, None] == self.items[:, None, :]  # (B, M, M'); an item that comes twice counts once
        counts = counts.masked_fill(same.tril(-1).any(-1), 0)
        beside = counts[:, None, :] * ~same + torch.eye(same.shape[1], device=same.device)
        rows = (~drawn.any(1) & (self.rest != own)).nonzero()[:, 0]  # the row drew none of its targets
        by = torch.cat([own.new_full(number.shape, -torch.inf), (self.rest / own)[rows].log()])
        rows, columns = torch.cat([number // same.shape[1], rows]), torch.cat([columns, self.own[rows]])
        return by_rows(rows, columns, by), beside.to(self.vectors.dtype)


def log_beside(s: Float[Tensor, "B M k"], beside: Float[Tensor, "B M M"], tau: float) -> Float[Tensor, "B M k"]:
    """log of the sum over the row's own targets: log(Σ_{m' ≠ m} c_m' exp(s_m') + exp(s_m))."""
    if fits(tau, s.dtype):
        return (beside.to(s.dtype) @ s.exp()).log()
    return (beside.to(s.dtype).log()[..., None] + s[:, None]).logsumexp(2)


def reconstruction_of_all(
    heads: Heads, items: Items, targets: Targets, gamma: Float[Tensor, "B M k"], tau: float, best: bool = False
) -> tuple[Float[Tensor, ""], Float[Tensor, "B M k"]]:
    """Σ_n Σ_m Σ_r γ_r log p_r(m | u_n), differentiable once, and log p without gradient; γ is already divided by M.

    With `best`, every candidate and every target is scored by its best head (eq. 10), and γ and log p are (B, M, 1).
    """
    heads, items = in_full(heads), in_full(items)
    with torch.autocast(heads.device.type, enabled=False):
        left_out, beside = targets.left_out()
        s = targets.logits(heads, tau)
        s = s.max(-1, keepdim=True).values if best else s
        also = log_beside(s, beside, tau), targets.weight.to(heads.dtype), left_out, tau, best
        return _AllTargets.apply(heads, items, gamma.to(heads.dtype), s, *also)


class _AllTargets(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads, items, gamma, s, beside, w, left_out, tau, best):
        (_, k, d), C = heads.shape, len(items)
        wanted, scaled = any(ctx.needs_input_grad[:2]), items / tau
        weighted = scaled * w[:, None]
        log_p, of_others = torch.empty_like(s), torch.empty_like(s)  # and the share of the others, Z, in each sum
        to_heads = torch.empty_like(heads) if wanted else None
        to_items = torch.zeros_like(items) if wanted else None
        for rows, block, logits in logits_in_blocks(heads, scaled, left_out):
            others, head = logits.max(1, keepdim=True) if best else (logits, None)
            e = others.flatten(0, 1)
            shift = exp_in_place(e, tau)
            z = e @ w  # (b·k,), or (b,) for the best heads
            log_z = (z.log() + shift).view(len(others), 1, -1)
            log_p[rows] = s[rows] - torch.logaddexp(log_z, beside[rows])
            of_others[rows] = (log_z - beside[rows]).sigmoid()
            if wanted:
                weight = ((gamma[rows] * of_others[rows]).sum(1).flatten() / z.clamp(min=torch.finfo(z.dtype).tiny))[
                    :, None
                ]
                if best:  # each candidate's share goes to its best head
                    e = logits.zero_().scatter_(1, head, e.mul_(weight)[:, None]).view(-1, C)
                    weight = torch.ones_like(weight[:1])
                to_heads[rows] = ((e @ weighted) * -weight).view(-1, k, d)
                to_items.addmm_(e.T, weight * block, alpha=-1 / tau)
        if wanted:
            to_items *= w[:, None]
        ctx.save_for_backward(to_heads, to_items, log_p, gamma, gamma * (of_others - 1))
        ctx.mark_non_differentiable(log_p)
        return (gamma * log_p).sum(), log_p

    @staticmethod
    def backward(ctx, grad, _):
        only_once()
        pairs = zip(ctx.needs_input_grad, ctx.saved_tensors, strict=False)
        return *(value * grad if want else None for want, value in pairs), None, None, None, None
