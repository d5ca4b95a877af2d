"""Plans for training large models over slow, uneven, unreliable networks.

``import planner as pl`` loads NumPy only; other libraries are imported on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.checker.dispatch import check as check
    from planner.checker.violation import Violation as Violation
    from planner.exports.error import ExportError as ExportError
    from planner.exports.formats import export_plan as export_plan
    from planner.genetic.solve import solve_assignment as solve_assignment
    from planner.lp.groups import optimal_group_size as optimal_group_size
    from planner.lp.solve import AveragingMethod as AveragingMethod
    from planner.lp.solve import solve_averaging as solve_averaging
    from planner.mapf.arrange import arrange_paths as arrange_paths
    from planner.mapf.solve import solve_paths as solve_paths
    from planner.matching.bottleneck import MatchingError as MatchingError
    from planner.matching.bottleneck import bottleneck_assignment as bottleneck_assignment
    from planner.matching.path_tsp import open_path as open_path
    from planner.matching.stages import match_stages as match_stages
    from planner.network.catalogue import (
        list_networks as list_networks,
    )
    from planner.network.catalogue import (
        load_network as load_network,
    )
    from planner.network.cluster import (
        Cluster as Cluster,
    )
    from planner.network.cluster import (
        Devices as Devices,
    )
    from planner.network.devices_file import load_devices as load_devices
    from planner.network.error import NetworkError as NetworkError
    from planner.network.gpus import GPUS as GPUS
    from planner.network.link import Link as Link
    from planner.network.network import Network as Network
    from planner.network.prices import Prices as Prices
    from planner.planning.pareto_front import Front as Front
    from planner.planning.pareto_front import FrontPoint as FrontPoint
    from planner.planning.pareto_front import pareto as pareto
    from planner.planning.request import PlanRequest as PlanRequest
    from planner.planning.solve import plan as plan
    from planner.planning.workers import tensor_parallel_workers as tensor_parallel_workers
    from planner.problems import (
        ArrangedPathProblem as ArrangedPathProblem,
    )
    from planner.problems import (
        AssignmentProblem as AssignmentProblem,
    )
    from planner.problems import (
        AveragingProblem as AveragingProblem,
    )
    from planner.problems import (
        PathProblem as PathProblem,
    )
    from planner.problems import (
        ProblemError as ProblemError,
    )
    from planner.problems.answers import ArrangedPathPlan as ArrangedPathPlan
    from planner.problems.answers import AssignmentPlan as AssignmentPlan
    from planner.problems.answers import AveragingPlan as AveragingPlan
    from planner.problems.answers import PathPlan as PathPlan
    from planner.problems.assignment_method import AssignmentMethod as AssignmentMethod
    from planner.problems.path_method import PathMethod as PathMethod
    from planner.search.certificate import Certificate as Certificate
    from planner.search.certificate import Status as Status
    from planner.search.result import Result as Result
    from planner.search.stop import (
        AnyOf as AnyOf,
    )
    from planner.search.stop import (
        Effort as Effort,
    )
    from planner.search.stop import (
        MaxIterations as MaxIterations,
    )
    from planner.search.stop import (
        MaxRuntime as MaxRuntime,
    )
    from planner.search.stop import (
        NoImprovement as NoImprovement,
    )
    from planner.search.stop import (
        TargetGap as TargetGap,
    )
    from planner.simulator.simulator import (
        SimulationError as SimulationError,
    )
    from planner.simulator.simulator import (
        simulate as simulate,
    )
    from planner.simulator.simulator import simulate_cycle as simulate_cycle
    from planner.simulator.timeline import Timeline as Timeline
    from planner.training_plan.error import PlanError as PlanError
    from planner.training_plan.file import (
        load_plan as load_plan,
    )
    from planner.training_plan.file import (
        save_plan as save_plan,
    )
    from planner.training_plan.model import Routing as Routing
    from planner.training_plan.model import TrainingPlan as TrainingPlan
    from planner.training_plan.sync import OuterOptimizer as OuterOptimizer
    from planner.workload.calibration import Calibration as Calibration
    from planner.workload.layers import Architecture as Architecture
    from planner.workload.layers import Layer as Layer
    from planner.workload.workload import Workload as Workload

_HOME = {
    "AnyOf": "search.stop",
    "Architecture": "workload.layers",
    "ArrangedPathPlan": "problems.answers",
    "ArrangedPathProblem": "problems",
    "AssignmentMethod": "problems.assignment_method",
    "AssignmentPlan": "problems.answers",
    "AssignmentProblem": "problems",
    "AveragingMethod": "lp.solve",
    "AveragingPlan": "problems.answers",
    "AveragingProblem": "problems",
    "Calibration": "workload.calibration",
    "Certificate": "search.certificate",
    "Cluster": "network.cluster",
    "Devices": "network.cluster",
    "Effort": "search.stop",
    "ExportError": "exports.error",
    "Front": "planning.pareto_front",
    "FrontPoint": "planning.pareto_front",
    "GPUS": "network.gpus",
    "Layer": "workload.layers",
    "Link": "network.link",
    "MatchingError": "matching.bottleneck",
    "MaxIterations": "search.stop",
    "MaxRuntime": "search.stop",
    "Network": "network.network",
    "NetworkError": "network.error",
    "NoImprovement": "search.stop",
    "OuterOptimizer": "training_plan.sync",
    "PathMethod": "problems.path_method",
    "PathPlan": "problems.answers",
    "PathProblem": "problems",
    "PlanError": "training_plan.error",
    "PlanRequest": "planning.request",
    "Prices": "network.prices",
    "ProblemError": "problems",
    "Result": "search.result",
    "Routing": "training_plan.model",
    "SimulationError": "simulator.simulator",
    "Status": "search.certificate",
    "TargetGap": "search.stop",
    "Timeline": "simulator.timeline",
    "TrainingPlan": "training_plan.model",
    "Violation": "checker.violation",
    "Workload": "workload.workload",
    "arrange_paths": "mapf.arrange",
    "bottleneck_assignment": "matching.bottleneck",
    "check": "checker.dispatch",
    "export_plan": "exports.formats",
    "list_networks": "network.catalogue",
    "load_devices": "network.devices_file",
    "load_network": "network.catalogue",
    "load_plan": "training_plan.file",
    "open_path": "matching.path_tsp",
    "match_stages": "matching.stages",
    "optimal_group_size": "lp.groups",
    "pareto": "planning.pareto_front",
    "plan": "planning.solve",
    "save_plan": "training_plan.file",
    "simulate": "simulator.simulator",
    "simulate_cycle": "simulator.simulator",
    "solve_assignment": "genetic.solve",
    "solve_averaging": "lp.solve",
    "solve_paths": "mapf.solve",
    "tensor_parallel_workers": "planning.workers",
}
"""Public names, and the modules that define them."""

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'planner' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"planner.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
