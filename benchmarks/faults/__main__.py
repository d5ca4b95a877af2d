"""Messages, exit codes and times after faults.

Six processes on this machine train a tiny model in three stages of two devices. In each phase of a
step one of them is killed or stopped, or its network is cut (network namespaces: Linux and root).
Further tables: mismatched processes, temporary faults, and elastic runs, which continue without the
lost device. Ranks are started one by one, as on separate machines, unless the table says otherwise.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from benchmarks.command_line import report_path, run
from benchmarks.faults.elastic import BEYOND, elastic_rows
from benchmarks.faults.passing import (
    DISK,
    DONE,
    LONGER_S,
    PASSES_S,
    full_disk,
    mended,
    stopped,
)
from benchmarks.faults.rank import PHASES, WRITING
from benchmarks.faults.runs import (
    PORT,
    STEP,
    STEPS,
    WAIT,
    Row,
    Run,
    change_links,
    codes_of,
    fresh_run,
    plan_for,
    rank_words,
    saved,
    since,
    when_due,
)
from planner.emulate.links import links_of
from planner.emulate.namespaces import EmulationError, require_linux_root
from planner.emulate.network import emulated
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text


def hurt(what: str, fault: str, victim: int, phase: str, pipelines: int = 2) -> Row:
    """One rank is killed, or is stopped until all others have ended."""
    with fresh_run() as run:
        path, names = saved(run, pipelines)
        peers = [name for name in names if name != names[victim]]
        for name in names:
            run.start(
                name, [*rank_words(run, path, names[victim], fault, phase), "--devices", name]
            )
        seconds = since(run, peers)
        if fault == "stop":
            run.processes[names[victim]].send_signal(signal.SIGCONT)
        run.follow([names[victim]])
        return Row(
            *(what, phase, names[victim], run.said(peers), codes_of(run, peers)),
            *(seconds, run.left()),
        )


def cut(what: str, victim: int, peers: Sequence[int], phase: str) -> Row:
    """The network between a device and others is cut for good."""
    with fresh_run() as run, ExitStack() as stack:
        path, names = saved(run)
        network = stack.enter_context(emulated(links_of(plan_for(2).cluster)))
        run.environment |= {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": str(PORT)}
        for device, name in enumerate(names):
            words = [*rank_words(run, path, names[victim], "cut", phase), "--devices", name]
            run.start_in(network, device, words)
        when_due(run, lambda: change_links(network, run.environment, victim, peers))
        seconds = since(run, names)
        return Row(
            what, phase, names[victim], run.said(names), codes_of(run, names), seconds, run.left()
        )


def unfit(what: str, start: Callable[[Run, str, list[str]], None]) -> Row:
    """Processes that do not fit together."""
    with fresh_run() as run:
        path, names = saved(run)
        start(run, path, names)
        all_names = list(run.processes)
        ended = run.follow(all_names)
        ends = run.ended_s.values()
        seconds = max(ends) - min(ends) if ended else None
        said = run.said(all_names)
        return Row(what, "join", "", said, codes_of(run, all_names), seconds, run.left())


def _rank(path: str, name: str, *extra: str) -> list[str]:
    words = ["-m", "planner.executor", path, "--devices", name, "--device", "cpu"]
    return [*words, "--steps", STEPS, "--wait", WAIT, *extra]


def _missing(run: Run, path: str, names: list[str]) -> None:
    for name in names[:-1]:
        run.start(name, _rank(path, name))


def _other_plan(run: Run, path: str, names: list[str]) -> None:
    other, _ = saved(run, seed=1)
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
    """SIGKILL of a rank that another command has started."""
    with fresh_run() as run:
        path, names = saved(run)
        share = len(names) // len(command)
        for node, words in enumerate(command):
            mine = names[node * share : (node + 1) * share]
            ranks = [*rank_words(run, path, names[4], "kill", phase), "--devices", *mine]
            port = run.environment["MASTER_PORT"]
            run.start(f"node {node}", [*(w.replace("PORT", port) for w in words), *ranks])
        nodes = list(run.processes)
        seconds = since(run, nodes)
        return Row(
            what, phase, names[4], run.said(nodes), codes_of(run, nodes), seconds, run.left()
        )


def _torchrun(nodes: int) -> list[list[str]]:
    words = ["-m", "torch.distributed.run", "--nnodes", str(nodes), "--rdzv-backend", "static"]
    words += ["--rdzv-endpoint", "127.0.0.1:PORT", "--nproc-per-node", str(6 // nodes)]
    return [[*words, "--node-rank", str(node)] for node in range(nodes)]


def rows(quick: bool, network: bool) -> Iterator[Row]:
    """All of the table."""
    phases = PHASES[2:3] if quick else (*PHASES, WRITING)
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
    if network:
        for what, victim, peers in (
            ("rank 0 cut off", 0, range(1, 6)),
            ("another cut off", 4, (0, 1, 2, 3, 5)),
            ("link of two neighbours cut", 4, (5,)),
        ):
            for phase in phases:
                yield cut(what, victim, peers, phase)
    for what, start in UNFIT.items():
        yield unfit(what, start)
    yield by_starter("SIGKILL under torchrun, one node", _torchrun(1), "backward")
    yield by_starter("SIGKILL under torchrun, two nodes", _torchrun(2), "backward")
    yield by_starter("SIGKILL under `planner run`", [["-m", "benchmarks.faults.local"]], "backward")


def passing_rows(network: bool) -> Iterator[Row]:
    """Of what passes, with the usual patience and with a longer one."""
    for patience in (None, LONGER_S):
        yield stopped(4, patience)
        if network:
            yield mended(4, 5, patience)
    if network:
        yield full_disk()


TABLES = ("ends", "passes", "elastic")


def main(argv: Sequence[str]) -> int:
    """Make all of it happen and write the report; returns the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.faults", description=__doc__)
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--out", type=Path, default=report_path("faults"))
    parser.add_argument("--quick", action="store_true", help="one phase of each")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    args = parser.parse_args(argv)
    network = True
    try:
        require_linux_root()
    except EmulationError as error:
        network = False
        print(f"cuts and full disks are left out: {error}", file=sys.stderr)
    lines = [f"# When something fails, {today}", ""]

    def say(*extra: str) -> None:
        lines.extend(extra)
        print("\n".join(extra), flush=True)

    say(
        f"planner {version('planner')}, torch {version('torch')}, {os.cpu_count()} processors, "
        f"seed 0; regenerate with `python -m benchmarks.faults{_given(args)}` (as root, or cuts "
        "and full "
        "disks are left out). Six processes on one machine, three stages of two devices (of one, "
        "for a stage's only one), a tiny model over TCP. Phases are those of step "
        f"{STEP}; `join` is before all have come, `{WRITING}` while a checkpoint is written. What "
        "is left is processes and temporary files, but for PyTorch's caches and torchrun's logs."
    )
    bad = 0
    if "ends" in args.tables:
        say(
            "", *ENDS, "", f"| fault | phase | {SAID} | exit codes | last end, s | left |", _rule(6)
        )
        found = []
        for row in rows(args.quick, network):
            found.append(row)
            say(row.line())
        slowest = max((row.seconds for row in found if row.seconds is not None), default=0.0)
        wrong = sum(row.seconds is None or bool(row.left) for row in found)
        bad += wrong
        say(
            "",
            f"{len(found)} runs; the slowest ended after {slowest:.1f} s; in {wrong} something did "
            "not end or was left.",
        )
    if "passes" in args.tables:
        say("", *PASSES, "", f"| fault | phase | {SAID} | exit codes | last end, s | left |")
        say(_rule(6))
        for row in passing_rows(network):
            bad += row.seconds is None or bool(row.left)
            say(row.line())
    if "elastic" in args.tables:
        say("", *ELASTIC, "")
        say(
            "| fault | phase | What is reported | exit codes | continues after, s | "
            "losses differ by | left |",
            _rule(7),
        )
        for one in elastic_rows(args.quick, network):
            bad += bool(one.left)
            say(one.line())
    write_text(args.out, "\n".join(lines) + "\n")
    return int(bad > 0)


SAID = "what is printed, by how many"
ENDS = (
    "## The run ends",
    "",
    "Rank 0 serves the store, unless torchrun or `planner run` does. Seconds are from the fault to "
    "the end of the last other process; where processes do not fit, from the first end to the "
    "last. A process that was stopped continues after the others have ended, and must end too. "
    f"Missing ranks are waited for {WAIT} s here.",
)
PASSES = (
    "## It passes",
    "",
    f"After {PASSES_S:g} s, with the usual patience of 10 s and with a longer one; exit code 0: "
    f"all {DONE} steps were done, and the seconds include them. A full disk is a tmpfs of {DISK} "
    "that holds some shards of a checkpoint and not all.",
)
ELASTIC = (
    "## The others continue (`--elastic`)",
    "",
    "Seconds are from the fault until the next step was done. Losses are compared with those of a "
    "run without fault, as the largest relative difference of a step; a device that comes back is "
    f"followed for {BEYOND} steps. The store is served as `planner run` does, where links are cut "
    "by rank 0. Exit code 4: the others have gone on without this one.",
)


def _rule(columns: int) -> str:
    return f"|{'---|' * columns}"


def _given(args: argparse.Namespace) -> str:
    """Words that a table was made with, but for where it goes."""
    some = "" if len(args.tables) == len(TABLES) else f" --tables {' '.join(args.tables)}"
    return (" --quick" if args.quick else "") + some


if __name__ == "__main__":
    run(main)
