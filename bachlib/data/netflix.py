"""The Netflix Prize log: a line `movie:`, then `user,rating,date` lines for that movie, in one file or several."""

import datetime
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv

from bachlib import BachError
from bachlib.data.log_table import BadRows, LogTable

CHUNK = 1 << 25  # bytes parsed at a time
FIELDS = {"user": pa.int32(), "rating": pa.int8(), "time": pa.date32()}
SCHEMA = pa.schema({"user": pa.int32(), "item": pa.int32(), "rating": pa.int8(), "time": pa.int64()})
DAY = 86_400
LARGEST = 2**31 - 1  # of an id


def read_netflix(log: LogTable, path: Path, label: str) -> None:
    """Append one `combined_data` file to the table `log`, in bounded memory."""
    with path.open("rb") as stream:
        first = stream.readline(200).strip()
    if not first:
        raise BachError(f"{label} is empty")
    if _movie(first.decode("utf-8", errors="replace")) is None:
        raise BachError(f"{label} is not a netflix log: its first line should be a movie like '1:' and is {first!r}")
    log.con.execute("CREATE TABLE IF NOT EXISTS log (user INTEGER, item INTEGER, rating FLOAT, time BIGINT)")
    parser = _Parser(label, log.bad)
    log.con.register("parsed", pa.RecordBatchReader.from_batches(SCHEMA, parser.chunks(path)))
    log.con.execute("INSERT INTO log SELECT * FROM parsed")
    log.con.unregister("parsed")
    if parser.fatal:
        raise BachError(parser.fatal)


class _Parser:
    """Parses a file chunk by chunk; `movie` and `line` belong to the last line it has read."""

    def __init__(self, label: str, bad: BadRows):
        self.label, self.bad = label, bad
        self.movie, self.line = -1, 0
        self.fatal: str | None = None  # the first bad line that makes the lines after it unreadable

    def chunks(self, path: Path) -> Iterator[pa.RecordBatch]:
        rest = b""
        with path.open("rb") as stream:
            while chunk := stream.read(CHUNK):
                cut = chunk.rfind(b"\n") + 1
                text, rest = rest + chunk[:cut], chunk[cut:] if cut else rest + chunk
                if cut:
                    yield self.parse(text)
        if rest.strip():
            yield self.parse(rest)

    def parse(self, text: bytes) -> pa.RecordBatch:
        """Parse whole lines. The CSV parser reports movie lines as invalid, since they have one field."""
        if not text.isascii():  # pyarrow would print a traceback of the row
            return self.parse_slowly(text)
        odd: list[tuple[int, str]] = []

        def on_odd_row(row: pacsv.InvalidRow) -> str:
            odd.append((row.number, row.text))
            return "skip"

        try:
            table = pacsv.read_csv(
                pa.BufferReader(text),
                pacsv.ReadOptions(column_names=list(FIELDS), use_threads=False, block_size=len(text) + 1),
                pacsv.ParseOptions(invalid_row_handler=on_odd_row, ignore_empty_lines=False, quote_char=False),
                pacsv.ConvertOptions(column_types=FIELDS, null_values=[]),
            )
        except pa.ArrowInvalid:
            return self.parse_slowly(text)
        n_lines = table.num_rows + len(odd)
        movies = [(number, found) for number, row in odd if (found := _movie(row)) is not None]
        for number, row in odd:
            if _movie(row) is None and row.strip():
                self.add_bad(row, self.line + number)
        lines = np.delete(np.arange(1, n_lines + 1), [number - 1 for number, _ in odd])  # of each row in the chunk
        known = np.array([self.movie] + [found for _, found in movies], dtype=np.int32)
        item = known[np.searchsorted([number for number, _ in movies], lines)]
        days = table["time"].cast(pa.int32()).to_numpy().astype(np.int64)
        user, rating = (table[name].combine_chunks() for name in ("user", "rating"))
        self.movie, self.line = int(known[-1]), self.line + n_lines
        return pa.record_batch([user, pa.array(item), rating, pa.array(days * DAY)], schema=SCHEMA)

    def parse_slowly(self, text: bytes) -> pa.RecordBatch:
        """Parse line by line, to find the lines whose fields do not convert."""
        rows = []
        for row in text.decode("utf-8", errors="replace").removesuffix("\n").split("\n"):
            self.line += 1
            if (found := _movie(row)) is not None:
                self.movie = found
            if found is not None or not row.strip():
                continue
            try:
                user, rating, date = row.split(",")
                day = datetime.date.fromisoformat(date.strip()).toordinal() - datetime.date(1970, 1, 1).toordinal()
                plain = row.isascii() and "_" not in row  # Python alone would take 1_000 for a number
                if not (plain and 0 <= int(user) <= LARGEST and 0 <= int(rating) <= 127):
                    raise ValueError("out of range")
                rows.append((int(user), self.movie, int(rating), day * DAY))
            except ValueError:
                self.add_bad(row, self.line)
        return pa.RecordBatch.from_pylist([dict(zip(SCHEMA.names, row, strict=True)) for row in rows], schema=SCHEMA)

    def add_bad(self, row: str, line: int) -> None:
        where = f"{self.label}, line {line}"
        self.bad.add(1, [f"{where}: neither 'movie:' nor 'user,rating,date': {row!r}"])
        if "," not in row and not self.fatal:  # perhaps a movie: the next ratings would go to the movie before
            self.fatal = f"{where}: should be a movie like '7:', to which the next ratings belong; is {row!r}"


def _movie(row: str) -> int | None:
    name = row.strip().removesuffix(":")
    return int(name) if row.strip().endswith(":") and name.isdigit() and int(name) <= LARGEST else None
