"""LP (5) aggregated: n variables in place of n^2 that occur mostly in sums.

The rates g_ij returned by i to j, and a_ki sent by k to reducer i, occur in the upload and download
limits only as sums. Two relaxations exploit this, with a separation step for each:

Returns. G_i is the total returned by peer i, D_j the total received by peer j, with
``G_i <= (n - 1) q_i`` and ``D_j <= sum_{i != j} q_i``. A transportation problem then looks for g_ij
with these sums, bounded by q_i and by the residual link capacity besides a_ij. If it is infeasible,
its minimum cuts are valid for LP (5) and violated by the solution; they are added, and the program
is solved again.

Contributions. Eq. 4 requires ``a_ki >= q_i - (1 - c_k) M_i`` and ``a_ki >= 0``. For most peers it
is known which of the two binds: the first if c_k = 1, the second if c_k = 0. So a lower bound
substitutes for the variables of a sender until the solution shows that it is too weak.

All steps only relax LP (5), so the value is an upper bound; a solution that violates no separated
row is an optimum of LP (5).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.lp.dedloc_lp_rows import (
    ConstraintRows,
    Floats,
    Index,
    RelaxedSolution,
    ScaledProblem,
    compute_and_eq4_rows,
    solution_of,
    upper_bounds,
)
from planner.lp.transportation import solve_transportation

TOLERANCE = 1e-9
"""Absolute tolerance of scaled rates."""
MAX_ROUNDS = 8
"""Maximum number of programs solved before falling back to the full form."""
NEAR_LIMIT = 1.01
"""Factor on download limits for a heuristic that affects only the solve time."""


def solve_aggregated(s: ScaledProblem) -> RelaxedSolution | None:
    """Solve the aggregated form with cuts; None if `MAX_ROUNDS` rounds do not suffice."""
    form = AggregatedForm(s)
    for _ in range(MAX_ROUNDS):
        z = form.solve()
        if z is None:
            return None
        explicit_senders = form.explicit_senders
        q, c = z[s.q_columns], np.minimum(z[s.c_columns], 1.0)
        a = _min_contributions(s, q, c)
        underestimated = _underestimated_senders(s, z, a, explicit_senders)
        if underestimated.any():
            # adding a few senders is cheaper than all, but is tried only once: if a download limit
            # is violated, the excess would move to other senders in every round
            received = a.sum(axis=0) + z[1 + 3 * s.n : 1 + 4 * s.n]
            add_few = not explicit_senders.any() and bool(
                (received <= s.download * NEAR_LIMIT + TOLERANCE).all()
            )
            form.add_senders(underestimated if add_few else np.ones(s.n, dtype=bool))
            continue
        link_left = np.full((s.n, s.n), np.inf) if s.links is None else np.maximum(s.links - a, 0.0)
        capacity = np.minimum(q[:, None], link_left)
        np.fill_diagonal(capacity, 0.0)
        supply = np.maximum(s.upload - a.sum(axis=1), 0.0)
        g, cuts = solve_transportation(supply, np.maximum(s.gradient * z[0] - q, 0.0), capacity)
        if g is not None:
            return solution_of(s, z[0], q, c, a, g)
        by_link = link_left < q[:, None]
        for cut in cuts:
            form.cut(*cut, by_link)
        # with a lower bound below a_ij, the cut would not exclude the solution
        form.add_senders(
            np.any(form.link_limited & (a > _contribution_lower_bounds(s, z) + TOLERANCE), axis=1)
        )
    return None


class AggregatedForm:
    """The aggregated form: columns xi, q, c, G, D, a_k of explicit senders k, and w.

    A cut (S, J) reads ``D(J) <= G(outside S) + sum over S x J of w_ij`` with ``w_ij <= q_i`` and
    ``w_ij <= t_ij - a_ij``, the capacity of a pair. Only pairs in ``link_limited``, whose link was
    the narrower of the two in some cut, have a variable; q_i, which is no less, stands for the
    others.
    """

    def __init__(self, s: ScaledProblem) -> None:
        self.s = s
        self.explicit_senders = np.zeros(s.n, dtype=bool)
        self.link_limited = np.zeros((s.n, s.n), dtype=bool)
        self.cuts: list[tuple[Index, Index]] = []
        self.returned, self.received, self.first_a = (
            1 + 2 * s.n + s.peers,
            1 + 3 * s.n + s.peers,
            1 + 4 * s.n,
        )
        self._base = self._without_cuts()

    def add_senders(self, senders: NDArray[np.bool_]) -> None:
        """Add variables a_k for these senders."""
        if (senders & ~self.explicit_senders).any():
            self.explicit_senders = self.explicit_senders | senders
            self._base = self._without_cuts()

    def cut(self, suppliers: Index, receivers: Index, by_link: NDArray[np.bool_]) -> None:
        """Add a cut (S, J); ``by_link`` marks pairs whose link is the tighter bound.

        Parameters
        ----------
        by_link
            ``bool[n, n]``.
        """
        self.cuts.append((suppliers, receivers))
        pairs = np.ix_(suppliers, receivers)
        self.link_limited[pairs] |= by_link[pairs]
        np.fill_diagonal(self.link_limited, False)

    def _without_cuts(self) -> tuple[ConstraintRows, Floats]:
        """Rows and upper bounds of all columns but w."""
        s, explicit_senders, returned, received, first_a = (
            self.s,
            self.explicit_senders,
            self.returned,
            self.received,
            self.first_a,
        )
        n, eligible = s.n, s.problem.contributors
        off_diagonal = ~np.eye(n, dtype=bool)
        source, target = np.nonzero(off_diagonal & explicit_senders[:, None])
        pair = np.arange(len(source))
        rows = ConstraintRows()
        compute_and_eq4_rows(rows, s, first_a, source, target)
        rows.add(
            np.zeros(n),
            (s.peers, 0, s.gradient),
            (s.peers, s.q_columns, -1.0),
            (s.peers, received, -1.0),
        )
        rows.add(np.zeros(n), (s.peers, returned, 1.0), (s.peers, s.q_columns, 1.0 - n))
        rows.add(np.zeros(n), (s.peers, received, 1.0), (s.target, s.q_columns[s.source], -1.0))
        rows.add(np.zeros(1), (0, received, 1.0), (0, returned, -1.0))
        # a_ki of the other senders: at least q_i - (1 - c_k) M_i if k can contribute
        substituted = off_diagonal & (eligible & ~explicit_senders)[:, None]
        k, i = np.nonzero(substituted)
        big_m = np.where(substituted, s.big_m[None, :], 0.0)
        rows.add(
            s.upload + big_m.sum(axis=1),
            (source, first_a + pair, 1.0),
            (s.peers, returned, 1.0),
            (k, s.q_columns[i], 1.0),
            (s.peers, s.c_columns, big_m.sum(axis=1)),
        )
        rows.add(
            s.download + big_m.sum(axis=0),
            (target, first_a + pair, 1.0),
            (s.peers, received, 1.0),
            (s.peers, s.q_columns, substituted.sum(axis=0)),
            (i, s.c_columns[k], s.big_m[i]),
        )
        non_reducers = np.flatnonzero(~s.problem.can_aggregate)
        upper = upper_bounds(
            s, first_a + len(pair), [s.q_columns[non_reducers], returned[non_reducers]]
        )
        if s.links is not None:
            upper[first_a:] = s.links[source, target]
        upper[first_a + np.flatnonzero(~s.problem.can_aggregate[target])] = 0.0
        return rows, upper

    def solve(self) -> Floats | None:
        """Solve, and return the columns except w."""
        s, (base, upper) = self.s, self._base
        if not self.cuts:
            solution = base.solve(upper, 0)
            return None if solution.x is None else np.maximum(solution.x, 0.0)
        rows = base.copy()
        column = np.zeros((s.n, s.n), dtype=np.int64)
        column[~np.eye(s.n, dtype=bool) & self.explicit_senders[:, None]] = np.arange(
            self.first_a, len(upper)
        )
        i, j = np.nonzero(self.link_limited)
        row = np.arange(len(i))
        column_of_w = np.zeros((s.n, s.n), dtype=np.int64)
        column_of_w[i, j] = w = len(upper) + row
        rows.add(np.zeros(len(i)), (row, w, 1.0), (row, s.q_columns[i], -1.0))
        if s.links is not None:
            # a_ij is a variable or its lower bound, which keeps the cut valid
            senders = self.explicit_senders[i]
            substituted = np.flatnonzero(~senders & s.problem.contributors[i])
            rhs = s.links[i, j]
            rhs[substituted] += s.big_m[j[substituted]]
            rows.add(
                rhs,
                (row, w, 1.0),
                (row[senders], column[i[senders], j[senders]], 1.0),
                (substituted, s.q_columns[j[substituted]], 1.0),
                (substituted, s.c_columns[i[substituted]], s.big_m[j[substituted]]),
            )
            upper = np.concatenate([upper, s.links[i, j]])
        for suppliers, receivers in self.cuts:
            pairs = np.ix_(suppliers, receivers)
            columns = column_of_w[pairs]
            uses_q = (columns == 0) & (suppliers[:, None] != receivers[None, :])
            rows.add(
                np.zeros(1),
                (0, self.received[receivers], 1.0),
                (0, self.returned[np.setdiff1d(s.peers, suppliers)], -1.0),
                (0, s.q_columns[suppliers], -uses_q.sum(axis=1)),
                (0, columns[columns > 0], -1.0),
            )
        solution = rows.solve(upper, 0)
        return None if solution.x is None else np.maximum(solution.x[: len(self._base[1])], 0.0)


def _contribution_lower_bounds(s: ScaledProblem, z: Floats) -> Floats:
    """Lower bounds that substitute for a_ki of senders without variables."""
    bound = (
        z[s.q_columns][None, :] - (1 - np.minimum(z[s.c_columns], 1.0))[:, None] * s.big_m[None, :]
    )
    bound[~s.problem.contributors] = 0.0
    return bound


def _underestimated_senders(
    s: ScaledProblem, z: Floats, a: Floats, explicit_senders: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """Senders whose a_ki must exceed their lower bound, if a limit is violated."""
    n = s.n
    returned, received = z[1 + 2 * n : 1 + 3 * n], z[1 + 3 * n : 1 + 4 * n]
    exceeds_link = a > (np.inf if s.links is None else s.links + TOLERANCE)
    np.fill_diagonal(exceeds_link, False)
    if not (
        exceeds_link.any()
        or (a.sum(axis=1) + returned > s.upload + TOLERANCE).any()
        or (a.sum(axis=0) + received > s.download + TOLERANCE).any()
    ):
        return np.zeros(n, dtype=bool)
    differs = np.abs(a - _contribution_lower_bounds(s, z)) > TOLERANCE
    np.fill_diagonal(differs, False)
    underestimated: NDArray[np.bool_] = (differs | exceeds_link).any(axis=1) & ~explicit_senders
    return underestimated


def _min_contributions(s: ScaledProblem, q: Floats, c: Floats) -> Floats:
    """a_ki = max(0, q_i - (1 - c_k) M_i), the minimum that satisfies eq. 4."""
    a = np.maximum(q[None, :] - (1 - c)[:, None] * s.big_m[None, :], 0.0)
    a[a <= TOLERANCE] = 0.0
    np.fill_diagonal(a, 0.0)
    return a
