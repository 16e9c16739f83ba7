"""The planted world is what it says it is."""

import filecmp

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from bachlib import BachError
from bachlib.data import planted, prepare
from bachlib.experiment.settings import Experiment
from bachlib.experiment.stages import data_name


def test_power_spherical_draws():
    """Unit vectors with the expected cosine, whose distribution is the Beta of the density (1 + t)^κ."""
    rng = np.random.default_rng(0)
    d, angle = 8, 0.6
    mean = planted.unit(rng.normal(size=d))
    draws = planted.power_spherical(np.broadcast_to(mean, (20_000, d)), angle, rng)
    assert np.allclose(np.linalg.norm(draws, axis=1), 1)
    t = draws @ mean
    assert abs(t.mean() - np.cos(angle)) < 0.005
    kappa = (d - 1) * np.cos(angle) / (1 - np.cos(angle))
    # p(t) ∝ (1 + t)^κ (1 − t²)^((d−3)/2), integrated numerically
    grid = np.linspace(-1, 1, 20_001)
    density = (1 + grid) ** kappa * (1 - grid**2) ** ((d - 3) / 2)
    cdf = np.cumsum(density) / density.sum()
    assert stats.kstest(t, lambda x: np.interp(x, grid, cdf)).pvalue > 0.01
    # around the mean no direction is preferred
    rest = draws - t[:, None] * mean
    assert np.abs(rest.mean(0)).max() < 0.02


def test_sessions_stay_and_follow_pi():
    rng = np.random.default_rng(1)
    pi = np.array([0.5, 0.3, 0.2, 0.0])
    chain = planted.sessions(pi, 0.8, 200_000, rng)
    assert np.abs(np.bincount(chain, minlength=4) / len(chain) - pi).max() < 0.01
    stays = (chain[1:] == chain[:-1]).mean()
    assert abs(stays - (0.8 + 0.2 * (pi**2).sum())) < 0.01


def test_the_truth_fits_the_log(world):
    """Joined by hand: every liked event of the raw log carries the interest its item has in the data set."""
    truth = world.truth
    assert truth.pi.shape == (world.n_users, 5) and np.allclose(truth.pi.sum(1), 1, atol=1e-5)
    assert truth.tastes.shape == (world.n_users, 5, 16) and truth.items.shape == (world.n_items, 16)
    for vectors in (truth.directions, truth.items, truth.tastes):
        assert np.allclose(np.linalg.norm(vectors, axis=-1), 1, atol=1e-5)
    folder = planted.write_world(n_users=150, n_items=600, n_interests=5, mean_events=120, seed=3)
    log = pd.read_csv(folder / "log.csv")
    with np.load(folder / "truth.npz") as raw:
        log["interest"] = raw["event_interest"]
        assert np.allclose(truth.pi, raw["pi"][planted.index_of(world.users["raw_id"])])
    assert ((log["interest"] < 0) == (log["rating"] < 4)).all()
    liked = log[log["rating"] >= 4].merge(
        world.items[["raw_id", "item"]].rename(columns={"item": "id"}), left_on="item", right_on="raw_id"
    )
    assert len(liked) and (truth.item_interest[liked["id"]] == liked["interest"]).all()
    assert [list(genres) for genres in world.items["genres"]] == [[truth.genres[r]] for r in truth.item_interest]


def test_users_like_what_pi_says(world):
    counts = np.stack(
        [np.bincount(world.truth.item_interest[world.sequence(u)], minlength=5) for u in range(world.n_users)]
    )
    shares = counts / counts.sum(1, keepdims=True)
    assert np.corrcoef(shares.ravel(), world.truth.pi.ravel())[0, 1] > 0.9


def test_users_pick_near_their_taste(world):
    """Fine taste: inside an interest, liked items are closer to the user's own point than the others are."""
    truth = world.truth
    nearer = []
    for u in range(world.n_users):
        r = truth.pi[u].argmax()
        members = np.flatnonzero(truth.item_interest == r)
        cosine = truth.items[members] @ truth.tastes[u, r]
        liked = np.isin(members, world.sequence(u))
        if not liked.all():  # some have liked all there is
            nearer.append(cosine[liked].mean() - cosine[~liked].mean())
    assert len(nearer) > 50
    assert np.mean(np.array(nearer) > 0) > 0.95


def test_same_parameters_same_bytes(tmp_path):
    for name in ("a", "b"):
        planted.write_world(tmp_path / name, n_users=40, n_items=200, n_interests=3)
    names = ["items.csv", "log.csv", "truth.npz", "world.json"]
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == names
    assert filecmp.cmpfiles(tmp_path / "a", tmp_path / "b", names, shallow=False)[0] == names
    planted.write_world(tmp_path / "c", n_users=40, n_items=200, n_interests=3, seed=1)
    assert not filecmp.cmp(tmp_path / "a" / "log.csv", tmp_path / "c" / "log.csv", shallow=False)


def test_a_world_given_by_its_path_has_the_folder_that_notebooks_use(tmp_path, monkeypatch):
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path))
    sizes, options = {"n_users": 60, "n_items": 300, "n_interests": 3}, {"min_items": 40}
    made = prepare("planted", planted.write_world(**sizes), quiet=True, **options)
    assert data_name(Experiment(d=8, **sizes, **options)) == made.folder.name
    elsewhere = prepare("planted", planted.write_world(tmp_path / "w", **sizes), quiet=True, **options)
    assert elsewhere == made, "the same world in another folder"
    other = prepare("planted", planted.write_world(**sizes, seed=1), quiet=True, seed=1, **options)
    assert other.folder.name == data_name(Experiment(d=8, **sizes, **options, data_seed=1)) != made.folder.name


def test_titles_are_unique_and_readable(tmp_path):
    folder = planted.write_world(tmp_path / "w", n_users=2, n_items=7000, n_interests=18)
    items = pd.read_csv(folder / "items.csv")
    assert not items.duplicated(["title", "genre"]).any()
    assert items.groupby("genre")["title"].nunique().min() > 380
    assert "Genre 17" in set(items["genre"])


def test_defaults_need_more_than_one_vector(tmp_path):
    """What the defaults were chosen for: with perfect towers one vector finds much less than the true mixture."""
    dataset = prepare("planted", planted.write_world(n_users=400), tmp_path / "o", quiet=True)
    truth, users = dataset.truth, np.arange(dataset.n_users)
    targets = dataset.targets(users, "test")
    earlier = dataset.matrix("all").toarray() > 0
    np.put_along_axis(earlier, targets, False, axis=1)

    def recall(score):
        top = np.argpartition(np.where(earlier, np.inf, -score), 50, axis=1)[:, :50]
        return (targets[:, :, None] == top[:, None, :]).any(-1).mean()

    cosine = truth.tastes @ truth.items.T
    mixture = (truth.pi[:, :, None] * ((1 + cosine) / 2) ** 14).sum(1)
    one = planted.unit((truth.pi[:, :, None] * truth.tastes).sum(1)) @ truth.items.T
    assert recall(mixture) > 1.4 * recall(one)


@pytest.mark.parametrize(
    "params",
    [
        {"n_users": 2},
        {"d": 2, "stickiness": 0.0, "zipf": 0.0},
        {"interests_per_user": 0.01},
        {"disliked": 0.9, "mean_events": 20},
        {"width": 0.01, "taste": 0.01, "zipf": 5.0},
        {"n_interests": 200, "n_items": 200},
    ],
)
@pytest.mark.filterwarnings("error")
def test_extreme_worlds(tmp_path, params):
    folder = planted.write_world(tmp_path / "w", **{"n_users": 20, "n_items": 300, **params})
    with np.load(folder / "truth.npz") as truth:
        assert all(np.isfinite(truth[name]).all() for name in ("items", "tastes", "pi", "popularity"))


def test_a_log_that_is_no_world(tmp_path):
    folder = planted.write_world(tmp_path / "w", n_users=40, n_items=200, n_interests=3)
    (folder / "truth.npz").unlink()
    with pytest.raises(BachError, match="not a planted world"):
        prepare("planted", folder, tmp_path / "o", min_items=40, quiet=True)


def test_wrong_parameters():
    with pytest.raises(BachError, match=r"n_items should be at least n_interests \(50\), got 10"):
        planted.write_world(n_interests=50, n_items=10)
    with pytest.raises(BachError, match=r"stickiness: Input should be less than 1, got 1\.5"):
        planted.write_world(stickiness=1.5)
    with pytest.raises(BachError, match="n_interest: not a parameter; there are n_users"):
        planted.write_world(n_interest=3)
