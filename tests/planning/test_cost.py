"""Cost of plans, and search for cheap plans."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import planner as pl
from planner.checker.cost import cost_bound_usd
from planner.cli.simulation_report import cost_lines
from planner.network.prices import Prices
from planner.planning.cost import with_cost
from planner.planning.cost_bound import cost_bound
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.joint_bound import joint_bound
from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.simulator.traffic import sent_bytes
from planner.training_plan.choices import Codec
from planner.training_plan.file import from_dict
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import make_plan, random_network, tiny_workload
from tests.planning.joint_plans import layouts, tiny_cluster, tiny_model, whole_plan

DEAR = Prices(0.02e9, 0.09e9)
"""A byte of a tiny plan costs something."""


def two_regions(n: int = 4) -> pl.Network:
    """Two regions with fast links inside."""
    regions = ["a"] * (n // 2) + ["b"] * (n - n // 2)
    here = np.array(regions)
    near = here[:, None] == here
    return pl.Network(np.where(near, 1e-4, 0.05), np.where(near, 1e9, 1e8), None, regions)


def with_prices(plan: TrainingPlan, usd_per_hour: Any = 3.6) -> TrainingPlan:
    """Return the plan with prices of devices, and its cost."""
    devices = replace(plan.cluster.devices, usd_per_hour=usd_per_hour)
    cluster = pl.Cluster(plan.cluster.network, devices)
    return with_cost(plan.replace(cluster=cluster), PlanRequest(prices=DEAR))


def sent_between(plan: TrainingPlan) -> NDArray[np.float64]:
    """``float[N, N]``: bytes of a step from row to column."""
    sources, destinations, sizes = sent_bytes(plan)
    sent = np.zeros((len(plan.cluster), len(plan.cluster)))
    np.add.at(sent, (sources, destinations), sizes)
    return sent


def test_cost_by_hand() -> None:
    """Pipelines a-b and a-b: activations, gradients, and half a vector each way within regions."""
    plan = with_prices(make_plan([[0, 2], [1, 3]], network=two_regions()))
    work = plan.workload
    each = work.layers[1].output_bytes * work.microbatch_samples * 4
    vector = work.gradient_bytes(plan.stage_layers, 1)
    sent = sent_between(plan)
    assert sent[0, 2] == sent[2, 0] == sent[1, 3] == each
    assert sent[0, 1] == pytest.approx(vector[0]) and sent[3, 2] == pytest.approx(vector[1])
    assert sent[0, 3] == 0
    cost = plan.cost
    assert cost is not None
    assert cost.devices_usd == pytest.approx(4 * 0.001 * plan.predicted.step_s)
    assert cost.paid_bytes == pytest.approx(4 * each)
    assert cost.messages_usd == pytest.approx(4 * each * 0.02)
    arch = work.architecture
    assert arch is not None and cost.usd_per_billion_tokens is not None
    tokens = work.batch_samples * arch.sequence
    assert cost.usd_per_billion_tokens == pytest.approx(cost.step_usd / tokens * 1e9)
    across = make_plan([[0, 1], [2, 3]], network=two_regions())
    every, rare = with_prices(across), with_prices(across.replace(sync=Sync(5, OuterOptimizer())))
    assert every.cost is not None and rare.cost is not None
    assert rare.cost.paid_bytes == pytest.approx(every.cost.paid_bytes / 5)
    assert with_cost(across, PlanRequest()) is across


@settings(max_examples=15)
@given(st.integers(0, 2**32 - 1), st.integers(2, 5), st.integers(1, 4), st.integers(1, 3))
def test_checker_computes_the_same_cost(seed: int, n: int, layers: int, every: int) -> None:
    """Any wiring, shares, hierarchy and codec; no plan is cheaper than the bound."""
    rng = np.random.default_rng(seed)
    cluster, workload = tiny_cluster(n, rng), tiny_model(layers, 3, rng)
    regions = [f"{rng.choice(['aws:', 'gcp:', ''])}{k}" for k in rng.integers(0, 3, n)]
    network = pl.Network(
        cluster.network.latency_s, cluster.network.bandwidth_bytes_per_s, None, regions
    )
    devices = replace(cluster.devices, usd_per_hour=rng.uniform(0, 3, n))
    cluster = pl.Cluster(network, devices)
    rules = ((regions[0], "*", float(rng.uniform(0, 9e6))),) if rng.random() < 0.5 else ()
    request = PlanRequest(
        prices=Prices(DEAR.between_regions, DEAR.between_providers, rules),
        objective="cost",
        hour_usd=float(rng.integers(0, 2)) * 5,
        sync_every=every,
    )
    # without the outer optimizer's room the model is the one that plans are made with
    problem = PlanningProblem(cluster, workload, request)
    bound = cost_bound(problem, joint_bound(cluster, workload, every_steps=every))
    tried = list(layouts(n, layers))
    codec = Codec.INT8 if rng.random() < 0.3 else Codec.NONE
    for k in rng.permutation(len(tried))[:4]:
        groups, split = tried[int(k)]
        plan = whole_plan(cluster, workload, groups, split, rng, codec=codec, tied=every == 1)
        if plan is None:
            continue
        plan = with_cost(
            plan.replace(sync=Sync(every, OuterOptimizer()) if every > 1 else Sync()), request
        )
        assert [v for v in pl.check(plan) if v.rule == "cost"] == []
        cost = plan.cost
        assert cost is not None and bound is not None and bound.witness is not None
        if every == 1 and codec is Codec.NONE:
            waiting = request.hour_usd / 3600 * plan.predicted.step_s
            proven = cost_bound_usd(bound.witness, plan)
            assert proven == pytest.approx(bound.value, rel=1e-6)
            assert proven is not None and proven <= (cost.step_usd + waiting) * (1 + 1e-9)
        for name in ("devices_usd", "messages_usd", "paid_bytes"):
            value = getattr(cost, name)
            wrong = plan.replace(cost=replace(cost, **{name: value * 1.01 + 1e-3}))
            assert "cost" in {v.rule for v in pl.check(wrong)}


def test_files_keep_the_cost() -> None:
    """It is not part of the hash."""
    plan = with_prices(make_plan([[0, 2], [1, 3]], network=two_regions()))
    again = from_dict(plan.to_dict())
    assert again.cost == plan.cost
    assert again.content_hash == plan.replace(cost=None).content_hash
    assert from_dict(plan.replace(cost=None).to_dict()).cost is None
    data = plan.to_dict()
    data["cost"]["messages_usd"] = -1.0
    with pytest.raises(pl.PlanError, match=r"cost\.messages_usd"):
        from_dict(data)


def test_cheap_plans_use_few_devices() -> None:
    """Only the cheaper region if traffic is expensive; all devices if waiting is."""
    cluster = pl.Cluster(two_regions(8), pl.Devices(1e8, 16e9, usd_per_hour=[1.0] * 4 + [0.5] * 4))
    work = tiny_workload(batch_samples=16)

    def made(**fields: Any) -> pl.Result[TrainingPlan]:
        stop = pl.Effort(0.5)
        return pl.plan(cluster, work, stop=stop, prices=Prices(1000.0), **fields)

    fast, cheap = made(), made(objective="cost")
    waiting = made(objective="cost", hour_usd=1e6)
    for result in (fast, cheap, waiting):
        assert pl.check(result) == []
    assert fast.plan is not None and cheap.plan is not None and waiting.plan is not None
    assert fast.plan.cost is not None and cheap.plan.cost is not None
    assert cheap.objective == pytest.approx(cheap.plan.cost.step_usd)
    assert cheap.bound is not None and cheap.bound <= cheap.objective
    assert cheap.plan.cost.step_usd < fast.plan.cost.step_usd
    assert set(cheap.plan.cluster.network.regions) == {"b"}
    assert set(cheap.plan.certificates) == {"cost", "mean_step"}
    assert waiting.plan.predicted.step_s <= fast.plan.predicted.step_s * 1.02


def test_device_classes_have_one_region_and_price() -> None:
    """Only with cost as the objective."""
    off = np.full((4, 4), 1e8)
    network = pl.Network(off * 1e-10, off, None, ["a", "a", "b", "b"])
    devices = pl.Devices(1e9, 1e9, usd_per_hour=[1.0, 1.0, 1.0, 2.0])
    cluster = pl.Cluster(network, devices)
    assert DeviceClasses.of(cluster).members == ((0, 1, 2, 3),)
    classes = DeviceClasses.of(cluster, DEAR)
    assert classes.members == ((0, 1), (2,), (3,))
    assert classes.usd_per_s.tolist() == pytest.approx([1 / 3600, 1 / 3600, 2 / 3600])
    assert classes.usd_per_byte.tolist() == pytest.approx(
        np.array([[0, 0.02, 0.02], [0.02, 0, 0], [0.02, 0, 0]])
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"objective": "money"}, "objective 'money' is unknown"),
        (
            {"objective": "cost", "stages": 2},
            "objective is 'cost', which only the joint search can have; leave stages",
        ),
        ({"hour_usd": 2.0}, "hour_usd is 2, the value of waiting beside other costs"),
        ({"objective": "cost", "hour_usd": -1.0}, "hour_usd is -1"),
        ({"prices": 0.02}, "prices must be of type Prices"),
    ],
)
def test_invalid_requests(fields: dict[str, Any], words: str) -> None:
    """One line each."""
    with pytest.raises(pl.ProblemError, match=words):
        PlanRequest(**fields)


def test_free_devices() -> None:
    """They are used, and no division by their price occurs."""
    prices = [0.0, 0.0, 1.0, 1.0]
    cluster = pl.Cluster(two_regions(), pl.Devices(1e8, 16e9, usd_per_hour=prices))
    result = pl.plan(cluster, tiny_workload(), objective="cost", stop=pl.Effort(0.3))
    assert result.plan is not None and result.objective == 0
    assert set(result.plan.cluster.network.regions) == {"a"}
    assert pl.check(result) == []


def test_cost_bound_needs_all_devices() -> None:
    """Of the witness; it does not apply to a plan with another device."""
    cluster = pl.Cluster(two_regions(2), pl.Devices(1e8, 16e9, usd_per_hour=[2.0, 1.0]))
    result = pl.plan(cluster, tiny_workload(), objective="cost", stop=pl.Effort(0.5))
    plan = result.plan
    assert plan is not None and plan.cost is not None
    assert set(plan.cluster.network.regions) == {"b"}
    witness = dict(plan.certificates["cost"].witness or {})
    assert result.bound is not None
    assert cost_bound_usd(witness, plan) == pytest.approx(result.bound, rel=1e-6)
    dear = [row for row in witness["devices"] if row["usd_per_hour"] == 2.0]
    assert cost_bound_usd(witness | {"devices": dear}, plan) is None


def test_devices_need_prices() -> None:
    """One line with the remedy."""
    cluster = pl.Cluster(two_regions(), pl.Devices(1e9, 16e9))
    with pytest.raises(pl.ProblemError, match="objective 'cost' needs what devices cost"):
        pl.plan(cluster, tiny_workload(), objective="cost", stop=pl.Effort(0.1))


def test_small_prices_keep_their_digits() -> None:
    """Of machines that cost cents an hour, too, the parts add up."""
    devices = pl.Devices(1e14, 16e9, usd_per_hour=0.01)
    result = pl.plan(
        pl.Cluster(random_network(2), devices),
        tiny_workload(batch_samples=2),
        stages=2,
        prices=pl.Prices(0.05),
        stop=pl.Effort(0.1),
    )
    assert result.plan is not None and result.plan.cost is not None
    (line,) = cost_lines(result.plan, {})
    step, devices_usd, messages_usd = (
        float(x) for x in re.findall(r"(\S+) (?:\$ =|devices|for)", line)
    )
    assert 0 < step == pytest.approx(result.plan.cost.step_usd, rel=1e-3)
    assert devices_usd + messages_usd == pytest.approx(step, rel=1e-3)
