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
# # 03 · A raw log becomes training windows, and every row is accounted for
#
# **Question.** What does the paper's preparation (appendix A) do to a log, step by step? The paper leaves some choices
# open. Which of them would change the results?
#
# **You need** `00_tour` for the planted world. **CPU minutes:** under one.
#
# The parameters below select the planted world. With `source = "movielens-1m"` or another data set the same cells run
# on real data; `path = None` then searches `BACH_DATA_DIR` and downloads the log if its licence allows it. For your own
# log set `source = "csv"`, `path = "my.csv"` and `columns = {"user": …, "item": …, "time": …}`.

# %% tags=["parameters"]
source = "planted"
path = None
columns = None
n_users = 500
min_rating = 4.0
min_items = 80
max_items = 50_000
catalogue = "liked"
max_users = 100_000
data_seed = 0
svd_rank = 64
user = 7

# %%
import numpy as np
import pandas as pd

from bachlib.data import Windows, planted
from bachlib.data.raw import find_raw
from bachlib.data.sources import SOURCES
from bachlib.evaluate import meaning
from bachlib.experiment.stages import prepared, raw_log, settings
from bachlib.files import record
from bachlib.model.svd import pure_svd
from bachlib.params import N_HIST, N_NEXT
from bachlib.show import plots

p = settings(globals())

# %% [markdown]
# ## 1 · The raw log
#
# The file as its authors publish it: plain, gzipped or inside a zip. Its first lines:

# %%
raw = find_raw(raw_log(p), SOURCES[source].log)[0]
with raw.open() as stream:
    print("".join(stream.readline(200).decode(errors="replace") for _ in range(5)))

# %% [markdown]
# ## 2 · The pipeline
#
# Appendix A has five steps. Keep *liked* interactions (a rating of at least 4, if there are ratings). Keep the *unique*
# items of each user, in the order of the first interaction. Keep the 50,000 most frequent items. Keep users with at
# least 80 of them. Keep at most 100,000 users. Each step reports what is left.

# %%
dataset = prepared(p, quiet=False)

# %%
plots.funnel(dataset.meta["steps"])

# %% [markdown] tags=["lesson"]
# **What you should see.** No bar is longer than the one above it. On the planted world 70–80% of the events stay. On
# MovieLens-1M 44% stay, and the liked rule removes the most.

# %% [markdown]
# Every removed row is counted. Each step starts with exactly what the step before left:

# %%
steps = pd.DataFrame(dataset.meta["steps"]).set_index("step")
left = steps[["rows", "users", "items"]]
before = pd.DataFrame(steps["before"].dropna().tolist())[left.columns]
assert (before.to_numpy() == left.to_numpy()[:-1]).all()
assert (left.diff().dropna() <= 0).all().all()
assert dataset.lengths.min() >= min_items and dataset.lengths.sum() == steps["rows"].iloc[-1]

# %% [markdown]
# **Whose likes make the catalogue?** The 50,000 items are counted *before* users are dropped, as in the paper. Its
# table has 20,720 movies of MovieLens-20M: all that anybody rated at least 4. So the catalogue also has items that no
# kept user likes (`catalogue = "liked"`). They have no row in the item table of section 6, but they are drawn as
# negatives and compete in every ranking. The other choice is to count again after users are dropped (`"kept"`):

# %%
whose = {name: prepared(p.model_copy(update={"catalogue": name})) for name in ("liked", "kept")}
liked_by_none = {name: int((data.items["n_users"] == 0).sum()) for name, data in whose.items()}
counts = {name: data.meta["counts"] for name, data in whose.items()}
pd.DataFrame(counts).T.assign(**{"items that no kept user likes": liked_by_none})

# %% [markdown]
# **What you should see.** Equal users, events and windows. On the planted world the catalogue has three more items,
# on MovieLens-1M 39 more (3,533 against 3,494). The choice shows in two places. Some of the random negatives are items
# that no kept user likes (on MovieLens-1M about 23 of a batch's 2,048). And a model can waste places of a slate on such
# items, because none of them is ever held out. MostPop puts them last, so its recall is the same.
#
# In raw ids the sequences are the same, and the two catalogues differ by such items only:

# %%
raw_ids = {name: data.items["raw_id"].to_numpy() for name, data in whose.items()}
sequences = [raw_ids[name][np.asarray(data.sequences)] for name, data in whose.items()]
assert (sequences[0] == sequences[1]).all()
assert len(np.setdiff1d(raw_ids["liked"], raw_ids["kept"])) == liked_by_none["liked"]
assert np.isin(raw_ids["kept"], raw_ids["liked"]).all() and liked_by_none["kept"] == 0

# %% [markdown]
# The result is one flat array of item ids, the position where each user begins, and two small tables. The array is
# memory-mapped.

# %%
dataset.items.head()

# %% [markdown]
# Popularity has a long tail: a few items have most of the likes. So in the paper 2,048 of the 2,560 candidates of a
# batch are drawn uniformly from the catalogue. Only 512 are items that other users liked.

# %%
plots.long_tail(dataset.items["n_users"])

# %%
plots.sequence_lengths(dataset.lengths, min_items)

# %% [markdown]
# ## 3 · One user
#
# Each dot is a liked item, in the row of its topic, in the order of time. The topics are the genres. If an item has
# several genres, we take the rarest. If a log has no genres, or thousands, the topics are 16 clusters of items that the
# same people like.

# %%
topics = meaning.topics_of(dataset)
names = [*topics.names, "none"]
topic = topics.first  # −1: none
titles = np.array(dataset.titles)
plots.timeline(user, dataset.sequence(user), titles, topic % len(names), names)

# %% [markdown]
# ## 4 · Tied times
#
# Real logs have many ties: in MovieLens-1M over 40% of the likes have the same second as the like before. We keep the
# order of the log. Many pipelines sort by (user, time, item) instead. This puts tied items in the order of their *id*,
# and an id often tells the age or popularity of an item. How often does the next item have a larger id than the one
# before? If the id has no information, half of the time:


# %%
def ascending(data) -> float:
    """Share of steps in a sequence to a larger id."""
    step = np.diff(np.asarray(data.sequences, dtype=np.int64))
    inside = np.delete(np.arange(len(step)), data.offsets[1:-1] - 1)  # not across users
    return float((step[inside] > 0).mean())


by_id = prepared(p.model_copy(update={"ties": "item"}))
shares = {"ties in log order": ascending(dataset), "ties in id order": ascending(by_id)}
log_order, id_order = shares.values()
said = f"The next id is larger in {id_order:.1%} of the steps with ties by id, in {log_order:.1%} in log order"
plots.bars(shares, said, "share of steps with a larger id")

# %% [markdown] tags=["lesson"]
# **What you should see.** 0.50 in log order on the planted world, 0.54 in id order. A model can learn this pattern and
# then looks better than it is. (MovieLens-1M: 0.53 against 0.63.) If a log has few ties, both orders are the same.

# %% [markdown]
# How many events tie? Preparing counts those whose user has another one at the same time. In a log of purchases almost
# all do: the items of a *basket* have one time. There the order of the log says nothing (in The Complete Journey it is
# the order of the ids), and `ties = "shuffle"` draws another. The split of the next section is a second danger: it can
# cut through a basket, and the model then knows a part of the basket whose other part it is asked for.
#
# `ties = "basket"` shuffles, too, and cuts no basket. The test items are the last baskets with together at least ten
# items. Of the earliest of them only as many items stay as are needed; the others are dropped and counted. The ten
# validation items are made from the baskets before in the same way:

# %%
baskets = prepared(p.model_copy(update={"ties": "basket"}))
same_user = dataset.users.set_index("raw_id")["user"][baskets.users["raw_id"]].to_numpy()
dropped = dataset.lengths[same_user] - baskets.lengths
assert (dropped >= 0).all()
rows = {data.meta["params"]["ties"]: data.meta["counts"] | {"share that ties": data.meta["tied"]["share"]}
        for data in (dataset, baskets)}  # fmt: skip
pd.DataFrame(rows).T.assign(**{"dropped per user": [0, dropped.mean()]}).round(3)

# %% [markdown] tags=["lesson"]
# **What you should see.** 39% of the events tie on the planted world, whose times are whole minutes. Its baskets are
# small: about half an event per user is dropped, and one user of 417 falls below 80 items. In The Complete Journey 97%
# tie, and 13 events per user are dropped.

# %% [markdown]
# ## 5 · Split and windows
#
# The last 20 items of a sequence are held out: 10 for validation and 10 for test. The items before them are the
# training prefix. From it we cut windows with stride 1: 50 items of history, and one of the next 10 items as the
# target. A sequence of $L$ items has
#
# $$L - 20 - (50 + 10) + 1 = L - 79$$
#
# windows. If `min_items` allows shorter sequences, each of them has a single window, padded on the left. Windows are
# computed from positions in the flat array and never stored.

# %%
plots.windows(len(dataset.sequence(user)), N_HIST, N_NEXT)

# %%
windows = Windows(dataset, batch_size=512)
assert len(windows) == dataset.n_windows == np.maximum(dataset.lengths - 79, 1).sum()
batch = next(iter(windows))
{name: getattr(batch, name).shape for name in batch._fields}

# %% [markdown]
# The same windows computed the slow way, by slicing one user's sequence:

# %%
train, valid, test = dataset.split(user)
mine = np.flatnonzero(np.repeat(np.arange(dataset.n_users), windows.counts) == user)
_, history, following = windows.window(mine)
ends = min(N_HIST, len(train) - N_NEXT) + np.arange(len(mine))  # where each history ends
for n, end in enumerate(ends):
    assert (history[n][-end:] == train[max(0, end - N_HIST) : end]).all()
    assert (following[n] == train[end : end + N_NEXT]).all()
assert not np.isin(following, np.concatenate([valid, test])).any()  # items are unique per user: none is held out
len(mine)

# %% [markdown]
# Every epoch draws a new order of the windows and a new target for each. The draw depends only on (seed, epoch). So two
# numbers give the position of the sampler, and a new sampler continues with exactly the next batch:

# %%
sampler = Windows(dataset)
for _, _drawn in zip(range(3), sampler, strict=False):
    pass
other = Windows(dataset)
other.load_state_dict(sampler.state_dict())
assert all((a == b).all() for a, b in zip(next(iter(sampler)), next(iter(other)), strict=True))
{name: sampler.state_dict()[name] for name in ("epoch", "step")}

# %% [markdown]
# ## 6 · PureSVD
#
# Every method of the paper starts from the same item table: the rank-64 truncated SVD of the binary user–item matrix,
#
# $$X \approx U\,\Sigma\,V^\top, \qquad \text{item } i \mapsto V_{i\cdot}.$$
#
# The table is frozen. A small residual network adapts it later.

# %%
svd = pure_svd(dataset, rank=svd_rank)
X = dataset.matrix("train")
plots.spectrum(svd.singular_values, density=X.nnz / np.prod(X.shape))

# %% [markdown] tags=["lesson"]
# **What you should see.** One large value, the popularity that all users share, and then a plateau. On the planted
# world the values drop after the sixteenth factor, from 24 to 17: there are sixteen interests. MovieLens-1M has no such
# drop.

# %% [markdown]
# Two checks that need no other library: the columns are orthonormal, and each is an eigenvector of $X^\top X$.

# %%
V, sigma = svd.items.astype(np.float64), svd.singular_values.astype(np.float64)
residual = np.abs(X.T @ (X @ V) - V * sigma**2).max() / sigma[0] ** 2
assert np.abs(V.T @ V - np.eye(svd_rank)).max() < 1e-5 and residual < 1e-5

# %% [markdown]
# The nearest items in this table, before any training:

# %%
popular = dataset.items["n_users"].nlargest(3).index
unit = planted.unit(V + 1e-12)
near = np.argsort(-unit[popular] @ unit.T, axis=1)[:, 1:4]
told = np.array([f"{title} ({names[g]})" for title, g in zip(titles, topic, strict=True)])
pd.DataFrame(told[near], index=told[popular], columns=["nearest", "second", "third"])

# %% [markdown]
# ## 7 · What the item table may see
#
# The paper's text takes "the binary user–item matrix of liked interactions". Read literally, this includes the
# validation and test items (`svd_on="all"`). Then the frozen table has seen the answers. How much is this worth? We use
# PureSVD itself as a recommender and measure the recall on the test items of at most 500 users, with every earlier item
# excluded.

# %%
users = np.random.default_rng(data_seed).permutation(dataset.n_users)[:500]
targets = dataset.targets(users, "test")
earlier = dataset.matrix("all")[users].toarray()
np.put_along_axis(earlier, targets, 0, axis=1)


def recall_at_50(scores: np.ndarray) -> float:
    top = np.argpartition(np.where(earlier > 0, np.inf, -scores), 50, axis=1)[:, :50]
    return float((targets[:, :, None] == top[:, None, :]).any(-1).mean())


# %%
popularity = np.asarray(X.sum(0), dtype=np.float64)
leak = {
    "MostPop": recall_at_50(np.broadcast_to(popularity, earlier.shape)),
    "PureSVD on training prefixes": recall_at_50(svd.scores(earlier)),
    "PureSVD on everything": recall_at_50(pure_svd(dataset, svd_rank, svd_on="all").scores(earlier)),
}
before, after = leak["PureSVD on training prefixes"], leak["PureSVD on everything"]
said = f"A table that has seen the test items finds {after:.1%} of them instead of {before:.1%}"
plots.bars(leak, said, "R@50 on the test items")

# %% [markdown] tags=["lesson"]
# **What you should see.** On the planted world PureSVD finds three to four times as much as MostPop. The table that saw
# everything finds three times as much again: with 64 factors for 417 users it memorises a good part of the matrix. On
# MovieLens-1M, with more users, the increase is a third (0.175 → 0.233). This increase is leakage and not skill.

# %% [markdown]
# So our default is the training prefixes only. The switch `svd_on` stays, to reproduce the paper's text.

# %% [markdown] tags=["lesson"]
# ## Exercises
#
# 1. Set `min_items = 40`. How many more users are there, and how many more windows? Which grows more, and why?
#    <details><summary>Answer</summary>79 more users (417 → 496) and 79 more windows (35,408 → 35,487). Users grow by a
#    fifth, windows hardly at all: a user with fewer than 80 items has a single window, padded on the left.</details>
# 2. Set `max_items = 1000`. Which steps of the funnel change?
#    <details><summary>Answer</summary>The catalogue step, which keeps 45% of the events, and the step after it. It
#    counts only the items that are left, and 151 users instead of 417 have 80 of these.</details>
# 3. Prepare your own log: `prepare("csv", "my.csv", columns={…})`. What happens if the time is missing in line 7?
#    <details><summary>Answer</summary>It stops with "my.csv, line 7: time is missing". With
#    <code>on_bad_rows="skip"</code> it skips the row and counts it in <code>meta.json</code>.</details>

# %% tags=["nbval-ignore-output"]
record(
    "03_data",
    {
        "users": dataset.n_users,
        "items": dataset.n_items,
        "items of kept users": whose["kept"].n_items,
        "windows": dataset.n_windows,
        "R@50 MostPop": round(leak["MostPop"], 4),
        "R@50 PureSVD": round(leak["PureSVD on training prefixes"], 4),
        "R@50 PureSVD on everything": round(leak["PureSVD on everything"], 4),
        "ascending, log order": round(shares["ties in log order"], 4),
        "ascending, id order": round(shares["ties in id order"], 4),
    },
)

# %% [markdown]
# **Next:** [`04_train`](04_train.ipynb) trains on these windows. If you have not read `02_elbo`, it explains the loss.
