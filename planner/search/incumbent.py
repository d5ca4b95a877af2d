"""Incumbent and best bound of a solve.

A bound is lowered (raised, when maximising) once, here, by more than rounding can account for. One
that is then still on the wrong side of a plan's objective is a wrong proof, and never hidden: it
ends the solve with a `WrongBoundError`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, Generic, NoReturn, TypeVar, overload

from planner.search.certificate import OPTIMAL_GAP, Status, Witness, relative_gap
from planner.search.fingerprint import fingerprint
from planner.search.result import Result, Sense
from planner.search.stop import StopRun

PlanT = TypeVar("PlanT")
FinalT = TypeVar("FinalT")

logger = logging.getLogger(__name__)

ROUNDING = 1e-9
"""Sums of floats in another order differ by far less than this, relatively."""


class WrongBoundError(RuntimeError):
    """A proven bound and a plan contradict each other: an error in this package."""


class Incumbent(Generic[PlanT]):
    """Best plan, its objective, and the best bound; safe to offer to from several threads.

    Parameters
    ----------
    run
        The started stopping rule; it sees objective and bound through here alone.
    problem
        What is solved, named by its hash in messages.
    method, seed
        As they go into the `Result`.
    better
        Relative improvement below which a plan does not replace another.

    Attributes
    ----------
    plan
        The best plan, None before the first.
    objective
        Its objective; infinitely bad before the first.
    bound
        No plan is better; None before the first bound.
    basis, witness
        What the bound stands on; see `planner.search.certificate.Certificate`.
    """

    def __init__(
        self,
        run: StopRun,
        problem: Any,
        *,
        method: str,
        seed: int,
        sense: Sense = Sense.MINIMISE,
        better: float = 0.0,
    ) -> None:
        self.run = run
        self.problem = problem
        self.method = str(method)
        self.seed = seed
        self.plan: PlanT | None = None
        self.bound: float | None = None
        self.basis = ""
        self.witness: Witness | None = None
        self._sign = 1.0 if sense is Sense.MINIMISE else -1.0
        self._better = better
        self.objective = self._sign * math.inf
        self._lock = Lock()

    def offer(self, objective: float, plan: PlanT | Callable[[], PlanT]) -> bool:
        """Consider a plan; True if it is the best so far."""
        with self._lock:
            if not self._improves(objective):
                return False
            made = plan() if callable(plan) else plan
            # no call between the two: an interrupt finds both new or both old
            self.plan = made
            self.objective = objective
            self.run.improve(objective)
            self._require_consistent(self.basis)
        logger.info("%s: found %.6g", self.method, objective)
        self.run.found(objective, self._told(made))
        return True

    def raise_bound(
        self,
        bound: float,
        basis: str,
        witness: Witness | None = None,
        *,
        rounding: float = ROUNDING,
    ) -> None:
        """Consider a proven bound; it is kept if it is the best so far."""
        if not math.isfinite(bound):
            return
        safe = bound - self._sign * rounding * abs(bound)
        with self._lock:
            if self.bound is None or self._sign * (safe - self.bound) > 0:
                self._set_bound(safe, basis, witness)
                self._require_consistent(basis)
                logger.info("%s: bound %.6g, %s", self.method, safe, basis)

    def close(self, basis: str, witness: Witness | None = None) -> None:
        """State that no plan is better than the incumbent: the search excluded all others."""
        with self._lock:
            assert self.plan is not None
            self._set_bound(self.objective, basis, witness)

    def require_admitted(self, allowed: float, basis: str, *, rounding: float = 1e-6) -> None:
        """Test a relaxation on the plan in hand, before anything is excluded by it."""
        if self._sign * (allowed - self.objective) > rounding * abs(self.objective):
            self.contradict(f"bound {allowed!r} ({basis})")

    @property
    def closed(self) -> bool:
        """Whether bound and objective meet, within what counts as optimal."""
        gap = relative_gap(self.objective, self.bound) if self.plan is not None else None
        return gap is not None and gap <= OPTIMAL_GAP

    @overload
    def result(
        self,
        plan: None = None,
        objective: float | None = None,
        *,
        exhausted: str = ...,
        history: Sequence[tuple[float, float]] | None = ...,
    ) -> Result[PlanT]: ...

    @overload
    def result(
        self,
        plan: FinalT,
        objective: float | None = None,
        *,
        exhausted: str = ...,
        history: Sequence[tuple[float, float]] | None = ...,
    ) -> Result[FinalT]: ...

    def result(
        self,
        plan: Any = None,
        objective: float | None = None,
        *,
        exhausted: str = "search exhausted",
        history: Sequence[tuple[float, float]] | None = None,
    ) -> Result[Any]:
        """The outcome: the best plan, or UNKNOWN without one."""
        made = self.plan if plan is None else plan
        if made is None:
            return self.without_plan(Status.UNKNOWN, self.run.reason or "nothing found")
        if objective is not None:
            self.objective = objective
            self._require_consistent(self.basis)
        return Result.of(
            made,
            self.objective,
            self.bound,
            runtime_s=self.run.elapsed_s,
            stop_reason="optimal" if self.closed else self.run.reason or exhausted,
            seed=self.seed,
            method=self.method,
            history=self.run.history if history is None else history,
            basis=self.basis,
            witness=self.witness,
        )

    def without_plan(self, status: Status, why: str) -> Result[PlanT]:
        """The outcome where there is no plan: INFEASIBLE or UNKNOWN, and why."""
        return Result(
            None,
            status,
            None,
            self.bound,
            self.run.elapsed_s,
            why,
            self.seed,
            self.method,
            tuple(self.run.history),
            basis=self.basis,
        )

    def _told(self, plan: PlanT) -> Any:
        """A plan as the stopping rule hears of it."""
        return plan

    def _improves(self, objective: float) -> bool:
        if self.plan is None:
            return not math.isnan(objective)
        margin = self._better * abs(self.objective)
        return self._sign * (self.objective - objective) > margin

    def _set_bound(self, bound: float, basis: str, witness: Witness | None) -> None:
        self.bound, self.basis, self.witness = bound, basis, witness
        self.run.bound = bound

    def _require_consistent(self, basis: str) -> None:
        if self.bound is None or self.plan is None:
            return
        # a bound that was moved away by its rounding error may at most touch
        if self._sign * (self.bound - self.objective) > 1e-12 * abs(self.objective):
            self.contradict(f"bound {self.bound!r} ({basis})")

    def contradict(self, what: str) -> NoReturn:
        """State that a proof or a model excludes the best plan, which there is."""
        raise WrongBoundError(
            f"{what} excludes a plan of {self.objective!r} that was found: problem "
            f"{fingerprint(self.problem)}, seed {self.seed}, method {self.method}; this is an "
            "error in planner, please report it"
        )
