"""Devices of several GPUs train as devices of one; every process here is a GPU's."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from planner.executor.launch.gpu_processes import SHARED_MEMORY
from planner.training_plan.file import save_plan
from planner.training_plan.model import Routing, TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import make_plan, tiny_workload

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

from planner.executor.tensor_parallel.shards import Kind, shard_of  # noqa: E402
from tests.executor.forks import losses_by_step, losses_in, run_plan  # noqa: E402

GRID = [[0, 1], [2, 3]]
FILES = "planner-worker-*"
QWEN3 = Architecture(Family.LLAMA, 4, 32, 4, 2, 64, 61, 16, qk_norm=True, head_size=16)


def plan_with(
    degree: int, workload: Workload, grid: list[list[int]] = GRID, **changes: object
) -> TrainingPlan:
    """A plan whose devices have so many GPUs."""
    return make_plan(grid, workload=workload.replace(tensor_parallel=degree)).replace(**changes)


def trained(folder: Path, plan: TrainingPlan, *options: str) -> dict[int, float]:
    """Losses by step."""
    path = folder / f"{plan.content_hash}.json"
    save_plan(plan, path)
    code, losses, said = losses_by_step(path, plan.cluster.network.ids, *options)
    assert code == 0, said
    return losses


@pytest.mark.parametrize(
    ("workload", "grid", "changes"),
    [
        (tiny_workload(), GRID, {}),
        (tiny_workload("llama"), GRID, {"clip": 0.5}),
        (tiny_workload("llama", tied=True), [[0], [1]], {"recompute": (True,)}),
        (Workload.transformer("qwen3", QWEN3, batch_samples=8, precision="fp32"), [[0, 1]], {}),
        (tiny_workload(), [[0], [1]], {"sync": Sync(2, OuterOptimizer())}),
    ],
    ids=["gpt2", "llama clipped", "tied, recomputed", "norms of queries and keys", "outer steps"],
)
def test_losses_equal_those_of_single_gpus(
    tmp_path: Path, workload: Workload, grid: list[list[int]], changes: dict[str, object]
) -> None:
    """20 steps of two pipelines, also against one GPU that holds everything."""
    one = trained(tmp_path, plan_with(1, workload, grid, **changes), "--steps", "20")
    two = trained(tmp_path, plan_with(2, workload, grid, **changes), "--steps", "20")
    assert sorted(two) == list(range(20))
    assert two == pytest.approx(one, rel=1e-5)
    assert one[19] != one[0]


def test_four_gpus(tmp_path: Path) -> None:
    """A device of four GPUs, each with a quarter of the heads and tokens."""
    one, four = (plan_with(degree, tiny_workload(), [[0, 1]]) for degree in (1, 4))
    losses = trained(tmp_path, four, "--steps", "6")
    assert losses == pytest.approx(trained(tmp_path, one, "--steps", "6"), rel=1e-5)


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


@pytest.mark.parametrize("delayed", [False, True])
def test_outer_steps_resume(tmp_path: Path, delayed: bool) -> None:
    """Resume in the middle of an interval, or with a pending outer step, on other GPUs."""
    sync = Sync(2, OuterOptimizer(), delayed=delayed)
    one, two = (
        plan_with(degree, tiny_workload("llama"), [[0], [1]], sync=sync) for degree in (1, 2)
    )
    whole = trained(tmp_path, one, "--steps", "8")
    for first, then in ((two, one), (one, two)):
        folder = tmp_path / first.content_hash
        options = ("--checkpoint", str(folder), "--every", "2" if delayed else "3")
        losses = trained(tmp_path, first, "--steps", "4", *options)
        losses |= trained(tmp_path, then, "--steps", "8", "--resume", str(folder))
        assert losses == pytest.approx(whole, rel=1e-5)


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
    """Train on one GPU each, export, continue on two each: held-out losses are those of one."""
    text = tmp_path / "text.txt"
    text.write_text("a stitch in time saves nine; " * 200)
    workload = tiny_workload("llama", words=256)
    one, two = (plan_with(degree, workload) for degree in (1, 2))
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


def test_a_lost_gpu_ends_the_run(tmp_path: Path) -> None:
    """With its device's name, leaving no process and no file."""
    plan = plan_with(2, tiny_workload(), [[0, 1]])
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    before = set(SHARED_MEMORY.glob(FILES))
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(run_plan, path, plan.cluster.network.ids, "--steps", "100000")
        deadline = time.monotonic() + 60
        # files are removed once all processes have opened them
        while len(found := followers(path)) < 2 or set(SHARED_MEMORY.glob(FILES)) > before:
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
    assert set(SHARED_MEMORY.glob(FILES)) <= before


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
    assert code == 2 and "do not choose paths; plan with --wiring fixed" in said[0]


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
