"""A shortlist: all that steering π needs when there is no kernel, and when its slates are proved.

For one user the first M items of each head, and of each of these items the density σ_r(i) = C_d(κ_r) ω_κ(t_r) of every
head. Any π then ranks them by Σ_r π_r σ_r(i) (eq. 23). An item that is on no list has σ_r(i) ≤ σ_r^(M), what the M-th
item of head r has, so it scores at most Σ_r π_r σ_r^(M): a slate whose last item beats that is the slate of the whole
catalogue. The same bound as in two-step retrieval, for lists that are exact.

Of many heads only some are steered one by one. The others speak with one voice, in the proportions π_u has among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int

from bachlib import BachError
from bachlib.serve.catalogue import lists_of
from bachlib.serve.density import Query, log_sum_exp
from bachlib.serve.retriever import Retriever

FLOATS = 1e-9  # log densities of float64 arithmetic, in whatever order it was done, are nearer to each other than this


class Shortlist(NamedTuple):
    """A voice is a head, or all heads that are not steered one by one (then the last; it has no κ and no cosine)."""

    items: Int[np.ndarray, " m"]  # numbers, ascending
    log_sigma: Float[np.ndarray, "m c"]  # log density of each voice
    cosine: Float[np.ndarray, "m c"]  # NaN where a voice is many heads
    log_floor: Float[np.ndarray, " c"]  # log σ^(M): no item outside has more; −∞ where none is outside
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
    retriever: Retriever, history: Any, M: int = 100, *, apart: Sequence[int] | None = None, user: Any = None
) -> Shortlist:
    """The shortlist of one history, whose items are left out. `apart`: heads to steer one by one (default: all)."""
    model, catalogue = retriever.model, retriever.catalogue
    if model.kernel is None:
        raise BachError(f"{model.config.get('method', 'this model')} weighs no heads: there is no π to steer")
    if not isinstance(M, int | np.integer) or M < 1:
        raise BachError(f"M should be a whole number ≥ 1; got {M!r}")
    histories = lists_of("history", history, len(catalogue.vectors))
    if len(histories) != 1:
        raise BachError(f"a shortlist is for one history; got {len(histories)}")
    query, pi = retriever.users.query(catalogue, histories, user=user)
    voices = _voices(pi[0], apart)
    cosine = catalogue.items.astype(np.float64) @ query.heads[0].astype(np.float64).T  # (n, k)
    log_c = model.kernel.log_normalizer(torch.from_numpy(query.kappa), model.d).numpy()
    log_sigma = _spoken(Query(query.heads, log_c, query.kappa, query.rule).terms_at(cosine), voices)
    served = np.setdiff1d(np.arange(len(catalogue.numbers)), catalogue.places(np.unique(histories[0])))
    ranked = np.sort(-log_sigma[served], axis=0)
    depth = min(M, len(served))
    places = served[(log_sigma[served] >= -ranked[depth - 1]).any(1)]
    everything = len(places) == len(served)
    one = (voices > 0).sum(1) == 1
    head = voices.argmax(1)
    return Shortlist(
        catalogue.numbers[places], log_sigma[places], np.where(one, cosine[np.ix_(places, head)], np.nan),
        np.full(len(voices), -np.inf) if everything else -ranked[depth - 1],
        (voices > 0) @ pi[0], np.where(one, query.kappa[0, head], np.nan), voices, len(served),
    )  # fmt: skip


def rerank(of: Shortlist, pi: Float[np.ndarray, " c"], K: int = 15) -> Reranked:
    """The K best of a shortlist for any weights of its voices, and whether they are the best of the catalogue.

    The page of a report does the same in the reader's browser (`report.js`); this is what it is tested against.
    """
    pi = np.asarray(pi, float)
    if pi.shape != of.pi.shape or not (np.isfinite(pi) & (pi >= 0)).all() or not pi.sum() > 0:
        raise BachError(f"pi should be {len(of.pi)} numbers ≥ 0, not all of them 0; got {pi.tolist()}")
    if not 1 <= K <= len(of.items):
        raise BachError(f"K={K}: should be between 1 and {len(of.items)}, the items of this shortlist")
    with np.errstate(divide="ignore"):
        log_pi = np.log(pi / pi.sum())
    terms = log_pi + of.log_sigma
    scores = log_sum_exp(terms)
    order = np.lexsort((of.items, -scores))
    best, room = order[:K], 2 * of.margin
    bound = log_sum_exp(np.where(pi > 0, log_pi + of.log_floor, -np.inf)[None])[0]
    gaps = -np.diff(scores[order[: K + 1]])
    share = np.exp(terms[best] - scores[best, None])
    enough, apart = bool(scores[best[-1]] - bound > room), bool((gaps > room).all())
    return Reranked(of.items[best], scores[best], share, enough, apart)


def _voices(pi: Float[np.ndarray, " k"], apart: Sequence[int] | None) -> Float[np.ndarray, "c k"]:
    heads = np.arange(len(pi)) if apart is None else np.asarray(apart, int)
    if len(set(heads.tolist())) < len(heads) or not ((heads >= 0) & (heads < len(pi))).all() or not len(heads):
        raise BachError(f"apart should be some of the heads 0 … {len(pi) - 1}, none twice; got {apart!r}")
    others = np.setdiff1d(np.arange(len(pi)), heads)
    voices = np.eye(len(pi))[heads]
    if not len(others):
        return voices
    rest = np.zeros(len(pi))
    rest[others] = np.maximum(pi[others], 1e-300)
    return np.vstack([voices, rest / rest.sum()])


def _spoken(log_sigma: Float[np.ndarray, "n k"], voices: Float[np.ndarray, "c k"]) -> Float[np.ndarray, "n c"]:
    """log density of each voice."""
    with np.errstate(divide="ignore"):
        said = [log_sum_exp(log_sigma[:, row > 0] + np.log(row[row > 0])) for row in voices]
    return np.stack(said, 1)
