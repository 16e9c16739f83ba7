"""The encoders of the baselines: MIND and ComiRec-DR (capsules), ComiRec-SA, SASRec (appendix B).

They follow the original code. Where public re-implementations differ, a switch of `ModelParams` turns the difference
on, to measure its effect: `capsule_softmax="positions"` (softmax over positions instead of interests: four popular
ports), `mind_relu` (a ReLU layer after the capsules: MIND inside ComiRec's code), `sa_positions_in_values` (ComiRec-SA
pools item + position), `sasrec_norm_keys` and `sasrec_heads` (keys and values from LN(x), more attention heads: common
Transformers). All take the shared item embeddings, which are unit vectors; the model normalises their outputs.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout, scaled_dot_product_attention

from bachlib import BachError
from bachlib.model.towers import History, Tokens


def squash(s: Float[Tensor, "*b d"]) -> Float[Tensor, "*b d"]:
    """|s|² / (1 + |s|²) · s / |s|, finite at 0."""
    square = s.square().sum(-1, keepdim=True)
    return square / (1 + square) * s / (square + 1e-9).sqrt()


class Capsules(nn.Module):
    """Behaviour-to-interest routing in a few iterations; only the last one passes gradients."""

    def __init__(self, k: int, iterations: int, softmax: str):
        super().__init__()
        self.k, self.iterations, self.axis = k, iterations, {"interests": 1, "positions": 2}[softmax]

    def route(self, mapped: Float[Tensor, "B k n d"], logits: Float[Tensor, "B k n"], history: History) -> Tensor:
        padding, frozen = (history < 0)[:, None, :], mapped.detach()
        for _ in range(self.iterations - 1):
            capsules = squash(self._pool(logits, frozen, padding))
            logits = logits + (frozen @ capsules[..., None])[..., 0]
        return squash(self._pool(logits, mapped, padding))

    def _pool(self, logits: Tensor, mapped: Tensor, padding: Tensor) -> Tensor:
        if self.axis == 2:
            logits = logits.masked_fill(padding, torch.finfo(logits.dtype).min)
        weight = logits.softmax(self.axis).masked_fill(padding, 0.0)  # padding has weight 0 after the softmax
        return (weight[..., None, :] @ mapped)[..., 0, :]


class Mind(Capsules):
    """One bilinear map S for all pairs; routing logits drawn from a truncated normal on every call.

    In training they are random; at evaluation they are a fixed function of the history and of `draw`: set another
    `draw` to see how much the scores depend on it.
    """

    def __init__(self, k: int, d: int, iterations: int = 3, softmax: str = "interests", relu: bool = False):
        super().__init__(k, iterations, softmax)
        self.bilinear = nn.Linear(d, d, bias=False)
        self.relu = nn.Sequential(nn.Linear(d, d), nn.ReLU()) if relu else nn.Identity()
        self.draw = 0

    def forward(self, tokens: Tokens, history: History) -> Float[Tensor, "B k d"]:
        B, n, _ = tokens.shape
        mapped = self.bilinear(tokens)[:, None].expand(-1, self.k, -1, -1)  # S e_j, the same for all interests
        if self.training:
            logits = nn.init.trunc_normal_(tokens.new_empty(B, self.k, n))
        else:
            logits = fixed_truncated_normal(history, self.k, self.draw).to(tokens)
        return self.relu(self.route(mapped, logits, history))


def fixed_truncated_normal(history: History, k: int, draw: int) -> Float[Tensor, "B k n"]:
    """N(0, 1) cut at ±2, a hash of (history, interest, position, draw): the same on every machine, in every batch."""
    n = history.shape[1]
    place = torch.arange(n, 0, -1, device=history.device)  # from the right: padding changes nothing
    row = (_mixed((history + 2) * (2 * place + 1) * 0x9E3779B97F4A7C1) * (history >= 0)).sum(1)
    pair = torch.arange(1, k + 1, device=history.device)[:, None] * 0x10001 + place  # (k, n)
    key = _mixed(row + _mixed(torch.tensor(draw, device=history.device)))[:, None, None]
    bits = _mixed(key + pair * 0x1E3779B97F4A7C15)
    uniform = ((bits & ((1 << 53) - 1)).double() + 0.5) / 2**53
    edge = 0.5 * math.erfc(2 / math.sqrt(2))  # Φ(−2)
    return math.sqrt(2) * torch.erfinv(2 * (edge + uniform * (1 - 2 * edge)) - 1)


def _mixed(x: Int[Tensor, "*b"]) -> Int[Tensor, "*b"]:
    """splitmix64's finaliser; int64 wraps around."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return x ^ ((x >> 31) & ((1 << 33) - 1))


class ComiRecDR(Capsules):
    """Dynamic routing with one matrix per (position, interest) and logits that start at zero."""

    def __init__(self, k: int, d: int, n_hist: int, iterations: int = 3, softmax: str = "interests"):
        super().__init__(k, iterations, softmax)
        self.maps = nn.Parameter(torch.randn(n_hist, k, d, d) / math.sqrt(d))

    def forward(self, tokens: Tokens, history: History) -> Float[Tensor, "B k d"]:
        B, n, _ = tokens.shape
        maps = self.maps[len(self.maps) - n :]  # the last item has the last position
        mapped = torch.einsum("bnd,nkde->bkne", tokens, maps)  # a broadcast would take gigabytes
        return self.route(mapped, tokens.new_zeros(B, self.k, n), history)


class ComiRecSA(nn.Module):
    """A = softmax over positions of tanh((E + P) W₁ + b₁) W₂ + b₂; interests Aᵀ E, without P."""

    def __init__(self, k: int, d: int, n_hist: int, positions_in_values: bool = False):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(n_hist, d) * 0.02)
        self.attention = nn.Sequential(nn.Linear(d, 4 * d), nn.Tanh(), nn.Linear(4 * d, k))
        self.positions_in_values = positions_in_values

    def forward(self, tokens: Tokens, history: History) -> Float[Tensor, "B k d"]:
        return self.attend(tokens, history)[0]

    def attend(self, tokens: Tokens, history: History) -> tuple[Float[Tensor, "B k d"], Float[Tensor, "B k n"]]:
        """(heads, the attention A)."""
        placed = tokens + self.positions[len(self.positions) - tokens.shape[1] :]
        scores = self.attention(placed)
        scores = scores.masked_fill((history < 0)[..., None], torch.finfo(scores.dtype).min)
        attention = scores.softmax(1).transpose(1, 2)
        return attention @ (placed if self.positions_in_values else tokens), attention


class SASRec(nn.Module):
    """Two causal blocks; the last position is the user vector, so the last block is computed only there.

    Items are scaled by √d. Queries come from LN(x), which the residual also adds; keys and values come from x.
    """

    def __init__(self, d: int, n_hist: int, blocks: int, heads: int, p_dropout: float, norm_keys: bool = False):
        super().__init__()
        if d % heads:
            raise BachError(f"sasrec_heads={heads} should divide d, {d}")
        self.positions = nn.Parameter(torch.randn(n_hist, d) * 0.02)
        self.blocks = nn.ModuleList(_Block(d, heads, p_dropout, norm_keys) for _ in range(blocks))
        self.norm, self.p_dropout = nn.LayerNorm(d), p_dropout

    def forward(self, tokens: Tokens, history: History, all_rows: bool = False) -> Float[Tensor, "B 1 d"]:
        _, n, d = tokens.shape
        there = history >= 0
        x = tokens * math.sqrt(d) + self.positions[len(self.positions) - n :]
        x = dropout(x, self.p_dropout, self.training) * there[..., None]
        causal = torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        seen = causal & there[:, None, :] | torch.eye(n, dtype=torch.bool, device=x.device)  # padding sees itself
        for number, block in enumerate(self.blocks):
            rows = slice(-1, None) if number == len(self.blocks) - 1 and not all_rows else slice(None)
            x = block(x, seen[:, rows], rows) * there[:, rows, None]
        return self.norm(x[:, -1:])


class _Block(nn.Module):
    def __init__(self, d: int, heads: int, p_dropout: float, norm_keys: bool):
        super().__init__()
        self.heads, self.p_dropout, self.norm_keys = heads, p_dropout, norm_keys
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.query, self.key, self.value = (nn.Linear(d, d) for _ in range(3))
        self.feed = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Dropout(p_dropout), nn.Linear(d, d))

    def forward(self, x: Float[Tensor, "B n d"], seen: Tensor, rows: slice) -> Float[Tensor, "B m d"]:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, heads, n, d/heads)

        normed = self.norm1(x)
        source = normed if self.norm_keys else x
        p = self.p_dropout if self.training else 0.0
        query, key, value = self.query(normed[:, rows]), self.key(source), self.value(source)
        attended = scaled_dot_product_attention(split(query), split(key), split(value), seen[:, None], p)
        x = self.norm2(normed[:, rows] + attended.transpose(1, 2).flatten(2))
        return x + dropout(self.feed(x), self.p_dropout, self.training)
