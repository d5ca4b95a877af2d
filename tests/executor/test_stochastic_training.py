"""Microbatches that devices route while they run: the training is that of one process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.training_plan.model import Routing, TrainingPlan
from planner.training_plan.schedule import Schedule
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.workload.costs import stage_costs
from planner.workload.working_memory import MESSAGES
from tests.conftest import make_plan, tiny_workload
from tests.executor.test_train import STEPS, TOLERANCE, execute, expected_gradient, single

torch = pytest.importorskip("torch")

from planner.executor.comm.comm_plan import stage_averager  # noqa: E402
from planner.executor.fault_tolerance.shutdown import FAILED  # noqa: E402
from planner.executor.runtime.memory import memory_need  # noqa: E402
from planner.executor.runtime.model_stage import ModelStage  # noqa: E402
from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402
from planner.executor.runtime.outer_optimizer import CountedSampleShares  # noqa: E402
from planner.executor.runtime.run_summary import summary  # noqa: E402
from planner.executor.swarm.microbatch_queue import QueuePipeline  # noqa: E402
from planner.training_plan.error import PlanError  # noqa: E402
from tests.executor.faults import Started, hurt, saved  # noqa: E402
from tests.executor.test_local_steps import apart  # noqa: E402

DILOCO = Sync(5, OuterOptimizer())


def routed(plan: TrainingPlan, **fields: Any) -> TrainingPlan:
    """The same plan, whose paths are chosen while it runs."""
    return plan.replace(wiring="stochastic", routing=Routing(**fields))


def replayed(plan: TrainingPlan, ranks: list[dict[str, np.ndarray]]) -> TrainingPlan:
    """A plan of fixed paths: those that were taken, a schedule a step."""
    taken = np.concatenate([found["routes"] for found in ranks if found["routes"].size])
    blank, schedules = plan.schedules[0], []
    for step in range(STEPS):
        rows = sorted(tuple(row[1:]) for row in taken[taken[:, 0] == step].tolist())
        assert [b for b, *_ in rows] == list(range(len(blank.paths)))
        paths = tuple(tuple(path) for _, *path in rows)
        bare = Schedule(f"step {step}", blank.head, paths, ())
        order: list[list[tuple[str, int]]] = [[] for _ in blank.order]
        for b in range(len(paths)):
            for kind, d in bare.chain(b):
                order[d].append((kind, b))
        schedules.append(replace(bare, order=tuple(map(tuple, order))))
    return plan.replace(wiring="fixed", schedules=tuple(schedules), cycle=tuple(range(STEPS)))


def require_every_stage_once(plan: TrainingPlan, ranks: list[dict[str, np.ndarray]]) -> None:
    """What was done is what was routed, and each device did some of it."""
    batch = len(plan.schedules[0].paths)
    fixed = replayed(plan, ranks)
    for group in plan.assignment.groups:
        assert set(np.sum([ranks[d]["given"] for d in group], axis=0)) == {batch}
        for d in group:
            went = [sum(d in path for path in s.paths) for s in fixed.schedules]
            assert ranks[d]["given"].tolist() == went
            assert sum(went) > 0


CASES: dict[str, tuple[list[list[int]], str, str, bool, dict[str, Any]]] = {
    "2 x 2": ([[0, 3], [2, 1]], "last", "gpt2", False, {}),
    "one stage": ([[0], [1], [2]], "last", "gpt2", False, {}),
    "2 x 2, tied over two stages": ([[0, 3], [2, 1]], "last", "gpt2", True, {}),
    "2 x 3, head first, tied, told the work": (
        [[0, 3, 4], [2, 1, 5]],
        "first",
        "llama",
        True,
        {"told": "work"},
    ),
    "4 x 2, the plan's parts kept": (
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        "last",
        "llama",
        False,
        {"smoothing": 0.0},
    ),
}


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c == "2 x 2" else pytest.mark.slow) for c in CASES]
)
def test_losses_and_gradients_equal_one_process(case: str, tmp_path: Path) -> None:
    """20 steps that average: whoever did what, each microbatch counts once."""
    grid, head, kind, tied, fields = CASES[case]
    workload = tiny_workload(kind, tied=tied, batch_samples=12)
    plan = routed(make_plan(grid, head=head, workload=workload), **fields)
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for rank, found in enumerate(ranks):
        for when, bound in (("first", 1e-5), ("last", 1e-4)):
            want = expected_gradient(plan, rank, gradients[when])
            np.testing.assert_allclose(found[when], want, atol=bound * np.abs(want).max(), rtol=0)
    require_every_stage_once(plan, ranks)


@pytest.mark.parametrize("delayed", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_local_steps_equal_one_process_on_the_same_routes(delayed: bool, tmp_path: Path) -> None:
    """H = 5: each device's own mean and weight are of the samples that it really did."""
    plan = make_plan([[0, 3], [2, 1]], workload=tiny_workload(batch_samples=9))
    plan = routed(plan.replace(sync=replace(DILOCO, delayed=delayed)), told="work")
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids), eps=1e-6)
    require_every_stage_once(plan, ranks)
    losses, held = apart(replayed(plan, ranks), eps=1e-6)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for d, want in held.items():
        np.testing.assert_allclose(ranks[d]["parameters"], want, atol=1e-5, rtol=0)
    # what the plan's own paths would give is another training
    usual, _ = apart(plan.replace(wiring="fixed"), eps=1e-6)
    assert np.abs(np.array(usual) / losses - 1).max() > TOLERANCE


def test_samples_are_counted_as_they_are_done() -> None:
    """Batches of 8, H = 2; a checkpoint within a period keeps the count."""
    plan = routed(make_plan([[0], [1]], workload=tiny_workload(batch_samples=8)))
    plan = plan.replace(sync=Sync(2))
    samples, again = CountedSampleShares(plan, 0), CountedSampleShares(plan, 0)
    samples.begin(plan.schedules[0])
    assert samples.gradient_scale(0) is None
    for _ in range(5):
        samples.count_microbatch()
    assert samples.gradient_scale(0) == 8 / 5
    samples.begin(plan.schedules[0])  # it was not taken, and is done again
    for _ in range(4):
        samples.count_microbatch()
    assert samples.gradient_scale(0) == 2
    samples.commit_step()
    again.load_state_dict(samples.state_dict())
    for one in (samples, again):
        one.begin(plan.schedules[0])
        one.count_microbatch()
        assert one.gradient_scale(1) == 8
        one.commit_step()
        one.take_snapshot()
        assert one.pseudo_gradient_weight(1) == one.pseudo_gradient_weight(1) == 5 / 16
        # of the next period, where the outer step is taken a step later
        one.begin(plan.schedules[0])
        one.count_microbatch()
        one.commit_step()
        assert one.pseudo_gradient_microbatches == 5 and one.pseudo_gradient_weight(1) == 5 / 16
        one.commit_outer_step()
        assert one.pseudo_gradient_microbatches == 0 and one.state_dict()["outer/samples"] == 1
    again.load_state_dict({})
    assert again.pseudo_gradient_weight(3) == 0


def test_memory_counts_what_may_wait() -> None:
    """All that trainers let be on their way may wait at one device."""
    plan = make_plan([[0, 1], [2, 3]], workload=tiny_workload(batch_samples=12))
    needs = [memory_need(p, 1, stage_averager(p, 1)) for p in (plan, routed(plan))]
    live = plan.schedules[0].most_live()
    each = stage_costs(plan.workload, *plan.stage_layers[1]).output_bytes
    # four are planned for
    waiting = [2 * live[1], live[1] + live[0] + live[2]]
    assert [need.extra_bytes["messages"] for need in needs] == [
        each * max(count - MESSAGES, 0) for count in waiting
    ]
    assert waiting[1] > MESSAGES


def test_own_pace_is_refused() -> None:
    """One of the two ways to share microbatches out."""
    plan = routed(make_plan([[0], [1]], workload=tiny_workload(batch_samples=8)))
    model_stage = ModelStage(plan, 0, torch.device("cpu"), OptimizerConfig())
    store = torch.distributed.HashStore()
    with pytest.raises(PlanError, match="found kind 'stochastic'; leave out --own-pace"):
        QueuePipeline(plan, 0, model_stage, store)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_run_that_routes_ends_when_a_device_is_lost(phase: str, tmp_path: Path) -> None:
    """Killed in the middle of a step: all others end, and name it."""
    plan = routed(make_plan([[0, 1], [2, 3]], workload=tiny_workload(batch_samples=12)))
    path, ids = saved(plan, tmp_path / "plan.json"), plan.cluster.network.ids
    given = {"device": ids[3], "fault": "kill", "phase": phase, "step": 3, "folder": str(tmp_path)}
    with Started(tmp_path) as run:
        for name in ids:
            run.start(name, name, hurt(path, given))
        others = [name for name in ids if name != ids[3]]
        assert run.codes(others) == dict.fromkeys(others, FAILED)
        for name in others:
            assert run.reason(name).startswith(f"device {ids[3]!r} is gone")


def test_the_last_line_names_who_is_farthest_from_the_plan() -> None:
    """Nobody, where all did what was planned."""
    alike = {"peak_bytes": 1, "planned_bytes": 1, "expected_bytes": 1, "peak_is": "kept"}
    alike |= {"sent_bytes": {}, "planned_part": 0.5}
    reports = [alike | {"device": name, "part": part} for name, part in (("a", 0.4), ("b", 0.6))]
    assert "farthest from its planned part of microbatches is a: 40.0% of" in summary(reports)
    assert "farthest" not in summary([one | {"part": 0.5} for one in reports])
