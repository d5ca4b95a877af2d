"""What a stage keeps of a microbatch is what planning counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from planner.workload.costs import stage_costs
from planner.workload.layers import Architecture, Family
from planner.workload.working_memory import WorkingMemory
from planner.workload.workload import Workload
from tests.conftest import make_plan

if TYPE_CHECKING:
    from torch import Tensor

    from planner.executor.runtime.model_stage import ModelStage

torch = pytest.importorskip("torch")

from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402

TOLERANCE = 0.02
"""Planning leaves out norms' statistics."""


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("kind", "kv_heads", "ffn", "more"),
    [
        ("gpt2", 8, 1024, {}),
        ("llama", 8, 704, {}),
        ("llama", 2, 768, {}),
        ("llama", 4, 1280, {}),
        ("llama", 2, 768, {"head_size": 64}),
        ("llama", 8, 704, {"qk_norm": True}),
        ("llama", 2, 1280, {"qk_norm": True, "head_size": 64}),
    ],
)
def test_activations_are_as_many_bytes_as_planned(
    kind: str, kv_heads: int, ffn: int, more: dict[str, Any], precision: str
) -> None:
    """Counted where autograd saves them, storage by storage, weights left out."""
    from planner.executor.runtime.model_stage import ModelStage

    arch = Architecture(Family(kind), 4, 256, 8, kv_heads, ffn, 1000, 128, **more)
    workload = Workload.transformer(
        "small", arch, batch_samples=4, microbatch_samples=2, precision=precision
    )
    plan = make_plan([[0, 1]], workload=workload)
    model_stage = ModelStage(plan, 1, torch.device("cpu"), OptimizerConfig())
    model_stage.begin(0, plan.schedules[0])
    planned = stage_costs(workload, 2, 4).saved_bytes
    saved = model_stage.operations.saved_tensors
    for b in (1, 2):
        model_stage.run_op(
            "F",
            b - 1,
            torch.randn(
                model_stage.operations.activation_codec.shape, dtype=model_stage.module.dtype
            ),
        )
        assert saved.peak_bytes == pytest.approx(b * planned, rel=TOLERANCE)
    assert saved.update() < saved.peak_bytes


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"kind": Family.GPT2, "ffn": 1024},
    "llama": {"kind": Family.LLAMA, "ffn": 704},
    "mistral": {"kind": Family.LLAMA, "ffn": 704, "window": 48},
    "qwen2": {"kind": Family.LLAMA, "ffn": 1280, "qkv_bias": True},
    "qwen3": {"kind": Family.LLAMA, "ffn": 704, "qk_norm": True},
}


@pytest.mark.parametrize(
    ("family", "words", "samples", "recomputed", "stage", "precision"),
    [
        ("gpt2", 8000, 1, 0, 0, "bf16"),
        ("gpt2", 1000, 2, 2, 0, "fp32"),
        ("gpt2", 1000, 4, 1, 0, "bf16"),
        ("gpt2", 4000, 1, 2, 1, "bf16"),
        ("llama", 8000, 4, 0, 1, "bf16"),
        ("llama", 8000, 4, 0, 0, "fp32"),
        ("llama", 1000, 4, 0, 0, "bf16"),
        ("mistral", 4000, 2, 2, 1, "bf16"),
        ("mistral", 1000, 4, 0, 0, "fp32"),
        ("qwen2", 16000, 2, 0, 1, "bf16"),
        ("qwen2", 4000, 4, 2, 0, "fp32"),
        ("qwen2", 1000, 4, 1, 1, "fp32"),
        ("qwen3", 8000, 2, 0, 0, "bf16"),
        ("qwen3", 4000, 4, 0, 1, "fp32"),
    ],
)
def test_planned_memory_is_the_peak(
    family: str, words: int, samples: int, recomputed: int, stage: int, precision: str
) -> None:
    """Live tensors of two steps of three microbatches: at most what is planned, within 5%."""
    from planner.executor.runtime.model_stage import ModelStage
    from tests.executor.live_bytes import LiveBytes

    kv_heads = 8 if family == "gpt2" else 4
    sizes: dict[str, Any] = {
        "layers": 4,
        "hidden": 256,
        "heads": 8,
        "kv_heads": kv_heads,
        "sequence": 128,
    }
    arch = Architecture(**sizes, vocabulary=words, **FAMILIES[family])
    workload = Workload.transformer(
        "small",
        arch,
        batch_samples=3 * samples,
        microbatch_samples=samples,
        precision=precision,
    )
    plan = make_plan([[0, 1]], workload=workload).replace(recompute=(recomputed, recomputed))
    model_stage = ModelStage(plan, stage, torch.device("cpu"), OptimizerConfig())
    model_stage.operations._counts_memory = False
    before = [*model_stage.module.weights, model_stage.gradients.current]
    live = LiveBytes(before)
    for step in range(2):
        with live:
            model_stage.begin(step, plan.schedules[0])
            work(model_stage, stage)
            model_stage.update()
    most = live.most + sum(t.nbytes for t in before)
    layers = plan.stage_layers[stage]
    costs = stage_costs(workload, *layers, with_head=stage == 1, recomputed=recomputed)
    # no message is on its way here
    planned = costs.need_bytes(3) - WorkingMemory.of_workload(workload).messages
    assert most <= planned <= 1.05 * most


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize("samples", [1, 2])
def test_a_head_in_chunks_gives_the_same_gradients_in_the_planned_memory(
    monkeypatch: pytest.MonkeyPatch, precision: str, samples: int
) -> None:
    """With 100,000 words: all tokens at once, 20 tokens at once, and logits in several blocks.

    Plans also count what compiled code may need, a gradient of all logits at once; these stages are
    not compiled.
    """
    from planner.executor.runtime.model_stage import ModelStage
    from tests.executor.live_bytes import LiveBytes

    arch = Architecture(Family.LLAMA, 2, 64, 4, 4, 128, 100_000, 128)
    workload = Workload.transformer(
        "words", arch, batch_samples=samples, microbatch_samples=samples, precision=precision
    )
    plan = make_plan([[0, 1]], workload=workload)
    losses, gradients = [], []
    for max_logits, block_logits in ((2**28, 2**24), (2_000_000, 2**24), (2**28, 1_000_000)):
        monkeypatch.setattr("planner.workload.layers.MAX_LOGITS", max_logits)
        monkeypatch.setattr("planner.workload.working_memory.BLOCK_LOGITS", block_logits)
        uncached = Workload.from_dict(workload.to_dict())
        model_stage = ModelStage(plan, 1, torch.device("cpu"), OptimizerConfig())
        model_stage.operations._counts_memory = False
        before = [*model_stage.module.weights, model_stage.gradients.current]
        live = LiveBytes(before)
        torch.manual_seed(1)
        message = torch.randn(model_stage.operations.activation_codec.message[0]).to(
            model_stage.module.dtype
        )
        with live:
            model_stage.begin(0, plan.schedules[0])
            model_stage.run_op("F", 0, message)
            received = model_stage.run_op("H", 0, None)
            model_stage.run_op("B", 0, received)
        losses.append(model_stage.loss())
        gradients.append(model_stage.gradients.current.clone())
        costs = stage_costs(uncached, *plan.stage_layers[1], with_head=True)
        planned = costs.need_bytes(1) - WorkingMemory.of_workload(uncached).messages
        # without moments, which the first update creates
        planned -= 8 * model_stage.gradients.current.numel()
        most = live.most + sum(t.nbytes for t in before)
        logits = samples * arch.head_tokens(samples) * arch.vocabulary
        in_fp32 = (8 if precision == "bf16" else 4) * min(logits, block_logits)
        of_compiled = max(workload.precision.compute.bytes * logits - in_fp32, 0)
        assert most <= planned <= 1.05 * most + of_compiled, (most, planned)
    for loss, gradient in zip(losses[1:], gradients[1:], strict=True):
        assert loss == pytest.approx(losses[0], rel=1e-6)
        atol = 1e-6 if precision == "fp32" else 1e-3
        torch.testing.assert_close(gradient, gradients[0], atol=atol, rtol=1e-4)


def test_calibration_measures_the_head_as_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, each freed before the next one: not the graphs of all of them at once."""
    from planner.executor.runtime.model_stage import ModelStage
    from planner.profiling.calibrate import measure_compute
    from tests.executor.live_bytes import LiveBytes

    max_logits = 2_000_000
    monkeypatch.setattr("planner.workload.layers.MAX_LOGITS", max_logits)
    arch = Architecture(Family.LLAMA, 2, 64, 4, 4, 128, 100_000, 128)
    workload = Workload.transformer("words", arch, batch_samples=1, microbatch_samples=1)
    plan = make_plan([[0, 1]], workload=workload)
    model_stage = ModelStage(plan, 1, torch.device("cpu"), OptimizerConfig())
    before = [*model_stage.module.weights, model_stage.gradients.current]
    # copies of parameters for the optimizer's measurement come later
    monkeypatch.setattr("planner.profiling.calibrate.REPEATS", 1)
    live = LiveBytes(before)
    optimizer_bytes = 4 * 4 * model_stage.gradients.current.numel()
    with live:
        measure_compute(model_stage)
    all_logits = 4 * arch.sequence * arch.vocabulary
    assert all_logits > 6 * 4 * max_logits
    # logits, their gradient and a temporary
    assert live.most < optimizer_bytes + 4 * 4 * max_logits < optimizer_bytes + all_logits


@pytest.mark.parametrize("grid", [[[0]], [[0, 1]]])
def test_a_tied_matrix_is_rounded_for_the_head(grid: list[list[int]]) -> None:
    """In bf16 the head's copy of it is held too, once, wherever the head is."""
    from planner.executor.runtime.model_stage import ModelStage

    arch = Architecture(Family.GPT2, 2, 64, 4, 4, 128, 4000, 16, tied=True)
    workload = Workload.transformer("small", arch, batch_samples=1, microbatch_samples=1)
    plan = make_plan(grid, workload=workload)
    for rank in grid[0]:
        model_stage = ModelStage(plan, rank, torch.device("cpu"), OptimizerConfig())
        rounded = sum(t.nbytes for t in model_stage.module.weights if t.dtype is torch.bfloat16)
        layers, head = plan.stage_layers[rank], rank == grid[0][-1]
        costs = stage_costs(workload, *layers, with_head=head)
        parameters = costs.gradient_bytes / workload.gradient_bytes_per_parameter
        copies = costs.state_bytes - parameters * workload.state_bytes_per_parameter
        assert rounded > 0
        assert copies == pytest.approx(rounded, rel=0.02)


def work(model_stage: ModelStage, stage: int) -> None:
    """F of three microbatches, then the rest of each."""

    def come() -> Tensor:
        made: Tensor = torch.randn(
            model_stage.operations.activation_codec.shape, dtype=model_stage.module.dtype
        )
        return made

    for b in range(3):
        model_stage.run_op("F", b, None if stage == 0 else come())
    for b in range(3):
        if stage == 1:
            model_stage.run_op("H", b, None)
        model_stage.run_op("B", b, come() if stage == 0 else None)
