"""Instances of the open benchmark: fixed problems with names."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from planner.network.cluster import Cluster
from planner.workload.workload import Workload


class ProblemFamily(enum.StrEnum):
    """Kinds of problems."""

    ASSIGNMENT = "assignment"
    AVERAGING = "averaging"
    PATHS = "paths"
    PLANS = "plans"
    REBALANCING = "rebalancing"

    @property
    def maximised(self) -> bool:
        """Whether the objective is maximised: rates are, times are not."""
        return self in (ProblemFamily.AVERAGING, ProblemFamily.REBALANCING)

    @property
    def unit(self) -> str:
        """Unit of the objective."""
        return {
            ProblemFamily.AVERAGING: "steps/s",
            ProblemFamily.REBALANCING: "microbatches/s",
        }.get(self, "s")

    def better(self, value: float, other: float | None) -> bool:
        """Whether an objective is better by more than rounding; None is worst."""
        if other is None:
            return True
        margin = ROUNDING * abs(other)
        return value > other + margin if self.maximised else value < other - margin

    def gap(self, objective: float, reference: float) -> float:
        """Relative distance to a reference; negative if better."""
        high, low = (reference, objective) if self.maximised else (objective, reference)
        return high / low - 1 if low > 0 else float("inf")


ROUNDING = 1e-7
"""Relative difference below which objectives are equal; the checker's tolerance is 1e-9."""


@dataclass(frozen=True)
class PlanProblem:
    """A whole plan for a cluster and a workload; the objective is the simulated step time.

    Decisions that change training are not allowed (`planner.bench.evaluation`).

    Attributes
    ----------
    cluster, workload
        Devices, network and model.
    """

    cluster: Cluster
    workload: Workload


@dataclass(frozen=True)
class BenchInstance:
    """A fixed problem.

    Attributes
    ----------
    id
        ``family/name``; not passed to methods.
    about
        Short description of its source.
    quick
        Whether ``--quick`` includes it.
    """

    id: str
    about: str
    make: Callable[[], Any]
    quick: bool = False

    @property
    def family(self) -> ProblemFamily:
        """Family of the problem."""
        return ProblemFamily(self.id.partition("/")[0])
