"""Readers of raw interaction logs: whatever the authors ship becomes one DuckDB table `log`.

`log` has the columns user, item, time (BIGINT, any unit: only its order counts) and, where the data set has them,
rating, title and genre. Its row order is the order of the raw log, so `rowid` breaks ties in time.

The formats have a module each: `text` (delimited, the authors' or your own), `netflix`, `parquet`.
"""

from __future__ import annotations

from pathlib import Path

import duckdb

from bachlib import BachError
from bachlib.data.files import RawFile, as_plain
from bachlib.data.netflix import read_netflix
from bachlib.data.parquet import read_parquet
from bachlib.data.rows import BadRows
from bachlib.data.sources import Source
from bachlib.data.text import read_text
from bachlib.params import PrepareParams


def read_log(
    con: duckdb.DuckDBPyConnection, source: Source, raws: list[RawFile], params: PrepareParams, work: Path
) -> BadRows:
    """Read the raw files into the table `log`; returns the rows that could not be read."""
    bad = BadRows()
    for raw in raws:
        if source.name == "parquet":
            read_parquet(con, as_plain(raw, work), raw.label, params, bad)
            continue
        plain = as_plain(raw, work, params.encoding)
        if source.name == "netflix":
            read_netflix(con, plain, raw.label, bad)
        else:
            read_text(con, source, plain, raw.label, params, bad)
        if plain != raw.path:
            plain.unlink()
    (rows,) = con.execute("SELECT count(*) FROM log").fetchall()[0]
    if not rows and not bad.count:
        raise BachError(f"{', '.join(raw.label for raw in raws)}: the log is empty, there is no interaction in it")
    return bad
