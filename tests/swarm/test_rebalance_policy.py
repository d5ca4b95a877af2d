"""Rebalancing decisions of a run against enumeration of all single moves."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.swarm.planned_moves import PlannedMoves
from planner.swarm.rebalance_policy import HYSTERESIS, RebalanceRule, decide, swarm_state
from planner.swarm.rebalancing import StageMove, SwarmState
from planner.training_plan.migration import Migration, migrated
from planner.training_plan.model import TrainingPlan
from tests.conftest import make_plan, tiny_workload


@st.composite
def swarm_states(draw: st.DrawFn) -> SwarmState:
    """Up to four stages of up to three kinds of peers."""
    stages, kinds = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    counts = st.lists(st.integers(0, 3), min_size=stages * kinds, max_size=stages * kinds)
    serving = np.array(draw(counts), dtype=np.int64).reshape(stages, kinds)
    serving[serving.sum(axis=1) == 0, 0] = 1
    numbers = st.integers(1, 9).map(float)
    work = np.array(draw(st.lists(numbers, min_size=stages, max_size=stages)))
    speed = np.array(draw(st.lists(numbers, min_size=kinds, max_size=kinds)))
    return SwarmState(serving, np.zeros_like(serving), work, speed)


@given(swarm_states(), st.sampled_from([0.0, 0.05, 0.5]))
def test_one_at_a_time_is_the_best_of_all_single_moves(
    stages: SwarmState, hysteresis: float
) -> None:
    """No single move gains more, and the gain exceeds the hysteresis."""
    policy = PlannedMoves(0.0, horizon_s=100.0, hysteresis=hysteresis, one_at_a_time=True)
    now = float(stages.rates.min())
    best = now
    for source, target, kind in product(
        range(len(stages.work)), range(len(stages.work)), range(len(stages.speed))
    ):
        if source != target and stages.serving[source, kind] and stages.serving[source].sum() > 1:
            best = max(best, _rate_after(stages, StageMove(source, target, kind, 1)))
    moves = policy.moves(stages)
    if best > now * (1 + hysteresis) * (1 + 1e-6):
        (move,) = moves
        assert move.number == 1
        assert _rate_after(stages, move) == pytest.approx(best)
    elif best < now * (1 + hysteresis):
        assert moves == []


def _rate_after(stages: SwarmState, move: StageMove) -> float:
    serving = stages.serving.copy()
    serving[move.source, move.kind] -= 1
    serving[move.target, move.kind] += 1
    assert (serving.sum(axis=1) > 0).all()
    return float(((serving @ stages.speed) / stages.work).min())


def plan_of(groups: list[list[int]]) -> TrainingPlan:
    """Pipelines of two stages."""
    return make_plan(groups, workload=tiny_workload(batch_samples=12))


def test_speeds_from_measured_times() -> None:
    """Speeds come from measured times; devices without measurements use the plan's."""
    plan = plan_of([[0, 1], [2, 3]])
    times = plan.compute_times
    planned = {
        d: times.forward_s[d] + times.backward_s[d] + (times.head_s[d] if d in (1, 3) else 0.0)
        for d in range(4)
    }
    # devices without measurements are assumed to be slowed down like the others
    late = swarm_state(plan, {0: 9 * planned[0], 2: 9 * planned[2]})
    np.testing.assert_allclose(late.speed, np.array(plan.cluster.flops) / 9)
    stages = swarm_state(plan, {0: planned[0], 1: planned[1], 2: 4 * planned[2]})
    np.testing.assert_allclose(stages.speed, np.array(plan.cluster.flops) * [1, 1, 0.25, 1])
    assert stages.serving.tolist() == [[1, 0, 1, 0], [0, 1, 0, 1]]
    rates = [1 / planned[0] + 0.25 / planned[2], 1 / planned[1] + 1 / planned[3]]
    np.testing.assert_allclose(stages.rates, rates)


@given(
    st.lists(st.floats(1e-4, 0.1), min_size=6, max_size=6),
    st.floats(1e-2, 1e2),
    st.frozensets(st.integers(0, 5)),
)
def test_decision_is_a_gain(seconds: list[float], left_s: float, stay: frozenset[int]) -> None:
    """Every decision is a gain by itself, since only one move is made."""
    plan = plan_of([[0, 1], [2, 3], [4, 5]]).replace(wiring="stochastic")
    plan = migrated(plan, Migration("2", 1, 0))
    decision = decide(plan, dict(enumerate(seconds)), 7, left_s, RebalanceRule.PLANNED, stay)
    if decision is not None:
        assert decision.after > decision.before * (1 + HYSTERESIS)
        assert int(decision.move.device) not in stay


def test_decisions_by_hand() -> None:
    """The best move if its gain is sufficient for the remaining time; SWARM's always."""
    plan = plan_of([[0, 1], [2, 3], [4, 5]])
    seconds = {0: 8.0, 1: 1.0, 2: 8.0, 3: 1.0, 4: 8.0, 5: 2.0}
    decision = decide(plan, seconds, 7, 1e6, RebalanceRule.PLANNED)
    assert decision is not None
    # stage 0 does 3/8 a second
    stages = swarm_state(plan, seconds)
    assert decision.move in (Migration("1", 0, 7), Migration("3", 0, 7))
    assert decision.before == pytest.approx(3 / 8)
    migrated = stages.serving.copy()
    migrated[:, int(decision.move.device)] = (1, 0)
    assert decision.after == pytest.approx(float((migrated @ stages.speed / stages.work).min()))
    assert decide(plan, seconds, 7, 0.0, RebalanceRule.PLANNED) is None
    other = decide(
        plan, seconds, 7, 1e6, RebalanceRule.PLANNED, frozenset({int(decision.move.device)})
    )
    assert other is not None and other.move in (Migration("1", 0, 7), Migration("3", 0, 7))
    assert other.move != decision.move and other.before == pytest.approx(3 / 8)
    even = dict.fromkeys(range(6), 1.0)
    nearly = even | {1: 1.0 - HYSTERESIS / 2}
    assert decide(plan, nearly, 7, 1e6, RebalanceRule.PLANNED) is None
    swarm = decide(plan, nearly, 7, 1e6, RebalanceRule.SWARM)
    assert swarm is not None and swarm.move == Migration("1", 0, 7)
    assert decide(plan_of([[0, 1]]), {0: 1.0, 1: 9.0}, 7, 1e6, RebalanceRule.PLANNED) is None
