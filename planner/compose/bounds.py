"""A lower bound on the step time of any placement with given stages and pipelines.

It holds for every straight schedule, whatever the assignment and the order of operations, under
the simulator's default rules (transfers do not slow each other down).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from planner.network.cluster import Cluster
from planner.workload.workload import BACKWARD_TO_FORWARD, Workload

ROUNDING = 1 - 1e-9
"""Sums of floats may come out too high by far less than this."""


def step_bound_s(
    cluster: Cluster,
    workload: Workload,
    layers: Sequence[tuple[int, int]],
    pipelines: int,
    microbatches: int,
    head: str = "last",
    *,
    equal_shares: bool = True,
) -> float:
    """Seconds that no placement can beat, compute times by FLOPs.

    The pipeline part: some pipeline gets ``ceil(M / pipelines)`` microbatches. Each stage's device
    must receive its first one through all stages before it, do all of them, and return the last
    one through the same stages. Averaging: every device exchanges its share of eq. 2 with
    ``pipelines - 1`` others, at best its nearest ones; without ``equal_shares`` in one round of
    full precision it is bounded by 0.
    """
    samples = workload.microbatch_samples
    fastest = float(cluster.flops.max())
    loads = [workload.stage(*part) for part in layers]
    forward = [load.forward_flops * samples / fastest for load in loads]
    backward = [BACKWARD_TO_FORWARD * seconds for seconds in forward]
    last = (1 + BACKWARD_TO_FORWARD) * workload.head.forward_flops * samples / fastest
    heads = [0.0] * len(layers)
    heads[-1 if head == "last" else 0] = last
    mean = cluster.network.symmetrised()
    off = ~np.eye(len(cluster), dtype=bool)
    # a hop goes there and back once, so twice the mean of both directions bounds the pair
    hops = [
        2 * float(mean.transfer_s(load.output_bytes * samples)[off].min()) for load in loads[:-1]
    ]
    count = -(-microbatches // pipelines)
    pipeline = max(
        sum(forward[:j])
        + sum(hops[:j])
        + sum(backward[:j])
        + count * (forward[j] + heads[j] + backward[j])
        for j in range(len(layers))
    )
    averaging = (
        _averaging_bound_s(cluster, workload, layers, pipelines, head) if equal_shares else 0.0
    )
    return (pipeline + averaging) * ROUNDING


def _averaging_bound_s(
    cluster: Cluster,
    workload: Workload,
    layers: Sequence[tuple[int, int]],
    pipelines: int,
    head: str,
) -> float:
    if pipelines == 1:
        return 0.0
    gradient = min(workload.gradient_bytes(layers, len(layers) - 1 if head == "last" else 0))
    pair = 2 * cluster.network.symmetrised().transfer_s(gradient / pipelines)
    np.fill_diagonal(pair, np.inf)
    nearest = np.sort(pair, axis=1)[:, : pipelines - 1]
    return float(nearest.sum(axis=1).max())
