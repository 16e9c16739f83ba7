"""The training windows (appendix A) and their sampler.

A window is 50 items of a training prefix that predict one of the next 10, with stride 1: a user with L ≥ 80 items has
L − 79 windows, and a shorter one a single window, padded on the left with −1. Windows are index arithmetic on the flat
array of all sequences and are never stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from bachlib import BachError
from bachlib.files import differences
from bachlib.params import N_HIST, N_NEXT, N_TEST, N_VALID

if TYPE_CHECKING:
    from bachlib.data.dataset import Dataset


def windows_per_user(lengths: Int[np.ndarray, " n"], n_hist: int = N_HIST) -> Int[np.ndarray, " n"]:
    """L − 79 for the paper's 50 + 10; 1 for a sequence that is too short for a full window."""
    return windows_of_prefixes(np.asarray(lengths) - N_VALID - N_TEST, n_hist)


def windows_of_prefixes(prefix: Int[np.ndarray, " n"], n_hist: int = N_HIST) -> Int[np.ndarray, " n"]:
    """The windows of training prefixes of these lengths; none for a prefix of ten items or fewer."""
    return np.where(prefix > N_NEXT, np.maximum(prefix - n_hist - N_NEXT + 1, 1), 0)


class Batch(NamedTuple):
    user: np.ndarray  # (B,)
    history: np.ndarray  # (B, n_hist) item ids, −1 pads on the left
    positive: np.ndarray  # (B,) one of the next ten


class ContextBatch(NamedTuple):
    """A batch of a data set with a context."""

    user: np.ndarray
    history: np.ndarray
    positive: np.ndarray
    context: np.ndarray  # (B, c) of the first of the next ten: what is known when the request is made


class TargetsBatch(NamedTuple):
    """A batch of `Windows(…, following=True)`."""

    user: np.ndarray
    history: np.ndarray
    positive: np.ndarray
    following: np.ndarray  # (B, 10) the next ten, of which `positive` is one
    context: np.ndarray | None


class Windows:
    """Sampler of the training windows: every epoch shuffles them and draws one target of the next ten for each.

    Everything an epoch draws comes from (seed, epoch), so the position is two numbers: a new sampler that loads a
    `state_dict()` continues with the next batch. `following` adds all next ten items to a batch; it changes no draw.
    """

    def __init__(
        self, dataset: Dataset, batch_size: int = 512, seed: int = 0, n_hist: int = N_HIST, following: bool = False
    ):
        if min(batch_size, n_hist) < 1:
            raise BachError(f"batch_size and n_hist should be at least 1; got {batch_size} and {n_hist}")
        self.dataset, self.batch_size, self.seed, self.n_hist = dataset, batch_size, seed, n_hist
        self.following = following
        self.counts = windows_of_prefixes(dataset.begins["valid"], n_hist)
        if dataset.cold is not None:
            self.counts[dataset.cold] = 0
        self.ends = np.cumsum(self.counts)
        self.epoch = self.step = 0
        if not len(self):
            raise BachError(f"{dataset!r} has no sequence long enough for a window of {n_hist} + {N_NEXT} items")

    def __len__(self) -> int:
        """The number of windows."""
        return int(self.ends[-1])

    @property
    def steps_per_epoch(self) -> int:
        """Only full batches count (or a single short one). Which windows are left out changes from epoch to epoch."""
        return max(1, len(self) // self.batch_size)

    def window(self, index: Int[np.ndarray, " B"]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(user (B,), history (B, n_hist), next items (B, 10)) of the windows with these numbers."""
        user, end = self._requests(index)
        history = self.dataset.items_before(user, end, self.n_hist)
        following = (self.dataset.offsets[user] + end)[:, None] + np.arange(N_NEXT)
        return user, history, self.dataset.sequences[following].astype(np.int64)

    def _requests(self, index: Int[np.ndarray, " B"]) -> tuple[np.ndarray, np.ndarray]:
        """(user, the position where the history ends and the next items begin) of the windows with these numbers."""
        user = np.searchsorted(self.ends, index, side="right")
        first = index - self.ends[user] + self.counts[user]  # number of the window among the windows of its user
        prefix = self.dataset.begins["valid"][user]
        return user, first + np.minimum(self.n_hist, prefix - N_NEXT)

    def target_shares(self) -> Float[np.ndarray, " n_items"]:
        """p(j): how often the target of a window is item j, over all windows and what each of them may draw."""
        some = np.flatnonzero(self.counts)
        user, end = self._requests(self.ends[some] - self.counts[some])
        first = self.dataset.offsets[user] + end  # of the next ten of a user's first window
        starts = np.zeros(len(self.dataset.sequences) + 1, np.int32)
        starts[first] = 1
        starts[first + self.counts[some]] = -1
        windows = starts.cumsum(dtype=np.int32).cumsum()  # up to each position, how many windows' next ten have begun
        windows[N_NEXT:] -= windows[:-N_NEXT].copy()  # and not ended
        return np.bincount(self.dataset.sequences, windows[:-1], self.dataset.n_items) / windows.sum()

    def __iter__(self) -> Iterator[Batch | ContextBatch | TargetsBatch]:
        """The rest of the current epoch. The position moves with every batch, after the last one to the next epoch."""
        epoch, steps = self.epoch, self.steps_per_epoch
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self)).astype(np.int64 if len(self) > 2**31 else np.int32)
        target = rng.integers(N_NEXT, size=len(self), dtype=np.uint16)
        for step in range(self.step, steps):
            self.epoch, self.step = (epoch, step + 1) if step + 1 < steps else (epoch + 1, 0)
            index = order[step * self.batch_size : (step + 1) * self.batch_size].astype(np.int64)
            user, history, following = self.window(index)
            batch = Batch(user, history, following[np.arange(len(index)), target[index]])
            context = None if self.dataset.context is None else self.dataset.context_at(*self._requests(index))
            if self.following:
                yield TargetsBatch(*batch, following, context)
            else:
                yield batch if context is None else ContextBatch(*batch, context)

    def state_dict(self) -> dict[str, int | str]:
        return {"epoch": self.epoch, "step": self.step, **self._setting()}

    def load_state_dict(self, state: dict[str, int | str]) -> None:
        setting = self._setting()
        if different := differences(setting, {name: state.get(name) for name in setting}, "here", "there"):
            raise BachError(f"this position belongs to another sampler: {'; '.join(different)}")
        if not (state.get("epoch", -1) >= 0 and 0 <= state.get("step", -1) < self.steps_per_epoch):
            place = f"epoch {state.get('epoch')}, step {state.get('step')}"
            raise BachError(f"{place} does not exist: an epoch has {self.steps_per_epoch} steps, counted from 0")
        self.epoch, self.step = state["epoch"], state["step"]

    def _setting(self) -> dict[str, int | str]:
        setting = {name: getattr(self, name) for name in ("batch_size", "seed", "n_hist")}
        return setting | {"n_next": N_NEXT, "data": self.dataset.meta["content_hash"]}
