"""Checker of moves between stages: by hand, against the replay, and broken rules."""

from __future__ import annotations

import numpy as np
import pytest

import planner as pl
from planner.bench.rebalancing import played, traced
from planner.checker.rebalancing import mean_rate, mean_rate_bound
from planner.problems import ProblemError
from planner.problems.rebalancing import RebalancingPlan, RebalancingProblem, TimedMove
from planner.swarm.planned_moves import PlannedMoves
from planner.swarm.rebalancing import NoMoves, RebalancePolicy, SwarmPolicy, optimal_rates
from planner.swarm.replay import Enter, RandomDraws, ReplayConfig, replay
from planner.swarm.traces import Market, Trace

QUIET = RebalancingProblem([1, 1], [1], [[3], [1]], [], [], [], [], [], 10.0, 100.0)
"""Three peers and one; nobody comes or goes."""


def plan_of(*moves: tuple[float, int, int, int, int]) -> RebalancingPlan:
    """A plan from the moves' fields."""
    return RebalancingPlan(tuple(TimedMove(*move) for move in moves))


def test_move_by_hand() -> None:
    """A move costs a peer's ten seconds of download and doubles the slowest stage."""
    assert mean_rate(plan_of(), QUIET) == 1.0
    assert mean_rate(plan_of((0.0, 0, 1, 0, 1)), QUIET) == pytest.approx(1.9)
    assert mean_rate(plan_of((40.0, 0, 1, 0, 1)), QUIET) == pytest.approx(1.5)
    assert mean_rate_bound(QUIET) == 2.0


def test_joining_and_leaving_peers_by_hand() -> None:
    """Draws select a stage, then one of its peers, serving ones before downloading ones."""
    problem = RebalancingProblem(
        [1, 1], [1], [[2], [2]], [10, 20], [0, 0], [1, -1], [1], [[0.5, 0.9]], 50.0, 100.0
    )
    # of the three on stage 1 the one who still downloads goes: all is as before
    assert mean_rate(plan_of(), problem) == 2.0
    served = problem.replace(leaves=[[0.5, 0.0]])
    # one who serves goes at 20, the one who downloads is there at 60
    assert mean_rate(plan_of(), served) == pytest.approx((20 * 2 + 40 * 1 + 40 * 2) / 100)
    assert mean_rate_bound(served) == 2.0


@pytest.mark.parametrize(
    ("moves", "rule"),
    [
        (((0.0, 0, 1, 0, 4),), "peers"),
        (((0.0, 0, 1, 0, 1), (5.0, 1, 0, 0, 2)), "peers"),  # the second one still downloads
        (((0.0, 0, 2, 0, 1),), "stages"),
        (((0.0, 0, 1, 1, 1),), "kind"),
        (((0.0, 0, 0, 0, 1),), "move"),
        (((0.0, 0, 1, 0, 0),), "move"),
        (((101.0, 0, 1, 0, 1),), "time"),
        (((5.0, 0, 1, 0, 1), (4.0, 0, 1, 0, 1)), "time"),
        (((float("nan"), 0, 1, 0, 1),), "time"),
    ],
)
def test_first_broken_rule_is_reported(
    moves: tuple[tuple[float, int, int, int, int], ...], rule: str
) -> None:
    """The violation names the first broken rule."""
    (violation,) = pl.check(plan_of(*moves), QUIET)
    assert violation.rule == rule


@pytest.mark.parametrize(
    "policy",
    [
        NoMoves(),
        SwarmPolicy(60.0),
        PlannedMoves(0.0),
        PlannedMoves(90.0, horizon_s=1800.0, download_s=80.0),
    ],
)
@pytest.mark.parametrize(("peers", "speed"), [((12,), (1.0,)), ((9, 4), (1.0, 2.5))])
@pytest.mark.parametrize("hours", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_replay_and_checker_agree(
    policy: RebalancePolicy, peers: tuple[int, ...], speed: tuple[float, ...], hours: int
) -> None:
    """The replay counts peers by stage and kind, the checker simulates individual peers."""
    for seed, download_s in ((0, 0.0), (1, 80.0)):
        market = Market(peers=peers, hours=hours, life_s=1800.0, squeeze_s=1800.0)
        problem = traced(market, seed, (1.0, 1.3, 0.8), speed, download_s)
        plan = played(problem, policy)
        assert pl.check(plan, problem) == []
        trace = Trace(
            tuple("abc"[: len(speed)]),
            problem.serving.sum(axis=0),
            problem.time_s,
            problem.kind,
            problem.change,
            problem.end_s,
        )
        setting = ReplayConfig(trace, problem.work_s, problem.speed, download_s, enter=Enter.RANDOM)
        run = replay(
            setting, policy, draws=RandomDraws(problem.serving, problem.leaves, problem.enters)
        )
        done, best = run.done(0.0, problem.end_s)
        assert mean_rate(plan, problem) == pytest.approx(done / problem.end_s, rel=1e-9)
        assert mean_rate_bound(problem) == pytest.approx(best / problem.end_s, rel=1e-9)
        assert mean_rate(plan, problem) <= mean_rate_bound(problem) * (1 + 1e-12)


def test_bound_equals_the_best_rate_by_enumeration() -> None:
    """For every number of peers, against enumerated best rates."""
    work = np.array([1.0, 1.7, 0.4, 2.2])
    for peers, best in enumerate(optimal_rates(work, 40).tolist()):
        start = [peers, 0, 0, 0]
        still = RebalancingProblem(
            work, [1], np.array(start)[:, None], [], [], [], [], [], 0.0, 1.0
        )
        assert mean_rate_bound(still) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"work_s": [1, 0]}, "work_s and speed must be above 0"),
        ({"serving": [[1, 1], [1, 1]]}, "serving must have 2 x 1"),
        ({"serving": [[1.5], [1]]}, "serving must be whole numbers"),
        ({"time_s": [1.0]}, "differ in length"),
        ({"time_s": [1.0], "kind": [0], "change": [1]}, "1 peers come"),
        ({"time_s": [1.0], "kind": [1], "change": [1], "enters": [0]}, "kind must be"),
        ({"time_s": [1.0], "kind": [0], "change": [1], "enters": [2]}, "enters must be"),
        ({"time_s": [1.0], "kind": [0], "change": [-5], "leaves": [[0, 0]] * 5}, "more peers"),
        (
            {"time_s": [1.0], "kind": [0], "change": [-1], "leaves": [[0, 1]]},
            "leaves must be draws",
        ),
        ({"time_s": [200.0], "kind": [0], "change": [1], "enters": [0]}, "time_s must ascend"),
        ({"download_s": -1.0}, "download_s"),
        ({"speed": ["fast"]}, "speed must be finite numbers"),
    ],
)
def test_invalid_problems_are_refused(changes: dict[str, object], words: str) -> None:
    """The message has rule, value and remedy."""
    with pytest.raises(ProblemError, match=words) as caught:
        QUIET.replace(**changes)
    assert "\n" not in str(caught.value)
