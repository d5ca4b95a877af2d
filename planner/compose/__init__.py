"""From a cluster and a workload to one checked plan: calls the solvers, in order."""

from planner.compose.planning import plan
from planner.compose.request import PlanRequest

__all__ = ["PlanRequest", "plan"]
