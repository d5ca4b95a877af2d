"""Explains why no layout fits in memory, and what would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.layout_search import LayoutSearch
from planner.planning.layer_split import Filled, evenly_filled
from planner.planning.problem import PlanningProblem
from planner.planning.workers import degrees, tensor_parallel_workers
from planner.training_plan.choices import Head
from planner.utils.text import counted, quantity
from planner.workload.workload import Workload

SHORTEST = 128
"""Shortest sequence that is proposed as a remedy, in tokens."""


def infeasibility_message(layouts: LayoutSearch, problem: PlanningProblem) -> str:
    """One line: which stage exceeds memory in the tightest split, and remedies."""
    workload, fixed = layouts.problem.workload, layouts.problem.constraints.stages
    numbers = range(1, layouts.problem.max_stages + 1)
    splits = [layouts.initial.tightest(s)[0] for s in (numbers if fixed is None else [fixed])]
    tightest = min(splits)
    split, memory, stage_needs = tightest.layers, tightest.memory, tightest.costs(workload)
    stages = len(split)
    stage = max(range(stages), key=lambda j: stage_needs[j].need_bytes(1) / memory[j])
    costs, (start, stop) = stage_needs[stage], split[stage]
    terms = [
        f"{quantity(costs.state_bytes, 'B')} of weights, gradients and optimizer",
        f"{quantity(costs.saved_bytes, 'B')} of activations",
        f"{quantity(costs.scratch_bytes, 'B')} of the largest operation",
    ]
    samples = workload.microbatch_samples
    microbatches = f"microbatches of {counted(samples, 'sample')}"
    if workload.architecture is not None:
        microbatches += f" of {workload.architecture.sequence} tokens"
    layers = f"layer {start}" if stop == start + 1 else f"layers {start} to {stop - 1}"
    extra = ["embedding"] if start == 0 else []
    extra += ["head"] if stage == tightest.head_stage else []
    named = " and ".join([layers, *extra])
    remedies = [*_remedies(layouts, tightest), *_with_parts(layouts, problem)]
    remedies.append("devices with more memory")
    each = int(layouts.problem.model.min_devices)
    device = "its device" if each == 1 else f"the smallest of its {each} devices"
    return (
        f"no layout fits the devices' memory: of {counted(stages, 'stage')}, the one with {named} "
        f"needs {quantity(costs.need_bytes(1), 'B')} ({', '.join(terms)}) for {microbatches}, and "
        f"{device} has {quantity(memory[stage], 'B')}; what would help: {', '.join(remedies)}"
    )


def _remedies(layouts: LayoutSearch, tightest: Filled) -> Iterator[str]:
    """Changes each of which alone makes some split fit."""
    workload, constraints = layouts.problem.workload, layouts.problem.constraints
    recompute, largest_memory = tightest.recompute, max(tightest.memory)

    def fits(workload: Workload, recompute: Sequence[int | None], memory: Sequence[float]) -> bool:
        filled = evenly_filled(workload, memory, recompute, constraints.layers, head=tightest.head)
        return filled.share <= 1

    for tokens, shorter in _with_shorter_sequences(workload):
        if fits(shorter, recompute, tightest.memory):
            yield f"a shorter sequence (--sequence {tokens})"
            break
    other = Head.LAST if tightest.head is Head.FIRST else Head.FIRST
    if other not in constraints.heads and constraints.every_steps == 1:
        moved = evenly_filled(workload, tightest.memory, recompute, constraints.layers, head=other)
        if moved.share <= 1:
            yield f"the head on the {other} stage (--head {other})"
    everywhere = [len(workload.layers)] * len(recompute)
    if 0 in recompute and fits(workload, everywhere, tightest.memory):
        yield "recomputation (--recompute all)"
    elif None not in recompute and fits(workload, [None] * len(recompute), tightest.memory):
        yield "recomputation of some layers (without --recompute)"
    samples = workload.microbatch_samples
    if samples > 1 and fits(workload.replace(microbatch_samples=1), recompute, tightest.memory):
        yield "smaller microbatches (--microbatch-samples 1)"
    if constraints.layers is not None:
        return
    if constraints.stages is not None:
        numbers = range(1, layouts.problem.max_stages + 1)
        others = [s for s in numbers if layouts.initial.tightest(s)[0].share <= 1]
        if others:
            yield f"another number of stages (--stages {others[0]})"
    elif fits(
        workload,
        recompute[:1] * len(workload.layers),
        [largest_memory] * len(workload.layers),
    ):
        yield "more devices"


def _with_parts(layouts: LayoutSearch, problem: PlanningProblem) -> Iterator[str]:
    """Matrices or optimizer state in parts on several GPUs, if that alone makes some split fit."""
    workload, request = problem.workload, problem.request

    def fits(classes: DeviceClasses, workload: Workload) -> bool:
        each = workload.optimizer_shards * request.optimizer_copies
        fixed = layouts.problem.constraints.stages
        if int(classes.size.sum()) < each * (fixed or 1):
            return False
        parts = LayoutSearch(classes, workload, constraints=layouts.problem.constraints)
        numbers = range(1, parts.problem.max_stages + 1) if fixed is None else [fixed]
        return any(parts.initial.tightest(s)[0].share <= 1 for s in numbers)

    links_known = problem.cluster.devices.gpu_link_bytes_per_s is not None
    if workload.tensor_parallel == 1 and links_known:
        workers = (
            tensor_parallel_workers(problem.cluster, workload, t)
            for t in degrees(problem.cluster, workload)[1:]
        )
        if any(fits(DeviceClasses.of(cluster, None), split) for cluster, split in workers):
            yield "several GPUs a device (--tensor-parallel auto)"
    given = workload.optimizer_shards
    fewer = (given >> k for k in range(1, given.bit_length()))
    for shards in (2, 4, 8) if given == 1 else fewer:
        try:
            request.replace(optimizer_shards=shards)
            shared = workload.replace(optimizer_shards=shards)
        except ValueError:
            return  # not with this request
        all_own = np.asarray(problem.cluster.devices.can_aggregate).all()
        if all_own and fits(layouts.problem.classes, shared):
            yield f"another number of optimizer shards (--optimizer-shards {shards})"
            return


def _with_shorter_sequences(workload: Workload) -> Iterator[tuple[int, Workload]]:
    """The workload with shorter sequences, longest first."""
    arch = workload.architecture
    tokens = 0 if arch is None else arch.sequence // 2
    while arch is not None and tokens >= SHORTEST:
        shorter = Workload.transformer(
            workload.name,
            replace(arch, sequence=tokens),
            batch_samples=workload.batch_samples,
            microbatch_samples=workload.microbatch_samples,
            precision=workload.precision,
        ).replace(
            state_bytes_per_parameter=workload.state_bytes_per_parameter,
            tensor_parallel=workload.tensor_parallel,
            optimizer_shards=workload.optimizer_shards,
        )
        yield tokens, shorter.with_boundary_codec(workload.boundary_codec)
        tokens //= 2
