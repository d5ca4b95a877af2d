"""A device goes to another stage between two steps, and the training stays that of one process."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Phase
from planner.training_plan.error import PlanError
from planner.training_plan.file import save_plan
from planner.training_plan.migration import Migration, migrated
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.training_plan.validation import contradictions
from tests.conftest import make_plan, tiny_workload
from tests.executor.test_train import SETTINGS, STEPS, TOLERANCE

torch = pytest.importorskip("torch")

from tests.executor.checkpoints import latest_step, read_shard  # noqa: E402
from tests.executor.forks import losses_in, run_ranks  # noqa: E402

GRID = [[0, 1], [2, 3], [4, 5]]
DELAYED = Sync(1, OuterOptimizer(), delayed=True)
IDS = ("0", "1", "2", "3", "4", "5")


def plan_of(grid: list[list[int]] = GRID, head: str = "last") -> TrainingPlan:
    """Devices that choose."""
    workload = tiny_workload(batch_samples=12)
    return make_plan(grid, head=head, workload=workload).replace(wiring="stochastic")


def single(plan: TrainingPlan, **settings: Any) -> list[float]:
    """Losses of one process."""
    from planner.executor.runtime.optimizer import OptimizerConfig
    from tests.executor.reference import train_single

    torch.set_num_threads(1)
    fixed = plan.replace(wiring="fixed")
    steps = train_single(fixed, STEPS, OptimizerConfig(**settings))
    return [loss for loss, _ in islice(steps, STEPS)]


CASES: dict[str, tuple[list[list[int]], str, list[Migration]]] = {
    "to the last stage": (GRID, "last", [Migration("4", 1, 7)]),
    "to the first stage and back": (GRID, "last", [Migration("3", 0, 5), Migration("3", 1, 12)]),
    "three stages, head first": (
        [[0, 3, 4], [2, 1, 5]],
        "first",
        [Migration("2", 1, 4), Migration("1", 2, 9), Migration("5", 0, 15)],
    ),
}


def events_with_moves(path: Path, moves: list[Migration], *more: str) -> list[dict[str, Any]]:
    """What ranks tell that decide to make these moves."""
    given = json.dumps([asdict(move) for move in moves])
    module = "tests.executor.moving_rank"
    words = [given, str(path), "--devices", *IDS, "--device", "cpu", "--events", *more]
    done = run_ranks(len(IDS), module, *words)
    assert done.code == 0, done.error
    return [json.loads(line) for line in done.out.splitlines()]


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c == "to the last stage" else pytest.mark.slow) for c in CASES],
)
def test_losses_equal_one_process(case: str, tmp_path: Path) -> None:
    """AdamW with a schedule: parameters and moments come along, each sample counts once."""
    grid, head, moves = CASES[case]
    plan, path = plan_of(grid, head), tmp_path / "plan.json"
    save_plan(plan, path)
    rates = [word for name, value in SETTINGS.items() for word in (_option(name), str(value))]
    record = str(tmp_path / "record-{rank}.json")
    given = ("--steps", str(STEPS), "--rebalance", "1", "--record", record, *rates)
    kept = ("--checkpoint", str(tmp_path / "kept"), "--every", "20")
    events = events_with_moves(path, moves, *given, *kept)
    losses, told = losses_in(events), {e["step"]: e["plan"] for e in events if e["event"] == "step"}
    expected = single(plan, **SETTINGS)
    np.testing.assert_allclose([losses[t] for t in range(STEPS)], expected, rtol=TOLERANCE)
    # what was routed is what each segment's stages allow
    routes = [
        (step["step"], route)
        for file in tmp_path.glob("record-*.json")
        for step in json.loads(file.read_text())["steps"]
        for _, route in step["routes"]
    ]
    assert len(routes) == 12 * STEPS
    last, ends = plan, [*(move.after for move in moves), STEPS]
    for number, (begin, end) in enumerate(pairwise([0, *ends])):
        last = last if number == 0 else migrated(last, moves[number - 1])
        assert {told[step] for step in range(begin, end)} == {last.content_hash}
        for stage, group in enumerate(last.assignment.groups):
            assert {r[stage] for step, r in routes if begin <= step < end} == set(group)
    # all of a stage have the same parameters in the end, bit by bit
    folder = tmp_path / "kept"
    for group in last.assignment.groups:
        shards = [read_shard(folder, latest_step(folder, group), d, last) for d in group]
        for name, tensor in shards[0].items():
            assert all(torch.equal(tensor, shard[name]) for shard in shards[1:])


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def test_a_moved_plan_by_hand() -> None:
    """Who is where, who averages, and how much each may hold; the same wherever it is made."""
    plan = plan_of()
    made = migrated(plan, Migration("4", 1, 7))
    assert made.assignment.groups == ((0, 2), (1, 3, 4, 5)) and made.assignment.grid is None
    assert list(contradictions(made)) == [] and made.certificates == {}
    assert [[g.members for g in groups[0]] for groups in made.averaging] == [
        [(0, 2)],
        [(1, 3, 4, 5)],
    ]
    assert made.averaging[1][0][0].shares == (0.25,) * 4
    before, after = plan.schedules[0].most_live(), made.schedules[0].most_live()
    assert all(now <= was for d, (was, now) in enumerate(zip(before, after, strict=True)) if d != 4)
    assert after[4] == min(before[d] for d in (1, 3, 5))
    done = [sum(d in path for path in made.schedules[0].paths) for d in range(6)]
    assert done == [6, 3, 6, 3, 3, 3]
    assert made.content_hash == migrated(plan, Migration("4", 1, 7)).content_hash
    assert migrated(made, Migration("4", 0, 9)).assignment.groups == plan.assignment.groups


def test_shares_and_two_levels_after_a_move() -> None:
    """Who stays keeps proportions, who comes gets the mean share; levels become one round."""
    plan = plan_of()
    stage = AveragingGroup((1, 3, 5), (0.5, 0.5, 0.0), (True,) * 3)
    made = migrated(plan.replace(averaging=(plan.averaging[0], ((stage,),))), Migration("4", 1, 7))
    assert made.averaging[1][0][0].members == (1, 3, 4, 5)
    assert made.averaging[1][0][0].shares == pytest.approx((0.375, 0.375, 0.25, 0.0))
    pairs = tuple(
        (replace(AveragingGroup.equal(group), phase=Phase.REDUCE),) for group in [(0, 2, 4)]
    )
    two = (*pairs, (replace(AveragingGroup.equal((0, 2, 4)), phase=Phase.EXCHANGE),))
    made = migrated(plan.replace(averaging=(two, plan.averaging[1])), Migration("4", 1, 7))
    assert len(made.averaging[0]) == 1 and made.averaging[0][0][0].phase is Phase.ALL


@pytest.mark.parametrize(
    ("move", "changes", "message"),
    [
        (Migration("9", 1, 3), {}, "the plan has no device '9'"),
        (
            Migration("4", 0, 3),
            {},
            "must go from one stage to another of 0 to 1, found stage 0 to 0",
        ),
        (Migration("4", 2, 3), {}, "found stage 0 to 2"),
        (Migration("4", 1, 3), {"wiring": "fixed"}, "devices move where microbatches are routed"),
        (
            Migration("4", 1, 3),
            {"sync": Sync(2)},
            "found averaging every 2 steps; move after a multiple",
        ),
        (
            Migration("4", 1, 3),
            {"sync": Sync(1, OuterOptimizer(), delayed=True)},
            "that is not delayed",
        ),
    ],
)
def test_moves_that_cannot_be(move: Migration, changes: dict[str, Any], message: str) -> None:
    """One line each."""
    with pytest.raises(PlanError) as caught:
        migrated(plan_of().replace(**changes), move)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_no_move_empties_a_stage() -> None:
    """Not even after others."""
    plan = migrated(plan_of([[0, 1], [2, 3]]), Migration("0", 1, 2))
    with pytest.raises(PlanError, match="device '2' to stage 1 after 3 steps: is the last device"):
        migrated(plan, Migration("2", 1, 3))


@pytest.mark.slow
def test_a_move_between_outer_steps(tmp_path: Path) -> None:
    """H = 5, moved after 10 steps: all of a stage agree after the last outer step, bit by bit."""
    plan = plan_of().replace(sync=Sync(5, OuterOptimizer()))
    path, folder = tmp_path / "plan.json", tmp_path / "kept"
    save_plan(plan, path)
    kept = ("--checkpoint", str(folder), "--every", str(STEPS))
    given = ("--steps", str(STEPS), "--rebalance", "5")
    losses = losses_in(events_with_moves(path, [Migration("4", 1, 10)], *given, *kept))
    assert losses[STEPS - 1] < losses[0] - 0.1
    last = migrated(plan, Migration("4", 1, 10))
    for group in last.assignment.groups:
        shards = [read_shard(folder, latest_step(folder, group), d, last) for d in group]
        names = [name for name in shards[0] if not name.startswith("optimizer/")]
        assert any(name.startswith("outer/momentum/") for name in names)
        for name in names:
            assert all(torch.equal(shards[0][name], shard[name]) for shard in shards[1:])
