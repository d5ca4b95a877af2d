"""``planner bench faults``: what is printed, and how soon all have ended, when something fails.

Six processes on this machine train a tiny model in three stages of two devices. In a phase of a
step one of them is killed or stopped, or its network is cut (network namespaces: Linux and root).
Then processes that do not fit together. Ranks are started one by one, as on machines of their own,
unless the table says otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import numpy as np

from planner.bench._fault_rank import PHASES
from planner.compose.pricing import straight_plan
from planner.compose.request import PlanRequest, Question
from planner.compose.shape import shape_of
from planner.emulate.links import links_of
from planner.emulate.namespaces import EmulationError, require_linux_root
from planner.emulate.network import EmulatedNetwork, emulated, package_path
from planner.executor.ending import PREFIX
from planner.network.atomic import write_text
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
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
GONE_S = 1.0
"""For the system to take away processes that have ended."""


@dataclass
class Row:
    """One run.

    Attributes
    ----------
    fault, phase
        What happened, and when.
    victim
        The device.
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

    def start(self, name: str, command: Sequence[str], **more: str) -> None:
        """A process on this machine, in a session of its own."""
        with (self.folder / f"{name}.err").open("w") as errors:
            self.processes[name] = subprocess.Popen(
                [sys.executable, *command],
                env=self.environment | more,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

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
            for line in (self.folder / f"{name}.err").read_text().splitlines():
                if line.startswith(PREFIX):
                    reason = line.removeprefix(PREFIX)
                    found[reason] = found.get(reason, 0) + 1
        return found

    def left(self) -> list[str]:
        """Processes and temporary files of the run."""
        time.sleep(GONE_S)
        files = [path.name for path in (self.folder / "tmp").iterdir()]
        files = [name for name in files if not name.startswith(TORCHS)]
        return [f"process {number}" for number in marked(self.mark)] + files


def marked(mark: str) -> list[int]:
    """Processes with the mark in their environment, but not those that have ended.

    Parameters
    ----------
    mark
        Value of `MARK`.

    Returns
    -------
    list[int]
        Their numbers.
    """
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            marked = f"{MARK}={mark}".encode() in path.read_bytes()
            state = (path.parent / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if marked and state != "Z":
            found.append(int(path.parent.name))
    return found


@contextmanager
def _run(mark: str) -> Iterator[Run]:
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
            MARK: mark,
        }
        run = Run(folder, mark, environment)
        try:
            yield run
        finally:
            for number in marked(mark):
                os.kill(number, signal.SIGKILL)
            for process in run.processes.values():
                process.wait()


def plan_for(pipelines: int, seed: int = 0) -> TrainingPlan:
    """Three stages of a model that trains in milliseconds.

    Parameters
    ----------
    pipelines
        Devices of each stage.
    seed
        Of the plan.

    Returns
    -------
    TrainingPlan
        Straight pipelines.
    """
    n = 3 * pipelines
    network = Network(np.full((n, n), LATENCY_S), np.full((n, n), BYTES_PER_S), NAMES[:n])
    arch = Architecture(Family("gpt2"), 4, 32, 4, 4, 64, 61, 16)
    workload = Workload.transformer(
        "tiny", arch, precision="fp32", batch_samples=8, microbatch_samples=1
    )
    request = PlanRequest(stages=3, schedule="1f1b", network_name="alike")
    question = Question(Cluster(network, Devices(1e12, 16e9)), workload, request, seed)
    grid = [[3 * k, 3 * k + 1, 3 * k + 2] for k in range(pipelines)]
    return straight_plan(question, shape_of(question), AssignmentPlan.of_grid(grid))


def _saved(run: Run, pipelines: int = 2, seed: int = 0) -> tuple[str, list[str]]:
    made = plan_for(pipelines, seed)
    path = run.folder / f"plan-{seed}.json"
    save_plan(made, path)
    return str(path), list(made.cluster.network.ids)


def _words(run: Run, path: str, victim: str, fault: str, phase: str) -> list[str]:
    """Of a rank's command, but for its device."""
    given = {
        "device": victim,
        "fault": fault,
        "phase": phase,
        "step": STEP,
        "folder": str(run.folder),
    }
    words = ["-m", "planner.bench._fault_rank", json.dumps(given), path, "--steps", STEPS]
    return [*words, "--device", "cpu", "--wait", WAIT]


def _since(run: Run, names: Sequence[str]) -> float | None:
    """Seconds from the fault, as its victim noted it, to the last end; None: not all ended."""
    if not run.follow(names):
        return None
    return max(run.ended_s[name] for name in names) - float((run.folder / "when").read_text())


def _codes(run: Run, names: Sequence[str]) -> list[int]:
    return [run.processes[n].returncode for n in names if n in run.ended_s]


def hurt(what: str, fault: str, victim: int, phase: str, pipelines: int = 2) -> Row:
    """One rank is killed, or stopped and goes on when all others have ended.

    Parameters
    ----------
    what
        In the table.
    fault
        ``"kill"`` or ``"stop"``.
    victim
        Device.
    phase
        Of a step, or ``"join"``.
    pipelines
        Devices of each stage.

    Returns
    -------
    Row
        How it ended.
    """
    with _run(f"{fault}-{victim}-{phase}-{pipelines}") as run:
        path, names = _saved(run, pipelines)
        others = [name for name in names if name != names[victim]]
        for name in names:
            run.start(name, [*_words(run, path, names[victim], fault, phase), "--devices", name])
        seconds = _since(run, others)
        if fault == "stop":
            run.processes[names[victim]].send_signal(signal.SIGCONT)
        run.follow([names[victim]])
        return Row(
            *(what, phase, names[victim], run.said(others), _codes(run, others)),
            *(seconds, run.left()),
        )


def cut(what: str, victim: int, others: Sequence[int], phase: str) -> Row:
    """The network between a device and others is cut for good.

    Parameters
    ----------
    what
        In the table.
    victim
        Device.
    others
        Whom it does not reach any more, nor they it.
    phase
        Of a step, or ``"join"``.

    Returns
    -------
    Row
        How it ended.
    """
    with _run(f"cut-{victim}-{len(others)}-{phase}") as run, ExitStack() as held:
        path, names = _saved(run)
        network = held.enter_context(emulated(links_of(plan_for(2).cluster)))
        run.environment |= {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": str(PORT)}
        for device, name in enumerate(names):
            words = [*_words(run, path, names[victim], "cut", phase), "--devices", name]
            with (run.folder / f"{name}.err").open("w") as errors:
                run.processes[name] = network.start(
                    device,
                    [sys.executable, *words],
                    run.environment,
                    stdout=subprocess.DEVNULL,
                    stderr=errors,
                )
        _when(run, lambda: _cut(network, run.environment, victim, others))
        seconds = _since(run, names)
        return Row(
            what, phase, names[victim], run.said(names), _codes(run, names), seconds, run.left()
        )


def _when(run: Run, act: Callable[[], None]) -> None:
    """As soon as the victim is in its phase."""
    limit = time.monotonic() + LIMIT_S
    while not (run.folder / "when").exists() and time.monotonic() < limit:
        time.sleep(LOOK_S)
    act()
    (run.folder / "when").write_text(repr(time.monotonic()))
    (run.folder / "cut").touch()


def _cut(
    network: EmulatedNetwork, environment: dict[str, str], victim: int, others: Sequence[int]
) -> None:
    module = [sys.executable, "-m", "planner.bench._cut"]
    done = [network.start(victim, [*module, *map(str, others)], environment)]
    done += [network.start(other, [*module, str(victim)], environment) for other in others]
    for process in done:
        _, error = process.communicate(timeout=LIMIT_S)
        if process.returncode:
            raise EmulationError(f"the network was not cut: {error.splitlines()[-1]}")


def unfit(what: str, start: Callable[[Run, str, list[str]], None]) -> Row:
    """Processes that do not fit together.

    Parameters
    ----------
    what
        In the table.
    start
        Takes the run, its plan's file and names of devices.

    Returns
    -------
    Row
        Seconds are from the first end to the last one.
    """
    with _run(what.replace(" ", "-")) as run:
        path, names = _saved(run)
        start(run, path, names)
        all_names = list(run.processes)
        ended = run.follow(all_names)
        ends = run.ended_s.values()
        seconds = max(ends) - min(ends) if ended else None
        said = run.said(all_names)
        return Row(what, "join", "", said, _codes(run, all_names), seconds, run.left())


def _rank(path: str, name: str, *more: str) -> list[str]:
    words = ["-m", "planner.executor", path, "--devices", name, "--device", "cpu"]
    return [*words, "--steps", STEPS, "--wait", WAIT, *more]


def _missing(run: Run, path: str, names: list[str]) -> None:
    for name in names[:-1]:
        run.start(name, _rank(path, name))


def _other_plan(run: Run, path: str, names: list[str]) -> None:
    other, _ = _saved(run, seed=1)
    for name in names:
        run.start(name, _rank(other if name == names[-1] else path, name))


def _twice(run: Run, path: str, names: list[str]) -> None:
    for name in names[:-1]:
        run.start(name, _rank(path, name))
    run.start("again", _rank(path, names[-2]))


def _unknown(run: Run, path: str, names: list[str]) -> None:
    for name in names[:-1]:
        run.start(name, _rank(path, name))
    run.start("unknown", _rank(path, "Atlantis"))


def _without_gpu(run: Run, path: str, names: list[str]) -> None:
    for name in names[:-1]:
        run.start(name, _rank(path, name))
    run.start(names[-1], _rank(path, names[-1], "--device", "cuda"), CUDA_VISIBLE_DEVICES="")


UNFIT = {
    "a rank missing": _missing,
    "another plan": _other_plan,
    "claimed twice": _twice,
    "unknown device": _unknown,
    "without its GPU": _without_gpu,
}


def by_starter(what: str, command: Sequence[Sequence[str]], phase: str) -> Row:
    """SIGKILL of a rank that another command has started.

    Parameters
    ----------
    what
        In the table.
    command
        One command a node, before the rank's own words.
    phase
        Of a step.

    Returns
    -------
    Row
        How the commands ended.
    """
    with _run(what.replace(" ", "-")) as run:
        path, names = _saved(run)
        share = len(names) // len(command)
        for node, words in enumerate(command):
            mine = names[node * share : (node + 1) * share]
            ranks = [*_words(run, path, names[4], "kill", phase), "--devices", *mine]
            port = run.environment["MASTER_PORT"]
            run.start(f"node {node}", [*(w.replace("PORT", port) for w in words), *ranks])
        nodes = list(run.processes)
        seconds = _since(run, nodes)
        return Row(what, phase, names[4], run.said(nodes), _codes(run, nodes), seconds, run.left())


def _torchrun(nodes: int) -> list[list[str]]:
    words = ["-m", "torch.distributed.run", "--nnodes", str(nodes), "--rdzv-backend", "static"]
    words += ["--rdzv-endpoint", "127.0.0.1:PORT", "--nproc-per-node", str(6 // nodes)]
    return [[*words, "--node-rank", str(node)] for node in range(nodes)]


def rows(quick: bool, told: Callable[[str], None]) -> Iterator[Row]:
    """All of the table.

    Parameters
    ----------
    quick
        One phase of each fault.
    told
        Takes lines on what is left out.

    Yields
    ------
    Row
        One after the other.
    """
    phases = PHASES[2:3] if quick else PHASES
    for what, fault, victim, pipelines in (
        ("SIGKILL of rank 0", "kill", 0, 2),
        ("SIGKILL of another", "kill", 4, 2),
        ("SIGKILL of a stage's only device", "kill", 1, 1),
        ("SIGSTOP of rank 0", "stop", 0, 2),
        ("SIGSTOP of another", "stop", 4, 2),
    ):
        for phase in phases:
            # a device alone in its stage averages nothing
            if pipelines > 1 or phase != "averaging":
                yield hurt(what, fault, victim, phase, pipelines)
    try:
        require_linux_root()
    except EmulationError as error:
        told(f"cuts are left out: {error}")
    else:
        for what, victim, others in (
            ("rank 0 cut off", 0, range(1, 6)),
            ("another cut off", 4, (0, 1, 2, 3, 5)),
            ("link of two neighbours cut", 4, (5,)),
        ):
            for phase in phases:
                yield cut(what, victim, others, phase)
    for what, start in UNFIT.items():
        yield unfit(what, start)
    yield by_starter("SIGKILL under torchrun, one node", _torchrun(1), "backward")
    yield by_starter("SIGKILL under torchrun, two nodes", _torchrun(2), "backward")
    yield by_starter(
        "SIGKILL under `planner run`", [["-m", "planner.bench._fault_local"]], "backward"
    )


def main(argv: Sequence[str]) -> int:
    """Make all of it happen and write the report; returns the exit code.

    Parameters
    ----------
    argv
        Words of the command line.

    Returns
    -------
    int
        0, or 1 where a run did not end or something was left.
    """
    parser = argparse.ArgumentParser(prog="planner bench faults", description=__doc__)
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--out", type=Path, default=Path("docs") / f"bench-faults-{today}.md")
    parser.add_argument("--quick", action="store_true", help="one phase of each")
    args = parser.parse_args(argv)
    lines = [
        f"# When something fails, {today}",
        "",
        f"planner {version('planner')}, torch {version('torch')}, {os.cpu_count()} processors; "
        "regenerate with `planner bench faults` (as root, or cuts are left out). Six processes on "
        "one machine, three stages of two devices (of one, for a stage's only one), a tiny model "
        "over TCP. Rank 0 serves the store, unless torchrun or `planner run` does. Phases are "
        f"those of step {STEP}; `join` is before all have come. Seconds are from the fault to the "
        "end of the last other process; where processes do not fit, from the first end to the "
        "last. A process that was stopped goes on after the others have ended, and must end too. "
        f"Missing ranks are waited for {WAIT} s here. What is left is processes and temporary "
        "files, but for PyTorch's caches and torchrun's logs.",
        "",
        "| fault | phase | what is printed, by how many | exit codes | last end, s | left |",
        f"|{'---|' * 6}",
    ]
    found = []
    for row in rows(args.quick, lambda line: print(line, file=sys.stderr)):
        found.append(row)
        lines.append(row.line())
        print(lines[-1], flush=True)
    slowest = max((row.seconds for row in found if row.seconds is not None), default=0.0)
    bad = sum(row.seconds is None or bool(row.left) for row in found)
    lines += [
        "",
        f"{len(found)} runs; the slowest ended after {slowest:.1f} s; in {bad} something did not "
        "end or was left.",
    ]
    write_text(args.out, "\n".join(lines) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
