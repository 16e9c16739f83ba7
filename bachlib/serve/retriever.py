"""The retriever: histories in, slates out, by one of three strategies (eqs. 8 and 23; "Efficient serving").

    exact      a pruned scan of the whole catalogue                     any method   always certified
    two-step   the nearest items of each head from faiss, rescored      any method   certified with lists="exact"
    codebook   cached lists reweighted by π_u, no search at all         …-global     always certified; with budget=L,
               the lists alone, certified where their ends prove the slate
               and a scan for the heads of the user's own               …-hybrid     always certified
    auto       the cheapest of these, measured; `retriever.why` says why

Any number of threads can use it: a request reads one `Catalogue`, and `add` and `remove` replace it by a new one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from timeit import timeit
from typing import Any, Literal

import numpy as np
import torch

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.model.twotower import TwoTower
from bachlib.reading import expect, reading
from bachlib.serve import codebook, exact, hybrid, store
from bachlib.serve.catalogue import Catalogue, Genres, Labels, known_ids, lists_of
from bachlib.serve.encode import Users, float32, new_items
from bachlib.serve.kernels import VNNI
from bachlib.serve.lean import one_core, search
from bachlib.serve.rerank import capped_slates
from bachlib.serve.rows import STALE
from bachlib.serve.slate import Slate, found_of
from bachlib.serve.steering import Steering
from bachlib.serve.twostep import Ask, Kind, Neighbours, two_step
from bachlib.train.run import Run

Strategy = Literal["auto", "exact", "two-step", "codebook"]

# two-step (hnsw) over exact, one request, K = 100, k = 8, by `bach bench serve`: items → ratio
RATIOS = {20_000: 3.0, 50_000: 1.4, 200_000: 0.85 if VNNI else 0.3, 1_000_000: 0.16 if VNNI else 0.07}
LISTED = 4096  # items of a prototype's list beside an index, which the own heads need
WORTH_BUILDING, RECALL = 0.5, 0.99  # of a graph: the largest of these ratios, the smallest share of items found
TRIALS = [slice(u, u + 1) for u in range(24)]  # requests that are timed


class Retriever:
    """`retriever.retrieve(history, K)`, or `retrieve(raw=…)` with the ids of the log → Slate."""

    def __init__(
        self,
        model: TwoTower | Run,
        strategy: Strategy = "auto",
        *,
        dataset: Dataset | None = None,
        raw_ids: Sequence[Any] | None = None,
        genres: Genres | None = None,
        index: Kind = "hnsw",
        M: int | None = None,
        max_M: int | None = None,
        ask: Ask = "enough",
        lists: Literal["approximate", "exact"] = "approximate",
        budget: int | None = None,
    ):
        """`dataset` (known for a Run) has the raw ids of the items, for `raw=`, and their genres, for caps; or give
        `raw_ids` and `genres`, those of each item. Two-step: `M` entries per head's list (default: K plus the history's
        length), which grow up to `max_M` (default: 4 M) while the bound needs it and it is in reach; `ask="every"` asks
        every head for M items, "enough" asks heads that matter little for a few first; `lists="exact"` adds the scan
        that proves the slate. Codebook: `budget` entries per prototype's list replace the table of all densities.
        """
        self._take(model, index=index, M=M, max_M=max_M, ask=ask, lists=lists, budget=budget)
        labels = self._labels(model, dataset, raw_ids, genres)
        with torch.no_grad():
            tokens = float32(self.model.token_rows()) if self.model.history == "frozen" else None
            self.catalogue = Catalogue.of(float32(self.model.items()), tokens)._replace(labels=labels)
        self.choose(strategy)

    def _take(self, model: TwoTower | Run, **settings: Any) -> None:
        model = model.model if isinstance(model, Run) else model
        if not isinstance(model, TwoTower):
            name = getattr(model, "config", {}).get("method", type(model).__name__)
            needed = f"a Retriever needs a model with vectors, or a Run (Run.load(folder, dataset)); got {name}"
            raise BachError(f"{needed}. It serves every method of the table except mostpop")
        for name, known in (("lists", ("approximate", "exact")), ("ask", Ask.__args__)):
            if settings[name] not in known:
                raise BachError(f"{name}={settings[name]!r}: should be {known[0]!r} or {known[1]!r}")
        for name in ("M", "max_M", "budget"):
            value = settings[name]
            if value is not None and not (isinstance(value, int | np.integer) and value >= 1):
                raise BachError(f"{name} should be a whole number ≥ 1; got {value!r}")
        self.model, self.users, self.settings = model, Users(model), settings
        self.rule, self.folder = self.users.rule, None
        self.model_hash = store.model_hash(model)  # of the weights the index is built with
        self._writing = threading.Lock()

    def _labels(
        self, model: TwoTower | Run, dataset: Dataset | None, raw_ids: Any, genres: Any, saved: Labels | None = None
    ) -> Labels:
        """Raw ids and genres: as given, else as saved, else those of the data set; of later items always as saved."""
        n, dataset = self.model.n_items, getattr(model, "dataset", None) if dataset is None else dataset
        self._given = {"dataset": dataset, "raw_ids": raw_ids, "genres": genres}
        if saved is not None:
            raw_ids, genres = saved.replaced(raw_ids, genres)
        if dataset is not None and dataset.n_items != n:
            raise BachError(f"the model has {n:,} items, the data set {dataset.n_items:,}: give that of the training")
        if dataset is not None:
            raw_ids = dataset.items["raw_id"] if raw_ids is None else raw_ids
            genres = dataset.items["genres"] if genres is None else genres
        return Labels.of(n, raw_ids, genres)

    @property
    def genres(self) -> Genres | None:
        """Those of each known item, for caps."""
        return self.catalogue.labels.genres

    def choose(self, strategy: Strategy) -> None:
        """Serve by another strategy from now on; requests use the old one until the new one is built."""
        if strategy not in Strategy.__args__:
            raise BachError(f"strategy={strategy!r}: should be one of {', '.join(Strategy.__args__)}")
        if strategy == "codebook" and self.users.prototypes() is None:
            raise BachError("strategy='codebook' needs heads that all users share: …-bach-global or …-bach-hybrid")
        if strategy == "auto" and self.settings["budget"] is not None:
            raise BachError("budget= is for strategy='codebook'; 'auto' compares exact slates")
        with self._writing:
            if strategy == "auto":
                self.strategy, self.catalogue, self.why = cheapest(self)
            else:
                self.catalogue = self.built(self.catalogue, strategy)
                self.strategy, self.why = strategy, f"{strategy}: asked for"
                if self.catalogue.codebook is not None:
                    self.why += f"; lists and densities take {self.catalogue.codebook.nbytes / 1e6:.3g} MB"

    def built(self, catalogue: Catalogue, strategy: str) -> Catalogue:
        """A catalogue with the index or the codebook that the strategy needs."""
        items, own, shared = (catalogue := catalogue.compact()).items, strategy == "two-step", strategy == "codebook"
        index = Neighbours(items, self.settings["index"]) if own else None
        if (budget := self._budget(strategy)) is not None:
            cached = codebook.compute_lists(*self.users.prototypes(), items, self.rule, budget)
        else:
            cached = codebook.compute(*self.users.prototypes(), items, self.rule) if shared else None
        scanned = strategy == "exact" or (own and self.settings["lists"] == "exact")
        return catalogue._replace(index=index, codebook=cached, coarse=exact.Coarse.of(items) if scanned else None)

    def _budget(self, strategy: str) -> int | None:
        """The length of the prototypes' lists if there is no table; two-step needs lists beside own heads."""
        if strategy == "codebook" and self.settings["budget"] is not None:
            return int(self.settings["budget"])
        return LISTED if strategy == "two-step" and self.users.hybrid else None

    def retrieve(
        self,
        history: Any = None,
        K: int = 100,
        pi: np.ndarray | Steering | None = None,
        exclude: Any = None,
        *,
        raw: Any = None,
        keep_history: bool = False,
        user: Any = None,
        context: Any = None,
        caps: Mapping[str, int] | None = None,
    ) -> Slate:
        """The K best items of each history: (B, n) item numbers padded with −1, a list of lists, or one list. `raw`, in
        place of `history`, holds the ids of the user's own log; `exclude` then does, too.

        The model reads the last n_hist items; the slate leaves out the whole history unless `keep_history`. An empty
        history gets the model's answer to no input. `pi` replaces π_u, (k,) or (B, k), or is a `Steering` of it.
        `exclude`: items, one list for all requests or one per request. `caps`: the largest number of items per
        genre. `user` is for models with a free π per user, `context` for models that read one: (c,) numbers for all
        requests or (B, c). Invalid input raises a BachError and changes nothing.
        """
        catalogue = self.catalogue
        if (history is None) == (raw is None):
            raise BachError("give either a history of item numbers or raw=, a history in the ids of your log")
        name, given, known = "history", history, len(catalogue.vectors)
        if raw is not None:
            name, given, known = "raw", raw, catalogue.labels
        if not (B := len(histories := lists_of(name, given, known))):
            raise BachError(f"{name} holds no request: give one list per request; for one without history give [[]]")
        left_out = lists_of("exclude", [] if exclude is None else exclude, known, B)
        if not keep_history:
            left_out = [np.concatenate(both) for both in zip(histories, left_out, strict=True)]
        with one_core():
            remaining = len(catalogue.numbers) - np.diff(catalogue.left_out(left_out, K).starts)  # at least K
            if catalogue.codebook is not None and not self.users.hybrid:
                query, pi = None, self.users.weights(catalogue, histories, pi, user, context)
            else:
                query, pi = self.users.query(catalogue, histories, pi, user, context)

            def found(rows: slice, depth: int) -> Slate:
                side = (query and query[rows], pi[rows], depth, left_out[rows])
                return search(catalogue, *side, self.rule, self.settings)

            if caps is None:
                return found(slice(0, B), int(K))
            return capped_slates(found, int(K), remaining, catalogue.labels.genres, caps)

    def recall(self, history: Any, K: int = 100, context: Any = None) -> float:
        """The share of the exact slates that this retriever finds: 1 unless it is two-step or has a budget."""
        one, scan = copy(self), copy(self)  # `one` keeps its catalogue, whatever comes or goes meanwhile
        scan.catalogue = self.built(one.catalogue, "exact")
        return found_of(*(each.retrieve(history, K, context=context).items for each in (scan, one)))

    def vectors(self, slate: Slate) -> np.ndarray:
        """(B, K, d): the embeddings of a slate's items, for `rerank`."""
        return self.catalogue.vectors[slate.items]

    def add(
        self, rows: Any = None, *, vectors: Any = None, genres: Genres | None = None, raw_ids: Any = None
    ) -> np.ndarray:
        """Serve new items, and read them in histories; returns their numbers.

        `rows` go through the item tower: PureSVD rows as `svd.fold_in` makes them. `vectors` are finished embeddings,
        from another item tower, for example. `genres` are for caps: an item without genres passes every cap. `raw_ids`
        are the new items' ids in the log, for `raw=`.
        """
        new, read = new_items(self.model, rows, vectors)
        with self._writing:
            old = self.catalogue
            labels = old.labels.extended(len(new), raw_ids, genres)
            self.catalogue = self._up_to_date(old.with_more(new, read, labels))
        return np.arange(len(old.vectors), len(old.vectors) + len(new))

    def remove(self, numbers: Any) -> None:
        """Stop serving these items; histories may still hold them."""
        with self._writing:
            old = self.catalogue
            self.catalogue = self._up_to_date(old.without(known_ids("remove", numbers, len(old.vectors))))

    def _up_to_date(self, now: Catalogue) -> Catalogue:
        """The index or codebook follows the items that came or went; after a tenth, all is built again."""
        index, cached = now.index, now.codebook
        if index is not None:
            index = index.changed(now.items, now.gone)
        if cached is not None:
            cached = codebook.changed(cached, now.items, now.gone, self.rule, self._budget(self.strategy))
        stale = len(now.gone) > STALE * len(now.items)
        if stale or (index is None) != (now.index is None) or (cached is None) != (now.codebook is None):
            return self.built(now, self.strategy)
        return now._replace(index=index, codebook=cached)

    def save(self, folder: str | Path) -> Path:
        """Write the index; processes that have an older one of this folder open keep it until they `reload`."""
        if store.model_hash(self.model) != self.model_hash:
            raise BachError("the model has changed since this index was built: build a new one, then save it")
        with self._writing:
            about = {"strategy": self.strategy, "rule": self.rule, "settings": self.settings, "why": self.why}
            about |= {"model": self.model_hash} | ({"own_heads": True} if self.users.hybrid else {})
            self.folder = store.write(Path(folder), self.catalogue, about)
        return self.folder

    @classmethod
    def load(
        cls, folder: str | Path, model: TwoTower | Run, *, dataset: Dataset | None = None,
        raw_ids: Sequence[Any] | None = None, genres: Genres | None = None, verify: bool = True,
    ) -> Retriever:  # fmt: skip
        """A saved index, memory-mapped, for its own model. `verify` compares all files with their checksums. The index
        has raw ids and genres; those given replace them, and a data set has them for an index of an earlier version.
        """
        catalogue, about = store.read(Path(folder), verify)
        made = cls.__new__(cls)
        with reading(Path(folder), "write it again with retriever.save"):
            made._take(
                model, **{"ask": "enough", "budget": None, **about["settings"]}
            )  # an earlier version had neither
            expect(made.settings, dict.fromkeys(("index", "lists", "ask"), str))
        if made.model_hash != about["model"]:
            hashes = f"hash {about['model'][:12]} there, {made.model_hash[:12]} here"
            raise BachError(f"{folder} is the index of another model ({hashes}). Load its run or build a new index")
        labels = made._labels(model, dataset, raw_ids, genres, catalogue.labels).resized(len(catalogue.vectors))
        made.catalogue = catalogue._replace(labels=labels)
        made.strategy, made.why, made.folder = about["strategy"], about["why"], Path(folder)
        return made

    def reload(self) -> None:
        """Switch to the index that was saved last in this folder; requests under way finish with the old one."""
        if self.folder is None:
            raise BachError("this index was neither saved nor loaded, so there is nothing to reload")
        fresh = Retriever.load(self.folder, self.model, **self._given)
        with self._writing:
            self.settings, self.strategy, self.why = fresh.settings, fresh.strategy, fresh.why
            self.catalogue = fresh.catalogue

    def __repr__(self) -> str:
        return f"Retriever({self.strategy}, {len(self.catalogue.served):,} items, {self.rule}; {self.why})"


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
    scan = _milliseconds(lambda u: exact.top_k(query[u], bare.items, K, out[u], coarse=bare.coarse))
    said = f"{n:,} items, k = {retriever.model.k}: a scan takes {scan:.2f} ms"
    if retriever.users.prototypes() is not None:
        other, made, recall = "codebook", retriever.built(bare, "codebook"), 1.0
        if retriever.users.hybrid:
            took = _milliseconds(lambda u: hybrid.top_k(made.codebook, query[u], pi[u], K, out[u]))
        else:
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
        lists = (made.index, *(retriever.settings[name] for name in ("M", "max_M", "ask")))
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
