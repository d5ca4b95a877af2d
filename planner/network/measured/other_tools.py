"""Output of other measuring tools: recognised, and read if it names both hosts.

mtr names both ends, and the matrix of a site such as cloudping.co names all. ping, OSU micro-
benchmarks, perftest, nvidia-smi and others do not say between which hosts they ran, so their output
is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from planner.network.error import NetworkError
from planner.network.formats import ENDS, UNITS, si_value
from planner.network.measured.findings import Measurements
from planner.network.measured.tables import Cell, read_cells, read_records, require_devices

TAG = re.compile(
    r"^(?:\[(?P<mpi>[^\]\s]*?(?:\d+,)?\d+)\](?:<\w+>)?:? ?|[ \t]*(?P<srun>\d+): ?)", re.MULTILINE
)
"""Put before each line: ``[1,0]<stdout>:`` by Open MPI and PRRTE, ``[0]`` by MPICH, ``[0]:`` by
torchrun, ``0: `` by ``srun --label``."""
TIME = re.compile(
    r"^\[?(?:\d{4}-\d\d-\d\d[T ]|[A-Z][a-z]{2} [ \d]\d )?\d\d:\d\d:\d\d[\d.,]*"
    r"(?:Z|[+-]\d\d:?\d\d)?\]?:? ?",
    re.M,
)
HOST = re.compile(r"^(?!sockperf)[\w.-]+: ?", re.M)
"""Prefix of each line by log collectors and pdsh."""
DOCUMENT = re.compile(r'^\s*(\{|\[\s*[\[{"\]])', re.M)
"""Start of a JSON document without prefixes."""
SEVERAL = re.compile(r"\}\s*\{")
"""Boundary between two JSON documents; objects of a list have a comma between them."""
PAIR_TABLE = "write its figures into a .csv with source,destination and"
REFUSED = (
    (
        re.compile(r"^PING |\bicmp_seq=|^rtt min/avg/max|^round-trip min/avg/max|^Pinging ", re.M),
        f"ping prints, which does not say from where; {PAIR_TABLE} rtt_ms".replace(
            "figures", "averages"
        ),
    ),
    (
        re.compile(
            r"^\S+ +: (xmt/rcv/%loss|\[\d+\]|(\d+\.\d+|-)( (\d+\.\d+|-))*$)"
            r"|^\S+ is (alive|unreachable)\b",
            re.M,
        ),
        f"fping prints, which does not say from where; {PAIR_TABLE} rtt_ms",
    ),
    (
        re.compile(r"^(traceroute to|Tracing route to) |\bpmtu \d+", re.M),
        f"traceroute prints (or tracepath), which does not say from where; {PAIR_TABLE} rtt_ms",
    ),
    (
        re.compile(r"^([hxpdt] \d+ \S+|Mtr_Version,|MTR\.\d)", re.M),
        "mtr --raw or --csv prints, which does not say from where; run mtr --json or --report",
    ),
    (
        re.compile(r"^((tcp|udp|sctp|rc|uc|ud|rds|sdp|xrc)_\w+:\s*$|sockperf\b)", re.M),
        f"qperf or sockperf prints, which names no host; {PAIR_TABLE} latency_ms or bandwidth_mbps",
    ),
    (
        re.compile(r"^(MIGRATED )?(TCP|UDP|SCTP)[ _]\w+.* TEST\b|^Recv +Send +Send\b", re.M),
        f"netperf prints, which does not say from where; {PAIR_TABLE} rtt_ms or bandwidth_mbps",
    ),
    (
        re.compile(r"^# (OSU |Size +(Latency|Bandwidth|Avg Latency))", re.M),
        f"an OSU micro-benchmark prints, which names no host; {PAIR_TABLE} latency_ms or "
        "bandwidth_mbps",
    ),
    (
        re.compile(r"^ *(RDMA|Send|Atomic).*(BW|Latency) Test|^ *#bytes ", re.M),
        f"perftest (ib_write_bw and the like) prints, which names no host; {PAIR_TABLE} "
        "latency_ms or bandwidth_gbps",
    ),
    (
        re.compile(r"^\s*GPU0\b.*\bAffinity|^\s*GPU0\s+(X|GPU1)\b", re.M),
        "nvidia-smi topo -m prints, of links inside one machine and without figures; measure "
        "them with nccl-tests, or state them with --intra-latency-ms and --intra-bandwidth-gbps "
        "of planner plan",
    ),
    (
        re.compile(
            r"^(Client connecting to .*|Server listening on) (TCP|UDP) port |^(TCP|UDP) window size"
            r"|^\d{14}(\.\d+)?,[\w.:]*,\d+,[\w.:]*,\d+,",
            re.M,
        ),
        f"iperf 2 prints; run iperf3 --json instead, or {PAIR_TABLE} bandwidth_mbps",
    ),
    (
        re.compile(r"^(\[ *ID\] +Interval|(Connecting to host|Server listening on) )", re.M),
        "iperf3 prints for people; run it with --json",
    ),
    (
        re.compile(r'^\s*\{"event": ?"', re.M),
        "iperf3 --json-stream writes; run it with --json alone",
    ),
)
"""Patterns of output that cannot become part of a network, and the reason."""
MTR_HEADER = re.compile(r"^HOST: +(?P<host>\S+) +(?P<columns>Loss%.*)$", re.M)
MTR_HOP = re.compile(
    r"^ *\d+\.(?:\|--)? +(?:AS[\d?]+ +)?(?P<host>\S+)(?: \((?P<address>[\w.:]+)\))? +"
    r"(?P<cells>[\d.]+%?( +[\d.]+)*) *$",
    re.M,
)
MILLISECONDS = ("ms", "millisecond", "milliseconds")


def without_tags(text: str) -> str:
    """The text without a launcher's line prefixes."""
    if DOCUMENT.match(text):
        return text
    text = TIME.sub("", text)
    if all(HOST.match(line) for line in text.splitlines() if line.strip()):
        text = HOST.sub("", text)
    documents = {
        match["mpi"] or match["srun"]
        for match in TAG.finditer(text)
        if text.startswith("{", match.end())
    }
    if len(documents) > 1:
        raise NetworkError(f"has the output of {len(documents)} tasks; give each a file of its own")
    return TAG.sub("", text)


def refuse_known(text: str) -> None:
    """Raise an error that names the tool, if the text is known but cannot be read."""
    for pattern, explanation in REFUSED:
        if pattern.search(text):
            raise NetworkError(f"is what {explanation}")


def read_mtr_report(text: str, names: Mapping[str, str]) -> Measurements | None:
    """Latency in the output of ``mtr --report``; None for other text."""
    header = MTR_HEADER.search(text)
    if header is None:
        return None
    hops = list(MTR_HOP.finditer(text, header.end()))
    columns = header["columns"].split()
    if len(MTR_HEADER.findall(text)) > 1:
        raise NetworkError("has several reports of mtr; give each a file of its own")
    if not hops or "Avg" not in columns:
        raise NetworkError("lacks hops or the column Avg; give all that mtr --report printed")
    last = hops[-1]
    target = last["address"] if last["address"] in names else last["host"]
    cells = last["cells"].split()
    if len(cells) != len(columns):
        raise NetworkError(
            f"hop {last['host']!r} has {len(cells)} figures for {len(columns)} columns; give all "
            "that mtr --report printed"
        )
    hop = dict(zip(columns, cells, strict=True))
    return _mtr(header["host"], target, last["host"], hop, names)


def read_json_data(data: Any, names: Mapping[str, str], unit: str | None) -> Measurements | None:
    """Latency in ``mtr --json``, in a matrix as nested objects, or in records with CSV columns.

    None for other data.
    """
    if isinstance(data, dict) and isinstance(data.get("report"), dict):
        try:
            ends, hops = data["report"]["mtr"], data["report"]["hubs"]
            source, target, last = str(ends["src"]), str(ends["dst"]), hops[-1]
            return _mtr(source, target, str(last["host"]), last, names)
        except (KeyError, IndexError, TypeError):
            raise NetworkError(
                "lacks the source, the destination or the hops; give all that mtr --json wrote"
            ) from None
    matrix = data
    if isinstance(data, dict) and isinstance(about := data.get("metadata"), dict):
        # cloudping.co's averages are round trips
        matrix, unit_text = data.get("data"), str(about.get("unit", "")).lower()
        if unit_text in MILLISECONDS and unit != "latency_ms":
            unit = "rtt_ms"
    elif isinstance(data, list) and data and all(_is_cloudping_row(row) for row in data):
        # the earlier API
        unit = "latency_ms" if unit == "latency_ms" else "rtt_ms"
        matrix = {
            row["region"]: {cell["regionTo"]: cell["average"] for cell in row["averages"]}
            for row in data
        }
    records = isinstance(data, list) and bool(data) and all(isinstance(row, dict) for row in data)
    if records and any(all(end in row for end in ENDS) for row in data):
        return read_records(data).renamed(names)
    if not _is_matrix(matrix):
        return None
    if unit not in UNITS:
        raise NetworkError(
            f"is a matrix without a unit; say it with --unit, one of {', '.join(UNITS)}"
        )
    return _nested(matrix, unit).renamed(names)


def _mtr(
    source: str, target: str, last: str, hop: Mapping[str, Any], names: Mapping[str, str]
) -> Measurements:
    if last == "???" or str(hop["Loss%"]).rstrip("%") in ("100", "100.0"):
        raise NetworkError(
            f"{target if target != '???' else 'the destination'} did not answer mtr; allow ICMP "
            "there, or run mtr --tcp"
        )
    measurements = Measurements()
    where = f"from {source!r} to {target!r}, Avg"
    seconds = si_value(hop["Avg"], "rtt_ms", where)
    measurements.set_latency(names.get(source, source), names.get(target, target), seconds)
    return measurements


def _is_cloudping_row(row: Any) -> bool:
    return (
        isinstance(row, dict)
        and isinstance(row.get("region"), str)
        and isinstance(row.get("averages"), list)
        and all(isinstance(c, dict) and {"regionTo", "average"} <= set(c) for c in row["averages"])
    )


def _is_matrix(data: Any) -> bool:
    return (
        isinstance(data, dict)
        and len(data) > 1
        and all(isinstance(row, dict) and row for row in data.values())
        and not any(isinstance(x, (dict, list)) for row in data.values() for x in row.values())
    )


def _nested(matrix: Mapping[str, Mapping[str, Any]], unit: str) -> Measurements:
    columns = list(dict.fromkeys(name for row in matrix.values() for name in row))
    names = [*matrix, *(name for name in columns if name not in matrix)]
    require_devices(names, columns)
    cells = [
        Cell(source, target, value, f"{source!r} to {target!r}")
        for source, row in matrix.items()
        for target, value in row.items()
    ]
    return read_cells(cells, names, unit)
