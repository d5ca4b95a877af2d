"""``planner probe``: convert the log of a link probe to a network and a devices file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from planner.cli.output import show
from planner.network.network import Network
from planner.network.probe_log import ALL, MBIT, LinkFinding, ProbeLog
from planner.utils.atomic_write import write_text
from planner.utils.output_files import Output, add_force, require_outputs

ABOUT = (
    "show what 'torchrun ... -m planner.probe log.jsonl --devices ...' measured, and "
    "write it as a network"
)
EXAMPLE = "planner probe probe.jsonl --out net.csv --devices-out devices.csv"
MAX_LINES = 12


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add the log and the output files."""
    sub.add_argument("log", type=Path, help="log written by rank 0 of planner.probe")
    sub.add_argument("--out", type=Path, help="network file to write (.csv), with spread and dates")
    sub.add_argument(
        "--devices-out",
        type=Path,
        help="devices file to write (.csv), with upload and download rates",
    )
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """Print a summary of the log and write the files."""
    named = (("--out", args.out), ("--devices-out", args.devices_out))
    require_outputs(vars(args), [Output(option, path, [".csv"]) for option, path in named])
    log = ProbeLog.load(args.log)
    network = log.network()
    lines, written = _summary(log, network), []
    for path, text in ((args.out, log.network_csv), (args.devices_out, log.devices_csv)):
        if path is not None:
            write_text(path, text())
            written.append(str(path))
    if written:
        lines.append(f"wrote {', '.join(written)}")
    show(args.json, _data(log, written), lines)
    return 0


def _summary(log: ProbeLog, network: Network) -> list[str]:
    n = len(network)
    links = [finding for finding in log.findings.values() if ALL not in finding.ends]
    missing = n * (n - 1) - len(links)
    lines = [
        f"{n} devices, {len(links)} of {n * (n - 1)} ordered pairs measured since "
        f"{log.about.get('began', 'an unknown day')}" + (f"; {missing} missing" if missing else ""),
        f"{'slowest links':<44}{'latency':>10}{'one flow':>12}{'spread':>10}{'two flows':>12}",
    ]
    links.sort(key=lambda finding: finding.rates[1][0])
    lines += [_link_line(finding) for finding in links[:MAX_LINES]]
    ends = [
        (name, log.findings.get((name, ALL)), log.findings.get((ALL, name))) for name in log.names
    ]
    lines += [f"{'devices in total':<44}{'upload':>10}{'download':>12}"]
    lines += [f"{name:<44}{_mbit(up):>10}{_mbit(down):>12}" for name, up, down in ends[:MAX_LINES]]
    lines.append(
        "rates in Mb/s; latency: half the median round trip; spread: (highest - lowest) / mean"
    )
    return lines


def _link_line(finding: LinkFinding) -> str:
    mean, low, high = finding.rates[1]
    trips, two = finding.round_trips_s, finding.rates.get(2)
    latency = "" if trips is None else f"{trips[1] / 2 * 1e3:.2f} ms"
    two_flows = "" if two is None else f"{two[0] / MBIT:.1f}"
    return (
        f"{f'{finding.source} to {finding.destination}':<44}{latency:>10}{mean / MBIT:>12.1f}"
        f"{(high - low) / mean:>10.0%}{two_flows:>12}"
    )


def _mbit(finding: LinkFinding | None) -> str:
    return "" if finding is None else f"{finding.rates[1][0] / MBIT:.1f}"


def _data(log: ProbeLog, written: list[str]) -> dict[str, Any]:
    return {
        "about": dict(log.about),
        "findings": [
            {
                "source": finding.source,
                "destination": finding.destination,
                "measured_at": finding.at,
                "latency_s": None
                if finding.round_trips_s is None
                else finding.round_trips_s[1] / 2,
                "bandwidth_bytes_per_s": {str(k): v[0] for k, v in finding.rates.items()},
                "messages_s": {str(k): v for k, v in finding.messages_s.items()},
            }
            for finding in log.findings.values()
        ],
        "written": written,
    }
