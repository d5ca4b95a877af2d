"""Output of nccl-tests: runs of two ranks, such as ``sendrecv_perf`` or ``all_reduce_perf``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from planner.network.error import NetworkError
from planner.network.measured.findings import Measurements
from planner.network.measured.other_tools import without_tags

RANK = re.compile(
    r"^#\s+Rank\s+(?P<rank>\d+)\s.*\bPid\s+\d+\s+on\s+(?P<host>\S+)\s+device\s+(?P<device>\d+)",
    re.M,
)
ROW = re.compile(r"^\s*(?P<size>\d+)\s+(?P<count>\d+)\s+(?P<type>[a-z]\w*)\s+(?P<rest>.*)$", re.M)
FOOTER = re.compile(r"^#\s*Out of bounds values\s*:\s*(?P<count>\d+)(?P<wrong>\s+FAILED)?", re.M)
FAILED = re.compile(r"^.*\bTest (?:\w+ )?failure\b.*$", re.M)
COLUMNS = re.compile(r"^#\s+size\s+count\s+type\s+(?P<rest>.*)$", re.M)
MICRO, GIGA = 1e-6, 1e9
LARGEST_FOR_LATENCY, SMALLEST_FOR_BANDWIDTH = 4096, 2**20
"""Bytes of a message dominated by latency, and of one that fills a link."""


class _Row(NamedTuple):
    """Seconds, and bytes per second of the links between two ranks."""

    size: int
    took_s: float
    bytes_per_s: float
    wrong: bool


def read_nccl_tests(text: str, names: Mapping[str, str]) -> Measurements:
    """Latency and bandwidth between two ranks, the same in both directions."""
    text = without_tags(text)
    lines = list(RANK.finditer(text))
    ranks = [(m["host"], f"{m['host']}/{m['device']}") for m in lines]
    if failed := FAILED.search(text):
        raise NetworkError(f"is of a run that failed: {failed[0].strip()[:120]!r}; run it again")
    numbers = [int(m["rank"]) for m in lines]
    if len(lines) > 1 and not any(numbers):
        raise NetworkError(
            f"has {len(lines)} ranks with the number 0: they did not connect, and each measured "
            "alone; build nccl-tests with MPI=1 and start both with one mpirun or srun --mpi"
        )
    if len(set(numbers)) < len(numbers):
        raise NetworkError(
            f"has {len(COLUMNS.findall(text))} tables and rank {max(numbers, key=numbers.count)} "
            "more than once; give each run a file of its own"
        )
    if len(ranks) != 2:
        raise NetworkError(
            f"is of {len(ranks)} ranks: what a pair of devices gets shows with two; run a test for "
            "every pair, -g 1 on each"
        )
    alone = ranks[0][0] != ranks[1][0]
    first, second = (
        names.get(full, names.get(host, host if alone else full)) for host, full in ranks
    )
    header = COLUMNS.search(text)
    rows = [] if header is None else [_row(match, header["rest"]) for match in ROW.finditer(text)]
    if not rows:
        raise NetworkError("has no row of figures; give all that the test printed")
    rows = [row for row in rows if row.size > 0]
    if not rows:
        raise NetworkError(
            "has rows of size 0 only, for which NCCL sends nothing; run it with -b 8 -e 128M"
        )
    footers = list(FOOTER.finditer(text))
    if wrong := next((footer for footer in footers if footer["wrong"]), None):
        raise NetworkError(
            f"{wrong['count']} values that arrived were wrong (out of bounds); run the test again"
        )
    for row in rows:
        if row.wrong:
            raise NetworkError(
                f"size {row.size}: values that arrived were wrong (#wrong); run the test again"
            )
    if not footers:
        raise NetworkError(
            "ends before the line '# Out of bounds values': the run did not end, or its output is "
            "cut off; give all that the test printed"
        )
    small, large = min(rows), max(rows)
    measurements = Measurements()
    for source, destination in ((first, second), (second, first)):
        if small.size <= LARGEST_FOR_LATENCY:
            measurements.set_latency(source, destination, small.took_s)
        if large.size >= SMALLEST_FOR_BANDWIDTH:
            measurements.set_bandwidth(source, destination, large.bytes_per_s)
    if small.size > LARGEST_FOR_LATENCY and large.size < SMALLEST_FOR_BANDWIDTH:
        raise NetworkError(
            f"has sizes from {small.size} to {large.size}, none of which gives a latency (up to "
            f"{LARGEST_FOR_LATENCY}) or a bandwidth (from {SMALLEST_FOR_BANDWIDTH}); run it with "
            "-b 8 -e 128M"
        )
    return measurements


def _row(match: re.Match[str], columns: str) -> _Row:
    """Parse a row by the names of its columns, some of which older versions lack."""
    names, cells = columns.split(), match["rest"].split()
    try:
        if len(names) != len(cells):
            raise IndexError
        took, rate = (float(cells[names.index(name)]) for name in ("time", "busbw"))
    except (ValueError, IndexError):
        raise NetworkError(
            f"size {match['size']}: cells are not those of the header, with time and busbw; give "
            "all that the test printed"
        ) from None
    wrong = any(
        cell not in ("0", "N/A")
        for name, cell in zip(names, cells, strict=True)
        if name == "#wrong"
    )
    return _Row(int(match["size"]), took * MICRO, rate * GIGA, wrong)
