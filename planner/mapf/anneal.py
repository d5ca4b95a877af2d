"""Compiled simulated annealing over paths, priorities and, if they are free, the devices' roles.

Every step is timed by `timed`.
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
from planner.mapf.dispatch import LATE, DispatchState, Numbers, fill_tail
from planner.mapf.fixed_order import timed
from planner.mapf.moves import (
    PathRules,
    Use,
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


class MoveShares(NamedTuple):
    """How often each move is tried; what is left of 1 changes the order of two stages (CC2).

    Attributes
    ----------
    overtake
        Put a waiting step in front of the one that its device does before it.
    nudge
        Put a step off, or bring it forward, by a random time.
    forget
        Take such a nudge back.
    device
        Another device of the same stage.
    exchange
        Exchange the paths of two microbatches of different start devices.
    """

    overtake: float = 0.25
    nudge: float = 0.10
    forget: float = 0.05
    device: float = 0.25
    stage: float = 0.17
    exchange: float = 0.10


class Cycle(NamedTuple):
    """A part of an annealing cycle.

    Attributes
    ----------
    hot, cold
        First and last temperature, seconds.
    jitter
        Largest random nudge, seconds.
    rearrange
        Share of the proposals that exchange two devices.
    smooth
        Weight of the mean end of the microbatches beside the latest.
    critical
        Share of the proposals that begin at a step of a longest chain of waiting.
    shares
        Of the other moves.
    """

    moves: int
    hot: float
    cold: float
    pull: float
    jitter: float
    rearrange: float
    smooth: float
    critical: float
    shares: MoveShares


class Walk(NamedTuple):
    """Where annealing stands; everything is changed in place.

    Attributes
    ----------
    use
        Counts of the paths of ``now``.
    now, trial, best
        The state, a copy to try changes on, and the best state of the cycle.
    word
        State of the random generator.
    """

    setting: ExchangeContext
    use: Use
    now: DispatchState
    trial: DispatchState
    best: DispatchState
    word: Words


@kernel
def mean_end(num: Numbers, state: DispatchState) -> float:
    """Mean end of the microbatches."""
    total = 0.0
    for b in range(len(state.paths)):
        total += state.begin[b, -1] + num.backward[state.paths[b, 0]]
    return total / len(state.paths)


@kernel
def trace(num: Numbers, state: DispatchState, makespan: float, critical: Ints) -> int:
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
            # where messages waited for their link: to the one that did not, and who sent it
            if len(state.behind) > 0:
                while state.behind[at // steps, at % steps] >= 0:
                    at = state.behind[at // steps, at % steps]
            at -= 1
        else:
            at = -1
    return found


@kernel
def overtake(state: DispatchState, nudge: Floats, at: int, pull: float) -> bool:
    """Put a step that waits for its device in front of the one before it.

    If its message waited for a link, put the step that sent it in front of the one whose message
    went first.
    """
    steps = state.begin.shape[1]
    b, k = at // steps, at % steps
    other = state.before[b, k]
    queued = len(state.behind) > 0 and state.behind[b, k] >= 0
    if queued and state.begin[b, k] <= state.ready[b, k]:
        other = state.behind[b, k] - 1
        at -= 1
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


@kernel
def copy_row(source: DispatchState, target: DispatchState, b: int) -> None:
    """Path, tail and nudges of one microbatch."""
    for k in range(source.paths.shape[1]):
        target.paths[b, k] = source.paths[b, k]
    for k in range(source.tail.shape[1]):
        target.tail[b, k] = source.tail[b, k]
        target.nudge[b, k] = source.nudge[b, k]


@kernel
def copy_rows(source: DispatchState, target: DispatchState) -> None:
    """Paths, tails and nudges of all microbatches."""
    for b in range(len(source.paths)):
        copy_row(source, target, b)


@kernel
def copy_times(source: DispatchState, target: DispatchState) -> None:
    """What `timed` fills."""
    for b in range(source.begin.shape[0]):
        for k in range(source.begin.shape[1]):
            target.begin[b, k] = source.begin[b, k]
            target.ready[b, k] = source.ready[b, k]
            target.before[b, k] = source.before[b, k]
    if len(source.behind) > 0:
        for b in range(source.behind.shape[0]):
            for k in range(source.behind.shape[1]):
                target.behind[b, k] = source.behind[b, k]


@kernel
def propose(
    rules: PathRules,
    use: Use,
    now: DispatchState,
    trial: DispatchState,
    word: Words,
    cycle: Cycle,
    at: int,
) -> int:
    """Change ``trial`` at a step; the other microbatch changed (or the same), -1 for nothing."""
    steps = now.begin.shape[1]
    b, k = at // steps, at % steps
    shares, pull = cycle.shares, cycle.pull
    kind = next_unit(word)
    edge = shares.overtake
    if kind < edge:
        return b if overtake(now, trial.nudge, at, pull) else -1
    edge += shares.nudge
    if kind < edge:
        trial.nudge[b, k] += cycle.jitter * (2.0 * next_unit(word) - 1.0)
        return int(b)
    edge += shares.forget
    if kind < edge:
        trial.nudge[b, k] = 0.0 if pull >= 0.0 else now.ready[b, k]
        return int(b)
    edge += shares.device
    if kind < edge:
        return change_device(rules, use, trial.paths, b, word)
    edge += shares.stage
    if kind < edge:
        return change_stage(rules, use, trial.paths, b, word)
    edge += shares.exchange
    if kind < edge:
        return exchange_paths(trial.paths, b, word)
    return change_order(rules, trial.paths, b, word)


@kernel
def settle(
    num: Numbers, rules: PathRules, now: DispatchState, trial: DispatchState, b: int
) -> bool:
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


@kernel
def rearrange(walk: Walk, at: int) -> tuple[int, int]:
    """Exchange the device of a step with another, or let it move to a vacant role.

    Returns both roles; -1, -1 if nothing was changed.
    """
    setting, now, trial = walk.setting, walk.now, walk.trial
    steps, length = now.begin.shape[1], now.paths.shape[1]
    b, k = at // steps, at % steps
    one = now.paths[b, k if k < length else (2 * length - k if k > length else 0)]
    other = exchange_partner(setting, walk.use, now.device_of, one, walk.word)
    if other < 0:
        return -1, -1
    leaves = now.device_of[other] == setting.devices.vacant
    if leaves and not empty_role(setting.rules, walk.use, trial.paths, one, walk.word):
        recount(walk.use, setting.rules.stage, now.paths)
        copy_rows(now, trial)
        return -1, -1
    exchange_devices(setting, now.device_of, one, other)
    for m in range(len(trial.paths)):
        fill_tail(setting.num, trial.paths[m], trial.tail[m])
    return one, other


@kernel
def undo_rearrange(walk: Walk, one: int, other: int) -> None:
    """Exchange the devices of two roles back."""
    exchange_devices(walk.setting, walk.now.device_of, one, other)
    recount(walk.use, walk.setting.rules.stage, walk.now.paths)
    copy_rows(walk.now, walk.trial)


@kernel
def keep_rearrange(walk: Walk) -> None:
    """Keep the exchange and the paths that it sent elsewhere."""
    copy_rows(walk.trial, walk.now)
    recount(walk.use, walk.setting.rules.stage, walk.now.paths)


@kernel
def count_change(
    use: Use, stage: Ints, now: DispatchState, trial: DispatchState, b: int, c: int
) -> None:
    """Bring the counts from the paths of ``now`` to those of ``trial``."""
    count_path(use, stage, now.paths[b], -1)
    count_path(use, stage, trial.paths[b], 1)
    if c != b:
        count_path(use, stage, now.paths[c], -1)
        count_path(use, stage, trial.paths[c], 1)


@kernel
def keep_best(walk: Walk) -> None:
    """Make ``best`` a copy of ``now``."""
    copy_rows(walk.now, walk.best)
    copy_times(walk.now, walk.best)
    for d in range(len(walk.now.device_of)):
        walk.best.device_of[d] = walk.now.device_of[d]


@kernel
def objective(
    num: Numbers, rules: PathRules, state: DispatchState, rounds: Floats, makespan: float
) -> float:
    """The makespan, or where averaging counts the longest span of a stage."""
    if len(rounds) == 0 or makespan >= LATE:
        return makespan
    return longest_span(num, rules, state, rounds)


@allocating_entry
def anneal(walk: Walk, cycle: Cycle, best_value: float) -> float:
    """Anneal in place; keep the best in ``walk.best``."""
    num, rules, use = walk.setting.num, walk.setting.rules, walk.use
    now, trial, word = walk.now, walk.trial, walk.word
    pull, smooth = cycle.pull, cycle.smooth
    steps, size = now.begin.shape[1], now.begin.size
    makespan = timed(num, now, pull, LATE)
    mean = mean_end(num, now)
    averaging = walk.setting.averaging
    rounds, trial_rounds = np.zeros(len(averaging.vector)), np.zeros(len(averaging.vector))
    fill_rounds(averaging, rules, now.device_of, rounds)
    value = objective(num, rules, now, rounds, makespan)
    cost = value + smooth * mean
    critical = np.empty(size, dtype=np.int64)
    found = trace(num, now, makespan, critical)
    copy_rows(now, trial)
    heat, cooling = cycle.hot, (cycle.cold / cycle.hot) ** (1.0 / cycle.moves)
    for _ in range(cycle.moves):
        heat *= cooling
        if found > 0 and next_unit(word) < cycle.critical:
            at = critical[next_below(word, found)]
        else:
            at = next_below(word, size)
        b = at // steps
        c, one, other, rerouted = b, -1, -1, False
        trial_rounds[:] = rounds
        if cycle.rearrange > 0.0 and next_unit(word) < cycle.rearrange:
            one, other = rearrange(walk, at)
            if one < 0:
                continue
            fill_rounds(averaging, rules, now.device_of, trial_rounds)
        else:
            c = propose(rules, use, now, trial, word, cycle, at)
            if c < 0:
                copy_row(now, trial, b)
                continue
            rerouted = settle(num, rules, now, trial, b)
            if c != b:
                rerouted = settle(num, rules, now, trial, c) or rerouted
        # Metropolis: draw the threshold first, so that a hopeless decoding ends early
        threshold = cost - heat * np.log(1.0 - next_unit(word))
        # stage 0 does the first F and the last B of all, and then its round
        closing = trial_rounds[0] if len(trial_rounds) > 0 else 0.0
        span = timed(num, trial, pull, threshold - smooth * 0.9 * mean - closing)
        new_mean = mean_end(num, trial) if span < LATE else mean
        value = objective(num, rules, trial, trial_rounds, span)
        if span >= LATE or value + smooth * new_mean > threshold:
            if one >= 0:
                undo_rearrange(walk, one, other)
            copy_row(now, trial, b)
            copy_row(now, trial, c)
            continue
        if one >= 0:
            keep_rearrange(walk)
        if rerouted:
            count_change(use, rules.stage, now, trial, b, c)
        copy_row(trial, now, b)
        copy_row(trial, now, c)
        copy_times(trial, now)
        if pull < 0.0:
            # the list of times that is followed is that of the schedule itself
            now.nudge[:] = now.begin
            trial.nudge[:] = now.begin
        cost, mean = value + smooth * new_mean, new_mean
        rounds[:] = trial_rounds
        found = trace(num, now, span, critical)
        if value < best_value:
            best_value = value
            keep_best(walk)
    return best_value
