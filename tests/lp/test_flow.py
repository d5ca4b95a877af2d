"""The flow of microbatches: by hand, within its limits, and no worse than any other flow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.lp.flow import StageFlow, solve_flow
from planner.problems import ProblemError


def made(stage: list[int], seed: int, room: float = np.inf) -> StageFlow:
    """Every node of a stage linked with all of the next, numbers at random."""
    rng = np.random.default_rng(seed)
    edges = [(u, v) for u, j in enumerate(stage) for v, k in enumerate(stage) if k == j + 1]
    source, target = (np.array([e[k] for e in edges], dtype=np.int64) for k in (0, 1))
    return StageFlow(
        np.array(stage),
        rng.uniform(0.5, 2.0, len(stage)),
        rng.uniform(0.1, 0.3, len(stage)),
        source,
        target,
        rng.uniform(0.1, 3.0, len(edges)),
        rng.uniform(0.1, 1.0, len(edges)),
        np.full(stage[-1] + 1, room),
    )


def test_two_devices_share_by_their_speed() -> None:
    """One device feeds two that take 2 s and 6 s a microbatch: 3/4 and 1/4, a period of 1.5 s."""
    flow = StageFlow(
        np.array([0, 1, 1]),
        np.array([1.0, 2.0, 6.0]),
        np.zeros(3),
        np.array([0, 0]),
        np.array([1, 2]),
        np.array([0.1, 0.1]),
        np.array([20.0, 1.0]),
        np.full(2, np.inf),
    )
    rates = solve_flow(flow, 1e6)
    assert rates.period_s == pytest.approx(1.5)
    assert rates.through == pytest.approx([1.0, 0.75, 0.25])
    assert rates.way_s == pytest.approx(0.75 * 20 + 0.25 * 1)
    # few microbatches: the way counts for more than the period
    assert solve_flow(flow, 1.0).part == pytest.approx([0.0, 1.0])


def test_memory_lengthens_the_period() -> None:
    """With room for two microbatches and a way of 10 s, one can pass every 5 s."""
    flow = StageFlow(
        np.array([0, 1]),
        np.array([1.0, 1.0]),
        np.array([1.0, 1.0]),
        np.array([0]),
        np.array([1]),
        np.array([0.5]),
        np.array([8.0]),
        np.array([2.0, np.inf]),
    )
    assert solve_flow(flow, 100.0).period_s == pytest.approx(5.0)
    none = StageFlow(**{**vars(flow), "room": np.array([0.0, 1.0])})
    with pytest.raises(ProblemError, match="no flow of microbatches fits"):
        solve_flow(none, 100.0)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 10**6))
def test_no_other_flow_is_better(sizes: list[int], seed: int) -> None:
    """Against flows drawn at random, each at the least period that it allows."""
    stage = [j for j, size in enumerate(sizes) for _ in range(size)]
    flow = made(stage, seed, room=20.0)
    rates = solve_flow(flow, 50.0)
    best = 50.0 * rates.period_s + rates.way_s
    assert period_s(flow, rates.through, rates.part) <= rates.period_s * (1 + 1e-7)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        through, part = np.zeros(len(stage)), np.zeros(len(flow.source))
        for j, size in enumerate(sizes):
            through[np.flatnonzero(flow.stage == j)] = rng.dirichlet(np.ones(size))
        part = through[flow.source] * through[flow.target]
        way = flow.own_s @ through + flow.delay_s @ part
        assert best <= (50.0 * period_s(flow, through, part) + way) * (1 + 1e-7)


def period_s(flow: StageFlow, through: np.ndarray, part: np.ndarray) -> float:
    """The least period of a flow, from the definitions."""
    for v, j in enumerate(flow.stage):
        if j < flow.stage[-1]:
            assert part[flow.source == v].sum() == pytest.approx(through[v], abs=1e-7)
        if j > 0:
            assert part[flow.target == v].sum() == pytest.approx(through[v], abs=1e-7)
    needs = [*(through * flow.busy_s), *(part * flow.pair_s)]
    for j, room in enumerate(flow.room):
        later, beyond = flow.stage >= j, flow.stage[flow.source] >= j
        way = (through * flow.own_s)[later].sum() + (part * flow.delay_s)[beyond].sum()
        needs.append(way / room)
    return float(max(needs))
