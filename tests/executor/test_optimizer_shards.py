"""Devices that share their stage's optimizer state train as devices that hold all of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import planner as pl
from planner.planning.averaging.aggregators import on_cluster
from planner.simulator.simulator import predict
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.workload.layers import Architecture, Family
from planner.workload.workload import Workload
from tests.conftest import levels, make_plan, random_network, tiny_workload

torch = pytest.importorskip("torch")
load_file = pytest.importorskip("safetensors.torch").load_file

from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402
from planner.executor.runtime.optimizer_segments import joined_segments  # noqa: E402
from tests.executor.forks import losses_by_step, run_plan  # noqa: E402
from tests.executor.reference import train_single  # noqa: E402

GRID = [[0, 1], [2, 3]]
TIED = Workload.transformer(
    "tied",
    Architecture(Family.LLAMA, 4, 32, 4, 2, 64, 61, 16, tied=True),
    batch_samples=8,
    precision="fp32",
)


def sharded(
    workload: Workload,
    grid: list[list[int]] = GRID,
    shards: int = 2,
    shares: tuple[float, ...] = (),
    clip: float | None = None,
) -> TrainingPlan:
    """A plan whose devices hold one part in so many of their stage's optimizer state."""
    plan = make_plan(grid, workload=workload.replace(optimizer_shards=shards), clip=clip)
    return with_shares(plan, shares) if shares else plan


def with_shares(plan: TrainingPlan, shares: tuple[float, ...]) -> TrainingPlan:
    """The plan whose stages have other shares."""
    stages = len(plan.stage_layers)
    averaging = tuple(
        tuple(tuple(replace(g, shares=shares) for g in groups) for groups in rounds)
        for rounds in plan.averaging[:stages]
    )
    plan = plan.replace(averaging=averaging + plan.averaging[stages:])
    return plan.replace(predicted=predict(plan))


def train(
    plan: TrainingPlan,
    folder: Path,
    *options: str,
    module: str = "planner.executor.__main__",
) -> dict[int, float]:
    """Losses by step."""
    path = folder / f"{plan.content_hash[:8]}.json"
    save_plan(plan, path)
    code, losses, said = losses_by_step(path, plan.cluster.network.ids, *options, module=module)
    assert code == 0, said
    return losses


def in_16_bits(workload: Workload, precision: str) -> Workload:
    """The same model in another precision."""
    assert workload.architecture is not None
    other = Workload.transformer(
        workload.name, workload.architecture, batch_samples=8, precision=precision
    )
    return other.replace(tensor_parallel=workload.tensor_parallel)


def with_server(
    workload: Workload, grid: list[list[int]], server: int, stage: int, clip: float | None = None
) -> TrainingPlan:
    """A plan in which a device without a stage owns half of a stage's optimizer state."""
    devices = len(grid) * len(grid[0]) + 1
    others = [d for d in range(devices) if d != server]
    network = random_network(devices)
    cluster = pl.Cluster(
        network, pl.Devices(1e12, 16e9, can_compute=[d != server for d in range(devices)])
    )
    whole = make_plan(
        grid,
        workload=workload.replace(optimizer_shards=2),
        network=network.subset(others),
        clip=clip,
    )
    plan = on_cluster(whole, cluster, others)
    averaging = list(plan.averaging)
    members = (*plan.assignment.groups[stage], server)
    flags = (*(True for _ in members[1:]), False)
    shares = (*(0.5 / len(members[1:]) for _ in members[1:]), 0.5)
    averaging[stage] = tuple(
        tuple(
            replace(g, members=members, shares=shares, contributes=flags, receives=flags)
            for g in groups
        )
        for groups in averaging[stage]
    )
    plan = plan.replace(averaging=tuple(averaging))
    return plan.replace(predicted=predict(plan))


SLOW = pytest.mark.slow
THREE = [[0], [1], [2]]
WORKERS = TIED.replace(tensor_parallel=2)
UNTIED_WORKERS = tiny_workload("llama").replace(tensor_parallel=2)
"""No sum is of more than two addends, whose order depends on the owners."""


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        pytest.param(sharded(tiny_workload()), 20, id="gpt2"),
        pytest.param(sharded(TIED, clip=0.05), 6, id="tied and clipped", marks=SLOW),
        pytest.param(
            sharded(tiny_workload(), THREE, shares=(0.5, 0.125, 0.375), clip=0.5),
            6,
            id="unequal shares",
            marks=SLOW,
        ),
        pytest.param(
            sharded(tiny_workload(), THREE, shares=(0.5, 0.5, 0.0), clip=0.5), 6, id="no share"
        ),
        pytest.param(
            with_server(tiny_workload(), GRID, server=1, stage=1), 6, id="a server", marks=SLOW
        ),
        pytest.param(
            with_server(TIED, GRID, server=0, stage=0, clip=0.05), 6, id="tied, clipped by it"
        ),
        pytest.param(sharded(WORKERS, clip=0.05), 6, id="workers of two GPUs"),
        pytest.param(
            sharded(
                tiny_workload().replace(tensor_parallel=2), THREE, shares=(0.5, 0.5, 0.0), clip=0.5
            ),
            6,
            id="workers, of which one has no share",
            marks=SLOW,
        ),
        pytest.param(
            with_server(WORKERS, GRID, server=1, stage=1, clip=0.05),
            6,
            id="workers and a server",
            marks=SLOW,
        ),
    ],
)
def test_losses_equal_those_of_one_process(tmp_path: Path, plan: TrainingPlan, steps: int) -> None:
    losses = train(plan, tmp_path, "--steps", str(steps))
    expected = [loss for loss, _ in train_single(plan, steps, OptimizerConfig())]
    assert [losses[t] for t in range(steps)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("workload", "precision"),
    [
        pytest.param(TIED, "bf16", id="llama in bf16"),
        pytest.param(tiny_workload(), "bf16", id="gpt2 in bf16", marks=SLOW),
        pytest.param(TIED, "fp16", id="llama in fp16", marks=SLOW),
        pytest.param(WORKERS, "bf16", id="workers in bf16"),
        pytest.param(WORKERS, "fp16", id="workers in fp16", marks=SLOW),
    ],
)
def test_in_16_bits_losses_equal_those_of_one_process(
    tmp_path: Path, workload: Workload, precision: str
) -> None:
    """Of which devices have the rounded weights alone, and their part of the fp32 ones."""
    plan = sharded(in_16_bits(workload, precision), clip=0.5)
    losses = train(plan, tmp_path, "--steps", "8")
    expected = [loss for loss, _ in train_single(plan, 8, OptimizerConfig())]
    assert [losses[t] for t in range(8)] == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize(
    ("workload", "precision"),
    [
        (TIED, "fp32"),
        pytest.param(TIED, "bf16", marks=SLOW),
        pytest.param(UNTIED_WORKERS, "fp32", marks=SLOW),
        pytest.param(UNTIED_WORKERS, "bf16", marks=SLOW),
    ],
    ids=["fp32", "bf16", "workers in fp32", "workers in bf16"],
)
def test_parameters_are_bit_for_bit_those_of_whole_optimizers(
    tmp_path: Path, workload: Workload, precision: str
) -> None:
    """Sums of two do not depend on who adds them, and what is returned is rounded anyway."""
    workload = workload if precision == "fp32" else in_16_bits(workload, precision)
    found = []
    for shards in (1, 2):
        plan = make_plan(GRID, workload=workload.replace(optimizer_shards=shards), clip=0.05)
        folder = tmp_path / str(shards)
        train(plan, tmp_path, "--steps", "5", "--checkpoint", str(folder), "--every", "5")
        stages = []
        for group in plan.assignment.groups:
            files = [folder / "step-000005" / f"device-{d:04d}.safetensors" for d in group]
            held = {name: tensor for file in files for name, tensor in load_file(file).items()}
            if shards > 1 and workload.tied_parameters:
                # of the tied matrix the devices of another stage have a part
                held = {k: v for k, v in held.items() if "tokens" not in k and "project" not in k}
            stages.append(joined_segments(held))
        found.append(stages)
    for whole, joined in zip(*found, strict=True):
        assert joined
        for name, tensor in joined.items():
            assert torch.equal(tensor, whole[name]), name


@pytest.mark.parametrize("direct", [False, True], ids=["by the host", "stages by collectives"])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("shards", [1, 2])
def test_vectors_move_between_device_and_host(
    tmp_path: Path, clip: float | None, shards: int, direct: bool
) -> None:
    """Clipped and updated on the device; averaged on the host, but for tied parameters or all."""
    plan = sharded(TIED, shards=shards, clip=clip)
    losses = train(plan, tmp_path, "--steps", "5")
    options = ("--direct", "gloo") if direct else ()
    late = train(plan, tmp_path, "--steps", "5", *options, module="tests.executor.late_rank")
    assert late == pytest.approx(losses, rel=1e-6)
    assert losses[4] != losses[0]


def test_sites_of_a_tied_matrix_are_counted_once(tmp_path: Path) -> None:
    """Its groups differ from those of the stages, of which all devices own a part."""
    grid = [[0, 4], [1, 5], [2, 6], [3, 7]]
    plan = sharded(TIED, grid, clip=0.05)
    *stages, _ = plan.averaging
    plan = plan.replace(averaging=(*stages, levels([(0, 1, 2, 3), (4, 5, 6, 7)], (0.5, 0.5))))
    plan = plan.replace(predicted=predict(plan))
    losses = train(plan, tmp_path, "--steps", "4")
    expected = [loss for loss, _ in train_single(plan, 4, OptimizerConfig())]
    assert [losses[t] for t in range(4)] == pytest.approx(expected, rel=1e-5)


def test_of_sites_each_updates_all_parameters(tmp_path: Path) -> None:
    """Slices are exchanged between sites, and each site's owners spread them."""
    plan = sharded(tiny_workload(), [[0], [1], [2], [3]], clip=0.05)
    plan = plan.replace(averaging=(levels([(0, 1), (2, 3)], (0.5, 0.5)),))
    plan = plan.replace(predicted=predict(plan))
    losses = train(plan, tmp_path, "--steps", "6")
    expected = [loss for loss, _ in train_single(plan, 6, OptimizerConfig())]
    assert [losses[t] for t in range(6)] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "second",
    [
        pytest.param(sharded(TIED), id="the same plan", marks=SLOW),
        pytest.param(sharded(TIED, [[0, 1, 2], [3, 4, 5]]), id="more stages", marks=SLOW),
        pytest.param(make_plan([[0, 1]], workload=TIED), id="whole", marks=SLOW),
        pytest.param(with_server(TIED, GRID, server=4, stage=1), id="a server"),
        pytest.param(sharded(WORKERS, [[0, 1, 2], [3, 4, 5]]), id="workers", marks=SLOW),
    ],
)
def test_training_goes_on_from_a_checkpoint(tmp_path: Path, second: TrainingPlan) -> None:
    """Of shards with shards, whole, and of whole ones with shards."""
    first, folder = sharded(TIED), tmp_path / "checkpoints"
    expected = train(first, tmp_path, "--steps", "8")
    at = ("--checkpoint", str(folder), "--every", "4")
    train(first, tmp_path, "--steps", "4", *at)
    resumed = train(second, tmp_path, "--steps", "8", "--resume", str(folder), *at)
    for step in range(4, 8):
        assert resumed[step] == pytest.approx(expected[step], rel=1e-5)
    # and back
    last = train(first, tmp_path, "--steps", "10", "--resume", str(folder))
    further = train(first, tmp_path, "--steps", "10")
    assert last[9] == pytest.approx(further[9], rel=1e-5)


@pytest.mark.parametrize(
    ("workload", "precision"),
    [
        pytest.param(TIED, "fp32", marks=SLOW),
        (TIED, "bf16"),
        pytest.param(UNTIED_WORKERS, "bf16", marks=SLOW),
    ],
    ids=["fp32", "bf16", "workers in bf16"],
)
def test_it_is_exported_in_fp32(tmp_path: Path, workload: Workload, precision: str) -> None:
    """As the same model that whole optimizers train."""
    exported = []
    workload = workload if precision == "fp32" else in_16_bits(workload, precision)
    for shards in (1, 2):
        plan = make_plan(GRID, workload=workload.replace(optimizer_shards=shards))
        if shards == 2 and workload.tensor_parallel == 1 and precision == "bf16":
            plan = with_server(workload, GRID, server=4, stage=0)
        folder = tmp_path / f"model-{shards}"
        train(plan, tmp_path, "--steps", "3", "--export", str(folder))
        files = map(load_file, folder.glob("*.safetensors"))
        exported.append({name: tensor for tensors in files for name, tensor in tensors.items()})
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])


@pytest.mark.slow
def test_a_checkpoint_is_exported_in_fp32(tmp_path: Path) -> None:
    """Though devices have but rounded parameters; of the tied matrix two stages have parts."""
    from planner.huggingface.export import Export, export_checkpoint

    exported = []
    workload = in_16_bits(TIED, "bf16")
    plans = [
        make_plan(GRID, workload=workload),
        make_plan(GRID, workload=workload.replace(optimizer_shards=2)),
        with_server(workload, GRID, server=4, stage=0),
    ]
    for number, plan in enumerate(plans):
        folder, model = tmp_path / f"checkpoints-{number}", tmp_path / f"model-{number}"
        train(plan, tmp_path, "--steps", "2", "--checkpoint", str(folder), "--every", "2")
        assert export_checkpoint(Export(model, plan), plan, folder) == 2
        files = map(load_file, model.glob("*.safetensors"))
        exported.append({name: tensor for tensors in files for name, tensor in tensors.items()})
    assert exported[0].keys() == exported[1].keys() == exported[2].keys()
    for name, tensor in exported[0].items():
        assert torch.equal(tensor, exported[1][name]), name
        assert torch.equal(tensor, exported[2][name]), name
        assert not torch.equal(tensor, tensor.bfloat16().float()) or tensor.dim() == 1


@pytest.mark.parametrize(
    ("precision", "degree"),
    [
        pytest.param("fp32", 1, marks=SLOW),
        ("bf16", 1),
        pytest.param("fp32", 2, marks=SLOW),
        pytest.param("bf16", 2, marks=SLOW),
    ],
)
def test_devices_hold_no_more_than_the_plan_counts(
    tmp_path: Path, precision: str, degree: int
) -> None:
    """With four shards, much less than without."""
    workload = Workload.transformer(
        "wide",
        Architecture(Family.LLAMA, 2, 256, 4, 4, 512, 997, 16),
        batch_samples=8,
        precision=precision,
    ).replace(tensor_parallel=degree)
    held = {}
    for shards in (1, 4):
        plan = make_plan([[0], [1], [2], [3]], workload=workload.replace(optimizer_shards=shards))
        path = tmp_path / "plan.json"
        save_plan(plan, path)
        code, events, said = run_plan(path, plan.cluster.network.ids, "--steps", "2")
        assert code == 0, said
        devices = next(e for e in events if e["event"] == "devices")["devices"]
        for device in devices:
            # with the vector that the GPUs of a worker exchange
            assert device["peak_bytes"] <= device["expected_bytes"]
            assert degree > 1 or device["peak_bytes"] <= device["planned_bytes"]
        held[shards] = max(device["peak_bytes"] for device in devices)
    limit = {("fp32", 1): 0.75, ("bf16", 1): 0.65, ("fp32", 2): 0.76, ("bf16", 2): 0.7}
    assert held[4] < limit[precision, degree] * held[1]
