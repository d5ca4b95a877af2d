"""The planning problem: a request, and the cluster and workload that it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from planner.network.cluster import Cluster
from planner.network.dtype import Dtype
from planner.planning.averaging.hierarchical import has_hierarchy
from planner.planning.calibrated import calibrated
from planner.planning.request import Objective, PlanKind, PlanRequest, ShareRule
from planner.planning.workers import tensor_parallel_workers
from planner.problems import ProblemError
from planner.problems.quantities import instance_of, seed_of
from planner.training_plan.choices import Codec, Head
from planner.utils.text import counted
from planner.workload.boundary_codec import BoundaryCodec
from planner.workload.workload import Workload


@dataclass(frozen=True)
class PlanningProblem:
    """A planning request with its cluster and workload, consistent with each other.

    Attributes
    ----------
    cluster
        Devices that can compute, or workers of several. For a joint search with a calibration they
        have their measured FLOP/s.
    workload
        What to train, with the request's microbatches, boundary codec and state of the outer
        optimizer.
    seed
        Of the random generators.
    full_cluster
        The cluster including devices that cannot compute; None if all can.
    """

    cluster: Cluster
    workload: Workload
    request: PlanRequest
    seed: int = 0
    full_cluster: Cluster | None = None

    @property
    def aggregators(self) -> tuple[int, ...]:
        """Devices of ``full_cluster`` that may reduce gradients though they have no stage."""
        request = self.request
        uses = (
            request.shares == ShareRule.ADAPTIVE
            and request.group_size is None
            and request.kind is not PlanKind.PARTIAL_PATHS
            and request.objective == Objective.TIME
            and request.within is None
        )
        if self.full_cluster is None or not uses:
            return ()
        devices = self.full_cluster.devices
        able = np.asarray(devices.can_aggregate) & ~np.asarray(devices.can_compute)
        return tuple(np.flatnonzero(able).tolist())

    @property
    def ends_together(self) -> bool:
        """Whether all devices of a stage end their averaging at the same time in every plan.

        They do not in several rounds, such as those of optimizer state in shards, and in
        hierarchical and two-frequency averaging.
        """
        request = self.request
        hierarchical = request.may_be_hierarchical and has_hierarchy(self.cluster)
        several = request.group_size is not None or request.within is not None
        return not several and not hierarchical and self.workload.optimizer_shards == 1

    @property
    def heads(self) -> tuple[Head, ...]:
        """Ends of the pipeline that may run head and loss.

        A head on the last stage has a copy of a matrix that it shares with the embedding. Both
        copies are averaged in every step; devices that take steps of their own could not keep them
        equal.
        """
        is_partial = self.request.kind is PlanKind.PARTIAL_PATHS
        if self.request.head is not None or is_partial or not self.workload.tied_parameters:
            return (self.request.head_place,)
        return (Head.FIRST,) if self.request.sync.local_steps else (Head.LAST, Head.FIRST)

    @property
    def aggregators_in(self) -> Cluster | None:
        """``full_cluster``, if there are `aggregators`."""
        return self.full_cluster if self.aggregators else None

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        workload: Workload,
        request: PlanRequest | None,
        seed: int,
        changes: dict[str, Any],
    ) -> PlanningProblem:
        """Validate the arguments of `planner.plan`."""
        instance_of(Cluster, cluster, "cluster")
        instance_of(Workload, workload, "workload")
        request = PlanRequest() if request is None else instance_of(PlanRequest, request, "request")
        request = request.replace(**changes) if changes else request
        if request.microbatch_samples is not None:
            workload = workload.replace(microbatch_samples=request.microbatch_samples)
        if request.sync_every > 1:
            workload = workload.with_outer_state(delayed=request.delayed)
        else:
            workload = workload.without_outer_state()
        if request.boundary_codec != BoundaryCodec.NONE:
            workload = workload.with_boundary_codec(request.boundary_codec)
        if isinstance(request.tensor_parallel, str):
            raise ProblemError("tensor_parallel is 'auto', which planner.plan resolves; give 1")
        cluster, workload = tensor_parallel_workers(cluster, workload, request.tensor_parallel)
        if isinstance(request.optimizer_shards, str):
            raise ProblemError("optimizer_shards is 'auto', which planner.plan resolves; give 1")
        workload = _with_shards(
            cluster, workload, request.optimizer_shards, request.optimizer_copies
        )
        if request.within is not None:
            _require_regions(cluster)
        _require_format(cluster, workload)
        _require_steps_together(workload, request)
        gradients = workload.precision.gradients
        if request.codec != Codec.NONE and gradients is not Dtype.FP32:
            raise ProblemError(
                f"codec {request.codec} is made from fp32, the workload averages gradients in "
                f"{gradients}; choose one of the two"
            )
        if request.objective == Objective.COST and cluster.devices.usd_per_hour is None:
            raise ProblemError(
                "objective 'cost' needs what devices cost; give usd_per_hour, or that column of "
                "the devices file"
            )
        if request.calibration is not None:
            try:
                calibration = request.calibration.completed(cluster, workload)
                if request.kind is PlanKind.JOINT:
                    cluster = calibrated(cluster, workload, calibration)
            except ProblemError:
                raise
            except ValueError as error:
                raise ProblemError(str(error)) from None
            request = request.replace(calibration=calibration)
        seed = seed_of(seed)
        able = np.flatnonzero(np.asarray(cluster.devices.can_compute))
        if len(able) == len(cluster):
            return cls(cluster, workload, request, seed)
        if not len(able):
            raise ProblemError(
                "no device can compute: can_compute is no for every one; give one that can"
            )
        return cls(cluster.subset(able.tolist()), workload, request, seed, cluster)


def _with_shards(cluster: Cluster, workload: Workload, shards: int, copies: int) -> Workload:
    """The workload with optimizer state in shards, of which each needs a device of the stage."""
    computes = np.asarray(cluster.devices.can_compute)
    able = int((computes & np.asarray(cluster.devices.can_aggregate)).sum())
    if shards > 1 and shards * copies > able:
        times = f" with optimizer_copies {copies}" if copies > 1 else ""
        raise ProblemError(
            f"optimizer_shards is {shards}{times}, and {counted(able, 'device')} can compute and "
            f"aggregate, of which each stage needs {shards * copies}; give fewer"
        )
    if copies > max(int(computes.sum()), 1):
        raise ProblemError(
            f"optimizer_copies is {copies}, and {counted(int(computes.sum()), 'device')} can "
            "compute, of which each stage needs as many; give fewer"
        )
    try:
        return workload.replace(optimizer_shards=shards)
    except ValueError as error:
        raise ProblemError(str(error)) from None


def _require_format(cluster: Cluster, workload: Workload) -> None:
    """Refuse devices that would emulate the format of compute, as their executor would."""
    compute = workload.precision.compute
    if lacking := cluster.lacks(compute):
        raise ProblemError(
            f"{cluster.describe_lacking(lacking)}, which has no {compute}, the format of compute; "
            "plan with --precision fp16, other GPUs, or can_compute no for these devices"
        )


def _require_steps_together(workload: Workload, request: PlanRequest) -> None:
    """Refuse loss scaling where devices update on their own."""
    if workload.precision.scales_loss and request.sync_every > 1:
        raise ProblemError(
            f"sync_every is {request.sync_every} with fp16; devices must change the loss scale "
            "together, which only steps that average gradients allow; plan with --precision fp32 "
            "(or bf16 on GPUs that have it), or with --sync-every 1"
        )


def _require_regions(cluster: Cluster) -> None:
    """Several, of which one has several devices: else there is nothing to do within, or between."""
    able = np.asarray(cluster.devices.can_compute)
    regions = [region for region, can in zip(cluster.network.regions, able, strict=True) if can]
    if not 1 < len(set(regions)) < len(regions):
        actual = "one region" if len(set(regions)) == 1 else "a region for each device"
        raise ProblemError(
            f"within 'region' goes with several regions, of which one has several devices, found "
            f"{actual}; leave it out"
        )
