"""Sums over the candidates in one pass: the value and both gradients without keeping the (B, k, C) logits.

The loss is Σ_n Σ_r γ_r log p_r with weights γ known beforehand (eq. 22). So the gradient with respect to a logit,
γ_r (1[positive] − p), is known as soon as the logits of its row are: one pass over blocks of rows (matrix product → exp
in place → two matrix products) gives log p and both gradients, and the block can be overwritten.

A cosine is at most 1, so a logit is at most 1/τ and its exponential cannot overflow: no row maximum is needed. Only for
τ below 1/40 (float64: 1/300) the maximum is subtracted. Vectors must be unit vectors, which is not checked here.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib import BachError

Heads = Float[Tensor, "B k d"]
Items = Float[Tensor, "C d"]  # candidates
Rows = Int[Tensor, " B"]  # the row of each positive in the candidates
Ids = Int[Tensor, " C"]  # the item of each candidate
PerHead = Float[Tensor, "B k"]
BLOCK = 1 << 20  # logits at a time: four megabytes of float32, which fit the processor's cache


def copies_of_positive(ids: Ids | None, positive: Rows) -> tuple[Tensor, Tensor]:
    """(row, candidate) pairs in which the candidate is another copy of the row's positive, rows ascending."""
    if ids is None:
        return positive[:0], positive[:0]
    sorted_ids, order = ids.sort()
    first = torch.searchsorted(sorted_ids, ids[positive])
    count = torch.searchsorted(sorted_ids, ids[positive], right=True) - first  # how often the positive occurs
    rows = torch.arange(len(positive), device=ids.device).repeat_interleave(count)
    place = torch.arange(len(rows), device=ids.device) - (count.cumsum(0) - count)[rows]
    columns = order[first[rows] + place]
    other = columns != positive[rows]
    return rows[other], columns[other]


def each_once(ids: Ids, n_items: int) -> tuple[Int[Tensor, " distinct"], Ids]:
    """(the distinct ids, in the order in which they first occur; the place of every id in them)."""
    number = torch.arange(len(ids), device=ids.device)
    first = number.new_full((n_items,), len(ids)).scatter_reduce(0, ids, number, "amin")[ids]
    kept = first == number
    return ids[kept], (kept.cumsum(0) - 1)[first]


def reconstruction(
    heads: Heads, items: Items, positive: Rows, gamma: PerHead, tau: float, ids: Ids | None = None
) -> tuple[Float[Tensor, ""], PerHead]:
    """Σ_n Σ_r γ_r log p_r (eq. 22), differentiable once in heads, items and γ, and log p_r without gradient."""
    copies, heads, items = copies_of_positive(ids, positive), in_full(heads), in_full(items)
    with torch.autocast(heads.device.type, enabled=False):
        return _Reconstruction.apply(heads, items, gamma.to(heads.dtype), positive, copies, tau)


def in_full(x: Tensor) -> Tensor:
    """Half precision as float32, which exponentials and their sums need."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def only_once() -> None:
    """Raise if the backward pass of a one-pass sum is itself differentiated: its gradients are constants."""
    if torch.is_grad_enabled():
        raise BachError("a one-pass loss has no second derivatives; use its plain_ reference")


def rows_per_block(width: int) -> int:
    return max(1, BLOCK // width)


def logits_in_blocks(heads: Heads, scaled: Items, copies: tuple[Tensor, Tensor]):
    """Blocks of BLOCK logits, each in the same memory: (rows, heads (b·k, d), logits (b, k, C), copies in it)."""
    (B, k, d), C = heads.shape, len(scaled)
    size = min(B, rows_per_block(k * C))
    edges = [*range(0, B, size), B]
    cuts = torch.searchsorted(copies[0], torch.tensor(edges, device=copies[0].device)).tolist()
    room = heads.new_empty(size * k, C)
    for number, start in enumerate(edges[:-1]):
        rows, part = slice(start, edges[number + 1]), slice(cuts[number], cuts[number + 1])
        block = heads[rows].reshape(-1, d)
        logits = torch.mm(block, scaled.T, out=room[: len(block)]).view(-1, k, C)
        yield rows, block, logits, (copies[0][part] - start, copies[1][part])


def exp_in_place(logits: Float[Tensor, "... C"], tau: float) -> Tensor | float:
    """exp(logit − shift) in place; returns the shift."""
    if 1 / tau <= (40 if logits.dtype == torch.float32 else 300):
        logits.exp_()
        return 0.0
    shift = logits.amax(-1, keepdim=True)
    logits.sub_(shift).exp_()
    return shift[..., 0]


class _Reconstruction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, heads, items, gamma, positive, copies, tau):
        _, k, d = heads.shape
        wanted = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        at_positive = items[positive]  # (B, d)
        logit = (heads @ at_positive[:, :, None])[..., 0] / tau  # (B, k), of the positive
        log_p, scaled = torch.empty_like(logit), items / tau
        to_heads = torch.empty_like(heads) if wanted else None
        to_items = torch.zeros_like(items) if wanted else None
        for rows, block, logits, (row, candidate) in logits_in_blocks(heads, scaled, copies):
            logits[row, :, candidate] = -torch.inf
            e = logits.flatten(0, 1)  # (b·k, C)
            shift = exp_in_place(e, tau)
            z = e.sum(-1)
            log_p[rows] = logit[rows] - (z.log() + shift).view(-1, k)
            if wanted:
                weight = (gamma[rows].reshape(-1) / z)[:, None]
                to_heads[rows] = ((e @ scaled) * -weight).view(-1, k, d)
                to_items.addmm_(e.T, block * weight, alpha=-1 / tau)
        if wanted:
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
        return *(value * grad if want else None for want, value in wanted), None, None, None
