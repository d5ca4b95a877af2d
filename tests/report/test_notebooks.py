"""Text and HTML representations of objects: short, escaped and correct."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import planner as pl
from planner.network.html_repr import MAX_REGIONS
from planner.problems.answers import PathOp
from planner.simulator.bars_svg import LABEL, WIDTH, bars_svg
from planner.simulator.timeline import COLOURS, NAMES, Op, Timeline
from planner.utils.text import counted, quantity, quantity_range, stage_words
from tests.conftest import make_plan, random_network, regional_network
from tests.report.test_report import EVIL, Reader, plan_with_html_in_names


def large() -> dict[str, Any]:
    """Objects whose default representation would have thousands of characters."""
    network = regional_network((8, 8, 8, 8))
    n = len(network)
    grid = np.arange(n).reshape(8, 4).tolist()
    plan = make_plan(grid, network=network, workload=pl.Workload.preset("gpt2-small"))
    paths = tuple((d,) for d in range(n))
    ops = tuple(PathOp(d, d, "F", 0.0, 1.0) for d in range(n))
    path_plan = pl.PathPlan(paths, ops)
    assigned = pl.AssignmentPlan.of_grid(np.arange(n).reshape(8, 4))
    rule = {"kind": "long", "numbers": list(range(1000))}
    certificate = pl.Certificate("m", pl.Status.FEASIBLE, 1.0, 0.5, 0.5, "s", 0.0, 0, "", rule)
    point = pl.FrontPoint(
        pl.Result.of(plan, 1.0, None, runtime_s=0.0, stop_reason="test", seed=0, method="test"),
        pl.PlanRequest(),
    )
    things = [
        network,
        plan.cluster,
        plan.cluster.devices,
        plan.workload,
        plan,
        plan.schedules[0],
        plan.averaging[0][0][0],
        plan.compute_times,
        pl.simulate(plan),
        certificate,
        point.result,
        assigned,
        path_plan,
        pl.ArrangedPathPlan(assigned.groups, path_plan),
        pl.AveragingPlan(np.ones(n, dtype=bool), np.ones(n), 1.0, np.ones(n)),
        pl.AssignmentProblem(network, 4, 8, 1e6, 1e8),
        pl.AveragingProblem(np.ones(n), 1e7, 1e7, 8, 1e8),
        pl.PathProblem(network.transfer_s(1e6), assigned.groups, 1.0, 2.0, 1.0, 2, 9, 2),
        pl.ArrangedPathProblem(network.transfer_s(1e6), (8,) * 4, 1.0, 2.0, 1.0, 2, 9, 2),
        pl.PlanRequest(stages=4, stage_layers=[(k, k + 1) for k in range(40)][:4]),
        pl.Prices(rules=(("a", "b", 0.1),) * 50),
        pl.GPUS["A100"],
        pl.Calibration("2026-11-23", {}, "gpt2-small", 1, *_measured(n), 0.1, 1e9),
    ]
    return {f"{k}-{type(one).__name__}": one for k, one in enumerate(things)}


def _measured(n: int) -> tuple[dict[str, dict[str, float]], dict[str, tuple[int, int]]]:
    fields = ("forward_s", "backward_s", "head_s", "update_s")
    return {str(d): dict.fromkeys(fields, 1.0) for d in range(n)}, {
        str(d): (0, 1) for d in range(n)
    }


LARGE = large()


@pytest.mark.parametrize("what", LARGE)
def test_repr_is_one_short_line(what: str) -> None:
    """It starts with the type."""
    one = LARGE[what]
    assert repr(one).startswith(f"{type(one).__name__}(")
    assert len(repr(one)) < 260
    assert "\n" not in repr(one)


def test_repr_has_shape_and_units() -> None:
    """Main properties of each object."""
    network = pl.load_network("aws8_dtfm_worldwide_2022")
    twice = network.replicate(
        dict.fromkeys(network.ids, 2), intra_latency_s=0.005, intra_bandwidth_bytes_per_s=2.5e8
    )
    assert repr(twice) == "Network(16 devices in 8 regions, 5 to 238 ms, 335 Mb/s to 2 Gb/s)"
    assert repr(
        pl.Devices([1e12, 2e12], 16e9, upload_bytes_per_s=1e6, can_compute=[True, False])
    ) == ("Devices(1 to 2 TFLOP/s, 16 GB, upload 8 Mb/s, 1 cannot compute)")
    assert repr(pl.Devices(["fast", "slow"], 16e9)) == "Devices(not valid yet)"
    assert repr(pl.PlanRequest(stages=4, clip=1)) == "PlanRequest(stages=4, clip=1.0)"
    hole = np.array([[0, np.nan], [0.1, 0]])
    assert "1 missing pair)" in repr(pl.Network(hole, np.ones((2, 2))))


def test_formatting_of_numbers() -> None:
    """SI prefixes; consecutive equal sizes are merged."""
    assert quantity(0.00025, "s") == "250 µs"
    assert quantity(3600, "s") == "3600 s"
    assert quantity(1.25e9, "B/s") == "1.25 GB/s"
    assert quantity(0.0, "B") == "0 B"
    assert quantity_range([0.001, np.inf, 0.2], "s") == "1 to 200 ms"
    assert quantity_range([0.5, 3], "s") == "500 ms to 3 s"
    assert quantity_range([], "s") == "none"
    assert counted(1, "path") == "1 path" and counted(2, "microbatch") == "2 microbatches"
    assert stage_words([4, 4, 2]) == "3 stages of 2 x 4, 2"
    assert stage_words([8] * 4) == "4 stages of 8"


def test_html_is_balanced_and_escaped() -> None:
    """Plan, network, cluster, workload, timeline and result."""
    plan = plan_with_html_in_names()
    result = pl.Result.of(plan, 1.0, 0.5, runtime_s=0.0, stop_reason="<b>", seed=0, method="test")
    named = plan.workload.replace(name=f"<b>{EVIL}")
    for one in (plan, plan.cluster.network, plan.cluster, named, pl.simulate(plan), result):
        page = one._repr_html_()
        reader = Reader()
        reader.feed(page)
        reader.close()
        assert reader.open == [] and reader.fetched == 0
        assert "<b>" not in page and "script" not in reader.tags
        assert "東京" in reader.text


def test_plan_shows_stages_and_step_time() -> None:
    """Values of the plan."""
    plan = make_plan([[0, 1], [2, 3]])
    page = plan._repr_html_()
    assert f"{plan.predicted.step_s:.4g} s" in page
    assert "<td>0, 2</td>" in page and "<td>1, 3</td>" in page


def test_cluster_and_workload_merge_equal_rows() -> None:
    """One row per kind of device and region, one per group of equal layers."""
    plan = make_plan([[0, 1], [2, 3]])
    cluster = pl.Cluster(plan.cluster.network, pl.Devices([1e12, 1e12, 2e12, 2e12], 16e9))
    page = cluster._repr_html_()
    assert page.count("16 GB") == 4 and "2 TFLOP/s" in page
    many = pl.Cluster(random_network(50), pl.Devices(1e12, 16e9))._repr_html_()
    assert "40 of 50 kinds" in many
    page = pl.Workload.preset("gpt3-1.3b")._repr_html_()
    assert "layers 0 to 23" in page and page.count("<tr>") == 4


def test_network_shows_means_between_regions() -> None:
    """At most ten of more than twelve regions; the omission is stated."""
    network = pl.Network(
        [[0, 0.1, 0.3], [0.1, 0, 0.2], [0.5, 0.2, 0]], np.full((3, 3), 1e9 / 8), regions="aab"
    )
    page = network._repr_html_()
    assert "<td>a (2)</td><td>100\u00a0/\u00a01</td><td>250\u00a0/\u00a01</td>" in page
    many = random_network(MAX_REGIONS + 5)._repr_html_()
    assert f"{MAX_REGIONS} of {MAX_REGIONS + 5} regions" in many
    assert many.count("<tr>") == MAX_REGIONS + 1
    lost = pl.Network([[0, np.nan], [0.1, 0]], [[0, np.nan], [1e9, 0]])
    assert "not measured" in lost._repr_html_()


def test_timeline_is_drawn_to_scale() -> None:
    """A pixel shows its most frequent operation; the size does not depend on their number."""
    bars = [("F", 0.0, 1.0), ("B", 2.0, 4.0)]
    page = bars_svg(["a"], [bars], COLOURS, NAMES)
    forward, backward = re.findall(r'stroke="(#\w+)" d="M(\d+) 7h(\d+)"', page)
    assert forward == (COLOURS["F"], str(LABEL), str(WIDTH // 4))
    assert backward == (COLOURS["B"], str(LABEL + WIDTH // 2), str(WIDTH // 2))
    assert bars_svg(["a"], [[]], COLOURS, NAMES) == ""
    many = tuple(Op(k, 0, "FB"[k % 2], k / 10, (k + 1) / 10) for k in range(200_000))
    timeline = Timeline(tuple(map(str, range(50))), many)
    assert len(timeline._repr_html_()) < 30_000
    assert "32 of 50 devices" in timeline._repr_html_()
