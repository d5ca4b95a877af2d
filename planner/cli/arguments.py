"""Command-line options shared by several commands, and the objects built from them."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from planner.cli.output import say
from planner.cli.partial_output import IncumbentFile
from planner.cli.progress import PROGRESS
from planner.cli.time_budget import TimeLeft
from planner.network.catalogue import intra_link, load_network, measured_inside
from planner.network.cluster import Cluster, Devices
from planner.network.devices_file import (
    describes_all,
    load_devices,
    replicated,
    require_gpus,
    states_all,
)
from planner.network.dtype import Dtype
from planner.network.error import NetworkError
from planner.network.gpus import DEFAULT_GPU, GPUS, find_gpu, unknown_gpu
from planner.network.link import Link
from planner.network.network import Network
from planner.network.prices import BETWEEN_REGIONS, Prices
from planner.search.compiled import compiled_ahead
from planner.search.interrupts import INTERRUPTS
from planner.search.stop import (
    AnyOf,
    Deadline,
    DelegatingCriterion,
    Effort,
    MaxRuntime,
    SearchRun,
    StoppingCriterion,
)
from planner.search.worker_pool import available_cores
from planner.utils.text import joined
from planner.utils.validate import real
from planner.workload.hf_config import DEFAULT_SEQUENCE
from planner.workload.presets import PRESETS
from planner.workload.workload import Workload

EFFORT = 5.0
"""Default of ``--effort``, in core-seconds of counted work."""


class Arguments(Protocol):
    """Anything with ``add_argument``: an argument parser or a group of it."""

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an argument, as `argparse.ArgumentParser.add_argument` does."""
        ...


class Grouped:
    """Distribute arguments over titled groups of the help text.

    An argument that no group lists is added to the last group.

    Parameters
    ----------
    sub
        Parser of the command.
    groups
        Option names of each group, by the group's title.
    """

    def __init__(self, sub: argparse.ArgumentParser, groups: Mapping[str, Sequence[str]]) -> None:
        self._group_of: dict[str, Arguments] = {}
        for title, options in groups.items():
            self._last = sub.add_argument_group(title)
            self._group_of |= dict.fromkeys(options, self._last)

    def add_argument(self, *names: str, **options: Any) -> argparse.Action:
        """Add an argument to its group; same parameters as `argparse`."""
        return self._group_of.get(names[0], self._last).add_argument(*names, **options)


def add_cluster(sub: Arguments, required: bool = True) -> None:
    """Add ``--network`` and the options that describe its devices."""
    add_network(sub, required)
    add_gpu(sub)


def add_network(sub: Arguments, required: bool = True) -> None:
    """Add ``--network`` and the options for its devices and the links between them."""
    sub.add_argument(
        "--network",
        required=required,
        metavar="NAME|FILE",
        help="name listed by planner networks, or a .csv, .json or .jsonl file",
    )
    sub.add_argument(
        "--devices",
        type=Path,
        metavar="CSV",
        help="CSV with GPU, count, memory, site, shared bandwidth and price of each device",
    )
    sub.add_argument(
        "--devices-per-region",
        type=positive,
        metavar="N",
        help="devices in every region; default: one per network entry",
    )
    sub.add_argument(
        "--intra-latency-ms",
        type=float,
        metavar="MS",
        help="one-way latency within a region; default: the network's",
    )
    sub.add_argument(
        "--intra-bandwidth-gbps",
        type=float,
        metavar="GBPS",
        help="bandwidth within a region in Gbit/s; default: the network's",
    )
    sub.add_argument(
        "--complete", action="store_true", help="leave out devices with unmeasured pairs"
    )


def add_gpu(sub: Arguments) -> None:
    """Add the options for what devices compute, hold and cost."""
    sub.add_argument(
        "--gpu",
        type=gpu,
        metavar="GPU",
        help=f"GPU of devices without one in --devices: {', '.join(GPUS)}; default {DEFAULT_GPU}",
    )
    sub.add_argument(
        "--utilization",
        type=float,
        default=0.4,
        metavar="FRACTION",
        help="fraction of peak FLOP/s that training attains, 0 to 1; default %(default)s",
    )
    sub.add_argument(
        "--memory-gb",
        type=float,
        metavar="GB",
        help="memory of devices without one in --devices, in 10^9 bytes; default: the GPU's",
    )
    sub.add_argument(
        "--usd-per-hour",
        type=float,
        metavar="USD",
        help="price per hour of devices without one in --devices; default: the GPU's on AWS",
    )


def add_prices(sub: Arguments) -> None:
    """Add the options for the price of network traffic."""
    sub.add_argument(
        "--usd-per-gb",
        type=float,
        metavar="USD",
        help=f"price of traffic between regions of one provider, per GB; default {BETWEEN_REGIONS}",
    )
    sub.add_argument(
        "--prices",
        type=Path,
        metavar="CSV",
        help="CSV of traffic prices with columns from,to,usd_per_gb; * matches any other region",
    )


def prices_of(args: argparse.Namespace) -> Prices:
    """Build the traffic prices from the options of `add_prices`."""
    overrides: dict[str, Any] = {}
    if args.usd_per_gb is not None:
        overrides["between_regions"] = real("--usd-per-gb", args.usd_per_gb, 0)
    if args.prices is None:
        return Prices(**overrides)
    return Prices.load(args.prices, regions=load_network(args.network).regions, **overrides)


def require_prices(args: argparse.Namespace, cluster: Cluster) -> None:
    """Reject traffic prices if devices have no price: a step's cost could not be computed."""
    if cluster.devices.usd_per_hour is not None:
        return
    for option, value in (("--usd-per-gb", args.usd_per_gb), ("--prices", args.prices)):
        if value is not None:
            raise ValueError(
                f"{option} {value}: needs device prices too; give --usd-per-hour or usd_per_hour "
                "in the devices file"
            )


def add_workload(sub: Arguments, required: bool = True) -> None:
    """Add ``--workload`` and the options that override its fields."""
    sub.add_argument(
        "--workload",
        required=required,
        metavar="NAME|FILE",
        help=f"Hugging Face config.json, or one of {', '.join(PRESETS)}",
    )
    sub.add_argument(
        "--batch-samples",
        type=int,
        metavar="SAMPLES",
        help="samples per optimizer step; default: the workload's",
    )
    sub.add_argument(
        "--microbatch-samples",
        type=int,
        metavar="SAMPLES",
        help="samples per microbatch; default: the workload's, or more where a plan with more is "
        "faster",
    )
    sub.add_argument(
        "--sequence",
        type=int,
        metavar="TOKENS",
        help="tokens per sample; default: the workload's, for a config.json at most "
        f"{DEFAULT_SEQUENCE:,}",
    )
    sub.add_argument(
        "--precision",
        choices=[dtype.value for dtype in Dtype],
        help="format of matrix products and of activations; default bf16, or fp16 if a GPU has no "
        "bf16; fp16 trains with dynamic loss scaling",
    )


def add_solver(sub: Arguments, methods: Sequence[str]) -> None:
    """Add search limits, the random seed and the choice of solver."""
    add_limits(sub)
    sub.add_argument(
        "--seed",
        type=count,
        default=0,
        metavar="N",
        help="seed of the search; default %(default)s",
    )
    sub.add_argument(
        "--method",
        default="auto",
        metavar="NAME",
        help=f"solver: {', '.join(methods)}; default %(default)s",
    )


def add_limits(sub: Arguments) -> None:
    """Add the limits of a search: ``--effort`` and ``--seconds``."""
    sub.add_argument(
        "--effort",
        type=float,
        metavar="CORE_S",
        help="search effort in counted work, about seconds of one core; the same effort gives the "
        f"same plan; default {EFFORT:g}, or no limit with --seconds",
    )
    sub.add_argument(
        "--seconds",
        type=float,
        metavar="S",
        help="time limit of the whole command; default: no limit",
    )


def add_workers(sub: Arguments) -> None:
    """Add the number of processes of a search."""
    sub.add_argument(
        "--workers",
        type=positive,
        default=available_cores(),
        metavar="N",
        help="processes of the search of all layouts; the same --effort gives the same plan with "
        "any number; default: the cores that the command may use",
    )


def gpu(text: str) -> str:
    """Parse a GPU name or alias into the name used in the GPU table."""
    gpu_type = find_gpu(text)
    if gpu_type is None:
        raise argparse.ArgumentTypeError(unknown_gpu(text))
    return gpu_type


def count(text: str) -> int:
    """Parse a whole number >= 0."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, found {text!r}")
    return int(text)


def positive(text: str) -> int:
    """Parse a whole number >= 1."""
    if count(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, found {text}")
    return int(text)


def seconds(text: str) -> float:
    """Parse a finite number of seconds above 0."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, found {text!r}")
    return value


def sizes(text: str) -> list[int]:
    """Parse comma-separated whole numbers."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"must be whole numbers such as 5,3,3,3, found {text!r}"
        ) from None


def problem_of(args: argparse.Namespace) -> tuple[Cluster, Workload]:
    """Build cluster and workload from the options of `add_cluster` and `add_workload`.

    Without ``--precision``, fp16 if a device has no bf16: all GPUs have fp16, at the same peak.
    """
    workload = workload_of(args)
    cluster = cluster_of(args, workload.precision.compute)
    lacking = cluster.lacks(workload.precision.compute)
    if lacking and args.precision is None and workload.architecture is not None:
        args.precision = Dtype.FP16.value
        workload = workload_of(args)
        why = f"{cluster.describe_lacking(lacking)}, which has no bf16"
        say(f"planner {args.command}: plans for fp16 with dynamic loss scaling: {why}")
    return cluster, workload


def cluster_of(args: argparse.Namespace, dtype: Dtype = Dtype.BF16) -> Cluster:
    """Build the cluster from the options of `add_cluster`, with FLOP/s for ``dtype``."""
    _require_quantities(args)
    network = load_network(args.network)
    dropped: list[str] = []
    if args.complete:
        all_ids, network = network.ids, network.complete()
        dropped = [name for name in all_ids if name not in network.ids]
        if dropped:
            why = "left out, since some of their pairs were not measured"
            say(f"planner {args.command}: {why}: {joined(dropped)}")
    devices = usual_devices(args, dtype)
    stated = measured_inside(args.network)
    inside = _inside(args, network, stated)
    names = ("intra_latency_ms", "intra_bandwidth_gbps")
    options = [name for name in names if getattr(args, name) is not None]
    if options and args.devices_per_region is None and args.devices is None:
        raise NetworkError(
            f"--{options[0].replace('_', '-')} {getattr(args, options[0]):g} applies to links "
            "within a region, found one device per region; give --devices-per-region or --devices, "
            "or leave it out"
        )
    if args.devices_per_region is not None:
        if unknown := [name for name in network.ids if name not in inside]:
            row = f"a row {unknown[0]},{unknown[0]},... in the file, or "
            raise NetworkError(
                f"network {args.network!r} does not describe links within {joined(unknown)}; give "
                f"{row * Path(args.network).is_file()}--intra-latency-ms and "
                "--intra-bandwidth-gbps"
            )
        counts = dict.fromkeys(network.ids, args.devices_per_region)
        network = replicated(network, counts, inside)
    elif args.devices is None and stated:
        say(
            f"planner {args.command}: the link within {joined(list(stated))} is not used: there is "
            "one device at a place; give --devices-per-region, or count in a devices file"
        )
    cluster = Cluster(network, devices)
    if args.devices is not None:
        if args.gpu is not None and describes_all(args.devices):
            raise ValueError(
                f"--gpu {args.gpu} is not used: {args.devices} describes every device; leave it out"
            )
        for column in ("memory_gb", "usd_per_hour"):
            value = getattr(args, column)
            if value is not None and states_all(args.devices, column):
                raise ValueError(
                    f"--{column.replace('_', '-')} {value:g} is not used: {args.devices} states "
                    f"{column} of every device; leave it out"
                )
        cluster = load_devices(
            args.devices,
            network,
            default=devices,
            utilization=args.utilization,
            inside=inside,
            dtype=dtype,
            memory_bytes=None if args.memory_gb is None else args.memory_gb * 1e9,
            usd_per_hour=args.usd_per_hour,
            without=dropped,
        )
        if args.gpu is None:
            require_gpus(args.devices, dropped)
        listed = {*cluster.network.ids, *cluster.network.regions}
        if unlisted := [name for name in network.ids if name not in listed]:
            why = f"left out, since {args.devices} has no row for them"
            say(f"planner {args.command}: {why}: {joined(unlisted)}")
    if missing := cluster.network.describe_missing():
        remedy = "measure them"
        if Path(args.network).is_file():
            remedy = cluster.network.missing_remedy(args.network)
        raise NetworkError(
            f"{args.network}: {missing}; {remedy}, or leave devices out with --complete"
        )
    return cluster


def usual_devices(args: argparse.Namespace, dtype: Dtype) -> Devices:
    """Build the device that is assumed where a devices file does not describe one."""
    devices = Devices.of_gpu(args.gpu or DEFAULT_GPU, args.utilization, dtype)
    if args.memory_gb is not None:
        devices = replace(devices, memory_bytes=args.memory_gb * 1e9)
    if args.usd_per_hour is not None:
        devices = replace(devices, usd_per_hour=args.usd_per_hour)
    return devices


def _require_quantities(args: argparse.Namespace) -> None:
    """Validate quantities in the unit of the option, before they are converted."""
    for name, may_be_0 in (
        ("memory_gb", False),
        ("usd_per_hour", True),
        ("intra_latency_ms", True),
        ("intra_bandwidth_gbps", False),
    ):
        value = getattr(args, name)
        if value is None:
            continue
        real(f"--{name.replace('_', '-')}", value, 0, above=not may_be_0)


def _inside(
    args: argparse.Namespace, network: Network, measured: Mapping[str, Link]
) -> dict[str, Link]:
    """Return the links between devices of one region, where they are known.

    As measured in the network file, else from the options, else as a shipped network has it.
    """
    latency, bandwidth = intra_link(args.network) or (math.nan, math.nan)
    if args.intra_latency_ms is not None:
        latency = args.intra_latency_ms * 1e-3
    if args.intra_bandwidth_gbps is not None:
        bandwidth = args.intra_bandwidth_gbps * 1e9 / 8
    links = dict.fromkeys(network.ids, Link(latency, bandwidth))
    stated = {name: link for name, link in measured.items() if name in links}
    options = args.intra_latency_ms, args.intra_bandwidth_gbps
    if stated and options != (None, None):
        say(
            f"planner {args.command}: the network file has the link within {joined(list(stated))}: "
            "--intra-latency-ms and --intra-bandwidth-gbps count for other places"
        )
    links |= stated
    return {name: link for name, link in links.items() if not any(map(math.isnan, link))}


def workload_of(args: argparse.Namespace) -> Workload:
    """Build the workload from the options of `add_workload`."""
    changes = {
        name: getattr(args, name)
        for name in (
            "batch_samples",
            "microbatch_samples",
            "sequence",
            "precision",
        )
    }
    if args.sequence is not None and args.sequence < 1:
        raise ValueError(f"--sequence is {args.sequence}; give tokens per sample, at least 1")
    if Path(args.workload).is_dir():
        raise ValueError(
            f"{args.workload}: is a folder; give {Path(args.workload) / 'config.json'}"
        )
    if Path(args.workload).suffix.lower() == ".json":
        return Workload.from_hf_config(args.workload, **changes)
    return Workload.preset(args.workload, **changes)


@dataclass(frozen=True)
class Reporting(DelegatingCriterion):
    """Stopping criterion that also shows progress and saves the incumbent to a file."""

    incumbent_file: IncumbentFile | None = None

    def found(self, objective: float, plan: Any) -> None:
        INTERRUPTS.has_plan = True
        if self.incumbent_file is not None:
            self.incumbent_file.offer(objective, plan)

    def reason(self, run: SearchRun) -> str | None:
        if self.incumbent_file is not None:
            self.incumbent_file.write_if_due()
        if run.objective is not None:
            bound = "" if run.bound is None else f", bound {run.bound:.4f}"
            PROGRESS.show(f"searching: best {run.objective:.4f}{bound}")
        return super().reason(run)


def stop_of(
    args: argparse.Namespace,
    seconds: float | None = None,
    incumbent_file: IncumbentFile | None = None,
) -> StoppingCriterion:
    """Build the stopping criterion from the options of `add_limits`.

    Parameters
    ----------
    args
        Parsed arguments.
    seconds
        Time limit of the search; by default the time left of ``--seconds``.
    incumbent_file
        File that receives the best plan so far.

    Returns
    -------
    StoppingCriterion
        Stops at the time limit or the effort limit, whichever comes first, and shows progress.
    """
    rules: list[StoppingCriterion] = []
    if args.seconds is not None:
        if not args.seconds > 0:
            raise ValueError(f"--seconds is {args.seconds:g}; give more than 0")
        MaxRuntime(args.seconds)  # validates the value
        limit_s = TimeLeft(args.seconds, args.began).left_s if seconds is None else seconds
        rules.append(Deadline(time.perf_counter() + (limit_s or 0.0)))
    if args.effort is not None or args.seconds is None:
        rules.append(Effort(EFFORT if args.effort is None else args.effort))
    compiles = "" if compiled_ahead() else ": compiling for the first time, about a minute"
    PROGRESS.start(f"preparing{compiles}")
    return Reporting(rules[0] if len(rules) == 1 else AnyOf(*rules), incumbent_file)
