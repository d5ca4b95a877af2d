"""The bound on the step time of all plans."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.checker.joint_bound import whole_step_bound_s
from planner.planning.joint import stage_requirements
from planner.planning.joint.joint_bound import joint_bound
from planner.planning.step_bound import StepBound
from planner.problems.answers import AssignmentPlan
from planner.search.certificate import Certificate, Status, relative_gap
from planner.simulator.program import compile_plan
from planner.simulator.resources import LinkResources
from planner.simulator.run import Run
from planner.simulator.simulator import simulate_cycle
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Codec, Head
from planner.training_plan.file import from_dict
from planner.training_plan.model import Predicted, TrainingPlan
from planner.training_plan.schedule import Operation, Schedule
from planner.training_plan.slice_owners import rounds_of_copies
from planner.training_plan.sync import Sync
from planner.workload import costs
from planner.workload.compute_times import ComputeTimes
from planner.workload.layers import Architecture, Family, Layer
from tests.planning.joint_plans import (
    Groups,
    Layers,
    layouts,
    mean_bound_s,
    recomputed_layers,
    tiny_cluster,
    tiny_model,
    whole_plan,
)

ROUNDING = 1 + 1e-9
FAMILIES = ("gpt2", "llama")


REQUESTS: tuple[dict[str, Any], ...] = (
    {"heads": (Head.LAST,)},
    {"heads": (Head.FIRST,)},
    {"heads": tuple(Head)},
    {"heads": (Head.LAST,), "recomputes": False},
)


def no_plan_is_faster(
    seed: int,
    n: int,
    layers: int,
    count: int,
    most: int = 60,
    in_sites: float = 0.3,
    shards: int = 1,
    *,
    little_memory: bool = False,
) -> None:
    """Compare the bounds of one request with many plans that it admits."""
    rng = np.random.default_rng(seed)
    cluster, workload = tiny_cluster(n, rng, in_sites), tiny_model(layers, count, rng)
    if little_memory:
        needs = [_some_need(workload, rng) for _ in range(n)]
        devices = replace(cluster.devices, memory_bytes=np.array(needs))
        cluster = cluster.replace(devices=devices)
    codec = Codec.INT8 if rng.random() < 0.3 and shards == 1 else Codec.NONE
    if shards > 1 and rng.random() < 0.5:
        # parameters return in half of the bytes
        cluster, workload = in_bf16(n, layers, count, rng, in_sites)
    workload = workload.replace(optimizer_shards=shards)
    request = REQUESTS[seed % len(REQUESTS)]
    heads, recomputes = request["heads"], request.get("recomputes", True)
    bound = joint_bound(cluster, workload, codec.wire_ratio, **request)
    lasting = mean_bound_s(cluster, workload, codec.wire_ratio, **request)
    tried = list(layouts(n, layers))
    rng.shuffle(tried)
    for groups, split in tried[:most]:
        again = recomputed_layers(split, rng) if recomputes else ()
        head = heads[int(rng.integers(len(heads)))]
        plan = whole_plan(
            cluster, workload, groups, split, rng, recompute=again, codec=codec, head=head
        )
        if plan is None:
            continue
        assert bound is not None and bound.value <= plan.predicted.step_s * ROUNDING
        assert lasting <= step_ends_s(plan)[-1] / 4 * ROUNDING


@settings(max_examples=10)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(1, 3), st.integers(1, 4))
def test_more_choices_lower_the_bound(seed: int, n: int, layers: int, count: int) -> None:
    """Of the head's stage and of recomputation."""
    rng = np.random.default_rng(seed)
    cluster, workload = tiny_cluster(n, rng), tiny_model(layers, count, rng)
    found = [joint_bound(cluster, workload, **request) for request in REQUESTS]
    last, first, either, kept = (np.inf if one is None else one.value for one in found)
    assert either <= min(last, first) * ROUNDING and last <= kept * ROUNDING


def _some_need(workload: pl.Workload, rng: np.random.Generator) -> float:
    """A little more than some stage needs for up to three microbatches."""
    layers = len(workload.layers)
    start = int(rng.integers(layers))
    stop = int(rng.integers(start + 1, layers + 1))
    recomputed = int(rng.integers(stop - start + 1))
    stage = costs.stage_costs(
        workload, start, stop, with_head=stop == layers, recomputed=recomputed
    )
    return stage.need_bytes(int(rng.integers(1, 4))) * rng.uniform(1.0, 1.2)


def step_ends_s(plan: TrainingPlan) -> list[float]:
    """Return the ends of the four steps that the simulator evaluates."""
    program = compile_plan(plan, LinkResources.of(plan.cluster), plan.workload)
    ends = Run.planned(program, [0] * 4, averages=True).times.step_end
    return ends.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(12))
def test_all_layouts_of_three_devices(seed: int) -> None:
    """All subsets, stages, layers and groups."""
    no_plan_is_faster(seed, 3, 3, 3, most=1000)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 4), st.integers(1, 5))
def test_no_plan_beats_the_bound(seed: int, n: int, layers: int, count: int) -> None:
    """Any cluster, model, layout, wiring, order, recomputation, shares and codec."""
    no_plan_is_faster(seed, n, layers, count)


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(2, 4), st.integers(2, 5), st.integers(2, 6))
def test_no_plan_with_little_memory_beats_the_bound(
    seed: int, n: int, layers: int, count: int
) -> None:
    """Where stages recompute some of their layers to hold the microbatches in flight."""
    no_plan_is_faster(seed, n, layers, count, little_memory=True)


def in_bf16(
    n: int, layers: int, count: int, rng: np.random.Generator, in_sites: float
) -> tuple[pl.Cluster, pl.Workload]:
    """A transformer, on devices and links that need about as long for it."""
    arch = Architecture(Family(str(rng.choice(list(FAMILIES)))), layers, 8, 2, 2, 16, 16, 4)
    workload = pl.Workload.transformer("tiny", arch, batch_samples=count, precision="bf16")
    cluster = tiny_cluster(n, rng, in_sites)
    rate = cluster.network.bandwidth_bytes_per_s[0, 1]
    # some send faster than they receive
    devices = replace(
        cluster.devices,
        upload_bytes_per_s=rate * rng.uniform(0.1, 1.0, n),
        download_bytes_per_s=rate * rng.uniform(0.1, 1.0, n),
        flops=np.asarray(cluster.devices.flops) * workload.forward_flops / 100,
        memory_bytes=1e9,
    )
    return cluster.replace(devices=devices), workload


@settings(max_examples=40)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(2, 6),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(2, 3),
    st.sampled_from([0.3, 1.0]),
)
def test_no_plan_with_optimizer_shards_beats_the_bound(
    seed: int, n: int, layers: int, count: int, shards: int, in_sites: float
) -> None:
    """Owners with any shares up to their limit, also of sites, and parameters in 16 bits."""
    no_plan_is_faster(seed, n, layers, count, in_sites=in_sites, shards=shards)


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(4, 7), st.integers(1, 2), st.integers(1, 4))
def test_no_plan_with_copies_of_optimizer_state_beats_the_bound(
    seed: int, n: int, layers: int, count: int
) -> None:
    """Two or more groups that hold all of it, of any devices."""
    rng = np.random.default_rng(seed)
    cluster, workload = in_bf16(n, layers, count, rng, 0.0)
    workload = workload.replace(optimizer_shards=2)
    bound = joint_bound(cluster, workload, in_copies=True)
    lasting = mean_bound_s(cluster, workload, in_copies=True)
    tried = [(g, split) for g, split in layouts(n, layers) if min(map(len, g)) >= 4]
    rng.shuffle(tried)
    for groups, split in tried[:20]:
        plan = whole_plan(cluster, workload, groups, split, rng)
        if plan is None:
            continue
        averaging = []
        for entry, rounds in enumerate(plan.averaging):
            members = rng.permutation(plan.averaged_by(entry)).tolist()
            count = int(rng.integers(2, len(members) // 2 + 1))
            parts = [members[k::count] for k in range(count)]
            averaging.append(rounds_of_copies(plan.cluster, parts, rounds[-1][0].dtype))
        plan = plan.replace(averaging=tuple(averaging))
        plan = plan.replace(predicted=simulate_cycle(plan)[0])
        assert bound is not None
        assert bound.value <= plan.predicted.step_s * ROUNDING
        assert lasting <= step_ends_s(plan)[-1] / 4 * ROUNDING


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("degree", "shards"), [(1, 1), (2, 1), (2, 2)])
def test_all_layouts_of_machines_with_two_gpus(seed: int, degree: int, shards: int) -> None:
    """Every layout of single GPUs and of workers, each against its own bound."""
    rng = np.random.default_rng(seed)
    machines = int(rng.integers(2, 4)) if degree == 2 else 2
    n = 2 * machines
    machine = np.repeat(np.arange(machines), 2)
    inside = machine[:, None] == machine
    devices = pl.Devices(
        flops=rng.uniform(1e6, 1e8, machines)[machine],
        memory_bytes=1e9,
        machines=[f"m{k}" for k in machine],
        sites=[f"m{k}" for k in machine],
        site_upload_bytes_per_s={f"m{k}": float(rng.uniform(1e5, 1e6)) for k in range(machines)},
        gpu_link_bytes_per_s=float(rng.uniform(1e6, 1e8)),
        gpu_link_latency_s=1e-5,
    )
    network = pl.Network(
        np.where(inside, 1e-5, rng.uniform(0, 0.1)), np.where(inside, 1e8, rng.uniform(1e5, 1e6))
    )
    arch = Architecture(Family.LLAMA, 2, 8, 2, 2, 16, 16, 4)
    model = pl.Workload.transformer("tiny", arch, batch_samples=3, precision="fp32")
    cluster, workload = pl.tensor_parallel_workers(pl.Cluster(network, devices), model, degree)
    workload = workload.replace(optimizer_shards=shards)
    assert len(cluster) == n // degree
    bound = joint_bound(cluster, workload)
    assert bound is not None
    for groups, split in layouts(len(cluster), 2):
        plan = whole_plan(cluster, workload, groups, split, rng)
        # each shard needs a worker
        assert (plan is None) == (min(map(len, groups)) < shards)
        assert plan is None or bound.value <= plan.predicted.step_s * ROUNDING


@settings(max_examples=30)
@given(st.integers(0, 2**32 - 1), st.integers(3, 6), st.integers(1, 3), st.integers(1, 4))
def test_no_hierarchical_plan_beats_the_bound(seed: int, n: int, layers: int, count: int) -> None:
    """For devices that share their sites' links."""
    no_plan_is_faster(seed, n, layers, count, in_sites=1.0)


@pytest.fixture
def two() -> tuple[pl.Cluster, pl.Workload, TrainingPlan]:
    """The first layer has too many parameters to be averaged, so that one device holds it.

    Stage 0, one device: 8 x (0.1875 + 0.375) = 4.5 s. Stage 1, two devices: 4 x (0.25 + 0.5) = 3 s
    and a round of 1 s.
    """
    network = pl.Network(np.zeros((3, 3)), np.full((3, 3), 1000.0))
    cluster = pl.Cluster(network, pl.Devices(100.0, 1e9))
    nothing = Layer("nothing", 0, 0.0, 0.01, 0.0)
    layers = (Layer("first", 10**6, 18.75, 0.01, 1.0), Layer("second", 250, 25.0, 0.01, 1.0))
    workload = pl.Workload("two", nothing, layers, nothing, 8)
    paths = tuple((0, 1 + b % 2) for b in range(8))
    first = [("F", b) for b in range(8)] + [("B", b) for b in range(8)]
    others = [[(kind, b) for b in range(k, 8, 2) for kind in "FHB"] for k in range(2)]
    plan = equal_share_plan(
        cluster, workload, ((0,), (1, 2)), ((0, 1), (1, 2)), paths, [first, *others]
    )
    return cluster, workload, plan


def equal_share_plan(
    cluster: pl.Cluster,
    workload: pl.Workload,
    groups: Groups,
    layers: Layers,
    paths: Groups,
    order: list[list[Operation]],
) -> TrainingPlan:
    """Return a plan with equal shares and its prediction."""
    plan = TrainingPlan(
        cluster=cluster,
        network_name="by hand",
        workload=workload,
        seed=0,
        compute_times=ComputeTimes.from_flops(cluster, workload, groups, layers),
        assignment=AssignmentPlan.of_groups(groups),
        stage_layers=layers,
        schedules=(Schedule("any", Head.LAST, paths, tuple(map(tuple, order))),),
        averaging=tuple(((AveragingGroup.equal(group),),) for group in groups),
        predicted=Predicted(0.0, 0.0, 0.0),
        certificates={},
    )
    return plan.replace(predicted=simulate_cycle(plan)[0])


def test_two_stages_by_hand(two: tuple[pl.Cluster, pl.Workload, TrainingPlan]) -> None:
    """Stage 0 is never idle over many steps; before a single step it may have done F."""
    cluster, workload, plan = two
    bound = joint_bound(cluster, workload)
    assert plan.predicted.step_s == pytest.approx(4.5, rel=1e-3)
    assert mean_bound_s(cluster, workload) == pytest.approx(4.5, rel=1e-3)
    assert bound is not None and bound.value == pytest.approx(4.0, rel=1e-3)
    assert proven(bound, plan)


def test_memory_limits_early_forward_passes(
    two: tuple[pl.Cluster, pl.Workload, TrainingPlan],
) -> None:
    """Memory for two microbatches leaves six F of stage 0 for later."""
    cluster, workload, _ = two
    small = workload.replace(state_bytes_per_parameter=0.0)
    tight = cluster.replace(devices=pl.Devices(100.0, 2.0))
    bound = joint_bound(tight, small, recomputes=False)
    # 6 x 0.1875 + 8 x 0.375
    assert bound is not None and bound.value == pytest.approx(4.125, rel=1e-3)


def test_wrong_formulas_are_caught(
    two: tuple[pl.Cluster, pl.Workload, TrainingPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bound with B = 3 F exceeds a plan's step time, and its witness does not prove it."""
    cluster, workload, plan = two
    monkeypatch.setattr(costs, "BACKWARD_TO_FORWARD", 3.0)
    bound = joint_bound(cluster, workload)
    assert bound is not None and bound.value > plan.predicted.step_s * 1.1
    assert not proven(bound, plan)


def proven(bound: StepBound, plan: TrainingPlan) -> bool:
    """Whether the checker recomputes the bound from its witness, after saving and loading."""
    assert bound.witness is not None
    witness = json.loads(json.dumps(bound.witness))
    return whole_step_bound_s(witness, plan, bound.value) == bound.value


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_bound_is_tight_for_owners_of_optimizer_state(kind: str, precision: str) -> None:
    """Equal devices of one stage, whose messages take no latency; GPT-2's return in fp32."""
    arch = Architecture(Family(kind), 1, 8, 2, 2, 16, 16, 4)
    workload = pl.Workload.transformer("tiny", arch, batch_samples=4, precision=precision)
    workload = workload.replace(optimizer_shards=2)
    cluster = pl.Cluster(pl.Network(np.zeros((2, 2)), np.full((2, 2), 1e3)), pl.Devices(1e12, 1e9))
    plan = pl.plan(cluster, workload, stages=1, optimizer_shards=2, stop=pl.MaxIterations(1)).plan
    bound = joint_bound(cluster, workload)
    assert plan is not None and bound is not None
    ratio = 0.75 if (kind, precision) == ("gpt2", "bf16") else 1.0
    assert bound.value == pytest.approx(ratio * plan.predicted.step_s, rel=1e-4)


def test_bound_is_tight_for_one_stage() -> None:
    """Two devices that average: computing and one round, by hand; then with a wrong round."""
    network = pl.Network(np.full((2, 2), 0.5), np.full((2, 2), 1000.0))
    cluster = pl.Cluster(network, pl.Devices(100.0, 1e9))
    nothing = Layer("nothing", 0, 0.0, 1.0, 0.0)
    workload = pl.Workload("one", nothing, (Layer("only", 500, 100.0, 1.0, 1.0),), nothing, 8)
    order = [[(kind, b) for b in range(k, 8, 2) for kind in "FHB"] for k in range(2)]
    paths = tuple((b % 2,) for b in range(8))
    plan = equal_share_plan(cluster, workload, ((0, 1),), ((0, 1),), paths, order)
    bound = joint_bound(cluster, workload)
    # 4 x 3 s, 2000 bytes each way, there and back
    assert plan.predicted.step_s == pytest.approx(12 + 2 + 1)
    assert bound is not None and bound.value == pytest.approx(15, rel=1e-6)
    assert proven(bound, plan)
    wrong = joint_bound(cluster, workload, wire_ratio=1.1)
    assert wrong is not None and wrong.value > plan.predicted.step_s
    assert not proven(wrong, plan)


@settings(max_examples=30)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 5),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from([(Head.LAST,), (Head.FIRST,), tuple(Head)]),
)
def test_checker_recomputes_the_bound(
    seed: int, n: int, layers: int, recomputes: bool, heads: tuple[Head, ...]
) -> None:
    """For plans on any devices; a raised bound is reduced to what the witness proves."""
    rng = np.random.default_rng(seed)
    cluster, workload = tiny_cluster(n, rng), tiny_model(layers, 4, rng)
    bound = joint_bound(cluster, workload, recomputes=recomputes, heads=heads)
    tried = list(layouts(n, layers))
    groups, split = tried[int(rng.integers(len(tried)))]
    for head in Head:
        plan = whole_plan(cluster, workload, groups, split, rng, head=head)
        if bound is None or plan is None:
            continue
        if head not in heads and len(groups) > 1:
            assert not proven(bound, plan)
        else:
            _require_recomputed(bound, plan)


def _require_recomputed(bound: StepBound, plan: TrainingPlan) -> None:
    assert proven(bound, plan)
    again = whole_step_bound_s(bound.witness or {}, plan, bound.value * 1.01)
    assert again == pytest.approx(bound.value, rel=1e-6)


def with_certificate(plan: TrainingPlan, bound: StepBound, seconds: float) -> TrainingPlan:
    """Return the plan with the certificate of `planner.plan`."""
    step_s = plan.predicted.step_s
    gap = relative_gap(step_s, seconds)
    certificate = Certificate(
        "by hand", Status.FEASIBLE, step_s, seconds, gap, "", 0.0, 0, bound.basis, bound.witness
    )
    return plan.replace(certificates={"step": certificate})


def test_plans_with_raised_bounds_are_rejected(
    two: tuple[pl.Cluster, pl.Workload, TrainingPlan],
) -> None:
    """In a plan file, by `planner check`."""
    cluster, workload, plan = two
    bound = joint_bound(cluster, workload)
    assert bound is not None
    assert pl.check(from_dict(with_certificate(plan, bound, bound.value).to_dict())) == []
    raised = with_certificate(plan, bound, bound.value * 1.001)
    assert [v.rule for v in pl.check(from_dict(raised.to_dict()))] == ["bound"]


def test_witnesses_of_other_plans_prove_nothing(
    two: tuple[pl.Cluster, pl.Workload, TrainingPlan],
) -> None:
    """Other devices, links, batch, recomputation or interval; or malformed."""
    cluster, workload, plan = two
    bound = joint_bound(cluster, workload, recomputes=False)
    assert bound is not None and bound.witness is not None
    good, claim = dict(bound.witness), bound.value
    assert whole_step_bound_s(good, plan, claim) == claim
    row = good["devices"][0]
    changes: tuple[dict[str, Any], ...] = (
        {"devices": [row | {"count": 2}]},
        {"devices": [row | {"flops": 99.0}]},
        {"devices": [row | {"upload_bytes_per_s": None}]},
        {"devices": []},
        {"hop_s": 0.1},
        {"hop_s": float("nan")},
        {"hop_bytes_per_s": 1.0},
        {"hop_bytes_per_s": float("nan")},
        {"return_s": [[1, 0.0], [3, 0.1]]},
        {"return_s": [[1, 0.0], [3, float("nan")]]},
        {"return_s": 1},
        {"price": [1.0, 1.0, 1.0]},
        {"price": [2.0, -1.0, 0.0]},
        {"price": [1e6, float("nan"), 0.0]},
        {"price": [1e6, "nan", 0.0]},
        {"price": []},
        {"microbatch_samples": 2},
        {"microbatch_samples": "1"},
    )
    for change in changes:
        assert whole_step_bound_s(good | change, plan, claim) is None, change
    more = good | {"devices": [row | {"flops": 99.0}, row]}
    assert (whole_step_bound_s(more, plan, claim) or 0.0) < claim
    for name in good.keys() - {"kind"}:
        assert whole_step_bound_s({k: v for k, v in good.items() if k != name}, plan, claim) is None
    again = plan.replace(recompute=(True, False))
    assert whole_step_bound_s(good, again, claim) is None
    assert whole_step_bound_s(good, plan.replace(sync=Sync(2)), claim) is None
    measured = replace(plan.compute_times, source="measured")
    assert whole_step_bound_s(good, plan.replace(compute_times=measured), claim) is None
    group = plan.averaging[1][0][0]
    helped = replace(group, contributes=(True, False))
    averaging = (plan.averaging[0], ((helped,),))
    assert whole_step_bound_s(good, plan.replace(averaging=averaging), claim) is None


def test_larger_microbatches_keep_the_bound_of_single_samples() -> None:
    """A bound for microbatches of 1 holds for those of 2."""
    for seed in range(8):
        rng = np.random.default_rng(seed)
        cluster, workload = tiny_cluster(4, rng), tiny_model(3, 8, rng)
        bound = joint_bound(cluster, workload)
        for groups, split in list(layouts(4, 3))[:: 1 + seed]:
            plan = whole_plan(cluster, workload.replace(microbatch_samples=2), groups, split, rng)
            if plan is not None:
                assert bound is not None and bound.value <= plan.predicted.step_s * ROUNDING
                assert proven(bound, plan)


def test_layers_without_parameters() -> None:
    """Their rounds send nothing, so messages may use the links meanwhile."""
    network = pl.Network(np.array([[0, 0, 0], [0, 0, 5], [0, 5, 0.0]]), np.full((3, 3), 10.0))
    cluster = pl.Cluster(network, pl.Devices(100.0, 1e9))
    stem, layer = Layer("stem", 0, 0.0, 50.0, 0.0), Layer("layer", 0, 1.0, 50.0, 0.0)
    workload = pl.Workload("bare", stem, (layer, layer), stem, 4)
    bound = joint_bound(cluster, workload)
    assert bound is not None
    rng = np.random.default_rng(1)
    for groups, split in layouts(3, 2):
        plan = whole_plan(cluster, workload, groups, split, rng)
        assert plan is not None and bound.value <= plan.predicted.step_s * ROUNDING


def test_nothing_fits() -> None:
    """There is no bound if no device can hold a layer."""
    rng = np.random.default_rng(0)
    cluster = pl.Cluster(tiny_cluster(3, rng).network, pl.Devices(1.0, 1e-3))
    assert joint_bound(cluster, tiny_model(2, 2, rng)) is None


def test_more_devices_lower_the_bound() -> None:
    """The certificate states its basis."""
    network = pl.load_network("aws8_dtfm_worldwide_2022")
    workload = pl.Workload.preset("gpt3-1.3b")
    found = []
    for copies in (2, 4, 8):
        every = dict.fromkeys(network.regions, copies)
        big = network.replicate(every, intra_latency_s=0.005, intra_bandwidth_bytes_per_s=2.5e8)
        bound = joint_bound(
            pl.Cluster(big, replace(pl.Devices.of_gpu("V100"), gpus=None)), workload
        )
        assert bound is not None and bound.witness is not None
        assert len(bound.witness["devices"]) == 1 and "computing" in bound.basis
        found.append(bound.value)
    assert found[0] > found[1] > found[2] > 10.0


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(2, 9), st.integers(1, 4))
def test_blocks_of_any_size_give_the_same_bound(seed: int, devices: int, block: int) -> None:
    rng = np.random.default_rng(seed)
    cluster, workload = tiny_cluster(devices, rng, 0.3), tiny_model(3, 4, rng)
    expected = joint_bound(cluster, workload), mean_bound_s(cluster, workload)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stage_requirements, "BLOCK", block)
        assert (joint_bound(cluster, workload), mean_bound_s(cluster, workload)) == expected
