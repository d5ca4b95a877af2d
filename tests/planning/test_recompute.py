"""Plans whose stages keep only their inputs and recompute activations."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

import planner as pl
from planner.planning.evaluation import straight_plan
from planner.planning.layer_split import balanced_split
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.planning.shape import memory_room, shape_of
from planner.planning.step_bound import straight_bound_s
from planner.problems.answers import AssignmentPlan
from planner.training_plan.file import from_dict
from planner.workload.compute_times import FROM_FLOPS
from planner.workload.costs import ALL_LAYERS, stage_costs
from planner.workload.working_memory import MESSAGES
from tests.conftest import random_network, tiny_workload

STOP = pl.MaxIterations(5)


def checked_plan(cluster: pl.Cluster, workload: pl.Workload | None = None, **fields: Any) -> Any:
    """Return a plan that passes the checker, also after loading."""
    made = pl.plan(cluster, workload or tiny_workload(), stop=STOP, **fields)
    assert made.plan is not None
    assert pl.check(made) == []
    again = from_dict(made.plan.to_dict())
    assert again.recompute == made.plan.recompute
    assert pl.check(again, cluster) == []
    return made


def cluster_of(n: int, memory: float = 16e9) -> pl.Cluster:
    """Slow devices that are far apart."""
    return pl.Cluster(random_network(n), pl.Devices(1e7, memory))


def test_recomputing_stages_need_another_forward_pass() -> None:
    """All, one, or none; other times do not change."""
    cluster = cluster_of(4)
    plain = checked_plan(cluster, stages=4).plan
    assert plain.recompute == (False,) * 4
    for asked, does in (("all", (True,) * 4), ([2], (False, False, True, False))):
        plan = checked_plan(cluster, stages=4, recompute=asked).plan
        assert plan.recompute == does
        assert plan.compute_times.source == FROM_FLOPS
        for d, j in plan.stage_of.items():
            forward = plan.compute_times.forward_s[d]
            assert plan.compute_times.backward_s[d] == pytest.approx((2 + does[j]) * forward)
        assert plan.predicted.step_s > plain.predicted.step_s
        assert plan.content_hash != plain.content_hash


def test_memory_holds_more_microbatches() -> None:
    """A device that cannot hold two microbatches of activations holds all inputs."""
    workload = tiny_workload()
    whole = stage_costs(workload, 2, 4, with_head=True)
    cluster = cluster_of(2, whole.need_bytes(1) + whole.saved_bytes / 2)
    few = checked_plan(cluster, workload, stages=2).plan
    many = checked_plan(cluster, workload, stages=2, recompute="all").plan
    assert few.schedules[0].most_live()[few.assignment.groups[1][0]] == 1
    shape = shape_of(PlanningProblem(cluster, workload, PlanRequest(stages=2, recompute="all")))
    room = memory_room(cluster, workload, shape, many.assignment.groups)
    assert max(many.schedules[0].most_live()) > 1
    assert all(room[d] >= held for d, held in enumerate(many.schedules[0].most_live()))


def test_checker_recomputes_memory_and_times() -> None:
    """From the plan's recomputing stages."""
    workload = tiny_workload()
    need = stage_costs(workload, 2, 4, with_head=True, recomputed=ALL_LAYERS).need_bytes(8)
    made = checked_plan(cluster_of(2, need), workload, stages=2, recompute="all", schedule="gpipe")
    plan = made.plan
    assert plan.schedules[0].most_live() == [8, 8]
    assert {v.rule for v in pl.check(plan.replace(recompute=(False, False)))} >= {"memory", "FLOPs"}
    assert {v.where for v in pl.check(plan.replace(recompute=(True, False)))} >= {
        "compute_times.backward_s[1]"
    }


def test_stored_inputs_are_not_encoded_in_the_checker() -> None:
    """int4 messages do not reduce stored inputs."""
    workload, costs = tiny_workload(), []
    for codec in ("none", "int4"):
        coded = workload.with_boundary_codec(codec)
        costs.append(stage_costs(coded, 2, 4, with_head=True, recomputed=ALL_LAYERS))
    assert costs[0].saved_bytes == pytest.approx(costs[1].saved_bytes)
    # messages on their way are coded
    messages = MESSAGES * (costs[0].output_bytes - costs[1].output_bytes)
    assert costs[0].scratch_bytes - costs[1].scratch_bytes == pytest.approx(messages)
    need = costs[1].need_bytes(8)
    fields: dict[str, Any] = {"stages": 2, "recompute": "all", "schedule": "gpipe"}
    plan = checked_plan(cluster_of(2, need * 1.000001), boundary_codec="int4", **fields).plan
    devices = replace(plan.cluster.devices, memory_bytes=need * 0.999)
    tight = plan.replace(cluster=plan.cluster.replace(devices=devices))
    assert {v.rule for v in pl.check(tight)} == {"memory"}


@pytest.mark.parametrize("head", ["first", "last"])
@pytest.mark.parametrize("does", [(True, True), (True, False), (False, True)])
def test_bounds_hold_and_are_recomputed(head: str, does: tuple[bool, bool]) -> None:
    """For every placement in two pipelines of two stages; lower without recomputation."""
    cluster, stages = cluster_of(4), [j for j in (0, 1) if does[j]]
    request = PlanRequest(stages=2, head=head, recompute=stages)
    problem = PlanningProblem(cluster, tiny_workload(), request)
    shape = shape_of(problem)
    bound = straight_bound_s(problem, shape)
    plain = straight_bound_s(problem, replace(shape, recompute=()))
    assert plain < bound
    for grid in ([[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0, 3], [2, 1]], [[3, 1], [2, 0]]):
        made = straight_plan(problem, shape, AssignmentPlan.of_grid(grid))
        assert bound <= made.predicted.step_s
    step = checked_plan(cluster, stages=2, head=head, recompute=stages).plan.certificates["step"]
    assert step.bound == pytest.approx(bound, rel=1e-6)
    assert step.witness["shapes"][0]["recompute"] == list(does)


def test_a_plan_cannot_claim_the_bound_of_one_that_recomputes() -> None:
    """The reverse is valid, since that bound is lower."""
    cluster = cluster_of(2)
    plain = checked_plan(cluster, stages=2).plan
    slow = checked_plan(cluster, stages=2, recompute="all").plan

    def claiming(plan: pl.TrainingPlan, step: Any) -> set[str]:
        parts = {"step": replace(plan.certificates["step"], bound=step.bound, witness=step.witness)}
        return {v.rule for v in pl.check(plan.replace(certificates=parts))}

    assert "bound" in claiming(plain, slow.certificates["step"])
    assert "bound" not in claiming(slow, plain.certificates["step"])
    short = {**slow.certificates["step"].witness}
    short["shapes"] = [{**short["shapes"][0], "recompute": [True]}]
    assert "bound" in claiming(slow, replace(slow.certificates["step"], witness=short))


def test_stages_auto_with_recomputation() -> None:
    """Shapes without the listed stages are rejected."""
    cluster = cluster_of(4)
    made = checked_plan(cluster, tiny_workload(batch_samples=16), stages="auto", recompute="all")
    assert all(made.plan.recompute)
    some = checked_plan(cluster, tiny_workload(batch_samples=16), stages="auto", recompute=[1])
    refused = {c.stages for c in some.candidates if "recompute names stage 1" in c.refused}
    assert refused == {1}


def test_layers_follow_devices_and_recomputation() -> None:
    """A stage with a third more work gets fewer layers; compared with all splits."""
    workload = tiny_workload()
    cluster, groups, does = cluster_of(2), [[0], [1]], (ALL_LAYERS, 0)

    def slowest(cut: int) -> float:
        parts = ((0, cut), (cut, 4))
        return max(
            stage_costs(workload, *part, with_head=j == 1, recomputed=does[j]).busy_s(1e7)
            for j, part in enumerate(parts)
        )

    found = balanced_split(cluster, workload, groups, 1, does)
    assert found[0][1] == min(range(1, 4), key=slowest)
    unlike = pl.Cluster(cluster.network, pl.Devices([1e7, 2e7], 16e9))
    assert checked_plan(unlike, stages=2, recompute=[0]).plan.recompute == (True, False)


@pytest.mark.parametrize(("recompute", "full_every"), list(product(["all", [0, 2]], [0, 3])))
def test_paths_that_skip_stages_recompute_too(recompute: Any, full_every: int) -> None:
    """Times, memory and bounds, in both kinds of iterations."""
    fields: dict[str, Any] = {
        "stage_sizes": (2, 1, 1),
        "path_stages": 2,
        "full_every": full_every,
        "recompute": recompute,
    }
    plan = checked_plan(cluster_of(4), tiny_workload(batch_samples=6), **fields).plan
    stages = range(3) if recompute == "all" else recompute
    assert plan.recompute == tuple(
        (stop - start) * (j in stages) for j, (start, stop) in enumerate(plan.stage_layers)
    )
    workload = tiny_workload(batch_samples=6)
    kept = stage_costs(workload, 0, 2, with_head=True, recomputed=ALL_LAYERS)
    tight = cluster_of(4, kept.need_bytes(2))
    assert checked_plan(tight, workload, **fields | {"recompute": "all"}).plan is not None


@pytest.mark.parametrize(
    ("recompute", "message"),
    [
        ([4], "recompute names stage 4; stages are 0 to 3, or give 'all'"),
        ([-1], "recompute names stage -1"),
        ([0.5], "a stage to recompute must be a whole number, found 0.5"),
        (True, "recompute must list numbers of stages, or be 'all' or 'none', found True"),
        ("some", "recompute must list numbers of stages, or be 'all' or 'none', found 'some'"),
    ],
)
def test_invalid_stages(recompute: Any, message: str) -> None:
    """Rule, value, remedy."""
    with pytest.raises(ValueError, match=message):
        pl.plan(cluster_of(4), tiny_workload(), stages=4, recompute=recompute, stop=STOP)
