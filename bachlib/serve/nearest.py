"""The nearest items of items and heads, exactly; maps and exports need them."""

import numpy as np
from jaxtyping import Float, Int

BLOCK = 2048  # rows at a time


def nearest(
    items: Float[np.ndarray, "n d"], heads: Float[np.ndarray, "h d"], m: int
) -> tuple[Int[np.ndarray, "n_plus_h m"], Float[np.ndarray, "n_plus_h m"]]:
    """Itself and the m − 1 nearest *items* of each item and head, with their distances 1 − cosine."""
    rows, found = np.concatenate([items, heads]), []
    for first in range(0, len(rows), BLOCK):
        cosine = rows[first : first + BLOCK] @ items.T
        own = np.arange(first, min(first + BLOCK, len(rows)))
        cosine[own[own < len(items)] - first, own[own < len(items)]] = -np.inf
        near = np.argpartition(-cosine, m - 2, axis=1)[:, : m - 1]
        near = np.take_along_axis(near, np.argsort(-np.take_along_axis(cosine, near, 1), axis=1), 1)
        distance = np.maximum(1 - np.take_along_axis(cosine, near, 1), 0)
        found.append((np.column_stack([own, near]), np.column_stack([np.zeros(len(own)), distance])))
    return np.concatenate([f[0] for f in found]), np.concatenate([f[1] for f in found]).astype(np.float32)
