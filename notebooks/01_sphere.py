# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     notebook_metadata_filter: kernelspec,jupytext,-jupytext.text_representation.jupytext_version
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 01 · Two densities on the sphere that cost nothing to normalise
#
# **Question.** BACH measures how well a head explains an item by a density on the sphere of embeddings. Which
# densities, what does their concentration κ mean in 64 dimensions, and why can they be normalised when a softmax
# over the catalogue cannot?
#
# **You need** nothing but this notebook. **CPU minutes:** under one.

# %% tags=["parameters"]
d = 64
kappa = 14.3
n_samples = 200_000
seed = 0

# %%
import math

import torch
from scipy import integrate

from bachlib.files import record
from bachlib.model.sphere import KERNELS
from bachlib.show import plots
from bachlib.show.explorer import sphere_explorer

torch.manual_seed(seed)
ps, vmf = KERNELS["power-spherical"], KERNELS["von-mises-fisher"]


def f64(x) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


# %% [markdown]
# ## 1 · The kernels
#
# Embeddings have length one, so a head $\mathbf{u}$ and an item $\mathbf{v}$ meet only through their cosine
# $t = \langle \mathbf{u}, \mathbf{v} \rangle$. The paper (eqs. 17, 18) puts a density around each head,
#
# $$\sigma(\mathbf{v}) = C_d(\kappa)\, \omega_\kappa(t), \qquad
# \omega_\kappa(t) = (1+t)^\kappa \quad \text{or} \quad \omega_\kappa(t) = e^{\kappa t}$$
#
# power-spherical or von Mises–Fisher. Both are largest at the head and fall with the angle; κ says how fast.

# %%
plots.kernels_against_cosine(KERNELS, d=3, kappas=[1, 5, 20])

# %% [markdown]
# **What you should see.** At the same κ the von Mises–Fisher density (dashed) is the sharper one: near the head
# $\log(1+t)$ has slope ½ where $t$ has slope 1, so κ of the power-spherical counts about half.

# %% [markdown]
# ## 2 · A sphere one can turn
#
# Three heads on an ordinary sphere, the mixture density $\sum_r \pi_r \sigma_r$ as colour, samples as dots. With a
# kernel behind the notebook the sliders move κ and π; on a page you see the picture they start from.

# %%
heads = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2, 0.3], [-0.3, 1.0, 0.4], [0.1, -0.2, 1.0]]), dim=-1)
plots.mixture_on_sphere(heads, pi=[0.5, 0.3, 0.2], kappas=[20.0, 20.0, 60.0], kernel=ps, seed=seed)

# %% tags=["nbval-ignore-output"]
sphere_explorer(heads, seed=seed)

# %% [markdown]
# What a training step sees of it: one positive and many negatives. The responsibilities $\gamma$ of the heads (eq. 19)
# look at the positive only; the negatives enter through the softmax of each head.

# %%
positive = torch.nn.functional.normalize(heads[0] + 0.95 * heads[1], dim=0)
negatives = torch.nn.functional.normalize(torch.randn(300, 3, generator=torch.Generator().manual_seed(seed)), dim=-1)
plots.mixture_on_sphere(heads, [0.5, 0.3, 0.2], [20.0, 20.0, 60.0], ps, seed, positive, negatives)

# %% [markdown]
# ## 3 · Both integrate to one
#
# **By quadrature.** The cosine of a random direction has density $\propto (1-t^2)^{(d-3)/2}$; with the angle
# $t = \cos\theta$ and the area $A_{d-2}$ of the sphere one dimension lower,
#
# $$\int_{\mathbb{S}^{d-1}} \sigma = A_{d-2} \int_0^\pi C_d(\kappa)\, \omega_\kappa(\cos\theta)\, \sin^{d-2}\theta \;
# d\theta.$$


# %%
def integral(kernel, kappa: float, d: int) -> float:
    area = math.log(2) + (d - 1) / 2 * math.log(math.pi) - math.lgamma((d - 1) / 2)

    def density(theta):
        log_p = kernel.log_density(f64(math.cos(theta)), f64(kappa), d).item()
        return math.exp(log_p + area) * math.sin(theta) ** (d - 2)

    return integrate.quad(density, 0, math.pi, limit=300, points=[0.05, 0.2, 0.8, 1.5])[0]


totals = [integral(kernel, k, n) for kernel in KERNELS.values() for k in (0, 14.3, 200) for n in (2, 3, 64)]
assert max(abs(total - 1) for total in totals) < 1e-8
f"{len(totals)} integrals, the worst is off by less than 1e-8"

# %% [markdown]
# **By Monte Carlo.** The mean of the density over uniform directions, times the area of the sphere:

# %%
uniform = torch.nn.functional.normalize(torch.randn(n_samples, 3, dtype=torch.float64), dim=-1)
for name, kernel in KERNELS.items():
    values = kernel.log_density(uniform[:, 0], f64(5.0), 3).exp() * 4 * math.pi
    error = values.std().item() / math.sqrt(n_samples)
    assert abs(values.mean().item() - 1) < 4 * error
    print(f"{name:<17} {values.mean():.2f} ± {2 * error:.2f}")

# %% [markdown]
# ## 4 · The normalisers
#
# Power-spherical (with $\alpha = \frac{d-1}{2} + \kappa$, $\beta = \frac{d-1}{2}$), two log-Gammas:
#
# $$\log C_d(\kappa) = -(\alpha + \beta) \log 2 - \beta \log \pi - \log\Gamma(\alpha) + \log\Gamma(\alpha + \beta).$$
#
# Von Mises–Fisher, written without a $\log\kappa$, so that it is smooth at 0:
#
# $$\log C_d(\kappa) = \log\frac{\Gamma(d/2)}{2\pi^{d/2}} - \log {}_0F_1\!\left(; \tfrac{d}{2};
# \tfrac{\kappa^2}{4}\right).$$
#
# No sum over items anywhere: that is why the mixture can be served, while a softmax would need a sum over the
# catalogue for every head of every user.

# %%
plots.log_normalizers(KERNELS, dimensions=[2, 8, 64, 256])

# %% [markdown]
# **What you should see.** Left: both kernels start from the same value, the uniform density, and fall as the peak
# takes the mass. Right: how far the density at the head itself stands out. It grows like $\frac{d-1}{2}\log\kappa$
# in the end, and the more dimensions there are, the later the two kernels reach that regime.
#
# The slope of the vMF normaliser is minus the mean cosine, and for both kernels a finite difference agrees with
# autograd:

# %%
grid = torch.logspace(-2, 3, 50, dtype=torch.float64, requires_grad=True)
for kernel in KERNELS.values():
    (slope,) = torch.autograd.grad(kernel.log_normalizer(grid, d).sum(), grid)
    h = 1e-5 * grid.detach()
    finite = (kernel.log_normalizer(grid + h, d) - kernel.log_normalizer(grid - h, d)) / (2 * h)
    assert torch.allclose(slope, finite, rtol=1e-3, atol=1e-5)
assert torch.allclose(-slope, vmf.mean_resultant(grid, d), atol=1e-12)  # the last one was vMF

# %% [markdown]
# ## 5 · Why κ ≈ 20 is not sharp in 64 dimensions
#
# Measure concentrates: nearly all of the sphere lies near the equator of any direction, at
# $t \approx 0 \pm 1/\sqrt{d}$. A density has to outweigh that. The cosine of a sample has mean
# $\kappa / (\kappa + d - 1)$ for the power-spherical:

# %%
plots.cosine_of_samples(KERNELS, d=d, kappas=[0.0, kappa, 64.0, 300.0])

# %%
means = {name: kernel.mean_resultant(f64(kappa), d).item() for name, kernel in KERNELS.items()}
pole = torch.eye(d)[:1].expand(20_000, d)
for name, kernel in KERNELS.items():
    t = kernel.sample(pole, torch.full((20_000,), kappa))[:, 0]
    assert abs(t.mean().item() - means[name]) < 5 * t.std().item() / math.sqrt(len(t))
{name: f"κ = {kappa}: mean cosine {mean:.2f}, {math.degrees(math.acos(mean)):.0f}°" for name, mean in means.items()}

# %% [markdown]
# **What you should see.** At κ = 14.3, where BACH starts (1/τ), items of a head lie around 80° away from it in 64
# dimensions. A head is a *direction of preference* and not a point. For a mean cosine of 0.7 the power-spherical
# needs $\kappa = 0.7\,(d-1)/0.3 \approx 147$.

# %% [markdown]
# ## 6 · One against the other
#
# Give both the same mean cosine. Do they differ?

# %%
same = 0.5
kappa_ps = same * (d - 1) / (1 - same)
low, high = 0.0, 1e4
for _ in range(80):  # bisection: the mean cosine of vMF rises with κ
    middle = (low + high) / 2
    low, high = (middle, high) if vmf.mean_resultant(f64(middle), d) < same else (low, middle)
plots.kernels_matched(ps, kappa_ps, vmf, low, d)

# %% [markdown]
# **What you should see.** Two curves that lie almost on each other over the bulk of the cosine: with matched mean
# they are nearly the same distribution, which fits the paper's finding that p-BACH and v-BACH perform comparably.
# They part far from the head, where $(1+t)^\kappa$ goes to zero and $e^{\kappa t}$ does not.

# %%
t = torch.linspace(-0.999, 0.999, 4001, dtype=torch.float64)
area = (d - 3) / 2 * torch.log1p(-t * t)
mass = [(kernel.log_density(t, f64(k), d) + area).softmax(0) for kernel, k in ((ps, kappa_ps), (vmf, low))]
variation = 0.5 * (mass[0] - mass[1]).abs().sum().item()
assert variation < 0.1
f"total variation distance {variation:.3f} at mean cosine {same}, d = {d}"

# %% [markdown]
# ## Exercises
#
# 1. At which κ does the power-spherical density in `d = 64` put the typical item at 45° from its head? And in
# `d = 8`?
#    <details><summary>Answer</summary>cos 45° = 0.707 = κ/(κ + d − 1), so κ = 2.41 (d − 1): 152 and 17.</details>
# 2. Why is $C_d(\kappa)$ needed at all when items are ranked for one user?
#    <details><summary>Answer</summary>With one head it is a constant. With several heads of different κ it is the
#    exchange rate between them: without it the head with the largest κ would win or lose by its κ alone.</details>
# 3. What goes wrong with `scipy.special.ive` for d = 512 at κ = 1?
#    <details><summary>Answer</summary>I₂₅₅(1) is about 10⁻⁵⁸² and underflows to 0; its logarithm is −∞. The
#    hypergeometric form stays close to 1 there.</details>

# %% tags=["nbval-ignore-output"]
record(
    "01_sphere",
    {
        "mean cosine, power-spherical": round(means["power-spherical"], 4),
        "mean cosine, von Mises–Fisher": round(means["von-mises-fisher"], 4),
        "log C, power-spherical": round(ps.log_normalizer(f64(kappa), d).item(), 4),
        "log C, von Mises–Fisher": round(vmf.log_normalizer(f64(kappa), d).item(), 4),
        "total variation": round(variation, 4),
    },
)

# %% [markdown]
# **Next:** `02_elbo` puts these densities to work: they become the posterior over heads.
