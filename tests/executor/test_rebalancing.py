"""Devices move to where they are needed, and the training stays that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.network.cluster import Cluster, Devices
from planner.training_plan.error import PlanError
from planner.training_plan.file import save_plan
from planner.training_plan.migration import Migration, migrated, require_movable
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import make_plan, tiny_workload
from tests.executor.forks import run_plan
from tests.executor.test_migration import IDS, plan_of, single
from tests.executor.test_train import STEPS, TOLERANCE

torch = pytest.importorskip("torch")


def unbalanced() -> TrainingPlan:
    """One device in the first stage, five in the second, of layers that are alike."""
    plan = plan_of()
    for device in ("2", "4"):
        plan = migrated(plan, Migration(device, 1, 0))
    assert plan.assignment.groups == ((0,), (1, 2, 3, 4, 5))
    return plan


@pytest.mark.parametrize("rule", ["planned", pytest.param("swarm", marks=pytest.mark.slow)])
def test_losses_equal_one_process(rule: str, tmp_path: Path) -> None:
    """Whoever moves; and somebody does."""
    plan, path = unbalanced(), tmp_path / "plan.json"
    save_plan(plan, path)
    options = ("--steps", str(STEPS), "--rebalance", "5", "--rebalance-rule", rule)
    code, events, said = run_plan(path, IDS, *options)
    assert code == 0, said
    losses = {
        e["loss_step" if e["event"] == "step" else "step"]: e["loss"]
        for e in events
        if e["event"] in ("step", "loss")
    }
    np.testing.assert_allclose([losses[t] for t in range(STEPS)], single(plan), rtol=TOLERANCE)
    moves = [e for e in events if e["event"] == "move"]
    # one of five wins twice the rate
    assert moves[0]["steps"] == 5 and moves[0]["stage"] == 0 and not moves[0]["why_not"]
    assert all(e["steps"] in (5, 10, 15) for e in moves)
    if rule == "planned":
        assert all(e["after_per_s"] > e["before_per_s"] for e in moves)


def test_who_has_not_the_memory_stays(tmp_path: Path) -> None:
    """By the plan's figures: the run goes on as it was."""
    plan, path = unbalanced(), tmp_path / "plan.json"
    devices = Devices(plan.cluster.flops, np.array([16e9, 1.0, 1.0, 1.0, 1.0, 1.0]))
    save_plan(plan.replace(cluster=Cluster(plan.cluster.network, devices)), path)
    code, events, said = run_plan(path, IDS, "--steps", "6", "--rebalance", "3")
    assert code == 0, said
    (move,) = (e for e in events if e["event"] == "move")
    assert move["why_not"] == "its memory is too small"
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(6))


def test_a_move_that_cannot_be_is_told_and_the_run_goes_on(tmp_path: Path) -> None:
    """One microbatch cannot go to two devices of a stage; nobody who cannot is asked again."""
    grid = [[0, 1], [2, 3], [4, 5]]
    workload = tiny_workload(batch_samples=3)
    plan = make_plan(grid, workload=workload).replace(wiring="stochastic")
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    options = ("--steps", "8", "--rebalance", "2", "--rebalance-rule", "swarm")
    code, events, said = run_plan(path, IDS, *options)
    assert code == 0, said
    assert [e["step"] for e in events if e["event"] == "step"] == list(range(8))
    moves = [e for e in events if e["event"] == "move"]
    assert moves and all("is on none" in e["why_not"] for e in moves)


@pytest.mark.parametrize(
    ("every", "changes", "message"),
    [
        (0, {}, "--rebalance is 0; give at least 1"),
        (5, {"wiring": "fixed"}, "devices move where microbatches are routed, found wiring fixed"),
        (5, {"sync": Sync(2)}, "found averaging every 2 steps; give a multiple of it"),
        (5, {"sync": Sync(1, OuterOptimizer(), delayed=True)}, "that is not delayed"),
    ],
)
def test_plans_whose_devices_stay(every: int, changes: dict[str, Any], message: str) -> None:
    """One line each."""
    with pytest.raises(PlanError) as caught:
        require_movable(plan_of().replace(**changes), every)
    assert message in str(caught.value) and "\n" not in str(caught.value)
