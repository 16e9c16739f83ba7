"""A Parquet file of your own."""

from __future__ import annotations

from pathlib import Path

import duckdb

from bachlib import BachError
from bachlib.data.rows import SHOWN, BadRows, append, integer_time, named_columns, quote, quote_path, time_type
from bachlib.params import PrepareParams


def read_parquet(con: duckdb.DuckDBPyConnection, path: Path, label: str, params: PrepareParams, bad: BadRows) -> None:
    """Append one Parquet file to the table `log`. Rows with a missing or unreadable value go to `bad`."""
    relation = f"read_parquet({quote_path(path)}, file_row_number = true, hive_partitioning = false)"
    try:
        described = con.execute(f"DESCRIBE SELECT * EXCLUDE (file_row_number) FROM {relation}").fetchall()
    except duckdb.Error as error:
        raise BachError(f"{label} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    kinds = {name: kind for name, kind, *_ in described}
    named = named_columns(params, list(kinds), label)
    sql = {role: '"' + column.replace('"', '""') + '"' for role, column in named.items()}

    chosen = {role: _id(sql[role], kinds[named[role]]) for role in ("user", "item")}
    chosen |= {role: f"{sql[role]}::VARCHAR" for role in ("title", "genre") if role in named}
    if "rating" in named:
        chosen["rating"] = f"TRY_CAST({sql['rating']} AS DOUBLE)"
    time, kind = sql["time"], kinds[named["time"]]
    if kind == "VARCHAR":
        texts = con.execute(f"SELECT {time} FROM {relation} WHERE {time} IS NOT NULL LIMIT 10000").fetchall()
        kind, written = time_type(con, [t for (t,) in texts], label, named["time"], params.time_format)
        time = f"try_strptime({time}, {quote(written)})" if written else f"TRY_CAST({time} AS {kind})"
    chosen["time"] = integer_time(time, kind)
    columns = ", ".join(f"{expression} AS {role}" for role, expression in chosen.items())
    select = f"SELECT {columns}, file_row_number AS row FROM {relation}"

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
    append(con, f"SELECT * EXCLUDE (row) FROM ({select}) WHERE NOT ({wrong})", list(chosen), label)


def _id(column: str, kind: str) -> str:
    """Ids are texts, as in a CSV, so that several files fit together whatever their types."""
    if kind in ("DOUBLE", "FLOAT"):  # whole numbers that met a missing value in pandas
        return (
            f"CASE WHEN isfinite({column}) THEN coalesce(TRY_CAST({column} AS BIGINT)::VARCHAR, {column}::VARCHAR) END"
        )
    return f"NULLIF({column}::VARCHAR, '')"
