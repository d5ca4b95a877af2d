"""Shared by all forms of LP (5): scaling, columns, rows, and the solution in original units."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.problems import AveragingProblem, ProblemError
from planner.search.highs import milp

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

INSTANT = 1e9
"""Cap on the ratio of computing to averaging speed, for numerical stability."""


@dataclass(frozen=True)
class RelaxedSolution:
    """A solution of LP (5).

    Attributes
    ----------
    xi
        Its value in steps per second, an upper bound on all plans.
    a, g
        ``float[n, n]`` in bytes per second; on the diagonal, which uses no network, the rate q_i
        at which the reducer works.
    c
        ``float[n]`` in [0, 1].
    """

    xi: float
    a: Floats
    g: Floats
    c: Floats


class ScaledProblem:
    """The problem scaled to numbers near 1, and the columns shared by both forms."""

    def __init__(self, problem: AveragingProblem) -> None:
        if not problem.overlap:
            raise ProblemError(
                "eq. 2-5 are for delayed parameter updates, found overlap=False; use the exact "
                "method"
            )
        n = self.n = len(problem)
        self.problem = problem
        self.unit = max(
            float(problem.upload_bytes_per_s.max()), float(problem.download_bytes_per_s.max())
        )
        self.samples = float(problem.samples_per_s[problem.contributors].sum())
        # the unit of xi is the smaller of the steps per second that all peers compute and that the
        # fastest peer averages, so that a solver's tolerance is small relative to both
        self.xi_unit = min(self.samples / problem.batch_size, self.unit / problem.gradient_bytes)
        max_value = min(self.samples / problem.batch_size / self.xi_unit, INSTANT)
        eligible = np.where(problem.contributors, problem.samples_per_s, 0.0)
        self.value = eligible / self.samples * max_value
        self.gradient = problem.gradient_bytes * self.xi_unit / self.unit
        self.upload = problem.upload_bytes_per_s / self.unit
        self.download = problem.download_bytes_per_s / self.unit
        self.big_m = big_m(problem) / self.unit
        links = problem.link_bytes_per_s
        self.links = None if links is None else links / self.unit
        self.source, self.target = np.nonzero(~np.eye(n, dtype=bool))
        self.peers = np.arange(n)
        self.q_columns = 1 + self.peers
        self.c_columns = 1 + n + self.peers


class ConstraintRows:
    """Rows ``A z <= b``, added in blocks."""

    def __init__(self) -> None:
        self._values: list[Floats] = []
        self._rows: list[Index] = []
        self._columns: list[Index] = []
        self._rhs: list[Floats] = []
        self.count = 0

    def add(self, rhs: Floats, *entries: tuple[Any, Any, Any]) -> None:
        """Add a block of ``len(rhs)`` rows; entries are (row in block, column, value) arrays."""
        for rows, columns, values in entries:
            row, column, value = np.broadcast_arrays(rows, columns, values)
            self._rows.append(row.astype(np.int64).ravel() + self.count)
            self._columns.append(column.astype(np.int64).ravel())
            self._values.append(value.astype(np.float64).ravel())
        self._rhs.append(rhs)
        self.count += len(rhs)

    def copy(self) -> ConstraintRows:
        """A copy to which further rows can be added."""
        result = ConstraintRows()
        result._values, result._rows = self._values.copy(), self._rows.copy()
        result._columns, result._rhs = self._columns.copy(), self._rhs.copy()
        result.count = self.count
        return result

    def solve(self, upper: Floats, objective_column: int) -> Any:
        """Maximise one column with ``0 <= z <= upper``; returns SciPy's result.

        ``milp`` without integers calls HiGHS with less overhead than ``linprog``.
        """
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.sparse import csr_array

        a_ub = csr_array(
            (
                np.concatenate(self._values),
                (np.concatenate(self._rows), np.concatenate(self._columns)),
            ),
            shape=(self.count, len(upper)),
        )
        objective = np.zeros(len(upper))
        objective[objective_column] = -1.0
        return milp(
            objective,
            bounds=Bounds(np.zeros(len(upper)), upper),
            constraints=LinearConstraint(a_ub, -np.inf, np.concatenate(self._rhs)),
            # presolve costs more than it saves on these already reduced forms
            options={"presolve": False},
        )


def big_m(problem: AveragingProblem) -> Floats:
    """M_i of eq. 4 in bytes per second: the paper's d_i, or u_i / (n - 1) if that is larger.

    "Any large positive number as long as the constraint is not saturated for c_k = 0": no reducer
    returns more than u_i / (n - 1), and with a single contributor that can exceed its download.

    Returns
    -------
    ndarray
        ``float[n]``.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), eq. 4.
    """
    others = max(len(problem) - 1, 1)
    limits: Floats = np.maximum(problem.download_bytes_per_s, problem.upload_bytes_per_s / others)
    return limits


def compute_and_eq4_rows(
    rows: ConstraintRows, s: ScaledProblem, first_a: int, source: Index, target: Index
) -> None:
    """xi <= sum_i s_i c_i / B, and q_i <= a_ki + (1 - c_k) M_i for the pairs (k, i) given.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), eq. 4.
    """
    pair = np.arange(len(source))
    rows.add(np.zeros(1), (0, 0, 1.0), (0, s.c_columns, -s.value))
    rows.add(
        s.big_m[target],
        (pair, s.q_columns[target], 1.0),
        (pair, first_a + pair, -1.0),
        (pair, s.c_columns[source], s.big_m[target]),
    )


def upper_bounds(s: ScaledProblem, width: int, blocked: list[Index]) -> Floats:
    """Upper bounds on the columns.

    Parameters
    ----------
    s
        The scaled problem; its columns c are at most 1 for eligible contributors, 0 for others.
    width
        Number of columns.
    blocked
        Columns that must be 0.

    Returns
    -------
    ndarray
        ``float[width]``.
    """
    upper = np.full(width, np.inf)
    upper[s.c_columns] = s.problem.contributors
    for columns in blocked:
        upper[columns] = 0.0
    return upper


def solution_of(
    s: ScaledProblem, xi: float, q: Floats, c: Floats, a: Floats, g: Floats
) -> RelaxedSolution:
    """The solution in original units.

    Parameters
    ----------
    s
        The scaled problem.
    xi, q, c, a, g
        Scaled values of the columns: steps per second, ``float[n]`` rates and contributions, and
        ``float[n, n]`` rates of the pairs, whose diagonals are replaced by ``q``.

    Returns
    -------
    RelaxedSolution
        In steps and bytes per second; contributions that are 1 up to rounding are exactly 1.
    """
    a, g = a * s.unit, g * s.unit
    # "transfer within one node does not count towards network throughput"
    np.fill_diagonal(a, q * s.unit)
    np.fill_diagonal(g, q * s.unit)
    return RelaxedSolution(float(xi) * s.xi_unit, a, g, np.where(c > 1 - 1e-9, 1.0, c))
