"""LP (5) in forms with n^2 rows instead of n^3, for SciPy's HiGHS.

Eq. 4 bounds every g_ij by the same ``min_k a_ki + (1 - c_k) M_i``. A variable q_i for that minimum
splits the n^3 rows into ``g_ij <= q_i`` and ``q_i <= a_ki + (1 - c_k) M_i``: the *full* form.

The *aggregated* form also drops the n^2 variables g. Only the sums over what each peer returns,
G_i, and receives, D_j, enter the limits, so it keeps those with ``G_i <= (n - 1) q_i`` and
``D_j <= sum_{i != j} q_i``. It bounds LP (5) from above. Then a transportation problem looks for
the g_ij behind the sums, within q_i and what the links leave beside a_ij. Where they exist, LP (5)
is solved; otherwise the minimum cut of the transportation problem becomes a row of the aggregated
form and it is solved again. After `ROUNDS` cuts the full form decides.

Nor does it need all n^2 variables a. The least that eq. 4 asks for is ``max(0, q_i - (1 - c_k)
M_i)``. With c_k = 1 that is the second argument, without an accelerator the first, unless q_i is
above M_i. So all senders begin with one of these lower bounds in place of a_k, and only those for
whom it is too low in the solution get variables. The value stays the optimum of LP (5): dropping
constraints bounds it from above, and a solution that satisfies them all attains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import Limits
from planner.lp.highs import milp
from planner.lp.rates import best_rates
from planner.problems import AveragingProblem, ProblemError

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

TIGHT = 1e-9
ROUNDS = 8
NEARLY = 1.01
"""Downloads up to this many times their limit hardly bind; decides about time only."""


@dataclass(frozen=True)
class RelaxedSolution:
    """A solution of LP (5).

    Attributes
    ----------
    xi
        Its value in steps per second: no plan makes more.
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


class _Scaled:
    """The problem in units that put the numbers near 1, and the columns that both forms share."""

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
        self.pace = self.samples / problem.batch_size
        self.value = np.where(problem.contributors, problem.samples_per_s, 0.0) / self.samples
        self.gradient = problem.gradient_bytes * self.pace / self.unit
        self.upload = problem.upload_bytes_per_s / self.unit
        self.download = problem.download_bytes_per_s / self.unit
        self.big = big_m(problem) / self.unit
        links = problem.link_bytes_per_s
        self.links = None if links is None else links / self.unit
        self.source, self.target = np.nonzero(~np.eye(n, dtype=bool))
        self.peers = np.arange(n)
        self.q = 1 + self.peers
        self.c = 1 + n + self.peers


class _Rows:
    """Rows ``A z <= b`` collected block by block."""

    def __init__(self) -> None:
        self._values: list[Floats] = []
        self._rows: list[Index] = []
        self._columns: list[Index] = []
        self._right: list[Floats] = []
        self.count = 0

    def add(self, right: Floats, *entries: tuple[Any, Any, Any]) -> None:
        """A block of ``len(right)`` rows; entries are (row in block, column, value) arrays."""
        for rows, columns, values in entries:
            at, where, what = np.broadcast_arrays(rows, columns, values)
            self._rows.append(at.astype(np.int64).ravel() + self.count)
            self._columns.append(where.astype(np.int64).ravel())
            self._values.append(what.astype(np.float64).ravel())
        self._right.append(right)
        self.count += len(right)

    def solve(self, upper: Floats, gain: int) -> Any:
        """Maximise one column with ``0 <= z <= upper``; SciPy's result.

        ``milp`` without integers is HiGHS with less work around it than ``linprog``.
        """
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.sparse import csr_array

        matrix = csr_array(
            (
                np.concatenate(self._values),
                (np.concatenate(self._rows), np.concatenate(self._columns)),
            ),
            shape=(self.count, len(upper)),
        )
        cost = np.zeros(len(upper))
        cost[gain] = -1.0
        return milp(
            cost,
            bounds=Bounds(np.zeros(len(upper)), upper),
            constraints=LinearConstraint(matrix, -np.inf, np.concatenate(self._right)),
            # presolve costs more than it saves on these already reduced forms
            options={"presolve": False},
        )


def big_m(problem: AveragingProblem) -> Floats:
    """M_i of eq. 4 in bytes per second: the paper's d_i, or u_i / (n - 1) if that is larger.

    "Any large positive number as long as the constraint is not saturated for c_k = 0": no reducer
    returns more than u_i / (n - 1), and with a single contributor that can exceed its download.
    """
    others = max(len(problem) - 1, 1)
    big: Floats = np.maximum(problem.download_bytes_per_s, problem.upload_bytes_per_s / others)
    return big


def solve_relaxed(problem: AveragingProblem) -> RelaxedSolution:
    """LP (5); see the module for the two forms. Same problem, same answer in any process."""
    n = len(problem)
    if n == 1:
        steps = problem.steps_per_s([0.0], [True])
        rate = np.full((1, 1), steps * problem.gradient_bytes)
        return RelaxedSolution(steps, rate, rate, np.ones(1))
    if problem.overlap and not problem.download_bytes_per_s.any():
        return RelaxedSolution(0.0, np.zeros((n, n)), np.zeros((n, n)), np.ones(n))
    scaled = _Scaled(problem)
    return _everyone(scaled) or _aggregated(scaled) or _full(scaled)


def _everyone(s: _Scaled) -> RelaxedSolution | None:
    """The solution with c = 1 where all peers' samples can be averaged in time; None otherwise.

    Then xi is at its largest, and the LP, which is highly degenerate there, need not be solved.
    """
    problem = s.problem
    able = problem.contributors
    need = s.samples * problem.gradient_bytes / problem.batch_size
    found = best_rates(Limits(problem), able, need)
    if found.total < need:
        return None
    q = found.rates / s.unit
    a = np.outer(able, q)
    g = np.repeat(q[:, None], s.n, axis=1)
    return _solution(s, 1.0, q, able.astype(np.float64), a, g)


def lp_bound(problem: AveragingProblem) -> float:
    """The value of LP (5) in steps per second, an upper bound on every plan (delayed updates)."""
    return solve_relaxed(problem).xi


def _common(rows: _Rows, s: _Scaled, a0: int, source: Index, target: Index) -> None:
    """xi <= sum_i s_i c_i / B, and q_i <= a_ki + (1 - c_k) M_i for the pairs (k, i) given."""
    m = np.arange(len(source))
    rows.add(np.zeros(1), (0, 0, 1.0), (0, s.c, -s.value))
    rows.add(
        s.big[target],
        (m, s.q[target], 1.0),
        (m, a0 + m, -1.0),
        (m, s.c[source], s.big[target]),
    )


def _upper(s: _Scaled, width: int, blocked: list[Index]) -> Floats:
    upper = np.full(width, np.inf)
    upper[s.c] = s.problem.contributors
    for columns in blocked:
        upper[columns] = 0.0
    return upper


def _aggregated(s: _Scaled) -> RelaxedSolution | None:
    """The aggregated form and its cuts; None if they do not settle within `ROUNDS` of them."""
    whole = np.zeros(s.n, dtype=bool)
    cuts: list[_Cut] = []
    while len(cuts) < ROUNDS:
        z = _solve_aggregated(s, whole, cuts)
        if z is None:
            return None
        q, c = z[s.q], np.minimum(z[s.c], 1.0)
        a = _least_senders(s, q, c)
        short = _too_low(s, z, a, whole)
        if short.any():
            # a few are cheaper than all, but only once: each time may show some more, and does
            # where a broken download spreads the excess over other senders
            received = a.sum(axis=0) + z[1 + 3 * s.n : 1 + 4 * s.n]
            few = not whole.any() and bool((received <= s.download * NEARLY + TIGHT).all())
            whole |= short if few else True
            continue
        left = np.full((s.n, s.n), np.inf) if s.links is None else np.maximum(s.links - a, 0.0)
        room = np.minimum(q[:, None], left)
        np.fill_diagonal(room, 0.0)
        supply = np.maximum(s.upload - a.sum(axis=1), 0.0)
        g, cut = transport(supply, np.maximum(s.gradient * z[0] - q, 0.0), room)
        if g is not None:
            return _solution(s, z[0], q, c, a, g)
        assert cut is not None
        suppliers, receivers = cut
        i, j = (x.ravel() for x in np.meshgrid(suppliers, receivers, indexing="ij"))
        i, j = i[i != j], j[i != j]
        by_link = left[i, j] < q[i]
        cuts.append(_Cut(suppliers, receivers, i[~by_link], i[by_link], j[by_link]))
        # a bound below a_ij would leave the solution on the right side of the cut
        whole[i[by_link & (a[i, j] > _lower(s, z)[i, j] + TIGHT)]] = True
    return None


class _Cut(NamedTuple):
    """D(J) <= G(outside S) + sum over S x J of q_i or of t_ij - a_ij."""

    suppliers: Index
    receivers: Index
    by_rate: Index
    by_link: Index
    by_link_to: Index


def _solve_aggregated(s: _Scaled, whole: NDArray[np.bool_], cuts: list[_Cut]) -> Floats | None:
    """Its columns xi, q, c, G, D, then a_k of the senders k in ``whole``."""
    n, able = s.n, s.problem.contributors
    back, got, a0 = 1 + 2 * n + s.peers, 1 + 3 * n + s.peers, 1 + 4 * n
    off_diagonal = ~np.eye(n, dtype=bool)
    source, target = np.nonzero(off_diagonal & whole[:, None])
    m = np.arange(len(source))
    rows = _Rows()
    _common(rows, s, a0, source, target)
    rows.add(np.zeros(n), (s.peers, 0, s.gradient), (s.peers, s.q, -1.0), (s.peers, got, -1.0))
    rows.add(np.zeros(n), (s.peers, back, 1.0), (s.peers, s.q, 1.0 - n))
    rows.add(np.zeros(n), (s.peers, got, 1.0), (s.target, s.q[s.source], -1.0))
    rows.add(np.zeros(1), (0, got, 1.0), (0, back, -1.0))
    # the others' a_ki: at least q_i - (1 - c_k) M_i of those who can contribute
    low = off_diagonal & (able & ~whole)[:, None]
    k, i = np.nonzero(low)
    big = np.where(low, s.big[None, :], 0.0)
    rows.add(
        s.upload + big.sum(axis=1),
        (source, a0 + m, 1.0),
        (s.peers, back, 1.0),
        (k, s.q[i], 1.0),
        (s.peers, s.c, big.sum(axis=1)),
    )
    rows.add(
        s.download + big.sum(axis=0),
        (target, a0 + m, 1.0),
        (s.peers, got, 1.0),
        (s.peers, s.q, low.sum(axis=0)),
        (i, s.c[k], s.big[i]),
    )
    column = np.zeros((n, n), dtype=np.int64)
    column[source, target] = a0 + m
    for cut in cuts:
        pairs = cut.by_link, cut.by_link_to
        # a_ij is a variable, or stands for its lower bound, which keeps the cut valid
        given = whole[cut.by_link]
        bound_from, bound_to = (x[~given & able[cut.by_link]] for x in pairs)
        limit = 0.0 if s.links is None else float(s.links[pairs].sum())
        rows.add(
            np.array([limit + float(s.big[bound_to].sum())]),
            (0, got[cut.receivers], 1.0),
            (0, back[np.setdiff1d(s.peers, cut.suppliers)], -1.0),
            (0, s.q[cut.by_rate], -1.0),
            (0, column[pairs][given], 1.0),
            (0, s.q[bound_to], 1.0),
            (0, s.c[bound_from], s.big[bound_to]),
        )
    off = np.flatnonzero(~s.problem.can_aggregate)
    upper = _upper(s, a0 + len(m), [s.q[off], back[off]])
    if s.links is not None:
        upper[a0:] = s.links[source, target]
    upper[a0 + np.flatnonzero(~s.problem.can_aggregate[target])] = 0.0
    found = rows.solve(upper, 0)
    return None if found.x is None else np.maximum(found.x, 0.0)


def _lower(s: _Scaled, z: Floats) -> Floats:
    """What stands for a_ki where it is no variable."""
    bound = z[s.q][None, :] - (1 - np.minimum(z[s.c], 1.0))[:, None] * s.big[None, :]
    bound[~s.problem.contributors] = 0.0
    return bound


def _too_low(s: _Scaled, z: Floats, a: Floats, whole: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Senders whose a_ki must exceed their lower bound in the LP, if that breaks a limit."""
    n = s.n
    back, got = z[1 + 2 * n : 1 + 3 * n], z[1 + 3 * n : 1 + 4 * n]
    over = a > (np.inf if s.links is None else s.links + TIGHT)
    np.fill_diagonal(over, False)
    if not (
        over.any()
        or (a.sum(axis=1) + back > s.upload + TIGHT).any()
        or (a.sum(axis=0) + got > s.download + TIGHT).any()
    ):
        return np.zeros(n, dtype=bool)
    off = np.abs(a - _lower(s, z)) > TIGHT
    np.fill_diagonal(off, False)
    short: NDArray[np.bool_] = (off | over).any(axis=1) & ~whole
    return short


def _full(s: _Scaled) -> RelaxedSolution:
    """The full form: 2 n^2 variables and 3 n^2 rows."""
    n, m = s.n, np.arange(len(s.source))
    a0 = 1 + 2 * n
    g0 = a0 + len(m)
    rows = _Rows()
    _common(rows, s, a0, s.source, s.target)
    rows.add(
        np.zeros(n),
        (s.peers, 0, s.gradient),
        (s.peers, s.q, -1.0),
        (s.target, g0 + m, -1.0),
    )
    rows.add(np.zeros(len(m)), (m, g0 + m, 1.0), (m, s.q[s.source], -1.0))
    rows.add(s.upload, (s.source, a0 + m, 1.0), (s.source, g0 + m, 1.0))
    rows.add(s.download, (s.target, a0 + m, 1.0), (s.target, g0 + m, 1.0))
    if s.links is not None:
        limit = s.links[s.source, s.target]
        finite = np.flatnonzero(np.isfinite(limit))
        at = np.arange(len(finite))
        rows.add(limit[finite], (at, a0 + finite, 1.0), (at, g0 + finite, 1.0))
    off = np.flatnonzero(~s.problem.can_aggregate)
    no_reducer = np.flatnonzero(~s.problem.can_aggregate[s.target])
    no_return = np.flatnonzero(~s.problem.can_aggregate[s.source])
    upper = _upper(s, g0 + len(m), [s.q[off], a0 + no_reducer, g0 + no_return])
    found = rows.solve(upper, 0)
    if found.x is None:
        raise RuntimeError(f"LP (5) was not solved: {found.message}")
    z = np.maximum(found.x, 0.0)
    g = np.zeros((n, n))
    g[s.source, s.target] = z[g0:]
    a = np.zeros((n, n))
    a[s.source, s.target] = z[a0:g0]
    return _solution(s, z[0], z[s.q], np.minimum(z[s.c], 1.0), a, g)


def _least_senders(s: _Scaled, q: Floats, c: Floats) -> Floats:
    """a_ki = max(0, q_i - (1 - c_k) M_i), the least that eq. 4 asks for."""
    a = np.maximum(q[None, :] - (1 - c)[:, None] * s.big[None, :], 0.0)
    a[a <= TIGHT] = 0.0
    np.fill_diagonal(a, 0.0)
    return a


def _solution(s: _Scaled, xi: float, q: Floats, c: Floats, a: Floats, g: Floats) -> RelaxedSolution:
    a, g = a * s.unit, g * s.unit
    # "transfer within one node does not count towards network throughput"
    np.fill_diagonal(a, q * s.unit)
    np.fill_diagonal(g, q * s.unit)
    return RelaxedSolution(float(xi) * s.pace, a, g, np.where(c > 1 - 1e-9, 1.0, c))


def transport(
    supply: Floats, need: Floats, room: Floats
) -> tuple[Floats | None, tuple[Index, Index] | None]:
    """Flows g_ij within ``room`` that cover every need from the supplies, or a cut that forbids it.

    A greedy pass usually ends it; a small LP decides the rest.

    Returns
    -------
    tuple
        The flows and None, or None and (S, J): the needs of J exceed the supplies outside S plus
        the room between S and J.
    """
    g = _greedy_transport(supply, need, room)
    if (need - g.sum(axis=0) <= TIGHT).all():
        return g, None
    from scipy.optimize import linprog
    from scipy.sparse import csr_array

    n = len(need)
    source, target = np.nonzero(room > 0)
    m, peers = np.arange(len(source)), np.arange(n)
    rows = np.concatenate([source, n + target, n + peers])
    columns = np.concatenate([m, m, len(m) + peers])
    values = np.concatenate([np.ones(len(m)), -np.ones(len(m)), -np.ones(n)])
    matrix = csr_array((values, (rows, columns)), shape=(2 * n, len(m) + n))
    found = linprog(
        np.concatenate([np.zeros(len(m)), np.ones(n)]),
        A_ub=matrix,
        b_ub=np.concatenate([supply, -need]),
        bounds=np.column_stack(
            [np.zeros(len(m) + n), np.concatenate([room[source, target], np.full(n, np.inf)])]
        ),
        method="highs-ds",
    )
    if found.fun <= n * TIGHT:
        g = np.zeros((n, n))
        g[source, target] = np.maximum(found.x[: len(m)], 0.0)
        return g, None
    prices = -found.ineqlin.marginals
    return None, (np.flatnonzero(prices[:n] < 0.5), np.flatnonzero(prices[n:] > 0.5))


def _greedy_transport(supply: Floats, need: Floats, room: Floats) -> Floats:
    """Serve receivers in the order of room less need, each from the best-filled suppliers."""
    left = supply.copy()
    g = np.zeros_like(room)
    for j in np.argsort(room.sum(axis=0) - need, kind="stable"):
        cap = np.minimum(room[:, j], left)
        total = float(cap.sum())
        if total <= 0 or need[j] <= 0:
            continue
        # a level on the suppliers: take from those with most left, down to an even remainder
        share = cap if total <= need[j] else _from_the_fullest(left, cap, float(need[j]))
        g[:, j] = share
        left -= share
    return g


def _from_the_fullest(left: Floats, cap: Floats, need: float) -> Floats:
    """Amounts ``clip(left - level, 0, cap)`` that sum to ``need``, below the sum of the caps."""
    levels = np.sort(np.concatenate([left, left - cap]))
    totals = np.clip(left[None, :] - levels[:, None], 0.0, cap).sum(axis=1)
    # totals fall with the level and are linear between neighbouring levels
    below = int(np.searchsorted(-totals, -need, side="left"))
    low, high = levels[max(below - 1, 0)], levels[below]
    drop = totals[max(below - 1, 0)] - totals[below]
    part = (totals[max(below - 1, 0)] - need) / drop if drop > 0 else 0.0
    share: Floats = np.clip(left - (low + (high - low) * part), 0.0, cap)
    return share
