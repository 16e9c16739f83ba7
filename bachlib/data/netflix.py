"""The Netflix Prize log: a line `movie:`, then `user,rating,date` lines for that movie, in one file or several."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from bachlib import BachError
from bachlib.data.log_table import BadRows

CHUNK = 1 << 25  # bytes parsed at a time
FIELDS = {"user": pa.int32(), "rating": pa.int8(), "time": pa.date32()}
SCHEMA = pa.schema({"user": pa.int32(), "item": pa.int32(), "rating": pa.int8(), "time": pa.int64()})
DAY = 86_400
LARGEST = 2**31 - 1  # of an id


def read_netflix(con: duckdb.DuckDBPyConnection, path: Path, label: str, bad: BadRows) -> None:
    """Append one `combined_data` file to the table `log`, in bounded memory."""
    with path.open("rb") as stream:
        first = stream.readline(200).strip()
    if not first:
        raise BachError(f"{label} is empty")
    if _movie(first.decode("utf-8", errors="replace")) is None:
        raise BachError(f"{label} is not a netflix log: its first line should be a movie like '1:' and is {first!r}")
    con.execute("CREATE TABLE IF NOT EXISTS log (user INTEGER, item INTEGER, rating FLOAT, time BIGINT)")
    batches = pa.RecordBatchReader.from_batches(SCHEMA, _batches(path, label, bad))
    con.register("netflix_batches", batches)
    con.execute("INSERT INTO log SELECT * FROM netflix_batches")
    con.unregister("netflix_batches")
    if bad.fatal:
        raise BachError(bad.fatal)


def _batches(path: Path, label: str, bad: BadRows) -> Iterator[pa.RecordBatch]:
    movie, line, rest = None, 0, b""
    with path.open("rb") as stream:
        while chunk := stream.read(CHUNK):
            cut = chunk.rfind(b"\n") + 1
            text, rest = rest + chunk[:cut], chunk[cut:] if cut else rest + chunk
            if cut:
                batch, movie, line = _parse(text, movie, line, label, bad)
                yield batch
        if rest.strip():
            batch, movie, line = _parse(rest, movie, line, label, bad)
            yield batch


def _parse(
    text: bytes, movie: int | None, line: int, label: str, bad: BadRows
) -> tuple[pa.RecordBatch, int | None, int]:
    """Parse one chunk of whole lines. The CSV parser reports movie lines as invalid, since they have one field."""
    odd: list[tuple[int, str]] = []

    def on_odd_row(row: pacsv.InvalidRow) -> str:
        odd.append((row.number, row.text))
        return "skip"

    try:
        table = pacsv.read_csv(
            pa.BufferReader(text),
            read_options=pacsv.ReadOptions(column_names=list(FIELDS), use_threads=False, block_size=len(text) + 1),
            parse_options=pacsv.ParseOptions(
                invalid_row_handler=on_odd_row, ignore_empty_lines=False, quote_char=False
            ),
            convert_options=pacsv.ConvertOptions(column_types=FIELDS, null_values=[]),
        )
    except pa.ArrowInvalid:
        return _parse_slowly(text, movie, line, label, bad)
    n_lines = table.num_rows + len(odd)
    movies = [(number, found) for number, row in odd if (found := _movie(row)) is not None]
    for number, row in odd:
        if _movie(row) is None and row.strip():
            _add_wrong(bad, row, f"{label}, line {line + number}")
    lines = np.delete(np.arange(1, n_lines + 1), [number - 1 for number, _ in odd])  # of each row in the chunk
    known = np.array([movie if movie is not None else -1] + [found for _, found in movies], dtype=np.int32)
    item = known[np.searchsorted([number for number, _ in movies], lines)]
    days = table["time"].cast(pa.int32()).to_numpy().astype(np.int64)
    columns = [table["user"].combine_chunks(), pa.array(item), table["rating"].combine_chunks(), pa.array(days * DAY)]
    return pa.record_batch(columns, schema=SCHEMA), int(known[-1]), line + n_lines


def _parse_slowly(text: bytes, movie: int | None, line: int, label: str, bad: BadRows):
    """Parse a chunk line by line, to find the lines whose fields do not convert."""
    rows = []
    for row in text.decode("utf-8", errors="replace").removesuffix("\n").split("\n"):
        line += 1
        if (found := _movie(row)) is not None:
            movie = found
            continue
        if not row.strip():
            continue
        try:
            user, rating, date = row.split(",")
            day = datetime.date.fromisoformat(date.strip()).toordinal() - datetime.date(1970, 1, 1).toordinal()
            if not (0 <= int(user) <= LARGEST and 0 <= int(rating) <= 127):
                raise ValueError("out of range")
            rows.append((int(user), movie, int(rating), day * DAY))
        except ValueError:
            _add_wrong(bad, row, f"{label}, line {line}")
    columns = list(zip(*rows, strict=True)) or [[], [], [], []]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, SCHEMA, strict=True)]
    return pa.record_batch(arrays, schema=SCHEMA), movie, line


def _movie(row: str) -> int | None:
    name = row.strip().removesuffix(":")
    return int(name) if row.strip().endswith(":") and name.isdigit() and int(name) <= LARGEST else None


def _add_wrong(bad: BadRows, row: str, where: str) -> None:
    bad.add(1, [f"{where}: neither 'movie:' nor 'user,rating,date': {row!r}"])
    if "," not in row:  # perhaps a movie: the ratings after it would be counted for the movie before
        bad.fatal = bad.fatal or f"{where}: should be a movie like '7:', to which the next ratings belong; is {row!r}"
