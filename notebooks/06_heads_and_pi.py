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
# # 06 · Heads have names, and π_u is a profile that people can read
#
# **Question.** BACH gives a user heads $\mathbf u^{(r)}$, weights $\pi_u^{(r)}$ and concentrations $\kappa_r$. What
# does a head stand for? Can we read $\pi_u$, compare it between users, and trust it? Does $\kappa_r$ say how tight an
# interest is?
#
# **You need** `04_train` for where the heads come from. **CPU minutes:** one. Heads are numbered from 0, as in serving.
# The *What you should see* texts describe the planted world with the default parameters; another log has other names
# and numbers, and `bach run` leaves them out there.

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
user = 7

# %%
import numpy as np
import pandas as pd
from scipy.cluster.vq import kmeans2
from scipy.spatial.distance import cdist
from scipy.stats import spearmanr

from bachlib.evaluate import answers, diagnostics, meaning
from bachlib.experiment.stages import prepared, settings, trained
from bachlib.files import record
from bachlib.serve import Retriever
from bachlib.show import plots
from bachlib.show.maps import layout, regions
from bachlib.show.steering import sliders

p = settings(globals())
dataset = prepared(p)

# %%
runs = {
    "personal": trained("p-bach", dataset, p),
    "codebook": trained("p-bach-global", dataset, p, k=prototypes),
    "triangle": trained("p-bach-global", dataset, p, k=3),
}
models = {name: run.model for name, run in runs.items()}
drawn = np.random.default_rng(seed).permutation(dataset.n_users)[:1000]
users = np.union1d(drawn, [user])  # the users of this notebook
me = int(np.searchsorted(users, user))
encoded = {name: diagnostics.encode_users(model, dataset, users) for name, model in models.items()}
pi = {name: e.log_pi.exp().numpy() for name, e in encoded.items()}
dataset, {name: tuple(e.heads.shape) for name, e in encoded.items()}

# %% [markdown]
# We use two models, and a small third one for a triangle plot. If another notebook has trained them, they are loaded.
# *Personal* is p-BACH: every user has their own heads. *Codebook* is p-bach-global: all users share the heads, called
# prototypes, and differ only in $\pi_u$. Each is *one* training, with the seed of the parameters. We use at most 1,000
# users.
#
# ## 1 · A name for each head
#
# A head's softmax over the catalogue (eq. 12) gives $p_r(g)$, the share of its items that have topic $g$. The topics
# are the genres. If a log has no genres, or thousands, the topics are 16 clusters of items that the same people like.
# $p(g)$ is the share of topic $g$ among all likes. The ratio is called the *lift*, and it gives the head its name:
#
# $$\mathrm{lift}_r(g) = \frac{p_r(g)}{p(g)}, \qquad
# \mathrm{name}_r = \mathrm{argmax}_g\; p_r(g) \log \mathrm{lift}_r(g).$$

# %%
topics = meaning.topics_of(dataset)
of_heads = {
    name: diagnostics.interest_of_heads(models[name], e.heads, topics.member).numpy() for name, e in encoded.items()
}
share = {name: meaning.over_users(of_heads[name], pi[name]) for name in models}  # (k, topics)
names = {name: meaning.head_names(share[name], topics) for name in models}
names["codebook"]

# %%
plots.head_lift(meaning.lift(share["codebook"], topics.likes), names["codebook"], topics.names)

# %% [markdown] tags=["lesson"]
# **What you should see.** Most prototypes have one warm cell: six to thirteen times as much of one genre as people like
# on average. The model never saw the genres. Jazz, Noir and Sports share a prototype, and one prototype is *mixed*: a
# little of everything.

# %% [markdown]
# The heads of the personal model are different. Slot $r$ is a token that reads *one user's* history, so it may stand
# for something else in every user. For each slot we compare two numbers: the largest lift of the average over users,
# and the average of each user's largest lift. The first is never above the second. The further it is below, the more
# mixed the slot is:

# %%
slot = meaning.lift(share["personal"], topics.likes).max(1)
own = meaning.lift(of_heads["personal"], topics.likes).max(2)  # (users, k)
own = (pi["personal"] * own).sum(0) / pi["personal"].sum(0)
assert (own > slot - 1e-3).all(), "a mean of maxima is not below the maximum of the means"
pd.DataFrame({"slot": names["personal"], "lift of the slot": slot, "lift for its users": own}).round(1)

# %% [markdown]
# So we can name the heads of a codebook, or the heads of *one* user. For the user of the parameters cell:

# %%
own_names = meaning.head_names(of_heads["personal"][me], topics)
mine = pd.DataFrame({"name": own_names, "π": pi["personal"][me], "κ": encoded["personal"].kappa[me].tolist()})
mine.sort_values("π", ascending=False).round(2)

# %% [markdown]
# ## 2 · A map of items and heads
#
# UMAP draws the item embeddings in the plane. Neighbours by cosine stay neighbours; distances between far groups have
# no meaning. A head is placed among the items nearest to it. Of a large catalogue only the 6,000 most liked items are
# drawn. The layout is computed once and cached in `outputs/layouts`.

# %%
popular = np.sort(np.argsort(-dataset.items["n_users"].to_numpy(), kind="stable")[:6000])
items = models["codebook"].items().detach().numpy()[popular]
heads = encoded["codebook"].heads[0].numpy()  # all users share them
xy, head_xy = layout(items, heads, seed)
assert (layout(items, heads, seed)[0] == xy).all(), "a cached layout is read again"
kind = topics.first  # one topic per item
titles = np.array(dataset.titles)
words = [", ".join(np.array(topics.names)[row > 0]) for row in topics.member]
told = np.array([f"{title}<br>{word}" for title, word in zip(titles, words, strict=True)])
xy.shape, head_xy.shape

# %% tags=["picture-map"]
of, weight = encoded["codebook"], pi["codebook"].mean(0)
typical = of._replace(heads=of.heads[:1], log_pi=of.log_pi.exp().mean(0, keepdim=True).log(), kappa=of.kappa[:1])
best_head = diagnostics.explained(models["codebook"], typical, popular[None]).gamma[0].argmax(1)
closest = np.argsort(-items @ heads.T, axis=0)[:8].T
title = f"{prototypes} prototypes stand for {len(set(share['codebook'].argmax(1)))} topics; the model never saw topics"
words = regions(xy, kind[popular], topics.names)
plots.map_of_items(xy, best_head, told[popular], head_xy, names["codebook"], weight, closest, words, title=title)

# %% [markdown] tags=["lesson"]
# **What you should see.** Islands of one genre, with a star in most of them.

# %% [markdown]
# Hover over a dot for its title. How much of this structure is really in the embedding? We count how many of an item's
# ten nearest items have its topic: in the model's own dimensions, on the map, and by chance:


# %%
def same_topic(points: np.ndarray, kind: np.ndarray, n: int = 10) -> float:
    some = np.random.default_rng(seed).permutation(np.flatnonzero(kind >= 0))[:500]
    near = np.argsort(cdist(points[some], points), axis=1)[:, 1 : n + 1]
    return float((kind[near] == kind[some, None]).mean())


there = kind[popular]
chance = float(((np.bincount(there[there >= 0]) / len(there)) ** 2).sum())
purity = {"model": same_topic(items, there), "map": same_topic(xy, there), "chance": chance}
purity

# %% [markdown]
# The same map for one user of the personal model. Rings are the history. Stars are the user's own heads, sized by
# $\pi_u$. Lines lead to the items that each head brings into the slate.

# %%
retriever = Retriever(runs["personal"], "exact")
history = dataset.history([user], "test")[0]
history = history[history >= 0]  # a short one is padded
slate = retriever.retrieve([np.concatenate(dataset.split(user)[:2])], 40)  # without the user's earlier items
shown = np.union1d(popular, np.concatenate([history, slate.items[0]]))
place, own_place = layout(
    models["personal"].items().detach().numpy()[shown], encoded["personal"].heads[me].numpy(), seed
)
brings = [np.searchsorted(shown, slate.items[0][slate.head_share[0].argmax(1) == r]) for r in range(k)]
alone = diagnostics.encode_users(models["personal"], dataset, [user])
mine_is = diagnostics.explained(models["personal"], alone, shown[None]).gamma[0].argmax(1)
words, rings = regions(place, kind[shown], topics.names), np.searchsorted(shown, history)
title = f"User {user}: the slate of 40 comes from {sum(len(b) > 0 for b in brings)} of {k} heads"
plots.map_of_items(place, mine_is, told[shown], own_place, own_names, pi["personal"][me], brings, words, rings, title)

# %% [markdown] tags=["lesson"]
# **What you should see.** Most stars are on islands that have rings. The others are anywhere; they have little weight.
# The largest star need not be where most rings are. User 7 has watched mostly Romance, but Horror last, and $\pi_u$
# follows the last items (section 4 shows them in order).

# %% [markdown]
# ## 3 · π_u as a profile
#
# Four users, from the most focused to the broadest. The order is by the number of heads over which $\pi_u$ spreads,
# $e^{H(\pi_u)}$:

# %%
spread = np.exp(-(pi["codebook"] * np.log(np.maximum(pi["codebook"], 1e-30))).sum(1))
chosen = np.argsort(spread)[np.linspace(0, len(spread) - 1, 4).astype(int)]
said = f"From {spread.min():.1f} to {spread.max():.1f} effective heads: π<sub>u</sub> of four users"
plots.proportions(pi["codebook"][chosen], names["codebook"], said, users[chosen].tolist())

# %% [markdown]
# With three heads a profile is a point in a triangle.

# %% [markdown] tags=["lesson"]
# (Here one of the three has almost no weight, so all users are on one side.)

# %%
plots.pi_ternary(pi["triangle"], names["triangle"], [f"user {u}" for u in users])

# %% [markdown]
# Where all users share the heads, users can be clustered by $\pi_u$. We cluster $\sqrt{\pi_u}$: its Euclidean distance
# is the Hellinger distance of $\pi_u$. Each user is a thin column, as in the admixture plots of population genetics:

# %% tags=["picture-admixture"]
_, found = kmeans2(np.sqrt(pi["codebook"]), 8, seed=seed, minit="++")
plots.pi_admixture(pi["codebook"], found, names["codebook"])

# %% [markdown]
# **What you should see.** Each cluster shares one main colour, and its users differ in the rest. Are these clusters
# real? Two users of one cluster should also agree in something that the model never saw: the planted $\pi$, or on a
# real log the topics of their items:

# %%
truth = meaning.topics_of_users(dataset, topics)[users]
agree = np.stack([np.minimum(row, truth).sum(1) for row in truth])  # overlap of two users
together = found[:, None] == found[None]
other = ~np.eye(len(users), dtype=bool)
inside, across = agree[together & other].mean(), agree[~together].mean()
f"overlap of two users of one cluster {inside:.2f}, of two clusters {across:.2f}"

# %% [markdown]
# ## 4 · Which head explains which item
#
# $\gamma_r(i) \propto \pi_u^{(r)}\,\sigma_r(i)$ (eq. 19) divides every item of a user among the heads. The figure shows
# the history, which the towers have read, and the ten held-out items, which they have not.

# %%
later = dataset.split(user)[2][:10]
sequence = np.concatenate([history, later])
one = diagnostics.explained(models["personal"], alone, sequence[None])
assert np.allclose(one.gamma.sum(-1), 1, atol=1e-5)
gamma = diagnostics.held_out(models["personal"], dataset, [user]).gamma[:, : len(later)]
assert np.allclose(one.gamma[:, -len(later) :], gamma, atol=1e-5)
plots.history_strip(one.gamma[0], titles[sequence], own_names, held_out=len(later))

# %% [markdown] tags=["lesson"]
# **What you should see.** Runs of one colour: people stay with an interest for a while. Of user 7's 50 items 32 are
# Romance and the last three are Horror; the slate below is all Horror. The user's next items were two more of Horror
# and four of Heist, of which the history has one. So $\pi_u$ is right on average (section 5) and may be wrong for ten
# items.

# %%
share_of = slate.head_share[0, :15]
relative = np.exp(slate.scores[0, :15] - slate.scores[0, 0])
plots.slate_by_head(share_of, relative, titles[slate.items[0, :15]], own_names)

# %% [markdown]
# ## 5 · Can we trust π_u?
#
# If $\pi_u$ is right, head $r$ explains a share $\pi_u^{(r)}$ of what the user likes next: for given
# responsibilities, the prior term of the ELBO (eq. 21) is largest where $\pi_u$ is their mean. The figure groups the
# predicted shares into bins and shows the observed share on held-out items:

# %%
held = {name: diagnostics.held_out(models[name], dataset, users) for name in ("personal", "codebook")}
checked = {name: diagnostics.pi_calibration(of) for name, of in held.items()}
ece = {name: made.ece for name, made in checked.items()}
plots.calibration_curves({name: made.bins for name, made in checked.items()}, ece, "π<sub>u</sub>")

# %% [markdown]
# **What you should see.** Dots near the diagonal if $\pi_u$ is calibrated. But this test is weak:
# $\gamma \propto \pi_u\sigma$ follows any $\pi_u$, so an even $\pi$ without information would look perfect. We use two
# controls. The first is another user's $\pi_u$, which is as confident but wrong. The second is the likelihood of the
# held-out items (eq. 14), compared with one $\pi$ for all users.

# %%
controls = answers.calibration_controls(held, seed)
controls.round(3)

# %% [markdown] tags=["lesson"]
# **What you should see.** With another user's $\pi$ the error is three to six times as large. The user's own $\pi_u$ is
# worth a third of a nat per held-out item in the codebook, where only $\pi_u$ is personal, and a tenth of a nat with
# personal heads.

# %% [markdown]
# ## 6 · κ and how tight a head's items are
#
# The paper's intuition is that $\kappa_r$ says how tightly an interest's items lie around the head. Each dot is a user
# and a head that explains at least five items of the history:

# %%
past = dataset.history(users, "test")
explained = {name: diagnostics.explained(models[name], encoded[name], past) for name in ("personal", "codebook")}
tight, kappa = explained["personal"].tightness(), encoded["personal"].kappa.numpy()
who, head = np.nonzero(~np.isnan(tight))
correlation = float(spearmanr(kappa[who, head], tight[who, head]).statistic)
plots.kappa_and_tightness(kappa[who, head], tight[who, head], head, [f"slot {r}" for r in range(k)], correlation)

# %% [markdown] tags=["lesson"]
# **What you should see.** A narrow band of $\kappa$, 22 to 25, and the tightest heads have the *smallest* $\kappa$.
# This world cannot settle the question: all its interests are equally tight by construction. On MovieLens-1M the rank
# correlation was $-0.24$ (`LOG.md`), and $+0.49$ in a short training with four heads: not even the sign is the same.

# %% [markdown]
# $\kappa$ enters the ELBO only through $\mathrm{KL}(\gamma\,\|\,\gamma^{\mathrm{con}})$, so it is fitted to how sharply
# the *softmax* with $1/\tau$ separates the heads. Read $\kappa_r$ as the sharpness of the routing.
#
# ## 7 · Recovered and planted interests
#
# In the planted world every item belongs to an interest, its genre, which the model never saw. Which head explains the
# items of an interest? On a real log we ask the same for topics.

# %%
kinds = np.where(past >= 0, kind[past], -1)
overlap = explained["codebook"].by_kind(kinds, len(topics.names))
likes = np.bincount(kinds[kinds >= 0], minlength=len(topics.names))
plots.recovered_interests(overlap, names["codebook"], topics.names, likes, "topics")

# %% [markdown]
# The model expects topic $g$ with the share $\sum_r \pi_u^{(r)} p_r(g)$. Its overlap with the planted $\pi_u$ (on a
# real log: with the topics of the user's items) is 1 if they agree. *Covered* is the share of the user's topics that
# have their own head.

# %%
parts = topics.member / np.maximum(topics.member.sum(1, keepdims=True), 1)  # several topics share an item
of_topics = {name: diagnostics.interest_of_heads(models[name], e.heads, parts) for name, e in encoded.items()}
recovered = {name: diagnostics.recovery(of_topics[name], e.log_pi, truth) for name, e in encoded.items()}
means = {n: {"covered": r.covered.mean(), "overlap with π": r.overlap.mean()} for n, r in recovered.items()}
pd.DataFrame(means).T.round(2)

# %%
figure = plots.pi_recovered({name: recovered[name].weights for name in ("personal", "codebook")}, truth)
if source != "planted":
    told = ", ".join(f"{name} {row['overlap with π']:.2f}" for name, row in means.items() if name != "triangle")
    figure.update_xaxes(title="share of a topic among the user's items")
    figure.update_layout(title_text=f"Overlap with the topics of a user's items: {told}")
figure

# %% [markdown] tags=["lesson"]
# **What you should see.** Most of the sixteen planted interests have a head that explains the larger part of their
# items. Sixteen prototypes cover more interests than eight personal heads (0.57 against 0.44). But personal heads know
# better *how much* of an interest a user wants: the overlap with the planted $\pi_u$ is 0.59 against 0.53. Three heads
# are too few for sixteen interests by both measures.

# %% [markdown]
# ## 8 · Steer π_u
#
# What does a slate become when $\pi_u$ changes? Below is the slate of one user of the personal model. In the page that
# `bach run` writes of this notebook, sliders for two users stand in its place.

# %%
sliders(runs["personal"], dataset, users=2)

# %% [markdown] tags=["lesson"]
# ## Exercises
#
# 1. Train with `prototypes = 8` instead of 16. How many interests are covered now? With which model do you have to
#    compare to say that personal heads are better than shared ones?
#
# <details><summary>Answer</summary>
#
# *Covered* falls from 0.57 to 0.31, below the 0.44 of eight personal heads. Compare at equal $k$: *covered* takes the
# best of all heads, so more heads tend to look better.
# </details>
#
# 2. Why can a personal head without weight be anywhere on the map?
#
# <details><summary>Answer</summary>
#
# Its gradient is $\gamma_r \approx 0$ times that of its softmax (eq. 21), so nothing moves it. It does no harm either,
# because it is served with the same small weight.
# </details>
#
# 3. We clustered $\sqrt{\pi_u}$ of the codebook. Why would clustering the personal model's $\pi_u$ be a mistake?
#
# <details><summary>Answer</summary>
#
# Two users may have the same weight on slot 3, and slot 3 may mean different interests for them. First turn the weights
# into topics: the model expects topic $g$ with the share $\sum_r \pi_u^{(r)} p_r(g)$, which can be compared.
# </details>

# %%
record(
    "06_heads_and_pi",
    {
        "users": dataset.n_users,
        "prototypes per genre": round(prototypes / len(set(share["codebook"].argmax(1).tolist())), 2),
        "items with a neighbour's genre, model": round(purity["model"], 2),
        "overlap inside a cluster": round(float(inside), 3),
        "overlap across clusters": round(float(across), 3),
        **{f"calibration error, {name}": round(value, 3) for name, value in ece.items()},
        **{f"overlap with π, {name}": round(float(row["overlap with π"]), 3) for name, row in means.items()},
        "largest κ": round(float(kappa.max()), 1),
    },
)

# %% [markdown]
# **Next:** [`07_serving`](07_serving.ipynb) ranks items with these heads and changes $\pi_u$ by hand. The
# [`explorer`](explorer.ipynb) does both with the mouse. [`13_ablations`](13_ablations.ipynb) asks how far $\gamma$ is
# from $\gamma^{\mathrm{con}}$, what calibrates $\pi_u$, and whether the heads know what a user likes later.
