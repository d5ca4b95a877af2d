"""fp16 with dynamic loss scaling: an overflow on one rank skips the step on all."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.problems import ProblemError
from planner.training_plan.error import PlanError
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import Sync
from tests.conftest import make_plan
from tests.executor.test_precision import tiny
from tests.executor.test_train import NORMS, STEPS, TOLERANCE, execute, expected_gradient, single

torch = pytest.importorskip("torch")

from planner.executor.comm.codec import WireFormat, decode, encode  # noqa: E402
from planner.executor.comm.gradient_norm import GradientNorm  # noqa: E402
from planner.executor.runtime.loss_scaler import LossScaler, TrainingDiverged  # noqa: E402
from planner.executor.runtime.model_stage import ModelStage  # noqa: E402
from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402
from planner.executor.runtime.stage_module import require_executable  # noqa: E402
from tests.executor.forks import losses_by_step  # noqa: E402

PAIRS, COPIES, PIPELINE = [[0, 3], [2, 1]], [[0], [1]], [[0, 1]]
SENT = {"compute": "fp32", "messages": "fp16"}


def half(
    grid: list[list[int]], clip: float | None = None, precision: dict[str, str] | str = "fp16"
) -> TrainingPlan:
    """A plan in fp16."""
    return make_plan(grid, workload=tiny("llama", precision), head="first", clip=clip)


INIT_SCALE = 2.0**19
"""GradScaler's 2 ** 16, for losses that are divided by eight microbatches."""


@pytest.mark.parametrize(
    ("grid", "clip", "precision", "overflow"),
    [
        pytest.param(PAIRS, None, "fp16", (1, 7), id="2 x 2"),
        pytest.param(PAIRS, NORMS["llama"], "fp16", (3, 5), id="2 x 2, clipped"),
        pytest.param(PIPELINE, None, "fp16", (1, 4), id="one pipeline, bit by bit"),
        pytest.param(PAIRS, None, "fp16", None, id="no overflow", marks=pytest.mark.slow),
        pytest.param(COPIES, None, "fp16", (1, 1), id="one stage", marks=pytest.mark.slow),
        pytest.param(PAIRS, None, SENT, (0, 3), id="sent in fp16", marks=pytest.mark.slow),
    ],
)
def test_training_equals_one_process_with_grad_scaler(
    grid: list[list[int]],
    clip: float | None,
    precision: dict[str, str] | str,
    overflow: tuple[int, int] | None,
    tmp_path: Path,
) -> None:
    """Also after a gradient of one rank was infinite in one step, which no rank updates in."""
    plan = half(grid, clip, precision)
    rank_step: dict[str, Any] = {} if overflow is None else {"overflow": overflow}
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids), **rank_step)
    skipped = STEPS if overflow is None else overflow[1]
    losses, gradients = single(plan, overflow=skipped)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for rank, found in enumerate(ranks):
        # weights that differ in the last digit may round to other weights in fp16
        for when, tolerance in (("first", 1e-4), ("last", 2e-3)):
            want = expected_gradient(plan, rank, gradients[when])
            atol = tolerance * np.abs(want).max()
            np.testing.assert_allclose(found[when], want, atol=atol, rtol=0)
            if len(grid) == 1:
                assert found[when].tobytes() == want.tobytes()
        assert found["updates"] == STEPS - (overflow is not None)
        assert found["scales"].tolist() == [
            INIT_SCALE / (1 if step < skipped else 2) for step in range(STEPS)
        ]
        assert np.flatnonzero(~np.isfinite(found["norms"])).tolist() == [skipped][: len(rank_step)]
    whole, _ = single(plan)
    assert (whole == losses) == (overflow is None)


@pytest.mark.slow
@pytest.mark.parametrize("gradients", ["bf16", "int8"])
def test_no_wire_format_hides_an_overflow(gradients: str, tmp_path: Path) -> None:
    """Of the rank whose contribution is encoded."""
    if gradients == "int8":
        plan = half(COPIES).replace(codec=gradients)
    else:
        formats = {"compute": "fp16", "messages": "fp16", "gradients": gradients}
        plan = half(COPIES, precision=formats)
    for found in execute(plan, tmp_path, list(plan.cluster.network.ids), overflow=(1, 4)):
        assert found["updates"] == STEPS - 1
        assert set(found["scales"]) == {INIT_SCALE, INIT_SCALE / 2}


@pytest.mark.parametrize("wire", list(WireFormat))
def test_codecs_keep_what_is_not_finite(wire: WireFormat) -> None:
    """As infinity or as NaN, and clamp only what is finite."""
    vector = torch.zeros(3000)
    vector[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    for k in range(3):
        one = torch.zeros(3000)
        one[7] = vector[k]
        assert not torch.isfinite(decode(encode(one, wire), 3000, wire)).all()
    large = torch.full((3000,), 1e6)
    assert torch.isfinite(decode(encode(large, wire), 3000, wire)).all()


def test_the_scale_follows_grad_scaler() -> None:
    """Over 20,000 steps, of which few overflow."""
    ours, drawn = LossScaler(tiny("llama", "fp16")), random.Random(1)
    scale, tracker = torch.tensor(INIT_SCALE), torch.tensor(0, dtype=torch.int32)
    doublings = 0
    for _ in range(20_000):
        overflow = drawn.random() < 3e-4
        before = ours.scale
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 2000)
        ours.update(overflow=overflow)
        assert ours.scale == float(scale)
        doublings += ours.scale > before
    assert doublings > 2
    with pytest.raises(
        TrainingDiverged, match="even with a loss scale of 1; lower the learning rate"
    ):
        for _ in range(60):
            ours.update(overflow=True)


def test_the_scale_is_in_every_checkpoint(tmp_path: Path) -> None:
    """Resumed losses are the same bit by bit, another plan continues with the scale."""
    plan, folder, path = half(PAIRS), tmp_path / "checkpoints", tmp_path / "plan.json"
    save_plan(plan, path)
    ids = plan.cluster.network.ids
    code, whole, said = losses_by_step(path, ids, "--steps", "6")
    assert code == 0, said
    every = ("--checkpoint", str(folder), "--every", "3")
    code, first, said = losses_by_step(path, ids, "--steps", "3", *every)
    assert code == 0, said
    resumed = ("--steps", "6", "--resume", str(folder))
    code, second, said = losses_by_step(path, ids, *resumed)
    assert code == 0 and first | second == whole, said
    save_plan(half([[0, 1, 2, 3]]).replace(seed=plan.seed), tmp_path / "other.json")
    code, third, said = losses_by_step(tmp_path / "other.json", ids, *resumed)
    assert code == 0, said
    # some losses become known late
    assert third.keys() == second.keys()
    want = [second[step] for step in sorted(second)]
    np.testing.assert_allclose([third[step] for step in sorted(third)], want, rtol=TOLERANCE)


def test_scale_and_growth_are_state() -> None:
    """What checkpoints hold, and what a joining device receives."""
    plan = half(PAIRS)
    one, other = (ModelStage(plan, 0, torch.device("cpu"), OptimizerConfig()) for _ in range(2))
    one.update(float("nan"))
    for _ in range(1999):
        one.update(1.0)
    other.load_state_dict(one.state_dict())
    assert one.loss_scale == other.loss_scale == INIT_SCALE / 2
    for model_stage in (one, other):
        model_stage.update(1.0)
        assert model_stage.loss_scale == INIT_SCALE


def test_local_sgd_is_refused() -> None:
    """In one line, when planning and when running."""
    plan = half(PAIRS)
    with pytest.raises(ProblemError, match=r"sync_every is 4 with fp16; .* --precision fp32"):
        request = PlanRequest(sync_every=4)
        PlanningProblem.of(plan.cluster, tiny("llama", "fp16"), request, 0, {})
    with pytest.raises(PlanError, match=r"workload\.precision: in fp16 .* found sync\.every_steps"):
        require_executable(
            plan.replace(sync=Sync(every_steps=4), workload=plan.workload.with_outer_state())
        )


def test_a_scale_that_is_too_large_is_lowered_until_gradients_are_finite() -> None:
    """On one device; no update is taken before, and the first one is that of a usual scale."""
    plan = half([[0]])
    usual, large = (ModelStage(plan, 0, torch.device("cpu"), OptimizerConfig()) for _ in range(2))
    assert large._scaler is not None
    large._scaler.scale = 2.0**40
    step_alone(usual, plan)
    begun = [parameter.clone() for parameter in large.parameters]
    skipped = 0
    while not math.isfinite(step_alone(large, plan)):
        skipped += 1
        assert all(map(torch.equal, large.parameters, begun))
        assert large.loss_scale == 2.0 ** (40 - skipped)
    assert 5 < skipped < 30
    for parameter, expected in zip(large.parameters, usual.parameters, strict=True):
        torch.testing.assert_close(parameter, expected, atol=2e-4, rtol=0)


def step_alone(model_stage: ModelStage, plan: TrainingPlan) -> float:
    """One step of the only device of a plan; returns the norm."""
    model_stage.begin(0, plan.schedules[0])
    for kind, microbatch in plan.schedules[0].order[0]:
        model_stage.run_op(kind, microbatch, None)
    model_stage.unscale()
    norm = GradientNorm(plan, 0).clip_grad_norm_([model_stage.gradients.current], {})
    model_stage.update(norm)
    return norm
