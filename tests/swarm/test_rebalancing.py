"""Rebalancing policies against enumeration, and that no move empties a stage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.swarm.move_milp import solve_moves
from planner.swarm.planned_moves import MILP_MARGIN, PlannedMoves, moves_to_reach
from planner.swarm.rebalancing import (
    Ints,
    NoMoves,
    RebalancePolicy,
    StageMove,
    SwarmPolicy,
    SwarmState,
    optimal_counts,
    optimal_rates,
)
from planner.swarm.replay import Enter, ReplayConfig, replay
from planner.swarm.traces import Market


def stages_of(
    serving: list[list[int]], loading: list[list[int]], work: list[float], speed: list[float]
) -> SwarmState:
    """From lists."""
    return SwarmState(np.array(serving), np.array(loading), np.array(work), np.array(speed))


@st.composite
def random_stages(draw: st.DrawFn, kinds: int, most: int = 3, stages: int = 3) -> SwarmState:
    """A few peers in a few stages; some stages may be empty."""
    count = draw(st.integers(2, stages))
    numbers = st.lists(st.integers(0, most), min_size=kinds, max_size=kinds)
    rows = [draw(numbers) for _ in range(count)]
    loading = [[draw(st.integers(0, 1)) for _ in range(kinds)] for _ in range(count)]
    rows[0][0] += 1
    return stages_of(
        rows,
        loading,
        [draw(st.sampled_from([1.0, 1.5, 2.0])) for _ in range(count)],
        [draw(st.sampled_from([1.0, 2.0, 2.5])) for _ in range(kinds)],
    )


def changes(stages: SwarmState, moves: list[StageMove]) -> tuple[Ints, Ints]:
    """Numbers of leaving and entering peers."""
    out, into = np.zeros_like(stages.serving), np.zeros_like(stages.serving)
    for move in moves:
        assert move.number > 0 and move.source != move.target
        out[move.source, move.kind] += move.number
        into[move.target, move.kind] += move.number
    return out, into


def all_changes(stages: SwarmState) -> list[tuple[Ints, Ints]]:
    """All moves that leave at least one serving peer in each stage."""
    count, kinds = stages.serving.shape
    cells = [range(int(n) + 1) for n in stages.serving.ravel()]
    found = []
    for leaving in itertools.product(*cells):
        out = np.array(leaving).reshape(count, kinds)
        stay = (stages.serving - out).sum(axis=1)
        if np.any((stay < 1) & (stages.serving.sum(axis=1) > 0)):
            continue
        ways = []
        for k in range(kinds):
            total = int(out[:, k].sum())
            ways.append(
                [w for w in itertools.product(range(total + 1), repeat=count) if sum(w) == total]
            )
        found += [(out, np.array(way).T) for way in itertools.product(*ways)]
    return found


@settings(max_examples=60, deadline=None)
@given(
    random_stages(1),
    st.sampled_from([0.0, 20.0]),
    st.sampled_from([0.0, 0.05, 0.3]),
    st.sampled_from([1.0, 0.9, 0.6]),
)
def test_moves_of_equal_peers_are_optimal(
    stages: SwarmState, download_s: float, price: float, keep: float
) -> None:
    """Against all possible moves and the MILP."""
    policy = PlannedMoves(
        60, horizon_s=100.0, download_s=download_s, state_bytes=10.0, price=price, keep=keep
    )
    best = max(policy.value(stages, *change) for change in all_changes(stages))
    found = changes(stages, policy.moves(stages))
    assert policy.value(stages, *found) == pytest.approx(best, abs=1e-6)
    no_moves = np.zeros_like(stages.serving), np.zeros_like(stages.serving)
    target_rate = keep * float((stages.rates_after_loading @ stages.work) / stages.work.sum())
    milp = solve_moves(stages, 100.0, download_s, 10.0 * price, target_rate, no_moves)
    assert policy.value(stages, *milp) == pytest.approx(best, rel=2e-4, abs=1e-6)
    fewest = min(
        int(out.sum())
        for out, into in all_changes(stages)
        if policy.value(stages, out, into) >= best - 1e-6
    )
    assert found[0].sum() == fewest


@settings(max_examples=25, deadline=None)
@given(
    random_stages(2, most=2),
    st.sampled_from([0.0, 20.0]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([1.0, 0.8]),
)
def test_moves_of_two_kinds_are_near_optimal(
    stages: SwarmState, download_s: float, price: float, keep: float
) -> None:
    """The MILP is optimal within its gap; the heuristic is close to it."""
    policy = PlannedMoves(
        60, horizon_s=100.0, download_s=download_s, state_bytes=10.0, price=price, keep=keep
    )
    best = max(policy.value(stages, *change) for change in all_changes(stages))
    exact = policy._milp_moves(stages)
    assert policy.value(stages, *exact) == pytest.approx(best, rel=2e-4, abs=1e-4)
    found = changes(stages, policy.moves(stages))
    assert policy.value(stages, *found) >= best * (1 - MILP_MARGIN) - 1e-4


@pytest.mark.slow
def test_optimal_moves_are_worse_over_a_trace(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Using the MILP's moves in every decision gives less throughput with more bytes."""
    market = Market(hours=2, peers=(60, 20, 10), life_s=7200.0)
    setting = ReplayConfig(
        market.trace(6), np.ones(6), np.array([1.0, 2.5, 5.0]), 121.0, 1.0, Enter.RANDOM
    )
    policy = PlannedMoves(240, horizon_s=1800.0, download_s=121.0)
    ours = replay(setting, policy, 6)
    monkeypatch.setattr("planner.swarm.planned_moves.MILP_MARGIN", 0.0)
    exact = replay(setting, policy, 6)
    assert ours.share() > exact.share() and ours.moves < exact.moves


POLICIES: list[RebalancePolicy] = [
    SwarmPolicy(60),
    PlannedMoves(60),
    PlannedMoves(
        60, horizon_s=1800.0, download_s=120.0, state_bytes=3e9, price=1e-9, hysteresis=0.01
    ),
    PlannedMoves(60, keep=0.9),
    NoMoves(),
]


@settings(max_examples=150, deadline=None)
@given(st.one_of(random_stages(1, 9, 6), random_stages(3, 9, 12)), st.sampled_from(POLICIES))
def test_no_move_empties_a_stage(stages: SwarmState, policy: RebalancePolicy) -> None:
    """For all policies; the number of peers is conserved."""
    out, into = changes(stages, policy.moves(stages))
    assert np.all(out <= stages.serving)
    assert out.sum(axis=0).tolist() == into.sum(axis=0).tolist()
    served = stages.serving.sum(axis=1) > 0
    assert np.all((stages.serving - out).sum(axis=1)[served] >= 1)


@settings(max_examples=50, deadline=None)
@given(random_stages(3, 9, 12), st.floats(0.1, 1.0))
def test_greedy_moves_reach_the_target(stages: SwarmState, part: float) -> None:
    """After the moves no stage is slower than the target rate."""
    speed = (stages.serving + stages.loading) @ stages.speed
    level = part * float(speed.sum() / stages.work.sum())
    found = moves_to_reach(stages, level)
    if found is not None:
        there = stages.serving + stages.loading - found[0] + found[1]
        assert ((there @ stages.speed) / stages.work).min() >= level * (1 - 1e-6)


def test_heuristic_is_near_the_milp() -> None:
    """Twelve stages, three kinds: rates in steps come within 3% of HiGHS."""
    rng = np.random.default_rng(3)
    stages = stages_of(
        rng.integers(1, 12, (12, 3)).tolist(),
        np.zeros((12, 3), int).tolist(),
        [1.0] * 12,
        [1, 2, 5],
    )
    policy = PlannedMoves(60)
    no_moves = np.zeros_like(stages.serving), np.zeros_like(stages.serving)
    best = policy.value(stages, *solve_moves(stages, 1800.0, 0.0, 0.0, np.inf, no_moves))
    found = policy.value(stages, *changes(stages, policy.moves(stages)))
    assert 0.97 * best < found <= best * 1.001
    assert found > 1.3 * policy.value(stages, *no_moves)


@given(st.lists(st.sampled_from([0.5, 1.0, 1.7, 3.0]), min_size=1, max_size=3), st.integers(0, 5))
def test_optimal_allocation(work: list[float], more: int) -> None:
    """Against every allocation."""
    peers = len(work) + more
    ways = [
        counts
        for counts in itertools.product(range(1, peers + 1), repeat=len(work))
        if sum(counts) == peers
    ]
    best = max(min(n / w for n, w in zip(counts, work, strict=True)) for counts in ways)
    counts = optimal_counts(np.array(work), peers)
    assert counts.sum() == peers
    assert (counts / np.array(work)).min() == pytest.approx(best)
    rates = optimal_rates(np.array(work), peers)
    assert rates[peers] == pytest.approx(best)
    assert np.all(rates[: len(work)] == 0)


def test_algorithm_2_by_hand() -> None:
    """From the least to the most loaded stage; equal loads and last peers do not move."""
    four = stages_of([[3], [5], [2], [4]], [[0]] * 4, [1.0] * 4, [1.0])
    assert SwarmPolicy(60).moves(four) == [StageMove(1, 2, 0, 1)]
    even = stages_of([[3], [3]], [[0]] * 2, [1.0] * 2, [1.0])
    assert SwarmPolicy(60).moves(even) == []
    # the second stage has less to do, and one peer
    last = stages_of([[3], [1]], [[0]] * 2, [9.0, 1.0], [1.0])
    assert SwarmPolicy(60).moves(last) == []
    # it ignores loading peers, and moves another one
    on_the_way = stages_of([[4], [3]], [[0], [1]], [1.0] * 2, [1.0])
    assert SwarmPolicy(60).moves(on_the_way) == [StageMove(0, 1, 0, 1)]
    assert PlannedMoves(60).moves(on_the_way) == []


def test_several_moves_at_once() -> None:
    """Ten surplus peers of a stage move to the two other stages."""
    stages = stages_of([[20], [4], [6]], [[0]] * 3, [1.0] * 3, [1.0])
    assert PlannedMoves(60).moves(stages) == [StageMove(0, 1, 0, 6), StageMove(0, 2, 0, 4)]


def test_rounding_causes_no_moves() -> None:
    """Rates that are not exact in binary do not cause moves."""
    for count in range(1, 60):
        for unit in (0.1, 0.3, 0.7, 1.1, 2.3):
            stages = stages_of([[count], [count], [count + 1]], [[0]] * 3, [unit] * 3, [1.0])
            assert PlannedMoves(60).moves(stages) == []


def test_hysteresis_and_price() -> None:
    """One peer of 101 wins 1%: 18 microbatches in half an hour."""
    stages = stages_of([[101], [99]], [[0]] * 2, [99.0] * 2, [1.0])
    assert PlannedMoves(60, hysteresis=0.009).moves(stages) == [StageMove(0, 1, 0, 1)]
    assert PlannedMoves(60, hysteresis=0.011).moves(stages) == []
    assert PlannedMoves(60, state_bytes=1e9, price=17e-9).moves(stages) == [StageMove(0, 1, 0, 1)]
    assert PlannedMoves(60, state_bytes=1e9, price=19e-9).moves(stages) == []
    # a download that takes as long as the horizon wins nothing
    assert PlannedMoves(60, download_s=1800.0).moves(stages) == []


def test_keep() -> None:
    """No moves while the target is met; otherwise the fewest moves that reach it."""
    near = stages_of([[96], [104], [100]], [[0]] * 3, [1.0] * 3, [1.0])
    assert PlannedMoves(60, keep=0.96).moves(near) == []
    assert PlannedMoves(60, keep=0.98).moves(near) == [StageMove(1, 0, 0, 2)]
    assert PlannedMoves(60).moves(near) == [StageMove(1, 0, 0, 4)]
