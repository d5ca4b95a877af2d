"""Best plan beside best bound: improvements, rounding, contradictions."""

from __future__ import annotations

import math

import pytest

from planner.search.certificate import Status
from planner.search.fingerprint import fingerprint
from planner.search.incumbent import ROUNDING, Incumbent, WrongBoundError
from planner.search.result import Sense
from planner.search.stop import MaxIterations


def incumbent(sense: Sense = Sense.MINIMISE, better: float = 0.0) -> Incumbent[str]:
    """A fresh one."""
    run = MaxIterations(10).start()
    return Incumbent(run, (1, 2), method="test", seed=7, sense=sense, better=better)


def test_only_better_plans_are_kept() -> None:
    """Strictly better, by more than the margin; a plan may be made late."""
    best = incumbent(better=0.1)
    assert best.offer(10.0, "first")
    assert not best.offer(9.5, lambda: pytest.fail("made without need"))
    assert best.offer(8.0, lambda: "second")
    assert not best.offer(math.nan, "nan")
    result = best.result()
    assert (result.plan, result.objective, result.status) == ("second", 8.0, Status.FEASIBLE)
    assert [objective for _, objective in result.history] == [10.0, 8.0]


@pytest.mark.parametrize("sense", list(Sense))
def test_bounds_move_away_by_rounding_once(sense: Sense) -> None:
    """An exact bound then never lies on the wrong side, and still closes the gap."""
    best = incumbent(sense)
    best.offer(2.0, "plan")
    best.raise_bound(2.0, "exact")
    sign = 1 if sense is Sense.MINIMISE else -1
    assert best.bound == 2.0 * (1 - sign * ROUNDING)
    assert best.closed
    result = best.result()
    assert result.status is Status.OPTIMAL and result.stop_reason == "optimal"
    assert result.basis == "exact"


def test_the_best_bound_keeps_its_basis_and_witness() -> None:
    """A worse one changes nothing; what says nothing is passed over."""
    best = incumbent()
    best.raise_bound(1.0, "weak", {"kind": "weak"})
    best.raise_bound(3.0, "strong", {"kind": "strong"})
    best.raise_bound(2.0, "middle")
    best.raise_bound(-math.inf, "nothing")
    best.raise_bound(math.nan, "nothing")
    assert best.basis == "strong" and best.witness == {"kind": "strong"}
    assert best.bound == 3.0 * (1 - ROUNDING)


@pytest.mark.parametrize("sense", list(Sense))
def test_contradictions_name_problem_seed_and_method(sense: Sense) -> None:
    """Whichever comes second, plan or bound; nothing is cut to fit."""
    wrong = 1.01 if sense is Sense.MINIMISE else 0.99
    message = rf"problem {fingerprint((1, 2))}, seed 7, method test"
    first = incumbent(sense)
    first.offer(1.0, "plan")
    with pytest.raises(WrongBoundError, match=message):
        first.raise_bound(wrong, "a wrong proof")
    second = incumbent(sense)
    second.raise_bound(wrong, "a wrong proof")
    with pytest.raises(WrongBoundError, match="a wrong proof"):
        second.offer(1.0, "plan")
    third = incumbent(sense)
    third.offer(1.0, "plan")
    third.require_admitted(1.0, "fits")
    with pytest.raises(WrongBoundError, match="too tight"):
        third.require_admitted(wrong, "too tight")


def test_closing_states_that_nothing_is_better() -> None:
    """The bound is the objective."""
    best = incumbent()
    best.offer(5.0, "plan")
    best.close("every plan was tried")
    assert best.result().gap == 0.0
    assert best.run.check() == "optimal"


def test_without_a_plan() -> None:
    """UNKNOWN, or what the solver says."""
    assert incumbent().result().status is Status.UNKNOWN
    none = incumbent().without_plan(Status.INFEASIBLE, "no room")
    assert (none.plan, none.status, none.stop_reason) == (None, Status.INFEASIBLE, "no room")


def test_fingerprints_differ_with_the_problem() -> None:
    """Values, shapes and types count."""
    import numpy as np

    assert fingerprint(np.zeros(2)) != fingerprint(np.zeros((2, 1)))
    assert fingerprint((1, 2)) != fingerprint((1, (2,)))
    assert fingerprint((1, 2)) == fingerprint((1, 2))
