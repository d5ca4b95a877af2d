"""SkipPipe's own solver: conflict-based search over microbatches (3.5, Algorithm 1).

Low level: A* over time finds a microbatch's fastest path under its constraints (CC1, CC2, exactly
``path_stages`` stages), forward, head and backward costed. High level, in the paper's phases:
stages with too many paths (CC3) until 32 candidates are found, then devices with too many (TC1),
then collisions (TC2). The slowest agents are spared: the fastest have to make way. A node plans
anew only the agents whose constraints changed.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.mapf.chains import Path
from planner.mapf.follow import scheduled
from planner.mapf.incumbent import Incumbent
from planner.mapf.intervals import Constraints, Forbidden, Stay, earliest, first_conflict
from planner.mapf.tables import Floats, Tables
from planner.stop import StopRun

CANDIDATES = 32
"""Sets of paths that satisfy CC3 before TC1 and TC2 are looked at (Algorithm 1)."""

ALWAYS = (-math.inf, math.inf)

Blocks = dict[int, list[tuple[float, float]]]


@dataclass(frozen=True)
class Route:
    """A microbatch's path with the times it is on each device."""

    path: Path
    stays: tuple[Stay, ...]

    @property
    def end_s(self) -> float:
        """End of the last B."""
        return self.stays[-1].end


class Router:
    """A* for one microbatch; the rest of a chain is never longer than the heuristic says."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        both = tables.hop + tables.hop.T
        self.both = both
        busy = tables.forward + tables.backward
        gap = tables.stage[None, :] - tables.stage[:, None]
        self.back = (gap == -1) & (tables.stage[None, :] > 0) & (tables.max_swaps > 0)
        self.allowed = ((gap > 0) | self.back) & (tables.room > 0)[None, :]
        arcs = np.where(self.allowed, both, math.inf)
        # rest[start][k][d]: transfers and work after d with k devices to come
        self.rest: dict[int, list[Floats]] = {}
        for start in dict.fromkeys(tables.starts.tolist()):
            rows = [both[:, start]]
            for _ in range(tables.path_stages - 1):
                rows.append((arcs + busy[None, :] + rows[-1][None, :]).min(axis=1))
            self.rest[start] = rows

    def route(self, agent: int, blocks: Blocks) -> Route | None:
        """The fastest path under the agent's constraints, None if there is none.

        The backward pass waits where the forward pass need not, so a path is costed in full when
        its forward half is complete, and put back with its true end; it is final when it comes out
        again (the paper's re-insertion).
        """
        t = self.tables
        start = int(t.starts[agent])
        begin = earliest(0.0, float(t.forward[start]), blocks.get(start, []))
        tie = itertools.count()
        fixed = float(t.head[start] + t.backward[start])
        out = begin + float(t.forward[start])
        first = out + float(self.rest[start][t.path_stages - 1][start]) + fixed
        queue: list[tuple[float, int, Path, tuple[float, ...], Route | None]] = []
        heapq.heappush(queue, (first, next(tie), (start,), (begin,), None))
        while queue:
            cost, _, path, begins, done = heapq.heappop(queue)
            if math.isinf(cost):
                return None
            if done is not None:
                return done
            left = t.path_stages - len(path)
            if left == 0:
                full = self._whole(agent, path, begins, blocks)
                if full is not None:
                    heapq.heappush(queue, (full.end_s, next(tie), path, begins, full))
                continue
            u = path[-1]
            for v in np.flatnonzero(self.allowed[u]).tolist():
                if not self._may_follow(path, v):
                    continue
                ready = begins[-1] + float(t.forward[u] + t.hop[u, v])
                at = earliest(ready, float(t.forward[v]), blocks.get(v, []))
                if math.isinf(at):
                    continue
                # what is certain to come: the rest of the way, and the way back along the path
                behind = sum(
                    float(t.hop[b, a] + t.backward[b]) for a, b in itertools.pairwise((*path, v))
                )
                coming = float(self.rest[start][left - 1][v])
                estimate = at + float(t.forward[v]) + coming + behind + fixed
                heapq.heappush(queue, (estimate, next(tie), (*path, v), (*begins, at), None))
        return None

    def _may_follow(self, path: Path, v: int) -> bool:
        """CC2 and no stage twice."""
        stage = self.tables.stage
        stages = [int(stage[d]) for d in path[1:]]
        s = int(stage[v])
        if s in stages or s == 0:
            return False
        swaps = sum(a == b + 1 for a, b in itertools.pairwise(stages))
        if stages and s < stages[-1]:
            swapped = len(stages) > 1 and stages[-2] > stages[-1]
            return (
                not swapped
                and swaps < self.tables.max_swaps
                and (len(stages) < 2 or stages[-2] < s)
            )
        return not stages or s > max(stages)

    def _whole(
        self, agent: int, path: Path, begins: tuple[float, ...], blocks: Blocks
    ) -> Route | None:
        t = self.tables
        start = path[0]
        stays = [
            Stay(agent, d, at, at + float(t.forward[d])) for d, at in zip(path, begins, strict=True)
        ]
        at, ready = path[-1], stays[-1].end
        work = [(start, float(t.head[start]))]
        work += [(d, float(t.backward[d])) for d in reversed(path)]
        for d, seconds in work:
            ready = earliest(ready + float(t.hop[at, d]), seconds, blocks.get(d, []))
            if math.isinf(ready):
                return None
            stays.append(Stay(agent, d, ready, ready + seconds))
            at, ready = d, ready + seconds
        return Route(path, tuple(stays))


@dataclass(frozen=True)
class Node:
    """A node of the high-level search."""

    constraints: Constraints
    routes: tuple[Route, ...]

    @property
    def end_s(self) -> float:
        """The slowest agent's end."""
        return max(route.end_s for route in self.routes)


class ConflictSearch:
    """The phases of Algorithm 1, one expansion at a time."""

    def __init__(self, tables: Tables, incumbent: Incumbent, run: StopRun) -> None:
        self.tables = tables
        self.incumbent = incumbent
        self.run = run
        self.router = Router(tables)

    def search(self) -> None:
        """CC3 to 32 candidates, then TC1 and TC2; every set of paths that is valid is offered."""
        root = self._planned(Constraints(), None)
        if root is None:
            return
        found = self._phase([root], self._stage_children, CANDIDATES)
        self._phase(found, self._device_children, 1)

    def _phase(
        self, nodes: list[Node], children: Callable[[Node], list[Constraints] | None], wanted: int
    ) -> list[Node]:
        tie = itertools.count()
        queue = [(node.end_s, next(tie), node) for node in nodes]
        heapq.heapify(queue)
        done: list[Node] = []
        while queue and len(done) < wanted and self.run.check() is None:
            _, _, node = heapq.heappop(queue)
            more = children(node)
            self.run.update()
            if more is None:
                done.append(node)
                self._offer(node)
                continue
            for constraints in more:
                child = self._planned(constraints, node)
                if child is not None:
                    heapq.heappush(queue, (child.end_s, next(tie), child))
        return done

    def _planned(self, constraints: Constraints, parent: Node | None) -> Node | None:
        """A node; only agents whose constraints differ from the parent's are planned anew."""
        routes: list[Route] = []
        for agent in range(self.tables.microbatches):
            mine = constraints.of(agent)
            if parent is not None and mine == parent.constraints.of(agent):
                routes.append(parent.routes[agent])
                continue
            route = self.router.route(agent, mine)
            if route is None:
                return None
            routes.append(route)
        return Node(constraints, tuple(routes))

    def _fastest(self, node: Node, place: int, stage: bool) -> list[int]:
        """Agents through a stage or device, the fastest first: the slowest are spared."""
        t = self.tables
        found = [
            b
            for b, route in enumerate(node.routes)
            if any((t.stage[d] if stage else d) == place for d in route.path)
        ]
        return sorted(found, key=lambda b: (node.routes[b].end_s, b))

    def _stage_children(self, node: Node) -> list[Constraints] | None:
        """CC3: the fastest of too many paths leave the most crowded stage; None if none is."""
        t = self.tables
        crowds = {s: self._fastest(node, s, True) for s in range(1, len(t.most))}
        over = {s: len(c) - int(t.most[s]) for s, c in crowds.items() if len(c) > t.most[s]}
        if not over:
            return None
        children = []
        for s in sorted(over, key=lambda s: (-over[s], s)):
            devices = t.members[t.first[s] : t.first[s + 1]].tolist()
            child = self._leave(node, crowds[s], over[s], devices)
            if child is not None:
                children.append(child)
        return children

    def _leave(
        self, node: Node, crowd: list[int], count: int, devices: list[int]
    ) -> Constraints | None:
        """The first ``count`` of a crowd that have another way are kept off the devices."""
        constraints = node.constraints
        for b in crowd:
            if count == 0:
                break
            child = constraints.plus(*(Forbidden(b, d, *ALWAYS) for d in devices))
            if self.router.route(b, child.of(b)) is not None:
                constraints = child
                count -= 1
        return constraints if count == 0 else None

    def _device_children(self, node: Node) -> list[Constraints] | None:
        """TC1, then TC2; CC3 again where a new path broke it. None if there is no conflict."""
        crowded = self._stage_children(node)
        if crowded is not None:
            return crowded
        t = self.tables
        for d in range(len(t.room)):
            through = self._fastest(node, d, False)
            if t.stage[d] > 0 and len(through) > t.room[d]:
                child = self._leave(node, through, len(through) - int(t.room[d]), [d])
                return [] if child is None else [child]
        self._offer(node)
        stays = [stay for route in node.routes for stay in route.stays]
        conflict = first_conflict(stays, 1e-9 * node.end_s)
        if conflict is None:
            return None
        one, other = conflict
        ends = node.routes[one.agent].end_s, node.routes[other.agent].end_s
        near = abs(ends[0] - ends[1]) <= 1e-6 * node.end_s
        children = []
        if ends[0] >= ends[1] or near:
            rule = Forbidden(other.agent, other.place, one.begin, one.end)
            children.append(node.constraints.plus(rule))
        if ends[0] < ends[1] or near:
            rule = Forbidden(one.agent, one.place, other.begin, other.end)
            children.append(node.constraints.plus(rule))
        return children

    def _offer(self, node: Node) -> None:
        """Dispatch the paths if they satisfy CC3 and TC1."""
        t = self.tables
        paths = np.array([route.path for route in node.routes], dtype=np.int64)
        visits = np.bincount(t.stage[paths.ravel()], minlength=len(t.most))
        through = np.bincount(paths.ravel(), minlength=len(t.room))
        if (visits < t.fewest).any() or (visits > t.most).any() or (through > t.room).any():
            return
        makespan, begin = scheduled(t, paths, pull=0.0)
        self.incumbent.offer_times(paths, begin, makespan)
