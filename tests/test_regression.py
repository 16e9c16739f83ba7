"""The numbers on record hold. `tests/mutations.py` has slips in the mathematics that break them."""

import json

import pytest
from regression import FILE, METHODS, differences, measure

from bachlib.model.methods import METHODS as TABLE


def test_every_method_is_on_record():
    assert set(json.loads(FILE.read_text())) == set(METHODS) == set(TABLE)


@pytest.mark.parametrize("method", METHODS)
def test_the_numbers_on_record(method):
    assert differences(method, measure(method)) == []
