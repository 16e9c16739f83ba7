"""The DuckDB table `log` that every reader fills: its connection, its columns, its times, and rows that cannot be read.

`log` has the columns user, item, time (an integer of any unit: only its order counts) and, where the data set has them,
rating, title and genre. Its row order is the order of the raw log, so `rowid` breaks ties in time. An unreadable row
never disappears silently: `BadRows` counts it and keeps file, line and reason.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import duckdb
import numpy as np

from bachlib import BachError
from bachlib.params import PrepareParams

SHOWN = 5  # bad rows that a message quotes; the others are only counted

DATES = ["%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%Y/%m/%d", "%m/%d/%y", "%d/%m/%y", "%d.%m.%y", "%y-%m-%d", "%d-%m-%y"]
DATE_FORMATS = [date + clock for date in DATES for clock in ("", " %H:%M", " %H:%M:%S")]

UNSEEN = r"[\p{Z}\p{C}]+"  # of an id: spaces of all kinds, control and formatting characters

# a time given as a number of any unit, with up to six decimals: the times of all files compare exactly
NUMBER = "DECIMAL(38, 6)"


@dataclass
class BadRows:
    """The rows that could not be read: their number and messages about the first few."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, count: int, messages: list[str]) -> None:
        self.count += count
        self.first = (self.first + [shortened(message) for message in messages])[:SHOWN]

    def __str__(self) -> str:
        more = f"\n  … {self.count:,} rows in all" if self.count > len(self.first) else ""
        return "\n".join(f"  {message}" for message in self.first) + more


def shortened(text: str) -> str:
    return text if len(text) <= 300 else text[:300] + "…"


def connect(memory: str, spill: Path, threads: int | None = None) -> duckdb.DuckDBPyConnection:
    """An in-memory database in UTC without a progress bar; data beyond `memory` goes to the folder `spill`."""
    config = {"memory_limit": memory, "temp_directory": str(spill)} | ({"threads": threads} if threads else {})
    con = duckdb.connect(config=config)
    con.execute("SET enable_progress_bar = false; SET TimeZone = 'UTC'")
    return con


def quote(text: str) -> str:
    """Text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def quote_name(column: str) -> str:
    """The name of a column in SQL."""
    return '"' + column.replace('"', '""') + '"'


def quote_path(path: Path) -> str:
    """A file name as an SQL literal, with `*`, `?` and `[` escaped: DuckDB would read them as a pattern."""
    return quote(re.sub(r"[*?\[]", r"[\g<0>]", str(path)))


class LogTable:
    """The table `log`, the parameters it is read with, and the rows that could not be read."""

    def __init__(self, con: duckdb.DuckDBPyConnection, params: PrepareParams):
        self.con, self.params, self.bad = con, params, BadRows()
        self.notes: list[str] = []  # what `prepare` should mention
        self.date_format: str | None = None  # what all rows decided, if the first rows of a file did not

    def one(self, query: str, values: list[Any] | None = None) -> tuple[Any, ...]:
        """The first row of a query's result."""
        return self.con.execute(query, values).fetchall()[0]

    def note(self, count: int, what: str) -> None:
        """Remember to mention this number of rows or ids, if there are any."""
        self.notes += [f"{count:,} {what}"] * (count > 0)

    def note_alike(self, table: str, role: str) -> None:
        """Mention ids that look the same: `table` has every id once."""
        if self.columns()[role] != "VARCHAR":
            return
        n, a, b = self.one(f"""
            SELECT sum(n), arg_min(a, a), arg_min(b, a) FROM (
                SELECT count(*) AS n, min({role}) AS a, max({role}) AS b FROM {table}
                GROUP BY regexp_replace(nfc_normalize({role}), '{UNSEEN}', '', 'g') HAVING n > 1
            )
        """)
        unlike = f"{role}s have ids that differ only in white space, invisible characters or Unicode form, e.g."
        self.note(n or 0, f"{unlike} {a!a} and {b!a}; they count as different")

    def columns(self) -> dict[str, str]:
        """Column → SQL type of `log`; empty before the first file."""
        query = "SELECT column_name, data_type FROM duckdb_columns() WHERE table_name = 'log'"
        return dict(self.con.execute(query).fetchall())

    def append(self, select: str, columns: list[str], label: str) -> None:
        """Append the rows of `select` to `log`; the first call creates the table."""
        before, here = (", ".join(sorted(names)) for names in (self.columns(), columns))
        if not before:
            self.con.execute(f"CREATE TABLE log AS {select}")
        elif before != here:
            raise BachError(f"{label} has the columns {here}, but the files before it have {before}")
        else:
            self.con.execute(f"INSERT INTO log BY NAME {select}")

    def named_columns(self, found: list[str], label: str, fixed: dict[str, str] | None = None) -> dict[str, str]:
        """Role → column. Of a data set we know it is `fixed`; else the user's `columns=`, or columns called user, item,
        time, …"""
        there = {role: role for role in ("rating", "title", "genre") if role in found}
        usual = {"user": "user", "item": "item", "time": "time"}
        named = fixed or usual | (there if self.params.columns is None else self.params.columns)
        if missing := [f"{column!r} ({role})" for role, column in named.items() if column not in found]:
            how = 'columns={"user": …, "item": …, "time": …} (--user … --item … --time …)'
            advice = "It is not the authors' file" if fixed else f"Say which is which with {how}"
            shown = ", ".join(map(repr, found))
            raise BachError(f"{label} has no column {', '.join(missing)}; its columns are {shown}. {advice}")
        for role, column in named.items():
            if others := [other for other in named if named[other] == column and other != role]:
                raise BachError(f"columns= names {column!r} for both {role} and {others[0]}; each needs its own column")
        return named

    def time_type(self, sample: list[str], label: str, column: str, texts: Iterable[str]) -> tuple[str, str | None]:
        """(SQL type, date format) that reads most of the sample: numbers, ISO dates or a common date format.

        If several date formats do (is 12/1/2010 in January?), all rows decide: `texts` has a query of the times of each
        file, in a column t. It is only used then.
        """
        if self.params.time_format:
            return "TIMESTAMP", self.params.time_format
        sample = [text for text in sample if text.strip()]
        if not sample:
            return NUMBER, None
        year = r"regexp_matches(t, '\d{4}')"  # 03/10/20 is not in the year 20
        tests = {
            (NUMBER, None): f"TRY_CAST(t AS {NUMBER}) IS NOT NULL",
            ("TIMESTAMPTZ", None): r"TRY_CAST(t AS TIMESTAMPTZ) IS NOT NULL AND regexp_matches(t, '^\s*\d{4,}-\d')",
        }
        for form in DATE_FORMATS:
            tests["TIMESTAMP", form] = f"try_strptime(t, {quote(form)}) IS NOT NULL AND {year} = {'%Y' in form}"
        counts = ", ".join(f"count(*) FILTER ({test})" for test in tests.values())
        fits = self.one(f"SELECT {counts} FROM (SELECT unnest($1) AS t)", [sample])
        if max(fits) * 2 <= len(sample):
            best = tests[max(zip(fits, tests, strict=True), key=lambda pair: pair[0])[1]]
            (wrong,) = self.one(f"SELECT t FROM (SELECT unnest($1) AS t) WHERE NOT ({best}) LIMIT 1", [sample])
            advice = "name another column, or pass its format, e.g. time_format='%d/%m/%Y %H:%M'"
            found = f"column {column!r} should hold the time as a number or a date and holds {wrong!r}"
            raise BachError(f"{label}: {found}; {advice}")
        kind, written = max(zip(fits, tests, strict=True), key=lambda pair: pair[0])[1]
        likely = [form for (_, form), n in zip(tests, fits, strict=True) if form and n * 2 > len(sample)]
        if written is None or len(likely) == 1 or self.date_format in likely:
            return kind, self.date_format if written and self.date_format in likely else written
        counts = ", ".join(f"count(*) FILTER ({tests['TIMESTAMP', form]})" for form in likely)
        total = np.sum([self.one(f"SELECT {counts} FROM ({query})") for query in texts], axis=0)
        if (total == total.max()).sum() > 1:
            both = " and ".join(form for form, n in zip(likely, total, strict=True) if n == total.max())
            found = f"all {total.max():,} dates of column {column!r}, like {sample[0]!r}, fit {both}"
            raise BachError(f"{label}: {found}; say which it is, e.g. time_format={written!r} (--time-format)")
        self.date_format = likely[total.argmax()]
        return kind, self.date_format


def integer_time(expression: str, kind: str) -> str:
    """SQL that turns a time of any type into an integer with the same order: millionths of its unit."""
    if kind.startswith(("TIMESTAMP", "DATE")):
        return f"epoch_us({expression})::HUGEINT"
    return f"(TRY_CAST({expression} AS {NUMBER}) * 1000000)::HUGEINT"
