"""Where nothing fits, one line says what is too large and what would help; the advice helps."""

from __future__ import annotations

import re
from itertools import permutations

import numpy as np
import pytest

import planner as pl
from planner.planning.layer_split import evenly_filled
from planner.training_plan.choices import Head
from planner.workload.costs import ALL_LAYERS, stage_costs
from planner.workload.layers import Architecture, Family
from tests.conftest import random_network
from tests.planning.test_workers import machines_of


def workload(sequence: int, words: int = 8000) -> pl.Workload:
    """Eight layers, whose logits need most."""
    arch = Architecture(Family.LLAMA, 8, 256, 8, 4, 704, words, sequence)
    return pl.Workload.transformer("small", arch, batch_samples=8)


def test_a_shorter_sequence_is_advised_and_fits() -> None:
    """With need, stage, microbatch and tokens."""
    cluster = pl.Cluster(random_network(4), pl.Devices(1e12, 1.5e8))
    with pytest.raises(pl.ProblemError, match="no layout fits the devices' memory") as found:
        pl.plan(cluster, workload(8192), stop=pl.Effort(0.1))
    line = str(found.value)
    assert "of 4 stages, the one with layer 7 and head needs" in line
    assert "microbatches of 1 sample of 8192 tokens, and its device has 150 MB" in line
    advised = re.search(r"--sequence (\d+)", line)
    assert advised is not None
    result = pl.plan(cluster, workload(int(advised[1])), stop=pl.Effort(0.1))
    assert result.plan is not None and pl.check(result.plan) == []


def test_nothing_is_advised_that_does_not_help() -> None:
    """The state alone is too large: no sequence is short enough; one layer a stage is the most."""
    cluster = pl.Cluster(random_network(2), pl.Devices(1e12, 1e6))
    with pytest.raises(pl.ProblemError, match="what would help: devices with more memory") as found:
        pl.plan(cluster, workload(256), stop=pl.Effort(0.1))
    assert "--sequence" not in str(found.value)


def test_more_devices_are_advised_where_layers_can_be_divided() -> None:
    """Two devices need 3% more than they have; a third one is enough."""
    small = workload(256)
    memory = 0.97 * evenly_filled(small, [1.0, 1.0], [None] * 2).share
    with pytest.raises(pl.ProblemError, match="more devices, devices with more memory"):
        pl.plan(pl.Cluster(random_network(2), pl.Devices(1e12, memory)), small, stop=pl.Effort(0.1))
    cluster = pl.Cluster(random_network(3), pl.Devices(1e12, memory))
    assert pl.plan(cluster, small, stop=pl.Effort(0.1)).plan is not None
    with pytest.raises(pl.ProblemError, match=r"another number of stages \(--stages 3\)"):
        pl.plan(cluster, small, stages=2, wiring="flow", stop=pl.Effort(0.1))


@pytest.mark.parametrize("open_", [True, False])
@pytest.mark.parametrize("stages", [5, 30])
def test_a_model_that_fits_only_unevenly_is_planned(stages: int, open_: bool) -> None:
    """Embedding and head are large: stages of even layers do not fit, nor do fewer."""
    arch = Architecture(Family.LLAMA, stages * 2, 64, 4, 4, 176, 2000, 64)
    deep = pl.Workload.transformer("deep", arch, batch_samples=2)
    memory = 1.001 * evenly_filled(deep, [1.0] * stages, [None] * stages).share
    even = deep.even_split(stages)
    first = stage_costs(deep, *even[0], recomputed=ALL_LAYERS)
    last = stage_costs(deep, *even[-1], with_head=True, recomputed=ALL_LAYERS)
    assert memory < max(first.need_bytes(1), last.need_bytes(1))
    cluster = pl.Cluster(random_network(stages), pl.Devices(1e12, memory))
    if open_:
        result = pl.plan(cluster, deep, stop=pl.Effort(0.2))
    else:
        result = pl.plan(cluster, deep, stages=stages, recompute="all", stop=pl.Effort(0.2))
    assert result.plan is not None and pl.check(result.plan) == []


def test_unlike_devices_are_filled_by_their_memory() -> None:
    """Even stages fit none of the small devices, which the large ones need."""
    arch = Architecture(Family.LLAMA, 40, 64, 4, 4, 176, 2000, 64)
    deep = pl.Workload.transformer("deep", arch, batch_samples=2)
    parts = np.array([1.0, 1, 1, 6, 6, 1, 1])
    share = evenly_filled(deep, parts[[3, 0, 1, 2, 5, 6, 4]].tolist(), [None] * 7).share
    cluster = pl.Cluster(random_network(7), pl.Devices(np.full(7, 1e12), 1.02 * share * parts))
    result = pl.plan(cluster, deep, stop=pl.Effort(0.2))
    assert result.plan is not None and pl.check(result.plan) == []


@pytest.mark.parametrize("seed", range(5))
def test_the_best_order_of_unlike_devices_is_found(seed: int) -> None:
    """As the least of all orders, tried one by one; less is refused, a little more is planned."""
    rng = np.random.default_rng(seed)
    arch = Architecture(Family.LLAMA, 9, 64, 4, 4, 176, 2000, 64)
    deep = pl.Workload.transformer("deep", arch, batch_samples=2)
    parts, kinds = rng.choice([1.0, 1.0, 3.0, 5.0], 5), [None] * 5
    each = [evenly_filled(deep, order, kinds).share for order in set(permutations(parts))]
    found = evenly_filled(deep, parts.tolist(), kinds, any_order=True)
    assert found.share == pytest.approx(min(each), rel=2e-3)
    fewest = evenly_filled(deep, found.memory, kinds)
    assert fewest.share == pytest.approx(found.share, rel=2e-3)
    cluster = pl.Cluster(
        random_network(5), pl.Devices(np.full(5, 1e12), 1.01 * found.share * parts)
    )
    result = pl.plan(cluster, deep, stop=pl.Effort(0.1))
    assert result.plan is not None and pl.check(result.plan) == []


def test_fixed_layers_that_do_not_fit_are_refused_by_name() -> None:
    """Other numbers of stages are no advice: the layers were asked for."""
    small = workload(256)
    cluster = pl.Cluster(random_network(3), pl.Devices(1e12, 1e8))
    with pytest.raises(pl.ProblemError, match="layers 0 to 6 and embedding needs") as found:
        pl.plan(cluster, small, stage_layers=((0, 7), (7, 8)), wiring="flow", stop=pl.Effort(0.1))
    assert str(found.value).endswith("what would help: devices with more memory")


def test_advice_counts_the_outer_optimizer() -> None:
    """A sequence is advised where it is short enough for that state, too, and only there."""
    for memory, helps in ((1.4e8, False), (1.7e8, True)):
        cluster = pl.Cluster(random_network(2), pl.Devices(1e12, memory))
        assert pl.plan(cluster, workload(512), stop=pl.Effort(0.1)).plan is not None
        with pytest.raises(pl.ProblemError) as found:
            pl.plan(cluster, workload(512), sync_every=10, delayed=True, stop=pl.Effort(0.1))
        advised = re.search(r"--sequence (\d+)", str(found.value))
        assert (advised is not None) == helps
        if advised is not None:
            shorter = workload(int(advised[1]))
            result = pl.plan(cluster, shorter, sync_every=10, delayed=True, stop=pl.Effort(0.1))
            assert result.plan is not None and pl.check(result.plan) == []


def test_recomputation_of_some_layers_is_advised_where_all_need_more() -> None:
    """One microbatch of a stage needs least if half of its layers are computed again."""
    arch = Architecture(Family.GPT2, 8, 64, 4, 4, 256, 100, 512)
    deep = pl.Workload.transformer("deep", arch, batch_samples=2)
    none, half, every = (
        stage_costs(deep, 0, 8, with_head=True, recomputed=k).need_bytes(1) for k in (0, 4, 8)
    )
    assert half < 0.9 * min(none, every)
    cluster = pl.Cluster(random_network(1), pl.Devices(1e12, 1.02 * half))
    with pytest.raises(pl.ProblemError, match=r"recomputation of some layers \(without --rec"):
        pl.plan(cluster, deep, recompute="none", stop=pl.Effort(0.1))
    plan = pl.plan(cluster, deep, stop=pl.Effort(0.1)).plan
    assert plan is not None and plan.recompute == (4,) and pl.check(plan) == []


def test_parts_on_several_gpus_are_advised_where_they_fit() -> None:
    """Of a layer that no single GPU holds: workers, or a part of its optimizer state each."""
    small = workload(256, words=100)
    need = max(stage_costs(small, k, k + 1, with_head=k == 7).need_bytes(1) for k in range(8))
    cluster = machines_of([2] * 8, memory_bytes=0.8 * need)
    with pytest.raises(pl.ProblemError, match="what would help") as found:
        pl.plan(cluster, small, stop=pl.Effort(0.1))
    assert "several GPUs a device (--tensor-parallel auto)" in str(found.value)
    advised = re.search(r"--optimizer-shards (\d+)", str(found.value))
    assert advised is not None
    for fields in ({"tensor_parallel": "auto"}, {"optimizer_shards": int(advised[1])}):
        result = pl.plan(cluster, small, stop=pl.Effort(0.1), **fields)
        assert result.plan is not None and pl.check(result.plan) == []
    with pytest.raises(pl.ProblemError) as found:
        pl.plan(cluster, small, sync_every=4, stop=pl.Effort(0.1))
    assert "--optimizer-shards" not in str(found.value)


def test_the_smallest_device_of_a_stage_counts() -> None:
    """With optimizer state in four shards each stage has four devices, one of them too small."""
    small = workload(256)
    need = stage_costs(small, 0, 8, with_head=True).need_bytes(1)
    cluster = pl.Cluster(
        random_network(4), pl.Devices(1e12, [1.1 * need, 1.1 * need, 1.1 * need, 0.1 * need])
    )
    with pytest.raises(pl.ProblemError, match="the smallest of its 4 devices has") as found:
        pl.plan(cluster, small, optimizer_shards=4, stop=pl.Effort(0.1))
    advised = re.search(r"--optimizer-shards (\d+)", str(found.value))
    assert advised is not None and advised[1] == "2"
    result = pl.plan(cluster, small, optimizer_shards=2, stop=pl.Effort(0.1))
    assert result.plan is not None and pl.check(result.plan) == []


def test_the_other_place_of_a_tied_head_is_advised_where_it_fits() -> None:
    """There the matrix is on the stage that has it anyway."""
    arch = Architecture(Family.LLAMA, 8, 64, 4, 4, 128, 8000, 32, tied=True)
    work = pl.Workload.transformer("tied", arch, batch_samples=8)
    need = evenly_filled(work, [1.0, 1.0], [None] * 2, head=Head.FIRST).share
    network = pl.Network(np.full((2, 2), 0.01), np.full((2, 2), 1e8))
    cluster = pl.Cluster(network, pl.Devices(1e12, 1.01 * need))
    with pytest.raises(pl.ProblemError, match=r"the head on the first stage \(--head first\)"):
        pl.plan(cluster, work, stop=pl.Effort(0.1), head="last")
    assert pl.plan(cluster, work, stop=pl.Effort(0.1)).plan is not None
