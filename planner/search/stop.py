"""Stopping criteria: small immutable rules, started anew for each run.

A rule such as ``MaxRuntime(10)`` is a value and may be used for any number of solves; the clock and
the counters live in the `StopRun` that a solver gets from `start`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import SupportsFloat

from planner.search.certificate import OPTIMAL_GAP, relative_gap


class StopRun:
    """One run of a stopping rule: clock, iteration count and incumbent.

    A solver calls `update` once per iteration and stops when it returns a reason.
    """

    def __init__(self, rule: StoppingCriterion) -> None:
        self._rule = rule
        self._started = time.perf_counter()
        self.iterations = 0
        self.since_improvement = 0
        self.objective: float | None = None
        self.bound: float | None = None
        self.history: list[tuple[float, float]] = []
        self.reason: str | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run started."""
        return time.perf_counter() - self._started

    @property
    def remaining_s(self) -> float:
        """Seconds left under the rule; infinite without a time limit."""
        return max(0.0, self._rule.seconds() - self.elapsed_s)

    @property
    def remaining_iterations(self) -> float:
        """Iterations left under the rule; infinite without a limit on them."""
        return max(0.0, self._rule.iterations() - self.iterations)

    @property
    def paced_by_time(self) -> bool:
        """Whether seconds alone decide; a count limit beside them decides, and seconds only cut."""
        return math.isinf(self._rule.iterations()) and math.isfinite(self._rule.seconds())

    def improve(self, objective: float) -> None:
        """Record a new incumbent."""
        self.objective = objective
        self.since_improvement = 0
        self.history.append((self.elapsed_s, objective))

    def update(self, iterations: int = 1) -> str | None:
        """Count iterations; return why to stop, or None to go on."""
        self.iterations += iterations
        self.since_improvement += iterations
        return self.check()

    def check(self) -> str | None:
        """Why to stop now, or None; counts nothing."""
        if self.reason is None:
            gap = relative_gap(self.objective, self.bound)
            if gap is not None and gap <= OPTIMAL_GAP:
                self.reason = "optimal"
            else:
                self.reason = self._rule.reason(self)
        return self.reason

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Turn Ctrl-C into the stop reason ``interrupted``, so that the best so far is returned."""
        try:
            yield
        except KeyboardInterrupt:
            self.reason = "interrupted"


def started(stop: StoppingCriterion) -> StopRun:
    """Start a rule that a caller gave, refused if it is none."""
    if not isinstance(stop, StoppingCriterion):
        raise ValueError(
            f"stop must be a stopping rule, found {stop!r}; give one such as MaxRuntime(10)"
        )
    return stop.start()


class StoppingCriterion(ABC):
    """When to stop a search."""

    def start(self) -> StopRun:
        """Begin a run under this rule."""
        return StopRun(self)

    @abstractmethod
    def reason(self, run: StopRun) -> str | None:
        """Why ``run`` should stop, or None."""

    def seconds(self) -> float:
        """Largest running time this rule allows."""
        return math.inf

    def iterations(self) -> float:
        """Largest number of iterations this rule allows."""
        return math.inf


@dataclass(frozen=True)
class MaxRuntime(StoppingCriterion):
    """Stop after ``max_runtime_s`` seconds."""

    max_runtime_s: float

    def __post_init__(self) -> None:
        if not _number(self.max_runtime_s) > 0:
            raise ValueError(
                f"max_runtime_s must be positive, found {self.max_runtime_s}; give seconds > 0"
            )

    def reason(self, run: StopRun) -> str | None:
        return "time limit" if run.elapsed_s >= self.max_runtime_s else None

    def seconds(self) -> float:
        return self.max_runtime_s


@dataclass(frozen=True)
class MaxIterations(StoppingCriterion):
    """Stop after ``max_iterations`` iterations (of the solver's own unit)."""

    max_iterations: int

    def __post_init__(self) -> None:
        _require_count("max_iterations", self.max_iterations, 0)

    def reason(self, run: StopRun) -> str | None:
        return "iteration limit" if run.iterations >= self.max_iterations else None

    def iterations(self) -> float:
        return float(self.max_iterations)


@dataclass(frozen=True)
class TargetGap(StoppingCriterion):
    """Stop when the proven gap is at most ``gap``."""

    gap: float

    def __post_init__(self) -> None:
        if not _number(self.gap) >= 0:
            raise ValueError(f"gap must be >= 0, found {self.gap}; give a fraction such as 0.05")

    def reason(self, run: StopRun) -> str | None:
        gap = relative_gap(run.objective, run.bound)
        return "target gap" if gap is not None and gap <= self.gap else None


@dataclass(frozen=True)
class NoImprovement(StoppingCriterion):
    """Stop after ``max_iterations`` iterations in a row without a better plan."""

    max_iterations: int

    def __post_init__(self) -> None:
        _require_count("max_iterations", self.max_iterations, 1)

    def reason(self, run: StopRun) -> str | None:
        return "no improvement" if run.since_improvement >= self.max_iterations else None


@dataclass(frozen=True, init=False)
class AnyOf(StoppingCriterion):
    """Stop as soon as one of several criteria says so."""

    criteria: tuple[StoppingCriterion, ...]

    def __init__(self, *criteria: StoppingCriterion) -> None:
        if not criteria:
            raise ValueError("AnyOf needs at least one criterion, found none; pass MaxRuntime(...)")
        for rule in criteria:
            if not isinstance(rule, StoppingCriterion):
                raise ValueError(f"AnyOf takes stopping rules, found {rule!r}")
        object.__setattr__(self, "criteria", tuple(criteria))

    def reason(self, run: StopRun) -> str | None:
        return next((why for c in self.criteria if (why := c.reason(run)) is not None), None)

    def seconds(self) -> float:
        return min(c.seconds() for c in self.criteria)

    def iterations(self) -> float:
        return min(c.iterations() for c in self.criteria)


def _number(value: object) -> float:
    """The value as a number; NaN, which no rule allows, where it is none."""
    return float(value) if isinstance(value, SupportsFloat) else math.nan


def _require_count(field: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not _number(value).is_integer() or value < least:
        raise ValueError(f"{field} must be a whole number >= {least}, found {value}; give a count")


def portion(rule: StoppingCriterion, fraction: float) -> StoppingCriterion:
    """The same rule with a fraction of its seconds and iterations (at least one iteration)."""
    limits: list[StoppingCriterion] = [rule]
    if math.isfinite(rule.seconds()):
        limits.append(MaxRuntime(rule.seconds() * fraction))
    if math.isfinite(rule.iterations()):
        limits.append(MaxIterations(max(1, int(rule.iterations() * fraction))))
    return AnyOf(*limits)
