"""Devices are lost and come back, and training stays that of one process."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from planner.training_plan.file import save_plan
from planner.training_plan.model import TrainingPlan
from planner.training_plan.remove_devices import remove_devices
from planner.training_plan.sync import OuterOptimizer, Sync
from planner.workload.workload import Workload
from tests.conftest import make_plan, tiny_workload
from tests.executor.faults import Started
from tests.executor.faults import hurt as hurt_words
from tests.executor.launch import ROOT
from tests.executor.test_train import NORMS, SETTINGS, STEPS, TOLERANCE

torch = pytest.importorskip("torch")

from benchmarks.faults.elastic import cut, losses_without_fault  # noqa: E402
from benchmarks.faults.rank import COUNTED, EVALUATING, LEAVING, OUTER, PHASES, WRITING  # noqa: E402
from planner.executor.checkpoint.safetensors_io import read_tensors  # noqa: E402
from planner.executor.comm.p2p import WorkerThread  # noqa: E402
from planner.executor.elastic.membership import MAX_RESETS, DeviceLost, Evicted, Membership  # noqa: E402
from planner.executor.elastic.membership_events import MEMBERSHIP_EVENTS, event_line  # noqa: E402
from planner.executor.elastic.step_commit import StoreStepCommitter  # noqa: E402
from planner.executor.fault_tolerance.error_latch import ErrorLatch  # noqa: E402
from planner.executor.fault_tolerance.failure_detector import FailureDetector  # noqa: E402
from planner.executor.fault_tolerance.shutdown import FAILED, LEFT, PREFIX, REFUSED, Shutdown  # noqa: E402
from planner.executor.launch.local import run_local  # noqa: E402
from planner.executor.rendezvous.rank_group import RankGroup  # noqa: E402
from planner.executor.runtime.optimizer import OptimizerConfig  # noqa: E402
from planner.executor.transport.connections import ConnectionReset, receive_into  # noqa: E402
from tests.emulate.test_network import REFUSED as NO_NETWORK  # noqa: E402
from tests.executor.checkpoints import latest_step, read_shard  # noqa: E402
from tests.executor.forks import Done, losses_by_step, run_ranks  # noqa: E402
from tests.executor.reference import Lost, train_apart  # noqa: E402
from tests.executor.test_evaluate import bytes_workload  # noqa: E402
from tests.executor.test_two_frequency import flow, straight  # noqa: E402

GRID = [[0, 1, 2], [3, 4, 5]]
IDS = ("0", "1", "2", "3", "4", "5")
KILLED = -signal.SIGKILL


def plan_of(kind: str = "fixed") -> TrainingPlan:
    """Two pipelines of three stages, or devices that choose."""
    clip = NORMS["gpt2"] if kind == "clipped" else None
    work = tiny_workload(tied=kind == "tied", batch_samples=8)
    if kind == "fp16":
        work = Workload.transformer("half", work.architecture, precision="fp16", batch_samples=8)
    plan = make_plan(GRID, workload=work, clip=clip)
    return plan.replace(wiring="stochastic") if kind == "stochastic" else plan


def single(plan: TrainingPlan, steps: int = STEPS, **settings: Any) -> list[float]:
    """Losses of one process."""
    from planner.executor.runtime.optimizer import OptimizerConfig
    from tests.executor.reference import train_single

    torch.set_num_threads(1)
    fixed = plan.replace(wiring="fixed")
    return [x for x, _ in islice(train_single(fixed, steps, OptimizerConfig(**settings)), steps)]


def hurt(
    plan: TrainingPlan,
    folder: Path,
    device: str,
    phase: str,
    *more: str,
    fault: str = "kill",
    **about: Any,
) -> Done:
    """All ranks, to one of which it happens in the fourth step."""
    save_plan(plan, folder / "plan.json")
    given = {"device": device, "fault": fault, "phase": phase, "step": 3, "folder": str(folder)}
    given |= about
    ids = plan.cluster.network.ids
    words = [json.dumps(given), str(folder / "plan.json"), "--devices", *ids, "--device", "cpu"]
    words += ["--events", "--elastic", "--steps", str(STEPS), *more]
    return run_ranks(len(ids), "benchmarks.faults.rank", *words, go_on=True)


def told(done: Done) -> tuple[dict[int, float], list[dict[str, Any]]]:
    """Losses by step, each told once, and what changed."""
    events = [json.loads(line) for line in done.out.splitlines()]
    steps = [event for event in events if event["event"] == "step"]
    losses = {event["step"]: event["loss"] for event in steps}
    assert len(losses) == len(steps)
    assert all(event["took_s"] > 0 for event in steps)
    return losses, [event for event in events if event["event"] in MEMBERSHIP_EVENTS]


def require_equal(losses: dict[int, float], plan: TrainingPlan, **settings: Any) -> None:
    """Of one process on the same microbatches, each counted once."""
    expected = single(plan, **settings)
    np.testing.assert_allclose([losses[t] for t in range(STEPS)], expected, rtol=TOLERANCE)


def _settings() -> list[str]:
    return _words(SETTINGS)


def _words(settings: dict[str, Any]) -> list[str]:
    named = {f"--{name.replace('_', '-')}": str(value) for name, value in settings.items()}
    return [word for pair in named.items() for word in pair]


NORMAL = {("0", "averaging")}
"""In the normal run: what tells most."""


@pytest.mark.parametrize(
    ("device", "phase"),
    [
        pytest.param(d, phase, marks=() if (d, phase) in NORMAL else pytest.mark.slow)
        for d in ("0", "4")
        for phase in PHASES[1:]
    ],
)
def test_losses_equal_one_process(device: str, phase: str, tmp_path: Path) -> None:
    """SIGKILL in the middle of a step: the others do it again, from the parameters it began with.

    Rank 0, who tells losses, and another one. In the update the step counts: all had voted.
    """
    plan, folder = plan_of(), tmp_path / "kept"
    kept = ("--checkpoint", str(folder), "--every", "10", *_settings())
    done = hurt(plan, tmp_path, device, phase, *kept)
    assert done.codes == [KILLED if d == device else 0 for d in IDS], done.error
    losses, changes = told(done)
    require_equal(losses, plan, **SETTINGS)
    (lost,) = changes
    assert (lost["event"], lost["devices"]) == ("lost", [device])
    assert lost["why"] == f"device '{device}' is gone: its process has ended"
    assert lost["step"] == (4 if phase == "update" else 3)
    assert lost["taken_over_by"] == ["3" if device == "0" else "1"]
    # checkpoints are of the plan of those who are left, and alike in each stage to the last bit
    left = remove_devices(plan, [device])
    events = [json.loads(line) for line in done.out.splitlines()]
    of_plan = {event["step"]: event["plan"] for event in events if event["event"] == "step"}
    assert {of_plan[step] for step in range(3)} == {plan.content_hash}
    assert {of_plan[step] for step in range(4, STEPS)} == {left.content_hash}
    # what devices report at the end is of all generations
    (devices,) = (event["devices"] for event in events if event["event"] == "devices")
    assert all(one["microbatches"] >= 4 * (STEPS - 1) for one in devices)
    assert any(device in one["sent_bytes"] for one in devices)
    for group in left.assignment.groups:
        shards = [read_shard(folder, latest_step(folder, group), d, left) for d in group]
        for name, tensor in shards[0].items():
            assert all(torch.equal(tensor, shard[name]) for shard in shards[1:])


@pytest.mark.parametrize(
    ("phase", "purpose"),
    [
        ("forward", "PIPELINE"),
        pytest.param("forward", "PIPELINE_REVERSE", marks=pytest.mark.slow),
        pytest.param("backward", "PIPELINE", marks=pytest.mark.slow),
        pytest.param("averaging", "AVERAGING", marks=pytest.mark.slow),
        pytest.param("averaging", "AVERAGING_REVERSE", marks=pytest.mark.slow),
    ],
)
def test_connection_reset(phase: str, purpose: str, tmp_path: Path) -> None:
    """Both of its ends live: nobody is lost, and the step is done again by all."""
    plan = plan_of()
    done = hurt(plan, tmp_path, "1", phase, *_settings(), fault="tear", purpose=purpose)
    assert done.codes == [0] * len(IDS), done.error
    losses, changes = told(done)
    require_equal(losses, plan, **SETTINGS)
    (torn,) = changes
    assert (torn["event"], torn["step"], torn["go_on"]) == ("torn", 3, list(IDS))
    assert torn["why"].startswith("device '") and "connection" in torn["why"]


OTHERS = {"stochastic": "4", "clipped": "4", "tied": "5", "fp16": "0"}


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        pytest.param(kind, p, marks=() if (kind, p) == ("tied", "averaging") else pytest.mark.slow)
        for kind in OTHERS
        for p in PHASES[1:]
    ],
)
def test_other_plans(kind: str, phase: str, tmp_path: Path) -> None:
    """Devices choose paths, one norm is made of all gradients, two stages share a matrix.

    In fp16 every update waits for the norm.
    """
    plan, lost = plan_of(kind), OTHERS[kind]
    done = hurt(plan, tmp_path, lost, phase)
    assert done.codes == [KILLED if d == lost else 0 for d in IDS], done.error
    losses, changes = told(done)
    require_equal(losses, plan)
    assert [change["devices"] for change in changes] == [[lost]]


OWN_UPDATES = {
    # the step is done again by those who are left
    "backward": (5, Lost("4", 3, 3)),
    # its updates were taken, and only the outer step is done again
    "averaging": (4, Lost("4", 4, 3)),
    # the step counts, its outer step comes later
    "update": (5, Lost("4", 4, 4)),
}


@pytest.mark.parametrize("kind", ["fixed", pytest.param("stochastic", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "phase",
    [pytest.param(p, marks=() if p == "averaging" else pytest.mark.slow) for p in OWN_UPDATES],
)
def test_devices_that_update_by_themselves(phase: str, kind: str, tmp_path: Path) -> None:
    """What the lost one did since the last outer step is lost with it, and nothing counts twice."""
    every, lost = OWN_UPDATES[phase]
    plan = plan_of(kind).replace(sync=Sync(every, OuterOptimizer()))
    done = hurt(plan, tmp_path, lost.device, phase, *_settings())
    assert done.codes == [0, 0, 0, 0, KILLED, 0], done.error
    losses, changes = told(done)
    assert [change["devices"] for change in changes] == [[lost.device]]
    assert sorted(losses) == list(range(STEPS))
    if kind == "fixed":
        steps = train_apart(plan, STEPS, OptimizerConfig(**SETTINGS), lost)
        expected = [loss for loss, _ in steps]
        np.testing.assert_allclose([losses[t] for t in range(STEPS)], expected, rtol=TOLERANCE)


TWO_CLOCKS = {
    # the step is done again by those who are left, with the region's mean gradient of these
    ("another", "backward", 5): (3, 3),
    ("alone", "backward", 5): (3, 3),
    # gradients of the region were being averaged
    ("another", "averaging", 5): (3, 3),
    # its updates were taken, and only the outer step is done again
    ("another", OUTER, 4): (4, 3),
    ("alone", OUTER, 4): (4, 3),
}
"""Whether there is another of the lost one's region and stage; phase and H."""


@pytest.mark.parametrize(
    ("kind", "phase", "every"),
    [
        pytest.param(*p, marks=() if p[:2] == ("another", OUTER) else pytest.mark.slow)
        for p in TWO_CLOCKS
    ],
)
def test_regions_average_in_every_step(kind: str, phase: str, every: int, tmp_path: Path) -> None:
    """What a lost device's gradients did to others of its region counts, as they have it."""
    plan = straight(batch=7) if kind == "another" else flow()
    plan = plan.replace(sync=Sync(every, OuterOptimizer()))
    alone = [g.members[0] for j in range(2) for g in plan.averaging[j][0] if len(g.members) == 1]
    ids = plan.cluster.network.ids
    lost = ids[alone[-1] if alone else 4]
    settings = SETTINGS | {"eps": 1e-5}
    done = hurt(plan, tmp_path, lost, phase, *_words(settings))
    assert done.codes == [KILLED if d == lost else 0 for d in ids], done.error
    losses, changes = told(done)
    assert [change["devices"] for change in changes] == [[lost]]
    when = Lost(lost, *TWO_CLOCKS[kind, phase, every])
    expected = [loss for loss, _ in train_apart(plan, STEPS, OptimizerConfig(**settings), when)]
    np.testing.assert_allclose([losses[t] for t in range(STEPS)], expected, rtol=TOLERANCE)


DELAYED = {
    # a step within a period
    ("backward", 3, 5): Lost("4", 3, 3),
    # the step beside which changes are averaged is done again, and they are averaged again
    ("backward", 4, 4): Lost("4", 4, 3),
    # its updates were taken, and only the outer step is done again
    (OUTER, 4, 4): Lost("4", 5, 3),
    # after the last step: only the outer step is to come
    (OUTER, STEPS - 1, STEPS): Lost("4", STEPS, STEPS - 1),
}


@pytest.mark.parametrize("kind", ["fixed", pytest.param("stochastic", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("phase", "step", "every"),
    [pytest.param(*p, marks=() if p[0] == OUTER else pytest.mark.slow) for p in DELAYED],
)
def test_averaging_beside_the_next_step(
    phase: str, step: int, every: int, kind: str, tmp_path: Path
) -> None:
    """Outer steps come a step late; one that was begun is begun again by those who are left."""
    lost = DELAYED[phase, step, every]
    sync = Sync(every, OuterOptimizer(), delayed=True)
    plan, trained = plan_of(kind).replace(sync=sync), tmp_path / "trained"
    more = (*_settings(), "--export", str(trained))
    done = hurt(plan, tmp_path, lost.device, phase, *more, step=step)
    assert done.codes == [0, 0, 0, 0, KILLED, 0], done.error
    losses, changes = told(done)
    assert [change["devices"] for change in changes] == [[lost.device]]
    assert sorted(losses) == list(range(STEPS))
    if kind == "fixed":
        *_, (_, held) = steps = list(train_apart(plan, STEPS, OptimizerConfig(**SETTINGS), lost))
        expected = [loss for loss, _ in steps]
        np.testing.assert_allclose([losses[t] for t in range(STEPS)], expected, rtol=TOLERANCE)
        # after the last outer step, of which no loss tells
        file = trained / "model-00001-of-00003.safetensors"
        written = read_tensors(file, hashlib.sha256(file.read_bytes()).hexdigest())
        (stem,) = (t for name, t in written.items() if name.endswith("wte.weight"))
        (own,) = (p.detach() for p in held[0] if p.shape == stem.shape)
        np.testing.assert_allclose(stem, own, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [0.12, 0.16, 0.2, 0.24, 0.28])
def test_loss_during_exchange_of_microbatch_counts(late_s: float, tmp_path: Path) -> None:
    """Some have all of them and go on, others hear of the loss first: the step counts for all."""
    plan = plan_of().replace(sync=Sync(4, OuterOptimizer(), delayed=True))
    done = hurt(plan, tmp_path, "4", COUNTED, *_settings(), late="1", late_s=late_s)
    assert done.codes == [0, 0, 0, 0, KILLED, 0], done.error
    losses, _ = told(done)
    steps = train_apart(plan, STEPS, OptimizerConfig(**SETTINGS), Lost("4", 4, 3))
    expected = [loss for loss, _ in steps]
    np.testing.assert_allclose([losses[t] for t in range(STEPS)], expected, rtol=TOLERANCE)


@pytest.mark.slow
def test_the_last_outer_step_is_taken_once(tmp_path: Path) -> None:
    """Lost when all is done, before all know it: the model is that of a run without a loss."""
    workload = replace(bytes_workload(), batch_samples=8)
    sync = Sync(5, OuterOptimizer(), delayed=True)
    plan, held = make_plan(GRID, workload=workload).replace(sync=sync), tmp_path / "held.txt"
    held.write_text("the fault is in the plan, or else in the stars. " * 40)
    more = ("--data", str(held), "--eval-data", str(held), "--eval-every", "4", *_settings())
    found: list[dict[str, Any]] = []
    for device in ("none", "4"):
        folder = tmp_path / device
        folder.mkdir()
        done = hurt(plan, folder, device, LEAVING, *more, "--export", str(folder / "trained"))
        assert done.codes == [KILLED if d == device else 0 for d in IDS], done.error
        tensors: dict[str, Any] = {}
        for file in sorted((folder / "trained").glob("*.safetensors")):
            tensors |= read_tensors(file, hashlib.sha256(file.read_bytes()).hexdigest())
        found.append(tensors)
    for name, tensor in found[0].items():
        np.testing.assert_allclose(tensor, found[1][name], rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["backward", "averaging"])
def test_connection_reset_where_devices_update_by_themselves(phase: str, tmp_path: Path) -> None:
    """A step or the averaging after it is done again, and nobody's updates are lost."""
    plan = plan_of().replace(sync=Sync(4, OuterOptimizer()))
    done = hurt(plan, tmp_path, "1", phase, *_settings(), fault="tear")
    assert done.codes == [0] * len(IDS), done.error
    losses, changes = told(done)
    assert [change["event"] for change in changes] == ["torn"]
    expected = [loss for loss, _ in train_apart(plan, STEPS, OptimizerConfig(**SETTINGS))]
    np.testing.assert_allclose([losses[t] for t in range(STEPS)], expected, rtol=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "averaging"])
def test_two_at_once(phase: str, tmp_path: Path) -> None:
    """Neighbours, of two stages: whoever is noticed first, both are left behind."""
    plan = plan_of()
    done = hurt(plan, tmp_path, "0+4", phase)
    assert done.codes == [KILLED, 0, 0, 0, KILLED, 0], done.error
    losses, changes = told(done)
    require_equal(losses, plan)
    assert sorted(name for change in changes for name in change["devices"]) == ["0", "4"]


@pytest.mark.parametrize(
    ("phase", "step"),
    [
        (EVALUATING, 3),
        # after the last step: nobody has left yet
        pytest.param(EVALUATING, STEPS - 1, marks=pytest.mark.slow),
        pytest.param("forward", 3, marks=pytest.mark.slow),
        pytest.param("update", 3, marks=pytest.mark.slow),
    ],
)
def test_held_out_text(phase: str, step: int, tmp_path: Path) -> None:
    """Read after the same steps, with the same losses, each told once; who is lost or not."""
    workload = replace(bytes_workload(), batch_samples=8)
    plan, held = make_plan(GRID, workload=workload), tmp_path / "held.txt"
    held.write_text("the fault is in the plan, or else in the stars. " * 40)
    more = ("--data", str(held), "--eval-data", str(held), "--eval-every", "4", *_settings())
    found = []
    for device, folder in (("4", tmp_path / "hurt"), ("none", tmp_path / "whole")):
        folder.mkdir()
        done = hurt(plan, folder, device, phase, *more, step=step)
        assert done.codes == [KILLED if d == device else 0 for d in IDS], done.error
        events = [json.loads(line) for line in done.out.splitlines()]
        evaluated = [event for event in events if event["event"] == "evaluated"]
        assert [event["steps"] for event in evaluated] == [4, 8, 12, 16, 20]
        found.append([event["loss"] for event in evaluated])
    np.testing.assert_allclose(found[0], found[1], rtol=TOLERANCE)
    assert found[0][-1] < found[0][0]


@pytest.mark.slow
def test_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    """The step before counts; the next checkpoint is of those who are left."""
    plan, folder = plan_of(), tmp_path / "kept"
    more = ("--checkpoint", str(folder), "--every", "4")
    done = hurt(plan, tmp_path, "4", WRITING, *more)
    assert done.codes == [0, 0, 0, 0, KILLED, 0], done.error
    losses, (lost,) = told(done)
    require_equal(losses, plan)
    assert lost["step"] == 4
    assert latest_step(folder, range(5)) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("device", ["0", "4"])
def test_a_stopped_device_is_left_behind(device: str, tmp_path: Path) -> None:
    """SIGSTOP for longer than the patience: when it goes on it finds that, and ends."""
    plan = plan_of()

    def resume() -> None:
        until = time.monotonic() + 60
        while not (tmp_path / "when").exists() and time.monotonic() < until:
            time.sleep(0.1)
        time.sleep(8)
        os.kill(int((tmp_path / "who").read_text()), signal.SIGCONT)

    thread = threading.Thread(target=resume, daemon=True)
    thread.start()
    done = hurt(plan, tmp_path, device, "backward", "--patience", "4", fault="stop")
    thread.join()
    assert done.codes == [LEFT if d == device else 0 for d in IDS], done.error
    assert f"the others continue without device '{device}'" in done.error
    require_equal(told(done)[0], plan)


@pytest.mark.slow
@pytest.mark.skipif(bool(NO_NETWORK), reason=NO_NETWORK)
@pytest.mark.parametrize("others", [(0, 1, 2, 3, 5), (5,)])
def test_a_cut(others: tuple[int, ...]) -> None:
    """One is left behind, of two neighbours either; connections stay open, nothing comes."""
    want = losses_without_fault()
    row = cut("cut", 4, others, "averaging", want)
    assert row.seconds is not None and row.left == []
    assert sorted(row.codes) == [0] * 5 + [LEFT if len(others) == 1 else FAILED]
    assert row.off is not None and row.off < TOLERANCE
    assert len(row.reported) == 2 and "takes over: 5 devices continue" in row.reported[0]


@pytest.mark.slow
def test_a_stages_last_device(tmp_path: Path) -> None:
    """There is nobody to go on with: all end with one line that names stage and device."""
    plan = make_plan([[0, 1, 2]], workload=tiny_workload(batch_samples=8))
    done = hurt(plan, tmp_path, "1", "forward", "--checkpoint", str(tmp_path / "kept"), "--every=2")
    assert done.codes == [FAILED, KILLED, FAILED]
    assert set(done.error.splitlines()) == {
        f"{PREFIX}device '1' is gone: its process has ended; stage 1 has no device left, it had "
        f"'1'; continue after 2 steps with --resume {tmp_path / 'kept'}"
    }


def come_back(
    plan: TrainingPlan, steps: int, folder: Path, *more: str, device: str = "4"
) -> tuple[int, dict[int, float]]:
    """Killed in its fourth step and started again; when it came, and losses."""
    save_plan(plan, folder / "plan.json")
    ids = plan.cluster.network.ids
    given = {"device": device, "fault": "kill", "phase": "backward", "step": 3}
    words = [sys.executable, "-m", "tests.executor.elastic_rank"]
    words += [json.dumps(given | {"folder": str(folder)})]
    words += [str(folder / "plan.json"), "--devices", *ids, "--device", "cpu", "--events"]
    words += ["--elastic", "--steps", str(steps), "--patience", "20", *more]
    lines: list[str] = []
    said: list[str] = []
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    code, reason = run_local(words, ids, environment, lines.append, said.append, restarts=1)
    assert (code, reason) == (0, None), said
    losses, changes = told(Done(0, "\n".join(lines), "", []))
    assert [(c["event"], c["devices"]) for c in changes] == [("lost", [device]), ("came", [device])]
    assert said == [f"planner run: restarting device {device!r}, which was ended by SIGKILL"]
    assert changes[1]["go_on"] == list(ids) and sorted(losses) == list(range(steps))
    return changes[1]["step"], losses


@pytest.mark.slow
def test_a_device_comes_back(tmp_path: Path) -> None:
    """As ``planner run --elastic`` starts it again: at a step's end, with a peer's moments."""
    plan, steps, beyond = plan_of(), 600, 100
    came, losses = come_back(plan, steps, tmp_path)
    expected = single(plan, min(came + beyond, steps))
    found = [losses[t] for t in range(len(expected))]
    # rounding adds up: equal as two ways to sum are after so many steps
    np.testing.assert_allclose(found[:STEPS], expected[:STEPS], rtol=TOLERANCE)
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.slow
def test_a_device_comes_back_between_outer_steps(tmp_path: Path) -> None:
    """With what all agreed on last; after the next outer step it has what the others have."""
    plan, steps, kept = plan_of().replace(sync=Sync(200, OuterOptimizer())), 800, tmp_path / "kept"
    came, losses = come_back(plan, steps, tmp_path, "--checkpoint", str(kept), "--every", "400")
    assert 3 < came < steps
    assert losses[steps - 1] < losses[came] - 0.1
    for group in plan.assignment.groups:
        shards = [read_shard(kept, steps, d, plan) for d in group]
        for name in (name for name in shards[0] if name.startswith("parameter/")):
            assert all(torch.equal(shards[0][name], shard[name]) for shard in shards[1:]), name


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_a_device_comes_back_into_a_region(alone: bool, tmp_path: Path) -> None:
    """With what another of its region has, or else with what all have agreed on."""
    # no outer step makes all equal: regions differ, and devices of one do not
    plan, steps = flow().replace(sync=Sync(1000, OuterOptimizer())), 750
    regions = [group.members for rounds in plan.averaging for group in rounds[0]]
    lost = next(members[-1] for members in regions if (len(members) == 1) is alone)
    ids = plan.cluster.network.ids
    came, losses = come_back(plan, steps, tmp_path, device=ids[lost])
    assert 3 < came < steps
    assert losses[steps - 1] < losses[came] - 0.1
    kept = [(tmp_path / f"{name.replace('/', '-')}.parameters").read_text() for name in ids]
    assert [len({kept[d] for d in members}) for members in regions] == [1] * len(regions)
    for group in plan.assignment.groups:
        assert len({kept[d] for d in group}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("alone", [False, True])
def test_outer_steps_after_a_device_came_into_a_region(alone: bool, tmp_path: Path) -> None:
    """Its change counts as that of its region, or begins with it: as in one process."""
    plan, steps, beyond = flow().replace(sync=Sync(50, OuterOptimizer())), 600, 120
    regions = [group.members for rounds in plan.averaging for group in rounds[0]]
    lost = next(members[0] for members in regions if (len(members) == 1) is alone)
    name = plan.cluster.network.ids[lost]
    settings: dict[str, Any] = {"eps": 1e-5}
    came, losses = come_back(plan, steps, tmp_path, *_words(settings), device=name)
    when, count = Lost(name, 3, 3, came), min(came + beyond, steps)
    expected = [x for x, _ in train_apart(plan, count, OptimizerConfig(**settings), when)]
    found = [losses[t] for t in range(count)]
    np.testing.assert_allclose(found[:STEPS], expected[:STEPS], rtol=TOLERANCE)
    # rounding adds up
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.slow
def test_regions_stay_equal_from_a_checkpoint_of_those_who_are_left(tmp_path: Path) -> None:
    """Moments differ between regions: the whole plan takes one region's for all of one."""
    plan, kept = straight(), tmp_path / "kept"
    ids, path = plan.cluster.network.ids, tmp_path / "plan.json"
    more = (*_settings(), "--checkpoint", str(kept), "--every")
    done = hurt(plan, tmp_path, ids[4], "forward", *more, str(STEPS))
    assert done.codes == [KILLED if d == ids[4] else 0 for d in ids], done.error
    words = (*more, "5", "--resume", str(kept), "--steps", str(STEPS + 5))
    code, losses, said = losses_by_step(path, ids, *words)
    assert code == 0 and sorted(losses) == list(range(STEPS, STEPS + 5)), said
    for rounds in plan.averaging:
        for group in rounds[0]:
            one, other = (read_shard(kept, STEPS + 5, d, plan) for d in group.members)
            assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.slow
def test_a_device_comes_back_beside_averaging(tmp_path: Path) -> None:
    """Delayed: it adds nothing to a change that was begun, and later has what the others have."""
    plan, steps = plan_of().replace(sync=Sync(50, OuterOptimizer(), delayed=True)), 800
    came, losses = come_back(plan, steps, tmp_path)
    assert 3 < came < steps
    assert losses[steps - 1] < losses[came] - 0.1


@pytest.mark.slow
def test_the_store_on_a_node_that_stays(tmp_path: Path) -> None:
    """Ranks that are started one by one: without the first, and with it again."""
    plan = make_plan([[0, 1], [2, 3]], workload=tiny_workload(batch_samples=8))
    path, steps = tmp_path / "plan.json", 600
    save_plan(plan, path)
    given = {"device": "0", "fault": "kill", "phase": "forward", "step": 3}
    words = hurt_words(path, given | {"folder": str(tmp_path)}, "--elastic", "--events")
    words += ["--steps", str(steps)]
    with Started(tmp_path) as run:
        port = run.environment["MASTER_PORT"]
        served = [sys.executable, "-m", "planner.executor.serve_store", "--port", port]
        served += ["--bind", "127.0.0.1"]
        run.environment |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        store = subprocess.Popen(
            served, env=run.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        try:
            assert store.stdout.readline() == f"the store is served on port {port} of 127.0.0.1\n"
            twice = subprocess.run(served, env=run.environment, capture_output=True, text=True)
            assert twice.returncode == REFUSED and twice.stderr.count("\n") == 1
            for d in "0123":
                run.start(d, d, words)
            assert run.codes(["0"]) == {"0": KILLED}
            run.start("again", "0", words)
            names = ["1", "2", "3", "again"]
            assert run.codes(names) == dict.fromkeys(names, 0)
        finally:
            store.kill()
            store.communicate()
        out = "".join((tmp_path / f"{name}.out").read_text() for name in ("0", *names))
    losses, changes = told(Done(0, out, "", []))
    assert [(c["event"], c["devices"]) for c in changes] == [("lost", ["0"]), ("came", ["0"])]
    require_equal(losses, plan)
    assert sorted(losses) == list(range(steps))


class Threads:
    """Devices of one process, on one store, without connections."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.store = torch.distributed.HashStore()
        self.memberships = []
        for rank, name in enumerate(names):
            detector = FailureDetector(name, Shutdown(), 1.0)
            detector._heartbeat = Told(self.store)  # type: ignore[assignment]
            ranks = RankGroup(rank, len(names), self.store, names, detector)
            self.memberships.append(Membership(ranks, 5.0))
            self.memberships[-1].start(7)

    def look(self) -> None:
        """What the threads of signs of life do."""
        for membership in self.memberships:
            membership._detector.heartbeat.look()  # type: ignore[attr-defined]


class Told:
    """Signs of life that are looked at when the test says so."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self._jobs: list[Any] = []
        self._heeded: dict[str, Any] = {}

    def set_watched_rank(self, *_: Any) -> None:
        """Nobody."""

    def poll(self, keys: Any) -> None:
        """As the real one."""
        self._heeded = keys

    def run_later(self, job: Any) -> None:
        """As the real one."""
        self._jobs.append(job)

    def look(self) -> None:
        """Once."""
        while self._jobs:
            self._jobs.pop(0)(self._store)
        for key, heed in self._heeded.items():
            heed(self._store.get(key).decode())
        while self._jobs:
            self._jobs.pop(0)(self._store)


def test_an_update_is_taken_by_all_or_none() -> None:
    """The last vote decides; a loss that was seen before does, and nothing changes it after."""
    run = Threads(("a", "b", "c"))
    commits = [
        StoreStepCommitter(membership, membership.ranks(rank), {0, 2}, 99)
        for rank, membership in enumerate(run.memberships)
    ]
    answers: dict[int, str] = {}

    def vote(rank: int, step: int) -> None:
        try:
            commits[rank].commit_step(step, float(rank))
            answers[rank] = "taken"
        except DeviceLost:
            answers[rank] = "again"

    def all_vote(ranks: tuple[int, ...], step: int) -> list[threading.Thread]:
        threads = [threading.Thread(target=vote, args=(r, step), daemon=True) for r in ranks]
        for thread in threads:
            thread.start()
        return threads

    for thread in all_vote((0, 1, 2), 7):
        thread.join(10)
    assert answers == dict.fromkeys(range(3), "taken")
    assert commits[0].loss(7) == 2.0 and not commits[0].admits_joiners
    answers.clear()
    waiting = all_vote((0, 1), 8)
    time.sleep(0.2)
    assert answers == {}
    run.memberships[0].report_lost(["c"], "c is gone")
    run.look()
    for thread in waiting:
        thread.join(10)
    vote(2, 8)  # it was alive after all, and is the last to vote
    assert answers == dict.fromkeys(range(3), "again")
    assert [commit.committed_step for commit in commits] == [7, 7, 7]


def test_a_connection_that_ends_while_votes_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it was to send is missed by one that does not vote: the step is done again by all."""
    monkeypatch.setattr("planner.executor.elastic.step_commit.RESET_CAUSE_S", 0.05)
    run = Threads(("a", "b"))
    a, b = (
        StoreStepCommitter(membership, membership.ranks(rank), {0}, 99)
        for rank, membership in enumerate(run.memberships)
    )
    error_latch = ErrorLatch()
    a.abort_on(error_latch)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(a.commit_step, 7, 0.5)
        while not run.store.check(["generation/0/votes"]):
            time.sleep(0.01)
        error_latch.fail(ConnectionReset("device 'b' closed its connection", "b"))
        until = time.monotonic() + 10
        while not waits.done() and time.monotonic() < until:
            run.look()
            time.sleep(0.05)
        assert isinstance(waits.exception(10), DeviceLost)
    assert str(run.memberships[1].rank_lost.error) == "device 'a' lost its connection to 'b'"
    # noticed before the vote, it is told by whoever takes the step
    with pytest.raises(ConnectionReset):
        a.commit_step(7, 0.5)
    with pytest.raises(DeviceLost):
        b.commit_step(7, None)


def test_an_outer_step_is_taken_by_all_or_none() -> None:
    """A vote of its own: the update before it was taken, and stays so."""
    run = Threads(("a", "b"))
    commits = [
        StoreStepCommitter(membership, membership.ranks(rank), {0}, 99)
        for rank, membership in enumerate(run.memberships)
    ]

    def both(work: Callable[[StoreStepCommitter], None]) -> list[BaseException | None]:
        with ThreadPoolExecutor(2) as pool:
            return [done.exception(10) for done in [pool.submit(work, one) for one in commits]]

    assert both(lambda commit: commit.commit_step(4, 0.5)) == [None, None]
    assert both(lambda commit: commit.commit_outer_step(4)) == [None, None]
    assert both(lambda commit: commit.commit_step(5, 0.5)) == [None, None]
    run.memberships[0].report_lost(["b"], "b is gone")
    run.look()  # what is said now is heard
    run.look()
    for commit in commits:
        # in turns: were all votes there before the first is answered, all would take the step
        with pytest.raises(DeviceLost):
            commit.commit_outer_step(5)
    assert [commit.committed_step for commit in commits] == [5, 5]
    # told although the step is not over
    assert commits[0].loss(5) == 0.5


def test_no_key_is_left_of_a_collective_that_was_interrupted() -> None:
    """Nor of those before it, once the next generation has begun."""
    run = Threads(("a", "b"))
    groups = [membership.ranks(rank) for rank, membership in enumerate(run.memberships)]
    keys = ["first/0", "first/1", "second/count", "second/all", "third/0"]
    with ThreadPoolExecutor(2) as pool:
        assert (
            list(pool.map(lambda g: g.all_gather("first", str(g.rank)), groups)) == [["0", "1"]] * 2
        )
        list(pool.map(lambda g: g.barrier("second"), groups))
        run.look()
        assert not any(run.store.check([f"generation/0/{key}"]) for key in keys[:2])
        interrupted = pool.submit(groups[0].all_gather, "third", "0")
        until = time.monotonic() + 10
        while not run.store.check(["generation/0/third/0"]) and time.monotonic() < until:
            time.sleep(0.01)
        run.memberships[1].report_lost(["a"], "a is gone")
        run.look()
        run.look()
        with pytest.raises(DeviceLost):
            interrupted.result(10)
    for group in groups:
        group.delete_used_keys()
    run.look()
    assert not any(run.store.check([f"generation/0/{key}"]) for key in keys)


def test_no_thread_outlives_its_connections() -> None:
    """A thread that receives ends with its generation, before the next one begins."""
    run = Threads(("a", "b"))
    group = run.memberships[0].ranks(0)
    here, there = socket.socketpair()
    with there, group.error_latch() as error_latch, ExitStack() as connections:
        connections.callback(lambda: here.shutdown(socket.SHUT_RDWR))
        thread = WorkerThread("receives", error_latch)
        thread.submit(lambda: receive_into(here, memoryview(bytearray(8))))
        time.sleep(0.05)
        assert thread.is_alive()
    assert not thread.is_alive()
    here.close()


def test_who_goes_on_is_agreed() -> None:
    """Accusations of the accused do not count; who comes is let in, and has no parameters."""
    run = Threads(("a", "b", "c"))
    a, b, c = run.memberships
    b.report_lost(["c"], "c is gone")
    run.look()
    c.report_lost(["a"], "a is gone")
    run.look()
    assert list(a.lost) == list(b.lost) == list(c.lost) == ["c"]
    # both know that of step 9 only the outer one is to be done; who comes has not to know
    threads = [
        threading.Thread(target=r.next_generation, args=(9, True), daemon=True) for r in (a, b)
    ]
    for thread in threads:
        thread.start()
    with pytest.raises(Evicted, match="the others continue without device 'c': c is gone"):
        c.next_generation(9)
    for thread in threads:
        thread.join(10)
    assert a.generation == b.generation and a.generation.outer_step_due
    assert (a.generation.members, a.generation.step, a.generation.joined, a.generation.lost) == (
        *(("a", "b"), 9, ()),
        {"c": "c is gone"},
    )
    # the same device, started again
    again = joins_late(run, 60.0)
    comes = threading.Thread(target=again.join, daemon=True)
    comes.start()
    until = time.monotonic() + 10
    while not a.joiners and time.monotonic() < until:
        run.look()
        time.sleep(0.05)
    assert a.joiners == b.joiners == ("c",)
    threads = [threading.Thread(target=r.next_generation, args=(12,), daemon=True) for r in (a, b)]
    for thread in threads:
        thread.start()
    for thread in (*threads, comes):
        thread.join(10)
    assert a.generation == b.generation == again.generation
    assert (a.generation.members, a.generation.step, a.generation.joined) == (
        ("a", "b", "c"),
        12,
        ("c",),
    )
    assert not a.generation.outer_step_due


def test_connection_reset_between_two_that_live() -> None:
    """All go on, with the reason; a device that is lost at the same time is not among them."""
    run = Threads(("a", "b", "c"))
    a, b, c = run.memberships
    b.report_reset("c", "device 'c' closed its connection")
    run.look()  # what is said now is heard
    run.look()
    assert [str(r.rank_lost.error) for r in run.memberships] == [
        "device 'c' closed its connection"
    ] * 3
    threads = [
        threading.Thread(target=r.next_generation, args=(9,), daemon=True) for r in run.memberships
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert a.generation == b.generation == c.generation
    assert (a.generation.members, a.generation.joined, a.generation.lost) == (
        ("a", "b", "c"),
        (),
        {},
    )
    assert a.generation.reset == "device 'c' closed its connection"
    a.report_reset("b", "torn")
    b.report_lost(["c"], "c is gone")
    run.look()
    run.look()
    threads = [threading.Thread(target=r.next_generation, args=(9,), daemon=True) for r in (a, b)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (a.generation.members, a.generation.lost, a.generation.reset) == (
        ("a", "b"),
        {"c": "c is gone"},
        "",
    )


@pytest.mark.parametrize("alive", [True, False])
def test_who_hears_nobody_looks_for_signs_of_life(
    alive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where others give them, this one is gone; else they are."""
    monkeypatch.setattr("planner.executor.elastic.membership.RECHECK_S", 0.05)
    run = Threads(("a", "b", "c", "d"))
    for rank in range(4):
        run.store.set(f"heartbeat/{rank}", "7")
    b = run.memberships[1]
    b.report_lost(["a", "c"], "silent", all_silent=True)
    b.report_lost(["a", "c"], "silent", all_silent=True)  # at every look
    run.look()
    if alive:
        run.store.set("heartbeat/2", "8")
    until = time.monotonic() + 10
    while b.rank_lost.error is None and time.monotonic() < until:
        time.sleep(0.05)
        run.look()
    assert set(b.lost) == ({"b"} if alive else {"a", "c"})


def test_who_tears_too_often_costs_one_device() -> None:
    """Whose connection was told of first; what the others see follows, and does not count."""
    names = ("a", "b", "c", "d")
    run = Threads(names)
    for tears in range(1, MAX_RESETS + 2):
        for membership, other in zip(run.memberships, ("b", "c", "d", "a"), strict=True):
            membership.report_reset(other, f"device {other!r} closed its connection")
        run.look()
        run.look()
        assert all(membership.rank_lost.error is not None for membership in run.memberships)
        goes_on = (
            run.memberships
            if tears <= MAX_RESETS
            else [r for r in run.memberships if r.name != "b"]
        )
        threads = [
            threading.Thread(target=r.next_generation, args=(7,), daemon=True) for r in goes_on
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        left = tuple(membership.name for membership in goes_on)
        assert [membership.generation.members for membership in goes_on] == [left] * len(left)
        assert run.memberships[0].generation.resets == (tears if tears <= MAX_RESETS else 0)
    # a step that is done makes good
    a, c, d = goes_on
    a.report_reset("c", "device 'c' closed its connection")
    run.look()
    run.look()
    threads = [
        threading.Thread(target=r.next_generation, args=(8,), daemon=True) for r in (a, c, d)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert (a.generation.step, a.generation.resets, a.generation.members) == (8, 1, ("a", "c", "d"))


def test_who_took_itself_for_lost_does_not_wait_for_those_who_vanished() -> None:
    """It is cut off from its neighbours, and they give no sign of life in the store either."""
    run = Threads(("a", "b", "c"))
    run.memberships[2].report_lost(["c"], "device 'c' receives no heartbeats")
    run.look()
    with pytest.raises(Evicted, match="receives no heartbeats; no other member is alive"):
        run.memberships[2].next_generation(9)


def joins_late(run: Threads, heartbeat_timeout_s: float, wait_s: float = 60.0) -> Membership:
    """Of a third device that comes when others have begun."""
    detector = FailureDetector("c", Shutdown(), heartbeat_timeout_s)
    detector._heartbeat = Told(run.store)  # type: ignore[assignment]
    return Membership(
        RankGroup(2, 3, run.store, ("a", "b", "c"), detector, joins_late=True), wait_s
    )


def test_who_comes_in_vain() -> None:
    """Nobody gives a sign of life, another process has the name, or all steps are done."""
    run = Threads(("a", "b", "c"))
    with pytest.raises(Evicted, match="device 'c' cannot join: no member is alive"):
        joins_late(run, 0.2).join()
    with pytest.raises(Evicted, match=r"'c' is still a member after 0.2 s; check whether another"):
        joins_late(run, 60.0, 0.2).join()
    run.memberships[0].finish()
    assert not joins_late(run, 60.0).join()


@pytest.mark.parametrize(
    ("event", "line"),
    [
        (
            {"event": "lost", "why": "device 'a' is gone", "taken_over_by": ["b"]},
            "step    3  device 'a' is gone; 'b' takes over: 2 devices continue, 0.5 s lost",
        ),
        (
            {"event": "lost", "why": "device 'a' is gone", "taken_over_by": ["b", "c"]},
            "step    3  device 'a' is gone; 'b', 'c' take over: 2 devices continue, 0.5 s lost",
        ),
        (
            {"event": "came", "devices": ["a"]},
            "step    3  device 'a' has joined: 2 devices continue, 0.5 s lost",
        ),
        (
            {"event": "came", "devices": ["a", "b"]},
            "step    3  devices 'a', 'b' have joined: 2 devices continue, 0.5 s lost",
        ),
    ],
)
def test_one_and_several_are_told_apart(event: dict[str, Any], line: str) -> None:
    """As people read it."""
    assert event_line(event | {"step": 3, "go_on": ["b", "c"], "lost_s": 0.5}) == line


def test_what_goes_without(tmp_path: Path) -> None:
    """One line each, before anything runs."""
    plan = plan_of()
    save_plan(plan, tmp_path / "plan.json")
    words = [str(tmp_path / "plan.json"), "--devices", *IDS, "--elastic", "--own-pace"]
    done = run_ranks(1, "planner.executor.__main__", *words)
    assert done.error == f"{PREFIX}device '0': --elastic conflicts with --own-pace; leave one out\n"


def test_a_refusal_of_all_ranks_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With its own exit code: no rank leaves as if the others could continue without it."""
    plan = make_plan(GRID, workload=replace(bytes_workload(), batch_samples=8))
    save_plan(plan, tmp_path / "plan.json")
    # the first piece is read before training, the next one some steps later
    monkeypatch.setattr("planner.executor.data.sources.PIECE_BYTES", 1024)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "text").write_bytes(b"a line of text\n" * 200 + b"\xff and so on\n")
    words = [str(tmp_path / "plan.json"), "--devices", *IDS, "--device", "cpu", "--elastic"]
    words += ["--steps", "100", "--data", str(tmp_path / "texts"), "--shuffle", "1"]
    done = run_ranks(6, "planner.executor.__main__", *words, go_on=True)
    assert REFUSED in done.codes and set(done.codes) <= {REFUSED, FAILED}, done.error
    assert "is not UTF-8 text" in done.error


def test_divergence_ends_the_run(tmp_path: Path) -> None:
    """As a failure of all ranks: the input was usable, and none can continue alone."""
    save_plan(plan_of("fp16"), tmp_path / "plan.json")
    words = [str(tmp_path / "plan.json"), "--devices", *IDS, "--device", "cpu", "--elastic"]
    words += ["--steps", "100", "--optimizer", "sgd", "--learning-rate", "1e20"]
    done = run_ranks(6, "planner.executor.__main__", *words, go_on=True)
    assert set(done.codes) == {FAILED}, done.error
    assert "gradients overflow fp16 even with a loss scale of 1" in done.error
