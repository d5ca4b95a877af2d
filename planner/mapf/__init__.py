"""Paths of microbatches (SkipPipe): which devices each visits, in which order, when."""

from planner.mapf.solve import PathMethod, solve_paths

__all__ = ["PathMethod", "solve_paths"]
