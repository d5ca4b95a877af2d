"""No change of a witness makes the checker confirm a bound that the plan itself refutes."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import planner as pl
from planner.checker.plan_bounds import recomputed_bound
from planner.training_plan.model import MEAN_STEP, TrainingPlan

REQUESTS: dict[str, dict[str, Any]] = {
    "joint": {},
    "two frequencies": {"sync_every": 5, "within": "region"},
    "every 5 steps": {"sync_every": 5},
    "recompute": {"recompute": "all"},
    "cost": {"objective": "cost"},
    "straight": {"stages": 4},
    "partial paths": {"stages": 4, "path_stages": 3},
}
SLOW = ("two frequencies", "every 5 steps", "recompute")
"""Kinds whose witnesses have the fields of the joint search's."""
VALUES: tuple[Any, ...] = (
    *(-1, 0, 1, 2, 3, 10**6, -1.0, 0.0, 1e-300, 1e-9, 0.5, 1.5, 1e12, 1e300),
    *(math.nan, math.inf, -math.inf, True, False, None, "", "x", [], {}),
)
PROVABLE = 0.97
"""Fraction of the objective that no witness proves, where the honest one leaves a wide gap."""


@pytest.fixture(autouse=True, scope="module")
def _no_bisection() -> Iterator[None]:
    """Whether a witness proves the stored bound does not depend on how much less it proves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("planner.checker.joint_bound.BISECTIONS", 0)
        yield


@cache
def planned(name: str) -> TrainingPlan:
    network = pl.load_network("aws8_dtfm_worldwide_2022")
    cluster = pl.Cluster(
        network.replicate(
            dict.fromkeys(network.ids[:4], 2),
            intra_latency_s=0.0005,
            intra_bandwidth_bytes_per_s=2.5e8,
        ),
        pl.Devices.of_gpu("A100"),
    )
    workload = pl.Workload.preset("gpt3-1.3b", batch_samples=64)
    return pl.plan(cluster, workload, stop=pl.Effort(0.1), **REQUESTS[name]).plan


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all entries of a witness."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, entry in entries:
        yield (*path, key)
        if isinstance(entry, dict | list):
            yield from places(entry, (*path, key))


def changed(witness: Any, path: tuple[Any, ...], change: Any) -> Any:
    """A copy with one entry changed, scaled or removed."""
    copied = copy.deepcopy(witness)
    entry = copied
    for key in path[:-1]:
        entry = entry[key]
    kind, value = change
    if kind == "set":
        entry[path[-1]] = value
    elif kind == "remove":
        del entry[path[-1]]
    elif isinstance(entry[path[-1]], int | float) and not isinstance(entry[path[-1]], bool):
        entry[path[-1]] *= value
    return copied


CHANGES = st.one_of(
    st.tuples(st.just("set"), st.sampled_from(VALUES)),
    st.tuples(st.just("scale"), st.sampled_from([-1, 2, 0.5, 100, 0.01])),
    st.tuples(st.just("remove"), st.none()),
)


def changed_once_or_twice(witness: Any, data: st.DataObject) -> Any:
    for _ in range(data.draw(st.integers(1, 2))):
        if not (found := list(places(witness))):
            break
        witness = changed(witness, data.draw(st.sampled_from(found)), data.draw(CHANGES))
    return witness


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in REQUESTS],
)
@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_changed_witnesses_prove_nothing_false(name: str, data: st.DataObject) -> None:
    plan = planned(name)
    parts = [part for part, c in plan.certificates.items() if c.witness and c.objective]
    if not parts:
        pytest.skip("no witness")
    part = data.draw(st.sampled_from(parts))
    certificate = plan.certificates[part]
    assert certificate.objective is not None and certificate.bound is not None
    witness = changed_once_or_twice(certificate.witness, data)
    # a bound on the mean may be tight for a plan that uses few devices, whatever others there are
    wide = part != MEAN_STEP and certificate.bound < 0.9 * certificate.objective
    limit = certificate.objective * (PROVABLE if wide else 1 + 1e-6)
    forged = replace(
        certificate, witness=witness, bound=limit, gap=1 - limit / certificate.objective
    )
    parts_of_plan = {**plan.certificates, part: forged}
    proven = recomputed_bound(plan.replace(certificates=parts_of_plan), part)
    assert proven is None or proven < limit
