"""Devices of several GPUs train as devices of one; every process here is a GPU's."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import planner as pl
from planner.training_plan.file import load_plan, save_plan
from planner.training_plan.model import Routing, TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.workload.calibration import Calibration
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import make_plan, tiny_workload
from tests.planning.test_workers import machines_of

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

from planner.executor.tensor_parallel.shards import Kind, shard_of  # noqa: E402
from tests.executor.forks import LIMIT_S, losses_by_step, losses_in, run_plan  # noqa: E402

GRID = [[0, 1], [2, 3]]
QWEN3 = Workload.transformer(
    "qwen3",
    Architecture(Family.LLAMA, 4, 32, 4, 2, 64, 61, 16, qk_norm=True, head_size=16),
    batch_samples=8,
    precision="fp32",
)


def plan_with(
    degree: int, workload: Workload, grid: list[list[int]] = GRID, **changes: object
) -> TrainingPlan:
    """A plan whose devices have so many GPUs."""
    return make_plan(grid, workload=workload.replace(tensor_parallel=degree)).replace(**changes)


def save(folder: Path, plan: TrainingPlan) -> Path:
    """Write a plan under its hash."""
    path = folder / f"{plan.content_hash}.json"
    save_plan(plan, path)
    return path


def trained(folder: Path, plan: TrainingPlan, *options: str) -> dict[int, float]:
    """Losses by step."""
    path = save(folder, plan)
    code, losses, said = losses_by_step(path, plan.cluster.network.ids, *options)
    assert code == 0, said
    return losses


@pytest.mark.parametrize(
    ("workload", "grid", "changes", "steps"),
    [
        (tiny_workload(), GRID, {}, 20),
        (QWEN3, [[0, 1]], {"clip": 0.5}, 6),
        pytest.param(
            tiny_workload("llama", tied=True),
            [[0], [1]],
            {"recompute": (1,)},
            6,
            marks=pytest.mark.slow,
        ),
    ],
    ids=["gpt2", "norms of queries and keys, clipped", "tied, recomputed"],
)
def test_losses_equal_those_of_single_gpus(
    tmp_path: Path,
    workload: Workload,
    grid: list[list[int]],
    changes: dict[str, object],
    steps: int,
) -> None:
    """Of two pipelines of two stages in 20 steps, and of all that differs within a stage."""
    one, two = (
        trained(tmp_path, plan_with(degree, workload, grid, **changes), "--steps", str(steps))
        for degree in (1, 2)
    )
    assert sorted(two) == list(range(steps))
    assert two == pytest.approx(one, rel=1e-5)
    assert one[steps - 1] != one[0]


@pytest.mark.slow
def test_four_gpus(tmp_path: Path) -> None:
    """A device of four GPUs, each with a quarter of the heads and tokens."""
    one, four = (plan_with(degree, tiny_workload(), [[0, 1]]) for degree in (1, 4))
    losses = trained(tmp_path, four, "--steps", "6")
    assert losses == pytest.approx(trained(tmp_path, one, "--steps", "6"), rel=1e-5)


@pytest.mark.slow
def test_head_on_the_first_stage(tmp_path: Path) -> None:
    """It shares the matrix of the embedding; the last stage sends it activations."""
    one, two = (
        make_plan(
            [[0, 1]],
            workload=tiny_workload("llama", tied=True).replace(tensor_parallel=degree),
            head="first",
        )
        for degree in (1, 2)
    )
    losses = trained(tmp_path, two, "--steps", "6")
    assert losses == pytest.approx(trained(tmp_path, one, "--steps", "6"), rel=1e-5)


def test_fp16_skips_the_same_steps(tmp_path: Path) -> None:
    """Its first loss scales are too large: steps are skipped on all GPUs, and after a resume."""
    arch = tiny_workload("llama").architecture
    assert arch is not None
    workload = Workload.transformer("fp16", arch, batch_samples=8, precision="fp16")
    one, two = (plan_with(degree, workload, [[0, 1]]) for degree in (1, 2))
    whole = trained(tmp_path, one, "--steps", "12")
    options = ("--checkpoint", str(tmp_path / "kept"), "--every", "4")
    losses = trained(tmp_path, two, "--steps", "4", *options)
    losses |= trained(tmp_path, two, "--steps", "12", "--resume", str(tmp_path / "kept"))
    assert losses == pytest.approx(whole, rel=2e-3)


@pytest.mark.parametrize(
    ("first", "then", "every", "delayed"),
    [
        pytest.param(2, 2, 3, False, marks=pytest.mark.slow),
        pytest.param(1, 2, 2, False, marks=pytest.mark.slow),
        pytest.param(2, 2, 2, True, marks=pytest.mark.slow),
    ],
    ids=["within an interval", "from one GPU", "pending"],
)
def test_outer_steps_resume(
    tmp_path: Path, first: int, then: int, every: int, delayed: bool
) -> None:
    """Global parameters, momentum and a mean that is not applied yet are kept."""
    sync = Sync(2, OuterOptimizer(), delayed=delayed)
    plans = {
        degree: plan_with(degree, tiny_workload("llama"), [[0], [1]], sync=sync)
        for degree in (1, 2)
    }
    whole = trained(tmp_path, plans[1], "--steps", "8")
    folder = str(tmp_path / "kept")
    losses = trained(
        tmp_path, plans[first], "--steps", "4", "--checkpoint", folder, "--every", str(every)
    )
    rest = trained(tmp_path, plans[then], "--steps", "8", "--resume", folder)
    assert min(rest) == 4 // every * every
    assert losses | rest == pytest.approx(whole, rel=1e-5)


def test_bf16(tmp_path: Path) -> None:
    """A tied matrix on one stage; sums of parts are rounded otherwise than whole sums."""
    arch = tiny_workload("llama", tied=True).architecture
    assert arch is not None
    workload = Workload.transformer("bf16", arch, batch_samples=8, precision="bf16")
    one, two = (plan_with(degree, workload, [[0], [1]]) for degree in (1, 2))
    losses = trained(tmp_path, two, "--steps", "10")
    assert losses == pytest.approx(trained(tmp_path, one, "--steps", "10"), rel=2e-3)
    assert losses[9] != losses[0]


def test_weights_evaluation_and_export(tmp_path: Path) -> None:
    """Continue from exported weights with outer steps: held-out losses are those of one GPU."""
    text = tmp_path / "text.txt"
    text.write_text("a stitch in time saves nine; " * 200)
    workload = tiny_workload("llama", words=256)
    sync = Sync(2, OuterOptimizer())
    one, two = (plan_with(degree, workload, sync=sync) for degree in (1, 2))
    first, results = str(tmp_path / "first"), {}
    trained(tmp_path, one, "--steps", "3", "--data", str(text), "--export", first)
    for degree, plan in ((1, one), (2, two)):
        path, exported = tmp_path / f"{degree}.json", tmp_path / f"exported{degree}"
        save_plan(plan, path)
        options = ["--data", str(text), "--eval-data", str(text), "--eval-every", "2"]
        options += ["--eval-batches", "2", "--weights", first, "--export", str(exported)]
        code, events, said = run_plan(path, plan.cluster.network.ids, "--steps", "4", *options)
        assert code == 0, said
        evaluated = [event["loss"] for event in events if event["event"] == "evaluated"]
        steps = [event for event in events if event["event"] != "evaluated"]
        (reports,) = (event["devices"] for event in events if event["event"] == "devices")
        assert all(0 < one["peak_bytes"] <= one["expected_bytes"] for one in reports)
        tensors = {
            name: tensor
            for file in sorted(exported.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        results[degree] = losses_in(steps), evaluated, tensors
    assert results[2][0] == pytest.approx(results[1][0], rel=1e-5)
    assert len(results[1][1]) == 2
    assert results[2][1] == pytest.approx(results[1][1], rel=1e-5)
    assert results[2][2].keys() == results[1][2].keys()
    for name, tensor in results[1][2].items():
        torch.testing.assert_close(results[2][2][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shards", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_devices_are_calibrated(tmp_path: Path, shards: int) -> None:
    """All GPUs of a worker together; training begins as without, and plans take the times."""
    arch, precision = tiny_workload("llama").architecture, "fp32" if shards == 1 else "bf16"
    assert arch is not None
    cluster = machines_of([4, 4])
    workload = Workload.transformer("llama", arch, batch_samples=8, precision=precision)
    fields: dict[str, Any] = {"stages": 2, "tensor_parallel": 2, "clip": 0.5}
    fields["optimizer_shards"] = shards
    plan = pl.plan(cluster, workload, recompute=(1,), stop=pl.MaxIterations(2), **fields).plan
    assert plan is not None
    path = tmp_path / "calibration.json"
    plain = trained(tmp_path, plan, "--steps", "2")
    assert trained(tmp_path, plan, "--steps", "2", "--calibrate", str(path)) == plain
    calibration = Calibration.load(path)
    assert set(calibration.times) == set(plan.cluster.network.ids)
    for name, times in calibration.times.items():
        assert min(times["forward_s"], times["backward_s"], times["update_s"]) > 0
        last = plan.stage_of[plan.cluster.network.index_of(name)] == 1
        assert (times["head_s"] > 0) == last
    if shards == 1:
        made = pl.plan(cluster, workload, calibration=calibration, stop=pl.Effort(0.02), **fields)
        assert made.plan is not None and made.plan.compute_times.source != "flops"
        assert pl.check(made.plan, cluster) == []


def test_a_lost_gpu_ends_the_run(tmp_path: Path) -> None:
    """With its device's name, leaving no process."""
    plan = plan_with(2, tiny_workload(), [[0, 1]])
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    with ThreadPoolExecutor(1) as pool:
        options = ("--steps", "100000")
        run = pool.submit(run_plan, path, plan.cluster.network.ids, *options, gpu_forks=False)
        deadline = time.monotonic() + LIMIT_S
        while len(found := followers(path)) < 2 or not all(map(has_begun, found)):
            assert time.monotonic() < deadline and not run.done()
            time.sleep(0.1)
        os.kill(found[0], signal.SIGKILL)
        code, _, said = run.result()
    assert code == 3
    assert "the process of its GPU 1 has ended (signal 9)" in said[-1]
    assert said[-1].startswith("planner.executor: ended: device '")
    while followers(path):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def has_begun(process: int) -> bool:
    """Whether a process has mapped the memory through which gradients are exchanged."""
    with suppress(OSError):
        return "planner-exchange" in Path(f"/proc/{process}/maps").read_text()
    return False


def followers(plan: Path) -> list[int]:
    """Processes of other GPUs than the first of a device."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if b"planner.executor.launch.follow_gpu" in words and str(plan).encode() in words:
                found.append(int(process.name))
    return found


def test_a_checkpoint_resumes_on_other_numbers_of_gpus(tmp_path: Path) -> None:
    """Files are those of single GPUs: 6 steps on two GPUs each, then 6 on one and on two."""
    one, two = (plan_with(degree, tiny_workload()) for degree in (1, 2))
    whole = trained(tmp_path, one, "--steps", "12")
    folder = str(tmp_path / "kept")
    first = trained(tmp_path, two, "--steps", "6", "--checkpoint", folder, "--every", "6")
    for plan in (one, two):
        rest = trained(tmp_path, plan, "--steps", "12", "--resume", folder)
        assert first | rest == pytest.approx(whole, rel=1e-5)
        assert sorted(rest) == list(range(6, 12))


@pytest.mark.parametrize(
    ("workload", "counts"),
    [
        pytest.param(tiny_workload(), [2, 1, 1, 4], id="1, 2 and 4 GPUs"),
        pytest.param(
            tiny_workload("llama", tied=True).replace(optimizer_shards=2),
            [1, 2, 2, 1],
            id="state in shards",
        ),
    ],
)
def test_devices_of_different_numbers_of_gpus(
    tmp_path: Path, workload: Workload, counts: list[int]
) -> None:
    """Also those of a stage, which average with each other; resumed where all have one."""
    one = plan_with(1, workload, clip=0.5)
    devices = replace(one.cluster.devices, gpu_counts=counts)
    mixed = one.replace(
        cluster=one.cluster.replace(devices=devices),
        workload=workload.replace(tensor_parallel=max(counts)),
    )
    assert load_plan(save(tmp_path, mixed)).gpu_counts == tuple(counts)
    whole, folder = trained(tmp_path, one, "--steps", "8"), str(tmp_path / "kept")
    losses = trained(tmp_path, mixed, "--steps", "6", "--checkpoint", folder, "--every", "6")
    losses |= trained(tmp_path, one, "--steps", "8", "--resume", folder)
    assert losses == pytest.approx(whole, rel=1e-5)


def test_what_workers_do_not_support_is_refused(tmp_path: Path) -> None:
    """In one line, before anything starts."""
    plan = plan_with(2, tiny_workload(), [[0], [1]])
    names = plan.cluster.network.ids
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    code, _, said = run_plan(path, names, "--steps", "3", "--elastic")
    assert code == 2 and "--elastic: is not supported with devices of 2 GPUs" in said[0]
    save_plan(plan.replace(wiring="stochastic", routing=Routing()), path)
    code, _, said = run_plan(path, names, "--steps", "3")
    assert code == 2 and "do not choose paths; plan without --wiring stochastic" in said[0]


@pytest.mark.slow
def test_plain_gradient_descent(tmp_path: Path) -> None:
    """It has no moments to keep."""
    one, two = (plan_with(degree, tiny_workload("llama"), [[0, 1]]) for degree in (1, 2))
    options = ("--steps", "4", "--optimizer", "sgd", "--checkpoint", str(tmp_path / "kept"))
    losses = trained(tmp_path, two, *options, "--every", "2")
    assert losses == pytest.approx(trained(tmp_path, one, *options[:4]), rel=1e-5)
    rest = trained(tmp_path, two, "--steps", "6", *options[2:4], "--resume", str(tmp_path / "kept"))
    assert sorted(rest) == [4, 5]


@pytest.mark.parametrize("kind", [Family.GPT2, Family.LLAMA])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_make_up_each_parameter(kind: Family, size: int) -> None:
    """Every entry lies on one GPU, but for what all have; queries stay with their keys."""
    arch = Architecture(kind, 1, 32, 8, 4, 64, 61, 16)
    q, kv = 8 * 4, 4 * 4
    shapes = {
        "stage.layers.0.attention.qkv.weight": (q + 2 * kv, 32),
        "stage.layers.0.attention.out.weight": (32, q),
        "stage.layers.0.feed_forward.up.weight": (64, 32),
        "stage.layers.0.feed_forward.down.weight": (32, 64),
        "stage.stem.tokens.weight": (61, 32),
        "head.project.weight": (61, 32),
    }
    for name, shape in shapes.items():
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
        again = torch.full(shape, -1.0)
        for index in range(size):
            shard = shard_of(arch, name, index, size)
            assert shard.kind is Kind.PARTS
            shard.put(shard.of(whole), again)
        assert torch.equal(again, whole), name
    qkv = shard_of(arch, "stage.layers.0.attention.qkv.weight", size - 1, size).entries
    assert qkv is not None and qkv[-1] == q + 2 * kv - 1 and len(qkv) == (q + 2 * kv) // size
    assert shard_of(arch, "stage.layers.0.norm1.weight", 0, size).kind is Kind.WHOLE
    assert shard_of(arch, "stage.layers.0.attention.out.bias", 0, size).kind is Kind.FIRST
