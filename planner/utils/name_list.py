"""Names in messages, shortened."""

from __future__ import annotations

from collections.abc import Sequence

MAX_NAMES = 8


def listed(names: Sequence[str]) -> str:
    """Quoted names, at most `MAX_NAMES` of them: ``'a', 'b', ...``."""
    ellipsis = ", ..." if len(names) > MAX_NAMES else ""
    return ", ".join(map(repr, names[:MAX_NAMES])) + ellipsis
