"""Reads and writes networks: CSV and JSON files, NetworkX graphs and pandas frames.

Files may use milliseconds and gigabits. The unit in a column's name is converted here and nowhere
else. `planner.network.network.Network` validates the result.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from planner.network.error import NetworkError
from planner.network.link import Link
from planner.network.summaries import refuse_summary
from planner.utils.atomic_write import write_text
from planner.utils.csv_table import number_in, number_remedy, parse_csv
from planner.utils.input_files import parse_json, read_text
from planner.utils.text import closest_match, name_of, printable
from planner.utils.validate import LARGEST, SMALLEST, in_safe_range, short_repr

FORMAT = "planner.network"
HEADER = "source,destination,latency_s,bandwidth_bytes_per_s"
"""Header of CSV files as written; others are read too."""
ASSUMED_COLUMN = "assumed"
"""Column in files of `planner networks`, with the words ``latency`` and ``bandwidth`` where these
were not measured."""
SCHEMA_VERSION = 1

ASSUMED = {"latency": "--latency-ms 50", "bandwidth": "--bandwidth-gbps 1"}
"""Assumptions about links between regions that messages propose."""

# column name -> factor to SI; an RTT counts both ways, so it is halved
LATENCY_COLUMNS = {"latency_s": 1.0, "latency_ms": 1e-3, "rtt_s": 0.5, "rtt_ms": 0.5e-3}
BANDWIDTH_COLUMNS = {
    "bandwidth_bytes_per_s": 1.0,
    "bandwidth_gbps": 1e9 / 8,
    "bandwidth_mbps": 1e6 / 8,
}
UNITS = LATENCY_COLUMNS | BANDWIDTH_COLUMNS
ENDS = ("source", "destination")
OTHER_NAMES = {
    "source": ("from", "src", "sender", "sending_region", "origin", "client"),
    "destination": ("to", "dst", "dest", "target", "receiver", "receiving_region", "server"),
}
NOT_MEASURED = ("", "-")
MEGABYTES = re.compile("[KMG]i?B")
"""In the name of a column of bytes; bits have a small letter."""
ALIKE = 0.75
"""Share of equal letters from which on a column is taken for a misspelt one."""


class Matrices(NamedTuple):
    """Data of a `Network`; NaN where a pair was not measured.

    Attributes
    ----------
    latency_s, bandwidth_bytes_per_s
        N x N, row is the source.
    ids
        Names of the N devices.
    regions
        Region of each device; None if each is its own.
    """

    latency_s: Any
    bandwidth_bytes_per_s: Any
    ids: Sequence[str]
    regions: Sequence[str] | None = None


def read(path: str | Path) -> Matrices:
    """Read a ``.csv`` or ``.json`` file."""
    path = Path(path)
    readers = {".csv": from_csv_text, ".json": from_json_text}
    kind = path.suffix.lower()
    if kind not in readers:
        raise NetworkError(f"{path}: unknown format {path.suffix!r}; give a .csv or .json file")
    text = read_text(path, error=NetworkError)
    try:
        return readers[kind](text)
    except NetworkError as error:
        raise NetworkError(f"{path}: {error}") from None


def write(network: Matrices, path: str | Path, assumed: Mapping[str, Any] | None = None) -> None:
    """Write a ``.csv`` (one row per ordered pair) or ``.json`` file atomically.

    ``assumed`` has a Boolean N x N matrix for ``latency`` and ``bandwidth``, which is written too.
    """
    path = Path(path)
    writers = {".csv": to_csv_text, ".json": to_json_text}
    kind = path.suffix.lower()
    if kind not in writers:
        raise NetworkError(f"{path}: unknown format {path.suffix!r}; name it .csv or .json")
    write_text(path, writers[kind](network, assumed))


def from_csv_text(text: str) -> Matrices:
    """Parse ``source,destination,<latency column>,<bandwidth column>`` with a header row."""
    table = parse_csv(text, error=NetworkError)
    return _from_records(
        ((f"line {row.line}", row.cells) for row in table.rows), columns=table.columns
    )


def from_frame(frame: Any) -> Matrices:
    """From a pandas frame with the same columns as the CSV files."""
    if not all(hasattr(frame, name) for name in ("astype", "notna", "columns")):
        raise NetworkError(f"frame must be a pandas frame, found {short_repr(frame)}")
    columns = [name_of(c).strip() for c in frame.columns]
    if columns and not set(ENDS) & set(columns) and columns == list(map(name_of, frame.index)):
        raise NetworkError(
            "frame is a matrix, with devices along both sides; give Network(latency_s, "
            "bandwidth_bytes_per_s) two such frames in SI units"
        )
    require_unique(columns)
    rows = frame.astype(object).where(frame.notna(), None).to_dict("records")
    return from_rows(rows, columns=columns)


def to_frame(network: Matrices) -> Any:
    """A pandas frame with one row per ordered pair, in SI units."""
    import pandas

    return pandas.read_csv(io.StringIO(to_csv_text(network)))


def from_rows(rows: Iterable[Mapping[str, Any]], columns: Iterable[str]) -> Matrices:
    """From records, one per ordered pair; pairs without a row are missing."""
    return _from_records(
        ((f"line {line}", row) for line, row in enumerate(rows, start=2)), columns=columns
    )


def _from_records(
    rows: Iterable[tuple[str, Mapping[str, Any]]], columns: Iterable[str]
) -> Matrices:
    """From records with their position, for messages."""
    links = _links(rows, columns)
    place = {name: k for k, name in enumerate(dict.fromkeys(end for ends in links for end in ends))}
    if not place:
        raise NetworkError("no rows; give one row per ordered pair of devices")
    arrays = np.full((2, len(place), len(place)), np.nan)
    for (source, destination), values in links.items():
        arrays[:, place[source], place[destination]] = values
    return Matrices(arrays[0], arrays[1], list(place))


def links_within(path: str | Path) -> dict[str, Link]:
    """Links between devices of a place, of which a CSV file has a row from the place to itself."""
    table = parse_csv(read_text(path, error=NetworkError), error=NetworkError)
    rows = ((f"line {row.line}", row.cells) for row in table.rows)
    inside = {a: link for (a, b), link in _links(rows, table.columns).items() if a == b}
    return {name: link for name, link in inside.items() if not any(map(math.isnan, link))}


def _links(
    rows: Iterable[tuple[str, Mapping[str, Any]]], columns: Iterable[str]
) -> dict[tuple[str, str], Link]:
    """Links by their ends."""
    names = [str(c).strip() for c in columns]
    require_unique(names)
    latency_column = _one_of(names, LATENCY_COLUMNS, "latency")
    bandwidth_column = _one_of(names, BANDWIDTH_COLUMNS, "bandwidth")
    columns_of_ends = []
    for column, found in zip(ENDS, end_columns(names), strict=True):
        if found is None:
            shown = ", ".join(map(printable, names)) or "none"
            raise NetworkError(
                f"column {column!r} is missing; found {shown}{misnamed(names, [column])}"
            )
        columns_of_ends.append(found)
    links: dict[tuple[str, str], Link] = {}
    for where, raw in rows:
        row = {str(key).strip(): value for key, value in raw.items()}
        ends = [name_of(row.get(c)).strip() for c in columns_of_ends]
        if not all(ends):
            raise NetworkError(f"{where}: source and destination must both be given")
        for column, name in zip(ENDS, ends, strict=True):
            refuse_summary(name, f"{where}: {column}")
        pair = ends[0], ends[1]
        if ends[0] == ends[1] and not _is_given(row.get(bandwidth_column)):
            links.setdefault(pair, Link(math.nan, math.nan))  # the diagonal of a matrix
            continue
        if pair in links:
            raise NetworkError(
                f"{where}: {ends[0]!r} to {ends[1]!r} is given twice; keep one of the rows"
            )
        links[pair] = Link(
            si_value(row.get(latency_column), latency_column, where),
            si_value(row.get(bandwidth_column), bandwidth_column, where),
        )
    return links


def _is_given(value: Any) -> bool:
    """Whether a cell is neither empty nor what matrices have on their diagonal."""
    try:
        return float(value) not in (0.0, math.inf)
    except (TypeError, ValueError):
        return str(value).strip() not in NOT_MEASURED and value is not None


def require_unique(names: Sequence[str]) -> None:
    """Refuse a column that occurs twice, also with other capitals."""
    for k, name in enumerate(names):
        if name in names[:k]:
            raise NetworkError(f"column {printable(name)!r} is named twice; keep one of them")
        other = next((earlier for earlier in names[:k] if earlier.lower() == name.lower()), None)
        if other is not None and name.lower() in (*ENDS, *UNITS):
            raise NetworkError(
                f"columns {other!r} and {name!r} differ in capitals alone; keep one of them"
            )


def end_columns(names: Sequence[str]) -> tuple[str | None, str | None]:
    """Columns of sources and destinations: these names, or else the only one of `OTHER_NAMES`."""

    def column(end: str) -> str | None:
        if end in names:
            return end
        synonyms = [name for name in names if "_".join(name.lower().split()) in OTHER_NAMES[end]]
        return synonyms[0] if len(synonyms) == 1 else None

    return column(ENDS[0]), column(ENDS[1])


def with_units(name: str, expected: Iterable[str]) -> list[str]:
    """The wanted columns that have this name and a unit, if there are several."""
    prefix = "_".join(name.lower().split()) + "_"
    found = [wanted for wanted in expected if wanted.startswith(prefix)]
    return found if len(found) > 1 else []


def misnamed(names: Sequence[str], expected: Iterable[str]) -> str:
    """A hint if some column is probably a misspelt wanted one, else empty."""
    for name in names:
        normalized = "_".join(name.lower().split())
        if MEGABYTES.search(name):
            return (
                f" ({name!r} is in bytes: give bandwidth_bytes_per_s, or 8 times as many bits in "
                "bandwidth_mbps or bandwidth_gbps)"
            )
        if columns := with_units(name, expected):
            return f" (name {name!r} with its unit: {' or '.join(columns)})"
        meant = next((w for w in expected if normalized in OTHER_NAMES.get(w, ())), None)
        if name not in (*ENDS, *UNITS) and (
            meant or (meant := closest_match(normalized, expected, ALIKE))
        ):
            return f" (rename {name!r} to {meant!r})"
    return ""


def _one_of(names: Sequence[str], factors: Mapping[str, float], label: str) -> str:
    present = [c for c in factors if c in names]
    if not present:
        shown = ", ".join(map(printable, names)) or "nothing at all"
        raise NetworkError(
            f"has no column of {label}, such as {list(factors)[1]}, found {shown}"
            f"{misnamed(names, factors)}; measure it, or assume one, such as planner networks FILE "
            f"{ASSUMED[label]} --out net.csv"
        )
    if len(present) != 1:
        raise NetworkError(
            f"exactly one {label} column is needed, found {present or 'none'}; "
            f"name it one of {', '.join(factors)}"
        )
    return present[0]


def si_value(value: Any, column: str, where: str) -> float:
    """Convert a cell of a column of `UNITS` to SI units."""
    if isinstance(value, str):
        value = value.strip()
    if value is None or (isinstance(value, str) and value in NOT_MEASURED):
        return math.nan
    try:
        if isinstance(value, (bool, np.bool_)) or np.ndim(value) > 0:
            raise TypeError
        number = number_in(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        remedy = number_remedy(str(value), "give a number, or leave it empty if not measured")
        raise NetworkError(f"{where}: {column} is {short_repr(value)}; {remedy}")
    if not math.isfinite(number):
        raise NetworkError(f"{where}: {column} is {short_repr(value)}; it must be finite")
    if column in LATENCY_COLUMNS and number < 0:
        raise NetworkError(
            f"{where}: {column} is {short_repr(value)}; it must be >= 0, measure it again"
        )
    if column in BANDWIDTH_COLUMNS and number <= 0:
        raise NetworkError(
            f"{where}: {column} is {short_repr(value)}; it must be > 0, for a bandwidth of 0 or "
            "less is no measurement; measure it again"
        )
    if not in_safe_range(number * UNITS[column]):
        raise NetworkError(
            f"{where}: {column} is {short_repr(value)}; in SI units it must be 0 or "
            f"{SMALLEST:g} to "
            f"{LARGEST:g}"
        )
    return number * UNITS[column]


def to_csv_text(network: Matrices, assumed: Mapping[str, Any] | None = None) -> str:
    """CSV in SI units with all digits; missing values are empty. See `write` for ``assumed``."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER.split(",") + [ASSUMED_COLUMN] * (assumed is not None))
    for i, source in enumerate(network.ids):
        for j, destination in enumerate(network.ids):
            if i != j:
                pair = (network.latency_s[i, j], network.bandwidth_bytes_per_s[i, j])
                cells = ["" if np.isnan(x) else repr(float(x)) for x in pair]
                if assumed is not None:
                    cells.append(
                        " ".join(quantity for quantity, which in assumed.items() if which[i, j])
                    )
                writer.writerow([source, destination, *cells])
    return out.getvalue()


def to_dict(network: Matrices) -> dict[str, Any]:
    """JSON-ready form: matrices with null where not measured and on the diagonal.

    Returns
    -------
    dict[str, Any]
        Keys ``format, schema_version, ids, regions, latency_s, bandwidth_bytes_per_s``.
    """

    def rows(array: np.ndarray[Any, Any]) -> list[list[float | None]]:
        return [[x if math.isfinite(x) else None for x in row] for row in array.tolist()]

    return {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "ids": list(network.ids),
        "regions": list(network.regions or network.ids),
        "latency_s": rows(network.latency_s),
        "bandwidth_bytes_per_s": rows(network.bandwidth_bytes_per_s),
    }


def from_dict(data: Any) -> Matrices:
    """Inverse of `to_dict`."""
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise NetworkError(f"not a network: field 'format' must be {FORMAT!r}")
    if data.get("schema_version") != SCHEMA_VERSION:
        raise NetworkError(
            f"schema_version is {data.get('schema_version')!r}; this release reads {SCHEMA_VERSION}"
        )
    for field in ("latency_s", "bandwidth_bytes_per_s"):
        if field not in data:
            raise NetworkError(f"field {field!r} is missing; give an N x N matrix")

    def matrix(field: str) -> list[list[float]]:
        try:
            return [[_cell(x) for x in row] for row in data[field]]
        except (TypeError, OverflowError):
            raise NetworkError(
                f"{field} must be a matrix of numbers, null where not measured"
            ) from None

    latency = matrix("latency_s")
    ids = data.get("ids")
    names = [str(i) for i in range(len(latency))] if ids is None else ids
    return Matrices(latency, matrix("bandwidth_bytes_per_s"), names, data.get("regions"))


def _cell(value: Any) -> float:
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError
    return float(value)


def to_json_text(network: Matrices, assumed: Mapping[str, Any] | None = None) -> str:
    """Canonical JSON text. See `write` for ``assumed``."""
    data, ids = to_dict(network), network.ids
    if assumed is not None:
        data[ASSUMED_COLUMN] = {
            quantity: [[ids[i], ids[j]] for i, j in np.argwhere(which)]
            for quantity, which in assumed.items()
        }
    return json.dumps(data, allow_nan=False) + "\n"


def from_json_text(text: str) -> Matrices:
    """Inverse of `to_json_text`."""
    return from_dict(parse_json(text, "the text", error=NetworkError))


def from_networkx(graph: Any) -> Matrices:
    """From a NetworkX graph with edge attributes in any of the units of CSV files.

    An undirected edge counts in both directions; the node attribute ``region`` is used.
    """
    if isinstance(graph, type) or not all(
        hasattr(graph, name) for name in ("nodes", "edges", "is_directed")
    ):
        raise NetworkError(f"graph must be a NetworkX graph, found {short_repr(graph)}")
    place = {node: k for k, node in enumerate(graph.nodes)}
    if not place:
        raise NetworkError("the graph has no nodes; add one per device")
    arrays = np.full((2, len(place), len(place)), np.nan)
    pairs_seen: set[tuple[int, int]] = set()
    for u, v, data in graph.edges(data=True):
        if u == v:
            continue
        where = f"edge {str(u)!r} to {str(v)!r}"
        names = [str(key) for key in data]
        values = []
        for columns, label in ((LATENCY_COLUMNS, "latency"), (BANDWIDTH_COLUMNS, "bandwidth")):
            column = _one_of(names, columns, label)
            value = data[column]
            if value is None or (isinstance(value, (float, np.floating)) and np.isnan(value)):
                raise NetworkError(
                    f"{where}: {column} is {value}; give a number, or leave the edge out"
                )
            values.append(si_value(value, column, where))
        ends = [(place[u], place[v])]
        if not graph.is_directed():
            ends.append((place[v], place[u]))
        if pairs_seen & set(ends):
            raise NetworkError(f"{where} is given twice; keep one of the edges")
        pairs_seen.update(ends)
        for i, j in ends:
            arrays[:, i, j] = values
    regions = [name_of(graph.nodes[node].get("region", node)) for node in place]
    return Matrices(arrays[0], arrays[1], [name_of(node) for node in place], regions)


def to_networkx(network: Matrices) -> Any:
    """A ``networkx.DiGraph`` with ``latency_s`` and ``bandwidth_bytes_per_s`` on measured edges."""
    import networkx

    graph: Any = networkx.DiGraph()
    for name, region in zip(network.ids, network.regions or network.ids, strict=True):
        graph.add_node(name, region=region)
    measured = ~np.isnan(network.latency_s) & ~np.isnan(network.bandwidth_bytes_per_s)
    for i, u in enumerate(network.ids):
        for j, v in enumerate(network.ids):
            if i != j and measured[i, j]:
                graph.add_edge(
                    u,
                    v,
                    latency_s=float(network.latency_s[i, j]),
                    bandwidth_bytes_per_s=float(network.bandwidth_bytes_per_s[i, j]),
                )
    return graph
