"""SkipPipe as a flexible job shop with transport times: one CP-SAT model of paths and times.

Per microbatch a circuit through its start device and the devices it visits (CC1, CC2), optional
intervals of F and B on each device, H on the start device; no overlap per device (TC2), counts per
stage (CC3), and memory as a count of paths or of live microbatches (TC1).

Times are integers, rounded down, so that the model's bound holds for the real problem; orders are
taken from its solutions and timed again exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ortools.sat.python import cp_model

from planner.parts import PathPlan
from planner.problems import PathProblem

TICKS = 1 << 20
"""Integer steps of the horizon: rounding costs less than 1e-5 of the makespan."""


@dataclass
class PathModel:
    """The model and its variables.

    Attributes
    ----------
    tick_s
        Seconds of one integer step.
    arcs
        Per microbatch, the literal of each arc ``(u, v)``; ``(last, start)`` closes the circuit.
    start
        ``(microbatch, kind, device)``: start of an operation.
    """

    problem: PathProblem
    model: cp_model.CpModel
    tick_s: float
    arcs: list[dict[tuple[int, int], Any]]
    start: dict[tuple[int, str, int], Any]
    makespan: Any

    def paths(self, value: Any) -> list[list[int]]:
        """Paths of a solution; ``value`` maps a literal to 0 or 1."""
        found = []
        for b, first in enumerate(self.problem.starts):
            after = {u: v for (u, v), literal in self.arcs[b].items() if value(literal)}
            path = [first]
            while after.get(path[-1], first) != first:
                path.append(after[path[-1]])
            found.append(path)
        return found

    def ranks(self, value: Any, paths: Sequence[Sequence[int]]) -> dict[tuple[int, str, int], int]:
        """Start in ticks of every operation on the paths."""
        ranks = {}
        for b, path in enumerate(paths):
            ranks[b, "H", path[0]] = int(value(self.start[b, "H", path[0]]))
            for d in path:
                for kind in "FB":
                    ranks[b, kind, d] = int(value(self.start[b, kind, d]))
        return ranks

    def hint(self, plan: PathPlan) -> None:
        """Offer a plan as a starting point."""
        self.model.clear_hints()
        for b, path in enumerate(plan.paths):
            used = set(zip(path, [*path[1:], path[0]], strict=True))
            for arc, literal in self.arcs[b].items():
                self.model.add_hint(literal, arc in used)
        for op in plan.ops:
            tick = math.floor(op.start_s / self.tick_s)
            self.model.add_hint(self.start[op.microbatch, op.kind, op.device], tick)
        self.model.add_hint(self.makespan, math.floor(plan.makespan_s / self.tick_s))


def allowed_arcs(problem: PathProblem, start: int) -> list[tuple[int, int]]:
    """Arcs of one microbatch: stages ascend, or go back by one where a swap is allowed."""
    stage = problem.stage_of
    others = [d for d in range(len(problem)) if stage[d] > 0]
    arcs = [(start, v) for v in others]
    for u in others:
        for v in others:
            back = problem.max_swaps > 0 and stage[v] == stage[u] - 1
            if stage[v] > stage[u] or back:
                arcs.append((u, v))
    return arcs


def build(problem: PathProblem, horizon_s: float) -> PathModel:
    """The model for all schedules that end within ``horizon_s``."""
    model = cp_model.CpModel()
    tick = max(horizon_s, 1e-9) / TICKS
    horizon = TICKS

    def ticks(seconds: float) -> int:
        return math.floor(seconds / tick * (1 - 1e-12))

    stage = problem.stage_of
    n = len(problem)
    starts = problem.starts
    forward = [ticks(x) for x in problem.forward_s.tolist()]
    backward = [ticks(x) for x in problem.backward_s.tolist()]
    head = [ticks(x) for x in problem.head_s.tolist()]
    hop = [[ticks(x) for x in row] for row in problem.transfer_s.tolist()]
    makespan = model.new_int_var(0, horizon, "makespan")
    arcs: list[dict[tuple[int, int], Any]] = []
    start: dict[tuple[int, str, int], Any] = {}
    intervals: list[list[Any]] = [[] for _ in range(n)]
    live: list[list[Any]] = [[] for _ in range(n)]
    visits: dict[int, list[Any]] = {d: [] for d in range(n)}
    for b, first in enumerate(starts):
        mine: dict[tuple[int, int], Any] = {}
        circuit: list[tuple[int, int, Any]] = []
        others = [d for d in range(n) if stage[d] > 0]
        present = {d: model.new_bool_var(f"on{b},{d}") for d in others}
        for d in others:
            circuit.append((d, d, present[d].negated()))
            visits[d].append(present[d])
        for u, v in allowed_arcs(problem, first):
            mine[u, v] = model.new_bool_var(f"arc{b},{u},{v}")
            circuit.append((u, v, mine[u, v]))
        for u in others:
            mine[u, first] = model.new_bool_var(f"last{b},{u}")
            circuit.append((u, first, mine[u, first]))
        if problem.path_stages > 1:
            index = {d: k for k, d in enumerate([first, *others])}
            model.add_circuit([(index[u], index[v], x) for u, v, x in circuit])
            model.add(sum(present.values()) == problem.path_stages - 1)
        else:
            for x in [*present.values(), *mine.values()]:
                model.add(x == 0)
        for s in range(1, len(problem.stage_devices)):
            model.add_at_most_one(present[d] for d in problem.stage_devices[s])
        back = [x for (u, v), x in mine.items() if v != first and 0 < stage[v] < stage[u]]
        if back:
            model.add(sum(back) <= problem.max_swaps)
        if problem.max_swaps > 1:
            for d in others:  # pairs that swap share no stage
                ends = [
                    x
                    for (u, v), x in mine.items()
                    if d in (u, v) and v != first and 0 < stage[v] < stage[u]
                ]
                if len(ends) > 1:
                    model.add_at_most_one(ends)
        for d in [first, *others]:
            for kind, size in (("F", forward[d]), ("B", backward[d])):
                t = model.new_int_var(0, horizon, f"{kind}{b},{d}")
                start[b, kind, d] = t
                if d == first:
                    intervals[d].append(model.new_fixed_size_interval_var(t, size, ""))
                else:
                    intervals[d].append(
                        model.new_optional_fixed_size_interval_var(t, size, present[d], "")
                    )
            if problem.live_memory:
                begin, end = start[b, "F", d], model.new_int_var(0, horizon, "")
                size = model.new_int_var(0, horizon, "")
                model.add(end == start[b, "B", d] + backward[d])
                held = (
                    model.new_interval_var(begin, size, end, "")
                    if d == first
                    else model.new_optional_interval_var(begin, size, end, present[d], "")
                )
                live[d].append(held)
        t = model.new_int_var(0, horizon, f"H{b}")
        start[b, "H", first] = t
        intervals[first].append(model.new_fixed_size_interval_var(t, head[first], ""))
        model.add(makespan >= start[b, "B", first] + backward[first])
        _chain(model, problem, b, first, mine, start, forward, backward, head, hop)
        arcs.append(mine)
    for d in range(n):
        model.add_no_overlap(intervals[d])
        if problem.live_memory:
            model.add_cumulative(live[d], [1] * len(live[d]), int(problem.memory[d]))
        elif visits[d]:
            model.add(sum(visits[d]) <= int(problem.memory[d]))
        _load(model, problem, d, visits[d], starts, forward, backward, head, makespan)
    fewest, most = problem.visits
    for s in range(1, len(problem.stage_devices)):
        through = sum(x for d in problem.stage_devices[s] for x in visits[d])
        model.add_linear_constraint(through, fewest, most)
    for b in range(len(starts) - 1):  # microbatches of one device are alike
        if starts[b] == starts[b + 1]:
            model.add(start[b, "F", starts[b]] + forward[starts[b]] <= start[b + 1, "F", starts[b]])
    model.minimize(makespan)
    return PathModel(problem, model, tick, arcs, start, makespan)


def _chain(
    model: cp_model.CpModel,
    problem: PathProblem,
    b: int,
    first: int,
    mine: dict[tuple[int, int], Any],
    start: dict[tuple[int, str, int], Any],
    forward: list[int],
    backward: list[int],
    head: list[int],
    hop: list[list[int]],
) -> None:
    """F along the path, H, B back: each waits for the one before and its transfer."""
    h = start[b, "H", first]
    if problem.path_stages == 1:
        model.add(h >= start[b, "F", first] + forward[first])
        model.add(start[b, "B", first] >= h + head[first])
        return
    # the whole chain at once, which the linear relaxation can use
    out = sum(x * (hop[u][v] + (forward[v] if v != first else 0)) for (u, v), x in mine.items())
    home = sum(x * (hop[v][u] + (backward[v] if v != first else 0)) for (u, v), x in mine.items())
    model.add(h >= start[b, "F", first] + forward[first] + out)
    model.add(start[b, "B", first] >= h + head[first] + home)
    for (u, v), x in mine.items():
        if v == first:
            model.add(h >= start[b, "F", u] + forward[u] + hop[u][first]).only_enforce_if(x)
            model.add(start[b, "B", u] >= h + head[first] + hop[first][u]).only_enforce_if(x)
        else:
            model.add(
                start[b, "F", v] >= start[b, "F", u] + forward[u] + hop[u][v]
            ).only_enforce_if(x)
            model.add(
                start[b, "B", u] >= start[b, "B", v] + backward[v] + hop[v][u]
            ).only_enforce_if(x)


def _load(
    model: cp_model.CpModel,
    problem: PathProblem,
    d: int,
    visits: list[Any],
    starts: tuple[int, ...],
    forward: list[int],
    backward: list[int],
    head: list[int],
    makespan: Any,
) -> None:
    """A device's work fits between the earliest arrival and the latest departure."""
    if d in starts:
        count = starts.count(d)
        model.add(makespan >= count * (forward[d] + head[d] + backward[d]))
    elif visits:
        model.add(makespan >= sum(visits) * (forward[d] + backward[d]))
