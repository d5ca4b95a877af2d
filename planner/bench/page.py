"""Results of a run as one HTML page.

The page loads nothing from elsewhere, and every string from input files is escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

import planner.report
from planner.bench.drawing import key, profile_svg
from planner.bench.problem import ProblemFamily
from planner.bench.summary import MethodStanding, Summary, percent
from planner.bench.text import HEADS, NOTE, SPEED, contradictions, count_of

GENERATOR = '<meta name="generator" content="planner bench">'
"""Tag that identifies pages written by this command."""
HERE = Path(__file__).parent
STYLE = Path(planner.report.__path__[0]) / "page.css"
Cell = tuple[str, float | None]
"""Text of a cell and its sort key; None: sort by the text."""


def page(summary: Summary, title: str, description: Sequence[str]) -> str:
    """Render the page."""
    style = STYLE.read_text() + (HERE / "page.css").read_text()
    sections = [
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">',
        GENERATOR,
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; script-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{style}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        *map(_note, description),
        *(
            f'<p class="wrong" role="alert">{escape(message)}</p>'
            for message in contradictions(summary)
        ),
        _head(summary),
        f"<section><h2>Quality</h2>{_note(NOTE)}",
        *(_family(summary, family) for family in summary.families),
        "</section>",
        f"<section><h2>Speed</h2>{_note(SPEED)}{_speed(summary)}</section>",
        f"<section><h2>Best known</h2>{_best_known_table(summary)}</section>",
        f"<section><h2>All rows</h2><details><summary>{len(summary.rows)} rows</summary>"
        f"{_rows(summary)}</details></section>",
        f"<script>{(HERE / 'page.js').read_text()}</script></body></html>\n",
    ]
    return "".join(sections)


def _head(summary: Summary) -> str:
    refused = sum(not row.accepted for row in summary.rows)
    closed = sum(k.gap is not None and k.gap <= 1e-6 for k in summary.known.values())
    new = sum(k.improved or k.recorded is None for k in summary.known.values())
    cells = [
        ("instances", len(summary.known)),
        ("methods", sum(len(standings) for standings in summary.families.values())),
        ("rows", len(summary.rows)),
        ("refused", refused),
        ("proven optimal", closed),
        ("better than on record", new),
    ]
    inner = "".join(f"<div><dt>{escape(a)}</dt><dd>{b}</dd></div>" for a, b in cells)
    return f'<dl class="head">{inner}</dl>'


def _family(summary: Summary, family: ProblemFamily) -> str:
    standings = summary.families[family]
    rows = [[(s.method, None), (s.kind, None), *_numbered(s)] for s in standings]
    names = [name for name, k in summary.known.items() if k.family is family]
    each = [
        [
            (name, None),
            *((percent(g) if (g := s.gaps.get(name)) is not None else "-", g) for s in standings),
        ]
        for name in names
    ]
    keys = "".join(key(s.method, k) for k, s in enumerate(standings))
    picture = (
        f'<figure><div class="wide">{profile_svg(standings)}</div><figcaption>'
        f"{keys}"
        f"{_note('Part of the instances that a method solves within a gap to the best known.')}"
        "</figcaption></figure>"
    )
    return (
        f"<h3>{escape(str(family))}: {count_of(len(names))}</h3>"
        + _table(HEADS, rows)
        + picture
        + "<details><summary>Gap to the best known, by instance</summary>"
        + _table(("instance", *(s.method for s in standings)), each)
        + "</details>"
    )


def _numbered(standing: MethodStanding) -> list[Cell]:
    """Return the cells of a method with their sort keys."""
    solved = standing.solved / standing.asked
    cells: list[Cell] = []
    for k, cell in enumerate(standing.words()):
        number = solved if k == 0 else float(standing.wins) if k == 1 else None
        if number is None and cell != "-":
            number = float(cell[:-1]) if cell.endswith("%") else 100 * float(cell.split()[0])
        cells.append((cell, number))
    return cells


def _speed(summary: Summary) -> str:
    rows: list[list[Cell]] = [
        [
            (str(family), None),
            (s.method, None),
            ("-" if s.over_ours is None else f"{s.over_ours:.3g}", s.over_ours),
        ]
        for family, standings in summary.families.items()
        for s in standings
    ]
    return _table(("family", "method", "time over ours"), rows)


def _best_known_table(summary: Summary) -> str:
    rows: list[list[Cell]] = []
    for name, k in summary.known.items():
        star = "" if k.bound_recomputed else "*"
        rows.append(
            [
                (name, None),
                ("-" if k.objective is None else f"{k.objective:.7g}", k.objective),
                (k.family.unit, None),
                (k.method + " (new)" * k.improved, None),
                ("-" if k.bound is None else f"{k.bound:.7g}{star}", k.bound),
                (percent(k.gap), k.gap),
            ]
        )
    note = "On record or of this run. A bound with a star is stated by its method, not verified."
    heads = ("instance", "best known", "unit", "reached by", "bound", "gap")
    return _note(note) + _table(heads, rows)


def _rows(summary: Summary) -> str:
    rows: list[list[Cell]] = [
        [
            (r.instance, None),
            (r.method, None),
            (str(r.seed), float(r.seed)),
            (r.reason if r.objective is None else f"{r.objective:.7g}", r.objective),
            ("-" if r.bound is None else f"{r.bound:.7g}", r.bound),
        ]
        for r in summary.rows
    ]
    return _table(("instance", "method", "seed", "objective or reason", "bound"), rows)


def _note(text: str) -> str:
    """Render a paragraph; text in backticks becomes code."""
    pieces = escape(text).split("`")
    marked = (f"<code>{piece}</code>" if k % 2 else piece for k, piece in enumerate(pieces))
    return f'<p class="note">{"".join(marked)}</p>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Render a table that can be sorted by its columns."""
    numbers = [any(row[k][1] is not None for row in rows) for k in range(len(heads))]
    kinds = [' class="n"' * number for number in numbers]
    head = "".join(
        f'<th scope="col"{kind}><button type="button" class="sort">{escape(h)}</button></th>'
        for h, kind in zip(heads, kinds, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row, kinds))}</tr>" for row in rows)
    return (
        f'<div class="wide"><table class="sortable"><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def _cell(cell: Cell, kind: str) -> str:
    text, value = cell
    sorts = "" if value is None else f' data-v="{value!r}"'
    return f"<td{kind}{sorts}>{escape(text)}</td>"
