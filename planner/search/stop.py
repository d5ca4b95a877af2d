"""Stopping criteria: immutable values that are started for each run.

A criterion such as ``MaxRuntime(10)`` can be used for any number of solves; the clock and the
counters are in the `SearchRun` that a solver gets from `start`.
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
"""Stop reason of an interrupted search."""
TIME_LIMIT, ITERATION_LIMIT, EFFORT_LIMIT = "time limit", "iteration limit", "effort limit"
"""Stop reasons of `MaxRuntime` and `Deadline`, `MaxIterations`, and `Effort`."""
MIN_S = 1e-3
MIN_EFFORT = 1e-6
"""Minimum seconds and effort of a portion."""


class TimeLimitReached(KeyboardInterrupt):
    """The caller's time limit is reached; handled like Ctrl-C: the best plan so far is returned."""


class SearchRun:
    """One run of a search under a stopping criterion: clock, iterations, objective and bound.

    A solver calls `update` once per iteration and stops when it returns a reason.

    Attributes
    ----------
    evaluates_plans
        False while a solver prepares its first plan, such as by a search on estimates. Such
        iterations count towards every limit, but not as iterations without improvement.
    """

    def __init__(self, criterion: StoppingCriterion, steps_per_effort: float = 1.0) -> None:
        self._criterion = criterion
        self.steps_per_effort = steps_per_effort
        self._started, self._seconds = time.perf_counter(), criterion.seconds()
        self.iterations = 0
        self.since_improvement = 0
        self.evaluates_plans = True
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
        """Seconds left; infinite without a time limit."""
        return 0.0 if INTERRUPTS.requested else max(0.0, self._seconds - self.elapsed_s)

    @property
    def remaining_iterations(self) -> float:
        """Iterations left; infinite without a limit on them."""
        return 0.0 if INTERRUPTS.requested else max(0.0, self.max_iterations - self.iterations)

    @property
    def max_iterations(self) -> float:
        """Iterations allowed in total; infinite without a limit on them."""
        return self._criterion.iterations(self.steps_per_effort)

    @property
    def paced_by_time(self) -> bool:
        """Whether only a time limit determines how much to do.

        With a limit on iterations or effort the search is paced by it, so that the same command
        gives the same plan; an additional time limit only ends the run early.
        """
        return math.isinf(self.max_iterations) and math.isfinite(self._criterion.seconds())

    @property
    def remaining_effort(self) -> float:
        """Effort left under an `Effort` criterion; infinite without one."""
        if INTERRUPTS.requested:
            return 0.0
        return max(0.0, self._criterion.effort() - self.iterations / self.steps_per_effort)

    def spend(self, effort: float) -> str | None:
        """Count work other than iterations, such as CP-SAT's deterministic time."""
        limited = math.isfinite(self._criterion.effort())
        return self.update(math.ceil(effort * self.steps_per_effort) if limited else 0)

    def record_objective(self, objective: float) -> None:
        """Record a new incumbent."""
        self.objective = objective
        self.since_improvement = 0
        self.history.append((self.elapsed_s, objective))

    def notify_incumbent(self, objective: float, plan: Any) -> None:
        """Tell the criterion of a new incumbent."""
        self._criterion.found(objective, plan)

    def update(self, iterations: int = 1) -> str | None:
        """Count iterations; returns the reason to stop, or None."""
        self.iterations += iterations
        if self.evaluates_plans:
            self.since_improvement += iterations
        return self.check()

    def check(self) -> str | None:
        """The reason to stop now, or None; counts nothing."""
        if self.reason is None:
            if INTERRUPTS.requested:
                self.reason = INTERRUPTED
                return self.reason
            gap = relative_gap(self.objective, self.bound)
            if gap is not None and gap <= OPTIMAL_GAP:
                self.reason = "optimal"
            else:
                self.reason = self._criterion.reason(self)
        return self.reason

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Turn Ctrl-C into the stop reason ``interrupted``: the best plan so far is returned."""
        try:
            with INTERRUPTS.may_raise():
                yield
        except TimeLimitReached:
            self.reason = TIME_LIMIT
        except KeyboardInterrupt:
            if INTERRUPTS.forced:
                raise
            self.reason = INTERRUPTED
            INTERRUPTS.finishing = True


def started(stop: StoppingCriterion, steps_per_effort: float = 1.0) -> SearchRun:
    """Start a stopping criterion; raises ValueError if it is not one."""
    if not isinstance(stop, StoppingCriterion):
        raise ValueError(
            f"stop must be a stopping criterion, found {_short_repr(stop)}; give one such as "
            "MaxRuntime(10)"
        )
    return stop.start(steps_per_effort)


class StoppingCriterion(ABC):
    """When to stop a search."""

    def start(self, steps_per_effort: float = 1.0) -> SearchRun:
        """Start a run under this criterion; see `started`."""
        return SearchRun(self, steps_per_effort)

    @abstractmethod
    def reason(self, run: SearchRun) -> str | None:
        """The reason why ``run`` should stop, or None."""

    def seconds(self) -> float:
        """Maximum running time."""
        return math.inf

    def iterations(self, steps_per_effort: float = 1.0) -> float:
        """Maximum number of iterations of a solver with this many steps per unit of effort."""
        del steps_per_effort
        return math.inf

    def effort(self) -> float:
        """Maximum effort, in units of `Effort`."""
        return math.inf

    def found(self, objective: float, plan: Any) -> None:  # noqa: B027
        """Called with every new incumbent."""

    def portion(self, share: float, seconds: float | None = None) -> StoppingCriterion:
        """The criterion with a share of its limits; ``seconds`` overrides the time limit."""
        del share, seconds
        return self


@dataclass(frozen=True)
class MaxRuntime(StoppingCriterion):
    """Stop after ``max_runtime_s`` seconds."""

    max_runtime_s: float

    def __post_init__(self) -> None:
        if not _as_float(self.max_runtime_s) > 0:
            raise ValueError(
                f"max_runtime_s must be positive, found {_short_repr(self.max_runtime_s)}; "
                "give seconds"
            )

    def reason(self, run: SearchRun) -> str | None:
        return TIME_LIMIT if run.elapsed_s >= self.max_runtime_s else None

    def seconds(self) -> float:
        return self.max_runtime_s

    def portion(self, share: float, seconds: float | None = None) -> MaxRuntime:
        return MaxRuntime(max(MIN_S, self.max_runtime_s * share if seconds is None else seconds))


@dataclass(frozen=True)
class Deadline(StoppingCriterion):
    """Stop at a point in time: work before the search, such as compilation, counts as well."""

    deadline_s: float

    def reason(self, run: SearchRun) -> str | None:
        return TIME_LIMIT if time.perf_counter() >= self.deadline_s else None

    def seconds(self) -> float:
        return max(MIN_S, self.deadline_s - time.perf_counter())

    def portion(self, share: float, seconds: float | None = None) -> MaxRuntime:
        return MaxRuntime(max(MIN_S, self.seconds() * share if seconds is None else seconds))


@dataclass(frozen=True)
class MaxIterations(StoppingCriterion):
    """Stop after ``max_iterations`` iterations (of the solver's own unit)."""

    max_iterations: int

    def __post_init__(self) -> None:
        _require_count("max_iterations", self.max_iterations, 0)

    def reason(self, run: SearchRun) -> str | None:
        return ITERATION_LIMIT if run.iterations >= self.max_iterations else None

    def iterations(self, steps_per_effort: float = 1.0) -> float:
        return float(self.max_iterations)

    def portion(self, share: float, seconds: float | None = None) -> MaxIterations:
        return MaxIterations(max(1, int(self.max_iterations * share)))


@dataclass(frozen=True)
class Effort(StoppingCriterion):
    """Deterministic work limit, for any solver; like CP-SAT's deterministic time.

    One unit is about a second of one core, counted in each solver's own steps, so that the result
    does not depend on the speed of the machine.

    Notes
    -----
    The limit is on the main search, not on all of `planner.plan`. Bounds are not counted. The joint
    search does the following in addition:

    - It simulates baselines: for ranks by region and for one region, 100,000 operations and
      messages per unit each, at least 100,000 and at most a million.
    - It optimises straight pipelines on up to 256 devices, with a tenth of ``units``.
    - If the best plan has larger microbatches than the workload (a baseline may), it searches again
      with these, with half of ``units``.
    - Where numbers are to be chosen (``"auto"``), each that is tried gets a tenth of ``units``.
    - It evaluates what is pending at the limit, and alternatives of the best plan if its step has
      at most 60,000 operations.

    Within the search, layout moves that are estimated to find the next candidates are part of the
    fixed cost of a candidate. Straight pipelines with ``stages="auto"`` also try recomputation in
    shapes that are short of memory, with up to half of ``units`` in addition.
    """

    units: float

    def __post_init__(self) -> None:
        if not 0 < _as_float(self.units) < math.inf:
            raise ValueError(
                f"effort must be positive, found {_short_repr(self.units)}; give a number > 0"
            )

    def reason(self, run: SearchRun) -> str | None:
        return EFFORT_LIMIT if run.iterations >= self.iterations(run.steps_per_effort) else None

    def iterations(self, steps_per_effort: float = 1.0) -> float:
        return float(max(1, math.ceil(self.units * steps_per_effort)))

    def effort(self) -> float:
        return self.units

    def portion(self, share: float, seconds: float | None = None) -> Effort:
        return Effort(max(self.units * share, MIN_EFFORT))


@dataclass(frozen=True)
class TargetGap(StoppingCriterion):
    """Stop when the proven gap is at most ``gap``."""

    gap: float

    def __post_init__(self) -> None:
        if not 0 <= _as_float(self.gap) <= 1:
            raise ValueError(
                f"gap must be 0 to 1, found {_short_repr(self.gap)}; give a fraction such as 0.05"
            )

    def reason(self, run: SearchRun) -> str | None:
        gap = relative_gap(run.objective, run.bound)
        return "target gap" if gap is not None and gap <= self.gap else None


@dataclass(frozen=True)
class NoImprovement(StoppingCriterion):
    """Stop after ``max_iterations`` iterations in a row without a better plan.

    The joint search of `planner.plan` counts from its first evaluated candidate on, since its
    iterations before that are estimates.
    """

    max_iterations: int

    def __post_init__(self) -> None:
        _require_count("max_iterations", self.max_iterations, 1)

    def reason(self, run: SearchRun) -> str | None:
        return "no improvement" if run.since_improvement >= self.max_iterations else None


@dataclass(frozen=True, init=False)
class AnyOf(StoppingCriterion):
    """Stop as soon as one of several criteria is met."""

    criteria: tuple[StoppingCriterion, ...]

    def __init__(self, *criteria: StoppingCriterion) -> None:
        if not criteria:
            raise ValueError("AnyOf needs at least one criterion, found none; pass MaxRuntime(...)")
        for criterion in criteria:
            if not isinstance(criterion, StoppingCriterion):
                raise ValueError(
                    f"AnyOf takes stopping criteria, found {_short_repr(criterion)}; give one"
                )
        object.__setattr__(self, "criteria", tuple(criteria))

    def found(self, objective: float, plan: Any) -> None:
        for criterion in self.criteria:
            criterion.found(objective, plan)

    def reason(self, run: SearchRun) -> str | None:
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
    """Delegates to ``inner``; base class for criteria that extend another one."""

    inner: StoppingCriterion

    def found(self, objective: float, plan: Any) -> None:
        self.inner.found(objective, plan)

    def reason(self, run: SearchRun) -> str | None:
        return self.inner.reason(run)

    def seconds(self) -> float:
        return self.inner.seconds()

    def iterations(self, steps_per_effort: float = 1.0) -> float:
        return self.inner.iterations(steps_per_effort)

    def effort(self) -> float:
        return self.inner.effort()

    def portion(self, share: float, seconds: float | None = None) -> Self:
        return replace(self, inner=self.inner.portion(share, seconds))


def _as_float(value: object) -> float:
    """The value as a float; NaN, which no criterion accepts, if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):  # such as an array of several
        return math.nan


def _short_repr(value: object) -> str:
    """A short representation for one-line messages."""
    text = repr(value)
    return text if len(text) <= 40 and "\n" not in text else f"a {type(value).__name__}"


def _require_count(field: str, value: int, minimum: int) -> None:
    if isinstance(value, bool) or not _as_float(value).is_integer() or value < minimum:
        raise ValueError(
            f"{field} must be a whole number >= {minimum}, found {_short_repr(value)}; give a count"
        )
