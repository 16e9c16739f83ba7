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
from collections.abc import Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.model.twotower import TwoTower
from bachlib.reading import expect, reading
from bachlib.serve import codebook, exact, store
from bachlib.serve.auto import cheapest
from bachlib.serve.catalogue import Catalogue, Genres, Labels, checked_K, known_ids, lists_of
from bachlib.serve.encode import Users, float32, new_items
from bachlib.serve.lean import one_core, search
from bachlib.serve.rerank import capped_slates
from bachlib.serve.rows import STALE
from bachlib.serve.slate import COLUMNS, Slate, found_of
from bachlib.serve.steering import Steering
from bachlib.serve.twostep import Ask, Kind, Neighbours
from bachlib.train.run import Run, keep_model, kept_model

Strategy = Literal["auto", "exact", "two-step", "codebook"]

LISTED = 4096  # items of a prototype's list beside an index, which the own heads need


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
        titles: Sequence[str] | None = None,
        index: Kind = "hnsw",
        M: int | None = None,
        max_M: int | None = None,
        ask: Ask = "enough",
        lists: Literal["approximate", "exact"] = "approximate",
        budget: int | None = None,
    ):
        """`dataset` (known for a Run) has the raw ids of the items, for `raw=`, their genres, for caps, and titles; or
        give `raw_ids`, `genres` and `titles` of each item. Two-step: `M` entries per head's list (default: K plus
        the history's length), which grow up to `max_M` (default: 4 M) while the bound needs it and it is in reach;
        `ask="every"` asks every head for M items, "enough" asks heads that matter little for a few first;
        `lists="exact"` adds the scan that proves the slate. Codebook: `budget` entries per prototype's list replace the
        table of all densities.
        """
        self._take(model, index=index, M=M, max_M=max_M, ask=ask, lists=lists, budget=budget)
        labels = self._labels(model, dataset, raw_ids=raw_ids, genres=genres, titles=titles)
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
        self, model: TwoTower | Run | None, dataset: Dataset | None, saved: Labels | None = None, **given: Any
    ) -> Labels:
        """Those given, else as saved, else those of the data set; of later items always as saved."""
        n, dataset = self.model.n_items, getattr(model, "dataset", None) if dataset is None else dataset
        self._given = {"dataset": dataset, **given}
        if saved is not None:
            given = saved.replaced(**given)
        if dataset is not None and dataset.n_items != n:
            raise BachError(f"the model has {n:,} items, the data set {dataset.n_items:,}: give that of the training")
        if dataset is not None:
            own = {name: dataset.items[column] for name, column in COLUMNS.items()}
            given = own | {name: one for name, one in given.items() if one is not None}
        return Labels.of(n, **given)

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
        only: Any = None,
        raw: Any = None,
        keep_history: bool = False,
        user: Any = None,
        context: Any = None,
        caps: Mapping[str, int] | None = None,
    ) -> Slate:
        """The K best items of each history: (B, n) item numbers padded with −1, a list of lists, or one list. `raw`, in
        place of `history`, holds the ids of the user's own log; `exclude` and `only` then do, too.

        The model reads the last n_hist items; the slate leaves out the whole history unless `keep_history`. An empty
        history gets the model's answer to no input. `pi` replaces π_u, (k,) or (B, k), or is a `Steering` of it.
        `exclude`: items, one list for all requests or one per request. `only`: the items that may be served, likewise;
        the slate is the best of these, with the same proof. `caps`: the largest number of items per
        genre. `user` is for models with a free π per user, `context` for models that read one: (c,) numbers for all
        requests or (B, c). Invalid input raises a BachError and changes nothing.
        """
        catalogue, K = self.catalogue, checked_K(K)
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
        allowed = None if only is None else lists_of("only", only, known, B)
        with one_core():
            if catalogue.codebook is not None and not self.users.hybrid:
                query, pi = None, self.users.weights(catalogue, histories, pi, user, context)
            else:
                query, pi = self.users.query(catalogue, histories, pi, user, context)

            def found(rows: slice, depth: int) -> Slate:
                side = (query and query[rows], pi[rows], depth, left_out[rows], self.rule, self.settings)
                return search(catalogue, *side, allowed and allowed[rows])

            if caps is None:
                return found(slice(0, B), K)
            remaining = catalogue.remaining(left_out, K, allowed)
            return capped_slates(found, K, remaining, catalogue.labels.genres, caps)

    def recall(self, history: Any, K: int = 100, context: Any = None) -> float:
        """The share of the exact slates that this retriever finds: 1 unless it is two-step or has a budget."""
        one, scan = copy(self), copy(self)  # `one` keeps its catalogue, whatever comes or goes meanwhile
        scan.catalogue = self.built(one.catalogue, "exact")
        return found_of(*(each.retrieve(history, K, context=context).items for each in (scan, one)))

    def vectors(self, slate: Slate) -> np.ndarray:
        """(B, K, d): the embeddings of a slate's items, for `rerank`."""
        return self.catalogue.vectors[slate.items]

    def add(
        self, rows: Any = None, *, vectors: Any = None, genres: Genres | None = None, raw_ids: Any = None,
        titles: Any = None,
    ) -> np.ndarray:  # fmt: skip
        """Serve new items, and read them in histories; returns their numbers.

        `rows` go through the item tower: PureSVD rows as `svd.fold_in` makes them. `vectors` are finished embeddings,
        from another item tower, for example. `genres` are for caps: an item without genres passes every cap. `raw_ids`
        are the new items' ids in the log, for `raw=`, `titles` their names.
        """
        new, read = new_items(self.model, rows, vectors)
        with self._writing:
            old = self.catalogue
            labels = old.labels.extended(len(new), raw_ids=raw_ids, genres=genres, titles=titles)
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
            self.folder = store.write(Path(folder), self.catalogue, about, partial(keep_model, self.model))
        return self.folder

    @classmethod
    def load(
        cls, folder: str | Path, model: TwoTower | Run | None = None, *, dataset: Dataset | None = None,
        raw_ids: Sequence[Any] | None = None, genres: Genres | None = None, titles: Sequence[str] | None = None,
        verify: bool = True,
    ) -> Retriever:  # fmt: skip
        """A saved index, memory-mapped; nothing else is needed. `verify` compares all files with their checksums.

        Give the model if the index has none: one of an earlier version, or of a model with modules of your own. The
        index has raw ids, genres and titles; those given replace them, and a data set has those that an index of an
        earlier version lacks.
        """
        catalogue, about, kept = store.read(Path(folder), verify, kept_model if model is None else lambda there: None)
        made = cls.__new__(cls)
        with reading(Path(folder), "write it again with retriever.save"):
            settings = {"ask": "enough", "budget": None, **about["settings"]}  # an earlier version had neither
            made._take(kept if model is None else model, **settings)
            expect(made.settings, dict.fromkeys(("index", "lists", "ask"), str))
        if made.model_hash != about["model"]:
            hashes = f"hash {about['model'][:12]} there, {made.model_hash[:12]} here"
            raise BachError(f"{folder} is the index of another model ({hashes}). Load its run or build a new index")
        labels = made._labels(model, dataset, catalogue.labels, raw_ids=raw_ids, genres=genres, titles=titles)
        made.catalogue = catalogue._replace(labels=labels.resized(len(catalogue.vectors)))
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
