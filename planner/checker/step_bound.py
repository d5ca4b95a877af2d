"""The bound on a straight plan's step, computed again from its definition.

A stage's device receives its first microbatch through the stages before it, does all of its
pipeline's share and returns the last one the same way; then every device exchanges its share of the
gradients with the other pipelines' devices, at best the nearest ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from planner.training_plan.choices import Codec, Head
from planner.training_plan.model import TrainingPlan


def straight_step_bound_s(witness: Mapping[str, Any], plan: TrainingPlan) -> float | None:
    """The least over the witness's shapes; None where it is malformed or another plan's.

    Parameters
    ----------
    witness
        ``kind`` "straight step", ``shapes``: per shape its ``layers`` and ``microbatch_samples``.
        The plan's own must be among them.
    plan
        What is judged.

    Returns
    -------
    float or None
        Seconds that no placement in these shapes beats.
    """
    own = ([list(part) for part in plan.stage_layers], plan.workload.microbatch_samples)
    found: list[float] = []
    seen = False
    try:
        for shape in witness["shapes"]:
            layers = [[int(a), int(b)] for a, b in shape["layers"]]
            samples = int(shape["microbatch_samples"])
            seen |= (layers, samples) == own
            found.append(_shape_bound_s(plan, layers, samples))
    except (KeyError, TypeError, ValueError, ZeroDivisionError, IndexError, OverflowError):
        return None
    return min(found) if seen else None


def _shape_bound_s(plan: TrainingPlan, layers: list[list[int]], samples: int) -> float:
    w, n, stages = plan.workload, len(plan.cluster), len(layers)
    if n % stages or layers[0][0] != 0 or layers[-1][1] != len(w.layers):
        raise ValueError("shape")
    if any(a >= b for a, b in layers) or any(
        layers[j][1] != layers[j + 1][0] for j in range(stages - 1)
    ):
        raise ValueError("layers")
    pipelines = n // stages
    share = -(-(w.batch_samples // samples) // pipelines)
    speed = max(float(flops) for flops in plan.cluster.flops)
    head_stage = 0 if plan.schedules[0].head is Head.FIRST else stages - 1
    longest = on_the_way = 0.0
    for j, (a, b) in enumerate(layers):
        forward = sum(w.layers[k].forward_flops for k in range(a, b))
        forward += w.stem.forward_flops if j == 0 else 0.0
        head = 3 * w.head.forward_flops if j == head_stage else 0.0
        through = 3 * forward * samples / speed
        longest = max(longest, on_the_way + share * (through + head * samples / speed))
        if j + 1 < stages:
            message = w.layers[b - 1].output_bytes * samples
            pairs = _there_and_back_s(plan, message)
            on_the_way += through + min(pairs[x][y] for x in range(n) for y in range(n) if x != y)
    return longest + _averaging_s(plan, layers, pipelines, head_stage)


def _there_and_back_s(plan: TrainingPlan, message_bytes: float) -> list[list[float]]:
    """Twice the transfer over the mean of both directions, for every pair."""
    network = plan.cluster.network
    latency, rate = network.latency_s, network.bandwidth_bytes_per_s
    with np.errstate(invalid="ignore"):
        both = latency + latency.T + 4 * message_bytes / (rate + rate.T)
    rows: list[list[float]] = both.tolist()
    return rows


def _averaging_s(
    plan: TrainingPlan, layers: Sequence[Sequence[int]], pipelines: int, head_stage: int
) -> float:
    """The last device to have exchanged with its nearest partners; 0 where eq. 2 does not hold."""
    plain = plan.codec is Codec.NONE and all(
        len(rounds) == 1 and all(len(set(g.shares)) == 1 for g in rounds[0])
        for rounds in plan.averaging
    )
    if not plain or pipelines == 1:
        return 0.0
    w = plan.workload
    parameters = [sum(w.layers[k].parameters for k in range(a, b)) for a, b in layers]
    parameters[0] += w.stem.parameters
    parameters[head_stage] += w.head.parameters
    share = min(parameters) * w.gradient_bytes_per_parameter / pipelines
    slowest = 0.0
    for d, row in enumerate(_there_and_back_s(plan, share)):
        others = sorted(seconds for e, seconds in enumerate(row) if e != d)
        slowest = max(slowest, sum(others[: pipelines - 1]))
    return slowest
