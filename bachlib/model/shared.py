"""log p_r (eq. 12) of heads that all users share: one product of the codebook with the candidates for the whole batch.

Rows differ in what they leave out of the sum over the candidates, and in nothing else. Autograd does the rest.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from bachlib.model.candidates import (
    Ids,
    Items,
    PerHead,
    Rows,
    Targets,
    Weights,
    check_shapes,
    copies_of_positive,
    exceptions,
    in_full,
    or_ones,
)
from bachlib.model.onepass import log_beside


def shared_log_components(
    codebook: Float[Tensor, "k d"],
    items: Items,
    positive: Rows,
    tau: float,
    ids: Ids | None = None,
    weights: Weights | None = None,
) -> PerHead:
    """`log_components` (eq. 12) for heads that all users share: one (k, C) product for the batch.

    A copy of a row's positive has the same logit as the positive, so the sum over the other items is Z − S: the sum Z
    over all candidates, less what the positive and its copies have in it, S. This loses no accuracy while S ≤ Z/2. At
    most one item per head can have more: for that item the other candidates are added up.
    """
    check_shapes(codebook.expand(len(positive), -1, -1), items, positive, ids, tau, weights)
    weights = or_ones(weights, in_full(items), positive)
    weight, own_weight = weights.candidate, weights.own
    logits = in_full(items) @ in_full(codebook).T / tau  # (C, k)
    if weights.left_out is not None:  # rows that leave out what they like: the sum of the others is one more product
        row, candidate, by = exceptions(ids, positive, weights)
        counted = weight.expand(len(positive), -1).clone()
        counted[row[by == -torch.inf], candidate[by == -torch.inf]] = 0
        counted.scatter_(1, positive[:, None], 0)
        others = (counted @ logits.exp()).clamp(min=torch.finfo(logits.dtype).tiny)
        return logsigmoid(logits[positive] + own_weight.log()[:, None] - others.log())
    ids = torch.arange(len(items), device=items.device) if ids is None else ids
    rows, copies = copies_of_positive(ids, positive)
    times = weight[positive].index_add(0, rows, weight[copies])
    own, top = logits[positive], logits.detach().amax(0)
    e = (logits - top).exp() * weight[:, None]
    s = times[:, None] * (own - top).exp()  # (B, k)
    largest = ids[positive[s.argmax(0)]]  # the item with the largest S under each head
    rest = e.masked_fill(ids[:, None] == largest, 0.0).sum(0)
    others = torch.where(ids[positive][:, None] == largest, rest, e.sum(0) - s)
    return logsigmoid(own + own_weight.log()[:, None] - top - others.clamp(min=torch.finfo(e.dtype).tiny).log())


def shared_log_components_of_all(codebook: Float[Tensor, "k d"], items: Items, targets: Targets, tau: float) -> Tensor:
    """log p (B, M, k): how often a row counts each candidate is a matrix (B, C), and one more product."""
    (row, candidate, by), beside = targets.exceptions()
    s = targets.logits(codebook, tau)
    counted = targets.weight.to(s).expand(len(s), -1).clone()
    counted[row, candidate] *= by.exp()
    others = counted @ (in_full(items) @ in_full(codebook).T / tau).exp()  # (B, k), a sum of positive terms
    log_others = others.clamp(min=torch.finfo(s.dtype).tiny).log()[:, None]
    return s + targets.log_times() - torch.logaddexp(log_others, log_beside(s, beside, tau))
