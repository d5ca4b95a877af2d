"""Metis' rule: stages of powers of two, loads by speed, its own estimate."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.planning.baselines.metis import _Placement, _plans, _Search, group_sizes, metis_rule
from planner.planning.baselines.rank_order import unconstrained
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.problems import ProblemError
from planner.workload.costs import stage_costs
from tests.conftest import regional_network, tiny_workload

FLOPS = 1e9


def kinds(sizes: list[int], flops: list[float], batch: int = 8) -> PlanningProblem:
    """A region of each kind of devices."""
    speeds = [speed for count, speed in zip(sizes, flops, strict=True) for _ in range(count)]
    cluster = pl.Cluster(regional_network(sizes), pl.Devices(speeds, 16e9))
    workload = tiny_workload(batch_samples=batch)
    return unconstrained(PlanningProblem.of(cluster, workload, PlanRequest(), 0, {}))


@given(st.integers(1, 20), st.integers(1, 6))
def test_all_sizes_of_few_stages(devices: int, stages: int) -> None:
    """Against all products, each once."""
    powers = [1 << k for k in range(5) if 1 << k >= devices // stages]
    every = [one for one in product(powers, repeat=stages) if sum(one) == devices]
    assert sorted(group_sizes(devices, stages)) == sorted(every)


def test_equal_sizes_of_many_stages_stay_together() -> None:
    """All pairs of the smallest at once, then of what they are, as published."""
    # (1 1) (1 1) (1 1) 2: its own example
    assert sorted(group_sizes(8, 7)) == sorted(
        tuple([1] * before + [2] + [1] * (6 - before)) for before in (0, 2, 4, 6)
    )


@pytest.mark.parametrize(
    ("devices", "found"),
    [(1, 1), (2, 2), (5, 8), (8, 41), (9, 78), (12, 125), (16, 343), (20, 1343), (24, 2117)],
)
def test_as_many_sizes_as_the_published_planner_has(devices: int, found: int) -> None:
    """Of all numbers of stages; counted with its program, at variance 1 and 6 parts."""
    shapes = [s for stages in range(1, devices + 1) for s in group_sizes(devices, stages)]
    assert len(shapes) == len(set(shapes)) == found


def test_samples_go_to_devices_one_after_the_other() -> None:
    """By hand: what a device has of a round, and how much before the first comes back."""
    layers = ((0, 2), (2, 4))
    one = _Placement(((0, 1), (2,)), layers, 2, ((2, 2), (4,)))
    assert one.microbatch_samples == 2
    assert one.paths() == ((0, 2), (1, 2)) * 2
    assert one.flight() == {0: 2, 1: 2, 2: 2}
    unlike = _Placement(((0, 1), (2, 3)), layers, 1, ((3, 1), (2, 2)))
    assert unlike.paths() == ((0, 2), (0, 2), (0, 3), (1, 3))
    assert unlike.flight() == {0: 6, 1: 2, 2: 2, 3: 2}


def test_the_estimate_by_hand() -> None:
    """Two fast devices before a slow one: loads by speed, one message, one ring."""
    problem = kinds([2, 1], [3 * FLOPS, FLOPS])
    found = {
        placement: seconds
        for seconds, placement in _Search(problem).placements()
        if placement.groups == ((0, 1), (2,)) and placement.rounds == 2
    }
    ((placement, seconds),) = found.items()
    # six sevenths of the work are the first stage's, whose devices take two samples each
    assert placement.layers == ((0, 3), (3, 4)) and placement.samples == ((2, 2), (4,))
    workload = problem.workload
    first, last = (
        stage_costs(workload, *part, with_head=j == 1) for j, part in enumerate(placement.layers)
    )
    took = 2 * first.busy_s(3 * FLOPS), 4 * last.busy_s(FLOPS)
    bandwidth = problem.cluster.network.bandwidth_bytes_per_s
    slower = np.minimum(bandwidth, bandwidth.T)
    message = 2 * first.output_bytes / slower[0, 2]
    ring = first.gradient_bytes / slower[0, 1]
    assert seconds == pytest.approx(sum(took) + max(took) + message + ring)


def test_kinds_come_in_all_orders() -> None:
    """And every device takes part."""
    problem = kinds([2, 1, 1], [FLOPS, 2 * FLOPS, 3 * FLOPS])
    groups = {placement.groups for _, placement in _Search(problem).placements()}
    orders = {tuple(d for group in one for d in group) for one in groups}
    assert orders == {
        (0, 1, 2, 3),
        (0, 1, 3, 2),
        (2, 0, 1, 3),
        (2, 3, 0, 1),
        (3, 0, 1, 2),
        (3, 2, 0, 1),
    }


@settings(max_examples=30)
@given(st.data())
def test_any_placement_makes_plans_that_the_checker_accepts(data: st.DataObject) -> None:
    """Neither order waits for itself, whatever devices a stage has and however unlike they are."""
    stages = data.draw(st.integers(1, 4))
    widths = data.draw(st.lists(st.sampled_from([1, 2, 4]), min_size=stages, max_size=stages))
    speeds = [data.draw(st.sampled_from([FLOPS, 2 * FLOPS, 3 * FLOPS])) for _ in range(sum(widths))]
    problem = kinds([1] * len(speeds), speeds, batch=8 * data.draw(st.integers(1, 3)))
    ends = np.cumsum([0, *widths]).tolist()
    groups = tuple(tuple(range(a, b)) for a, b in pairwise(ends))
    search = _Search(problem)
    made = [one for _, one in search.of(groups)]
    for placement in made:
        plans, short = _plans(problem, placement, recompute=False)
        assert len(plans) == 2 and not short
        for plan in plans:
            assert not pl.check(plan)
            counts = Counter(d for path in plan.schedules[0].paths for d in path)
            each = placement.microbatch_samples
            for group, row in zip(placement.groups, placement.samples, strict=True):
                dealt = [counts[d] * each for d in group]
                assert dealt == [count * placement.rounds for count in row]


def test_the_least_estimate_is_taken_and_priced() -> None:
    """Deterministic; no plan of ours is slower."""
    problem = kinds([4, 2], [FLOPS, 2 * FLOPS])
    found = metis_rule(problem)
    again = metis_rule(problem)
    assert found.estimated_s == again.estimated_s and found.plan == again.plan
    least = min(seconds for seconds, _ in _Search(problem).placements())
    assert found.estimated_s == least
    best = pl.plan(problem.cluster, problem.workload, stop=pl.Effort(2))
    assert best.objective is not None and best.objective <= found.plan.predicted.step_s * 1.02


def test_short_memory_recomputes_or_is_refused() -> None:
    """In one line."""
    # with so many words the logits are more than the activations that B computes again
    workload = tiny_workload(batch_samples=8, words=2003)
    problem = replace(kinds([2, 2], [FLOPS, FLOPS]), workload=workload)

    def with_memory(size: float) -> PlanningProblem:
        devices = pl.Devices(FLOPS, size)
        return replace(problem, cluster=pl.Cluster(problem.cluster.network, devices))

    kept = metis_rule(problem).plan
    assert len(kept.stage_layers) == 1 and kept.recompute == (0,)
    need, less = (
        stage_costs(kept.workload, 0, 4, with_head=True, recomputed=again).need_bytes(1)
        for again in (0, 4)
    )
    assert less < need
    scarce = metis_rule(with_memory((need + less) / 2)).plan
    assert scarce.recompute == (4,) and not pl.check(scarce)
    with pytest.raises(ProblemError, match=r"no placement .* fits: memory does not hold"):
        metis_rule(with_memory(1e3))


def test_a_slow_device_may_have_no_samples() -> None:
    """And what is left is a plan."""
    problem = kinds([3, 1], [FLOPS, 9 * FLOPS])
    made = [one for _, one in _Search(problem).of(((0, 1, 2, 3),)) if 0 in one.samples[0]]
    assert made
    for placement in made:
        idle = {d for d, count in enumerate(placement.samples[0]) if count == 0}
        for plan in _plans(problem, placement, recompute=False)[0]:
            assert not pl.check(plan)
            assert {d for path in plan.schedules[0].paths for d in path} == {0, 1, 2, 3} - idle
