"""A prepared data set: memory-mapped sequences and their chronological split.

Appendix A: a sequence of L items is a training prefix followed by 10 validation items and 10 test items. With the
global split every sequence is cut at the same two dates. The training prefix is what comes before the first, and the
held-out items are the first ten, or fewer, of the validation and of the test period. `begins` holds the places where
these periods begin in each sequence; all code that needs a split asks for it here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
from jaxtyping import Float, Int
from numpy.typing import ArrayLike
from scipy import sparse

from bachlib import BachError
from bachlib.data.windows import windows_of_prefixes
from bachlib.files import file_hash, read_json
from bachlib.params import N_HIST, N_TEST, N_VALID
from bachlib.reading import expect, numbers_of, plain, read_array, read_arrays, read_table, reading

FORMAT = 2  # of the prepared folder; a data set of another format has to be prepared again
FILES = {"sequences": "sequences.npy", "offsets": "offsets.npy", "users": "users.parquet", "items": "items.parquet"}
BEGINS = "begins.npy"  # of the validation and the test period in each sequence; only a global split has this file
HASHED = 1 << 27  # bytes of a data set: of a larger one only counts and ranges are checked, not every byte
AGAIN = "prepare the data set again"
PAD = -1
UNSEEN = re.compile("[\0-\b\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")

Split = Literal["valid", "test"]
Users = Int[np.ndarray, " B"]
_checked: set[tuple] = set()  # data sets that this process has found to be whole


def as_text(value: Any) -> str:
    """A text without the characters that control a terminal or the direction of all text behind them."""
    return UNSEEN.sub("", str(value))


class Dataset:
    """The result of `prepare`. `sequence(u)` holds the item ids of user u in the order of time."""

    cold: Int[np.ndarray, " U"] | None = None  # users that are not trained on; only `strict()` sets them
    context: Float[np.ndarray, "rows c"] | None = None  # a row per user or per event; only `with_context()` sets it

    def __init__(self, folder: Path, meta: dict[str, Any], sequences: np.ndarray, offsets: np.ndarray):
        self.folder, self.meta, self.sequences, self.offsets = folder, meta, sequences, offsets
        self.n_users, self.lengths = len(offsets) - 1, np.diff(offsets)
        self.begins = {"valid": self.lengths - N_VALID - N_TEST, "test": self.lengths - N_TEST}
        if (folder / BEGINS).exists():
            self.begins = dict(zip(self.begins, np.array(read_array(folder / BEGINS)), strict=True))
        self.n_items, self.n_windows = meta["counts"]["items"], meta["counts"]["windows"]

    @classmethod
    def load(cls, folder: str | Path) -> Dataset:
        folder = Path(folder)
        if not (folder / "meta.json").exists():
            raise BachError(f"{folder} is not a prepared data set (it has no meta.json); create one with bach prepare")
        if not (meta := read_json(folder / "meta.json")):
            raise BachError(f"{folder / 'meta.json'} is damaged; {AGAIN}")
        if meta.get("format") != FORMAT:
            old = f"{folder} has format {meta.get('format')}, this version reads {FORMAT}"
            raise BachError(f"{old}; prepare it again, with the source and the params in its meta.json")
        with reading(folder, AGAIN):
            made = cls(folder, meta, *(read_array(folder / FILES[name]) for name in ("sequences", "offsets")))
            made._check()
        return made

    def _check(self) -> None:
        """Raise an error unless all files fit together and, if they are not too large, are those that were written."""
        paths = [self.folder / name for name in (*FILES.values(), BEGINS) if (self.folder / name).exists()]
        stats = [path.stat() for path in paths]
        seen = str(self.folder.resolve()), repr(self.meta), *((s.st_ino, s.st_size, s.st_mtime_ns) for s in stats)
        if seen in _checked:
            return
        expect(self.meta, {"content_hash": str, "counts": {"items": int, "windows": int}})
        flat, ends, begins = self.sequences, self.offsets, np.stack([*self.begins.values(), self.lengths])
        whole = all(array.ndim == 1 and array.dtype.kind == "i" for array in (flat, ends)) and begins.dtype.kind == "i"
        if not whole or not len(flat) or ends[0] != 0 or ends[-1] != len(flat) or (np.diff(begins, axis=0) < 0).any():
            raise ValueError("the sequences do not end where the offsets say")
        if begins.min() < 0 or flat.min() < 0 or flat.max() >= self.n_items:
            raise ValueError("a sequence holds an item that does not exist")
        rows = [pq.read_metadata(self.folder / FILES[name]).num_rows for name in ("users", "items")]
        windows = int(windows_of_prefixes(self.begins["valid"]).sum())
        found = dict(zip(("users", "items", "events", "windows"), (*rows, len(flat), windows), strict=True))
        if found != found | self.meta["counts"] or self.n_users != rows[0]:
            raise ValueError(f"its files have {found}, meta.json says {self.meta['counts']}")
        if sum(s.st_size for s in stats) <= HASHED and content_hash(self.folder) != self.meta["content_hash"]:
            raise ValueError("the content of its files is not what was written")
        _checked.add(seen)

    def strict(self, share: float = 0.1, seed: int = 0) -> Dataset:
        """The same data with a share of cold users, drawn with `seed`: they are left out of the training windows, the
        PureSVD table, popularity counts and validation AUPRC. `evaluate` measures the cold users only."""
        if self.cold is not None:
            raise BachError("this data set already has cold users; call strict() on the whole data set")
        n = round(share * self.n_users) if 0 < share < 1 else 0
        if not 0 < n < self.n_users:
            raise BachError(f"share={share}: should be between 0 and 1, with at least one cold and one other user")
        drawn = np.sort(np.random.default_rng([seed, n]).choice(self.n_users, n, replace=False))
        counts = {"windows": self.n_windows - int(windows_of_prefixes(self.begins["valid"][drawn]).sum())}
        meta = self.meta | {"strict": {"share": share, "seed": seed}, "counts": self.meta["counts"] | counts}
        meta["content_hash"] += f"-cold-{n}-{seed}"
        view = Dataset(self.folder, meta, self.sequences, self.offsets)
        view.cold, view.context, view.begins = drawn, self.context, self.begins
        return view

    def with_context(self, context: ArrayLike) -> Dataset:
        """The same data with a context that models may read (`build(…, context="gate")`), numbers of about unit size.

        (n_users, c): of each user. (len(sequences), c): of each request; row `offsets[u] + t` holds what was known when
        user u asked for item `sequence(u)[t]`. A window then has the context of the first of its next items, and an
        evaluation that of the first held-out item. The array is copied.
        """
        if self.cold is not None or self.context is not None:
            raise BachError("call with_context() once, and before strict()")
        try:
            kept = np.array(context, np.float32)
        except (TypeError, ValueError):
            raise BachError(f"the context should be an array of numbers; got {context!r:.60}") from None
        rows = {self.n_users: "user", len(self.sequences): "event"}
        if kept.ndim != 2 or len(kept) not in rows or not kept.shape[1]:
            wanted = (
                f"a row for each of {self.n_users:,} users or of {len(self.sequences):,} events, with c ≥ 1 columns"
            )
            raise BachError(f"the context should be (rows, c) with {wanted}; got shape {kept.shape}")
        if len(wrong := np.argwhere(~np.isfinite(kept))):
            row, column = wrong[0]
            raise BachError(f"the context should be finite float32 numbers; row {row}, column {column} is not")
        told = {"width": kept.shape[1], "per": rows[len(kept)], "hash": hashlib.sha256(kept).hexdigest()[:16]}
        meta = self.meta | {"context": told, "content_hash": f"{self.meta['content_hash']}-context-{told['hash']}"}
        view = Dataset(self.folder, meta, self.sequences, self.offsets)
        view.context = kept
        return view

    @cached_property
    def warm(self) -> Int[np.ndarray, " U"]:
        """The users that are trained on: all but the cold ones."""
        return np.setdiff1d(np.arange(self.n_users), [] if self.cold is None else self.cold)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dataset) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.folder, self.meta["content_hash"]))

    @cached_property
    def users(self) -> pd.DataFrame:
        """Columns user (= row), raw_id, n_items."""
        return read_table(self.folder / FILES["users"])

    @cached_property
    def items(self) -> pd.DataFrame:
        """Columns item (= row), raw_id, n_users of the data set who like it (perhaps 0), title, genres (a list)."""
        return read_table(self.folder / FILES["items"])

    @cached_property
    def _number(self) -> dict[Any, int]:
        return {raw: item for item, raw in enumerate(plain(self.items["raw_id"]))}

    def number_of(self, raw: Any) -> Any:
        """The number of an item by its id in the log, or an array of numbers for a list of ids."""
        alone = isinstance(raw, str | bytes) or not isinstance(raw, Iterable)
        numbers = numbers_of("number_of", [raw] if alone else raw, self._number)
        return int(numbers[0]) if alone else numbers

    def raw(self, numbers: ArrayLike) -> Any:
        """The id in the log of an item number, or an array of ids in the shape of the numbers."""
        numbers = np.asarray(numbers)
        if numbers.dtype.kind not in "iu":
            raise BachError(f"items are whole numbers from 0 to {self.n_items - 1}; got {numbers!r:.60}")
        if len(wrong := numbers[(numbers < 0) | (numbers >= self.n_items)]):
            raise BachError(f"item {wrong[0]} does not exist: items are 0 … {self.n_items - 1}")
        return self.items["raw_id"].to_numpy()[numbers]

    @cached_property
    def truth(self) -> Truth:
        """The planted interests in the ids of this data set; only the planted world has them."""
        if not (self.folder / "truth.npz").exists():
            raise BachError(f"{self.folder.name} has no truth: only the source 'planted' has one")
        return Truth(**read_arrays(self.folder / "truth.npz", Truth._fields))

    @cached_property
    def titles(self) -> list[str]:
        """The title of each item; its raw id if it has none."""
        return [as_text(title) for title in self.items["title"]]

    @cached_property
    def genres(self) -> ItemGenres:
        """The genres and which items have them."""
        exploded = self.items["genres"].explode().dropna()  # a row per item and genre
        codes, names = pd.factorize(exploded, sort=True)
        member = np.zeros((self.n_items, len(names)), np.float32)
        member[exploded.index.to_numpy(), codes] = 1
        return ItemGenres([as_text(name) for name in names], member)

    def sequence(self, u: int) -> Int[np.ndarray, " L"]:
        self.check_users([u])
        return self.sequences[self.offsets[u] : self.offsets[u + 1]]

    def split(self, u: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(training prefix, 10 validation items, 10 test items) of one user; with the global split all items of each
        period."""
        return tuple(np.split(self.sequence(u), [int(begin[u]) for begin in self.begins.values()]))

    def history(self, users: Users, split: Split, n_hist: int = N_HIST) -> Int[np.ndarray, "B n_hist"]:
        """The last items before the validation or the test items, padded on the left with −1."""
        users = self.check_users(users)
        return self.items_before(users, self.end(users, split), n_hist)

    def context_of(self, users: Users, split: Split) -> Float[np.ndarray, "B c"]:
        """The context of the request that is evaluated: that of the first validation or test item."""
        users = self.check_users(users)
        return self.context_at(users, self.end(users, split))

    def context_at(self, users: np.ndarray, end: Int[np.ndarray, " B"]) -> Float[np.ndarray, "B c"]:
        """The context of requests for the items at position `end` of each user's sequence."""
        if self.context is None:
            raise BachError(f"{self!r} has no context: use dataset.with_context(array)")
        return self.context[users if self.meta["context"]["per"] == "user" else self.offsets[users] + end]

    def context_for(self, model: Any, users: Users, split: Split) -> Float[np.ndarray, "B c"] | None:
        """`context_of` if the model reads a context (its `n_context` is not 0), else None."""
        return self.context_of(users, split) if getattr(model, "n_context", 0) else None

    def items_before(self, users: np.ndarray, end: Int[np.ndarray, " B"], n_hist: int) -> Int[np.ndarray, "B n_hist"]:
        """The n_hist items before position `end` of each user's sequence, padded on the left with −1."""
        place = end[:, None] + np.arange(-n_hist, 0)
        flat = self.offsets[users][:, None] + place
        if place.min(initial=0) >= 0:
            return self.sequences[flat].astype(np.int64)
        return np.where(place >= 0, self.sequences[np.maximum(flat, 0)], PAD).astype(np.int64)

    def earlier(self, users: Users, split: Split, last: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(row in `users`, item) for every item a user liked before the held-out items, or only for the `last` ones."""
        end = self.end(self.check_users(users), split)
        n = end if last is None else np.minimum(end, last)
        rows = np.repeat(np.arange(len(users)), n)
        place = np.arange(len(rows)) - np.repeat(np.cumsum(n) - n, n) + np.repeat(end - n, n)
        return rows, np.asarray(self.sequences[self.offsets[users][rows] + place], np.int64)

    def targets(self, users: Users, split: Split) -> Int[np.ndarray, "B 10"]:
        """The validation or the test items: the first ten of the period. A period with fewer is padded with −1."""
        users = self.check_users(users)
        place = self.end(users, split)[:, None] + np.arange(N_VALID if split == "valid" else N_TEST)
        there = place < (self.begins["test"] if split == "valid" else self.lengths)[users][:, None]
        flat = np.where(there, self.offsets[users][:, None] + place, 0)
        return np.where(there, self.sequences[flat], PAD).astype(np.int64)

    def evaluated(self, split: Split) -> Users:
        """The users with held-out items and at least one item before them: with the paper's split all of them."""
        begin = self.end(np.arange(self.n_users), split)
        return np.flatnonzero((begin > 0) & (begin < (self.begins["test"] if split == "valid" else self.lengths)))

    def mean_of_targets(self, rows: Float[np.ndarray, "n f"], users: Users, split: Split) -> Float[np.ndarray, "B f"]:
        """The mean row, for example of genres, of each user's held-out items."""
        there = (items := self.targets(users, split)) >= 0
        return (rows[items] * there[..., None]).sum(1) / np.maximum(there.sum(1, keepdims=True), 1)

    def matrix(self, on: Literal["train", "all"] = "train") -> sparse.csr_matrix:
        """The binary matrix (n_users, n_items) of training prefixes or all liked items; cold users have empty rows."""
        if on not in ("train", "all"):
            raise BachError(f"on={on!r}: should be 'train' (training prefixes) or 'all' (the paper's literal text)")
        kept = (self.begins["valid"] if on == "train" else self.lengths).copy()
        if self.cold is not None:
            kept[self.cold] = 0
        place = np.arange(len(self.sequences)) - np.repeat(self.offsets[:-1], self.lengths)
        inside = place < np.repeat(kept, self.lengths)
        columns = np.asarray(self.sequences)[inside]
        values, ends = np.ones(len(columns), np.float32), np.concatenate([[0], np.cumsum(kept)])
        return sparse.csr_matrix((values, columns, ends), shape=(self.n_users, self.n_items))

    @property
    def identity(self) -> dict[str, Any]:
        """What a run notes of its data: the folder's name, a hash of the content, the draw of cold users, context."""
        noted = ("content_hash", "strict", "context")
        return {"name": self.folder.name} | {key: self.meta[key] for key in noted if key in self.meta}

    def check_same(self, content_hash: str | None, what: str) -> None:
        """Raise unless something was made with exactly this data and these cold users; None: unknown, no error."""
        if content_hash not in (None, self.meta["content_hash"]):
            differ = "the items, the test items, the context or the cold users differ"
            raise BachError(f"{what} on other data than {self!r}: {differ}")

    def check_users(self, users: Users) -> Users:
        """The users as an array; raise if one is not in the data set."""
        users = np.asarray(users)
        if len(wrong := users[(users < 0) | (users >= self.n_users)]):
            raise BachError(f"user {wrong[0]} does not exist: users are 0 … {self.n_users - 1}")
        return users

    def end(self, users: Users, split: Split) -> Int[np.ndarray, " B"]:
        """The number of items before the validation or the test items: the place of the first of them."""
        if split not in self.begins:
            raise BachError(f"split={split!r}: should be 'valid' or 'test'")
        return self.begins[split][users]

    def __repr__(self) -> str:
        cold = "" if self.cold is None else f" ({len(self.cold):,} cold)"
        counts = f"{self.n_users:,} users{cold}, {self.n_items:,} items, {self.n_windows:,} windows"
        context = (
            ", a context of {width} numbers per {per}".format(**self.meta["context"]) if "context" in self.meta else ""
        )
        split = self.meta.get("split", {})
        test = f", {split['users']['test']:,} with test items from {split['from']['test']} on" if split else ""
        return f"Dataset({self.folder.name}: {counts}{test}{context})"


def content_hash(folder: Path) -> str:
    """Of all sequences, users and items: what decides whether two data sets are the same."""
    names = [name for name in (*FILES.values(), BEGINS) if (folder / name).exists()]
    return hashlib.sha256(b"".join(bytes.fromhex(file_hash(folder / name)) for name in names)).hexdigest()


class ItemGenres(NamedTuple):
    """m genres, sorted by name; m = 0 if the data set has none."""

    names: list[str]
    member: Float[np.ndarray, "n_items m"]  # 1 if the item has the genre, else 0


class Truth(NamedTuple):
    """The planted world's m interests in D dimensions, in the ids of the data set."""

    directions: np.ndarray  # (m, D) interest directions, unit
    genres: np.ndarray  # (m,) their names
    items: np.ndarray  # (n_items, D) item vectors, unit
    item_interest: np.ndarray  # (n_items,) the interest of an item and of every liked event with it
    popularity: np.ndarray  # (n_items,) Zipf weight of an item inside its interest
    pi: np.ndarray  # (n_users, m) π_u
    tastes: np.ndarray  # (n_users, m, D) the user's own direction inside each interest, unit
