"""Item titles and genres, from the tables the authors ship beside their logs."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator

import pandas as pd

from bachlib import BachError
from bachlib.data.files import RawFile

Row = tuple[str, str, list[str]]  # raw id, title, genres

ML100K_GENRES = """
    unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror
    Musical Mystery Romance Sci-Fi Thriller War Western
""".split()


def _movies_csv(text: str) -> Iterator[Row]:
    for row in csv.DictReader(io.StringIO(text)):
        yield row["movieId"], row["title"], split_genres(row["genres"])


def _movies_dat(text: str) -> Iterator[Row]:
    for line in _lines(text):
        item, title, genres = line.split("::")
        yield item, title, split_genres(genres)


def _u_item(text: str) -> Iterator[Row]:
    for line in _lines(text):
        item, title, _released, _video, _url, *flags = line.split("|")
        yield item, title, [genre for genre, flag in zip(ML100K_GENRES, flags, strict=True) if flag == "1"]


def _netflix(text: str) -> Iterator[Row]:
    for line in _lines(text):
        item, year, title = line.split(",", 2)  # titles hold commas and are not quoted
        yield item, f"{title} ({year})" if year != "NULL" else title, []


def _planted(text: str) -> Iterator[Row]:
    for row in csv.DictReader(io.StringIO(text)):
        yield row["item"], row["title"], split_genres(row["genre"])


def _lines(text: str) -> list[str]:
    return [line.rstrip("\r") for line in text.split("\n") if line.strip()]  # splitlines() would cut at \x85 too


def split_genres(genres: str) -> list[str]:
    """`A|B` as a list; empty where there is none."""
    return [] if genres == "(no genres listed)" else [genre for genre in genres.split("|") if genre]


READERS: dict[str, tuple[Callable[[str], Iterator[Row]], str]] = {
    "movies.csv": (_movies_csv, "utf-8-sig"),
    "movies.dat": (_movies_dat, "latin-1"),
    "u.item": (_u_item, "latin-1"),
    "movie_titles.csv": (_netflix, "latin-1"),
    "items.csv": (_planted, "utf-8"),
}


def read_titles(raw: RawFile, kind: str) -> pd.DataFrame:
    """raw_id (as text), title, genres of every item in the table."""
    reader, encoding = READERS[kind]
    with raw.open() as stream:
        content = stream.read()
    try:
        rows = [row for row in reader(content.decode(encoding))]
    except (ValueError, KeyError) as error:
        raise BachError(f"{raw.label} does not look like the authors' {kind}: {error}") from None
    return pd.DataFrame(rows, columns=["raw_id", "title", "genres"])
