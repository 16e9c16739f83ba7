"""The claims ledger: rules for verdicts, effects of known size found with the right sign, what is missing is named."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from bachlib import BachError
from bachlib.evaluate import Evaluation, traits, worlds
from bachlib.evaluate.claims import CLAIMS, Evidence, Result, ledger, verdict_table
from bachlib.evaluate.evaluation import accuracy
from bachlib.evaluate.statistics import Interval
from bachlib.evaluate.verdicts import (
    ABOVE,
    CONFIRMED,
    DENIED,
    NOTHING,
    OPEN,
    POWER,
    Effect,
    effect_table,
    of_all,
    over_trainings,
    verdict,
)  # fmt: skip
from bachlib.experiment import evidence
from bachlib.experiment.sweep import read_sweep
from bachlib.show import plots

ROOT = Path(__file__).resolve().parent.parent
U, FILMS = 240, "films"
PROTOCOL = {
    "data": "toy", "content_hash": "a1", "split": "test", "users": {"n": U, "which": "all", "hash": "h"},
    "exclude": "earlier", "ties": "by item number", "candidates": "full catalogue",
}  # fmt: skip
# mean rank of a held-out item: the paper's order, its gains larger at the top and with more heads
RANK = {
    "mostpop": 100, "mind": 85, "comirec-dr": 70, "comirec-sa": 55, "pos-multihead": 45, "standard": 30, "sasrec": 25,
    "all-multihead": 20, "v-bach": 15.05, "p-bach": 15, "p-bach-global": 48, "v-bach-global": 48,
}  # fmt: skip


def result(method: str, k: int = 8, seed: int = 0, rank: float | None = None, setting: str = FILMS) -> Result:
    """A training by hand: ten geometric ranks per user, shared by all methods but for their scale."""
    rank = rank or RANK[method] * (1 + (k - 8) / 100 if method == "pos-multihead" else 1)
    rng = np.random.default_rng([7, seed])
    luck = np.random.default_rng(0).random((U, 10)) * 0.98 + 0.01 * rng.random((U, 10))
    ranks = 1 + stats.geom.ppf(luck, 1 / (5 * rank)).astype(int)  # so that not all are in the first 100
    users = pd.RangeIndex(U, name="user")
    per_user = accuracy(ranks, users)
    own = method.startswith(("p-", "v-"))
    more = {"diversity@10": 0.5 + 0.2 * own, "interests@10": 0.3 + 0.1 * own}
    more |= {"nats over one π": 0.1, "nats over another π": 0.2} if own else {}
    for name, value in more.items():
        per_user[name] = value + 0.01 * rng.normal(size=U)
    seen = np.random.default_rng(seed).random() / 100
    numbers = {
        "effective heads": 4 + 3 * own + seen,
        "largest share": 0.5 - 0.3 * own + seen,
        "head cosine": 0.6 - 0.2 * own + seen,
    }
    numbers |= {"ECE of π": 0.01 + seen / 10, "error with another user's π": 0.05} if own else {}
    history = pd.DataFrame({"epoch": [1, 2, 3], "valid_auprc": [0.5 / rank, 0.9 / rank, 1 / rank],
                            "kappa_max": [15.0, 20 + seen, 21 + seen],
                            "gradient": [[1 / k] * k if own else [0.9] + [0.1 / k] * k] * 3})  # fmt: skip
    about = {"method": method, "k": k, "seed": seed, "model": {"k": k, "seed": seed}, "train": {"seed": seed},
             "valid_auprc": 1 / rank, "cpu_s_per_epoch": 10.0}  # fmt: skip
    told = Evaluation(per_user, per_user.mean().to_dict(), ranks, PROTOCOL, about)
    return Result(setting, method, k, told, numbers, history)


def gathered(seeds: int = 3, without: tuple[str, ...] = (), **ranks: float) -> Evidence:
    ks = {"standard": [1], "sasrec": [1], "mostpop": [1], "p-bach-global": [128], "v-bach-global": [128]}
    ks |= {key: [8, 32] for key in ["p-bach", "v-bach", "all-multihead", "pos-multihead"]}
    planned, found = Counter(), []
    for method in RANK:
        for k in ks.get(method, [8]):
            planned[FILMS, method, k] = 1 if method == "mostpop" else 3
            rank = ranks.get(method.replace("-", "_"))
            found += [result(method, k, seed, rank) for seed in range(planned[FILMS, method, k])][:seeds]
    return Evidence([r for r in found if r.method not in without], planned)


@pytest.fixture(scope="module")
def full() -> Evidence:
    return gathered()


@pytest.fixture(scope="module")
def judged(full):
    return ledger(full)


# ---------------------------------------------------------------------------------------------------------- rules


@pytest.mark.parametrize(
    "low, high, claimed, said",
    [
        (0.01, 0.02, ABOVE, CONFIRMED), (-0.02, -0.01, ABOVE, DENIED), (-0.01, 0.01, ABOVE, OPEN),
        (0.0, 0.1, ABOVE, OPEN), (-0.02, 0.02, (-0.03, 0.03), CONFIRMED), (-0.02, 0.04, (-0.03, 0.03), OPEN),
        (0.04, 0.05, (-0.03, 0.03), DENIED),
        (2.5, 4.0, (2, 5), CONFIRMED), (4.0, 6.0, (2, 5), OPEN), (5.5, 6.0, (2, 5), DENIED),
        (np.nan, np.nan, ABOVE, NOTHING),
    ],
)  # fmt: skip
def test_what_an_interval_says_of_a_range(low, high, claimed, said):
    assert verdict(Interval((low + high) / 2, low, high), claimed) == said


def test_a_claim_needs_all_of_its_effects():
    assert of_all([CONFIRMED, CONFIRMED]) == CONFIRMED and of_all([]) == NOTHING
    assert of_all([CONFIRMED, OPEN]) == OPEN and of_all([CONFIRMED, OPEN, NOTHING]) == NOTHING
    assert of_all([CONFIRMED, NOTHING, OPEN, DENIED]) == DENIED, "what fails in one place does not hold everywhere"


def test_too_few_trainings_have_no_verdict_however_sure_they_look():
    sure = Interval(0.1, 0.09, 0.11)
    assert Effect(FILMS, "a over b", sure, ABOVE, (3, 3), enough=True).verdict == CONFIRMED
    assert Effect(FILMS, "a over b", sure, ABOVE, (3, 2), enough=False).verdict == NOTHING


def test_the_smallest_effect_is_seen_in_four_of_five_repetitions():
    """An effect of that size, measured many times with the interval it was computed from."""
    rng, error = np.random.default_rng(0), 0.01
    half = stats.norm.ppf(0.975) * error
    smallest = Effect(FILMS, "x", Interval(0.0, -half, half), ABOVE, (3,), True).smallest
    assert smallest == pytest.approx(POWER * half)
    found = rng.normal(smallest, error, 20_000)
    assert ((found - half) > 0).mean() == pytest.approx(0.8, abs=0.01)


def test_the_interval_over_trainings_is_welchs():
    a, b = [1.0, 1.2, 1.1], [0.7, 0.9, 0.8, 0.75]
    found, peer = over_trainings(a, b), stats.ttest_ind(a, b, equal_var=False)
    low, high = peer.confidence_interval(0.95)
    assert (found.value, found.low, found.high) == pytest.approx((np.mean(a) - np.mean(b), low, high))
    assert np.isnan(over_trainings([1.0], [0.9, 0.8]).low) and np.isnan(over_trainings([], b).value)


# ----------------------------------------------------------------------------------------------------- the ledger


def test_records_like_the_papers_confirm_its_claims(judged):
    table = verdict_table(judged)
    assert len(table) == len(CLAIMS) == 10 and list(table) == [FILMS]
    said = dict(zip(range(1, 11), table[FILMS], strict=True))
    assert {n for n, verdict in said.items() if verdict == CONFIRMED} >= {1, 2, 3, 4, 5, 7, 8, 9, 10}, said


def test_the_opposite_is_not_confirmed():
    """all-multihead far above BACH, the kernels apart: the verdicts turn."""
    said = verdict_table(ledger(gathered(all_multihead=8.0, v_bach=10.0)))[FILMS]
    for number in (1, 3, 5):
        assert said.iloc[number - 1] == DENIED, said.index[number - 1]
    equal = [e for e in ledger(gathered(all_multihead=15.0))[1][FILMS] if e.what.startswith("p-bach")]
    assert {e.verdict for e in equal} == {OPEN}, "the same ranks for both: nobody can tell"


def test_what_is_missing_is_named(full, judged):
    none = ledger(Evidence([], full.planned))
    assert {e.verdict for of in none.values() for e in of[FILMS]} == {NOTHING}
    assert {number: len(of[FILMS]) for number, of in none.items()} == {n: len(of[FILMS]) for n, of in judged.items()}
    two = ledger(gathered(seeds=2))
    assert {e.verdict for e in two[1][FILMS]} == {NOTHING} and all(np.isfinite(e.found.low) for e in two[1][FILMS])
    assert "2 and 2" in set(effect_table(two[1][FILMS])["trainings"])
    some = ledger(gathered(without=("v-bach",)))
    assert verdict_table(some)[FILMS].iloc[0] == NOTHING
    assert {e.verdict for e in some[1][FILMS] if e.what.startswith("p-bach")} == {CONFIRMED}


def test_gains_at_the_top_are_the_difference_of_the_gains(full, judged):
    mean = {m: {name: np.mean([r.evaluation.means[name] for r in full.of(FILMS, (m, 8))]) for name in ("R@10", "R@100")}
            for m in ("p-bach", "all-multihead")}  # fmt: skip
    by_hand = [mean["p-bach"][name] / mean["all-multihead"][name] for name in ("R@10", "R@100")]
    (effect,) = [e for e in judged[9][FILMS] if "k = 8, R@10" in e.what]
    assert effect.found.value == pytest.approx(by_hand[0] - by_hand[1])


def test_records_of_before_have_no_slates_and_no_verdict_on_them(full):
    old = [
        r._replace(evaluation=replace(r.evaluation, per_user=r.evaluation.per_user.filter(regex="@100?$|R@50|AUPRC")
                                      .drop(columns=["diversity@10", "interests@10"], errors="ignore")))
        for r in full.results
    ]  # fmt: skip
    judged = ledger(Evidence(old, full.planned))
    assert {e.verdict for e in judged[10][FILMS]} == {NOTHING} and {e.verdict for e in judged[1][FILMS]} == {CONFIRMED}


def test_figures_of_the_ledger(judged, full):
    table = verdict_table(judged)
    assert sum(len(trace.x) for trace in plots.verdicts(table).data) == table.size
    figure = plots.effects(judged[6][FILMS], "codebook")
    assert {"xaxis", "xaxis2"} <= set(figure.layout.to_plotly_json()), "ratios and gains have axes of their own"
    nothing = plots.effects(ledger(Evidence([], full.planned))[1][FILMS], "nothing")
    assert not nothing.data and "have no records yet" in nothing.layout.title.text
    looks = evidence.learning_curves(full)
    speed = evidence.learning_speed(looks, FILMS).loc[FILMS]
    assert speed.loc["standard", "epochs to the level"] == 3 and speed.loc["p-bach", "epochs to the level"] == 1
    assert speed.loc["p-bach", "CPU s to the level"] == 10 and np.isnan(speed.loc["mind", "epochs to the level"])
    assert len(plots.learning(looks, "speed").data) == 2 * looks["method"].nunique()


# ------------------------------------------------------------------------------------------- the published records


@pytest.fixture(scope="module")
def on_record() -> Evidence:
    return evidence.evidence()


def test_the_readme_agrees_with_the_records(on_record):
    text = (ROOT / "README.md").read_text()
    assert evidence.with_tables(text, on_record) == text, "run: bach publish"
    assert len(on_record.results) >= 10


def test_tables_follow_the_records(full, monkeypatch):
    """More records: other tables, the early ones go, and what is missing is named."""
    monkeypatch.setattr(evidence, "MAIN_SETTING", FILMS)
    marks = "<!-- evidence -->\n{}\n<!-- /evidence -->\n\n"
    page = marks.format("OLD") + "<!-- until the evidence is complete -->\nFIVE\n<!-- /until -->\n\nend"
    done = evidence.with_tables(page, full)
    assert "FIVE" not in done and "OLD" not in done and done.endswith("<!-- /evidence -->\n\nend")
    assert "| p-bach, k = 8 | 3 |" in done and "Still missing" not in done and "*confirmed*: 1. " in done
    assert evidence.with_tables(done, full) == done, "a second call changes nothing"
    half = evidence.with_tables(page, gathered(seeds=2, without=("v-bach",)))
    assert "FIVE" in half and "v-bach 0 of 3" in half and "standard 2 of 3" in half
    assert "| standard | 2 |" in half and "v-bach, k" not in half
    assert "MovieLens-1M" in evidence.with_tables(page, Evidence([], full.planned))
    with pytest.raises(BachError, match="to write the tables into"):
        evidence.with_tables("no marks", full)


def test_tiers_share_their_points_and_their_settings():
    """Equal values are one training; everything but method, k, seed, targets and log is the same in all tiers."""
    points = {name: read_sweep(name).points for name in evidence.TIERS}
    apart = {"method", "k", "seed", "targets", "name", "notebooks", "path", "source", "items", "ties"}
    alike = {str(sorted(p.p.model_dump(exclude=apart).items())) for of in points.values() for p in of}
    assert len(alike) == 1
    first, third = ({p.name for p in points[name]} for name in ("evidence-1-methods", "evidence-3-heads"))
    assert len(first & third) == 12, "k = 8 is trained once"
    seeds = [p.p.seed for p in points["evidence-1-methods"]]
    assert seeds == sorted(seeds) and len(seeds) == 54, "the first seed of everything comes first"
    assert len({p.name for name in evidence.ABLATIONS for p in read_sweep(name).points} & first) >= 12


def test_a_switch_is_compared_within_its_method():
    tables = evidence.ablation("ablation-false-negatives")
    found = [{name.split(" (")[0] for name in made.numbers["method"]} for made in tables]
    assert sorted(found, key=str) == [{"all-multihead"}, {"p-bach"}]
    gains = evidence.ablation_gains().query("sweep == 'ablation-false-negatives'")
    assert any("targets = all" in name and "targets = one" in name for name in gains["name"])


# ------------------------------------------------------------------------------------------ where a mixture pays


def drawn(slope: float = 0.5, noise: float = 0.01) -> pd.DataFrame:
    """Worlds whose gain is slope · (spread − 0.4): the boundary is at 0.4, whatever the likeness."""
    rng, runs = np.random.default_rng(0), []
    for number in range(12):
        spread, near = 0.1 + 0.05 * number, 0.1 * (number % 4)
        for draw in range(3):
            told = {"interests_per_user": number, "world_width": 0.5, "stickiness": near, "d": 8, "n_users": 500,
                    "data_seed": draw, traits.SPREAD: spread, traits.SESSIONS: near}  # fmt: skip
            base = 0.1 * (1 + 0.1 * rng.random())
            gain = 1 + slope * (spread - 0.4) + noise * rng.normal()
            for method, value in (("standard", base), ("all-multihead", base), ("p-bach", base * gain)):
                per_user = pd.DataFrame({"AUPRC": [value] * 4})
                made = Evaluation(per_user, {"AUPRC": value}, np.ones((4, 10), int), PROTOCOL, {"method": method})
                runs.append((told | {"method": method}, made))
    return worlds.gain_table(runs)


def test_the_boundary_of_worlds_is_found_with_its_interval():
    table = drawn()
    fit, of = worlds.fitted(table), worlds.by_world(table)
    value, low, high = fit.boundary(np.array([0.0, 0.2]))
    assert value == pytest.approx([0.4, 0.4], abs=0.03) and (low < value).all() and (value < high).all()
    assert fit.gain(0.6, 0.1).value == pytest.approx(0.1, abs=0.02) and fit.explained > 0.9
    assert len(of) == 12 and (of["draws"] == 3).all() and of["gain"].iloc[0] < 0 < of["gain"].iloc[-1]
    figure = plots.mixture_map(of, fit, {"a log": (0.7, 0.1, Interval(0.1, 0.05, 0.15)), "another": (0.3, 0.1, None)})
    assert {"boundary", "its interval"} <= {trace.name for trace in figure.data}
    assert plots.plane_of_worlds(of).data[0].type == "heatmap"
    with pytest.raises(BachError, match="at least four worlds"):
        worlds.fitted(table.iloc[:9])
    assert worlds.gain_table([]).empty and worlds.by_world(worlds.gain_table([])).empty


def test_traits_are_those_of_the_log(world):
    """All likes in two directions or one; the same items in another order lose the likeness of neighbours."""
    assert traits.directions(np.eye(5)) == pytest.approx(5) and traits.directions(np.ones((7, 3))) == pytest.approx(1)
    found = traits.traits(world)
    assert 0 < found[traits.SPREAD] < 1.1, "users like less than everything"
    mixed, rng = world.with_context(np.zeros((world.n_users, 1), np.float32)), np.random.default_rng(0)
    sequences = np.array(world.sequences)
    for u in range(world.n_users):
        part = slice(int(world.offsets[u]), int(world.offsets[u]) + int(world.begins["valid"][u]))
        sequences[part] = rng.permutation(sequences[part])
    mixed.sequences = sequences
    assert found[traits.SESSIONS] > 0.1 > abs(traits.traits(mixed)[traits.SESSIONS])
