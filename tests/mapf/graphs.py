"""Instances of path finding on graphs, and a solver of the joint problem to compare with."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable, Iterator
from typing import Any

import networkx as nx
import numpy as np

from tests.mapf.graph_mapf import GraphProblem

Stand = tuple[Hashable, Hashable | None, float, bool]
"""Vertex of an agent, target of its move, seconds left, whether it stays at its goal."""


def grid(rows: list[str], diagonals: bool = False) -> nx.Graph[Any]:
    """A grid map, ``@`` blocked; 8-connected with diagonals of sqrt(2) seconds."""
    free = {(r, c) for r, row in enumerate(rows) for c, cell in enumerate(row) if cell != "@"}
    graph: nx.Graph[Any] = nx.Graph()
    graph.add_nodes_from(sorted(free))
    steps = [(0, 1), (1, 0), *([(1, 1), (1, -1)] if diagonals else [])]
    for (r, c), (down, right) in itertools.product(sorted(free), steps):
        if (r + down, c + right) in free:
            seconds = math.sqrt(2) if down and right else 1.0
            graph.add_edge((r, c), (r + down, c + right), seconds=seconds)
    return graph


def random_graph(
    seed: int, vertices: int, agents: int, integral: bool, directed: bool
) -> GraphProblem:
    """A random tree with some further edges; integral or real durations of at most 3 s."""
    rng = np.random.default_rng(seed)
    graph: nx.Graph[Any] = nx.DiGraph() if directed else nx.Graph()
    graph.add_nodes_from(range(vertices))

    def join(u: int, v: int) -> None:
        for a, b in [(u, v), (v, u)]:
            seconds = float(rng.integers(1, 4)) if integral else float(rng.uniform(0.3, 3.0))
            graph.add_edge(a, b, seconds=seconds)

    for v in range(1, vertices):
        join(int(rng.integers(v)), v)
    for _ in range(int(rng.integers(vertices))):
        u, v = (int(x) for x in rng.choice(vertices, 2, replace=False))
        join(u, v)
    starts, goals = rng.permutation(vertices)[:agents], rng.permutation(vertices)[:agents]
    return GraphProblem(graph, tuple(zip(starts.tolist(), goals.tolist(), strict=True)))


def solvable(problem: GraphProblem) -> bool:
    """Whether there is a plan; how long the edges take does not matter to that."""
    unit = problem.graph.copy()
    for _, _, data in unit.edges(data=True):
        data["seconds"] = 1.0
    return joint_optimum(GraphProblem(unit, problem.agents), "makespan") is not None


def joint_optimum(problem: GraphProblem, objective: str) -> float | None:
    """Least cost by Dijkstra over where all agents are; None if there is no plan.

    Without a plan it may not end unless the seconds are whole numbers: ask `solvable` first.

    In a plan that cannot begin anything earlier, every move begins at 0 or at the end of a move.
    So at these times every agent that stands goes along an edge, stands on, or stays for good.
    """
    goals = [goal for _, goal in problem.agents]
    first: tuple[Stand, ...] = tuple((start, None, 0.0, False) for start, _ in problem.agents)
    tie = itertools.count()
    queue = [(0.0, next(tie), first)]
    closed = set()
    while queue:
        cost, _, state = heapq.heappop(queue)
        key = tuple((at, to, round(left, 9), done) for at, to, left, done in state)
        if key in closed:
            continue
        closed.add(key)
        for after in choices(problem.graph, goals, state):
            if all(done for *_, done in after):
                return cost
            moving = [left for _, to, left, _ in after if to is not None]
            if not moving:
                continue
            step = min(moving)
            pay = step * (sum(not done for *_, done in after) if objective == "sum" else 1)
            later = tuple(
                (at, None, 0.0, done)
                if to is None
                else (to, None, 0.0, False)
                if left <= step + 1e-12
                else (at, to, left - step, False)
                for at, to, left, done in after
            )
            heapq.heappush(queue, (cost + pay, next(tie), later))
    return None


def choices(
    graph: nx.Graph[Any], goals: list[Hashable], state: tuple[Stand, ...]
) -> Iterator[tuple[Stand, ...]]:
    """Joint moves of the waiting agents that occupy no vertex twice."""
    options: list[list[Stand]] = []
    for b, (at, to, _left, done) in enumerate(state):
        if to is not None or done:
            options.append([state[b]])
            continue
        mine: list[Stand] = [(at, None, 0.0, False)]
        mine += [(at, v, data["seconds"], False) for v, data in graph.adj[at].items()]
        if at == goals[b]:
            mine.append((at, None, 0.0, True))
        options.append(mine)
    for picked in itertools.product(*options):
        held = [v for at, to, _, _ in picked for v in ([at] if to is None else [at, to])]
        if len(held) == len(set(held)):
            yield picked
