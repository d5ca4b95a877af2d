"""Temporary faults: a full disk, a link that recovers, a process that is stopped for a while."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.faults.runs import (
    PORT,
    STEP,
    Row,
    Run,
    change_links,
    codes_of,
    fresh_run,
    plan_for,
    rank_words,
    saved,
    since,
    until_due,
    when_due,
)
from planner.emulate.links import links_of
from planner.emulate.network import emulated

PASSES_S = 20.0
LONGER_S = "40"
"""A patience for which a run waits that long."""
DONE = "12"
"""Steps of a run that continues: soon done once the fault has passed."""
DISK = "48k"
"""Holds some shards of a checkpoint and not all."""


def stopped(victim: int, patience: str | None) -> Row:
    """SIGSTOP, and SIGCONT after a while."""
    with fresh_run() as run:
        path, names = saved(run)
        command = [*rank_words(run, path, names[victim], "stop", "backward"), *_more(patience)]
        for name in names:
            run.start(name, [*command, "--devices", name])
        until_due(run)
        _pass(run, names)
        run.processes[names[victim]].send_signal(signal.SIGCONT)
        return _row(run, "SIGSTOP of another for 20 s", "backward", names, victim, patience)


def mended(victim: int, other: int, patience: str | None) -> Row:
    """The link of two neighbours is cut, and mended after a while."""
    with fresh_run() as run, ExitStack() as stack:
        path, names = saved(run)
        network = stack.enter_context(emulated(links_of(plan_for(2).cluster)))
        run.environment |= {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": str(PORT)}
        command = [*rank_words(run, path, names[victim], "cut", "backward"), *_more(patience)]
        for device, name in enumerate(names):
            run.start_in(network, device, [*command, "--devices", name])
        when_due(run, lambda: change_links(network, run.environment, victim, [other]))
        _pass(run, names)
        change_links(network, run.environment, victim, [other], "mend")
        return _row(run, "link of two neighbours cut for 20 s", "backward", names, victim, patience)


def full_disk() -> Row:
    """Checkpoints go to a file system that holds some shards of one and not all."""
    with fresh_run() as run:
        path, names = saved(run)
        checkpoints = run.folder / "kept"
        checkpoints.mkdir()
        command = ["-m", "planner.executor", path, "--device", "cpu", "--steps", DONE]
        command += ["--checkpoint", str(checkpoints), "--every", str(STEP + 1)]
        with _small(checkpoints):
            for name in names:
                run.start(name, [*command, "--devices", name])
            ended = run.follow(names)
        ends = run.ended_s.values()
        seconds = max(ends) - min(ends) if ended else None
        said = run.said(names)
        codes = codes_of(run, names)
        return Row("disk full", "checkpoint", "", said, codes, seconds, run.left())


def _pass(run: Run, names: list[str]) -> None:
    """Note who ends meanwhile."""
    until = time.monotonic() + PASSES_S
    run.follow(names, PASSES_S)
    time.sleep(max(0.0, until - time.monotonic()))


def _more(patience: str | None) -> list[str]:
    return ["--steps", DONE, *([] if patience is None else ["--patience", patience])]


def _row(
    run: Run, what: str, phase: str, names: list[str], victim: int, patience: str | None
) -> Row:
    run.follow(names)
    # a stopped process ends when it continues, if it does
    passed = all(run.processes[name].returncode == 0 for name in names)
    seconds = since(run, names if passed else [n for n in names if n != names[victim]])
    limit = "" if patience is None else f", --patience {patience}"
    said, codes = run.said(names), codes_of(run, names)
    return Row(f"{what}{limit}", phase, names[victim], said, codes, seconds, run.left())


@contextmanager
def _small(folder: Path) -> Iterator[None]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "none", folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
