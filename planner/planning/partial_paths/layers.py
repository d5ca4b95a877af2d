"""Layers of stages that microbatches may skip."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

from planner.planning.layer_split import least_largest
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Layers, Shape
from planner.simulator.averaging_rounds import round_s
from planner.simulator.resources import LinkResources
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Codec
from planner.workload.costs import StageCosts, stage_costs

LIMITS = 24
"""Limits on averaging time for which the fastest layers are examined."""


def splits(problem: PlanningProblem, shape: Shape, groups: Sequence[Sequence[int]]) -> list[Layers]:
    """Layer splits to try for given stages; the shape's own first.

    The others minimise the compute time of the slowest stage over the microbatches that visit it;
    that time plus the slowest averaging; and the sum of both for one stage.
    """
    if problem.request.stage_layers is not None:
        return [shape.layers]
    layers = len(problem.workload.layers)
    computing, averaging = _computing_s(problem, shape, groups), _averaging_s(problem, groups)
    cluster, workload = problem.cluster, problem.workload
    smallest = [min(float(cluster.memory_bytes[d]) for d in group) for group in groups]
    recompute = shape.recompute or (0,) * shape.stages

    @cache
    def costs(j: int, start: int, stop: int) -> tuple[float, float]:
        """Seconds of computing and of averaging; infinite where memory does not hold the stage."""
        head = j == shape.head_stage
        stage = stage_costs(workload, start, stop, with_head=head, recomputed=recompute[j])
        if stage.need_bytes(1) > smallest[j]:
            return math.inf, math.inf
        return computing(j, stage), averaging(j, stage)

    def within(limit_s: float) -> Layers | None:
        """The quickest to compute of those whose averaging takes no longer than that."""

        def seconds(j: int, start: int, stop: int) -> float:
            work_s, round_s = costs(j, start, stop)
            return work_s if round_s <= limit_s else math.inf

        return least_largest(shape.stages, layers, seconds)

    def both(split: Layers) -> float:
        """The slowest stage's computing, and after it the slowest averaging."""
        of_stages = [costs(j, *part) for j, part in enumerate(split)]
        return max(work for work, _ in of_stages) + max(last for _, last in of_stages)

    quickest = within(math.inf)
    if quickest is None:
        return [shape.layers]
    rounds = {costs(j, a, b)[1] for j in range(shape.stages) for a, b in _ranges(layers)}
    limits = sorted(s for s in rounds if math.isfinite(s))
    least = limits[:: max(1, len(limits) // LIMITS)]
    traded = [quickest, *(split for s in least if (split := within(s)) is not None)]
    least_sum = least_largest(shape.stages, layers, lambda *part: sum(costs(*part)))
    return list(
        dict.fromkeys([shape.layers, quickest, min(traded, key=both), least_sum or quickest])
    )


def _ranges(layers: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(layers) for b in range(a + 1, layers + 1)]


def visited_share(problem: PlanningProblem, shape: Shape) -> float:
    """Fraction of the layers that a microbatch visits, in the mean over the cycle."""
    count = [stop - start for start, stop in shape.layers]
    share = _visiting(problem, shape)
    return sum(n * s for n, s in zip(count, share, strict=True)) / sum(count)


def _visiting(problem: PlanningProblem, shape: Shape) -> list[float]:
    """Fraction of the microbatches that visit each stage, in the mean over the cycle (CC3)."""
    path_stages, cycle = problem.request.path_stages or 0, problem.request.cycle(shape.stages)
    full = cycle.count(1) / len(cycle)
    if shape.stages == 1:
        return [1.0]
    later = full + (1 - full) * (path_stages - 1) / (shape.stages - 1)
    return [1.0, *[later] * (shape.stages - 1)]


def _computing_s(
    problem: PlanningProblem, shape: Shape, groups: Sequence[Sequence[int]]
) -> Callable[[int, StageCosts], float]:
    """Start devices have equal numbers of microbatches; those of other stages, by their speed."""
    speed = [[float(problem.cluster.flops[d]) for d in group] for group in groups]
    rate = [len(speed[0]) * min(speed[0]), *(sum(of) for of in speed[1:])]
    visits = [share * shape.microbatches for share in _visiting(problem, shape)]
    return lambda j, costs: visits[j] * costs.busy_s(rate[j])


def _averaging_s(
    problem: PlanningProblem, groups: Sequence[Sequence[int]]
) -> Callable[[int, StageCosts], float]:
    """Seconds of a round of equal shares: latency plus a term linear in the bytes.

    A mean, if one step in several averages.
    """
    every = problem.request.sync_every
    links, wire = LinkResources.of(problem.cluster), Codec(problem.request.codec).wire_ratio
    equal_shares = [AveragingGroup.equal(tuple(group)) for group in groups]
    latency_s = [
        round_s(group, 0.0, links) if len(group.members) > 1 else 0.0 for group in equal_shares
    ]
    gigabyte_s = [
        round_s(group, 1e9, links) if len(group.members) > 1 else 0.0 for group in equal_shares
    ]
    slope = [(with_ - without) / 1e9 for with_, without in zip(gigabyte_s, latency_s, strict=True)]
    return lambda j, costs: (latency_s[j] + slope[j] * wire * costs.gradient_bytes) / every
