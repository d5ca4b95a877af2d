"""Conflict-based search (CBS): the high level, independent of the domain.

A `Domain` plans one agent under its constraints, finds the conflicts of a set of routes and splits
a conflict into branches of further constraints (Sharon et al. 2015). Cardinal conflicts are split
first, and a conflict is bypassed if a child has the same cost and fewer conflicts (Boyarski et al.
2015). Among the nodes within the suboptimality factor, the one with the fewest conflicts is
expanded (ECBS, Barer et al. 2014).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from planner.mapf.focal_queue import FocalQueue
from planner.search.stop import SearchRun

RouteT = TypeVar("RouteT")
ConstraintT = TypeVar("ConstraintT")
ConflictT = TypeVar("ConflictT")

Branch = Sequence[tuple[int, ConstraintT]]
"""Further constraints, each with the agent that it binds."""


class Cardinality(enum.IntEnum):
    """How many branches of a conflict cost more than its node: none, some or all."""

    NON_CARDINAL = 0
    SEMI_CARDINAL = 1
    CARDINAL = 2


class ConflictObjective(enum.StrEnum):
    """Cost of a node: sum of costs or makespan of its routes."""

    SUM = "sum"
    MAKESPAN = "makespan"

    def of(self, costs: Iterable[float]) -> float:
        """Cost of a node."""
        return sum(costs) if self is ConflictObjective.SUM else max(costs, default=0.0)


@dataclass(frozen=True)
class CbsOptions:
    """Options of the high-level search.

    Attributes
    ----------
    suboptimality
        w: nodes of at most w times the least cost are in the focal list; 1 is best-first search.
    bypass
        Bypass conflicts: adopt a child of equal cost with fewer conflicts instead of splitting.
    max_classified
        Conflicts of a node that are classified as cardinal, semi-cardinal or non-cardinal before
        one is split; 1 splits the first.
    """

    objective: ConflictObjective = ConflictObjective.SUM
    suboptimality: float = 1.0
    bypass: bool = True
    max_classified: int = 8


@dataclass(frozen=True)
class Node(Generic[RouteT, ConstraintT, ConflictT]):
    """Node of the constraint tree: constraints and routes of every agent, cost and conflicts.

    Attributes
    ----------
    cost
        By the objective; a lower bound on every solution under the node's constraints.
    total
        Sum of the routes' costs; breaks ties.
    """

    constraints: tuple[tuple[ConstraintT, ...], ...]
    routes: tuple[RouteT, ...]
    conflicts: tuple[ConflictT, ...]
    cost: float
    total: float


class Domain(Protocol[RouteT, ConstraintT, ConflictT]):
    """Low-level planner and conflict detection."""

    @property
    def agents(self) -> int:
        """Number of agents."""
        ...

    def plan(self, agent: int, constraints: tuple[ConstraintT, ...]) -> RouteT | None:
        """A cheapest route of one agent under its constraints, None if there is none.

        Called repeatedly with the same arguments; implementations should cache.
        """
        ...

    def cost(self, route: RouteT) -> float:
        """Cost of a route; further constraints never decrease it."""
        ...

    def conflicts(self, routes: Sequence[RouteT]) -> Sequence[ConflictT]:
        """Conflicts of a set of routes, in the order in which they should be considered."""
        ...

    def priority(self, conflict: ConflictT) -> int:
        """Priority class; only conflicts of a node's lowest class are split."""
        ...

    def split(
        self, conflict: ConflictT, node: Node[RouteT, ConstraintT, ConflictT]
    ) -> Sequence[Branch[ConstraintT]]:
        """Branches of further constraints, each violated by the node's routes.

        Bounds and exhaustion are proofs only if every solution satisfies the constraints of at
        least one branch.
        """
        ...


class ConflictSearch(Generic[RouteT, ConstraintT, ConflictT]):
    """The high-level search; one expansion is one iteration of the stopping criterion.

    Attributes
    ----------
    bound
        Lower bound on the cost of every descendant of the roots that is a solution and has not been
        yielded: the least cost in the queue, at most ``upper_bound``; infinite when the queue is
        empty. It is proven only if `Domain.split` loses no solution.
    upper_bound
        Nodes that cost this much or more are pruned; set by the caller.
    """

    def __init__(
        self,
        domain: Domain[RouteT, ConstraintT, ConflictT],
        run: SearchRun,
        options: CbsOptions | None = None,
        on_node: Callable[[Node[RouteT, ConstraintT, ConflictT]], None] | None = None,
    ) -> None:
        """``on_node`` is called with every node that is popped from the queue."""
        self.domain = domain
        self.run = run
        self.options = options or CbsOptions()
        self.on_node = on_node
        self.bound = 0.0
        self.upper_bound = math.inf
        self._known: set[tuple[frozenset[ConstraintT], ...]] = set()

    def root(self) -> Node[RouteT, ConstraintT, ConflictT] | None:
        """Every agent's cheapest route without constraints; None if an agent has no route."""
        routes = []
        for agent in range(self.domain.agents):
            route = self.domain.plan(agent, ())
            if route is None:
                return None
            routes.append(route)
        return self._node(((),) * self.domain.agents, tuple(routes))

    def solutions(
        self, roots: Iterable[Node[RouteT, ConstraintT, ConflictT]]
    ) -> Iterator[Node[RouteT, ConstraintT, ConflictT]]:
        """Yield nodes without conflicts as they are found, until the run stops.

        With ``suboptimality = 1`` the first one is optimal.
        """
        queue: FocalQueue[Node[RouteT, ConstraintT, ConflictT]]
        queue = FocalQueue(self.options.suboptimality)
        for root in roots:
            # recompute conflicts: a root may come from a search over another domain
            self._push(queue, self._node(root.constraints, root.routes))
        while True:
            self.bound = min(queue.least, self.upper_bound) if queue else math.inf
            if not queue or self.bound >= self.upper_bound or self.run.check() is not None:
                return
            node = queue.pop()
            self.run.update()
            if self.on_node is not None:
                self.on_node(node)
            if not node.conflicts:
                yield node
                continue
            for child in self._expand(node):
                self._push(queue, child)

    def _push(
        self,
        queue: FocalQueue[Node[RouteT, ConstraintT, ConflictT]],
        node: Node[RouteT, ConstraintT, ConflictT],
    ) -> None:
        if node.cost < self.upper_bound:
            order: tuple[float, float] = (node.total, len(node.conflicts))
            if self.options.suboptimality > 1:
                order = (len(node.conflicts), node.total)
            queue.push(node, node.cost, order)

    def _expand(
        self, node: Node[RouteT, ConstraintT, ConflictT]
    ) -> Iterable[Node[RouteT, ConstraintT, ConflictT]]:
        """Children of the most cardinal conflict, or the bypassed node.

        Boyarski et al. classify all conflicts and bypass only if none is cardinal. Here a conflict
        is bypassed as soon as it can be, which spares the classification of the others: the bypass
        is valid in any case, and a cardinal conflict is found again when its node is expanded.
        """
        first_priority = min(self.domain.priority(c) for c in node.conflicts)
        chosen: list[Node[RouteT, ConstraintT, ConflictT]] | None = None
        chosen_cardinality = -1
        first_conflicts = [c for c in node.conflicts if self.domain.priority(c) == first_priority]
        for conflict in first_conflicts[: max(1, self.options.max_classified)]:
            branches = self.domain.split(conflict, node)
            children = [c for branch in branches if (c := self._child(node, branch)) is not None]
            num_costlier = sum((c.cost, c.total) > (node.cost, node.total) for c in children)
            num_costlier += len(branches) - len(children)
            cardinality = Cardinality(bool(num_costlier))
            if num_costlier == len(branches):
                cardinality = Cardinality.CARDINAL
            if cardinality > chosen_cardinality:
                chosen, chosen_cardinality = children, cardinality
            if cardinality is Cardinality.CARDINAL:
                break
            if self.options.bypass:
                for child in children:
                    if child.cost <= node.cost and len(child.conflicts) < len(node.conflicts):
                        # the child's routes are as cheap and valid under the node's own constraints
                        return [replace(child, constraints=node.constraints)]
        assert chosen is not None
        return filter(self._is_new, chosen)

    def _child(
        self, node: Node[RouteT, ConstraintT, ConflictT], branch: Branch[ConstraintT]
    ) -> Node[RouteT, ConstraintT, ConflictT] | None:
        """Replan only the agents with further constraints."""
        constraints, routes = list(node.constraints), list(node.routes)
        changed: list[int] = []
        for agent, constraint in branch:
            if constraint not in constraints[agent]:
                constraints[agent] = (*constraints[agent], constraint)
                changed.append(agent)
        for agent in dict.fromkeys(changed):
            route = self.domain.plan(agent, constraints[agent])
            if route is None:
                return None
            routes[agent] = route
        return self._node(tuple(constraints), tuple(routes))

    def _is_new(self, node: Node[RouteT, ConstraintT, ConflictT]) -> bool:
        """Whether this set of constraints is new: splits in another order reach the same set."""
        constraints = tuple(frozenset(of) for of in node.constraints)
        is_known = constraints in self._known
        self._known.add(constraints)
        return not is_known

    def _node(
        self, constraints: tuple[tuple[ConstraintT, ...], ...], routes: tuple[RouteT, ...]
    ) -> Node[RouteT, ConstraintT, ConflictT]:
        costs = [self.domain.cost(route) for route in routes]
        conflicts = tuple(self.domain.conflicts(routes))
        return Node(constraints, routes, conflicts, self.options.objective.of(costs), sum(costs))
