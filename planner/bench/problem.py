"""What an instance of the open benchmark is: a frozen problem with a name."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.network.cluster import Cluster
from planner.workload.workload import Workload


class ProblemFamily(enum.StrEnum):
    """Kinds of questions."""

    ASSIGNMENT = "assignment"
    AVERAGING = "averaging"
    PATHS = "paths"
    PLANS = "plans"
    REBALANCING = "rebalancing"

    @property
    def maximised(self) -> bool:
        """Whether more is better: rates are maximised, times minimised."""
        return self in (ProblemFamily.AVERAGING, ProblemFamily.REBALANCING)

    @property
    def unit(self) -> str:
        """Of the objective."""
        return {
            ProblemFamily.AVERAGING: "steps/s",
            ProblemFamily.REBALANCING: "microbatches/s",
        }.get(self, "s")

    def better(self, one: float, other: float | None) -> bool:
        """Whether an objective beats another, by more than rounding; None is beaten by any."""
        if other is None:
            return True
        margin = ROUNDING * abs(other)
        return one > other + margin if self.maximised else one < other - margin

    def gap(self, objective: float, reference: float) -> float:
        """Distance behind a reference as a part of it; below 0: ahead of it."""
        high, low = (reference, objective) if self.maximised else (objective, reference)
        return high / low - 1 if low > 0 else float("inf")


ROUNDING = 1e-7
"""Relative; nearer answers count as equal, since tolerances of the checker (1e-9) add up."""


@dataclass(frozen=True)
class PlanProblem:
    """A whole plan for a cluster and a workload; the objective is its step in the simulator.

    Free are the decisions that leave the arithmetic of training as it is
    (`planner.bench.judge`).

    Attributes
    ----------
    cluster, workload
        Where and what to train.
    """

    cluster: Cluster
    workload: Workload


@dataclass(frozen=True)
class BenchInstance:
    """A problem that is always the same.

    Attributes
    ----------
    id
        ``family/name``. No method sees it.
    about
        Where it comes from, in a few words.
    quick
        Whether ``--quick`` has it.
    """

    id: str
    about: str
    make: Callable[[], Any]
    quick: bool = False

    @property
    def family(self) -> ProblemFamily:
        """Its kind."""
        return ProblemFamily(self.id.partition("/")[0])
