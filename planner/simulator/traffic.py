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
        ``float[N, N]``, from row to column: means over the cycle and over the averaging period.
    """
    program = compile_plan(plan, LinkResources.of(plan.cluster), plan.workload)
    operations, pairs, n = program.operations, program.pairs, len(plan.cluster)
    averaging = zip(plan.averaging, plan.vector_bytes(), strict=True)
    sent = averaged_bytes(averaging, plan.codec, n, plan.sync.every_steps)
    for schedule in plan.cycle:
        mine = operations.order[
            operations.order_ptr[schedule * n] : operations.order_ptr[(schedule + 1) * n]
        ]
        mine = mine[operations.pair[mine] != NONE]
        pair = operations.pair[mine]
        ends = (pairs.source[pair], pairs.destination[pair])
        np.add.at(sent, ends, operations.message_bytes[mine] / len(plan.cycle))
    return sent


def averaged_bytes(
    averaging: Iterable[tuple[StageAveraging, float]], codec: Codec, devices: int, every: int
) -> Floats:
    """Mean bytes per step that averaging sends, over all stages.

    Returns
    -------
    ndarray
        ``float[N, N]``, from row to column.
    """
    rare, bytes_each = np.zeros((2, devices, devices))
    for rounds, vector in averaging:
        for groups in rounds:
            for group in groups:
                index = np.array(group.members)
                sent = bytes_each if group.phase is Phase.WITHIN else rare
                sent[np.ix_(index, index)] += group_bytes(group, vector, codec)
    return bytes_each + rare / every
