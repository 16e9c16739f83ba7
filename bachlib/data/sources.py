"""The data sets we know: what their authors call the files, how a line looks, where to get them (appendix A).

Each source says which file is the log and which one names the items; `prepare` accepts that file plain, gzipped,
inside the authors' zip, or a folder that holds any of these.
"""

from __future__ import annotations

from dataclasses import dataclass

from bachlib import BachError

GROUPLENS = "https://files.grouplens.org/datasets/movielens/"


@dataclass(frozen=True)
class Source:
    """One kind of raw log. `columns` are its fields in file order, with the type each must have."""

    name: str
    log: str  # file name of the log, a glob
    columns: dict[str, str] | None = None  # None: the user names the columns
    delimiter: str = ","
    header: tuple[str, ...] | None = None  # the first line, where the authors write one
    items: str | None = None  # file name of the item table
    archive: str | None = None  # what the authors call the download
    where: str | None = None  # the page a person goes to
    url: str | None = None  # set where the licence lets a program fetch it
    md5: str | None = None  # of the archive; None with a url: the authors publish it beside the file
    note: str = ""


RATING = {"user": "INTEGER", "item": "INTEGER", "rating": "FLOAT", "time": "BIGINT"}
TAOBAO = {
    "user": "INTEGER",
    "item": "INTEGER",
    "genre": "INTEGER",
    "behavior": "ENUM('pv','buy','cart','fav')",
    "time": "BIGINT",
}
LICENCE = "For research; it may not be redistributed (see the README in the archive)."


def _movielens_csv(name: str, archive: str, md5: str | None) -> Source:
    return Source(
        name=name,
        log="ratings.csv",
        columns=RATING,
        header=("userId", "movieId", "rating", "timestamp"),
        items="movies.csv",
        archive=archive,
        where="https://grouplens.org/datasets/movielens/",
        url=GROUPLENS + archive,
        md5=md5,
        note=LICENCE,
    )


SOURCES: dict[str, Source] = {
    source.name: source
    for source in [
        _movielens_csv("movielens-20m", "ml-20m.zip", "cd245b17a1ae2cc31bb14903e1204af3"),
        _movielens_csv("movielens-25m", "ml-25m.zip", "6b51fb2759a8657d3bfcbfc42b592ada"),
        _movielens_csv("movielens-latest", "ml-latest.zip", None),
        _movielens_csv("movielens-latest-small", "ml-latest-small.zip", None),
        Source(
            name="movielens-1m",
            log="ratings.dat",
            columns=RATING,
            delimiter="::",
            items="movies.dat",
            archive="ml-1m.zip",
            where="https://grouplens.org/datasets/movielens/1m/",
            url=GROUPLENS + "ml-1m.zip",
            md5="c4d9eecfca2ab87c1945afe126590906",
            note=LICENCE,
        ),
        Source(
            name="movielens-100k",
            log="u.data",
            columns=RATING,
            delimiter="\t",
            items="u.item",
            archive="ml-100k.zip",
            where="https://grouplens.org/datasets/movielens/100k/",
            url=GROUPLENS + "ml-100k.zip",
            md5="0e33842e24a9c977be4e0107933c0723",
            note=LICENCE,
        ),
        Source(
            name="taobao",
            log="UserBehavior*.csv",
            columns=TAOBAO,
            archive="UserBehavior.csv.zip",
            where="https://tianchi.aliyun.com/dataset/649",
            note="The download needs a (free) Tianchi account, so a person has to fetch it.",
        ),
        Source(
            name="netflix",
            log="combined_data_*.txt",
            items="movie_titles.csv",
            archive="archive.zip",
            where="https://www.kaggle.com/datasets/netflix-inc/netflix-prize-data",
            note="The download needs a (free) Kaggle account, so a person has to fetch it.",
        ),
        Source(name="planted", log="log.csv", items="items.csv"),
        Source(name="csv", log="*.csv"),
        Source(name="parquet", log="*.parquet"),
    ]
}


def find_source(name: str) -> Source:
    if name not in SOURCES:
        raise BachError(f"source {name!r} is not known; there are {', '.join(SOURCES)}")
    return SOURCES[name]
