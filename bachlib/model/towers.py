"""Item tower, CLS-token Transformer, gating tower, κ-net and codebooks (figure 4, appendix B).

    item tower     v_i = unit(e_i + MLP(e_i)), e frozen PureSVD rows, the MLP's last layer starting at zero
    CLS tower      k learned tokens read the history through one pre-LN Transformer layer; their outputs are the heads
    gating tower   a second CLS tower with one token, then linear and softmax: π_u
    κ-net          κ_r = exp ρ(u_r) on the detached head; starts at 1/τ exactly
    codebooks      k prototypes for all users, fixed or each moved a little by a CLS tower of the user
    context        numbers of a user or of a request: a linear map, zero at the start, adds them to the CLS tokens

**An encoder** is any module `forward(tokens (B, n, d), history (B, n)) -> (B, k, d)`: tokens are the embeddings of the
history, −1 in `history` marks padding on the left. **An item tower** is any module `forward(ids) -> (len(ids), d)` with
`n_items`. Neither has to return unit vectors. **A gate** is any module `forward(tokens, history) -> (B, k)`, the logits
of π_u. Pass your own to `build(..., encoder=…, item_tower=…, gate=…)`; they may draw random numbers from torch only.
An encoder or a gate with a method `read_context(width)` can read a context: `build` calls that method, and `forward`
then gets the context (B, width) as a third argument.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import dropout, normalize

from bachlib import BachError
from bachlib.model.onepass import in_full
from bachlib.model.products import Linear, linear

Tokens = Float[Tensor, "B n d"]
History = Int[Tensor, "B n"]
Context = Float[Tensor, "B c"] | None
PART = 2048


def in_parts(net: nn.Module, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n e"]:
    """`net(rows)`, PART rows at a time: its hidden layers stay in the processor's cache."""
    return torch.cat([net(part) for part in rows.split(PART)])


class ItemTower(nn.Module):
    """Frozen PureSVD rows and a residual MLP that starts at zero (appendix B)."""

    def __init__(self, table: Float[Tensor, "n_items d"], width: int):
        super().__init__()
        self.n_items, d = table.shape
        table = table / table.square().sum(-1).mean().sqrt()  # mean square length 1, about the length of a token
        random = torch.randn(table.shape, generator=torch.Generator().manual_seed(0)).to(table) / d**0.5
        met = table.norm(dim=-1, keepdim=True) > 1e-6  # the row of an item without training events is 0
        self.register_buffer("table", torch.where(met, table, random))
        self.residual = nn.Sequential(Linear(d, width), nn.GELU(), Linear(width, d))
        nn.init.zeros_(self.residual[2].weight)
        nn.init.zeros_(self.residual[2].bias)

    def forward(self, ids: Int[Tensor, " n"]) -> Float[Tensor, "n d"]:
        return self.embed(self.table[ids])

    def embed(self, rows: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        """Item embeddings from PureSVD rows, which need not be in the table."""
        return rows + in_parts(self.residual, rows)


class ClsTower(nn.Module):
    """k CLS tokens over a history through one pre-LN Transformer layer.

    Only the outputs of the CLS rows are used, so queries, output projection and feed-forward run for these rows only.
    Their input is the same for every user, so keys and values are not needed either: the queries are multiplied with
    the key matrix once ((W_k h)·q = h·(W_kᵀ q)), and the value matrix is applied after pooling. A context changes the
    CLS rows from request to request; its part is computed apart and added. `plain` is PyTorch's layer on all n + k
    rows, with the same weights.
    """

    def __init__(
        self, k: int, d: int, width: int, heads: int, ff: int, n_hist: int, p_dropout: float, cls_scale: float
    ):
        super().__init__()
        if width % heads:
            raise BachError(f"attention_heads={heads} should divide the width of the Transformer, {width}")
        self.k, self.heads, self.p_dropout = k, heads, p_dropout
        self.context: nn.Parameter | None = None  # (width, c), if the tower reads a context
        self.cls = nn.Parameter(torch.randn(k, width) * cls_scale)
        self.positions = nn.Parameter(torch.randn(n_hist, width) * 0.02)
        self.layer = nn.TransformerEncoderLayer(width, heads, ff, p_dropout, "gelu", batch_first=True, norm_first=True)
        self.wider = nn.Linear(d, width) if width != d else nn.Identity()
        self.back = nn.Linear(width, d) if width != d else nn.Identity()

    def embed(self, tokens: Tokens) -> Float[Tensor, "B n w"]:
        """Tokens plus positions; the last item always has the last position."""
        n = tokens.shape[1]
        if n > len(self.positions):
            raise BachError(f"the history has {n} items, more than n_hist = {len(self.positions)}; pass the last ones")
        return self.wider(tokens) + self.positions[len(self.positions) - n :]

    def read_context(self, width: int) -> None:
        """From now on read a context of `width` numbers. Its map is zero: at first the context changes nothing."""
        self.context = nn.Parameter(torch.zeros(self.cls.shape[1], width))

    def _with(self, context: Context) -> Float[Tensor, "B k w"]:
        """The CLS tokens plus the context."""
        return self.cls + linear(context, self.context)[:, None]

    def forward(self, tokens: Tokens, history: History, context: Context = None) -> Float[Tensor, "B k d"]:
        layer, attention = self.layer, self.layer.self_attn
        x = layer.norm1(self.embed(tokens))  # (B, n, w)
        (B, n, w), a = x.shape, self.heads
        cls = layer.norm1(self.cls)  # (k, w)
        w_q, w_k, w_v = attention.in_proj_weight.chunk(3)
        b_q, _, b_v = attention.in_proj_bias.chunk(3)  # the key's bias shifts all scores of a query: no effect
        query = linear(cls, w_q, b_q).view(self.k, a, -1) / math.sqrt(w // a)
        through_key = torch.einsum("kae,aew->akw", query, w_k.view(a, -1, w)).reshape(a * self.k, w)
        scores = (x.reshape(-1, w) @ through_key.T).view(B, n, -1)  # (B, n, a·k)
        scores = scores.masked_fill((history < 0)[..., None], -torch.inf).transpose(1, 2)
        among_cls = (through_key @ cls.T).expand(B, -1, -1)  # (B, a·k, k)
        token = self.cls
        if self.context is not None:  # what it changes comes on top, so that a map of zeros changes no bit
            token = self._with(context)
            moved = layer.norm1(token) - cls  # (B, k, w)
            asked = linear(moved, w_q).view(B, self.k, a, -1) / math.sqrt(w // a)
            asked = torch.einsum("bkae,aew->bakw", asked, w_k.view(a, -1, w)).reshape(B, a * self.k, w)
            scores = scores + asked @ x.mT
            among_cls = among_cls + through_key @ moved.mT + asked @ (cls + moved).mT
        weights = dropout(torch.cat([scores, among_cls], -1).softmax(-1), self.p_dropout, self.training)
        of_items, of_cls = weights.split((n, self.k), -1)
        pooled = of_items @ x + of_cls @ cls  # (B, a·k, w)
        if self.context is not None:
            pooled = pooled + of_cls @ moved
        values = torch.einsum("bakw,aew->bkae", pooled.view(B, a, self.k, w), w_v.view(a, -1, w))
        values = values + weights.sum(-1).view(B, a, self.k).transpose(1, 2)[..., None] * b_v.view(a, -1)
        out, wider, narrower = attention.out_proj, layer.linear1, layer.linear2
        y = token + layer.dropout1(linear(values.reshape(B, self.k, w), out.weight, out.bias))
        hidden = layer.dropout(layer.activation(linear(layer.norm2(y), wider.weight, wider.bias)))
        return self.back(y + layer.dropout2(linear(hidden, narrower.weight, narrower.bias)))

    def plain(self, tokens: Tokens, history: History, context: Context = None) -> Float[Tensor, "B k d"]:
        """All rows through PyTorch's layer; `forward` is tested against it."""
        cls = self.cls.expand(len(tokens), -1, -1) if self.context is None else self._with(context)
        x = torch.cat([self.embed(tokens), cls], 1)
        padding = torch.cat([history < 0, torch.zeros(len(x), self.k, dtype=torch.bool, device=x.device)], 1)
        return self.back(self.layer(x, src_key_padding_mask=padding)[:, -self.k :])


class Gate(nn.Module):
    """π_ξ(x_u), the gating tower: a CLS tower with one token and a linear layer. Returns logits."""

    def __init__(self, tower: ClsTower, d: int, k: int):
        super().__init__()
        self.tower, self.head = tower, nn.Linear(d, k)

    def read_context(self, width: int) -> None:
        self.tower.read_context(width)

    def forward(self, tokens: Tokens, history: History, context: Context = None) -> Float[Tensor, "B k"]:
        pooled = in_full(self.tower(tokens, history, context)[:, 0])
        with torch.autocast(pooled.device.type, enabled=False):
            return self.head(pooled)


class PiTable(nn.Module):
    """A free π_u for every user of the data set and for no one else; uniform at the start. Returns logits."""

    def __init__(self, n_users: int, k: int):
        super().__init__()
        self.logits = nn.Parameter(torch.zeros(n_users, k))

    def forward(self, user: Int[Tensor, " B"]) -> Float[Tensor, "B k"]:
        return self.logits[user]


class KappaNet(nn.Module):
    """κ_r = exp ρ_ψ(u_r): two hidden layers of width 4d, GELU, last layer zero with bias log 1/τ."""

    def __init__(self, d: int, tau: float):
        super().__init__()
        self.net = nn.Sequential(Linear(d, 4 * d), nn.GELU(), Linear(4 * d, 4 * d), nn.GELU(), Linear(4 * d, 1))
        nn.init.zeros_(self.net[4].weight)
        nn.init.constant_(self.net[4].bias, -math.log(tau))

    def forward(self, heads: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        with torch.autocast(heads.device.type, enabled=False):  # half precision would leave a dozen distinct κ
            return in_parts(self.net, in_full(heads.detach()).reshape(-1, heads.shape[-1])).view(heads.shape[:-1]).exp()


class OneKappa(nn.Module):
    """One κ for all heads of all users, 1/τ at the start: learnt, or fixed."""

    def __init__(self, tau: float, learnt: bool):
        super().__init__()
        self.log_kappa = nn.Parameter(torch.tensor(-math.log(tau)), requires_grad=learnt)

    def forward(self, heads: Float[Tensor, "*b d"]) -> Float[Tensor, "*b"]:
        return self.log_kappa.exp().expand(heads.shape[:-1])


class Codebook(nn.Module):
    """k prototypes for all users: the global end of the spectrum (remark 1). `shared` is (k, d)."""

    def __init__(self, k: int, d: int):
        super().__init__()
        self.prototypes = nn.Parameter(normalize(torch.randn(k, d), dim=-1))

    @property
    def shared(self) -> Float[Tensor, "k d"]:
        return normalize(self.prototypes, dim=-1)

    def forward(self, tokens: Tokens, history: History) -> Float[Tensor, "B k d"]:
        return self.shared.expand(len(history), -1, -1)


class ResidualCodebook(Codebook):
    """Prototype plus `size` times a unit vector of the user: a head stays within arcsin(size) of its prototype."""

    shared = None

    def __init__(self, k: int, d: int, tower: ClsTower, size: float):
        super().__init__(k, d)
        self.tower, self.size = tower, size

    def read_context(self, width: int) -> None:
        self.tower.read_context(width)

    def forward(self, tokens: Tokens, history: History, context: Context = None) -> Float[Tensor, "B k d"]:
        moved = normalize(self.tower(tokens, history, context), dim=-1)
        return normalize(self.prototypes, dim=-1) + self.size * moved
