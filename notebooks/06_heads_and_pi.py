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
# # 06 · Heads have names, and π_u is a profile one can read
#
# **Question.** BACH gives a user heads $\mathbf u^{(r)}$, weights $\pi_u^{(r)}$ and concentrations $\kappa_r$. What
# does a head stand for? Can $\pi_u$ be read, compared between users, and believed? Does $\kappa_r$ say how tight an
# interest is?
#
# **You need** `04_train` for where the heads come from. **CPU minutes:** one. Heads count from 0, as in serving.

# %% tags=["parameters"]
source = "planted"
n_users = 700
k = 8
prototypes = 16
d = 8
epochs = 2
batch_size = 128
n_negatives = 256
learning_rate = 0.01
dropout = 0.0
seed = 0

# %%
from time import perf_counter

import numpy as np
import pandas as pd
from scipy.cluster.vq import kmeans2
from scipy.stats import spearmanr

from bachlib.data import planted, prepare
from bachlib.data.download import locate
from bachlib.evaluate import diagnostics, meaning
from bachlib.model.methods import build
from bachlib.records import output_dir, record
from bachlib.serve import Retriever
from bachlib.show import plots
from bachlib.show.layout import layout, regions
from bachlib.train import fit

# %%
path = locate(source) or planted.write_world(n_users=n_users, seed=seed)
dataset = prepare(source, path, output_dir("data", f"06-{source}-{n_users}"), quiet=True)
settings = dict(epochs=epochs, batch_size=batch_size, n_negatives=n_negatives, learning_rate=learning_rate, seed=seed)


def train(name: str, k: int):
    model = build(name, dataset, k, seed=seed, d=d, ff=4 * d, item_width=4 * d, dropout=dropout)
    return fit(model, dataset, settings, output_dir("runs", f"06-{name}-{k}-{source}"), fresh=True, quiet=True)


runs = {"personal": train("p-bach", k), "codebook": train("p-bach-global", prototypes)}
runs["triangle"] = train("p-bach-global", 3)
models = {name: run.model for name, run in runs.items()}
users = np.arange(dataset.n_users)
encoded = {name: diagnostics.encode_users(model, dataset, users) for name, model in models.items()}
pi = {name: e.log_pi.exp().numpy() for name, e in encoded.items()}
dataset, {name: tuple(e.heads.shape) for name, e in encoded.items()}

# %% [markdown]
# Two models, and a small third one for a triangle. *Personal* is p-BACH: every user has heads of their own. *Codebook*
# is p-bach-global: all users share the prototypes and differ in $\pi_u$ only.
#
# ## 1 · A name for each head
#
# A head's softmax over the catalogue (eq. 12) gives $p_r(g)$, the share of its items that have genre $g$. Against the
# share $p(g)$ among all likes that is the *lift*
#
# $$\mathrm{lift}_r(g) = \frac{p_r(g)}{p(g)}, \qquad \mathrm{name}_r = \arg\max_g\; p_r(g) \log \mathrm{lift}_r(g).$$

# %%
genres = meaning.genres_of(dataset)
of_heads = {
    name: diagnostics.interest_of_heads(models[name], e.heads, genres.member).numpy() for name, e in encoded.items()
}
share = {name: meaning.over_users(of_heads[name], pi[name]) for name in models}  # (k, genres)
names = {name: meaning.head_names(share[name], genres) for name in models}
names["codebook"]

# %%
plots.head_lift(meaning.lift(share["codebook"], genres.likes), names["codebook"], genres.names)

# %% [markdown]
# **What you should see.** Most prototypes are one warm cell: five to fifteen times as much of one genre as people like
# on average. Nobody told the model about genres. A genre without a cell of its own is shared out among others.
#
# The slots of the personal model are another matter. Slot $r$ is a token that reads *your* history, and may stand for
# something else for everybody. Averaged over users a slot says less than the same slot of one user:

# %%
slot = meaning.lift(share["personal"], genres.likes).max(1)
own = meaning.lift(of_heads["personal"], genres.likes).max(2)  # (users, k)
own = (pi["personal"] * own).sum(0) / pi["personal"].sum(0)
assert (own > slot).mean() > 0.7, "a user's own heads should be purer than the slots' averages"
pd.DataFrame({"slot": names["personal"], "lift of the slot": slot, "lift for its users": own}).round(1)

# %% [markdown]
# So names are for a codebook's heads, or for the heads of *one* user. For user 7:

# %%
u = 7
own_names = meaning.head_names(of_heads["personal"][u], genres)
mine = pd.DataFrame({"name": own_names, "π": pi["personal"][u], "κ": encoded["personal"].kappa[u].numpy()})
mine.sort_values("π", ascending=False).round(2)

# %% [markdown]
# ## 2 · A map of items and heads
#
# UMAP draws the item embeddings in the plane: neighbours by cosine stay neighbours, distances between far groups mean
# nothing. A head stands among the items nearest to it. The layout is computed once and kept in `outputs/layouts`.

# %%
items = models["codebook"].items().detach().numpy()
heads = encoded["codebook"].heads[0].numpy()  # the same for everybody
xy, head_xy = layout(items, heads, seed)
start = perf_counter()
again, _ = layout(items, heads, seed)
assert (again == xy).all() and perf_counter() - start < 1, "a layout that is there is read, not computed"
kind = genres.first  # one genre per item
xy.shape, head_xy.shape

# %% tags=["picture-map"]
log_sigma = np.log1p(items @ heads.T) * encoded["codebook"].kappa[0].numpy()  # power-spherical, eq. 18
best_head = (log_sigma + np.log(pi["codebook"].mean(0))).argmax(1)
closest = np.argsort(-items @ heads.T, axis=0)[:8].T
titles = dataset.items["title"].astype(str).to_numpy()
told = [f"{title}<br>{', '.join(g)}" for title, g in zip(titles, dataset.items["genres"], strict=True)]
title = f"{prototypes} prototypes stand in {len(set(share['codebook'].argmax(1)))} genres nobody told the model of"
weight = pi["codebook"].mean(0)
plots.map_of_items(
    xy, best_head, told, head_xy, names["codebook"], weight, closest, regions(xy, kind, genres.names), title=title
)

# %% [markdown]
# **What you should see.** Islands of one genre, and a star in nearly each. Hover over a dot for its title. How much of
# this is really in the embedding? Of an item's ten nearest items, the share that has its genre, in the model's own
# dimensions, on the map, and by chance:


# %%
def same_genre(points: np.ndarray, n: int = 10) -> float:
    some = np.random.default_rng(seed).choice(len(points), min(500, len(points)), replace=False)
    distance = ((points[some, None] - points[None]) ** 2).sum(-1)
    near = np.argsort(distance, axis=1)[:, 1 : n + 1]
    return float((kind[near] == kind[some, None]).mean())


chance = float((np.bincount(kind[kind >= 0]) / len(kind)) @ (np.bincount(kind[kind >= 0]) / len(kind)))
purity = {"model": same_genre(items), "map": same_genre(xy), "chance": chance}
assert purity["map"] > 3 * chance and abs(purity["map"] - purity["model"]) < 0.15
purity

# %% [markdown]
# The same map for one user of the personal model: rings are the history, stars the user's own heads sized by their
# $\pi_u$, lines lead to what each head would bring.

# %%
personal_items, own_heads = models["personal"].items().detach().numpy(), encoded["personal"].heads[u].numpy()
place, own_place = layout(personal_items, own_heads, seed)
retriever = Retriever(runs["personal"], "exact")
history = dataset.history([u], "test")[0]
slate = retriever.retrieve([dataset.sequence(u)[:-10]], 40)  # all the user had is left out
brings = [slate.items[0][slate.head_share[0].argmax(1) == r] for r in range(k)]
log_sigma = np.log1p(personal_items @ own_heads.T) * encoded["personal"].kappa[u].numpy()
mine_is = (log_sigma + np.log(pi["personal"][u])).argmax(1)
words = regions(place, kind, genres.names)
title = f"User {u}: {sum(len(b) > 0 for b in brings)} heads bring the slate of 40"
plots.map_of_items(place, mine_is, told, own_place, own_names, pi["personal"][u], brings, words, history, title)

# %% [markdown]
# **What you should see.** Heads with weight stand where rings are; those without stand anywhere.
#
# ## 3 · π_u as a profile
#
# Four users from the most focused to the broadest, by how many heads their $\pi_u$ spreads over, $e^{H(\pi_u)}$:

# %%
spread = np.exp(-(pi["codebook"] * np.log(np.maximum(pi["codebook"], 1e-30))).sum(1))
chosen = np.argsort(spread)[np.linspace(0, len(spread) - 1, 4).astype(int)]
said = f"From {spread.min():.1f} to {spread.max():.1f} effective heads: π<sub>u</sub> of four users"
plots.proportions(pi["codebook"][chosen], names["codebook"], said, chosen.tolist())

# %% [markdown]
# With three heads a profile is a point in a triangle:

# %%
plots.pi_ternary(pi["triangle"], names["triangle"], [f"user {user}" for user in users])

# %% [markdown]
# Users can be clustered by $\pi_u$ where all share the heads. With square roots Euclid's distance is Hellinger's. Each
# user is a thin column, as in the admixture plots of population genetics:

# %% tags=["picture-admixture"]
_, found = kmeans2(np.sqrt(pi["codebook"]), 8, seed=seed, minit="++")
plots.pi_admixture(pi["codebook"], found, names["codebook"])

# %% [markdown]
# **What you should see.** Clusters with a colour in common and a tail of their own. Is that the model's fancy? Two
# users of one cluster should also agree in what nobody showed it: the planted $\pi$, or on a real log the genres of the
# held-out items.

# %%
later = genres.member[dataset.targets(users, "test")].mean(1)
truth = dataset.truth.pi if source == "planted" else later / later.sum(1, keepdims=True)
agree = np.minimum(truth[:, None], truth[None]).sum(-1)  # overlap of two users
together = found[:, None] == found[None]
np.fill_diagonal(together, False)
inside, across = agree[together].mean(), agree[found[:, None] != found[None]].mean()
assert inside > across
f"overlap of two users of one cluster {inside:.2f}, of two clusters {across:.2f}"

# %% [markdown]
# ## 4 · Which head explains which item
#
# $\gamma_r(i) \propto \pi_u^{(r)}\,\sigma_r(i)$ (eq. 19) shares every item of a user out among the heads: the history
# that the towers have read, and the ten held-out items they have not.

# %%
sequence = np.concatenate([history[history >= 0], dataset.targets([u], "test")[0]])
one = diagnostics.explained(
    models["personal"], diagnostics.encode_users(models["personal"], dataset, users[[u]]), sequence[None]
)
assert np.allclose(one.gamma.sum(-1), 1, atol=1e-5)
assert np.allclose(one.gamma[:, -10:], diagnostics.held_out(models["personal"], dataset, users[[u]]).gamma, atol=1e-5)
plots.history_strip(one.gamma[0], titles[sequence], own_names, held_out=10)

# %% [markdown]
# **What you should see.** Runs of one colour: people stay with an interest for a while. The colours of the held-out
# items are those of the history.

# %%
share_of = slate.head_share[0, :15]
relative = np.exp(slate.scores[0, :15] - slate.scores[0, 0])
plots.slate_by_head(share_of, relative, titles[slate.items[0, :15]], own_names)

# %% [markdown]
# ## 5 · Can it be believed?
#
# If $\pi_u$ is right, head $r$ explains a share $\pi_u^{(r)}$ of what the user goes on to like (the fixed point of the
# M-step, eq. 22). In bins of the promised share, what came true on held-out items:

# %%
held = {name: diagnostics.held_out(models[name], dataset, users) for name in ("personal", "codebook")}
checked = {name: diagnostics.pi_calibration(of) for name, of in held.items()}
ece = {name: made.ece for name, made in checked.items()}
plots.calibration_curves({name: made.bins for name, made in checked.items()}, ece, "π<sub>u</sub>")

# %% [markdown]
# **What you should see.** Dots near the diagonal. But beware: $\gamma \propto \pi_u\sigma$ follows whatever $\pi_u$ is
# promised, so that an even $\pi$, which says nothing, would look perfect. Two controls: somebody else's $\pi_u$, which
# is as bold as one's own but wrong, and the likelihood of the held-out items (eq. 14) against a $\pi$ that is the same
# for everybody.

# %%
rng = np.random.default_rng(seed)
swapped = {name: of._replace(log_pi=of.log_pi[rng.permutation(len(users))]) for name, of in held.items()}
the_same = {name: of._replace(log_pi=of.log_pi.exp().mean(0).log().expand_as(of.log_pi)) for name, of in held.items()}
controls = pd.DataFrame(
    {
        "error": ece,
        "error with another user's π": {name: diagnostics.pi_calibration(of).ece for name, of in swapped.items()},
        "nats that π_u is worth": {
            name: float((held[name].log_likelihood - the_same[name].log_likelihood).mean()) for name in held
        },
    }
)
assert (controls["error"] < controls["error with another user's π"] / 3).all()
assert (controls["nats that π_u is worth"] > 0.05).all()
controls.round(3)

# %% [markdown]
# **What you should see.** Another user's $\pi$ is wrong by several times as much. One's own is worth half a nat on
# every held-out item in the codebook, where it is all that is personal, and a tenth of one beside personal heads.
#
# ## 6 · κ and how tight a head's items are
#
# The paper's intuition is that $\kappa_r$ says how tightly an interest's items lie around the head. For each user and
# head that explains at least five items of the history:

# %%
past = dataset.history(users, "test")
explained = {name: diagnostics.explained(models[name], encoded[name], past) for name in ("personal", "codebook")}
tight, kappa = explained["personal"].tightness(), encoded["personal"].kappa.numpy()
who, head = np.nonzero(~np.isnan(tight))
correlation = float(spearmanr(kappa[who, head], tight[who, head]).statistic)
plots.kappa_and_tightness(kappa[who, head], tight[who, head], head, [f"slot {r}" for r in range(k)], correlation)

# %% [markdown]
# **What you should see.** Hardly a relation, in a narrow band of $\kappa$. This world cannot settle it: all its
# interests are equally tight by construction. On MovieLens-1M the rank correlation was $-0.24$ (`LOG.md`), against the
# intuition, too. The derivation agrees: $\kappa$ enters the ELBO only through
# $\mathrm{KL}(\gamma\,\|\,\gamma^{\mathrm{con}})$, so it is fitted to how sharply the *softmax* with $1/\tau$ tells
# heads apart. Read $\kappa_r$ as the sharpness of the routing.
#
# ## 7 · Recovered and true
#
# In the planted world every item belongs to an interest that the model was never told. Which head explains an
# interest's items?

# %%
interest = dataset.truth.item_interest if source == "planted" else kind
true_names = list(map(str, dataset.truth.genres)) if source == "planted" else genres.names
kinds = np.where(past >= 0, interest[past], -1)
overlap = explained["codebook"].by_kind(kinds, len(true_names))
likes = np.bincount(kinds[kinds >= 0], minlength=len(true_names))
what = "planted interests" if source == "planted" else "genres"
plots.recovered_interests(overlap, names["codebook"], true_names, likes, what)

# %%
of_interest = {name: diagnostics.interest_of_heads(models[name], e.heads, interest) for name, e in encoded.items()}
recovered = {name: diagnostics.recovery(of_interest[name], e.log_pi, truth) for name, e in encoded.items()}
means = {n: {"covered": r.covered.mean(), "overlap with π": r.overlap.mean()} for n, r in recovered.items()}
assert means["personal"]["overlap with π"] > means["triangle"]["overlap with π"]
pd.DataFrame(means).T.round(2)

# %%
plots.pi_recovered({name: recovered[name].weights for name in ("personal", "codebook")}, truth)

# %% [markdown]
# **What you should see.** Most planted interests have a head that explains the larger part of their items. Sixteen
# prototypes cover more interests than eight personal heads, but the personal ones know better *how much* of an interest
# a user wants: the overlap with the planted $\pi_u$ is higher. Three heads for sixteen interests are too few for
# either.
#
# ## Exercises
#
# 1. Train with `prototypes = 8` instead of 16. How many interests are covered now, and which model do you have to
#    compare with to say that personal heads are better than shared ones?
#
# <details><summary>Answer</summary>
#
# *Covered* falls from about 0.6 to 0.35, below the 0.47 of eight personal heads. Compare at equal $k$: *covered* takes
# the best of all heads, so more heads always look better in it.
# </details>
#
# 2. Why does a personal head without weight stand anywhere on the map?
#
# <details><summary>Answer</summary>
#
# Its gradient is $\gamma_r \approx 0$ times that of its softmax (eq. 21): nothing pulls it. It costs nothing either,
# since it is served with the same small weight.
# </details>
#
# 3. Clusters were made from $\sqrt{\pi_u}$ of the codebook. Why would clustering the personal model's $\pi_u$ be a
# mistake?
#
# <details><summary>Answer</summary>
#
# Two users may have the same weight on slot 3 and mean different interests by it. Translate first: what the model
# expects of genre $g$ is $\sum_r \pi_u^{(r)} p_r(g)$, which can be compared.
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
    model=runs["personal"].folder,
)

# %% [markdown]
# **Next:** [`07_serving`](07_serving.ipynb) serves by these heads and steers $\pi_u$ by hand; the
# [`explorer`](explorer.ipynb) does both with the mouse.
