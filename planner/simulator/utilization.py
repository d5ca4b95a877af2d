"""Busy share of time bins, drawn instead of operations that would be too narrow."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Span = tuple[float, float]
"""Start and end, seconds."""


def busy_share(spans: Sequence[Span], edges: Floats) -> Floats:
    """The share of each bin that spans cover; overlaps count more than once.

    Parameters
    ----------
    edges
        ``float[n + 1]``, ascending.

    Returns
    -------
    ndarray
        ``float[n]``, 0 to 1 where spans do not overlap.
    """
    if not spans:
        return np.zeros(len(edges) - 1)
    starts, ends = np.sort(np.array(spans, dtype=np.float64), axis=0).T

    def elapsed(since: Floats) -> Floats:
        """Sum over the times before each edge of the seconds since then."""
        count = np.asarray(np.searchsorted(since, edges))
        sums: Floats = np.concatenate([[0.0], np.cumsum(since)])
        return np.asarray(count * edges - sums[count])

    return np.asarray(np.diff(elapsed(starts) - elapsed(ends)) / np.diff(edges))


def too_narrow(spans: Sequence[Span], end_s: float, pixels: int) -> bool:
    """Whether the median span is narrower than two pixels in a picture up to ``end_s``."""
    if not spans:
        return False
    lengths = [stop - start for start, stop in spans]
    return float(np.median(lengths)) * pixels < 2 * end_s
