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
# # Single · one method, one data set, one seed: a point of a sweep
#
# **Question.** How good is this method in this experiment, and what do its heads and $\kappa$ do?
#
# **You need** `04_train` for the methods. **CPU minutes:** a quarter. `bach sweep` runs this notebook for each point of
# its grid; by hand: `papermill notebooks/single.ipynb out.ipynb -f params/ml1m.yaml -p method v-bach`.

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
import numpy as np

from bachlib.evaluate import diagnostics, evaluate, paper
from bachlib.experiment.stages import prepared, settings, trained
from bachlib.files import record
from bachlib.show import plots

p = settings(globals())
dataset = prepared(p)
dataset

# %% [markdown]
# ## The training
#
# Finished before, it is opened; stopped, it goes on.

# %%
run = trained(method, dataset, p)
run

# %%
plots.training(run.history, method)

# %% [markdown]
# **What you should see.** The loss falls. Validation AUPRC (dots) rises and levels off; the weights that are kept are
# those of its maximum.
#
# ## The test items
#
# Over the full catalogue, every earlier item of the user excluded. The row per user stays beside the weights, so that
# methods can be compared user by user.

# %%
result = evaluate(run, dataset, max_users=p.max_eval)
result.save(run.folder)
result

# %%
plots.recall_curves({method: result.ranks}, up_to=min(500, dataset.n_items - 1))

# %% [markdown]
# ## Heads and $\kappa$
#
# On held-out items, with the whole catalogue as candidates: heads in use, their cosine, and for BACH the gap
# $\mathrm{KL}(\gamma\,\|\,\gamma^{con})$ and $\kappa$, which the paper finds in the range below without any prior.

# %%
users = result.per_user.index.to_numpy()[:2_000]
heads = diagnostics.summary(run.model, dataset, users) if method != "mostpop" else {}
assert all(np.isfinite(value) for value in heads.values())
heads, {"largest κ in the paper": paper.kappa_range(method)}

# %% [markdown]
# ## Exercises
#
# 1. Run it for `standard` and for `p-bach` with `k = 1`. What is the difference?
#
# <details><summary>Answer</summary>
#
# With one head $\gamma = \pi = 1$ and the ELBO is the sampled softmax: the same loss. Serving differs in form only: the
# density is increasing in the cosine. What is left are the first weights, drawn in another order.
# </details>
#
# 2. Ask `bach sweep params/sweeps/planted.yaml --dry-run` what it would do, then do it for one seed:
#    `--set seeds=1` does not work. Why, and what does?
#
# <details><summary>Answer</summary>
#
# `seeds` is how many trainings a notebook makes of each method; the grid of that sweep has `seed: [0, 1, 2]`, and what
# is in a grid cannot be set for all points. Write a file with another grid; finished points are not run again.
# </details>

# %%
record("single", {name: round(value, 6) for name, value in {**result.means, **heads}.items()})

# %% [markdown]
# **Next:** `bach sweep` for many of these, and [`09_sweep_report`](09_sweep_report.ipynb) for their table.
