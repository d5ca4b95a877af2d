"""LP (5) in forms with n^2 rows instead of n^3, for SciPy's HiGHS.

Eq. 4 bounds every g_ij by the same ``min_k a_ki + (1 - c_k) M_i``. A variable q_i for that minimum
splits the n^3 rows into ``g_ij <= q_i`` and ``q_i <= a_ki + (1 - c_k) M_i``: the *full* form.

The *aggregated* form also drops the n^2 variables g. Only the sums over what each peer returns,
G_i, and receives, D_j, enter the limits, so it keeps those with ``G_i <= (n - 1) q_i`` and
``D_j <= sum_{i != j} q_i``. It bounds LP (5) from above. Then a transportation problem looks for
the g_ij behind the sums, within q_i and what the links leave beside a_ij. Where they exist, LP (5)
is solved; otherwise minimum cuts of the transportation problem become rows of the aggregated form
and it is solved again. After `ROUNDS` of that the full form decides.

Nor does it need all n^2 variables a. The least that eq. 4 asks for is ``max(0, q_i - (1 - c_k)
M_i)``. With c_k = 1 that is the second argument, without an accelerator the first, unless q_i is
above M_i. So all senders begin with one of these lower bounds in place of a_k, and only those for
whom it is too low in the solution get variables. The value stays the optimum of LP (5): dropping
constraints bounds it from above, and a solution that satisfies them all attains it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.lp.capacity import Limits
from planner.lp.rates import best_rates
from planner.problems import AveragingProblem, ProblemError
from planner.problems.quantities import of_kind
from planner.search.highs import milp

Floats = NDArray[np.float64]
Index = NDArray[np.int64]

TIGHT = 1e-9
UNMET = 1e-7
"""A need is met up to this: HiGHS too leaves as much of a row of LP (5) broken."""
EMPTY = 1e-14
"""Less than this is no room in the residual graph of a flow."""
ROUNDS = 8
INSTANT = 1e9
"""Computing this many times faster than averaging counts as no faster than that."""
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
        # xi is measured in the slower of what all compute and what the fastest peer averages: a
        # solver's tolerance is small beside either
        self.pace = min(self.samples / problem.batch_size, self.unit / problem.gradient_bytes)
        together = min(self.samples / problem.batch_size / self.pace, INSTANT)
        able = np.where(problem.contributors, problem.samples_per_s, 0.0)
        self.value = able / self.samples * together
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

    def copy(self) -> _Rows:
        """The same rows, to which more can be added."""
        twin = _Rows()
        twin._values, twin._rows = self._values.copy(), self._rows.copy()
        twin._columns, twin._right = self._columns.copy(), self._right.copy()
        twin.count = self.count
        return twin

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
    n = len(of_kind(AveragingProblem, problem))
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
    return _solution(s, float(s.value.sum()), q, able.astype(np.float64), a, g)


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
    form = _Aggregated(s)
    for _ in range(ROUNDS):
        z = form.solve()
        if z is None:
            return None
        whole = form.whole
        q, c = z[s.q], np.minimum(z[s.c], 1.0)
        a = _least_senders(s, q, c)
        short = _too_low(s, z, a, whole)
        if short.any():
            # a few are cheaper than all, but only once: each time may show some more, and does
            # where a broken download spreads the excess over other senders
            received = a.sum(axis=0) + z[1 + 3 * s.n : 1 + 4 * s.n]
            few = not whole.any() and bool((received <= s.download * NEARLY + TIGHT).all())
            form.widen(short if few else np.ones(s.n, dtype=bool))
            continue
        left = np.full((s.n, s.n), np.inf) if s.links is None else np.maximum(s.links - a, 0.0)
        room = np.minimum(q[:, None], left)
        np.fill_diagonal(room, 0.0)
        supply = np.maximum(s.upload - a.sum(axis=1), 0.0)
        g, cuts = transport(supply, np.maximum(s.gradient * z[0] - q, 0.0), room)
        if g is not None:
            return _solution(s, z[0], q, c, a, g)
        by_link = left < q[:, None]
        for cut in cuts:
            form.cut(*cut, by_link)
        # a bound below a_ij would leave the solution on the right side of the cut
        form.widen(np.any(form.thin & (a > _lower(s, z) + TIGHT), axis=1))
    return None


class _Aggregated:
    """The aggregated form. Columns xi, q, c, G, D, a_k of the senders k in ``whole``, then w.

    A cut (S, J) reads ``D(J) <= G(outside S) + sum over S x J of w_ij`` with ``w_ij <= q_i`` and
    ``w_ij <= t_ij - a_ij``, the room of a pair. Only pairs in ``thin``, whose link was the narrower
    of the two in some cut, have a variable; q_i, which is no less, stands for the others.
    """

    def __init__(self, s: _Scaled) -> None:
        self.s = s
        self.whole = np.zeros(s.n, dtype=bool)
        self.thin = np.zeros((s.n, s.n), dtype=bool)
        self.cuts: list[tuple[Index, Index]] = []
        self.back, self.got, self.a0 = 1 + 2 * s.n + s.peers, 1 + 3 * s.n + s.peers, 1 + 4 * s.n
        self._base = self._without_cuts()

    def widen(self, senders: NDArray[np.bool_]) -> None:
        """Variables a_k for these senders too."""
        if (senders & ~self.whole).any():
            self.whole = self.whole | senders
            self._base = self._without_cuts()

    def cut(self, suppliers: Index, receivers: Index, by_link: NDArray[np.bool_]) -> None:
        """Add (S, J); ``by_link`` says for which pairs the link is the narrower limit."""
        self.cuts.append((suppliers, receivers))
        pairs = np.ix_(suppliers, receivers)
        self.thin[pairs] |= by_link[pairs]
        np.fill_diagonal(self.thin, False)

    def _without_cuts(self) -> tuple[_Rows, Floats]:
        """Rows and upper bounds of all columns but w."""
        s, whole, back, got, a0 = self.s, self.whole, self.back, self.got, self.a0
        n, able = s.n, s.problem.contributors
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
        off = np.flatnonzero(~s.problem.can_aggregate)
        upper = _upper(s, a0 + len(m), [s.q[off], back[off]])
        if s.links is not None:
            upper[a0:] = s.links[source, target]
        upper[a0 + np.flatnonzero(~s.problem.can_aggregate[target])] = 0.0
        return rows, upper

    def solve(self) -> Floats | None:
        """The columns of an optimum without w."""
        s, (base, upper) = self.s, self._base
        if not self.cuts:
            found = base.solve(upper, 0)
            return None if found.x is None else np.maximum(found.x, 0.0)
        rows = base.copy()
        column = np.zeros((s.n, s.n), dtype=np.int64)
        column[~np.eye(s.n, dtype=bool) & self.whole[:, None]] = np.arange(self.a0, len(upper))
        i, j = np.nonzero(self.thin)
        m = np.arange(len(i))
        room = np.zeros((s.n, s.n), dtype=np.int64)
        room[i, j] = w = len(upper) + m
        rows.add(np.zeros(len(i)), (m, w, 1.0), (m, s.q[i], -1.0))
        if s.links is not None:
            # a_ij is a variable, or stands for its lower bound, which keeps the cut valid
            given = self.whole[i]
            bound = np.flatnonzero(~given & s.problem.contributors[i])
            right = s.links[i, j]
            right[bound] += s.big[j[bound]]
            rows.add(
                right,
                (m, w, 1.0),
                (m[given], column[i[given], j[given]], 1.0),
                (bound, s.q[j[bound]], 1.0),
                (bound, s.c[i[bound]], s.big[j[bound]]),
            )
            upper = np.concatenate([upper, s.links[i, j]])
        for suppliers, receivers in self.cuts:
            among = np.ix_(suppliers, receivers)
            columns = room[among]
            wide = (columns == 0) & (suppliers[:, None] != receivers[None, :])
            rows.add(
                np.zeros(1),
                (0, self.got[receivers], 1.0),
                (0, self.back[np.setdiff1d(s.peers, suppliers)], -1.0),
                (0, s.q[suppliers], -wide.sum(axis=1)),
                (0, columns[columns > 0], -1.0),
            )
        found = rows.solve(upper, 0)
        return None if found.x is None else np.maximum(found.x[: len(self._base[1])], 0.0)


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
) -> tuple[Floats | None, list[tuple[Index, Index]]]:
    """Flows g_ij within ``room`` that cover every need from the supplies, or cuts that forbid it.

    A greedy pass usually ends it; a maximum flow along shortest augmenting paths decides the rest.

    Returns
    -------
    tuple
        The flows and nothing, or None and one or two (S, J): the needs of J exceed the supplies
        outside S plus the room between S and J. Both are minimum cuts, the one nearest to the
        suppliers and the one nearest to the needs.
    """
    g = _greedy_transport(supply, need, room)
    left, short = supply - g.sum(axis=1), need - g.sum(axis=0)
    while (short > UNMET).any():
        if not _augment(g, left, short, room):
            return None, _cuts(g, left, short, room)
    return g, []


def _augment(g: Floats, left: Floats, short: Floats, room: Floats) -> bool:
    """Push flow along shortest paths in the residual graph, in place; False if there is none."""
    forward, backward = room - g > EMPTY, g > EMPTY
    senders, fresh = left > EMPTY, left > EMPTY
    reached = np.zeros(len(short), dtype=bool)
    sent_by, taken_from = np.full(len(left), -1), np.full(len(short), -1)
    while fresh.any():
        index = np.flatnonzero(fresh)
        new = forward[index].any(axis=0) & ~reached
        if not new.any():
            return False
        taken_from[new] = index[forward[np.ix_(index, new)].argmax(axis=0)]
        reached |= new
        if (new & (short > UNMET)).any():
            break
        index = np.flatnonzero(new)
        fresh = backward[:, index].any(axis=1) & ~senders
        sent_by[fresh] = index[backward[np.ix_(fresh, index)].argmax(axis=1)]
        senders |= fresh
    else:
        return False
    for j in np.flatnonzero(new & (short > UNMET)):
        path, i, most = [(int(taken_from[j]), int(j))], int(taken_from[j]), float(short[j])
        while sent_by[i] >= 0:
            k = int(sent_by[i])
            most = min(most, float(g[i, k]))
            i = int(taken_from[k])
            path.append((i, k))
        most = min(most, float(left[i]), *(float(room[at] - g[at]) for at in path))
        for step, at in enumerate(path):
            g[at] += most
            if step:
                # the sender of the step before takes back what this one brings instead
                g[path[step - 1][0], at[1]] -= most
        left[i] -= most
        short[j] -= most
    return True


def _cuts(g: Floats, left: Floats, short: Floats, room: Floats) -> list[tuple[Index, Index]]:
    """The minimum cuts of a maximum flow: from what the suppliers reach, and what reaches needs."""
    forward, backward = room - g > EMPTY, g > EMPTY
    senders: NDArray[np.bool_] = left > EMPTY
    while True:
        got = forward[senders].any(axis=0)
        more = np.logical_or(senders, backward[:, got].any(axis=1))
        if (more == senders).all():
            break
        senders = more
    cuts = [(np.flatnonzero(senders), np.flatnonzero(~got))]
    needs: NDArray[np.bool_] = short > UNMET
    while True:
        able = forward[:, needs].any(axis=1)
        more = np.logical_or(needs, backward[able].any(axis=0))
        if (more == needs).all():
            break
        needs = more
    other = np.flatnonzero(~able), np.flatnonzero(needs)
    if not all(np.array_equal(x, y) for x, y in zip(cuts[0], other, strict=True)):
        cuts.append(other)
    return cuts


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
