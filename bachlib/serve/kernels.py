"""All compiled loops of the score and the scan. The score is computed by the same operations in the same order
everywhere. They share a file because numba does not notice when a function of another file changes."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import binding, ir
from numba import njit, types
from numba.core import cgutils, config
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

EPS = float(np.finfo(np.float64).eps)
BINS = 256  # of a head's table
CHUNK, SMALL = 512, 1 << 14  # items between two updates of θ; cosines at a time in `scan`
VNNI = binding.get_host_cpu_features().get("avx512vnni", False) and not (config.CPU_NAME or config.CPU_FEATURES)
HEADS, ITEMS = 8, 12 if binding.get_host_cpu_features().get("avx512f") else 6  # whose cosines are in registers


def order(*places):
    """For `shuffle_vector`: which places of a vector the new one takes."""
    return ir.Constant(ir.VectorType(ir.IntType(32), len(places)), places)


@intrinsic
def tile(typing_context, items, at, columns, group, d, out, place, width):
    """out[place + i width + r] = Σ_j items[at + i d + j] u_rj for i < ITEMS and r < HEADS, in registers: two dimensions
    of all heads are one vector, columns[group + 2 HEADS (j // 2) :], and each pair of an item's numbers is repeated."""
    f4, i8, lanes = ir.FloatType(), ir.IntType(64), 2 * HEADS
    vector, pair, half = (ir.VectorType(f4, n) for n in (lanes, 2, HEADS))

    def build(context, b, signature, given):
        item, column, result = (make_array(signature.args[n])(context, b, given[n]).data for n in (0, 2, 5))
        item, column, result = b.gep(item, [given[1]]), b.gep(column, [given[3]]), b.gep(result, [given[6]])
        sums = [cgutils.alloca_once_value(b, ir.Constant(vector, [0.0] * lanes)) for _ in range(ITEMS)]
        with cgutils.for_range(b, b.udiv(given[4], i8(2))) as loop:
            at = b.gep(column, [b.mul(loop.index, i8(lanes))])
            heads = b.load(b.bitcast(at, vector.as_pointer()), align=4)
            for i in range(ITEMS):
                at = b.gep(item, [b.add(b.mul(loop.index, i8(2)), b.mul(given[4], i8(i)))])
                two = b.load(b.bitcast(at, pair.as_pointer()), align=4)
                two = b.fmul(b.shuffle_vector(two, two, order(*[0, 1] * HEADS)), heads, flags=("contract",))
                b.store(b.fadd(b.load(sums[i]), two, flags=("contract",)), sums[i])
        for i in range(ITEMS):
            x = b.load(sums[i])
            even, odd = (b.shuffle_vector(x, x, order(*range(first, lanes, 2))) for first in (0, 1))
            at = b.bitcast(b.gep(result, [b.mul(given[7], i8(i))]), half.as_pointer())
            b.store(b.fadd(even, odd), at, align=4)
        return context.get_dummy_value()

    return types.void(items, at, columns, group, d, out, place, width), build


@njit(nogil=True, cache=True)
def product(items, columns, out):
    """out (b, R) = items (b, d) × heads, which are `columns` (R / HEADS, d HEADS): see `tile`. b ≥ ITEMS."""
    (b, d), width = items.shape, out.shape[1]
    for at in range(0, b, ITEMS):
        i = min(at, b - ITEMS)  # the last items once more
        for g in range(len(columns)):
            tile(items, i * d, columns, g * d * HEADS, d, out, i * width + g * HEADS, width)


@intrinsic
def coarse_tile(typing_context, codes, at, heads, group, d, start, scale, unit, out, place, width):
    """`tile` of whole numbers: four dimensions of an item are multiplied and added up at a time (AVX512-VNNI), which
    takes unsigned numbers on one side, so 128 is added to the codes of items; `start` takes 128 Σ_j u_rj off again."""
    i8, i32, i64, f4, lanes = (*map(ir.IntType, (8, 32, 64)), ir.FloatType(), 2 * HEADS)
    sums_of, quads, half, result = (ir.VectorType(*of) for of in ((i32, lanes), (i8, 4 * lanes), (i64, 1), (f4, HEADS)))

    def build(context, b, signature, given):
        def pointer(argument, place, of):
            data = make_array(signature.args[argument])(context, b, given[argument]).data
            return b.bitcast(b.gep(data, [place]), of.as_pointer())

        dot = ir.FunctionType(sums_of, [sums_of, quads, quads])
        dot = cgutils.get_or_insert_function(b.module, dot, "llvm.x86.avx512.vpdpbusd.512")
        first = b.mul(given[3], i64(HEADS))  # of this group's heads
        begin = b.load(pointer(5, b.mul(first, i64(2)), sums_of), align=4)
        sums = [cgutils.alloca_once_value(b, begin) for _ in range(ITEMS)]
        with cgutils.for_range(b, b.udiv(given[4], i64(8))) as loop:
            j = b.mul(loop.index, i64(8))
            of_heads = b.load(pointer(2, b.add(b.mul(first, given[4]), b.mul(j, i64(HEADS))), quads), align=1)
            for i, total in enumerate(sums):
                place = b.add(b.mul(b.add(given[1], i64(i)), given[4]), j)
                eight = b.load(pointer(0, place, half), align=1)
                of_item = b.bitcast(b.shuffle_vector(eight, eight, order(*[0] * HEADS)), quads)
                b.store(b.call(dot, [b.load(total), of_item, of_heads]), total)
        units = b.load(pointer(7, first, result), align=4)
        for i, total in enumerate(sums):
            x = b.load(total)
            even, odd = (b.shuffle_vector(x, x, order(*range(side, lanes, 2))) for side in (0, 1))
            one = b.load(pointer(6, b.add(given[1], i64(i)), ir.VectorType(f4, 1)), align=4)
            scales = b.shuffle_vector(one, one, order(*[0] * HEADS))
            cosines = b.fmul(b.fmul(b.sitofp(b.add(even, odd), result), units), scales)
            b.store(cosines, pointer(8, b.add(given[9], b.mul(given[10], i64(i))), result), align=4)
        return context.get_dummy_value()

    return types.void(codes, at, heads, group, d, start, scale, unit, out, place, width), build


@njit(nogil=True, cache=True)
def coarse_product(codes, scale, heads, start, unit, out):
    """`product` of items and heads that are whole numbers times a scale and a unit: see `coarse_tile`. b ≥ ITEMS."""
    (b, d), width = codes.shape, out.shape[1]
    for at in range(0, b, ITEMS):
        i = min(at, b - ITEMS)
        for g in range(len(heads)):
            coarse_tile(codes, i, heads, g, d, start, scale, unit, out, i * width + g * HEADS, width)


@njit(nogil=True, cache=True)
def cosines(v, columns, out):
    """out_r = ⟨u_r, v⟩, added up over the dimensions one after the other. v (d,) float32, columns (d, k) float64."""
    d, k = columns.shape
    if k == 8:  # the usual number: sums in registers take half the time
        a0 = a1 = a2 = a3 = a4 = a5 = a6 = a7 = 0.0
        for j in range(d):
            x = np.float64(v[j])
            a0 += x * columns[j, 0]
            a1 += x * columns[j, 1]
            a2 += x * columns[j, 2]
            a3 += x * columns[j, 3]
            a4 += x * columns[j, 4]
            a5 += x * columns[j, 5]
            a6 += x * columns[j, 6]
            a7 += x * columns[j, 7]
        out[0], out[1], out[2], out[3], out[4], out[5], out[6], out[7] = a0, a1, a2, a3, a4, a5, a6, a7
        return
    out[:] = 0.0
    for j in range(d):
        x = np.float64(v[j])
        for r in range(k):
            out[r] += x * columns[j, r]


@njit(nogil=True, cache=True)
def item_terms(v, columns, log_weight, kappa, power, out):
    """out_r = a_r + log ω_κ(⟨u_r, v⟩)."""
    cosines(v, columns, out)
    for r in range(len(out)):
        t = out[r]
        if power:
            t = math.log(max(1.0 + t, EPS))  # 1 + t is as good as t itself: both come from sums of float64
        out[r] = log_weight[r] + (kappa[r] * t if kappa[r] > 0.0 else 0.0)


@njit(nogil=True, cache=True)
def combined(terms, soft):
    """The score of an item from its terms: log Σ exp, or the largest."""
    top = terms[0]
    for r in range(1, len(terms)):
        top = max(top, terms[r])
    if not soft or top == -np.inf:
        return top
    total = 0.0
    for r in range(len(terms)):
        total += math.exp(terms[r] - top)
    return top + math.log(total)


@njit(nogil=True, cache=True)
def is_left_out(i, left_out, begin, end):
    """Is i among left_out[begin:end], which ascends?"""
    if begin == end:
        return False
    at = begin + np.searchsorted(left_out[begin:end], i)
    return at < end and left_out[at] == i


@njit(nogil=True, cache=True)
def holds(found, i):
    there = 0
    for place in range(len(found)):
        there += found[place] == i
    return there > 0


@njit(nogil=True, cache=True)
def insert(score, i, scores, found):
    """Put a new item into a sorted list of the best (K,), unless all are better. Ties: by place."""
    at = len(scores)
    while at > 0 and (score > scores[at - 1] or (score == scores[at - 1] and i < found[at - 1])):
        at -= 1
        if at + 1 < len(scores):
            scores[at + 1], found[at + 1] = scores[at], found[at]
    if at < len(scores):
        scores[at], found[at] = score, i


@njit(nogil=True, cache=True)
def rescore(users, places, items, columns, log_weight, kappa, power, soft, left_out, starts, scores, found):
    """Score items (users[j], places[j]); each user's best, except those left out, stay in `scores`, `found` (B, K).

    Returns the scores (m,): ∞ for an item that is among the best already.
    """
    terms, out = np.empty(columns.shape[2]), np.full(len(places), np.inf)
    for j in range(len(places)):
        u, i = users[j], places[j]
        if not holds(found[u], i):
            item_terms(items[i], columns[u], log_weight[u], kappa[u], power, terms)
            out[j] = combined(terms, soft)
            if not is_left_out(i, left_out, starts[u], starts[u + 1]):
                insert(out[j], i, scores[u], found[u])
    return out


@njit(nogil=True, cache=True)
def shares(found, items, columns, log_weight, kappa, power, soft, out):
    """out (B, K, k): the share of an item's score that each head gives: γ_r (eq. 19), or 1 for the best head."""
    terms = np.empty(out.shape[2])
    for u in range(len(found)):
        for place in range(found.shape[1]):
            item_terms(items[found[u, place]], columns[u], log_weight[u], kappa[u], power, terms)
            if soft:
                out[u, place] = np.exp(terms - combined(terms, soft))
            else:
                out[u, place] = 0.0
                out[u, place, np.argmax(terms)] = 1.0


@njit(nogil=True, cache=True, fastmath=True)
def roughly(t, base, slope, out):
    """out (B, b): the largest of base_r + slope_r t_r."""
    b, B, k = t.shape
    for i in range(b):
        for u in range(B):
            top = base[u, 0] + slope[u, 0] * t[i, u, 0]
            for r in range(1, k):
                top = max(top, base[u, r] + slope[u, r] * t[i, u, r])
            out[u, i] = top


@njit(nogil=True, cache=True)
def fill_tables(log_weight, kappa, power, shift, slack, table):
    """exp(term_r − shift) at the upper edge of each bin of the cosine, an upper bound for the items in the bin."""
    B, k, n = table.shape
    for j in range(n):
        edge = min(2.0 * (j + 1) / BINS - 1.0, 1.0) + slack + 1e-5
        log_omega = math.log1p(edge) if power else edge
        for u in range(B):
            for r in range(k):
                term = log_weight[u, r] - shift[u] + kappa[u, r] * log_omega
                table[u, r, j] = math.exp(min(term, 80.0)) * (1.0 + 1e-6) + 1e-30


@njit(nogil=True, cache=True)
def thresholds(theta, log_weight, kappa, power, soft, peak, order, slack, cut):
    """cut_r, a little low: an item whose float32 cosines are all below cannot reach θ. The parts are equal, except for
    heads that cannot reach theirs even at cosine 1 (`peak`): they give all they can, and the others share the rest."""
    k = len(log_weight)
    if not soft or theta == -np.inf:
        cut[:] = theta - slack - 1e-6
        return
    theta -= 1e-9 * (1.0 + abs(theta))  # a tie with θ may enter by its number
    below, log_part = 0.0, np.inf
    for place in range(k):
        most = math.exp(min(peak[order[place]] - theta, 700.0))
        part = (1.0 - below) / (k - place)
        if most > part:
            log_part = math.log(part)
            break
        below += most
    for r in range(k):
        needed = theta + log_part - log_weight[r]
        if kappa[r] > 0.0:
            t = needed / kappa[r]
            if power:
                t = math.expm1(min(t, 2.0))
        else:
            t = np.inf if needed > 0.0 else -np.inf
        cut[r] = t - slack - 1e-6


@njit(nogil=True, cache=True)
def collect(t, cut, hits):
    """Fill hits with the (item, user) whose cosines t (b, B, k) reach cut_r for some head; returns how many."""
    b, B, k = t.shape
    count = 0
    for i in range(b):
        for u in range(B):
            passes = 0
            for r in range(k):
                passes += t[i, u, r] >= cut[u, r]
            if passes > 0:
                hits[count, 0], hits[count, 1] = i, u
                count += 1
    return count


@njit(nogil=True, cache=True)
def sift(
    t, begin, items, columns, log_weight, kappa, power, soft, peak, order, slack, table, shift, left_out, starts,
    scores, found,
):  # fmt: skip
    """All three filters for a block of cosines t (b, B, k) whose first item is `begin`. Returns the number scored."""
    b, B, k = t.shape
    K = scores.shape[1]
    n_scored = 0
    terms, cut, hits = np.empty(k), np.empty((B, k), np.float32), np.empty((CHUNK * B, 2), np.int64)
    theta, enough = np.full(B, np.nan), np.empty(B)
    for first in range(0, b, CHUNK):
        for u in range(B):
            if theta[u] != scores[u, K - 1]:
                theta[u] = scores[u, K - 1]
                thresholds(theta[u], log_weight[u], kappa[u], power, soft, peak[u], order[u], slack, cut[u])
                enough[u] = math.exp(min(theta[u] - shift[u], 60.0)) * (1.0 - 1e-5)  # the table stops at 80
        for hit in range(collect(t[first : first + CHUNK], cut, hits)):
            i, u = first + hits[hit, 0], hits[hit, 1]
            if soft:
                total = 0.0
                for r in range(k):
                    place = int((t[i, u, r] + np.float32(1.0)) * np.float32(0.5 * BINS))
                    total += table[u, r, min(max(place, 0), BINS + 1)]
                if total < enough[u]:
                    continue
            if is_left_out(begin + i, left_out, starts[u], starts[u + 1]) or holds(found[u], begin + i):
                continue
            item_terms(items[begin + i], columns[u], log_weight[u], kappa[u], power, terms)
            insert(combined(terms, soft), begin + i, scores[u], found[u])
            n_scored += 1
    return n_scored


@njit(nogil=True, cache=True)
def scan(
    columns32, coarse, begin, items, columns, log_weight, kappa, power, soft, peak, order, slack, table, shift,
    left_out, starts, scores, found,
):  # fmt: skip
    """`product` and `sift` from item `begin` on, in small blocks. `coarse`: codes, scale, heads, start and unit for
    `coarse_product`; without codes it is the product of the items and the heads `columns32`."""
    n, (B, k), (codes, scale, heads, start, unit) = len(items), kappa.shape, coarse
    most = max(CHUNK, SMALL // (B * k))
    room = np.empty((most + ITEMS, B * k), np.float32)
    n_scored = 0
    while begin < n:
        end = begin + most if begin + most + ITEMS <= n else n
        t = room[: end - begin]
        if len(codes):
            coarse_product(codes[begin:end], scale[begin:end], heads, start, unit, t)
        else:
            product(items[begin:end], columns32, t)
        n_scored += sift(
            t.reshape(end - begin, B, k), begin, items, columns, log_weight, kappa, power, soft, peak, order, slack,
            table, shift, left_out, starts, scores, found,
        )  # fmt: skip
        begin = end
    return n_scored
