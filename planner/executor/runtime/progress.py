"""Output of rank 0: one line or JSON event per step, and losses that arrive later."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any, Protocol

from planner.executor.comm.losses import LossCollector
from planner.executor.runtime.evaluate import EvaluationResult
from planner.executor.runtime.flops_counter import FlopsCounter, summary
from planner.executor.runtime.records import StepRecord


class KnownLosses(Protocol):
    """Losses of steps, some of which may still be on their way."""

    def newest(self, step: int) -> int | None:
        """The last step up to this one whose loss is known."""

    def of(self, step: int) -> float | None:
        """The loss of a step; None if it is not known."""


@dataclass
class Progress:
    """Lines or JSON events of a run.

    Attributes
    ----------
    events
        Whether to print JSON lines instead of text.
    work
        FLOPs and tokens of a step; None if no model is trained.
    plan
        Hash of the current plan.
    """

    planned_s: float
    events: bool
    work: FlopsCounter | None = None
    plan: str = ""
    _ended_s: float = 0.0
    _told: set[int] = field(default_factory=set)

    def step(self, record: StepRecord, losses: KnownLosses | None) -> None:
        """A step of rank 0 has ended."""
        # a step lasts from the end of the previous one
        first = record.rest or record.step == 0 or not self._ended_s
        began = record.begin_s if first else self._ended_s
        self._ended_s = record.end_s
        took = record.end_s - began
        of = None if losses is None or record.rest else losses.newest(record.step)
        loss = None if losses is None or of is None else losses.of(of)
        if losses is None:
            middle = "  from rest" if record.rest else ""
        elif loss is None:
            middle = "  loss not known yet"
        else:
            middle = f"  loss {loss:.4f} (of step {of})"
        self._told |= set() if of is None else {of}
        rates, suffix = self._rates(record, took)
        if record.norm is not None:
            middle += f"  norm {record.norm:.3g}"
            if record.loss_scale is not None and not math.isfinite(record.norm):
                middle += f", skipped; loss scale {record.loss_scale:g} from now on"
        self._say(
            f"step {record.step:4d}{middle}  took {took:.3f} s  planned {self.planned_s:.3f} s"
            + suffix,
            event="rest" if record.rest else "step",
            step=record.step,
            loss=loss,
            loss_step=of,
            **({} if record.norm is None else {"gradient_norm": record.norm}),
            **({} if record.loss_scale is None else {"loss_scale": record.loss_scale}),
            took_s=took,
            predicted_s=self.planned_s,
            **rates,
            plan=self.plan,
        )

    def between_steps(self, text: str, **event: Any) -> None:
        """Something has happened that does not count in the time of the next step."""
        self._ended_s = 0.0
        self._say(text, **event)

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
        if self.work is None or record.rest:
            return {}, ""
        rates = {"tokens_per_s": self.work.tokens(record.step) / took_s}
        text = f"  {rates['tokens_per_s']:.0f} tokens/s"
        if (mfu := self.work.mfu(record.step, took_s)) is not None:
            rates["mfu"] = mfu
            text += f"  MFU {mfu:.1%}"
        return rates, text

    def end(self, losses: LossCollector | None) -> None:
        """The run has ended, and all losses are known: print the remaining ones."""
        for step in () if losses is None else losses.steps:
            if step in self._told or losses is None:
                continue
            if (loss := losses.of(step)) is not None:
                text = f"loss of step {step}: {loss:.4f}"
                self._say(text, event="loss", step=step, loss=loss)

    def phase(self, doing: str) -> None:
        """A phase before the first step, for ``planner run``."""
        if self.events:
            self._say("", event="phase", doing=doing)

    def calibrated(self, path: str) -> None:
        """A calibration was written."""
        self._say(f"calibration written to {path}", event="calibrated")

    def devices(self, reports: list[dict[str, Any]]) -> None:
        """Memory and bytes of all devices."""
        self._say(summary(reports), event="devices", devices=reports)

    def _say(self, text: str, **event: Any) -> None:
        if self.events:
            # JSON has no NaN or infinity
            values = {name: None if _diverged(value) else value for name, value in event.items()}
            text = json.dumps(values, allow_nan=False)
        print(text, flush=True)


def _diverged(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)
