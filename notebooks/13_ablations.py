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
# # 13 · The cheap posterior and the density cost almost nothing; the order of the history is worth much
#
# **Question.** What is each part of BACH worth: the cheap posterior, the entropy term, the single target, the density
# by which it is served, $\pi_u$, a user's own heads, the order of the history? We replace one part and keep the rest.
#
# **You need** `04_train` for the methods, `05_evaluate` for the intervals and `06_heads_and_pi` for the calibration of
# $\pi_u$. **CPU minutes:** 1½; one after these three notebooks, because the trainings are shared.
#
# The *What you should see* texts describe the planted world with the default parameters; another log has other numbers,
# and `bach run` leaves them out there. For MovieLens-1M: `bach run ml1m --set notebooks=[13_ablations] --set epochs=5`.

# %% tags=["parameters"]
source = "planted"
n_users = 500
k = 8
prototypes = 16
d = 8
ff = 32
item_width = 32
epochs = 2
batch_size = 256
n_negatives = 256
learning_rate = 0.01
valid_every = 1
log_steps = 10
seeds = 2
seed = 0

# %%
import numpy as np
import pandas as pd
import torch

from bachlib.data import Windows
from bachlib.evaluate import answers, diagnostics, evaluate, meaning
from bachlib.evaluate.tables import table
from bachlib.experiment.stages import prepared, settings, trained
from bachlib.files import record
from bachlib.model.methods import build
from bachlib.model.plain import plain_step_loss
from bachlib.params import TrainParams
from bachlib.rank.ranks import sample_users
from bachlib.serve import Retriever, rerank
from bachlib.show import plots

p = settings(globals())
dataset = prepared(p)

# %% [markdown]
# The trained models of this notebook. If another notebook has trained them, they are loaded. `own` has p-BACH once for
# each seed; every other method has one training, with the first seed. We use at most 1,000 users for diagnostics.

# %%
every = range(seed, seed + seeds)
own = {s: trained("p-bach", dataset, p, seed=s) for s in every}
others = ("standard", "sasrec", "all-multihead", "pos-multihead")
runs = {"p-bach": own[seed]} | {name: trained(name, dataset, p) for name in others}
codebooks = {n: trained("p-bach-global", dataset, p, k=n).model for n in sorted({3, k, prototypes})}
model = own[seed].model
users = sample_users(dataset, 1_000, seed)
few, alone = {"max_users": p.max_eval}, f"seed {seed}"
dataset

# %% [markdown]
# ## 1 · Switches
#
# Each switch of `build` changes one part and keeps the rest. The first value is the paper's. `bach sweep ablation-…`
# compares the values over three seeds on MovieLens-1M.
#
# | switch | values | question |
# | --- | --- | --- |
# | `posterior` | `spherical`, `contrastive` (EM), `prior` ($\gamma=\pi_u$) | What is the recognition model worth? |
# | `through_gamma` | `True`, `False` (the M-step of EM) | Does it matter to differentiate through $\gamma$? |
# | `temper` | `1.0`, any weight of the entropy term | Calibration of $\pi_u$ against accuracy |
# | `kappa` | `net`, `shared` (one learnt $\kappa$), `fixed` ($1/\tau$) | Is a $\kappa$ per head needed? |
# | `pi` | `gate`, `table` (a row per user), `uniform` | What is $\pi_u$ worth in training? |
# | `log_q` | `False`, `True` (corrects for how often an item is drawn) | What do popular in-batch negatives cost? |
# | `false_negatives` | `mask` (copies of the target), `next` (all next ten) | Should later targets be negatives? |
#
# The first five belong to the ELBO; a method without it refuses them. The last two are about the candidates and work
# with every method. `bachlib.model.candidates` derives the correction for the mixed candidates. With $\gamma^{con}$ the
# bound is tight. So for the same weights and candidates it is above the bound at any other $\gamma$:

# %%
torch.manual_seed(seed)
batch = next(iter(Windows(dataset, batch_size, seed, p.n_hist)))
history, positive = torch.from_numpy(batch.history), torch.from_numpy(batch.positive)
negatives = torch.randint(dataset.n_items, (n_negatives,))
bounds = {}
for switch in ({}, {"posterior": "contrastive"}, {"posterior": "prior"}, {"through_gamma": False}):
    other = build("p-bach", dataset, **(p.model | switch))
    other.load_state_dict(model.state_dict())
    bounds[str(*switch.values()) or "paper"] = -other.loss(history, positive, negatives).item()
assert bounds["contrastive"] > max(bounds["paper"], bounds["prior"])
assert bounds["False"] == bounds["paper"]  # the same value; only its gradient is another
{name: round(value, 3) for name, value in bounds.items()}

# %% [markdown] tags=["lesson"]
# **What you should see.** The recognition model loses about 0.02 nats against $\gamma^{con}$, because the $\kappa$-net
# was trained to make this gap small. $\gamma=\pi_u$ loses more than one nat: it does not look at the item.

# %% [markdown]
# ## 2 · The cheap posterior
#
# $\gamma$ is cheap because it never sees the candidates. $\gamma^{\mathrm{con}}$ (eq. 20) sees all of them and makes
# the bound tight. How large is this gap, and does it grow with the number of heads? We train p-BACH with other numbers
# of heads and look at held-out items, with the whole catalogue as candidates:

# %%
of_k = {n: trained("p-bach", dataset, p, k=n).model for n in sorted({2, 4, k, 16})}
apart = {f"p-bach k={n}": diagnostics.held_out(model, dataset, users) for n, model in of_k.items()}
apart |= {f"p-bach-global k={n}": diagnostics.held_out(codebooks[n], dataset, users) for n in (3, prototypes)}
gaps = answers.posterior_gap(apart)
assert (gaps["KL gap"] >= 0).all()
plots.posterior_gap(gaps)

# %%
gaps.round(3)

# %% [markdown] tags=["lesson"]
# **What you should see.** The cheap posterior is nearly the tight one: at most two hundredths of a nat apart. The gap
# grows from two heads to eight, and not further to sixteen. For more than nine items in ten both have the same first
# head.

# %% [markdown]
# ## 3 · The weight of the entropy term
#
# The paper's first open direction is the weight of the entropy term, `temper` (1 in the paper). A larger weight asks
# for responsibilities that are more even. Does it make $\pi_u$ better calibrated, and at what cost in accuracy? The
# calibration error has the two controls of `06_heads_and_pi`: another user's $\pi_u$, and how many nats per held-out
# item $\pi_u$ is worth against one $\pi$ for all users.

# %%
by_temper = {f"temper {t:g}": trained("p-bach", dataset, p, temper=t) for t in (0.5, 1.0, 2.0)}
tempered = {name: diagnostics.held_out(run.model, dataset, users) for name, run in by_temper.items()}
over_temper = answers.calibration_controls(tempered, seed)
over_temper["effective heads of π"] = [
    of.log_pi.exp().mul(-of.log_pi).sum(1).exp().mean().item() for of in tempered.values()
]
over_temper["AUPRC (validation)"] = [run.best["auprc"] for run in by_temper.values()]
plots.calibration_controls(over_temper)

# %%
over_temper.round(4)

# %% [markdown] tags=["lesson"]
# **What you should see.** Calibration alone is a poor goal. With the weight 2 every $\pi_u$ is even: no error, and no
# information. With the weight ½ $\pi_u$ is sharper (2.6 effective heads instead of 4.8) and worth more nats, but less
# calibrated. Both have a lower validation AUPRC than the paper's weight 1 (one seed).

# %% [markdown]
# ## 4 · All ten targets instead of one
#
# The paper draws one of a window's next ten items as the target. What it maximises is the mean over the ten; the draw
# only adds noise to the gradient. With `targets="all"` the loss of a row is this mean. The candidates are shared, so
# one sweep over them gives $Z_r$, the sum over all candidates that are no target of the row. (The row's own draw is
# left out, too.) Then for each target $m$
#
# $$\log p_r(m\mid u_n) = s_{rm} - \log\Big(Z_r + \sum_{m'\ne m} c_{m'}\,e^{s_{rm'}} + e^{s_{rm}}\Big), \qquad
# s_{rm} = \langle\mathbf{u}^{(r)},\mathbf{v}_m\rangle/\tau,$$
#
# where $c_{m'}$ counts how often target $m'$ is among the other candidates. $\gamma$, prior and entropy are computed
# for each target. We check the loss against plain steps, one for each row and target. Then we take a trained model and
# compute the gradients of some steps in both ways, with the same windows and negatives. Their variance is the sum over
# all weights:

# %%
gradients = {"one": [], "all": []}
torch.manual_seed(seed)
for batch, _ in zip(Windows(dataset, batch_size, seed, p.n_hist, following=True), range(24), strict=False):
    history, positive, following = map(torch.from_numpy, (batch.history, batch.positive, batch.following))
    negatives = torch.randint(dataset.n_items, (n_negatives,))
    for name, targets in (("one", None), ("all", following)):
        loss = model.objective(history, positive, negatives, targets=targets).loss
        slopes = torch.autograd.grad(loss, list(model.parameters()))
        gradients[name].append(torch.cat([slope.flatten() for slope in slopes]))
fast = model.objective(history[:3], positive[:3], negatives, targets=following[:3]).loss
plain = plain_step_loss(model, history[:3], positive[:3], negatives, following[:3])
assert torch.isclose(fast, plain, rtol=1e-4)
variance = {name: float(torch.stack(slopes).var(0).sum()) for name, slopes in gradients.items()}
{f"variance, {name}": round(value, 3) for name, value in variance.items()}

# %%
on_all = {s: trained("p-bach", dataset, p, seed=s, targets="all") for s in every}
both = {s: {"one": own[s].best["auprc"], "all": run.best["auprc"]} for s, run in on_all.items()}
pd.DataFrame(both).rename_axis("targets").rename(columns="seed {}".format).round(4)

# %% [markdown] tags=["lesson"]
# **What you should see.** With all targets the gradient has about half the variance. (The rest comes from the windows,
# the negatives and the draws of the other rows, which stay the candidates.) Validation AUPRC is the same for the first
# seed and higher for the second; two short trainings prove nothing. On MovieLens-1M the gain is clear, see
# [LOG.md](../LOG.md). A step of p-BACH takes about as long as with one target.

# %% [markdown]
# ## 5 · Whose steps are noisiest?
#
# The *noise* of a step is the variance of its gradient, divided by the squared length of the mean gradient. Below 1 a
# single step points mostly in the right direction. We measure it for the trained models, with the same windows and
# negatives for all, and without dropout:

# %%
trio = {name: runs[name].model for name in ("p-bach", "all-multihead", "pos-multihead")}
noise = answers.gradient_noise(trio | {"p-bach-global": codebooks[k]}, dataset, TrainParams(**p.train))
plots.noted(plots.gradient_noise(noise), alone)

# %% [markdown] tags=["lesson"]
# **What you should see.** About 4 for p-BACH and pos-multihead, 2.5 for all-multihead, and 0.6 for the codebook, whose
# heads every window trains. So soft routing alone does not make steps less noisy. The ratio also depends on how far a
# training is: near an optimum the mean gradient is small. Compare it at the same weights, as in section 4, to judge a
# change of the objective.

# %% [markdown]
# ## 6 · One model, three rules of serving
#
# BACH is trained with the mixture of softmaxes (eq. 14) and served by the mixture density (eq. 23). `serve_by` serves
# the same weights by another rule: `max` takes the closest head, without $\pi_u$ and $\kappa$ (eq. 8), and `softmax` is
# the trained model itself, $\sum_r \pi_u^{(r)} p_r(i\mid u)$ over the whole catalogue. (With
# $Z_r = \sum_j e^{\langle\mathbf{u}^{(r)},\mathbf{v}_j\rangle/\tau}$ this is a von Mises–Fisher density with
# $\kappa = 1/\tau$ and the weights $\pi_u^{(r)}/Z_r$: what the density knows beyond it is one $\kappa$ per head.)

# %%
rules = ("density", "max", "softmax")
served = {(by, s): evaluate(own[s], dataset, **few, serve_by=by) for by in rules for s in every}
by_rule = {by: np.mean([served[by, s].means["AUPRC"] for s in every]) for by in rules}
table(list(served.values()), baseline="p-bach (serve_by = density)")

# %% [markdown] tags=["lesson"]
# **What you should see.** Density and softmax are level: their difference is far inside the intervals. So the rule that
# can be served cheaply costs nothing against the model that was trained. The maximum loses a third of AUPRC. It forgets
# $\pi_u$, so heads that mean nothing to the user fill the slate. (all-multihead is *trained* with the maximum, so it is
# served by it without harm.) On MovieLens-1M (p-BACH, one epoch) the softmax changes AUPRC by −0.4% [−0.8, −0.1] and
# the maximum by −13% [−14, −11].

# %% [markdown]
# ## 7 · How much is the order worth?
#
# All encoders here read a history in its order. Does the log need it? We evaluate the same trained models with
# histories in random order: the same 50 items shuffled, and 50 random items of the whole past. The first tells what the
# order is worth, the second what it is worth that the items are the *last* ones. (The models learnt from histories in
# order. A model trained on shuffled ones would lose less.)

# %%
readers = {name: runs[name] for name in ("standard", "sasrec", "all-multihead", "p-bach")}
shuffles = answers.shuffle_test(readers, dataset, max_users=p.max_eval)
order = shuffles[shuffles["shuffled"] == "order"].set_index("model")["gain"]
plots.noted(plots.shuffle_test(shuffles), alone)

# %% [markdown] tags=["lesson"]
# **What you should see.** One vector and p-BACH lose a fifth of their AUPRC when the same items are shuffled: a user of
# this world stays with an interest for a while, so the last items say what comes next. 50 random items of the past are
# about as bad. SASRec notices least; its interval contains zero. On MovieLens-1M (p-BACH, one epoch) shuffling costs
# 42% of AUPRC, and random items of the past 58%, which leaves as much as MostPop has. In that log 92% of the users like
# their first test item within an hour of their last history item: the paper's split asks there how a session goes on.
# With a global split half of the MovieLens-1M users come back after about twelve weeks or more, and AUPRC is a third.

# %% [markdown]
# ## 8 · Own heads
#
# `06_heads_and_pi` asks whether the heads stand for the taste that a user *has*. Do they also stand for what a user
# likes *later*? *Covered* is the share of the topics of the test items that have their own head. *Overlap* compares
# these topics with those that the heads and $\pi_u$ promise, $\sum_r \pi_u^{(r)} p_r(g)$. We compare the user's own
# heads with those of another user, drawn at random. A codebook has the same heads for everybody, so there only the
# overlap, in which $\pi_u$ counts, can tell users apart.

# %%
topics = meaning.topics_of(dataset)
compared = {"p-bach": model, "p-bach-global": codebooks[prototypes]}
compared |= {name: runs[name].model for name in ("standard", "all-multihead")}
later = answers.genre_coverage(compared, dataset, users, seed, topics.member)
plots.genre_coverage(later)

# %%
later.round(3)

# %% [markdown] tags=["lesson"]
# **What you should see.** Personal heads know their user: p-BACH's cover 47% of the later topics, those of another user
# 29%. The codebook covers more, because it has twice as many heads, and it covers as much for everybody. The overlap
# with the later topics is about 0.15 with another user for every method. With the own heads and $\pi_u$ it is 0.35 for
# p-BACH, 0.31 for a single vector and 0.29 for all-multihead, which has no weights.

# %% [markdown]
# ## 9 · Diversity at equal recall
#
# Diversity (1 − cosine of genres) is easy to have at the cost of recall. So we compare at *equal recall*. MMR re-ranks
# a longer list of each model, more and more strongly. Each curve starts with the largest dot, the slate as it is:

# %%
curves, past = {}, [np.concatenate(dataset.split(u)[:2]) for u in users]
for name in ("all-multihead", "standard", "p-bach"):
    server = Retriever(runs[name].model, "exact")
    longer = server.retrieve(past, 200)
    vectors = server.vectors(longer)
    curves[name] = lambda strength, longer=longer, vectors=vectors: (
        longer.take(rerank.mmr(longer.scores, vectors, 50, 1 - strength)).items
    )
strengths, wanted = [0.0, 0.6, 0.8, 0.9, 0.95, 0.98], dataset.targets(users, "test")
equal = answers.diversity_and_recall(curves, strengths, wanted, topics.member)
equal_recall = equal.groupby("slates", sort=False)["at equal recall"].first().dropna()
plots.noted(plots.diversity_and_recall(equal), alone)

# %% [markdown] tags=["lesson"]
# **What you should see.** The recall at which we compare is that of all-multihead's slates as they are. There the
# single vector, re-ranked, has the most diverse slates, twice as diverse as all-multihead's. p-BACH's curve lies
# between the two. Several heads do not make a slate diverse: they follow the session a user is in.

# %% [markdown] tags=["lesson"]
# ## Exercises
#
# 1. Train with $\gamma = \pi_u$: `trained("p-bach", dataset, p, posterior="prior")`. How many heads are used, and why?
#    And is the tight posterior, `posterior="contrastive"`, better than the cheap one?
#
# <details><summary>Answer</summary>
#
# One, over two seeds (1.0 effective heads instead of 6.3 and 7.8). A $\gamma$ that does not look at the item sends
# every item to the same heads, so nothing makes the heads different, and the best $\pi_u$ has all its weight on one
# head. AUPRC is 0.029 and 0.027 instead of 0.032 and 0.030. So it matters that $\gamma$ sees the item. The tight
# posterior is not better: 0.030 and 0.028.
# </details>
#
# 2. Train without $\pi_u$: `pi="uniform"`. Is the loss as large as that of the maximum in section 6?
#
# <details><summary>Answer</summary>
#
# No. AUPRC is 0.028 and 0.029 over two seeds instead of 0.032 and 0.030; two short trainings do not prove a
# difference. These heads were trained with equal weights. In section 6 the heads learnt that $\pi_u$ would switch them
# off, and then it did not.
# </details>
#
# 3. Is a $\kappa$ for each head needed? Train with `kappa="fixed"` and look at the gap and at AUPRC.
#
# <details><summary>Answer</summary>
#
# With $\kappa = 1/\tau$ the gap is three times as large, 0.05 nats instead of 0.02. AUPRC is 0.030 and 0.031: level. So
# the $\kappa$-net makes the bound tighter; in accuracy we do not see it.
# </details>
#
# 4. Hold $\gamma$ fixed in the gradient, as the M-step of EM does: `through_gamma=False`. Which parts still learn?
#
# <details><summary>Answer</summary>
#
# $\kappa$ enters the bound only through $\gamma$, so every $\kappa$ stays at $1/\tau$. And over two seeds one head
# takes everything (1.0 effective heads); AUPRC is 0.028 and 0.024 instead of 0.032 and 0.030. So at this scale the
# gradient through $\gamma$ keeps the heads in use.
# </details>

# %%
record(
    "13_ablations",
    {
        "users": dataset.n_users,
        "nats lost by γ": round(bounds["contrastive"] - bounds["paper"], 3),
        "nats lost by γ = π": round(bounds["contrastive"] - bounds["prior"], 2),
        **{f"KL gap, {name}": round(float(value), 3) for name, value in gaps["KL gap"].items()},
        **{f"{n}, effective heads": round(float(v), 1) for n, v in over_temper["effective heads of π"].items()},
        "variance of all targets to one": round(variance["all"] / variance["one"], 2),
        **{f"noise, {name}": round(float(value), 1) for name, value in noise["noise"].items()},
        **{f"AUPRC, {by}": round(float(value), 4) for by, value in by_rule.items()},
        **{f"gain, shuffled, {name}": round(float(order[name]), 3) for name in ("standard", "p-bach")},
        **{f"covered later, {name}": round(float(value), 2) for name, value in later["covered"].items()},
        **{f"diversity at equal recall, {name}": round(float(value), 2) for name, value in equal_recall.items()},
    },
)

# %% [markdown]
# **Next:** `bach sweep ablation-…` asks the same with three seeds on MovieLens-1M;
# [`09_sweep_report`](09_sweep_report.ipynb) reads it. [`05_evaluate`](05_evaluate.ipynb) says how reliable numbers of
# one or two trainings are.
