"""Shape of a plan: stages, sizes, layers and microbatches that fit a cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from planner.network.cluster import Cluster
from planner.planning.layer_split import balanced_split, is_uniform
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanKind, PlanRequest
from planner.planning.workers import tensor_parallel_workers
from planner.problems import AssignmentProblem, ProblemError
from planner.training_plan.choices import Head
from planner.workload.costs import StageCosts, split_costs
from planner.workload.workload import Workload

MAX_ROOM = 1 << 30
"""Limit on microbatches in flight where memory sets none."""

Layers = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Shape:
    """Stages of a plan and its microbatches, validated against its cluster.

    Attributes
    ----------
    layers, sizes
        Per stage, its layers ``(start, stop)`` and its number of devices.
    microbatches
        Per step, over all pipelines.
    head
        Whether the first or the last stage runs head and loss.
    recompute
        Per stage, how many of its first layers are recomputed, at most; empty if none is.
    """

    layers: Layers
    sizes: tuple[int, ...]
    microbatches: int
    head: Head
    recompute: tuple[int, ...] = ()

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.layers)

    @property
    def pipelines(self) -> int:
        """Number of straight pipelines: the devices of stage 0."""
        return self.sizes[0]

    @property
    def head_stage(self) -> int:
        """The stage that runs head and loss."""
        return self.head.stage(self.stages)

    def with_layers(self, layers: Sequence[tuple[int, int]]) -> Shape:
        """The same shape with other layers in its stages."""
        return replace(self, layers=tuple(layers))

    def recomputed(self) -> tuple[int, ...]:
        """Layers that each stage recomputes."""
        return at_most(self.recompute, self.layers) if self.recompute else ()

    def costs(self, workload: Workload) -> tuple[StageCosts, ...]:
        """Costs of each stage."""
        return split_costs(workload, self.layers, self.head_stage, self.recompute)


def at_most(recompute: Sequence[int], layers: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Numbers of recomputed layers, limited to those that each stage has."""
    return tuple(
        min(count, stop - start) for count, (start, stop) in zip(recompute, layers, strict=True)
    )


def shard_counts(cluster: Cluster, workload: Workload, request: PlanRequest) -> list[int]:
    """Numbers of optimizer shards to try: powers of two, and the number of straight pipelines."""
    assert not isinstance(request.tensor_parallel, str)
    devices = tensor_parallel_workers(cluster, workload, request.tensor_parallel)[0].devices
    able = int((np.asarray(devices.can_compute) & np.asarray(devices.can_aggregate)).sum())
    n = max(able // request.optimizer_copies, 1)
    most = n
    if request.kind is PlanKind.STRAIGHT and isinstance(request.stages, int):
        most = max(n // request.stages, 1)
    elif request.kind is PlanKind.STRAIGHT and request.pipelines is not None:
        most = max(request.pipelines // request.optimizer_copies, 1)
    fixed = {most} if most < n else set()
    return sorted({2**k for k in range(most.bit_length())} | fixed)


def shape_of(problem: PlanningProblem) -> Shape:
    """The shape that a request with a number of stages describes."""
    _require_compute(problem.cluster)
    if problem.request.kind is PlanKind.PARTIAL_PATHS:
        sizes = _sizes_for_paths(problem)
        microbatches = _microbatches_for_paths(problem, sizes[0])
    else:
        sizes = _equal_sizes(problem)
        microbatches = microbatches_of(problem.workload, sizes[0])
    layers = layers_of(problem, len(sizes))
    request = problem.request
    recompute = request.recomputing(len(sizes))
    shape = Shape(layers, sizes, microbatches, problem.heads[0], recompute)
    return shape if request.stage_layers is not None else _layers_that_fit(problem, shape)


def _layers_that_fit(problem: PlanningProblem, shape: Shape) -> Shape:
    """Uneven layers, if equal devices cannot hold even ones with embedding and head."""
    cluster, workload = problem.cluster, problem.workload
    if not is_uniform(cluster, workload):
        return shape
    memory = float(cluster.memory_bytes[0])
    if all(costs.room(memory) >= 1 for costs in shape.costs(workload)):
        return shape
    # baselines try many placements of one shape, on devices as fast and as large
    key = ("split", shape.stages, shape.head_stage, shape.recompute, memory, cluster.flops[0])
    if key not in workload.known_costs:
        anyone = [[0]] * shape.stages
        try:
            split = balanced_split(cluster, workload, anyone, shape.head_stage, shape.recompute)
        except ProblemError:
            split = None
        workload.known_costs[key] = split
    layers: Layers | None = workload.known_costs[key]
    return shape if layers is None else shape.with_layers(layers)


def _num_able(problem: PlanningProblem) -> str:
    """Number of devices that may hold stages, in words."""
    words = f"{len(problem.cluster)} devices"
    return words if problem.full_cluster is None else f"{words} that can compute"


def _require_compute(cluster: Cluster) -> None:
    cluster.network.require_complete()
    unable = np.flatnonzero(~np.asarray(cluster.devices.can_compute))
    if len(unable):
        raise ProblemError(
            f"device {cluster.network.ids[unable[0]]!r} cannot compute, so it can hold no stage; "
            "plan without it"
        )


def layers_of(problem: PlanningProblem, stages: int) -> Layers:
    """The given layers of every stage, or an even split."""
    layers, workload = problem.request.given_layers, problem.workload
    if layers is None:
        try:
            return workload.even_split(stages)
        except ValueError as error:
            raise ProblemError(str(error)) from None
    ends = [0, *(stop for _, stop in layers)]
    follow = all(start == end < stop for end, (start, stop) in zip(ends, layers, strict=False))
    if len(layers) == stages and follow and ends[-1] != len(workload.layers):
        raise ProblemError(
            f"stage_layers lists {ends[-1]} layers, the model has {len(workload.layers)}; correct "
            "them"
        )
    if len(layers) != stages or not follow:
        raise ProblemError(
            f"stage_layers must be {stages} ranges that follow each other over the "
            f"{len(workload.layers)} layers, found {[list(part) for part in layers]}; correct them"
        )
    return tuple(layers)


def _equal_sizes(problem: PlanningProblem) -> tuple[int, ...]:
    n, stages, pipelines = (
        len(problem.cluster),
        problem.request.stages,
        problem.request.pipelines,
    )
    if not isinstance(stages, int):
        raise ProblemError("the shape of the plan is missing; give stages, or 'auto'")
    if stages < 1 or stages > n:
        raise ProblemError(
            f"stages is {stages}; it must be from 1 to the {_num_able(problem)}; change it"
        )
    if pipelines is None:
        if n % stages:
            max_stages = len(problem.workload.layers)
            fits = [s for s in range(1, n + 1) if n % s == 0 and s <= max_stages]
            raise ProblemError(
                f"{_num_able(problem)} cannot be divided into {stages} equal stages; ask for one "
                f"of {fits}, give --wiring flow, whose stages may be unequal, or plan on a subset "
                "of the devices"
            )
        pipelines = n // stages
    if stages * pipelines != n:
        raise ProblemError(
            f"stages x pipelines must be the number of devices, found {stages} x {pipelines} for "
            f"{_num_able(problem)}; change one, or give stage_sizes"
        )
    return (pipelines,) * stages


MAX_MICROBATCHES = 1_000_000
"""Largest number of microbatches per step; more is a typing error."""


def require_whole_microbatches(workload: Workload) -> None:
    """Refuse a batch that is not a number of microbatches."""
    if workload.batch_samples % workload.microbatch_samples:
        raise ProblemError(
            f"batch_samples must be a multiple of microbatch_samples, found "
            f"{workload.batch_samples} and {workload.microbatch_samples}; change one"
        )


def microbatches_of(workload: Workload, pipelines: int) -> int:
    """Microbatches of a step."""
    require_whole_microbatches(workload)
    count = workload.batch_samples // workload.microbatch_samples
    if count > MAX_MICROBATCHES:
        raise ProblemError(
            f"batch_samples {workload.batch_samples} are {count} microbatches; a step has at most "
            f"{MAX_MICROBATCHES}, give a smaller batch or larger microbatches"
        )
    if count < pipelines:
        raise ProblemError(
            f"{count} microbatches leave some of the {pipelines} pipelines idle; raise the "
            "batch, or lower microbatch_samples"
        )
    return count


def _sizes_for_paths(problem: PlanningProblem) -> tuple[int, ...]:
    """Stage sizes as given, or equal; else the message proposes sizes by SkipPipe's eq. 1."""
    request, n = problem.request, len(problem.cluster)
    stages = request.fixed_stages
    if request.stage_sizes is not None:
        return tuple(request.stage_sizes)
    if not isinstance(stages, int):
        raise ProblemError("the shape of the plan is missing; give stages, or stage_sizes")
    if stages < 1 or stages > n:
        raise ProblemError(
            f"stages is {stages}; it must be from 1 to the {_num_able(problem)}; change it"
        )
    if n % stages == 0:
        return (n // stages,) * stages
    from planner.genetic.stage_sizes import stage_sizes_for_skip

    hint = ""
    if request.path_stages is not None and 1 < request.path_stages <= stages:
        sizes = stage_sizes_for_skip(n, stages, 1 - request.path_stages / stages)
        hint = f", such as {','.join(map(str, sizes))}"
    raise ProblemError(
        f"{_num_able(problem)} cannot be divided into {stages} equal stages; give stage_sizes{hint}"
    )


def _microbatches_for_paths(problem: PlanningProblem, starts: int) -> int:
    workload = problem.workload
    samples_per_round = workload.microbatch_samples * starts
    per_start, remainder = divmod(workload.batch_samples, samples_per_round)
    if remainder or per_start == 0:
        fits = (
            f"{per_start * samples_per_round} or {(per_start + 1) * samples_per_round}"
            if per_start
            else f"{samples_per_round}"
        )
        raise ProblemError(
            f"batch_samples must be a multiple of {samples_per_round}, microbatches of "
            f"{workload.microbatch_samples} from {starts} start devices, found "
            f"{workload.batch_samples}; give {fits}, or another size of the first stage"
        )
    return per_start * starts


def assignment_problem(cluster: Cluster, workload: Workload, shape: Shape) -> AssignmentProblem:
    """DT-FM's assignment problem of this workload.

    c_PP is the activations of one microbatch, as the paper defines it: once the pipeline is full,
    transfers of further microbatches overlap, so counting all of them (as its public code does)
    would trade slow averaging for hops that cost little. c_DP is the gradients of one stage.

    References
    ----------
    B. Yuan et al., "Decentralized Training of Foundation Models in Heterogeneous Environments"
    (DT-FM, 2022), eq. 1-4.
    """
    costs = shape.costs(workload)
    return AssignmentProblem(
        cluster.network,
        stage_sizes=shape.sizes,
        activation_bytes=[stage.output_bytes for stage in costs[:-1]],
        gradient_bytes=[stage.gradient_bytes for stage in costs],
    )


def sent_bytes(
    costs: Sequence[StageCosts], groups: Sequence[Sequence[int]], devices: int
) -> NDArray[np.float64]:
    """Bytes of a microbatch's activations that each device sends.

    Returns
    -------
    ndarray
        ``float[N]``; 0 for devices without a stage.
    """
    sent = np.zeros(devices)
    for group, cost in zip(groups, costs, strict=True):
        sent[list(group)] = cost.output_bytes
    return sent


def memory_room(
    cluster: Cluster,
    workload: Workload,
    shape: Shape,
    groups: Sequence[Sequence[int]],
    in_flight: int | None = None,
) -> dict[int, int]:
    """Microbatches between forward and backward that fit on each device, up to ``in_flight``."""
    room: dict[int, int] = {}
    for j, (group, costs) in enumerate(zip(groups, shape.costs(workload), strict=True)):
        for d in group:
            memory = float(cluster.memory_bytes[d])
            fits = costs.room(memory)
            if fits < 1:
                raise ProblemError(
                    f"device {cluster.network.ids[d]!r} has {memory / 1e9:.2f} GB but stage {j} "
                    f"needs {costs.need_bytes(1) / 1e9:.2f} GB for its state and one "
                    "microbatch; use more stages, smaller microbatches or larger devices"
                )
            live = shape.microbatches if math.isinf(fits) else min(int(fits), MAX_ROOM)
            room[d] = live if in_flight is None else min(live, in_flight)
    return room
