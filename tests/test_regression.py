"""The numbers on record hold, and a wrong sign, a swapped kernel or another slip in the mathematics breaks them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from regression import FILE, METHODS, differences, measure

from bachlib.model.methods import METHODS as TABLE

ROOT = Path(__file__).resolve().parent.parent


def test_every_method_is_on_record():
    assert set(json.loads(FILE.read_text())) == set(METHODS) == set(TABLE)


@pytest.mark.parametrize("method", METHODS)
def test_the_numbers_on_record(method):
    assert differences(method, measure(method)) == []


# what goes wrong → file, line, what becomes of it
MUTATIONS = {
    "entropy with the wrong sign": ("mixture.py", "gamma > 0, log_pi - log_gamma,", "gamma > 0, log_pi + log_gamma,"),
    "all but the reconstruction with the wrong sign": ("mixture.py", "-(rebuilt + rest)", "-(rebuilt - rest)"),
    "γ falls where σ rises": ("mixture.py", "(log_pi + log_sigma)", "(log_pi - log_sigma)"),
    "kernels swapped": ("methods.py", "P, V = ", "V, P = "),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_slip_in_the_mathematics_breaks_them(what, tmp_path):
    """The package with one line changed trains and is measured in a process of its own; the record must notice."""
    place, before, after = MUTATIONS[what]
    shutil.copytree(ROOT / "bachlib", tmp_path / "bachlib", ignore=shutil.ignore_patterns("__pycache__"))
    source = (tmp_path / "bachlib" / "model" / place).read_text()
    assert source.count(before) == 1, f"{place} no longer has the line that this test breaks"
    (tmp_path / "bachlib" / "model" / place).write_text(source.replace(before, after))
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "BACH_OUTPUT_DIR": str(tmp_path / "outputs")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "regression.py"), "p-bach"], env=variables, cwd=tmp_path,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert differences("p-bach", json.loads(done.stdout)["p-bach"]), f"{what}: nobody noticed"
