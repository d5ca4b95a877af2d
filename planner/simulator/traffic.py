"""Bytes that a plan sends between each pair of devices in a step."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from planner.simulator.program import compile_plan
from planner.simulator.resources import NONE, LinkResources
from planner.simulator.round_traffic import RoundTraffic
from planner.training_plan.averaging_group import StageAveraging
from planner.training_plan.choices import Codec, Phase
from planner.training_plan.model import TrainingPlan

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def sent_bytes(plan: TrainingPlan) -> tuple[Ints, Ints, Floats]:
    """Bytes of activations, their gradients and averaging.

    Returns
    -------
    tuple[ndarray, ndarray, ndarray]
        Senders, receivers and bytes, means over the cycle and over the averaging period. A pair may
        occur several times.
    """
    program = compile_plan(plan, LinkResources.of(plan.cluster), plan.workload)
    operations, pairs, n = program.operations, program.pairs, len(plan.cluster)
    averaging = zip(plan.averaging, plan.vector_bytes(), strict=True)
    sources, destinations, sizes = averaged_bytes(averaging, plan.codec, plan.sync.every_steps)
    messages = np.zeros(len(pairs.source))
    for schedule in plan.cycle:
        mine = operations.order[
            operations.order_ptr[schedule * n] : operations.order_ptr[(schedule + 1) * n]
        ]
        mine = mine[operations.pair[mine] != NONE]
        np.add.at(messages, operations.pair[mine], operations.message_bytes[mine])
    return (
        np.concatenate([sources, pairs.source]),
        np.concatenate([destinations, pairs.destination]),
        np.concatenate([sizes, messages / len(plan.cycle)]),
    )


def averaged_bytes(
    averaging: Iterable[tuple[StageAveraging, float]], codec: Codec, every: int
) -> tuple[Ints, Ints, Floats]:
    """Mean bytes per step that averaging sends, over all stages.

    Returns
    -------
    tuple[ndarray, ndarray, ndarray]
        Senders, receivers and bytes; a pair occurs once for every group.
    """
    parts = [(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64), np.zeros(0))]
    for rounds, vector in averaging:
        for groups in rounds:
            for group in groups:
                senders, receivers, sent = RoundTraffic.of(group, vector, codec).of_pairs()
                steps = 1 if group.phase is Phase.WITHIN else every
                parts.append((senders, receivers, sent / steps))
    sources, destinations, sizes = map(np.concatenate, zip(*parts, strict=True))
    return sources, destinations, sizes
