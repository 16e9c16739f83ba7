"""The candidates of a step: which items count how often in the sum of which row.

The paper's candidate set C_n is the positives of the batch and the negatives. As a list (the default, and what
sampled-softmax code does), an item counts as often as it was drawn; only other copies of a row's own positive are left
out. As a set (`candidates="set"`), every item counts once. On MovieLens-1M about 1,780 of the 2,560 draws of a step are
distinct: they are the candidates, with their counts as weights. There p-bach (k = 8, one seed) had a test AUPRC of
0.0949 with the list and of 0.0969 with the set after three epochs.

Two switches that the paper does not have:

**`false_negatives="next"`**: a row leaves out all of its next ten items, not only copies of its target.

**`log_q=True`** corrects for how often each item is drawn. Popular items are the positives of many rows, so they are
negatives more often than others. The softmax learns s_j = log P(j | u) − log q_j + constant, where q_j is how often j
is expected among the candidates: popular items are served less often than they are liked. The correction adds −log q_j
to every logit in training, so that the scores learn log P(j | u). For the mixed candidates of this code,

    q_j = (B − 1) p(j) + M / |I|.

- The other B − 1 rows of the batch, of all processes, bring a target each. Windows are drawn without replacement, N in
  an epoch, and each draws one of its next ten. p_w(j) is 1/10 if j is among the next ten of window w, and p(j) is the
  mean over the windows. If the row itself is w, the others bring j (B − 1) (N p(j) − p_w(j)) / (N − 1) times in
  expectation; the mean over w is (B − 1) p(j), exactly.
- The M negatives are drawn uniformly with replacement from the catalogue I: each item M / |I| times.
- The row's own slot is no draw: it holds the positive for certain, and does not count in q.

Why the positive is corrected as well, and why only the sum of the two parts matters: let item j come c_j times among
the others, c_j ~ Poisson(q_j), independent of the target. (Both parts are many rare draws, and a sum of Poisson numbers
is one.) If the counts with the target are d_j, the probability that the target was t is

    P(t | u) Π_j Poisson(d_j − [j = t]; q_j) / Σ_t' … = P(t | u) d_t / q_t / Σ_t' P(t' | u) d_t' / q_t'.

This *is* the softmax with the weights d_j / q_j and the scores log P(j | u), for any number of candidates, so the loss
is smallest at the right scores. (With the weight 1 for the positive and 1 / q_j for the others, their sum would be
unbiased for the whole catalogue, but its logarithm would not.) A set only shows whether an item was drawn, which has
the probability 1 − exp(−q_j); this takes the place of q_j. Copies of the row's positive stay left out, here as
everywhere. In a set this is the posterior; in a list the posterior would count them (d_t), so that items with q_j near
1 end up somewhat too high: `candidates="set"` is the exact choice. With negatives only (B = 1) all q_j are equal and
cancel: nothing changes.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib import BachError

Heads = Float[Tensor, "B k d"]
Items = Float[Tensor, "C d"]  # candidates
Rows = Int[Tensor, " B"]  # the row of each positive in the candidates
Ids = Int[Tensor, " C"]  # the item of each candidate
PerHead = Float[Tensor, "B k"]
Pairs = tuple[Int[Tensor, " p"], Int[Tensor, " p"], Float[Tensor, " p"]]  # rows, ascending; candidates; what is added


def in_full(x: Tensor) -> Tensor:
    """Half precision as float32, which exponentials and their sums need."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def candidates_of(
    positive: Int[Tensor, " B"],
    negatives: Int[Tensor, " M"],
    n_items: int,
    as_set: bool = False,
    following: Int[Tensor, "B L"] | None = None,
    expected: Float[Tensor, " n_items"] | None = None,
) -> Candidates:
    """The distinct items of a step as its candidates. `following`: each row's items to leave out (−1: none).

    `expected`: q, how often each item is expected among a row's candidates, its own slot apart; None: no correction.
    """
    ids, place = each_once(torch.cat([positive, negatives]), n_items)
    own, counts = place[: len(positive)], torch.bincount(place)
    weight = torch.ones_like(counts) if as_set else counts
    rest, left_out, times = torch.minimum(counts[own] - 1, weight[own]), None, None
    if expected is not None:
        if expected.shape != (n_items,) or not bool((expected[ids] > 0).all()):
            raise BachError(f"expected should be ({n_items},): how often each item is drawn, above 0 for candidates")
        times = 1 / (-torch.expm1(-expected) if as_set else expected)
        weight, rest = weight * times[ids], rest * times[positive]
    if following is not None:
        row, column, _ = places(ids, following.flatten())
        row = row // following.shape[1]
        left_out = tuple(x[column != own[row]] for x in (row, column))
    return Candidates(ids, own, weight, rest, times, left_out, following)


class Candidates(NamedTuple):
    """The candidates of a step; `weights` of them for one target of each row, or `targets` for several."""

    ids: Ids
    own: Rows  # the candidate that each row drew
    weight: Float[Tensor, " C"]
    rest: Float[Tensor, " B"]  # the weight of this candidate without the row's own draw
    times: Float[Tensor, " n_items"] | None  # the weight of a single draw of each item; None: 1
    left_out: tuple[Tensor, Tensor] | None
    following: Int[Tensor, "B L"] | None

    def weights(self, like: Tensor) -> Weights:
        own = like.new_ones(len(self.own)) if self.times is None else self.times[self.ids[self.own]].to(like)
        return Weights(self.weight.to(like), own, self.left_out)

    def targets(self, items: Int[Tensor, "B M"], vectors: Float[Tensor, "B M d"]) -> Targets:
        times = None if self.times is None else self.times[items.clamp(min=0)].to(vectors)
        weight, rest = self.weight.to(vectors), self.rest.to(vectors)
        return Targets(self.ids, weight, self.own, rest, items, vectors, times, self.following)


class Weights(NamedTuple):
    """How often each candidate counts: Z_n = Σ_{j ≠ i_n} w_j exp(s_nj) + w_own exp(s_n,own). All are above 0."""

    candidate: Float[Tensor, " C"]
    own: Float[Tensor, " B"]  # of the row's positive, in its own row only
    left_out: tuple[Tensor, Tensor] | None = None  # (row, candidate) pairs: candidates that this row does not have


def or_ones(weights: Weights | None, items: Items, positive: Rows) -> Weights:
    """Every candidate counts once, unless there are weights."""
    if weights is None:
        return Weights(items.new_ones(len(items)), items.new_ones(len(positive)))
    return weights._replace(candidate=weights.candidate.to(items.dtype), own=weights.own.to(items.dtype))


def log_weights(ids: Ids | None, positive: Rows, weights: Weights) -> Float[Tensor, "B C"]:
    """What the weights add to a row's logits, −∞ at other copies of its positive: for the plain references."""
    added = weights.candidate.log().expand(len(positive), -1).clone()
    added[copies_of_positive(ids, positive)] = -torch.inf
    if weights.left_out is not None:
        added[weights.left_out] = -torch.inf
    return added.scatter(1, positive[:, None], weights.own.log()[:, None])


def exceptions(ids: Ids | None, positive: Rows, weights: Weights) -> Pairs:
    """Where a row departs from the weights of the candidates: at its positive, and −∞ at those it leaves out."""
    copies, columns = copies_of_positive(ids, positive)
    if weights.left_out is not None:
        copies, columns = (torch.cat(both) for both in zip((copies, columns), weights.left_out, strict=True))
    by = (weights.own / weights.candidate[positive]).log()
    rows = by.nonzero()[:, 0]
    none = by.new_full(copies.shape, -torch.inf)
    return by_rows(torch.cat([rows, copies]), torch.cat([positive[rows], columns]), torch.cat([by[rows], none]))


def by_rows(rows: Tensor, candidates: Tensor, by: Tensor) -> Pairs:
    order = rows.argsort()
    return rows[order], candidates[order], by[order]


def copies_of_positive(ids: Ids | None, positive: Rows) -> tuple[Tensor, Tensor]:
    """(row, candidate) pairs in which the candidate is another copy of the row's positive, rows ascending."""
    if ids is None:
        return positive[:0], positive[:0]
    rows, columns, _ = places(ids, ids[positive])
    other = columns != positive[rows]
    return rows[other], columns[other]


def places(ids: Ids, wanted: Int[Tensor, " n"]) -> tuple[Tensor, Tensor, Int[Tensor, " n"]]:
    """(number, candidate) pairs in which the candidate is the item `wanted[number]`, in order of numbers; counts."""
    sorted_ids, order = ids.sort()
    first = torch.searchsorted(sorted_ids, wanted)
    count = torch.searchsorted(sorted_ids, wanted, right=True) - first
    number = torch.arange(len(wanted), device=ids.device).repeat_interleave(count)
    place = torch.arange(len(number), device=ids.device) - (count.cumsum(0) - count)[number]
    return number, order[first[number] + place], count


def each_once(ids: Ids, n_items: int) -> tuple[Int[Tensor, " distinct"], Ids]:
    """(the distinct ids, in the order in which they first occur; the place of every id in them)."""
    number = torch.arange(len(ids), device=ids.device)
    first = number.new_full((n_items,), len(ids)).scatter_reduce(0, ids, number, "amin")[ids]
    kept = first == number
    return ids[kept], (kept.cumsum(0) - 1)[first]


class Targets(NamedTuple):
    """All next items of each row as its targets. The targets m of row n share one sweep over the other candidates:

        log p_r(m | u_n) = s_rm − log(Z_nr + Σ_{m' ≠ m} c_nm' exp(s_rm') + exp(s_rm)),        s_rm = ⟨u_r, v_m⟩ / τ.

    Z_nr is the weighted sum over the candidates that are no target of the row, without what the row drew itself. c_nm'
    is the weight of target m' among the candidates, again without the row's own draw. This is p_r, the softmax of
    eq. 12, in the step that draws m in this row and nothing else in the others. No exponential is subtracted, so no
    accuracy is lost. With `times`, the weight of each target in its own sum, exp(s_rm) is multiplied by it.
    """

    ids: Ids  # the item of each candidate
    weight: Float[Tensor, " C"]  # how often it counts
    own: Rows  # the candidate that the row drew itself
    rest: Float[Tensor, " B"]  # its weight without this draw: what the row's other targets meet
    items: Int[Tensor, "B M"]  # the item of each target; −1: this row has fewer
    vectors: Float[Tensor, "B M d"]
    times: Float[Tensor, "B M"] | None = None  # None: 1
    left_out: Int[Tensor, "B L"] | None = None  # items that are no candidates of the row, also as its other targets

    def of(self, rows: Int[Tensor, " n"]) -> Targets:
        return Targets(*self[:2], *(None if x is None else x[rows] for x in self[2:]))

    def one_per_row(self) -> Targets:
        """B·M rows with one target each."""
        every = self.of(torch.arange(len(self.own), device=self.own.device).repeat_interleave(self.items.shape[1]))
        times = None if self.times is None else self.times.view(-1, 1)
        return every._replace(items=self.items.view(-1, 1), vectors=self.vectors.flatten(0, 1)[:, None], times=times)

    def share(self) -> Float[Tensor, "B M 1"]:
        """1/M in a row with M targets."""
        there = (self.items >= 0).to(self.vectors.dtype)[..., None]
        return there / there.sum(1, keepdim=True)

    def mean(self, x: Float[Tensor, "B M k"]) -> Float[Tensor, "B k"]:
        return (self.share() * x).sum(1)

    def logits(self, heads: Heads, tau: float) -> Float[Tensor, "B M k"]:
        if not isinstance(heads, Tensor):  # heads of two kinds, see `hybrid`
            return heads.cosines(self.vectors) / tau
        return in_full(self.vectors) @ in_full(heads).mT / tau

    def log_times(self) -> Tensor | float:
        return 0.0 if self.times is None else self.times.log()[..., None]

    def exceptions(self) -> tuple[Pairs, Float[Tensor, "B M M"]]:
        """(what is added to the logits, −∞ at the row's targets; c_nm' for m' ≠ m, and `times` for m' = m)."""
        number, columns, _ = places(self.ids, self.items.flatten())
        counts = self.weight.new_zeros(self.items.numel()).index_add(0, number, self.weight[columns])
        drawn = self.items == self.ids[self.own][:, None]  # (B, M): the row drew this target
        own = self.weight[self.own]
        counts = torch.where(
            drawn, counts.view_as(self.items) - own[:, None] + self.rest[:, None], counts.view_as(drawn)
        )
        same = self.items[:, :, None] == self.items[:, None, :]  # (B, M, M'); an item that comes twice counts once
        counts = counts.masked_fill(same.tril(-1).any(-1), 0)
        number = number // same.shape[1]
        if self.left_out is not None:
            counts = counts.masked_fill((self.items[..., None] == self.left_out[:, None]).any(-1), 0)
            drawn = torch.cat([drawn, self.left_out == self.ids[self.own][:, None]], 1)
            more, others, _ = places(self.ids, self.left_out.flatten())
            number, columns = torch.cat([number, more // self.left_out.shape[1]]), torch.cat([columns, others])
        diagonal = torch.eye(same.shape[1], device=same.device)
        diagonal = diagonal if self.times is None else diagonal * self.times[:, None]
        beside = counts[:, None, :] * ~same + diagonal
        rows = (~drawn.any(1) & (self.rest != own)).nonzero()[:, 0]  # the row drew none of its targets
        by = torch.cat([own.new_full(number.shape, -torch.inf), (self.rest / own)[rows].log()])
        rows, columns = torch.cat([number, rows]), torch.cat([columns, self.own[rows]])
        return by_rows(rows, columns, by), beside.to(self.vectors.dtype)


def check_shapes(
    heads: Tensor, items: Tensor, positive: Tensor, ids: Tensor | None, tau: float, weights: Weights | None = None
) -> None:
    got = f"got heads {tuple(heads.shape)} and items {tuple(items.shape)}"
    if heads.ndim != 3 or items.ndim != 2 or heads.shape[-1] != items.shape[-1]:
        raise BachError(f"heads should be (B, k, d) and items (C, d) with the same d; {got}")
    if 0 in (*heads.shape, *items.shape):
        raise BachError(f"a batch needs at least one row, head and candidate; {got}")
    if positive.shape != heads.shape[:1]:
        raise BachError(f"positive should be ({heads.shape[0]},), one candidate per row; got {tuple(positive.shape)}")
    if ids is not None and ids.shape != items.shape[:1]:
        raise BachError(f"ids should be ({items.shape[0]},), the item of each candidate; got {tuple(ids.shape)}")
    if weights is not None and (shapes := [w.shape for w in weights[:2]]) != [items.shape[:1], positive.shape]:
        wanted = f"({len(items)},) for the candidates and ({len(positive)},) for the positives"
        raise BachError(f"weights should be {wanted}; got {' and '.join(str(tuple(shape)) for shape in shapes)}")
    if len(wrong := positive[(positive < 0) | (positive >= len(items))]):
        raise BachError(f"positive should be row numbers 0 … {len(items) - 1} of items; got {int(wrong[0])}")
    if not 0 < tau < float("inf"):
        raise BachError(f"tau should be a positive number; got {tau}")
