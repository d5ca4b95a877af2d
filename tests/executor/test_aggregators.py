"""Ranks without a stage: they sum their share, and training is what it is without them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import planner as pl
from planner.planning.averaging.aggregators import on_cluster
from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Codec
from planner.training_plan.model import TrainingPlan
from planner.training_plan.shares import share_ranges
from tests.conftest import make_plan, random_network, tiny_workload
from tests.executor.test_train import execute, expected_gradient, single

pytest.importorskip("torch")


def helped_plan(grid: list[list[int]], aggregators: dict[int, int], share: float) -> TrainingPlan:
    """Around a grid; each helper, by its number among all devices, sums for a stage.

    Members of a stage share the rest unevenly.
    """
    n = len(grid) * len(grid[0]) + len(aggregators)
    index = [d for d in range(n) if d not in aggregators]
    network = random_network(n)
    plan = make_plan(grid, workload=tiny_workload(), network=network.subset(index))
    able = [d not in aggregators for d in range(n)]
    plan = on_cluster(plan, pl.Cluster(network, pl.Devices(1e12, 16e9, can_compute=able)), index)
    averaging = list(plan.averaging)
    for d, j in aggregators.items():
        members = plan.assignment.groups[j]
        rest = np.arange(1.0, len(members) + 1)
        rest *= (1 - share) / rest.sum()
        flags = (*(True for _ in members), False)
        group = AveragingGroup((*members, d), (*rest.tolist(), share), flags, flags)
        averaging[j] = ((group,),)
    return plan.replace(averaging=tuple(averaging))


def summed(plan: TrainingPlan, aggregator: int, length: int) -> slice:
    """The part of the vector that the helper sums."""
    group = plan.averaging[plan.averages_for[aggregator]][0][0]
    return slice(*share_ranges(length, group.shares)[group.members.index(aggregator)])


CASES = {
    "data parallel": ([[0], [1]], {1: 0}, 0.5),
    "all of it, on rank 0": ([[0], [1], [2]], {0: 0}, 1.0),
    "one for each of two stages": ([[0, 3], [2, 1]], {2: 1, 5: 0}, 0.4),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.startswith("one") else pytest.mark.slow)
        for case in CASES
    ],
)
def test_training_with_helpers_is_training_without(case: str, tmp_path: Path) -> None:
    """Losses of a single process within 1e-6, and helpers have the sums of their share alone."""
    plan = helped_plan(*CASES[case])
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=1e-6)
    for d, j in plan.stage_of.items():
        want = expected_gradient(plan, d, gradients["first"])
        np.testing.assert_allclose(ranks[d]["first"], want, atol=1e-5 * np.abs(want).max(), rtol=0)
        peer = ranks[plan.assignment.groups[j][0]]
        assert ranks[d]["last"].tobytes() == peer["last"].tobytes()
    for d, j in plan.averages_for.items():
        trained = ranks[plan.assignment.groups[j][0]]["last"]
        own, part = ranks[d]["last"], summed(plan, d, len(trained))
        assert own[part].any() and own[part].tobytes() == trained[part].tobytes()
        rest = np.ones(len(own), dtype=bool)
        rest[part] = False
        assert len(own) == len(trained) and not own[rest].any()
        assert not ranks[d]["given"].any()


def test_a_tied_matrix_counts_once() -> None:
    """The helper's vector is as long as those of the devices that it sums for."""
    import torch

    from planner.executor.runtime.aggregator import Aggregator
    from planner.executor.runtime.model_stage import ModelStage
    from planner.executor.runtime.optimizer import OptimizerConfig

    plan = helped_plan([[0], [1]], {2: 0}, 0.5)
    arch = plan.workload.architecture
    assert arch is not None
    work = pl.Workload.transformer(
        "tied", replace(arch, tied=True), batch_samples=8, precision="fp32"
    )
    tied = plan.replace(workload=work)
    model_stage = ModelStage(tied, 0, torch.device("cpu"), OptimizerConfig())
    assert len(Aggregator(tied, 2).gradients.current) == len(model_stage.gradients.current)


def test_a_helper_with_the_codec(tmp_path: Path) -> None:
    """All agree bit for bit, the helper on its share."""
    plan = helped_plan([[0], [1]], {2: 0}, 0.6).replace(codec=Codec.INT8)
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, _ = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=0.02)
    part = summed(plan, 2, len(ranks[0]["last"]))
    assert ranks[0]["last"].tobytes() == ranks[1]["last"].tobytes()
    assert ranks[2]["last"][part].tobytes() == ranks[0]["last"][part].tobytes()


def test_a_helper_takes_no_microbatch_at_own_pace(tmp_path: Path) -> None:
    """The others complete the batch."""
    plan = helped_plan([[0], [1]], {2: 0}, 0.5)
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids), chunking="own")
    losses, _ = single(plan)
    assert (ranks[0]["given"] + ranks[1]["given"] == 8).all() and not ranks[2]["given"].any()
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=1e-5)
