"""The same plans on GPUs: several ranks share one, or have one each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.training_plan.file import save_plan
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.workload.workload import Workload
from tests.conftest import levels, make_plan, tiny_workload
from tests.executor.launch import torchrun

torch = pytest.importorskip("torch")

from planner.executor.comm.device_collectives import nccl_shares_gpus  # noqa: E402
from tests.executor.test_device_collectives import losses_of  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


several_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2 and not nccl_shares_gpus(),
    reason="needs two CUDA devices, or NCCL 2.30 and NCCL_MULTI_RANK_GPU_ENABLE=1",
)


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
            "--no-compile",
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


@several_gpus
def test_averaging_by_nccl(tmp_path: Path) -> None:
    """One stage of two devices: losses are those of averaging by way of the host."""
    plan = make_plan([[0], [1]], workload=tiny_workload())
    want, _ = losses_of(plan, tmp_path, "--no-compile", device="cuda")
    found, _ = losses_of(plan, tmp_path, "--no-compile", "--direct", "nccl", device="cuda")
    assert found == pytest.approx(want, rel=1e-6)


@several_gpus
@pytest.mark.parametrize("rare", ["levels", "outer", "bf16"])
def test_phases_by_nccl(rare: str, tmp_path: Path) -> None:
    """Reduce and spread within sites, outer steps, and sums in bf16; clipped."""
    precision = "bf16" if rare == "bf16" else "fp32"
    arch = tiny_workload("llama").architecture
    assert arch is not None
    workload = Workload.transformer("llama", arch, batch_samples=8, precision=precision)
    plan = make_plan([[0], [1], [2], [3]], workload=workload, clip=1.0)
    if rare == "outer":
        plan = plan.replace(sync=Sync(2, OuterOptimizer()), clip=None)
    else:
        plan = plan.replace(averaging=(levels([(0, 1), (2, 3)], (0.5, 0.5)),))
    want, _ = losses_of(plan, tmp_path, "--no-compile", device="cuda")
    found, _ = losses_of(plan, tmp_path, "--no-compile", "--direct", "nccl", device="cuda")
    assert found == pytest.approx(want, rel=1e-2 if rare == "bf16" else 1e-5)


@several_gpus
@pytest.mark.parametrize(
    ("precision", "shards", "options"),
    [
        ("fp32", 1, ("--no-compile",)),
        ("fp32", 2, ("--no-compile",)),
        ("bf16", 2, ("--compile",)),
    ],
)
def test_tensor_parallelism_by_nccl(
    precision: str, shards: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Devices of two GPUs train as devices of one, and resume from a checkpoint."""
    arch = tiny_workload("llama").architecture
    assert arch is not None
    workload = Workload.transformer("llama", arch, batch_samples=8, precision=precision)
    one = make_plan([[0], [1]], workload=workload, clip=1.0)
    two = make_plan(
        [[0], [1]],
        workload=workload.replace(tensor_parallel=2, optimizer_shards=shards),
        clip=1.0,
    )
    want, _ = losses_of(one, tmp_path, *options, device="cuda")
    kept = str(tmp_path / "kept")
    kept_every = ("--checkpoint", kept, "--every", "5")
    found, _ = losses_of(two, tmp_path, *options, *kept_every, device="cuda")
    assert found == pytest.approx(want, rel=1e-2 if precision == "bf16" else 1e-5)
    resumed = torchrun(
        2,
        *("-m", "planner.executor", str(tmp_path / "plan.json"), "--device", "cuda", *options),
        *("--devices", *two.cluster.network.ids, "--steps", "7", "--resume", kept),
    )
    assert resumed.returncode == 0, resumed.stderr[-3000:]
