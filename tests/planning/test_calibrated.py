"""Plans with measured compute times: search, prediction and bounds."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.checker.bound_basis import bound_bases
from planner.checker.bound_witness import DeviceClass, _are_no_faster
from planner.checker.joint_bound import whole_step_bound_s
from planner.planning.baselines.rank_order import one_region
from planner.planning.calibrated import fastest_measured
from planner.planning.joint.joint_bound import joint_bound
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.training_plan.file import from_dict, plan_text
from planner.workload.costs import stage_costs
from tests.conftest import random_network, regional_network, tiny_workload
from tests.planning.joint_plans import (
    layouts,
    mean_bound_s,
    recomputed_layers,
    tiny_cluster,
    tiny_model,
    whole_plan,
)
from tests.planning.test_joint_bound import ROUNDING, step_ends_s


def cluster_of(n: int, flops: float = 1e9) -> pl.Cluster:
    """Equal devices on any links."""
    return pl.Cluster(random_network(n), pl.Devices(flops, 16e9))


def calibration_of(
    cluster: pl.Cluster,
    workload: pl.Workload,
    slower: dict[str, tuple[float, float, float]],
    update_s: float = 0.0,
    layers: tuple[int, int] | None = None,
) -> pl.Calibration:
    """F, B and H of the devices in ``slower`` take a multiple of the time by FLOPs."""
    layers = layers or (0, len(workload.layers))
    held = stage_costs(workload, *layers, with_head=True)
    flops = dict(zip(cluster.network.ids, cluster.flops.tolist(), strict=True))
    times = {
        name: {
            "forward_s": f * held.forward_s(flops[name]),
            "backward_s": b * held.backward_s(flops[name]),
            "head_s": h * held.head_s(flops[name]),
            "update_s": update_s,
        }
        for name, (f, b, h) in slower.items()
    }
    return pl.Calibration(
        "2026-01-01",
        {"cores": 1, "threads_per_rank": 1},
        workload.name,
        workload.microbatch_samples,
        times,
        dict.fromkeys(slower, layers),
        0.0,
        1e9,
        compute=workload.precision.compute,
    )


def unconstrained_request(
    cluster: pl.Cluster, workload: pl.Workload, calibration: pl.Calibration
) -> PlanningProblem:
    """A request without constraints."""
    return PlanningProblem.of(cluster, workload, PlanRequest(calibration=calibration), 0, {})


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5))
def test_no_plan_beats_the_bound_with_measured_times(
    seed: int, n: int, layers: int, count: int
) -> None:
    """For any F, B, H and update times."""
    rng = np.random.default_rng(seed)
    cluster, workload = tiny_cluster(n, rng), tiny_model(layers, count, rng)
    update_s = float(rng.choice([0.0, 0.5]))
    slower = {name: tuple(rng.uniform(0.5, 2.0, 3).tolist()) for name in cluster.network.ids}
    start = int(rng.integers(0, layers))
    calibration = calibration_of(
        cluster, workload, slower, update_s, (start, int(rng.integers(start, layers)) + 1)
    )
    unlike = {
        name: dict(times, update_s=times["update_s"] * rng.uniform(0.0, 1.0))
        for name, times in calibration.times.items()
    }
    costs = rng.uniform(0.0, 0.05, 2) * rng.integers(0, 2)
    calibration = replace(
        calibration, times=unlike, operation_s=float(costs[0]), message_s=float(costs[1])
    )
    fastest = fastest_measured(cluster, workload, calibration)
    bound = joint_bound(fastest, workload, measured=True)
    lasting = mean_bound_s(fastest, workload)
    tried = list(layouts(n, layers))
    rng.shuffle(tried)
    for groups, split in tried[:60]:
        again = recomputed_layers(split, rng)
        plan = whole_plan(
            cluster, workload, groups, split, rng, recompute=again, measured=calibration
        )
        if plan is None:
            continue
        assert bound is not None and bound.witness is not None
        ends = step_ends_s(plan)
        if update_s == 0:
            assert bound.value <= plan.predicted.step_s * ROUNDING
        updates = max(plan.compute_times.update_s)
        assert 3 * bound.value <= (ends[3] - ends[0] + updates) * ROUNDING
        assert lasting <= ends[-1] / 4 * ROUNDING
        witness = json.loads(json.dumps(bound.witness))
        assert whole_step_bound_s(witness, plan, bound.value) == bound.value


def test_witness_does_not_apply_to_faster_devices() -> None:
    """A plan with an operation faster than the witness assumes is not compared with it."""
    rng = np.random.default_rng(0)
    cluster, workload = cluster_of(3), tiny_model(2, 4, rng)
    names = cluster.network.ids
    known = calibration_of(cluster, workload, dict.fromkeys(names, (1.0, 1.5, 1.2)))
    bound = joint_bound(fastest_measured(cluster, workload, known), workload, measured=True)
    assert bound is not None and bound.witness is not None

    def proven(f: float, b: float, h: float) -> float | None:
        times = calibration_of(cluster, workload, dict.fromkeys(names, (f, b, h)))
        groups, layers = ((0, 1), (2,)), ((0, 1), (1, 2))
        plan = whole_plan(
            cluster, workload, groups, layers, np.random.default_rng(1), measured=times
        )
        assert plan is not None and bound is not None and bound.witness is not None
        return whole_step_bound_s(bound.witness, plan, bound.value)

    assert proven(1.0, 1.5, 1.2) == proven(3.0, 1.0, 1.0) == bound.value
    assert proven(0.9, 1.5, 1.2) is proven(1.0, 0.9, 1.2) is proven(1.0, 1.5, 0.9) is None


def test_plan_follows_measured_times() -> None:
    """Half of the devices are a tenth as fast as stated: they are left out or do less."""
    cluster, workload = cluster_of(8, 1e6), tiny_workload(batch_samples=64)
    names = cluster.network.ids
    slower = {name: (10.0,) * 3 if d % 2 else (1.0,) * 3 for d, name in enumerate(names)}
    calibration = calibration_of(cluster, workload, slower, update_s=1e-6)
    stop = pl.MaxIterations(2)
    blind = pl.plan(cluster, workload, stop=stop).plan
    result = pl.plan(cluster, workload, calibration=calibration, stop=stop)
    plan = result.plan
    assert blind is not None and plan is not None
    assert pl.check(result) == [] and pl.check(from_dict(json.loads(plan_text(plan)))) == []
    assert result.bound is not None and 0 < result.bound <= plan.predicted.step_s
    assert set(plan.cluster.flops.round(3)) <= {1e6, 1e5}
    counts = dict.fromkeys((0, 1), 0)
    for path in plan.schedules[0].paths:
        for d in path:
            counts[names.index(plan.cluster.network.ids[d]) % 2] += 1
    assert counts[0] > 4 * counts[1]
    source = plan.compute_times.source
    assert source.startswith("calibration of 2026-01-01")
    # what the other plan would really take
    ids = blind.cluster.network.ids
    held = (blind.assignment.groups, blind.stage_layers, blind.recompute)
    really = blind.replace(compute_times=calibration.compute_times(ids, workload, *held))
    from planner.simulator.simulator import simulate_cycle

    assert plan.predicted.step_s < simulate_cycle(really)[0].step_s


def test_unmeasured_devices_get_times_of_equal_ones() -> None:
    """Of median speed; a device without an equal one is rejected by name."""
    cluster, workload = cluster_of(6), tiny_workload()
    names = cluster.network.ids
    slower = {names[k]: (x, x, x) for k, x in enumerate((3.0, 1.0, 2.0))}
    calibration = calibration_of(cluster, workload, slower)
    problem = unconstrained_request(cluster, workload, calibration)
    assert problem.request.calibration is not None
    found = problem.request.calibration
    assert found.alike == (*names[3:],)
    assert unconstrained_request(cluster, workload, found).request.calibration == found
    assert found.times[names[5]] == calibration.times[names[2]]
    times = found.compute_times(names, workload, [list(range(6))], [(0, len(workload.layers))])
    assert "3 devices taken for as fast as alike ones" in times.source
    times = found.compute_times(names, workload, [[0, 1]], [(0, len(workload.layers))])
    assert "alike" not in times.source
    speeds = problem.cluster.flops / cluster.flops
    assert speeds == pytest.approx([1 / 3, 1, 1 / 2, 1 / 2, 1 / 2, 1 / 2])
    flops = cluster.flops.copy()
    flops[4] *= 2
    other = cluster.replace(devices=replace(cluster.devices, flops=flops))
    with pytest.raises(ValueError, match=f"has no device '{names[4]}', nor another"):
        unconstrained_request(other, workload, calibration)


@pytest.mark.parametrize(("head", "update_s"), [("last", 0.0), ("last", 0.5), ("first", 0.0)])
def test_straight_plans_with_measured_times_have_the_bound_of_any(
    head: str, update_s: float
) -> None:
    """With the same place of the head; the checker recomputes it."""
    cluster, work = cluster_of(4), tiny_workload()
    measured = calibration_of(
        cluster, work, dict.fromkeys(cluster.network.ids, (1.5, 1.2, 1.0)), update_s
    )
    request = PlanRequest().replace(stages=2, head=head, calibration=measured)
    result = pl.plan(cluster, work, request=request, stop=pl.MaxIterations(20))
    assert result.objective is not None and pl.check(result) == []
    assert result.bound is not None and 0 < result.bound <= result.objective
    (step,) = (s for s in bound_bases(result.plan) if s.part == "step")
    assert step.recomputed == pytest.approx(result.bound, rel=1e-6)


def test_the_best_shape_with_measured_times_has_the_bound_of_any() -> None:
    """For the smallest evaluated microbatch size."""
    cluster, work = cluster_of(4), tiny_workload()
    measured = calibration_of(cluster, work, dict.fromkeys(cluster.network.ids, (1.5, 1.2, 1.0)))
    result = pl.plan(cluster, work, stages="auto", calibration=measured, stop=pl.MaxIterations(20))
    assert len(result.candidates) > 1 and pl.check(result) == []
    assert result.objective is not None and result.bound is not None
    assert (
        0 < result.bound <= min(one.step_s for one in result.candidates if one.step_s is not None)
    )
    (step,) = (s for s in bound_bases(result.plan) if s.part == "step")
    assert step.recomputed == pytest.approx(result.bound, rel=1e-6)


@pytest.mark.parametrize("fields", [{}, {"stages": 2}])
def test_calibrated_plan_keeps_the_cluster(
    fields: dict[str, Any],
) -> None:
    """With any stated FLOP/s; other devices are rejected."""
    cluster, work = cluster_of(4), tiny_workload()
    measured = calibration_of(cluster, work, dict.fromkeys(cluster.network.ids, (2.5, 2.2, 2.0)))
    result = pl.plan(cluster, work, calibration=measured, stop=pl.MaxIterations(20), **fields)
    assert pl.check(result, cluster) == []
    less = cluster.replace(devices=replace(cluster.devices, memory_bytes=1e12))
    assert [v.where for v in pl.check(result, less)] == ["devices.memory_bytes"]


def test_jitter_does_not_split_device_classes() -> None:
    """Speeds within three hundredths are equal; their mean is used."""
    cluster, workload = cluster_of(4), tiny_workload()
    slower = {
        name: (x, x, x) for name, x in zip(cluster.network.ids, (1.0, 1.01, 1.02, 1.5), strict=True)
    }
    problem = unconstrained_request(cluster, workload, calibration_of(cluster, workload, slower))
    speeds = problem.cluster.flops / cluster.flops
    assert speeds == pytest.approx([1 / 1.01] * 3 + [1 / 1.5])
    calibration = problem.request.calibration
    exact = fastest_measured(problem.cluster, workload, calibration).flops / cluster.flops
    assert exact == pytest.approx([1, 1 / 1.01, 1 / 1.02, 1 / 1.5])


def test_unmeasured_head_times_are_estimated() -> None:
    """A device is as fast with the head as with its measured layers."""
    cluster, workload = cluster_of(2), tiny_workload()
    names = cluster.network.ids
    calibration = calibration_of(
        cluster, workload, {names[0]: (2.0, 2.0, 0.0), names[1]: (2.0, 2.0, 3.0)}, layers=(1, 2)
    )
    layers = [(0, 2), (2, len(workload.layers))]
    times = calibration.compute_times(names, workload, [[0], [1]], layers)
    held = stage_costs(workload, *layers[0], with_head=True)
    by_flops = held.head_s(float(cluster.flops[0]))
    assert times.head_s == pytest.approx((2 * by_flops, 3 * by_flops))
    assert "the head of" not in times.source
    last = calibration.compute_times(names, workload, [[1], [0]], layers)
    assert "the head of 1 device as fast as their layers" in last.source


def test_calibrations_of_other_workloads_are_rejected() -> None:
    """Before the search."""
    cluster, workload = cluster_of(2), tiny_workload()
    calibration = calibration_of(cluster, workload, dict.fromkeys(cluster.network.ids, (1.0,) * 3))
    for wrong, words in (
        (replace(calibration, workload="other"), "is for workload 'other'"),
        (calibration_of(cluster, workload, {cluster.network.ids[0]: (0.0, 1.0, 1.0)}), "take some"),
    ):
        with pytest.raises(ValueError, match=words):
            pl.plan(cluster, workload, calibration=wrong, stop=pl.MaxIterations(1))


def test_update_times_follow_parameters() -> None:
    """With the head on its new stage, and without it on its old one."""
    cluster, workload = cluster_of(2), tiny_workload()
    names, count = cluster.network.ids, len(workload.layers)
    calibration = calibration_of(
        cluster,
        workload,
        {names[0]: (1.0, 1.0, 0.0), names[1]: (1.0, 1.0, 1.0)},
        update_s=1.0,
        layers=(1, 2),
    )
    layers = [(0, 1), (1, count)]
    times = calibration.compute_times(names, workload, [[0], [1]], layers)
    inner, head = workload.layers[1].parameters, workload.head_parameters(1)
    first = workload.stage(0, 1).parameters
    rest = workload.stage(1, count).parameters + head
    assert times.update_s == pytest.approx((first / inner, rest / (inner + head)))
    swapped = calibration.compute_times(names, workload, [[1], [0]], layers)
    assert swapped.update_s == pytest.approx((rest / inner, first / (inner + head)))


def test_bound_uses_the_fastest_operation() -> None:
    """F is ten times as fast as stated and B slower: neither mean nor stated speed is a bound."""
    cluster, workload = cluster_of(3, 1e6), tiny_workload(batch_samples=8)
    slower = dict.fromkeys(cluster.network.ids, (0.1, 1.5, 0.5))
    calibration = calibration_of(cluster, workload, slower)
    result = pl.plan(cluster, workload, calibration=calibration, stop=pl.MaxIterations(1))
    assert result.plan is not None and pl.check(result) == []
    witness = result.plan.certificates["step"].witness
    assert witness is not None
    assert [row["flops"] for row in witness["devices"]] == pytest.approx([1e7] * 3)
    assert result.plan.cluster.flops == pytest.approx(1e6 * 3 / 3.1)


def test_single_regions_use_measured_times() -> None:
    """The first of two equal regions was measured slower, so the other is the faster baseline."""
    network = regional_network([2, 2])
    cluster = pl.Cluster(network, pl.Devices(1e6, 16e9))
    workload = tiny_workload(batch_samples=8)
    slower = {
        name: (10.0,) * 3 if region == network.regions[0] else (1.0,) * 3
        for name, region in zip(network.ids, network.regions, strict=True)
    }
    problem = unconstrained_request(cluster, workload, calibration_of(cluster, workload, slower))
    assert one_region(problem).region == network.regions[-1]


def test_another_sequence_length_is_rejected() -> None:
    """FLOPs of a sample are in the file."""
    cluster, workload = cluster_of(2), tiny_workload()
    calibration = calibration_of(cluster, workload, dict.fromkeys(cluster.network.ids, (1.0,) * 3))
    known = replace(calibration, sample_flops=workload.forward_flops)
    pl.plan(cluster, workload, calibration=known, stop=pl.MaxIterations(1))
    other = replace(calibration, sample_flops=2 * workload.forward_flops)
    with pytest.raises(pl.ProblemError, match="of another sequence"):
        pl.plan(cluster, workload, calibration=other, stop=pl.MaxIterations(1))


def test_forged_head_time_is_detected() -> None:
    """A device's fast H shows in the plan's times on any stage."""
    rng = np.random.default_rng(0)
    cluster, workload = cluster_of(2), tiny_model(2, 4, rng)
    names = cluster.network.ids
    calibration = calibration_of(
        cluster, workload, {names[0]: (1.0, 1.0, 0.01), names[1]: (1.0, 1.0, 1.0)}
    )
    forged = joint_bound(cluster, workload, measured=True)
    assert forged is not None and forged.witness is not None
    plan = whole_plan(cluster, workload, ((0,), (1,)), ((0, 1), (1, 2)), rng, measured=calibration)
    assert plan is not None
    assert whole_step_bound_s(forged.witness, plan, forged.value) is None


def test_fastest_devices_per_operation_bound_all_plans() -> None:
    """Replace every device by one with the fastest operations, the same memory and links."""
    fast, slow = DeviceClass(2.0, 1.0, 1.0, 1.0), DeviceClass(1.0, 1.0, 1.0, 1.0)
    other, between = DeviceClass(2.0, 2.0, 1.0, 1.0), DeviceClass(1.5, 1.0, 1.0, 1.0)
    known = Counter([fast, slow])
    assert _are_no_faster(Counter([fast]), known) and _are_no_faster(Counter([slow, slow]), known)
    assert _are_no_faster(Counter([between, slow]), known)
    assert not _are_no_faster(Counter([between, between]), known)
    assert not _are_no_faster(Counter([slow, slow, slow]), known)
    assert not _are_no_faster(Counter([other]), known)
