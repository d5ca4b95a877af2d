"""Tables of measurements as CSV: a row a pair, or a matrix with devices along both sides."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from planner.network.csv_table import CsvTable, parse_csv
from planner.network.error import NetworkError
from planner.network.formats import (
    BANDWIDTH_COLUMNS,
    ENDS,
    LATENCY_COLUMNS,
    UNITS,
    si_value,
)
from planner.network.measured.findings import Findings

SUMMARIES = {
    *("mean", "average", "avg", "median", "total", "sum", "min", "max", "minimum", "maximum"),
    *("std", "stdev", "stddev", "deviation", "variance", "overall", "percentile"),
}
BESIDE = {"row", "column", "rtt", "latency", "bandwidth", "dev", "standard", "of", "all", "grand"}
UNIT_WORDS = {"ms", "s", "us", "gbps", "mbps"}
"""Rows and columns that sum others up are called by words of these, one of the first at least."""


def read_table(text: str, unit: str | None = None) -> Findings:
    """A table of latencies, of bandwidths or of both.

    Parameters
    ----------
    text
        CSV. With the columns ``source`` and ``destination`` it has a row a pair, and any of the
        columns of a network file; else it is a matrix, rows are sources, whose corner cell says
        what the numbers are (``rtt_ms``). One triangle of a matrix alone counts for both ways.
    unit
        What the numbers of a matrix are, where its corner does not say.

    Returns
    -------
    Findings
        What it says; empty cells and ``-`` say nothing.

    Raises
    ------
    NetworkError
        It is neither, in one line.
    """
    table = parse_csv(text, error=NetworkError)
    if not table.columns:
        raise NetworkError("is empty; give a header and a row a pair, or a matrix")
    if all(end in table.columns for end in ENDS):
        return _pairs(table.columns, ((f"line {line}", row) for line, row in table.rows))
    return _matrix(table, unit)


def read_records(records: Sequence[Mapping[str, Any]]) -> Findings:
    """A row a pair, as objects of JSON with the columns of a CSV file."""
    return _pairs(list(records[0]), ((f"record {k}", row) for k, row in enumerate(records, 1)))


def _pairs(names: Sequence[str], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Findings:
    found = Findings()
    columns = [name for name in names if name in UNITS]
    for kind, known in (("latency", LATENCY_COLUMNS), ("bandwidth", BANDWIDTH_COLUMNS)):
        if len([name for name in columns if name in known]) > 1:
            raise NetworkError(f"has several columns of {kind}; keep one of {', '.join(known)}")
    if not columns:
        raise NetworkError(f"has no column of numbers; name one of {', '.join(UNITS)}")
    for where, row in rows:
        ends = ["" if (end := row.get(name)) is None else str(end) for name in ENDS]
        for column in columns:
            _set(found, column, ends[0], ends[1], row.get(column), where)
    return found


def _matrix(table: CsvTable, unit: str | None) -> Findings:
    corner, names = table.columns[0], table.columns[1:]
    unit = corner if corner in UNITS else unit
    if len(names) < 2:
        raise NetworkError(
            f"has a header of {len(table.columns)} cells: {corner[:40]!r}; separate cells by "
            "commas, and name two devices at least"
        )
    if unit not in UNITS:
        raise NetworkError(
            f"has neither columns source and destination nor a unit in its corner, found "
            f"{corner!r}; write one of {', '.join(UNITS)} there"
        )
    sources = [row.cells[corner] for row in table.rows]
    require_devices(names, sources)
    found = Findings()
    for line, row in table.rows:
        for name in names:
            if name != row[corner]:
                _set(found, unit, row[corner], name, row[name], f"line {line}, column {name!r}")
    if len(names) > 2 and sorted(sources) == sorted(names):
        found.mirror_half(names)
    return found


def _is_summary(name: str) -> bool:
    words = set(re.findall(r"[^\W\d_]+", name.lower()))
    if re.fullmatch(r"p\d\d(\.\d+)?", name.lower()):
        return True
    digits = any(letter.isdigit() for letter in name)
    return bool(words & SUMMARIES) and words <= SUMMARIES | BESIDE | UNIT_WORDS and not digits


def require_devices(columns: Sequence[str], rows: Sequence[str]) -> None:
    """Refuse a matrix whose rows and columns are not the same devices, or have a summary."""
    for what, names in (("column", columns), ("row", rows)):
        summary = next((name for name in names if _is_summary(name)), None)
        if summary is not None:
            raise NetworkError(
                f"{what} {summary!r} is a figure over all devices and no device; take it out, or "
                "rename the device"
            )
    twice = next((name for k, name in enumerate(rows) if name in rows[:k]), None)
    if twice is not None:
        raise NetworkError(f"row {twice!r} is given twice; keep one of them")
    known = set(columns)
    strange = next((name for name in rows if name and name not in known), None)
    if strange is not None:
        without = next((name for name in columns if name not in set(rows)), None)
        also = "" if without is None else f", and column {without!r} has no row"
        raise NetworkError(
            f"row {strange!r} has no column{also}; call each device the same along both sides"
        )


def _set(found: Findings, unit: str, source: str, destination: str, cell: Any, where: str) -> None:
    value = si_value(cell, unit, where)
    if math.isnan(value):
        return
    try:
        if unit in LATENCY_COLUMNS:
            found.set_latency(source, destination, value)
        else:
            found.set_bandwidth(source, destination, value)
    except NetworkError as error:
        raise NetworkError(f"{where}: {error}") from None
