"""Result of a solver: plan, status, objective and proven bound."""

from __future__ import annotations

import enum
import math
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any, Generic, TypeVar

from planner.search.certificate import OPTIMAL_GAP, Certificate, Status, Witness, relative_gap

PlanT = TypeVar("PlanT")


class Sense(enum.StrEnum):
    """Whether a smaller or a larger objective is better."""

    MINIMISE = "minimise"
    MAXIMISE = "maximise"


@dataclass(frozen=True)
class Result(Generic[PlanT]):
    """Result of a solve.

    Attributes
    ----------
    plan
        The best plan found; None when infeasible or when nothing was found.
    status
        ``OPTIMAL`` exactly when ``gap <= 1e-6``. Derived in `Result.of`.
    objective
        Its cost, in the solver's unit (seconds, steps per second).
    bound
        Proven bound: lower when minimising, upper when maximising. None if there is none.
    runtime_s
        Running time in seconds.
    stop_reason
        Why the search stopped.
    seed
        Seed of the search.
    method
        Name of the solver that produced the plan.
    history
        ``(time_s, objective)`` of each improvement.
    candidates
        Alternatives that were compared, if any.
    basis
        Basis of the bound in words; empty without a bound.
    witness
        Data from which `planner.check` recomputes the bound, or None.
    baselines
        Baseline plans that the search started from, if any.
    request
        What `planner.plan` was asked for, with the numbers that it chose for ``"auto"``.
    """

    plan: PlanT | None
    status: Status
    objective: float | None
    bound: float | None
    runtime_s: float
    stop_reason: str
    seed: int
    method: str
    history: Sequence[tuple[float, float]] = field(default_factory=tuple)
    candidates: Sequence[Any] = field(default_factory=tuple)
    basis: str = ""
    witness: Witness | None = None
    baselines: Any = None
    request: Any = None

    @classmethod
    def of(
        cls,
        plan: PlanT,
        objective: float,
        bound: float | None,
        *,
        runtime_s: float,
        stop_reason: str,
        seed: int,
        method: str,
        history: Sequence[tuple[float, float]] = (),
        basis: str = "",
        witness: Witness | None = None,
    ) -> Result[PlanT]:
        """A result with a plan; its status follows from the gap.

        Parameters
        ----------
        plan
            The plan.
        objective
            Its objective.
        bound
            Proven bound in the same unit, or None.
        runtime_s
            Running time in seconds.
        stop_reason
            Why the search stopped.
        seed
            Seed of the search.
        method
            Name of the solver.
        history
            ``(time_s, objective)`` of each improvement.
        basis
            Basis of the bound.
        witness
            Data from which the checker recomputes the bound.

        Returns
        -------
        Result[PlanT]
            OPTIMAL exactly when the gap is within 1e-6.
        """
        gap = relative_gap(objective, bound)
        status = Status.OPTIMAL if gap is not None and gap <= OPTIMAL_GAP else Status.FEASIBLE
        return cls(
            plan,
            status,
            objective,
            bound,
            runtime_s,
            stop_reason,
            seed,
            method,
            tuple(history),
            basis=basis,
            witness=witness,
        )

    @property
    def gap(self) -> float | None:
        """Relative gap between objective and bound, None without a bound."""
        return relative_gap(self.objective, self.bound)

    def certificate(self) -> Certificate:
        """The part of this result that is stored in a plan file."""
        return Certificate(
            self.method,
            self.status,
            self.objective,
            self.bound,
            self.gap,
            self.stop_reason,
            self.runtime_s,
            self.seed,
            self.basis,
            self.witness,
        )

    def __repr__(self) -> str:
        # plans have short representations; tuples of devices may be long
        plan_text = reprlib.repr(self.plan) if isinstance(self.plan, tuple) else repr(self.plan)
        return f"Result({self}, plan={plan_text})"

    def _repr_html_(self) -> str:
        plan_html = getattr(self.plan, "_repr_html_", None)
        return f"<p>{escape(str(self))}</p>{'' if plan_html is None else plan_html()}"

    def __str__(self) -> str:
        def format_value(value: float | None, spec: str) -> str:
            return "-" if value is None else format(value, spec)

        return (
            f"{self.status} objective={format_value(self.objective, '.6g')}"
            f" bound={format_value(self.bound, '.6g')} gap={format_value(self.gap, '.2%')}"
            f" method={self.method} seed={self.seed}"
            f" time={self.runtime_s:.2f}s stopped by: {self.stop_reason}"
        )


def objective_or_inf(result: Result[Any]) -> float:
    """The objective of a minimisation; infinite if nothing was found."""
    return math.inf if result.objective is None else result.objective
