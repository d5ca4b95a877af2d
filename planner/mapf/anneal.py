"""Compiled simulated annealing over paths, priorities and, if they are free, the devices' roles.

Every step is timed by `timed`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from planner.mapf.dispatch import LATE, Numbers, State, fill_tail
from planner.mapf.follow import timed
from planner.mapf.moves import (
    Rules,
    Use,
    Word,
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
from planner.mapf.seats import Seats, exchange, partner, vacate
from planner.mapf.tables import Floats, Ints
from planner.search.rng import next_below, next_unit


@njit(cache=True, nogil=True)
def mean_end(num: Numbers, state: State) -> float:
    """Mean end of the microbatches."""
    total = 0.0
    for b in range(len(state.paths)):
        total += state.begin[b, -1] + num.backward[state.paths[b, 0]]
    return total / len(state.paths)


@njit(cache=True, nogil=True)
def trace(num: Numbers, state: State, makespan: float, critical: Ints) -> int:
    """Steps on a longest chain of waiting, as ``b * steps + k``; returns how many."""
    count, steps = state.begin.shape
    at = -1
    for b in range(count):
        if state.begin[b, steps - 1] + num.backward[state.paths[b, 0]] >= makespan * (1 - 1e-12):
            at = b * steps + steps - 1
            break
    found = 0
    while at >= 0 and found < len(critical):
        critical[found] = at
        found += 1
        b, k = at // steps, at % steps
        if state.begin[b, k] > state.ready[b, k]:
            # with live memory the wait may be for memory: the device's last step is a fair guess
            at = state.before[b, k]
        elif k > 0:
            at -= 1
        else:
            at = -1
    return found


@njit(cache=True, nogil=True)
def overtake(state: State, nudge: Floats, at: int, pull: float) -> bool:
    """Put a step that waits for its device in front of the one before it."""
    steps = state.begin.shape[1]
    other = state.before[at // steps, at % steps]
    if other < 0 or other // steps == at // steps:
        return False
    b, k, c, j = at // steps, at % steps, other // steps, other % steps
    if pull < 0.0:
        nudge[b, k] = state.nudge[c, j] - 1e-6
        return True
    key = state.begin[c, j] - pull * state.tail[c, j] + state.nudge[c, j]
    mine = max(state.ready[b, k], state.begin[c, j]) - pull * state.tail[b, k]
    nudge[b, k] = key - mine - 1e-6
    return True


@njit(cache=True, nogil=True)
def copy_row(source: State, target: State, b: int) -> None:
    """Path, tail and nudges of one microbatch."""
    target.paths[b] = source.paths[b]
    target.tail[b] = source.tail[b]
    target.nudge[b] = source.nudge[b]


@njit(cache=True, nogil=True)
def copy_times(source: State, target: State) -> None:
    """What `timed` fills."""
    target.begin[:] = source.begin
    target.ready[:] = source.ready
    target.before[:] = source.before


@njit(cache=True, nogil=True)
def propose(
    rules: Rules,
    use: Use,
    now: State,
    trial: State,
    at: int,
    word: Word,
    pull: float,
    jitter: float,
) -> int:
    """Change a copy at a step; the other microbatch changed (or the same), -1 for nothing."""
    steps = now.begin.shape[1]
    b, k = at // steps, at % steps
    kind = next_unit(word)
    if kind < 0.25:
        return b if overtake(now, trial.nudge, at, pull) else -1
    if kind < 0.35:
        trial.nudge[b, k] += jitter * (2.0 * next_unit(word) - 1.0)
        return int(b)
    if kind < 0.40:
        trial.nudge[b, k] = 0.0 if pull >= 0.0 else now.ready[b, k]
        return int(b)
    if kind < 0.65:
        return change_device(rules, use, trial.paths, b, word)
    if kind < 0.82:
        return change_stage(rules, use, trial.paths, b, word)
    if kind < 0.92:
        return exchange_paths(trial.paths, b, word)
    return change_order(rules, trial.paths, b, word)


@njit(cache=True, nogil=True)
def settle(num: Numbers, rules: Rules, now: State, trial: State, b: int) -> bool:
    """Bring a changed path into a valid order and measure its chain; False if it is unchanged."""
    same = True
    for k in range(trial.paths.shape[1]):
        same = same and trial.paths[b, k] == now.paths[b, k]
    if same:
        return False
    ordered = in_order(trial.paths[b], rules.stage, rules.max_swaps)
    # sorting the paths that changed is enough: the others were within the limit
    if not ordered or too_many_swaps(rules, trial.paths):
        sort_path(trial.paths[b], rules.stage)
    fill_tail(num, trial.paths[b], trial.tail[b])
    return True


@njit(cache=True, nogil=True)
def anneal(
    num: Numbers,
    rules: Rules,
    seats: Seats,
    use: Use,
    now: State,
    trial: State,
    best: State,
    best_makespan: float,
    word: Word,
    moves: int,
    hot: float,
    cold: float,
    pull: float,
    jitter: float,
    rearrange: float,
    smooth: float,
) -> float:
    """Anneal in place from ``hot`` to ``cold`` seconds; keep the best in ``best``.

    ``trial`` is a scratch copy of ``now``. A share ``rearrange`` of the moves exchange two devices,
    which changes ``num`` and ``rules`` too; ``smooth`` weighs the mean end of the microbatches
    beside the latest. Returns the smallest makespan so far, ``best_makespan``
    at most.
    """
    count, length = now.paths.shape
    steps = 2 * length + 1
    makespan = timed(num, now, pull, LATE)
    mean = mean_end(num, now)
    cost = makespan + smooth * mean
    critical = np.empty(count * steps, dtype=np.int64)
    found = trace(num, now, makespan, critical)
    for b in range(count):
        copy_row(now, trial, b)
    heat, cooling = hot, (cold / hot) ** (1.0 / moves)
    for _ in range(moves):
        heat *= cooling
        if found > 0 and next_unit(word) < 0.6:
            at = critical[next_below(word, found)]
        else:
            at = next_below(word, count * steps)
        b = at // steps
        c, one, other, rerouted = b, -1, -1, False
        if rearrange > 0.0 and next_unit(word) < rearrange:
            k = at % steps
            one = now.paths[b, k if k < length else (2 * length - k if k > length else 0)]
            other = partner(seats, rules, use, now.seat, one, word)
            if other < 0:
                continue
            leaves = now.seat[other] == seats.vacant
            if leaves and not vacate(rules, use, trial.paths, one, word):
                recount(use, rules.stage, now.paths)
                for m in range(count):
                    copy_row(now, trial, m)
                continue
            exchange(seats, num, rules, now.seat, one, other)
            for m in range(count):
                fill_tail(num, trial.paths[m], trial.tail[m])
        else:
            c = propose(rules, use, now, trial, at, word, pull, jitter)
            if c < 0:
                copy_row(now, trial, b)
                continue
            rerouted = settle(num, rules, now, trial, b)
            if c != b:
                rerouted = settle(num, rules, now, trial, c) or rerouted
        # Metropolis: draw the threshold first, so that a hopeless decoding ends early
        threshold = cost - heat * np.log(1.0 - next_unit(word))
        value = timed(num, trial, pull, threshold - smooth * 0.9 * mean)
        accept = False
        if value < LATE:
            new_mean = mean_end(num, trial)
            accept = value + smooth * new_mean <= threshold
        if not accept:
            if one >= 0:
                exchange(seats, num, rules, now.seat, one, other)
                recount(use, rules.stage, now.paths)
                for m in range(count):
                    copy_row(now, trial, m)
            copy_row(now, trial, b)
            copy_row(now, trial, c)
            continue
        if one >= 0:
            for m in range(count):
                copy_row(trial, now, m)
            recount(use, rules.stage, now.paths)
        if rerouted:
            count_path(use, rules.stage, now.paths[b], -1)
            count_path(use, rules.stage, trial.paths[b], 1)
            if c != b:
                count_path(use, rules.stage, now.paths[c], -1)
                count_path(use, rules.stage, trial.paths[c], 1)
        copy_row(trial, now, b)
        copy_row(trial, now, c)
        copy_times(trial, now)
        if pull < 0.0:
            # the list of times that is followed is that of the schedule itself
            now.nudge[:] = now.begin
            trial.nudge[:] = now.begin
        cost, mean, makespan = value + smooth * new_mean, new_mean, value
        found = trace(num, now, makespan, critical)
        if makespan < best_makespan:
            best_makespan = makespan
            for m in range(count):
                copy_row(now, best, m)
            copy_times(now, best)
            best.seat[:] = now.seat
    return best_makespan
