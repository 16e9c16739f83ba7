"""The mixture density over the whole catalogue (eq. 23), fast: in blocks that fit the processor's cache, no gradient.

Logarithms are to base 2, because exp2 is faster than exp. `mixture.log_density` is the plain reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib.model.mixture import Heads, Items, PerHead
from bachlib.model.onepass import rows_per_block
from bachlib.model.sphere import Kernel


@torch.no_grad()
def scores(heads: Heads, items: Items, log_pi: PerHead, kappa: PerHead, kernel: Kernel) -> Float[Tensor, "B n"]:
    """log m(i | u), in the type of the heads."""
    weight = _bits(log_pi + kernel.log_normalizer(kappa.double(), heads.shape[-1])).to(heads)[..., None]  # (B, k, 1)
    out, bits = heads.new_empty(len(heads), len(items)), _bits(kappa).to(heads)[..., None]
    for block, t in _cosines(heads, items):
        t = kernel.log_omega_(t.clamp_(min=torch.finfo(t.dtype).eps - 1), bits).add_(weight)
        top = t.amax(1, keepdim=True)
        out[:, block] = t.sub_(top).exp2_().sum(1).log2_().add_(top[:, 0])
    return out.mul_(math.log(2))


FLOOR = -40  # log₂ score of the lowest item of `around`
SPAN, REACH = 150, 60  # float32 holds log₂ scores at most this far apart, and log₂ weights and κ below this


@torch.no_grad()
def ranking_scores(
    heads: Heads, items: Items, log_pi: PerHead, kappa: PerHead, kernel: Kernel, around: Int[Tensor, "B m"]
) -> Float[Tensor, "B n"]:
    """Numbers that rank the items `around` among all items as `scores` does, without its maxima and logarithms.

    They are Σ_r W_r ω_κ(t_r), with weights W_r = π_r C_d(κ_r) scaled so that the lowest item `around` in a row gets
    2^-40. Items far below it may become 0 and items far above it ∞, which does not change the ranks. Where float32
    cannot hold the numbers (huge κ, items too far apart, a cosine of −1) the result is `scores`.
    """
    d = heads.shape[-1]
    own = (log_pi[:, None] + kernel.log_density(items[around] @ heads.mT, kappa[:, None], d)).logsumexp(-1)  # (B, m)
    low, high = own.aminmax(dim=1)
    log_weight = _bits(log_pi + kernel.log_normalizer(kappa.double(), d) - low[:, None]) + FLOOR
    within = (_bits(high - low) < SPAN).all() & (log_weight < REACH).all() & (kappa < REACH).all()
    if bool(within):
        weight, bits = log_weight.exp2().to(heads)[:, None], _bits(kappa).to(heads)[..., None]  # (B, 1, k), (B, k, 1)
        out = heads.new_empty(len(heads), len(items))
        for block, t in _cosines(heads, items):
            out[:, block] = torch.bmm(weight, kernel.log_omega_(t, bits).exp2_())[:, 0]
        if not bool(out.sum().isnan()):
            return out
    return scores(heads, items, log_pi, kappa, kernel)


def _bits(nats: Tensor) -> Tensor:
    return nats / math.log(2)


def _cosines(heads: Tensor, items: Tensor) -> Iterator[tuple[slice, Float[Tensor, "B k b"]]]:
    """(block of items, cosines of all heads with them); the next block overwrites the cosines."""
    B, k, d = heads.shape
    rows, size = heads.reshape(-1, d), min(rows_per_block(B * k), len(items))
    room = heads.new_empty(B * k * size)
    for start in range(0, len(items), size):
        some = items[start : start + size]
        t = torch.mm(rows, some.T, out=room[: B * k * len(some)].view(B * k, -1))
        yield slice(start, start + size), t.view(B, k, -1)
