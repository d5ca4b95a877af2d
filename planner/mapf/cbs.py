"""SkipPipe's own solver: conflict-based search over microbatches (3.3, 3.4, Algorithm 1).

The phases of the paper, each a `ConflictSearch`: stages with too many paths (CC3) until 32
candidates are found, then from these devices with too many (TC1) and collisions (TC2). The slowest
agents are spared: the fastest have to make way.

Where links queue they are places too: two messages on one link collide (an edge conflict), and who
makes way sends later, or works later on the device before the link if it would have sent first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.mapf import conflict_search
from planner.mapf.arrays import PathArrays
from planner.mapf.conflict_search import Branch, ConflictObjective, ConflictSearch, Options
from planner.mapf.fixed_order import FOLLOW, scheduled
from planner.mapf.incumbent import PathIncumbent
from planner.mapf.intervals import Forbidden, Stay, conflicts
from planner.mapf.moves import count_swaps
from planner.mapf.router import ALWAYS, SWAPS, PathRouter, Route
from planner.search.stop import StopRun


@dataclass(frozen=True)
class Crowd:
    """More paths through some devices than may go there (CC3, TC1), or too many swaps (D.2).

    Attributes
    ----------
    stage
        Whether the devices are those of a stage (CC3), or `SWAPS`; else one device (TC1).
    agents
        Those on their way through, the fastest first.
    excess
        How many have to stay away.
    """

    stage: bool
    devices: tuple[int, ...]
    agents: tuple[int, ...]
    excess: int


Collision = tuple[Stay, Stay]
Conflict = Crowd | Collision
Node = conflict_search.Node[Route, Forbidden, Conflict]


BEST_FIRST = Options(ConflictObjective.MAKESPAN, classified=1, bypass=False)
"""High level of CC3, as in the paper."""

NEARLY_BEST = Options(ConflictObjective.MAKESPAN, suboptimality=1.5)
"""High level of TC1 and TC2: among nodes up to half longer, the one with the fewest conflicts.

The paper's is best first, which takes far longer to come to a first schedule.
"""


@dataclass(frozen=True)
class CbsSettings:
    """How to search, as far as the paper leaves it open.

    Attributes
    ----------
    near
        Of the later end: two agents that end so near to each other may both make way (the delta of
        Algorithm 1).
    candidates
        Sets of paths that satisfy CC3 before TC1 and TC2 are looked at (Algorithm 1).
    alternatives
        Choices of who leaves a crowd, the paper's first.
    stages, collisions
        The high level of CC3, and of TC1 and TC2.
    """

    near: float = 1e-6
    candidates: int = 32
    alternatives: int = 4
    stages: Options = BEST_FIRST
    collisions: Options = NEARLY_BEST


class MicrobatchAgents:
    """One agent per microbatch.

    Parameters
    ----------
    blind
        Look at CC3 alone.
    """

    def __init__(
        self, router: PathRouter, blind: bool, settings: CbsSettings | None = None
    ) -> None:
        self.arrays = router.arrays
        self.router = router
        self.blind = blind
        self.settings = settings or CbsSettings()

    @property
    def agents(self) -> int:
        """Number of microbatches."""
        return self.arrays.microbatches

    def plan(self, agent: int, rules: tuple[Forbidden, ...]) -> Route | None:
        """The fastest route."""
        return self.router.route(agent, rules)

    def cost(self, route: Route) -> float:
        """Its end."""
        return route.end_s

    def conflicts(self, routes: Sequence[Route]) -> list[Conflict]:
        """Crowded stages (CC3), crowded devices (TC1), collisions (TC2)."""
        found: list[Conflict] = [*self._crowded_stages(routes), *self._too_many_swaps(routes)]
        if not self.blind:
            found += self._crowded_devices(routes)
            slack = 1e-9 * max(route.end_s for route in routes)
            stays = [stay for route in routes for stay in (*route.stays, *route.messages)]
            found += conflicts(stays, slack)
        return found

    def urgency(self, conflict: Conflict) -> int:
        """CC3 and the cap on swaps before TC1 before TC2."""
        if isinstance(conflict, Crowd):
            return 0 if conflict.stage else 1
        return 2

    def split(self, conflict: Conflict, node: Node) -> list[Branch[Forbidden]]:
        """The fastest make way; of two that end together, one or the other."""
        if isinstance(conflict, Crowd):
            return list(self._leave(conflict, node))
        one, other = conflict
        ends = node.routes[one.agent].end_s, node.routes[other.agent].end_s
        near = abs(ends[0] - ends[1]) <= self.settings.near * max(ends)
        branches: list[Branch[Forbidden]] = []
        if ends[0] >= ends[1] or near:
            branches.append([(other.agent, self._make_way(node, other, one))])
        if ends[0] < ends[1] or near:
            branches.append([(one.agent, self._make_way(node, one, other))])
        return branches

    def _make_way(self, node: Node, stay: Stay, spared: Stay) -> Forbidden:
        """Not there while the other is; on a link, not before it in the order of the queue."""
        if stay.place >= len(self.arrays.stage):
            mine = _sender(node.routes[stay.agent], stay)
            its = _sender(node.routes[spared.agent], spared)
            if mine.begin < mine.end < its.end:
                return Forbidden(mine.place, mine.begin, its.end)
        return Forbidden(stay.place, spared.begin, spared.end)

    def _crowded_stages(self, routes: Sequence[Route]) -> Iterator[Crowd]:
        t = self.arrays
        groups = [t.members[low:high].tolist() for low, high in itertools.pairwise(t.first)]
        visits = [sum(d in group for r in routes for d in r.path) for group in groups]
        most = t.most
        if (visits <= t.most).all() and (visits < t.fewest).any():
            # nobody can be forbidden to stay away: those beyond the fewest elsewhere leave
            most = t.fewest
        crowds = [
            self._crowd(routes, True, group, int(most[s]))
            for s, group in enumerate(groups)
            if s > 0
        ]
        over = [crowd for crowd in crowds if crowd is not None]
        # the most crowded first
        yield from sorted(over, key=lambda crowd: -crowd.excess)

    def _too_many_swaps(self, routes: Sequence[Route]) -> Iterator[Crowd]:
        """The cap over all paths, resolved as CC3 (D.2)."""
        t = self.arrays
        if t.max_total_swaps == t.microbatches * t.max_swaps:
            return
        counts = [count_swaps(np.array(route.path), t.stage) for route in routes]
        excess = sum(counts) - t.max_total_swaps
        if excess > 0:
            agents = [b for b, count in enumerate(counts) if count > 0]
            agents.sort(key=lambda b: (routes[b].end_s, b))
            yield Crowd(True, (SWAPS,), tuple(agents), min(excess, len(agents)))

    def _crowded_devices(self, routes: Sequence[Route]) -> Iterator[Crowd]:
        t = self.arrays
        for d in np.flatnonzero(t.stage > 0).tolist():
            crowd = self._crowd(routes, False, [d], int(t.room[d]))
            if crowd is not None:
                yield crowd

    def _crowd(
        self, routes: Sequence[Route], stage: bool, devices: list[int], most: int
    ) -> Crowd | None:
        through = [b for b, route in enumerate(routes) if not set(devices).isdisjoint(route.path)]
        if len(through) <= most:
            return None
        through.sort(key=lambda b: (routes[b].end_s, b))
        return Crowd(stage, tuple(devices), tuple(through), len(through) - most)

    def _leave(self, crowd: Crowd, node: Node) -> Iterator[Branch[Forbidden]]:
        """The fastest that have another way are kept off the devices.

        Then others in their place, the next fastest first, so that there are several candidates.
        """
        rules = [Forbidden(d, *ALWAYS) for d in crowd.devices]
        able = [
            b for b in crowd.agents if self.router.route(b, (*node.rules[b], *rules)) is not None
        ]
        for k in range(min(self.settings.alternatives, len(able) - crowd.excess + 1)):
            leaving = able[k : k + crowd.excess]
            yield [(b, rule) for b in leaving for rule in rules]


def _sender(route: Route, message: Stay) -> Stay:
    """The operation before a message."""
    hops = [
        k for k in range(1, len(route.stays)) if route.stays[k].place != route.stays[k - 1].place
    ]
    return route.stays[hops[route.messages.index(message)] - 1]


class CbsSearch:
    """The phases of Algorithm 1; every set of paths that is valid is offered."""

    def __init__(
        self,
        arrays: PathArrays,
        incumbent: PathIncumbent,
        run: StopRun,
        settings: CbsSettings | None = None,
    ) -> None:
        self.arrays = arrays
        self.incumbent = incumbent
        self.run = run
        self.settings = settings or CbsSettings()

    def search(self) -> None:
        """32 candidates by CC3, from these TC1 and TC2; then the next 32."""
        router = PathRouter(self.arrays)
        stages = ConflictSearch(
            MicrobatchAgents(router, True, self.settings), self.run, self.settings.stages
        )
        root = stages.root()
        if root is None:
            return
        candidates = stages.solutions([root])
        while batch := list(itertools.islice(candidates, self.settings.candidates)):
            self._below(MicrobatchAgents(router, False, self.settings), batch)

    def _below(self, domain: MicrobatchAgents, candidates: list[Node]) -> None:
        search = ConflictSearch(domain, self.run, self.settings.collisions)

        def look(node: Node) -> None:
            self._offer(node)
            # a node ends no earlier than its routes without collisions
            search.limit = self.incumbent.objective

        search.seen = look
        search.limit = self.incumbent.objective
        for _ in search.solutions(candidates):
            pass

    def _offer(self, node: Node) -> None:
        """Dispatch paths that satisfy CC3 and TC1: first in first out, and in the planned order."""
        if any(isinstance(conflict, Crowd) for conflict in node.conflicts):
            return
        paths = np.array([route.path for route in node.routes], dtype=np.int64)
        planned = np.array([[stay.begin for stay in route.stays] for route in node.routes])
        for pull, nudge in ((0.0, None), (FOLLOW, planned)):
            makespan, begin = scheduled(self.arrays, paths, nudge, pull)
            self.incumbent.offer_times(paths, begin, makespan)
