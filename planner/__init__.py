"""Plans for training large models over slow, uneven, unreliable networks.

``import planner as pl`` loads numpy only; solvers and their libraries come with their first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Bound here, before anything else can import the submodules of the same names, so that
# ``pl.plan``, ``pl.check`` and ``pl.simulate`` stay functions.
from planner.check import check
from planner.cluster import GPUS, Cluster, Devices
from planner.compose import plan
from planner.compute_times import Calibration
from planner.datasets import list_networks, load_network
from planner.network import Network, NetworkError
from planner.plan import PlanError, TrainingPlan, load_plan, save_plan
from planner.problems import (
    ArrangedPathProblem,
    AssignmentProblem,
    AveragingProblem,
    PathProblem,
    ProblemError,
)
from planner.result import Certificate, Result, Status
from planner.simulate import SimulationError, simulate
from planner.stop import AnyOf, MaxIterations, MaxRuntime, NoImprovement, TargetGap
from planner.timeline import Timeline
from planner.violation import Violation
from planner.workload import Workload

if TYPE_CHECKING:
    from planner.genetic import solve_assignment
    from planner.lp import optimal_group_size, solve_averaging
    from planner.mapf import arrange_paths, solve_paths
    from planner.matching import bottleneck_assignment, open_path

_LAZY = {
    "arrange_paths": "planner.mapf",
    "optimal_group_size": "planner.lp",
    "solve_averaging": "planner.lp",
    "solve_paths": "planner.mapf",
    "bottleneck_assignment": "planner.matching",
    "open_path": "planner.matching",
    "solve_assignment": "planner.genetic",
}

__all__ = [
    "GPUS",
    "AnyOf",
    "ArrangedPathProblem",
    "AssignmentProblem",
    "AveragingProblem",
    "Calibration",
    "Certificate",
    "Cluster",
    "Devices",
    "MaxIterations",
    "MaxRuntime",
    "Network",
    "NetworkError",
    "NoImprovement",
    "PathProblem",
    "PlanError",
    "ProblemError",
    "Result",
    "SimulationError",
    "Status",
    "TargetGap",
    "Timeline",
    "TrainingPlan",
    "Violation",
    "Workload",
    "arrange_paths",
    "bottleneck_assignment",
    "check",
    "list_networks",
    "load_network",
    "load_plan",
    "open_path",
    "optimal_group_size",
    "plan",
    "save_plan",
    "simulate",
    "solve_assignment",
    "solve_averaging",
    "solve_paths",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'planner' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
