"""Plans without constraints: valid, deterministic, and better than fixed shapes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import planner as pl
from planner.planning.baselines.rank_order import one_region
from planner.planning.joint import joint_search
from planner.planning.joint.candidate import CandidatePlan, CandidateSpec
from planner.planning.joint.candidate_builder import CandidateBuilder
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.layout import Layout
from planner.planning.joint.layout_search import LayoutSearch
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.search.stop import SearchRun
from planner.training_plan.choices import Head
from planner.training_plan.model import Routing, TrainingPlan
from planner.workload.layers import Architecture, Family
from tests.conftest import random_network, regional_network, tiny_workload
from tests.planning.test_layouts import model, regions


def planned(
    cluster: pl.Cluster, workload: pl.Workload, effort: float, seed: int = 0
) -> pl.Result[TrainingPlan]:
    """Return a plan without constraints."""
    return pl.plan(cluster, workload, stop=pl.Effort(effort), seed=seed)


def test_two_regions_far_from_each_other() -> None:
    """The distant device is left out, since plans with it are slower."""
    latency = np.full((5, 5), 0.001)
    latency[4, :4] = latency[:4, 4] = 2.0
    np.fill_diagonal(latency, 0.0)
    network = pl.Network(latency, np.full((5, 5), 1e8), [*"abcd", "far"])
    cluster, work = pl.Cluster(network, pl.Devices(1e12, 1e9)), model()
    result = planned(cluster, work, 1.0)
    plan = result.plan
    assert plan is not None and plan.left_out == ("far",)
    assert pl.check(plan, cluster) == []
    everybody = pl.plan(cluster, work, stages=1, stop=pl.Effort(1.0)).objective
    assert result.objective is not None and everybody is not None
    assert result.objective < 0.5 * everybody


def test_first_candidate_has_the_best_estimate() -> None:
    """With minimal effort, a single device may be the best by far."""
    network = random_network(6)
    cluster = pl.Cluster(network.replace(latency_s=network.latency_s + 1), pl.Devices(1e12, 16e9))
    result = pl.plan(cluster, tiny_workload(batch_samples=24), stop=pl.MaxIterations(1))
    assert result.plan is not None and len(result.plan.cluster) == 1


def test_no_improvement_counts_from_the_first_candidate() -> None:
    """Trials on estimates improve no plan, and must not end the search before it has one."""
    cluster, work = regions([4, 2, 2], 0), model(6, 64)
    evaluated = []

    class Watched(pl.NoImprovement):
        def reason(self, run: SearchRun) -> str | None:
            evaluated.append(run.evaluates_plans)
            return super().reason(run)

    result = pl.plan(cluster, work, stop=Watched(1))
    assert result.stop_reason == "no improvement"
    assert False in evaluated and evaluated[-1] is True
    assert result.plan is not None and pl.check(result.plan, cluster) == []


def test_warns_where_only_plans_below_the_mean_bound_were_found(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The result then has no bound."""
    monkeypatch.setattr(
        "planner.planning.joint.candidate_pool.CandidatePool._is_below_bound", lambda *_: True
    )
    result = planned(regions([4, 2, 2], 0), model(6, 64), 0.2)
    assert result.plan is not None and result.bound is None
    assert "no bound is stated" in caplog.text


def test_never_slower_than_one_region_alone() -> None:
    """Two fast devices in one region, five distant ones, and little effort."""
    latency = np.full((6, 6), 0.06)
    bandwidth = np.full((6, 6), 300e6 / 8)
    far = pl.Network(latency, bandwidth, [*"abcdef"])
    counts = {"a": 2, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1}
    network = far.replicate(counts, intra_latency_s=2e-4, intra_bandwidth_bytes_per_s=1.25e9)
    line = np.array([2000, 2000, 1000, 1000, 1000, 500, 500]) * 1e6 / 8
    flops = np.array([125, 125, 125, 50, 50, 26, 26]) * 1e12
    devices = pl.Devices(flops, 16e9, upload_bytes_per_s=line, download_bytes_per_s=line)
    cluster = pl.Cluster(network, devices)
    work = pl.Workload.preset("gpt2-medium", batch_samples=64)
    result = planned(cluster, work, 0.2)
    alone = one_region(PlanningProblem.of(cluster, work, PlanRequest(), 0, {}))
    assert alone.region == "a" and result.objective is not None
    assert result.objective <= alone.plan.step_s


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))])
def test_never_slower_than_equal_stages(seed: int) -> None:
    """With the same effort as each fixed number of stages, in three regions."""
    cluster, work = regions([4, 2, 2], seed), model(6, 64)
    whole = planned(cluster, work, 3.0, seed=seed)
    assert whole.plan is not None and pl.check(whole.plan, cluster) == []
    for stages in (1, 2, 4):
        fixed = pl.plan(cluster, work, stages=stages, stop=pl.Effort(3.0), averaging="adaptive")
        assert whole.objective is not None and fixed.objective is not None
        assert whole.objective <= fixed.objective * 1.02


FIXED: dict[str, dict[str, Any]] = {
    "two stages": {"stages": 2, "wiring": "flow"},
    "three stages": {"stages": 3, "wiring": "flow"},
    "even layers": {"stage_layers": [(0, 3), (3, 6)]},
    "no recomputation": {"recompute": ()},
    "recomputation": {"recompute": "all"},
    "equal shares": {"averaging": "equal"},
    "straight pipelines": {"stages": "auto", "averaging": "adaptive"},
}


@pytest.mark.parametrize("seeds", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_constraints_rarely_improve_the_search(seeds: int) -> None:
    """By over 2% in at most one of twenty cases, with the same effort."""
    better = []
    for seed in range(seeds):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 4, 3).tolist()
        cluster = regions(sizes, seed, memory_bytes=float(rng.choice([8e7, 1e9])))
        free = planned(cluster, model(6, 64), 1.5, seed).objective
        assert free is not None
        for name, fields in FIXED.items():
            stop = pl.Effort(1.5)
            try:
                fixed = pl.plan(cluster, model(6, 64), stop=stop, seed=seed, **fields).objective
            except pl.ProblemError:
                continue  # so fixed, memory does not hold it
            assert fixed is not None
            better.append((fixed / free, name, seed))
    assert len(better) > 5 * seeds
    assert sum(ratio < 1 / 1.02 for ratio, *_ in better) <= 0.05 * len(better), sorted(better)[:5]


@pytest.mark.parametrize("name", ["three stages", "even layers", "no recomputation"])
def test_constraints_are_respected(name: str) -> None:
    """Even if the search would choose otherwise."""
    plan = pl.plan(regions([2, 2]), model(6, 64), stop=pl.Effort(0.5), **FIXED[name]).plan
    assert plan is not None and pl.check(plan) == []
    if name == "three stages":
        assert len(plan.stage_layers) == 3
    elif name == "even layers":
        assert plan.stage_layers == ((0, 3), (3, 6))
    else:
        assert not any(plan.recompute)


def test_small_devices_are_left_out() -> None:
    """The search starts without classes that cannot hold a layer."""
    cluster = regions([1, 1, 1, 1]).replace(
        devices=pl.Devices(1e12, np.array([1e9, 1e5, 1e5, 2e5]))
    )
    plan = planned(cluster, model(), 0.5).plan
    assert plan is not None and len(plan.left_out) == 3 and pl.check(plan, cluster) == []


@pytest.mark.parametrize("client", [0, 3])
def test_device_that_cannot_aggregate_is_left_out_for_equal_shares(client: int) -> None:
    """Wherever it is in the cluster; the plan is as good as without it."""
    network = pl.Network(np.full((4, 4), 0.01), np.full((4, 4), 1e8))
    sums = np.arange(4) != client
    cluster = pl.Cluster(network, pl.Devices(1e12, 1e9, can_aggregate=sums))
    result = pl.plan(cluster, model(), stop=pl.Effort(1.0), averaging="equal")
    rest = np.flatnonzero(sums).tolist()
    without = pl.plan(cluster.subset(rest), model(), stop=pl.Effort(1.0), averaging="equal")
    assert result.plan is not None and pl.check(result.plan, cluster) == []
    assert result.objective is not None and without.objective is not None
    assert result.objective <= without.objective * (1 + 1e-9)


def test_same_seed_same_plan() -> None:
    """With an effort limit."""
    found = [planned(regions([3, 3]), model(), 1.0, seed=5).plan for _ in range(2)]
    assert found[0] is not None and found[1] is not None
    assert found[0].content_hash == found[1].content_hash


def test_memory_requires_recomputation() -> None:
    """Latency is so high that activations in flight do not fit otherwise."""
    cluster = regions([2, 2], seed=3, memory_bytes=4.4e7)
    result = planned(cluster, model(4, 64), 1.0)
    assert result.plan is not None and any(result.plan.recompute)
    assert pl.check(result.plan, cluster) == []
    for fixed in ("none", "all"):
        other = pl.plan(cluster, model(4, 64), stop=pl.Effort(1.0), recompute=fixed)
        assert result.objective <= other.objective


def test_one_device() -> None:
    """No messages, no averaging: exactly the compute time."""
    cluster = pl.Cluster(pl.Network(np.zeros((1, 1)), np.zeros((1, 1))), pl.Devices(1e12, 1e9))
    work = model(2, 4)
    result = planned(cluster, work, 0.1)
    flops = 3 * sum(x.forward_flops for x in (work.stem, *work.layers, work.head))
    assert result.objective == pytest.approx(4 * flops / 1e12)


def test_infeasible_problems() -> None:
    """Too little memory on every device; devices that do not compute."""
    with pytest.raises(pl.ProblemError, match="no layout fits the devices' memory"):
        planned(regions([2, 2], memory_bytes=1e5), model(), 0.1)
    cluster = regions([2, 1])
    none = pl.Devices(1e12, 1e9, can_compute=False)
    with pytest.raises(pl.ProblemError, match="no device can compute"):
        planned(cluster.replace(devices=none), model(), 0.1)


def test_devices_without_gpu_hold_no_stage() -> None:
    """They are left out."""
    cluster = regions([3, 2])
    able = np.array([True, False, True, True, True])
    cluster = cluster.replace(devices=pl.Devices(1e12, 1e9, can_compute=able))
    plan = planned(cluster, model(), 0.5).plan
    assert plan is not None and cluster.network.ids[1] in plan.left_out


def flow_plan(
    counts: list[list[int]], cuts: list[int], head: Head = Head.LAST, *, tied: bool = False
) -> TrainingPlan:
    """Unequal stages of a tiny transformer, microbatches between all pairs of devices."""
    # so slow that computing, not the way, decides
    cluster = regions([2, 1, 1], seed=2).replace(devices=pl.Devices(1e7, 16e9))
    work = tiny_workload(batch_samples=12, tied=tied)
    problem = PlanningProblem.of(cluster, work, PlanRequest(network_name="regions"), 0, {})
    layout = Layout.of(counts, cuts, [0, 1, 0][: len(counts)], head)
    return plan_of(problem, DeviceClasses.of(cluster), layout)


def plan_of(problem: PlanningProblem, classes: DeviceClasses, layout: Layout) -> TrainingPlan:
    """Return the plan of a layout."""
    builder = CandidateBuilder(problem, classes)
    candidate = builder.build(CandidateSpec(layout))
    assert isinstance(candidate, CandidatePlan)
    return builder.plan(candidate)


def test_a_flow_splits_and_joins() -> None:
    """A device sends to several devices, and another receives from several."""
    plan = flow_plan([[2, 0, 0], [0, 1, 1]], [0, 2, 4])
    assert pl.check(plan) == []
    pairs = set(plan.schedules[0].paths)
    assert len(pairs) > 2


def homes(tied: bool = True) -> tuple[pl.Cluster, pl.Workload]:
    """Four homes with slow uplinks, and a model with a large vocabulary."""
    network = pl.Network(np.full((4, 4), 0.02), np.full((4, 4), 20e6 / 8))
    devices = pl.Devices(20e12, 3.4e9, upload_bytes_per_s=20e6 / 8)
    arch = Architecture(Family.LLAMA, 8, 1024, 16, 16, 4096, 128000, 256, tied=tied)
    return pl.Cluster(network, devices), pl.Workload.transformer("home", arch, batch_samples=16)


def test_a_tied_head_goes_where_it_needs_no_copy() -> None:
    """Averaging a copy of 131 million parameters would take over a minute."""
    cluster, work = homes()
    best = planned(cluster, work, 1.0)
    last = pl.plan(cluster, work, stop=pl.Effort(1.0), head="last")
    assert best.plan is not None and last.plan is not None
    assert best.plan.schedules[0].head is Head.FIRST and not best.plan.averages_tied
    assert last.plan.schedules[0].head is Head.LAST
    assert best.objective < 0.5 * last.objective
    assert pl.check(best) == pl.check(last) == []
    # an own head needs no copy anywhere
    assert planned(*homes(tied=False), 0.2).plan.schedules[0].head is Head.LAST


def test_baselines_and_alternatives_have_both_places_of_the_head() -> None:
    """Ranks with the head first are faster; the best plan with the head last is named."""
    result = planned(*homes(), 1.0)
    assert result.baselines is not None and result.baselines.ranks is not None
    ranks = result.baselines.ranks.best[1]
    assert ranks.head is Head.FIRST and result.objective <= ranks.step_s
    assert result.plan is not None
    (other,) = (x for x in result.plan.alternatives if x.taken == "head on the first stage")
    assert other.value is not None and other.value > 2 * result.objective


def test_straight_pipelines_have_the_head_where_they_are_fastest() -> None:
    """With as much effort for each place."""
    cluster, work = homes()
    free, first, last = (
        pl.plan(cluster, work, stages=4, stop=pl.Effort(2.0), head=head)
        for head in (None, "first", "last")
    )
    assert free.plan is not None and free.plan.schedules[0].head is Head.FIRST
    assert free.objective == pytest.approx(first.objective, rel=1e-3)
    assert free.objective < 0.5 * last.objective


def test_two_stages_use_the_same_pairs_for_all_messages() -> None:
    """The estimate of a head on the first of two stages is close to the simulated step."""
    network = pl.Network(np.full((2, 2), 0.02), np.full((2, 2), 20e6 / 8))
    cluster = pl.Cluster(network, pl.Devices(20e12, 8e9))
    arch = Architecture(Family.LLAMA, 8, 1024, 16, 16, 4096, 128000, 256, tied=True)
    work = pl.Workload.transformer("home", arch, batch_samples=32)
    problem = PlanningProblem.of(cluster, work, PlanRequest(), 0, {})
    classes = DeviceClasses.of(cluster)
    assert len(classes) == 1
    layout = Layout.of([[1], [1]], [0, 3, 8], [0, 0], Head.FIRST)
    estimate = LayoutSearch(classes, work).scored(layout).value
    assert plan_of(problem, classes, layout).predicted.step_s == pytest.approx(estimate, rel=0.05)


@pytest.mark.parametrize("within", [None, "region"])
def test_devices_that_step_on_their_own_have_one_tied_matrix(within: str | None) -> None:
    """Copies on two stages would diverge between outer steps."""
    cluster = pl.Cluster(regional_network([3, 3]), pl.Devices(1e12, 1e9))
    result = pl.plan(
        cluster,
        tiny_workload(batch_samples=24, tied=True),
        stop=pl.Effort(1.0),
        sync_every=4,
        within=within,
        stages=2,
        wiring="flow",
    )
    assert result.plan is not None and result.plan.head_stage == 0
    assert not result.plan.must_average_tied
    assert pl.check(result) == []


@pytest.mark.parametrize(
    ("counts", "cuts"),
    [([[2, 0, 0], [0, 1, 1]], [0, 2, 4]), ([[1, 0, 1], [1, 0, 0], [0, 1, 0]], [0, 1, 3, 4])],
)
def test_a_flow_returns_to_the_head(counts: list[list[int]], cuts: list[int]) -> None:
    """On the device of the first stage where it began."""
    plan = flow_plan(counts, cuts, Head.FIRST, tied=True)
    assert pl.check(plan) == [] and not plan.averages_tied
    schedule = plan.schedules[0]
    heads = {b: d for d, row in enumerate(schedule.order) for kind, b in row if kind == "H"}
    assert heads == {b: path[0] for b, path in enumerate(schedule.paths)}


def test_flow_plan_round_trip(tmp_path: object) -> None:
    """Bit by bit."""
    plan = flow_plan([[1, 0, 1], [1, 0, 0], [0, 1, 0]], [0, 1, 3, 4])
    path = f"{tmp_path}/plan.json"
    pl.save_plan(plan, path)
    again = pl.load_plan(path)
    assert again.content_hash == plan.content_hash
    assert json.dumps(again.to_dict()) == json.dumps(plan.to_dict())


@pytest.mark.parametrize("per_region", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_hundreds_of_devices_within_a_counted_effort(per_region: int) -> None:
    """One round of the search gives a valid plan that uses most devices."""
    network = pl.load_network("aws8_dtfm_worldwide_2022")
    big = network.replicate(
        dict.fromkeys(network.ids, per_region),
        intra_latency_s=0.001,
        intra_bandwidth_bytes_per_s=2.5e8,
    )
    cluster = pl.Cluster(big, pl.Devices.of_gpu("A100"))
    result = planned(cluster, pl.Workload.preset("gpt3-1.3b"), 0.2)
    assert result.plan is not None and result.stop_reason == "effort limit"
    assert len(result.plan.cluster) + len(result.plan.left_out) == 8 * per_region
    assert len(result.plan.cluster) > 4 * per_region
    assert pl.check(result, cluster) == []


def test_stochastic_wiring_starts_from_the_flow_plan() -> None:
    """The same plan except for the wiring, and valid."""
    cluster, work = regions([2, 1, 1], seed=2), model(6, 24)
    routing = Routing(0.3)
    fields: dict[str, Any] = {"stages": 2, "stop": pl.Effort(0.3)}
    fixed = pl.plan(cluster, work, wiring="flow", **fields).plan
    routed = pl.plan(cluster, work, wiring="stochastic", routing=routing, **fields).plan
    assert fixed is not None and routed is not None
    assert pl.check(routed, cluster) == []
    assert routed.routing == routing and routed.wiring == "stochastic"
    assert routed.replace(wiring="fixed").content_hash == fixed.content_hash


def test_a_device_without_microbatches_holds_no_stage() -> None:
    """Such a device only averaged with its stage: 3.043 s instead of 3.034 s."""
    cluster = pl.Cluster(pl.load_network("aws10_dtfm_code_2022"), pl.Devices(3e9, 16e9))
    work = pl.Workload.preset("gpt2-tiny", batch_samples=8, sequence=128)
    result = pl.plan(cluster, work, stop=pl.Effort(2), seed=1)
    assert result.plan is not None and pl.check(result, cluster) == []
    at_work = {d for path in result.plan.schedules[0].paths for d in path}
    assert len(at_work) == len(result.plan.cluster)


@pytest.mark.parametrize("seed", range(6, 10))
@pytest.mark.parametrize("batch", [4, 12])
def test_stochastic_wiring_starts_with_all_devices(seed: int, batch: int) -> None:
    """Even if the fastest flow leaves a device without microbatches."""
    cluster = pl.Cluster(random_network(6, seed), pl.Devices(1e9, 16e9))
    asked: dict[str, Any] = {"wiring": "stochastic", "stages": 1 + seed % 2}
    work = tiny_workload(batch_samples=batch)
    plan = pl.plan(cluster, work, stop=pl.MaxIterations(3), **asked).plan
    assert plan is not None and pl.check(plan, cluster) == []
    assert {d for path in plan.schedules[0].paths for d in path} == set(range(len(plan.cluster)))


class InterruptedAtOnce(pl.MaxIterations):
    """Stopping criterion that is interrupted at its first evaluation."""

    def reason(self, run: SearchRun) -> str | None:
        raise KeyboardInterrupt


def test_early_interrupt_is_not_reported_as_infeasible() -> None:
    """In particular not as too little memory."""
    with pytest.raises(KeyboardInterrupt):
        pl.plan(regions([2, 2], memory_bytes=1e5), model(), stop=InterruptedAtOnce(20))


def test_single_devices_are_evaluated_with_little_effort() -> None:
    """In regions with several devices and slow links."""
    n = 8
    latency = np.full((n, n), 0.2)
    np.fill_diagonal(latency, 0.0)
    names = [f"r{d // 2}" for d in range(n)]
    network = pl.Network(latency, np.full((n, n), 1e5), regions=names)
    cluster = pl.Cluster(network, pl.Devices(1e14, 1e11))
    work = pl.Workload.preset("llama-50m", batch_samples=64)
    found = pl.plan(cluster, work, stop=pl.Effort(0.05)).plan
    assert found is not None
    assert len(found.cluster) == 1 and len(found.left_out) == n - 1


def test_an_interrupt_of_the_bound_keeps_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bound on the mean comes after the search; without it the plan is as good."""
    cluster = pl.Cluster(random_network(6), pl.Devices(1e9, 16e9))
    workload = tiny_workload(batch_samples=8)
    whole = pl.plan(cluster, workload, stop=pl.Effort(0.1))

    def interrupted(*_: Any, is_over: Callable[[], bool], **__: Any) -> None:
        assert not is_over()
        raise KeyboardInterrupt

    monkeypatch.setattr("planner.planning.solve.mean_bound", interrupted)
    result = pl.plan(cluster, workload, stop=pl.Effort(0.1))
    assert result.plan is not None and whole.plan is not None
    assert result.plan.content_hash == whole.plan.content_hash
    assert result.plan.predicted == whole.plan.predicted
    # all of it counts
    assert result.runtime_s >= result.plan.certificates["step"].runtime_s


def test_an_interrupt_of_the_second_search_keeps_the_first_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second one starts if a baseline with larger microbatches is the best plan."""
    cluster, work = regions([4, 2, 2], 0), model(6, 64)
    first = planned(cluster, work, 0.2)
    assert first.plan is not None
    larger = first.plan.workload.replace(microbatch_samples=2)
    searches: list[object] = []

    class Search:
        def __init__(self, *_: object) -> None:
            searches.append(self)
            if len(searches) == 2:
                raise KeyboardInterrupt
            self.run = pl.Effort(1.0).start()

        def result(self) -> pl.Result[pl.TrainingPlan]:
            assert first.plan is not None
            return replace(first, plan=first.plan.replace(workload=larger))

    monkeypatch.setattr(joint_search, "JointSearch", Search)
    problem = PlanningProblem.of(cluster, work, PlanRequest(), 0, {})
    result = joint_search.search_jointly(problem, pl.Effort(1.0))
    assert len(searches) == 2 and result.stop_reason == "interrupted"
    assert result.plan is not None and result.objective == first.objective


@pytest.mark.parametrize("seed", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in (1, 2))])
def test_large_devices_behind_slow_lines_are_no_trap(seed: int) -> None:
    """Without the two last places it is easy to find a plan; with them it is no slower.

    Memory is so short that no even split of layers fits, and the largest device alone holds most of
    the model, but all messages would cross its line twice.
    """
    arch = Architecture(Family.LLAMA, 26, 2304, 8, 4, 9216, 256000, 512, head_size=256, tied=True)
    model = pl.Workload.transformer("tied", arch, batch_samples=32, precision="fp16")
    places = {"lab": (2, 50e12, 15.5e9), "shed": (4, 26e12, 14.3e9)}
    places |= {"attic": (1, 26e12, 14.3e9), "barn": (1, 50e12, 31.8e9)}
    names = [place for place, (count, _, _) in places.items() for _ in range(count)]
    near = np.array(names)[:, None] == np.array(names)
    network = pl.Network(
        np.where(near, 1e-4, 8e-3),
        np.where(near, 10e9, 100e6) / 8,
        [f"{name}/{k}" for k, name in enumerate(names)],
        names,
    )
    devices = pl.Devices([places[p][1] for p in names], [places[p][2] for p in names])
    cluster = pl.Cluster(network, devices)
    few, every = (
        pl.plan(c, model, seed=seed, stop=pl.Effort(1)).objective
        for c in (cluster.subset(range(6)), cluster)
    )
    assert few is not None and every is not None
    assert every < 1.1 * few
