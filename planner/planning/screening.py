"""How choices that need a plan each are compared: all are screened, the best searched further."""

from __future__ import annotations

from planner.network.error import NetworkError
from planner.problems import ProblemError

REFUSALS = (ProblemError, NetworkError)
"""Errors that refuse a choice. Others, such as a deadlock in the simulator, are bugs."""
SCREENING_SHARE = 0.5
"""Share of the limit for screening all choices; the best one gets the rest."""
