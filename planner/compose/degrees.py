"""Choosing stages x pipelines x microbatch size by predicted step time (DT-FM 10.2 did by hand)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from planner.network.cluster import Cluster
from planner.search.result import Result
from planner.workload.workload import Workload

PlanT = TypeVar("PlanT")


@dataclass(frozen=True)
class Candidate:
    """One row of the table that the choice was made from.

    Attributes
    ----------
    step_s
        Predicted step time; None where it is refused.
    bound_s
        What no placement of this shape can beat.
    refused
        Why it cannot be, such as too little memory.
    """

    stages: int
    pipelines: int
    microbatch_samples: int
    step_s: float | None
    bound_s: float | None
    refused: str = ""


def candidates(cluster: Cluster, workload: Workload) -> list[tuple[int, int]]:
    """All ``(stages, microbatch_samples)`` that divide devices and batch.

    Microbatches are powers of two times the workload's own, as long as every pipeline gets one.
    """
    n, batch = len(cluster), workload.batch_samples
    found = []
    for stages in range(1, min(n, len(workload.layers)) + 1):
        if n % stages:
            continue
        size = workload.microbatch_samples
        while batch % size == 0 and batch // size >= n // stages:
            found.append((stages, size))
            size *= 2
    return found


def choose(
    cluster: Cluster,
    workload: Workload,
    solve: Callable[[int, Workload], Result[PlanT]],
) -> tuple[Result[PlanT] | None, list[Candidate]]:
    """Solve every candidate; returns the best result and the table, fastest first.

    ``solve`` raises `ValueError` for shapes that do not fit; the table keeps them, and why.
    """
    best: Result[PlanT] | None = None
    table = []
    for stages, size in candidates(cluster, workload):
        pipelines = len(cluster) // stages
        try:
            result = solve(stages, workload.replace(microbatch_samples=size))
        except ValueError as error:
            table.append(Candidate(stages, pipelines, size, None, None, str(error)))
            continue
        table.append(Candidate(stages, pipelines, size, result.objective, result.bound))
        if result.objective is not None and (
            best is None or best.objective is None or result.objective < best.objective
        ):
            best = result
    table.sort(key=lambda c: (c.step_s is None, c.step_s or 0.0, c.stages, c.microbatch_samples))
    return best, table
