"""One row a run: what a method made of an instance with a seed, kept as JSON lines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

Key = tuple[str, str, str, int, float]


@dataclass(frozen=True)
class BenchRow:
    """One run.

    Attributes
    ----------
    instance, problem
        Its id, and its problem's hash.
    method, kind
        Name, and where it comes from.
    seed, effort
        That it ran with.
    accepted
        Whether the checker accepts the answer.
    reason
        Why not; empty where it does.
    objective
        From the definitions; None where nothing was accepted.
    bound, bound_recomputed, bound_basis
        That the method proved; None where it proves none.
    seconds
        Of the method alone.
    """

    instance: str
    problem: str
    method: str
    kind: str
    seed: int
    effort: float
    accepted: bool
    reason: str
    objective: float | None
    bound: float | None
    bound_recomputed: bool
    bound_basis: str
    seconds: float

    @property
    def key(self) -> Key:
        """What tells runs apart."""
        return self.instance, self.problem, self.method, self.seed, self.effort

    def line(self) -> str:
        """As a line of the file."""
        return json.dumps(asdict(self), allow_nan=False)


def append_row(path: Path, row: BenchRow) -> None:
    """Add a line at once, so that what is done is kept whatever comes."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(row.line() + "\n")
    except OSError as error:  # a full disk is told without its file's name
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_rows(path: Path) -> list[BenchRow]:
    """Rows of a file; a last line that was cut short is left out."""
    if not path.exists():
        return []
    found: dict[Key, BenchRow] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = _row(json.loads(line))
        except (ValueError, TypeError):
            if number == len(lines):
                break
            raise ValueError(
                f"{path}: line {number} is no row of planner bench; remove it, or name another file"
            ) from None
        found[row.key] = row
    return list(found.values())


def _row(data: Any) -> BenchRow:
    if not isinstance(data, dict) or set(data) != {one.name for one in fields(BenchRow)}:
        raise ValueError
    for name in ("objective", "bound"):
        if data[name] is not None and not math.isfinite(data[name]):
            raise ValueError
    row = BenchRow(**data)
    if not all(isinstance(one, str) for one in (row.instance, row.problem, row.method, row.kind)):
        raise ValueError
    return row


def mend(path: Path, rows: Iterable[BenchRow]) -> None:
    """Write the rows anew, so that further ones do not follow half a line."""
    from planner.utils.atomic_write import write_text

    write_text(path, "".join(row.line() + "\n" for row in rows))
