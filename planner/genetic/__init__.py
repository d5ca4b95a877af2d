"""Device assignment (DT-FM, section 3): the stage and the pipeline of every device."""

from planner.genetic.solve import solve_assignment
from planner.genetic.stage_sizes import stage_sizes_for_skip

__all__ = ["solve_assignment", "stage_sizes_for_skip"]
