"""The per-user mixture of softmaxes and its ELBO (section 4): the plain reference, one function per equation.

    eqs. 12–14   log_components, log_likelihood
    eqs. 17, 19  log_sigma, responsibilities: γ_n, blind to the negatives
    eq. 20       contrastive_posterior, kl_gap: KL(γ_n ‖ γ_n^con) = ℓ_n − ELBO_n
    eqs. 15, 16, 21, 23  elbo_at, elbo, log_density; `scores` is the fast `log_density`

With `ids`, other copies of a row's positive are left out of its sum. Every other item counts as often as it is among
the candidates. With `weights`, a candidate counts as often as its weight says, and there need be no copies
(see `candidates`). A `Bound` other than the paper's changes γ or the entropy term.
`loss` is the training loss, computed in one pass over the candidates (`onepass`); `plain_loss` is its plain reference.
`loss_of_all` is the loss with all next items of a window as targets.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from bachlib import BachError
from bachlib.model.candidates import (
    Heads,
    Ids,
    Items,
    PerHead,
    Rows,
    Targets,
    Weights,
    check_shapes,
    log_weights,
    or_ones,
)
from bachlib.model.onepass import Slopes, fits, reconstruction, reconstruction_of_all, rows_per_block
from bachlib.model.shared import shared_log_components_of_all
from bachlib.model.sphere import KERNELS, Kernel, check_unit


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


class Bound(NamedTuple):
    """Which bound is maximised: the paper's eq. 21, or one with another γ or weight of the entropy.

    `posterior`: "spherical" is eq. 19. "contrastive" is γ^con of eq. 20: the bound is tight, so this is EM (with a
    gradient step for M) on the mixture of softmaxes. "prior" is γ = π_u: no recognition model. Only the first trains κ;
    with the others κ stays 1/τ, also at serving. γ^con needs all logits of a row first. But a block of `onepass` has
    them, for all heads, before it is forgotten: the loss (B = 512, 1,790 candidates, k = 8 and 32) takes 2–4% longer
    than with eq. 19. A first pass for log p would take 42% longer, plain code 2.7 and 3.6 times as long.
    `through_gamma=False` holds γ fixed in the gradient, as EM's M-step does; κ is not trained then. At γ^con it changes
    nothing: the bound is stationary there. `temper` is the weight of the entropy term. At fixed log p the best γ is
    ∝ (π p)^(1/temper): sharper below 1, flatter above, where the value is no bound of ℓ_n any more.
    """

    posterior: Literal["spherical", "contrastive", "prior"] = "spherical"
    through_gamma: bool = True
    temper: float = 1.0

    def log_gamma(self, log_pi: PerHead, log_sigma: PerHead, log_p: PerHead | None) -> PerHead:
        """log γ of this bound; only the contrastive posterior reads log p."""
        if self.posterior == "contrastive":
            log_gamma = contrastive_posterior(log_pi, log_p)
        else:
            log_gamma = log_pi if self.posterior == "prior" else responsibilities(log_pi, log_sigma)
        return log_gamma if self.through_gamma else log_gamma.detach()

    def slopes(self, log_pi: PerHead, share: Tensor) -> Slopes:
        """∂F/∂log p at γ^con, times `share`: γ, and through γ (1 − temper) γ (a − Σ_s γ_s a_s), a = log π + log p."""

        def of(rows: slice, log_p: Tensor) -> Tensor:
            a = log_pi[rows].detach() + log_p
            gamma = a.softmax(-1)
            if self.through_gamma:
                a = torch.where(gamma > 0, a, 0.0)
                gamma = gamma * (1 + (1 - self.temper) * (a - (gamma * a).sum(-1, keepdim=True)))
            return gamma * share[rows]

        return of


PAPER = Bound()


def elbo_at(log_gamma: PerHead, log_pi: PerHead, log_p: PerHead, temper: float = 1.0) -> Elbo:
    """The bound at any γ (eqs. 15, 16), in its three terms (eq. 21), the entropy with the weight `temper`."""
    _same_shape(log_gamma=log_gamma, log_pi=log_pi, log_p=log_p)
    gamma = log_gamma.exp()
    # a head with γ = 0 adds 0, even if its logarithm is −∞
    parts = (log_p, log_pi, -temper * log_gamma)
    terms = [(gamma * torch.where(gamma > 0, term, 0.0)).sum(-1) for term in parts]
    return Elbo(sum(terms), *terms)


def elbo(log_pi: PerHead, log_sigma: PerHead, log_p: PerHead, bound: Bound = PAPER) -> Elbo:
    """The bound at the recognition posterior γ of eq. 19, which BACH maximises (eq. 21); differentiable through γ."""
    return elbo_at(bound.log_gamma(log_pi, log_sigma, log_p), log_pi, log_p, bound.temper)


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
def served_by(
    rule: str, heads: Heads, items: Items, log_pi: PerHead, kappa: PerHead, kernel: Kernel | None, tau: float
) -> tuple[PerHead, PerHead, Kernel | None]:
    """(weights, κ, kernel) with which `scores` ranks items by a serving rule; without a kernel by the max over heads.

    density (the paper's, eq. 23) changes nothing. max (eq. 8) forgets π_u and κ. softmax is the model that is trained,
    Σ_r π_r p_r(i | u) = Σ_r (π_r / Z_r) exp(⟨u_r, v_i⟩ / τ), where Z_r = Σ_j exp(⟨u_r, v_j⟩ / τ) is over the catalogue:
    up to a factor the von Mises–Fisher density with κ = 1/τ for each head and the weights π_r / Z_r.
    """
    if rule == "max" or kernel is None:
        return log_pi, kappa, None
    if rule == "softmax":
        blocks = heads.flatten(0, 1).split(rows_per_block(len(items)))
        log_z = torch.cat([(u @ items.T / tau).logsumexp(-1) for u in blocks]).view_as(log_pi)
        return log_pi - log_z, torch.full_like(kappa, 1 / tau), KERNELS["von-mises-fisher"]
    return log_pi, kappa, kernel


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
    bound: Bound = PAPER,
) -> Float[Tensor, ""]:
    """−ELBO, mean over the batch; autograd keeps every (B, k, C) logit. `loss` is tested against it."""
    return -elbo(log_pi, log_sigma, log_components(heads, items, positive, tau, ids, weights), bound).total.mean()


def loss(
    heads: Heads,
    items: Items,
    positive: Rows,
    log_pi: PerHead,
    log_sigma: PerHead,
    tau: float,
    ids: Ids | None = None,
    weights: Weights | None = None,
    bound: Bound = PAPER,
) -> tuple[Float[Tensor, ""], Elbo, PerHead]:
    """−ELBO, mean over the batch (eq. 21); and its terms and γ without gradient, in one pass over the candidates.

    γ never sees the negatives, so ∂ELBO/∂log p_r = γ_r is known before the candidate logits exist. The gradient through
    γ, π and κ is ordinary autograd on (B, k). Unlike the reference it does not check that embeddings are unit vectors.
    """
    check_shapes(heads, items, positive, ids, tau, weights)
    _same_shape(log_pi=log_pi, heads=torch.empty(heads.shape[:-1], device="meta"))
    late = bound.posterior == "contrastive"  # γ needs log p: until then its slopes take its place
    heads = heads.expand(len(positive), -1, -1) if late else heads  # the slopes of a row need all its heads
    log_gamma = None if late else bound.log_gamma(log_pi, log_sigma, None)
    gamma = bound.slopes(log_pi, torch.ones_like(log_pi[:, :1])) if late else log_gamma.exp()
    if isinstance(heads, Tensor):
        rebuilt, log_p = reconstruction(heads, items, positive, gamma, tau, ids, weights)
    else:
        rebuilt, log_p = heads.reconstruction(items, positive, gamma, tau, ids, weights)
    if late:
        log_gamma = bound.log_gamma(log_pi, log_sigma, log_p)
        gamma = log_gamma.exp()
        rebuilt = rebuilt - rebuilt.detach() + (gamma * log_p).sum()  # the value, and the slopes of log p
    rest = (gamma * torch.where(gamma > 0, log_pi - bound.temper * log_gamma, 0.0)).sum()
    with torch.no_grad():
        seen = elbo_at(log_gamma, log_pi, log_p, bound.temper)
    return -(rebuilt + rest) / len(positive), seen, gamma.detach()


def loss_of_all(
    heads: Heads,
    items: Items,
    targets: Targets,
    log_pi: PerHead,
    log_sigma: Float[Tensor, "B M k"],
    tau: float,
    bound: Bound = PAPER,
) -> tuple[Float[Tensor, ""], Elbo, PerHead]:
    """`loss` with all targets of a row: the mean of their −ELBO. The terms and γ are means over the row's targets, too.

    `log_sigma` has a row per target. Heads that all users share are (k, d).
    """
    everybody, log_pi = heads.expand(len(log_pi), -1, -1), log_pi[:, None].expand_as(log_sigma)
    check_shapes(everybody, items, targets.own, targets.ids, tau)
    late, share = bound.posterior == "contrastive", targets.share()
    log_gamma = None if late else bound.log_gamma(log_pi, log_sigma, None)
    gamma = bound.slopes(log_pi, share) if late else log_gamma.exp() * share
    if shared := heads.ndim == 2 and fits(tau, heads.dtype):
        log_p = shared_log_components_of_all(heads, items, targets, tau)
    elif isinstance(heads, Tensor) or late:
        rebuilt, log_p = reconstruction_of_all(everybody, items, targets, gamma, tau)
    else:
        rebuilt, log_p = heads.reconstruction_of_all(items, targets, gamma, tau)
    if late:
        log_gamma = bound.log_gamma(log_pi, log_sigma, log_p)
        gamma = log_gamma.exp() * share
    if shared or late:
        rebuilt = (gamma * log_p).sum() + (0.0 if shared else rebuilt - rebuilt.detach())
    rest = torch.where(gamma == 0, 0.0, log_pi - bound.temper * log_gamma)
    with torch.no_grad():
        at = elbo_at(log_gamma, log_pi, log_p, bound.temper)
        seen = Elbo(*(targets.mean(term[..., None])[:, 0] for term in at))
    return -(rebuilt + (gamma * rest).sum()) / len(log_pi), seen, gamma.detach().sum(1)


def _same_shape(**tensors: Tensor) -> None:
    if len({tensor.shape for tensor in tensors.values()}) > 1:
        got = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())
        raise BachError(f"{' and '.join(tensors)} should have the same shape; got {got}")
