"""Plans without lost devices: others of their stages take over all microbatches."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.network.cluster import Cluster
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Phase
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.rebuild import list_schedule
from planner.training_plan.remove_devices import remove_devices, require_elastic
from planner.training_plan.schedule import Schedule
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.training_plan.validation import contradictions
from tests.conftest import levels, make_plan, tiny_workload

GRID = [[0, 1, 2], [3, 4, 5]]


@st.composite
def random_shares(draw: st.DrawFn, count: int) -> tuple[float, ...]:
    """Shares that sum to 1, some of them 0."""
    weights = [draw(st.integers(0, 3)) for _ in range(count)]
    found = np.array(weights) / sum(weights) if any(weights) else np.eye(count)[0]
    return tuple(found)


@st.composite
def plans(draw: st.DrawFn, *, tied: bool = True) -> tuple[TrainingPlan, set[str]]:
    """Draw paths, shares, schedules and lost devices."""
    stages, pipelines = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    grid = [[k * stages + j for j in range(stages)] for k in range(pipelines)]
    tied = tied and draw(st.booleans())
    work = tiny_workload(tied=tied, batch_samples=draw(st.integers(pipelines, 12)))
    plan = make_plan(
        grid,
        workload=work,
        head=draw(st.sampled_from(["first", "last"])),
        schedule="gpipe",
        clip=draw(st.sampled_from([None, 1.0])),
    )
    groups = plan.assignment.groups
    count = len(plan.schedules[0].paths)
    schedules = []
    for _ in range(draw(st.integers(1, 2))):
        paths = tuple(tuple(draw(st.sampled_from(g)) for g in groups) for _ in range(count))
        bare = Schedule("any", plan.schedules[0].head, paths, ())
        room = dict.fromkeys(range(len(plan.cluster)), draw(st.integers(1, 4)))
        schedules.append(replace(bare, order=list_schedule(bare, len(plan.cluster), room)))
    averaging = []
    for j in range(len(plan.averaging)):
        group = plan.averaged_by(j)
        shares = draw(random_shares(len(group)))
        averaging.append(((AveragingGroup(group, shares, (True,) * len(group)),),))
    flags = tuple(k % len(schedules) for k in range(draw(st.integers(1, 3))))
    plan = plan.replace(schedules=tuple(schedules), averaging=tuple(averaging), cycle=flags)
    assert list(contradictions(plan)) == []
    lost: set[int] = set()
    for group in groups:
        lost |= draw(st.sets(st.sampled_from(group), max_size=len(group) - 1))
    return plan, {plan.cluster.network.ids[d] for d in lost}


@settings(max_examples=60)
@given(plans())
def test_all_microbatches_once_and_no_more_memory(drawn: tuple[TrainingPlan, set[str]]) -> None:
    """Remaining devices keep their work; the rest is done once within their memory use."""
    plan, lost = drawn
    made = remove_devices(plan, lost)
    ids, left = plan.cluster.network.ids, made.cluster.network.ids
    assert left == tuple(name for name in ids if name not in lost)
    assert set(made.left_out) == lost and made.stage_layers == plan.stage_layers
    assert list(contradictions(made)) == []
    held = np.array([s.most_live() for s in plan.schedules]).max(axis=0)
    for old, new in zip(plan.schedules, made.schedules, strict=True):
        for before, after in zip(old.paths, new.paths, strict=True):
            for d, e in zip(before, after, strict=True):
                assert plan.stage_of[d] == made.stage_of[e]
                assert ids[d] in lost or left[e] == ids[d]
        for e, most in enumerate(new.most_live()):
            assert most <= max(held[ids.index(left[e])], 1)
        done = [op for ops in new.order for op in ops]
        assert sorted(done) == sorted(op for ops in old.order for op in ops)
    for j, rounds in enumerate(made.averaging):
        (group,) = rounds[0]
        assert group.members == made.averaged_by(j) and all(group.contributes)
    assert made.content_hash == remove_devices(plan, lost).content_hash


def test_by_hand() -> None:
    """Two pipelines of three: the other device of the stage does all microbatches."""
    plan = make_plan(GRID, schedule="1f1b")
    made = remove_devices(plan, ["4"])
    assert made.assignment.groups == ((0, 3), (1,), (2, 4)) and made.assignment.grid is None
    assert made.schedules[0].paths == ((0, 1, 2), (3, 1, 4)) * 4
    assert made.averaging[1] == ((AveragingGroup((1,), (1.0,), (True,)),),)
    assert made.schedules[0].most_live()[1] == plan.schedules[0].most_live()[1] == 2
    assert remove_devices(plan, []) is plan
    # one by one is the same as together
    assert remove_devices(made, ["0"]).schedules == remove_devices(plan, ["0", "4"]).schedules


def test_faster_device_takes_more() -> None:
    """One of two remaining devices is twice as fast: 4 microbatches go to the one that is free
    first."""
    plan = make_plan([[0], [1], [2]], workload=tiny_workload(batch_samples=12))
    flops = np.array([1e12, 1e12, 2e12])
    cluster = Cluster(plan.cluster.network, replace(plan.cluster.devices, flops=flops))
    times = plan.compute_times.from_flops(
        cluster, plan.workload, plan.assignment.groups, plan.stage_layers
    )
    made = remove_devices(plan.replace(cluster=cluster, compute_times=times), ["0"])
    done = [sum(path == (d,) for path in made.schedules[0].paths) for d in (0, 1)]
    assert done == [4, 8]


def test_shares_keep_their_proportions() -> None:
    """Aggregators stay, devices that cannot aggregate get no share, hierarchical averaging becomes
    one round."""
    plan = make_plan([[0], [1], [2], [3]])
    stage = AveragingGroup((0, 1, 2, 3), (0.1, 0.2, 0.3, 0.4), (True,) * 4)
    made = remove_devices(plan.replace(averaging=(((stage,),),)), ["3"])
    assert made.averaging[0][0][0].shares == pytest.approx((1 / 6, 2 / 6, 3 / 6))
    alone = AveragingGroup((0, 1, 2, 3), (0.0, 0.0, 0.0, 1.0), (True,) * 4)
    able = replace(plan.cluster.devices, can_aggregate=[True, False, True, True])
    some = plan.replace(cluster=Cluster(plan.cluster.network, able), averaging=(((alone,),),))
    assert remove_devices(some, ["3"]).averaging[0][0][0].shares == (0.5, 0.0, 0.5)
    two = plan.replace(averaging=(levels([(0, 1), (2, 3)], (0.5, 0.5)),))
    made = remove_devices(two, ["1"])
    assert [[g.phase for g in groups] for groups in made.averaging[0]] == [[Phase.ALL]]


@st.composite
def in_regions(draw: st.DrawFn) -> tuple[TrainingPlan, set[str]]:
    """The same with two-frequency averaging in some regions."""
    plan, lost = draw(plans(tied=False))
    averaging = []
    for group in plan.assignment.groups:
        ends = sorted(draw(st.sets(st.integers(1, len(group) - 1), max_size=2)))
        sites = [group[a:b] for a, b in pairwise([0, *ends, len(group)])]
        rounds = levels(sites, draw(random_shares(len(sites))), Phase.WITHIN)
        averaging.append(rounds if len(sites) > 1 else rounds[:1])
    plan = plan.replace(averaging=tuple(averaging), sync=Sync(5, OuterOptimizer()), clip=None)
    assert list(contradictions(plan)) == []
    return plan, lost


@settings(max_examples=60)
@given(in_regions())
def test_regions_stay(drawn: tuple[TrainingPlan, set[str]]) -> None:
    """The same devices average in every step; every change reaches all remaining devices."""
    plan, lost = drawn
    made = remove_devices(plan, lost)
    ids, left = plan.cluster.network.ids, made.cluster.network.ids
    assert list(contradictions(made)) == []
    for before, after in zip(plan.averaging, made.averaging, strict=True):
        was = [tuple(ids[d] for d in g.members if ids[d] not in lost) for g in before[0]]
        now = [tuple(left[d] for d in g.members) for g in after[0]]
        assert now == [members for members in was if members]
        phases = [g.phase for groups in after for g in groups[:1]]
        assert phases == [Phase.WITHIN, Phase.EXCHANGE, Phase.SPREAD][: 3 if len(now) > 1 else 1]
    assert made.content_hash == remove_devices(plan, lost).content_hash


def test_parts_of_regions_keep_their_proportions() -> None:
    """Three regions with shares 0.1, 0.3 and 0.6, one of which is lost."""
    plan = make_plan([[d] for d in range(6)], workload=tiny_workload(batch_samples=6))
    rounds = levels([(0, 1), (2, 3), (4, 5)], (0.1, 0.3, 0.6), Phase.WITHIN)
    plan = plan.replace(averaging=(rounds,), sync=Sync(5, OuterOptimizer()))
    each, between, back = remove_devices(plan, ["4", "5"]).averaging[0]
    assert [g.members for g in each] == [(0, 1), (2, 3)]
    assert [g.shares for g in between] == [pytest.approx((0.25, 0.75))] * 2
    assert [g.slice for g in between] == [(0.0, 0.5), (0.5, 1.0)]
    assert [g.shares for g in back] == [(0.5, 0.5)] * 2
    # one device of a region left: regions exchange in one slice, which it spreads to nobody
    each, between, back = remove_devices(plan, ["5"]).averaging[0]
    assert [len(g.members) for g in each] == [2, 2, 1] and len(between) == 1
    assert between[0].shares == pytest.approx((0.1, 0.3, 0.6))
    able = replace(plan.cluster.devices, can_aggregate=[True, True, True, True, True, False])
    some = plan.replace(cluster=Cluster(plan.cluster.network, able))
    ((within,), *rest) = remove_devices(some, ["0", "1", "2", "3"]).averaging[0]
    assert within.shares == (1.0, 0.0) and not rest
    able = replace(able, can_aggregate=[False, False, True, True, False, False])
    some = plan.replace(cluster=Cluster(plan.cluster.network, able))
    with pytest.raises(PlanError, match="stage 0: none of '0', '1' can sum"):
        remove_devices(some, ["2"])


@pytest.mark.parametrize(
    ("lost", "message"),
    [
        (["1", "4"], "stage 1 has no device left, it had '1', '4'"),
        (["9"], "the plan has no device '9'"),
    ],
)
def test_infeasible_removals(lost: list[str], message: str) -> None:
    """One line each."""
    with pytest.raises(PlanError) as caught:
        remove_devices(make_plan(GRID), lost)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_delayed_averaging_in_every_step_is_rejected() -> None:
    """Before the run."""
    require_elastic(make_plan(GRID))
    sync = Sync(1, OuterOptimizer(), delayed=True)
    with pytest.raises(PlanError, match="every step ends one outer step") as caught:
        require_elastic(make_plan(GRID).replace(sync=sync))
    assert "\n" not in str(caught.value)


def test_checkpoints_within_a_period_are_rejected() -> None:
    """After a loss, no plan could resume from them."""
    plan = make_plan(GRID).replace(sync=Sync(5))
    require_elastic(plan)
    require_elastic(plan, 100)
    with pytest.raises(PlanError, match="--every is 99, but the plan averages every 5 steps"):
        require_elastic(plan, 99)
    delayed = plan.replace(sync=Sync(5, delayed=True))
    require_elastic(delayed)
    with pytest.raises(PlanError, match=r"--checkpoint: with sync\.delayed, an outer step ends"):
        require_elastic(delayed, 100)


def test_swaps_are_rejected() -> None:
    """Swapped stages may deadlock within the same memory use."""
    plan = make_plan(GRID)
    (schedule,) = plan.schedules
    swapped = replace(schedule, paths=((0, 2, 1), *schedule.paths[1:]))
    with pytest.raises(PlanError, match=r"paths\[0\] swaps stages, found \[0, 2, 1\]"):
        require_elastic(plan.replace(schedules=(swapped,)))
