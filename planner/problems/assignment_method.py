"""How devices are placed, by name."""

from __future__ import annotations

import enum


class Method(enum.StrEnum):
    """Ways to solve an assignment problem."""

    AUTO = "auto"
    SEARCH = "search"
    CLASSES = "classes"
    GENETIC = "genetic"
    KERNIGHAN_LIN = "kl"
    RANDOM = "random"
    REGION_GREEDY = "region-greedy"
