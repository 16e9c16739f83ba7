"""The mixture density over the whole catalogue (eq. 23), fast: in blocks that fit the processor's cache, no gradient.

Logarithms are to base 2, because exp2 is faster than exp. `mixture.log_density` is the plain reference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
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
