"""The two kernels on the unit sphere S^{d−1} and their normalisers (section 4, eqs. 17–18).

    power-spherical   ω_κ(t) = (1 + t)^κ     log C_d(κ) from two log-Gammas
    von Mises–Fisher  ω_κ(t) = exp(κ t)      log C_d(κ) from log ₀F₁(; d/2; κ²/4)

t is the cosine ⟨u, v⟩. Everything is computed in float64 and cast back: a float32 log-Gamma is ten times too coarse.
The vMF normaliser is one formula for all κ ≥ 0, without a switch in κ that would make its derivative jump.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from bachlib import BachError, NotFinite
from bachlib.model.hyp0f1 import LogHyp0F1, MeanResultant


class PowerSpherical:
    """p(v) = C_d(κ) (1 + ⟨u, v⟩)^κ (De Cao & Aziz 2020). The cosine is 2·Beta(α, β) − 1 with α = β + κ, β = (d−1)/2."""

    name = "power-spherical"

    def log_normalizer(self, kappa: Float[Tensor, ...], d: int) -> Float[Tensor, ...]:
        """log C_d(κ) = −(α+β) log 2 − β log π − log Γ(α) + log Γ(α+β)."""
        alpha, beta = _alpha_beta(_checked(kappa, d), d)
        value = (alpha + beta).lgamma() - alpha.lgamma() - (alpha + beta) * math.log(2) - beta * math.log(math.pi)
        return value.to(kappa)

    def log_density(self, t: Float[Tensor, ...], kappa: Float[Tensor, ...], d: int) -> Float[Tensor, ...]:
        """log C_d(κ) + κ log(1 + t); at t = −1 the logarithm stops at the spacing of the type, so it stays finite."""
        t64, kappa64 = _checked_pair(t, kappa, d)
        value = self.log_normalizer(kappa64, d) + kappa64 * t64.clamp(min=torch.finfo(t.dtype).eps - 1).log1p()
        return value.to(t)

    def log_omega_(self, t: Float[Tensor, ...], kappa: Float[Tensor, ...]) -> Float[Tensor, ...]:
        """κ log(1 + t), in the place and type of t, for serving; not a number where rounding took t below −1."""
        if t.device.type == "cpu":  # numpy's logarithm takes half the time of torch's
            with np.errstate(invalid="ignore", divide="ignore"):
                np.log1p(t.numpy(), out=t.numpy())
            return t.mul_(kappa)
        return t.log1p_().mul_(kappa)

    def mean_resultant(self, kappa: Float[Tensor, ...], d: int) -> Float[Tensor, ...]:
        """E[t] = κ / (κ + d − 1)."""
        return (_checked(kappa, d) / (kappa.double() + (d - 1))).to(kappa)

    def entropy(self, kappa: Float[Tensor, ...], d: int) -> Float[Tensor, ...]:
        """−log C_d(κ) − κ E[log(1 + t)], with E[log(1 + t)] = log 2 + ψ(α) − ψ(α+β)."""
        alpha, beta = _alpha_beta(_checked(kappa, d), d)
        expected = math.log(2) + alpha.digamma() - (alpha + beta).digamma()
        return (-self.log_normalizer(kappa.double(), d) - kappa.double() * expected).to(kappa)

    def _sample_cosine(self, kappa: Tensor, d: int) -> Tensor:
        alpha, beta = _alpha_beta(kappa.double(), d)
        return 2 * torch.distributions.Beta(alpha, torch.full_like(alpha, beta)).sample() - 1

    def sample(self, mean: Float[Tensor, "... d"], kappa: Float[Tensor, ...]) -> Float[Tensor, "... d"]:
        """One draw around each unit mean direction; mean and κ broadcast, every draw is its own."""
        mean, kappa = _checked_mean(mean, kappa)
        return _around(mean, self._sample_cosine(kappa, mean.shape[-1])) if kappa.numel() else mean.clone()


class VonMisesFisher:
    """p(v) = C_d(κ) exp(κ ⟨u, v⟩), with C_d(κ) = κ^{d/2−1} / ((2π)^{d/2} I_{d/2−1}(κ))."""

    name = "von-mises-fisher"

    def log_normalizer(self, kappa: Float[Tensor, ...], d: int) -> Float[Tensor, ...]:
        """log C_d(κ) = log(uniform density) − log ₀F₁(; d/2; κ²/4), which has no log κ and is smooth at 0."""
        uniform = math.lgamma(d / 2) - math.log(2) - d / 2 * math.log(math.pi) if d >= 2 else 0.0
        return (uniform - LogHyp0F1.apply(_checked(kappa, d), d)).to(kappa)

    def log_density(self, t: Float[Tensor, ...], kappa: Float[Tensor, ...], d: int) -> Float[Tensor, ...]:
        """log C_d(κ) + κ t."""
        t64, kappa64 = _checked_pair(t, kappa, d)
        return (self.log_normalizer(kappa64, d) + kappa64 * t64).to(t)

    def log_omega_(self, t: Float[Tensor, ...], kappa: Float[Tensor, ...]) -> Float[Tensor, ...]:
        """κ t, in the place and type of t."""
        return t.mul_(kappa)

    def mean_resultant(self, kappa: Float[Tensor, ...], d: int) -> Float[Tensor, ...]:
        """E[t] = A_d(κ) = I_{d/2}(κ) / I_{d/2−1}(κ) = ∂/∂κ log ₀F₁(; d/2; κ²/4)."""
        return MeanResultant.apply(_checked(kappa, d), d).to(kappa)

    def entropy(self, kappa: Float[Tensor, ...], d: int) -> Float[Tensor, ...]:
        """−log C_d(κ) − κ A_d(κ)."""
        kappa64 = _checked(kappa, d)
        return (-self.log_normalizer(kappa64, d) - kappa64 * self.mean_resultant(kappa64, d)).to(kappa)

    def _sample_cosine(self, kappa: Tensor, d: int) -> Tensor:
        """Wood's (1994) rejection sampler for the cosine."""
        kappa = kappa.double()
        b = (d - 1) / (2 * kappa + (4 * kappa**2 + (d - 1) ** 2).sqrt())
        x = (1 - b) / (1 + b)
        c = kappa * x + (d - 1) * ((1 - x) * (1 + x)).log()
        beta = torch.distributions.Beta(torch.tensor((d - 1) / 2.0).to(kappa), torch.tensor((d - 1) / 2.0).to(kappa))
        cosine, waiting = torch.empty_like(kappa), torch.ones_like(kappa, dtype=torch.bool)
        while waiting.any():
            z = beta.sample(kappa.shape)
            proposed = (1 - (1 + b) * z) / (1 - (1 - b) * z)
            threshold = torch.rand_like(kappa).log()
            accepted = waiting & (kappa * proposed + (d - 1) * (1 - x * proposed).log() - c >= threshold)
            cosine = torch.where(accepted, proposed, cosine)
            waiting &= ~accepted
        return cosine

    def sample(self, mean: Float[Tensor, "... d"], kappa: Float[Tensor, ...]) -> Float[Tensor, "... d"]:
        """One draw around each unit mean direction; mean and κ broadcast, every draw is its own."""
        mean, kappa = _checked_mean(mean, kappa)
        return _around(mean, self._sample_cosine(kappa, mean.shape[-1])) if kappa.numel() else mean.clone()


KERNELS = {kernel.name: kernel for kernel in (PowerSpherical(), VonMisesFisher())}


# --------------------------------------------------------------------------------------------------- small parts


def _alpha_beta(kappa: Tensor, d: int) -> tuple[Tensor, float]:
    beta = (d - 1) / 2
    return kappa + beta, beta


def _around(mean: Tensor, t: Tensor) -> Tensor:
    """A unit vector at cosine t to each mean direction, uniform around it; in float64, cast last."""
    mean64, t = mean.double(), t[..., None]
    tangent = torch.randn_like(mean64)
    tangent = tangent - (tangent * mean64).sum(-1, keepdim=True) * mean64
    tangent = tangent / tangent.norm(dim=-1, keepdim=True)
    return torch.nn.functional.normalize(t * mean64 + (1 - t * t).clamp(min=0).sqrt() * tangent, dim=-1).to(mean)


def check_unit(**vectors: Tensor) -> None:
    """Each named tensor should hold unit vectors in its last dimension."""
    for name, value in vectors.items():
        length = value.norm(dim=-1).flatten()
        off = (length - 1).abs()
        if len(off) and not bool((off < 1e-3).all()):
            worst = length[off.nan_to_num(nan=torch.inf).argmax()].item()
            raise BachError(f"{name} should be unit vectors: normalise them; got one of length {worst:.3g}")


def _checked(kappa: Tensor, d: int) -> Tensor:
    """κ in float64, after a look at what came."""
    if not isinstance(d, int) or d < 2:
        raise BachError(f"d should be a whole number ≥ 2, the dimension of the space; got {d}")
    if not isinstance(kappa, Tensor) or kappa.dtype not in (torch.float32, torch.float64):
        kind = f"a {kappa.dtype} tensor" if isinstance(kappa, Tensor) else type(kappa).__name__
        raise BachError(f"kappa should be a float32 or float64 tensor; got {kind}")
    fine = (kappa >= 0) & kappa.isfinite()
    if not bool(fine.all()):
        wrong = kappa[~fine].flatten()[0].item()
        kind = BachError if math.isfinite(wrong) else NotFinite
        raise kind(f"kappa should be finite and ≥ 0 everywhere; got {wrong}")
    return kappa.double()


def _checked_pair(t: Tensor, kappa: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """Cosines and κ in float64, after a look at both."""
    kappa64 = _checked(kappa, d)
    if not isinstance(t, Tensor) or not t.is_floating_point():
        raise BachError(f"t should be a float tensor of cosines; got {getattr(t, 'dtype', type(t).__name__)}")
    try:
        torch.broadcast_shapes(t.shape, kappa.shape)
    except RuntimeError:
        raise BachError(f"t and kappa should have one shape; got {tuple(t.shape)} and {tuple(kappa.shape)}") from None
    fine = t.abs() <= 1 + 1e-3
    if not bool(fine.all()):
        wrong = t[~fine].flatten()[0].item()
        kind = BachError if math.isfinite(wrong) else NotFinite
        raise kind(f"t should be a cosine in [−1, 1] (a little more is rounding); got {wrong}: are the vectors unit?")
    return t.double(), kappa64


def _checked_mean(mean: Tensor, kappa: Tensor) -> tuple[Tensor, Tensor]:
    """Mean directions and κ of one batch shape, κ in float64."""
    kappa64 = _checked(kappa, mean.shape[-1])
    check_unit(mean=mean)
    if kappa64.numel() and kappa64.max() > 1e15:
        raise BachError(f"kappa should be at most 1e15 to sample from; got {kappa64.max().item():g}")
    try:
        batch = torch.broadcast_shapes(mean.shape[:-1], kappa.shape)
    except RuntimeError:
        got = f"mean {tuple(mean.shape)} and kappa {tuple(kappa.shape)}"
        raise BachError(f"mean should be (…, d) and kappa (…) of the same batch; got {got}") from None
    return mean.expand(*batch, mean.shape[-1]), kappa64.expand(batch)
