"""Rates of the emulated network, and planned averaging over it.

Needs Linux and root. Every peer is a network namespace with an upload and a download, as in
``planner emulate``. The set-ups are the paper's A (equal peers), C (fast and slow peers) and D (a
server without a GPU), scaled to eight processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from benchmarks.averaging_rules import all_reduce_s
from benchmarks.command_line import report_path, run
from benchmarks.link_rates import Flow, fair_shares, goodput
from planner.bench.environment import describe_environment
from planner.emulate.links import EmulatedLinks, links_of
from planner.emulate.network import EmulatedNetwork, emulated, package_path
from planner.lp.capacity import BandwidthLimits
from planner.lp.rates import best_rates
from planner.network.cluster import Cluster, Devices
from planner.network.network import Network
from planner.problems import AveragingProblem
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text

MBIT = 1e6 / 8
LATENCY_S = 1e-3
WARM_S = 3.0
"""Warm-up of the probe, in seconds."""
MESSAGE_BYTES = 20_000
"""Message size of the probe."""

Pair = tuple[int, int]
"""Source and destination peer."""


@dataclass(frozen=True)
class SetUp:
    """Peers with equal upload and download in Mb/s; ``computes`` marks those with gradients."""

    name: str
    mbit_per_s: tuple[float, ...]
    computes: tuple[bool, ...]

    def problem(self, gradient_bytes: float) -> AveragingProblem:
        """Return the averaging problem."""
        speed = np.array(self.mbit_per_s) * MBIT
        samples = np.array(self.computes, dtype=float)
        return AveragingProblem(samples, speed, speed, 1.0, gradient_bytes)

    def links(self) -> EmulatedLinks:
        """Return the network; a pair is as fast as its slower end."""
        speed = np.array(self.mbit_per_s) * MBIT
        n = len(speed)
        network = Network(np.full((n, n), LATENCY_S), np.minimum(speed[:, None], speed[None, :]))
        devices = Devices(1.0, 1.0, upload_bytes_per_s=speed, download_bytes_per_s=speed)
        return links_of(Cluster(network, devices))


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
    """Measured seconds of one strategy on one set-up."""

    setup: str
    strategy: str
    predicted_s: float
    measured_s: tuple[float, ...]

    @property
    def off(self) -> float:
        """Relative difference of the measured median to the prediction."""
        return statistics.median(self.measured_s) / self.predicted_s - 1


@dataclass(frozen=True)
class Loaded:
    """Rates of simultaneous flows on a set-up's links.

    Attributes
    ----------
    fair, found
        Payload bytes per second by pair: max-min fair share, and received rate.
    """

    setup: str
    what: str
    fair: dict[Pair, float]
    found: dict[Pair, float]

    @property
    def parts(self) -> tuple[float, float, float]:
        """Received over fair rate: lowest flow, total, highest flow."""
        each = [self.found[flow] / fair for flow, fair in self.fair.items()]
        return min(each), sum(self.found.values()) / sum(self.fair.values()), max(each)


def probe(setup: SetUp, network: EmulatedNetwork, seconds: float) -> list[Loaded]:
    """Measure one flow over the fastest and the slowest pair, then all pairs at once."""
    speed = setup.mbit_per_s
    pairs = [(i, j) for i in range(len(speed)) for j in range(len(speed)) if i != j]
    by_speed = sorted(pairs, key=lambda pair: -min(speed[pair[0]], speed[pair[1]]))
    singles = {min(speed[i], speed[j]): (i, j) for i, j in (by_speed[-1], by_speed[0])}
    questions = [(f"one flow, {mbit:g} Mb/s", [pair]) for mbit, pair in singles.items()]
    found = []
    for what, chosen in [*questions, ("all to all", pairs)]:
        flows = [Flow(*pair, MESSAGE_BYTES) for pair in chosen]
        fair = fair_shares(setup.links(), flows)
        found.append(Loaded(setup.name, what, fair, goodput(network, flows, WARM_S, seconds)))
    return found


def average_in(
    network: EmulatedNetwork,
    peers: Sequence[int],
    shares: Sequence[float],
    computes: Sequence[bool],
    values: int,
    repeats: int,
) -> tuple[float, ...]:
    """Run one rank in the namespace of each of ``peers``.

    ``shares`` and ``computes`` are in the order of ``peers``.

    Returns
    -------
    tuple[float, ...]
        Seconds of every repetition.
    """
    options = {
        "--shares": json.dumps(list(shares)),
        "--contributes": json.dumps(list(computes)),
        "--values": str(values),
        "--repeats": str(repeats),
    }
    variables = {
        "PYTHONPATH": package_path(),
        "WORLD_SIZE": str(len(peers)),
        "MASTER_ADDR": network.addresses[peers[0]],
        "MASTER_PORT": "29511",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks.averaging_rank"]
    command += [word for name, value in options.items() for word in (name, value)]
    processes = [
        network.start(peer, command, os.environ | variables | {"RANK": str(rank)})
        for rank, peer in enumerate(peers)
    ]
    try:
        outputs = [_output(process) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return tuple(json.loads(outputs[0].strip().splitlines()[-1]))


def _output(process: subprocess.Popen[str]) -> str:
    output, error = process.communicate(timeout=600)
    if process.returncode != 0:
        raise RuntimeError(f"a process failed: {error[-500:]}")
    return output


def measure(
    setup: SetUp, values: int, repeats: int, probe_s: float
) -> tuple[list[Loaded], list[Measured]]:
    """Measure the links, then averaging with our shares and with equal shares."""
    problem = setup.problem(4.0 * values)
    ours = best_rates(BandwidthLimits(problem), problem.contributors)
    even = np.array(setup.computes, dtype=float) / sum(setup.computes)
    found = []
    with emulated(setup.links()) as network:
        loaded = probe(setup, network, probe_s)
        for strategy, shares, predicted in (
            ("ours", ours.rates / ours.rates.sum(), problem.gradient_bytes / ours.total),
            ("all-reduce", even, all_reduce_s(problem)),
        ):
            # peers that only receive in an all-reduce do not take part in it
            active = range(len(even)) if strategy == "ours" else np.flatnonzero(even).tolist()
            seconds = average_in(
                network,
                active,
                [float(shares[i]) for i in active],
                [setup.computes[i] for i in active],
                values,
                repeats,
            )
            found.append(Measured(setup.name, strategy, predicted, seconds))
    return loaded, found


def report(
    loaded: Sequence[Loaded], rows: Sequence[Measured], values: int, repeats: int, load_before: str
) -> str:
    """Format the dated report as Markdown; ``before`` is the load average at the start."""
    today = datetime.now(UTC).date().isoformat()
    lines = [
        f"# Planned averaging over emulated links, {today}",
        "",
        describe_environment(load_before, ("planner", "numpy", "scipy", "torch")),
        "",
        f"Regenerate with `python -m benchmarks.averaging_links --values {values} --repeats "
        f"{repeats}`, as root. "
        "Vectors are normal random numbers; rank r's in repetition k has seed 1000 k + r.",
        "",
        "Eight processes of the executor, each in a network namespace; up- and download of every "
        "peer are shared max-min fair by the pairs that send, a millisecond away from each other. "
        "Predictions come from the nominal speeds; the start and end of an averaging, when not all "
        "links are busy, are not in them.",
        "",
        "## The links by themselves",
        "",
        "Plain TCP flows without end; payload that arrives, in Mb/s and over the max-min fair "
        "parts of the links.",
        "",
        "| set-up (Mb/s) | flows | fair, all | found, all | all | slowest flow | fastest flow |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in loaded:
        least, mean, most = row.parts
        fair, found = (sum(r.values()) / MBIT for r in (row.fair, row.found))
        lines.append(
            f"| {row.setup} | {row.what} | {fair:.2f} | {found:.2f} | {mean:.1%} | {least:.1%} | "
            f"{most:.1%} |"
        )
    lines += [
        "",
        "## Averaging",
        "",
        f"{values:,} 32-bit values, {repeats} repetitions; the slowest rank counts, and the first, "
        "which also opens connections, does not.",
        "",
        "| set-up (Mb/s) | strategy | predicted s | measured s, median (all) | off |",
        "|---|---|---|---|---|",
    ]
    for done in rows:
        seconds = ", ".join(f"{s:.2f}" for s in done.measured_s)
        lines.append(
            f"| {done.setup} | {done.strategy} | {done.predicted_s:.2f} | "
            f"{statistics.median(done.measured_s):.2f} ({seconds}) | {done.off:+.1%} |"
        )
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Measure all set-ups and write the report; return the exit code."""
    parser = OneLineParser(prog="python -m benchmarks.averaging_links", description=__doc__)
    parser.add_argument("--out", type=Path, default=report_path("averaging-links"))
    parser.add_argument("--values", type=int, default=2_000_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--probe-seconds", type=float, default=5.0)
    args = parser.parse_args(argv)
    load_before = f"{os.getloadavg()[0]:.1f}"
    loaded: list[Loaded] = []
    rows: list[Measured] = []
    for setup in SETUPS:
        links, found = measure(setup, args.values, args.repeats, args.probe_seconds)
        loaded += links
        rows += found
        for link in links:
            print(f"{setup.name}: {link.what}: {link.parts[1]:.1%} of nominal")
        print(f"{setup.name}: {', '.join(f'{r.strategy} {r.off:+.1%}' for r in found)}", flush=True)
    write_text(args.out, report(loaded, rows, args.values, args.repeats, load_before))
    return 0


if __name__ == "__main__":
    run(main)
