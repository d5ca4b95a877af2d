"""SkipPipe as a flexible job shop with transport times: a CP-SAT model with a literal per path.

Every microbatch chooses one of its paths (CC1, CC2); optional intervals of F and B on each device,
H on the start device; no overlap per device (TC2), counts per stage (CC3), and memory as a count of
paths or of live microbatches (TC1). With all paths as options the model is exact; with few it is a
neighbourhood; with one per microbatch it schedules given paths.

Where links queue (``link_s``), every message is an interval on its link, present with the arc that
it goes over, and a link's intervals do not overlap. Messages have to leave in the order in which
the operations before them end; this is modelled by a literal for every two messages of a link, if
there are few such pairs. With more it is left out, which only allows more: a bound stays a bound,
and what is found is timed anew with links that keep the order.

Times are integers, rounded down, so that the model's bound holds for the real problem; orders are
taken from its solutions and timed again exactly.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ortools.sat.python import cp_model

from planner.mapf.chains import Path
from planner.mapf.moves import count_swaps
from planner.problems import PathProblem
from planner.problems.answers import PathOp, PathPlan

TICKS = 1 << 24
"""Integer steps of the horizon: rounding costs less than 1e-6 of the makespan."""

MOST_RANKED = 8
"""Most microbatches of one start device whose order of B is modelled by an assignment."""

MOST_ORDERED = 4000
"""Most pairs of messages of one link whose order is modelled."""

Key = tuple[int, str, int]


@dataclass(frozen=True)
class _Message:
    """On a link: the start of the operation before it and its length, and when it leaves."""

    start: Any
    length: int
    leaves: Any
    present: Any


@dataclass
class PathModel:
    """The model and its variables.

    Attributes
    ----------
    tick_s
        Seconds of one integer step.
    options, chosen
        Per microbatch its paths, and a literal for each; none where there is one path only.
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
        """Paths of a solution; ``value`` maps a literal to 0 or 1."""
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
        """Offer a plan as a starting point."""
        for path, options, chosen in zip(plan.paths, self.options, self.chosen, strict=True):
            for option, x in zip(options, chosen, strict=False):
                self.model.add_hint(x, option == path)
        for op in plan.ops:
            t = self.start.get((op.microbatch, op.kind, op.device))
            if t is not None:
                self.model.add_hint(t, math.floor(op.start_s / self.tick_s))
        self.model.add_hint(self.makespan, math.floor(plan.makespan_s / self.tick_s))


class _Builder:
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
        self.hop = [[self.ticks(x) for x in row] for row in problem.transfer_s.tolist()]
        self.link: list[list[int]] | None = None
        if problem.link_s is not None:
            self.link = [[self.ticks(x) for x in row] for row in problem.link_s.tolist()]
        self.messages: dict[tuple[int, int], list[_Message]] = {}
        self.makespan = self.model.new_int_var(0, steps, "makespan")
        n = len(problem)
        self.start: dict[Key, Any] = {}
        self.busy: list[list[Any]] = [[] for _ in range(n)]
        self.held: list[list[Any]] = [[] for _ in range(n)]
        self.visits: list[list[Any]] = [[] for _ in range(n)]
        self.chosen: list[list[Any]] = []

    def ticks(self, seconds: float) -> int:
        return math.floor(seconds / self.tick * (1 - 1e-12))

    def time(self) -> Any:
        return self.model.new_int_var(0, self.steps, "")

    def microbatch(self, b: int) -> None:
        """Choice of a path, intervals, precedences."""
        model, options = self.model, self.options[b]
        first = options[0][0]
        chosen = [model.new_bool_var("") for _ in options] if len(options) > 1 else []
        self.chosen.append(chosen)
        if chosen:
            model.add_exactly_one(chosen)
        on: dict[int, list[Any]] = {}
        arcs: dict[tuple[int, int], list[Any]] = {}
        for k, path in enumerate(options):
            x = chosen[k] if chosen else None
            for d in path[1:]:
                on.setdefault(d, []).append(x)
            for arc in zip(path, [*path[1:], first], strict=True):
                arcs.setdefault(arc, []).append(x)
        self.present(b, first, None)
        for d, literals in on.items():
            self.present(b, d, self.sum_of(literals, len(options)))
        head = self.start[b, "H", first] = self.time()
        self.busy[first].append(model.new_fixed_size_interval_var(head, self.head[first], ""))
        model.add(self.makespan >= self.start[b, "B", first] + self.backward[first])
        for (u, v), literals in arcs.items():
            self.precede(b, u, v, first, self.sum_of(literals, len(options)))
        self.whole_chain(b, options, chosen)

    def sum_of(self, literals: list[Any], of: int) -> Any:
        """A literal that equals a sum of exclusive ones; None if it is always true."""
        if len(literals) == of:
            return None
        if len(literals) == 1:
            return literals[0]
        total = self.model.new_bool_var("")
        self.model.add(sum(literals) == total)
        return total

    def present(self, b: int, d: int, x: Any) -> None:
        """F and B on a device that the microbatch visits if ``x``."""
        model = self.model
        for kind, size in (("F", self.forward[d]), ("B", self.backward[d])):
            t = self.start[b, kind, d] = self.time()
            self.busy[d].append(
                model.new_fixed_size_interval_var(t, size, "")
                if x is None
                else model.new_optional_fixed_size_interval_var(t, size, x, "")
            )
        self.visits[d].append(1 if x is None else x)
        if self.problem.live_memory and self.problem.memory[d] < len(self.options):
            size, end = self.time(), self.start[b, "B", d] + self.backward[d]
            begin = self.start[b, "F", d]
            self.held[d].append(
                model.new_interval_var(begin, size, end, "")
                if x is None
                else model.new_optional_interval_var(begin, size, end, x, "")
            )

    def precede(self, b: int, u: int, v: int, first: int, x: Any) -> None:
        """The arc u, v: F, then F or H, and back H or B, then B."""
        start = self.start
        after, kind, seconds = start[b, "F" if v != first else "H", v], "B", self.backward[v]
        if v == first:
            kind, seconds = "H", self.head[first]
        out = self.arrival(start[b, "F", u], self.forward[u], u, v, x)
        back = self.arrival(start[b, kind, v], seconds, v, u, x)
        for rule in (self.model.add(after >= out), self.model.add(start[b, "B", u] >= back)):
            if x is not None:
                rule.only_enforce_if(x)

    def arrival(self, start: Any, length: int, u: int, v: int, x: Any) -> Any:
        """When the message of an operation on u is on v, if there is one (``x``)."""
        if self.link is None or u == v:
            return start + length + self.hop[u][v]
        leaves = self.time()
        rule = self.model.add(leaves >= start + length)
        if x is not None:
            rule.only_enforce_if(x)
        self.messages.setdefault((u, v), []).append(_Message(start, length, leaves, x))
        return leaves + self.hop[u][v]

    def links(self) -> None:
        """One message at a time; in the order of the operations before them, if pairs are few."""
        if self.link is None:
            return
        pairs = sum(math.comb(len(messages), 2) for messages in self.messages.values())
        for (u, v), messages in self.messages.items():
            busy = self.link[u][v]
            if busy > 0 and len(messages) > 1:
                self.model.add_no_overlap([self.on_link(m, busy) for m in messages])
            if pairs <= MOST_ORDERED:
                for one, other in itertools.combinations(messages, 2):
                    self.keep_order(one, other, busy)

    def on_link(self, message: _Message, busy: int) -> Any:
        if message.present is None:
            return self.model.new_fixed_size_interval_var(message.leaves, busy, "")
        return self.model.new_optional_fixed_size_interval_var(
            message.leaves, busy, message.present, ""
        )

    def keep_order(self, one: _Message, other: _Message, busy: int) -> None:
        """Whose operation is first on the device is first on the link.

        In terms of starts: rounded, ends need not keep the order that they have. Operations without
        length may end together, and their messages leave in any order.
        """
        if one.length == 0 or other.length == 0:
            return
        first = self.model.new_bool_var("")
        present = [x for x in (one.present, other.present) if x is not None]
        for a, b, literal in ((one, other, first), (other, one, first.negated())):
            self.model.add(a.start + a.length <= b.start).only_enforce_if([literal, *present])
            self.model.add(a.leaves + busy <= b.leaves).only_enforce_if([literal, *present])

    def whole_chain(self, b: int, options: Sequence[Path], chosen: list[Any]) -> None:
        """Both halves of the chain at once, which the linear relaxation can use."""
        if not chosen:
            return
        out, home = [], []
        for path in options:
            arcs = list(zip(path, [*path[1:], path[0]], strict=True))
            out.append(sum(self.forward[u] + self.hop[u][v] for u, v in arcs))
            home.append(sum(self.hop[v][u] + self.backward[v] for u, v in arcs))
        first = options[0][0]
        head = self.start[b, "H", first]
        self.model.add(head >= self.start[b, "F", first] + _dot(chosen, out))
        tail = [t - self.backward[first] for t in home]
        self.model.add(self.start[b, "B", first] >= head + self.head[first] + _dot(chosen, tail))

    def alike(self, batch: list[int]) -> None:
        """Microbatches of one start device with the same options: their F by index, B ranked.

        The j-th F starts no earlier than j F, and behind the j-th last B there are j of them.
        """
        first = self.options[batch[0]][0][0]
        forward, backward = self.forward[first], self.backward[first]
        for i, b in enumerate(batch):
            self.model.add(self.start[b, "F", first] >= i * forward)
            if i:
                before = self.start[batch[i - 1], "F", first]
                self.model.add(before + forward <= self.start[b, "F", first])
        if not 1 < len(batch) <= MOST_RANKED:
            return
        size = range(len(batch))
        rank = [[self.model.new_bool_var("") for _ in size] for _ in size]
        for i in size:
            self.model.add_exactly_one(rank[i])
            self.model.add_exactly_one(rank[j][i] for j in size)
        for i, b in enumerate(batch):
            behind = sum(j * backward * rank[i][j] for j in size)
            self.model.add(self.makespan >= self.start[b, "B", first] + backward + behind)

    def devices(self) -> None:
        """TC1, TC2 and each device's load."""
        problem, model = self.problem, self.model
        for d in range(len(problem)):
            if len(self.busy[d]) > 1:
                model.add_no_overlap(self.busy[d])
            load = sum(self.visits[d])
            if self.held[d]:
                model.add_cumulative(self.held[d], [1] * len(self.held[d]), int(problem.memory[d]))
            elif not problem.live_memory and self.visits[d]:
                model.add(load <= int(problem.memory[d]))
            if self.visits[d]:
                model.add(self.makespan >= load * (self.forward[d] + self.backward[d]))

    def stages(self) -> None:
        """CC3."""
        fewest, most = self.problem.visits
        for group in self.problem.stage_devices[1:]:
            through = sum(x for d in group for x in self.visits[d])
            self.model.add_linear_constraint(through, fewest, most)

    def swaps(self) -> None:
        """At most so many swaps over all paths (D.2)."""
        most = self.problem.max_total_swaps
        if most is None:
            return
        stage = np.array(self.problem.stage_of)
        total: Any = 0
        for options, chosen in zip(self.options, self.chosen, strict=True):
            counts = [int(count_swaps(np.array(path), stage)) for path in options]
            total += _dot(chosen, counts) if chosen else counts[0]
        self.model.add(total <= most)


def _dot(literals: Sequence[Any], numbers: Sequence[int]) -> Any:
    return cp_model.LinearExpr.weighted_sum(literals, numbers)


def build(
    problem: PathProblem,
    options: Sequence[Sequence[Path]],
    horizon_s: float,
    steps: int = TICKS,
) -> PathModel:
    """The model for all schedules over the given paths that end within ``horizon_s``.

    Times are whole numbers up to ``steps``; with fewer the bound is weaker and sooner found.

    Microbatches of one start device whose options are the same object count as alike.
    """
    make = _Builder(problem, options, horizon_s, steps)
    for b in range(len(options)):
        make.microbatch(b)
    make.devices()
    make.links()
    make.stages()
    make.swaps()
    each = problem.microbatches_per_start
    for k in range(0, len(options), each):
        batch = list(range(k, k + each))
        if all(options[b] is options[k] for b in batch):
            make.alike(batch)
    make.model.minimize(make.makespan)
    return PathModel(
        problem, make.model, make.tick, options, make.chosen, make.start, make.makespan
    )


def proven_s(solver: cp_model.CpSolver, status: Any, tick_s: float) -> float:
    """The bound that a solve has proven, seconds."""
    if status == cp_model.INFEASIBLE:
        return math.inf
    return max(0.0, float(solver.best_objective_bound) * tick_s)


def by_first_start(plan: PathPlan, each: int) -> PathPlan:
    """The same schedule with the microbatches of each start device numbered by their first F."""
    begins = {
        op.microbatch: op.start_s
        for op in plan.ops
        if op.kind == "F" and op.device == plan.paths[op.microbatch][0]
    }
    name = {}
    for k in range(0, len(plan.paths), each):
        batch = sorted(range(k, k + each), key=lambda b: (begins[b], b))
        name.update({b: k + i for i, b in enumerate(batch)})
    old = {new: b for b, new in name.items()}
    paths = [plan.paths[old[b]] for b in range(len(plan.paths))]
    ops = [PathOp(name[o.microbatch], *o[1:]) for o in plan.ops]
    return PathPlan.of(paths, ops)
