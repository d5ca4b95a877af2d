"""Paths that follow a flow: every device hands microbatches on in fixed proportions, evenly mixed.

After S. Ryabinin et al., "SWARM Parallelism" (2023), Algorithm 1, whose weighted round robin the
plan carries out in advance: with proportions from a linear programme instead of response times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
TINY = 1e-9


def mixed_paths(
    groups: Sequence[Sequence[int]], starts: Floats, edges: Sequence[Floats], microbatches: int
) -> tuple[tuple[int, ...], ...]:
    """One path a microbatch, so that every edge gets its part in every stretch of them.

    Parameters
    ----------
    groups
        Devices of every stage.
    starts
        ``float[len(groups[0])]``: part of the microbatches that begin on each device.
    edges
        Per boundary, ``float[devices before, devices after]``: part over each pair.
    microbatches
        How many paths.

    Returns
    -------
    tuple[tuple[int, ...], ...]
        Devices of every path.
    """
    begin = starts / starts.sum()
    owed = np.zeros(len(begin))
    onward = [part / np.maximum(part.sum(axis=1, keepdims=True), TINY) for part in edges]
    arriving = [part.sum(axis=0) / part.sum() for part in edges]
    # what each pair, and each device after a boundary, has had too little of so far
    pair_owed = [np.zeros_like(part) for part in edges]
    device_owed = [np.zeros(part.shape[1]) for part in edges]
    paths = []
    for _ in range(microbatches):
        owed += begin
        i = int(np.argmax(owed))
        owed[i] -= 1.0
        path = [groups[0][i]]
        for j, part in enumerate(onward):
            pair_owed[j][i] += part[i]
            device_owed[j] += arriving[j]
            score = np.where(part[i] > TINY, pair_owed[j][i] + device_owed[j], -np.inf)
            k = int(np.argmax(score))
            pair_owed[j][i, k] -= 1.0
            device_owed[j][k] -= 1.0
            path.append(groups[j + 1][k])
            i = k
        paths.append(tuple(path))
    return tuple(paths)
