"""log ₀F₁(; d/2; κ²/4), the Bessel part of the von Mises–Fisher normaliser, and its derivatives.

    I_ν(κ) = (κ/2)^ν / Γ(ν+1) · ₀F₁(; ν+1; κ²/4)

One formula for all κ ≥ 0 in float64: Debye's uniform expansion at a high order, then a recurrence down to the wanted
order. Nothing switches with κ, so nothing jumps. It runs on any device and has second derivatives.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import torch
from torch import Tensor

ORDER = 24  # from this Bessel order on, ten terms of Debye's expansion are exact to float64
TERMS = 10


@cache
def _debye_polynomials() -> list[list[float]]:
    """Debye's U_k(p), k = 0 … TERMS, as coefficients of p^0, p^1, … (DLMF 10.41.9)."""
    polynomials = [[Fraction(1)]]
    for _ in range(TERMS):
        u = polynomials[-1]
        new = [Fraction(0)] * (len(u) + 3)
        for n, a in enumerate(u):
            # ½ p² (1 − p²) U′ + ⅛ ∫₀ᵖ (1 − 5 s²) U ds
            new[n + 1] += a * Fraction(n, 2) + a * Fraction(1, 8 * (n + 1))
            new[n + 3] -= a * Fraction(n, 2) + a * Fraction(5, 8 * (n + 3))
        polynomials.append(new)
    return [[float(a) for a in u] for u in polynomials]


def _debye_sum(p: Tensor, order: float) -> Tensor:
    """Σ_k U_k(p) / order^k. U_k is p^k times a polynomial in p², so it is one polynomial in p² per power of p/order."""
    squared, total = p * p, torch.zeros_like(p)
    for k in reversed(range(TERMS + 1)):
        inner = torch.zeros_like(p)
        for a in reversed(_debye_polynomials()[k][k::2]):
            inner = inner * squared + a
        total = total * (p / order) + inner
    return total


def _log_series(s: Tensor, order: float) -> Tensor:
    """log of Debye's sum at p = order/s, relative to the one at κ = 0, where p = 1."""
    return (_debye_sum(order / s, order) / _debye_sum(torch.ones((), dtype=s.dtype, device=s.device), order)).log()


def _log_hyp0f1_large(kappa: Tensor, order: float) -> tuple[Tensor, Tensor]:
    """(log F, log F − log F′) with F = ₀F₁(; order + 1; κ²/4), F′ = ₀F₁(; order + 2; κ²/4), for order ≥ ORDER.

    Debye's uniform expansion of I_order, with s = √(order² + κ²). Terms that are large at κ = 0 are cancelled by hand:
    no log κ is left and log F is exactly 0 there. Terms that are large for κ → ∞ are cancelled in the difference.
    """
    squared, up = kappa * kappa, order + 1
    s, s_up = (order**2 + squared).sqrt(), (up**2 + squared).sqrt()
    series = _log_series(s, order)
    rise = squared / (s + order)  # s − order
    value = rise - order * (rise / (2 * order)).log1p() - 0.5 * (rise / order).log1p() + series

    apart = (order + up) / (s + s_up)  # s_up − s
    difference = squared * (1 + apart) / ((s + order) * (s_up + up))  # rise − rise_up
    difference = difference + (squared / (s_up + up) / (2 * up)).log1p()
    difference = difference + order * ((order * apart - s) / (up * (s + order))).log1p()
    difference = difference - 0.5 * (s * up / (s_up * order)).log() + series - _log_series(s_up, up)
    return value, difference


def _log_hyp0f1(kappa: Tensor, d: int) -> tuple[Tensor, Tensor]:
    """(log F_b, R_b) with F_b = ₀F₁(; b; κ²/4), b = d/2, R_b = F_b / F_{b+1}.

    F_b = F_{b+1} + z/(b(b+1)) F_{b+2} with z = κ²/4 gives R_b = 1 + z/(b(b+1)) / R_{b+1}: the recurrence starts at a b
    that is large enough for Debye's expansion and goes down to d/2. The number of steps depends on d alone.
    """
    b = d / 2
    steps = max(0, math.ceil(ORDER + 1 - b))
    log_f, log_ratio = _log_hyp0f1_large(kappa, b + steps - 1)
    ratio, z = log_ratio.exp(), kappa * kappa / 4
    for step in reversed(range(steps)):
        ratio = 1 + z / ((b + step) * (b + step + 1)) / ratio
        log_f = log_f + ratio.log()
    return log_f, ratio


class LogHyp0F1(torch.autograd.Function):
    """log ₀F₁(; d/2; κ²/4); its derivative in κ is the mean resultant length A_d(κ) = κ / (d R)."""

    @staticmethod
    def forward(ctx, kappa: Tensor, d: int) -> Tensor:
        value, ratio = _log_hyp0f1(kappa, d)
        ctx.d = d
        ctx.save_for_backward(kappa, ratio)
        return value

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        kappa, ratio = ctx.saved_tensors
        return grad * MeanResultant.apply(kappa, ctx.d, ratio), None


class MeanResultant(torch.autograd.Function):
    """A_d(κ) = κ / (d R); its derivative is 1 − A² − (d−1) A/κ, where A/κ = 1/(d R) needs no division by κ."""

    @staticmethod
    def forward(ctx, kappa: Tensor, d: int, ratio: Tensor | None = None) -> Tensor:
        ratio = _log_hyp0f1(kappa, d)[1] if ratio is None else ratio
        resultant = kappa / (d * ratio)
        ctx.d = d
        ctx.save_for_backward(kappa, resultant, ratio)
        return resultant

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None, None]:
        kappa, resultant, ratio = ctx.saved_tensors
        per_kappa = 1 / (ctx.d * ratio)
        if torch.is_grad_enabled():  # this will be differentiated again
            resultant = MeanResultant.apply(kappa, ctx.d, ratio)
            per_kappa = torch.where(kappa > 1e-4, resultant / kappa.clamp(min=1e-4), per_kappa)
        return grad * (1 - resultant**2 - (ctx.d - 1) * per_kappa), None, None
