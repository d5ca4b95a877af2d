"""A layout: how many devices of each class hold which layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from planner.planning.joint.device_classes import DeviceClasses


@dataclass(frozen=True)
class Layout:
    """Stages of a plan, without the paths of microbatches.

    Attributes
    ----------
    counts
        Per stage and device class, the number of devices. Devices may be unused.
    layers
        Per stage, its layers ``(start, stop)``.
    recompute
        Per stage, how many of its first layers are recomputed.
    """

    counts: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, int], ...]
    recompute: tuple[int, ...]

    @classmethod
    def of(cls, counts: list[list[int]], cuts: list[int], recompute: list[int]) -> Layout:
        """From counts by stage and class, and the S + 1 boundaries of stages."""
        return cls(tuple(map(tuple, counts)), tuple(pairwise(cuts)), tuple(recompute))

    @property
    def layer_counts(self) -> tuple[int, ...]:
        """Layers in each stage."""
        return tuple(stop - start for start, stop in self.layers)

    @property
    def recomputes_partially(self) -> bool:
        """Whether a stage recomputes some of its layers only."""
        return any(
            0 < count < size for count, size in zip(self.recompute, self.layer_counts, strict=True)
        )

    def groups(self, classes: DeviceClasses) -> tuple[tuple[int, ...], ...]:
        """Devices of every stage, drawn from the classes in order.

        Returns
        -------
        tuple[tuple[int, ...], ...]
            Ascending; each device at most once.
        """
        num_taken = [0] * len(classes)
        groups = []
        for stage_counts in self.counts:
            group: list[int] = []
            for c, count in enumerate(stage_counts):
                group += classes.members[c][num_taken[c] : num_taken[c] + count]
                num_taken[c] += count
            groups.append(tuple(sorted(group)))
        return tuple(groups)
