"""The checker's own computation of the bounds on the mean step."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.bench.job_generator import random_job
from planner.checker.mean_bound import mean_step_bound_s
from planner.planning.joint.mean_bound import mean_bounds
from planner.training_plan.choices import Codec, Head
from planner.training_plan.model import MEAN_STEP, TrainingPlan
from tests.planning.joint_plans import layouts, tiny_cluster, tiny_model, whole_plan
from tests.planning.test_type_bound import of_types

FURTHER = 1.01


def verified(
    plan: TrainingPlan, cluster: pl.Cluster, heads: tuple[Head, ...], higher_of: int | None = None
) -> Counter[str]:
    """Check every bound on a plan, and of one that no higher one is proven; returns the kinds."""
    kinds = Counter[str]()
    bounds = mean_bounds(cluster, plan.workload, plan.codec.wire_ratio, heads=heads)
    for k, bound in enumerate(bounds):
        if not 0 < bound.value < np.inf:
            continue
        assert bound.witness is not None
        kinds[bound.witness["kind"]] += 1
        assert mean_step_bound_s(bound.witness, plan, bound.value) == bound.value
        if k != higher_of:
            continue
        higher = FURTHER * bound.value
        proven = mean_step_bound_s(bound.witness, plan, higher)
        assert proven is not None and bound.value * (1 - 1e-6) <= proven < higher
    return kinds


@settings(max_examples=50)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.integers(2, 4),
    layers=st.integers(1, 4),
    unlike=st.booleans(),
)
def test_planner_and_checker_agree(seed: int, n: int, layers: int, unlike: bool) -> None:
    """On random plans, some of which use a part of the cluster."""
    rng = np.random.default_rng(seed)
    cluster, workload = tiny_cluster(n, rng), tiny_model(layers, 4, rng)
    if unlike:
        cluster, workload = of_types(seed, n, layers, 4)
    tried = list(layouts(n, layers))
    head = Head(rng.choice(list(Head)))
    heads = (head,) if rng.random() < 0.5 else tuple(Head)
    codec = Codec(rng.choice(list(Codec)))
    for k in rng.permutation(len(tried))[:5]:
        groups, split = tried[k]
        plan = whole_plan(cluster, workload, groups, split, rng, codec=codec, head=head)
        if plan is not None:
            verified(plan, cluster, heads, int(rng.integers(3)))
            return


@pytest.mark.parametrize("number", [3, 9])
def test_plans_of_unlike_clusters(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is in the plan, which passes its check, and survives its file."""
    job = random_job(number)
    made = pl.plan(job.cluster, job.workload, stop=pl.Effort(0.3)).plan
    assert made is not None
    certificate, step = made.certificates[MEAN_STEP], made.certificates["step"]
    assert step.bound is not None and certificate.bound is not None
    assert step.bound < certificate.bound <= made.predicted.step_s
    assert made.step_certificate == certificate
    assert pl.check(made) == []
    kinds = verified(made, job.cluster, (Head.LAST,))
    assert kinds["mean of stages"] and kinds["mean of sites"]
    forged = replace(
        certificate,
        bound=FURTHER * certificate.bound,
        gap=1 - FURTHER * certificate.bound / made.predicted.step_s,
    )
    certificates = {**made.certificates, MEAN_STEP: forged}
    # whether it is proven does not depend on how much less is
    monkeypatch.setattr("planner.checker.joint_bound.BISECTIONS", 0)
    assert [v.rule for v in pl.check(made.replace(certificates=certificates))] == ["bound"]


def test_sites_of_less_prove_nothing() -> None:
    """A witness whose sites can do less than the plan's."""
    job = random_job(2)
    made = pl.plan(job.cluster, job.workload, stop=pl.Effort(0.3)).plan
    assert made is not None
    of_sites = mean_bounds(job.cluster, job.workload)[-1]
    witness = dict(of_sites.witness or {})
    sites = witness["sites"]
    used = {made.cluster.devices.sites_around(d)[0] for d in made.stage_of}
    for key, factor in (
        ("flops", 0.99),
        ("memory_bytes", 0.99),
        ("slowest_flops", 1e6),
        ("line_bytes_per_s", 1e-6),
        ("final_bytes_per_s", 1e-6),
    ):
        less = [row | {key: row[key] * factor} if row["name"] in used else row for row in sites]
        assert mean_step_bound_s(witness | {"sites": less}, made, of_sites.value) is None
    nothing_left = [row | {"flops": 1e30, "slowest_flops": 1e31} for row in sites]
    for change in ({"sites": nothing_left}, {"price": float("nan")}, {"price": "nan"}):
        assert mean_step_bound_s(witness | change, made, of_sites.value) is None
    without = [row for row in sites if row["name"] not in used]
    assert mean_step_bound_s(witness | {"sites": without}, made, of_sites.value) is None


def test_prices_of_more_than_all_devices_prove_nothing() -> None:
    """All devices together must cost no more than 1."""
    cluster, workload = of_types(4, 5, 3, 4)
    higher = next(b for b in mean_bounds(cluster, workload) if "prices" in (b.witness or {}))
    plan = next(
        made
        for groups, split in layouts(5, 3)
        if (made := whole_plan(cluster, workload, groups, split, np.random.default_rng(0)))
    )
    witness = dict(higher.witness or {})
    assert mean_step_bound_s(witness, plan, higher.value) == higher.value
    prices = [[2 * price for price in row] for row in witness["prices"]]
    changes: tuple[dict[str, Any], ...] = (
        {"prices": prices},
        {"prices": [[-price for price in row] for row in witness["prices"]]},
        {"prices": witness["prices"] * 2},
        {"devices": [row | {"type": 0} for row in witness["devices"]]},
        {"devices": [row | {"type": -1} for row in witness["devices"]]},
        {"kind": "mean of nothing"},
        {"prices": [[float("nan")] * len(row) for row in witness["prices"]]},
        {"prices": [["nan"] * len(row) for row in witness["prices"]]},
        {"devices": [*witness["devices"], witness["devices"][0] | {"count": -1}]},
    )
    for change in changes:
        proven = mean_step_bound_s(witness | change, plan, higher.value)
        assert proven is None or proven < higher.value
