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

DATES = ["%m/%d/%Y", "%d/%m/%Y", "%d.%m.%Y", "%Y/%m/%d"]
DATE_FORMATS = [date + clock for date in DATES for clock in ("", " %H:%M", " %H:%M:%S")]


@dataclass
class BadRows:
    """The rows that could not be read: how many, and what the first few were."""

    count: int = 0
    first: list[str] = field(default_factory=list)

    def add(self, count: int, messages: list[str]) -> None:
        self.count += count
        self.first = (self.first + messages)[:SHOWN]

    def __str__(self) -> str:
        more = f"\n  … {self.count:,} rows in all" if self.count > len(self.first) else ""
        return "\n".join(f"  {message}" for message in self.first) + more


def quote(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def quote_path(path: Path) -> str:
    """A file name as an SQL literal; DuckDB takes `*`, `?` and `[` in it for a pattern."""
    return quote(re.sub(r"[*?\[]", r"[\g<0>]", str(path)))


def append(con: duckdb.DuckDBPyConnection, select: str) -> None:
    """Append the rows of `select` to `log`, making the table with the first file."""
    (exists,) = con.execute("SELECT count(*) FROM duckdb_tables() WHERE table_name = 'log'").fetchall()[0]
    con.execute(f"INSERT INTO log {select}" if exists else f"CREATE TABLE log AS {select}")


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
            'Say which is which with columns={"user": …, "item": …, "time": …}'
        )
    return named


def time_type(
    con: duckdb.DuckDBPyConnection, sample: list[str], label: str, column: str, time_format: str | None
) -> tuple[str, str | None]:
    """(type, format) that reads most of the sample: whole numbers, numbers, ISO dates, or a common written date."""
    if time_format:
        return "TIMESTAMP", time_format
    sample = [text for text in sample if text.strip()]
    if not sample:
        return "BIGINT", None
    number = "TRY_CAST(t AS DOUBLE)"
    tests = {
        ("BIGINT", None): f"{number} = floor({number})",
        ("DOUBLE", None): f"{number} IS NOT NULL",
        ("TIMESTAMPTZ", None): "TRY_CAST(t AS TIMESTAMPTZ) IS NOT NULL",
    }
    tests |= {("TIMESTAMP", f): f"try_strptime(t, {quote(f)}) IS NOT NULL" for f in DATE_FORMATS}
    counts = ", ".join(f"count(*) FILTER ({test})" for test in tests.values())
    fits = con.execute(f"SELECT {counts} FROM (SELECT unnest($1) AS t)", [sample]).fetchall()[0]
    if max(fits) * 2 <= len(sample):
        raise BachError(
            f"{label}: column {column!r} should hold the time as a number or a date and holds {sample[0]!r}; "
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
    """SQL that turns a time of any type into an integer that sorts the same way."""
    if kind.startswith(("TIMESTAMP", "DATE")):
        return f"epoch_us({expression}) AS time"
    if kind in ("DOUBLE", "FLOAT") or kind.startswith("DECIMAL"):
        return f"TRY_CAST({expression} * 1e6 AS BIGINT) AS time"
    return f"TRY_CAST({expression} AS BIGINT) AS time"
