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
# # 00 · Weighted heads can serve several interests, one vector cannot; learning the heads is the hard part
#
# **Question.** Two-tower retrieval gives a user one vector. Multi-interest retrieval gives k vectors, called heads.
# BACH gives k heads *and a weight for each*. What is each step worth? How does BACH learn the heads and the weights,
# and how well?
#
# **You need** nothing but this notebook. **CPU minutes:** one. Nearly all of it is eight small trainings, which
# `04_train` to `07_serving` use again.
#
# The data is a planted world: we generated it, so we know the true interests of every user. In sections 1 to 3 the true
# vectors take the place of the towers. From section 5 on the towers are learnt. Each section has one idea and names the
# notebook that explains it.

# %% tags=["parameters"]
source = "planted"
n_users = 500
k = 8
d = 8
ff = 32
item_width = 32
epochs = 2
batch_size = 256
n_negatives = 256
learning_rate = 0.01
valid_every = 1
log_steps = 10
seed = 0
interests_per_user = 4.0

# %%
import numpy as np
import pandas as pd

from bachlib import BachError
from bachlib.data import planted, prepare
from bachlib.evaluate import diagnostics, evaluate
from bachlib.experiment.stages import prepared, settings, trained
from bachlib.files import output_dir, record
from bachlib.model.sphere import KERNELS
from bachlib.serve import Retriever, Steering
from bachlib.show import plots

p = settings(globals())
if p.source != "planted":
    raise BachError(f"the tour needs the true interests: source should be 'planted', got {p.source!r}")
dataset, tau, K, n_eval = prepared(p), p.tau, 50, 500
dataset

# %% [markdown]
# ## Notation
#
# | paper | in code | meaning |
# |---|---|---|
# | $u,\ i$ | `u`, `i` | a user, an item |
# | $\mathbf{x}_u$ | `history` (B, n_hist) | what is known of the user: the last 50 liked items |
# | $B,\ k,\ d$ | `batch_size`, `k`, `d` | examples in a training step, heads of a user, dimensions |
# | $F_\theta$ | `model.encoder` | the head tower, from a history to k heads; θ are its weights |
# | $\mathbf{u}^{(r)}$ | `heads` (B, k, d) | head $r$ of the user: the direction of one interest, unit length |
# | $g_\phi$ | `model.item_tower` | the item tower; φ are its weights |
# | $\mathbf{v}_i$ | `items` (n, d) | the item's embedding, unit length |
# | $\pi_\xi$ | `model.gate` | the gating tower, from a history to $\pi_u$; ξ are its weights |
# | $\pi_u$ | `log_pi` (B, k) | how much each head matters to the user, sums to one |
# | $\rho_\psi$ | `model.kappa_net` | the network of $\kappa_r = e^{\rho_\psi(\mathbf{u}^{(r)})}$; ψ are its weights |
# | $\kappa_r$ | `kappa` (B, k) | concentration of a head: how sharply items are routed to it \* |
# | $\sigma_r$ | `log_sigma` (B, k) | spherical density $C_d(\kappa_r)\,\omega_{\kappa_r}$ of an item under head $r$ |
# | $\mathcal{C}_n$ | `ids` (C,) | candidates of a step: the batch's positives and `n_negatives` random items |
# | $\tau$ | `tau` | temperature of the softmax, fixed at 0.07 |
# | $p_r(i\mid u)$ | `log_p` (B, k) | sampled softmax of head $r$ over the candidates |
# | $\gamma_n$ | `log_gamma` (B, k) | responsibility: how much each head explains the observed item |
# | $\ell$ | `log_likelihood` (B,) | log-likelihood of the mixture of softmaxes |
# | $\mathcal{F}$ | `elbo` (B,) | the lower bound of ℓ that is maximised |
# | $m(i\mid u)$ | `log_density` (B, n) | mixture density by which items are ranked; `model.score` |
#
# \* The paper's intuition is that $\kappa_r$ says how tightly an interest's items cluster around the head.
# We did not find that (section 9).

# %% [markdown]
# ## 1 · A world you can see
#
# In three dimensions we can draw the sphere of item embeddings. Five interests are planted, and the items lie around
# their interest. A user has some of the interests, with weights $\pi_u$ that we know. The black diamond is a single
# vector that stands for all interests of the user, the weighted mean
#
# $$\mathbf{u} = \frac{\sum_r \pi_u^{(r)}\, \mathbf{u}^{(r)}}{\big\|\sum_r \pi_u^{(r)}\, \mathbf{u}^{(r)}\big\|}.$$

# %% tags=["picture-sphere"]
small = planted.write_world(n_users=300, n_items=600, n_interests=5, d=3, width=0.3, interests_per_user=3.0, seed=6)
ball = prepare("planted", small, output_dir("data", "planted-3d"), quiet=True).truth
one = planted.unit((ball.pi[:, :, None] * ball.tastes).sum(1))  # (n_users, 3)
u = int((one @ ball.items.T).max(1).argmin())  # the user whose vector is farthest from any item
plots.sphere(ball.items, ball.item_interest, list(ball.genres), ball.tastes[u], ball.pi[u], one[u])

# %% [markdown]
# **What you should see.** The large dots lie inside clouds of items. The diamond lies in the empty middle between them.
# (We picked the user whom one vector serves worst; most users are milder cases. The numbers below are over all users.)
# → [`01_sphere`](01_sphere.ipynb)
#
# ## 2 · The planted world
#
# A world of the same kind, large enough to measure. It is written as a raw log, with dislikes and repeats, and goes
# through the same pipeline as real data. Here are eight users and their $\pi_u$:

# %%
truth = dataset.truth
effective = np.exp(-(truth.pi * np.log(truth.pi + 1e-12)).sum(1))  # exp of the entropy: the number of interests
plots.proportions(truth.pi[:8], list(truth.genres), f"A user has {effective.mean():.1f} interests on average")

# %% [markdown] tags=["lesson"]
# **What you should see.** No two users are alike, and nearly no user has a single colour. On average a user has 5 to 7
# effective interests: the exponential of the entropy of $\pi_u$.

# %% [markdown]
# Over time a user stays with one interest for a short session and then moves on. The last twenty items are held out.
# → [`03_data`](03_data.ipynb)

# %%
plots.timeline(5, dataset.sequence(5), dataset.items["title"], truth.item_interest, list(truth.genres))

# %% [markdown]
# ## 3 · Three ways to score, with perfect towers
#
# This is Figure 1 of the paper. The heads are the user's true taste vectors. So the three ways differ only in *how a
# user is represented and scored*: **(a) one vector**, $\langle \mathbf{u}, \mathbf{v}_i\rangle$; **(b) heads,
# maximum**, $\max_r \langle \mathbf{u}^{(r)}, \mathbf{v}_i\rangle$; **(c) mixture**, with the power-spherical kernel
# and $\kappa = 1/\tau$, where BACH starts. (Then $C_d(\kappa)$ is the same for all heads and can be left out.)
#
# $$m(i\mid u) \;\propto\; \sum_r \pi_u^{(r)} \big(1 + \langle \mathbf{u}^{(r)}, \mathbf{v}_i\rangle\big)^{\kappa}.$$

# %%
users = np.random.default_rng(seed).permutation(dataset.n_users)[:n_eval]
heads, pi = truth.tastes[users], truth.pi[users][:, :, None]
cosine = heads @ truth.items.T  # (B, k, n_items), a head for each of the sixteen interests
density = ((1 + cosine) / 2) ** (1 / tau)
scores = {
    "(a) one vector": planted.unit((pi * heads).sum(1)) @ truth.items.T,
    "(b) heads, maximum": cosine.max(1),
    "(c) mixture, weighted by π_u": (pi * density).sum(1),
    "(c') mixture, π_u replaced by 1/k": density.mean(1),
}

# %% [markdown]
# Recall@K on the ten test items, over the whole catalogue, with every earlier item of the user excluded.

# %%
targets = dataset.targets(users, "test")
earlier = dataset.matrix("all")[users].toarray() > 0
np.put_along_axis(earlier, targets, False, axis=1)


def recall(score: np.ndarray) -> np.ndarray:
    """Recall@K of each user, (B,)."""
    top = np.argpartition(np.where(earlier, np.inf, -score), K, axis=1)[:, :K]
    return (targets[:, :, None] == top[:, None, :]).any(-1).mean(1)


per_user = pd.DataFrame({name: recall(score) for name, score in scores.items()})
perfect = per_user.mean().to_dict()
plots.bars(perfect, "Heads need weights: without π_u even perfect heads lose to one vector", f"R@{K} on the test items")

# %% [markdown] tags=["lesson"]
# **What you should see.** One vector finds about 0.15. The maximum over perfect heads is far *worse*: it treats all
# interests alike, also those that the user hardly has. This is the paper's second shortcoming of hard routing in its
# clearest form. The same heads weighted by $\pi_u$ find about 0.26. The weights make the difference: with $1/k$ in
# their place the mixture is as bad as the maximum.

# %% [markdown]
# Users with many interests gain most:

# %%
group = pd.cut(effective[users], [0, 4, 6, 8, np.inf], labels=["under 4", "4 to 6", "6 to 8", "over 8"])
by_group = per_user.iloc[:, [0, 2]].groupby(group, observed=True).mean()
gain = by_group.iloc[:, 1] / by_group.iloc[:, 0]
assert perfect["(c) mixture, weighted by π_u"] > 1.3 * perfect["(a) one vector"] > 1.3 * perfect["(b) heads, maximum"]
assert gain.is_monotonic_increasing
by_group.assign(gain=gain, users=pd.Series(group).value_counts()).rename_axis("effective interests").round(2)

# %% [markdown] tags=["lesson"]
# **What you should see.** For users with under four interests the mixture finds a quarter more than one vector. For
# users with over eight it finds several times as much.

# %% [markdown]
# This does *not* show that heads and weights this good can be *learnt*. It also does not show that a learnt maximum is
# as bad: it can place its k heads on the interests that the user has.
#
# ## 4 · What is maximised
#
# A log does not record which interest was behind an observed item $i_n$. BACH makes it a latent variable. Each head is
# a sampled softmax $p_r$ over the candidates, and a user mixes the heads with $\pi_u$ (eqs. 12 to 14). BACH maximises a
# lower bound of the log-likelihood $\ell = \sum_n \log \sum_r \pi_{u_n}^{(r)} p_r(i_n\mid u_n)$. The bound has three
# terms, reconstruction, prior and entropy (eq. 21):
#
# $$\mathcal{F} = \sum_n \sum_r \gamma_n^{(r)} \Big[ \log p_r(i_n\mid u_n) + \log \pi_{u_n}^{(r)} - \log \gamma_n^{(r)}
# \Big] = \ell - \sum_n \mathrm{KL}\big(\gamma_n \,\|\, \gamma_n^{\mathrm{con}}\big), \qquad
# \gamma_n^{(r)} = \frac{\pi_{u_n}^{(r)}\, \sigma_r(n)}{\sum_s \pi_{u_n}^{(s)}\, \sigma_s(n)}.$$
#
# $\gamma_n$ (eq. 19) says how much each head explains the item, and so how much the head learns from it.
# $\gamma_n^{\mathrm{con}} \propto \pi_{u_n}^{(r)} p_r$ is the posterior that would make the bound tight. Hard routing
# has an argmax in the place of $\gamma$. The figure moves an item from one head to another:

# %%
plots.gamma_on_great_circle(KERNELS["power-spherical"], kappa=1 / tau, d=d, pis=[0.5, 0.8, 0.95])

# %% [markdown]
# **What you should see.** The argmax flips at 45°. $\gamma$ changes smoothly: both heads learn from an item between
# them, and a head with more $\pi$ reaches further. → [`02_elbo`](02_elbo.ipynb)
#
# ## 5 · Learnt towers
#
# The same world, but the models see only its log. Item tower, data, optimiser and negatives are the same for all three.
# `standard` has one vector. `all-multihead` has k heads and takes the maximum at every candidate. `p-bach` maximises
# the bound above. Each is trained twice, from different first weights.

# %%
names = ["standard", "all-multihead", "p-bach"]
runs = {(name, s): trained(name, dataset, p, seed=s) for name in names for s in (seed, seed + 1)}
learnt = {key: evaluate(run, dataset, quiet=True).means[f"R@{K}"] for key, run in runs.items()}
best = perfect["(c) mixture, weighted by π_u"]
assert max(learnt.values()) < best
shown = {f"{name}, seed {s}": value for (name, s), value in learnt.items()}
shown |= {f"perfect {name}": value for name, value in list(perfect.items())[:3]}
title = f"The best learnt towers reach {max(learnt.values()) / best:.0%} of the perfect mixture"
plots.bars(shown, title, f"R@{K} on the test items")

# %% [markdown] tags=["lesson"]
# **What you should see.** Learnt towers are far below the perfect mixture: they have eight heads of eight dimensions
# for sixteen interests, four hundred users and two epochs. (They also have an advantage: they see which session a user
# is in, and the truth only knows $\pi_u$. With 2,000 users one learnt vector is better than the perfect one.) The
# learnt maximum is *not* as bad as the maximum over perfect heads. p-BACH and all-multihead are equal within noise:
# each is ahead with one of the two seeds. With one training you could report either.
# → [`05_evaluate`](05_evaluate.ipynb)

# %% [markdown]
# ## 6 · Which heads are used
#
# pos-multihead trains only the head that is closest to the positive: the paper's first shortcoming. The number of heads
# in use is $e^{H}$. $H$ is the entropy of the heads' shares of the positives: the mean $\gamma$, or for hard routing
# how often a head is the argmax.

# %%
runs["pos-multihead", seed] = trained("pos-multihead", dataset, p)
histories = {name: runs[name, seed].history for name in ("pos-multihead", "all-multihead", "p-bach")}
in_use = {name: float(history["effective_heads"].iloc[-1]) for name, history in histories.items()}
assert in_use["p-bach"] > in_use["pos-multihead"]
alone = f"seed {seed}"  # from here on one training of each method
plots.noted(plots.head_usage(histories), alone)

# %% [markdown] tags=["lesson"]
# **What you should see.** Here p-BACH uses more heads than both hard methods. The number depends on the seed: over four
# seeds pos-multihead ended with 1.0 to 3.1 of 8, all-multihead with 2.2 to 5.7, p-BACH with 3.5 to 7.9. (With one seed
# all-multihead used as many as p-BACH.) A head in use is not yet a useful head: in section 5 one vector was equally
# good. → [`04_train`](04_train.ipynb)

# %% [markdown]
# ## 7 · One user
#
# What does a head stand for? We take its softmax over the whole catalogue and sum it over the items of each planted
# interest. The model expects interest $j$ with the share $q_j = \sum_r \pi_u^{(r)} p_r(j\mid u)$. We compare it with
# the planted $\pi_u$ by the overlap $\sum_j \min(q_j, \pi_{uj})$. The figure shows the user with the best overlap among
# those whose slate of twelve items comes from at least three heads. Means over all users are below it.

# %%
everyone, model = np.arange(dataset.n_users), runs["p-bach", seed].model
encoded = diagnostics.encode_users(model, dataset, everyone)
of_heads = diagnostics.interest_of_heads(model, encoded.heads, truth.item_interest)  # (users, k, interests)
found = diagnostics.recovery(of_heads, encoded.log_pi, truth.pi)
retriever = Retriever(runs["p-bach", seed], "exact")
past = [dataset.sequence(u)[:-10] for u in everyone]  # all but the test items
brought = retriever.retrieve(past, 12).head_share.argmax(-1)  # (users, 12), the head behind each item
behind = np.array([len(set(row)) for row in brought])
u = int(np.argmax(found.overlap * (behind >= 3)))
weights = encoded.log_pi[u].exp().numpy()
title = f"User {u}: what each head stands for, and the planted π<sub>u</sub> ({alone})"
plots.heads_and_interests(of_heads[u].numpy(), weights, list(truth.genres), truth.pi[u], title)

# %%
equal = diagnostics.recovery(of_heads, encoded.log_pi * 0 - np.log(k), truth.pi).overlap.mean()
guess = np.minimum(truth.pi.mean(0), truth.pi).sum(1).mean()
overlap = {"p-BACH": found.overlap.mean(), "its heads, equal weights": equal, "one guess for all users": guess}
assert overlap["p-BACH"] > equal > guess
{f"{name}, {alone}": round(float(value), 2) for name, value in overlap.items()}

# %% [markdown] tags=["lesson"]
# **What you should see.** Heads stand for one or two of the user's interests, and for some that the user does not have.
# Several heads stand for the same interest. The model never saw the interests. On average the overlap of $q$ with the
# planted $\pi_u$ is about 0.6; one guess for all users has 0.4. Most of the gain comes from the heads; the weights add
# a few hundredths. → [`06_heads_and_pi`](06_heads_and_pi.ipynb)

# %% [markdown]
# ## 8 · One codebook for all users
#
# Heads need not be personal. At the other end of the paper's spectrum all users share one codebook of prototypes, as in
# a topic model. Only $\pi_u$ is personal. The objective is the same. Here is the user of section 7 again:

# %%
shared = trained("p-bach-global", dataset, p, k=p.prototypes)
of_user = diagnostics.encode_users(shared.model, dataset, everyone[[u]])
topics = diagnostics.interest_of_heads(shared.model, of_user.heads, truth.item_interest)[0].numpy()
codebook = evaluate(shared, dataset, quiet=True).means[f"R@{K}"]
title = (
    f"{p.prototypes} prototypes for all users, R@{K} {codebook:.3f} ({alone}); only the weights are those of user {u}"
)
weights = of_user.log_pi[0].exp().numpy()
plots.heads_and_interests(topics, weights, list(truth.genres), truth.pi[u], title).update_layout(height=600)

# %% [markdown] tags=["lesson"]
# **What you should see.** Most interests have their own prototype, although the model never saw the interests. $\pi_u$
# is a profile that you can read. It has this user's first two interests and misses the next two. For serving, the lists
# of the prototypes are the same for all users; only their weights change. The cost is accuracy: R@50 is below that of
# personal heads. → [`06_heads_and_pi`](06_heads_and_pi.ipynb)

# %% [markdown]
# ## 9 · κ without a prior
#
# $\ell$ does not depend on $\kappa$. $\kappa$ enters $\mathcal{F}$ only through
# $\mathrm{KL}(\gamma\,\|\,\gamma^{\mathrm{con}})$, so it moves to the value at which $\gamma$ fits the softmax best.

# %%
plots.noted(plots.kappa_trajectories(runs["p-bach", seed].history, 1 / tau), alone)

# %%
kappa, gap = diagnostics.kappa_bounds(encoded.kappa), diagnostics.held_out(model, dataset, everyone).gap.mean().item()
assert 0.5 / tau < kappa["min"] and kappa["max"] < 4 / tau and gap < 0.1
f"κ of all users and heads: {kappa['min']:.0f} to {kappa['max']:.0f}; the bound is {gap:.2f} nats below ℓ on test items"

# %% [markdown] tags=["lesson"]
# **What you should see.** All heads move from $1/\tau$ to about 24 and stay there; single users pass 30 on the way. No
# prior is needed, as the paper says, and the bound is nearly tight. But all $\kappa$ are nearly the same. They do *not*
# say how tight an interest is: $\kappa$ is fitted to how sharply the softmax with $1/\tau$ separates the heads. We read
# it as the sharpness of the routing. → [`06_heads_and_pi`](06_heads_and_pi.ipynb)

# %% [markdown]
# ## 10 · Serving, and steering by π_u
#
# Items are ranked by the density $m(i\mid u)$ (eq. 23), which is not an inner product. The retriever uses bounds to
# skip most items, and it proves its slate. `certified` means: scoring every item would give the same items in the same
# order. For the user of section 7:

# %%
slate = retriever.retrieve([past[u]], 12)
assert slate.certified.all()
liked_next = np.isin(slate.items[0], dataset.targets([u], "test"))
slate.table(0, dataset.items).assign(liked_next=liked_next).round(2)

# %% [markdown]
# $\pi_u$ can also be changed by hand. Here the head behind the last item gets a third more weight. The slate is exact
# for the new $\pi_u$:

# %%
r = int(brought[u][-1])
steered = retriever.retrieve([past[u]], 12, pi=Steering(boost={r: 4 / 3}))
assert steered.certified.all() and steered.head_share[..., r].mean() > slate.head_share[..., r].mean()
by_head = (slate.heads(), steered.heads())
plots.slate_slopes(
    slate.items[0], steered.items[0], by_head, dataset.items["title"], f"Head {r} with a third more weight"
)

# %% [markdown] tags=["lesson"]
# **What you should see.** The boosted head takes places from the others. A small change has a large effect: with twice
# the weight the head has the whole slate.

# %% [markdown]
# We picked this user. How many users have a slate that comes from one head?

# %%
f"{(behind == 1).mean():.0%} of the users have a slate of twelve that comes from one head"

# %% [markdown] tags=["lesson"]
# $\pi_u$ follows the session a user is in, and the head with the most density there fills the slate. So a fitted
# mixture does not by itself give a diverse slate. → [`07_serving`](07_serving.ipynb); [`explorer`](explorer.ipynb) has
# sliders for $\pi_u$

# %% [markdown] tags=["lesson"]
# ## 11 · What was seen of the paper's claims
#
# The list compares the paper's claims with our results, here and on MovieLens-1M (2,380 users, k = 8, five epochs;
# three seeds where there is an interval). The paper's own data sets are larger. We have not reproduced their tables.
#
# *Seen*
#
# - **Better than hard routing, on real data.** +3.9% AUPRC over all-multihead [2.5, 5.5] on MovieLens-1M; the paper has
#   +4.5% for the same k on MovieLens-20M. On the planted world the two are equal. → `05_evaluate`
# - **Better than one vector.** +2.5% AUPRC on MovieLens-1M. → `05_evaluate`
# - **κ needs no prior.** It stays bounded everywhere. → `02_elbo`, `04_train`
# - **Cheap serving.** Proved slates take 1.2 to 1.9 times the time of the bare matrix product. Two-step retrieval as in
#   the paper can miss items without a warning. → `07_serving`
#
# *Seen in part*
#
# - **Soft routing trains every head.** On the planted world it uses more heads than hard routing. On MovieLens-1M
#   pos-multihead uses as many (7.7 of 8 against 7.6, one seed) and is still worse. → `04_train`
# - **$\pi_u$ is calibrated.** To less than 0.01, but a $\pi$ without information would be calibrated, too. With
#   personal heads $\pi_u$ is worth a tenth of a nat per held-out item, in a codebook a third to a half (planted world).
#   → `06_heads_and_pi`
#
# *Not seen*
#
# - **all-multihead better than one vector.** Not on MovieLens-1M. → `05_evaluate`
# - **Gains mostly at the top of the ranking.** On MovieLens-1M R@10 and R@50 gain equally. → `05_evaluate`
# - **κ as the tightness of an interest.** Their rank correlation was −0.24 on MovieLens-1M, and not even its sign is
#   the same in every training. → `06_heads_and_pi`
# - **Diversity from the mixture.** On the planted world p-BACH's slates are *less* diverse than those of one vector.
#   → `07_serving`
#
# [LOG.md](../LOG.md) has the numbers behind these statements.

# %% [markdown] tags=["lesson"]
# ## Exercises
#
# 1. Set `interests_per_user = 0.5` in the parameters. What happens to (a) and (b) in section 3, and which check rightly
#    fails?
#
# <details><summary>Answer</summary>
#
# Users then have 1.8 interests on average. One vector finds 0.48 and the mixture 0.55. This is no longer 1.3 times as
# much, so the first check of section 3 fails. The maximum falls to 0.01, because all the heads the user does not need
# still count fully.
# </details>
#
# 2. In section 3, replace the exponent `1 / tau` by 2 and by 200. Why are both worse?
#
# <details><summary>Answer</summary>
#
# 0.18 and 0.13 instead of 0.26. With a small $\kappa$ items inside an interest and items beside it get nearly the same
# score. With a large $\kappa$ only the nearest few items count, and interests are no longer traded off against each
# other. BACH learns $\kappa$, but to fit the routing and not the recall.
# </details>
#
# 3. In section 3, take the maximum over the heads with $\pi_u^{(r)} > 0.05$ only. How much of the loss comes back?
#
# <details><summary>Answer</summary>
#
# `recall(np.where(pi > 0.05, cosine, -1).max(1)).mean()` is 0.16, as good as one vector. With 0.1 as the limit it is
# 0.20. Most of the gain comes from knowing *which* heads matter; knowing *how much* they matter gives the rest, up to
# 0.26.
# </details>
#
# 4. Train p-BACH and all-multihead with two more seeds (`trained("p-bach", dataset, p, seed=2)`). Which is ahead?
#
# <details><summary>Answer</summary>
#
# R@50 of p-BACH and all-multihead with seed 0: 0.119 and 0.100, with 1: 0.115 and 0.124, with 2: 0.124 and 0.107, with
# 3: 0.097 and 0.101. The means are 0.114 and 0.108, and two trainings of one method differ by up to 0.03. So no
# conclusion is possible.
# </details>

# %% tags=["nbval-ignore-output"]
record(
    "00_tour",
    {
        "users": dataset.n_users,
        "windows": dataset.n_windows,
        "effective interests": round(float(effective.mean()), 4),
        f"R@{K} one vector": round(perfect["(a) one vector"], 4),
        f"R@{K} heads, maximum": round(perfect["(b) heads, maximum"], 4),
        f"R@{K} mixture": round(perfect["(c) mixture, weighted by π_u"], 4),
        **{f"R@{K} learnt, {name}": round((learnt[name, seed] + learnt[name, seed + 1]) / 2, 4) for name in names},
        f"R@{K} learnt, codebook": round(codebook, 4),
        "effective heads, p-bach": round(in_use["p-bach"], 2),
        "overlap with π, p-bach": round(float(overlap["p-BACH"]), 3),
        "largest κ": round(kappa["max"], 1),
    },
)

# %% [markdown]
# **Next:** [`01_sphere`](01_sphere.ipynb) and [`02_elbo`](02_elbo.ipynb) for the mathematics,
# [`03_data`](03_data.ipynb) for the data, or the [`explorer`](explorer.ipynb) to try it out. [README.md](README.md) has
# the plan for a class.
