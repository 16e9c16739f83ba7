"""Tests and the notebooks they execute write into a folder of their own, never into outputs/."""

import json
import os
import signal
import tempfile
from pathlib import Path

import hypothesis
import pytest
from records import not_on_record

_scratch = tempfile.TemporaryDirectory(prefix="bach-tests-")
os.environ["BACH_OUTPUT_DIR"] = _scratch.name
if "BACH_TEST_NOTEBOOKS" not in os.environ:  # notebooks share their trainings, over all test processes
    _together = tempfile.TemporaryDirectory(prefix="bach-notebooks-")
    os.environ["BACH_TEST_NOTEBOOKS"] = _together.name
hypothesis.settings.register_profile("same", derandomize=True)  # the same examples in every run
hypothesis.settings.load_profile("same")
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started pytest in the background
os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes on two cores: more threads would only wait


LONG = ("test_notebooks.py", "test_sweep.py", "test_batch.py", "test_browser_lab.py", "test_readme.py", "test_train.py")


class Outputs:
    """Before the kernel of a notebook starts, and before every other test: where it writes."""

    def pytest_collection_modifyitems(self, items):
        """Long files first, then the notebooks: short files at the end keep both processes busy."""
        order = {name: number for number, name in enumerate(LONG)}
        items.sort(key=lambda item: order.get(item.path.name, len(LONG) + (item.path.suffix != ".ipynb")))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item):
        of_notebooks = item.path.suffix == ".ipynb"
        os.environ["BACH_OUTPUT_DIR"] = os.environ["BACH_TEST_NOTEBOOKS"] if of_notebooks else _scratch.name
        os.environ.pop("BACH_RUN_DIR", None)
        if of_notebooks:
            os.environ["BACH_RUN_DIR"] = str(recorded(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        """nbval executes the cell; the numbers that a notebook records are those of `quickstart.json`, to rounding."""
        result = yield
        if item.path.suffix == ".ipynb" and item.cell.source.startswith("record("):
            name = item.path.stem
            wrong = not_on_record(name, json.loads((recorded(item) / "metrics.json").read_text())[name])
            assert not wrong, "\n".join(wrong)
        return result


def recorded(item) -> Path:
    """Where the notebook keeps its numbers, as under `bach run`."""
    return Path(os.environ["BACH_TEST_NOTEBOOKS"], "recorded", item.path.stem)


def pytest_configure(config):
    config.pluginmanager.register(Outputs())  # a hook of this file would not hear of notebooks/


@pytest.fixture(scope="session")
def world():
    """A small planted world, prepared."""
    from bachlib.data import planted, prepare

    folder = planted.write_world(n_users=150, n_items=600, n_interests=5, mean_events=120, seed=3)
    return prepare("planted", folder, Path(_scratch.name) / "data" / "small", quiet=True)


@pytest.fixture(scope="session")
def real_data() -> Path:
    folder = os.environ.get("BACH_DATA_DIR")
    if not folder:
        pytest.skip("BACH_DATA_DIR is not set: real logs cannot be shipped with the project (see README)")
    return Path(folder)


@pytest.fixture(scope="session")
def histories(world):
    """Thirty users of the small world before their test items."""
    import numpy as np

    return world.history(np.arange(30), "test")
