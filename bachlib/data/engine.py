"""DuckDB, set up the same way everywhere: quiet, bounded, in UTC."""

from __future__ import annotations

from pathlib import Path

import duckdb


def connect(memory: str, spill: Path, threads: int | None = None) -> duckdb.DuckDBPyConnection:
    """An in-memory database that moves to `spill` on disk what does not fit into `memory`."""
    config = {"memory_limit": memory, "temp_directory": str(spill)} | ({"threads": threads} if threads else {})
    con = duckdb.connect(config=config)
    con.execute("SET enable_progress_bar = false; SET TimeZone = 'UTC'")
    return con
