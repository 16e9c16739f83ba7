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

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from bachlib import BachError
from bachlib.model.candidates import (
    Heads,
    Ids,
    Items,
    Pairs,
    PerHead,
    Rows,
    Targets,
    Weights,
    exceptions,
    in_full,
    or_ones,
)
from bachlib.model.products import times

Slopes = Callable[[slice, Tensor], Tensor]  # of some rows, from their log p: how fast the loss's sum rises with each
BLOCK = 1 << 20  # logits at a time: four megabytes of float32, which fit the processor's cache
BIT = math.log(2)  # logits are in bits, to base 2: exp2 takes a quarter of the time of exp


def reconstruction(
    heads: Heads,
    items: Items,
    positive: Rows,
    gamma: PerHead | Slopes,
    tau: float,
    ids: Ids | None = None,
    weights: Weights | None = None,
) -> tuple[Float[Tensor, ""], PerHead]:
    """Σ_n Σ_r γ_r log p_r (eq. 22), differentiable once in heads, items and γ, and log p_r without gradient.

    γ may also be a function of log p, which is called when all logits of a row are there and before they are forgotten.
    """
    heads, items = in_full(heads), in_full(items)
    weights = or_ones(weights, items, positive)
    with torch.autocast(heads.device.type, enabled=False):
        pairs = exceptions(ids, positive, weights)
        gamma = gamma if callable(gamma) else gamma.to(heads.dtype)
        return _Reconstruction.apply(heads, items, gamma, positive, weights, pairs, tau)


def only_once() -> None:
    """Raise if the backward pass of a one-pass sum is itself differentiated: its gradients are constants."""
    if torch.is_grad_enabled():
        raise BachError("a one-pass loss has no second derivatives; use its plain_ reference")


def rows_per_block(width: int) -> int:
    return max(1, BLOCK // width)


def bits_in_blocks(heads: Heads, items: Items, tau: float, pairs: Pairs):
    """Blocks of BLOCK logits in bits, `pairs` added; may be overwritten: (rows, heads (b·k, d), logits (b, k, C))."""
    (B, k, d), C, scaled = heads.shape, len(items), items / (tau * BIT)
    size = min(B, rows_per_block(k * C))
    edges = [*range(0, B, size), B]
    cuts = torch.searchsorted(pairs[0], torch.tensor(edges, device=heads.device)).tolist()
    for number, start in enumerate(edges[:-1]):
        rows, part = slice(start, edges[number + 1]), slice(cuts[number], cuts[number + 1])
        block = heads[rows].reshape(-1, d)
        logits = times(block, scaled).view(-1, k, C)
        row, candidate, by = (x[part] for x in pairs)
        logits[row - start, :, candidate] += by[:, None] / BIT
        yield rows, block, logits
        del logits  # before the next block is made


def fits(tau: float, dtype: torch.dtype) -> bool:
    """Can the exponential of every logit, and a sum of them, be a number of this type?"""
    return 1 / tau <= (40 if dtype == torch.float32 else 300)


def exp_in_place(bits: Float[Tensor, "... C"], tau: float) -> Tensor | float:
    """exp(logit − shift) in place, of logits in bits; returns the shift, which is not in bits."""
    if fits(tau, bits.dtype):
        bits.exp2_()
        return 0.0
    shift = bits.amax(-1, keepdim=True).clamp(min=torch.finfo(bits.dtype).min)  # a row may have no candidate left
    bits.sub_(shift).exp2_()
    return shift[..., 0] * BIT


class _Reconstruction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads, items, gamma, positive, weights, pairs, tau):
        _, k, d = heads.shape
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        at_positive = items[positive]  # (B, d)
        logit = (heads @ at_positive[:, :, None])[..., 0] / tau + weights.own.log()[:, None]  # (B, k), of the positive
        log_p, w = torch.empty_like(logit), weights.candidate
        weighted = items * (w / tau)[:, None]
        to_heads = torch.empty_like(heads) if wanted else None
        to_items = torch.zeros_like(items) if wanted else None
        gamma, slopes = (torch.empty_like(log_p), gamma) if callable(gamma) else (gamma, None)
        for rows, block, logits in bits_in_blocks(heads, items, tau, pairs):
            e = logits.flatten(0, 1)  # (b·k, C)
            shift = exp_in_place(e, tau)
            z = e @ w  # (b·k,), one per head
            log_p[rows] = logit[rows] - (z.log() + shift).view(-1, k)
            if slopes:
                gamma[rows] = slopes(rows, log_p[rows])
            if wanted:
                weight = (gamma[rows].reshape(-1) / z)[:, None]
                to_heads[rows] = (times(e, weighted.T) * -weight).view(-1, k, d)  # (b, k, d)
                to_items -= times((block * (weight / tau)).T.contiguous(), e.T).T
            del e, logits
        if wanted:
            to_items *= w[:, None]  # of the negatives
            to_heads += (gamma / tau)[..., None] * at_positive[:, None, :]
            to_items.index_add_(0, positive, (gamma[:, None, :] @ heads)[:, 0] / tau)
        ctx.save_for_backward(log_p, to_heads, to_items)
        ctx.mark_non_differentiable(log_p)
        return torch.where(gamma != 0, gamma * log_p, 0.0).sum(), log_p

    @staticmethod
    def backward(ctx, grad, _):
        only_once()
        log_p, to_heads, to_items = ctx.saved_tensors
        want_heads, want_items, want_gamma, *_rest = ctx.needs_input_grad
        wanted = ((want_heads, to_heads), (want_items, to_items), (want_gamma, log_p))
        return *(value * grad if want else None for want, value in wanted), None, None, None, None


# ------------------------------------------------------------------------------------- targets="all": a row's next ten


def log_beside(s: Float[Tensor, "B M k"], beside: Float[Tensor, "B M M"], tau: float) -> Float[Tensor, "B M k"]:
    """log of the sum over the row's own targets: log(Σ_{m' ≠ m} c_m' exp(s_m') + exp(s_m))."""
    if fits(tau, s.dtype):
        return (beside.to(s.dtype) @ s.exp()).log()
    return (beside.to(s.dtype).log()[..., None] + s[:, None]).logsumexp(2)


def reconstruction_of_all(
    heads: Heads, items: Items, targets: Targets, gamma: Float[Tensor, "B M k"] | Slopes, tau: float, best: bool = False
) -> tuple[Float[Tensor, ""], Float[Tensor, "B M k"]]:
    """Σ_n Σ_m Σ_r γ_r log p_r(m | u_n), differentiable once, and log p without gradient; γ is already divided by M.

    γ may be a function of log p, as in `reconstruction`. With `best`, every candidate and every target is scored by its
    best head (eq. 10), and γ and log p are (B, M, 1).
    """
    heads, items = in_full(heads), in_full(items)
    with torch.autocast(heads.device.type, enabled=False):
        left_out, beside = targets.exceptions()
        s = targets.logits(heads, tau)
        s = s.max(-1, keepdim=True).values if best else s
        also = log_beside(s, beside, tau), targets.weight.to(heads.dtype), left_out, tau, best
        gamma = gamma if callable(gamma) else gamma.to(heads.dtype)
        return _AllTargets.apply(heads, items, gamma, s + targets.log_times(), *also)


class _AllTargets(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads, items, gamma, s, beside, w, left_out, tau, best):
        (_, k, d), C = heads.shape, len(items)
        wanted, weighted = any(ctx.needs_input_grad[:2]), items * (w / tau)[:, None]
        log_p, of_others = torch.empty_like(s), torch.empty_like(s)  # and the share of the others, Z, in each sum
        to_heads = torch.empty_like(heads) if wanted else None
        to_items = torch.zeros_like(items) if wanted else None
        gamma, slopes = (torch.empty_like(s), gamma) if callable(gamma) else (gamma, None)
        for rows, block, logits in bits_in_blocks(heads, items, tau, left_out):
            others, head = logits.max(1, keepdim=True) if best else (logits, None)
            e = others.flatten(0, 1)
            shift = exp_in_place(e, tau)
            z = e @ w  # (b·k,), or (b,) for the best heads
            log_z = (z.log() + shift).view(len(others), 1, -1)
            log_p[rows] = s[rows] - torch.logaddexp(log_z, beside[rows])
            of_others[rows] = (log_z - beside[rows]).sigmoid()
            if slopes:
                gamma[rows] = slopes(rows, log_p[rows])
            if wanted:
                weight = ((gamma[rows] * of_others[rows]).sum(1).flatten() / z.clamp(min=torch.finfo(z.dtype).tiny))[
                    :, None
                ]
                if best:  # each candidate's share goes to its best head
                    e = logits.zero_().scatter_(1, head, e.mul_(weight)[:, None]).view(-1, C)
                    weight = torch.ones_like(weight[:1])
                to_heads[rows] = (times(e, weighted.T) * -weight).view(-1, k, d)
                to_items -= times(((weight / tau) * block).T.contiguous(), e.T).T
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
