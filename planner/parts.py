"""The parts of a plan: what each solver decides, as frozen data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class AssignmentPlan:
    """Which device holds which stage.

    Attributes
    ----------
    groups
        One tuple of devices per stage, in pipeline order, each sorted.
    grid
        ``int[pipelines, stages]``: row i is pipeline i. Its rows realise the bottleneck matchings.
        None when the groups differ in size.
    """

    groups: tuple[tuple[int, ...], ...]
    grid: NDArray[np.int64] | None

    @classmethod
    def of_grid(cls, grid: Sequence[Sequence[int]] | NDArray[np.int64]) -> AssignmentPlan:
        """From a grid; its rows are put in order of their first device."""
        array = np.array(grid, dtype=np.int64)
        array = array[np.argsort(array[:, 0], kind="stable")]
        array.setflags(write=False)
        return cls(tuple(tuple(sorted(map(int, column))) for column in array.T), array)

    @classmethod
    def of_groups(cls, groups: Sequence[Sequence[int]]) -> AssignmentPlan:
        """Groups of unequal size: there is no grid."""
        return cls(tuple(tuple(sorted(map(int, group))) for group in groups), None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, AssignmentPlan) or self.groups != other.groups:
            return False
        if self.grid is None or other.grid is None:
            return self.grid is other.grid
        return bool(np.array_equal(self.grid, other.grid))

    def __hash__(self) -> int:
        return hash(self.groups)
