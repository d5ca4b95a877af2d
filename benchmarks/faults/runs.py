"""Runs with an injected fault: six small processes, their exit codes and leftovers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from planner.emulate.namespaces import EmulationError
from planner.emulate.network import EmulatedNetwork, package_path
from planner.executor.fault_tolerance.shutdown import PREFIX
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.planning.evaluation import straight_plan
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.planning.shape import shape_of
from planner.problems.answers import AssignmentPlan
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload

NAMES = ("Oregon", "Ohio", "London", "Tokyo", "Paris", "Sydney")
LATENCY_S, BYTES_PER_S = 0.01, 1e7
STEP, STEPS = 3, "5000"
"""When it happens, and more than are ever done."""
WAIT = "20"
LIMIT_S = 90.0
"""After that a run is counted as hanging."""
LOOK_S = 0.02
PORT = 29_500
MARK = "PLANNER_FAULT"
"""In the environment of all processes of a run."""
TORCHS = ("torchinductor_", "torchelastic_")
"""PyTorch's caches and torchrun's logs."""
SPEAKER = "planner.executor: "
NO_CHECKPOINT = f"{SPEAKER}no checkpoint"
GONE_S = 1.0
"""For the system to take away processes that have ended."""


@dataclass
class Row:
    """One run.

    Attributes
    ----------
    fault, phase
        What happened, and when.
    said
        By reason, how many processes said it.
    codes
        Exit codes, of the others than the victim.
    seconds
        From the fault to the end of the last other process; None: one did not end.
    left
        Processes and files that are still there.
    """

    fault: str
    phase: str
    victim: str
    said: dict[str, int]
    codes: list[int]
    seconds: float | None
    left: list[str]

    def line(self) -> str:
        """Of the table."""
        said = "<br>".join(f"{count} x `{line}`" for line, count in self.said.items())
        seconds = "hangs" if self.seconds is None else f"{self.seconds:.1f}"
        codes = " ".join(str(code) for code in sorted(set(self.codes)))
        left = ", ".join(self.left) or "nothing"
        return f"| {self.fault} | {self.phase} | {said} | {codes} | {seconds} | {left} |"


@dataclass
class Run:
    """Processes of a run, and what is theirs."""

    folder: Path
    mark: str
    environment: dict[str, str]
    processes: dict[str, subprocess.Popen[str]] = field(default_factory=dict)
    ended_s: dict[str, float] = field(default_factory=dict)

    def start(self, name: str, command: Sequence[str], **extra: str) -> None:
        """A process on this machine, in a session of its own."""
        with self.file(name, "err").open("w") as errors, self.file(name, "out").open("w") as out:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command],
                env=self.environment | extra,
                stdout=out,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def start_in(self, network: EmulatedNetwork, device: int, command: Sequence[str]) -> None:
        """A process on a device of an emulated network, by the name of the device."""
        name = NAMES[device]
        with self.file(name, "err").open("w") as errors, self.file(name, "out").open("w") as out:
            self.processes[name] = network.start(
                device, [sys.executable, *command], self.environment, stdout=out, stderr=errors
            )

    def file(self, name: str, kind: str) -> Path:
        """What a process writes: ``out`` or ``err``."""
        return self.folder / f"{name}.{kind}"

    def follow(self, names: Sequence[str], until_s: float = LIMIT_S) -> bool:
        """Wait until these have ended; returns whether they have."""
        limit = time.monotonic() + until_s
        while time.monotonic() < limit:
            for name, process in self.processes.items():
                if name not in self.ended_s and process.poll() is not None:
                    self.ended_s[name] = time.monotonic()
            if all(name in self.ended_s for name in names):
                return True
            time.sleep(LOOK_S)
        return False

    def said(self, names: Sequence[str]) -> dict[str, int]:
        """Reasons, and how often."""
        found: dict[str, int] = {}
        for name in names:
            for line in self.file(name, "err").read_text().splitlines():
                if line.startswith((PREFIX, NO_CHECKPOINT)):
                    reason = line.removeprefix(PREFIX).removeprefix(SPEAKER)
                    reason = reason.replace(str(self.folder), "FOLDER")
                    found[reason] = found.get(reason, 0) + 1
        return found

    def left(self) -> list[str]:
        """Processes and temporary files of the run."""
        time.sleep(GONE_S)
        files = [path.name for path in (self.folder / "tmp").iterdir()]
        files = [name for name in files if not name.startswith(TORCHS)]
        return [f"process {number}" for number in marked(self.mark)] + files


def marked(mark: str) -> list[int]:
    """Processes with the mark in their environment, but not those that have ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            own = f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0")
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if own and state != "Z":
            found.append(int(path.parent.name))
    return found


@contextmanager
def fresh_run() -> Iterator[Run]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tmp").mkdir()
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": package_path(),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
            "LOCAL_RANK": "0",
            "TMPDIR": str(folder / "tmp"),
            MARK: folder.name,
        }
        run = Run(folder, folder.name, environment)
        try:
            yield run
        finally:
            for number in marked(run.mark):
                with suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            for process in run.processes.values():
                process.wait()


def plan_for(pipelines: int, seed: int = 0) -> TrainingPlan:
    """Three stages of a model that trains in milliseconds."""
    n = 3 * pipelines
    network = Network(np.full((n, n), LATENCY_S), np.full((n, n), BYTES_PER_S), NAMES[:n])
    arch = Architecture(Family("gpt2"), 4, 32, 4, 4, 64, 61, 16)
    workload = Workload.transformer(
        "tiny", arch, precision="fp32", batch_samples=8, microbatch_samples=1
    )
    request = PlanRequest(stages=3, schedule="1f1b", network_name="alike")
    problem = PlanningProblem(Cluster(network, Devices(1e12, 16e9)), workload, request, seed)
    grid = [[3 * k, 3 * k + 1, 3 * k + 2] for k in range(pipelines)]
    return straight_plan(problem, shape_of(problem), AssignmentPlan.of_grid(grid))


def saved(run: Run, pipelines: int = 2, seed: int = 0) -> tuple[str, list[str]]:
    made = plan_for(pipelines, seed)
    path = run.folder / f"plan-{seed}.json"
    save_plan(made, path)
    return str(path), list(made.cluster.network.ids)


def rank_words(run: Run, path: str, victim: str, fault: str, phase: str) -> list[str]:
    """Of a rank's command, but for its device."""
    options = {
        "device": victim,
        "fault": fault,
        "phase": phase,
        "step": STEP,
        "folder": str(run.folder),
    }
    words = ["-m", "benchmarks.faults.rank", json.dumps(options), path, "--steps", STEPS]
    if phase == "checkpoint":
        words += ["--checkpoint", str(run.folder / "kept"), "--every", str(STEP + 1)]
    return [*words, "--device", "cpu", "--wait", WAIT]


def since(run: Run, names: Sequence[str]) -> float | None:
    """Seconds from the fault, as its victim noted it, to the last end; None: not all ended."""
    if not run.follow(names):
        return None
    return max(run.ended_s[name] for name in names) - float((run.folder / "when").read_text())


def codes_of(run: Run, names: Sequence[str]) -> list[int]:
    return [run.processes[n].returncode for n in names if n in run.ended_s]


def until_due(run: Run) -> None:
    """Until the victim is in its phase."""
    limit = time.monotonic() + LIMIT_S
    while not (run.folder / "when").exists() and time.monotonic() < limit:
        time.sleep(LOOK_S)


def when_due(run: Run, act: Callable[[], None]) -> None:
    """Something is done to the victim in its phase, which ends then."""
    until_due(run)
    act()
    (run.folder / "when").write_text(repr(time.monotonic()))
    (run.folder / "cut").touch()


def change_links(
    network: EmulatedNetwork,
    environment: dict[str, str],
    victim: int,
    peers: Sequence[int],
    how: str = "cut",
) -> None:
    """Cut or mend all links of a device with others."""
    module = [sys.executable, "-m", "benchmarks.faults.cut", how]
    done = [network.start(victim, [*module, *map(str, peers)], environment)]
    done += [network.start(other, [*module, str(victim)], environment) for other in peers]
    for process in done:
        _, error = process.communicate(timeout=LIMIT_S)
        if process.returncode:
            said = (error.splitlines() or ["it was killed"])[-1]
            raise EmulationError(f"the network was not changed ({how}): {said}")
