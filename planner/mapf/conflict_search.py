"""Conflict-based search: plan agents one by one, find conflicts, forbid, plan anew.

The search knows nothing of places or times: a `Domain` plans one agent under its rules, finds the
conflicts of a set of routes and splits a conflict into branches of further rules (Sharon et al.
2015). Conflicts whose every branch costs more come first, and a branch that costs nothing and
leaves fewer conflicts is taken without a split (Boyarski et al. 2015). Among nodes that are nearly
cheapest the one with the fewest conflicts is taken (Barer et al. 2014).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from planner.mapf.focal import FocalQueue
from planner.search.stop import StopRun

RouteT = TypeVar("RouteT")
RuleT = TypeVar("RuleT")
ConflictT = TypeVar("ConflictT")

Branch = Sequence[tuple[int, RuleT]]
"""Further rules and the agents that they bind."""


class ConflictObjective(enum.StrEnum):
    """What a node costs: the sum of its routes' costs, or the largest of them."""

    SUM = "sum"
    MAKESPAN = "makespan"

    def of(self, costs: Iterable[float]) -> float:
        """Cost of a node."""
        return sum(costs) if self is ConflictObjective.SUM else max(costs, default=0.0)


@dataclass(frozen=True)
class Options:
    """How to search.

    Attributes
    ----------
    suboptimality
        w: nodes of at most w times the least cost are nearly cheapest; 1 is best first.
    bypass
        Take a branch that costs nothing and leaves fewer conflicts instead of splitting.
    classified
        Conflicts of a node that are tried for the one whose branches cost most; 1 takes the first.
    """

    objective: ConflictObjective = ConflictObjective.SUM
    suboptimality: float = 1.0
    bypass: bool = True
    classified: int = 8


@dataclass(frozen=True)
class Node(Generic[RouteT, RuleT, ConflictT]):
    """Rules and routes of every agent, what they cost and what is wrong with them.

    Attributes
    ----------
    cost
        By the objective. No solution that keeps the rules costs less.
    total
        Sum of the routes' costs; decides between equal ones.
    """

    rules: tuple[tuple[RuleT, ...], ...]
    routes: tuple[RouteT, ...]
    conflicts: tuple[ConflictT, ...]
    cost: float
    total: float


class Domain(Protocol[RouteT, RuleT, ConflictT]):
    """What is being searched."""

    @property
    def agents(self) -> int:
        """Number of agents."""
        ...

    def plan(self, agent: int, rules: tuple[RuleT, ...]) -> RouteT | None:
        """A cheapest route of one agent under its rules, None if there is none.

        Asked again with the same arguments; worth remembering.
        """
        ...

    def cost(self, route: RouteT) -> float:
        """Cost of a route; more rules never make it less."""
        ...

    def conflicts(self, routes: Sequence[RouteT]) -> Sequence[ConflictT]:
        """Everything that is wrong with a set of routes, in the order it should be looked at."""
        ...

    def urgency(self, conflict: ConflictT) -> int:
        """Only conflicts of the least urgency number that a node has are split."""
        ...

    def split(
        self, conflict: ConflictT, node: Node[RouteT, RuleT, ConflictT]
    ) -> Sequence[Branch[RuleT]]:
        """Branches of further rules, each broken by the node's routes.

        Bounds and exhaustion prove something only if every solution keeps the rules of some branch.
        """
        ...


class ConflictSearch(Generic[RouteT, RuleT, ConflictT]):
    """The high level; one expansion is one iteration of the stopping rule.

    Attributes
    ----------
    bound
        No solution below the roots that has not been returned costs less; infinite when the search
        is exhausted. See `Domain.split`.
    limit
        Nodes that cost this much or more are dropped; to be set by the caller.
    """

    def __init__(
        self,
        domain: Domain[RouteT, RuleT, ConflictT],
        run: StopRun,
        options: Options | None = None,
        seen: Callable[[Node[RouteT, RuleT, ConflictT]], None] | None = None,
    ) -> None:
        """``seen`` is called with every node that is taken from the queue."""
        self.domain = domain
        self.run = run
        self.options = options or Options()
        self.seen = seen
        self.bound = 0.0
        self.limit = math.inf
        self._known: set[tuple[frozenset[RuleT], ...]] = set()

    def root(self) -> Node[RouteT, RuleT, ConflictT] | None:
        """Every agent's cheapest route without rules; None if one has none."""
        routes = []
        for agent in range(self.domain.agents):
            route = self.domain.plan(agent, ())
            if route is None:
                return None
            routes.append(route)
        return self._node(((),) * self.domain.agents, tuple(routes))

    def solutions(
        self, roots: Iterable[Node[RouteT, RuleT, ConflictT]]
    ) -> Iterator[Node[RouteT, RuleT, ConflictT]]:
        """Nodes without conflicts, as they are found; stops when the run does.

        With ``suboptimality = 1`` the first is a cheapest one.
        """
        queue: FocalQueue[Node[RouteT, RuleT, ConflictT]]
        queue = FocalQueue(self.options.suboptimality)
        for root in roots:
            # a root of another domain has other conflicts here
            self._push(queue, self._node(root.rules, root.routes))
        while True:
            self.bound = min(queue.least, self.limit) if queue else math.inf
            if not queue or self.bound >= self.limit or self.run.check() is not None:
                return
            node = queue.pop()
            self.run.update()
            if self.seen is not None:
                self.seen(node)
            if not node.conflicts:
                yield node
                continue
            for child in self._expand(node):
                self._push(queue, child)

    def _push(
        self,
        queue: FocalQueue[Node[RouteT, RuleT, ConflictT]],
        node: Node[RouteT, RuleT, ConflictT],
    ) -> None:
        if node.cost < self.limit:
            order: tuple[float, float] = (node.total, len(node.conflicts))
            if self.options.suboptimality > 1:
                order = (len(node.conflicts), node.total)
            queue.push(node, node.cost, order)

    def _expand(
        self, node: Node[RouteT, RuleT, ConflictT]
    ) -> Iterable[Node[RouteT, RuleT, ConflictT]]:
        """Children of the conflict whose branches cost most, or the node with another route."""
        urgent = min(self.domain.urgency(c) for c in node.conflicts)
        chosen: list[Node[RouteT, RuleT, ConflictT]] | None = None
        best = -1
        here = [c for c in node.conflicts if self.domain.urgency(c) == urgent]
        for conflict in here[: max(1, self.options.classified)]:
            branches = self.domain.split(conflict, node)
            children = [c for branch in branches if (c := self._child(node, branch)) is not None]
            dear = sum((c.cost, c.total) > (node.cost, node.total) for c in children)
            dear += len(branches) - len(children)
            # cardinal: all branches cost more; semi-cardinal: some; non-cardinal: none
            rank = 2 if dear == len(branches) else 1 if dear else 0
            if rank > best:
                chosen, best = children, rank
            if rank == 2:
                break
            if self.options.bypass:
                for child in children:
                    if child.cost <= node.cost and len(child.conflicts) < len(node.conflicts):
                        # its routes are as cheap under the node's own rules
                        return [replace(child, rules=node.rules)]
        assert chosen is not None
        return filter(self._new, chosen)

    def _child(
        self, node: Node[RouteT, RuleT, ConflictT], branch: Branch[RuleT]
    ) -> Node[RouteT, RuleT, ConflictT] | None:
        """Only agents with further rules are planned anew."""
        rules, routes = list(node.rules), list(node.routes)
        changed: list[int] = []
        for agent, rule in branch:
            if rule not in rules[agent]:
                rules[agent] = (*rules[agent], rule)
                changed.append(agent)
        for agent in dict.fromkeys(changed):
            route = self.domain.plan(agent, rules[agent])
            if route is None:
                return None
            routes[agent] = route
        return self._node(tuple(rules), tuple(routes))

    def _new(self, node: Node[RouteT, RuleT, ConflictT]) -> bool:
        """Whether these rules have not been met; they come about in any order."""
        rules = tuple(frozenset(of) for of in node.rules)
        known = rules in self._known
        self._known.add(rules)
        return not known

    def _node(
        self, rules: tuple[tuple[RuleT, ...], ...], routes: tuple[RouteT, ...]
    ) -> Node[RouteT, RuleT, ConflictT]:
        costs = [self.domain.cost(route) for route in routes]
        conflicts = tuple(self.domain.conflicts(routes))
        return Node(rules, routes, conflicts, self.options.objective.of(costs), sum(costs))
