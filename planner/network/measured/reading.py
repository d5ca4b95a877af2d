"""Reads networks from the output of measuring tools, several files together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from planner.network.assumed import assumed_in_json
from planner.network.error import NetworkError
from planner.network.formats import ASSUMED, FORMAT, from_json_text
from planner.network.measured.findings import Measurements, Pair
from planner.network.measured.iperf3 import REVERSE, read_iperf3
from planner.network.measured.nccl_tests import COLUMNS, RANK, read_nccl_tests
from planner.network.measured.other_tools import (
    DOCUMENT,
    SEVERAL,
    read_json_data,
    read_mtr_report,
    refuse_known,
    without_tags,
)
from planner.network.measured.tables import read_table
from planner.network.network import Network
from planner.network.probe_log import ProbeLog
from planner.utils.csv_table import read_csv
from planner.utils.input_files import parse_json, read_text
from planner.utils.text import printable

Floats = NDArray[np.float64]
KINDS = (".csv", ".json", ".txt", ".log", ".out")
REMEDIES = {
    "latency": ("a ping table, or nccl-tests from -b 8 on,", (1e3, "ms")),
    "bandwidth": ("iperf3's files, or nccl-tests up to -e 128M,", (8e-9, "Gb/s")),
}
"""How to measure, and how to write the file."""
NAME_COLUMNS = ("address", "name")


@dataclass(frozen=True)
class Measured:
    """A network, and how much of it was measured.

    Attributes
    ----------
    network
        NaN where neither measured nor assumed.
    latencies, bandwidths
        Number of ordered pairs that were measured.
    mirrored
        Number of values copied from the opposite direction.
    assumed
        What was assumed where nothing was measured, in words.
    assumed_pairs
        ``bool[N, N]``, where ``latency`` and ``bandwidth`` were assumed, or copied on request from
        the other direction.
    """

    network: Network
    latencies: int
    bandwidths: int
    mirrored: int
    assumed: tuple[str, ...]
    assumed_pairs: Mapping[str, NDArray[np.bool_]]


def read_measured(
    paths: Sequence[str | Path],
    *,
    names: Mapping[str, str] | None = None,
    unit: str | None = None,
    both_ways: bool = False,
    latency_s: float | None = None,
    bandwidth_bytes_per_s: float | None = None,
    leave_out: Sequence[Path] = (),
) -> Measured:
    """Read files of measurements into one network."""
    measurements = Measurements()
    for path in _files(paths, leave_out):
        try:
            measurements.add(_read(path, names or {}, unit))
        except NetworkError as error:
            raise NetworkError(
                f"{path}: {error}".replace(f"{path}: {path}: ", f"{path}: ")
            ) from None
    measured_pairs = [*measurements.latency_s, *measurements.bandwidth_bytes_per_s]
    ids = sorted({name for pair in measured_pairs for name in pair})
    if len(ids) < 2:
        raise NetworkError("nothing was measured between two devices; give other files")
    latency = _complete_values(ids, "latency", measurements.latency_s, both_ways, latency_s)
    bandwidth = _complete_values(
        ids, "bandwidth", measurements.bandwidth_bytes_per_s, both_ways, bandwidth_bytes_per_s
    )
    return Measured(
        Network(latency.values, bandwidth.values, ids),
        len(measurements.latency_s) - measurements.mirrored_latencies,
        len(measurements.bandwidth_bytes_per_s) - measurements.mirrored_bandwidths,
        latency.mirrored
        + bandwidth.mirrored
        + measurements.mirrored_latencies
        + measurements.mirrored_bandwidths,
        latency.assumed + bandwidth.assumed,
        {"latency": latency.assumed_pairs, "bandwidth": bandwidth.assumed_pairs},
    )


class _CompleteValues(NamedTuple):
    """A matrix of measured, mirrored and assumed values."""

    values: Floats
    mirrored: int
    assumed: tuple[str, ...]
    assumed_pairs: NDArray[np.bool_]


def _complete_values(
    ids: Sequence[str],
    label: str,
    values: Mapping[Pair, float],
    both_ways: bool,
    otherwise: float | None,
) -> _CompleteValues:
    tool, quantity = REMEDIES[label]
    if not values and otherwise is None:
        raise NetworkError(
            f"no {label} was measured; give {tool} too, or assume one, such as planner networks "
            f"FILE {ASSUMED[label]} --out net.csv"
        )
    place = {name: k for k, name in enumerate(ids)}
    array = np.full((len(ids), len(ids)), np.nan)
    for (a, b), value in values.items():
        array[place[a], place[b]] = value
    mirrored = np.isnan(array) & ~np.isnan(array.T) & both_ways
    array = np.where(mirrored, array.T, array)
    missing = np.isnan(array) & ~np.eye(len(ids), dtype=bool)
    if otherwise is None or not missing.any():
        return _CompleteValues(array, int(mirrored.sum()), (), mirrored)
    factor, unit = quantity
    message = f"{label} of {missing.sum()} ordered pairs, {otherwise * factor:g} {unit}"
    filled = np.where(missing, otherwise, array)
    return _CompleteValues(filled, int(mirrored.sum()), (message,), missing | mirrored)


def load_names(path: str | Path) -> dict[str, str]:
    """Names of devices from a CSV with the columns ``address,name``."""
    table = read_csv(path, error=NetworkError)
    names: dict[str, str] = {}
    missing = next((column for column in NAME_COLUMNS if column not in table.columns), None)
    if missing is not None:
        shown = ", ".join(map(printable, table.columns)) or "none"
        raise NetworkError(
            f"{path}: column {missing!r} is missing, found {shown}; give a CSV with the columns "
            "address,name"
        )
    for line, row in table.rows:
        address, name = (row[column] for column in NAME_COLUMNS)
        if not address or not name:
            raise NetworkError(f"{path}, line {line}: address and name must both be given")
        if names.setdefault(address, name) != name:
            raise NetworkError(f"{path}, line {line}: {address!r} has two names; keep one")
    if not names:
        raise NetworkError(f"{path}: has no names; give a CSV with the columns address,name")
    return names


def _files(paths: Iterable[str | Path], leave_out: Iterable[Path]) -> list[Path]:
    files: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            kinds, excluded = (*KINDS, ".jsonl"), {path.resolve() for path in leave_out}
            inside = sorted(
                entry
                for entry in path.iterdir()
                if entry.suffix.lower() in kinds and entry.resolve() not in excluded
            )
            if not inside:
                raise NetworkError(f"{path}: holds no {', '.join(KINDS)} or .jsonl file")
            files += inside
        else:
            files.append(path)
    return files


def _read(path: Path, names: Mapping[str, str], unit: str | None) -> Measurements:
    kind = path.suffix.lower()
    if kind == ".jsonl":
        return _of_network(ProbeLog.load(path).network()).renamed(names)
    if not path.exists():
        raise NetworkError(f"{path}: cannot be read (no such file or folder); check the path")
    if kind not in KINDS:
        raise NetworkError(
            f"unknown kind {path.suffix!r}; give a .csv table, .json of iperf3 or mtr, .txt, .log "
            "or .out of nccl-tests or mtr, or a probe's .jsonl"
        )
    text = read_text(path, error=NetworkError)
    if kind != ".csv":
        measurements = _read_output(text, path, names, unit)
        if measurements is None:
            first = next((line.strip() for line in text.splitlines() if line.strip()), "")
            raise NetworkError(
                f"is none of the outputs read here, found {first[:60]!r}; give that of iperf3 "
                "--json, mtr --json or --report, or nccl-tests of two ranks, or a table as .csv"
            )
        return measurements
    try:
        return read_table(text, unit).renamed(names)
    except NetworkError:
        # output of a tool may have such a name
        measurements = _read_output(text, path, names, unit)
        if measurements is None:
            raise
        return measurements


def _read_output(
    text: str, path: Path, names: Mapping[str, str], unit: str | None
) -> Measurements | None:
    """Parse the output of a tool by its content; None if no known tool wrote it."""
    text = without_tags(text)
    report = read_mtr_report(text, names)
    if report is not None:
        return report
    if RANK.search(text) or COLUMNS.search(text):
        return read_nccl_tests(text, names)
    if begin := DOCUMENT.search(text):
        # launchers add lines before and after
        end = max(text.rfind("}"), text.rfind("]")) + 1
        return _read_json(text[begin.start() : end or None], path, names, unit)
    refuse_known(text)
    return None


def _read_json(text: str, path: Path, names: Mapping[str, str], unit: str | None) -> Measurements:
    if SEVERAL.search(text):
        refuse_known(text)
        raise NetworkError("has several documents of JSON; give each run a file of its own")
    of_iperf3 = parse_json(text, path, error=NetworkError, second=REVERSE)
    if isinstance(of_iperf3, dict) and "start" in of_iperf3:
        return read_iperf3(text, names)
    data = parse_json(text, path, error=NetworkError)
    if isinstance(data, dict) and data.get("format") == FORMAT:
        assumed = [assumed_in_json(data, quantity) for quantity in ("latency", "bandwidth")]
        return _of_network(Network(*from_json_text(text)), *assumed).renamed(names)
    measurements = read_json_data(data, names, unit)
    return read_iperf3(text, names) if measurements is None else measurements


def _of_network(
    network: Network,
    assumed_latency: Collection[Pair] = (),
    assumed_bandwidth: Collection[Pair] = (),
) -> Measurements:
    """What was measured of a network, without what was assumed."""
    measurements = Measurements()
    missing = set(network.missing_pairs())
    for i, j in permutations(range(len(network)), 2):
        if (i, j) not in missing:
            ends = network.ids[i], network.ids[j]
            if ends not in assumed_latency:
                measurements.set_latency(*ends, float(network.latency_s[i, j]))
            if ends not in assumed_bandwidth:
                measurements.set_bandwidth(*ends, float(network.bandwidth_bytes_per_s[i, j]))
    return measurements
