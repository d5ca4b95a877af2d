"""Recomputes the bound on a straight plan's step.

The bound covers the time between two step ends. At the first of them, the devices of some stage
begin together. One microbatch goes from there to the last stage and back; at one stage on its way
all microbatches queue. Then every device averages, at best with its best connected partners.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from planner.checker.plan_network import MessageRates, pairs_s
from planner.checker.wire_ratio import WIRE_RATIO
from planner.training_plan.choices import Head
from planner.training_plan.model import TrainingPlan
from planner.workload.compute_times import FROM_FLOPS


def straight_step_bound_s(witness: Mapping[str, Any], plan: TrainingPlan) -> float | None:
    """The least bound over the witness's shapes; None if it is malformed or of another plan."""
    if not _is_straight(plan) or plan.compute_times.source != FROM_FLOPS:
        return None
    if plan.averages_for:  # aggregators only affect averaging
        plan = plan.replace(cluster=plan.cluster.subset(sorted(plan.stage_of)))
    plan_shape = ([list(span) for span in plan.stage_layers], plan.workload.microbatch_samples)
    sizes = [b - a for a, b in plan.stage_layers]
    recomputes_all = [count == n for count, n in zip(plan.recompute, sizes, strict=True)]
    bounds: list[float] = []
    has_plan_shape = False
    try:
        for shape in witness["shapes"]:
            layers = [[int(a), int(b)] for a, b in shape["layers"]]
            samples = int(shape["microbatch_samples"])
            recompute = [bool(flag) for flag in shape.get("recompute", [False] * len(layers))]
            has_plan_shape |= (layers, samples) == plan_shape and all(
                not claimed or recomputes
                for claimed, recomputes in zip(recompute, recomputes_all, strict=True)
            )
            bounds.append(_shape_bound_s(plan, layers, samples, recompute))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError, OverflowError):
        return None
    return min(bounds) if has_plan_shape else None


def _is_straight(plan: TrainingPlan) -> bool:
    """Whether in every schedule the paths are the grid's rows with equal microbatch counts."""
    grid = plan.assignment.grid
    if grid is None:
        return False
    rows = {tuple(row) for row in grid.tolist()}
    for s in plan.schedules:
        count = Counter(tuple(path) for path in s.paths)
        if set(count) != rows or min(count.values()) < len(s.paths) // len(rows):
            return False
    return True


def _shape_bound_s(
    plan: TrainingPlan, layers: list[list[int]], samples: int, recompute: list[bool]
) -> float:
    w, n, stages = plan.workload, len(plan.cluster), len(layers)
    if n % stages or layers[0][0] != 0 or layers[-1][1] != len(w.layers):
        raise ValueError("shape")
    if any(a >= b for a, b in layers) or any(
        layers[j][1] != layers[j + 1][0] for j in range(stages - 1)
    ):
        raise ValueError("layers")
    if len(recompute) != stages:
        raise ValueError("recompute")
    if plan.sync.delayed:
        raise ValueError("delayed averaging")
    interval = plan.sync.every_steps
    shares = _shares(plan) if n > stages else None
    averages = _one_step_s(plan, layers, samples, recompute, shares)
    if interval == 1:
        return averages
    # without averaging, devices of a stage end independently, as with unknown shares
    return (
        averages + (interval - 1) * _one_step_s(plan, layers, samples, recompute, None)
    ) / interval


def _one_step_s(
    plan: TrainingPlan,
    layers: list[list[int]],
    samples: int,
    recompute: list[bool],
    shares: str | None,
) -> float:
    """Time between step ends, with averaging by ``shares`` or, if None, without."""
    n, stages = len(plan.cluster), len(layers)
    pipelines = n // stages
    microbatches = plan.workload.batch_samples // samples
    fewest = microbatches // pipelines
    count = fewest if shares is None else -(-microbatches // pipelines)
    head_stage = 0 if plan.schedules[0].head is Head.FIRST else stages - 1
    averaging = [[0.0] * n] * stages
    if shares is not None:
        averaging = [
            [_averaging_s(plan, d, vector, pipelines, shares) for d in range(n)]
            for vector in _vectors(plan, layers, head_stage)
        ]
    slowest_member = [sorted(row)[pipelines - 1] for row in averaging]
    least = math.inf
    # a single pipeline does not average: its first stage ends last
    for begin in range(stages if pipelines > 1 else 1):
        return_s = [
            _return_s(plan, layers, samples, recompute, begin, q, count) for q in range(stages)
        ]
        ends_s = [return_s[q] + slowest_member[q] for q in range(stages)]
        ends_s += [min(return_s[q] + averaging[q][d] for q in range(stages)) for d in range(n)]
        if shares is not None and stages > 1:
            ends_s.append(_link_s(plan, layers, samples, fewest) + min(slowest_member))
        least = min(least, max(ends_s))
    return least


def _return_s(
    plan: TrainingPlan,
    layers: list[list[int]],
    samples: int,
    recompute: list[bool],
    begin: int,
    end_stage: int,
    count: int,
) -> float:
    """Time from the begin of stage ``begin`` to the last backward pass of stage ``end_stage``."""
    w, last = plan.workload, len(layers) - 1
    speed = max(float(flops) for flops in plan.cluster.flops)
    head_stage = 0 if plan.schedules[0].head is Head.FIRST else last
    forward = []
    for j, (a, b) in enumerate(layers):
        flops = sum(w.layers[k].forward_flops for k in range(a, b))
        forward.append((flops + (w.stem.forward_flops if j == 0 else 0.0)) * samples / speed)
    backward = [
        (3 if twice else 2) * flops for flops, twice in zip(forward, recompute, strict=True)
    ]
    head = 3 * w.head.forward_flops * samples / speed
    hop = [_fastest_hop_s(plan, w.layers[b - 1].output_bytes * samples) for _, b in layers[:-1]]
    # the path of one microbatch, as (operation, seconds)
    chain: list[tuple[str, float]] = []
    for j in range(begin, last + 1):
        chain.append((f"F{j}", forward[j]))
        chain.append(("hop", hop[j] if j < last else 0.0))
    chain.append(("H", head))
    for j in range(last, -1, -1):
        chain.append((f"B{j}", backward[j]))
        chain.append(("hop", hop[j - 1] if j > 0 else 0.0))
    names = [name for name, _ in chain]
    longest = 0.0
    for m in range(end_stage, last + 1):
        queue = backward[m]
        first = names.index(f"F{m}" if m >= begin else f"B{m}")
        if m >= begin:
            queue += forward[m] + (head if m == head_stage else 0.0)
        before_s = sum(seconds for _, seconds in chain[:first])
        after = chain[names.index(f"B{m}") + 1 : names.index(f"B{end_stage}") + 1]
        longest = max(longest, before_s + count * queue + sum(seconds for _, seconds in after))
    return longest


def _fastest_hop_s(plan: TrainingPlan, message_bytes: float) -> float:
    off = ~np.eye(len(plan.cluster), dtype=bool)
    return float(pairs_s(plan, message_bytes)[off].min())


def _link_s(plan: TrainingPlan, layers: list[list[int]], samples: int, count: int) -> float:
    """Time of one pipeline's messages on the best pair of the worst-connected device."""
    message = min(plan.workload.layers[b - 1].output_bytes for _, b in layers[:-1]) * samples
    rate = MessageRates(plan).of_all()
    np.fill_diagonal(rate, 0.0)
    return count * message / float(np.maximum(rate, rate.T).max(axis=1).min())


def _shares(plan: TrainingPlan) -> str | None:
    """``"equal"``, ``"any"`` or ``"aggregators"`` for one round of all; None otherwise."""
    # entries after the stages' own average what two stages share
    averaging = plan.averaging[: len(plan.stage_layers)]
    if any(len(rounds) != 1 or len(rounds[0]) != 1 for rounds in averaging):
        return None
    groups = [rounds[0][0] for rounds in averaging]
    if not all(group.contributes == group.receives for group in groups):
        return None
    if plan.averages_for:
        return "aggregators"
    return "equal" if all(len(set(group.shares)) == 1 for group in groups) else "any"


def _vectors(plan: TrainingPlan, layers: list[list[int]], head_stage: int) -> list[float]:
    """Bytes on the wire of every stage's gradients."""
    w = plan.workload
    parameters = [sum(w.layers[k].parameters for k in range(a, b)) for a, b in layers]
    parameters[0] += w.stem.parameters
    parameters[head_stage] += w.head.parameters
    if layers[head_stage][0] > 0:
        if len(plan.averaging) > len(layers):  # averaged after the rest, by both stages
            parameters[0] -= w.tied_parameters
        else:
            parameters[head_stage] += w.tied_parameters
    wire = WIRE_RATIO[plan.codec]
    return [count * w.gradient_bytes_per_parameter * wire for count in parameters]


def _averaging_s(plan: TrainingPlan, d: int, vector: float, members: int, shares: str) -> float:
    """Least seconds of a round for device ``d`` in a group of ``members``."""
    network, other_devices = plan.cluster.network, [e for e in range(len(plan.cluster)) if e != d]
    rtt_s = sorted(float(network.latency_s[d, e] + network.latency_s[e, d]) for e in other_devices)
    out = sorted((float(network.bandwidth_bytes_per_s[d, e]) for e in other_devices), reverse=True)
    into = sorted((float(network.bandwidth_bytes_per_s[e, d]) for e in other_devices), reverse=True)
    upload, download = plan.cluster.upload_bytes_per_s, plan.cluster.download_bytes_per_s
    up = out[0] if upload is None else float(upload[d])
    down = into[0] if download is None else float(download[d])
    partners = members - 1
    if shares == "aggregators":  # a member sends and receives at least the whole vector
        return vector / min(up, down)
    if shares == "equal":
        share = vector / members
        sent = max(2 * share / out[partners - 1], 2 * partners * share / up)
        received = max(2 * share / into[partners - 1], 2 * partners * share / down)
        return max(sent, received) + rtt_s[partners - 1]
    sent = vector / min(up, sum(out[:partners]))
    return max(sent, vector / min(down, sum(into[:partners]))) + rtt_s[0]
