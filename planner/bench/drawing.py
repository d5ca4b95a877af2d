"""Performance profiles as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from planner.bench.summary import MethodStanding, profile

WIDE, HIGH, LEFT, RIGHT, BELOW, ABOVE = 640, 260, 44, 26, 30, 10
MIN_GAP, MAX_GAP = 1e-4, 10.0
"""Ends of the gap axis; smaller gaps are drawn at the left end."""
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee8866", "#999999")
DASHES = ("", "7 3", "2 3", "9 3 2 3")


def profile_svg(standings: Sequence[MethodStanding]) -> str:
    """Draw one step line per method over a logarithmic gap axis."""
    marks = []
    for tick in (MIN_GAP, 1e-3, 1e-2, 1e-1, 1.0, MAX_GAP):
        x, label = _x(tick), f"{100 * tick:g}%"
        marks.append(
            f'<line class="grid" x1="{x:.1f}" y1="{ABOVE}" x2="{x:.1f}" y2="{HIGH - BELOW}"/>'
            f'<text x="{x:.1f}" y="{HIGH - 10}" text-anchor="middle">{label}</text>'
        )
    for fraction in (0.0, 0.5, 1.0):
        y = _y(fraction)
        marks.append(
            f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{WIDE - RIGHT}" y2="{y:.1f}"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{fraction:.0%}</text>'
        )
    # draw the best method last, on top
    lines = [_line(s, k) for k, s in reversed(list(enumerate(standings)))]
    return (
        f'<svg viewBox="0 0 {WIDE} {HIGH}" role="img" aria-label="performance profile">'
        f"{''.join(marks)}{''.join(lines)}</svg>"
    )


def key(method: str, number: int) -> str:
    """Draw a method's line and name."""
    return (
        f'<span class="line"><svg viewBox="0 0 30 8" aria-hidden="true"><path d="M1 4H29" '
        f"{_stroke(number)}/></svg>{escape(method)}</span> "
    )


def _line(standing: MethodStanding, number: int) -> str:
    path = f"M{LEFT} {_y(0.0):.1f}"
    for gap, fraction in profile(standing):
        path += f"H{_x(gap):.1f}V{_y(fraction):.1f}"
    name = f"<title>{escape(standing.method)}</title>"
    return f'<path d="{path}H{WIDE - RIGHT}" {_stroke(number)}>{name}</path>'


def _stroke(number: int) -> str:
    colour = COLOURS[number % len(COLOURS)]
    dash = DASHES[number // 2 % len(DASHES)]
    return f'fill="none" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash}"'


def _x(gap: float) -> float:
    fraction = math.log(min(max(gap, MIN_GAP), MAX_GAP) / MIN_GAP) / math.log(MAX_GAP / MIN_GAP)
    return LEFT + fraction * (WIDE - RIGHT - LEFT)


def _y(fraction: float) -> float:
    return HIGH - BELOW - fraction * (HIGH - BELOW - ABOVE)
