"""One rank of a probe under torchrun: ``python -m planner.probe log.jsonl --devices a b``.

Measures latency and bandwidth of every ordered pair of devices, with disjoint pairs at the same
time, and total upload and download of each device, over connections like the executor's. Rank 0
appends every finding to its log; restarted with the same log, the probe continues.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

from planner.executor.fault_tolerance.failure_detector import FailureDetector
from planner.executor.fault_tolerance.shutdown import Shutdown
from planner.executor.launch.arguments import add_authentication_options, load_secret
from planner.executor.launch.process import exit_now, run_rank
from planner.executor.rendezvous.connect import connections_to
from planner.executor.rendezvous.rank_assignment import local_device_name
from planner.executor.rendezvous.rank_group import RankGroup
from planner.executor.rendezvous.rendezvous import WAIT_S, rendezvous_by_name
from planner.executor.transport.connections import ChannelKind, Connections
from planner.network.probe_log import ALL, FORMAT, SCHEMA_VERSION, LinkFinding, ProbeLog
from planner.probe.flows import Rate
from planner.probe.measure import (
    STREAMS,
    Half,
    ProbeTiming,
    line_of,
    link_of,
    measure_device,
    measure_pair,
)
from planner.probe.rounds import Pair, disjoint_rounds
from planner.utils.argument_parser import OneLineParser
from planner.utils.refusal import Refusal

HEARTBEAT_TIMEOUT_S = 60.0
"""Heartbeats queue behind streams that fill a link's buffers."""


class Work(NamedTuple):
    """The next measurement: disjoint pairs, or upload or download of one device."""

    pairs: tuple[Pair, ...]
    device: int | None = None
    up: bool = True


def main(argv: list[str] | None = None) -> int:
    """Run one rank; returns the exit code."""
    args = _arguments(argv)
    name = local_device_name(args.devices)
    detector = FailureDetector(name, Shutdown())
    return run_rank(name, detector, lambda: _run(args, name, detector))


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    timing = ProbeTiming()
    parser = OneLineParser(prog="python -m planner.probe", description=__doc__)
    parser.add_argument("log", type=Path, help="findings, on rank 0's node; gone on with if there")
    parser.add_argument("--devices", nargs="+", required=True, help="names of this node's devices")
    for field, help_text in (
        ("seconds", "of a stream that count"),
        ("warm", "of a stream before they count"),
        ("messages", "for messages of all sizes, of one pair and direction"),
    ):
        default = getattr(timing, field if field == "seconds" else f"{field}_s")
        parser.add_argument(
            f"--{field}",
            type=float,
            default=default,
            help=f"seconds {help_text}; default {default:g}",
        )
    parser.add_argument("--wait", type=float, default=WAIT_S, help="seconds for missing ranks")
    add_authentication_options(parser)
    return parser.parse_args(argv)


def _run(args: argparse.Namespace, name: str, detector: FailureDetector) -> int:
    for option in ("seconds", "warm", "messages", "wait"):
        if not 0 < getattr(args, option) < math.inf:
            raise Refusal(f"--{option} is {getattr(args, option):g}; give seconds above 0")
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", len(args.devices)))
    if local_ranks != len(args.devices):
        raise Refusal(
            f"--devices names {len(args.devices)}, this node has {local_ranks} "
            "processes; name each once"
        )
    if ALL in args.devices or "" in args.devices:
        raise Refusal(f"--devices: {ALL!r} and empty names are not for devices; name them else")
    timing = ProbeTiming(args.seconds, args.warm, args.messages)
    settings = json.dumps(asdict(timing))
    ranks = rendezvous_by_name(
        *(name, settings),
        detector=detector,
        wait_s=args.wait,
        heartbeat_timeout_s=HEARTBEAT_TIMEOUT_S,
        secret=load_secret(args.bind, args.secret_file),
    )
    if ranks.world_size < 2:
        raise Refusal("a probe needs two devices at least; start one process a device")
    findings, log = _open_log(args.log, ranks, timing) if ranks.rank == 0 else ([], None)
    done = json.loads(ranks.all_gather("done", json.dumps(findings))[0])
    works = _works(ranks, {(a, b) for a, b in done})
    peers = [r for r in range(ranks.world_size) if r != ranks.rank]
    channels = [(purpose, r) for r in peers for purpose in (ChannelKind.PROBE, *STREAMS)]
    with connections_to(ranks, channels, "probe") as opened:
        for number, work in enumerate(works):
            ranks.barrier(f"begin/{number}")
            for finding in _measured(ranks, work, opened, timing, number):
                if log is not None:
                    log(finding)
            if ranks.rank == 0:
                left_s = _left_s(works[number + 1 :], timing)
                _print(f"{number + 1} of {len(works)} rounds, about {left_s:.0f} s left")
    if ranks.rank == 0:
        _print(f"wrote {args.log}; planner probe {args.log} --out net.csv makes a network of it")
    ranks.leave()
    return 0


def _open_log(
    path: Path, ranks: RankGroup, timing: ProbeTiming
) -> tuple[list[tuple[str, str]], Callable[[LinkFinding], None]]:
    """Findings already in a log, and the log to append to."""
    done: list[tuple[str, str]] = []
    if path.exists() and path.stat().st_size:
        log = ProbeLog.load(path)
        old_pace = log.about.get("pace")
        if old_pace != asdict(timing):
            raise Refusal(
                f"{path}: was measured with {old_pace}, not {asdict(timing)}; give the same "
                "options, or another file"
            )
        # with fewer peers a device's line may not have been saturated
        peer_count = ranks.world_size - 1
        done = [
            e for e, finding in log.findings.items() if ALL not in e or finding.peers >= peer_count
        ]
        content = path.read_bytes()
        if b"\n" not in content:
            path.write_bytes(content + b"\n")
        elif not content.endswith(b"\n"):  # the end of a process cut a line off
            with path.open("r+b") as file:
                file.truncate(content.rfind(b"\n") + 1)
    else:
        about = {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "began": datetime.now(UTC).isoformat(timespec="seconds"),
            "pace": asdict(timing),
            "devices": list(ranks.names),
            "versions": {"python": platform.python_version(), "torch": torch.__version__},
        }
        path.write_text(json.dumps(about) + "\n")

    def add(finding: LinkFinding) -> None:
        with path.open("a") as file:
            file.write(finding.to_line() + "\n")
            file.flush()
            os.fsync(file.fileno())

    return done, add


def _works(ranks: RankGroup, done: set[tuple[str, str]]) -> list[Work]:
    """Missing measurements, in the order of all ranks."""
    names, world = ranks.names, ranks.world_size
    wanted = [
        (i, j)
        for i in range(world)
        for j in range(i + 1, world)
        if not {(names[i], names[j]), (names[j], names[i])} <= done
    ]
    works = [Work(tuple(pairs)) for pairs in disjoint_rounds(world, wanted)]
    for device, name in enumerate(names):
        for up in (True, False):
            if ((name, ALL) if up else (ALL, name)) not in done:
                works.append(Work((), device, up))
    return works


def _measured(
    ranks: RankGroup, work: Work, opened: Connections, timing: ProbeTiming, number: int
) -> Iterator[LinkFinding]:
    """Do this rank's part; returns the findings of all ranks."""
    names, rank = ranks.names, ranks.rank
    if work.device is not None:
        rate = measure_device(rank, work.device, work.up, ranks.world_size, opened, timing)
        texts = ranks.all_gather(
            f"found/{number}", json.dumps(rate and [rate.mean, rate.low, rate.high])
        )
        rates = [Rate(*rate) for text in texts if (rate := json.loads(text)) is not None]
        yield line_of(names[work.device], work.up, rates, ranks.world_size - 1)
        return
    mine = next((pair for pair in work.pairs if rank in pair), None)
    text = "" if mine is None else measure_pair(rank, mine, opened, timing).to_json()
    halves = [
        Half.of_json(text) if text else None for text in ranks.all_gather(f"found/{number}", text)
    ]
    for i, j in work.pairs:
        for source, destination in ((i, j), (j, i)):
            backward, forward = halves[source], halves[destination]
            assert backward is not None and forward is not None
            yield link_of(names[source], names[destination], backward, forward)


def _left_s(works: list[Work], timing: ProbeTiming) -> float:
    return sum(timing.of_pair_s() if work.pairs else timing.of_device_s() / 2 for work in works)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    exit_now(main())
