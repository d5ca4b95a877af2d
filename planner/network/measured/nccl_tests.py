"""What nccl-tests print: runs of two ranks, such as ``sendrecv_perf`` or ``all_reduce_perf``."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from planner.network.error import NetworkError
from planner.network.measured.findings import Findings

RANK = re.compile(
    r"^#\s+Rank\s+(?P<rank>\d+)\s.*\bPid\s+\d+\s+on\s+(?P<host>\S+)\s+device\s+(?P<device>\d+)",
    re.M,
)
ROW = re.compile(r"^\s*(?P<size>\d+)\s+(?P<count>\d+)\s+(?P<type>[a-z]\w*)\s+(?P<rest>.*)$", re.M)
TAG = re.compile(r"^\[(\d+,)?\d+\](<\w+>:)? ?", re.M)
"""Put before each line by mpirun: ``[1,0]<stdout>:`` of Open MPI, ``[0]`` of MPICH."""
PING = re.compile(r"^PING |\bicmp_seq=|^rtt min/avg/max", re.M)
COLUMNS = re.compile(r"^#\s+size\s+count\s+type\s+(?P<rest>.*)$", re.M)
MICRO, GIGA = 1e-6, 1e9


class _Row(NamedTuple):
    """Seconds, and bytes per second of the links between two ranks."""

    size: int
    took_s: float
    bytes_per_s: float


def read_nccl_tests(text: str, names: Mapping[str, str]) -> Findings:
    """Latency and bandwidth between two ranks, alike in both directions.

    Parameters
    ----------
    text
        What one run printed.
    names
        Of devices, by ``host`` or ``host/device``; else these are their names, with the device's
        number where both ranks are on one host.

    Returns
    -------
    Findings
        Latency: seconds of the smallest message, out of place. Bandwidth: the bus bandwidth of the
        largest one; both ranks send at the same time, and each gets it.

    Raises
    ------
    NetworkError
        It is none, or of other than two ranks.
    """
    text = TAG.sub("", text)
    ranks = [(m["host"], f"{m['host']}/{m['device']}") for m in RANK.finditer(text)]
    if not ranks and PING.search(text):
        raise NetworkError(
            "is what ping prints, which does not say from where; write its averages into a .csv "
            "with source,destination,rtt_ms"
        )
    if len(ranks) != 2:
        raise NetworkError(
            f"is of {len(ranks)} ranks: what a pair of devices gets shows with two; run a test for "
            "every pair, -g 1 on each"
        )
    alone = ranks[0][0] != ranks[1][0]
    one, two = (names.get(full, names.get(host, host if alone else full)) for host, full in ranks)
    header = COLUMNS.search(text)
    rows = [] if header is None else [_row(found, header["rest"]) for found in ROW.finditer(text)]
    if not rows:
        raise NetworkError("has no row of figures; give all that the test printed")
    small, large = min(rows), max(rows)
    found = Findings()
    for source, destination in ((one, two), (two, one)):
        found.set_latency(source, destination, small.took_s)
        found.set_bandwidth(source, destination, large.bytes_per_s)
    return found


def _row(found: re.Match[str], columns: str) -> _Row:
    """By the names above the columns, of which some versions have fewer."""
    names, cells = columns.split(), found["rest"].split()
    try:
        if len(names) != len(cells):
            raise IndexError
        took, rate = (float(cells[names.index(name)]) for name in ("time", "busbw"))
    except (ValueError, IndexError):
        raise NetworkError(
            f"size {found['size']}: cells are not those of the header, with time and busbw; give "
            "all that the test printed"
        ) from None
    return _Row(int(found["size"]), took * MICRO, rate * GIGA)
