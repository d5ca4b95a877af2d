"""Seconds of F, H, B and update per device, with their source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner.network.cluster import Cluster
from planner.utils.text import counted, quantity_range
from planner.utils.validate import instance_of, real, reals
from planner.workload.costs import stage_costs
from planner.workload.workload import Workload

FROM_FLOPS = "FLOPs of the workload over FLOP/s of the device"
FIELDS = ("forward_s", "backward_s", "head_s", "update_s")
COSTS = ("operation_s", "message_s")


@dataclass(frozen=True)
class ComputeTimes:
    """Seconds of operations for one microbatch on each device.

    Attributes
    ----------
    source
        Source of the figures.
    forward_s, backward_s
        F and B of the stage that the device holds.
    head_s
        H: forward and backward of head and loss, if this device runs it.
    update_s
        Optimizer step.
    operation_s
        Overhead of every F, H and B, the same for all devices.
    message_s
        Overhead of every pipeline message between the end of its operation and its transfer.
    """

    source: str
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    head_s: tuple[float, ...]
    update_s: tuple[float, ...]
    operation_s: float = 0.0
    message_s: float = 0.0

    def __post_init__(self) -> None:
        instance_of(str, self.source, "source")
        for name in FIELDS:
            object.__setattr__(self, name, reals(f"compute_times.{name}", getattr(self, name), 0))
        for name in COSTS:
            cost = real(f"compute_times.{name}", getattr(self, name), 0)
            object.__setattr__(self, name, cost)

    def __repr__(self) -> str:
        means = (
            f"{name} {quantity_range(getattr(self, name + '_s'), 's')}"
            for name in ("forward", "backward")
        )
        return f"ComputeTimes({counted(len(self.forward_s), 'device')}, {', '.join(means)})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; overheads that are 0 are omitted."""
        data = {"source": self.source, **{name: list(getattr(self, name)) for name in FIELDS}}
        return data | {name: cost for name in COSTS if (cost := getattr(self, name)) != 0.0}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ComputeTimes:
        """Inverse of `to_dict`."""
        costs = {name: data.get(name, 0.0) for name in COSTS}
        return cls(source=data["source"], **{name: data[name] for name in FIELDS}, **costs)

    @classmethod
    def from_flops(
        cls,
        cluster: Cluster,
        workload: Workload,
        groups: Sequence[Sequence[int]],
        layers: Sequence[tuple[int, int]],
        recompute: Sequence[int] = (),
    ) -> ComputeTimes:
        """FLOPs of each stage over the FLOP/s of its devices; updates take no time."""
        n = len(cluster)
        forward, backward, head = [0.0] * n, [0.0] * n, [0.0] * n
        recomputed = recompute or (0,) * len(groups)
        for group, span, count in zip(groups, layers, recomputed, strict=True):
            costs = stage_costs(workload, *span, with_head=True, recomputed=count)
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
