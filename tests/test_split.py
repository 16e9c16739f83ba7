"""The global time split against the raw log read plainly, and everything that has to cope with fewer than ten items."""

import re

import numpy as np
import pandas as pd
import pytest
import torch

from bachlib import BachError
from bachlib.data import Windows, planted, prepare
from bachlib.data.dataset import BEGINS
from bachlib.evaluate import answers, diagnostics, evaluate, evaluation, metrics
from bachlib.files import output_dir
from bachlib.model.methods import METHODS, build
from bachlib.params import PrepareParams, noted
from bachlib.rank.ranks import rank_blocks, sample_users, score_blocks
from bachlib.serve import Retriever
from bachlib.show.explorer.session import Session
from bachlib.show.steering import sliders
from bachlib.train import fit

SHARE = 0.3  # of the test period, and of the validation before it: many users are in one period only


@pytest.fixture(scope="module")
def folder():
    return planted.write_world(n_users=150, n_items=600, n_interests=5, mean_events=120, seed=3)


@pytest.fixture(scope="module")
def dated(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("d") / "dated"
    return prepare("planted", folder, out, split="global-time", test_share=SHARE, min_items=60, quiet=True)


@pytest.fixture(scope="module")
def likes(folder, dated):
    """The likes of the data set with their times, from the raw log: user, item, time in the order of the log."""
    log = pd.read_csv(folder / "log.csv")
    log = log[log["rating"] >= 4].drop_duplicates(["user", "item"])
    for column, table in (("user", dated.users), ("item", dated.items)):
        log[column] = log[column].map(dict(zip(table["raw_id"], range(len(table)), strict=True)))
    log = log.dropna().astype({"user": int, "item": int})
    return log.sort_values(["user", "time"], kind="stable", ignore_index=True)


def cuts(likes) -> list[int]:
    times = np.sort(likes["time"].to_numpy())
    return [times[int(np.ceil(share * len(times))) - 1] for share in (1 - 2 * SHARE, 1 - SHARE)]


def test_the_periods_are_those_of_the_log(dated, likes):
    valid, test = cuts(likes)
    for u, of in likes.groupby("user"):
        parts = [of[of["time"] < valid], of[(of["time"] >= valid) & (of["time"] < test)], of[of["time"] >= test]]
        for mine, theirs in zip(dated.split(u), parts, strict=True):
            assert mine.tolist() == theirs["item"].tolist()
        for n, split in ((1, "valid"), (2, "test")):
            wanted, before = parts[n]["item"].tolist()[:10], pd.concat(parts[:n])["item"].tolist()
            assert dated.targets([u], split)[0].tolist() == wanted + [-1] * (10 - len(wanted))
            past = dated.history([u], split)[0]
            assert past[past >= 0].tolist() == before[-50:]
            assert (u in dated.evaluated(split)) == bool(wanted and before)
    day = pd.to_datetime([valid, test], unit="s").strftime("%Y-%m-%d").tolist()
    assert [dated.meta["split"]["from"][split] for split in ("valid", "test")] == day
    assert dated.meta["split"]["users"] == {s: len(dated.evaluated(s)) for s in ("valid", "test")}
    assert 10 <= len(dated.evaluated("test")) < dated.n_users, "the test would show nothing"


def test_training_ends_at_the_date(dated, likes):
    """No window, no count and no row of the matrix holds anything from the validation date on."""
    late = set(likes.loc[likes["time"] >= cuts(likes)[0], ["user", "item"]].itertuples(index=False, name=None))
    windows = Windows(dated)
    assert len(windows) == dated.n_windows > 100
    user, history, following = windows.window(np.arange(len(windows)))
    seen = {(u, i) for u, row in zip(user, np.hstack([history, following]), strict=True) for i in row if i >= 0}
    counted = set(zip(*(x.tolist() for x in dated.matrix("train").nonzero()), strict=True))
    assert seen and not seen & late and not counted & late
    assert len(counted) + len(late) == len(likes) == dated.matrix("all").nnz


def test_the_papers_split_is_as_it_was(world, folder, dated, tmp_path):
    assert (world.begins["valid"] == world.lengths - 20).all() and (world.begins["test"] == world.lengths - 10).all()
    assert not (world.folder / BEGINS).exists() and len(world.evaluated("test")) == world.n_users
    assert noted(PrepareParams()).keys().isdisjoint({"split", "test_share", "dates"})
    assert (sample_users(world, 40, 0) == np.sort(np.random.default_rng(0).choice(world.n_users, 40, False))).all()
    with pytest.raises(BachError, match="split is 'global-time' there and 'per-user' here"):
        prepare("planted", folder, dated.folder, min_items=60, quiet=True)


def test_given_dates(folder, dated, likes, tmp_path):
    days = ["2024-04-01", "2024-05-01"]
    given = prepare("planted", folder, tmp_path / "g", split="global-time", dates=days, min_items=60, quiet=True)
    for split, day in zip(("valid", "test"), days, strict=True):
        before = likes[pd.to_datetime(likes["time"], unit="s") < day].groupby("user").size()
        assert (given.begins[split] == before.reindex(range(given.n_users), fill_value=0)).all()
    log = likes.assign(when=pd.to_datetime(likes["time"], unit="s").dt.strftime("%Y-%m-%d %H:%M:%S"))
    log.to_csv(tmp_path / "own.csv", index=False)
    columns = {"user": "user", "item": "item", "time": "when"}
    of = {"split": "global-time", "dates": days, "min_items": 60, "columns": columns, "quiet": True}
    own = prepare("csv", tmp_path / "own.csv", tmp_path / "own", **of)
    assert sorted(own.begins["test"]) == sorted(given.begins["test"]), "another unit of time"
    assert given.meta["content_hash"] != dated.meta["content_hash"]


@pytest.mark.parametrize(
    "options, told",
    [
        ({"test_share": 0.2}, 'test_share and dates belong to split="global-time"'),
        ({"split": "global-time", "dates": ["2024-05-01"]}, "dates should be two days of the form"),
        ({"split": "global-time", "dates": ["2024-05-01", "2024-04-01"]}, "dates should be two days"),
        ({"split": "global-time", "dates": ["yesterday", "today"]}, "dates should be two days"),
        ({"split": "global-time", "dates": ["2030-05-01", "2030-06-01"]}, "leaves .* 0 test users.*10 users each"),
        ({"split": "by-month"}, "'per-user' or 'global-time'"),
    ],
)  # fmt: skip
def test_refused(folder, tmp_path, options, told):
    with pytest.raises(BachError, match=told):
        prepare("planted", folder, tmp_path / "x", min_items=60, quiet=True, **options)
    assert not (tmp_path / "x").exists()


def test_a_log_without_real_times_is_refused(tmp_path):
    rows = pd.DataFrame([(u, i, 7) for u in range(12) for i in range(40)], columns=["user", "item", "time"])
    rows.to_csv(tmp_path / "flat.csv", index=False)
    of = {"split": "global-time", "min_items": 31, "quiet": True}
    with pytest.raises(BachError, match="validation should begin first"):
        prepare("csv", tmp_path / "flat.csv", tmp_path / "o", **of)
    with pytest.raises(BachError, match="are not dates; use test_share"):
        prepare("csv", tmp_path / "flat.csv", tmp_path / "o", **of, dates=["2020-01-01", "2021-01-01"])


@pytest.mark.parametrize("method", ["p-bach", "all-multihead", "mostpop"])
def test_ranks_and_metrics_of_short_rows(dated, method):
    """Ranks by sorting all scores, metrics by their definition for lists; rows with fewer than ten are among them."""
    model = build(method, dated, 3, d=16)
    found = evaluate(model, dated, quiet=True)
    users = np.array(found.per_user.index)
    assert (users == dated.evaluated("test")).all()
    left_out = dated.n_users - len(users)
    assert found.protocol["users"]["without items"] == left_out
    short = (dated.targets(users, "test") < 0).any(1)
    assert short.any() and not short.all()
    for n, u in enumerate(users):
        scores = model.score(dated.history([u], "test", model.n_hist), [u])[0].double().numpy()
        scores[dated.sequence(u)[: dated.begins["test"][u]]] = -np.inf
        ranked, wanted = np.lexsort((np.arange(len(scores)), -scores)), dated.split(u)[2][:10]
        place = [int(np.flatnonzero(ranked == i)[0]) + 1 for i in wanted]
        if method == "mostpop":
            assert found.ranks[n].tolist() == place + [0] * (10 - len(wanted))
        row = found.per_user.loc[u]
        assert row["AUPRC"] == pytest.approx(metrics.average_precision(ranked, wanted), rel=2e-2)
        assert row["R@100"] == pytest.approx(metrics.recall(ranked, wanted, 100), abs=0.11)
    other = np.concatenate([block for _, block in rank_blocks(model, dated, users, "test")])
    assert (other == found.ranks).all() and ((other == 0) == (dated.targets(users, "test") < 0)).all()


def test_traps_and_slates_of_short_rows(dated):
    model = build("mostpop", dated)
    found = evaluate(model, dated, slate=20, quiet=True)
    users, ranks = np.array(found.per_user.index), found.ranks
    sampled = evaluation.sampled_ranks(model, dated, users, n=50)
    assert ((sampled == 0) == (ranks == 0)).all() and (sampled <= np.maximum(ranks, 0)).all()
    one = np.array([[1] + [0] * 9])
    assert evaluation.ndcg_ideal_of_hits(one, 10)[0] == metrics.ndcg_of_ranks(one, 10)[0] == 1
    assert evaluation.ndcg_in_set_order(np.array([[4, 5]]), np.array([[4, -1]]), 2)[0] == metrics.ndcg(
        [*{4, 5}], [4], 2
    )
    u = int(np.flatnonzero(ranks[:, 3] == 0)[0])
    wanted = dated.genres.member[dated.split(users[u])[2][:10]].max(0)
    seen = dated.genres.member[found.slates[u]].max(0)
    assert found.per_user["interests@20"].iloc[u] == pytest.approx((wanted * seen).sum() / wanted.sum())


def test_diagnostics_of_short_rows(dated):
    model, users = build("p-bach", dated, 3, d=16), dated.evaluated("test")
    of = diagnostics.held_out(model, dated, users)
    there = torch.from_numpy(dated.targets(users, "test") >= 0)
    assert (of.log_likelihood.isfinite() == there).all() and (of.gap.isfinite() == there).all()
    told = diagnostics.summary(model, dated, users)
    assert told["log-likelihood"] == pytest.approx(of.log_likelihood[there].mean().item())
    assert all(np.isfinite(value) for value in told.values())
    hard = diagnostics.held_out(build("all-multihead", dated, 3, d=16), dated, users).gamma
    assert (hard.isfinite().all(-1) == there).all() and (hard[there].sum(-1) == 1).all()
    gap = answers.posterior_gap({"p-bach k=3": of}).iloc[0]
    assert gap["KL gap"] == pytest.approx(of.gap[there].mean().item()) and 0 <= gap["same head"] <= 1
    assert np.isfinite(answers.calibration_controls({"p": of}).to_numpy()).all()
    assert np.isfinite(answers.genre_coverage({"p": model}, dated, users).to_numpy()).all()
    rows = dated.genres.member
    mean = dated.mean_of_targets(rows, users, "test")
    np.testing.assert_allclose(mean[0], rows[dated.split(users[0])[2][:10]].mean(0), rtol=1e-6)


def test_every_encoder_trains_on_dates(dated):
    """One epoch each; users without a window are there, too, and so is validation."""
    assert (dated.begins["valid"] <= 10).any()
    for method in METHODS:
        p = {"epochs": 1, "batch_size": 256, "n_negatives": 32}
        run = fit(
            build(method, dated, 2, d=8, item_width=16, ff=16),
            dated,
            p,
            output_dir("runs", f"dated-{method}"),
            quiet=True,
        )
        assert 0 < run.best["auprc"] < 1 and evaluate(run, dated, quiet=True).means["AUPRC"] > 0
    strict = dated.strict(0.3)
    found = evaluate(build("mostpop", strict), strict, quiet=True)
    assert (found.per_user.index == np.intersect1d(strict.cold, dated.evaluated("test"))).all()
    assert strict.n_windows == len(Windows(strict))


def test_pictures_ask_for_the_same_split(dated):
    """A page of a run, its sliders and the explorer show the history before the date and only later items after it."""
    run = fit(build("p-bach", dated, 2, d=8, item_width=16, ff=16), dated, {"epochs": 1, "n_negatives": 16}, quiet=True)
    session = Session({"p": Retriever(run, "exact", dataset=dated)}, dated)
    for u in dated.evaluated("test")[:20]:
        session.be(int(u))
        train, valid, test = dated.split(u)
        assert set(session.had) == {*train, *valid} and session.later == set(test[:10])
    page = sliders(run, dated, users=2)
    for one in page.data["users"]:
        train, valid, test = dated.split(int(re.search(r"user (\d+)", one["name"])[1]))
        assert one["history"] == [*train, *valid][::-1][: len(one["history"])] and one["later"] == test.tolist()


def test_the_leak(folder, dated, tmp_path):
    assert evaluation.leaked(dated, same_size=True).n_windows > dated.n_windows, (
        "all have later likes: none to leave out"
    )
    dated = prepare("planted", folder, tmp_path / "few", split="global-time", min_items=60, quiet=True)
    users = dated.evaluated("test")
    leaky, same = (evaluation.leaked(dated, same_size=same) for same in (False, True))
    mine = leaky.evaluated("test")
    assert len(mine) == len(users) // 2 and set(mine) <= set(users) and (mine == same.evaluated("test")).all()
    for split in ("valid", "test"):
        assert (leaky.begins[split][mine] == dated.begins[split][mine]).all()
        assert (leaky.targets(mine, split) == dated.targets(mine, split)).all()
    others = np.setdiff1d(np.arange(dated.n_users), mine)
    assert (leaky.begins["valid"][others] == dated.lengths[others]).all()
    assert dated.n_windows < leaky.n_windows == len(Windows(leaky))
    assert 0.9 * dated.n_windows < same.n_windows == len(Windows(same)) <= dated.n_windows
    assert (same.begins["valid"][mine] == dated.begins["valid"][mine]).all()
    late = dated.lengths > dated.begins["valid"]
    assert (same.begins["valid"][others][late[others]] == dated.lengths[others][late[others]]).all(), "the leak is kept"
    assert len({data.meta["content_hash"] for data in (dated, leaky, same)}) == 3
    with pytest.raises(BachError, match="leaked needs data with split='global-time'"):
        evaluation.leaked(dated.strict(0.3))


def test_scores_of_short_rows_on_other_devices(dated):
    """`score_blocks` and the two ways to rank its blocks."""
    from bachlib.rank.ranks import plain_ranks, ranks

    model = build("mostpop", dated)
    for block in score_blocks(model, dated, dated.evaluated("test"), "test"):
        assert (plain_ranks(block.scores, block.targets).numpy() == ranks(block.scores, block.targets)).all()
