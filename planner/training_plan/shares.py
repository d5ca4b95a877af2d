"""Shares of a vector as whole numbers of elements."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.utils.validate import count

Range = tuple[int, int]

LARGEST = 1e300
"""Larger numbers might overflow when summed."""


def shares_of(rates: ArrayLike) -> tuple[float, ...]:
    """Fractions of the vector that sum to 1 (eq. 6).

    Parameters
    ----------
    rates
        ``float[n]``, ``>= 0`` with a positive sum; only ratios matter.

    Returns
    -------
    tuple of float
        Rounding is absorbed by the largest.
    """
    shares = np.asarray(rates, dtype=np.float64)
    shares = shares / shares.sum()
    shares[np.argmax(shares)] += 1.0 - shares.sum()
    return tuple(shares.tolist())


def integer_parts(shares: ArrayLike, length: int) -> NDArray[np.int64]:
    """Elements of the vector per reducer: close to ``shares * length``, summing to ``length``.

    The method of largest remainders (Hamilton): each part is within 1 of its quota.

    Returns
    -------
    ndarray
        ``int64[n]``. Ties go to the smaller index.

    References
    ----------
    M. Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC, 2021), eq. 6.
    """
    weights = np.array(shares, dtype=np.float64)
    if weights.ndim != 1 or not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
        raise ValueError(
            "shares must be a list of numbers >= 0 with a positive sum, found "
            f"{weights.tolist()}; a plan that averages nothing has no parts"
        )
    length = count("length", length)
    if weights.max() > LARGEST:
        weights /= weights.max()
    fractions = weights / weights.sum()
    quota = fractions * length
    counts: NDArray[np.int64] = np.floor(quota).astype(np.int64)
    missing = length - int(counts.sum())
    order = np.lexsort((np.arange(len(counts)), -(quota - counts), fractions == 0))
    counts[order[:missing]] += 1
    return counts


def share_ranges(length: int, shares: ArrayLike) -> list[Range]:
    """Consecutive slices ``(start, stop)`` of a vector, one per share, that cover it.

    Their lengths are `integer_parts`.
    """
    if length == 0:
        return [(0, 0)] * len(np.atleast_1d(shares))
    ends = [0, *np.cumsum(integer_parts(shares, length)).tolist()]
    return list(pairwise(ends))


def fraction_ends(part: tuple[float, float], shares: ArrayLike) -> list[float]:
    """Boundaries of the shares of a part of a vector.

    Equal shares give equal numbers in all groups, with or without members whose share is 0.
    """
    start, stop = part
    weights = np.asarray(shares, dtype=np.float64)
    ends = start + (stop - start) * np.concatenate([[0.0], weights.cumsum()])
    # the last share takes the rest
    last = int(np.flatnonzero(weights)[-1])
    ends[last + 1 :] = stop
    return list(np.minimum(ends, stop).tolist())


def slice_ranges(length: int, part: tuple[float, float], shares: ArrayLike) -> list[Range]:
    """Slices of elements; each boundary is rounded by itself, so that equal ones stay equal."""
    return list(pairwise(round(end * length) for end in fraction_ends(part, shares)))
