"""Plans of the solvers, compared with the checker and the bound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise, permutations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.planning.baselines.random_placements import random_placements
from planner.planning.evaluation import compute_times, evaluated, straight_plan
from planner.planning.partial_paths.cycle_bounds import cycle_bound_s
from planner.planning.partial_paths.schedules import partial_path_schedules
from planner.planning.problem import PlanningProblem
from planner.planning.shape import shape_of
from planner.planning.step_bound import one_round, straight_bound_s
from planner.planning.straight.placement import TRIALS_PER_EFFORT
from planner.problems.answers import AssignmentPlan
from planner.search.incumbent import ROUNDING
from planner.search.stop import SearchRun
from planner.training_plan.choices import Codec
from planner.training_plan.file import from_dict
from planner.workload.costs import split_costs, stage_costs
from tests.conftest import random_network, tiny_workload

STOP = pl.MaxIterations(200)


def cluster_of(n: int, seed: int = 0) -> pl.Cluster:
    """Different links, equal devices."""
    return pl.Cluster(random_network(n, seed), pl.Devices(1e9, 16e9))


def test_plan_is_valid_and_states_its_certificates() -> None:
    """The objective is the predicted step time; eq. 1 has a certificate if its optimum is kept."""
    equal_links = pl.Network(np.full((8, 8), 0.01), np.full((8, 8), 1e8))
    for network, certificates in (
        (random_network(8, 0), {"step"}),
        (equal_links, {"assignment", "step"}),
    ):
        cluster = pl.Cluster(network, pl.Devices(1e9, 16e9))
        result = pl.plan(cluster, tiny_workload(), stages=4, stop=STOP, seed=3)
        assert pl.check(result) == []
        assert result.plan is not None
        assert result.objective == result.plan.predicted.step_s
        assert result.bound is not None and result.bound <= result.objective
        assert set(result.plan.certificates) == certificates
        assert pl.simulate(result.plan).step_s == result.objective


def test_the_same_seed_gives_the_same_plan() -> None:
    """The same decisions; running times differ."""
    first, second = (
        pl.plan(cluster_of(8), tiny_workload(), stages=4, stop=STOP, seed=1).plan for _ in range(2)
    )
    assert first is not None and second is not None
    assert first.content_hash == second.content_hash


@settings(max_examples=15)
@given(st.integers(0, 1000), st.sampled_from([(2, 2), (4, 1), (1, 4)]), st.booleans())
def test_step_bound_holds_for_every_placement(
    seed: int, shape_: tuple[int, int], first: bool
) -> None:
    """All grids of four devices."""
    stages, pipelines = shape_
    cluster, workload = cluster_of(4, seed), tiny_workload(batch_samples=5)
    request = pl.PlanRequest(stages=stages, head="first" if first else "last")
    problem = PlanningProblem(cluster, workload, request)
    shape = shape_of(problem)
    bound = straight_bound_s(problem, shape) * (1 - ROUNDING)
    best = min(
        straight_plan(
            problem, shape, AssignmentPlan.of_grid(np.reshape(order, (pipelines, stages)))
        ).predicted.step_s
        for order in permutations(range(4))
    )
    assert bound <= best


def test_better_than_random_placement() -> None:
    """Two sites: pipelines across and groups inside, or the reverse."""
    network = pl.load_network("aws4_dtfm_regional_2022").replicate(
        dict.fromkeys(("California", "Ohio", "Oregon", "Virginia"), 4),
        intra_latency_s=0.001,
        intra_bandwidth_bytes_per_s=1e10,
    )
    cluster = pl.Cluster(network, pl.Devices.of_gpu("A100"))
    workload = pl.Workload.preset("gpt2-small", batch_samples=32)
    result = pl.plan(cluster, workload, stages=4, stop=STOP)
    problem = PlanningProblem(cluster, workload, pl.PlanRequest(stages=4))
    drawn = random_placements(problem, shape_of(problem))
    assert result.objective is not None
    assert drawn.refused == 0 and drawn.mean_step_s is not None
    assert result.objective < 0.5 * drawn.mean_step_s


def test_infeasible_random_placements_are_counted() -> None:
    """Two of four devices can hold the smaller stage only, or none the larger one."""
    workload = tiny_workload()
    problem = PlanningProblem(cluster_of(4), workload, pl.PlanRequest(stages=2))
    shape = shape_of(problem)
    small, large = sorted(cost.need_bytes(1) for cost in shape.costs(workload))
    assert small < large
    fine = random_placements(problem, shape)
    for memory, some in ([large, large, small, small], True), ([small] * 4, False):
        devices = pl.Devices(1e9, memory)
        cluster = problem.cluster.replace(devices=devices)
        drawn = random_placements(replace(problem, cluster=cluster), shape)
        assert drawn.count + drawn.refused == fine.count == 20
        assert (drawn.count > 0) is some and drawn.refused > 0
        assert (drawn.mean_step_s is None) is not some


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 3}, "into 3 equal stages; ask for one of .*, give --wiring flow, whose stages"),
        ({"stages": 9}, "stages is 9; it must be from 1 to the 8 devices"),
        ({"stages": 8}, "has 4 layers and cannot be cut into 8 stages"),
        ({"stages": 2, "pipelines": 3}, "stages x pipelines must be the number of devices"),
        ({"stages": 4, "schedule": "chaos"}, "schedule 'chaos' is unknown"),
        ({"stages": 4, "in_flight": 0}, "in_flight is 0"),
        ({"stages": 4, "method": "guess"}, "guess"),
    ],
)
def test_infeasible_requests(change: dict[str, Any], message: str) -> None:
    """Rule, value, remedy."""
    with pytest.raises(pl.ProblemError, match=message):
        pl.plan(cluster_of(8), tiny_workload(), stop=STOP, **change)


def test_infeasible_batches() -> None:
    """Too few microbatches, or a remainder."""
    with pytest.raises(ValueError, match="leave some of the 8 pipelines idle"):
        pl.plan(cluster_of(8), tiny_workload(batch_samples=4), stages=1, stop=STOP)
    odd = tiny_workload(batch_samples=9, microbatch_samples=2)
    with pytest.raises(ValueError, match="multiple of microbatch_samples"):
        pl.plan(cluster_of(8), odd, stages=4, stop=STOP)


def test_memory_limits() -> None:
    """Less memory means fewer microbatches in flight; too little is an error with the numbers."""
    workload = tiny_workload()
    stages = split_costs(workload, ((0, 2), (2, 4)), 1)
    tight = pl.Devices(1e9, max(one.need_bytes(2) + 0.5 * one.saved_bytes for one in stages))
    result = pl.plan(pl.Cluster(random_network(2), tight), workload, stages=2, stop=STOP)
    assert result.plan is not None
    assert pl.check(result.plan) == []
    with pytest.raises(ValueError, match="GB for its state and one microbatch"):
        pl.plan(pl.Cluster(random_network(2), pl.Devices(1e9, 1e5)), workload, stages=2, stop=STOP)
    with pytest.raises(ValueError, match="gpipe keeps 8 microbatches"):
        pl.plan(
            *(pl.Cluster(random_network(2), tight), workload),
            stages=2,
            stop=STOP,
            schedule="gpipe",
            recompute="none",
        )
    again = pl.plan(
        pl.Cluster(random_network(2), tight), workload, stages=2, stop=STOP, schedule="gpipe"
    )
    assert again.plan is not None and all(again.plan.recompute) and pl.check(again.plan) == []


def test_auto_chooses_the_fastest_shape() -> None:
    """Other rows of the table are slower or rejected, and equal separate plans."""
    workload = tiny_workload(batch_samples=16)
    result = pl.plan(cluster_of(8), workload, stages="auto", stop=STOP)
    assert result.plan is not None
    assert pl.check(result) == []
    assert {(c.stages, c.microbatch_samples) for c in result.candidates} >= {(1, 1), (4, 8)}
    steps = [c.step_s for c in result.candidates if c.step_s is not None]
    assert result.objective is not None and result.objective <= min(steps)
    assert result.bound is not None and result.bound <= result.objective
    with pytest.raises(ValueError, match="pipelines follows from stages 'auto'"):
        pl.plan(cluster_of(8), workload, stages="auto", pipelines=2, stop=STOP)
    with pytest.raises(ValueError, match="no shape fits this cluster"):
        pl.plan(
            pl.Cluster(random_network(4), pl.Devices(1e9, 1e4)), workload, stages="auto", stop=STOP
        )


def test_layers_follow_the_devices_speed() -> None:
    """A device three times as fast gets three of four layers; equal devices get two each."""
    workload = tiny_workload(batch_samples=64)
    free = workload.replace(head=workload.head.__class__("head", 0, 0.0, 0.0, 0.0))
    network = pl.Network(np.zeros((2, 2)), np.full((2, 2), 1e15))
    mixed = pl.Cluster(network, pl.Devices([1e9, 3e9], 16e9))
    result = pl.plan(mixed, free, stages=2, stop=STOP)
    assert result.plan is not None
    assert pl.check(result) == []
    held = {
        group[0]: stop - start
        for group, (start, stop) in zip(
            result.plan.assignment.groups, result.plan.stage_layers, strict=True
        )
    }
    assert held == {0: 1, 1: 3}
    equal = pl.plan(mixed.replace(devices=pl.Devices(1e9, 16e9)), free, stages=2, stop=STOP)
    assert equal.plan is not None
    assert equal.plan.stage_layers == ((0, 2), (2, 4))


def test_stages_have_equal_devices() -> None:
    """On a uniform network, fast and slow devices get separate stages."""
    flops = np.tile([1e9, 4e9], 4)
    network = pl.Network(np.zeros((8, 8)), np.full((8, 8), 1e15))
    workload = tiny_workload(batch_samples=16)
    result = pl.plan(pl.Cluster(network, pl.Devices(flops, 16e9)), workload, stages=2, stop=STOP)
    assert result.plan is not None
    assert pl.check(result) == []
    assert all(len({flops[d] for d in group}) == 1 for group in result.plan.assignment.groups)


@settings(max_examples=30)
@given(st.integers(1, 5), st.integers(0, 10_000))
def test_balanced_split_is_optimal(stages: int, seed: int) -> None:
    """Compared with all splits of eight layers."""
    from itertools import combinations

    from planner.planning.layer_split import balanced_split
    from planner.workload.layers import Architecture, Family

    rng = np.random.default_rng(seed)
    workload = pl.Workload.transformer(
        "w", Architecture(Family.GPT2, 8, 32, 4, 4, 64, 61, 16), batch_samples=1
    )
    cluster = pl.Cluster(random_network(stages), pl.Devices(rng.uniform(1e9, 5e9, stages), 16e9))
    groups = [[d] for d in range(stages)]

    def slowest(cuts: tuple[int, ...]) -> float:
        ends = (0, *cuts, 8)
        return max(
            (
                workload.stage(a, b).forward_flops
                + (workload.head.forward_flops if j == stages - 1 else 0)
            )
            / float(cluster.flops[j])
            for j, (a, b) in enumerate(pairwise(ends))
        )

    found = balanced_split(cluster, workload, groups, stages - 1)
    best = min(slowest(cuts) for cuts in combinations(range(1, 8), stages - 1))
    assert slowest(tuple(stop for _, stop in found[:-1])) == pytest.approx(best)


def test_adaptive_shares_spare_slow_uplinks() -> None:
    """Two peers with a tenth of the upload sum less, and averaging is faster."""
    network = pl.Network(np.zeros((4, 4)), np.full((4, 4), 1e9))
    devices = pl.Devices(1e9, 16e9, upload_bytes_per_s=[1e7, 1e7, 1e6, 1e6])
    cluster = pl.Cluster(network, devices)
    plans = {
        kind: pl.plan(cluster, tiny_workload(), stages=1, stop=STOP, averaging=kind).plan
        for kind in ("equal", "adaptive")
    }
    equal, adaptive = plans["equal"], plans["adaptive"]
    assert equal is not None and adaptive is not None
    assert pl.check(adaptive) == []
    shares = adaptive.averaging[0][0][0].shares
    assert min(shares[:2]) > max(shares[2:])
    assert adaptive.predicted.averaging_s < 0.8 * equal.predicted.averaging_s


def test_rounds_and_codec() -> None:
    """Two rounds of pairs, or a quarter of the bytes; group sizes that cannot mix are rejected."""
    cluster = cluster_of(4)
    rounds, full, coded = (
        pl.plan(cluster, tiny_workload(), stages=1, stop=STOP, **fields).plan
        for fields in ({"group_size": 2}, {}, {"codec": "int8"})
    )
    assert rounds is not None and full is not None and coded is not None
    for plan in (rounds, full, coded):
        assert pl.check(plan) == []
    assert [len(groups) for groups in rounds.averaging[0]] == [2, 2]
    assert coded.predicted.averaging_s < full.predicted.averaging_s
    # groups of the second round would encode different sums
    with pytest.raises(ValueError, match="codec 'int8' conflicts with group_size"):
        pl.plan(cluster, tiny_workload(), stages=1, stop=STOP, group_size=2, codec="int8")
    violations = pl.check(rounds.replace(codec=Codec.INT8))
    assert any("int8 with 2 rounds of stage 0" in violation.message for violation in violations)
    with pytest.raises(ValueError, match="do not give 5 devices the exact mean"):
        pl.plan(cluster_of(5), tiny_workload(), stages=1, stop=STOP, group_size=2)
    with pytest.raises(ValueError, match="codec 'zip' is unknown"):
        pl.plan(cluster, tiny_workload(), stages=1, stop=STOP, codec="zip")


SKIPPING = {"stage_sizes": (2, 2, 1, 1), "path_stages": 3, "full_every": 3}
QUICK = pl.MaxIterations(4)


def skipping_plan(cluster: pl.Cluster, **changes: object) -> pl.Result[pl.TrainingPlan]:
    """Six devices, three of four stages per path, every third iteration full."""
    return pl.plan(cluster, tiny_workload(), **{**SKIPPING, "stop": QUICK, **changes})  # type: ignore[arg-type]


def symmetric_cluster(n: int, seed: int = 0) -> pl.Cluster:
    """Equal links in both directions, as SkipPipe assumes."""
    return pl.Cluster(random_network(n, seed).symmetrised(), pl.Devices(1e9, 16e9))


def test_skipping_plan_follows_skippipe() -> None:
    """CC1, CC3, length and cycle; full iterations skip and swap nothing; means over the cycle."""
    result = skipping_plan(cluster_of(6))
    plan = result.plan
    assert plan is not None
    assert pl.check(result) == []
    assert pl.check(from_dict(plan.to_dict())) == []
    assert set(plan.certificates) == {"assignment", "paths", "step"}
    assert plan.cycle == (0, 0, 1)
    assert [len(group) for group in plan.assignment.groups] == [2, 2, 1, 1]
    stages = [[[plan.stage_of[d] for d in path] for path in s.paths] for s in plan.schedules]
    assert all(len(path) == 3 and path[0] == 0 for path in stages[0])
    # 8 microbatches visit 2 of the 3 later stages
    visits = [sum(j in path for path in stages[0]) for j in (1, 2, 3)]
    assert sum(visits) == 16 and set(visits) <= {5, 6}
    assert all(path == [0, 1, 2, 3] for path in stages[1])
    assert all(s.head == "first" for s in plan.schedules)
    starts = [path[0] for path in plan.schedules[0].paths]
    assert all(starts.count(d) == 4 for d in plan.assignment.groups[0])
    spans = [pl.simulate(plan, schedule=k).makespan_s for k in (0, 1)]
    assert spans[0] != spans[1]
    assert plan.predicted.pipeline_s == pytest.approx((2 * spans[0] + spans[1]) / 3)
    assert result.objective == plan.predicted.step_s
    assert result.bound is not None and 0 < result.bound <= result.objective


def test_skipping_plan_equals_the_path_solution() -> None:
    """Same compute times and bound, and the same makespan under the solver's transfer model."""
    cluster = symmetric_cluster(6, 3)
    # in the order of the method, which takes no effort
    fixed: dict[str, Any] = {"full_every": 0, "stage_layers": "even", "path_method": "no-tc2"}
    plan = skipping_plan(cluster, **fixed).plan
    assert plan is not None and plan.cycle == (0,)
    problem = pl.PathProblem.from_assignment(
        cluster,
        tiny_workload(),
        plan.assignment,
        path_stages=3,
        microbatches_per_start=4,
        live_memory=True,
    )
    assert plan.compute_times.forward_s == tuple(problem.forward_s)
    assert plan.compute_times.backward_s == tuple(problem.backward_s)
    assert plan.compute_times.head_s == tuple(problem.head_s)
    solved = pl.solve_paths(problem, QUICK, method="no-tc2")
    assert solved.plan is not None
    assert pl.check(solved, problem) == []
    assert solved.plan.paths == plan.schedules[0].paths
    certificate = plan.certificates["paths"]
    assert certificate.objective == pytest.approx(solved.objective, rel=1e-4)
    assert certificate.bound == pytest.approx(solved.bound, rel=1e-9)
    # the clock shares up- and downlinks, which the solver does not count
    assert pl.simulate(plan).makespan_s == pytest.approx(certificate.objective, rel=1e-4)
    assert pl.check(plan) == []
    # with directions apart the simulator's figure counts, and the solver's stays in the certificate
    uneven = skipping_plan(cluster_of(6, 3), **fixed).plan
    assert uneven is not None
    assert uneven.predicted.pipeline_s != pytest.approx(
        uneven.certificates["paths"].objective, rel=1e-3
    )
    assert pl.check(uneven) == []
    # devices' own limits slow the transfers of both
    devices = pl.Devices(1e9, 16e9, upload_bytes_per_s=[1e4, 1e5, 1e5, 1e6, 1e6, 1e6])
    limited = skipping_plan(pl.Cluster(cluster.network, devices), **fixed).plan
    assert limited is not None
    assert limited.predicted.pipeline_s > 1.1 * plan.predicted.pipeline_s
    assert pl.check(limited) == []


@settings(max_examples=8)
@given(st.integers(0, 1000), st.sampled_from([2, 3]), st.booleans())
def test_cycle_bound_holds_for_every_arrangement(seed: int, path_stages: int, tight: bool) -> None:
    """All arrangements of four devices on stages of 2, 1 and 1, links unlike in each direction."""
    workload, sizes = tiny_workload(batch_samples=6), (2, 1, 1)
    stage = stage_costs(workload, 0, 2, with_head=True)
    memory = stage.need_bytes(1) + 0.5 * stage.saved_bytes if tight else 16e9
    cluster = pl.Cluster(random_network(4, seed), pl.Devices(1e8, memory))
    lengths = [3] if path_stages == 3 else [2, 2, 3]
    request = pl.PlanRequest(
        stage_sizes=sizes, path_stages=path_stages, full_every=0 if path_stages == 3 else 3
    )
    problem = PlanningProblem(cluster, workload, request)
    shape = shape_of(problem)
    averaging = one_round(problem, shape)
    bound = cycle_bound_s(cluster, workload, sizes, 3, lengths, averaging, shape.layers) * (
        1 - ROUNDING
    )
    steps = []
    for a, b, c, d in permutations(range(4)):
        if a < b:
            assignment = AssignmentPlan.of_groups([(a, b), (c,), (d,)])
            times = compute_times(problem, shape, assignment)
            schedules, _ = partial_path_schedules(
                problem, shape, assignment, times, lambda _: pl.MaxIterations(0)
            )
            made = evaluated(problem, shape, assignment, times, schedules)
            assert pl.check(made) == []
            steps.append(made.predicted.step_s)
    assert len(steps) == 12
    assert bound <= min(steps)
    assert bound >= 0.05 * min(steps)


def test_cycle_bound_counts_the_slowest_device_in_every_step_but_one() -> None:
    """It averages in some stage, whichever; only the first step of a pass may have begun before."""
    network = random_network(6)
    slow = network.bandwidth_bytes_per_s.copy()
    slow[5], slow[:, 5] = 1e4, 1e4
    cluster = pl.Cluster(network.replace(bandwidth_bytes_per_s=slow), pl.Devices(1e9, 16e9))
    fields = {"stage_sizes": (2, 2, 2), "path_stages": 2}
    problem = PlanningProblem(cluster, tiny_workload(), pl.PlanRequest(**fields))  # type: ignore[arg-type]
    shape = shape_of(problem)
    slowest = float(one_round(problem, shape).device_s.min(axis=0).max())
    assert slowest > 10 * float(one_round(problem, shape).stage_s.min())
    result = pl.plan(cluster, tiny_workload(), stop=pl.MaxIterations(3), **fields)  # type: ignore[arg-type]
    assert result.plan is not None and len(result.plan.cycle) == 10
    assert result.bound is not None and result.objective is not None
    assert 0.9 * slowest < result.bound <= result.objective


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path_stages": 5}, "path_stages is 5; it must be 1 to the 4 stages"),
        (
            {"path_stages": None},
            "stage_sizes is .2, 2, 1, 1., which only partial paths can have; give path_stages",
        ),
        ({"full_every": 1}, "full_every is 1; give 2 to 1000, 0 for no full iteration"),
        ({"full_every": 10**19}, "full_every is 1"),
        ({"max_swaps": -1}, "max_swaps is -1; it must be at least 0"),
        ({"stage_sizes": (2, 2, 1, 2)}, "sum to the number of devices, found"),
        ({"stage_sizes": None}, "give stages, or stage_sizes"),
        ({"stage_sizes": None, "stages": 4}, r"cannot be divided into 4 equal .* such as 2,2,1,1"),
        ({"stage_sizes": (2, 2, 1.5, 0.5)}, "a stage size must be a whole number, found 1.5"),
        ({"path_stages": 2.5}, "path_stages must be a whole number, found 2.5"),
        ({"stages": 3}, "stages is 3 but stage_sizes lists 4; leave stages out"),
        ({"stages": "auto"}, "stages 'auto' goes with straight pipelines, found path_stages"),
        (
            {"pipelines": 2},
            "pipelines is 2, which only straight pipelines can have; leave path_stages out",
        ),
        ({"stage_sizes": (3, 1, 1, 1)}, "must be a multiple of 3, .* found 8; give 6 or 9"),
        ({"head": "last"}, "head is 'last'; partial paths end where they start, give 'first'"),
        ({"schedule": "gpipe"}, "schedule is 'gpipe', which only straight pipelines"),
        ({"in_flight": 0}, "in_flight is 0; it must be at least 1"),
    ],
)
def test_infeasible_skipping_requests(change: dict[str, Any], message: str) -> None:
    """Rule, value, remedy."""
    with pytest.raises(ValueError, match=message):
        skipping_plan(cluster_of(6), **change)


def test_equal_stages_full_paths_and_little_memory() -> None:
    """Equal stages keep their grid; all stages without swaps are one schedule; memory holds."""
    equal = skipping_plan(cluster_of(8), stage_sizes=None, stages=4, max_swaps=0, path_stages=4)
    assert equal.plan is not None
    assert pl.check(equal) == []
    assert equal.plan.assignment.grid is not None
    assert [s.name for s in equal.plan.schedules] == ["full"] and equal.plan.cycle == (0,)
    free = skipping_plan(symmetric_cluster(6)).plan
    narrow = skipping_plan(symmetric_cluster(6), in_flight=1).plan
    assert free is not None and narrow is not None
    assert [max(s.most_live()) for s in narrow.schedules] == [1, 1]
    assert max(free.schedules[0].most_live()) > 1
    assert narrow.predicted.pipeline_s > free.predicted.pipeline_s
    with pytest.raises(ValueError, match="GB for its state and one microbatch"):
        skipping_plan(pl.Cluster(random_network(6), pl.Devices(1e9, 1e5)))


def test_checker_recomputes_the_cycle() -> None:
    """Schedule 1 counts by its share; a wrong mean, paths' makespan or bound is found."""
    plan = skipping_plan(cluster_of(6)).plan
    assert plan is not None
    assert {v.rule for v in pl.check(plan.replace(cycle=(0, 1)))} == {"timeline", "step time"}
    paths = plan.certificates["paths"]
    assert paths.objective is not None
    for changed, rule in (
        (replace(paths, objective=paths.objective * 1.01), "timeline"),
        (replace(paths, bound=paths.objective * 1.01), "bound"),
    ):
        wrong = plan.replace(certificates={**plan.certificates, "paths": changed})
        assert rule in {v.rule for v in pl.check(wrong)}


def test_calibrated_skipping_plan() -> None:
    """Plan and paths use the measured times; no bound is claimed."""
    cluster, workload = symmetric_cluster(6), tiny_workload()
    ids = cluster.network.ids
    seconds = {"forward_s": 0.5, "backward_s": 0.75, "head_s": 0.125, "update_s": 0.0}
    calibration = pl.Calibration(
        "2026-01-01",
        {"cores": 1, "threads_per_rank": 1},
        workload.name,
        1,
        dict.fromkeys(ids, seconds),
        dict.fromkeys(ids, (1, 2)),
        0.0,
        1e9,
    )
    result = skipping_plan(cluster, calibration=calibration)
    assert result.plan is not None and result.bound is None
    assert pl.check(result) == []
    later = result.plan.assignment.groups[1][0]
    assert result.plan.compute_times.forward_s[later] == 0.5
    certificate = result.plan.certificates["paths"]
    assert certificate.objective == pytest.approx(result.plan.predicted.pipeline_s, rel=1e-5)
    assert certificate.objective > 8 / 2 * (0.5 + 0.75 + 0.125)


def test_the_same_seed_gives_the_same_skipping_plan() -> None:
    """Same assignment and paths."""
    plans = [skipping_plan(cluster_of(6), seed=2).plan for _ in range(2)]
    assert plans[0] is not None and plans[1] is not None
    assert plans[0].content_hash == plans[1].content_hash


def test_predictions_on_this_machine_follow_the_cycle() -> None:
    """One prediction per iteration of the cycle, for its schedule."""
    from planner.simulator.host_prediction import executable_workload, predict_on_host

    cluster = symmetric_cluster(6)
    plan = skipping_plan(cluster).plan
    assert plan is not None
    seconds = {"forward_s": 0.5, "backward_s": 0.75, "head_s": 0.125, "update_s": 0.25}
    calibration = pl.Calibration(
        "2026-01-01",
        {"cores": 6, "threads_per_rank": 1},
        plan.workload.name,
        1,
        dict.fromkeys(cluster.network.ids, seconds),
        {cluster.network.ids[d]: plan.stage_layers[j] for d, j in plan.stage_of.items()},
        0.0,
        1e15,
    )
    skipping, again, full = predict_on_host(plan, executable_workload(plan), calibration)
    # stage 3 has one device: 8 visits in a full iteration, 5 or 6 in the others
    assert skipping == again < full
    assert full > 8 * (0.5 + 0.75) + 0.25
    # what limits the plan's devices and sites is not on this machine
    sites = replace(
        cluster.devices,
        sites=tuple("ab"[d % 2] for d in range(6)),
        site_upload_bytes_per_s={"a": 1e3},
        upload_bytes_per_s=np.full(6, 1e3),
    )
    narrow = plan.replace(cluster=cluster.replace(devices=sites))
    assert predict_on_host(narrow, executable_workload(narrow), calibration) == [
        skipping,
        again,
        full,
    ]


@dataclass(frozen=True)
class InterruptedExchanges(pl.MaxIterations):
    """Stopping criterion interrupted while devices are exchanged."""

    def reason(self, run: SearchRun) -> str | None:
        if run.steps_per_effort == TRIALS_PER_EFFORT and run.iterations > 0:
            raise KeyboardInterrupt
        return super().reason(run)

    def portion(self, share: float, seconds: float | None = None) -> InterruptedExchanges:
        return self


def test_interrupt_during_exchanges() -> None:
    """Returns a valid plan; with ``auto`` no further shape is searched."""
    cluster = pl.Cluster(random_network(8), pl.Devices(np.tile([1e9, 4e9], 4), 16e9))
    stop = InterruptedExchanges(20)
    for stages in (2, "auto"):
        result = pl.plan(cluster, tiny_workload(batch_samples=16), stages=stages, stop=stop)
        assert result.plan is not None and pl.check(result) == []
        assert result.plan.certificates["assignment"].stop_reason == "interrupted"
    assert len(result.candidates) == 1
