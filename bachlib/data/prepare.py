"""The paper's pipeline (appendix A): from a raw log to per-user chronological sequences of liked items.

    liked events → unique items in first-interaction order → the most frequent items → users with enough items
    → at most `max_users` users → contiguous ids

The catalogue is made of everybody's likes, before users are dropped, and stays as it is (`catalogue="liked"`): an item
that no kept user likes is ranked and drawn as a negative like any other. `catalogue="kept"` drops these items.

The steps are SQL on DuckDB, which moves to the disk what does not fit into memory. The chronological split is index
arithmetic on the result: see `dataset`. The parameters `ties` and `on_bad_rows` decide what the paper leaves open.

A *basket* is the events of one user with one time: what they bought together. `ties="basket"` lets no basket lie in two
of history, validation and test. See `_whole_baskets`.

`split="global-time"` trains on what was liked before one date and evaluates on what comes later. Users and items are
the same as with the paper's split, so both splits can be compared: they are chosen on the whole log, later likes too.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from bachlib import BachError
from bachlib.data import planted
from bachlib.data.dataset import FORMAT, Dataset, content_hash
from bachlib.data.log_table import LogTable, connect
from bachlib.data.raw import RawFile, beside, find_raw, fingerprint
from bachlib.data.readers import read_log
from bachlib.data.sources import Source, find_source
from bachlib.data.store import write_begins, write_items, write_sequences, write_users
from bachlib.data.windows import windows_per_user
from bachlib.files import (
    clear_errors,
    differences,
    only_one,
    output_dir,
    read_json,
    short_hash,
    whole_folder,
    write_json,
)
from bachlib.params import MIN_ITEMS, N_TEST, N_VALID, PrepareParams, WorldParams, noted, validated

Say = Callable[[str], None]

# (time, row of the log, below 2⁴⁰) as one number: a plain min() finds the first interaction, and ties keep log order
FIRST = "min(time::HUGEINT * 1099511627776 + log.rowid)"
SHUFFLED = "first >> 40, md5(concat_ws(' ', {seed}, user, item))"  # the same order with any number of threads
ORDER = {"log": "first", "item": "first >> 40, items.id", "shuffle": SHUFFLED, "basket": SHUFFLED}


def prepare(
    source: str,
    path: str | Path | None = None,
    out: str | Path | None = None,
    *,
    memory: str = "2GB",
    threads: int | None = None,
    quiet: bool = False,
    **params: Any,
) -> Dataset:
    """Prepare a raw log and open the result; a second call with the same input and parameters only opens it.

    source: a name in `bachlib.data.sources`; path: file, folder or zip (None: the default planted world);
    out: the folder to create (None: in `outputs/data`, see `folder_name`); memory, threads: limits for DuckDB;
    params: the fields of `bachlib.params.PrepareParams`. A folder with other options is never replaced; one whose log
    has changed, or of an older format, is.
    """
    kind = find_source(source)
    chosen = validated(PrepareParams, params, "prepare")
    if chosen.items != "product" and source != "complete-journey":
        raise BachError(f"items={chosen.items!r}: only the source complete-journey has product types, not {source}")
    say: Say = (lambda text: None) if quiet else print
    if path is None:
        if source != "planted":
            raise BachError(f"prepare({source!r}) needs the path of the log: {kind.archive or 'a file'} or {kind.log}")
        path = planted.write_world()
    raws = find_raw(path, kind.log)
    if out is None:
        out = output_dir("data", folder_name(source, path, chosen.model_dump()))
    out = Path(out).expanduser().resolve()
    titles = beside(raws[0], kind.items) if kind.items else None
    inputs = {raw.path: raw for raw in [*raws, *([titles] if titles else [])]}  # a zip counts once
    identity = {"format": FORMAT, "source": source, "params": chosen.model_dump()}
    identity["inputs"] = [fingerprint(raw) for raw in inputs.values()]
    with _engine_errors(out, Path(path)), only_one(out):
        if _is_prepared(out, identity, say):
            say(f"{out.name}: already prepared with this input and these parameters")
        else:
            with whole_folder(out) as folder:
                with connect(memory, folder / "spill", threads) as con:
                    meta = _pipeline(LogTable(con, chosen), kind, raws, titles, folder, say)
                for scratch in ("spill", "unpacked"):
                    shutil.rmtree(folder / scratch, ignore_errors=True)
                if source == "planted":
                    planted.align_truth(raws[0].path.parent, folder)
                write_json(folder / "meta.json", identity | meta | {"content_hash": content_hash(folder)}, checked=True)
    return Dataset.load(out)


def data_label(source: str, path: str | Path | None) -> str:
    """A readable name of a log: its source, or the name of a file of the user's own without unusual characters."""
    return re.sub(r"[^\w.-]+", "-", Path(path).stem) if find_source(source).own else source


def folder_name(
    source: str, path: str | Path | None, options: dict[str, Any], world: dict[str, Any] | None = None
) -> str:
    """The folder in `outputs/data` that `bach prepare`, notebooks and sweeps use for a log and these options.

    It is the log's label, and a hash if any option differs from its default. A path counts as an option unless it is
    the authors' archive. world: the parameters of a planted world, if its path is not given (None: the defaults).
    """
    label, chosen, usual = data_label(source, path), noted(PrepareParams(**options)), noted(PrepareParams())
    if source == "planted":
        world = read_json(Path(path).expanduser() / "world.json") if path else world
        usual["world"] = WorldParams().model_dump()
        chosen["world"] = world or (str(path) if path else usual["world"])
    elif path and Path(path).name != find_source(source).archive:
        chosen["path"] = str(Path(path).expanduser().resolve())
    if chosen == usual:
        return label
    return f"{label}-{short_hash(chosen)}"


def _pipeline(
    log: LogTable, source: Source, raws: list[RawFile], titles: RawFile | None, folder: Path, say: Say
) -> dict[str, Any]:
    """Every step of appendix A, in its order; each reports how many rows, users and items remain."""
    read_log(log, source, raws, folder / "unpacked")
    con, params, bad, one = log.con, log.params, log.bad, log.one
    steps: list[dict[str, Any]] = []

    def step(name: str, rows: int, users: int, items: int) -> None:
        left = {"rows": int(rows), "users": int(users), "items": int(items)}
        before = {key: steps[-1][key] for key in left} if steps else None
        steps.append({"step": name, "before": before, **left})
        say(f"{name:<28}" + "".join(f"{n:>13,} {what}" for what, n in left.items()))

    if bad.count and params.on_bad_rows == "stop":
        raise BachError(f"the log has unreadable rows (on_bad_rows='skip' leaves them out and counts them):\n{bad}")
    if bad.count:
        say(f"left out {bad.count:,} unreadable rows:\n{bad}")
    columns = log.columns()
    rated = "rating" in columns
    liked = f"rating >= {params.min_rating}::{columns['rating']}" if rated else "true"

    # the raw log and 1. liked events, counted together: one scan by user, one by item
    for table, column in (("by_user", "user"), ("by_item", "item")):
        con.execute(f"""
            CREATE TABLE {table} AS
            SELECT {column}, count(*) AS n, count(*) FILTER ({liked}) AS liked FROM log GROUP BY {column}
        """)
        log.note_alike(table, column)
    for note in log.notes:
        say(note)
    step("raw log", *one("SELECT sum(n), count(*), (SELECT count(*) FROM by_item) FROM by_user"))
    some = "count(*) FILTER (liked > 0)"
    rows, users, items = one(f"SELECT sum(liked), {some}, (SELECT {some} FROM by_item) FROM by_user")
    step(f"liked (rating ≥ {params.min_rating:g})" if rated else "liked (every event)", rows, users, items)
    if not rows:
        low, high = one("SELECT min(rating), max(rating) FROM log")
        found = f"the ratings go from {low:g} to {high:g}; lower min_rating"
        raise BachError(f"no event has a rating of at least min_rating={params.min_rating:g}: {found}")

    # 2. unique items per user, each at its first interaction
    firsts = f"SELECT user, item, {FIRST} AS first FROM log WHERE {liked} GROUP BY user, item"
    con.execute(f"CREATE TABLE firsts AS {firsts}")
    step("unique items per user", *one("SELECT count(*) FROM firsts"), users, items)

    # 3. the most frequent items; equally frequent ones in the order of their ids
    con.execute(f"""
        CREATE TABLE catalogue AS
        SELECT item FROM firsts GROUP BY item ORDER BY count(*) DESC, item LIMIT {params.max_items}
    """)
    lengths = "SELECT user, count(*) AS n FROM firsts SEMI JOIN catalogue USING (item) GROUP BY user"
    con.execute(f"CREATE TABLE lengths AS {lengths}")
    name = f"{params.max_items:,} most frequent items"
    step(name, *one("SELECT sum(n), count(*) FROM lengths"), min(items, params.max_items))
    if params.ties == "basket" and params.split == "per-user":  # dates cut no basket
        _whole_baskets(con, SHUFFLED.format(seed=params.seed))
        con.execute(f"CREATE OR REPLACE TABLE lengths AS {lengths}")
        step("baskets never cut", *one("SELECT sum(n), count(*) FROM lengths"), min(items, params.max_items))

    # 4. users with enough items
    qualified = con.sql(f"SELECT user, n FROM lengths WHERE n >= {params.min_items} ORDER BY user").to_arrow_table()
    if not qualified.num_rows:
        (longest,) = one("SELECT max(n) FROM lengths")
        lower = [f"min_items (to no less than {MIN_ITEMS})"] * (params.min_items > MIN_ITEMS) + ["min_rating"] * rated
        advice = f"Lower {' or '.join(lower)}" if lower else f"A training window needs at least {MIN_ITEMS}"
        raise BachError(f"no user has {params.min_items} liked items: the longest sequence has {longest}. {advice}")
    _keep(con, qualified, params.catalogue)
    kept = "SELECT sum(n), count(*), (SELECT count(*) FROM items) FROM users"
    step(f"users with ≥ {params.min_items} items", *one(kept))

    # 5. at most max_users of them
    if qualified.num_rows > params.max_users:
        drawn = np.random.default_rng(params.seed).choice(qualified.num_rows, params.max_users, replace=False)
        _keep(con, qualified.take(np.sort(drawn)), params.catalogue)
    step(f"at most {params.max_users:,} users", *one(kept))

    # 6. contiguous ids (`_keep` gave them) and sequences in the order of time
    n_events, n_tied = write_sequences(con, folder, ORDER[params.ties].format(seed=params.seed))
    lengths = write_users(con, folder)
    write_items(con, folder, titles, source.items, columns)
    n_windows, split = int(windows_per_user(lengths).sum()), {}
    if params.split == "global-time":
        n_windows, told = write_begins(con, folder, params, lengths)
        split = {"split": told}
        for period, n in told["users"].items():
            left = f"{len(lengths) - n:,} users have no items in it or none before it and are not evaluated there"
            say(f"{period} from {told['from'][period]}: {n:,} users; {left}")
    counts = {"users": len(lengths), "items": steps[-1]["items"], "events": n_events, "windows": n_windows}
    say(", ".join(f"{counts[name]:,} {name}" for name in counts))
    tied = {"events": n_tied, "share": round(n_tied / n_events, 4)}
    say(f"{tied['share']:.1%} of the events tie: their user has another one at the same time (ties: {params.ties})")
    told = {"notes": log.notes, "bad_rows": {"count": bad.count, "first": bad.first}}
    return {"steps": steps, "counts": counts, "tied": tied, **told, **split}


def _whole_baskets(con: duckdb.DuckDBPyConnection, order: str) -> None:
    """Drop the events of `firsts` that a cut at the last 10 and the last 20 would separate from their basket.

    The test items are the latest baskets that hold at least 10 items; if they hold more, only so many of the earliest
    of them stay that there are 10, drawn with the seed, and the rest of that basket is dropped. The validation items
    are made of the baskets before in the same way. All other baskets stay whole, before the held-out ones.

    This is about the split. A training window may still end inside a basket: all its items are from the prefix.
    """
    con.execute(f"""
        CREATE OR REPLACE TABLE firsts AS
        WITH counted AS (
            SELECT user, item, first, row_number() OVER (PARTITION BY user, first >> 40 ORDER BY {order}) AS place,
                   count(*) OVER (PARTITION BY user ORDER BY first >> 40 DESC) AS from_here,
                   from_here - count(*) OVER (PARTITION BY user, first >> 40) AS later
            FROM firsts SEMI JOIN catalogue USING (item)
        ), tested AS (
            SELECT *, min(from_here) FILTER (from_here >= {N_TEST}) OVER (PARTITION BY user) AS test FROM counted
        )
        SELECT user, item, first FROM tested WHERE (
            later < {N_TEST} AND place > {N_TEST} - later
            OR later >= test AND later < test + {N_VALID} AND place > {N_VALID} - (later - test)
        ) IS NOT TRUE  -- test is NULL for users with fewer than 10 items
    """)


def _keep(con: duckdb.DuckDBPyConnection, users: pa.Table, catalogue: str) -> None:
    """Create the tables `users` and `items` that stay, with counts and contiguous ids in the order of the raw ids."""
    join = {"liked": "LEFT JOIN", "kept": "JOIN"}[catalogue]
    con.register("kept", users.append_column("id", pa.array(np.arange(users.num_rows), pa.int32())))
    con.execute("CREATE OR REPLACE TABLE users AS SELECT * FROM kept")
    con.unregister("kept")
    con.execute(f"""
        CREATE OR REPLACE TABLE items AS
        SELECT item, count(user) AS n, (row_number() OVER (ORDER BY item) - 1)::INTEGER AS id
        FROM catalogue {join} (SELECT user, item FROM firsts SEMI JOIN users USING (user)) USING (item) GROUP BY item
    """)


def _is_prepared(out: Path, identity: dict[str, Any], say: Say) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    if not (out / "meta.json").is_file():
        raise BachError(f"{out} exists and is not a prepared data set; choose another out=")
    meta = read_json(out / "meta.json")
    there = {"source": meta.get("source"), "split": "per-user", **meta.get("params", {})}
    here = {"source": identity["source"], **identity["params"]}
    if meta and (other := differences({**here, **there}, here, "there", "here")):  # an older format has fewer options
        told = f"{out} holds a data set that was prepared with other options: {'; '.join(other)}"
        raise BachError(f"{told}. Runs may need it: choose another out= (--out), or remove the folder")
    if meta and meta.get("format") != FORMAT:
        say(f"{out.name}: prepared again, because another version wrote it (format {meta.get('format')}, now {FORMAT})")
    elif meta and meta.get("inputs") != identity["inputs"]:
        say(f"{out.name}: replaced, because the log has changed")
    else:
        try:
            Dataset.load(out)
            return True
        except BachError as error:
            say(f"{out.name}: replaced, because it is damaged or incomplete ({error})")
    return False


@contextmanager
def _engine_errors(out: Path, log: Path) -> Iterator[None]:
    """Turn errors of DuckDB, too, into advice."""
    try:
        with clear_errors(out):
            yield
    except duckdb.OutOfMemoryException as error:
        raise BachError(f"the log does not fit into memory: raise memory= ({str(error).splitlines()[0]})") from error
    except duckdb.OutOfRangeException as error:
        raise BachError(f"{log}: times should be between −10^20 and 10^20 ({error})") from error
    except duckdb.Error as error:
        raise BachError(f"preparing {out.name} from {log} failed: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:
        if "interrupted" in str(error):  # DuckDB turns Ctrl-C into this
            raise KeyboardInterrupt from error
        raise
