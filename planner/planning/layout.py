"""A layout: how many devices of each class hold which layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from planner.planning.device_classes import DeviceClasses


@dataclass(frozen=True)
class Layout:
    """Stages of a plan, before it is said how microbatches go through them.

    Attributes
    ----------
    counts
        Per stage and place, the devices that hold it; those of no stage are left out.
    layers
        Per stage, its layers ``(start, stop)``.
    recompute
        Per stage, whether it recomputes its activations.
    """

    counts: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, int], ...]
    recompute: tuple[bool, ...]

    @classmethod
    def of(cls, counts: list[list[int]], cuts: list[int], recompute: list[bool]) -> Layout:
        """From counts by stage and place, and the S + 1 ends of stages."""
        return cls(tuple(map(tuple, counts)), tuple(pairwise(cuts)), tuple(recompute))

    def groups(self, places: DeviceClasses) -> tuple[tuple[int, ...], ...]:
        """Devices of every stage; which of a place they are makes no difference.

        Returns
        -------
        tuple[tuple[int, ...], ...]
            Ascending; each device at most once.
        """
        taken = [0] * len(places)
        groups = []
        for row in self.counts:
            group: list[int] = []
            for c, count in enumerate(row):
                group += places.members[c][taken[c] : taken[c] + count]
                taken[c] += count
            groups.append(tuple(sorted(group)))
        return tuple(groups)
