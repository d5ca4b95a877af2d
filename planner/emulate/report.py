"""Emulation results as text and as data."""

from __future__ import annotations

from typing import Any

from planner.emulate.comparison import Pair
from planner.emulate.emulation import Emulation
from planner.simulator.timeline import NAMES

WORST = 3
"""Number of operations and links that are printed."""


def lines_of(emulation: Emulation) -> list[str]:
    """Format step times, the most delayed operations and links, and switch statistics."""
    c = emulation.comparison
    lines = [f"{'seconds':<22}{'predicted':>11}{'executed':>11}{'executed/predicted':>20}"]
    for name in ("pipeline", "averaging", "step"):
        lines.append(_line(name, getattr(c, name)))
    for op in c.operations[:WORST]:
        operation = NAMES[op.kind]
        if op.kind in "FB":
            operation += " pass"
        if op.microbatch >= 0:
            operation += f" of microbatch {op.microbatch}"
        lines.append(f"{operation} on {op.device} ends")
        lines.append(f"{_line('', op.end)}   {op.late_s:+.4f} s")
    for link in c.links[:WORST]:
        lines.append(
            f"{_line(f'{link.source} to {link.destination} busy', link.busy)}   arrivals "
            f"{link.late_s:+.4f} s"
        )
    carried, settings = emulation.carried, emulation.settings
    lines.append(
        f"speed {settings.speed:g}, shrink {settings.shrink:g}; {carried.packets} packets, "
        f"{carried.lost} dropped, delivered {carried.late_s * 1e3:.2f} ms late (at most "
        f"{carried.most_late_s * 1e3:.1f} ms); CPUs {emulation.busy:.0%} busy"
    )
    return lines


def _line(name: str, pair: Pair) -> str:
    executed = "-" if pair.executed_s is None else f"{pair.executed_s:.4f}"
    ratio = "-" if pair.ratio is None else f"{pair.ratio:.3f}"
    return f"{name:<22} {pair.predicted_s:>10.4f} {executed:>10} {ratio:>19}"


def data_of(emulation: Emulation) -> dict[str, Any]:
    """Return all results, JSON-ready.

    Returns
    -------
    dict
        Comparison, settings, and statistics of the switch.
    """
    settings, carried = emulation.settings, emulation.carried
    return {
        **emulation.comparison.to_dict(),
        "speed": settings.speed,
        "shrink": settings.shrink,
        "real_compute": settings.real_compute,
        "rest_steps": settings.rest,
        "chained_steps": settings.steps,
        "packets": carried.packets,
        "lost_packets": carried.lost,
        "late_s": carried.late_s,
        "most_late_s": carried.most_late_s,
        "processors_busy": emulation.busy,
        "warnings": emulation.warnings(),
    }
