"""Marks in network files of latencies and bandwidths that were assumed, not measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from planner.network.error import NetworkError
from planner.network.formats import ASSUMED_COLUMN, end_columns
from planner.network.network import Network
from planner.utils.csv_table import parse_csv
from planner.utils.input_files import parse_json, read_text

Pair = tuple[str, str]
FORMS = {"latency": (1e3, "ms"), "bandwidth": (8e-9, "Gb/s")}
"""Factor from SI and unit in messages, by the word of the mark."""


def is_assumed(row: Mapping[str, Any], quantity: str) -> bool:
    """Whether a row of a CSV file says that its latency or bandwidth was assumed."""
    return quantity in str(row.get(ASSUMED_COLUMN, "")).split()


def assumed_in_json(data: Mapping[str, Any], quantity: str) -> set[Pair]:
    """Pairs of a JSON network whose latency or bandwidth was assumed."""
    marks = data.get(ASSUMED_COLUMN)
    pairs = marks.get(quantity, []) if isinstance(marks, dict) else []
    return {(str(pair[0]), str(pair[1])) for pair in pairs if len(pair) == 2}


def assumed_sentences(name: str) -> list[str]:
    """Sentences on the assumed links of a network file; none for other networks and names."""
    path = Path(name)
    kind = path.suffix.lower()
    if kind not in (".csv", ".json") or not path.is_file():
        return []
    text = read_text(path, error=NetworkError)
    if ASSUMED_COLUMN not in text:
        return []
    marked = _marked_in_json(text, path) if kind == ".json" else _marked_in_csv(text)
    network = Network.load(path)
    sentences = []
    for quantity, (factor, unit) in FORMS.items():
        pairs = marked[quantity]
        if not pairs:
            continue
        indices = [(network.index_of(a), network.index_of(b)) for a, b in sorted(pairs)]
        array = network.latency_s if quantity == "latency" else network.bandwidth_bytes_per_s
        values: NDArray[np.float64] = np.unique([array[pair] for pair in indices]) * factor
        low, high = float(values[0]), float(values[-1])
        amount = f"{low:.4g} {unit}" if low == high else f"{low:.4g} to {high:.4g} {unit}"
        n = len(network)
        verb = "has" if len(indices) == 1 else "have"
        sentences.append(
            f"{len(indices)} of {n * (n - 1)} pairs in {name} {verb} an assumed {quantity} of "
            f"{amount}"
        )
    return sentences


def _marked_in_json(text: str, path: Path) -> dict[str, set[Pair]]:
    data = parse_json(text, path, error=NetworkError)
    return {
        quantity: assumed_in_json(data, quantity) if isinstance(data, dict) else set()
        for quantity in FORMS
    }


def _marked_in_csv(text: str) -> dict[str, set[Pair]]:
    table = parse_csv(text, error=NetworkError)
    source, destination = end_columns(table.columns)
    if source is None or destination is None:
        return {quantity: set() for quantity in FORMS}
    rows = [row for _, row in table.rows]
    return {
        quantity: {(row[source], row[destination]) for row in rows if is_assumed(row, quantity)}
        for quantity in FORMS
    }
