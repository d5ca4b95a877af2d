"""From a cluster and a workload to a checked plan: calls the solvers in order."""

from planner.planning.request import PlanRequest
from planner.planning.solve import plan

__all__ = ["PlanRequest", "plan"]
