"""Plans whose devices share their stage's optimizer state."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.checker.memory import stage_memory
from planner.planning.shape import shard_counts
from planner.problems import ProblemError
from planner.training_plan.choices import Phase
from planner.training_plan.error import PlanError
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import remove_devices, require_elastic
from planner.training_plan.sync import Sync
from planner.training_plan.validation import contradictions
from planner.workload.costs import stage_costs
from tests.conftest import levels, make_plan, random_network, tiny_workload
from tests.planning.test_hierarchical_averaging import nodes
from tests.planning.test_workers import machines_of

BILLION = pl.Workload.preset("gpt3-1.3b", batch_samples=64)
GRID = [[0, 1], [2, 3]]


def shared(plan: TrainingPlan, shards: int) -> list[dict[int, float]]:
    """Per averaged vector, the part that each device updates."""
    parts = []
    for rounds in plan.averaging:
        assert {group.phase for group in rounds[-1]} == {"spread"}
        parts.append({d: s for g in rounds[-1] for d, s in zip(g.members, g.shares, strict=True)})
        assert max(parts[-1].values()) <= 1 / shards
    return parts


@pytest.mark.parametrize("kind", ["straight", "open", "flow of two stages", "one stage"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_every_kind_of_plan_shards(kind: str, clip: float | None, tmp_path: Path) -> None:
    """Checked by another simulator, saved and loaded, and no faster than its bound."""
    kinds: dict[str, dict[str, Any]] = {
        "straight": {"stages": 2},
        "open": {},
        "flow of two stages": {"stages": 2, "wiring": "flow", "averaging": "adaptive"},
        "one stage": {"stages": 1, "averaging": "adaptive"},
    }
    limits = np.random.default_rng(5).uniform(1e7, 1e8, 6)
    devices = pl.Devices(1e9, 16e9, upload_bytes_per_s=limits)
    cluster = pl.Cluster(random_network(6, 3), devices)
    for workload in (tiny_workload(batch_samples=96), tiny_workload("llama", tied=True)):
        stop = pl.Effort(0.05)
        made = pl.plan(cluster, workload, clip=clip, stop=stop, optimizer_shards=2, **kinds[kind])
        assert made.plan is not None
        shared(made.plan, 2)
        assert all(len(group) >= 2 for group in made.plan.assignment.groups)
        assert pl.check(made.plan, cluster) == []
        pl.save_plan(made.plan, tmp_path / "plan.json")
        assert pl.load_plan(tmp_path / "plan.json") == made.plan
        assert made.bound is not None
        assert made.bound <= made.plan.predicted.step_s


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    shards=st.integers(2, 3),
    clip=st.booleans(),
    kind=st.sampled_from(["gpt2", "llama"]),
    precision=st.sampled_from(["fp32", "bf16"]),
)
def test_both_simulators_agree(
    seed: int, shards: int, clip: bool, kind: str, precision: str
) -> None:
    """Also about devices that share lines, and a norm that waits for shares of all."""
    rng = np.random.default_rng(seed)
    cluster = nodes(
        rng.integers(1, 4, 3).tolist(),
        line=float(rng.uniform(1e6, 1e8)),
        upload_bytes_per_s=float(rng.uniform(1e6, 1e8)),
    )
    stages = int(rng.integers(1, 3))
    if len(cluster) % stages or len(cluster) // stages < shards:
        return
    tiny = tiny_workload(kind, tied=bool(rng.integers(2)))
    assert tiny.architecture is not None
    made = pl.plan(
        cluster,
        pl.Workload.transformer("t", tiny.architecture, batch_samples=24, precision=precision),
        stages=stages,
        averaging="adaptive",
        optimizer_shards=shards,
        clip=0.5 if clip else None,
        stop=pl.MaxIterations(2),
    )
    assert made.plan is not None
    assert pl.check(made.plan, cluster) == []


@pytest.mark.parametrize("recomputed", [0, 1, 2])
@pytest.mark.parametrize(("kind", "precision"), [("gpt2", "fp32"), ("llama", "bf16")])
@pytest.mark.parametrize(("shards", "degree"), [(2, 1), (3, 1), (16, 1), (3, 2)])
def test_memory_is_counted_twice(
    kind: str, precision: str, shards: int, degree: int, recomputed: int
) -> None:
    """By checker and planner."""
    arch = tiny_workload(kind).architecture
    assert arch is not None
    whole = pl.Workload.transformer("w", arch, batch_samples=8, precision=precision)
    whole = whole.replace(tensor_parallel=degree)
    parts = whole.replace(optimizer_shards=shards)
    for span, head in (((0, 2), False), ((1, 3), False), ((2, 4), True), ((0, 4), True)):
        costs = stage_costs(parts, *span, with_head=head, recomputed=recomputed)
        checked = stage_memory(parts, *span, runs_head=head)
        assert costs.state_bytes == pytest.approx(checked.state, rel=1e-12)
        before = stage_costs(whole, *span, with_head=head, recomputed=recomputed)
        assert replace(costs, state_bytes=0.0) == replace(before, state_bytes=0.0)


def test_parameters_return_in_bf16_where_devices_use_no_other() -> None:
    """Half of the bytes back; the embedding of GPT-2 is added to positions in fp32."""
    arch = tiny_workload("llama").architecture
    assert arch is not None
    devices = pl.Devices(1e9, 16e9, upload_bytes_per_s=1e6)
    cluster = pl.Cluster(random_network(4), devices)
    fields: dict[str, Any] = {"stages": 2, "stop": pl.MaxIterations(1)}
    steps = {}
    for shards in (1, 2):
        workload = pl.Workload.transformer("llama", arch, batch_samples=8, precision="bf16")
        plan = pl.plan(cluster, workload, optimizer_shards=shards, **fields).plan
        assert plan is not None
        steps[shards] = plan.predicted.averaging_s
    latency = 4 * 0.25
    assert steps[2] < 0.75 * steps[1] + latency
    assert [g.dtype for rounds in plan.averaging for g in rounds[-1]] == ["bf16", "bf16"]
    other = replace(plan.averaging[0][-1][0], dtype=None)
    wrong = plan.replace(averaging=((plan.averaging[0][0], (other,)), plan.averaging[1]))
    (line,) = contradictions(wrong)
    assert "parameters of these layers are spread in bf16, found dtype None" in line
    gpt2 = tiny_workload().architecture
    assert gpt2 is not None
    workload = pl.Workload.transformer("gpt2", gpt2, batch_samples=8, precision="bf16")
    plan = pl.plan(cluster, workload, optimizer_shards=2, **fields).plan
    assert plan is not None
    assert [g.dtype for rounds in plan.averaging for g in rounds[-1]] == [None, "bf16"]


def test_of_a_middle_stage_six_bytes_and_twelve_in_shards() -> None:
    """In bf16: rounded weights and fp32 gradients; fp32 parameters and two moments."""
    layer = BILLION.layers[1].parameters
    for shards in (2, 4):
        costs = stage_costs(BILLION.replace(optimizer_shards=shards), 1, 3)
        assert costs.state_bytes == pytest.approx(2 * layer * (6 + 12 / shards))
    assert stage_costs(BILLION, 1, 3).state_bytes == 2 * layer * 18


def test_what_each_gpu_of_a_worker_has_is_updated_by_one() -> None:
    """Norms: rounded and with a gradient on both GPUs, of fp32 and moments a share for both."""
    workload = BILLION.replace(tensor_parallel=2, optimizer_shards=2)
    layer, norms = BILLION.layers[1].parameters, 4 * 2048
    assert stage_costs(workload, 1, 2).state_bytes == (layer + norms) * 6 + layer * 12 / 2


@pytest.mark.parametrize("fields", [{}, {"stages": 2, "wiring": "flow"}, {"stages": 2}])
@pytest.mark.parametrize("tied", [False, True])
def test_groups_hold_copies(fields: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    """Two of each part at least, also after the loss of a device where enough remain."""
    limits = np.random.default_rng(5).uniform(1e7, 1e8, 10)
    devices = pl.Devices(1e9, 16e9, upload_bytes_per_s=limits)
    cluster = pl.Cluster(random_network(10, 3), devices)
    workload = tiny_workload("llama", tied=tied, batch_samples=80)
    made = pl.plan(
        cluster, workload, optimizer_shards=2, optimizer_copies=2, stop=pl.Effort(0.05), **fields
    )
    plan = made.plan
    assert plan is not None and made.bound is not None
    assert plan.optimizer_copies >= 2
    assert all(len(group) >= 4 for group in plan.assignment.groups)
    for rounds in plan.averaging:
        for group in rounds[-1]:
            assert sum(group.shares) == pytest.approx(1) and max(group.shares) <= 0.5
    assert pl.check(plan, cluster) == []
    pl.save_plan(plan, tmp_path / "plan.json")
    assert pl.check(pl.load_plan(tmp_path / "plan.json")) == []
    assert made.bound <= plan.predicted.step_s
    require_elastic(plan)
    for lost in plan.cluster.network.ids:
        less = remove_devices(plan, [lost])
        size = len(plan.assignment.groups[plan.stage_of[plan.cluster.network.index_of(lost)]])
        assert less.optimizer_copies == (2 if size > 4 else 1)
        assert list(contradictions(less)) == []


def test_copies_are_at_sites_where_their_lines_are_slow() -> None:
    """Traffic between sites is that of the exchange; each site can go on alone."""
    workload = tiny_workload(batch_samples=64)
    made = pl.plan(
        nodes([4, 4]),
        workload,
        stages=1,
        optimizer_shards=2,
        optimizer_copies=2,
        stop=pl.Effort(0.1),
    )
    plan = made.plan
    assert plan is not None and plan.cluster.devices.sites is not None
    groups = plan.averaging[0][-1]
    assert sorted({plan.cluster.devices.sites[d] for d in group.members} for group in groups) == [
        {"node 0"},
        {"node 1"},
    ]


def test_copies_are_in_sites_around_sites() -> None:
    """Not in those whose names come first: lines around two machines each are slow."""
    names = [f"m{k // 2}" for k in range(8)]
    outer = {"m0": "west", "m1": "south", "m2": "west", "m3": "south"}
    lines = dict.fromkeys(["west", "south"], 2e7)
    devices = pl.Devices(
        1e11,
        16e9,
        sites=names,
        site_within=outer,
        site_upload_bytes_per_s=lines,
        site_download_bytes_per_s=lines,
    )
    cluster = pl.Cluster(pl.Network(np.full((8, 8), 1e-3), np.full((8, 8), 1e8)), devices)
    for averaging in ("equal", "adaptive"):
        plan = pl.plan(
            cluster,
            tiny_workload(batch_samples=64),
            stages=1,
            optimizer_shards=2,
            optimizer_copies=2,
            averaging=averaging,
            stop=pl.MaxIterations(2),
        ).plan
        assert plan is not None
        groups = {frozenset(group.members) for group in plan.averaging[0][-1]}
        assert groups == {frozenset({0, 1, 4, 5}), frozenset({2, 3, 6, 7})}


def test_copies_without_shards_need_no_aggregators() -> None:
    able = [True] + [False] * 5
    cluster = pl.Cluster(random_network(6), pl.Devices(1e9, 16e9, can_aggregate=able))
    fields: dict[str, Any] = {"averaging": "adaptive", "stop": pl.MaxIterations(1)}
    plan = pl.plan(cluster, tiny_workload(), stages=1, optimizer_copies=2, **fields).plan
    assert plan is not None and len(plan.assignment.groups[0]) >= 2
    with pytest.raises(ProblemError, match="optimizer_copies is 7, and 6 devices can compute"):
        pl.plan(cluster, tiny_workload(), optimizer_copies=7, **fields)
    with pytest.raises(ProblemError, match="optimizer_copies is 3, and a stage has 2 devices"):
        pl.plan(cluster, tiny_workload(), stages=3, optimizer_copies=3, **fields)


def test_copies_need_as_many_devices() -> None:
    cluster = pl.Cluster(random_network(6), pl.Devices(1e9, 16e9))
    fields: dict[str, Any] = {"optimizer_copies": 2, "stop": pl.MaxIterations(1)}
    with pytest.raises(ProblemError, match="4 with optimizer_copies 2, and 6 devices can"):
        pl.plan(cluster, tiny_workload(), optimizer_shards=4, **fields)
    with pytest.raises(ProblemError, match="2 with optimizer_copies 2, and of 3 devices"):
        pl.plan(cluster, tiny_workload(), stages=2, optimizer_shards=2, **fields)
    # all of it on two devices at least
    whole = pl.plan(cluster, tiny_workload(), **fields).plan
    assert whole is not None and whole.optimizer_copies >= 2
    assert shard_counts(cluster, tiny_workload(), pl.PlanRequest(optimizer_copies=2)) == [
        1,
        2,
    ]


def test_workers_of_several_gpus_share() -> None:
    """Both numbers are searched; a worker's GPUs share what it owns."""
    cluster = machines_of([4, 4])
    fields: dict[str, Any] = {"stop": pl.Effort(0.05), "clip": 0.5}
    made = pl.plan(cluster, tiny_workload(), tensor_parallel=2, optimizer_shards=2, **fields)
    assert made.plan is not None and made.bound is not None
    shared(made.plan, 2)
    assert pl.check(made.plan, cluster) == []
    assert made.bound <= made.plan.predicted.step_s
    model = tiny_workload()
    assert shard_counts(cluster, model, pl.PlanRequest(tensor_parallel=2)) == [1, 2, 4]
    auto = pl.plan(cluster, model, tensor_parallel="auto", optimizer_shards="auto", **fields)
    assert auto.plan is not None and pl.check(auto.plan, cluster) == []


def test_a_model_fits_that_did_not() -> None:
    """Into six cards of 10 GB, of which three hold a stage."""
    network = pl.Network(np.full((6, 6), 1e-3), np.full((6, 6), 1e9))
    cluster = pl.Cluster(network, pl.Devices(5e13, 10e9))
    two: dict[str, Any] = {"stages": 2, "stop": pl.MaxIterations(2), "recompute": "all"}
    with pytest.raises(ProblemError, match="needs"):
        pl.plan(cluster, BILLION.replace(batch_samples=96), **two)
    made = pl.plan(cluster, BILLION.replace(batch_samples=96), optimizer_shards=3, **two)
    assert made.plan is not None
    assert pl.check(made.plan, cluster) == []


def test_the_best_number_is_found() -> None:
    """Three of the devices of each stage; why the whole state does not fit is said."""
    network = pl.Network(np.full((6, 6), 1e-3), np.full((6, 6), 1e9))
    cluster = pl.Cluster(network, pl.Devices(5e13, 10e9))
    fields: dict[str, Any] = {"stages": 2, "recompute": "all", "optimizer_shards": "auto"}
    made = pl.plan(cluster, BILLION.replace(batch_samples=96), stop=pl.MaxIterations(2), **fields)
    assert made.plan is not None
    assert made.plan.workload.optimizer_shards == 3
    (other,) = (a for a in made.plan.alternatives if a.instead.startswith("1 optimizer shard"))
    assert other.taken == "3 optimizer shards"
    assert other.why.startswith("device '0' has 10.00 GB but stage 0 needs")


def test_sites_hold_all_optimizer_state_each() -> None:
    """Where that is faster and their owners hold no more than their part."""
    cluster = nodes([4, 4])
    one: dict[str, Any] = {"stages": 1, "averaging": "adaptive", "stop": pl.MaxIterations(2)}
    work = tiny_workload(batch_samples=64)
    for shards, phases in ((4, ["reduce", "exchange", "spread"]), (8, ["reduce", "spread"])):
        plan = pl.plan(cluster, work, optimizer_shards=shards, **one).plan
        assert plan is not None
        assert [str(groups[0].phase) for groups in plan.averaging[0]] == phases


def test_plans_that_contradict_themselves() -> None:
    plan = make_plan(GRID, workload=tiny_workload().replace(optimizer_shards=2))
    assert not list(contradictions(plan))
    rounds = plan.averaging[0]
    unequal = tuple(tuple(replace(g, shares=(0.25, 0.75)) for g in groups) for groups in rounds)
    whole = tuple((replace(groups[0], phase=Phase.ALL),) for groups in rounds[:1])
    three = plan.workload.replace(optimizer_shards=3)
    reversed_shares = (rounds[0], (replace(rounds[1][0], members=(2, 0)),))
    for wrong, said in (
        (plan.replace(averaging=(unequal, plan.averaging[1])), "device 2 spreads 0.75"),
        (plan.replace(averaging=(whole, plan.averaging[1])), "phases must be reduce, exchange"),
        (plan.replace(workload=three), "2 devices cannot share optimizer state in 3 shards"),
        (plan.replace(averaging=(reversed_shares, plan.averaging[1])), "averaging.stages[0]"),
        (plan.replace(sync=Sync(4)), "found sync.every_steps 4"),
        (plan.replace(workload=tiny_workload()), "phases must be reduce, exchange"),
    ):
        assert any(said in line for line in contradictions(wrong)), (
            said,
            list(contradictions(wrong)),
        )


def test_owners_of_one_site_must_hold_all() -> None:
    one = make_plan([[0], [1], [2], [3]], workload=tiny_workload().replace(optimizer_shards=2))
    sites = levels([(0, 1), (2, 3)], (0.5, 0.5))
    assert not list(contradictions(one.replace(averaging=(sites,))))
    uneven = levels([(0,), (1, 2, 3)], (0.5, 0.5))
    (line,) = contradictions(one.replace(averaging=(uneven,)))
    assert "device 0 spreads 1" in line


@pytest.mark.parametrize(
    "fields",
    [
        {"sync_every": 4},
        {"codec": "int8"},
        {"group_size": 2},
        {"stage_sizes": (2, 2, 2), "path_stages": 2},
    ],
)
def test_what_shards_do_not_go_with(fields: dict[str, Any]) -> None:
    cluster = pl.Cluster(random_network(6), pl.Devices(1e9, 16e9))
    with pytest.raises(ProblemError, match="optimizer_shards is 2 with"):
        pl.plan(cluster, tiny_workload(), optimizer_shards=2, stop=pl.MaxIterations(1), **fields)


def test_too_few_devices_for_shards() -> None:
    cluster = pl.Cluster(random_network(4), pl.Devices(1e9, 16e9))
    with pytest.raises(
        ProblemError, match="of 2 devices of a stage 2 can aggregate; give fewer, or more"
    ):
        pl.plan(cluster, tiny_workload(), stages=2, optimizer_shards=4, stop=pl.MaxIterations(1))
    with pytest.raises(ValueError, match="state_bytes_per_parameter is 12 and not 16"):
        tiny_workload().replace(state_bytes_per_parameter=12.0, optimizer_shards=2)


def test_more_shards_than_devices_are_refused() -> None:
    able = [True] * 3 + [False]
    cluster = pl.Cluster(random_network(4), pl.Devices(1e9, 16e9, can_aggregate=able))
    with pytest.raises(ProblemError, match="is 4, and 3 devices can compute and aggregate"):
        pl.plan(cluster, tiny_workload(), optimizer_shards=4, stop=pl.MaxIterations(1))


def test_parameters_that_would_be_rounded_are_refused() -> None:
    """Gradients in bf16, and fp32 parameters."""
    cluster = pl.Cluster(random_network(4), pl.Devices(1e9, 16e9))
    arch = tiny_workload("llama").architecture
    assert arch is not None
    precision = {"compute": "fp32", "messages": "fp32", "gradients": "bf16"}
    rounded = pl.Workload.transformer("l", arch, batch_samples=8, precision=precision)
    with pytest.raises(ProblemError, match="used in fp32; plan with gradients in fp32"):
        pl.plan(cluster, rounded, optimizer_shards=2, stop=pl.MaxIterations(1))
    precision["compute"] = precision["messages"] = "bf16"
    fine = pl.Workload.transformer("l", arch, batch_samples=8, precision=precision)
    plan = pl.plan(cluster, fine, optimizer_shards=2, stop=pl.MaxIterations(1)).plan
    assert plan is not None
    assert all(group.dtype is None for group in plan.averaging[0][-1])


def test_no_device_is_removed() -> None:
    plan = make_plan(GRID, workload=tiny_workload().replace(optimizer_shards=2))
    with pytest.raises(PlanError, match="optimizer state is in shards"):
        remove_devices(plan, ["0"])


def test_more_shards_need_less_memory() -> None:
    needs = [
        stage_costs(BILLION.replace(optimizer_shards=k), 0, 24, with_head=True).state_bytes
        for k in (1, 2, 4, 8)
    ]
    assert all(more > less for more, less in pairwise(needs))


def homes_with_server(server_gb: float = 256) -> pl.Cluster:
    """Four volunteers with slow uploads, and a server without GPU that has a fast one."""
    up = [2e6] * 4 + [1e8]
    devices = pl.Devices(
        1e13,
        [24e9] * 4 + [server_gb * 1e9],
        upload_bytes_per_s=up,
        download_bytes_per_s=[2e7] * 4 + [1e8],
        can_compute=[True] * 4 + [False],
    )
    return pl.Cluster(pl.Network(np.full((5, 5), 0.02), np.full((5, 5), 1e8)), devices)


@pytest.mark.parametrize("clip", [None, 1.0])
def test_a_server_owns_what_volunteers_would_send(clip: float | None) -> None:
    """It receives gradients and returns parameters; volunteers have at most their part."""
    cluster = homes_with_server()
    work = tiny_workload("llama", batch_samples=64)
    fields: dict[str, Any] = {
        "stages": 1,
        "averaging": "adaptive",
        "clip": clip,
        "stop": pl.MaxIterations(2),
    }
    plan = pl.plan(cluster, work, optimizer_shards=4, **fields).plan
    assert plan is not None
    reduce, spread = (groups[0] for groups in plan.averaging[0])
    assert reduce.aggregators == spread.aggregators == (4,)
    assert spread.shares[4] > 0.8
    assert max(spread.shares[:4]) <= 0.25
    assert pl.check(plan, cluster) == []
    alone = pl.plan(cluster.subset([0, 1, 2, 3]), work, optimizer_shards=4, **fields).plan
    assert alone is not None
    assert plan.predicted.averaging_s < alone.predicted.averaging_s
    found = pl.plan(cluster, work, optimizer_shards=2, stop=pl.Effort(0.05), clip=clip)
    assert found.plan is not None and found.bound is not None
    assert found.bound <= found.plan.predicted.step_s
    assert pl.check(found.plan, cluster) == []


def test_a_server_owns_no_more_than_its_memory_holds() -> None:
    """The checker counts the stage's sums, and parameters and moments of its share."""
    parameters = BILLION.parameters / 1e9
    work = BILLION.replace(batch_samples=64)
    fields: dict[str, Any] = {
        "stages": 1,
        "averaging": "adaptive",
        "recompute": "all",
        "stop": pl.MaxIterations(1),
    }
    cluster = homes_with_server(parameters * (4 + 6.1))
    plan = pl.plan(cluster, work, optimizer_shards=4, **fields).plan
    assert plan is not None
    owned = dict(zip(plan.averaging[0][1][0].members, plan.averaging[0][1][0].shares, strict=True))
    assert owned[4] == pytest.approx(6.1 / 12, rel=1e-6)
    assert pl.check(plan, cluster) == []
    smaller = homes_with_server(parameters * (4 + 6.0))
    lines = [v.message for v in pl.check(plan.replace(cluster=smaller), smaller)]
    assert any("for its share of the optimizer state" in line for line in lines)
