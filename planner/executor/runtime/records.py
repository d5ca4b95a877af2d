"""Timeline of a rank on its monotonic clock, and the file for it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from planner.executor.comm.p2p_schedule import Message
from planner.utils.atomic_write import write_text


class OperationRecord(NamedTuple):
    """An operation: F, H (head and loss) or B of a microbatch; averaging A or update U, of -1."""

    microbatch: int
    device: int
    kind: str
    start_s: float
    end_s: float


MessageRecord = tuple[int, str, int, int, int, float | None, float | None]
"""``(microbatch, kind, source, destination, bytes, handed_over_s, arrived_s)``.

None for the time that the other end knows.
"""


@dataclass
class StepRecord:
    """One step of one rank.

    Attributes
    ----------
    step
        Iteration, from 0; isolated steps are numbered separately.
    is_isolated
        Whether all ranks waited for each other before it, so that it began on an idle system.
    begin_s, end_s
        Start of waiting for the first operation, and end of the update.
    routes
        With stochastic wiring, microbatches of this rank: number, and the device of each stage.
    gradient_norm
        Global norm of the gradients before clipping; None where none is needed.
    loss_scale
        Loss scale after the step; None without loss scaling.
    """

    step: int
    is_isolated: bool
    begin_s: float = 0.0
    end_s: float = 0.0
    ops: list[OperationRecord] = field(default_factory=list)
    messages: list[MessageRecord] = field(default_factory=list)
    routes: list[tuple[int, tuple[int, ...]]] = field(default_factory=list)
    gradient_norm: float | None = None
    loss_scale: float | None = None

    def record_sent(self, message: Message, size: int, handed_over_s: float) -> None:
        """Record a message that was sent."""
        self._add_message(message, size, handed_over_s, None)

    def record_received(self, message: Message, size: int, arrived_s: float) -> None:
        """Record a message that arrived."""
        self._add_message(message, size, None, arrived_s)

    def _add_message(
        self, message: Message, size: int, sent_s: float | None, received_s: float | None
    ) -> None:
        ends = message.source, message.destination
        self.messages.append((message.microbatch, message.kind, *ends, size, sent_s, received_s))

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form."""
        return {
            "step": self.step,
            "rest": self.is_isolated,
            "begin_s": self.begin_s,
            "end_s": self.end_s,
            "ops": self.ops,
            "messages": self.messages,
            "routes": self.routes,
            "norm": finite_or_none(self.gradient_norm),
            "loss_scale": self.loss_scale,
        }


def finite_or_none(value: Any) -> Any:
    """The value; None for NaN and infinity, which JSON does not have."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_records(path: Path, rank: int, steps: list[StepRecord]) -> None:
    """Write the file of one rank."""
    data = {"rank": rank, "steps": [step.to_dict() for step in steps]}
    write_text(path, json.dumps(data, allow_nan=False) + "\n")
