"""Plans whose microbatches skip stages: how their paths are found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.problems.path_method import PathMethod
from tests.conftest import random_network, tiny_workload

FIELDS: dict[str, Any] = {"stage_sizes": (2, 2, 1, 1), "path_stages": 3, "full_every": 3}


def cluster_of(n: int, seed: int = 0) -> pl.Cluster:
    """Heterogeneous links, equal devices."""
    return pl.Cluster(random_network(n, seed), pl.Devices(1e9, 16e9))


def planned(stop: pl.StoppingCriterion, **changes: Any) -> pl.Result[pl.TrainingPlan]:
    """Six devices, three of four stages a path, every third iteration full."""
    cluster = changes.pop("cluster", None) or cluster_of(6)
    workload = changes.pop("workload", None) or tiny_workload()
    return pl.plan(cluster, workload, stop=stop, **{**FIELDS, **changes})


@pytest.mark.parametrize("method", list(PathMethod))
def test_every_path_method_makes_a_plan(method: PathMethod, tmp_path: Path) -> None:
    """Checked, saved and read again; the certificate names the method."""
    changes: dict[str, Any] = {}
    if method is PathMethod.STRAIGHT:
        changes = {"path_stages": 4, "max_swaps": 0}
    if method is PathMethod.REUSE:
        # two visits a wave to each of three stages
        changes = {"stage_sizes": (3, 1, 1, 1), "in_flight": 2, "full_every": 0}
        changes["workload"] = tiny_workload(batch_samples=12)
    result = planned(pl.MaxIterations(400), path_method=method, **changes)
    assert result.plan is not None and pl.check(result) == []
    assert result.plan.certificates["paths"].method == method
    pl.save_plan(result.plan, tmp_path / "plan.json")
    again = pl.load_plan(tmp_path / "plan.json")
    assert again.content_hash == result.plan.content_hash and pl.check(again) == []


def test_the_papers_search_decides_the_paths() -> None:
    """`cbs` gives the paths that it gives by itself, and the same ones every time."""
    found = [planned(pl.MaxIterations(400), path_method="cbs").plan for _ in range(2)]
    other = planned(pl.MaxIterations(400), path_method="no-tc2").plan
    assert found[0] is not None and found[1] is not None and other is not None
    assert found[0].content_hash == found[1].content_hash
    assert found[0].schedules[0].paths != other.schedules[0].paths


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path_method": "guess"}, "path_method 'guess' is unknown"),
        ({"path_method": "straight"}, "visits all 4 stages, found path_stages 3; take dtfm-skip"),
        ({"path_method": "reuse"}, "method reuse needs live_memory and .* equal waves"),
        (
            {"path_method": "cbs", "path_stages": None, "full_every": None, "stages": 3}
            | {"stage_sizes": None},
            "path_method 'cbs' finds paths that skip stages; give path_stages, or leave it out",
        ),
    ],
)
def test_path_methods_that_do_not_apply(change: dict[str, Any], message: str) -> None:
    """Rule, value, remedy."""
    with pytest.raises(ValueError, match=message):
        planned(pl.MaxIterations(4), **change)


def test_a_method_that_finds_nothing_says_so() -> None:
    """Conflict-based search that is cut off has no paths; more effort is the remedy."""
    with pytest.raises(ValueError, match="'cbs' found none; give it more effort, or take 'auto'"):
        planned(pl.MaxIterations(1), path_method="cbs")
