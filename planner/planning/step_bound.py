"""Lower bounds on the step of a given shape, for every assignment and order of operations.

Compute times follow from FLOPs; updates are free. Let T be the end of a step and j the stage of the
device whose averaging ends then. That device begins its next step at T; with one round over the
whole stage all devices of stage j do, one in every pipeline. What depends on their first operations
follows T. The distance between two ends of steps is at least the minimum over j of what must
follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planner.network.cluster import Cluster, device_limits
from planner.planning.averaging.averaging_bound import AveragingBound, averaging_bound
from planner.planning.partial_paths.cycle_bounds import cycle_bound_s
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanKind, ShareRule
from planner.planning.shape import Shape
from planner.search.certificate import Witness
from planner.training_plan.choices import Codec
from planner.workload.costs import StageCosts


class StepBound(NamedTuple):
    """A lower bound on the time or the cost of a step.

    Attributes
    ----------
    value
        Seconds, or dollars.
    basis
        The argument, in words.
    witness
        What the checker recomputes the bound from; None if it cannot.
    """

    value: float
    basis: str
    witness: Witness | None


def step_bound(problem: PlanningProblem, shape: Shape) -> StepBound | None:
    """A bound for every placement with this shape; None if compute times were measured."""
    request, cluster, workload = problem.request, problem.cluster, problem.workload
    if request.calibration is not None or request.delayed:
        return None
    if request.kind is PlanKind.PARTIAL_PATHS:
        if not problem.ends_together or request.sync_every > 1:
            return None  # a stage's devices do not begin their steps together
        cycle = request.cycle(shape.stages)
        visited = {0: request.path_stages or 0, 1: shape.stages}
        lengths = [visited[k] for k in cycle]
        each = shape.microbatches // shape.pipelines
        averaging = one_round(problem, shape)
        seconds = cycle_bound_s(
            cluster, workload, shape.sizes, each, lengths, averaging, shape.layers, shape.recompute
        )
        basis = "loads and start devices of any arrangement of these stages"
        return StepBound(seconds, basis, None)
    stages: dict[str, Any] = {
        "layers": [list(part) for part in shape.layers],
        "microbatch_samples": workload.microbatch_samples,
    }
    if any(shape.recompute):
        stages["recompute"] = list(map(bool, shape.recompute))
    witness = {"kind": "straight step", "shapes": [stages]}
    seconds = straight_bound_s(problem, shape)
    return StepBound(seconds, "fullest stage, link or device between two step ends", witness)


def one_round(problem: PlanningProblem, shape: Shape) -> AveragingBound:
    """Bounds on averaging in one round over each stage."""
    request = problem.request
    wire = Codec(request.codec).wire_ratio
    # tied parameters are averaged afterwards, in a round that is not counted
    apart = not request.sync.local_steps
    vectors = problem.workload.averaged_bytes(shape.layers, shape.head_stage, apart=apart)
    return averaging_bound(
        problem.cluster,
        shape.sizes,
        [vector * wire for vector in vectors[: shape.stages]],
        equal_shares=request.shares == ShareRule.EQUAL,
        has_aggregators=bool(problem.aggregators),
    )


def straight_bound_s(problem: PlanningProblem, shape: Shape) -> float:
    """Seconds that no placement in straight pipelines beats.

    With averaging in one round every pipeline has a device that begins at T, so the pipeline with
    most microbatches counts; otherwise, and in steps without averaging, the one with the fewest.
    """
    averages_s = _step_s(problem, shape, together=problem.ends_together)
    return problem.request.sync.mean_s(_step_s(problem, shape, together=False), averages_s)


def _step_s(problem: PlanningProblem, shape: Shape, *, together: bool) -> float:
    """A step at whose start the devices of a stage begin together, or one of them does."""
    cluster, costs = problem.cluster, shape.costs(problem.workload)
    together = together and shape.pipelines > 1
    fewest, remainder = divmod(shape.microbatches, shape.pipelines)
    count = fewest + (1 if together and remainder else 0)
    times = _PipelineTimes.of(cluster, costs, count, shape.head_stage)
    stages = range(shape.stages)
    if shape.pipelines == 1:
        return times.last_backward_s(0, 0)  # no stage averages, so stage 0 ends last
    if not together:
        return min(times.last_backward_s(j, 0) for j in stages)
    averaging = one_round(problem, shape)
    return min(
        max(
            max(times.last_backward_s(j, q) + float(averaging.stage_s[q]) for q in stages),
            float(
                np.min(
                    [times.last_backward_s(j, q) + averaging.device_s[q] for q in stages], axis=0
                ).max()
            ),
            _slowest_link_s(cluster, costs, fewest) + float(averaging.stage_s.min()),
        )
        for j in stages
    )


@dataclass(frozen=True)
class _PipelineTimes:
    """Shortest times of a pipeline's operations and messages, by stage and boundary."""

    count: int
    forward_s: Sequence[float]
    backward_s: Sequence[float]
    head_s: float
    head_stage: int
    hop_s: Sequence[float]

    @classmethod
    def of(
        cls, cluster: Cluster, costs: Sequence[StageCosts], count: int, head_stage: int
    ) -> _PipelineTimes:
        fastest = float(cluster.flops.max())
        network = cluster.limited_network()
        pairs = network.latency_table.joins_two
        latency = network.latency_table.values[pairs]
        rate = network.bandwidth_table.values[pairs]
        return cls(
            count,
            [stage.forward_s(fastest) for stage in costs],
            [stage.backward_s(fastest) for stage in costs],
            costs[head_stage].head_s(fastest),
            head_stage,
            [float((latency + stage.output_bytes / rate).min()) for stage in costs[:-1]],
        )

    def last_backward_s(self, begin: int, stage: int) -> float:
        """From T to the last backward of stage ``stage``, if stage ``begin`` starts at T.

        Some stage m is the bottleneck: the way to it, then those of its operations that follow T
        one after the other, then the way of the last microbatch from there.
        """
        return max(
            self._through_bottleneck_s(begin, m, stage) for m in range(stage, len(self.forward_s))
        )

    def _through_bottleneck_s(self, begin: int, bottleneck: int, stage: int) -> float:
        back = sum(self.hop_s[i] + self.backward_s[i] for i in range(stage, bottleneck))
        head = self.head_s if bottleneck == self.head_stage else 0.0
        if bottleneck >= begin:
            there = sum(self.forward_s[i] + self.hop_s[i] for i in range(begin, bottleneck))
            return (
                there
                + self.count * (self.forward_s[bottleneck] + head + self.backward_s[bottleneck])
                + back
            )
        # only backward passes certainly follow: from begin to the last stage and back to m
        last = len(self.forward_s)
        there = sum(self.forward_s[begin:]) + self.head_s + sum(self.backward_s[bottleneck + 1 :])
        there += 2 * sum(self.hop_s[begin : last - 1]) + sum(self.hop_s[bottleneck:begin])
        return there + self.count * self.backward_s[bottleneck] + back


def _slowest_link_s(cluster: Cluster, costs: Sequence[StageCosts], count: int) -> float:
    """After T every device sends or receives all messages of its pipeline over one pair.

    If stage j is the first to begin a step, devices from stage j on send activations, and the last
    stage gradients; those before it receive gradients. Averaging of a stage begins after them.
    """
    if len(costs) == 1:
        return 0.0
    fastest_pair = np.maximum(*cluster.limited_network().fastest_bytes_per_s)
    least = min(stage.output_bytes for stage in costs[:-1])
    up, down = device_limits(cluster)
    return count * least / float(np.minimum(fastest_pair, np.maximum(up, down)).min())
