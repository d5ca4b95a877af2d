"""Devices are lost and come back that share optimizer state, of which others have a copy."""

from __future__ import annotations

import signal
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from planner.simulator.simulator import predict
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import remove_devices
from planner.training_plan.slice_owners import rounds_of_copies
from planner.workload.workload import Workload
from tests.conftest import make_plan, tiny_workload

torch = pytest.importorskip("torch")

from benchmarks.faults.rank import MOVING, SPREADING  # noqa: E402
from planner.executor.fault_tolerance.shutdown import FAILED  # noqa: E402
from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402
from tests.executor.forks import losses_by_step, run_plan  # noqa: E402
from tests.executor.reference import train_single  # noqa: E402
from tests.executor.test_elastic import come_back, hurt, told  # noqa: E402
from tests.executor.test_optimizer_shards import TIED, in_16_bits  # noqa: E402
from tests.executor.test_train import STEPS, TOLERANCE  # noqa: E402

KILLED = -signal.SIGKILL
SLOW = pytest.mark.slow
FOUR = [[0], [1], [2], [3]]
FIVE = [*FOUR, [4]]
TWO_STAGES = [[0, 1], [2, 3], [4, 5], [6, 7]]


def in_copies(
    workload: Workload, grid: list[list[int]], groups: int = 2, clip: float | None = None
) -> TrainingPlan:
    """A plan in which groups of each stage's devices hold all of its optimizer state."""
    plan = make_plan(grid, workload=workload.replace(optimizer_shards=2), clip=clip)
    averaging = []
    for entry, rounds in enumerate(plan.averaging):
        members = plan.averaged_by(entry)
        parts = [members[k::groups] for k in range(groups)]
        averaging.append(rounds_of_copies(plan.cluster, parts, rounds[-1][0].dtype))
    plan = plan.replace(averaging=tuple(averaging))
    return plan.replace(predicted=predict(plan))


def require_equal(losses: dict[int, float], plan: TrainingPlan, rtol: float = TOLERANCE) -> None:
    """Of one process."""
    torch.set_num_threads(1)
    single = train_single(plan, STEPS, OptimizerConfig())
    expected = [loss for loss, _ in islice(single, STEPS)]
    np.testing.assert_allclose([losses[t] for t in range(STEPS)], expected, rtol=rtol)


@pytest.mark.parametrize(
    ("grid", "device", "phase"),
    [
        (FIVE, "0", SPREADING),
        pytest.param(FIVE, "4", "backward", marks=SLOW),
        pytest.param(FIVE, "1", "averaging", marks=SLOW),
        pytest.param(FIVE, "2", "update", marks=SLOW),
        pytest.param(FOUR, "3", SPREADING, marks=SLOW),
        pytest.param(TWO_STAGES, "2", "averaging", marks=SLOW),
    ],
)
def test_a_lost_owner(grid: list[list[int]], device: str, phase: str, tmp_path: Path) -> None:
    """Others have its share, and hand out what the new owners need: two groups of two, or one."""
    plan = in_copies(tiny_workload(batch_samples=8), grid, clip=0.5)
    done = hurt(plan, tmp_path, device, phase)
    ids = plan.cluster.network.ids
    assert done.codes == [KILLED if d == device else 0 for d in ids], done.error
    losses, (lost,) = told(done)
    require_equal(losses, plan)
    assert lost["step"] == (4 if phase in ("update", SPREADING) else 3)
    remaining = remove_devices(plan, [device])
    assert remaining.optimizer_copies == (2 if grid == FIVE else 1)


@pytest.mark.parametrize(
    ("precision", "phase", "rtol"),
    [
        pytest.param("fp32", "averaging", TOLERANCE, marks=SLOW),
        pytest.param("fp32", SPREADING, TOLERANCE, marks=SLOW),
        ("bf16", SPREADING, 2e-3),
        pytest.param("fp16", "averaging", 2e-3, marks=SLOW),
    ],
)
def test_a_tied_matrix_in_two_stages(
    precision: str, phase: str, rtol: float, tmp_path: Path
) -> None:
    """Of which all devices own a part; in 16 bits all but the owners have it rounded."""
    workload = TIED if precision == "fp32" else in_16_bits(TIED, precision)
    plan = in_copies(workload, TWO_STAGES)
    done = hurt(plan, tmp_path, "5", phase)
    ids = plan.cluster.network.ids
    assert done.codes == [KILLED if d == "5" else 0 for d in ids], done.error
    losses, _ = told(done)
    require_equal(losses, plan, rtol)


@pytest.mark.slow
def test_another_is_lost_while_state_is_moved(tmp_path: Path) -> None:
    """Nobody has given up anything before all have what they need."""
    plan = in_copies(tiny_workload(batch_samples=8), [*FIVE, [5], [6]], groups=3)
    done = hurt(plan, tmp_path, "0+1", MOVING)
    ids = plan.cluster.network.ids
    assert done.codes == [KILLED if d in "01" else 0 for d in ids], done.error
    losses, changes = told(done)
    require_equal(losses, plan)
    assert sorted(name for change in changes for name in change["devices"]) == ["0", "1"]


@pytest.mark.slow
def test_nobody_has_the_share_of_both(tmp_path: Path) -> None:
    """Owners of the same slice, at once: all end, and say how to go on."""
    plan = in_copies(tiny_workload(batch_samples=8), FIVE)
    _, exchange, _ = plan.averaging[0]
    pair = exchange[0].members
    names = [plan.cluster.network.ids[d] for d in pair]
    kept = ("--checkpoint", str(tmp_path / "kept"), "--every", "2")
    done = hurt(plan, tmp_path, "+".join(names), "forward", *kept)
    ends = [KILLED if d in names else FAILED for d in plan.cluster.network.ids]
    assert done.codes == ends, done.error
    (line,) = set(done.error.splitlines())
    assert "nobody is left that has all optimizer state of stage 0; resume from a" in line
    path, ids = tmp_path / "plan.json", plan.cluster.network.ids
    code, losses, said = losses_by_step(path, ids, "--steps", "4", "--resume", kept[1])
    assert code == 0 and sorted(losses) == [2, 3], said


@pytest.mark.slow
@pytest.mark.parametrize("grid", [FIVE, TWO_STAGES], ids=["one stage", "two stages"])
def test_it_comes_back(grid: list[list[int]], tmp_path: Path) -> None:
    """With the share of the whole plan again, and parameters, from the others.

    No connection is closed while others still spread theirs: it would be reported as reset.
    """
    plan = in_copies(tiny_workload(batch_samples=8), grid)
    came, losses = come_back(plan, 400, tmp_path)
    torch.set_num_threads(1)
    expected = [x for x, _ in islice(train_single(plan, 400, OptimizerConfig()), came + 50)]
    found = [losses[t] for t in range(len(expected))]
    np.testing.assert_allclose(found, expected, rtol=1e-3)


def test_plans_without_copies_are_refused(tmp_path: Path) -> None:
    from planner.training_plan.file import save_plan

    plan = make_plan(FOUR, workload=tiny_workload().replace(optimizer_shards=2))
    path = tmp_path / "plan.json"
    save_plan(plan, path)
    code, _, said = run_plan(path, plan.cluster.network.ids, "--steps", "2", "--elastic")
    assert code == 2
    assert "--elastic: optimizer state is in 2 shards" in said[0]
    assert "--optimizer-copies 2" in said[0]
