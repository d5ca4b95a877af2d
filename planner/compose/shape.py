"""Stages, pipelines, layers and microbatches that fit a cluster, and the question they pose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from planner.network.cluster import Cluster
from planner.problems import AssignmentProblem, ProblemError
from planner.workload.workload import Workload


@dataclass(frozen=True)
class Shape:
    """Stages, pipelines and microbatches of a plan, validated against its cluster."""

    layers: tuple[tuple[int, int], ...]
    pipelines: int
    microbatches: int
    head: str

    @property
    def stages(self) -> int:
        """S, the number of stages."""
        return len(self.layers)

    def with_layers(self, layers: Sequence[tuple[int, int]]) -> Shape:
        """The same shape with other layers in its stages."""
        return replace(self, layers=tuple(layers))

    @property
    def head_stage(self) -> int:
        """The stage that runs head and loss."""
        return self.stages - 1 if self.head == "last" else 0


def shape_of(
    cluster: Cluster, workload: Workload, stages: int, pipelines: int | None, head: str
) -> Shape:
    """Cut the layers evenly and count microbatches.

    Raises
    ------
    NetworkError
        A pair of devices is not measured.
    ProblemError
        Devices, stages, layers and batch do not fit together.
    """
    cluster.network.require_complete()
    n = len(cluster)
    if stages < 1 or stages > n:
        raise ProblemError(f"stages must be 1 to the {n} devices, found {stages}; ask for fewer")
    if pipelines is None:
        if n % stages:
            fits = [s for s in range(1, n + 1) if n % s == 0 and s <= len(workload.layers)]
            raise ProblemError(
                f"{n} devices cannot be divided into {stages} equal stages; ask for one of {fits}, "
                "or plan on a subset of the devices"
            )
        pipelines = n // stages
    if workload.batch_samples % workload.microbatch_samples:
        raise ProblemError(
            f"batch_samples must be a multiple of microbatch_samples, found "
            f"{workload.batch_samples} and {workload.microbatch_samples}; change one"
        )
    microbatches = workload.batch_samples // workload.microbatch_samples
    if microbatches < pipelines:
        raise ProblemError(
            f"{microbatches} microbatches leave some of the {pipelines} pipelines idle; raise the "
            "batch, or lower microbatch_samples"
        )
    return Shape(workload.even_split(stages), pipelines, microbatches, head)


def assignment_problem(cluster: Cluster, workload: Workload, shape: Shape) -> AssignmentProblem:
    """DT-FM's question for this workload.

    c_PP is one microbatch's activations, as the paper defines it: once the pipeline is full,
    transfers of further microbatches overlap, so counting all of them (as its public code does)
    would trade slow averaging for hops that cost little. c_DP is the gradients of one stage.
    """
    samples = workload.microbatch_samples
    return AssignmentProblem(
        cluster.network,
        shape.stages,
        shape.pipelines,
        activation_bytes=[b * samples for b in workload.activation_bytes(shape.layers)],
        gradient_bytes=workload.gradient_bytes(shape.layers, shape.head_stage),
    )


def memory_room(
    cluster: Cluster,
    workload: Workload,
    shape: Shape,
    groups: Sequence[Sequence[int]],
) -> dict[int, int]:
    """Microbatches that each device can hold between their F and B.

    Raises
    ------
    ProblemError
        A device cannot hold its stage and one microbatch.
    """
    room: dict[int, int] = {}
    for j, group in enumerate(groups):
        stage = workload.stage(*shape.layers[j])
        with_head = j == shape.head_stage
        parameters = stage.parameters + (workload.head.parameters if with_head else 0)
        state = parameters * workload.state_bytes_per_parameter
        scratch = workload.head.saved_bytes * workload.microbatch_samples if with_head else 0.0
        each = stage.saved_bytes * workload.microbatch_samples
        for d in group:
            left = cluster.memory_bytes[d] - state - scratch
            if left < each:
                raise ProblemError(
                    f"device {cluster.network.ids[d]!r} has {cluster.memory_bytes[d] / 1e9:.2f} GB "
                    f"but stage {j} needs {(state + scratch + each) / 1e9:.2f} GB for its state "
                    "and one microbatch; use more stages, smaller microbatches or larger devices"
                )
            room[d] = shape.microbatches if each == 0 else min(int(left // each), 1 << 30)
    return room
