"""Dates like 12/1/2010: all rows say which number is the day; only what stays ambiguous is asked for."""

import gzip
import re

import pandas as pd
import pytest
from logs import as_raw

from bachlib import BachError
from bachlib.data import prepare

SETTING = {"min_items": 31, "quiet": True}
EARLY = pd.date_range("2010-01-01", "2010-12-12").to_series()
EARLY = EARLY[EARLY.dt.day <= 12]  # days that could be months: they sort differently as the other
LATE = pd.date_range("2011-01-13", "2011-01-20").to_series()


def log_of(*parts: pd.Series, many: int = 0) -> pd.DataFrame:
    """A user's log in the order of time; `many` rows of somebody else stand before it, all of them ambiguous."""
    days = pd.concat(parts).reset_index(drop=True)
    mine = pd.DataFrame({"user": "u", "item": [f"i{n:03d}" for n in range(len(days))], "time": days})
    other = pd.DataFrame({"user": "v", "item": [f"i{n:03d}" for n in range(30)], "time": EARLY.iloc[0]})
    return pd.concat([*[other] * (many // 30), mine])


def written(frame: pd.DataFrame, form: str) -> pd.DataFrame:
    return frame.assign(time=frame["time"].dt.strftime(form))


def write(frame: pd.DataFrame, path) -> None:
    if path.suffix == ".parquet":
        frame.to_parquet(path)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(frame.to_csv(index=False).encode()))
    else:
        frame.to_csv(path, index=False)


@pytest.mark.parametrize("form", ["%m/%d/%Y", "%d/%m/%Y %H:%M", "%d/%m/%y", "%m/%d/%y"])
@pytest.mark.parametrize("name", ["l.csv", "l.csv.gz", "l.parquet"])
def test_rows_after_the_first_ten_thousand_decide(tmp_path, form, name):
    frame = log_of(EARLY, LATE, many=12_000)
    write(written(frame, form), tmp_path / name)
    data = prepare(name.split(".")[1], tmp_path / name, tmp_path / "o", **SETTING)
    assert as_raw(data) == {"u": frame["item"].iloc[-len(EARLY) - len(LATE) :].tolist()}


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
@pytest.mark.parametrize("clear", ["a", "b", "c"])
def test_one_file_of_a_folder_decides_for_all(tmp_path, kind, clear):
    (tmp_path / "log").mkdir()
    whole = log_of(*[EARLY + pd.DateOffset(years=n) for n in range(3)], LATE + pd.DateOffset(years=3))
    thirds = [whole.iloc[n * len(EARLY) : (n + 1) * len(EARLY)] for n in range(3)]
    for name, part in zip("abc", thirds, strict=True):
        rest = [whole.iloc[3 * len(EARLY) :]] if name == clear else []
        write(written(pd.concat([part, *rest]), "%d/%m/%Y"), tmp_path / "log" / f"{name}.{kind}")
    data = prepare(kind.split(".")[0], tmp_path / "log", tmp_path / "o", **SETTING)
    assert as_raw(data) == {"u": whole["item"].tolist()}


def test_one_wrong_row_at_the_beginning_decides_nothing(tmp_path):
    """Among the first 10,000 rows more are day/month, among all rows more are month/day."""
    frame = written(log_of(EARLY, LATE, many=12_000), "%m/%d/%Y")
    frame.iloc[5, 2] = "25/1/2010"
    write(frame, tmp_path / "l.csv")
    with pytest.raises(BachError, match=r"l\.csv, line 7: time is not a time: 'v,i005,25/1/2010'"):
        prepare("csv", tmp_path / "l.csv", tmp_path / "o", **SETTING)
    data = prepare("csv", tmp_path / "l.csv", tmp_path / "o", on_bad_rows="skip", **SETTING)
    assert data.meta["bad_rows"]["count"] == 1
    assert as_raw(data)["u"] == [f"i{n:03d}" for n in range(len(EARLY) + len(LATE))]


@pytest.mark.parametrize("name", ["l.csv", "l.parquet"])
def test_what_stays_ambiguous_is_asked_for(tmp_path, name):
    write(written(log_of(EARLY), "%m/%d/%Y"), tmp_path / name)
    said = f"all {len(EARLY)} dates of column 'time', like '01/01/2010', fit %m/%d/%Y and %d/%m/%Y; say which it is"
    with pytest.raises(BachError, match=re.escape(said) + ".*time_format='%m/%d/%Y'.*--time-format"):
        prepare(name.split(".")[1], tmp_path / name, tmp_path / "o", **SETTING)
    inorder = [f"i{n:03d}" for n in range(len(EARLY))]
    for form, same in (("%m/%d/%Y", True), ("%d/%m/%Y", False)):
        data = prepare(name.split(".")[1], tmp_path / name, tmp_path / form[1], time_format=form, **SETTING)
        assert (as_raw(data)["u"] == inorder) == same
