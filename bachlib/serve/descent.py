"""Compiled loops over what a codebook keeps: the threshold algorithm over its lists, and the bounds of a hybrid."""

from __future__ import annotations

import numpy as np
from numba import njit

from bachlib.serve.kernels import BINS, insert

TRUSTED = 1e-20  # sums of densities above this are not affected by those that count as 0
STEP = 16  # entries of a prototype's list at a time


@njit(nogil=True, cache=True, fastmath={"reassoc", "contract", "nsz"})
def dot(row, weight):
    total = np.float32(0.0)
    for r in range(len(row)):
        total += row[r] * weight[r]
    return total


@njit(nogil=True, cache=True)
def descend(lists, density, weight, K, left_out, scores, places, budget, off):
    """The threshold algorithm of one user: fills scores and places with the items it saw; returns (count, proved)."""
    k, length = lists.shape
    seen = np.zeros(len(density), np.uint8)
    for j in range(len(left_out)):
        seen[left_out[j]] = 1
    depth = np.zeros(k, np.int64)
    level, below = np.empty(k), np.empty(k)  # the most an unseen item can get from a list; after the next step
    for r in range(k):
        level[r] = weight[r] * density[lists[r, 0], r]
        below[r] = weight[r] * density[lists[r, min(STEP, length - 1)], r]
    bound = level.sum()
    top, which = np.full(K, -np.inf), np.zeros(K, np.int64)
    count = 0
    while count < budget:
        most, r = -1.0, -1
        for s in range(k):
            fall = level[s] - below[s] + 1e-3 * level[s]
            if depth[s] + STEP < length and fall > most:
                most, r = fall, s
        if r < 0 or (count > budget // 2 and bound > 2.0 * top[K - 1]):  # the lists end, or the bound falls too slowly
            return count, False
        for at in range(depth[r], depth[r] + STEP):
            i = lists[r, at]
            if seen[i] == 0:
                seen[i] = 1
                score = dot(density[i], weight)
                scores[count], places[count] = score, i
                count += 1
                if score > top[K - 1]:
                    insert(score, i, top, which)
        depth[r] += STEP
        level[r] = below[r]
        bound = level.sum()  # a new sum: small levels would be lost in differences of large ones
        below[r] = weight[r] * density[lists[r, min(depth[r] + STEP, length - 1)], r]
        if top[K - 1] > TRUSTED and top[K - 1] * (1.0 - 2 * off) > bound * (1.0 + 2 * off):
            return count, True
    return count, False


@njit(nogil=True, cache=True)
def bounds(t, table, shared, out):
    """out_i: a bound on the sum over heads: `shared`, and the tables of the other heads at their cosines t (n, k)."""
    n, k = t.shape
    for i in range(n):
        total = shared[i]
        for r in range(k):
            place = int((t[i, r] + np.float32(1.0)) * np.float32(0.5 * BINS))
            total += table[r, min(max(place, 0), BINS + 1)]
        out[i] = total
