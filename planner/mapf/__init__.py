"""Paths of microbatches (SkipPipe): which devices each visits, in which order, when."""

from planner.mapf.arrange import arrange_paths
from planner.mapf.solve import solve_paths
from planner.problems.path_method import PathMethod

__all__ = ["PathMethod", "arrange_paths", "solve_paths"]
