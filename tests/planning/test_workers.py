"""Workers of several GPUs: their figures, plans on them, and what the checker makes of them."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner as pl
from planner.checker.memory import stage_memory
from planner.checker.workers import worker_cluster
from planner.exports.error import ExportError
from planner.exports.formats import export_plan
from planner.planning.workers import (
    degrees,
    kinds_of_machines,
    tensor_parallel_workers,
    unused_gpus,
)
from planner.problems import ProblemError
from planner.workload.costs import stage_costs
from tests.conftest import tiny_workload

LINK, DELAY = 5e9, 1e-5


def machines_of(sizes: list[int], seed: int = 0, **changes: Any) -> pl.Cluster:
    """Machines of some GPUs each, far apart; GPUs of a machine see each other by their link."""
    rng = np.random.default_rng(seed)
    names = [f"m{k}" for k, size in enumerate(sizes) for _ in range(size)]
    n = len(names)
    machine = np.array(names)
    inside = machine[:, None] == machine[None, :]
    far = rng.uniform(0.005, 0.05, (n, n)), rng.uniform(1e7, 1e8, (n, n))
    network = pl.Network(
        np.where(inside, DELAY, far[0]),
        np.where(inside, LINK, far[1]),
        [f"{name}/{k}" for k, name in enumerate(names)],
        names,
    )
    devices = pl.Devices(
        1e12,
        1e9,
        machines=names,
        gpu_link_bytes_per_s=LINK,
        gpu_link_latency_s=DELAY,
        usd_per_hour=2.0,
    )
    return pl.Cluster(network, replace(devices, **changes))


def test_figures_of_a_worker_by_hand() -> None:
    """Two machines of four: two workers each, named by machine, with all that their GPUs have."""
    cluster = machines_of([4, 4])
    workers, workload = tensor_parallel_workers(cluster, tiny_workload(), 2)
    assert workers.network.ids == ("m0/w0", "m0/w1", "m1/w0", "m1/w1")
    assert workers.memory_bytes.tolist() == [2e9] * 4
    assert np.asarray(workers.devices.usd_per_hour).tolist() == [4.0] * 4
    # tokens x hidden x 4 bytes, of which a GPU has half; 10 collectives a layer, 2 at each end
    exchange_s = 16 * 32 * 4 / 2 / LINK + DELAY
    flops = 3 * workload.forward_flops
    expected = flops / (flops / 2e12 + (10 * 4 + 4) * exchange_s)
    assert workers.flops == pytest.approx([expected] * 4, rel=1e-12)
    # messages travel whole
    between = cluster.network.bandwidth_bytes_per_s[:2, 4:6].max()
    assert workers.network.bandwidth_bytes_per_s[0, 1:3].tolist() == [LINK, between]
    assert workers.network.latency_s[0, 2] == cluster.network.latency_s[:2, 4:6].max()


def test_names_of_devices_and_machines_may_be_alike() -> None:
    """A device without machine is in none of its name; an aggregator keeps its name."""
    cluster = machines_of([2, 1, 1], can_compute=[True, True, True, False])
    network = cluster.network.replace(ids=["a", "b", "m0", "m0'"])
    devices = replace(cluster.devices, machines=["m0", "m0", "", ""])
    workers, workload = tensor_parallel_workers(pl.Cluster(network, devices), tiny_workload(), 2)
    assert workers.network.ids == ("m0", "m0'")
    network = cluster.network.replace(ids=["a", "b", "c", "m0"])
    workers, workload = tensor_parallel_workers(pl.Cluster(network, devices), tiny_workload(), 2)
    assert workers.network.ids == ("m0/w0", "m0")
    derived = worker_cluster(pl.Cluster(network, devices), workload)
    assert derived is not None and derived.network.ids == workers.network.ids


def test_one_worker_a_machine_has_its_name() -> None:
    cluster = machines_of([4, 5, 2])
    workers, _ = tensor_parallel_workers(cluster, tiny_workload(), 4)
    assert workers.network.ids == ("m0", "m1")
    assert unused_gpus(cluster, 4) == "1 GPU of m1 (and of 1 more) in no worker of 4"
    assert unused_gpus(machines_of([4, 8]), 4) == ""


def test_the_slowest_gpu_sets_the_pace_and_the_smallest_memory_counts() -> None:
    mixed = machines_of([2], flops=[1e12, 4e12], memory_bytes=[3e9, 2e9])
    workers, _ = tensor_parallel_workers(mixed, tiny_workload(), 2)
    slow, _ = tensor_parallel_workers(machines_of([2]), tiny_workload(), 2)
    assert workers.flops.tolist() == slow.flops.tolist()
    assert workers.memory_bytes.tolist() == [4e9]


def test_a_worker_is_named_after_its_weakest_gpu() -> None:
    """The formats of all must do; a site that no worker is in has no limits."""
    cluster = machines_of(
        [2, 1],
        gpus=["A100", "V100", "H100"],
        sites=["a", "a", "b"],
        site_upload_bytes_per_s={"a": 1e8, "b": 2e8},
    )
    workers, _ = tensor_parallel_workers(cluster, tiny_workload(), 2)
    assert workers.devices.gpus == ("V100",)
    assert workers.devices.site_upload_bytes_per_s == {"a": 1e8}


def test_devices_that_only_aggregate_stay_as_they_are() -> None:
    cluster = machines_of([2, 1, 2], can_compute=[True, True, False, True, True])
    workers, _ = tensor_parallel_workers(cluster, tiny_workload(), 2)
    assert workers.network.ids == ("m0", "m1/2", "m2")
    assert np.asarray(workers.devices.can_compute).tolist() == [True, False, True]
    assert workers.flops[1] == 1e12 and workers.memory_bytes[1] == 1e9


def test_degrees_that_model_and_machines_allow() -> None:
    """4 heads, 2 of keys and values for llama; tokens and widths are powers of two."""
    assert degrees(machines_of([8, 3]), tiny_workload()) == [1, 2, 4]
    assert degrees(machines_of([8, 3]), tiny_workload("llama")) == [1, 2]
    assert degrees(machines_of([3, 1]), tiny_workload()) == [1, 2]
    assert degrees(machines_of([1, 1]), tiny_workload()) == [1]


@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5).filter(lambda s: max(s) > 1),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_the_checker_derives_the_same_workers(
    sizes: list[int], seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    n = sum(sizes)
    cluster = machines_of(
        sizes,
        seed,
        flops=rng.uniform(1e12, 2e12, n),
        memory_bytes=rng.uniform(1e9, 2e9, n),
        can_compute=rng.random(n) < 0.8,
        upload_bytes_per_s=rng.uniform(1e7, 1e8, n),
        gpu_link_bytes_per_s=rng.uniform(1e9, 1e10, n),
        gpu_link_latency_s=rng.uniform(0, 1e-4, n),
        gpus=rng.choice(["", "V100", "A100", "H100"], n).tolist(),
        sites=(sites := [f"s{k}" for k in rng.integers(0, 3, n)]),
        site_upload_bytes_per_s=dict.fromkeys(sites, 100000000.0),
    )
    possible = degrees(cluster, tiny_workload())
    able = Counter(np.array(cluster.devices.machines)[np.asarray(cluster.devices.can_compute)])
    by_machine = {
        str(name): data.draw(st.sampled_from([t for t in possible if t <= count]))
        for name, count in able.items()
    }
    choices: list[int | dict[str, int]] = [*possible, by_machine]
    degree = data.draw(st.sampled_from(choices))
    workers, workload = tensor_parallel_workers(cluster, tiny_workload(), degree)
    if workload.tensor_parallel == 1:
        return
    counts = workers.devices.gpu_counts
    if counts is not None:
        assert set(np.asarray(counts).tolist()) >= set(by_machine.values())
    derived = worker_cluster(cluster, workload, by_machine if counts is not None else None)
    assert derived is not None
    assert derived.flops == pytest.approx(workers.flops, rel=1e-12)
    assert derived.replace(devices=replace(derived.devices, flops=workers.flops)) == workers


@pytest.mark.parametrize("recomputed", [0, 1, 2])
@pytest.mark.parametrize(("kind", "precision"), [("gpt2", "fp32"), ("llama", "bf16")])
def test_memory_of_a_worker_is_what_its_gpus_hold(
    kind: str, precision: str, recomputed: int
) -> None:
    """Checker and planner count alike; what every GPU gathers makes it more than one's."""
    arch = tiny_workload(kind).architecture
    assert arch is not None
    one = pl.Workload.transformer("w", arch, batch_samples=8, precision=precision)
    two = one.replace(tensor_parallel=2)
    for span, head in (((0, 2), False), ((1, 3), False), ((2, 4), True), ((0, 4), True)):
        costs = stage_costs(two, *span, with_head=head, recomputed=recomputed)
        checked = stage_memory(two, *span, runs_head=head)
        assert costs.state_bytes == checked.state
        assert costs.saved_bytes == checked.saved[recomputed]
        assert costs.scratch_bytes == pytest.approx(checked.operation[recomputed], rel=1e-12)
        alone = stage_costs(one, *span, with_head=head, recomputed=recomputed)
        assert alone.need_bytes(1) < costs.need_bytes(1) < 2 * alone.need_bytes(1)
        assert alone.forward_flops == costs.forward_flops


def test_a_plan_on_workers_is_verified_against_the_gpus() -> None:
    cluster = machines_of([4, 4])
    result = pl.plan(cluster, tiny_workload(), tensor_parallel=2, stop=pl.Effort(0.05))
    assert result.plan is not None and result.bound is not None
    assert result.plan.workload.tensor_parallel == 2
    assert set(result.plan.cluster.network.ids) <= {"m0/w0", "m0/w1", "m1/w0", "m1/w1"}
    assert pl.check(result.plan, cluster) == []
    slower = replace(cluster.devices, gpu_link_bytes_per_s=LINK / 2)
    (violation,) = pl.check(result.plan, cluster.replace(devices=slower))
    assert violation.where == "devices.flops"
    (violation,) = pl.check(result.plan, machines_of([1, 1]))
    assert violation.where == "workload.tensor_parallel"


def test_auto_is_no_slower_than_any_degree_and_lists_the_others() -> None:
    cluster = machines_of([4, 4])
    best = pl.plan(cluster, tiny_workload(), tensor_parallel="auto", stop=pl.Effort(0.3))
    assert best.plan is not None and best.objective is not None
    for degree in (1, 2, 4):
        fixed = pl.plan(cluster, tiny_workload(), tensor_parallel=degree, stop=pl.Effort(0.05))
        assert fixed.objective is not None
        assert best.objective <= fixed.objective * (1 + 1e-9)
    chosen = best.plan.workload.tensor_parallel
    others = [a.instead for a in best.plan.alternatives if a.taken.endswith("a worker")]
    assert len(others) == 2 and all("GPU" in words for words in others)
    assert all("a worker (>= " in words for words in others)
    assert pl.check(best.plan, cluster) == [] and chosen in (1, 2, 4)


def test_machines_with_different_numbers_of_gpus_per_worker() -> None:
    """Each worker has what its GPUs have; memory counts with the largest number."""
    cluster = machines_of([4, 2, 1, 2])
    workers, workload = tensor_parallel_workers(cluster, tiny_workload(), {"m0": 4, "m3": 2})
    assert workers.network.ids == ("m0", "m1/4", "m1/5", "m2/6", "m3")
    assert np.asarray(workers.devices.gpu_counts).tolist() == [4, 1, 1, 1, 2]
    assert workers.memory_bytes.tolist() == [4e9, 1e9, 1e9, 1e9, 2e9]
    assert workload.tensor_parallel == 4
    for d, degree in ((0, 4), (4, 2)):
        equal, _ = tensor_parallel_workers(cluster, tiny_workload(), degree)
        assert workers.flops[d] == equal.flops[equal.network.index_of(workers.network.ids[d])]
    assert workers.flops[1] == 1e12
    same, workload = tensor_parallel_workers(cluster, tiny_workload(), {"m0": 1})
    assert same == cluster and workload.tensor_parallel == 1
    assert unused_gpus(cluster, {"m0": 4, "m3": 2}) == ""


@pytest.mark.parametrize(
    ("degree", "words"),
    [
        ({"m9": 2}, "names machine 'm9', and the machines whose GPUs can compute are: m0, m1"),
        ({"m1": 4}, "is 4 for machine 'm1', which has 2 GPUs that can compute; give fewer"),
        ({"m0": 3}, "tensor_parallel is 3; it must divide the 4 heads"),
        ({"m0": 0}, "tensor_parallel of machine 'm0' is 0; it must be at least 1"),
        ({"m0": "two"}, "of machine 'm0' must be a whole number, found 'two'"),
    ],
)
def test_numbers_that_machines_cannot_have(degree: dict[str, Any], words: str) -> None:
    with pytest.raises(ProblemError, match=re.escape(words)):
        pl.plan(
            machines_of([4, 2]), tiny_workload(), tensor_parallel=degree, stop=pl.MaxIterations(1)
        )


@pytest.mark.parametrize("left_out", [(), ("m1/4", "m1/5"), ("m2",)])
def test_a_mixed_plan_is_verified_against_the_gpus(left_out: tuple[str, ...]) -> None:
    """Also if machines have no part: the names of their workers say how many GPUs they have."""
    limits: dict[str, Any] = {"upload_bytes_per_s": 1e8, "download_bytes_per_s": 1e8}
    cluster, mix = machines_of([4, 2, 2], **limits), {"m0": 4, "m2": 2}
    workers, _ = tensor_parallel_workers(cluster, tiny_workload(), mix)
    machines = np.array(workers.devices.machines)
    kept = [name for name in workers.network.ids if name not in left_out]
    there = set(machines[[workers.network.index_of(name) for name in kept]])
    gpus = [d for d, machine in enumerate(cluster.devices.machines or ()) if machine in there]
    plan = pl.plan(
        cluster.subset(gpus),
        tiny_workload(),
        tensor_parallel={m: t for m, t in mix.items() if m in there},
        stages=len(kept),
        stop=pl.MaxIterations(2),
    ).plan
    assert plan is not None and plan.cluster.devices.gpu_counts is not None
    plan = plan.replace(left_out=left_out, certificates={})
    assert pl.check(plan, cluster) == []
    (violation,) = pl.check(plan, machines_of([4, 2, 2, 2], **limits))
    assert violation.where == "assignment.left_out" and "'m3/8'" in violation.message
    devices = plan.cluster.devices
    assert devices.gpu_counts is not None
    for counts in ([2, *np.asarray(devices.gpu_counts)[1:]], None):
        wrong = plan.cluster.replace(devices=replace(devices, gpu_counts=counts))
        assert pl.check(plan.replace(cluster=wrong), cluster) != []


def test_auto_tries_different_numbers_in_unlike_machines() -> None:
    """Machines with one GPU, which any number above 1 for all would leave out, take part."""
    cluster = machines_of([4, 1, 1, 1], flops=[1e12] * 4 + [9e12] * 3)
    best = pl.plan(cluster, tiny_workload(), tensor_parallel="auto", stop=pl.Effort(0.3))
    assert best.plan is not None
    tried = [best.plan.alternatives[0].taken, *(a.instead for a in best.plan.alternatives)]
    assert any("in m0" in words for words in tried)
    assert pl.check(best.plan, cluster) == []
    machines = kinds_of_machines(cluster, tiny_workload())
    assert machines == [(["m0"], [1, 2, 4])]
    assert kinds_of_machines(machines_of([4, 4]), tiny_workload()) == []


def test_a_mix_is_tried_if_no_number_for_all_fits() -> None:
    """Single GPUs are too small, and 4 a worker leave out the machine of two."""
    workload = tiny_workload().replace(tensor_parallel=4)
    first, last = (
        1.01 * stage_costs(workload, *span, with_head=head).need_bytes(1)
        for span, head in (((0, 1), False), ((1, 4), True))
    )
    cluster = machines_of([4, 2], memory_bytes=[last / 4] * 4 + [first / 2] * 2)
    for degree in (1, 2, 4):
        with pytest.raises(ProblemError, match="no layout fits"):
            pl.plan(cluster, tiny_workload(), tensor_parallel=degree, stop=pl.Effort(0.05))
    found = pl.plan(cluster, tiny_workload(), tensor_parallel="auto", stop=pl.Effort(0.5))
    assert found.plan is not None and pl.check(found.plan, cluster) == []
    assert found.request.tensor_parallel == {"m0": 4, "m1": 2}


def test_mixed_plans_are_not_exported_to_trainers() -> None:
    cluster = machines_of([2, 1, 1])
    plan = pl.plan(
        cluster, tiny_workload(), tensor_parallel={"m0": 2}, stages=3, stop=pl.MaxIterations(2)
    ).plan
    assert plan is not None
    with pytest.raises(ExportError, match="cannot express devices of 1 and 2 GPUs; plan with"):
        export_plan(plan, "megatron")
    assert '"mesh_rank": null' in export_plan(plan, "ranks")


def test_plan_files_keep_the_degree(tmp_path: Any) -> None:
    result = pl.plan(machines_of([2, 2]), tiny_workload(), tensor_parallel=2, stop=pl.Effort(0.05))
    assert result.plan is not None
    pl.save_plan(result.plan, tmp_path / "plan.json")
    loaded = pl.load_plan(tmp_path / "plan.json")
    assert loaded == result.plan and loaded.workload.tensor_parallel == 2


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tensor_parallel": 3}, r"tensor_parallel is 3; it must divide the 4 heads"),
        ({"tensor_parallel": 0}, r"tensor_parallel is 0; it must be at least 1"),
        ({"tensor_parallel": "all"}, r"tensor_parallel"),
    ],
)
def test_degrees_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(pl.ProblemError, match=message):
        pl.plan(machines_of([4, 4]), tiny_workload(), stop=pl.MaxIterations(1), **fields)


def test_a_degree_without_machines() -> None:
    cluster = machines_of([4, 4], machines=None)
    with pytest.raises(pl.ProblemError, match=r"no machine has so many GPUs .* the largest has 1"):
        pl.plan(cluster, tiny_workload(), tensor_parallel=2, stop=pl.MaxIterations(1))
    cluster = machines_of([4, 4], gpu_link_bytes_per_s=None)
    with pytest.raises(pl.ProblemError, match="links between the GPUs of a machine are unknown"):
        pl.plan(cluster, tiny_workload(), tensor_parallel=2, stop=pl.MaxIterations(1))


def test_left_out_machines_whose_workers_names_are_ambiguous() -> None:
    """A machine of four has one worker of three or of four GPUs, and there may be an aggregator."""
    cluster = machines_of([1, 4], flops=[1e13] + [1e9] * 4)
    plan = pl.plan(cluster, tiny_workload(), tensor_parallel={"m1": 4}, stop=pl.Effort(0.1)).plan
    assert plan is not None and plan.left_out == ("m1",)
    assert pl.check(plan, cluster) == []
    cluster = machines_of([3, 1, 1], 20, can_compute=[True, True, False, True, True])
    plan = pl.plan(
        cluster, tiny_workload(), tensor_parallel={"m0": 2}, stages=3, stop=pl.Effort(0.1)
    ).plan
    assert plan is not None and pl.check(plan, cluster) == []


@pytest.mark.parametrize(
    ("sizes", "changes", "fields"),
    [
        ([2], {}, {"optimizer_shards": 2}),
        ([4], {}, {"stages": 4, "wiring": "flow", "recompute": [3]}),
        ([2, 2], {"gpu_link_bytes_per_s": None, "gpu_link_latency_s": None}, {}),
    ],
)
def test_what_does_not_fit_is_refused_for_its_memory(
    sizes: list[int], changes: dict[str, Any], fields: dict[str, Any]
) -> None:
    """Also where workers of several GPUs are too few, or their links are unknown."""
    cluster = machines_of(sizes, memory_bytes=1e4, **changes)
    with pytest.raises(ProblemError, match="no layout fits the devices' memory"):
        pl.plan(cluster, tiny_workload(), stop=pl.Effort(0.05), **fields)


def test_auto_tries_no_mix_twice_and_few_of_many_kinds() -> None:
    """Of machines that all have the number there is no mix; links differ by what is measured."""
    best = pl.plan(
        machines_of([2, 2], flops=[1e12, 1e12, 3e12, 3e12]),
        tiny_workload(),
        tensor_parallel="auto",
        stop=pl.Effort(0.1),
    )
    assert best.plan is not None
    words = [a.instead for a in best.plan.alternatives] + [best.plan.alternatives[0].taken]
    assert not any("2 in m0, m1" in text or "1 in m0, m1" in text for text in words)
    links = [5e9 * (1 + 1e-4 * d) for d in range(8)]
    nearly = machines_of([4, 4], gpu_link_bytes_per_s=links)
    assert kinds_of_machines(nearly, tiny_workload()) == []
