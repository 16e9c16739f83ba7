"""Evaluation over the full catalogue (section 6.1): every held-out item among all items but the user's earlier ones.

Users are scored in blocks, and nothing is sorted: a held-out item's rank is one plus the number of items that score
higher, and Recall, NDCG and AP, also over the full ranking (the paper's AUPRC), follow from the ranks. `slate=K` also
keeps the first K items of every user and measures diversity, novelty and coverage of these slates.
"""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import nn
from tqdm.auto import tqdm

from bachlib import BachError
from bachlib.data.dataset import Dataset, Split
from bachlib.data.windows import windows_of_prefixes
from bachlib.files import canonical_json, file_hash, read_json, short_hash, write_json, write_table
from bachlib.model.methods import METHODS
from bachlib.params import ServeBy
from bachlib.rank import metrics
from bachlib.rank.ranks import Exclude, Users, rank_blocks, sample_users, score_blocks
from bachlib.reading import expect, read_table, reading
from bachlib.train.run import Run

Slates = Int[np.ndarray, "U K"]
Targets = Int[np.ndarray, "U m"]  # held-out items, or their ranks

ACCURACY = {f"R@{k}": partial(metrics.recall_of_ranks, k=k) for k in (10, 50, 100)} | {
    "NDCG@100": partial(metrics.ndcg_of_ranks, k=100),
    "AUPRC": metrics.average_precision_of_ranks,
    "AP@100": partial(metrics.average_precision_of_ranks, k=100),
}
OF_USERS = "^(diversity|interests|nats)"  # columns of a compact file beside the ranks


@dataclass(frozen=True, eq=False)
class Evaluation:
    """A row per user, the means, and the protocol."""

    per_user: pd.DataFrame  # indexed by user; columns R@10 … AP@100, with slates also theirs
    means: dict[str, float]
    ranks: Int[np.ndarray, "U 10"]  # of the held-out items in the order of time, from 1
    protocol: dict[str, Any]  # data set, split, users, exclusions: the same for all in a table
    about: dict[str, Any]  # method, k, seed, parameters of the model; of a run also its validation AUPRC
    slates: Slates | None = None

    @property
    def label(self) -> str:
        """Its row in a table: the name it was given, or its method with what is different, "p-bach (encoder = GRU)"."""
        if name := self.about.get("name"):
            return name
        told = ", ".join(f"{part} = {value}" for part, value in self.different.items())
        return f"{self.method} ({told})" if told else self.method

    @property
    def method(self) -> str:
        """The method, or for a row of one's own the most similar method."""
        row, name = self.about.get("row"), self.about["method"]
        if not row or name in METHODS:
            return name
        return min(METHODS, key=lambda known: len(row.items() - METHODS[known]._asdict().items()))

    @property
    def different(self) -> dict[str, Any]:
        """The parts in which the model differs from `method`: those of another row, and the classes of its own."""
        usual = METHODS[self.method]._asdict() if self.method in METHODS else {}
        other = {part: value for part, value in (self.about.get("row") or usual).items() if value != usual.get(part)}
        return other | {part: known.split()[0] for part, known in self.about.get("own", {}).items()}

    def joined(self, more: pd.DataFrame) -> Evaluation:
        """With more columns for its users; a user who has no row there has no value."""
        return replace(self, per_user=self.per_user.join(more), means=self.means | more.mean().to_dict())

    def save(self, folder: str | Path, *, compact: bool = False) -> Path:
        """Write evaluation-<split>.parquet and .json into a run folder; `Evaluation.load` reads them.

        `compact`: a small file, from which the metrics of ranks are computed again. It has no slates, and of what else
        is known of each user three digits of `OF_USERS`; the means are kept.
        """
        stem = Path(folder) / f"evaluation-{self.protocol['split']}"
        per_user, means = self.per_user, self.means
        numbers = {"rank_": self.ranks.astype(np.min_scalar_type(int(self.ranks.max())) if compact else np.int32)}
        numbers |= {} if self.slates is None or compact else {"slate_": self.slates}
        if compact:
            per_user = per_user.filter(regex=OF_USERS).astype(np.float16)
            means = means | per_user.astype(float).mean().to_dict()
        told = {"means": means, "protocol": self.protocol, "about": self.about}
        there = {key: x for key, x in read_json(stem.with_suffix(".json")).items() if key in told}
        if canonical_json(there) != canonical_json(told):
            stem.with_suffix(".json").unlink(missing_ok=True)  # it is of other ranks
        parts = [pd.DataFrame(of, per_user.index).add_prefix(name) for name, of in numbers.items()]
        write_table(stem.with_suffix(".parquet"), pd.concat([per_user, *parts], axis=1), compact)
        told["table"] = file_hash(stem.with_suffix(".parquet"))
        write_json(stem.with_suffix(".json"), told, checked=True)
        return stem.with_suffix(".json")

    @classmethod
    def load(cls, folder: str | Path, split: Split = "test") -> Evaluation:
        stem = Path(folder) / f"evaluation-{split}"
        if not stem.with_suffix(".json").exists():
            raise BachError(f"{folder} has not been evaluated on its {split} items: run bach evaluate {folder}")
        path, again = stem.with_suffix(".parquet"), f"run bach evaluate {folder} to write it again"
        with reading(stem.with_suffix(".json"), again):
            known = read_json(stem.with_suffix(".json"))
            expect(known, {"means": dict, "protocol": {"split": str, "data": str}, "about": {"method": str}})
            told = {key: known[key] for key in ("means", "protocol", "about")}
            if "own" not in told["about"]:  # written by an earlier version: its run knows the parts
                told["about"] |= _parts(read_json(Path(folder) / "run.json").get("identity", {}).get("model", {}))
            if told["protocol"]["split"] != split:
                raise ValueError(f"it is of the split {told['protocol']['split']!r:.80}")
        with reading(path, again):
            table = read_table(path, again)
            table = table.set_index("user") if "user" in table else table
            if known.get("table") not in (None, file_hash(path)):
                raise ValueError("it is not the table that the .json was written with")
            order, slates = (table.filter(regex=f"^{part}_") for part in ("rank", "slate"))
            per_user, ranks = table.drop(columns=[*order, *slates]).astype(float), order.to_numpy().astype(np.int32)
            if not set(ACCURACY) & set(per_user):  # it is compact
                per_user = accuracy(ranks, table.index).join(per_user)
            told["means"] = {name: told["means"][name] for name in dict.fromkeys([*per_user, *told["means"]])}
            wrong = [name for name in per_user if not np.isclose(per_user[name].mean(), told["means"][name], 1e-6)]
            if wrong or not len(order.columns):
                raise ValueError(f"its ranks and means differ: {', '.join(wrong) or 'there are no ranks'}")
            slates = slates.to_numpy() if len(slates.columns) else None
            return cls(per_user, **told, ranks=ranks, slates=slates)

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4f}" for name, value in self.means.items())
        return f"{self.label} ({self.protocol['split']}, {len(self.per_user):,} users): {numbers}"


@torch.no_grad()
def evaluate(
    model: nn.Module | Run,
    dataset: Dataset,
    split: Split = "test",
    *,
    max_users: int = 10_000,
    seed: int = 0,
    exclude: Exclude = "earlier",
    slate: int = 0,
    serve_by: ServeBy = "density",
    quiet: bool = False,
) -> Evaluation:
    """Rank the whole catalogue for every user (at most `max_users`, drawn with `seed`) and measure.

    `model` is any method of the table, a `Run` (its best weights), or any module with `score(history)`, (B, n_hist)
    item ids → (B, n_items). On a `dataset.strict()` only its cold users are evaluated. A model or run made with
    other data raises an error. `slate=K` adds hit rate, diversity, novelty, popularity bias, interest coverage and
    catalogue coverage of the first K items. `serve_by`: the rule of a BACH method, with the same weights (see
    `mixture.served_by`).
    """
    of_run = {}
    if isinstance(model, Run):
        of_run = _about_run(model)
        dataset.check_same(model.about["identity"]["data"]["content_hash"], f"{model.folder.name} was trained")
        model = model.model
    if not hasattr(model, "score"):
        raise BachError(f"evaluate needs a model or a Run (Run.load(folder, dataset)); got {type(model).__name__}")
    dataset.check_same(getattr(model, "built_on", None), "the model was built")
    left = dataset.n_items - int(dataset.lengths.max()) - 1
    if not (isinstance(slate, int) and 0 <= slate <= left):
        raise BachError(f"slate={slate}: should be 0 (none) or at most {left}, the number of items left for every user")
    if problem := cannot_serve(serve_by, getattr(model, "kernel", None), type(model).__name__):
        raise BachError(problem)
    if max_users < 1:
        raise BachError(f"max_users={max_users}: should be at least 1")
    cold = dataset.cold is not None
    users = sample_users(dataset, max_users, seed, cold, split)
    found, slates = [], []
    with tqdm(total=len(users), unit=" users", delay=2, leave=False, disable=True if quiet else None) as bar:
        for block, of_block in rank_blocks(model, dataset, users, split, exclude, serve_by):
            found.append(of_block)
            bar.update(len(block))
        for block in score_blocks(model, dataset, users, split, exclude, serve_by) if slate else ():
            slates.append(_first(block.scores, slate))
    config, found = getattr(model, "config", None) or {}, np.concatenate(found)
    params = config.get("params", {})
    about = {"method": config.get("method", type(model).__name__), "k": getattr(model, "k", None)}
    about |= {"seed": params.get("seed"), "model": params, **_parts(config), **of_run}
    about |= {} if serve_by == "density" else {"serve_by": serve_by}
    per_user = accuracy(found, pd.Index(users, name="user"))
    protocol = {
        "data": dataset.folder.name,
        "content_hash": dataset.meta["content_hash"],
        "split": split,
        "users": {"n": len(users), "which": "cold" if cold else "all", "hash": short_hash(users.tolist())},
        "exclude": exclude,
        "ties": "by item number",
        "candidates": "full catalogue",
    }
    if without := len(np.setdiff1d(dataset.cold if cold else dataset.warm, dataset.evaluated(split))):
        protocol["users"]["without items"] = without  # after the date, or before it: of a global split
    covered, slates = {}, np.concatenate(slates) if slate else None
    if slate:
        per_user = per_user.join(slate_table(slates, found, dataset, users, split))
        covered[f"coverage@{slate}"] = metrics.coverage(slates, dataset.n_items)
    return Evaluation(per_user, per_user.mean().to_dict() | covered, found, protocol, about, slates)


def cannot_serve(by: str, kernel: Any, name: str) -> str:
    """Why a model cannot be served by this rule, or nothing."""
    if by not in ServeBy.__args__:
        return f"serve_by={by!r}: should be one of {', '.join(ServeBy.__args__)}"
    if by != "density" and not kernel:
        return f"serve_by={by!r}: {name} has no π_u and no κ; only the BACH methods can be served by other rules"
    return ""


def accuracy(ranks: Targets, users: pd.Index) -> pd.DataFrame:
    """The metrics of ranks, a row per user."""
    return pd.DataFrame({name: of(ranks) for name, of in ACCURACY.items()}, users)


def slate_table(slates: Slates, ranks: Targets, dataset: Dataset, users: Users, split: Split) -> pd.DataFrame:
    """Properties of slates, a row per user; a user's interests are the genres, if any, of the held-out items."""
    K, popularity = slates.shape[1], np.asarray(dataset.matrix("train").sum(0), float)[0] / len(dataset.warm)
    rows, items = dataset.earlier(users, split)
    known = np.full((len(users), int(np.bincount(rows).max())), -1)
    known[rows, np.arange(len(rows)) - np.searchsorted(rows, rows)] = items
    table = {
        f"HR@{K}": metrics.hit_rate_of_ranks(ranks, K),
        f"novelty@{K}": metrics.novelty(slates, popularity),
        f"popularity bias@{K}": metrics.popularity_bias(slates, popularity, known),
    }
    genres = dataset.genres.member
    if genres.shape[1]:
        if K > 1:
            table[f"diversity@{K}"] = metrics.diversity(slates, genres)
        wanted = dataset.mean_of_targets(genres, users, split) > 0
        table[f"interests@{K}"] = metrics.interest_coverage(slates, genres, wanted)
    return pd.DataFrame(table, pd.Index(users, name="user"))


def _first(scores: torch.Tensor, k: int) -> Int[np.ndarray, "B k"]:
    """The first k items, best first, equal scores by number."""
    top, kept = scores.topk(k + 1, dim=1)
    if bool((top[:, k - 1] == top[:, k]).any()):  # a tie across the edge, which topk breaks arbitrarily
        return scores.sort(dim=1, descending=True, stable=True).indices[:, :k].cpu().numpy()
    kept = kept[:, :k].sort(1).values
    order = scores.gather(1, kept).sort(dim=1, descending=True, stable=True).indices
    return kept.gather(1, order).cpu().numpy()


def _parts(config: dict[str, Any]) -> dict[str, Any]:
    """The row of the table of methods, the parts of one's own, and the name that was given."""
    return {key: config[key] for key in ("row", "own", "name") if config.get(key) is not None}


def _about_run(run: Run) -> dict[str, Any]:
    """What a table needs to know about a training: its parameters, limits and status."""
    train = run.about["identity"]["train"] | run.about.get("limits", {})
    chosen = run.best["auprc"] if run.best and run.weights == "best" else None  # of these weights
    told = {"run": run.folder.name, "train": train, "status": run.status, "weights": run.weights}
    return told | {"valid_auprc": chosen}


# Mistakes of public code, wrong on purpose, so that their effect can be measured (notebook 05). Two more are options:
# `evaluate(…, exclude="nothing")` recommends items the user already has, and `prepare(…, ties="item")` sorts
# simultaneous likes by item number.


def leaked(dataset: Dataset, *, same_size: bool = False, seed: int = 0) -> Dataset:
    """A global split with its leak: a half of the test users keeps the dates, and of all others everything is trained
    on, later likes too, as with the paper's split. So a model knows what others liked after a user's test date.

    This is also more data. With `same_size`, random users without later likes are left out of the training until it has
    no more windows than without the leak, or until none of them is left.
    """
    if "split" not in dataset.meta or dataset.cold is not None:
        raise BachError(f"leaked needs data with split='global-time' and without cold users; got {dataset!r}")
    rng, view, users = np.random.default_rng(seed), copy(dataset), dataset.evaluated("test")
    others = np.ones(dataset.n_users, bool)
    others[rng.choice(users, len(users) // 2, replace=False)] = False
    view.begins = {split: np.where(others, dataset.lengths, begin) for split, begin in dataset.begins.items()}
    before, now = (windows_of_prefixes(data.begins["valid"]) for data in (dataset, view))
    if same_size:
        out = rng.permutation(np.flatnonzero(others & (now == before)))
        out = out[np.cumsum(now[out]) - now[out] < (now - before).sum()]
        now[out] = 0
        for begin in view.begins.values():
            begin[out] = 0
    view.n_windows = int(now.sum())
    view.meta = dataset.meta | {"content_hash": f"{dataset.meta['content_hash']}-leak-{seed}-{int(same_size)}"}
    return view


def ndcg_ideal_of_hits(ranks: Targets, k: int) -> Float[np.ndarray, " U"]:
    """NDCG@K whose ideal has only the items that *were* found: one hit at rank 1 of ten targets counts as perfect."""
    hits = ((ranks > 0) & (ranks <= k)).sum(1)
    return np.where(hits > 0, metrics.dcg_of_ranks(ranks, k) / metrics.ideal_dcg(np.maximum(hits, 1)), 0.0)


def ndcg_in_set_order(slates: Slates, targets: Targets, k: int) -> Float[np.ndarray, " U"]:
    """NDCG@K of the slate after it went through a Python set: the order is that of a hash table."""
    ranks = np.full(targets.shape, k + 1)
    for row, (slate, wanted) in enumerate(zip(slates[:, :k].tolist(), targets.tolist(), strict=True)):
        place = {item: n for n, item in enumerate(set(slate), 1)}
        ranks[row] = [place.get(item, k + 1) if item >= 0 else 0 for item in wanted]
    return metrics.ndcg_of_ranks(ranks, k)


def sampled_ranks(
    model: nn.Module, dataset: Dataset, users: Users, split: Split = "test", n: int = 100, seed: int = 0
) -> Targets:
    """Rank of each held-out item among itself and `n` random items that are new to the user, not the catalogue."""
    found, rng = [], np.random.default_rng(seed)
    for block in score_blocks(model, dataset, users, split):
        scores, targets, there = block.scores.cpu(), block.targets.cpu().clamp(min=0), block.targets.cpu() >= 0
        targets = targets.where(there, targets[:, :1])  # a target in place of padding
        own = scores.gather(1, targets)
        allowed = (scores > -torch.inf).scatter(1, targets, False).float()
        if int(allowed.sum(1).min()) < n:
            raise BachError(f"n={n}: a user has only {int(allowed.sum(1).min())} items left to sample from")
        picked = torch.from_numpy(rng.random(allowed.shape, dtype=np.float32)).mul_(allowed).topk(n, dim=1).indices
        better = scores.gather(1, picked)[:, None, :] > own[:, :, None]  # (B, m, n)
        found.append(((1 + better.sum(2)) * there).numpy())
    return np.concatenate(found)
