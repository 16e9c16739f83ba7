"""What the readers share: rows that cannot be read, columns the user names, and times of any kind.

A row that cannot be read never disappears silently: `BadRows` counts it and keeps file, line and reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

import duckdb

from bachlib import BachError
from bachlib.params import PrepareParams

SHOWN = 5  # bad rows that are quoted; the others are counted

DATES = ["%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%Y/%m/%d", "%m/%d/%y", "%d/%m/%y", "%d.%m.%y", "%y-%m-%d", "%d-%m-%y"]
DATE_FORMATS = [date + clock for date in DATES for clock in ("", " %H:%M", " %H:%M:%S")]

# a number as time, of any unit, with up to six places: whole and broken numbers of all files compare exactly
NUMBER = "DECIMAL(38, 6)"


@dataclass
class BadRows:
    """The rows that could not be read: how many, and what the first few were."""

    count: int = 0
    first: list[str] = field(default_factory=list)
    fatal: str | None = None  # a row without which the others cannot be read either

    def add(self, count: int, messages: list[str]) -> None:
        self.count += count
        self.first = (self.first + [shortened(message) for message in messages])[:SHOWN]

    def __str__(self) -> str:
        more = f"\n  … {self.count:,} rows in all" if self.count > len(self.first) else ""
        return "\n".join(f"  {message}" for message in self.first) + more


def shortened(text: str, most: int = 300) -> str:
    return text if len(text) <= most else text[:most] + "…"


def quote(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def quote_path(path: Path) -> str:
    """A file name as an SQL literal; DuckDB takes `*`, `?` and `[` in it for a pattern."""
    return quote(re.sub(r"[*?\[]", r"[\g<0>]", str(path)))


def append(con: duckdb.DuckDBPyConnection, select: str, columns: list[str], label: str) -> None:
    """Append the rows of `select`, with these columns, to `log`; the first file makes the table."""
    known = con.execute("SELECT column_name FROM duckdb_columns() WHERE table_name = 'log'").fetchall()
    if not known:
        con.execute(f"CREATE TABLE log AS {select}")
    elif {name for (name,) in known} != set(columns):
        before = ", ".join(sorted(name for (name,) in known))
        raise BachError(f"{label} has {', '.join(sorted(columns))}, the files before it have {before}: they do not fit")
    else:
        con.execute(f"INSERT INTO log BY NAME {select}")


def named_columns(params: PrepareParams, found: list[str], label: str) -> dict[str, str]:
    """role → column of the user's own log; without `columns=`, columns called user, item, time, … are taken."""
    named = {"user": "user", "item": "item", "time": "time"}
    if params.columns is None:
        named |= {role: role for role in ("rating", "title", "genre") if role in found}
    else:
        named |= params.columns
    missing = [f"{column!r} ({role})" for role, column in named.items() if column not in found]
    if missing:
        raise BachError(
            f"{label} has no column {', '.join(missing)}; its columns are {', '.join(map(repr, found))}. "
            'Say which is which with columns={"user": …, "item": …, "time": …} (--user … --item … --time …)'
        )
    for role, column in named.items():
        others = [other for other in named if named[other] == column and other != role]
        if others:
            raise BachError(
                f"column {column!r} is named for {role} and for {others[0]}; each needs a column of its own"
            )
    return named


def time_type(
    con: duckdb.DuckDBPyConnection, sample: list[str], label: str, column: str, time_format: str | None
) -> tuple[str, str | None]:
    """(type, format) that reads most of the sample: numbers, ISO dates, or a common written date."""
    if time_format:
        return "TIMESTAMP", time_format
    sample = [text for text in sample if text.strip()]
    if not sample:
        return NUMBER, None
    year = r"regexp_matches(t, '\d{4}')"  # 03/10/20 is not a day of the year 20
    tests = {
        (NUMBER, None): f"TRY_CAST(t AS {NUMBER}) IS NOT NULL",
        ("TIMESTAMPTZ", None): r"TRY_CAST(t AS TIMESTAMPTZ) IS NOT NULL AND regexp_matches(t, '^\s*\d{4,}-\d')",
    }
    for form in DATE_FORMATS:
        tests["TIMESTAMP", form] = f"try_strptime(t, {quote(form)}) IS NOT NULL AND {year} = {'%Y' in form}"
    counts = ", ".join(f"count(*) FILTER ({test})" for test in tests.values())
    fits = con.execute(f"SELECT {counts} FROM (SELECT unnest($1) AS t)", [sample]).fetchall()[0]
    if max(fits) * 2 <= len(sample):
        best = tests[max(zip(fits, tests, strict=True), key=lambda pair: pair[0])[1]]
        wrong = con.execute(f"SELECT t FROM (SELECT unnest($1) AS t) WHERE NOT ({best}) LIMIT 1", [sample]).fetchall()
        raise BachError(
            f"{label}: column {column!r} should hold the time as a number or a date and holds {wrong[0][0]!r}; "
            "name another column, or say how it is written with time_format=, e.g. '%d/%m/%Y %H:%M'"
        )
    winners = [kind for kind, n in zip(tests, fits, strict=True) if n == max(fits)]
    if len(winners) > 1 and winners[0][1]:
        raise BachError(
            f"{label}: column {column!r} holds dates like {sample[0]!r}, which read as {winners[0][1]} and as "
            f"{winners[1][1]}; say which with time_format="
        )
    return winners[0]


def integer_time(expression: str, kind: str) -> str:
    """SQL that turns a time of any type into an integer that sorts the same way: millionths of its unit."""
    if kind.startswith(("TIMESTAMP", "DATE")):
        return f"epoch_us({expression})::HUGEINT"
    return f"(TRY_CAST({expression} AS {NUMBER}) * 1000000)::HUGEINT"
