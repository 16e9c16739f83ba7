"""The half of serving that needs no torch: the search in a saved index once heads, π and κ are known.

server = Server("outputs/index/movies")                                  # of any method and strategy, memory-mapped
slate = server.retrieve(heads, pi, kappa, K=20, exclude=[3, 17])         # heads, π and κ come from elsewhere
scores = rescore(candidates, heads, pi, kappa, rule="power-spherical")   # of candidates that came from anywhere
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import threadpoolctl
from jaxtyping import Float, Int

from bachlib import BachError
from bachlib.serve import codebook, exact, hybrid, store
from bachlib.serve.catalogue import Catalogue, as_numbers, checked_K, lists_of, unit_rows
from bachlib.serve.density import Best, LeftOut, Query, Rule
from bachlib.serve.slate import Slate, joined
from bachlib.serve.steering import Pi, checked_pi, pi_of
from bachlib.serve.twostep import two_step

REQUESTS = 256  # searched for at a time
SHORT, NARROW = 32, 2  # an allow-list of less than 1/32 of the items is not searched, below half no index is asked
ROWS = 1 << 22  # that allow-lists leave out, at a time
RULES = Rule.__args__


class Server:
    """Serves what `Retriever.save` wrote, with the same slates. Any number of processes can share the files."""

    def __init__(self, folder: str | Path, *, verify: bool = True):
        self.catalogue, about, _ = store.read(Path(folder), verify)
        self.rule, self.strategy, self.settings = about["rule"], about["strategy"], about["settings"]
        self.settings = {"ask": "enough", "budget": None, **self.settings}  # an earlier version had neither
        book = self.catalogue.codebook if self.strategy == "codebook" and not about.get("own_heads") else None
        self.shared = None if book is None else (book.prototypes, book.kappa)  # heads and κ if all users share them

    def retrieve(
        self, heads: Any = None, pi: Any = None, kappa: Any = None, K: int = 100, exclude: Any = None, only: Any = None,
        *, log_pi: Any = None,
    ) -> Slate:  # fmt: skip
        """The K best items of each user: heads (B, k, d), π (or log π) and κ (B, k), or those of one user. A codebook
        that all users share has heads and κ in the index, maxima over heads need neither π nor κ. `exclude` (the
        history, for example) and `only`: one list of item numbers for all, or one per user.
        """
        catalogue, d = self.catalogue, self.catalogue.vectors.shape[1]
        if self.shared is not None:
            heads, kappa = self.shared
        query, pi = users_of(heads, pi, kappa, self.rule, log_pi)
        if query.heads.shape[2] != d:
            raise BachError(f"heads should have the {d} dimensions of the items; got {query.heads.shape[2]}")
        B, n = len(pi), len(catalogue.vectors)
        unwanted = lists_of("exclude", [] if exclude is None else exclude, n, B)
        only = None if only is None else lists_of("only", only, n, B)
        with one_core():
            query = query if self.shared is None else None
            return search(catalogue, query, pi, K, unwanted, self.rule, self.settings, only)

    def numbers_of(self, raw: Any) -> Int[np.ndarray, " m"]:
        """The item numbers of ids of the log; an unknown id is an error that names the nearest one."""
        return lists_of("raw", raw, self.catalogue.labels, 1)[0]


class CodebookServer(Server):
    """A `Server` of a codebook that all users share: a user is a π."""

    def __init__(self, folder: str | Path, *, verify: bool = True):
        super().__init__(folder, verify=verify)
        if self.shared is None:
            needs = f"serves by {self.strategy} and needs the heads of each user"
            raise BachError(f"{folder} {needs}: use Server or Retriever.load")

    def retrieve(self, pi: np.ndarray, K: int = 100, exclude: Any = None, only: Any = None) -> Slate:
        """The K best of every π, (k,) or (B, k); `exclude`, `only`: a list of item numbers for all, or one per row."""
        return super().retrieve(pi=pi, K=K, exclude=exclude, only=only)


def users_of(heads: Any, pi: Any, kappa: Any, rule: Rule, log_pi: Any = None) -> tuple[Query, Pi]:
    """(the query, π) of heads (B, k, d) or (k, d) with π or log π and κ, (B, k) or (k,), checked."""
    if rule not in RULES:
        raise BachError(f"rule={rule!r}: should be one of {', '.join(RULES)}")
    if heads is None:
        raise BachError("heads= is missing: (B, k, d), or (k, d) of one user")
    soft, heads = rule != "max over heads", _array(heads)
    heads = as_numbers("heads", heads, "k d" if np.ndim(heads) == 2 else "B k d")
    length = np.linalg.norm(heads, axis=-1)
    if not (np.abs(length - 1) < 1e-3).all():
        raise BachError(f"heads should be unit vectors; got lengths from {length.min():.3g} to {length.max():.3g}")
    given = [np.shape(_array(x)) for x in (pi, log_pi, kappa if soft else None) if x is not None]
    B = next((shape[0] for shape in [heads.shape[:-1], *given] if len(shape) == 2), 1)
    k, d = heads.shape[-2:]
    heads = np.broadcast_to(heads, (B, k, d))
    if not soft:
        pi = np.full((B, k), 1 / k) if pi is None else checked_pi(_array(pi), B, k)
        return Query.of(heads, pi, None, rule), pi
    if kappa is None or (pi is None) == (log_pi is None):
        raise BachError(f"the score by {rule} needs kappa= and either pi= or log_pi=")
    pi = pi_of(_array(log_pi), B, k) if pi is None else checked_pi(_array(pi), B, k)
    kappa = np.asarray(_array(kappa), np.float64)
    if kappa.shape not in ((k,), (B, k)) or not (np.isfinite(kappa) & (kappa >= 0)).all():
        raise BachError(f"kappa should be ({k},) or (B, k) = {(B, k)} finite numbers ≥ 0; got {kappa!r:.60}")
    return Query.of(heads, pi, np.broadcast_to(kappa, (B, k)), rule), pi


def rescore(
    candidates: Any, heads: Any, pi: Any = None, kappa: Any = None, *, rule: Rule, log_pi: Any = None, items: Any = None
) -> Float[np.ndarray, "B m"]:
    """The exact score of candidates from anywhere, such as a vector store: log m(i | u) (eq. 23), or the largest
    cosine of a head, the maximum (eq. 8). They are unit vectors, (B, m, d) or (m, d) for all users; or, with the
    vectors `items` (n, d) of a catalogue, its row numbers (B, m) or (m,), where −1 is padding and scores −∞. `heads`,
    `pi` or `log_pi`, and `kappa` as for `Server.retrieve`; `rule` is the model's: `retriever.rule`.
    """
    query, _ = users_of(heads, pi, kappa, rule, log_pi)
    B, _, d = query.heads.shape
    candidates = np.asarray(_array(candidates))
    if items is None:
        vectors = as_numbers("candidates", candidates, "m d" if candidates.ndim == 2 else "B m d")
        there = np.ones(vectors.shape[:-1], bool)
    else:
        items = as_numbers("items", items)
        if candidates.ndim not in (1, 2) or candidates.dtype.kind not in "iu" or not candidates.size:
            raise BachError(f"candidates should be (B, m) or (m,) row numbers of items; got {candidates!r:.60}")
        if (wrong := candidates[(candidates < -1) | (candidates >= len(items))]).size:
            raise BachError(f"candidates: there is no row {wrong[0]}; rows are 0 … {len(items) - 1}, and −1 is padding")
        vectors, there = items[candidates], candidates >= 0
    if vectors.shape[-1] != d or (there.ndim == 2 and len(there) != B):
        raise BachError(f"candidates should have {d} dimensions, for all or for {B} users; got shape {vectors.shape}")
    m = there.shape[-1]
    scores, there = np.full((B, m), -np.inf), np.broadcast_to(there, (B, m))
    if there.any():
        rows = unit_rows("candidates", np.broadcast_to(vectors, (B, m, d))[there])
        best = Best(query, rows, 0, LeftOut.of([[]] * B))
        scores[there] = best.offer(np.nonzero(there)[0], np.arange(len(rows)))
    return scores


def _array(given: Any) -> Any:
    return given.detach().cpu().numpy() if hasattr(given, "detach") else given


def search(
    catalogue: Catalogue, query: Query | None, pi: Pi, K: int, left_out: list[np.ndarray], rule: Rule,
    settings: Mapping, only: list[np.ndarray] | None = None,
) -> Slate:  # fmt: skip
    """The K best of each request by the strategy the catalogue is built for; without own heads no query is needed."""
    B, items, short = len(pi), catalogue.items, np.zeros(len(pi), bool)
    if only is not None:
        scans = len(items) // SHORT if catalogue.codebook is None else 0
        short = np.array([len(own) for own in only]) <= max(4 * checked_K(K) + 100, scans)
    most = REQUESTS if only is None or short.all() else 1 if short.any() else max(1, min(REQUESTS, ROWS // len(items)))
    if most < B:
        catalogue.remaining(left_out, K, only)  # an error names the request by its place among all
        parts = [slice(first, first + most) for first in range(0, B, most)]
        asked = ((query and query[rows], pi[rows], K, left_out[rows], rule, settings) for rows in parts)
        lists = (only and only[rows] for rows in parts)
        return joined([search(catalogue, *own, allowed) for own, allowed in zip(asked, lists, strict=True)])
    book, index = catalogue.codebook, catalogue.index
    strategy = "two-step" if index is not None else "exact" if book is None else "codebook"
    if book is not None and (index is not None or short.all()):  # the prototypes as they are in the codebook
        query = codebook.query_of(book, pi, rule) if query is None else hybrid.query_of(book, query, pi)
    looked_at, (certified, enough) = np.full(B, len(items)), np.ones((2, B), bool)
    if short.all():
        may, _ = catalogue.allowed(left_out, K, only)
        looked_at = np.array([len(places) for places in may])
        best = Best(query, items, K, LeftOut.of([[]] * B))
        best.offer(np.repeat(np.arange(B), looked_at), np.concatenate(may))
    elif strategy == "codebook":
        out = catalogue.left_out(left_out, K, only)
        if query is not None:
            best = hybrid.top_k(book, query, pi, K, out)
        elif isinstance(book, codebook.CodebookLists):
            best, looked_at, certified = codebook.from_lists(book, pi, K, out, rule)
            enough = certified
        else:
            best, looked_at = codebook.top_k(book, pi, K, out, rule)
    else:
        out = catalogue.left_out(left_out, K, only)
        narrow = only is not None and NARROW * min(map(len, out.may)) < len(items)  # lists would be long
        if index is None or narrow:
            best = exact.top_k(query, items, K, out, coarse=catalogue.coarse)
        else:
            how = {name: settings[name] for name in ("M", "max_M", "ask")}
            best, lists = two_step(query, items, K, out, index if book is None else hybrid.Cached(index, book), **how)
            if settings["lists"] == "exact":
                start = (np.repeat(np.arange(B), K), best.found.ravel())
                best = exact.top_k(query, items, K, out, start, catalogue.coarse)
            else:
                certified, enough, looked_at = ~certified, lists.enough, lists.depth.sum(1)
    found = catalogue.numbers[best.found]
    return Slate(found, best.scores, best.shares(), pi, certified, enough, strategy, looked_at, catalogue.labels)


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
