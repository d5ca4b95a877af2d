"""Faults in elastic runs: time to the next step, and difference of losses."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.faults.rank import PHASES, WRITING
from benchmarks.faults.runs import (
    LIMIT_S,
    LOOK_S,
    PORT,
    Run,
    change_links,
    fresh_run,
    plan_for,
    rank_words,
    saved,
    until_due,
    when_due,
)
from planner.emulate.links import links_of
from planner.emulate.network import emulated
from planner.executor.elastic.membership_events import MEMBERSHIP_EVENTS, event_line
from planner.executor.transport.store import STORE_BY_LAUNCHER, serve_store

STEPS = 20
BACK_STEPS = 400
"""Of a run in which a process comes back: more than are done until it has."""
BEYOND = 20
"""Steps of that run that are looked at after it has come."""


@dataclass
class ElasticRow:
    """One elastic run.

    Attributes
    ----------
    fault, phase
        What happened, and when.
    reported
        Lines that the run printed about it, or the reason with which it ended.
    seconds
        From the fault until the next step was done; None: none was.
    off
        The largest relative difference of a loss to that of a run without fault; None: there is
        nothing to compare.
    codes
        Exit codes of all.
    left
        Processes and files that are still there.
    """

    fault: str
    phase: str
    reported: list[str]
    seconds: float | None
    off: float | None
    codes: list[int]
    left: list[str]

    def line(self) -> str:
        """Of the table."""
        reported = "<br>".join(f"`{line}`" for line in self.reported)
        seconds = "" if self.seconds is None else f"{self.seconds:.1f}"
        off = "" if self.off is None else f"{self.off:.1e}"
        codes = " ".join(map(str, sorted(set(self.codes))))
        left = ", ".join(self.left) or "nothing"
        return (
            f"| {self.fault} | {self.phase} | {reported} | {codes} | {seconds} | {off} | {left} |"
        )


def elastic_rows(quick: bool, network: bool) -> Iterator[ElasticRow]:
    """All of the table."""
    phases = PHASES[2:3] if quick else (*PHASES[1:], WRITING)
    want = losses_without_fault()
    for what, fault, victim in (
        ("SIGKILL of rank 0", "kill", 0),
        ("SIGKILL of another", "kill", 4),
        ("SIGSTOP of another", "stop", 4),
        ("a connection torn, both ends alive", "tear", 4),
    ):
        for phase in phases:
            yield hurt(what, fault, victim, phase, want)
    yield hurt("SIGKILL of a stage's only device", "kill", 1, "backward", {}, pipelines=1)
    yield hurt("SIGKILL of another, started again", "kill", 4, "backward", want, back=True)
    if network:
        for what, peers in (
            ("another cut off", (0, 1, 2, 3, 5)),
            ("link of two neighbours cut", (5,)),
        ):
            for phase in phases:
                yield cut(what, 4, peers, phase, want)


def losses_without_fault() -> dict[int, float]:
    """By step, of a run to which nothing happens."""
    with fresh_run() as run:
        path, names = saved(run)
        with _serving(run):
            _start(run, path, names, "nobody", "none", "forward", BACK_STEPS)
            run.follow(names)
        return {int(e["step"]): float(e["loss"]) for e in _events(run, names) if "loss" in e}


def hurt(
    what: str,
    fault: str,
    victim: int,
    phase: str,
    want: Mapping[int, float],
    *,
    pipelines: int = 2,
    back: bool = False,
) -> ElasticRow:
    """One rank is killed, is stopped until all others have ended, or loses a connection."""
    with fresh_run() as run:
        path, names = saved(run, pipelines)
        with _serving(run):
            steps = BACK_STEPS if back else STEPS
            _start(run, path, names, names[victim], fault, phase, steps)
            until_due(run)
            if back:
                run.follow([names[victim]])
                command = rank_words(run, path, names[victim], fault, phase)
                command += ["--elastic", "--events", "--steps", str(steps)]
                run.start("again", [*command, "--devices", names[victim]])
            at_s = _goes_on(run, names)
            peers = [name for name in run.processes if name != names[victim]]
            run.follow(peers)
            if fault == "stop":
                run.processes[names[victim]].send_signal(signal.SIGCONT)
            run.follow(list(run.processes))
        return _row(run, what, phase, at_s, want)


def cut(
    what: str, victim: int, peers: Sequence[int], phase: str, want: Mapping[int, float]
) -> ElasticRow:
    """The network between a device and others is cut for good; rank 0 serves the store."""
    with fresh_run() as run, ExitStack() as stack:
        path, names = saved(run)
        network = stack.enter_context(emulated(links_of(plan_for(2).cluster)))
        run.environment |= {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": str(PORT)}
        command = rank_words(run, path, names[victim], "cut", phase)
        command += ["--elastic", "--events", "--steps", str(STEPS)]
        for device, name in enumerate(names):
            run.start_in(network, device, [*command, "--devices", name])
        when_due(run, lambda: change_links(network, run.environment, victim, peers))
        at_s = _goes_on(run, names)
        run.follow(names)
        return _row(run, what, phase, at_s, want)


@contextmanager
def _serving(run: Run) -> Iterator[None]:
    """The store is served by this process, as ``planner run`` does."""
    store = serve_store("127.0.0.1", 0)
    run.environment |= {"MASTER_PORT": str(store.port), STORE_BY_LAUNCHER: "True"}
    yield
    del store


def _start(
    run: Run, path: str, names: list[str], victim: str, fault: str, phase: str, steps: int
) -> None:
    for name in names:
        command = [*rank_words(run, path, victim, fault, phase), "--elastic", "--events"]
        run.start(name, [*command, "--steps", str(steps), "--devices", name])


def _events(run: Run, names: Sequence[str]) -> list[dict[str, Any]]:
    """Lines reported so far, rank by rank."""
    found = []
    for name in names:
        for line in run.file(name, "out").read_text().splitlines(keepends=True):
            if line.startswith("{") and line.endswith("\n"):
                found.append(json.loads(line))
    return found


def _goes_on(run: Run, names: Sequence[str]) -> float | None:
    """Monotonic clock, when the first step after the loss was reported; None if none was."""
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        events = _events(run, names)
        lost = [e["step"] for e in events if e["event"] in ("lost", "torn")]
        if lost and any(e["event"] == "step" and e["step"] >= lost[0] for e in events):
            return time.monotonic()
        alive = [p for p in run.processes.values() if p.poll() is None]
        if not alive:
            return None
        time.sleep(LOOK_S)
    return None


def _row(
    run: Run, what: str, phase: str, at_s: float | None, want: Mapping[int, float]
) -> ElasticRow:
    names = list(run.processes)
    events = _events(run, names)
    changes = [e for e in events if e["event"] in MEMBERSHIP_EVENTS]
    reported = [event_line(change).strip() for change in changes] + list(run.said(names))
    losses = {int(e["step"]): float(e["loss"]) for e in events if e["event"] == "step"}
    came = [e["step"] for e in changes if e["event"] == "came"]
    last = came[-1] + BEYOND if came else STEPS
    seen = [t for t in range(last) if t in losses and t in want]
    complete = len(seen) == last
    off = max((abs(losses[t] / want[t] - 1) for t in seen), default=0.0) if complete else None
    seconds = None if at_s is None else at_s - float((run.folder / "when").read_text())
    codes = [process.returncode for process in run.processes.values()]
    return ElasticRow(what, phase, reported, seconds, off, codes, run.left())
