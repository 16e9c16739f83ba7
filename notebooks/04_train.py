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
# # 04 · Soft routing feeds every head; what the heads learn is another question
#
# **Question.** BACH, all-multihead and pos-multihead share towers, data and optimiser and differ in one thing: which
# head a training example reaches. What does that do to the heads?
#
# **You need** `02_elbo` for the terms and `00_tour` for the planted world. **CPU minutes:** one.
#
# The planted world has 16 interests and the embeddings here only 8 dimensions, so that one vector has no room for all
# of a user's interests. Everything is small; the numbers over three seeds on a larger world are in the README. The same
# cells run on real logs (`papermill … -p source movielens-1m`); what you should see is said of the values below.

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
seeds = 2
seed = 0
tau = 0.07
cls_scale = 1.0

# %%
import numpy as np
import pandas as pd
import torch
from torch import nn

from bachlib.evaluate import diagnostics, evaluate, meaning
from bachlib.experiment.stages import prepared, run_name, settings, trained
from bachlib.files import output_dir, record
from bachlib.model.methods import METHODS, build
from bachlib.rank.ranks import sample_users
from bachlib.show import plots
from bachlib.train import Run, fit

# %%
p = settings(globals())
dataset = prepared(p)
dataset

# %% [markdown]
# ## 1 · The table of methods
#
# A method is a user encoder and an objective; the item tower, $\tau$, the candidates and the optimiser are the same
# for all. This table *is* the module `bachlib.model.methods`.

# %%
pd.DataFrame([row._asdict() for row in METHODS.values()], index=METHODS.keys()).astype(object).fillna("–")

# %% [markdown]
# Appendix B as code: an item is its frozen PureSVD row plus a small residual that starts at zero; a user is k learned
# tokens that read the last 50 items through one Transformer layer; BACH has a second such tower for $\pi_u$ and a
# small network for $\kappa$.

# %%
model = build("p-bach", dataset, **p.model)
{name: sum(weights.numel() for weights in module.parameters()) for name, module in model.named_children()}

# %% [markdown]
# The interface is four functions. A history is item ids, padded on the left with −1:

# %%
history = dataset.history(np.arange(3), "valid")
heads, log_pi, kappa = model.eval().encode(history)
tuple(heads.shape), log_pi.exp().sum(-1).tolist(), kappa.unique().tolist(), tuple(model.score(history).shape)

# %% [markdown]
# **What you should see.** Weights that sum to one, and $\kappa = 1/\tau \approx 14.3$ for every head: the last layer of
# the $\kappa$-net starts at zero.
#
# ## 2 · Train four methods
#
# Algorithm 1: a batch of windows, fresh uniform negatives shared by the batch, the batch's own positives as further
# candidates, one Adam step. A copy of a row's own positive among the candidates is left out. Every fifth epoch (here:
# every epoch) the validation AUPRC decides which weights are kept. What another notebook has trained is opened.

# %%
names = ["p-bach", "all-multihead", "pos-multihead", "p-bach-global"]
runs = {(name, s): trained(name, dataset, p, seed=s) for name in names for s in range(seed, seed + seeds)}
first = {name: runs[name, seed] for name in names}  # whose curves are drawn

# %%
histories = {name: run.history for name, run in first.items()}
shown = ["epoch", "step", "loss", "effective_heads", "head_cosine", "kappa_max", "valid_auprc"]
histories["p-bach"].iloc[[0, -1]][shown].round(3)

# %% [markdown]
# ## 3 · The bound and its terms (eq. 21)

# %%
plots.elbo_terms(histories["p-bach"])

# %% [markdown]
# **What you should see.** Reconstruction does three fifths of the climbing. The prior is the price for guessing the
# head in advance and the entropy what is refunded where several heads explain an item; it is at most $\log k$.

# %%
assert np.allclose(
    -histories["p-bach"]["loss"], histories["p-bach"][["reconstruction", "prior", "entropy"]].sum(axis=1)
)

# %% [markdown]
# ## 4 · Concentrations without a prior
#
# $\kappa_r$ enters the ELBO only through $\mathrm{KL}(\gamma\,\|\,\gamma^{con})$, so it is pulled to the sharpness of
# the contrastive posterior and nothing else has to hold it.

# %%
plots.kappa_trajectories(histories["p-bach"], 1 / tau)

# %% [markdown]
# **What you should see.** All heads leave from $1/\tau$ and settle close together, near 24; on the way single users
# reach 31. (The paper reports maxima of 20 to 30 for p-BACH at d = 64; a sphere of 8 dimensions is another one.)
#
# ## 5 · Who is used
#
# For BACH the share of a head is its mean $\gamma$; for the hard methods how often it is the argmax at the positive.

# %%
plots.head_usage(histories)

# %% [markdown]
# These are the first trainings. As a film, and pos-multihead with the next seed as well:

# %%
hard = {f"pos, seed {s}": run.history for (name, s), run in runs.items() if name == "pos-multihead" and s < seed + 2}
plots.collapse_race({"p-bach": histories["p-bach"]} | hard)

# %% [markdown]
# **What you should see.** pos-multihead: the head that is ahead is trained more and gets further ahead. In the first
# training one head has nearly four fifths of the positives at step 40, loses its place to others, and four remain. In
# the second one head has everything from step 30 on, and nothing brings the others back. BACH never uses fewer than
# five of its eight heads, and at the end about seven. all-multihead is in between: a head also lives from
# being some negative's best.
#
# ## 6 · Who gets the gradient
#
# The share of $\|\partial\mathcal{L}/\partial\mathbf{u}^{(r)}\|$ that reaches head $r$, summed over the batch.

# %%
plots.gradient_heads(histories)

# %% [markdown]
# **What you should see.** For pos-multihead usage and gradient are the same thing: a head that is nobody's best is not
# trained. Soft routing brings the gradient back to most heads, all-multihead keeps it on four or five. That alone does
# not make heads *different*: look at their cosines.

# %%
users = sample_users(dataset, min(p.max_eval, 2_000), seed)
encoded = {name: diagnostics.encode_users(run.model, dataset, users) for name, run in first.items()}
{name: round(float(diagnostics.head_cosine(e.heads).mean()), 3) for name, e in encoded.items()}

# %% [markdown]
# BACH's heads are *not* far apart: in so few dimensions they share what is common to the user's interests, and a cosine
# has to differ by $\tau$ only for a factor $e$ in the softmax. pos-multihead's lower cosine is no merit in itself:
# three of its heads are hardly ever trained.
#
# ## 7 · What the heads stand for
#
# A head's softmax over the *whole catalogue*, summed over the items of each planted interest $j$,
#
# $$p_r(j\mid u) = \sum_{i\in j} p_r(i\mid u).$$
#
# For one user, p-BACH's heads with their weights, and in the last row the planted truth. (In a real log nothing is
# planted. There topics are the genres, or clusters of items that the same people like, and $\pi_u$ is *counted*: the
# shares of the topics among all items of the user.)

# %%
topics = meaning.topics_of(dataset)
wanted = meaning.topics_of_users(dataset, topics)[users]  # (U, g)
member = topics.member / np.maximum(topics.member.sum(1, keepdims=True), 1)  # (n, g)
known = "planted" if source == "planted" else "counted"

# %%
of_heads = {name: diagnostics.interest_of_heads(first[name].model, e.heads, member) for name, e in encoded.items()}
found = {name: diagnostics.recovery(of_heads[name], e.log_pi, wanted) for name, e in encoded.items()}
several = np.exp(-(wanted * np.log(wanted + 1e-12)).sum(1)) > 3.5
u = int(np.argmax(found["p-bach"].covered * several))


def heads_of_one(name: str, title: str):
    weights = encoded[name].log_pi[u].exp().numpy()
    return plots.heads_and_interests(of_heads[name][u].numpy(), weights, topics.names, wanted[u], title, known)


heads_of_one("p-bach", f"What p-BACH's heads stand for, for user {users[u]}")

# %% [markdown]
# **What you should see.** The heavy heads stand for the user's first two interests; most of the others are diffuse or
# stand for what the user hardly wants. (We picked, among users with several interests, the one whose are best covered;
# the table below has the mean over all.) And the codebook, whose heads are the same for everybody:

# %%
heads_of_one("p-bach-global", "The codebook's prototypes: topics for all users; only the weights are this user's")

# %% [markdown]
# ## 8 · Is $\pi_u$ recovered?
#
# What the model expects of interest $j$ is $q_j = \sum_r \pi_u^{(r)}\, p_r(j\mid u)$. Methods without weights weigh
# their heads equally. The overlap $\sum_j \min(q_j, \pi_j)$ is 1 if they agree.

# %%
plots.pi_recovered({name: found[name].weights for name in names[:3]}, wanted, known)

# %%
mean_user = np.minimum(wanted.mean(0), wanted).sum(1).mean()
history = np.stack([member[h[h >= 0]].sum(0) for h in dataset.history(users, "test", p.n_hist)])
counted = np.minimum(history / np.maximum(history.sum(1, keepdims=True), 1e-12), wanted).sum(1).mean()
f"the same guess for everybody: {mean_user:.3f}; counting topics in the history, which no model is told: {counted:.3f}"

# %% [markdown]
# **What you should see.** With weights BACH spreads along the line, 0.60, where equal ones stay low; one guess for
# everybody has 0.41. Counting genres is better, 0.71, and of course knows the genres.
#
# ## 9 · All of it in one table
#
# Accuracy on the test items over the full catalogue, every earlier item excluded. Means over the seeds, and the range.


# %%
def summary(run) -> dict[str, float]:
    encoded = diagnostics.encode_users(run.model, dataset, users)
    shares = diagnostics.interest_of_heads(run.model, encoded.heads, member)
    found = diagnostics.recovery(shares, encoded.log_pi, wanted)
    accuracy = evaluate(run, dataset, max_users=p.max_eval).means
    return {
        "effective heads": run.history["effective_heads"].iloc[-1],
        "head cosine": float(diagnostics.head_cosine(encoded.heads).mean()),
        "distinct interests": found.distinct.mean(),
        "interests covered": found.covered.mean(),
        "overlap with π": found.overlap.mean(),
        "R@50": accuracy["R@50"],
        "AUPRC": accuracy["AUPRC"],
    }


# %%
table = pd.DataFrame([{"method": name, **summary(run)} for (name, _), run in runs.items()])
table = table.groupby("method", sort=False)
means = table.mean()
table.agg(lambda values: f"{values.mean():.3f} ({values.min():.3f}–{values.max():.3f})").T

# %% [markdown]
# **What you should see, and what not.** In both trainings BACH uses more heads than the hard methods and comes closest
# to $\pi_u$. On average it also covers the user's interests best; but the training of pos-multihead that kept four
# heads covers more. In accuracy BACH and all-multihead have the same mean, and the two trainings of all-multihead
# (R@50 0.10 and 0.12) lie far apart. Over three seeds on 2,000 users (`params/teaching.yaml`; the table is in the
# README) both have the same recall, too. A codebook of 8 prototypes cannot hold 16 interests: its heads are the most
# distinct and serve worst.
#
# ## 10 · Bring your own encoder
#
# The paper calls BACH encoder-agnostic. An encoder is any module that takes the tokens of the history and the history
# itself and returns k vectors. Here an MLP on the mean of the history:


# %%
class MeanMlp(nn.Module):
    def __init__(self, k: int, d: int):
        super().__init__()
        self.k, self.net = k, nn.Sequential(nn.Linear(d, 64), nn.GELU(), nn.Linear(64, k * d))

    def forward(self, tokens, history):  # (B, n, d), (B, n)
        there = (history >= 0)[..., None]
        mean = (tokens * there).sum(1) / there.sum(1).clamp(min=1)
        return self.net(mean).view(len(tokens), self.k, -1)  # (B, k, d)


# %% [markdown]
# An item tower is any module that turns ids into vectors; here a genre as a side feature beside the PureSVD row, for an
# item with several the rarest. (In the planted world the genre *is* the interest, so the feature is worth more than it
# would be in life.)


# %%
class GenreTower(nn.Module):
    def __init__(self, base: nn.Module, genre: np.ndarray, d: int):
        super().__init__()
        self.base, self.n_items = base, base.n_items
        self.register_buffer("genre", torch.as_tensor(genre, dtype=torch.long))
        self.of_genre = nn.Embedding(int(genre.max()) + 1, d)

    def forward(self, ids):
        return self.base(ids) + 0.3 * self.of_genre(self.genre[ids])


# %%
torch.manual_seed(seed)
model_params = p.model
tower = GenreTower(build("standard", dataset, **model_params).item_tower, np.maximum(topics.first, 0), d)
own = build("p-bach", dataset, encoder=MeanMlp(k, d), item_tower=tower, **model_params)
folder = output_dir("runs", f"own-{run_name(p, dataset)}")
own_run = fit(own, dataset, p.train | {"epochs": 1}, folder, fresh=True, quiet=True)
look = histories["p-bach"].dropna(subset="valid_auprc").iloc[0]
{
    "own towers, epoch 1": round(own_run.best["auprc"], 4),
    f"p-bach, epoch {look['epoch']}": round(float(look["valid_auprc"]), 4),
}

# %% [markdown]
# ## 11 · Stop and go on
#
# `fit` writes its state every half minute and at every epoch. Stopped in any way and called again with the same
# arguments, it arrives at the same weights *to the bit*. Here two epochs at once, and one epoch with a second call for
# the other:


# %%
def codebook(epochs: int, folder: str, fresh: bool):
    params = p.train | {"epochs": epochs, "valid_every": 1}
    folder = output_dir("runs", f"{folder}-{run_name(p, dataset)}")
    fit(build("p-bach-global", dataset, **model_params), dataset, params, folder, fresh=fresh, quiet=True)
    return Run.load(folder, dataset, weights="last").model.state_dict()


whole = codebook(2, "whole", fresh=True)
codebook(1, "resumed", fresh=True)
resumed = codebook(2, "resumed", fresh=False)
assert all(torch.equal(weights, whole[name]) for name, weights in resumed.items())

# %% [markdown]
# On several processes: `torchrun --nproc-per-node 2 -m bachlib.cli train p-bach --data outputs/data/…`. Rows are shared
# out, gradients averaged, and the candidate set stays that of the joint batch.
#
# ## Exercises
#
# 1. Start the CLS tokens from `cls_scale = 0.02`. What happens to the head cosine, and to the distinct interests?
#
# <details><summary>Answer</summary>
#
# The heads start closer and stay close (cosine 0.81 and 0.93 over two seeds instead of 0.60 and 0.73), and fewer
# interests are some head's first (3.7 and 2.7 instead of 5.8 and 4.8). R@50 hardly changes. And all eight heads are in
# use, also by all-multihead: heads that are alike are used alike. How many heads are used says little without how
# different they are.
# </details>
#
# 2. Give the embeddings room: `d = 16`. What becomes of p-BACH beside one vector (`trained("standard", dataset, p)`)?
#
# <details><summary>Answer</summary>
#
# With d = 8 p-BACH has R@50 0.118 and 0.114 over two seeds, one vector 0.109 and 0.112: a small lead. With d = 16 it is
# 0.114 and 0.120 against 0.139 and 0.125: one vector wins. With as many dimensions as interests it can lean towards
# several of them at once. Several heads can pay where interests outnumber what one direction can hold.
# </details>
#
# 3. Give the codebook 16 prototypes, `trained("p-bach-global", dataset, p, k=16)`. How many are used, and what happens
#    to accuracy?
#
# <details><summary>Answer</summary>
#
# 14 and 15 over two seeds, and R@50 rises from 0.07 and 0.08 to 0.09 and 0.10: as many topics as interests. The paper
# uses 128 and 256 on real data.
# </details>

# %%
record(
    "04_train",
    {
        "users": dataset.n_users,
        "loss, p-bach": round(float(histories["p-bach"]["loss"].iloc[-1]), 3),
        **{f"effective heads, {name}": round(float(means.loc[name, "effective heads"]), 2) for name in names},
        **{f"overlap with π, {name}": round(float(means.loc[name, "overlap with π"]), 3) for name in names},
        **{f"R@50, {name}": round(float(means.loc[name, "R@50"]), 4) for name in names},
    },
)

# %% [markdown]
# **Next:** [`05_evaluate`](05_evaluate.ipynb): what these numbers are worth.
