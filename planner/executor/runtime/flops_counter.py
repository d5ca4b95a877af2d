"""FLOPs and tokens of a plan's steps."""

from __future__ import annotations

from dataclasses import dataclass

from planner.training_plan.model import TrainingPlan
from planner.workload.costs import BACKWARD_TO_FORWARD


@dataclass(frozen=True)
class FlopsCounter:
    """FLOPs and tokens of a plan's steps.

    Attributes
    ----------
    peak_flops
        Total of all GPUs in the plan's format; None if some are unknown.
    """

    plan: TrainingPlan
    peak_flops: float | None = None

    def tokens(self, step: int) -> int:
        """Tokens of a step."""
        workload = self.plan.workload
        assert workload.architecture is not None
        return len(self._paths(step)) * workload.microbatch_samples * workload.architecture.sequence

    def flops(self, step: int) -> float:
        """Forward and backward FLOPs of a step, in the stages that its microbatches visit.

        Recomputation does not count, by the definition of model FLOPs.
        """
        workload, stage_of = self.plan.workload, self.plan.stage_of
        loads = [workload.stage(*layers).forward_flops for layers in self.plan.stage_layers]
        visited = sum(
            workload.head.forward_flops + sum(loads[stage_of[d]] for d in path)
            for path in self._paths(step)
        )
        return (1 + BACKWARD_TO_FORWARD) * workload.microbatch_samples * visited

    def mfu(self, step: int, took_s: float) -> float | None:
        """Model FLOPs utilization: FLOPs of a step over the peak of all GPUs in its time.

        References
        ----------
        A. Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways" (2022), appendix B.
        """
        return None if self.peak_flops is None else self.flops(step) / took_s / self.peak_flops

    def _paths(self, step: int) -> tuple[tuple[int, ...], ...]:
        cycle = self.plan.cycle
        return self.plan.schedules[cycle[step % len(cycle)]].paths
