"""Steering π_u in a page that has no kernel: sliders, the shortlists they rank, and when a slate is proved.

A shortlist of one user holds the first M items of each head, and of each of these items the density
σ_r(i) = C_d(κ_r) ω_κ(t_r) of every head. Any π then ranks them by Σ_r π_r σ_r(i) (eq. 23). An item outside of the lists
has σ_r(i) ≤ σ_r^(M), the density of the M-th item of head r, so it scores at most Σ_r π_r σ_r^(M). A slate whose last
item beats that bound is the slate of the whole catalogue. It is the bound of two-step retrieval, for exact lists.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from html import escape, unescape
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.serve.catalogue import known_ids
from bachlib.serve.density import Query, log_sum_exp
from bachlib.serve.retriever import Retriever
from bachlib.show.people import People, clustered, people
from bachlib.show.plots.style import GREY, colour, tag

MIME = "application/vnd.bach.steering+json"
K = 15  # items of a slate
DEPTH = 40  # first items of each π that are kept in a shortlist
NEXT = 800  # of the others those that come nearest to a slate: these are in small groups
DECIMALS = 6  # of log densities; the margin of the proof accounts for the rounding
NEAR = 3  # items of the history that are named for each item
LAST = 8  # items of the history that are listed
FLOATS = 1e-9  # two float64 log densities of the same item differ by less, whatever the order of the arithmetic


class Sliders(NamedTuple):
    """What a notebook shows: a table of one slate, which the page of `bach report` makes steerable."""

    data: dict[str, Any]
    table: str

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        return {MIME: packed(self.data), "text/html": self.table, "text/plain": repr(self)}

    def __repr__(self) -> str:
        return f"Sliders({'; '.join(one['name'] for one in self.data['users'])})"


def packed(data: dict[str, Any]) -> dict[str, str]:
    """For a notebook, which should stay small: the JSON, compressed."""
    return {"zlib": base64.b64encode(zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 9)).decode()}


def unpacked(data: dict[str, str]) -> dict[str, Any]:
    return json.loads(zlib.decompress(base64.b64decode(data["zlib"])))


def sliders(model: Any, dataset: Dataset, of: People | None = None, users: int = 6) -> Sliders:
    """Sliders for π_u of some users who differ; `model` is a model or a run."""
    retriever = Retriever(model, "exact")
    of = of or people(retriever.model, dataset)
    made = [_user(retriever, dataset, of.seen_by(at), at) for at in of.some[:users]]
    lists = [one for one, _ in made]
    wanted = sorted({i for one in lists for i in (*one["items"], *one["history"], *chain(*one["near"]))})
    titles, most = dataset.titles, min(K, *(len(one["items"]) for one in lists))
    data = {"K": most, "titles": {str(i): titles[i] for i in wanted}, "users": lists}
    return Sliders(data, _table(lists[0], rerank(made[0][1], lists[0]["pi"], most), titles))


def _table(one: dict[str, Any], slate: Reranked, titles: Sequence[str]) -> str:
    """A slate as HTML for places without scripts: each item with the heads that bring it."""
    rows = ""
    for place, (item, share) in enumerate(zip(slate.items, slate.share, strict=True), 1):
        heads = ", ".join(f"{share[r]:.0%} {one['names'][r]}" for r in np.argsort(-share)[:3] if share[r] >= 0.05)
        rows += f"<tr><td>{place}</td><td>{escape(titles[item])}</td><td>{escape(heads)}</td></tr>"
    told = "In the page that <code>bach report</code> or <code>bach run</code> writes, sliders steer π_u here."
    head = "<tr><th></th><th>item</th><th>share of the heads in its score</th></tr>"
    return f"<p>The slate of {escape(one['name'])}.</p><table>{head}{rows}</table><p>{told}</p>"


def _user(retriever: Retriever, dataset: Dataset, of: People, at: int) -> tuple[dict[str, Any], Shortlist]:
    """What the sliders of one user work on; `page.js` reads it."""
    u, rest = int(of.users[at]), bool(of.left)
    earlier, later = np.split(np.asarray(dataset.sequence(u), np.int64), [int(dataset.begins["test"][u])])
    context = dataset.context_for(retriever.model, [u], "test")
    found = _compact(shortlist(retriever, earlier, dataset.n_items, apart=of.shown, user=u, context=context))
    vectors, known = retriever.catalogue.vectors, np.unique(earlier)
    cosine = vectors[found.items] @ vectors[known].T
    near = np.argsort(-cosine, axis=1, kind="stable")[:, :NEAR]
    names = [unescape(tag(int(r), name, 60)) for r, name in zip(of.shown, of.names_of(at), strict=True)]
    first = np.argsort(-found.pi[: len(names)])[:2]
    told = {
        "name": f"user {u}: " + ", ".join(f"{found.pi[n]:.0%} {names[n]}" for n in first),
        "names": names + [f"the other {of.left} heads"] * rest,
        "colours": [colour(int(r)) for r in of.shown] + [GREY] * rest,
        "pi": found.pi.tolist(),
        "kappa": _numbers(found.kappa, 2),
        "floor": _numbers(found.log_floor, DECIMALS),
        "margin": found.margin,
        "servable": found.servable,
        "items": found.items.tolist(),
        "sigma": _numbers(found.log_sigma, DECIMALS),
        "cosine": _numbers(found.cosine, 3),
        "near": known[near].tolist(),
        "nearCosine": _numbers(np.take_along_axis(cosine, near, 1), 2),
        "history": earlier[-LAST:][::-1].tolist(),
        "later": later.tolist(),
    }
    return told, found


def _numbers(values: np.ndarray, decimals: int) -> list:
    """For JSON: rounded, None where there is no number."""
    return np.where(np.isfinite(values), np.round(values.astype(float), decimals), None).tolist()


def _compact(full: Shortlist) -> Shortlist:
    """A small shortlist that proves most slates, of one that holds the whole catalogue.

    It keeps the first items of many π. The other items are in groups of similar densities. Of a group the largest
    density of each voice is noted: together they are little more than what one of its items has, so the bound is tight.
    """
    c, rng, n = len(full.pi), np.random.default_rng(0), len(full.items)
    top = full.log_sigma.max(0)
    density = np.exp(full.log_sigma - top).astype(np.float32)  # of each voice, its largest is 1
    drawn = np.vstack([full.pi, np.full(c, 1 / c), *(rng.dirichlet(np.full(c, a), 100) for a in (0.2, 1))])
    scores = density @ np.vstack([np.eye(c), drawn * np.exp(top - top.max())]).astype(np.float32).T
    ranked = -np.sort(-scores, axis=0)[[min(K, n) - 1, min(DEPTH, n) - 1]]
    kept, close = (scores >= ranked[1]).any(1), (scores / np.maximum(ranked[0], 1e-30)).max(1)
    others, floors = np.argsort(-close, kind="stable"), []  # those that come nearest to a slate first
    others = others[~kept[others]]
    for part, groups in ((others[:NEXT], 128), (others[NEXT:], 32)):
        group = clustered(np.sqrt(density[part]), groups)
        floors += [full.log_sigma[part[group == g]].max(0) for g in np.unique(group)]
    found = full._replace(items=full.items[kept], log_sigma=full.log_sigma[kept], cosine=full.cosine[kept])
    return found._replace(log_floor=np.stack(floors) if floors else full.log_floor[None]).rounded(DECIMALS)


class Shortlist(NamedTuple):
    """A voice is a head or, the last one, all heads not steered one by one, mixed as π_u does: no κ and no cosine."""

    items: Int[np.ndarray, " m"]  # numbers, ascending
    log_sigma: Float[np.ndarray, "m c"]  # log density of each voice
    cosine: Float[np.ndarray, "m c"]  # NaN where a voice is many heads
    log_floor: Float[np.ndarray, "*g c"]  # log σ^(M): no item outside (of each group) has more; −∞ if none is outside
    pi: Float[np.ndarray, " c"]  # π_u of the voices
    kappa: Float[np.ndarray, " c"]
    voices: Float[np.ndarray, "c k"]  # which heads a voice is made of, in which proportions
    servable: int  # items of the catalogue that are not in the history
    margin: float = FLOATS  # how far a log density may be from the exact one

    def rounded(self, decimals: int) -> Shortlist:
        """With fewer digits, for a file, and a margin that knows of it."""
        log_sigma, log_floor = (np.round(x, decimals) for x in (self.log_sigma, self.log_floor))
        return self._replace(log_sigma=log_sigma, log_floor=log_floor, margin=FLOATS + 0.5 * 10.0**-decimals)

    def full(self, pi: Float[np.ndarray, " c"]) -> Float[np.ndarray, " k"]:
        """Weights of the voices as weights of all heads, for `Retriever.retrieve(…, pi=)`."""
        return np.asarray(pi, float) @ self.voices


class Reranked(NamedTuple):
    items: Int[np.ndarray, " K"]
    scores: Float[np.ndarray, " K"]  # log m(i | u)
    share: Float[np.ndarray, "K c"]  # of each voice in the score
    enough: bool  # no item outside of the shortlist can belong here
    apart: bool  # no two items are so close that the margin could turn them round

    @property
    def proved(self) -> bool:
        """Exactly the K best of the whole catalogue, in order."""
        return self.enough and self.apart


def shortlist(
    retriever: Retriever, history: Any, M: int = 100, *, apart: Any = None, user: Any = None, context: Any = None
) -> Shortlist:
    """The shortlist of one history, whose items are left out. `apart`: numbers of heads to steer alone, or all."""
    model, catalogue = retriever.model, retriever.catalogue
    if model.kernel is None:
        raise BachError(f"{model.config.get('method', 'this model')} weighs no heads: there is no π to steer")
    history = known_ids("history", history, len(catalogue.vectors), pads=True)
    query, (pi,) = retriever.users.query(catalogue, [history], user=user, context=context)
    apart = np.arange(len(pi)) if apart is None else np.asarray(apart)
    voices, rest = np.eye(len(pi))[apart], np.maximum(pi, 1e-300)
    rest[apart] = 0
    if rest.any():
        voices = np.vstack([voices, rest / rest.sum()])
    cosine = catalogue.items.astype(np.float64) @ query.heads[0].astype(np.float64).T  # (n, k)
    log_c = model.kernel.log_normalizer(torch.from_numpy(query.kappa), model.d).numpy()
    terms = Query(query.heads, log_c, query.kappa, query.rule).terms_at(cosine)
    log_sigma = np.stack([log_sum_exp(terms[:, row > 0] + np.log(row[row > 0])) for row in voices], 1)  # (n, c)
    left_out = np.union1d(catalogue.gone, catalogue.places(np.unique(history)))
    served = np.setdiff1d(np.arange(len(catalogue.numbers)), left_out)
    floor = -np.sort(-log_sigma[served], axis=0)[min(M, len(served)) - 1]
    places = served[(log_sigma[served] >= floor).any(1)]
    one, head = (voices > 0).sum(1) == 1, voices.argmax(1)
    return Shortlist(
        catalogue.numbers[places], log_sigma[places], np.where(one, cosine[np.ix_(places, head)], np.nan),
        np.where(len(places) < len(served), floor, -np.inf),
        (voices > 0) @ pi, np.where(one, query.kappa[0, head], np.nan), voices, len(served),
    )  # fmt: skip


def rerank(of: Shortlist, pi: Float[np.ndarray, " c"], K: int = K) -> Reranked:
    """The K best of a shortlist for any weights of its voices, and whether they are the best of the catalogue.

    The page of a report does the same in the reader's browser (`page.js`); this is what it is tested against.
    """
    pi = np.asarray(pi, float)
    if pi.shape != of.pi.shape or not (np.isfinite(pi) & (pi >= 0)).all() or not pi.sum() > 0:
        raise BachError(f"pi should be {len(of.pi)} numbers ≥ 0, not all of them 0; got {pi.tolist()}")
    with np.errstate(divide="ignore"):
        log_pi = np.log(pi / pi.sum())
    terms = log_pi + of.log_sigma
    scores = log_sum_exp(terms)
    order = np.lexsort((of.items, -scores))
    best, room = order[:K], 2 * of.margin
    bound = log_sum_exp(np.where(pi > 0, log_pi + np.atleast_2d(of.log_floor), -np.inf)).max()
    gaps = -np.diff(scores[order[: K + 1]])
    share = np.exp(terms[best] - scores[best, None])
    enough, apart = bool(scores[best[-1]] - bound > room), bool((gaps > room).all())
    return Reranked(of.items[best], scores[best], share, enough, apart)
