"""A plan for a subset of a cluster's devices, checked against the whole cluster."""

from __future__ import annotations

import pytest

import planner as pl
from planner.network.cluster import Cluster, Devices
from planner.training_plan.file import from_dict
from planner.training_plan.model import TrainingPlan
from tests.conftest import tiny_workload
from tests.network.test_subset import cluster_with_a_fast_pair


def plan_of(cluster: Cluster, names: str, left_out: str) -> TrainingPlan:
    """Stages of one device each, the others left out."""
    made = pl.plan(
        cluster.subset(list(names)),
        tiny_workload(),
        stages=len(names),
        stop=pl.MaxIterations(3),
    ).plan
    assert made is not None
    return made.replace(left_out=tuple(left_out))


def rules(plan: TrainingPlan, cluster: Cluster) -> set[str]:
    """The rules that the plan breaks on the whole cluster."""
    return {v.rule for v in pl.check(plan, cluster)}


@pytest.mark.parametrize("names", ["abc", "bc", "ad", "cab"])
def test_plans_of_a_subset_pass(names: str) -> None:
    """Also if the fastest link of a device leads to one that is left out."""
    whole = cluster_with_a_fast_pair()
    plan = plan_of(whole, names, "".join(sorted(set("abcd") - set(names))))
    assert pl.check(plan, whole) == []
    again = from_dict(plan.to_dict())
    assert again.left_out == plan.left_out
    assert pl.check(again, whole) == []


def test_default_limits_are_those_of_the_whole_cluster() -> None:
    """Without d the limit of a would be lower; stating it is valid, another value is not."""
    whole = cluster_with_a_fast_pair()
    plan = plan_of(whole, "abc", "d")
    guessed = Cluster(plan.cluster.network, Devices(1e9, 8e9))
    found = {v.where for v in pl.check(plan.replace(cluster=guessed), whole)}
    assert {"devices.upload_bytes_per_s", "devices.download_bytes_per_s"} <= found
    stated = plan_of(whole, "bc", "ad")
    same = Devices(1e9, 8e9, upload_bytes_per_s=2e6, download_bytes_per_s=2e6)
    stated = stated.replace(cluster=stated.cluster.replace(devices=same))
    assert "devices" not in rules(stated, whole)
    more = stated.cluster.replace(devices=Devices(1e9, 8e9, upload_bytes_per_s=3e6))
    assert "devices" in rules(stated.replace(cluster=more), whole)


def test_left_out_devices_must_be_listed() -> None:
    """All left-out devices are listed, no others, and no unknown ones."""
    whole = cluster_with_a_fast_pair()
    plan = plan_of(whole, "abc", "d")
    for names in ((), ("e",), ("d", "e")):
        assert rules(plan.replace(left_out=names), whole) == {"left out"}
    assert rules(plan, plan.cluster) == {"left out"}
    assert rules(plan.replace(left_out=("a",)), whole) == {"form"}
    assert plan.replace(left_out=()).content_hash != plan.content_hash


def test_links_must_be_the_same() -> None:
    """A cluster of other names or measurements is another network."""
    whole = cluster_with_a_fast_pair()
    plan = plan_of(whole, "abc", "d")
    faster = whole.network.replace(bandwidth_bytes_per_s=2 * whole.network.bandwidth_bytes_per_s)
    assert "network" in rules(plan, whole.replace(network=faster))
    assert "network" in rules(plan, whole.replace(network=whole.network.replace(ids=list("wxyz"))))
