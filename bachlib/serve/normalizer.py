"""log C_d(κ) of both kernels (eqs. 17–18) as compiled loops, because serving needs no torch.

The formulas are those of `model/sphere` and `model/hyp0f1`, which explain them and have derivatives. Here they are
numbers in float64, a microsecond each. Every strategy and every process takes them from here, so slates agree to the
bit.
"""

from __future__ import annotations

import math
from fractions import Fraction
from functools import cache

import numpy as np
from jaxtyping import Float
from numba import njit

ORDER, TERMS = 24, 10  # from this Bessel order on, ten terms of Debye's expansion are exact to float64


def log_normalizer(kappa: Float[np.ndarray, "B k"], d: int, rule: str) -> Float[np.ndarray, "B k"]:
    """log C_d(κ) of "power-spherical" or "von-mises-fisher"."""
    kappa, out = np.ascontiguousarray(kappa, np.float64), np.empty(kappa.shape)
    if rule == "power-spherical":
        _power_spherical(kappa.ravel(), float(d), out.ravel())
    else:
        _von_mises_fisher(kappa.ravel(), d, _debye_polynomials(), out.ravel())
    return out


@cache
def _debye_polynomials() -> Float[np.ndarray, "terms coefficients"]:
    """Debye's U_k (DLMF 10.41.9) by rows: the coefficients of p^k, p^(k+2), …"""
    rows, u = np.zeros((TERMS + 1, TERMS + 1)), [Fraction(1)]
    for k in range(TERMS + 1):
        rows[k] = [float(a) for a in [*u[k::2], *[0] * TERMS][: TERMS + 1]]
        new = [Fraction(0)] * (len(u) + 3)
        for n, a in enumerate(u):  # ½ p² (1 − p²) U′ + ⅛ ∫₀ᵖ (1 − 5 s²) U ds
            new[n + 1] += a * Fraction(n, 2) + a * Fraction(1, 8 * (n + 1))
            new[n + 3] -= a * Fraction(n, 2) + a * Fraction(5, 8 * (n + 3))
        u = new
    return rows


@njit(nogil=True, cache=True)
def _power_spherical(kappa, d, out):
    beta = (d - 1.0) / 2.0
    for i in range(len(kappa)):
        alpha = kappa[i] + beta
        gammas = math.lgamma(alpha + beta) - math.lgamma(alpha)
        out[i] = gammas - (alpha + beta) * math.log(2.0) - beta * math.log(math.pi)


@njit(nogil=True, cache=True)
def _debye_sum(p, order, polynomials):
    total = 0.0
    for k in range(len(polynomials) - 1, -1, -1):
        inner = 0.0
        for j in range(k, -1, -1):
            inner = inner * p * p + polynomials[k, j]
        total = total * (p / order) + inner
    return total


@njit(nogil=True, cache=True)
def _log_series(s, order, polynomials):
    return math.log(_debye_sum(order / s, order, polynomials) / _debye_sum(1.0, order, polynomials))


@njit(nogil=True, cache=True)
def _von_mises_fisher(kappa, d, polynomials, out):
    """The uniform density over ₀F₁(; d/2; κ²/4): Debye's expansion, then the recurrence of `hyp0f1` down to d/2."""
    b = d / 2.0
    uniform = math.lgamma(b) - math.log(2.0) - b * math.log(math.pi)
    steps = max(0, math.ceil(ORDER + 1 - b))
    order = b + steps - 1.0
    up = order + 1.0
    for i in range(len(kappa)):
        squared = kappa[i] * kappa[i]
        s, s_up = math.sqrt(order**2 + squared), math.sqrt(up**2 + squared)
        series, rise = _log_series(s, order, polynomials), squared / (s + order)
        log_f = rise - order * math.log1p(rise / (2 * order)) - 0.5 * math.log1p(rise / order) + series
        apart = (order + up) / (s + s_up)
        ratio = squared * (1 + apart) / ((s + order) * (s_up + up))
        ratio += math.log1p(squared / (s_up + up) / (2 * up))
        ratio += order * math.log1p((order * apart - s) / (up * (s + order)))
        ratio += series - _log_series(s_up, up, polynomials) - 0.5 * math.log(s * up / (s_up * order))
        ratio = math.exp(ratio)
        for step in range(steps - 1, -1, -1):
            ratio = 1.0 + squared / 4 / ((b + step) * (b + step + 1)) / ratio
            log_f += math.log(ratio)
        out[i] = uniform - log_f
