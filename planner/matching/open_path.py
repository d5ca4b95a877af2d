"""Open-path travelling salesman: visit every node once, start and end anywhere (DT-FM, eq. 4)."""

from __future__ import annotations

import itertools
import math

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from planner.matching.bottleneck import MatchingError
from planner.search.result import Result
from planner.search.stop import MaxRuntime, StoppingCriterion, StopRun, started

EXACT_NODES = 16
"""Up to this many nodes Held-Karp takes well under a second."""

CIRCUIT_NODES = 120
"""Up to this many nodes CP-SAT tries to close the gap of the local search."""

DEFAULT_RUNTIME_S = 10.0
SAFETY = 1e-9
"""Relative rounding allowance: a bound is lowered by this much before it is reported."""


def open_path(
    cost: ArrayLike, stop: StoppingCriterion | None = None, seed: int = 0
) -> Result[tuple[int, ...]]:
    """Order of the nodes with the smallest sum of ``cost[order[i], order[i + 1]]``.

    Exact by dynamic programming (Held and Karp) up to 16 nodes. Beyond that, a tour by 2-opt and
    Or-opt from several starts with the assignment bound, which CP-SAT improves in the time left for
    up to 120 nodes.

    Parameters
    ----------
    cost
        ``n x n``, finite; the diagonal is ignored. It may be asymmetric.
    stop
        Limit for more than 16 nodes, by default 10 s. One iteration is one start of the local
        search.

    Returns
    -------
    Result
        ``plan`` is the visiting order. Of an order and its reverse at the same cost, the one that
        begins with the smaller node.
    """
    matrix = _checked(cost)
    run = started(MaxRuntime(DEFAULT_RUNTIME_S) if stop is None else stop)
    if len(matrix) <= EXACT_NODES:
        order = tuple(int(i) for i in _held_karp(matrix))
        bound: float | None = None
        run.reason = "optimal"
    else:
        order, bound = _search(matrix, run, np.random.default_rng(seed))
    order = _canonical(matrix, order)
    length = path_length(matrix, order)
    return Result.of(
        order,
        length,
        length if bound is None else min(bound, length),
        runtime_s=run.elapsed_s,
        stop_reason=run.reason or "done",
        seed=seed,
        method="held-karp" if len(matrix) <= EXACT_NODES else "local-search+cp-sat",
        history=run.history,
    )


def path_length(cost: NDArray[np.float64], order: tuple[int, ...]) -> float:
    """Sum of the costs along ``order``."""
    return float(sum(cost[i, j] for i, j in itertools.pairwise(order)))


def _checked(cost: ArrayLike) -> NDArray[np.float64]:
    matrix = np.array(cost, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or len(matrix) < 1:
        raise MatchingError(f"cost must be n x n with n >= 1, found shape {matrix.shape}")
    np.fill_diagonal(matrix, 0.0)
    if not np.isfinite(matrix).all():
        i, j = (int(k) for k in np.argwhere(~np.isfinite(matrix))[0])
        raise MatchingError(
            f"cost[{i}, {j}] is {matrix[i, j]}; a path may need any pair, give a large finite cost"
        )
    return matrix


def _canonical(cost: NDArray[np.float64], order: tuple[int, ...]) -> tuple[int, ...]:
    back = order[::-1]
    if back[0] < order[0] and path_length(cost, back) <= path_length(cost, order):
        return back
    return order


@njit(cache=True, nogil=True)
def _held_karp(cost: NDArray[np.float64]) -> NDArray[np.int64]:
    """Best order by dynamic programming over (visited set, last node)."""
    n = len(cost)
    full = 1 << n
    best = np.full((full, n), np.inf)
    before = np.full((full, n), -1, dtype=np.int8)
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
                    before[visited | bit, node] = last
    order = np.empty(n, dtype=np.int64)
    visited = full - 1
    last = int(np.argmin(best[visited]))
    for place in range(n - 1, -1, -1):
        order[place] = last
        previous = int(before[visited, last])
        visited ^= 1 << last
        last = previous
    return order


def _search(
    cost: NDArray[np.float64], run: StopRun, rng: np.random.Generator
) -> tuple[tuple[int, ...], float]:
    """Local search from several starts, then CP-SAT on the circuit with a depot in between."""
    n = len(cost)
    bound = _assignment_bound(cost)
    best: tuple[int, ...] = tuple(range(n))
    best_length = math.inf
    with run.interruptible():
        for start in rng.permutation(n)[: max(4, min(n, 2000 // n))]:
            order = _improve(cost, _nearest_neighbour(cost, int(start)))
            length = path_length(cost, tuple(order))
            if length < best_length:
                best, best_length = tuple(int(i) for i in order), length
                run.improve(length)
                run.bound = bound
            if run.update() is not None:
                break
        if run.check() is None and n <= CIRCUIT_NODES:
            best, bound = _circuit(cost, best, bound, run)
            run.reason = "optimal" if bound >= path_length(cost, best) * (1 - 1e-6) else "limit"
    return best, bound


def _assignment_bound(cost: NDArray[np.float64]) -> float:
    """Every node but one has a successor: an assignment with a depot bounds the path from below."""
    from scipy.optimize import linear_sum_assignment

    n = len(cost)
    padded = np.zeros((n + 1, n + 1))
    padded[:n, :n] = cost
    # the largest path is shorter than this, so a node never follows itself
    forbidden = (np.abs(cost).max() + 1.0) * (n + 1)
    np.fill_diagonal(padded, forbidden)
    rows, columns = linear_sum_assignment(padded)
    total = float(padded[rows, columns].sum())
    return total - SAFETY * abs(total)


@njit(cache=True, nogil=True)
def _nearest_neighbour(cost: NDArray[np.float64], start: int) -> NDArray[np.int64]:
    n = len(cost)
    order = np.empty(n, dtype=np.int64)
    used = np.zeros(n, dtype=np.bool_)
    order[0] = start
    used[start] = True
    for place in range(1, n):
        best = -1
        for node in range(n):
            if not used[node] and (
                best < 0 or cost[order[place - 1], node] < cost[order[place - 1], best]
            ):
                best = node
        order[place] = best
        used[best] = True
    return order


@njit(cache=True, nogil=True)
def _length(cost: NDArray[np.float64], order: NDArray[np.int64]) -> float:
    total = 0.0
    for i in range(len(order) - 1):
        total += cost[order[i], order[i + 1]]
    return total


@njit(cache=True, nogil=True)
def _improve(cost: NDArray[np.float64], order: NDArray[np.int64]) -> NDArray[np.int64]:
    """Reversals (2-opt) and moves of up to three nodes (Or-opt), first improvement."""
    n = len(order)
    current = _length(cost, order)
    improved = True
    trial = order.copy()
    while improved:
        improved = False
        for i in range(n - 1):
            for j in range(i + 1, n):
                for kind in range(4):
                    trial[:] = order
                    if kind == 0:
                        trial[i : j + 1] = order[i : j + 1][::-1]
                    else:
                        # move the block order[i:i+kind] behind position j
                        if j < i + kind or i + kind > n:
                            continue
                        span = j + 1 - (i + kind)
                        trial[i : i + span] = order[i + kind : j + 1]
                        trial[i + span : j + 1] = order[i : i + kind]
                    length = _length(cost, trial)
                    if length < current - 1e-12 * abs(current):
                        order[:] = trial
                        current = length
                        improved = True
    return order


def _circuit(
    cost: NDArray[np.float64], order: tuple[int, ...], bound: float, run: StopRun
) -> tuple[tuple[int, ...], float]:
    """CP-SAT from the incumbent; returns the better order and the better bound."""
    from ortools.sat.python import cp_model

    from planner.search.cp_sat import solve_interruptibly

    n = len(cost)
    scale = 1e9 / max(float(np.abs(cost).max()), 1e-300) / n
    whole = np.floor(cost * scale).astype(np.int64)
    model = cp_model.CpModel()
    position = {node: place for place, node in enumerate(order)}
    arcs, terms = [], []
    for i in range(n + 1):
        for j in range(n + 1):
            if i == j:
                continue
            literal = model.new_bool_var("")
            arcs.append((i, j, literal))
            if i < n and j < n:
                terms.append(int(whole[i, j]) * literal)
                model.add_hint(literal, position[j] == position[i] + 1)
            else:
                node = i if j == n else j
                model.add_hint(literal, order[-1 if j == n else 0] == node)
    model.add_circuit(arcs)
    model.minimize(sum(terms))
    solver = cp_model.CpSolver()
    if math.isfinite(run.remaining_s):
        solver.parameters.max_time_in_seconds = max(run.remaining_s, 0.01)
        solver.parameters.num_workers = 2
    else:
        solver.parameters.max_deterministic_time = 20.0
        solver.parameters.num_workers = 1
    status = solve_interruptibly(solver, model)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        follows = {i: j for i, j, literal in arcs if solver.value(literal)}
        walk = [follows[n]]
        while follows[walk[-1]] != n:
            walk.append(follows[walk[-1]])
        if path_length(cost, tuple(walk)) < path_length(cost, order):
            order = tuple(walk)
            run.improve(path_length(cost, order))
        # costs were rounded down, so the integer bound is valid for the real costs
        proven = solver.best_objective_bound / scale
        bound = max(bound, proven - SAFETY * abs(proven))
    return order, bound
