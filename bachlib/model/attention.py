"""The attention of the CLS rows, in blocks of users that fit the processor's cache; gradients by hand.

    P = softmax(Q [x; c]ᵀ),  W = dropout(P),  pooled = W [x; c],  total = Σ_m W

x are a user's rows, c the CLS rows, whose scores among themselves are given. Written plainly, autograd makes a dozen
(B, q, n + k) tensors that are too large for any cache. Here only P is kept, with a minus where dropout removed it.
`ClsTower.plain`, PyTorch's layer, is the reference.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bachlib.model.onepass import in_full, only_once

BLOCK = 1 << 18  # weights at a time: a megabyte of float32
Queries = Float[Tensor, "b a k w"]  # b is B, or 1 for all users


def pool(
    queries: Queries,
    x: Float[Tensor, "B n w"],
    cls: Float[Tensor, "b k w"],
    gone: Bool[Tensor, "B n"],
    p_dropout: float = 0.0,
) -> tuple[Float[Tensor, "a B k w"], Float[Tensor, "B q"]]:
    """(pooled, total) of rows x, without those `gone`, and CLS rows, for queries of `a` attention heads."""
    with torch.autocast(x.device.type, enabled=False):
        queries, x, cls = in_full(queries), in_full(x), in_full(cls)
        among = queries.flatten(1, 2) @ cls.mT
        return _Pool.apply(queries, x, cls, among, gone, p_dropout)


def _some(of_all: Tensor, rows: slice, n: int) -> Tensor:
    return of_all[rows] if len(of_all) > 1 else of_all.expand(n, -1, -1)


def _add(gradient: Tensor, rows: slice, part: Tensor) -> None:
    """Into the users' rows, or to the sum over users."""
    if len(gradient) > 1:
        gradient[rows] = part
    else:
        gradient += part.sum(0)


class _Pool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, queries, x, cls, among, gone, p):
        (_, a, k, w), (B, n, _) = queries.shape, x.shape
        asked, m = queries.flatten(1, 2), n + k
        ctx.size, ctx.scale = max(1, BLOCK // (a * k * m)), 1 / (1 - p)
        pooled, total, signed = x.new_empty(a, B, k, w), x.new_empty(B, a * k), []
        hidden = x.new_zeros(B, 1, n).masked_fill_(gone[:, None], -torch.inf)
        for start in range(0, B, ctx.size):
            rows = slice(start, start + ctx.size)
            b = len(x[rows])
            y = torch.cat([x[rows], _some(cls, rows, b)], 1)
            scores = x.new_empty(b, a * k, m)
            torch.add(torch.bmm(_some(asked, rows, b), x[rows].mT), hidden[rows], out=scores[..., :n])
            scores[..., n:] = _some(among, rows, b)
            weights = scores = scores.softmax(-1)
            if p:
                scores.copysign_(torch.empty_like(scores).bernoulli_(1 - p).sub_(0.5))
                weights = scores.clamp(min=0)
            sums = torch.bmm(weights, y).view(b, a, k, w).transpose(0, 1)
            torch.mul(sums, ctx.scale, out=pooled[:, rows])
            total[rows] = weights.sum(-1).mul_(ctx.scale)
            signed.append(scores)
        ctx.save_for_backward(asked, x, cls, pooled, total, *signed)
        return pooled, total

    @staticmethod
    def backward(ctx, to_pooled, to_total):
        only_once()
        asked, x, cls, pooled, total, *signed = ctx.saved_tensors
        (a, B, k, w), n = pooled.shape, x.shape[1]
        to_asked, to_x, to_cls = torch.zeros_like(asked), torch.empty_like(x), torch.zeros_like(cls)
        to_among = x.new_zeros(max(len(asked), len(cls)), a * k, k)
        for start, scores in zip(range(0, B, ctx.size), signed, strict=True):
            rows, b = slice(start, start + ctx.size), len(scores)
            y = torch.cat([x[rows], _some(cls, rows, b)], 1)
            g, sums = (t[:, rows].transpose(0, 1).reshape(b, a * k, w) for t in (to_pooled, pooled))
            g_total = to_total[rows, :, None]
            # of the softmax: the mean of its gradients under P, from the results
            mean = (g * sums).sum(-1, keepdim=True).addcmul_(g_total, total[rows, :, None])
            to_scores = torch.bmm(g.mul_(ctx.scale), y.mT).add_(g_total * ctx.scale)
            weights = scores.clamp(min=0)
            to_scores = to_scores.mul_(weights).addcmul_(scores.abs(), mean, value=-1)
            to_y = torch.bmm(weights.mT, g)
            to_x[rows] = torch.bmm(to_scores[..., :n].mT, _some(asked, rows, b)).add_(to_y[:, :n])
            _add(to_asked, rows, torch.bmm(to_scores[..., :n], x[rows]))
            _add(to_cls, rows, to_y[:, n:])
            _add(to_among, rows, to_scores[..., n:])
        return to_asked.unflatten(1, (a, k)), to_x, to_cls, to_among, None, None
