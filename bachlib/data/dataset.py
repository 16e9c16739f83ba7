"""A prepared data set: sequences that load memory-mapped, and their chronological split.

Appendix A: a sequence of L items is a training prefix and the last 20 items, 10 for validation and 10 for test.
"""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Int
from scipy import sparse

from bachlib import BachError
from bachlib.data.windows import windows_per_user
from bachlib.params import N_HIST, N_TEST, N_VALID

FORMAT = 1  # of the prepared folder; a data set of another format is prepared anew
FILES = {"sequences": "sequences.npy", "offsets": "offsets.npy", "users": "users.parquet", "items": "items.parquet"}
PAD = -1

Split = Literal["valid", "test"]


class Dataset:
    """What `prepare` made. `sequence(u)` are the item ids of user u in the order of time."""

    cold: Int[np.ndarray, " U"] | None = None  # users nobody trains on; only `strict` has them

    def __init__(self, folder: Path, meta: dict[str, Any], sequences: np.ndarray, offsets: np.ndarray):
        self.folder, self.meta, self.sequences, self.offsets = folder, meta, sequences, offsets

    @classmethod
    def load(cls, folder: str | Path) -> Dataset:
        folder = Path(folder)
        if not (folder / "meta.json").exists():
            raise BachError(f"{folder} is not a prepared data set (it has no meta.json); make one with bach prepare")
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        except ValueError:
            raise BachError(f"{folder / 'meta.json'} is damaged; prepare the data set anew") from None
        if meta.get("format") != FORMAT:
            raise BachError(f"{folder} has format {meta.get('format')}, this version reads {FORMAT}; prepare it anew")
        return cls(folder, meta, *(np.load(folder / FILES[name], mmap_mode="r") for name in ("sequences", "offsets")))

    def strict(self, share: float = 0.1, seed: int = 0) -> Dataset:
        """The same data with that share of the users, drawn with `seed`, cold.

        A cold user gives no training window and is in no PureSVD table, popularity count or validation AUPRC;
        `evaluate` looks at the cold users only.
        """
        if self.cold is not None:
            raise BachError("this data set has cold users already; take strict() of the whole one")
        n = round(share * self.n_users) if 0 < share < 1 else 0
        if not 0 < n < self.n_users:
            raise BachError(f"share={share}: should be between 0 and 1 and leave some users cold and some not")
        drawn = np.sort(np.random.default_rng([seed, n]).choice(self.n_users, n, replace=False))
        strict = {"share": share, "seed": seed}
        meta = self.meta | {"content_hash": f"{self.meta['content_hash']}-cold-{n}-{seed}", "strict": strict}
        view = Dataset(self.folder, meta, self.sequences, self.offsets)
        view.cold = drawn
        view.meta["counts"] = self.meta["counts"] | {"windows": int(windows_per_user(self.lengths)[view.warm].sum())}
        return view

    @cached_property
    def warm(self) -> Int[np.ndarray, " U"]:
        """Users that are trained on: all but the cold ones."""
        return np.setdiff1d(np.arange(self.n_users), [] if self.cold is None else self.cold)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Dataset) and hash(self) == hash(other)

    def __hash__(self) -> int:
        return hash((self.folder, self.meta["content_hash"]))

    @property
    def n_users(self) -> int:
        return len(self.offsets) - 1

    @property
    def n_items(self) -> int:
        return self.meta["counts"]["items"]

    @property
    def n_windows(self) -> int:
        return self.meta["counts"]["windows"]

    @cached_property
    def lengths(self) -> Int[np.ndarray, " n_users"]:
        return np.diff(self.offsets)

    @cached_property
    def users(self) -> pd.DataFrame:
        """user (= row), raw_id, n_items."""
        return pd.read_parquet(self.folder / FILES["users"])

    @cached_property
    def items(self) -> pd.DataFrame:
        """item (= row), raw_id, n_users who like it, title, genres (a list)."""
        return pd.read_parquet(self.folder / FILES["items"])

    @cached_property
    def truth(self) -> Truth:
        """What was planted, in the ids of this data set; only the planted world has one."""
        if not (self.folder / "truth.npz").exists():
            raise BachError(
                f"{self.folder.name} comes from real data: nobody knows its truth; only source 'planted' has one"
            )
        with np.load(self.folder / "truth.npz") as arrays:
            return Truth(**dict(arrays))

    @cached_property
    def titles(self) -> list[str]:
        """The title of each item; one without a title is called by its number."""
        given = self.items["title"] if "title" in self.items else [None] * self.n_items
        return [f"item {i}" if pd.isna(title) else str(title) for i, title in enumerate(given)]

    def sequence(self, u: int) -> Int[np.ndarray, " L"]:
        self._known([u])
        return self.sequences[self.offsets[u] : self.offsets[u + 1]]

    def split(self, u: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(training prefix, 10 validation items, 10 test items) of one user."""
        return tuple(np.split(self.sequence(u), [-N_VALID - N_TEST, -N_TEST]))

    def history(self, users: Int[np.ndarray, " B"], split: Split, n_hist: int = N_HIST) -> Int[np.ndarray, "B n_hist"]:
        """The last items before the validation or the test items, padded on the left with −1."""
        users = self._known(users)
        return self._before(users, self.lengths[users] - self._held_out(split), n_hist)

    def targets(self, users: Int[np.ndarray, " B"], split: Split) -> Int[np.ndarray, "B 10"]:
        """The validation or the test items."""
        at = self.offsets[self._known(users) + 1] - self._held_out(split)
        return self.sequences[at[:, None] + np.arange(N_VALID if split == "valid" else N_TEST)].astype(np.int64)

    def matrix(self, on: Literal["train", "all"] = "train") -> sparse.csr_matrix:
        """The binary user–item matrix of the training prefixes, or of all liked interactions (n_users, n_items).

        Rows of cold users are empty.
        """
        if on not in ("train", "all"):
            raise BachError(f"on={on!r}: should be 'train' (training prefixes) or 'all' (the paper's literal text)")
        kept = self.lengths - (N_VALID + N_TEST if on == "train" else 0)
        if self.cold is not None:
            kept[self.cold] = 0
        place = np.arange(len(self.sequences)) - np.repeat(self.offsets[:-1], self.lengths)
        inside = place < np.repeat(kept, self.lengths)
        columns = np.asarray(self.sequences)[inside]
        ends = np.concatenate([[0], np.cumsum(kept)])
        shape = (self.n_users, self.n_items)
        return sparse.csr_matrix((np.ones(len(columns), np.float32), columns, ends), shape=shape)

    @property
    def identity(self) -> dict[str, Any]:
        """What a run notes of its data: the folder's name, a hash of the content, and the draw of cold users if any."""
        return {"name": self.folder.name} | {k: self.meta[k] for k in ("content_hash", "strict") if k in self.meta}

    def check_same(self, content_hash: str | None, what: str) -> None:
        """Stop unless something was made with just this data, cold users and all; None: nobody knows."""
        if content_hash not in (None, self.meta["content_hash"]):
            raise BachError(
                f"{what} on other data than {self!r}: other items, other test items, or users that should be cold"
            )

    def _known(self, users: Int[np.ndarray, " B"]) -> Int[np.ndarray, " B"]:
        users = np.asarray(users)
        if len(wrong := users[(users < 0) | (users >= self.n_users)]):
            raise BachError(f"there is no user {wrong[0]}: users are 0 … {self.n_users - 1}")
        return users

    def _before(self, users: np.ndarray, end: np.ndarray, n_hist: int) -> np.ndarray:
        """The n_hist items before place `end` of each user's sequence, −1 where there is none."""
        place = end[:, None] + np.arange(-n_hist, 0)
        flat = self.offsets[users][:, None] + place
        if place.min(initial=0) >= 0:
            return self.sequences[flat].astype(np.int64)
        return np.where(place >= 0, self.sequences[np.maximum(flat, 0)], PAD).astype(np.int64)

    @staticmethod
    def _held_out(split: Split) -> int:
        held_out = {"valid": N_VALID + N_TEST, "test": N_TEST}
        if split not in held_out:
            raise BachError(f"split={split!r}: should be 'valid' or 'test'")
        return held_out[split]

    def __repr__(self) -> str:
        cold = "" if self.cold is None else f" ({len(self.cold):,} cold)"
        counts = f"{self.n_users:,} users{cold}, {self.n_items:,} items, {self.n_windows:,} windows"
        return f"Dataset({self.folder.name}: {counts})"


class Truth(NamedTuple):
    """What the planted world knows, in the ids of the data set (m interests in D dimensions)."""

    directions: np.ndarray  # (m, D) interest directions, unit
    genres: np.ndarray  # (m,) their names
    items: np.ndarray  # (n_items, D) item vectors, unit
    item_interest: np.ndarray  # (n_items,) the interest an item belongs to, and so of every liked event with it
    popularity: np.ndarray  # (n_items,) Zipf weight of an item inside its interest
    pi: np.ndarray  # (n_users, m) π_u
    tastes: np.ndarray  # (n_users, m, D) the user's own direction inside each interest, unit
