"""The flow of microbatches: by hand, feasible, and no worse than random flows."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

import numpy as np
import pulp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.lp.flow import SharedLines, StageFlow, flow_linear_program, solve_flow
from planner.lp.flow_model import flow_model
from planner.lp.model_file import ModelFormat, labels, model_text
from planner.problems import ProblemError


def random_flow(stage: list[int], seed: int, room: float = np.inf) -> StageFlow:
    """A random flow network with all edges between neighbouring stages."""
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
        np.full(len(stage), room),
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
        np.full(3, np.inf),
    )
    rates = solve_flow(flow, 1e6)
    assert rates.period_s == pytest.approx(1.5)
    assert rates.node_share == pytest.approx([1.0, 0.75, 0.25])
    assert rates.round_trip_s == pytest.approx(0.75 * 20 + 0.25 * 1)
    # with few microbatches the round trip outweighs the period
    assert solve_flow(flow, 1.0).edge_share == pytest.approx([0.0, 1.0])


def test_memory_lengthens_the_period() -> None:
    """Memory for two microbatches and a round trip of 10 s: a period of 5 s."""
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


def test_memory_of_each_node_counts() -> None:
    """A node with memory for two microbatches and a delay of 20 s passes one every 10 s."""
    flow = StageFlow(
        np.array([0, 0, 1, 1]),
        np.array([1.0, 1.0, 1.0, 1.0]),
        np.zeros(4),
        np.array([0, 0, 1, 1]),
        np.array([2, 3, 2, 3]),
        np.array([0.1, 1e9, 1e9, 0.1]),
        np.array([1.0, 1.0, 1.0, 20.0]),
        np.array([2.0, 2.0, np.inf, np.inf]),
    )
    rates = solve_flow(flow, 1e6)
    assert rates.period_s == pytest.approx(1 / 1.1, rel=1e-6)
    assert rates.node_share == pytest.approx([1 / 1.1, 0.1 / 1.1] * 2, rel=1e-6)
    assert rates.remaining_s == pytest.approx([1.0, 20.0, 0.0, 0.0], abs=1e-6)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), st.integers(0, 10**6))
def test_no_other_flow_is_better(sizes: list[int], seed: int) -> None:
    """Against random flows at their minimum periods, without memory limits."""
    stage = [j for j, size in enumerate(sizes) for _ in range(size)]
    flow = random_flow(stage, seed)
    rates = solve_flow(flow, 50.0)
    best = 50.0 * rates.period_s + rates.round_trip_s
    assert period_s(flow, rates.node_share, rates.edge_share) <= rates.period_s * (1 + 1e-7)
    rng = np.random.default_rng(seed)
    for _ in range(20):
        through, part = np.zeros(len(stage)), np.zeros(len(flow.source))
        for j, size in enumerate(sizes):
            through[np.flatnonzero(flow.stage == j)] = rng.dirichlet(np.ones(size))
        part = through[flow.source] * through[flow.target]
        way = flow.compute_s @ through + flow.delay_s @ part
        assert best <= (50.0 * period_s(flow, through, part) + way) * (1 + 1e-7)


def period_s(flow: StageFlow, through: np.ndarray, part: np.ndarray) -> float:
    """The least period of a flow, from the definitions."""
    for v, j in enumerate(flow.stage):
        if j < flow.stage[-1]:
            assert part[flow.source == v].sum() == pytest.approx(through[v], abs=1e-7)
        if j > 0:
            assert part[flow.target == v].sum() == pytest.approx(through[v], abs=1e-7)
    needs = [*(through * flow.busy_s), *(part * flow.pair_s)]
    # Little's law, from the mean way beyond every node
    way = flow.compute_s.copy()
    for v in range(len(flow.stage) - 1, -1, -1):
        out = np.flatnonzero(flow.source == v)
        if len(out) and through[v] > 1e-9:
            way[v] += part[out] @ (flow.delay_s[out] + way[flow.target[out]]) / through[v]
        needs.append(through[v] * way[v] / flow.room[v])
    return float(max(needs))


@pytest.mark.parametrize("seed", range(6))
def test_written_model_has_the_same_optimum(seed: int, tmp_path: Path) -> None:
    """CBC reads period, way and what spare time lacks, where memory, lines and pairs bind."""
    shared = SharedLines(np.array([0, 0, 1]), np.array([0, 1, 2]), np.array([2.0, 1.0, 4.0]))
    flow = replace(
        random_flow([0, 0, 1, 1, 2], seed, room=3.0),
        lines=shared,
        headroom=1.6,
        headroom_penalty=0.2,
        waiting=1.4,
    )
    rates = solve_flow(flow, 50.0)
    lack = max(float((1.6 * flow.pair_s * rates.edge_share).max()) - rates.period_s, 0.0)
    path, answer = tmp_path / "flow.mps", tmp_path / "answer.txt"
    names = labels(f"s{j}.{v}" for v, j in enumerate(flow.stage))
    path.write_text(
        model_text(flow_model(flow, flow_linear_program(flow, 50.0), names), ModelFormat.MPS)
    )
    cbc = pulp.PULP_CBC_CMD().path
    subprocess.run([cbc, str(path), "solve", "solution", str(answer)], check=True)
    rows = [line.split() for line in answer.read_text().splitlines()]
    found = {row[1]: float(row[2]) for row in rows[1:]}
    assert found["period"] == pytest.approx(rates.period_s, rel=1e-6)
    assert found.get("lack", 0.0) == pytest.approx(lack, rel=1e-6, abs=1e-9)
    best = 50.0 * (rates.period_s + 0.2 * lack) + rates.round_trip_s
    assert float(rows[0][-1]) == pytest.approx(best, rel=1e-6)
