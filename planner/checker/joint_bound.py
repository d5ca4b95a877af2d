"""Recomputes the bound on the step time over all plans.

The witness lists the devices and dual weights of compute, upload and device count. A step
of D seconds is excluded if, for every split of the layers into stages, the resources that the
stages need between two step ends cost more than all devices provide. Some stage's averaging round
ends the step. Stages after it do all of the next step's work after that moment; stages before it
do at least their backward passes and the forward passes that memory cannot hold in advance.

Quantities have the names of `planner.planning.joint.stage_requirements`, whose inequalities are
derived here a second time.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.checker.bound_witness import (
    PRECISION,
    Floats,
    WitnessDevices,
    applies_to,
    covers,
    heads_of,
)
from planner.checker.memory import stage_memory
from planner.checker.wire_ratio import WIRE_RATIO
from planner.network.dtype import Dtype
from planner.training_plan.choices import Head
from planner.training_plan.model import TrainingPlan
from planner.workload.workload import Workload

BISECTIONS = 30
MEMORY_ROUNDING = 1e-6
BUDGET = 1 + 1e-12
"""Weight of all devices, with rounding."""


def whole_step_bound_s(
    witness: Mapping[str, Any], plan: TrainingPlan, claimed_s: float
) -> float | None:
    """The bound that a witness proves for any single step of all plans on its devices."""

    def proof() -> Callable[[float], bool]:
        return splits_of(witness, plan).excluded

    return proven_s(proof, claimed_s, plan.sync.every_steps)


def proven_s(
    proof: Callable[[], Callable[[float], bool]], claimed_s: float, every_steps: int
) -> float | None:
    """The claimed seconds a step, or the most that a proof excludes; None without one.

    ``proof`` may raise any error of a witness that is not in order. It returns whether so many
    seconds are too short for H steps.
    """
    try:
        is_excluded = proof()
        if is_excluded(every_steps * claimed_s * (1 - PRECISION)):
            return claimed_s
        low, high = 0.0, every_steps * claimed_s
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if is_excluded(middle) else (low, middle)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError, OverflowError):
        return None
    return low / every_steps


def splits_of(witness: Mapping[str, Any], plan: TrainingPlan) -> StageSplits:
    """The splits of the layers that a witness is about; raises `ValueError` if not of this plan."""
    devices = WitnessDevices.from_witness(witness)
    if not applies_to(witness, plan) or not covers(devices, plan, witness.get("measured") is True):
        raise ValueError("devices")
    return StageSplits(devices, witness, plan)


def spreads_in_bf16(w: Workload) -> bool:
    """Whether owners of optimizer state return parameters in 2 bytes, for gradients of 4."""
    formats = (w.precision.compute, w.precision.gradients)
    in_bf16 = w.architecture is not None and formats == (Dtype.BF16, Dtype.FP32)
    return w.optimizer_shards > 1 and in_bf16


class Role(enum.Enum):
    """Position of a stage relative to the stage whose averaging ends the step."""

    WHOLE_PIPELINE = "any stage, if stage 0 ends the step"
    BOUNDARY = "ends the step, and is not stage 0"
    DOWNSTREAM = "after the boundary stage"
    UPSTREAM = "before the boundary stage"


class StageSplits:
    """All splits of the layers into stages, and what the stages have in common."""

    def __init__(
        self, devices: WitnessDevices, witness: Mapping[str, Any], plan: TrainingPlan
    ) -> None:
        self.samples = int(witness["microbatch_samples"])
        self.devices = devices
        self.workload = plan.workload.replace(microbatch_samples=self.samples)
        self.recompute: object = witness["recompute"]
        self.wire_ratio = WIRE_RATIO[plan.codec]
        w = plan.workload
        if spreads_in_bf16(w):
            # a device with a share x of at most 1/2 sends 1 - x of the gradients and receives
            # (m - 1) x, then sends (m - 1) x of the parameters and receives 1 - x, in 2 bytes of 4.
            # What it sends is at least 3/4 of one vector, and of all members 3/4 of what they send
            # in one round; what it receives, or members from aggregators, is at least half
            sends_slowest = all(d.upload <= d.download for d in devices.classes)
            helped = witness.get("helped") is True
            self.wire_ratio = 3 / 4 if sends_slowest and not helped else 1 / 2
        self.has_aggregators = witness.get("helped") is True
        self.regions = int(witness.get("regions", 0))
        self.hierarchical = witness.get("levels") is True or self.regions > 0
        self.every_steps = plan.sync.every_steps
        # whether tied weights are averaged separately; older plans do not
        splits = plan.head_stage > 0 and plan.workload.tied_parameters > 0
        self.averages_tied_apart = self.every_steps == 1 and plan.sync.outer is None
        self.averages_tied_apart &= not splits or len(plan.averaging) > len(plan.stage_layers)
        # H steps between two global averages count as one step
        self.microbatches = plan.workload.batch_samples * plan.sync.every_steps // self.samples
        self.num_layers = len(plan.workload.layers)
        self.flops_per_s, self.memory, self.up, self.down = (
            devices.descending(field) for field in range(4)
        )
        self.memory_sizes, self.size_of = np.unique(self.memory, return_inverse=True)
        # before an exchange ends some may have received nothing, but all have sent their vector
        both = [
            device.upload if self.hierarchical else min(device.upload, device.download)
            for device in devices.classes.elements()
        ]
        self.line_rate = np.sort(np.array(both))[::-1]
        # sums over the m best and the m worst devices
        self.most_line_rate, self.most_down = self.line_rate.cumsum(), self.down.cumsum()
        self.most_flops_per_s, self.most_up = self.flops_per_s.cumsum(), self.up.cumsum()
        self.least_flops_per_s, self.least_up = (
            self.flops_per_s[::-1].cumsum(),
            self.up[::-1].cumsum(),
        )
        self.m = np.arange(1, len(self.flops_per_s) + 1)
        self.fastest = float(self.flops_per_s[0])
        self.totals = (float(self.flops_per_s.sum()), float(self.up.sum()), len(self.m))
        self.stages_by_head = [
            {
                (a, b): Stage(self, a, b, head)
                for a in range(self.num_layers)
                for b in range(a + 1, self.num_layers + 1)
            }
            for head in heads_of(witness)
        ]

    def forward(self, a: int, b: int) -> float:
        """Forward FLOPs of one microbatch through layers a to b - 1."""
        w: Workload = self.workload
        stem = w.stem.forward_flops if a == 0 < b else 0.0
        return (stem + math.fsum(x.forward_flops for x in w.layers[a:b])) * self.samples

    def excluded(self, limit: float) -> bool:
        """Whether every split weighs more than all devices in a step of ``limit`` seconds."""
        return all(self._excluded(limit, stages) for stages in self.stages_by_head)

    def _excluded(self, limit: float, stages: Mapping[tuple[int, int], Stage]) -> bool:
        """As `excluded`, of plans with the head on one end of the pipeline."""
        # dynamic program over the first b layers: before the boundary stage, from it on, and with
        # stage 0 as the stage that ends the step
        upstream, downstream, whole = ([math.inf] * (self.num_layers + 1) for _ in range(3))
        upstream[0] = whole[0] = 0.0
        for b in range(1, self.num_layers + 1):
            for a in range(b):
                stage = stages[a, b]
                after_whole = whole[a] + stage.weight(limit, Role.WHOLE_PIPELINE)
                whole[b] = min(whole[b], after_whole)
                after_downstream = downstream[a] + stage.weight(limit, Role.DOWNSTREAM)
                downstream[b] = min(downstream[b], after_downstream)
                if a > 0:
                    after_boundary = upstream[a] + stage.weight(limit, Role.BOUNDARY)
                    downstream[b] = min(downstream[b], after_boundary)
                if b < self.num_layers:
                    upstream[b] = min(upstream[b], upstream[a] + stage.weight(limit, Role.UPSTREAM))
        return min(whole[self.num_layers], downstream[self.num_layers]) > BUDGET


class Stage:
    """Layers a to b - 1 as a stage; arrays are over its number of devices, 1 to N."""

    def __init__(self, common: StageSplits, a: int, b: int, head: Head) -> None:
        self.common, self.stop = common, b
        self.has_head = b == common.num_layers if head is Head.LAST else a == 0
        w, dev, m, samples = common.workload, common.devices, common.m, common.samples
        self.forward_flops = common.forward(a, b)
        self.head_flops = 3 * w.head.forward_flops * samples if self.has_head else 0.0
        self.input_bytes = w.layers[a - 1].output_bytes * samples if a > 0 else 0.0
        self.output_bytes = w.layers[b - 1].output_bytes * samples if b < common.num_layers else 0.0
        owned = sum(layer.parameters for layer in w.layers[a:b])
        owned += (w.stem.parameters if a == 0 else 0) + (w.head.parameters if self.has_head else 0)
        owned += w.tied_parameters if a > 0 and self.has_head else 0
        # tied weights on two stages are averaged after the stages' own parameters
        apart = common.averages_tied_apart and head is Head.LAST
        split = apart and (a == 0) != (b == common.num_layers)
        vector = (
            (owned - split * w.tied_parameters) * w.gradient_bytes_per_parameter * common.wire_ratio
        )
        self.vector_bytes = vector
        # with aggregators the members still send m vectors in total if they reduce nothing; the
        # same holds until sites have exchanged
        least = common.has_aggregators or common.hierarchical
        self.averaged_bytes = (np.where(m > 1, m, 0) if least else 2 * (m - 1)) * vector
        slowest = np.maximum(self.averaged_bytes / common.most_line_rate, vector / common.line_rate)
        if common.regions:
            # the exchange sends least between two regions, although averaging within regions sends
            # least with more of them: both minima are valid bounds
            slowest = 2 * vector / common.most_line_rate
            nearby = np.minimum(m, common.regions)
            inside = 2 * (m - nearby) * owned * w.gradient_bytes_per_parameter
            self.averaged_bytes = 2 * (nearby - 1) * vector + common.every_steps * inside
        self.round_s = np.where(m > 1, slowest + dev.rtt_s, 0.0)
        # on the fastest device: forward passes of a first microbatch before this stage, backward
        # passes of the last one there, and both in the layers after it, with at least one transfer
        self.hop_in_s = (
            dev.hop_s + self.input_bytes / dev.hop_bytes_per_s if self.input_bytes else 0.0
        )
        self.input_latency_s = dev.hop_s if self.input_bytes else 0.0
        self.upstream_forward_s = common.forward(0, a) / common.fastest
        self.previous_layer_s = common.forward(a - 1, a) / common.fastest if a else 0.0
        self.upstream_backward_s = 2 * self.upstream_forward_s
        self.hop_out_s = (
            dev.hop_s + self.output_bytes / dev.hop_bytes_per_s if self.output_bytes else 0.0
        )
        last_layer_flops = (
            common.forward(common.num_layers - 1, common.num_layers)
            + 3 * w.head.forward_flops * samples
        )
        self.turnaround_s = (
            last_layer_flops + 2 * common.forward(b, common.num_layers)
        ) / common.fastest
        self.tail_s = np.maximum(self.round_s, self.hop_in_s + self.upstream_backward_s)
        # only a round with bytes to send waits for messages on its links
        self.unsent_s = np.where(
            (m > 1) & (vector > 0), dev.rtt_s, self.input_latency_s + self.upstream_backward_s
        )
        self._memory(a, b)

    def _memory(self, a: int, b: int) -> None:
        """FLOPs of B, at least, and microbatches that each device can hold, at most.

        If the stage recomputes no layers, at most half of them, more, or all.
        """
        common, w = self.common, self.common.workload
        needs = stage_memory(w, a, b, runs_head=self.has_head)
        held = common.memory_sizes[:, None] * (1 + MEMORY_ROUNDING) - needs.state - needs.operation
        with np.errstate(divide="ignore", invalid="ignore"):
            suffices = np.floor(held / needs.saved)
        suffices = np.where(needs.saved > 0, suffices, np.where(held >= 0, math.inf, 0.0))
        suffices = np.clip(suffices, 0, common.microbatches)
        available = common.memory_sizes * (1 + MEMORY_ROUNDING) - needs.state
        self.holds_state = available >= 0
        count, half = b - a, (b - a) // 2
        groups = [(0, 0)]
        if common.recompute == "layers":
            groups += [(1, half), (half + 1, count - 1)]
        if common.recompute in (True, "layers"):
            groups.append((count, count))
        # by size of memory
        self.room = [
            (
                2 * self.forward_flops + common.forward(a, a + first),
                suffices[:, first : last + 1].max(axis=1),
            )
            for first, last in groups
            if first <= last
        ]
        self.max_live = [(flops, room[common.size_of]) for flops, room in self.room]
        some = max(live[0] for _, live in self.max_live) >= 1
        self.fits = (
            self.holds_state[common.size_of].cumsum() >= common.m
            if some
            else np.zeros(len(common.m), dtype=bool)
        )
        # a stage has as many devices as its optimizer state has shards
        self.fits &= common.m >= w.optimizer_shards

    def weight(self, limit: float, role: Role) -> float:
        """The least weight of this stage's devices in a step of ``limit`` seconds."""
        if role is Role.UPSTREAM:
            return min(float(weights.min()) for weights in self._upstream_weights(limit))
        return float(self._full_step_weights(limit, role).min())

    def _full_step_weights(self, limit: float, role: Role) -> Floats:
        """Weights if F, H and B follow the step end; a boundary stage may have its inputs."""
        common = self.common
        earliest_s = {
            Role.WHOLE_PIPELINE: self.upstream_forward_s,
            Role.DOWNSTREAM: self.previous_layer_s,
            Role.BOUNDARY: 0.0,
        }[role]
        begin_s = earliest_s + self.hop_in_s
        first_arrival_s = earliest_s + self.input_latency_s
        received_bytes, feasible = self.input_bytes + self.output_bytes, self.fits
        if role is Role.BOUNDARY:
            # a group of one does not average: the previous stage ends no earlier
            begin_s = first_arrival_s = 0.0
            received_bytes, feasible = self.output_bytes, feasible & (common.m > 1)
        flops = 3 * self.forward_flops + self.head_flops
        remaining_s = limit - begin_s - self.tail_s
        feasible = feasible & (
            np.ceil(common.microbatches / common.m) * flops / common.fastest <= remaining_s
        )
        feasible &= (
            common.microbatches * received_bytes
            <= (limit - first_arrival_s - self.tail_s) * common.most_down
        )
        sent_bytes = (
            common.microbatches * (self.input_bytes + self.output_bytes) + self.averaged_bytes
        )
        quiet_s = begin_s + self.forward_flops / common.fastest + self.unsent_s
        return self.weights(
            feasible, [(common.microbatches * flops, remaining_s)], sent_bytes, limit - quiet_s
        )

    def _upstream_weights(self, limit: float) -> Iterator[Floats]:
        """Weights if B, and F beyond what memory holds, follow the step end."""
        common = self.common
        microbatches_per_device = np.ceil(common.microbatches / common.m)
        for backward_flops, live in self.max_live:
            late_forwards = np.maximum(common.microbatches - live.cumsum(), 0)
            begin_s = self.turnaround_s + self.hop_out_s
            remaining_s = limit - self.tail_s
            feasible = self.fits & (
                microbatches_per_device * backward_flops / common.fastest <= remaining_s - begin_s
            )
            feasible &= (
                microbatches_per_device * (backward_flops + self.head_flops)
                + np.maximum(microbatches_per_device - live[0], 0) * self.forward_flops
            ) / common.fastest <= remaining_s
            feasible &= (
                common.microbatches * self.output_bytes
                <= (remaining_s - self.turnaround_s) * common.most_down
            )
            sent_bytes = (
                common.microbatches * self.input_bytes
                + late_forwards * self.output_bytes
                + self.averaged_bytes
            )
            quiet_s = (
                np.where(late_forwards > 0, 0.0, begin_s + backward_flops / common.fastest)
                + self.unsent_s
            )
            flops_within = [
                (
                    # a head on the first stage follows the last stage
                    common.microbatches * (backward_flops + self.head_flops)
                    + late_forwards * self.forward_flops,
                    remaining_s,
                ),
                (common.microbatches * backward_flops, remaining_s - begin_s),
            ]
            yield self.weights(feasible, flops_within, sent_bytes, limit - quiet_s)

    def weights(
        self,
        feasible: NDArray[np.bool_],
        flops_within: list[tuple[Any, Floats]],
        sent_bytes: Any,
        sending_s: Any,
    ) -> Floats:
        """Weights by the number of devices, for FLOPs within seconds, and bytes sent in others."""
        common = self.common
        feasible = feasible & (sending_s > 0)
        flops_per_s = np.zeros(len(common.m))
        for _, remaining_s in flops_within:
            feasible &= remaining_s > 0
        for flops, remaining_s in flops_within:
            flops_per_s = np.maximum(flops_per_s, flops / np.where(feasible, remaining_s, 1.0))
        rate = sent_bytes / np.where(feasible, sending_s, 1.0)
        feasible &= (flops_per_s <= common.most_flops_per_s) & (rate <= common.most_up)
        columns = zip(
            common.devices.weights,
            (
                np.maximum(flops_per_s, common.least_flops_per_s),
                np.maximum(rate, common.least_up),
                common.m,
            ),
            common.totals,
            strict=True,
        )
        weights = sum(
            weight * need / all_of_it for weight, need, all_of_it in columns if weight > 0
        )
        return np.where(feasible, weights, math.inf)
