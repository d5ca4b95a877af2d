"""``planner run``: run a plan on this machine and compare it with its prediction.

Every device of the plan is one local process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from planner.checker.dispatch import check
from planner.cli.output import INTERRUPTED
from planner.cli.progress import PROGRESS
from planner.executor.elastic.membership_events import MEMBERSHIP_EVENTS, event_line
from planner.executor.fault_tolerance.shutdown import FAILED, HINT
from planner.executor.launch.run_config import RunConfig, add_options
from planner.executor.runtime.run_summary import summary
from planner.network.dtype import Dtype
from planner.report.figures import samples
from planner.simulator.host_prediction import executable_workload, predict_on_host, require_memory
from planner.swarm.rebalance_policy import RebalanceDecision
from planner.training_plan.error import PlanError
from planner.training_plan.file import load_plan
from planner.training_plan.migration import Migration
from planner.training_plan.model import TrainingPlan
from planner.utils.output_files import add_force
from planner.utils.text import counted
from planner.workload.calibration import Calibration
from planner.workload.workload import Workload

WAIT_S, START_S = 60.0, 4.0
"""Rendezvous timeout in seconds: fixed part, and part per rank."""

RESTARTS = 3
"""Most restarts of a device's process with ``--elastic``."""

RANKS_ONLY = ("events", "own_pace", "record", "impose", "speed", "shrink", "rest")
"""Options that `planner run` does not offer."""

OPTIONAL_METRICS = ("tokens_per_s", "mfu", "gradient_norm", "loss_scale")
"""Fields of a step event that are only sometimes known."""

FEW_STEPS = 5
"""Below this number of measured steps, the summary states the number."""

ABOUT = "run a plan on this machine, with one local process per device"
EXAMPLE = "planner run plan.json --steps 10"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the plan, steps, training options, and what to measure."""
    sub.add_argument("plan", type=Path, help="plan file, as planner plan writes it")
    sub.add_argument(
        "--calibration", type=Path, help="file with compute times that were measured before"
    )
    add_options(sub, exclude=RANKS_ONLY)
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """Validate the outputs, then launch the run."""
    config = RunConfig.from_arguments(args, devices=())
    config.validate_files()
    config.validate()
    return launch(config, args.calibration, as_json=args.json)


def launch(config: RunConfig, calibration: Path | None, *, as_json: bool) -> int:
    """Validate, run the ranks, print their events and a summary; return the exit code."""
    PROGRESS.start("loading PyTorch and checking the plan")
    plan = load_plan(config.plan)
    # imported here: only a run needs torch
    from planner.executor.checkpoint.checkpoint import require_checkpoint, require_fresh_folder
    from planner.executor.checkpoint.checkpoint_files import newest_with_shards
    from planner.executor.data.microbatches import require_sample
    from planner.executor.launch.local import local_environment, run_local
    from planner.executor.rendezvous.address import configured_address
    from planner.executor.rendezvous.secret import SECRET_FILE, make_secret
    from planner.executor.runtime.stage_module import require_executable
    from planner.huggingface.export import Export
    from planner.huggingface.weights import require_weights
    from planner.utils.processors import busy_warning

    # report once what every rank would reject
    config.validate_for_plan(plan)
    configured_address()
    arch = require_executable(plan)
    for option, text in (
        ("--data", config.training_data()),
        ("--eval-data", config.evaluation_data()),
    ):
        if text is not None:
            require_sample(plan, text, option)
    if config.resume is not None:
        settings = config.optimizer_config().to_dict()
        done = require_checkpoint(config.resume, settings, config.steps)
        if done is not None:
            config.require_steps_left(done)
    if config.checkpoint is not None:
        require_fresh_folder(config.checkpoint, config.resume)
    if config.weights is not None:
        require_weights(config.weights, arch)
    if config.export is not None:
        Export(config.export, plan, config.weights)
    alone = [j for j, group in enumerate(plan.assignment.groups) if len(group) == 1]
    if config.elastic and alone:
        device = plan.cluster.network.ids[plan.assignment.groups[alone[0]][0]]
        _warn(
            f"planner run: warning: stage {alone[0]} has one device, {device!r}: the run ends if "
            "it is lost, also with --elastic"
        )
    workload = executable_workload(plan)
    violations = check(plan)
    if violations:
        raise PlanError(f"{config.plan}: {violations[0]}; make the plan again")
    predicted = None
    if calibration is not None:
        predicted = predict_on_host(plan, workload, Calibration.load(calibration))
    if not _on_gpus(config.device):
        require_memory(plan, workload)
        if warning := busy_warning():
            _warn(f"planner run: warning: {warning}")
    stopped: KeyboardInterrupt | None = None
    with tempfile.TemporaryDirectory() as folder:
        path = config.calibrate or Path(folder) / "calibration.json"
        steps = _EventPrinter(
            plan, workload, path, predicted, as_json, config.steps, _advice(plan, config.device)
        )
        ids = plan.cluster.network.ids
        processes = sum(plan.gpu_counts)
        try:
            ranks = replace(
                config,
                devices=ids,
                events=True,
                calibrate=None if calibration else path,
                # many processes on few CPUs start slowly
                wait=config.wait or WAIT_S + START_S * processes,
                force=True,  # outputs were validated before
            )
            code, reason = run_local(
                [sys.executable, "-m", "planner.executor", *ranks.to_arguments()],
                ids,
                # with the secret as a file: others can read command lines and environments
                local_environment() | {SECRET_FILE: str(make_secret(Path(folder)))},
                steps.take,
                _warn,
                restarts=RESTARTS if config.elastic else None,
            )
        except KeyboardInterrupt as error:
            # still print the summary of the steps that were done
            code, reason, stopped = INTERRUPTED, "interrupted", error
    PROGRESS.clear()
    _summary(plan, steps, reason, as_json)
    if stopped is not None or (code == FAILED and HINT not in (reason or "")):
        files = None if config.checkpoint is None else newest_with_shards(config.checkpoint)
        if files is not None:
            _warn(f"planner run: continue after {files.steps} steps with --resume {files.folder}")
    if stopped is not None:
        raise stopped
    return code


def _on_gpus(choice: str) -> bool:
    """Whether ranks compute on GPUs; they then check memory themselves."""
    if choice == "cpu":
        return False
    import torch

    return torch.cuda.is_available()


def _advice(plan: TrainingPlan, device: str) -> str:
    """Advice on a format that CPUs compute slowly; empty if it does not apply."""
    dtype = plan.workload.precision.compute
    if dtype is Dtype.FP32 or _on_gpus(device):
        return ""
    return f"note: {dtype} is slow on most CPUs; planner plan --precision fp32 may be faster"


class _EventPrinter:
    """Collect and print the ranks' events."""

    def __init__(
        self,
        plan: TrainingPlan,
        workload: Workload,
        calibration: Path,
        predicted: list[float] | None,
        as_json: bool,
        steps: int,
        advice: str = "",
    ) -> None:
        self.done: list[dict[str, Any]] = []
        self.devices: list[dict[str, Any]] = []
        self.evaluated: list[dict[str, Any]] = []
        self.changes: list[dict[str, Any]] = []
        self._plan, self._workload, self._path = plan, workload, calibration
        self._predicted, self._as_json, self._of = predicted, as_json, steps
        self._doing = ""
        work = workload.architecture
        tokens = samples(plan) * (0 if work is None else work.sequence)
        self._print(
            f"training {workload.name}: {steps} steps of {tokens:,.0f} tokens; planned on "
            f"{plan.network_name or 'its network'}: {_time(plan.predicted.step_s)} a step"
        )
        if advice:
            self._print(advice)
        if predicted is not None:
            self._say_predicted()
        self._phase(f"starting {counted(len(plan.cluster.network.ids), 'process')}")

    def take(self, line: str) -> None:
        """Handle one line of a rank's standard output."""
        if not line.startswith('{"event"'):
            _warn(line)
            return
        event = json.loads(line)
        if event["event"] == "calibrated":
            self._predicted = predict_on_host(
                self._plan, self._workload, Calibration.load(self._path)
            )
            self._say_predicted()
        elif event["event"] == "phase":
            self._phase(event["doing"])
        elif event["event"] == "evaluated":
            self.evaluated.append({name: event[name] for name in event if name != "event"})
            self._print(
                f"after {event['steps']} steps, {event['paths']}: held-out loss "
                f"{_number(event['loss'], '.4f')}, perplexity "
                f"{_number(event['perplexity'], '.4g')}"
            )
        elif event["event"] == "move":
            move = Migration(event["device"], event["stage"], event["steps"])
            decision = RebalanceDecision(move, event["before_per_s"], event["after_per_s"])
            self.changes.append(event)
            self._print(decision.said(event["why_not"]))
        elif event["event"] == "loss":
            self._step(event["step"])["loss"] = event["loss"]
            self._print(f"loss of step {event['step']}: {_number(event['loss'], '.4f')}")
        elif event["event"] in MEMBERSHIP_EVENTS:
            self.changes.append(event)
            self._print(event_line(event))
        elif event["event"] == "devices":
            self.devices = event["devices"]
            self._print(summary(self.devices))
        elif not self.done or event["step"] > self.done[-1]["step"]:
            # a step may be reported twice if the reporting rank was lost right after printing it
            assert self._predicted is not None
            self.done.append(
                {
                    "step": event["step"],
                    "loss": None,
                    "measured_s": event["took_s"],
                    "predicted_s": self._predicted[event["step"] % len(self._predicted)],
                    **{name: event[name] for name in OPTIONAL_METRICS if name in event},
                }
            )
            # a loss arrives later than its step
            if event["loss_step"] is not None:
                self._step(event["loss_step"])["loss"] = event["loss"]
            done = int(event["step"]) + 1
            self._doing = "shutting down" if done == self._of else f"step {done + 1} of {self._of}"
            self._print(_line(event, self.done[-1]["predicted_s"]))

    def _step(self, step: int) -> dict[str, Any]:
        # the event of a step is missing if the rank that reports it was lost
        return next((event for event in reversed(self.done) if event["step"] == step), {})

    def _say_predicted(self) -> None:
        assert self._predicted is not None
        mean = sum(self._predicted) / len(self._predicted)
        self._print(f"predicted on this machine: {_time(mean)} a step")

    def _phase(self, doing: str) -> None:
        self._doing = doing
        PROGRESS.phase(doing)

    def _show_phase(self, doing: str) -> None:
        self._doing = doing
        PROGRESS.start(doing)

    def _print(self, text: str) -> None:
        if not self._as_json:
            PROGRESS.clear()
            print(text, flush=True)
        if self._doing:
            self._show_phase(self._doing)


def _warn(line: str) -> None:
    PROGRESS.clear()
    print(line, file=sys.stderr, flush=True)


def _number(value: float | None, shape: str) -> str:
    """Format a number of an event; it is None if training has diverged."""
    return "not finite" if value is None else format(value, shape)


def _time(value: float) -> str:
    """Format seconds with three decimals, or three significant digits of a short time."""
    return f"{value:.3f} s" if value >= 0.1 else f"{value:.3g} s"


def _line(event: dict[str, Any], predicted_s: float) -> str:
    loss, of = _number(event["loss"], "8.4f"), event["loss_step"]
    loss = "no loss yet" if of is None else f"loss {loss} (of step {of})"
    norm = ""
    if "gradient_norm" in event:
        norm = f"   norm {_number(event['gradient_norm'], '.3g')}"
        if "loss_scale" in event and event["gradient_norm"] is None:
            norm += f", skipped; loss scale {event['loss_scale']:g} from now on"
    return (
        f"step {event['step']:4d}   {loss}   measured {_time(event['took_s']):>9}   predicted "
        f"{_time(predicted_s):>9}   {event['tokens_per_s']:.0f} tokens/s"
        + (f"   MFU {event['mfu']:.1%}" if "mfu" in event else "")
        + norm
    )


def _summary(plan: TrainingPlan, events: _EventPrinter, failed: str | None, as_json: bool) -> None:
    steps = events.done
    if as_json:
        data = {
            "plan": plan.content_hash,
            "planned_step_s": plan.predicted.step_s,
            "steps": steps,
            "evaluated": events.evaluated,
            **({"changes": events.changes} if events.changes else {}),
            "devices": events.devices,
            "failed": failed,
        }
        print(json.dumps(data, allow_nan=False, indent=1))
    if as_json or failed is not None:
        return
    # the first step includes warm-up of caches and connections
    kinds = dict.fromkeys(_kind(plan, int(s["step"])) for s in steps[1:])
    for kind in sorted(kinds):
        mine = [s for s in steps[1:] if _kind(plan, int(s["step"])) == kind]
        middle = float(np.median([s["measured_s"] for s in mine]))
        predicted = mine[0]["predicted_s"]
        labels = [] if len(set(plan.cycle)) == 1 else [plan.schedules[kind[0]].name]
        if plan.sync.every_steps > 1:
            alone = "that average within regions" if plan.two_frequency else "without averaging"
            labels.append("that average" if kind[1] else alone)
        suffix = f" ({', '.join(labels)})" if labels else ""
        print(
            f"median of steps {steps[1]['step']} to {steps[-1]['step']}{suffix}: measured "
            f"{_time(middle)}, predicted on this machine {_time(predicted)} "
            f"({middle / predicted - 1:+.0%}), planned on "
            f"{plan.network_name or 'its network'} {_time(plan.predicted.step_s)}"
            + (" in the mean" if plan.sync.every_steps > 1 else "")
            + f"; only {counted(len(mine), 'step')} measured" * (len(mine) < FEW_STEPS)
        )


def _kind(plan: TrainingPlan, step: int) -> tuple[int, bool]:
    """Return a step's schedule, and whether the step averages."""
    return plan.cycle[step % len(plan.cycle)], plan.sync.due(step)
