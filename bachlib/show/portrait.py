"""One trained model to look at: how good it is, its sliders, what its heads mean, one user, how it was trained.

    shown = Portrait("p-bach-…")       # a run folder, or its name in outputs/runs
    display(*shown.numbers())          # each part is a list of sentences, tables and figures

The notebook `report` shows these parts. What a method does not have (π and κ, several heads, genres), or what was lost
(the data set, the weights), is left out, and a sentence says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import torch
from IPython.display import HTML
from scipy.stats import spearmanr
from torch import nn

from bachlib import BachError
from bachlib.data import Dataset
from bachlib.evaluate import Evaluation, diagnostics, evaluate, meaning, tables
from bachlib.evaluate.paper import MAIN
from bachlib.evaluate.statistics import draws, interval
from bachlib.files import canonical_json, output_dir, read_json
from bachlib.model.twotower import Encoded, TwoTower
from bachlib.serve import Retriever
from bachlib.show import plots
from bachlib.show.maps import layout, regions
from bachlib.show.people import People, people
from bachlib.show.plots.style import label, tag
from bachlib.show.steering import K, sliders
from bachlib.train import Run
from bachlib.train.run import data_of, find_run, read_about

MOST_USERS = 2_000  # to evaluate, where nothing has been evaluated yet
CURVES = 8  # methods in one figure
ON_THE_MAP = 5_000  # items at most, the most popular ones
GENRES = 24  # columns at most, the most liked ones
WORDS = 8  # genres written on the map


class Portrait:
    """`run`: a run folder or its name; `data`: its prepared data set, if that is not in outputs/data, as a `Dataset` if
    it has a context; `model`: only where it has parts of your own. `missing` says why the model cannot be shown, or is
    empty."""

    def __init__(self, run: str | Path, data: str | Path | Dataset | None = None, model: nn.Module | None = None):
        self.folder, self.missing = find_run(run), ""
        self.about = read_about(self.folder)
        told, config = self.about["identity"]["data"], self.about["identity"]["model"]
        at = data.folder if isinstance(data, Dataset) else Path(data or output_dir("data", told["name"]))
        if not (at / "meta.json").exists():
            self.missing = f"its data set, {told['name']}, is not in the outputs folder"
        elif "context" in told and not isinstance(data, Dataset):
            self.missing = "it was trained with a context, which only your code has. "
            self.missing += "Open notebooks/report.ipynb and write Portrait(run, dataset.with_context(…))"
        elif (dataset := data_of(self.folder, data or at)).meta["content_hash"] != told["content_hash"]:
            self.missing = f"the data set {told['name']} is no longer the one it was trained on"
        elif config.get("own") and model is None:
            self.missing = f"it has parts of your own ({', '.join(config['own'])}), which only your code can build. "
            self.missing += "Open notebooks/report.ipynb, build the model there, and write Portrait(run, data, model)"
        elif config["row"]["objective"] != "counts" and not (self.folder / "best.safetensors").exists():
            self.missing = "it has no weights yet"
        else:
            self.dataset, self.run = dataset, Run.load(self.folder, dataset, model)

    @cached_property
    def people(self) -> People:
        return people(self.run.model, self.dataset)

    @cached_property
    def evaluation(self) -> Evaluation:
        """What was saved, if it is of these weights; else it is evaluated, on at most 2,000 users."""
        if (self.run.folder / "evaluation-test.json").exists():
            saved = Evaluation.load(self.run.folder)
            if saved.about.get("valid_auprc") == (self.run.best or {}).get("auprc"):
                return saved
        return evaluate(self.run, self.dataset, max_users=MOST_USERS, quiet=True)

    def facts(self) -> HTML:
        """The run in one sentence."""
        identity, best = self.about["identity"], self.about.get("best")
        name = f" (named {name})" if (name := identity["model"].get("name")) else ""
        told = f"A training run: method {identity['model'].get('method')}{name}, data {identity['data']['name']}, "
        told += f"status {self.about['status']}"
        told += f", best epoch {best['epoch']}, validation AUPRC {best['auprc']:.4f}" if best else ""
        return say(f"{told}.")

    def numbers(self) -> list[Any]:
        """The metrics on the test items with their intervals, beside comparable runs."""
        if self.missing:
            return [say(f"Nothing can be shown of the model: {self.missing}.")]
        own, others = self.evaluation, comparable(self.evaluation, self.folder)
        who = f"{own.protocol['users']['n']:,} {'cold ' if own.protocol['users']['which'] == 'cold' else ''}users"
        lead = f"The test items of {who}, ranked among the whole catalogue without the items the user already had."
        rows = tables.grouped([own, *others])  # the seeds of a method together, in the table and in the figure
        if others:
            several = "runs lie" if len(others) > 1 else "run lies"
            lead += f" {len(others)} other evaluated {several} beside this one and can be compared with it."
            baselines = [name for name, group in rows.items() if group[0].label == "all-multihead"]
            baselines += [name for name, group in rows.items() if any(e is own for e in group)]
            table = tables.table([own, *others], baselines[0])
            if max(map(len, rows.values())) > 1:
                lead += " The table and the curves combine the seeds of a row. All other sections show this run alone."
        else:
            lead += " Single seed: the intervals, bootstrapped over users, do not include variation between trainings."
            table = means(own)
        ordered = sorted(rows, key=lambda name: all(e is not own for e in rows[name]))  # its own row first
        curves = {label(name, 60): np.concatenate([e.ranks for e in rows[name]]) for name in ordered}
        drawn = plots.recall_curves(dict(list(curves.items())[:CURVES]), up_to=min(500, self.dataset.n_items - 1))
        if len(curves) == 1:
            found = (next(iter(curves.values())) <= 50).mean()
            drawn.update_layout(title_text=f"{found:.1%} of the held-out items are among the first 50")
        return [say(lead), table, drawn]

    def _without(self, hard: str = "") -> str:
        """Why there is nothing to show of heads and users; `hard`: what to say of a method without π."""
        if self.missing:
            return "The model cannot be shown: see the first section."
        if not isinstance(self.run.model, TwoTower):
            return "This method counts: it has no vectors, heads or π, and nothing was trained."
        return "" if self.run.model.kernel else hard

    def sliders(self) -> list[Any]:
        """Sliders for π_u."""
        hard = "This method ranks by the closest head and has no weights: there is no π to steer."
        if without := self._without(hard):
            return [say(without)]
        of = self.people
        lead = "Move the weight of a head, or forbid it: the slate is ranked again, here in the browser. "
        lead += "Click on an item to see why it is there. Arrows compare with the model's own slate."
        if of.left:
            shown = f"each user has sliders for the {len(of.shown)} largest and one for the rest"
            lead += f" Of {self.run.model.k} heads {shown}."
        return [say(lead), sliders(self.run, self.dataset, of)]

    def heads(self) -> list[Any]:
        """What the heads stand for, where they are, how users mix them and how far π_u and κ can be trusted."""
        if without := self._without():
            return [say(without)]
        model, of, drawn = self.run.model, self.people, []
        lead = "All users share these heads."
        if not of.shared:
            lead = "Every user has heads of their own: over users a head is a slot; its name says what it mostly is."
        if of.left:
            held = f"they have {of.pi[:, of.shown].sum(1).mean():.0%} of it"
            lead += f" Of {model.k} heads the {len(of.shown)} with the largest mean π are shown; {held}."
        if n := len(of.genres.names):
            columns = np.sort(np.argsort(-of.genres.likes, kind="stable")[:GENRES])
            lift = meaning.lift(of.over_users, of.genres.likes)[:, columns]
            drawn.append(plots.head_lift(lift, of.names, [of.genres.names[g] for g in columns], of.shown))
            lead += f" Of {n} genres the {GENRES} most liked are shown." if n > GENRES else ""
        else:
            lead += " These items have no genres: heads have numbers instead of names."
        drawn.append(item_map(model, self.dataset, of))
        if self.dataset.n_items > ON_THE_MAP:
            lead += f" The map has the {ON_THE_MAP:,} most popular items."
        if model.kernel is None:
            lead += " This method has no π and no κ, so there are no mixtures of users, calibration or tightness."
            return [say(lead), *drawn]
        if model.k > 1:
            text = f"On average the largest of a user's heads has {of.pi.max(1).mean():.0%} of π"
            drawn.append(plots.pi_admixture(of.pi[:, of.shown], of.cluster, of.names, of.shown, text))
        held = diagnostics.pi_calibration(diagnostics.held_out(model, self.dataset, of.users))
        name = label(self.evaluation.label)
        drawn.append(plots.calibration_curves({name: held.bins}, {name: held.ece}, "π<sub>u</sub>"))
        kappa, tight, head = _tightness(model, self.dataset, of)
        if len(np.unique(kappa)) > 2 and len(np.unique(tight)) > 2:
            correlation = float(spearmanr(kappa, tight).statistic)
            drawn.append(plots.kappa_and_tightness(kappa, tight, head, of.names, correlation, of.shown))
        else:
            lead += " κ is nearly the same everywhere, so it cannot be compared with how tight a head's items are."
        return [say(lead), *drawn]

    def user(self) -> list[Any]:
        """Which head explains what a user liked, and the slate they get."""
        hard = "This method takes the closest head: only a mixture shares an item out among the heads."
        if without := self._without(hard):
            return [say(without)]
        model, dataset, at = self.run.model, self.dataset, self.people.some[0]
        of, u = self.people.seen_by(at), int(self.people.users[at])
        titles, names = np.array(dataset.titles, object), of.names_of(at)
        sequence = np.asarray(dataset.sequence(u), np.int64)
        begin, later = int(dataset.begins["test"][u]), dataset.targets([u], "test")[0]
        earlier, later = sequence[:begin], later[later >= 0]
        last = np.concatenate([earlier[-model.n_hist :], later])
        gamma = diagnostics.explained(model, _rows(of, [at]), last[None]).gamma[0]
        needed = int(np.searchsorted(np.cumsum(np.sort(gamma.mean(0))[::-1]), 0.9)) + 1
        text = f"{needed} of {model.k} heads explain nine tenths of this user's {len(gamma)} items"
        strip = plots.history_strip(gamma[:, of.shown], titles[last], names, len(later), of.shown, text)
        most = min(K, dataset.n_items - len(set(earlier.tolist())))
        context = dataset.context_for(model, [u], "test")
        slate = Retriever(model, "exact").retrieve([earlier], most, user=[u], context=context)
        share, relative = slate.head_share[0], np.exp(slate.scores[0] - slate.scores[0, 0])
        text = f"{len(np.unique(share.argmax(1)))} of {model.k} heads bring these {most} items"
        bars = plots.slate_by_head(share[:, of.shown], relative, titles[slate.items[0]], names, of.shown, title=text)
        lead = f"What user {u} liked, each item split by which head explains it, and the {most} items shown next."
        if of.left:
            lead += f" Of {model.k} heads the {len(of.shown)} with the largest weight for this user are shown."
        return [say(lead), strip, bars]

    def training(self) -> list[Any]:
        """Curves of the training, where its history has more than one row."""
        if without := self._without():
            return [say(without)]
        model, history, of = self.run.model, self.run.history, self.people
        if len(history) < 2:
            return [say("The history has fewer than two rows, too few for curves; log_steps gives more of them.")]
        names, drawn = dict(zip(of.shown.tolist(), of.names, strict=True)), []
        lead = "This method has no bound and no concentrations to draw."
        if model.kernel:
            lead = "The terms of the bound, the concentrations and the use of each head during training."
            of_kappa = plots.kappa_trajectories(history, 1 / model.tau, model.kernel.name, names)
            drawn = [plots.elbo_terms(history), of_kappa]
        if model.k > 1:
            lead += "" if model.kernel else " Which head was the closest to the positives during training:"
            drawn.append(plots.head_usage({"": history}, names).update_layout(margin_t=64))
        return [say(lead), *drawn]

    def parameters(self) -> list[HTML]:
        """All that was set, defaults included."""
        identity, model = self.about["identity"], self.about["identity"]["model"]
        own = {"own": model["own"]} if model.get("own") else {}
        found = {"": {"method": model.get("method")}, "limits": self.about.get("limits", {})}
        found["model"] = model.get("params", {}) | model.get("row", {}) | own
        found |= {"train": identity["train"], "data": identity["data"]}
        return [settings(values, name) for name, values in found.items() if values]

    def environment(self) -> list[HTML]:
        """The versions it was made with."""
        versions = read_json(self.folder / "environment.json")
        return [settings(versions) if versions else say("The versions were not recorded.")]


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
        nested = isinstance(value, Mapping) and value
        yield from _flat(value, f"{before}{name}.") if nested else [(f"{before}{name}", value)]


def comparable(own: Evaluation, folder: Path) -> list[Evaluation]:
    """Evaluated runs beside this one that were measured in the same way, each training once."""
    same = ("method", "row", "own", "name", "seed", "model", "train", "status", "weights")  # equal for one training
    found = {canonical_json([own.about.get(key) for key in same]): own}
    for path in sorted(folder.resolve().parent.glob("*/evaluation-test.json")):
        with suppress(BachError, KeyError, OSError, ValueError):  # measured otherwise, or damaged: not ours to mend
            other = Evaluation.load(path.parent)
            tables.check_comparable([own, other])
            if path.parent != folder.resolve() and {*MAIN} <= {*other.per_user}:
                found.setdefault(canonical_json([other.about.get(key) for key in same]), other)
    return list(found.values())[1:]


def means(own: Evaluation) -> pd.DataFrame:
    """The means with 95% intervals over users."""
    rows = {}
    for name, values in own.per_user.items():
        known = values.dropna().to_numpy()
        if len(known):
            value, low, high = interval(known.mean(), draws([known])[:, 0])
            rows[name] = f"{value:.4f}", f"{low:.4f} – {high:.4f}", f"{len(known):,}"
    return pd.DataFrame.from_dict(rows, "index", columns=["mean", "95% interval", "users"])


@torch.no_grad()
def item_map(model: TwoTower, dataset: Dataset, of: People) -> go.Figure:
    """Items and heads on a map: those of all users if they share them, else those of one user with the history."""
    at, popular = of.some[0], np.argsort(-dataset.items["n_users"].to_numpy(), kind="stable")
    chosen, mine, titles = np.sort(popular[:ON_THE_MAP]), _rows(of, [at]), dataset.titles
    vectors = model.items()[torch.as_tensor(chosen)].cpu().numpy()
    u = mine.heads[0, of.shown].cpu().numpy()
    best = cosine = vectors @ u.T  # (n, c)
    weight, names = None, of.names if of.shared else of.names_of(at)
    if model.kernel:
        kappa = mine.kappa[0, of.shown].cpu()
        log_sigma = model.kernel.log_density(torch.from_numpy(cosine), kappa, model.d).numpy()
        weight = of.pi[:, of.shown].mean(0) if of.shared else of.pi[at, of.shown]
        best = np.log(weight + 1e-30) + log_sigma
        n = int(weight.argmax())
        title = f"Where the heads of user {of.users[at]} stand; "
        title += f"the largest, {tag(of.shown[n], names[n])}, has {weight[n]:.0%} of π"
    elif len(u) > 1:
        title = f"Where the {len(u)} heads of user {of.users[at]} stand, each item with the closest"
    else:
        title = f"Where the vector of user {of.users[at]} stands among the items"
    xy, head_xy = layout(vectors, u)
    top = np.argsort(-cosine, axis=0, kind="stable")[:5].T
    who = int(of.users[at])
    history = [] if of.shared else np.flatnonzero(np.isin(chosen, dataset.sequence(who)[: dataset.begins["test"][who]]))
    words = regions(xy, of.genres.first[chosen], of.genres.names, WORDS)
    return plots.map_of_items(
        xy, best.argmax(1), [titles[i] for i in chosen], head_xy, names, weight, top.tolist(), words, history,
        None if of.shared else title, of.shown,
    )  # fmt: skip


def _tightness(model: TwoTower, dataset: Dataset, of: People) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """κ, mean cosine and number of the shown heads that explain at least five items of a history, of some users."""
    some = np.arange(len(of.users))[:: max(1, len(of.users) // 150)]
    encoded, past = _rows(of, some), dataset.history(of.users[some], "test", model.n_hist)
    tight = diagnostics.explained(model, encoded, past).tightness()[:, of.shown]
    who, head = np.nonzero(np.isfinite(tight))
    return encoded.kappa.cpu().numpy()[:, of.shown][who, head], tight[who, head], head


def _rows(of: People, rows: Any) -> Encoded:
    return Encoded(*(x[rows] for x in of.encoded))
