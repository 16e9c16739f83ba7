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
# # 02 · Every step of the ELBO's derivation holds, and the gap is smallest at one κ
#
# **Question.** Is every step of the paper's derivation true? We check it with numbers, on random tensors. And what does
# each term of the ELBO do?
#
# **You need** `01_sphere` for the densities. **CPU minutes:** under one.
#
# Equation numbers are the paper's. Each equation is followed by the code that implements it, read from the package when
# the cell runs, and then by an `assert`.

# %% tags=["parameters"]
B = 64
k = 4
d = 16
C = 300
tau = 0.07
kernel_name = "power-spherical"
seed = 0

# %%
import torch
from torch.nn.functional import normalize

from bachlib.files import record
from bachlib.model import mixture, onepass, routing
from bachlib.model.sphere import KERNELS
from bachlib.show import plots
from bachlib.show.source import source_of

torch.manual_seed(seed)
torch.set_default_dtype(torch.float64)
kernel = KERNELS[kernel_name]


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float = 1e-9) -> bool:
    return (a - b).abs().max().item() < tolerance


# %% [markdown]
# ## 1 · The mixture of softmaxes (eqs. 11–14)
#
# We take a batch of B users with k heads each, and C candidates. The first B candidates are the positives. Each head is
# a sampled softmax,
#
# $$p_r(i_n\mid u_n) = \frac{\exp(\langle \mathbf{u}_n^{(r)}, \mathbf{v}_{i_n}\rangle/\tau)}
# {\sum_{j\in\mathcal{C}_n}\exp(\langle \mathbf{u}_n^{(r)}, \mathbf{v}_j\rangle/\tau)} \qquad (12)$$
#
# and a user mixes them with $\pi_u$: $\ell_n = \log\sum_r \pi_{u_n}^{(r)} p_r(i_n \mid u_n)$ (13, 14).

# %%
source_of(mixture.log_components, mixture.log_likelihood)

# %%
items = normalize(torch.randn(C, d), dim=-1)
positive = torch.arange(B)
near = items[positive][:, None, :] + 0.9 * torch.randn(B, k, d)  # heads near the positive
heads = normalize(near, dim=-1)
log_pi = torch.randn(B, k).log_softmax(-1)
kappa = torch.full((B, k), 1 / tau)
log_p = mixture.log_components(heads, items, positive, tau)
likelihood = mixture.log_likelihood(log_pi, log_p)
log_p.shape, likelihood.shape

# %%
by_hand = (log_pi.exp() * log_p.exp()).sum(1).log()
assert close(likelihood, by_hand)

# %% [markdown]
# ## 2 · Jensen's bound (eqs. 15, 16)
#
# For *any* distribution γ over the heads,
#
# $$\log \sum_r \pi^{(r)} p_r \;\ge\; \sum_r \gamma^{(r)} \log \frac{\pi^{(r)} p_r}{\gamma^{(r)}}.$$
#
# The code computes the right side in its three terms. We try a thousand random γ for each user. None gives a value
# above ℓ:

# %%
source_of(mixture.elbo_at)

# %%
worst = -torch.inf
for _ in range(1000):
    log_gamma = (3 * torch.randn(B, k)).log_softmax(-1)
    worst = max(worst, (mixture.elbo_at(log_gamma, log_pi, log_p).total - likelihood).max().item())
assert worst <= 1e-12
f"largest bound − ℓ over {1000 * B:,} draws is below zero: {worst < 0}"

# %% [markdown]
# The bound is tight exactly at the contrastive posterior $\gamma^{\mathrm{con}} \propto \pi^{(r)} p_r$. Every step away
# from it lowers the bound:

# %%
log_con = mixture.contrastive_posterior(log_pi, log_p)
assert close(mixture.elbo_at(log_con, log_pi, log_p).total, likelihood)
for step in (1e-3, 1e-2, 1e-1):
    away = (log_con + step * torch.randn(B, k)).log_softmax(-1)
    assert (mixture.elbo_at(away, log_pi, log_p).total <= likelihood + 1e-12).all()

# %% [markdown]
# ## 3 · The recognition posterior (eqs. 17, 19)
#
# $\gamma^{\mathrm{con}}$ depends on the sampled negatives, so BACH does not use it. It uses the posterior of the
# spherical mixture by which it serves,
#
# $$\gamma_n^{(r)} = \frac{\pi^{(r)} \sigma_r(n)}{\sum_{r'} \pi^{(r')} \sigma_{r'}(n)}, \qquad
# \sigma_r(n) = C_d(\kappa_r)\, \omega_{\kappa_r}(\langle \mathbf{u}^{(r)}_n, \mathbf{v}_{i_n}\rangle).$$
#
# If we change every negative, γ stays the same and $\gamma^{\mathrm{con}}$ changes:

# %%
source_of(mixture.log_sigma, mixture.responsibilities, mixture.contrastive_posterior)

# %%
log_sigma = mixture.log_sigma(heads, items[positive], kappa, kernel)
log_gamma = mixture.responsibilities(log_pi, log_sigma)
others = torch.cat([items[:B], normalize(torch.randn(C - B, d), dim=-1)])
again = mixture.responsibilities(log_pi, mixture.log_sigma(heads, others[positive], kappa, kernel))
moved = mixture.contrastive_posterior(log_pi, mixture.log_components(heads, others, positive, tau))
assert (log_gamma == again).all() and not close(moved, log_con, 1e-3)

# %% [markdown]
# Move an item along a great circle from one head to another. The hard argmax flips at one point. γ changes smoothly,
# and π moves the point where both heads have the same share:

# %%
plots.gamma_on_great_circle(kernel, kappa=1 / tau, d=d, pis=[0.5, 0.8, 0.95])

# %% [markdown]
# ## 4 · The gap (eqs. 20, 21)
#
# $$\ell_n - \mathrm{ELBO}_n = \mathrm{KL}(\gamma_n \,\|\, \gamma_n^{\mathrm{con}}) \ge 0.$$
#
# The code computes the divergence directly, not as the difference of the two other terms. So the equation can be
# checked:

# %%
source_of(mixture.elbo, mixture.kl_gap)

# %%
elbo = mixture.elbo(log_pi, log_sigma, log_p)
gap = mixture.kl_gap(log_pi, log_sigma, log_p)
assert close(likelihood - gap, elbo.total)
assert (gap >= 0).all()
f"mean gap {gap.mean():.2f} nats"

# %% [markdown]
# The ELBO has three terms. *Reconstruction* trains heads and items, *prior* fits $\pi_u$, and *entropy* keeps γ from
# collapsing to one head.

# %%
assert close(elbo.total, elbo.reconstruction + elbo.prior + elbo.entropy)
gamma = log_gamma.exp()
assert close(elbo.reconstruction, (gamma * log_p).sum(1)) and close(elbo.entropy, -(gamma * log_gamma).sum(1))
plots.elbo_waterfall(elbo, likelihood)

# %% [markdown]
# ## 5 · The concentrations regularise themselves
#
# ℓ does not contain κ. The ELBO contains κ only through γ. So maximising the ELBO over κ *is* minimising the gap:

# %%
free, u = kappa.clone().requires_grad_(), heads.clone().requires_grad_()
sigma, parts = mixture.log_sigma(u, items[positive], free, kernel), mixture.log_components(u, items, positive, tau)
slope, to_heads = torch.autograd.grad(mixture.elbo(log_pi, sigma, parts).total.sum(), (free, u), retain_graph=True)
assert slope.abs().max() > 1e-3 and to_heads.abs().max() > 1e-3

of_likelihood = torch.autograd.grad(
    mixture.log_likelihood(log_pi, parts).sum(), (free, u), allow_unused=True, retain_graph=True
)
assert of_likelihood[0] is None and of_likelihood[1] is not None  # ℓ depends on the heads and not on κ
(of_gap,) = torch.autograd.grad(mixture.kl_gap(log_pi, sigma, parts).sum(), free)
assert close(slope, -of_gap)

# %% [markdown]
# Now one κ for all heads, varied over six orders of magnitude. At κ → 0 the posterior ignores the item (γ = π). At κ
# → ∞ it becomes one-hot. The κ that fits the sharpness of the softmax lies in between:


# %%
def sigma_at(value: float | torch.Tensor) -> torch.Tensor:
    return mixture.log_sigma(heads, items[positive], torch.as_tensor(value).expand(B, k), kernel)


sweep = torch.logspace(-2, 4, 121)
gaps = torch.stack([mixture.kl_gap(log_pi, sigma_at(value), log_p).mean() for value in sweep])
best = sweep[gaps.argmin()].item()
assert 0 < gaps.argmin() < len(sweep) - 1, "the minimum should lie inside the range, not at 0 or ∞"
assert close(mixture.responsibilities(log_pi, sigma_at(0.0)), log_pi)

# %%
log_kappa = torch.zeros((), requires_grad=True)  # start at κ = 1
optimiser = torch.optim.Adam([log_kappa], lr=0.1)
for _ in range(300):
    optimiser.zero_grad()
    (-mixture.elbo(log_pi, sigma_at(log_kappa.exp()), log_p).total.mean()).backward()
    optimiser.step()
learnt = log_kappa.exp().item()
assert abs(torch.log(torch.tensor(learnt / best))) < 0.15
plots.gap_against_kappa(sweep, gaps, learnt, start=1 / tau)

# %% [markdown]
# **What you should see.** A valley with a single minimum. Gradient ascent on the ELBO starts at κ = 1 and ends in this
# minimum.

# %% [markdown]
# ## 6 · Which head gets the gradient (eq. 22)
#
# $\partial\,\mathrm{ELBO}/\partial \log p_r = \gamma_r$: every head learns in proportion to its responsibility. γ is
# known before any negative is scored. This makes the one-pass loss below possible.

# %%
leaf = log_p.clone().requires_grad_()
(slope,) = torch.autograd.grad(mixture.elbo(log_pi, log_sigma, leaf).total.sum(), leaf)
assert close(slope, gamma)


# %%
def gradient_share(loss) -> torch.Tensor:
    """Share of each head in the length of the gradient, heads of a user sorted, mean over users (k,)."""
    u = heads.clone().requires_grad_()
    length = torch.autograd.grad(loss(u), u)[0].norm(dim=-1)
    return (length / length.sum(1, keepdim=True)).sort(dim=1, descending=True).values.mean(0)


def bach(u: torch.Tensor) -> torch.Tensor:
    log_sigma = mixture.log_sigma(u, items[positive], kappa, kernel)
    return mixture.loss(u, items, positive, log_pi, log_sigma, tau)[0]


# %%
shares = {
    "BACH": gradient_share(bach),
    "all-multihead": gradient_share(lambda u: routing.all_multihead(u, items, positive, tau)),
    "pos-multihead": gradient_share(lambda u: routing.pos_multihead(u, items, positive, tau)),
}
assert shares["pos-multihead"][0] > 1 - 1e-12 and shares["BACH"][1] > 0.01
plots.gradient_shares(shares)

# %% [markdown]
# **What you should see.** pos-multihead gives the whole gradient to one head. all-multihead also trains the other
# heads, through the negatives that they attract; here it does so more evenly than BACH. BACH trains them according to
# γ.

# %% [markdown]
# The one-pass loss. For each block of rows it computes the logits, then $\log p_r$, then both gradients, and then it
# forgets the logits. It never stores all $B \cdot k \cdot C$ of them. First the loss, then the loop inside
# `reconstruction`:

# %%
source_of(mixture.loss)

# %%
source_of(onepass, start="for rows, block, logits", stop="del e, logits")

# %%
# the one-pass loss against `plain_loss`: value and gradients, with copies of the positive among the candidates
ids = torch.randint(0, 40, (C,))
results = []
for loss in (lambda *a: mixture.loss(*a)[0], mixture.plain_loss):
    inputs = [x.clone().requires_grad_() for x in (heads, items, log_pi, log_sigma)]
    value = loss(inputs[0], inputs[1], positive, inputs[2], inputs[3], tau, ids)
    results.append([value.detach(), *torch.autograd.grad(value, inputs)])
difference = max((a - b).abs().max().item() for a, b in zip(*results, strict=True))
assert difference < 1e-12
f"largest difference below 1e-12: {difference < 1e-12}"

# %% [markdown]
# ## 7 · Limits and symmetries
#
# One head gives the plain softmax. Equal heads give γ = π. Permuting the heads or rotating the sphere changes nothing.

# %%
single = mixture.elbo(torch.zeros(B, 1), log_sigma[:, :1], log_p[:, :1]).total
assert close(single, log_p[:, 0])

twins = heads[:, :1].expand(B, k, d)
assert close(mixture.responsibilities(log_pi, mixture.log_sigma(twins, items[positive], kappa, kernel)), log_pi)

order = torch.randperm(k)
assert close(mixture.elbo(log_pi[:, order], log_sigma[:, order], log_p[:, order]).total, elbo.total)

turn = torch.linalg.qr(torch.randn(d, d)).Q
turned = mixture.log_components(normalize(heads @ turn, dim=-1), normalize(items @ turn, dim=-1), positive, tau)
assert close(turned, log_p) and close(mixture.log_sigma(heads @ turn, items[positive] @ turn, kappa, kernel), log_sigma)

# %% [markdown]
# The κ-net reads the *detached* head. So κ learns, but no gradient reaches the head through κ.

# %%
net = torch.nn.Linear(d, 1)


def gradients(kappa_of) -> tuple[torch.Tensor, torch.Tensor | None]:
    u = heads.clone().requires_grad_()
    sigma = mixture.log_sigma(u, items[positive], kappa_of(u), kernel)
    total = mixture.elbo(log_pi, sigma, log_p).total.sum()
    return torch.autograd.grad(total, (u, net.weight), allow_unused=True)


detached, to_net = gradients(lambda u: net(u.detach())[..., 0].exp())
constant, nothing = gradients(lambda u: net(u)[..., 0].exp().detach())
attached, _ = gradients(lambda u: net(u)[..., 0].exp())
assert close(detached, constant) and to_net.abs().max() > 0 and nothing is None
assert not close(attached, constant, 1e-3)  # without the detach the head would get a gradient

# %% [markdown]
# ## Exercises
#
# 1. Set `kernel_name = "von-mises-fisher"`. Which numbers change? Which identities still hold?
#    <details><summary>Answer</summary>All identities hold, because none of them depends on the kernel. The best κ falls
#    from 18 to 14.1, close to 1/τ = 14.3: with κ = 1/τ this kernel is the numerator of the softmax itself.</details>
# 2. Set `C = 3000`. What happens to the gap, and to the best κ?
#    <details><summary>Answer</summary>ℓ falls from −5.3 to −7.0: there are more candidates to beat. The gap falls
#    from 0.06 to 0.04: with more candidates the normalisers of the heads become more alike, and only the numerator of
#    $\gamma^{\mathrm{con}}$ still differs between heads. The learnt κ rises a little, from 18.7 to 19.6.</details>
# 3. The gradient of the entropy term with respect to log p is zero. Why does the term still matter?
#    <details><summary>Answer</summary>γ depends on heads, π and κ. Without the entropy the best γ is one-hot at the
#    best head. That is hard routing.</details>

# %% tags=["nbval-ignore-output"]
record(
    "02_elbo",
    {
        "log-likelihood": round(likelihood.mean().item(), 4),
        "ELBO": round(elbo.total.mean().item(), 4),
        "gap": round(gap.mean().item(), 4),
        "best κ": round(best, 2),
        "learnt κ": round(learnt, 2),
        "share of the second head, BACH": round(shares["BACH"][1].item(), 4),
    },
)

# %% [markdown]
# **Next:** `03_data` prepares the data on which these heads are trained.
