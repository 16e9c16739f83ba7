"""Ranks of items under the mixture density (eq. 23) or the max over heads (eq. 8), counted in a compiled loop.

A rank is one plus the number of items with a higher score, so scores need not be kept, and most need not be exact. The
cosines of a chunk are a float32 product that stays in the cache; its compiled loop uses the widest vectors of this
machine. Their densities follow from short polynomials, with a bound on the error. Only items whose density is within
this bound of a target's are scored again, in float64, by the operations of serving (`serve.density`) in the same order.
So the ranks are those of the exact scores, ties by number included.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from jaxtyping import Float, Int
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

EPS = float(np.finfo(np.float64).eps)
CHUNK = 256  # items whose cosines and densities are in the cache
ROWS, LANES = (8, 32) if binding.get_host_cpu_features().get("avx512f") else (4, 16)  # cosines in registers
FLOOR, CEILING = -40.0, 120.0  # log₂ density of the lowest target; what is above the ceiling is scored exactly
F4, I4, I8 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _of_bits(name: str, build):
    """A function of one float32 that works on its bits."""

    def typed(typing_context, x):
        return types.float32(types.float32), lambda context, builder, signature, given: build(builder, given[0])

    typed.__name__ = name
    return intrinsic(typed)


def _power_of_two(b, x):
    return b.ashr(b.sub(b.bitcast(x, I4), ir.Constant(I4, 0x3F3504F3)), ir.Constant(I4, 23))


exponent = _of_bits("exponent", lambda b, x: b.sitofp(_power_of_two(b, x), F4))  # x = mantissa · 2^exponent,
mantissa = _of_bits(  # between √½ and √2
    "mantissa", lambda b, x: b.bitcast(b.sub(b.bitcast(x, I4), b.shl(_power_of_two(b, x), ir.Constant(I4, 23))), F4)
)
scale = _of_bits(  # 2^n of the float n + MAGIC, whose last bits are the whole number n
    "scale",
    lambda b, x: b.bitcast(b.add(b.shl(b.bitcast(x, I4), ir.Constant(I4, 23)), ir.Constant(I4, 0x3F800000)), F4),
)
f4 = np.float32
ONE, LEAST, LOW, HIGH, MAGIC = f4(1), f4(2.0**-23), f4(-126), f4(127), f4(1.5 * 2**23)
# log₂(1 + y) = y Σ L_j y^j within 6e-7 for 1 + y in √½ … √2; 2^y = Σ E_j y^j within a share of 4e-6 for y in −½ … ½
L0, L1, L2, L3, L4, L5, L6 = map(f4, (
    1.4426964, -0.72136404, 0.48062915, -0.35935065, 0.2956336, -0.26950627, 0.17212873,
))  # fmt: skip
E0, E1, E2, E3, E4 = map(f4, (1.0000001, 0.693121, 0.24022107, 0.055922036, 0.009676037))


@intrinsic
def tile(typing_context, rows, first, panel, at, d, out):
    """out[r, at + i] = Σ_j rows[first + r, j] panel[j, at + i] for r < ROWS and i < LANES, added up in registers."""
    vector, first_lane = ir.VectorType(F4, LANES), ir.Constant(ir.VectorType(I4, LANES), [0] * LANES)

    def build(context, b, signature, given):
        row, column, result = (make_array(signature.args[n])(context, b, given[n]).data for n in (0, 2, 5))
        row, column, result = b.gep(row, [b.mul(given[1], given[4])]), *(b.gep(x, [given[3]]) for x in (column, result))
        sums = [cgutils.alloca_once_value(b, ir.Constant(vector, [0.0] * LANES)) for _ in range(ROWS)]
        with cgutils.for_range(b, given[4]) as loop:
            at = b.gep(column, [b.mul(loop.index, I8(CHUNK))])
            x = b.load(b.bitcast(at, vector.as_pointer()), align=4)
            for r in range(ROWS):
                head = b.load(b.gep(row, [b.add(loop.index, b.mul(given[4], I8(r)))]))
                head = b.insert_element(ir.Constant(vector, ir.Undefined), head, I4(0))
                head = b.shuffle_vector(head, head, first_lane)
                fused = b.fmul(head, x, flags=("contract",))
                b.store(b.fadd(b.load(sums[r]), fused, flags=("contract",)), sums[r])
        for r in range(ROWS):
            at = b.bitcast(b.gep(result, [I8(r * CHUNK)]), vector.as_pointer())
            b.store(b.load(sums[r]), at, align=4)
        return context.get_dummy_value()

    return types.void(rows, first, panel, at, d, out), build


@njit(nogil=True, cache=True)
def cosines(rows, first, panel, out):
    """out (R, CHUNK): those of R rows (a multiple of ROWS) from the first and a chunk of items, panel (d, CHUNK)."""
    for r in range(0, len(out), ROWS):
        for i in range(0, CHUNK, LANES):
            tile(rows, first + r, panel, i, len(panel), out[r:])


def in_chunks(items: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "c d CHUNK"]:
    """The items as columns, CHUNK at a time, the last with zeros behind."""
    n, d = items.shape
    made = np.zeros((-(-n // CHUNK), CHUNK, d), np.float32)
    made.reshape(-1, d)[:n] = items
    return np.ascontiguousarray(made.transpose(0, 2, 1))


@njit(nogil=True, cache=True, fastmath={"contract"}, inline="always")
def power_of_two(x):
    x = x if x > LOW else LOW
    x = x if x < HIGH else HIGH
    n = x + MAGIC
    y = x - (n - MAGIC)
    return scale(n) * (E0 + y * (E1 + y * (E2 + y * (E3 + y * E4))))


@njit(nogil=True, cache=True, fastmath={"contract"})
def densities(t, weight, bits, power, soft, out):
    """out_i = Σ_r 2^(weight_r + bits_r x_ri) with x = log₂ (1 + t) or t, roughly; or the largest t. t (k, b) float32.

    The loops run over contiguous rows, or they would not be compiled to vector instructions.
    """
    out[:] = f4(0) if soft else f4(-np.inf)
    for r in range(len(t)):
        row, w, slope = t[r][: len(out)], weight[r], bits[r]
        if not soft:
            for i in range(len(out)):
                out[i] = row[i] if row[i] > out[i] else out[i]
        elif power:
            for i in range(len(out)):
                x = ONE + row[i]
                x = x if x > LEAST else LEAST
                y = mantissa(x) - ONE
                x = exponent(x) + y * (L0 + y * (L1 + y * (L2 + y * (L3 + y * (L4 + y * (L5 + y * L6))))))
                out[i] += power_of_two(w + slope * x)
        else:
            for i in range(len(out)):
                out[i] += power_of_two(w + slope * row[i])


@njit(nogil=True, cache=True)
def tally(values, low, high):
    """(number above `high`, number at least `low`)."""
    above, possible = 0, 0
    for i in range(len(values)):
        above += 1 if values[i] > high else 0
        possible += 1 if values[i] >= low else 0
    return above, possible


@njit(nogil=True, cache=True)
def exactly(v, columns, log_weight, kappa, power, soft, terms):
    """The score of one item in float64, as in serving. v (d,), columns (d, k)."""
    d, k = columns.shape
    terms[:] = 0.0
    for j in range(d):
        x = np.float64(v[j])
        for r in range(k):
            terms[r] += x * columns[j, r]
    for r in range(k):
        t = math.log(max(1.0 + terms[r], EPS)) if power else terms[r]
        terms[r] = log_weight[r] + (kappa[r] * t if kappa[r] > 0.0 else 0.0)
    top = terms.max()
    if not soft or top == -np.inf:
        return top
    total = 0.0
    for r in range(k):
        total += math.exp(terms[r] - top)
    return top + math.log(total)


@njit(nogil=True, cache=True)
def targets_scored(items, columns, log_weight, kappa, power, soft, targets, left_out, starts, own):
    """own (B, m): the exact scores of the targets, −∞ for one that is left out."""
    terms = np.empty(columns.shape[2])
    for u in range(len(targets)):
        out = left_out[starts[u] : starts[u + 1]]
        for m in range(targets.shape[1]):
            at = np.searchsorted(out, targets[u, m])
            hidden = at < len(out) and out[at] == targets[u, m]
            score = exactly(items[targets[u, m]], columns[u], log_weight[u], kappa[u], power, soft, terms)
            own[u, m] = -np.inf if hidden else score


@njit(nogil=True, cache=True)
def count(
    rows, chunks, items, power, soft, left_out, columns, log_weight, kappa, weight, bits, low, high, targets, own, at,
    last, found,
):  # fmt: skip
    """Add to `found` (B, m) how many items rank before each target. rows (B k and some, d): the heads."""
    B, k = log_weight.shape
    group = 1  # of users, whose heads fill whole tiles
    while group * k % ROWS:
        group += 1
    t, values = np.empty((group * k, CHUNK), np.float32), np.empty(CHUNK, np.float32)
    again, terms = np.empty(CHUNK), np.empty(k)
    for c in range(len(chunks)):
        begin, n = c * CHUNK, min(CHUNK, len(items) - c * CHUNK)
        for u in range(B):
            if u % group == 0:
                cosines(rows, u * k, chunks[c], t)
            densities(t[u % group * k :][:k], weight[u], bits[u], power, soft, values[:n])
            while at[u] < last[u] and left_out[at[u]] < begin + n:
                values[left_out[at[u]] - begin] = -np.inf
                at[u] += 1
            fresh = True
            for m in range(targets.shape[1]):
                above, possible = tally(values[:n], low[u, m], high[u, m])
                found[u, m] += above
                if possible == above:
                    continue
                if fresh:
                    again[:], fresh = np.nan, False
                for i in range(n):
                    if values[i] >= low[u, m] and not values[i] > high[u, m]:
                        item, possible = begin + i, possible - 1
                        if np.isnan(again[i]):
                            at_item = (columns[u], log_weight[u], kappa[u], power, soft, terms)
                            again[i] = -np.inf if values[i] == -np.inf else exactly(items[item], *at_item)
                        found[u, m] += again[i] > own[u, m] or (again[i] == own[u, m] and item < targets[u, m])
                        if possible == above:
                            break


def counted_ranks(
    heads: Float[torch.Tensor, "B k d"],
    items: Float[torch.Tensor, "n d"],
    log_weight: Float[np.ndarray, "B k"],
    kappa: Float[np.ndarray, "B k"],
    rule: str,
    targets: Int[np.ndarray, "B m"],
    left_out: Int[np.ndarray, " e"],
    starts: Int[np.ndarray, " B_plus_1"],
) -> Int[np.ndarray, "B m"]:
    """The rank of each target among all items but left_out[starts[u]:starts[u + 1]], which ascend; they rank last.

    `rule` is the name of a kernel or "max over heads", and `log_weight` is a_r = log π_r + log C_d(κ_r).
    """
    (B, k, d), heads, items = heads.shape, heads.numpy(), items.numpy()
    power, soft = rule == "power-spherical", rule != "max over heads"
    columns = np.ascontiguousarray(heads.transpose(0, 2, 1), np.float64)
    own, found = np.empty(targets.shape), np.ones(targets.shape, np.int64)
    targets_scored(items, columns, log_weight, kappa, power, soft, targets, left_out, starts, own)
    lowest = np.where(np.isfinite(own), own, np.inf).min(1, keepdims=True)
    weight = (log_weight - np.where(np.isfinite(lowest), lowest, 0.0)) / math.log(2) + FLOOR
    bits = kappa if power else kappa / math.log(2)
    low, high = between(own, lowest, weight, kappa, d, power, soft)
    with np.errstate(over="ignore"):
        single = [x.astype(np.float32) for x in (weight, bits, low, high)]
    rows = np.zeros(((B + ROWS) * k, d), np.float32)  # the last group reads on
    rows[: B * k], chunks = heads.reshape(-1, d), in_chunks(items)
    of_users = (columns, log_weight, kappa, *single, targets, own, starts[:-1].copy(), starts[1:], found)

    def part(a: int, b: int) -> None:
        count(rows[a * k :], chunks, items, power, soft, left_out, *(x[a:b] for x in of_users))

    edges = np.linspace(0, B, min(torch.get_num_threads(), B) + 1).astype(int)
    with ThreadPoolExecutor(len(edges) - 1) as pool:
        list(pool.map(part, edges[:-1], edges[1:]))
    return found


def between(own, lowest, weight, kappa, d, power, soft):
    """(low, high) for every target, as `densities` gives them: an item below `low` or above `high` is so exactly.

    A cosine is off by `slack` at most, which includes the rounding of its logarithm. Where 1 + t ≥ ½, a density is then
    off by a share of 2 κ · slack. Where 1 + t < ½, it is small, and off by slack · κ ½^(κ−1) times its weight, or for
    κ < 1 by slack^κ.
    """
    slack = (d + 4) * 2.0**-24 * 1.01 + 2.0**-20  # of a float32 inner product of unit vectors, and 1e-6
    if not soft:
        low, high = own - slack, own + slack
    else:
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            share = 1.1 * ((2 if power else 1) * kappa * slack + np.abs(weight) * 2.0**-22).max(1, keepdims=True)
            share += kappa.shape[1] * 2.0**-22 + 1e-5
            small = np.where(  # log₂
                kappa < 1, np.log2(np.minimum(slack**kappa, 36 * kappa)), np.log2(slack * kappa) + 1 - kappa
            )
            logs = np.where(kappa > 0, weight + small, -np.inf) if power else np.full_like(kappa, -np.inf)
            apart = 1.1 * np.exp2(logs).sum(1, keepdims=True) + kappa.shape[1] * 2.0**-125
            bits = (own - lowest) / math.log(2) + FLOOR
            at = np.exp2(np.minimum(bits, CEILING))
            low = at * np.exp(-share) - apart
            high = np.where(bits < CEILING, at * np.exp(share) + apart, np.inf)
    hidden = np.isneginf(own)  # only items that are left out have −∞, too
    return np.where(hidden, -np.inf, low), np.where(hidden, -np.inf, high)
