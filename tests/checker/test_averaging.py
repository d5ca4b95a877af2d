"""The checker finds each broken rule."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from planner.checker.averaging import check_averaging
from planner.lp.solve import build_plan, solve_averaging
from planner.problems import AveragingProblem
from planner.problems.answers import AveragingPlan

PROBLEM = AveragingProblem(
    [1, 1, 1, 0],
    [2.0, 2.0, 2.0, 4.0],
    [2.0, 2.0, 2.0, 4.0],
    batch_size=6,
    gradient_bytes=2.0,
    link_bytes_per_s=np.full((4, 4), 1.5),
    can_aggregate=[True, True, False, True],
)
PLAN = solve_averaging(PROBLEM).plan


def rules(plan: Any, problem: AveragingProblem = PROBLEM) -> Any:
    """Names of the broken rules."""
    return {violation.rule for violation in check_averaging(plan, problem)}


def changed(**fields: Any) -> Any:
    """The valid plan with some fields replaced."""
    return dataclasses.replace(PLAN, **fields)


def test_solved_plan_is_valid() -> None:
    """The checker reports no violation."""
    assert check_averaging(PLAN, PROBLEM) == []


@pytest.mark.parametrize(
    ("plan", "rule"),
    [
        (changed(rates=PLAN.rates[:3]), "shape"),
        (changed(rates=-PLAN.rates), "range"),
        (changed(rates=np.full(4, np.nan)), "range"),
        (changed(steps_per_s=PLAN.steps_per_s * 1.001), "steps_per_s"),
        (changed(samples_per_step=PLAN.samples_per_step[::-1]), "samples_per_step"),
        (changed(computes=[True, True, True, True]), "c_i"),
        (changed(rates=[0, 0, 1.0, 0]), "client mode"),
        (changed(rates=PLAN.rates * 9), "upload u_i"),
        (changed(rates=PLAN.rates * 9), "download d_i"),
        (changed(rates=PLAN.rates * 9), "link t_ij"),
    ],
)
def test_each_broken_rule_is_reported(plan: Any, rule: Any) -> None:
    """A plan broken in one way names that rule."""
    assert rule in rules(plan)


class Skewed(AveragingPlan):
    """A plan whose flows do not follow from its rates."""

    @property
    def a(self) -> Any:
        return super().a * 0.5

    @property
    def g(self) -> Any:
        return super().g * np.linspace(0.5, 1, len(self.rates))

    @property
    def shares(self) -> Any:
        return np.full(len(self.rates), 0.25)


def test_flows_that_contradict_the_shares_are_reported() -> None:
    """a = c r, g = r and eq. 6."""
    plan = Skewed(PLAN.computes, PLAN.rates, PLAN.steps_per_s, PLAN.samples_per_step)
    assert {"a = c r", "g = r", "eq. 6"} <= rules(plan)


def test_alternating_phases() -> None:
    """Without overlap a step takes the sum of both times."""
    problem = PROBLEM.replace(overlap=False)
    plan = build_plan(problem, PLAN.computes, PLAN.rates)
    assert check_averaging(plan, problem) == []
    assert "steps_per_s" in rules(PLAN, problem)


def test_messages_name_peer_and_numbers() -> None:
    """The message has the field, the peer and the numbers."""
    text = str(check_averaging(changed(rates=[0, 0, 1.0, 0]), PROBLEM)[0])
    assert "client mode at peer 2" in text and "1 B/s" in text
