"""The compiled simulator against hand-made cases and, on random plans, a slow reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.checker.dispatch import check
from planner.checker.step_simulation import simulated_times
from planner.network.cluster import Cluster, Devices
from planner.network.limit_notes import (
    long_latency,
    machine_pairs,
    tight_limits,
    unlimited_sites,
    unstated_sites,
)
from planner.network.network import Network
from planner.planning.averaging.aggregators import on_cluster
from planner.simulator.resources import Ints
from planner.simulator.simulator import (
    _Simulation,
    predict,
    simulate,
    simulate_cycle,
    steady_step_s,
)
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.training_plan.validation import contradictions
from planner.workload.compute_times import ComputeTimes
from planner.workload.layers import Layer
from planner.workload.workload import Workload
from tests.conftest import levels, make_plan, random_network, tiny_workload
from tests.simulator.reference import Reference

pytestmark = pytest.mark.interpreted

SHAPES = [(1, 2), (2, 2), (3, 2), (2, 3), (4, 1), (1, 4)]


def random_plan(seed: int) -> TrainingPlan:
    """A straight plan on a random network with random limits, shares, times and a cycle of two.

    Up to two devices hold no stage and sum gradients only.
    """
    rng = np.random.default_rng(seed)
    pipelines, stages = SHAPES[rng.integers(len(SHAPES))]
    train = pipelines * stages
    n = train + int(rng.integers(3))
    # few values, so that links are full together and events meet
    rates = rng.choice([2e4, 5e4, 1e5], (n, n))
    network = Network(rng.choice([0.0, 0.05, 0.2], (n, n)), rates)
    sites = rng.choice(["east", "west"], n).tolist() if rng.random() < 0.3 else None
    more: dict[str, Any] = {}
    if sites:
        more["site_upload_bytes_per_s"] = {sites[0]: 4e4}
        more["site_download_bytes_per_s"] = {sites[-1]: 4e4}
    if sites and rng.random() < 0.5:
        # lines around lines: two machines in the east, which lies in a country without the west
        sites = [f"east {rng.integers(2)}" if site == "east" else site for site in sites]
        sites[0] = "east 0"
        lines = {"east 0": 6e4, "east": 4e4, "country": 1e5}
        more["site_within"] = {
            inner: outer
            for inner, outer in (
                ("east 0", "east"),
                ("east 1", "east"),
                ("east", "country"),
            )
            if inner == "east" or inner in sites
        }
        more["site_upload_bytes_per_s"] = lines
        more["site_download_bytes_per_s"] = lines | {"east": 2e4}
    devices = Devices(
        1e9,
        1e12,
        upload_bytes_per_s=rng.choice([3e4, 1e5], n) if rng.random() < 0.5 else None,
        download_bytes_per_s=rng.choice([3e4, 1e5], n) if rng.random() < 0.5 else None,
        sites=sites,
        **more,
    )
    index = np.sort(rng.permutation(n)[:train]).tolist()
    grid = rng.permutation(train).reshape(pipelines, stages).tolist()
    orders = rng.choice(["gpipe", "eager-1f1b", "1f1b"], 2)
    head = str(rng.choice(["first", "last"]))
    tied = np.random.default_rng((seed, 1)).random() < 0.5
    workload = tiny_workload(tied=tied, batch_samples=4 if pipelines < 3 else 12)
    plans = [
        make_plan(grid, workload=workload, network=network.subset(index), head=head, schedule=order)
        for order in orders.tolist()
    ]
    columns = [tuple(rng.choice([0.05, 0.1, 0.3], train).tolist()) for _ in range(4)]
    times = ComputeTimes(
        "by chance",
        columns[0],
        columns[1],
        columns[2],
        columns[3],
        operation_s=float(rng.choice([0.0, 0.01])),
        message_s=float(rng.choice([0.0, 0.02])),
    )
    plan = plans[0].replace(
        compute_times=times,
        schedules=(plans[0].schedules[0], plans[1].schedules[0]),
        cycle=(0, 1),
    )
    plan = on_cluster(plan, Cluster(network, devices), index)
    averaging = [_rounds(rng, group) for group in plan.assignment.groups]
    shared = [_rounds(rng, plan.averaged_by(stages))] if plan.averages_tied else []
    for d in sorted(set(range(n)) - set(index)):
        j = int(rng.integers(stages))
        if len(averaging[j]) == 1:
            averaging[j] = ((_helped(averaging[j][0][0], d, float(rng.choice([0.2, 0.5, 1.0]))),),)
    clip = 1.0 if rng.random() < 0.4 else None
    return plan.replace(averaging=(*averaging, *shared), clip=clip)


def _helped(group: AveragingGroup, device: int, share: float) -> AveragingGroup:
    return AveragingGroup(
        (*group.members, device),
        (*(one * (1 - share) for one in group.shares), share),
        (*group.contributes, False),
        (*group.receives, False),
    )


def _rounds(
    rng: np.random.Generator, group: tuple[int, ...]
) -> tuple[tuple[AveragingGroup, ...], ...]:
    if len(group) == 4 and rng.random() < 0.5:
        a, b, c, d = group
        pairs = [[(a, b), (c, d)], [(a, c), (b, d)]]
        return tuple(tuple(AveragingGroup.equal(pair) for pair in one) for one in pairs)
    if len(group) > 1 and rng.random() < 0.3:
        return levels([group[: len(group) // 2], group[len(group) // 2 :]], (0.25, 0.75))
    share = rng.choice([0.0, 1.0, 2.0], len(group))
    share[0] += 1
    gives = rng.random(len(group)) < 0.7
    gives[-1] = True
    return ((AveragingGroup(group, tuple((share / share.sum()).tolist()), tuple(gives.tolist())),),)


@given(st.integers(0, 10**6))
def test_random_plans_match_the_reference(seed: int) -> None:
    """Every operation, every round and every step end, over three steps that chain."""
    plan = random_plan(seed)
    steps = [0, 1, 0]
    slow = Reference(plan, steps, averages=True).run()
    run = _Simulation.of(plan, None, None, "queued", None).run(steps, True, recorded=3)
    operations = run.operations
    found = {}
    for t in range(3):
        for o in run.operation_ids(steps[t]).tolist():
            key = (
                t,
                "BHF"[operations.kind[o]],
                int(operations.microbatch[o]),
                int(operations.device[o]),
            )
            found[key] = (run.times.begin[t, o], run.times.end[t, o])
    assert found.keys() == slow.op_times.keys()
    for key, times in slow.op_times.items():
        assert found[key] == pytest.approx(times, rel=1e-9, abs=1e-9), key
    ends = [slow.step_end[t] for t in range(3)]
    assert run.times.step_end.tolist() == pytest.approx(ends, rel=1e-9)
    first = sorted((b, e) for t, _, _, b, e in slow.round_times if t == 0)
    # beside them, with clipping, that in which all wait for the norm
    groups = len(first)
    times_of = zip(run.times.round_begin[0], run.times.round_end[0], strict=True)
    mine = sorted(list(times_of)[:groups])
    assert [x for pair in mine for x in pair] == pytest.approx(
        [x for pair in first for x in pair], rel=1e-9, abs=1e-9
    )


@given(st.integers(0, 10**6))
def test_step_is_measured_in_the_third_pass(seed: int) -> None:
    """With averaging in one step of H, the mean of steps with and without it."""
    plan = random_plan(seed)
    ends = {}
    for averages in (True, False):
        slow = Reference(plan, [0, 1, 0, 1, 0, 1, 0], averages=averages).run()
        ends[averages] = (slow.step_end[5] - slow.step_end[3]) / 2
    assert simulate(plan).step_s == pytest.approx(ends[True], rel=1e-9)
    rare = plan.replace(sync=Sync(every_steps=4))
    expected = (3 * ends[False] + ends[True]) / 4
    assert simulate(rare).step_s == pytest.approx(expected, rel=1e-9)
    predicted, _ = simulate_cycle(plan)
    alone = [Reference(plan, [k], averages=True).run() for k in (0, 1)]
    spans = [max(end for _, end in one.op_times.values()) for one in alone]
    assert predicted.pipeline_s == pytest.approx(sum(spans) / 2, rel=1e-9)
    longest = [_longest_averaging(one, len(plan.stage_layers)) for one in alone]
    assert predicted.averaging_s == pytest.approx(sum(longest) / 2, rel=1e-9)


def _longest_averaging(run: Reference, stages: int) -> float:
    last: dict[int, float] = {}
    for _, stage, _, _, end in run.round_times:
        last[stage] = max(last.get(stage, 0.0), end)
    took = [(stage, last[stage] - begin) for _, stage, r, begin, _ in run.round_times if r == 0]
    # what first and last stage share comes after their own
    shared = max((seconds for stage, seconds in took if stage == stages), default=0.0)
    return max(s + shared * (j in (0, stages - 1)) for j, s in took if j < stages)


def test_round_yields_to_later_messages() -> None:
    """Activations of the next step come while stage 1 averages, and take all of its download.

    All pairs and devices 1,000 bytes a second; a message has 1,000 bytes, gradients 400 and 4,000.
    Stage 1's round begins at 5 s beside a gradient on its way, 5 s alone; stage 0 is through at
    7.4 s, its next activations leave from 8.4 to 9.4 s. Then every step: stage 1 works 3 s, and
    averages 5 s and 1 s.
    """
    parts = [Layer(name, size, 1.0, 1000.0, 0.0) for name, size in (("a", 100), ("b", 1000))]
    nothing = Layer("nothing", 0, 1.0, 1000.0, 0.0)
    workload = Workload("by hand", nothing, tuple(parts), nothing, batch_samples=2)
    network = Network(np.zeros((4, 4)), np.full((4, 4), 1000.0))
    times = ComputeTimes("by hand", *((1.0,) * 4,) * 3, (0.0,) * 4)
    plan = make_plan([[0, 2], [1, 3]], workload=workload, network=network)
    plan = plan.replace(compute_times=times)
    ends = _Simulation.of(plan, None, None, "queued", None).run([0] * 4, True).times.step_end
    assert ends.tolist() == pytest.approx([11.0, 20.0, 29.0, 37.0])
    predicted, _ = simulate_cycle(plan)
    assert predicted.step_s == pytest.approx(9.0)
    found = simulated_times(plan)
    assert found is not None and found.step_s == pytest.approx(9.0)


def test_checker_times_are_equal_where_rounding_is_amplified() -> None:
    """Messages of mixed wiring on shared uplinks: times equal exactly, or rounding errors grow."""
    rng = np.random.default_rng(1)
    n, stages = 24, 4
    latency, rate = rng.uniform(0.0, 0.05, (n, n)), rng.uniform(3e4, 1e5, (n, n))
    plan = make_plan(
        np.arange(n).reshape(-1, stages).tolist(),
        workload=tiny_workload(batch_samples=240),
        network=Network(latency, rate),
    )
    chosen = rng.integers(n // stages, size=(240, stages)) * stages + np.arange(stages)
    order = [[op for b in range(240) for op in _visits(b, chosen[b], d)] for d in range(n)]
    schedule = plan.schedules[0]
    mixed = replace(
        schedule,
        paths=tuple(tuple(int(d) for d in path) for path in chosen),
        order=tuple(tuple(sorted(row, key=lambda op: op[0] != "F")) for row in order),
    )
    columns = [tuple(rng.uniform(0.01, 0.1, n).tolist()) for _ in range(4)]
    times = ComputeTimes("by chance", columns[0], columns[1], columns[2], columns[3])
    plan = plan.replace(schedules=(mixed,), compute_times=times)
    found, predicted = simulated_times(plan), predict(plan)
    assert found is not None
    assert tuple(found) == (predicted.pipeline_s, predicted.averaging_s, predicted.step_s)


def _visits(b: int, path: Ints, d: int) -> list[tuple[str, int]]:
    """A microbatch's operations on a device."""
    if d not in path:
        return []
    return [("F", b), *([("H", b)] if d == path[-1] else []), ("B", b)]


def test_aggregator_averages_from_the_begin_of_each_step() -> None:
    """Three peers of 1,000 bytes a second, a helper of 3,000 that sums it all; gradients of 4,000.

    F, H and B take 3 s. Every peer sends and gets back 4,000 bytes in 4 s, and a second more both
    ways; the helper is never waited for. Without it a peer sends 2 x 2/3 of 4,000 bytes.
    """
    part = Layer("a", 1000, 1.0, 1000.0, 0.0)
    nothing = Layer("nothing", 0, 1.0, 1000.0, 0.0)
    workload = Workload("by hand", nothing, (part,), nothing, batch_samples=3)
    network = Network(np.full((4, 4), 0.5), np.full((4, 4), 1000.0))
    line = [1000.0, 1000.0, 1000.0, 3000.0]
    devices = Devices(1.0, 1e9, line, line, can_compute=[True, True, True, False])
    plan = make_plan([[0], [1], [2]], workload=workload, network=network.subset([0, 1, 2]))
    plan = plan.replace(compute_times=ComputeTimes("by hand", *((1.0,) * 3,) * 3, (0.0,) * 3))
    plan = on_cluster(plan, Cluster(network, devices), [0, 1, 2])
    assert simulate(plan).step_s == pytest.approx(3 + 16 / 3 + 1)
    group = AveragingGroup((0, 1, 2, 3), (0.0, 0.0, 0.0, 1.0), (True, True, True, False))
    back = replace(group, receives=(True, True, True, False))
    helped = plan.replace(averaging=(((back,),),))
    assert not list(contradictions(helped))
    assert simulate(helped).step_s == pytest.approx(3 + 4 + 1)
    found = simulated_times(helped)
    assert found is not None and found.step_s == pytest.approx(3 + 4 + 1)
    closing = simulate(helped).closing
    assert sorted(op.device for op in closing) == [0, 1, 2, 3]
    assert all((op.start_s, op.end_s) == pytest.approx((3.0, 8.0)) for op in closing)


@pytest.mark.parametrize(
    ("parameters", "update_s", "usual", "delayed"),
    [(1000, 0.0, 8.0, 5.0), (1000, 1.0, 9.0, 5.0), (1000, 3.0, 11.0, 6.0), (100, 0.0, 4.4, 3.0)],
)
def test_delayed_averaging_overlaps_with_the_next_step(
    parameters: int, update_s: float, usual: float, delayed: float
) -> None:
    """Two devices of 1,000 bytes a second do 3 s of work; 4 bytes a parameter go both ways.

    1,000 parameters take 4 s, and 1 s there and back; each step but the first waits for what the
    one before it began, where that takes longer than its own work.
    """
    part = Layer("a", parameters, 1.0, 1000.0, 0.0)
    nothing = Layer("nothing", 0, 1.0, 1000.0, 0.0)
    workload = Workload("by hand", nothing, (part,), nothing, batch_samples=2)
    network = Network(np.full((2, 2), 0.5), np.full((2, 2), 1000.0))
    plan = make_plan([[0], [1]], workload=workload, network=network)
    times = ComputeTimes("by hand", *((1.0,) * 2,) * 3, (update_s,) * 2)
    plan = plan.replace(compute_times=times, sync=Sync(1, OuterOptimizer()))
    late = plan.replace(sync=Sync(1, OuterOptimizer(), delayed=True))
    for each, step in ((plan, usual), (late, delayed)):
        assert simulate(each).step_s == pytest.approx(step)
        found = simulated_times(each)
        assert found is not None and found.step_s == pytest.approx(step)
    ends = _Simulation.of(late, None, None, "queued", None).run([0] * 3, True).times.step_end
    first = 3 + update_s
    assert ends.tolist() == pytest.approx([first, first + delayed, first + 2 * delayed])
    rare = late.replace(sync=Sync(4, delayed=True))
    assert simulate(rare).step_s == pytest.approx((3 * first + delayed) / 4)
    # from rest, by itself, it takes as long as ever
    assert predict(late).averaging_s == pytest.approx(predict(plan).averaging_s)


def test_delayed_averaging_in_rounds_of_pairs() -> None:
    """Four devices: the second round begins when the first ends, overlapping with operations."""
    part = Layer("a", 1000, 1.0, 1000.0, 0.0)
    nothing = Layer("nothing", 0, 1.0, 1000.0, 0.0)
    workload = Workload("by hand", nothing, (part,), nothing, batch_samples=4)
    network = Network(np.zeros((4, 4)), np.full((4, 4), 1000.0))
    plan = make_plan([[0], [1], [2], [3]], workload=workload, network=network)
    pairs = [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    rounds = tuple(tuple(AveragingGroup.equal(m) for m in groups) for groups in pairs)
    times = ComputeTimes("by hand", (1.0, 1.0, 1.0, 3.0), *((1.0,) * 4,) * 2, (0.0,) * 4)
    plan = plan.replace(compute_times=times, averaging=(rounds,), sync=Sync(2, delayed=True))
    # device 3 works 5 s, the others 3; all of it hides in two rounds of 4 s. From rest the first
    # pair begins after 3 s, and the last one is through 5 + 4 + 4 s after the begin
    expected = ((5 + 8) / 2, 10.0)
    for found in (predict(plan), simulated_times(plan)):
        assert found is not None
        assert (found.step_s, found.averaging_s) == pytest.approx(expected)


@given(st.integers(0, 10**6), st.sampled_from([1, 3]))
def test_mean_over_many_steps(seed: int, every: int) -> None:
    """The mean equals that of a long chain; with rare averaging, of both kinds of steps."""
    plan = random_plan(seed)
    if every > 1:
        plan = plan.replace(sync=Sync(every, OuterOptimizer()), clip=None)
    setting, cycle = _Simulation.of(plan, None, None, "queued", None), list(plan.cycle)
    means = []
    for averages in (False, True):
        # one more step follows the last that counts
        ends = setting.run([*cycle * 5, cycle[0]], averages).times.step_end
        means.append((ends[5 * len(cycle) - 1] - ends[3 * len(cycle) - 1]) / (2 * len(cycle)))
    expected = means[1] if every == 1 else (means[0] * (every - 1) + means[1]) / every
    assert steady_step_s(plan, 2) == pytest.approx(expected, rel=1e-9)


@given(st.integers(0, 10**6), st.booleans())
def test_checker_simulates_the_same_times(seed: int, delayed: bool) -> None:
    """Simulator and checker share no code."""
    plan = random_plan(seed)
    if delayed:
        # a norm is known where every step averages gradients: a plan has one or the other
        plan = plan.replace(sync=Sync(1 + seed % 3, OuterOptimizer(), delayed=True), clip=None)
    found, predicted = simulated_times(plan), simulate_cycle(plan)[0]
    assert found is not None
    for name in ("pipeline_s", "averaging_s", "step_s"):
        assert getattr(found, name) == pytest.approx(getattr(predicted, name), rel=1e-9)


def test_clipping_makes_every_update_wait_for_the_slowest_averaging() -> None:
    """Two stages of two; the second averages later: all update when its norm has arrived."""
    plan = make_plan([[0, 1], [2, 3]], workload=tiny_workload(batch_samples=4))
    times = replace(plan.compute_times, update_s=(0.1, 0.2, 0.3, 0.4))
    plan = plan.replace(compute_times=times)
    clipped = plan.replace(clip=0.5)
    ways = plan.cluster.network.latency_s
    adds = min(range(4), key=lambda i: max(ways[i, j] + ways[j, i] for j in range(4) if i != j))
    free, held = simulate(plan), simulate(clipped)
    ends = {op.device: op.end_s for op in held.closing if op.kind == "A"}
    assert ends == {op.device: op.end_s for op in free.closing if op.kind == "A"}
    # the first of each stage tells its sum of squares, who adds has to be there too
    tell = {*(group[0] for group in plan.assignment.groups), adds}
    added = max(ends[d] + (ways[d, adds] if d != adds else 0.0) for d in tell)
    updates = [op for op in held.closing if op.kind == "U"]
    assert len(updates) == 4
    for op in updates:
        known = added + (ways[adds, op.device] if op.device != adds else 0.0)
        assert op.start_s == pytest.approx(max(known, ends[op.device]))
        assert op.end_s - op.start_s == pytest.approx(times.update_s[op.device])
    assert len({op.start_s for op in free.closing if op.kind == "U"}) > 1
    assert held.step_s > free.step_s
    # pipeline and averaging by themselves are as they were
    assert predict(clipped).averaging_s == pytest.approx(predict(plan).averaging_s)
    # one stage knows its norm by itself
    alone = make_plan([[0], [1]], workload=tiny_workload())
    assert simulate(alone.replace(clip=0.5)).step_s == simulate(alone).step_s


def test_checker_rejects_times_without_the_norm_exchange() -> None:
    """A plan that clips, with the times of one that does not, is refused."""
    clipped = make_plan([[0, 1], [2, 3]], clip=0.5)
    assert check(clipped) == []
    free = make_plan([[0, 1], [2, 3]])
    assert clipped.predicted.step_s > free.predicted.step_s
    lying = clipped.replace(predicted=free.predicted)
    assert [v.rule for v in check(lying)] != []


def test_limit_below_a_link_is_reported() -> None:
    """A device's own limit, not one of its site, which does not apply within the site."""
    cluster = Cluster(random_network(3), Devices(1e12, 1e9))
    assert tight_limits(cluster) == ""
    wide = Cluster(random_network(3), Devices(1e12, 1e9, upload_bytes_per_s=1e12))
    assert tight_limits(wide) == ""
    tight = Cluster(random_network(3), Devices(1e12, 1e9, download_bytes_per_s=[1e12, 1e6, 1e6]))
    said = tight_limits(tight)
    ids = tight.network.ids
    assert said.startswith(f"download of {ids[1]} is at most 0.008 Gb/s") and "2 devices" in said


def test_a_latency_in_another_unit_is_reported() -> None:
    """Of two places, and of two devices of one."""
    usual = random_network(3)
    assert long_latency(Cluster(usual, Devices(1e12, 1e9))) == ""
    latency = np.array(usual.latency_s)
    latency[0, 2] = 24.0
    slow = usual.replace(latency_s=latency)
    said = long_latency(Cluster(slow, Devices(1e12, 1e9)))
    assert said.startswith(f"the latency from {slow.ids[0]} to {slow.ids[2]} is 24 s")
    several = usual.replicate(
        dict.fromkeys(usual.ids, 2), intra_latency_s=3.0, intra_bandwidth_bytes_per_s=1e9
    )
    said = long_latency(Cluster(several, Devices(1e12, 1e9)))
    assert said.startswith(f"the latency from {several.ids[0]} to {several.ids[1]} is 3 s")


def test_hint_for_devices_of_one_region_without_sites() -> None:
    """The hint is absent with sites or limits, and for single devices of a region."""
    network = random_network(4)
    network = network.replace(regions=["x", "x", "x", "y"])
    free = Cluster(network, Devices(1e9, 1e12))
    assert unstated_sites(free).startswith("3 devices of x have no site: ")
    out, into = network.fastest_bytes_per_s
    limited = Devices(1e9, 1e12, upload_bytes_per_s=out / 2, download_bytes_per_s=into / 2)
    assert unstated_sites(Cluster(network, limited)) == ""
    together = Devices(1e9, 1e12, sites=["office"] * 3 + ["device 3"])
    assert unstated_sites(Cluster(network, together)) == ""
    partly = Devices(1e9, 1e12, sites=["office", "device 1", "device 2", "device 3"])
    assert unstated_sites(Cluster(network, partly)).startswith("2 devices of x have no site")
    part = Cluster(network, partly).subset([1, 2, 3])
    assert "devices of x have no site" in unstated_sites(part)


def test_hint_for_sites_without_limits() -> None:
    """The hint is absent for single sites, for sites of one device and for limited devices."""
    network = random_network(4)
    sites = ["office", "office", "lab", "lab"]
    free = Devices(1e9, 1e12, sites=sites)
    assert "line of office, lab" in unlimited_sites(Cluster(network, free))
    upload_only = Devices(1e9, 1e12, sites=sites, site_upload_bytes_per_s={"office": 1, "lab": 1})
    assert "line of office, lab" in unlimited_sites(Cluster(network, upload_only))
    lab = {"lab": 1.0}
    partly = Devices(
        1e9, 1e12, sites=sites, site_upload_bytes_per_s=lab, site_download_bytes_per_s=lab
    )
    assert "line of office:" in unlimited_sites(Cluster(network, partly))
    out, into = network.fastest_bytes_per_s
    limited = Devices(
        1e9, 1e12, sites=sites, upload_bytes_per_s=out / 2, download_bytes_per_s=into / 2
    )
    single = Devices(1e9, 1e12, sites=["office"] * 4)
    alone = Devices(1e9, 1e12, sites=["a", "b", "c", "d"])
    for devices in (limited, single, alone, Devices(1e9, 1e12)):
        assert unlimited_sites(Cluster(network, devices)) == ""


def test_hint_for_pairs_of_gpus_of_two_machines() -> None:
    """Each is assumed to have the machines' rate, unless their lines carry no more than that."""
    rate = np.full((4, 4), 1.25e8)
    rate[:2, :2] = rate[2:, 2:] = 1e11
    network = Network(np.full((4, 4), 0.001), rate, ["a/0", "a/1", "b/0", "b/1"])

    def said(**rates: float) -> str:
        machines = ["a", "a", "b", "b"]
        devices = Devices(
            *(1e9, 1e12),
            sites=machines,
            site_upload_bytes_per_s=rates,
            site_download_bytes_per_s=rates,
            site_within={"a": "lab"},
            machines=machines,
        )
        return machine_pairs(Cluster(network, devices))

    text = "each of the 2 x 2 pairs of devices of machines a and b is assumed to have the measured"
    assert said(a=1e9, b=1e9).startswith(f"{text} 1 Gb/s, all together 4.")
    assert said(a=1e9, b=2.5e8).startswith(f"{text} 1 Gb/s, all together 2.")
    assert said(a=1.25e8, b=1.25e8) == said(a=1.4e8, b=1.25e9) == ""
    # the line of the site around one of them
    assert said(a=1e9, b=1e9, lab=1.25e8) == ""
    assert machine_pairs(Cluster(network, Devices(1e9, 1e12))) == ""
