"""Tables of measurements as CSV: a row a pair, or a matrix with devices along both sides."""

from __future__ import annotations

import csv
import io
import math

from planner.network.error import NetworkError
from planner.network.formats import BANDWIDTH_COLUMNS, LATENCY_COLUMNS
from planner.network.measured.findings import Findings

UNITS = LATENCY_COLUMNS | BANDWIDTH_COLUMNS
ENDS = ("source", "destination")


def read_table(text: str, unit: str | None = None) -> Findings:
    """A table of latencies, of bandwidths or of both.

    Parameters
    ----------
    text
        CSV. With the columns ``source`` and ``destination`` it has a row a pair, and any of the
        columns of a network file; else it is a matrix, rows are sources, whose corner cell says
        what the numbers are (``rtt_ms``).
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
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if any(cell.strip() for cell in row)]
    except csv.Error as error:
        raise NetworkError(f"is no CSV ({error}); correct the file") from None
    if not rows:
        raise NetworkError("is empty; give a header and a row a pair, or a matrix")
    header = [cell.strip() for cell in rows[0]]
    body = [[cell.strip() for cell in row] for row in rows[1:]]
    if all(end in header for end in ENDS):
        return _pairs(header, body)
    return _matrix(header, body, unit)


def _pairs(header: list[str], body: list[list[str]]) -> Findings:
    found = Findings()
    columns = [name for name in header if name in UNITS]
    for kind, known in (("latency", LATENCY_COLUMNS), ("bandwidth", BANDWIDTH_COLUMNS)):
        if len([name for name in columns if name in known]) > 1:
            raise NetworkError(f"has several columns of {kind}; keep one of {', '.join(known)}")
    if not columns:
        raise NetworkError(f"has no column of numbers; name one of {', '.join(UNITS)}")
    for line, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise NetworkError(
                f"line {line} has {len(row)} cells, the header {len(header)}; fill the row"
            )
        cells = dict(zip(header, row, strict=True))
        source, destination = (cells.get(end, "") for end in ENDS)
        for column in columns:
            _set(found, column, source, destination, cells.get(column, ""), f"line {line}")
    return found


def _matrix(header: list[str], body: list[list[str]], unit: str | None) -> Findings:
    corner = header[0]
    unit = corner if corner in UNITS else unit
    if len(header) < 3:
        raise NetworkError(
            f"has a header of {len(header)} cells: {header[0][:40]!r}; separate cells by commas, "
            "and name two devices at least"
        )
    if unit not in UNITS:
        raise NetworkError(
            f"has neither columns source and destination nor a unit in its corner, found "
            f"{corner!r}; write one of {', '.join(UNITS)} there"
        )
    names = header[1:]
    found = Findings()
    for line, row in enumerate(body, start=2):
        if len(row) != len(header):
            raise NetworkError(
                f"line {line} has {len(row)} cells, the header {len(header)}; fill the row"
            )
        for name, cell in zip(names, row[1:], strict=True):
            if name != row[0]:
                _set(found, unit, row[0], name, cell, f"line {line}")
    return found


def _set(found: Findings, unit: str, source: str, destination: str, cell: str, where: str) -> None:
    if cell in ("", "-"):
        return
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise NetworkError(f"{where}: {unit} is {cell!r}; give a number, or leave it empty")
    try:
        if unit in LATENCY_COLUMNS:
            found.set_latency(source, destination, number * LATENCY_COLUMNS[unit])
        else:
            found.set_bandwidth(source, destination, number * BANDWIDTH_COLUMNS[unit])
    except NetworkError as error:
        raise NetworkError(f"{where}: {error}") from None
