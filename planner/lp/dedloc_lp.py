"""LP (5) of DeDLOC, in a form with about 3 n^2 rows instead of the printed n^3.

It gives the paper's rule and its bound; the rates of exact plans come from `planner.lp.rates`.

Eq. 4 bounds every g_ij by ``min_k a_ki + (1 - c_k) M_i``, the same for all receivers j. A variable
q_i for that minimum splits the n^3 rows into ``g_ij <= q_i`` and ``q_i <= a_ki + (1 - c_k) M_i``:
the full form. `planner.lp.dedloc_lp_aggregated` has a smaller form, which is tried first: if
computing and averaging are balanced, the full form takes many times as long.
"""

from __future__ import annotations

import numpy as np

from planner.lp.capacity import BandwidthLimits
from planner.lp.dedloc_lp_aggregated import solve_aggregated
from planner.lp.dedloc_lp_rows import (
    ConstraintRows,
    RelaxedSolution,
    ScaledProblem,
    compute_and_eq4_rows,
    solution_of,
    upper_bounds,
)
from planner.lp.rates import best_rates
from planner.problems import AveragingProblem
from planner.problems.quantities import instance_of


def solve_relaxed(problem: AveragingProblem) -> RelaxedSolution:
    """Solve LP (5), deterministically.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), eq. 2-5.
    """
    n = len(instance_of(AveragingProblem, problem))
    if n == 1:
        steps = problem.steps_per_s([0.0], [True])
        rate = np.full((1, 1), steps * problem.gradient_bytes)
        return RelaxedSolution(steps, rate, rate, np.ones(1))
    if problem.overlap and not problem.download_bytes_per_s.any():
        return RelaxedSolution(0.0, np.zeros((n, n)), np.zeros((n, n)), np.ones(n))
    scaled = ScaledProblem(problem)
    return _all_contribute(scaled) or solve_aggregated(scaled) or solve_in_full(scaled)


def _all_contribute(s: ScaledProblem) -> RelaxedSolution | None:
    """The solution with c = 1 if all peers' samples can be averaged in time; None otherwise.

    xi is then at its maximum, and the LP, which is highly degenerate there, need not be solved.
    """
    problem = s.problem
    eligible = problem.contributors
    needed_rate = s.samples * problem.gradient_bytes / problem.batch_size
    rates = best_rates(BandwidthLimits(problem), eligible, needed_rate)
    if rates.total < needed_rate:
        return None
    q = rates.rates / s.unit
    a = np.outer(eligible, q)
    g = np.repeat(q[:, None], s.n, axis=1)
    return solution_of(s, float(s.value.sum()), q, eligible.astype(np.float64), a, g)


def lp_bound(problem: AveragingProblem) -> float:
    """The value of LP (5) in steps per second, an upper bound on all plans (delayed updates).

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), eq. 5.
    """
    return solve_relaxed(problem).xi


def solve_in_full(s: ScaledProblem) -> RelaxedSolution:
    """Solve the full form, with 2 n^2 variables and 3 n^2 rows."""
    n, pair = s.n, np.arange(len(s.source))
    first_a = 1 + 2 * n
    first_g = first_a + len(pair)
    rows = ConstraintRows()
    compute_and_eq4_rows(rows, s, first_a, s.source, s.target)
    rows.add(
        np.zeros(n),
        (s.peers, 0, s.gradient),
        (s.peers, s.q_columns, -1.0),
        (s.target, first_g + pair, -1.0),
    )
    rows.add(np.zeros(len(pair)), (pair, first_g + pair, 1.0), (pair, s.q_columns[s.source], -1.0))
    rows.add(s.upload, (s.source, first_a + pair, 1.0), (s.source, first_g + pair, 1.0))
    rows.add(s.download, (s.target, first_a + pair, 1.0), (s.target, first_g + pair, 1.0))
    if s.links is not None:
        rhs = s.links[s.source, s.target]
        finite = np.flatnonzero(np.isfinite(rhs))
        row = np.arange(len(finite))
        rows.add(rhs[finite], (row, first_a + finite, 1.0), (row, first_g + finite, 1.0))
    non_reducers = np.flatnonzero(~s.problem.can_aggregate)
    to_non_reducers = np.flatnonzero(~s.problem.can_aggregate[s.target])
    from_non_reducers = np.flatnonzero(~s.problem.can_aggregate[s.source])
    upper = upper_bounds(
        s,
        first_g + len(pair),
        [s.q_columns[non_reducers], first_a + to_non_reducers, first_g + from_non_reducers],
    )
    solution = rows.solve(upper, 0)
    if solution.x is None:
        raise RuntimeError(f"LP (5) was not solved: {solution.message}")
    z = np.maximum(solution.x, 0.0)
    g = np.zeros((n, n))
    g[s.source, s.target] = z[first_g:]
    a = np.zeros((n, n))
    a[s.source, s.target] = z[first_a:first_g]
    return solution_of(s, z[0], z[s.q_columns], np.minimum(z[s.c_columns], 1.0), a, g)
