"""HTML representation of a plan in notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from planner.utils.html import boxed, line, table

MAX_NAMES = 12
"""Largest number of devices named per stage."""


def plan_html(
    title: str,
    stages: Iterable[tuple[str, str, Sequence[str]]],
    decisions: Iterable[tuple[str, str]],
) -> str:
    """A title and two tables."""
    rows = []
    for j, (layers, recomputed, names) in enumerate(stages):
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        text = ", ".join(names[:MAX_NAMES]) + more
        rows.append([str(j), *map(escape, (layers, recomputed, text))])
    return boxed(
        line(title),
        table(["what", "decided"], [[escape(a), escape(b)] for a, b in decisions]),
        table(["stage", "layers", "recomputed layers", "devices"], rows),
    )
