"""The same plans on GPUs: several ranks share one, or have one each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.training_plan.file import save_plan
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.workload.workload import Workload
from tests.conftest import make_plan, tiny_workload
from tests.executor.launch import torchrun

torch = pytest.importorskip("torch")

from tests.executor.test_device_collectives import losses_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize(
    ("precision", "tolerance", "rare"),
    [("fp32", 1e-3, False), ("bf16", 1e-2, False), ("fp32", 1e-2, True)],
)
def test_two_by_two_ranks_share_one_gpu(
    precision: str, tolerance: float, rare: bool, tmp_path: Path
) -> None:
    """Losses fall as on the CPU; device memory and times are told and calibrated.

    Once with 8-bit boundaries and outer steps that come late.
    """
    like = tiny_workload()
    workload = Workload.transformer(
        like.name, like.architecture, precision=precision, batch_samples=like.batch_samples
    )
    if rare:
        workload = workload.with_boundary_codec("int8")
    plan = make_plan([[0, 3], [2, 1]], workload=workload)
    if rare:
        plan = plan.replace(sync=Sync(2, OuterOptimizer(), delayed=True))
    path, times = tmp_path / "plan.json", tmp_path / "times.json"
    save_plan(plan, path)
    losses = {}
    for device in ("cuda", "cpu"):
        done = torchrun(
            4,
            *("-m", "planner.executor", str(path), "--devices", *plan.cluster.network.ids),
            *("--steps", "5", "--device", device, "--events", "--calibrate", str(times)),
        )
        assert done.returncode == 0, done.stderr[-3000:]
        events = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
        # losses come late, and belong to the step they are of
        told_of = {e["loss_step"]: e["loss"] for e in events if e["event"] == "step"}
        told_of |= {e["step"]: e["loss"] for e in events if e["event"] == "loss"}
        losses[device] = [told_of[k] for k in range(5)]
        (told,) = (e["devices"] for e in events if e["event"] == "devices")
        where = "GPU" if device == "cuda" else "kept"
        assert all(where in d["peak_is"] and d["peak_bytes"] > 0 for d in told) and len(told) == 4
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=tolerance)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_averaging_by_nccl(tmp_path: Path) -> None:
    """One stage of two devices: losses are those of averaging by way of the host."""
    plan = make_plan([[0], [1]], workload=tiny_workload())
    want, _ = losses_of(plan, tmp_path, device="cuda")
    found, _ = losses_of(plan, tmp_path, "--direct", "nccl", device="cuda")
    assert found == pytest.approx(want, rel=1e-6)
