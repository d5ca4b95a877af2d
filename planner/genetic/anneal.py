"""Simulated annealing over slots and matchings, compiled.

A slot is a place in a stage; ``device_at[slot]`` fills it. Every boundary carries one matching:
``after[slot]`` is the partner in the next stage (-1 for a slot left over) and ``before`` its
inverse. With equal groups that is the paper's grid of pipelines x stages. Moves:

- exchange the devices of two slots,
- exchange the tails of two pipelines at a boundary (two slots swap their partners),
- reverse a run of stages (with its outer matchings solved anew).

The objective of eq. 1 takes maxima and so has plateaus. The search sees a smoothed one:
``(1 - w) max + w mean`` for the hops of every boundary and for the data-parallel sums; the caller
lowers w together with the temperature.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit
from numpy.typing import NDArray

from planner.genetic.tables import Floats, Ints, Tables
from planner.matching.bottleneck import _match
from planner.search.rng import next_below, next_unit

REVERSALS = 0.03
"""Share of moves that reverse stages, times N: such a move costs about N others."""

jit = njit(cache=True, nogil=True)


@jit
def solve_boundary(
    tables: Tables, device_at: Ints, after: Ints, before: Ints, boundary: int
) -> None:
    """Replace one boundary's matching by a bottleneck matching (eq. 3)."""
    hop = tables.hop[tables.hop_of[boundary]]
    left, middle = tables.first[boundary], tables.first[boundary + 1]
    right = tables.first[boundary + 2]
    for slot in range(left, middle):
        after[slot] = -1
    for slot in range(middle, right):
        before[slot] = -1
    k, m = middle - left, right - middle
    flip = k > m
    rows, columns = (m, k) if flip else (k, m)
    cost = np.empty((rows, columns))
    for r in range(rows):
        for c in range(columns):
            a, b = (left + c, middle + r) if flip else (left + r, middle + c)
            cost[r, c] = hop[device_at[a], device_at[b]]
    column_of = np.full(rows, -1, dtype=np.int64)
    row_of = np.full(columns, -1, dtype=np.int64)
    _match(cost, column_of, row_of)
    for r in range(rows):
        a, b = (left + column_of[r], middle + r) if flip else (left + r, middle + column_of[r])
        after[a] = b
        before[b] = a


@jit
def solve_matchings(tables: Tables, device_at: Ints, after: Ints, before: Ints) -> None:
    """Bottleneck matchings at every boundary."""
    after[:] = -1
    before[:] = -1
    for boundary in range(len(tables.sizes) - 1):
        solve_boundary(tables, device_at, after, before, boundary)


@jit
def current_cost(tables: Tables, device_at: Ints, after: Ints) -> float:
    """Eq. 1 with the arrangement's own matchings instead of the best ones."""
    worst = 0.0
    for j in range(len(tables.sizes)):
        exchange = tables.exchange[tables.exchange_of[j]]
        for p in range(tables.first[j], tables.first[j + 1]):
            total = 0.0
            for q in range(tables.first[j], tables.first[j + 1]):
                total += exchange[device_at[p], device_at[q]]
            worst = max(worst, total)
    for j in range(len(tables.sizes) - 1):
        hop = tables.hop[tables.hop_of[j]]
        level = 0.0
        for p in range(tables.first[j], tables.first[j + 1]):
            if after[p] >= 0:
                level = max(level, hop[device_at[p], device_at[after[p]]])
        worst += level
    return worst


@jit
def exact_cost(tables: Tables, device_at: Ints, after: Ints, before: Ints) -> float:
    """Eq. 1 for the groups in their order; leaves bottleneck matchings behind."""
    solve_matchings(tables, device_at, after, before)
    return current_cost(tables, device_at, after)


@jit
def _weigh(
    tables: Tables,
    device_at: Ints,
    after: Ints,
    load: Floats,
    group_max: Floats,
    group_sum: Floats,
    hop_max: Floats,
    hop_sum: Floats,
    hop_at: Floats,
) -> None:
    """All sums and maxima from scratch: ``load[j, d]`` is the sum of eq. 2 for d in group j."""
    n, stages = len(device_at), len(tables.sizes)
    load[:] = 0.0
    for j in range(stages):
        exchange = tables.exchange[tables.exchange_of[j]]
        for q in range(tables.first[j], tables.first[j + 1]):
            row = exchange[device_at[q]]
            for d in range(n):
                load[j, d] += row[d]
        group_max[j] = 0.0
        group_sum[j] = 0.0
        for q in range(tables.first[j], tables.first[j + 1]):
            group_max[j] = max(group_max[j], load[j, device_at[q]])
            group_sum[j] += load[j, device_at[q]]
    for j in range(stages - 1):
        hop = tables.hop[tables.hop_of[j]]
        hop_max[j] = 0.0
        hop_sum[j] = 0.0
        for p in range(tables.first[j], tables.first[j + 1]):
            if after[p] >= 0:
                hop_at[p] = hop[device_at[p], device_at[after[p]]]
                hop_max[j] = max(hop_max[j], hop_at[p])
                hop_sum[j] += hop_at[p]


@jit
def _new_max(
    tables: Tables,
    after: Ints,
    hop_at: Floats,
    hop_max: Floats,
    boundary: int,
    p: int,
    p_value: float,
    q: int,
    q_value: float,
) -> float:
    """Largest hop of a boundary when the hops of left slots p and q (or -1) take new values."""
    old: float = hop_max[boundary]
    value: float = p_value
    touched = hop_at[p] >= old
    if q >= 0:
        value = max(value, q_value)
        touched = touched or hop_at[q] >= old
    if value >= old:
        return value
    if not touched:
        return old
    for r in range(tables.first[boundary], tables.first[boundary + 1]):
        if r != p and r != q and after[r] >= 0:
            value = max(value, hop_at[r])
    return value


@jit
def _new_load(tables: Tables, device_at: Ints, load: Floats, j: int, gone: int, come: int) -> float:
    """Largest sum of eq. 2 in group j when device ``come`` takes the place of ``gone``."""
    exchange = tables.exchange[tables.exchange_of[j]]
    away, near = exchange[gone], exchange[come]
    worst: float = load[j, come] - near[gone]
    for p in range(tables.first[j], tables.first[j + 1]):
        d = device_at[p]
        if d != gone:
            worst = max(worst, load[j, d] - away[d] + near[d])
    return worst


@jit
def _dp_term(group_max: Floats, total: float, n: int, w: float) -> float:
    """Smoothed data-parallel cost: max over groups, mean over groups, mean over devices."""
    worst = 0.0
    mean = 0.0
    for value in group_max:
        worst = max(worst, value)
        mean += value
    return (1 - w) * worst + w * (0.5 * mean / len(group_max) + 0.5 * total / n)


@jit
def _reverse(
    tables: Tables, device_at: Ints, after: Ints, before: Ints, low: int, high: int
) -> bool:
    """Reverse the stages low..high; False if their sizes do not allow it."""
    sizes, first = tables.sizes, tables.first
    for j in range(low, high + 1):
        if sizes[j] != sizes[low + high - j]:
            return False
    start, end = first[low], first[high + 1]
    old = device_at[start:end].copy()
    forward = after[start:end].copy()
    backward = before[start:end].copy()
    # sizes are palindromic, so slot s of the run goes to the same place in the mirrored stage
    for p in range(start, end):
        j = tables.stage[p]
        mirror = first[low + high - j] + (p - first[j])
        device_at[mirror] = old[p - start]
        if j > low:
            partner = backward[p - start]
            if partner >= 0:
                i = tables.stage[partner]
                partner = first[low + high - i] + (partner - first[i])
            after[mirror] = partner
        if j < high:
            partner = forward[p - start]
            if partner >= 0:
                i = tables.stage[partner]
                partner = first[low + high - i] + (partner - first[i])
            before[mirror] = partner
    if low > 0:
        solve_boundary(tables, device_at, after, before, low - 1)
    if high < len(sizes) - 1:
        solve_boundary(tables, device_at, after, before, high)
    return True


@jit
def _smoothed(
    tables: Tables,
    group_max: Floats,
    group_sum: Floats,
    hop_max: Floats,
    hop_sum: Floats,
    n: int,
    w: float,
) -> float:
    value = _dp_term(group_max, group_sum.sum(), n, w)
    for j in range(len(hop_max)):
        pairs = min(tables.sizes[j], tables.sizes[j + 1])
        value += (1 - w) * hop_max[j] + w * hop_sum[j] / pairs
    return value


@jit
def anneal(
    tables: Tables,
    device_at: Ints,
    after: Ints,
    before: Ints,
    best: Ints,
    best_cost: float,
    word: NDArray[np.uint64],
    moves: int,
    hot: float,
    cold: float,
    w: float,
) -> float:
    """Anneal in place; keep the best slots seen in ``best`` and return their cost.

    The temperature goes geometrically from ``hot`` to ``cold``; ``w`` is the share of the means.
    """
    n, stages = len(device_at), len(tables.sizes)
    first, sizes, stage = tables.first, tables.sizes, tables.stage
    load = np.empty((stages, n))
    group_max, group_sum = np.empty(stages), np.empty(stages)
    hop_max, hop_sum = np.zeros(max(0, stages - 1)), np.zeros(max(0, stages - 1))
    hop_at = np.zeros(n)
    slot_of = np.empty(n, dtype=np.int64)
    trial_max = np.empty(stages)
    changed = np.empty(4, dtype=np.int64)
    changed_max, changed_sum = np.empty(4), np.empty(4)
    left_slot, left_value = np.empty(4, dtype=np.int64), np.empty(4)
    for p in range(n):
        slot_of[device_at[p]] = p
    _weigh(tables, device_at, after, load, group_max, group_sum, hop_max, hop_sum, hop_at)
    temperature = hot
    near_count = tables.near.shape[1]
    for move in range(moves):
        if move % 256 == 0:
            share = move / moves
            temperature = hot * (cold / hot) ** share
        slack = -temperature * math.log(1.0 - next_unit(word))
        draw = next_unit(word)
        if stages > 1 and draw < 0.35:
            # exchange the tails of two pipelines at a boundary
            p = next_below(word, first[stages - 1])
            j = stage[p]
            if next_unit(word) < 0.5:
                # towards a near device of the next stage, if there is one on the list
                q = -1
                for _ in range(4):
                    other = slot_of[tables.near[device_at[p], next_below(word, near_count)]]
                    if stage[other] == j + 1:
                        q = before[other]
                        break
                if q < 0:
                    continue
            else:
                q = first[j] + next_below(word, sizes[j])
            if p == q or (after[p] < 0 and after[q] < 0):
                continue
            if after[p] < 0:
                p, q = q, p
            hop = tables.hop[tables.hop_of[j]]
            b = after[q]
            q_value = hop[device_at[q], device_at[after[p]]]
            pairs = min(sizes[j], sizes[j + 1])
            if b >= 0:
                p_value = hop[device_at[p], device_at[b]]
                new = _new_max(tables, after, hop_at, hop_max, j, p, p_value, q, q_value)
                added = p_value + q_value - hop_at[p] - hop_at[q]
            else:
                # p loses its partner to q: p counts as hop 0
                p_value = 0.0
                new = _new_max(tables, after, hop_at, hop_max, j, p, q_value, -1, 0.0)
                added = q_value - hop_at[p]
            if (1 - w) * (new - hop_max[j]) + w * added / pairs > slack:
                continue
            a = after[p]
            after[q] = a
            before[a] = q
            after[p] = b
            if b >= 0:
                before[b] = p
            hop_at[p], hop_at[q] = p_value, q_value
            hop_max[j] = new
            hop_sum[j] += added
        elif stages > 2 and draw > 1 - REVERSALS / n:
            low = next_below(word, stages)
            high = next_below(word, stages)
            if low > high:
                low, high = high, low
            if low == high or (low == 0 and high == stages - 1 and tables.hop.shape[0] == 1):
                continue
            old = _smoothed(tables, group_max, group_sum, hop_max, hop_sum, n, w)
            kept_device, kept_after, kept_before = device_at.copy(), after.copy(), before.copy()
            if not _reverse(tables, device_at, after, before, low, high):
                continue
            _weigh(tables, device_at, after, load, group_max, group_sum, hop_max, hop_sum, hop_at)
            new = _smoothed(tables, group_max, group_sum, hop_max, hop_sum, n, w)
            if new - old > slack:
                device_at[:], after[:], before[:] = kept_device, kept_after, kept_before
                _weigh(
                    tables, device_at, after, load, group_max, group_sum, hop_max, hop_sum, hop_at
                )
            for p in range(n):
                slot_of[device_at[p]] = p
        else:
            # exchange the devices of two slots
            p = next_below(word, n)
            if next_unit(word) < 0.5:
                # bring a device near one of p's partners into p
                partner = after[p] if next_unit(word) < 0.5 else before[p]
                if partner < 0:
                    partner = before[p] if after[p] < 0 else after[p]
                if partner < 0:
                    partner = p
                q = slot_of[tables.near[device_at[partner], next_below(word, near_count)]]
            else:
                q = next_below(word, n)
            if p == q:
                continue
            if p > q:
                p, q = q, p
            i, j = stage[p], stage[q]
            a, b = device_at[p], device_at[q]
            # hops that change, by left slot
            count = 0
            if before[p] >= 0:
                s = before[p]
                left_slot[count] = s
                left_value[count] = tables.hop[tables.hop_of[i - 1], device_at[s], b]
                count += 1
            if after[p] >= 0:
                s = after[p]
                left_slot[count] = p
                c = a if s == q else device_at[s]
                left_value[count] = tables.hop[tables.hop_of[i], b, c]
                count += 1
            if before[q] >= 0 and before[q] != p:
                s = before[q]
                left_slot[count] = s
                left_value[count] = tables.hop[tables.hop_of[j - 1], device_at[s], a]
                count += 1
            if after[q] >= 0:
                s = after[q]
                left_slot[count] = q
                left_value[count] = tables.hop[tables.hop_of[j], a, device_at[s]]
                count += 1
            # per boundary: one or two changed hops
            parts = 0
            delta = 0.0
            for k in range(count):
                boundary = stage[left_slot[k]]
                seen = False
                for t in range(k):
                    if stage[left_slot[t]] == boundary:
                        seen = True
                if seen:
                    continue
                other, other_value = -1, 0.0
                for t in range(k + 1, count):
                    if stage[left_slot[t]] == boundary:
                        other, other_value = left_slot[t], left_value[t]
                new = _new_max(
                    tables,
                    after,
                    hop_at,
                    hop_max,
                    boundary,
                    left_slot[k],
                    left_value[k],
                    other,
                    other_value,
                )
                added = left_value[k] - hop_at[left_slot[k]]
                if other >= 0:
                    added += other_value - hop_at[other]
                pairs = min(sizes[boundary], sizes[boundary + 1])
                delta += (1 - w) * (new - hop_max[boundary]) + w * added / pairs
                changed[parts] = boundary
                changed_max[parts] = new
                changed_sum[parts] = added
                parts += 1
            sum_i = sum_j = 0.0
            if i != j:
                total = group_sum.sum()
                now = _dp_term(group_max, total, n, w)
                if delta - now > slack:
                    continue
                between_i = tables.exchange[tables.exchange_of[i], a, b]
                between_j = tables.exchange[tables.exchange_of[j], a, b]
                sum_i = 2 * (load[i, b] - between_i - load[i, a])
                sum_j = 2 * (load[j, a] - between_j - load[j, b])
                trial_max[:] = group_max
                # a mean never exceeds its maximum: reject most moves before the scan
                trial_max[i] = (group_sum[i] + sum_i) / sizes[i]
                trial_max[j] = (group_sum[j] + sum_j) / sizes[j]
                floor = _dp_term(trial_max, total + sum_i + sum_j, n, w) - now
                if delta + floor > slack:
                    continue
                trial_max[i] = _new_load(tables, device_at, load, i, a, b)
                trial_max[j] = _new_load(tables, device_at, load, j, b, a)
                delta += _dp_term(trial_max, total + sum_i + sum_j, n, w) - now
            if delta > slack:
                continue
            for k in range(parts):
                hop_max[changed[k]] = changed_max[k]
                hop_sum[changed[k]] += changed_sum[k]
            for k in range(count):
                hop_at[left_slot[k]] = left_value[k]
            device_at[p], device_at[q] = b, a
            slot_of[a], slot_of[b] = q, p
            if i != j:
                group_max[i], group_max[j] = trial_max[i], trial_max[j]
                group_sum[i] += sum_i
                group_sum[j] += sum_j
                for side in range(2):
                    group, come, gone = (i, b, a) if side == 0 else (j, a, b)
                    exchange = tables.exchange[tables.exchange_of[group]]
                    for d in range(n):
                        load[group, d] += exchange[come, d] - exchange[gone, d]
        true = group_max.max() + hop_max.sum()
        if true < best_cost - 1e-12 * best_cost:
            best_cost = true
            best[:] = device_at
    return best_cost


@jit
def group_levels(tables: Tables, device_at: Ints) -> Floats:
    """S x S bottleneck costs between equal groups: the coarsened graph of eq. 4."""
    stages = len(tables.sizes)
    k = tables.sizes[0]
    hop = tables.hop[0]
    levels = np.zeros((stages, stages))
    cost = np.empty((k, k))
    for i in range(stages):
        for j in range(i):
            for r in range(k):
                for c in range(k):
                    cost[r, c] = hop[device_at[i * k + r], device_at[j * k + c]]
            levels[i, j] = _match(
                cost, np.full(k, -1, dtype=np.int64), np.full(k, -1, dtype=np.int64)
            )
            levels[j, i] = levels[i, j]
    return levels
