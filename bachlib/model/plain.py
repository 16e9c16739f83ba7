"""The training step of p-bach and v-bach written plainly: the fast step is tested and measured against it.

The item tower runs for every token of every history, the Transformers for all rows, and autograd keeps every logit.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import normalize

from bachlib.model import mixture
from bachlib.model.candidates import Weights
from bachlib.model.twotower import History, Ids, NextItems, TwoTower


def plain_step_loss(
    model: TwoTower,
    history: History,
    positive: Ids,
    negatives: Ids,
    targets: NextItems = None,
    following: NextItems = None,
    expected: Float[Tensor, " n_items"] | None = None,
) -> Float[Tensor, ""]:
    """`model.objective(…).loss` as the paper writes it.

    With `targets`, a step for each target of each row, in which the candidates of the other rows are negatives. A row
    leaves out the items `following`. `expected` divides each candidate's part in a sum by how often it is expected.
    """
    if targets is not None:
        others = [torch.cat([positive[:n], positive[n + 1 :], negatives]) for n in range(len(positive))]
        left_out = following if following is not None else torch.full_like(positive, -1)[:, None]
        losses = [
            torch.stack(
                [
                    plain_step_loss(model, history[[n]], item[None], others[n], None, left_out[[n]], expected)
                    for item in of_row[of_row >= 0]
                ]
            )
            for n, of_row in enumerate(targets)
        ]
        return torch.stack([of_row.mean() for of_row in losses]).mean()
    ids, own = torch.cat([positive, negatives]), torch.arange(len(positive), device=positive.device)
    if model.candidates == "set":
        ids = ids.unique()
        own = (ids == positive[:, None]).nonzero()[:, 1]
    candidates = model.items(ids)
    tokens = model.items(history.clamp(min=0).flatten()).view(*history.shape, -1)
    heads = normalize(model.encoder.plain(tokens, history), dim=-1)
    if model.gate is None:
        log_pi = torch.full_like(heads[..., 0], 1 / model.k).log()
    else:
        log_pi = model.gate.head(model.gate.tower.plain(tokens, history)[:, 0]).log_softmax(-1)
    log_sigma = mixture.log_sigma(heads, candidates[own], model.kappa_net(heads), model.kernel)
    weight, left_out = torch.ones_like(candidates[:, 0]), None
    if expected is not None:
        often = 1 - torch.exp(-expected) if model.candidates == "set" else expected
        weight = (1 / often[ids]).to(candidates)
    if following is not None:
        unwanted = (ids[None, :, None] == following[:, None, :]).any(-1) & (ids != positive[:, None])
        left_out = tuple(unwanted.nonzero().T)
    weights = Weights(weight, weight[own], left_out)
    return mixture.plain_loss(heads, candidates, own, log_pi, log_sigma, model.tau, ids, weights, model.bound)
