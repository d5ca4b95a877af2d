"""A plan's formats are what is computed, sent and averaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from planner.planning.problem import PlanningProblem
from planner.planning.request import PlanRequest
from planner.training_plan.error import PlanError
from planner.workload.workload import Workload
from tests.conftest import make_plan, tiny_workload
from tests.executor.test_train import TOLERANCE, execute, expected_gradient, single

torch = pytest.importorskip("torch")

from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402
from planner.executor.runtime.stage_module import require_executable  # noqa: E402

Formats = Mapping[str, str] | str

CASES: dict[str, tuple[list[list[int]], str, str, Formats, tuple[int, ...]]] = {
    "bf16": ([[0, 1]], "last", "gpt2", "bf16", (0, 0)),
    "bf16, head first, recomputed": ([[1, 0]], "first", "llama", "bf16", (2, 1)),
    "sent in bf16": ([[0, 1]], "last", "gpt2", {"compute": "fp32"}, (0, 2)),
    "sent in fp32": ([[0, 1]], "first", "gpt2", {"messages": "fp32"}, (0, 0)),
    "2 x 2 in bf16": ([[0, 3], [2, 1]], "first", "llama", "bf16", (0, 2)),
    "fp16, recomputed": ([[0, 1]], "last", "gpt2", "fp16", (1, 2)),
}


def tiny(kind: str = "gpt2", precision: Formats = "bf16") -> Workload:
    """The tiny workload in other formats."""
    like = tiny_workload(kind)
    return Workload.transformer(
        like.name, like.architecture, precision=precision, batch_samples=like.batch_samples
    )


QUICK = {"bf16, head first, recomputed", "2 x 2 in bf16"}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_losses_and_gradients_equal_one_process_in_the_same_formats(
    case: str, tmp_path: Path
) -> None:
    """Bit by bit in one pipeline; and in no other formats."""
    grid, head, kind, precision, again = CASES[case]
    plan = make_plan(grid, head=head, workload=tiny(kind, precision)).replace(recompute=again)
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for rank, found in enumerate(ranks):
        for when in ("first", "last"):
            want = expected_gradient(plan, rank, gradients[when])
            assert found[when].dtype == np.float32
            np.testing.assert_allclose(found[when], want, atol=1e-4 * np.abs(want).max(), rtol=0)
            if len(grid) == 1:
                assert found[when].tobytes() == want.tobytes()
    if len(grid) == 1:
        assert ranks[0]["losses"].tolist() == losses
    exact, _ = single(make_plan(grid, head=head, workload=tiny(kind, "fp32")))
    assert 2 * TOLERANCE < np.abs(np.array(exact) / losses - 1).max() < 1e-2


def test_a_shared_matrix_is_rounded_for_the_head_alone(tmp_path: Path) -> None:
    """What embedding and head give meets in one gradient, in fp32; in another order here."""
    arch = replace(tiny_workload().architecture, tied=True)
    workload = Workload.transformer("tied", arch, precision="bf16", batch_samples=8)
    plan = make_plan([[0, 1]], head="first", workload=workload)
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for rank, found in enumerate(ranks):
        want = expected_gradient(plan, rank, gradients["first"])
        np.testing.assert_allclose(found["first"], want, atol=1e-5 * np.abs(want).max(), rtol=0)


def test_gradients_are_averaged_in_their_format(tmp_path: Path) -> None:
    """All members agree bit for bit; off by what rounding contributions and sums takes, and off."""
    from planner.executor.comm.codec import WireFormat
    from tests.executor.codec_error import error_bound

    rounded = Workload.transformer(
        "tiny",
        tiny_workload().architecture,
        precision={"compute": "fp32", "messages": "fp32", "gradients": "bf16"},
        batch_samples=6,
    )
    plan = make_plan([[0], [1], [2]], workload=rounded)
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    for when in ("first", "last"):
        assert len({r[when].tobytes() for r in ranks}) == 1
    want = torch.from_numpy(np.concatenate(gradients["first"]))
    off = (torch.from_numpy(ranks[0]["first"]) - want).abs()
    # two contributions, which may be larger than their sum, and the sum
    worst = error_bound(want, WireFormat.BF16).max()
    assert 1e-3 * float(worst) < float(off.max()) <= 3 * float(worst)
    sums = torch.from_numpy(ranks[0]["first"])
    assert torch.equal(sums, sums.to(torch.bfloat16).float())
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=1e-3)
    with pytest.raises(PlanError, match=r"averaging\.codec: must be none where gradients"):
        require_executable(plan.replace(codec="int8"))
    with pytest.raises(ValueError, match="codec int8 is made from fp32, the workload averages"):
        PlanningProblem.of(plan.cluster, rounded, PlanRequest(codec="int8"), 0, {})


def test_fp32_computes_with_the_parameters_themselves() -> None:
    """No copy, and what is summed in fp32 whatever the format changes no bit."""
    from planner.executor.runtime.model_stage import ModelStage

    model_stage = ModelStage(make_plan([[0, 1]]), 0, torch.device("cpu"), OptimizerConfig())
    assert model_stage.module.low_precision_stage._module is model_stage.module.stage
    assert model_stage.module.low_precision_stage.cast == []
    assert torch.get_float32_matmul_precision() == "highest"


def test_parameters_and_moments_stay_in_fp32() -> None:
    """Only what computes is rounded, after every update and after a checkpoint."""
    from planner.executor.runtime.model_stage import ModelStage

    plan = make_plan([[0, 1]], workload=tiny())
    model_stage = ModelStage(plan, 0, torch.device("cpu"), OptimizerConfig())
    named = model_stage.module.stage.named_parameters()
    layers = [p for name, p in named if not name.startswith("stem")]
    rounded = sum(weight.nbytes for weight in model_stage.module.low_precision_stage.cast)
    assert rounded == 2 * sum(p.numel() for p in layers)
    model_stage.begin(0, plan.schedules[0])
    sent = model_stage.run_op("F", 0, None)
    assert sent.dtype == torch.bfloat16
    model_stage.run_op(
        "B", 0, torch.randn(model_stage.operations.activation_codec.shape, dtype=torch.bfloat16)
    )
    model_stage.update()
    assert {t.dtype for t in model_stage.state_dict().values()} == {torch.float32}
    model_stage.begin(1, plan.schedules[0])
    assert not torch.equal(model_stage.run_op("F", 0, None), sent)
    other = ModelStage(plan, 0, torch.device("cpu"), OptimizerConfig())
    other.load_state_dict(model_stage.state_dict())
    for one in (model_stage, other):
        one.begin(1, plan.schedules[0])
    assert torch.equal(model_stage.run_op("F", 1, None), other.run_op("F", 1, None))


def test_calibration_measures_in_the_plans_format() -> None:
    """F, H and B of the modules that compute."""
    from planner.executor.runtime.model_stage import ModelStage
    from planner.profiling.calibrate import measure_compute

    plan = make_plan([[0, 1]], workload=tiny())
    model_stage = ModelStage(plan, 1, torch.device("cpu"), OptimizerConfig())
    before = {name: value.clone() for name, value in model_stage.state_dict().items()}
    used: set[object] = set()
    for computed in (model_stage.module.low_precision_stage, model_stage.module.low_precision_head):
        computed._module.register_forward_hook(lambda _, given, __: used.add(given[0].dtype))
    times = measure_compute(model_stage)
    assert used == {torch.bfloat16} and min(times.values()) > 0
    assert all(torch.equal(value, before[name]) for name, value in model_stage.state_dict().items())


def test_bytes_that_are_not_those_of_the_formats_are_refused() -> None:
    """What was priced otherwise is not executed."""
    workload = tiny()
    changed = workload.replace(gradient_bytes_per_parameter=2)
    with pytest.raises(PlanError, match=r"priced for 2, in its precision the executor has 4"):
        require_executable(make_plan([[0, 1]], workload=changed))
    lighter = workload.replace(state_bytes_per_parameter=2)
    with pytest.raises(PlanError, match=r"state_bytes_per_parameter: .* priced for 2, .* has 16;"):
        require_executable(make_plan([[0, 1]], workload=lighter))
    wrong = workload.replace(precision=tiny(precision="fp32").precision)
    with pytest.raises(PlanError, match=r"priced for 1024, .* the executor has 2048; leave it"):
        require_executable(make_plan([[0, 1]], workload=wrong))


def test_a_gpu_without_bf16_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it computes anything, slowly."""
    from planner.executor.runtime.precision import set_precision

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Tesla V100-SXM2-16GB")
    plan, device = make_plan([[0, 1]], workload=tiny()), torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 0))
    with pytest.raises(PlanError, match=r"Tesla V100-SXM2-16GB has no bf16 .* --precision fp16"):
        set_precision(plan, device)
    set_precision(make_plan([[0, 1]]), device)
    set_precision(make_plan([[0, 1]], workload=tiny(precision="fp16")), device)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    set_precision(plan, device)
