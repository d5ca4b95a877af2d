"""Two-frequency averaging: gradients within regions in every step, parameters between them every H.

All devices of a region stay equal, so nothing is reduced before regions exchange. The k-th device
of every region averages the k-th slice with its counterparts, and sends the result to its region.
All regions have as many such devices as the smallest region can have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from planner.network.cluster import Cluster
from planner.training_plan.averaging_group import AveragingGroup, StageAveraging
from planner.training_plan.choices import Codec, Phase
from planner.training_plan.slice_owners import exchanged, slice_owners


def two_frequency_rounds(
    cluster: Cluster,
    group: Sequence[int],
    make: Callable[[tuple[int, ...], float], AveragingGroup],
    vector_bytes: float,
    codec: Codec,
) -> StageAveraging:
    """Rounds of one stage: within regions, between them, and back."""
    devices_in: dict[str, list[int]] = {}
    for d in group:
        devices_in.setdefault(cluster.network.regions[d], []).append(d)
    every_step = tuple(
        replace(make(tuple(members), vector_bytes), phase=Phase.WITHIN)
        for members in devices_in.values()
    )
    if len(devices_in) == 1:
        return (every_step,)
    owners, spread = slice_owners(cluster, list(devices_in.values()))
    size = vector_bytes * codec.wire_ratio / len(owners[0])
    return every_step, exchanged(owners, lambda members: make(members, size)), spread
