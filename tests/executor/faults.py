"""Starting ranks to which something happens, and seeing how all of them end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from tests.executor.launch import ROOT, free_port

WITHIN_S = 60.0
"""Instead of hanging."""
PREFIX = "planner.executor: ended: "
MANY = "3000"
"""Steps: more than pass before something happens, and an end all the same."""


@dataclass
class Started:
    """Processes with a store of their own, each writing to files."""

    folder: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, name: str, device: str, command: Sequence[str], *more: str) -> None:
        """A process called ``name``; the last words count."""
        with (self.folder / f"{name}.out").open("wb") as out, self._said(name).open("wb") as err:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command, "--devices", device, "--device", "cpu", *more],
                env=self.environment,
                stdout=out,
                stderr=err,
            )

    def codes(self, names: Sequence[str]) -> dict[str, int]:
        """How these have ended; fails if they do not."""
        until = time.monotonic() + WITHIN_S
        return {
            name: self.processes[name].wait(max(0.1, until - time.monotonic())) for name in names
        }

    def reason(self, name: str) -> str:
        """The one line with which a process said that it ended."""
        lines = self._said(name).read_text().splitlines()
        found = [line for line in lines if line.startswith(PREFIX)]
        assert len(found) == 1, lines
        assert lines == found, lines
        return found[0].removeprefix(PREFIX)

    def _said(self, name: str) -> Path:
        return self.folder / f"{name}.err"

    def __enter__(self) -> Self:
        self.environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "LOCAL_RANK": "0",
        }
        self.environment.pop("WORLD_SIZE", None)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
        for process in self.processes.values():
            process.wait()


def saved(plan: TrainingPlan, path: Path) -> Path:
    """The plan's file."""
    save_plan(plan, path)
    return path


def hurt(
    plan: Path,
    fault: Mapping[str, object],
    *more: str,
    module: str = "benchmarks.faults.rank",
) -> list[str]:
    """Words for a rank to which something happens, or to another one."""
    return ["-m", module, json.dumps(fault), str(plan), "--steps", MANY, *more]


def whole(plan: Path, *more: str) -> list[str]:
    """Words for a rank to which nothing happens by itself."""
    return ["-m", "planner.executor", str(plan), "--steps", MANY, *more]
