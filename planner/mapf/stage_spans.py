"""Compiled: how long stages are busy with a step, averaging included, while devices change places.

The objective of an arrangement whose averaging counts: the longest that a stage takes from its
first F to its last B and through its round. There is no barrier between steps, so this is about
what a step takes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.dispatch import LATE, DispatchState, Numbers
from planner.mapf.moves import PathRules
from planner.problems import ArrangedPathProblem
from planner.search.arrays import Floats, Floats2, Ints
from planner.search.compiled import entry


class StageAveragingSpans(NamedTuple):
    """As in `planner.problems.GroupAveraging`, the vacant device last; empty where none counts.

    Attributes
    ----------
    pair, line, away
        Per pair and device.
    vacant
        The device that stands for none.
    """

    vector: Floats
    pair: Floats2
    line: Floats
    away: Floats2
    vacant: int

    @classmethod
    def none(cls) -> StageAveragingSpans:
        """Averaging does not count: the objective is the makespan."""
        return cls(np.zeros(0), np.zeros((0, 0)), np.zeros(0), np.zeros((0, 0)), -1)

    @classmethod
    def of(cls, problem: ArrangedPathProblem) -> StageAveragingSpans:
        """What a problem says of it."""
        given = problem.averaging
        if given is None:
            return cls.none()
        return cls(
            given.vector_bytes.copy(),
            np.pad(given.pair_s_per_byte, (0, 1)),
            np.pad(given.line_s_per_byte, (0, 1)),
            np.pad(given.away_s, (0, 1)),
            len(problem),
        )


@entry
def fill_rounds(
    averaging: StageAveragingSpans, rules: PathRules, device_of: Ints, rounds: Floats
) -> None:
    """Seconds of every stage's round with the devices that fill its roles now."""
    for s in range(len(rounds)):
        pair, line, away, members = 0.0, 0.0, 0.0, 0
        for i in range(rules.first[s], rules.first[s + 1]):
            d = device_of[rules.members[i]]
            if d == averaging.vacant:
                continue
            members += 1
            line = max(line, averaging.line[d])
            for j in range(rules.first[s], i):
                e = device_of[rules.members[j]]
                if e != averaging.vacant:
                    pair = max(pair, averaging.pair[d, e])
                    away = max(away, averaging.away[d, e])
        rounds[s] = 0.0
        if members > 1:
            share = 2.0 * averaging.vector[s] / members
            rounds[s] = max(share * pair, share * (members - 1) * line) + away


@entry
def longest_span(num: Numbers, rules: PathRules, state: DispatchState, rounds: Floats) -> float:
    """The longest of any stage's first F to the end of its round, seconds."""
    count, length = state.paths.shape
    first, last = state.scratch.first, state.scratch.last
    first[:] = LATE
    last[:] = 0.0
    for b in range(count):
        for k in range(length):
            d = state.paths[b, k]
            s = rules.stage[d]
            first[s] = min(first[s], state.begin[b, k])
            last[s] = max(last[s], state.begin[b, 2 * length - k] + num.backward[d])
    longest = 0.0
    for s in range(len(rounds)):
        span = rounds[s]
        if first[s] < LATE:
            span += last[s] - first[s]
        longest = max(longest, span)
    return longest


def span_of(
    problem: ArrangedPathProblem, arrays: PathArrays, paths: Ints, begin: Floats, device_of: Ints
) -> float:
    """The objective of paths over roles, seconds."""
    rounds = np.zeros(len(arrays.fewest))
    rules, num = PathRules.of(arrays), Numbers.of(arrays)
    filled = np.flatnonzero(device_of < len(problem))
    num.backward[filled] = problem.backward_s[arrays.stage[filled], device_of[filled]]
    fill_rounds(StageAveragingSpans.of(problem), rules, device_of, rounds)
    state = DispatchState.of(arrays, paths)
    state.begin[:] = begin
    return float(longest_span(num, rules, state, rounds))
