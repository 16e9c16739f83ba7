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
# # Single · One method on one data set with one seed is one point of a sweep
#
# **Question.** How good is this method in this experiment, and what do its heads and $\kappa$ do?
#
# **You need** `04_train` for the methods. **CPU minutes:** a quarter. `bach sweep` runs this notebook for each point of
# its grid. By hand: `papermill notebooks/single.ipynb out.ipynb -f params/ml1m.yaml -p method v-bach`.

# %% tags=["parameters"]
source = "planted"
method = "p-bach"
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

# %%
from bachlib.evaluate import paper
from bachlib.experiment.stages import measured, settings
from bachlib.files import record

p = settings(globals())

# %% [markdown]
# ## Train and rank the test items
#
# A training that is finished is opened, and one that was stopped is resumed. Then every test item is ranked in the full
# catalogue, without the user's earlier items. The run folder keeps the weights and one row of metrics per user, so that
# methods can be compared user by user.

# %%
point = measured(p, quiet=False)
point.run

# %%
point.result

# %%
point.run.history.set_index("step").filter(["loss", "valid_auprc"]).dropna(how="all").tail(5).round(4)

# %% [markdown]
# **What you should see.** The loss falls. Validation AUPRC rises, then levels off or falls again. The weights that are
# kept are those with the best validation AUPRC. `bach report` draws pictures of the run.
#
# ## Heads and $\kappa$
#
# Measured on held-out items, with the whole catalogue as candidates: the number of heads in use, their
# mean cosine, and for BACH the gap $\mathrm{KL}(\gamma\,\|\,\gamma^{con})$ and $\kappa$. The paper finds the largest
# $\kappa$ in the range below, without any prior on it.

# %%
assert all(value == value for value in point.heads.values()), "a value is not a number"
point.heads, {"largest κ in the paper": paper.kappa_range(method)}

# %% [markdown]
# ## Exercises
#
# 1. Run it for `standard` and for `p-bach` with `k = 1`. What is the difference?
#
# <details><summary>Answer</summary>
#
# With one head $\gamma = \pi = 1$ and the ELBO is the sampled softmax: the same loss. The serving scores differ, but
# the order is the same, because the density increases with the cosine. Only the first weights differ: they are drawn in
# another order.
# </details>
#
# 2. Run `bach sweep params/sweeps/planted.yaml --dry-run` to see what it would do. Then run the sweep for one seed.
#    `--set seeds=1` does not work. Why, and what does?
#
# <details><summary>Answer</summary>
#
# `seeds` is the number of trainings that a notebook makes of each method. The grid of this sweep has `seed: [0, 1, 2]`,
# and a key of the grid cannot be set for all points. Write a file with another grid; finished points are not run again.
# </details>

# %%
record("single", point.record)

# %% [markdown]
# **Next:** `bach sweep` for many of these, and [`09_sweep_report`](09_sweep_report.ipynb) for their table.
