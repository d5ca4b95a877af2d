"""A problem of layouts in the form of the compiled search: arrays, estimates, and states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from planner.planning.cost import STEP_TIME, PlanObjective
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.layout import Layout, Outline
from planner.planning.joint.layout_arrays import (
    ClassArrays,
    LayoutScratch,
    LayoutState,
    ModelArrays,
)
from planner.planning.joint.layout_estimate import estimate
from planner.training_plan.choices import Head
from planner.workload.costs import stage_costs
from planner.workload.working_memory import WorkingMemory
from planner.workload.workload import Workload

MAX_IDLE_DEVICES = 1024
"""Devices that a stage may have, however few microbatches there are. With more devices than
microbatches some are idle; the search leaves them out in the end, and needs them as a detour."""
MAX_PAIRS = 1e8
"""Pairs of devices of neighbouring stages, of which a candidate needs three arrays."""


@dataclass(frozen=True)
class Constraints:
    """What the request fixes of layouts.

    Attributes
    ----------
    stages, layers
        Number of stages, and their layers; None if free.
    recompute
        Stages that recompute, all others do not; None if free.
    in_flight
        Limit on microbatches in flight per device; None for what memory holds.
    equal
        Whether all devices must reduce equal shares.
    every_steps, delayed, two_frequency
        Average every this many steps; overlap averaging with the next step; average within
        regions in every step as well.
    objective
        What to minimise.
    optimizer_copies
        Devices of a stage that have each part of its optimizer state, at least.
    heads
        Ends of the pipeline that may run head and loss.
    """

    stages: int | None = None
    layers: tuple[tuple[int, int], ...] | None = None
    recompute: Sequence[int] | Literal["all", "none"] | None = None
    in_flight: int | None = None
    equal: bool = False
    every_steps: int = 1
    delayed: bool = False
    two_frequency: bool = False
    objective: PlanObjective = STEP_TIME
    optimizer_copies: int = 1
    heads: tuple[Head, ...] = (Head.LAST,)


def model_of(workload: Workload, constraints: Constraints, max_stages: int) -> ModelArrays:
    """The workload in the form of the compiled search."""
    count = len(workload.layers)
    recompute = np.full(max_stages, count if constraints.recompute == "all" else 0)
    if constraints.recompute is not None and not isinstance(constraints.recompute, str):
        recompute[list(constraints.recompute)] = count
    min_devices = workload.optimizer_shards * constraints.optimizer_copies
    prefix_costs = [stage_costs(workload, 0, stop) for stop in range(1, count + 1)]
    all_layers = stage_costs(workload, 0, count, with_head=True)
    working = WorkingMemory.of_workload(workload)
    samples = workload.microbatch_samples
    parameters = np.cumsum(
        [workload.stem.parameters, *(layer.parameters for layer in workload.layers)]
    ).astype(float)
    parameters[0] = 0.0
    state_bytes, rounded_bytes = workload.state_bytes_per_parameter, working.rounded_bytes
    if (shards := workload.optimizer_shards) > 1:
        # all that is not rounded is used in fp32, what is rounded only as such
        in_fp32 = workload.precision.parameters.bytes
        state_bytes -= (1 - 1 / shards) * workload.precision.optimizer_bytes - in_fp32
        rounded_bytes -= in_fp32 if rounded_bytes else 0.0
    return ModelArrays(
        flops=np.array([0.0, *(costs.forward_flops for costs in prefix_costs)]),
        parameters=parameters,
        saved_bytes=np.cumsum([0.0, *(layer.saved_bytes * samples for layer in workload.layers)])
        + workload.stem.saved_bytes * samples * (np.arange(count + 1) > 0),
        output_bytes=np.array([layer.output_bytes * samples for layer in workload.layers]),
        held_bytes=np.array([workload.held_bytes(k) * samples for k in range(count)]),
        head_flops=all_layers.head_flops,
        head_parameters=float(workload.head.parameters),
        stem_parameters=float(workload.stem.parameters),
        tied_parameters=float(workload.tied_parameters),
        saves_output=workload.architecture is not None,
        layer_bytes=working.layer,
        embedding_bytes=working.embedding,
        head_bytes=working.head,
        message_bytes=working.messages,
        rounded_bytes=rounded_bytes,
        gradient_bytes=workload.gradient_bytes_per_parameter,
        state_bytes=state_bytes,
        wire_ratio=1.0,
        microbatches=workload.batch_samples / samples,
        every_steps=float(constraints.every_steps),
        delayed=constraints.delayed,
        two_frequency=constraints.two_frequency,
        by_cost=constraints.objective.by_cost,
        wait_usd_per_s=constraints.objective.wait_usd_per_s,
        max_in_flight=math.inf if constraints.in_flight is None else float(constraints.in_flight),
        min_devices=min_devices,
        max_devices=np.maximum(
            np.minimum(
                max(workload.batch_samples // samples, MAX_IDLE_DEVICES),
                np.sqrt(MAX_PAIRS / np.maximum(np.arange(max_stages + 1) - 1, 1)).astype(np.int64),
            ),
            min_devices,
        ),
        layers_free=constraints.layers is None,
        recompute_free=constraints.recompute is None,
        head_free=len(constraints.heads) > 1,
        recompute=recompute,
    )


class LayoutProblem:
    """Devices, model and constraints in arrays, and the estimate of a layout.

    Parameters
    ----------
    classes, workload
        Devices and model.
    wire_ratio
        Bytes of encoded gradients over unencoded ones.
    constraints
        What the request fixes.

    Attributes
    ----------
    layers
        Number of layers.
    max_stages
        Most stages of a layout.
    model, class_arrays
        Arrays of the model and of the device classes.
    scratch
        Scratch memory of the estimate.
    """

    def __init__(
        self,
        classes: DeviceClasses,
        workload: Workload,
        wire_ratio: float = 1.0,
        constraints: Constraints | None = None,
    ) -> None:
        self.constraints = constraints or Constraints()
        self.workload, self.layers = workload, len(workload.layers)
        least = workload.optimizer_shards * self.constraints.optimizer_copies
        most_groups = int(classes.size.sum()) // least
        self.max_stages = max(min(self.layers, most_groups), 1)
        model = model_of(workload, self.constraints, self.max_stages)
        self.classes = classes
        self.model = model._replace(
            gradient_bytes=model.gradient_bytes * wire_ratio, wire_ratio=wire_ratio
        )
        order = np.argsort(classes.rtt_s.ravel(), kind="stable").astype(np.int64)
        self.class_arrays = ClassArrays(
            size=classes.size,
            rtt_s=classes.rtt_s,
            bandwidth=classes.bandwidth,
            pair_bandwidth=classes.pair_bandwidth,
            capacity=classes.capacity,
            flops_per_s=classes.flops_per_s,
            memory_bytes=classes.memory_bytes,
            can_aggregate=classes.can_aggregate,
            sites=classes.sites,
            inside=(
                classes.sites[None] == np.arange(len(classes.site_bandwidth))[:, None, None]
            ).any(axis=2),
            site_bandwidth=classes.site_bandwidth,
            region=classes.region,
            pair_source=order // len(classes),
            pair_target=order % len(classes),
            pair_rank=np.argsort(order).reshape(classes.pair_bandwidth.shape),
            equal_shares=self.constraints.equal,
            usd_per_s=classes.usd_per_s,
            usd_per_byte=classes.usd_per_byte,
        )
        self.scratch = LayoutScratch.of(self.max_stages, len(classes), len(classes.site_bandwidth))

    def estimate(self, state: LayoutState) -> float:
        """The estimate, computed in full."""
        return float(estimate(self.model, self.class_arrays, state, self.scratch, math.inf))

    def empty_state(self) -> LayoutState:
        """Memory for a layout."""
        most = self.max_stages
        return LayoutState(
            stages=np.zeros(1, dtype=np.int64),
            counts=np.zeros((most, len(self.classes)), dtype=np.int64),
            cuts=np.zeros(most + 1, dtype=np.int64),
            recompute=np.zeros(most, dtype=np.int64),
            head_first=np.zeros(1, dtype=np.int64),
        )

    def new_state(self, outline: Outline) -> LayoutState:
        """An outline without devices and layers."""
        state, (stages, head) = self.empty_state(), outline
        # a single stage may be split later
        head = head if stages > 1 else self.constraints.heads[0]
        state.stages[0], state.head_first[0] = stages, head is Head.FIRST
        return state

    def state_of(self, layout: Layout) -> LayoutState:
        """A layout in the form of the compiled search."""
        state, stages = self.new_state(layout.outline), len(layout.layers)
        state.counts[:stages] = layout.counts
        state.cuts[: stages + 1] = [0, *(stop for _, stop in layout.layers)]
        state.recompute[:stages] = layout.recompute
        return state

    @staticmethod
    def layout_of(state: LayoutState) -> Layout:
        """Inverse of `state_of`."""
        stages = int(state.stages[0])
        return Layout.of(
            state.counts[:stages].tolist(),
            state.cuts[: stages + 1].tolist(),
            state.recompute[:stages].tolist(),
            head_of(state),
        )


def head_of(state: LayoutState) -> Head:
    """The end of the pipeline that runs head and loss."""
    return Head.FIRST if state.head_first[0] else Head.LAST
