"""SkipPipe as a flexible job shop with transport times: a CP-SAT model with a literal per path.

Every microbatch chooses one of its paths (CC1, CC2). F and B are optional intervals on each device,
H is an interval on the start device. Intervals of a device do not overlap (TC2), stages have a
minimum and maximum number of visits (CC3), and memory limits paths or live microbatches (TC1). With
all paths as options the model is exact; with a few it is an LNS neighbourhood; with one path per
microbatch it is a scheduling problem.

Where links queue (``link_s``), every message is an optional interval on its link, and a link's
intervals do not overlap. Messages leave in the order in which their operations end (FIFO), modelled
by a literal for every pair of messages of a link if there are few such pairs. Otherwise the order
is relaxed: the bound remains valid, and solutions are rescheduled with FIFO links.

Durations are rounded down to integers, so that the model's bound is valid; the order of operations
is taken from its solutions and scheduled exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from planner.mapf.moves import count_swaps
from planner.mapf.path_enumeration import Path
from planner.problems import PathProblem
from planner.problems.answers import PathOp, PathPlan

TICKS = 1 << 24
"""Integer time steps of the horizon; rounding changes the makespan by less than 1e-6."""

MAX_RANKED = 8
"""Maximum number of microbatches per start device whose order of B is an assignment."""

MAX_ORDERED_PAIRS = 4000
"""Maximum number of pairs of messages on a link for which FIFO order is modelled."""

Key = tuple[int, str, int]


@dataclass(frozen=True)
class _Message:
    """Message on a link: start and length of the sending operation, and departure."""

    start: Any
    length: int
    departs: Any
    present: Any


@dataclass
class PathModel:
    """A CP-SAT model and its variables.

    Attributes
    ----------
    tick_s
        Seconds of one integer step.
    options, chosen
        Paths of each microbatch, and a literal for each path; no literals for a single path.
    start
        ``(microbatch, kind, device)``: start of an operation.
    """

    problem: PathProblem
    model: cp_model.CpModel
    tick_s: float
    options: Sequence[Sequence[Path]]
    chosen: list[list[Any]]
    start: dict[Key, Any]
    makespan: Any

    def paths(self, value: Any) -> list[Path]:
        """Chosen paths of a solution; ``value`` maps a literal to 0 or 1."""
        return [
            options[0] if not chosen else options[[bool(value(x)) for x in chosen].index(True)]
            for options, chosen in zip(self.options, self.chosen, strict=True)
        ]

    def ranks(self, value: Any, paths: Sequence[Path]) -> dict[Key, int]:
        """Start in ticks of every operation on the paths."""
        ranks = {}
        for b, path in enumerate(paths):
            ranks[b, "H", path[0]] = int(value(self.start[b, "H", path[0]]))
            for d in path:
                for kind in "FB":
                    ranks[b, kind, d] = int(value(self.start[b, kind, d]))
        return ranks

    def hint(self, plan: PathPlan) -> None:
        """Add a plan as a solution hint."""
        for path, options, chosen in zip(plan.paths, self.options, self.chosen, strict=True):
            for option, x in zip(options, chosen, strict=False):
                self.model.add_hint(x, option == path)
        for op in plan.ops:
            t = self.start.get((op.microbatch, op.kind, op.device))
            if t is not None:
                self.model.add_hint(t, math.floor(op.start_s / self.tick_s))
        self.model.add_hint(self.makespan, math.floor(plan.makespan_s / self.tick_s))


class _ModelBuilder:
    """State while a model is built; times in ticks."""

    def __init__(
        self,
        problem: PathProblem,
        options: Sequence[Sequence[Path]],
        horizon_s: float,
        steps: int,
    ) -> None:
        self.problem = problem
        self.options = options
        self.model = cp_model.CpModel()
        self.steps = steps
        self.tick = max(horizon_s, 1e-9) / steps
        self.forward = [self.ticks(x) for x in problem.forward_s.tolist()]
        self.backward = [self.ticks(x) for x in problem.backward_s.tolist()]
        self.head = [self.ticks(x) for x in problem.head_s.tolist()]
        self.transfer = [[self.ticks(x) for x in row] for row in problem.transfer_s.tolist()]
        self.link: list[list[int]] | None = None
        if problem.link_s is not None:
            self.link = [[self.ticks(x) for x in row] for row in problem.link_s.tolist()]
        self.messages: dict[tuple[int, int], list[_Message]] = {}
        self.makespan = self.model.new_int_var(0, steps, "makespan")
        n = len(problem)
        self.start: dict[Key, Any] = {}
        self.device_intervals: list[list[Any]] = [[] for _ in range(n)]
        self.memory_intervals: list[list[Any]] = [[] for _ in range(n)]
        self.visits: list[list[Any]] = [[] for _ in range(n)]
        self.chosen: list[list[Any]] = []

    def ticks(self, seconds: float) -> int:
        return math.floor(seconds / self.tick * (1 - 1e-12))

    def new_time(self) -> Any:
        return self.model.new_int_var(0, self.steps, "")

    def add_microbatch(self, b: int) -> None:
        """Add path choice, intervals and precedences of a microbatch."""
        model, options = self.model, self.options[b]
        first = options[0][0]
        chosen = [model.new_bool_var("") for _ in options] if len(options) > 1 else []
        self.chosen.append(chosen)
        if chosen:
            model.add_exactly_one(chosen)
        literals_of_device: dict[int, list[Any]] = {}
        arcs: dict[tuple[int, int], list[Any]] = {}
        for k, path in enumerate(options):
            x = chosen[k] if chosen else None
            for d in path[1:]:
                literals_of_device.setdefault(d, []).append(x)
            for arc in zip(path, [*path[1:], first], strict=True):
                arcs.setdefault(arc, []).append(x)
        self.add_visit(b, first, None)
        for d, literals in literals_of_device.items():
            self.add_visit(b, d, self.any_of(literals, len(options)))
        head = self.start[b, "H", first] = self.new_time()
        self.device_intervals[first].append(
            model.new_fixed_size_interval_var(head, self.head[first], "")
        )
        model.add(self.makespan >= self.start[b, "B", first] + self.backward[first])
        for (u, v), literals in arcs.items():
            self.add_arc(b, u, v, first, self.any_of(literals, len(options)))
        self.add_chain_bounds(b, options, chosen)

    def any_of(self, literals: list[Any], count: int) -> Any:
        """A literal for the disjunction of exclusive literals; None if it is always true."""
        if len(literals) == count:
            return None
        if len(literals) == 1:
            return literals[0]
        total = self.model.new_bool_var("")
        self.model.add(sum(literals) == total)
        return total

    def add_visit(self, b: int, d: int, x: Any) -> None:
        """Add F and B on a device that the microbatch visits if ``x`` is true."""
        model = self.model
        for kind, size in (("F", self.forward[d]), ("B", self.backward[d])):
            t = self.start[b, kind, d] = self.new_time()
            self.device_intervals[d].append(
                model.new_fixed_size_interval_var(t, size, "")
                if x is None
                else model.new_optional_fixed_size_interval_var(t, size, x, "")
            )
        self.visits[d].append(1 if x is None else x)
        if self.problem.live_memory and self.problem.memory[d] < len(self.options):
            size, end = self.new_time(), self.start[b, "B", d] + self.backward[d]
            begin = self.start[b, "F", d]
            self.memory_intervals[d].append(
                model.new_interval_var(begin, size, end, "")
                if x is None
                else model.new_optional_interval_var(begin, size, end, x, "")
            )

    def add_arc(self, b: int, u: int, v: int, first: int, x: Any) -> None:
        """Add precedences of arc (u, v): F before F or H, and on the way back H or B before B."""
        start = self.start
        after, kind, seconds = start[b, "F" if v != first else "H", v], "B", self.backward[v]
        if v == first:
            kind, seconds = "H", self.head[first]
        forward_arrival = self.arrival(start[b, "F", u], self.forward[u], u, v, x)
        backward_arrival = self.arrival(start[b, kind, v], seconds, v, u, x)
        for rule in (
            self.model.add(after >= forward_arrival),
            self.model.add(start[b, "B", u] >= backward_arrival),
        ):
            if x is not None:
                rule.only_enforce_if(x)

    def arrival(self, start: Any, length: int, u: int, v: int, x: Any) -> Any:
        """Arrival on v of the message of an operation on u, if arc (u, v) is used (``x``)."""
        if self.link is None or u == v:
            return start + length + self.transfer[u][v]
        departs = self.new_time()
        rule = self.model.add(departs >= start + length)
        if x is not None:
            rule.only_enforce_if(x)
        self.messages.setdefault((u, v), []).append(_Message(start, length, departs, x))
        return departs + self.transfer[u][v]

    def add_link_constraints(self) -> None:
        """Links carry one message at a time, in FIFO order if there are few pairs."""
        if self.link is None:
            return
        pairs = sum(math.comb(len(messages), 2) for messages in self.messages.values())
        for (u, v), messages in self.messages.items():
            send_ticks = self.link[u][v]
            if send_ticks > 0 and len(messages) > 1:
                self.model.add_no_overlap([self.link_interval(m, send_ticks) for m in messages])
            if pairs <= MAX_ORDERED_PAIRS:
                for message, other_message in itertools.combinations(messages, 2):
                    self.add_fifo_order(message, other_message, send_ticks)

    def link_interval(self, message: _Message, send_ticks: int) -> Any:
        if message.present is None:
            return self.model.new_fixed_size_interval_var(message.departs, send_ticks, "")
        return self.model.new_optional_fixed_size_interval_var(
            message.departs, send_ticks, message.present, ""
        )

    def add_fifo_order(self, message: _Message, other_message: _Message, send_ticks: int) -> None:
        """Messages leave in the order of their operations on the device.

        The order is that of starts, because rounded ends need not keep it. Operations of zero
        length may end at the same time, and their messages leave in any order.
        """
        if message.length == 0 or other_message.length == 0:
            return
        first = self.model.new_bool_var("")
        present = [x for x in (message.present, other_message.present) if x is not None]
        for a, b, literal in (
            (message, other_message, first),
            (other_message, message, first.negated()),
        ):
            self.model.add(a.start + a.length <= b.start).only_enforce_if([literal, *present])
            self.model.add(a.departs + send_ticks <= b.departs).only_enforce_if([literal, *present])

    def add_chain_bounds(self, b: int, options: Sequence[Path], chosen: list[Any]) -> None:
        """Add redundant bounds by both halves of the chain, which tighten the linear relaxation."""
        if not chosen:
            return
        forward_ticks, backward_ticks = [], []
        for path in options:
            arcs = list(zip(path, [*path[1:], path[0]], strict=True))
            forward_ticks.append(sum(self.forward[u] + self.transfer[u][v] for u, v in arcs))
            backward_ticks.append(sum(self.transfer[v][u] + self.backward[v] for u, v in arcs))
        first = options[0][0]
        head = self.start[b, "H", first]
        self.model.add(head >= self.start[b, "F", first] + _weighted_sum(chosen, forward_ticks))
        before_last_backward = [t - self.backward[first] for t in backward_ticks]
        self.model.add(
            self.start[b, "B", first]
            >= head + self.head[first] + _weighted_sum(chosen, before_last_backward)
        )

    def break_symmetry(self, batch: list[int]) -> None:
        """Break the symmetry of microbatches of one start device with the same paths.

        F is ordered by index and B is ranked: j F come before the j-th F, and j B after the j-th
        last one.
        """
        first = self.options[batch[0]][0][0]
        forward, backward = self.forward[first], self.backward[first]
        for i, b in enumerate(batch):
            self.model.add(self.start[b, "F", first] >= i * forward)
            if i:
                before = self.start[batch[i - 1], "F", first]
                self.model.add(before + forward <= self.start[b, "F", first])
        if not 1 < len(batch) <= MAX_RANKED:
            return
        size = range(len(batch))
        rank = [[self.model.new_bool_var("") for _ in size] for _ in size]
        for i in size:
            self.model.add_exactly_one(rank[i])
            self.model.add_exactly_one(rank[j][i] for j in size)
        for i, b in enumerate(batch):
            tail = sum(j * backward * rank[i][j] for j in size)
            self.model.add(self.makespan >= self.start[b, "B", first] + backward + tail)

    def add_device_constraints(self) -> None:
        """Add TC1, TC2 and load bounds."""
        problem, model = self.problem, self.model
        for d in range(len(problem)):
            if len(self.device_intervals[d]) > 1:
                model.add_no_overlap(self.device_intervals[d])
            load = sum(self.visits[d])
            if self.memory_intervals[d]:
                model.add_cumulative(
                    self.memory_intervals[d],
                    [1] * len(self.memory_intervals[d]),
                    int(problem.memory[d]),
                )
            elif not problem.live_memory and self.visits[d]:
                model.add(load <= int(problem.memory[d]))
            if self.visits[d]:
                model.add(self.makespan >= load * (self.forward[d] + self.backward[d]))

    def add_visit_counts(self) -> None:
        """Add minimum and maximum visits per stage (CC3)."""
        min_visits, max_visits = self.problem.visits
        for group in self.problem.stage_devices[1:]:
            through = sum(x for d in group for x in self.visits[d])
            self.model.add_linear_constraint(through, min_visits, max_visits)

    def add_swap_limit(self) -> None:
        """Add the limit on swaps over all paths (D.2)."""
        max_swaps = self.problem.max_total_swaps
        if max_swaps is None:
            return
        stage = np.array(self.problem.stage_of)
        total: Any = 0
        for options, chosen in zip(self.options, self.chosen, strict=True):
            counts = [int(count_swaps(np.array(path), stage)) for path in options]
            total += _weighted_sum(chosen, counts) if chosen else counts[0]
        self.model.add(total <= max_swaps)


def _weighted_sum(literals: Sequence[Any], numbers: Sequence[int]) -> Any:
    return cp_model.LinearExpr.weighted_sum(literals, numbers)


def build(
    problem: PathProblem,
    options: Sequence[Sequence[Path]],
    horizon_s: float,
    steps: int = TICKS,
) -> PathModel:
    """Build the model of all schedules over the given paths that end within ``horizon_s``.

    Time has ``steps`` integer steps; fewer give a weaker bound faster. Symmetry is broken between
    microbatches of one start device whose options are the same object.
    """
    builder = _ModelBuilder(problem, options, horizon_s, steps)
    for b in range(len(options)):
        builder.add_microbatch(b)
    builder.add_device_constraints()
    builder.add_link_constraints()
    builder.add_visit_counts()
    builder.add_swap_limit()
    per_start = problem.microbatches_per_start
    for k in range(0, len(options), per_start):
        batch = list(range(k, k + per_start))
        if all(options[b] is options[k] for b in batch):
            builder.break_symmetry(batch)
    builder.model.minimize(builder.makespan)
    return PathModel(
        problem,
        builder.model,
        builder.tick,
        options,
        builder.chosen,
        builder.start,
        builder.makespan,
    )


def proven_bound_s(solver: cp_model.CpSolver, status: Any, tick_s: float) -> float:
    """Proven lower bound of a solve in seconds; infinite if the model is infeasible."""
    if status == cp_model.INFEASIBLE:
        return math.inf
    return max(0.0, float(solver.best_objective_bound) * tick_s)


def renumber_by_first_forward(plan: PathPlan, per_start: int) -> PathPlan:
    """Renumber the microbatches of each start device by the start of their first F."""
    starts_of = {
        op.microbatch: op.start_s
        for op in plan.ops
        if op.kind == "F" and op.device == plan.paths[op.microbatch][0]
    }
    new_number = {}
    for k in range(0, len(plan.paths), per_start):
        batch = sorted(range(k, k + per_start), key=lambda b: (starts_of[b], b))
        new_number.update({b: k + i for i, b in enumerate(batch)})
    old_number = {new: b for b, new in new_number.items()}
    paths = [plan.paths[old_number[b]] for b in range(len(plan.paths))]
    ops = [PathOp(new_number[o.microbatch], *o[1:]) for o in plan.ops]
    return PathPlan.of(paths, ops)
