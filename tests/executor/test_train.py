"""A plan's training equals a single process on the same microbatches."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import planner as pl
from planner.simulator.simulator import predict
from planner.training_plan.choices import Head
from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.rebuild import list_schedule
from tests.conftest import make_plan, random_network, tiny_workload
from tests.executor.forks import run_ranks

torch = pytest.importorskip("torch")

STEPS = 20
WHEN = ("first", "last")
TOLERANCE = 1e-5
RANK_MAIN = "tests.executor.rank_main"


def execute(
    plan: TrainingPlan, folder: Path, devices: list[str], chunking: str = "planned", **settings: Any
) -> list[dict[str, np.ndarray]]:
    """Losses and gradients of every rank."""
    path = folder / "plan.json"
    save_plan(plan, path)
    n = len(plan.cluster)
    words = [str(path), str(folder), str(STEPS), chunking, json.dumps(settings)]
    done = run_ranks(n, RANK_MAIN, *words, *devices)
    assert done.code == 0, done.error[-3000:]
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(n)]


def single(
    plan: TrainingPlan, overflow: int | None = None, **settings: Any
) -> tuple[list[float], dict[str, list[np.ndarray]]]:
    """Losses of one process, and its first and last gradients per layer."""
    from planner.executor.runtime.optimizer import OptimizerConfig
    from tests.executor.reference import train_single

    torch.set_num_threads(1)  # threads cost more than they give at this size
    losses, gradients = [], []
    steps = train_single(plan, STEPS, OptimizerConfig(**settings), overflow=overflow)
    for loss, parameters in islice(steps, STEPS):
        losses.append(loss)
        gradients.append([p.grad.detach().numpy().ravel().copy() for p in parameters])
    return losses, {"first": gradients[0], "last": gradients[-1]}


def expected_gradient(plan: TrainingPlan, rank: int, whole: list[np.ndarray]) -> np.ndarray:
    """The rank's part of the single process's gradient."""
    from planner.executor.runtime.model import build_head, build_stage

    arch = plan.workload.architecture
    assert arch is not None
    stage = plan.stage_of[rank]
    start, stop = plan.stage_layers[stage]
    sizes = [len(list(build_stage(arch, 0, k, 0).parameters())) for k in range(1, arch.layers + 1)]
    first = 0 if start == 0 else sizes[start - 1]
    part = whole[first : sizes[stop - 1]]
    group, order = plan.assignment.groups[stage], plan.schedules[0].order
    if any(kind == "H" for d in group for kind, _ in order[d]):
        head = list(build_head(arch, 0, build_stage(arch, 0, 1, 0).stem).parameters())
        # a matrix that the embedding has too is there already, or as a copy
        copy = whole[: arch.tied and start > 0]
        part = part + whole[-(len(head) - arch.tied) :] + copy
    return np.concatenate(part)


CASES = {
    "pipelines only": ([[0, 1]], "last", "eager-1f1b", "gpt2"),
    "data parallel only": ([[0], [1]], "last", "gpipe", "gpt2"),
    "2 x 2": ([[0, 3], [2, 1]], "last", "1f1b", "gpt2"),
    "2 x 2, head first": ([[0, 3], [2, 1]], "first", "gpipe", "llama"),
    "3 stages, uneven layers": ([[2, 0, 1]], "first", "1f1b", "gpt2"),
    "2 x 2, tied, with a schedule": ([[0, 3], [2, 1]], "first", "1f1b", "gpt2"),
    "data parallel only, tied": ([[0], [1]], "last", "gpipe", "llama"),
    "2 x 2, tied over two stages, with a schedule": ([[0, 3], [2, 1]], "last", "1f1b", "gpt2"),
    "3 stages, tied over two, clipped": ([[2, 0, 1]], "last", "1f1b", "llama"),
    "2 x 2, clipped": ([[0, 3], [2, 1]], "last", "1f1b", "llama"),
    "3 stages, tied, clipped, with a schedule": ([[2, 0, 1]], "first", "1f1b", "gpt2"),
    "data parallel only, clipped": ([[0], [1]], "last", "gpipe", "gpt2"),
}


NORMS = {"gpt2": 1.4, "llama": 0.95}
"""Larger than that of all gradients in some of the 20 steps, and smaller in others."""
SETTINGS: dict[str, Any] = {
    "learning_rate": 3e-3,
    "warmup": 5,
    "schedule": "cosine",
    "schedule_steps": 15,
    "weight_decay": 0.3,
    "beta2": 0.95,
}
"""Warm-up, cosine and its end within the 20 steps."""


QUICK = {
    "2 x 2, tied over two stages, with a schedule",
    "3 stages, tied over two, clipped",
    "2 x 2, head first",
    "data parallel only, tied",
    "2 x 2, clipped",
    "3 stages, tied, clipped, with a schedule",
}


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_losses_and_gradients_equal_a_single_process(case: str, tmp_path: Path) -> None:
    """20 steps within 1e-5; gradients too, whichever local process is which device."""
    grid, head, schedule, kind = CASES[case]
    plan = make_plan(
        grid,
        head=head,
        schedule=schedule,
        workload=tiny_workload(kind, tied="tied" in case),
        clip=NORMS[kind] if "clipped" in case else None,
    )
    _require_equal(plan, tmp_path, SETTINGS if "schedule" in case else {})


def test_a_flow_that_returns_to_a_tied_head(tmp_path: Path) -> None:
    """From two devices of the last stage to two of the first."""
    from tests.planning.test_joint_search import flow_plan

    plan = flow_plan([[2, 0, 0], [0, 1, 1]], [0, 2, 4], Head.FIRST, tied=True)
    assert len(set(plan.schedules[0].paths)) > 2 and plan.recompute[1]
    _require_equal(plan, tmp_path, {})


def _require_equal(plan: TrainingPlan, folder: Path, settings: dict[str, Any]) -> None:
    ids = list(plan.cluster.network.ids)
    ranks = execute(plan, folder, ids[::-1], **settings)
    losses, gradients = single(plan, **settings)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for rank, found in enumerate(ranks):
        for when, bound in (("first", 1e-5), ("last", 1e-4)):
            want = expected_gradient(plan, rank, gradients[when])
            scale = np.abs(want).max()
            np.testing.assert_allclose(found[when], want, atol=bound * scale, rtol=0)
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.parametrize("idle", [1, 2])
def test_a_device_without_microbatches_averages_all_of_its_stage(idle: int, tmp_path: Path) -> None:
    """It has the head too, or the embedding, and updates them as the other does."""
    plan = make_plan([[0, 3], [2, 1]])
    others = {1: 3, 2: 0}
    paths = tuple(
        tuple(others[d] if d == idle else d for d in path) for path in plan.schedules[0].paths
    )
    bare = replace(plan.schedules[0], paths=paths, order=())
    order = list_schedule(bare, 4, dict.fromkeys(range(4), len(paths)))
    plan = plan.replace(schedules=(replace(bare, order=order),))
    plan = plan.replace(predicted=predict(plan))
    assert pl.check(plan) == [] and not order[idle]
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for rank, found in enumerate(ranks):
        want = expected_gradient(plan, rank, gradients["last"])
        np.testing.assert_allclose(found["last"], want, atol=1e-4 * np.abs(want).max(), rtol=0)


def test_uneven_shares_give_the_same_average(tmp_path: Path) -> None:
    """Member 0 sums three quarters of the vector, member 1 the rest, a third nothing."""
    plan = make_plan([[0], [1], [2]], workload=tiny_workload(batch_samples=7))
    group = plan.averaging[0][0][0]
    uneven = type(group)(group.members, (0.75, 0.25, 0.0), group.contributes)
    plan = plan.replace(averaging=(((uneven,),),))
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    assert ranks[0]["last"].tobytes() == ranks[1]["last"].tobytes() == ranks[2]["last"].tobytes()
    want = np.concatenate(gradients["first"])
    np.testing.assert_allclose(ranks[0]["first"], want, atol=1e-5 * np.abs(want).max(), rtol=0)


def test_int8_codec_trains_almost_alike(tmp_path: Path) -> None:
    """All members agree bit for bit, and the first gradient is within the codec's error."""
    from planner.executor.comm.codec import WireFormat
    from tests.executor.codec_error import error_bound

    plan = make_plan([[0], [1], [2]], workload=tiny_workload(batch_samples=6))
    plan = plan.replace(codec="int8")
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    assert ranks[0]["last"].tobytes() == ranks[1]["last"].tobytes() == ranks[2]["last"].tobytes()
    want = torch.from_numpy(np.concatenate(gradients["first"]))
    # two contributions and one sum are encoded; blocks of a chunk are at most a largest value off
    worst = 4 * want.abs().max() / 254
    assert float(error_bound(want, WireFormat.INT8).max()) <= float(worst)
    assert float((torch.from_numpy(ranks[0]["first"]) - want).abs().max()) <= float(worst)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=0.02)


def test_rounds_of_small_groups_give_the_exact_mean(tmp_path: Path) -> None:
    """Four peers in two rounds of pairs; rounds that mix too little are refused."""
    from planner.executor.runtime.stage_module import require_executable
    from planner.training_plan.averaging_group import AveragingGroup
    from planner.training_plan.error import PlanError

    plan = make_plan([[0], [1], [2], [3]], workload=tiny_workload(batch_samples=8))
    pairs = [((0, 1), (2, 3)), ((0, 2), (1, 3))]
    rounds = tuple(tuple(AveragingGroup.equal(m) for m in groups) for groups in pairs)
    with pytest.raises(PlanError, match=r"weight 0 instead of 1; .* in rounds that mix all"):
        require_executable(plan.replace(averaging=(rounds[:1],)))
    plan = plan.replace(averaging=(rounds,))
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    want = np.concatenate(gradients["first"])
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for found in ranks:
        np.testing.assert_allclose(found["first"], want, atol=1e-5 * np.abs(want).max(), rtol=0)


def test_own_pace_completes_the_batch_whoever_gives_how_much(tmp_path: Path) -> None:
    """Every microbatch is done once, and losses equal the single process."""
    plan = make_plan([[0], [1]], workload=tiny_workload(batch_samples=8))
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids), chunking="own")
    losses, _ = single(plan)
    assert (ranks[0]["given"] + ranks[1]["given"] == 8).all()
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)


@pytest.mark.parametrize(
    "some", [(2, 1), *(pytest.param(some, marks=pytest.mark.slow) for some in ((1, 0), (2, 2)))]
)
def test_recomputation_changes_no_bit(some: tuple[int, ...], tmp_path: Path) -> None:
    """Of some layers or all: losses and gradients are those of a plan that keeps everything."""
    plan = make_plan([[0, 3], [2, 1]])
    losses, gradients = single(plan)
    found = []
    for does in ((0, 0), some):
        ranks = execute(plan.replace(recompute=does), tmp_path, list(plan.cluster.network.ids))
        found.append([ranks[0]["losses"].tobytes(), *(r[w].tobytes() for r in ranks for w in WHEN)])
        np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
        for rank, mine in enumerate(ranks):
            want = expected_gradient(plan, rank, gradients["first"])
            np.testing.assert_allclose(mine["first"], want, atol=1e-5 * np.abs(want).max(), rtol=0)
    assert found[0] == found[1]


def skipping_and_swapping_plan() -> TrainingPlan:
    """Three stages; paths skip one or swap two of them, the head is on the start device."""
    from planner.planning.straight.schedules import eagerly_ordered
    from planner.simulator.resources import LinkResources
    from planner.training_plan.schedule import Schedule

    plan = make_plan([[0, 1, 2]], head="first", workload=tiny_workload(batch_samples=4))
    paths = ((0, 1), (0, 2), (0, 2, 1), (0, 1, 2))
    blank = Schedule("paths", Head.FIRST, paths, ())
    room = dict.fromkeys(range(3), 4)
    sent, links = np.full(3, 1e4), LinkResources.of(plan.cluster)
    made = eagerly_ordered(blank, plan.compute_times, sent, links, room)
    return plan.replace(schedules=(made,))


@pytest.mark.parametrize(
    "some", [(False, True, False), pytest.param((True, True, True), marks=pytest.mark.slow)]
)
def test_skipped_and_swapped_stages_train_as_planned(
    some: tuple[bool, ...], tmp_path: Path
) -> None:
    """Losses equal the single process on the same paths."""
    plan = skipping_and_swapping_plan()
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, _ = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    again = execute(plan.replace(recompute=some), tmp_path, list(plan.cluster.network.ids))
    for mine, kept in zip(again, ranks, strict=True):
        for name in ("losses", *WHEN):
            assert mine[name].tobytes() == kept[name].tobytes()
    # the paths matter: all layers for every microbatch is another training
    full, _ = single(make_plan([[0, 1, 2]], workload=plan.workload))
    assert np.abs(np.array(full) / losses - 1).max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("sizes", "path_stages"),
    [((2, 2, 1), 2), pytest.param((2, 1), 1, marks=pytest.mark.slow)],
)
def test_skipping_and_full_iterations_take_turns(
    sizes: tuple[int, ...], path_stages: int, tmp_path: Path
) -> None:
    """A planned cycle of two skipping and one full iteration, seven times."""
    import planner as pl

    cluster = pl.Cluster(random_network(sum(sizes), 5), pl.Devices(1e9, 16e9))
    made = pl.plan(
        cluster,
        tiny_workload(batch_samples=6),
        stage_sizes=sizes,
        path_stages=path_stages,
        full_every=3,
        stop=pl.MaxIterations(2),
    )
    plan = made.plan
    assert plan is not None and plan.cycle == (0, 0, 1)
    devices = range(len(cluster))
    visits = [[sum(d in path for path in s.paths) for s in plan.schedules] for d in devices]
    # every later stage sees fewer microbatches where some are skipped, and some device others
    for group in plan.assignment.groups[1:]:
        assert sum(visits[d][0] for d in group) < sum(visits[d][1] for d in group)
    ranks = execute(plan, tmp_path, list(cluster.network.ids))
    losses, gradients = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for rank, found in enumerate(ranks):
        given = [visits[rank][k] for k in (0, 0, 1)]
        assert found["given"].tolist() == [given[t % 3] for t in range(STEPS)]
        want = expected_gradient(plan, rank, gradients["first"])
        np.testing.assert_allclose(found["first"], want, atol=1e-5 * np.abs(want).max(), rtol=0)


def test_a_flow_through_unequal_stages_trains_as_one_process(tmp_path: Path) -> None:
    """One device feeds two, two feed one; the stage between recomputes."""
    from tests.planning.test_joint_search import flow_plan

    plan = flow_plan([[1, 0, 0], [1, 1, 0], [0, 0, 1]], [0, 1, 3, 4])
    assert len(set(plan.schedules[0].paths)) == 2 and plan.recompute[1]
    ranks = execute(plan, tmp_path, list(plan.cluster.network.ids))
    losses, gradients = single(plan)
    np.testing.assert_allclose(ranks[0]["losses"], losses, rtol=TOLERANCE)
    for rank, found in enumerate(ranks):
        for when, bound in (("first", 1e-5), ("last", 1e-4)):
            want = expected_gradient(plan, rank, gradients[when])
            np.testing.assert_allclose(found[when], want, atol=bound * np.abs(want).max(), rtol=0)
