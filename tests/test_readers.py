"""Every format as its authors ship it, plain, gzipped, zipped or in a folder: the same log comes out."""

import gzip
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from logs import (
    as_raw,
    netflix_date,
    plain_pipeline,
    random_events,
    write_movielens_csv,
    write_netflix,
    write_rows,
    write_taobao,
)

from bachlib import BachError
from bachlib.data import prepare

EVENTS = random_events(11, ties=False)
SETTING = {"min_items": 40, "quiet": True}
WRITERS = {
    "movielens-20m": ("ml-20m/ratings.csv", write_movielens_csv),
    "movielens-1m": ("ml-1m/ratings.dat", lambda path, events: write_rows(path, events, "::")),
    "movielens-100k": ("ml-100k/u.data", lambda path, events: write_rows(path, events, "\t")),
    "taobao": ("UserBehavior.csv", write_taobao),
    "netflix": ("combined_data_1.txt", write_netflix),
}


def expected(source: str) -> dict:
    if source == "netflix":  # its log is ordered by movie and knows days only
        events = sorted(EVENTS, key=lambda e: e[1])
        dated = [(u, i, r, netflix_date(t)) for u, i, r, t in events]
        return plain_pipeline(dated, min_items=40)
    return plain_pipeline(EVENTS, min_items=40, rated=source != "taobao")


@pytest.fixture(params=list(WRITERS))
def raw(request, tmp_path) -> tuple[str, Path]:
    member, write = WRITERS[request.param]
    path = tmp_path / "raw" / member
    path.parent.mkdir(parents=True)
    return request.param, write(path, EVENTS)


@pytest.mark.parametrize("packing", ["plain", "gzip", "zip", "folder"])
def test_formats(raw, packing, tmp_path):
    source, plain = raw
    given = {"plain": plain, "folder": plain.parent, "gzip": plain.with_name(plain.name + ".gz")}.get(packing)
    if packing == "gzip":
        given.write_bytes(gzip.compress(plain.read_bytes()))
    if packing == "zip":
        given = tmp_path / "download.zip"
        with zipfile.ZipFile(given, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(plain, plain.relative_to(tmp_path / "raw"))
            archive.writestr("README", "hello")
    assert as_raw(prepare(source, given, tmp_path / "out", **SETTING)) == expected(source)


def test_a_folder_that_holds_the_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        archive.writestr("ml-1m/ratings.dat", "".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in EVENTS))
    assert as_raw(prepare("movielens-1m", tmp_path, tmp_path / "out", **SETTING)) == expected("movielens-1m")


def test_windows_line_ends_and_a_byte_order_mark(tmp_path):
    log = write_movielens_csv(tmp_path / "ratings.csv", EVENTS)
    log.write_bytes(b"\xef\xbb\xbf" + log.read_bytes().replace(b"\n", b"\r\n"))
    assert as_raw(prepare("movielens-20m", log, tmp_path / "out", **SETTING)) == expected("movielens-20m")


def test_netflix_in_several_files_in_natural_order(tmp_path):
    """combined_data_10 comes after combined_data_2, and a movie's lines may go on in the next chunk."""
    movies = sorted({e[1] for e in EVENTS})
    parts = [movies[n::11] for n in range(11)]
    for n, part in enumerate(parts, 1):
        write_netflix(tmp_path / f"combined_data_{n}.txt", [e for e in EVENTS if e[1] in part])
    in_order = [e for part in parts for e in sorted((e for e in EVENTS if e[1] in part), key=lambda e: e[1])]
    dated = [(u, i, r, netflix_date(t)) for u, i, r, t in in_order]
    assert as_raw(prepare("netflix", tmp_path, tmp_path / "out", **SETTING)) == plain_pipeline(dated, min_items=40)


@pytest.mark.parametrize("chunk", [64, 1000])
def test_netflix_in_chunks(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr("bachlib.data.netflix.CHUNK", chunk)
    log = write_netflix(tmp_path / "combined_data_1.txt", EVENTS)
    log.write_bytes(log.read_bytes().rstrip(b"\n"))  # no line end at the end
    assert as_raw(prepare("netflix", log, tmp_path / "out", **SETTING)) == expected("netflix")


def test_titles_and_genres(tmp_path):
    cases = {
        "movielens-20m": (
            "movies.csv",
            'movieId,title,genres\n1,"Café, The (1995)",Comedy|Drama\n2,X,(no genres listed)\n',
        ),
        "movielens-1m": ("movies.dat", "1::Café, The (1995)::Comedy|Drama\n2::X::\n"),
        "movielens-100k": (
            "u.item",
            f"1|Café, The (1995)|1995||u|{'0|' * 5}1|0|0|1{'|0' * 10}\n2|X|1995||u{'|0' * 19}\n",
        ),
        "netflix": ("movie_titles.csv", "1,1995,Café, The\n2,NULL,X\n"),
    }
    for source, (name, text) in cases.items():
        member, write = WRITERS[source]
        folder = tmp_path / source
        folder.mkdir()
        log = write(folder / Path(member).name, EVENTS)
        (folder / name).write_text(text, encoding="utf-8" if name == "movies.csv" else "latin-1")
        items = prepare(source, log, folder / "out", **SETTING).items.set_index("raw_id")
        assert items.loc[1, "title"] == "Café, The (1995)"
        assert list(items.loc[1, "genres"]) == ([] if source == "netflix" else ["Comedy", "Drama"])
        assert items.loc[2, "title"] == "X" and list(items.loc[2, "genres"]) == []
        assert items.loc[3, "title"] == "3", "an item the table does not name keeps its id"


def test_taobao_categories_are_genres(tmp_path):
    items = prepare("taobao", write_taobao(tmp_path / "UserBehavior.csv", EVENTS), tmp_path / "o", **SETTING).items
    assert all(list(genres) == [str(raw % 7)] for raw, genres in zip(items["raw_id"], items["genres"], strict=True))


# ------------------------------------------------------------------------------------------- logs of your own

OWN = pd.DataFrame(EVENTS, columns=["u", "i", "r", "t"])
COLUMNS = {"user": "Customer ID", "item": "StockCode", "time": "InvoiceDate", "rating": "Stars"}


def own_frame(times) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "Invoice": "x, \"quoted\"",
            "StockCode": "item-" + OWN["i"].astype(str).str.zfill(4),
            "InvoiceDate": times,
            "Customer ID": "c" + OWN["u"].astype(str).str.zfill(4),
            "Stars": OWN["r"],
        }
    )  # fmt: skip


def own_expected() -> dict:
    plain = plain_pipeline(EVENTS, min_items=40)
    return {f"c{u:04d}": [f"item-{i:04d}" for i in items] for u, items in plain.items()}


STAMPS = pd.to_datetime(OWN["t"], unit="s")
TIMES = {
    "seconds": OWN["t"],
    "fractions": OWN["t"] + 0.5,
    "iso": STAMPS.dt.strftime("%Y-%m-%dT%H:%M:%SZ"),
    "us": STAMPS.dt.strftime("%m/%d/%Y %H:%M:%S"),
    "german": STAMPS.dt.strftime("%d.%m.%Y %H:%M:%S"),
}


@pytest.mark.parametrize("written", list(TIMES))
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_own_csv(tmp_path, written, delimiter):
    log = tmp_path / "my log.csv"
    own_frame(TIMES[written]).to_csv(log, index=False, sep=delimiter)
    assert as_raw(prepare("csv", log, tmp_path / "o", columns=COLUMNS, **SETTING)) == own_expected()


def test_times_with_offsets_are_compared_in_one_zone(tmp_path):
    shifted = [t.tz_localize("UTC").tz_convert(f"Etc/GMT-{n % 12}").isoformat() for n, t in enumerate(STAMPS)]
    own_frame(shifted).to_csv(tmp_path / "l.csv", index=False)
    assert as_raw(prepare("csv", tmp_path / "l.csv", tmp_path / "o", columns=COLUMNS, **SETTING)) == own_expected()


@pytest.mark.parametrize("times", [OWN["t"], STAMPS, TIMES["us"], OWN["t"] / 2])
def test_own_parquet(tmp_path, times):
    own_frame(times).to_parquet(tmp_path / "l.parquet")
    dataset = prepare("parquet", tmp_path / "l.parquet", tmp_path / "o", columns=COLUMNS, **SETTING)
    assert as_raw(dataset) == own_expected()


def test_own_log_without_ratings_titles_and_default_names(tmp_path):
    frame = pd.DataFrame({"user": OWN["u"], "item": OWN["i"], "time": OWN["t"]})
    frame["title"] = "Thing " + OWN["i"].astype(str)
    frame["genre"] = ["A|B" if i % 2 else "" for i in OWN["i"]]
    frame.to_csv(tmp_path / "l.csv", index=False)
    dataset = prepare("csv", tmp_path / "l.csv", tmp_path / "o", **SETTING)
    plain = plain_pipeline(EVENTS, min_items=40, rated=False)
    assert as_raw(dataset) == {str(u): [str(i) for i in items] for u, items in plain.items()}
    for _, row in dataset.items.iterrows():
        assert row["title"] == f"Thing {row['raw_id']}"
        assert list(row["genres"]) == (["A", "B"] if int(row["raw_id"]) % 2 else [])


@pytest.mark.parametrize("name", ["it's [1] *?.x", "ünï – 中.x"])
def test_odd_file_names(tmp_path, name):
    (tmp_path / "it's 1 ab.x").write_text("a file the pattern would match\n")
    frame = own_frame(OWN["t"])
    frame.to_csv(tmp_path / name, index=False)
    assert as_raw(prepare("csv", tmp_path / name, tmp_path / "o", columns=COLUMNS, **SETTING)) == own_expected()
    frame.to_parquet(tmp_path / name)
    assert as_raw(prepare("parquet", tmp_path / name, tmp_path / "p", columns=COLUMNS, **SETTING)) == own_expected()


def test_own_parquet_without_ratings_and_with_ids_of_any_type(tmp_path):
    plain = plain_pipeline(EVENTS, min_items=40, rated=False)
    expected_ids = {str(u): [str(i) for i in items] for u, items in plain.items()}
    frame = pd.DataFrame({"user": OWN["u"], "item": OWN["i"], "time": OWN["t"]})
    for n, kind in enumerate(["int32", "int64", "float64", "str", "category"]):
        frame.assign(user=frame["user"].astype(kind)).to_parquet(tmp_path / f"{n}.parquet")
        assert as_raw(prepare("parquet", tmp_path / f"{n}.parquet", tmp_path / f"o{n}", **SETTING)) == expected_ids


@pytest.mark.parametrize("source", ["csv", "parquet"])
def test_a_folder_of_files_with_other_orders_and_precisions(tmp_path, source):
    """Columns are matched by name; whole and broken seconds in different files compare as what they are."""
    frame = own_frame(OWN["t"])
    half = len(frame) // 2
    first, second = frame.iloc[:half], frame.iloc[half:][frame.columns[::-1]].astype({"InvoiceDate": "float64"})
    for name, part in (("a", first), ("b", second)):
        part.to_csv(tmp_path / f"{name}.csv", index=False) if source == "csv" else part.to_parquet(
            tmp_path / f"{name}.parquet"
        )
    assert as_raw(prepare(source, tmp_path, tmp_path / "out" / "o", columns=COLUMNS, **SETTING)) == own_expected()


def test_fractions_after_the_sample_and_huge_units_count(tmp_path):
    rows = [("u", f"i{n}", str(1_600_000_000_000_000_000 + n)) for n in range(10_500)]
    rows += [("u", f"j{n}", f"1700000000000000000.{99 - n:02d}") for n in range(40)]
    pd.DataFrame(rows, columns=["user", "item", "time"]).to_csv(tmp_path / "l.csv", index=False)
    sequence = as_raw(prepare("csv", tmp_path / "l.csv", tmp_path / "o", **SETTING))["u"]
    assert sequence == [f"i{n}" for n in range(10_500)] + [f"j{n}" for n in reversed(range(40))]


@pytest.mark.parametrize("written", ["%d/%m/%y %H:%M:%S", "%y-%m-%d", "%d-%m-%y %H:%M"])
def test_years_of_two_digits_are_not_guessed_as_days(tmp_path, written):
    days = pd.Series(pd.date_range("2020-01-01", periods=60, freq="13D"))
    frame = pd.DataFrame({"user": "u", "item": [f"i{n:02d}" for n in range(60)], "time": days.dt.strftime(written)})
    shuffled = frame.sample(frac=1, random_state=0)
    shuffled.to_csv(tmp_path / "l.csv", index=False)
    try:
        dataset = prepare("csv", tmp_path / "l.csv", tmp_path / "o", **SETTING)
    except BachError as error:  # two readings fit: then the user is asked
        assert "time_format=" in str(error)
        dataset = prepare("csv", tmp_path / "l.csv", tmp_path / "o", time_format=written, **SETTING)
    assert as_raw(dataset)["u"] == frame["item"].tolist()


def test_folders_named_like_partitions_change_nothing(tmp_path):
    folder = tmp_path / "Customer ID=bob"
    folder.mkdir()
    own_frame(OWN["t"]).to_csv(folder / "l.csv", index=False)
    assert as_raw(prepare("csv", folder / "l.csv", tmp_path / "o", columns=COLUMNS, **SETTING)) == own_expected()
    own_frame(OWN["t"]).to_parquet(folder / "l.parquet")
    assert (
        as_raw(prepare("parquet", folder / "l.parquet", tmp_path / "p", columns=COLUMNS, **SETTING)) == own_expected()
    )


def test_a_gzip_in_a_zip(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        text = "".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in EVENTS)
        archive.writestr("ml-1m/ratings.dat.gz", gzip.compress(text.encode()))
    assert as_raw(prepare("movielens-1m", tmp_path / "a.zip", tmp_path / "o", **SETTING)) == expected("movielens-1m")


def test_another_encoding(tmp_path):
    frame = own_frame(OWN["t"]).assign(StockCode=lambda f: "é" + f["StockCode"])
    frame.to_csv(tmp_path / "l.csv", index=False, encoding="utf-16")
    dataset = prepare("csv", tmp_path / "l.csv", tmp_path / "o", columns=COLUMNS, encoding="utf-16", **SETTING)
    assert dataset.items["raw_id"].str.startswith("é").all()
