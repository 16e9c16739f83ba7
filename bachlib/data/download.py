"""Download a data set, if its licence lets a program do so: progress bar, resume, checksum.

A download is written to `<file>.part`, which is renamed only when it is complete and has the right checksum.
"""

import os
import re
import urllib.error
import urllib.request
from pathlib import Path

from tqdm.auto import tqdm

from bachlib import BachError
from bachlib.data.sources import Source, find_source
from bachlib.files import file_hash, move_into_place, output_dir

CHUNK = 1 << 20
TIMEOUT = 30


def locate(source_name: str) -> Path | None:
    """The path of a log: in `BACH_DATA_DIR`, else in `outputs/logs`, else downloaded; None for the planted world."""
    source = find_source(source_name)
    if source_name == "planted":
        return None
    if source.archive is None:
        whence = f". It comes from {source.where}. {source.note}" if source.where else ""
        raise BachError(f"source {source.name!r} is your own log: give its path with --path{whence}")
    if there := on_disk(source):
        return there
    if source.url is None:
        raise BachError(
            f"{source.name} has to be downloaded by hand from {source.where}; the file is called {source.archive}. "
            f"{source.note}\nThen: bach prepare --source {source.name} --path {source.archive} (no need to unpack it)"
        )
    print(f"{source.archive} comes from {source.where}. {source.note}")
    return fetch(source.url, output_dir("logs", source.archive), source.md5)


def on_disk(source: Source) -> Path | None:
    """The path of a log that is in `BACH_DATA_DIR` or `outputs/logs`, else None."""
    places = [Path(os.environ["BACH_DATA_DIR"])] if os.environ.get("BACH_DATA_DIR") else []
    for place in [*places, output_dir("logs")]:
        for name in filter(None, (source.archive, source.log, source.log + ".gz")):
            if place.is_dir() and (found := sorted(place.glob(name))):
                return place if "*" in name and len(found) > 1 else found[0]
    return None


def fetch(url: str, target: Path, md5: str | None = None) -> Path:
    """Download `url` to `target`, resuming an earlier attempt; md5=None reads the checksum from `<url>.md5`."""
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    try:
        if md5 is None:
            with urllib.request.urlopen(url + ".md5", timeout=TIMEOUT) as answer:
                md5 = re.search(r"\b[0-9a-f]{32}\b", answer.read().decode()).group()
        _download(url, part)
    except (OSError, urllib.error.URLError) as error:
        kept = f"{part.stat().st_size:,} bytes are kept, and the next call resumes there. " if part.exists() else ""
        advice = f"{kept}Or download it with a browser and put it at {target}"
        raise BachError(f"downloading {url} stopped: {getattr(error, 'reason', error)}. {advice}") from error
    if (found := file_hash(part, "md5")) != md5:
        part.unlink()
        raise BachError(f"{url} arrived with MD5 {found} instead of {md5} and was removed; try again")
    move_into_place(part, target)
    return target


def _download(url: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        answer = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # nothing left to send: the part is complete, or its checksum is wrong
            return
        raise
    with answer:
        resumed, length = answer.status == 206, answer.headers.get("Content-Length")
        have = have if resumed else 0
        total = have + int(length) if length else None
        bar = tqdm(total=total, initial=have, unit="B", unit_scale=True, unit_divisor=1024, desc=part.stem)
        with bar, part.open("ab" if resumed else "wb") as stream:
            while chunk := answer.read(CHUNK):
                stream.write(chunk)
                bar.update(len(chunk))
    if total is not None and part.stat().st_size < total:
        raise OSError(f"the connection closed after {part.stat().st_size:,} of {total:,} bytes")
