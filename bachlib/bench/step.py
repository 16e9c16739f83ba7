"""The whole training step of p-BACH: its time against the bare matrix products of that step, and where it goes.

Settings: d = 64, history of 50, batch of 512, 2,048 + 512 candidates, about 20,000 items, one thread, CPU seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import embedding, normalize

from bachlib.bench.measure import cpu_seconds, judged, world
from bachlib.data import Dataset, Windows
from bachlib.model import mixture, onepass
from bachlib.model.candidates import Weights, each_once
from bachlib.model.methods import build
from bachlib.model.products import times
from bachlib.model.twotower import TwoTower
from bachlib.train.loop import keep_freed_memory

B, NEGATIVES = 512, 2048
SIZES = {"n_users": 3_000, "n_items": 20_050}  # after preparation just below 20,000 items
Work = Callable[[], Any]


class Drawn:
    """One batch of a data set with its negatives; the distinct candidates and items of its step."""

    def __init__(self, dataset: Dataset):
        batch = next(iter(Windows(dataset, B)))
        self.history, self.positive = torch.from_numpy(batch.history), torch.from_numpy(batch.positive)
        self.negatives = torch.randint(dataset.n_items, (NEGATIVES,))
        drawn = torch.cat([self.positive, self.negatives])
        self.candidates, place = each_once(drawn, dataset.n_items)
        self.own, self.weight = place[:B], torch.bincount(place).float()
        self.items = torch.cat([self.history.clamp(min=0).flatten(), drawn]).unique()


def bench_products(k: int, times: int = 7) -> dict[str, Any]:
    """A step, forward and backward, against its bare matrix products; the optimiser beside it."""
    table = where_a_step_goes((k,), times).set_index("part")
    whole, optimiser = table.loc["whole step"], table.loc["optimiser", "ms"]
    ratios = {"ratio": whole.ms / whole.bare_ms, "ratio_to_wide": whole.ms / whole.wide_ms}
    found = {"ms": whole.ms, "bare_ms": whole.bare_ms, "wide_ms": whole.wide_ms, "optimiser_ms": optimiser}
    speed = {"windows_per_s": 1000 * B / (whole.ms + optimiser)}
    found = {key: float(value) for key, value in (ratios | found | speed).items()}
    found["parts"] = table["ms"].drop("whole step").to_dict()
    return judged(f"products of a step, k = {k}", found, {"ratio": 1.5})


def where_a_step_goes(ks: tuple[int, ...] = (8, 32), times: int = 7) -> pd.DataFrame:
    """Medians of CPU milliseconds by k and part, forward, backward and together, beside the bare products of the part.

    `bare_ms` are torch's products, `wide_ms` those with all vector instructions (`model.products`), which the step uses
    where it can. The parts are measured one by one; "whole step" is measured as a whole, without the optimiser.
    """
    torch.set_num_threads(1)
    keep_freed_memory()
    dataset, rows = world(**SIZES), []
    for k in ks:
        model, drawn = build("p-bach", dataset, k).train(), Drawn(dataset)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
        loss = partial(model.loss, drawn.history, drawn.positive, drawn.negatives)
        parts = parts_of_a_step(model, drawn) | {"whole step": _staged(loss, model, ())}
        parts["optimiser"] = (optimizer.step, lambda: None)
        bare = bare_products(model, drawn)
        works = {(name, kind): work for name, pair in parts.items() for kind, work in zip("fb", pair, strict=True)}
        works |= {(name, kind): work for name, pair in bare.items() for kind, work in zip("pw", pair, strict=True)}
        rounds = [{key: 1000 * cpu_seconds(work) for key, work in works.items()} for _ in range(times + 1)][1:]
        ms = {key: median(one[key] for one in rounds) for key in works}
        for kind in "pw":
            ms["whole step", kind] = sum(ms[name, kind] for name in bare)
        for name in parts:
            ahead, back, plain, wide = (ms.get((name, kind), 0.0) for kind in "fbpw")
            rows.append((k, name, ahead, back, ahead + back, plain, wide))
    return pd.DataFrame(rows, columns=["k", "part", "forward_ms", "backward_ms", "ms", "bare_ms", "wide_ms"])


def bare_products(model: TwoTower, drawn: Drawn) -> dict[str, tuple[Work, Work]]:
    """The matrix products of a step, forward and backward, by part, of torch and wide: shapes and nothing between."""
    d, k, n, item = model.d, model.k, drawn.history.shape[1], model.item_tower.residual[0].out_features
    wide, C, tower_of = 4 * d, len(drawn.candidates), model.encoder

    def tower(k: int) -> Iterator[tuple[Work, Work]]:
        a, ff = tower_of.heads, tower_of.layer.linear1.out_features
        yield _product(B * n, d, a * k)  # scores
        yield _product(a * k, n + k, d, B)  # pooled
        yield _product(B * k, d, d // a, a)  # values
        yield from (_product(B * k, *shape) for shape in ((d, d), (d, ff), (ff, d)))

    block = onepass.rows_per_block(k * C) * k
    parts = {
        "item tower": [_product(len(drawn.items), d, item, to_input=False), _product(len(drawn.items), item, d)],
        "encoder": [*tower(k)],
        "gate": [*tower(1), _product(B, d, k)],
        "κ-net": [_product(B * k, d, wide, to_input=False), _product(B * k, wide, wide), _product(B * k, wide, 1)],
        "loss": [_product(len(rows), d, C) for rows in torch.arange(B * k).split(block)],
    }
    return {
        name: tuple(lambda works=works: [work() for work in works] for works in zip(*pairs, strict=True))
        for name, pairs in parts.items()
    }


def _product(m: int, inner: int, n: int, many: int = 1, to_input: bool = True) -> tuple[Work, Work]:
    """`many` products (m, inner)·(inner, n) and, for each, the two of its backward pass: torch's, and wide ones."""
    shapes = [(m, inner), (inner, n), (m, n)]
    x, weight, y = (torch.randn(*((many, *shape) if many > 1 else shape)) for shape in shapes)
    to_x, to_weight, product = torch.empty_like(x), torch.empty_like(weight), torch.bmm if many > 1 else torch.mm

    def bare() -> None:
        product(x, weight, out=y)
        product(x.mT, y, out=to_weight)
        if to_input:
            product(y, weight.mT, out=to_x)

    def wide() -> None:
        times(x, weight.T)
        times(x.T, y.T)
        if to_input:
            times(y, weight)

    return bare, bare if many > 1 else wide


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
        for parameter, gradient in zip(wanted, torch.autograd.grad(out, wanted, torch.ones_like(out)), strict=True):
            parameter.grad = gradient

    return ahead, back
