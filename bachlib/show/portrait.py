"""Pictures of one trained model for its report: how it was trained, what its heads mean, one user.

What a method does not have (π and κ, several heads, genres) is left out, and the section says so.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from scipy.stats import spearmanr

from bachlib.data import Dataset
from bachlib.evaluate import diagnostics, meaning
from bachlib.model.twotower import Encoded, TwoTower
from bachlib.params import N_TEST
from bachlib.serve import Retriever
from bachlib.show import plots
from bachlib.show.document import Section, escape, figure
from bachlib.show.maps import layout, regions
from bachlib.show.people import People
from bachlib.show.plots.style import label, tag
from bachlib.show.steerable import K

ON_THE_MAP = 5_000  # items at most, the most popular ones
GENRES = 24  # columns at most, the most liked ones
WORDS = 8  # genres written on the map


def training(history: pd.DataFrame, model: TwoTower, of: People) -> Section:
    """Curves of a training, where it has left more than one row."""
    if len(history) < 2:
        told = "The history has fewer than two rows, and so no curves; <code>log_steps</code> gives more of them."
        return Section("training", "How it was trained", told)
    names, parts = dict(zip(of.shown.tolist(), of.names, strict=True)), []
    if model.kernel:
        lead = "The terms of the bound, the concentrations and the use of each head, as training went on."
        parts += [figure(plots.elbo_terms(history))]
        parts += [figure(plots.kappa_trajectories(history, 1 / model.tau, model.kernel.name, names))]
    else:
        lead = "This method has no bound and no concentrations: there are no curves of these."
    if model.k > 1:
        lead += "" if model.kernel else " Which head was the closest to the positives, as training went on:"
        parts.append(figure(plots.head_usage({"": history}, names).update_layout(margin_t=64)))
    return Section("training", "How it was trained", lead, parts)


def heads(model: TwoTower, dataset: Dataset, of: People) -> Section:
    """What the heads stand for, where they are, how users mix them and whether they may be believed."""
    said = [_which(of)]
    parts = []
    if of.genres.names:
        columns = np.argsort(-of.genres.likes, kind="stable")[:GENRES]
        lift = meaning.lift(of.over_users, of.genres.likes)[:, np.sort(columns)]
        words = [of.genres.names[g] for g in np.sort(columns)]
        parts.append(figure(plots.head_lift(lift, of.names, words, of.shown)))
        if len(of.genres.names) > GENRES:
            said.append(f"Of {len(of.genres.names)} genres the {GENRES} most liked are shown.")
    else:
        said.append("These items have no genres: heads have numbers instead of names.")
    parts.append(figure(item_map(model, dataset, of)))
    if len(_popular(dataset)) < dataset.n_items:
        said.append(f"The map has the {ON_THE_MAP:,} most popular items.")
    if model.kernel is None:
        said.append("This method has no π and no κ, and so no mixtures of users, calibration or tightness.")
        return Section("heads", "What the heads mean", escape(" ".join(said)), parts)
    if model.k > 1:
        text = f"On average the largest of a user's heads has {of.pi.max(1).mean():.0%} of π"
        parts.append(figure(plots.pi_admixture(of.pi[:, of.shown], of.cluster, of.names, of.shown, text)))
    held = diagnostics.pi_calibration(diagnostics.held_out(model, dataset, of.users))
    name = label(model.config.get("method", "model"))
    parts.append(figure(plots.calibration_curves({name: held.bins}, {name: held.ece}, "π<sub>u</sub>")))
    kappa, tight, head = _tightness(model, dataset, of)
    if len(np.unique(kappa)) > 2 and len(np.unique(tight)) > 2:
        correlation = float(spearmanr(kappa, tight).statistic)
        parts.append(figure(plots.kappa_and_tightness(kappa, tight, head, of.names, correlation, of.shown)))
    else:
        said.append("κ is nearly the same everywhere: there is nothing to compare with how tight a head's items are.")
    return Section("heads", "What the heads mean", escape(" ".join(said)), parts)


def one_user(model: TwoTower, dataset: Dataset, of: People) -> Section:
    """Which head explains what a user liked, and the slate they get."""
    at = of.some[0]
    u = int(of.users[at])
    title, key = f"User {u}, item by item", "user"
    if model.kernel is None:
        told = "Only a mixture says how much each head has to do with an item; this method takes the closest head."
        return Section(key, title, told)
    of = of.seen_by(at)
    titles, names = np.array(dataset.titles, object), of.names_of(at)
    sequence = np.asarray(dataset.sequence(u), np.int64)
    last, earlier = sequence[-(model.n_hist + N_TEST) :], sequence[:-N_TEST]
    gamma = diagnostics.explained(model, _row(of.encoded, at), last[None]).gamma[0]
    needed = int(np.searchsorted(np.cumsum(np.sort(gamma.mean(0))[::-1]), 0.9)) + 1
    text = f"{needed} of {model.k} heads explain nine tenths of this user's {len(gamma)} items"
    strip = plots.history_strip(gamma[:, of.shown], titles[last], names, N_TEST, of.shown, text)
    most = min(K, dataset.n_items - len(set(earlier.tolist())))
    slate = Retriever(model, "exact").retrieve([earlier], most, user=[u])
    relative = np.exp(slate.scores[0] - slate.scores[0, 0])
    several = len(np.unique(slate.head_share[0].argmax(1)))
    text = f"{several} of {model.k} heads bring these {most} items"
    share = slate.head_share[0][:, of.shown]
    bars = plots.slate_by_head(share, relative, titles[slate.items[0]], names, of.shown, title=text)
    lead = f"What user {u} liked, each item split by which head explains it, and the {most} items shown next."
    if of.left:
        lead += f" Of {model.k} heads the {len(of.shown)} that this user has most of are shown."
    return Section(key, title, lead, [figure(strip), figure(bars)])


@torch.no_grad()
def item_map(model: TwoTower, dataset: Dataset, of: People) -> go.Figure:
    """Items and heads on a map: those of all users if they share them, else those of one user with the history."""
    at, chosen = of.some[0], _popular(dataset)
    mine = _row(of.encoded, at)
    vectors = model.items()[torch.as_tensor(chosen)].cpu().numpy()
    u = mine.heads[0, of.shown].cpu().numpy()
    cosine = vectors @ u.T  # (n, c)
    best, weight, title = cosine, None, None
    names = of.names if of.shared else of.names_of(at)
    if model.kernel:
        kappa, log_pi = (x[0, of.shown].cpu().numpy() for x in (mine.kappa, mine.log_pi))
        log_sigma = model.kernel.log_density(torch.from_numpy(cosine), torch.from_numpy(kappa), model.d).numpy()
        weight = of.pi[:, of.shown].mean(0) if of.shared else of.pi[at, of.shown]
        best = (np.log(weight + 1e-30) if of.shared else log_pi) + log_sigma
        n = int(weight.argmax())
        first = f"the largest, {tag(of.shown[n], names[n])}, has {weight[n]:.0%} of π"
        title = None if of.shared else f"Where the heads of user {of.users[at]} stand; {first}"
    else:
        title = f"Where the {len(u)} heads of user {of.users[at]} stand, each item with the closest" * (len(u) > 1)
        title = title or f"Where the vector of user {of.users[at]} stands among the items"
    xy, head_xy = layout(vectors, u)
    top = np.argsort(-cosine, axis=0, kind="stable")[:5].T
    history = [] if of.shared else np.flatnonzero(np.isin(chosen, dataset.sequence(int(of.users[at]))[:-N_TEST]))
    titles = dataset.titles
    hover = [label(titles[i]) for i in chosen]
    words = regions(xy, of.genres.first[chosen], of.genres.names, WORDS)
    return plots.map_of_items(
        xy, best.argmax(1), hover, head_xy, names, weight, top.tolist(), words, history, title, of.shown
    )  # fmt: skip


def _popular(dataset: Dataset) -> np.ndarray:
    """The items of the map."""
    return np.sort(np.argsort(-dataset.items["n_users"].to_numpy(), kind="stable")[:ON_THE_MAP])


def _tightness(model: TwoTower, dataset: Dataset, of: People) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """κ, mean cosine and number of the shown heads that explain at least five items of a history, of some users."""
    some = np.arange(len(of.users))[:: max(1, len(of.users) // 150)]
    encoded = Encoded(*(x[some] for x in of.encoded))
    past = dataset.history(of.users[some], "test", model.n_hist)
    tight = diagnostics.explained(model, encoded, past).tightness()[:, of.shown]
    kappa = encoded.kappa.cpu().numpy()[:, of.shown]
    who, head = np.nonzero(np.isfinite(tight))
    return kappa[who, head], tight[who, head], head


def _row(encoded: Encoded, at: int) -> Encoded:
    return Encoded(*(x[at : at + 1] for x in encoded))


def _which(of: People) -> str:
    """Whose heads these are, in words."""
    whose = "All users share these heads." if of.shared else (
        "Every user has heads of their own: over users a head is only a slot, and its name says what it mostly is."
    )  # fmt: skip
    if of.left:
        held = of.pi[:, of.shown].sum(1).mean()
        shown = f"the {len(of.shown)} with the largest mean π are shown"
        whose += f" Of {of.pi.shape[1]} heads {shown}; they have {held:.0%} of it."
    return whose
