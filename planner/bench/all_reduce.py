"""``planner bench all_reduce``: planned averaging at equal shares against gloo's all-reduce.

All ranks on this machine, so that processors and memory are compared: a network would make all
alike. The executor's ranks connect by Unix sockets, as they do by themselves on one machine, and
by TCP over loopback, as gloo's do. The three take turns; Linux only.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from planner.bench._stamp import stamp
from planner.executor.pace import Pace, pace_of
from planner.network.atomic import write_text
from planner.network.cluster import Cluster, Devices
from planner.network.line_parser import LineParser
from planner.network.network import Network
from planner.training_plan.averaging_group import AveragingGroup

LOOPBACK_BYTES_PER_S = 0.5e9
"""What a rank sends or receives while all do, about."""
CASES = ((4, 50_000_000), (8, 50_000_000), (8, 5_000_000), (8, 500_000), (2, 50_000_000))
"""Ranks, and values of the vector."""
LIMIT_S = 600


@dataclass(frozen=True)
class Row:
    """One case: seconds and extra bytes of every repetition, by way: gloo's first."""

    ranks: int
    values: int
    pace: Pace
    found: dict[str, list[tuple[float, float]]]

    def seconds(self, way: str) -> float:
        """Median."""
        return statistics.median(seconds for seconds, _ in self.found[way])

    def extra_bytes(self, way: str) -> float:
        """The most."""
        return max(size for _, size in self.found[way])


def local_pace(ranks: int, values: int) -> Pace:
    """The pace that a plan for one machine would have.

    Parameters
    ----------
    ranks
        All in one group.
    values
        Of the vector.

    Returns
    -------
    Pace
        Chunks and window.
    """
    network = Network(np.full((ranks, ranks), 1e-4), np.full((ranks, ranks), LOOPBACK_BYTES_PER_S))
    crowd = max(1.0, ranks / len(os.sched_getaffinity(0)))
    group = AveragingGroup.equal(tuple(range(ranks)))
    return pace_of(group, 4.0 * values, Cluster(network, Devices(1e12, 1e12)), crowd=crowd)


def measure(ranks: int, values: int, repeats: int) -> Row:
    """Start the ranks and read what they found.

    Parameters
    ----------
    ranks
        Processes.
    values
        Of the vector.
    repeats
        Of each way, the first one apart.

    Returns
    -------
    Row
        What was measured.
    """
    pace = local_pace(ranks, values)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    root = str(Path(__file__).resolve().parents[2])
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "planner.bench._all_reduce_rank"),
                *("--values", str(values), "--repeats", str(repeats)),
                *("--chunks", str(pace.chunks), "--window", str(pace.window)),
            ],
            env=os.environ
            | {
                "PYTHONPATH": root,
                "RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": "lo",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, error) in zip(processes, outputs, strict=True):
        if process.returncode != 0:
            raise RuntimeError(f"a rank failed: {error[-500:]}")
    return Row(ranks, values, pace, json.loads(outputs[0][0].strip().splitlines()[-1]))


def report(rows: Sequence[Row], repeats: int, before: str) -> str:
    """The dated report as Markdown.

    Parameters
    ----------
    rows
        What was measured.
    repeats
        Of each.
    before
        The load when the benchmark began.

    Returns
    -------
    str
        Markdown.
    """
    lines = [
        f"# Averaging at equal shares on one machine, {datetime.now(UTC).date().isoformat()}",
        "",
        stamp(before, ("planner", "numpy", "torch")),
        "",
        f"Regenerate with `planner bench all_reduce --repeats {repeats}`. Processes of one thread, "
        "the three ways in turns; medians of the slowest rank's seconds with their ratio to "
        "gloo's, and the most memory beyond the vector that any rank took. Of the processors "
        "nothing is left over: what is compared is the work of copying, summing and messages. "
        "The executor by itself has Unix sockets between ranks of one machine; gloo has TCP over "
        "loopback, and so has the executor where they are closed.",
        "",
        "| ranks | vector | gloo's all_reduce, TCP | executor, Unix sockets | executor, TCP | "
        "extra memory, gloo | Unix sockets | TCP |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        gloo, *ours = map(row.seconds, row.found)
        extra = [f"{row.extra_bytes(way) / 1e6:.1f} MB" for way in row.found]
        cells = [f"{seconds:.3f} s ({seconds / gloo:.2f})" for seconds in ours]
        lines.append(
            f"| {row.ranks} | {4 * row.values / 1e6:g} MB | {gloo:.3f} s | "
            f"{' | '.join([*cells, *extra])} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measure all cases and write the report; returns the exit code.

    Parameters
    ----------
    argv
        Words of the command line.

    Returns
    -------
    int
        0.
    """
    parser = LineParser(prog="planner bench all_reduce", description=__doc__)
    today = datetime.now(UTC).date().isoformat()
    parser.add_argument("--out", type=Path, default=Path("docs") / f"bench-all-reduce-{today}.md")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(argv)
    before = f"{os.getloadavg()[0]:.1f}"
    rows = []
    for ranks, values in CASES:
        row = measure(ranks, values, args.repeats)
        rows.append(row)
        told = ", ".join(f"{way} {row.seconds(way):.3f} s" for way in row.found)
        print(f"{ranks} ranks, {values:,} values: {told}", flush=True)
    write_text(args.out, report(rows, args.repeats, before))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
