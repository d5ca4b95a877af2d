"""Independent verifier of assignments: recomputes eq. 1-4 from the definitions.

Shares no code with the solvers, nor with the cost functions of `planner.problems`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from planner.checker.violation import Violation
from planner.network.network import Network
from planner.problems import AssignmentProblem
from planner.problems.answers import AssignmentPlan

Floats = NDArray[np.float64]
TOLERANCE = 1e-9
"""Relative; sums in another order differ by less."""


def check_assignment(plan: AssignmentPlan, problem: AssignmentProblem) -> list[Violation]:
    """Report every rule of the assignment problem that a plan breaks.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 1-4.
    """
    return list(_violations(plan, problem))


def assignment_cost_s(
    groups: Sequence[Sequence[int]],
    network: Network,
    activation_bytes: Sequence[float],
    gradient_bytes: Sequence[float],
) -> float:
    """Eq. 1 in seconds; both directions of every link are averaged here.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 1-4.
    """
    latency = (network.latency_s + network.latency_s.T) / 2
    bandwidth = (network.bandwidth_bytes_per_s + network.bandwidth_bytes_per_s.T) / 2
    exchange = 0.0
    for group, gradient in zip(groups, gradient_bytes, strict=True):
        for d in group:
            partners = [e for e in group if e != d]
            exchange = max(
                exchange,
                sum(
                    2 * (latency[d, e] + gradient / (len(group) * bandwidth[d, e]))
                    for e in partners
                ),
            )
    pipeline = 0.0
    for left, right, activation in zip(groups, groups[1:], activation_bytes, strict=False):
        pick = np.ix_(list(left), list(right))
        pipeline += 2 * smallest_bottleneck(latency[pick] + activation / bandwidth[pick])
    return float(exchange + pipeline)


def smallest_bottleneck(cost: Floats) -> float:
    """Smallest possible largest entry of a matching that covers the smaller side.

    Parameters
    ----------
    cost
        ``float[n, m]``.
    """
    if cost.shape[0] > cost.shape[1]:
        cost = cost.T
    levels = np.unique(cost)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high) // 2
        if _covers(cost <= levels[middle]):
            high = middle
        else:
            low = middle + 1
    return float(levels[low])


def _covers(allowed: NDArray[np.bool_]) -> bool:
    """Whether every row can be matched (Kuhn's augmenting paths, without recursion)."""
    owner = np.full(allowed.shape[1], -1)
    for start in range(len(allowed)):
        reached_from: dict[int, int] = {}
        frontier = [start]
        free = -1
        while frontier and free < 0:
            row = frontier.pop()
            for column in map(int, np.flatnonzero(allowed[row])):
                if column in reached_from:
                    continue
                reached_from[column] = row
                if owner[column] < 0:
                    free = column
                    break
                frontier.append(int(owner[column]))
        if free < 0:
            return False
        while True:  # flip the path back to the start
            row = reached_from[free]
            previous = int(np.flatnonzero(owner == row)[0]) if row != start else -1
            owner[free] = row
            if previous < 0:
                break
            free = previous
    return True


def _violations(plan: AssignmentPlan, problem: AssignmentProblem) -> Iterator[Violation]:
    n = len(problem.network)
    sizes = tuple(len(group) for group in plan.groups)
    if sizes != problem.stage_sizes:
        yield Violation(
            "eq. 1", "groups", f"stage sizes must be {list(problem.stage_sizes)}, found {sizes}"
        )
    assigned = sorted(d for group in plan.groups for d in group)
    if assigned != list(range(n)):
        misassigned = sorted(
            {d for d in assigned if assigned.count(d) > 1 or not 0 <= d < n}
            | (set(range(n)) - set(assigned))
        )
        yield Violation(
            "eq. 1",
            "groups",
            f"every device must be in exactly one group, devices {misassigned[:5]} are not",
        )
        return
    if len(set(sizes)) > 1:
        if plan.grid is not None:
            yield Violation("grid", "grid", "groups differ in size, so there must be no grid")
        return
    if plan.grid is None:
        yield Violation("grid", "grid", "equal groups need a grid, found none")
        return
    yield from grid_violations(plan, problem.network, problem.activation_bytes)


def grid_violations(
    plan: AssignmentPlan, network: Network, activation_bytes: Sequence[float]
) -> Iterator[Violation]:
    """Check that columns are the groups and that rows realise the bottleneck matchings."""
    grid = plan.grid
    assert grid is not None
    if tuple(tuple(sorted(column)) for column in grid.T.tolist()) != tuple(
        tuple(sorted(group)) for group in plan.groups
    ):
        yield Violation("grid", "grid", "its columns must be the groups")
        return
    latency = (network.latency_s + network.latency_s.T) / 2
    bandwidth = (network.bandwidth_bytes_per_s + network.bandwidth_bytes_per_s.T) / 2
    for j, activation in enumerate(activation_bytes):
        hop = latency + activation / bandwidth
        used = float(hop[grid[:, j], grid[:, j + 1]].max())
        best = smallest_bottleneck(hop[np.ix_(plan.groups[j], plan.groups[j + 1])])
        if used > best * (1 + TOLERANCE):
            yield Violation(
                "eq. 3",
                f"grid[:, {j}:{j + 2}]",
                f"the largest hop must be {best:g} s, the best matching's, found {used:g} s",
            )
