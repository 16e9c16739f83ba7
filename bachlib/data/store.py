"""Write the files of a prepared data set; `Dataset` opens them. The same content gives the same bytes."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from duckdb import DuckDBPyConnection as Connection

from bachlib import BachError
from bachlib.data.dataset import BEGINS, FILES
from bachlib.data.raw import RawFile
from bachlib.data.sources import TITLES, read_titles, split_genres
from bachlib.data.windows import windows_of_prefixes
from bachlib.files import reserve
from bachlib.params import PrepareParams

FEWEST = 10  # users that a period of a global split should be able to evaluate


def write_sequences(con: Connection, folder: Path, order: str) -> tuple[int, int]:
    """`sequences.npy`: the item ids of all users, user after user, streamed from the sorted query.

    Returns the number of events, and of those whose user has another one at the same time.
    """
    (n_events,) = con.execute("SELECT sum(n)::BIGINT FROM users").fetchall()[0]
    flat = np.lib.format.open_memmap(folder / FILES["sequences"], mode="w+", dtype=np.int32, shape=(n_events,))
    reserve(folder / FILES["sequences"])
    at = n_tied = 0
    last, tied = np.zeros(0, np.uint64), np.zeros(1, bool)  # the row before: its basket, does that have earlier rows
    query = f"""
        SELECT items.id, hash(users.id, first >> 40) AS basket
        FROM firsts JOIN users USING (user) JOIN items USING (item) ORDER BY users.id, {order}
    """
    for part in con.sql(query).to_arrow_reader(1_000_000):
        flat[at : at + part.num_rows] = part.column(0).to_numpy()
        at += part.num_rows
        basket = np.concatenate([last, part.column(1).to_numpy()])
        same = np.concatenate([tied, basket[1:] == basket[:-1]])
        n_tied += int(same[1:].sum() + (same[1:] & ~same[:-1]).sum())  # the second row of a basket counts for the first
        last, tied = basket[-1:], same[-1:]
    flat.flush()
    return n_events, n_tied


def write_users(con: Connection, folder: Path) -> np.ndarray:
    """`users.parquet` and `offsets.npy`; returns the lengths of the sequences."""
    users = con.sql("SELECT id AS user, user AS raw_id, n::INTEGER AS n_items FROM users ORDER BY id").to_arrow_table()
    pq.write_table(users, folder / FILES["users"])
    lengths = users["n_items"].to_numpy()
    np.save(folder / FILES["offsets"], np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64))
    return lengths


def write_begins(con: Connection, folder: Path, params: PrepareParams, lengths: np.ndarray) -> tuple[int, dict]:
    """`begins.npy`: how many items each user has before the validation date and before the test date.

    An item of the date itself comes after it, so likes with equal times are never cut. Without `dates=` the dates are
    quantiles of the likes of the data set. Returns the number of training windows, and for each period its date and
    the number of users that it can evaluate: those with an item in it and one before it.
    """
    likes = "firsts JOIN users USING (user) JOIN items USING (item)"
    shares = f"[{1 - 2 * params.test_share}, {1 - params.test_share}, 1.0]"
    ((*cuts, last),) = con.execute(f"SELECT quantile_disc(first >> 40, {shares}) FROM {likes}").fetchall()[0]
    # readers keep times as whole seconds or smaller units: here is which, if they are dates after 1980
    second = next((10**n for n in (0, 3, 6, 9) if 3e8 < last / 10**n < 1e10), None)
    if params.dates and not second:
        raise BachError(f"dates={params.dates}: the times of this log (up to {last}) are not dates; use test_share")
    if params.dates:
        cuts = [round(datetime.fromisoformat(date).replace(tzinfo=UTC).timestamp() * second) for date in params.dates]
    valid, test = map(int, cuts)
    names = [f"{datetime.fromtimestamp(cut / second, UTC):%Y-%m-%d}" if second else f"{cut}" for cut in (valid, test)]
    told = {"valid": names[0], "test": names[1]}
    where = f"split='global-time' with validation from {told['valid']} and test from {told['test']}"
    if valid >= test:
        raise BachError(f"{where}: validation should begin first. Are the times in the log real ones?")
    counts = ", ".join(f"count(*) FILTER (first >> 40 < {date})::BIGINT" for date in (valid, test))
    found = con.sql(f"SELECT {counts} FROM {likes} GROUP BY users.id ORDER BY users.id").fetchnumpy()
    begins = np.stack(list(found.values())).astype(np.int64)
    np.save(folder / BEGINS, begins)
    n_windows, ends = int(windows_of_prefixes(begins[0]).sum()), (begins[1], lengths)
    users = {of: int(((b > 0) & (b < end)).sum()) for of, b, end in zip(told, begins, ends, strict=True)}
    if not n_windows or min(users.values()) < FEWEST:
        left = f"{n_windows:,} training windows, {users['valid']:,} validation users and {users['test']:,} test users"
        raise BachError(f"{where} leaves {left} (with items before them, too); {FEWEST} users each should be left")
    return n_windows, {"from": told, "users": users}


def write_items(con: Connection, folder: Path, titles: RawFile | None, kind: str | None, columns: dict) -> None:
    """`items.parquet`: id, raw id, number of users who like it, and its title and genres if the data set has them."""
    items = con.sql("SELECT id AS item, item AS raw_id, n::INTEGER AS n_users FROM items ORDER BY id").to_arrow_table()
    named = pd.DataFrame({"raw_id": [str(raw) for raw in items["raw_id"].to_pylist()]})
    if titles and kind in TITLES:
        named = named.merge(read_titles(titles, kind).drop_duplicates("raw_id"), on="raw_id", how="left")
    if "title" in columns:
        named["title"] = _first_mention(con, "title")
    if "genre" in columns:
        named["genres"] = _first_mention(con, "genre").fillna("").astype(str).map(split_genres)
    title = named["title"].fillna(named["raw_id"]) if "title" in named else named["raw_id"]
    genres = [entry if isinstance(entry, list) else [] for entry in named.get("genres", [None] * len(named))]
    items = items.append_column("title", pa.array(title, pa.string()))
    items = items.append_column("genres", pa.array(genres, pa.list_(pa.string())))
    pq.write_table(items, folder / FILES["items"])


def _first_mention(con: Connection, column: str) -> pd.Series:
    """For every kept item, the first non-empty value of this column in the log."""
    return con.sql(f"""
        SELECT arg_min(log.{column}, log.rowid) FILTER (log.{column}::VARCHAR <> '') AS said
        FROM items LEFT JOIN log USING (item) GROUP BY id ORDER BY id
    """).df()["said"]
