"""Short trainings whose numbers are on record (regression.json): each value with a tolerance that rounding stays within
and a wrong sign or another kernel does not.

    python tests/regression.py p-bach …       prints the numbers of these methods as JSON
    python tests/regression.py --record       writes regression.json, after a change that is meant to change it
    python tests/regression.py --record remi  writes the numbers of these methods only
"""

import json
import os
import sys
import tempfile
from pathlib import Path

FILE = Path(__file__).with_name("regression.json")
METHODS = "mostpop standard sasrec mind comirec-sa comirec-dr pos-multihead all-multihead p-bach v-bach p-bach-global "
METHODS += "v-bach-global p-bach-residual v-bach-residual p-bach-hybrid v-bach-hybrid remi bam maxmf"
METHODS = METHODS.split()
WORLD = {"n_users": 150, "n_items": 600, "n_interests": 5, "mean_events": 120.0, "data_seed": 3, "min_items": 60}
SHORT = {"k": 4, "k_shared": 3, "k_own": 2, "d": 16, "ff": 32, "item_width": 32, "dropout": 0.0, "epochs": 1,
         "batch_size": 256, "n_negatives": 64, "learning_rate": 0.005, "valid_every": 1}  # fmt: skip

# tolerances: ten times what a change of the first weights in their last digit is worth; at least these, relative
LOSSES, ACCURACY = 5e-3, 3e-2
LEAST = 1e-3  # and this, absolute


def measure(method: str) -> dict[str, float]:
    """One short training: terms of the loss, heads, κ, and accuracy on held-out items."""
    from bachlib.evaluate import diagnostics, evaluate
    from bachlib.experiment.settings import experiment_of
    from bachlib.experiment.stages import prepared, trained

    p = experiment_of({**WORLD, **SHORT}, "regression")
    dataset = prepared(p)
    run = trained(method, dataset, p)
    found = {name: evaluate(run, dataset, quiet=True).means[name] for name in ("R@50", "AUPRC")}
    if method != "mostpop":
        last = run.history.iloc[-1]
        found |= {name: float(last[name]) for name in ("loss", "effective_heads", "head_cosine")}
        told = diagnostics.summary(run.model, dataset, evaluate(run, dataset, quiet=True).per_user.index.to_numpy())
        found["log-likelihood"] = told["log-likelihood"]
        if run.model.kernel:
            found |= {name: float(last[name]) for name in ("reconstruction", "prior", "entropy", "kappa_max")}
            found |= {"KL gap": told["KL gap"]}
    return found


def differences(method: str, found: dict[str, float]) -> list[str]:
    """What is not as on record."""
    expected = json.loads(FILE.read_text())[method]
    wrong = [f"{name} is on record and was not measured" for name in expected.keys() - found.keys()]
    for name, value in found.items():
        wanted, tolerance = expected.get(name, (float("nan"), 0.0))
        if not abs(value - wanted) <= tolerance:
            wrong.append(f"{method}: {name} is {value:.6g}, on record {wanted:.6g} ± {tolerance:.2g}")
    return wrong


def nudged(method: str, sign: int) -> dict[str, float]:
    """The same training from first weights that differ in their last digits: what rounding can do."""
    import torch

    from bachlib.experiment import stages

    build = stages.build

    def other(*args, **kwargs):
        model = build(*args, **kwargs)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + sign * 2e-7)
        return model

    stages.build = other
    try:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["BACH_OUTPUT_DIR"] = folder
            return measure(method)
    finally:
        stages.build = build


def record(methods: list[str]) -> None:
    table = json.loads(FILE.read_text()) if methods != METHODS else {}
    for method in methods:
        found, others = nudged(method, 0), [nudged(method, sign) for sign in (-1, 1, 2)]
        table[method] = {}
        for name, value in found.items():
            spread = max(abs(other[name] - value) for other in others)
            least = (ACCURACY if name in ("R@50", "AUPRC", "KL gap") else LOSSES) * abs(value)
            table[method][name] = [
                round(value, 6),
                float(f"{max(10 * spread, least, 1e-6 if name == 'KL gap' else LEAST):.2g}"),
            ]
        print(method, table[method])
    lines = (f"  {json.dumps(method)}: {json.dumps(table[method])}" for method in METHODS if method in table)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--record"]:
        record(sys.argv[2:] or METHODS)
    else:
        print(json.dumps({method: measure(method) for method in sys.argv[1:]}))
