"""The numbers that each notebook records with its own parameters (`quickstart.json`), and how close they must be."""

import json
from pathlib import Path
from typing import Any

import pytest

FORMULAS = {"01_sphere", "02_elbo", "03_data"}  # nothing is trained there
PERFECT = {"effective interests", "R@50 one vector", "R@50 heads, maximum", "R@50 mixture"}  # nor for these of 00_tour


def on_record(name: str) -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("quickstart.json").read_text())[name]


def not_on_record(name: str, found: dict[str, Any]) -> list[str]:
    """The numbers of a notebook that are not those on record, to rounding."""
    expected, wrong = on_record(name), []
    if set(found) != set(expected):
        wrong.append(f"{name} records {sorted(found)}; on record are {sorted(expected)}")
    for key, value in expected.items():
        # what is trained depends on how a machine rounds; regression.json is the one that is tight
        loose = 1e-6 if name in FORMULAS or key in PERFECT else 0.1
        if found.get(key) != (pytest.approx(value, abs=2e-3, rel=loose) if isinstance(value, float) else value):
            wrong.append(f"{name}: {key} is {found.get(key)}, on record {value}")
    return wrong
