"""Pieces of HTML that pages and notebooks share; every foreign string is escaped on its way in."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls by itself where it is too wide."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{inner}</div>'


def boxed(*parts: str) -> str:
    """What a notebook shows of an object: parts that are HTML, below each other."""
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def line(text: str) -> str:
    """A line of text."""
    return f"<p>{escape(text)}</p>"
