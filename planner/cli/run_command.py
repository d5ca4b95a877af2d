"""``planner run``: a plan on this machine, a process a device, measured against the prediction."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.checker.dispatch import check
from planner.cli.arguments import positive
from planner.cli.output import INVALID_PLAN, require_writable
from planner.clock.local_machine import as_executed, predict, require_memory
from planner.training_plan.error import PlanError
from planner.training_plan.file import load_plan
from planner.training_plan.model import TrainingPlan
from planner.workload.calibration import Calibration

NAME = "run"
ABOUT = "run a plan on this machine, one local process a device"


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Plan, steps, what to train on, what to measure."""
    sub.add_argument("plan", type=Path)
    sub.add_argument("--steps", type=positive, default=10)
    sub.add_argument("--learning-rate", type=float, default=1e-3)
    sub.add_argument("--data", type=Path, help="text file to train on; default: synthetic text")
    sub.add_argument("--calibrate", type=Path, help="measure F, H, B and store them here")
    sub.add_argument("--calibration", type=Path, help="use times measured before")
    sub.add_argument("--trace", type=Path, help="write the executed iteration here")
    sub.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])


def run(args: argparse.Namespace) -> int:
    """Refuse what cannot be written or held, then launch."""
    require_writable(args.trace, [".json"])
    require_writable(args.calibrate, [".json"])
    asked = LocalRun(
        args.plan,
        args.steps,
        args.learning_rate,
        args.data,
        args.calibrate,
        args.calibration,
        args.trace,
        args.device,
    )
    return launch(asked, as_json=args.json)


@dataclass(frozen=True)
class LocalRun:
    """What to run here.

    Attributes
    ----------
    plan
        The plan file.
    calibrate, calibration
        Where measured compute times go, or where they were stored before.
    trace
        Where the executed iteration goes.
    device
        ``"auto"``, ``"cpu"`` or ``"cuda"``.
    """

    plan: Path
    steps: int
    learning_rate: float
    data: Path | None
    calibrate: Path | None
    calibration: Path | None
    trace: Path | None
    device: str


def launch(asked: LocalRun, *, as_json: bool) -> int:
    """Launch, relay and compare; returns the exit code."""
    plan = load_plan(asked.plan)
    workload = as_executed(plan)
    violations = check(plan)
    if violations:
        raise PlanError(f"{asked.plan}: {violations[0]}; make the plan again")
    if asked.data is not None and not asked.data.is_file():
        raise PlanError(f"{asked.data}: is not a file; give a text file to train on")
    predicted = None
    if asked.calibration is not None:
        predicted = predict(plan, workload, Calibration.load(asked.calibration))
    require_memory(plan, workload)
    with tempfile.TemporaryDirectory() as folder:
        path = asked.calibrate or Path(folder) / "calibration.json"
        command = _command(asked, plan, None if asked.calibration else path)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=_environment(len(plan.cluster))
        )
        assert process.stdout is not None
        steps: list[dict[str, Any]] = []
        try:
            for line in process.stdout:
                if not line.startswith('{"event"'):
                    print(line, end="", file=sys.stderr)
                    continue
                event = json.loads(line)
                if event["event"] == "calibrated":
                    predicted = predict(plan, workload, Calibration.load(path))
                elif event["event"] == "loss":
                    steps[event["step"]]["loss"] = event["loss"]
                    if not as_json:
                        print(f"loss of step {event['step']}: {event['loss']:.4f}")
                else:
                    assert predicted is not None
                    steps.append(_step(event, steps, predicted))
                    if not as_json:
                        print(_line(event, steps[-1]["predicted_s"]))
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()
            raise
    if code != 0:
        print("planner run: a rank failed, see above", file=sys.stderr)
        return INVALID_PLAN
    _summary(plan, steps, as_json)
    return 0


def _step(
    event: dict[str, Any], steps: list[dict[str, Any]], predicted: list[float]
) -> dict[str, Any]:
    """A step that has ended; losses come late and belong to the step they are of."""
    step = {
        "step": event["step"],
        "loss": None,
        "measured_s": event["took_s"],
        "predicted_s": predicted[event["step"] % len(predicted)],
    }
    if event["loss_step"] is not None:
        [*steps, step][event["loss_step"]]["loss"] = event["loss"]
    return step


def _line(event: dict[str, Any], predicted_s: float) -> str:
    known = event["loss"] is not None
    loss = f"loss {event['loss']:8.4f} (of step {event['loss_step']})" if known else "no loss yet"
    return (
        f"step {event['step']:4d}   {loss}   measured {event['took_s']:7.3f} s   predicted "
        f"{predicted_s:7.3f} s"
    )


def _summary(plan: TrainingPlan, steps: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"planned_step_s": plan.predicted.step_s, "steps": steps}, indent=1))
        return
    # the first step also warms up caches and connections
    for k in dict.fromkeys(plan.cycle):
        mine = [s for s in steps[1:] if plan.cycle[int(s["step"]) % len(plan.cycle)] == k]
        if not mine:
            continue
        middle = float(np.median([s["measured_s"] for s in mine]))
        predicted = mine[0]["predicted_s"]
        what = "" if len(set(plan.cycle)) == 1 else f" ({plan.schedules[k].name})"
        print(
            f"median of steps 1 to {len(steps) - 1}{what}: measured {middle:.3f} s, predicted on "
            f"this machine {predicted:.3f} s ({middle / predicted - 1:+.0%}), planned on "
            f"{plan.network_name or 'its network'} {plan.predicted.step_s:.3f} s"
        )


def _environment(ranks: int) -> dict[str, str]:
    from planner.executor.calibrate import cores

    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, cores() // ranks)))
    if sys.platform == "linux":  # else gloo may look for a host name nobody can resolve
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment


def _command(asked: LocalRun, plan: TrainingPlan, calibrate: Path | None) -> list[str]:
    ids = plan.cluster.network.ids
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(len(ids))),
        *("-m", "planner.executor", str(asked.plan), "--events"),
        *("--devices", *ids),
        *("--steps", str(asked.steps)),
        *("--learning-rate", str(asked.learning_rate)),
    ]
    for flag, value in (
        ("--data", asked.data),
        ("--calibrate", calibrate),
        ("--trace", asked.trace),
        ("--device", asked.device),
    ):
        if value is not None:
            command += [flag, str(value)]
    return command
