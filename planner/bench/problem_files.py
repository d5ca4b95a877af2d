"""Exact JSON form of problems, for methods in other languages."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import numpy as np

from planner.bench.problem import BenchInstance, PlanProblem, ProblemFamily
from planner.network.cluster import Cluster
from planner.problems import AssignmentProblem, AveragingProblem, PathProblem
from planner.problems.rebalancing import RebalancingProblem
from planner.training_plan.encoding import device_fields, devices_of, network_fields, network_of
from planner.training_plan.model import hash_of
from planner.workload.workload import Workload

FORMAT = "planner.instance"


def instance_data(instance: BenchInstance) -> dict[str, Any]:
    """Return an instance's problem with its name and hash, JSON-ready.

    Paths have the fields of `planner.PathProblem`, so ``planner paths FILE`` reads the file.

    Returns
    -------
    dict[str, Any]
        SI units as in the fields' names; numbers are exact.
    """
    problem = instance.make()
    return {
        "format": FORMAT,
        "id": instance.id,
        "family": str(instance.family),
        "about": instance.about,
        "objective": "maximised" if instance.family.maximised else "minimised",
        "unit": instance.family.unit,
        "hash": problem_hash(problem),
        **_fields(problem),
    }


def problem_of(data: dict[str, Any]) -> Any:
    """Build the problem from `instance_data`."""
    kinds: dict[str, Any] = {
        ProblemFamily.AVERAGING: AveragingProblem,
        ProblemFamily.PATHS: PathProblem,
        ProblemFamily.REBALANCING: RebalancingProblem,
    }
    family = ProblemFamily(data["family"])
    if family is ProblemFamily.ASSIGNMENT:
        return AssignmentProblem(
            network_of(data["network"]),
            stage_sizes=data["stage_sizes"],
            activation_bytes=data["activation_bytes"],
            gradient_bytes=data["gradient_bytes"],
        )
    if family is ProblemFamily.PLANS:
        network = network_of(data["network"])
        cluster = Cluster(network, devices_of(data["devices"], len(network)))
        return PlanProblem(cluster, Workload.from_dict(data["workload"]))
    kind = kinds[family]
    values = {field.name: data[field.name] for field in fields(kind)}
    if values.get("link_bytes_per_s") is not None:
        links = values["link_bytes_per_s"]
        values["link_bytes_per_s"] = [[math.inf if x is None else x for x in row] for row in links]
    return kind(**values)


def problem_hash(problem: Any) -> str:
    """Return sixteen hexadecimal digits that depend on the problem's numbers only.

    Empty fields are left out, so that a field added by a later release does not change the hash of
    older problems.
    """
    content = _fields(problem)
    network = problem.cluster.network if isinstance(problem, PlanProblem) else None
    network = problem.network if isinstance(problem, AssignmentProblem) else network
    if network is not None:
        content["network"] = [network.content_hash, list(network.regions)]
    return hash_of(_said(content))[:16]


def _said(value: Any) -> Any:
    if isinstance(value, dict):
        entries = {key: _said(item) for key, item in value.items()}
        return {key: item for key, item in entries.items() if not _empty(item)}
    nested = isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], dict)
    return [_said(item) for item in value] if nested else value


def _empty(value: Any) -> bool:
    # keep 0, which equals False
    return value is None or value is False or value in ("", "none") or value in ([], {})


def _fields(problem: Any) -> dict[str, Any]:
    if isinstance(problem, PlanProblem):
        return {
            "network": network_fields(problem.cluster.network),
            "devices": device_fields(problem.cluster.devices),
            "workload": problem.workload.to_dict(),
        }
    data = {field.name: _json_value(getattr(problem, field.name)) for field in fields(problem)}
    if isinstance(problem, AssignmentProblem):
        data["network"] = network_fields(problem.network)
    return data


def _json_value(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        # JSON has no infinity: null means no limit
        elements = value.astype(object)
        elements[~np.isfinite(value)] = None
        return elements.tolist()
    return [_json_value(item) for item in value] if isinstance(value, tuple) else value
