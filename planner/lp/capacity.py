"""Maximum total rate for given contributors, without pair limits between two rates.

For contributors K with k = |K| and a total rate R, reducer i is capped by

    (u_i - c_i R) / (n - 1 - c_i)        its upload,
    (d_i - R) / (k - c_i - 1)            its download,
    min_{j != i} t_ij                    g_ij = r_i alone must fit through each link,
    R                                    its share is at most the whole vector,

and R is attainable if and only if every numerator is >= 0 and the caps sum to at least R. Each cap
is concave and piecewise linear in R, hence so is their sum minus R: Newton's method from above
never undershoots the largest root and reaches it after at most as many steps as there are pieces,
without a tolerance.

A single contributor (k = 1) is an exception: if it reduces everything it downloads nothing, so that
its download limit reads ``r_i >= R - d_i`` (the denominator is -1).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.problems import AveragingProblem

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

MIN_RATE = 1e-200
"""Bytes per second; smaller rates count as 0, since dividing by them could overflow."""


class BandwidthLimits:
    """Bandwidth limits of a problem; ``max_reducer_rate`` is the cap of r_i by single links."""

    def __init__(self, problem: AveragingProblem) -> None:
        self.n = len(problem)
        self.problem = problem
        self.upload = problem.upload_bytes_per_s
        self.download = problem.download_bytes_per_s
        self.can_reduce = problem.can_aggregate
        self.links = problem.link_bytes_per_s
        smallest = np.full(self.n, np.inf) if self.links is None else self.links.min(axis=1)
        self.smallest_link = float(smallest.min())
        self.max_reducer_rate = np.where(self.can_reduce, smallest, 0.0)

    def caps(self, computes: Bools, total: Floats) -> tuple[Floats, Floats]:
        """Caps of r_i at the total rate R and their slopes in R, for a batch of contributor sets.

        Parameters
        ----------
        computes
            ``bool[q, n]``, the contributors of each of q sets.
        total
            ``float[q]``, R in bytes per second.

        Returns
        -------
        tuple of ndarray
            ``float[q, n]`` each: bytes per second, and per byte per second of R.
        """
        c = computes.astype(np.float64)
        total_column = total[:, None]
        others = c.sum(axis=1, keepdims=True) - c - 1.0
        returns = self.n - 1.0 - c
        with np.errstate(divide="ignore", invalid="ignore"):
            by_upload = np.where(returns > 0, (self.upload - c * total_column) / returns, np.inf)
            by_download = np.where(others > 0, (self.download - total_column) / others, np.inf)
            up_slope = np.where(returns > 0, -c / returns, 0.0)
            down_slope = np.where(others > 0, -1.0 / others, 0.0)
        cap = np.where(by_upload <= by_download, by_upload, by_download)
        slope = np.where(by_upload <= by_download, up_slope, down_slope)
        slope = np.where(cap <= self.max_reducer_rate, slope, 0.0)
        cap = np.minimum(cap, self.max_reducer_rate)
        slope = np.where(cap <= total_column, slope, 1.0)
        return np.clip(cap, 0.0, total_column), np.where(self.can_reduce, slope, 0.0)

    def max_feasible_rate(self, computes: Bools) -> Floats:
        """``float[q]``: the largest R at which every numerator of `caps` is still >= 0.

        Parameters
        ----------
        computes
            ``bool[q, n]``, the contributors of each of q sets.
        """
        uploads = np.where(computes, self.upload, np.inf).min(axis=1)
        single = (computes.sum(axis=1) == 1)[:, None] & computes & self.can_reduce
        downloads = np.where(single, np.inf, self.download).min(axis=1)
        max_feasible_rate: Floats = np.minimum(uploads, downloads)
        return max_feasible_rate

    def max_total_rate(self, computes: Bools, max_total: float = np.inf) -> Floats:
        """Maximum R of each set of contributors, ignoring pair limits between two rates.

        Parameters
        ----------
        computes
            ``bool[q, n]``; every set holds at least one peer.

        Returns
        -------
        ndarray
            ``float[q]``, bytes per second.
        """
        if self.n == 1:
            return np.full(len(computes), np.inf)
        total = np.minimum(
            np.minimum(self.max_feasible_rate(computes), self._caps_at_zero(computes)), max_total
        )
        active = np.flatnonzero(total > 0)
        while len(active):
            cap, slope = self.caps(computes[active], total[active])
            slack = cap.sum(axis=1) - total[active]
            drop = slope.sum(axis=1) - 1.0
            short = slack < 0
            # concave with value 0 at R = 0: where it is negative it falls, so drop < 0
            step = np.where(short & (drop < 0), slack / np.where(drop < 0, drop, -1.0), 0.0)
            new = np.where(short & (drop >= 0), 0.0, np.maximum(total[active] - step, 0.0))
            moved = short & (new < total[active] * (1 - 1e-15))
            total[active] = np.where(short, new, total[active])
            active = active[moved & (new > 0)]
        total[total < MIN_RATE] = 0.0
        single = np.flatnonzero((computes.sum(axis=1) == 1) & (total > 0))
        for q in single:
            total[q] = self._single_contributor_total(computes[q], float(total[q]))
        return total

    def _caps_at_zero(self, computes: Bools) -> Floats:
        """``float[q]``: the sum of the caps at R = 0, an upper bound on R.

        A cap decreases at most in proportion to ``1 - R / max_feasible_rate``, so that the maximum
        R is at least half of the smaller of this sum and ``max_feasible_rate``. Newton's method,
        started there, loses no precision even if peers differ by orders of magnitude.
        """
        c = computes.astype(np.float64)
        others = c.sum(axis=1, keepdims=True) - c - 1.0
        returns = self.n - 1.0 - c
        with np.errstate(divide="ignore", invalid="ignore"):
            cap = np.where(returns > 0, self.upload / returns, np.inf)
            cap = np.minimum(cap, np.where(others > 0, self.download / others, np.inf))
        total: Floats = np.where(self.can_reduce, np.minimum(cap, self.max_reducer_rate), 0.0).sum(
            axis=1
        )
        return total

    def _single_contributor_total(self, computes: Bools, total: float) -> float:
        """Maximum R of a single contributor, whose download requires r_i >= R - d_i."""
        i = int(np.flatnonzero(computes)[0])
        if not self.can_reduce[i]:
            return total
        cap, _ = self.caps(computes[None, :], np.array([total]))
        if cap[0, i] >= total - self.download[i]:
            return total
        # r_i <= min((u_i - R) / (n - 2), min_j t_ij) and r_i >= R - d_i
        limit = self.download[i] + self.max_reducer_rate[i]
        if self.n > 2:
            limit = min(limit, (self.upload[i] + (self.n - 2) * self.download[i]) / (self.n - 1))
        return float(min(total, limit))


def max_total_rate(problem: AveragingProblem, computes: NDArray[np.bool_]) -> float:
    """Maximum R in bytes per second for given contributors; an upper bound with pair limits.

    Parameters
    ----------
    computes
        ``bool[n]``, the contributors.
    """
    chosen = np.asarray(computes, dtype=bool)[None, :]
    return float(BandwidthLimits(problem).max_total_rate(chosen)[0])
