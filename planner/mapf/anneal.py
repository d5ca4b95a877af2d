"""Compiled simulated annealing over paths, priorities and, if the arrangement is free, devices.

Every candidate is scheduled by `planner.mapf.fixed_order.compute_schedule`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.mapf.device_exchange import (
    ExchangeContext,
    empty_role,
    exchange_devices,
    exchange_partner,
)
from planner.mapf.fixed_order import compute_schedule
from planner.mapf.list_scheduling import (
    INFINITE_S,
    ScheduleData,
    ScheduleState,
    device_at,
    fill_tail,
)
from planner.mapf.moves import (
    PathCounts,
    PathRules,
    change_device,
    change_order,
    change_stage,
    count_path,
    exchange_paths,
    in_order,
    recount,
    sort_path,
    too_many_swaps,
)
from planner.mapf.stage_spans import fill_rounds, longest_span
from planner.search.arrays import Floats, Ints, Words
from planner.search.compiled import allocating_entry, kernel
from planner.search.rng import next_below, next_unit

OVERTAKE_S = 1e-6
"""Seconds by which a step that overtakes comes first; only the order of the keys matters."""
LEAST_MEAN_RATIO = 0.9
"""Scheduling stops early where a move would be accepted only if it lowered the mean completion time
to less than this share. Such moves are rare; a valid bound on the mean would stop much later."""


class MoveShares(NamedTuple):
    """Probability of each move; the remainder up to 1 swaps two neighbouring stages (CC2).

    Attributes
    ----------
    overtake
        Schedule a waiting step before its device predecessor.
    perturb
        Change a step's priority offset by a random time.
    reset
        Reset a step's priority offset.
    device
        Visit another device of the same stage.
    stage
        Visit another stage.
    exchange
        Exchange the paths of two microbatches with different start devices.
    """

    overtake: float = 0.25
    perturb: float = 0.10
    reset: float = 0.05
    device: float = 0.25
    stage: float = 0.17
    exchange: float = 0.10


class CycleParams(NamedTuple):
    """Parameters of a part of an annealing cycle.

    Attributes
    ----------
    t_start, t_end
        First and last temperature, seconds.
    tail_weight
        Weight of the remaining chain in the dispatching key, or `FOLLOW_TIMES`.
    jitter
        Largest random change of a priority offset, seconds.
    device_exchange_share
        Share of the proposals that exchange two devices.
    mean_weight
        Weight of the microbatches' mean completion time, added to the makespan.
    critical_share
        Share of the proposals that change a step on the critical path.
    shares
        Probabilities of the other moves.
    """

    num_moves: int
    t_start: float
    t_end: float
    tail_weight: float
    jitter: float
    device_exchange_share: float
    mean_weight: float
    critical_share: float
    shares: MoveShares


class AnnealingState(NamedTuple):
    """State of an annealing run; all arrays are updated in place.

    Attributes
    ----------
    counts
        Counts of the paths of ``current``.
    current, candidate, best
        The current solution, a copy on which moves are tried, and the best solution of the cycle.
    rng_state
        State of the random generator.
    """

    context: ExchangeContext
    counts: PathCounts
    current: ScheduleState
    candidate: ScheduleState
    best: ScheduleState
    rng_state: Words


@kernel
def mean_end(data: ScheduleData, state: ScheduleState) -> float:
    """Mean completion time of the microbatches."""
    total = 0.0
    for b in range(len(state.paths)):
        total += state.begin[b, -1] + data.backward[state.paths[b, 0]]
    return total / len(state.paths)


@kernel
def critical_path(data: ScheduleData, state: ScheduleState, makespan: float, critical: Ints) -> int:
    """Fill in the steps of a critical path, as ``b * steps + k``; returns their number."""
    count, steps = state.begin.shape
    step_index = -1
    for b in range(count):
        if state.begin[b, steps - 1] + data.backward[state.paths[b, 0]] >= makespan * (1 - 1e-12):
            step_index = b * steps + steps - 1
            break
    critical_count = 0
    while step_index >= 0 and critical_count < len(critical):
        critical[critical_count] = step_index
        critical_count += 1
        b, k = step_index // steps, step_index % steps
        if state.begin[b, k] > state.ready[b, k]:
            # with live memory the step may have waited for memory; assume it waited for the device
            step_index = state.device_pred[b, k]
        elif k > 0:
            # messages that queued: go back to the first of the queue, then to the step that sent it
            if len(state.link_pred) > 0:
                while state.link_pred[step_index // steps, step_index % steps] >= 0:
                    step_index = state.link_pred[step_index // steps, step_index % steps]
            step_index -= 1
        else:
            step_index = -1
    return critical_count


@kernel
def overtake(state: ScheduleState, offset: Floats, step_index: int, tail_weight: float) -> bool:
    """Give a step that waited for its device priority over its device predecessor.

    If its message queued for a link, give the sending step priority over the sender of the message
    ahead of it.
    """
    steps = state.begin.shape[1]
    b, k = step_index // steps, step_index % steps
    predecessor = state.device_pred[b, k]
    queued = len(state.link_pred) > 0 and state.link_pred[b, k] >= 0
    if queued and state.begin[b, k] <= state.ready[b, k]:
        predecessor = state.link_pred[b, k] - 1
        step_index -= 1
    if predecessor < 0 or predecessor // steps == step_index // steps:
        return False
    b, k, c, j = step_index // steps, step_index % steps, predecessor // steps, predecessor % steps
    if tail_weight < 0.0:
        offset[b, k] = state.offset[c, j] - OVERTAKE_S
        return True
    key = state.begin[c, j] - tail_weight * state.tail[c, j] + state.offset[c, j]
    own_key = max(state.ready[b, k], state.begin[c, j]) - tail_weight * state.tail[b, k]
    offset[b, k] = key - own_key - OVERTAKE_S
    return True


@kernel
def copy_row(source: ScheduleState, target: ScheduleState, b: int) -> None:
    """Copy path, tail and priority offsets of one microbatch."""
    for k in range(source.paths.shape[1]):
        target.paths[b, k] = source.paths[b, k]
    for k in range(source.tail.shape[1]):
        target.tail[b, k] = source.tail[b, k]
        target.offset[b, k] = source.offset[b, k]


@kernel
def copy_rows(source: ScheduleState, target: ScheduleState) -> None:
    """Copy paths, tails and priority offsets of all microbatches."""
    for b in range(len(source.paths)):
        copy_row(source, target, b)


@kernel
def copy_times(source: ScheduleState, target: ScheduleState) -> None:
    """Copy the arrays that `compute_schedule` fills."""
    for b in range(source.begin.shape[0]):
        for k in range(source.begin.shape[1]):
            target.begin[b, k] = source.begin[b, k]
            target.ready[b, k] = source.ready[b, k]
            target.device_pred[b, k] = source.device_pred[b, k]
    if len(source.link_pred) > 0:
        for b in range(source.link_pred.shape[0]):
            for k in range(source.link_pred.shape[1]):
                target.link_pred[b, k] = source.link_pred[b, k]


@kernel
def propose(
    rules: PathRules,
    counts: PathCounts,
    current: ScheduleState,
    candidate: ScheduleState,
    rng_state: Words,
    cycle: CycleParams,
    step_index: int,
) -> int:
    """Apply a random move at step ``step_index``.

    Returns the second microbatch changed (``b`` itself if there is none), or -1 if nothing changed.
    """
    steps = current.begin.shape[1]
    b, k = step_index // steps, step_index % steps
    shares, tail_weight = cycle.shares, cycle.tail_weight
    draw = next_unit(rng_state)
    cumulative_share = shares.overtake
    if draw < cumulative_share:
        return b if overtake(current, candidate.offset, step_index, tail_weight) else -1
    cumulative_share += shares.perturb
    if draw < cumulative_share:
        candidate.offset[b, k] += cycle.jitter * (2.0 * next_unit(rng_state) - 1.0)
        return int(b)
    cumulative_share += shares.reset
    if draw < cumulative_share:
        candidate.offset[b, k] = 0.0 if tail_weight >= 0.0 else current.ready[b, k]
        return int(b)
    cumulative_share += shares.device
    if draw < cumulative_share:
        return change_device(rules, counts, candidate.paths, b, rng_state)
    cumulative_share += shares.stage
    if draw < cumulative_share:
        return change_stage(rules, counts, candidate.paths, b, rng_state)
    cumulative_share += shares.exchange
    if draw < cumulative_share:
        return exchange_paths(candidate.paths, b, rng_state)
    return change_order(rules, candidate.paths, b, rng_state)


@kernel
def repair_order(
    data: ScheduleData, rules: PathRules, current: ScheduleState, candidate: ScheduleState, b: int
) -> bool:
    """Restore CC2 on a changed path and update its tail; False if the path is unchanged."""
    same = True
    for k in range(candidate.paths.shape[1]):
        same = same and candidate.paths[b, k] == current.paths[b, k]
    if same:
        return False
    ordered = in_order(candidate.paths[b], rules.stage, rules.max_swaps)
    # sorting the changed paths is enough: the unchanged ones were within the limit
    if not ordered or too_many_swaps(rules, candidate.paths):
        sort_path(candidate.paths[b], rules.stage)
    fill_tail(data, candidate.paths[b], candidate.tail[b])
    return True


@kernel
def try_device_exchange(annealing: AnnealingState, step_index: int) -> tuple[int, int]:
    """Exchange a step's device with that of another role, or move it to a vacant role.

    Returns both roles; -1, -1 if nothing was changed.
    """
    context, current, candidate = annealing.context, annealing.current, annealing.candidate
    steps = current.begin.shape[1]
    b, k = step_index // steps, step_index % steps
    role = device_at(current.paths[b], k)
    other_role = exchange_partner(
        context, annealing.counts, current.device_of, role, annealing.rng_state
    )
    if other_role < 0:
        return -1, -1
    is_vacant = current.device_of[other_role] == context.devices.vacant
    if is_vacant and not empty_role(
        context.rules, annealing.counts, candidate.paths, role, annealing.rng_state
    ):
        recount(annealing.counts, context.rules.stage, current.paths)
        copy_rows(current, candidate)
        return -1, -1
    exchange_devices(context, current.device_of, role, other_role)
    for m in range(len(candidate.paths)):
        fill_tail(context.data, candidate.paths[m], candidate.tail[m])
    return role, other_role


@kernel
def revert_device_exchange(annealing: AnnealingState, role: int, other_role: int) -> None:
    """Exchange the devices of two roles back."""
    exchange_devices(annealing.context, annealing.current.device_of, role, other_role)
    recount(annealing.counts, annealing.context.rules.stage, annealing.current.paths)
    copy_rows(annealing.current, annealing.candidate)


@kernel
def accept_device_exchange(annealing: AnnealingState) -> None:
    """Accept the exchange and the paths that it rerouted."""
    copy_rows(annealing.candidate, annealing.current)
    recount(annealing.counts, annealing.context.rules.stage, annealing.current.paths)


@kernel
def update_counts(
    counts: PathCounts,
    stage: Ints,
    current: ScheduleState,
    candidate: ScheduleState,
    b: int,
    c: int,
) -> None:
    """Update the counts from the paths of ``current`` to those of ``candidate``."""
    count_path(counts, stage, current.paths[b], -1)
    count_path(counts, stage, candidate.paths[b], 1)
    if c != b:
        count_path(counts, stage, current.paths[c], -1)
        count_path(counts, stage, candidate.paths[c], 1)


@kernel
def update_best(annealing: AnnealingState) -> None:
    """Make ``best`` a copy of ``current``."""
    copy_rows(annealing.current, annealing.best)
    copy_times(annealing.current, annealing.best)
    for d in range(len(annealing.current.device_of)):
        annealing.best.device_of[d] = annealing.current.device_of[d]


@kernel
def objective(
    data: ScheduleData, rules: PathRules, state: ScheduleState, rounds: Floats, makespan: float
) -> float:
    """The makespan, or with averaging the longest span of any stage."""
    if len(rounds) == 0 or makespan >= INFINITE_S:
        return makespan
    return longest_span(data, rules, state, rounds)


@allocating_entry
def anneal(annealing: AnnealingState, cycle: CycleParams, best_value: float) -> float:
    """Anneal in place and store the best solution in ``annealing.best``; returns its objective."""
    data, rules, counts = annealing.context.data, annealing.context.rules, annealing.counts
    current, candidate, rng_state = annealing.current, annealing.candidate, annealing.rng_state
    tail_weight, mean_weight = cycle.tail_weight, cycle.mean_weight
    steps, size = current.begin.shape[1], current.begin.size
    makespan = compute_schedule(data, current, tail_weight, INFINITE_S)
    mean = mean_end(data, current)
    averaging = annealing.context.averaging
    rounds, trial_rounds = np.zeros(len(averaging.vector)), np.zeros(len(averaging.vector))
    fill_rounds(averaging, rules, current.device_of, rounds)
    value = objective(data, rules, current, rounds, makespan)
    cost = value + mean_weight * mean
    critical = np.empty(size, dtype=np.int64)
    critical_count = critical_path(data, current, makespan, critical)
    copy_rows(current, candidate)
    temperature, cooling = cycle.t_start, (cycle.t_end / cycle.t_start) ** (1.0 / cycle.num_moves)
    for _ in range(cycle.num_moves):
        temperature *= cooling
        if critical_count > 0 and next_unit(rng_state) < cycle.critical_share:
            step_index = critical[next_below(rng_state, critical_count)]
        else:
            step_index = next_below(rng_state, size)
        b = step_index // steps
        partner, role, other_role, rerouted = b, -1, -1, False
        trial_rounds[:] = rounds
        if cycle.device_exchange_share > 0.0 and next_unit(rng_state) < cycle.device_exchange_share:
            role, other_role = try_device_exchange(annealing, step_index)
            if role < 0:
                continue
            fill_rounds(averaging, rules, current.device_of, trial_rounds)
        else:
            partner = propose(rules, counts, current, candidate, rng_state, cycle, step_index)
            if partner < 0:
                copy_row(current, candidate, b)
                continue
            rerouted = repair_order(data, rules, current, candidate, b)
            if partner != b:
                rerouted = repair_order(data, rules, current, candidate, partner) or rerouted
        # Metropolis with the threshold drawn first, so that scheduling can stop early
        threshold = cost - temperature * np.log(1.0 - next_unit(rng_state))
        # stage 0 runs the first F and the last B of all stages, then its averaging round
        round_s = trial_rounds[0] if len(trial_rounds) > 0 else 0.0
        span = compute_schedule(
            data,
            candidate,
            tail_weight,
            threshold - mean_weight * LEAST_MEAN_RATIO * mean - round_s,
        )
        new_mean = mean_end(data, candidate) if span < INFINITE_S else mean
        value = objective(data, rules, candidate, trial_rounds, span)
        if span >= INFINITE_S or value + mean_weight * new_mean > threshold:
            if role >= 0:
                revert_device_exchange(annealing, role, other_role)
            copy_row(current, candidate, b)
            copy_row(current, candidate, partner)
            continue
        if role >= 0:
            accept_device_exchange(annealing)
        if rerouted:
            update_counts(counts, rules.stage, current, candidate, b, partner)
        copy_row(candidate, current, b)
        copy_row(candidate, current, partner)
        copy_times(candidate, current)
        if tail_weight < 0.0:
            # the priorities to follow are the times of the accepted schedule
            current.offset[:] = current.begin
            candidate.offset[:] = current.begin
        cost, mean = value + mean_weight * new_mean, new_mean
        rounds[:] = trial_rounds
        critical_count = critical_path(data, current, span, critical)
        if value < best_value:
            best_value = value
            update_best(annealing)
    return best_value
