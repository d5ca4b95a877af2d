"""Result of a solver: plan, status, objective and proven bound."""

from __future__ import annotations

import enum
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
    """Outcome of a solve.

    Attributes
    ----------
    plan
        The best plan found; None when infeasible or when nothing was found.
    status
        ``OPTIMAL`` exactly when ``gap <= 1e-6``. Derived in `Result.of`.
    objective
        Its cost, in the unit the solver states (seconds, steps per second).
    bound
        Proven: no plan is better than this. Below the objective when minimising,
        above it when maximising. None when there is none.
    runtime_s
        Seconds it took.
    stop_reason
        What ended the search.
    seed
        It was started with.
    method
        Name of the solver that produced the plan.
    history
        ``(time_s, objective)`` of each improvement.
    candidates
        The table that a choice was made from, if there was one.
    basis
        What the bound stands on, in words; empty without a bound.
    witness
        Small data from which `planner.check` recomputes the bound, if there is such.
    baselines
        Plans of simple rules that the search started from, if it did.
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
        candidates: Sequence[Any] = (),
        basis: str = "",
        witness: Witness | None = None,
    ) -> Result[PlanT]:
        """A result with a plan; its status follows from the gap.

        Parameters
        ----------
        plan
            None when there is none.
        objective
            Of the plan.
        bound
            Proven, in the same unit; None if there is none.
        runtime_s
            Seconds it took.
        stop_reason
            What ended the search.
        seed
            It was started with.
        method
            That was used.
        history
            ``(time_s, objective)`` of each improvement.
        candidates
            What was compared, where several were.
        basis
            The argument of the bound.
        witness
            What a checker needs to recompute it.

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
            tuple(candidates),
            basis,
            witness,
        )

    @property
    def gap(self) -> float | None:
        """Relative distance of objective and bound, None without a bound."""
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
        # plans say little of themselves, orders of devices are as long as they are
        shown = reprlib.repr(self.plan) if isinstance(self.plan, tuple) else repr(self.plan)
        return f"Result({self}, plan={shown})"

    def _repr_html_(self) -> str:
        shown = getattr(self.plan, "_repr_html_", None)
        return f"<p>{escape(str(self))}</p>{'' if shown is None else shown()}"

    def __str__(self) -> str:
        def show(value: float | None, spec: str) -> str:
            return "-" if value is None else format(value, spec)

        return (
            f"{self.status} objective={show(self.objective, '.6g')} bound={show(self.bound, '.6g')}"
            f" gap={show(self.gap, '.2%')} method={self.method} seed={self.seed}"
            f" time={self.runtime_s:.2f}s stopped by: {self.stop_reason}"
        )
