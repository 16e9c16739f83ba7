"""The hard-routing losses (sections 2 and 3): they differ in where the maximum over heads is taken.

    eq. 6   standard         one head, sampled softmax
    eq. 9   pos_multihead    the head closest to the positive scores the positive and every negative
    eq. 10  all_multihead    every candidate is scored by its best head
    MIND    label_aware      heads averaged by their attention to the target, then a sampled softmax

Each is a mean over the batch, computed in one pass: no (B, k, C) tensor is kept. `plain_*` are the plain references.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from bachlib import BachError
from bachlib.model.mixture import Heads, Items, Rows, check_shapes, log_components
from bachlib.model.onepass import (
    blocks_of_rows,
    copies_of_positive,
    exp_in_place,
    in_full,
    only_once,
    reconstruction,
    rows_per_block,
)


def standard(heads: Heads, items: Items, positive: Rows, tau: float, ids: Tensor | None = None) -> Tensor:
    """Sampled softmax of a single head (eq. 6)."""
    check_shapes(heads, items, positive, ids, tau)
    if heads.shape[1] != 1:
        raise BachError(f"standard has one head: heads should be (B, 1, d); got {tuple(heads.shape)}")
    total, _ = reconstruction(heads, items, positive, torch.ones_like(heads[..., 0]), tau, ids)
    return -total / len(positive)


def routed_head(heads: Heads, items: Items, positive: Rows) -> Int[Tensor, " B"]:
    """r_n* = argmax_r ⟨u_r, v_n⟩, the head closest to the positive."""
    return (heads.detach() @ items.detach()[positive][:, :, None])[..., 0].argmax(-1)


def pos_multihead(heads: Heads, items: Items, positive: Rows, tau: float, ids: Tensor | None = None) -> Tensor:
    """Sampled softmax through the head closest to the positive (eq. 9); the other heads get no gradient."""
    check_shapes(heads, items, positive, ids, tau)
    chosen = routed_head(heads, items, positive)[:, None, None].expand(-1, 1, heads.shape[-1])
    return standard(heads.gather(1, chosen), items, positive, tau, ids)


def label_aware(
    heads: Heads, items: Items, positive: Rows, tau: float, ids: Tensor | None = None, power: float = 1.0
) -> Tensor:
    """MIND's label-aware attention: eq. 6 with the unit mean of the heads under weights softmax(⟨u_r, v_n⟩^power).

    The BACH paper uses power 1. (A power above 1 makes cosines smaller and so the weights more equal, not sharper: in
    MIND's code heads are not unit vectors.)
    """
    check_shapes(heads, items, positive, ids, tau)
    score = (heads @ items[positive][:, :, None])[..., 0]  # (B, k)
    weight = (score.sign() * score.abs() ** power).softmax(-1)
    user = torch.nn.functional.normalize((weight[:, None, :] @ heads), dim=-1)  # (B, 1, d)
    return standard(user, items, positive, tau, ids)


def all_multihead(heads: Heads, items: Items, positive: Rows, tau: float, ids: Tensor | None = None) -> Tensor:
    """Sampled softmax of max_r ⟨u_r, v_j⟩ at every candidate (eq. 10); a head gets gradient where it is the best."""
    check_shapes(heads, items, positive, ids, tau)
    copies = copies_of_positive(ids, positive) if ids is not None else None
    heads, items = in_full(heads), in_full(items)
    with torch.autocast(heads.device.type, enabled=False):
        return -_AllMultihead.apply(heads, items, positive, copies, tau) / len(positive)


class _AllMultihead(torch.autograd.Function):
    """Σ_n log softmax_j(max_r ⟨u_r, v_j⟩ / τ) at the positive, with both gradients in the same pass."""

    @staticmethod
    def forward(ctx, heads, items, positive, copies, tau):
        B, k, d = heads.shape
        C = len(items)
        wanted = any(ctx.needs_input_grad)
        scaled = items / tau
        total = heads.new_zeros(())
        to_heads = torch.empty_like(heads) if wanted else None
        to_items = torch.zeros_like(items) if wanted else None
        room = heads.new_empty(min(B, rows_per_block(k * C)) * k, C)  # one block's logits
        for rows, left_out in blocks_of_rows(B, k * C, copies):
            block, target = heads[rows].reshape(-1, d), positive[rows][:, None]
            logits = torch.mm(block, scaled.T, out=room[: len(block)]).view(-1, k, C)
            best, head = logits.max(1)  # (b, C)
            at_positive = best.gather(1, target)[:, 0]
            if left_out is not None:
                best[left_out] = -torch.inf
            shift = exp_in_place(best, tau)
            z = best.sum(-1)
            total += (at_positive - z.log() - shift).sum()
            if wanted:
                share = best.div_(-z[:, None])  # ∂/∂(best logit): 1[positive] − softmax
                share.scatter_add_(1, target, torch.ones_like(z)[:, None])
                routed = logits.zero_().scatter_(1, head[:, None, :], share[:, None, :]).view(-1, C)
                to_heads[rows] = (routed @ scaled).view(-1, k, d)
                to_items.addmm_(routed.T, block, alpha=1 / tau)
        ctx.save_for_backward(to_heads, to_items)
        return total

    @staticmethod
    def backward(ctx, grad):
        only_once()
        to_heads, to_items = ctx.saved_tensors
        return to_heads * grad, to_items * grad, None, None, None


def plain_pos_multihead(heads: Heads, items: Items, positive: Rows, tau: float, ids: Tensor | None = None) -> Tensor:
    """eq. 9 written down."""
    log_p = log_components(heads, items, positive, tau, ids)
    return -log_p.gather(1, routed_head(heads, items, positive)[:, None]).mean()


def plain_all_multihead(heads: Heads, items: Items, positive: Rows, tau: float, ids: Tensor | None = None) -> Tensor:
    """eq. 10 written down."""
    scores = (heads @ items.T).max(1).values / tau  # (B, C)
    if ids is not None:
        blocked = torch.zeros_like(scores, dtype=torch.bool)
        blocked[copies_of_positive(ids, positive)] = True
        scores = scores.masked_fill(blocked, -torch.inf)
    return -scores.log_softmax(-1).gather(1, positive[:, None]).mean()
