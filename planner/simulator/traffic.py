"""Bytes that a plan sends between each pair of devices in a step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from planner.simulator.averaging_rounds import group_bytes
from planner.simulator.program import compile_plan
from planner.simulator.resources import NONE, LinkResources
from planner.training_plan.averaging_group import StageAveraging
from planner.training_plan.choices import Codec, Phase
from planner.training_plan.model import TrainingPlan

Floats = NDArray[np.float64]


def sent_bytes(plan: TrainingPlan) -> Floats:
    """Bytes of activations, their gradients and averaging.

    Returns
    -------
    ndarray
        ``float[N, N]``, from row to column: means over the cycle, and over the steps of which one
        averages.
    """
    program = compile_plan(plan, LinkResources.of(plan.cluster), plan.workload)
    work, pairs, n = program.work, program.pairs, len(plan.cluster)
    averaging = zip(plan.averaging, plan.vector_bytes(), strict=True)
    sent = averaged_bytes(averaging, plan.codec, n, plan.sync.every_steps)
    for schedule in plan.cycle:
        mine = work.order[work.first[schedule * n] : work.first[(schedule + 1) * n]]
        mine = mine[work.pair[mine] != NONE]
        pair = work.pair[mine]
        ends = (pairs.source[pair], pairs.destination[pair])
        np.add.at(sent, ends, work.size[mine] / len(plan.cycle))
    return sent


def averaged_bytes(
    averaging: Iterable[tuple[StageAveraging, float]], codec: Codec, devices: int, every: int
) -> Floats:
    """Bytes that all stages average in a step, in the mean.

    Returns
    -------
    ndarray
        ``float[N, N]``, from row to column.
    """
    rare, each = np.zeros((2, devices, devices))
    for rounds, vector in averaging:
        for groups in rounds:
            for group in groups:
                index = np.array(group.members)
                sent = each if group.phase is Phase.WITHIN else rare
                sent[np.ix_(index, index)] += group_bytes(group, vector, codec)
    return each + rare / every
