"""Exact times for given paths and orders, and a dispatching rule where there is no order yet."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

from planner.parts import PathOp, PathPlan
from planner.problems import PathProblem

Key = tuple[int, str, int]


def chain_of(path: Sequence[int]) -> list[tuple[str, int]]:
    """``(kind, device)`` of a microbatch in dependency order."""
    return [*(("F", d) for d in path), ("H", path[0]), *(("B", d) for d in reversed(path))]


def timed_by_rank(
    problem: PathProblem, paths: Sequence[Sequence[int]], rank: Mapping[Key, float]
) -> PathPlan | None:
    """Earliest times with every device working in the order of ``rank``; None if they deadlock."""
    seconds = {"F": problem.forward_s, "H": problem.head_s, "B": problem.backward_s}
    place = {"F": 0, "H": 1, "B": 2}
    chains = [chain_of(path) for path in paths]
    queue: list[list[tuple[float, int, int, int]]] = [[] for _ in range(len(problem))]
    for b, chain in enumerate(chains):
        for k, (kind, d) in enumerate(chain):
            queue[d].append((rank[b, kind, d], place[kind], b, k))
    for ops in queue:
        ops.sort()
    # with live memory, the F that comes after m unfinished ones waits for one of their B
    pointer = [0] * len(problem)
    free = [0.0] * len(problem)
    ready = [{0: 0.0} for _ in chains]
    ends: list[list[float]] = [[] for _ in range(len(problem))]
    live = [0] * len(problem)
    done: list[PathOp] = []
    moved = True
    while moved:
        moved = False
        for d in range(len(problem)):
            while pointer[d] < len(queue[d]):
                _, _, b, k = queue[d][pointer[d]]
                kind = chains[b][k][0]
                if k not in ready[b]:
                    break
                begin = max(free[d], ready[b][k])
                if kind == "F" and problem.live_memory and live[d] >= problem.memory[d]:
                    return None
                end = begin + float(seconds[kind][d])
                live[d] += {"F": 1, "H": 0, "B": -1}[kind]
                free[d] = end
                ends[d].append(end)
                done.append(PathOp(b, d, kind, begin, end))
                if k + 1 < len(chains[b]):
                    after = chains[b][k + 1][1]
                    ready[b][k + 1] = end + float(problem.transfer_s[d, after])
                pointer[d] += 1
                moved = True
    if any(p < len(q) for p, q in zip(pointer, queue, strict=True)):
        return None
    return PathPlan.of(paths, done)


def dispatched(
    problem: PathProblem, paths: Sequence[Sequence[int]], priority: Sequence[float] | None = None
) -> PathPlan | None:
    """Every free device takes the ready operation that is most urgent; None if memory deadlocks.

    Urgency is the remaining length of the microbatch's chain, or the given priority first.
    """
    seconds = {"F": problem.forward_s, "H": problem.head_s, "B": problem.backward_s}
    chains = [chain_of(path) for path in paths]
    tails = []
    for chain in chains:
        tail = [0.0] * (len(chain) + 1)
        for k in reversed(range(len(chain))):
            kind, d = chain[k]
            hop = 0.0 if k + 1 == len(chain) else float(problem.transfer_s[d, chain[k + 1][1]])
            tail[k] = float(seconds[kind][d]) + hop + tail[k + 1]
        tails.append(tail)
    waiting: list[list[tuple[float, int, int]]] = [[] for _ in range(len(problem))]
    blocked: list[list[tuple[float, int, int]]] = [[] for _ in range(len(problem))]
    busy = [False] * len(problem)
    live = [0] * len(problem)
    events: list[tuple[float, int, int, int]] = []
    for b in range(len(chains)):
        heapq.heappush(events, (0.0, 1, b, 0))
    done: list[PathOp] = []
    while events:
        now = events[0][0]
        touched: dict[int, None] = {}
        while events and events[0][0] == now:
            _, arrives, b, k = heapq.heappop(events)
            kind, d = chains[b][k]
            touched[d] = None
            if arrives:
                first = 0.0 if priority is None else -priority[b]
                heapq.heappush(
                    waiting[d], (first - tails[b][k] if priority is None else first, b, k)
                )
                continue
            busy[d] = False
            if kind == "B":
                live[d] -= 1
                for item in blocked[d]:
                    heapq.heappush(waiting[d], item)
                blocked[d].clear()
            if k + 1 < len(chains[b]):
                hop = float(problem.transfer_s[d, chains[b][k + 1][1]])
                heapq.heappush(events, (now + hop, 1, b, k + 1))
                if hop == 0.0:
                    touched[chains[b][k + 1][1]] = None
        for d in touched:
            while not busy[d] and waiting[d]:
                item = heapq.heappop(waiting[d])
                _, b, k = item
                kind = chains[b][k][0]
                if kind == "F" and problem.live_memory and live[d] >= problem.memory[d]:
                    blocked[d].append(item)
                    continue
                live[d] += kind == "F"
                busy[d] = True
                end = now + float(seconds[kind][d])
                done.append(PathOp(b, d, kind, now, end))
                heapq.heappush(events, (end, 0, b, k))
    if len(done) < sum(len(chain) for chain in chains):
        return None
    return PathPlan.of(paths, done)
