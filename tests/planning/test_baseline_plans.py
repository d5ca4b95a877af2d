"""A plan is never slower than its baselines."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.planning.baselines.plans import Baselines
from planner.planning.problem import PlanningProblem
from planner.workload.costs import ALL_LAYERS, stage_costs
from planner.workload.layers import Architecture, Family


def cluster_of(
    seed: int, devices: int, classes: int, tight: float
) -> tuple[pl.Cluster, pl.Workload]:
    """Devices of two kinds in some classes, with ``tight`` times the memory of an even split."""
    rng = np.random.default_rng(seed)
    arch = Architecture(Family.LLAMA, 6, 64, 4, 2, 176, 997, 64)
    workload = pl.Workload.transformer("small", arch, batch_samples=2 * devices)
    need = max(
        stage_costs(workload, a, b, with_head=b == 6).need_bytes(1)
        for a, b in workload.even_split(min(devices, 6))
    )
    kinds = rng.integers(0, 2, devices)
    at = np.sort(rng.integers(0, classes, devices))
    same = at[:, None] == at
    latency = np.where(same, 1e-4, rng.uniform(1e-3, 0.1, (devices, devices)))
    rate = np.where(same, 1e9, 10 ** rng.uniform(6, 8.5, (devices, devices)))
    network = pl.Network(latency, rate, regions=[f"place{k}" for k in at])
    memory = tight * need * np.where(kinds, 2.0, 1.0)
    flops = rng.uniform(0.5, 2) * 1e10 * np.where(kinds, 3.0, 1.0)
    return pl.Cluster(network, pl.Devices(flops, memory)), workload


@settings(max_examples=15, deadline=None)
@given(
    st.integers(0, 10_000), st.integers(2, 8), st.integers(1, 3), st.sampled_from([1.05, 1.5, 4.0])
)
def test_no_baseline_is_faster(seed: int, devices: int, classes: int, tight: float) -> None:
    """Ranks in order, one region, straight pipelines of any number of stages; the plan is valid."""
    cluster, workload = cluster_of(seed, devices, classes, tight)
    try:
        result = pl.plan(cluster, workload, stop=pl.Effort(0.2))
    except pl.ProblemError as error:
        assert "memory" in str(error) or "GB" in str(error)
        return
    assert pl.check(result, cluster) == []
    assert result.baselines is not None
    printed = [one.step_s for one in result.baselines]
    again = Baselines.of(PlanningProblem.of(cluster, workload, None, 0, {}), pl.Effort(0.2))
    assert printed == [one.step_s for one in again]
    for step_s in printed:
        assert result.objective <= step_s * (1 + 1e-9)
    others = [one for one in result.plan.alternatives if one.value is not None]
    assert all(result.objective <= one.value * (1 + 1e-9) for one in others)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 8), st.sampled_from([1.05, 1.5]))
def test_straight_pipelines_are_no_slower_than_ranks_in_order(
    seed: int, devices: int, tight: float
) -> None:
    """For any number of stages, and for that of the ranks."""
    cluster, workload = cluster_of(seed, devices, 2, tight)
    try:
        result = pl.plan(cluster, workload, stages="auto", stop=pl.Effort(0.1))
    except pl.ProblemError:
        return
    assert result.plan is not None and pl.check(result, cluster) == []
    ranks = result.baselines.ranks
    for one in (ranks.data, ranks.pipeline):
        if one is None or one.order != "eager-1f1b":
            continue
        assert result.objective <= one.step_s * (1 + 1e-9)
        samples = one.microbatch_samples
        fixed = pl.plan(
            *(cluster, workload),
            stages=one.stages,
            microbatch_samples=samples,
            stop=pl.Effort(0.1),
        )
        assert fixed.objective <= one.step_s * (1 + 1e-9)
        assert fixed.plan is not None and pl.check(fixed, cluster) == []


@pytest.mark.parametrize("seed", range(4))
def test_baselines_respect_the_in_flight_limit(seed: int) -> None:
    """1F1B holds one microbatch per stage; its plans are left out if the limit is lower."""
    cluster, workload = cluster_of(seed, 6, 2, 4.0)
    result = pl.plan(cluster, workload, in_flight=2, stop=pl.Effort(0.1))
    assert result.plan is not None and result.baselines is not None
    for one in result.baselines:
        assert max(one.plan().schedules[0].most_live()) <= 2
        assert result.objective <= one.step_s * (1 + 1e-9)


def test_baselines_may_recompute_if_the_plan_may() -> None:
    """With little memory, ranks recompute in all stages, and the plan is no slower."""
    cluster, workload = cluster_of(3, 4, 2, 1.05)
    result = pl.plan(cluster, workload, stop=pl.Effort(0.2))
    assert result.objective <= min(one.step_s for one in result.baselines) * (1 + 1e-9)


def test_stages_auto_recomputes_if_needed() -> None:
    """One stage per device fits only with recomputation."""
    cluster, workload = cluster_of(1, 4, 1, 4.0)
    least = max(
        stage_costs(workload, a, b, with_head=b == 6, recomputed=ALL_LAYERS).need_bytes(1)
        for a, b in workload.even_split(2)
    )
    plain = max(
        stage_costs(workload, a, b, with_head=b == 6).need_bytes(1)
        for a, b in workload.even_split(2)
    )
    if least >= plain:
        pytest.skip("recomputation saves nothing here")
    devices = replace(cluster.devices, memory_bytes=(least + plain) / 2)
    result = pl.plan(cluster.replace(devices=devices), workload, stages="auto", stop=pl.Effort(0.2))
    assert result.plan is not None and pl.check(result) == []
