"""Error raised for inconsistent problem data."""

from __future__ import annotations


class ProblemError(ValueError):
    """Inconsistent problem data; the message names rule, value and remedy."""
