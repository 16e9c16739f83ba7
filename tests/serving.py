"""Catalogues and requests for the tests of serving, and brute force that shares no code with it."""

import numpy as np
import torch

from bachlib.model import mixture
from bachlib.model.methods import build
from bachlib.model.sphere import KERNELS
from bachlib.serve import Retriever
from bachlib.serve.density import LeftOut, Query

RULES = [*KERNELS, "max over heads"]


def unit(x):
    return (x / np.linalg.norm(x, axis=-1, keepdims=True)).astype(np.float32)


def query_of(heads, pi, kappa, rule) -> Query:
    if rule == "max over heads":
        return Query(heads, np.zeros(pi.shape), np.ones(pi.shape), rule)
    log_c = KERNELS[rule].log_normalizer(torch.from_numpy(kappa), heads.shape[-1]).numpy()
    with np.errstate(divide="ignore"):
        return Query(heads, np.log(pi) + log_c, kappa, rule)


def random_case(rng, n=500, B=3, k=4, d=16, rule="power-spherical", kappa=(5, 40)):
    """(items, pi, kappa, query) of requests near some of the items."""
    items = unit(rng.normal(size=(n, d)))
    heads = unit(items[rng.integers(n, size=(B, k))] + 0.3 * rng.normal(size=(B, k, d)))
    pi, kappa = rng.dirichlet(np.full(k, 0.7), size=B), rng.uniform(*kappa, size=(B, k))
    return items, pi, kappa, query_of(heads, pi, kappa, rule)


def torch_scores(query: Query, items, pi, kappa) -> np.ndarray:
    """(B, n) scores in float64 by the reference of the paper's equations."""
    heads, v = torch.from_numpy(query.heads).double(), torch.from_numpy(items).double()
    if query.rule == "max over heads":
        return (heads @ v.T).amax(1).numpy()
    log_pi = torch.from_numpy(np.log(np.maximum(pi, 1e-300)))
    return mixture.log_density(heads, v, log_pi, torch.from_numpy(kappa), KERNELS[query.rule]).numpy()


def ranked(scores, K, left_out=()):
    """The K best places of one row of scores, equal ones by place."""
    scores = scores.copy()
    scores[list(left_out)] = -np.inf
    return np.lexsort((np.arange(len(scores)), -scores))[:K]


def nothing(B: int) -> LeftOut:
    return LeftOut.of([[]] * B)


SMALL = {"d": 16, "ff": 16, "item_width": 16}


def made(world, name="p-bach", strategy="exact", k=4, **settings):
    return Retriever(perturbed(world, name, k), strategy, **settings)


def perturbed(world, name, k=4, **params):
    """A model whose weights are not the first ones: heads, π and κ differ from user to user."""
    model = build(name, world, k, **SMALL, **params)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter.std(correction=0).clamp(min=0.05)
            parameter += 0.3 * size * torch.randn_like(parameter)
    return model
