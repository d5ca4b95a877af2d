"""Subproblems of the assignment: bottleneck matching (eq. 3) and open-path TSP (eq. 4)."""

from planner.matching.bottleneck import bottleneck_assignment
from planner.matching.path_tsp import open_path

__all__ = ["bottleneck_assignment", "open_path"]
