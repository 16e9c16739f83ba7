"""One trained model to look at: how good it is, its sliders, what its heads mean, one user, how it was trained.

    shown = Portrait("p-bach-…")       # a run folder, or its name in outputs/runs
    display(*shown.numbers())          # each part is a list of sentences, tables and figures

The notebook `report` shows these parts. What a method does not have (π and κ, several heads, genres), or what was lost
(the data set, the weights), is left out, and a sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import torch
from IPython.display import HTML
from scipy.stats import spearmanr
from torch import nn

from bachlib.data import Dataset
from bachlib.evaluate import Evaluation, diagnostics, meaning
from bachlib.files import output_dir, read_json
from bachlib.model.twotower import Encoded, TwoTower
from bachlib.params import N_TEST
from bachlib.serve import Retriever
from bachlib.show import plots, scores
from bachlib.show.maps import layout, regions
from bachlib.show.people import People, people
from bachlib.show.plots.style import label, tag
from bachlib.show.steering import K, sliders
from bachlib.train import Run
from bachlib.train.run import data_of, find_run, read_about

ON_THE_MAP = 5_000  # items at most, the most popular ones
GENRES = 24  # columns at most, the most liked ones
WORDS = 8  # genres written on the map


class Portrait:
    """`run`: a run folder or its name; `data`: its prepared data set, if that is not in outputs/data; `model`: only
    where it has parts of your own. `missing` says why the model cannot be shown, or is empty."""

    def __init__(self, run: str | Path, data: str | Path | None = None, model: nn.Module | None = None):
        self.folder = find_run(run)
        self.about = read_about(self.folder)
        self.missing = self._missing(Path(data) if data else None, model)
        if not self.missing:
            self.dataset = data_of(self.folder, Path(data) if data else None)
            self.run = Run.load(self.folder, self.dataset, model)

    def _missing(self, data: Path | None, model: nn.Module | None) -> str:
        told, config = self.about["identity"]["data"], self.about["identity"]["model"]
        if not ((data or output_dir("data", told["name"])) / "meta.json").exists():
            return f"its data set, {told['name']}, is not in the outputs folder"
        if data_of(self.folder, data).meta["content_hash"] != told["content_hash"]:
            return f"the data set {told['name']} is no longer the one it was trained on"
        if config.get("own") and model is None:
            return (
                f"it has parts of your own ({', '.join(config['own'])}), which only your code can build. "
                "Open notebooks/report.ipynb, build the model there, and write Portrait(run, data, model)"
            )
        if config["row"]["objective"] != "counts" and not (self.folder / "best.safetensors").exists():
            return "it has no weights yet"
        return ""

    @cached_property
    def people(self) -> People:
        return people(self.run.model, self.dataset)

    def _without(self) -> HTML | None:
        """Why there is nothing to show of heads and users."""
        if self.missing:
            return say("The model cannot be shown: see the first section.")
        if not isinstance(self.run.model, TwoTower):
            return say("This method counts: it has no vectors, heads or π, and nothing was trained.")
        return None

    def facts(self) -> HTML:
        """The run in one sentence."""
        identity, best = self.about["identity"], self.about.get("best")
        method, name = identity["model"].get("method"), identity["data"]["name"]
        told = f"method {method}, data {name}, status {self.about['status']}"
        if best:
            told += f", best epoch {best['epoch']}, validation AUPRC {best['auprc']:.4f}"
        return say(f"A training run: {told}.")

    @cached_property
    def evaluation(self) -> Evaluation:
        return scores.evaluation_of(self.run, self.dataset)

    def numbers(self) -> list[Any]:
        """The metrics on the test items with their intervals, beside comparable runs."""
        if self.missing:
            return [say(f"Nothing can be shown of the model: {self.missing}.")]
        lead, *shown = scores.numbers(self.evaluation, self.folder, self.dataset.n_items)
        return [say(lead), *shown]

    def sliders(self) -> list[Any]:
        """Sliders for π_u."""
        if without := self._without():
            return [without]
        model, of = self.run.model, self.people
        if model.kernel is None:
            return [say("This method ranks by the closest head and has no weights: there is no π to steer.")]
        lead = "Move the weight of a head, or forbid it: the slate is ranked again, here in the browser. "
        lead += "Click on an item to see why it is there. Arrows compare with the model's own slate."
        if of.left:
            lead += f" Of {model.k} heads each user has sliders for the {len(of.shown)} largest and one for the rest."
        return [say(lead), sliders(self.run, self.dataset, of)]

    def heads(self) -> list[Any]:
        """What the heads stand for, where they are, how users mix them and how far π_u and κ can be trusted."""
        if without := self._without():
            return [without]
        model, dataset, of = self.run.model, self.dataset, self.people
        lead, drawn = [_whose(of)], []
        if of.genres.names:
            columns = np.sort(np.argsort(-of.genres.likes, kind="stable")[:GENRES])
            lift = meaning.lift(of.over_users, of.genres.likes)[:, columns]
            drawn.append(plots.head_lift(lift, of.names, [of.genres.names[g] for g in columns], of.shown))
            if len(of.genres.names) > GENRES:
                lead.append(f"Of {len(of.genres.names)} genres the {GENRES} most liked are shown.")
        else:
            lead.append("These items have no genres: heads have numbers instead of names.")
        drawn.append(item_map(model, dataset, of))
        if dataset.n_items > ON_THE_MAP:
            lead.append(f"The map has the {ON_THE_MAP:,} most popular items.")
        if model.kernel is None:
            lead.append("This method has no π and no κ, so there are no mixtures of users, calibration or tightness.")
            return [say(" ".join(lead)), *drawn]
        if model.k > 1:
            text = f"On average the largest of a user's heads has {of.pi.max(1).mean():.0%} of π"
            drawn.append(plots.pi_admixture(of.pi[:, of.shown], of.cluster, of.names, of.shown, text))
        held = diagnostics.pi_calibration(diagnostics.held_out(model, dataset, of.users))
        name = label(model.config.get("method", "model"))
        drawn.append(plots.calibration_curves({name: held.bins}, {name: held.ece}, "π<sub>u</sub>"))
        kappa, tight, head = _tightness(model, dataset, of)
        if len(np.unique(kappa)) > 2 and len(np.unique(tight)) > 2:
            correlation = float(spearmanr(kappa, tight).statistic)
            drawn.append(plots.kappa_and_tightness(kappa, tight, head, of.names, correlation, of.shown))
        else:
            lead.append("κ is nearly the same everywhere, so it cannot be compared with how tight a head's items are.")
        return [say(" ".join(lead)), *drawn]

    def user(self) -> list[Any]:
        """Which head explains what a user liked, and the slate they get."""
        if without := self._without():
            return [without]
        model, dataset, at = self.run.model, self.dataset, self.people.some[0]
        if model.kernel is None:
            return [say("This method takes the closest head: only a mixture shares an item out among the heads.")]
        of, u = self.people.seen_by(at), int(self.people.users[at])
        titles, names = np.array(dataset.titles, object), of.names_of(at)
        sequence = np.asarray(dataset.sequence(u), np.int64)
        last, earlier = sequence[-(model.n_hist + N_TEST) :], sequence[:-N_TEST]
        gamma = diagnostics.explained(model, _row(of.encoded, at), last[None]).gamma[0]
        needed = int(np.searchsorted(np.cumsum(np.sort(gamma.mean(0))[::-1]), 0.9)) + 1
        text = f"{needed} of {model.k} heads explain nine tenths of this user's {len(gamma)} items"
        strip = plots.history_strip(gamma[:, of.shown], titles[last], names, N_TEST, of.shown, text)
        most = min(K, dataset.n_items - len(set(earlier.tolist())))
        slate = Retriever(model, "exact").retrieve([earlier], most, user=[u])
        share, relative = slate.head_share[0], np.exp(slate.scores[0] - slate.scores[0, 0])
        text = f"{len(np.unique(share.argmax(1)))} of {model.k} heads bring these {most} items"
        items = titles[slate.items[0]]
        bars = plots.slate_by_head(share[:, of.shown], relative, items, names, of.shown, title=text)
        lead = f"What user {u} liked, each item split by which head explains it, and the {most} items shown next."
        if of.left:
            lead += f" Of {model.k} heads the {len(of.shown)} with the largest weight for this user are shown."
        return [say(lead), strip, bars]

    def training(self) -> list[Any]:
        """Curves of the training, where its history has more than one row."""
        if without := self._without():
            return [without]
        model, history, of = self.run.model, self.run.history, self.people
        if len(history) < 2:
            return [say("The history has fewer than two rows, too few for curves; log_steps gives more of them.")]
        names, drawn = dict(zip(of.shown.tolist(), of.names, strict=True)), []
        if model.kernel:
            lead = "The terms of the bound, the concentrations and the use of each head during training."
            drawn = [plots.elbo_terms(history)]
            drawn += [plots.kappa_trajectories(history, 1 / model.tau, model.kernel.name, names)]
        else:
            lead = "This method has no bound and no concentrations to draw."
        if model.k > 1:
            lead += "" if model.kernel else " Which head was the closest to the positives during training:"
            drawn.append(plots.head_usage({"": history}, names).update_layout(margin_t=64))
        return [say(lead), *drawn]

    def parameters(self) -> list[HTML]:
        """All that was set, defaults included."""
        identity = self.about["identity"]
        model, own = identity["model"], identity["model"].get("own")
        found = {"": {"method": model.get("method")}, "limits": self.about.get("limits", {})}
        found["model"] = model.get("params", {}) | model.get("row", {}) | ({"own": own} if own else {})
        found |= {"train": identity["train"], "data": identity["data"]}
        return [settings(values, name) for name, values in found.items() if values]

    def environment(self) -> list[HTML]:
        """The versions it was made with."""
        versions = read_json(self.folder / "environment.json")
        return [settings(versions) if versions else say("The versions were not recorded.")]


# ----------------------------------------------------------------------------------------------- sentences and tables


def say(text: str) -> HTML:
    """A sentence; nothing in it is markup."""
    return HTML(f"<p>{escape(text, quote=False)}</p>")


def settings(values: Mapping[str, Any], title: str = "") -> HTML:
    """Names and values as a table; the names of nested ones are joined by a dot."""
    lines = "".join(f"<tr><td>{escape(k)}</td><td>{escape(str(v))}</td></tr>" for k, v in _flat(values))
    above = f"<h4>{escape(title)}</h4>" if title else ""
    return HTML(f'{above}<div class="settings"><table><tbody>{lines}</tbody></table></div>')


def _flat(values: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{before}{name}.")
        else:
            yield f"{before}{name}", value


# ----------------------------------------------------------------------------------------------------------- pictures


@torch.no_grad()
def item_map(model: TwoTower, dataset: Dataset, of: People) -> go.Figure:
    """Items and heads on a map: those of all users if they share them, else those of one user with the history."""
    at, popular = of.some[0], np.argsort(-dataset.items["n_users"].to_numpy(), kind="stable")
    chosen = np.sort(popular[:ON_THE_MAP])
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


def _whose(of: People) -> str:
    """Whose heads these are, in words."""
    whose = "All users share these heads."
    if not of.shared:
        whose = "Every user has heads of their own: over users a head is a slot, and its name says what it mostly is."
    if of.left:
        held = of.pi[:, of.shown].sum(1).mean()
        shown = f"the {len(of.shown)} with the largest mean π are shown"
        whose += f" Of {of.pi.shape[1]} heads {shown}; they have {held:.0%} of it."
    return whose
