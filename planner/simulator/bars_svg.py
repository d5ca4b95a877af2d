"""Coloured bars over time as a small SVG."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import pairwise

import numpy as np

Bar = tuple[str, float, float]
"""Kind, start and end in seconds."""
WIDTH, ROW, LABEL = 720, 14, 130
"""Width of the bars, height of a row and width of a name, in pixels."""
LETTERS = 20
"""Longest name drawn; a longer one is cut, with the whole name as the row's tooltip."""


def bars_svg(
    names: Sequence[str],
    rows: Sequence[Iterable[Bar]],
    colours: Mapping[str, str],
    words: Mapping[str, str],
) -> str:
    """An SVG with one row per name; a pixel has the colour of the kind that fills most of it.

    A row has at most `WIDTH` segments, however many bars there are.
    """
    held = [list(row) for row in rows]
    end_s = max((end for row in held for _, _, end in row), default=0.0)
    if end_s <= 0:
        return ""
    kinds = [k for k in colours if any(kind == k for row in held for kind, _, _ in row)]
    parts = []
    for r, (name, row) in enumerate(zip(names, held, strict=True)):
        y = r * ROW
        text = name if len(name) <= LETTERS else f"{name[: LETTERS - 1]}…"
        parts.append(
            f'<text x="{LABEL - 6}" y="{y + ROW - 4}" text-anchor="end"><title>{escape(name)}'
            f"</title>{escape(text)}</text>"
        )
        for kind, path in zip(kinds, _paths(row, kinds, end_s, y), strict=True):
            if path:
                parts.append(f'<path stroke="{escape(colours[kind])}" d="{path}"/>')
    base = len(held) * ROW + ROW
    x = LABEL
    for kind in kinds:
        parts.append(f'<path stroke="{escape(colours[kind])}" d="M{x} {base - 4}h10"/>')
        parts.append(f'<text x="{x + 14}" y="{base}">{escape(words[kind])}</text>')
        x += 30 + 7 * len(words[kind])
    parts.append(
        f'<text x="{LABEL + WIDTH}" y="{base}" text-anchor="end">{end_s:.4g} seconds</text>'
    )
    size = f"{LABEL + WIDTH} {base + 6}"
    return (
        f'<svg viewBox="0 0 {size}" role="img" aria-label="timeline" style="max-width:100%;'
        f'font:10px sans-serif" fill="currentColor" stroke-width="{ROW - 4}">{"".join(parts)}</svg>'
    )


def _paths(row: Sequence[Bar], kinds: Sequence[str], end_s: float, y: int) -> list[str]:
    """Per kind, an SVG path of the pixels of which it fills most."""
    filled = np.zeros((len(kinds) + 1, WIDTH))
    edges = np.arange(WIDTH + 1.0)
    for kind, start, end in row:
        a, b = start / end_s * WIDTH, end / end_s * WIDTH
        first, last = int(a), min(int(np.ceil(b)), WIDTH)
        left = np.maximum(edges[first:last], a)
        filled[kinds.index(kind) + 1, first:last] += (
            np.minimum(edges[first + 1 : last + 1], b) - left
        )
    filled[0] = 1 - filled[1:].sum(axis=0)
    most = filled.argmax(axis=0)
    ends = [0, *(np.flatnonzero(np.diff(most)) + 1).tolist(), WIDTH]
    paths = ["" for _ in kinds]
    for start, stop in pairwise(ends):
        if most[start]:
            paths[most[start] - 1] += f"M{LABEL + start} {y + ROW // 2}h{stop - start}"
    return paths
