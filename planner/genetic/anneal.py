"""Simulated annealing over slots and matchings, compiled. Moves:

- exchange the tails of two pipelines at a boundary (two slots swap their partners),
- reverse a run of stages (with its outer matchings solved anew),
- exchange the devices of two slots.

The objective of eq. 1 takes maxima and so has plateaus. The search sees a smoothed one:
``(1 - w) max + w mean`` for the hops of every boundary and for the data-parallel sums; the caller
lowers w together with the temperature.

A move is drawn, priced against the running sums of `AnnealState`, and made if it costs at most
``slack`` more: Metropolis' rule with the random number drawn first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from planner.genetic.arrangement import Arrangement, solve_boundary
from planner.genetic.tables import Tables
from planner.search.arrays import Floats, Floats2, Ints, Words
from planner.search.compiled import allocating, allocating_entry, force_inlined
from planner.search.rng import next_below, next_unit


class Stint(NamedTuple):
    """One stretch of annealing.

    Attributes
    ----------
    hot, cold
        The temperature in seconds goes geometrically from one to the other.
    smooth
        w, the share of the means in the objective.
    tails
        Share of moves that exchange the tails of two pipelines.
    reversals
        Share of moves that reverse stages, times N: such a move costs about N others.
    """

    moves: int
    hot: float
    cold: float
    smooth: float
    tails: float
    reversals: float


class AnnealState(NamedTuple):
    """An arrangement with the sums and maxima that its cost is made of.

    Attributes
    ----------
    slot_of
        ``int[N]``, the inverse of ``device_at``.
    load
        ``float[S, N]``: the sum of eq. 2 that device d pays, or would pay, in group j.
    group_max, group_sum
        ``float[S]``: largest and sum of ``load`` over a group's own devices.
    hop_at
        ``float[N]``: cost of the hop that leaves a slot.
    hop_max, hop_sum
        ``float[S - 1]``: largest and sum of the hops over a boundary.
    """

    device_at: Ints
    after: Ints
    before: Ints
    slot_of: Ints
    load: Floats2
    group_max: Floats
    group_sum: Floats
    hop_at: Floats
    hop_max: Floats
    hop_sum: Floats


class SlotChange(NamedTuple):
    """What an exchange of two devices would change; room that is used again for every move.

    Attributes
    ----------
    slot, value
        The at most four hops that change, by their left slot, and their new costs.
    boundary, level, added
        The boundaries they belong to, with the new largest hop and what is added to the sum.
    group_max
        ``group_max`` of `AnnealState` after the exchange.
    """

    slot: Ints
    value: Floats
    boundary: Ints
    level: Floats
    added: Floats
    group_max: Floats


@allocating_entry
def anneal(
    tables: Tables,
    arrangement: Arrangement,
    best: Ints,
    best_cost: float,
    word: Words,
    stint: Stint,
) -> float:
    """Anneal in place; keep the best slots seen in ``best`` and return their cost.

    Parameters
    ----------
    best
        ``int[N]``, the best slots so far; changed in place.
    word
        ``uint64[1]``, state of the random generator.
    """
    n, stages = len(best), len(tables.sizes)
    state = _weighed(tables, arrangement)
    change = _room(stages)
    temperature = stint.hot
    for move in range(stint.moves):
        if move % 256 == 0:
            share = move / stint.moves
            temperature = stint.hot * (stint.cold / stint.hot) ** share
        slack = -temperature * math.log(1.0 - next_unit(word))
        draw = next_unit(word)
        if stages > 1 and draw < stint.tails:
            touched = _exchange_tails(tables, state, word, stint.smooth, slack)
        elif stages > 2 and draw > 1 - stint.reversals / n:
            touched = _reverse_stages(tables, state, word, stint.smooth, slack)
        else:
            touched = _exchange_devices(tables, state, change, word, stint.smooth, slack)
        if touched:
            true = state.group_max.max() + state.hop_max.sum()
            if true < best_cost - 1e-12 * best_cost:
                best_cost = true
                best[:] = state.device_at
    return best_cost


@allocating
def _weighed(tables: Tables, arrangement: Arrangement) -> AnnealState:
    """The state of an arrangement, whose arrays it shares."""
    device_at, after, before = arrangement
    n, stages = len(device_at), len(tables.sizes)
    state = AnnealState(
        device_at,
        after,
        before,
        np.empty(n, dtype=np.int64),
        np.empty((stages, n)),
        np.empty(stages),
        np.empty(stages),
        np.zeros(n),
        np.zeros(max(0, stages - 1)),
        np.zeros(max(0, stages - 1)),
    )
    _find_slots(state)
    _weigh(tables, state)
    return state


@allocating
def _room(stages: int) -> SlotChange:
    return SlotChange(
        np.empty(4, dtype=np.int64),
        np.empty(4),
        np.empty(4, dtype=np.int64),
        np.empty(4),
        np.empty(4),
        np.empty(stages),
    )


@force_inlined
def _find_slots(state: AnnealState) -> None:
    for p in range(len(state.device_at)):
        state.slot_of[state.device_at[p]] = p


@allocating
def _weigh(tables: Tables, state: AnnealState) -> None:
    """All sums and maxima from scratch."""
    n, stages = len(state.device_at), len(tables.sizes)
    state.load[:] = 0.0
    for j in range(stages):
        exchange = tables.exchange[tables.exchange_of[j]]
        for q in range(tables.first[j], tables.first[j + 1]):
            row = exchange[state.device_at[q]]
            for d in range(n):
                state.load[j, d] += row[d]
        state.group_max[j] = 0.0
        state.group_sum[j] = 0.0
        for q in range(tables.first[j], tables.first[j + 1]):
            own = state.load[j, state.device_at[q]]
            state.group_max[j] = max(state.group_max[j], own)
            state.group_sum[j] += own
    for j in range(stages - 1):
        hop = tables.hop[tables.hop_of[j]]
        state.hop_max[j] = 0.0
        state.hop_sum[j] = 0.0
        for p in range(tables.first[j], tables.first[j + 1]):
            if state.after[p] >= 0:
                state.hop_at[p] = hop[state.device_at[p], state.device_at[state.after[p]]]
                state.hop_max[j] = max(state.hop_max[j], state.hop_at[p])
                state.hop_sum[j] += state.hop_at[p]


@force_inlined
def _smoothed(tables: Tables, state: AnnealState, w: float) -> float:
    """The smoothed objective."""
    n = len(state.device_at)
    value: float = _exchange_term(state.group_max, state.group_sum.sum(), n, w)
    for j in range(len(state.hop_max)):
        pairs = min(tables.sizes[j], tables.sizes[j + 1])
        value += (1 - w) * state.hop_max[j] + w * state.hop_sum[j] / pairs
    return value


@force_inlined
def _exchange_term(group_max: Floats, total: float, n: int, w: float) -> float:
    """Smoothed data-parallel cost: max over groups, mean over groups, mean over devices."""
    worst = 0.0
    mean = 0.0
    for value in group_max:
        worst = max(worst, value)
        mean += value
    return (1 - w) * worst + w * (0.5 * mean / len(group_max) + 0.5 * total / n)


@force_inlined
def _new_level(
    tables: Tables,
    state: AnnealState,
    boundary: int,
    p: int,
    p_value: float,
    q: int,
    q_value: float,
) -> float:
    """Largest hop of a boundary when the hops of left slots p and q (or -1) take new values."""
    old: float = state.hop_max[boundary]
    value: float = p_value
    touched = state.hop_at[p] >= old
    if q >= 0:
        value = max(value, q_value)
        touched = touched or state.hop_at[q] >= old
    if value >= old:
        return value
    if not touched:
        return old
    for r in range(tables.first[boundary], tables.first[boundary + 1]):
        if r != p and r != q and state.after[r] >= 0:
            value = max(value, state.hop_at[r])
    return value


@force_inlined
def _exchange_tails(
    tables: Tables, state: AnnealState, word: Words, w: float, slack: float
) -> bool:
    """Two slots of a stage swap their partners in the next one; False if nothing changed."""
    device_at, after, before, hop_at = state.device_at, state.after, state.before, state.hop_at
    p, q = _draw_tails(tables, state, word)
    if q < 0 or p == q or (after[p] < 0 and after[q] < 0):
        return False
    if after[p] < 0:
        p, q = q, p
    j = tables.stage[p]
    hop = tables.hop[tables.hop_of[j]]
    a, b = after[p], after[q]
    q_value = hop[device_at[q], device_at[a]]
    if b >= 0:
        p_value = hop[device_at[p], device_at[b]]
        level = _new_level(tables, state, j, p, p_value, q, q_value)
        added = p_value + q_value - hop_at[p] - hop_at[q]
    else:
        # p loses its partner to q: p counts as hop 0
        p_value = 0.0
        level = _new_level(tables, state, j, p, q_value, -1, 0.0)
        added = q_value - hop_at[p]
    pairs = min(tables.sizes[j], tables.sizes[j + 1])
    if (1 - w) * (level - state.hop_max[j]) + w * added / pairs > slack:
        return False
    after[q] = a
    before[a] = q
    after[p] = b
    if b >= 0:
        before[b] = p
    hop_at[p], hop_at[q] = p_value, q_value
    state.hop_max[j] = level
    state.hop_sum[j] += added
    return True


@force_inlined
def _draw_tails(tables: Tables, state: AnnealState, word: Words) -> tuple[int, int]:
    """Two slots of one stage that is not the last; the second is -1 if none was found.

    Half of the time the second is the one whose partner is near the first one's device.
    """
    first, stage = tables.first, tables.stage
    p = next_below(word, first[len(tables.sizes) - 1])
    j = stage[p]
    if next_unit(word) >= 0.5:
        return p, first[j] + next_below(word, tables.sizes[j])
    near = tables.near[state.device_at[p]]
    for _ in range(4):
        other = state.slot_of[near[next_below(word, len(near))]]
        if stage[other] == j + 1:
            return p, state.before[other]
    return p, -1


@allocating
def _reverse_stages(
    tables: Tables, state: AnnealState, word: Words, w: float, slack: float
) -> bool:
    """Reverse a run of stages; False if nothing was touched."""
    stages = len(tables.sizes)
    low = next_below(word, stages)
    high = next_below(word, stages)
    if low > high:
        low, high = high, low
    if low == high or (low == 0 and high == stages - 1 and tables.hop.shape[0] == 1):
        return False
    for j in range(low, high + 1):
        if tables.sizes[j] != tables.sizes[low + high - j]:
            return False
    old = _smoothed(tables, state, w)
    device_at, after, before = state.device_at.copy(), state.after.copy(), state.before.copy()
    _mirror(tables, Arrangement(state.device_at, state.after, state.before), low, high)
    _weigh(tables, state)
    if _smoothed(tables, state, w) - old > slack:
        state.device_at[:], state.after[:], state.before[:] = device_at, after, before
        _weigh(tables, state)
    _find_slots(state)
    return True


@allocating
def _mirror(tables: Tables, arrangement: Arrangement, low: int, high: int) -> None:
    """Reverse the stages low..high, whose sizes are palindromic."""
    device_at, after, before = arrangement
    first, stage = tables.first, tables.stage
    start, end = first[low], first[high + 1]
    old = device_at[start:end].copy()
    forward = after[start:end].copy()
    backward = before[start:end].copy()
    # slot s of the run goes to the same place in the mirrored stage
    for p in range(start, end):
        j = stage[p]
        mirror = first[low + high - j] + (p - first[j])
        device_at[mirror] = old[p - start]
        if j > low:
            after[mirror] = _mirrored(tables, backward[p - start], low + high)
        if j < high:
            before[mirror] = _mirrored(tables, forward[p - start], low + high)
    if low > 0:
        solve_boundary(tables, arrangement, low - 1)
    if high < len(tables.sizes) - 1:
        solve_boundary(tables, arrangement, high)


@force_inlined
def _mirrored(tables: Tables, slot: int, ends: int) -> int:
    """Where a slot of the run goes; -1 stays -1. ``ends``: first plus last stage of the run."""
    if slot < 0:
        return slot
    j = tables.stage[slot]
    place: int = tables.first[ends - j] + (slot - tables.first[j])
    return place


@force_inlined
def _exchange_devices(
    tables: Tables, state: AnnealState, change: SlotChange, word: Words, w: float, slack: float
) -> bool:
    """Two slots swap their devices; False if nothing changed."""
    p, q = _draw_devices(tables, state, word)
    if p == q:
        return False
    if p > q:
        p, q = q, p
    i, j = tables.stage[p], tables.stage[q]
    hops = _changed_hops(tables, state, change, p, q)
    parts, delta = _price_hops(tables, state, change, hops, w)
    sum_i = sum_j = 0.0
    if i != j:
        delta, sum_i, sum_j = _price_groups(tables, state, change, p, q, w, delta, slack)
    if delta > slack:
        return False
    for k in range(parts):
        state.hop_max[change.boundary[k]] = change.level[k]
        state.hop_sum[change.boundary[k]] += change.added[k]
    for k in range(hops):
        state.hop_at[change.slot[k]] = change.value[k]
    a, b = state.device_at[p], state.device_at[q]
    state.device_at[p], state.device_at[q] = b, a
    state.slot_of[a], state.slot_of[b] = q, p
    if i != j:
        state.group_max[i], state.group_max[j] = change.group_max[i], change.group_max[j]
        state.group_sum[i] += sum_i
        state.group_sum[j] += sum_j
        _replace(tables, state, i, a, b)
        _replace(tables, state, j, b, a)
    return True


@force_inlined
def _draw_devices(tables: Tables, state: AnnealState, word: Words) -> tuple[int, int]:
    """Two slots; half of the time the second holds a device near one of the first's partners."""
    n = len(state.device_at)
    p = next_below(word, n)
    if next_unit(word) >= 0.5:
        return p, next_below(word, n)
    after, before = state.after[p], state.before[p]
    partner = after if next_unit(word) < 0.5 else before
    if partner < 0:
        partner = before if after < 0 else after
    if partner < 0:
        partner = p
    near = tables.near[state.device_at[partner]]
    return p, state.slot_of[near[next_below(word, len(near))]]


@force_inlined
def _changed_hops(tables: Tables, state: AnnealState, change: SlotChange, p: int, q: int) -> int:
    """Note the hops that change when slots p < q swap devices; how many there are."""
    device_at, after, before = state.device_at, state.after, state.before
    a, b = device_at[p], device_at[q]
    i, j = tables.stage[p], tables.stage[q]
    count = 0
    if before[p] >= 0:
        s = before[p]
        change.slot[count] = s
        change.value[count] = tables.hop[tables.hop_of[i - 1], device_at[s], b]
        count += 1
    if after[p] >= 0:
        s = after[p]
        change.slot[count] = p
        c = a if s == q else device_at[s]
        change.value[count] = tables.hop[tables.hop_of[i], b, c]
        count += 1
    if before[q] >= 0 and before[q] != p:
        s = before[q]
        change.slot[count] = s
        change.value[count] = tables.hop[tables.hop_of[j - 1], device_at[s], a]
        count += 1
    if after[q] >= 0:
        s = after[q]
        change.slot[count] = q
        change.value[count] = tables.hop[tables.hop_of[j], a, device_at[s]]
        count += 1
    return count


@force_inlined
def _price_hops(
    tables: Tables, state: AnnealState, change: SlotChange, hops: int, w: float
) -> tuple[int, float]:
    """Boundaries that change (each has one or two changed hops), and the added pipeline cost."""
    stage, sizes = tables.stage, tables.sizes
    parts = 0
    delta = 0.0
    for k in range(hops):
        boundary = stage[change.slot[k]]
        seen = False
        for t in range(k):
            if stage[change.slot[t]] == boundary:
                seen = True
        if seen:
            continue
        other, other_value = -1, 0.0
        for t in range(k + 1, hops):
            if stage[change.slot[t]] == boundary:
                other, other_value = change.slot[t], change.value[t]
        level = _new_level(
            tables, state, boundary, change.slot[k], change.value[k], other, other_value
        )
        added = change.value[k] - state.hop_at[change.slot[k]]
        if other >= 0:
            added += other_value - state.hop_at[other]
        pairs = min(sizes[boundary], sizes[boundary + 1])
        delta += (1 - w) * (level - state.hop_max[boundary]) + w * added / pairs
        change.boundary[parts] = boundary
        change.level[parts] = level
        change.added[parts] = added
        parts += 1
    return parts, delta


@force_inlined
def _price_groups(
    tables: Tables,
    state: AnnealState,
    change: SlotChange,
    p: int,
    q: int,
    w: float,
    delta: float,
    slack: float,
) -> tuple[float, float, float]:
    """``delta`` with the data-parallel cost added, and what is added to both groups' sums.

    Infinite as soon as it is clear that the move costs more than ``slack``.
    """
    n, load = len(state.device_at), state.load
    i, j = tables.stage[p], tables.stage[q]
    a, b = state.device_at[p], state.device_at[q]
    total = state.group_sum.sum()
    now = _exchange_term(state.group_max, total, n, w)
    if delta - now > slack:
        return np.inf, 0.0, 0.0
    sum_i = 2 * (load[i, b] - tables.exchange[tables.exchange_of[i], a, b] - load[i, a])
    sum_j = 2 * (load[j, a] - tables.exchange[tables.exchange_of[j], a, b] - load[j, b])
    trial = change.group_max
    for k in range(len(trial)):
        trial[k] = state.group_max[k]
    # a mean never exceeds its maximum: reject most moves before the scan
    trial[i] = (state.group_sum[i] + sum_i) / tables.sizes[i]
    trial[j] = (state.group_sum[j] + sum_j) / tables.sizes[j]
    floor = _exchange_term(trial, total + sum_i + sum_j, n, w) - now
    if delta + floor > slack:
        return np.inf, 0.0, 0.0
    trial[i] = _new_load(tables, state, i, a, b)
    trial[j] = _new_load(tables, state, j, b, a)
    return delta + (_exchange_term(trial, total + sum_i + sum_j, n, w) - now), sum_i, sum_j


@force_inlined
def _new_load(tables: Tables, state: AnnealState, j: int, gone: int, come: int) -> float:
    """Largest sum of eq. 2 in group j when device ``come`` takes the place of ``gone``."""
    exchange = tables.exchange[tables.exchange_of[j]]
    away, near = exchange[gone], exchange[come]
    worst: float = state.load[j, come] - near[gone]
    for p in range(tables.first[j], tables.first[j + 1]):
        d = state.device_at[p]
        if d != gone:
            worst = max(worst, state.load[j, d] - away[d] + near[d])
    return worst


@force_inlined
def _replace(tables: Tables, state: AnnealState, j: int, gone: int, come: int) -> None:
    """Sums of eq. 2 in group j after device ``come`` took the place of ``gone``."""
    exchange = tables.exchange[tables.exchange_of[j]]
    for d in range(len(state.device_at)):
        state.load[j, d] += exchange[come, d] - exchange[gone, d]
