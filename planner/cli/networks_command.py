"""``planner networks``: list bundled networks, or build one from measurements."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from planner.cli.output import all_wrapped, show, wrapped
from planner.network.catalogue import list_networks, load_network
from planner.network.formats import ASSUMED_COLUMN, FORMAT, HEADER, UNITS, write
from planner.network.measured.reading import Measured, load_names, read_measured
from planner.utils.output_files import Output, add_force, has_mark, require_outputs
from planner.utils.validate import real

ABOUT = "list the bundled measured networks, or build a network from your measurements"
EXAMPLE = "planner networks rtt.csv --bandwidth-gbps 1 --out net.csv"
MARKS = (FORMAT, f"{HEADER},{ASSUMED_COLUMN}")
"""Text in a file that this command wrote: the format of JSON, the header of CSV."""
OPTIONS = ("out", "names", "unit", "both_ways", "latency_ms", "bandwidth_gbps")


def add_arguments(sub: argparse.ArgumentParser) -> None:
    """Add measurement files and the options for reading them."""
    sub.add_argument(
        "measured",
        nargs="*",
        type=Path,
        help="measurement files: .csv tables by pair or as a matrix; .json of iperf3, mtr or "
        "cloudping.co; .txt, .log or .out of mtr or of nccl-tests with two ranks; .jsonl of "
        "planner.probe; or folders of these; default: list networks",
    )
    sub.add_argument("--out", type=Path, help="network file to write, .csv or .json")
    sub.add_argument(
        "--names", type=Path, help="CSV with columns address,name that names the measured hosts"
    )
    sub.add_argument(
        "--unit",
        choices=list(UNITS),
        metavar="UNIT",
        help=f"unit of matrices without one in their corner cell: {', '.join(UNITS)}",
    )
    sub.add_argument(
        "--both-ways",
        action="store_true",
        help="use a measurement of one direction for the other if that is missing",
    )
    sub.add_argument("--latency-ms", type=float, help="one-way latency of unmeasured pairs")
    sub.add_argument("--bandwidth-gbps", type=float, help="bandwidth of unmeasured pairs")
    add_force(sub)


def run(args: argparse.Namespace) -> int:
    """List the bundled networks, or build a network from measurement files."""
    if args.measured:
        return _make(args)
    for option in OPTIONS:
        if getattr(args, option) not in (None, False):
            raise ValueError(
                f"--{option.replace('_', '-')} applies to measurements; give measurement files"
            )
    named = list_networks()
    rows = [
        line
        for name, about in named.items()
        for line in wrapped(about, f"{name:<32}{len(load_network(name)):>4}  ", " " * 38)
    ]
    show(args.json, named, [f"{'name':<32}   N  what", *rows])
    return 0


def _make(args: argparse.Namespace) -> int:
    require_outputs(vars(args), [Output("--out", args.out, [".csv", ".json"], MARKS)])
    _require_no_measurement(args.out, args.measured)
    latency, bandwidth = (
        None if value is None else real(option, value, 0) * factor
        for option, value, factor in (
            ("--latency-ms", args.latency_ms, 1e-3),
            ("--bandwidth-gbps", args.bandwidth_gbps, 1e9 / 8),
        )
    )
    result = read_measured(
        args.measured,
        names=None if args.names is None else load_names(args.names),
        unit=args.unit,
        both_ways=args.both_ways,
        latency_s=latency,
        bandwidth_bytes_per_s=bandwidth,
        leave_out=[path for path in (args.names, args.out) if path is not None],
    )
    lines = _lines(result)
    if args.out is not None:
        write(result.network.matrices(), args.out, result.assumed_pairs)
        lines.append(f"wrote {args.out}")
    data = {
        "devices": list(result.network.ids),
        "measured": {"latency": result.latencies, "bandwidth": result.bandwidths},
        "mirrored": result.mirrored,
        "assumed": list(result.assumed),
        "missing": [
            [result.network.ids[k] for k in pair] for pair in result.network.missing_pairs()
        ],
        "written": None if args.out is None else str(args.out),
    }
    show(args.json, data, all_wrapped(lines))
    return 0


def _require_no_measurement(out: Path | None, measured: Sequence[Path]) -> None:
    """Reject an output file inside an input folder, unless this command wrote it before."""
    if out is None or has_mark(out, (FORMAT, HEADER)):
        return
    for folder in measured:
        if folder.is_dir() and folder.resolve() in out.resolve().parents:
            raise ValueError(
                f"--out {out}: exists in {folder}, which is an input; name another file, or move "
                "it out of the folder first"
            )


def _lines(result: Measured) -> list[str]:
    n = len(result.network)
    pairs = n * (n - 1)
    lines = [
        f"{n} devices; of {pairs} ordered pairs {result.latencies} latencies and "
        f"{result.bandwidths} "
        "bandwidths were measured"
        + (f", {result.mirrored} taken from the other direction" if result.mirrored else "")
    ]
    lines += [f"assumed: {assumption}" for assumption in result.assumed]
    if missing := result.network.describe_missing():
        pairs_missing = set(result.network.missing_pairs())
        one_way = any((j, i) not in pairs_missing for i, j in pairs_missing)
        remedies = ["measure them"]
        if one_way:
            remedies.append("--both-ways copies them from the other direction")
        remedies += [
            f"{option} assumes a {quantity}"
            for quantity, option, array in (
                ("latency", "--latency-ms", result.network.latency_s),
                ("bandwidth", "--bandwidth-gbps", result.network.bandwidth_bytes_per_s),
            )
            if np.isnan(array).any()
        ]
        lines.append(f"missing: {missing}; {', or '.join(remedies)}")
    return lines
