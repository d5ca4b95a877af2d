"""LP (5) by sums: n variables in place of each n^2 that only matter added up.

What peer i returns to j, g_ij, and what k sends to reducer i, a_ki, enter the limits of upload and
download through their sums alone. So there are two savings, each checked and mended afterwards.

The returns. G_i is all that peer i returns, D_j all that peer j receives, with
``G_i <= (n - 1) q_i`` and ``D_j <= sum_{i != j} q_i``: a relaxation of LP (5). A transportation
problem then looks for g_ij with these sums, within q_i and within what the links leave beside a_ij.
If there is none, its minimum cuts, which LP (5) obeys and this solution does not, become rows, and
the programme is solved again.

The contributions. Eq. 4 asks for ``a_ki >= q_i - (1 - c_k) M_i`` and ``a_ki >= 0``. Which of the
two is larger is known for most peers: the first if c_k = 1, the second if c_k = 0. So every sender
starts with a bound in place of its variables, and gets variables only if the solution shows that
its bound was too low.

Rows are only ever left out, so the value stays an upper bound; a solution that breaks none of those
left out is an optimum of LP (5).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.lp.lp5_rows import (
    Floats,
    Index,
    RelaxedSolution,
    Rows,
    Scaled,
    eq4_rows,
    solution_of,
    upper_bounds,
)
from planner.lp.transport import transport

TIGHT = 1e-9
"""Scaled rates closer than this are equal."""
ROUNDS = 8
"""Programmes solved before `planner.lp.lp5` takes the full form."""
NEARLY = 1.01
"""Downloads up to this many times their limit hardly bind; decides about time only."""


def solve_by_sums(s: Scaled) -> RelaxedSolution | None:
    """The aggregated form and its cuts; None if they do not settle within `ROUNDS` of them."""
    form = FormBySums(s)
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
            return solution_of(s, z[0], q, c, a, g)
        by_link = left < q[:, None]
        for cut in cuts:
            form.cut(*cut, by_link)
        # a bound below a_ij would leave the solution on the right side of the cut
        form.widen(np.any(form.thin & (a > _lower(s, z) + TIGHT), axis=1))
    return None


class FormBySums:
    """The aggregated form. Columns xi, q, c, G, D, a_k of the senders k in ``whole``, then w.

    A cut (S, J) reads ``D(J) <= G(outside S) + sum over S x J of w_ij`` with ``w_ij <= q_i`` and
    ``w_ij <= t_ij - a_ij``, the room of a pair. Only pairs in ``thin``, whose link was the narrower
    of the two in some cut, have a variable; q_i, which is no less, stands for the others.
    """

    def __init__(self, s: Scaled) -> None:
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
        """Add (S, J); ``by_link`` says for which pairs the link is the narrower limit.

        Parameters
        ----------
        by_link
            ``bool[n, n]``.
        """
        self.cuts.append((suppliers, receivers))
        pairs = np.ix_(suppliers, receivers)
        self.thin[pairs] |= by_link[pairs]
        np.fill_diagonal(self.thin, False)

    def _without_cuts(self) -> tuple[Rows, Floats]:
        """Rows and upper bounds of all columns but w."""
        s, whole, back, got, a0 = self.s, self.whole, self.back, self.got, self.a0
        n, able = s.n, s.problem.contributors
        off_diagonal = ~np.eye(n, dtype=bool)
        source, target = np.nonzero(off_diagonal & whole[:, None])
        m = np.arange(len(source))
        rows = Rows()
        eq4_rows(rows, s, a0, source, target)
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
        upper = upper_bounds(s, a0 + len(m), [s.q[off], back[off]])
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


def _lower(s: Scaled, z: Floats) -> Floats:
    """What stands for a_ki where it is no variable."""
    bound = z[s.q][None, :] - (1 - np.minimum(z[s.c], 1.0))[:, None] * s.big[None, :]
    bound[~s.problem.contributors] = 0.0
    return bound


def _too_low(s: Scaled, z: Floats, a: Floats, whole: NDArray[np.bool_]) -> NDArray[np.bool_]:
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


def _least_senders(s: Scaled, q: Floats, c: Floats) -> Floats:
    """a_ki = max(0, q_i - (1 - c_k) M_i), the least that eq. 4 asks for."""
    a = np.maximum(q[None, :] - (1 - c)[:, None] * s.big[None, :], 0.0)
    a[a <= TIGHT] = 0.0
    np.fill_diagonal(a, 0.0)
    return a
