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

# %% [markdown] tags=["lesson"]
# # Report · One training to look at: its numbers, its heads, its users
#
# **Question.** How good is this model, what do its heads mean, and what happens to a slate when $\pi_u$ changes?
#
# **You need** `06_heads_and_pi` for the pictures. **CPU minutes:** half a one. `bach report RUN` executes this notebook
# for a run of yours and writes one HTML page that needs neither network nor kernel; its sliders work there. `run` is a
# run folder or its name in `outputs/runs`. When it is empty, the small training of [`single`](single.ipynb) is shown.

# %% tags=["parameters"]
run = ""
data = ""

# %%
from IPython.display import display

from bachlib.evaluate.evaluation import ACCURACY
from bachlib.experiment.settings import read_experiment
from bachlib.experiment.stages import prepared, trained
from bachlib.files import record
from bachlib.show.portrait import Portrait

if not run:
    p = read_experiment("quickstart")
    run = trained("p-bach", prepared(p), p).folder
shown = Portrait(run, data)
shown.facts()

# %% [markdown]
# ## How good it is

# %%
display(*shown.numbers())
means = {} if shown.missing else {name: shown.evaluation.means[name] for name in ACCURACY}
assert all(0 <= value <= 1 for value in means.values())

# %% [markdown]
# ## Steer π_u

# %%
display(*shown.sliders())

# %% [markdown]
# ## What the heads mean

# %%
display(*shown.heads())

# %% [markdown]
# ## One user, item by item

# %%
display(*shown.user())

# %% [markdown]
# ## How it was trained

# %%
display(*shown.training())

# %% [markdown]
# ## Parameters
#
# Everything that was set, defaults included.

# %%
display(*shown.parameters())

# %% [markdown]
# ## Environment

# %%
display(*shown.environment())

# %% [markdown] tags=["lesson"]
# ## Exercises
#
# 1. Open the page (`bach report RUN`) and give all the weight to one head of a user. Why does the page still say
#    *proved* in most cases, though it has only a few hundred of the items?
#
# <details><summary>Answer</summary>
#
# The shortlist holds the first 100 or more items of *every* head. An item outside of it has at most the density of the
# last item of each list, and so at most the weighted sum of these densities. If the last item of the slate scores more
# than that bound, no item outside can belong to the slate.
# </details>
#
# 2. Change the setup cell so that it shows `trained("all-multihead", prepared(p), p)`. Which sections become shorter?
#
# <details><summary>Answer</summary>
#
# Hard routing takes the closest head and has neither $\pi_u$ nor $\kappa$. There is nothing to steer or to calibrate,
# and no share of the heads in an item. The map of items and the use of the heads during training remain.
# </details>

# %% tags=["lesson"]
record("report", {name: round(value, 6) for name, value in means.items()})

# %% [markdown] tags=["lesson"]
# **Next:** the [`explorer`](explorer.ipynb) steers $\pi_u$ with a kernel: any user, any history.
