"""Hierarchical averaging for devices that share a site's link."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import planner as pl
from planner.checker.joint_bound import whole_step_bound_s
from planner.planning.averaging.hierarchical import has_hierarchy, hierarchical_rounds
from planner.planning.averaging.stage_averaging import averaging_rounds
from planner.planning.joint.device_classes import DeviceClasses
from planner.planning.joint.layout_averaging import averaging_s
from planner.planning.joint.layout_search import LayoutSearch
from planner.simulator.averaging_rounds import rounds_s
from planner.simulator.resources import LinkResources
from planner.simulator.round_traffic import RoundTraffic
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Codec
from tests.conftest import tiny_workload
from tests.planning.test_layouts import model

pytestmark = pytest.mark.interpreted


def nodes(sizes: list[int], *, line: float = 1e7, inside: float = 1e9, **more: Any) -> pl.Cluster:
    """Machines with several devices that share a link."""
    node = np.repeat(np.arange(len(sizes)), sizes)
    same = node[:, None] == node
    network = pl.Network(np.where(same, 1e-5, 1e-3), np.where(same, inside, line))
    lines = {f"node {k}": line for k in range(len(sizes))}
    fields: dict[str, Any] = {
        "sites": [f"node {k}" for k in node],
        "site_upload_bytes_per_s": lines,
        "site_download_bytes_per_s": lines,
    }
    return pl.Cluster(network, pl.Devices(1e11, 16e9, **(fields | more)))


def test_shared_link_carries_one_vector_each_way() -> None:
    """Four machines of four: 2 x 3/4 of the vector instead of 2 x 4 x 12/16."""
    cluster = nodes([4, 4, 4, 4])
    links, vector = LinkResources.of(cluster), 1e8
    rounds = averaging_rounds(cluster, range(16), "adaptive", None, vector, hierarchical=True)
    assert [group.phase for group, *_ in rounds] == ["reduce", "exchange", "spread"]
    crossing = sum(RoundTraffic.of(g, vector).sent()[0] for g in rounds[1])
    assert crossing == pytest.approx(1.5 * vector, rel=1e-9)
    within = 2 * (4 - 1) / 4 * vector / 1e9
    alone = ((AveragingGroup.equal(tuple(range(16))),),)
    assert rounds_s(alone, vector, links) == pytest.approx(6 * vector / 1e7, rel=1e-3)
    assert rounds_s(rounds, vector, links) == pytest.approx(1.5 * vector / 1e7 + within, rel=1e-3)


def test_cases_without_hierarchy() -> None:
    """No shared links, one site, one device per site, no aggregator, or another request."""
    cluster = nodes([2, 2, 1])
    bare = cluster.replace(devices=pl.Devices(1e11, 16e9))
    assert has_hierarchy(cluster) and not has_hierarchy(bare)
    assert not has_hierarchy(nodes([1, 1, 1]))
    assert hierarchical_rounds(bare, range(5)) == []
    assert hierarchical_rounds(cluster, (0, 1)) == []
    assert hierarchical_rounds(cluster, (0, 2, 4)) == []
    mute = nodes([2, 2, 1], can_aggregate=[True, True, False, False, True])
    assert hierarchical_rounds(mute, range(5)) == []
    for fields in ({"averaging": "equal"}, {"group_size": 2}, {"path_stages": 1}):
        assert not pl.PlanRequest(stages=2, **fields).may_be_hierarchical


@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=4).filter(lambda row: sum(row) > 1),
    st.sampled_from([1e6, 1e7, 1e9]),
    st.sampled_from([1e7, 1e9]),
    st.sampled_from(list(Codec)),
    st.sets(st.integers(0, 3)),
)
def test_the_estimate_is_no_less_than_the_rounds(
    row: list[int], line: float, inside: float, codec: Codec, mute: set[int]
) -> None:
    """It is at most that of equal shares in one round."""
    sums = [k // 4 not in mute for k in range(4 * len(row))]
    cluster = nodes([4] * len(row), line=line, inside=inside, can_aggregate=sums)
    classes = DeviceClasses.of(cluster)
    search = LayoutSearch(classes, model())
    wire = codec.wire_ratio
    problem = search.problem
    found = averaging_s(1e7 * wire, 1e7, np.array(row), problem.class_arrays, problem.scratch)
    members = tuple(d for c, k in enumerate(row) for d in classes.members[c][:k])
    links = LinkResources.of(cluster)
    try:
        made = averaging_rounds(cluster, members, "adaptive", None, 1e7, codec, hierarchical=True)
    except pl.ProblemError:
        assert found == np.inf  # nobody can sum
        return
    assert rounds_s(made, 1e7, links, codec) <= found * (1 + 1e-6)
    if not mute:
        equal = ((AveragingGroup.equal(members),),)
        assert found <= rounds_s(equal, 1e7, links, codec) * (1 + 1e-9)


def test_links_of_aggregating_sites() -> None:
    """The first of three machines aggregates alone: its link carries four vectors, others two."""
    cluster = nodes([2, 2, 2], can_aggregate=[True, True, False, False, False, False])
    classes = DeviceClasses.of(cluster)
    search = LayoutSearch(classes, model())
    row = np.array(
        [2 if classes.members[c][0] % 2 == 0 else 0 for c in range(len(classes.members))]
    )
    assert row.sum() == 6
    averaging_s(1e7, 1e7, row, search.problem.class_arrays, search.problem.scratch)
    assert sorted(search.problem.scratch.averaged_bytes) == pytest.approx([2e7, 2e7, 4e7])


def test_plan_with_hierarchical_averaging(tmp_path: Path) -> None:
    """Saved, loaded, checked, with a verified bound; modifications are detected."""
    # with less to compute one machine alone would be faster
    cluster = nodes([3, 2, 2])
    work = tiny_workload(batch_samples=16384, microbatch_samples=512)
    result = pl.plan(cluster, work, stop=pl.MaxIterations(3), stages=1, wiring="flow")
    plan = result.plan
    assert plan is not None and result.bound is not None and result.bound <= result.objective
    assert [len(rounds) for rounds in plan.averaging] == [3]
    path = tmp_path / "plan.json"
    pl.save_plan(plan, path)
    read = pl.load_plan(path)
    assert read.content_hash == plan.content_hash and pl.check(read, cluster) == []
    witness = plan.certificates["step"].witness
    assert witness is not None and witness["levels"] is True
    claimed = plan.certificates["step"].bound
    assert claimed is not None
    assert whole_step_bound_s(witness, plan, claimed) == claimed
    without = {name: value for name, value in witness.items() if name != "levels"}
    assert whole_step_bound_s(without, plan, claimed) is None
    ((reduce, exchange, spread),) = plan.averaging
    first = replace(exchange[0], slice=(0.0, exchange[0].slice[1] / 2))
    wrong = plan.replace(averaging=((reduce, (first, *exchange[1:]), spread),))
    assert any("weight" in str(found) for found in pl.check(wrong, cluster))


@pytest.mark.parametrize("fields", [{"stages": 2}, {"stages": 1, "codec": "int8"}])
def test_straight_plans_with_hierarchical_averaging(fields: dict[str, Any]) -> None:
    """With adaptive shares, whose bound allows devices of a stage to end at different times."""
    cluster, work = nodes([4, 2, 2]), tiny_workload(batch_samples=32)
    result = pl.plan(cluster, work, stop=pl.MaxIterations(3), averaging="adaptive", **fields)
    assert result.plan is not None and pl.check(result.plan, cluster) == []
    assert result.bound is not None and result.bound <= result.objective
