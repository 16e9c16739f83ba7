"""Bad input gets an error that says what, where and what would be right, and leaves nothing behind."""

import gzip
import zipfile

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from logs import (
    as_raw,
    my_csv,
    plain_pipeline,
    random_events,
    write_movielens_csv,
    write_netflix,
    write_rows,
    write_taobao,
)

from bachlib import BachError
from bachlib.data import prepare

EVENTS = random_events(21, ties=False)
MY = {"user": "who", "item": "what", "time": "when", "rating": "stars"}


@pytest.fixture
def refuses(tmp_path):
    """Call prepare, expect an error with all the given pieces, and nothing left in the outputs folder."""

    def call(source, path, *pieces, **params):
        out = tmp_path / "outputs" / "made"
        with pytest.raises(BachError) as caught:
            prepare(source, path, out, quiet=True, **{"min_items": 40, **params})
        for piece in pieces:
            assert piece in str(caught.value)
        assert not out.parent.exists() or list(out.parent.iterdir()) == []
        return str(caught.value)

    return call


def spoil(number, line):
    return lambda lines: lines.__setitem__(number - 1, line)


def test_missing_file(refuses, tmp_path):
    refuses("movielens-20m", tmp_path / "nowhere.csv", "nowhere.csv does not exist")


def test_unknown_source_and_parameters(refuses, tmp_path):
    refuses("movielens", tmp_path, "'movielens' is unknown", "movielens-20m", "csv")
    log = my_csv(tmp_path, EVENTS)
    refuses("csv", log, "min_ratings: not a parameter; there are min_rating", min_ratings=3)
    refuses("csv", log, "min_items", "greater than or equal to 31", "got 30", min_items=30)
    refuses("csv", log, "encoding='klingon' is unknown", columns=MY, encoding="klingon")


def test_wrong_format(refuses, tmp_path):
    dat = write_rows(tmp_path / "ratings.dat", EVENTS, "::")
    refuses(
        "movielens-20m",
        dat,
        "not a movielens-20m log",
        "userId,movieId,rating,timestamp",
        repr(dat.read_text().split()[0]),
    )
    csv = write_movielens_csv(tmp_path / "ratings.csv", EVENTS)
    refuses("movielens-1m", csv, "ratings.csv is not a movielens-1m log", "user::item::rating::time")
    refuses("taobao", csv, "not a taobao log")
    refuses("netflix", csv, "should be a movie like '1:'")
    refuses("parquet", csv, "not a readable Parquet file")
    (tmp_path / "binary.csv").write_bytes(b"who,what\0\0\n")
    refuses("csv", tmp_path / "binary.csv", "not a text file")


@pytest.mark.parametrize("source", ["movielens-20m", "movielens-1m", "taobao", "netflix", "csv"])
def test_empty(refuses, tmp_path, source):
    (tmp_path / "log").write_bytes(b"")
    refuses(source, tmp_path / "log", "log is empty")


def test_only_a_header(refuses, tmp_path):
    refuses("movielens-20m", write_movielens_csv(tmp_path / "ratings.csv", []), "the log is empty")
    refuses(
        "csv", my_csv(tmp_path, EVENTS, lambda lines: lines.__delitem__(slice(1, None))), "the log is empty", columns=MY
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("7,8,great,1000000000", "line 50: rating is not a number: '7,8,great,1000000000'"),
        ("7,8,4.0,yesterday", "line 50: time is not a time"),
        ("7,x8,4.0,1000000000", "line 50: item is not a whole number"),
        (",8,4.0,1000000000", "line 50: user is missing"),
        ("7,8,4.0,", "line 50: time is missing"),
        ("7,8,4.0", "line 50: missing columns"),
        ("7,8,4.0,5,6", "line 50: too many columns"),
        ("7,8,nan,1000000000", "line 50: rating is nan"),
        ("0.5,8,4.0,1000000000", "line 50: user is 0.5"),  # not user 1
        ("7,99999999999,4.0,1000000000", "line 50: item is 99999999999"),
    ],
)
def test_bad_row_in_movielens(refuses, tmp_path, line, said):
    path = write_movielens_csv(tmp_path / "ratings.csv", EVENTS)
    lines = path.read_text().split("\n")
    lines[49] = line
    path.write_text("\n".join(lines))
    message = refuses("movielens-20m", path, f"ratings.csv, {said}", "on_bad_rows='skip'")
    assert "rows in all" not in message

    dataset = prepare("movielens-20m", path, tmp_path / "skipped", min_items=40, on_bad_rows="skip", quiet=True)
    assert dataset.meta["bad_rows"]["count"] == 1 and said in dataset.meta["bad_rows"]["first"][0]
    assert as_raw(dataset) == plain_pipeline(EVENTS[:48] + EVENTS[49:], min_items=40)


@pytest.mark.parametrize(("source", "delimiter"), [("movielens-20m", ","), ("movielens-1m", "::"), ("taobao", ",")])
@pytest.mark.parametrize("lost", [3, 14])
def test_truncated_last_line(refuses, tmp_path, source, delimiter, lost):
    """Cut off inside the time (it still reads as a number) or with fields missing."""
    path = tmp_path / "log"
    writer = {"movielens-20m": write_movielens_csv, "taobao": write_taobao}.get(source)
    writer(path, EVENTS) if writer else write_rows(path, EVENTS, delimiter)
    path.write_bytes(path.read_bytes()[:-lost])
    n_lines = len(EVENTS) + (source == "movielens-20m")
    refuses(source, path, f"log, line {n_lines}: ")
    dataset = prepare(source, path, tmp_path / "skipped", min_items=40, on_bad_rows="skip", quiet=True)
    assert as_raw(dataset) == plain_pipeline(EVENTS[:-1], min_items=40, rated=source != "taobao")


def test_a_last_line_without_its_line_end_is_complete(tmp_path):
    path = write_movielens_csv(tmp_path / "ratings.csv", EVENTS)
    path.write_bytes(path.read_bytes().rstrip(b"\n"))
    dataset = prepare("movielens-20m", path, tmp_path / "o", min_items=40, quiet=True)
    assert as_raw(dataset) == plain_pipeline(EVENTS, min_items=40)


def test_bad_rows_of_taobao_and_netflix(refuses, tmp_path):
    path = write_taobao(tmp_path / "UserBehavior.csv", EVENTS)
    path.write_text(path.read_text().replace(",buy,", ",steal,", 1))
    refuses("taobao", path, "behavior is not one of pv, buy, cart, fav")

    path = write_netflix(tmp_path / "combined_data_1.txt", EVENTS)
    lines = path.read_text().split("\n")
    lines[9:9] = ["12,five,2005-01-01", "12,5", "12,5,2005-13-01"]
    path.write_text("\n".join(lines))
    message = refuses("netflix", path, *(f"combined_data_1.txt, line {n}: neither" for n in (10, 11, 12)))
    assert "'12,five,2005-01-01'" in message
    dataset = prepare("netflix", path, tmp_path / "skipped", min_items=40, on_bad_rows="skip", quiet=True)
    assert dataset.meta["bad_rows"]["count"] == 3


def test_the_first_few_bad_rows_are_shown_and_all_are_counted(refuses, tmp_path):
    path = my_csv(tmp_path, EVENTS, lambda lines: [spoil(n, f"u1,i1,,{n}")(lines) for n in range(10, 30)])
    message = refuses("csv", path, "my.csv, line 10: time is missing", "line 14:", "20 rows in all", columns=MY)
    assert "line 15:" not in message


@pytest.mark.parametrize(
    ("row", "said"), [(",i1,5,4", "user is missing"), ("u1,,5,4", "item is missing"), ("u1,i1,5,inf", "rating is inf")]
)
def test_missing_values_in_my_csv(refuses, tmp_path, row, said):
    refuses("csv", my_csv(tmp_path, EVENTS, spoil(40, row)), f"my.csv, line 40: {said}", columns=MY)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(
    ("row", "said"),
    [
        (",i1,1000000000,5", "user is missing"),
        ("u1,i1,never,5", "time is not a time: 'u1,"),
        ('"u\n1",,1000000000,5', "item is missing"),
        ('"u\n1",i1,never,5', "time is not a time"),
        ('u1,"12 INCH,5,5', "unquoted value"),
    ],
)
def test_blank_and_quoted_lines_do_not_shift_the_line_number(refuses, tmp_path, row, said, end):
    def change(lines):
        lines[4] = '"u\n1",i1,1000000000,5'
        lines[6] = lines[19] = ""
        lines[20] = row

    path = my_csv(tmp_path, EVENTS, change)
    path.write_bytes(path.read_bytes().replace(b"\n", end.encode()))
    refuses("csv", path, f"line 22: {said}", columns=MY)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("place", [0, 1, 30, -1])
@pytest.mark.parametrize("source", ["movielens-20m", "movielens-1m", "taobao"])
def test_line_numbers_with_any_line_end(refuses, tmp_path, source, place, end):
    """With and without a header; the first, second, a middle and the last row; a wrong value and a missing field."""
    writer = {"movielens-20m": write_movielens_csv, "taobao": write_taobao}.get(source)
    path = tmp_path / "log"
    writer(path, EVENTS) if writer else write_rows(path, EVENTS, "::")
    lines = path.read_text().split("\n")[:-1]
    header = source == "movielens-20m"
    number = len(lines) if place < 0 else 1 + header + place
    good = lines[number - 1]
    missing_field = [] if number == 1 else [good.rsplit("::" if "::" in good else ",", 1)[0]]  # line 1 tells the format
    for bad in (good[:-4] + "x", *missing_field):
        lines[number - 1] = bad
        path.write_bytes((end.join(lines) + end).encode())
        assert refuses(source, path, f"log, line {number}: ").endswith(f": {bad!r}")


def test_line_numbers_in_a_large_file(refuses, tmp_path):
    lines = [f'"a\nb",i{n},{10**9 + n},5' if n % 3 == 0 else f"u{n % 7},i{n},{10**9 + n},5" for n in range(400_000)]
    lines[300_000] = "u1,i1,never,5"
    (tmp_path / "big.csv").write_text("who,what,when,stars\n" + "\n".join(lines) + "\n")
    physical = 2 + 300_000 + sum(n % 3 == 0 for n in range(300_000))
    refuses("csv", tmp_path / "big.csv", f"big.csv, line {physical}: time is not a time", columns=MY)


@pytest.mark.parametrize("mode", ["stop", "skip"])
def test_a_stray_quote_is_never_skipped_over(refuses, tmp_path, mode):
    """It would take every row up to the next quote with it, and count as one."""
    path = my_csv(tmp_path, EVENTS, spoil(60, 'u1,"12 INCH,5,5'))
    message = refuses("csv", path, "my.csv, line 60", "correct that line", columns=MY, on_bad_rows=mode)
    assert len(message) < 600
    path = write_movielens_csv(tmp_path / "ratings.csv", EVENTS)
    lines = path.read_text().split("\n")
    lines[49] = '7,"8,4.0,1000000000'
    path.write_text("\n".join(lines))
    dataset = prepare("movielens-20m", path, tmp_path / f"o-{mode}", min_items=40, on_bad_rows="skip", quiet=True)
    assert dataset.meta["bad_rows"]["count"] == 1 and "line 50" in dataset.meta["bad_rows"]["first"][0]


def test_a_movie_line_that_is_none_is_never_skipped_over(refuses, tmp_path):
    path = write_netflix(tmp_path / "combined_data_1.txt", EVENTS)
    path.write_text(path.read_text().replace("\n7:\n", "\n7;\n"))
    refuses("netflix", path, "should be a movie like '7:', to which the next ratings belong", on_bad_rows="skip")
    path.write_text(write_netflix(path, EVENTS).read_text() + "99999999999,5,2005-01-01\n5,300,2005-01-01\n")
    dataset = prepare("netflix", path, tmp_path / "o", min_items=40, on_bad_rows="skip", quiet=True)
    assert dataset.meta["bad_rows"]["count"] == 2


def test_files_of_a_folder_that_do_not_fit(refuses, tmp_path):
    folder = tmp_path / "parts"
    folder.mkdir()
    (folder / "a.csv").write_text("user,item,time\nu,i,1\n")
    (folder / "b.csv").write_text("user,item,time,rating\nu,i,1,5\n")
    refuses("csv", folder, "the columns item, rating, time, user, but the files before it have item, time, user")


def test_one_column_for_two_roles(refuses, tmp_path):
    refuses("csv", my_csv(tmp_path, EVENTS), "names 'who' for both user and item", columns={**MY, "item": "who"})


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"min_rating": float("nan")}, "min_rating: Input should be a finite number"),
        ({"time_format": "%q"}, "failed: "),
        ({"memory": "lots"}, "failed: "),
    ],
)
def test_parameters_the_engine_does_not_take(refuses, tmp_path, params, said):
    refuses("csv", my_csv(tmp_path, EVENTS), said, columns=MY, **params)


def test_old_mac_line_ends_are_said(refuses, tmp_path):
    path = my_csv(tmp_path, EVENTS)
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r"))
    refuses("csv", path, "old Mac line ends", columns=MY)


def test_missing_columns_name_those_found(refuses, tmp_path):
    refuses(
        "csv",
        my_csv(tmp_path, EVENTS),
        "no column 'user' (user), 'item' (item), 'time' (time)",
        "'who', 'what', 'when', 'stars'",
    )
    refuses("csv", my_csv(tmp_path, EVENTS), "no column 'date' (time)", columns={**MY, "time": "date"})
    frame = pd.read_csv(my_csv(tmp_path, EVENTS))
    frame.to_parquet(tmp_path / "my.parquet")
    refuses("parquet", tmp_path / "my.parquet", "no column 'user' (user)", "'who', 'what', 'when', 'stars'")
    frame.assign(when=frame["when"].mask(frame.index == 6)).to_parquet(tmp_path / "my.parquet")
    refuses("parquet", tmp_path / "my.parquet", "my.parquet, row 7: time is missing", columns=MY)


def test_a_time_that_is_none(refuses, tmp_path):
    def dated(time):
        return [(1, n, 5, time) for n in range(90)]

    path = my_csv(tmp_path, dated("soon"))
    refuses("csv", path, "column 'when' should hold the time", "holds 'soon'", "time_format=", columns=MY)
    path = my_csv(tmp_path, dated("01/02/2020"))
    refuses("csv", path, "%m/%d/%Y and %d/%m/%Y", "time_format=", columns=MY)
    dataset = prepare("csv", path, tmp_path / "o", columns=MY, time_format="%d/%m/%Y", min_items=40, quiet=True)
    assert dataset.n_users == 1


def test_not_utf8(refuses, tmp_path):
    path = my_csv(tmp_path, EVENTS, spoil(30, "u1,café,1000000000,5"), encoding="latin-1")
    refuses("csv", path, "my.csv, line 30: the file is not UTF-8", "encoding='latin-1'", columns=MY)
    dataset = prepare("csv", path, tmp_path / "o", columns=MY, encoding="latin-1", min_items=40, quiet=True)
    assert dataset.meta["bad_rows"]["count"] == 0
    refuses("csv", my_csv(tmp_path, EVENTS), "is not utf-16", columns=MY, encoding="utf-16")


def test_nobody_is_long_enough(refuses, tmp_path):
    longest = max(len(s) for s in plain_pipeline(EVENTS, min_items=1).values())
    path = my_csv(tmp_path, EVENTS)
    refuses(
        "csv",
        path,
        "no user has 500 liked items",
        f"the longest sequence has {longest}",
        "Lower min_items",
        columns=MY,
        min_items=500,
    )
    refuses(
        "csv",
        path,
        "no event has a rating of at least min_rating=6",
        "ratings go from 1 to 5",
        "lower min_rating",
        columns=MY,
        min_rating=6,
    )


def test_zip_without_the_log(refuses, tmp_path):
    with zipfile.ZipFile(tmp_path / "ml-1m.zip", "w") as archive:
        archive.writestr("ml-1m/README", "hello")
    refuses("movielens-1m", tmp_path / "ml-1m.zip", "has no file ratings.dat", "it has ml-1m/README")
    (tmp_path / "empty").mkdir()
    refuses("movielens-1m", tmp_path / "empty", "has no file ratings.dat", "it has no files")


def test_damaged_archives(refuses, tmp_path):
    write_rows(tmp_path / "ratings.dat", EVENTS, "::")
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(tmp_path / "ratings.dat", "ml-1m/ratings.dat")
    data = (tmp_path / "a.zip").read_bytes()
    (tmp_path / "cut.zip").write_bytes(data[: len(data) // 2])
    refuses("movielens-1m", tmp_path / "cut.zip", "cut.zip is a damaged or incomplete zip", "download it again")
    (tmp_path / "flipped.zip").write_bytes(data[:3000] + bytes([data[3000] ^ 255]) + data[3001:])
    refuses("movielens-1m", tmp_path / "flipped.zip", "damaged")
    packed = gzip.compress((tmp_path / "ratings.dat").read_bytes())
    (tmp_path / "ratings.dat.gz").write_bytes(packed[:-2000])
    refuses("movielens-1m", tmp_path / "ratings.dat.gz", "ratings.dat.gz is damaged or was cut off")


def test_two_logs_of_one_name(refuses, tmp_path):
    for name in ("ml-20m", "ml-25m"):
        (tmp_path / name).mkdir()
        write_movielens_csv(tmp_path / name / "ratings.csv", EVENTS)
    refuses("movielens-20m", tmp_path, "more than one ratings.csv", "ml-25m/ratings.csv", "the path of one of them")


def test_a_folder_that_is_something_else_is_not_touched(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter.tex").write_text("years of work")
    with pytest.raises(BachError, match="not a prepared data set; choose another out="):
        prepare("csv", my_csv(tmp_path, EVENTS), tmp_path / "thesis", columns=MY, quiet=True)
    assert (tmp_path / "thesis" / "chapter.tex").read_text() == "years of work"


# ------------------------------------------------------------------------------------ odd archives, lines, ids, times


def zip_with(path, member="ml-1m/ratings.dat", **more):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, "".join(f"{u}::{i}::{r}::{t}\n" for u, i, r, t in EVENTS))
        for name, content in more.items():
            archive.writestr(f"ml-1m/{name}", content)
    return path


@pytest.mark.parametrize(
    ("local", "central", "value", "said"),
    [
        (6, 8, 1, "archive.zip:ml-1m/ratings.dat cannot be unpacked (File 'ml-1m/ratings.dat' is encrypted"),
        (8, 10, 99, "archive.zip:ml-1m/ratings.dat cannot be unpacked (That compression method is not supported)"),
        (8, 10, 14, "archive.zip:ml-1m/ratings.dat is damaged"),  # said to be LZMA
        (8, 10, 12, "archive.zip:ml-1m/ratings.dat is damaged"),  # said to be bzip2
        (4, 6, 99, "archive.zip is a damaged zip, or one that Python cannot read (zip file version 9.9)"),
    ],
)
def test_zips_that_python_cannot_unpack(refuses, tmp_path, local, central, value, said):
    data = bytearray(zip_with(tmp_path / "archive.zip").read_bytes())
    data[local] = data[data.index(b"PK\x01\x02") + central] = value
    (tmp_path / "archive.zip").write_bytes(data)
    refuses("movielens-1m", tmp_path / "archive.zip", said)


def test_a_member_with_a_long_name(tmp_path):
    path = zip_with(tmp_path / "a.zip", "x" * 300 + "/ratings.dat")
    assert as_raw(prepare("movielens-1m", path, tmp_path / "o", min_items=40, quiet=True)) == plain_pipeline(
        EVENTS, min_items=40
    )


def test_a_bomb_among_the_titles(refuses, tmp_path):
    path = zip_with(tmp_path / "a.zip", **{"movies.dat": b"1::a::b\n" * (1 << 24) + b"more"})
    assert path.stat().st_size < 1_000_000
    refuses("movielens-1m", path, "a.zip:ml-1m/movies.dat is larger than 134,217,728 bytes")


@pytest.mark.parametrize("encoding", ["hex", "rot13", "base64", "utf-8\0", "", "undefined"])
def test_codecs_that_are_no_text_encoding(refuses, tmp_path, encoding):
    said = f"encoding={encoding!r} is unknown to Python as a text encoding; examples are 'latin-1'"
    refuses("csv", my_csv(tmp_path, EVENTS), said, columns=MY, encoding=encoding)


@pytest.mark.parametrize("mode", ["stop", "skip"])
@pytest.mark.parametrize(
    ("length", "said"),
    [(2_500_000, "line 50: line size over maximum"), (40_000_000, "line 50 is longer than 16,777,216 bytes")],
)
def test_endless_lines(refuses, tmp_path, length, said, mode):
    path = my_csv(tmp_path, EVENTS, spoil(50, f"u1,{'x' * length},1000000000,5"))
    assert len(refuses("csv", path, f"my.csv, {said}", columns=MY, on_bad_rows=mode)) < 600


def test_a_quote_that_is_closed_far_away_takes_no_rows(refuses, tmp_path):
    lines = [f"u{n % 5},i{n % 90},{10**9 + n},5" for n in range(150_000)]
    lines[20], lines[140_000] = 'u1,"12 INCH', 'INCH",1000000000,5'
    (tmp_path / "my.csv").write_text("who,what,when,stars\n" + "\n".join(lines) + "\n")
    refuses("csv", tmp_path / "my.csv", "my.csv, line 22: line size", "unclosed", columns=MY, on_bad_rows="skip")


def test_columns_of_one_name(refuses, tmp_path):
    frame = pd.read_csv(my_csv(tmp_path, EVENTS))
    double = pd.concat([frame, frame[["who", "stars"]]], axis=1)
    double.to_csv(tmp_path / "my.csv", index=False)
    refuses("csv", tmp_path / "my.csv", "my.csv has 2 columns named 'who'; rename all but the right one", columns=MY)
    frame.assign(a=1, b=2).rename(columns={"b": "a"}).to_csv(tmp_path / "my.csv", index=False)
    data = prepare("csv", tmp_path / "my.csv", tmp_path / "o", columns=MY, min_items=40, quiet=True)
    assert data.n_users, "other columns may be called what they like"


@pytest.mark.parametrize(
    ("time", "kind"), [(lambda t: t % 2 == 0, "BOOLEAN"), (lambda t: t.map(lambda x: [x]), "BIGINT[]"),
                       (lambda t: t.astype(str).str.encode("utf-8"), "BLOB")]
)  # fmt: skip
def test_times_of_a_wrong_type(refuses, tmp_path, time, kind):
    frame = pd.read_csv(my_csv(tmp_path, EVENTS))
    frame.assign(when=time(frame["when"])).to_parquet(tmp_path / "my.parquet")
    said = f"my.parquet: column 'when' should hold a number, a date or text and is {kind}"
    refuses("parquet", tmp_path / "my.parquet", said, columns=MY)


def test_ids_that_are_floats(refuses, tmp_path):
    frame = pd.read_csv(my_csv(tmp_path, EVENTS))
    number = frame["who"].str[1:].astype(float)
    path = tmp_path / "my.parquet"
    table = pa.Table.from_pandas(frame.drop(columns="who"))
    not_a_number = pa.array(number.where(number != 3, float("nan")).to_numpy(), from_pandas=False)
    pq.write_table(table.append_column("who", not_a_number), path)
    refuses("parquet", path, f"my.parquet, row {1 + int((number == 3).argmax())}: user is missing", columns=MY)
    half = (number / 2).to_numpy()  # 0.5 and 1.0 are two users
    pq.write_table(table.append_column("who", pa.array(half)), path)
    data = prepare("parquet", path, tmp_path / "half", columns=MY, min_items=40, quiet=True)
    expected = plain_pipeline(EVENTS, min_items=40)
    assert set(data.users["raw_id"]) == {f"{u / 2:g}" if u % 2 else f"{u // 2}" for u in expected}
    pq.write_table(table.append_column("who", pa.array(number.to_numpy() + 2.0**60)), path)
    data = prepare("parquet", path, tmp_path / "large", columns=MY, min_items=40, quiet=True)
    said = "rows of my.parquet have a user id above 9,007,199,254,740,992 as a DOUBLE: digits may be lost"
    assert data.meta["notes"] == [f"{len(EVENTS):,} {said}"]


def test_ids_that_look_the_same_are_mentioned(tmp_path, capsys):
    """They stay different: only a person knows whether they are one."""
    names = ["caf\u00e9", "cafe\u0301", "caf\u00e9 ", "ti ger", "ti\u00a0ger", "li\u200bon", "lion", "Lion", "zebra"]
    rows = [(name, f"i{n}", n) for name in names for n in range(40)]
    pd.DataFrame(rows, columns=["user", "item", "time"]).to_csv(tmp_path / "my.csv", index=False)
    data = prepare("csv", tmp_path / "my.csv", tmp_path / "o", min_items=40)
    said = "users have ids that differ only in white space, invisible characters or Unicode form, e.g."
    assert data.meta["notes"] == [f"7 {said} 'cafe\\u0301' and 'caf\\xe9 '; they count as different"]
    assert data.meta["notes"][0] in capsys.readouterr().out and data.n_users == len(names)


def test_a_zip_whose_directory_points_nowhere(refuses, tmp_path):
    whole = zip_with(tmp_path / "a.zip").read_bytes()
    (tmp_path / "a.zip").write_bytes(whole[:500] + whole[560:])  # the members begin before the file
    refuses("movielens-1m", tmp_path / "a.zip", "a.zip", "damaged")


def test_a_rating_too_large_for_a_number_is_named(refuses, tmp_path):
    refuses("csv", my_csv(tmp_path, EVENTS, spoil(40, "u1,i1,5,1e999")), "my.csv, line 40: rating is 1e999", columns=MY)


def test_bytes_that_are_no_text_in_a_netflix_log(refuses, tmp_path, capfd):
    path = write_netflix(tmp_path / "combined_data_1.txt", EVENTS)
    lines = path.read_bytes().split(b"\n")
    lines[9:9] = [b"12,\xe9\xff", "١٢,5,2005-01-01".encode(), b"1_2,5,2005-01-01"]
    path.write_bytes(b"\n".join(lines))
    refuses("netflix", path, *(f"combined_data_1.txt, line {n}: neither" for n in (10, 11, 12)))
    assert "Traceback" not in capfd.readouterr().err


def test_damage_inside_of_a_parquet_file_is_named(refuses, tmp_path):
    pd.read_csv(my_csv(tmp_path, EVENTS)).to_parquet(path := tmp_path / "my.parquet")
    whole = bytearray(path.read_bytes())
    whole[4:12] = b"\xff" * 8  # of the first page
    path.write_bytes(whole)
    refuses("parquet", path, "my.parquet", columns=MY)
