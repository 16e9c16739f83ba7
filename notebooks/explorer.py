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
# # Explorer · See a user's heads, change π_u, and watch the slate change
#
# **Question.** What does the model know about this user, and what would it recommend with another $\pi_u$?
#
# Run all cells (*Run → Run All Cells*), then use the controls. Find a user by number or by what they like, or clear the
# history and type another one (Enter adds the item that fits best). Drag a head's weight, forbid a head, switch between
# p-BACH, v-BACH and a global codebook, or click a bar to ask why that item is there. **CPU minutes:** 0.5.

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

from bachlib.experiment.stages import prepared, settings, trained
from bachlib.files import record
from bachlib.show import plots
from bachlib.show.explorer import Explorer

p = settings(globals())
dataset = prepared(p)

# %% [markdown]
# Three small models; models that another notebook has trained are loaded. For your own runs on one data set, replace
# the next two cells by `explorer = Explorer.of_runs("p-bach-…", "p-bach-global-…")`: the names of folders in
# `outputs/runs`, or their beginnings. Colours follow JupyterLab's theme; `plots.use("dark")` makes them always dark.

# %%
runs = {
    "p-BACH": trained("p-bach", dataset, p),
    "v-BACH": trained("v-bach", dataset, p),
    "global": trained("p-bach-global", dataset, p, k=prototypes),
}
dataset

# %% tags=["nbval-ignore-output"]
explorer = Explorer(runs, dataset, user=user)
explorer

# %% [markdown]
# **What you should see.** In the middle the heads with their names, $\pi_u$ and $\kappa$; the percentage beside a
# slider is the share of $\pi$ the head has now. On the right the slate, a bar per item, split by the heads that bring
# it. ★ marks items the user liked later, which the model has not seen. ↑, ↓ and *new* compare with the slate of the
# model's own $\pi_u$. Every slate is proved to be the best of all items.
#
# The same in code: all weight on the second head by $\pi_u$; below it the picture of the model's own slate.

# %%
session = explorer.session
before = session.slate()
first, second = np.argsort(-session.heads.pi, kind="stable")[[0, min(1, k - 1)]].tolist()
after = session.slate(session.steered({r: float(r == second) for r in range(k)}))
assert before.certified.all() and after.certified.all()
assert np.allclose(after.head_share[0, :, second], 1), "only one head has weight, so it should bring every item"
kept = len(set(before.items[0]) & set(after.items[0]))
f"{kept} of {session.K} items stay when head {second}, {session.heads.names[second]}, gets all of π_u"

# %%
explorer.picture()

# %% [markdown]
# Why the first item is there: the share of each head in its score.

# %%
why = session.why(int(before.items[0, 0]))
assert np.isclose(why.heads["share"].sum(), 1) and np.isclose(why.score, before.scores[0, 0], atol=1e-4)
why.heads.sort_values("share", ascending=False).round(2)

# %% [markdown]
# The largest weight halved, and all weights scaled to sum to one:

# %%
halved = session.steered({first: session.heads.pi[first] / 2})
plots.pi_before_after(session.heads.pi, halved, session.heads.names)

# %% [markdown] tags=["lesson"]
# ## Exercises
#
# These are about the planted world with the parameters above.
#
# 1. Of user 7's last 50 items 32 are Romance and three are Horror. Why does the head *Horror* have more than half of
#    $\pi_u$?
#
# <details><summary>Answer</summary>
#
# The three are the very last ones. In this world people stay with an interest for a while, and the gating tower has
# learnt this: $\pi_u$ says what comes next, not what was most frequent. The first two of the ten held-out items are
# Horror, too; none of the other eight is.
# </details>
#
# 2. Give the heads *Horror* and *Romance + Nature* of user 7 half of $\pi_u$ each and the others nothing. Is the slate
#    half and half?
#
# <details><summary>Answer</summary>
#
# No: *Romance + Nature* brings all 15 items. $\pi_u$ weights densities, and the slate takes the items where their sum
# is highest. The items nearest to *Romance + Nature* have cosines of 0.94 to 0.96 with it, those nearest to *Horror*
# 0.89 to 0.92. With *Romance + Nature* and *Heist* it is five and ten. To give a topic a share of the places, use caps
# (`07_serving`).
# </details>

# %%
record(
    "explorer",
    {
        "users": dataset.n_users,
        "largest π": round(float(session.heads.pi.max()), 2),
        "mean κ": round(float(session.heads.kappa.mean()), 1),
    },
)

# %% [markdown]
# **Next:** [`06_heads_and_pi`](06_heads_and_pi.ipynb) asks whether we can trust the names and the weights.
# [`07_serving`](07_serving.ipynb) shows how the slate is found and proved.
