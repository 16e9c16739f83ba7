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
# # Explorer · Look at somebody's heads, move π_u, watch the slate
#
# **Question.** What does the model see in this person, and what would it show if $\pi_u$ were another one?
#
# Run all cells (*Run → Run All Cells*), then use the controls. Find a user by number or by what they like, or type a
# history of your own; drag a head's weight, forbid a head, switch between p-BACH, v-BACH and a global codebook; click a
# bar to ask why that item is there. **CPU minutes:** a quarter.

# %% tags=["parameters"]
n_users = 400
k = 8
prototypes = 24
d = 8
epochs = 2
batch_size = 128
n_negatives = 256
learning_rate = 0.01
user = 12
seed = 0

# %%
import numpy as np

from bachlib.data import planted, prepare
from bachlib.model.methods import build
from bachlib.records import output_dir, record
from bachlib.show import plots
from bachlib.show.explorer import Explorer
from bachlib.train import fit

# %% [markdown]
# Three small models of the planted world, trained here. With runs of your own, all of one data set, the next two cells
# are `explorer = Explorer.of_runs("outputs/runs/p-bach-…", "outputs/runs/p-bach-global-…")`. `plots.use("dark")` before
# it makes the figure fit a dark JupyterLab.

# %%
world = planted.write_world(n_users=n_users, seed=seed)
dataset = prepare("planted", world, output_dir("data", f"explorer-{n_users}"), quiet=True)
settings = dict(epochs=epochs, batch_size=batch_size, n_negatives=n_negatives, learning_rate=learning_rate, seed=seed)


def train(name: str, k: int):
    model = build(name, dataset, k, seed=seed, d=d, ff=4 * d, item_width=4 * d, dropout=0.0)
    return fit(model, dataset, settings, output_dir("runs", f"explorer-{name}-{n_users}"), fresh=True, quiet=True)


runs = {"p-BACH": train("p-bach", k), "v-BACH": train("v-bach", k), "global": train("p-bach-global", prototypes)}
dataset

# %% tags=["nbval-ignore-output"]
explorer = Explorer(runs, dataset, user=user)
explorer

# %% [markdown]
# **What you should see.** On the left the heads with their names, $\pi_u$ and $\kappa$; on the right the slate, a bar
# per item, split by the heads that bring it. ★ is what the user went on to like, which the model has not seen; ↑ ↓ and
# *new* are against the slate of the model's own $\pi_u$. Every slate is proved to be the best of all items.
#
# What the sliders do can be written down, too. Everything on the first head, and the picture without a kernel:

# %%
session = explorer.session
before = session.slate()
first = int(np.argmax(session.heads.pi))
after = session.slate(session.steered({r: float(r == first) for r in range(len(session.heads.pi))}))
assert before.certified.all() and after.certified.all()
assert np.allclose(after.head_share[0, :, first], 1), "only one head has weight: it brings everything"
kept = len(set(before.items[0]) & set(after.items[0]))
f"{kept} of {session.K} items stay when head {first}, {session.heads.names[first]}, gets all of π_u"

# %%
explorer.picture()

# %% [markdown]
# Why the first item is there: each head's share of its score, and what of the history is like it.

# %%
why = session.why(int(before.items[0, 0]))
assert np.isclose(why.heads["share"].sum(), 1) and np.isclose(why.score, before.scores[0, 0], atol=1e-4)
why.heads.sort_values("share", ascending=False).round(2)

# %%
plots.pi_before_after(session.heads.pi, session.steered({first: 0.0}), session.heads.names)

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
# **Next:** [`06_heads_and_pi`](06_heads_and_pi.ipynb) asks whether the names and the weights can be believed,
# [`07_serving`](07_serving.ipynb) how the slate is found and proved.
