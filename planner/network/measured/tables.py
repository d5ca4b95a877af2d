"""CSV tables of measurements: one row per pair, or a matrix of devices."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from planner.network.assumed import is_assumed
from planner.network.error import NetworkError
from planner.network.formats import (
    BANDWIDTH_COLUMNS,
    ENDS,
    LATENCY_COLUMNS,
    UNITS,
    end_columns,
    misnamed,
    require_unique,
    si_value,
    with_units,
)
from planner.network.measured.findings import Measurements
from planner.network.summaries import refuse_summary
from planner.utils.csv_table import CsvTable, number_in, parse_csv
from planner.utils.text import joined, name_of
from planner.utils.validate import short_repr


def read_table(text: str, unit: str | None = None) -> Measurements:
    """A table of latencies, of bandwidths, or of both."""
    table = parse_csv(text, error=NetworkError)
    if not table.columns:
        raise NetworkError("is empty; give a header and a row a pair, or a matrix")
    missing = [
        end for end, column in zip(ENDS, end_columns(table.columns), strict=True) if column is None
    ]
    if not missing:
        return _pairs(table.columns, ((f"line {line}", row) for line, row in table.rows))
    hints = [misnamed(table.columns, [end]) for end in missing]
    if all(hints) and table.columns[0] not in UNITS:
        raise NetworkError(
            f"has no column {' and '.join(missing)}{''.join(hints)}; correct the header"
        )
    return _matrix(table, unit)


def read_records(records: Sequence[Mapping[str, Any]]) -> Measurements:
    """JSON objects, one per pair, with the columns of a CSV file."""
    names = list(dict.fromkeys(name for row in records for name in row))
    return _pairs(names, ((f"record {k}", row) for k, row in enumerate(records, 1)))


def _pairs(names: Sequence[str], rows: Iterable[tuple[str, Mapping[str, Any]]]) -> Measurements:
    measurements = Measurements()
    require_unique(names)
    columns = [name for name in names if name in UNITS]
    for kind, known, stems in (
        ("latency", LATENCY_COLUMNS, ("lat", "rtt")),
        ("bandwidth", BANDWIDTH_COLUMNS, ("band", "bw")),
    ):
        own = [name for name in columns if name in known]
        if len(own) > 1:
            raise NetworkError(f"has several columns of {kind}; keep one of {', '.join(known)}")
        likely = [n for n in names if n.lower().startswith(stems) or with_units(n, known)]
        if columns and not own and (unknown := misnamed(likely, known)):
            raise NetworkError(f"has no column of {kind} with a unit{unknown}; correct the header")
    if not columns:
        raise NetworkError(
            f"has no column of numbers, found {joined(names)}{misnamed(names, UNITS)}; name one of "
            f"{', '.join(UNITS)}"
        )
    columns_of_ends = [found or end for found, end in zip(end_columns(names), ENDS, strict=True)]
    for where, row in rows:
        ends = [name_of(row.get(name)) for name in columns_of_ends]
        for end, name in zip(ENDS, ends, strict=True):
            refuse_summary(name, f"{where}: {end}")
        for column in columns:
            if is_assumed(row, "latency" if column in LATENCY_COLUMNS else "bandwidth"):
                continue  # no measurement: it is assumed again, or measured in another file
            _set(measurements, column, Cell(ends[0], ends[1], row.get(column), where))
    return measurements


def _matrix(table: CsvTable, unit: str | None) -> Measurements:
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
            f"{corner!r}; write one of {', '.join(UNITS)} there, or say it with --unit"
        )
    sources = [row.cells[corner] for row in table.rows]
    require_devices(names, sources)
    cells = [
        Cell(row[corner], name, row[name], f"line {line}, column {name!r}")
        for line, row in table.rows
        for name in names
    ]
    return read_cells(cells, names, unit)


class Cell(NamedTuple):
    """A cell of a matrix, with its position for messages."""

    source: str
    destination: str
    value: Any
    where: str


def read_cells(cells: Sequence[Cell], names: Sequence[str], unit: str) -> Measurements:
    """A matrix of devices. One triangle may be empty, or zero as NumPy writes it."""
    measurements = Measurements()
    zeros = {(c.source, c.destination) for c in cells if c.source != c.destination and _is_0(c)}
    upper = set(combinations(names, 2))
    half = zeros if zeros in (upper, {(b, a) for a, b in upper}) else set()
    for cell in cells:
        pair = (cell.source, cell.destination)
        if cell.source == cell.destination or pair in half:
            continue
        if pair in zeros and unit in LATENCY_COLUMNS:
            raise NetworkError(
                f"{cell.where}: {unit} is {short_repr(cell.value)}, between two devices; leave "
                "it empty if it was not measured"
            )
        _set(measurements, unit, cell)
    if len(names) > 2:
        measurements.mirror_half(names)
    return measurements


def _is_0(cell: Cell) -> bool:
    value = number_in(cell.value) if isinstance(cell.value, str) else cell.value
    return isinstance(value, (int, float)) and value == 0


def require_devices(columns: Sequence[str], rows: Sequence[str]) -> None:
    """Refuse a matrix whose rows and columns differ, or that contains a summary."""
    for axis, names in (("column", columns), ("row", rows)):
        for name in names:
            refuse_summary(name, axis)
    twice = next((name for k, name in enumerate(rows) if name in rows[:k]), None)
    if twice is not None:
        raise NetworkError(f"row {twice!r} is given twice; keep one of them")
    column_names = set(columns)
    strange = next((name for name in rows if name and name not in column_names), None)
    if strange is not None:
        missing_row = next((name for name in columns if name not in set(rows)), None)
        also = "" if missing_row is None else f", and column {missing_row!r} has no row"
        raise NetworkError(
            f"row {strange!r} has no column{also}; call each device the same along both sides"
        )


def _set(measurements: Measurements, unit: str, cell: Cell) -> None:
    value = si_value(cell.value, unit, cell.where)
    if math.isnan(value):
        return
    try:
        if unit in LATENCY_COLUMNS:
            measurements.set_latency(cell.source, cell.destination, value)
        else:
            measurements.set_bandwidth(cell.source, cell.destination, value)
    except NetworkError as error:
        raise NetworkError(f"{cell.where}: {error}") from None
