"""The training step of BACH written plainly: what the fast step is tested and measured against.

The item tower runs for every token of every history, the Transformers for all rows, and autograd keeps every logit.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import normalize

from bachlib.model import mixture
from bachlib.model.twotower import TwoTower


def plain_step_loss(
    model: TwoTower, history: Int[Tensor, "B n"], positive: Int[Tensor, " B"], negatives: Int[Tensor, " R"]
) -> Float[Tensor, ""]:
    """The loss of `model.loss` for p-bach and v-bach, with their own weights."""
    ids = torch.cat([positive, negatives])
    candidates = model.items(ids)
    tokens = model.items(history.clamp(min=0).flatten()).view(*history.shape, -1)
    heads = normalize(model.encoder.plain(tokens, history), dim=-1)
    log_pi = model.gate.head(model.gate.tower.plain(tokens, history)[:, 0]).log_softmax(-1)
    own = torch.arange(len(positive), device=ids.device)
    log_sigma = mixture.log_sigma(heads, candidates[: len(own)], model.kappa_net(heads), model.kernel)
    return mixture.plain_loss(heads, candidates, own, log_pi, log_sigma, model.tau, ids)
