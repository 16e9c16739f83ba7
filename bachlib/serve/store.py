"""An index on disk: generations of files, and a pointer to the current one. Needs no torch.

    CURRENT             name of the current generation and checksum of its meta.json, replaced in one rename
    gen-000007/         meta.json (strategy, settings, hash of the model, checksums) and the arrays, memory-mapped;
                        labels.parquet: raw ids, genres and titles of all known items; model.safetensors: what rebuilds
                        the user side. Arrays that grow with the items have room for more behind them, so that the first
                        change after loading need not copy them

A new generation is written beside the old one, then CURRENT is replaced. A process that has the old one open keeps it,
even after its files were removed; a process that opens the folder finds either the old or the new one, complete.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bachlib import BachError
from bachlib.files import canonical_json, clear_errors, only_one, reserve, whole_folder, write_text
from bachlib.reading import expect, plain_name, read_array
from bachlib.serve.catalogue import Catalogue, Labels
from bachlib.serve.codebook import CodebookArrays, CodebookLists
from bachlib.serve.exact import Coarse
from bachlib.serve.rows import first_of
from bachlib.serve.slate import COLUMNS

FORMAT, READ = 4, (1, 2, 3, 4)  # format 1 has no labels, 2 no removed items that keep their places, 3 no room
GROWING = ("vectors", "tokens", "items", "density")
LABELS = "labels.parquet"
GENERATION = re.compile(r"gen-\d{6,}")
_AGAIN = "write it again with retriever.save"


def model_hash(model: Any) -> str:
    """Hash of a model's configuration and all its weights."""
    digest = hashlib.sha256(canonical_json(getattr(model, "config", {})).encode())
    for name, value in sorted(model.state_dict().items()):
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(np.ascontiguousarray(value.detach().cpu().numpy()).tobytes())
    return digest.hexdigest()


def write(
    folder: Path, catalogue: Catalogue, about: dict[str, Any], also: Callable[[Path], None] = lambda new: None
) -> Path:
    """Write a new generation, then the pointer to it; remove all older ones but the last. `also` adds files to it."""
    if folder.exists() and not folder.is_dir():
        raise BachError(f"{folder} is a file; an index is a folder")
    with only_one(folder.resolve()), clear_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        there = sorted(path.name for path in folder.glob("gen-*") if GENERATION.fullmatch(path.name))
        name = f"gen-{int(there[-1][4:]) + 1 if there else 1:06d}"
        with whole_folder(folder / name) as new:
            arrays = {"vectors": catalogue.vectors, "numbers": catalogue.numbers}
            own = {"tokens": catalogue.tokens, "items": catalogue.items}  # most often the vectors themselves
            arrays |= {part: array for part, array in own.items() if array is not catalogue.vectors}
            if len(catalogue.gone):
                arrays["gone"] = catalogue.gone
            if catalogue.codebook is not None:
                arrays |= {part: array for part, array in catalogue.codebook._asdict().items() if part != "items"}
            for part, array in arrays.items():
                room = len(array) // 8 + 8 if part in GROWING else 0
                shape = (len(array) + room, *array.shape[1:])
                mapped = np.lib.format.open_memmap(new / f"{part}.npy", "w+", array.dtype, shape)
                reserve(new / f"{part}.npy")
                mapped[: len(array)] = array
                mapped.flush()
            if catalogue.index is not None:
                catalogue.index.save(new / "neighbours.faiss")
            if labels := catalogue.labels.items():
                _write_labels(new / LABELS, labels)
            also(new)
            rows = {part: len(array) for part, array in arrays.items() if part in GROWING}
            files = {path.name: {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in new.iterdir()}
            meta = canonical_json({"format": FORMAT, **about, "files": files, "rows": rows})
            (new / "meta.json").write_text(meta, encoding="utf-8")
        write_text(folder / "CURRENT", f"{name} {_sha256(folder / name / 'meta.json')}\n")
        for old in there[:-1]:
            shutil.rmtree(folder / old, ignore_errors=True)
    return folder


def read(
    folder: Path, verify: bool = True, also: Callable[[Path], Any] = lambda generation: None
) -> tuple[Catalogue, dict[str, Any], Any]:
    """(the memory-mapped catalogue, meta.json, what `also` reads of the same generation).

    Without `verify` a changed file of the same size is not detected.
    """
    if not (folder / "CURRENT").is_file():
        raise BachError(f"{folder} is not an index (it has no CURRENT); write one with retriever.save")
    while True:
        current = (folder / "CURRENT").read_bytes()
        try:
            return _read(folder, current, verify, also)
        except Exception as error:  # readers of damaged files raise errors of every kind
            if (folder / "CURRENT").read_bytes() == current:  # else it was replaced and removed while we read
                if isinstance(error, BachError):
                    raise
                raise BachError(f"{folder} is damaged ({type(error).__name__}: {error}); {_AGAIN}") from None


def _read(
    folder: Path, current: bytes, verify: bool, also: Callable[[Path], Any]
) -> tuple[Catalogue, dict[str, Any], Any]:
    name, checksum = current.decode().split()
    where = folder / plain_name(name)
    if _sha256(where / "meta.json") != checksum:
        raise BachError(f"{where / 'meta.json'} is damaged: its checksum is another; {_AGAIN}")
    about = json.loads((where / "meta.json").read_text(encoding="utf-8"))
    if about["format"] not in READ:
        known = ", ".join(map(str, READ))
        raise BachError(f"{where} has format {about['format']}, this version reads {known}; save it again")
    expect(about, {"strategy": str, "rule": str, "settings": dict, "model": str, "why": str})
    for name, file in about["files"].items():
        plain_name(name)
        if (size := (where / name).stat().st_size) != file["bytes"]:
            raise BachError(f"{where / name} is damaged: {size:,} bytes instead of {file['bytes']:,}; {_AGAIN}")
        if verify and _sha256(where / name) != file["sha256"]:
            raise BachError(f"{where / name} is damaged: its checksum is another; {_AGAIN}")
    arrays = [where / name for name in about["files"] if name.endswith(".npy")]
    mapped = {path.stem: read_array(path, "c") for path in arrays}  # copy on write
    parts = {part: np.asarray(array) for part, array in mapped.items()}
    parts |= {part: first_of(mapped[part], n) for part, n in about.get("rows", {}).items()}
    vectors = parts["vectors"]
    catalogue = Catalogue(vectors, parts.get("tokens", vectors), parts["numbers"], parts.get("items", vectors))
    catalogue = catalogue._replace(gone=parts.get("gone", catalogue.gone))
    if "prototypes" in parts:
        parts["items"], kind = catalogue.items, CodebookLists if "entries" in parts else CodebookArrays
        catalogue = catalogue._replace(codebook=kind(*(parts[name] for name in kind._fields)))
    if about["strategy"] == "two-step":
        from bachlib.serve.twostep import Neighbours

        index = Neighbours.load(where / "neighbours.faiss", about["settings"]["index"])
        catalogue = catalogue._replace(index=index.changed(catalogue.items, catalogue.gone) or index)
    if "exact" in (about["strategy"], about["settings"]["lists"] if about["strategy"] == "two-step" else None):
        catalogue = catalogue._replace(coarse=Coarse.of(catalogue.items))
    if LABELS in about["files"]:
        catalogue = catalogue._replace(labels=_read_labels(where / LABELS))
    _check(catalogue)
    return catalogue, about, also(where)


def _check(c: Catalogue) -> None:
    """Raise an error unless the arrays fit together: compiled loops look up rows by these numbers, unchecked."""
    N, n, d = len(c.vectors), len(c.numbers), c.vectors.shape[1]
    fits = all(x.dtype == np.float32 and x.ndim == 2 for x in (c.vectors, c.tokens, c.items))
    fits &= len(c.tokens) == N and c.items.shape == (n, d) and n > 0
    for places, below in ((c.numbers, N), (c.gone, n)):
        rising = places.ndim == 1 and places.dtype.kind == "i" and (np.diff(places) > 0).all()
        fits &= bool(rising) and (not len(places) or (places[0] >= 0 and places[-1] < below))
    for _, own in c.labels.items():
        fits &= len(own) <= N
    if c.index is not None:
        fits &= c.index.on_cpu.d == d and c.index.on_cpu.ntotal <= n
    if (own := c.codebook) is not None:
        k = len(own.prototypes)
        fits &= own.prototypes.shape == (k, d) and own.kappa.shape == own.log_c.shape == own.peak.shape == (k,)
        fits &= own.lists.ndim == 2 and len(own.lists) == k and own.lists.dtype.kind == "i"
        fits &= own.lists.min(initial=0) >= 0 and own.lists.max(initial=0) < n
        fits &= own.entries.shape == own.lists.shape if hasattr(own, "entries") else own.density.shape == (n, k)
    if not fits:
        raise ValueError("its arrays do not fit together")


def _write_labels(path: Path, labels: list[tuple[str, list]]) -> None:
    import pyarrow as pa  # late: it takes as long as all the rest of a small index
    import pyarrow.parquet as pq

    columns = {}
    for name, own in labels:
        try:
            columns[COLUMNS[name]] = pa.array([list(of) for of in own] if name == "genres" else own)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:  # a number among texts
            told = f"{COLUMNS[name]} of the items cannot be saved: they should all be of one kind ({error})"
            raise BachError(told) from None
    pq.write_table(pa.table(columns), path)


def _read_labels(path: Path) -> Labels:
    import pyarrow.parquet as pq

    with pq.ParquetFile(path) as file:  # `read_table` would import pandas
        there = file.read().to_pydict()
    return Labels(**{name: there[column] for name, column in COLUMNS.items() if column in there})


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
