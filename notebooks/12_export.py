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
# # 12 · A vector store does not know π_u; rescoring its candidates restores the exact slate
#
# **Question.** You run a vector store and serve models with ONNX. How do you take a BACH model there? Stores merge the
# lists of several query vectors by sums, maxima or ranks, without weights and without densities. What does that cost,
# what is $\pi_u$ worth there, and what brings the exact mixture back?
#
# **You need** `07_serving` for the three strategies. **CPU minutes:** under 1. The *What you should see* texts describe
# the planted world with the default parameters; another log has other numbers, and `bach run` leaves them out there.

# %% tags=["parameters"]
source = "planted"
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
user = 7

# %%
import json
import subprocess
import sys

import numpy as np
import onnxruntime
import pandas as pd
from qdrant_client import QdrantClient, models

from bachlib.evaluate import metrics
from bachlib.experiment.export import export
from bachlib.experiment.stages import prepared, settings, trained
from bachlib.files import output_dir, record
from bachlib.rank.ranks import sample_users
from bachlib.serve import Retriever, rescore
from bachlib.show import plots

# %%
p = settings(globals())
dataset = prepared(p)
run = trained("p-bach", dataset, p)
dataset

# %% [markdown]
# ## 1 · The export
#
# `bach export RUN FOLDER` writes a folder for other tools; here is the same call in Python. `layout=False` leaves out
# the map of the items (UMAP, a minute), which [Embedding Atlas](https://apple.github.io/embedding-atlas/) opens:
# `embedding-atlas items.parquet --x x --y y --neighbors neighbors --text title`.

# %%
folder = export(run, output_dir("exports", run.folder.name), layout=False, force=True)
about = json.loads((folder / "model.json").read_text())
pd.Series({name: file["bytes"] for name, file in about["files"].items()}, name="bytes").to_frame()

# %% [markdown]
# `model.json` says how to score: the formula, the normaliser of the density, and how histories are given. Every program
# was run in its own runtime and compared with the model before the folder appeared:

# %%
assert max(about["difference"].values()) < 1e-5
{name: about[name] for name in ("method", "rule", "score", "log_C", "k", "d", "tau", "n_hist", "difference")}

# %%
items = pd.read_parquet(folder / "items.parquet")
items.head(3).round(2)

# %% [markdown]
# ## 2 · From a history to heads, without torch
#
# `user_side.onnx` holds the item table, the encoder, the gating tower and the κ-net. Its input is item numbers, padded
# with −1 on the left; batch and length are free, up to `n_hist`.

# %%
session = onnxruntime.InferenceSession(folder / "user_side.onnx")
history = dataset.history([p.user], "test")
heads, log_pi, kappa = session.run(None, {"history": history})
for ours, theirs in zip(run.model.encode(history), (heads, log_pi, kappa), strict=True):
    assert np.allclose(ours.detach(), theirs, rtol=1e-5, atol=1e-5), "ONNX should answer as torch does"
pd.DataFrame({"π": np.exp(log_pi[0]), "κ": kappa[0]}).T.round(3)

# %% [markdown]
# ## 3 · The items in a vector store
#
# [Qdrant](https://qdrant.tech) runs inside this process (`":memory:"`); with an address in its place the same lines
# talk to a server. The vectors are unit, so the inner product is the cosine. The second collection holds the same items
# as *multivectors* of one vector each: the store then takes several query vectors at once.

# %%
store = QdrantClient(":memory:")
vectors = np.stack(items["vector"])
one = {"size": about["d"], "distance": models.Distance.DOT}
several = models.MultiVectorConfig(comparator=models.MultiVectorComparator.MAX_SIM)
store.create_collection("items", models.VectorParams(**one))
store.create_collection("together", models.VectorParams(**one, multivector_config=several))
store.upload_collection("items", vectors, items[["raw_id"]].to_dict("records"), items["item"])
store.upload_collection("together", vectors[:, None], None, items["item"])
store.count("items").count


# %% [markdown]
# A query per head. The store's lists hold items of the history, too; a filter by id would leave them out, here we ask
# for as many more.


# %%
def found(name: str, queries, limit: int) -> list[list[int]]:
    asked = [models.QueryRequest(query=query, limit=limit) for query in queries]
    return [[point.id for point in answer.points] for answer in store.query_batch_points(name, asked)]


lists = found("items", heads[0].tolist(), 5)
pd.DataFrame(lists, index=[f"head {r}" for r in range(k)]).map(lambda item: items["title"][item])

# %% [markdown]
# Every head has its own neighbourhood. How are the lists merged into one slate?
#
# ## 4 · The store's rules and the mixture
#
# With $t_r = \langle\mathbf u^{(r)},\mathbf v\rangle$:
#
# | rule | score of an item | who computes it |
# | --- | --- | --- |
# | maximum | $\max_r t_r$ | the caller, from the lists |
# | sum | $\sum_r t_r$ | the store, asked with all heads at once (MaxSim) |
# | ranks | $\sum_r 1/(\text{rank}_r + c)$ over the lists that hold the item | the store (reciprocal rank fusion) |
# | sum with $\pi_u$ | $\sum_r\pi_u^{(r)} t_r$ | the store, with **one** vector, $\sum_r\pi_u^{(r)}\mathbf u^{(r)}$ |
# | mixture | the density of eq. 23, once with equal weights and once with $\pi_u$ | `rescore`, from the lists |
#
# The yardstick is the exact slate of the retriever, which scores all items by the density, eq. 23.

# %%
asked = sample_users(dataset, 40, seed)
history, K, M = dataset.history(asked, "test"), 50, 100
heads, log_pi, kappa = session.run(None, {"history": history})
pi, room = np.exp(log_pi), K + history.shape[1]
retriever = Retriever(run, "exact")
exact = retriever.retrieve(history, K)
assert exact.certified.all()
lists = np.array(found("items", heads.reshape(-1, d).tolist(), M)).reshape(len(asked), k, M)
union = [np.unique(own) for own in lists]
f"{k} lists of {M} hold {np.mean([len(own) for own in union]):.0f} different items"

# %%
ranked = {
    "maximum": [own[np.argsort(-(vectors[own] @ u.T).max(1))] for own, u in zip(union, heads, strict=True)],
    "sum": found("together", heads.tolist(), room),
    "sum with π": found("items", np.einsum("bk,bkd->bd", pi, heads).tolist(), room),
}
fuse = models.FusionQuery(fusion=models.Fusion.RRF)
ranked["ranks"] = [
    [point.id for point in store.query_points("items", fuse, limit=room, prefetch=[
        models.Prefetch(query=head, limit=M) for head in u
    ]).points]
    for u in heads.tolist()
]  # fmt: skip


# %%
def rescored(u: int, own: np.ndarray, pi: np.ndarray) -> np.ndarray:
    """The candidates of a user, best first by the exact score."""
    scores = rescore(vectors[own], heads[u], pi, kappa[u], rule=about["rule"])[0]
    return own[np.argsort(-scores, kind="stable")]


equal = np.full(k, 1 / k)
ranked["mixture, equal weights"] = [rescored(u, own, equal) for u, own in enumerate(union)]
ranked["mixture with π"] = [rescored(u, own, pi[u]) for u, own in enumerate(union)]


# %%
def first(rows) -> list[list[int]]:
    """The first K items of each user that are not in the history."""
    seen = map(set, history.tolist())
    return [[int(i) for i in row if i not in own][:K] for row, own in zip(rows, seen, strict=True)]


def agreement(slates) -> float:
    """The share of the exact slates that these slates hold."""
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(exact.items, slates, strict=True)]))


made = {name: first(rows) for name, rows in ranked.items()} | {"exact scan": exact.items.tolist()}
table = pd.DataFrame({name: [agreement(slate)] for name, slate in made.items()}, index=["of the exact slate"]).T
table.round(3)

# %%
plots.bars(table["of the exact slate"].to_dict(), "Only the mixture with π finds the exact slate", "share of it")

# %% [markdown] tags=["lesson"]
# **What you should see.** The maximum finds a third of the exact slate, sum and ranks a fifth: all heads count alike
# there, also those the user hardly has. The sum with $\pi_u$ finds half of it at the cost of one query, but it is a
# single vector, the mean of the interests. The mixture with equal weights finds half, too. With $\pi_u$ it is the exact
# slate but for an item here and there that no list holds.

# %% [markdown]
# ## 5 · What π_u is worth
#
# Agreement is not accuracy. The exact scan, once with the user's own weights and once with equal ones, for all users.
# Here the whole history of a user is left out, as `evaluate` does it:

# %%
everybody = sample_users(dataset, p.max_eval, seed)
histories, wanted = [np.concatenate(dataset.split(u)[:2]) for u in everybody], dataset.targets(everybody, "test")
own, same = (retriever.retrieve(histories, K, pi=weights) for weights in (None, equal))
R = {name: metrics.recall(slate.items, wanted, K) for name, slate in (("with π", own), ("equal weights", same))}
difference = R["with π"] - R["equal weights"]
error = difference.std() / np.sqrt(len(difference))
told = f"R@{K}: {R['with π'].mean():.4f} with π, {R['equal weights'].mean():.4f} with equal weights"
f"{told}; difference {difference.mean():+.4f} ± {1.96 * error:.4f}"

# %%
plots.bars({name: float(of.mean()) for name, of in R.items()}, told, f"R@{K} on the test items")

# %% [markdown] tags=["lesson"]
# **What you should see.** Without $\pi_u$ the same heads find an eighth less: 0.104 in place of 0.119. (The interval is
# over users of one training.) Equal weights *at serving* are not what `pi="uniform"` *in training* is, where the heads
# can adapt: see `13_ablations`.

# %% [markdown]
# ## 6 · `rescore` restores the exact order
#
# Candidates may come from anywhere. What the lists hold, `rescore` puts into the order of the density (eq. 23);
# what no list holds is lost. So the only question is how long the lists must be (`07_serving` has a bound that proves
# it).

# %%
by_M = {}
for m in (5, 10, 25, 50, 100):
    slate = first([rescored(u, np.unique(lists[u, :, :m]), pi[u]) for u in range(len(asked))])
    by_M[f"M = {m}"] = agreement(slate)
    for wanted_slate, one in zip(exact.items.tolist(), slate, strict=True):
        there = [item for item in wanted_slate if item in one]
        assert [item for item in one if item in wanted_slate] == there, "candidates should come in the exact order"
plots.bars(by_M, f"{k} lists of M items, rescored", "share of the exact slate")

# %%
whole = [row for row, one in enumerate(slate) if set(one) == set(exact.items[row])]
assert whole and all(slate[row] == exact.items[row].tolist() for row in whole), "the same slate, in the same order"
f"with lists of {m}, {len(whole)} of {len(asked)} slates are the exact ones, item by item in the same order"

# %% [markdown] tags=["lesson"]
# **What you should see.** Lists of 25 find more than half of the slate, lists of 100 all but an item here and there.
# The items that are found stand in the exact order, whatever the length.

# %% [markdown]
# ## 7 · A server of thirty lines
#
# An index of `Retriever.save` and the exported folder answer histories in the ids of the log. `bachlib.serve.lean`
# imports numpy and numba, but not torch. The script reads a history per line and writes a slate per line:

# %%
server = '''"""Slates for histories in the ids of the log: onnxruntime makes the heads, bachlib the slates."""
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from bachlib.serve.lean import Server

bundle, index = map(Path, sys.argv[1:])
n_hist = json.loads((bundle / "model.json").read_text())["n_hist"]
session = onnxruntime.InferenceSession(bundle / "user_side.onnx")
server = Server(index)
'''

# %%
server += """

def answer(raw, K=10):
    seen = server.numbers_of(raw)  # an unknown id is an error that names the nearest one
    last = seen[-n_hist:] if len(seen) else np.array([-1])
    heads, log_pi, kappa = session.run(None, {"history": last[None]})
    return server.retrieve(heads, log_pi=log_pi, kappa=kappa, K=K, exclude=[seen])


for line in sys.stdin:
    slate = answer(json.loads(line))
    told = {"items": slate.raw_ids[0].tolist(), "scores": slate.scores[0].round(4).tolist()}
    print(json.dumps(told | {"proved": bool(slate.certified[0]), "torch": "torch" in sys.modules}))
"""

# %%
index = retriever.save(output_dir("exports", f"{run.folder.name}-index"))
script = output_dir("exports", "server.py")
script.write_text(server)
raw = [dataset.raw(dataset.sequence(u)).tolist() for u in (0, p.user)] + [dataset.raw([12]).tolist(), []]
asked_for = "".join(json.dumps(one) + "\n" for one in raw)
done = subprocess.run([sys.executable, script, folder, index], input=asked_for, text=True, capture_output=True)
assert done.returncode == 0, done.stderr
answers = [json.loads(line) for line in done.stdout.splitlines()]
pd.DataFrame(
    {"first items": [", ".join(one["items"][:4]) for one in answers], "proved": [one["proved"] for one in answers]}
)

# %% [markdown]
# The same slates as those of the retriever with torch, from users with long histories to one without any:

# %%
ours = retriever.retrieve(raw=raw, K=10)
for row, one in enumerate(answers):
    assert one["items"] == ours.raw_ids[row].tolist() and one["proved"] and not one["torch"]
    assert np.allclose(one["scores"], ours.scores[row], atol=1e-3)
f"{len(server.splitlines())} lines, {len(answers)} histories, no torch"

# %% [markdown]
# ## Exercises
#
# 1. The sum with $\pi_u$ needs one query and no lists. Why is it not enough?
#
# <details><summary>Answer</summary>
#
# $\sum_r\pi_u^{(r)}\langle\mathbf u^{(r)},\mathbf v\rangle$ is the inner product with one vector, the weighted mean of
# the heads. It points between the interests, where items may be of no interest at all. The density is a sum of
# *exponentials* (or powers) of the cosines, so an item near one strong head beats an item halfway between two.
# </details>
#
# 2. A store can filter by a column: *in stock*, say. Where would you put the filter, and what does it do to the lists?
#
# <details><summary>Answer</summary>
#
# Into the queries of the store, so that each list has $M$ items that may be served. A filter after the lists leaves
# fewer candidates, and the slate loses items that a longer list would have held. Without a store, `only=` of the
# retriever and of `Server` does it, with proof.
# </details>
#
# 3. Replace $\kappa$ by $1/\tau$ in `rescored`. What changes?
#
# <details><summary>Answer</summary>
#
# `kappa[u]` → `np.full(k, 1 / about["tau"])`. Little, if the learnt κ of a user's heads are close to each other. The
# order then depends on $\pi_u$ and the cosines only, and a smaller κ favours items between the heads.
# </details>

# %%
record(
    "12_export",
    {
        "users": dataset.n_users,
        **{f"exact slate, {name}": round(value, 3) for name, value in list(table["of the exact slate"].items())[:-1]},
        "R@50, exact with π": round(float(R["with π"].mean()), 4),
        "R@50, exact with equal weights": round(float(R["equal weights"].mean()), 4),
        "lists of 25, rescored": round(by_M["M = 25"], 3),
    },
)

# %% [markdown]
# **Next:** [`07_serving`](07_serving.ipynb) has the bound that says when lists are long enough, steering and cold
# start; [`08_spectrum`](08_spectrum.ipynb) a codebook, for which a store needs no query per head.
