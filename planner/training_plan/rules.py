"""Rules between a plan's fields that a schema cannot state: what contradicts itself is no plan."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from planner.training_plan.model import AveragingGroup, Operation, Schedule, TrainingPlan
from planner.workload.compute_times import FIELDS

SHARE_TOLERANCE = 1e-9
WEIGHT_TOLERANCE = 1e-9


def contradictions(plan: TrainingPlan) -> Iterator[str]:
    """Rules between fields that a schema cannot state.

    Parameters
    ----------
    plan
        The plan.

    Yields
    ------
    str
        One line each: field, rule, remedy.
    """
    n = len(plan.cluster)
    yield from _assignment_contradictions(plan, n)
    arch = plan.workload.architecture
    if arch is not None and arch.layers != len(plan.workload.layers):
        yield (
            f"workload.architecture.layers: must be the {len(plan.workload.layers)} layers that "
            f"were priced, found {arch.layers}; make the plan again"
        )
    for k, s in enumerate(plan.schedules):
        yield from _schedule_contradictions(plan, s, f"paths.schedules[{k}]", n)
        if s.head != plan.schedules[0].head:
            yield (
                f"paths.schedules[{k}].head: must be {plan.schedules[0].head!r} as in the first "
                f"schedule, found {s.head!r}; keep the head on one stage"
            )
    for t, k in enumerate(plan.cycle):
        if k >= len(plan.schedules):
            yield (
                f"paths.cycle[{t}]: there are {len(plan.schedules)} schedules, found {k}; name one "
                "of them"
            )
    yield from _averaging_contradictions(plan)
    for name in FIELDS:
        values = getattr(plan.compute_times, name)
        if len(values) != n:
            yield (
                f"compute_times.{name}: must have {n} entries, found {len(values)}; give one per "
                "device"
            )


def _assignment_contradictions(plan: TrainingPlan, n: int) -> Iterator[str]:
    groups, layers = plan.assignment.groups, plan.stage_layers
    seen: dict[int, int] = {}
    for j, group in enumerate(groups):
        for d in group:
            where = f"assignment.groups[{j}]"
            if d >= n:
                yield f"{where}: there is no device {d}; devices are 0 to {n - 1}"
            elif d in seen:
                yield (
                    f"{where}: device {d} ({plan.cluster.network.ids[d]}) is listed twice, also in "
                    f"stage {seen[d]}; give it one stage"
                )
            seen[d] = j
    idle = sorted(set(range(n)) - set(seen) - set(plan.averages_for))
    if idle:
        yield (
            f"assignment.groups: device {idle[0]} ({plan.cluster.network.ids[idle[0]]}) has no "
            "stage and helps none to average; give every device one, or plan without it"
        )
    able = np.asarray(plan.cluster.devices.can_compute)
    unable = [d for d in sorted(seen) if d < n and not able[d]]
    if unable:
        yield (
            f"assignment.groups: device {unable[0]} ({plan.cluster.network.ids[unable[0]]}) cannot "
            "compute; let it hold no stage"
        )
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
    here = set(plan.cluster.network.ids)
    for k, name in enumerate(plan.left_out):
        if name in here or name in plan.left_out[:k]:
            state = "takes part in the plan" if name in here else "is listed twice"
            yield f"assignment.left_out[{k}]: {name!r} {state}; list once who takes no part"
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
    grid = plan.assignment.grid
    if grid is not None and tuple(tuple(sorted(c)) for c in grid.T.tolist()) != tuple(
        tuple(sorted(group)) for group in groups
    ):
        yield "assignment.grid: its columns are not the groups; make the plan again"


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
    wanted = [{(kind, b) for kind, own in v.items() for b in own} for v in s.visits(n)]
    for d, ops in enumerate(s.order):
        if len(set(ops)) < len(ops):
            twice = next(op for op in ops if ops.count(op) > 1)
            yield f"{where}.order[{d}]: {twice[0]}{twice[1]} is listed twice; list it once"
        for kind, b in sorted(wanted[d] ^ set(ops)):
            state = "is missing" if (kind, b) in wanted[d] else "does not belong to this device"
            yield f"{where}.order[{d}]: {kind}{b} {state}; let the order follow the paths"
            return
    stuck = _stuck(s)
    if stuck is not None:
        d, (kind, b) = stuck
        yield (
            f"{where}.order[{d}]: deadlock, {kind}{b} on device {d} waits for itself; reorder so "
            "that no two devices wait for each other"
        )


def _ascends(stages: list[int]) -> bool:
    """Whether stages ascend, but for disjoint neighbours s + 1, s (CC2)."""
    order, k = list(stages), 1  # the first stage stays where it is
    while k + 1 < len(order):
        if order[k] == order[k + 1] + 1:
            order[k], order[k + 1] = order[k + 1], order[k]
            k += 1
        k += 1
    return order == sorted(set(order))


def _stuck(s: Schedule) -> tuple[int, Operation] | None:
    """A device and the operation it waits for in vain, None if all can be done."""
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


def _averaging_contradictions(plan: TrainingPlan) -> Iterator[str]:
    groups = plan.assignment.groups
    if len(plan.averaging) != len(groups):
        yield (
            f"averaging.stages: must have {len(groups)} entries, found {len(plan.averaging)}; give "
            "one per stage"
        )
        return
    for j, rounds in enumerate(plan.averaging):
        for r, averaging_groups in enumerate(rounds):
            where = f"averaging.stages[{j}].rounds[{r}]"
            helpers = {d for g in averaging_groups for d in g.helpers}
            members = sorted(d for g in averaging_groups for d in g.members)
            trained = [d for d in members if d not in helpers]
            if trained != sorted(groups[j]):
                yield (
                    f"{where}: its groups must hold each device of stage {j} once, and give sums "
                    f"back to it, found {trained}; correct members and receives"
                )
            for g in averaging_groups:
                if not len(g.members) == len(g.shares) == len(g.contributes) == len(g.receives):
                    yield (
                        f"{where}: members, shares, contributes and receives differ in length; "
                        "align them"
                    )
                elif abs(sum(g.shares) - 1) > SHARE_TOLERANCE:
                    yield f"{where}: shares must sum to 1, found {sum(g.shares):g}; rescale them"
                elif not any(g.contributes):
                    yield f"{where}: nobody contributes; let at least one member do"
                else:
                    yield from _share_contradictions(plan, g, where)
            if helpers and len(rounds) > 1:
                yield (
                    f"{where}: device {min(helpers)} holds no stage, and there are {len(rounds)} "
                    "rounds; let such devices help in a single round"
                )
        yield from _weights_contradictions(plan, j)
    yield from _helpers_contradictions(plan)


def _share_contradictions(plan: TrainingPlan, group: AveragingGroup, where: str) -> Iterator[str]:
    """Who sums can do so, and who only sums does."""
    sums = np.asarray(plan.cluster.devices.can_aggregate)
    rows = zip(group.members, group.shares, group.contributes, group.receives, strict=True)
    for d, share, gives, gets in rows:
        if share > 0 and len(group.members) > 1 and d < len(sums) and not sums[d]:
            yield f"{where}: device {d} cannot aggregate, found the share {share:g}; give it none"
        if not gets and (gives or share == 0):
            what = "contributes" if gives else "sums nothing"
            yield f"{where}: device {d} gets nothing back and {what}; let it sum a share, no more"


def _helpers_contradictions(plan: TrainingPlan) -> Iterator[str]:
    """A device without a stage is in one group of one stage: no round waits for another."""
    helpers = [d for rounds in plan.averaging for r in rounds for g in r for d in g.helpers]
    for d in sorted(set(helpers)):
        if d >= len(plan.cluster):
            yield f"averaging.stages: there is no device {d}; name one of the {len(plan.cluster)}"
        elif d in plan.stage_of:
            yield (
                f"averaging.stages: device {d} holds stage {plan.stage_of[d]}, so it must get sums "
                "back; correct receives"
            )
        elif helpers.count(d) > 1:
            yield f"averaging.stages: device {d} helps in {helpers.count(d)} groups; leave one"


def _weights_contradictions(plan: TrainingPlan, j: int) -> Iterator[str]:
    """Every gradient of a stage must reach every device of it with the same weight."""
    group, rounds = plan.assignment.groups[j], plan.averaging[j]
    place = {d: i for i, d in enumerate(group)}
    if any(
        d not in place and d not in g.helpers
        for groups in rounds
        for g in groups
        for d in g.members
    ):
        return  # already said
    # weights[i, k]: how much of k's gradient i has; several rounds take means, one takes the sum
    weights = np.eye(len(group))
    for groups in rounds:
        before = weights.copy()
        for g in groups:
            rows = [place[d] for d in g.members if d in place]
            gives = zip(g.members, g.contributes, strict=False)
            giving = [place[d] for d, flag in gives if flag and d in place]
            total = before[giving].sum(axis=0)
            weights[rows] = total / len(rows) if len(rounds) > 1 else total
    if len(rounds) > 1:
        weights *= len(group)
    has_gradient = [
        place[d] for d in group if any(k == "B" for s in plan.schedules for k, _ in s.order[d])
    ]
    off = np.abs(weights[:, has_gradient] - 1)
    if off.size and off.max() > WEIGHT_TOLERANCE:
        i, k = np.unravel_index(int(off.argmax()), off.shape)
        yield (
            f"averaging.stages[{j}]: device {group[int(i)]} gets the gradient of device "
            f"{group[has_gradient[int(k)]]} with weight {weights[i, has_gradient[int(k)]]:g} "
            "instead of 1; let every device with gradients contribute, in rounds that mix all"
        )
