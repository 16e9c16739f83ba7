"""The whole training step of p-BACH: its time against the bare matrix products of that step, and where it goes.

Settings: d = 64, history of 50, batch of 512, 2,048 + 512 candidates, about 20,000 items, one thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat
from statistics import median
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import embedding, normalize

from bachlib.bench.measure import cpu_seconds, judged, world
from bachlib.data import Dataset, Windows
from bachlib.model import mixture, onepass
from bachlib.model.methods import build
from bachlib.model.onepass import Weights, each_once
from bachlib.model.twotower import TwoTower

B, NEGATIVES = 512, 2048
SIZES = {"n_users": 3_000, "n_items": 20_050}  # after preparation just below 20,000 items
Work = Callable[[], Any]


class Drawn:
    """One batch of a data set with its negatives, and the distinct items of its step."""

    def __init__(self, dataset: Dataset):
        batch = next(iter(Windows(dataset, B)))
        self.history, self.positive = torch.from_numpy(batch.history), torch.from_numpy(batch.positive)
        self.negatives = torch.randint(dataset.n_items, (NEGATIVES,))
        drawn = torch.cat([self.positive, self.negatives])
        self.candidates, place = each_once(drawn, dataset.n_items)
        self.own, self.weight = place[:B], torch.bincount(place).float()
        needed = torch.cat([self.history.clamp(min=0).flatten(), drawn])
        # as in `objective`: all items if the step needs as many, else the distinct ones
        self.items = torch.arange(dataset.n_items) if dataset.n_items <= len(needed) else needed.unique()


def bare_products(model: TwoTower, drawn: Drawn) -> dict[str, Work]:
    """The matrix products of a step, forward and backward, by part: shapes only, and nothing between them."""
    d, k, n, item = model.d, model.k, drawn.history.shape[1], model.item_tower.residual[0].out_features
    wide, C = 4 * d, len(drawn.candidates)

    def tower(k: int) -> Iterator[Work]:
        a, ff = model.encoder.heads, model.encoder.layer.linear1.out_features
        yield _product(B * n, d, a * k)  # scores
        yield _product(a * k, n + k, d, B)  # pooled
        yield _product(B * k, d, d // a, a)  # values
        yield from (_product(B * k, *shape) for shape in ((d, d), (d, ff), (ff, d)))

    items = [_product(len(drawn.items), d, item, to_input=False), _product(len(drawn.items), item, d)]
    kappa = [_product(B * k, d, wide, to_input=False), _product(B * k, wide, wide), _product(B * k, wide, 1)]
    rows = max(1, onepass.BLOCK // (k * C)) * k
    loss = [_product(len(part), d, C) for part in torch.arange(B * k).split(rows)]
    gate = [*tower(1), _product(B, d, k)]
    parts = {"item tower": items, "encoder": [*tower(k)], "gate": gate, "κ-net": kappa, "loss": loss}
    return {name: lambda works=works: [work() for work in works] for name, works in parts.items()}


def _product(m: int, inner: int, n: int, many: int = 1, to_input: bool = True) -> Work:
    """`many` products (m, inner)·(inner, n) and, for each, the two of its backward pass."""
    shapes = [(m, inner), (inner, n), (m, n)]
    x, weight, y = (torch.randn(*((many, *shape) if many > 1 else shape)) for shape in shapes)
    to_x, to_weight, times = torch.empty_like(x), torch.empty_like(weight), torch.bmm if many > 1 else torch.mm

    def work() -> None:
        times(x, weight, out=y)
        times(x.mT, y, out=to_weight)
        if to_input:
            times(y, weight.mT, out=to_x)

    return work


def parts_of_a_step(model: TwoTower, drawn: Drawn) -> dict[str, tuple[Work, Work]]:
    """(forward, backward) of each part of a step, as `TwoTower.objective` does them, each on its own."""
    place = torch.zeros(model.n_items, dtype=torch.long)
    place[drawn.items] = torch.arange(len(drawn.items))
    at, history, weights = place[drawn.history.clamp(min=0)], drawn.history, Weights(drawn.weight, torch.ones(B))
    with torch.no_grad():
        rows = model.items(drawn.items)
        tokens, candidates = embedding(at, rows), rows[place[drawn.candidates]]
        heads = normalize(model.encoder(tokens, history), dim=-1)
        log_pi, kappa = model.gate(tokens, history).log_softmax(-1), model.kappa_net(heads)
    heads, log_pi, kappa, candidates, tokens, rows = (
        x.requires_grad_() for x in (heads, log_pi, kappa, candidates, tokens, rows)
    )

    def loss() -> Tensor:
        log_sigma = mixture.log_sigma(heads, candidates[drawn.own], kappa, model.kernel)
        return mixture.loss(heads, candidates, drawn.own, log_pi, log_sigma, model.tau, weights=weights)[0]

    def gathers() -> Tensor:
        return torch.cat([embedding(at, rows).flatten(0, 1), embedding(place[drawn.candidates], rows)])

    forward = {
        "item tower": (lambda: model.items(drawn.items), model.item_tower, ()),
        "gathers": (gathers, None, (rows,)),
        "encoder": (lambda: normalize(model.encoder(tokens, history), dim=-1), model.encoder, (tokens,)),
        "gate": (lambda: model.gate(tokens, history).log_softmax(-1), model.gate, (tokens,)),
        "κ-net": (lambda: model.kappa_net(heads), model.kappa_net, ()),
        "loss": (loss, None, (heads, log_pi, kappa, candidates)),
    }
    return {name: _staged(*part) for name, part in forward.items()}


def _staged(forward: Work, module: torch.nn.Module | None, inputs: tuple[Tensor, ...]) -> tuple[Work, Work]:
    wanted = [*inputs, *(module.parameters() if module else ())]
    made = {}

    def ahead() -> None:
        made["out"] = forward()

    def back() -> None:
        out = made.pop("out")
        torch.autograd.grad(out, wanted, torch.ones_like(out))

    return ahead, back
