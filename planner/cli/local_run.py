"""``planner run``: a plan on this machine, a process a device, measured against the prediction."""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from planner.checker.dispatch import check
from planner.clock.local_machine import as_executed, predict, require_memory
from planner.training_plan.error import PlanError
from planner.training_plan.file import load_plan
from planner.training_plan.model import TrainingPlan
from planner.workload.calibration import Calibration


def run_local(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Launch, relay and compare; returns the exit code."""
    plan = load_plan(args.plan)
    workload = as_executed(plan)
    violations = check(plan)
    if violations:
        raise PlanError(f"{args.plan}: {violations[0]}; make the plan again")
    if args.data is not None and not args.data.is_file():
        raise PlanError(f"{args.data}: is not a file; give a text file to train on")
    predicted = None
    if args.calibration is not None:
        predicted = predict(plan, workload, Calibration.load(args.calibration))
    require_memory(plan, workload)
    with tempfile.TemporaryDirectory() as folder:
        path = args.calibrate or Path(folder) / "calibration.json"
        command = _command(args, plan, None if args.calibration else path)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=_environment(len(plan.cluster))
        )
        assert process.stdout is not None
        steps: list[dict[str, float]] = []
        try:
            for line in process.stdout:
                if not line.startswith('{"event"'):
                    print(line, end="", file=sys.stderr)
                    continue
                event = json.loads(line)
                if event["event"] == "calibrated":
                    predicted = predict(plan, workload, Calibration.load(path))
                    continue
                assert predicted is not None
                expected = predicted[event["step"] % len(predicted)]
                steps.append({**event, "predicted_s": expected})
                if not args.json:
                    say(
                        f"step {event['step']:4d}   loss {event['loss']:8.4f}   measured "
                        f"{event['measured_s']:7.3f} s   predicted {expected:7.3f} s"
                    )
            code = process.wait()
        except BaseException:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=20)
            process.kill()
            raise
    if code != 0:
        print("planner run: a rank failed, see above", file=sys.stderr)
        return 1
    _summary(args, plan, steps, say)
    return 0


def _summary(
    args: argparse.Namespace,
    plan: TrainingPlan,
    steps: list[dict[str, float]],
    say: Callable[[str], None],
) -> None:
    if args.json:
        say(json.dumps({"planned_step_s": plan.predicted.step_s, "steps": steps}, indent=1))
        return
    # the first step also warms up caches and connections
    for k in dict.fromkeys(plan.cycle):
        mine = [s for s in steps[1:] if plan.cycle[int(s["step"]) % len(plan.cycle)] == k]
        if not mine:
            continue
        middle = float(np.median([s["measured_s"] for s in mine]))
        predicted = mine[0]["predicted_s"]
        what = "" if len(set(plan.cycle)) == 1 else f" ({plan.schedules[k].name})"
        say(
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


def _command(args: argparse.Namespace, plan: TrainingPlan, calibrate: Path | None) -> list[str]:
    ids = plan.cluster.network.ids
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(len(ids))),
        *("-m", "planner.executor", str(args.plan), "--events"),
        *("--devices", *ids),
        *("--steps", str(args.steps)),
        *("--learning-rate", str(args.learning_rate)),
    ]
    for flag, value in (
        ("--data", args.data),
        ("--calibrate", calibrate),
        ("--trace", args.trace),
        ("--device", args.device),
    ):
        if value is not None:
            command += [flag, str(value)]
    return command
