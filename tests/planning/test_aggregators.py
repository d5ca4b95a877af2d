"""Devices without a stage that aggregate gradients: choice, prediction, bounds and checks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.planning.averaging.aggregators import group_with_aggregators, on_cluster
from planner.planning.averaging.stage_averaging import adaptive_group
from planner.planning.joint.joint_bound import joint_bound
from planner.search.certificate import OPTIMAL_GAP, Certificate, Status, relative_gap
from planner.simulator.averaging_rounds import round_s
from planner.simulator.program import compile_plan
from planner.simulator.resources import LinkResources
from planner.simulator.run import Run
from planner.simulator.simulator import simulate_cycle
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Layer
from tests.conftest import tiny_workload
from tests.planning.joint_plans import layouts, mean_bound_s, tiny_cluster, tiny_model, whole_plan


def star(
    train: int, aggregators: int, *, line: float = 1e6, help_line: float = 1e7, **devices: Any
) -> pl.Cluster:
    """Trainers with slow links and aggregators with fast ones, all pairs 10 ms apart."""
    n = train + aggregators
    able = [True] * train + [False] * aggregators
    lines = [line] * train + [help_line] * aggregators
    fields: dict[str, Any] = {
        "can_compute": able,
        "upload_bytes_per_s": lines,
        "download_bytes_per_s": lines,
    }
    network = pl.Network(np.full((n, n), 0.01), np.full((n, n), 1e7))
    return pl.Cluster(network, pl.Devices(1e9, 16e9, **(fields | devices)))


def mixed(seed: int) -> pl.Cluster:
    """Six devices and three aggregators, all different."""
    rng = np.random.default_rng(seed)
    n, able = 9, [True] * 6 + [False] * 3
    network = pl.Network(rng.uniform(0, 0.02, (n, n)), rng.uniform(5e5, 5e6, (n, n)))
    lines = rng.uniform(5e5, 5e6, (2, n))
    lines[:, 6:] *= 3
    devices = pl.Devices(
        rng.uniform(5e8, 2e9, n),
        16e9,
        upload_bytes_per_s=lines[0],
        download_bytes_per_s=lines[1],
        can_compute=able,
        can_aggregate=[True] * 8 + [rng.random() < 0.5],
    )
    return pl.Cluster(network, devices)


def plan(cluster: pl.Cluster, **fields: Any) -> TrainingPlan:
    found = pl.plan(cluster, tiny_workload(batch_samples=12), stop=pl.Effort(1), **fields)
    assert found.plan is not None
    return found.plan


def test_one_aggregator_sums_everything(tmp_path: Path) -> None:
    """Four peers send and receive their vector once instead of 3/2 times."""
    cluster = star(4, 1)
    made = plan(cluster, stages=1, averaging="adaptive")
    group = made.averaging[0][0][0]
    assert group.members == (0, 1, 2, 3, 4) and group.shares == (0, 0, 0, 0, 1)
    assert group.contributes == group.receives == (True, True, True, True, False)
    assert made.averages_for == {4: 0} and not made.left_out
    vector = made.workload.gradient_bytes(made.stage_layers, made.head_stage)[0]
    assert made.predicted.averaging_s == pytest.approx(vector / 1e6 + 0.02)
    alone = plan(cluster.subset([0, 1, 2, 3]), stages=1, averaging="adaptive")
    assert alone.predicted.averaging_s == pytest.approx(1.5 * vector / 1e6 + 0.02)
    assert not pl.check(made, cluster)
    pl.save_plan(made, tmp_path / "plan.json")
    again = pl.load_plan(tmp_path / "plan.json")
    assert again.to_dict() == made.to_dict() and not pl.check(again, cluster)


def test_each_aggregator_serves_one_stage() -> None:
    """Two stages, two aggregators: a shared aggregator's round would wait for both stages."""
    cluster = star(8, 2)
    made = plan(cluster, stages=2, averaging="adaptive")
    assert sorted(made.averages_for.items()) == [(8, 0), (9, 1)] or sorted(
        made.averages_for.items()
    ) == [(8, 1), (9, 0)]
    assert not pl.check(made, cluster)


def test_useless_aggregators_are_left_out() -> None:
    """A distant one, one that cannot aggregate, and any with equal shares."""
    far = star(4, 1)
    latency = far.network.latency_s.copy()
    latency[4, :4] = latency[:4, 4] = 9.0
    away = far.replace(network=far.network.replace(latency_s=latency))
    deaf = star(4, 1, can_aggregate=[True] * 4 + [False])
    for cluster, shares in ((away, "adaptive"), (deaf, "adaptive"), (far, "equal")):
        made = plan(cluster, stages=1, averaging=shares)
        assert made.left_out == (cluster.network.ids[4],) and not made.averages_for
        assert len(made.cluster) == 4 and not pl.check(made, cluster)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("fields", [{}, {"stages": 1}, {"stages": 2}, {"stages": "auto"}])
def test_aggregators_never_make_a_plan_slower(seed: int, fields: dict[str, Any]) -> None:
    """Compared with the same devices without them; valid, and within the bound."""
    cluster, work = mixed(seed), tiny_workload(batch_samples=12)
    asked = fields | ({"averaging": "adaptive"} if fields else {})
    stop = pl.Effort(1)
    found = pl.plan(cluster, work, stop=stop, **asked)
    alone = pl.plan(cluster.subset(list(range(6))), work, stop=stop, **asked)
    assert found.plan is not None and found.objective is not None and alone.objective is not None
    assert found.objective <= alone.objective * (1 + 1e-9)
    assert found.bound is not None and 0 < found.bound <= found.objective
    assert not pl.check(found.plan, cluster) and not pl.check(found)
    names = {*found.plan.cluster.network.ids, *found.plan.left_out}
    assert names == set(cluster.network.ids)


@pytest.mark.parametrize("seed", range(8))
def test_shares_are_optimal_in_the_simulator(seed: int) -> None:
    """Without latency, no shares on a grid make a shorter round."""
    cluster = mixed(seed)
    cluster = cluster.replace(network=cluster.network.replace(latency_s=np.zeros((9, 9))))
    links, vector = LinkResources.of(cluster), 1e6
    group = group_with_aggregators(cluster, (0, 1), (6,))
    found = min(
        round_s(adaptive_group(cluster, (0, 1), vector), vector, links),
        np.inf if group is None else round_s(group, vector, links),
    )
    grid = [s for s in itertools.product(range(11), repeat=3) if sum(s) == 10]
    flags = (True, True, False)
    for shares in grid:
        other = AveragingGroup((0, 1, 6), tuple(x / 10 for x in shares), flags, flags)
        assert round_s(other, vector, links) >= found * (1 - 1e-9)


def test_bounds_consider_aggregators() -> None:
    """A model of one layer on eight peers far apart, a helper between them.

    Every peer computes 3 s, sends its million bytes in 1 s and is 2 ms from the helper and back;
    the peers alone would send 2 x 7/8 of that, 20 ms away.
    """
    part, nothing = Layer("a", 250_000, 1e9, 1.0, 1.0), Layer("none", 0, 0.0, 0.0, 0.0)
    work = pl.Workload("one layer", nothing, (part,), nothing, batch_samples=8)
    cluster = star(8, 1)
    latency = cluster.network.latency_s.copy()
    latency[8, :8] = latency[:8, 8] = 1e-3
    cluster = cluster.replace(network=cluster.network.replace(latency_s=latency))
    peers = cluster.subset(list(range(8)))
    straight: dict[str, Any] = {"stages": 1, "averaging": "adaptive"}
    for fields in ({}, straight):
        found = pl.plan(cluster, work, stop=pl.Effort(1), **fields)
        alone = pl.plan(peers, work, stop=pl.Effort(1), **fields)
        assert found.plan is not None and found.objective is not None and found.bound is not None
        assert found.plan.averages_for == {8: 0}
        assert found.objective == pytest.approx(3 + 1 + 0.002)
        assert found.bound == pytest.approx(4.0, rel=2e-3) and found.bound <= found.objective
        assert alone.bound is not None and found.objective < alone.bound
        assert not pl.check(found)
        # the other's bound proves nothing about this plan
        step = alone.plan.certificates["step"] if alone.plan else None
        assert step is not None
        wrong = found.plan.replace(certificates={"step": step})
        assert any(violation.rule == "bound" for violation in pl.check(wrong))
    helped, lonely = (mean_bound_s(peers, work, aggregators_in=c) for c in (cluster, None))
    assert helped <= found.objective < lonely


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 2), st.integers(1, 3))
def test_no_plan_with_aggregators_beats_the_bound(
    seed: int, n: int, aggregators: int, layers: int
) -> None:
    """Any cluster, model, layout, wiring, order and shares; the checker proves the same bound."""
    rng = np.random.default_rng(seed)
    whole = tiny_cluster(n + aggregators, rng)
    able = np.isin(np.arange(n + aggregators), rng.permutation(n + aggregators)[:n])
    whole = whole.replace(devices=replace(whole.devices, can_compute=able))
    cluster, work = whole.subset(np.flatnonzero(able).tolist()), tiny_model(layers, 4, rng)
    bound = joint_bound(cluster, work, aggregators_in=whole)
    lasting = mean_bound_s(cluster, work, aggregators_in=whole)
    tried = list(layouts(n, layers))
    rng.shuffle(tried)
    for groups, split in tried[:20]:
        alone = whole_plan(cluster, work, groups, split, rng, levels=False)
        if alone is None:
            continue
        made = with_random_aggregators(alone, whole, np.flatnonzero(~able).tolist(), rng)
        assert bound is not None and bound.value <= made.predicted.step_s * (1 + 1e-9)
        run = Run.planned(
            compile_plan(made, LinkResources.of(made.cluster), work), [0] * 4, averages=True
        )
        assert lasting <= run.times.step_end[-1] / 4 * (1 + 1e-9)
        step_s = made.predicted.step_s
        gap = relative_gap(step_s, bound.value)
        status = Status.OPTIMAL if gap <= OPTIMAL_GAP else Status.FEASIBLE
        step = Certificate(
            "any", status, step_s, bound.value, gap, "any", 0.0, 0, witness=bound.witness
        )
        assert not pl.check(made.replace(certificates={"step": step}))


def with_random_aggregators(
    plan: TrainingPlan, whole: pl.Cluster, aggregators: list[int], rng: np.random.Generator
) -> TrainingPlan:
    """Each sums a random share of a random stage's gradients."""
    index = [whole.network.index_of(name) for name in plan.cluster.network.ids]
    cast = sorted([*index, *aggregators])
    place = {d: k for k, d in enumerate(cast)}
    made = on_cluster(plan, whole.subset(cast), [place[d] for d in index])
    averaging = list(made.averaging)
    for d in aggregators:
        # nobody helps with what two stages share
        j, share = int(rng.integers(len(made.stage_layers))), float(rng.choice([0.3, 0.7, 1.0]))
        group = averaging[j][0][0]
        if share == 1.0 and group.aggregators:
            share = 0.5
        shares = (*(one * (1 - share) for one in group.shares), share)
        flags = (*group.receives, False)
        averaging[j] = ((AveragingGroup((*group.members, place[d]), shares, flags, flags),),)
    made = made.replace(averaging=tuple(averaging))
    return made.replace(predicted=simulate_cycle(made)[0])


def test_devices_that_cannot_aggregate() -> None:
    """They train and have no share, with and without an aggregator."""
    able = [False, True, True, False, True]
    for cluster in (star(4, 1, can_aggregate=able), star(5, 0, can_aggregate=able)):
        group = plan(cluster, stages=1, averaging="adaptive").averaging[0][0][0]
        assert set(group.members) >= {0, 3} and group.receives[:4] == (True,) * 4
        assert group.shares[0] == group.shares[3] == 0.0
    for cluster in (star(4, 1), star(5, 0)):
        other = cluster.replace(devices=replace(cluster.devices, can_aggregate=able))
        made = plan(other, stages=1, averaging="adaptive")
        assert not pl.check(made, other)
        assert any(violation.rule == "devices" for violation in pl.check(made, cluster))


def test_invalid_aggregators() -> None:
    """Rules for plans with aggregators."""
    made = plan(star(4, 1), stages=1, averaging="adaptive")
    group = made.averaging[0][0][0]

    def says(text: str, **changes: Any) -> None:
        other = made.replace(averaging=((((replace(group, **changes)),),),))
        found = [violation.message for violation in pl.check(other)]
        assert found and text in found[0], found

    says("sums nothing", shares=(0.25, 0.25, 0.25, 0.25, 0.0))
    says("contributes", contributes=(True,) * 5)
    says("helps none to average", receives=(True,) * 5)
    says("its groups must hold each device", receives=(True, True, True, False, False))
    helps = {"members": (0, 1, 2, 3, 4, 4), "shares": (0, 0, 0, 0, 0.5, 0.5)}
    flags = (True, True, True, True, False, False)
    says("helps in 2 groups", **helps, contributes=flags, receives=flags)
    deaf = star(4, 1, can_aggregate=[True] * 4 + [False])
    found = pl.check(made.replace(cluster=deaf))
    assert "cannot aggregate" in found[0].message
    idle = made.replace(averaging=plan(star(4, 0), stages=1).averaging)
    assert "has no stage and helps none" in pl.check(idle)[0].message
    blind = star(4, 1, can_compute=[False, True, True, True, False])
    assert "cannot compute" in pl.check(made.replace(cluster=blind))[0].message
