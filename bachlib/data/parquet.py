"""A Parquet file of your own."""

from __future__ import annotations

from pathlib import Path

import duckdb

from bachlib import BachError
from bachlib.data.rows import SHOWN, BadRows, append, integer_time, named_columns, quote, quote_path, time_type
from bachlib.params import PrepareParams


def read_parquet(con: duckdb.DuckDBPyConnection, path: Path, label: str, params: PrepareParams, bad: BadRows) -> None:
    """Append one Parquet file to the table `log`. Rows with a missing or unreadable value go to `bad`."""
    relation = f"read_parquet({quote_path(path)}, file_row_number = true)"
    try:
        described = con.execute(f"DESCRIBE SELECT * EXCLUDE (file_row_number) FROM {relation}").fetchall()
    except duckdb.Error as error:
        raise BachError(f"{label} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    kinds = {name: kind for name, kind, *_ in described}
    named = named_columns(params, list(kinds), label)
    sql = {role: '"' + column.replace('"', '""') + '"' for role, column in named.items()}

    chosen = [f"{_id(sql[role], kinds[named[role]])} AS {role}" for role in ("user", "item")]
    chosen += [f"{sql[role]}::VARCHAR AS {role}" for role in ("title", "genre") if role in named]
    chosen += [f"TRY_CAST({sql['rating']} AS DOUBLE) AS rating"] * ("rating" in named)
    time, kind = sql["time"], kinds[named["time"]]
    if kind == "VARCHAR":
        texts = con.execute(f"SELECT {time} FROM {relation} WHERE {time} IS NOT NULL LIMIT 10000").fetchall()
        kind, written = time_type(con, [t for (t,) in texts], label, named["time"], params.time_format)
        time = f"try_strptime({time}, {quote(written)})" if written else f"TRY_CAST({time} AS {kind})"
    select = f"SELECT {', '.join(chosen)}, {integer_time(time, kind)}, file_row_number AS row FROM {relation}"

    needed = ["user", "item", "time"] + ["rating"] * ("rating" in named)
    wrong = " OR ".join([f"{name} IS NULL" for name in needed] + ["NOT isfinite(rating)"] * ("rating" in named))
    count, rows = con.execute(f"""
        SELECT count(*), list({{{", ".join(f"'{name}': {name}" for name in ["row", *needed])}}} ORDER BY row)[:{SHOWN}]
        FROM ({select}) WHERE {wrong}
    """).fetchall()[0]
    for row in rows or []:
        missing = ", ".join(name for name in needed if row[name] is None) or "rating"
        bad.add(0, [f"{label}, row {row['row'] + 1}: {missing} is missing or cannot be read"])
    bad.add(count, [])
    append(con, f"SELECT * EXCLUDE (row) FROM ({select}) WHERE NOT ({wrong})")


def _id(column: str, kind: str) -> str:
    if kind == "VARCHAR":
        return f"NULLIF({column}, '')"
    if "INT" in kind:
        return column
    return f"{column}::VARCHAR"  # decimals, UUIDs, …: their text is the id
