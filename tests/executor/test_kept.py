"""What a stage keeps of a microbatch is what planning counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from planner.workload.costs import stage_costs
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import make_plan

if TYPE_CHECKING:
    from torch import Tensor

    from planner.executor.learner import Learner

torch = pytest.importorskip("torch")

from planner.executor.optimizing import Optimizing  # noqa: E402

TOLERANCE = 0.07
"""One of GPT-2's 17 elements is dropout's, which the executor has not; planning leaves out norms'
statistics, rotary tables, and the stage's output, which waits for its gradient."""


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
    from planner.executor.learner import Learner

    arch = Architecture(Family(kind), 4, 256, 8, kv_heads, ffn, 1000, 128, **more)
    workload = Workload.transformer(
        "small", arch, batch_samples=4, microbatch_samples=2, precision=precision
    )
    plan = make_plan([[0, 1]], workload=workload)
    learner = Learner(plan, 1, torch.device("cpu"), Optimizing())
    learner.begin(0, plan.schedules[0])
    planned = stage_costs(workload, 2, 4).saved_bytes
    for b in (1, 2):
        learner.operate("F", b - 1, torch.randn(learner.boundary.shape, dtype=learner.dtype))
        assert learner.kept.most == pytest.approx(b * planned, rel=TOLERANCE)
    assert learner.kept.bytes() < learner.kept.most


@pytest.mark.parametrize(
    ("kind", "words", "samples", "again", "stage", "precision"),
    [
        ("gpt2", 8000, 1, False, 0, "bf16"),
        ("gpt2", 100, 2, True, 0, "fp32"),
        ("gpt2", 4000, 1, True, 1, "bf16"),
        ("llama", 8000, 4, False, 1, "bf16"),
        ("llama", 8000, 4, False, 0, "fp32"),
        ("llama", 100, 4, False, 0, "bf16"),
    ],
)
def test_the_executor_holds_what_it_says(
    kind: str, words: int, samples: int, again: bool, stage: int, precision: str
) -> None:
    """Most bytes alive in two steps of three microbatches, whatever makes them."""
    from planner.executor.learner import Learner
    from tests.executor.live_bytes import LiveBytes

    ffn = 1024 if kind == "gpt2" else 704
    arch = Architecture(Family(kind), 4, 256, 8, 4, ffn, words, 128)
    workload = Workload.transformer(
        "small",
        arch,
        batch_samples=3 * samples,
        microbatch_samples=samples,
        precision=precision,
    )
    plan = make_plan([[0, 1]], workload=workload).replace(recompute=(again, again))
    learner = Learner(plan, stage, torch.device("cpu"), Optimizing())
    learner._counting = False
    before = [*learner.weights, learner.gradients()]
    live = LiveBytes(before)
    for step in range(2):
        with live:
            learner.begin(step, plan.schedules[0])
            work(learner, stage)
            learner.update()
    most = live.most + sum(t.nbytes for t in before)
    head = stage == 1
    said = executed_bytes(workload, *plan.stage_layers[stage], 3, with_head=head, recompute=again)
    assert 0.97 * most < said.total < 1.2 * most


@pytest.mark.parametrize("grid", [[[0]], [[0, 1]]])
def test_a_tied_matrix_is_rounded_for_the_head(grid: list[list[int]]) -> None:
    """In bf16 the head's copy of it is held too, once, wherever the head is."""
    from planner.executor.learner import Learner

    arch = Architecture(Family.GPT2, 2, 64, 4, 4, 128, 4000, 16, tied=True)
    workload = Workload.transformer("small", arch, batch_samples=1, microbatch_samples=1)
    plan = make_plan(grid, workload=workload)
    for rank in grid[0]:
        learner = Learner(plan, rank, torch.device("cpu"), Optimizing())
        rounded = sum(t.nbytes for t in learner.weights if t.dtype is torch.bfloat16)
        layers = plan.stage_layers[rank]
        said = executed_bytes(workload, *layers, 1, with_head=rank == grid[0][-1])
        assert rounded > 0
        assert said.rounded_weights == pytest.approx(rounded, rel=0.02)


def work(learner: Learner, stage: int) -> None:
    """F of three microbatches, then the rest of each."""

    def come() -> Tensor:
        made: Tensor = torch.randn(learner.boundary.shape, dtype=learner.dtype)
        return made

    for b in range(3):
        learner.operate("F", b, None if stage == 0 else come())
    for b in range(3):
        if stage == 1:
            learner.operate("H", b, None)
        learner.operate("B", b, come() if stage == 0 else None)
