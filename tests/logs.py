"""Logs in the authors' formats, made by the tests, and the paper's pipeline once more in plain Python."""

from __future__ import annotations

import gzip
import io
import random
import tarfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

Event = tuple[int, int, float, int]  # user, item, rating, time


def random_events(seed: int, n_users: int = 12, n_items: int = 150, n: int = 2_500, ties: bool = True) -> list[Event]:
    """Users of very different activity, repeated items, many tied times, not sorted by time."""
    rng = random.Random(seed)
    users = [1 + int(n_users * rng.random() ** 1.5) for _ in range(n)]
    span = 400 if ties else 10**8
    return [
        (u, 1 + int(n_items * rng.random() ** 1.3), rng.choice([1, 2, 3, 4, 4, 4, 5, 5]), 10**9 + rng.randrange(span))
        for u in users
    ]


def write_movielens_csv(path: Path, events: list[Event]) -> Path:
    lines = [f"{u},{i},{float(r)},{t}" for u, i, r, t in events]
    path.write_text("\n".join(["userId,movieId,rating,timestamp", *lines, ""]))
    return path


def write_rows(path: Path, events: list[Event], delimiter: str) -> Path:
    path.write_text("".join(delimiter.join([str(u), str(i), str(int(r)), str(t)]) + "\n" for u, i, r, t in events))
    return path


def write_taobao(path: Path, events: list[Event]) -> Path:
    kinds = ["pv", "buy", "cart", "fav", "pv"]
    path.write_text("".join(f"{u},{i},{i % 7},{kinds[int(r) - 1]},{t}\n" for u, i, r, t in events))
    return path


def write_netflix(path: Path, events: list[Event]) -> Path:
    """Grouped by movie, dates instead of seconds."""
    by_movie: dict[int, list[str]] = {}
    for u, i, r, t in events:
        by_movie.setdefault(i, []).append(f"{u},{int(r)},{netflix_date(t)}")
    path.write_text("".join(f"{i}:\n" + "".join(row + "\n" for row in rows) for i, rows in sorted(by_movie.items())))
    return path


def write_amazon(path: Path, events: list[Event]) -> Path:
    lines = [f"A{u:04d},B{i:05d},{float(r)},{t * 1000}" for u, i, r, t in events]
    path.write_text("\n".join(["user_id,parent_asin,rating,timestamp", *lines, ""]))
    return path


KUAIRAND = (
    "user_id video_id date hourmin time_ms is_click is_like is_follow is_comment is_forward is_hate long_view "
    "play_time_ms duration_ms profile_stay_time comment_stay_time is_profile_enter is_rand tab"
).split()


def write_kuairand(path: Path, events: list[Event]) -> Path:
    """A click is a rating of 4, the like button one of 5, and 1 is hated."""
    rows = [
        (u, i, 20220408, 400, t * 1000, int(r == 4), int(r == 5), 0, 0, 0, int(r == 1), 0, 10, 20, 0, 0, 0, 0, 1)
        for u, i, r, t in events
    ]
    path.write_text("\n".join([",".join(KUAIRAND), *(",".join(map(str, row)) for row in rows), ""]))
    return path


def write_lastfm(path: Path, events: list[Event]) -> Path:
    """Plays of artists with quotes in their names; some have no id at MusicBrainz."""
    lines = []
    for u, i, r, t in events:
        when = datetime.fromtimestamp(t, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        artist = f'The "{i}" Été, & Co'
        lines.append(f"user_{u:06d}\t{when}\t{'' if i % 3 else f'mbid-{i}'}\t{artist}\t\tTrack {r}")
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def write_atomic(path: Path, events: list[Event]) -> Path:
    """As RecBole's own data sets are."""
    lines = [f"{u}\t{i}\t{r}\t{t}" for u, i, r, t in events]
    path.write_text("\n".join(["user_id:token\titem_id:token\trating:float\ttimestamp:float", *lines, ""]))
    return path


def tar_gz(path: Path, members: dict[str, Path]) -> Path:
    """A tar.gz of files, by their names in it; the same bytes each time."""
    with gzip.GzipFile(path, "wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as archive:
        for name, file in members.items():
            about = tarfile.TarInfo(name)
            about.size = file.stat().st_size
            archive.addfile(about, io.BytesIO(file.read_bytes()))
    return path


def netflix_date(t: int) -> str:
    return f"{2000 + t % 5}-{1 + t % 12:02d}-{1 + t % 28:02d}"


def plain_pipeline(events, min_rating=4.0, min_items=80, max_items=50_000, rated=True) -> dict[int, list[int]]:
    """Appendix A without any engine: user → raw item ids in order. `events` in the order of the log."""
    liked = [e for e in events if not rated or e[2] >= min_rating]
    liked.sort(key=lambda e: e[3])  # stable: ties keep the order of the log
    sequences: dict[int, dict[int, None]] = {}
    for u, i, _, _ in liked:
        sequences.setdefault(u, {}).setdefault(i)
    kept = set(plain_catalogue(events, min_rating, max_items, rated))
    sequences = {u: [i for i in items if i in kept] for u, items in sequences.items()}
    return {u: items for u, items in sequences.items() if len(items) >= min_items}


def plain_catalogue(events, min_rating=4.0, max_items=50_000, rated=True) -> list[int]:
    """The raw ids of the most frequent liked items of all users, sorted."""
    counts = Counter(i for _, i in {(u, i) for u, i, rating, _ in events if not rated or rating >= min_rating})
    return sorted(sorted(counts, key=lambda i: (-counts[i], i))[:max_items])


def as_raw(dataset) -> dict:
    """A prepared data set as raw ids, to compare with `plain_pipeline`."""
    raw_item, raw_user = dataset.items["raw_id"].to_numpy(), dataset.users["raw_id"].to_numpy()
    return {raw_user[u]: raw_item[dataset.sequence(u)].tolist() for u in range(dataset.n_users)}


def my_csv(tmp_path, events, change=lambda lines: None, name="my.csv", encoding="utf-8") -> Path:
    """A log of somebody's own, with the columns who, what, when, stars; `change` spoils its lines."""
    lines = ["who,what,when,stars", *(f"u{u},i{i},{t},{r}" for u, i, r, t in events)]
    change(lines)
    path = tmp_path / name
    path.write_bytes(("\n".join(lines) + "\n").encode(encoding))
    return path
