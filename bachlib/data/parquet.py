"""Readers of Parquet logs: any table with a user, an item and a time, and the tables of The Complete Journey."""

from collections.abc import Iterator
from pathlib import Path

import duckdb

from bachlib import BachError
from bachlib.data.log_table import SHOWN, LogTable, integer_time, quote, quote_name, quote_path
from bachlib.data.raw import RawFile, as_plain, beside

TIMES = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "U", "FLOAT", "DOUBLE", "DECIMAL", "TIMESTAMP", "DATE",
         "VARCHAR")  # fmt: skip
EXACT = {"DOUBLE": 2**53, "FLOAT": 2**24}  # whole numbers above these are rounded

# what `items` makes of a product: its id and its title
ITEMS = {
    "product": ("product_id", "concat_ws(' ', coalesce(product_type, department), brand, package_size)"),
    "type": ("product_type", "product_type"),
}


def journey(log: LogTable, raw: RawFile, work: Path) -> Path:
    """One table (user, item, time, title, genre) of the transactions and products of The Complete Journey.

    A basket of a household has one time. Rows without a quantity (returns, coupons) are no purchases.
    """
    products = beside(raw, "products.parquet")
    if products is None:
        raise BachError(f"{raw.label}: there is no products.parquet beside it; give the path of the whole wheel")
    (bought, _), (known, _) = (parquet(log, as_plain(one, work), one.label) for one in (raw, products))
    item, title = ITEMS[log.params.items]
    work.mkdir(parents=True, exist_ok=True)
    (whole := work / "journey.parquet").unlink(missing_ok=True)
    try:
        none, untyped = log.one(f"""
            SELECT count(*) FILTER (quantity <= 0), count(*) FILTER (quantity > 0 AND {item} IS NULL)
            FROM {bought} LEFT JOIN (SELECT product_id, product_type FROM {known}) USING (product_id)
        """)
        log.con.execute(f"""
            COPY (
                SELECT household_id AS user, {item} AS item, transaction_timestamp AS time, {title} AS title,
                       coalesce(product_category, department) AS genre
                FROM {bought} AS t LEFT JOIN {known} AS p USING (product_id)
                WHERE quantity > 0 AND {item} IS NOT NULL ORDER BY t.file_row_number
            ) TO {quote(str(whole))} (FORMAT parquet)
        """)
    except duckdb.BinderException as error:
        raise BachError(f"{raw.label} is not a complete-journey log: {str(error).splitlines()[0]}") from None
    log.note(none, "rows have a quantity of 0 and are left out")
    log.note(untyped, f"purchases have no {item} and are left out")
    return whole


def parquet(log: LogTable, path: Path, label: str) -> tuple[str, dict[str, str]]:
    """(the file as an SQL relation, its columns with their types)."""
    relation = f"read_parquet({quote_path(path)}, file_row_number = true, hive_partitioning = false)"
    try:
        described = log.con.execute(f"DESCRIBE SELECT * EXCLUDE (file_row_number) FROM {relation}").fetchall()
    except duckdb.Error as error:
        raise BachError(f"{label} is not a readable Parquet file: {str(error).splitlines()[0]}") from None
    return relation, {name: kind for name, kind, *_ in described}


def read_parquet(
    log: LogTable, path: Path, label: str, times: Iterator[str], fixed: dict[str, str] | None = None
) -> None:
    """Append one Parquet file to the table `log`. Rows with a missing or unreadable value go to `log.bad`."""
    relation, kinds = parquet(log, path, label)
    named = log.named_columns(list(kinds), label, fixed)
    sql = {role: quote_name(column) for role, column in named.items()}

    chosen = {role: _id(sql[role], kinds[named[role]]) for role in ("user", "item")}
    for role in ("user", "item"):
        if largest := EXACT.get(kinds[named[role]]):
            (n,) = log.one(
                f"SELECT count(*) FROM {relation} WHERE isfinite({sql[role]}) AND abs({sql[role]}) > {largest}"
            )
            log.note(
                n, f"rows of {label} have a {role} id above {largest:,} as a {kinds[named[role]]}: digits may be lost"
            )
    chosen |= {role: f"{sql[role]}::VARCHAR" for role in ("title", "genre") if role in named}
    if "rating" in named:
        chosen["rating"] = f"TRY_CAST({sql['rating']} AS DOUBLE)"
    time, kind = sql["time"], kinds[named["time"]]
    if not kind.startswith(TIMES) or kind.endswith("]"):
        raise BachError(f"{label}: column {named['time']!r} should hold a number, a date or text and is {kind}")
    if kind == "VARCHAR":
        texts = log.con.execute(f"SELECT {time} FROM {relation} WHERE {time} IS NOT NULL LIMIT 10000").fetchall()
        kind, written = log.time_type([t for (t,) in texts], label, named["time"], times)
        time = f"try_strptime({time}, {quote(written)})" if written else f"TRY_CAST({time} AS {kind})"
    chosen["time"] = integer_time(time, kind)
    columns = ", ".join(f"{expression} AS {role}" for role, expression in chosen.items())
    select = f"SELECT {columns}, file_row_number AS row FROM {relation}"

    needed = ["user", "item", "time"] + ["rating"] * ("rating" in named)
    wrong = " OR ".join([f"{name} IS NULL" for name in needed] + ["NOT isfinite(rating)"] * ("rating" in named))
    count, rows = log.one(f"""
        SELECT count(*), list({{{", ".join(f"'{name}': {name}" for name in ["row", *needed])}}} ORDER BY row)[:{SHOWN}]
        FROM ({select}) WHERE {wrong}
    """)
    for row in rows or []:
        missing = ", ".join(name for name in needed if row[name] is None) or "rating"
        log.bad.add(0, [f"{label}, row {row['row'] + 1}: {missing} is missing or cannot be read"])
    log.bad.add(count, [])
    log.append(f"SELECT * EXCLUDE (row) FROM ({select}) WHERE NOT ({wrong})", list(chosen), label)


def _id(column: str, kind: str) -> str:
    """An id as text, as in a CSV, so that files with different types fit together."""
    if kind in ("DOUBLE", "FLOAT"):  # pandas turns whole numbers with a missing value into floats
        whole = f"CASE WHEN {column} = trunc({column}) THEN TRY_CAST({column} AS BIGINT)::VARCHAR END"
        return f"CASE WHEN isfinite({column}) THEN coalesce({whole}, {column}::VARCHAR) END"
    return f"NULLIF({column}::VARCHAR, '')"
