"""Compiled simulated annealing over slots and matchings. Moves:

- exchange the tails of two pipelines at a boundary (two slots swap their partners),
- reverse a sequence of stages (and recompute the matchings at its ends),
- exchange the devices of two slots.

The objective of eq. 1 takes maxima and so has plateaus. The search uses a smoothed objective,
``(1 - w) max + w mean`` of the links of every boundary and of the data-parallel sums; the caller
lowers w together with the temperature.

A move is evaluated incrementally on the sums of `AnnealState`, and accepted if its cost increase is
at most ``threshold``: the Metropolis criterion with the random number drawn first.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from planner.genetic.data import AssignmentData
from planner.genetic.matched_assignment import MatchedAssignment, solve_boundary
from planner.search.arrays import Floats, Floats2, Ints, Words
from planner.search.compiled import allocating, allocating_entry, force_inlined
from planner.search.rng import next_below, next_unit


class AnnealParams(NamedTuple):
    """Parameters of one phase of annealing.

    Attributes
    ----------
    t_start, t_end
        First and last temperature in seconds; it decreases geometrically.
    mean_weight
        w, the weight of the means in the objective.
    tail_share
        Share of moves that exchange the tails of two pipelines.
    reversal_share
        Share of moves that reverse stages, times N: such a move costs about as much as N others.
    """

    moves: int
    t_start: float
    t_end: float
    mean_weight: float
    tail_share: float
    reversal_share: float


class AnnealState(NamedTuple):
    """An assignment with the sums and maxima of its cost.

    Attributes
    ----------
    slot_of
        ``int[N]``, the inverse of ``device_at``.
    next_slot, prev_slot
        As in `MatchedAssignment`.
    dp_sums
        ``float[S, N]``: the sum of eq. 2 of device d in group j, whether or not it is a member.
    group_max, group_sum
        ``float[S]``: largest and sum of ``dp_sums`` over a group's own devices.
    link_cost
        ``float[N]``: pipeline cost of the link from a slot to its next one.
    boundary_max, boundary_sum
        ``float[S - 1]``: maximum and sum of the link costs over a boundary.
    """

    device_at: Ints
    next_slot: Ints
    prev_slot: Ints
    slot_of: Ints
    dp_sums: Floats2
    group_max: Floats
    group_sum: Floats
    link_cost: Floats
    boundary_max: Floats
    boundary_sum: Floats


class SlotChange(NamedTuple):
    """Effect of an exchange of two devices; buffers that are reused for every move.

    Attributes
    ----------
    slot, value
        The at most four links that change, by their left slot, and their new costs.
    boundary, new_max, sum_delta
        Their boundaries, with the new maximum and the change of the sum.
    group_max
        ``group_max`` of `AnnealState` after the exchange.
    """

    slot: Ints
    value: Floats
    boundary: Ints
    new_max: Floats
    sum_delta: Floats
    group_max: Floats


@allocating_entry
def anneal(
    data: AssignmentData,
    assignment: MatchedAssignment,
    best: Ints,
    best_cost: float,
    rng_state: Words,
    params: AnnealParams,
) -> float:
    """Anneal in place, store the best slots in ``best`` and return their cost.

    Parameters
    ----------
    best
        ``int[N]``, the best slots so far; updated in place.
    rng_state
        ``uint64[1]``, state of the random generator.
    """
    n, stages = len(best), len(data.sizes)
    state = _build_state(data, assignment)
    change = _allocate_change(stages)
    temperature = params.t_start
    for move in range(params.moves):
        if move % 256 == 0:
            progress = move / params.moves
            temperature = params.t_start * (params.t_end / params.t_start) ** progress
        threshold = -temperature * math.log(1.0 - next_unit(rng_state))
        draw = next_unit(rng_state)
        if stages > 1 and draw < params.tail_share:
            accepted = _exchange_tails(data, state, rng_state, params.mean_weight, threshold)
        elif stages > 2 and draw > 1 - params.reversal_share / n:
            accepted = _reverse_stages(data, state, rng_state, params.mean_weight, threshold)
        else:
            accepted = _exchange_devices(
                data, state, change, rng_state, params.mean_weight, threshold
            )
        if accepted:
            current_cost = state.group_max.max() + state.boundary_max.sum()
            if current_cost < best_cost - 1e-12 * best_cost:
                best_cost = current_cost
                best[:] = state.device_at
    return best_cost


@allocating
def _build_state(data: AssignmentData, assignment: MatchedAssignment) -> AnnealState:
    """Build the state of an assignment, sharing its arrays."""
    device_at, next_slot, prev_slot = assignment
    n, stages = len(device_at), len(data.sizes)
    state = AnnealState(
        device_at,
        next_slot,
        prev_slot,
        np.empty(n, dtype=np.int64),
        np.empty((stages, n)),
        np.empty(stages),
        np.empty(stages),
        np.zeros(n),
        np.zeros(max(0, stages - 1)),
        np.zeros(max(0, stages - 1)),
    )
    _index_slots(state)
    _recompute(data, state)
    return state


@allocating
def _allocate_change(stages: int) -> SlotChange:
    return SlotChange(
        np.empty(4, dtype=np.int64),
        np.empty(4),
        np.empty(4, dtype=np.int64),
        np.empty(4),
        np.empty(4),
        np.empty(stages),
    )


@force_inlined
def _index_slots(state: AnnealState) -> None:
    for p in range(len(state.device_at)):
        state.slot_of[state.device_at[p]] = p


@allocating
def _recompute(data: AssignmentData, state: AnnealState) -> None:
    """Recompute all sums and maxima."""
    n, stages = len(state.device_at), len(data.sizes)
    state.dp_sums[:] = 0.0
    for j in range(stages):
        dp_cost = data.dp_cost[data.dp_kind[j]]
        for q in range(data.stage_ptr[j], data.stage_ptr[j + 1]):
            row = dp_cost[state.device_at[q]]
            for d in range(n):
                state.dp_sums[j, d] += row[d]
        state.group_max[j] = 0.0
        state.group_sum[j] = 0.0
        for q in range(data.stage_ptr[j], data.stage_ptr[j + 1]):
            device_sum = state.dp_sums[j, state.device_at[q]]
            state.group_max[j] = max(state.group_max[j], device_sum)
            state.group_sum[j] += device_sum
    for j in range(stages - 1):
        pp_cost = data.pp_cost[data.pp_kind[j]]
        state.boundary_max[j] = 0.0
        state.boundary_sum[j] = 0.0
        for p in range(data.stage_ptr[j], data.stage_ptr[j + 1]):
            if state.next_slot[p] >= 0:
                state.link_cost[p] = pp_cost[
                    state.device_at[p], state.device_at[state.next_slot[p]]
                ]
                state.boundary_max[j] = max(state.boundary_max[j], state.link_cost[p])
                state.boundary_sum[j] += state.link_cost[p]


@force_inlined
def _smoothed_objective(data: AssignmentData, state: AnnealState, w: float) -> float:
    """``(1 - w) max + w mean`` of links and data-parallel sums; see the module."""
    n = len(state.device_at)
    value: float = _smoothed_dp_term(state.group_max, state.group_sum.sum(), n, w)
    for j in range(len(state.boundary_max)):
        pairs = min(data.sizes[j], data.sizes[j + 1])
        value += (1 - w) * state.boundary_max[j] + w * state.boundary_sum[j] / pairs
    return value


@force_inlined
def _smoothed_dp_term(group_max: Floats, total: float, n: int, w: float) -> float:
    """Smoothed data-parallel cost: max over groups, mean over groups, mean over devices."""
    worst = 0.0
    mean = 0.0
    for value in group_max:
        worst = max(worst, value)
        mean += value
    return (1 - w) * worst + w * (0.5 * mean / len(group_max) + 0.5 * total / n)


@force_inlined
def _new_boundary_max(
    data: AssignmentData,
    state: AnnealState,
    boundary: int,
    p: int,
    p_value: float,
    q: int,
    q_value: float,
) -> float:
    """Maximum of a boundary when the links of left slots p and q (or -1) change."""
    old: float = state.boundary_max[boundary]
    value: float = p_value
    changes_max = state.link_cost[p] >= old
    if q >= 0:
        value = max(value, q_value)
        changes_max = changes_max or state.link_cost[q] >= old
    if value >= old:
        return value
    if not changes_max:
        return old
    for r in range(data.stage_ptr[boundary], data.stage_ptr[boundary + 1]):
        if r != p and r != q and state.next_slot[r] >= 0:
            value = max(value, state.link_cost[r])
    return value


@force_inlined
def _exchange_tails(
    data: AssignmentData, state: AnnealState, rng_state: Words, w: float, threshold: float
) -> bool:
    """Swap the partners of two slots in the next stage; False if the move is rejected."""
    device_at, next_slot, prev_slot, link_cost = (
        state.device_at,
        state.next_slot,
        state.prev_slot,
        state.link_cost,
    )
    p, q = _draw_tails(data, state, rng_state)
    if q < 0 or p == q or (next_slot[p] < 0 and next_slot[q] < 0):
        return False
    if next_slot[p] < 0:
        p, q = q, p
    j = data.stage_of_slot[p]
    pp_cost = data.pp_cost[data.pp_kind[j]]
    a, b = next_slot[p], next_slot[q]
    q_value = pp_cost[device_at[q], device_at[a]]
    if b >= 0:
        p_value = pp_cost[device_at[p], device_at[b]]
        new_max = _new_boundary_max(data, state, j, p, p_value, q, q_value)
        sum_delta = p_value + q_value - link_cost[p] - link_cost[q]
    else:
        # p loses its partner to q and has no link
        p_value = 0.0
        new_max = _new_boundary_max(data, state, j, p, q_value, -1, 0.0)
        sum_delta = q_value - link_cost[p]
    pairs = min(data.sizes[j], data.sizes[j + 1])
    if (1 - w) * (new_max - state.boundary_max[j]) + w * sum_delta / pairs > threshold:
        return False
    next_slot[q] = a
    prev_slot[a] = q
    next_slot[p] = b
    if b >= 0:
        prev_slot[b] = p
    link_cost[p], link_cost[q] = p_value, q_value
    state.boundary_max[j] = new_max
    state.boundary_sum[j] += sum_delta
    return True


@force_inlined
def _draw_tails(data: AssignmentData, state: AnnealState, rng_state: Words) -> tuple[int, int]:
    """Draw two slots of one stage that is not the last; the second is -1 if none was found.

    With probability 1/2 the second slot's partner is a neighbour of the first slot's device.
    """
    first, stage = data.stage_ptr, data.stage_of_slot
    p = next_below(rng_state, first[len(data.sizes) - 1])
    j = stage[p]
    if next_unit(rng_state) >= 0.5:
        return p, first[j] + next_below(rng_state, data.sizes[j])
    neighbours = data.neighbours[state.device_at[p]]
    for _ in range(4):
        other = state.slot_of[neighbours[next_below(rng_state, len(neighbours))]]
        if stage[other] == j + 1:
            return p, state.prev_slot[other]
    return p, -1


@allocating
def _reverse_stages(
    data: AssignmentData, state: AnnealState, rng_state: Words, w: float, threshold: float
) -> bool:
    """Reverse a sequence of stages; False if the move is impossible or rejected."""
    stages = len(data.sizes)
    low = next_below(rng_state, stages)
    high = next_below(rng_state, stages)
    if low > high:
        low, high = high, low
    if low == high or (low == 0 and high == stages - 1 and data.pp_cost.shape[0] == 1):
        return False
    for j in range(low, high + 1):
        if data.sizes[j] != data.sizes[low + high - j]:
            return False
    old = _smoothed_objective(data, state, w)
    device_at, next_slot, prev_slot = (
        state.device_at.copy(),
        state.next_slot.copy(),
        state.prev_slot.copy(),
    )
    _reverse(data, MatchedAssignment(state.device_at, state.next_slot, state.prev_slot), low, high)
    _recompute(data, state)
    accepted = _smoothed_objective(data, state, w) - old <= threshold
    if not accepted:
        state.device_at[:], state.next_slot[:], state.prev_slot[:] = device_at, next_slot, prev_slot
        _recompute(data, state)
    _index_slots(state)
    return accepted


@allocating
def _reverse(data: AssignmentData, assignment: MatchedAssignment, low: int, high: int) -> None:
    """Reverse the stages low..high, whose sizes are palindromic."""
    device_at, next_slot, prev_slot = assignment
    first, stage = data.stage_ptr, data.stage_of_slot
    start, end = first[low], first[high + 1]
    old = device_at[start:end].copy()
    forward = next_slot[start:end].copy()
    backward = prev_slot[start:end].copy()
    # a slot moves to the same position in the mirrored stage
    for p in range(start, end):
        j = stage[p]
        mirror = first[low + high - j] + (p - first[j])
        device_at[mirror] = old[p - start]
        if j > low:
            next_slot[mirror] = _reversed_slot(data, backward[p - start], low + high)
        if j < high:
            prev_slot[mirror] = _reversed_slot(data, forward[p - start], low + high)
    if low > 0:
        solve_boundary(data, assignment, low - 1)
    if high < len(data.sizes) - 1:
        solve_boundary(data, assignment, high)


@force_inlined
def _reversed_slot(data: AssignmentData, slot: int, ends: int) -> int:
    """Slot after the reversal, or -1 for -1; ``ends`` is the sum of first and last stage."""
    if slot < 0:
        return slot
    j = data.stage_of_slot[slot]
    place: int = data.stage_ptr[ends - j] + (slot - data.stage_ptr[j])
    return place


@force_inlined
def _exchange_devices(
    data: AssignmentData,
    state: AnnealState,
    change: SlotChange,
    rng_state: Words,
    w: float,
    threshold: float,
) -> bool:
    """Swap the devices of two slots; False if the move is rejected."""
    p, q = _draw_devices(data, state, rng_state)
    if p == q:
        return False
    if p > q:
        p, q = q, p
    i, j = data.stage_of_slot[p], data.stage_of_slot[q]
    num_links = _changed_links(data, state, change, p, q)
    num_boundaries, delta = _pipeline_delta(data, state, change, num_links, w)
    sum_i = sum_j = 0.0
    if i != j:
        delta, sum_i, sum_j = _data_parallel_delta(data, state, change, p, q, w, delta, threshold)
    if delta > threshold:
        return False
    for k in range(num_boundaries):
        state.boundary_max[change.boundary[k]] = change.new_max[k]
        state.boundary_sum[change.boundary[k]] += change.sum_delta[k]
    for k in range(num_links):
        state.link_cost[change.slot[k]] = change.value[k]
    a, b = state.device_at[p], state.device_at[q]
    state.device_at[p], state.device_at[q] = b, a
    state.slot_of[a], state.slot_of[b] = q, p
    if i != j:
        state.group_max[i], state.group_max[j] = change.group_max[i], change.group_max[j]
        state.group_sum[i] += sum_i
        state.group_sum[j] += sum_j
        _update_dp_sums(data, state, i, a, b)
        _update_dp_sums(data, state, j, b, a)
    return True


@force_inlined
def _draw_devices(data: AssignmentData, state: AnnealState, rng_state: Words) -> tuple[int, int]:
    """Draw two slots; with probability 1/2 the second is near a partner of the first."""
    n = len(state.device_at)
    p = next_below(rng_state, n)
    if next_unit(rng_state) >= 0.5:
        return p, next_below(rng_state, n)
    next_slot, prev_slot = state.next_slot[p], state.prev_slot[p]
    partner = next_slot if next_unit(rng_state) < 0.5 else prev_slot
    if partner < 0:
        partner = prev_slot if next_slot < 0 else next_slot
    if partner < 0:
        partner = p
    neighbours = data.neighbours[state.device_at[partner]]
    return p, state.slot_of[neighbours[next_below(rng_state, len(neighbours))]]


@force_inlined
def _changed_links(
    data: AssignmentData, state: AnnealState, change: SlotChange, p: int, q: int
) -> int:
    """Record the links that change when slots p < q swap devices; returns their number."""
    device_at, next_slot, prev_slot = state.device_at, state.next_slot, state.prev_slot
    a, b = device_at[p], device_at[q]
    i, j = data.stage_of_slot[p], data.stage_of_slot[q]
    count = 0
    if prev_slot[p] >= 0:
        s = prev_slot[p]
        change.slot[count] = s
        change.value[count] = data.pp_cost[data.pp_kind[i - 1], device_at[s], b]
        count += 1
    if next_slot[p] >= 0:
        s = next_slot[p]
        change.slot[count] = p
        c = a if s == q else device_at[s]
        change.value[count] = data.pp_cost[data.pp_kind[i], b, c]
        count += 1
    if prev_slot[q] >= 0 and prev_slot[q] != p:
        s = prev_slot[q]
        change.slot[count] = s
        change.value[count] = data.pp_cost[data.pp_kind[j - 1], device_at[s], a]
        count += 1
    if next_slot[q] >= 0:
        s = next_slot[q]
        change.slot[count] = q
        change.value[count] = data.pp_cost[data.pp_kind[j], a, device_at[s]]
        count += 1
    return count


@force_inlined
def _pipeline_delta(
    data: AssignmentData, state: AnnealState, change: SlotChange, num_links: int, w: float
) -> tuple[int, float]:
    """Number of changed boundaries (one or two changed links each), and pipeline cost delta."""
    stage, sizes = data.stage_of_slot, data.sizes
    num_boundaries = 0
    delta = 0.0
    for k in range(num_links):
        boundary = stage[change.slot[k]]
        seen = False
        for t in range(k):
            if stage[change.slot[t]] == boundary:
                seen = True
        if seen:
            continue
        other, other_value = -1, 0.0
        for t in range(k + 1, num_links):
            if stage[change.slot[t]] == boundary:
                other, other_value = change.slot[t], change.value[t]
        new_max = _new_boundary_max(
            data, state, boundary, change.slot[k], change.value[k], other, other_value
        )
        sum_delta = change.value[k] - state.link_cost[change.slot[k]]
        if other >= 0:
            sum_delta += other_value - state.link_cost[other]
        pairs = min(sizes[boundary], sizes[boundary + 1])
        delta += (1 - w) * (new_max - state.boundary_max[boundary]) + w * sum_delta / pairs
        change.boundary[num_boundaries] = boundary
        change.new_max[num_boundaries] = new_max
        change.sum_delta[num_boundaries] = sum_delta
        num_boundaries += 1
    return num_boundaries, delta


@force_inlined
def _data_parallel_delta(
    data: AssignmentData,
    state: AnnealState,
    change: SlotChange,
    p: int,
    q: int,
    w: float,
    delta: float,
    threshold: float,
) -> tuple[float, float, float]:
    """``delta`` plus the data-parallel cost delta, and the changes of both groups' sums.

    Infinite as soon as a lower bound exceeds ``threshold``.
    """
    n, dp_sums = len(state.device_at), state.dp_sums
    i, j = data.stage_of_slot[p], data.stage_of_slot[q]
    a, b = state.device_at[p], state.device_at[q]
    total = state.group_sum.sum()
    now = _smoothed_dp_term(state.group_max, total, n, w)
    if delta - now > threshold:
        return np.inf, 0.0, 0.0
    sum_i = 2 * (dp_sums[i, b] - data.dp_cost[data.dp_kind[i], a, b] - dp_sums[i, a])
    sum_j = 2 * (dp_sums[j, a] - data.dp_cost[data.dp_kind[j], a, b] - dp_sums[j, b])
    new_group_max = change.group_max
    for k in range(len(new_group_max)):
        new_group_max[k] = state.group_max[k]
    # a mean is a lower bound on the maximum: reject most moves before the scan
    new_group_max[i] = (state.group_sum[i] + sum_i) / data.sizes[i]
    new_group_max[j] = (state.group_sum[j] + sum_j) / data.sizes[j]
    floor = _smoothed_dp_term(new_group_max, total + sum_i + sum_j, n, w) - now
    if delta + floor > threshold:
        return np.inf, 0.0, 0.0
    new_group_max[i] = _new_group_max(data, state, i, a, b)
    new_group_max[j] = _new_group_max(data, state, j, b, a)
    return (
        delta + (_smoothed_dp_term(new_group_max, total + sum_i + sum_j, n, w) - now),
        sum_i,
        sum_j,
    )


@force_inlined
def _new_group_max(
    data: AssignmentData, state: AnnealState, j: int, leaving: int, entering: int
) -> float:
    """Maximum sum of eq. 2 in group j when device ``entering`` replaces ``leaving``."""
    dp_cost = data.dp_cost[data.dp_kind[j]]
    leaving_cost, entering_cost = dp_cost[leaving], dp_cost[entering]
    worst: float = state.dp_sums[j, entering] - entering_cost[leaving]
    for p in range(data.stage_ptr[j], data.stage_ptr[j + 1]):
        d = state.device_at[p]
        if d != leaving:
            worst = max(worst, state.dp_sums[j, d] - leaving_cost[d] + entering_cost[d])
    return worst


@force_inlined
def _update_dp_sums(
    data: AssignmentData, state: AnnealState, j: int, leaving: int, entering: int
) -> None:
    """Update the sums of eq. 2 in group j after device ``entering`` replaced ``leaving``."""
    dp_cost = data.dp_cost[data.dp_kind[j]]
    for d in range(len(state.device_at)):
        state.dp_sums[j, d] += dp_cost[entering, d] - dp_cost[leaving, d]
