"""The devices file: a CSV with GPU, limits, site and price of every device."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from planner.network.catalogue import load_network, measured_inside
from planner.network.cluster import Cluster, Devices
from planner.network.dtype import Dtype
from planner.network.error import NetworkError
from planner.network.gpu_link_logs import read_gpu_link
from planner.network.gpus import (
    COLLECTIVE_S,
    DEFAULT_GPU,
    GPUS,
    LINK_UTILIZATION,
    find_gpu,
    unknown_gpu,
)
from planner.network.link import Link
from planner.network.network import Network
from planner.network.pair_table import PairTable
from planner.utils.csv_table import CsvRow, CsvTable, number_in, number_remedy, read_csv
from planner.utils.text import did_you_mean, joined
from planner.utils.validate import (
    LARGEST,
    SMALLEST,
    choice,
    in_safe_range,
    instance_of,
    mapping,
)

YES, NO = ("yes", "true", "1"), ("no", "false", "0")


@dataclass(frozen=True)
class DeviceRow:
    """One row of the file in SI units; None where a cell is empty.

    Attributes
    ----------
    name
        A device of the network, or a region, for all devices in it; empty if only a site is
        described.
    count
        Number of such devices, where the network has one device for all.
    flops
        FLOP/s attained in training.
    peak_flops
        The data sheet's FLOP/s, the basis of MFU.
    memory_bytes
        Memory of each device.
    upload_bytes_per_s, download_bytes_per_s
        Limits on the sum over a device's peers.
    site
        Site of the devices, which share its line, or of their machine.
    site_upload_bytes_per_s, site_download_bytes_per_s
        Limits on what leaves and enters the site, or the machine if there is no site.
    within
        Site in which that site or machine lies.
    can_compute, can_aggregate
        Whether a device can hold a stage, and whether it can reduce gradients.
    usd_per_hour
        Price of each device.
    interface
        Network interface on which its rank listens.
    gpu_usd_per_hour
        Price of its GPU, if one is named and has a known price.
    gpu
        Name in the table of GPUs.
    machine
        Machine whose GPUs the devices are.
    gpu_link_bytes_per_s, gpu_link_latency_s
        Link of a GPU to the others of its machine.
    gpu_link_log
        File with a measurement of that link.
    """

    name: str
    count: int | None = None
    flops: float | None = None
    peak_flops: float | None = None
    memory_bytes: float | None = None
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    site: str | None = None
    site_upload_bytes_per_s: float | None = None
    site_download_bytes_per_s: float | None = None
    within: str | None = None
    can_compute: bool | None = None
    can_aggregate: bool | None = None
    usd_per_hour: float | None = None
    interface: str | None = None
    gpu_usd_per_hour: float | None = None
    gpu: str | None = None
    machine: str | None = None
    gpu_link_bytes_per_s: float | None = None
    gpu_link_latency_s: float | None = None
    gpu_link_log: str | None = None
    line: int = 0

    @property
    def line_name(self) -> str | None:
        """The site, or the machine, to whose line limits apply; None for lines of their own."""
        return self.site or self.machine


def describes_all(path: str | Path) -> bool:
    """Whether the GPU of every device that computes is named, or its FLOP/s and memory are."""
    return states_all(path, "gpu", "tflops") and states_all(path, "gpu", "memory_gb")


def assumes_flops(path: str | Path) -> bool:
    """Whether the FLOP/s of a device are those of its named GPU."""
    return any(
        row.get("name") and row.get("gpu") and not row.get("tflops")
        for _, row in read_csv(path, error=NetworkError).rows
    )


def require_gpus(path: str | Path, without: Collection[str] = ()) -> None:
    """Refuse a device that computes without GPU or FLOP/s, where others name their GPU.

    A default GPU is for files that name none; in others it would be taken for what is there.
    """
    rows = read_csv(path, error=NetworkError).rows
    rows = tuple(row for row in rows if row.cells.get("name") not in without)
    lacking = _lacking(rows, "gpu", "tflops")
    if lacking and any(row.cells.get("name") and row.cells.get("gpu") for row in rows):
        line, row = lacking[0]
        raise NetworkError(
            f"{path}: line {line}: device {row['name']!r} has no gpu, and others have one; name "
            "it, give tflops and memory_gb, or can_compute no, or a default with --gpu"
        )


def states_all(path: str | Path, *columns: str) -> bool:
    """Whether one of some columns is filled for every device that computes."""
    return not _lacking(read_csv(path, error=NetworkError).rows, *columns)


def _lacking(rows: Sequence[CsvRow], *columns: str) -> list[CsvRow]:
    """Rows of devices that compute, with none of some columns filled."""
    return [
        row
        for row in rows
        if row.cells.get("name")
        and not any(row.cells.get(column) for column in columns)
        and row.cells.get("can_compute", "").lower() not in NO
    ]


def load_devices(
    path: str | Path,
    network: Network | str | Path,
    *,
    default: Devices | None = None,
    utilization: float = 0.4,
    inside: Link | Mapping[str, Link] | None = None,
    dtype: str = Dtype.BF16,
    memory_bytes: float | None = None,
    usd_per_hour: float | None = None,
    without: Collection[str] = (),
) -> Cluster:
    """Load the devices that a file names, as a cluster on their part of a network.

    Parameters
    ----------
    path
        CSV with a header. ``name`` is required. All other columns and values are optional: ``gpu``
        (of `planner.GPUS`), ``count``, ``memory_gb`` (10^9 bytes), ``tflops`` (10^12 FLOP/s
        attained in training in ``dtype``), ``peak_tflops`` (of the data sheet, the basis of MFU),
        ``upload_mbps``, ``download_mbps``, ``site``, ``site_upload_mbps``, ``site_download_mbps``,
        ``within`` (site in which the site lies), ``can_compute``, ``can_aggregate`` (yes or no),
        ``usd_per_hour``, ``interface`` (network interface on which the rank listens), ``machine``
        (whose GPUs the devices are), ``gpu_link_gbps`` and ``gpu_link_us`` (bandwidth that
        collectives attain between its GPUs, and latency of a collective; by default of the GPU's
        model), ``gpu_link_log`` (a file, seen from the CSV's folder, to read them from: see
        `planner.network.gpu_link_logs`). A row without a name describes only its site.
    network
        Measured between the named devices; unnamed devices are left out. Of the name or path of a
        network (see `load_network`), links within places are read, too.
    default
        GPU of devices whose row states none; by default `planner.network.gpus.DEFAULT_GPU`, if no
        row names a GPU.
    utilization
        Fraction of a GPU's peak attained in training.
    inside
        The link between devices of one row, required where ``count`` is above 1 unless it was read
        with the network; or links by name.
    dtype
        Format of compute, which selects a GPU's peak.
    memory_bytes, usd_per_hour
        Memory and price of devices whose row states none; None for their GPU's, if known.
    without
        Names whose rows are left out, such as those that `Network.complete` has dropped.

    Returns
    -------
    Cluster
        Devices in the file's order; those of a region in the network's.

    Raises
    ------
    NetworkError
        One line with the path, the row and what is wrong.
    """
    if isinstance(network, (str, Path)):
        inside = measured_inside(str(network)) if inside is None else inside
        network = load_network(network)
    instance_of(Network, network, "network")
    if isinstance(inside, Link):
        inside = dict.fromkeys(network.ids, inside)
    for name, link in mapping("inside", inside or {}, error=NetworkError).items():
        instance_of(Link, link, f"inside of {name!r}")
    table = read_csv(path, error=NetworkError)
    try:
        rows = list(_rows(table, utilization, choice(Dtype, "dtype", dtype), memory_bytes))
        rows = [row for row in rows if row.name not in without]
        assumes_gpu = default is None
        default = default or Devices.of_gpu(DEFAULT_GPU, utilization, dtype)
        cluster = _cluster(rows, network, default, inside or {}, usd_per_hour, Path(path).parent)
    except ValueError as error:
        raise NetworkError(f"{path}: {error}") from None
    if assumes_gpu:
        require_gpus(path, without)
    return cluster


def _rows(
    table: CsvTable, utilization: float, dtype: Dtype, memory_bytes: float | None
) -> Iterator[DeviceRow]:
    unknown = [c for c in table.columns if c not in _COLUMNS]
    if "name" not in table.columns or unknown:
        reason = "column 'name' is missing"
        if unknown:
            reason = f"column {unknown[0]!r} is unknown{did_you_mean(unknown[0], _COLUMNS)}"
        raise NetworkError(f"{reason}; columns are {', '.join(_COLUMNS)}")
    names_seen: set[str] = set()
    for line, cells in table.rows:
        row = dict(cells)
        fields: dict[str, Any] = {"line": line}
        gpu = row.pop("gpu", "")
        if gpu:
            gpu_name = find_gpu(gpu)
            if gpu_name is None:
                raise NetworkError(f"line {line}: gpu {unknown_gpu(gpu)}")
            fields["peak_flops"] = GPUS[gpu_name].peak(dtype)
            fields["flops"] = fields["peak_flops"] * utilization
            fields["memory_bytes"] = GPUS[gpu_name].memory_bytes
            fields["gpu_usd_per_hour"] = GPUS[gpu_name].usd_per_hour
            fields["gpu"] = gpu_name
        if memory_bytes is not None:
            fields["memory_bytes"] = memory_bytes
        for column, value in row.items():
            if value:
                field, read = _COLUMNS[column]
                fields[field] = read(value, column, line)
        _check_peak(fields, bool(row.get("peak_tflops")), line)
        name = fields.setdefault("name", "")
        if name in names_seen:
            raise NetworkError(
                f"line {line}: {name!r} is listed twice; give each device or region one row"
            )
        if name:
            names_seen.add(name)
        else:
            _require_site_alone(cells, line)
        yield DeviceRow(**fields)
    if not names_seen:
        raise NetworkError("no rows; give one per device or region")


def _require_site_alone(row: Mapping[str, str], line: int) -> None:
    """Require that a row without a name describes a site, and nothing else."""
    others = [column for column, value in row.items() if value and column not in OF_SITES]
    if others or not row.get("site"):
        found = f"but {others[0]}" if others else "and no site"
        raise NetworkError(
            f"line {line}: name is empty, {found}; give each device or region one row, or name "
            "only a site with what is known of it"
        )


def _check_peak(fields: dict[str, Any], stated: bool, line: int) -> None:
    """Require that FLOP/s do not exceed the peak."""
    flops, peak = fields.get("flops", 0.0) / 1e12, fields.get("peak_flops", math.inf) / 1e12
    if flops <= peak:
        return
    if stated:
        raise NetworkError(
            f"line {line}: peak_tflops is {peak:g}, less than the {flops:g} that training attains; "
            "correct one"
        )
    gpu = fields["gpu"]
    peak = GPUS[gpu].peak_flops / 1e12
    if flops <= peak:  # attained in another format
        del fields["peak_flops"]
        return
    raise NetworkError(
        f"line {line}: tflops is {flops:g}, more than the peak of {peak:g} of {gpu}; "
        "correct it, or give peak_tflops"
    )


def _number(
    factor: float, integer: bool = False, most: float = math.inf, least: str = "> 0"
) -> Callable[[str, str, int], float | int]:
    def read(value: str, column: str, line: int) -> float | int:
        number = number_in(value)
        if integer and not value.isdecimal():
            number = math.nan
        if not number > 0:
            kind = "a whole number" if integer else "a number"
            remedy = number_remedy(value, f"give {kind} {least}, or nothing")
            raise NetworkError(f"line {line}: {column} is {value!r}; {remedy}")
        if number > most:
            raise NetworkError(
                f"line {line}: {column} is {value!r}, but no device has more than {most:,.0f}; "
                "mind the unit in the column's name"
            )
        if not in_safe_range(number * factor):
            raise NetworkError(
                f"line {line}: {column} is {value!r}; in SI units it must be {SMALLEST:g} to "
                f"{LARGEST:g}"
            )
        return int(value) if integer else number * factor

    return read


def _price(value: str, column: str, line: int) -> float:
    return 0.0 if number_in(value) == 0 else float(_number(1.0, least=">= 0")(value, column, line))


def _text(value: str, _: str, __: int) -> str:
    return value


def _flag(value: str, column: str, line: int) -> bool:
    if value.lower() not in (*YES, *NO):
        raise NetworkError(f"line {line}: {column} is {value!r}; give yes or no")
    return value.lower() in YES


MBIT = 1e6 / 8
MOST_GB, MOST_TFLOPS = 1e5, 1e5
"""Larger numbers are in other units: bytes or MB, FLOP/s or GFLOP/s."""
_MBPS = _number(MBIT)
OF_SITES = {"site", "site_upload_mbps", "site_download_mbps", "within"}
"""Columns of rows without a device."""
_COLUMNS: dict[str, tuple[str, Callable[[str, str, int], Any]]] = {
    "name": ("name", _text),
    "gpu": ("gpu", _text),
    "count": ("count", _number(1, integer=True)),
    "memory_gb": ("memory_bytes", _number(1e9, most=MOST_GB)),
    "tflops": ("flops", _number(1e12, most=MOST_TFLOPS)),
    "peak_tflops": ("peak_flops", _number(1e12, most=MOST_TFLOPS)),
    "upload_mbps": ("upload_bytes_per_s", _MBPS),
    "download_mbps": ("download_bytes_per_s", _MBPS),
    "site": ("site", _text),
    "site_upload_mbps": ("site_upload_bytes_per_s", _MBPS),
    "site_download_mbps": ("site_download_bytes_per_s", _MBPS),
    "within": ("within", _text),
    "can_compute": ("can_compute", _flag),
    "can_aggregate": ("can_aggregate", _flag),
    "usd_per_hour": ("usd_per_hour", _price),
    "interface": ("interface", _text),
    "machine": ("machine", _text),
    "gpu_link_gbps": ("gpu_link_bytes_per_s", _number(1e9 / 8)),
    "gpu_link_us": ("gpu_link_latency_s", _number(1e-6)),
    "gpu_link_log": ("gpu_link_log", _text),
}


def _cluster(
    rows: list[DeviceRow],
    network: Network,
    default: Devices,
    inside: Mapping[str, Link],
    usd_per_hour: float | None,
    folder: Path,
) -> Cluster:
    row_of: dict[str, DeviceRow] = {}
    of_sites = [row for row in rows if not row.name]
    for row in rows:
        for name in _places(row, network):
            if name in row_of:
                raise NetworkError(
                    f"line {row.line}: device {name!r} has a row in line {row_of[name].line} "
                    "already; give it one"
                )
            row_of[name] = row
    row_of = {name: row_of[name] for name in network.ids if name in row_of}
    counts = {name: row.count if row.name == name else None for name, row in row_of.items()}
    rows = [row for name, row in row_of.items() for _ in range(counts[name] or 1)]
    link_of = {row.line: _gpu_link(row, default, folder) for row in rows}
    links = [link_of[row.line] for row in rows]
    if all(count in (None, 1) for count in counts.values()):
        network = network.subset(list(row_of))
    else:
        network = _replicated(network, row_of, counts, inside)
    network = _with_gpu_links(network, rows, links)
    return Cluster(network, _devices(rows, of_sites, network, default, usd_per_hour, links))


def _replicated(
    network: Network,
    row_of: dict[str, DeviceRow],
    counts: dict[str, int | None],
    inside: Mapping[str, Link],
) -> Network:
    """The network with several devices at a place."""
    several = [name for name, count in counts.items() if (count or 1) > 1]
    unknown = [name for name in several if name not in inside and not row_of[name].machine]
    if unknown:
        raise NetworkError(
            f"count is given and the link between devices of {joined(unknown)} is unknown; give "
            f"its latency and bandwidth in a row {unknown[0]},{unknown[0]},... of the network "
            "file or with --intra-latency-ms and --intra-bandwidth-gbps (in Python, name that file "
            "as the network, or give inside), or name the machine whose GPUs they are"
        )
    # GPUs of a machine get their own links
    links = {name: inside.get(name, Link(0.0, 1.0)) for name in counts}
    return replicated(network, {name: count or 1 for name, count in counts.items()}, links)


def replicated(network: Network, counts: Mapping[str, int], inside: Mapping[str, Link]) -> Network:
    """`Network.replicate` with the links within places."""
    return network.replicate(
        counts,
        intra_latency_s={name: link.latency_s for name, link in inside.items()},
        intra_bandwidth_bytes_per_s={
            name: link.bandwidth_bytes_per_s for name, link in inside.items()
        },
    )


def _gpu_link(row: DeviceRow, default: Devices, folder: Path) -> Link | None:
    """The link of a row's GPUs within their machine: stated, measured or of the model."""
    stated = {
        "gpu_link_gbps": row.gpu_link_bytes_per_s,
        "gpu_link_us": row.gpu_link_latency_s,
        "gpu_link_log": row.gpu_link_log,
    }
    if row.machine is None:
        for column, value in stated.items():
            if value is not None:
                raise NetworkError(
                    f"line {row.line}: {row.name!r} has {column}, the link to other GPUs of its "
                    "machine, but no machine; name the machine"
                )
        return None
    bandwidth, latency = row.gpu_link_bytes_per_s, row.gpu_link_latency_s
    gpu = row.gpu or (default.gpus if row.flops is None else None)
    if row.gpu_link_log is not None:
        measured = read_gpu_link(folder / row.gpu_link_log, gpu if isinstance(gpu, str) else None)
        bandwidth = bandwidth or measured.bandwidth_bytes_per_s
        latency = measured.latency_s if latency is None else latency
    if bandwidth is None and isinstance(gpu, str):
        bandwidth = LINK_UTILIZATION * GPUS[gpu].link_bytes_per_s
    if bandwidth is None:
        raise NetworkError(
            f"line {row.line}: {row.name!r} names a machine, and no GPU whose link is known; give "
            "gpu, or gpu_link_gbps"
        )
    return Link(COLLECTIVE_S if latency is None else latency, bandwidth)


def _with_gpu_links(
    network: Network, rows: Sequence[DeviceRow], links: Sequence[Link | None]
) -> Network:
    """The network in which GPUs of one machine are connected by their links."""
    if not any(links):
        return network
    names, machine = np.unique([row.machine or "" for row in rows], return_inverse=True)
    latency, bandwidth = (
        np.array([0.0 if link is None else getattr(link, name) for link in links])
        for name in ("latency_s", "bandwidth_bytes_per_s")
    )
    away, rate = network.tables_by(machine, latency, bandwidth)
    machine, latency, bandwidth = machine[away.first], latency[away.first], bandwidth[away.first]
    inside = (machine[:, None] == machine[None, :]) & (names[machine] != "")[:, None]
    away_s = np.where(inside, np.maximum.outer(latency, latency), away.values)
    bytes_per_s = np.where(inside, np.minimum.outer(bandwidth, bandwidth), rate.values)
    return Network.of_valid(
        PairTable(away_s, away.class_of, away.own),
        PairTable(bytes_per_s, rate.class_of, rate.own),
        network.ids,
        network.regions,
    )


def _places(row: DeviceRow, network: Network) -> list[str]:
    """The network's devices that a row names."""
    if not row.name:
        return []
    if row.name in network.ids:
        return [row.name]
    ids = [i for i, r in zip(network.ids, network.regions, strict=True) if r == row.name]
    if not ids:
        hint = did_you_mean(row.name, [*network.ids, *network.regions])
        raise NetworkError(
            f"line {row.line}: {row.name!r} is no device and no region of the network{hint}; name "
            "one of " + ", ".join(network.ids[:8]) + (", ..." if len(network) > 8 else "")
        )
    if row.count not in (None, len(ids)):
        raise NetworkError(
            f"line {row.line}: count of {row.name!r} is {row.count}, the network has {len(ids)} "
            "devices there; leave count out"
        )
    return ids


def _devices(
    rows: list[DeviceRow],
    of_sites: list[DeviceRow],
    network: Network,
    default: Devices,
    usd_per_hour: float | None,
    links: Sequence[Link | None],
) -> Devices:
    full = default.broadcast(len(rows))
    fastest = network.fastest_bytes_per_s if len(rows) > 1 else np.zeros((2, 1))
    rates = network.bandwidth_table

    def column(field: str, otherwise: Any) -> list[Any]:
        return [
            fallback if (value := getattr(row, field)) is None else value
            for row, fallback in zip(rows, np.asarray(otherwise).tolist(), strict=True)
        ]

    def limit(field: str, fastest: Any) -> list[Any] | None:
        """Where others have a limit, a device without one is held by its fastest pair."""
        stated = getattr(full, field)
        if stated is None and all(getattr(row, field) is None for row in rows):
            return None
        return column(field, fastest if stated is None else stated)

    lines = (*rows, *of_sites)
    named = {name for row in lines for name in (row.machine, row.site, row.within) if name}
    sites = []
    for d, row in enumerate(rows):
        alone = f"device {d}"
        while alone in named:
            alone += "'"
        sites.append(row.machine or row.site or alone)
    within = _within(rows, of_sites)
    gpu_links = [link or Link(0.0, 1.0) for link in links] if any(links) else None
    return Devices(
        column("flops", full.flops),
        column("memory_bytes", full.memory_bytes),
        limit("upload_bytes_per_s", fastest[0]),
        limit("download_bytes_per_s", fastest[1]),
        sites=tuple(sites) if named else None,
        site_upload_bytes_per_s=_of_sites(rows, of_sites, "site_upload_bytes_per_s", rates),
        site_download_bytes_per_s=_of_sites(rows, of_sites, "site_download_bytes_per_s", rates.T),
        site_within=within or None,
        can_compute=[row.can_compute is not False for row in rows],
        can_aggregate=[row.can_aggregate is not False for row in rows],
        usd_per_hour=_prices(rows, full, usd_per_hour),
        interfaces=[row.interface or "" for row in rows],
        peak_flops=_peaks(rows, full),
        gpus=_gpus(rows, full),
        machines=[row.machine or "" for row in rows],
        gpu_link_bytes_per_s=gpu_links and [link.bandwidth_bytes_per_s for link in gpu_links],
        gpu_link_latency_s=gpu_links and [link.latency_s for link in gpu_links],
    )


def _gpus(rows: list[DeviceRow], full: Devices) -> list[str]:
    """As stated, else the default unless the row states its own FLOP/s; empty if unknown."""
    usual = [""] * len(rows) if full.gpus is None else full.gpus
    return [
        row.gpu or ("" if row.flops is not None else name)
        for row, name in zip(rows, usual, strict=True)
    ]


def _peaks(rows: list[DeviceRow], full: Devices) -> list[float] | None:
    """As stated, else of the GPU, else of the default if its FLOP/s apply; for all devices or none.

    Devices that cannot compute take their FLOP/s instead: their peak does not matter.
    """
    usual = [None] * len(rows) if full.peak_flops is None else full.peak_flops
    columns = (np.asarray(usual, dtype=object).tolist(), np.asarray(full.flops).tolist())
    peaks = []
    for row, peak, flops in zip(rows, *columns, strict=True):
        peak_flops = row.peak_flops or (None if row.flops is not None else peak)
        peaks.append(peak_flops or ((row.flops or flops) if row.can_compute is False else None))
    peak_flops = [peak for peak in peaks if peak is not None]
    return peak_flops if len(peak_flops) == len(peaks) else None


def _prices(rows: list[DeviceRow], full: Devices, for_others: float | None) -> list[float] | None:
    """As stated, else of the GPU, else the default; devices that cannot compute are free by
    default.

    Where a GPU has no known price, either all prices are stated or none is.
    """
    usual = [None] * len(rows) if full.usd_per_hour is None else full.usd_per_hour
    prices: list[float | None] = []
    for row, price in zip(rows, np.asarray(usual, dtype=object).tolist(), strict=True):
        if row.usd_per_hour is not None:
            prices.append(row.usd_per_hour)
        elif row.can_compute is False:
            prices.append(0.0)
        elif for_others is not None:
            prices.append(for_others)
        else:
            prices.append(row.gpu_usd_per_hour if row.flops is not None else price)
    if None not in prices:
        return [price for price in prices if price is not None]
    if all(row.usd_per_hour is None for row in rows):
        return None
    unknown = rows[prices.index(None)]
    raise NetworkError(
        f"line {unknown.line}: usd_per_hour of {unknown.name!r} is not stated, and its GPU has no "
        "known price; state it (0 if it costs nothing), or leave all prices out"
    )


def _within(rows: list[DeviceRow], of_sites: list[DeviceRow]) -> dict[str, str]:
    """By machine or site, the site in which it lies."""
    stated: dict[str, tuple[str, int]] = {}
    for row in (*rows, *of_sites):
        if row.within is not None and row.line_name is None:
            raise NetworkError(
                f"line {row.line}: {row.name!r} has within, where its site lies, but no site; name "
                "the site"
            )
        nested = [(row.line_name, row.within)]
        if row.machine is not None and row.site not in (None, row.machine):
            nested.append((row.machine, row.site))
        for inner, outer in nested:
            if inner is None or outer is None:
                continue
            first, line = stated.setdefault(inner, (outer, row.line))
            if first != outer:
                raise NetworkError(
                    f"line {row.line}: {inner!r} lies in {outer!r}, in line {line} in {first!r}; "
                    "give one"
                )
    within = {inner: outer for inner, (outer, _) in stated.items()}
    used: set[str] = set()
    for row in rows:
        name, passed = row.machine or row.site, set[str]()
        while name is not None and name not in used:
            passed.add(name)
            outer = within.get(name)
            if outer in passed:
                raise NetworkError(
                    f"line {stated[name][1]}: within {outer!r} of {name!r} makes {outer!r} lie in "
                    "itself; correct one of them"
                )
            name = outer
        used |= passed
    for row in of_sites:
        if row.site not in used:
            raise NetworkError(
                f"line {row.line}: no device is in site {row.site!r}; name it as site or within of "
                "other rows, or leave the row out"
            )
    return within


def _of_sites(
    rows: list[DeviceRow], of_sites: list[DeviceRow], field: str, rates: PairTable
) -> dict[str, float] | None:
    """The limit of each site; rows of a site must not contradict each other.

    A machine's line without one carries what its fastest pair with other machines does.
    """
    column = field.replace("bytes_per_s", "mbps")
    first: dict[str, DeviceRow] = {}
    for row in (*rows, *of_sites):
        value = getattr(row, field)
        if value is None:
            continue
        if row.line_name is None:
            raise NetworkError(
                f"line {row.line}: {row.name!r} has {column}, a limit of its site, but no site; "
                "name the site"
            )
        first_value = getattr(first.setdefault(row.line_name, row), field)
        if first_value != value:
            raise NetworkError(
                f"line {row.line}: {column} of site {row.line_name!r} is {value / MBIT:g}, in line "
                f"{first[row.line_name].line} {first_value / MBIT:g}; give one"
            )
    limits = {site: float(getattr(row, field)) for site, row in first.items()}
    machines: dict[str, list[int]] = {}
    for d, row in enumerate(rows):
        if row.machine is not None:
            machines.setdefault(row.machine, []).append(d)
    size, measured = np.bincount(rates.class_of), np.nan_to_num(rates.values)
    for machine, members in machines.items():
        if machine not in limits and len(members) < len(rows):
            inside = np.bincount(rates.class_of[members], minlength=len(size))
            pairs = measured[inside > 0][:, size > inside]
            limits[machine] = float(pairs.max())
    return limits or None
