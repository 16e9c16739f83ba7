"""A slate: the items of a request with their scores, the share of each head, and whether it is proved exact."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, Int

from bachlib import BachError

if TYPE_CHECKING:
    import pandas as pd

    from bachlib.serve.catalogue import Labels


COLUMNS = {"raw_ids": "raw_id", "titles": "title", "genres": "genres"}  # of a table, in place of `Labels`


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
    labels: Labels | None = field(default=None, repr=False)  # what the log calls the items, if the retriever knows it

    @property
    def raw_ids(self) -> np.ndarray | None:
        """(B, K) the items' ids in the log; None if they are not known."""
        return self.labels.raw_of(self.items) if self.labels else None

    def __len__(self) -> int:
        return len(self.items)

    def take(self, places: Int[np.ndarray, "B m"], still_proved: bool = False) -> Slate:
        """The items at these places, as a re-ranking returns them; the proof holds only if `still_proved`."""
        at, K = np.asarray(places), self.items.shape[1]
        if at.ndim != 2 or len(at) != len(self) or at.dtype.kind not in "iu" or not ((at >= 0) & (at < K)).all():
            raise BachError(f"places should be ({len(self)}, m) numbers 0 … {K - 1}, a row per request; got {at!r:.60}")
        rows = np.arange(len(self))[:, None]
        kept = {name: getattr(self, name)[rows, at] for name in ("items", "scores", "head_share")}
        proof = {name: getattr(self, name) & still_proved for name in ("certified", "exact_if_lists_are")}
        return replace(self, **kept, **proof)

    def heads(self, row: int = 0) -> dict[int, int]:
        """Item → the head (from 0) with the largest share, of one request."""
        return dict(zip(self.items[row].tolist(), self.head_share[row].argmax(1).tolist(), strict=True))

    def table(self, row: int = 0, items: pd.DataFrame | None = None) -> pd.DataFrame:
        """One request's slate to read: number and raw id of the item, score, the head (from 0) with the largest share,
        title and genres. `items`, such as `dataset.items`, has what the retriever does not know.
        """
        import pandas as pd  # late: a process that only serves starts without it

        share, numbers = self.head_share[row], self.items[row]
        said = {} if items is None else dict(items.reindex(numbers))  # items that were added later have no row
        said = {name: said[name].to_list() for name in ("raw_id", "title", "genres") if name in said}
        for name, own in self.labels.items() if self.labels else ():
            if name == "raw_ids" or items is None:
                said[COLUMNS[name]] = [own[item] for item in numbers]
        if "genres" in said:
            lists = (list, tuple, np.ndarray)
            said["genres"] = [", ".join(own) if isinstance(own, lists) else "" for own in said["genres"]]
        raw_id = {"raw_id": said.pop("raw_id")} if "raw_id" in said else {}
        made = {"score": self.scores[row], "head": share.argmax(1), "share": share.max(1)}
        rank = pd.RangeIndex(1, len(numbers) + 1, name="rank")
        ordered = {name: said[name] for name in ("title", "genres") if name in said}
        return pd.DataFrame({"item": numbers, **raw_id, **made, **ordered}, index=rank)


def found_of(wanted: Int[np.ndarray, "B K"], found: Int[np.ndarray, "B K"]) -> float:
    """The share of the wanted items that were found."""
    return float(np.mean([np.isin(a, b).mean() for a, b in zip(wanted, found, strict=True)]))


def joined(parts: list[Slate]) -> Slate:
    """Slates of one strategy as one."""
    arrays = [f.name for f in fields(Slate) if f.name not in ("strategy", "labels")]
    return replace(parts[0], **{name: np.concatenate([getattr(part, name) for part in parts]) for name in arrays})
