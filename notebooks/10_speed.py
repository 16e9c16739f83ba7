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
# # 10 · Speed is a ratio: against the limit, against plain code, against public libraries
#
# **Question.** How close is each part of the workbook to the time of its bare matrix products? How much faster is it
# than the same mathematics written plainly, and than public libraries? How does cost grow, and what would a large
# system cost?
#
# **You need** `04_train` and `07_serving` for what is measured. **CPU minutes:** under one. This notebook mostly
# *reads* measurements: those of your machine if there are any, else the published ones. `bach bench` measures the
# goals, `bach bench growth` the curves, and `make bench-peers` other libraries.

# %% tags=["parameters"]
users = 100_000_000
items = 10_000_000
k = 8
windows = 10
requests = 10_000
shards = 10

# %%
import pandas as pd
from IPython.display import Markdown, display

from bachlib.bench import growth
from bachlib.bench.costs import costs, seconds_at
from bachlib.bench.measure import best_of, newest, threads, verdicts
from bachlib.files import record
from bachlib.show import plots

pd.set_option("display.max_colwidth", None)

# %% [markdown]
# ## 1 · What was measured, when, and on what
#
# Seconds differ from machine to machine and from hour to hour. So every goal is a *ratio*: two pieces of work run in
# one process and take turns. *CPU seconds* are of one thread; *wall seconds* are of all cores.

# %%
goals, peers, curves = newest("goals", "quick"), newest("peers"), newest("growth")


def origin(record: dict) -> str:
    if not record:
        return "not measured"
    machine, where = record["machine"], "published" if record["published"] else "of this machine"
    torch = machine["versions"]["torch"]
    return f"{record['date'][:10]}, {machine['cpu']}, {machine['cores']} cores, torch {torch}, {where}"


for name, found in {"goals": goals, "public libraries": peers, "growth": curves}.items():
    print(f"{name}: {origin(found)}")

# %% [markdown]
# ## 2 · Against the limit
#
# The *limit* of a part is its bare matrix products: no code that computes the same can be faster. A goal says how much
# more time than the limit a part may take. Other goals are memory in MB, milliseconds, or errors.

# %%
rows = goals.get("results", [])
judged = pd.DataFrame(
    [{"part": row["bench"], "name": row["name"], **verdict} for row in rows for verdict in verdicts(row)]
)
judged["verdict"] = ["met" if met else "missed" for met in judged["met"]]
judged["by"] = [f"{abs(off):.0%}" if goal else f"{abs(off):.2g}" for off, goal in judged[["off", "goal"]].to_numpy()]
told = judged[["part", "name", "what", "measured", "sense", "goal", "verdict", "by"]]
told.map(lambda value: f"{value:.3g}" if isinstance(value, float) else value)

# %%
plots.goal_bars(rows)

# %% [markdown]
# **What you should see.** A bar that ends left of the dashed line meets its goal. Most ratios are somewhat above one:
# what comes on top of the products are exponentials, normalisations and Python itself. Each missed goal has a paragraph
# in [LOG.md](../LOG.md). The next cell checks that every verdict follows from its number.

# %%
for row in judged.itertuples():
    within = row.measured <= row.goal if row.sense == "≤" else row.measured >= row.goal
    assert row.met == within, f"{row.part}, {row.name}: the verdict should follow from the number"
assert judged["measured"].notna().all()
judged.groupby("part", sort=False)["met"].agg(met="sum", goals="count")

# %% [markdown]
# ## 3 · Against plain code
#
# Each fast part has a plain twin, and a test compares their results. The twin says what the fast code is worth: the
# loss in one pass never keeps the $(B, k, C)$ logits, and the tower computes only the rows that are read.

# %%
faster = {f"{row['bench']}, {row['name']}": row["times_faster"] for row in rows if "times_faster" in row}
faster |= {f"loss, {row['name']}": row["plain_ratio"] / row["ratio"] for row in rows if "plain_ratio" in row}
plots.noted(plots.amounts(faster, "Faster than plain code", "times as fast"), origin(goals).split(",")[0])

# %% [markdown]
# ## 4 · Beside public libraries
#
# RePlay, RecBole and Torch-RecHub train on the same sequences, with the same batch, dimension and history. They are not
# like for like: most have one vector per user where BACH has $k$ weighted heads. Read the last column before you
# compare.

# %%
beside = pd.DataFrame([row for row in peers.get("results", []) if "per_core_second" in row])
for what, part in beside.groupby("what", sort=False):
    display(plots.peer_bars(part.to_dict("records"), what))

# %%
columns = {"what": "what", "name": "name", "vectors": "vectors", "per_core_second": "per core-second"}
differs = beside.rename(columns=columns)[[*columns.values(), "unlike"]]
assert (differs["unlike"] != "")[~beside["ours"]].all(), "every row of a public library should say what differs"
differs.rename(columns={"unlike": "what is not like for like"}).round(0)

# %% [markdown]
# **What you should see.** A library with one vector does less work per user, so it may well be faster than $k$ heads.
# Compare heads with heads and one vector with one vector. In serving, a search for the largest cosine is another,
# easier question than the mixture's density.

# %% [markdown]
# ## 5 · How cost grows
#
# We change one size at a time: heads $k$, candidates, items, users, the length of a history. If $y \approx a\,x^b$,
# points lie on a line on log–log axes, and $b$ is its slope: $b = 1$ doubles with the size, $b = 0$ does not grow. The
# legends say the slope at the right end, because the part of the cost that does not grow counts least there.
#
# Milliseconds are of one thread, per window, user, request or call. Megabytes are what a call adds at its peak.

# %%
table = growth.table_of(curves)
slopes = growth.slopes(table)
slopes.round(2)

# %%
for axis in table["axis"].unique():
    display(plots.noted(plots.growth_curves(table, slopes, axis), origin(curves).split(",")[0]))

# %% [markdown]
# **What you should see.** A training step hardly notices the size of the catalogue, since it reads only its candidates
# and its histories. With $k$ it grows less than in proportion: keys and values of the history are computed once for all
# heads. The scan and the evaluation grow with items and heads as their products do. A graph of neighbours grows least.

# %% [markdown]
# ## 6 · Where the time of a step goes
#
# The parts of a training step as they were measured, if the record has them (`bach bench train` measures them).

# %%
measured = {f"{row['bench']}, {row['name']}": row["parts"] for row in rows if row.get("parts")}
for name, parts in measured.items():
    display(plots.noted(plots.parts_of_a_step(parts), name))
print("" if measured else "The record has no parts: bach bench train")

# %% [markdown]
# One measurement here and now: a step on made-up data with one head, with $k$ and with four times as many. A busy
# machine disturbs it, so nothing is asserted about it.

# %%
with threads(1):
    live = {heads: best_of(growth.work_of("train", k=heads)[0], 3) for heads in (1, k, 4 * k)}
rates = {f"k = {heads}": growth.BATCH / seconds for heads, seconds in live.items()}
plots.amounts(rates, "Windows per core-second, measured now", "windows per core-second")

# %% [markdown]
# ## 7 · What a large system would cost
#
# Nothing of this size was run. The next table continues the measured lines. *Core hours* are of a job, *cores* are what
# a service needs at the peak, *GB* is what has to be kept. The parameters at the top set the sizes.

# %%
sizes = {"users": users, "items": items, "k": k, "windows": windows, "requests": requests, "shards": shards}
large = costs(table, **sizes)
numbers = large[["core hours", "ms", "cores", "GB"]].map(lambda value: "–" if pd.isna(value) else f"{value:,.3g}")
pd.concat([large[["part", "engine"]], numbers], axis=1)

# %%
Markdown("Assumed:\n\n" + "\n".join(f"- {row.part}, *{row.engine}*: {row.assumes}" for row in large.itertuples()))

# %% [markdown]
# **Which engine?** *Towers* are trained data-parallel: each process has the frozen table and its own share of the
# windows. *Serving*: the exact scan is the simplest and is proved, but its cost follows the catalogue. Two-step search
# on sharded faiss indexes follows it much less and is not proved. A codebook that all users share needs no search, but
# it is less accurate ([`07_serving`](07_serving.ipynb) measures both sides).

# %%
engines = large[large["part"] == "requests"]
plots.amounts(dict(zip(engines["engine"], engines["cores"], strict=True)), "Cores at the peak, by engine", "cores")

# %% [markdown]
# A check of the arithmetic with a made-up table: every work takes $10^{-6}\,x$ seconds, with an exponent of one half
# along $k$. The slopes have to come out, and four times as many heads have to double the cost of an epoch.

# %%
points = [
    {
        "what": what,
        "axis": axis,
        "value": x,
        "count": 1,
        "mb": 1.0 * x,
        "cpu_s": 1e-6 * x ** (0.5 if axis == "k" else 1),
    }
    for axis, works in growth.SWEEPS.items()
    for what, xs in works.items()
    for x in xs
]
made_up = pd.DataFrame(points)

# %%
fitted = growth.slopes(made_up).set_index(["what", "axis"])["seconds"]
assert abs(fitted["train", "k"] - 0.5) < 1e-9 and abs(fitted["exact", "items"] - 1) < 1e-9
one, four = (costs(made_up, k=heads)["core hours"][0] for heads in (8, 32))
assert abs(four / one - 2) < 1e-9
assert abs(seconds_at(made_up, "exact", "items", 1e7) - 10) < 1e-9, "beyond the largest size the line goes on"

# %% [markdown]
# ## Exercises
#
# 1. Why is a ratio of CPU seconds a better goal than seconds?
#    <details><summary>Answer</summary>Both sides change with the machine, its clock and its other work in the same way
#    if they take turns in one process. Seconds of one side do not say whose fault they are.</details>
# 2. The slope of the exact scan at the right end is below one. Does this promise that a larger catalogue is cheap?
#    <details><summary>Answer</summary>No. The line goes on only if nothing new happens. When the vectors no longer fit
#    into the processor's cache, or into memory, the slope changes.</details>
# 3. Your users ask rarely, and there are many of them. Would you store their heads?
#    <details><summary>Answer</summary>Compare the memory of *heads of the users* with the cores of *encoding the user*.
#    Encoding at the request costs little, needs no storage, and sees the newest history.</details>

# %% tags=["nbval-ignore-output"]
record(
    "10_speed",
    {
        "exponent of heads, made up": round(float(fitted["train", "k"]), 4),
        "exponent of items, made up": round(float(fitted["exact", "items"]), 4),
        "four times the heads, made up": round(float(four / one), 4),
    },
)

# %% [markdown]
# **Next:** [`explorer`](explorer.ipynb) to play with a model, or [LOG.md](../LOG.md) for the profiles behind each
# missed goal.
