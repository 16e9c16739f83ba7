"""The retriever: histories in, slates out, by the way of serving that fits (eqs. 8 and 23; "Efficient serving").

    exact      a pruned scan of the whole catalogue                     any method   always proved
    two-step   the nearest items of each head from faiss, rescored      any method   proved with lists="exact"
    codebook   cached lists reweighted by π_u, no search at all         …-global     always proved
    auto       the one that was measured to be cheapest; `retriever.why` says why

One retriever may be used from any number of threads: a request reads one `Catalogue` from beginning to end, and `add`
and `remove` put a new one in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from bachlib import BachError
from bachlib.model.towers import Codebook
from bachlib.model.twotower import TwoTower
from bachlib.serve import codebook, costs, exact, store
from bachlib.serve.arrivals import embedded
from bachlib.serve.caps import capped_slate
from bachlib.serve.catalogue import Catalogue, known_ids, lists_of
from bachlib.serve.density import LeftOut, Query
from bachlib.serve.one_core import one_core
from bachlib.serve.slate import Slate, joined, slate_of
from bachlib.serve.steering import Steering
from bachlib.serve.twostep import Kind, Neighbours, two_step
from bachlib.serve.users import Users, float32
from bachlib.train.run import Run

Strategy = Literal["auto", "exact", "two-step", "codebook"]
REQUESTS = 256  # searched for at a time


class Retriever:
    """`retriever.retrieve(history, K)` → Slate."""

    def __init__(
        self,
        model: TwoTower | Run,
        strategy: Strategy = "auto",
        *,
        genres: Sequence[Sequence[str]] | None = None,
        index: Kind = "hnsw",
        M: int | None = None,
        max_M: int | None = None,
        lists: Literal["approximate", "exact"] = "approximate",
    ):
        """`genres`: those of each item (`dataset.items["genres"]`), for caps.

        Two-step: `index` hnsw or ivf; `M` entries per head's list (default: K and the history), growing up to `max_M`
        (default: 4 M) while the bound asks for it and it is in reach; `lists="exact"` adds the scan that proves them.
        """
        self._take(model, genres, index=index, M=M, max_M=max_M, lists=lists)
        with torch.no_grad():
            frozen = self.model.history == "frozen"
            tokens = float32(self.model.token_rows()) if frozen else None
            self.catalogue = Catalogue.of(float32(self.model.items()), tokens)
        self.choose(strategy)

    def _take(self, model: TwoTower | Run, genres: Sequence[Sequence[str]] | None, **settings: Any) -> None:
        model = model.model if isinstance(model, Run) else model
        if not isinstance(model, TwoTower):
            name = getattr(model, "config", {}).get("method", type(model).__name__)
            raise BachError(
                f"a Retriever wants a model with vectors, or a Run (Run.load(folder, dataset)); {name} is none: "
                "it serves every method of the table but mostpop"
            )
        if settings["lists"] not in ("approximate", "exact"):
            raise BachError(f"lists={settings['lists']!r}: should be 'approximate' or 'exact'")
        for name in ("M", "max_M"):
            if settings[name] is not None and not (
                isinstance(settings[name], int | np.integer) and settings[name] >= 1
            ):
                raise BachError(f"{name} should be a whole number ≥ 1; got {settings[name]!r}")
        if genres is not None and len(genres) < model.n_items:
            raise BachError(f"genres should hold those of each of {model.n_items:,} items; got {len(genres):,}")
        self.model, self.users, self.settings, self.genres = model, Users(model), settings, genres
        self.rule, self.folder = self.users.rule, None
        self.model_hash = store.model_hash(model)  # of the weights it is built with
        self._writing = threading.Lock()

    def choose(self, strategy: Strategy) -> None:
        """Serve by another strategy from now on; readers go on with the old one until it is built."""
        if strategy not in Strategy.__args__:
            raise BachError(f"strategy={strategy!r}: should be one of {', '.join(Strategy.__args__)}")
        if strategy == "codebook" and not self.shared:
            raise BachError("strategy='codebook' needs heads that all users share: p-bach-global or v-bach-global")
        with self._writing:
            if strategy == "auto":
                self.strategy, self.catalogue, self.why = costs.choose(self)
            else:
                self.catalogue = self.built(self.catalogue, strategy)
                self.strategy, self.why = strategy, f"{strategy}: asked for"

    @property
    def shared(self) -> bool:
        """Do all users share their heads?"""
        encoder = self.model.encoder
        return isinstance(encoder, Codebook) and encoder.shared is not None and self.model.kernel is not None

    def built(self, bare: Catalogue, strategy: str) -> Catalogue:
        """A catalogue with what the strategy needs."""
        if strategy == "two-step":
            return bare._replace(index=Neighbours(bare.items, self.settings["index"]), codebook=None)
        if strategy == "codebook":
            with torch.no_grad():
                heads = self.model.encoder.shared
                kappa = self.model.kappa_net(heads).double()
                log_c = self.model.kernel.log_normalizer(kappa, self.model.d)
            parts = (float32(heads), *(x.cpu().numpy() for x in (kappa, log_c)))
            return bare._replace(codebook=codebook.compute(*parts, bare.items, self.rule), index=None)
        return bare._replace(index=None, codebook=None)

    # ------------------------------------------------------------------------------------------------- requests

    def retrieve(
        self,
        history: Any,
        K: int = 100,
        pi: np.ndarray | Steering | None = None,
        exclude: Any = None,
        *,
        keep_history: bool = False,
        user: Any = None,
        caps: Mapping[str, int] | None = None,
    ) -> Slate:
        """The K best items of each history: (B, n) item numbers padded with −1, a list of lists, or one list.

        The model reads the last n_hist items; all of them are left out of the slate unless `keep_history`. An empty
        history is served by what the model thinks of nobody in particular. `pi` replaces π_u, (k,) or (B, k), or is a
        `Steering` of it. `exclude`: item numbers, one list for all or one per request. `caps`: at most so many items
        of a genre. `user` is for models with a free π per user. Wrong input is a BachError, and nothing has changed.
        """
        return self._answer(self.catalogue, history, K, pi, exclude, keep_history, user, caps)

    def recall(self, history: Any, K: int = 100) -> float:
        """The share of the exact slates that this retriever's slates hold: 1 unless lists are approximate."""
        both = (self.catalogue, self.built(self.catalogue, "exact"))
        found, wanted = (self._answer(one, history, K).items for one in both)
        return float(np.mean([np.isin(a, b).mean() for a, b in zip(wanted, found, strict=True)]))

    def _answer(
        self, catalogue: Catalogue, history, K: int, pi=None, exclude=None, keep_history=False, user=None, caps=None
    ) -> Slate:
        histories = lists_of("history", history, len(catalogue.vectors))
        B = len(histories)
        if not B:
            raise BachError("history holds no request: give at least one list of items, which may be empty")
        unwanted = lists_of("exclude", [] if exclude is None else exclude, len(catalogue.vectors), B)
        own = [[]] * B if keep_history else histories
        left_out = [
            np.concatenate([np.asarray(part, np.int64) for part in parts]) for parts in zip(own, unwanted, strict=True)
        ]
        with one_core():
            catalogue.left_out(left_out, K)  # are there so many?
            side = (catalogue, histories, pi, user)  # a codebook needs π only
            asked = (None, self.users.weights(*side)) if catalogue.codebook is not None else self.users.query(*side)
            K = int(K)
            if caps is None:
                return self._search(catalogue, asked, K, left_out)
            return joined([self._capped(catalogue, asked, row, K, left_out[row], caps) for row in range(B)])

    def _capped(self, catalogue: Catalogue, asked, row: int, K: int, left_out: np.ndarray, caps) -> Slate:
        """One request with caps: how far down the ranking it has to go is its own affair."""
        query, pi = asked
        own = (query and query[row : row + 1], pi[row : row + 1])
        most = len(catalogue.numbers) - len(catalogue.places(np.unique(left_out)))
        search = lambda depth: self._search(catalogue, own, depth, [left_out])  # noqa: E731
        return capped_slate(search, K, most, self.genres, caps, row)

    def _search(self, catalogue: Catalogue, asked: tuple[Query | None, np.ndarray], K: int, left_out) -> Slate:
        """By what the catalogue has been built for, some requests at a time."""
        query, pi = asked
        parts = []
        for first in range(0, len(pi), REQUESTS):
            rows = slice(first, first + REQUESTS)
            out = catalogue.left_out(left_out[rows], K)
            parts.append(self._found(catalogue, query and query[rows], pi[rows], K, out))
        return joined(parts)

    def _found(self, catalogue: Catalogue, query: Query | None, pi: np.ndarray, K: int, out: LeftOut) -> Slate:
        proved, everything = np.ones(len(pi), bool), np.full(len(pi), len(catalogue.items))
        if catalogue.codebook is not None:
            best, looked = codebook.top_k(catalogue.codebook, pi, K, out, self.rule)
            return slate_of(best, catalogue.numbers, pi, "codebook", proved, proved, looked)
        if catalogue.index is None:
            best = exact.top_k(query, catalogue.items, K, out)
            return slate_of(best, catalogue.numbers, pi, "exact", proved, proved, everything)
        lengths = (self.settings["M"], self.settings["max_M"])
        best, lists = two_step(query, catalogue.items, K, out, catalogue.index, *lengths)
        if self.settings["lists"] == "approximate":
            return slate_of(best, catalogue.numbers, pi, "two-step", ~proved, lists.enough, lists.depth.sum(1))
        users = np.repeat(np.arange(len(pi)), K)
        best = exact.top_k(query, catalogue.items, K, out, start=(users, best.found.ravel()))
        return slate_of(best, catalogue.numbers, pi, "two-step", proved, proved, everything)

    # --------------------------------------------------------------------------------------- items come and go

    def vectors(self, slate: Slate) -> np.ndarray:
        """(B, K, d): the embeddings of a slate's items, for `rerank`."""
        return self.catalogue.vectors[slate.items]

    def add(
        self,
        rows: np.ndarray | Tensor | None = None,
        *,
        vectors: np.ndarray | None = None,
        genres: Sequence[Sequence[str]] | None = None,
    ) -> np.ndarray:
        """Serve new items, and read them in histories; returns their numbers.

        `rows` go through the item tower: PureSVD rows as `svd.fold_in` makes them. `vectors` are finished embeddings,
        from an item tower of your own, say. `genres` are for caps: an item without any passes every cap.
        """
        new, read = embedded(self.model, rows, vectors)
        with self._writing:
            old = self.catalogue
            numbers = np.arange(len(old.vectors), len(old.vectors) + len(new))
            tokens = None if self.model.history == "tower" else np.concatenate([old.tokens, read])
            together = np.concatenate([old.vectors, new])
            made = self.built(Catalogue.of(together, tokens, np.concatenate([old.numbers, numbers])), self.strategy)
            if self.genres is not None:
                self.genres = [*self.genres[: numbers[0]], *(genres if genres is not None else [[]] * len(numbers))]
            self.catalogue = made
        return numbers

    def remove(self, numbers: Any) -> None:
        """Serve these items no more; histories may still hold them."""
        with self._writing:
            old = self.catalogue
            gone = known_ids("remove", numbers, len(old.vectors))
            left = np.setdiff1d(old.numbers, gone)
            if not len(left):
                raise BachError("remove: nothing would be left to serve")
            tokens = None if self.model.history == "tower" else old.tokens
            self.catalogue = self.built(Catalogue.of(old.vectors, tokens, left), self.strategy)

    # -------------------------------------------------------------------------------------------------- keeping

    def save(self, folder: str | Path) -> Path:
        """Write the index; whoever has an older one of this folder open goes on with it (see `reload`)."""
        if store.model_hash(self.model) != self.model_hash:
            raise BachError("the model has changed since this index was built: build it anew, then save it")
        with self._writing:
            about = {"strategy": self.strategy, "rule": self.rule, "settings": self.settings, "why": self.why}
            self.folder = store.write(Path(folder), self.catalogue, about | {"model": self.model_hash})
        return self.folder

    @classmethod
    def load(cls, folder: str | Path, model: TwoTower | Run, *, genres: Any = None, verify: bool = True) -> Retriever:
        """An index from its folder, memory-mapped, with the model it was made with; another model is refused.

        `verify` compares every file with its checksum, which reads all of it once.
        """
        catalogue, about = store.read(Path(folder), verify)
        made = cls.__new__(cls)
        made._take(model, genres, **about["settings"])
        store.check_model(folder, about, made.model_hash)
        made.strategy, made.why, made.catalogue, made.folder = about["strategy"], about["why"], catalogue, Path(folder)
        return made

    def reload(self) -> None:
        """Take what was saved last to the folder this index came from; requests under way end with the old one."""
        if self.folder is None:
            raise BachError("this index was neither saved nor loaded: there is nothing to reload")
        fresh = Retriever.load(self.folder, self.model, genres=self.genres)
        with self._writing:
            self.settings, self.strategy, self.why = fresh.settings, fresh.strategy, fresh.why
            self.catalogue = fresh.catalogue

    def __repr__(self) -> str:
        return f"Retriever({self.strategy}, {len(self.catalogue.numbers):,} items, {self.rule}; {self.why})"
