"""Ranks in order, compared with hand-written grids and with full enumeration."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.planning.baselines.dtfm import dtfm_rule
from planner.planning.baselines.rank_order import (
    Outermost,
    RanksByRegion,
    nearest_orders,
    one_region,
    rank_layouts,
    ranks_by_neighbour,
    ranks_by_region,
    ranks_grid,
    region_order,
)
from planner.planning.baselines.search import ORDERS, BaselinePlan
from planner.planning.evaluation import straight_plan
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.problem import PlanningProblem
from planner.planning.request import OperationOrder, PlanRequest
from planner.planning.shape import shape_of
from planner.planning.straight.placement_bound import placement_bound_s
from planner.problems import ProblemError
from planner.problems.answers import AssignmentPlan
from planner.workload.costs import split_costs
from tests.conftest import random_network, regional_network, tiny_workload

WORDS = 2003


def problem_of(
    n: int, seed: int = 0, memory: float = 16e9, words: int = 61, **fields: object
) -> PlanningProblem:
    """Different pairs, equal devices, two microbatches per device."""
    cluster = pl.Cluster(random_network(n, seed), pl.Devices(1e9, memory))
    workload = tiny_workload(batch_samples=2 * n, words=words)
    return PlanningProblem(cluster, workload, PlanRequest(**fields))  # type: ignore[arg-type]


def regions_of(names: str, rates: dict[str, float]) -> pl.Network:
    """One device per letter, which is its region; 1e6 bytes/s within and 50 ms between regions."""
    n = len(names)
    latency, bandwidth = np.full((n, n), 0.05), np.full((n, n), 1e6)
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if a == b:
                latency[i, j], bandwidth[i, j] = 0.001, rates[a]
    ids = [f"{a}{i}" for i, a in enumerate(names)]
    return pl.Network(latency, bandwidth, ids, list(names))


def best_order(found: RanksByRegion) -> BaselinePlan:
    """Return the better of both orders."""
    return found.best[1]


def simulated_step_s(
    problem: PlanningProblem, size: int, order: OperationOrder, grid: list[list[int]]
) -> float:
    """Return the simulated step time of one grid."""
    asked = PlanningProblem(
        problem.cluster,
        problem.workload.replace(microbatch_samples=size),
        PlanRequest(stages=len(grid[0]), schedule=order),
    )
    plan = straight_plan(asked, shape_of(asked), AssignmentPlan.of_grid(grid))
    return plan.predicted.step_s


def test_region_by_region() -> None:
    """Regions in order of appearance; without regions, the file's order."""
    network = regions_of("abacb", dict.fromkeys("abc", 1e9))
    assert region_order(network) == (0, 2, 1, 4, 3)
    assert region_order(random_network(3)) == (0, 1, 2)


def test_which_ranks_hold_which_stage() -> None:
    """Rows are pipelines; neighbours either average or form a pipeline."""
    ranks = (5, 0, 1, 2, 3, 4)
    assert ranks_grid(ranks, 2, Outermost.PIPELINE).tolist() == [[5, 2], [0, 3], [1, 4]]
    assert ranks_grid(ranks, 2, Outermost.DATA).tolist() == [[5, 0], [1, 2], [3, 4]]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_best_of_all_grids_written_by_hand(seed: int) -> None:
    """Four devices: 1, 2 and 4 stages, microbatches of 1 to 8 samples, both orders."""
    problem = problem_of(4, seed)
    grids = {
        Outermost.PIPELINE: ([[0], [1], [2], [3]], [[0, 2], [1, 3]], [[0, 1, 2, 3]]),
        Outermost.DATA: ([[0], [1], [2], [3]], [[0, 1], [2, 3]], [[0, 1, 2, 3]]),
    }
    found = ranks_by_region(problem)
    tried = 0
    for kind, plan in ((Outermost.PIPELINE, found.pipeline), (Outermost.DATA, found.data)):
        steps = {
            (len(grid[0]), len(grid), size, str(order)): simulated_step_s(
                problem, size, order, grid
            )
            for grid in grids[kind]
            for size in (1, 2, 4, 8)
            if 8 // size >= len(grid)
            for order in ORDERS
        }
        tried += len(steps)
        assert plan is not None
        assert plan.step_s == min(steps.values())
        key = plan.stages, plan.pipelines, plan.microbatch_samples, plan.order
        assert steps[key] == plan.step_s
    tally = found.tally
    assert tally.simulated + tally.excluded == tried
    assert tally.excluded > 0 and tally.refused == tally.left_out == 0
    assert found.pipeline is not None and found.data is not None
    assert best_order(found).step_s == min(found.pipeline.step_s, found.data.step_s)


@settings(max_examples=20)
@given(
    st.integers(0, 1000),
    st.sampled_from([(2, 2), (4, 1), (1, 4)]),
    st.sampled_from(list(OperationOrder)),
    st.sampled_from(["first", "last"]),
    st.sampled_from([None, 2]),
    st.sampled_from(["equal", "adaptive"]),
)
def test_no_order_beats_the_bound(
    seed: int,
    shape_: tuple[int, int],
    order: OperationOrder,
    head: str,
    group_size: int | None,
    averaging: str,
) -> None:
    """Different devices, an odd microbatch size, all grids."""
    stages, pipelines = shape_
    rng = np.random.default_rng(seed)
    network = pl.Network(rng.uniform(0.005, 0.25, (4, 4)), 10 ** rng.uniform(4, 7, (4, 4)))
    cluster = pl.Cluster(network, pl.Devices(rng.uniform(1e8, 1e9, 4), 16e9))
    request = PlanRequest(
        stages=stages, schedule=order, head=head, group_size=group_size, averaging=averaging
    )
    problem = PlanningProblem(cluster, tiny_workload(batch_samples=5), request)
    shape = shape_of(problem)
    for ranks in permutations(range(4)):
        assignment = AssignmentPlan.of_grid(np.reshape(ranks, (pipelines, stages)))
        step_s = straight_plan(problem, shape, assignment).predicted.step_s
        assert placement_bound_s(problem, shape, assignment) <= step_s * (1 + 1e-9)


def test_bound_is_tight_for_one_device() -> None:
    """Only its operations take time."""
    problem = problem_of(1, stages=1)
    shape = shape_of(problem)
    assignment = AssignmentPlan.of_grid([[0]])
    step_s = straight_plan(problem, shape, assignment).predicted.step_s
    assert placement_bound_s(problem, shape, assignment) == pytest.approx(step_s)


def test_requested_settings_are_kept() -> None:
    """Except shape, order and what depends on them."""
    asked = problem_of(4, schedule="gpipe", stages=2, pipelines=2, microbatch_samples=1)
    found = ranks_by_region(asked)
    assert best_order(found).microbatch_samples == 1
    twice = ranks_by_region(problem_of(4, stages="auto", recompute="all"))
    assert best_order(twice).recompute
    assert best_order(twice).step_s > best_order(ranks_by_region(problem_of(4))).step_s


@pytest.mark.parametrize("wiring", ["flow", "stochastic"])
def test_a_plan_of_any_wiring_is_compared(wiring: str) -> None:
    """Ranks are straight for any requested wiring."""
    asked, usual = problem_of(4, wiring=wiring), problem_of(4)
    assert best_order(ranks_by_region(asked)).step_s == best_order(ranks_by_region(usual)).step_s


def test_recomputation_where_memory_is_short() -> None:
    """Plans that do not fit recompute first, and are rejected if that does not help."""
    # with so many words the logits are more than the activations that B computes again
    workload = tiny_workload(words=WORDS)
    (keeps,), (again,) = (split_costs(workload, ((0, 4),), 0, (r,)) for r in (False, True))
    memory = again.need_bytes(1)
    assert memory < keeps.need_bytes(1)
    roomy, short = (
        ranks_by_region(problem_of(1, memory=have, words=WORDS, microbatch_samples=1))
        for have in (keeps.need_bytes(1), memory)
    )
    assert not best_order(roomy).recompute and best_order(short).recompute
    assert best_order(short).step_s > best_order(roomy).step_s
    with pytest.raises(ProblemError, match="GB for its state and one microbatch"):
        ranks_by_region(problem_of(1, memory=memory - 1, words=WORDS, microbatch_samples=1))


def test_layers_are_balanced_for_different_devices() -> None:
    """The result states it."""
    cluster = pl.Cluster(random_network(2), pl.Devices([1e9, 3e9], 16e9))
    problem = PlanningProblem(cluster, tiny_workload(), PlanRequest(microbatch_samples=1))
    found = ranks_by_region(problem)
    assert best_order(found).balanced and not best_order(ranks_by_region(problem_of(2))).balanced
    request = PlanRequest(stages=2, stage_layers=((0, 1), (1, 4)))
    fixed = PlanningProblem(cluster, tiny_workload(), request)
    grid = AssignmentPlan.of_grid([[0, 1]])
    step_s = straight_plan(fixed, shape_of(fixed), grid).predicted.step_s
    assert best_order(found).step_s <= step_s


def test_nothing_fits() -> None:
    """One line with the numbers, for all devices and for one region."""
    problem = problem_of(4, memory=1e5)
    for ask in (ranks_by_region, one_region, lambda q: dtfm_rule(q, pl.MaxIterations(1))):
        with pytest.raises(ProblemError, match="GB for its state and one microbatch") as caught:
            ask(problem)
        assert "\n" not in str(caught.value)
    unable = pl.Devices(1e9, 16e9, can_compute=[True, True, False, True])
    with pytest.raises(ProblemError, match="cannot compute"):
        ranks_by_region(
            PlanningProblem(pl.Cluster(random_network(4), unable), tiny_workload(), PlanRequest())
        )


def test_groups_without_an_exact_mean() -> None:
    """Five devices in groups of three cannot average: rejected with the reason."""
    problem = problem_of(5, group_size=3)
    for ask in (ranks_by_region, lambda q: dtfm_rule(q, pl.MaxIterations(20))):
        with pytest.raises(ProblemError, match="groups of 3 do not give 5 devices"):
            ask(problem)
    assert ranks_by_region(problem_of(5, group_size=5)).tally.refused == 0


def test_one_region_alone() -> None:
    """The region with the fastest links is chosen, wherever it is in the file."""
    rates = {"a": 1e6, "b": 1e6, "c": 1e8}
    network = regions_of("aabbcc", rates)
    problem = PlanningProblem(
        pl.Cluster(network, pl.Devices(1e9, 16e9)), tiny_workload(), PlanRequest()
    )
    found = one_region(problem)
    assert found.region == "c" and found.plan.devices == 2
    alone = PlanningProblem(problem.cluster.subset([4, 5]), problem.workload, problem.request)
    assert found.plan.step_s == best_order(ranks_by_region(alone)).step_s
    # a and b differ in name only: the first stands for both
    both = one_region(
        PlanningProblem(problem.cluster.subset([0, 1, 2, 3]), problem.workload, problem.request)
    )
    assert both.region == "a"
    single = PlanningProblem(problem.cluster.subset([0]), problem.workload, problem.request)
    looked = [ranks_by_region(one).tally for one in (alone, single)]
    every = sum(tally.simulated + tally.excluded for tally in looked)
    assert both.tally.simulated + both.tally.excluded == every


def test_a_few_devices_of_a_region_may_be_faster_than_all() -> None:
    """Over slow links the fastest device works alone, and the result names it."""
    network = regions_of("aaaabb", {"a": 1e3, "b": 1e3})
    devices = pl.Devices([1e9, 1e9, 3e9, 1e9, 1e9, 1e9], 16e9)
    found = one_region(
        PlanningProblem(pl.Cluster(network, devices), tiny_workload(), PlanRequest())
    )
    assert (found.region, found.plan.devices, found.name) == ("a", 1, "1 of a")
    assert found.plan.plan().cluster.flops.tolist() == [3e9]


def test_limited_effort_counts_skipped_candidates() -> None:
    """One candidate of each order is always evaluated."""
    problem = problem_of(4)
    some, every = ranks_by_region(problem, 0), ranks_by_region(problem)
    assert some.tally.simulated == 2 and some.tally.left_out > 0
    assert every.tally.left_out == 0
    assert best_order(some).step_s >= best_order(every).step_s


def test_time_limit_counts_skipped_candidates() -> None:
    """One candidate of each order is always evaluated."""
    problem = problem_of(4)
    some, every = ranks_by_region(problem, over=lambda: True), ranks_by_region(problem)
    assert some.tally.simulated == 1 and some.tally.left_out > 0
    assert best_order(some).step_s >= best_order(every).step_s
    tallies = [sum(vars(found.tally).values()) for found in (some, every)]
    assert tallies[0] <= tallies[1]


def test_results_are_deterministic() -> None:
    """Field by field."""
    assert ranks_by_region(problem_of(8, 3)) == ranks_by_region(problem_of(8, 3))
    stop = pl.MaxIterations(20)
    assert dtfm_rule(problem_of(8, 3), stop) == dtfm_rule(problem_of(8, 3), stop)


def test_dtfm_minimises_its_cost_not_the_step_time() -> None:
    """Eq. 1 of every shape, solved to optimality; the step time is simulated."""
    problem = problem_of(4, 1)
    stop = pl.MaxIterations(500)
    found = dtfm_rule(problem, stop)
    costs = {}
    for stages in (1, 2, 4):
        result = pl.plan(problem.cluster, problem.workload, stages=stages, stop=stop)
        assert result.plan is not None
        costs[stages] = result.plan.certificates["assignment"].objective
    assert found.cost_s == pytest.approx(min(costs.values()))
    assert costs[found.plan.stages] == min(costs.values())
    assert found.plan.microbatch_samples == problem.workload.microbatch_samples
    assert found.refused == 0
    assert found.tried.step_s <= found.plan.step_s


def test_layouts_of_ranks_are_those_of_the_grids() -> None:
    """By device class; devices that cannot compute have no rank."""
    able = [True] * 5 + [False] + [True] * 3
    network = regional_network((3, 3, 3))
    cluster = pl.Cluster(network, pl.Devices(1e12, 16e9, can_compute=able))
    classes = DeviceClasses.of(cluster)
    order = region_order(network)
    layers = {1: [(0, 4)], 2: [(0, 2), (2, 4)], 3: [(0, 1), (1, 2), (2, 4)]}
    found = list(rank_layouts(order, classes, layers))
    assert [len(one.layers) for one in found] == [1, 1, 2, 2]  # three do not divide eight
    ranks = [d for d in order if able[d]]
    for one, outermost in zip(found, [*Outermost] * 2, strict=True):
        grid = ranks_grid(ranks, len(one.layers), outermost)
        for j, row in enumerate(one.counts):
            assert row == tuple(np.isin(grid[:, j], m).sum() for m in classes.members)


def test_nearest_neighbour_orders() -> None:
    """At most ten orders; the best one is evaluated."""
    problem = problem_of(6, 1)
    orders = nearest_orders(problem, 10)
    assert len(orders) == 6 and all(sorted(one) == list(range(6)) for one in orders)
    network = problem.cluster.network
    size = problem.workload.layers[0].output_bytes
    way = network.latency_s + size / network.bandwidth_bytes_per_s
    for one in orders:
        for k in range(1, 6):
            away = [way[one[k - 1], d] + way[d, one[k - 1]] for d in one[k:]]
            assert away[0] == min(away)
    best_order, tally = ranks_by_neighbour(problem)
    assert tally.simulated > 0 and best_order.step_s < np.inf


@pytest.mark.parametrize("sync_every", [1, 10])
def test_no_certificate_claims_the_optimum_of_another_placement(sync_every: int) -> None:
    """The optimum of eq. 1 is slower than ranks by region here."""
    network = pl.load_network("aws8_dtfm_worldwide_2022")
    cluster = pl.Cluster(
        network.replicate(
            dict.fromkeys(network.ids, 2),
            intra_latency_s=0.0005,
            intra_bandwidth_bytes_per_s=2.5e8,
        ),
        pl.Devices.of_gpu("A100"),
    )
    workload = pl.Workload.preset("gpt3-1.3b")
    result = pl.plan(cluster, workload, stages=2, stop=pl.Effort(0.2), sync_every=sync_every)
    reasons = [c.stop_reason for c in result.plan.certificates.values()]
    assert any("the optimum of eq. 1 is slower" in reason for reason in reasons)
    for certificate in result.plan.certificates.values():
        assert certificate.stop_reason != "optimal" or certificate.status == "OPTIMAL"
