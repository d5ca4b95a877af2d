"""What a stage keeps of a microbatch is what planning counts."""

from __future__ import annotations

import pytest

from planner.workload.costs import stage_costs
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import make_plan

torch = pytest.importorskip("torch")

TOLERANCE = 0.07
"""One of GPT-2's 17 elements is dropout's, which the executor has not; planning leaves out norms'
statistics, rotary tables, and the stage's output, which waits for its gradient."""


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
@pytest.mark.parametrize(
    ("kind", "kv_heads", "ffn"),
    [("gpt2", 8, 1024), ("llama", 8, 704), ("llama", 2, 768), ("llama", 4, 1280)],
)
def test_activations_are_as_many_bytes_as_planned(
    kind: str, kv_heads: int, ffn: int, precision: str
) -> None:
    """Counted where autograd saves them, storage by storage, weights left out."""
    from planner.executor.learner import Learner

    arch = Architecture(Family(kind), 4, 256, 8, kv_heads, ffn, 1000, 128)
    workload = Workload.transformer(
        "small", arch, batch_samples=4, microbatch_samples=2, precision=precision
    )
    plan = make_plan([[0, 1]], workload=workload)
    learner = Learner(plan, 1, torch.device("cpu"), learning_rate=1e-3)
    learner.begin(0, plan.schedules[0])
    planned = stage_costs(workload, 2, 4).saved_bytes
    for b in (1, 2):
        learner.operate("F", b - 1, torch.randn(learner.shape, dtype=learner.dtype))
        assert learner.kept.most == pytest.approx(b * planned, rel=TOLERANCE)
    assert learner.kept.bytes() < learner.kept.most
