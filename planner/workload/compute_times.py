"""Seconds of F, H, B and update per device, and where they come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.network.cluster import Cluster
from planner.workload.costs import stage_costs
from planner.workload.workload import Workload

FROM_FLOPS = "FLOPs of the workload over FLOP/s of the device"
FIELDS = ("forward_s", "backward_s", "head_s", "update_s")


@dataclass(frozen=True)
class ComputeTimes:
    """Seconds for one microbatch on each device, and where they come from.

    Attributes
    ----------
    source
        Where the seconds come from.
    forward_s, backward_s
        F and B of the stage that the device holds.
    head_s
        H, head and loss with their own backward pass, if this device runs it.
    update_s
        The optimizer step, once an iteration.
    """

    source: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    head_s: tuple[float, ...]
    update_s: tuple[float, ...]

    @classmethod
    def from_flops(
        cls,
        cluster: Cluster,
        workload: Workload,
        groups: Sequence[Sequence[int]],
        layers: Sequence[tuple[int, int]],
    ) -> ComputeTimes:
        """FLOPs of each stage over the FLOP/s of its devices; updates are taken as free.

        Parameters
        ----------
        cluster
            N devices.
        workload
            What is trained.
        groups, layers
            Per stage, its devices and its layers ``(start, stop)``.

        Returns
        -------
        ComputeTimes
            Tuples of N seconds; 0 where a device holds no stage.
        """
        n = len(cluster)
        forward, backward, head = [0.0] * n, [0.0] * n, [0.0] * n
        for group, part in zip(groups, layers, strict=True):
            costs = stage_costs(workload, *part, with_head=True)
            for d in group:
                flops = float(cluster.flops[d])
                forward[d], backward[d] = costs.forward_s(flops), costs.backward_s(flops)
                head[d] = costs.head_s(flops)
        return cls(
            FROM_FLOPS,
            tuple(forward),
            tuple(backward),
            tuple(head),
            (0.0,) * n,
        )
