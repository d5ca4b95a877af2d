"""Open-path travelling salesman: visit every node once, start and end anywhere (DT-FM, eq. 4)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.matching.bottleneck import MatchingError, cost_matrix
from planner.problems.quantities import seed_of
from planner.search.arrays import Floats, Floats2, Ints
from planner.search.compiled import allocating_entry, kernel
from planner.search.incumbent import Incumbent
from planner.search.result import Result
from planner.search.stop import MaxRuntime, StoppingCriterion, started

Order = tuple[int, ...]

STEPS_PER_EFFORT = 8e6
"""Local searches per unit of effort, times the square of the nodes."""

MAX_BLOCK = 3
"""Nodes that Or-opt moves together, at most."""
ROUNDING = 1e-12
"""Gains below this share of the largest cost times the nodes may be rounding errors."""
MAX_BRIDGE = 50
"""Nodes that a perturbation of iterated local search exchanges, at most."""
WHOLE = 1e11
"""Sum of the largest costs as CP-SAT's integers: small enough for it, and rounding stays below
`planner.search.certificate.OPTIMAL_GAP` if the largest cost is some hundred times the mean of the
path at most."""
EXACT_NODES = 16
"""Maximum number of nodes for Held-Karp, which takes well under a second."""


@dataclass(frozen=True)
class OpenPathParams:
    """Parameters for more nodes than `EXACT_NODES`.

    Attributes
    ----------
    runtime_s
        Default time limit.
    min_starts, max_start_nodes
        Starts of the local search: one per node, but at most about ``max_start_nodes`` nodes in
        total, and at least ``min_starts``.
    circuit_nodes
        Maximum number of nodes for which CP-SAT improves the bound.
    iterated_share, max_iterated
        Share of the remaining limit for iterated local search before CP-SAT, and its most descents,
        also without a limit.
    max_work
        CP-SAT's deterministic time under a limit on iterations.
    circuit_s
        Seconds to build its model, over the square of the nodes: not with less time.
    """

    runtime_s: float = 10.0
    min_starts: int = 4
    max_start_nodes: int = 2000
    circuit_nodes: int = 200
    iterated_share: float = 0.2
    max_iterated: int = 2000
    max_work: float = 8.0
    circuit_s: float = 1e-5


def open_path(
    cost: ArrayLike, stop: StoppingCriterion | None = None, seed: int = 0
) -> Result[tuple[int, ...]]:
    """Shortest open path: minimise the sum of ``cost[order[i], order[i + 1]]``.

    Exact by dynamic programming (Held and Karp) up to 16 nodes. Beyond that, 2-opt and Or-opt from
    several starts (nearest neighbours, and the patched assignment relaxation) with the assignment
    bound. Iterated local search then improves the path and, up to 200 nodes, CP-SAT both. Without a
    limit in seconds, iterations or effort, it ends after some thousand local searches.

    Parameters
    ----------
    cost
        ``float[n, n]`` in any unit, finite; the diagonal is ignored. It may be asymmetric.
    stop
        When to stop for more than 16 nodes, by default after 10 s. One iteration is one local
        search.
    seed
        Seed of the random generator.

    Returns
    -------
    Result
        ``plan`` is the visiting order. If an order and its reverse have the same cost, the one that
        starts at the smaller node is returned. Objective and bound are in the unit of ``cost``.

    Raises
    ------
    MatchingError
        ``cost`` is not a square matrix of finite numbers.
    ValueError
        ``stop`` is not a stopping criterion.

    References
    ----------
    M. Held and R. M. Karp, "A dynamic programming approach to sequencing problems" (1962).

    R. M. Karp, "A patching algorithm for the nonsymmetric traveling-salesman problem" (1979).

    O. Martin, S. W. Otto and E. W. Felten, "Large-step Markov chains for the traveling salesman
    problem" (1991).
    """
    matrix = _checked(cost)
    params = OpenPathParams()
    criterion = MaxRuntime(params.runtime_s) if stop is None else stop
    run = started(criterion, max(1.0, STEPS_PER_EFFORT / len(matrix) ** 2))
    exact = len(matrix) <= EXACT_NODES
    method = "held-karp" if exact else "local-search+cp-sat"
    best: Incumbent[Order] = Incumbent(run, matrix, method=method, seed=seed_of(seed))
    if exact:
        path, least = _held_karp(matrix)
        order = _canonical(matrix, tuple(int(i) for i in path))
        best.offer(path_length(matrix, order), order)
        best.offer_bound(float(least), "Held-Karp")
        return best.result()
    with run.interruptible():
        best.offer_bound(_assignment_bound(matrix), "assignment relaxation")
        _local_search(matrix, best, params)
        finite = math.isfinite(run.max_iterations) or math.isfinite(criterion.seconds())
        if run.check() is None and len(matrix) <= params.circuit_nodes:
            _iterated_local_search(matrix, best, params.iterated_share, params.max_iterated)
            if run.check() is None:
                _solve_circuit(matrix, best, params)
        if run.check() is None:
            _iterated_local_search(matrix, best, 1.0, math.inf if finite else params.max_iterated)
    order = _canonical(matrix, best.plan or tuple(range(len(matrix))))
    return best.result(order, path_length(matrix, order), exhausted="limit")


def path_length(cost: NDArray[np.float64], order: tuple[int, ...]) -> float:
    """Sum of the costs along ``order``.

    Parameters
    ----------
    cost
        ``float[n, n]``.
    """
    return float(sum(cost[i, j] for i, j in itertools.pairwise(order)))


def _checked(cost: ArrayLike) -> NDArray[np.float64]:
    matrix = cost_matrix(cost, finite=True)
    if matrix.shape[0] != matrix.shape[1] or len(matrix) < 1:
        raise MatchingError(
            f"cost must be n x n with n >= 1, found shape {matrix.shape}; give every pair of nodes"
        )
    np.fill_diagonal(matrix, 0.0)
    return matrix


def _canonical(cost: NDArray[np.float64], order: tuple[int, ...]) -> tuple[int, ...]:
    reverse = order[::-1]
    if reverse[0] < order[0] and path_length(cost, reverse) <= path_length(cost, order):
        return reverse
    return order


@allocating_entry
def _held_karp(cost: Floats2) -> tuple[Ints, float]:
    """Best order and its length by dynamic programming over (visited set, last node)."""
    n = len(cost)
    full = 1 << n
    best = np.full((full, n), np.inf)
    predecessor = np.full((full, n), -1, dtype=np.int8)
    for last in range(n):
        best[1 << last, last] = 0.0
    for visited in range(1, full):
        for last in range(n):
            so_far = best[visited, last]
            if so_far == np.inf:
                continue
            for node in range(n):
                bit = 1 << node
                if visited & bit:
                    continue
                length = so_far + cost[last, node]
                if length < best[visited | bit, node]:
                    best[visited | bit, node] = length
                    predecessor[visited | bit, node] = last
    order = np.empty(n, dtype=np.int64)
    visited = full - 1
    last = int(np.argmin(best[visited]))
    least = best[visited, last]
    for position in range(n - 1, -1, -1):
        order[position] = last
        previous = int(predecessor[visited, last])
        visited ^= 1 << last
        last = previous
    return order, least


def _local_search(
    cost: NDArray[np.float64], best: Incumbent[Order], params: OpenPathParams
) -> None:
    """2-opt and Or-opt from several starts, one iteration each."""
    n = len(cost)
    starts = max(params.min_starts, min(n, params.max_start_nodes // n))
    first_nodes = np.random.default_rng(best.seed).permutation(n)[:starts]
    for k, first in enumerate(first_nodes):
        start = _patched_assignment(cost) if k == 1 else _nearest_neighbour(cost, int(first))
        _offer(cost, best, _descend(cost, start))
        if best.run.update() is not None:
            break


def _offer(cost: NDArray[np.float64], best: Incumbent[Order], found: Ints) -> float:
    """Offer an order; its length."""
    order = tuple(found.tolist())
    length = path_length(cost, order)
    best.offer(length, order)
    return length


def _iterated_local_search(
    cost: NDArray[np.float64], best: Incumbent[Order], share: float, most: float
) -> None:
    """Descents from the best order with two neighbouring runs exchanged (a double bridge).

    With a share of the remaining limit, and ``most`` descents.
    """
    assert best.plan is not None
    run, n = best.run, len(cost)
    rng = np.random.default_rng((best.seed, run.iterations))
    current = np.array(best.plan)
    length = path_length(cost, best.plan)
    until = run.iterations + min(share * run.remaining_iterations, most)
    until_s = math.inf
    if run.paced_by_time:
        until_s = run.elapsed_s + share * run.remaining_s
    while run.check() is None and run.iterations < until and run.elapsed_s < until_s:
        ends = np.sort(rng.choice(min(n, MAX_BRIDGE) + 1, 3, replace=False))
        a, b, c = ends + rng.integers(n - ends[-1] + 1)
        changed = np.concatenate([current[:a], current[b:c], current[a:b], current[c:]])
        changed = _descend(cost, changed)
        new_length = _offer(cost, best, changed)
        if new_length <= length:
            current, length = changed, new_length
        run.update()


def _patched_assignment(cost: NDArray[np.float64]) -> Ints:
    """The path from the assignment relaxation: its cycles are joined, the longest ones first."""
    padded, successor = _assignment(cost)
    while len(cycles := _cycles(successor)) > 1:
        one, other = map(np.array, sorted(cycles, key=len)[-2:])
        joined = padded[one[:, None], successor[other]] + padded[other, successor[one][:, None]]
        kept = padded[one, successor[one]][:, None] + padded[other, successor[other]]
        i, j = np.unravel_index(int(np.argmin(joined - kept)), joined.shape)
        a, b = one[i], other[j]
        successor[a], successor[b] = successor[b], successor[a]
    (cycle,) = cycles
    depot = cycle.index(len(cost))
    return np.array(cycle[depot + 1 :] + cycle[:depot], dtype=np.int64)


def _cycles(successor: Ints) -> list[list[int]]:
    """The cycles of a permutation."""
    cycles, seen = [], np.zeros(len(successor), dtype=bool)
    for first in range(len(successor)):
        cycle, node = list[int](), first
        while not seen[node]:
            seen[node] = True
            cycle.append(node)
            node = int(successor[node])
        if cycle:
            cycles.append(cycle)
    return cycles


def _assignment_bound(cost: NDArray[np.float64]) -> float:
    """Lower bound by the assignment of successors, with a depot node of cost 0."""
    padded, successor = _assignment(cost)
    return float(padded[np.arange(len(padded)), successor].sum())


def _assignment(cost: NDArray[np.float64]) -> tuple[Floats2, Ints]:
    """Costs with a depot node of cost 0, and everyone's successor in the cheapest assignment."""
    from scipy.optimize import linear_sum_assignment

    n = len(cost)
    padded = np.zeros((n + 1, n + 1))
    padded[:n, :n] = cost
    # larger than any path, so that no node follows itself
    forbidden = (np.abs(cost).max() + 1.0) * (n + 1)
    np.fill_diagonal(padded, forbidden)
    return padded, linear_sum_assignment(padded)[1]


@allocating_entry
def _nearest_neighbour(cost: Floats2, start: int) -> Ints:
    n = len(cost)
    order = np.empty(n, dtype=np.int64)
    visited = np.zeros(n, dtype=np.bool_)
    order[0] = start
    visited[start] = True
    for position in range(1, n):
        best = -1
        for node in range(n):
            if not visited[node] and (
                best < 0 or cost[order[position - 1], node] < cost[order[position - 1], best]
            ):
                best = node
        order[position] = best
        visited[best] = True
    return order


@kernel
def _cost_between(cost: Floats2, order: Ints, position: int, next_position: int) -> float:
    """Cost from one position to another; 0 where either is beyond the ends of the path."""
    if position < 0 or next_position >= len(order):
        return 0.0
    return float(cost[order[position], order[next_position]])


@kernel
def _exchange_gain(cost: Floats2, order: Ints, a: int, b: int, c: int) -> float:
    """How much shorter the path gets if ``order[a:b]`` and ``order[b:c]`` are exchanged."""
    before = _cost_between(cost, order, a - 1, a) + _cost_between(cost, order, b - 1, b)
    before += _cost_between(cost, order, c - 1, c)
    after = _cost_between(cost, order, a - 1, b) + _cost_between(cost, order, c - 1, a)
    after += _cost_between(cost, order, b - 1, c)
    return before - after


@kernel
def _reversal_gain(cost: Floats2, order: Ints, asymmetry: Floats, i: int, j: int) -> float:
    """How much shorter the path gets if ``order[i : j + 1]`` is reversed."""
    ends = _cost_between(cost, order, i - 1, i) + _cost_between(cost, order, j, j + 1)
    new_ends = _cost_between(cost, order, i - 1, j) + _cost_between(cost, order, i, j + 1)
    return float(ends - new_ends - (asymmetry[j] - asymmetry[i]))


@kernel
def _fill_asymmetry(cost: Floats2, order: Ints, asymmetry: Floats) -> None:
    """By position, by how much the reversed links up to it cost more."""
    asymmetry[0] = 0.0
    for k in range(1, len(order)):
        asymmetry[k] = (
            asymmetry[k - 1] + cost[order[k], order[k - 1]] - cost[order[k - 1], order[k]]
        )


@allocating_entry
def _descend(cost: Floats2, order: Ints) -> Ints:
    """2-opt and Or-opt with blocks of up to three nodes in both directions, first improvement."""
    n = len(order)
    asymmetry = np.zeros(n)
    _fill_asymmetry(cost, order, asymmetry)
    min_gain = ROUNDING * np.abs(cost).max() * n
    improved = True
    while improved:
        improved = False
        for i in range(n - 1):
            for j in range(i + 1, n):
                if _reversal_gain(cost, order, asymmetry, i, j) > min_gain:
                    order[i : j + 1] = order[i : j + 1][::-1].copy()
                    _fill_asymmetry(cost, order, asymmetry)
                    improved = True
                for size in range(1, MAX_BLOCK + 1):
                    # a block at the start moves to the end of the run i..j, and vice versa
                    for middle in (i + size, j + 1 - size):
                        if not i < middle <= j:
                            continue
                        if _exchange_gain(cost, order, i, middle, j + 1) > min_gain:
                            run = order[i : j + 1].copy()
                            last = j + 1 - middle
                            order[i : i + last] = run[middle - i :]
                            order[i + last : j + 1] = run[: middle - i]
                            _fill_asymmetry(cost, order, asymmetry)
                            improved = True
    return order


def _solve_circuit(
    cost: NDArray[np.float64], best: Incumbent[Order], params: OpenPathParams
) -> None:
    """Improve plan and bound with CP-SAT: a circuit through all nodes and a depot of cost 0."""
    from ortools.sat.python import cp_model

    from planner.search.cp_sat import solve_interruptibly, solver_for, work_of

    assert best.plan is not None
    n, order = len(cost), best.plan
    if best.run.remaining_s < params.circuit_s * n**2:
        return
    scale = WHOLE / max(float(np.abs(cost).max()), 1e-300) / n
    # rounded down, so that the bound in integers is valid for the real costs
    whole_cost = np.floor(cost * scale).astype(np.int64)
    model = cp_model.CpModel()
    hinted_arcs = {*itertools.pairwise((n, *order, n))}
    arcs, terms = [], []
    for i in range(n + 1):
        for j in range(n + 1):
            if i == j:
                continue
            literal = model.new_bool_var("")
            arcs.append((i, j, literal))
            if i < n and j < n:
                terms.append(int(whole_cost[i, j]) * literal)
            model.add_hint(literal, (i, j) in hinted_arcs)
    model.add_circuit(arcs)
    model.minimize(sum(terms))
    time_limited, effort = best.run.paced_by_time, best.run.remaining_effort
    solver = (
        solver_for(seed=1, workers=2, max_s=best.run.remaining_s)
        if time_limited
        else solver_for(
            seed=1,
            max_s=best.run.remaining_s,
            max_work=params.max_work if math.isinf(effort) else effort,
        )
    )
    status = solve_interruptibly(solver, model)
    best.run.spend(work_of(solver))
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        successor = {i: j for i, j, literal in arcs if solver.value(literal)}
        path = [successor[n]]
        while successor[path[-1]] != n:
            path.append(successor[path[-1]])
        best.offer(path_length(cost, tuple(path)), tuple(path))
        best.offer_bound(solver.best_objective_bound / scale, "CP-SAT circuit")
