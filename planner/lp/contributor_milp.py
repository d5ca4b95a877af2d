"""Mixed-integer program for the contributors c, solved by HiGHS.

Between an incumbent and a bound the total rate R lies in an interval [L, U], which makes the
linearised products c_i R tight. With x_i = c_i r_i, y_i = (1 - c_i) r_i, k = sum_i c_i and m the
smallest k of the model::

    sum_i s_i c_i / B >= R / P                       (overlapping; otherwise see `_add_tangents`)
    sum_i (x_i + y_i) >= R
    (n - 2) x_i + R - U (1 - c_i) <= u_i c_i         upload of a contributor
    x_i <= A_i(L) c_i,  y_i <= N_i(L) (1 - c_i)      caps at the lowest rate
    (m - 1) y_i + (m - 2) x_i + R <= d_i             download
    x_i + r_j <= t_ij c_i + M_ij (1 - c_i)           pair limits, added lazily

The model is a relaxation for all sets in its range of k, and exact for k = m once the violated pair
rows have been added.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import BandwidthLimits
from planner.lp.knapsack import caps_by_role
from planner.search.highs import milp
from planner.search.stop import SearchRun

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MIP_GAP = 1e-8
MAX_LP_ROUNDS = 20
"""Maximum rounds of adding pair rows violated by fractional solutions."""
TANGENTS = 12
"""Initial tangents of 1/S and 1/R, where computing and averaging alternate."""


class MilpResult(NamedTuple):
    """Result of one solve of the model.

    Attributes
    ----------
    computes
        The best set of contributors found, None if there is none.
    rates, total, samples
        Its r_i, R and S in the model, in bytes and samples per second.
    bound
        Upper bound on the steps per second of all sets of the model; -inf if infeasible.
    """

    computes: Bools | None
    rates: Floats
    total: float
    samples: float
    bound: float


class ContributorModel:
    """The model for given ranges of the number of contributors k and of the total rate.

    Rates are scaled by ``max_rate`` and samples by their sum, so that all coefficients are near 1.
    """

    def __init__(
        self,
        limits: BandwidthLimits,
        min_contributors: int,
        max_contributors: int,
        min_rate: float,
        max_rate: float,
    ) -> None:
        problem = limits.problem
        n = limits.n
        self.limits, self.problem, self.unit = limits, problem, max_rate
        self.empty = min_rate > max_rate * (1 + 1e-12)
        min_rate = min(min_rate, max_rate)
        self.eligible = problem.contributors & (limits.upload >= min_rate)
        self.samples_per_s = np.where(problem.contributors, problem.samples_per_s, 0.0)
        self.total_samples = float(self.samples_per_s.sum())
        cap_idle, cap_contributing = caps_by_role(limits, min_rate, min_contributors, max_rate)
        self.cap_idle, self.cap_contributing = (
            cap_idle / max_rate,
            np.where(self.eligible, cap_contributing, 0.0) / max_rate,
        )
        self.max_caps = np.maximum(self.cap_idle, self.cap_contributing)
        self.pairs: set[tuple[int, int]] = set()
        self.seconds = np.array(
            [problem.batch_size / self.total_samples, problem.gradient_bytes / max_rate]
        )
        self._solution = np.zeros(0)
        self._entries: list[tuple[Floats, NDArray[np.int64]]] = []
        self._rhs: list[float] = []
        self.num_columns = 1 + 3 * n + (0 if problem.overlap else 2)
        self.lower = np.zeros(self.num_columns)
        self.upper = np.ones(self.num_columns)
        self.lower[0] = min_rate / max_rate
        self.upper[1 : 1 + n] = self.eligible
        self.upper[1 + 3 * n :] = np.inf
        self._build(min_contributors, max_contributors)

    def _build(self, min_contributors: int, max_contributors: int) -> None:
        n = self.limits.n
        c = 1 + np.arange(n)
        x, y = c + n, c + 2 * n
        upload, download = self.limits.upload / self.unit, self.limits.download / self.unit
        self._add_row(np.append(1.0, -np.ones(2 * n)), [0, *x, *y], 0.0)
        self._add_row(-np.ones(n), c, -float(min_contributors))
        self._add_row(np.ones(n), c, float(max_contributors))
        for i in range(n):
            self._add_row([n - 1.0], [y[i]], upload[i])
            self._add_row([1.0, self.cap_idle[i]], [y[i], c[i]], self.cap_idle[i])
            self._add_row(
                [min_contributors - 1.0, min_contributors - 2.0, 1.0], [y[i], x[i], 0], download[i]
            )
            if self.eligible[i]:
                self._add_row([n - 2.0, 1.0, 1.0 - upload[i]], [x[i], 0, c[i]], 1.0)
                self._add_row([1.0, -self.cap_contributing[i]], [x[i], c[i]], 0.0)
            else:
                self.upper[x[i]] = 0.0
        samples = self.samples_per_s / self.total_samples
        if self.problem.overlap:
            ratio = self.unit * self.problem.batch_size / self.problem.gradient_bytes
            self._add_row(np.append(ratio / self.total_samples, -samples), [0, *c], 0.0)
        else:
            for point in np.geomspace(1e-3, 1.0, TANGENTS):
                self._add_tangents(point, max(point, 1e-12))

    def _add_tangents(self, samples: float, total: float) -> None:
        """Add tangents at S and R (both scaled) of the convex sigma >= 1/S and eta >= 1/R."""
        n = self.limits.n
        c = 1 + np.arange(n)
        slope = self.samples_per_s / self.total_samples / samples**2
        self._add_row(np.append(-slope, -1.0), [*c, 1 + 3 * n], -2.0 / samples)
        self._add_row([-1.0 / total**2, -1.0], [0, 2 + 3 * n], -2.0 / total)

    def _add_row(self, values: Iterable[float], columns: Iterable[int], rhs: float) -> None:
        """Add the row ``values @ z[columns] <= rhs``."""
        self._entries.append(
            (np.array(list(values), dtype=np.float64), np.array(list(columns), dtype=np.int64))
        )
        self._rhs.append(rhs)

    def solve(self, run: SearchRun) -> MilpResult:
        """Solve the model; only the bound is valid if the stopping criterion ends the search.

        Pair rows violated by fractional solutions are added first: an LP costs far less than a
        branch-and-bound tree without these rows.
        """
        zero_rates = np.zeros(self.limits.n)
        if self.empty:
            return MilpResult(None, zero_rates, 0.0, 0.0, -math.inf)
        n = self.limits.n
        for _ in range(MAX_LP_ROUNDS if self.limits.links is not None else 0):
            solution = self._optimise(integral=False, options={})
            if solution.x is None or run.check() or not self._add_pair_rows(solution.x):
                break
        options: dict[str, Any] = {"mip_rel_gap": MIP_GAP}
        if math.isfinite(run.remaining_s):
            options["time_limit"] = max(run.remaining_s, 1e-3)
        if math.isfinite(run.remaining_iterations):
            options["node_limit"] = max(int(run.remaining_iterations), 1)
        solution = self._optimise(integral=True, options=options)
        node_count = getattr(solution, "mip_node_count", None)
        run.update(max(int(node_count or 0), 1))
        if solution.status == 2:
            return MilpResult(None, zero_rates, 0.0, 0.0, -math.inf)
        dual_bound = getattr(solution, "mip_dual_bound", None)
        bound = math.inf
        if dual_bound is not None and math.isfinite(dual_bound) and solution.status in (0, 1):
            bound = self._steps_of(float(dual_bound))
        if solution.x is None:
            return MilpResult(None, zero_rates, 0.0, 0.0, bound)
        self._solution = solution.x
        computes: Bools = solution.x[1 : 1 + n] > 0.5
        rates = (solution.x[1 + n : 1 + 2 * n] + solution.x[1 + 2 * n : 1 + 3 * n]) * self.unit
        samples = float(self.samples_per_s[computes].sum())
        return MilpResult(computes, rates, float(solution.x[0]) * self.unit, samples, bound)

    def _optimise(self, integral: bool, options: dict[str, Any]) -> Any:
        """Maximise R, or minimise the seconds of a step; SciPy's result."""
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.sparse import csr_array

        n = self.limits.n
        objective = np.zeros(self.num_columns)
        if self.problem.overlap:
            objective[0] = -1.0
        else:
            objective[1 + 3 * n :] = self.seconds / self.seconds.sum()
        row_lengths = np.array([len(columns) for _, columns in self._entries])
        a_ub = csr_array(
            (
                np.concatenate([values for values, _ in self._entries]),
                np.concatenate([columns for _, columns in self._entries]),
                np.concatenate(([0], np.cumsum(row_lengths))),
            ),
            shape=(len(row_lengths), self.num_columns),
        )
        integrality = np.zeros(self.num_columns)
        integrality[1 : 1 + n] = integral
        # presolve removes few of these rows and slowed down most of the instances tried
        return milp(
            objective,
            integrality=integrality,
            bounds=Bounds(self.lower, self.upper),
            constraints=LinearConstraint(a_ub, -np.inf, np.array(self._rhs)),
            options={"presolve": False, **options},
        )

    def _steps_of(self, objective: float) -> float:
        """Steps per second for a value of the model's minimised objective."""
        if self.problem.overlap:
            return -objective * self.unit / self.problem.gradient_bytes
        seconds = objective * float(self.seconds.sum())
        return 1.0 / seconds if seconds > 0 else math.inf

    def add_violated_rows(self, result: MilpResult) -> bool:
        """Add the pair rows and tangents that the result violates; False if there are none."""
        assert result.computes is not None
        new_pairs = self._add_pair_rows(self._solution)
        if self.problem.overlap or result.total <= 0:
            return new_pairs
        exact_steps = self.problem.steps_of(result.samples, result.total)
        if exact_steps < result.bound * (1 - 1e-7):
            self._add_tangents(result.samples / self.total_samples, result.total / self.unit)
            return True
        return new_pairs

    def _add_pair_rows(self, solution: Floats) -> bool:
        """Add violated rows ``x_i + r_j <= t_ij c_i + M_ij (1 - c_i)``; False if there are none."""
        if self.limits.links is None:
            return False
        n = self.limits.n
        links = np.where(np.isfinite(self.limits.links), self.limits.links / self.unit, 1e9)
        c, x, y = (solution[1 + k * n : 1 + (k + 1) * n] for k in range(3))
        big_m = np.maximum(self.max_caps[None, :], links)
        excess = x[:, None] + (x + y)[None, :] + (big_m - links) * c[:, None] - big_m
        np.fill_diagonal(excess, 0.0)
        new_pairs = [
            pair
            for pair in ((int(i), int(j)) for i, j in np.argwhere(excess > 1e-7))
            if pair not in self.pairs
        ]
        self.pairs.update(new_pairs)
        for i, j in new_pairs:
            big_m_ij = float(big_m[i, j])
            columns = [1 + n + i, 1 + n + j, 1 + 2 * n + j, 1 + i]
            self._add_row([1.0, 1.0, 1.0, big_m_ij - float(links[i, j])], columns, big_m_ij)
        return bool(new_pairs)

    def fix(self, computes: Bools) -> None:
        """Fix the set of contributors."""
        columns = slice(1, 1 + self.limits.n)
        self.lower[columns] = self.upper[columns] = computes

    def exclude(self, computes: Bools) -> None:
        """Exclude this set by a no-good cut: its exact value is known."""
        c = 1 + np.arange(self.limits.n)
        signs = np.where(computes, 1.0, -1.0)
        self._add_row(signs, c, float(computes.sum()) - 1.0)
