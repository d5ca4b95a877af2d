"""The costs of an assignment problem as arrays for compiled code."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.problems import AssignmentProblem
from planner.search.arrays import Floats3, Ints, Ints2

MAX_NEIGHBOURS = 24
"""Maximum number of neighbours per device, from which the search draws partners."""


class AssignmentData(NamedTuple):
    """Costs of eq. 2 and 3 in seconds; equal matrices are stored once.

    Attributes
    ----------
    sizes, stage_ptr
        Devices per stage; the slots of stage j are ``stage_ptr[j]:stage_ptr[j + 1]``.
    stage_of_slot
        Stage of each slot.
    dp_cost, dp_kind
        Data-parallel costs: ``float[kind, N, N]`` terms of eq. 2; the kind of each stage.
    pp_cost, pp_kind
        Pipeline costs: ``float[kind, N, N]`` two times ``latency + bytes / bandwidth``; the kind
        of each boundary.
    neighbours
        ``int[N, <= MAX_NEIGHBOURS]`` nearest devices by the first kind of ``pp_cost``, nearest
        first.
    """

    sizes: Ints
    stage_ptr: Ints
    stage_of_slot: Ints
    dp_cost: Floats3
    dp_kind: Ints
    pp_cost: Floats3
    pp_kind: Ints
    neighbours: Ints2

    @property
    def free_order(self) -> bool:
        """Whether permuting the groups over the stages preserves all costs."""
        return (
            len(self.dp_cost) == 1
            and len(self.pp_cost) == 1
            and bool((self.sizes == self.sizes[0]).all())
        )


def assignment_data(problem: AssignmentProblem) -> AssignmentData:
    """Arrays of a problem."""
    n, stages = len(problem.network), problem.stages
    sizes = np.array(problem.stage_sizes, dtype=np.int64)
    shares = [(problem.gradient_bytes[j], problem.stage_sizes[j]) for j in range(stages)]
    kinds = sorted(set(shares))
    dp_cost = np.stack([problem.exchange_s(shares.index(kind)) for kind in kinds])
    dp_kind = np.array([kinds.index(share) for share in shares], dtype=np.int64)
    crossing = sorted(set(problem.activation_bytes))
    pp_cost = np.zeros((max(1, len(crossing)), n, n))
    for kind, size in enumerate(crossing):
        pp_cost[kind] = 2 * problem.hop_s(problem.activation_bytes.index(size))
    pp_kind = np.array([crossing.index(b) for b in problem.activation_bytes], dtype=np.int64)
    ranked = pp_cost[0] + np.where(np.eye(n, dtype=bool), np.inf, 0.0)
    nearest = np.argsort(ranked, axis=1, kind="stable")[:, : max(1, min(n - 1, MAX_NEIGHBOURS))]
    return AssignmentData(
        sizes,
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.repeat(np.arange(stages), sizes),
        dp_cost,
        dp_kind,
        pp_cost,
        pp_kind,
        np.ascontiguousarray(nearest),
    )


def groups_of(data: AssignmentData, slots: Ints) -> list[list[int]]:
    """Devices per stage.

    Parameters
    ----------
    slots
        ``int[N]``, the device of every slot.
    """
    first = data.stage_ptr
    return [slots[first[j] : first[j + 1]].tolist() for j in range(len(data.sizes))]
