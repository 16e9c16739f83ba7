"""Extreme sizes and numbers: a training stays finite, or it stops and says what is not, where, and what to try."""

import numpy as np
import pytest
import torch
from serving import perturbed

from bachlib import BachError, NotFinite
from bachlib.data import Dataset, planted, prepare
from bachlib.evaluate import evaluate
from bachlib.experiment.settings import experiment_of
from bachlib.model.methods import METHODS, build
from bachlib.params import ModelParams, PrepareParams, TrainParams, WorldParams, validated
from bachlib.rank.ranks import rank_blocks
from bachlib.serve import Retriever
from bachlib.train import fit

LEARNT = [name for name in METHODS if name != "mostpop"]
FAR = 2**70  # ids and times that no 64-bit number holds
TINY = {"k": 4, "k_shared": 3, "k_own": 2, "d": 4, "ff": 8, "item_width": 8, "attention_heads": 2}
QUICK = {"epochs": 1, "batch_size": 8, "n_negatives": 5, "valid_every": 1}
ALL = {"targets": "all", "log_q": True, "false_negatives": "next"}


def log_of(folder, name, sequences, time=lambda n: n) -> Dataset:
    rows = [f"{FAR + u},{FAR + i},{time(n)}" for u, items in enumerate(sequences) for n, i in enumerate(items)]
    (folder / f"{name}.csv").write_text("\n".join(["user,item,time", *rows]) + "\n")
    return prepare("csv", folder / f"{name}.csv", folder / name, quiet=True, min_items=31)


@pytest.fixture(scope="module")
def logs(tmp_path_factory):
    """Histories of one item; users with equal items and times; a catalogue of ten, which only a folder can have."""
    folder = tmp_path_factory.mktemp("logs")
    short = log_of(folder, "short", [[(7 * u + n) % 60 for n in range(31)] for u in range(10)], lambda n: 10**20 - n)
    same = log_of(folder, "same", [range(40)] * 10, lambda n: 5)
    few = Dataset(same.folder, same.meta, np.asarray(same.sequences) % 10, same.offsets)
    few.meta = same.meta | {"content_hash": "few"}
    few.n_items = 10
    return {"short": short, "same": same, "few": few}


def finite(run) -> bool:
    numbers = run.history[["loss", "reconstruction", "prior", "entropy", "kappa_max", "valid_auprc"]].to_numpy(float)
    return bool(np.isfinite(numbers).all()) and all(bool(x.isfinite().all()) for x in run.model.state_dict().values())


def test_ids_and_times_beyond_64_bits(logs):
    assert logs["short"].users["raw_id"][0] == str(FAR) and logs["same"].n_windows == 10
    assert {logs["short"].items["raw_id"][i] for i in logs["short"].sequence(0)} == {str(FAR + n) for n in range(31)}


def test_a_time_that_is_too_far_away_is_said(tmp_path):
    for name, far in (("a", 10**22), ("b", -(10**30))):
        with pytest.raises(BachError, match=rf"{name}\S*: times should be between −10\^20 and 10\^20"):
            log_of(tmp_path, name, [range(31)], lambda n, far=far: far + n)


SMALLEST = [  # data, of the model, of the training
    ("short", {"tau": 0.005}, {"batch_size": 1, "n_negatives": 1, **ALL}),
    ("same", {"tau": 1.0, "candidates": "set"}, {"n_negatives": 0, "false_negatives": "next"}),
    ("few", {"k": 32, "k_shared": 32, "candidates": "set"}, {"learning_rate": 10.0, "epochs": 3, "batch_size": 5}),
]


@pytest.mark.parametrize("name", LEARNT)
def test_the_smallest_of_everything_trains(logs, tmp_path, name):
    for data, of_model, of_training in SMALLEST:
        model = build(name, logs[data], **TINY | of_model)
        try:
            run = fit(model, logs[data], QUICK | of_training, tmp_path, fresh=True, quiet=True)
            assert finite(run), (data, of_model, of_training)
        except NotFinite as error:
            assert of_training.get("learning_rate") and str(error).startswith("training diverged in ")


@pytest.mark.parametrize("name", ["sasrec", "bam", "maxmf", "p-bach", "v-bach-global", "v-bach-hybrid"])
@pytest.mark.parametrize("change", [{"learning_rate": 1e30}, {"tau": 1e-30}], ids=str)
def test_what_is_not_finite_is_named(logs, tmp_path, name, change):
    model = build(name, logs["same"], **TINY | {key: x for key, x in change.items() if key == "tau"})
    settings = QUICK | {"epochs": 20} | {key: x for key, x in change.items() if key != "tau"}
    place = r"epoch \d+, step \d+|the validation of epoch \d+|epoch \d+ after \d+ steps"
    with pytest.raises(NotFinite, match=rf"^training diverged in ({place}): ") as error:
        fit(model, logs["same"], settings, tmp_path, quiet=True)
    told = str(error.value)
    assert "a smaller learning rate or a larger tau usually helps" in told and "largest parameters: " in told
    named = "= nan", "= inf", "got nan", "not finite in: e", "more than float32 holds", "are not finite", "no longer"
    assert any(words in told for words in named), told


def test_a_validation_that_is_not_finite_says_where(logs, tmp_path):
    model = build("p-bach", logs["same"], **TINY)
    encode = model.encode
    model.encode = lambda *given: encode(*given)._replace(heads=torch.full((10, 4, 4), torch.nan))
    with pytest.raises(
        NotFinite, match=r"in the validation of epoch 1: .*not finite.*\n +learning rate 0.001, largest"
    ):
        fit(model, logs["same"], QUICK, tmp_path, quiet=True)


def test_a_row_without_any_other_candidate_is_refused(logs):
    with pytest.raises(BachError, match="batch_size=1 with n_negatives=0: a row has no candidate but its own positive"):
        fit(build("p-bach", logs["same"], **TINY), logs["same"], {"batch_size": 1, "n_negatives": 0})


@pytest.mark.parametrize("model", [TrainParams, ModelParams, PrepareParams, WorldParams])
def test_a_seed_is_below_2_to_the_64(model):
    assert validated(model, {"seed": 2**64 - 1}, "x").seed == 2**64 - 1
    for seed, said in ((2**64, "less than 18446744073709551616"), (-1, "greater than or equal to 0")):
        with pytest.raises(BachError, match=rf"seed: Input should be {said}, got {seed}"):
            validated(model, {"seed": seed}, "x")
    with pytest.raises(BachError, match="data_seed: Input should be less than 18446744073709551616"):
        experiment_of({"data_seed": 2**64}, "my.yaml")


def test_the_largest_seed_works_everywhere(tmp_path):
    seed = 2**64 - 1
    log = planted.write_world(tmp_path / "w", n_users=40, n_items=120, n_interests=3, mean_events=80, seed=seed)
    one = prepare("planted", log, tmp_path / "d", quiet=True, min_items=31, seed=seed, ties="shuffle", max_users=20)
    run = fit(build("p-bach", one, **TINY, seed=seed), one, QUICK | {"seed": seed, "valid_users": 5}, tmp_path / "r")
    assert evaluate(run, one, seed=seed, quiet=True).about["seed"] == seed
    assert len(one.strict(seed=seed).cold) == 2


@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
@pytest.mark.parametrize("key", ["tau", "learning_rate", "remi_lambda", "mean_events", "min_rating"])
def test_a_parameter_is_finite(key, wrong):
    model = next(of for of in (ModelParams, TrainParams, WorldParams, PrepareParams) if key in of.model_fields)
    with pytest.raises(BachError, match=f"{key}: Input should be a finite number, got {wrong}"):
        validated(model, {key: wrong}, "x")


@pytest.mark.parametrize(("tau", "more"), [(0.005, 0.0), (0.005, 80.0), (1.0, 0.0), (1.0, -80.0)])
@pytest.mark.parametrize("name", ["p-bach", "v-bach"])
def test_served_and_ranked_alike_at_any_tau_and_kappa(world, name, tau, more):
    """The exact scan puts each held-out item where evaluation ranks it; κ = 1/τ, or e^80 times as much or as little."""
    model = perturbed(world, name, tau=tau)
    with torch.no_grad():
        model.kappa_net.net[4].bias += more
    users = np.arange(4)
    found = np.concatenate([ranks for _, ranks in rank_blocks(model, world, users, "test")])
    for u in users:
        past = world.sequence(u)[: world.begins["test"][u]]
        slate = Retriever(model, "exact").retrieve([past], world.n_items - len(past)).items[0]
        places = {item: place for place, item in enumerate(slate.tolist(), 1)}
        assert [places[item] for item in world.targets([u], "test")[0]] == found[u].tolist()
