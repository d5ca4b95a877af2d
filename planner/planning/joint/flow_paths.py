"""Paths that follow a flow: every device forwards microbatches in fixed proportions, interleaved.

The weighted round robin of S. Ryabinin et al., "SWARM Parallelism" (2023), Algorithm 1, carried out
in advance, with proportions from a linear program instead of response times.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.search.arrays import Floats, Floats2, Floats3, Ints, Ints2
from planner.search.compiled import allocating_entry

MIN_FRACTION = 1e-9


def interleaved_paths(
    groups: Sequence[Sequence[int]], starts: Floats, edges: Sequence[Floats], microbatches: int
) -> tuple[tuple[int, ...], ...]:
    """One path per microbatch, such that every run of microbatches follows the proportions.

    Parameters
    ----------
    starts
        ``float[len(groups[0])]``: fraction of the microbatches that start on each device.
    edges
        Per boundary, ``float[devices before, devices after]``: fraction over each pair.

    Returns
    -------
    tuple[tuple[int, ...], ...]
        Devices of every path.
    """
    sizes = np.array([len(group) for group in groups], dtype=np.int64)
    pair_fraction = np.zeros((len(edges), sizes.max(), sizes.max()))
    device_fraction = np.zeros((len(edges), sizes.max()))
    for j, fractions in enumerate(edges):
        before, after = fractions.shape
        pair_fraction[j, :before, :after] = fractions / np.maximum(
            fractions.sum(axis=1, keepdims=True), MIN_FRACTION
        )
        device_fraction[j, :after] = fractions.sum(axis=0) / fractions.sum()
    chosen = np.zeros((microbatches, len(groups)), dtype=np.int64)
    _interleave(starts / starts.sum(), pair_fraction, device_fraction, sizes, chosen)
    columns = [np.array(group)[chosen[:, j]].tolist() for j, group in enumerate(groups)]
    return tuple(zip(*columns, strict=True))


@allocating_entry
def _interleave(
    start_fraction: Floats,
    pair_fraction: Floats3,
    device_fraction: Floats2,
    sizes: Ints,
    chosen: Ints2,
) -> None:
    """Fill ``int[M, S]`` with the index of each microbatch's device in each group."""
    start_deficit = np.zeros(len(start_fraction))
    # deficit of each pair, and of each device after a boundary
    pair_deficit, device_deficit = np.zeros_like(pair_fraction), np.zeros_like(device_fraction)
    for b in range(len(chosen)):
        start_deficit += start_fraction
        i = int(np.argmax(start_deficit))
        start_deficit[i] -= 1.0
        chosen[b, 0] = i
        for j in range(len(pair_fraction)):
            chosen_device, best_score = 0, -np.inf
            for k in range(sizes[j + 1]):
                device_deficit[j, k] += device_fraction[j, k]
                fraction = pair_fraction[j, i, k]
                pair_deficit[j, i, k] += fraction
                score = pair_deficit[j, i, k] + device_deficit[j, k]
                if fraction > MIN_FRACTION and score > best_score:
                    chosen_device, best_score = k, score
            pair_deficit[j, i, chosen_device] -= 1.0
            device_deficit[j, chosen_device] -= 1.0
            i = chosen_device
            chosen[b, j + 1] = i
