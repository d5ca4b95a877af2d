"""``planner bench links``: planned averaging over emulated links, measured against predicted.

Needs root and iproute2: every peer gets a network namespace whose up- and download are shaped by
tbf queues. The paper's set-ups A (equal peers), C (fast and slow ones) and D (a server without a
GPU), scaled to eight processes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from planner.files import write_text
from planner.lp.baselines import all_reduce_s
from planner.lp.capacity import Limits
from planner.lp.rates import best_rates
from planner.problems import AveragingProblem

MBIT = 1e6 / 8
PAYLOAD = 1448 / 1514
"""Of an Ethernet frame of 1514 bytes, TCP carries 1448 with its time stamps."""


@dataclass(frozen=True)
class SetUp:
    """Peers with equal up- and download, in Mb/s; ``computes`` where they bring gradients."""

    name: str
    mbit_per_s: tuple[float, ...]
    computes: tuple[bool, ...]

    def problem(self, gradient_bytes: float) -> AveragingProblem:
        """The averaging problem, with what TCP leaves of each link."""
        speed = np.array(self.mbit_per_s) * MBIT * PAYLOAD
        samples = np.array(self.computes, dtype=float)
        return AveragingProblem(samples, speed, speed, 1.0, gradient_bytes)


SETUPS = (
    SetUp("A scaled: 8 x 20", (20.0,) * 8, (True,) * 8),
    SetUp("C scaled: 3 x 50 + 5 x 10", (50.0,) * 3 + (10.0,) * 5, (True,) * 8),
    SetUp(
        "D scaled: 7 x 10 + one of 125 without a GPU",
        (10.0,) * 7 + (125.0,),
        (True,) * 7 + (False,),
    ),
)


@dataclass(frozen=True)
class Measured:
    """Seconds of one strategy on one set-up."""

    setup: str
    strategy: str
    predicted_s: float
    measured_s: tuple[float, ...]

    @property
    def off(self) -> float:
        """Median measured over predicted, less 1."""
        return statistics.median(self.measured_s) / self.predicted_s - 1


@contextmanager
def namespaces(mbit_per_s: Sequence[float]) -> Iterator[list[str]]:
    """A network namespace per peer on one bridge; both directions of each are shaped."""
    tag = uuid.uuid4().hex[:5]
    bridge, names = f"pb{tag}", [f"pn{tag}{k}" for k in range(len(mbit_per_s))]
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for k, (name, speed) in enumerate(zip(names, mbit_per_s, strict=True)):
            _ip("netns", "add", name)
            _ip("link", "add", f"pv{tag}{k}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", f"pv{tag}{k}", "master", bridge, "up")
            inside = ("netns", "exec", name)
            _ip(*inside, "ip", "link", "set", "lo", "up")
            _ip(*inside, "ip", "addr", "add", f"10.77.0.{k + 1}/24", "dev", "eth0")
            _ip(*inside, "ip", "link", "set", "eth0", "up")
            # upload is shaped where it leaves the peer, download where it leaves the bridge
            _shape((*inside, "tc"), "eth0", speed)
            _shape(("tc",), f"pv{tag}{k}", speed)
        yield names
    finally:
        for name in names:
            _ip("netns", "del", name, check=False)
        _ip("link", "del", bridge, check=False)


def _ip(*arguments: str, check: bool = True) -> None:
    _command(("ip", *arguments), check)


def _shape(prefix: tuple[str, ...], device: str, mbit: float) -> None:
    command = prefix if prefix == ("tc",) else ("ip", *prefix)
    # a burst of 32 kB is under 13 ms on the slowest link; the queue is long enough never to drop
    limits = ("rate", f"{mbit:g}mbit", "burst", "32kb", "latency", "4s")
    _command((*command, "qdisc", "add", "dev", device, "root", "tbf", *limits), True)


def _command(command: tuple[str, ...], check: bool) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise ValueError(f"{' '.join(command)}: {done.stderr.strip()}; run as root with iproute2")


def average_in(
    names: Sequence[str],
    shares: Sequence[float],
    computes: Sequence[bool],
    values: int,
    repeats: int,
) -> tuple[float, ...]:
    """Run one rank per namespace; returns the seconds of each repetition."""
    root = str(Path(__file__).resolve().parents[2])
    processes = []
    for rank, name in enumerate(names):
        environment = os.environ | {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(names)),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": "29511",
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": root,
        }
        command = [
            *("ip", "netns", "exec", name, sys.executable, "-m", "planner.executor.average_rank"),
            *("--shares", json.dumps(list(shares)), "--contributes", json.dumps(list(computes))),
            *("--values", str(values), "--repeats", str(repeats)),
        ]
        processes.append(
            subprocess.Popen(
                command,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=600) for process in processes]
    for process, (_, error) in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"a rank failed: {error[-500:]}")
    return tuple(json.loads(outputs[0][0].strip().splitlines()[-1]))


def measure(setup: SetUp, values: int, repeats: int) -> list[Measured]:
    """Our shares and equal shares of those who compute, predicted and measured."""
    problem = setup.problem(4.0 * values)
    ours = best_rates(Limits(problem), problem.contributors)
    even = np.array(setup.computes, dtype=float) / sum(setup.computes)
    found = []
    with namespaces(setup.mbit_per_s) as names:
        for strategy, shares, predicted in (
            ("ours", ours.rates / ours.rates.sum(), problem.gradient_bytes / ours.total),
            ("all-reduce", even, all_reduce_s(problem)),
        ):
            # peers that only receive in an all-reduce do not take part in it
            active = range(len(names)) if strategy == "ours" else np.flatnonzero(even)
            seconds = average_in(
                [names[i] for i in active],
                [float(shares[i]) for i in active],
                [setup.computes[i] for i in active],
                values,
                repeats,
            )
            found.append(Measured(setup.name, strategy, predicted, seconds))
    return found


def report(rows: Sequence[Measured], values: int, repeats: int) -> str:
    """A dated Markdown table."""
    today = datetime.now(UTC).date().isoformat()
    lines = [
        f"# Planned averaging over emulated links, {today}",
        "",
        f"`planner bench links`: {values:,} 32-bit values, {repeats} repetitions, eight processes "
        "in network namespaces shaped by tbf. Predictions count on TCP's payload, 1448 of 1514 "
        "bytes.",
        "",
        "| set-up (Mb/s) | strategy | predicted s | measured s, median (all) | off |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        every = ", ".join(f"{s:.2f}" for s in row.measured_s)
        lines.append(
            f"| {row.setup} | {row.strategy} | {row.predicted_s:.2f} | "
            f"{statistics.median(row.measured_s):.2f} ({every}) | {row.off:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measure all set-ups and write the table; returns the exit code."""
    parser = argparse.ArgumentParser(prog="planner bench links", description=__doc__)
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--out", type=Path, default=Path("docs") / f"bench-links-{today}.md")
    parser.add_argument("--values", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(argv)
    rows = []
    for setup in SETUPS:
        rows += measure(setup, args.values, args.repeats)
        print(f"{setup.name}: {', '.join(f'{r.strategy} {r.off:+.1%}' for r in rows[-2:])}")
    write_text(args.out, report(rows, args.values, args.repeats))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
