"""A slate: the items of a request with their scores, the share of each head, and whether it is proved exact."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from bachlib import BachError


@dataclass(frozen=True, eq=False)
class Slate:
    """The first K items of B requests."""

    items: Int[np.ndarray, "B K"]
    scores: Float[np.ndarray, "B K"]  # log m(i | u), or the best head's cosine
    head_share: Float[np.ndarray, "B K k"]  # the share of an item's score that each head gives
    pi: Float[np.ndarray, "B k"]  # the weights after steering
    certified: Bool[np.ndarray, " B"]  # proved: exactly the K best, in order
    exact_if_lists_are: Bool[np.ndarray, " B"]  # no item outside the lists is better; lists of an index may miss some
    strategy: str
    looked_at: Int[np.ndarray, " B"]  # number of items: all, those of the lists, or rows of the codebook
    raw_ids: np.ndarray | None = None  # (B, K) the items' ids in the log, if the retriever knows them

    def __len__(self) -> int:
        return len(self.items)

    def take(self, places: Int[np.ndarray, "B m"], still_proved: bool = False) -> Slate:
        """The items at these places, as a re-ranking returns them; the proof holds only if `still_proved`."""
        at, K = np.asarray(places), self.items.shape[1]
        if at.ndim != 2 or len(at) != len(self) or at.dtype.kind not in "iu" or not ((at >= 0) & (at < K)).all():
            raise BachError(f"places should be ({len(self)}, m) numbers 0 … {K - 1}, a row per request; got {at!r:.60}")
        rows = np.arange(len(self))[:, None]
        of_items = ("items", "scores", "head_share", *["raw_ids"] * (self.raw_ids is not None))
        kept = {name: getattr(self, name)[rows, at] for name in of_items}
        proof = {name: getattr(self, name) & still_proved for name in ("certified", "exact_if_lists_are")}
        return replace(self, **kept, **proof)

    def heads(self, row: int = 0) -> dict[int, int]:
        """Item → the head (from 0) with the largest share, of one request."""
        return dict(zip(self.items[row].tolist(), self.head_share[row].argmax(1).tolist(), strict=True))

    def table(self, row: int = 0, items: pd.DataFrame | None = None) -> pd.DataFrame:
        """One request's slate to read: number and raw id of the item, score, the head (from 0) with the largest share,
        titles of `items`.
        """
        share, rank = self.head_share[row], pd.RangeIndex(1, self.items.shape[1] + 1, name="rank")
        made = {"score": self.scores[row], "head": share.argmax(1), "share": share.max(1)}
        if self.raw_ids is not None:
            made = {"raw_id": self.raw_ids[row], **made}
        elif items is not None and "raw_id" in items:
            made = {"raw_id": items["raw_id"].reindex(self.items[row]).to_numpy(), **made}
        table = pd.DataFrame({"item": self.items[row], **made}, index=rank)
        if items is None:
            return table
        said = items.reindex(self.items[row])  # items that were added later have no row
        genres = [", ".join(own) if isinstance(own, list | np.ndarray) else "" for own in said["genres"]]
        return table.assign(title=said["title"].to_numpy(), genres=genres)


def found_of(wanted: Int[np.ndarray, "B K"], found: Int[np.ndarray, "B K"]) -> float:
    """The share of the wanted items that were found."""
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(wanted, found, strict=True)]))


def joined(parts: list[Slate]) -> Slate:
    """Slates of one strategy as one."""
    arrays = [f.name for f in fields(Slate) if f.name != "strategy" and getattr(parts[0], f.name) is not None]
    return replace(parts[0], **{name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays})
