"""Runs a plan on an emulated network and compares it with the prediction."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.emulate.capacity import CARRIED_BYTES_PER_S, need_of
from planner.emulate.comparison import Comparison, compare
from planner.emulate.execution import Step, parts_of, planned_steps, steps_of, warm
from planner.emulate.links import links_of
from planner.emulate.network import SwitchStats, emulated
from planner.emulate.prediction import Prediction, predict, predict_here
from planner.emulate.processors import ProcessorUsage
from planner.emulate.ranks import RunSettings, run_ranks
from planner.simulator.host_prediction import executable_workload, require_memory
from planner.training_plan.model import TrainingPlan
from planner.workload.calibration import Calibration
from planner.workload.host_memory import available_bytes

MOST_BUSY = 0.85
"""Of the processors: beyond it ranks wait for each other, not for the network."""


@dataclass(frozen=True)
class Emulation:
    """A plan that was run.

    Attributes
    ----------
    prediction, comparison
        What the simulator says, and both side by side.
    typical
        A step of the cycle's first schedule, from rest unless none was: neither fast nor slow.
    carried
        What the switch did.
    busy
        Share of this machine's processor time that was used during the steps.
    """

    asked: RunSettings
    prediction: Prediction
    comparison: Comparison
    typical: Step
    carried: SwitchStats
    busy: float

    def warnings(self) -> list[str]:
        """Why the executed times may be this machine's and not the network's."""
        found = []
        if self.busy > MOST_BUSY:
            remedy = f"run with --speed {self.asked.speed / 2:g}"
            if self.asked.real_compute:
                remedy = "plan a smaller model or fewer devices, or leave out --real-compute"
            found.append(
                f"processors were {self.busy:.0%} busy, so that ranks waited for them; {remedy}"
            )
        if self.carried.lost:
            found.append(
                f"the switch had no room for {self.carried.lost} of {self.carried.packets} packets "
                f"and lost them; run with a larger --shrink than {self.asked.shrink:g}"
            )
        return found


@dataclass(frozen=True)
class EmulationSettings:
    """What a user chooses.

    Attributes
    ----------
    speed
        Times are divided by it.
    shrink
        Bytes are divided by it; None: by as much as this machine needs.
    steps, rest
        How many to measure, at least: chained, and each from rest.
    real_compute
        Train the real model, on this machine's processors.
    jitter_s
        By how much latencies vary, about once a message; the simulator knows nothing of it.
    """

    speed: float = 1.0
    shrink: float | None = None
    steps: int = 5
    rest: int = 5
    real_compute: bool = False
    jitter_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("speed", "shrink"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"--{name} is {value:g}; give a number above 0")
        if not 0 <= self.jitter_s < float("inf"):
            raise ValueError(f"--jitter-ms is {1e3 * self.jitter_s:g}; give 0 or more")
        if self.real_compute and (self.speed != 1.0 or self.shrink not in (None, 1.0)):
            raise ValueError(
                "--real-compute trains in real time with real messages; leave out --speed and "
                "--shrink"
            )


def resolve_settings(
    plan: TrainingPlan, settings: EmulationSettings, told: Callable[[str], None] = lambda line: None
) -> RunSettings:
    """Settle how a plan is run here."""
    rest, steps = planned_steps(plan, settings.rest, settings.steps)
    if settings.real_compute:
        require_memory(plan, executable_workload(plan))
        return RunSettings(0, steps, real_compute=True, jitter_s=settings.jitter_s)
    need = need_of(plan, links_of(plan.cluster))
    rate = need.rate_bytes_per_s * settings.speed
    least = need.least_shrink(settings.speed, available_bytes())
    shrink = least if settings.shrink is None else settings.shrink
    told(
        f"the plan's messages can get {rate / 1e6:.4g} MB/s at the same time, this machine carries "
        f"about {CARRIED_BYTES_PER_S / 1e6:.0f}: rates and bytes are divided by {shrink:g}"
    )
    if shrink < least:
        slower = settings.speed * shrink / least
        told(
            f"warning: --shrink {shrink:g} is too little for this machine, so that what is "
            f"executed will be late; run with --shrink {least:g} or --speed {slower:.2g}"
        )
    return RunSettings(rest, steps, settings.speed, shrink, jitter_s=settings.jitter_s)


def emulate(
    path: Path,
    plan: TrainingPlan,
    asked: RunSettings,
    told: Callable[[str], None] = lambda line: None,
) -> Emulation:
    """Run a plan on its network and compare."""
    prediction = None if asked.real_compute else predict(plan)
    links = links_of(plan.cluster, asked.speed, asked.shrink, asked.jitter_s)
    with emulated(links) as network, tempfile.TemporaryDirectory() as name:
        processors = ProcessorUsage()

        def line(text: str) -> None:
            processors.look()
            told(text)

        calibration = Path(name) / "calibration.json"
        more = ("--calibrate", str(calibration)) if asked.real_compute else ()
        records = run_ranks(network, path, plan, asked, Path(name), line, more)
        carried = network.stop()
        if prediction is None:
            prediction = predict_here(plan, Calibration.load(calibration))
    rest = steps_of(records, True, asked.speed)
    chained = steps_of(records, False, asked.speed)
    executed = parts_of(plan, rest, chained, asked.speed)
    return Emulation(
        asked,
        prediction,
        compare(plan, prediction, executed, rest),
        _typical(plan, rest or chained),
        carried,
        processors.busy,
    )


def _typical(plan: TrainingPlan, steps: Sequence[Step]) -> Step:
    first = [step for step in warm(plan, steps) if step.number % len(plan.cycle) == 0]
    return sorted(first, key=lambda step: step.pipeline_s)[len(first) // 2]
