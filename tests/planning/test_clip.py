"""Gradient clipping in plans of every kind: stored, predicted and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.problems import ProblemError
from planner.simulator.simulator import predict
from planner.training_plan.error import PlanError
from planner.training_plan.sync import Sync
from planner.training_plan.validation import contradictions
from tests.conftest import make_plan, random_network, tiny_workload

KINDS: dict[str, dict[str, Any]] = {
    "straight": {"stages": 2},
    "open": {},
    "flow of two stages": {"stages": 2, "wiring": "flow"},
    "skipping": {"stage_sizes": (2, 2, 2), "path_stages": 2, "full_every": 3},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_plan_clips(kind: str, tmp_path: Path) -> None:
    """Saved and loaded, checked, and no faster than its arithmetic allows."""
    cluster = pl.Cluster(random_network(6, 3), pl.Devices(1e9, 16e9))
    work = tiny_workload(batch_samples=96)
    made = pl.plan(cluster, work, clip=0.5, stop=pl.MaxIterations(2), **KINDS[kind])
    plan = made.plan
    assert plan.clip == 0.5
    assert pl.check(plan, cluster) == []
    pl.save_plan(plan, tmp_path / "plan.json")
    again = pl.load_plan(tmp_path / "plan.json")
    assert again.clip == 0.5 and again.content_hash == plan.content_hash
    assert made.bound is None or made.bound <= plan.predicted.step_s
    free = plan.replace(clip=None)
    assert plan.content_hash != free.content_hash
    waits = len(plan.stage_layers) > 1
    assert predict(free).step_s < plan.predicted.step_s if waits else predict(free).step_s > 0


def test_invalid_clips() -> None:
    """One line; also if some steps do not average."""
    cluster = pl.Cluster(random_network(2), pl.Devices(1e9, 16e9))
    for clip in (0, -1, "much"):
        with pytest.raises(ProblemError, match="clip is"):
            pl.plan(cluster, tiny_workload(), clip=clip, stop=pl.MaxIterations(1))
        with pytest.raises(PlanError, match="clip is"):
            make_plan([[0, 1]]).replace(clip=clip)
    rare = make_plan([[0, 1]], clip=1.0).replace(sync=Sync(every_steps=4))
    assert [p for p in contradictions(rare) if p.startswith("averaging.clip: the norm is known")]
    assert "clip" not in make_plan([[0, 1]]).to_dict()["averaging"]
