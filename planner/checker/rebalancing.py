"""Independent check of moves between stages: replays the trace from the definition.

Every peer is a row here, where solvers count peers by stage and kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from planner.checker.violation import Violation
from planner.problems.rebalancing import RebalancingPlan, RebalancingProblem, TimedMove


def check_rebalancing(plan: RebalancingPlan, problem: RebalancingProblem) -> list[Violation]:
    """Report the first rule that the moves break.

    References
    ----------
    M. Ryabinin et al., "SWARM Parallelism: Training Large Models Can Be Surprisingly
    Communication-Efficient" (2023), 4.4 and Appendix I.
    """
    wrong = list(_move_violations(plan, problem))
    return wrong[:1] or _TraceSimulation(problem).run(plan)


def mean_rate(plan: RebalancingPlan, problem: RebalancingProblem) -> float:
    """Mean microbatches per second over the trace."""
    simulation = _TraceSimulation(problem)
    simulation.run(plan)
    return simulation.done / problem.end_s


def mean_rate_bound(problem: RebalancingProblem) -> float:
    """Upper bound: at every moment all peers, downloading or not, are distributed optimally.

    With one kind of peers, greedily to the slowest stage; with several, fractionally.
    """
    serving = problem.serving.sum(axis=0).astype(float)
    begin_s, total = 0.0, 0.0
    events = zip(problem.time_s, problem.kind, problem.change, strict=True)
    for time_s, kind, change in events:
        total += (float(time_s) - begin_s) * _best_rate(problem, serving)
        begin_s = float(time_s)
        serving[kind] += change
    return (total + (problem.end_s - begin_s) * _best_rate(problem, serving)) / problem.end_s


def _best_rate(problem: RebalancingProblem, serving: NDArray[np.float64]) -> float:
    if len(problem.speed) > 1:
        return float(serving @ problem.speed / problem.work_s.sum())
    # each stage has at least its floored share of N - S peers; assign the rest greedily
    stages = len(problem.work_s)
    peers = int(serving[0])
    if peers < stages:
        return 0.0
    low = np.floor((peers - stages) * problem.work_s / problem.work_s.sum()).astype(int)
    counts = np.maximum(low, 1)
    for _ in range(peers - int(counts.sum())):
        counts[int(np.argmin(counts / problem.work_s))] += 1
    return float((counts / problem.work_s).min() * problem.speed[0])


def _move_violations(plan: RebalancingPlan, problem: RebalancingProblem) -> Iterator[Violation]:
    stages, kinds = problem.serving.shape
    previous = 0.0
    for k, move in enumerate(plan.moves):
        where = f"moves[{k}]"
        if not (math.isfinite(move.time_s) and previous <= move.time_s <= problem.end_s):
            message = f"must be {previous:g} to {problem.end_s:g} s, found {move.time_s}"
            yield Violation("time", where, message)
            return
        previous = move.time_s
        if not (0 <= move.source < stages and 0 <= move.target < stages):
            yield Violation("stages", where, f"must be 0 to {stages - 1}, found {move}")
        elif move.source == move.target or move.number < 1:
            yield Violation("move", where, f"must take 1 or more to another stage, found {move}")
        elif not 0 <= move.kind < kinds:
            yield Violation("kind", where, f"must be 0 to {kinds - 1}, found {move.kind}")


class _TraceSimulation:
    """Replay with individual peers, each given by the time it begins to serve."""

    def __init__(self, problem: RebalancingProblem) -> None:
        self.problem = problem
        stages, kinds = problem.serving.shape
        # [stage][kind]: when each peer begins to serve, -inf if it serves; in order of begin
        self.peers = [
            [[-math.inf] * int(problem.serving[s, k]) for k in range(kinds)] for s in range(stages)
        ]
        self.enters, self.leaves = iter(problem.enters.tolist()), iter(problem.leaves.tolist())
        self.now_s = 0.0
        self.done = 0.0

    def run(self, plan: RebalancingPlan) -> list[Violation]:
        problem = self.problem
        moves = {
            time_s: list(moves_then)
            for time_s, moves_then in groupby(plan.moves, lambda m: m.time_s)
        }
        events: dict[float, list[tuple[int, int]]] = {}
        for time_s, kind, change in zip(
            problem.time_s.tolist(), problem.kind.tolist(), problem.change.tolist(), strict=True
        ):
            events.setdefault(time_s, []).append((kind, change))
        number = 0
        for time_s in sorted({*moves, *events}):
            self._advance_to(time_s)
            for kind, change in events.get(time_s, ()):
                self._event(kind, change)
            for move in moves.get(time_s, ()):
                serving_peers = self.peers[move.source][move.kind]
                serving = sum(ready_s == -math.inf for ready_s in serving_peers)
                if move.number > serving:
                    message = f"{serving} serve there at {time_s:g} s, found {move}"
                    return [Violation("peers", f"moves[{number}]", message)]
                self._move(move)
                number += 1
        self._advance_to(problem.end_s)
        return []

    def _move(self, move: TimedMove) -> None:
        peers = self.peers[move.source][move.kind]
        del peers[: move.number]
        for _ in range(move.number):
            self._download(move.target, move.kind)

    def _download(self, stage: int, kind: int) -> None:
        peers = self.peers[stage][kind]
        if self.problem.download_s > 0:
            peers.append(self.now_s + self.problem.download_s)
        else:
            peers.insert(0, -math.inf)

    def _event(self, kind: int, change: int) -> None:
        for _ in range(change):
            self._download(next(self.enters), kind)
        for _ in range(-change):
            a, b = next(self.leaves)
            stage = int(a * len(self.peers))
            while not self.peers[stage][kind]:
                stage = (stage + 1) % len(self.peers)
            peers = self.peers[stage][kind]
            del peers[int(b * len(peers))]

    def _advance_to(self, time_s: float) -> None:
        """Advance to ``time_s``; peers whose downloads end before begin to serve."""
        while True:
            first_s = min(
                (r for stage in self.peers for peers in stage for r in peers if r > -math.inf),
                default=math.inf,
            )
            stop_s = min(first_s, time_s)
            self.done += (stop_s - self.now_s) * self._rate()
            self.now_s = stop_s
            if first_s > time_s:
                return
            for stage in self.peers:
                for peers in stage:
                    # stable sort: ready peers join the serving ones, the rest keep their order
                    peers.sort(key=lambda r: 0 if r <= stop_s else 1)
                    peers[:] = [-math.inf if r <= stop_s else r for r in peers]

    def _rate(self) -> float:
        speed: list[float] = self.problem.speed.tolist()
        rates: list[float] = [
            sum(speed[k] * sum(r == -math.inf for r in peers) for k, peers in enumerate(stage))
            / float(work)
            for stage, work in zip(self.peers, self.problem.work_s, strict=True)
        ]
        return min(rates)
