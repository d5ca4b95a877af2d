"""Metis as a planner: unequal stages, load by speed, its own estimate."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain, pairwise, permutations

import numpy as np

from planner.planning.baselines.rank_order import region_order, unconstrained
from planner.planning.baselines.search import MAX_REFUSED, ORDERS
from planner.planning.evaluation import compute_times, evaluated
from planner.planning.layer_split import least_largest
from planner.planning.problem import PlanningProblem
from planner.planning.shape import Layers, Shape, memory_room
from planner.planning.straight.schedules import path_schedule
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.training_plan.choices import Head
from planner.training_plan.model import TrainingPlan
from planner.training_plan.shares import integer_parts
from planner.workload.costs import ALL_LAYERS, StageCosts, stage_costs

MAX_PARTS = 6
"""Groups of devices whose orders are tried, as in Metis' published results; equal groups are merged
until so many are left."""
MAX_KINDS = 4
"""Kinds of devices whose orders are tried; further kinds follow in given order."""

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class MetisRule:
    """The plan of Metis' rule, evaluated in the simulator.

    Attributes
    ----------
    plan
        With the least estimate among those that fit in memory.
    estimated_s
        The rule's estimate.
    rounds
        Parts of the batch that pass the stages one after the other, each spread over all devices of
        a stage.
    """

    plan: TrainingPlan
    estimated_s: float
    rounds: int


@dataclass(frozen=True)
class _Placement:
    """Groups of devices by stage, and samples per round for each device."""

    groups: Groups
    layers: Layers
    rounds: int
    samples: tuple[tuple[int, ...], ...]

    @property
    def microbatch_samples(self) -> int:
        """Greatest common divisor of all devices' samples per round."""
        return math.gcd(*(count for row in self.samples for count in row))

    def paths(self) -> tuple[tuple[int, ...], ...]:
        """Paths of a step: in every round the first samples visit each stage's first device, and so
        on."""
        each = self.microbatch_samples
        columns = [
            np.repeat(group, [count // each for count in row])
            for group, row in zip(self.groups, self.samples, strict=True)
        ]
        return tuple(map(tuple, np.stack(columns, axis=1).tolist())) * self.rounds

    def flight(self) -> dict[int, int]:
        """Microbatches in flight of 1F1B: one round more than the next stage."""
        each, stages = self.microbatch_samples, len(self.groups)
        return {
            d: (stages - j) * (count // each)
            for j, (group, row) in enumerate(zip(self.groups, self.samples, strict=True))
            for d, count in zip(group, row, strict=True)
        }


def metis_rule(problem: PlanningProblem) -> MetisRule:
    """Stages whose numbers of devices are powers of two, with layers by their speed.

    Reimplemented from the paper and its published planner, for nodes of one GPU, where stages have
    no tensor parallelism. All devices take part, grouped by kind, in all orders of kinds (of the
    first `MAX_KINDS`). Stages consist of consecutive devices, no fewer than devices over stages;
    layers are split by the total speed of a stage, samples by the speed of each device. Every
    divisor of the batch is tried as the number of rounds. The estimate adds the compute time of all
    stages, the slowest stage for every further round, one message over the narrowest link between
    successive stages, and the slowest ring. The published planner also reads measured times for
    batches of each size and overheads of rounds and updates; here time is proportional to samples,
    so that most rounds are usually best. Kinds differ in speed or memory, and bandwidths are those
    of the links used (its code uses the link within a node). Added here: evaluation, the order of
    operations (the faster of 1F1B and eager 1F1B), recomputation where memory is short, and an
    exact split of layers within memory.

    References
    ----------
    T. Um et al., "Metis: Fast Automatic Distributed Training on Heterogeneous GPUs" (USENIX ATC
    2024); planner at https://github.com/SamsungLabs/Metis.
    """
    able = np.flatnonzero(np.asarray(problem.cluster.devices.can_compute)).tolist()
    variant = unconstrained(replace(problem, cluster=problem.cluster.subset(able)))
    search = _Search(variant)
    placements = heapq.nsmallest(MAX_REFUSED, search.placements(), key=lambda p: p[0])
    refusal = "the devices make no groups of powers of two, or the batch is too small for them"
    if search.refused:
        refusal = "memory does not hold the weights of any stages; give larger devices or more"
    for estimated_s, placement in placements:
        plans: list[TrainingPlan] = []
        for recompute in (False, True):
            try:
                placed_plans, short = _plans(variant, placement, recompute)
            except ProblemError as error:
                refusal = str(error)
                continue
            plans += placed_plans
            if not short:
                break
        if plans:
            best = min(plans, key=lambda plan: plan.predicted.step_s)
            return MetisRule(best, estimated_s, placement.rounds)
    raise ProblemError(f"no placement of Metis' rule fits: {refusal}")


class _Search:
    """All placements of the rule with their estimates."""

    def __init__(self, problem: PlanningProblem) -> None:
        self.problem = problem
        self.flops, self.memory = problem.cluster.flops, problem.cluster.memory_bytes
        bandwidth = problem.cluster.network.bandwidth_bytes_per_s
        self.slower = np.minimum(bandwidth, bandwidth.T)
        # whether some group's weights exceeded memory
        self.refused = False
        # one sample at a time
        self.workload = problem.workload.replace(microbatch_samples=1)
        self.batch = self.workload.batch_samples
        # many placements share stages
        self.cost, self.dealt = cache(self._cost), cache(self._distribute)
        self.between, self.within = cache(self._between), cache(self._within)
        self.split, self.speed = cache(self._split), cache(self._speed)

    def placements(self) -> Iterator[tuple[float, _Placement]]:
        """Placements in the order of Metis."""
        devices, layers = len(self.flops), len(self.workload.layers)
        for ranks in _sequences(self.problem):
            for stages in range(1, min(devices, layers) + 1):
                for sizes in group_sizes(devices, stages):
                    ends = [0, *accumulate(sizes)]
                    yield from self.of(tuple(tuple(ranks[a:b]) for a, b in pairwise(ends)))

    def of(self, groups: Groups) -> Iterator[tuple[float, _Placement]]:
        """Placements with all numbers of rounds."""
        layers = self.split(tuple(map(self.speed, groups)))
        if layers is None:
            self.refused = True
            return
        costs = [self.cost(*part, k == len(layers) - 1) for k, part in enumerate(layers)]
        busy = [cost.busy_s(1.0) for cost in costs]
        there_s = sum(
            self.batch // len(group) * cost.output_bytes / self.between(group, next_group)
            for cost, (group, next_group) in zip(costs, pairwise(groups), strict=False)
        )
        rings = zip(costs, groups, strict=True)
        ring_s = max(cost.gradient_bytes * self.within(group) for cost, group in rings)
        most = self.batch // max(map(len, groups))
        for rounds in (n for n in range(1, most + 1) if self.batch % n == 0):
            dealt = [self.dealt(group, self.batch // rounds) for group in groups]
            samples = tuple(row for row, _ in dealt)
            took = [each * work for each, (_, work) in zip(busy, dealt, strict=True)]
            estimate = sum(took) + (rounds - 1) * max(took) + there_s / rounds + ring_s
            yield float(estimate), _Placement(groups, layers, rounds, samples)

    def _cost(self, start: int, stop: int, with_head: bool) -> StageCosts:
        """Costs of one sample."""
        return stage_costs(self.workload, start, stop, with_head=with_head)

    def _distribute(self, group: tuple[int, ...], samples: int) -> tuple[tuple[int, ...], float]:
        """Samples of each device, and the time of the slowest per FLOP of a sample."""
        speeds = self.flops[list(group)]
        row = integer_parts(speeds, samples)
        return tuple(row.tolist()), float((row / speeds).max())

    def _between(self, group: tuple[int, ...], next_group: tuple[int, ...]) -> float:
        """Bytes per second of the narrowest link."""
        return float(self.slower[np.ix_(group, next_group)].min())

    def _within(self, group: tuple[int, ...]) -> float:
        """Seconds per byte of a ring's narrowest link."""
        if len(group) == 1:
            return 0.0
        off = ~np.eye(len(group), dtype=bool)
        narrow = float(self.slower[np.ix_(group, group)][off].min())
        return 2 * (1 - 1 / len(group)) / narrow

    def _speed(self, group: tuple[int, ...]) -> tuple[float, float]:
        """Total FLOP/s, and the smallest memory."""
        return float(self.flops[list(group)].sum()), float(self.memory[list(group)].min())

    def _split(self, stages: tuple[tuple[float, float], ...]) -> Layers | None:
        """The split with the fastest slowest stage; None if none fits in memory."""

        def seconds(stage: int, start: int, stop: int) -> float:
            speed, memory = stages[stage]
            cost = self.cost(start, stop, stage == len(stages) - 1)
            return cost.busy_s(speed) if cost.state_bytes <= memory else math.inf

        return least_largest(len(stages), len(self.workload.layers), seconds)


def _sequences(problem: PlanningProblem) -> Iterator[list[int]]:
    """Devices by kind, in every order of kinds; those of a kind by region."""
    cluster = problem.cluster
    kinds: dict[tuple[float, float], list[int]] = {}
    for d in region_order(cluster.network):
        kinds.setdefault((float(cluster.flops[d]), float(cluster.memory_bytes[d])), []).append(d)
    members = list(kinds.values())
    for order in permutations(range(min(len(members), MAX_KINDS))):
        others = members[MAX_KINDS:]
        yield [d for kind in (*(members[k] for k in order), *others) for d in kind]


def group_sizes(devices: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Devices per stage: powers of two, at least devices over stages rounded down.

    All multisets, and all orders of each, where the smallest equal sizes are merged in pairs until
    at most `MAX_PARTS` parts are left.

    Yields
    ------
    tuple[int, ...]
        S distinct sizes with the sum N.
    """
    sizes = [1 << k for k in range(devices.bit_length()) if 1 << k >= devices // stages]
    for chosen in _sums(sizes, devices, stages):
        orders = permutations(_parts([(size,) for size in chosen]))
        yield from sorted({tuple(chain(*order)) for order in orders})


def _sums(sizes: Sequence[int], total: int, count: int) -> Iterator[tuple[int, ...]]:
    """Ascending sums with repetition."""
    if count == 0:
        if total == 0:
            yield ()
        return
    for k, size in enumerate(sizes):
        if size * count > total:
            return
        for rest in _sums(sizes[k:], total - size, count - 1):
            yield (size, *rest)


def _parts(parts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Merge the smallest equal parts while there are too many.

    All pairs at once, or as many of the first pairs as necessary.
    """
    while (over := len(parts) - MAX_PARTS) > 0:
        least = parts[0]
        alike = next((k for k, part in enumerate(parts) if part != least), len(parts) - 1) + 1
        num_pairs = max(over, alike // 2)
        fewer: list[tuple[int, ...]] = []
        for k in range(0, len(parts), 2):
            pair = parts[k : k + 2]
            together = k // 2 < num_pairs and [sum(part) for part in pair] == [sum(least)] * 2
            fewer += [pair[0] + pair[1]] if together else pair
        parts = fewer
        # no parts were merged
        if num_pairs == len(parts) - MAX_PARTS:
            break
    return parts


def _plans(
    problem: PlanningProblem, placement: _Placement, recompute: bool
) -> tuple[list[TrainingPlan], bool]:
    """Plans in both orders that fit in memory, and whether all microbatches do not fit at once."""
    each, stages = placement.microbatch_samples, len(placement.groups)
    variant = replace(problem, workload=problem.workload.replace(microbatch_samples=each))
    cluster, workload, groups = variant.cluster, variant.workload, placement.groups
    paths, sizes = placement.paths(), tuple(map(len, groups))
    recomputed = (ALL_LAYERS if recompute else 0,) * stages
    shape = Shape(placement.layers, sizes, len(paths), Head.LAST, recomputed)
    assignment, flight = AssignmentPlan(groups, None), placement.flight()
    room = memory_room(cluster, workload, shape, groups)
    times = compute_times(variant, shape, assignment)
    plans = []
    for order in ORDERS:
        ordered = replace(variant, request=variant.request.replace(schedule=order))
        try:
            schedule = path_schedule(ordered, shape, assignment, times, paths, flight)
        except ProblemError:
            continue  # memory does not hold what 1F1B keeps
        plans.append(evaluated(ordered, shape, assignment, times, (schedule,)))
    through = Counter(d for path in paths for d in path)
    return plans, any(room[d] < count for d, count in through.items())
