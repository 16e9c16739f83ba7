"""Three relatives of BACH that the paper names and does not compare with; they are rows beyond its fourteen.

    bam      pos-multihead through one head, drawn from softmax_r(⟨u_r, v_n⟩ / τ) in every step. The mean gradient over
             the draws is that of the reconstruction term of the ELBO at this γ (eq. 22), where BACH takes all heads.
    maxmf    An item is scored by its best head, as in all-multihead. A pairwise ranking loss compares every negative
             with the positive. x_j = s_j − s_n is the difference of their logits, N the number of negatives:
                 hinge  1/N Σ_j max(0, 1 + x_j)      the margin ranking loss (Weston et al., 2013)
                 warp   L(V)/V Σ_j max(0, 1 + x_j)   V negatives violate the margin, L(V) = 1 + 1/2 + … + 1/V: the
                                                     expectation of WSABIE's draw of one of these
                 bpr    1/N Σ_j log(1 + exp(x_j))    Bayesian personalised ranking
    remi     comirec-sa with interest-aware hard negatives and a routing regulariser (Xie et al., 2023):
                 −log( e^{s_n} / (e^{s_n} + N Σ_j e^{(1+β) s_j} / Σ_j e^{β s_j}) ),
                 λ Σ_r (Σ_p (A_rp − Ā_r)² / d)², A the attention of interest r over positions p, Ā_r its mean.
             With β = 0 and λ = 0 it is comirec-sa.

REMI's published code has λ = 100, and β = 10, 1 or 0.1 for its three data sets. It divides by d and *sums* the
regulariser over a batch of 128 windows, while the loss is a mean, so λ depends on the size of the batch. Here it is the
mean, times `remi_batch`: 128 by default, 1 for a plain mean. With hard negatives that code takes the logits before its
correction for the sampling of negatives, so β > 0 turns this correction off. Its negatives are uniform, and then the
correction is a constant. Ours include the positives of the batch; `log_q=True` corrects for them with any β.

All take one target or all targets of a window. One pass over the candidates gives value and gradients; with all targets
bam takes one for each drawn head, remi one for each target.
"""

from __future__ import annotations

from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib import NotFinite
from bachlib.model import routing
from bachlib.model.candidates import Heads, Items, PerHead, Targets, by_rows, check_shapes, in_full
from bachlib.model.onepass import BIT, bits_in_blocks, only_once

RULES = ("bam", "maxmf", "remi")


def of_all(
    rule: str, heads: Heads, items: Items, targets: Targets, tau: float, beta: float, pairwise: str
) -> tuple[Tensor, PerHead]:
    """The loss of a rule, a mean over the rows and their targets; and the share of targets that each head gets."""
    check_shapes(heads, items, targets.own, targets.ids, tau)
    cosines = targets.logits(heads.detach(), 1.0).detach()
    if rule == "bam":
        return routing.of_all("pos-multihead", heads, items, targets, tau, head=draw((cosines / tau).softmax(-1)))
    head, gamma = cosines.argmax(-1), targets.share()[..., 0]
    chosen, B = torch.nn.functional.one_hot(head, heads.shape[1]).to(heads.dtype), len(heads)
    shares, of_one = targets.mean(chosen), partial(against_each, kind=pairwise)
    if rule == "remi":
        heads = heads.gather(1, head[..., None].expand(-1, -1, heads.shape[-1])).flatten(0, 1)[:, None]  # (B·M, 1, d)
        gamma, targets, of_one = gamma.view(-1, 1), targets.one_per_row(), partial(against_hard, beta=beta)
    heads, items = in_full(heads), in_full(items)
    with torch.autocast(heads.device.type, enabled=False):
        pairs, beside = targets.exceptions()
        beside = beside.masked_fill(torch.eye(beside.shape[1], dtype=torch.bool, device=beside.device), 0.0)
        s = targets.logits(heads, tau).amax(-1)
        times = torch.ones_like(s) if targets.times is None else targets.times.to(s)
        also = gamma.to(s), beside, targets.weight.to(s), times, pairs, tau, of_one
        return _PerTarget.apply(heads, items, s, *also) / B, shares


def draw(gamma: Float[Tensor, "B M k"]) -> Int[Tensor, "B M"]:
    """One head for each target."""
    if not bool(gamma.isfinite().all()):
        raise NotFinite("the shares of the heads, softmax_r(⟨u_r, v_n⟩ / τ), are not finite")
    return torch.multinomial(gamma.flatten(0, 1), 1).view(gamma.shape[:2])


def routing_penalty(attention: Float[Tensor, "B k n"], d: int) -> Float[Tensor, ""]:
    """REMI's regulariser: the squared diagonal of the covariance of the centred attention, divided by d; batch mean."""
    attention = in_full(attention)
    diagonal = (attention - attention.mean(-1, keepdim=True)).square().sum(-1) / d  # (B, k)
    return diagonal.square().sum(-1).mean()


def against_hard(
    x: Float[Tensor, "B C"], w: Float[Tensor, "B C"], s: Float[Tensor, " B"], times: Float[Tensor, " B"], beta: float
) -> tuple[Float[Tensor, " B"], Float[Tensor, "B C"], Float[Tensor, " B"]]:
    """REMI's loss for the logits s of positives with weights `times` and x of candidates with weights w; its slopes."""
    least = torch.finfo(x.dtype).tiny
    top = x.masked_fill(w == 0, -torch.inf).amax(1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)
    e = (x - top).clamp(max=0.0)  # what has no weight may be above the top
    a = (beta * e).exp() * w
    b = e.exp() * a
    sum_a, sum_b = (of.sum(1, keepdim=True).clamp(min=least) for of in (a, b))
    others = ((w.sum(1, keepdim=True) * sum_b / sum_a).log() + top)[:, 0] - times.log()
    behind = (others - s).sigmoid()
    slopes = behind[:, None] * ((1 + beta) * b / sum_b - beta * a / sum_a)
    return torch.nn.functional.softplus(others - s), slopes, -behind


def against_each(
    x: Float[Tensor, "B C"], w: Float[Tensor, "B C"], s: Float[Tensor, " B"], times: Float[Tensor, " B"], kind: str
) -> tuple[Float[Tensor, " B"], Float[Tensor, "B C"], Float[Tensor, " B"]]:
    """A pairwise loss for the logits s of positives and x of candidates with weights w; its slopes in x and in s.

    It is a weighted mean over the candidates, so a positive needs no weight.
    """
    x = x - s[:, None]
    each = torch.nn.functional.softplus(x) if kind == "bpr" else (1 + x).clamp(min=0.0)
    slopes = w * (x.sigmoid() if kind == "bpr" else (x > -1).to(x))
    if kind == "warp":
        above = slopes.sum(1).clamp(min=0.01)
        scale = (torch.special.digamma(above + 1) + 0.5772156649015329) / above  # L(V) / V
    else:
        scale = 1 / w.sum(1).clamp(min=torch.finfo(x.dtype).tiny)
    slopes = slopes * scale[:, None]
    return scale * (w * each).sum(1), slopes, -slopes.sum(1)


class _PerTarget(torch.autograd.Function):
    """Σ_n Σ_m γ_nm · loss of target m against the best head's logits of the other candidates.

    The candidates that are targets of the row come last, with the weights `beside`; the own weight of a target is 0.
    """

    @staticmethod
    def forward(ctx, heads, items, s, gamma, beside, w, times, pairs, tau, of_one):
        (_, k, d), C, scaled = heads.shape, len(items), items / tau
        row, candidate, by = pairs
        total, to_s, to_heads, to_items = s.new_zeros(()), *map(torch.zeros_like, (s, heads, items))
        none = by_rows(row[:0], candidate[:0], by[:0])
        for rows, block, logits in bits_in_blocks(heads, items, tau / BIT, none):  # here logits are not in bits
            best, head = logits.max(1)  # (b, C)
            x, mine = torch.cat([best, s[rows]], 1), (row >= rows.start) & (row < rows.stop)
            counted = w.repeat(len(best), 1)
            counted[row[mine] - rows.start, candidate[mine]] *= by[mine].exp()
            slopes = torch.zeros_like(x)
            for m, share in enumerate(gamma[rows].T):
                value, to_x, to_own = of_one(x, torch.cat([counted, beside[rows, m]], 1), s[rows, m], times[rows, m])
                total += share @ value
                slopes.addcmul_(share[:, None], to_x)
                to_s[rows, m] += share * to_own
            to_s[rows] += slopes[:, C:]
            routed = logits.zero_().scatter_(1, head[:, None], slopes[:, None, :C]).view(-1, C)
            to_heads[rows] = (routed @ scaled).view(-1, k, d)
            to_items.addmm_(routed.T, block, alpha=1 / tau)
        ctx.save_for_backward(to_heads, to_items, to_s)
        return total

    @staticmethod
    def backward(ctx, grad):
        only_once()
        return *(slope * grad for slope in ctx.saved_tensors), *[None] * 7
