"""Simulated compute: operations take the plan's seconds, messages the plan's bytes, without a
model.

A machine with few processors can thus run a plan for many devices; only the network and the
overhead of the ranks are real.
"""

from __future__ import annotations

import ctypes
import sys
import time
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from planner.executor.comm.p2p_schedule import Message
from planner.executor.comm.time_scale import TimeScale
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.runtime.stage_runtime import StageRuntime
from planner.training_plan.choices import Wiring
from planner.training_plan.model import TrainingPlan
from planner.training_plan.schedule import Schedule

SET_TIMER_SLACK = 29
"""prctl PR_SET_TIMERSLACK of Linux."""
LEARN = 0.1
HEAD_START_S = 0.2
"""Delay of a synchronised start, beyond the latency to the farthest rank."""
MAX_LATE_S = 3e-4
"""Longest busy wait, to spare processors that others need."""


class SimulatedCompute(StageRuntime):
    """Sleeps for each operation as long as it takes in the plan."""

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
        # output bytes by operation, with stochastic wiring
        j = stage_of.get(rank, 0)
        sizes = [max(1, round(size)) for size in outputs]
        self._made = {"F": sizes[j], "H": sizes[-1], "B": sizes[max(j - 1, 0)]}
        self._payload = torch.zeros(max(self._sizes.values()), dtype=torch.uint8)
        stage, vectors = plan.averaged_stage(rank), plan.vector_bytes()
        shares = plan.averages_tied and j in (0, plan.head_stage) and rank in stage_of
        self.tied_numel = max(1, round(vectors[-1] / 4 / shrink)) if shares else 0
        numel = max(1, round(vectors[stage] / 4 / shrink)) + self.tied_numel
        # zeros take no memory until written, and a single device writes none
        self._vector = torch.from_numpy(np.zeros(numel, np.float32))
        self._sleeper = Sleeper()

    def begin(self, step: int, schedule: Schedule) -> None:
        """Start a step with a schedule."""
        self._schedule = schedule

    def run_op(self, kind: str, microbatch: int, received: Tensor | None) -> Tensor:
        """Sleep; returns as many bytes as a real operation."""
        self._sleeper.until(time.monotonic() + self._seconds[kind])
        if self._routes:
            return self._payload[: self._made[kind]]
        owner = self._rank
        if kind != "F":
            path = self._schedule.paths[microbatch]
            place = path.index(self._rank)
            # a gradient has the size of the activations that its receiver sent
            owner = path[-1] if kind == "H" else path[max(place - 1, 0)]
        return self._payload[: self._sizes[owner]]

    def buffer(self, message: Message) -> Tensor:
        """Memory for a message to this rank."""
        owner = message.destination if message.kind == "B" else message.source
        return torch.empty(self._sizes[owner], dtype=torch.uint8)

    def update(self, norm: float | None) -> None:
        """Sleep."""
        self._sleeper.until(time.monotonic() + self._update_s)


@dataclass(frozen=True)
class ComputeSimulation:
    """Simulated compute of a run; a `planner.executor.runtime.stage_runtime.Simulation`."""

    time_scale: TimeScale

    def make_runtime(self, plan: TrainingPlan, rank: int) -> SimulatedCompute:
        """Create the compute of a rank."""
        return SimulatedCompute(plan, rank, self.time_scale)

    def make_barrier(self, plan: TrainingPlan, ranks: RankGroup) -> CommonStart:
        """Create a barrier after which all ranks start at the same time."""
        return CommonStart(plan, ranks, self.time_scale)


class CommonStart:
    """Lets all ranks of one machine start at the same time."""

    def __init__(self, plan: TrainingPlan, ranks: RankGroup, time_scale: TimeScale) -> None:
        latency = plan.cluster.network.latency_s
        longest_s = float((3 * latency[0] + 2 * latency[:, 0]).max()) / time_scale.speed
        self._ranks, self._ahead_s = ranks, longest_s + HEAD_START_S

    def __call__(self, name: str) -> None:
        """Wait for all ranks, and then for a moment that all of them know in time."""
        self._ranks.barrier(name)
        store, key = self._ranks.store, f"{name}/moment"
        if self._ranks.rank == 0:
            store.set(key, repr(time.monotonic() + self._ahead_s))
        Sleeper().until(float(store.get(key)))


class Sleeper:
    """Sleeps until given times of the monotonic clock, for one thread.

    Systems wake a thread late, by tens of microseconds that depend on machine and load. It requests
    to be woken earlier by the delay observed so far, and busy-waits for the rest.
    """

    def __init__(self) -> None:
        self._late_s = 0.0
        if sys.platform == "linux":
            # sleeps then end about 1 instead of 50 microseconds late
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).prctl(SET_TIMER_SLACK, ctypes.c_ulong(1000), 0, 0, 0)

    def until(self, deadline_s: float) -> None:
        """Sleep until a time."""
        target = deadline_s - self._late_s
        if (remaining_s := target - time.monotonic()) > 0:
            time.sleep(remaining_s)
            late = time.monotonic() - target
            self._late_s = min(self._late_s + LEARN * (late - self._late_s), MAX_LATE_S)
        while time.monotonic() < deadline_s:
            pass
