"""Result rows, one per run of a method on an instance with a seed, as JSON lines."""

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
    """Result of one run.

    Attributes
    ----------
    instance, problem
        Id of the instance, and hash of its problem.
    method, kind
        Name and origin of the method.
    seed, effort
        Arguments of the run.
    accepted
        Whether the checker accepted the solution.
    reason
        Why it was rejected; otherwise empty.
    objective
        Recomputed objective; None if nothing was accepted.
    bound, bound_recomputed, bound_basis
        Bound of the method; None without one.
    seconds
        Running time of the method alone.
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
        """Identity of the run."""
        return self.instance, self.problem, self.method, self.seed, self.effort

    def line(self) -> str:
        """Format as a line of the file."""
        return json.dumps(asdict(self), allow_nan=False)


def append_row(path: Path, row: BenchRow) -> None:
    """Append a row to the file at once, so that finished runs are not lost."""
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(row.line() + "\n")
    except OSError as error:  # the error of a full disk has no file name
        raise OSError(error.errno, error.strerror, str(path)) from None


def read_rows(path: Path) -> list[BenchRow]:
    """Read the rows of a file, without an incomplete last line."""
    if not path.exists():
        return []
    rows: dict[Key, BenchRow] = {}
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = _row(json.loads(line))
        except (ValueError, TypeError):
            if number == len(lines):
                break
            raise ValueError(
                f"{path}: line {number} is not a row of planner bench; remove it or use another "
                "file"
            ) from None
        rows[row.key] = row
    return list(rows.values())


def _row(data: Any) -> BenchRow:
    if not isinstance(data, dict) or set(data) != {field.name for field in fields(BenchRow)}:
        raise ValueError
    for name in ("objective", "bound"):
        if data[name] is not None and not math.isfinite(data[name]):
            raise ValueError
    row = BenchRow(**data)
    texts = (row.instance, row.problem, row.method, row.kind)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError
    return row


def rewrite_rows(path: Path, rows: Iterable[BenchRow]) -> None:
    """Rewrite the file, so that new rows do not follow an incomplete line."""
    from planner.utils.atomic_write import write_text

    write_text(path, "".join(row.line() + "\n" for row in rows))
