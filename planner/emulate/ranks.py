"""Start a plan's ranks in their namespaces and read their records."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.emulate.namespaces import EmulationError
from planner.emulate.network import EmulatedNetwork, package_path
from planner.training_plan.model import TrainingPlan

PORT = 29_500
FAILED = 3
"""Exit code of the executor if the run failed on any rank."""
WAIT_S = 600.0
"""Rendezvous timeout in seconds; long, since many ranks may share a few CPUs."""
LOOK_S = 0.5
"""Interval in seconds at which ranks are checked for failure."""


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run.

    Attributes
    ----------
    rest, steps
        Number of steps on an idle system, and of consecutive steps after them.
    speed, shrink
        Divisors of times and of bytes.
    real_compute
        Whether the real model computes; without ``rest``, ``speed`` and ``shrink``.
    jitter_s
        Amplitude of latency jitter, in seconds.
    """

    rest: int
    steps: int
    speed: float = 1.0
    shrink: float = 1.0
    real_compute: bool = False
    jitter_s: float = 0.0

    def arguments(self) -> list[str]:
        """Return the executor's arguments."""
        chained = ["--steps", str(self.steps)]
        if self.real_compute:
            return chained
        numbers = {"--rest": self.rest, "--speed": self.speed, "--shrink": self.shrink}
        values = [argument for name, value in numbers.items() for argument in (name, str(value))]
        return ["--impose", *chained, *values]


def run_ranks(
    network: EmulatedNetwork,
    path: Path,
    plan: TrainingPlan,
    settings: RunSettings,
    folder: Path,
    report_line: Callable[[str], None],
    extra_options: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Run all ranks to completion and return their records."""
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank, name in enumerate(plan.cluster.network.ids):
            command = [
                *(sys.executable, "-m", "planner.executor", str(path.resolve())),
                *("--devices", name, "--device", "cpu", "--wait", str(WAIT_S)),
                *settings.arguments(),
                *("--record", str(folder / f"record-{rank}.json"), *extra_options),
            ]
            with _errors(folder, rank).open("w") as errors:
                processes.append(
                    network.start(
                        rank,
                        command,
                        _environment(len(plan.cluster), network.addresses[0]),
                        stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                        stderr=errors,
                    )
                )
        _follow(processes, folder, report_line)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
    return [
        json.loads((folder / f"record-{rank}.json").read_text()) for rank in range(len(processes))
    ]


def _environment(world: int, first: str) -> dict[str, str]:
    return os.environ | {
        "PYTHONPATH": package_path(),
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "MASTER_ADDR": first,
        "MASTER_PORT": str(PORT),
    }


def _follow(
    processes: Sequence[subprocess.Popen[str]], folder: Path, report_line: Callable[[str], None]
) -> None:
    """Wait until all ranks have ended; report the first that fails."""
    output = processes[0].stdout
    assert output is not None
    os.set_blocking(output.fileno(), False)
    partial_line = ""
    with selectors.DefaultSelector() as ready:
        ready.register(output, selectors.EVENT_READ)
        while True:
            codes = [process.poll() for process in processes]
            _require_success(codes, folder)
            if ready.get_map():
                if ready.select(LOOK_S):
                    data = os.read(output.fileno(), 1 << 16)
                    *lines, partial_line = (partial_line + data.decode()).split("\n")
                    for line in lines:
                        report_line(line)
                    if not data:
                        ready.unregister(output)
            elif None not in codes:
                return
            else:
                time.sleep(LOOK_S / 10)


def _require_success(codes: Sequence[int | None], folder: Path) -> None:
    failed = {rank: code for rank, code in enumerate(codes) if code not in (None, 0)}
    if not failed:
        return
    messages = {rank: _said(folder, rank, code or 0) for rank, code in failed.items()}
    # prefer a rank with its own error to ranks that ended because another one failed
    rank = min(failed, key=lambda r: failed[r] == FAILED)
    raise EmulationError(f"rank {rank} failed: {messages[rank]}")


def _said(folder: Path, rank: int, code: int) -> str:
    if code < 0:
        return f"killed by signal {-code}; check whether this machine ran out of memory"
    lines = _errors(folder, rank).read_text().strip().splitlines()
    return lines[-1] if lines else f"exit code {code}"


def _errors(folder: Path, rank: int) -> Path:
    return folder / f"errors-{rank}.txt"
