"""Gradients within regions every step, parameters between them every H: as one process does it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.network.cluster import Cluster, Devices
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.layout import Layout
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Phase
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan, lockstep_devices
from planner.training_plan.remove_devices import remove_devices
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import levels, make_plan, regional_network, tiny_workload
from tests.executor.forks import losses_by_step
from tests.executor.test_local_steps import apart, require_equal
from tests.executor.test_train import SETTINGS, STEPS, TOLERANCE, single
from tests.planning.test_joint_search import plan_of

torch = pytest.importorskip("torch")

from planner.executor.comm.comm_plan import CommPlan, stage_averager  # noqa: E402
from planner.executor.runtime.outer_optimizer import (  # noqa: E402
    COMMITTED_MICROBATCHES,
    PSEUDO_GRADIENT_MICROBATCHES,
    CountedSampleShares,
    PlannedSampleShares,
)
from planner.executor.transport.connections import ChannelKind  # noqa: E402

RARE = Sync(5, OuterOptimizer())
EPS = 1e-5
"""AdamW's: sums in another order round otherwise, and with less it makes steps of that."""


def straight(
    kind: str = "gpt2", head: str = "last", batch: int = 8, *, tied: bool = False
) -> TrainingPlan:
    """Two pipelines of two stages in each of two regions."""
    work = tiny_workload(kind, tied=tied, batch_samples=batch)
    grid = [[0, 1], [3, 2], [4, 5], [6, 7]]
    plan = make_plan(grid, workload=work, head=head, network=regional_network([4, 4]))
    rounds = [
        levels([tuple(group[:2]), tuple(group[2:])], (0.25, 0.75), Phase.WITHIN)
        for group in plan.assignment.groups
    ]
    return plan.replace(averaging=tuple(rounds), sync=RARE)


def flow(codec: str = "none") -> TrainingPlan:
    """Microbatches from every device to every other; regions have one or two of a stage."""
    # so slow that computing, not the way, decides
    cluster = Cluster(regional_network([3, 3], 2), Devices(1e7, 16e9))
    request = PlanRequest(sync_every=5, within="region", network_name="regions", codec=codec)
    problem = PlanningProblem.of(cluster, tiny_workload(batch_samples=12), request, 0, {})
    layout = Layout.of([[2, 1], [1, 2]], [0, 2, 4], [False, True])
    return plan_of(problem, DeviceClasses.of(cluster, by_region=True), layout)


CASES: dict[str, Callable[[], TrainingPlan]] = {
    "straight": lambda: straight(),
    "straight, unequal samples": lambda: straight(batch=7),
    "straight, tied, head first": lambda: straight("llama", "first", tied=True),
    "flow": flow,
    "means of parameters": lambda: straight().replace(sync=Sync(4)),
    "every step": lambda: straight().replace(sync=Sync(1, OuterOptimizer(learning_rate=0.9))),
}
QUICK = ("flow",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_losses_and_parameters_equal_one_process(case: str, tmp_path: Path) -> None:
    """20 steps; a region's devices agree to the last bit after each, regions after every H-th."""
    plan = CASES[case]()
    settings: dict[str, Any] = {"learning_rate": 1e-3}
    if "llama" in plan.workload.name:
        settings = dict(SETTINGS)
    settings["eps"] = EPS
    ranks, losses = require_equal(plan, tmp_path, **settings)
    assert STEPS % plan.sync.every_steps == 0
    for group in plan.assignment.groups:
        for what in ("agreed", "parameters"):
            assert len({ranks[d][what].tobytes() for d in group}) == 1
    assert losses[-1] < losses[0] - 0.1
    # it is another training than that of the mean gradient, and that of devices by themselves
    alone = plan.replace(
        averaging=tuple(((AveragingGroup.equal(group),),) for group in plan.assignment.groups)
    )
    gradients = alone.replace(sync=Sync(), workload=plan.workload.without_outer_state())
    usual, _ = single(gradients, **settings)
    by_themselves, _ = apart(alone, **settings)
    for other in (usual, by_themselves):
        assert np.abs(np.array(other) / losses - 1).max() > 100 * TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("done", [7, 10])
def test_resumed_losses_are_the_same_to_the_last_bit(done: int, tmp_path: Path) -> None:
    """Within a period of H = 5, and after an outer step; regions differ within, devices do not."""
    from tests.executor.checkpoints import latest_step, read_shard

    plan = flow()
    path, folder = tmp_path / "plan.json", tmp_path / "checkpoints"
    save_plan(plan, path)
    ids = plan.cluster.network.ids
    code, whole, said = losses_by_step(path, ids, "--steps", "20")
    assert code == 0, said
    kept = ("--checkpoint", str(folder), "--every", str(done))
    code, first, said = losses_by_step(path, ids, "--steps", str(done), *kept)
    assert code == 0, said
    shards = [read_shard(folder, latest_step(folder, range(6)), rank, plan) for rank in range(6)]
    for within, _, _ in plan.averaging:
        for group in within:
            one, *others = (shards[d] for d in group.members)
            for other in others:
                assert all(torch.equal(one[name], other[name]) for name in one)
        ends = [shards[group.members[0]] for group in within]
        alike = all(torch.equal(ends[0][n], ends[1][n]) for n in ends[0] if "parameter/" in n)
        assert alike is (done % 5 == 0)
    code, second, said = losses_by_step(path, ids, "--steps", "20", "--resume", str(folder))
    assert code == 0, said
    assert sorted(second) == list(range(done, 20)) and first | second == whole


def test_whose_samples_count() -> None:
    """Those of a region's devices together, for what gradients are divided by and changes weigh."""
    plan = straight(batch=7)
    samples = [PlannedSampleShares(plan, rank) for rank in range(8)]
    visits = [sum(d in path for path in plan.schedules[0].paths) for d in range(8)]
    assert [visits[d] for d in plan.assignment.groups[0]] == [2, 2, 2, 1]
    for group in plan.assignment.groups:
        assert [samples[d].gradient_scale(0) for d in group] == pytest.approx(
            [7 / 4, 7 / 4, 7 / 3, 7 / 3]
        )
        assert [samples[d].pseudo_gradient_weight(4) for d in group] == pytest.approx(
            [4 / 7, 4 / 7, 3 / 7, 3 / 7]
        )


def count_a_step(
    plan: TrainingPlan, of: dict[int, CountedSampleShares], *, taken: bool = True
) -> None:
    """By rank in the plan, what counts; not taken: it is to be done again."""
    (schedule,) = plan.schedules
    for rank, count in of.items():
        count.begin(schedule)
        for _ in range(sum(rank in path for path in schedule.paths)):
            count.count_microbatch()
        if taken:
            count.commit_step()


def test_samples_of_devices_that_are_as_one() -> None:
    """All count what all of the region do, also of those that are lost or come later."""
    plan = straight(batch=7)
    ranks = plan.assignment.groups[0]
    counts = [CountedSampleShares(plan, rank) for rank in ranks]

    count_a_step(plan, dict(zip(ranks, counts, strict=True)))
    left = remove_devices(plan, [plan.cluster.network.ids[ranks[3]]])
    there = dict(zip(left.assignment.groups[0], counts[:3], strict=True))
    for rank, count in there.items():
        count.set_plan(left, rank)
    count_a_step(left, there)
    # the region of three microbatches has lost one device, which did one of them in the first step
    others = sum(
        d in path for path in left.schedules[0].paths for d in left.assignment.groups[0][:2]
    )
    assert others > 4
    for count in counts[:3]:
        count.take_snapshot()
    assert [c.pseudo_gradient_microbatches for c in counts[:3]] == [
        4 + others,
        4 + others,
        3 + 7 - others,
    ]
    assert [c.pseudo_gradient_weight(4, 14) for c in counts[:3]] == [
        c.pseudo_gradient_microbatches / 14 for c in counts[:3]
    ]
    # who comes has what the one has that it is as one with
    counts[3].load_state_dict(counts[2].state_dict())
    assert counts[3].pseudo_gradient_microbatches == counts[2].pseudo_gradient_microbatches
    counts[3].commit_outer_step()
    assert counts[3].state_dict().keys() == {COMMITTED_MICROBATCHES}


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_regions_count_alike_whoever_is_there(data: st.DataObject) -> None:
    """Every sample is in one region's count, but for those of regions of which all are lost."""
    plan = straight(batch=7)
    ids, stage = plan.cluster.network.ids, plan.assignment.groups[0]
    regions = [{ids[d] for d in group.members} for group in plan.averaging[0][0]]
    counts = {ids[d]: CountedSampleShares(plan, d) for d in stage}
    there = set(counts)
    expected = [0, 0]

    def follow() -> TrainingPlan:
        left = remove_devices(plan, set(counts) - there)
        for name in there:
            counts[name].set_plan(left, left.cluster.network.ids.index(name))
        return left

    def step(left: TrainingPlan, taken: bool) -> None:
        (schedule,) = left.schedules
        names = left.cluster.network.ids
        count_a_step(left, {names.index(name): counts[name] for name in there}, taken=taken)
        for k, region in enumerate(regions):
            done = [d for path in schedule.paths for d in path if names[d] in region]
            expected[k] += taken * len(done)

    def come(name: str) -> None:
        near = next((region for region in regions if name in region), set()) & there
        giver = min(near or there)
        counts[name].load_state_dict(counts[giver].state_dict())
        if not near:
            counts[name].reset_counts()
        there.add(name)

    def lose_or_come() -> None:
        name = data.draw(st.sampled_from(sorted(counts)))
        if name not in there:
            come(name)
        elif len(there) > 1:
            there.remove(name)
            for k, region in enumerate(regions):
                if not region & there:
                    expected[k] = 0

    def outer(left: TrainingPlan) -> None:
        names, group = left.cluster.network.ids, left.assignment.groups[0]
        speak = [counts[names[d]] for d in {lockstep_devices(left, d)[0] for d in group}]
        samples = sum(count.pseudo_gradient_microbatches for count in speak)
        assert samples == sum(expected)
        if samples:
            assert sum(
                count.pseudo_gradient_weight(0, samples) for count in speak
            ) == pytest.approx(1)

    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["step", "again", "members", "outer"]))
        if what == "members":
            lose_or_come()
        elif what == "outer":
            follow()
            for name in there:
                counts[name].take_snapshot()
            if data.draw(st.booleans()):  # it is owed
                lose_or_come()
            outer(follow())
            for name in there:
                counts[name].commit_outer_step()
            expected[:] = [0, 0]
        else:
            step(follow(), what == "step")
        for k, region in enumerate(regions):
            states = [counts[name].state_dict() for name in region & there]
            assert all(float(state[COMMITTED_MICROBATCHES]) == expected[k] for state in states)
            assert all(PSEUDO_GRADIENT_MICROBATCHES not in state for state in states)


def test_what_a_rank_does_when() -> None:
    """Its region's group in every step, with gradients as they are; slices in every H-th, coded."""
    plan = flow("int8")
    for rank in range(6):
        each, rare = stage_averager(plan, rank, every_step=True), stage_averager(plan, rank)
        assert [group.phase for group in each.rounds] == [Phase.WITHIN]
        assert [str(wire) for wire in each.wires] == ["fp32"]
        assert [group.phase for group in rare.rounds][-1] is Phase.SPREAD
        wires = {
            group.phase: str(wire) for group, wire in zip(rare.rounds, rare.wires, strict=True)
        }
        assert wires.get(Phase.EXCHANGE, "int8") == "int8" and wires[Phase.SPREAD] == "fp32"
        wiring = CommPlan(plan, rank)
        talks = {d for purpose, d in wiring.connection_keys if purpose is ChannelKind.AVERAGING}
        assert talks == each.peers | rare.peers
