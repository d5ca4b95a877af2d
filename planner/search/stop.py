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
from dataclasses import dataclass, replace
from typing import Any, Self, SupportsFloat

from planner.search.certificate import OPTIMAL_GAP, relative_gap
from planner.search.interrupts import INTERRUPTS

INTERRUPTED = "interrupted"
"""Why a search has ended that was told to."""
LEAST_S = 1e-3
LEAST_EFFORT = 1e-6
"""Seconds and effort of the smallest portion."""


class OutOfTime(KeyboardInterrupt):
    """The time that a caller has is over: as Ctrl-C, what is there so far is the answer."""


class StopRun:
    """One run of a stopping rule: clock, iteration count and incumbent.

    A solver calls `update` once per iteration and stops when it returns a reason.
    """

    def __init__(self, rule: StoppingCriterion, steps_per_effort: float = 1.0) -> None:
        self._rule = rule
        self.steps_per_effort = steps_per_effort
        self._started, self._seconds = time.perf_counter(), rule.seconds()
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
        return 0.0 if INTERRUPTS.asked else max(0.0, self._seconds - self.elapsed_s)

    @property
    def remaining_iterations(self) -> float:
        """Iterations left under the rule; infinite without a limit on them."""
        return 0.0 if INTERRUPTS.asked else max(0.0, self.most_iterations - self.iterations)

    @property
    def most_iterations(self) -> float:
        """Iterations that the rule allows in all; infinite without a limit on them."""
        return self._rule.iterations(self.steps_per_effort)

    @property
    def paced_by_time(self) -> bool:
        """Whether seconds alone say how much to do.

        A limit on iterations decides by itself, so that the same command gives the same plan; a
        limit in seconds beside it only cuts the run off.
        """
        return math.isinf(self.most_iterations) and math.isfinite(self._rule.seconds())

    @property
    def remaining_effort(self) -> float:
        """Effort left under a rule of `Effort`; infinite without one."""
        if INTERRUPTS.asked:
            return 0.0
        return max(0.0, self._rule.effort() - self.iterations / self.steps_per_effort)

    def spend(self, effort: float, steps: int = 0) -> str | None:
        """Count work that is no step of the search, such as CP-SAT's deterministic time."""
        if math.isfinite(self._rule.effort()):
            steps = math.ceil(effort * self.steps_per_effort)
        return self.update(steps)

    def improve(self, objective: float) -> None:
        """Record a new incumbent."""
        self.objective = objective
        self.since_improvement = 0
        self.history.append((self.elapsed_s, objective))

    def found(self, objective: float, plan: Any) -> None:
        """Tell the rule of a new incumbent."""
        self._rule.found(objective, plan)

    def update(self, iterations: int = 1) -> str | None:
        """Count iterations; return why to stop, or None to go on."""
        self.iterations += iterations
        self.since_improvement += iterations
        return self.check()

    def check(self) -> str | None:
        """Why to stop now, or None; counts nothing."""
        if self.reason is None:
            if INTERRUPTS.asked:
                self.reason = INTERRUPTED
                return self.reason
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
            with INTERRUPTS.may_raise():
                yield
        except OutOfTime:
            self.reason = "time limit"
        except KeyboardInterrupt:
            if INTERRUPTS.insisted:
                raise
            self.reason = INTERRUPTED
            INTERRUPTS.ending = True


def started(stop: StoppingCriterion, steps_per_effort: float = 1.0) -> StopRun:
    """Start a rule that a caller gave, refused if it is none."""
    if not isinstance(stop, StoppingCriterion):
        raise ValueError(
            f"stop must be a stopping rule, found {_shown(stop)}; give one such as MaxRuntime(10)"
        )
    return stop.start(steps_per_effort)


class StoppingCriterion(ABC):
    """When to stop a search."""

    def start(self, steps_per_effort: float = 1.0) -> StopRun:
        """Begin a run under this rule; see `started`."""
        return StopRun(self, steps_per_effort)

    @abstractmethod
    def reason(self, run: StopRun) -> str | None:
        """Why ``run`` should stop, or None."""

    def seconds(self) -> float:
        """Largest running time this rule allows."""
        return math.inf

    def iterations(self, steps_per_effort: float = 1.0) -> float:
        """Largest number of iterations this rule allows a solver with such steps."""
        del steps_per_effort
        return math.inf

    def effort(self) -> float:
        """Largest effort this rule allows."""
        return math.inf

    def found(self, objective: float, plan: Any) -> None:  # noqa: B027
        """Hear of a plan that is the best of its search so far."""

    def portion(self, share: float, seconds: float | None = None) -> StoppingCriterion:
        """The same rule with a share of what it allows."""
        del share, seconds
        return self


@dataclass(frozen=True)
class MaxRuntime(StoppingCriterion):
    """Stop after ``max_runtime_s`` seconds."""

    max_runtime_s: float

    def __post_init__(self) -> None:
        if not _number(self.max_runtime_s) > 0:
            raise ValueError(
                f"max_runtime_s must be positive, found {_shown(self.max_runtime_s)}; give seconds"
            )

    def reason(self, run: StopRun) -> str | None:
        return "time limit" if run.elapsed_s >= self.max_runtime_s else None

    def seconds(self) -> float:
        return self.max_runtime_s

    def portion(self, share: float, seconds: float | None = None) -> MaxRuntime:
        return MaxRuntime(max(LEAST_S, self.max_runtime_s * share if seconds is None else seconds))


@dataclass(frozen=True)
class Until(StoppingCriterion):
    """Stop at a moment: what comes before the search, such as compiling, takes from its time."""

    moment_s: float

    def reason(self, run: StopRun) -> str | None:
        return "time limit" if time.perf_counter() >= self.moment_s else None

    def seconds(self) -> float:
        return max(LEAST_S, self.moment_s - time.perf_counter())

    def portion(self, share: float, seconds: float | None = None) -> MaxRuntime:
        return MaxRuntime(max(LEAST_S, self.seconds() * share if seconds is None else seconds))


@dataclass(frozen=True)
class MaxIterations(StoppingCriterion):
    """Stop after ``max_iterations`` iterations (of the solver's own unit)."""

    max_iterations: int

    def __post_init__(self) -> None:
        _require_count("max_iterations", self.max_iterations, 0)

    def reason(self, run: StopRun) -> str | None:
        return "iteration limit" if run.iterations >= self.max_iterations else None

    def iterations(self, steps_per_effort: float = 1.0) -> float:
        return float(self.max_iterations)

    def portion(self, share: float, seconds: float | None = None) -> MaxIterations:
        return MaxIterations(max(1, int(self.max_iterations * share)))


@dataclass(frozen=True)
class Effort(StoppingCriterion):
    """Stop after so much counted work, whatever the solver.

    One unit is about what a core does in a second; it is counted in each solver's own steps, so
    that a busy machine gives the same plan, only later.
    """

    units: float

    def __post_init__(self) -> None:
        if not 0 < _number(self.units) < math.inf:
            raise ValueError(
                f"effort must be positive, found {_shown(self.units)}; give a number > 0"
            )

    def reason(self, run: StopRun) -> str | None:
        return "effort spent" if run.iterations >= self.iterations(run.steps_per_effort) else None

    def iterations(self, steps_per_effort: float = 1.0) -> float:
        return float(max(1, math.ceil(self.units * steps_per_effort)))

    def effort(self) -> float:
        return self.units

    def portion(self, share: float, seconds: float | None = None) -> Effort:
        return Effort(max(self.units * share, LEAST_EFFORT))


@dataclass(frozen=True)
class TargetGap(StoppingCriterion):
    """Stop when the proven gap is at most ``gap``."""

    gap: float

    def __post_init__(self) -> None:
        if not _number(self.gap) >= 0:
            raise ValueError(
                f"gap must be >= 0, found {_shown(self.gap)}; give a fraction such as 0.05"
            )

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
                raise ValueError(f"AnyOf takes stopping rules, found {_shown(rule)}; give one")
        object.__setattr__(self, "criteria", tuple(criteria))

    def reason(self, run: StopRun) -> str | None:
        return next((why for c in self.criteria if (why := c.reason(run)) is not None), None)

    def seconds(self) -> float:
        return min(c.seconds() for c in self.criteria)

    def iterations(self, steps_per_effort: float = 1.0) -> float:
        return min(c.iterations(steps_per_effort) for c in self.criteria)

    def effort(self) -> float:
        return min(c.effort() for c in self.criteria)

    def portion(self, share: float, seconds: float | None = None) -> AnyOf:
        return AnyOf(*(c.portion(share, seconds) for c in self.criteria))


@dataclass(frozen=True)
class DelegatingCriterion(StoppingCriterion):
    """Delegates to ``inner``; subclasses override what they add."""

    inner: StoppingCriterion

    def found(self, objective: float, plan: Any) -> None:
        self.inner.found(objective, plan)

    def reason(self, run: StopRun) -> str | None:
        return self.inner.reason(run)

    def seconds(self) -> float:
        return self.inner.seconds()

    def iterations(self, steps_per_effort: float = 1.0) -> float:
        return self.inner.iterations(steps_per_effort)

    def effort(self) -> float:
        return self.inner.effort()

    def portion(self, share: float, seconds: float | None = None) -> Self:
        return replace(self, inner=self.inner.portion(share, seconds))


def _number(value: object) -> float:
    """The value as a number; NaN, which no rule allows, where it is none."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):  # such as an array of several
        return math.nan


def _shown(value: object) -> str:
    """For a message of one line."""
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"a {type(value).__name__}"


def _require_count(field: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not _number(value).is_integer() or value < least:
        raise ValueError(
            f"{field} must be a whole number >= {least}, found {_shown(value)}; give a count"
        )
