"""Readers of raw logs: they append a file of any supported format to the DuckDB table `log`.

Here is delimited text: the authors' formats, checked against their first line, and any CSV. Netflix's log and Parquet
files have modules of their own.
"""

import csv
import itertools
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb

from bachlib import BachError
from bachlib.data.log_table import SHOWN, LogTable, integer_time, quote, quote_name, quote_path, shortened
from bachlib.data.netflix import read_netflix
from bachlib.data.parquet import journey, parquet, read_parquet
from bachlib.data.raw import RawFile, as_plain
from bachlib.data.sources import Source
from bachlib.params import PrepareParams

REJECTS_LIMIT = 100_000  # bad rows DuckDB remembers per file if they stop the run
SWALLOWS = ("UNQUOTED VALUE", "LINE SIZE OVER MAXIMUM")  # a bad row that goes on to the next quote, many rows later
BLOCK = 1 << 24


def read_log(log: LogTable, source: Source, raws: list[RawFile], work: Path) -> None:
    """Read the raw files into the table `log`; unpacked files go to the folder `work`."""
    for raw in raws:
        with _named(raw.label):
            _read(log, source, raw, raws, work)
    if log.one("SELECT count(*) FROM log") == (0,) and not log.bad.count:
        raise BachError(f"{', '.join(raw.label for raw in raws)}: the log is empty, it has no interaction")


@contextmanager
def _named(label: str) -> Iterator[None]:
    """Let errors of DuckDB about the content of a file name it; those of memory, disk and times stay what they are."""
    try:
        yield
    except duckdb.Error as error:
        ends = isinstance(error, duckdb.OutOfMemoryException | duckdb.OutOfRangeException | duckdb.InterruptException)
        if ends or re.search("space|too large", str(error), re.IGNORECASE):
            raise
        raise BachError(f"reading {label} failed: {shortened(str(error).splitlines()[0])}") from None


def _read(log: LogTable, source: Source, raw: RawFile, raws: list[RawFile], work: Path) -> None:
    times = _times(log, source, raws, work)
    if source.log.endswith(".parquet"):
        whole = journey(log, raw, work) if source.name == "complete-journey" else as_plain(raw, work)
        read_parquet(log, whole, raw.label, times, source.named)
        return
    plain = as_plain(raw, work, log.params.encoding)
    if source.name == "netflix":
        read_netflix(log, plain, raw.label)
    else:
        read_text(log, source, plain, raw.label, times)
    if plain != raw.path:
        plain.unlink()


def _times(log: LogTable, source: Source, raws: list[RawFile], work: Path) -> Iterator[str]:
    """For each file, a query of its times as text: see `LogTable.time_type`."""
    for raw in raws:
        if source.log.endswith(".parquet"):
            relation, kinds = parquet(log, as_plain(raw, work), raw.label)
            column = log.named_columns(list(kinds), raw.label, source.named)["time"]
            yield f"SELECT {quote_name(column)}::VARCHAR AS t FROM {relation}"
        else:
            plain = as_plain(raw, work, log.params.encoding)
            yield f"SELECT time AS t FROM {_relation(plain, _own_columns(log, plain, raw.label)[0], log.params)}"


@dataclass
class Layout:
    """The format of a text log: its fields as name → SQL type, in file order; unused fields start with `_`."""

    fields: dict[str, str]
    delimiter: str
    header: bool
    quote: str = ""  # the authors' formats do not use quotes
    time_format: str | None = None

    @property
    def whole_ids(self) -> list[str]:
        """Ids that are whole numbers. DuckDB would take 0.5 for 1, so they are read as DOUBLE and then compared."""
        return [name for name in ("user", "item") if self.fields[name] == "INTEGER"]

    def rows(self, path: Path) -> Iterator[tuple[int, list[str]]]:
        """(number of its first line, fields) of every row, in plain Python: slow, for messages and samples only."""
        with path.open(encoding="utf-8", errors="replace", newline="") as stream:
            if not self.quote:
                rows = ((n, line.rstrip("\r\n").split(self.delimiter)) for n, line in enumerate(stream, 1))
            else:
                csv.field_size_limit(2**31 - 1)
                rows = _numbered(csv.reader(stream, delimiter=self.delimiter))
            yield from itertools.islice(rows, int(self.header), None)


def _numbered(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """A row with quoted line ends has several lines; `line_num` is the last of them."""
    first = 1
    for row in reader:
        yield first, row
        first = reader.line_num + 1


def read_text(log: LogTable, source: Source, path: Path, label: str, times: Iterator[str]) -> None:
    """Append one delimited file to the table `log`. Unreadable rows go to `log.bad` with their line numbers."""
    _no_endless_line(path, label)
    layout = _known_layout(source, path, label) if source.columns else _own_layout(log, path, label, times)
    used = [name for name in layout.fields if not name.startswith("_")]
    where = _not_cut_off(log, path, layout, label) if source.columns else "true"
    if "behavior" in used:  # any behaviour counts as liked, but it has to be one of the four
        used.remove("behavior")
        where += " AND behavior IS NOT NULL"
    sql = {name: name for name in used} | ({"rating": source.rating} if source.rating else {})
    for name in layout.whole_ids:
        sql[name] = f"CASE WHEN {name} = trunc({name}) THEN TRY_CAST({name} AS INTEGER) END"
    if (kind := layout.fields["time"]) != "BIGINT":
        sql["time"] = integer_time("time", kind)
    chosen = ", ".join(f"{expression} AS {name}" for name, expression in sql.items())
    log.con.execute("DROP TABLE IF EXISTS reject_errors; DROP TABLE IF EXISTS reject_scans")
    log.append(f"SELECT {chosen} FROM {_relation(path, layout, log.params)} WHERE {where}", list(sql), label)
    _collect_rejects(log, path, label)
    _drop_wrong(log, path, layout, label)


def _collect_rejects(log: LogTable, path: Path, label: str) -> None:
    """The rows DuckDB could not parse. It counts rows, not lines, so line numbers come from byte positions."""
    (count,) = log.one("SELECT count(DISTINCT line_byte_position) FROM reject_errors")
    if not count:
        return
    first = log.con.execute(f"""
        SELECT line_byte_position, column_name, error_type, error_message, csv_line,
               error_type IN {SWALLOWS} AS swallows
        FROM reject_errors
        QUALIFY row_number() OVER (PARTITION BY line_byte_position ORDER BY swallows DESC, column_idx) = 1
        ORDER BY swallows DESC, line_byte_position LIMIT {SHOWN}
    """).fetchall()
    messages = [_explain(f"{label}, line {_line_at(path, position)}", *row[:4]) for position, *row in first]
    if first[0][-1]:
        raise BachError(f"{shortened(messages[0])}\nAn unclosed quote takes the rows after it along: correct that line")
    log.bad.add(count, messages)


def _no_endless_line(path: Path, label: str) -> None:
    """DuckDB leaves out a line of more than 32 MB without a word. It has a whole block without a line end."""
    with path.open("rb") as stream:
        for start in range(0, path.stat().st_size - BLOCK, BLOCK):
            stream.seek(start)
            if not any(b"\n" in stream.read(1 << 16) for _ in range(BLOCK >> 16)):
                where = f"{label}, line {_line_at(path, start + 1)}"
                raise BachError(f"{where} is longer than {BLOCK:,} bytes; a row should have a user, an item and a time")


def _line_at(path: Path, position: int) -> int:
    """The number of the line that begins at a byte position (both counted from 1).

    In a file with CRLF line ends DuckDB's position of a row is the line feed before it; no row begins with a line end.
    """
    left, line = position - 1, 1
    with path.open("rb") as stream:
        while left > 0 and (chunk := stream.read(min(left, 1 << 22))):
            line, left = line + chunk.count(b"\n"), left - len(chunk)
        while (byte := stream.read(1)) in (b"\r", b"\n"):
            line += byte == b"\n"
    return line


def _relation(path: Path, layout: Layout, params: PrepareParams) -> str:
    read_as = layout.fields | dict.fromkeys(layout.whole_ids, "DOUBLE")
    types = ", ".join(f"{quote(name)}: {quote(kind)}" for name, kind in read_as.items())
    options = {
        "auto_detect": "false",
        "header": str(layout.header).lower(),
        "delim": quote(layout.delimiter),
        "quote": quote(layout.quote),
        "escape": quote(layout.quote),
        "nullstr": "'\x01'",  # never occurs, so an empty number is rejected with its line instead of read as NULL
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
    """The authors' format, after a check that the first line has it."""
    first = _first_line(path, label)
    fields = [field.strip('"') for field in first.split(source.delimiter)]
    if source.named:
        needed = [column for role, column in source.named.items() if role != "rating"]
        if any(fields.count(column) != 1 for column in needed) or fields.count(source.named.get("rating", "")) > 1:
            found = f"should name {', '.join(needed)} once each, and is {first!r}"
            raise BachError(f"{label} is not a {source.name} log: its first line {shortened(found)}")
        role = {column: name for name, column in source.named.items()}
        names = [role.get(field, f"_{n}") for n, field in enumerate(fields)]
        columns = {name: source.columns.get(name, "VARCHAR") for name in names}
        return Layout(columns, source.delimiter, header=True)
    if len(fields) != len(source.columns) or fields != list(source.header or fields):
        found = f"should be like {source.delimiter.join(source.header or source.columns)!r} and is {first!r}"
        raise BachError(f"{label} is not a {source.name} log: its first line {found}")
    return Layout(source.columns, source.delimiter, header=source.header is not None)


def _own_layout(log: LogTable, path: Path, label: str, times: Iterator[str]) -> Layout:
    """The format of the user's CSV, with the types of its time and rating."""
    layout, named = _own_columns(log, path, label)
    names = list(layout.fields)
    at = names.index("time")
    sample = [row[at] for _, row in itertools.islice(layout.rows(path), 10_000) if len(row) == len(names)]
    layout.fields["time"], layout.time_format = log.time_type(sample, label, named["time"], times)
    if "rating" in layout.fields:
        layout.fields["rating"] = "DOUBLE"
    return layout


def _own_columns(log: LogTable, path: Path, label: str) -> tuple[Layout, dict[str, str]]:
    """The columns of the user's CSV: the delimiter is the one that finds the named columns in the first line."""
    first = _first_line(path, label)
    wanted = set((log.params.columns or {}).values()) | {"user", "item", "time"}
    readings = {delimiter: next(csv.reader([first], delimiter=delimiter)) for delimiter in ",;\t|"}
    delimiter = max(readings, key=lambda d: (len(wanted & set(readings[d])), len(readings[d])))
    named = log.named_columns(found := readings[delimiter], label)
    if twice := [column for column in named.values() if found.count(column) > 1]:
        raise BachError(f"{label} has {found.count(twice[0])} columns named {twice[0]!r}; rename all but the right one")
    role = {column: name for name, column in named.items()}
    names = [role.get(column, f"_{n}") for n, column in enumerate(found)]
    return Layout(dict.fromkeys(names, "VARCHAR"), delimiter, header=True, quote='"'), named


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
        raise BachError(f"{label} has old Mac line ends (carriage returns); convert them to line feeds")
    if "\0" in text:
        raise BachError(f"{label} is not a text file")
    return text


def _not_cut_off(log: LogTable, path: Path, layout: Layout, label: str) -> str:
    """An SQL condition that leaves out a last line that was cut off inside its last field, if that is the time.

    The authors end every line with a line feed. A last line without one and with a shorter time than the line before
    has lost digits, and the rest would be read as another time.
    """
    with path.open("rb") as stream:
        stream.seek(max(0, path.stat().st_size - 4096))
        tail = stream.read().decode("utf-8", errors="replace")
    *_, before, last = ["", *tail.split("\n")]
    values = dict(zip(layout.fields, last.split(layout.delimiter), strict=False))
    if len(values) != len(layout.fields) or list(layout.fields)[-1] != "time":
        return "true"  # too few fields, which the reader rejects itself, or cut off where nothing is read
    if len(values["time"]) >= len(before.strip().split(layout.delimiter)[-1]):
        return "true"  # complete
    if not all(values[name].isdigit() or layout.fields[name] == "VARCHAR" for name in ("user", "item", "time")):
        return "true"
    log.bad.add(1, [f"{label}, line {_line_at(path, path.stat().st_size)}: the last line is cut off: {last!r}"])
    same = (f"{name} = {quote(values[name])}" for name in ("user", "item", "time"))
    return f"NOT ({' AND '.join(same)})"


def _drop_wrong(log: LogTable, path: Path, layout: Layout, label: str) -> None:
    """Delete rows with ids or ratings that DuckDB accepts and we do not, and add them to `log.bad`."""
    tests = {name: f"{name} = ''" for name in ("user", "item") if layout.fields[name] == "VARCHAR"}
    tests |= {name: f"{name} IS NULL" for name in layout.whole_ids}
    tests |= {"rating": "NOT isfinite(rating)"} if "rating" in layout.fields else {}
    wrong = " OR ".join(tests.values()) or "false"
    (count,) = log.one(f"SELECT count(*) FROM log WHERE {wrong}")
    if not count:
        return
    names = list(layout.fields)
    shown = (
        f"{label}, line {line}: {name} is {row[names.index(name)] or 'missing'}: {layout.delimiter.join(row)!r}"
        for line, row in layout.rows(path)
        for name in tests
        if len(row) == len(names) and _is_wrong(row[names.index(name)], layout.fields[name])
    )
    log.bad.add(count, list(itertools.islice(shown, SHOWN)))
    log.con.execute(f"DELETE FROM log WHERE {wrong}")


def _is_wrong(text: str, kind: str) -> bool:
    """Is it no text, no whole number of 32 bits, or no finite number?"""
    with suppress(ValueError):
        if kind == "INTEGER":
            return float(text) % 1 != 0 or abs(float(text)) >= 2**31
        return text == "" or (kind != "VARCHAR" and not math.isfinite(float(text)))  # 1e999, too
    return False


def _explain(where: str, column: str | None, kind: str, message: str, text: str) -> str:
    """A message about one rejected row."""
    text = text.lstrip("\r\n")  # see `_line_at`
    if kind == "CAST":
        kinds = {"time": "a time", "rating": "a number", "behavior": "one of pv, buy, cart, fav"}
        wrong = "missing" if 'convert string ""' in message else f"not {kinds.get(column, 'a whole number')}"
        return f"{where}: {column.lstrip('_')} is {wrong}: {text!r}"
    if kind == "INVALID ENCODING":
        return _not_utf8(where)
    return f"{where}: {kind.lower()} ({message.rstrip('.')}): {text!r}"


def _not_utf8(where: str) -> str:
    return f"{where}: the file is not UTF-8; pass its encoding, e.g. encoding='latin-1'"
