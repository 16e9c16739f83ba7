"""Find raw files in what the user has (a file, gzip, zip or tar.gz, a folder of these); unpack them to UTF-8 files.

Compressed or differently encoded files are unpacked before they are read: a gzip that was cut off or a zip with a wrong
checksum must be an error, not a shorter log. A member of an archive is read as a stream. Its path is only a name.
"""

import codecs
import errno
import fnmatch
import gzip
import lzma
import re
import shutil
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bachlib import BachError
from bachlib.files import file_hash, short_hash

CHUNK = 1 << 22
DAMAGE = (  # what reading an archive may raise
    zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, EOFError, NotImplementedError, ValueError,
)  # fmt: skip
TARS = (".tar.gz", ".tgz")
RATIO, AT_ONCE, MEMBERS = 200, 1 << 24, 10_000  # of a tar.gz: no log is compressed further; bytes in one read; files


@dataclass(frozen=True)
class RawFile:
    """One raw file, perhaps a member of a zip or a tar. `label` is its name in messages."""

    path: Path
    member: str | None = None

    @property
    def label(self) -> str:
        return f"{self.path.name}:{self.member}" if self.member else self.path.name

    @contextmanager
    def open(self) -> Iterator[IO[bytes]]:
        """The decompressed bytes. A damaged archive is an error that names it."""
        try:
            if self.member:
                with _member(self.path, self.member) as stream:
                    yield gzip.GzipFile(fileobj=stream) if self.member.endswith(".gz") else stream
            else:
                with gzip.open(self.path) if is_gzip(self.path) else self.path.open("rb") as stream:
                    yield stream
        except (
            EOFError,
            zlib.error,
            lzma.LZMAError,
            zipfile.BadZipFile,
            tarfile.TarError,
            OSError,
            struct.error,
            OverflowError,
        ) as error:
            if isinstance(error, OSError) and error.errno not in (
                None,
                errno.EINVAL,
            ):  # of the disk, not of the content
                raise
            raise BachError(f"{self.label} is damaged or was cut off ({error}); download it again") from None
        except RuntimeError as error:  # encrypted, or a way of compression that Python does not know
            raise BachError(f"{self.label} cannot be unpacked ({error}); unpack it and give the folder") from None


@contextmanager
def _member(path: Path, name: str) -> Iterator[IO[bytes]]:
    if path.name.endswith(TARS):
        with _TarGz(path) as packed, tarfile.open(fileobj=packed, mode="r:") as archive:
            yield archive.extractfile(next(member for member in _files(archive, path) if member.name == name))
    else:
        with zipfile.ZipFile(path) as archive, archive.open(name) as stream:
            yield stream


class _TarGz(gzip.GzipFile):
    """The bytes of a tar.gz. Sizes that the tar claims are not believed."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.most, self.told = RATIO * path.stat().st_size + CHUNK, path.name

    def read(self, size: int = -1) -> bytes:
        if self.tell() > self.most:
            raise BachError(f"{self.told} unpacks to more than {RATIO} times its size: no log does")
        return super().read(size if 0 <= size < AT_ONCE else AT_ONCE)

    def seek(self, offset: int, whence: int = 0) -> int:
        return super().seek(min(offset, self.most + 1), whence)


def _files(archive: tarfile.TarFile, path: Path) -> Iterator[tarfile.TarInfo]:
    """The files of a tar: no links, and none with holes, which would be gigabytes of zeros."""
    for n, member in enumerate(archive):
        if n == MEMBERS:
            raise BachError(f"{path.name} has more than {MEMBERS:,} members: no log does")
        if member.isreg() and not member.issparse():
            yield member


def _names_in(path: Path) -> list[str]:
    """The names of the files in a tar.gz. It is read to its end, where its checksum is."""
    with _TarGz(path) as packed, tarfile.open(fileobj=packed, mode="r:") as archive:
        names = [member.name for member in _files(archive, path)]
        while packed.read(CHUNK):
            pass
    return names


def is_gzip(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(2) == b"\x1f\x8b"


def find_raw(path: str | Path, pattern: str, required: bool = True) -> list[RawFile]:
    """All raw files in a file, folder, zip or tar.gz that match `pattern`, in natural order (`_2` before `_10`)."""
    path = Path(path).expanduser()
    kind = "folder" if path.is_dir() else "tar.gz" if path.name.endswith(TARS) else "zip"
    if not path.exists():
        raise BachError(f"{path} does not exist")
    if path.is_dir():
        found = [RawFile(p) for p in path.rglob("*") if p.is_file() and _called(p.name, pattern)]
        if not found:  # a folder that holds the authors' zip
            for archive in sorted(p for p in path.iterdir() if p.name.endswith((".zip", ".whl", *TARS))):
                found += find_raw(archive, pattern, required=False)
        listing = sorted(p.name for p in path.iterdir())
    elif kind == "tar.gz" or zipfile.is_zipfile(path):
        try:
            if kind == "tar.gz":
                listing = _names_in(path)
            else:
                with zipfile.ZipFile(path) as archive:
                    listing = archive.namelist()
        except DAMAGE as error:
            raise BachError(f"{path} is a damaged {kind}, or one that Python cannot read ({error})") from None
        found = [RawFile(path, n) for n in listing if _called(n.rsplit("/", 1)[-1], pattern) and "__MACOSX" not in n]
    elif path.suffix in (".zip", ".whl"):
        raise BachError(f"{path} is a damaged or incomplete zip; download it again")
    else:
        return [RawFile(path)]
    if required and not found:
        shown = ", ".join(listing[:10]) or "no files"
        raise BachError(f"the {kind} {path} has no file {pattern}; it has {shown}{' …' if len(listing) > 10 else ''}")
    if len(found) > 1 and "*" not in pattern:
        several = ", ".join(str(raw.path.relative_to(path)) if not raw.member else raw.label for raw in found)
        raise BachError(f"{path} has more than one {pattern}: {several}; pass the path of one of them")
    return sorted(found, key=lambda raw: [int(x) if x.isdigit() else x for x in re.split(r"(\d+)", raw.label)])


def _called(name: str, pattern: str) -> bool:
    return fnmatch.fnmatch(name, pattern) or fnmatch.fnmatch(name, pattern + ".gz")


def beside(raw: RawFile, pattern: str) -> RawFile | None:
    """The file that matches `pattern` beside `raw`: in the same zip, else in the same folder."""
    if raw.member:
        found = find_raw(raw.path, pattern, required=False)
    else:
        found = [RawFile(p) for p in sorted(raw.path.parent.iterdir()) if p.is_file() and _called(p.name, pattern)]
    return found[0] if found else None


def as_plain(raw: RawFile, work: Path, encoding: str = "utf-8") -> Path:
    """A plain UTF-8 file with the content of `raw`: the file itself if it is one, else a copy in the folder `work`."""
    try:
        "".encode(encoding)  # hex and rot13 are codecs, but not of text
        decoder = codecs.getincrementaldecoder(encoding)()
    except (LookupError, ValueError):
        raise BachError(
            f"encoding={encoding!r} is unknown to Python as a text encoding; examples are 'latin-1' and 'cp1252'"
        ) from None
    utf8 = codecs.lookup(encoding).name == "utf-8"
    if utf8 and not raw.member and not is_gzip(raw.path):
        return raw.path
    work.mkdir(parents=True, exist_ok=True)
    copy = work / f"{short_hash([str(raw.path), raw.member])}.plain"  # a member's own name may be too long
    with raw.open() as source, copy.open("wb") as target:
        if utf8:
            shutil.copyfileobj(source, target, CHUNK)
            return copy
        try:
            while chunk := source.read(CHUNK):
                target.write(decoder.decode(chunk).encode())
            target.write(decoder.decode(b"", final=True).encode())
        except UnicodeError as error:
            reason = getattr(error, "reason", error)
            raise BachError(f"{raw.label} is not {encoding}: {reason}; pass another encoding=") from None
    return copy


def fingerprint(raw: RawFile) -> dict[str, str | int]:
    """Name, size and SHA-256 of the file that the user gave (of the zip, for a member of a zip)."""
    return {"name": raw.path.name, "bytes": raw.path.stat().st_size, "sha256": file_hash(raw.path)}
