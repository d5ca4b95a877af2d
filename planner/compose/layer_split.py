"""Layers over stages where either differ: the slowest stage as fast as can be, memory kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

from planner.network.cluster import Cluster
from planner.problems import ProblemError
from planner.workload.costs import stage_costs
from planner.workload.workload import Workload


def is_uniform(cluster: Cluster, workload: Workload) -> bool:
    """Whether all devices and all layers are alike: then layers are cut evenly.

    Parameters
    ----------
    cluster
        N devices.
    workload
        What is trained.

    Returns
    -------
    bool
        Whether each device computes and holds the same, and each layer asks for the same.
    """
    layers = {(x.parameters, x.forward_flops, x.saved_bytes) for x in workload.layers}
    devices = set(zip(cluster.flops.tolist(), cluster.memory_bytes.tolist(), strict=True))
    return len(layers) == 1 and len(devices) == 1


def balanced_split(
    cluster: Cluster,
    workload: Workload,
    groups: Sequence[Sequence[int]],
    head_stage: int,
    recompute: Sequence[bool] = (),
) -> tuple[tuple[int, int], ...]:
    """Contiguous layer ranges that minimise the largest stage time (exact, dynamic programme).

    A stage takes its FLOPs, with the head's where it runs, over its group's slowest device. Of
    equally good splits, the one whose stage times have the smallest sum of squares.

    Parameters
    ----------
    cluster
        N devices.
    workload
        What is trained.
    groups
        Devices of every stage.
    head_stage
        The stage that runs head and loss.
    recompute
        Per stage, whether it recomputes its activations; empty: none does.

    Returns
    -------
    tuple[tuple[int, int], ...]
        ``(start, stop)`` of every stage.

    Raises
    ------
    ProblemError
        No split fits the devices' memory.
    """
    layers, stages = len(workload.layers), len(groups)
    if stages > layers:
        raise ProblemError(
            f"{workload.name} has {layers} layers for {stages} stages; ask for fewer stages"
        )
    again = recompute or (False,) * stages
    speed = [min(float(cluster.flops[d]) for d in group) for group in groups]
    memory = [min(float(cluster.memory_bytes[d]) for d in group) for group in groups]

    def seconds(j: int, start: int, stop: int) -> float:
        """Time of one microbatch through a stage, infinite if memory cannot hold it."""
        costs = stage_costs(workload, start, stop, with_head=j == head_stage, recompute=again[j])
        return math.inf if costs.need_bytes(1) > memory[j] else costs.busy_s(speed[j])

    cuts = least_largest(stages, layers, seconds)
    if cuts is None:
        raise ProblemError(
            f"no split of {layers} layers over {stages} stages fits the devices' memory, the "
            f"smallest of which have {min(memory) / 1e9:.2f} GB; use more stages or larger devices"
        )
    return cuts


def least_largest(
    stages: int, layers: int, seconds: Callable[[int, int, int], float]
) -> tuple[tuple[int, int], ...] | None:
    """Contiguous ranges whose largest time is least, then the sum of their squares; exact.

    Parameters
    ----------
    stages
        S.
    layers
        To be cut into as many ranges.
    seconds
        Of a stage with the layers ``start`` to ``stop - 1``, all three given; infinite where it
        may not have these.

    Returns
    -------
    tuple[tuple[int, int], ...] or None
        ``(start, stop)`` of every stage; None where there are none.
    """
    # best[stop]: (largest time, sum of squares, cuts) of the stages so far over layers[:stop]
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for j in range(stages):
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for start, (largest, squares, cuts) in best.items():
            for stop in range(start + 1, layers - (stages - 1 - j) + 1):
                own = seconds(j, start, stop)
                if math.isinf(own):
                    continue
                found = (max(largest, own), squares + own * own, (*cuts, stop))
                if stop not in after or found < after[stop]:
                    after[stop] = found
        best = after
    return tuple(pairwise(best[layers][2])) if layers in best else None
