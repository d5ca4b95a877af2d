"""Splits layers over heterogeneous stages: minimal slowest stage, or evenly filled memory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.network.cluster import Cluster
from planner.problems import ProblemError
from planner.training_plan.choices import Head
from planner.workload.costs import StageCosts, least_memory_costs, stage_costs
from planner.workload.workload import Workload

Cut = tuple[tuple[int, ...], tuple[float, ...]]
CLOSE = 1e-3
"""Relative tolerance of the share to which devices are filled."""


def is_uniform(cluster: Cluster, workload: Workload) -> bool:
    """Whether all devices and all layers are equal, so that layers are split evenly."""
    layers = {(x.parameters, x.forward_flops, x.saved_bytes) for x in workload.layers}
    devices = set(zip(cluster.flops.tolist(), cluster.memory_bytes.tolist(), strict=True))
    return len(layers) == 1 and len(devices) == 1


def balanced_split(
    cluster: Cluster,
    workload: Workload,
    groups: Sequence[Sequence[int]],
    head_stage: int,
    recompute: Sequence[int] = (),
) -> tuple[tuple[int, int], ...]:
    """Contiguous layer ranges that minimise the largest stage time (exact, dynamic program).

    A stage takes its FLOPs, with the head's where it runs, over its group's slowest device. Of
    equally good splits, the one whose stage times have the smallest sum of squares.

    Returns
    -------
    tuple[tuple[int, int], ...]
        ``(start, stop)`` of every stage.
    """
    layers, stages = len(workload.layers), len(groups)
    if stages > layers:
        raise ProblemError(
            f"{workload.name} has {layers} layers for {stages} stages; ask for fewer stages"
        )
    recomputed = recompute or (0,) * stages
    speed = [min(float(cluster.flops[d]) for d in group) for group in groups]
    memory = [min(float(cluster.memory_bytes[d]) for d in group) for group in groups]

    def seconds(j: int, start: int, stop: int) -> float:
        """Time of one microbatch through a stage, infinite if memory cannot hold it."""
        costs = stage_costs(
            workload, start, stop, with_head=j == head_stage, recomputed=recomputed[j]
        )
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
    """Contiguous ranges with the least largest time, then the least sum of squares; exact.

    Returns
    -------
    tuple[tuple[int, int], ...] or None
        ``(start, stop)`` of every stage; None if there are none.
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
                cut = (max(largest, own), squares + own * own, (*cuts, stop))
                if stop not in after or cut < after[stop]:
                    after[stop] = cut
        best = after
    return tuple(pairwise(best[layers][2])) if layers in best else None


@dataclass(frozen=True, order=True)
class Filled:
    """One device per stage, all filled to the same fraction as far as whole layers allow.

    Attributes
    ----------
    share
        Fraction of memory that the fullest stage needs; above 1 if the model does not fit.
    layers
        Per stage, ``(start, stop)``.
    memory
        Per stage, bytes of its device.
    recompute
        Per stage, how many of its first layers are recomputed; None for those with which it needs
        least memory.
    head
        Which stage runs head and loss.
    """

    share: float
    layers: tuple[tuple[int, int], ...]
    memory: tuple[float, ...]
    recompute: tuple[int | None, ...]
    head: Head = Head.LAST

    @property
    def head_stage(self) -> int:
        """The stage that runs head and loss."""
        return self.head.stage(len(self.layers))

    def costs(self, workload: Workload) -> tuple[StageCosts, ...]:
        """Costs of each stage."""
        return tuple(
            _costs(workload, part, j == self.head_stage, self.recompute[j])
            for j, part in enumerate(self.layers)
        )


def _costs(
    workload: Workload, part: tuple[int, int], with_head: bool, recomputed: int | None
) -> StageCosts:
    if recomputed is None:
        return least_memory_costs(workload, *part, with_head=with_head)
    return stage_costs(workload, *part, with_head=with_head, recomputed=recomputed)


def evenly_filled(
    workload: Workload,
    memory: Sequence[float],
    recompute: Sequence[int | None],
    fixed_layers: tuple[tuple[int, int], ...] | None = None,
    *,
    head: Head = Head.LAST,
    any_order: bool = False,
) -> Filled:
    """Contiguous ranges that fill all devices to the same fraction, one device per stage."""
    layers, stages = len(workload.layers), len(memory)

    def share(j: int, have: float, start: int, stop: int) -> float:
        costs = _costs(workload, (start, stop), j == head.stage(stages), recompute[j])
        return costs.need_bytes(1) / max(have, 1.0)

    def filled(most: float) -> Cut | None:
        """Ends of stages and memory in their order, none filled to more."""
        furthest: dict[tuple[float, int], int] = {}

        def end(j: int, have: float, start: int) -> int:
            """As many layers as the stage holds: needs grow with layers, so none holds more."""
            if j == stages - 1:
                return layers if share(j, have, start, layers) <= most else start
            stop = furthest.get((have, start), start)
            last = layers - (stages - 1 - j)
            while stop < last and share(j, have, start, stop + 1) <= most:
                stop += 1
            if len(set(recompute)) == 1:
                furthest[have, start] = stop
            return min(stop, last)

        # by remaining devices, the largest number of layers that the others hold
        best: dict[tuple[float, ...], Cut] = {tuple(memory): ((0,), ())}
        for j in range(stages):
            after: dict[tuple[float, ...], Cut] = {}
            for left, (ends, order) in best.items():
                for have in dict.fromkeys(left if any_order else left[:1]):
                    stop = end(j, have, ends[-1])
                    k = left.index(have)
                    others = (*left[:k], *left[k + 1 :])
                    if stop > ends[-1] and stop > after.get(others, ((0,), ()))[0][-1]:
                        after[others] = (*ends, stop), (*order, have)
            best = after
        return best.get(())

    if fixed_layers is not None:
        fullest = max(share(j, memory[j], *part) for j, part in enumerate(fixed_layers))
        return Filled(fullest, fixed_layers, tuple(memory), tuple(recompute), head)
    low, high, best_cut = 0.0, 1.0, filled(1.0)
    while best_cut is None:
        low, high = high, 2 * high
        best_cut = filled(high)
    while high - low > CLOSE * high:
        middle = (low + high) / 2
        if (better := filled(middle)) is None:
            low = middle
        else:
            high, best_cut = middle, better
    ends, order = best_cut
    return Filled(high, tuple(pairwise(ends)), order, tuple(recompute), head)


def orders_of(memory: Sequence[float]) -> int:
    """Number of distinct subsets of these devices by memory."""
    return math.prod(count + 1 for count in Counter(memory).values())
