"""Linear and mixed-integer programs: averaging (DeDLOC) and the flow of microbatches."""

from planner.lp.groups import optimal_group_size
from planner.lp.replan import replan_averaging
from planner.lp.solve import solve_averaging

__all__ = ["optimal_group_size", "replan_averaging", "solve_averaging"]
