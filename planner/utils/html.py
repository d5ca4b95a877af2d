"""Fragments of HTML for pages and notebooks; all text is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls if it is too wide."""
    head = "".join(f'<th scope="col">{escape(h)}</th>' for h in heads)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    inner = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide">{inner}</div>'


def boxed(*parts: str) -> str:
    """HTML fragments below each other, as the representation in a notebook."""
    return f'<div style="overflow-x:auto">{"".join(parts)}</div>'


def line(text: str) -> str:
    """A paragraph of text."""
    return f"<p>{escape(text)}</p>"
