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
# # 09 · A sweep is read with its intervals, its failures and the paper beside it
#
# **Question.** What does a sweep say: who is better at equal $k$, how surely, is $\kappa$ bounded in every run, how far
# are we from the paper's numbers, and what is missing?
#
# **You need** `05_evaluate` for the intervals. **CPU minutes:** one for the demo, which is trained here; none for a
# sweep that has run. `bach report SWEEP` executes this notebook for a sweep of yours and trains nothing.

# %% tags=["parameters"]
sweep = "demo"
complete = True

# %%
from contextlib import suppress

import numpy as np
import pandas as pd
from IPython.display import Markdown, display

from bachlib.evaluate import paper
from bachlib.evaluate.tables import Table, main_table, matched
from bachlib.experiment.sweep import data_sizes, has_results, perform_here, read_sweep, results
from bachlib.files import record
from bachlib.show import plots


def tidy(table: pd.DataFrame, digits: int = 4) -> pd.DataFrame:
    return table.round(digits).convert_dtypes().astype(object).where(table.notna(), "–")


# %% [markdown]
# ## 1 · What was run
#
# `sweep` is a file of `params/sweeps`, its name, or a folder of `outputs/sweeps`; each of its points is one training.
# A point has results when its training has ended and its test items were ranked, whoever did that: `bach sweep` in
# processes of its own, or, with `complete`, the next cell in this kernel. Only trainings by today's code of data, model
# and training count.

# %%
chosen = read_sweep(sweep)
file, points = chosen.file, chosen.points
for point in points if complete else []:
    if not has_results(point):
        with suppress(Exception):  # its folder keeps the error, and section 2 tells it
            perform_here(point)
runs, found = results(points)
done = runs[runs.index.isin(found)]
Markdown(f"**{file.name}**: {file.about or 'nobody said what it is about'}. {len(found)} of {len(runs)} have results.")

# %%
runs.groupby(["data", "method", "status"], sort=False).size().unstack(fill_value=0)

# %% [markdown]
# What the sweep varies, and what it sets for all its points:

# %%
{"grid": file.grid, "set": file.set, "experiments": file.base}

# %% [markdown]
# ## 2 · What failed, and what is missing
#
# A table over what happens to be finished can mislead: a method that fails where it is weak looks strong. So the gaps
# come before the numbers.

# %%
failed = runs[runs["error"].notna()]
for name, row in failed.iterrows():
    log = f"{row['log']} in the outputs folder" if row["log"] else "none, it ran in a notebook"
    print(f"{name}: {row['status']}\n{row['error']}\nlog: {log}\n")
missing = runs.index[~runs["status"].isin(["done", "failed"])]
if len(missing):
    print(runs.loc[missing[:20], "status"].to_string(), "\n…" if len(missing) > 20 else "")
print(f"{len(failed)} failed, {len(missing)} missing" + ("; bach sweep runs what is missing" if len(missing) else ""))
if not found:
    print("Nothing has results yet: what follows is empty.")

# %%
assert set(runs["status"]) <= {"done", "failed", "stopped", "running", "missing"}
assert (runs["status"] == "done").sum() == len(found), "a point is done when, and only when, there are results of it"
assert not complete or runs["status"].isin(["done", "failed"]).all(), "all was tried here"

# %% [markdown]
# ## 3 · The data
#
# The paper's Table 1, ours beside it. Two data sets with one name are not yet the same: another release of the log,
# another draw of users, only its first rows. Sizes are the first thing to tell them apart.

# %%
by_data = {data: [found[name] for name in part.index] for data, part in done.groupby("data", sort=False)}
about_data = paper.data_table(data_sizes(points), by_data)
tidy(about_data, 3)

# %% [markdown]
# ## 4 · The table
#
# In the layout the sweep asks for. `main`: a row per method, its $k$ chosen on the *validation* items. `matched`: a row
# per value of the axis, methods beside each other, so that nobody wins by having more heads. Seeds of a method are one
# cell; ± is half of the 95% interval over redrawn users *and* redrawn seeds. Layout `data`: the table above is all.


# %%
def laid_out(data: str) -> Table:
    if file.layout == "main":
        return main_table(by_data[data], file.baseline)
    return matched(by_data[data], file.axis, baseline=file.baseline)


tables = {data: laid_out(data) for data in by_data if file.layout != "data"}
for data, made in tables.items():
    print(f"{data}: {len(by_data[data])} of {(runs['data'] == data).sum()} points, against {made.baseline}")
    display(made)
    if file.layout == "main":
        display(made.gains)

# %% [markdown]
# **What you should see.** A bold number in every row or column, because somebody is always first; what counts is the
# mark of a gain whose whole interval is on one side of zero *and* that survives the permutation test over users.

# %% [markdown] tags=["lesson"]
# In the demo (129 users, 89 steps of training) nearly every interval holds zero: such a sweep is to try things with,
# not to find anything out. Only `pos-multihead` with 8 heads is clearly behind, which the paper's Table 4 says, too.

# %% [markdown]
# ## 5 · Along the axis

# %%
along = {data: matched(of, file.axis, baseline=file.baseline) for data, of in by_data.items()}
for data, made in along.items():
    theirs = paper.printed(data, by_k=True) if file.axis == "k" else None
    print(data)
    display(plots.by_axis(made.numbers, file.axis, "AUPRC", made.baseline, theirs))

# %% [markdown]
# **What you should see.** A line per method, dotted where it does not have the axis (one vector has no $k$); open
# diamonds where the paper prints a number for the same data, method and $k$. Every run with results has to be in this
# figure, once: the sum over runs is the sum over cells.

# %%
for data, made in along.items():
    cells = made.numbers[made.numbers["metric"] == "AUPRC"]
    cells = cells[~(cells["shared"] & cells.duplicated("method"))]  # what is in every row counts once
    alone = done.loc[done["data"] == data, "AUPRC"]
    assert cells["seeds"].sum() == len(alone), "a run is missing in the table, or there twice"
    assert np.isclose((cells["mean"] * cells["seeds"]).sum(), alone.sum(), rtol=1e-4)
    assert ((cells["low"] <= cells["mean"]) & (cells["mean"] <= cells["high"])).all()
{data: f"{len(of)} runs, all in the table" for data, of in by_data.items()}

# %% [markdown]
# ## 6 · How far apart are two trainings?
#
# The same method and parameters, another seed. With one seed there is nothing to see here, and no interval above knows
# of it: it then speaks of these trained models on other users only.

# %%
keys = [key for key in runs.columns if key in {"data", "experiment", "method", *file.grid}]
apart = [key for key in keys if key != "seed"]
if len(done):
    spread = done.groupby([done[key].astype(str) for key in apart], sort=False)["AUPRC"].agg(["count", "min", "max"])
    wide = spread["max"] / spread["min"] - 1
    spread["best seed over worst"] = [f"{x:+.0%}" if n > 1 else "–" for x, n in zip(wide, spread["count"], strict=True)]
    display(tidy(spread))

# %% [markdown]
# **What you should see.** Where two seeds of one method lie further apart than two methods, the order of these methods
# is not known, whatever the decimals say.

# %% [markdown] tags=["lesson"]
# In the demo that is so for most of them.

# %% [markdown]
# ## 7 · The paper next to ours
#
# For data the paper has: its number, ours, the difference, and whether our interval holds the paper's rounded number.
# For other data values cannot be compared. What can be *looked at* side by side is how much a method gains over the
# baseline, ours with an interval and the paper's on each of its data sets (one seed, from rounded numbers: a gain
# of 0.002 on 0.067 may be anything from 1.5 to 4.5%).

# %%
by_k = file.axis == "k" and (file.layout == "matched" or file.paper in ("head-matched", "routing"))
for data, made in tables.items():
    both = paper.beside(made.numbers, data, by_k)
    display(Markdown(f"**{data}**: {about_data.loc[data, ('which data', '')]}."))
    if len(both):
        display(tidy(both.rename(columns={"within": "paper's in our interval"})).set_index("method"))
    if made.baseline:
        gains = paper.gains_beside(made.numbers, made.baseline, by_k)
        where = [name for name in gains if name in ("at", "method", "k")]
        told = gains.drop(columns=where).map(lambda x: f"{x:+.1%}" if np.isfinite(x) else "–")
        told = tidy(gains[where]).join(told).rename(columns={"at": file.axis, "gain_low": "from", "gain_high": "to"})
        display(Markdown(f"Gain in AUPRC over {made.baseline}:"), told.set_index("method"))

# %% [markdown]
# **What you should see.** A dash where the paper prints nothing for that method and $k$. A gain of ours that agrees in
# sign with the paper's is a hint if its interval leaves out zero, and nothing if it does not.
#
# ## 8 · Is $\kappa$ bounded in every run?
#
# Nothing but the ELBO holds $\kappa$: no prior, no clipping. It enters only through
# $\mathrm{KL}(\gamma\,\|\,\gamma^{con})$, which is smallest at the sharpness of the contrastive posterior. The paper
# finds the largest $\kappa$ of a run in the range below; over users and heads on held-out items, of all our runs:

# %%
bounds = paper.kappa_bounds(done)
assert (bounds["smallest"] > 0).all() and np.isfinite(bounds["high"]).all()
names = {"smallest": "smallest κ", "low": "largest κ of a run, from", "high": "to"}
names |= {"paper_low": "paper, from", "paper_high": "paper, to"}
tidy(bounds, 1).rename(columns=names).set_index("method") if len(bounds) else print("No run here has a κ.")

# %%
plots.kappa_bounds(bounds) if len(bounds) else None

# %% [markdown]
# **What you should see.** Bars of some width around $1/\tau$ (14.3 at the paper's $\tau$), where $\kappa$ starts, and
# no run that shoots off. The paper's range is for $d = 64$, and the power-spherical kernel needs a larger $\kappa$ than
# the other for the same sharpness: ranges of two kernels or two dimensions are not to be compared.
#
# ## 9 · All runs at once
#
# A line per run, through its place in the grid and its numbers, coloured by AUPRC. Drag along an axis to keep some of
# the lines; drag an axis by its name to another place.

# %%
numbers = [name for name in ("R@100", "AUPRC", "effective heads", "head cosine") if name in done]
for data, part in done.groupby("data", sort=False):
    print(data)
    display(plots.parallel_coordinates(part[[*keys, *numbers]], "AUPRC", keys))

# %% [markdown]
# **What you should see.** The title names the parameter whose values lie furthest apart on average. If that is the
# seed, the sweep says nothing yet. Effective heads and their cosine tell how a method got there: near one head in use
# is a collapse, a cosine near one are heads that say the same.

# %% [markdown] tags=["lesson"]
# In the demo some trainings with a hard rule end with a single head in use and no BACH training does; some of these
# single heads rank no worse than the others.
#
# ## Exercises
#
# 1. In each row of a table one method is bold. If four methods were equally good, how often would a given one be bold,
#    and what does a column of three bold cells prove?
#
# <details><summary>Answer</summary>
#
# In a quarter of the rows; three rows in a row with probability $1/64$, if rows were independent. They are not: all
# rows have the same users, so who is lucky with these users is lucky in all of them. That is why users are redrawn.
# </details>
#
# 2. Copy `params/sweeps/demo.yaml` to a new name, add `standard` to its methods and run it with `bach sweep`. How many
#    trainings does it need?
#
# <details><summary>Answer</summary>
#
# Three: `standard` has one vector, so $k = 4$ and $k = 8$ are the same training, with three seeds. The 24 others are
# known by their parameters and their code; if this notebook has trained them in the same `outputs`, each is opened and
# only its notebook is executed.
# </details>
#
# 3. Why does the layout `main` choose $k$ on the validation items, and what would change if it took the best test
#    number?
#
# <details><summary>Answer</summary>
#
# The best of three noisy numbers is above the mean of any of them, and more so for a method whose trainings differ
# more. Chosen on other items the noise of the test number is fresh, and the mean stays honest (`05_evaluate`, the trap
# *picked on the test items*).
# </details>

# %%
record(
    "09_sweep_report",
    {
        "points": len(runs),
        **{status: int((runs["status"] == status).sum()) for status in ("done", "failed", "missing")},
        **{
            f"AUPRC, {data}, {row.method}, {file.axis} = {row.at}": round(row.mean, 4)
            for data, made in along.items()
            for row in made.numbers[made.numbers["metric"] == "AUPRC"].itertuples()
        },
        **{f"largest κ, {row.data}, {row.method}": round(row.high, 1) for row in bounds.itertuples()},
    },
)

# %% [markdown] tags=["lesson"]
# **Next:** [`single`](single.ipynb) is what ran for each point, [`05_evaluate`](05_evaluate.ipynb) has what is behind
# the intervals.
