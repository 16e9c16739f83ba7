"""The retriever: histories in, slates out, by one of three strategies (eqs. 8 and 23; "Efficient serving").

    exact      a pruned scan of the whole catalogue                     any method   always certified
    two-step   the nearest items of each head from faiss, rescored      any method   certified with lists="exact"
    codebook   cached lists reweighted by π_u, no search at all         …-global     always certified
    auto       the cheapest of these, measured; `retriever.why` says why

Any number of threads can use it: a request reads one `Catalogue`, and `add` and `remove` replace it by a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from timeit import timeit
from typing import Any, Literal

import numpy as np
import torch

from bachlib import BachError
from bachlib.model.twotower import TwoTower
from bachlib.serve import codebook, exact, store
from bachlib.serve.catalogue import Catalogue, known_ids, lists_of
from bachlib.serve.encode import Users, float32, new_items
from bachlib.serve.lean import one_core, search
from bachlib.serve.rerank import Genres, capped_slates
from bachlib.serve.slate import Slate, found_of
from bachlib.serve.steering import Steering
from bachlib.serve.twostep import Kind, Neighbours, two_step
from bachlib.train.run import Run

Strategy = Literal["auto", "exact", "two-step", "codebook"]

# two-step (hnsw) over exact, one request, K = 100, k = 8, by `bach bench serve`: items → ratio
RATIOS = {20_000: 3.0, 50_000: 1.4, 200_000: 0.24, 1_000_000: 0.07}
WORTH_BUILDING, RECALL = 0.5, 0.99  # of a graph: the largest of these ratios, the smallest share of items found
TRIALS = [slice(u, u + 1) for u in range(24)]  # requests that are timed


class Retriever:
    """`retriever.retrieve(history, K)` → Slate."""

    def __init__(
        self,
        model: TwoTower | Run,
        strategy: Strategy = "auto",
        *,
        genres: Genres | None = None,
        index: Kind = "hnsw",
        M: int | None = None,
        max_M: int | None = None,
        lists: Literal["approximate", "exact"] = "approximate",
    ):
        """`genres`: those of each item (`dataset.items["genres"]`), for caps. Two-step: `M` entries per head's list
        (default: K plus the history's length), which grow up to `max_M` (default: 4 M) while the bound needs it and it
        is in reach; `lists="exact"` adds the scan that proves them.
        """
        self._take(model, genres, index=index, M=M, max_M=max_M, lists=lists)
        with torch.no_grad():
            tokens = float32(self.model.token_rows()) if self.model.history == "frozen" else None
            self.catalogue = Catalogue.of(float32(self.model.items()), tokens)
        self.choose(strategy)

    def _take(self, model: TwoTower | Run, genres: Genres | None, **settings: Any) -> None:
        model = model.model if isinstance(model, Run) else model
        if not isinstance(model, TwoTower):
            name = getattr(model, "config", {}).get("method", type(model).__name__)
            needed = f"a Retriever needs a model with vectors, or a Run (Run.load(folder, dataset)); got {name}"
            raise BachError(f"{needed}. It serves every method of the table except mostpop")
        if settings["lists"] not in ("approximate", "exact"):
            raise BachError(f"lists={settings['lists']!r}: should be 'approximate' or 'exact'")
        for name, value in (("M", settings["M"]), ("max_M", settings["max_M"])):
            if value is not None and not (isinstance(value, int | np.integer) and value >= 1):
                raise BachError(f"{name} should be a whole number ≥ 1; got {value!r}")
        if genres is not None and len(genres) < model.n_items:
            raise BachError(f"genres should hold those of each of {model.n_items:,} items; got {len(genres):,}")
        self.model, self.users, self.settings, self.genres = model, Users(model), settings, genres
        self.rule, self.folder = self.users.rule, None
        self.model_hash = store.model_hash(model)  # of the weights the index is built with
        self._writing = threading.Lock()

    def choose(self, strategy: Strategy) -> None:
        """Serve by another strategy from now on; requests use the old one until the new one is built."""
        if strategy not in Strategy.__args__:
            raise BachError(f"strategy={strategy!r}: should be one of {', '.join(Strategy.__args__)}")
        if strategy == "codebook" and self.users.prototypes() is None:
            raise BachError("strategy='codebook' needs heads that all users share: p-bach-global or v-bach-global")
        with self._writing:
            if strategy == "auto":
                self.strategy, self.catalogue, self.why = cheapest(self)
            else:
                self.catalogue = self.built(self.catalogue, strategy)
                self.strategy, self.why = strategy, f"{strategy}: asked for"

    def built(self, catalogue: Catalogue, strategy: str) -> Catalogue:
        """A catalogue with the index or the codebook that the strategy needs."""
        items, own, shared = catalogue.items, strategy == "two-step", strategy == "codebook"
        index = Neighbours(items, self.settings["index"]) if own else None
        cached = codebook.compute(*self.users.prototypes(), items, self.rule) if shared else None
        return catalogue._replace(index=index, codebook=cached)

    def retrieve(
        self,
        history: Any,
        K: int = 100,
        pi: np.ndarray | Steering | None = None,
        exclude: Any = None,
        *,
        keep_history: bool = False,
        user: Any = None,
        context: Any = None,
        caps: Mapping[str, int] | None = None,
    ) -> Slate:
        """The K best items of each history: (B, n) item numbers padded with −1, a list of lists, or one list.

        The model reads the last n_hist items; the slate leaves out the whole history unless `keep_history`. An empty
        history gets the model's answer to no input. `pi` replaces π_u, (k,) or (B, k), or is a `Steering` of it.
        `exclude`: item numbers, one list for all requests or one per request. `caps`: the largest number of items per
        genre. `user` is for models with a free π per user, `context` for models that read one: (c,) numbers for all
        requests or (B, c). Invalid input raises a BachError and changes nothing.
        """
        catalogue = self.catalogue
        histories = lists_of("history", history, len(catalogue.vectors))
        if not (B := len(histories)):
            raise BachError("history holds no request: give at least one list of items, which may be empty")
        left_out = lists_of("exclude", [] if exclude is None else exclude, len(catalogue.vectors), B)
        if not keep_history:
            left_out = [np.concatenate(both) for both in zip(histories, left_out, strict=True)]
        with one_core():
            remaining = len(catalogue.numbers) - np.diff(catalogue.left_out(left_out, K).starts)  # at least K
            if catalogue.codebook is not None:
                query, pi = None, self.users.weights(catalogue, histories, pi, user, context)
            else:
                query, pi = self.users.query(catalogue, histories, pi, user, context)

            def found(rows: slice, depth: int) -> Slate:
                side = (query and query[rows], pi[rows], depth, left_out[rows])
                return search(catalogue, *side, self.rule, self.settings)

            if caps is None:
                return found(slice(0, B), int(K))
            return capped_slates(found, int(K), remaining, self.genres, caps)

    def recall(self, history: Any, K: int = 100, context: Any = None) -> float:
        """The share of the exact slates that this retriever finds: 1 unless lists are approximate."""
        one, scan = copy(self), copy(self)  # `one` keeps its catalogue, whatever comes or goes meanwhile
        scan.catalogue = self.built(one.catalogue, "exact")
        return found_of(*(each.retrieve(history, K, context=context).items for each in (scan, one)))

    def vectors(self, slate: Slate) -> np.ndarray:
        """(B, K, d): the embeddings of a slate's items, for `rerank`."""
        return self.catalogue.vectors[slate.items]

    def add(self, rows: Any = None, *, vectors: Any = None, genres: Genres | None = None) -> np.ndarray:
        """Serve new items, and read them in histories; returns their numbers.

        `rows` go through the item tower: PureSVD rows as `svd.fold_in` makes them. `vectors` are finished embeddings,
        from another item tower, for example. `genres` are for caps: an item without genres passes every cap.
        """
        new, read = new_items(self.model, rows, vectors)
        with self._writing:
            old = self.catalogue
            numbers = np.arange(len(old.vectors), len(old.vectors) + len(new))
            more = zip(old[:3], (new, read, numbers), strict=True)
            made = self._changed(*(np.concatenate(both) for both in more))
            if self.genres is not None:
                self.genres = [*self.genres[: numbers[0]], *(genres if genres is not None else [[]] * len(numbers))]
            self.catalogue = made
        return numbers

    def remove(self, numbers: Any) -> None:
        """Stop serving these items; histories may still hold them."""
        with self._writing:
            old = self.catalogue
            left = np.setdiff1d(old.numbers, known_ids("remove", numbers, len(old.vectors)))
            if not len(left):
                raise BachError("remove: nothing would be left to serve")
            self.catalogue = self._changed(old.vectors, old.tokens, left)

    def _changed(self, vectors: np.ndarray, tokens: np.ndarray, numbers: np.ndarray) -> Catalogue:
        tokens = None if self.model.history == "tower" else tokens  # then histories are read from the vectors
        return self.built(Catalogue.of(vectors, tokens, numbers), self.strategy)

    def save(self, folder: str | Path) -> Path:
        """Write the index; processes that have an older one of this folder open keep it until they `reload`."""
        if store.model_hash(self.model) != self.model_hash:
            raise BachError("the model has changed since this index was built: build a new one, then save it")
        with self._writing:
            about = {"strategy": self.strategy, "rule": self.rule, "settings": self.settings, "why": self.why}
            self.folder = store.write(Path(folder), self.catalogue, about | {"model": self.model_hash})
        return self.folder

    @classmethod
    def load(cls, folder: str | Path, model: TwoTower | Run, *, genres: Any = None, verify: bool = True) -> Retriever:
        """A saved index, memory-mapped, for its own model. `verify` compares all files with their checksums."""
        catalogue, about = store.read(Path(folder), verify)
        made = cls.__new__(cls)
        made._take(model, genres, **about["settings"])
        if made.model_hash != about["model"]:
            hashes = f"hash {about['model'][:12]} there, {made.model_hash[:12]} here"
            raise BachError(f"{folder} is the index of another model ({hashes}). Load its run or build a new index")
        made.strategy, made.why, made.catalogue, made.folder = about["strategy"], about["why"], catalogue, Path(folder)
        return made

    def reload(self) -> None:
        """Switch to the index that was saved last in this folder; requests under way finish with the old one."""
        if self.folder is None:
            raise BachError("this index was neither saved nor loaded, so there is nothing to reload")
        fresh = Retriever.load(self.folder, self.model, genres=self.genres)
        with self._writing:
            self.settings, self.strategy, self.why = fresh.settings, fresh.strategy, fresh.why
            self.catalogue = fresh.catalogue

    def __repr__(self) -> str:
        return f"Retriever({self.strategy}, {len(self.catalogue.numbers):,} items, {self.rule}; {self.why})"


@one_core()
def cheapest(retriever: Retriever) -> tuple[str, Catalogue, str]:
    """(strategy, its catalogue, why): timed on this machine with requests of this model for 100 items."""
    bare = retriever.built(retriever.catalogue, "exact")
    n, rng = len(bare.items), np.random.default_rng(0)
    K = min(100, n)
    histories = [rng.choice(bare.numbers, min(n, retriever.model.n_hist)) for _ in TRIALS]
    out = bare.left_out([np.empty(0, np.int64)] * len(TRIALS), K)
    anyone = np.zeros(len(TRIALS), np.int64)  # only read by models with a free π per user
    nothing = np.zeros(width) if (width := retriever.model.n_context) else None
    query, pi = retriever.users.query(bare, histories, user=anyone, context=nothing)
    scan = _milliseconds(lambda u: exact.top_k(query[u], bare.items, K, out[u]))
    said = f"{n:,} items, k = {retriever.model.k}: a scan takes {scan:.2f} ms"
    if retriever.users.prototypes() is not None:
        other, made, recall = "codebook", retriever.built(bare, "codebook"), 1.0
        took = _milliseconds(lambda u: codebook.top_k(made.codebook, pi[u], K, out[u], retriever.rule))
        said += f", the codebook's lists {took:.2f} ms"
    else:
        # Building a graph takes long, so it has to be promising.
        expected = float(np.exp(np.interp(np.log(n), np.log(list(RATIOS)), np.log(list(RATIOS.values())))))
        if expected > WORTH_BUILDING:
            return "exact", bare, f"exact: {said}; two-step would take about {expected:.1f} times that"
        if find_spec("faiss") is None:
            return (
                "exact",
                bare,
                f"exact: {said}; two-step may be faster and needs faiss: pip install 'bachlib[faiss-cpu]'",
            )
        other, made = "two-step", retriever.built(bare, "two-step")
        lists = (made.index, retriever.settings["M"], retriever.settings["max_M"])
        found = two_step(query, bare.items, K, out, *lists)[0].found
        recall = found_of(exact.top_k(query, bare.items, K, out).found, found)
        took = _milliseconds(lambda u: two_step(query[u], bare.items, K, out[u], *lists))
        said += f", two-step {took:.2f} ms with recall {recall:.3f}"
    better = took < scan and recall >= RECALL
    return (other, made, f"{other}: {said}") if better else ("exact", bare, f"exact: {said}")


def _milliseconds(request: Callable[[slice], Any]) -> float:
    """The median of single requests, after one to warm up."""
    took = [timeit(partial(request, u), number=1) for u in [TRIALS[0], *TRIALS]]
    return 1000 * float(np.median(took[1:]))
