"""Two-frequency averaging: gradients within regions every step, parameters between them every H."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.checker.joint_bound import whole_step_bound_s
from planner.checker.step_simulation import simulated_times
from planner.cli.main import main
from planner.planning.averaging.stage_averaging import averaging_rounds
from planner.planning.evaluation import straight_plan
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.joint_bound import joint_bound
from planner.planning.joint.layout_averaging import two_frequency_s
from planner.planning.joint.layout_search import LayoutSearch
from planner.planning.problem import PlanningProblem
from planner.planning.shape import shape_of
from planner.planning.step_bound import straight_bound_s
from planner.planning.straight.placement_bound import placement_bound_s
from planner.problems.answers import AssignmentPlan
from planner.search.incumbent import ROUNDING
from planner.simulator.averaging_rounds import round_s, rounds_s
from planner.simulator.resources import LinkResources
from planner.simulator.simulator import predict, simulate, step_s, steps_by_averaging_s
from planner.training_plan.averaging_group import AveragingGroup, within
from planner.training_plan.choices import Codec, Phase
from planner.training_plan.error import PlanError
from planner.training_plan.file import from_dict
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.workload.compute_times import ComputeTimes
from planner.workload.layers import Layer
from planner.workload.workload import Workload
from tests.conftest import levels, make_plan, regional_network, tiny_workload
from tests.planning.joint_plans import layouts, mean_bound_s, tiny_cluster, tiny_model, whole_plan
from tests.planning.test_cost import sent_between
from tests.planning.test_joint_bound import equal_share_plan
from tests.planning.test_layouts import model
from tests.simulator.reference import Reference

RARE = Sync(5, OuterOptimizer())


def two_by_two(**changes: Any) -> TrainingPlan:
    """Four peers of one stage in two regions, with two-frequency averaging."""
    plan = make_plan([[0], [1], [2], [3]], network=regional_network([2, 2]))
    rounds = levels([(0, 1), (2, 3)], (0.25, 0.75), Phase.WITHIN)
    plan = plan.replace(averaging=(rounds,), sync=RARE)
    return plan.replace(**changes)


def test_rounds_of_uneven_regions() -> None:
    """Within each region; between them, as many slices as the smallest has devices."""
    cluster = pl.Cluster(regional_network([3, 2, 2]), pl.Devices(1e9, 16e9))
    links, vector = LinkResources.of(cluster), 4e8
    made = averaging_rounds(
        cluster, range(7), "equal", None, vector, Codec.INT8, two_frequency=True
    )
    each, between, spread = made
    assert [group.members for group in each] == [(0, 1, 2), (3, 4), (5, 6)]
    assert [group.slice for group in between] == [(0.0, 0.5), (0.5, 1.0)]
    assert [sorted(d // 3 if d < 3 else (d + 1) // 2 - 1 for d in g.members) for g in between] == [
        [0, 1, 2]
    ] * 2
    assert spread[0].shares == (0.5, 0.5, 0.0)
    # gradients as they are, 2 x 2/3 of them over a device's link; changes in 8 bits
    assert round_s(each[0], vector, links, Codec.INT8) == pytest.approx(4 / 3 * 0.4 + 0.002)
    assert within(made) == (each,)
    one = averaging_rounds(cluster, (0, 1), "adaptive", None, vector, two_frequency=True)
    assert len(one) == 1 and {group.phase for group in one[0]} == {Phase.WITHIN}


def test_devices_that_cannot_aggregate_own_no_slice() -> None:
    """A region without any aggregating device is rejected."""
    network = regional_network([3, 2, 1])
    sums = [True, False, False, False, True, False]
    cluster = pl.Cluster(network, pl.Devices(1e12, 16e9, can_aggregate=sums))
    made = averaging_rounds(cluster, range(6), "adaptive", None, 1e6, two_frequency=True)
    assert [group.members for group in made[1]] == [(0, 4, 5)]
    plan = make_plan([[k] for k in range(6)], network=network)
    plan = plan.replace(cluster=cluster, averaging=(made,), sync=RARE)
    assert from_dict(plan.to_dict()).two_frequency
    none = cluster.replace(devices=pl.Devices(1e12, 16e9, can_aggregate=[True] * 3 + [False] * 3))
    with pytest.raises(pl.ProblemError, match="no peer can aggregate"):
        averaging_rounds(none, range(6), "adaptive", None, 1e6, two_frequency=True)


def test_a_step_by_hand() -> None:
    """Two regions of two devices, all pairs 1,000 bytes a second, 1,000 parameters.

    3 s of work; gradients within a region take 4 s and 1 s there and back, in every step. Between
    regions each device exchanges half of its 4,000 bytes, 2 s and 3 s, and gives it to the other,
    2 s and 1 s: in one step of five.
    """
    part = Layer("a", 1000, 1.0, 1000.0, 0.0)
    nothing = Layer("nothing", 0, 1.0, 1000.0, 0.0)
    work = Workload("by hand", nothing, (part,), nothing, batch_samples=4)
    near = np.arange(4)[:, None] // 2 == np.arange(4)[None, :] // 2
    network = pl.Network(np.where(near, 0.5, 1.5), np.full((4, 4), 1000.0))
    plan = make_plan([[0], [1], [2], [3]], workload=work, network=network)
    rounds = levels([(0, 1), (2, 3)], (0.5, 0.5), Phase.WITHIN)
    times = ComputeTimes("by hand", *((1.0,) * 4,) * 3, (0.0,) * 4)
    plan = plan.replace(compute_times=times, averaging=(rounds,), sync=RARE)
    assert steps_by_averaging_s(plan) == pytest.approx((8.0, 16.0))
    for found in (predict(plan), simulated_times(plan)):
        assert found is not None
        assert (found.step_s, found.averaging_s) == pytest.approx(((4 * 8 + 16) / 5, 13.0))
    sent = sent_between(plan)
    # gradients in each step; a half of the changes across, the halves of others inside, in one
    assert sent[0] == pytest.approx([0.0, 4000 + 2000 / 5, 2000 / 5, 0.0])
    # the papers' clock: messages one after the other, there and then back
    alone = 2 * (0.5 + 2.0)
    assert simulate(plan, links="unlimited").step_s == pytest.approx(
        3 + alone + (2 * (1.5 + 1.0) + 0.5 + 2.0) / 5
    )


def with_two_frequencies(seed: int, n: int, layers: int, every: int) -> TrainingPlan | None:
    """Draw a layout of devices in up to three regions."""
    rng = np.random.default_rng(seed)
    cluster, workload = regions(n, rng), tiny_model(layers, 3, rng)
    tried = list(layouts(n, layers))
    groups, split = tried[int(rng.integers(len(tried)))]
    codec = Codec.INT8 if rng.random() < 0.3 else Codec.NONE
    plan = whole_plan(cluster, workload, groups, split, rng, codec=codec, two_frequency=True)
    return None if plan is None else plan.replace(sync=Sync(every, OuterOptimizer()))


def regions(n: int, rng: np.random.Generator) -> pl.Cluster:
    """A tiny cluster in up to three regions."""
    cluster = tiny_cluster(n, rng)
    names = [f"region {k}" for k in rng.integers(0, 3, n)]
    return cluster.replace(network=cluster.network.replace(regions=names))


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 3), st.integers(2, 6))
def test_simulator_and_checker_match_the_reference(
    seed: int, n: int, layers: int, every: int
) -> None:
    """Mean of consecutive steps that average within regions, and of steps that average "
    "everything."""
    plan = with_two_frequencies(seed, n, layers, every)
    if plan is None:
        return
    ends = {}
    for averages in (False, True):
        slow = Reference(plan, [0] * 4, averages=averages).run()
        ends[averages] = slow.step_end[2] - slow.step_end[1]
    expected = ((every - 1) * ends[False] + ends[True]) / every
    assert step_s(plan) == pytest.approx(expected, rel=1e-9)
    found, predicted = simulated_times(plan), predict(plan)
    assert found is not None
    for name in ("pipeline_s", "averaging_s", "step_s"):
        assert getattr(found, name) == pytest.approx(getattr(predicted, name), rel=1e-9)


PERIODS = 3


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3), st.integers(2, 3))
def test_no_plan_beats_the_bound_over_a_period(seed: int, n: int, layers: int, every: int) -> None:
    """Over consecutive periods; the checker proves the same bound."""
    rng = np.random.default_rng(seed)
    cluster, workload = regions(n, rng), tiny_model(layers, 3, rng)
    codec = Codec.INT8 if rng.random() < 0.3 else Codec.NONE
    asked: dict[str, Any] = {"every_steps": every, "two_frequency": True}
    bound = joint_bound(cluster, workload, codec.wire_ratio, **asked)
    lasting = mean_bound_s(cluster, workload, codec.wire_ratio, **asked)
    tried = list(layouts(n, layers))
    rng.shuffle(tried)
    for groups, split in tried[:3]:
        plan = whole_plan(cluster, workload, groups, split, rng, codec=codec, two_frequency=True)
        if plan is None:
            continue
        assert bound is not None and bound.witness is not None
        averages = ([False] * (every - 1) + [True]) * PERIODS
        slow = Reference(plan, [0] * len(averages), averages).run()
        ends = [slow.step_end[t] for t in range(every - 1, len(averages), every)]
        spread_s = max(
            (rounds_s(rounds[2:], _vector(plan, j), LinkResources.of(plan.cluster), codec))
            for j, rounds in enumerate(plan.averaging)
        )
        # a step may spread sums faster than the one before
        mean_s = (ends[-1] - ends[0] + spread_s) / (PERIODS - 1)
        assert bound.value * every * (1 - ROUNDING) <= mean_s
        assert lasting * every * PERIODS * (1 - ROUNDING) <= ends[-1]
        rare = plan.replace(sync=Sync(every, OuterOptimizer()))
        witness = json.loads(json.dumps(bound.witness))
        assert whole_step_bound_s(witness, rare, bound.value) == bound.value
        raised = whole_step_bound_s(witness, rare, bound.value * 1.01)
        assert raised == pytest.approx(bound.value, rel=1e-6)
        # of fewer regions it would claim more, and of plans on one clock nothing
        fewer = witness | {"regions": len(set(plan.cluster.network.regions)) - 1}
        assert whole_step_bound_s(fewer, rare, bound.value) is None
        one = plan.replace(
            averaging=tuple(((AveragingGroup.equal(g),),) for g in plan.assignment.groups)
        )
        assert whole_step_bound_s(witness, one.replace(sync=rare.sync), bound.value) is None


def test_bound_is_tight_for_one_device_per_region() -> None:
    """12 s of work per step; every other step adds 2,000 bytes each way and 1 s of latency."""
    network = pl.Network(np.full((2, 2), 0.5), np.full((2, 2), 1000.0))
    cluster = pl.Cluster(network, pl.Devices(100.0, 1e9))
    nothing = Layer("nothing", 0, 0.0, 1.0, 0.0)
    work = Workload("one", nothing, (Layer("only", 500, 100.0, 1.0, 1.0),), nothing, 8)
    order = [[(kind, b) for b in range(k, 8, 2) for kind in "FHB"] for k in range(2)]
    plan = equal_share_plan(
        cluster, work, ((0, 1),), ((0, 1),), tuple((b % 2,) for b in range(8)), order
    )
    rounds = levels([(0,), (1,)], (0.5, 0.5), Phase.WITHIN)
    plan = plan.replace(averaging=(rounds,), sync=Sync(2, OuterOptimizer()))
    bound = joint_bound(cluster, work, every_steps=2, two_frequency=True)
    assert bound is not None and bound.witness is not None
    assert step_s(plan) == pytest.approx((12 + 15) / 2)
    assert bound.value == pytest.approx((12 + 15) / 2, rel=1e-6)
    assert whole_step_bound_s(bound.witness, plan, bound.value) == bound.value
    wrong = joint_bound(cluster, work, 1.1, every_steps=2, two_frequency=True)
    assert wrong is not None and wrong.value > step_s(plan)
    assert whole_step_bound_s(wrong.witness or {}, plan, wrong.value) != wrong.value


def _vector(plan: TrainingPlan, stage: int) -> float:
    return plan.workload.gradient_bytes(plan.stage_layers, plan.head_stage)[stage]


@settings(max_examples=8)
@given(st.integers(0, 1000), st.sampled_from([(2, 2), (1, 4)]), st.integers(2, 5))
def test_bounds_on_straight_pipelines(seed: int, shape_: tuple[int, int], every: int) -> None:
    """For all grids of four devices in two regions."""
    stages, pipelines = shape_
    cluster = pl.Cluster(regional_network([2, 2], seed), pl.Devices(1e9, 16e9))
    request = pl.PlanRequest(stages=stages, sync_every=every, within="region")
    problem = PlanningProblem.of(cluster, tiny_workload(batch_samples=5), request, 0, {})
    shape, least = shape_of(problem), np.inf
    for order in permutations(range(4)):
        placed = AssignmentPlan.of_grid(np.reshape(order, (pipelines, stages)))
        took_s = straight_plan(problem, shape, placed).predicted.step_s
        assert placement_bound_s(problem, shape, placed) * (1 - ROUNDING) <= took_s
        least = min(least, took_s)
    assert straight_bound_s(problem, shape) * (1 - ROUNDING) <= least


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"stages": 1, "wiring": "flow", "codec": "int8"},
        {"stages": 2, "averaging": "adaptive"},
        {"objective": "cost", "hour_usd": 5.0, "prices": pl.Prices(100.0)},
    ],
)
def test_plans_pass_their_check(fields: dict[str, Any], tmp_path: Path) -> None:
    """Unconstrained and straight, from a file; a plan with one frequency has another hash."""
    cluster = pl.Cluster(regional_network([3, 2]), pl.Devices(1e8, 16e9, usd_per_hour=1.0))
    cluster = cluster.subset(range(4)) if "averaging" in fields else cluster
    work = tiny_workload(batch_samples=16)
    result = pl.plan(
        cluster, work, sync_every=10, within="region", stop=pl.Effort(0.2), seed=0, **fields
    )
    plan = result.plan
    assert plan is not None and plan.two_frequency and pl.check(result, cluster) == []
    assert result.bound is not None and result.objective is not None
    assert result.bound <= result.objective
    assert plan.sync == Sync(10, OuterOptimizer())
    assert plan.workload.state_bytes_per_parameter == work.state_bytes_per_parameter + 8
    pl.save_plan(plan, tmp_path / "plan.json")
    read = pl.load_plan(tmp_path / "plan.json")
    assert read.content_hash == plan.content_hash and pl.check(read, cluster) == []
    for rounds, group in zip(plan.averaging, plan.assignment.groups, strict=True):
        here = {
            cluster.network.regions[cluster.network.index_of(plan.cluster.network.ids[d])]
            for d in group
        }
        assert len(rounds[0]) == len(here)


def test_step_time_is_between_local_sgd_and_averaging_every_step() -> None:
    """It averages more than local SGD and less than averaging everything."""
    cluster = pl.Cluster(regional_network([2, 2], 3), pl.Devices(1e8, 16e9))
    work = tiny_workload(batch_samples=16)
    usual: dict[str, Any] = {"stages": 1, "wiring": "flow"}

    def took_s(**fields: Any) -> float:
        result = pl.plan(cluster, work, stop=pl.Effort(0.2), **usual, **fields)
        assert result.objective is not None
        return result.objective

    alone, each = took_s(sync_every=50), took_s()
    assert alone < took_s(sync_every=50, within="region") < each


def test_modified_plans_are_rejected() -> None:
    """Other shares within, a missing slice, a duplicate region, sums instead of rounds."""
    plan = make_plan([[k] for k in range(5)], network=regional_network([3, 2]))
    plan = plan.replace(averaging=(levels([(0, 1, 2), (3, 4)], (0.25, 0.75), Phase.WITHIN),))
    plan = plan.replace(sync=RARE)
    plan = plan.replace(predicted=predict(plan), workload=plan.workload.with_outer_state())
    assert pl.check(plan) == []
    ((each, between, spread),) = plan.averaging
    slower = (replace(each[0], shares=(0.9, 0.1, 0.0)), each[1])
    assert {v.rule for v in pl.check(plan.replace(averaging=((slower, between, spread),)))} == {
        "averaging",
        "step time",
    }
    wrong = plan.replace(averaging=((each, between[:1], spread),))
    assert any("instead of 1" in str(v) for v in pl.check(wrong))
    twice = (replace(between[0], members=(0, 1)), between[1])
    assert pl.check(plan.replace(averaging=((each, twice, spread),))) != []
    reduced = tuple(replace(group, phase=Phase.REDUCE) for group in each)
    found = pl.check(plan.replace(averaging=((reduced, between, spread),)))
    assert "step time" in {v.rule for v in found}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sync": Sync()}, "found sync of gradients of all in every step"),
        ({"sync": Sync(5, delayed=True)}, "found sync of delayed"),
        ({"clip": 1.0}, "averaging.clip"),
    ],
)
def test_unsupported_combinations(change: dict[str, Any], words: str) -> None:
    """In memory and in files."""
    plan = two_by_two(**change)
    with pytest.raises(PlanError, match=words):
        from_dict(plan.to_dict())
    assert from_dict(two_by_two().to_dict()).content_hash == two_by_two().content_hash


def test_all_stages_or_none() -> None:
    """A stage with averaging within regions beside one without is rejected."""
    plan = make_plan([[0, 1], [2, 3]], network=regional_network([2, 2])).replace(sync=RARE)
    mine = levels([(0,), (2,)], (0.5, 0.5), Phase.WITHIN)
    with pytest.raises(
        PlanError, match=r"averaging.stages\[1\]: has no groups that average within"
    ):
        from_dict(plan.replace(averaging=(mine, plan.averaging[1])).to_dict())
    with pytest.raises(PlanError, match="phases must be"):
        from_dict(plan.replace(averaging=((mine[0], mine[1]), plan.averaging[1])).to_dict())


@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=4).filter(lambda row: sum(row) > 1),
    st.integers(0, 1000),
    st.sampled_from(list(Codec)),
    st.booleans(),
)
def test_estimate_is_at_least_the_rounds_time(
    row: list[int], seed: int, codec: Codec, equal: bool
) -> None:
    """Shares may be better; for regions without shared links it is equal."""
    cluster = pl.Cluster(regional_network([3] * len(row), seed), pl.Devices(1e11, 16e9))
    classes = DeviceClasses.of(cluster, by_region=True)
    search = LayoutSearch(classes, model())
    links = search.problem.class_arrays._replace(equal_shares=equal)
    size = 1e7 * codec.wire_ratio
    each_s, rare_s = two_frequency_s(size, 1e7, np.array(row), links, search.problem.scratch)
    members = tuple(d for c, k in enumerate(row) for d in classes.members[c][:k])
    shares = "equal" if equal else "adaptive"
    made = averaging_rounds(cluster, members, shares, None, 1e7, codec, two_frequency=True)
    assert rounds_s(within(made), 1e7, LinkResources.of(cluster)) <= each_s * (1 + 1e-6)
    rare = rounds_s(made[1:], 1e7, LinkResources.of(cluster), codec)
    assert rare <= rare_s * (1 + 1e-6)
    if equal:
        assert rare == pytest.approx(rare_s, rel=1e-9)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"within": "region"},
            "above 1, found sync_every 1; give more, or leave within out",
        ),
        ({"within": "site", "sync_every": 2}, "within 'site' is unknown; choose one of region"),
        (
            {"within": "region", "sync_every": 2, "delayed": True},
            "within 'region' conflicts with delayed",
        ),
        ({"within": "region", "sync_every": 2, "group_size": 2}, "conflicts with group_size"),
        (
            {"within": "region", "sync_every": 2, "stages": 2, "path_stages": 2},
            "within is 'region', which .*; leave path_stages out",
        ),
    ],
)
def test_invalid_requests(fields: dict[str, Any], words: str) -> None:
    """One line each."""
    with pytest.raises(pl.ProblemError, match=words):
        pl.PlanRequest(**fields)


@pytest.mark.parametrize("objective", ["time", "cost"])
@pytest.mark.parametrize("averaging", ["equal", "adaptive"])
def test_regions_without_aggregating_devices(objective: str, averaging: str) -> None:
    """Their estimated time and cost are infinite."""
    sums = [True, True, False, False]
    devices = pl.Devices(1e8, 16e9, can_aggregate=sums, usd_per_hour=1.0)
    cluster = pl.Cluster(regional_network([1, 3]), devices)
    fields: dict[str, Any] = {"within": "region", "objective": objective, "averaging": averaging}
    for seed in range(3):
        result = pl.plan(
            cluster, tiny_workload(), sync_every=2, stop=pl.Effort(0.1), seed=seed, **fields
        )
        assert result.objective is not None and np.isfinite(result.objective)
        assert pl.check(result) == []


@pytest.mark.parametrize(("sizes", "words"), [([3], "one region"), ([1, 1], "for each device")])
def test_trivial_regions(sizes: list[int], words: str) -> None:
    """All devices in one region, or one device per region."""
    cluster = pl.Cluster(regional_network(sizes), pl.Devices(1e8, 16e9))
    with pytest.raises(pl.ProblemError, match=words):
        pl.plan(cluster, tiny_workload(), sync_every=2, within="region", stop=pl.Effort(0.1))


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Planned, simulated and checked; invalid requests take one line."""
    out = tmp_path / "plan.json"
    words = [
        *("plan", "--network", "aws8_dtfm_worldwide_2022", "--devices-per-region", "2"),
        *("--workload", "gpt2-small", "--effort", "0.1", "--no-compare"),
        *("--no-pictures", "--out", str(out), "--within", "region"),
    ]
    assert main(words) == 2
    assert "--within goes with --sync-every above 1" in capsys.readouterr().err
    assert main([*words, "--sync-every", "50"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "Gradients are averaged within regions in every step" in said
    assert main(["check", str(out)]) == 0
    assert main(["simulate", str(out)]) == 0
