"""Diagnostics that answer the paper's open questions. Each function takes trained models and returns one table.

gradient_noise         how noisy a training step is
posterior_gap          how far the recognition posterior γ is from γ^con, the posterior that makes the bound tight
calibration_controls   whether π_u predicts what a user likes next, beside two controls
worth_of_pi            the same for each user: nats per held-out item
genre_coverage         whether the heads of a user stand for the genres of the user's later items
diversity_and_recall   how diverse slates are at equal recall
shuffle_test           how much the order of a history, and its being recent, are worth
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import copy
from itertools import islice
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int

from bachlib import BachError
from bachlib.data import Dataset, Windows
from bachlib.data.dataset import Split
from bachlib.evaluate.diagnostics import HeldOut, encode_users, interest_of_heads, pi_calibration, recovery
from bachlib.evaluate.evaluation import evaluate
from bachlib.evaluate.statistics import paired_bootstrap
from bachlib.model import mixture
from bachlib.model.twotower import TwoTower
from bachlib.params import N_HIST, TrainParams
from bachlib.rank import metrics
from bachlib.rank.ranks import Users

Models = Mapping[str, TwoTower]


def gradient_noise(models: Models, dataset: Dataset, params: TrainParams, steps: int = 24) -> pd.DataFrame:
    """The variance of a step's gradient, summed over the weights, and its ratio to the squared mean gradient.

    All models see the same windows, targets and negatives; dropout is off. The squared length of a mean of n noisy
    gradients is too large by variance / n, which is subtracted.
    """
    rows = {}
    for name, model in models.items():
        weights = [weight for weight in model.eval().parameters() if weight.requires_grad]
        windows = Windows(dataset, params.batch_size, params.seed, model.n_hist, following=params.targets == "all")
        gradients, rng = [], np.random.default_rng(params.seed)
        for batch in islice(windows, steps):
            negatives = torch.from_numpy(rng.integers(dataset.n_items, size=params.n_negatives))
            targets = torch.from_numpy(batch.following) if params.targets == "all" else None
            drawn = (torch.from_numpy(x) for x in (batch.history, batch.positive))
            loss = model.objective(*drawn, negatives, torch.from_numpy(batch.user), targets=targets).loss
            slopes = torch.autograd.grad(loss, weights, allow_unused=True)
            gradients.append(torch.cat([s.flatten() for s in slopes if s is not None]))
        found = torch.stack(gradients).double()
        if len(found) < steps:
            raise BachError(f"steps={steps}: an epoch of this data has only {len(found)}")
        variance = found.var(0).sum().item()
        signal = found.mean(0).square().sum().item() - variance / steps
        rows[name] = {"variance": variance, "signal": signal, "noise": variance / signal if signal > 0 else np.inf}
    return pd.DataFrame(rows).T


def posterior_gap(held: Mapping[str, HeldOut]) -> pd.DataFrame:
    """γ (eq. 19) against γ^con (eq. 20) on held-out items: the divergence in nats, half the sum of the absolute
    differences (total variation), and the share of items for which the same head is the largest in both."""
    rows = {}
    for name, of in held.items():
        contrastive = mixture.contrastive_posterior(of.log_pi[:, None].expand_as(of.log_p), of.log_p).exp()
        same = (of.gamma.argmax(-1) == contrastive.argmax(-1))[of.gamma.isfinite().all(-1)]
        rows[name] = {
            "k": of.log_pi.shape[1],
            "KL gap": of.gap.nanmean().item(),
            "total variation": 0.5 * (of.gamma - contrastive).abs().sum(-1).nanmean().item(),
            "same head": same.float().mean().item(),
        }
    return pd.DataFrame(rows).T.astype({"k": int})


def calibration_controls(held: Mapping[str, HeldOut], seed: int = 0) -> pd.DataFrame:
    """The calibration error of π_u, the error with another user's π (as confident, but wrong), and by how many nats per
    held-out item π_u is better than one π for all users."""
    rows = {}
    for name, of in held.items():
        rows[name] = {
            "error": pi_calibration(of).ece,
            "error with another user's π": pi_calibration(_with_another_pi(of, seed)).ece,
            "nats that π_u is worth": worth_of_pi(of, seed)["nats over one π"].mean(),
        }
    return pd.DataFrame(rows).T


def worth_of_pi(of: HeldOut, seed: int = 0) -> pd.DataFrame:
    """By how many nats per held-out item π_u is better than one π for all users, and than another user's π."""
    same = of._replace(log_pi=of.log_pi.exp().mean(0).log().expand_as(of.log_pi))
    others = {"nats over one π": same, "nats over another π": _with_another_pi(of, seed)}
    return pd.DataFrame({
        name: (of.log_likelihood - other.log_likelihood).nanmean(1).cpu().numpy() for name, other in others.items()
    })  # fmt: skip


def _with_another_pi(of: HeldOut, seed: int) -> HeldOut:
    return of._replace(log_pi=of.log_pi[np.random.default_rng(seed).permutation(len(of.log_pi))])


def genre_coverage(
    models: Models, dataset: Dataset, users: Users, seed: int = 0, member: Float[np.ndarray, "n g"] | None = None
) -> pd.DataFrame:
    """How much of the genres of a user's test items the heads stand for, and with another user's heads and π.

    covered: Σ_j s_j max_r p_r(j); overlap: Σ_j min(s_j, Σ_r π_r p_r(j)). s_j is the share of genre j in the user's test
    items, p_r(j) its share in the softmax of head r over the catalogue. `member`: other labels than the genres.
    """
    member = dataset.genres.member if member is None else member
    if not member.shape[1]:
        raise BachError("genre_coverage needs items with genres; this data set has none")
    member = member / np.maximum(member.sum(1, keepdims=True), 1)  # an item with two genres counts half for each
    share = dataset.mean_of_targets(member, users, "test")
    known = share.sum(1) > 0
    share = share[known] / share[known].sum(1, keepdims=True)
    rows, other = {}, np.random.default_rng(seed).permutation(len(share))
    for name, model in models.items():
        encoded = encode_users(model, dataset, np.asarray(users)[known])
        p, log_pi = interest_of_heads(model, encoded.heads, member), encoded.log_pi
        own, swapped = recovery(p, log_pi, share), recovery(p[other], log_pi[other], share)
        rows[name] = {
            "covered": own.covered.mean(), "covered by another user's heads": swapped.covered.mean(),
            "overlap": own.overlap.mean(), "overlap with another user": swapped.overlap.mean(),
        }  # fmt: skip
    return pd.DataFrame(rows).T


def diversity_and_recall(
    slates: Mapping[str, Callable[[float], Int[np.ndarray, "U K"]]],
    strengths: list[float],
    targets: Int[np.ndarray, "U m"],
    features: Float[np.ndarray, "n f"],
) -> pd.DataFrame:
    """Recall and diversity of each kind of slate at each strength of its re-ranking; a row per kind and strength.

    `slates[name](strength)` are the slates; the first strength is none at all. The column `at equal recall` compares
    kinds: the diversity of this kind where its recall is that of the *first* kind without re-ranking, on the line
    between two strengths; NaN if no strength comes that low, or if the kind starts below.
    """
    rows = []
    for name, make in slates.items():
        for strength in strengths:
            made = make(strength)
            recall = np.nanmean(metrics.recall(made, targets, made.shape[1]))
            rows.append((name, strength, recall, np.nanmean(metrics.diversity(made, features))))
    table = pd.DataFrame(rows, columns=["slates", "strength", "recall", "diversity"])
    wanted = table["recall"].iloc[0]
    equal = {name: _diversity_at(wanted, curve) for name, curve in table.groupby("slates", sort=False)}
    return table.assign(**{"at equal recall": table["slates"].map(equal)})


def _diversity_at(recall: float, curve: pd.DataFrame) -> float:
    """Where the curve, in the order of strengths, last passes this recall from above."""
    high, low = curve.iloc[:-1].reset_index(drop=True), curve.iloc[1:].reset_index(drop=True)
    passes = (high["recall"] >= recall) & (low["recall"] <= recall) & (high["recall"] > low["recall"])
    if not passes.any():
        return curve["diversity"].iloc[0] if curve["recall"].iloc[0] == recall else np.nan
    at = passes[passes].index[-1]
    part = (high["recall"][at] - recall) / (high["recall"][at] - low["recall"][at])
    return float(high["diversity"][at] + part * (low["diversity"][at] - high["diversity"][at]))


def shuffled(dataset: Dataset, seed: int = 0, *, past: bool = False) -> Dataset:
    """The same data for an evaluation, with histories in random order: the last items that an encoder reads, or with
    `past` as many random items of all that the user liked before. Targets and excluded items stay."""
    view, rng = copy(dataset), np.random.default_rng(seed)

    def history(users: Users, split: Split, n_hist: int = N_HIST) -> Int[np.ndarray, "B n_hist"]:
        items = dataset.history(users, split, int(dataset.end(users, split).max()) if past else n_hist)
        items = np.pad(items, ((0, 0), (max(0, n_hist - items.shape[1]), 0)), constant_values=-1)
        order = np.argsort(np.where(items >= 0, rng.random(items.shape), -1), axis=1)  # padding stays on the left
        return np.take_along_axis(items, order, 1)[:, -n_hist:]

    view.history = history
    return view


def shuffle_test(
    models: Mapping[str, Any], dataset: Dataset, metric: str = "AUPRC", max_users: int = 10_000, seed: int = 0
) -> pd.DataFrame:
    """The same evaluation with histories as they are and shuffled: a row per model (or run) and kind of history, with
    the gain over the history as it is and its interval over users. Order does not matter to an encoder without
    positions, and in a log that is not sequential to none.

    order: the items that the encoder reads, in random order. past: as many items, drawn from all earlier ones.
    """
    rows = []
    for name, model in models.items():
        kinds = {"as it is": dataset, "order": shuffled(dataset, seed), "past": shuffled(dataset, seed, past=True)}
        users = {kind: evaluate(model, data, max_users=max_users, quiet=True) for kind, data in kinds.items()}
        values = {kind: found.per_user[metric].to_numpy() for kind, found in users.items()}
        for kind in ("order", "past"):
            gain = paired_bootstrap(values[kind], values["as it is"]).gain
            rows.append([name, kind, values["as it is"].mean(), values[kind].mean(), *gain])
    return pd.DataFrame(rows, columns=["model", "shuffled", f"{metric} as it is", metric, "gain", "low", "high"])
