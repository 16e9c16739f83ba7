"""The list of mutations fits the code, and one of them is killed. `make mutants` judges all of them."""

import mutants
import pytest
from mutations import MUTATIONS, Mutation


def test_every_mutation_applies():
    """Its fragment occurs once, its tests exist. If the code has changed, change the fragment; do not drop it."""
    assert [f"{m.file}: {m.what}: {problem}" for m in MUTATIONS for problem in mutants.problems(m)] == []
    assert len({m.what for m in MUTATIONS}) == len(MUTATIONS) >= 60


def test_a_sample_is_killed():
    assert len({*mutants.sample(3)}) == 3
    (verdict,) = mutants.judged(mutants.sample(1), jobs=1, baseline=False)
    assert verdict.outcome == "killed", (verdict.mutation.what, verdict.output)


def test_what_lives_and_what_is_stale_is_said(capsys):
    """A change of nothing lives, and the project itself is not touched."""
    harmless = Mutation("nothing", "model/routing.py", "[..., 0].argmax(-1)", "[..., 0].argmax(dim=-1)",
                        "test_mixture.py::test_the_routed_head_is_the_closest_by_hand")  # fmt: skip
    before = (mutants.ROOT / "bachlib" / harmless.file).read_bytes()
    (verdict,) = mutants.judged([harmless], jobs=1, baseline=False)
    assert verdict.outcome == "survived" and "survived" in capsys.readouterr().out
    assert (mutants.ROOT / "bachlib" / harmless.file).read_bytes() == before
    assert mutants.problems(harmless) == []
    for change, said in (
        ({"before": "return"}, "stale: the fragment occurs"),
        ({"after": harmless.before}, "stays as it is"),
        ({"file": "model/none.py"}, "does not exist"),
        ({"tests": "test_mixture.py::test_none test_none.py"}, "there is no test test_mixture.py::test_none"),
    ):
        assert said in mutants.problems(harmless._replace(**change))[0]


@pytest.mark.parametrize(("alive", "reason", "code"), [(True, "", 1), (True, "the same result", 0), (False, "", 0)])
def test_a_survivor_without_a_reason_fails_the_run(monkeypatch, capsys, alive, reason, code):
    mutation = MUTATIONS[0]._replace(reason=reason)
    verdict = mutants.Verdict(mutation, "survived" if alive else "killed", 1.0, "")
    monkeypatch.setattr(mutants, "judged", lambda *_: [verdict])
    monkeypatch.setattr("sys.argv", ["mutants.py"])
    assert mutants.main() == code
    said = capsys.readouterr().out
    assert f"{'0' if alive else '1'} killed" in said
    assert ("NO REASON" in said) == bool(code) and (mutation.before in said) == alive
