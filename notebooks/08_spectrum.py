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
# # 08 · From heads for all to heads of one's own: a few own heads buy most of the accuracy
#
# **Question.** A codebook that all users share is cheap to serve: everything but $\pi_u$ is computed beforehand. Heads
# of each user are more accurate. Two points between them stand in section 6.6 of the paper and are left to future work:
# "a few per-user heads alongside a shared global codebook (or a global codebook with a small per-user residual)". What
# does each point cost, and what does it give?
#
# **You need** `04_train` for the methods and `07_serving` for slates that are proved. **CPU minutes:** 1½. The *What
# you should see* texts describe the planted world with the default parameters; another log has other numbers, and `bach
# run` leaves them out there. For MovieLens-1M: `bach run ml1m --set notebooks=[08_spectrum] --set epochs=5`.

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
seed = 0
n_large = 40000

# %%
from time import process_time

import numpy as np
import pandas as pd
import torch

from bachlib.bench import serve as bench_serve
from bachlib.evaluate import diagnostics, evaluate, metrics
from bachlib.experiment.stages import prepared, settings, trained
from bachlib.files import record
from bachlib.model import mixture
from bachlib.model.hybrid import Both
from bachlib.model.methods import build
from bachlib.serve import Retriever, codebook, exact, hybrid
from bachlib.serve.density import LeftOut, Query, brute_force
from bachlib.show import plots

# %%
p = settings(globals())
dataset = prepared(p)
dataset

# %% [markdown]
# ## 1 · Four kinds of heads, two dials
#
# | | head $r$ of user $u$ | known before the request |
# | --- | --- | --- |
# | global | $\mathbf u^{(r)}$, a prototype | all densities $S_{ir}$ |
# | hybrid | $k_{\text{shared}}$ prototypes, then $k_{\text{own}}$ heads by an encoder | those of the prototypes |
# | residual | $\mathbf u^{(r)} + s\,\mathbf e^{(r)}_u$ with a unit vector $\mathbf e_u$, made unit again | nothing |
# | personal | $\mathbf u_u^{(r)}$ by the user's encoder | nothing |
#
# The *dials* are the number of own heads $k_{\text{own}}$ and the size $s$ of the residual. A residual of size $s < 1$
# turns a head by at most $\arcsin s$.
#
# All four are one mixture with one $\pi_u$ and one posterior $\gamma$; only the encoder differs.

# %%
OWN, SIZES = (1, 2, 4), (0.1, 0.5)
point = {"global": trained("p-bach-global", dataset, p, k=prototypes)}
for own in OWN:
    point[f"hybrid, {own} own"] = trained("p-bach-hybrid", dataset, p, k_shared=prototypes, k_own=own)
for size in SIZES:
    point[f"residual {size}"] = trained("p-bach-residual", dataset, p, k=prototypes, residual=size)
point["personal"] = trained("p-bach", dataset, p)
models = {name: run.model for name, run in point.items()}
result = {name: evaluate(run, dataset, max_users=p.max_eval, quiet=True) for name, run in point.items()}
users = next(iter(result.values())).per_user.index.to_numpy()[:1_000]

# %% [markdown]
# The training loss of a hybrid keeps the two kinds apart: a prototype needs one product with the candidates for the
# whole batch, an own head one per row. Computed the other way, with all heads of every row, the loss is the same. And
# at its two ends the hybrid is what it should be: without own heads the codebook, without prototypes the personal
# model.

# %%
hybrid_model = models[f"hybrid, {OWN[-1]} own"]
with torch.no_grad():
    items, own = hybrid_model.items(torch.arange(400)), torch.arange(60)  # candidates, and the positive of each row
    seen_by = diagnostics.encode_users(hybrid_model, dataset, users[:60])
log_sigma = mixture.log_sigma(seen_by.heads, items[own], seen_by.kappa, hybrid_model.kernel)


def loss(heads, of=slice(None)) -> float:
    log_pi = seen_by.log_pi[:, of].log_softmax(-1)
    return mixture.loss(heads, items, own, log_pi, log_sigma[:, of], hybrid_model.tau)[0].item()


shared, mine = seen_by.heads[0, :prototypes], seen_by.heads[:, prototypes:]
assert np.isclose(loss(Both(shared, mine)), loss(seen_by.heads), rtol=1e-5), "two kinds of heads, one mixture"
first, last = slice(prototypes), slice(prototypes, None)
assert np.isclose(loss(Both(shared, mine[:, :0]), first), loss(seen_by.heads[:, first], first), rtol=1e-5), "codebook"
assert np.isclose(loss(Both(shared[:0], mine), last), loss(mine, last), rtol=1e-5), "personal model"

# %% [markdown]
# How personal is each point? The figure shows one minus the mean cosine between the same head of two users, weighted
# with $\pi$: 0 if all users share their heads.


# %%
def personal(model) -> dict[str, float]:
    encoded, n = diagnostics.encode_users(model, dataset, users), len(users)
    between = (encoded.heads.mean(0).square().sum(-1) * n - 1) / (n - 1)  # mean cosine of head r of two users
    weight = encoded.log_pi.exp().mean(0)
    hers = weight[prototypes:].sum().item() if hasattr(model.encoder, "codebook") else np.nan
    return {"heads": len(weight), "heads differ by": (weight * (1 - between)).sum().item(), "π on own heads": hers}


how_personal = pd.DataFrame({name: personal(model) for name, model in models.items()}).T
assert abs(how_personal.loc["global", "heads differ by"]) < 1e-4
for size in SIZES:  # two heads within arcsin s of one prototype: their angle is at most 2 arcsin s
    assert how_personal.loc[f"residual {size}", "heads differ by"] <= 1 - np.cos(2 * np.arcsin(size)) + 1e-4
plots.bars(
    how_personal["heads differ by"].to_dict(), "How personal the heads are", "1 − cosine between two users, mean"
)

# %%
how_personal.round(3)

# %% [markdown] tags=["lesson"]
# **What you should see.** A residual of 0.1 is nearly global, one of 0.5 nearly as personal as free heads. In a hybrid
# the prototypes do not move at all. A single own head gets hardly any of $\pi_u$, it is one of 17 and points to no
# interest. Four get most of it: where the heads know the user, the model uses them.

# %% [markdown]
# ## 2 · What each point gives
#
# Accuracy on the test items, full catalogue. `gain` is the difference to the codebook in AUPRC, paired by user, ± half
# of its 95% interval over users. One seed says nothing about how much two trainings differ.

# %%
rows = {}
for name, of in result.items():
    difference = of.per_user["AUPRC"] - result["global"].per_user["AUPRC"]
    half = 1.96 * difference.std() / len(difference) ** 0.5
    means = {metric: of.means[metric] for metric in ("R@10", "R@50", "AUPRC")}
    rows[name] = means | {"gain": difference.mean(), "±": half}
accuracy = pd.DataFrame(rows).T
accuracy.round(4)

# %% [markdown] tags=["lesson"]
# **What you should see.** One own head brings nothing, two bring more than half of what personal heads have over the
# codebook, four more. The residual brings little, although its heads differ between users about as much. The intervals
# are as wide as the differences between neighbours.

# %% [markdown]
# ## 3 · What each point costs
#
# A request is one user, 100 items. The serving strategy of each kind is exact, and proved:
#
# - **global**: the codebook's cached lists, $\sum_r \pi_u^{(r)} S_{ir}$, no vector is touched;
# - **hybrid**: the cached densities bound what the prototypes give to each item; a scan of $k_{\text{own}}$ columns
#   bounds what the own heads give; only items whose two bounds reach the $K$-th best score are scored;
# - **residual** and **personal**: a scan of all heads.
#
# The cost depends on the numbers of heads, not on what they have learnt. So we measure it on a larger catalogue with
# the paper's 64 dimensions, where the overhead of a call is small. The towers, which all points share, are left out.


# %%
def milliseconds(request, n: int = 20) -> float:
    took = []
    for u in [0, *range(n)]:
        start = process_time()
        request(u)
        took.append(1000 * (process_time() - start))
    return float(np.median(took[1:]))


rng, rule, none = np.random.default_rng(seed), "power-spherical", LeftOut.of([[]])
directions, large = bench_serve.catalogue(n_large, rng)


def scan_ms(heads: int) -> float:
    query = bench_serve.requests(directions, heads, rule, rng)
    return milliseconds(lambda u: exact.top_k(query[u : u + 1], large, 100, none))


# %%
cached = bench_serve.codebook_of(directions, large, prototypes, rule, rng)
profile = rng.dirichlet(np.full(prototypes, 0.3), size=20)


def hybrid_ms(own: int, n: int = prototypes) -> float:
    """Half of π on the own heads; the first slate is compared with brute force."""
    asked, pi = bench_serve.requests(directions, own, rule, rng)[:20], profile / 2

    def beside(x):  # the search takes the prototypes themselves from the codebook
        return np.concatenate([np.zeros((20, n, *x.shape[2:]), x.dtype), x], 1)

    query = Query(*map(beside, (asked.heads, asked.log_weight, asked.kappa)), rule)
    best = hybrid.top_k(cached, query[:1], pi[:1], 100, none)
    assert (best.found == brute_force(best.query, large, 100, none).found).all(), "proved, so it has to be exact"
    return milliseconds(lambda u: hybrid.top_k(cached, query[u : u + 1], pi[u : u + 1], 100, none))


# %%
cost = {"global": milliseconds(lambda u: codebook.top_k(cached, profile[u : u + 1], 100, none, rule))}
cost |= {f"hybrid, {own} own": hybrid_ms(own) for own in OWN}
cost |= dict.fromkeys([f"residual {size}" for size in SIZES], scan_ms(prototypes)) | {"personal": scan_ms(k)}
pd.Series(cost, name="milliseconds per request").round(2).to_frame()

# %%
families = [("codebook alone", "global"), *(("hybrid", f"hybrid, {own} own") for own in OWN)]
families += [("residual", f"residual {size}") for size in SIZES] + [("personal", "personal")]
table = pd.DataFrame(
    [
        {"family": family, "setting": name.split(" ", 1)[-1], "ms": cost[name], "value": result[name].means["AUPRC"]}
        for family, name in families
    ]
)
plots.noted(plots.dials(table, "AUPRC"), f"{n_large:,} items")

# %% [markdown]
# And with more prototypes? A scan pays for every head, a hybrid for the own ones:

# %%
grows = {}
for n in (prototypes, 4 * prototypes, 16 * prototypes):
    cached = bench_serve.codebook_of(directions, large, n, rule, rng)
    profile = rng.dirichlet(np.full(n, 0.3), size=20)
    grows[n] = {"hybrid": hybrid_ms(OWN[-1], n), "scan of all heads": scan_ms(n + OWN[-1])}
grows = pd.DataFrame(grows).T.rename_axis("prototypes")
assert grows["hybrid"].iloc[-1] < grows["scan of all heads"].iloc[-1] / 2
grows.round(2)

# %% [markdown] tags=["lesson"]
# **What you should see.** The codebook costs a fraction of a millisecond. A hybrid pays for its own heads only: with
# 16 prototypes it takes about half of the scan of all its heads, with 64 a third or less, with 256 a fifth. But eight
# personal heads cost no more than 16 prototypes with four own heads, and are more accurate here. So a hybrid is for
# those who want many topics that can be read and steered, and accuracy too. The small residual costs most: all its
# heads move with the user, so nothing is known beforehand.

# %% [markdown]
# ## 4 · The codebook under its budget
#
# The paper leaves open how accurate the codebook is "under its precomputable serving budget". Two things can be cut:
# the length $L$ of the lists that are kept for each prototype, and the number of prototypes that a request looks at:
# the largest weights of $\pi_u$, made to sum to one again. *recall* is the share of the exact slate of 50 that is still
# found. AUPRC is that of the slate: a test item that is not in it counts as never found.

# %%
histories, targets = list(dataset.history(users, "test")), dataset.targets(users, "test")
seen = [dataset.sequence(u)[:-10] for u in users]
full = Retriever(point["global"], "codebook").retrieve(histories, 50, exclude=seen)


def largest(pi: np.ndarray, h: int) -> np.ndarray:
    kept = np.where(pi >= np.sort(pi, 1)[:, -h][:, None], pi, 0)
    return kept / kept.sum(1, keepdims=True)


# %%
rows = []
for L in (10, 30, 100, 300):
    short = Retriever(point["global"], "codebook", budget=L)
    for h in (1, 2, 4, prototypes):
        start, pi = process_time(), largest(full.pi, h)
        made = short.retrieve(histories, 50, pi, exclude=seen)
        took = 1000 * (process_time() - start) / len(users)
        recall = np.mean([np.isin(a, b).mean() for a, b in zip(full.items, made.items, strict=True)])
        precision = metrics.average_precision(made.items, targets).mean()
        rows.append({"L": L, "heads kept": h, "recall": recall, "AUPRC": precision, "ms": took})
budget = pd.DataFrame(rows)
whole_budget = budget[budget["heads kept"] == prototypes].set_index("L")
assert whole_budget["recall"].is_monotonic_increasing and budget["recall"].max() <= 1
plots.noted(plots.recall_by_budget(budget, "recall"), f"seed {seed}")

# %%
plots.noted(plots.recall_by_budget(budget, "AUPRC"), f"seed {seed}")

# %%
budget.pivot(index="L", columns="heads kept", values="ms").round(2)

# %% [markdown] tags=["lesson"]
# **What you should see.** Lists of 300 of the 4,782 items give the whole slate, in an eighth of the memory of the table
# of all densities; lists of 100 nearly all of it. What is cut from $\pi_u$ cannot be had back by longer lists: the
# largest prototype alone gives three fifths of the slate. AUPRC needs less than recall, because it depends on the first
# places of the slate. A request takes a fraction of a millisecond in all cases: here lists save memory, not time.

# %% [markdown]
# ## 5 · Cold start
#
# How much of a user has to be known? The towers get only the last 1, 2, 5 … items; the test items stay the same. The
# paper expects the global end to be friendlier to new users, since there are no heads to learn.

# %%
known, curves = np.array([1, 2, 5, 10, 50]), {}
ways = {
    "global": "codebook",
    f"hybrid, {OWN[-2]} own": "codebook",
    f"residual {SIZES[-1]}": "exact",
    "personal": "exact",
}
nobody, popular = {}, evaluate(build("mostpop", dataset), dataset, max_users=p.max_eval, quiet=True).means["R@50"]
for name, strategy in ways.items():
    server = Retriever(point[name], strategy)
    made = [server.retrieve([h[-m:] for h in histories], 50, exclude=seen) for m in known]
    assert made[-1].certified.all()
    curves[name] = np.array([metrics.recall(one.items, targets, 50).mean() for one in made])
    nobody[name] = metrics.recall(server.retrieve([[]] * len(users), 50, exclude=seen).items, targets, 50).mean()
plots.noted(plots.cold_start_curve(curves, known, "R@50", popular), f"seed {seed}")

# %%
start = pd.DataFrame(curves, index=known).T
start.insert(0, 0, pd.Series(nobody))
start.rename_axis(columns="items known").round(3)

# %% [markdown] tags=["lesson"]
# **What you should see.** From one item the codebook has nearly all it ever reaches, as the paper expects. Hybrid and
# residual do not keep this: with one or two items they are *below* the codebook, and catch up at five or ten. Their
# gate and heads have seen long histories only, and trust the heads too early. Personal heads are above the codebook
# from the first item in this world. Without history all points are below the most popular items.

# %% [markdown] tags=["lesson"]
# ## Exercises
#
# 1. A residual of size $s$ turns a head by at most $\arcsin s$. How could the cached lists of the prototypes still be
#    used, and why does this not help for $s = 0.5$?
#
# <details><summary>Answer</summary>
#
# If an item's angle to the prototype is $\theta$, its angle to the head is at least $\theta - \arcsin s$. So the
# density at that angle bounds the head's. For $s = 0.1$ the bound moves by 6°, for $s = 0.5$ by 30°: then nearly every
# item of the catalogue may be near the head, and the lists reject nothing.
# </details>
#
# 2. In the hybrid the own heads get most of $\pi_u$. What would a request cost if $\pi_u$ lay on the prototypes only?
#
# <details><summary>Answer</summary>
#
# The same scan: the own heads have to be bounded, whatever their weight is. But a request whose own heads all have
# weight 0, or less than the $K$-th best score needs, could be served as by the codebook. Steering does this:
# `Steering(forbid=[…])`.
# </details>
#
# 3. Train the hybrid with `k_shared=1`. Which model of the table does it resemble, and what is the prototype good for?
#
# <details><summary>Answer</summary>
#
# It is the personal model with one head for everybody. That head points to what everybody takes, so $\pi_u$ on it says
# how ordinary the next item is expected to be.
# </details>

# %%
record(
    "08_spectrum",
    {
        "users": dataset.n_users,
        **{f"R@50, {name}": round(of.means["R@50"], 4) for name, of in result.items()},
        **{f"AUPRC, {name}": round(of.means["AUPRC"], 4) for name, of in result.items()},
        "π on own heads": round(float(how_personal.loc[f"hybrid, {OWN[-1]} own", "π on own heads"]), 3),
        "heads differ by, personal": round(float(how_personal.loc["personal", "heads differ by"]), 3),
        "lists of 30, recall": round(float(whole_budget.loc[30, "recall"]), 3),
        "R@50 from one item, global": round(float(curves["global"][0]), 4),
        "R@50 from one item, personal": round(float(curves["personal"][0]), 4),
    },
)

# %% [markdown]
# **Next:** [`07_serving`](07_serving.ipynb) has the strategies and their proofs one by one, and steering. A sweep of
# both dials on MovieLens-1M: `bach sweep spectrum`, read by [`09_sweep_report`](09_sweep_report.ipynb).
