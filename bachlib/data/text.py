"""Delimited text: the authors' formats, checked against their first line, and any CSV of your own."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import duckdb

from bachlib import BachError
from bachlib.data.rows import (
    SHOWN,
    BadRows,
    append,
    integer_time,
    named_columns,
    quote,
    quote_path,
    shortened,
    time_type,
)
from bachlib.data.sources import Source
from bachlib.params import PrepareParams

REJECTS_LIMIT = 100_000  # bad rows remembered per file when the run stops on them anyway


@dataclass
class Layout:
    """How a text log is written: its fields in file order, as name → type; names we do not use start with `_`."""

    fields: dict[str, str]
    delimiter: str
    header: bool
    quote: str = ""  # the authors quote nothing
    time_format: str | None = None

    def rows(self, path: Path) -> Iterator[tuple[int, list[str]]]:
        """(line number, fields) in plain Python: slow and exact, for messages and samples only."""
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            if not self.quote:
                rows = ((n, line.rstrip("\r\n").split(self.delimiter)) for n, line in enumerate(stream, 1))
            else:
                csv.field_size_limit(2**31 - 1)
                reader = csv.reader(stream, delimiter=self.delimiter)
                rows = ((reader.line_num, row) for row in reader)
            yield from itertools.islice(rows, int(self.header), None)


def read_text(
    con: duckdb.DuckDBPyConnection, source: Source, path: Path, label: str, params: PrepareParams, bad: BadRows
) -> None:
    """Append one delimited file to the table `log`. What does not parse goes to `bad` with its line number."""
    layout = _known_layout(source, path, label) if source.columns else _own_layout(con, path, label, params)
    used = [name for name in layout.fields if not name.startswith("_")]
    where = _not_cut_off(path, layout, label, bad) if source.columns else "true"
    if "behavior" in used:  # any behaviour counts as liked, but it has to be one of the four
        used.remove("behavior")
        where += " AND behavior IS NOT NULL"
    time = "time" if source.columns else integer_time("time", layout.fields["time"])
    chosen = ", ".join(f"{time} AS time" if name == "time" else name for name in used)
    con.execute("DROP TABLE IF EXISTS reject_errors; DROP TABLE IF EXISTS reject_scans")
    append(con, f"SELECT {chosen} FROM {_relation(path, layout, params)} WHERE {where}", used, label)
    _collect_rejects(con, path, label, bad)
    _drop_empty(con, layout, path, label, bad)


def _collect_rejects(con: duckdb.DuckDBPyConnection, path: Path, label: str, bad: BadRows) -> None:
    """What DuckDB could not parse. Its line numbers count rows, so a line is found from its place in the file."""
    (count,) = con.execute("SELECT count(DISTINCT line_byte_position) FROM reject_errors").fetchall()[0]
    if not count:
        return
    first = con.execute(f"""
        SELECT line_byte_position, arg_min(column_name, column_idx), arg_min(error_type, column_idx),
               arg_min(error_message, column_idx), any_value(csv_line)
        FROM reject_errors GROUP BY line_byte_position
        ORDER BY bool_or(error_type = 'UNQUOTED VALUE') DESC, line_byte_position LIMIT {SHOWN}
    """).fetchall()
    lines = _lines_at(path, [position for position, *_ in first])
    messages = [_explain(f"{label}, line {line}", *row[1:]) for line, row in zip(lines, first, strict=True)]
    if first[0][2] == "UNQUOTED VALUE":  # everything up to the next quote, perhaps thousands of rows, is in this one
        raise BachError(f"{shortened(messages[0])}\nRows after a stray quote cannot be told apart: mend that line")
    bad.add(count, messages)


def _lines_at(path: Path, positions: list[int]) -> list[int]:
    """The line numbers of byte positions (counted from 1)."""
    lines = []
    with path.open("rb") as stream:
        for position in positions:
            stream.seek(0)
            left, line = position - 1, 1
            while left > 0 and (chunk := stream.read(min(left, 1 << 22))):
                line, left = line + chunk.count(b"\n"), left - len(chunk)
            lines.append(line)
    return lines


def _relation(path: Path, layout: Layout, params: PrepareParams) -> str:
    types = ", ".join(f"{quote(name)}: {quote(kind)}" for name, kind in layout.fields.items())
    options = {
        "auto_detect": "false",
        "header": str(layout.header).lower(),
        "delim": quote(layout.delimiter),
        "quote": quote(layout.quote),
        "escape": quote(layout.quote),
        "nullstr": "'\x01'",  # a text no field has: an empty number then fails its cast and is rejected with its line
        "store_rejects": "true",
        "hive_partitioning": "false",
        "columns": f"{{{types}}}",
    }
    if layout.time_format:
        options["timestampformat"] = quote(layout.time_format)
    if params.on_bad_rows == "stop":
        options["rejects_limit"] = str(REJECTS_LIMIT)
    return f"read_csv({quote_path(path)}, {', '.join(f'{name} = {value}' for name, value in options.items())})"


def _known_layout(source: Source, path: Path, label: str) -> Layout:
    """The authors' format, after a look at the first line: is this file what it is said to be?"""
    first = _first_line(path, label)
    fields = first.split(source.delimiter)
    wanted = source.delimiter.join(source.header or source.columns)
    if source.header and [field.strip('"') for field in fields] != list(source.header):
        raise BachError(f"{label} is not a {source.name} log: its first line should be {wanted!r} and is {first!r}")
    if len(fields) != len(source.columns):
        raise BachError(f"{label} is not a {source.name} log: a line should look like {wanted!r} and is {first!r}")
    return Layout(source.columns, source.delimiter, header=source.header is not None)


def _own_layout(con: duckdb.DuckDBPyConnection, path: Path, label: str, params: PrepareParams) -> Layout:
    """A log of the user's own: the delimiter is the one under which the named columns are found in the first line."""
    first = _first_line(path, label)
    wanted = set((params.columns or {}).values()) | {"user", "item", "time"}
    readings = {delimiter: next(csv.reader([first], delimiter=delimiter)) for delimiter in ",;\t|"}
    delimiter = max(readings, key=lambda d: (len(wanted & set(readings[d])), len(readings[d])))
    found = readings[delimiter]
    named = named_columns(params, found, label)
    role = {column: name for name, column in named.items()}
    names = [role.pop(column, f"_{n}") for n, column in enumerate(found)]  # of a repeated column the first counts
    layout = Layout(dict.fromkeys(names, "VARCHAR"), delimiter, header=True, quote='"')
    at = names.index("time")
    sample = [row[at] for _, row in itertools.islice(layout.rows(path), 10_000) if len(row) == len(names)]
    layout.fields["time"], layout.time_format = time_type(con, sample, label, named["time"], params.time_format)
    if "rating" in layout.fields:
        layout.fields["rating"] = "DOUBLE"
    return layout


def _first_line(path: Path, label: str) -> str:
    with path.open("rb") as stream:
        first = stream.readline(65_536)
    try:
        text = first.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        raise BachError(_not_utf8(f"{label}, line 1")) from None
    if not first.strip():
        raise BachError(f"{label} is empty" + (" or begins with an empty line" if first else ""))
    if "\r" in text:
        raise BachError(f"{label} ends its lines with a carriage return only (old Mac); convert it to line feeds")
    if "\0" in text:
        raise BachError(f"{label} is not a text file")
    return text


def _not_cut_off(path: Path, layout: Layout, label: str, bad: BadRows) -> str:
    """The SQL condition that keeps out a last line that was cut off inside its last field, the time.

    The authors end every line: a last line without a line end and with a shorter time than the line before has lost
    digits, and what is left would read as another number.
    """
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 4096))
        tail = stream.read().decode("utf-8", errors="replace")
    *_, before, last = ["", *tail.split("\n")]
    values = dict(zip(layout.fields, last.split(layout.delimiter), strict=False))
    if len(values) != len(layout.fields) or len(values["time"]) >= len(before.strip().split(layout.delimiter)[-1]):
        return "true"  # complete, or short of fields: then the reader rejects it itself
    if not all(values[name].isdigit() for name in ("user", "item", "time")):
        return "true"
    with path.open("rb") as stream:
        line = sum(chunk.count(b"\n") for chunk in iter(lambda: stream.read(1 << 22), b"")) + 1
    bad.add(1, [f"{label}, line {line}: the last line is cut off: {last!r}"])
    return "NOT (" + " AND ".join(f"{name} = {values[name]}" for name in ("user", "item", "time")) + ")"


def _drop_empty(con: duckdb.DuckDBPyConnection, layout: Layout, path: Path, label: str, bad: BadRows) -> None:
    """Ids that are empty texts, numbers that are not finite: the reader lets them pass, we do not."""
    tests = {name: f"{name} = ''" for name in ("user", "item") if layout.fields[name] == "VARCHAR"}
    tests |= {"rating": "NOT isfinite(rating)"} if "rating" in layout.fields else {}
    wrong = " OR ".join(tests.values()) or "false"
    (count,) = con.execute(f"SELECT count(*) FROM log WHERE {wrong}").fetchall()[0]
    if not count:
        return
    names = list(layout.fields)
    shown = (
        f"{label}, line {line}: {name} is {row[names.index(name)] or 'missing'}: {layout.delimiter.join(row)!r}"
        for line, row in layout.rows(path)
        for name in tests
        if len(row) == len(names) and _is_empty(row[names.index(name)], number=name == "rating")
    )
    bad.add(count, list(itertools.islice(shown, SHOWN)))
    con.execute(f"DELETE FROM log WHERE {wrong}")


def _is_empty(text: str, number: bool) -> bool:
    return text == "" or (number and text.strip(" -+").lower() in ("nan", "inf", "infinity"))


def _explain(where: str, column: str | None, kind: str, message: str, text: str) -> str:
    """One rejected row, for a person."""
    if kind == "CAST":
        kinds = {"time": "a time", "rating": "a number", "behavior": "one of pv, buy, cart, fav"}
        wrong = "missing" if 'convert string ""' in message else f"not {kinds.get(column, 'a whole number')}"
        return f"{where}: {column} is {wrong}: {text!r}"
    if kind == "INVALID ENCODING":
        return _not_utf8(where)
    return f"{where}: {kind.lower()} ({message.rstrip('.')}): {text!r}"


def _not_utf8(where: str) -> str:
    return f"{where}: the file is not UTF-8; say what it is with encoding=, e.g. encoding='latin-1'"
