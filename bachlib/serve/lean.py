"""A saved codebook served without torch: π comes from elsewhere, the rest is memory-mapped files.

server = CodebookServer("outputs/index/movies")
slate = server.retrieve(pi, K=20, exclude=[3, 17])
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bachlib import BachError
from bachlib.serve import codebook, store
from bachlib.serve.catalogue import lists_of
from bachlib.serve.one_core import one_core
from bachlib.serve.slate import Slate, slate_of
from bachlib.serve.steering import checked_pi


class CodebookServer:
    """What `Retriever.save` wrote with the strategy codebook. Any number of processes can share the files."""

    def __init__(self, folder: str | Path, *, verify: bool = True):
        self.catalogue, self.about = store.read(Path(folder), verify)
        if self.catalogue.codebook is None:
            raise BachError(f"{folder} serves by {self.about['strategy']}, which needs the model: use Retriever.load")

    def retrieve(self, pi: np.ndarray, K: int = 100, exclude: Any = None) -> Slate:
        """The K best of every π, (k,) or (B, k); `exclude`: one list of item numbers for all, or one per row."""
        catalogue, k = self.catalogue, len(self.catalogue.codebook.kappa)
        B = len(pi) if np.ndim(pi) == 2 else 1
        pi = checked_pi(pi, B, k)
        unwanted = lists_of("exclude", [] if exclude is None else exclude, len(catalogue.vectors), B)
        left_out = catalogue.left_out(unwanted, K)
        with one_core():
            best, looked = codebook.top_k(catalogue.codebook, pi, K, left_out, self.about["rule"])
        proved = np.ones(B, bool)
        return slate_of(best, catalogue.numbers, pi, "codebook", proved, proved, looked)
