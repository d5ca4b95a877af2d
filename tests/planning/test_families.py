"""Models with different layers: plans, checks, memory, and rejection by the executor."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.cli.main import main
from planner.planning.layer_split import is_uniform
from planner.training_plan.model import TrainingPlan
from planner.workload.costs import stage_costs
from planner.workload.experts import Experts
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import random_network
from tests.workload.published_configs import PUBLISHED

LAYERS = 6


def sparse_model(**changes: Any) -> Workload:
    """Two dense layers and four with experts."""
    fields: dict[str, Any] = {
        "qk_norm": True,
        "experts": Experts(16, 4, 64, dense_layers=(0, 1)),
    }
    arch = Architecture(Family.LLAMA, LAYERS, 64, 4, 2, 64, 61, 32, **fields | changes)
    return Workload.transformer("sparse", arch, batch_samples=8, precision="fp32")


def equal_devices(n: int, workload: Workload, share: float = 1.0) -> pl.Cluster:
    """Equal devices; memory as a fraction of the whole model and its activations."""
    whole = stage_costs(workload, 0, LAYERS, with_head=True)
    return pl.Cluster(random_network(n), pl.Devices(1e10, whole.need_bytes(8) * share))


def checked_plan(cluster: pl.Cluster, workload: Workload, **fields: Any) -> TrainingPlan:
    """Return a plan that passes the checker."""
    found = pl.plan(cluster, workload, stop=pl.MaxIterations(20), **fields).plan
    assert found is not None
    assert pl.check(found, cluster) == []
    return found


def test_layers_are_balanced_by_work() -> None:
    """The slowest stage is optimal over all splits; an equal number of layers is not."""
    work = sparse_model()
    cluster = equal_devices(2, work)
    assert not is_uniform(cluster, work)
    assert is_uniform(cluster, sparse_model(experts=None))
    plan = checked_plan(cluster, work, stages=2)

    def slowest(cuts: tuple[int, ...]) -> float:
        parts = list(pairwise((0, *cuts, LAYERS)))
        return max(stage_costs(work, a, b, with_head=b == LAYERS).busy_s(1e10) for a, b in parts)

    best = min(combinations(range(1, LAYERS), 1), key=slowest)
    assert plan.stage_layers == ((0, *best), (*best, LAYERS))
    assert plan.stage_layers != work.even_split(2)


@pytest.mark.parametrize(
    "fields", [{"stages": 3}, {"wiring": "flow"}, {"stages": 3, "path_stages": 2}, {}]
)
def test_plans_of_different_layers(fields: dict[str, Any], tmp_path: Path) -> None:
    """Straight, flow, skipping and unconstrained plans: checked, bounded, saved and loaded."""
    work = sparse_model()
    cluster = equal_devices(6, work, 0.6)
    plan = checked_plan(cluster, work, **fields)
    bound, step_s = plan.certificates["step"].bound, plan.predicted.step_s
    assert bound is None or bound <= step_s * (1 + 1e-9)
    path = tmp_path / "plan.json"
    pl.save_plan(plan, path)
    again = pl.load_plan(path)
    assert again.workload == work
    assert again.content_hash == plan.content_hash
    for j, part in enumerate(plan.stage_layers):
        costs = stage_costs(
            work,
            *part,
            with_head=j == plan.head_stage,
            recomputed=plan.recompute[j],
        )
        have = [
            cluster.memory_bytes[cluster.network.ids.index(plan.cluster.network.ids[d])]
            for d in plan.assignment.groups[j]
        ]
        assert costs.need_bytes(1) <= min(have)


def test_all_experts_take_memory_and_are_averaged() -> None:
    """Only routed experts compute; all are stored and averaged."""
    few, many = (
        sparse_model(experts=Experts(count, 4, 64, dense_layers=(0, 1))) for count in (16, 32)
    )
    more = 16 * 3 * 64 * 64
    costs = [stage_costs(work, 2, 3) for work in (few, many)]
    router = 64 * 16
    assert costs[1].gradient_bytes - costs[0].gradient_bytes == 4.0 * (more + router)
    assert costs[1].state_bytes - costs[0].state_bytes == 16.0 * (more + router)
    assert costs[1].forward_flops - costs[0].forward_flops == 2.0 * 32 * router


@pytest.mark.parametrize("fields", [{"stages": 3}, {"stages": 3, "head": "first"}, {}])
def test_a_tied_head_elsewhere_has_a_copy(fields: dict[str, Any]) -> None:
    """It needs memory and is averaged, unless the embedding is on the same stage."""
    work = sparse_model(tied=True)
    matrix = 61 * 64
    assert work.tied_parameters == matrix
    assert work.parameters == sparse_model().parameters - matrix
    here, there = (stage_costs(work, a, LAYERS, with_head=True) for a in (0, 2))
    bare = stage_costs(work.replace(tied_parameters=0), 2, LAYERS, with_head=True)
    assert there.state_bytes - bare.state_bytes == 16.0 * matrix
    assert there.gradient_bytes - bare.gradient_bytes == 4.0 * matrix
    assert here == stage_costs(work.replace(tied_parameters=0), 0, LAYERS, with_head=True)
    plan = checked_plan(equal_devices(6, work, 0.6), work, **fields)
    assert len(plan.stage_layers) > 1
    split, head = plan.stage_layers, plan.head_stage
    copied = sum(work.gradient_bytes(split, head)) / 4.0 - work.parameters
    assert copied == (matrix if head > 0 else 0)


def test_unsupported_models_are_rejected_before_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, before any process starts."""
    work = sparse_model()
    plan = checked_plan(equal_devices(2, work), work, stages=2)
    path = tmp_path / "plan.json"
    pl.save_plan(plan, path)
    assert main(["run", str(path), "--steps", "1"]) == 2
    said = capsys.readouterr().err.strip()
    assert "'sparse' can be planned but not run, the executor does not do this: experts" in said
    assert "\n" not in said


def test_checkpoints_of_older_releases_are_of_the_same_model() -> None:
    """New fields of the architecture are omitted at their default."""
    from planner.executor.checkpoint.reshard import description

    work = Workload.preset("llama-50m", batch_samples=8)
    plan = checked_plan(pl.Cluster(random_network(2), pl.Devices(1e12, 1e11)), work, stages=2)
    assert not {"qk_norm", "experts", "priced_only", "full_layers"} & set(
        description(plan)["model"]
    )
    with_norms = sparse_model(experts=None)
    plan = checked_plan(equal_devices(2, with_norms), with_norms, stages=2)
    assert description(plan)["model"]["qk_norm"] is True


def test_plan_describes_its_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Stored and active parameters, and why it is for planning only."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED["mistralai/Mixtral-8x7B-v0.1"].config))
    words = ["plan", "--network", "aws8_dtfm_worldwide_2022", "--gpu", "H200", "--stages", "8"]
    words += ["--workload", str(path), "--sequence", "1024", "--batch-samples", "8"]
    words += ["--recompute", "all", "--effort", "1", "--no-pictures", "--no-compare"]
    assert main([*words, "--out", str(tmp_path / "plan.json")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "46.7 billion parameters are stored and averaged; a token uses 12.88 billion" in said
    assert "has a copy of the embedding" not in said
    assert "For planning only; the executor does not support: experts" in said
