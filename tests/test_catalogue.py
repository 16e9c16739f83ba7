"""Items that no kept user likes are items: they have no PureSVD row, are drawn as negatives, ranked and served."""

import numpy as np
import pandas as pd
import pytest
import torch
from serving import SMALL

from bachlib.data import planted, prepare
from bachlib.evaluate import evaluate, meaning
from bachlib.model.methods import build
from bachlib.model.svd import fold_in, pure_svd
from bachlib.serve import Retriever
from bachlib.show import plots
from bachlib.train import fit


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    sizes = {"n_users": 150, "n_items": 1_500, "n_interests": 5, "mean_events": 60.0, "zipf": 1.2}
    return planted.write_world(tmp_path_factory.mktemp("w") / "w", **sizes)


@pytest.fixture(scope="module")
def wide(log, tmp_path_factory):
    """Few of the users are kept, so a large part of the catalogue is liked by nobody of them."""
    dataset = prepare("planted", log, tmp_path_factory.mktemp("d") / "wide", min_items=70, quiet=True)
    assert dataset.n_users > 30 and 100 < len(never(dataset)) < dataset.n_items // 2
    return dataset


def never(dataset):
    return np.flatnonzero(dataset.items["n_users"] == 0)


def test_they_have_no_row_and_a_vector(wide):
    svd, items = pure_svd(wide, 16), never(wide)
    assert np.abs(svd.items[items]).max() < 1e-6
    table = build("p-bach", wide, **SMALL).item_tower.table
    assert (table[items].norm(dim=1) > 0.1).all(), "a random row, as an item without training likes has"
    assert np.linalg.matrix_rank(table[items].numpy()) == 16
    assert wide.truth.items.shape == (wide.n_items, 16) and np.isfinite(wide.truth.popularity[items]).all()


def test_they_train_and_are_evaluated_and_served(wide, tmp_path):
    model, seen = build("p-bach", wide, **SMALL), []
    objective = model.objective
    model.objective = lambda history, positive, negatives, user: (
        seen.append(negatives) or objective(history, positive, negatives, user)
    )
    run = fit(model, wide, {"epochs": 1, "batch_size": 64, "n_negatives": 64}, tmp_path / "run", quiet=True)
    del model.objective
    drawn = torch.cat(seen).numpy()
    share = np.isin(drawn, never(wide)).mean()
    assert share == pytest.approx(len(never(wide)) / wide.n_items, abs=0.05), "negatives come from the whole catalogue"
    assert drawn.min() < 0.05 * wide.n_items and drawn.max() > 0.95 * wide.n_items
    for data, trained in ((wide, run), (wide.strict(0.3), None)):
        found = evaluate(trained or build("p-bach", data, **SMALL), data, slate=20, quiet=True)
        assert np.isfinite(found.per_user).all().all() and found.ranks.max() <= wide.n_items
    history = wide.history(np.arange(5), "test")
    K = wide.n_items - int(wide.lengths.max())
    slate = Retriever(run, "exact").retrieve(history, K=K)
    assert slate.certified.all() and np.isin(slate.items, never(wide)).any()
    scores = run.model.score(history).detach().numpy()
    for row, past in enumerate(history):
        best = np.argsort(-np.where(np.isin(np.arange(wide.n_items), past), np.inf * -1, scores[row]))[:K]
        np.testing.assert_allclose(scores[row][slate.items[row]], scores[row][best], atol=1e-4)
    now = fold_in(wide, pure_svd(wide, 16), [np.arange(5)])
    retriever = Retriever(run, "exact")
    (number,) = retriever.add(now)
    assert number == wide.n_items and retriever.retrieve(history, K=K + 1).certified.all()


def test_they_are_ranked(wide):
    """A model that prefers them puts every held-out item behind all of them; MostPop puts them last."""

    class Prefers(torch.nn.Module):
        n_hist = 50

        def score(self, history):
            return torch.from_numpy(np.isin(np.arange(wide.n_items), never(wide))).float().expand(len(history), -1)

    assert evaluate(Prefers(), wide, quiet=True).ranks.min() == len(never(wide)) + 1
    counts = build("mostpop", wide).score(torch.zeros(1, 1, dtype=torch.long))[0].numpy()
    assert (counts[never(wide)] == 0).all()


def test_clusters_are_of_items_with_a_row(log, wide, tmp_path):
    """Without genres the topics are clusters; items without training likes are in none of them."""
    pd.read_csv(log / "log.csv").to_csv(tmp_path / "mine.csv", index=False)
    mine = prepare("csv", tmp_path / "mine.csv", tmp_path / "o", min_items=70, quiet=True)
    assert mine.n_items == wide.n_items and mine.genres.names == []
    topics, liked = meaning.topics_of(mine, 5), np.asarray(mine.matrix("train").sum(0))[0] > 0
    assert (topics.member.sum(1) == liked).all() and (topics.likes > 0).all() and (topics.first[~liked] == -1).all()
    assert plots.long_tail(mine.items["n_users"]).data[0].x[-1] == mine.n_items - len(never(mine))
