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
# # 00 · One vector cannot serve a user with several interests; weighted heads can
#
# **Question.** Two-tower retrieval gives a user one vector, multi-interest retrieval gives k, and BACH gives k *and a
# weight for each*. What is each step worth, if the vectors were perfect?
#
# **You need** nothing but this notebook. **CPU minutes:** under one.
#
# We answer it in a world we planted ourselves, where the true interests of every user are known. Nothing is trained
# here: the truth plays the towers, so that what differs is only *how a user is represented and scored*.

# %% tags=["parameters"]
n_users = 2_000
n_items = 4_800
n_interests = 16
interests_per_user = 4.0
seed = 0
n_eval = 500
K = 50
tau = 0.07

# %%
import numpy as np
import pandas as pd

from bachlib.data import planted, prepare
from bachlib.records import output_dir, record
from bachlib.show import plots

# %% [markdown]
# ## Notation
#
# | paper | in code | meaning |
# |---|---|---|
# | $u,\ i$ | `u`, `i` | a user, an item |
# | $\mathbf{u}^{(r)}$ | `heads` (B, k, d) | head $r$ of the user: the direction of one interest, unit length |
# | $\mathbf{v}_i$ | `items` (n, d) | the item's embedding, unit length |
# | $\pi_u$ | `log_pi` (B, k) | how much each interest matters to the user, sums to one |
# | $\kappa_r$ | `kappa` (B, k) | how tightly the items of an interest cluster around its head |
# | $\sigma_r$ | `log_sigma` (B, k) | spherical density of an item under head $r$ |
# | $\gamma_n$ | `log_gamma` (B, k) | responsibility: which head explains the observed item |
# | $p_r(i\mid u)$ | `log_p` (B, k) | sampled softmax of head $r$ over the candidates |
# | $\tau$ | `tau` | temperature, fixed at 0.07 |

# %% [markdown]
# ## 1 · A world one can see
#
# In three dimensions the sphere of item embeddings can be drawn. Five interests are planted; items lie around their
# interest; a user cares about some of them, with weights $\pi_u$ that we know. The black diamond is what a single
# vector can do to stand for all of it, the weighted mean
#
# $$\mathbf{u} = \frac{\sum_r \pi_u^{(r)}\, \mathbf{u}^{(r)}}{\big\|\sum_r \pi_u^{(r)}\, \mathbf{u}^{(r)}\big\|}.$$

# %% tags=["picture-sphere"]
small = planted.write_world(n_users=300, n_items=600, n_interests=5, d=3, width=0.3, interests_per_user=3.0, seed=6)
ball = prepare("planted", small, output_dir("data", "planted-3d"), quiet=True).truth
one = planted.unit((ball.pi[:, :, None] * ball.tastes).sum(1))  # (n_users, 3)
u = int((one @ ball.items.T).max(1).argmin())  # whose vector is farthest from any item
plots.sphere(ball.items, ball.item_interest, list(ball.genres), ball.tastes[u], ball.pi[u], one[u])

# %% [markdown]
# **What you should see.** The large dots sit inside clouds of items; the diamond sits in the empty middle between
# them. (We picked the user whom one vector serves worst; most are milder. The numbers below are over all of them.)

# %% [markdown]
# ## 2 · The planted world
#
# The same in sixteen dimensions, large enough to measure. It is written as a raw log, with dislikes and repeats, and
# goes through the pipeline that real data goes through (`03_data` takes that apart).

# %%
world = planted.write_world(
    n_users=n_users, n_items=n_items, n_interests=n_interests, interests_per_user=interests_per_user, seed=seed
)
dataset = prepare("planted", world, output_dir("data", world.name))
truth = dataset.truth

# %% [markdown]
# Interest proportions $\pi_u$ come from a Dirichlet distribution. Here are eight users:

# %%
effective = np.exp(-(truth.pi * np.log(truth.pi + 1e-12)).sum(1))  # exp of the entropy: "how many interests"
plots.proportions(truth.pi[:8], list(truth.genres), f"A user has {effective.mean():.1f} interests on average")

# %% [markdown]
# **What you should see.** No two users alike, and nearly nobody with a single colour: 5 to 7 effective interests on
# average at the defaults.
#
# Over time a user stays with an interest for a short session and moves on. The last twenty items are held out.

# %%
plots.timeline(5, dataset.sequence(5), dataset.items["title"], truth.item_interest, list(truth.genres))

# %% [markdown]
# ## 3 · Three ways to score, with perfect towers
#
# Figure 1 of the paper, with the truth as towers. The heads are the user's true taste vectors.
#
# **(a) one vector**, $\langle \mathbf{u}, \mathbf{v}_i\rangle$;
# **(b) heads, maximum**, $\max_r \langle \mathbf{u}^{(r)}, \mathbf{v}_i\rangle$;
# **(c) mixture**, with the power-spherical kernel and $\kappa = 1/\tau$, where BACH starts:
#
# $$m(i\mid u) \;\propto\; \sum_r \pi_u^{(r)} \big(1 + \langle \mathbf{u}^{(r)}, \mathbf{v}_i\rangle\big)^{\kappa}$$
#
# (the normaliser $C_d(\kappa)$ is the same for all heads here and drops out).

# %%
users = np.random.default_rng(seed).choice(dataset.n_users, min(n_eval, dataset.n_users), replace=False)
heads, pi = truth.tastes[users], truth.pi[users]
cosine = heads @ truth.items.T  # (B, k, n_items)
cosine.shape

# %%
one = planted.unit((pi[:, :, None] * heads).sum(1))
scores = {
    "(a) one vector": one @ truth.items.T,
    "(b) heads, maximum": cosine.max(1),
    "(c) mixture, weighted by π_u": (pi[:, :, None] * ((1 + cosine) / 2) ** (1 / tau)).sum(1),
    "(c') mixture, π_u replaced by 1/k": (((1 + cosine) / 2) ** (1 / tau)).mean(1),
}


# %% [markdown]
# Recall@K on the ten test items, over the whole catalogue, every earlier item of the user excluded.

# %%
targets = dataset.targets(users, "test")
earlier = dataset.matrix("all")[users].toarray() > 0
np.put_along_axis(earlier, targets, False, axis=1)


def recall(score: np.ndarray) -> np.ndarray:
    """Recall@K of each user, (B,)."""
    top = np.argpartition(np.where(earlier, np.inf, -score), K, axis=1)[:, :K]
    return (targets[:, :, None] == top[:, None, :]).any(-1).mean(1)


per_user = pd.DataFrame({name: recall(score) for name, score in scores.items()})
means = per_user.mean().to_dict()
plots.bars(means, "Heads need weights: without π_u even perfect heads lose to one vector", f"R@{K} on the test items")

# %% [markdown]
# **What you should see.** One vector reaches 0.12–0.18. The maximum over perfect heads is far *worse*: it asks every
# interest alike, also those the user hardly has, which is the paper's second shortcoming in its purest form. Weighting
# the same heads by $\pi_u$ gives 0.22–0.30. And the weights are the point: with $\pi_u$ replaced by $1/k$ the
# mixture is as lost as the maximum.
#
# What this does *not* show: that a model can *learn* heads and weights this good, or that hard routing trained end to
# end does as badly as here. A trained maximum can place its k heads where the mass is. `04_train` and `05_evaluate`
# measure that.

# %%
assert means["(c) mixture, weighted by π_u"] > 1.3 * means["(a) one vector"]
assert means["(b) heads, maximum"] < means["(a) one vector"]

# %% [markdown]
# ## 4 · Who gains
#
# Users with more interests should gain more.

# %%
edges = [0, 4, 6, 8, np.inf]
group = pd.cut(effective[users], edges, labels=["under 4", "4 to 6", "6 to 8", "over 8"])
by_group = per_user.iloc[:, [0, 2]].groupby(group, observed=True).mean()
by_group["users"] = pd.Series(group).value_counts().reindex(by_group.index).to_numpy()
by_group.index.name = "effective interests"
by_group.round(3)

# %% [markdown]
# **What you should see.** With under four interests one vector keeps most of what the mixture finds. With more it
# loses recall twice as fast: over eight interests the mixture finds two to three times as much.

# %%
gain = by_group.iloc[:, 1] / by_group.iloc[:, 0]
assert gain.is_monotonic_increasing
gain.round(2).to_dict()

# %% [markdown]
# ## Exercises
#
# 1. Set `interests_per_user = 0.5` in the parameters. What happens to (a) and (b), and which check then rightly fails?
#    <details><summary>Answer</summary>Most users then have one or two interests: one vector becomes nearly as good as
#    the mixture. The maximum stays bad, because the other heads still shout.</details>
# 2. In (c), replace the exponent `1 / tau` by 2 and by 200. Why are both worse?
#    <details><summary>Answer</summary>A small κ cannot tell items inside an interest from those beside it; a large one
#    only sees the nearest few and stops trading interests off against each other. BACH learns κ: `02_elbo` shows what
#    keeps it from running to either end.</details>
# 3. Keep only the heads with $\pi_u^{(r)} > 0.05$ and take the maximum over those. How much of the loss comes back?
#    <details><summary>Answer</summary>It then does about as well as one vector: knowing which heads matter is most of
#    it, knowing how much they matter is the rest.</details>

# %% tags=["nbval-ignore-output"]
record(
    "00_tour",
    {
        "users": dataset.n_users,
        "windows": dataset.n_windows,
        "effective interests": round(float(effective.mean()), 4),
        f"R@{K} one vector": round(means["(a) one vector"], 4),
        f"R@{K} heads, maximum": round(means["(b) heads, maximum"], 4),
        f"R@{K} mixture": round(means["(c) mixture, weighted by π_u"], 4),
    },
)

# %% [markdown]
# **Next:** `01_sphere` and `02_elbo` for the mathematics, `03_data` for the data.
