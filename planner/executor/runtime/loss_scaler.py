"""Dynamic loss scaling for fp16, as ``torch.amp.GradScaler`` does it in one process."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from planner.workload.workload import Workload

INIT_SCALE, GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0**16, 2.0, 0.5, 2000
"""Defaults of GradScaler."""
SCALE, GROWTH_TRACKER = "loss_scale/scale", "loss_scale/growth_tracker"
"""Names in checkpoints."""


class TrainingDiverged(RuntimeError):
    """Gradients overflow with every loss scale, on all ranks alike."""


class LossScaler:
    """The loss scale. All ranks have the same, since they update it by the same global norm.

    Attributes
    ----------
    scale
        Factor on losses before the backward pass: a power of two, so that it changes no digit.
    """

    def __init__(self, workload: Workload) -> None:
        self.scale = initial_scale(workload)
        self._growth_tracker = 0

    def update(self, *, overflow: bool) -> None:
        """Adapt the scale after a step."""
        if overflow:
            self.scale *= BACKOFF_FACTOR
            self._growth_tracker = 0
            if self.scale < 1:
                raise TrainingDiverged(
                    "gradients overflow fp16 even with a loss scale of 1; lower the learning rate, "
                    "or plan with --precision fp32 (or bf16 on GPUs that have it)"
                )
            return
        self._growth_tracker += 1
        if self._growth_tracker == GROWTH_INTERVAL:
            self.scale *= GROWTH_FACTOR
            self._growth_tracker = 0

    def state_dict(self) -> dict[str, Tensor]:
        """Its part of a checkpoint."""
        values = {SCALE: self.scale, GROWTH_TRACKER: float(self._growth_tracker)}
        return {name: torch.tensor(value) for name, value in values.items()}

    def load_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Restore `state_dict`."""
        self.scale = float(state_dict[SCALE])
        self._growth_tracker = round(float(state_dict[GROWTH_TRACKER]))


def initial_scale(workload: Workload) -> float:
    """The scale of the first step.

    Losses are divided by the samples of the batch, GradScaler's usual ones by those of a
    microbatch. So it is larger by the number of microbatches, rounded down to a power of two.
    """
    microbatches = workload.batch_samples // workload.microbatch_samples
    return INIT_SCALE * 2.0 ** (microbatches.bit_length() - 1)
