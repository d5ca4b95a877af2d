"""Reads CSV files with a header and rows of exactly its columns.

Ambiguous files (decimal commas, repeated columns) are refused.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from planner.utils.input_files import read_text
from planner.utils.text import printable

Error = type[ValueError]
OTHER_SEPARATORS = (";", "\t")
COMMENT = re.compile(r"^[ \t]*#([ \t].*)?$", re.MULTILINE)
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE | re.ASCII)
DECIMAL_COMMA = re.compile(r"[+-]?\d[\d.]*(,\d+)+", re.ASCII)
WITH_UNIT = re.compile(
    rf"{NUMBER.pattern}\s*[a-zµμ%$€£/][\w/$€£]*|[$€£]\s*{NUMBER.pattern}", re.IGNORECASE
)
BROKEN_NUMBER = re.compile(r"(?<![^,])[+-]?\d+,\d+(?![^,])", re.ASCII)
"""Two cells that may be a number with a decimal comma."""


class CsvRow(NamedTuple):
    """A row: its line in the file, and its stripped cells by column."""

    line: int
    cells: dict[str, str]


class CsvTable(NamedTuple):
    """Unique column names in order, and the rows that are not blank."""

    columns: tuple[str, ...]
    rows: tuple[CsvRow, ...]


def read_csv(path: str | Path, *, error: Error = ValueError) -> CsvTable:
    """Read a CSV file; errors are one line that starts with the path."""
    text = read_text(path, error=error)
    try:
        return parse_csv(text, error=error)
    except error as cause:
        raise error(f"{path}: {cause}") from None


def parse_csv(text: str, *, error: Error = ValueError) -> CsvTable:
    """Parse comma-separated text with a header; lines that begin with ``#`` and a blank are
    comments.
    """
    reader = csv.reader(io.StringIO(COMMENT.sub("", text)), skipinitialspace=True)
    lines: list[tuple[int, list[str]]] = []
    first = 1  # line of a row
    try:
        for row in reader:
            if any("\n" in cell for cell in row):
                raise error(f"line {first}: a cell has a line break; close its quotes")
            first = reader.line_num + 1
            cells = [cell.strip() for cell in row]
            if any(cells):
                lines.append((reader.line_num, cells))
    except csv.Error as cause:
        raise error(f"line {reader.line_num}: is not CSV ({cause}); correct the file") from None
    if lines and lines[0][1] == ["sep=", ""]:
        # byte order mark of spreadsheets
        del lines[0]
    if not lines:
        return CsvTable((), ())
    columns = lines[0][1]
    if len(columns) == 1:
        for separator in OTHER_SEPARATORS:
            if separator in columns[0]:
                raise error(
                    f"has {separator!r} between its columns; give commas: separate cells by "
                    "commas, and write decimals with a point"
                )
    for line, cells in lines[1:]:
        if len(cells) != len(columns):
            remedy = f"line {lines[0][0]} must be the header"
            if len(columns) > 1:
                remedy = _cells_remedy(cells, len(columns))
            raise error(f"line {line} has {len(cells)} cells, the header {len(columns)}; {remedy}")
    # spreadsheets write empty columns
    used = max((k for _, cells in lines for k, cell in enumerate(cells) if cell), default=0) + 1
    columns = columns[:used]
    for k, name in enumerate(columns):
        if name in columns[:k]:
            named = f"column {printable(name)!r} is named twice" if name else "two have no name"
            raise error(f"line {lines[0][0]}: {named}; keep one of the columns")
    return CsvTable(
        tuple(columns),
        tuple(CsvRow(line, dict(zip(columns, cells, strict=False))) for line, cells in lines[1:]),
    )


def _cells_remedy(cells: Sequence[str], expected: int) -> str:
    if len(cells) < expected:
        return "fill the row"
    if not any(cells[expected:]):
        return "take out the comma at its end"
    if len(BROKEN_NUMBER.findall(",".join(cells))) >= len(cells) - expected:
        return "write decimals with a point"
    return "take out what is too much, and put a cell that has a comma in quotes"


def number_in(cell: str) -> float:
    """The number in a cell; NaN for any other text."""
    return float(cell) if NUMBER.fullmatch(cell) else math.nan


def number_remedy(cell: str, otherwise: str) -> str:
    """Remedy for a cell that is not a number."""
    if DECIMAL_COMMA.fullmatch(cell):
        return "write decimals with a point, and thousands without commas"
    if WITH_UNIT.fullmatch(cell) and not NUMBER.fullmatch(cell):
        return "give the number alone, in the unit that the column's name says"
    return otherwise
