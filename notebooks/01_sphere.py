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
# # 01 · Both kernels are densities on the sphere, and normalising them is cheap
#
# **Question.** BACH measures how well a head explains an item by a density on the sphere of embeddings. Which densities
# does it use? What does their concentration κ mean in 64 dimensions? Why can they be normalised, when a softmax over
# the catalogue cannot?
#
# **You need** nothing but this notebook. **CPU minutes:** under one.
#
# Below each equation you see the code that implements it. The text is read from the package when the cell runs, so it
# is always the current code. Then the code is checked.

# %% tags=["parameters"]
d = 64
kappa = 14.3
n_samples = 200_000
seed = 0

# %%
import math

import torch
from scipy import integrate
from scipy.special import ive

from bachlib.files import record
from bachlib.model.sphere import KERNELS
from bachlib.show import plots
from bachlib.show.explorer.sphere import sphere_explorer
from bachlib.show.source import source_of

torch.manual_seed(seed)
ps, vmf = KERNELS["power-spherical"], KERNELS["von-mises-fisher"]


def f64(x) -> torch.Tensor:
    return torch.as_tensor(x, dtype=torch.float64)


# %% [markdown]
# ## 1 · The kernels
#
# Embeddings have length one. So a head $\mathbf{u}$ and an item $\mathbf{v}$ interact only through their cosine
# $t = \langle \mathbf{u}, \mathbf{v} \rangle$. The paper (eqs. 17, 18) puts a density around each head,
#
# $$\sigma(\mathbf{v}) = C_d(\kappa)\, \omega_\kappa(t), \qquad
# \omega_\kappa(t) = (1+t)^\kappa \quad \text{or} \quad \omega_\kappa(t) = e^{\kappa t}.$$
#
# The first kernel $\omega_\kappa$ is called power-spherical, the second von Mises–Fisher (vMF). Both are largest at the
# head and fall with the angle. The concentration κ says how fast they fall. $C_d(\kappa)$ is the normaliser; section 4
# shows it. In code:

# %%
source_of(*(kernel.log_density for kernel in KERNELS.values()))

# %%
plots.kernels_against_cosine(KERNELS, d=3, kappas=[1, 5, 20])

# %% [markdown]
# **What you should see.** At the same κ the von Mises–Fisher density (dashed) is sharper. Near the head $\log(1+t)$ has
# slope ½ and $t$ has slope 1. So a κ of the power-spherical kernel counts about half as much.

# %% [markdown]
# ## 2 · A sphere you can turn
#
# Three heads on an ordinary sphere. The colour is the mixture density $\sum_r \pi_r \sigma_r$; the dots are samples
# from it. In JupyterLab the sliders change κ and π. Without a running kernel you see the first picture.

# %%
heads = torch.nn.functional.normalize(torch.tensor([[1.0, 0.2, 0.3], [-0.3, 1.0, 0.4], [0.1, -0.2, 1.0]]), dim=-1)
plots.mixture_on_sphere(heads, pi=[0.5, 0.3, 0.2], kappas=[20.0, 20.0, 60.0], kernel=ps, seed=seed)

# %% tags=["nbval-ignore-output"]
sphere_explorer(heads, seed=seed)

# %% [markdown]
# A training step sees one positive and many negatives. The responsibilities $\gamma$ of the heads (eq. 19) depend on
# the positive only. The negatives enter through the softmax of each head.

# %%
positive = torch.nn.functional.normalize(heads[0] + 0.95 * heads[1], dim=0)
negatives = torch.nn.functional.normalize(torch.randn(300, 3, generator=torch.Generator().manual_seed(seed)), dim=-1)
plots.mixture_on_sphere(heads, [0.5, 0.3, 0.2], [20.0, 20.0, 60.0], ps, seed, positive, negatives)

# %% [markdown]
# ## 3 · Both densities integrate to one
#
# **By quadrature.** The cosine of a random direction has density $\propto (1-t^2)^{(d-3)/2}$. With the angle
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
# **By Monte Carlo.** The integral is the mean of the density over uniform directions, times the area of the sphere:

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
# The power-spherical normaliser needs two log-Gammas, with $\alpha = \frac{d-1}{2} + \kappa$ and
# $\beta = \frac{d-1}{2}$:
#
# $$\log C_d(\kappa) = -(\alpha + \beta) \log 2 - \beta \log \pi - \log\Gamma(\alpha) + \log\Gamma(\alpha + \beta).$$
#
# The paper writes the von Mises–Fisher normaliser with a Bessel function,
# $C_d(\kappa) = \kappa^{d/2-1} / \big((2\pi)^{d/2} I_{d/2-1}(\kappa)\big)$. We use an equal form without $\log\kappa$,
# which is smooth at 0:
#
# $$\log C_d(\kappa) = \log\frac{\Gamma(d/2)}{2\pi^{d/2}} - \log {}_0F_1\!\left(; \tfrac{d}{2};
# \tfrac{\kappa^2}{4}\right).$$
#
# Neither formula has a sum over items. This makes the mixture cheap to serve. A softmax would need a sum over the
# catalogue for every head of every user.

# %%
source_of(*(kernel.log_normalizer for kernel in KERNELS.values()))

# %%
for n, value in ((3, 0.5), (8, kappa), (64, 50.0)):  # the paper's form of the vMF normaliser
    log_bessel = math.log(ive(n / 2 - 1, value)) + value
    bessel = (n / 2 - 1) * math.log(value) - n / 2 * math.log(2 * math.pi) - log_bessel
    assert math.isclose(vmf.log_normalizer(f64(value), n).item(), bessel, rel_tol=1e-10)

# %%
plots.log_normalizers(KERNELS, dimensions=[2, 8, 64, 256])

# %% [markdown]
# **What you should see.** Left: both kernels start from the same value, the uniform density. They fall because the peak
# takes the mass. Right: how far the density at the head stands out. For large κ it grows like
# $\frac{d-1}{2}\log\kappa$. The more dimensions there are, the later this growth begins.
#
# The slope of the vMF normaliser is minus the mean cosine. For both kernels a finite difference agrees with autograd:

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
# In high dimensions nearly all of the sphere lies near the equator of any direction, at $t \approx 0 \pm 1/\sqrt{d}$. A
# density has to outweigh this. For the power-spherical kernel the cosine of a sample has mean
# $\kappa / (\kappa + d - 1)$:

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
# **What you should see.** BACH starts at κ = 1/τ = 14.3. In 64 dimensions the items of such a head lie around 80° away
# from it. So a head is a *direction of preference*, not a point. For a mean cosine of 0.7 the power-spherical kernel
# needs $\kappa = 0.7\,(d-1)/0.3 \approx 147$.

# %% [markdown]
# ## 6 · The two kernels compared
#
# Give both kernels the same mean cosine. How much do they differ?

# %%
same = 0.5
kappa_ps = same * (d - 1) / (1 - same)
low, high = 0.0, 1e4
for _ in range(80):  # bisection: the mean cosine of vMF rises with κ
    middle = (low + high) / 2
    low, high = (middle, high) if vmf.mean_resultant(f64(middle), d) < same else (low, middle)
plots.kernels_matched(ps, kappa_ps, vmf, low, d)

# %% [markdown]
# **What you should see.** The two curves nearly coincide where most of the mass is. With the same mean cosine they are
# nearly the same distribution. This fits the paper's finding that p-BACH and v-BACH perform comparably. They differ far
# from the head, where $(1+t)^\kappa$ goes to zero and $e^{\kappa t}$ does not.

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
# 1. At which κ does the power-spherical density in `d = 64` put the typical item at 45° from its head? And in `d = 8`?
#    <details><summary>Answer</summary>cos 45° = 0.707 = κ/(κ + d − 1), so κ = 2.41 (d − 1): 152 and 17.</details>
# 2. Items are ranked for one user at a time. Why is $C_d(\kappa)$ still needed?
#    <details><summary>Answer</summary>With one head it is a constant. With several heads of different κ it makes their
#    densities comparable: without it the head with the largest κ would win or lose by its κ alone.</details>
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
# **Next:** in `02_elbo` these densities become the posterior over heads.
