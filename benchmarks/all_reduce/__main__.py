"""``python -m benchmarks.all_reduce``: averaging in equal shares against gloo's all-reduce.

All ranks run on this machine, because a network would hide differences in CPU and memory use. The
executor's ranks connect by Unix sockets, their default on one machine, and by TCP over loopback, as
gloo does. All methods take turns; Linux only. With ``--gpus`` each rank has its vector on its own
GPU, and NCCL's all-reduce is compared instead: that is what ``--direct nccl`` uses.
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

from benchmarks.command_line import report_path, run
from planner.bench.environment import describe_environment
from planner.executor.comm.chunking import Chunking, choose_chunking
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.training_plan.averaging_group import AveragingGroup
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text
from planner.utils.processors import cores

LOOPBACK_BYTES_PER_S = 0.5e9
"""What a rank sends or receives while all do, about."""
CASES = ((4, 50_000_000), (8, 50_000_000), (8, 5_000_000), (8, 500_000), (2, 50_000_000))
"""Ranks, and values of the vector."""
SIZES = (50_000_000, 5_000_000, 500_000)
"""Values of a vector on GPUs."""
WAYS = {
    "gloo": "gloo's all_reduce, TCP",
    "nccl": "NCCL's all_reduce",
    "exchange": "executor, Unix sockets",
    "exchange, TCP": "executor, TCP",
}
"""What each is called."""
LIMIT_S = 600


@dataclass(frozen=True)
class Row:
    """One case: seconds and extra bytes of every repetition, by way: the library's first."""

    ranks: int
    values: int
    chunking: Chunking
    found: dict[str, list[tuple[float, float]]]

    def seconds(self, method: str) -> float:
        """Median."""
        return statistics.median(seconds for seconds, _ in self.found[method])

    def extra_bytes(self, method: str) -> float:
        """The most."""
        return max(size for _, size in self.found[method])


def local_pace(ranks: int, values: int) -> Chunking:
    """The pace that a plan for one machine would have."""
    network = Network(np.full((ranks, ranks), 1e-4), np.full((ranks, ranks), LOOPBACK_BYTES_PER_S))
    ranks_per_core = max(1.0, ranks / cores())
    group = AveragingGroup.equal(tuple(range(ranks)))
    return choose_chunking(
        group, 4.0 * values, Cluster(network, Devices(1e12, 1e12)), ranks_per_core=ranks_per_core
    )


def measure(ranks: int, values: int, repeats: int, *, gpus: bool = False) -> Row:
    """Start the ranks and read what they found."""
    chunking = local_pace(ranks, values)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    root = str(Path(__file__).resolve().parents[2])
    processes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.all_reduce.rank"),
                *("--values", str(values), "--repeats", str(repeats)),
                *("--chunks", str(chunking.chunks), "--window", str(chunking.window)),
                *(("--gpus",) if gpus else ()),
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
    return Row(ranks, values, chunking, json.loads(outputs[0][0].strip().splitlines()[-1]))


def report(rows: Sequence[Row], command: str, load_before: str) -> str:
    """The dated report as Markdown."""
    names = list(rows[0].found)
    library = WAYS[names[0]].partition("'")[0]
    heads = [WAYS[method] for method in names] + [
        f"extra memory, {WAYS[method]}" for method in names
    ]
    lines = [
        f"# Averaging at equal shares on one machine, {datetime.now(UTC).date().isoformat()}",
        "",
        describe_environment(load_before, ("planner", "numpy", "torch")),
        "",
        f"Regenerate with `python -m benchmarks.all_reduce {command}`. Processes of one thread, "
        "the ways "
        f"in turns; medians of the slowest rank's seconds with their ratio to {library}'s, and the "
        "most host memory beyond the vector that any rank took. Of the processors nothing is left "
        "over: what is compared is the work of copying, summing and messages. The executor by "
        "itself has Unix sockets between ranks of one machine; TCP is over loopback.",
        "",
        f"| ranks | vector | {' | '.join(heads)} |",
        f"|---|---|{'---|' * len(heads)}",
    ]
    for row in rows:
        first, *ours = map(row.seconds, row.found)
        extra = [f"{row.extra_bytes(method) / 1e6:.1f} MB" for method in row.found]
        cells = [f"{seconds:.3f} s ({seconds / first:.2f})" for seconds in ours]
        lines.append(
            f"| {row.ranks} | {4 * row.values / 1e6:g} MB | {first:.3f} s | "
            f"{' | '.join([*cells, *extra])} |"
        )
    return "\n".join(lines) + "\n"


def cases_of(*, gpus: bool) -> Sequence[tuple[int, int]]:
    """Ranks, and values of the vector."""
    if not gpus:
        return CASES
    import torch

    if (found := torch.cuda.device_count()) < 2:
        raise ValueError(f"--gpus needs two GPUs at least, found {found}; leave it out")
    return [(found, values) for values in SIZES]


def main(argv: Sequence[str]) -> int:
    """Measure all cases and write the report; returns the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.all_reduce", description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--gpus", action="store_true", help="a rank on each GPU of this machine")
    args = parser.parse_args(argv)
    if args.out is None:
        args.out = report_path("all-reduce-gpus" if args.gpus else "all-reduce")
    load_before = f"{os.getloadavg()[0]:.1f}"
    rows = []
    cases = cases_of(gpus=args.gpus)
    command = f"--repeats {args.repeats}"
    command += " --gpus" if args.gpus else ""
    for ranks, values in cases:
        row = measure(ranks, values, args.repeats, gpus=args.gpus)
        rows.append(row)
        summary = ", ".join(f"{method} {row.seconds(method):.3f} s" for method in row.found)
        print(f"{ranks} ranks, {values:,} values: {summary}", flush=True)
    write_text(args.out, report(rows, command, load_before))
    return 0


if __name__ == "__main__":
    run(main)
