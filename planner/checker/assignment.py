"""Independent verifier of assignments: recomputes eq. 1-4 from the definitions.

Shares no code with the solvers, nor with the cost functions of `planner.problems`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

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
    """Every rule of the assignment problem that a plan breaks."""
    return list(_violations(plan, problem))


def assignment_cost_s(
    groups: Sequence[Sequence[int]],
    network: Network,
    activation_bytes: Sequence[float],
    gradient_bytes: Sequence[float],
) -> float:
    """Eq. 1 in seconds; both directions of every link are averaged here."""
    latency = (network.latency_s + network.latency_s.T) / 2
    bandwidth = (network.bandwidth_bytes_per_s + network.bandwidth_bytes_per_s.T) / 2
    exchange = 0.0
    for group, gradient in zip(groups, gradient_bytes, strict=True):
        for d in group:
            others = [e for e in group if e != d]
            exchange = max(
                exchange,
                sum(
                    2 * (latency[d, e] + gradient / (len(group) * bandwidth[d, e])) for e in others
                ),
            )
    pipeline = 0.0
    for left, right, activation in zip(groups, groups[1:], activation_bytes, strict=False):
        pick = np.ix_(list(left), list(right))
        pipeline += 2 * smallest_bottleneck(latency[pick] + activation / bandwidth[pick])
    return float(exchange + pipeline)


def smallest_bottleneck(cost: Floats) -> float:
    """Smallest possible largest entry of a matching that covers the smaller side."""
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
        came: dict[int, int] = {}
        frontier = [start]
        free = -1
        while frontier and free < 0:
            row = frontier.pop()
            for column in map(int, np.flatnonzero(allowed[row])):
                if column in came:
                    continue
                came[column] = row
                if owner[column] < 0:
                    free = column
                    break
                frontier.append(int(owner[column]))
        if free < 0:
            return False
        while True:  # flip the path back to the start
            row = came[free]
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
    seen = sorted(d for group in plan.groups for d in group)
    if seen != list(range(n)):
        strange = sorted(
            {d for d in seen if seen.count(d) > 1 or not 0 <= d < n} | (set(range(n)) - set(seen))
        )
        yield Violation(
            "eq. 1",
            "groups",
            f"every device must be in exactly one group, devices {strange[:5]} are not",
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
    """Whether the columns are the groups and the rows realise the bottleneck matchings."""
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


def recomputed_bound_s(
    witness: Mapping[str, Any],
    network: Network,
    stage_sizes: Sequence[int],
    activation_bytes: Sequence[float],
    gradient_bytes: Sequence[float],
) -> float | None:
    """What a witness proves about eq. 1, computed from the problem alone.

    Parameters
    ----------
    witness
        ``kind`` "star and forest", which needs nothing else.
    network
        N devices; both directions of every link are averaged here.
    stage_sizes
        Devices of each of S stages.
    activation_bytes, gradient_bytes
        Per boundary (S - 1) and per stage (S).

    Returns
    -------
    float or None
        Seconds that no assignment falls below; None for another kind, or where the numbers do not
        belong together.
    """
    sizes, n = list(stage_sizes), len(network)
    fits = (
        bool(sizes)
        and min(sizes) >= 1
        and sum(sizes) == n
        and len(activation_bytes) == len(sizes) - 1
        and len(gradient_bytes) == len(sizes)
    )
    if not fits or witness.get("kind") != "star and forest":
        return None
    latency = (network.latency_s + network.latency_s.T) / 2
    bandwidth = (network.bandwidth_bytes_per_s + network.bandwidth_bytes_per_s.T) / 2
    return _star_s(latency, bandwidth, sizes, gradient_bytes) + _forest_s(
        latency, bandwidth, sizes, activation_bytes
    )


def bound_violations(
    bound: float | None, witness: Mapping[str, Any] | None, problem: AssignmentProblem, where: str
) -> Iterator[Violation]:
    """A bound that its witness does not prove."""
    if bound is None or witness is None:
        return
    again = recomputed_bound_s(
        witness,
        problem.network,
        problem.stage_sizes,
        problem.activation_bytes,
        problem.gradient_bytes,
    )
    if again is None:
        kind = witness.get("kind")
        yield Violation("bound", where, f"its witness of kind {kind!r} proves nothing here")
    elif bound > again * (1 + TOLERANCE):
        yield Violation("bound", where, f"its witness proves {again:.9g} s, found {bound:.9g} s")


def _star_s(
    latency: Floats, bandwidth: Floats, sizes: Sequence[int], gradient_bytes: Sequence[float]
) -> float:
    """Eq. 2: the dearest device, in the stage and with the partners that are cheapest for it."""
    dearest = 0.0
    for d in range(len(latency)):
        cheapest = np.inf
        for size, gradient in {*zip(sizes, gradient_bytes, strict=True)}:
            pays = 2 * (latency[d] + gradient / (size * bandwidth[d]))
            partners = sorted(np.delete(pays, d).tolist())[: size - 1]
            cheapest = min(cheapest, sum(partners))
        dearest = max(dearest, cheapest)
    return float(dearest)


def _forest_s(
    latency: Floats, bandwidth: Floats, sizes: Sequence[int], activation_bytes: Sequence[float]
) -> float:
    """Eq. 4: links are laid from the fastest on, and boundaries fill up as early as they could.

    The hops of a plan form disjoint paths. So c devices that are linked with each other hold at
    most c - 1 of them, and at most half as many as they have ends, of which a device has two.
    """
    waiting = sorted(min(a, b) for a, b in pairwise(sizes))
    if not waiting:
        return 0.0
    n = len(latency)
    hop = 2 * (latency + min(activation_bytes) / bandwidth)
    rows, columns = np.triu_indices(n, 1)
    prices = hop[rows, columns]
    leader, members, ends, degree = list(range(n)), [1] * n, [0] * n, [0] * n

    def lead(d: int) -> int:
        while leader[d] != d:
            leader[d] = leader[leader[d]]
            d = leader[d]
        return d

    def room(d: int) -> int:
        return min(members[d] - 1, ends[d] // 2)

    total = 0.0
    held, needed, filled = 0, waiting[0], 0
    for at in np.argsort(prices, kind="stable").tolist():
        a, b = int(rows[at]), int(columns[at])
        x, y = lead(a), lead(b)
        held -= room(x) + (room(y) if x != y else 0)
        for d, leads in ((a, x), (b, y)):
            ends[leads] += degree[d] < 2
            degree[d] += 1
        if x != y:
            leader[y] = x
            members[x] += members[y]
            ends[x] += ends[y]
        held += room(x)
        while held >= needed:
            total += float(prices[at])
            filled += 1
            if filled == len(waiting):
                return total
            needed += waiting[filled]
    return total
