"""Shares of the vector as whole numbers of elements, for solvers and executor alike."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Range = tuple[int, int]

LARGEST = 1e300
"""Larger numbers could overflow in their sum."""


def integer_parts(
    shares: ArrayLike, length: int, min_part: int = 1, method: str = "largest_remainder"
) -> NDArray[np.int64]:
    """Elements of the vector per reducer: close to ``shares * length``, summing to ``length``.

    Parameters
    ----------
    shares
        Fractions of the vector (eq. 6), ``>= 0`` with a positive sum; only their ratios count.
    length
        Elements of the vector.
    min_part
        A part is empty or has at least this many elements (a smaller one costs a message for
        nothing). Where one has fewer, the smallest shares are dropped until none has.
    method
        ``"largest_remainder"`` (Hamilton; each part within 1 of its quota) or
        ``"hagenbach_bischoff"`` (highest averages, as hivemind divides).

    Returns
    -------
    ndarray
        ``int64[n]``. Ties go to the smaller index.
    """
    weights = np.array(shares, dtype=np.float64)
    if weights.ndim != 1 or not (np.isfinite(weights) & (weights >= 0)).all() or not weights.any():
        raise ValueError(
            "shares must be a list of numbers >= 0 with a positive sum, found "
            f"{weights.tolist()}; a plan that averages nothing has no parts"
        )
    if not all(isinstance(x, (int, np.integer)) and x >= 1 for x in (length, min_part)):
        raise ValueError(
            f"length and min_part must be whole numbers >= 1, found {length!r} and {min_part!r}"
        )
    if weights.max() > LARGEST:
        weights /= weights.max()
    divide = _METHODS.get(method)
    if divide is None:
        raise ValueError(f"no method {method!r}; there are {', '.join(_METHODS)}")
    while True:
        parts = divide(weights / weights.sum(), length)
        if not ((parts > 0) & (parts < min_part)).any() or int((weights > 0).sum()) == 1:
            return parts
        small = np.flatnonzero((weights > 0) & (parts < min_part))
        # of equally small shares the later one goes
        weights[max(small, key=lambda i: (-weights[i], i))] = 0.0


def share_ranges(length: int, shares: ArrayLike) -> list[Range]:
    """Consecutive slices ``(start, stop)`` of a vector, one for each share, that cover it.

    Their lengths are `integer_parts`, so each is within one element of its share.
    """
    if length == 0:
        return [(0, 0)] * len(np.atleast_1d(shares))
    ends = [0, *np.cumsum(integer_parts(shares, length)).tolist()]
    return list(pairwise(ends))


def _largest_remainder(shares: Floats, length: int) -> NDArray[np.int64]:
    quota = shares * length
    parts = np.floor(quota).astype(np.int64)
    missing = length - int(parts.sum())
    order = np.lexsort((np.arange(len(parts)), -(quota - parts), shares == 0))
    parts[order[:missing]] += 1
    return parts


def _hagenbach_bischoff(shares: Floats, length: int) -> NDArray[np.int64]:
    """Quota floor(share (length + 1)), then one seat at a time to the highest average."""
    parts = np.floor(shares * (length + 1)).astype(np.int64)
    # rounding can hand out one too many when every quota is whole
    while parts.sum() > length:
        parts[int(np.argmin(np.where(parts > 0, shares / np.maximum(parts, 1), np.inf)))] -= 1
    for _ in range(length - int(parts.sum())):
        parts[int(np.argmax(shares / (parts + 1)))] += 1
    return parts


_METHODS: dict[str, Callable[[Floats, int], NDArray[np.int64]]] = {
    "largest_remainder": _largest_remainder,
    "hagenbach_bischoff": _hagenbach_bischoff,
}
