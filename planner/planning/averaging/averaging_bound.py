"""Lower bounds on averaging time, whatever the groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster, device_limits

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class AveragingBound:
    """Lower bounds on one round over all devices of a stage, in seconds.

    Attributes
    ----------
    device_s
        ``float[stages, N]``: for groups of the stage that contain the device.
    stage_s
        ``float[stages]``: for any group of the stage.
    """

    device_s: Floats
    stage_s: Floats


def averaging_bound(
    cluster: Cluster,
    sizes: Sequence[int],
    vector_bytes: Sequence[float],
    *,
    equal_shares: bool,
    has_aggregators: bool = False,
) -> AveragingBound:
    """Bounds for one round per stage to which every device contributes.

    In a group of m, a member sends m - 1 others their shares and returns its own to them. With
    equal shares every pair carries 2/m of the vector, so the pair with the (m-1)-nearest partner
    does. With any shares, what a member sends, (1 - s) + s (m - 1) of the vector, is at least the
    vector, and so is what it receives. Aggregators may be near and have fast pairs, so no pair
    limits then.
    """
    n = len(cluster)
    up, down = device_limits(cluster)
    latency, bandwidth = cluster.network.latency_table, cluster.network.bandwidth_table
    # devices of a class have the same links: one row for each class
    first, class_of = latency.first, latency.class_of
    rows = np.ix_(first, np.arange(n))
    off = rows[0] != rows[1]
    rtt_s = np.sort(np.where(off, latency[rows] + latency.T[rows], np.inf), axis=1)
    best_out = -np.sort(-np.where(off, bandwidth[rows], 0.0), axis=1)
    best_in = -np.sort(-np.where(off, bandwidth.T[rows], 0.0), axis=1)
    device_s = np.zeros((len(sizes), n))
    stage_s = np.zeros(len(sizes))
    for j, (m, vector) in enumerate(zip(sizes, vector_bytes, strict=True)):
        if m == 1:
            continue
        if has_aggregators:
            device_s[j] = vector / np.minimum(up, down)
        elif equal_shares:
            pair = np.minimum(best_out[:, m - 2], best_in[:, m - 2])[class_of]
            line = np.minimum(up, down)
            fullest = np.maximum(2 * vector / m / pair, 2 * (m - 1) / m * vector / line)
            device_s[j] = fullest + rtt_s[class_of, m - 2]
        else:
            max_line_rate = np.minimum(
                np.minimum(up, best_out[:, : m - 1].sum(axis=1)[class_of]),
                np.minimum(down, best_in[:, : m - 1].sum(axis=1)[class_of]),
            )
            # at least one pair with a reducer is used: one device may be the only reducer
            device_s[j] = vector / max_line_rate + rtt_s[class_of, 0]
        # a group of m has a member at least as slow as the m-th fastest device
        stage_s[j] = np.sort(device_s[j])[m - 1]
    return AveragingBound(device_s, stage_s)
