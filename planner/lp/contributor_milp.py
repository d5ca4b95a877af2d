"""The mixed-integer program for the contributors c, solved by HiGHS.

Between an incumbent and a bound the total rate H lies in an interval [L, U], which makes the
linearised products c_i H tight. With x_i = c_i r_i, y_i = (1 - c_i) r_i and k = sum_i c_i::

    sum_i s_i c_i / B >= H / P                       (overlapping; otherwise see `refine`)
    sum_i (x_i + y_i) >= H
    (n - 2) x_i + H - U (1 - c_i) <= u_i c_i         upload of a contributor
    x_i <= A_i(L) c_i,  y_i <= N_i(L) (1 - c_i)      caps at the lowest rate
    (fewest - 1) y_i + (fewest - 2) x_i + H <= d_i   download
    x_i + r_j <= t_ij c_i + M_ij (1 - c_i)           pair limits, once a solution breaks them

The model is a relaxation for all sets with ``fewest <= k <= most``, and exact for k = ``fewest``
once the pair rows that matter are in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import Limits
from planner.lp.knapsack import split_caps
from planner.search.highs import milp
from planner.search.stop import StopRun

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MIP_GAP = 1e-8
RELAXED_ROUNDS = 20
"""Most rounds of pair rows from fractional solutions."""
TANGENTS = 12
"""Points at which 1/S and 1/H are touched at first, where computing and averaging alternate."""


class Answer(NamedTuple):
    """One solve of the model.

    Attributes
    ----------
    computes
        The best set found, None if there is none.
    rates, total, samples
        Its r_i, H and S in the model, in bytes and samples per second.
    bound
        No set of the model makes more steps per second; -inf if it has none.
    """

    computes: Bools | None
    rates: Floats
    total: float
    samples: float
    bound: float


class ContributorModel:
    """The model for ``fewest <= k <= most`` and total rates in [``lowest``, ``highest``].

    Rates are scaled by ``highest`` and samples by their sum, so that all coefficients are near 1.
    """

    def __init__(
        self, limits: Limits, fewest: int, most: int, lowest: float, highest: float
    ) -> None:
        problem = limits.problem
        n = limits.n
        self.limits, self.problem, self.unit = limits, problem, highest
        self.empty = lowest > highest * (1 + 1e-12)
        lowest = min(lowest, highest)
        self.able = problem.contributors & (limits.upload >= lowest)
        self.value = np.where(problem.contributors, problem.samples_per_s, 0.0)
        self.most_samples = float(self.value.sum())
        idle, busy = split_caps(limits, lowest, fewest, highest)
        self.idle, self.busy = idle / highest, np.where(self.able, busy, 0.0) / highest
        self.widest = np.maximum(self.idle, self.busy)
        self.pairs: set[tuple[int, int]] = set()
        self.seconds = np.array(
            [problem.batch_size / self.most_samples, problem.gradient_bytes / highest]
        )
        self._solution = np.zeros(0)
        self._entries: list[tuple[Floats, NDArray[np.int64]]] = []
        self._right: list[float] = []
        self.width = 1 + 3 * n + (0 if problem.overlap else 2)
        self.lower = np.zeros(self.width)
        self.upper = np.ones(self.width)
        self.lower[0] = lowest / highest
        self.upper[1 : 1 + n] = self.able
        self.upper[1 + 3 * n :] = np.inf
        self._build(fewest, most)

    def _build(self, fewest: int, most: int) -> None:
        n = self.limits.n
        c = 1 + np.arange(n)
        x, y = c + n, c + 2 * n
        upload, download = self.limits.upload / self.unit, self.limits.download / self.unit
        self._row(np.append(1.0, -np.ones(2 * n)), [0, *x, *y], 0.0)
        self._row(-np.ones(n), c, -float(fewest))
        self._row(np.ones(n), c, float(most))
        for i in range(n):
            self._row([n - 1.0], [y[i]], upload[i])
            self._row([1.0, self.idle[i]], [y[i], c[i]], self.idle[i])
            self._row([fewest - 1.0, fewest - 2.0, 1.0], [y[i], x[i], 0], download[i])
            if self.able[i]:
                self._row([n - 2.0, 1.0, 1.0 - upload[i]], [x[i], 0, c[i]], 1.0)
                self._row([1.0, -self.busy[i]], [x[i], c[i]], 0.0)
            else:
                self.upper[x[i]] = 0.0
        samples = self.value / self.most_samples
        if self.problem.overlap:
            ratio = self.unit * self.problem.batch_size / self.problem.gradient_bytes
            self._row(np.append(ratio / self.most_samples, -samples), [0, *c], 0.0)
        else:
            for point in np.geomspace(1e-3, 1.0, TANGENTS):
                self._touch(point, max(point, 1e-12))

    def _touch(self, samples: float, total: float) -> None:
        """Tangents at S and H (both scaled): sigma >= 1/S and eta >= 1/H are convex."""
        n = self.limits.n
        c = 1 + np.arange(n)
        slope = self.value / self.most_samples / samples**2
        self._row(np.append(-slope, -1.0), [*c, 1 + 3 * n], -2.0 / samples)
        self._row([-1.0 / total**2, -1.0], [0, 2 + 3 * n], -2.0 / total)

    def _row(self, values: Iterable[float], columns: Iterable[int], right: float) -> None:
        """A row ``values @ z[columns] <= right``."""
        self._entries.append(
            (np.array(list(values), dtype=np.float64), np.array(list(columns), dtype=np.int64))
        )
        self._right.append(right)

    def solve(self, run: StopRun) -> Answer:
        """The best set of the model, or its bound when the stopping rule ends the search.

        Pair rows that fractional solutions break are added first, as long as there are some: an LP
        costs far less than a tree that is searched without them.
        """
        nothing = np.zeros(self.limits.n)
        if self.empty:
            return Answer(None, nothing, 0.0, 0.0, -math.inf)
        n = self.limits.n
        for _ in range(RELAXED_ROUNDS if self.limits.links is not None else 0):
            found = self._optimise(integral=False, options={})
            if found.x is None or run.check() or not self._add_pairs(found.x):
                break
        options: dict[str, Any] = {"mip_rel_gap": MIP_GAP}
        if math.isfinite(run.remaining_s):
            options["time_limit"] = max(run.remaining_s, 1e-3)
        if math.isfinite(run.remaining_iterations):
            options["node_limit"] = max(int(run.remaining_iterations), 1)
        found = self._optimise(integral=True, options=options)
        nodes = getattr(found, "mip_node_count", None)
        run.update(max(int(nodes or 0), 1))
        if found.status == 2:
            return Answer(None, nothing, 0.0, 0.0, -math.inf)
        dual = getattr(found, "mip_dual_bound", None)
        bound = math.inf
        if dual is not None and math.isfinite(dual) and found.status in (0, 1):
            bound = self._steps_of(float(dual))
        if found.x is None:
            return Answer(None, nothing, 0.0, 0.0, bound)
        self._solution = found.x
        computes: Bools = found.x[1 : 1 + n] > 0.5
        rates = (found.x[1 + n : 1 + 2 * n] + found.x[1 + 2 * n : 1 + 3 * n]) * self.unit
        samples = float(self.value[computes].sum())
        return Answer(computes, rates, float(found.x[0]) * self.unit, samples, bound)

    def _optimise(self, integral: bool, options: dict[str, Any]) -> Any:
        """Maximise H, or minimise the seconds of a step; SciPy's result."""
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.sparse import csr_array

        n = self.limits.n
        gain = np.zeros(self.width)
        if self.problem.overlap:
            gain[0] = -1.0
        else:
            gain[1 + 3 * n :] = self.seconds / self.seconds.sum()
        counts = np.array([len(columns) for _, columns in self._entries])
        matrix = csr_array(
            (
                np.concatenate([values for values, _ in self._entries]),
                np.concatenate([columns for _, columns in self._entries]),
                np.concatenate(([0], np.cumsum(counts))),
            ),
            shape=(len(counts), self.width),
        )
        kinds = np.zeros(self.width)
        kinds[1 : 1 + n] = integral
        # presolve finds little in these rows and slowed down most of the instances tried
        return milp(
            gain,
            integrality=kinds,
            bounds=Bounds(self.lower, self.upper),
            constraints=LinearConstraint(matrix, -np.inf, np.array(self._right)),
            options={"presolve": False, **options},
        )

    def _steps_of(self, objective: float) -> float:
        """Steps per second for a value of the model's (minimised) objective."""
        if self.problem.overlap:
            return -objective * self.unit / self.problem.gradient_bytes
        seconds = objective * float(self.seconds.sum())
        return 1.0 / seconds if seconds > 0 else math.inf

    def refine(self, answer: Answer) -> bool:
        """Add the pair rows and tangents that the answer breaks; False if there are none."""
        assert answer.computes is not None
        fresh = self._add_pairs(self._solution)
        if self.problem.overlap or answer.total <= 0:
            return fresh
        true = self.problem.steps_of(answer.samples, answer.total)
        if true < answer.bound * (1 - 1e-7):
            self._touch(answer.samples / self.most_samples, answer.total / self.unit)
            return True
        return fresh

    def _add_pairs(self, solution: Floats) -> bool:
        """Rows ``x_i + r_j <= t_ij c_i + M_ij (1 - c_i)`` that a solution breaks; False if none."""
        if self.limits.links is None:
            return False
        n = self.limits.n
        links = np.where(np.isfinite(self.limits.links), self.limits.links / self.unit, 1e9)
        c, x, y = (solution[1 + k * n : 1 + (k + 1) * n] for k in range(3))
        most = np.maximum(self.widest[None, :], links)
        excess = x[:, None] + (x + y)[None, :] + (most - links) * c[:, None] - most
        np.fill_diagonal(excess, 0.0)
        fresh = [
            pair
            for pair in ((int(i), int(j)) for i, j in np.argwhere(excess > 1e-7))
            if pair not in self.pairs
        ]
        self.pairs.update(fresh)
        for i, j in fresh:
            big = float(most[i, j])
            columns = [1 + n + i, 1 + n + j, 1 + 2 * n + j, 1 + i]
            self._row([1.0, 1.0, 1.0, big - float(links[i, j])], columns, big)
        return bool(fresh)

    def fix(self, computes: Bools) -> None:
        """Leave these contributors alone."""
        columns = slice(1, 1 + self.limits.n)
        self.lower[columns] = self.upper[columns] = computes

    def exclude(self, computes: Bools) -> None:
        """Never propose this set again: its exact value is known."""
        c = 1 + np.arange(self.limits.n)
        signs = np.where(computes, 1.0, -1.0)
        self._row(signs, c, float(computes.sum()) - 1.0)
