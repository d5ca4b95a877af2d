"""Models whose layers differ: planned, checked, kept in memory, refused where they are run."""

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
    """Two layers with a narrow feed-forward part, four with experts."""
    fields: dict[str, Any] = {
        "qk_norm": True,
        "experts": Experts(16, 4, 64, dense_layers=(0, 1)),
    }
    arch = Architecture(Family.LLAMA, LAYERS, 64, 4, 2, 64, 61, 32, **fields | changes)
    return Workload.transformer("sparse", arch, batch_samples=8, precision="fp32")


def equal_devices(n: int, workload: Workload, share: float = 1.0) -> pl.Cluster:
    """All alike; memory: that share of the whole model and its activations."""
    whole = stage_costs(workload, 0, LAYERS, with_head=True)
    return pl.Cluster(random_network(n), pl.Devices(1e10, whole.need_bytes(8) * share))


def made(cluster: pl.Cluster, workload: Workload, **fields: Any) -> TrainingPlan:
    """A plan that the checker has nothing against."""
    found = pl.plan(cluster, workload, stop=pl.MaxIterations(20), **fields).plan
    assert found is not None
    assert pl.check(found, cluster) == []
    return found


def test_layers_of_equal_devices_follow_their_work() -> None:
    """The slowest stage is the fastest of all splits; by number it would not be."""
    work = sparse_model()
    cluster = equal_devices(2, work)
    assert not is_uniform(cluster, work)
    assert is_uniform(cluster, sparse_model(experts=None))
    plan = made(cluster, work, stages=2)

    def slowest(cuts: tuple[int, ...]) -> float:
        parts = list(pairwise((0, *cuts, LAYERS)))
        return max(stage_costs(work, a, b, with_head=b == LAYERS).busy_s(1e10) for a, b in parts)

    best = min(combinations(range(1, LAYERS), 1), key=slowest)
    assert plan.stage_layers == ((0, *best), (*best, LAYERS))
    assert plan.stage_layers != work.even_split(2)


@pytest.mark.parametrize(
    "fields", [{"stages": 3}, {"wiring": "flow"}, {"stages": 3, "path_stages": 2}, {}]
)
def test_plans_of_unlike_layers(fields: dict[str, Any], tmp_path: Path) -> None:
    """Straight, flow, skipping, and all left open: checked, bounded, written and read."""
    work = sparse_model()
    cluster = equal_devices(6, work, 0.6)
    plan = made(cluster, work, **fields)
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
            recompute=bool(plan.recompute) and plan.recompute[j],
        )
        have = [
            cluster.memory_bytes[cluster.network.ids.index(plan.cluster.network.ids[d])]
            for d in plan.assignment.groups[j]
        ]
        assert costs.need_bytes(1) <= min(have)


def test_all_experts_take_memory_and_are_averaged() -> None:
    """What is computed is the routed share; what is stored and sent is everything."""
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
    """It takes memory and is averaged there; with the embedding on the same stage there is one."""
    work = sparse_model(tied=True)
    matrix = 61 * 64
    assert work.tied_parameters == matrix
    assert work.parameters == sparse_model().parameters - matrix
    here, there = (stage_costs(work, a, LAYERS, with_head=True) for a in (0, 2))
    bare = stage_costs(work.replace(tied_parameters=0), 2, LAYERS, with_head=True)
    assert there.state_bytes - bare.state_bytes == 16.0 * matrix
    assert there.gradient_bytes - bare.gradient_bytes == 4.0 * matrix
    assert here == stage_costs(work.replace(tied_parameters=0), 0, LAYERS, with_head=True)
    plan = made(equal_devices(6, work, 0.6), work, **fields)
    assert len(plan.stage_layers) > 1
    split, head = plan.stage_layers, plan.head_stage
    copied = sum(work.gradient_bytes(split, head)) / 4.0 - work.parameters
    assert copied == (matrix if head > 0 else 0)


def test_what_cannot_be_run_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, before any process starts."""
    work = sparse_model()
    plan = made(equal_devices(2, work), work, stages=2)
    path = tmp_path / "plan.json"
    pl.save_plan(plan, path)
    assert main(["run", str(path), "--steps", "1"]) == 2
    said = capsys.readouterr().err.strip()
    assert "'sparse' can be planned but not run, the executor does not do this: experts" in said
    assert "\n" not in said


def test_checkpoints_of_older_releases_are_of_the_same_model() -> None:
    """What an architecture got later is not said where it says nothing."""
    from planner.executor.checkpoint.reshard import description

    work = Workload.preset("llama-50m", batch_samples=8)
    plan = made(pl.Cluster(random_network(2), pl.Devices(1e12, 1e11)), work, stages=2)
    assert not {"qk_norm", "experts", "priced_only", "full_layers"} & set(
        description(plan)["model"]
    )
    with_norms = sparse_model(experts=None)
    plan = made(equal_devices(2, with_norms), with_norms, stages=2)
    assert description(plan)["model"]["qk_norm"] is True


def test_a_plan_says_what_its_model_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is stored and what a token meets; why it is to plan only."""
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
