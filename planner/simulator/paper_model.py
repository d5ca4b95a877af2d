"""Averaging after the pipeline part, timed by eq. 2 of DT-FM."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.network.pair_table import PairTable
from planner.simulator.timeline import Op, sorted_ops
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan
from planner.workload.workload import Workload

Floats = NDArray[np.float64]


def averaging_s(plan: TrainingPlan, cluster: Cluster, workload: Workload) -> dict[int, float]:
    """Seconds of averaging per stage: eq. 2 of DT-FM with asymmetric links.

    First each contributor sends every member the share that the member reduces; then each member
    sends its result to all others but aggregators. A device sends one message at a time.

    Returns
    -------
    dict[int, float]
        Seconds by stage, including a matrix that two stages share.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 2.
    """
    bandwidth = cluster.limited_network().bandwidth_table
    latency = cluster.network.latency_table
    gradient = plan.vector_bytes(workload)
    seconds: dict[int, float] = {}
    for stage, rounds in enumerate(plan.averaging):
        size = gradient[stage]
        seconds[stage] = sum(
            max(_group_s(g, size, plan.codec, latency, bandwidth) for g in groups)
            for groups in rounds
        )
    if plan.averages_tied:
        tied = seconds.pop(len(plan.stage_layers))
        seconds[0] += tied
        seconds[plan.head_stage] += tied
    return seconds


def _group_s(
    group: AveragingGroup,
    gradient_bytes: float,
    codec: Codec,
    latency: PairTable,
    bandwidth: PairTable,
) -> float:
    pick = np.ix_(group.members, group.members)
    share = np.array(group.shares) * group.width * group.wire_ratio(codec)
    gives, gets = np.array(group.sends_contributions), np.array(group.receives_sums)
    off = ~np.eye(len(share), dtype=bool)
    # [i, k]: member i sends member k the share that k sums
    to_reducer = latency[pick] + share[None, :] * gradient_bytes / bandwidth[pick]
    to_reducer = np.where(off & gives[:, None] & (share > 0)[None, :], to_reducer, 0.0)
    # [k, j]: reducer k returns its share to member j
    from_reducer = latency[pick] + share[:, None] * gradient_bytes / bandwidth[pick]
    from_reducer = np.where(off & gets[None, :] & (share > 0)[:, None], from_reducer, 0.0)
    return sum(
        float(max(phase.sum(axis=0).max(), phase.sum(axis=1).max()))
        for phase in (to_reducer, from_reducer)
    )


def closing_ops(plan: TrainingPlan, seconds: dict[int, float], start_s: float) -> tuple[Op, ...]:
    """Averaging and updates after the pipeline part.

    Returns
    -------
    tuple[Op, ...]
        Operations A and U of every device.
    """
    ops = []
    longest = max(seconds.values(), default=0.0)
    aggregators: dict[int, list[int]] = {}
    for d, stage in plan.averages_for.items():
        aggregators.setdefault(stage, []).append(d)
    for stage, group in enumerate(plan.assignment.groups):
        for d in (*group, *aggregators.get(stage, ())):
            if seconds[stage] > 0:
                ops.append(Op(-1, d, "A", start_s, start_s + seconds[stage]))
            update = plan.compute_times.update_s[d]
            if update > 0:
                ops.append(Op(-1, d, "U", start_s + longest, start_s + longest + update))
    return sorted_ops(ops)
