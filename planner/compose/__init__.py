"""From a cluster and a workload to one checked plan: calls the solvers, in order."""

from planner.compose.whole import plan

__all__ = ["plan"]
