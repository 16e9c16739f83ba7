"""The two kernels on the unit sphere S^{d−1} and their normalisers (section 4, eqs. 17–18).

    power-spherical   ω_κ(t) = (1 + t)^κ     log C_d(κ) from two log-Gammas
    von Mises–Fisher  ω_κ(t) = exp(κ t)      log C_d(κ) from log ₀F₁(; d/2; κ²/4)

t is the cosine ⟨u, v⟩. Everything is computed in float64 and cast back: a float32 log-Gamma is ten times too coarse.
The vMF normaliser is one formula for all κ ≥ 0: a switch between formulas would make its derivative jump.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bachlib import BachError, NotFinite
from bachlib.model.hyp0f1 import LogHyp0F1, MeanResultant

Values = Float[Tensor, "..."]


class Kernel:
    """A density p(v) = C_d(κ) ω_κ(⟨u, v⟩) on the sphere (eq. 17); κ may have any shape.

    A kernel defines log_normalizer(κ, d) = log C_d(κ); log_omega(t, κ) = log ω_κ(t) in float64, and log_omega_(t, κ) in
    the memory of t, for serving; mean_resultant(κ, d) = E[t]; mean_log_omega(κ, d) = E[log ω_κ(t)]; and
    sample_cosine(κ, d), a draw of t.
    """

    name: str

    def log_density(self, t: Values, kappa: Values, d: int) -> Values:
        """log C_d(κ) + log ω_κ(t) for cosines t in [−1, 1] (eq. 17)."""
        kappa64 = _checked_pair(t, kappa, d)
        return (self.log_normalizer(kappa64, d) + self.log_omega(t, kappa64)).to(t)

    def entropy(self, kappa: Values, d: int) -> Values:
        """−log C_d(κ) − E[log ω_κ(t)]."""
        kappa64 = _checked(kappa, d)
        return (-self.log_normalizer(kappa64, d) - self.mean_log_omega(kappa64, d)).to(kappa)

    def sample(self, mean: Float[Tensor, "... d"], kappa: Values) -> Float[Tensor, "... d"]:
        """One independent draw around each unit mean direction; mean and κ broadcast."""
        d, kappa64 = mean.shape[-1], _checked(kappa, mean.shape[-1])
        check_unit(mean=mean)
        if kappa64.numel() and kappa64.max() > 1e15:
            raise BachError(f"kappa should be at most 1e15 for sampling; got {kappa64.max().item():g}")
        got = f"got mean {tuple(mean.shape)} and kappa {tuple(kappa.shape)}"
        shape = _broadcast(mean.shape[:-1], kappa.shape, f"mean should be (…, d), kappa (…) with the same (…); {got}")
        mean, kappa64 = mean.expand(*shape, d), kappa64.expand(shape)
        return _around(mean, self.sample_cosine(kappa64, d)) if kappa64.numel() else mean.clone()


class PowerSpherical(Kernel):
    """p(v) = C_d(κ) (1 + ⟨u, v⟩)^κ (De Cao & Aziz 2020). The cosine is 2·Beta(α, β) − 1 with α = β + κ, β = (d−1)/2."""

    name = "power-spherical"

    def log_normalizer(self, kappa: Values, d: int) -> Values:
        """log C_d(κ) = −(α+β) log 2 − β log π − log Γ(α) + log Γ(α+β) (eq. 18)."""
        beta = (d - 1) / 2
        alpha = _checked(kappa, d) + beta
        value = (alpha + beta).lgamma() - alpha.lgamma() - (alpha + beta) * math.log(2) - beta * math.log(math.pi)
        return value.to(kappa)

    def log_omega(self, t: Values, kappa: Values) -> Values:
        """κ log(1 + t); 1 + t is at least the spacing of t's type, so that t = −1 stays finite."""
        return kappa * t.double().clamp(min=torch.finfo(t.dtype).eps - 1).log1p()

    def log_omega_(self, t: Values, kappa: Values) -> Values:
        """κ log(1 + t); NaN where rounding took t below −1."""
        if t.device.type == "cpu":  # numpy's logarithm takes half the time of torch's
            with np.errstate(invalid="ignore", divide="ignore"):
                np.log1p(t.numpy(), out=t.numpy())
            return t.mul_(kappa)
        return t.log1p_().mul_(kappa)

    def mean_resultant(self, kappa: Values, d: int) -> Values:
        """E[t] = κ / (κ + d − 1)."""
        return (_checked(kappa, d) / (kappa.double() + (d - 1))).to(kappa)

    def mean_log_omega(self, kappa: Values, d: int) -> Values:
        """κ E[log(1 + t)] = κ (log 2 + ψ(α) − ψ(α+β))."""
        beta = (d - 1) / 2
        alpha = kappa + beta
        return kappa * (math.log(2) + alpha.digamma() - (alpha + beta).digamma())

    def sample_cosine(self, kappa: Values, d: int) -> Values:
        beta = torch.full_like(kappa, (d - 1) / 2, dtype=torch.float64)
        return 2 * torch.distributions.Beta(kappa + beta, beta).sample() - 1


class VonMisesFisher(Kernel):
    """p(v) = C_d(κ) exp(κ ⟨u, v⟩), with C_d(κ) = κ^{d/2−1} / ((2π)^{d/2} I_{d/2−1}(κ))."""

    name = "von-mises-fisher"

    def log_normalizer(self, kappa: Values, d: int) -> Values:
        """log C_d(κ) = log(uniform density) − log ₀F₁(; d/2; κ²/4), which has no log κ and is smooth at 0."""
        uniform = math.lgamma(d / 2) - math.log(2) - d / 2 * math.log(math.pi) if d >= 2 else 0.0
        return (uniform - LogHyp0F1.apply(_checked(kappa, d), d)).to(kappa)

    def log_omega(self, t: Values, kappa: Values) -> Values:
        """κ t."""
        return kappa * t.double()

    def log_omega_(self, t: Values, kappa: Values) -> Values:
        """κ t."""
        return t.mul_(kappa)

    def mean_resultant(self, kappa: Values, d: int) -> Values:
        """E[t] = A_d(κ) = I_{d/2}(κ) / I_{d/2−1}(κ) = ∂/∂κ log ₀F₁(; d/2; κ²/4)."""
        return MeanResultant.apply(_checked(kappa, d), d).to(kappa)

    def mean_log_omega(self, kappa: Values, d: int) -> Values:
        """κ E[t] = κ A_d(κ)."""
        return kappa * self.mean_resultant(kappa, d)

    def sample_cosine(self, kappa: Values, d: int) -> Values:
        """Wood's (1994) rejection sampler."""
        kappa = kappa.double()
        b = (d - 1) / (2 * kappa + (4 * kappa**2 + (d - 1) ** 2).sqrt())
        x = (1 - b) / (1 + b)
        c = kappa * x + (d - 1) * ((1 - x) * (1 + x)).log()
        half = kappa.new_tensor((d - 1) / 2)
        beta = torch.distributions.Beta(half, half)
        cosine, waiting = torch.empty_like(kappa), torch.ones_like(kappa, dtype=torch.bool)
        while waiting.any():
            z = beta.sample(kappa.shape)
            proposed = (1 - (1 + b) * z) / (1 - (1 - b) * z)
            threshold = torch.rand_like(kappa).log()
            accepted = waiting & (kappa * proposed + (d - 1) * (1 - x * proposed).log() - c >= threshold)
            cosine = torch.where(accepted, proposed, cosine)
            waiting &= ~accepted
        return cosine


KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in (PowerSpherical(), VonMisesFisher())}


def _around(mean: Tensor, t: Tensor) -> Tensor:
    """A uniform draw among the unit vectors at cosine t to each mean direction."""
    mean64, t = mean.double(), t[..., None]
    tangent = torch.randn_like(mean64)
    tangent = tangent - (tangent * mean64).sum(-1, keepdim=True) * mean64
    tangent = tangent / tangent.norm(dim=-1, keepdim=True)
    return torch.nn.functional.normalize(t * mean64 + (1 - t * t).clamp(min=0).sqrt() * tangent, dim=-1).to(mean)


def check_unit(**vectors: Tensor) -> None:
    """Raise unless each of these tensors holds unit vectors in its last dimension."""
    for name, value in vectors.items():
        length = value.norm(dim=-1).flatten()
        off = (length - 1).abs()
        if len(off) and not bool((off < 1e-3).all()):
            worst = length[off.nan_to_num(nan=torch.inf).argmax()].item()
            raise BachError(f"{name} should be unit vectors: normalise them; got one of length {worst:.3g}")


def _checked(kappa: Tensor, d: int) -> Tensor:
    """κ in float64; raise if κ or d is invalid."""
    if not isinstance(d, int) or d < 2:
        raise BachError(f"d should be a whole number ≥ 2, the dimension of the space; got {d}")
    if not isinstance(kappa, Tensor) or kappa.dtype not in (torch.float32, torch.float64):
        kind = f"a {kappa.dtype} tensor" if isinstance(kappa, Tensor) else type(kappa).__name__
        raise BachError(f"kappa should be a float32 or float64 tensor; got {kind}")
    _all_fine(kappa, (kappa >= 0) & kappa.isfinite(), "kappa should be finite and ≥ 0 everywhere; got {}")
    return kappa.double()


def _all_fine(values: Tensor, fine: Tensor, message: str) -> None:
    if not bool(fine.all()):
        wrong = values[~fine][0].item()
        raise (BachError if math.isfinite(wrong) else NotFinite)(message.format(wrong))


def _checked_pair(t: Tensor, kappa: Tensor, d: int) -> Tensor:
    """κ in float64; raise if t is not cosines that broadcast with κ."""
    kappa64 = _checked(kappa, d)
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise BachError(f"t should be a float tensor of cosines; got {getattr(t, 'dtype', type(t).__name__)}")
    _broadcast(t.shape, kappa.shape, f"t and kappa should broadcast; got {tuple(t.shape)} and {tuple(kappa.shape)}")
    cosine = "t should be a cosine in [−1, 1], up to rounding; got {}: are the vectors unit vectors?"
    _all_fine(t, t.abs() <= 1 + 1e-3, cosine)
    return kappa64


def _broadcast(one: torch.Size, other: torch.Size, message: str) -> torch.Size:
    try:
        return torch.broadcast_shapes(one, other)
    except RuntimeError:
        raise BachError(message) from None
