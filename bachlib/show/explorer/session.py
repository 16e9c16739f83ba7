"""One person in front of a retriever: a user or a typed history, heads with names, π to move, a slate, and why.

The explorer's widgets sit on this; it knows nothing of widgets. Everything is in the terms of the data set: users and
items by number, titles and genres from its tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.evaluate.diagnostics import interest_of_heads
from bachlib.evaluate.meaning import genres_of, head_names
from bachlib.model.towers import PiTable
from bachlib.model.twotower import TwoTower
from bachlib.serve.retriever import Retriever
from bachlib.serve.slate import Slate
from bachlib.serve.steering import normalised
from bachlib.train.run import Run

Models = Mapping[str, Run | TwoTower | Retriever]


class Heads(NamedTuple):
    """What a model makes of a history."""

    names: list[str]
    pi: Float[np.ndarray, " k"]
    kappa: Float[np.ndarray, " k"]
    vectors: Float[np.ndarray, "k d"]


class Session:
    """`choose` a method, `be` a user or `read` a history; then `heads`, `slate` and `why` are about that."""

    def __init__(self, models: Models, dataset: Dataset, K: int = 15):
        if not models:
            raise BachError("give at least one model: {'p-bach': run, …}")
        self.dataset, self.K, self.retrievers = dataset, K, {}
        for name, model in models.items():
            one = self.retrievers[name] = model if isinstance(model, Retriever) else Retriever(model, "exact")
            if one.rule == "max over heads":
                raise BachError(f"{name} has no π to show or to move; give a BACH model")
            if (n := one.model.n_items) != dataset.n_items:
                wrong = f"{name} was trained on {n:,} items, the data set has {dataset.n_items:,}"
                raise BachError(f"{wrong}: give the data set of the training")
            if one.model.n_context and dataset.context is None:
                raise BachError(f"{name} reads a context: give the data set of the training, dataset.with_context(…)")
        self.genres = genres_of(dataset)
        self._searched = pd.Series(dataset.titles).str.lower()
        self._liked = dataset.matrix("train")
        self._count = np.asarray(self._liked.sum(0)).ravel()
        self.choose(next(iter(self.retrievers)))
        self.be(0)

    def choose(self, method: str) -> None:
        if method not in self.retrievers:
            raise BachError(f"there is no method {method!r}; there are {', '.join(self.retrievers)}")
        self.method, self.retriever, self._heads = method, self.retrievers[method], None

    def be(self, user: int) -> None:
        """A user of the data set, before the held-out items; everything they had is left out of slates."""
        past = self.dataset.history([user], "test", len(self.dataset.sequence(user)))[0]
        self.user, self.had, self._context_of = int(user), past[past >= 0], int(user)
        self.later = set(self.dataset.targets([user], "test")[0].tolist()) - {-1}
        self.history, self._heads = self.had, None

    def read(self, history: Sequence[int]) -> None:
        """Another history, oldest first. It belongs to no user; the context, and the excluded items, of the user it was
        made from stay."""
        if list(history) == self.history.tolist():
            return
        if wrong := [i for i in history if not 0 <= i < self.dataset.n_items]:
            raise BachError(f"there is no item {wrong[0]}; items are 0 … {self.dataset.n_items - 1}")
        if isinstance(self.retriever.model.gate, PiTable):
            raise BachError(f"{self.method} has a π for each user of the data set, and none for a typed history")
        self.user, self._heads, self.history = None, None, np.asarray(history, np.int64)
        if not len(self.history):
            self.had, self.later = self.history, set()  # from nothing

    def find_items(self, text: str, most: int = 12) -> list[int]:
        """Items whose title or number fits, the most popular first; without a text the most popular of all."""
        text = text.strip().lower()
        found = np.flatnonzero(self._searched.str.contains(text, regex=False))
        if text.isdecimal() and int(text) < self.dataset.n_items:
            found = np.unique(np.append(found, int(text)))
        exact = (self._searched.to_numpy()[found] == text) | (found.astype(str) == text)
        return found[np.lexsort((-self._count[found], ~exact))][:most].tolist()

    def find_users(self, text: str, most: int = 20) -> list[int]:
        """Users by number or the log's own id, or by what they like: a genre or a word of a title."""
        text = text.strip().lower()
        if not text:
            return list(range(min(most, self.dataset.n_users)))
        named = np.flatnonzero(self.dataset.users["raw_id"].astype(str).str.lower() == text)
        if text.isdecimal() and int(text) < self.dataset.n_users:
            named = np.unique(np.append(int(text), named))
        wanted = self._searched.str.contains(text, regex=False).to_numpy().astype(np.float32)
        for g, name in enumerate(self.genres.names):
            if text in name.lower():
                wanted = np.maximum(wanted, self.genres.member[:, g])
        score = self._liked @ wanted
        order = np.argsort(-score, kind="stable")
        return [*named, *(u for u in order[score[order] > 0] if u not in named)][:most]

    def about_user(self, user: int) -> str:
        """A line to recognise a user by: number of likes, genres liked more than others like them."""
        own = self._liked[user].indices
        told = f"user {user} · {len(self.dataset.sequence(user))} items"
        if self.genres.names and len(own):
            share = self.genres.member[own].mean(0)
            tells = share * np.log(np.maximum(share, 1e-12) / np.maximum(self.genres.likes, 1e-12))
            told += " · " + ", ".join(self.genres.names[g] for g in np.argsort(-tells)[:2])
        return told

    def title(self, item: int) -> str:
        return self.dataset.titles[item] if item < self.dataset.n_items else f"item {item}"  # one that came later

    def genres_of_item(self, item: int) -> list[str]:
        member = self.genres.member[item : item + 1]  # empty for an item that came later
        return [self.genres.names[g] for g in np.flatnonzero(member)]

    @property
    def context(self) -> np.ndarray | None:
        """The context of the last user before the test items, if the model reads one."""
        return self.dataset.context_for(self.retriever.model, [self._context_of], "test")

    @property
    def heads(self) -> Heads:
        """Heads of the history, with names: genres they have more of, or the nearest item where there are no genres."""
        if self._heads is None:
            query, pi = self.retriever.users.query(
                self.retriever.catalogue, [self.history], user=self.user, context=self.context
            )
            vectors, items = query.heads[0], self.retriever.catalogue.vectors[: self.dataset.n_items]
            if self.genres.names:
                share = interest_of_heads(self.retriever.model, vectors[None], self.genres.member, items)
                names = head_names(share[0].cpu().numpy(), self.genres)
            else:
                names = [f"like {self.title(int(i))}" for i in (vectors @ items.T).argmax(1)]
            self._heads = Heads(names, pi[0], query.kappa[0], vectors)
        return self._heads

    def steered(self, weights: Mapping[int, float]) -> Float[np.ndarray, " k"]:
        """π with other weights for some heads; the others keep theirs, and all are scaled to sum to one."""
        pi = self.heads.pi.copy()
        pi[list(weights)] = list(weights.values())
        return normalised(pi[None], "these weights")[0]

    def slate(self, pi: Float[np.ndarray, " k"] | None = None) -> Slate:
        """The best K items for a π, the model's own if nothing is said."""
        left_out = np.unique(np.concatenate([self.had, self.history]))
        served = self.retriever.catalogue.served
        K = min(self.K, len(served) - int(np.isin(left_out, served).sum()))
        if not K:
            raise BachError("this history holds every item: none is left to show")
        given = {"user": self.user, "context": self.context}
        return self.retriever.retrieve([self.history], K, pi=pi, exclude=left_out, **given)

    def why(self, item: int, pi: Float[np.ndarray, " k"] | None = None) -> Why:
        """Which head brings an item, and what of the history is like it."""
        heads, model, vectors = self.heads, self.retriever.model, self.retriever.catalogue.vectors
        pi, cosine = heads.pi if pi is None else pi, heads.vectors @ vectors[item]
        t, kappa = (torch.from_numpy(x).double() for x in (cosine, heads.kappa))
        sigma = model.kernel.log_density(t, kappa, model.d).numpy()
        with np.errstate(divide="ignore"):
            terms = np.log(pi) + sigma
        score = float(np.logaddexp.reduce(terms))
        table = {"head": heads.names, "π": pi, "κ": heads.kappa, "cosine": cosine, "share": np.exp(terms - score)}
        likeness = vectors[near := np.unique(self.history)] @ vectors[item]
        first = np.argsort(-likeness)[:3]
        like = list(zip(near[first].tolist(), likeness[first].tolist(), strict=True))
        return Why(item, score, pd.DataFrame(table), like)


class Why(NamedTuple):
    item: int
    score: float  # log m(i | u)
    heads: pd.DataFrame  # a row per head: π, κ, cosine, share of the score
    like: list[tuple[int, float]]  # items of the history closest to it, with their cosines
