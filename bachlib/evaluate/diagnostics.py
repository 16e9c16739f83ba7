"""What the heads of a model do: how far apart they are, and whether they found what was planted.

In the planted world every item belongs to a known interest j. What a head stands for is what its softmax over the
catalogue gives to each interest, p_r(j); what the model expects of a user is q_j = Σ_r π_r p_r(j), to be compared with
the planted π_u. (Cosines to the middle of an interest do not tell: with τ = 0.07 an item is preferred e-fold for
0.07 more cosine, so heads need not be near the items they stand for.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib.data import Dataset
from bachlib.data.dataset import Split
from bachlib.model.twotower import Encoded, TwoTower


@torch.no_grad()
def encode_users(model: TwoTower, dataset: Dataset, users: Int[np.ndarray, " U"], split: Split = "test") -> Encoded:
    """Heads, log π_u and κ of many users, before their held-out items."""
    model.eval()
    blocks = [
        model.encode(dataset.history(part, split, model.n_hist), torch.from_numpy(part))
        for part in np.array_split(users, max(1, len(users) // 1024))
    ]
    return Encoded(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def head_cosine(heads: Float[Tensor, "U k d"]) -> Float[Tensor, " U"]:
    """Mean cosine between two heads of a user: 1 if they are all the same, near 0 if they have nothing in common."""
    k = heads.shape[1]
    return (heads.sum(1).square().sum(-1) - k) / max(1, k * (k - 1))


@torch.no_grad()
def interest_of_heads(
    model: TwoTower, heads: Float[Tensor, "U k d"], item_interest: Int[np.ndarray, " n_items"]
) -> Float[Tensor, "U k m"]:
    """p_r(j) = Σ_{i in j} p_r(i): what each head's softmax over the whole catalogue (eq. 12) gives to each interest."""
    items = model.items()
    of = torch.as_tensor(item_interest, dtype=torch.long, device=items.device)
    member = torch.nn.functional.one_hot(of).to(items)  # (n, m)
    return torch.stack([(u @ items.T / model.tau).softmax(-1) @ member for u in heads])


class Recovery(NamedTuple):
    """A row per user; the means over users are what is reported."""

    weights: Float[np.ndarray, "U m"]  # q_j = Σ_r π_r p_r(j), what the model expects of each interest
    purity: Float[np.ndarray, " U"]  # Σ_r π_r max_j p_r(j): 1 if every head stands for one interest
    distinct: Int[np.ndarray, " U"]  # how many interests are some head's first
    covered: Float[np.ndarray, " U"]  # Σ_j π_j max_r p_r(j): 1 if each of the user's interests has a head of its own
    overlap: Float[np.ndarray, " U"]  # Σ_j min(q_j, π_j): 1 if π_u is recovered, 0 if all weight is elsewhere


def recovery(of_heads: Float[Tensor, "U k m"], log_pi: Float[Tensor, "U k"], pi: Float[np.ndarray, "U m"]) -> Recovery:
    """Heads against the planted interests and π_u. A method without weights has equal ones."""
    p, weight = of_heads.cpu().numpy(), log_pi.exp().cpu().numpy()
    q = (weight[..., None] * p).sum(1)
    first = np.zeros(q.shape, bool)
    np.put_along_axis(first, p.argmax(-1), True, 1)
    purity = (weight * p.max(-1)).sum(1)
    return Recovery(q, purity, first.sum(1), (pi * p.max(1)).sum(1), np.minimum(q, pi).sum(1))
