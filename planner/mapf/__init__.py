"""Paths of microbatches (SkipPipe): which devices each visits, in which order, when."""

from planner.mapf.arrange import arrange_paths
from planner.mapf.solve import PathMethod, solve_paths

__all__ = ["PathMethod", "arrange_paths", "solve_paths"]
