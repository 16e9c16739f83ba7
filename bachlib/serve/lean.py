"""The half of serving that needs no torch: a search in the catalogue once heads and π are known.

server = CodebookServer("outputs/index/movies")       # a saved codebook, memory-mapped; π comes from elsewhere
slate = server.retrieve(pi, K=20, exclude=[3, 17])
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl

from bachlib import BachError
from bachlib.serve import codebook, exact, hybrid, store
from bachlib.serve.catalogue import Catalogue, lists_of
from bachlib.serve.density import Query, Rule
from bachlib.serve.slate import Slate, joined
from bachlib.serve.steering import Pi, checked_pi
from bachlib.serve.twostep import two_step

REQUESTS = 256  # searched for at a time


class CodebookServer:
    """Serves what `Retriever.save` wrote with the strategy codebook. Any number of processes can share the files."""

    def __init__(self, folder: str | Path, *, verify: bool = True):
        self.catalogue, self.about = store.read(Path(folder), verify)
        if self.catalogue.codebook is None or self.about.get("own_heads"):
            by = self.about["strategy"] + " and heads of each user" * bool(self.about.get("own_heads"))
            raise BachError(f"{folder} serves by {by}, which needs the model: use Retriever.load")

    def retrieve(self, pi: np.ndarray, K: int = 100, exclude: Any = None) -> Slate:
        """The K best of every π, (k,) or (B, k); `exclude`: one list of item numbers for all, or one per row."""
        catalogue, B = self.catalogue, len(pi) if np.ndim(pi) == 2 else 1
        pi = checked_pi(pi, B, len(catalogue.codebook.kappa))
        unwanted = lists_of("exclude", [] if exclude is None else exclude, len(catalogue.vectors), B)
        with one_core():
            return search(catalogue, None, pi, K, unwanted, self.about["rule"], {})


def search(
    catalogue: Catalogue, query: Query | None, pi: Pi, K: int, left_out: list[np.ndarray], rule: Rule, settings: Mapping
) -> Slate:
    """The K best of each request by the strategy the catalogue is built for; without own heads no query is needed."""
    if len(pi) > REQUESTS:
        parts = [slice(first, first + REQUESTS) for first in range(0, len(pi), REQUESTS)]
        asked = ((query and query[rows], pi[rows], K, left_out[rows]) for rows in parts)
        return joined([search(catalogue, *part, rule, settings) for part in asked])
    items, out = catalogue.items, catalogue.left_out(left_out, K)
    strategy, looked_at = "exact", np.full(len(pi), len(items))
    certified, enough = np.ones((2, len(pi)), bool)
    if catalogue.codebook is not None and catalogue.index is None:
        strategy = "codebook"
        if query is not None:
            best = hybrid.top_k(catalogue.codebook, query, pi, K, out)
        elif isinstance(catalogue.codebook, codebook.CodebookLists):
            best, looked_at, certified = codebook.from_lists(catalogue.codebook, pi, K, out, rule)
            enough = certified
        else:
            best, looked_at = codebook.top_k(catalogue.codebook, pi, K, out, rule)
    elif catalogue.index is None:
        best = exact.top_k(query, items, K, out, coarse=catalogue.coarse)
    else:
        strategy, index = "two-step", catalogue.index
        if catalogue.codebook is not None:
            query, index = hybrid.query_of(catalogue.codebook, query, pi), hybrid.Cached(index, catalogue.codebook)
        how = {name: settings[name] for name in ("M", "max_M", "ask")}
        best, lists = two_step(query, items, K, out, index, **how)
        if settings["lists"] == "exact":
            start = (np.repeat(np.arange(len(pi)), K), best.found.ravel())
            best = exact.top_k(query, items, K, out, start, catalogue.coarse)
        else:
            certified, enough, looked_at = ~certified, lists.enough, lists.depth.sum(1)
    found = catalogue.numbers[best.found]
    proof = (certified, enough, strategy, looked_at)
    return Slate(found, best.scores, best.shares(), pi, *proof, catalogue.labels.raw_of(found))


_pools = threadpoolctl.ThreadpoolController()  # numpy, whose BLAS it has to find, is imported above
# The last request may restore the threads: newer versions of threadpoolctl would only obey the thread that came first.
_any_thread = getattr(threadpoolctl.OpenBLASController, "clear_controlling_thread", lambda force: None)
_lock = threading.Lock()
_inside, _limit = 0, None


@contextmanager
def one_core() -> Iterator[None]:
    """numpy's matrix products on one thread, as long as any request is inside.

    torch and numpy have separate thread pools, and a request that uses both (towers, then scan) would have the workers
    of both spinning on the same cores: on two cores a scan of 0.7 ms took 7 ms.
    """
    global _inside, _limit
    with _lock:
        if _inside == 0:
            _any_thread(force=True)
            _limit = _pools.limit(limits=1, user_api="blas")
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                _any_thread(force=True)
                _limit.restore_original_limits()
                _any_thread(force=True)
