"""Independent verifier of plans on a graph: moves, edges, and vertices occupied at a time."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator

from planner.checker.violation import Violation
from tests.mapf.graph_mapf import GraphPlan, GraphProblem

TOLERANCE = 1e-9
"""Allowed overlap by rounding, relative to the last end or the longest edge."""


def check_graph_plan(plan: GraphPlan, problem: GraphProblem) -> list[Violation]:
    """All violations of a plan."""
    return list(_moves(plan, problem)) or list(_vertices(plan, problem))


def _slack(plan: GraphPlan, problem: GraphProblem) -> float:
    edges = [data["seconds"] for _, _, data in problem.graph.edges(data=True)]
    return TOLERANCE * max([*edges, *plan.ends_s], default=0.0)


def _moves(plan: GraphPlan, problem: GraphProblem) -> Iterator[Violation]:
    if len(plan.moves) != len(problem.agents):
        yield Violation(
            "agents", "moves", f"expected {len(problem.agents)} agents, found {len(plan.moves)}"
        )
        return
    slack = _slack(plan, problem)
    for b, (start, goal) in enumerate(problem.agents):
        at, since = start, 0.0
        for move in plan.moves[b]:
            where = f"agent {b}, {move.source} to {move.target}"
            if move.source != at:
                yield Violation("moves", where, f"must begin at {at}")
            if not problem.graph.has_edge(move.source, move.target):
                yield Violation("edges", where, "is not an edge")
                return
            if move.begin_s < since - slack:
                yield Violation(
                    "time", where, f"cannot begin before {since:.9g} s, found {move.begin_s:.9g} s"
                )
            seconds = problem.graph.edges[move.source, move.target]["seconds"]
            takes = move.end_s - move.begin_s
            if not abs(takes - seconds) <= slack:
                yield Violation("time", where, f"takes {seconds:.9g} s, found {takes:.9g} s")
            at, since = move.target, move.end_s
        if at != goal:
            yield Violation("goal", f"agent {b}", f"must end at {goal}, found {at}")


def _vertices(plan: GraphPlan, problem: GraphProblem) -> Iterator[Violation]:
    slack = _slack(plan, problem)
    there: dict[Hashable, list[tuple[float, float, int]]] = {}
    for b, (start, _) in enumerate(problem.agents):
        at, since = start, -math.inf
        for move in plan.moves[b]:
            # both ends of an edge are occupied during the move
            there.setdefault(at, []).append((since, move.end_s, b))
            at, since = move.target, move.begin_s
        there.setdefault(at, []).append((since, math.inf, b))
    for v, stays in there.items():
        for k, (low, high, b) in enumerate(stays):
            for begin, end, c in stays[k + 1 :]:
                if b != c and min(high, end) - max(low, begin) > slack:
                    yield Violation(
                        "vertices",
                        f"{v}",
                        f"agents {b} and {c} occupy it at {max(low, begin):.9g} s",
                    )
