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
# # 09 · A sweep must be read with its intervals, its failures and the paper's numbers
#
# **Question.** A sweep trains many methods, values of $k$ and seeds. What does it say? Which method is better at equal
# $k$, and how certain is this? Is $\kappa$ bounded in every run? How far are we from the paper's numbers? Which results
# are missing?
#
# **You need** `05_evaluate` for the intervals. **CPU minutes:** one for the demo, which is trained here; none for a
# sweep that has finished. `bach report SWEEP` executes this notebook for your own sweep and trains nothing.

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
from bachlib.experiment.sweep import data_sizes, read_sweep, results, run_here, state
from bachlib.files import record
from bachlib.show import plots


def tidy(table: pd.DataFrame, digits: int = 4) -> pd.DataFrame:
    return table.round(digits).convert_dtypes().astype(object).where(table.notna(), "–")


# %% [markdown]
# ## 1 · What was run
#
# `sweep` is a file in `params/sweeps`, its name, or a folder in `outputs/sweeps`. Each point of a sweep is one
# training. A point has results when its training has ended and its test items were ranked. `bach sweep` does this in
# its own processes. With `complete = True` the next cell does it in this kernel. Only trainings by the current code of
# data, model and training count.

# %%
chosen = read_sweep(sweep)
file, points = chosen.file, chosen.points
for point in points if complete else []:
    if state(point).status != "done":
        with suppress(Exception):  # its folder keeps the error, and section 2 shows it
            run_here(point)
runs, found = results(points)
done = runs[runs.index.isin(found)]
Markdown(f"**{file.name}**: {file.about or 'no description'}. {len(found)} of {len(runs)} have results.")

# %%
runs.groupby(["data", "method", "status"], sort=False).size().unstack(fill_value=0)

# %% [markdown]
# What the sweep varies (`grid`), and what it sets for all its points (`set`):

# %%
{"grid": file.grid, "set": file.set, "experiments": file.base}

# %% [markdown]
# ## 2 · Failed and missing runs
#
# A table of the finished runs alone can mislead: a method that fails where it is weak looks strong. So failed and
# missing runs come before the numbers.

# %%
failed = runs[runs["error"].notna()]
for name, row in failed.iterrows():
    log = f"{row['log']} in the outputs folder" if row["log"] else "no log, it ran in a notebook"
    print(f"{name}: {row['status']}\n{row['error']}\nlog: {log}\n")
missing = runs.index[~runs["status"].isin(["done", "failed"])]
if len(missing):
    print(runs.loc[missing[:20], "status"].to_string(), "\n…" if len(missing) > 20 else "")
print(f"{len(failed)} failed, {len(missing)} missing" + ("; bach sweep runs what is missing" if len(missing) else ""))
if not found:
    print("No point has results yet, so the tables below are empty.")

# %%
assert set(runs["status"]) <= {"done", "failed", "stopped", "running", "missing"}
assert (runs["status"] == "done").sum() == len(found), "a point should be done exactly when it has results"
assert not complete or runs["status"].isin(["done", "failed"]).all(), "every point should have been tried here"

# %% [markdown]
# ## 3 · The data
#
# The paper's Table 1 beside our data. Two data sets with the same name can differ: in the release of the log, in the
# drawn users, or because only the first rows were read. Their sizes show this first.

# %%
by_data = {data: [found[name] for name in part.index] for data, part in done.groupby("data", sort=False)}
about_data = paper.data_table(data_sizes(points), by_data)
tidy(about_data, 3)

# %% [markdown]
# ## 4 · The table
#
# The sweep file chooses the layout. `main` has a row per method; we choose its $k$ on the *validation* items. `matched`
# has a row per value of the axis, with the methods side by side, so that no method wins by having more heads. `data`
# has only the table above. The seeds of a method are combined in one cell. ± is half of the 95% interval over redrawn
# users *and* redrawn seeds.


# %%
def laid_out(data: str) -> Table:
    if file.layout == "main":
        return main_table(by_data[data], file.baseline)
    return matched(by_data[data], file.axis, baseline=file.baseline)


tables = {data: laid_out(data) for data in by_data if file.layout != "data"}
size = {data: ", ".join(f"{n:,} {what}" for what, n in of.items()) for data, of in data_sizes(points).items()}
for data, made in tables.items():
    count = f"{len(by_data[data])} of {(runs['data'] == data).sum()} points"
    print(f"{data} ({size[data]}): {count}, against {made.baseline}")
    display(made)
    if file.layout == "main":
        display(made.gains)

# %% [markdown]
# **What you should see.** Every row or column has a bold number, because one method is always first. Look at the marks
# instead. A gain is marked if its whole interval is on one side of zero *and* it passes the permutation test over
# users.

# %% [markdown] tags=["lesson"]
# The demo is a world of its own, smaller than that of the other notebooks: 600 items instead of 4,800, so its AUPRC is
# several times as high. Do not compare the two. In the demo (129 users, 89 training steps) nearly every interval
# contains zero. Such a small sweep is good for trying things out; it cannot show which method is better. Only
# `pos-multihead` with 8 heads is clearly behind, as in the paper's Table 4.

# %% [markdown]
# ## 5 · Results along the axis

# %%
along = {data: matched(of, file.axis, baseline=file.baseline) for data, of in by_data.items()}
for data, made in along.items():
    theirs = paper.printed(data, by_k=True) if file.axis == "k" else None
    print(f"{data} ({size[data]})")
    display(plots.by_axis(made.numbers, file.axis, "AUPRC", made.baseline, theirs))

# %% [markdown]
# **What you should see.** One line per method. It is dotted if the method does not have the axis (one vector has no
# $k$). Open diamonds are numbers that the paper prints for the same data, method and $k$. Every run with results must
# be in this figure exactly once. We check this: the sum over runs equals the sum over cells.

# %%
for data, made in along.items():
    cells = made.numbers[made.numbers["metric"] == "AUPRC"]
    cells = cells[~(cells["shared"] & cells.duplicated("method"))]  # a cell repeated in every row counts once
    alone = done.loc[done["data"] == data, "AUPRC"]
    assert cells["seeds"].sum() == len(alone), "every run should be in the table once"
    assert np.isclose((cells["mean"] * cells["seeds"]).sum(), alone.sum(), rtol=1e-4)
    assert ((cells["low"] <= cells["mean"]) & (cells["mean"] <= cells["high"])).all()
{data: f"{len(of)} runs, all in the table" for data, of in by_data.items()}

# %% [markdown]
# ## 6 · How much do two trainings differ?
#
# The same method and parameters with another seed. With a single seed it shows a dash, and the intervals above do not
# include variation between trainings: they only say how the same trained models would do on other users.

# %%
keys = [key for key in runs.columns if key in {"data", "experiment", "method", *file.varied}]
apart = [key for key in keys if key != "seed"]
if len(done):
    spread = done.groupby([done[key].astype(str) for key in apart], sort=False)["AUPRC"].agg(["count", "min", "max"])
    wide = spread["max"] / spread["min"] - 1
    spread["best seed over worst"] = [f"{x:+.0%}" if n > 1 else "–" for x, n in zip(wide, spread["count"], strict=True)]
    display(tidy(spread))

# %% [markdown]
# **What you should see.** If two seeds of one method differ more than two methods do, we do not know which method is
# better, however many decimals the table has.

# %% [markdown] tags=["lesson"]
# In the demo this is so for most methods.

# %% [markdown]
# ## 7 · The paper beside our results
#
# For the paper's data sets: its number, ours, the difference, and whether our interval contains the paper's rounded
# number. On other data sets the values cannot be compared. There we only put side by side how much a method gains over
# the baseline: ours with an interval, and the paper's on each of its data sets. A single percentage is a gain that the
# paper prints. Where it prints none, its rounded numbers give a range: 0.069 against 0.067 is a gain of 1.5 to 4.5%.
# (The paper has one seed. Where we show no $k$, its rows are "best over $k$", and it does not say on which items.)

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
        told = gains.drop(columns=where).map(lambda x: x if isinstance(x, str) else f"{x:+.1%}" if pd.notna(x) else "–")
        told = tidy(gains[where]).join(told).rename(columns={"at": file.axis, "gain_low": "from", "gain_high": "to"})
        display(Markdown(f"Gain in AUPRC over {made.baseline}:"), told.set_index("method"))

# %% [markdown]
# **What you should see.** A dash where the paper has no number for that method and $k$. If our gain has the same
# sign as the paper's, this is some evidence if our interval excludes zero, and no evidence if it does not.
#
# ## 8 · Is $\kappa$ bounded in every run?
#
# Only the ELBO bounds $\kappa$: it has no prior and is not clipped. $\kappa$ enters only through
# $\mathrm{KL}(\gamma\,\|\,\gamma^{con})$, which is smallest at the sharpness of the contrastive posterior. The table
# has the range of $\kappa$ over users and heads on held-out items in all our runs, beside the paper's range for the
# largest $\kappa$ of a run:

# %%
bounds = paper.kappa_bounds(done)
assert (bounds["smallest"] > 0).all() and np.isfinite(bounds["high"]).all()
names = {"smallest": "smallest κ", "low": "largest κ of a run, from", "high": "to"}
names |= {"paper_low": "paper, from", "paper_high": "paper, to"}
tidy(bounds, 1).rename(columns=names).set_index("method") if len(bounds) else print("No run here has a κ.")

# %%
plots.kappa_bounds(bounds) if len(bounds) else None

# %% [markdown]
# **What you should see.** Bars around $1/\tau$ (14.3 at the paper's $\tau$), where $\kappa$ starts, and no run in which
# $\kappa$ grows without bound. The paper's range is for $d = 64$. For the same sharpness the power-spherical kernel
# needs a larger $\kappa$ than the other kernel. So do not compare the ranges of two kernels or two dimensions.
#
# ## 9 · All runs in one figure
#
# One line per run, through its place in the grid and its numbers, coloured by AUPRC. Drag along an axis to select
# lines. Drag the name of an axis to move it.

# %%
numbers = [name for name in ("R@100", "AUPRC", "effective heads", "head cosine") if name in done]
for data, part in done.groupby("data", sort=False):
    print(data)
    display(plots.parallel_coordinates(part[[*keys, *numbers]], "AUPRC", keys))

# %% [markdown]
# **What you should see.** The title names the parameter whose values differ most in mean AUPRC. If this is the seed,
# the sweep shows nothing yet. Effective heads and their cosine say how a method reached its result: about one effective
# head is a collapse, and a mean cosine near 1 means that the heads are copies of each other.

# %% [markdown] tags=["lesson"]
# In the demo some trainings with hard routing end with a single head in use; no BACH training does. Some of these
# single heads rank no worse than the others.
#
# ## Exercises
#
# 1. In each row of a table one method is bold. If four methods were equally good, how often would a given one be bold?
#    What does a column of three bold cells prove?
#
# <details><summary>Answer</summary>
#
# In a quarter of the rows. Three rows in sequence have probability $1/64$ if rows are independent. They are not: all
# rows have the same users, so a method that is lucky with these users is lucky in all rows. This is why users are
# redrawn.
# </details>
#
# 2. Copy `params/sweeps/demo.yaml` to a new name, add `standard` to its methods and run it with `bach sweep`. How many
#    trainings does it need?
#
# <details><summary>Answer</summary>
#
# Three: `standard` has one vector, so $k = 4$ and $k = 8$ are the same training, with three seeds. The other 24
# trainings are identified by their parameters and their code. If this notebook has trained them in the same `outputs`,
# they are loaded and only their notebooks are executed.
# </details>
#
# 3. Why does the layout `main` choose $k$ on the validation items? What would change if it took the best test number?
#
# <details><summary>Answer</summary>
#
# The best of three noisy numbers is above the mean of any of them, and more so for a method whose trainings vary more.
# If $k$ is chosen on other items, the noise of the test number is independent of the choice, and the mean is unbiased
# (`05_evaluate`, the trap *picked on the test items*).
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
# **Next:** [`single`](single.ipynb) is the notebook that ran for each point. [`05_evaluate`](05_evaluate.ipynb)
# explains the intervals.
