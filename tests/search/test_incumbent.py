"""The incumbent: improvements, rounding of bounds, contradictions."""

from __future__ import annotations

import math

import pytest

from planner.search.certificate import Status
from planner.search.fingerprint import fingerprint
from planner.search.incumbent import ROUNDING, Incumbent, WrongBoundError
from planner.search.result import Sense
from planner.search.stop import MaxIterations


def incumbent(sense: Sense = Sense.MINIMISE, min_improvement: float = 0.0) -> Incumbent[str]:
    """An empty incumbent."""
    run = MaxIterations(10).start()
    return Incumbent(
        run, (1, 2), method="test", seed=7, sense=sense, min_improvement=min_improvement
    )


def test_only_better_plans_are_kept() -> None:
    """Plans must improve by more than the margin; a plan may be built lazily."""
    best = incumbent(min_improvement=0.1)
    assert best.offer(10.0, "first")
    assert not best.offer(9.5, lambda: pytest.fail("made without need"))
    assert best.offer(8.0, lambda: "second")
    assert not best.offer(math.nan, "nan")
    result = best.result()
    assert (result.plan, result.objective, result.status) == ("second", 8.0, Status.FEASIBLE)
    assert [objective for _, objective in result.history] == [10.0, 8.0]


@pytest.mark.parametrize("sense", list(Sense))
def test_bounds_are_relaxed_by_rounding(sense: Sense) -> None:
    """An exact bound is relaxed by the rounding margin, and still closes the gap."""
    best = incumbent(sense)
    best.offer(2.0, "plan")
    best.offer_bound(2.0, "exact")
    sign = 1 if sense is Sense.MINIMISE else -1
    assert best.bound == 2.0 * (1 - sign * ROUNDING)
    assert best.closed
    result = best.result()
    assert result.status is Status.OPTIMAL and result.stop_reason == "optimal"
    assert result.basis == "exact"


def test_best_bound_keeps_its_basis_and_witness() -> None:
    """Worse and non-finite bounds are ignored."""
    best = incumbent()
    best.offer_bound(1.0, "weak", {"kind": "weak"})
    best.offer_bound(3.0, "strong", {"kind": "strong"})
    best.offer_bound(2.0, "middle")
    best.offer_bound(-math.inf, "nothing")
    best.offer_bound(math.nan, "nothing")
    assert best.basis == "strong" and best.witness == {"kind": "strong"}
    assert best.bound == 3.0 * (1 - ROUNDING)


@pytest.mark.parametrize("sense", list(Sense))
def test_contradictions_raise(sense: Sense) -> None:
    """A contradiction raises, whether plan or bound comes second."""
    wrong = 1.01 if sense is Sense.MINIMISE else 0.99
    message = rf"problem {fingerprint((1, 2))}, seed 7, method test"
    first = incumbent(sense)
    first.offer(1.0, "plan")
    with pytest.raises(WrongBoundError, match=message):
        first.offer_bound(wrong, "a wrong proof")
    second = incumbent(sense)
    second.offer_bound(wrong, "a wrong proof")
    with pytest.raises(WrongBoundError, match="a wrong proof"):
        second.offer(1.0, "plan")
    third = incumbent(sense)
    third.offer(1.0, "plan")
    third.require_admitted(1.0, "fits")
    with pytest.raises(WrongBoundError, match="too tight"):
        third.require_admitted(wrong, "too tight")


def test_a_bound_that_equals_the_objective_ends_the_search() -> None:
    """The result is optimal, as if all plans had been tried."""
    best = incumbent()
    best.offer(5.0, "plan")
    best.offer_bound(5.0, "every plan was tried")
    assert best.result().gap == pytest.approx(0.0, abs=1e-8)
    assert best.run.check() == "optimal"


def test_without_a_plan() -> None:
    """UNKNOWN by default, or the given status."""
    assert incumbent().result().status is Status.UNKNOWN
    none = incumbent().without_plan(Status.INFEASIBLE, "no room")
    assert (none.plan, none.status, none.stop_reason) == (None, Status.INFEASIBLE, "no room")


def test_fingerprints_differ_with_the_problem() -> None:
    """Values, shapes and types count."""
    import numpy as np

    assert fingerprint(np.zeros(2)) != fingerprint(np.zeros((2, 1)))
    assert fingerprint((1, 2)) != fingerprint((1, (2,)))
    assert fingerprint((1, 2)) == fingerprint((1, 2))
