"""Rules between the fields of a plan that a schema cannot express."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.network.dtype import Dtype
from planner.training_plan.averaging_rules import averaging_contradictions, length_mismatches
from planner.training_plan.choices import Codec, Phase, Wiring
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Operation, Schedule
from planner.utils.text import counted
from planner.workload.compute_times import FIELDS


def contradictions(plan: TrainingPlan) -> Iterator[str]:
    """Broken rules between fields."""
    n = len(plan.cluster)
    yield from _assignment_contradictions(plan, n)
    yield from _part_contradictions(plan, n)
    yield from _naming_contradictions(plan, n)
    arch = plan.workload.architecture
    if arch is not None and arch.layers != len(plan.workload.layers):
        yield (
            f"workload.architecture.layers: must be the {len(plan.workload.layers)} layers that "
            f"were priced, found {arch.layers}; make the plan again"
        )
    for count in sorted(set(plan.gpu_counts) - {plan.workload.tensor_parallel}):
        rule = ""
        if count > plan.workload.tensor_parallel:
            rule = f"must be at most workload.tensor_parallel, {plan.workload.tensor_parallel}"
        elif count > 1 and (arch is None or not arch.splits_into(count)):
            rule = "must divide the model's heads and widths"
        if rule:
            yield f"devices.gpu_counts: {rule}, found {count}; make the plan again"
    if plan.codec is not Codec.NONE:
        yield from _codec_contradictions(plan)
    if plan.wiring is Wiring.STOCHASTIC:
        yield from _routing_contradictions(plan)
    yield from averaging_contradictions(plan)
    if plan.clip is not None and plan.sync.local_steps:
        outer = "" if plan.sync.outer is None else " with sync.outer"
        yield (
            "averaging.clip: the norm is known where every step averages gradients, found "
            f"sync.every_steps {plan.sync.every_steps}{outer}; leave one of them out"
        )
    if plan.workload.precision.scales_loss and plan.sync.local_steps:
        outer = "" if plan.sync.outer is None else " with sync.outer"
        yield (
            "workload.precision: in fp16 all devices change the loss scale together, which needs "
            f"steps that average gradients, found sync.every_steps {plan.sync.every_steps}{outer}; "
            "plan with --precision fp32, or with --sync-every 1"
        )


def _codec_contradictions(plan: TrainingPlan) -> Iterator[str]:
    gradients = plan.workload.precision.gradients
    if gradients is not Dtype.FP32:
        yield (
            f"averaging.codec: must be none where gradients are averaged in {gradients}, found "
            f"{plan.codec}, which is made from fp32; choose one of the two"
        )
    for j, rounds in enumerate(plan.averaging):
        whole = sum(groups[0].phase is Phase.ALL for groups in rounds if groups)
        if whole > 1:
            yield (
                f"averaging.codec: must be none where a stage averages in several rounds of "
                f"groups, found {plan.codec} with {whole} rounds of stage {j}; each group of the "
                "second round would encode for itself, so that the stage's devices would differ"
            )


def inconsistencies(plan: TrainingPlan) -> Iterator[str]:
    """Broken rules without which the others cannot be evaluated: references must exist."""
    n = len(plan.cluster)
    yield from _assignment_contradictions(plan, n)
    yield from _naming_contradictions(plan, n)


def _naming_contradictions(plan: TrainingPlan, n: int) -> Iterator[str]:
    """Schedules, cycle, times and groups must refer to existing items."""
    for k, s in enumerate(plan.schedules):
        yield from _schedule_contradictions(plan, s, f"paths.schedules[{k}]", n)
        if s.head != plan.schedules[0].head:
            yield (
                f"paths.schedules[{k}].head: must be {plan.schedules[0].head!r} as in the first "
                f"schedule, found {s.head!r}; keep the head on one stage"
            )
    if not plan.cycle:
        yield "paths.cycle: must have an entry an iteration, found none; name a schedule"
        return
    for t, k in enumerate(plan.cycle):
        if not 0 <= k < len(plan.schedules):
            yield (
                f"paths.cycle[{t}]: there are {len(plan.schedules)} schedules, found {k}; name one "
                "of them"
            )
    for name in FIELDS:
        values = getattr(plan.compute_times, name)
        if len(values) != n:
            yield (
                f"compute_times.{name}: must have {n} entries, found {len(values)}; give one per "
                "device"
            )
    for j, rounds in enumerate(plan.averaging):
        named = (d for groups in rounds for group in groups for d in group.members)
        if (strange := max(named, default=0)) >= n:
            yield f"averaging.stages[{j}]: there is no device {strange}; devices are 0 to {n - 1}"
    yield from length_mismatches(plan)


def _part_contradictions(plan: TrainingPlan, n: int) -> Iterator[str]:
    """Every device must have a role that it can fill."""
    idle = sorted(set(range(n)) - set(plan.stage_of) - set(plan.averages_for))
    if idle:
        yield (
            f"assignment.groups: device {idle[0]} ({plan.cluster.network.ids[idle[0]]}) has no "
            "stage and helps none to average; give every device one, or plan without it"
        )
    able = np.asarray(plan.cluster.devices.can_compute)
    unable = [d for d in sorted(plan.stage_of) if d < n and not able[d]]
    if unable:
        yield (
            f"assignment.groups: device {unable[0]} ({plan.cluster.network.ids[unable[0]]}) cannot "
            "compute; let it hold no stage"
        )
    grid = plan.assignment.grid
    groups = list(map(sorted, plan.assignment.groups))
    if grid is not None and list(map(sorted, grid.T.tolist())) != groups:
        yield "assignment.grid: its columns are not the groups; make the plan again"


def _assignment_contradictions(plan: TrainingPlan, n: int) -> Iterator[str]:
    groups, layers = plan.assignment.groups, plan.stage_layers
    stage_of: dict[int, int] = {}
    for j, group in enumerate(groups):
        for d in group:
            where = f"assignment.groups[{j}]"
            if d >= n:
                yield f"{where}: there is no device {d}; devices are 0 to {n - 1}"
            elif d in stage_of:
                yield (
                    f"{where}: device {d} ({plan.cluster.network.ids[d]}) is listed twice, also in "
                    f"stage {stage_of[d]}; give it one stage"
                )
            stage_of[d] = j
    if len(layers) != len(groups):
        yield (
            f"assignment.layers: must have {len(groups)} ranges, found {len(layers)}; give one per "
            "stage"
        )
        return
    if len(plan.recompute) != len(groups):
        yield (
            f"assignment.recompute: must have {len(groups)} entries, found {len(plan.recompute)}; "
            "give one per stage"
        )
    for j, (recomputed, (start, stop)) in enumerate(zip(plan.recompute, layers, strict=False)):
        if recomputed > stop - start:
            yield (
                f"assignment.recompute[{j}]: is {recomputed}, but the stage has "
                f"{counted(stop - start, 'layer')}; give at most {stop - start}"
            )
    ids = set(plan.cluster.network.ids)
    listed: set[str] = set()
    for k, name in enumerate(plan.left_out):
        if name in ids or name in listed:
            state = "takes part in the plan" if name in ids else "is listed twice"
            yield f"assignment.left_out[{k}]: {name!r} {state}; list each unused device once"
        listed.add(name)
    start = 0
    for j, (a, b) in enumerate(layers):
        if a != start or b <= a:
            yield (
                f"assignment.layers[{j}]: must start at layer {start} and hold at least one layer, "
                f"found [{a}, {b}]; let stages follow each other"
            )
        start = b
    if start != len(plan.workload.layers):
        yield (
            f"assignment.layers: must cover all {len(plan.workload.layers)} layers, found {start}; "
            "extend the last stage"
        )


def _schedule_contradictions(plan: TrainingPlan, s: Schedule, where: str, n: int) -> Iterator[str]:
    stage_of = plan.stage_of
    w = plan.workload
    if len(s.paths) * w.microbatch_samples != w.batch_samples:
        yield (
            f"{where}.paths: must be {w.batch_samples / w.microbatch_samples:g}, "
            f"{w.batch_samples} samples in microbatches of {w.microbatch_samples}, found "
            f"{len(s.paths)}; give one path a microbatch"
        )
    for b, path in enumerate(s.paths):
        for d in path:
            if d not in stage_of:
                yield (
                    f"{where}.paths[{b}]: device {d} holds no stage; route the microbatch through "
                    "devices of the assignment"
                )
                return
        if len(set(path)) < len(path):
            yield f"{where}.paths[{b}]: visits a device twice, found {list(path)}; visit each once"
        stages = [stage_of[d] for d in path]
        if stages[0] != 0 or not _ascends(stages):
            yield (
                f"{where}.paths[{b}]: must start in stage 0 and ascend, but for swaps of "
                f"neighbouring stages, found stages {stages}; reorder it"
            )
    if len(s.order) != n:
        yield f"{where}.order: must have {n} lists, found {len(s.order)}; give one per device"
        return
    expected = [
        {(kind, b) for kind, microbatches in v.items() for b in microbatches} for v in s.visits(n)
    ]
    for d, ops in enumerate(s.order):
        if len(set(ops)) < len(ops):
            twice = next(op for op in ops if ops.count(op) > 1)
            yield f"{where}.order[{d}]: {twice[0]}{twice[1]} is listed twice; list it once"
        for kind, b in sorted(expected[d] ^ set(ops)):
            state = "is missing" if (kind, b) in expected[d] else "does not belong to this device"
            yield f"{where}.order[{d}]: {kind}{b} {state}; let the order follow the paths"
            return
    stuck = _find_deadlock(s)
    if stuck is not None:
        d, (kind, b) = stuck
        yield (
            f"{where}.order: deadlock: device {d} ({plan.cluster.network.ids[d]}) waits for "
            f"{kind}{b}, which can never start; reorder its operations so that no two devices wait "
            "for each other"
        )


def _routing_contradictions(plan: TrainingPlan) -> Iterator[str]:
    """With stochastic wiring there is one schedule, and paths visit all stages."""
    if len(plan.schedules) > 1:
        yield (
            f"paths.schedules: one where wiring is stochastic, found {len(plan.schedules)}; leave "
            "one, or plan without --wiring stochastic"
        )
        return
    if plan.two_frequency:
        yield (
            "averaging.stages: devices that choose paths know how many samples they had, not those "
            "with whom they average in every step of H, found groups that average "
            "'within'; let all average every H steps, or plan without --wiring stochastic"
        )
    stage_of, all_stages = plan.stage_of, list(range(len(plan.stage_layers)))
    for b, path in enumerate(plan.schedules[0].paths):
        stages = [stage_of.get(d) for d in path]
        if stages != all_stages:
            yield (
                f"paths.schedules[0].paths[{b}]: must visit all stages in order where wiring is "
                f"stochastic, found {stages}; plan without --path-stages, or without "
                "--wiring stochastic"
            )
            return
    visited = {d for path in plan.schedules[0].paths for d in path}
    for d in sorted(set(stage_of) - visited):
        yield (
            f"paths.schedules[0].paths: device {d} ({plan.cluster.network.ids[d]}) is on none, so "
            "that stochastic wiring has no part to begin with; route a microbatch over it, or plan "
            "without it"
        )


def _ascends(stages: list[int]) -> bool:
    """Whether stages ascend, except for disjoint neighbours s + 1, s (CC2)."""
    order, k = list(stages), 1  # the first stage stays where it is
    while k + 1 < len(order):
        if order[k] == order[k + 1] + 1:
            order[k], order[k + 1] = order[k + 1], order[k]
            k += 1
        k += 1
    return order == sorted(set(order))


def _find_deadlock(s: Schedule) -> tuple[int, Operation] | None:
    """A device and the operation that blocks it; None if there is no deadlock."""
    chains = [s.chain(b) for b in range(len(s.paths))]
    reached = [0] * len(chains)
    pointer = [0] * len(s.order)
    waiting = list(range(len(s.order)))
    while waiting:
        d = waiting.pop()
        while pointer[d] < len(s.order[d]):
            kind, b = s.order[d][pointer[d]]
            if chains[b][reached[b]] != (kind, d):
                break
            pointer[d] += 1
            reached[b] += 1
            if reached[b] < len(chains[b]):
                waiting.append(chains[b][reached[b]][1])
    return next(
        ((d, ops[pointer[d]]) for d, ops in enumerate(s.order) if pointer[d] < len(ops)), None
    )
