"""Compiled spans of stages, averaging included, for the arrangement search.

The objective of an arrangement with averaging is the longest span of any stage, from its first F to
its last B and through its averaging round. There is no barrier between steps, so this approximates
the step time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.mapf.arrays import PathArrays
from planner.mapf.list_scheduling import INFINITE_S, ScheduleData, ScheduleState
from planner.mapf.moves import PathRules
from planner.problems import ArrangedPathProblem
from planner.search.arrays import Floats, Floats2, Ints
from planner.search.compiled import entry


class StageAveragingSpans(NamedTuple):
    """Averaging data as in `planner.problems.GroupAveraging`, with the vacant device last.

    Arrays are empty if averaging is not part of the objective.

    Attributes
    ----------
    pair, line, away
        Seconds per byte per pair and per site line, and seconds of latency per pair.
    vacant
        Device index that marks a vacant role.
    """

    vector: Floats
    pair: Floats2
    line: Floats
    away: Floats2
    vacant: int

    @classmethod
    def none(cls) -> StageAveragingSpans:
        """No averaging: the objective is the makespan."""
        return cls(np.zeros(0), np.zeros((0, 0)), np.zeros(0), np.zeros((0, 0)), -1)

    @classmethod
    def of(cls, problem: ArrangedPathProblem) -> StageAveragingSpans:
        """From a problem, which need not have averaging."""
        averaging = problem.averaging
        if averaging is None:
            return cls.none()
        return cls(
            averaging.vector_bytes.copy(),
            np.pad(averaging.pair_s_per_byte, (0, 1)),
            np.pad(averaging.line_s_per_byte, (0, 1)),
            np.pad(averaging.away_s, (0, 1)),
            len(problem),
        )


@entry
def fill_rounds(
    averaging: StageAveragingSpans, rules: PathRules, device_of: Ints, rounds: Floats
) -> None:
    """Fill the duration of every stage's averaging round with its current devices."""
    for s in range(len(rounds)):
        pair, line, away, members = 0.0, 0.0, 0.0, 0
        for i in range(rules.stage_ptr[s], rules.stage_ptr[s + 1]):
            d = device_of[rules.members[i]]
            if d == averaging.vacant:
                continue
            members += 1
            line = max(line, averaging.line[d])
            for j in range(rules.stage_ptr[s], i):
                e = device_of[rules.members[j]]
                if e != averaging.vacant:
                    pair = max(pair, averaging.pair[d, e])
                    away = max(away, averaging.away[d, e])
        rounds[s] = 0.0
        if members > 1:
            share = 2.0 * averaging.vector[s] / members
            rounds[s] = max(share * pair, share * (members - 1) * line) + away


@entry
def longest_span(
    data: ScheduleData, rules: PathRules, state: ScheduleState, rounds: Floats
) -> float:
    """Longest span of any stage from its first F to the end of its round, seconds."""
    count, length = state.paths.shape
    first, last = state.scratch.stage_first, state.scratch.stage_last
    first[:] = INFINITE_S
    last[:] = 0.0
    for b in range(count):
        for k in range(length):
            d = state.paths[b, k]
            s = rules.stage[d]
            first[s] = min(first[s], state.begin[b, k])
            last[s] = max(last[s], state.begin[b, 2 * length - k] + data.backward[d])
    longest = 0.0
    for s in range(len(rounds)):
        span = rounds[s]
        if first[s] < INFINITE_S:
            span += last[s] - first[s]
        longest = max(longest, span)
    return longest


def span_of(
    problem: ArrangedPathProblem, arrays: PathArrays, paths: Ints, begin: Floats, device_of: Ints
) -> float:
    """Objective of scheduled paths over roles, seconds."""
    rounds = np.zeros(len(arrays.min_visits))
    rules, data = PathRules.of(arrays), ScheduleData.of(arrays)
    filled = np.flatnonzero(device_of < len(problem))
    data.backward[filled] = problem.backward_s[arrays.stage[filled], device_of[filled]]
    fill_rounds(StageAveragingSpans.of(problem), rules, device_of, rounds)
    state = ScheduleState.of(arrays, paths)
    state.begin[:] = begin
    return float(longest_span(data, rules, state, rounds))
