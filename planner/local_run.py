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
from dataclasses import replace
from pathlib import Path

import numpy as np

from planner.compose.schedules import most_live
from planner.compute_times import Calibration
from planner.network import Network
from planner.plan import PlanError, TrainingPlan, load_plan
from planner.presets import transformer
from planner.simulate import simulate
from planner.workload import Workload

PROCESS_BYTES = 350e6
"""A Python process with torch loaded, before any tensor."""
USABLE = 0.9
"""Of the memory that is available now."""


def run_local(args: argparse.Namespace, say: Callable[[str], None]) -> int:
    """Launch, relay and compare; returns the exit code."""
    plan = load_plan(args.plan)
    workload = as_executed(plan)
    require_memory(plan, workload)
    with tempfile.TemporaryDirectory() as folder:
        path = args.calibration or args.calibrate or Path(folder) / "calibration.json"
        command = _command(args, plan, None if args.calibration else path)
        predicted = None
        if args.calibration is not None:
            predicted = predict(plan, workload, Calibration.load(path))
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=_environment(len(plan.cluster))
        )
        assert process.stdout is not None
        measured: list[float] = []
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
                measured.append(event["measured_s"])
                steps.append({**event, "predicted_s": predicted})
                if not args.json:
                    say(
                        f"step {event['step']:4d}   loss {event['loss']:8.4f}   measured "
                        f"{event['measured_s']:7.3f} s   predicted {predicted:7.3f} s"
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
    _summary(args, plan, predicted, measured, steps, say)
    return 0


def _summary(
    args: argparse.Namespace,
    plan: TrainingPlan,
    predicted: float | None,
    measured: list[float],
    steps: list[dict[str, float]],
    say: Callable[[str], None],
) -> None:
    if args.json:
        say(json.dumps({"planned_step_s": plan.predicted.step_s, "steps": steps}, indent=1))
    elif predicted is not None and len(measured) > 1:
        # the first step also warms up caches and connections
        middle = float(np.median(measured[1:]))
        say(
            f"median of steps 1 to {len(measured) - 1}: measured {middle:.3f} s, predicted on this "
            f"machine {predicted:.3f} s ({middle / predicted - 1:+.0%}), planned on "
            f"{plan.network_name or 'its network'} {plan.predicted.step_s:.3f} s"
        )


def as_executed(plan: TrainingPlan) -> Workload:
    """The workload in the executor's 32-bit activations."""
    w = plan.workload
    if w.architecture is None:
        raise PlanError(
            f"workload.architecture: {w.name!r} cannot be built by the executor; plan for a GPT-2 "
            "or LLaMA workload"
        )
    return transformer(
        w.name,
        w.architecture,
        batch_samples=w.batch_samples,
        microbatch_samples=w.microbatch_samples,
        activation_bytes_per_element=4.0,
    )


def need_bytes(plan: TrainingPlan, workload: Workload) -> float:
    """Memory of all ranks together: processes, weights, gradients, moments, activations."""
    total = len(plan.cluster) * PROCESS_BYTES
    held = [most_live(s) for s in plan.schedules]
    heads = {s.head_device(b) for s in plan.schedules for b in range(len(s.paths))}
    for d, j in plan.stage_of.items():
        stage = workload.stage(*plan.stage_layers[j])
        parameters = stage.parameters + (workload.head.parameters if d in heads else 0)
        total += 16.0 * parameters
        live = max(h[d] for h in held)
        total += live * stage.saved_bytes * workload.microbatch_samples
        if d in heads:  # logits, their softmax and gradient
            total += 3 * workload.head.saved_bytes * workload.microbatch_samples
    return total


def available_bytes() -> float:
    """Memory that this machine can still give."""
    with suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = next(line for line in lines if line.startswith("MemAvailable"))
        return float(found.split()[1]) * 1024
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def require_memory(plan: TrainingPlan, workload: Workload) -> None:
    """Refuse a plan that this machine cannot hold, with the numbers."""
    need, have = need_bytes(plan, workload), available_bytes()
    if need > USABLE * have:
        raise PlanError(
            f"the plan's {len(plan.cluster)} processes need about {need / 1e9:.1f} GB, this "
            f"machine has {have / 1e9:.1f} GB available and {USABLE:.0%} of it may be "
            "used; plan a smaller model, sequence or batch, or fewer devices, or run on several "
            "machines"
        )


def predict(plan: TrainingPlan, workload: Workload, calibration: Calibration) -> float:
    """Step time on this machine: measured compute times, its cores shared, its own links."""
    n = len(plan.cluster)
    off = np.ones((n, n))
    network = Network(
        off * calibration.link_latency_s,
        off * calibration.link_bandwidth_bytes_per_s,
        plan.cluster.network.ids,
    )
    times = calibration.compute_times(
        network.ids, workload, plan.assignment.groups, plan.stage_layers
    )
    here = replace(
        plan.cluster,
        network=network,
        devices=replace(plan.cluster.devices, upload_bytes_per_s=None, download_bytes_per_s=None),
    )
    share = max(1, int(calibration.software["cores"] // calibration.software["threads_per_rank"]))
    local = plan.replace(compute_times=times)
    timeline = simulate(local, here, workload, cores=share)
    # ranks that update at the same time share the processors too
    waves = -(-n // share)
    return timeline.step_s + (waves - 1) * timeline.update_s


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
