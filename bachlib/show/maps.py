"""Where items and heads stand on a map: UMAP on the sphere's cosine, kept in outputs/layouts once it is computed."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int
from scipy.ndimage import gaussian_filter

from bachlib import BachError
from bachlib.files import only_one, output_dir, whole_folder
from bachlib.reading import read_arrays
from bachlib.serve.nearest import nearest

SETTINGS = {"n_neighbors": 15, "min_dist": 0.25, "metric": "cosine"}
CELLS = 64  # of a grid over the map, on each side
MAP_PIXELS, LETTER, LINE = 520, 8, 20  # how large a map and its words are drawn, about


def layout(
    items: Float[np.ndarray, "n d"], heads: Float[np.ndarray, "m d"], seed: int = 0
) -> tuple[Float[np.ndarray, "n 2"], Float[np.ndarray, "m 2"]]:
    """Places of the items, and of heads among the items nearest to them; computed once for the same input, then read.

    Neighbours are items only: a head stands where its items are, and does not draw other heads to it.
    """
    items, heads = (np.ascontiguousarray(x, np.float32) for x in (items, heads))
    if items.ndim != 2 or len(items) < 5 or heads.ndim != 2 or heads.shape[1] != items.shape[1]:
        raise BachError(f"a map wants at least 5 items (n, d) and heads (m, d); got {items.shape} and {heads.shape}")
    key = hashlib.sha256(items.tobytes() + heads.tobytes() + repr((sorted(SETTINGS.items()), seed)).encode())
    folder = output_dir("layouts", key.hexdigest()[:16])
    with only_one(folder):
        if not folder.exists():
            places = _umap(items, heads, seed)
            with whole_folder(folder) as new:
                np.savez(new / "layout.npz", items=places[0], heads=places[1])
    found = read_arrays(folder / "layout.npz", ("items", "heads"))
    if any(found[name].shape != (len(x), 2) for name, x in (("items", items), ("heads", heads))):
        raise BachError(f"{folder / 'layout.npz'} is the map of something else; remove {folder}")
    return found["items"], found["heads"]


def regions(
    xy: Float[np.ndarray, "n 2"], kind: Int[np.ndarray, " n"], names: Sequence[str], most: int = 16, least: int = 20
) -> dict[str, Float[np.ndarray, " 2"]]:
    """Words for a map: the kinds with the most items, each where its items are dense and have few others among them.

    A word that would cover another one moves to the next best place of its kind.
    """
    count = np.bincount(kind[kind >= 0], minlength=len(names))
    shown = [g for g in np.argsort(-count, kind="stable")[:most] if count[g] >= least]
    low, high = xy.min(0), xy.max(0)
    edges = [np.linspace(low[a], max(high[a], low[a] + 1e-6), CELLS + 1) for a in (0, 1)]
    x, y = np.meshgrid(*((edge[1:] + edge[:-1]) / 2 for edge in edges), indexing="ij")
    everything, taken, placed = _smooth(xy, edges), [], {}
    pixel = (high - low).max() / MAP_PIXELS
    for g in shown:
        own = _smooth(xy[kind == g], edges)
        score = own**2 / np.maximum(everything, 1e-12)  # density × share among all items there
        wide, covers = LETTER * len(names[g]) * pixel, np.zeros_like(own, bool)
        for left, bottom, width in taken:
            covers |= (np.abs(x - left) < (wide + width) / 2) & (np.abs(y - bottom) < LINE * pixel)
        free = np.where(covers | (score < 0.3 * score.max()), 0, score)
        best = np.argmax(free if free.any() else score)
        taken.append((x.flat[best], y.flat[best], wide))
        placed[names[g]] = np.array(taken[-1][:2])
    return placed


def _smooth(xy: np.ndarray, edges: list[np.ndarray]) -> np.ndarray:
    """How dense these items are in the cells of a grid."""
    return gaussian_filter(np.histogram2d(xy[:, 0], xy[:, 1], edges)[0], 1.5)


def _umap(items: np.ndarray, heads: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    import torch
    import umap  # late: it compiles for seconds

    threads = torch.get_num_threads()  # numba's first parallel loop sets OpenMP's number, torch's too
    settings = SETTINGS | {"n_neighbors": min(SETTINGS["n_neighbors"], len(items) - 1)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a seed means one thread, that nothing can be put onto the map later
        near = (*nearest(items, heads, settings["n_neighbors"]), None)
        fitted = umap.UMAP(**settings, random_state=seed, precomputed_knn=near).fit(np.concatenate([items, heads]))
    torch.set_num_threads(threads)
    return tuple(np.split(fitted.embedding_, [len(items)]))
