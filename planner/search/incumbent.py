"""Incumbent and best bound of a solve.

Bounds are relaxed here, and only here, by a margin for rounding errors. A bound that still
contradicts the objective of a plan is a wrong proof and raises `WrongBoundError`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from threading import Lock
from typing import Any, Generic, NoReturn, TypeVar, overload

from planner.search.certificate import OPTIMAL_GAP, Status, Witness, relative_gap
from planner.search.fingerprint import fingerprint
from planner.search.result import Result, Sense
from planner.search.stop import SearchRun

PlanT = TypeVar("PlanT")
FinalT = TypeVar("FinalT")

logger = logging.getLogger(__name__)

ROUNDING = 1e-9
"""Relative margin for rounding errors, far larger than those of sums in another order."""


class WrongBoundError(RuntimeError):
    """A bound contradicts a feasible plan: a bug in this package."""


class Incumbent(Generic[PlanT]):
    """Best plan, its objective, and the best bound; thread-safe.

    Parameters
    ----------
    run
        The run, whose stopping criterion is notified of objective and bound.
    problem
        The problem, identified by its hash in error messages.
    method, seed
        Recorded in the `Result`.
    min_improvement
        Relative improvement required to replace the incumbent.

    Attributes
    ----------
    plan
        The best plan, None before the first.
    objective
        Its objective; infinite before the first.
    bound
        The best proven bound; None before the first.
    basis, witness
        Basis of the bound; see `planner.search.certificate.Certificate`.
    """

    def __init__(
        self,
        run: SearchRun,
        problem: Any,
        *,
        method: str,
        seed: int,
        sense: Sense = Sense.MINIMISE,
        min_improvement: float = 0.0,
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
        self._min_improvement = min_improvement
        self.objective = self._sign * math.inf
        self._lock = Lock()

    def offer(self, objective: float, plan: PlanT | Callable[[], PlanT]) -> bool:
        """Offer a plan, or a function that builds it; True if it is the new incumbent."""
        with self._lock:
            if not self._improves(objective):
                return False
            candidate = plan() if callable(plan) else plan
            # no call between the two, so that an interrupt cannot separate plan and objective
            self.plan = candidate
            self.objective = objective
            self.run.record_objective(objective)
            self._require_consistent(self.basis)
        logger.info("%s: found %.6g", self.method, objective)
        self.run.notify_incumbent(objective, self._callback_value(candidate))
        return True

    def offer_bound(
        self,
        bound: float,
        basis: str,
        witness: Witness | None = None,
        *,
        rounding: float = ROUNDING,
    ) -> None:
        """Offer a proven bound; it is kept if it is the best so far."""
        if not math.isfinite(bound):
            return
        safe = bound - self._sign * rounding * abs(bound)
        with self._lock:
            if self.bound is None or self._sign * (safe - self.bound) > 0:
                self._set_bound(safe, basis, witness)
                self._require_consistent(basis)
                logger.info("%s: bound %.6g, %s", self.method, safe, basis)

    def require_admitted(self, allowed: float, basis: str, *, rounding: float = 1e-6) -> None:
        """Verify that a relaxation admits the incumbent, before it is used to exclude plans."""
        if self._sign * (allowed - self.objective) > rounding * abs(self.objective):
            self.contradict(f"bound {allowed!r} ({basis})")

    @property
    def closed(self) -> bool:
        """Whether the gap is small enough for OPTIMAL."""
        return self.plan is not None and self._is_closed(self.objective)

    def _is_closed(self, objective: float) -> bool:
        gap = relative_gap(objective, self.bound)
        return gap is not None and gap <= OPTIMAL_GAP

    @overload
    def result(
        self,
        plan: None = None,
        objective: float | None = None,
        *,
        exhausted: str = ...,
    ) -> Result[PlanT]: ...

    @overload
    def result(
        self,
        plan: FinalT,
        objective: float | None = None,
        *,
        exhausted: str = ...,
    ) -> Result[FinalT]: ...

    def result(
        self,
        plan: Any = None,
        objective: float | None = None,
        *,
        exhausted: str = "search exhausted",
    ) -> Result[Any]:
        """The result with the best plan, or UNKNOWN without one."""
        candidate = self.plan if plan is None else plan
        if candidate is None:
            return self.without_plan(Status.UNKNOWN, self.run.reason or "nothing found")
        value = self.objective if objective is None else objective
        self._require_consistent(self.basis, value)
        return Result.of(
            candidate,
            value,
            self.bound,
            runtime_s=self.run.elapsed_s,
            stop_reason="optimal" if self._is_closed(value) else self.run.reason or exhausted,
            seed=self.seed,
            method=self.method,
            history=self.run.history,
            basis=self.basis,
            witness=self.witness,
        )

    def without_plan(self, status: Status, reason: str) -> Result[PlanT]:
        """The result without a plan: INFEASIBLE or UNKNOWN, and the reason."""
        return Result(
            None,
            status,
            None,
            self.bound,
            self.run.elapsed_s,
            reason,
            self.seed,
            self.method,
            tuple(self.run.history),
            basis=self.basis,
        )

    def _callback_value(self, plan: PlanT) -> Any:
        """The plan as it is passed to the stopping criterion; subclasses may convert it."""
        return plan

    def _improves(self, objective: float) -> bool:
        if self.plan is None:
            return not math.isnan(objective)
        margin = self._min_improvement * abs(self.objective)
        return self._sign * (self.objective - objective) > margin

    def _set_bound(self, bound: float, basis: str, witness: Witness | None) -> None:
        self.bound, self.basis, self.witness = bound, basis, witness
        self.run.bound = bound

    def _require_consistent(self, basis: str, objective: float | None = None) -> None:
        """Compare the bound with the incumbent's objective, or with a more exact one."""
        value = self.objective if objective is None else objective
        if self.bound is None or math.isinf(value):
            return
        # bounds include their rounding margin already
        if self._sign * (self.bound - value) > 1e-12 * abs(value):
            self.contradict(f"bound {self.bound!r} ({basis})", value)

    def contradict(self, what: str, objective: float | None = None) -> NoReturn:
        """Raise `WrongBoundError`: a proof or a model excludes the incumbent."""
        value = self.objective if objective is None else objective
        raise WrongBoundError(
            f"{what} excludes a plan of {value!r} that was found: problem "
            f"{fingerprint(self.problem)}, seed {self.seed}, method {self.method}; this is an "
            "error in planner, please report it"
        )
