"""SkipPipe's own solver: conflict-based search over microbatches (3.3, 3.4, Algorithm 1).

The phases of the paper, each a `ConflictSearch`: stages with too many paths (CC3) until 32
candidates are found, then, starting from these, devices with too many paths (TC1) and collisions
(TC2). Constraints are put on the fastest agents, so that the slowest are not delayed further.

Where links queue they are resources too: two messages on one link collide (an edge conflict). The
constrained agent sends later, or runs later on the sending device if it would have sent first.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.mapf import cbs
from planner.mapf.arrays import PathArrays
from planner.mapf.cbs import Branch, CbsOptions, ConflictObjective, ConflictSearch
from planner.mapf.fixed_order import FOLLOW_TIMES, schedule_paths
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.intervals import Constraint, Occupancy, conflicts
from planner.mapf.moves import count_swaps
from planner.mapf.router import ALWAYS, NO_SWAPS, PathRouter, Route
from planner.search.stop import SearchRun


class Limit(enum.Enum):
    """What a capacity conflict exceeds."""

    STAGE = "paths through a stage (CC3)"
    SWAPS = "swaps of all paths (D.2)"
    DEVICE = "paths through a device (TC1)"


@dataclass(frozen=True)
class CapacityConflict:
    """Too many paths use the same resources.

    Attributes
    ----------
    limit
        The limit that is exceeded.
    resources
        What a rerouted agent must not use: devices, or `NO_SWAPS`.
    agents
        The agents that use them, the fastest first.
    excess
        Number of agents that must be rerouted.
    """

    limit: Limit
    resources: tuple[int, ...]
    agents: tuple[int, ...]
    excess: int


Collision = tuple[Occupancy, Occupancy]
Conflict = CapacityConflict | Collision
Node = cbs.Node[Route, Constraint, Conflict]


BEST_FIRST = CbsOptions(ConflictObjective.MAKESPAN, max_classified=1, bypass=False)
"""High level of CC3, as in the paper."""

BOUNDED_SUBOPTIMAL = CbsOptions(ConflictObjective.MAKESPAN, suboptimality=1.5)
"""High level of TC1 and TC2: among nodes up to half longer, the one with the fewest conflicts.

The paper uses best-first search, which takes far longer to find a first schedule.
"""


@dataclass(frozen=True)
class SkipPipeParams:
    """Parameters that the paper leaves open.

    Attributes
    ----------
    tie_tolerance
        Relative tolerance: if the ends of two agents differ by less, both branches are created (the
        delta of Algorithm 1).
    candidates
        Sets of paths that satisfy CC3 to find before TC1 and TC2 are resolved (Algorithm 1).
    max_branches
        Maximum number of choices of agents to reroute per conflict, the paper's choice first.
    stage_options, collision_options
        Options of the high level for CC3, and for TC1 and TC2.
    """

    tie_tolerance: float = 1e-6
    candidates: int = 32
    max_branches: int = 4
    stage_options: CbsOptions = BEST_FIRST
    collision_options: CbsOptions = BOUNDED_SUBOPTIMAL


class SkipPipeDomain:
    """CBS domain of SkipPipe, with one agent per microbatch.

    Parameters
    ----------
    stages_only
        Detect only CC3 conflicts and the limit on swaps.
    """

    def __init__(
        self, router: PathRouter, stages_only: bool, params: SkipPipeParams | None = None
    ) -> None:
        self.arrays = router.arrays
        self.router = router
        self.stages_only = stages_only
        self.params = params or SkipPipeParams()

    @property
    def agents(self) -> int:
        """Number of microbatches."""
        return self.arrays.microbatches

    def plan(self, agent: int, constraints: tuple[Constraint, ...]) -> Route | None:
        """The fastest route."""
        return self.router.route(agent, constraints)

    def cost(self, route: Route) -> float:
        """End of the last B."""
        return route.end_s

    def conflicts(self, routes: Sequence[Route]) -> list[Conflict]:
        """Crowded stages (CC3), crowded devices (TC1), collisions (TC2)."""
        all_conflicts: list[Conflict] = [
            *self._stage_conflicts(routes),
            *self._swap_conflicts(routes),
        ]
        if not self.stages_only:
            all_conflicts += self._device_conflicts(routes)
            slack = 1e-9 * max(route.end_s for route in routes)
            occupancies = [
                occupancy for route in routes for occupancy in (*route.occupancies, *route.messages)
            ]
            all_conflicts += conflicts(occupancies, slack)
        return all_conflicts

    def priority(self, conflict: Conflict) -> int:
        """CC3 and the cap on swaps before TC1 before TC2."""
        if isinstance(conflict, CapacityConflict):
            return 1 if conflict.limit is Limit.DEVICE else 0
        return 2

    def split(self, conflict: Conflict, node: Node) -> list[Branch[Constraint]]:
        """Constrain the faster agent; with a tie, one branch for each."""
        if isinstance(conflict, CapacityConflict):
            return list(self._reroute_branches(conflict, node))
        first, second = conflict
        ends = node.routes[first.agent].end_s, node.routes[second.agent].end_s
        tied = abs(ends[0] - ends[1]) <= self.params.tie_tolerance * max(ends)
        branches: list[Branch[Constraint]] = []
        if ends[0] >= ends[1] or tied:
            branches.append([(second.agent, self._constraint_for(node, second, first))])
        if ends[0] < ends[1] or tied:
            branches.append([(first.agent, self._constraint_for(node, first, second))])
        return branches

    def _constraint_for(self, node: Node, occupancy: Occupancy, other: Occupancy) -> Constraint:
        """Constraint to avoid the other's occupancy; on a link, to queue behind it."""
        if occupancy.resource >= len(self.arrays.stage):
            sender = _sender(node.routes[occupancy.agent], occupancy)
            other_sender = _sender(node.routes[other.agent], other)
            if sender.begin < sender.end < other_sender.end:
                return Constraint(sender.resource, sender.begin, other_sender.end)
        return Constraint(occupancy.resource, other.begin, other.end)

    def _stage_conflicts(self, routes: Sequence[Route]) -> Iterator[CapacityConflict]:
        arrays = self.arrays
        groups = [
            arrays.members[low:high].tolist() for low, high in itertools.pairwise(arrays.stage_ptr)
        ]
        visits = [sum(d in group for r in routes for d in r.path) for group in groups]
        max_visits = arrays.max_visits
        if (visits <= arrays.max_visits).all() and (visits < arrays.min_visits).any():
            # no constraint can force a visit: reroute the visits above the minimum elsewhere
            max_visits = arrays.min_visits
        capacity_conflicts = [
            self._capacity_conflict(routes, Limit.STAGE, group, int(max_visits[s]))
            for s, group in enumerate(groups)
            if s > 0
        ]
        exceeded = [conflict for conflict in capacity_conflicts if conflict is not None]
        # the largest excess first
        yield from sorted(exceeded, key=lambda conflict: -conflict.excess)

    def _swap_conflicts(self, routes: Sequence[Route]) -> Iterator[CapacityConflict]:
        """The limit on swaps over all paths, resolved like CC3 (D.2)."""
        arrays = self.arrays
        if arrays.max_total_swaps == arrays.microbatches * arrays.max_swaps:
            return
        counts = [count_swaps(np.array(route.path), arrays.stage) for route in routes]
        excess = sum(counts) - arrays.max_total_swaps
        if excess > 0:
            agents = [b for b, count in enumerate(counts) if count > 0]
            agents.sort(key=lambda b: (routes[b].end_s, b))
            yield CapacityConflict(
                Limit.SWAPS, (NO_SWAPS,), tuple(agents), min(excess, len(agents))
            )

    def _device_conflicts(self, routes: Sequence[Route]) -> Iterator[CapacityConflict]:
        arrays = self.arrays
        for d in np.flatnonzero(arrays.stage > 0).tolist():
            conflict = self._capacity_conflict(routes, Limit.DEVICE, [d], int(arrays.capacity[d]))
            if conflict is not None:
                yield conflict

    def _capacity_conflict(
        self, routes: Sequence[Route], limit: Limit, devices: list[int], max_agents: int
    ) -> CapacityConflict | None:
        through = [b for b, route in enumerate(routes) if not set(devices).isdisjoint(route.path)]
        if len(through) <= max_agents:
            return None
        through.sort(key=lambda b: (routes[b].end_s, b))
        return CapacityConflict(limit, tuple(devices), tuple(through), len(through) - max_agents)

    def _reroute_branches(
        self, conflict: CapacityConflict, node: Node
    ) -> Iterator[Branch[Constraint]]:
        """Branches that forbid the resources to the fastest agents that have another route.

        Further branches shift the choice to slower agents, which yields several candidates.
        """
        constraints = [Constraint(r, *ALWAYS) for r in conflict.resources]
        reroutable = [
            b
            for b in conflict.agents
            if self.router.route(b, (*node.constraints[b], *constraints)) is not None
        ]
        for k in range(min(self.params.max_branches, len(reroutable) - conflict.excess + 1)):
            rerouted = reroutable[k : k + conflict.excess]
            yield [(b, constraint) for b in rerouted for constraint in constraints]


def _sender(route: Route, message: Occupancy) -> Occupancy:
    """Occupancy of the operation that sends a message."""
    transfers = [
        k
        for k in range(1, len(route.occupancies))
        if route.occupancies[k].resource != route.occupancies[k - 1].resource
    ]
    return route.occupancies[transfers[route.messages.index(message)] - 1]


class SkipPipeSearch:
    """The phases of Algorithm 1; every valid set of paths is offered to the incumbent."""

    def __init__(
        self,
        arrays: PathArrays,
        incumbent: PathIncumbent,
        run: SearchRun,
    ) -> None:
        self.arrays = arrays
        self.incumbent = incumbent
        self.run = run
        self.params = SkipPipeParams()

    def search(self) -> None:
        """Find 32 candidates for CC3, resolve TC1 and TC2 from these, and repeat."""
        router = PathRouter(self.arrays)
        stage_search = ConflictSearch(
            SkipPipeDomain(router, True, self.params), self.run, self.params.stage_options
        )
        root = stage_search.root()
        if root is None:
            return
        candidates = stage_search.solutions([root])
        while batch := list(itertools.islice(candidates, self.params.candidates)):
            self._resolve_collisions(SkipPipeDomain(router, False, self.params), batch)

    def _resolve_collisions(self, domain: SkipPipeDomain, candidates: list[Node]) -> None:
        search = ConflictSearch(domain, self.run, self.params.collision_options)

        def on_node(node: Node) -> None:
            self._offer(node)
            # a node's cost is a lower bound on its schedules
            search.upper_bound = self.incumbent.objective

        search.on_node = on_node
        search.upper_bound = self.incumbent.objective
        for _ in search.solutions(candidates):
            pass

    def _offer(self, node: Node) -> None:
        """Schedule paths that satisfy CC3 and TC1: first in first out, and in the planned order."""
        if any(isinstance(conflict, CapacityConflict) for conflict in node.conflicts):
            return
        paths = np.array([route.path for route in node.routes], dtype=np.int64)
        planned = np.array(
            [[occupancy.begin for occupancy in route.occupancies] for route in node.routes]
        )
        for tail_weight, offset in ((0.0, None), (FOLLOW_TIMES, planned)):
            makespan, begin = schedule_paths(self.arrays, paths, offset, tail_weight)
            self.incumbent.offer_schedule(paths, begin, makespan)
