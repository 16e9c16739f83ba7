"""The per-user mixture of softmaxes and its ELBO (section 4): the plain reference, one function per equation.

    eqs. 12–14   log_components, log_likelihood
    eqs. 17, 19  log_sigma, responsibilities: γ_n, blind to the negatives
    eq. 20       contrastive_posterior, kl_gap: KL(γ_n ‖ γ_n^con) = ℓ_n − ELBO_n
    eqs. 15, 16, 21, 23  elbo_at, elbo, log_density; `scores` is the fast `log_density`

With `ids`, other copies of a row's positive are left out of its sum. Every other item counts as often as it is among
the candidates. With `weights`, a candidate counts as often as its weight says, and there need be no copies.
`TwoTower.objective` says what the other reading of the candidate set C_n is worth.
`loss` is the training loss, computed in one pass over the candidates (`onepass`); `plain_loss` is its plain reference.
`loss_of_all` is the loss with all next items of a window as targets.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from bachlib import BachError
from bachlib.model.onepass import (
    Heads,
    Ids,
    Items,
    PerHead,
    Rows,
    Targets,
    Weights,
    copies_of_positive,
    fits,
    in_full,
    log_beside,
    log_weights,
    or_ones,
    reconstruction,
    reconstruction_of_all,
    rows_per_block,
)
from bachlib.model.sphere import Kernel, check_unit


class Elbo(NamedTuple):
    """The three roles of eq. 21 and their sum, each (B,)."""

    total: Float[Tensor, " B"]
    reconstruction: Float[Tensor, " B"]
    prior: Float[Tensor, " B"]
    entropy: Float[Tensor, " B"]


def log_components(
    heads: Heads, items: Items, positive: Rows, tau: float, ids: Ids | None = None, weights: Weights | None = None
) -> PerHead:
    """log p_r(i_n | u_n), the sampled softmax of each head (eq. 12); `positive` are row numbers of `items`."""
    check_shapes(heads, items, positive, ids, tau, weights)
    check_unit(heads=heads, items=items)
    logits = heads @ items.T / tau + log_weights(ids, positive, or_ones(weights, items, positive))[:, None]  # (B, k, C)
    at_positive = positive[:, None, None].expand(-1, heads.shape[1], 1)
    return logits.log_softmax(-1).gather(2, at_positive)[..., 0]


def log_sigma(heads: Heads, positive_items: Float[Tensor, "B d"], kappa: PerHead, kernel: Kernel) -> PerHead:
    """log σ_r(n) = log C_d(κ_r) + log ω_κ(⟨u_r, v_n⟩), the density of the positive under each head (eq. 17)."""
    if isinstance(heads, Tensor):
        _same_shape(positive_items=positive_items, heads=heads[:, 0])
        t = (heads @ positive_items[:, :, None])[..., 0]
    else:  # some that all users share, see `hybrid`
        t = heads.cosines(positive_items[:, None])[:, 0]
    _same_shape(kappa=kappa, heads=t)
    return kernel.log_density(t, kappa, heads.shape[-1])


def responsibilities(log_pi: PerHead, log_sigma: PerHead) -> PerHead:
    """log γ_n^(r), the recognition posterior over heads (eq. 19). It never sees the negatives."""
    _same_shape(log_pi=log_pi, log_sigma=log_sigma)
    return (log_pi + log_sigma).log_softmax(-1)


def contrastive_posterior(log_pi: PerHead, log_p: PerHead) -> PerHead:
    """log γ_n^con ∝ π_r p_r, the model's own posterior, at which the bound is tight (eq. 20)."""
    _same_shape(log_pi=log_pi, log_p=log_p)
    return (log_pi + log_p).log_softmax(-1)


def log_likelihood(log_pi: PerHead, log_p: PerHead) -> Float[Tensor, " B"]:
    """ℓ_n = log Σ_r π_r p_r(i_n | u_n) (eqs. 13, 14)."""
    _same_shape(log_pi=log_pi, log_p=log_p)
    return (log_pi + log_p).logsumexp(-1)


def elbo_at(log_gamma: PerHead, log_pi: PerHead, log_p: PerHead) -> Elbo:
    """The bound at any γ (eqs. 15, 16), in its three terms (eq. 21)."""
    _same_shape(log_gamma=log_gamma, log_pi=log_pi, log_p=log_p)
    gamma = log_gamma.exp()
    # a head with γ = 0 adds 0, even if its logarithm is −∞
    terms = [(gamma * torch.where(gamma > 0, term, 0.0)).sum(-1) for term in (log_p, log_pi, -log_gamma)]
    return Elbo(sum(terms), *terms)


def elbo(log_pi: PerHead, log_sigma: PerHead, log_p: PerHead) -> Elbo:
    """The bound at the recognition posterior γ of eq. 19, which BACH maximises (eq. 21); differentiable through γ."""
    return elbo_at(responsibilities(log_pi, log_sigma), log_pi, log_p)


def kl_gap(log_pi: PerHead, log_sigma: PerHead, log_p: PerHead) -> Float[Tensor, " B"]:
    """KL(γ_n ‖ γ_n^con), the gap of the bound (eq. 20), computed as a divergence, not as a difference."""
    log_gamma = responsibilities(log_pi, log_sigma)
    gamma = log_gamma.exp()
    ratio = log_gamma - contrastive_posterior(log_pi, log_p)
    return (gamma * torch.where(gamma > 0, ratio, 0.0)).sum(-1)


def log_density(heads: Heads, items: Items, log_pi: PerHead, kappa: PerHead, kernel: Kernel) -> Float[Tensor, "B C"]:
    """log m(i | u) = log Σ_r π_r C_d(κ_r) ω_κ(⟨u_r, v_i⟩), the score at serving (eq. 23)."""
    check_unit(heads=heads, items=items)
    _same_shape(log_pi=log_pi, kappa=kappa, heads=heads[..., 0])
    t = heads @ items.T  # (B, k, n)
    return (log_pi[..., None] + kernel.log_density(t, kappa[..., None], heads.shape[-1])).logsumexp(1)


@torch.no_grad()
def scores(heads: Heads, items: Items, log_pi: PerHead, kappa: PerHead, kernel: Kernel) -> Float[Tensor, "B C"]:
    """`log_density` fast: in blocks that fit the processor's cache, in the type of the heads, no gradient.

    Logarithms are to base 2, because exp2 is faster than exp.
    """
    (B, k, d), bit = heads.shape, math.log(2)
    weight = ((log_pi + kernel.log_normalizer(kappa.double(), d)) / bit).to(heads)[..., None]  # (B, k, 1)
    out, bits, rows = heads.new_empty(B, len(items)), (kappa / bit).to(heads)[..., None], heads.reshape(-1, d)
    size = min(rows_per_block(B * k), len(items))
    room = heads.new_empty(B * k * size)
    for start in range(0, len(items), size):
        some = items[start : start + size]
        t = torch.mm(rows, some.T, out=room[: B * k * len(some)].view(B * k, -1)).view(B, k, -1)
        t = kernel.log_omega_(t.clamp_(min=torch.finfo(t.dtype).eps - 1), bits).add_(weight)
        top = t.amax(1, keepdim=True)
        out[:, start : start + size] = t.sub_(top).exp2_().sum(1).log2_().add_(top[:, 0])
    return out.mul_(bit)


def plain_loss(
    heads: Heads,
    items: Items,
    positive: Rows,
    log_pi: PerHead,
    log_sigma: PerHead,
    tau: float,
    ids: Ids | None = None,
    weights: Weights | None = None,
) -> Float[Tensor, ""]:
    """−ELBO, mean over the batch; autograd keeps every (B, k, C) logit. `loss` is tested against it."""
    return -elbo(log_pi, log_sigma, log_components(heads, items, positive, tau, ids, weights)).total.mean()


def loss(
    heads: Heads,
    items: Items,
    positive: Rows,
    log_pi: PerHead,
    log_sigma: PerHead,
    tau: float,
    ids: Ids | None = None,
    weights: Weights | None = None,
) -> tuple[Float[Tensor, ""], Elbo]:
    """−ELBO, mean over the batch (eq. 21), and its terms without gradient, in one pass over the candidates.

    γ never sees the negatives, so ∂ELBO/∂log p_r = γ_r is known before the candidate logits exist. The gradient through
    γ, π and κ is ordinary autograd on (B, k). Unlike the reference it does not check that embeddings are unit vectors.
    """
    check_shapes(heads, items, positive, ids, tau, weights)
    _same_shape(log_pi=log_pi, heads=torch.empty(heads.shape[:-1], device="meta"))
    log_gamma = responsibilities(log_pi, log_sigma)
    gamma = log_gamma.exp()
    if isinstance(heads, Tensor):
        rebuilt, log_p = reconstruction(heads, items, positive, gamma, tau, ids, weights)
    else:
        rebuilt, log_p = heads.reconstruction(items, positive, gamma, tau, ids, weights)
    rest = (gamma * torch.where(gamma > 0, log_pi - log_gamma, 0.0)).sum()
    with torch.no_grad():
        seen = elbo_at(log_gamma, log_pi, log_p)
    return -(rebuilt + rest) / len(positive), seen


def loss_of_all(
    heads: Heads, items: Items, targets: Targets, log_pi: PerHead, log_sigma: Float[Tensor, "B M k"], tau: float
) -> tuple[Float[Tensor, ""], Elbo, PerHead]:
    """`loss` with all targets of a row: the mean of their −ELBO. The terms and γ are means over the row's targets, too.

    `log_sigma` has a row per target. Heads that all users share are (k, d).
    """
    everybody, log_pi = heads.expand(len(log_pi), -1, -1), log_pi[:, None].expand_as(log_sigma)
    check_shapes(everybody, items, targets.own, targets.ids, tau)
    log_gamma = responsibilities(log_pi, log_sigma)
    gamma = log_gamma.exp() * targets.share()
    if heads.ndim == 2 and fits(tau, heads.dtype):
        log_p = shared_log_components_of_all(heads, items, targets, tau)
        rebuilt = (gamma * log_p).sum()
    elif isinstance(heads, Tensor):
        rebuilt, log_p = reconstruction_of_all(everybody, items, targets, gamma, tau)
    else:
        rebuilt, log_p = heads.reconstruction_of_all(items, targets, gamma, tau)
    rest = torch.where(gamma == 0, 0.0, log_pi - log_gamma)
    with torch.no_grad():
        seen = Elbo(*(targets.mean(term[..., None])[:, 0] for term in elbo_at(log_gamma, log_pi, log_p)))
    return -(rebuilt + (gamma * rest).sum()) / len(log_pi), seen, gamma.detach().sum(1)


def shared_log_components_of_all(codebook: Float[Tensor, "k d"], items: Items, targets: Targets, tau: float) -> Tensor:
    """log p (B, M, k): how often a row counts each candidate is a matrix (B, C), and one more product."""
    (row, candidate, by), beside = targets.left_out()
    s = targets.logits(codebook, tau)
    counted = targets.weight.to(s).expand(len(s), -1).clone()
    counted[row, candidate] *= by.exp()
    others = counted @ (in_full(items) @ in_full(codebook).T / tau).exp()  # (B, k), a sum of positive terms
    log_others = others.clamp(min=torch.finfo(s.dtype).tiny).log()[:, None]
    return s - torch.logaddexp(log_others, log_beside(s, beside, tau))


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
    weight, own_weight = or_ones(weights, in_full(items), positive)
    logits = in_full(items) @ in_full(codebook).T / tau  # (C, k)
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


def check_shapes(
    heads: Tensor, items: Tensor, positive: Tensor, ids: Tensor | None, tau: float, weights: Weights | None = None
) -> None:
    got = f"got heads {tuple(heads.shape)} and items {tuple(items.shape)}"
    if heads.ndim != 3 or items.ndim != 2 or heads.shape[-1] != items.shape[-1]:
        raise BachError(f"heads should be (B, k, d) and items (C, d) with the same d; {got}")
    if 0 in (*heads.shape, *items.shape):
        raise BachError(f"a batch needs at least one row, head and candidate; {got}")
    if positive.shape != heads.shape[:1]:
        raise BachError(f"positive should be ({heads.shape[0]},), one candidate per row; got {tuple(positive.shape)}")
    if ids is not None and ids.shape != items.shape[:1]:
        raise BachError(f"ids should be ({items.shape[0]},), the item of each candidate; got {tuple(ids.shape)}")
    if weights is not None and (shapes := [w.shape for w in weights]) != [items.shape[:1], positive.shape]:
        wanted = f"({len(items)},) for the candidates and ({len(positive)},) for the positives"
        raise BachError(f"weights should be {wanted}; got {' and '.join(str(tuple(shape)) for shape in shapes)}")
    if len(wrong := positive[(positive < 0) | (positive >= len(items))]):
        raise BachError(f"positive should be row numbers 0 … {len(items) - 1} of items; got {int(wrong[0])}")
    if not 0 < tau < float("inf"):
        raise BachError(f"tau should be a positive number; got {tau}")


def _same_shape(**tensors: Tensor) -> None:
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        got = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise BachError(f"{' and '.join(tensors)} should have the same shape; got {got}")
