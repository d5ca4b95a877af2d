"""Clusters whose devices have measured FLOP/s.

Searches and bounds use the FLOP/s of a device, not times of single operations; plans are evaluated
with the measured times.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.workload.calibration import Calibration
from planner.workload.costs import stage_costs
from planner.workload.workload import Workload

ALIKE = 1.03
"""Devices of one kind whose measured speed differs by less are treated as equal: measurements
jitter, and equal devices form one class."""


def calibrated(cluster: Cluster, workload: Workload, calibration: Calibration) -> Cluster:
    """Devices with the FLOP/s measured over forward and backward passes."""
    stated, able = cluster.flops, np.asarray(cluster.devices.can_compute)
    speed = stated.copy()
    for d in np.flatnonzero(able).tolist():
        speed[d] = calibration.speed(cluster.network.ids[d], workload)
    slowest_first = [d for d in np.lexsort((speed, stated)).tolist() if able[d]]
    kinds: list[list[int]] = []
    for d in slowest_first:
        first = kinds[-1][0] if kinds else d
        if kinds and stated[d] == stated[first] and speed[d] <= ALIKE * speed[first]:
            kinds[-1].append(d)
        else:
            kinds.append([d])
    for kind in kinds:
        speed[kind] = 1 / np.mean(1 / speed[kind])
    return _with_flops(cluster, speed)


def fastest_measured(
    cluster: Cluster, workload: Workload, calibration: Calibration | None
) -> Cluster:
    """Devices with the highest FLOP/s measured in any operation, for bounds."""
    if calibration is None:
        return cluster
    samples = calibration.microbatch_samples / workload.microbatch_samples
    speed = np.empty(len(cluster))
    for d, name in enumerate(cluster.network.ids):
        costs = stage_costs(workload, *calibration.layers[name], with_head=True)
        times = calibration.times[name]
        operations = (
            (costs.forward_flops, times["forward_s"]),
            (costs.backward_flops, times["backward_s"]),
            (costs.head_flops, times["head_s"]),
        )
        # a head that was not measured is assumed to be as fast as F and B
        speed[d] = max(flops * samples / seconds for flops, seconds in operations if seconds > 0)
    return _with_flops(cluster, speed)


def _with_flops(cluster: Cluster, flops: NDArray[np.float64]) -> Cluster:
    return cluster.replace(devices=replace(cluster.devices, flops=flops))
