"""Exact times for given paths and orders; reference version of the compiled schedulers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.problems import PathProblem
from planner.problems.answers import PathOp, PathPlan

Key = tuple[int, str, int]


def chain_of(path: Sequence[int]) -> list[tuple[str, int]]:
    """``(kind, device)`` of a microbatch in dependency order."""
    return [*(("F", d) for d in path), ("H", path[0]), *(("B", d) for d in reversed(path))]


def schedule_by_rank(
    problem: PathProblem, paths: Sequence[Sequence[int]], rank: Mapping[Key, float]
) -> PathPlan | None:
    """Schedule every device's operations as early as possible by ``rank``; None in a deadlock.

    Where links queue, a link's messages leave in the order in which its device works.
    """
    seconds = {"F": problem.forward_s, "H": problem.head_s, "B": problem.backward_s}
    kind_order = {"F": 0, "H": 1, "B": 2}
    chains = [chain_of(path) for path in paths]
    queue: list[list[tuple[float, int, int, int]]] = [[] for _ in range(len(problem))]
    for b, chain in enumerate(chains):
        for k, (kind, d) in enumerate(chain):
            queue[d].append((rank[b, kind, d], kind_order[kind], b, k))
    for ops in queue:
        ops.sort()
    # with live memory, an F after m unfinished microbatches waits for one of their B
    next_index = [0] * len(problem)
    free = [0.0] * len(problem)
    ready = [{0: 0.0} for _ in chains]
    ends: list[list[float]] = [[] for _ in range(len(problem))]
    live = [0] * len(problem)
    link_free: dict[tuple[int, int], float] = {}
    done: list[PathOp] = []
    progressed = True
    while progressed:
        progressed = False
        for d in range(len(problem)):
            while next_index[d] < len(queue[d]):
                _, _, b, k = queue[d][next_index[d]]
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
                    leaves = end
                    if problem.link_s is not None and after != d:
                        leaves = max(end, link_free.get((d, after), 0.0))
                        link_free[d, after] = leaves + float(problem.link_s[d, after])
                    ready[b][k + 1] = leaves + float(problem.transfer_s[d, after])
                next_index[d] += 1
                progressed = True
    if any(p < len(q) for p, q in zip(next_index, queue, strict=True)):
        return None
    return PathPlan.of(paths, done)
