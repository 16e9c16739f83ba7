"""What the heads of a model do: how much each is used, how far apart and how sharp they are, how calibrated π_u is.

If π_u is right, head r explains a share π_u^(r) of the user's items: for given responsibilities, the prior term of the
ELBO (eq. 21) is largest where π_u is their mean. `calibration` measures that. In the planted world every item belongs
to a known interest j. The meaning of a head is the mass that its softmax over the catalogue gives to each interest,
p_r(j). (Cosines to the centre of an interest are
misleading: with τ = 0.07, 0.07 more cosine makes an item e times as likely, so heads need not be near their items.)
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.data.dataset import Split
from bachlib.model import mixture
from bachlib.model.twotower import Encoded, TwoTower
from bachlib.rank.ranks import Users
from bachlib.train.watch import effective_heads

BLOCK = 1 << 23  # logits at a time
Array = np.ndarray | Tensor
NO_KERNEL = "only the BACH methods have responsibilities, a bound and its gap"


@torch.no_grad()
def encode_users(model: TwoTower, dataset: Dataset, users: Users, split: Split = "test") -> Encoded:
    """Heads, log π_u and κ of many users, before their held-out items."""
    was_training = model.training
    model.eval()
    blocks = [
        model.encode(
            dataset.history(part, split, model.n_hist),
            torch.tensor(part),
            context=dataset.context_for(model, part, split),
        )
        for part in np.array_split(users, max(1, len(users) // 1024))
    ]
    model.train(was_training)
    return Encoded(*(torch.cat(parts) for parts in zip(*blocks, strict=True)))


def head_cosine(heads: Float[Tensor, "U k d"]) -> Float[Tensor, " U"]:
    """Mean cosine between two heads of a user: 1 if they are copies of each other, near 0 if they are unrelated."""
    k = heads.shape[1]
    return (heads.sum(1).square().sum(-1) - k) / max(1, k * (k - 1))


class HeldOut(NamedTuple):
    """The heads and m held-out items of each user; NaN where a user has fewer."""

    log_pi: Float[Tensor, "U k"]
    cosine: Float[Tensor, "U m k"]
    log_sigma: Float[Tensor, "U m k"] | None  # None for a method without a kernel
    log_p: Float[Tensor, "U m k"]  # softmax over the whole catalogue

    @property
    def gamma(self) -> Float[Tensor, "U m k"]:
        """Responsibilities (eq. 19); for a hard method, the head closest to the item takes all."""
        if self.log_sigma is None:
            closest = torch.nn.functional.one_hot(self.cosine.argmax(-1), self.cosine.shape[-1]).float()
            return closest.where(self.cosine.isfinite(), torch.nan)
        return (self.log_pi[:, None] + self.log_sigma).softmax(-1)

    @property
    def gap(self) -> Float[Tensor, "U m"]:
        """KL(γ ‖ γ_con) of each item (eq. 20), in nats."""
        if self.log_sigma is None:
            raise BachError(NO_KERNEL)
        return mixture.kl_gap(self.log_pi[:, None].expand_as(self.log_p), self.log_sigma, self.log_p)

    @property
    def log_likelihood(self) -> Float[Tensor, "U m"]:
        """log Σ_r π_r p_r(item) (eq. 14)."""
        return (self.log_pi[:, None] + self.log_p).logsumexp(-1)


@torch.no_grad()
def held_out(model: TwoTower, dataset: Dataset, users: Users, split: Split = "test") -> HeldOut:
    """Each head's probabilities of the users' held-out items, with all items as candidates."""
    encoded, items = encode_users(model, dataset, users, split), model.items()
    targets = torch.as_tensor(dataset.targets(users, split), device=items.device)
    t, there = items[targets.clamp(min=0)] @ encoded.heads.mT, targets[..., None] >= 0  # (U, m, k), (U, m, 1)
    size = max(1, BLOCK // (model.k * len(items)))
    log_z = torch.cat([(heads @ items.T / model.tau).logsumexp(-1) for heads in encoded.heads.split(size)])  # (U, k)
    log_sigma = model.kernel.log_density(t, encoded.kappa[:, None], model.d) if model.kernel else None
    log_sigma = None if log_sigma is None else log_sigma.where(there, torch.nan)
    t = t.where(there, torch.nan)
    return HeldOut(encoded.log_pi, t, log_sigma, t / model.tau - log_z[:, None])


class Explained(NamedTuple):
    """Which head explains which of m items of each user; NaN where there is no item."""

    gamma: Float[np.ndarray, "U m k"]  # responsibilities (eq. 19)
    cosine: Float[np.ndarray, "U m k"]

    def tightness(self, least: float = 5.0) -> Float[np.ndarray, "U k"]:
        """Mean cosine of a head and the items it explains; NaN where these are fewer than `least`."""
        count = np.nansum(self.gamma, 1)
        mean = np.nansum(self.gamma * self.cosine, 1) / np.maximum(count, 1e-12)
        return np.where(count >= least, mean, np.nan)

    def by_kind(self, kind: Int[np.ndarray, "U m"], n: int) -> Float[np.ndarray, "k n"]:
        """Of the items of each of n kinds, the share that each head explains; columns sum to one over heads."""
        there = ~np.isnan(self.gamma[..., 0]) & (kind >= 0)
        of = np.zeros((self.gamma.shape[-1], n))
        np.add.at(of.T, kind[there], self.gamma[there])
        return of / np.maximum(of.sum(0), 1e-12)


@torch.no_grad()
def explained(model: TwoTower, encoded: Encoded, items: Int[np.ndarray, "U m"]) -> Explained:
    """Responsibilities for items of each user, for example a history; −1 is padding."""
    if model.kernel is None:
        raise BachError(NO_KERNEL)
    vectors = model.items()
    t = vectors[torch.as_tensor(items, device=vectors.device)] @ encoded.heads.mT  # (U, m, k)
    log_sigma = model.kernel.log_density(t, encoded.kappa[:, None], model.d)
    gamma, t = (x.cpu().numpy() for x in ((encoded.log_pi[:, None] + log_sigma).softmax(-1), t))
    there = (np.asarray(items) >= 0)[..., None]
    return Explained(np.where(there, gamma, np.nan), np.where(there, t, np.nan))


class Calibration(NamedTuple):
    bins: pd.DataFrame  # predicted and realised mean, standard error of the latter, n
    ece: float  # mean distance of predicted and realised over the bins, weighted by n


def calibration(predicted: Float[np.ndarray, "U k"], realised: Float[np.ndarray, "U k"], bins: int = 10) -> Calibration:
    """Reliability of predicted shares: the realised mean in bins of the prediction."""
    predicted, realised = (np.asarray(x, float).ravel() for x in (predicted, realised))
    if predicted.shape != realised.shape or not len(predicted) or predicted.min() < 0 or predicted.max() > 1 + 1e-6:
        raise BachError("calibration needs predicted shares between 0 and 1 and as many realised ones")
    which = np.minimum((predicted * bins).astype(int), bins - 1)
    grouped = pd.DataFrame({"bin": which, "predicted": predicted, "realised": realised}).groupby("bin")
    table = grouped.mean().assign(se=grouped["realised"].sem(), n=grouped.size()).reset_index(drop=True)
    return Calibration(table, float(np.average((table["predicted"] - table["realised"]).abs(), weights=table["n"])))


def pi_calibration(of: HeldOut) -> Calibration:
    """π_u^(r) against the mean responsibility of head r over the user's held-out items."""
    return calibration(of.log_pi.exp().cpu().numpy(), of.gamma.nanmean(1).cpu().numpy())


def collapse(history: pd.DataFrame) -> pd.DataFrame:
    """Routing collapse over a training, from the history of a run: 0: all heads are used equally, 1: only one is."""
    k = len(history["usage"].iloc[0])
    table = history[["epoch", "step", "effective_heads", "head_cosine"]]
    collapsed = 1 - (history["effective_heads"] - 1) / (k - 1) if k > 1 else 0.0
    return table.assign(largest_share=history["usage"].map(max), collapse=collapsed)


def kappa_bounds(kappa: Float[Tensor, "U k"]) -> dict[str, float]:
    """Least, 1%, median, 99% and largest concentration over users and heads."""
    at = np.quantile(kappa.double().cpu().numpy(), [0, 0.01, 0.5, 0.99, 1])
    return dict(zip(["min", "1%", "median", "99%", "max"], at.tolist(), strict=True))


def summary(
    model: TwoTower, dataset: Dataset, users: Users, split: Split = "test", of: HeldOut | None = None
) -> dict[str, float]:
    """The diagnostics as one row: use on held-out items (`of`, if they are known), distance, sharpness, calibration."""
    encoded, of = encode_users(model, dataset, users, split), of or held_out(model, dataset, users, split)
    usage = of.gamma.nanmean((0, 1)).tolist()
    row = {
        "effective heads": effective_heads(usage),
        "largest share": max(usage),
        "head cosine": head_cosine(encoded.heads).mean().item(),
        "log-likelihood": of.log_likelihood.nanmean().item(),
    }
    if model.kernel:
        low, *_, high = kappa_bounds(encoded.kappa).values()
        row |= {"κ min": low, "κ max": high, "KL gap": of.gap.nanmean().item(), "ECE of π": pi_calibration(of).ece}
    return row


@torch.no_grad()
def interest_of_heads(model: TwoTower, heads: Array, item_interest: Array, items: Array | None = None) -> Tensor:
    """p_r(j) = Σ_{i in j} p_r(i) (U, k, m): the mass of interest j in each head's softmax over the catalogue (eq. 12).

    `heads`: (U, k, d). `item_interest`: the interest of each item (n,), or its share of each (n, m), its genres for
    example. `items`: the item vectors (n, d), if they are known already.
    """
    items = model.items() if items is None else torch.as_tensor(items, device=model.device)
    member = torch.as_tensor(item_interest, device=items.device)
    member = (member if member.ndim == 2 else torch.nn.functional.one_hot(member.long())).to(items)  # (n, m)
    return torch.stack([(u @ items.T / model.tau).softmax(-1) @ member for u in torch.as_tensor(heads).to(items)])


class Recovery(NamedTuple):
    """A row per user; the means over users are reported."""

    weights: Float[np.ndarray, "U m"]  # q_j = Σ_r π_r p_r(j), what the model expects of each interest
    purity: Float[np.ndarray, " U"]  # Σ_r π_r max_j p_r(j): 1 if every head has one interest
    distinct: Int[np.ndarray, " U"]  # number of interests that are the first of some head
    covered: Float[np.ndarray, " U"]  # Σ_j π_j max_r p_r(j): 1 if each of the user's interests has its own head
    overlap: Float[np.ndarray, " U"]  # Σ_j min(q_j, π_j): 1 if π_u is recovered, 0 if all weight is elsewhere


def recovery(of_heads: Float[Tensor, "U k m"], log_pi: Float[Tensor, "U k"], pi: Float[np.ndarray, "U m"]) -> Recovery:
    """Heads against the planted interests and π_u. A method without π has equal weights."""
    p, weight = of_heads.cpu().numpy(), log_pi.exp().cpu().numpy()
    q = (weight[..., None] * p).sum(1)
    first = np.zeros(q.shape, bool)
    np.put_along_axis(first, p.argmax(-1), True, 1)
    purity = (weight * p.max(-1)).sum(1)
    return Recovery(q, purity, first.sum(1), (pi * p.max(1)).sum(1), np.minimum(q, pi).sum(1))
