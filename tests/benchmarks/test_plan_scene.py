"""A plan's flow and what trainers come to by themselves."""

from __future__ import annotations

import numpy as np
import pytest

import planner as pl
from benchmarks.swarm.plan_scene import PlanScenario, plan_routers, plan_scenario
from benchmarks.swarm.queueing import routers, simulate_queues
from planner.problems.error import ProblemError
from planner.training_plan.choices import RouterFeedback
from planner.training_plan.model import Routing, TrainingPlan


@pytest.fixture(scope="module")
def plan() -> TrainingPlan:
    """Two stages on unlike devices."""
    n = 6
    network = pl.Network(np.full((n, n), 1e-3), np.full((n, n), 1e10))
    cluster = pl.Cluster(network, pl.Devices([4e13, 4e13, 2e13, 4e13, 2e13, 2e13], 6.4e10))
    result = pl.plan(
        cluster,
        pl.Workload.preset("gpt2-small", batch_samples=128),
        stages=2,
        wiring="flow",
        stop=pl.Effort(1),
    )
    return result.plan


def shares(found: PlanScenario, counts: np.ndarray) -> tuple[list[float], list[float]]:
    """Of all microbatches, through each device: the simulation's and the plan's."""
    total = counts.sum() / found.scene.stages
    return (counts / total).tolist(), [found.parts[d] for d in range(len(counts))]


def test_a_router_that_keeps_the_flow_does_as_planned(plan: TrainingPlan) -> None:
    """Smoothing 0: the plan's parts, to a microbatch or two, in about the clock's time."""
    found = plan_scenario(plan)
    many = len(plan.schedules[0].paths)
    chosen = routers(found.scene, smoothing=0, estimates_s=found.estimates_s)
    log = simulate_queues(found.scene, chosen, many, drain=True)
    ours, planned = shares(found, log.counts(len(plan.cluster)))
    assert ours == pytest.approx(planned, abs=8 / many)
    assert log.finished_s[-1] == pytest.approx(plan.predicted.pipeline_s, rel=0.1)


def test_stochastic_wiring_comes_to_the_flow(plan: TrainingPlan) -> None:
    """From nothing, over many microbatches; and from the plan's weights."""
    found = plan_scenario(plan)
    for estimates in (None, found.estimates_s):
        chosen = routers(found.scene, estimates_s=estimates)
        log = simulate_queues(found.scene, chosen, 1500)
        counts = log.counts(len(plan.cluster), log.finished_s[300])
        ours, planned = shares(found, counts)
        assert ours == pytest.approx(planned, abs=0.05)


def test_plans_that_are_no_swarm(plan: TrainingPlan) -> None:
    """Skipped stages and helpers are refused in one line."""
    schedule = plan.schedules[0]
    cut = tuple(path[:1] for path in schedule.paths)
    partial_paths = plan.replace(schedules=(type(schedule)("x", schedule.head, cut, ()),))
    with pytest.raises(ProblemError, match="a path skips or swaps stages; take a plan"):
        plan_scenario(partial_paths)


def test_routers_of_a_plan_are_those_of_the_executor(plan: TrainingPlan) -> None:
    """And without smoothing each device sends its own microbatches where the plan does."""
    routed_by = pytest.importorskip("planner.executor.swarm.stochastic_pipeline")
    for routing in (Routing(), Routing(0.0), Routing(told=RouterFeedback.WORK)):
        chosen = plan.replace(wiring="stochastic", routing=routing)
        for d, router in enumerate(plan_routers(chosen)):
            same = routed_by.make_router(chosen, d)
            for stage in range(2):
                assert router.estimates_s(stage) == same.estimates_s(stage)
    kept = plan.replace(wiring="stochastic", routing=Routing(0.0))
    found = plan_scenario(kept, limit_memory=True)
    assert found.scene.room == tuple(plan.schedules[0].most_live())
    many = len(plan.schedules[0].paths)
    log = simulate_queues(found.scene, plan_routers(kept), many, drain=True)
    ours, planned = shares(found, log.counts(len(plan.cluster)))
    assert ours == pytest.approx(planned, abs=2 / many)
