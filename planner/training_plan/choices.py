"""Enumerations of the values that plan fields can have."""

from __future__ import annotations

import enum


class Head(enum.StrEnum):
    """Which device of a path runs head and loss."""

    FIRST = "first"
    LAST = "last"

    def stage(self, stages: int) -> int:
        """Its stage, among ``stages``."""
        return 0 if self is Head.FIRST else stages - 1


class Wiring(enum.StrEnum):
    """Whether microbatches take planned paths or are routed at run time."""

    FIXED = "fixed"
    STOCHASTIC = "stochastic"


class RouterFeedback(enum.StrEnum):
    """What a router measures of a request: its response time, or its compute time alone."""

    ANSWER = "answer"
    WORK = "work"


class OuterStep(enum.StrEnum):
    """The outer optimizer."""

    NESTEROV = "nesterov"


class Phase(enum.StrEnum):
    """Part of an averaging that a round performs.

    In two-frequency averaging WITHIN is part of every step, and the others of every H-th.
    """

    ALL = "all"
    REDUCE = "reduce"
    """Every member receives the share that it reduces; nothing is returned."""
    EXCHANGE = "exchange"
    """Owners of the same slice average their sums."""
    SPREAD = "spread"
    """Every member sends the share that it holds to all others."""
    WITHIN = "within"
    """Gradients are averaged and returned, so that members stay equal."""


class Codec(enum.StrEnum):
    """Encoding of gradients on the wire."""

    NONE = "none"
    INT8 = "int8"

    @property
    def wire_ratio(self) -> float:
        """Bytes on the wire over bytes of fp32 gradients.

        ``int8``: 8-bit levels, and a 4-byte scale per 1024 of them.
        """
        return {Codec.NONE: 1.0, Codec.INT8: (1 + 4 / 1024) / 4}[self]
