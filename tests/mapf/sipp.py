"""Safe-interval path planning (Phillips & Likhachev 2011) for one agent on a weighted graph.

A state is a vertex with a window of its safe intervals; in one window an earlier arrival is never
worse, because how long one may stay depends on the window alone.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tests.mapf.sipp_windows import EntryConstraint, Window, windows


class Move(NamedTuple):
    """An agent goes from ``source`` to ``target`` in ``[begin, end)``, seconds."""

    source: int
    target: int
    begin: float
    end: float


Arcs = Sequence[Sequence[tuple[int, float]]]
"""Outgoing edges of each vertex: target and seconds."""

FREE = [Window(-math.inf, math.inf, math.inf, True)]


def seconds_to(arcs: Arcs, goal: int) -> list[float]:
    """Least seconds from every vertex to the goal, ignoring other agents (Dijkstra)."""
    into: list[list[tuple[int, float]]] = [[] for _ in arcs]
    for u, out in enumerate(arcs):
        for v, seconds in out:
            into[v].append((u, seconds))
    best = [math.inf] * len(arcs)
    best[goal] = 0.0
    queue = [(0.0, goal)]
    while queue:
        far, v = heapq.heappop(queue)
        if far > best[v]:
            continue
        for u, seconds in into[v]:
            if far + seconds < best[u]:
                best[u] = far + seconds
                heapq.heappush(queue, (best[u], u))
    return best


def safe_path(
    arcs: Arcs,
    start: int,
    goal: int,
    constraints: Iterable[EntryConstraint],
    cost_to_go: Sequence[float],
) -> tuple[Move, ...] | None:
    """Moves with the earliest final arrival at the goal; None if there is no path.

    A vertex is entered when the move to it begins, and left when the move from it ends; the start
    has been entered before all times.

    Parameters
    ----------
    rest
        A lower bound on the seconds from each vertex to the goal, as `seconds_to`.
    """
    by_vertex: dict[int, list[EntryConstraint]] = {}
    for constraint in constraints:
        by_vertex.setdefault(constraint.resource, []).append(constraint)
    safe = {v: windows(of) for v, of in by_vertex.items()}
    first = next((k for k, w in enumerate(safe.get(start, FREE)) if w.first == -math.inf), None)
    if first is None or math.isinf(cost_to_go[start]):
        return None
    tie = itertools.count()
    queue = [(cost_to_go[start], next(tie), 0.0, start, first)]
    best = {(start, first): 0.0}
    before: dict[tuple[int, int], tuple[int, int, Move]] = {}
    while queue:
        _, _, at, u, k = heapq.heappop(queue)
        if at > best[u, k]:
            continue
        window = safe.get(u, FREE)[k]
        if u == goal and window.final:
            return _back(before, u, k)
        for v, seconds in arcs[u]:
            for j, there in enumerate(safe.get(v, FREE)):
                begin = max(at, there.first)
                end = begin + seconds
                if begin >= there.last or not (window.final or end < window.before):
                    continue
                if end < best.get((v, j), math.inf) and not math.isinf(cost_to_go[v]):
                    best[v, j] = end
                    before[v, j] = u, k, Move(u, v, begin, end)
                    heapq.heappush(queue, (end + cost_to_go[v], next(tie), end, v, j))
    return None


def _back(before: dict[tuple[int, int], tuple[int, int, Move]], v: int, k: int) -> tuple[Move, ...]:
    moves = []
    while (v, k) in before:
        v, k, move = before[v, k]
        moves.append(move)
    return tuple(reversed(moves))
