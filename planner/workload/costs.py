"""Costs of a stage: seconds from FLOPs, memory from bytes.

These formulas are nowhere else, except in `planner.checker`, which has its own.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from planner.workload.transformer import position_parameters, replicated_parameters
from planner.workload.working_memory import WorkingMemory
from planner.workload.workload import Workload

ALL_LAYERS = sys.maxsize
"""As the number of layers that are recomputed: all of a stage."""
BACKWARD_TO_FORWARD = 2.0
"""FLOPs of a backward pass relative to a forward pass: gradients of inputs and of weights.

A stage repeats the forward pass of the layers that it recomputes in addition.
"""


@dataclass(frozen=True)
class StageCosts:
    """Costs of one stage of a model, on any device.

    Attributes
    ----------
    forward_flops
        F of one microbatch.
    backward_flops
        B of one microbatch: `BACKWARD_TO_FORWARD` times as many, and F of recomputed layers.
    head_flops
        H of one microbatch: forward and backward of head and loss; 0 on other stages.
    state_bytes
        Weights, their copies in the format of compute, gradients and optimizer state, of which a
        device may hold one part in `Workload.optimizer_shards`.
    scratch_bytes
        Temporaries of the operation that needs most (`WorkingMemory`), and messages in transfer.
    saved_bytes
        Activations of one microbatch between its F and B, and the stage's output. Of the first
        layers, if they are recomputed, their input alone; if all are, of the outputs only that of
        the head's stage, which H needs.
    output_bytes
        Activations of one microbatch sent to the next stage, on the wire.
    """

    forward_flops: float
    backward_flops: float
    head_flops: float
    state_bytes: float
    scratch_bytes: float
    saved_bytes: float
    output_bytes: float
    gradient_bytes: float

    def forward_s(self, flops: float) -> float:
        """Seconds of F at ``flops`` FLOP/s."""
        return self.forward_flops / flops

    def backward_s(self, flops: float) -> float:
        """Seconds of B at ``flops`` FLOP/s."""
        return self.backward_flops / flops

    def head_s(self, flops: float) -> float:
        """Seconds of H at ``flops`` FLOP/s."""
        return self.head_flops / flops

    def busy_s(self, flops: float) -> float:
        """Seconds of F, H and B of one microbatch at ``flops`` FLOP/s."""
        return (self.forward_flops + self.backward_flops + self.head_flops) / flops

    def need_bytes(self, microbatches: int) -> float:
        """Memory for the stage with so many microbatches between F and B."""
        return self.state_bytes + self.scratch_bytes + microbatches * self.saved_bytes

    def room(self, memory_bytes: float) -> float:
        """Microbatches between F and B that fit in memory.

        Infinite if nothing is saved, 0 if the stage itself does not fit.
        """
        free_bytes = memory_bytes - self.state_bytes - self.scratch_bytes
        if self.saved_bytes == 0:
            return math.inf if free_bytes >= 0 else 0.0
        return max(free_bytes // self.saved_bytes, 0.0)


def stage_costs(
    workload: Workload,
    start: int,
    stop: int,
    *,
    with_head: bool = False,
    recomputed: int = 0,
) -> StageCosts:
    """Costs of the layers ``start`` to ``stop - 1`` as a stage; layer 0 includes the embedding.

    B recomputes the activations of its first ``recomputed`` layers, or of all if it has fewer, or
    if that is true.
    """
    recomputed = stop - start if recomputed is True else min(recomputed, stop - start)
    key = (start, stop, with_head, recomputed)
    cached: StageCosts | None = workload.known_costs.get(key)
    if cached is None:
        cached = workload.known_costs[key] = _stage_costs(
            workload, start, stop, with_head=with_head, recomputed=recomputed
        )
    return cached


def least_memory_costs(
    workload: Workload, start: int, stop: int, *, with_head: bool = False
) -> StageCosts:
    """Costs of the layers as a stage, with as many recomputed as one microbatch fits best with."""
    key = (start, stop, with_head, "least memory")
    cached: StageCosts | None = workload.known_costs.get(key)
    if cached is None:
        # B needs least memory if it recomputes about half of the activations, or more as long as H
        # needs more
        working, samples = _working_memory(workload), workload.microbatch_samples
        of_head = max(working.head - working.layer, 0.0) if with_head else 0.0

        def excess_bytes(recomputed: int) -> float:
            first_kept = start + recomputed
            again = _graph_bytes(workload, start, first_kept)
            return (again - _graph_bytes(workload, first_kept, stop)) * samples - of_head

        best = bisect_left(range(stop - start), 0.0, key=excess_bytes)
        costs = [
            stage_costs(workload, start, stop, with_head=with_head, recomputed=k)
            for k in {0, max(best - 1, 0), best}
        ]
        cached = workload.known_costs[key] = min(costs, key=lambda c: c.need_bytes(1))
    return cached


def _working_memory(workload: Workload) -> WorkingMemory:
    """Computed once per workload."""
    cached: WorkingMemory | None = workload.known_costs.get("working memory")
    if cached is None:
        cached = workload.known_costs["working memory"] = WorkingMemory.of_workload(workload)
    return cached


def _graph_bytes(workload: Workload, start: int, stop: int) -> float:
    """Activations that B of some layers needs, of one sample, and their output."""
    if start == stop:
        return 0.0
    # the output waits for its gradient
    output = workload.held_bytes(stop - 1) if workload.architecture is not None else 0.0
    return workload.stage(start, stop).saved_bytes + output


def _stage_costs(
    workload: Workload, start: int, stop: int, *, with_head: bool, recomputed: int
) -> StageCosts:
    load, head, samples = workload.stage(start, stop), workload.head, workload.microbatch_samples
    parameters = load.parameters + (workload.head_parameters(start) if with_head else 0)
    working = _working_memory(workload)
    again = workload.stage(start, start + recomputed) if recomputed else None
    kept_bytes = _graph_bytes(workload, start + recomputed, stop) * samples
    again_bytes = _graph_bytes(workload, start, start + recomputed) * samples
    scratch = working.scratch_bytes(
        kept_bytes,
        again_bytes,
        first=start == 0,
        with_head=with_head,
        alone=start == 0 and stop == len(workload.layers),
    )
    saved = kept_bytes
    if again is not None:
        # the first stage's input are tokens
        saved += workload.held_bytes(start - 1) * samples if start > 0 else 0.0
        if with_head and recomputed == stop - start:
            saved += workload.held_bytes(stop - 1) * samples
    rounded = parameters
    if start == 0:
        # embeddings are looked up in fp32; a tied head multiplies with a rounded copy
        rounded -= workload.stem.parameters - (workload.tied_parameters if with_head else 0)
    parameters_held, unrounded = parameters, workload.stem.parameters if start == 0 else 0
    if (others := workload.tensor_parallel - 1) and (arch := workload.architecture) is not None:
        copied = others * replicated_parameters(arch, start, stop, with_head=with_head)
        positions = others * position_parameters(arch) if start == 0 else 0
        rounded += copied
        unrounded += positions
        parameters_held += copied + positions
    state_bytes = parameters_held * workload.state_bytes_per_parameter
    state_bytes += rounded * working.rounded_bytes
    if (shards := workload.optimizer_shards) > 1:
        # the GPUs of a worker share what it owns, also of parameters that each of them has
        owned = parameters / shards
        state_bytes += (owned - parameters_held) * workload.precision.optimizer_bytes
        # parameters that operations use as they are, without a copy in another format
        used = unrounded if working.rounded_bytes else parameters_held
        state_bytes += used * workload.precision.parameters.bytes
    return StageCosts(
        forward_flops=load.forward_flops * samples,
        backward_flops=(
            BACKWARD_TO_FORWARD * load.forward_flops + (again.forward_flops if again else 0.0)
        )
        * samples,
        head_flops=(1 + BACKWARD_TO_FORWARD) * head.forward_flops * samples if with_head else 0.0,
        state_bytes=state_bytes,
        scratch_bytes=scratch,
        saved_bytes=saved,
        output_bytes=load.output_bytes * samples,
        gradient_bytes=parameters * workload.gradient_bytes_per_parameter,
    )


def repeated_share(workload: Workload, span: tuple[int, int], recomputed: int) -> float:
    """FLOPs of the layers that a stage recomputes, over those of its F."""
    costs = stage_costs(workload, *span, recomputed=recomputed)
    if not costs.forward_flops:
        return 0.0
    return costs.backward_flops / costs.forward_flops - BACKWARD_TO_FORWARD


def split_costs(
    workload: Workload,
    split: Sequence[tuple[int, int]],
    head_stage: int,
    recompute: Sequence[int] = (),
) -> tuple[StageCosts, ...]:
    """Costs of every stage of a split, with head and loss on ``head_stage``."""
    recomputed = recompute or (0,) * len(split)
    return tuple(
        stage_costs(workload, *span, with_head=j == head_stage, recomputed=recomputed[j])
        for j, span in enumerate(split)
    )
