"""Plans that average once in several steps: what they take, and what no such plan beats."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.checker.joint_bound import whole_step_bound_s
from planner.planning.evaluation import straight_plan
from planner.planning.joint.joint_bound import joint_bound
from planner.planning.problem import PlanningProblem
from planner.planning.shape import assignment_problem, shape_of
from planner.planning.step_bound import straight_bound_s
from planner.planning.straight.placement_bound import placement_bound_s
from planner.problems.answers import AssignmentPlan
from planner.search.incumbent import ROUNDING
from planner.simulator.program import compile_plan
from planner.simulator.resources import LinkResources
from planner.simulator.run import Run
from planner.simulator.simulator import cycle_steps_s, step_s, steps_by_averaging_s
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import random_network, regional_network, tiny_workload
from tests.planning.joint_plans import layouts, mean_bound_s, tiny_cluster, tiny_model, whole_plan

PERIODS = 3


def period_ends_s(plan: TrainingPlan, every: int) -> list[float]:
    """When each of some periods ends on the clock, of which the last step averages."""
    program = compile_plan(plan, LinkResources.of(plan.cluster), plan.workload)
    averages = ([False] * (every - 1) + [True]) * PERIODS
    ends = Run.planned(program, [0] * len(averages), averages=averages).times.step_end
    return ends[every - 1 :: every].tolist()  # type: ignore[no-any-return]


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4), st.integers(2, 4))
def test_no_plan_beats_the_bound_from_one_averaging_to_the_next(
    seed: int, n: int, layers: int, every: int
) -> None:
    """Any cluster, model, layout, wiring, order and shares; the checker proves the same bound."""
    rng = np.random.default_rng(seed)
    cluster, workload = tiny_cluster(n, rng), tiny_model(layers, 3, rng)
    bound = joint_bound(cluster, workload, every_steps=every)
    lasting = mean_bound_s(cluster, workload, every_steps=every)
    tried = list(layouts(n, layers))
    rng.shuffle(tried)
    for groups, split in tried[:8]:
        plan = whole_plan(cluster, workload, groups, split, rng, tied=every == 1)
        if plan is None:
            continue
        assert bound is not None and bound.witness is not None
        ends = period_ends_s(plan, every)
        assert bound.value * every * (1 - ROUNDING) <= min(np.diff(ends))
        assert lasting * every * PERIODS * (1 - ROUNDING) <= ends[-1]
        rare = plan.replace(sync=Sync(every, OuterOptimizer()))
        assert bound.value * (1 - ROUNDING) <= step_s(rare)
        assert whole_step_bound_s(bound.witness, rare, bound.value) == bound.value
        raised = whole_step_bound_s(bound.witness, rare, bound.value * 1.01)
        assert raised == pytest.approx(bound.value, rel=1e-6)
        assert whole_step_bound_s(bound.witness, plan, bound.value) is None


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([(2, 2), (4, 1), (1, 4)]), st.integers(2, 5))
def test_bounds_on_straight_pipelines(seed: int, shape_: tuple[int, int], every: int) -> None:
    """Of all grids of four devices, and of each by itself."""
    stages, pipelines = shape_
    cluster = pl.Cluster(random_network(4, seed), pl.Devices(1e9, 16e9))
    request = pl.PlanRequest(stages=stages, sync_every=every)
    problem = PlanningProblem.of(cluster, tiny_workload(batch_samples=5), request, 0, {})
    shape = shape_of(problem)
    least = math.inf
    for order in permutations(range(4)):
        placed = AssignmentPlan.of_grid(np.reshape(order, (pipelines, stages)))
        step_s = straight_plan(problem, shape, placed).predicted.step_s
        assert placement_bound_s(problem, shape, placed) * (1 - ROUNDING) <= step_s
        least = min(least, step_s)
    assert straight_bound_s(problem, shape) * (1 - ROUNDING) <= least


@pytest.mark.parametrize("fields", [{}, {"stages": 2}, {"stages": 4, "path_stages": 3}])
def test_plans_pass_their_check(fields: dict[str, Any]) -> None:
    """Whole, straight and skipping; the step is the mean of steps with averaging and without."""
    cluster = pl.Cluster(regional_network([4, 4]), pl.Devices(1e8, 16e9))
    work = tiny_workload(batch_samples=16)
    result = pl.plan(cluster, work, sync_every=10, stop=pl.Effort(0.2), seed=0, **fields)
    assert result.plan is not None and pl.check(result) == []
    assert result.plan.sync == Sync(10, OuterOptimizer())
    alone_s, averages_s = steps_by_averaging_s(result.plan)
    assert result.objective == pytest.approx((9 * alone_s + averages_s) / 10)
    assert alone_s < averages_s
    steps = cycle_steps_s(result.plan)
    assert sum(steps) / len(steps) == pytest.approx(result.objective)
    assert len(result.plan.cluster) > 1
    if "path_stages" not in fields:
        assert result.bound is not None and result.objective is not None
        assert result.bound <= result.objective


def test_ranks_by_region_have_the_pipelines_of_eq_3() -> None:
    """Regions in order are the best stages here, but not their pipelines."""
    cluster = pl.Cluster(pl.load_network("aws8_dtfm_worldwide_2022"), pl.Devices.of_gpu("A100"))
    work = pl.Workload.preset("llama-50m", sequence=64, batch_samples=16)
    found = pl.plan(cluster, work, stages=2, sync_every=4, stop=pl.Effort(0.5), seed=0)
    assert pl.check(found) == []


def test_the_outer_optimizer_takes_its_place_in_memory() -> None:
    """Two more numbers a parameter; twice asked for, once counted."""
    work = tiny_workload()
    rare = work.with_outer_state()
    assert rare.state_bytes_per_parameter == work.state_bytes_per_parameter + 8
    assert rare.with_outer_state() is rare
    need = rare.parameters * (work.state_bytes_per_parameter + 4)
    cluster = pl.Cluster(random_network(1), pl.Devices(1e12, need))
    assert pl.plan(cluster, work, stop=pl.Effort(0.1)).plan is not None
    with pytest.raises(pl.ProblemError, match="memory"):
        pl.plan(cluster, work, sync_every=2, stop=pl.Effort(0.1))


def test_pipelines_stay_within_regions() -> None:
    """Two near devices in each of four far regions: eq. 1 puts those that average together."""
    far = pl.Network(np.full((4, 4), 0.1), np.full((4, 4), 1e8))
    network = far.replicate(
        dict.fromkeys(far.ids, 2), intra_latency_s=1e-4, intra_bandwidth_bytes_per_s=1e10
    )
    cluster, work = pl.Cluster(network, pl.Devices(1e12, 16e9)), tiny_workload(batch_samples=16)
    every = pl.plan(cluster, work, stages=2, stop=pl.Effort(0.2)).plan
    rare = pl.plan(cluster, work, stages=2, sync_every=50, stop=pl.Effort(0.2)).plan
    assert every is not None and rare is not None and rare.assignment.grid is not None
    problem = PlanningProblem.of(cluster, work, pl.PlanRequest(stages=2, sync_every=50), 0, {})
    shape = shape_of(problem)
    priced = straight_plan(problem, shape, every.assignment)
    region = np.array(network.regions)[rare.assignment.grid]
    assert (region[:, 0] == region[:, 1]).all()
    subproblem = assignment_problem(cluster, problem.workload, shape)
    assert subproblem.cost(every.assignment.groups) <= subproblem.cost(rare.assignment.groups)
    assert rare.predicted.step_s <= priced.predicted.step_s


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"sync_every": 0}, "sync_every is 0; it must be at least 1"),
        ({"sync_every": 10**400}, "it must be at least 1 and at most 1,000,000"),
        ({"sync_every": 1.5}, "sync_every must be a whole number, found 1.5"),
        ({"sync_every": 2, "clip": 1.0}, "found sync_every 2; leave one of them out"),
        ({"sync_every": 2, "outer": "nesterov"}, "outer must be of type OuterOptimizer"),
    ],
)
def test_what_cannot_be_asked(fields: dict[str, object], words: str) -> None:
    """One line each."""
    with pytest.raises(pl.ProblemError, match=words):
        pl.PlanRequest(**fields)  # type: ignore[arg-type]


def test_another_outer_optimizer() -> None:
    """Goes into the plan as it is given; every step needs none."""
    outer = OuterOptimizer("nesterov", 0.5, 0.8)  # type: ignore[arg-type]
    assert pl.PlanRequest(sync_every=3, outer=outer).sync == Sync(3, outer)
    assert pl.PlanRequest(outer=outer).sync == Sync()


def test_delayed_averaging_goes_on_beside_the_next_step() -> None:
    """Never longer by more than it costs; one number more a parameter; no bound is claimed."""
    cluster = pl.Cluster(regional_network([2, 2], 3), pl.Devices(1e8, 16e9))
    work = tiny_workload(batch_samples=16)

    def made(**fields: Any) -> TrainingPlan:
        result = pl.plan(cluster, work, sync_every=2, wiring="flow", stop=pl.Effort(0.3), **fields)
        assert pl.check(result) == [] and result.plan is not None
        assert (result.bound is None) == ("delayed" in fields)
        return result.plan

    waits, late = made(stages=1), made(stages=1, delayed=True)
    assert late.sync == Sync(2, OuterOptimizer(), delayed=True)
    assert late.predicted.step_s <= waits.predicted.step_s
    more = late.workload.state_bytes_per_parameter - waits.workload.state_bytes_per_parameter
    assert more == 4
    again = late.workload.with_outer_state()
    assert again.state_bytes_per_parameter == waits.workload.state_bytes_per_parameter
    with pytest.raises(
        pl.ProblemError, match="delayed goes with sync_every above 1, found sync_every 1"
    ):
        pl.PlanRequest(delayed=True)


@pytest.mark.parametrize("every", [1, 3, 5])
def test_a_device_alone_is_optimal(every: int) -> None:
    """Its bound is its step, but for rounding."""
    cluster = pl.Cluster(random_network(1), pl.Devices(3e9, 16e9))
    work = tiny_workload(batch_samples=16)
    result = pl.plan(cluster, work, sync_every=every, stop=pl.MaxIterations(20))
    assert result.status == "OPTIMAL" and result.gap is not None and result.gap <= 1e-6


def test_what_no_bound_allows_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound that were three times as high would speak against all plans: none is stated then."""
    from planner.planning import solve as planning

    def higher(*args: Any, **fields: Any) -> Any:
        found = joint_bound(*args, **fields)
        assert found is not None
        return found._replace(value=1e3 * found.value)

    monkeypatch.setattr(planning, "joint_bound", higher)
    cluster = pl.Cluster(random_network(2), pl.Devices(3e9, 16e9))
    result = pl.plan(cluster, tiny_workload(), sync_every=4, stop=pl.Effort(0.2))
    assert result.plan is not None and result.bound is None
