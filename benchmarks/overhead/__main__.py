"""The executor on one device, against a plain PyTorch loop and the simulator.

One rank and a plain PyTorch loop of the same model, batch and precision alternate steps in one
process. Then four ranks share the device and are compared with the prediction. With ``--device
cuda`` on a GPU, in bf16.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command_line import report_path, run
from benchmarks.overhead.in_turns import EVENT
from planner.bench.environment import describe_environment
from planner.executor.launch.local import run_local
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.solve import plan
from planner.search.stop import MaxIterations
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload

SEED = 0
WARM, STEPS = 3, 15
"""Steps left out at the beginning of a run, and those after them of four ranks."""
LIMIT_S = 1800


@dataclass(frozen=True)
class Case:
    """A model and how it is trained.

    Attributes
    ----------
    samples, microbatch
        Of a step, and of a microbatch.
    steps
        Of each way in one process: those of small models are short, and as noisy.
    """

    name: str
    architecture: Architecture
    samples: int
    microbatch: int
    steps: int = STEPS

    def plan(self, precision: str, devices: int = 1, stages: int = 1) -> TrainingPlan:
        """Stages of as many devices each."""
        workload = Workload.transformer(
            self.name,
            self.architecture,
            batch_samples=self.samples,
            microbatch_samples=self.microbatch,
            precision=precision,
        )
        square = np.ones((devices, devices))
        cluster = Cluster(Network(1e-4 * square, 1e9 * square), Devices(1e12, 1e12))
        made = plan(cluster, workload, stages=stages, stop=MaxIterations(1), seed=SEED).plan
        assert made is not None
        return made


CASES = {
    "cpu": (
        Case(
            "llama, 4 layers of 64",
            *(Architecture(Family.LLAMA, 4, 64, 4, 4, 172, 256, 64), 16, 4),
            steps=120,
        ),
        Case(
            "llama, 4 layers of 256",
            *(Architecture(Family.LLAMA, 4, 256, 8, 8, 688, 2048, 128), 8, 2),
            steps=40,
        ),
        Case(
            "gpt2, 6 layers of 384", Architecture(Family.GPT2, 6, 384, 6, 6, 1536, 8192, 256), 8, 2
        ),
    ),
    "cuda": (
        Case("gpt2-medium", Architecture(Family.GPT2, 24, 1024, 16, 16, 4096, 50257, 1024), 32, 8),
        Case(
            "llama, 16 layers of 2048",
            *(Architecture(Family.LLAMA, 16, 2048, 16, 16, 5504, 32000, 1024), 16, 4),
        ),
    ),
}


SHARED = 4
"""Ranks on one device, in stages of one, two and four."""
SHARED_CASES = {
    "cpu": CASES["cpu"][-2:],
    # four whole models are to fit a card of 80 GB
    "cuda": (
        Case("gpt2-medium", CASES["cuda"][0].architecture, 32, 4),
        Case(
            "llama, 8 layers of 1024",
            *(Architecture(Family.LLAMA, 8, 1024, 16, 16, 2816, 32000, 1024), 32, 4),
        ),
    ),
}


@dataclass(frozen=True)
class SharedRow:
    """Seconds of a step of four ranks that share a device."""

    case: Case
    stages: int
    measured_s: float
    predicted_s: float


@dataclass(frozen=True)
class Row:
    """Seconds of a step, by way, process and step, without the first; losses of the first process.

    Attributes
    ----------
    seconds
        By way, as many lists as processes.
    """

    case: Case
    seconds: dict[str, list[list[float]]]
    losses: dict[str, list[float]]

    @property
    def ratios(self) -> list[float]:
        """Executor over plain: of each process the median of its pairs of steps, ascending."""
        processes = zip(self.seconds["executor"], self.seconds["plain"], strict=True)
        return sorted(
            statistics.median(ours / plain for ours, plain in zip(*pair, strict=True))
            for pair in processes
        )

    def step_s(self, method: str) -> float:
        """Median over all."""
        return statistics.median(s for process in self.seconds[method] for s in process)


def measure(case: Case, device: str, repeats: int) -> Row:
    """Run both ways in turns."""
    seconds: dict[str, list[list[float]]] = {"executor": [], "plain": []}
    losses: dict[str, list[float]] = {}
    made = case.plan("fp32" if device == "cpu" else "bf16")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(made, path)
        for _ in range(repeats):
            events = _in_turns(made, path, device, WARM + case.steps)
            found = next(e for e in events if e["event"] == EVENT)
            for method, each in found["seconds"].items():
                seconds[method].append(each[WARM:])
            own = {e.get("loss_step", e["step"]): e["loss"] for e in events if "loss" in e}
            losses = losses or {
                "executor": [own[t] for t in range(WARM + case.steps)],
                "plain": found["losses"],
            }
    return Row(case, seconds, losses)


def _in_turns(made: TrainingPlan, path: Path, device: str, steps: int) -> list[dict[str, Any]]:
    """Events of a process that does both."""
    ids = made.cluster.network.ids
    command = [str(path), "--devices", *ids, "--steps", str(steps), "--device", device, "--events"]
    lines: list[str] = []
    code, reason = run_local(
        [sys.executable, "-m", "benchmarks.overhead.in_turns", *command],
        ids,
        dict(os.environ),
        lines.append,
        lambda line: print(line, file=sys.stderr),
    )
    if code:
        raise RuntimeError(f"the executor failed: {reason}")
    return [json.loads(line) for line in lines]


def measure_shared(case: Case, device: str, stages: int) -> SharedRow:
    """Run four ranks, calibrated."""
    made = case.plan("fp32" if device == "cpu" else "bf16", SHARED, stages)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.json"
        save_plan(made, path)
        command = [str(path), "--steps", str(WARM + STEPS), "--device", device, "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "planner.cli", "run", *command],
            # on one GPU, however many there are
            env={"CUDA_VISIBLE_DEVICES": "0"} | dict(os.environ),
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"the executor failed: {done.stderr[-500:]}")
    steps = json.loads(done.stdout)["steps"]
    measured = statistics.median(step["measured_s"] for step in steps[WARM:])
    return SharedRow(case, stages, measured, steps[0]["predicted_s"])


def report(
    rows: Sequence[Row], shared: Sequence[SharedRow], device: str, repeats: int, load_before: str
) -> str:
    """The dated report as Markdown."""
    lines = [
        f"# One device against a plain loop, {datetime.now(UTC).date().isoformat()}",
        "",
        f"{describe_environment(load_before, ('planner', 'numpy', 'torch'))} "
        f"Computed on {_processor(device)}.",
        "",
        f"Regenerate with `python -m benchmarks.overhead --device {device} --repeats "
        f"{repeats}`. The same "
        "model, batch and optimizer: the executor with the plan of one device, and a loop of 20 "
        "lines of PyTorch whose tokens are made beforehand, in one process step by step in turns "
        "(two processes with the same steps may differ by a third; the loop's one has the "
        "executor's threads too); "
        + ("fp32. " if device == "cpu" else "bf16, the loop under autocast. ")
        + f"A process's ratio is the median of its pairs of steps, after {WARM}; told is the "
        "median of the processes, with the least and the largest. Losses: the largest relative "
        "difference.",
        "",
        "| model | parameters | processes, pairs | plain | executor | ratio | losses |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        pairs = zip(row.losses["plain"], row.losses["executor"], strict=True)
        off = max(abs(a - b) / abs(a) for a, b in pairs)
        size, ratios = row.case.plan("fp32").workload.parameters / 1e6, row.ratios
        lines.append(
            f"| {row.case.name}, {row.case.samples} samples in {row.case.microbatch}s | "
            f"{size:.1f}M | {len(ratios)}, {row.case.steps} each | "
            f"{1e3 * row.step_s('plain'):.1f} ms | {1e3 * row.step_s('executor'):.1f} ms | "
            f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}) | {off:.1e} |"
        )
    lines += [
        "",
        "## Four ranks that share it",
        "",
        "Through `planner run`: F, H, B, updates and the link between two ranks are measured "
        "first, then the clock says what a step takes where ranks share "
        + ("the processor's cores. " if device == "cpu" else "the GPU. ")
        + f"Medians of {STEPS} steps after {WARM}, of one run.",
        "",
        "| model | stages x pipelines | predicted | executed | ratio |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.case.name} | {row.stages} x {SHARED // row.stages} | "
        f"{1e3 * row.predicted_s:.1f} ms | {1e3 * row.measured_s:.1f} ms | "
        f"{row.measured_s / row.predicted_s:.3f} |"
        for row in shared
    ]
    return "\n".join(lines) + "\n"


def _processor(device: str) -> str:
    if device == "cpu":
        return f"{platform.machine()}, all cores"
    import torch

    return str(torch.cuda.get_device_name())


def main(argv: Sequence[str]) -> int:
    """Measure all cases and write the report; returns the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--out", type=Path, default=report_path("overhead"))
    parser.add_argument("--device", choices=list(CASES), default="cpu")
    parser.add_argument("--repeats", type=int, default=7, help="processes of each model")
    args = parser.parse_args(argv)
    load_before = f"{os.getloadavg()[0]:.1f}"
    rows = []
    for case in CASES[args.device]:
        rows.append(measure(case, args.device, args.repeats))
        print(f"{case.name}: {statistics.median(rows[-1].ratios):.3f}", flush=True)
    shared = []
    for case in SHARED_CASES[args.device]:
        for stages in (1, 2, SHARED):
            shared.append(measure_shared(case, args.device, stages))
            row = shared[-1]
            ratio = row.measured_s / row.predicted_s
            print(f"{case.name}, {stages} stages: {ratio:.3f} of the clock", flush=True)
    write_text(args.out, report(rows, shared, args.device, args.repeats, load_before))
    return 0


if __name__ == "__main__":
    run(main)
