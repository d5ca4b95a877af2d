"""The costs of an assignment problem as arrays that compiled code can read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from planner.problems import AssignmentProblem
from planner.search.arrays import Floats3, Ints, Ints2

NEAR = 24
"""Length of a device's list of near devices, from which the search draws partners."""


class Tables(NamedTuple):
    """Costs of eq. 2 and 3 in seconds; equal matrices are stored once.

    Attributes
    ----------
    sizes, first
        Devices per stage; first slot of each stage (S + 1 entries). Slots are numbered 0..N-1.
    stage
        Stage of each slot.
    exchange, exchange_of
        ``float[kind, N, N]`` summands of eq. 2; the kind of each stage.
    hop, hop_of
        ``float[kind, N, N]`` two times ``latency + bytes / bandwidth``; the kind of each boundary.
    near
        ``int[N, <= NEAR]`` the nearest devices by the first kind of hop, nearest first.
    """

    sizes: Ints
    first: Ints
    stage: Ints
    exchange: Floats3
    exchange_of: Ints
    hop: Floats3
    hop_of: Ints
    near: Ints2

    @property
    def free_order(self) -> bool:
        """Whether groups may change places at the same data-parallel and pipeline costs."""
        return (
            len(self.exchange) == 1
            and len(self.hop) == 1
            and bool((self.sizes == self.sizes[0]).all())
        )


def tables_of(problem: AssignmentProblem) -> Tables:
    """Tables for a problem."""
    n, stages = len(problem.network), problem.stages
    sizes = np.array(problem.stage_sizes, dtype=np.int64)
    shares = [(problem.gradient_bytes[j], problem.stage_sizes[j]) for j in range(stages)]
    kinds = sorted(set(shares))
    exchange = np.stack([problem.exchange_s(shares.index(kind)) for kind in kinds])
    exchange_of = np.array([kinds.index(share) for share in shares], dtype=np.int64)
    crossing = sorted(set(problem.activation_bytes))
    hop = np.zeros((max(1, len(crossing)), n, n))
    for kind, size in enumerate(crossing):
        hop[kind] = 2 * problem.hop_s(problem.activation_bytes.index(size))
    hop_of = np.array([crossing.index(b) for b in problem.activation_bytes], dtype=np.int64)
    ranked = hop[0] + np.where(np.eye(n, dtype=bool), np.inf, 0.0)
    nearest = np.argsort(ranked, axis=1, kind="stable")[:, : max(1, min(n - 1, NEAR))]
    return Tables(
        sizes,
        np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
        np.repeat(np.arange(stages), sizes),
        exchange,
        exchange_of,
        hop,
        hop_of,
        np.ascontiguousarray(nearest),
    )


def groups_of(tables: Tables, slots: Ints) -> list[list[int]]:
    """Devices per stage.

    Parameters
    ----------
    slots
        ``int[N]``, the device of every slot.
    """
    first = tables.first
    return [slots[first[j] : first[j + 1]].tolist() for j in range(len(tables.sizes))]
