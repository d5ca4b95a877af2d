"""Accuracy of the link probe on emulated networks.

Needs Linux and root. Every device is a network namespace. Pairs have the rates and latencies of a
measured network, with rates scaled down for this machine; devices have stated uploads and
downloads.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.command_line import report_path, run
from planner.bench.environment import describe_environment
from planner.emulate.links import links_of
from planner.emulate.network import emulated, package_path
from planner.network.catalogue import load_network
from planner.network.cluster import Cluster, Devices
from planner.network.probe_log import ALL, ProbeLog
from planner.utils.argument_parser import OneLineParser
from planner.utils.atomic_write import write_text

NETWORKS = {
    "aws8_dtfm_worldwide_2022": 100.0,
    "gcp12_skippipe_2025_repaired": 100.0,
    "skyplane_60_20220129": 500.0,
}
"""Divisor of the rates of each network."""
DEVICES = 5
SHARED = 1.5
"""A device's line rate over its mean pair's, unless its fastest pair is faster."""
PORT = "29513"
LIMIT_S = 3600.0


@dataclass(frozen=True)
class Off:
    """Relative errors of all pairs or devices."""

    network: str
    what: str
    values: NDArray[np.float64]

    def line(self) -> str:
        """Format as a table row."""
        size = np.abs(self.values)
        return (
            f"| {self.network} | {self.what} | {len(size)} | {np.median(self.values):+.1%} | "
            f"{self.values.min():+.1%} | {self.values.max():+.1%} | {(size <= 0.05).mean():.0%} |"
        )


def time_scale(name: str, shrink: float, devices: int, seed: int) -> Cluster:
    """Choose devices of a measured network, each with a line shared by its pairs."""
    network = load_network(name).complete()
    chosen = np.random.default_rng(seed).choice(len(network), devices, replace=False)
    network = network.subset([network.ids[k] for k in sorted(chosen)])
    rate = network.bandwidth_bytes_per_s / shrink
    network = network.replace(bandwidth_bytes_per_s=rate)
    pairs = np.where(np.eye(devices, dtype=bool), np.nan, rate)
    up, down = (
        np.maximum(np.nanmax(pairs, axis=k), SHARED * np.nanmean(pairs, axis=k)) for k in (1, 0)
    )
    return Cluster(network, Devices(1.0, 1.0, upload_bytes_per_s=up, download_bytes_per_s=down))


def probed(cluster: Cluster, words: Sequence[str] = ()) -> ProbeLog:
    """Probe a cluster's links in the emulation."""
    names = cluster.network.ids
    with tempfile.TemporaryDirectory() as folder, emulated(links_of(cluster)) as network:
        variables = {
            "PYTHONPATH": package_path(),
            "WORLD_SIZE": str(len(names)),
            "LOCAL_RANK": "0",
            "MASTER_ADDR": network.addresses[0],
            "MASTER_PORT": PORT,
            "OMP_NUM_THREADS": "1",
        }
        log = str(Path(folder) / "probe.jsonl")
        command = [sys.executable, "-m", "planner.probe", log, "--wait", "300", *words]
        processes = [
            network.start(
                rank,
                [*command, "--devices", name],
                os.environ | variables | {"RANK": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank, name in enumerate(names)
        ]
        try:
            said = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for process, text in zip(processes, said, strict=True):
            if process.returncode != 0:
                raise RuntimeError(f"a process of the probe failed: {text[-500:]}")
        return ProbeLog.load(log)


def compared(name: str, cluster: Cluster, log: ProbeLog) -> list[Off]:
    """Compare found with imposed values."""
    ids, network = cluster.network.ids, cluster.network
    place = {one: k for k, one in enumerate(ids)}
    links = [(place[a], place[b], f) for (a, b), f in log.findings.items() if ALL not in (a, b)]
    latency = [
        (f.round_trips_s or (0, 0, 0))[1] / (network.latency_s[i, j] + network.latency_s[j, i])
        for i, j, f in links
    ]
    one, two = (
        [f.rates[k][0] / network.bandwidth_bytes_per_s[i, j] for i, j, f in links] for k in (1, 2)
    )
    up, down = cluster.upload_bytes_per_s, cluster.download_bytes_per_s
    assert up is not None and down is not None
    pairs = np.where(np.eye(len(ids), dtype=bool), 0.0, network.bandwidth_bytes_per_s)
    lines = [
        # a device's pairs together may be slower than its line
        log.findings[ends].rates[1][0] / min(limit[k], pairs.sum(axis=axis)[k])
        for k, d in enumerate(ids)
        for ends, limit, axis in (((d, ALL), up, 1), ((ALL, d), down, 0))
    ]
    summary = {"latency": latency, "one flow": one, "two flows": two, "whole lines": lines}
    return [Off(name, what, np.array(values) - 1) for what, values in summary.items()]


def report(rows: Sequence[Off], seed: int, load_before: str) -> str:
    """Format the dated report as Markdown."""
    lines = [
        f"# Probed against imposed links, {datetime.now(UTC).date().isoformat()}",
        "",
        describe_environment(load_before, ("planner", "numpy", "torch")),
        "",
        f"Regenerate with `python -m benchmarks.probe_accuracy --seed {seed}`, as root. "
        f"{DEVICES} devices of each "
        "network, each a network namespace, under "
        + ", ".join(f"{name} with rates / {by:g}" for name, by in NETWORKS.items())
        + ". Found over imposed, less 1; within: part of all that is off by 5% at most.",
        "",
        "| network | what | how many | median | least | most | within 5% |",
        f"|{'---|' * 7}",
        *(row.line() for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str]) -> int:
    """Probe all networks and write the report."""
    parser = OneLineParser(prog="python -m benchmarks.probe_accuracy", description=__doc__)
    parser.add_argument("--out", type=Path, default=report_path("probe-accuracy"))
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    load_before = f"{os.getloadavg()[0]:.1f}"
    rows: list[Off] = []
    for name in args.networks:
        cluster = time_scale(name, NETWORKS[name], DEVICES, args.seed)
        rows += compared(name, cluster, probed(cluster))
        print("\n".join(row.line() for row in rows[-4:]), flush=True)
    write_text(args.out, report(rows, args.seed, load_before))
    print(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    run(main)
