"""The hard-routing losses (sections 2 and 3): they differ in where the maximum over heads is taken.

    eq. 6   standard         one head, sampled softmax
    eq. 9   pos_multihead    the head closest to the positive scores the positive and every negative
    eq. 10  all_multihead    every candidate is scored by its best head
    MIND    label_aware      heads averaged by their attention to the target, then a sampled softmax

Each is a mean over the batch, computed in one pass: no (B, k, C) tensor is kept. `of_all` takes all targets of a row.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib import BachError
from bachlib.model.mixture import Heads, Ids, Items, Rows, check_shapes
from bachlib.model.onepass import (
    BIT,
    Targets,
    Weights,
    bits_in_blocks,
    exceptions,
    exp_in_place,
    in_full,
    only_once,
    or_ones,
    reconstruction,
    reconstruction_of_all,
)
from bachlib.model.products import times


def standard(
    heads: Heads, items: Items, positive: Rows, tau: float, ids: Ids | None = None, weights: Weights | None = None
) -> Tensor:
    """Sampled softmax of a single head (eq. 6)."""
    check_shapes(heads, items, positive, ids, tau, weights)
    if heads.shape[1] != 1:
        raise BachError(f"standard has one head: heads should be (B, 1, d); got {tuple(heads.shape)}")
    total, _ = reconstruction(heads, items, positive, torch.ones_like(heads[..., 0]), tau, ids, weights)
    return -total / len(positive)


def routed_head(heads: Heads, items: Items, positive: Rows) -> Int[Tensor, " B"]:
    """r_n* = argmax_r ⟨u_r, v_n⟩, the head closest to the positive."""
    return (heads.detach() @ items.detach()[positive][:, :, None])[..., 0].argmax(-1)


def pos_multihead(
    heads: Heads, items: Items, positive: Rows, tau: float, ids: Ids | None = None, weights: Weights | None = None
) -> Tensor:
    """Sampled softmax through the head closest to the positive (eq. 9); the other heads get no gradient."""
    check_shapes(heads, items, positive, ids, tau, weights)
    chosen = routed_head(heads, items, positive)[:, None, None].expand(-1, 1, heads.shape[-1])
    return standard(heads.gather(1, chosen), items, positive, tau, ids, weights)


def label_aware(
    heads: Heads,
    items: Items,
    positive: Rows,
    tau: float,
    ids: Ids | None = None,
    power: float = 1.0,
    weights: Weights | None = None,
) -> Tensor:
    """MIND's label-aware attention: eq. 6 with the unit mean of the heads under weights softmax(⟨u_r, v_n⟩^power).

    The BACH paper uses power 1. (More makes the weights more equal, not sharper: MIND's own heads are no unit vectors.)
    """
    check_shapes(heads, items, positive, ids, tau, weights)
    return standard(_user_of(heads, items[positive][:, None], power), items, positive, tau, ids, weights)


def _user_of(heads: Heads, targets: Tensor, power: float) -> Tensor:
    """The user vector (B, M, d) for each target (B, M, d)."""
    score = (heads @ targets.mT).mT  # (B, M, k)
    weight = (score.sign() * score.abs() ** power).softmax(-1)
    return torch.nn.functional.normalize(weight @ heads, dim=-1)


def of_one(
    rule: str, heads: Heads, items: Items, positive: Rows, tau: float, power: float, weights: Weights | None = None
) -> tuple[Tensor, Float[Tensor, "B k"]]:
    """The loss of a rule, and 1 for the head closest to the positive."""
    if rule == "label-aware":
        loss = label_aware(heads, items, positive, tau, power=power, weights=weights)
    else:
        hard = {"standard": standard, "pos-multihead": pos_multihead, "all-multihead": all_multihead}[rule]
        loss = hard(heads, items, positive, tau, weights=weights)
    return loss, torch.nn.functional.one_hot(routed_head(heads, items, positive), heads.shape[1]).to(loss)


def of_all(
    rule: str,
    heads: Heads,
    items: Items,
    targets: Targets,
    tau: float,
    power: float = 1.0,
    head: Int[Tensor, "B M"] | None = None,
) -> tuple[Tensor, Float[Tensor, "B k"]]:
    """The loss of a rule with all targets of a row, the mean of their losses; and the share of them closest to a head.

    `head`: the head that each target is routed to, instead of the closest one.

    One sweep over the candidates serves all targets, except that pos-multihead sweeps once for every head that some
    target of the row has chosen, and label-aware once for every target, because its user vector depends on the target.
    """
    check_shapes(heads, items, targets.own, targets.ids, tau)
    head = targets.logits(heads.detach(), 1.0).argmax(-1) if head is None else head
    chosen = torch.nn.functional.one_hot(head, heads.shape[1]).to(heads.dtype)
    gamma, shares, best, B = targets.share(), targets.mean(chosen), rule == "all-multihead", len(heads)
    if rule == "pos-multihead":
        rows, head = chosen.any(1).nonzero().T
        gamma = gamma[rows] * chosen[rows, :, head][..., None]
        heads, targets = heads[rows, head][:, None], targets.of(rows)
    elif rule == "label-aware":
        heads = _user_of(heads, targets.vectors, power).flatten(0, 1)[:, None]
        gamma, targets = gamma.view(-1, 1, 1), targets.one_per_row()
    return -reconstruction_of_all(heads, items, targets, gamma, tau, best)[0] / B, shares


def all_multihead(
    heads: Heads, items: Items, positive: Rows, tau: float, ids: Ids | None = None, weights: Weights | None = None
) -> Tensor:
    """Sampled softmax of max_r ⟨u_r, v_j⟩ at every candidate (eq. 10); a head gets gradient where it is the best."""
    check_shapes(heads, items, positive, ids, tau, weights)
    heads, items = in_full(heads), in_full(items)
    weights = or_ones(weights, items, positive)
    with torch.autocast(heads.device.type, enabled=False):
        pairs = exceptions(ids, positive, weights)
        return -_AllMultihead.apply(heads, items, positive, weights.candidate, pairs, tau) / len(positive)


class _AllMultihead(torch.autograd.Function):
    """Σ_n log softmax_j(max_r ⟨u_r, v_j⟩ / τ) at the positive, with both gradients in the same pass."""

    @staticmethod
    def forward(ctx, heads, items, positive, w, pairs, tau):
        (_, k, d), C = heads.shape, len(items)
        wanted, total = any(ctx.needs_input_grad), w[positive].log().sum()
        to_heads = torch.empty_like(heads) if wanted else None
        to_items = torch.zeros_like(items) if wanted else None
        weighted = items * (w / tau)[:, None]
        for rows, block, logits in bits_in_blocks(heads, items, tau, pairs):
            best, head = logits.max(1)  # (b, C)
            target = positive[rows][:, None]
            at_positive = best.gather(1, target)[:, 0] * BIT  # without the weight of the candidate, which `total` has
            shift = exp_in_place(best, tau)
            z = best @ w
            total += (at_positive - z.log() - shift).sum()
            if wanted:
                share = best.div_(-z[:, None])  # ∂/∂(best logit): 1[positive] − softmax, both divided by w
                share.scatter_add_(1, target, 1 / w[target])
                routed = logits.zero_().scatter_(1, head[:, None, :], share[:, None, :]).view(-1, C)
                to_heads[rows] = times(routed, weighted.T).view(-1, k, d)
                to_items += times((block / tau).T.contiguous(), routed.T).T
        if wanted:
            to_items *= w[:, None]
        ctx.save_for_backward(to_heads, to_items)
        return total

    @staticmethod
    def backward(ctx, grad):
        only_once()
        to_heads, to_items = ctx.saved_tensors
        return to_heads * grad, to_items * grad, None, None, None, None
