"""A layout: how many devices of each class hold which layers."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from planner.planning.joint.device_classes import DeviceClasses
from planner.training_plan.choices import Head

Outline = tuple[int, Head]
"""A number of stages, and which of them runs head and loss."""


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
    head
        Which stage runs head and loss; the last one, if there is only one.
    """

    counts: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, int], ...]
    recompute: tuple[int, ...]
    head: Head = Head.LAST

    @classmethod
    def of(
        cls,
        counts: list[list[int]],
        cuts: list[int],
        recompute: list[int],
        head: Head = Head.LAST,
    ) -> Layout:
        """From counts by stage and class, and the S + 1 boundaries of stages."""
        head = head if len(counts) > 1 else Head.LAST
        return cls(tuple(map(tuple, counts)), tuple(pairwise(cuts)), tuple(recompute), head)

    @property
    def outline(self) -> Outline:
        """Number of stages and place of the head."""
        return len(self.layers), self.head

    @property
    def head_stage(self) -> int:
        """The stage that runs head and loss."""
        return self.head.stage(len(self.layers))

    @property
    def returns(self) -> bool:
        """Whether microbatches go from the last stage to the head on the first, and back."""
        return self.head_stage < len(self.layers) - 1

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
