"""Lower bounds on the step time, whatever the assignment and the order of operations.

They hold under the simulator's default rules (transfers do not slow each other down), compute times
by FLOPs.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from planner.compose.cycle_bounds import cycle_bound_s
from planner.compose.request import Question
from planner.compose.shape import Shape
from planner.search.certificate import Witness


class StepBound(NamedTuple):
    """Seconds that no step beats, and what says so.

    Attributes
    ----------
    seconds
        The bound.
    basis
        The argument, in plain words.
    witness
        What the checker recomputes it from; None: it takes our word.
    """

    seconds: float
    basis: str
    witness: Witness | None


def step_bound(question: Question, shape: Shape) -> StepBound | None:
    """A bound for every placement with this shape; None where compute times were measured.

    Parameters
    ----------
    question
        What is asked, of what.
    shape
        Stages, layers and microbatches.

    Returns
    -------
    StepBound or None
        Of the simulated step.
    """
    request, cluster, workload = question.request, question.cluster, question.workload
    if request.calibration is not None:
        return None
    plain = request.plain_averaging
    if request.skips:
        cycle = request.cycle(shape.stages)
        visited = {0: request.path_stages or 0, 1: shape.stages}
        share_of = {visited[k]: count / len(cycle) for k, count in Counter(cycle).items()}
        each = shape.microbatches // shape.starts
        seconds = cycle_bound_s(cluster, workload, shape.sizes, each, share_of, equal_shares=plain)
        return StepBound(seconds, "loads and start devices of any arrangement", None)
    witness = {
        "kind": "straight step",
        "shapes": [
            {
                "layers": [list(part) for part in shape.layers],
                "microbatch_samples": workload.microbatch_samples,
            }
        ],
    }
    seconds = straight_bound_s(question, shape)
    return StepBound(seconds, "load of the busiest stage, and nearest partners", witness)


def straight_bound_s(question: Question, shape: Shape) -> float:
    """Seconds that no placement in straight pipelines beats.

    The pipeline part: some pipeline gets ``ceil(M / pipelines)`` microbatches. Each stage's device
    must receive its first one through all stages before it, do all of them, and return the last
    one through the same stages. Averaging: every device exchanges its share of eq. 2 with
    ``pipelines - 1`` others, at best its nearest ones; other than in one round of equal shares and
    full precision it is bounded by 0.

    Parameters
    ----------
    question
        What is asked, of what.
    shape
        Stages, layers and microbatches.

    Returns
    -------
    float
        Seconds.
    """
    cluster = question.cluster
    fastest = float(cluster.flops.max())
    costs = shape.costs(question.workload)
    mean = cluster.network.symmetrised()
    off = ~np.eye(len(cluster), dtype=bool)
    count = -(-shape.microbatches // shape.starts)
    # a hop goes there and back once, so twice the mean of both directions bounds the pair
    longest = away = 0.0
    for stage in costs:
        longest = max(longest, away + count * stage.busy_s(fastest))
        away += stage.forward_s(fastest) + stage.backward_s(fastest)
        away += 2 * float(mean.transfer_s(stage.output_bytes)[off].min(initial=np.inf))
    averaging = 0.0
    if question.request.plain_averaging and shape.starts > 1:
        pair = 2 * mean.transfer_s(min(stage.gradient_bytes for stage in costs) / shape.starts)
        np.fill_diagonal(pair, np.inf)
        nearest = np.sort(pair, axis=1)[:, : shape.starts - 1]
        averaging = float(nearest.sum(axis=1).max())
    return longest + averaging
