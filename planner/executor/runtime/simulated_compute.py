"""Imposed compute: operations take the plan's seconds, messages the plan's bytes, no model.

So a machine with few processors carries out a plan of many devices: what is left to chance is what
the network and the ranks themselves do.
"""

from __future__ import annotations

import ctypes
import math
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planner.executor.runtime.device_backend import HOST
from planner.executor.runtime.p2p_schedule import Message
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule

SET_TIMER_SLACK = 29
"""prctl PR_SET_TIMERSLACK of Linux."""
LEARN = 0.1
MOST_LATE_S = 3e-4
"""More than that would be waited out awake too often, on processors that others need."""


@dataclass(frozen=True)
class TimeScale:
    """What is divided so that a small machine can carry a large plan's network.

    Attributes
    ----------
    speed
        All times are divided by it.
    shrink
        All bytes are divided by it.
    """

    speed: float = 1.0
    shrink: float = 1.0

    def __post_init__(self) -> None:
        for name in ("speed", "shrink"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(
                    f"--{name} must be a number above 0, found {getattr(self, name)}; give 1 to "
                    "leave the plan as it is"
                )


class SimulatedCompute:
    """Sleeps for each operation as long as it takes in the plan.

    Parameters
    ----------
    imposed
        What times and bytes are divided by.
    """

    side = HOST

    def __init__(self, plan: TrainingPlan, rank: int, time_scale: TimeScale) -> None:
        times, speed, shrink = plan.compute_times, time_scale.speed, time_scale.shrink
        self._seconds = {
            "F": times.forward_s[rank] / speed,
            "H": times.head_s[rank] / speed,
            "B": times.backward_s[rank] / speed,
        }
        self._routes = plan.wiring is Wiring.STOCHASTIC
        self._update_s = times.update_s[rank] / speed
        self._rank = rank
        w, stage_of = plan.workload, plan.stage_of
        scale = w.microbatch_samples / shrink
        outputs = [w.stage(*layers).output_bytes * scale for layers in plan.stage_layers]
        self._sizes = {d: max(1, round(outputs[j])) for d, j in stage_of.items()}
        # by operation, of what it makes, where no path says who gets it
        j = stage_of.get(rank, 0)
        sizes = [max(1, round(size)) for size in outputs]
        self._made = {"F": sizes[j], "H": sizes[-1], "B": sizes[max(j - 1, 0)]}
        self._payload = torch.zeros(max(self._sizes.values()), dtype=torch.uint8)
        stage, vectors = plan.averaged_stage(rank), plan.vector_bytes()
        shares = plan.averages_tied and j in (0, plan.head_stage) and rank in stage_of
        self.tied_values = max(1, round(vectors[-1] / 4 / shrink)) if shares else 0
        values = max(1, round(vectors[stage] / 4 / shrink)) + self.tied_values
        # numpy's zeros take no memory until they are written, and one device alone writes none
        self._vector = torch.from_numpy(np.zeros(values, np.float32))
        self._sleeper = Sleeper()

    def begin(self, step: int, schedule: Schedule) -> None:
        """Nothing to prepare."""
        self._schedule = schedule

    def operate(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Sleep; returns the bytes that a real operation would send."""
        self._sleeper.until(time.monotonic() + self._seconds[kind])
        if self._routes:
            return self._payload[: self._made[kind]]
        owner = self._rank
        if kind != "F":
            path = self._schedule.paths[microbatch]
            place = path.index(self._rank)
            # a gradient has the size of what the device it goes to had sent
            owner = path[-1] if kind == "H" else path[max(place - 1, 0)]
        return self._payload[: self._sizes[owner]]

    def buffer(self, message: Message, *, own: bool = False) -> Tensor:
        """Memory for a message to this rank."""
        owner = message.destination if message.kind == "B" else message.source
        return torch.empty(self._sizes[owner], dtype=torch.uint8)

    def gradients(self, *, here: bool | None = None) -> Tensor:
        """A vector of the stage's size."""
        return self._vector

    def update(self) -> None:
        """Sleep."""
        self._sleeper.until(time.monotonic() + self._update_s)

    def samples(self) -> int:
        """They are not counted."""
        return 0

    def leave(self) -> None:
        """There is no change."""

    def change(self, samples: int | None = None) -> Tensor:
        """As `gradients`."""
        return self._vector

    def outer_step(self) -> None:
        """The plan counts no time for it."""

    def loss(self) -> float | None:
        """There is none."""
        return None


class Sleeper:
    """Sleeps up to moments of the monotonic clock, for one thread.

    Systems wake a thread late, by tens of microseconds that depend on the machine and its load. It
    asks to be woken so much earlier, as learnt from the times before, and waits out the rest awake.
    """

    def __init__(self) -> None:
        self._late_s = 0.0
        if sys.platform == "linux":
            # sleeps may then end a microsecond late instead of 50
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(SET_TIMER_SLACK, ctypes.c_ulong(1000), 0, 0, 0)

    def until(self, deadline_s: float) -> None:
        """Sleep."""
        target = deadline_s - self._late_s
        if (left := target - time.monotonic()) > 0:
            time.sleep(left)
            late = time.monotonic() - target
            self._late_s = min(self._late_s + LEARN * (late - self._late_s), MOST_LATE_S)
        while time.monotonic() < deadline_s:
            pass
