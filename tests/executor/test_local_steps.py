"""Devices that update by themselves and agree every H steps equal one process that does so."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.training_plan.averaging_group import AveragingGroup
from planner.training_plan.choices import Head
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.sync import OuterOptimizer, Sync
from tests.conftest import make_plan, tiny_workload
from tests.executor.forks import losses_by_step
from tests.executor.test_train import SETTINGS, STEPS, TOLERANCE, execute

torch = pytest.importorskip("torch")

from planner.executor.comm.comm_plan import stage_averager  # noqa: E402
from planner.executor.fault_tolerance.shutdown import FAILED  # noqa: E402
from planner.executor.runtime.memory import memory_need  # noqa: E402
from planner.executor.runtime.model_stage import ModelStage  # noqa: E402
from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402
from planner.executor.runtime.outer_optimizer import OuterSGD, PlannedSampleShares  # noqa: E402
from planner.executor.runtime.stage_module import require_executable  # noqa: E402
from planner.executor.swarm.microbatch_queue import QueuePipeline  # noqa: E402
from planner.training_plan.error import PlanError  # noqa: E402
from tests.executor.faults import Started, hurt, saved  # noqa: E402
from tests.executor.reference import train_apart  # noqa: E402

DILOCO = Sync(5, OuterOptimizer())
EPS = 1e-6
"""AdamW's: with less it makes whole steps of the rounding in gradients that are zero but for it."""


def apart(plan: TrainingPlan, **settings: Any) -> tuple[list[float], dict[int, np.ndarray]]:
    """Losses of one process, and parameters of every device in the end."""
    torch.set_num_threads(1)
    steps = list(train_apart(plan, STEPS, OptimizerConfig(**settings)))
    held = steps[-1][1]
    vectors = {d: np.concatenate([p.detach().numpy().ravel() for p in held[d]]) for d in held}
    return [loss for loss, _ in steps], vectors


def require_equal(
    plan: TrainingPlan, folder: Path, **settings: Any
) -> tuple[list[dict[str, np.ndarray]], list[float]]:
    """Run both; losses within 1e-5, parameters too."""
    settings = {"eps": EPS} | settings
    ranks = execute(plan, folder, list(plan.cluster.network.ids), **settings)
    losses, held = apart(plan, **settings)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for d, want in held.items():
        np.testing.assert_allclose(ranks[d]["parameters"], want, atol=1e-5, rtol=0)
    return ranks, losses


CASES = {
    "data parallel": ([[0], [1]], "last", "gpt2", 8, DILOCO),
    "2 x 2": ([[0, 3], [2, 1]], "last", "llama", 8, DILOCO),
    "2 x 2, unequal samples": ([[0, 3], [2, 1]], "last", "gpt2", 7, DILOCO),
    "2 x 2, tied, head first, 3 steps": (
        [[0, 3], [2, 1]],
        "first",
        "llama",
        8,
        Sync(3, DILOCO.outer),
    ),
    "means of parameters": ([[0], [1], [2]], "last", "gpt2", 7, Sync(4)),
    "delayed": ([[0], [1]], "last", "gpt2", 7, Sync(5, OuterOptimizer(), delayed=True)),
    "2 x 2, delayed, 3 steps": ([[0, 3], [2, 1]], "last", "gpt2", 8, Sync(3, None, delayed=True)),
    "delayed every step": (
        *([[0], [1]], "last", "gpt2", 7),
        Sync(1, OuterOptimizer(learning_rate=0.5, momentum=0.5), delayed=True),
    ),
    "every step": ([[0], [1]], "last", "gpt2", 7, Sync(1, OuterOptimizer(learning_rate=0.9))),
}


QUICK = ("2 x 2, unequal samples",)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_losses_and_parameters_equal_one_process(case: str, tmp_path: Path) -> None:
    """20 steps; devices agree after an outer step and differ before the next one."""
    grid, head, kind, batch, sync = CASES[case]
    workload = tiny_workload(kind, tied="tied" in case, batch_samples=batch)
    plan = make_plan(grid, head=head, workload=workload).replace(sync=sync)
    visits = [sum(d in path for path in plan.schedules[0].paths) for d in range(len(plan.cluster))]
    assert (len(set(visits)) > 1) is (batch == 7)
    settings: dict[str, Any] = SETTINGS if "llama" in case else {"learning_rate": 2e-3}
    ranks, losses = require_equal(plan, tmp_path, **settings)
    together = STEPS % sync.every_steps == 0 and not sync.delayed
    for group in plan.assignment.groups:
        for what, alike in (("agreed", True), ("parameters", together)):
            found = {ranks[d][what].tobytes() for d in group}
            assert (len(found) == 1) is (alike or len(group) == 1)
    if together:
        assert ranks[0]["agreed"].tobytes() == ranks[0]["parameters"].tobytes()
    assert losses[-1] < losses[0] - 0.1
    # it is another training than that of the mean gradient
    from tests.executor.test_train import single

    usual, _ = single(plan.replace(sync=Sync()), eps=EPS, **settings)
    assert np.abs(np.array(usual) / losses - 1).max() > 100 * TOLERANCE


@pytest.mark.slow
def test_uneven_shares_and_rounds_of_pairs(tmp_path: Path) -> None:
    """Who sums what changes nothing."""
    plan = make_plan([[0], [1], [2], [3]], workload=tiny_workload(batch_samples=7))
    pairs = [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    rounds = tuple(tuple(AveragingGroup.equal(m) for m in groups) for groups in pairs)
    require_equal(plan.replace(averaging=(rounds,), sync=DILOCO), tmp_path)
    group = plan.averaging[0][0][0]
    uneven = AveragingGroup(group.members, (0.6, 0.25, 0.0, 0.15), group.contributes)
    require_equal(plan.replace(averaging=(((uneven,),),), sync=DILOCO), tmp_path)


@pytest.mark.slow
def test_a_flow_through_unequal_stages(tmp_path: Path) -> None:
    """One device feeds two, two feed one; the stage between recomputes."""
    from tests.planning.test_joint_search import flow_plan

    plan = flow_plan([[1, 0, 0], [1, 1, 0], [0, 0, 1]], [0, 1, 3, 4]).replace(sync=DILOCO)
    assert len(set(plan.schedules[0].paths)) == 2 and plan.recompute[1]
    require_equal(plan, tmp_path)


@pytest.mark.slow
def test_a_flow_that_returns_to_a_tied_head(tmp_path: Path) -> None:
    """From two devices of the last stage to two of the first."""
    from tests.planning.test_joint_search import flow_plan

    plan = flow_plan([[2, 0, 0], [0, 1, 1]], [0, 2, 4], Head.FIRST, tied=True)
    assert len(set(plan.schedules[0].paths)) > 2 and plan.recompute[1]
    require_equal(plan.replace(sync=DILOCO), tmp_path)


@pytest.mark.slow
def test_a_device_without_samples_takes_no_inner_step(tmp_path: Path) -> None:
    """In every other step a device has none: it keeps parameters and moments until it has."""
    plan = make_plan([[0], [1], [2]], workload=tiny_workload(batch_samples=3))
    whole = plan.schedules[0]
    (own,) = (b for b, path in enumerate(whole.paths) if path == (2,))
    paths = tuple((1,) if path == (2,) else path for path in whole.paths)
    order = (whole.order[0], (*whole.order[1], *((kind, own) for kind in "FHB")), ())
    without = replace(whole, paths=paths, order=order)
    plan = plan.replace(schedules=(whole, without), cycle=(0, 1), sync=DILOCO)
    ranks, _ = require_equal(plan, tmp_path)
    assert [int(found["updates"]) for found in ranks] == [STEPS, STEPS, STEPS // 2]
    assert len({found["parameters"].tobytes() for found in ranks}) == 1
    samples = [PlannedSampleShares(plan, rank) for rank in range(3)]
    assert [one.gradient_scale(0) for one in samples] == [3, 3, 3]
    assert [one.gradient_scale(1) for one in samples] == [3, 1.5, None]
    # steps 0 to 4 and 5 to 9: three and two of all devices
    assert [one.pseudo_gradient_weight(4) for one in samples] == pytest.approx(
        [5 / 15, 7 / 15, 3 / 15]
    )
    assert [one.pseudo_gradient_weight(9) for one in samples] == pytest.approx(
        [5 / 15, 8 / 15, 2 / 15]
    )


@pytest.mark.slow
def test_int8_changes_are_within_the_codecs_error(tmp_path: Path) -> None:
    """All members agree bit for bit, on what one process has but for the codec's rounding."""
    plan = make_plan([[0], [1]], workload=tiny_workload(batch_samples=6)).replace(
        sync=DILOCO, codec="int8"
    )
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids), eps=EPS)
    assert ranks[0]["parameters"].tobytes() == ranks[1]["parameters"].tobytes()
    losses, held = apart(plan, eps=EPS)
    np.testing.assert_allclose(ranks[0]["losses"][:5], losses[:5], rtol=TOLERANCE)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=0.02)
    assert np.abs(ranks[0]["parameters"] - held[0]).max() > 0


@pytest.mark.parametrize(
    ("delayed", "done"),
    [
        pytest.param(False, 7, marks=pytest.mark.slow),
        pytest.param(True, 10, marks=pytest.mark.slow),
        pytest.param(True, 11, marks=pytest.mark.slow),
    ],
)
def test_resumed_losses_are_the_same_to_the_last_bit(
    delayed: bool, done: int, tmp_path: Path
) -> None:
    """Within a period of H = 5, and where an outer step is to come: its mean comes back too."""
    workload = tiny_workload(batch_samples=7)
    plan = make_plan([[0, 1], [2, 3]], workload=workload)
    plan = plan.replace(sync=replace(DILOCO, delayed=delayed))
    path, folder = tmp_path / "plan.json", tmp_path / "checkpoints"
    save_plan(plan, path)
    code, whole, said = losses_by_step(path, plan.cluster.network.ids, "--steps", "20")
    assert code == 0, said
    kept = ("--checkpoint", str(folder), "--every", str(done))
    code, first, said = losses_by_step(path, plan.cluster.network.ids, "--steps", str(done), *kept)
    assert code == 0, said
    code, second, said = losses_by_step(
        path, plan.cluster.network.ids, "--steps", "20", "--resume", str(folder)
    )
    assert code == 0, said
    assert sorted(second) == list(range(done, 20)) and first | second == whole


def test_the_outer_step_by_hand() -> None:
    """Two values, two steps: m = g, then 0.5 m + g; what is gone on from is the old ones."""
    plan = make_plan([[0], [1]]).replace(
        sync=Sync(2, OuterOptimizer(learning_rate=0.5, momentum=0.5))
    )
    parameter = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    outer = OuterSGD(plan, {"x": parameter})
    vector = torch.empty(2)
    parameter.data += torch.tensor([-0.2, 0.4])
    outer.pseudo_gradient(vector, 0.5)
    np.testing.assert_allclose(vector, [0.1, -0.2], rtol=1e-6)
    outer.step(torch.tensor([0.2, -0.4]))  # m = g, old - 0.5 (g + 0.5 g)
    np.testing.assert_allclose(parameter.detach(), [0.85, -1.7], rtol=1e-6)
    parameter.data += 5.0
    outer.step(torch.tensor([0.1, 0.0]))  # m = 0.5 * 0.2 + 0.1 = 0.2 and 0.5 * -0.4 = -0.2
    np.testing.assert_allclose(parameter.detach(), [0.85 - 0.1, -1.7 + 0.05], rtol=1e-6)


def test_who_comes_before_an_outer_step_has_no_part_in_it() -> None:
    """It begins with what was agreed on last, adds nothing, and then has what the others have."""
    plan = make_plan([[0], [1]]).replace(sync=Sync(2, OuterOptimizer()))
    giver, comer = (
        ModelStage(plan, rank, torch.device("cpu"), OptimizerConfig(1e-2), count_microbatches=True)
        for rank in (0, 1)
    )
    giver.begin(0, plan.schedules[0])
    for b in range(2):
        giver.run_op("F", b, None)
        giver.run_op("H", b, None)
        giver.run_op("B", b, None)
    giver.update()
    giver.take_snapshot()
    change = giver.pseudo_gradient(giver.pseudo_gradient_microbatches()).clone()
    assert giver.pseudo_gradient_microbatches() == 2 and change.abs().max() > 0
    comer.load_state_dict(giver.state_dict())
    comer.restart_from_global()
    assert comer.pseudo_gradient_microbatches() == 0
    # of all, of whom this one has done nothing; and where nobody has done anything
    for samples in (2, 0):
        assert comer.pseudo_gradient(samples).abs().max() == 0
    # averaged twice, since somebody was lost the first time
    again = giver.pseudo_gradient(giver.pseudo_gradient_microbatches()).clone()
    assert torch.equal(again, change)
    for model_stage in (giver, comer):
        model_stage.gradients.current.copy_(change)
        model_stage.outer_step()
    comers = dict(comer.module.named_parameters())
    for name, parameter in giver.module.named_parameters():
        assert torch.equal(parameter, comers[name])
    assert giver.pseudo_gradient_microbatches() == comer.pseudo_gradient_microbatches() == 0


@pytest.mark.slow
def test_exported_is_what_devices_agree_on(tmp_path: Path) -> None:
    """From a checkpoint within a period: parameters of the last outer step, not one device's."""
    from planner.executor.checkpoint.safetensors_io import read_tensors
    from planner.huggingface.export import Export, export_checkpoint
    from tests.executor.checkpoints import latest_step, read_shard

    plan = make_plan([[0], [1], [2], [3]]).replace(sync=DILOCO)
    path, folder = tmp_path / "plan.json", tmp_path / "checkpoints"
    save_plan(plan, path)
    words = ("--checkpoint", str(folder), "--every", "7", "--export", str(tmp_path / "trained"))
    code, _, said = losses_by_step(path, plan.cluster.network.ids, "--steps", "7", *words)
    assert code == 0, said
    assert export_checkpoint(Export(tmp_path / "again", plan), plan, folder) == 7
    one, two = (
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("trained", "again")
    )
    assert one == two
    shards = [read_shard(folder, latest_step(folder, range(4)), rank, plan) for rank in range(4)]
    name = "stage.layers.0.norm1.weight"
    agreed = [shard[f"outer/parameter/{name}"] for shard in shards]
    own = [shard[f"parameter/{name}"] for shard in shards]
    assert all(torch.equal(a, agreed[0]) for a in agreed)
    assert not any(torch.equal(a, agreed[0]) for a in own) and not torch.equal(own[0], own[1])
    found = read_tensors(tmp_path / "again" / "model.safetensors", hashlib.sha256(one).hexdigest())
    (written,) = (t for n, t in found.items() if n.endswith("h.0.ln_1.weight"))
    assert torch.equal(written, agreed[0])


def test_memory_counts_what_the_outer_step_keeps() -> None:
    """4 bytes a parameter for the old ones, 4 for momentum; as many again where it is delayed."""
    plain = make_plan([[0, 1], [2, 3]], workload=tiny_workload())
    for sync, each in (
        (DILOCO, 8),
        (Sync(4), 4),
        (Sync(), 0),
        (replace(DILOCO, delayed=True), 16),
    ):
        plan = plain.replace(sync=sync)
        parameters = plan.workload.gradient_bytes(plan.stage_layers, plan.head_stage)[0] / 4
        need, without = (memory_need(p, 0, stage_averager(p, 0)) for p in (plan, plain))
        assert need.total_bytes - without.total_bytes == each * parameters
        made = ModelStage(plan, 0, torch.device("cpu"), OptimizerConfig())
        bare = ModelStage(plain, 0, torch.device("cpu"), OptimizerConfig())
        assert made.held_bytes - bare.held_bytes == each * parameters


def test_what_has_no_meaning_is_refused() -> None:
    """Clipping, and own pace, with devices that update by themselves."""
    plan = make_plan([[0], [1]], clip=1.0)
    for sync in (Sync(4), Sync(1, OuterOptimizer())):
        with pytest.raises(PlanError, match=r"averaging.clip: .* found sync.every_steps [14]"):
            require_executable(plan.replace(sync=sync))
    with pytest.raises(PlanError, match=r"sync.delayed: .* give every_steps above 1, or outer"):
        Sync(delayed=True)
    plan = plan.replace(clip=None, sync=DILOCO)
    model_stage = ModelStage(plan, 0, torch.device("cpu"), OptimizerConfig())
    store = torch.distributed.HashStore()
    with pytest.raises(PlanError, match="every_steps 5 with outer; leave out --own-pace"):
        QueuePipeline(plan, 0, model_stage, store)


@pytest.mark.slow
def test_a_run_that_averages_beside_ends_when_a_device_is_lost(tmp_path: Path) -> None:
    """Killed where it would begin to average: the others compute, and name it."""
    plan = make_plan([[0, 1], [2, 3]], workload=tiny_workload())
    late = Sync(1, OuterOptimizer(), delayed=True)
    path, ids = saved(plan.replace(sync=late), tmp_path / "plan.json"), plan.cluster.network.ids
    given = {"device": ids[2], "fault": "kill", "phase": "averaging", "step": 3}
    with Started(tmp_path) as run:
        for name in ids:
            run.start(name, name, hurt(path, given | {"folder": str(tmp_path)}))
        others = [name for name in ids if name != ids[2]]
        assert run.codes(others) == dict.fromkeys(others, FAILED)
        for name in others:
            assert run.reason(name).startswith(f"device {ids[2]!r} is gone")
