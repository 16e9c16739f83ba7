"""Two-step retrieval ("Efficient serving"): the nearest items of each head from faiss, rescored by the exact mixture.

**Which heads.** `ask="every"` is the paper's rule: the M nearest items of *each* head. `ask="enough"` asks the heavy
heads for M items and all others for a few. A head whose few items show none with half of the density that the slate
needs is not asked for more. This is a judgement, not a proof: the rule may find an item that comes later in its list.

**The bound.** An item that is in no list has t_r ≤ t_r^(M) for every head, the last cosine of the head's list (1 if the
index found nothing), so it scores at most log Σ_r π_r C_r ω(t_r^(M)). If the K-th rescored item is above, the slate
is exact *provided the lists are*. Lists of a graph (HNSW) or of cells (IVF) may miss an item; the proof needs `exact`,
whose scan starts with this slate and finds every item above a head's cut.
"""

from __future__ import annotations

from copy import copy
from pathlib import Path
from types import ModuleType
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from bachlib import BachError, needs
from bachlib.serve import exact
from bachlib.serve.density import Best, LeftOut, Query, rounding
from bachlib.serve.rows import STALE

Kind = Literal["hnsw", "ivf"]
Ask = Literal["enough", "every"]
FEW = 4  # items that a light head shows
SMALL = 20_000  # items: up to this number comparing all of them is faster than a graph, and misses nothing
ONE_REQUEST = 64  # heads: more of them are worth several threads


def _faiss() -> ModuleType:
    """Imported late: scan and codebook do not need it."""
    needs('strategy "two-step"', "faiss-cpu")
    import faiss

    return faiss


class Neighbours:
    """A faiss index over the items by inner product. With GPUs and a faiss built for them, IVF runs there.

    For `SMALL` catalogues "hnsw" is a flat index: a graph may not reach items that are far from all others.
    """

    def __init__(self, items: Float[np.ndarray, "n d"], kind: Kind = "hnsw"):
        faiss, (n, d) = _faiss(), items.shape
        if kind == "hnsw" and n <= SMALL:
            index = faiss.IndexFlatIP(d)
        elif kind == "hnsw":
            index = faiss.IndexHNSWFlat(d, 32, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction = 100
        elif kind == "ivf":
            cells = max(1, min(int(2 * n**0.5), n // 40))
            index = faiss.IndexIVFFlat(faiss.IndexFlatIP(d), d, cells, faiss.METRIC_INNER_PRODUCT)
            index.train(items[:: max(1, n // (256 * cells))])
        else:
            raise BachError(f"index={kind!r}: should be 'hnsw' or 'ivf'")
        index.add(items)
        self._take(index, kind)

    def _take(self, index, kind: Kind) -> None:
        self.kind, self.on_cpu, self.flat = kind, index, isinstance(index, _faiss().IndexFlat)
        on_gpu = kind == "ivf" and getattr(_faiss(), "get_num_gpus", int)() > 0
        self.index = _faiss().index_cpu_to_all_gpus(index) if on_gpu else index
        self.gone = np.zeros(index.ntotal, bool)  # items of the index that are not served any more
        self.late = np.empty(0, np.int64)  # places of served items that are not in the index

    def changed(self, items: Float[np.ndarray, "n d"], gone: Int[np.ndarray, " g"]) -> Neighbours | None:
        """The neighbours among other items, of which the index holds the first. The index stays as it is: searches in
        other threads do not allow changes. None if it is time for a new one.
        """
        n, known = len(items), self.on_cpu.ntotal
        if self.flat or n - known + len(gone) > n * STALE:
            return None
        made = copy(self)
        made.gone = np.zeros(known, bool)
        made.gone[gone[gone < known]] = True
        made.late = np.setdiff1d(np.arange(known, n), gone, assume_unique=True)
        made.late_rows = items[made.late]
        return made

    @classmethod
    def load(cls, path: Path, kind: Kind) -> Neighbours:
        made = cls.__new__(cls)
        made._take(_faiss().read_index(str(path)), kind)
        return made

    def save(self, path: Path) -> None:
        _faiss().write_index(self.on_cpu, str(path))

    def nearest(self, rows: Float[np.ndarray, "q d"], M: int) -> tuple[np.ndarray, np.ndarray]:
        """(cosines, places), (q, M) each, best first; place −1 where fewer were found."""
        t, places = self._served(rows, M)
        if len(self.late):
            late = rows @ self.late_rows.T
            near = np.argpartition(-late, min(M, late.shape[1]) - 1, axis=1)[:, :M]
            t, places = np.hstack((t, np.take_along_axis(late, near, 1))), np.hstack((places, self.late[near]))
            order = np.argsort(-np.where(places < 0, -np.inf, t), axis=1, kind="stable")[:, :M]
            t, places = np.take_along_axis(t, order, 1), np.take_along_axis(places, order, 1)
        return t, places

    def _served(self, rows: Float[np.ndarray, "q d"], M: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the index's items, the nearest that are still served."""
        if not (n_gone := self.gone.sum()):
            return self._indexed(rows, M)
        n = len(self.gone)
        asked = max(M, min(n, M + 8 + int(2 * M * n_gone / n)))
        while True:  # removed items may all be near one head
            t, places = self._indexed(rows, asked)
            out = (places < 0) | self.gone[places]
            if asked >= n or (((~out).sum(1) >= M) | (places[:, -1] < 0)).all():
                break
            asked = min(n, 2 * asked)
        order = np.argsort(out, axis=1, kind="stable")[:, :M]
        return np.take_along_axis(t, order, 1), np.take_along_axis(np.where(out, -1, places), order, 1)

    def _indexed(self, rows: Float[np.ndarray, "q d"], M: int) -> tuple[np.ndarray, np.ndarray]:
        """The nearest items of the index."""
        faiss, params = _faiss(), None
        if not self.flat:
            hnsw = self.kind == "hnsw"
            params = faiss.SearchParametersHNSW(efSearch=5 * M // 4) if hnsw else faiss.SearchParametersIVF(nprobe=32)
        threads = faiss.omp_get_max_threads()
        faiss.omp_set_num_threads(threads if len(rows) > ONE_REQUEST else 1)  # of this thread; see `lean.one_core`
        try:
            return self.index.search(np.ascontiguousarray(rows), M, params=params)
        finally:
            faiss.omp_set_num_threads(threads)


class Lists(NamedTuple):
    """The length of each head's list, its last cosine, and whether the bound holds."""

    depth: Int[np.ndarray, "B k"]
    end: Float[np.ndarray, "B k"]  # t_r^(M); 1 where nothing was found
    enough: Bool[np.ndarray, " B"]  # the slate is exact if the lists are


def two_step(
    query: Query, items: np.ndarray, K: int, left_out: LeftOut, index: Neighbours, M: int | None = None,
    max_M: int | None = None, ask: Ask = "enough",
) -> tuple[Best, Lists]:  # fmt: skip
    """The best K among lists of M entries (default: K plus the excluded items). Where the bound does not hold, lists
    that end too early are doubled up to `max_M`; by default up to 4 M, and only if that looks sufficient.
    """
    (B, k, d), n = query.heads.shape, len(items)
    best = Best(query, items, K, left_out)
    usual = K + left_out.n_own
    if left_out.may is not None:  # as many that may be served are among more
        usual = np.ceil(usual * n / (n - left_out.spread())).astype(int)
    sizes = np.minimum(n, np.full(B, M) if M else usual)  # per request
    most = np.minimum(n, np.maximum(sizes, max_M or 4 * sizes))
    depth, (half, end) = np.zeros((B, k), np.int64), np.ones((2, B, k))  # middle and last cosine of a list
    shown = np.full((B, k), np.inf)  # the best score in the last list of a head

    def search(which: Bool[np.ndarray, "B k"], sizes: Int[np.ndarray, " B"]) -> None:
        for size in np.unique(sizes[which.any(1)]):
            users, heads = np.nonzero(which & (sizes == size)[:, None])
            t, places = index.nearest(query.heads[users, heads], int(size))
            there = places >= 0
            last = there.sum(1) - 1  # −1: nothing was found
            depth[users, heads], end[users, heads] = size, np.where(last < 0, 1.0, t[np.arange(len(t)), last])
            half[users, heads] = t[:, (size - 1) // 2]
            scores = np.full(there.shape, -np.inf)
            scores[there] = best.offer(np.repeat(users, size)[there.ravel()], places[there])
            shown[users, heads] = scores.max(1)

    heavy = _heavy(query) if ask == "enough" else np.ones((B, k), bool)
    search(heavy, sizes)
    search(~heavy, np.minimum(FEW, sizes))
    search(~heavy & (sizes > FEW)[:, None] & (shown > best.worst[:, None] - np.log(2)), sizes)
    # Where the lists hold fewer than K items that may be served; those that are allowed may be far from all heads.
    longer, longest = sizes, np.full(B, n) if left_out.may is None else most
    while ((few := np.isneginf(best.worst)) & (longer < longest)).any():
        longer = np.minimum(longest, 2 * longer)
        search(np.repeat(few[:, None], k, 1), longer)
    for u in np.flatnonzero(few):  # a graph need not reach every item
        scanned = exact.top_k(query[u : u + 1], items, K, left_out[u : u + 1])
        best.scores[u], best.found[u] = scanned.scores[0], scanned.found[0]
    while True:
        lists = Lists(depth, end, best.worst > query.bound(end + rounding(d)) + 1e-9)
        open_still = ~lists.enough & (sizes < most)
        if not open_still.any():
            return best, lists
        wanted = exact.thresholds_of(query, best.worst)
        if not max_M:
            open_still &= _in_reach(wanted, lists, half, most)
        short = (end > wanted) & open_still[:, None]
        if not short.any():
            return best, lists
        sizes = np.where(short.any(1), np.minimum(2 * sizes, most), sizes)
        search(short, sizes)


def _heavy(query: Query) -> Bool[np.ndarray, "B k"]:
    """The heads that give the first two thirds of the density at a cosine of 0.75; all where the best head counts."""
    if not query.soft:
        return np.ones(query.log_weight.shape, bool)
    terms = query.terms_at(np.full(query.kappa.shape, 0.75))
    share = np.exp(terms - terms.max(1, keepdims=True))
    order = np.argsort(-share, axis=1)
    ranked = np.take_along_axis(share, order, 1) / share.sum(1, keepdims=True)
    heavy = np.empty(share.shape, bool)
    np.put_along_axis(heavy, order, np.cumsum(ranked, 1) - ranked < 2 / 3, 1)
    return heavy


def _in_reach(wanted: np.ndarray, lists: Lists, half: np.ndarray, most: np.ndarray) -> Bool[np.ndarray, " B"]:
    """Would lists of length `most` end low enough? Judged by how far the cosine falls with a doubling."""
    doublings = (lists.end - wanted) / np.maximum(half - lists.end, 1e-9)
    return (np.log2(lists.depth) + doublings).max(1) <= np.log2(2 * most)
