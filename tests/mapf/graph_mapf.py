"""Multi-agent path finding on a weighted graph, in continuous time.

A `Domain` that tests `planner.mapf.cbs`. Agents are points that wait at vertices and
move along edges; a move may start at any time and takes the time of its edge. The model is that of
asynchronous actions (Ren et al. 2021): an agent occupies a vertex from the beginning of the move to
it until the end of the move away from it, so both ends of its edge while it moves; no two agents
may occupy a vertex at a time. Agents therefore neither meet at a vertex nor swap nor follow on an
edge. They occupy their starts from the beginning and their goals for good.

A conflict of two stays at a vertex is split so that no solution is lost, which the constraint
intervals of continuous-time conflict-based search (Andreychuk et al. 2021) do not ensure for agents
that wait.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import networkx as nx

from planner.mapf import cbs
from planner.mapf.cbs import Branch, CbsOptions, ConflictSearch
from planner.mapf.intervals import Occupancy, conflicts
from planner.problems.error import ProblemError
from planner.search.certificate import Status
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import StoppingCriterion, started
from tests.mapf.sipp import Move, safe_path, seconds_to
from tests.mapf.sipp_windows import EntryConstraint

CACHE_SIZE = 1 << 16
"""Maximum number of cached routes."""

OPEN_LIST = "conflict-based search: open list"

SLACK = 1e-9
"""Relative to the longest edge: overlaps by rounding are not conflicts."""


@dataclass(frozen=True)
class GraphMove:
    """An agent traverses an edge in ``[begin_s, end_s)``, seconds."""

    source: Hashable
    target: Hashable
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class GraphPlan:
    """Moves of every agent in chronological order; it waits between moves."""

    moves: tuple[tuple[GraphMove, ...], ...]

    @property
    def ends_s(self) -> tuple[float, ...]:
        """Arrival of each agent for good, seconds; 0 for one that never moves."""
        return tuple(moves[-1].end_s if moves else 0.0 for moves in self.moves)


@dataclass(frozen=True)
class GraphProblem:
    """Agents on a graph.

    Attributes
    ----------
    graph
        Directed or undirected; the attribute ``seconds`` of each edge, above 0, is what a move
        along it takes.
    agents
        ``(start, goal)`` vertices of each agent; no two agents share a start, or a goal.
    """

    graph: nx.Graph[Hashable]
    agents: tuple[tuple[Hashable, Hashable], ...]

    def __post_init__(self) -> None:
        if self.graph.is_multigraph():
            raise ProblemError("graph must have one edge between two vertices, found a multigraph")
        for u, v, data in self.graph.edges(data=True):
            seconds = data.get("seconds")
            if seconds is None or not 0 < seconds < math.inf or u == v:
                raise ProblemError(
                    f"edge from {u} to {v} has seconds {seconds}; edges join different vertices "
                    "and take finite seconds > 0"
                )
        for name, ends in (("start", [a[0] for a in self.agents]), ("goal", self.goals)):
            for v in ends:
                if v not in self.graph:
                    raise ProblemError(f"{name} {v} is not a vertex of the graph")
                if ends.count(v) > 1:
                    raise ProblemError(f"{name} {v} has {ends.count(v)} agents; it may have one")

    @property
    def goals(self) -> list[Hashable]:
        """Goal of each agent."""
        return [goal for _, goal in self.agents]


Node = cbs.Node["GraphRoute", EntryConstraint, tuple[Occupancy, Occupancy]]


@dataclass(frozen=True)
class GraphRoute:
    """One agent's moves and the times that it occupies each vertex."""

    moves: tuple[Move, ...]
    occupancies: tuple[Occupancy, ...]

    @classmethod
    def of(cls, agent: int, start: int, moves: tuple[Move, ...]) -> GraphRoute:
        """From the moves."""
        places = [start, *(move.target for move in moves)]
        entries = [-math.inf, *(move.begin for move in moves)]
        exits = [*(move.end for move in moves), math.inf]
        occupancies = zip([agent] * len(places), places, entries, exits, strict=True)
        return cls(moves, tuple(Occupancy(*occupancy) for occupancy in occupancies))

    @property
    def end_s(self) -> float:
        """Arrival for good."""
        return self.moves[-1].end if self.moves else 0.0


class GraphAgents:
    """CBS domain with safe-interval path planning (SIPP) as low level."""

    def __init__(self, problem: GraphProblem) -> None:
        graph = problem.graph
        self.names = list(graph)
        number = {v: k for k, v in enumerate(self.names)}
        self.arcs = [
            [(number[v], float(data["seconds"])) for v, data in graph.adj[u].items()]
            for u in self.names
        ]
        self.ends = [(number[start], number[goal]) for start, goal in problem.agents]
        self.cost_to_go = [seconds_to(self.arcs, goal) for _, goal in self.ends]
        into = [math.inf] * len(self.arcs)
        for out in self.arcs:
            for v, seconds in out:
                into[v] = min(into[v], seconds)
        # minimum time at a vertex: the shortest move to it and the shortest move from it
        self.least = [
            came + min((seconds for _, seconds in out), default=math.inf)
            for came, out in zip(into, self.arcs, strict=True)
        ]
        self.slack = SLACK * max((s for out in self.arcs for _, s in out), default=0.0)
        self._cached_search = lru_cache(maxsize=CACHE_SIZE)(self._search)

    @property
    def agents(self) -> int:
        """Number of agents."""
        return len(self.ends)

    def plan(self, agent: int, constraints: tuple[EntryConstraint, ...]) -> GraphRoute | None:
        """The earliest arrival."""
        return self._cached_search(agent, tuple(sorted(constraints)))

    def _search(self, agent: int, constraints: tuple[EntryConstraint, ...]) -> GraphRoute | None:
        start, goal = self.ends[agent]
        moves = safe_path(self.arcs, start, goal, constraints, self.cost_to_go[agent])
        return None if moves is None else GraphRoute.of(agent, start, moves)

    def cost(self, route: GraphRoute) -> float:
        """Its end."""
        return route.end_s

    def conflicts(self, routes: Sequence[GraphRoute]) -> list[tuple[Occupancy, Occupancy]]:
        """Stays of two agents at one vertex."""
        return conflicts(
            (occupancy for route in routes for occupancy in route.occupancies), self.slack
        )

    def priority(self, conflict: tuple[Occupancy, Occupancy]) -> int:
        """All are equal."""
        return 0

    def split(
        self, conflict: tuple[Occupancy, Occupancy], node: Node
    ) -> list[Branch[EntryConstraint]]:
        """Two branches; a pair of routes that violates both constraints has a conflict.

        Stays of at least m seconds that begin in ``[a, b + m)`` and ``[b, a + m)`` overlap. And a
        stay that begins before b and lasts until e meets any that begins in ``[b, e)``.
        """
        one, other = conflict
        place, least = one.resource, self.least[one.resource]
        if other.begin < one.begin + least - self.slack:
            first = EntryConstraint(place, one.begin - self.slack, other.begin + least, -math.inf)
            second = EntryConstraint(place, other.begin - self.slack, one.begin + least, -math.inf)
        else:
            first = EntryConstraint(place, -math.inf, other.begin, one.end - self.slack)
            second = EntryConstraint(place, other.begin - self.slack, one.end, -math.inf)
        return [[(one.agent, first)], [(other.agent, second)]]


def solve_graph_mapf(
    problem: GraphProblem, stop: StoppingCriterion, options: CbsOptions | None = None
) -> Result[GraphPlan]:
    """Moves of all agents without a conflict and with the least sum or maximum of arrivals.

    Parameters
    ----------
    stop
        When to stop; an iteration is an expansion of the high level. Without a limit an instance
        with no solution may be searched for ever.
    options
        Objective and search. With ``suboptimality`` w the first plan is returned whose cost is
        proven to be within w times the least; with 1, a plan with the least.

    Returns
    -------
    Result
        INFEASIBLE if an agent has no way at all or the search is exhausted; UNKNOWN, with the bound
        reached, if the stopping criterion comes first. Optimal up to `SLACK`.
    """
    if not isinstance(problem, GraphProblem):
        raise ProblemError(
            f"problem must be of type GraphProblem, found {type(problem).__name__}; give one"
        )
    chosen = options or CbsOptions()
    run = started(stop)
    named: tuple[Any, ...] = (tuple(problem.graph.edges(data="seconds")), problem.agents)
    best: Incumbent[Node] = Incumbent(run, named, method=f"cbs-{chosen.objective}", seed=0)
    domain = GraphAgents(problem)
    search: ConflictSearch[GraphRoute, EntryConstraint, tuple[Occupancy, Occupancy]]
    search = ConflictSearch(domain, run, chosen)
    root = search.root()
    if root is None:
        cut = next(b for b in range(domain.agents) if domain.plan(b, ()) is None)
        why = "agent {} has no way from {} to {}".format(cut, *problem.agents[cut])
        return _answer(domain, best.without_plan(Status.INFEASIBLE, why))
    with run.interruptible():
        node = next(search.solutions([root]), None)
        if node is not None:
            best.offer(node.cost, node)
    if best.plan is None and math.isinf(search.bound):
        return _answer(domain, best.without_plan(Status.INFEASIBLE, "search exhausted"))
    best.offer_bound(search.bound, OPEN_LIST)
    return _answer(domain, best.result(exhausted="within suboptimality"))


def _answer(domain: GraphAgents, result: Result[Any]) -> Result[GraphPlan]:
    """The outcome with the vertices' names."""
    if result.plan is None:
        return result
    names = domain.names
    moves = tuple(
        tuple(GraphMove(names[m.source], names[m.target], m.begin, m.end) for m in route.moves)
        for route in result.plan.routes
    )
    return replace(result, plan=GraphPlan(moves))
