"""What a rank keeps of its microbatches between F and B, with and without recomputation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from planner.training_plan.model import TrainingPlan
from planner.workload.costs import StageCosts, stage_costs
from tests.conftest import make_plan, tiny_workload

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch")

FLIGHT = 3
STAGES = 4


def plan_of(head: str, recomputed: int, stages: int = STAGES) -> TrainingPlan:
    """Stages of four layers in all, on one device each."""
    plan = make_plan([list(range(stages))], head=head)
    return plan.replace(recompute=(recomputed,) * stages)


def work(
    stage: int, head: str, recomputed: int, stages: int = STAGES
) -> tuple[list[int], int, int, list[Tensor]]:
    """F of three microbatches, their H, their B.

    Bytes that graphs hold after every F, the most at any time, bytes that the learner itself holds
    after all F, and what every operation gave.
    """
    from planner.executor.runtime.model_stage import ModelStage
    from planner.executor.runtime.optimizer import OptimizerConfig

    plan = plan_of(head, recomputed, stages)
    model_stage = ModelStage(plan, stage, torch.device("cpu"), OptimizerConfig(1e-3))
    model_stage.begin(0, plan.schedules[0])
    generator = torch.Generator().manual_seed(stage)
    given = [
        torch.randn(model_stage.operations.activation_codec.shape, generator=generator)
        for _ in range(3 * FLIGHT)
    ]
    after, made, kept = [], [], model_stage.operations.saved_tensors
    for b in range(FLIGHT):
        made.append(model_stage.run_op("F", b, None if stage == 0 else given[b].clone()))
        after.append(kept.update())
    held = sum(
        t.nbytes
        for pair in model_stage.operations._activations.values()
        for t in pair
        if t is not None
    )
    heads = model_stage.module.head is not None
    for b in range(FLIGHT if heads else 0):
        here = head == "last"
        made.append(model_stage.run_op("H", b, None if here else given[FLIGHT + b].clone()))
    for b in range(FLIGHT):
        own = heads and head == "last"
        made.append(model_stage.run_op("B", b, None if own else given[-1 - b].clone()))
    assert kept.update() == 0 and not model_stage.operations._activations
    return after, kept.peak_bytes, held, [*made, model_stage.gradients.current.clone()]


def costs_of(stage: int, head: str) -> StageCosts:
    """What planning counts for it."""
    with_head = stage == (STAGES - 1 if head == "last" else 0)
    return stage_costs(tiny_workload(), stage, stage + 1, with_head=with_head, recomputed=1)


@pytest.mark.parametrize("head", ["first", "last"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_only_inputs_are_kept_between_f_and_b(stage: int, head: str) -> None:
    """As many bytes as planning counts, no graph; B holds one microbatch's activations."""
    plain, most_plain, _, expected = work(stage, head, 0)
    again, most, held, found = work(stage, head, 1)
    assert plain[0] > 0 and plain == [plain[0] * (b + 1) for b in range(FLIGHT)]
    assert again == [0] * FLIGHT
    assert held == FLIGHT * costs_of(stage, head).saved_bytes
    assert most < most_plain
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("head", ["first", "last"])
@pytest.mark.parametrize("stage", [0, 1])
def test_the_first_layer_alone_is_recomputed(stage: int, head: str) -> None:
    """Of stages of two; B computes it again once the other's activations are freed."""
    with_head = stage == (1 if head == "last" else 0)
    layers = (2 * stage, 2 * stage + 2)
    costs = stage_costs(tiny_workload(), *layers, with_head=with_head, recomputed=1)
    _, most_plain, _, expected = work(stage, head, 0, 2)
    after, most, held, found = work(stage, head, 1, 2)
    assert after[0] > 0 and after == [after[0] * (b + 1) for b in range(FLIGHT)]
    # the activations that the second layer needs are its own input, too
    assert after[-1] < FLIGHT * costs.saved_bytes <= after[-1] + held
    assert most < most_plain
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine, theirs)


def test_calibration_measures_without_recomputation() -> None:
    """F once and B alone, so that `Calibration.compute_times` adds the F of B just once."""
    from planner.executor.runtime.model_stage import ModelStage
    from planner.executor.runtime.optimizer import OptimizerConfig
    from planner.profiling.calibrate import REPEATS, measure_compute

    calls = []
    for recomputed in (0, 1):
        model_stage = ModelStage(
            plan_of("last", recomputed), 1, torch.device("cpu"), OptimizerConfig(1e-3)
        )
        graphs: list[bool] = []
        model_stage.module.stage.register_forward_hook(
            lambda _, __, output, found=graphs: found.append(output.requires_grad)
        )
        times = measure_compute(model_stage)
        assert min(times["forward_s"], times["backward_s"]) > 0
        calls.append(graphs)
    assert calls[0] == calls[1] == [True] * (REPEATS + 1)
