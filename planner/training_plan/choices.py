"""Enumerations of the values that plan fields can have."""

from __future__ import annotations

import enum


class Head(enum.StrEnum):
    """Which device of a path runs head and loss."""

    FIRST = "first"
    LAST = "last"

    def stage(self, stages: int) -> int:
        """Its stage, of so many."""
        return 0 if self is Head.FIRST else stages - 1


class Wiring(enum.StrEnum):
    """Whether microbatches take planned paths or are routed while running."""

    FIXED = "fixed"
    STOCHASTIC = "stochastic"


class RouterFeedback(enum.StrEnum):
    """What a router hears of a request: how long its answer took, or the work on it alone."""

    ANSWER = "answer"
    WORK = "work"


class OuterStep(enum.StrEnum):
    """What takes the outer step where gradients are not averaged every step."""

    NESTEROV = "nesterov"


class Phase(enum.StrEnum):
    """What a group's round does: all of an averaging, or one part of it hierarchically.

    On two frequencies the first level is every step's, and the others are those of every H-th.
    """

    ALL = "all"
    REDUCE = "reduce"
    """Everybody gives each member the share that it sums; nothing goes back."""
    EXCHANGE = "exchange"
    """Those who hold sums of a slice average them."""
    SPREAD = "spread"
    """Each member gives everybody the share that it holds."""
    WITHIN = "within"
    """Gradients, summed in every step and given back, so that the members stay equal."""


class Codec(enum.StrEnum):
    """How gradients are written on the wire."""

    NONE = "none"
    INT8 = "int8"

    @property
    def wire_ratio(self) -> float:
        """Bytes on the wire over bytes of 32-bit gradients.

        ``int8``: 8-bit levels, and a 4-byte scale per 1024 of them.
        """
        return {Codec.NONE: 1.0, Codec.INT8: (1 + 4 / 1024) / 4}[self]
