"""Run a plan on an emulated network and compare it with the prediction."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from planner.emulate.capacity import CARRIED_BYTES_PER_S, need_of
from planner.emulate.comparison import Comparison, compare
from planner.emulate.execution import Step, parts_of, planned_steps, steps_of, warm
from planner.emulate.links import links_of
from planner.emulate.namespaces import EmulationError
from planner.emulate.network import SwitchStats, emulated
from planner.emulate.prediction import Prediction, predict, predict_here
from planner.emulate.processors import ProcessorUsage
from planner.emulate.ranks import RunSettings, run_ranks
from planner.simulator.host_prediction import executable_workload, require_memory
from planner.training_plan.model import TrainingPlan
from planner.utils.processors import MAX_BUSY, busy_warning
from planner.workload.calibration import Calibration
from planner.workload.host_memory import available_bytes

OPERATION_S = 2e-4
"""Handling of an operation and its messages on one core, which the clock does not count."""
MAX_HANDLING, FEW_HANDLING = 0.05, 0.025
"""Share of a step for it above which there is a warning, and with the speed that this suggests."""


@dataclass(frozen=True)
class Emulation:
    """Result of an emulation.

    Attributes
    ----------
    settings
        Settings of the run.
    prediction, comparison
        Prediction of the simulator, and its comparison with the run.
    typical
        Step of median duration of the cycle's first schedule, on an idle system if one was
        measured.
    carried
        Statistics of the switch.
    busy
        CPU utilisation of this machine during the steps.
    """

    settings: RunSettings
    prediction: Prediction
    comparison: Comparison
    typical: Step
    carried: SwitchStats
    busy: float

    def warnings(self) -> list[str]:
        """Return reasons why times may reflect this machine instead of the network."""
        messages = []
        if self.busy > MAX_BUSY:
            remedy = f"run with a lower --speed than {self.settings.speed:g}"
            if self.settings.real_compute:
                remedy = "plan a smaller model or fewer devices, or leave out --real-compute"
            messages.append(
                f"CPUs were {self.busy:.0%} busy, so ranks had to wait for them; {remedy}"
            )
        if self.carried.lost:
            messages.append(
                f"the switch dropped {self.carried.lost} of {self.carried.packets} packets; run "
                f"with a larger --shrink than {self.settings.shrink:g}"
            )
        return messages


@dataclass(frozen=True)
class EmulationSettings:
    """Settings chosen by the user.

    Attributes
    ----------
    speed
        Divisor of all times.
    shrink
        Divisor of all bytes; None: as much as this machine needs.
    steps, rest
        Least number of measured steps: consecutive ones, and ones that start on an idle system.
    real_compute
        Whether to train the real model on this machine's CPUs.
    jitter_s
        Amplitude of latency jitter, about once per message; the simulator does not model it.
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
                raise ValueError(f"--{name} must be above 0, found {value:g}; give a larger number")
        if not 0 <= self.jitter_s < float("inf"):
            raise ValueError(
                f"--jitter-ms must be at least 0, found {1e3 * self.jitter_s:g}; give another "
                "number"
            )
        if self.real_compute and (self.speed != 1.0 or self.shrink not in (None, 1.0)):
            raise ValueError(
                "--real-compute runs at real speed and size; leave out --speed and --shrink"
            )


def resolve_settings(
    plan: TrainingPlan,
    settings: EmulationSettings,
    report_line: Callable[[str], None] = lambda line: None,
) -> RunSettings:
    """Choose numbers of steps and scaling factors for this machine."""
    idle_steps, steps = planned_steps(plan, settings.rest, settings.steps)
    if settings.real_compute:
        if (degree := max(plan.gpu_counts)) > 1:
            raise EmulationError(
                f"--real-compute is not supported with devices of {degree} GPUs; leave it out"
            )
        require_memory(plan, executable_workload(plan))
        return RunSettings(0, steps, real_compute=True, jitter_s=settings.jitter_s)
    need = need_of(plan, links_of(plan.cluster))
    rate = need.rate_bytes_per_s * settings.speed
    least = need.least_shrink(settings.speed, available_bytes())
    shrink = least if settings.shrink is None else settings.shrink
    divided = f": rates and bytes are divided by {shrink:g}" if shrink != 1 else ""
    report_line(
        f"the plan sends up to {rate / 1e6:.4g} MB/s in total, this machine can carry about "
        f"{CARRIED_BYTES_PER_S / 1e6:.0f} MB/s{divided}"
    )
    if shrink < least:
        slower = settings.speed * shrink / least
        report_line(
            f"warning: --shrink {shrink:g} is too small for this machine, so executed times will "
            f"be too long; run with --shrink {least:g} or --speed {slower:.2g}"
        )
    operations = max(len(order) for schedule in plan.schedules for order in schedule.order)
    share = OPERATION_S * operations * settings.speed / plan.predicted.step_s
    if share > MAX_HANDLING:
        report_line(
            f"warning: {operations} operations of a device in {plan.predicted.step_s:.2g} s are "
            "too many for this machine, so executed times will be too long; run with --speed "
            f"{settings.speed * FEW_HANDLING / share:.2g}"
        )
    return RunSettings(idle_steps, steps, settings.speed, shrink, jitter_s=settings.jitter_s)


def emulate(
    path: Path,
    plan: TrainingPlan,
    settings: RunSettings,
    report_line: Callable[[str], None] = lambda line: None,
) -> Emulation:
    """Run a plan on its emulated network and compare it with the prediction."""
    if warning := busy_warning():
        report_line(f"warning: {warning}")
    prediction = None if settings.real_compute else predict(plan)
    links = links_of(plan.cluster, settings.speed, settings.shrink, settings.jitter_s)
    with emulated(links) as network, tempfile.TemporaryDirectory() as name:
        processors = ProcessorUsage()
        calibration = Path(name) / "calibration.json"

        def line(text: str) -> None:
            processors.look()
            if str(calibration) not in text:  # which is deleted at the end
                report_line(text)

        extra_options = ("--calibrate", str(calibration)) if settings.real_compute else ()
        records = run_ranks(network, path, plan, settings, Path(name), line, extra_options)
        carried = network.stop()
        if prediction is None:
            prediction = predict_here(plan, Calibration.load(calibration))
    idle_records = steps_of(records, True, settings.speed)
    chained = steps_of(records, False, settings.speed)
    executed = parts_of(plan, idle_records, chained, settings.speed)
    return Emulation(
        settings,
        prediction,
        compare(plan, prediction, executed, idle_records),
        _typical(plan, idle_records or chained),
        carried,
        processors.busy,
    )


def _typical(plan: TrainingPlan, steps: Sequence[Step]) -> Step:
    first = [step for step in warm(plan, steps) if step.number % len(plan.cycle) == 0]
    return sorted(first, key=lambda step: step.pipeline_s)[len(first) // 2]
