"""Full-catalogue evaluation: against sorting by hand, its protocol, cold users, slates, saving and loading."""

import json

import numpy as np
import pandas as pd
import pytest
import torch
from commands import bach_here

from bachlib import BachError
from bachlib.data import Windows, prepare
from bachlib.evaluate import Evaluation, evaluate, metrics
from bachlib.evaluate.evaluation import slate_table
from bachlib.model.methods import METHODS, build
from bachlib.rank.ranks import target_ranks
from bachlib.train import fit
from bachlib.train.run import Run, data_of

SMALL = {"d": 16, "ff": 16, "item_width": 16}
QUICK = {"epochs": 1, "batch_size": 256, "n_negatives": 64, "valid_every": 1}
COLUMNS = ["R@10", "R@50", "R@100", "NDCG@100", "AUPRC", "AP@100"]


@pytest.fixture(scope="module")
def run(world, tmp_path_factory):
    return fit(build("p-bach", world, 3, **SMALL), world, QUICK, tmp_path_factory.mktemp("run"), quiet=True)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("split", ["valid", "test"])
def test_every_method_against_sorting(world, method, split):
    """The whole catalogue sorted, earlier items taken out, metrics of the list: no code shared but the scores."""
    model = build(method, world, 3, **SMALL)
    found = evaluate(model, world, split, quiet=True)
    assert list(found.per_user) == COLUMNS and list(found.means) == COLUMNS and len(found.per_user) == world.n_users
    users = np.arange(0, world.n_users, 7)
    scores = model.score(world.history(users, split), user=torch.from_numpy(users)).numpy()
    for row, u in zip(scores, users, strict=True):
        prefix, valid, test = world.split(u)
        earlier, targets = (prefix, valid) if split == "valid" else (np.concatenate([prefix, valid]), test)
        order = np.lexsort((np.arange(world.n_items), -row))
        ranked, line = order[~np.isin(order, earlier)], found.per_user.loc[u]
        assert line["R@50"] == pytest.approx(metrics.recall(ranked, targets, 50))
        assert line["NDCG@100"] == pytest.approx(metrics.ndcg(ranked, targets, 100), abs=2e-3)
        assert line["AUPRC"] == pytest.approx(metrics.average_precision(ranked, targets), rel=1e-2)
        assert line["AP@100"] == pytest.approx(metrics.average_precision(ranked, targets, 100), abs=2e-3)
    assert found.means["R@10"] == found.per_user["R@10"].mean()


def test_twice_is_the_same_and_so_is_a_reloaded_run(run, world, tmp_path):
    first, again = evaluate(run, world, slate=20, quiet=True), evaluate(run, world, slate=20, quiet=True)
    reloaded = evaluate(Run.load(run.folder, world), world, slate=20, quiet=True)
    for other in (again, reloaded):
        pd.testing.assert_frame_equal(first.per_user, other.per_user, check_exact=True)
        assert (first.ranks == other.ranks).all() and (first.slates == other.slates).all()
    first.save(tmp_path)
    kept = Evaluation.load(tmp_path)
    pd.testing.assert_frame_equal(first.per_user, kept.per_user, check_exact=True)
    assert (kept.means, kept.protocol, kept.about) == (first.means, first.protocol, json.loads(json.dumps(first.about)))
    assert (kept.slates == first.slates).all() and not list(tmp_path.glob(".*partial"))
    with pytest.raises(BachError, match="has not been evaluated on its valid items"):
        Evaluation.load(tmp_path, "valid")


def test_blocks_change_nothing(run, world, monkeypatch):
    whole = evaluate(run, world, quiet=True)
    monkeypatch.setattr("bachlib.rank.ranks.BLOCK", 5 * world.n_items)
    np.testing.assert_array_equal(evaluate(run, world, quiet=True).ranks, whole.ranks)


def test_the_kept_weights_are_those_validation_chose(run, world):
    """What picked the weights in training is what evaluation reports."""
    assert evaluate(run, world, "valid", quiet=True).means["AUPRC"] == pytest.approx(run.best["auprc"], rel=1e-12)


def test_at_most_so_many_users_drawn_with_the_seed(run, world):
    some, same, other = (evaluate(run, world, max_users=20, seed=s, quiet=True) for s in (1, 1, 2))
    assert len(some.per_user) == 20 and some.protocol == same.protocol
    assert some.protocol["users"]["hash"] != other.protocol["users"]["hash"]
    everybody = evaluate(run, world, quiet=True)
    pd.testing.assert_frame_equal(some.per_user, everybody.per_user.loc[some.per_user.index])


@pytest.mark.parametrize("exclude", ["history", "nothing"])
def test_other_exclusions_rank_among_more(run, world, exclude):
    usual, other = evaluate(run, world, quiet=True), evaluate(run, world, exclude=exclude, quiet=True)
    assert (other.ranks >= usual.ranks).all() and (other.ranks > usual.ranks).any()
    u = int(world.lengths.argmax())
    seen = np.concatenate(world.split(u)[:2])
    left = {"history": seen[:-50], "nothing": seen}[exclude]  # back in the race
    scores = run.model.score(world.history([u], "test"))[0].numpy()
    more = [(scores[left] > scores[item]).sum() for item in world.split(u)[2]]
    np.testing.assert_array_equal(other.ranks[u] - usual.ranks[u], more)
    with pytest.raises(BachError, match="should be one of earlier, history, nothing"):
        evaluate(run, world, exclude="some", quiet=True)


def test_mixed_up_arguments_are_said(run, world):
    with pytest.raises(BachError, match="should be 'valid' or 'test'"):
        evaluate(run, world, "train", quiet=True)
    left = world.n_items - world.lengths.max() - 1
    for slate in (world.n_items, 2.5, -1):
        with pytest.raises(BachError, match=f"0 .none. or at most {left}"):
            evaluate(run, world, slate=slate, quiet=True)
    with pytest.raises(BachError, match="max_users=0: should be at least 1"):
        evaluate(run, world, max_users=0, quiet=True)
    with pytest.raises(BachError, match=r"needs a model or a Run .*got str"):
        evaluate("outputs/runs/x", world, quiet=True)


def test_a_model_of_other_data_is_refused(run, world):
    """Other test items may be in its training; also a run whose data set was changed after it was built."""
    other = world.strict(0.1)
    for made in (run, run.model):
        with pytest.raises(BachError, match="on other data than"):
            evaluate(made, other, quiet=True)
    with pytest.raises(BachError, match="the model was built on other data than"):
        fit(build("p-bach", other, 3, **SMALL), world, QUICK, quiet=True)


class Own(torch.nn.Module):
    """The least a model of one's own can be."""

    def __init__(self, n_items):
        super().__init__()
        self.n_items = n_items

    def score(self, history):
        return np.tile(np.arange(self.n_items, dtype=np.float32), (len(history), 1))


def test_a_model_of_ones_own_needs_a_score_only(world):
    found = evaluate(Own(world.n_items), world, slate=5, quiet=True)
    assert found.label == "Own" and found.slates[:, 0].min() > world.n_items - 60
    with pytest.raises(BachError, match=r"score should return \(B, n_items\) = \(96, 600\).*got \(96, 599\)"):
        evaluate(Own(world.n_items - 1), world, quiet=True)


@pytest.mark.parametrize("name, text", [("json", "{"), ("json", "{}"), ("parquet", "no table"), ("parquet", None)])
def test_a_damaged_evaluation_is_said(world, tmp_path, name, text):
    evaluate(build("mostpop", world), world, quiet=True).save(tmp_path)
    path = tmp_path / f"evaluation-test.{name}"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(BachError, match=r"is (damaged|missing).* to write it again"):
        Evaluation.load(tmp_path)


# ------------------------------------------------------------------------------------------------------- slates


@pytest.mark.parametrize("method", ["p-bach", "mostpop"])
def test_slates_are_the_first_of_the_ranking(world, method):
    model = build(method, world, 3, **SMALL)  # counts have many ties
    found = evaluate(model, world, slate=25, quiet=True)
    scores = model.score(world.history(np.arange(world.n_users), "test")).numpy()
    for u in range(0, world.n_users, 5):
        allowed = np.setdiff1d(np.arange(world.n_items), np.concatenate(world.split(u)[:2]))
        expected = allowed[np.lexsort((allowed, -scores[u, allowed]))][:25]
        assert found.slates[u].tolist() == expected.tolist()
    np.testing.assert_array_equal(
        metrics.recall(found.slates, world.targets(np.arange(world.n_users), "test"), 10), found.per_user["R@10"]
    )


def test_what_slates_are_like(world):
    found = evaluate(build("mostpop", world), world, slate=10, quiet=True)
    for name in ("HR@10", "novelty@10", "popularity bias@10", "diversity@10", "interests@10"):
        assert found.per_user[name].notna().all() and found.means[name] == found.per_user[name].mean()
    assert found.means["popularity bias@10"] > 0  # of all methods this one
    assert found.means["coverage@10"] == len(np.unique(found.slates)) / world.n_items
    genres, u = world.genres.member, 3
    assert (genres.argmax(1) == np.unique(world.items["genres"].str[0], return_inverse=True)[1]).all()
    wanted = set(genres[world.split(u)[2]].argmax(1))
    met = len(wanted & set(genres[found.slates[u]].argmax(1))) / len(wanted)
    assert found.per_user.loc[u, "interests@10"] == pytest.approx(met)


@pytest.mark.parametrize("split", ["valid", "test"])
def test_slates_are_judged_by_what_was_known_then(world, split):
    """Popularity of training prefixes only, the history before this split, the wishes of this split."""
    users, rng = np.arange(world.n_users), np.random.default_rng(0)
    slates = np.stack([rng.choice(world.n_items, 6, replace=False) for _ in users])
    found = slate_table(slates, np.ones((len(users), 10), int), world, users, split)
    interest, counts = world.truth.item_interest, np.zeros(world.n_items)
    for u in users:
        counts[world.split(u)[0]] += 1
    for u in users[::9]:
        prefix, valid, test = world.split(u)
        known, wanted = (prefix, valid) if split == "valid" else (np.concatenate([prefix, valid]), test)
        met = np.isin(np.unique(interest[wanted]), interest[slates[u]]).mean()
        assert found.loc[u, "interests@6"] == pytest.approx(met)
        bias = counts[slates[u]].mean() / counts[known].mean() - 1
        assert found.loc[u, "popularity bias@6"] == pytest.approx(bias)


# --------------------------------------------------------------------------------------------------- cold users


def test_strict_trains_on_others_than_it_evaluates(world, tmp_path):
    strict = world.strict(0.2, seed=1)
    assert len(strict.cold) == round(0.2 * world.n_users) and strict != world and strict == world.strict(0.2, seed=1)
    assert "19 cold" in repr(strict) and strict.n_windows < world.n_windows
    trained = np.concatenate([batch.user for batch in Windows(strict, 64)])
    assert not np.isin(strict.cold, trained).any() and np.isin(strict.warm, trained).all()
    assert strict.matrix("train")[strict.cold].nnz == strict.matrix("all")[strict.cold].nnz == 0
    run = fit(build("p-bach", strict, 3, **SMALL), strict, QUICK, tmp_path / "cold", quiet=True)
    found = evaluate(run, strict, quiet=True)
    assert found.per_user.index.tolist() == strict.cold.tolist() and found.protocol["users"]["which"] == "cold"
    usual = build("p-bach", world, 3, **SMALL)
    assert not torch.equal(usual.item_tower.table, run.model.item_tower.table)  # another PureSVD
    with pytest.raises(BachError, match=r"built on other data than .*19 cold.*cold users differ"):
        evaluate(usual, strict, quiet=True)
    with pytest.raises(BachError, match="use pi='gate'"):
        build("p-bach", strict, 3, pi="table", **SMALL)
    with pytest.raises(BachError, match="was trained on other data"):
        Run.load(run.folder, world)
    ranks = target_ranks(Run.load(run.folder, strict).model, strict, strict.warm, "valid")
    warm = metrics.average_precision_of_ranks(ranks).mean()
    assert run.best["auprc"] == pytest.approx(warm, rel=1e-12)  # nor are they looked at to choose the weights
    again = evaluate(Run.load(run.folder, data_of(run.folder, world.folder)), strict, quiet=True)
    np.testing.assert_array_equal(again.ranks, found.ranks)
    for share in (0, 1, float("nan")):
        with pytest.raises(BachError, match="should be between 0 and 1"):
            world.strict(share)
    with pytest.raises(BachError, match="already has cold users"):
        strict.strict()


# ----------------------------------------------------------------------------------------------- on the command line


def test_bach_evaluate_prints_the_table(run, world, tmp_path):
    for name, method in (("all", "all-multihead"), ("pop", "mostpop")):
        fit(build(method, world, 3, **SMALL), world, QUICK, tmp_path / name, quiet=True)
    words = "evaluate", run.folder, tmp_path / "all", tmp_path / "pop", "--data", world.folder
    done = bach_here(*words)
    assert done.returncode == 0, done.stderr
    assert "mostpop (test, 96 users): R@10" in done.stdout and "relative gain over all-multihead" in done.stdout
    assert "small, test split, 96 users; seeds per method: 1." in done.stdout
    assert Evaluation.load(tmp_path / "pop").means == evaluate(build("mostpop", world), world, quiet=True).means
    done = bach_here(*words, "--baseline", "x")
    assert done.returncode == 2 and "should be one of the rows: mostpop, all-multihead, p-bach" in done.stderr


# ----------------------------------------------------------------------------------------------------- real data


def test_mostpop_on_movielens_1m(real_data, tmp_path):
    archive = real_data / "ml-1m.zip"
    if not archive.exists():
        pytest.skip("ml-1m.zip is not in BACH_DATA_DIR")
    dataset = prepare("movielens-1m", archive, tmp_path / "ml", quiet=True)
    means = evaluate(build("mostpop", dataset), dataset, quiet=True).means
    assert dataset.n_items == 3_533
    expected = {"R@10": 0.035, "R@50": 0.125, "R@100": 0.206, "NDCG@100": 0.108, "AP@100": 0.026}
    assert {name: round(means[name], 3) for name in expected} == expected
