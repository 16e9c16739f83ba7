"""Experiments and sweeps as files: complete, the paper's settings, and wrong ones refused before anything runs."""

import re
from pathlib import Path

import papermill
import pytest
import yaml
from commands import bach_here

from bachlib import BachError
from bachlib.experiment.notebooks import as_yaml, code_of, keys
from bachlib.experiment.settings import CHAIN, SINGLE, Experiment, experiment_of, given, notebook_names, read_experiment
from bachlib.experiment.stages import data_name, run_name, settings
from bachlib.experiment.sweep import read_sweep
from bachlib.files import code_hash
from bachlib.params import WorldParams
from bachlib.train.run import CODE

ROOT = Path(__file__).resolve().parent.parent
EXPERIMENTS = ["quickstart", "teaching", "ml1m", "ml20m", "taobao", "netflix", "complete-journey"]
SWEEPS = sorted(path.stem for path in (ROOT / "params" / "sweeps").glob("*.yaml"))


def literals(name: str) -> dict[str, object]:
    """The parameters of a notebook and their values."""
    told = papermill.inspect_notebook(str(ROOT / "notebooks" / f"{name}.ipynb"))
    return {key: yaml.safe_load("null" if one["default"] == "None" else one["default"].replace("_", ""))
            if re.fullmatch(r"[\d_.e+-]+|None|True|False", one["default"]) else one["default"].strip("\"'")
            for key, one in told.items()}  # fmt: skip


ABOUT_DATA = [name for name in notebook_names() if "source" in literals(name)]

# ------------------------------------------------------------------------------------------------- what is in params/


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_is_flat_complete_and_has_reasons(name):
    path = ROOT / "params" / f"{name}.yaml"
    values = yaml.safe_load(path.read_text())
    assert not any(isinstance(value, dict) for value in values.values()), "flat: papermill takes it as it is"
    p = read_experiment(path)
    assert p.name == name
    only_planted = {*WorldParams.model_fields} - {"d", "seed", "width"}
    free = {"path", "columns", "user", "n_large", "method"} | (only_planted if p.source != "planted" else set())
    free |= {"min_rating", "min_items", "max_items", "max_users"} if p.source == "planted" else set()
    usual = {key for key, field in Experiment.model_fields.items() if not field.is_required()}
    for notebook in CHAIN:
        for key, value in literals(notebook).items():
            said = key in values or key in free or (key in usual and value == Experiment.model_fields[key].default)
            assert said, f"{name}.yaml leaves {key} of {notebook} to the notebook"
    lines = [line for line in path.read_text().splitlines() if re.match(r"\w+:", line)]
    explained = [line for line in lines if "#" in line]
    assert len(explained) >= 0.6 * len(lines), "values carry a short why"


@pytest.mark.parametrize(("name", "epochs"), [("ml20m", 200), ("taobao", 50), ("netflix", 200)])
def test_the_papers_settings(name, epochs):
    """Appendices A and B, value by value."""
    p = read_experiment(name)
    table = {"d": 64, "attention_heads": 4, "ff": 128, "dropout": 0.1, "n_hist": 50, "item_width": 128, "tau": 0.07,
             "learning_rate": 1e-3, "batch_size": 512, "n_negatives": 2048, "epochs": epochs, "patience": 10,
             "valid_every": 5, "seed": 0, "min_rating": 4.0, "min_items": 80, "max_items": 50_000,
             "catalogue": "liked", "max_eval": 10_000, "capsule_iterations": 3, "mind_power": 1.0,
             "sasrec_blocks": 2}  # fmt: skip
    assert {key: getattr(p, key) for key in table} == table
    assert p.max_users == (50_000 if name == "netflix" else 100_000)


def test_quickstart_is_what_the_notebooks_have():
    """So the committed outputs are those of `make run`, and every notebook shares the others' trainings."""
    p = read_experiment("quickstart")
    assert set(p.notebooks) == set(notebook_names())
    for notebook in ABOUT_DATA:
        for key, value in literals(notebook).items():
            assert getattr(p, key) == value, f"{notebook}: {key}"
    train = [notebook for notebook in ABOUT_DATA if "epochs" in literals(notebook)]
    ids = {run_name(experiment_of(literals(n), n).model_copy(update={"k": 8, "seed": 0})) for n in train}
    assert len(ids) == 1, "the same training has several names"


def test_every_parameter_of_a_notebook_is_one_of_the_experiment():
    assert set(CHAIN) | {SINGLE} <= set(ABOUT_DATA)
    for notebook in ABOUT_DATA:
        assert set(literals(notebook)) <= set(Experiment.model_fields), notebook


@pytest.mark.parametrize("name", SWEEPS)
def test_sweeps_of_the_paper(name):
    sweep = read_sweep(name)
    assert sweep.points and sweep.file.name == name and sweep.file.about
    assert len({point.name for point in sweep.points}) == len(sweep.points)
    assert "#" in (ROOT / "params" / "sweeps" / f"{name}.yaml").read_text()


def test_tables_have_a_sweep_each():
    wanted = "datasets main head-matched routing netflix kappa p-against-v codebook seeds svd-leakage history-tokens"
    assert {*wanted.split(), "tau", "negatives", "planted"} <= set(SWEEPS)
    main = [point.p for point in read_sweep("main").points]
    assert len(main) == 2 * (7 * 3 + 3), "methods with one vector, and counting, are run once"
    assert {p.k for p in main if p.method == "standard"} == {1}
    shared = {point.name for point in read_sweep("head-matched").points}
    assert shared <= {point.name for point in read_sweep("main").points}, "a training of two tables has one name"


# ---------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n_user: 3", "n_user: not a parameter; did you mean 'n_users'?"),
        ("k: many", "k: Input should be a valid integer, unable to parse string as an integer, got 'many'"),
        ("k: true", "k: should not be true or false, got True"),
        ("epochs: 0", "epochs: Input should be greater than or equal to 1, got 0"),
        ("method: p-bech", "method: there is no 'p-bech'; did you mean 'p-bach'?"),
        ("source: movielens-1k", "source: there is no 'movielens-1k'; did you mean 'movielens-1"),
        ("{d: 10}", "attention_heads: should divide the width (10), got 4"),
        ("{method: standard, kernel: von-mises-fisher}", "kernel: method 'standard' has no kernel"),
        ("{source: csv}", "path: source 'csv' needs the path of your log"),
        ("{columns: {user: a, item: b, time: c}}", "columns: source 'planted' has fixed columns"),
        ("{n_items: 50, d: 64}", "d: should be smaller than n_users"),
        ("notebooks: [04_trian]", "notebooks: there is no '04_trian'; did you mean '04_train'?"),
        ("k: 4\nd: 8\nk: 8", "'k' is there twice"),
        ("learning_rate: .inf", "learning_rate: Input should be a finite number, got inf"),
        ("{source: csv, path: nope.csv}", "path: nope.csv does not exist, neither here nor beside the file"),
        ("[1]", "should hold lines of `key: value`"),
        ("name: [", "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_and_named(tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(BachError, match=re.escape(said)) as error:
        read_experiment(tmp_path / "mine.yaml")
    assert str(tmp_path / "mine.yaml") in str(error.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: [quickstart]\ngrid: {methods: [p-bach]}", "methods: not a parameter; did you mean 'method'?"),
        ("base: [quickstart]\ngrid: {k: [4, x]}", "at k = x: "),
        ("base: [quickstart]\ngrid: {d: [8, 10]}", "at d = 10: "),
        ("base: [quickstart]\ngrid: {k: []}", "grid: k should have at least one value"),
        ("base: [quickstrat]\ngrid: {k: [4]}", "quickstrat.yaml does not exist; there are"),
        ("base: [letter, quickstart]\ngrid: {k: [4]}", "base: letter is an overlay; name an experiment before it"),
        ("base: [quickstart]\ngird: {k: [4]}", "gird: not a parameter; did you mean 'grid'?"),
        ("base: [quickstart]\ngrid: {seeds: [1, 2]}", "grid: seeds does not change a training; did you mean 'seed'?"),
        ("base: [quickstart]\ngrid: {k: [4]}\nset: {k: 3}", "k is in the grid; it cannot be set to 3"),
        ("base: [quickstart]\ngrid: {k: [4]}\nset: [1]", "set: Input should be a valid dictionary"),
        ("base: [quickstart]\ngrid: {k: [4]}\naxis: kk", "axis: 'kk' is not a parameter of a model or a training"),
        (
            "base: [quickstart]\ngrid: {k: [4]}\nbaseline: p-bch",
            "baseline: there is no 'p-bch'; did you mean 'p-bach'?",
        ),
    ],
)
def test_a_wrong_sweep_is_refused_before_anything_runs(tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(f"name: mine\n{text}")
    with pytest.raises(BachError, match=re.escape(said)) as error:
        read_sweep(tmp_path / "mine.yaml")
    assert str(tmp_path / "mine.yaml") in str(error.value)


def test_what_is_in_the_grid_cannot_be_set():
    with pytest.raises(BachError, match="k is in the grid"):
        read_sweep("planted", more={"k": 3})
    with pytest.raises(BachError, match=r"there is no sweep plented; params/sweeps has .*codebook"):
        read_sweep("plented")
    assert {point.p.source for point in read_sweep("routing", base=["ml1m"]).points} == {"movielens-1m"}


LETTER = {"svd_on": "all", "history": "frozen", "precision": "float32"}


@pytest.mark.parametrize("base", ["ml20m", "taobao", "netflix", "ml1m", "quickstart"])
def test_the_letter_of_the_paper_changes_any_experiment(base):
    plain, letter = read_experiment(base), read_experiment(base, {"k": 4}, ["letter"])
    assert letter.name == f"{base}-letter"
    assert letter.model_dump() == plain.model_dump() | LETTER | {"name": letter.name, "k": 4}
    assert {key: getattr(plain, key) for key in LETTER} == {key: Experiment.model_fields[key].default for key in LETTER}
    if base in ("ml20m", "taobao", "netflix"):  # each departure is named where the settings are called the paper's
        text = (ROOT / "params" / f"{base}.yaml").read_text()
        assert "our three departures" in text.splitlines()[0] and "exact" not in text
        assert all(key in text.splitlines()[1] for key in LETTER)


def test_overlays_in_files_and_sweeps(tmp_path):
    (tmp_path / "mine.yaml").write_text("base: [quickstart, letter]\nk: 3")
    mine = read_experiment(tmp_path / "mine.yaml")
    assert (mine.name, mine.k, mine.history, mine.n_users) == ("mine", 3, "frozen", 500)
    (tmp_path / "wide.yaml").write_text("overlay: true\nd: 16")
    (tmp_path / "two.yaml").write_text("base: [mine.yaml, wide.yaml]")
    assert (two := read_experiment(tmp_path / "two.yaml")).d == 16 and two.history == "frozen"

    def values(base):
        found = read_sweep("tau", base=base).points[::10]
        return [(point.where.get("experiment"), point.p.source, point.p.history) for point in found]

    assert values(["ml20m", "taobao", "letter"]) == [
        ("ml20m-letter", "movielens-20m", "frozen"), ("taobao-letter", "taobao", "frozen"),
    ]  # fmt: skip
    assert [place[2] for place in values(["ml20m", "letter", "taobao"])] == ["frozen", "tower"]
    one = read_sweep("planted", base=["quickstart", "letter"])
    assert {p.p.svd_on for p in one.points} == {"all"} and one.folder != read_sweep("planted").folder
    assert read_sweep("planted", base=["quickstart", "letter"], more={"svd_on": "train"}).points[0].p.svd_on == "train"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("base: [letter]", "letter.yaml is an overlay (overlay: true): it needs an experiment before it"),
        ("base: [quickstart, ml1m]", "ml1m.yaml is an experiment: only overlays (files with overlay: true) can follow"),
        ("overlay: true\nbase: [quickstart]", "mine.yaml is an overlay (overlay: true): it has no base of its own"),
        ("overlay: true", "it needs an experiment before it, e.g. [ml20m, mine]"),
        ("base: mine.yaml", "the file is its own base"),
        ("overlay: maybe", "overlay: should be true"),
    ],
)
def test_a_wrong_base_is_refused(tmp_path, text, said):
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(BachError, match=re.escape(said)):
        read_experiment(tmp_path / "mine.yaml")
    with pytest.raises(BachError, match="letter is an overlay; name an experiment before it"):
        read_sweep("planted", base=["letter", "quickstart"])


def test_words_of_the_command_line():
    assert given(["k=4", "learning_rate=0.1", "svd_on=all", "path=null"]) == {
        "k": 4, "learning_rate": 0.1, "svd_on": "all", "path": None,
    }  # fmt: skip
    with pytest.raises(BachError, match="--set k: should be name=value"):
        given(["k"])
    with pytest.raises(BachError, match="the value is not YAML"):
        given(["k=["])
    with pytest.raises(BachError, match="--set epoch=5: 'epoch' is not a parameter here; did you mean 'epochs'"):
        given(["epoch=5"], {"epochs", "d"})
    done = bach_here("run", "quickstart", "--set", "n_user=3")
    assert done.returncode == 2 and "did you mean 'n_users'?" in done.stderr and "quickstart.yaml" in done.stderr


# --------------------------------------------------------------------------------------------- settings of a notebook


def test_settings_are_the_variables_after_the_parameters_cell():
    cells = {"In": ["", "k = 4\nd = 16", "# Parameters\nk = 3"], "Out": {}, "_oh": {}, "exit": exit, "N_TEST": 10}
    namespace = {**cells, "Path": Path, "k": 3, "d": 16, "source": "planted"}
    p = settings(namespace)
    assert (p.k, p.d, p.tau) == (3, 16, 0.07)
    namespace |= {"gap": {}, "tau": 99, "method": "standard", "k": 2, "first": 3}  # set by later cells, and k changed
    p = settings(namespace)
    assert (p.k, p.d, p.tau, p.method) == (2, 16, 0.07, "p-bach"), "variables of later cells are not parameters"
    namespace["In"] = [*cells["In"], "k = 2\nd = 16\ntau = 0.1", "p = settings(globals())"]
    assert settings(namespace | {"tau": 0.1}).tau == 0.1, "a parameter added to the cell, and both run again"


def test_settings_need_no_history_of_cells():
    """The kernel that nbval starts keeps none."""
    p = settings({"In": [""], "k": 3, "epochs": 2, "source": "planted", "Path": Path})
    assert (p.k, p.epochs, p.tau) == (3, 2, 0.07)


def test_settings_never_fall_back_to_defaults():
    with pytest.raises(BachError, match="no parameters are set: run the notebook's parameters cell first"):
        settings({"In": ["", "p = settings(globals())"], "Path": Path})


def test_settings_refuse_what_papermill_only_warns_of():
    with pytest.raises(BachError, match=r"n_user: not a parameter; did you mean 'n_users'\?"):
        settings({"n_users": 4, "n_user": 5})
    with pytest.raises(BachError, match="k: Input should be a valid integer"):
        settings({"k": "x"})


# ------------------------------------------------------------------------------------------------ names and stage keys


def test_a_training_is_named_by_what_decides_it():
    p = Experiment()
    same = [{"name": "other"}, {"device": "cpu"}, {"max_eval": 5}, {"user": 3}, {"checkpoint_seconds": 1.0}]
    other = [{"k": 4}, {"epochs": 3}, {"seed": 1}, {"data_seed": 1}, {"min_items": 60}, {"method": "v-bach"},
             {"world_d": 9}, {"patience": 3}]  # fmt: skip
    assert {run_name(p.model_copy(update=change)) for change in same} == {run_name(p)}
    names = {run_name(p.model_copy(update=change)) for change in other}
    assert len(names) == len(other) and run_name(p) not in names
    one_vector = p.model_copy(update={"method": "standard"})
    assert run_name(one_vector) == run_name(one_vector.model_copy(update={"k": 32}))
    assert data_name(Experiment(source="movielens-1m")) == "movielens-1m", "the folder that bach prepare makes"
    assert data_name(Experiment()) == "planted", "that of bach prepare --source planted"
    assert data_name(Experiment(source="movielens-1m", catalogue="kept")) != "movielens-1m"
    assert data_name(Experiment(source="movielens-1m", min_items=60)) != "movielens-1m"


def test_comments_are_no_code(tmp_path, monkeypatch):
    from bachlib import files

    monkeypatch.setattr(files, "__file__", str(tmp_path / "files.py"))

    def hash_of(text: str) -> str:
        code_hash.cache_clear()
        (tmp_path / "a.py").write_text(text)
        return code_hash(("a.py",))

    try:
        first = hash_of('def f():\n    """Says one."""\n    return 1\n')
        assert hash_of('def f():\n    """Says 1."""\n    # why\n    return 1\n') == first
        assert hash_of('def f():\n    """Says one."""\n    return -1\n') != first
    finally:
        code_hash.cache_clear()


def test_what_makes_a_stage_run_again(tmp_path):
    log = tmp_path / "log.csv"
    log.write_text("u,i,t\n1,2,3\n")
    columns = {"user": "u", "item": "i", "time": "t"}
    p = Experiment(source="csv", path=str(log), columns=columns, notebooks=["01_sphere", "03_data", "04_train"])
    before = keys(p)
    assert keys(p) == before
    changed = keys(p.model_copy(update={"k": 4}))
    assert changed["01_sphere"] == before["01_sphere"], "formulas do not depend on the experiment"
    assert changed["04_train"] != before["04_train"] and changed["03_data"] == before["03_data"]
    log.write_text("u,i,t\n1,2,3\n4,5,6\n")
    assert keys(p)["03_data"] != before["03_data"] and keys(p)["04_train"] != before["04_train"], "another log"


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("show/plots/style.py", {"01_sphere", "03_data", "04_train"}),  # a new colour
        ("data/sources.py", {"03_data"}),  # a new reader
        ("data/windows.py", {"training", SINGLE, "03_data", "04_train"}),
        ("model/sphere.py", {"training", SINGLE, "01_sphere", "03_data", "04_train"}),
        ("evaluate/statistics.py", {SINGLE, "03_data", "04_train"}),
        ("serve/exact.py", set()),
        ("experiment/cluster.py", set()),
    ],
)
def test_only_the_code_it_depends_on_makes_a_stage_stale(changed, stale):
    """`training` is the name of a run; the others are notebooks."""
    parts = {name: code_of(name) for name in ("01_sphere", "03_data", "04_train", SINGLE)} | {"training": CODE}
    assert (ROOT / "bachlib" / changed).exists()
    found = {name for name, of in parts.items() if any(changed == one or changed.startswith(f"{one}/") for one in of)}
    assert found == stale


def test_an_experiment_survives_its_file(tmp_path):
    p = read_experiment("ml1m", {"k": 5})
    (tmp_path / "params.yaml").write_text(as_yaml(p))
    again = read_experiment(tmp_path / "params.yaml")
    assert again == p and run_name(again) == run_name(p)


def test_other_files_that_are_none(tmp_path, monkeypatch):
    (tmp_path / "latin.yaml").write_bytes("name: café".encode("latin-1"))
    with pytest.raises(BachError, match="is not YAML"):
        read_experiment(tmp_path / "latin.yaml")
    (tmp_path / "quickstart").mkdir()
    monkeypatch.chdir(tmp_path)
    assert read_experiment("quickstart").name == "quickstart", "a folder of that name is in nobody's way"


def test_a_log_with_an_odd_name_gives_a_folder_with_a_plain_one(tmp_path):
    (tmp_path / "ratings (1).csv").write_text("x")
    text = "source: csv\npath: ratings (1).csv\ncolumns: {user: u, item: i, time: t}"
    (tmp_path / "mine.yaml").write_text(text)
    (tmp_path / "sweep.yaml").write_text("base: [mine.yaml]\ngrid: {k: [4]}")
    (point,) = read_sweep(tmp_path / "sweep.yaml").points
    assert point.name.startswith("p-bach-ratings-1--k4-s0-")
    assert experiment_of(point.p.model_dump(exclude_unset=True), "again") == point.p


def test_a_path_is_found_from_where_one_stands_or_beside_the_file(tmp_path, monkeypatch):
    (tmp_path / "my.csv").write_text("x")
    (tmp_path / "mine.yaml").write_text("source: csv\npath: my.csv\ncolumns: {user: u, item: i, time: t}")
    assert read_experiment(tmp_path / "mine.yaml").path == str(tmp_path / "my.csv")
    monkeypatch.chdir(tmp_path)
    assert read_experiment("mine.yaml").path == str(tmp_path / "my.csv")
