"""Output of rank 0: one line or JSON event per step, and losses that arrive later."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from planner.executor.comm.losses import LossCollector
from planner.executor.runtime.evaluate import EvaluationResult
from planner.executor.runtime.flops_counter import FlopsCounter
from planner.executor.runtime.records import StepRecord, finite_or_none
from planner.executor.runtime.run_summary import summary
from planner.training_plan.model import TrainingPlan


class KnownLosses(Protocol):
    """Losses of steps, some of which may still be on their way."""

    def latest_known_step(self, step: int) -> int | None:
        """The last step up to this one whose loss is known."""

    def loss(self, step: int) -> float | None:
        """The loss of a step; None if it is not known."""


@dataclass
class Progress:
    """Lines or JSON events of a run.

    Attributes
    ----------
    planned_s
        Predicted step of the initial plan, which plans made from it keep.
    events
        Whether to print JSON lines instead of text.
    flops
        FLOPs and tokens of a step; None if no model is trained.
    plan
        Hash of the current plan.
    """

    planned_s: float
    events: bool
    flops: FlopsCounter | None = None
    plan: str = ""
    _ended_s: float = 0.0
    _reported: set[int] = field(default_factory=set)

    def set_plan(self, plan: TrainingPlan, peak_flops: float | None) -> None:
        """Report the following steps as those of a plan; ``peak_flops`` as in `FlopsCounter`."""
        self.plan, self.flops = plan.content_hash, FlopsCounter(plan, peak_flops)

    def step(self, record: StepRecord, losses: KnownLosses | None) -> None:
        """A step of rank 0 has ended."""
        # a step lasts from the end of the previous one
        first = record.is_isolated or record.step == 0 or not self._ended_s
        begin_s = record.begin_s if first else self._ended_s
        self._ended_s = record.end_s
        took_s = record.end_s - begin_s
        loss_step = (
            None if losses is None or record.is_isolated else losses.latest_known_step(record.step)
        )
        loss = None if losses is None or loss_step is None else losses.loss(loss_step)
        if losses is None:
            middle = "  from rest" if record.is_isolated else ""
        elif loss is None:
            middle = "  loss not known yet"
        else:
            middle = f"  loss {loss:.4f} (of step {loss_step})"
        self._reported |= set() if loss_step is None else {loss_step}
        rates, suffix = self._rates(record, took_s)
        if record.gradient_norm is not None:
            middle += f"  norm {record.gradient_norm:.3g}"
            if record.loss_scale is not None and not math.isfinite(record.gradient_norm):
                middle += f", skipped; loss scale {record.loss_scale:g} from now on"
        self._emit(
            f"step {record.step:4d}{middle}  took {took_s:.3f} s  planned {self.planned_s:.3f} s"
            + suffix,
            event="rest" if record.is_isolated else "step",
            step=record.step,
            loss=loss,
            loss_step=loss_step,
            **({} if record.gradient_norm is None else {"gradient_norm": record.gradient_norm}),
            **({} if record.loss_scale is None else {"loss_scale": record.loss_scale}),
            took_s=took_s,
            predicted_s=self.planned_s,
            **rates,
            plan=self.plan,
        )

    def between_steps(self, text: str, **event: Any) -> None:
        """Something has happened that does not count in the time of the next step."""
        self._ended_s = 0.0
        self._emit(text, **event)

    def evaluated(self, result: EvaluationResult) -> None:
        """An evaluation has ended, before the next step begins."""
        self.between_steps(
            f"after {result.steps} steps, {result.paths}: held-out loss {result.loss:.4f}, "
            f"perplexity {result.perplexity:.4g}",
            event="evaluated",
            steps=result.steps,
            paths=result.paths,
            loss=result.loss,
            perplexity=result.perplexity,
        )

    def _rates(self, record: StepRecord, took_s: float) -> tuple[dict[str, float], str]:
        if self.flops is None or record.is_isolated:
            return {}, ""
        rates = {"tokens_per_s": self.flops.tokens(record.step) / took_s}
        text = f"  {rates['tokens_per_s']:.0f} tokens/s"
        if (mfu := self.flops.mfu(record.step, took_s)) is not None:
            rates["mfu"] = mfu
            text += f"  MFU {mfu:.1%}"
        return rates, text

    def end(self, losses: LossCollector | None) -> None:
        """The run has ended, and all losses are known: print the remaining ones."""
        for step in () if losses is None else losses.steps:
            if step in self._reported or losses is None:
                continue
            if (loss := losses.loss(step)) is not None:
                text = f"loss of step {step}: {loss:.4f}"
                self._emit(text, event="loss", step=step, loss=loss)

    def phase(self, phase: str) -> None:
        """A phase before the first step, for ``planner run``."""
        if self.events:
            self._emit("", event="phase", doing=phase)

    def calibrated(self, path: str) -> None:
        """A calibration was written."""
        self._emit(f"calibration written to {path}", event="calibrated")

    def devices(self, reports: list[dict[str, Any]]) -> None:
        """Memory and bytes of all devices."""
        self._emit(summary(reports), event="devices", devices=reports)

    def _emit(self, text: str, **event: Any) -> None:
        if self.events:
            values = {name: finite_or_none(value) for name, value in event.items()}
            text = json.dumps(values, allow_nan=False)
        print(text, flush=True)
